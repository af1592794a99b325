"""What the sharded engines hold on a GPU beside what their layouts predict.

    python -m benchmarks.zero_memory

One rank, so nothing is divided: what is tested is the count of bytes by state and by place. A model
of a billion random weights is trained for a few steps, all of them, in bf16 with AdamW.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from typing import Any

import torch
from pydantic import TypeAdapter
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.table import write_table
from shardtune.config.job import ModelSection, NoAdapter, TrainSection
from shardtune.core.footprint import ModelBytes, predict_held
from shardtune.core.lr_schedule import Schedule
from shardtune.core.setup import EngineSetup, OptimizerSetup
from shardtune.core.step import IGNORED, MicroBatch
from shardtune.core.world import World
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.model_files import ModelFiles
from shardtune.parallel import Strategy

GIB = 1 << 30
ROWS, LENGTH, STEPS = 4, 1024, 4
CPU = {"device": "cpu"}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ZeRO-1": {"stage": 1},
    "ZeRO-2": {"stage": 2},
    "ZeRO-3": {"stage": 3},
    "ZeRO-2, optimizer on the CPU": {"stage": 2, "offload_optimizer": CPU},
    "ZeRO-3, optimizer on the CPU": {"stage": 3, "offload_optimizer": CPU},
}


def billion() -> LlamaConfig:
    """The shape of Llama-3.2-1B with a smaller vocabulary: 1.04 billion parameters."""
    return LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )


def batch(seed: int) -> MicroBatch:
    ids = torch.randint(0, 32000, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    targets = torch.roll(ids, -1, dims=1)
    targets[:, -1] = IGNORED
    positions = torch.arange(LENGTH).expand(ROWS, LENGTH)
    return MicroBatch(ids, positions, targets, (), ROWS * LENGTH, ROWS * (LENGTH - 1))


def measure(folder: str, zero: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own: trains, then says what is held, predicted and the peak."""
    settings = {"type": "deepspeed", "zero_optimization": zero}
    chosen: Any = TypeAdapter(Strategy).validate_json(json.dumps(settings))
    world = World(device="cuda:0")
    torch.cuda.set_device(0)
    setup = EngineSetup(
        "bf16", OptimizerSetup(), Schedule("constant", 1e-5, 0, STEPS), 1.0, 0, ROWS, 1
    )
    plan = PretrainedModelBuilder(
        ModelFiles(ModelSection(name=folder)), NoAdapter(), TrainSection(precision="bf16")
    )
    with chosen.build(plan, setup, world) as engine:
        numbers = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module().parameters())
        losses = [engine.step([batch(step)]).loss for step in range(STEPS - 1)]
        torch.cuda.reset_peak_memory_stats()
        losses.append(engine.step([batch(STEPS)]).loss)
        held = engine.held()
        peak, kept = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    # bf16 weights and gradients; fp32 masters and two moments.
    whole = ModelBytes(2 * numbers, 4 * numbers, 2 * numbers, 8 * numbers)
    predicted = predict_held(chosen.layout(), chosen.mesh(1), whole)
    return {
        "parameters": numbers,
        "losses": losses,
        "held": {f"{state} {home}": size for (state, home), size in held.bytes.items()},
        "predicted": {f"{state} {home}": size for (state, home), size in predicted.bytes.items()},
        "peak": peak,
        "kept": kept,
    }


def main() -> int:
    if len(sys.argv) == 3:
        print(json.dumps(measure(sys.argv[1], json.loads(sys.argv[2]))))
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(billion()).to(torch.bfloat16).save_pretrained(folder)
        for name, zero in STRATEGIES.items():
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.zero_memory", folder, json.dumps(zero)],
                capture_output=True,
                text=True,
            )
            if done.returncode:
                print(done.stderr[-3000:], file=sys.stderr)
                rows.append([name, "failed", done.stderr.strip().splitlines()[-1], "", "", ""])
                continue
            found = json.loads(done.stdout.strip().splitlines()[-1])
            print(json.dumps(found), file=sys.stderr)
            on = {
                what: sum(size for key, size in found[what].items() if key.endswith("gpu"))
                for what in ("held", "predicted")
            }
            on_cpu = sum(size for key, size in found["held"].items() if key.endswith("cpu"))
            sizes = (on["predicted"], on["held"], on_cpu, found["kept"], found["peak"])
            rows.append([name, *(f"{size / GIB:.2f}" for size in sizes)])
    write_table(
        "zero_memory",
        "Memory of the sharded engines on a GPU",
        [
            "strategy",
            "predicted on the GPU",
            "held on the GPU",
            "held on the CPU",
            "allocated after a step",
            "peak of a step",
        ],
        rows,
        f"GiB; one rank, 1.04 billion weights, all trained, bf16 with AdamW, {ROWS} x {LENGTH} "
        "tokens. *Predicted* is the layout's count of weights, gradients and optimizer states; "
        "*held* is the engine's own count of the real tensors. Between steps the gradients are "
        "freed; the peak has them, the activations, the logits and DeepSpeed's buckets on top.",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
