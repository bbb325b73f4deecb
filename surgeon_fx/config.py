"""What a user can choose about a transform."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Config:
    """`capture`: run rewritten FX graphs, captured by Dynamo; else the same operations are substituted call by call.

    `fuse_attention`: turn attention that is written out into `scaled_dot_product_attention`, which keeps no map for
    backward. Equal to rounding, not to the bit.

    `return_freed_memory`: on Linux, have torch's freed activations go back to the system (`surgeon_fx.allocator`).
    """

    capture: bool = True
    fuse_attention: bool = False
    return_freed_memory: bool = True
