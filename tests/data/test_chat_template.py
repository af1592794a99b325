"""Chat templates: exactly the assistant's words and their terminators are trained.

The templates here have the traits of families of real ones, in our own wording; beside each stands
what it has to train, written without any template.
"""

from __future__ import annotations

import json
import re
from functools import cache

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardtune.data.chat_template import ChatTemplate
from shardtune.data.conversation import Conversation, read_conversation
from shardtune.data.encode import Encoder
from shardtune.data.records import Unreadable
from shardtune.models import tiny

TURN = "{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

CHATML = "{% for m in messages %}" + TURN + "{% endfor %}" + ASK
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    + CHATML
)
# No generation prompt at all, and a blank before the answer.
BRACKETS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' ~ m.content ~ eos_token }}"
    "{% else %}{{ '[INST] ' ~ m.content ~ '[/INST]' }}{% endif %}{% endfor %}"
)
# Contents are stripped, roles must alternate.
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant must take turns') }}{% endif %}"
    "{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content | trim ~ '<|im_end|>\\n' }}{% endfor %}" + ASK
)
# The whole ends with one more token, unless an answer is asked for.
FINAL_TOKEN = (
    "{% for m in messages %}" + TURN + "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|endoftext|>{% endif %}"
)
# The reasoning stays only in the last turn, where it is added if there is none.
THINKING = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set answer = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if loop.last %}{% set thought = m.content.split('</think>')[0] "
    "if '</think>' in m.content else '<think>\n' %}"
    "{{ '<|im_start|>assistant\n' ~ thought ~ '</think>\n\n' ~ answer ~ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>assistant\n' ~ answer ~ '<|im_end|>\n' }}{% endif %}"
    "{% else %}" + TURN + "{% endif %}{% endfor %}" + ASK
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{% generation %}"
    "{{ m.content ~ '<|im_end|>' }}{% endgeneration %}\n{% else %}" + TURN + "{% endif %}"
    "{% endfor %}" + ASK
)
# Asks for an answer with something that no finished turn has.
FORCED_THOUGHT = (
    "{% for m in messages %}" + TURN + "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
NO_SYSTEM = "{% for m in messages %}{% if m.role != 'system' %}" + TURN + "{% endif %}{% endfor %}"


@cache
def with_template(template):
    tokenizer = tiny.tokens()
    tokenizer.chat_template = template
    return tokenizer


def render(tokenizer, *conversations):
    return ChatTemplate(tokenizer).texts(list(conversations))


def talk(*contents, system=None):
    turns = [
        {"role": "assistant" if place % 2 else "user", "content": content}
        for place, content in enumerate(contents)
    ]
    return Conversation([{"role": "system", "content": system}] * (system is not None) + turns)


def trained_text(tokenizer, conversation):
    """What of the conversation is trained, read back from the tokens, stretch by stretch."""
    (text,) = render(tokenizer, conversation)
    assert not isinstance(text, Unreadable), text.reason
    (tokens,) = Encoder(tokenizer).encode([text], special=False)
    assert tokenizer.decode(tokens.ids) == text.text
    runs, run = [], []
    for token, trained in zip([*tokens.ids, 0], [*tokens.trained, False], strict=True):
        if trained:
            run.append(token)
        elif run:
            runs.append(tokenizer.decode(run))
            run = []
    return runs


def answers(conversation):
    return [m["content"] for m in conversation.messages if m["role"] == "assistant"]


def with_end(conversation):
    return [f"{answer}<|im_end|>" for answer in answers(conversation)]


def expected_final_token(conversation):
    *others, last = with_end(conversation)
    if conversation.messages[-1]["role"] == "assistant":
        last += "\n<|endoftext|>"
    return [*others, last]


def expected_thinking(conversation):
    *others, last = answers(conversation)
    ends_so = conversation.messages[-1]["role"] == "assistant"
    if not ends_so:
        others, last = [*others, last], None
    shown = [f"{answer}<|im_end|>" for answer in others]
    return shown if last is None else [*shown, f"<think>\n</think>\n\n{last}<|im_end|>"]


TEMPLATES = {
    "chatml": (CHATML, with_end),
    "default system prompt": (DEFAULT_SYSTEM, with_end),
    "brackets": (BRACKETS, lambda talk: [f" {answer}<|im_end|>" for answer in answers(talk)]),
    "strict": (STRICT, lambda talk: [f"{answer.strip()}<|im_end|>" for answer in answers(talk)]),
    "final token": (FINAL_TOKEN, expected_final_token),
    "thinking": (THINKING, expected_thinking),
    "marked": (MARKED, with_end),
    "no system": (NO_SYSTEM, None),
}

# Words that a template or a tokenizer could trip over stand among any text.
words = st.one_of(
    st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=12),
    st.sampled_from(
        ["a", "<", "<|im_end|>", "<|im_start|>assistant\n", "[/INST] ", " ", "\n", "😀"]
    ),
)
contents = st.lists(words, min_size=1, max_size=4).map("".join).filter(str.strip)


@pytest.mark.parametrize("name", [name for name, (_, expected) in TEMPLATES.items() if expected])
@given(st.lists(contents, min_size=2, max_size=7))
def test_exactly_the_answers_are_trained(name, words):
    template, expected = TEMPLATES[name]
    if name == "thinking":  # it takes blanks away from answers, and its own tags for reasoning
        words = [word.strip() for word in words]
        assume(not any("</think>" in word for word in words))
    conversation = talk(*words)
    assert trained_text(with_template(template), conversation) == expected(conversation)


def test_reasoning_is_trained_where_the_template_keeps_it():
    conversation = talk("1+1?", "<think>\neasy</think>2", "2+2?", "<think>\nhm</think>4")
    assert trained_text(with_template(THINKING), conversation) == [
        "2<|im_end|>",
        "<think>\nhm</think>\n\n4<|im_end|>",
    ]


def test_a_generation_prompt_that_no_turn_starts_with_is_refused():
    (found,) = render(with_template(FORCED_THOUGHT), talk("1+1?", "2"))
    assert isinstance(found, Unreadable)
    assert "asks for an answer with '<|im_start|>assistant\\n<think>\\n'" in found.reason


def test_a_past_turn_may_lack_what_the_generation_prompt_opens():
    # The same with the thought in the last turn, where the next answer will be asked for with it.
    template = FORCED_THOUGHT.replace(
        TURN,
        "{% if m.role == 'assistant' and loop.last %}"
        "{{ '<|im_start|>assistant\\n<think>\\n</think>' ~ m.content ~ '<|im_end|>\\n' }}"
        "{% else %}" + TURN + "{% endif %}",
    )
    assert trained_text(with_template(template), talk("1+1?", "<2", "2+2?", "4")) == [
        "<2<|im_end|>",
        "</think>4<|im_end|>",
    ]


def test_a_template_that_leaves_words_out_is_refused():
    tokenizer = with_template(NO_SYSTEM)
    good, bad = render(tokenizer, talk("a", "b"), talk("a", "b", system="Speak like a pirate."))
    assert good.text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    assert bad.reason == "can't write system prompts: leaves out turn 1 (system)"
    assert bad.culprit == "template"


def test_a_refusal_of_the_template_is_told_and_spoils_only_its_row():
    tokenizer = with_template(STRICT)
    twice = Conversation([{"role": "user", "content": "a"}, *talk("b", "c").messages])
    first, bad, last = render(tokenizer, talk("a", "b"), twice, talk("c", "d"))
    assert bad.reason == "the chat template refuses it: user and assistant must take turns"
    assert bad.culprit == "", "others of the kind can be written"
    assert first.text.count("<|im_end|>") == last.text.count("<|im_end|>") == 2


def test_an_error_in_the_template_is_told():
    (bad,) = render(with_template("{{ messages[0].nothing.more }}"), talk("a", "b"))
    assert bad.reason.startswith("can't write a question and its answer: ")
    (bad,) = render(with_template("{{ 1 / 0 }}"), talk("a", "b"))
    assert bad.reason == (
        "can't write a question and its answer: ZeroDivisionError: division by zero"
    )


def test_a_template_cannot_reach_python():
    attack = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    (bad,) = render(with_template(attack), talk("a", "b"))
    assert "access to attribute '__class__'" in bad.reason


@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM, BRACKETS, THINKING])
def test_a_leading_assistant_turn_is_trained(template):
    conversation = Conversation(
        [{"role": "assistant", "content": "Hello!"}, *talk("a", "b").messages]
    )
    runs = trained_text(with_template(template), conversation)
    assert len(runs) == 2
    assert runs[0].strip().endswith("Hello!<|im_end|>")


def test_a_trailing_user_turn_is_not_trained():
    assert trained_text(with_template(CHATML), talk("a", "b", "c")) == ["b<|im_end|>"]


def test_two_assistant_turns_in_a_row_are_both_trained():
    conversation = Conversation(
        [*talk("a", "b").messages, {"role": "assistant", "content": "more"}]
    )
    assert trained_text(with_template(CHATML), conversation) == ["b<|im_end|>", "more<|im_end|>"]


def test_a_turn_of_weight_0_is_not_trained():
    conversation = read_conversation(
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "wrong", "weight": 0},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": "right", "weight": 1},
        ]
    )
    assert trained_text(with_template(CHATML), conversation) == ["right<|im_end|>"]


TOOLS = (
    "{% if tools %}{{ 'tools: ' ~ tools | map(attribute='function.name') | join(' ') ~ '\\n' }}"
    "{% endif %}{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ 'call ' ~ c.function.name }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}" + ASK
)
CALL = [
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "forecast"}}]},
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "content": "It rains."},
]


def test_tools_and_calls_reach_the_template():
    tools = [{"type": "function", "function": {"name": "forecast", "description": "tomorrow"}}]
    conversation = read_conversation(CALL, tools)
    tokenizer = with_template(TOOLS)
    assert trained_text(tokenizer, conversation) == [
        "call forecast<|im_end|>",
        "It rains.<|im_end|>",
    ]
    assert render(tokenizer, conversation)[0].text.startswith("tools: forecast\n")


def test_calls_that_the_template_leaves_out_are_refused():
    (bad,) = render(with_template(CHATML), read_conversation(CALL))
    assert bad.reason == "can't write tool calls: leaves out the tool calls of turn 2"
    assert bad.culprit == "template"


WEATHER = [{"type": "function", "function": {"name": "forecast", "description": "tomorrow"}}]
WRITTEN_CALLS = (
    "{% for c in m.tool_calls or [] %}"
    "{{ 'call ' ~ c.function.name ~ c.function.arguments | tojson }}{% endfor %}"
)
LISTED = "{{ tools | map(attribute='function.name') | join(' ') }}"
# As Qwen3: an answer that nothing follows gets a thought, an empty one if there is none.
THINKING_TOOLS = (
    "{% if tools %}" + LISTED + "{% endif %}{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ "
    "'\n' }}{% if m.role == 'assistant' and (loop.last or m.reasoning_content) %}"
    "{{ '<think>\n' ~ (m.reasoning_content or '') ~ '\n</think>\n\n' }}{% endif %}{{ m.content }}"
    + WRITTEN_CALLS
    + "{{ '<|im_end|>\n' }}{% endfor %}"
    + ASK
)
# As Qwen3.5: all answers behind the last question have a thought, and asking opens it.
OPENED_THOUGHT = (
    "{% if tools %}" + LISTED + "{% endif %}"
    "{% set n = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set n.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' }}"
    "{% if m.role == 'assistant' and loop.index0 > n.last %}{{ '<think>\n\n</think>\n\n' }}"
    "{% endif %}{{ m.content }}" + WRITTEN_CALLS + "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# As Mistral: tools stand before the last question, nothing asks for an answer.
TOOLS_LAST = (
    "{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools and m == asked[-1] %}"
    "{{ '[TOOLS]' ~ tools[0].function.name ~ '[/TOOLS]' }}{% endif %}"
    "{{ '[INST] ' ~ m.content ~ '[/INST]' }}{% elif m.role == 'tool' %}"
    "{{ '[RESULT]' ~ m.content ~ '[/RESULT]' }}{% else %}"
    "{{ ' ' ~ m.content if m.content }}" + WRITTEN_CALLS + "{{ eos_token }}{% endif %}{% endfor %}"
)
CALLED = "call forecast{}<|im_end|>"


def again(question):
    return [{**CALL[0], "content": question}, *CALL[1:]]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            THINKING_TOOLS,
            [
                *(CALLED, "It rains.<|im_end|>"),
                *(CALLED, "<think>\n\n</think>\n\nIt rains.<|im_end|>"),
            ],
        ),
        (
            OPENED_THOUGHT,
            [CALLED, "It rains.<|im_end|>"]
            + [f"\n</think>\n\n{answer}" for answer in (CALLED, "It rains.<|im_end|>")],
        ),
        (TOOLS_LAST, [CALLED, " It rains.<|im_end|>"] * 2),
    ],
    ids=["thinking", "opened thought", "tools before the last question"],
)
def test_calls_without_words_are_trained(template, expected):
    conversation = read_conversation([*CALL, *again("and then?")], WEATHER)
    assert trained_text(with_template(template), conversation) == expected


def test_calls_that_only_the_tools_name_are_refused():
    template = "{% if tools %}" + LISTED + "{% endif %}" + CHATML
    (bad,) = render(with_template(template), read_conversation(CALL, WEATHER))
    assert bad.reason == "can't write tool calls: leaves out the tool calls of turn 2"


def test_tools_that_the_template_leaves_out_are_refused():
    (bad,) = render(with_template(CHATML), read_conversation(talk("a", "b").messages, WEATHER))
    assert bad.reason == "can't write tools: leaves out the tools"
    assert bad.culprit == "template"


def test_results_that_the_template_leaves_out_are_refused():
    template = "{% for m in messages %}{% if m.role != 'tool' %}" + TURN + "{% endif %}{% endfor %}"
    said = [*talk("a", "<call>").messages, {"role": "tool", "content": "rain"}, CALL[-1]]
    (bad,) = render(with_template(template), read_conversation(said))
    assert "leaves out" in bad.reason
    assert bad.culprit == "template"
    as_json = template.replace("{% endif %}{% endfor %}", "{% else %}{{ m.content | tojson }}"
                               "{% endif %}{% endfor %}")  # fmt: skip
    said[2] = {"role": "tool", "content": 'it "rains"'}
    assert trained_text(with_template(as_json), read_conversation(said))[1] == (
        "<|im_start|>assistant\nIt rains.<|im_end|>"
    )


TAGGING = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' ~ "
    "m.content ~ '\n</tool_response><|im_end|>\n' }}{% else %}" + TURN + "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "written"),
    [(TAGGING, "user\n<tool_response>\nrain\n</tool_response><|im_end|>"),
     (CHATML, "tool\n<tool_response>\nrain\n</tool_response><|im_end|>")],
)  # fmt: skip
def test_tags_around_a_result_are_written_once(template, written):
    result = {"from": "tool", "value": "<tool_response>\nrain\n</tool_response>"}
    said = [*talk("a", "<tool_call>\n{}\n</tool_call>").messages, result, CALL[-1]]
    (text,) = render(with_template(template), read_conversation(said))
    assert f"<|im_start|>{written}\n" in text.text
    assert text.text.count("<tool_response>") == 1


def test_a_result_inside_of_an_answer_is_refused():
    # As Gemma 4: what is said beside a call stands behind its result.
    template = (
        "{% if tools %}" + LISTED + "{% endif %}{% for m in messages %}{% if m.role != 'tool' %}"
        "{{ '<|im_start|>' ~ m.role ~ '\n' }}" + WRITTEN_CALLS + "{% if m.tool_calls and not "
        "loop.last %}{{ loop.nextitem.content }}{% endif %}{{ m.content ~ '<|im_end|>\n' }}"
        "{% endif %}{% endfor %}"
    )
    turns = [CALL[0], {**CALL[1], "content": "Let me look."}, {**CALL[2], "content": "wet"}]
    (bad,) = render(with_template(template), read_conversation([*turns, CALL[3]], WEATHER))
    assert bad.reason == "the chat template writes turn 3 (tool) inside of an answer"


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("known", ["reasoning_content", "thinking"])
def test_reasoning_has_the_name_that_the_template_knows(key, known):
    template = THINKING_TOOLS.replace("reasoning_content", known)
    turns = [CALL[0], {**CALL[-1], key: "clouds", "reasoning": "clouds"}]
    assert trained_text(with_template(template), read_conversation(turns)) == [
        "<think>\nclouds\n</think>\n\nIt rains.<|im_end|>"
    ]


def test_reasoning_that_the_template_leaves_out_is_refused():
    beside = read_conversation([CALL[0], {**CALL[-1], "reasoning_content": "clouds"}])
    (bad,) = render(with_template(CHATML), beside)
    assert bad.reason == (
        "can't write reasoning beside the content: leaves out the reasoning of turn 2"
    )
    assert bad.culprit == "template"
    cutting = CHATML.replace("m.content", "m.content.split('</think>')[-1]")
    inner = talk("a", "<think>easy</think>b", "c", "<think>hm</think>d")
    (bad,) = render(with_template(cutting), inner)
    assert bad.reason == "can't write reasoning in the content: leaves out the reasoning of turn 2"
    assert trained_text(with_template(CHATML), inner) == with_end(inner)


def test_both_forms_are_the_same_conversation():
    openai = read_conversation(
        [
            {"role": "system", "content": [{"type": "text", "text": "Be "}, "brief."]},
            {"role": "user", "content": "a", "name": None},
            {"role": "assistant", "content": "b"},
        ]
    )
    sharegpt = read_conversation(
        [
            {"from": "system", "value": "Be brief."},
            {"from": "Human", "value": "a"},
            {"from": "gpt", "value": "b"},
        ]
    )
    assert openai == sharegpt == talk("a", "b", system="Be brief.")


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        (None, "there are no turns"),
        ([], "there are no turns"),
        ("hello", "the turns are text, but no JSON"),
        ({"role": "user"}, "the turns are not a list"),
        (["hello"], "turn 1 is not an object"),
        ([{"text": "a"}], "turn 1 has 'text', but a turn has 'role' and 'content', or"),
        ([{"role": "asistant", "content": "a"}], "role 'asistant': did you mean 'assistant'"),
        ([{"role": "user"}], "turn 1 (user) has no content, not text"),
        ([{"role": "user", "content": 42}], "turn 1 (user) has content of type int, not text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "turn 1 has a part of type 'image'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "turn 1 has a part that is not text"),
        ([{"role": "user", "content": "a\0b"}], "turn 1 (user) holds a NUL character"),
        ([{"role": "user", "content": "a"}], "no assistant turn"),
        ([{"role": "assistant", "content": " \n"}], "turn 1 (assistant) is empty"),
        ([{"role": "assistant", "content": "a", "weight": 0.5}], "turn 1 has the weight 0.5, and"),
        ([{"role": "assistant", "content": "a", "weight": "0"}], "turn 1 has the weight '0', and"),
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_refused(turns, reason):
    with pytest.raises(Unreadable, match=re.escape(reason)):
        read_conversation(turns)


def test_tools_that_are_no_list_are_refused():
    with pytest.raises(Unreadable, match="'tools' is not a list"):
        read_conversation(CALL, {"name": "forecast"})
    with pytest.raises(Unreadable, match="'tools' is text, but no JSON"):
        read_conversation(CALL, "forecast")


def test_real_conversations_train_the_assistant_alone(real_tokenizer, shared_data):
    rows = json.loads((shared_data / "sharegpt_conversations.json").read_text())
    conversations = [read_conversation(row["conversations"]) for row in rows]
    texts = render(real_tokenizer, *conversations)
    encoded = Encoder(real_tokenizer).encode(texts, special=False)
    end = real_tokenizer.eos_token_id
    for conversation, tokens in zip(conversations, encoded, strict=True):
        trained = tokens.ids[tokens.trained].tolist()
        # Each answer has a terminator of its own, which splits the trained ids into the answers.
        spoken, answer = [], []
        for token in trained:
            if token == end:
                spoken.append(real_tokenizer.decode(answer).strip())
                answer = []
            else:
                answer.append(token)
        assert not answer
        assert spoken == [message.strip() for message in answers(conversation)]
