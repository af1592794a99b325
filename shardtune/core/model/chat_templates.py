"""Chat templates by name, for models whose tokenizer has none."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from shardtune.core.files.regular_file import read_regular
from shardtune.errors import JobError, Problem, did_you_mean

LARGEST_TEMPLATE = 1 << 20
"""Bytes of a template; those of models with tools have some 20,000."""

TEMPLATE_KEY = "data.chat_template"
"""Where a job names one."""

KWARGS_KEY = "data.chat_template_kwargs"
"""Where a job sets variables of it."""

GIVEN_VARIABLES = frozenset(
    (
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token"),
        "mask_token",
    )
)
"""What every template is given anyway."""

TEMPLATE_TOKENS: dict[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "phi3": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "mistral": (),
    "zephyr": (),
    "alpaca": (),
    "vicuna": (),
}
"""The templates, and the tokens that each must find in a vocabulary. Those without any end an
answer with the tokenizer's own end-of-text token."""

TOOL_TEMPLATES = ("chatml", "llama3")
"""Those that write tools and calls of them."""


def read_chat_template(asked: str) -> str:
    """The template of that name, or in that file; raises JobError if there is neither."""
    if asked in TEMPLATE_TOKENS:
        file = files("shardtune.core.model") / "data" / "chat_templates" / f"{asked}.jinja"
        return file.read_text(encoding="utf-8")
    path = Path(asked).expanduser()
    try:
        return read_regular(path, LARGEST_TEMPLATE).decode("utf-8")
    except OSError as error:
        near = did_you_mean(asked, TEMPLATE_TOKENS)
        fact = f"{asked!r} is neither a template's name nor a file: {error.strerror}"
        fix = f"did you mean {near!r}?" if near else f"known are {', '.join(TEMPLATE_TOKENS)}"
        raise JobError(Problem(TEMPLATE_KEY, fact, fix)) from None
    except UnicodeDecodeError:
        fact = f"the file {asked} is not UTF-8 text"
        raise JobError(Problem(TEMPLATE_KEY, fact, "save it as UTF-8")) from None
