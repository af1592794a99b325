"""Chat templates end, by a limit of time and of memory."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shardtune.core.host import render_limit as limit
from shardtune.data.chat_template import ChatTemplate
from shardtune.data.conversation import Conversation
from shardtune.errors import DataError
from shardtune.models import tiny
from shardtune.models.set_chat_template import set_chat_template

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
GROWS = (
    "{% set n = namespace(s='x') %}{% for a in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}"
)
TALK = Conversation([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}])


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(limit, "RENDER_SECONDS", 0.3)
    monkeypatch.setattr(limit, "RENDER_BYTES", 1 << 28)
    return tiny.tokens()


def test_nested_loops_end(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = LOOPS
    begun = time.monotonic()
    with pytest.raises(DataError, match=r"the chat template: took more than 0 s for 1 conv"):
        ChatTemplate(tokenizer).texts([TALK])
    (tmp_path / "loops.jinja").write_text(LOOPS, encoding="utf-8")
    with pytest.raises(DataError, match="took more than"):
        set_chat_template(tokenizer, str(tmp_path / "loops.jinja"))
    assert time.monotonic() - begun < 10


def test_other_threads_are_limited_as_well(tokenizer: Any) -> None:
    tokenizer.chat_template = LOOPS
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(DataError, match="took more than 0 s for 1 conversations"):
            pool.submit(ChatTemplate(tokenizer).texts, [TALK]).result(10)
        assert pool.submit(sum, range(10**6)).result(10) > 0, "the thread goes on"
        tokenizer.chat_template = "fine"
        assert pool.submit(ChatTemplate(tokenizer).texts, [TALK]).result(10)


def test_a_text_that_doubles_ends(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit, "RENDER_SECONDS", 60.0)
    monkeypatch.setattr(limit, "_TICK", 0.002)
    tokenizer.chat_template = GROWS
    with pytest.raises(DataError, match="took more than 0 GiB of memory"):
        ChatTemplate(tokenizer).texts([TALK])


def test_the_handler_of_others_comes_back() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with limit.render_limit():
        assert signal.getsignal(signal.SIGALRM) is not before
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
