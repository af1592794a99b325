"""Where the loss of FP8 weights comes from, and what each way of ours to keep it near saves.

    python -m benchmarks.fp8_rounding

A model answers texts with some of its linear layers quantized to e4m3, and is compared with itself
in fp32. First by round-to-nearest, then as `model.quantization: fp8` does: the mean input is
subtracted (bias correction), weights are rounded by GPTQ, and outlier channels have a second
column. The calibration samples are other texts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from benchmarks.table import DOCS, write_table
from shardtune.config.job import ModelSection
from shardtune.models.load import load_base
from shardtune.models.model_files import ModelFiles
from shardtune.models.quantization.fp8_linear import FP8Linear, quantize_fp8_rowwise
from shardtune.models.quantization.gptq import as_bytes
from shardtune.models.quantization.swap import swap

DATA = Path(__file__).parents[1] / "data"

Layers = dict[str, nn.Linear]


def nearest(x: Tensor) -> Tensor:
    """Each number as the nearest that e4m3 has, with a scale for each row."""
    small, scale = quantize_fp8_rowwise(x.reshape(-1, x.shape[-1]))
    return (small.float() * scale).view_as(x)


@contextmanager
def rounded(layers: Layers, weights: Mapping[str, Tensor], *, inputs: bool) -> Iterator[None]:
    """These layers with these weights, and with inputs rounded or not."""
    kept = {name: layer.weight.data for name, layer in layers.items()}
    hooks = []
    for name, layer in layers.items():
        layer.weight.data = weights.get(name, kept[name])
        if inputs:
            hooks.append(layer.register_forward_pre_hook(lambda _, given: (nearest(given[0]),)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for name, layer in layers.items():
            layer.weight.data = kept[name]


@torch.no_grad()
def as_the_product_does(model: Any, layers: Layers, texts: list[Tensor]) -> Iterator[str]:
    """Puts 8-bit layers in the place of `layers`, and names what has been done to them so far."""
    exact = {name: layer.weight.data for name, layer in layers.items()}
    swap(model, set(layers.values()), "fp8", torch.float32)
    small = dict(model.model.layers.named_modules())
    found: dict[str, FP8Linear] = {name: small[name] for name in layers}
    for name, layer in found.items():
        layer.quantize(exact[name])
        as_bytes(layer.weight)[:, layer.in_features :] = 0  # no second columns yet
        layer.observe()
    for text in texts:
        model(text)
    for name, layer in found.items():
        layer.finish_calibration()
        layer.mean_output.data.copy_(exact[name] @ layer.input_mean)
    yield "with the mean input subtracted (bias correction)"
    for name, layer in found.items():
        layer.requantize(exact[name])
    yield "and weights by GPTQ"
    for layer in found.values():
        layer.copy_outlier_columns()
    yield "and outlier channels twice: `fp8`"


@torch.no_grad()
def answers(model: Any, texts: list[Tensor]) -> list[Tensor]:
    return [f.log_softmax(model(text).logits[0, :-1].float(), -1) for text in texts]


def compared(exact: list[Tensor], other: list[Tensor], texts: list[Tensor]) -> tuple[float, float]:
    """How much more the loss is, as a share, and the mean divergence of a token's odds, in nats."""
    sums = torch.zeros(4, dtype=torch.float64)
    for right, found, text in zip(exact, other, texts, strict=True):
        losses = [f.nll_loss(each, text[0, 1:], reduction="sum") for each in (right, found)]
        apart = f.kl_div(found, right, reduction="sum", log_target=True)
        sums += torch.tensor([*losses, apart, len(right)], dtype=torch.float64)
    return float(sums[1] / sums[0] - 1), float(sums[2] / sums[3])


def line(name: str, more: float, apart: float) -> list[str]:
    found = [name, f"{more:+.2%}", f"{1e3 * apart:.2f}"]
    print(" | ".join(found), file=sys.stderr, flush=True)
    return found


def read(file: Path, count: int, tokenizer: Any) -> list[Tensor]:
    lines = file.read_text(encoding="utf-8").splitlines()[:count]
    rows = [json.loads(line) for line in lines]
    texts = [f"{row['instruction']}\n{row['output']}" for row in rows]
    return [torch.tensor([tokenizer.encode(text)[:512]]) for text in texts]


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rows", type=int, default=32, help="texts to compare on")
    parser.add_argument("--calibration", type=Path, default=DATA / "code.jsonl", metavar="JSONL")
    parser.add_argument("--texts", type=Path, default=DATA / "code_eval.jsonl", metavar="JSONL")
    parser.add_argument("--out", type=Path, default=DOCS, metavar="FOLDER", help="(docs)")
    options = parser.parse_args(given)
    section = ModelSection(name=options.model)
    model, tokenizer = load_base(ModelFiles(section), "fp32").eval(), ModelFiles(section).tokenizer
    texts = read(options.texts, options.rows, tokenizer)
    layers = {
        name: module
        for name, module in model.model.layers.named_modules()
        if isinstance(module, nn.Linear)
    }
    plain = {name: nearest(layer.weight.data) for name, layer in layers.items()}
    mlp = {name: layer for name, layer in layers.items() if "mlp" in name}
    rest = {name: layer for name, layer in layers.items() if "mlp" not in name}
    ways: list[tuple[str, Layers, Mapping[str, Tensor], bool]] = [
        ("nearest: weights and inputs", layers, plain, True),
        ("nearest: weights", layers, plain, False),
        ("nearest: inputs", layers, {}, True),
        ("nearest: weights and inputs of MLPs", mlp, plain, True),
        ("nearest: weights and inputs of attention", rest, plain, True),
    ]
    exact, lines = answers(model, texts), []
    for name, chosen, weights, inputs in ways:
        with rounded(chosen, weights, inputs=inputs):
            more, apart = compared(exact, answers(model, texts), texts)
        lines.append(line(name, more, apart))
    others = read(options.calibration, options.rows, tokenizer)
    lines += [
        line(name, *compared(exact, answers(model, texts), texts))
        for name in as_the_product_does(model, layers, others)
    ]
    write_table(
        "fp8_rounding",
        "Where the loss of FP8 weights comes from",
        ["quantized to e4m3", "loss", "KL divergence, 1e-3 nats"],
        lines,
        f"{Path(options.model).name} in fp32, forward only, on {len(texts)} texts of "
        f"{options.texts.name}, beside itself unquantized; calibrated on as many of "
        f"{options.calibration.name}. A change of loss has a sign by chance, too; the "
        "divergence of the predictions has none. The last three rows add up.",
        folder=options.out,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
