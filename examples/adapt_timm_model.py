"""Adapt a timm model to images it was not trained for, and see what backward holds."""

import timm
import torch
from torch import Tensor, nn

from surgeon_fx import adapt, entropy
from surgeon_fx.retained import retained_bytes


class Normalised(nn.Module):
    """Takes pixels in [0, 1], as streams of images have them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(model.pretrained_cfg[name]).view(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.model((x - self.mean) / self.std)


def build() -> nn.Module:
    torch.manual_seed(0)
    # pretrained=True downloads weights that know ImageNet.
    return Normalised(timm.create_model("resnet18", pretrained=False, num_classes=10))


def images() -> list[Tensor]:
    """Stands in for your stream: smooth random pictures under noise."""
    generator = torch.Generator().manual_seed(0)
    pictures = torch.rand(16, 3, 6, 6, generator=generator)
    pictures = nn.functional.interpolate(pictures, size=64, mode="bicubic")
    return [(pictures + 0.1 * torch.randn(pictures.shape, generator=generator)).clamp(0, 1) for _ in range(6)]


for method in (adapt.FullTuning, adapt.Surgeon):
    adapter = method(build(), lr=3e-4)
    held: list[int] = []
    adapter.model.register_forward_hook(lambda model, args, out, held=held: held.append(retained_bytes(out, model)))
    entropies = [entropy(adapter(x)).item() for x in images()]
    print(adapter)
    print(f"  entropy of the predictions: {entropies[0]:.3f} at the first batch, {entropies[-1]:.3f} at the last")
    print(f"  held for backward: {max(held) / 2**20:.1f} MiB")
