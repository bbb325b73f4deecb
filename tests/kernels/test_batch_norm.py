"""Batch norm in C: torch's own bits, or torch's own kernel."""

import pytest
import torch

import surgeon_fx
from surgeon_fx.kernels import batch_norm as module
from surgeon_fx.kernels import native
from surgeon_fx.kernels.batch_norm import batch_norm

ISAS = native.instruction_sets() if not native.unavailable_reason() else []
SHAPES = [(4, 6, 8, 8), (3, 5, 7, 7), (2, 3, 33, 35), (16, 17, 32, 32), (1, 2, 4, 4), (5, 9, 130), (2, 11, 4, 5, 6)]

pytestmark = [
    pytest.mark.skipif(not ISAS, reason="no C kernels here"),
    pytest.mark.skipif(
        bool(ISAS) and module._rounding(ISAS[0]) is None, reason="torch's batch norm adds up otherwise here"
    ),
]


def draw(shape, affine=True, tracked=True):
    source = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=source).mul_(2).add_(1)
    weight, bias, mean, var = torch.rand(4, shape[1], generator=source).add_(0.5).unbind()
    return x, *((weight, bias) if affine else (None, None)), *((mean, var) if tracked else (None, None))


def check(arguments, momentum=0.1, eps=1e-5, served=True):
    """Bit for bit: what is returned, and what the running statistics become."""
    assert module._is_served(*arguments) is served
    copies = [None if x is None else x.clone() for x in arguments[3:]]
    expected = module._torch(*arguments[:3], *copies, momentum, eps)
    found = batch_norm(*arguments, momentum, eps)
    for ours, theirs in zip((*found, *arguments[3:]), (*expected, *copies), strict=True):
        if ours is not None:
            assert ours.dtype is theirs.dtype
            assert ours.stride() == theirs.stride()
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("tracked", [True, False])
def test_gives_torchs_bits(isa, shape, affine, tracked):
    with native.forced_instruction_set(isa):
        check(draw(shape, affine, tracked))


@pytest.mark.parametrize(("momentum", "eps"), [(0.0, 1e-5), (1.0, 1e-3), (1 / 3, 0.0), (0.003, 1e-12)])
def test_any_momentum_and_eps(momentum, eps):
    check(draw((6, 10, 9, 9)), momentum, eps)


def test_a_weight_or_a_bias_alone():
    x, weight, bias, mean, var = draw((3, 4, 6, 6))
    check((x, weight, None, mean, var))
    check((x, None, bias, None, None))


def test_what_does_not_go_together_is_torchs_error():
    x, weight, bias, mean, var = draw((3, 4, 6, 6))
    for wrong in ((weight, bias, mean, None), (weight[:3], bias, mean, var), (weight, bias, mean, var[:3])):
        with pytest.raises((ValueError, RuntimeError)):
            batch_norm(x, *wrong, 0.1, 1e-5)


@pytest.mark.parametrize("value", [0.0, 7.0, float("nan"), float("inf"), -float("inf"), 1e38, 1e-42])
def test_any_value(value):
    x, *rest = draw((3, 9, 5, 5))
    x[1, 4, 2] = value
    check((x, *rest))
    check((torch.full_like(x, value), *rest), eps=0.0)


def test_any_number_of_threads():
    before = torch.get_num_threads()
    try:
        for threads in range(1, 9):
            torch.set_num_threads(threads)
            check(draw((8, 21, 30, 30)))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x[:, :, ::2],
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x[:, :, 0, 0].contiguous(),
        lambda x: x[:, :, :2, :2].contiguous(),
    ],
    ids=["channels-last", "slice", "permuted", "no plane", "small plane"],
)
def test_other_layouts_are_torchs(change):
    x, *rest = draw((8, 6, 8, 8))
    check((change(x), *rest), served=False)


def test_one_channel_and_other_dtypes_are_torchs():
    check(draw((8, 1, 8, 8)), served=False)
    check([x.double() for x in draw((8, 6, 8, 8))], served=False)
    x, *rest = draw((8, 6, 8, 8))
    check((x.bfloat16(), *rest), served=False)


def test_where_no_rounding_is_torchs_torch_runs(monkeypatch):
    module._rounding.cache_clear()
    monkeypatch.setattr(module, "ROUNDINGS", ())
    monkeypatch.setattr(module, "_run", lambda *_: pytest.fail("ran"))
    try:
        batch_norm(*draw((4, 6, 8, 8)), 0.1, 1e-5)
    finally:
        module._rounding.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_probe_is_of_float32(dtype):
    module._rounding.cache_clear()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert module._rounding(native.instruction_set()) is not None
    finally:
        torch.set_default_dtype(before)


def test_a_default_device_is_not_for_what_kernels_write():
    module._rounding.cache_clear()
    with torch.device("meta"):
        assert module._rounding(native.instruction_set()) is not None


def test_a_negated_view_is_torchs():
    x, *rest = draw((3, 4, 6, 6))
    check((torch._neg_view(x), *rest), served=False)


def test_an_eps_that_eager_refuses():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8, eps=0.0))
    x = torch.randn(4, 3, 10, 10)
    with pytest.raises(ValueError, match="eps must be positive"):
        model(x)
    model = surgeon_fx.transform(model)
    surgeon_fx.ratios(model).fill(0.9)
    with pytest.raises(ValueError, match="eps must be positive"):
        model(x)


def test_the_probe_sees_a_single_wrong_rounding(monkeypatch):
    right = module._rounding(native.instruction_set())
    run = module._run
    for wrong in set(module.ROUNDINGS) - {right}:
        arguments = draw((8, 19, 32, 32))
        copies = [x.clone() for x in arguments[3:]]
        ours = (*run(*arguments, 1 / 3, 1e-5, wrong), *arguments[3:])
        theirs = (*module._torch(*arguments[:3], *copies, 1 / 3, 1e-5), *copies)
        if not all(map(torch.equal, ours, theirs)):
            monkeypatch.setattr(module, "ROUNDINGS", (wrong,))
            module._rounding.cache_clear()
            assert module._rounding(native.instruction_set()) is None
    module._rounding.cache_clear()


def test_a_transformed_model_runs_it(monkeypatch):
    served = []
    run = module._run
    monkeypatch.setattr(module, "_run", lambda x, *rest: served.append(x.shape) or run(x, *rest))
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
    x = torch.randn(4, 3, 10, 10)
    expected = model(x)
    model = surgeon_fx.transform(model)
    surgeon_fx.ratios(model).fill(0.9)
    assert torch.equal(model(x), expected)
    assert torch.Size([4, 8, 8, 8]) in served
