"""A frozen linear layer under autocast: the native gradients, and no copy of its weight."""

import pytest
import torch
import torch.nn.functional as F
from op_cases import gradients, held, parameter, tensor

from surgeon_fx.ops import linear


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [None, parameter(65)])
def test_the_weight_itself_is_kept(layers, dtype, bias):
    weight = torch.nn.Parameter(torch.randn(65, 33), requires_grad=False)
    x = tensor(7, 33, 33)
    with torch.autocast("cpu", dtype, cache_enabled=False):
        actual = gradients(lambda x: linear.linear(layers.a, x, weight, bias), x)
        expected = gradients(lambda x: F.linear(x, weight, bias), x)
        output, native = linear.linear(layers.a, x, weight, bias), F.linear(x, weight, bias)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert held(output, weight) == 0 < held(native, weight)
    assert output.dtype is dtype


def test_a_trained_bias_has_its_gradient(layers):
    weight, bias = torch.nn.Parameter(torch.randn(5, 33), requires_grad=False), parameter(5)
    x = torch.randn(9, 33)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        (found,) = torch.autograd.grad(linear.linear(layers.a, x, weight, bias).sum(), bias)
        (expected,) = torch.autograd.grad(F.linear(x, weight, bias).sum(), bias)
    assert torch.equal(found, expected)
