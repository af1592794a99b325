"""The job: the configuration of a run, typed, frozen and documented.

Each section is a file of `config/sections/`; all of them can be imported from here. Defaults are
defined there and nowhere else. The text under a field is its description in the JSON Schema that
`shardtune schema` prints. `auto` is a value: `config/auto.py` replaces each one once, in a new job,
and says why.
"""

from __future__ import annotations

from dataclasses import replace

from shardtune.config.sections.adapter_section import IA3, Adapter, LoRA, NoAdapter
from shardtune.config.sections.data_sources import (
    Columns,
    DataSection,
    EvalShare,
    Format,
    Separator,
    Source,
    TrainSource,
)
from shardtune.config.sections.evaluate_section import EvaluateSection, TaskEntry
from shardtune.config.sections.field_types import Auto
from shardtune.config.sections.launch_section import (
    Backend,
    BackendTrainer,
    Launch,
    LocalLaunch,
    RayLaunch,
)
from shardtune.config.sections.model_section import ModelSection
from shardtune.config.sections.optimizer_section import SGD, AdamW, Optimizer
from shardtune.config.sections.save_section import SaveSection
from shardtune.config.sections.train_section import Kernels, TrainSection
from shardtune.config.sections.watched_metric_section import (
    BestCheckpoint,
    EarlyStop,
    WatchedMetric,
)
from shardtune.config.trackers import TrackerList
from shardtune.core.job_section import Section
from shardtune.core.layout import Layout
from shardtune.parallel import DEFAULT, Strategy

__all__ = [
    "IA3", "SGD", "AdamW", "Adapter", "Auto", "Backend", "BackendTrainer", "BestCheckpoint",
    "Columns", "DataSection", "EarlyStop", "EvalShare", "EvaluateSection", "Format", "Job",
    "Kernels", "Launch", "LoRA", "LocalLaunch", "ModelSection", "NoAdapter", "Optimizer",
    "RayLaunch", "SaveSection", "Separator", "Source", "TaskEntry", "TrainSection", "TrainSource",
    "WatchedMetric",
]  # fmt: skip


class Job(Section):
    """The configuration of a fine-tuning run. Frozen; its lists are tuples."""

    model: ModelSection
    adapter: Adapter = NoAdapter()
    """What is trained: all weights, or an adapter."""
    data: DataSection
    train: TrainSection = TrainSection()
    strategy: Strategy = DEFAULT
    """How the run is parallelized over its ranks."""
    evaluate: EvaluateSection = EvaluateSection()
    launch: Launch = LocalLaunch()
    """Where the ranks are started."""
    backend: Backend | None = None
    """Ludwig's name for `launch` and `strategy`; give one or the other."""
    save: SaveSection = SaveSection()
    track: TrackerList = ()
    """Trackers of the run's metrics, each fed by a process of its own: none can slow, stop or
    change a run."""

    @property
    def trains(self) -> str:
        """What is trained: the adapter's type, or `full fine-tune`."""
        return "full fine-tune" if isinstance(self.adapter, NoAdapter) else self.adapter.type

    def layout(self, ranks: int) -> Layout:
        """The strategy's layout, with the place of the optimizer states."""
        found = self.strategy.layout()
        if self.maps_states_to_host(ranks):
            return replace(found, home={**found.home, "optim": "cpu"})
        return found

    def maps_states_to_host(self, ranks: int) -> bool:
        """Whether optimizer states lie in host-mapped memory. On several ranks it is refused."""
        rule = self.train.optimizer
        return isinstance(rule, AdamW) and rule.paged and self.splits_weights(ranks)

    def splits_weights(self, ranks: int) -> bool:
        """Whether fp32 weights are split: the model has their upper halves, the optimizer the lower
        ones. So it is where one rank trains all weights in bf16, as which `auto` counts until it is
        replaced; several ranks would sum rounded gradients."""
        rule = self.train.optimizer
        return (
            self.strategy.capabilities.split_weights
            and isinstance(self.adapter, NoAdapter)
            and isinstance(rule, AdamW)
            and self.train.precision in ("bf16", "auto")
            and (rule.bits, ranks) == (32, 1)
        )
