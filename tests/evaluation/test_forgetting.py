"""The general texts that ship, and what their loss says."""

from __future__ import annotations

import pytest
import torch

from shardtune.cli.open_model import open_model
from shardtune.evaluation.forgetting import (
    GeneralLoss,
    describe_forgetting,
    general_loss,
    general_texts,
)
from shardtune.evaluation.respondent import TextLoss
from shardtune.training.respondent_model import ModelRespondent


def test_the_loss_is_that_of_a_plain_forward_pass() -> None:
    opened = open_model("tiny")
    model = ModelRespondent(opened.model, opened.tokenizer, opened.stop_ids, opened.device)
    text = general_texts()[0][:200]
    found = general_loss(model, [text, "Two words"])
    ids = torch.tensor([opened.tokenizer(text)["input_ids"]])
    with torch.no_grad():
        expected = float(opened.model(ids, labels=ids).loss)
    first = found.texts[0]
    assert first.tokens == ids.shape[1] - 1
    assert first.loss / first.tokens == pytest.approx(expected, abs=1e-5)


def test_the_texts_are_many_and_general() -> None:
    assert 10 <= len(general_texts()) <= 40
    assert 15_000 < sum(map(len, general_texts())) < 45_000


def test_a_change_is_told_with_its_interval() -> None:
    before = GeneralLoss(tuple(TextLoss(3.0 * n, n) for n in range(10, 30)))
    worse = GeneralLoss(tuple(TextLoss(3.2 * n, n) for n in range(10, 30)))
    assert "3.0000 -> 3.2000" in describe_forgetting(before, worse)
    assert describe_forgetting(before, worse).endswith("forgot")
    assert describe_forgetting(worse, before).endswith("gained")
    assert describe_forgetting(before, before).endswith("kept")
    assert "->" not in describe_forgetting(None, before)
