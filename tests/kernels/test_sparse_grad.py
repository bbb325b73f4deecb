"""Weight gradients from a pruned input, against the native gradient over the restored one."""

import pytest
import torch
import torch.nn.functional as F
from op_cases import pruned_by_hand

from surgeon_fx.kernels import compress, native
from surgeon_fx.kernels.sparse_grad import conv_weight_grad, linear_weight_grad, weight_grad_pays

ISAS = native.instruction_sets() if not native.unavailable_reason() else []

pytestmark = pytest.mark.skipif(not ISAS, reason="no C kernels here")

# input, outputs, kernel, options of the convolution
CASES = {
    "3x3": ((2, 5, 9, 11), 7, (3, 3), {"padding": 1}),
    "3x3, several chunks": ((2, 3, 70, 66), 33, (3, 3), {"padding": 1}),
    "3x3, several samples a chunk": ((13, 20, 4, 4), 40, (3, 3), {"padding": 1}),
    "3x3, more chunks than spans": ((9, 16, 20, 20), 16, (3, 3), {"padding": 1}),
    "1x1": ((3, 17, 8, 8), 19, (1, 1), {}),
    "1x1, wide": ((2, 9, 40, 40), 130, (1, 1), {}),
    "1x1, strided": ((2, 6, 15, 16), 20, (1, 1), {"stride": 2}),
    "1x1, strided, wide": ((3, 5, 37, 41), 192, (1, 1), {"stride": (2, 3)}),
    "3x3, strided, wide": ((2, 4, 33, 31), 128, (3, 3), {"stride": 2, "padding": 1}),
    "1x1, last tile in part": ((2, 5, 20, 20), 530, (1, 1), {}),
    "strided": ((2, 6, 21, 23), 18, (3, 3), {"stride": 2, "padding": 1}),
    "stride larger than the kernel": ((2, 4, 19, 19), 16, (2, 2), {"stride": (3, 4)}),
    "stem": ((2, 3, 37, 41), 16, (7, 7), {"stride": 2, "padding": 3}),
    "patches": ((2, 3, 32, 32), 24, (8, 8), {"stride": 8}),
    "dilated": ((2, 4, 20, 18), 16, (3, 3), {"dilation": (3, 2), "padding": 2}),
    "dilated and strided": ((2, 4, 25, 18), 16, (3, 2), {"dilation": 3, "stride": 2, "padding": 3}),
    "padding larger than the map": ((2, 3, 2, 3), 16, (3, 3), {"padding": 5}),
    "kernel as large as the map": ((3, 5, 6, 7), 17, (6, 7), {}),
    "one row": ((2, 5, 1, 40), 16, (1, 5), {"padding": (0, 2)}),
    "one column": ((2, 5, 40, 1), 16, (5, 1), {"padding": (2, 0)}),
    "one place": ((4, 5, 1, 1), 16, (1, 1), {}),
    "groups": ((2, 12, 9, 9), 24, (3, 3), {"groups": 3, "padding": 1}),
    "groups, several chunks": ((2, 6, 70, 66), 48, (3, 3), {"groups": 3, "padding": 1, "stride": (1, 2)}),
    "many channels": ((2, 1100, 5, 5), 17, (1, 1), {}),
    "depthwise": ((2, 12, 9, 9), 24, (3, 3), {"groups": 12, "padding": 1}),
    "1d": ((3, 4, 301), 20, (5,), {"padding": 2, "stride": 2}),
    "3d": ((2, 3, 6, 7, 8), 16, (3, 2, 3), {"padding": (1, 0, 1), "stride": (1, 2, 1)}),
    "transposed": ((2, 6, 9, 7), 5, (3, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    "transposed, groups": ((2, 6, 9, 7), 4, (2, 2), {"stride": 2, "groups": 2}),
    "transposed 1d, dilated": ((2, 6, 33), 5, (4,), {"stride": 3, "dilation": 2}),
    "transposed 1x1, larger than its input": ((2, 32, 7, 9), 16, (1, 1), {"dilation": 2, "output_padding": 1}),
    "transposed 3d": ((1, 3, 4, 5, 4), 16, (2, 3, 2), {"stride": (2, 1, 2)}),
}
LAYOUTS = {
    "contiguous": torch.contiguous_format,
    "channels last": torch.channels_last,
    "channels last 3d": torch.channels_last_3d,
}


def each(value, dims):
    return [value] * dims if isinstance(value, int) else list(value)


class Case:
    """One convolution: its gradient, from values and bits and by torch."""

    def __init__(self, name, dtype=torch.float32, x_layout="contiguous", g_layout="contiguous", ratio=0.7):
        torch.manual_seed(0)
        shape, outputs, kernel, options = CASES[name]
        dims, groups, transposed = len(kernel), options.get("groups", 1), name.startswith("transposed")
        x = torch.randn(shape, dtype=dtype).contiguous(memory_format=LAYOUTS[x_layout])
        self.pruned, self.compressed = pruned_by_hand(x, ratio), compress(x, ratio)
        sizes = (shape[1], outputs) if transposed else (outputs, shape[1] // groups)
        self.weight = torch.zeros(*sizes, *kernel, dtype=dtype, requires_grad=True)
        function = getattr(F, f"conv{'_transpose' if transposed else ''}{dims}d")
        self.output = function(self.pruned, self.weight, **options)
        self.grad = torch.randn_like(self.output).contiguous(memory_format=LAYOUTS[g_layout])
        self.geometry = [each(options.get(key, default), dims) for key, default in GEOMETRY]
        self.rest = (transposed, groups)

    def expected(self, grad=None):
        return torch.autograd.grad(self.output, self.weight, self.grad if grad is None else grad, retain_graph=True)[0]

    def actual(self, grad=None, backend="cpu"):
        c = self.compressed
        parts = (c.values, c.bitmask, c.shape, c.stride, self.weight.shape)
        grad = self.grad if grad is None else grad
        return conv_weight_grad(grad, *parts, *self.geometry, *self.rest, backend=backend)


GEOMETRY = (("stride", 1), ("padding", 0), ("dilation", 1))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_native_gradient_of_the_pruned_input(name, isa):
    case = Case(name)
    with native.forced_instruction_set(isa):
        torch.testing.assert_close(case.actual(), case.expected(), rtol=1e-4, atol=1e-4)


def layouts_of(name):
    return ("contiguous", "channels last 3d" if len(CASES[name][2]) == 3 else "channels last")


@pytest.mark.parametrize(
    ("name", "x_layout", "g_layout"),
    [
        (name, x_layout, g_layout)
        for name in ("3x3, several chunks", "strided", "groups", "1x1", "transposed", "3d")
        for x_layout in layouts_of(name)
        for g_layout in layouts_of(name)
    ],
)
def test_layouts(name, x_layout, g_layout):
    case = Case(name, x_layout=x_layout, g_layout=g_layout)
    torch.testing.assert_close(case.actual(), case.expected(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["3x3, several chunks", "1x1, wide", "strided", "transposed"])
@pytest.mark.parametrize("g_layout", ["contiguous", "channels last"])
def test_half_precision_sums_in_single(name, dtype, g_layout):
    case = Case(name, dtype, g_layout=g_layout)
    wide = Case(name, ratio=0.0)
    wide.output = getattr(F, "conv_transpose2d" if case.rest[0] else "conv2d")(
        case.pruned.float(), wide.weight, **CASES[name][3]
    )
    assert case.actual().dtype is dtype
    torch.testing.assert_close(case.actual(), wide.expected(case.grad.float()).to(dtype), rtol=2e-2, atol=1e-3)


def test_double_precision_is_the_reference():
    case = Case("3x3", torch.float64)
    torch.testing.assert_close(case.actual(), case.expected())


@pytest.mark.parametrize("ratio", [0.0, 0.02, 0.5, 0.98, 1.0])
@pytest.mark.parametrize("name", ["3x3", "strided", "3x3, several samples a chunk"])
def test_everything_kept_and_nothing(name, ratio):
    case = Case(name, ratio=ratio)
    torch.testing.assert_close(case.actual(), case.expected(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [(1, 1, 1), (7, 33, 5), (1000, 70, 130), (300, 129, 64), (5, 1, 200), (400, 65, 128), (333, 3, 515)],
)
@pytest.mark.parametrize("isa", ISAS)
def test_linear(rows, inputs, outputs, isa):
    torch.manual_seed(0)
    x, grad = torch.randn(rows, inputs), torch.randn(rows, outputs)
    c = compress(x, 0.8)
    with native.forced_instruction_set(isa):
        actual = linear_weight_grad(grad, c.values, c.bitmask, inputs, backend="cpu")
    torch.testing.assert_close(actual, grad.t() @ pruned_by_hand(x, 0.8), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
def test_lists_of_very_different_lengths(layout, stride, isa):
    """One channel keeps everything, one nothing, one its last element, one every seventh."""
    torch.manual_seed(0)
    x = torch.zeros(2, 4, 30, 33)
    x[:, 0] = torch.randn(2, 30, 33) + 10
    x[:, 2, -1, -1] = 10
    x[:, 3, :, ::7] = 10
    x = x.contiguous(memory_format=LAYOUTS[layout])
    ratio = 1 - int((x != 0).sum()) / x.numel()
    c = compress(x, ratio)
    weight = torch.zeros(192, 4, 1, 1, requires_grad=True)
    output = F.conv2d(pruned_by_hand(x, ratio), weight, stride=stride)
    grad = torch.randn_like(output)
    with native.forced_instruction_set(isa):
        actual = conv_weight_grad(
            grad, c.values, c.bitmask, c.shape, c.stride, weight.shape, [stride] * 2, [0, 0], [1, 1], backend="cpu"
        )
    torch.testing.assert_close(actual, torch.autograd.grad(output, weight, grad)[0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(700, 70, 128), (130, 300, 530), (257, 40, 64)])
def test_any_number_of_threads_gives_the_same_bits_of_a_linear_layer(rows, inputs, outputs):
    torch.manual_seed(0)
    c, grad = compress(torch.randn(rows, inputs), 0.8), torch.randn(rows, outputs)
    before, results = torch.get_num_threads(), []
    try:
        for threads in range(1, 9):
            torch.set_num_threads(threads)
            results.append(linear_weight_grad(grad, c.values, c.bitmask, inputs, backend="cpu"))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize(
    ("size", "outputs", "kernel", "density", "pays"),
    [
        ((8, 64, 56, 56), 64, 3, 0.5, True),
        ((8, 64, 56, 56), 64, 3, 0.6, False),
        ((8, 64, 56, 56), 64, 1, 0.3, True),
        ((8, 64, 56, 56), 64, 1, 0.4, False),
        ((32, 3, 32, 32), 16, 3, 0.1, True),
        ((32, 3, 32, 32), 16, 3, 0.2, False),
        ((32, 16, 32, 32), 160, 1, 0.3, True),
        ((1, 320, 8, 8), 320, 1, 0.1, False),  # 64 places
        ((1576, 768), 768, 0, 0.2, True),
        ((1576, 768), 768, 0, 0.3, False),
        ((1024, 128), 128, 0, 0.1, True),
        ((1024, 128), 128, 0, 0.2, False),
        ((4096, 64), 64, 0, 0.02, False),
        ((64, 512), 2048, 0, 0.1, False),
    ],
)
def test_which_shapes_pay(size, outputs, kernel, density, pays):
    if kernel:
        grad, sizes = torch.empty(size[0], outputs, *size[2:]), (size, (outputs, size[1], kernel, kernel))
    else:
        grad, sizes = torch.empty(size[0], outputs).t().unsqueeze(0), ((1, size[1], size[0]), (outputs, size[1], 1))
    assert weight_grad_pays(int(density * torch.Size(size).numel()), grad, *sizes, 1) is pays


@pytest.mark.parametrize(
    "name",
    ["3x3, several chunks", "3x3, more chunks than spans", "3x3, several samples a chunk", "strided", "groups", "1x1"],
)
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
def test_any_number_of_threads_gives_the_same_bits(name, layout):
    case, before, results = Case(name, x_layout=layout), torch.get_num_threads(), []
    try:
        for threads in range(1, 9):
            torch.set_num_threads(threads)
            results.append(case.actual())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_meets_kept_values_alone(value):
    """As in dense arithmetic, but for the zeros that stand for what was dropped."""
    case = Case("3x3", ratio=0.9)
    case.grad[0, 2, 4, 5] = value
    terms = torch.zeros_like(case.weight)
    padded = F.pad(case.pruned, (1, 1, 1, 1))
    for i in range(3):
        for j in range(3):
            x, g = padded[:, :, i : i + 9, j : j + 11], case.grad
            product = x.unsqueeze(1) * g.unsqueeze(2)
            terms.data[:, :, i, j] = torch.where((x != 0).unsqueeze(1), product, 0).sum((0, 3, 4))
    torch.testing.assert_close(case.actual(), terms.detach(), rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_kept_value_that_is_not_finite_gives_what_dense_arithmetic_gives(value):
    case = Case("3x3, several chunks", ratio=0.9)
    case.compressed.values[3] = value
    torch.testing.assert_close(case.actual(), case.actual(backend="reference"), equal_nan=True)
    x = torch.randn(40, 20)
    c, grad = compress(x, 0.5), torch.randn(40, 30)
    c.values[0] = value
    expected = linear_weight_grad(grad, c.values, c.bitmask, 20, backend="reference")
    actual = linear_weight_grad(grad, c.values, c.bitmask, 20, backend="cpu")
    torch.testing.assert_close(actual, expected, equal_nan=True)


def test_mistakes_are_refused():
    case = Case("3x3")
    c = case.compressed
    parts = (c.shape, c.stride, case.weight.shape, *case.geometry, False)
    with pytest.raises(ValueError, match="bitmask does not go with the values"):
        conv_weight_grad(case.grad, c.values, c.bitmask ^ 1, *parts, 1)
    with pytest.raises(ValueError, match="bitmask has"):
        conv_weight_grad(case.grad, c.values, c.bitmask[:-1], *parts, 1)
    with pytest.raises(ValueError, match="does not go with an input"):
        conv_weight_grad(case.grad, c.values, c.bitmask, *parts, 5)
    with pytest.raises(ValueError, match="is not that of an input"):
        conv_weight_grad(case.grad[:, :, 1:], c.values, c.bitmask, *parts, 1)
    with pytest.raises(ValueError, match="grad must be"):
        linear_weight_grad(torch.ones(3), c.values, c.bitmask, 4)
