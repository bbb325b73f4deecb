"""surgeon_fx: train where memory is short."""

from surgeon_fx import kernels

__version__ = "0.1.0"
__all__ = ["kernels"]
