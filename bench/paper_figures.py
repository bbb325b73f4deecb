"""The paper's memory figures that follow from shapes, and what the planner finds for them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from common import MIB
from tabulate import tabulate

from surgeon_fx import plan, zoo
from surgeon_fx.modules import blocks
from surgeon_fx.planner.arithmetic import LayerInput
from surgeon_fx.planner.methods import build, paper_bytes

# The paper's figures in MiB, at the input each model is meant for. All but SURGEON's follow from shapes.
PUBLISHED: dict[str, dict[str, float]] = {
    "wrn28_10": {"source": 125, "bn_stat": 125, "tent": 1762, "full": 3697, "surgeon": 325},
    "resnext29": {"source": 200, "bn_stat": 200, "tent": 2725, "full": 5403, "surgeon": 820},
    "resnet50": {"source": 196, "bn_stat": 196, "tent": 2714, "full": 5317, "surgeon": 1125},
    "deeplabv3plus_r50": {"source": 301, "bn_stat": 301, "tent": 4646, "full": 9974, "surgeon": 1403},
    "segformer_b5": {"source": 380, "bn_stat": 380, "full": 2793, "surgeon": 380},
}
JETSON_BATCH = 8  # of its table for ResNeXt-29
JETSON = {"source": 8.0, "tent": 109.0, "full": 216.0, "checkpointing": 62.1}
STATIC = ("source", "tent", "full", "checkpointing")


def checkpointing_bytes(layers: Iterable[LayerInput], blocks: Collection[str]) -> int:
    """Checkpointing with a block as the unit: inputs of the blocks before, and every layer input of the one at work."""
    units: list[tuple[str, int, int]] = []  # name, first input, all inputs
    for layer in layers:
        # The stem and the head are units too, without a name.
        name = next((block for block in blocks if f"{layer.layer}.".startswith(f"{block}.")), "")
        if units and units[-1][0] == name:
            units[-1] = (name, units[-1][1], units[-1][2] + layer.bytes)
        else:
            units.append((name, layer.bytes, layer.bytes))
    return max(
        (sum(first for _, first, _ in units[:i]) + whole for i, (_, _, whole) in enumerate(units)),
        default=0,
    )


def all_paper() -> int:
    """Every static figure of the paper against what the shapes give: 0 where all agree to 1 MiB."""
    rows, worst = [], 0.0
    cases = [(name, zoo.input_shape(name), figures) for name, figures in PUBLISHED.items()]
    cases.append(("resnext29", (JETSON_BATCH, *zoo.input_shape("resnext29")[1:]), JETSON))
    for name, shape, figures in cases:
        model = build(name).eval()
        found = plan(model, shape, train=lambda name, parameter: False)
        for method in STATIC:
            if method in figures:
                checkpointed = method == "checkpointing"
                size = checkpointing_bytes(found.layers, blocks(model)) if checkpointed else paper_bytes(method, found)
                ours = size / MIB
                worst = max(worst, abs(ours - figures[method]))
                title = {"source": "Source, BN-stat", "tent": "TENT", "full": "full tuning, CoTTA"}.get(method, method)
                cells = [name, "x".join(map(str, shape)), title, f"{figures[method]:g}", f"{ours:.1f}"]
                rows.append([*cells, f"{ours - figures[method]:+.2f}"])
    print(tabulate(rows, ["model", "input", "method", "paper", "ours", "difference"], disable_numparse=True))
    print(f"MiB; {len(rows)} figures, the largest difference is {worst:.2f} MiB:", end=" ")
    print("all within 1 MiB" if worst <= 1 else "NOT all within 1 MiB")
    return 0 if worst <= 1 else 1
