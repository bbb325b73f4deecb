"""Networks to measure and adapt: the paper's five, small ones for CIFAR, and those of other packages by name."""

from surgeon_fx.zoo.checkpoints import load
from surgeon_fx.zoo.registry import Entry, create, entry, input_shape, names

__all__ = ["Entry", "create", "entry", "input_shape", "load", "names"]
