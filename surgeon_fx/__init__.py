"""surgeon_fx: train where memory is short."""

from surgeon_fx import kernels
from surgeon_fx.api import NoEffectWarning, ratios, transform
from surgeon_fx.config import Config
from surgeon_fx.ratio_table import RatioTable

__version__ = "0.1.0"
__all__ = ["Config", "NoEffectWarning", "RatioTable", "kernels", "ratios", "transform"]
