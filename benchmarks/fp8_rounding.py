"""Where the loss of 8-bit weights comes from, and what rounding them by data would save.

    python -m benchmarks.fp8_rounding

A model answers texts with some of its linear layers rounded to e4m3, and is compared with itself in
fp32. `nearest` is what `precision: fp8-base` does. `by data` is GPTQ: columns are rounded one after
the other, and what that does to the outputs of other texts is made up for in those that are left.
It isn't in the product.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from benchmarks.table import DOCS, write_table
from shardtune.job import ModelSection
from shardtune.models.fp8 import by_row
from shardtune.models.load import load_base, load_tokenizer

DATA = Path(__file__).parents[1] / "data"
DAMPING = 0.01  # of the mean of the diagonal, so that directions without data stay as they are
COLUMNS = 64  # that are made up for one by one, before all that follow are

Layers = dict[str, nn.Linear]


def nearest(x: Tensor) -> Tensor:
    """Each number as the nearest that e4m3 has, with a scale for each row."""
    small, scale = by_row(x.reshape(-1, x.shape[-1]))
    return (small.float() * scale).view_as(x)


def by_data(weight: Tensor, moments: Tensor) -> Tensor:
    """The same grid; `moments` are the sums of products of inputs, in which errors are weighed."""
    scale = by_row(weight)[1]
    width = weight.shape[1]
    damped = moments + DAMPING * moments.diagonal().mean() * torch.eye(width)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    upper = torch.linalg.cholesky(inverse, upper=True)
    left, found = weight.clone(), torch.empty_like(weight)
    for begin in range(0, width, COLUMNS):
        end = min(begin + COLUMNS, width)
        errors = torch.zeros(len(weight), end - begin)
        for column in range(begin, end):
            ratio = (left[:, column : column + 1] / scale).clamp(-448, 448)
            found[:, column] = (ratio.to(torch.float8_e4m3fn).float() * scale)[:, 0]
            error = (left[:, column] - found[:, column]) / upper[column, column]
            left[:, column:end] -= torch.outer(error, upper[column, column:end])
            errors[:, column - begin] = error
        left[:, end:] -= errors @ upper[begin:end, end:]
    return found


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
def moments_of(model: Any, layers: Layers, texts: list[Tensor]) -> dict[str, Tensor]:
    """Sums of products of each layer's inputs."""
    found: dict[str, Tensor] = {}

    def add(name: str) -> Callable[[Any, tuple[Tensor, ...]], None]:
        def hook(_: Any, given: tuple[Tensor, ...]) -> None:
            x = given[0].reshape(-1, given[0].shape[-1]).float()
            found[name] = found.get(name, 0) + x.t() @ x

        return hook

    hooks = [layer.register_forward_pre_hook(add(name)) for name, layer in layers.items()]
    for text in texts:
        model(text)
    for hook in hooks:
        hook.remove()
    return found


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
    model, tokenizer = load_base(section, "fp32").eval(), load_tokenizer(section)
    texts = read(options.texts, options.rows, tokenizer)
    layers = {
        name: module
        for name, module in model.model.layers.named_modules()
        if isinstance(module, nn.Linear)
    }
    plain = {name: nearest(layer.weight.data) for name, layer in layers.items()}
    moments = moments_of(model, layers, read(options.calibration, options.rows, tokenizer))
    guided = {name: by_data(layer.weight.data, moments[name]) for name, layer in layers.items()}
    mlp = {name: layer for name, layer in layers.items() if "mlp" in name}
    rest = {name: layer for name, layer in layers.items() if "mlp" not in name}
    ways: list[tuple[str, Layers, Mapping[str, Tensor], bool]] = [
        ("nearest: weights and inputs", layers, plain, True),
        ("nearest: weights", layers, plain, False),
        ("nearest: inputs", layers, {}, True),
        ("nearest: weights and inputs of MLPs", mlp, plain, True),
        ("nearest: weights and inputs of attention", rest, plain, True),
        ("by data: weights, and inputs as they come", layers, guided, True),
        ("by data: weights", layers, guided, False),
    ]
    exact, lines = answers(model, texts), []
    for name, chosen, weights, inputs in ways:
        with rounded(chosen, weights, inputs=inputs):
            more, apart = compared(exact, answers(model, texts), texts)
        lines.append([name, f"{more:+.2%}", f"{1e3 * apart:.2f}"])
        print(" | ".join(lines[-1]), file=sys.stderr, flush=True)
    write_table(
        "fp8_rounding",
        "Where the loss of 8-bit weights comes from",
        ["rounded to e4m3", "loss", "divergence, thousandths of a nat"],
        lines,
        f"{Path(options.model).name} in fp32, forward only, on {len(texts)} texts of "
        f"{options.texts.name}, beside itself without rounding; calibrated on as many of "
        f"{options.calibration.name}. A change of loss has a sign by chance, too; the divergence "
        "of the answers' odds has none. `by data` isn't in the product.",
        folder=options.out,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
