"""Modelfiles: Go templates that write what the chat template writes, or a refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtune.core.model.chat_templates import TEMPLATE_TOKENS, read_chat_template
from shardtune.data.conversation import Conversation
from shardtune.errors import RunError
from shardtune.export.go_template import render_go
from shardtune.export.ollama_export import (
    check_modelfile,
    export_ollama,
    find_go_template,
    go_templates,
)
from shardtune.export.source import ExportSource
from shardtune.models import tiny

TALK = Conversation(
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Why"},
        {"role": "user", "content": "so?"},
    ]
)


def test_go_templates_are_rendered_as_go_does() -> None:
    template = (
        "{{- if .System }}S:{{ .System }}\n{{- end }} |{{ range $i, $m := .Messages }}"
        '{{ if eq .Role "user" }} {{ $i }}={{ .Content }}'
        '{{ else if and .Content (ne .Role "system") }}<{{ .Content }}>'
        "{{ else }}-{{ end }}{{ end }}"
    )
    # A dash takes the newline before it; the two last questions are one message.
    assert render_go(template, TALK) == "S:Be brief. |- 1=Hi<Yes?> 3=Why\n\nso?"


def test_a_template_that_isnt_ended_is_told() -> None:
    with pytest.raises(ValueError, match="isn't ended"):
        render_go("{{ range .Messages }}{{ .Role }}", TALK)


@pytest.mark.parametrize("name", TEMPLATE_TOKENS)
def test_templates_by_name_have_a_go_template(name: str) -> None:
    tokenizer = tiny.tokens()
    tokenizer.chat_template = read_chat_template(name)
    found = find_go_template(tokenizer)
    assert found.name.partition(" ")[0] == name
    assert found.compared == 17
    assert not found.system
    assert set(found.blanks) <= {
        "blanks at the edges", "line ends of Windows", "empty system prompt", "empty question",
    }  # fmt: skip


def test_a_default_system_prompt_goes_to_the_modelfile() -> None:
    tokenizer = tiny.tokens()
    tokenizer.chat_template = (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
        + tokenizer.chat_template
    )
    found = find_go_template(tokenizer)
    assert (found.name, found.system) == ("chatml", "Be kind.")


def test_a_beginning_of_text_token_is_written_once() -> None:
    tokenizer = tiny.tokens()
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    assert find_go_template(tokenizer).text.startswith("<|endoftext|>")


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\\n' }}{% endfor %}",
        tiny.CHAT_TEMPLATE.replace("'<|im_start|>' ~", "'<|im_start|> ' ~"),
    ],
)
def test_an_unknown_template_is_refused(template: str) -> None:
    tokenizer = tiny.tokens()
    tokenizer.chat_template = template
    with pytest.raises(RunError, match=r"no known Go template .* differs at "):
        find_go_template(tokenizer)


def test_names_are_different() -> None:
    names = [name for name, _ in go_templates("</s>")]
    assert len(names) == len(set(names))


@pytest.mark.process
def test_a_modelfile_and_its_model(source: ExportSource, tmp_path: Path) -> None:
    found = export_ollama(source, tmp_path / "out", "q8_0")
    file = tmp_path / "out" / "Modelfile"
    assert (tmp_path / "out" / "README.md").is_file()
    text = file.read_text()
    assert text.startswith("FROM ./model-Q8_0.gguf\nTEMPLATE ")
    assert 'PARAMETER stop "<|im_end|>"' in text
    file.write_text(text.replace("assistant", "user"))
    with pytest.raises(RunError, match="says something else"):
        check_modelfile(file, found.template, ["<|im_end|>"])
