"""GGUF files: every family through an independent reader, and damage that must be refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from shardtune.checkpoint.seal import files_of, folder_faults
from shardtune.config.job import LoRA, NoAdapter
from shardtune.errors import RunError
from shardtune.export.folder import require_ours
from shardtune.export.gguf_adapter import export_gguf_adapter
from shardtune.export.gguf_export import export_gguf, model_metadata
from shardtune.export.gguf_hyperparameters import FAMILIES, hyperparameters
from shardtune.export.gguf_readers import read_by_transformers
from shardtune.export.gguf_weights import gguf_tensors, interleave_pairs, rotary_factors
from shardtune.export.gguf_write import (
    GGUF_TYPES,
    check_gguf,
    open_reader,
    read_metadata,
    rounding_bounds,
    write_gguf,
)
from shardtune.export.source import ExportSource, WholeModel
from shardtune.models.gguf import undo_permutation
from tests.export.tuned import PROMPTS, bpe_tokenizer, family_model, finished

READABLE = [name for name, family in FAMILIES.items() if family.known_to_transformers]
UNREADABLE = [name for name, family in FAMILIES.items() if not family.known_to_transformers]


def whole(model: Any) -> WholeModel:
    ids = [torch.tensor([bpe_tokenizer()(text)["input_ids"]]) for text in PROMPTS]
    return WholeModel(model, [{"input_ids": each} for each in ids], None)


def written(folder: Path, model: Any, kind: str) -> Path:
    """A file without a vocabulary: the tensors are what is asked about."""
    path = folder / f"model-{kind}.gguf"
    metadata = hyperparameters(model.config) | {"tokenizer.ggml.tokens": ["a", "b"]}
    weights = whole(model).weights()
    family = FAMILIES[model.config.model_type]
    with torch.no_grad():
        write_gguf(
            path, family.architecture, metadata, lambda: gguf_tensors(model.config, weights), kind
        )
        check_gguf(path, metadata, lambda: gguf_tensors(model.config, weights), kind)
    return path


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", READABLE)
def test_transformers_reads_the_same_model(family: str, tmp_path: Path) -> None:
    model = family_model(family)
    found = read_by_transformers(written(tmp_path, model, "f32"), whole(model), "f32")
    assert found.logits < 1e-4
    assert found.next_tokens == 1.0


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind == "q8_0" else pytest.param(kind, marks=pytest.mark.long)
        for kind in GGUF_TYPES
        if kind != "f32"
    ],
)
def test_types_stay_within_their_bounds(kind: str, tmp_path: Path) -> None:
    model = family_model("llama")
    found = read_by_transformers(written(tmp_path, model, kind), whole(model), kind)
    assert found.logits > 0
    assert found.next_tokens > {"q4_0": 0.05, "q5_0": 0.1}.get(kind, 0.6)  # 320 random tokens


@pytest.mark.parametrize("family", UNREADABLE)
def test_families_that_transformers_cant_read(family: str, tmp_path: Path) -> None:
    """Their tensors are Llama's, in Llama's order; what they compute otherwise has keys."""
    model = family_model(family)
    reader = open_reader(written(tmp_path, model, "f32"))
    stored = {each.name: each for each in reader.tensors}
    wanted = model.model.layers[1].self_attn.k_proj.weight
    found = torch.from_numpy(gguf.dequantize(stored["blk.1.attn_k.weight"].data, 0).copy())
    assert torch.equal(undo_permutation(found.reshape(wanted.shape), 2), wanted)
    keys = read_metadata(reader)
    if family == "granite":
        config = model.config
        assert keys["granite.attention.scale"] == np.float32(config.attention_multiplier)
        assert keys["granite.logit_scale"] == config.logits_scaling
        assert keys["granite.residual_scale"] == np.float32(config.residual_multiplier)
        assert keys["granite.embedding_scale"] == config.embedding_multiplier


def test_interleaving_is_undone() -> None:
    weight = torch.randn(24, 5)
    assert torch.equal(undo_permutation(interleave_pairs(weight, 3), 3), weight)


def test_llama3_factors_are_those_of_transformers() -> None:
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    model = family_model("llama", rope_parameters=rope, max_position_embeddings=512)
    ((name, factors),) = rotary_factors(model.config)
    plain = 1 / (500000.0 ** (torch.arange(0, 16, 2) / 16))
    assert name == "rope_freqs.weight"
    torch.testing.assert_close(plain / factors, model.model.rotary_emb.inv_freq)


def test_phi3_factors_and_their_attention(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "long_factor": [2.0] * 8,
        "short_factor": [1.5] * 8, "original_max_position_embeddings": 32,
    }  # fmt: skip
    model = family_model("phi3", rope_parameters=rope, original_max_position_embeddings=32)
    tensors = dict(rotary_factors(model.config))
    assert tensors["rope_factors_long.weight"].tolist() == [2.0] * 8
    assert tensors["rope_factors_short.weight"].tolist() == [1.5] * 8
    keys = hyperparameters(model.config)
    assert keys["phi3.rope.scaling.original_context_length"] == 32
    assert keys["phi3.rope.scaling.attn_factor"] == pytest.approx(
        model.model.rotary_emb.attention_scaling
    )


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("smollm3", {"no_rope_layers": [1, 0, 1]}, "no_rope_layers"),
        ("gemma3_text", {"layer_types": ["full_attention"] + ["sliding_attention"] * 2}, "layer_"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act gelu"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("olmo", {}, "'olmo' is no family"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(
    family: str, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(RunError, match=told):
        hyperparameters(family_model(family, **changes).config)


@pytest.mark.parametrize("kind", ["q8_0", "q5_0", "q4_0", "f16", "bf16"])
def test_bounds_hold_and_are_tight(kind: str) -> None:
    draw = np.random.default_rng(3)
    values = draw.standard_normal((64, 96)).astype(np.float32)
    values[0] *= 1e-6
    values[1] = 0
    quantized = gguf.GGMLQuantizationType[kind.upper()]
    back = gguf.dequantize(gguf.quantize(values, quantized), quantized)
    off, bounds = np.abs(back - values), rounding_bounds(values, kind)
    assert (off <= bounds).all()
    assert (off / np.maximum(bounds, 1e-30)).max() > 0.7


@pytest.mark.slow
@pytest.mark.process
def test_an_adapter_is_merged_written_and_sealed(source: ExportSource, tmp_path: Path) -> None:
    target = tmp_path / "out"
    found = export_gguf(source, target, "q8_0")
    assert found.merged is not None
    assert found.transformers is not None
    assert sorted(path.name for path in target.iterdir()) == [
        "README.md", "export.json", "manifest.json", "model-Q8_0.gguf",
    ]  # fmt: skip
    assert not list(folder_faults(target, files_of(target)))
    keys = read_metadata(open_reader(target / found.file))
    tokenizer = source.tokenizer
    assert keys["tokenizer.chat_template"] == tokenizer.chat_template
    assert keys["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
    assert keys["tokenizer.ggml.pre"] == "smollm"
    export_gguf(source, target, "f16")  # an older export is replaced
    assert (target / "model-F16.gguf").is_file()
    assert not (target / "model-Q8_0.gguf").exists()


@pytest.mark.long
@pytest.mark.process
def test_transformers_tokenizes_as_the_run(source: ExportSource, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    export_gguf(source, tmp_path / "out", "f32")
    found = AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file="model-F32.gguf")
    for text in [*PROMPTS, "naïve 天気 33<|im_end|>\n  x"]:
        assert found(text)["input_ids"] == source.tokenizer(text)["input_ids"]


def test_what_isnt_ours_stays(source: ExportSource, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="is no export"):
        export_gguf(source, tmp_path, "f16")
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(RunError, match="is no export"):
        require_ours(source.run.result)


@pytest.mark.long
@pytest.mark.process
def test_an_export_that_was_changed_stays(source: ExportSource, tmp_path: Path) -> None:
    target = tmp_path / "out"
    export_gguf(source, target, "f16")
    (target / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match=r"notes\.txt does not belong"):
        export_gguf(source, target, "f16")


def test_a_flipped_byte_is_refused(source: ExportSource, tmp_path: Path) -> None:
    model = source.whole_model()
    weights, config = model.weights(), model.config
    metadata = model_metadata(source, model, "q8_0")
    path = tmp_path / "model.gguf"

    def tensors() -> Any:
        return gguf_tensors(config, weights)

    write_gguf(path, "llama", metadata, tensors, "q8_0")
    check_gguf(path, metadata, tensors, "q8_0")
    whole_file = path.read_bytes()
    for place in (len(whole_file) - 100, whole_file.index(b"chat_template") + 60):
        broken = bytearray(whole_file)
        broken[place] ^= 0x40
        path.write_bytes(broken)
        with pytest.raises(RunError):
            check_gguf(path, metadata, tensors, "q8_0")


def test_a_missing_template_is_refused(source: ExportSource, tmp_path: Path) -> None:
    model = source.whole_model()
    weights, config = model.weights(), model.config
    metadata = model_metadata(source, model, "f16")
    without = {key: each for key, each in metadata.items() if "chat_template" not in key}
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", without, lambda: gguf_tensors(config, weights), "f16")
    with pytest.raises(RunError, match=r"tokenizer\.chat_template is missing"):
        check_gguf(path, metadata, lambda: gguf_tensors(config, weights), "f16")


@pytest.mark.process
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_computes_the_same_of_every_family(family: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="the extra gguf isn't installed")
    found = export_gguf(finished(tmp_path, family, NoAdapter()), tmp_path / "out", "f16").llama_cpp
    assert found is not None
    assert (found.next_tokens, found.logits) == (1.0, pytest.approx(0.0, abs=0.1))
    assert found.splits_accents == (family == "qwen2")  # whose tokenizer composes them


@pytest.mark.long
@pytest.mark.process
def test_a_full_fine_tune(tmp_path: Path) -> None:
    source = finished(tmp_path, "qwen2", NoAdapter())
    found = export_gguf(source, tmp_path / "out", "bf16")
    assert found.merged is None
    assert found.transformers is not None


@pytest.mark.parametrize("variant", [pytest.param("plain", marks=pytest.mark.long), "rslora"])
def test_an_adapter_file_changes_weights_as_the_run_did(variant: Any, tmp_path: Path) -> None:
    adapter = LoRA(rank=4, alpha=6, variant=variant)
    source = finished(tmp_path, "llama", adapter)
    found = export_gguf_adapter(source, tmp_path / "out")
    assert found.modules == 7 * source.files.config.num_hidden_layers
    assert found.error < 1e-6
    keys = read_metadata(open_reader(tmp_path / "out" / found.file))
    assert keys["general.type"] == "adapter"
    assert keys["adapter.lora.alpha"] == 6
    # Merged by hand into the base's own GGUF tensors, it is the merged model's.
    base, merged = source.files, source.whole_model()
    stored = dict(_arrays(tmp_path / "out" / found.file))
    from shardtune.models.load import load_base

    plain = dict(gguf_tensors(merged.config, dict(load_base(base, "fp32").named_parameters())))
    name = "blk.1.attn_q.weight"
    down, up = stored[f"{name}.lora_a"], stored[f"{name}.lora_b"]
    added = plain[name] + torch.from_numpy(up @ down) * (6 / 4)
    wanted = dict(gguf_tensors(merged.config, merged.weights()))[name]
    torch.testing.assert_close(added, wanted)


def _arrays(path: Path) -> Any:
    from shardtune.export.gguf_write import gguf_weights_of

    return gguf_weights_of(path)


def test_dora_has_no_adapter_file(tmp_path: Path) -> None:
    source = finished(tmp_path, "llama", LoRA(rank=4, variant="dora"))
    with pytest.raises(RunError, match="DoRA"):
        export_gguf_adapter(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
