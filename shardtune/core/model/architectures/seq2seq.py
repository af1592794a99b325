"""Models with an encoder and a decoder: T5 and BART."""

from __future__ import annotations

from shardtune.core.model.architectures.fields import Fields
from shardtune.core.model.architectures.tensors import Tensors, head, linear, norm, placed, table
from shardtune.core.model.shape import ModelShape


def t5(fields: Fields, family: str) -> ModelShape:
    """T5 and mT5: relative positions in the first layer of each half, heads of any width.

    What the config says of the output head counts: the published weights of T5 1.1 and Flan-T5
    have one of their own, and it stays one when they are loaded.
    """
    hidden, ffn = fields.count("d_model", "hidden_size"), fields.count("d_ff")
    heads = fields.count("num_heads", "num_attention_heads")
    head_dim = fields.count("d_kv", "head_dim", default=64)
    layers = fields.count("num_layers", "num_hidden_layers")
    decoder_layers = fields.count("num_decoder_layers", default=layers)
    vocab = fields.count("vocab_size")
    buckets = fields.count("relative_attention_num_buckets", default=32)
    tied = fields.flag("tie_word_embeddings", True)
    usual = "relu" if family == "t5" else "gated-gelu"
    gate, _, activation = fields.word("feed_forward_proj", default=usual).rpartition("-")
    width = heads * head_dim

    def attention(place: int, name: str) -> Tensors:
        inward = [
            w for part in "qkv" for w in linear(f"layer.{place}.{name}.{part}", width, hidden)
        ]
        outward = linear(f"layer.{place}.{name}.o", hidden, width)
        return [*inward, *outward, *norm(f"layer.{place}.layer_norm", hidden)]

    def mlp(place: int) -> Tensors:
        name = f"layer.{place}.DenseReluDense"
        first = ("wi_0", "wi_1") if gate else ("wi",)
        inward = [w for part in first for w in linear(f"{name}.{part}", ffn, hidden)]
        outward = linear(f"{name}.wo", hidden, ffn)
        return [*inward, *outward, *norm(f"layer.{place}.layer_norm", hidden)]

    bias = table("layer.0.SelfAttention.relative_attention_bias", buckets, heads)
    encoder = [*attention(0, "SelfAttention"), *mlp(1)]
    decoder = [*attention(0, "SelfAttention"), *attention(1, "EncDecAttention"), *mlp(2)]
    weights = [
        *placed("embedding", 1, table("shared", vocab, hidden)),
        *placed("encoder_layer", layers, encoder),
        *placed("encoder_layer", 1, bias),
        *placed("root", 1, norm("encoder.final_layer_norm", hidden)),
        *placed("layer", decoder_layers, decoder),
        *placed("layer", 1, bias),
        *placed("root", 1, norm("decoder.final_layer_norm", hidden)),
        *head(vocab, hidden, tied=tied),
    ]
    dropout = fields.share("dropout_rate", default=0.1)
    return ModelShape(
        name=fields.name,
        family=family,
        vocab=vocab,
        hidden=hidden,
        layers=decoder_layers,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        value_dim=head_dim,
        ffn=ffn,
        gated=bool(gate),
        activation=activation,
        tied=tied,
        norm="rms",
        weights=tuple(weights),
        positions="relative",
        max_positions=fields.optional("n_positions", default=0) or 0,
        dropout=dropout,
        attention_dropout=dropout,
        encoder_layers=layers,
    )


def bart(fields: Fields, family: str) -> ModelShape:
    """BART: learned positions (two more than it says), norms after each step, biases."""
    hidden, vocab = fields.count("d_model", "hidden_size"), fields.count("vocab_size")
    heads = fields.count("decoder_attention_heads", "num_attention_heads", default=16)
    layers, encoder_layers = fields.count("decoder_layers"), fields.count("encoder_layers")
    ffn, encoder_ffn = fields.count("decoder_ffn_dim"), fields.count("encoder_ffn_dim")
    positions = fields.count("max_position_embeddings", default=1024)
    head_dim = fields.divided("decoder_attention_heads", hidden, heads)
    tied = fields.flag("tie_word_embeddings", True)

    def attention(name: str) -> Tensors:
        found = [
            weight
            for part in ("k_proj", "v_proj", "q_proj", "out_proj")
            for weight in linear(f"{name}.{part}", hidden, hidden, bias=True)
        ]
        return [*found, *norm(f"{name}_layer_norm", hidden, bias=True)]

    def mlp(width: int) -> Tensors:
        return [
            *linear("fc1", width, hidden, bias=True),
            *linear("fc2", hidden, width, bias=True),
            *norm("final_layer_norm", hidden, bias=True),
        ]

    ends = [
        tensor
        for half in ("encoder", "decoder")
        for tensor in norm(f"{half}.layernorm_embedding", hidden, bias=True)
    ]
    own = [table(f"{half}.embed_tokens", vocab, hidden) for half in ("encoder", "decoder")]
    weights = [
        *placed("embedding", 1, table("shared", vocab, hidden)),
        *placed("embedding", 1, *([] if tied else own)),
        *placed("embedding", 1, table("encoder.embed_positions", positions + 2, hidden)),
        *placed("embedding", 1, table("decoder.embed_positions", positions + 2, hidden)),
        *placed("encoder_layer", encoder_layers, attention("self_attn"), mlp(encoder_ffn)),
        *placed("layer", layers, attention("self_attn"), attention("encoder_attn"), mlp(ffn)),
        *placed("root", 1, ends),
        *head(vocab, hidden, tied=tied),
    ]
    return ModelShape(
        name=fields.name,
        family=family,
        vocab=vocab,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        value_dim=head_dim,
        ffn=ffn,
        gated=False,
        activation=fields.word("activation_function", default="gelu"),
        tied=tied,
        norm="layer",
        weights=tuple(weights),
        positions="learned",
        max_positions=positions,
        dropout=fields.share("dropout", default=0.1),
        attention_dropout=fields.share("attention_dropout"),
        encoder_layers=encoder_layers,
    )
