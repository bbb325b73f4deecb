"""Attention: native, whatever the ratio; its projections are linear layers, its tensors are shared."""

import pytest
import torch
import torch.nn.functional as F
from op_cases import check_exact, gradients, held, parameter, pruned_by_hand, pruned_bytes, tensor

from surgeon_fx.ops import attention

Q, K, V = (tensor(2, 3, 33, 7, seed=seed) for seed in range(3))
MASK = tensor(33, 33, seed=4, trains=False)


@pytest.mark.parametrize("ratio", [0.0, 0.9])
@pytest.mark.parametrize(
    "options", [{}, {"attn_mask": MASK}, {"is_causal": True}, {"dropout_p": 0.3}, {"scale": 0.1}], ids=list
)
def test_exact(layers, ratio, options):
    layers.ratios["a"] = ratio
    native = F.scaled_dot_product_attention
    check_exact(layers.a, attention.scaled_dot_product_attention, native, Q, K, V, double=False, **options)
    named = {"query": Q, "key": K, "value": V, **options}
    check_exact(layers.a, attention.scaled_dot_product_attention, native, double=False, **named)


def test_held_bytes(layers):
    layers.ratios["a"] = 0.9
    native = held(F.scaled_dot_product_attention(Q, K, V))
    assert held(attention.scaled_dot_product_attention(layers.a, Q, K, V)) == native


def multi_head(need_weights):
    return {
        "embed_dim_to_check": 32,
        "num_heads": 4,
        "in_proj_weight": parameter(96, 32),
        "in_proj_bias": parameter(96),
        "bias_k": None,
        "bias_v": None,
        "add_zero_attn": False,
        "dropout_p": 0.0,
        "out_proj_weight": parameter(32, 32),
        "out_proj_bias": parameter(32),
        "need_weights": need_weights,
    }


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_multi_head(layers, need_weights, named):
    x, options = tensor(40, 3, 32), multi_head(need_weights)

    def ours(x, **rest):
        inputs = {"query": x, "key": x, "value": x}
        if named:
            return attention.multi_head_attention_forward(layers.a, **inputs, **rest)
        return attention.multi_head_attention_forward(layers.a, *inputs.values(), **rest)

    def theirs(x, **rest):
        return F.multi_head_attention_forward(x, x, x, **rest)

    expected = gradients(theirs, x, **options)
    actual = gradients(ours, x, **options)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    layers.ratios["a"] = 0.9
    actual = gradients(ours, x, **options)
    assert torch.equal(actual["output"], expected["output"])
    for name in ("0", "in_proj_bias", "out_proj_bias"):  # what no pruned input is read for
        torch.testing.assert_close(actual[name], expected[name])
    kept = pruned_by_hand(x, 0.9)
    qkv = actual["in_proj_weight"]
    assert not torch.equal(qkv, expected["in_proj_weight"])
    assert not qkv[:, kept.sum((0, 1)) == 0].any()  # a column that was dropped altogether has no gradient


def test_multi_head_prunes_its_input(layers):
    x, options = tensor(40, 3, 32), multi_head(need_weights=False)
    own = [one for one in options.values() if isinstance(one, torch.Tensor)]
    exact = held(attention.multi_head_attention_forward(layers.a, x, x, x, **options)[0], *own)
    layers.ratios["a"] = 0.9
    pruned = held(attention.multi_head_attention_forward(layers.a, x, x, x, **options)[0], *own)
    assert exact - pruned >= x.nbytes - pruned_bytes(x, 0.9)
