"""ALBERT (Lan et al., arXiv:1909.11942), whose layers share their weights. Weights are named as in transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from plateaux.core.errors import RecipeError
from plateaux.core.optional import optional_import
from plateaux.core.ranges import Fraction, Size
from plateaux.core.registry import model


@model
def albert(
    *,
    shape: tuple[int, ...],
    classes: int,
    vocabulary: Size = 30_000,
    embedding: Size = 128,
    width: Size = 768,
    depth: Size = 12,
    heads: Size = 12,
    hidden: Size = 3072,
    positions: Size = 512,
    dropout: Fraction = 0.0,
    classifier_dropout: Fraction = 0.1,
) -> nn.Module:
    """ALBERT with a linear head on the pooled first token, for text given as a dict of token ids.

    The layers are one module that is applied `depth` times, so they have one set of weights. The default sizes are
    those of albert-base-v2.
    """
    if len(shape) != 1 or shape[0] > positions:
        raise RecipeError(
            f"The inputs of the data set have shape {shape}. albert needs sequences of up to {positions} tokens. Use a "
            "text data set, such as mrpc, or another model.positions."
        )
    if width % heads:
        raise RecipeError(f"width = {width} is not divisible by {heads} heads. Use a multiple of {heads}.")
    transformers = optional_import("transformers", extra="text")
    config = transformers.AlbertConfig(
        vocab_size=vocabulary,
        embedding_size=embedding,
        hidden_size=width,
        num_hidden_layers=depth,
        num_hidden_groups=1,
        inner_group_num=1,
        num_attention_heads=heads,
        intermediate_size=hidden,
        hidden_act="gelu_new",
        max_position_embeddings=positions,
        type_vocab_size=2,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        classifier_dropout_prob=classifier_dropout,
        num_labels=classes,
        attn_implementation="eager",  # runs under vmap and has second derivatives
    )
    return AlbertClassifier(transformers.AlbertForSequenceClassification(config))


class AlbertClassifier(nn.Module):
    """The modules of transformers' AlbertForSequenceClassification, under their names, with a mask of its own."""

    weights_source = "model.safetensors of https://huggingface.co/albert/albert-base-v2"

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.albert: Any = network.albert
        self.dropout, self.classifier = network.dropout, network.classifier

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        tokens = self.albert.embeddings(input_ids=input_ids, token_type_ids=token_type_ids)  # [B, T, E]
        # Computed here because transformers branches on the values of the mask, which vmap does not support.
        additive_mask = (1.0 - attention_mask[:, None, None].to(tokens.dtype)) * torch.finfo(tokens.dtype).min
        tokens = self.albert.encoder(tokens, attention_mask=additive_mask)[0]  # [B, T, D]
        pooled = self.albert.pooler_activation(self.albert.pooler(tokens[:, 0]))
        return self.classifier(self.dropout(pooled))  # type: ignore[no-any-return]
