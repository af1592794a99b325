"""`shardtune export` and `push` of a tuned SmolLM2-135M: each target, read by somebody else."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf as gguf_package
import torch

from shardtune.cli.open_model import open_model
from shardtune.cli.result_command import comparison_prompts, open_result
from shardtune.compat.quiet import without_int8_warnings
from shardtune.errors import RunError
from shardtune.export.gguf_export import model_metadata
from shardtune.export.gguf_weights import gguf_tensors
from shardtune.export.gguf_write import check_gguf
from shardtune.export.llama_cpp_process import ask_llama_cpp
from shardtune.export.source import ExportSource
from shardtune.models.generate import prompt_ids
from tests.exam.after_evaluate import PROMPTS
from tests.exam.after_lab import AfterCase, AfterLab
from tests.exam.case import Findings

NEW_TOKENS = 24
LEAST_SAME = {"nf4": 0.99, "int8": 0.85}
"""Of next tokens: LLM.int8(), by which transformers multiplies, rounds what the run did not."""
NEAR_TIE = 0.35
"""Between two tokens, in natural logarithms: the second is at least 0.7 as likely as the first."""


def _source(lab: AfterLab) -> ExportSource:
    run, job = open_result(lab.run)
    return ExportSource(run, job, comparison_prompts(run))


def _exported(
    lab: AfterLab, findings: Findings, to: str, run: Path | None = None, *options: str
) -> Path:
    """The folder of an export that the command has written and `verify` has read."""
    run = run or lab.run
    target = lab.folder / "-".join(("export", to, run.name, *options))
    done = lab.shardtune("export", str(run), "--to", to, str(target), *options)
    if done.returncode:
        raise RuntimeError(f"the export failed:\n{done.stderr}")
    findings.expect(
        "template and stop tokens are those of training",
        "have the ids and stop tokens of training" in done.stdout,
    )
    findings.expect("every byte is sealed", lab.shardtune("verify", str(target)).returncode == 0)
    return target


@torch.no_grad()
def _greedy(model: Any, prompt: list[int], stops: frozenset[int]) -> list[int]:
    ids = torch.tensor([prompt])
    written = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS,
        do_sample=False, temperature=None, top_p=None, top_k=None, eos_token_id=sorted(stops),
        pad_token_id=0,
    )  # fmt: skip
    return list(written[0, len(prompt) :].tolist())


@torch.no_grad()
def _round_to_q8_0(model: Any) -> None:
    """Rounds every matrix in place, in Hugging Face's own order: whole rows change places only."""
    kind = gguf_package.GGMLQuantizationType.Q8_0
    for weight in model.parameters():
        if weight.ndim == 2:
            blocks = gguf_package.quantize(weight.numpy(), kind)
            weight.copy_(torch.from_numpy(gguf_package.dequantize(blocks, kind)))


def hf(lab: AfterLab, findings: Findings) -> None:
    """A merged folder, loaded by plain transformers."""
    from transformers import AutoModelForCausalLM

    target = _exported(lab, findings, "hf")
    model = AutoModelForCausalLM.from_pretrained(target)
    findings.expect("it is one model without an adapter", not hasattr(model, "peft_config"))
    stops = frozenset(model.generation_config.eos_token_id)
    findings.expect("it ends answers where the run did", stops == _source(lab).stops)
    findings.show(f"{sum(each.numel() for each in model.parameters()):,} weights, {model.dtype}")


def nf4(lab: AfterLab, findings: Findings) -> None:
    """A run with weights in nf4, as stored."""
    _as_stored(lab, findings, "nf4")


def int8(lab: AfterLab, findings: Findings) -> None:
    """A run with weights in int8, as stored."""
    _as_stored(lab, findings, "int8")


def _as_stored(lab: AfterLab, findings: Findings, kind: str) -> None:
    """Plain transformers gets the quantized weights and the adapter, and answers as the run."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = lab.stored(kind)
    target = _exported(lab, findings, "hf", run, "--as-stored")
    back = AutoModelForCausalLM.from_pretrained(target, device_map="cpu").eval()
    method = back.config.quantization_config
    findings.expect(
        f"its weights are in {kind}",
        bool(method.load_in_4bit) == (kind == "nf4")
        and bool(method.load_in_8bit) == (kind == "int8"),
    )
    findings.expect("its adapter is on", back.active_adapters() == ["default"])
    trained, reader = open_model(str(run), device="cpu"), AutoTokenizer.from_pretrained(target)
    same = total = 0
    for text in PROMPTS:
        prompt = prompt_ids(reader, text, chat=True)
        findings.expect(
            "prompts have the same ids", prompt_ids(trained.tokenizer, text, chat=True) == prompt
        )
        with torch.no_grad(), without_int8_warnings():
            ids = torch.tensor([prompt])
            found, wanted = (
                each(input_ids=ids).logits[0].argmax(-1) for each in (back, trained.model)
            )
        same += int((found == wanted).sum())
        total += len(prompt)
    least = LEAST_SAME[kind]
    findings.expect(f"at least {least:.0%} of next tokens are the run's", same >= least * total)
    findings.show(f"{same} of {total} next tokens are the run's")


def gguf(lab: AfterLab, findings: Findings) -> None:
    """Q8_0 through transformers' own GGUF loader, which gets nothing but the file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = _exported(lab, findings, "gguf")
    source, file = _source(lab), "model-Q8_0.gguf"
    back = AutoModelForCausalLM.from_pretrained(target, gguf_file=file, dtype=torch.float32).eval()
    reader = AutoTokenizer.from_pretrained(target, gguf_file=file)
    whole = source.whole_model().model
    _round_to_q8_0(whole)  # what 8 bits change of an answer is no fault of the file
    same = 0
    for text in PROMPTS:
        prompt = prompt_ids(source.tokenizer, text, chat=True)
        findings.expect("prompts have the same ids", prompt_ids(reader, text, chat=True) == prompt)
        same += _greedy(back, prompt, source.stops) == _greedy(whole, prompt, source.stops)
    findings.expect("answers are the source model's in 8 bits", same == len(PROMPTS))
    findings.show(f"{same} of {len(PROMPTS)} greedy answers of {NEW_TOKENS} tokens equal")
    if find_spec("llama_cpp"):
        _by_llama_cpp(lab, findings, target / file, source)


def _by_llama_cpp(lab: AfterLab, findings: Findings, file: Path, source: ExportSource) -> None:
    """Answers of llama.cpp: in 16 bits the model's own. With weights in 8 bits it rounds what it
    multiplies them with to 8 bits, too, so a near tie may fall the other way, and all after that is
    another text."""
    whole = source.whole_model().model
    prompts = [prompt_ids(source.tokenizer, text, chat=True) for text in PROMPTS]
    wanted = [_greedy(whole, prompt, source.stops) for prompt in prompts]
    in_16_bits = _exported(lab, findings, "gguf", None, "--type", "f16") / "model-F16.gguf"
    for path in (file, in_16_bits):
        answers = ask_llama_cpp(path, prompts=prompts, new_tokens=NEW_TOKENS).continued
        found = [_behind(whole, *each) for each in zip(prompts, wanted, answers, strict=True)]
        parted = [each for each in found if each is not None]
        if path == in_16_bits:
            findings.expect("llama.cpp's answers in 16 bits are the model's", not parted)
        tie = max(parted, default=0.0)
        findings.expect("where answers part, llama.cpp took a near tie", tie <= NEAR_TIE)
        findings.show(
            f"llama.cpp, {path.stem}: {len(found) - len(parted)} of {len(found)} answers equal"
            + (f", the others part at a tie within {tie:.2f}" if parted else "")
        )


@torch.no_grad()
def _behind(model: Any, prompt: list[int], wanted: list[int], answer: list[int]) -> float | None:
    """By how much less likely (in natural logarithms) the model finds the first token that isn't
    its own; None where all are."""
    for place, (own, other) in enumerate(zip(wanted, answer, strict=False)):
        if own != other:
            ids = torch.tensor([prompt + wanted[:place]])
            logits = model(input_ids=ids).logits[0, -1]
            return float(logits[own] - logits[other])
    return None


def damage(lab: AfterLab, findings: Findings) -> None:
    """A flipped byte, and a file without its template."""
    target = _exported(lab, findings, "gguf")
    source, path = _source(lab), target / "model-Q8_0.gguf"
    whole = source.whole_model()
    weights, metadata = whole.weights(), model_metadata(source, whole, "q8_0")
    good = path.read_bytes()

    def refused(data: bytes) -> bool:
        path.write_bytes(data)
        try:
            check_gguf(path, metadata, lambda: gguf_tensors(whole.config, weights), "q8_0")
        except RunError:
            return True
        return False

    findings.expect("the file as it was is taken", not refused(good))
    place = len(good) - 1001
    findings.expect(
        "a flipped byte of a weight is refused",
        refused(good[:place] + bytes([good[place] ^ 0x40]) + good[place + 1 :]),
    )
    hidden = good.replace(b"tokenizer.chat_template", b"tokenizer.chat_templatf", 1)
    findings.expect("a missing template is refused", refused(hidden))
    findings.expect("`verify` sees it", lab.shardtune("verify", str(target)).returncode == 1)
    findings.show("both refused")


def ollama(lab: AfterLab, findings: Findings) -> None:
    """A Modelfile whose Go template was compared with the chat template."""
    target = _exported(lab, findings, "ollama")
    text = (target / "Modelfile").read_text(encoding="utf-8")
    findings.expect("it names its model", text.startswith("FROM ./model-Q8_0.gguf\n"))
    findings.expect("it stops where the run did", 'PARAMETER stop "<|im_end|>"' in text)
    findings.show("ChatML, with the model's own system prompt")


def vllm(lab: AfterLab, findings: Findings) -> None:
    """The adapter's folder."""
    from safetensors.torch import load_file

    target = _exported(lab, findings, "vllm")
    ours = load_file(lab.run / "result" / "adapter_model.safetensors")
    theirs = load_file(target / "adapter_model.safetensors")
    same = ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)
    findings.expect("its weights are the run's", same)
    findings.show(f"{len(theirs)} tensors")


def push(lab: AfterLab, findings: Findings) -> None:
    """A dry run lists what would be sent; a hub that can't be reached is said so."""
    listed = lab.shardtune("push", str(lab.run), "me/model", "--dry-run")
    findings.expect("the card is among the files", "README.md" in listed.stdout)
    findings.expect("it is private by default", "(private); nothing was sent" in listed.stdout)
    away = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": "hf_" + "x" * 34}
    failed = lab.shardtune("push", str(lab.run), "me/model", environment=away)
    findings.expect("no hub is an error of exit code 2", failed.returncode == 2)
    findings.expect("no token is shown", away["HF_TOKEN"] not in failed.stdout + failed.stderr)
    findings.show(listed.stdout.splitlines()[-1].strip())


CASES = (
    AfterCase("export hf", "a merged folder", hf),
    AfterCase("export nf4", "a run in nf4, as stored", nf4),
    AfterCase("export int8", "a run in int8, as stored", int8),
    AfterCase("export gguf", "20 prompts through transformers' GGUF loader", gguf),
    AfterCase("export damage", "a flipped byte, a missing template", damage),
    AfterCase("export ollama", "Modelfile and GGUF", ollama),
    AfterCase("export vllm", "the adapter in its layout", vllm),
    AfterCase("push", "dry run, and no hub", push),
)
