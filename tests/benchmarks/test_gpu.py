"""The benchmark of peers on a GPU, tried on the CPU with a model of the size of a toy."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import Child, left_out, main, what_failed
from benchmarks.gpu_cases import CASES, COMMAND, FAMILY_ROWS, OURS, PEERS, chosen, our_job
from benchmarks.gpu_data import batches, config_of, draw, flops
from benchmarks.gpu_peers import flattened
from benchmarks.gpu_report import latest, letters_of, over_cards, ratio, rows, summary
from benchmarks.gpu_run import measure
from benchmarks.gpu_sample import case_of, described, sample
from benchmarks.gpu_train import STOP, documents_of, train_job, write_rows
from shardtune.config.auto import resolve
from shardtune.config.job import Job
from shardtune.core.host.machine import Machine
from shardtune.core.model.known_models import find_model, known_model
from shardtune.core.step import IGNORED
from shardtune.plan.auto_micro_batch import within_memory
from shardtune.plan.cluster import parse_cluster

BF16_NOISE = 1e-3  # seen on the CPU: 1e-4 with adapters over these steps


def tiny_losses(case: str, method: str) -> list[float]:
    found = measure(CASES[case], method, steps=2, device="cpu", tiny=True)
    assert found["tokens_per_second"] > 0
    return list(found["losses"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("case", "peers"),
    [
        ("bf16 8x2048", ["HF"]),
        ("lean 8x2048", ["HF, checkpointing", "HF, checkpointing, fp32 adapters"]),
        ("packed 8x2048", ["HF", "HF, padded"]),
    ],
)
def test_methods_of_a_row_have_the_same_losses(case: str, peers: list[str]) -> None:
    ours = tiny_losses(case, "shardtune")
    for peer in peers:
        assert tiny_losses(case, peer) == pytest.approx(ours, abs=BF16_NOISE)
    assert len(set(ours)) == len(ours)  # they do train, on batch after batch


@pytest.mark.long
def test_a_quantized_row_has_the_same_losses() -> None:
    pytest.importorskip("bitsandbytes")
    peer = tiny_losses("nf4 8x2048", "HF, checkpointing")
    assert peer == pytest.approx(tiny_losses("nf4 8x2048", "shardtune"), abs=BF16_NOISE)


def test_all_weights_start_alike() -> None:
    """Only the first step: peers hold weights in bf16, we in fp32, so the paths part."""
    ours = tiny_losses("1B all 8x2048", "shardtune")
    assert tiny_losses("1B all 8x2048", "HF")[0] == pytest.approx(ours[0], abs=BF16_NOISE)


@pytest.mark.long
@pytest.mark.process
def test_a_run_writes_figures_table_and_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--tiny", "--rows", "bf16 8x", "--methods", "liger", "shardtune", "--out"]
    assert main([*words, str(tmp_path)]) == 0
    assert "bf16 8x2048 | Liger: left out: it needs a GPU" in capsys.readouterr().out
    both = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert [found["method"] for found in both] == ["shardtune", COMMAND]
    for found in both:
        assert len(set(found["losses"])) == 4 + 2  # warm-up and measured
        assert found["steps"] == 2
        assert found["slowest"] <= found["tokens_per_second"] <= found["fastest"]
        line = f"| bf16 8x2048 | {found['method']} | A |"
        assert line in (tmp_path / "gpu.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("row", [name for name, methods in OURS.items() if COMMAND in methods])
def test_the_command_is_told_only_what_to_train_and_on_what(row: str, tmp_path: Path) -> None:
    document = train_job(CASES[row], tmp_path, steps=14, tiny=False)
    job = Job.model_validate_json(json.dumps(document))
    engines = Job.model_validate_json(json.dumps(our_job(CASES[row], "shardtune")))
    assert set(document["train"]) == {"steps", "global_batch"}
    assert job.adapter == engines.adapter
    assert job.train.global_batch == engines.train.global_batch
    assert job.data.sequence_length == engines.data.sequence_length
    # What is chosen on such a card comes to the settings that the engine is given.
    shape, h200 = find_model(CASES[row].model), parse_cluster("1xH200")
    known = job.model_copy(update={"model": engines.model})
    model, machine = known_model(shape.name), Machine(cores=16, gpus=1)
    planner = partial(within_memory, shape=model, cluster=h200)
    chosen = resolve(known, machine, planner=planner).job.train
    for name in ("micro_batch", "kernels", "loss", "gradient_checkpointing", "precision"):
        assert getattr(chosen, name) == getattr(engines.train, name), name


def test_rows_of_the_command_are_the_tables_own(tmp_path: Path) -> None:
    for row in ("bf16 8x2048", "packed 8x2048"):
        data = batches(CASES[row], 512, tiny=True)
        write_rows(tmp_path / "rows.jsonl", data, steps=3)
        lines = (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()
        found = [json.loads(line)["input_ids"] for line in lines]
        there = [list(each) for batch in data for each in documents_of(batch)]
        assert [each[:-1] for each in found] == [each[:-1] for each in there]
        assert {each[-1] for each in found} == {STOP}


def test_a_failure_is_a_row_and_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [
        {"gpu": "G", "machine": "x", "torch": "2", "transformers": "5", "matmul_flops": 1e12},
        {"error": "no memory"},
        record("lean 8x2048", "shardtune", 100.0),
    ]

    class Said(Child):
        """In the place of a GPU's answers."""

        def __init__(self, words: list[str], options: argparse.Namespace) -> None:
            self._answer = answers.pop(0)

        def result(self) -> dict[str, object]:
            return self._answer

    monkeypatch.setattr(gpu, "Child", Said)
    words = ["--rows", "lean", "--methods", "HF, checkpointing, fp32", "shardtune", "--out"]
    assert main([*words, str(tmp_path)]) == 0
    bad, good = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert (bad["error"], good["tokens_per_second"]) == ("no memory", 100.0)
    assert "fp32 adapters: failed: no memory" in capsys.readouterr().out
    merged = tmp_path / "merged"
    assert main(["--merge", str(tmp_path / "gpu.json"), "--out", str(merged)]) == 0
    assert (merged / "gpu.md").read_text() == (tmp_path / "gpu.md").read_text()
    ElementTree.parse(merged / "gpu.svg")


@pytest.mark.process
def test_a_method_that_hangs_is_ended() -> None:
    options = argparse.Namespace(tiny=True, timeout=0.05)
    assert Child(["gpu_card"], options).result() == {"error": "not done in 0 s"}


ENDLESS = """
from argparse import Namespace
from benchmarks.gpu import leave_on_sigterm, run_all
leave_on_sigterm()
only = ["lean 8x2048: shardtune", "lean 8x2048: HF, checkpointing"]
asked = {"only": only, "tiny": True, "steps": 1_000_000, "timeout": 1_000, "kernels": False}
list(run_all(Namespace(**asked)))
"""


def test_what_is_ended_early_leaves_no_method_behind() -> None:
    command = [sys.executable, "-c", ENDLESS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert "TFLOP/s" in run.stdout.readline()  # after it two are started, of which one waits
        parent, until = psutil.Process(run.pid), time.monotonic() + 60
        while len(methods := parent.children()) < 2:
            assert time.monotonic() < until, methods
            time.sleep(0.01)
        time.sleep(0.5)  # until the first one is told to go
        try:
            run.terminate()
            assert run.wait(30) == 128 + signal.SIGTERM
            assert not any(map(psutil.pid_exists, [each.pid for each in methods]))
        finally:
            for each in methods:
                with suppress(psutil.NoSuchProcess):
                    each.kill()


def test_a_toy_stays_out_of_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--tiny"])
    assert "give --out" in capsys.readouterr().err


def test_what_cannot_be_imported_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "liger_kernel", raising=False)
    monkeypatch.setattr(sys, "path", [])
    assert left_out("Liger", tiny=False) == "liger_kernel can't be imported"
    assert left_out("HF", tiny=False) == ""
    assert left_out("shardtune", tiny=False) == ""


def test_advice_behind_an_error_is_not_the_error() -> None:
    text = "Traceback\n  File x\ntorch.OutOfMemoryError: CUDA out of memory.\nSet VERBOSE=1\n"
    assert what_failed(text, 1) == "torch.OutOfMemoryError: CUDA out of memory."
    assert what_failed("Killed\n", 1) == "Killed"
    assert what_failed("", -9) == "exit code -9"


# Cases and data -----------------------------------------------------------------------------------


def test_every_row_is_complete() -> None:
    assert OURS.keys() == CASES.keys()  # none by the default of drawn ones
    for case in CASES.values():
        find_model(case.model)
        assert set(case.peers) <= PEERS.keys()
        assert case.peers or CASES[case.against].peers
        for method in OURS[case.name]:
            assert method.startswith("shardtune")
            Job.model_validate_json(json.dumps(our_job(case, method)))


def test_words_choose_rows_and_methods() -> None:
    found = [(case.name, method) for case, method in chosen(["70b"], ["LIGER", "shardtune"])]
    assert found == [
        ("70B nf4 4x2048", "Liger, checkpointing"),
        ("70B nf4 4x2048", "shardtune"),
    ]


def test_a_weight_is_the_same_for_whoever_asks() -> None:
    first, again = (draw("model.layers.0.mlp.up_proj.weight", (64, 64), "cpu") for _ in range(2))
    other = draw("model.layers.1.mlp.up_proj.weight", (64, 64), "cpu")
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert draw("model.norm.weight", (8,), "cpu").eq(1).all()


def test_packed_and_padded_rows_hold_the_same_documents() -> None:
    case = CASES["packed 8x2048"]
    for batch in batches(case, 1000, tiny=False):
        lengths = [len(document) for document in batch.documents]
        assert min(lengths) >= 50
        assert max(lengths) <= 2000
        assert batch.ours.tokens == sum(lengths)
        assert batch.ours.tokens > 0.97 * case.rows * case.length  # 16,368 of 16,384 and more
        padded = batch.padded()
        assert sum(int(mask.sum()) for _, mask, _ in padded) == batch.ours.tokens
        labels = sum(int((labels != IGNORED).sum()) for _, _, labels in padded)
        assert labels == batch.ours.labels == sum(lengths) - len(lengths)
        ids, labels_there = batch.ours.input_ids, batch.labels
        trained = labels_there != IGNORED
        assert torch.equal(labels_there[trained], ids[trained])
        assert batch.ours.position_ids[trained].min() == 1  # no document's first token


def test_one_long_row_keeps_the_bounds_of_its_documents() -> None:
    batch = batches(CASES["packed 8x2048"], 512, tiny=True)[0]
    given = {"input_ids": batch.ours.input_ids, "position_ids": batch.ours.position_ids}
    made = flattened(given)
    bounds = made["cu_seq_lens_q"].tolist()
    pieces = [made["input_ids"][0, a:b].tolist() for a, b in pairwise(bounds)]
    assert bounds[0] == 0
    assert bounds[-1] == batch.ours.input_ids.numel()
    for document in batch.documents:
        pieces.remove(document.tolist())
    assert not any(map(any, pieces))  # only padding is left


def test_flops_of_a_step() -> None:
    """By hand, from the parameters that the catalogue counts (the embedding is no product)."""
    case = CASES["1B all 8x2048"]
    config = config_of(case, tiny=False)
    found = flops(case, config, batches(case, 1000, tiny=False)[0])
    parameters = find_model(case.model).parameters  # head and embedding are one
    attention = 3 * 16 * 2 * 2048 * 2048**2 * 8
    assert found == pytest.approx(6 * parameters * 16384 + attention, rel=1e-3)


# The table ----------------------------------------------------------------------------------------


def record(case: str, method: str, rate: float, machine: str = "x", **more: Any) -> dict[str, Any]:
    return {
        "case": case,
        "method": method,
        "machine": machine,
        "gpu": "G",
        "torch": "2",
        "transformers": "5",
        "run": "r",
        "tokens_per_second": rate,
        "slowest": rate,
        "fastest": rate,
        "flops_per_second": rate,
        "matmul_flops": 2 * rate,
        "allocated_gib": 1.0,
        "first_step_seconds": 1.0,
        "losses": [1.0, 0.5],
        "steps": 10,
    } | more


def test_ratios_are_to_the_best_peer_of_the_same_machine() -> None:
    ours = record("bf16 8x2048", "shardtune", 300.0, losses=[1.01, 0.8])
    quantized = record("fp8 8x2048", "shardtune", 400.0)
    alone = record("bf16 8x2048", "shardtune", 300.0, "y")
    records = latest(
        [
            record("bf16 8x2048", "Liger", 999.0),
            ours,
            alone,
            quantized,
            record("bf16 8x2048", "HF", 100.0),
            record("bf16 8x2048", "Liger", 200.0),  # later, so the one that counts
            {"case": "bf16 8x2048", "method": "Unsloth", "machine": "x", "error": "no memory"},
        ]
    )
    assert ratio(ours, records) == 1.5
    assert ratio(quantized, records) == 2.0
    assert ratio(alone, records) is None
    table = {(row[0], row[1], row[2]): row for row in rows(records, letters_of(records))}
    assert table["bf16 8x2048", "Unsloth", "A"][3] == "failed: no memory"
    assert table["bf16 8x2048", "shardtune", "A"][-4:-2] == ["1.0e-02", "3.0e-01"]
    assert table["bf16 8x2048", "shardtune", "A"][10] == "0.500"
    assert table["bf16 8x2048", "shardtune", "B"][5] == "none beside it"
    assert len({len(row) for row in table.values()}) == 1
    assert summary(records).startswith(
        "Over 2 rows of ours with a peer on the same machine: geometric mean 1.732 of the best "
        "peer's speed; worst 1.500 (bf16 8x2048); below 1: none."
    )


def test_rows_of_several_cards_have_a_median_and_a_range() -> None:
    rates = {"x": 210.0, "y": 230.0, "z": 200.0}
    records = [record("bf16 8x2048", "Liger", 100.0, machine) for machine in rates]
    records += [record("bf16 8x2048", "shardtune", rate, at) for at, rate in rates.items()]
    records += [record("bf16 8x2048", "shardtune", 999.0, "no peer beside it")]
    records += [record("lean 8x2048", "Liger", 100.0), record("lean 8x2048", "shardtune", 120.0)]
    records += [
        record("bf16 8x2048", method, 900.0 if method == "shardtune" else 300.0, gpu) | {"gpu": gpu}
        for method in ("Liger", "shardtune")
        for gpu in ("another", "kind")
    ]
    assert over_cards(records) == [["bf16 8x2048", "G", "3", "2.100", "2.000", "2.300"]]


def test_drawn_jobs_are_drawn_again_by_their_names() -> None:
    """And are jobs that fit, with peers; all kinds of them come."""
    drawn = [sample(7, number) for number in range(1, 41)]
    for case in drawn:
        sample.cache_clear()
        assert case_of(case.name) == case
        assert len(case.peers) == 2
        assert set(case.peers) <= PEERS.keys()
        assert described(case)
    assert {case.lora for case in drawn} == {True, False}
    assert {case.base for case in drawn} == {"bf16", "nf4"}
    assert {case.level for case in drawn} == {"none", "most"}
    assert len({case.family for case in drawn}) > 6
    assert case_of("sample 8.1") != case_of("sample 7.1")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("row", FAMILY_ROWS)
def test_families_have_the_same_losses(row: str) -> None:
    """In bf16, where rounding of soft-capped or scaled logits is not ours."""
    ours, peer = tiny_losses(row, "shardtune"), tiny_losses(row, "HF")
    assert peer == pytest.approx(ours, abs=20 * BF16_NOISE)
