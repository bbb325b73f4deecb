"""Other views of a batch: CoTTA's augmentation, drawn once for the whole batch, and that of EcoTTA's warm-up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surgeon_fx.zoo.external import require

JITTER = {
    "brightness": (0.6, 1.4),
    "contrast": (0.7, 1.3),
    "saturation": (0.5, 1.5),
    "hue": (-0.06, 0.06),
    "gamma": (0.7, 1.3),
}
OF_COLOR = ("saturation", "hue")  # three channels only
DEGREES, SHIFT, SCALE, BLUR, NOISE = 15.0, 1 / 16, (0.9, 1.1), (0.001, 0.5), 0.005


def augment(x: Any, generator: torch.Generator) -> Any:
    """Jitter in a random order, a small affine move, blur, a flip, noise. Images N x C x H x W, pixels in [0, 1].

    Of a batch with names, such as {"pixel_values": ...}, the images are changed and the rest stays as it is.
    """
    if isinstance(x, Mapping):
        names = [name for name, value in x.items() if isinstance(value, Tensor) and value.dim() == 4]
        if len(names) != 1:
            raise ValueError(
                "the default augmentation is for one tensor of images, N x C x H x W, in a batch; "
                f"pass augment= for a batch of {', '.join(map(str, x))}"
            )
        return {**x, names[0]: augment(x[names[0]], generator)}
    _check(x)
    transforms = require("torchvision.transforms.v2.functional")

    def draw(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator))

    names = list(JITTER)
    for index in torch.randperm(len(names), generator=generator).tolist():
        name = names[index]
        factor = draw(*JITTER[name])
        if name == "gamma":
            x = transforms.adjust_gamma(x.clamp(1e-8, 1), factor)
        elif name not in OF_COLOR or x.shape[1] == 3:
            x = getattr(transforms, f"adjust_{name}")(x, factor)
    height, width = x.shape[2:]
    padded = F.pad(x, [width // 2, width // 2, height // 2, height // 2], mode="replicate")
    x = transforms.affine(
        padded,
        angle=draw(-DEGREES, DEGREES),
        translate=[round(draw(-SHIFT, SHIFT) * size) for size in (width, height)],
        scale=draw(*SCALE),
        shear=[0.0, 0.0],
        interpolation=transforms.InterpolationMode.BILINEAR,
    )
    if min(height, width) > 2:
        x = transforms.gaussian_blur(x, [5, 5], [draw(*BLUR)] * 2)
    x = transforms.center_crop(x, [height, width])
    if draw(0, 1) < 0.5:
        x = x.flip(3)
    noise = torch.randn(x.shape, generator=generator).to(x)
    return (x + NOISE * noise).clamp(0, 1)


def jitter(x: Tensor, generator: torch.Generator) -> Tensor:
    """Colors changed in some images, others blurred or grey: 0.4, 0.2 and 0.1 of them. Pixels in [0, 1]."""
    _check(x)
    transforms = require("torchvision.transforms.v2.functional")

    def draw(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator))

    def some(share: float) -> Tensor:
        return (torch.rand(len(x), generator=generator) < share).view(-1, 1, 1, 1).to(x.device)

    changed = x
    for name in ("brightness", "contrast", "saturation"):
        changed = getattr(transforms, f"adjust_{name}")(changed, draw(0.6, 1.4))
    changed = transforms.adjust_hue(changed, draw(-0.1, 0.1)) if x.shape[1] == 3 else changed
    x = torch.where(some(0.4), changed, x)
    x = torch.where(some(0.2), transforms.gaussian_blur(x, [3, 3], [draw(0.1, 2.0)] * 2), x)
    return torch.where(some(0.1), x.mean(1, keepdim=True).expand_as(x), x)


def _check(x: Tensor) -> None:
    if not isinstance(x, Tensor) or x.dim() != 4 or not x.is_floating_point():
        found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"the default augmentation is for images, N x C x H x W; pass augment= for {found}")
    if x.min() < 0 or x.max() > 1:
        raise ValueError(
            "the default augmentation is for pixels in [0, 1]: put the normalisation inside the model, or pass augment="
        )
