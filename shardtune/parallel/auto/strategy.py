"""The strategy that the planner chooses. It is replaced by another before anything runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal, NoReturn

from pydantic import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from shardtune.core.capabilities import Capabilities
from shardtune.core.layout import Layout
from shardtune.core.mesh import Mesh
from shardtune.core.model_builder import ModelBuilder
from shardtune.core.setup import EngineSetup
from shardtune.core.strategy import StrategyBase
from shardtune.core.world import World
from shardtune.parallel.capability_limits import WHOLE_COPIES

if TYPE_CHECKING:
    from shardtune.core.engine import Engine


class AutoStrategy(StrategyBase):
    """Whatever `shardtune plan` finds best for this model on these devices."""

    type: Literal["auto"] = "auto"
    planned: ClassVar[bool] = True

    def mesh(self, ranks: int) -> Mesh:
        """Every strategy that is chosen by itself gives each rank rows of its own."""
        return Mesh((("data", ranks),))

    def layout(self) -> Layout:
        self._unresolved()

    @property
    def capabilities(self) -> Capabilities:
        """What a job asks for decides what is chosen; how weights are held, what was chosen."""
        return replace(WHOLE_COPIES, split_weights=False)

    def build(self, builder: ModelBuilder, setup: EngineSetup, world: World) -> Engine:
        self._unresolved()

    def _unresolved(self) -> NoReturn:
        raise AssertionError("`strategy: auto` is replaced when a job is planned")


def spelt_out(value: object) -> object:
    """`strategy: auto` is short for `strategy: {type: auto}`."""
    return {"type": "auto"} if value == "auto" else value


class OrShort:
    """Tells the JSON Schema of it."""

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [{"const": "auto", "type": "string"}, handler(core_schema)]}
