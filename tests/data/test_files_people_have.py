"""Data files as people have them, odd and broken ones among them: each is read right, or refused in
one message that groups its complaints and names the fix."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import tarfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from shardtune.config.job import Columns, DataSection, TrainSource
from shardtune.data.prepare import prepare
from shardtune.errors import DataError
from shardtune.models import tiny
from shardtune.models.set_chat_template import set_chat_template

LENGTH = 512
END = "<|im_end|>"
QA = [{"instruction": "Add 1 and 2.", "output": "3"}, {"instruction": "Say hi.", "output": "hi"}]
ANSWERS = [f"3{END}", f"hi{END}"]
USER, ANSWER = {"role": "user", "content": "Rome?"}, {"role": "assistant", "content": "Sunny."}
CHAT = [{"messages": [USER, ANSWER]}]
SUNNY = [f"Sunny.{END}"]
CALL = {"name": "weather", "arguments": {"city": "Rome"}}
CALLED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
WITH_CALL = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function",
         "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}]},
    {"role": "tool", "content": "sun", "tool_call_id": "1"},
    ANSWER,
]  # fmt: skip


def called(name: str, arguments: dict[str, str]) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def lines(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def table(rows: list[dict[str, Any]], write: Any) -> bytes:
    sink = io.BytesIO()
    write(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


def stream(found: pa.Table, sink: Any) -> None:
    with pa.ipc.new_stream(sink, found.schema) as writer:
        writer.write_table(found)


def zstd(raw: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as file:
        file.write(raw)
    return sink.getvalue().to_pybytes()


def archive(kind: str) -> bytes:
    sink = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(sink, "w") as file:
            file.writestr("rows.jsonl", lines(*QA))
    else:
        with tarfile.open(fileobj=sink, mode="w:gz") as file:
            file.addfile(tarfile.TarInfo("rows.jsonl"))
    return sink.getvalue()


@dataclass(frozen=True)
class Case:
    """A file, how the job reads it, and what has to come of it."""

    name: str
    content: bytes | dict[str, bytes]
    """Of a folder: by the names of its files."""
    format: str
    trained: list[str] = field(default_factory=list)
    """The trained text of each document; where it is refused:"""
    fact: str = ""
    fix: str = ""
    rows: int = 0
    """How many rows the complaint is about, where it is about rows."""
    settings: dict[str, Any] = field(default_factory=dict)
    template: str = ""


def good(
    name: str, content: Any, format: str, trained: list[str], template: str = "", **settings: Any
) -> Case:
    return Case(name, content, format, trained, settings=settings, template=template)


def bad(
    name: str, content: Any, format: str, fact: str, fix: str, rows: int = 0, **settings: Any
) -> Case:
    return Case(name, content, format, [], fact, fix, rows, settings)


FIX_ROWS = "fix them: no usable row is left"
SKIP = "data.bad_rows: skip"
GOOD = {
    "JSONL": good("a.jsonl", lines(*QA), "instruction", ANSWERS),
    "no newline at the end, blank lines": good(
        "a.jsonl", b"\n" + lines(*QA).replace(b"\n", b"\n\n").strip(), "instruction", ANSWERS),
    "byte order mark": good("a.jsonl", b"\xef\xbb\xbf" + lines(*QA), "instruction", ANSWERS),
    "CRLF": good("a.jsonl", lines(*QA).replace(b"\n", b"\r\n"), "instruction", ANSWERS),
    "a list under the name of lines": good(
        "a.jsonl", json.dumps(QA, indent=1).encode(), "instruction", ANSWERS),
    "a list": good("a.json", json.dumps(QA).encode(), "instruction", ANSWERS),
    "lines under the name of a list": good("a.json", lines(*QA), "instruction", ANSWERS),
    "a list under a key": good(
        "a.json", json.dumps({"version": 1, "data": QA}).encode(), "instruction", ANSWERS),
    "gzip": good("a.jsonl.gz", gzip.compress(lines(*QA)), "instruction", ANSWERS),
    "zstd": good("a.jsonl.zst", zstd(lines(*QA)), "instruction", ANSWERS),
    "bz2": good("a.json.bz2", bz2.compress(json.dumps(QA).encode()), "instruction", ANSWERS),
    "gzip that isn't called so": good("a.jsonl", gzip.compress(lines(*QA)), "instruction", ANSWERS),
    "CSV": good(
        "a.csv", b"instruction,output\nAdd 1 and 2.,3\nSay hi.,hi\n", "instruction", ANSWERS),
    "Excel's CSV": good(
        "a.csv", b'\xef\xbb\xbfinstruction;output\r\n"Add 1,\n2.";3\r\nSay hi.;hi\r\n',
        "instruction", ANSWERS),
    "CSV with tabs": good(
        "a.csv", b"instruction\toutput\nSay, hi.\thi\n", "instruction", ANSWERS[1:]),
    "CSV, compressed": good(
        "a.csv.gz", gzip.compress(b"instruction,output\nSay hi.,hi\n"), "instruction", ANSWERS[1:]),
    "TSV": good("a.tsv", b"instruction\toutput\nSay hi.\thi\n", "instruction", ANSWERS[1:]),
    "Parquet": good("a.parquet", table(QA, pa.parquet.write_table), "instruction", ANSWERS),
    "Arrow stream": good("a.arrow", table(QA, stream), "instruction", ANSWERS),
    "Feather": good("a.feather", table(QA, pa.feather.write_feather), "instruction", ANSWERS),
    "turns in Parquet, with the keys of all others": good(
        "a.parquet",
        table([{"messages": [{**USER, "name": None}, {**ANSWER, "name": "x"}], "tools": None}],
              pa.parquet.write_table), "chat", SUNNY),
    "calls in Parquet, with the arguments of all others": good(
        "a.parquet", table([{"messages": [
            USER, called("weather", {"city": "Rome"}), called("time", {"zone": "CET"}), ANSWER]}],
            pa.parquet.write_table), "chat",
        [CALLED + CALLED.replace("weather", "time").replace("city", "zone").replace("Rome", "CET")
         + SUNNY[0]], template="chatml"),
    "turns as text in a CSV": good(
        "a.csv", b'messages\n"' + json.dumps(CHAT[0]["messages"]).replace('"', '""').encode()
        + b'"\n', "chat", SUNNY),
    "ShareGPT": good(
        "a.json", json.dumps([{"id": "x", "conversations": [
            {"from": "human", "value": "Rome?"}, {"from": "gpt", "value": "Sunny."}]}]).encode(),
        "chat", SUNNY),
    "ShareGPT with calls": good(
        "a.jsonl", lines({"conversations": [
            {"from": "human", "value": "Rome?"},
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": "sun"}, {"from": "gpt", "value": "Sunny."}],
            "tools": json.dumps(TOOLS)}), "chat", [CALLED + SUNNY[0]], template="chatml"),
    "OpenAI's calls": good(
        "a.jsonl", lines({"messages": WITH_CALL, "tools": TOOLS}), "chat", [CALLED + SUNNY[0]],
        template="chatml"),
    "content in parts": good(
        "a.jsonl", lines({"messages": [{**USER, "content": [{"type": "text", "text": "Rome?"}]},
                                       ANSWER]}), "chat", SUNNY),
    "the last turn is the user's": good(
        "a.jsonl", lines({"messages": [USER, ANSWER, USER]}), "chat", SUNNY),
    "a turn that isn't to be learnt": good(
        "a.jsonl", lines({"messages": [USER, {**ANSWER, "weight": 0}, USER, ANSWER]}), "chat",
        SUNNY),
    "a turn that isn't to be learnt, in Axolotl's word": good(
        "a.jsonl", lines({"messages": [USER, {**ANSWER, "train": False}, USER, ANSWER]}), "chat",
        SUNNY),
    "a turn that isn't to be learnt, in ms-swift's word": good(
        "a.jsonl", lines({"messages": [USER, {**ANSWER, "loss": False}, USER, ANSWER]}), "chat",
        SUNNY),
    "OpenAI's earlier functions": good(
        "a.jsonl", lines({"messages": [USER, {"role": "assistant", "content": None,
            "function_call": {"name": "weather", "arguments": '{"city": "Rome"}'}}, ANSWER],
            "functions": [TOOLS[0]["function"]]}), "chat", [CALLED + SUNNY[0]], template="chatml"),
    "functions beside an instruction, as xLAM has them": good(
        "a.jsonl", lines({"query": "Rome?", "answers": "[]", "tools": json.dumps(
            [TOOLS[0]["function"]])}), "instruction", [f"[]{END}"], template="chatml",
        columns=Columns(instruction="query", output="answers")),
    "tools that are no functions": good(
        "a.jsonl", lines({**QA[1], "tools": "a hammer"}), "instruction", ANSWERS[1:]),
    "a list of turns a line, as nanochat has it": good(
        "a.jsonl", lines([USER, ANSWER], [USER, ANSWER]), "chat", SUNNY * 2),
    "earlier turns beside an instruction": good(
        "a.jsonl", lines({**QA[1], "history": [["Add 1 and 2.", "3"]]}, {**QA[0], "history": []}),
        "instruction", ["".join(ANSWERS), ANSWERS[0]], template="chatml"),
    "a history that is no list of turns": good(
        "a.jsonl", lines({**QA[1], "history": "v2"}), "instruction", ANSWERS[1:]),
    "empty inputs": good(
        "a.jsonl", lines({**QA[0], "input": ""}, {**QA[1], "input": None, "system": None}),
        "instruction", ANSWERS),
    "NaN for what isn't there, as pandas has it": good(
        "a.jsonl", lines({**QA[0], "input": float("nan")}, QA[1]), "instruction", ANSWERS),
    "other columns' names": good(
        "a.jsonl", lines({"question": "Say hi.", "answer": "hi"}), "instruction", ANSWERS[1:],
        columns=Columns(instruction="question", output="answer")),
    "the same row twice": good("a.jsonl", lines(*QA, *QA), "instruction", ANSWERS * 2),
    "scripts and emoji": good(
        "a.jsonl", lines({"text": "> שלום 😀 é"}), "completion", [f" שלום 😀 é{END}"]),
    "a line of a quarter of a megabyte": good(
        "a.jsonl", lines({"text": "x" * (1 << 18)}, {"text": "hi"}), "completion",
        ["x" * (LENGTH - 1), f"i{END}"]),
    "text by line": good("a.txt", b"one\ntwo\n", "completion", [f"ne{END}", f"wo{END}"]),
    "text by paragraph": good("a.txt", b"a\nb\n\nc d\n", "completion", [f"\nb{END}", f" d{END}"]),
    "text with marks of its ends": good(
        "a.txt.gz", gzip.compress(b"ab\n<|endoftext|>\ncd"), "completion", [f"b{END}", f"d{END}"]),
    "Markdown": good(
        "a.md", b"# T\n\ntext\n", "completion", [f" T\n\ntext{END}"], documents="file"),
    "a folder of texts": good(
        "texts", {"a.txt": b"a b\n\nc\n", "b.txt": b"d e"}, "completion",
        [f" b\n\nc{END}", f" e{END}"]),
    "token ids in windows": good(
        "a.jsonl", lines(*({"input_ids": [97 + n] * LENGTH} for n in range(2))), "pretokenized",
        ["a" * (LENGTH - 1), "b" * (LENGTH - 1)]),
    "token ids with labels": good(
        "a.jsonl", lines({"input_ids": [97, 98, tiny.END], "labels": [-100, 98, tiny.END]}),
        "pretokenized", [f"b{END}"]),
}  # fmt: skip
BAD = {
    "an empty file": bad("a.jsonl", b"", "chat", "is empty", "name a file with data"),
    "nothing but blanks": bad("a.txt", b"\n \n", "completion", "is empty", "name a file with data"),
    "UTF-16": bad(
        "a.csv", "instruction,output\na,b\n".encode("utf-16"), "instruction", "is UTF-16 text",
        "iconv -f UTF-16"),
    "Latin-1": bad(
        "a.txt", "caf\xe9\nth\xe9\nok\n".encode("latin-1"), "completion", "not UTF-8 text", SKIP,
        2),
    "Latin-1 throughout": bad(
        "a.jsonl", '{"text": "th\xe9"}\n'.encode("latin-1") * 3, "completion", "not UTF-8 text",
        "iconv -f WINDOWS-1252 -t UTF-8", 3),
    "preferences": bad(
        "a.jsonl", lines({"prompt": "a", "chosen": "b", "rejected": "c"}), "chat",
        "pairs for preference training (DPO)", "columns: {instruction: prompt, output: chosen}"),
    "earlier turns without a template": bad(
        "a.jsonl", lines({**QA[0], "history": [["a", "b"]]}), "instruction",
        "'history' holds earlier turns, which take a chat template", FIX_ROWS, 1,
        template="plain"),
    "functions without a template": bad(
        "a.jsonl", lines({**QA[0], "tools": TOOLS}), "instruction",
        "'tools' holds functions, which take a chat template", FIX_ROWS, 1, template="plain"),
    "functions that the template leaves out": bad(
        "a.jsonl", lines(*[{**QA[0], "tools": TOOLS}] * 3), "instruction",
        "can't write tools: leaves out the tools", "or by name (chatml, llama3)", 3),
    "reasoning that the template leaves out": bad(
        "a.jsonl", lines(*[{"messages": [USER, {**ANSWER, "reasoning_content": "June."}]}] * 3),
        "chat", "can't write reasoning beside the content", "as <think>...</think> before the", 3),
    "a broken history": bad(
        "a.jsonl", lines({**QA[0], "history": [["a"]]}), "instruction",
        "'history' holds no pair of a question and an answer at 1", FIX_ROWS, 1),
    "NUL bytes": bad(
        "a.jsonl", b"\0" * 9 + b"\n" + lines(*QA), "instruction", "a NUL byte", SKIP, 1),
    "zip": bad("a.zip", archive("zip"), "instruction", "is a zip archive", "unpack it"),
    "tar.gz": bad("a.tar.gz", archive("tar"), "instruction", "is a tar archive", "unpack it"),
    "half of a download": bad(
        "a.jsonl.gz", gzip.compress(lines(*QA) * 99)[:-20], "instruction", "can't be read",
        "fetch or write the file again"),
    "Git LFS": bad(
        "a.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "chat",
        "Git LFS's note", "git lfs pull"),
    "a web page": bad(
        "a.jsonl", b"<!DOCTYPE html>\n<html></html>", "chat", "is a web page", "fetch the file"),
    "commas behind the lines": bad(
        "a.jsonl", lines(*QA, *QA).replace(b"}\n", b"},\n"), "instruction",
        "a comma follows the object", FIX_ROWS, 4),
    "a comma before the end of a list": bad(
        "a.json", b'[{"text": "a"},\n]', "completion", "broken JSON", "fix the file at that place"),
    "Python's dicts": bad(
        "a.jsonl", b"{'instruction': 'a', 'output': 'b'}\n" * 3, "instruction",
        "a Python dict, not JSON: json.dumps writes it", FIX_ROWS, 3),
    "objects over several lines": bad(
        "a.jsonl", json.dumps(QA[0], indent=1).encode() + b"\n", "instruction",
        "JSON objects that go over several lines", "jq -c ."),
    "pandas' columns": bad(
        "a.json", b'{"instruction": {"0": "a", "1": "b"}, "output": {"0": "c", "1": "d"}}',
        "instruction", "a table by columns", 'orient="records"'),
    "a list of texts": bad(
        "a.json", b'["one", "two"]', "completion", "text, not a JSON object", FIX_ROWS, 2),
    "one broken line": bad(
        "a.jsonl", lines(*QA) + b'{"instruction": "a", "out', "instruction",
        "Unterminated string", SKIP, 1),
    "a short line of a CSV": bad(
        "a.csv", b"instruction,output\na,b\nc\nd\n", "instruction",
        "1 fields, but the header names 2", SKIP, 2),
    "other columns": bad(
        "a.jsonl", lines({"prompt": "a", "completion": "b"}), "instruction",
        "no row has the column 'instruction'",
        "columns: {instruction: prompt, output: completion}"),
    "another format": bad(
        "a.jsonl", lines(*CHAT), "instruction", "no row has the column", "format: chat"),
    "text under another name": bad(
        "a.parquet", table([{"content": "a"}], pa.parquet.write_table), "completion",
        "no row has the column 'text'", "columns: {text: content}"),
    "rows of two kinds": bad(
        "a.jsonl", lines(*CHAT, *QA, *QA), "chat", "no column 'messages'", SKIP, 4),
    "numbers for answers": bad(
        "a.jsonl", lines(*({"instruction": "a", "output": n} for n in range(9))), "instruction",
        "'output' is int 0, not text", FIX_ROWS, 9),
    "answers that are null": bad(
        "a.jsonl", lines(*QA, *[{"instruction": "a", "output": None}] * 5), "instruction",
        "'output' is null, not text", SKIP, 5),
    "contents that are null": bad(
        "a.jsonl", lines(*CHAT, *[{"messages": [USER, {**ANSWER, "content": None}]}] * 5), "chat",
        "turn 2 (assistant) has no content", SKIP, 5),
    "empty answers": bad(
        "a.jsonl", lines(*CHAT, *[{"messages": [USER, {**ANSWER, "content": ""}]}] * 2), "chat",
        "turn 2 (assistant) is empty", SKIP, 2),
    "images": bad(
        "a.jsonl", lines(*[{"messages": [{**USER, "content": [
            {"type": "image_url", "image_url": {"url": "x"}}]}, ANSWER]}] * 3), "chat",
        "a part of type 'image_url', and only text is trained", FIX_ROWS, 3),
    "nothing but system prompts": bad(
        "a.jsonl", lines(*[{"messages": [{"role": "system", "content": "Be brief."}]}] * 3), "chat",
        "no assistant turn, so there is nothing to learn", FIX_ROWS, 3),
    "an unknown speaker": bad(
        "a.jsonl", lines(*[{"messages": [USER, {**ANSWER, "role": "asistant"}]}] * 3), "chat",
        "did you mean 'assistant'", FIX_ROWS, 3),
    "turns with other keys": bad(
        "a.jsonl", lines(*[{"messages": [{"speaker": "a", "text": "b"}]}] * 3), "chat",
        "a turn has 'role' and 'content', or 'from' and 'value'", FIX_ROWS, 3),
    "turns as Python's text": bad(
        "a.jsonl", lines(*[{"messages": "[{'role': 'user'}]"}] * 3), "chat",
        "the turns are text, but no JSON", FIX_ROWS, 3),
    "a template without tools": bad(
        "a.jsonl", lines(*[{"messages": WITH_CALL}] * 60), "chat",
        "can't write tool calls", "data.chat_template", 60),
    "ids beyond the vocabulary": bad(
        "a.jsonl", lines(*[{"input_ids": [1, 50_000 + n]} for n in range(7)]), "pretokenized",
        "but token ids go from 0 to 259", FIX_ROWS, 7),
    "labels of another length": bad(
        "a.jsonl", lines({"input_ids": [1, 2], "labels": [1]}), "pretokenized",
        "2 input_ids, but 1 labels", FIX_ROWS, 1),
    "ids without a stop token": bad(
        "a.jsonl", lines({"input_ids": [1, 2]}, {"input_ids": [1, 2, 3]}), "pretokenized",
        "a stop token is never trained", "stop: none"),
}  # fmt: skip


@pytest.fixture
def prepared(tmp_path, tokenizer, chat_template):
    """What becomes of a case's file."""

    def run(case: Case) -> Any:
        path = tmp_path / case.name
        files = case.content if isinstance(case.content, dict) else {"": case.content}
        for name, content in files.items():
            (path / name).parent.mkdir(exist_ok=True)
            Path(path / name).write_bytes(content)
        source = TrainSource(path=str(path), format=case.format, **case.settings)
        section = DataSection(train=(source,), sequence_length=LENGTH)
        tokens = chat_template if case.template else tokenizer
        stops = frozenset({tiny.END})
        return prepare(section, tokens, stops, cache=tmp_path / "cache", quiet=True).train[0]

    return run


@pytest.fixture(scope="module")
def chat_template():
    """A tokenizer with a template that writes tools."""
    tokenizer = tiny.tokens()
    set_chat_template(tokenizer, "chatml")
    return tokenizer


@pytest.mark.parametrize("case", GOOD.values(), ids=GOOD)
def test_read(case, prepared, tokenizer):
    found = [
        tokenizer.decode(
            [i for i, trained in zip(row["input_ids"], row["trained"], strict=True) if trained],
            clean_up_tokenization_spaces=False,
        )
        for row in prepared(case).rows
    ]
    assert found == case.trained


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_refused(case, prepared):
    with pytest.raises(DataError) as caught:
        prepared(case)
    problems = caught.value.problems
    assert case.fact in problems[0].fact
    assert case.fix in problems[-1].fix
    # A complaint about rows and how many they are, or one thing that is said of the whole.
    assert len(problems) == (2 if case.rows and problems[0].place != "the chat template" else 1)
    if case.rows:
        assert f"{case.rows} of " in problems[-1].fact
        named = problems[0].place + problems[0].fact
        places = sum(named.count(f"{case.name}:{mark}") for mark in ("row ", *"123456789"))
        assert places == min(case.rows, 3), "each with its line, three at most"


def test_there_are_forty_and_more():
    assert len(GOOD) + len(BAD) >= 40
