"""`shardtune bench`: measures this machine for the planner."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from shardtune.cli.arguments import Commands, add_command


def add_parser(commands: Commands) -> None:
    command = add_command(
        commands,
        "bench",
        bench,
        "measure this machine for `plan` and `estimate`, in a minute",
        """\
  shardtune bench
  shardtune bench --out node.yaml
  torchrun --nproc-per-node 8 -m shardtune bench --out node.yaml""",
    )
    command.add_argument("--out", type=Path, metavar="FILE", help="the profile to write")
    command.add_argument("--processes", type=int, metavar="N", help="ranks (one per GPU)")


def bench(arguments: argparse.Namespace) -> int:
    """Measures this machine; started without ranks, it starts them."""
    from shardtune.core.host.machine import Machine
    from shardtune.core.world import outside_ranks
    from shardtune.plan.this_machine import profile_path

    target: Path = arguments.out or profile_path()
    if outside_ranks() is None:
        import tempfile

        from shardtune.launch.supervisor import run_local

        machine = Machine.here()
        processes = (
            arguments.processes or max(1, machine.gpus)
            if machine.gpus
            else (arguments.processes or min(2, machine.cores))
        )
        with tempfile.TemporaryDirectory() as logs:
            return run_local(
                ["-m", "shardtune", "bench", "--out", str(target)],
                processes=processes,
                threads=max(1, machine.cores // processes),
                logs=Path(logs),
            )
    return _bench_as_rank(target)


def _bench_as_rank(target: Path) -> int:
    import os

    from rich.console import Console

    from shardtune.core.files.atomic_write import atomic_write
    from shardtune.core.files.yaml_document import dump_document
    from shardtune.launch.error_file import reporting_errors
    from shardtune.launch.process_group import join_process_group
    from shardtune.measure.bench import bench as measure
    from shardtune.report.bench_table import draw_bench, print_bench

    with reporting_errors(), join_process_group(int(os.environ.get("OMP_NUM_THREADS", 1))) as world:
        target.parent.mkdir(parents=True, exist_ok=True)
        profile = measure(world, target.parent, lambda text: print(f"measuring {text}", flush=True))
        if world.is_main:
            print_bench(profile, Console())
            atomic_write(target, dump_document(profile.model_dump(mode="json")))
            if profile.measured.collectives:
                draw_bench(profile, target.with_suffix(".svg"))
            quoted = shlex.quote(str(target))
            print(f"wrote {target}; `shardtune plan JOB --cluster {quoted}` uses it")
    return 0
