"""The spelling of calls is what a chat template itself writes; the packaged ones, and excerpts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pytest

from shardtune.core.model.chat_templates import TEMPLATE_TOKENS, read_chat_template
from shardtune.core.model.written_calls import Call, json_calls, template_spelling
from shardtune.models import tiny

TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}"
END = "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
CALLS = "{% for call in m.tool_calls or [] %}{% set f = call.function %}"
# As the templates of these models write their calls.
EXCERPTS = {
    "Mistral v3": (
        TURNS + "{% if m.tool_calls %}{% if m.tool_calls[0].id | length != 9 %}"
        "{{ raise_exception('ids have nine letters') }}{% endif %}[TOOL_CALLS] ["
        + CALLS + '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": '
        '"{{ call.id }}"}{{ ", " if not loop.last }}{% endfor %}]{% endif %}' + END,
        "mistral",
    ),
    "Mistral v11": (
        TURNS + CALLS + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"
        "{% endfor %}" + END,
        None,
    ),
    "QwQ, whose prompt opens a thought": (
        TURNS + CALLS + '<tool_call>\n{"name": "{{ f.name }}", "arguments": '
        "{{ f.arguments | tojson }}}\n</tool_call>{% endfor %}"
        + END.replace("{% endif %}", "<think>{% endif %}"),
        "hermes",
    ),
    "SmolLM3, which tells of calls and leaves them out": (
        'Write <tool_call>\n{"name": <name>, "arguments": <json>}\n</tool_call>' + TURNS + END,
        "hermes",
    ),
    "Qwen3-Coder": (
        TURNS + CALLS + "<tool_call>\n<function={{ f.name }}>\n</function>\n</tool_call>"
        "{% endfor %}" + END,
        None,
    ),
    "Phi-4-mini": (
        TURNS + CALLS + '<|tool_call|>[{"name": "{{ f.name }}", "arguments": {}}]<|/tool_call|>'
        "{% endfor %}" + END,
        None,
    ),
    "xLAM-2": (
        TURNS + "{% if m.tool_calls %}[" + CALLS + '{"name": "{{ f.name }}", "arguments": '
        '{{ f.arguments | tojson }}}{{ ", " if not loop.last }}{% endfor %}]{% endif %}' + END,
        None,
    ),
    "tools are shown, calls are not": ("{{ tools | tojson }}" + TURNS + END, None),
}  # fmt: skip
WRITTEN = {"chatml": "hermes", "llama3": "llama3_json"}


def parser(template: str) -> str | None:
    tokenizer = tiny.tokens()
    tokenizer.chat_template, tokenizer.bos_token = template, "<s>"

    def render(turns: Sequence[Mapping[str, object]], tools: Sequence[object], asks: bool) -> str:
        return str(
            tokenizer.apply_chat_template(
                list(turns), tools=list(tools), add_generation_prompt=asks, tokenize=False
            )
        )

    found = template_spelling(render)
    return found.parser if found else None


@pytest.mark.parametrize("name", TEMPLATE_TOKENS)
def test_the_packaged_templates(name: str) -> None:
    assert parser(read_chat_template(name)) == WRITTEN.get(name)


@pytest.mark.parametrize("name", EXCERPTS)
def test_what_other_templates_write(name: str) -> None:
    template, expected = EXCERPTS[name]
    assert parser(template) == expected


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "arguments": {"x": NaN}}', '{"name": "\\ud800", "arguments": {}}',
        '{"name": "f", "arguments": {"x": "\\udfff"}}', '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": {}', '{"name": "f", "arguments": {}} and',
        '[{"name": "f", "arguments": {}}, 1]', "[]", "",
        '{"name": "f", "arguments": {"x": 1e999}}',
        r'{"name": "f", "arguments": "{\"x\": 1e999}"}',
        r'{"name": "f", "arguments": "{\"x\": \"\\ud800\"}"}',
    ],
)  # fmt: skip
def test_what_no_client_could_read_is_no_call(text: str) -> None:
    assert json_calls(text) == []


def test_arguments_may_be_json_in_json() -> None:
    call = {"name": "f", "arguments": json.dumps({"x": "ü"})}
    assert json_calls(json.dumps([{"function": call}])) == [Call("f", {"x": "ü"})]
