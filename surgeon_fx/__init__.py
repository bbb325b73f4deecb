"""surgeon_fx: train where memory is short."""

from surgeon_fx import kernels, zoo
from surgeon_fx.api import NoEffectWarning, ratios, transform
from surgeon_fx.config import Config
from surgeon_fx.explain import explain
from surgeon_fx.planner import fit, plan
from surgeon_fx.ratio_table import RatioTable

__version__ = "0.1.0"
__all__ = [
    "Config",
    "NoEffectWarning",
    "RatioTable",
    "explain",
    "fit",
    "kernels",
    "plan",
    "ratios",
    "transform",
    "zoo",
]
