"""The examples and the demo run as a reader runs them, and show what they promise."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
ROOT = Path(__file__).parents[1]


def run(script, *arguments):
    command = [sys.executable, str(ROOT / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(pattern, text):
    """What the pattern's groups match, as numbers, one row per match."""
    return [[float(n.replace(",", "")) for n in found.groups()] for found in re.finditer(pattern, text)]


def test_a_timm_model_adapts_and_holds_less():
    out = run("examples/adapt_timm_model.py")
    assert re.findall(r"^(\w+)\((?:transformed )?Normalised, trains", out, re.MULTILINE) == ["FullTuning", "Surgeon"]
    entropies = numbers(r"predictions: ([\d.]+) at the first batch, ([\d.]+) at the last", out)
    assert len(entropies) == 2
    assert all(last < first - 0.01 for first, last in entropies)
    assert entropies[0][0] == entropies[1][0]  # the forward is eager's
    (eager,), (pruned,) = numbers(r"backward: ([\d.]+) MiB", out)
    assert pruned < 0.5 * eager


def test_fine_tuning_stays_within_its_budget():
    out = run("examples/finetune_under_budget.py")
    losses = [loss for (loss,) in numbers(r"loss ([\d.]+)", out)]
    assert losses[-1] < 0.3 * losses[0]
    ((budget, held, eager),) = numbers(r"budget ([\d,]+) bytes, held at most ([\d,]+); eager holds ([\d,]+)", out)
    assert budget == 12 << 20
    assert 0.99 * budget < held <= budget < 0.5 * eager


def test_a_loss_optimizer_and_schedule_of_ones_own():
    out = run("examples/own_loss.py")
    rows = numbers(r"loss ([+-][\d.]+), next learning rate ([\d.]+)", out)
    losses, rates = zip(*rows, strict=True)
    assert losses[-1] < losses[0] - 0.1
    assert list(rates) == sorted(rates, reverse=True)
    assert rates[-1] == 0
    ratios = [ratio for (ratio,) in numbers(r"(?m)^\d .* ([\d.]+)$", out)]
    assert len(ratios) == 4  # of the layers that are trained
    assert min(ratios) == 0 < max(ratios) < 1


def test_the_demo_in_small():
    out = run("bench/demo.py", "--quick")
    assert len(out.splitlines()) < 60
    assert max(map(len, out.splitlines())) < 110
    (eager_held, eager_peak), (held, peak) = numbers(r"(?m)^(?:eager|transformed.*?) {2,}(\d+) +(\d+)$", out)
    assert held < 0.3 * eager_held
    assert peak < eager_peak
    ((right, seen),) = numbers(r"digits: ([\d.]+) % of (\d+) it has not seen", out)
    assert right > 90
    assert seen == 200
    row = r"(?m)^{} +([\d.]+) +(\d+) +(\d+) +([\d.]+) +([\d.]+)$"
    if "not measured" in out:
        pytest.skip("resident memory cannot be read here")
    found = {name: numbers(row.format(name), out)[0] for name in ("no adaptation", "full tuning, eager", "SURGEON")}
    assert found["SURGEON"][0] < found["no adaptation"][0] - 10
    assert found["SURGEON"][0] < found["full tuning, eager"][0] + 5
    assert found["SURGEON"][1] < 0.5 * found["full tuning, eager"][1]
    assert found["SURGEON"][2] < 0.9 * found["full tuning, eager"][2]
    assert found["full tuning, eager"][3] == 1
    assert "█ " in out
