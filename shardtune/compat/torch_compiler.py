"""torch.compile: longer rows in one read, more graphs of a layer, and who is told of compiling."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from shardtune.compat.versioned_change import TargetChanged, change

RECOMPILE_LIMIT = 64
"""How often the code of a layer may be compiled: with and without gradients, in training and
evaluation, for rows of few lengths. Beyond it torch would go on uncompiled, with a mere warning."""
WHOLE_ROW = 8192
"""Numbers of a row that a processor of the GPU has at once."""


@change("torch", since="2.10", before="2.15", lost="norms read rows of over 1,024 numbers twice")
def read_rows_once() -> None:
    """Persistent reductions: lets inductor hold whole rows where it sums over them, as norms do. By
    itself it does so up to 1,024 numbers, and reads longer rows once to sum and once more to use
    the sum."""
    from torch._inductor import config
    from torch._inductor.choices import InductorChoices
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    usual = InductorChoices.should_use_persistent_reduction
    if hasattr(usual, "usual"):
        return

    def whole_rows(features: Any, cooperative_reduction: bool) -> bool:
        if usual(features, cooperative_reduction):
            return True
        if cooperative_reduction or not config.triton.persistent_reductions:
            return False
        return bool(
            features.get_reduction_hint() == ReductionHint.INNER
            and V.graph.get_current_device_or_throw().type == "cuda"
            and V.graph.sizevars.statically_known_leq(features.reduction_numel, WHOLE_ROW)
        )

    whole_rows.usual = usual  # type: ignore[attr-defined]
    choices: Any = InductorChoices
    choices.should_use_persistent_reduction = staticmethod(whole_rows)


@change("torch", since="2.10", before="2.15", lost="after 8 graphs a layer runs uncompiled")
def raise_recompile_limit() -> None:
    """Lets a layer be compiled more often than by dynamo's default."""
    import torch._dynamo

    config: Any = torch._dynamo.config
    if not isinstance(config.recompile_limit, int):
        raise TargetChanged("torch._dynamo.config.recompile_limit is no number")
    config.recompile_limit = max(RECOMPILE_LIMIT, config.recompile_limit)


@change("torch", since="2.10", before="2.15", lost="a long compilation may look like a hang")
def report_compiling(began: Callable[[Any], None], ended: Callable[[Any], None]) -> None:
    """Lets whoever watches the process know: a row count that is new is compiled in any step, and
    takes longer than a step may."""
    from torch._dynamo.callback import callback_handler as calls

    if began not in calls.start_callbacks:
        calls.register_start_callback(began)
        calls.register_end_callback(ended)


def hide_checkpoint_warning() -> None:
    """torch warns of checkpointing rules under its compiler, once, because operations that write
    into their input would go wrong in there. Layers have none."""
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()
