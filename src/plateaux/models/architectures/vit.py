"""A small vision transformer (Dosovitskiy et al., arXiv:2010.11929). Weights are named as in timm."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from plateaux.core.errors import RecipeError
from plateaux.core.ranges import Depth, Fraction, Size
from plateaux.core.registry import model
from plateaux.models.architectures import channels

Kernel = Literal["plain", "fused"]


@model
def vit(
    *,
    shape: tuple[int, ...],
    classes: int,
    patch_size: Size = 4,
    width: Size = 192,
    depth: Depth = 6,
    heads: Size = 3,
    dropout: Fraction = 0.0,
    attention: Kernel = "plain",
) -> nn.Module:
    """A small vision transformer for 32 px images, with learned position embeddings and a class token.

    Plain attention supports vmap and second derivatives, and at 65 tokens is about as fast as the fused kernel. The
    fused kernel saves memory on long sequences, but on CPU it loops under vmap and has no second derivatives.
    """
    inputs = channels(shape)
    if shape[1] % patch_size or shape[2] % patch_size:
        raise RecipeError(
            f"patch_size = {patch_size} does not divide the image size {shape[1]} x {shape[2]}. Use a divisor."
        )
    if width % heads:
        raise RecipeError(f"width = {width} is not divisible by {heads} heads. Use a multiple of {heads}.")
    patches = (shape[1] // patch_size) * (shape[2] // patch_size)
    blocks = [TransformerBlock(width, heads, dropout, attention) for _ in range(depth)]
    return ViT(inputs, classes, blocks, patch=patch_size, patches=patches, width=width, dropout=dropout)


class ViT(nn.Module):
    """Patch embedding, pre-norm transformer blocks, and a linear head on the class token."""

    def __init__(
        self,
        inputs: int,
        classes: int,
        blocks: list[TransformerBlock],
        *,
        patch: int,
        patches: int,
        width: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, patches + 1, width))
        self.patch_embed = PatchEmbed(inputs, width, patch)
        self.pos_drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        nn.init.normal_(self.cls_token, std=1e-6)
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.trunc_normal_(part.weight, std=0.02)
                nn.init.zeros_(part.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)  # [B, T, D]
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = self.norm(self.blocks(self.pos_drop(x + self.pos_embed)))
        return self.head(x[:, 0])  # type: ignore[no-any-return]


class PatchEmbed(nn.Module):
    """Embeds each patch of the image as one token."""

    def __init__(self, inputs: int, width: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(inputs, width, patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    """A pre-norm transformer block: attention and an MLP, each with a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float, kernel: Kernel) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads, dropout, kernel)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = Perceptron(width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, width: int, heads: int, dropout: float, kernel: Kernel) -> None:
        super().__init__()
        self.heads = heads
        self.kernel = kernel
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.proj_drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, heads, T, d]
        with sdpa_kernel(SDPBackend.MATH) if self.kernel == "plain" else nullcontext():
            out = F.scaled_dot_product_attention(query, key, value)
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


class Perceptron(nn.Module):
    """The MLP of a transformer block; the hidden layer is four times as wide."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(F.gelu(self.fc1(x)))))  # type: ignore[no-any-return]
