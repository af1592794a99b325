"""Attention by boundaries gives what a dense mask gives, and what each document gives alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import init_empty_weights
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from shardtune.core.model.document_boundaries import VARLEN, attention_inputs
from shardtune.core.model.family_support import FAMILY_SUPPORT, WITHOUT_BOUNDARIES
from shardtune.models import packed_attention as attention
from shardtune.models.fused.activation_checkpointing import checkpoint_whole_layers
from shardtune.models.packed_attention import (
    describe_attention,
    register,
    same_on_all_ranks,
    varlen_attention,
    why_unsuited,
)
from shardtune.models.packing_check import require_document_isolation
from tests.models import families

SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
WINDOWED = SMALL | {
    "sliding_window": 3,
    "layer_types": ["sliding_attention", "full_attention"],
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
UNDROPPED = SMALL | {"residual_dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**SMALL)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=None)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=2)),
    "mistral, window": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=3)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**WINDOWED)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SMALL | TOKENS, sliding_window=4)),
    "starcoder2": lambda: Starcoder2ForCausalLM(Starcoder2Config(**UNDROPPED, sliding_window=5)),
    "qwen3, window": lambda: Qwen3ForCausalLM(
        Qwen3Config(**WINDOWED, use_sliding_window=True, max_window_layers=1)
    ),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SMALL)),
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**SMALL)),
    "smollm3": lambda: SmolLM3ForCausalLM(SmolLM3Config(**SMALL | TOKENS)),
}
ROWS = ((5, 1, 6), (12,), (3, 9))
"""The lengths of the documents in each row."""


def small(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = FAMILIES[name]()
    with torch.no_grad():
        for parameter in model.parameters():  # as made, attention would hardly matter
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    # Experts can't be computed in float64.
    return model.to(torch.float32 if name == "mixtral" else torch.float64).eval()


def by_boundaries(model: PreTrainedModel) -> PreTrainedModel:
    register()
    model.set_attn_implementation(VARLEN)
    return model


def tokens() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 100, (len(ROWS), 12), generator=torch.Generator().manual_seed(1))
    return ids, torch.stack([torch.cat([torch.arange(n) for n in row]) for row in ROWS])


def outcome(model: PreTrainedModel, ids: Tensor, positions: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The logits, and the gradients of all weights in a sum that looks at every logit."""
    told = attention_inputs(model, positions, "cpu")
    found = model(input_ids=ids, position_ids=positions, use_cache=False, **told).logits
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return found.detach(), list(torch.autograd.grad(found.logsumexp(-1).sum(), weights))


@pytest.mark.parametrize("name", FAMILIES)
def test_as_a_dense_mask(name: str):
    logits, gradients = outcome(small(name), *tokens())
    ours, our_gradients = outcome(by_boundaries(small(name)), *tokens())
    torch.testing.assert_close(ours, logits)
    torch.testing.assert_close(our_gradients, gradients)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma"])
def test_as_each_document_alone(name: str):
    ids, positions = tokens()
    ours, gradients = outcome(by_boundaries(small(name)), ids, positions)
    plain = small(name)
    pieces, summed = [], [torch.zeros_like(each) for each in gradients]
    for row, lengths in zip(ids, ROWS, strict=True):
        for document in row.split(lengths):
            found, one = outcome(plain, document[None], torch.arange(len(document))[None])
            pieces.append(found[0])
            torch._foreach_add_(summed, one)
    torch.testing.assert_close(ours.flatten(0, 1), torch.cat(pieces))
    torch.testing.assert_close(gradients, summed)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo looks
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma"])
def test_compiled_layers(name: str):
    ids, positions = tokens()
    expected, gradients = outcome(by_boundaries(small(name)), ids, positions)
    model = by_boundaries(small(name))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    for layer in model.model.layers:
        layer.compile(backend=counter, fullgraph=True)
    found, found_gradients = outcome(model, ids, positions)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_gradients, gradients)
    made = counter.frame_count
    # Other boundaries are other numbers, not another graph; rows of one document are one more.
    outcome(model, ids, positions[[1, 2, 0]])
    outcome(model, ids, positions[[2, 2, 2]])
    assert counter.frame_count == made
    outcome(model, ids, positions[[1, 1, 1]])
    assert counter.frame_count <= 2 * made


def test_recomputed_layers():
    expected, gradients = outcome(by_boundaries(small("llama")), *tokens())
    model = by_boundaries(small("llama")).train()
    checkpoint_whole_layers(model)
    found, found_gradients = outcome(model, *tokens())
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_gradients, gradients)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma"])
def test_rows_of_one_document_get_no_mask(name: str, monkeypatch: pytest.MonkeyPatch):
    ids, _ = tokens()
    positions = torch.arange(12).expand(3, -1)
    expected, _ = outcome(small(name), ids, positions)
    model = by_boundaries(small(name))
    masks = []
    real = torch.nn.functional.scaled_dot_product_attention

    def watched(*args: Tensor, attn_mask: Tensor | None = None, **options: object) -> Tensor:
        masks.append(attn_mask)
        return real(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    found, _ = outcome(model, ids, positions)
    torch.testing.assert_close(found, expected)
    assert masks == [None, None]  # one a layer


@pytest.mark.parametrize("name", ["mistral, window", "gemma3", "starcoder2"])
def test_windows_in_rows_of_one_document(name: str):
    ids, _ = tokens()
    positions = torch.arange(12).expand(3, -1)
    expected, gradients = outcome(small(name), ids, positions)
    found, found_gradients = outcome(by_boundaries(small(name)), ids, positions)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_gradients, gradients)


def test_whoever_tells_nothing_gets_sdpa():
    ids, positions = tokens()
    plain, ours = small("llama"), by_boundaries(small("llama"))
    padding = torch.ones_like(ids)
    padding[0, :4] = 0
    for inputs in (
        {"position_ids": positions},  # transformers' own mask
        {"attention_mask": padding},
        {},
    ):
        expected = plain(input_ids=ids, **inputs).logits
        torch.testing.assert_close(ours(input_ids=ids, **inputs).logits, expected)


def test_generation():
    ids, _ = tokens()
    padding = torch.ones_like(ids)
    padding[0, :4] = 0
    asked = {"attention_mask": padding, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = small("llama").generate(input_ids=ids, **asked)
    assert torch.equal(by_boundaries(small("llama")).generate(input_ids=ids, **asked), expected)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma"])
def test_isolation_is_shown_the_way_that_training_takes(name: str):
    model = by_boundaries(small(name))
    seen = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["cu_seq_lens_q"]), with_kwargs=True
    )
    require_document_isolation(model.float(), rows=2, precision="bf16")
    # Alone, in another row, with padding behind; packed; and with positions that run on.
    assert [ends is None for ends in seen] == [True, True, True, False, True]


def test_the_saved_model_does_not_ask_for_it(tmp_path: Path):
    by_boundaries(small("llama")).save_pretrained(tmp_path)
    assert VARLEN not in (tmp_path / "config.json").read_text(encoding="utf-8")
    assert AutoConfig.from_pretrained(tmp_path).model_type == "llama"


@pytest.mark.parametrize("name", FAMILIES)
def test_plain_causal_families_are_suited(name: str):
    model = small(name)
    assert why_unsuited(model) is None
    assert model.config._attn_implementation == "sdpa"
    assert not model.training
    with init_empty_weights(include_buffers=False):  # as a model that comes in parts
        skeleton = FAMILIES[name]()
    assert why_unsuited(skeleton) is None


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL)), "gemma2: it has layers of sliding_"),
        (
            lambda: LlamaForCausalLM(LlamaConfig(**SMALL, attention_dropout=0.1)),
            "it needs dropout",
        ),
        (lambda: LlamaForCausalLM(LlamaConfig(**SMALL | {"head_dim": 320})), "head dims are 320"),
        (
            lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=4)),
            "gpt2: it needs dropout",
        ),
        (lambda: NemotronForCausalLM(NemotronConfig(**SMALL)), "doesn't pass cu_seqlens on"),
        (
            lambda: BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=1, n_head=4)),
            "bloom: it has no exch",
        ),
        (
            lambda: LlamaForCausalLM(LlamaConfig(**SMALL, attn_implementation="eager")),
            "model.attention is not sdpa",
        ),
    ],
)
def test_families_that_ask_for_more_keep_their_mask(make, reason: str):
    assert reason in why_unsuited(make())


OWN_DROPOUT = {"gpt2": "attn_pdrop", "gpt_bigcode": "attn_pdrop", "seed_oss": "attention_dropout"}
"""Families that drop attention unless their configuration says otherwise."""


@pytest.mark.parametrize("name", sorted(families.CONFIGS))
def test_the_planner_knows_which_families_keep_their_mask(name: str):
    changes = {OWN_DROPOUT[name]: 0.0} if name in OWN_DROPOUT else {}
    model = AutoModelForCausalLM.from_config(
        families.config(name, **changes), attn_implementation=FAMILY_SUPPORT[name].best_attention
    )
    assert (why_unsuited(model) is not None) == (name in WITHOUT_BOUNDARIES)


def test_without_a_gpu_everything_stays_as_it_is():
    model = small("llama")
    attention.use_varlen_attention(model, "cpu", torch.bfloat16)
    assert model.config._attn_implementation == "sdpa"
    assert describe_attention(model).endswith("by a dense mask (its weights are not on a GPU)")
    told = describe_attention(by_boundaries(model))
    assert "torch's kernels (FlashAttention 4: not requested); packed" in told
    assert told.endswith("by cu_seqlens")


def test_ranks_that_differ_are_named():
    assert same_on_all_ranks(["a", "a"]) == "a"
    assert same_on_all_ranks(["a", "b", "a"]).endswith("ranks 0, 2: a; ranks 1: b")


@pytest.mark.parametrize("asked", [{"softcap": 2.0}, {"dropout": 0.1}, {"is_causal": False}])
def test_what_a_layer_asks_for_is_never_ignored(asked: dict[str, object]):
    given = [torch.zeros(1, heads, 4, 8) for heads in (4, 2, 2)]
    ends = torch.tensor([0, 2, 4], dtype=torch.int32)
    with pytest.raises(AssertionError, match="has looked"):
        varlen_attention(
            torch.nn.Identity(), *given, None, cu_seq_lens_q=ends, max_length_q=4, **asked
        )


def test_a_stand_in_for_a_mask_never_passes_for_one():
    model = by_boundaries(small("llama"))
    ids, positions = tokens()
    mask = attention_inputs(model, positions, "cpu")["attention_mask"]
    with pytest.raises(AssertionError, match="without boundaries"):
        model(input_ids=ids, position_ids=positions, attention_mask=mask)


@pytest.mark.skipif(attention._varlen is None, reason="this torch has no such kernel")
@pytest.mark.parametrize("window", [None, 4])
def test_the_kernel_is_asked_for_what_it_can_do(window: int | None):
    """Shapes alone, which is all that can be seen without a GPU."""
    with FakeTensorMode():
        query, key, value = (torch.empty(2, 16, n, 8, requires_grad=True) for n in (4, 2, 2))
        ends = torch.empty(65, dtype=torch.int32)
        found = attention._varlen_kernel(query, key, value, ends, 16, 0.5, window)
        assert found.shape == query.shape
        gradients = torch.autograd.grad(found.sum(), (query, key, value))
    assert [each.shape[2] for each in gradients] == [4, 2, 2]
