"""llama.cpp, asked in a process of its own what it makes of a GGUF file: where it crashes, ours is
left to say so."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from shardtune.compat.llama_cpp_weights import without_repacking
from shardtune.errors import Problem, RunError

_FIX = "try another version of llama-cpp-python; where it is missing, transformers alone reads back"


@dataclass(frozen=True)
class LlamaCppAnswers:
    """What llama.cpp computed."""

    logits: np.ndarray[Any, np.dtype[np.float32]]
    """Of all rows, one token after the other."""
    ids: list[list[int]]
    """The tokens of each text."""
    continued: list[list[int]]
    """What follows each prompt, greedily."""


def ask_llama_cpp(
    path: Path,
    *,
    rows: Sequence[Sequence[int]] = (),
    texts: Sequence[str] = (),
    prompts: Sequence[Sequence[int]] = (),
    new_tokens: int = 0,
) -> LlamaCppAnswers:
    """Logits of rows, tokens of texts, greedy tokens after prompts; RunError where it fails."""
    asked = {"rows": rows, "texts": texts, "prompts": prompts, "new_tokens": new_tokens}
    with TemporaryDirectory() as folder:
        logits = Path(folder) / "logits.npy"
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(path), str(logits)],
            input=json.dumps(asked),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        if done.returncode:
            raise RunError(Problem(path.name, f"llama.cpp can't read it: {_end(done)}", _FIX))
        answers = json.loads(done.stdout)
        return LlamaCppAnswers(np.load(logits), answers["ids"], answers["continued"])


def _end(done: subprocess.CompletedProcess[str]) -> str:
    lines = done.stderr.strip().splitlines()
    if done.returncode < 0:
        killed = f"it was killed by {signal.Signals(-done.returncode).name}"
        return f"{killed}: {lines[-1]}" if lines else killed
    return lines[-1] if lines else f"it ended with code {done.returncode}"


def answer(path: str, logits: str) -> None:
    """The child: the question is on its standard input."""
    from llama_cpp import Llama

    without_repacking()
    asked = json.load(sys.stdin)
    rows, prompts, new = asked["rows"], asked["prompts"], asked["new_tokens"]
    longest = max([1, *map(len, rows), *(len(prompt) + new for prompt in prompts)])
    reader: Any = Llama(path, n_ctx=longest + 1, logits_all=True, verbose=False, n_gpu_layers=0)
    ids = [reader.tokenize(text.encode(), add_bos=False, special=True) for text in asked["texts"]]
    found = [np.zeros((0, reader.n_vocab()), np.float32)]
    for row in rows:
        reader.reset()
        reader.eval(row)
        found.append(np.array(reader.scores[: len(row)], np.float32))
    np.save(logits, np.concatenate(found))
    continued = []
    for prompt in prompts:
        reader.reset()
        written = reader.generate(prompt, temp=0.0, repeat_penalty=1.0)
        continued.append([token for _, token in zip(range(new), written, strict=False)])
    json.dump({"ids": ids, "continued": continued}, sys.stdout)


if __name__ == "__main__":
    answer(*sys.argv[1:])
