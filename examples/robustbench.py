"""SURGEON inside RobustBench: error on corrupted CIFAR-10, and RobustBench's own benchmark of an adapting model.

pip install git+https://github.com/RobustBench/robustbench, then: python examples/robustbench.py DATA
"""

import sys
from pathlib import Path

from torch import Tensor, nn

sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]  # of the same name

from robustbench import benchmark  # noqa: E402
from robustbench.data import load_cifar10c  # noqa: E402
from robustbench.utils import clean_accuracy, load_model  # noqa: E402

from surgeon_fx import adapt  # noqa: E402


class Adapting(nn.Module):
    """An adapter as a module: `benchmark` asks for one, and moves it to its device."""

    def __init__(self, adapter: adapt.Adapter) -> None:
        super().__init__()
        self.adapter, self.training = adapter, False

    def forward(self, x: Tensor) -> Tensor:
        return self.adapter(x)


data = sys.argv[1] if len(sys.argv) > 1 else "data"
model = load_model("Standard", dataset="cifar10", threat_model="corruptions")
adapter = adapt.Surgeon(model, lr=2e-5)
for corruption in ("gaussian_noise", "fog", "contrast"):
    x, y = load_cifar10c(n_examples=10_000, severity=5, data_dir=data, corruptions=(corruption,))
    adapter.reset()
    print(f"{corruption}: error {1 - clean_accuracy(adapter, x, y, batch_size=200):.1%}")
adapter.reset()
clean, corrupted = benchmark(
    Adapting(adapter), dataset="cifar10", threat_model="corruptions", data_dir=data, batch_size=200
)
print(f"benchmark: {clean:.1%} clean, {corrupted:.1%} corrupted")
