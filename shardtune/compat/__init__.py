"""Changes to other libraries that hold for the whole process; nothing else changes them.

- `torch_compiler`: inductor's choice of reductions (speed of norms), dynamo's limit of graphs and
  its callbacks (the watchdog's patience), one log line
- `cpu_half_precision`: aten's 16-bit products on CPUs that are slow in them (speed on those)
- `transformers_rope`: `apply_rotary_pos_emb` of transformers' families (our RoPE kernel)
- `deepspeed_process`: DeepSpeed's accelerator, ops and log; `F.linear`, which ZeRO-3 replaces
- `c_allocator`: glibc's limits for memory that is freed (memory between tensors)
- `llama_cpp_weights`: the order in which llama.cpp keeps weights (crashes on CPUs with AMX)
- `quiet`: log levels, warnings and progress bars of others

`versioned_change.py` has what they share: the versions that a change was written for, and the one
line that says what is lost where its target is another one. Training then goes on without it.
"""
