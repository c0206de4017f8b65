"""A small vision transformer for 32x32 images: the size known as ViT-Tiny, on patches of 4x4 pixels."""

from __future__ import annotations

from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from anybit.models.small import scaled

IMAGE, PATCH = 32, 4
DEPTH, HEADS, HEAD_SIZE = 12, 3, 64
EXPANSION = 4


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(size, 3 * size)
        self.projection = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        """Return, for a batch of token sequences, what each token gathered from the others."""
        batch, tokens, size = x.shape
        # (query/key/value, batch, head, token, feature)
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, size // self.heads).permute(2, 0, 3, 1, 4)
        gathered = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        return cast(Tensor, self.projection(gathered.transpose(1, 2).reshape(batch, tokens, size)))


class TransformerBlock(nn.Module):
    """Attention, then two linear layers with GELU between, each after layer norm and with its input added."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(size)
        self.attention = Attention(size, heads)
        self.norm2 = nn.LayerNorm(size)
        hidden = EXPANSION * size
        self.mlp = nn.Sequential(nn.Linear(size, hidden), nn.GELU(), nn.Linear(hidden, size))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        x = x + self.attention(self.norm1(x))
        return cast(Tensor, x + self.mlp(self.norm2(x)))


class TinyViT(nn.Module):
    """Patches with learned positions, twelve transformer blocks, and a classifier on the mean of the tokens.

    `multiplier` multiplies the size of each of the three heads. The positions are kept as an embedding: they are
    added, not multiplied, and so are no weights to quantize.
    """

    def __init__(self, *, channels: int = 3, classes: int = 10, multiplier: float = 1.0) -> None:
        super().__init__()
        size = HEADS * scaled(HEAD_SIZE, multiplier)
        self.patches = nn.Conv2d(channels, size, PATCH, PATCH)
        self.positions = nn.Embedding((IMAGE // PATCH) ** 2, size)
        self.blocks = nn.Sequential(*(TransformerBlock(size, HEADS) for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(size)
        self.classifier = nn.Linear(size, classes)
        nn.init.trunc_normal_(self.positions.weight, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions.weight
        return cast(Tensor, self.classifier(self.norm(self.blocks(tokens)).mean(1)))
