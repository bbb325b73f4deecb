"""SURGEON as methods of the benchmark github.com/mariodoebler/test-time-adaptation.

Save this file as classification/methods/surgeon.py there, import it in methods/__init__.py, and run
python test_time.py --cfg cfgs/cifar10_c/source.yaml MODEL.ADAPTATION surgeon OPTIM.LR 2e-5
"""

from functools import partial
from typing import Any

from torch import nn
from utils.registry import ADAPTATION_REGISTRY

from surgeon_fx import adapt


def build(method: str, cfg: Any, model: nn.Module, num_classes: int) -> Any:
    adapter = adapt.METHODS[method](model, lr=cfg.OPTIM.LR)
    return adapt.Window(adapter, cfg.TEST.WINDOW_LENGTH) if cfg.TEST.BATCH_SIZE == 1 else adapter


for name in ("surgeon", "surgeon_norm", "surgeon_eata", "surgeon_css_cr"):
    method = partial(build, name)
    method.__name__ = name  # type: ignore[attr-defined]
    ADAPTATION_REGISTRY.register(method)
