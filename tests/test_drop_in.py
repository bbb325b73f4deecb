"""The examples inside other people's loops: stand-ins with their interface, and RobustBench itself where it is."""

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from surgeon_fx import adapt, zoo

ROOT = Path(__file__).parents[1]

ROBUSTBENCH = {
    "__init__.py": "from robustbench.eval import benchmark",
    "data.py": """
        import torch

        def load_cifar10c(n_examples, severity, data_dir, shuffle=False, corruptions=()):
            assert data_dir == "there" and severity == 5
            generator = torch.Generator().manual_seed(len(corruptions[0]))
            return torch.rand(24, 3, 32, 32, generator=generator), torch.arange(24) % 10
        """,
    "utils.py": """
        import torch
        from surgeon_fx import zoo

        def load_model(model_name, model_dir="models", dataset="cifar10", threat_model="Linf"):
            torch.manual_seed(0)
            return zoo.create("wrn16_1")

        def clean_accuracy(model, x, y, batch_size=100, device=None):
            right, batch_size = 0, 8  # the images are few
            with torch.no_grad():
                for start in range(0, len(x), batch_size):
                    output = model(x[start : start + batch_size])
                    right += (output.max(1)[1] == y[start : start + batch_size]).sum().item()
            return right / len(x)
        """,
    "eval.py": """
        import torch
        from torch import nn
        from robustbench.data import load_cifar10c
        from robustbench.utils import clean_accuracy

        def benchmark(model, n_examples=10000, dataset="cifar10", threat_model="Linf", data_dir="./data", device=None,
                      batch_size=32, eps=None):
            assert isinstance(model, nn.Module) and not model.training and threat_model == "corruptions"
            model = model.to(device or torch.device("cpu"))
            x, y = load_cifar10c(n_examples, 5, data_dir, corruptions=("fog",))
            return clean_accuracy(model, x, y), clean_accuracy(model, x, y)
        """,
}


def write(folder, files):
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(textwrap.dedent(text))


def test_inside_robustbench(tmp_path):
    write(tmp_path / "robustbench", ROBUSTBENCH)
    command = [sys.executable, str(ROOT / "examples" / "robustbench.py"), "there"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["gaussian_noise", "fog", "contrast", "benchmark"]
    assert all("%" in line for line in lines)


def test_robustbench_itself_takes_an_adapter():
    utils = pytest.importorskip("robustbench.utils", reason="RobustBench is not installed")
    adapter = adapt.Surgeon(zoo.create("wrn16_1"))
    x, y = torch.rand(8, 3, 32, 32), torch.arange(8) % 10
    assert 0 <= utils.clean_accuracy(adapter, x, y, batch_size=4) <= 1
    assert adapter.batches == 2


class Registry:
    """Their way to find a method by its name."""

    def __init__(self):
        self.known = {}

    def register(self, made=None):
        if made is None:
            return self.register
        assert made.__name__ not in self.known
        self.known[made.__name__] = made
        return made


def test_as_methods_of_the_benchmark(monkeypatch):
    registry = Registry()
    monkeypatch.setitem(sys.modules, "utils", SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "utils.registry", SimpleNamespace(ADAPTATION_REGISTRY=registry))
    spec = importlib.util.spec_from_file_location("surgeon_methods", ROOT / "examples" / "test_time_adaptation.py")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert list(registry.known) == ["surgeon", "surgeon_norm", "surgeon_eata", "surgeon_css_cr"]
    x, y = torch.rand(6, 3, 32, 32), torch.arange(6)
    for name, method in registry.known.items():
        for batch in (3, 1):
            cfg = SimpleNamespace(
                OPTIM=SimpleNamespace(LR=1e-2), TEST=SimpleNamespace(BATCH_SIZE=batch, WINDOW_LENGTH=2)
            )
            torch.manual_seed(0)
            model = zoo.create("resnet20_cifar")
            before = model.bn1.weight.clone()
            adapter = method(cfg=cfg, model=model, num_classes=10)
            adapter.reset()
            with torch.no_grad():  # as their loop runs
                found = torch.cat([adapter(part).argmax(1) for part in x.split(batch)])
            assert found.shape == y.shape
            if name in ("surgeon", "surgeon_norm"):  # the others may find no sample certain
                assert not torch.equal(model.bn1.weight, before)
            adapter.reset()
            assert torch.equal(model.bn1.weight, before)
