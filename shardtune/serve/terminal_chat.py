"""A chat in the terminal: answers come token by token; the tuned model and its base in turns."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal, get_args

from shardtune.errors import ShardtuneError, did_you_mean
from shardtune.serve.generation_request import GenerationRequest, Piece
from shardtune.serve.sampling import RequestSampling
from shardtune.serve.served_model import ChatPrompt, ChatTurn, ServedModel
from shardtune.serve.text_stream import TextStream

Speaker = Literal["before", "after"]
HELP = """\
/system TEXT            what stands before the dialogue (empty: nothing); begins it anew
/reset                  forgets the dialogue
/model before|after|both   the base, the tuned model, or each prompt to both
/set NAME VALUE         temperature, top_p, top_k, max_tokens, seed (`none` draws anew)
/save FILE              appends the dialogue to a JSONL file, as training reads it
/exit                   or Ctrl-D; Ctrl-C stops an answer"""
_COMMANDS = ("/system", "/reset", "/model", "/set", "/save", "/help", "/exit")


@dataclass(frozen=True)
class ChatSettings:
    """How answers are drawn."""

    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 512
    seed: int | None = None

    def problem(self) -> str:
        """What is wrong with it; nothing where it is right."""
        if not 0 <= self.temperature <= 2:
            return "temperature lies between 0 (the likeliest token) and 2"
        if not 0 < self.top_p <= 1:
            return "top_p lies above 0 and at most at 1"
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            return "a seed is a number of 64 bits"
        return "" if self.top_k >= 0 and self.max_tokens >= 1 else "this number is too small"


@dataclass
class TerminalChat:
    """Reads prompts and commands, writes answers. `before` loads the base where it is missing."""

    after: ServedModel
    before: Callable[[], ServedModel] | None
    settings: ChatSettings
    read: Callable[[str], str]
    write: Callable[[str], None]
    system: str = ""
    speakers: tuple[Speaker, ...] = ("after",)
    _dialogues: dict[Speaker, list[ChatTurn]] = field(default_factory=dict)
    _base: ServedModel | None = None

    def run(self) -> None:
        """Until the input ends or `/exit` is said."""
        self.write(f"{self.after.name}; /help shows the commands\n")
        while (text := self._ask()) is not None:
            if text.startswith("/"):
                self._command(text)
            elif text:
                self._answer_while_wanted(text)

    def _ask(self) -> str | None:
        """The next line. A backslash at its end continues it; None where nothing follows."""
        lines: list[str] = []
        try:
            while (line := self.read("... " if lines else "> ")).endswith("\\"):
                lines.append(line[:-1])
        except (EOFError, KeyboardInterrupt):
            self.write("\n")
            return None
        except UnicodeDecodeError:  # what a terminal of another encoding sends
            self.write("that is no UTF-8 text\n")
            return ""
        text = "\n".join([*lines, line]).strip()
        return None if text == "/exit" else text

    def _command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        rest = rest.strip()
        if name == "/help":
            self.write(HELP + "\n")
        elif name == "/reset":
            self._dialogues.clear()
        elif name == "/system":
            self.system = rest
            self._dialogues.clear()
        elif name == "/model":
            self._choose(rest)
        elif name == "/set":
            self._set(*rest.partition(" ")[::2])
        elif name == "/save":
            self._save(rest)
        else:
            near = did_you_mean(name, _COMMANDS)
            self.write(f"{name} is no command" + (f"; did you mean {near}?\n" if near else "\n"))

    def _choose(self, who: str) -> None:
        if self.before is None:
            self.write("there is one model here: nothing was trained\n")
        elif who == "both":
            self.speakers = ("before", "after")
        elif who in get_args(Speaker):
            self.speakers = ("before",) if who == "before" else ("after",)
        else:
            self.write("say /model before, /model after or /model both\n")

    def _set(self, name: str, value: str) -> None:
        kinds = {each.name: each.type for each in fields(ChatSettings)}
        if name not in kinds:
            now = ", ".join(f"{each} {getattr(self.settings, each)}" for each in kinds)
            self.write(f"now: {now}\n")
            return
        try:
            given: float | int | None = float(value) if "float" in str(kinds[name]) else None
            if given is None and not (name == "seed" and value == "none"):
                given = int(value)
        except ValueError:
            self.write(f"{name} can't be {value!r}\n")
            return
        changed = replace(self.settings, **{name: given})  # type: ignore[arg-type]
        if told := changed.problem():
            self.write(told + "\n")
        else:
            self.settings = changed

    def _save(self, name: str) -> None:
        lines = [
            json.dumps({"model": self._model(who).name, "messages": turns}, ensure_ascii=False)
            for who, turns in self._dialogues.items()
            if any(turn["role"] == "assistant" for turn in turns)
        ]
        if not name or not lines:
            self.write("nothing was said yet\n" if name else "say /save FILE\n")
            return
        try:
            with Path(name).expanduser().open("a", encoding="utf-8") as file:
                file.write("".join(line + "\n" for line in lines))
            self.write(f"wrote {len(lines)} dialogue{'s' * (len(lines) > 1)} to {name}\n")
        except (OSError, RuntimeError, ValueError) as error:  # of ~NOBODY, and of half letters, too
            self.write(f"{name} can't be written: {getattr(error, 'strerror', None) or error}\n")

    def _answer_while_wanted(self, text: str) -> None:
        """The chat goes on where the base can't be loaded, or takes too long for somebody."""
        try:
            self._answer_all(text)
        except KeyboardInterrupt:
            self.write(" [stopped]\n")
        except ShardtuneError as error:
            self.write(f"{error}\n")

    def _answer_all(self, text: str) -> None:
        for who in self.speakers:
            model = self._model(who)  # before the question is a turn
            if len(self.speakers) > 1:
                self.write(f"[{who}] ")
            opening: list[ChatTurn] = (
                [{"role": "system", "content": self.system}] if self.system else []
            )
            turns = self._dialogues.setdefault(who, opening)
            turns.append({"role": "user", "content": text})
            if answer := self._answer(model, turns):
                turns.append({"role": "assistant", "content": answer})
            else:
                turns.pop()  # a question without an answer is no dialogue

    def _answer(self, model: ServedModel, turns: list[ChatTurn]) -> str:
        """Writes an answer as it comes; Ctrl-C stops it where it is."""
        assert model.render is not None
        try:
            prompt = model.render(ChatPrompt(turns))
        except Exception as error:  # noqa: BLE001  a template is somebody else's program
            first = (str(error).splitlines() or [type(error).__name__])[0]
            self.write(f"the chat template refuses it: {first}\n")
            return ""
        room = model.context - len(prompt)
        if room < 1:
            self.write(f"the dialogue has {len(prompt)} tokens, the model takes {model.context}: ")
            self.write("/reset\n")
            return ""
        return self._speak(model, prompt, min(room, self.settings.max_tokens))

    def _speak(self, model: ServedModel, prompt: list[int], most: int) -> str:
        how = self.settings
        sampling = RequestSampling(how.temperature, how.top_p, how.top_k, how.seed)
        heard: list[Piece] = []
        text = TextStream(model.tokenizer, (), prompt)
        request = GenerationRequest(
            prompt, most, sampling, model.stops, text, heard.append, model.adapter
        )
        model.batch.submit(request)
        said = ""
        try:
            while model.batch.step() or heard:
                for piece in heard:
                    said += piece.text
                    self.write(_shown(piece.text))
                    if piece.finish == "error":
                        self.write(f"the model failed: {piece.error}")
                heard.clear()
        except KeyboardInterrupt:
            model.batch.cancel(request)
            model.batch.step()
            self.write(" [stopped]")  # which the model hasn't said
        self.write("\n")
        return said

    def _model(self, who: Speaker) -> ServedModel:
        if who == "after":
            return self.after
        if self._base is None:
            assert self.before is not None
            self._base = self.before()
        return self._base


def _shown(text: str) -> str:
    """Without control characters: an answer must not drive the terminal."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text
    )
