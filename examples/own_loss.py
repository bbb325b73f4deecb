"""Adapt with a loss, an optimizer and a schedule of your own."""

import torch
from torch import Tensor, nn

from surgeon_fx import adapt
from surgeon_fx.losses import entropies


def balanced(logits: Tensor) -> Tensor | None:
    """Sure predictions that are not all the same: low entropy of each, high entropy of their mean (SHOT).

    None says that a batch has nothing to learn from: here, where every prediction is sure already.
    """
    each = entropies(logits)
    if each.max() < 0.01:
        return None
    mean = logits.softmax(1).mean(0)
    return each.mean() + (mean * mean.log()).sum()


torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
    *(nn.Flatten(), nn.Linear(64, 10)),
)
adapter = adapt.Surgeon(
    model,
    loss=balanced,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20),
    train=lambda name, parameter: not name.startswith("0."),  # the first convolution stays as it is
)
print(adapter)

pictures = nn.functional.interpolate(torch.rand(64, 3, 4, 4), size=32, mode="bilinear")
for step in range(20):
    adapter((pictures + 0.05 * torch.randn(pictures.shape)).clamp(0, 1))
    if step % 5 == 0 or step == 19:
        rate = adapter.optimizer.param_groups[0]["lr"]
        print(f"batch {step:2}: loss {adapter.last.loss:+.3f}, next learning rate {rate:.4f}")

print(adapter.importance)  # of the last batch: what each layer's activation is worth, and the ratio p that follows
adapter.reset()  # weights, optimizer and schedule as they were
