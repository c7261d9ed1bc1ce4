"""MiniLM, a small BERT for sentence pairs (Wang et al., arXiv:2002.10957). Weights are named as in transformers."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from plateaux.core.errors import RecipeError
from plateaux.core.optional import optional_import
from plateaux.core.ranges import Fraction, Size
from plateaux.core.registry import model

Pool = Literal["pair", "mean"]


@model
def minilm(
    *,
    shape: tuple[int, ...],
    classes: int,
    vocabulary: Size = 13_801,
    width: Size = 384,
    depth: Size = 3,
    heads: Size = 12,
    hidden: Size = 1536,
    positions: Size = 512,
    dropout: Fraction = 0.0,
    pool: Pool = "pair",
) -> nn.Module:
    """A small BERT encoder with a linear head on pooled tokens, for text given as a dict of token ids.

    With `pool = "pair"`, the tokens of each sentence are averaged to u and v, and the head takes |u - v| and u v; with
    `"mean"` it takes the average of all tokens. The default sizes are MiniLM with three layers and MRPC's vocabulary.
    """
    if len(shape) != 1 or shape[0] > positions:
        raise RecipeError(
            f"The inputs of the data set have shape {shape}. minilm needs sequences of up to {positions} tokens. Use a "
            "text data set, such as mrpc, or another model.positions."
        )
    if width % heads:
        raise RecipeError(f"width = {width} is not divisible by {heads} heads. Use a multiple of {heads}.")
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
        # Computed here because transformers branches on the values of the mask, which vmap does not support.
        additive_mask = (1.0 - attention_mask[:, None, None].to(tokens.dtype)) * torch.finfo(tokens.dtype).min
        tokens = self.encoder(tokens, attention_mask=additive_mask)[0]
        if self.pool == "mean":
            return self.head(_mean(tokens, attention_mask))  # type: ignore[no-any-return]
        u = _mean(tokens, attention_mask * (1 - token_type_ids))
        v = _mean(tokens, attention_mask * token_type_ids)
        return self.head(torch.cat([(u - v).abs(), u * v], -1))  # type: ignore[no-any-return]


def _mean(tokens: Tensor, mask: Tensor) -> Tensor:
    """Return the mean `[B, D]` of the masked tokens."""
    weight = mask.to(tokens.dtype)[..., None]
    return (tokens * weight).sum(1) / weight.sum(1).clamp(min=1)
