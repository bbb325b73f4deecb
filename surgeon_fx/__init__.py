"""surgeon_fx: train where memory is short."""

from surgeon_fx import adapt, kernels, zoo
from surgeon_fx.api import NoEffectWarning, ratios, restore, transform
from surgeon_fx.config import Config
from surgeon_fx.explain import explain
from surgeon_fx.importance import Importance, refresh
from surgeon_fx.losses import entropy
from surgeon_fx.planner import fit, plan
from surgeon_fx.ratio_table import RatioTable

__version__ = "0.2.0"
__all__ = [
    "Config",
    "Importance",
    "NoEffectWarning",
    "RatioTable",
    "adapt",
    "entropy",
    "explain",
    "fit",
    "kernels",
    "plan",
    "ratios",
    "refresh",
    "restore",
    "transform",
    "zoo",
]
