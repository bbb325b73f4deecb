"""The importance pass: how much each layer's activation is worth keeping, on the data at hand.

One forward and backward of a few samples gives G, the root mean square of each layer's weight gradient, and the sizes
of the layers' inputs give M = -log(m / sum of m). I = (M / max M) * (G / max G); p = 1 - I / max I are the ratios.

The pass runs over aliases of the parameters and copies of the buffers, so nobody's `.grad`, parameter hooks or running
statistics see it; each weight gradient is reduced to a number as soon as it is there. A model sharded by `fully_shard`
runs itself, and is put back.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves, tree_map_only

from surgeon_fx import allocator
from surgeon_fx.api import rewrite_of
from surgeon_fx.distributed import (
    Ranks,
    all_ranks,
    is_empty,
    local,
    reshard,
    sharded_parts,
    unwrapped,
    zero_loss,
    zeros_like,
)
from surgeon_fx.inputs import batch_size, call, on_one_device
from surgeon_fx.kernels.layout import check_ratio
from surgeon_fx.losses import entropy, logits_of
from surgeon_fx.planner.arithmetic import activation_memory, max_normalised
from surgeon_fx.tables import table

SAMPLES = 10


@dataclass(frozen=True)
class Importance:
    """What a pass found, by layer name and under the paper's names: G, M, I and the ratios p.

    Layers without a weight gradient are missing from G, M and I; in `p` they follow the trained layer before them.
    """

    G: dict[str, float]
    M: dict[str, float]
    I: dict[str, float]  # noqa: E741
    p: dict[str, float]

    def __str__(self) -> str:
        rows = [[name, self.G[name], self.M[name], self.I[name], self.p[name]] for name in self.G]
        return table(rows, ["layer", "G", "M", "I", "p"], floatfmt=("", ".3g", ".2f", ".3f", ".3f"))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Importance:
        return Importance(**json.loads(text))

    def plot(self, path: str | Path) -> None:
        """Draws G, M and I over their maxima, and the share kept, along the network."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 4), layout="constrained")
        axis = figure.add_subplot()
        for label, values, color in (("G", self.G, "#c44e52"), ("M", self.M, "#8c8c8c"), ("I", self.I, "#2c5f8a")):
            axis.plot(list(max_normalised(values).values()), label=label, color=color, linewidth=1.2)
        kept = [1 - self.p[name] for name in self.G]
        axis.fill_between(range(len(kept)), kept, color="#c9d7e8", label="share kept, 1 - p", step="mid")
        axis.set_xlabel("layer")
        axis.set_ylabel("share of the largest")
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=150)


def importance_of(
    gradients: Mapping[str, float], sizes: Mapping[str, int], gradient: bool = True, memory: bool = True
) -> Importance:
    """The paper's equations on numbers: G and m to M, I and p. `gradient` and `memory` leave a factor out."""
    memories = activation_memory({name: sizes[name] for name in gradients})
    first, second = max_normalised(gradients), max_normalised(memories)
    both = {name: (first[name] if gradient else 1.0) * (second[name] if memory else 1.0) for name in gradients}
    return Importance(
        dict(gradients), memories, both, {name: 1 - share for name, share in max_normalised(both).items()}
    )


def refresh(
    model: nn.Module,
    inputs: Any,
    loss_fn: Callable[..., Tensor | None] = entropy,
    *,
    targets: Any = None,
    samples: int | None = SAMPLES,
    static_ratio: float = 0.9,
    gradient: bool = True,
    memory: bool = True,
    generator: torch.Generator | None = None,
    scaler: torch.amp.GradScaler | None = None,
    group: Any = None,
) -> Importance:
    """Finds how important each layer of a transformed model is on a batch, and writes the ratios that follow.

    `inputs` is what the model is called with: a tensor, a tuple of arguments or a dict of named ones. The pass runs in
    the model's present mode, on `samples` of the batch chosen at random (None: all), with `static_ratio` of every
    activation dropped. With `targets` the loss is `loss_fn(output, targets)`, of the same samples; its default is then
    the cross entropy. `gradient=False` and `memory=False` leave a factor out, as the paper's ablations do. A `scaler`
    scales the loss, as float16 needs it. Afterwards nothing but the ratio table has changed; where gradients are
    missing or not finite it is left alone, with a warning, and where `loss_fn` returns None without one. Without a
    `generator` the model has one of its own.

    In an initialised process group every rank must call it: squared gradients and activation sizes are added up over
    the ranks in one collective, so that all ranks write the same ratios. `group` is by default that of the wrapper, or
    of all ranks. A rank without samples, or without a finite loss, leaves the ratios to the others.
    """
    return importance_pass(
        model,
        inputs,
        loss_fn,
        ranks=all_ranks(model, group),
        targets=targets,
        samples=samples,
        static_ratio=static_ratio,
        gradient=gradient,
        memory=memory,
        generator=generator,
        scale=1.0 if scaler is None else scaler.get_scale(),
    )


def importance_pass(
    model: nn.Module,
    inputs: Any,
    loss_fn: Callable[..., Tensor | None],
    *,
    ranks: Ranks | None = None,
    targets: Any = None,
    samples: int | None = SAMPLES,
    static_ratio: float = 0.9,
    gradient: bool = True,
    memory: bool = True,
    generator: torch.Generator | None = None,
    scale: float = 1.0,
) -> Importance:
    """`refresh`, by given ranks: None is this one alone."""
    shared = rewrite_of(model)
    table = shared.table
    check_ratio(static_ratio)
    if samples is not None and samples < 1:
        raise ValueError(f"samples must be at least 1, or None for the whole batch, got {samples}")
    if not gradient and not memory:
        raise ValueError("gradient and memory cannot both be left out: nothing would tell layers apart")
    if generator is None:
        generator = shared.generator = shared.generator or torch.Generator().manual_seed(torch.initial_seed())
    reshard(model)
    weights = {name: trained for name, layer in shared.layers.items() if (trained := _weights(layer))}
    empty = ranks is not None and is_empty(inputs)
    given = zeros_like((inputs, targets)) if empty else (inputs, targets)
    batch = batch_size(given[0])
    if samples is not None and samples < batch:
        _check_targets(given[1], batch)
    chosen, chosen_targets = _some(given, batch, samples, generator)
    importance_loss = _Loss(loss_fn, chosen_targets, targets is not None, scale, empty, ranks is not None)
    find = _sharded_gradient_squares if sharded_parts(model) else _gradient_squares
    before = dict(table)
    shared.slots.count_elements()
    try:
        table.fill(static_ratio)
        with _unseen(), allocator.more_follows(), torch.inference_mode(False), torch.enable_grad():
            squares = find(unwrapped(model), chosen, importance_loss, weights)
    finally:
        table.update(before)
        torch.clear_autocast_cache()  # of casts of the aliases
    sizes = shared.slots.elements()
    if ranks is not None:
        squares, sizes = _agree(ranks, weights, squares, sizes, bool(sharded_parts(model)))
    if squares is None:
        return Importance({}, {}, {}, before)
    counts = {name: sum(weight.numel() for weight in own) for name, own in weights.items()}
    gradients = {name: math.sqrt(squares[name] / counts[name]) / scale for name in weights if name in squares}
    if not gradients or not all(map(math.isfinite, gradients.values())):
        what = "gradients that are not finite" if gradients else "no gradient of any layer's weight"
        if not gradients or scale == 1:  # a scale that is too high is lowered by the next step
            warnings.warn(f"refresh found {what} and left the ratios as they were", stacklevel=3)
        return Importance({}, {}, {}, before)
    usual = sum(sizes.values()) // max(len(sizes), 1)
    sizes |= {name: usual for name in gradients if name not in sizes}  # no operation of ours used its weight
    found = importance_of(gradients, sizes, gradient, memory)
    table.update(_for_everyone(found.p, table))
    return Importance(found.G, found.M, found.I, dict(table))


@dataclass(frozen=True)
class _Loss:
    """What a pass differentiates. `together`: every rank takes part in backward, those without a loss by a zero."""

    function: Callable[..., Tensor | None]
    targets: Any
    supervised: bool
    scale: float
    empty: bool
    together: bool

    def __call__(self, output: Any) -> tuple[Tensor | None, bool]:
        """What to go backward from, and whether it is a loss."""
        loss = None if self.empty else self._of(output)
        if loss is not None and (not isinstance(loss, Tensor) or loss.numel() != 1):
            raise ValueError("loss_fn must return a tensor with one element")
        if loss is None:
            return zero_loss(output) if self.together else None, False
        return loss if self.scale == 1 else loss * self.scale, True

    def _of(self, output: Any) -> Tensor | None:
        if not self.supervised:
            return self.function(output)
        if self.function is entropy:
            return cross_entropy(logits_of(output), self.targets)
        return self.function(output, self.targets)


def _agree(
    ranks: Ranks,
    names: Iterable[str],
    squares: dict[str, float] | None,
    sizes: Mapping[str, int],
    sharded: bool,
) -> tuple[dict[str, float] | None, dict[str, int]]:
    """Squares and sizes over all ranks, by one collective: means of those that have a loss, or sums of their shards."""
    found = {} if squares is None else squares
    finite = all(map(math.isfinite, found.values()))
    numbers: list[float] = []
    for name in names:
        counts = finite and name in found
        numbers += [counts, found[name] if counts else 0.0, sizes.get(name, 0)]
    totals = ranks.sum([not finite, *numbers])
    rows = dict(zip(names, zip(totals[1::3], totals[2::3], totals[3::3], strict=True), strict=True))
    if sharded and totals[0]:  # a gradient that one rank spoilt is spoilt for all
        return dict.fromkeys(found, math.nan), dict(sizes)
    agreed = {name: square / (1 if sharded else count) for name, (count, square, _) in rows.items() if count}
    if sharded and not any(agreed.values()):  # zeros alone: no rank had a loss
        return None, dict(sizes)
    return agreed or squares, {name: int(size) for name, (_, _, size) in rows.items() if size}


def _weights(layer: nn.Module) -> list[nn.Parameter]:
    """What a layer's gradient is taken of: its weights, those behind a parametrization too, and no biases."""
    named = [*layer.named_parameters(recurse=False)]
    if "parametrizations" in layer._modules:
        named += layer.parametrizations.named_parameters()  # type: ignore[union-attr]
    return [parameter for name, parameter in named if "bias" not in name and parameter.requires_grad]


def _gradient_squares(
    model: nn.Module, inputs: Any, loss_fn: _Loss, weights: Mapping[str, list[nn.Parameter]]
) -> dict[str, float] | None:
    """The sum of squares of each layer's weight gradient, over aliases of the parameters; None without a loss."""
    aliases = {id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in model.parameters()}
    state: dict[str, Tensor] = {f"model.{name}": aliases[id(p)] for name, p in model.named_parameters()}
    state |= {f"model.{name}": buffer.clone() for name, buffer in model.named_buffers()}
    wanted = {id(p): aliases[id(p)] for own in weights.values() for p in own}
    norms: dict[int, Tensor] = {}

    def reduce(key: int) -> Callable[[Tensor], Tensor]:
        def hook(grad: Tensor) -> Tensor:
            half = grad.dtype in (torch.float16, torch.bfloat16)
            norms[key] = torch.linalg.vector_norm(grad, dtype=torch.float32 if half else None).double()
            return grad.new_zeros(()).expand_as(grad)  # what is handed back takes no memory

        return hook

    for key, alias in wanted.items():
        alias.register_hook(reduce(key))
    if not functional_call(_Pass(model, loss_fn, list(wanted.values())), state, (inputs,)):
        return None
    found = dict(zip(norms, on_one_device(norms.values()).tolist(), strict=True)) if norms else {}
    return _by_layer({key: value**2 for key, value in found.items()}, weights)


def _by_layer(squares: Mapping[int, float], weights: Mapping[str, list[nn.Parameter]]) -> dict[str, float]:
    return {
        name: sum(squares[id(p)] for p in own if id(p) in squares)
        for name, own in weights.items()
        if any(id(p) in squares for p in own)
    }


def _sharded_gradient_squares(
    model: nn.Module, inputs: Any, loss_fn: _Loss, weights: Mapping[str, list[nn.Parameter]]
) -> dict[str, float] | None:
    """The same of a model sharded by `fully_shard`, of this rank's shards.

    Its parameters cannot be replaced by aliases: the pass runs on the model itself, and puts `.grad` and the buffers
    back. Gradients are averaged over the ranks by FSDP, so every rank goes backward.
    """
    grads = [(p, p.grad) for p in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        for parameter, _ in grads:
            parameter.grad = None
        loss, has_loss = loss_fn(call(model, inputs))
        if loss is None:
            return None
        if loss.requires_grad:
            loss.backward()
        found = {
            id(p): float(torch.linalg.vector_norm(local(p.grad), dtype=torch.float64)) ** 2
            for own in weights.values()
            for p in own
            if p.grad is not None
        }
        return _by_layer(found, weights) if has_loss or loss_fn.together else None
    finally:
        reshard(model)
        with torch.no_grad():
            for parameter, grad in grads:
                parameter.grad = grad
            for buffer, value in buffers:
                buffer.copy_(value)


class _Pass(nn.Module):
    """Forward, loss and backward in one call: also what runs again in backward sees the aliases."""

    def __init__(self, model: nn.Module, loss_fn: _Loss, wanted: list[nn.Parameter]) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn
        self.__dict__["wanted"] = wanted

    def forward(self, inputs: Any) -> bool:
        loss, has_loss = self.loss_fn(call(self.model, inputs))
        if loss is not None and loss.requires_grad and self.__dict__["wanted"]:
            torch.autograd.grad(loss, self.__dict__["wanted"], allow_unused=True)
        return has_loss


def _check_targets(targets: Any, batch: int) -> None:
    """Targets are chosen along with their samples, so there must be one for each."""
    for x in tree_leaves(targets):
        if isinstance(x, Tensor) and x.dim() and x.shape[0] != batch:
            raise ValueError(
                f"targets must have one for each of the batch's {batch} samples in their first dimension, got a tensor "
                f"{tuple(x.shape)}; samples=None takes inputs and targets as they are"
            )


def _some(values: tuple[Any, ...], batch: int, samples: int | None, generator: torch.Generator) -> tuple[Any, ...]:
    """A random choice of a batch's samples, the same of inputs and targets, in copies that autograd may keep."""
    values = tuple(dict(value) if isinstance(value, Mapping) else value for value in values)
    chosen = torch.randperm(batch, generator=generator, device=generator.device)[: samples or batch].sort().values

    def pick(x: Tensor) -> Tensor:
        return x.detach().index_select(0, chosen.to(x.device)) if x.dim() and x.shape[0] == batch else x.detach()

    return tree_map_only(Tensor, pick, values)


def _for_everyone(found: Mapping[str, float], names: Mapping[str, float]) -> dict[str, float]:
    """Ratios for layers without a weight gradient too: functions behind a frozen layer follow what trains before it."""
    filled: dict[str, float] = {}
    last = 0.0
    for name in names:
        last = found.get(name, last)
        filled[name] = last
    return filled


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Random number generators end as they began: torch's on every device in use, Python's and NumPy's."""
    numpy = sys.modules.get("numpy")
    python, arrays = random.getstate(), None if numpy is None else numpy.random.get_state()
    with contextlib.ExitStack() as stack:
        for kind in ("cuda", "xpu", "mps"):
            module = getattr(torch, kind)
            if module.is_available() and getattr(module, "is_initialized", lambda: True)():
                devices = range(module.device_count()) if kind != "mps" else [0]
                stack.enter_context(torch.random.fork_rng(devices, device_type=kind))
        stack.enter_context(torch.random.fork_rng([]))
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(arrays)
