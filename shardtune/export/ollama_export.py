"""Ollama: a GGUF file and a Modelfile whose Go template writes what the chat template writes.

Ollama doesn't run Jinja. For each known way to write a conversation there is a Go template here;
the one is taken that renders the parity dialogues exactly as the tokenizer's own template does. If
none does, the export is refused: another prompt than in training is another model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtune.core.host.render_limit import TEMPLATE_ERRORS
from shardtune.data.conversation import Conversation
from shardtune.data.template_parity import parity_dialogues
from shardtune.errors import Problem, RunError
from shardtune.export.folder import export_folder
from shardtune.export.gguf_export import GgufExport, gguf_facts, write_model
from shardtune.export.go_template import render_go
from shardtune.export.source import ExportSource

MODELFILE = "Modelfile"
_MARK = "THE SYSTEM PROMPT"

_EACH, _SAID = "{{ range .Messages }}", '{{ if or (ne .Role "system") .Content }}'
_PLACED = "{{ range $i, $m := .Messages }}"
_USER, _ASSISTANT = '{{ if eq .Role "user" }}', '{{ else if eq .Role "assistant" }}'
_SYSTEM, _ENDS = '{{ if eq .Role "system" }}', "{{ end }}{{ end }}"
_FIRST = "{{ if eq $i 1 }}{{ $.System }}\n\n{{ end }}"  # a question is second after a system prompt
_ROLE, _CONTENT = "{{ .Role }}", "{{ .Content }}"


def _each(turn: str, ask: str) -> Mapping[str, str]:
    """Turns that differ by their role alone, with and without empty system prompts."""
    return {
        "": f"{_EACH}{turn}{{{{ end }}}}{ask}",
        " without empty system prompts": f"{_EACH}{_SAID}{turn}{_ENDS}{ask}",
    }


def _headed(system: str, user: str, assistant: str, ask: str) -> str:
    """Turns with a heading for each role."""
    user_turn = f'{{{{ else if eq .Role "user" }}}}{user}'
    return f"{_EACH}{_SYSTEM}{system}{user_turn}{_ASSISTANT}{assistant}{_ENDS}{ask}"


def _bracketed(gap: str, eos: str) -> str:
    question = f"{_USER}[INST] {_FIRST}{_CONTENT}{gap}[/INST]"
    return f"{_PLACED}{question}{_ASSISTANT} {_CONTENT}{eos}{_ENDS}"


def go_templates(eos: str) -> Iterator[tuple[str, str]]:
    """Every known way to write a conversation, by name; `eos` is the end-of-text token."""
    turns = {
        "chatml": (f"<|im_start|>{_ROLE}\n{_CONTENT}<|im_end|>\n", "<|im_start|>assistant\n"),
        "llama3": (
            f"<|start_header_id|>{_ROLE}<|end_header_id|>\n\n{_CONTENT}<|eot_id|>",
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        "phi3": (f"<|{_ROLE}|>\n{_CONTENT}<|end|>\n", "<|assistant|>\n"),
        "zephyr": (f"<|{_ROLE}|>\n{_CONTENT}{eos}\n", "<|assistant|>\n"),
        "granite": (
            f"<|start_of_role|>{_ROLE}<|end_of_role|>{_CONTENT}<|end_of_text|>\n",
            "<|start_of_role|>assistant<|end_of_role|>",
        ),
    }
    for name, (turn, ask) in turns.items():
        for kind, template in _each(turn, ask).items():
            yield name + kind, template
    yield (
        "gemma",
        f"{_PLACED}{_USER}<start_of_turn>user\n{_FIRST}{_CONTENT}<end_of_turn>\n{_ASSISTANT}"
        f"<start_of_turn>model\n{_CONTENT}<end_of_turn>\n{_ENDS}<start_of_turn>model\n",
    )
    yield "mistral", _bracketed(" ", eos)
    yield "mistral v3", _bracketed("", eos)
    yield (
        "vicuna",
        _headed(
            f"{_CONTENT}\n\n", f"USER: {_CONTENT}\n", f"ASSISTANT: {_CONTENT}{eos}\n", "ASSISTANT:"
        ),
    )
    yield (
        "alpaca",
        _headed(
            f"{_CONTENT}\n\n",
            f"### Instruction:\n{_CONTENT}\n\n",
            f"### Response:\n{_CONTENT}{eos}\n\n",
            "### Response:\n",
        ),
    )


@dataclass(frozen=True)
class GoTemplate:
    """A Go template that writes what the tokenizer's chat template writes."""

    name: str
    text: str
    system: str
    """What the chat template says by itself where no system prompt is given."""
    compared: int
    blanks: tuple[str, ...]
    """Dialogues that agree but for blanks at the edges of a message, which Go can't trim."""


@dataclass(frozen=True)
class OllamaExport:
    """A Modelfile and its model."""

    gguf: GgufExport
    template: GoTemplate


def export_ollama(source: ExportSource, target: Path, kind: str) -> OllamaExport:
    """Writes a folder for `ollama create NAME -f Modelfile`."""
    facts = gguf_facts(source, "ollama", kind)
    tokenizer = source.tokenizer
    template = find_go_template(tokenizer)
    stops = [str(tokenizer.convert_ids_to_tokens(each)) for each in sorted(source.stops)]
    with export_folder(target, facts) as partial:
        found = write_model(source, partial, kind)
        text = render_modelfile(found.file, template, stops)
        (partial / MODELFILE).write_text(text, encoding="utf-8")
        check_modelfile(partial / MODELFILE, template, stops)
    return OllamaExport(found, template)


def find_go_template(tokenizer: Any) -> GoTemplate:
    """The known template that agrees with the tokenizer's; RunError if none does."""
    if not tokenizer.chat_template:
        fact = "the tokenizer has no chat template, and Ollama asks with one"
        raise RunError(Problem("--to ollama", fact, "train with data.chat_template, or use gguf"))
    wanted = _prompts(tokenizer)
    bos = tokenizer.bos_token or ""
    added = bool(bos) and tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id
    nearest: tuple[int, str] = (-1, "")
    for name, text in go_templates(tokenizer.eos_token or ""):
        for before in dict.fromkeys(["", "" if added else bos]):
            found = _compare(name, before + text, wanted, bos if added else "")
            if isinstance(found, GoTemplate):
                return found
            nearest = max(nearest, found, key=lambda each: each[0])
    fact = f"no known Go template writes what the chat template writes ({nearest[1]})"
    fix = "export --to gguf: llama.cpp runs the chat template itself"
    raise RunError(Problem("--to ollama", fact, fix))


@dataclass(frozen=True)
class _Wanted:
    """A prompt as the chat template writes it, and the same without blanks around messages."""

    conversation: Conversation
    text: str
    stripped: Conversation
    stripped_text: str


def _compare(
    name: str, template: str, wanted: Mapping[str, _Wanted], bos: str
) -> GoTemplate | tuple[int, str]:
    """The template, or after how many dialogues it first differs, and at which."""
    system = _default_system(template, wanted, bos)
    blanks = []
    for passed, (dialogue, prompt) in enumerate(wanted.items()):
        if bos + render_go(template, prompt.conversation, system) == prompt.text:
            continue
        if bos + render_go(template, prompt.stripped, system) != prompt.stripped_text:
            return passed, f"{name} differs at {dialogue!r}"
        blanks.append(dialogue)
    return GoTemplate(name, template, system, len(wanted), tuple(blanks))


def _prompts(tokenizer: Any) -> dict[str, _Wanted]:
    """The dialogues without tools up to their last answer, as the tokenizer asks for it."""

    def written(conversation: Conversation) -> str:
        messages = conversation.messages
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return str(text)

    found = {}
    for name, whole in parity_dialogues().items():
        asked = whole.until(len(whole.messages) - 1)
        if asked.tools:
            continue
        stripped = [{**each, "content": each["content"].strip()} for each in asked.messages]
        bare = Conversation(stripped)
        try:
            found[name] = _Wanted(asked, written(asked), bare, written(bare))
        except TEMPLATE_ERRORS:
            continue  # it has no system prompts, say; training refuses these as well
    return found


def _default_system(template: str, wanted: Mapping[str, _Wanted], bos: str) -> str:
    """What stands in a prompt where a given system prompt would stand."""
    first = next(iter(wanted.values()))
    marked = Conversation([{"role": "system", "content": _MARK}, *first.conversation.messages])
    before, _, after = (bos + render_go(template, marked)).partition(_MARK)
    text, around = first.text, len(before + after)
    fits = after and text.startswith(before) and text.endswith(after) and len(text) > around
    return text[len(before) : len(text) - len(after)] if fits else ""


def render_modelfile(file: str, template: GoTemplate, stops: list[str]) -> str:
    """The text of a Modelfile."""
    lines = [f"FROM ./{file}", f'TEMPLATE """{template.text}"""']
    if template.system:
        lines.append(f'SYSTEM """{template.system}"""')
    lines += [f'PARAMETER stop "{stop}"' for stop in stops]
    return "\n".join(lines) + "\n"


def check_modelfile(path: Path, template: GoTemplate, stops: list[str]) -> None:
    """Refuses a Modelfile that says anything else than was meant, or names a missing file."""
    text = path.read_text(encoding="utf-8")
    first, _, rest = text.partition("\n")
    file = path.parent / first.removeprefix("FROM ./")
    parts = rest.split('"""')
    said = {key.split()[-1]: value for key, value in zip(parts[::2], parts[1::2], strict=False)}
    expected = {"TEMPLATE": template.text} | (
        {"SYSTEM": template.system} if template.system else {}
    )
    stopped = [line.partition(" stop ")[2].strip('"') for line in parts[-1].split("\n") if line]
    if not file.is_file() or said != expected or stopped != stops:
        raise RunError(Problem(MODELFILE, "read back, it says something else", "report this"))
