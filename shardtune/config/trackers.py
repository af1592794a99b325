"""The trackers that a job can name in `track`: their fields. What they write is in `track/`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from shardtune.core.capabilities import Need
from shardtune.core.plugins import find_plugins
from shardtune.core.tracker import TRACKER_GROUP, TrackerBase

_Text = Annotated[str, Field(min_length=1)]


class FileTracker(TrackerBase):
    """A tracker whose sink writes files of its own into a folder."""

    directory: _Text | None = None
    """Where the run gets a folder of its own; null: `track/TYPE` in the run directory."""
    name: _Text | None = None
    """What that folder is called; null: as the run directory. One that is there is left alone."""


class TensorBoard(FileTracker):
    """Event files that TensorBoard shows. Nothing has to be installed to write them."""

    type: Literal["tensorboard"] = "tensorboard"
    sink = "shardtune.track.tensorboard_sink:TensorBoardSink"


class CSVFiles(FileTracker):
    """A table of steps and one of evaluations, as CSV files."""

    type: Literal["csv"] = "csv"
    sink = "shardtune.track.csv_sink:CSVSink"


class NamedTracker(TrackerBase):
    """A tracker that keeps many runs, each by its name."""

    name: _Text | None = None
    """What the run is called there; null: as the run directory (Trackio adds a few letters)."""


class ProjectTracker(NamedTracker):
    """One that keeps runs by project."""

    project: _Text = "shardtune"
    """The project to log to."""


class WandB(ProjectTracker):
    """Weights & Biases. The key is taken from WANDB_API_KEY or `wandb login`, never from a job."""

    type: Literal["wandb"] = "wandb"
    sink = "shardtune.track.wandb_sink:WandBSink"
    needs = (Need("wandb", "wandb"),)
    entity: _Text | None = None
    """The team or user that it belongs to; null: yours."""
    group: _Text | None = None
    """Runs that belong together."""
    mode: Literal["online", "offline"] | None = None
    """`offline` writes to the run directory only, and `wandb sync` uploads it later; null: as
    WANDB_MODE says, else online."""


class MLflow(NamedTracker):
    """An MLflow server or store. User and password are taken from MLFLOW_TRACKING_USERNAME and
    MLFLOW_TRACKING_PASSWORD, never from a job."""

    type: Literal["mlflow"] = "mlflow"
    sink = "shardtune.track.mlflow_sink:MLflowSink"
    needs = (Need("mlflow", "mlflow"),)
    tracking_uri: _Text | None = None
    """The server, or a store (`file:...`); null: MLFLOW_TRACKING_URI, and where that isn't set
    files in `track/mlflow` of the run directory."""
    experiment: _Text = "shardtune"
    """The experiment that the run belongs to; made where there is none."""


class Trackio(ProjectTracker):
    """Trackio: a local SQLite file, or a Space of the Hugging Face hub."""

    type: Literal["trackio"] = "trackio"
    sink = "shardtune.track.trackio_sink:TrackioSink"
    needs = (Need("trackio", "trackio"),)
    space_id: _Text | None = None
    """A Space to log to (`OWNER/NAME`); null stays on this machine, where `trackio show` looks."""


_OWN: tuple[type[TrackerBase], ...] = (TensorBoard, CSVFiles, WandB, MLflow, Trackio)
TRACKERS = find_plugins(TRACKER_GROUP, TrackerBase, _OWN, "tracker")
"""Every tracker that a job can name, by its `type`."""


def _spelt_out(value: Any) -> Any:
    """`track: wandb` and `track: [wandb]` are short for `track: [{type: wandb}]`."""
    items = (value,) if isinstance(value, str | dict | TrackerBase) else value
    if not isinstance(items, list | tuple):
        return value
    return tuple({"type": each} if isinstance(each, str) else each for each in items)


class _OrWords:
    """Tells the JSON Schema of the short form."""

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        spelt_out = handler(core_schema)
        word: JsonSchemaValue = {"enum": list(TRACKERS), "type": "string"}
        items = {"anyOf": [word, spelt_out["items"]]}
        return {"anyOf": [{**spelt_out, "items": items}, word]}


if TYPE_CHECKING:
    TrackerList = tuple[TrackerBase, ...]
else:
    _Tracker = Annotated[
        Union[tuple(TRACKERS.values())],  # noqa: UP007 - they are counted at run time
        Field(discriminator="type"),
    ]
    TrackerList = Annotated[tuple[_Tracker, ...], BeforeValidator(_spelt_out), _OrWords()]


def tracker_of(fields: Mapping[str, object]) -> TrackerBase:
    """The tracker that these fields describe; ValidationError if they don't."""
    return TRACKERS[str(fields["type"])].model_validate_json(json.dumps(fields))


def tracker_labels(trackers: Sequence[TrackerBase]) -> list[str]:
    """What each is called in the run directory: its type, and a number from the second on."""
    kinds = [each.type for each in trackers]
    before = [kinds[:place].count(kind) for place, kind in enumerate(kinds)]
    return [kind if not n else f"{kind}-{n + 1}" for kind, n in zip(kinds, before, strict=True)]
