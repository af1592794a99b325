"""The bound of a step, tried on the CPU with a toy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_cases import CASES
from benchmarks.gpu_data import batches, config_of, flops
from benchmarks.gpu_kernels import IDLE, PASSES, by_kind, kind_of
from benchmarks.roofline import ROWS, Shapes, main, shapes_of


@pytest.mark.parametrize("row", ROWS)
def test_products_are_those_that_the_table_counts(row: str) -> None:
    case = CASES[row]
    config, shapes = config_of(case, tiny=False), shapes_of(case, tiny=False)
    products = sum(6 * n * sum(out) * into for n, out, into in shapes.products.values())
    wide = shapes.heads * shapes.head
    attention = 3 * shapes.layers * 2 * wide * shapes.length**2 * shapes.rows
    batch = batches(case, 1000, tiny=False)[0]
    assert products * shapes.tokens + attention == flops(case, config, batch)


def test_bytes_are_those_counted_by_hand() -> None:
    shapes = Shapes(
        rows=2, length=5, layers=3, hidden=8, inner=16, heads=4, key_heads=2, head=2,
        vocabulary=100, tied=True,
    )  # fmt: skip
    weights = 3 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16) + 100 * 8
    assert shapes.weights == weights
    # Of a token and layer: two norms, there and back, of four tensors each; queries and keys are
    # read and written, there and back; gate, up and result, and back five. The embedding: five.
    numbers = 3 * (2 * 2 * 4 * 8 + 2 * 2 * (8 + 4) + 8 * 16) + 5 * 8
    assert shapes.passes == {
        "loss": 2 * 2 * 10 * 100,
        "update": 28 * weights,
        PASSES: 2 * 10 * numbers,
    }


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NNT", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*)", "attention"),
        ("_update_kernel", "update"),
        ("void at::native::multi_tensor_apply_kernel<LpNormFunctor>", "update"),
        ("_cross_entropy_kernel", "loss"),
        ("liger_cross_entropy_kernel", "loss"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", PASSES),
        ("_swiglu_backward_kernel", PASSES),
    ],
)
def test_kernels_are_told_by_their_names(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_time_of_kernels_and_between_them() -> None:
    events: list[dict[str, Any]] = [
        {"cat": "gpu_user_annotation", "name": "Optimizer.step", "ts": 0, "dur": 1000},
        {"cat": "kernel", "name": "nvjet", "ts": 100, "dur": 50},
        {"cat": "kernel", "name": "_update_kernel", "ts": 170, "dur": 30},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 140, "dur": 5},
        {"cat": "kernel", "name": "nvjet", "ts": 190, "dur": 40},
        {"name": "a process", "ph": "M"},
    ]
    found = by_kind(events)
    assert found["products"] == pytest.approx(90e-6)
    assert found["update"] == pytest.approx(30e-6)
    assert found[PASSES] == pytest.approx(5e-6)
    assert found[IDLE] == pytest.approx(20e-6)  # from 150 to 170 alone


def test_a_toys_page_beside_steps_of_its_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--tiny", "--out", str(tmp_path), "--rows", ROWS[1]]) == 0
    (bound,) = json.loads((tmp_path / "roofline.json").read_text("utf-8"))
    kernels = bound["kernels"] | {IDLE: 0.004}
    least = sum(bound["kernels"].values())
    shared = {"case": ROWS[1], "machine": bound["machine"], "kernels": kernels}
    steps = [
        shared | {"method": "Liger", "seconds": 2 * least},
        shared | {"method": "compile + Liger loss", "seconds": 3 * least},
        shared | {"method": "shardtune", "seconds": 1.6 * least},
        shared | {"method": "shardtune", "seconds": least / 9, "machine": "another"},
        shared | {"case": "bf16 8x2048", "method": "shardtune", "seconds": least / 9},
    ]
    (tmp_path / "gpu.json").write_text(json.dumps([bound, *steps]), "utf-8")
    capsys.readouterr()
    assert main(["--merge", str(tmp_path / "gpu.json"), "--out", str(tmp_path)]) == 0
    text = (tmp_path / "roofline.md").read_text("utf-8")
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    assert [line.split(" | ")[1] for line in lines] == [
        *("bound", "bare step", "shardtune", "Liger", "compile + Liger loss"),
    ]
    assert "| 0.625 |" in lines[2]
    assert "1.250 times as fast as the best peer" in text
    assert "nothing on the card for 4.0 ms" in text
    assert "0.540 of the bound's" in text  # 1.08 / 2


def test_a_toy_stays_out_of_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--tiny"])
    assert "give --out" in capsys.readouterr().err
