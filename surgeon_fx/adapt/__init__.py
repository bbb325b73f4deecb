"""Test-time adaptation: methods that take a batch, learn from it without labels and return its predictions.

adapter = surgeon_fx.adapt.Surgeon(model, lr=1e-4)
logits = adapter(x)
"""

from collections.abc import Callable
from functools import partial

from surgeon_fx.adapt.base import Adapter, Step
from surgeon_fx.adapt.cotta import CoTTA
from surgeon_fx.adapt.eager import EATA, SAR, BNStat, Checkpointed, FullTuning, Source, Tent, find_fisher
from surgeon_fx.adapt.ecotta import EcoTTA
from surgeon_fx.adapt.losses import LOSSES, EataLoss, Loss, SarLoss
from surgeon_fx.adapt.mecta import MECTA
from surgeon_fx.adapt.rotta import RoTTA
from surgeon_fx.adapt.sparse import StaticSparsity, Surgeon
from surgeon_fx.adapt.window import Window

METHODS: dict[str, Callable[..., Adapter]] = {
    "source": Source,
    "bn_stat": BNStat,
    "tent": Tent,
    "eata": EATA,
    "sar": SAR,
    "rotta": RoTTA,
    "cotta": CoTTA,
    "mecta": MECTA,
    "mecta_eata": partial(MECTA, loss="eata"),
    "ecotta": EcoTTA,
    "full": FullTuning,
    "full_eata": partial(FullTuning, loss="eata"),
    "checkpoint": Checkpointed,
    "static": StaticSparsity,
    "surgeon": Surgeon,
    "surgeon_norm": partial(Surgeon, norm_only=True),
    "surgeon_eata": partial(Surgeon, loss="eata"),
    "surgeon_norm_eata": partial(Surgeon, norm_only=True, loss="eata"),
    "surgeon_norm_sar": partial(Surgeon, norm_only=True, loss="sar"),
    "surgeon_css": partial(Surgeon, css=True),
    "surgeon_css_cr": partial(Surgeon, css=True, cr=True),
}

__all__ = [
    "EATA",
    "LOSSES",
    "MECTA",
    "METHODS",
    "SAR",
    "Adapter",
    "BNStat",
    "Checkpointed",
    "CoTTA",
    "EataLoss",
    "EcoTTA",
    "FullTuning",
    "Loss",
    "RoTTA",
    "SarLoss",
    "Source",
    "StaticSparsity",
    "Step",
    "Surgeon",
    "Tent",
    "Window",
    "find_fisher",
]
