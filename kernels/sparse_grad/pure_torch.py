"""Where there is no kernel: the reference is as good as torch's own operations get."""

from surgeon_fx.kernels.sparse_grad.reference import conv_weight_grad, linear_weight_grad

__all__ = ["conv_weight_grad", "linear_weight_grad"]
