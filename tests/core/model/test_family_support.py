"""The table of families says what transformers' own classes say, and `auto` follows it."""

from __future__ import annotations

import pytest

from shardtune.config.auto import resolve
from shardtune.core.host.machine import Machine
from shardtune.core.model.family_support import (
    FAMILY_SUPPORT,
    require_attention,
    support_of,
)
from shardtune.errors import ModelError
from tests.jobs import make_job

CPU, GPU = Machine(cores=2, gpus=0), Machine(cores=2, gpus=1)


@pytest.mark.parametrize("family", FAMILY_SUPPORT)
def test_attention_is_what_transformers_has(family: str) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[family]
    mappings = (AutoModelForCausalLM._model_mapping, AutoModelForSeq2SeqLM._model_mapping)
    model = next(mapping[kind] for mapping in mappings if kind in mapping)
    flags = {
        "sdpa": model._supports_sdpa,
        "flex_attention": model._supports_flex_attn,
        "flash_attention_2": model._supports_flash_attn,
        "eager": True,
    }
    assert FAMILY_SUPPORT[family].attention == tuple(name for name, has in flags.items() if has)


def test_at_least_thirty_families() -> None:
    assert len(FAMILY_SUPPORT) >= 30


def test_the_best_attention() -> None:
    assert FAMILY_SUPPORT["llama"].best_attention == "sdpa"
    assert FAMILY_SUPPORT["gemma2"].best_attention == "eager"
    assert FAMILY_SUPPORT["gptj"].best_attention == "eager"


def test_a_text_model_inside_another_is_found() -> None:
    inner = {"model_type": "gemma3_text"}
    assert support_of({"model_type": "gemma3", "text_config": inner}) is not None
    assert support_of({"model_type": "nobody-knows"}) is None


def test_what_a_family_lacks_is_refused_with_what_it_has() -> None:
    with pytest.raises(ModelError) as caught:
        require_attention("bloom", "sdpa")
    (problem,) = caught.value.problems
    assert problem.place == "model.attention"
    assert problem.fact == "is sdpa, which bloom models don't have in transformers"
    assert problem.fix == "set model.attention: auto, or one of eager"
    require_attention("bloom", "auto")
    require_attention("nobody-knows", "sdpa")


@pytest.mark.parametrize(
    ("family", "machine", "attention", "packing", "reason"),
    [
        ("llama", CPU, "sdpa", True, "llama isolates packed documents"),
        ("gemma2", GPU, "eager", True, "gemma2 isolates packed documents"),
        ("bloom", GPU, "eager", False, "padded, as bloom mixes documents: its attention counts"),
        ("mamba", CPU, "auto", False, "padded: it is not known whether mamba isolates"),
    ],
)
def test_auto(
    tmp_path, family: str, machine: Machine, attention: str, packing: bool, reason: str
) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "{family}"}}')
    found = resolve(make_job(model={"name": str(tmp_path)}), machine)
    assert (found.job.model.attention, found.job.data.packing) == (attention, packing)
    assert reason in found.reasons["data", "packing"]
    if attention != "auto":
        assert found.reasons["model", "attention"].startswith(f"the best for {family}")


def test_what_is_said_is_obeyed(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bloom"}')
    job = make_job(model={"name": str(tmp_path), "attention": "eager"}, data={"packing": True})
    found = resolve(job, CPU)
    assert found.job.data.packing is True
    assert not {("model", "attention"), ("data", "packing")} & found.reasons.keys()


def test_a_model_that_is_not_there_is_left_to_whoever_opens_it() -> None:
    found = resolve(make_job(model={"name": "no-such-model"}), CPU)
    assert (found.job.model.attention, found.job.data.packing) == ("auto", "auto")
