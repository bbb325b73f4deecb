"""A small vision transformer for 32x32 images, without batch norm."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from surgeon_fx.zoo.layers import init_tokens


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        return self.proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    """Pre-norm block. A depthwise convolution over the grid of tokens tells them where they are and who is next."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.place = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, 4 * dim)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens as a grid, N x C x H x W, in and out."""
        tokens = (x + self.place(x)).flatten(2).transpose(1, 2)
        tokens = tokens + self.attn(self.norm1(tokens))
        tokens = tokens + self.mlp(self.norm2(tokens))
        return tokens.transpose(1, 2).unflatten(2, x.shape[2:])


class VisionTransformer(nn.Module):
    """A transformer over overlapping patches; the classes are read off the mean token.

    Two strided convolutions make the tokens and a depthwise one in each block places them, at any image size: a taste
    for neighbours that little data cannot teach.
    """

    def __init__(self, dim: int = 96, depth: int = 4, heads: int = 3, classes: int = 10) -> None:
        super().__init__()
        half = dim // 2
        self.patch_embed = nn.Sequential(nn.Conv2d(3, half, 3, 2, 1), nn.GELU(), nn.Conv2d(half, dim, 3, 2, 1))
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)
        init_tokens(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.patch_embed(x))
        return self.head(self.norm(x.flatten(2).transpose(1, 2)).mean(1))
