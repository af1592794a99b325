"""Template parity: the shipped dialogues, three readers, and differences that must be refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardtune.core.model.chat_templates import TEMPLATE_TOKENS
from shardtune.data.conversation import Conversation, read_conversation
from shardtune.data.template_parity import (
    ChatReader,
    folder_reader,
    parity_dialogues,
    require_parity,
    training_reader,
    transformers_reader,
)
from shardtune.errors import RunError
from shardtune.models import tiny
from shardtune.models.set_chat_template import set_chat_template


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    from transformers import GenerationConfig

    tokenizer = tiny.tokens()
    tokenizer.save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=[tokenizer.eos_token_id]).save_pretrained(tmp_path)
    return tmp_path


def _trained(tokenizer: Any) -> ChatReader:
    return training_reader(tokenizer, frozenset([tokenizer.eos_token_id]))


def _plain(dialogue: Conversation) -> bool:
    roles = {message["role"] for message in dialogue.messages}
    return roles == {"user", "assistant"} and not dialogue.tools


def test_there_are_20_dialogues_that_training_can_read() -> None:
    dialogues = parity_dialogues()
    assert len(dialogues) == 20
    for each in dialogues.values():
        assert read_conversation(each.messages, each.tools).trained
    assert sum(each.tools is not None for each in dialogues.values()) == 3
    assert sum(each.messages[0]["role"] == "system" for each in dialogues.values()) >= 5


def test_a_folder_has_the_ids_of_training(saved: Path) -> None:
    tokenizer = tiny.tokens()
    parity = require_parity(_trained(tokenizer), [folder_reader(saved)], tokenizer)
    assert parity.compared == 20 - len(parity.untrainable)
    assert parity.compared + len(parity.untrainable) == 20
    assert parity.compared >= 13  # some templates have no system prompts, or no tools
    assert parity.tokens > 4000


@pytest.mark.parametrize("name", [name for name, tokens in TEMPLATE_TOKENS.items() if not tokens])
def test_templates_by_name(name: str, saved: Path) -> None:
    tokenizer = tiny.tokens()
    set_chat_template(tokenizer, name)
    tokenizer.save_pretrained(saved)
    parity = require_parity(_trained(tokenizer), [folder_reader(saved)], tokenizer)
    # Some templates leave out system prompts, tools or both; plain questions and answers, none.
    assert parity.compared + len(parity.untrainable) == len(parity_dialogues())
    assert not [name for name in parity.untrainable if _plain(parity_dialogues()[name])]
    assert all("tool" in name for name in parity.untrainable)


def test_without_a_template_plain_prompts_are_compared(saved: Path) -> None:
    tokenizer = tiny.tokens()
    tokenizer.chat_template = None
    for file in saved.glob("chat_template*"):
        file.unlink()
    assert require_parity(_trained(tokenizer), [folder_reader(saved)], tokenizer).compared == 17


def test_another_template_is_refused_by_its_first_token(saved: Path) -> None:
    tokenizer = tiny.tokens()
    other = tiny.tokens()
    other.chat_template = other.chat_template.replace("assistant\\n", "assistant\\n ")
    assert other.chat_template != tokenizer.chat_template
    readers = [transformers_reader("the server", other, frozenset([tokenizer.eos_token_id]))]
    with pytest.raises(RunError, match=r"token \d+ of the prompt of 'question' is missing in"):
        require_parity(_trained(tokenizer), readers, tokenizer)


def test_a_template_that_is_gone_is_refused(saved: Path) -> None:
    for file in saved.glob("chat_template*"):
        file.unlink()
    tokenizer = tiny.tokens()
    with pytest.raises(RunError, match=r"token 0 of 'question' is .* by the folder"):
        require_parity(_trained(tokenizer), [folder_reader(saved)], tokenizer)


def test_another_stop_token_is_refused(saved: Path) -> None:
    tokenizer = tiny.tokens()
    file = saved / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": 5}))
    with pytest.raises(RunError, match=r"training ends answers at .*, the folder .* at 5 "):
        require_parity(_trained(tokenizer), [folder_reader(saved)], tokenizer)


def test_a_reader_that_refuses_a_trained_dialogue_is_refused() -> None:
    tokenizer, other = tiny.tokens(), tiny.tokens()
    other.chat_template = "{{ raise_exception('no chat here') }}"
    readers = [transformers_reader("the server", other, frozenset([tokenizer.eos_token_id]))]
    with pytest.raises(RunError, match=r"'question' is trained on, and the server refuses it"):
        require_parity(_trained(tokenizer), readers, tokenizer)


def test_a_folder_without_stop_tokens_is_named(saved: Path) -> None:
    (saved / "generation_config.json").unlink()
    with pytest.raises(RunError, match="generation_config"):
        folder_reader(saved)


def test_real_tokenizers(real_tokenizer: Any, tmp_path: Path) -> None:
    from transformers import GenerationConfig

    real_tokenizer.save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=real_tokenizer.eos_token_id).save_pretrained(tmp_path)
    parity = require_parity(_trained(real_tokenizer), [folder_reader(tmp_path)], real_tokenizer)
    # Some templates leave out system prompts, tools or both; plain questions and answers, none.
    assert parity.compared + len(parity.untrainable) == len(parity_dialogues())
    assert not [name for name in parity.untrainable if _plain(parity_dialogues()[name])]
