"""Top-magnitude pruning with bitmask compression, and bit packing: one meaning, four implementations.

`compress` keeps the largest magnitudes of a tensor and one bit per element, `decompress` restores it with zeros in the
gaps, `pack_bits`, `unpack_bits` and `pack_sign` turn masks into bits and back, `mask_by_bits` applies them. `quantize`
and `dequantize` are for what may not be pruned: 8 bits per element; `rescale` is the affine part of a norm at the kept
places, `pick` another tensor's elements there. The README beside this file has the formats and what each backend moves.
"""

from surgeon_fx.kernels.backends import BACKENDS, BackendUnavailable, active_backend, unavailable_reason
from surgeon_fx.kernels.bits import mask_by_bits, pack_bits, pack_sign, unpack_bits, unpack_value
from surgeon_fx.kernels.compress import Compressed, compress, decompress, pick
from surgeon_fx.kernels.compress.normalised import compress_normalised
from surgeon_fx.kernels.layout import bit_bytes, kept_count, mask_bytes
from surgeon_fx.kernels.quantize import dequantize, quantize, quantized_bytes
from surgeon_fx.kernels.rescale import rescale

__all__ = [
    "BACKENDS",
    "BackendUnavailable",
    "Compressed",
    "active_backend",
    "bit_bytes",
    "compress",
    "compress_normalised",
    "decompress",
    "dequantize",
    "kept_count",
    "mask_by_bits",
    "mask_bytes",
    "pack_bits",
    "pack_sign",
    "pick",
    "quantize",
    "quantized_bytes",
    "rescale",
    "unavailable_reason",
    "unpack_bits",
    "unpack_value",
]
