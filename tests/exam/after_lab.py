"""What the cases of `tests.exam.after` share: one tuned SmolLM2-135M, and our commands."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.exam.named_cases import NamedCase

ROOT = Path(__file__).parents[2]
BASE = "smollm2-135m-instruct"


@dataclass(frozen=True)
class AfterLab:
    """A folder in which things are tried."""

    folder: Path

    @cached_property
    def run(self) -> Path:
        """SmolLM2-135M with LoRA, tuned for three steps: enough to be another model."""
        return self._tuned("run")

    def stored(self, quantization: str) -> Path:
        """The same with its weights in `nf4` or `int8`."""
        return self._tuned(f"run-{quantization}", f"model.quantization={quantization}")

    def _tuned(self, name: str, *settings: str) -> Path:
        target = self.folder / name
        if not (target / "result").is_dir():
            done = self.shardtune(
                "train", "recipes/quickstart.yaml", "train.steps=3", "train.global_batch=4",
                "train.precision=fp32", "data.eval=[]", "evaluate.samples=0", "launch.processes=1",
                f"save.directory={target}", *settings,
            )  # fmt: skip
            if done.returncode:
                raise RuntimeError(f"a run that cases need failed:\n{done.stderr}")
        return target

    def shardtune(
        self, *arguments: str, environment: dict[str, str] | None = None, timeout: float = 1200
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command of ours as a person would, in the repository's root."""
        return subprocess.run(
            [sys.executable, "-m", "shardtune", *arguments],
            cwd=ROOT, env=os.environ | (environment or {}), timeout=timeout,
            capture_output=True, text=True, check=False,
        )  # fmt: skip


AfterCase = NamedCase[AfterLab]
