"""Weight gradients of the Triton kernel, on a GPU or interpreted, against the native gradient of the restored input."""

import importlib
from types import SimpleNamespace

import pytest
import torch

from surgeon_fx.kernels import compress, sparse_grad, unavailable_reason
from surgeon_fx.kernels.layout import bit_bytes
from surgeon_fx.kernels.sparse_grad import conv_weight_grad, linear_weight_grad, weight_grad_pays

DEVICE = "cuda" if torch.cuda.is_available() else "xpu" if torch.xpu.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    unavailable_reason("triton", DEVICE) != "", reason=unavailable_reason("triton", DEVICE) or "available"
)

# input, weight, stride, padding, dilation, transposed, groups
CASES = {
    "3x3": ((2, 5, 9, 11), (7, 5, 3, 3), (1, 1), (1, 1), (1, 1), False, 1),
    "several splits": ((2, 3, 13, 11), (6, 3, 3, 3), (1, 1), (1, 1), (1, 1), False, 1),
    "several tiles": ((1, 30, 5, 4), (140, 30, 2, 2), (1, 1), (0, 0), (1, 1), False, 1),
    "several blocks of mask": ((2, 70, 9, 8), (9, 70, 1, 1), (1, 1), (0, 0), (1, 1), False, 1),
    "strided, uneven": ((2, 3, 10, 7), (5, 3, 3, 2), (2, 3), (1, 0), (1, 1), False, 1),
    "stride larger than the kernel": ((2, 4, 11, 9), (5, 4, 2, 2), (3, 4), (0, 0), (1, 1), False, 1),
    "dilated": ((2, 3, 9, 10), (5, 3, 3, 2), (1, 2), (2, 1), (2, 3), False, 1),
    "padding larger than the map": ((2, 3, 2, 3), (5, 3, 3, 3), (1, 1), (5, 5), (1, 1), False, 1),
    "one place": ((3, 5, 1, 1), (4, 5, 1, 1), (1, 1), (0, 0), (1, 1), False, 1),
    "groups": ((2, 6, 7, 5), (9, 2, 3, 3), (1, 1), (1, 1), (1, 1), False, 3),
    "depthwise": ((2, 4, 7, 5), (8, 1, 3, 3), (1, 1), (1, 1), (1, 1), False, 4),
    "1d": ((2, 4, 33), (5, 4, 5), (2,), (2,), (1,), False, 1),
    "3d": ((2, 3, 4, 5, 6), (5, 3, 3, 2, 3), (1, 2, 1), (1, 0, 2), (1, 1, 2), False, 1),
    "transposed": ((2, 6, 5, 7), (6, 5, 3, 3), (2, 2), (1, 1), (1, 1), True, 1),
    "transposed, groups": ((2, 6, 5, 7), (6, 4, 2, 3), (2, 1), (0, 1), (1, 2), True, 2),
    "transposed 3d": ((1, 3, 3, 4, 3), (3, 5, 2, 3, 2), (2, 1, 2), (0, 0, 0), (1, 1, 1), True, 1),
}


def last(x):
    """The same tensor with channels last in memory."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


class Case:
    def __init__(self, name, dtype=torch.float32, ratio=0.7, x_layout=torch.contiguous_format, g_layout=None):
        torch.manual_seed(0)
        size, *self.geometry = CASES[name]
        weight_size, stride, padding, dilation, transposed, groups = self.geometry
        x = torch.randn(size, dtype=dtype, device=DEVICE)
        more = [s - 1 if transposed else 0 for s in stride]  # a transposed output as large as can be
        output = torch.ops.aten.convolution(
            *(torch.empty(shape, device="meta") for shape in (size, weight_size)),
            *(None, stride, padding, dilation, transposed, more, groups),
        )
        self.grad = torch.randn(output.shape, dtype=dtype, device=DEVICE)
        self.x = compress(last(x) if x_layout is last else x, ratio, backend="reference")
        if g_layout is last:
            self.grad = last(self.grad)

    def gradient(self, backend="triton"):
        c = self.x
        return conv_weight_grad(self.grad, c.values, c.bitmask, c.shape, c.stride, *self.geometry, backend=backend)

    def check(self, **options):
        torch.testing.assert_close(self.gradient(), self.expected(), **options)

    def expected(self):
        """In float64, so that half precision is held to one rounding at the end."""
        dtype, c = self.grad.dtype, self.x
        parts = (self.grad.double(), c.values.double(), c.bitmask, c.shape, c.stride)
        return conv_weight_grad(*parts, *self.geometry, backend="reference").to(dtype)


@pytest.fixture(autouse=True)
def fresh_memory_is_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def dense_is_refused(monkeypatch):
    """Calls that would restore the whole input fail."""

    def refuse(**_):
        raise AssertionError("the input was restored")

    module = importlib.import_module("surgeon_fx.kernels.sparse_grad.triton")
    taken = SimpleNamespace(conv_weight_grad=refuse, linear_weight_grad=refuse)
    monkeypatch.setattr(module, "reference", taken)


@pytest.mark.usefixtures("dense_is_refused")
@pytest.mark.parametrize("name", CASES)
def test_equals_reference(name):
    Case(name).check(rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("dense_is_refused")
@pytest.mark.parametrize("name", ["strided, uneven", "groups", "1d", "3d", "transposed, groups"])
def test_channels_last(name):
    for x_layout, g_layout in ((last, None), (None, last), (last, last)):
        Case(name, x_layout=x_layout, g_layout=g_layout).check(rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("dense_is_refused")
def test_any_dense_layout_of_the_input_and_any_strides_of_the_gradient():
    case = Case("3x3")
    x = torch.randn(11, 5, 2, 9, device=DEVICE).permute(2, 1, 3, 0)
    case.x = compress(x, 0.6, backend="reference")
    assert case.x.stride == x.stride()
    case.grad = torch.randn(2, 1, 9, 1, device=DEVICE).expand_as(case.grad)
    case.check(rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("dense_is_refused")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["several splits", "transposed"])
def test_half_precision_sums_in_single(name, dtype):
    case = Case(name, dtype)
    assert case.gradient().dtype is dtype
    case.check(rtol=torch.finfo(dtype).eps, atol=1e-3)


def test_places_are_split_where_tiles_are_few():
    share_of_places = importlib.import_module("surgeon_fx.kernels.sparse_grad.triton").share_of_places
    assert share_of_places(places=286, tiles=1, step=16) == 96  # "several splits": three of them
    assert share_of_places(places=100, tiles=1, step=16) == 112  # too few places
    assert share_of_places(places=10**6, tiles=1, step=16) == 1968  # 509 programs
    assert share_of_places(places=10**6, tiles=600, step=16) == 10**6


@pytest.mark.usefixtures("dense_is_refused")
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 2, 1), (7, 33, 5), (300, 20, 130)])
def test_linear(rows, inputs, outputs):
    torch.manual_seed(0)
    x, grad = torch.randn(rows, inputs, device=DEVICE), torch.randn(rows, outputs, device=DEVICE)
    c = compress(x, 0.8, backend="reference")
    for g in (grad, grad.t().contiguous().t()):
        actual = linear_weight_grad(g, c.values, c.bitmask, inputs, backend="triton")
        expected = linear_weight_grad(grad, c.values, c.bitmask, inputs, backend="reference")
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("ratio", [0.0, 0.001, 0.999, 1.0])
def test_everything_kept_and_nothing(ratio):
    Case("3x3", ratio=ratio).check(rtol=1e-5, atol=1e-4)
    x, grad = torch.randn(9, 30, device=DEVICE), torch.randn(9, 6, device=DEVICE)
    c = compress(x, ratio, backend="reference")
    actual = linear_weight_grad(grad, c.values, c.bitmask, 30, backend="triton")
    expected = linear_weight_grad(grad, c.values, c.bitmask, 30, backend="reference")
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)


def test_double_precision_is_the_reference():
    case = Case("3x3", torch.float64)
    assert torch.equal(case.gradient(), case.gradient("reference"))


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's
def test_a_kept_value_that_is_not_finite_gives_what_dense_arithmetic_gives(value):
    case = Case("3x3", ratio=0.9)
    case.x.values[3] = value
    assert not case.expected().isfinite().all()
    case.check(rtol=1e-5, atol=1e-4, equal_nan=True)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_gradient_that_is_not_finite_stays_with_its_output():
    case = Case("several tiles")
    expected = case.gradient()
    case.grad[0, 5, 2, 1] = float("inf")
    actual = case.gradient()
    assert not actual[5].isfinite().any()
    others = torch.arange(140, device=DEVICE) != 5
    assert torch.equal(actual[others], expected[others])


def test_a_mask_with_more_bits_than_values_reads_none_behind_them():
    case = Case("3x3", ratio=0.5)
    room = torch.full((990,), float("nan"), device=DEVICE)
    kept = case.x.values.numel()
    room[:kept] = case.x.values
    parts = (room[:kept], torch.full((bit_bytes(990),), 255, dtype=torch.uint8, device=DEVICE))
    dense = torch.cat([case.x.values, torch.zeros(990 - kept, device=DEVICE)])
    size, stride = case.x.shape, case.x.stride
    actual = conv_weight_grad(case.grad, *parts, size, stride, *case.geometry, backend="triton")
    no_mask = torch.empty(0, dtype=torch.uint8, device=DEVICE)
    expected = conv_weight_grad(case.grad, dense, no_mask, size, stride, *case.geometry, backend="reference")
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)


def pays(kept=0.1, dtype=torch.bfloat16, outputs=256, taps=1, device="cuda"):
    grad = SimpleNamespace(dtype=dtype, device=torch.device(device), shape=(8, outputs, 14, 14))
    size = (8, 64, 14, 14)
    weight = (outputs, 64, taps, 1)
    return weight_grad_pays(round(kept * 8 * 64 * 14 * 14), grad, size, weight, 1)


def test_a_gpu_takes_it_where_little_is_kept_and_seldom_restored(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert unavailable_reason("triton", "cuda") == ""
    assert pays()
    assert pays(device="xpu")
    assert not pays(kept=0.2)
    assert not pays(dtype=torch.float32)
    assert not pays(outputs=1024)
    assert not pays(taps=9)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not pays()


def test_the_rule_knows_the_kernels_tile():
    module = importlib.import_module("surgeon_fx.kernels.sparse_grad.triton")
    assert module.tile_sizes(4096, 4096, 2, False)["M"] == sparse_grad.GPU_TILE
