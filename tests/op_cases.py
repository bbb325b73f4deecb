"""One operation against torch's own: outputs, gradients, second derivatives, and the bytes it holds."""

import torch
from torch import nn

from surgeon_fx.kernels import kept_count
from surgeon_fx.ops.slots import Slots
from surgeon_fx.ratio_table import RatioTable
from surgeon_fx.retained import nodes, saved_by, storages


class Layers:
    """The layers "a" and "b" as operations are told of them; their ratios start at 0."""

    def __init__(self):
        self.slots = Slots(RatioTable(["a", "b"]))
        self.a, self.b, self.none = map(self.slots.key, ("a", "b", ""))
        self.ratios = self.slots.table


def tensor(*shape, dtype=torch.float32, layout=torch.contiguous_format, trains=True, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    x = torch.randn(shape, generator=generator).to(dtype)
    return x.contiguous(memory_format=layout).requires_grad_(trains)


def parameter(*shape, dtype=torch.float32, trains=True):
    return nn.Parameter(tensor(*shape, dtype=dtype, seed=5).detach() * 0.3, requires_grad=trains)


def fresh(x):
    """The same values in new memory, of the same kind."""
    if not isinstance(x, torch.Tensor):
        return x
    new = x.detach().clone()
    return nn.Parameter(new, x.requires_grad) if isinstance(x, nn.Parameter) else new.requires_grad_(x.requires_grad)


def gradients(function, *args, double=False, **kwargs):
    """Output and gradients of a call by name, on fresh leaves; in-place functions are given a copy to change."""
    torch.manual_seed(1)
    args, kwargs = [fresh(x) for x in args], {name: fresh(x) for name, x in kwargs.items()}
    leaves = {str(i): x for i, x in [*enumerate(args), *kwargs.items()] if wants_gradient(x)}
    if kwargs.get("inplace") or getattr(function, "__name__", "").endswith("_"):
        args[0] = args[0].clone()
    result = function(*args, **kwargs)
    out = result[0] if isinstance(result, tuple) else result
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype).requires_grad_(double)
    found = torch.autograd.grad(out, list(leaves.values()), g, create_graph=double)
    named = {"output": out.detach(), **dict(zip(leaves, (x.detach() for x in found), strict=True))}
    if double:
        wanted = [*leaves.values(), g]
        second = torch.autograd.grad(sum(x.square().sum() for x in found), wanted, materialize_grads=True)
        named |= {f"{name} twice": x for name, x in zip([*leaves, "g"], second, strict=True)}
    return named


def wants_gradient(x):
    return isinstance(x, torch.Tensor) and x.requires_grad


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert torch.equal(actual[name].nan_to_num(7.5), value.nan_to_num(7.5)), name


def check_exact(key, op, native, /, *args, double=True, **kwargs):
    """Bit-equal to the native function, second derivatives included."""

    def ours(*given, **named):
        return op(key, *given, **named)

    ours.__name__ = getattr(native, "__name__", "")
    assert_same(gradients(ours, *args, double=double, **kwargs), gradients(native, *args, double=double, **kwargs))


def output_gradient(shape, dtype=torch.float32):
    """What `gradients` gives to backward."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)


def pruned_by_hand(x, ratio):
    """The elements of largest magnitude, the first of equals."""
    x = x.detach()
    keep = x.flatten().abs().sort(descending=True, stable=True).indices[: kept_count(x.numel(), ratio)]
    kept = torch.zeros(x.numel(), dtype=torch.bool).index_fill_(0, keep, True).view(x.shape)
    return torch.where(kept, x, torch.zeros((), dtype=x.dtype))


def pruned_bytes(x, ratio):
    return kept_count(x.numel(), ratio) * x.element_size() + (x.numel() + 7) // 8


def held(output, *own):
    """Bytes that backward from an output keeps alive, apart from these tensors."""
    found = storages(one for node in nodes(output) for one in saved_by(node))
    return sum(size for storage, size in found.items() if storage not in storages(own))
