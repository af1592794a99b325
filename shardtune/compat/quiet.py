"""Log lines, warnings and progress bars of other libraries that would only be noise."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardtune.compat.versioned_change import change


def quiet_imports() -> None:
    """For packages that are imported wherever they are installed, by peft and accelerate."""
    quiet_bitsandbytes()
    quiet_deepspeed_import()
    quiet_peft_deprecation()


def quiet_deepspeed_import() -> None:
    """It warns of what doesn't concern a run without it. It sets its logger's level itself: a
    filter stays."""
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)


def quiet_peft_deprecation() -> None:
    """peft asks by a name that transformers 5.23 has renamed."""
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)


def quiet_bitsandbytes() -> None:
    """When peft imports it, it tells everyone to fetch a kernel from a hub: once a process."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


@contextmanager
def without_int8_warnings() -> Iterator[None]:
    """bitsandbytes says for each product of int8 weights that inputs are cast to fp16."""
    theirs = logging.getLogger("bitsandbytes.autograd._functions")
    level = theirs.level
    theirs.setLevel(logging.ERROR)
    try:
        yield
    finally:
        theirs.setLevel(level)


@change("transformers", since="5.0", before="6", lost="a progress bar for each rank and reload")
def hide_loading_bars() -> None:
    """One bar per rank and per reload is noise."""
    from transformers.utils import logging as theirs

    theirs.disable_progress_bar()


def quiet_lengths(tokenizer: Any) -> None:
    """It warns of the first text that is longer than the model reads, whatever is done with it:
    rows and prompts are measured where they are used, and check dialogues never reach a model."""
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True


def quiet_flash_attention() -> None:
    """It warns of an argument while it compiles another kernel."""
    warnings.filterwarnings("ignore", message="Argument aux_data")


def quiet_adapter_warnings() -> None:
    """peft gives a fused weight of experts its rank by a pattern, and then looks for it among
    modules alone: it warns that the pattern was ignored, which it wasn't. It warns of adapters on a
    head that is the embedding, too, which our merge keeps apart."""
    warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not")
    warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True` and a tied")
