"""The sink of MLflow: a tracking server, or files in the run directory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from shardtune.config.trackers import MLflow
from shardtune.track.sink import Cell, TrackedRun
from shardtune.track.tensorboard_sink import markdown_table

MOST_METRICS = 1000  # in one request, by MLflow's rules
MOST_PARAMS = 100
LONGEST_PARAM = 6000  # letters
_Item = TypeVar("_Item")


class MLflowSink:
    """A run of MLflow. Points wait for `flush`, which sends them in batches."""

    def __init__(self, section: MLflow, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nothing is sent home
        uri = section.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            uri = run.folder.absolute().as_uri()
        if uri.startswith("file:") or "://" not in uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=uri)
        self._waiting: list[Metric] = []
        if run.id is not None:
            self.id = run.id
            self._client.update_run(self.id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(section.experiment)
        experiment = (
            self._client.create_experiment(section.experiment)
            if found is None
            else found.experiment_id
        )
        created = self._client.create_run(experiment, run_name=section.name or run.name)
        self.id = created.info.run_id
        params = [Param(key, str(value)[:LONGEST_PARAM]) for key, value in run.config.items()]
        for some in _batches(params, MOST_PARAMS):
            self._client.log_batch(self.id, params=some)

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        now = int(time * 1000)
        self._waiting += [self._metric(name, value, now, step) for name, value in values.items()]

    def note(self, step: int, name: str, text: str) -> None:
        self._client.log_text(self.id, text, f"{name}-{step}.txt")

    def table(
        self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]
    ) -> None:
        self._client.log_text(self.id, markdown_table(columns, rows), f"{name}-{step}.md")

    def flush(self) -> None:
        for some in _batches(self._waiting, MOST_METRICS):
            self._client.log_batch(self.id, metrics=some)
        self._waiting.clear()

    def close(self, *, finished: bool) -> None:
        self.flush()
        self._client.set_terminated(self.id, status="FINISHED" if finished else "KILLED")


def _batches(items: Sequence[_Item], most: int) -> Iterator[list[_Item]]:
    for begin in range(0, len(items), most):
        yield list(items[begin : begin + most])
