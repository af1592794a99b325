"""The sink of Weights & Biases, online or offline."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence

from shardtune.config.trackers import WandB
from shardtune.track.sink import Cell, TrackedRun

STEP = "train/global_step"
"""The axis of all curves, by the name that Hugging Face's Trainer gives it. W&B's own `_step` would
drop what comes to a step that it has closed."""


class WandBSink:
    """A run of W&B, by an id that we choose: a resumed run goes on under it."""

    def __init__(self, section: WandB, run: TrackedRun) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # nothing is sent home
        import wandb

        self.id = run.id or secrets.token_hex(4)
        mode = section.mode or os.environ.get("WANDB_MODE", "online")
        self._wandb = wandb
        self._run = wandb.init(
            project=section.project,
            entity=section.entity,
            group=section.group,
            name=section.name or run.name,
            id=self.id,
            resume="allow" if mode == "online" else None,  # offline, a part lies beside the first
            mode=section.mode,
            dir=str(run.folder),
            config=dict(run.config),
            # What W&B finds out by itself would be of this process, not of the ranks.
            settings=wandb.Settings(
                console="off",
                disable_code=True,
                disable_git=True,
                silent=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP, step_sync=True)

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        self._run.log({**values, STEP: step})

    def note(self, step: int, name: str, text: str) -> None:
        self._run.log({name: text, STEP: step})

    def table(
        self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]
    ) -> None:
        table = self._wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        self._run.log({name: table, STEP: step})

    def flush(self) -> None:
        """Rows go to W&B's own service at once, which outlives us."""

    def close(self, *, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)
