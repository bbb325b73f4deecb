import re
import subprocess
import sys
from pathlib import Path

import memory_plan
import paper_figures
import pytest
from memory_plan import main

from surgeon_fx import zoo

SCRIPT = Path(__file__).parents[2] / "bench" / "memory_plan.py"
SMALL = ["--model", "resnet20_cifar", "--batch", "2"]


def test_every_static_figure_of_the_paper(capsys):
    assert main(["--all-paper"]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if re.match(r"\w+ +\d+x3x", line)]
    assert len(rows) == 18
    assert all(abs(float(row[-1])) <= 1 for row in rows)
    assert ["resnext29", "8x3x32x32", "checkpointing", "62.1", "62.1"] in [row[:-1] for row in rows]
    assert out.strip().endswith("all within 1 MiB")


def test_a_figure_that_is_off_is_a_failure(capsys, monkeypatch):
    monkeypatch.setattr(paper_figures, "PUBLISHED", {"wrn28_10": {"source": 123.0}})
    assert main(["--all-paper"]) == 1
    assert "NOT all within 1 MiB" in capsys.readouterr().out


def test_the_papers_figures_are_shown_at_its_input_alone(capsys):
    arguments = ["--model", "wrn28_10", "--method", "source"]
    assert main(arguments) == 0
    assert re.search(r"(?m)^Source, no gradients +125.0 +125 ", capsys.readouterr().out)
    assert main([*arguments, "--batch", "2"]) == 0
    assert "published" not in capsys.readouterr().out


def test_verify_finds_the_same_integers(capsys):
    assert main([*SMALL, "--method", "full", "--verify"]) == 0
    out = capsys.readouterr().out
    rows = [re.split(r"  +", line) for line in out.splitlines() if "  equal  " in line or "NOT EQUAL" in line]
    assert [row[0] for row in rows] == [
        *("TENT, norm layers", "full tuning", "static 50 %", "static 90 %", "SURGEON, by memory term")
    ]
    assert all(row[1] == row[2] and abs(float(row[6].split()[0])) <= 3 for row in rows)


def test_verify_says_when_it_is_off(capsys, monkeypatch):
    monkeypatch.setattr(memory_plan, "retained_bytes", lambda outputs, model: 1)
    assert main([*SMALL, "--method", "full", "--verify"]) == 1
    assert "NOT EQUAL" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("shape", "saved_mib", "smaller"),
    [
        ((200, 3, 32, 32), 290, (200, 3, 32, 32)),
        ((200, 3, 32, 32), 5000, (20, 3, 32, 32)),
        ((1, 3, 540, 960), 3540, (1, 3, 128, 224)),
        ((2, 3, 1080, 1920), 11000, (2, 3, 128, 224)),
    ],
)
def test_verify_takes_a_size_that_fits(shape, saved_mib, smaller):
    assert memory_plan.shape_that_fits(shape, saved_mib << 20) == smaller


def test_the_script_runs():
    command = [sys.executable, str(SCRIPT), "--model", "wrn16_1", "--batch", "1", "--method", "source"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.startswith("wrn16_1 at 1x3x32x32, float32\n")
    assert "wrn16_1" in zoo.names()
