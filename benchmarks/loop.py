"""What our training step costs over a bare PyTorch loop: `python -m benchmarks.loop`.

The same model, the same batch, the same optimizer. The bare loop is what one would write by hand in
ten lines. Both take turns, step by step, so that noise of the machine hits both alike.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.table import write_table
from shardtune.core.lr_schedule import Schedule
from shardtune.core.setup import EngineSetup, OptimizerSetup
from shardtune.core.step import IGNORED, MicroBatch
from shardtune.core.world import World
from shardtune.engine.native import NativeEngine

LIMIT = 1.03
VOCABULARY, ROWS, LENGTH = 8192, 4, 256


def make_model() -> LlamaForCausalLM:
    """38 million parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=9,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def make_batch(step: int) -> MicroBatch:
    ids = torch.randint(
        0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step)
    )
    targets = torch.roll(ids, -1, dims=1)
    targets[:, -1] = IGNORED
    positions = torch.arange(LENGTH).expand(ROWS, LENGTH)
    return MicroBatch(ids, positions, targets, (), ROWS * LENGTH, ROWS * (LENGTH - 1))


class BareLoop:
    """The step that one would write by hand."""

    def __init__(self, model: nn.Module, precision: str) -> None:
        self.model = model
        self.bf16 = precision == "bf16"
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-4, weight_decay=0.0, fused=True
        )

    def step(self, batch: MicroBatch) -> float:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            logits = self.model(input_ids=batch.input_ids).logits
        loss = functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), batch.input_ids[:, 1:].flatten()
        )
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()


def measure(precision: str, steps: int) -> tuple[float, float, float, int]:
    """Median seconds of a bare step and of ours, the largest difference of loss, parameters."""
    model = make_model()
    bare = BareLoop(model.train(), precision)
    setup = EngineSetup(
        precision, OptimizerSetup(betas=(0.9, 0.999)), Schedule("constant", 1e-4, 0, 10), 1.0, 0
    )
    ours = NativeEngine(make_model(), setup, World())
    seconds: dict[str, list[float]] = {"bare": [], "ours": []}
    worst = 0.0
    for step in range(steps + 2):
        batch = make_batch(step)
        turn = {"bare": lambda b: bare.step(b), "ours": lambda b: ours.step([b]).loss}
        losses = {}
        for name in sorted(turn, reverse=bool(step % 2)):
            begun = time.perf_counter()
            losses[name] = turn[name](batch)
            if step >= 2:  # two steps to warm up
                seconds[name].append(time.perf_counter() - begun)
        worst = max(worst, abs(losses["bare"] - losses["ours"]))
    parameters = sum(p.numel() for p in model.parameters())
    bare_time, our_time = (statistics.median(seconds[name]) for name in ("bare", "ours"))
    return bare_time, our_time, worst, parameters


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30, help="measured steps of each (30)")
    steps = parser.parse_args().steps
    torch.set_num_threads(1)  # threads that wait for each other would measure the machine's load
    rows, ratios = [], []
    for precision in ("fp32", "bf16"):
        bare, ours, worst, parameters = measure(precision, steps)
        ratios.append(ours / bare)
        rows.append(
            [
                precision,
                f"{parameters / 1e6:.1f} M",
                f"{bare * 1e3:.0f} ms",
                f"{ours * 1e3:.0f} ms",
                f"{ours / bare:.3f}",
                f"{worst:.1e}",
            ]
        )
    write_table(
        "loop",
        "Step time over a bare PyTorch loop",
        ["precision", "model", "bare loop", "shardtune", "ratio", "largest difference of loss"],
        rows,
        f"Medians of {steps} steps of {ROWS} x {LENGTH} tokens, taken in turns. "
        f"A ratio above {LIMIT} is a failure.",
    )
    return int(max(ratios) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
