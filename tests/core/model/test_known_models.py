"""The catalogue of models: every count exact, every name found."""

from __future__ import annotations

import pytest

from shardtune.core.model.known_models import KnownModel, catalogue, is_known, known_model
from shardtune.errors import ModelError


@pytest.mark.parametrize("model", catalogue(), ids=lambda model: model.name)
def test_the_count_is_the_published_one_to_the_digit(model: KnownModel) -> None:
    shape = model.shape
    assert shape.parameters == model.parameters
    assert shape.name == model.name
    assert model.source


def test_stored_biases_of_deepseek_complete_the_published_count() -> None:
    # 58 layers with 256 experts; the published count has their biases, which aren't trained.
    shape = known_model("deepseek-v3")
    assert shape.buffers == 58 * 256
    assert shape.parameters + shape.buffers == 671_026_419_200


@pytest.mark.parametrize(
    ("name", "active"),
    [
        # In billions, as the models' own pages and reports give them.
        ("mixtral-8x7b", 12.9),
        ("mixtral-8x22b", 39.1),
        ("qwen3-30b-a3b", 3.3),
        ("qwen3-235b-a22b", 22.2),
        ("deepseek-v3", 37.6),
        ("olmoe-1b-7b", 1.3),
    ],
)
def test_active_parameters(name: str, active: float) -> None:
    assert known_model(name).active_parameters / 1e9 == pytest.approx(active, abs=0.11)


def test_names_mean_one_model_each() -> None:
    names = [name.lower() for model in catalogue() for name in (model.name, *model.aliases)]
    assert len(names) == len(set(names))
    short = [name.rpartition("/")[2] for name in names]
    assert len(short) == len(set(short))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("LLAMA-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("llama-3-70b", "meta-llama/Llama-3.1-70B"),
        ("llama-2-7b", "meta-llama/Llama-2-7b-hf"),
        ("meta-llama/Llama-2-7b-chat-hf", "meta-llama/Llama-2-7b-hf"),
        ("gemma-2-9b-it", "google/gemma-2-9b"),
        ("google/gemma-3-1b-it", "google/gemma-3-1b-pt"),
        (" gpt2 ", "openai-community/gpt2"),
    ],
)
def test_a_model_is_found_by_all_its_names(name: str, expected: str) -> None:
    assert known_model(name).name == expected
    assert is_known(name)


@pytest.mark.parametrize("alias", ["Mistral-7B-v0.2", "zephyr-7b-beta"])
def test_models_of_one_count_may_differ_in_their_window(alias: str) -> None:
    expected = None if alias.startswith("Mistral") else 4096
    assert known_model(alias).window == expected


def test_a_miss_names_the_nearest() -> None:
    with pytest.raises(ModelError) as error:
        known_model("llama-3.1-9b")
    (problem,) = error.value.problems
    assert "'llama-3.1-9b'" in problem.fact
    assert "did you mean meta-llama/Llama-3.1-8B?" in problem.fix
    assert not is_known("llama-3.1-9b")


def test_a_miss_far_from_everything() -> None:
    with pytest.raises(ModelError) as error:
        known_model("???")
    assert "did you mean" not in str(error.value)
