"""Top-magnitude pruning with bitmask compression, and bit packing: one meaning, four implementations.

`compress` keeps the largest magnitudes of a tensor and one bit per element, `decompress` restores it with zeros in the
gaps, `pack_bits`, `unpack_bits` and `pack_sign` turn masks into bits and back. The README beside this file has the
formats and what each backend moves.
"""

from surgeon_fx.kernels.backends import BACKENDS, BackendUnavailable, active_backend, unavailable_reason
from surgeon_fx.kernels.bits import pack_bits, pack_sign, unpack_bits, unpack_value
from surgeon_fx.kernels.compress import Compressed, compress, decompress
from surgeon_fx.kernels.layout import bit_bytes, kept_count, mask_bytes

__all__ = [
    "BACKENDS",
    "BackendUnavailable",
    "Compressed",
    "active_backend",
    "bit_bytes",
    "compress",
    "decompress",
    "kept_count",
    "mask_bytes",
    "pack_bits",
    "pack_sign",
    "unavailable_reason",
    "unpack_bits",
    "unpack_value",
]
