"""Dropout: the same draws as torch's, one bit per element, exact at any ratio."""

import pytest
import torch
import torch.nn.functional as F
from op_cases import check_exact, held, tensor

from surgeon_fx.ops import dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("ratio", [0.0, 0.9])
def test_exact_at_any_ratio(layers, dtype, p, inplace, ratio):
    layers.ratios["a"] = ratio
    for shape in ((1,), (7, 33), (7, 33, 33)):
        x = tensor(*shape, dtype=dtype)
        check_exact(layers.a, dropout.dropout, F.dropout, x, p=p, inplace=inplace, double=not inplace)


def test_layouts(layers):
    for x in (
        tensor(3, 8, 17, 17, layout=torch.channels_last),
        tensor(33, 7, 33).detach().transpose(0, 2).requires_grad_(),
    ):
        check_exact(layers.a, dropout.dropout, F.dropout, x, p=0.3)


def test_one_bit_per_element(layers):
    x = tensor(7, 33, 33)
    assert held(dropout.dropout(layers.a, x)) == (x.numel() + 7) // 8


def test_evaluation_keeps_nothing(layers):
    x = tensor(7, 33, 33)
    out = dropout.dropout(layers.a, x, 0.5, training=False)
    assert torch.equal(out, x)
    assert held(out) == 0


def test_mistakes_are_torchs(layers):
    with pytest.raises(ValueError, match="between 0 and 1"):
        dropout.dropout(layers.a, tensor(7, 33, 33), 1.5)
