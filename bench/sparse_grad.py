"""Weight gradients from a pruned input: from values and bits, against restoring the input and the native gradient.

    python bench/sparse_grad.py
    python bench/sparse_grad.py --models wrn28_10 --densities 0.1,0.3 --threads 1

Each shape of a layer is one case. The two ways take turns in one process, on the same compressed input and the same
gradient; a number is the time from values and bits over the time of restoring and the native gradient. In brackets
stands what it would be where `weight_grad_pays` chooses to restore: the means count 1.00 there, because that is what
runs. The results of both are held against each other first. Memory comes from where `transform` has it come from: with
malloc's settings restoring faults its output in anew, which can take as long as all the rest.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from common import environment, spread
from tabulate import tabulate
from tqdm import tqdm

from surgeon_fx import allocator
from surgeon_fx.kernels import Compressed, compress, decompress
from surgeon_fx.kernels.sparse_grad import conv_weight_grad, linear_weight_grad, weight_grad_pays

DENSITIES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
BUDGET_SECONDS = 1.0  # of repetitions for one case and density, after the first few


@dataclass(frozen=True)
class Layer:
    """A convolution of square maps, or where there is no kernel a linear layer over rows."""

    batch: int  # rows of a linear layer
    inputs: int
    outputs: int
    size: int = 0
    kernel: int = 0
    stride: int = 1
    groups: int = 1

    def __str__(self) -> str:
        if not self.kernel:
            return f"linear {self.batch}x{self.inputs} -> {self.outputs}"
        stride = f"/{self.stride}" if self.stride > 1 else ""
        groups = f" groups {self.groups}" if self.groups > 1 else ""
        channels = f"{self.inputs} -> {self.outputs}"
        return f"{self.kernel}x{self.kernel}{stride} {self.batch}x{self.size}x{self.size} {channels}{groups}"


def conv(batch: int, inputs: int, size: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> Layer:
    return Layer(batch, inputs, outputs, size, kernel, stride, groups)


def resnet50(batch: int = 8) -> list[Layer]:
    layers = [conv(batch, 3, 224, 64, 7, 2)]
    size, before = 56, 64
    for stage, width in enumerate((64, 128, 256, 512)):
        stride = 1 if stage == 0 else 2
        layers += [
            conv(batch, before, size, width, 1),
            conv(batch, width, size, width, 3, stride),
            conv(batch, before, size, 4 * width, 1, stride),
        ]
        size, before = size // stride, 4 * width
        layers += [conv(batch, width, size, before, 1), conv(batch, before, size, width, 1)]
        layers += [conv(batch, width, size, width, 3)] if stride == 2 else []
    return [*layers, Layer(batch, 2048, 1000)]


def wrn28_10(batch: int = 32) -> list[Layer]:
    layers = [conv(batch, 3, 32, 16, 3)]
    before, size = 16, 32
    for width, stride in ((160, 1), (320, 2), (640, 2)):
        layers += [conv(batch, before, size, width, 3, stride), conv(batch, before, size, width, 1, stride)]
        before, size = width, size // stride
        layers.append(conv(batch, width, size, width, 3))
    return layers


def vit_b(batch: int = 8) -> list[Layer]:
    rows = batch * 197
    sizes = ((768, 2304), (768, 768), (768, 3072), (3072, 768))
    return [conv(batch, 3, 224, 768, 16, 16), *(Layer(rows, a, b) for a, b in sizes), Layer(batch, 768, 1000)]


def segformer_b5(size: int = 256) -> list[Layer]:
    layers, before, side = [], 3, size
    for stage, (width, reduction) in enumerate(((64, 8), (128, 4), (320, 2), (512, 1))):
        layers.append(conv(1, before, side, width, *((3, 2) if stage else (7, 4))))
        side //= 2 if stage else 4
        rows, reduced = side**2, (side // reduction) ** 2
        layers += [Layer(rows, width, width), Layer(reduced, width, 2 * width), Layer(rows, width, 768)]
        layers += [conv(1, width, side, width, reduction, reduction)] if reduction > 1 else []
        layers += [Layer(rows, width, 4 * width), Layer(rows, 4 * width, width)]
        layers.append(conv(1, 4 * width, side, 4 * width, 3, groups=4 * width))
        before = width
    return [*layers, conv(1, 3072, size // 4, 768, 1), conv(1, 768, size // 4, 19, 1)]


MODELS: dict[str, Callable[[], list[Layer]]] = {
    "resnet50": resnet50,
    "wrn28_10": wrn28_10,
    "vit_b": vit_b,
    "segformer_b5": segformer_b5,
}


@dataclass(frozen=True)
class Result:
    model: str
    layer: str
    density: float
    chosen: bool
    native: float  # seconds, p50
    sparse: float
    native_spread: tuple[float, float]
    sparse_spread: tuple[float, float]
    error: float  # of the two ways, relative

    @property
    def ratio(self) -> float:
        return self.sparse / self.native

    @property
    def run(self) -> float:
        """The ratio of what `weight_grad_pays` chooses."""
        return self.ratio if self.chosen else 1.0


def ways(layer: Layer, x: Compressed, grad: torch.Tensor) -> tuple[Callable[[], torch.Tensor], ...]:
    """Restoring and the native gradient, and from values and bits."""
    if not layer.kernel:
        return (
            lambda: grad.t().mm(decompress(x)),
            lambda: linear_weight_grad(grad, x.values, x.bitmask, layer.inputs, backend="cpu"),
        )
    weight = grad.new_empty(layer.outputs, layer.inputs // layer.groups, layer.kernel, layer.kernel)
    stride, padding, dilation = [layer.stride] * 2, [padding_of(layer)] * 2, [1, 1]

    def native() -> torch.Tensor:
        geometry = (stride, padding, dilation, False, [0, 0], layer.groups)
        return torch.ops.aten.convolution_backward(grad, decompress(x), weight, None, *geometry, [False, True, False])[
            1
        ]

    def sparse() -> torch.Tensor:
        parts = (x.values, x.bitmask, x.shape, x.stride, weight.shape)
        return conv_weight_grad(grad, *parts, stride, padding, dilation, False, layer.groups, backend="cpu")

    return native, sparse


def padding_of(layer: Layer) -> int:
    return layer.kernel // 2 if layer.kernel != layer.stride else 0


def measure(model: str, layer: Layer, density: float, repeats: int) -> Result:
    torch.manual_seed(0)
    if layer.kernel:
        x = torch.randn(layer.batch, layer.inputs, layer.size, layer.size)
        out = (layer.size + 2 * padding_of(layer) - layer.kernel) // layer.stride + 1
        grad = torch.randn(layer.batch, layer.outputs, out, out)
        sizes = (tuple(x.shape), (layer.outputs, layer.inputs // layer.groups, layer.kernel, layer.kernel))
        of_rule = grad
    else:
        x, grad = torch.randn(layer.batch, layer.inputs), torch.randn(layer.batch, layer.outputs)
        sizes = ((1, layer.inputs, layer.batch), (layer.outputs, layer.inputs, 1))
        of_rule = grad.t().unsqueeze(0)
    compressed = compress(x, 1 - density)
    chosen = weight_grad_pays(compressed.kept, of_rule, *sizes, layer.groups)
    both = ways(layer, compressed, grad)
    expected, actual = (way() for way in both)
    error = float((actual - expected).norm() / expected.norm())
    if not error < 1e-5:
        raise SystemExit(
            f"{layer} at density {density}: the two ways differ by {error:.1e}; no time is worth reporting"
        )
    times: tuple[list[float], list[float]] = ([], [])
    begin = time.perf_counter()
    while len(times[0]) < 3 or (len(times[0]) < repeats and time.perf_counter() - begin < BUDGET_SECONDS):
        for way, taken in zip(both, times, strict=True):
            start = time.perf_counter()
            way()
            taken.append(time.perf_counter() - start)
    native, sparse = (spread(taken) for taken in times)
    return Result(
        *(model, str(layer), density, chosen, native.p50, sparse.p50),
        *((native.p20, native.p80), (sparse.p20, sparse.p80), error),
    )


def report(results: list[Result], densities: list[float]) -> str:
    parts = []
    for model in dict.fromkeys(result.model for result in results):
        found = {(r.layer, r.density): r for r in results if r.model == model}
        rows = [
            [layer, f"{found[layer, densities[0]].native * 1e3:.2f}"]
            + [f"{r.ratio:.2f}" if (r := found[layer, d]).chosen else f"({r.ratio:.2f})" for d in densities]
            for layer in dict.fromkeys(r.layer for r in found.values())
        ]
        mean = ["geometric mean", ""]
        mean += [f"{geometric_mean([r.run for r in found.values() if r.density == d]):.2f}" for d in densities]
        heads = [model, "native ms", *(f"density {d:g}" for d in densities)]
        parts.append(tabulate([*rows, mean], heads, disable_numparse=True))
    worst = max((r for r in results if r.chosen), key=lambda r: r.ratio, default=None)
    missed = min((r for r in results if not r.chosen), key=lambda r: r.ratio, default=None)
    if worst is not None:
        parts.append(f"the worst that was chosen: {worst.ratio:.2f}, {worst.model} {worst.layer} at {worst.density:g}")
    if missed is not None:
        parts.append(f"the best that was not: {missed.ratio:.2f}, {missed.model} {missed.layer} at {missed.density:g}")
    return "\n\n".join(parts)


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--densities", default=",".join(map(str, DENSITIES)), help="shares of elements that are kept")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    allocator.return_freed_memory()
    models = arguments.models.split(",")
    if unknown := [model for model in models if model not in MODELS]:
        parser.error(f"--models: no {', '.join(unknown)}; there are {', '.join(MODELS)}")
    densities = [float(density) for density in arguments.densities.split(",")]
    cases = [(m, layer, d) for m in models for layer in dict.fromkeys(MODELS[m]()) for d in densities]
    results = [measure(*case, arguments.repeats) for case in tqdm(cases, unit="case", disable=None)]
    here = environment(torch.device("cpu"))
    print(report(results, densities))
    where = f"{here.device}, {here.instruction_set}, {here.threads} threads"
    print(f"\nfrom values and bits over restoring + native, p50; {where}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
