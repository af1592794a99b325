"""`data.chat_template_kwargs`: values in the template's own text, for training and every server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig

from shardtune.config.job import ModelSection
from shardtune.core.model.template_variables import read_names, variables, with_defaults
from shardtune.data.chat_template import PROBES, ChatTemplate
from shardtune.data.conversation import Conversation
from shardtune.data.encode import Text
from shardtune.data.template_parity import folder_reader, require_parity, training_reader
from shardtune.errors import JobError
from shardtune.models import tiny
from shardtune.models.model_files import ModelFiles
from shardtune.models.set_chat_template import set_template_defaults
from tests.jobs import make_job

TURN = "{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}"
# As GLM-4.7's and Nemotron 3's: an answer without reasoning has an empty thought, and asking for
# one opens a thought unless it is told not to.
OPENS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set content = m.content if '</think>' in m.content else '<think></think>' ~ m.content %}"
    "{{ '<|im_start|>assistant\n' ~ content ~ '<|im_end|>\n' }}"
    "{% else %}" + TURN + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{{ '<think></think>' if enable_thinking is defined and not enable_thinking "
    "else '<think>\n' }}{% endif %}"
)
# As Qwen3's: an empty thought of two blank lines, in the last answer and where it is asked for.
BLANK = (
    "{% for m in messages %}{% if m.role == 'assistant' and loop.last %}"
    "{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' ~ m.content ~ '<|im_end|>\n' }}"
    "{% else %}" + TURN + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
# As DeepSeek-V3.1's and SmolLM3's: a default of its own, read in a macro and in a loop.
OWN_DEFAULT = (
    "{% if not thinking is defined %}{% set thinking = true %}{% endif %}"
    "{% macro begin() %}{{ '<think>' if thinking else '</think>' }}{% endmacro %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\n</think>' ~ m.content ~ '<|im_end|>\n' }}"
    "{% else %}" + TURN + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ begin() }}{% endif %}"
)
MARKED = OPENS.replace(
    "{{ '<|im_start|>assistant\n' ~ content ~ '<|im_end|>\n' }}",
    "{{ '<|im_start|>assistant\n' }}{% generation %}{{ content ~ '<|im_end|>' }}"
    "{% endgeneration %}{{ '\n' }}",
)
OFF = {"enable_thinking": False}
SWITCHED = {
    "opens": (OPENS, OFF, "<think></think>"),
    "blank": (BLANK, OFF, "<think>\n\n</think>\n\n"),
    "own default": (OWN_DEFAULT, {"thinking": False}, "</think>"),
    "generation": (MARKED, OFF, "<think></think>"),
}
TALK = Conversation(
    [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
    ]
)


def with_template(template: Any, values: dict[str, Any] | None = None) -> Any:
    tokenizer = tiny.tokens()
    tokenizer.chat_template = template
    set_template_defaults(tokenizer, values or {})
    return tokenizer


def write(tokenizer: Any, conversation: Conversation, **settings: Any) -> str:
    return str(
        tokenizer.apply_chat_template(
            conversation.messages, tools=conversation.tools, tokenize=False, **settings
        )
    )


def refused(template: Any, values: dict[str, Any]) -> tuple[str, str]:
    with pytest.raises(JobError) as caught:
        with_template(template, values)
    (problem,) = caught.value.problems
    assert problem.place == "data.chat_template_kwargs"
    return problem.fact, problem.fix


@pytest.mark.parametrize("name", SWITCHED)
def test_it_writes_what_is_written_with_the_value_given(name: str) -> None:
    template, values, thought = SWITCHED[name]
    plain, changed = with_template(template), with_template(template, values)
    for asks in (True, False):
        text = write(changed, TALK, add_generation_prompt=asks)
        assert text == write(plain, TALK, add_generation_prompt=asks, **values)
        # Who asks may still say otherwise.
        others = dict.fromkeys(values, True)
        text = write(changed, TALK, add_generation_prompt=asks, **others)
        assert text == write(plain, TALK, add_generation_prompt=asks, **others)
    assert write(changed, TALK, add_generation_prompt=True).endswith(f"assistant\n{thought}")


@pytest.mark.parametrize("name", SWITCHED)
def test_before_a_trained_answer_stands_what_a_server_asks_with(name: str) -> None:
    template, values, _ = SWITCHED[name]
    changed = ChatTemplate(with_template(template, values))
    (found,) = changed.texts([TALK])
    assert isinstance(found, Text)
    assert found.spans is not None
    start, end = found.spans[-1]
    assert found.text[:start] == changed.prompt(TALK.until(3))
    assert found.text[start:end] == "4<|im_end|>"


@pytest.mark.parametrize("name", SWITCHED)
def test_training_and_the_saved_folder_agree(name: str, tmp_path: Path) -> None:
    template, values, _ = SWITCHED[name]
    base = tmp_path / "base"
    own = with_template(template)
    own.save_pretrained(base)
    (base / "config.json").write_text('{"model_type": "llama"}')
    data = {"chat_template_kwargs": values}
    tokenizer = ModelFiles.of_job(make_job(model={"name": str(base)}, data=data)).tokenizer
    tokenizer.save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=[tiny.END]).save_pretrained(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert saved.chat_template == with_defaults(template, values)
    trained = training_reader(tokenizer, frozenset({tiny.END}))
    assert require_parity(trained, [folder_reader(tmp_path)], tokenizer).compared >= 13
    # A run from this result sets it again, and both agree on what it then is.
    again = ModelFiles(ModelSection(name=str(base)), None, {**values}).tokenizer
    set_template_defaults(again, dict.fromkeys(values, True))
    plain = with_template(template)
    expected = write(plain, TALK, add_generation_prompt=True, **dict.fromkeys(values, True))
    assert write(again, TALK, add_generation_prompt=True) == expected


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        0,
        -3,
        1e-05,
        1e22,
        "",
        "high",
        'it\'s "so"\\\n%}{{ x }}é😀',
        [],
        [1, None],
    ],
)
def test_values_are_what_they_were(value: Any) -> None:
    template = "{{ [given] | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    text = write(with_template(template, {"given": value}), TALK)
    assert text == write(with_template(template), TALK, given=value)


@pytest.mark.parametrize("start", ["\n", "  ", " {% if true %}x{% endif %}", "{#- note -#}\n"])
def test_how_a_template_begins_stays_as_it_is(start: str) -> None:
    for values in (OFF, {**OFF, "messages_": [1]}):
        template = start + OPENS + "{{ messages_ }}"
        text = write(with_template(template, values), TALK)
        assert text == write(with_template(template), TALK, **values)


def test_several_templates() -> None:
    """Cohere's and Hermes' have one for tools."""
    templates = {"default": OPENS, "tool_use": "{{ tools | length }}" + CHATTY}
    changed = with_template(templates, OFF)
    assert set(changed.chat_template) == {"default", "tool_use"}
    assert write(changed, TALK) == write(with_template(templates), TALK, **OFF)
    called = PROBES["tools"]
    assert write(changed, called) == write(with_template(templates), called, **OFF)
    fact, _ = refused(templates, {"other": 1})
    assert fact.endswith("it reads enable_thinking")


CHATTY = "{% for m in messages %}" + TURN + "{% endfor %}"


def test_names_that_are_not_read() -> None:
    assert refused(OPENS, {"enable_thinkin": False}) == (
        "the chat template never reads 'enable_thinkin'; it reads enable_thinking",
        "did you mean 'enable_thinking'?",
    )
    assert refused(CHATTY, OFF) == (
        "the chat template never reads 'enable_thinking'; it reads no variables",
        "leave it out",
    )
    assert refused(OPENS + "{{ tokenize }}", {"tokenize": True})[0].startswith("tokenize is given")
    assert refused(None, OFF)[0] == "sets enable_thinking, and the tokenizer has no chat template"


def test_words_that_are_no_booleans() -> None:
    assert refused(OPENS, {"enable_thinking": "no"}) == (
        "enable_thinking is the text 'no', which is as true as any text",
        "write enable_thinking: true, or enable_thinking: false",
    )
    with_template(OPENS + "{{ mode == 'on' }}", {"mode": "on"})  # a word of the template's own


def test_a_value_that_the_template_cannot_take() -> None:
    effort = CHATTY + "{{ 'effort: ' + (effort | default('low')) }}"
    fact, _ = refused(effort, {"effort": 3})
    assert fact.startswith('with {"effort": 3} the template fails with a question and an answer: ')


def test_which_names_are_meant_to_be_set() -> None:
    template = (
        "{% if not a is defined %}{% set a = 1 %}{% endif %}{% set b = b | default(2) %}"
        "{% if messages %}{% set inner = 1 %}{% endif %}{{ inner }}{{ c }}{{ raise_exception }}"
        "{% macro m(x) %}{{ x }}{{ d }}{% endmacro %}{{ bos_token }}{{ namespace(e=1).e }}"
        "{% for each in messages %}{% if each %}{% break %}{% endif %}{% endfor %}"
    )
    assert variables(template) == {"a", "b", "c", "d"}
    assert read_names(template) == {"a", "b", "c", "d", "inner", "messages", "bos_token"}
