"""What a GPU could do at best with a step that trains all weights, beside what it does.

    python -m benchmarks.gpu --rows "all 8x2048" --kernels --out first     the steps
    python -m benchmarks.roofline --steps first/gpu.json --out first       the bound, the page
    python -m benchmarks.roofline --merge first/roofline.json              the page alone, in docs
    python -m benchmarks.roofline --tiny --out /tmp/x                      a toy on the CPU

The bound is measured on the same card: each product of the step at its own shape, forward, for the
gradient of its input and for that of its weight; attention at its shape; and for all else the bytes
that have to be moved at least, at the rate of a copy. Products alone, with a rest now and then, are
faster than in a step, which brings a card to its power limit; so a bare step is measured, too:
those products, attention and copies of those bytes in a step's order, again and again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_card import card, clocked
from benchmarks.gpu_cases import CASES, PEERS, TINY_BATCH, Case
from benchmarks.gpu_data import BASE, config_of
from benchmarks.gpu_kernels import IDLE, PASSES
from benchmarks.table import DOCS, write_table

ROWS = ("0.5B all 8x2048", "1B all 8x2048", "3B all 8x2048")
BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
WARM_STEPS, BARE_STEPS = 3, 6
ROUNDS, BURST, REST = 4, 6, 0.03  # bursts with a rest: a card at its power limit is slower
COPIED = 1 << 30  # bytes of the copy that tells the rate of memory
UPDATE = 2 + 24
"""Bytes that AdamW moves for a weight: a gradient in bf16 is read; weight and moments in fp32 are
read and written."""
NORM = 2
"""Bytes that the norm of the gradient reads for a weight."""
ASKED = 1.08
"""Of the best peer's speed."""
KINDS = ("products", "attention", "loss", "update", PASSES)

Record = dict[str, Any]


@dataclass(frozen=True)
class Shapes:
    """What the step of a row computes on."""

    rows: int
    length: int
    layers: int
    hidden: int
    inner: int
    heads: int
    key_heads: int
    head: int
    vocabulary: int
    tied: bool

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def products(self) -> dict[str, tuple[int, tuple[int, ...], int]]:
        """By name: how often, the outputs of the layers that share an input, the input."""
        wide, keys = self.heads * self.head, self.key_heads * self.head
        return {
            "Q, K, V": (self.layers, (wide, keys, keys), self.hidden),
            "output": (self.layers, (self.hidden,), wide),
            "gate, up": (self.layers, (self.inner, self.inner), self.hidden),
            "down": (self.layers, (self.hidden,), self.inner),
            "head": (1, (self.vocabulary,), self.hidden),
        }

    @property
    def weights(self) -> int:
        """Numbers that are trained, without those of norms and biases."""
        found = sum(count * sum(out) * into for count, out, into in self.products.values())
        return found if self.tied else found + self.vocabulary * self.hidden

    @property
    def layer(self) -> dict[str, int]:
        """Bytes that a layer moves at least beside products and attention, where neighbours are one
        kernel. A norm reads what the layer before it has added and the residual, and writes their
        sum and its own result; its backward pass does the reverse."""
        numbers = {
            "norms": 2 * 4 * self.hidden,  # in each direction
            "rope": 2 * (self.heads + self.key_heads) * self.head,  # in each direction
            "activation": 3 * self.inner,
            "activation, back": 5 * self.inner,
        }
        return {name: 2 * self.tokens * count for name, count in numbers.items()}

    @property
    def passes(self) -> dict[str, int]:
        """Bytes of a step, by what the kernels are called that move them."""
        layer = self.layer
        twice = layer["norms"] + layer["rope"]
        each = 2 * twice + layer["activation"] + layer["activation, back"]
        embedding = 2 * self.tokens * 5 * self.hidden
        return {
            "loss": 2 * 2 * self.tokens * self.vocabulary,
            "update": (UPDATE + NORM) * self.weights,
            PASSES: self.layers * each + embedding,
        }


def shapes_of(case: Case, *, tiny: bool) -> Shapes:
    config = config_of(case, tiny=tiny)
    rows, length = TINY_BATCH if tiny else (case.rows, case.length)
    heads = config.num_attention_heads
    return Shapes(
        rows, length, config.num_hidden_layers, config.hidden_size, config.intermediate_size,
        heads, config.num_key_value_heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
        config.vocab_size, bool(config.tie_word_embeddings),
    )  # fmt: skip


# Measuring ----------------------------------------------------------------------------------------


def bound(case: Case, device: str, *, tiny: bool) -> Record:
    """Seconds of a step's parts at best, and of a bare step."""
    shapes = shapes_of(case, tiny=tiny)
    copy = Copy(1 << 16 if tiny else COPIED, device)
    rate = 2 * copy.size / timed(lambda: copy.move(2 * copy.size), device)
    products = {
        name: count * product_seconds(shapes.tokens, out, into, device)
        for name, (count, out, into) in shapes.products.items()
    }
    attention = fastest_attention(shapes, device)
    moved = {kind: size / rate for kind, size in shapes.passes.items()}
    flops = sum(6 * shapes.tokens * n * sum(out) * i for n, out, i in shapes.products.values())
    alone = {"products": sum(products.values()), "attention": shapes.layers * attention.seconds}
    return {
        "case": case.name,
        "kernels": alone | moved,
        "bare_seconds": bare_step_seconds(shapes, attention, copy, device),
        "products": products,
        "products_flops": flops / alone["products"],
        "copy_bytes": rate,
        **card(device),
    }


class Copy:
    """Moves bytes: half of them are read, half are written."""

    def __init__(self, size: int, device: str) -> None:
        self.size = size
        self._from = torch.empty(size, dtype=torch.uint8, device=device).random_()
        self._to = torch.empty_like(self._from)

    def move(self, count: int) -> None:
        left = count // 2
        while left:
            size = min(left, self.size)
            self._to[:size].copy_(self._from[:size])
            left -= size


def timed(work: Callable[[], object], device: str) -> float:
    """Seconds of `work`: the median of bursts, on the clock of the card."""
    work()
    rounds, burst = (ROUNDS, BURST) if device == "cuda" else (1, 1)
    found = []
    for _ in range(rounds):
        if device != "cuda":
            begun = time.perf_counter()
            work()
            found.append(time.perf_counter() - begun)
            continue
        time.sleep(REST)
        begin, end = _event(), _event()
        work()  # while it runs the others are launched
        begin.record()
        for _ in range(burst):
            work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / burst)
    return median(found)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def product_seconds(tokens: int, outs: tuple[int, ...], into: int, device: str) -> float:
    """Forward and both gradients of layers that share an input, each in the faster way: all of them
    as one product or one by one, the gradient of a weight as it is or transposed."""
    total = 0.0
    for ways in zip(*map(list, _ways(tokens, outs, into, device)), strict=True):
        total += min(ways)
    return total


def _ways(tokens: int, outs: tuple[int, ...], into: int, device: str) -> Iterator[list[float]]:
    yield passes_of(tokens, sum(outs), into, device)
    if len(outs) > 1:
        each = {out: passes_of(tokens, out, into, device) for out in set(outs)}
        yield [sum(found) for found in zip(*(each[out] for out in outs), strict=True)]


def passes_of(tokens: int, out: int, into: int, device: str) -> list[float]:
    """Seconds of the forward pass, of the input's gradient and of the weight's."""
    x, weight, grad = operands(tokens, out, into, device)
    straight = timed(lambda: grad.t() @ x, device)
    transposed = timed(lambda: x.t() @ grad, device)
    return [
        timed(lambda: x @ weight.t(), device),
        timed(lambda: grad @ weight, device),
        min(straight, transposed),
    ]


def operands(tokens: int, out: int, into: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight and gradient of the output; random, as zeros are multiplied faster."""
    sizes = ((tokens, into), (out, into), (tokens, out))
    x, weight, grad = (torch.randn(*size, dtype=BASE, device=device) for size in sizes)
    return x, weight, grad


@dataclass(frozen=True)
class Attention:
    """A layer's attention by one of torch's kernels."""

    forward: Callable[[], Tensor]
    backward: Callable[[], object]
    seconds: float
    """Of both."""


def fastest_attention(shapes: Shapes, device: str) -> Attention:
    sizes = (shapes.heads, shapes.key_heads, shapes.key_heads)
    q, k, v = (
        torch.randn(shapes.rows, shapes.length, n, shapes.head, dtype=BASE, device=device)
        .transpose(1, 2)
        .requires_grad_()
        for n in sizes
    )
    backends = BACKENDS if device == "cuda" else (SDPBackend.MATH,)
    found = [_attention_by(backend, q, k, v, device) for backend in backends]
    return min((each for each in found if each is not None), key=lambda each: each.seconds)


def _attention_by(
    backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, device: str
) -> Attention | None:
    """None where the kernel can't do it."""

    def forward() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def backward() -> object:
        return torch.autograd.grad(result, (q, k, v), grad, retain_graph=True)

    try:
        result = forward()
        grad = torch.randn_like(result)
        return Attention(forward, backward, timed(forward, device) + timed(backward, device))
    except RuntimeError as error:
        print(f"{backend}: {str(error).splitlines()[0]}", file=sys.stderr)
        return None


def bare_step_seconds(shapes: Shapes, attention: Attention, copy: Copy, device: str) -> float:
    """Products, attention and copies in the order of a step, and nothing else."""
    sizes = {name: (sum(out), into) for name, (_, out, into) in shapes.products.items()}
    given = {name: operands(shapes.tokens, *size, device) for name, size in sizes.items()}
    layer, passes = shapes.layer, shapes.passes

    def forward(name: str) -> None:
        x, weight, _ = given[name]
        x @ weight.t()

    def backward(name: str) -> None:
        x, weight, grad = given[name]
        grad @ weight
        grad.t() @ x

    def step(_: int) -> Tensor:
        for _ in range(shapes.layers):
            copy.move(layer["norms"])
            forward("Q, K, V")
            copy.move(layer["rope"])
            attention.forward()
            forward("output")
            forward("gate, up")
            copy.move(layer["activation"])
            forward("down")
        forward("head")
        copy.move(passes["loss"])
        backward("head")
        for _ in range(shapes.layers):
            backward("down")
            copy.move(layer["activation, back"])
            backward("gate, up")
            backward("output")
            attention.backward()
            copy.move(layer["rope"])
            backward("Q, K, V")
            copy.move(layer["norms"])
        copy.move(passes["update"])
        return torch.zeros(())

    for _ in range(WARM_STEPS):
        step(0)
    seconds, _ = clocked(step, range(BARE_STEPS), device)
    return median(seconds)


# The page -----------------------------------------------------------------------------------------


def page(records: list[Record], folder: Path) -> None:
    """Of bounds, and of steps that were measured on the same card."""
    bounds = [each for each in records if "copy_bytes" in each]
    bounds.sort(key=lambda each: ROWS.index(each["case"]))
    steps = [each for each in records if "seconds" in each]
    rows = list(chain.from_iterable(_rows(each, steps) for each in bounds))
    first = bounds[0]
    name = first["gpu"] if first["gpu"] != "none" else "a CPU"
    write_table(
        "roofline",
        "All weights: the bound of a step",
        [
            "row",
            "",
            *(f"{kind}, ms" for kind in KINDS),
            "sum, ms",
            "step, ms",
            "bound / step",
            "bare step / step",
        ],
        rows,
        _note(bounds, steps),
        machine=f"on {name} (torch {first['torch']}, transformers {first['transformers']})",
        folder=folder,
    )


def _rows(bound: Record, steps: list[Record]) -> Iterator[list[str]]:
    least, bare = sum(bound["kernels"].values()), bound["bare_seconds"]
    yield [bound["case"], "bound", *_milliseconds(bound["kernels"], least), "", "", ""]
    yield [
        "",
        "bare step",
        *[""] * (len(KINDS) + 1),
        f"**{bare * 1e3:.1f}**",
        *_shares(bound, bare),
    ]
    for each in beside(bound, steps):
        total = sum(each["kernels"][kind] for kind in KINDS)
        own = f"**{each['seconds'] * 1e3:.1f}**"
        parts = _milliseconds(each["kernels"], total)
        yield ["", each["method"], *parts, own, *_shares(bound, each["seconds"])]


def _shares(bound: Record, seconds: float) -> tuple[str, str]:
    least = sum(bound["kernels"].values())
    return f"{least / seconds:.3f}", f"{bound['bare_seconds'] / seconds:.3f}"


def _milliseconds(kernels: dict[str, float], total: float) -> list[str]:
    return [*(f"{kernels[kind] * 1e3:.1f}" for kind in KINDS), f"{total * 1e3:.1f}"]


def beside(bound: Record, steps: list[Record]) -> list[Record]:
    """The methods of a bound's row on its card, ours first."""
    here = [
        each
        for each in steps
        if (each["case"], each["machine"]) == (bound["case"], bound["machine"])
        and each.get("kernels")
    ]
    return sorted(here, key=lambda each: (each["method"] in PEERS, each["seconds"]))


def _note(bounds: list[Record], steps: list[Record]) -> str:
    return "\n\n".join(
        [
            "*Bound*: products at the rate at which this card multiplies just those shapes (the "
            "faster of layers together or one by one, bursts with a rest between them, so below "
            "its power limit), attention by the fastest of torch's kernels, and for all else the "
            "bytes that are moved at least, at the rate of a copy: the loss reads and writes each "
            f"logit once, the update moves {UPDATE} bytes a weight (bf16 gradient; fp32 weight and "
            f"moments) and the gradient's norm reads {NORM}; norms, additions, RoPE, the "
            "activation and the embedding read and write each tensor once, forward and back. "
            "Nothing overlaps, and nothing is computed where a product ends. *Bare step*: the same "
            "products, attention and copies of as many bytes, in a step's order and again and "
            "again, so at the clocks that the card's power allows. A step could only be faster "
            "with other kernels (an activation computed where its product ends moves fewer bytes) "
            "or with passes that overlap products. *Sum* is what ran on "
            "the card, by the names of kernels, of two steps under a profiler; *step* is the "
            "median step without one. Peers hold weights and moments in bf16, so their update "
            "has about half of those bytes to move, and loses updates that ours keeps ([ADR "
            "4](../adr/0004-precision.md)).",
            *(_verdict(each, beside(each, steps)) for each in bounds),
        ]
    )


def _verdict(bound: Record, found: list[Record]) -> str:
    least, bare = sum(bound["kernels"].values()), bound["bare_seconds"]
    hard = bound["kernels"]["products"] + bound["kernels"]["attention"]
    text = (
        f"`{bound['case']}`: products and attention alone take {hard * 1e3:.1f} ms "
        f"({bound['products_flops'] / 1e12:.0f} TFLOP/s in products), everything "
        f"{least * 1e3:.1f} ms; a copy moves {bound['copy_bytes'] / 1e12:.2f} TB/s. The bare step "
        f"takes {bare * 1e3:.1f} ms."
    )
    peers = [each for each in found if each["method"] in PEERS]
    ours = [each for each in found if each["method"] not in PEERS]
    if not peers or not ours:
        return text
    best, own = peers[0]["seconds"], ours[0]
    asked = best / ASKED
    return (
        f"{text} Ours takes {own['seconds'] * 1e3:.1f} ms, {best / own['seconds']:.3f} times as "
        f"fast as the best peer ({best * 1e3:.1f} ms, {peers[0]['method']}), with nothing on the "
        f"card for {own['kernels'][IDLE] * 1e3:.1f} ms of it. {ASKED} times the peer's speed would "
        f"be {asked * 1e3:.1f} ms, {bare / asked:.3f} of the bare step's speed and "
        f"{least / asked:.3f} of the bound's."
        + (" So it is out of this bare step's reach." if asked < bare else "")
    )


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, help="(all)")
    parser.add_argument("--steps", type=Path, nargs="+", default=[], metavar="JSON")
    parser.add_argument("--out", type=Path, default=DOCS, metavar="FOLDER", help="(docs)")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="JSON", help="measure nothing")
    parser.add_argument("--tiny", action="store_true", help="a toy on the CPU")
    options = parser.parse_args(given)
    if options.tiny and options.out == DOCS:
        parser.error("--tiny measures nothing worth a place in the docs: give --out")
    records = [
        record
        for file in (options.merge or options.steps)
        for record in json.loads(file.read_text(encoding="utf-8"))
        if record["case"] in ROWS
    ]
    device = "cpu" if options.tiny else "cuda"
    wanted = () if options.merge else options.rows
    records.extend(bound(CASES[name], device, tiny=options.tiny) for name in wanted)
    options.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(records, indent=1) + "\n"
    (options.out / "roofline.json").write_text(text, encoding="utf-8")
    page(records, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
