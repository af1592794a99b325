"""`shardtune evaluate`, and the batched generation beneath it, on a tuned SmolLM2-135M."""

from __future__ import annotations

import json
import time

import torch

from shardtune.cli.open_model import OpenedModel, open_model
from shardtune.models.batched_generation import Stopping, complete
from shardtune.models.generate import prompt_ids
from tests.exam.after_lab import AfterCase, AfterLab
from tests.exam.case import Findings

TOPICS = (
    "a cat", "sorting a list", "the sea", "prime numbers", "a recipe for bread", "rain", "a poem",
    "the moon", "two trains", "recursion", "a garden", "time", "music", "an email", "chess", "ice",
    "a dictionary in Python", "bees", "the number seven", "a bridge over a very wide river",
)  # fmt: skip
PROMPTS = tuple(
    f"Tell me about {topic}." + " Be brief." * (number % 4) for number, topic in enumerate(TOPICS)
)


def _encoded(opened: OpenedModel) -> list[list[int]]:
    return [prompt_ids(opened.tokenizer, text, chat=True) for text in PROMPTS]


def _alone(opened: OpenedModel, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    written = opened.model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
        temperature=None, top_p=None, top_k=None, eos_token_id=sorted(opened.stop_ids),
        pad_token_id=0,
    )  # fmt: skip
    return list(written[0, len(prompt) :].tolist())


def equality(lab: AfterLab, findings: Findings) -> None:
    """Greedy answers to 20 prompts, alone and in a batch of 16."""
    opened = open_model(str(lab.run), precision="fp32")
    prompts = _encoded(opened)
    stopping = Stopping(24, opened.stop_ids)
    expected = [_alone(opened, prompt, 24) for prompt in prompts]
    for size in (1, 16):
        found = complete(
            opened.model, opened.tokenizer, prompts, stopping=stopping, batch_size=size
        )
        same = sum(list(each.ids) == other for each, other in zip(found, expected, strict=True))
        findings.expect(f"all are equal in batches of {size}", same == len(prompts))
        findings.show(f"{same} of {len(prompts)} equal in batches of {size}")


def rate(lab: AfterLab, findings: Findings) -> None:
    """Tokens per second beside `transformers.generate`, a batch of 16, the same answers.

    The best of three of each, in turn: other work on the machine hits both alike."""
    opened = open_model(str(lab.run), precision="fp32")
    tokenizer = opened.tokenizer
    prompts = _encoded(opened)[:16]
    tokenizer.padding_side = "left"
    batch = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
    stopping = Stopping(48, opened.stop_ids)
    ours, theirs = 0.0, 0.0
    for _ in range(3):
        begun = time.perf_counter()
        found = complete(opened.model, tokenizer, prompts, stopping=stopping, batch_size=16)
        tokens = sum(len(each.ids) for each in found)
        ours = max(ours, tokens / (time.perf_counter() - begun))
        begun = time.perf_counter()
        opened.model.generate(
            **batch, max_new_tokens=48, do_sample=False, temperature=None, top_p=None, top_k=None,
            eos_token_id=sorted(opened.stop_ids), pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        theirs = max(theirs, tokens / (time.perf_counter() - begun))
    findings.show(f"{ours:.0f} tokens/s, transformers {theirs:.0f}: {ours / theirs:.2f}")
    findings.expect("at least 0.9 of transformers' rate", ours >= 0.9 * theirs)


TASKS = {
    "exact": {"prompt": "Say yes.", "answer": "yes"},
    "number": {"prompt": "What is 2 + 3?", "answer": "5"},
    "choice": {"prompt": "The capital of France is", "choices": ["banana", "Paris"], "answer": 1},
    "contains": {"prompt": "Name a colour.", "answer": ["red", "green", "blue"]},
    "regex": {"prompt": "Write the year 1999.", "answer": "1999"},
    "json": {"prompt": "Write an empty JSON list.", "answer": "[]"},
    "code": {"prompt": "Write x = 1 in Python.", "answer": "", "tests": "assert x == 1"},
    "rouge": {"prompt": "Describe rain.", "answer": "Rain is water that falls from clouds."},
    "chrf": {"prompt": "Describe snow.", "answer": "Snow is frozen water."},
}


def metrics(lab: AfterLab, findings: Findings) -> None:
    """A task of each metric and the loss on general texts, before and after, by the command."""
    tasks = []
    for name, row in TASKS.items():
        (lab.folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n", "utf-8")
        metric = {"type": name} | ({"pattern": r"(\d{4})"} if name == "regex" else {})
        task = {"name": name, "path": f"{name}.jsonl", "metric": metric, "max_new_tokens": 8}
        task |= {"choices": "choices"} if name == "choice" else {}
        tasks.append(task | ({"tests": "{{tests}}"} if name == "code" else {}))
    (lab.folder / "tasks.yaml").write_text(json.dumps(tasks), "utf-8")
    out = lab.folder / "evaluation.json"
    done = lab.shardtune(
        "evaluate", str(lab.run), "--task", str(lab.folder / "tasks.yaml"), "--forgetting",
        "--allow-code", "--out", str(out), timeout=3600,
    )  # fmt: skip
    findings.expect(f"exit code 0 ({done.stderr[-300:]})", done.returncode == 0)
    if done.returncode:
        return
    found = json.loads(out.read_text("utf-8"))
    by_name = {each["task"]: each for each in found["tasks"]}
    findings.expect("every metric has a figure on both sides", set(by_name) == set(TASKS))
    for name, each in by_name.items():
        sides = (each["before"], each["after"])
        sound = all(0 <= side["low"] <= side["mean"] <= side["high"] <= 1 for side in sides)
        findings.expect(f"{name} lies in its interval", sound and sides[0]["rows"] == 1)
    findings.expect("Paris is likelier than a banana", by_name["choice"]["after"]["mean"] == 1)
    losses = found["general_loss"]
    findings.expect("tuning changed the general loss", losses["before"] != losses["after"])
    change = f"{losses['before']:.3f} -> {losses['after']:.3f}"
    findings.show(f"{len(by_name)} metrics, general loss {change}")


CASES = (
    AfterCase("evaluate-metrics", "a task of each metric, before and after", metrics),
    AfterCase("generation-equal", "20 greedy answers are transformers' own", equality),
    AfterCase("generation-rate", "a batch of 16 is as fast as transformers", rate),
)
