"""`shardtune chat` and `shardtune serve` with its page, on a tuned SmolLM2-135M."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.exam.after_evaluate import PROMPTS
from tests.exam.after_lab import BASE, ROOT, AfterCase, AfterLab
from tests.exam.case import Findings
from tests.serve.terminal import Terminal

KEY = "a key of the exam"
TOKENS = 16


@dataclass
class Server:
    """`shardtune serve` as a process of its own."""

    process: subprocess.Popen[str]
    url: str

    def client(self, key: str = KEY) -> Any:
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=600)

    def post(self, path: str, content: bytes) -> Any:
        import httpx2

        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        return httpx2.post(self.url + path, content=content, headers=headers, timeout=600)


@contextmanager
def server(lab: AfterLab) -> Iterator[Server]:
    process = subprocess.Popen(
        [sys.executable, "-m", "shardtune", "serve", str(lab.run), "--port", "0",
         "--votes", str(lab.folder / "votes.jsonl")],
        cwd=ROOT, env=os.environ | {"SHARDTUNE_API_KEY": KEY}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("OpenAI API"):
                yield Server(process, line.split()[-1].removesuffix("/v1"))
                break
        else:
            raise RuntimeError("the server ended before it listened")
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def _ask(client: Any, text: str, **settings: Any) -> Any:
    asked = {"model": "run", "temperature": 0, "max_tokens": TOKENS} | settings
    return client.chat.completions.create(messages=[{"role": "user", "content": text}], **asked)


def _tokens(answer: Any) -> list[str]:
    return [each.token for each in answer.choices[0].logprobs.content]


def chat(lab: AfterLab, findings: Findings) -> None:
    """Through a pseudo-terminal: turns, the base and the tuned model, a file of the dialogue."""
    terminal = Terminal("chat", str(lab.run), "--temperature", "0", "--max-tokens", "12")
    terminal.until("\n> ", 600)
    said = []
    for line in ("/system You are brief.", "Say hello.", "/model before", "Say hello."):
        terminal.type(line)
        said.append(terminal.until("\n> ", 600))
    file = lab.folder / "chat.jsonl"
    file.unlink(missing_ok=True)  # of an exam before, in a folder that was kept
    terminal.type(f"/save {file}")
    terminal.until("wrote 2 dialogues")
    terminal.until("> ")
    findings.expect("both models answer", all(len(said[n]) > 20 for n in (1, 3)))
    dialogues = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    roles = [[turn["role"] for turn in each] for each in dialogues]
    findings.expect("the dialogue is saved", roles == [["system", "user", "assistant"]] * 2)
    findings.expect("Ctrl-D ends it", terminal.end() == 0)
    findings.show(repr(dialogues[0][-1]["content"][:30]))


def equality(lab: AfterLab, findings: Findings) -> None:
    """Greedy answers to 20 prompts beside plain transformers and peft, alone and 16 at once."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from shardtune.models.catalogue import resolve

    result = lab.run / "result"
    tokenizer = AutoTokenizer.from_pretrained(result)
    base = AutoModelForCausalLM.from_pretrained(resolve(BASE), dtype=torch.float32)
    model = PeftModel.from_pretrained(base, result).eval()
    stops = json.loads((result / "generation_config.json").read_text())["eos_token_id"]
    stops = stops if isinstance(stops, list) else [stops]
    expected = []
    for text in PROMPTS:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True,
            return_tensors="pt", return_dict=True,
        )  # fmt: skip
        with torch.no_grad():
            written = model.generate(
                **ids, max_new_tokens=TOKENS, do_sample=False, temperature=None, top_p=None,
                top_k=None, eos_token_id=stops, pad_token_id=stops[0],
            )  # fmt: skip
        new = [int(each) for each in written[0, ids["input_ids"].shape[1] :]]
        expected.append([tokenizer.decode([each]) for each in new if each not in stops])
    with server(lab) as serving:
        client = serving.client()

        def served(text: str) -> list[str]:
            return _tokens(_ask(client, text, logprobs=True))

        alone = [served(text) for text in PROMPTS]
        with ThreadPoolExecutor(16) as pool:
            together = list(pool.map(served, PROMPTS))
    for name, found in (("alone", alone), ("in a batch of 16", together)):
        same = sum(one == other for one, other in zip(found, expected, strict=True))
        findings.expect(f"all are equal {name}", same == len(PROMPTS))
        findings.show(f"{same} of {len(PROMPTS)} equal {name}")


def clients(lab: AfterLab, findings: Findings) -> None:
    """The `openai` client: streams, 32 at once, stop, cancel, bad bodies, wrong names and keys."""
    import openai

    with server(lab) as serving:
        client = serving.client()
        whole = _ask(client, "Count to five.").choices[0].message.content
        stream = _ask(client, "Count to five.", stream=True)
        parts = [each.choices[0].delta.content or "" for each in stream]
        findings.expect("a stream has the same text", "".join(parts) == whole and len(parts) > 3)
        stop = whole[len(whole) // 2 :][:2]
        cut = _ask(client, "Count to five.", stop=stop).choices[0]
        before = whole[: whole.index(stop)]
        findings.expect("stop ends before itself", cut.message.content == before)
        with ThreadPoolExecutor(32) as pool:
            many = list(pool.map(lambda n: _ask(client, f"Say {n}.", max_tokens=4), range(32)))
        findings.expect("32 at once are answered", all(each.choices for each in many))
        gone = _ask(client, "Tell a long story.", stream=True, max_tokens=2000)
        next(iter(gone))
        gone.close()
        deadline = time.monotonic() + 60
        while _running(serving) and time.monotonic() < deadline:
            time.sleep(0.2)
        findings.expect("who goes away frees the place", _running(serving) == 0)
        for what, status, call in (
            ("bad JSON", 400, lambda: serving.post("/v1/chat/completions", b"{bad")),
            ("a body of 10 MB", 413, lambda: serving.post("/v1/completions", b" " * 10**7)),
        ):
            findings.expect(f"{what} is refused", call().status_code == status)
        for what, kind, key, model in (
            ("an unknown model", openai.NotFoundError, KEY, "nobody"),
            ("a wrong key", openai.AuthenticationError, "wrong", "run"),
        ):
            findings.expect(f"{what} is refused", _refused(serving.client(key), model, kind))
        late = _ask(client, "Count to ten.", stream=True, max_tokens=24)
        next(iter(late))
        serving.process.send_signal(signal.SIGINT)
        drained = [each.choices[0] for each in late]
        findings.expect("Ctrl-C lets answers end", drained[-1].finish_reason in ("length", "stop"))
        findings.expect("the server exits with 0", serving.process.wait(60) == 0)
    findings.show(f"{len(parts)} chunks, 32 at once")


def _refused(client: Any, model: str, kind: type[Exception]) -> bool:
    try:
        _ask(client, "x", model=model)
    except kind:
        return True
    return False


def _running(serving: Server) -> int:
    import httpx2

    return int(httpx2.get(f"{serving.url}/health").json()["running"])


def throughput(lab: AfterLab, findings: Findings) -> None:
    """16 requests at once beside the same one after the other. The better of two rounds, in turn:
    other work on the machine hits both alike."""
    with server(lab) as serving:
        client = serving.client()

        def count(n: int) -> int:
            return int(_ask(client, PROMPTS[n], max_tokens=32).usage.completion_tokens)

        count(0)
        rates: dict[int, float] = {1: 0, 16: 0}
        for _ in range(2):
            for workers in rates:
                begun = time.monotonic()
                with ThreadPoolExecutor(workers) as pool:
                    tokens = sum(pool.map(count, range(16)))
                rates[workers] = max(rates[workers], tokens / (time.monotonic() - begun))
    ratio = rates[16] / rates[1]
    findings.expect("at least 3 times as many tokens a second", ratio >= 3)
    findings.show(f"{ratio:.1f} x: {rates[1]:.1f} and {rates[16]:.1f} tokens/s")


def parity(lab: AfterLab, findings: Findings) -> None:
    """20 dialogues by training and by `/tokenize`, over HTTP."""
    from shardtune.checkpoint.run_dir import RunDir
    from shardtune.config.job_file import load_job
    from shardtune.data.conversation import Conversation
    from shardtune.data.template_parity import (
        ChatReader,
        folder_reader,
        require_parity,
        training_reader,
    )
    from shardtune.models.model_files import ModelFiles

    run = RunDir(lab.run)
    job = load_job(run.job).job
    files = ModelFiles.of_job(job)
    with server(lab) as serving:

        def asked(**body: Any) -> Any:
            return serving.post("/tokenize", json.dumps({"model": "run"} | body).encode()).json()

        def tokenize(conversation: Conversation, prompt: bool) -> list[int]:
            return list(
                asked(
                    messages=conversation.messages, tools=conversation.tools,
                    add_generation_prompt=prompt,
                )["tokens"]
            )  # fmt: skip

        stops = frozenset(asked(prompt="x")["stop_token_ids"])
        found = require_parity(
            training_reader(files.tokenizer, files.stop_ids),
            [folder_reader(run.result), ChatReader("the server", tokenize, stops)],
            files.tokenizer,
        )
    findings.expect("dialogues were compared", found.compared > 10)
    findings.show(f"{found.compared} dialogues, {found.tokens} tokens the same")


def page(lab: AfterLab, findings: Findings) -> None:
    """Two models side by side in Chromium, a vote, and a phone in the dark; screenshots."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    with server(lab) as serving, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, settings in (
            ("page_side_by_side", {"viewport": {"width": 1100, "height": 640}}),
            ("page_phone", {"viewport": {"width": 390, "height": 780}, "color_scheme": "dark"}),
        ):
            context = browser.new_context(**settings)
            opened = context.new_page()
            opened.set_default_timeout(300_000)
            opened.goto(serving.url)
            opened.get_by_label("API key").fill(KEY)
            opened.get_by_role("button", name="Use").click()
            opened.get_by_label("Compare with").check()
            opened.get_by_text("Settings").click()
            opened.get_by_label("Temperature").fill("0")
            opened.get_by_label("Max tokens").fill("40")
            opened.get_by_text("Settings").click()
            opened.get_by_label("Message").fill("Write a function that adds two numbers.")
            opened.keyboard.press("Enter")
            opened.get_by_role("button", name="Left").wait_for()
            opened.screenshot(path=lab.folder / f"{name}.png")
            opened.get_by_role("button", name="Left").click()
            opened.get_by_text("Vote written to").wait_for()
            wide = opened.evaluate("document.documentElement.scrollWidth")
            findings.expect(f"{name} fits", wide <= settings["viewport"]["width"])
            context.close()
    votes = Path(lab.folder / "votes.jsonl").read_text(encoding="utf-8").splitlines()
    findings.expect("both votes are in the file", len(votes) == 2)
    vote = json.loads(votes[0])
    findings.expect("with both names", [vote["left"], vote["right"]] == ["run", BASE])
    findings.show("2 votes, screenshots in the folder")


CASES = (
    AfterCase("chat", "chat in a pseudo-terminal", chat),
    AfterCase("serve-clients", "the openai client", clients),
    AfterCase("serve-equality", "served answers are those of transformers", equality),
    AfterCase("serve-throughput", "16 requests at once", throughput),
    AfterCase("serve-parity", "served prompts are those of training", parity),
    AfterCase("serve-page", "the page in Chromium", page),
)
