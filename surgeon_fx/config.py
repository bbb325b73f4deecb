"""What a user can choose about a transform."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Config:
    """`capture`: run rewritten FX graphs, captured by Dynamo; else the same operations are substituted call by call.

    `fuse_attention`: turn attention that is written out into `scaled_dot_product_attention`, which keeps no map for
    backward. Equal to rounding, not to the bit.

    `exact_saves`: how activations that may not be pruned are kept: q, k, v and the output of attention, maps of
    attention that is written out, products of two activations, what unknown functions keep. None: as they are. "int8":
    in 8 bits, with a scale for each 64 elements. "bf16": in 16 bits. Forward is untouched; backward is given rounded
    activations whatever the ratios, 0 included, so gradients are no longer those of eager to the bit. In "int8",
    functions that are not known to stand 8 bits keep 16, and those that compare what they keep stay exact. Layers of
    ratio 0 keep their inputs as they are. Inside `torch.compile` it has no effect.

    `share_saves`: have norm -> activation -> conv or linear keep one pruned save, that of the norm, at the lowest of
    their ratios, and rebuild the layer's input from it; likewise smooth activation -> conv or linear. Behind a sum of
    the norm's output and something else, a layer with as many elements to keep keeps them at the norm's places: one
    bitmask serves both. Where one of the ratios is 0, that layer is exact and keeps what it keeps. Outside of graphs a
    norm is kept at its own ratio, and serves layers that want no more. Inside `torch.compile` nothing is shared.

    `return_freed_memory`: on Linux, have torch's freed activations go back to the system (`surgeon_fx.allocator`).
    """

    capture: bool = True
    fuse_attention: bool = False
    exact_saves: str | None = None
    share_saves: bool = False
    return_freed_memory: bool = True

    def __post_init__(self) -> None:
        for name in ("capture", "fuse_attention", "share_saves", "return_freed_memory"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        if self.exact_saves not in (None, "int8", "bf16"):
            raise ValueError(f"exact_saves must be None, 'int8' or 'bf16', got {self.exact_saves!r}")
