"""SegFormer: the MiT backbone and its all-linear head. Layers carry the names of the public mmseg checkpoints.

Tokens travel as (batch, height, width, channels) maps, so that no layer has to be told the image size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgeon_fx.zoo.layers import DropPath, init_tokens


def to_channels_first(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2)


def to_channels_last(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1)


class PatchEmbed(nn.Module):
    """An overlapping strided convolution from a (batch, channels, height, width) map to normalised tokens."""

    def __init__(self, c_in: int, dim: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(c_in, dim, kernel, stride, padding=kernel // 2)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(to_channels_last(self.proj(x)))


class Attention(nn.Module):
    """Attention whose keys and values come from a map shrunk by `reduction`."""

    def __init__(self, dim: int, heads: int, reduction: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)
        self.reduction = reduction
        if reduction > 1:
            self.sr = nn.Conv2d(dim, dim, reduction, reduction)
            self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).flatten(1, 2).unflatten(2, (self.heads, -1)).transpose(1, 2)
        source = x
        if self.reduction > 1:
            source = self.norm(to_channels_last(self.sr(to_channels_first(x))))
        kv = self.kv(source).flatten(1, 2).unflatten(2, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, kv[0], kv[1])
        return self.proj(out.transpose(1, 2).reshape(x.shape))


class DepthwiseConv(nn.Module):
    """A 3x3 convolution of each channel of a token map: what tells the tokens where they are."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)

    def forward(self, x: Tensor) -> Tensor:
        return to_channels_last(self.dwconv(to_channels_first(x)))


class MixFfn(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.dwconv = DepthwiseConv(hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.dwconv(self.fc1(x))))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, reduction: int, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads, reduction)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = MixFfn(dim, 4 * dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class MixTransformer(nn.Module):
    """Four stages of blocks; returns the (batch, channels, height, width) map of each, at strides 4, 8, 16 and 32."""

    def __init__(self, depths: Sequence[int], dims: Sequence[int], heads: Sequence[int], drop_path: float) -> None:
        super().__init__()
        for i, c_in in enumerate((3, *dims[:3])):
            self.add_module(f"patch_embed{i + 1}", PatchEmbed(c_in, dims[i], *((3, 2) if i else (7, 4))))
        last = max(1, sum(depths) - 1)
        for i, (dim, reduction) in enumerate(zip(dims, (8, 4, 2, 1), strict=True)):
            numbers = range(sum(depths[:i]), sum(depths[: i + 1]))
            blocks = (Block(dim, heads[i], reduction, drop_path * number / last) for number in numbers)
            self.add_module(f"block{i + 1}", nn.Sequential(*blocks))
            self.add_module(f"norm{i + 1}", nn.LayerNorm(dim, eps=1e-6))
        init_tokens(self)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        maps = []
        for i in ("1", "2", "3", "4"):
            tokens = getattr(self, "block" + i)(getattr(self, "patch_embed" + i)(x))
            x = to_channels_first(getattr(self, "norm" + i)(tokens))
            maps.append(x)
        return tuple(maps)


class HeadLinear(nn.Module):
    """A linear layer over the channels of a (batch, channels, height, width) map."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.proj = nn.Linear(c_in, c_out)

    def forward(self, x: Tensor) -> Tensor:
        return to_channels_first(self.proj(to_channels_last(x)))


class Fuse(nn.Module):
    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c_in, c_out, 1, bias=False)
        self.bn = nn.BatchNorm2d(c_out)
        self.activate = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.activate(self.bn(self.conv(x)))


class SegFormerHead(nn.Module):
    """Brings the four maps to one width and to stride 4, and reads the classes off them."""

    def __init__(self, dims: Sequence[int], dim: int, classes: int) -> None:
        super().__init__()
        self.conv_seg = nn.Conv2d(128, classes, 1)  # never run: mmseg's base class has it, so do the checkpoints
        self.dropout = nn.Dropout2d(0.1)
        self.linear_c4 = HeadLinear(dims[3], dim)
        self.linear_c3 = HeadLinear(dims[2], dim)
        self.linear_c2 = HeadLinear(dims[1], dim)
        self.linear_c1 = HeadLinear(dims[0], dim)
        self.linear_fuse = Fuse(4 * dim, dim)
        self.linear_pred = nn.Conv2d(dim, classes, 1)

    def forward(self, c1: Tensor, c2: Tensor, c3: Tensor, c4: Tensor) -> Tensor:
        size = c1.shape[2:]
        coarse = (self.linear_c4(c4), self.linear_c3(c3), self.linear_c2(c2))
        resized = [F.interpolate(x, size=size, mode="bilinear", align_corners=False) for x in coarse]
        return self.linear_pred(self.dropout(self.linear_fuse(torch.cat([*resized, self.linear_c1(c1)], 1))))


class SegFormer(nn.Module):
    """Logits at a quarter of the input's size."""

    def __init__(
        self,
        depths: Sequence[int] = (3, 6, 40, 3),
        dims: Sequence[int] = (64, 128, 320, 512),
        heads: Sequence[int] = (1, 2, 5, 8),
        head_dim: int = 768,
        classes: int = 19,
        drop_path: float = 0.1,
    ) -> None:
        super().__init__()
        self.backbone = MixTransformer(depths, dims, heads, drop_path)
        self.decode_head = SegFormerHead(dims, head_dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.backbone(x)
        return self.decode_head(maps[0], maps[1], maps[2], maps[3])
