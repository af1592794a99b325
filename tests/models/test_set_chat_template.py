"""Chat templates by name or from a file: written, masked, stopped and saved as a model's own."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from shardtune.config.job import ModelSection
from shardtune.core.model.chat_templates import TEMPLATE_TOKENS, TOOL_TEMPLATES
from shardtune.data.chat_template import PROBES, ChatTemplate
from shardtune.errors import JobError
from shardtune.models import tiny
from shardtune.models.model_files import ModelFiles
from shardtune.models.set_chat_template import end_of_turn, set_chat_template

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]
# What each writes of a question and an answer (by hand, from the models' cards), and its end.
WRITTEN = {
    "chatml": ("<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nB<|im_end|>\n", "<|im_end|>"),
    "llama3": (
        "<|start_header_id|>user<|end_header_id|>\n\nA<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nB<|eot_id|>",
        "<|eot_id|>",
    ),
    "gemma": (
        "<start_of_turn>user\nA<end_of_turn>\n<start_of_turn>model\nB<end_of_turn>\n",
        "<end_of_turn>",
    ),
    "phi3": ("<|user|>\nA<|end|>\n<|assistant|>\nB<|end|>\n", "<|end|>"),
    "mistral": ("[INST] A [/INST] B<|im_end|>", "<|im_end|>"),
    "zephyr": ("<|user|>\nA<|im_end|>\n<|assistant|>\nB<|im_end|>\n", "<|im_end|>"),
    "alpaca": ("### Instruction:\nA\n\n### Response:\nB<|im_end|>\n\n", "<|im_end|>"),
    "vicuna": ("USER: A\nASSISTANT: B<|im_end|>\n", "<|im_end|>"),
}


def without_template(name=None):
    """A tokenizer without a template, and with the tokens that one of the name needs."""
    tokenizer = tiny.tokens()
    tokenizer.chat_template = None
    tokenizer.add_tokens(list(TEMPLATE_TOKENS.get(name, ())), special_tokens=True)
    return tokenizer


@pytest.mark.parametrize("name", TEMPLATE_TOKENS)
def test_each_template(name):
    tokenizer = without_template(name)
    set_chat_template(tokenizer, name)
    text, end = WRITTEN[name]
    pair = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]
    assert tokenizer.apply_chat_template(pair, tokenize=False) == text
    assert end_of_turn(tokenizer) == tokenizer.convert_tokens_to_ids(end)
    template = ChatTemplate(tokenizer)
    (found,) = template.texts([type(PROBES["system prompts"])(TALK)])
    trained = [found.text[start:stop].strip() for start, stop in found.spans]
    assert trained == [f"2{end}", f"4{end}"]


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_templates_with_tools(name):
    tokenizer = without_template(name)
    set_chat_template(tokenizer, name)
    (found,) = ChatTemplate(tokenizer).texts([PROBES["tool calls"]])
    call, answer = [found.text[start:stop] for start, stop in found.spans]
    assert '"name": "CALLED"' in call
    assert answer.startswith("ANSWER")
    assert "RESULT" in found.text


def test_a_beginning_of_text_is_written_where_the_tokenizer_puts_one():
    from tokenizers import processors

    tokenizer = without_template()
    tokenizer.bos_token = "<|endoftext|>"
    set_chat_template(tokenizer, "zephyr")
    assert not tokenizer.apply_chat_template(TALK, tokenize=False).startswith("<|endoftext|>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 257)]
    )
    set_chat_template(tokenizer, "zephyr")
    assert tokenizer.apply_chat_template(TALK, tokenize=False).startswith("<|endoftext|><|system")


def test_tokens_that_are_missing_are_named():
    with pytest.raises(JobError) as caught:
        set_chat_template(without_template(), "gemma")
    (problem,) = caught.value.problems
    assert problem.place == "data.chat_template"
    assert "writes <start_of_turn>, <end_of_turn>" in problem.fact
    assert 'model.add_tokens: ["<start_of_turn>", "<end_of_turn>"]' in problem.fix
    assert "zephyr" in problem.fix


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (b"{% for m in messages %}\n{{ m.content }\n{% endfor %}", "(line 2)"),
        (b"{{ raise_exception('not today') }}", "not today"),
        (b"\xff", "not UTF-8"),
        (None, "neither a template's name nor a file"),
    ],
)
def test_a_file_that_is_no_template(tmp_path, content, fact):
    path = tmp_path / "mine.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(JobError) as caught:
        set_chat_template(without_template(), str(path))
    assert fact in caught.value.problems[0].fact


def test_a_name_that_is_nearly_one():
    with pytest.raises(JobError, match="did you mean 'chatml'"):
        set_chat_template(without_template(), "chat-ml")


def test_the_model_s_tokenizer_has_it_and_its_end_is_a_stop_token(tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text(
        "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '<|endoftext|>' }}{% endfor %}"
    )
    plain, own = (
        ModelFiles(ModelSection(name="tiny")),
        ModelFiles(ModelSection(name="tiny"), str(path)),
    )
    assert own.stop_ids == plain.stop_ids | {own.tokenizer.convert_tokens_to_ids("<|endoftext|>")}
    own.tokenizer.save_pretrained(tmp_path / "saved")
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert saved.chat_template == path.read_text()
    chosen = ModelFiles(ModelSection(name="tiny", stop_tokens=("<|im_end|>",)), str(path))
    assert chosen.stop_ids == {tiny.END}, "what the job says stands"
