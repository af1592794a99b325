"""Eleven slow runs and a healthy one, and what is said of them: `python -m tests.exam.diagnose`.

Each run is real: a Llama of 5.5 million weights, or the tiny one, on one rank or two. What slows it
down is a rank that is stopped for most of the time, a link between two network namespaces that
`tc` throttles, or a value of the job; two are imitated: the loader sleeps before each micro-batch,
as for a slow disk, or computes, as for slow preparation. No disk is slow here. One run has nothing
wrong with it, and has to be called healthy.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from shardtune.config.auto import resolve
from shardtune.config.job import Job
from shardtune.core.host.machine import Machine
from shardtune.core.runs.diagnosis import Diagnosis, SlowCause
from tests.hosts import Host, two_hosts
from tests.jobs import make_job
from tests.ranks import _CONTEXT

TIMEOUT = 600.0
SEQUENCE = 128
PORT = 29411
STOPPED, RUNNING = 0.12, 0.03
"""Seconds that a slow rank is stopped and may run, in turn."""
LOADER_SLEEPS, LOADER_COMPUTES = 4.0, 1.0
"""Seconds before a micro-batch, of a clock and of a core: long beside computing, also where others
use the machine."""
MEGABITS = 150
"""Of a throttled link: a step's gradients of 22 MB take more than a second."""
NETWORK_NAMESPACE = 0x40000000  # CLONE_NEWNET


@dataclass(frozen=True)
class Slowness:
    """A run, and what is wrong with it."""

    name: str
    cause: SlowCause | None
    """What a diagnosis has to name first; None where nothing is wrong."""
    ranks: int = 1
    model: str = "large"
    steps: int = 14
    job: dict[str, dict[str, Any]] = field(default_factory=dict)
    in_rank: str = ""
    """What is put into each rank before it trains, by its name in `PUT_IN`."""
    stops_rank: int | None = None
    throttles: bool = False
    rows: str = "even"
    held: int = 8
    """Rows that are held out."""


CASES = (
    Slowness("healthy", None),
    Slowness("a loader that sleeps", "slow_storage", in_rank="sleeps", steps=7),
    Slowness("a loader that computes", "slow_loader", in_rank="computes", steps=7),
    Slowness("throttled link", "communication", ranks=2, throttles=True, steps=8),
    Slowness("slow rank", "straggler", ranks=2, stops_rank=1),
    Slowness(
        "tiny micro-batch", "small_micro_batch", model="tiny", steps=40, rows="short",
        job={"train": {"global_batch": 16, "micro_batch": 1}, "data": {"sequence_length": 32}},
    ),
    Slowness("a save at every step", "save", job={"save": {"every": 1}}),
    Slowness(
        "recomputation", "recomputation", job={"train": {"gradient_checkpointing": "full"}}
    ),
    Slowness(
        "a model that is too small", "host", model="tiny", steps=120, rows="short",
        job={"train": {"global_batch": 1, "micro_batch": 1}, "data": {"sequence_length": 32}},
    ),
    Slowness(
        "an evaluation at every step", "evaluation", held=96, job={"evaluate": {"every": 1}}
    ),
    Slowness(
        "a trace of every step", "logging",
        job={"save": {"trace": True}, "train": {"global_batch": 1, "micro_batch": 1}},
    ),
    Slowness(
        "rows of different length", "imbalance", ranks=2, rows="uneven", steps=24,
        job={
            "train": {"global_batch": 2, "micro_batch": 1},
            "data": {"packing": False, "sequence_length": 512},
        },
    ),
)  # fmt: skip


def main(names: Sequence[str] = ()) -> int:
    """Runs the cases of these names, or all; exit code 1 if one isn't told right."""
    right, chosen = 0, [case for case in CASES if not names or case.name in names]
    for case in chosen:
        with tempfile.TemporaryDirectory() as folder:
            begun = time.monotonic()
            found = examine(case, Path(folder))
            took = time.monotonic() - begun
        good = is_right(case, found)
        right += good
        largest = ", ".join(
            f"{name} {share:.0%}" for name, share in
            sorted(found.shares.items(), key=lambda each: -each[1])[:3]
        )  # fmt: skip
        said = found.causes[0] if found.causes else "healthy"
        print(f"{'ok' if good else 'WRONG':6}{case.name:30}{said:20}{largest}  ({took:.0f} s)")
        if not good:
            print(found.to_json(indent=2))
    print(f"{right} of {len(chosen)} runs are told right")
    return int(right < len(chosen))


def is_right(case: Slowness, found: Diagnosis) -> bool:
    """The cause is named first, and there is a line to paste for it."""
    if case.cause is None:
        return found.healthy
    told = any(remedy.cause == case.cause and remedy.line for remedy in found.remedies)
    return found.causes[:1] == (case.cause,) and told


def examine(case: Slowness, folder: Path, profile: int = 0) -> Diagnosis:
    """Trains as the case says, and reads the diagnosis that the command prints."""
    from shardtune.cli.main import main as shardtune

    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    job = job_of(case, folder)
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts()) if case.throttles else None
        if hosts is not None:
            for host in hosts:
                host.throttle(MEGABITS)
        run(case, job, hosts, profile)
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert shardtune(["diagnose", job.save.directory, "--json"]) == 0
    return Diagnosis.model_validate_json(printed.getvalue())


def job_of(case: Slowness, folder: Path) -> Job:
    """The job of a case, with its model and its data written to the folder."""
    lengths = {"even": [60] * 400, "short": [24] * 400, "uneven": [480, 16] * 100}[case.rows]
    write_rows(folder / "rows.jsonl", lengths)
    write_rows(folder / "held.jsonl", [min(61, lengths[0] + 1)] * case.held)
    name = "tiny" if case.model == "tiny" else str(write_model(folder / "model"))
    sections: dict[str, dict[str, Any]] = {
        "data": {
            "train": [{"path": str(folder / "rows.jsonl"), "format": "completion"}],
            "eval": [{"path": str(folder / "held.jsonl"), "format": "completion", "name": "held"}],
            "sequence_length": SEQUENCE,
            "packing": True,
        },
        "train": {
            "steps": case.steps, "global_batch": 4 * case.ranks, "micro_batch": 4,
            "precision": "fp32", "preflight": False,
        },
        "evaluate": {"every": 0, "samples": 0},
        "launch": {"processes": case.ranks, "threads": 1},
        "save": {"directory": str(folder / "run"), "every": 0},
    }  # fmt: skip
    for section, values in case.job.items():
        sections[section] = sections[section] | values
    job = make_job(model={"name": name}, adapter={"type": "none"}, **sections)
    return resolve(job, Machine(cores=2, gpus=0)).job


def write_rows(path: Path, lengths: Sequence[int]) -> None:
    """Rows of so many bytes, which are tokens."""
    lines = [{"text": f"{path.stem} {n} ".ljust(size, "x")} for n, size in enumerate(lengths)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def write_model(folder: Path) -> Path:
    """A Llama whose matmuls are large enough to keep a core busy."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from shardtune.models import tiny
    from shardtune.models.hf_folder import write_folder

    config = LlamaConfig(
        architectures=["LlamaForCausalLM"], vocab_size=tiny.VOCABULARY, hidden_size=384,
        intermediate_size=1152, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=6, max_position_embeddings=2048, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tiny.END, pad_token_id=tiny.PAD, dtype="float32",
    )  # fmt: skip
    torch.manual_seed(0)
    weights = LlamaForCausalLM(config).state_dict()
    weights.pop("lm_head.weight")
    folder.mkdir(parents=True)
    write_folder(folder, config, weights, tiny.tokens())
    return folder


# The run -----------------------------------------------------------------------------------------


def run(case: Slowness, job: Job, hosts: tuple[Host, Host] | None, profile: int) -> None:
    """Trains on ranks of their own; fails if one of them does."""
    errors = _CONTEXT.Queue()
    cache = os.environ["XDG_CACHE_HOME"]
    ranks = [
        _CONTEXT.Process(
            target=_rank,
            args=(rank, case, job.model_dump_json(), hosts, errors, cache, profile),
        )
        for rank in range(case.ranks)
    ]
    for process in ranks:
        process.start()
    try:
        with _stopping(ranks[case.stops_rank] if case.stops_rank is not None else None, job):
            deadline = time.monotonic() + TIMEOUT
            while any(process.is_alive() for process in ranks):
                assert errors.empty(), errors.get()
                assert time.monotonic() < deadline, f"{case.name}: the ranks hang"
                time.sleep(0.02)
        assert errors.empty(), errors.get()
        assert all(process.exitcode == 0 for process in ranks)
    finally:
        for process in ranks:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()


@contextmanager
def _stopping(process: BaseProcess | None, job: Job) -> Iterator[None]:
    """Stops a rank for most of the time, from its second step on."""
    over = threading.Event()
    metrics = Path(job.save.directory) / "metrics.jsonl"

    def turns() -> None:
        assert process is not None
        assert process.pid is not None
        while not over.wait(0.02):
            if metrics.exists() and '"kind": "step"' in metrics.read_text(encoding="utf-8"):
                break
        with suppress(ProcessLookupError):  # it may end between two signals
            while not over.wait(RUNNING) and process.is_alive():
                os.kill(process.pid, signal.SIGSTOP)
                time.sleep(STOPPED)
                os.kill(process.pid, signal.SIGCONT)

    thread = threading.Thread(target=turns, daemon=True)
    if process is not None:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if process is not None:
            thread.join()


def _rank(
    rank: int,
    case: Slowness,
    job: str,
    hosts: tuple[Host, Host] | None,
    errors: Any,
    cache: str,
    profile: int,
) -> None:
    """One rank, in its host's network where it has one."""
    head, interface, here = "127.0.0.1", "lo", case.ranks
    if hosts is not None:
        head, interface, here = hosts[0].address, hosts[rank].interface, 1
        with Path("/run/netns", hosts[rank].namespace).open() as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), NETWORK_NAMESPACE) == 0
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(case.ranks), LOCAL_RANK=str(rank % here),
        LOCAL_WORLD_SIZE=str(here),
        MASTER_ADDR=head, MASTER_PORT=str(PORT), GLOO_SOCKET_IFNAME=interface,
        OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", XDG_CACHE_HOME=cache,
    )  # fmt: skip
    os.setsid()
    try:
        from shardtune.train import train

        if case.in_rank:
            PUT_IN[case.in_rank]()
        train(Job.model_validate_json(job), quiet=True, profile_steps=profile)
    except BaseException:
        errors.put(f"rank {rank}:\n{traceback.format_exc()}")
        raise


def _sleep_in_loader() -> None:
    """Imitates a slow disk: the loader's thread waits, and uses no processor."""
    _before_each_microbatch(lambda: time.sleep(LOADER_SLEEPS))


def _compute_in_loader() -> None:
    """Imitates slow preparation: the loader's thread uses a processor."""

    def burn() -> None:
        end, data = time.thread_time() + LOADER_COMPUTES, bytes(1 << 22)
        while time.thread_time() < end:
            hashlib.sha256(data).digest()  # without the interpreter's lock, as tokenizers do

    _before_each_microbatch(burn)


def _before_each_microbatch(act: Callable[[], None]) -> None:
    from shardtune.data.collate import Collator

    read = Collator.__call__

    def slowly(self: Any, *given: Any, **named: Any) -> Any:
        act()
        return read(self, *given, **named)

    Collator.__call__ = slowly  # type: ignore[method-assign]


PUT_IN: dict[str, Callable[[], None]] = {
    "sleeps": _sleep_in_loader,
    "computes": _compute_in_loader,
}


if __name__ == "__main__":
    assert shutil.which("tc"), "throttling a link needs iproute2"
    sys.exit(main(sys.argv[1:]))
