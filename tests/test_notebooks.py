"""The notebooks run from top to bottom, and what they show is true."""

import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
for package in ("ipykernel", "sklearn", "timm", "matplotlib"):
    pytest.importorskip(package)

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"


def run(name, monkeypatch):
    """What the cells print."""
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    notebook = nbformat.read(FOLDER / name, as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute(cwd=str(FOLDER))
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)  # the plot
    warnings = [output.text for output in outputs if output.get("name") == "stderr"]
    assert not [text for text in warnings if "IProgress not found" not in text]  # tqdm misses ipywidgets
    return "".join(output.text for output in outputs if output.output_type == "stream")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_adaptation(monkeypatch):
    out = run("test_time_adaptation.ipynb", monkeypatch)
    rows = {
        name.strip(): (float(error), float(held))
        for name, error, held in re.findall(r"(?m)^(.{20}) error +([\d.]+) %, held at most +([\d.]+) MiB", out)
    }
    source, eager, pruned = rows["no adaptation"], rows["full tuning, eager"], rows["SURGEON"]
    assert pruned[0] < source[0] - 10
    assert pruned[0] < eager[0] + 5
    assert pruned[1] < 0.6 * eager[1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_fine_tuning(monkeypatch):
    out = run("finetune_under_budget.ipynb", monkeypatch)
    found = re.findall(r"error +([\d.]+) % on 397 digits it has not seen, held ([\d,]+) bytes", out)
    (eager_error, eager_held), (error, held) = ((float(a), int(b.replace(",", ""))) for a, b in found)
    assert 0.95 * (18 << 20) < held <= 18 << 20 < 0.6 * eager_held
    assert error < eager_error + 6 < 20
