"""ALBERT and MiniLM by their sizes, as networks of transformers. Weights are named as there."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from plateaux.core.errors import RecipeError
from plateaux.core.imports import optional_import
from plateaux.core.ranges import Depth, Fraction, Size
from plateaux.core.registry import model
from plateaux.integrations.huggingface_models import adapt, additive_mask, build_from_config

Pool = Literal["pair", "mean"]
ALBERT_WEIGHTS = "model.safetensors of https://huggingface.co/albert/albert-base-v2"


@model
def albert(
    *,
    shape: tuple[int, ...],
    classes: int,
    vocabulary: Size = 30_000,
    embedding: Size = 128,
    width: Size = 768,
    depth: Depth = 12,
    heads: Size = 12,
    hidden: Size = 3072,
    positions: Size = 512,
    dropout: Fraction = 0.0,
    classifier_dropout: Fraction = 0.1,
) -> nn.Module:
    """ALBERT (Lan et al., arXiv:1909.11942) with a linear head on the pooled first token, for token ids.

    The layers are one module that is applied `depth` times, so they have one set of weights. The default sizes are
    those of albert-base-v2.
    """
    _check_sizes("albert", shape, width=width, heads=heads, positions=positions)
    config = {
        "model_type": "albert",
        "vocab_size": vocabulary,
        "embedding_size": embedding,
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_hidden_groups": 1,
        "inner_group_num": 1,
        "num_attention_heads": heads,
        "intermediate_size": hidden,
        "hidden_act": "gelu_new",
        "max_position_embeddings": positions,
        "type_vocab_size": 2,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "classifier_dropout_prob": classifier_dropout,
    }
    network = adapt(build_from_config(config, shape, classes, where="albert"))
    network.weights_source = ALBERT_WEIGHTS  # type: ignore[assignment]
    return network


@model
def minilm(
    *,
    shape: tuple[int, ...],
    classes: int,
    vocabulary: Size = 13_801,
    width: Size = 384,
    depth: Depth = 3,
    heads: Size = 12,
    hidden: Size = 1536,
    positions: Size = 512,
    dropout: Fraction = 0.0,
    pool: Pool = "pair",
) -> nn.Module:
    """MiniLM (Wang et al., arXiv:2002.10957), a small BERT with a linear head on pooled tokens, for token ids.

    With `pool = "pair"`, the tokens of each sentence are averaged to u and v, and the head takes |u - v| and u v; with
    `"mean"` it takes the average of all tokens. The default sizes are MiniLM with three layers and MRPC's vocabulary.
    """
    _check_sizes("minilm", shape, width=width, heads=heads, positions=positions)
    transformers = optional_import("transformers", extra="text")
    config = transformers.BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        intermediate_size=hidden,
        max_position_embeddings=positions,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        attn_implementation="eager",  # runs under vmap and has second derivatives
    )
    return TextEncoder(transformers.BertModel(config, add_pooling_layer=False), width, classes, pool)


class TextEncoder(nn.Module):
    """A BERT encoder, pooling over tokens, and a linear head."""

    embeddings: nn.Module
    encoder: nn.Module

    def __init__(self, bert: Any, width: int, classes: int, pool: Pool) -> None:
        super().__init__()
        self.embeddings, self.encoder = bert.embeddings, bert.encoder
        self.pool = pool
        self.head = nn.Linear(width * (2 if pool == "pair" else 1), classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        tokens = self.embeddings(input_ids=input_ids, token_type_ids=token_type_ids)  # [B, T, D]
        tokens = self.encoder(tokens, attention_mask=additive_mask(attention_mask, tokens.dtype))[0]
        if self.pool == "mean":
            return self.head(_mean(tokens, attention_mask))  # type: ignore[no-any-return]
        u = _mean(tokens, attention_mask * (1 - token_type_ids))
        v = _mean(tokens, attention_mask * token_type_ids)
        return self.head(torch.cat([(u - v).abs(), u * v], -1))  # type: ignore[no-any-return]


def _mean(tokens: Tensor, mask: Tensor) -> Tensor:
    """Return the mean `[B, D]` of the masked tokens."""
    weight = mask.to(tokens.dtype)[..., None]
    return (tokens * weight).sum(1) / weight.sum(1).clamp(min=1)


def _check_sizes(name: str, shape: tuple[int, ...], *, width: int, heads: int, positions: int) -> None:
    if len(shape) != 1 or shape[0] > positions:
        raise RecipeError(
            f"The inputs of the data set have shape {shape}. {name} needs sequences of up to {positions} tokens. Use a "
            "text data set, such as mrpc, or another model.positions."
        )
    if width % heads:
        raise RecipeError(f"width = {width} is not divisible by {heads} heads. Use a multiple of {heads}.")
