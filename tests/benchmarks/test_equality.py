"""What the fast path is compared with, on the CPU and with a toy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import equality, fp8_loss


@pytest.mark.long
def test_every_way_starts_from_the_same_loss(capsys: pytest.CaptureFixture[str]) -> None:
    equality.main(["--tiny", "--steps", "2", "--rows", "2", "--length", "32"])
    runs = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(runs) == set(equality.WAYS)
    exact = runs.pop("plain, fp32")
    for losses in runs.values():
        assert losses == pytest.approx(exact, rel=1e-3)  # bf16 and e4m3 of a toy's logits


def test_runs_on_other_samples_are_not_compared(tmp_path: Path) -> None:
    for name, samples in (("wide", "a"), ("small", "b")):
        (tmp_path / name).mkdir()
        line = json.dumps({"kind": "step", "loss": 1.0, "samples_sha256": samples})
        (tmp_path / name / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(SystemExit, match="same samples"):
        fp8_loss.main(["--runs", str(tmp_path / "wide"), str(tmp_path / "small")])


@pytest.mark.parametrize(("rounded", "code"), [(1.004, 0), (1.006, 1)])
def test_what_8_bits_cost_is_a_share_of_the_loss(rounded: float, code: int, tmp_path: Path) -> None:
    for name, loss in (("wide", 1.0), ("small", rounded)):
        (tmp_path / name).mkdir()
        step = {"kind": "step", "loss": loss, "samples_sha256": "a"}
        lines = [json.dumps(step), json.dumps({"kind": "evaluation"})]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines))
        job = {"model": {"name": "some/model"}, "data": {"train": [{"path": "data/text.jsonl"}]}}
        (tmp_path / name / "job.yaml").write_text(json.dumps(job))
    runs = ["--runs", str(tmp_path / "wide"), str(tmp_path / "small")]
    assert fp8_loss.main([*runs, "--out", str(tmp_path)]) == code
    more = f"{rounded - 1:+.2%}"
    line = f"| model | text | CPU | 1 | 1.0000 | {rounded:.4f} | {more} | {more} |"
    assert line in (tmp_path / "fp8_loss.md").read_text()
