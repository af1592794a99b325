"""A real Slurm on the loopback address: munged, slurmctld and one slurmd a node, in one folder.

The nodes share this machine. Each has an address of its own (127.0.0.2, ...) as its name, so that
nothing has to resolve names, and two devices that Slurm takes for GPUs. Nothing uses cgroups.
"""

from __future__ import annotations

import getpass
import os
import random
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
SECONDS = 60.0  # in which the daemons have to be up
CONFIGURATION = """\
ClusterName=shardtune
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
FirstJobId={first_job}
ReturnToService=2
SchedulerParameters=bf_interval=1,sched_interval=1
GresTypes=gpu
{nodes}
PartitionName=all Nodes={names} Default=YES State=UP
"""


@dataclass(frozen=True)
class SlurmCluster:
    """A controller and its nodes, up and idle."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """What its commands need."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def ask(self, *command: str) -> str:
        """What one of its commands says."""
        done = subprocess.run(
            command, env=os.environ | self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: int) -> dict[str, str]:
        """What Slurm knows of a job."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.ask("scontrol", "show", "job", str(number))))


@contextmanager
def slurm_cluster(folder: Path, nodes: int = 2) -> Iterator[SlurmCluster]:
    """Starts the daemons, and ends them; skips the test where Slurm isn't installed."""
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
    found = {name: shutil.which(name, path=path) for name in PROGRAMS}
    if missing := [name for name, place in found.items() if place is None]:
        pytest.skip(f"{', '.join(missing)} not installed (Debian: apt-get install slurm-wlm munge)")
    cluster = SlurmCluster(folder)
    _configure(folder, nodes)
    with ExitStack() as running:

        def start(name: str, *words: str) -> None:
            with (folder / f"{name}.out").open("ab") as output:
                process = subprocess.Popen(
                    [str(found[name]), *words],
                    env=os.environ | cluster.environment, stdin=subprocess.DEVNULL,
                    stdout=output, stderr=output, start_new_session=True,
                )  # fmt: skip
            running.callback(_end, process)

        own = ("key-file", "socket", "pid-file", "log-file", "seed-file")
        start(
            "munged",
            "--foreground",
            "--force",
            *(f"--{each}={_munge(folder, each)}" for each in own),
        )
        _wait(lambda: (folder / "munge.socket").exists(), folder)
        start("slurmctld", "-D")
        for name in _names(nodes):
            start("slurmd", "-D", "-N", name)
        _wait(lambda: _idle(cluster) == nodes, folder)
        try:
            yield cluster
        finally:
            subprocess.run(
                ["scancel", "--user", getpass.getuser(), "--signal=KILL", "--full"],
                env=os.environ | cluster.environment, capture_output=True, check=False,
            )  # fmt: skip


def _configure(folder: Path, nodes: int) -> None:
    names = _names(nodes)
    (folder / "state").mkdir(parents=True)
    for name in names:
        (folder / f"spool-{name}").mkdir()
    key = folder / "munge.key-file"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    with ExitStack() as probes:  # as many free ports at once
        sockets = [probes.enter_context(socket.socket()) for _ in range(nodes + 1)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in sockets]
    host = socket.gethostname().partition(".")[0]
    lines = [
        f"NodeName={name} NodeHostname={host} NodeAddr={name} Port={port} CPUs=2 Gres=gpu:2"
        for name, port in zip(names, ports[1:], strict=True)
    ]
    text = CONFIGURATION.format(
        host=host, port=ports[0], user=getpass.getuser(), folder=folder, nodes="\n".join(lines),
        names=",".join(names), first_job=random.randrange(1000, 60_000),
    )  # fmt: skip
    (folder / "slurm.conf").write_text(text, "utf-8")
    devices = ("/dev/null", "/dev/zero")
    (folder / "gres.conf").write_text("".join(f"Name=gpu File={each}\n" for each in devices))


def _munge(folder: Path, what: str) -> Path:
    return folder / ("munge.socket" if what == "socket" else f"munge.{what}")


def _names(nodes: int) -> list[str]:
    return [f"127.0.0.{number + 2}" for number in range(nodes)]


def _idle(cluster: SlurmCluster) -> int:
    done = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--format=%T"],
        env=os.environ | cluster.environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout.split().count("idle")


def _wait(ready: object, folder: Path) -> None:
    assert callable(ready)
    deadline = time.monotonic() + SECONDS
    while not ready():
        said = [path.read_text("utf-8", "replace")[-2000:] for path in folder.glob("*.out")]
        assert time.monotonic() < deadline, "Slurm doesn't start:\n" + "\n".join(said)
        time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
