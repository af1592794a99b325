"""What a checkpoint costs: `python -m benchmarks.checkpoint`.

The stall is the time of `save` itself, and what the steps during which it is written take longer
than those around them. Size and times of writing and loading stand beside PyTorch's
distributed checkpoint and DeepSpeed's own, for the same weights and moments.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.table import write_table
from shardtune.checkpoint.async_saver import AsyncSaver, CheckpointIdentity
from shardtune.checkpoint.latest import latest_checkpoint
from shardtune.checkpoint.reader import Reader
from shardtune.core.lr_schedule import Schedule
from shardtune.core.progress import Progress
from shardtune.core.setup import EngineSetup, OptimizerSetup
from shardtune.core.step import IGNORED, MicroBatch
from shardtune.core.world import World
from shardtune.engine.native import NativeEngine
from shardtune.launch.process_group import JoinedWorld

LIMIT = 0.01
WARM = 4  # steps before the first save: the very first get their memory from the system
NEIGHBOURS = 6  # steps that one is compared with
MIB = 1 << 20


SHAPES: dict[str, dict[str, int]] = {
    "135M": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "1B": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
"""Of SmolLM2-135M and Llama-3.2-1B."""


def make_engine(shape: str, layers: int | None, device: str) -> NativeEngine:
    """A model of that shape, with weights drawn at random."""
    torch.manual_seed(0)
    wanted = SHAPES[shape] | ({} if layers is None else {"num_hidden_layers": layers})
    config = LlamaConfig(**wanted, tie_word_embeddings=True, use_cache=False)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    schedule = Schedule("constant", 1e-4, 0, 10**6)
    precision = "fp32" if device == "cpu" else "bf16"
    setup = EngineSetup(precision, OptimizerSetup(), schedule, 1.0, 0)
    return NativeEngine(model, setup, World(device=device))


def make_batch(step: int, rows: int, length: int) -> MicroBatch:
    ids = torch.randint(0, 49152, (rows, length), generator=torch.Generator().manual_seed(step))
    targets = torch.roll(ids, -1, dims=1)
    targets[:, -1] = IGNORED
    positions = torch.arange(length).expand(rows, length)
    return MicroBatch(ids, positions, targets, (), rows * length, rows * (length - 1))


@dataclass(frozen=True)
class Stall:
    """Seconds that training takes longer for saves, with what was measured for each of them."""

    step: float
    """Of a step while nothing is saved."""
    calls: list[float]
    """Of `save` itself: training stands still."""
    slower: list[float]
    """By how much the steps during which it was written were longer than those around them."""

    @property
    def extra(self) -> list[float]:
        return [call + slower for call, slower in zip(self.calls, self.slower, strict=True)]


def stall(
    engine: NativeEngine, folder: Path, every: int, saves: int, shape: tuple[int, int]
) -> Stall:
    """A save every so many steps. Steps beside one are compared with those around them, not with a
    window of their own: a machine's speed drifts by more than what is looked for."""
    saver = AsyncSaver(folder, JoinedWorld(), keep=1, background=True)
    _step(engine, saver, make_batch(0, *shape))  # there are no moments before
    _save(engine, saver, 0)  # its memory is made here
    saver.wait()
    steps = [Step(timed(partial(_step, engine, saver, make_batch(n, *shape)))) for n in range(WARM)]
    calls: list[float] = []
    for number in range(1, saves + 1):
        calls.append(timed(partial(_save, engine, saver, number)))
        for step in range(every):
            beside = number if saver.busy else None
            batch = make_batch(step, *shape)
            steps.append(Step(timed(partial(_step, engine, saver, batch)), beside))
        if saver.busy:
            sys.exit(f"a save takes longer than {every} steps: there is nothing to compare with")
        slower = longer(steps, number)
        print(f"save {number}: {calls[-1]:.2f} + {slower:.2f} s", file=sys.stderr)
    alone = statistics.median(step.seconds for step in steps if step.beside is None)
    return Stall(alone, calls, [longer(steps, number) for number in range(1, saves + 1)])


@dataclass(frozen=True)
class Step:
    seconds: float
    beside: int | None = None
    """The save that was being written meanwhile."""


def longer(steps: list[Step], save: int) -> float:
    """How much longer the steps beside a save took, each than the median of its neighbours."""
    beside = [number for number, step in enumerate(steps) if step.beside == save]
    return sum(steps[number].seconds - _around(steps, number) for number in beside)


def _around(steps: list[Step], number: int) -> float:
    alone = [other for other, step in enumerate(steps) if step.beside is None]
    near = sorted(alone, key=lambda other: abs(other - number))[:NEIGHBOURS]
    return statistics.median(steps[other].seconds for other in near)


def _save(engine: NativeEngine, saver: AsyncSaver, step: int) -> None:
    saver.save(CheckpointIdentity("run", step, "ddp", ""), *engine.shards(), Progress())


def _step(engine: NativeEngine, saver: AsyncSaver, batch: MicroBatch) -> None:
    engine.step([batch]).read()
    saver.poll()


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def timed(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def ours(engine: NativeEngine, folder: Path) -> tuple[float, float, int]:
    saver = AsyncSaver(folder, JoinedWorld(), keep=1, background=False)
    pieces, numbers = engine.shards()
    write = timed(
        lambda: saver.save(CheckpointIdentity("run", 1, "ddp", ""), pieces, numbers, Progress())
    )

    def load() -> None:
        found = latest_checkpoint(
            folder, "run", JoinedWorld()
        ).checkpoint  # every byte is hashed here
        assert found is not None
        engine.load_state(Reader(*found), found[1].numbers)

    return write, timed(load), size_of(folder)


def torchs(engine: NativeEngine, folder: Path) -> tuple[float, float, int]:
    """torch.distributed.checkpoint, of the same tensors, into memory that is there already."""
    import torch.distributed.checkpoint as dcp

    tensors, _ = engine.state()
    write = timed(lambda: dcp.save(dict(tensors), checkpoint_id=folder))
    into = {key: torch.empty_like(tensor) for key, tensor in tensors.items()}
    load = timed(lambda: dcp.load(into, checkpoint_id=folder))
    assert all(torch.equal(into[key], tensors[key]) for key in tensors)
    return write, load, size_of(folder)


def deepspeeds(engine: NativeEngine, folder: Path) -> tuple[float, float, int] | None:
    """DeepSpeed's own checkpoint of the same model at stage 1, after a step."""
    from shardtune.parallel.deepspeed.startup import start

    try:
        deepspeed = start(World(device=str(engine.device)))
    except Exception as error:  # noqa: BLE001  a peer that isn't there is left out
        print(f"deepspeed is left out: {error}", file=sys.stderr)
        return None
    model = engine.model
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    theirs, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )
    batch = make_batch(0, 1, 16)
    ids = batch.input_ids.to(engine.device)
    theirs.backward(theirs(input_ids=ids, labels=ids, use_cache=False).loss)
    theirs.step()
    write = timed(lambda: theirs.save_checkpoint(str(folder)))
    load = timed(lambda: theirs.load_checkpoint(str(folder)))
    return write, load, size_of(folder)


def without_folder(words: list[str]) -> list[str]:
    """What was asked for, but for a path of this machine."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--folder")
    return parser.parse_known_args(words)[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--every", type=int, default=20, help="steps between two saves (20)")
    parser.add_argument("--saves", type=int, default=3, help="as many are measured (3)")
    parser.add_argument("--shape", choices=SHAPES, default="135M")
    parser.add_argument("--layers", type=int, help="as many as the shape has")
    parser.add_argument("--stall-only", action="store_true", help="no peers, no time to load")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, default=None, help="a disk to write to")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # the other core is for writing, as it is in a run of its own
    engine = make_engine(given.shape, given.layers, given.device)
    shape = (given.rows, given.length)
    with tempfile.TemporaryDirectory(dir=given.folder) as place:
        folder = Path(place)
        found = stall(engine, folder / "stall", given.every, given.saves, shape)
        shutil.rmtree(folder / "stall")
        rows = {}
        if not given.stall_only:
            rows["shardtune (every byte verified)"] = ours(engine, folder / "ours")
            rows["torch.distributed.checkpoint"] = torchs(engine, folder / "torch")
            shutil.rmtree(folder / "torch")
            if (peer := deepspeeds(engine, folder / "deepspeed")) is not None:
                rows["DeepSpeed, stage 1"] = peer
    if dist.is_initialized():
        dist.destroy_process_group()
    weights: list[Tensor] = list(engine.model.parameters())
    count = sum(weight.numel() for weight in weights) / 1e6
    extra, window = statistics.median(found.extra), given.every * found.step
    share = extra / window
    card = torch.cuda.get_device_name() if given.device == "cuda" else given.device
    write_table(
        "checkpoint" if given.shape == "135M" else f"checkpoint_{given.shape}",
        "What a checkpoint costs",
        ["", "write, s", "load, s", "MiB on disk"],
        [[n, f"{w:.2f}", f"{r:.2f}", f"{size / MIB:,.0f}"] for n, (w, r, size) in rows.items()],
        f"{count:.0f} M parameters in fp32 with two moments, on {card}. A step of "
        f"{given.rows} x {given.length} tokens takes {found.step:.2f} s. A save in the background "
        f"every {given.every} steps adds {extra:.2f} s to them, {100 * share:.2f} % of their time "
        f"(median of {given.saves} saves, from {100 * min(found.extra) / window:.2f} to "
        f"{100 * max(found.extra) / window:.2f} %): training is stopped for "
        f"{statistics.median(found.calls):.2f} s while the state is copied, and the steps during "
        f"which it is written take {statistics.median(found.slower):.2f} s longer than the median "
        f"of their neighbours. More than {100 * LIMIT:.0f} % is a failure.",
        command=" ".join(["checkpoint", *without_folder(sys.argv[1:])]),
    )
    return int(share > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
