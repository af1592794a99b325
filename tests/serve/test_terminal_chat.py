"""The chat: commands, turns of each model, and the command itself in a pseudo-terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardtune.errors import ModelError
from shardtune.serve.terminal_chat import HELP, ChatSettings, TerminalChat
from tests.serve.served import tiny_models
from tests.serve.terminal import Terminal


@pytest.fixture(scope="module")
def models() -> Any:
    served, _ = tiny_models(max_rows=1)
    return served


def talk(models: Any, *lines: str | bytes, **settings: Any) -> tuple[str, TerminalChat]:
    """What is written when these lines are typed."""
    typed, written = list(lines), list[str]()

    def read(prompt: str) -> str:
        if not typed:
            raise EOFError
        line = typed.pop(0)
        return line if isinstance(line, str) else line.decode()

    how = ChatSettings(**{"temperature": 0, "max_tokens": 6} | settings)
    chat = TerminalChat(models[0], lambda: models[1], how, read, written.append)
    chat.run()
    return "".join(written), chat


def test_turns_follow_each_other_and_reset_forgets_them(models: Any) -> None:
    _, chat = talk(models, "Hello", "/model before", "Hello", "/model after", "Again")
    after, before = chat._dialogues["after"], chat._dialogues["before"]
    assert [turn["role"] for turn in after] == ["user", "assistant"] * 2
    assert [turn["content"] for turn in after[::2]] == ["Hello", "Again"]
    assert len(before) == 2
    assert before[1]["content"] != after[1]["content"], "the adapter is off, then on"
    _, chat = talk(models, "Hello", "/reset")
    assert not chat._dialogues


def test_both_answer_under_their_names(models: Any) -> None:
    text, _ = talk(models, "/model both", "Hello")
    assert "[before] " in text
    assert "[after] " in text


def test_a_system_prompt_begins_the_dialogue(models: Any, tmp_path: Path) -> None:
    file = tmp_path / "said.jsonl"
    text, _ = talk(models, "/save x", "/system Be brief.", "Hello \\", "you", f"/save {file}")
    assert "nothing was said yet" in text
    line = json.loads(file.read_text(encoding="utf-8"))
    assert line["messages"][:2] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello \nyou"},
    ]
    assert line["model"] == "tuned"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/help", HELP),
        ("/modle before", "did you mean /model?"),
        ("/model second", "say /model before"),
        ("/set", "temperature 0, top_p 1.0"),
        ("/set temperature hot", "can't be 'hot'"),
        ("/set temperature 3", "between 0"),
        ("/set top_p 0", "above 0"),
        ("/set seed 99999999999999999999", "64 bits"),
        ("/save", "say /save FILE"),
    ],
)
def test_commands_are_explained(models: Any, line: str, told: str) -> None:
    assert told in talk(models, line)[0]


def test_settings_are_taken_and_a_file_that_cant_be_written_is_told(models: Any) -> None:
    lines = ("/set temperature 1.5", "/set seed 3", "/set max_tokens 2", "Hello", "/save /no/x")
    text, chat = talk(models, *lines)
    assert chat.settings == ChatSettings(1.5, 1.0, 0, 2, 3)
    assert "/no/x can't be written" in text
    assert talk(models, "/set seed none")[1].settings.seed is None


def test_a_line_that_is_no_text_and_a_place_that_is_none_end_no_chat(models: Any) -> None:
    text, _ = talk(models, b"caf\xe9", "Hello", "/save ~nobody-here/x.jsonl", "/save a\0b", "/set")
    assert "that is no UTF-8 text\n" in text
    assert "~nobody-here/x.jsonl can't be written: " in text
    assert "can't be written: embedded null" in text
    assert "now: " in text, "the chat goes on"


def test_only_dialogues_with_an_answer_are_saved(models: Any, tmp_path: Path) -> None:
    file = tmp_path / "said.jsonl"
    lines = ("/system Be brief.", "x" * 600, f"/save {file}", "Hello", "/model before", "y" * 600)
    text, _ = talk(models, *lines, f"/save {file}")
    assert "nothing was said yet" in text
    (line,) = file.read_text(encoding="utf-8").splitlines()
    assert [turn["role"] for turn in json.loads(line)["messages"]] == [
        "system",
        "user",
        "assistant",
    ]


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (ModelError("the folder is gone"), "the folder is gone\n"),
        (KeyboardInterrupt(), "[stopped]"),
    ],
    ids=["missing", "stopped"],
)
def test_a_base_that_does_not_come_ends_no_chat(
    models: Any, failure: BaseException, told: str
) -> None:
    def load() -> Any:
        raise failure

    typed, written = ["/model before", "Hello", "/model after", "Hi"], list[str]()

    def read(prompt: str) -> str:
        if not typed:
            raise EOFError
        return typed.pop(0)

    chat = TerminalChat(models[0], load, ChatSettings(0, max_tokens=3), read, written.append)
    chat.run()
    assert told in "".join(written)
    assert list(chat._dialogues) == ["after"]


def test_ctrl_c_stops_the_answer_alone(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, steps = models[0].batch, iter(range(100))
    step = batch.step

    def interrupted() -> bool:
        if next(steps) == 4:
            raise KeyboardInterrupt
        return bool(step())

    monkeypatch.setattr(batch, "step", interrupted)
    text, chat = talk(models, "Hello", "/set", max_tokens=300)
    assert "[stopped]" in text
    assert "now: " in text, "the chat goes on"
    said = chat._dialogues["after"][-1]
    assert said["role"] == "assistant"
    assert f"{said['content']} [stopped]\n" in text, "the model hasn't said that it was stopped"
    assert (batch.running, batch.waiting) == (0, 0)


def test_an_answer_does_not_drive_the_terminal() -> None:
    from shardtune.serve.terminal_chat import _shown

    assert _shown("a\x1b[2Jb\n\tc\x07") == "a\ufffd[2Jb\n\tc\ufffd"


def test_the_command_in_a_pseudo_terminal() -> None:
    terminal = Terminal("chat", "tiny", "--temperature", "0", "--max-tokens", "4")
    terminal.until("> ")
    terminal.type("Hello")
    assert len(terminal.until("\n> ").strip()) > len("Hello")
    terminal.type("/model before")
    terminal.until("nothing was trained")
    terminal.until("> ")
    assert terminal.end() == 0
