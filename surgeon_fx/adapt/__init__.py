"""Test-time adaptation: methods that take a batch, learn from it without labels and return its predictions.

adapter = surgeon_fx.adapt.Surgeon(model, lr=1e-4)
logits = adapter(x)
"""

from collections.abc import Callable
from functools import partial

from surgeon_fx.adapt.base import Adapter, Step
from surgeon_fx.adapt.methods import BNStat, Checkpointed, FullTuning, Source, StaticSparsity, Surgeon, Tent

METHODS: dict[str, Callable[..., Adapter]] = {
    "source": Source,
    "bn_stat": BNStat,
    "tent": Tent,
    "full": FullTuning,
    "checkpoint": Checkpointed,
    "static": StaticSparsity,
    "surgeon": Surgeon,
    "surgeon_norm": partial(Surgeon, norm_only=True),
    "surgeon_css": partial(Surgeon, css=True),
    "surgeon_css_cr": partial(Surgeon, css=True, cr=True),
}

__all__ = [
    "METHODS",
    "Adapter",
    "BNStat",
    "Checkpointed",
    "FullTuning",
    "Source",
    "StaticSparsity",
    "Step",
    "Surgeon",
    "Tent",
]
