"""Layers that carry a state see one document a row, and so do their copies."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from shardtune.models.document_isolation import is_recurrent, isolate_documents
from shardtune.models.packing_check import require_document_isolation
from tests.models.families import config

POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0]])


def isolated(family: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(family)).eval()
    isolate_documents(model)
    return model


def mixers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if is_recurrent(module)]


def ask(model: Any, **named: Any) -> Tensor:
    ids = torch.arange(3, 3 + POSITIONS.shape[1])[None]
    found: Tensor = model(input_ids=ids, position_ids=POSITIONS, use_cache=False, **named).logits
    return found


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next"])
def test_a_copy_of_a_model_computes_with_its_own_weights(family: str) -> None:
    model = isolated(family)
    copy = deepcopy(model)
    assert torch.equal(ask(copy), ask(model))
    ask(copy).sum().backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None for mixer in mixers(copy) for p in mixer.parameters())
    assert all(p.grad is None for p in model.parameters())
    require_document_isolation(copy, rows=2)


def test_a_copy_of_one_layer_hears_of_documents() -> None:
    """As peft makes one that it trains."""
    model = isolated("lfm2")
    expected = ask(model)
    layer = model.model.layers[0]
    layer.conv = deepcopy(layer.conv)
    assert torch.equal(ask(model), expected)
    require_document_isolation(model, rows=2)


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next", "nemotron_h"])
def test_rows_of_one_document_have_no_boundaries(family: str) -> None:
    """Kernels would take those of the packed row, which attention is told of, for theirs."""
    model = isolated(family)
    ends = torch.tensor([0, 4, 7, 8], dtype=torch.int32)
    told = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 8, "max_length_k": 8}
    assert torch.equal(ask(model, **told), ask(model))
