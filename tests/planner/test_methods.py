"""`surgeon-fx plan`: the memory of every method, side by side."""

import io
import json
import re

import pytest
import torch

from surgeon_fx import commands
from surgeon_fx.cli import main
from surgeon_fx.planner import methods

SMALL = ["plan", "--model", "resnet20_cifar", "--batch", "2"]


def table(out):
    return {cells[0]: cells[1:] for line in out.splitlines() if len(cells := re.split(r"  +", line)) > 1}


def test_the_default_table_has_a_row_per_method_and_ten_tensors(capsys):
    assert main(["plan", "--model", "resnet20_cifar"]) == 0
    out = capsys.readouterr().out
    rows = table(out)
    assert rows["Source, no gradients"][:2] == rows["BN-stat, no gradients"][:2] == ["12.5", "0.00"]
    assert rows["TENT, norm layers"][0] == "143.8"
    assert rows["full tuning"][0] == "286.8"
    assert rows["static 50 %"][0] == "143.4"
    saved = [float(rows[name][1]) for name in ("full tuning", "static 50 %", "static 90 %")]
    assert saved == sorted(saved, reverse=True)
    assert "SURGEON, by memory term" in rows
    assert len(out[out.index("the 10 largest of") :].splitlines()) == 13


def test_memory_ratios_are_the_papers_formula():
    def layer(name, numel):
        return methods.LayerInput(name, "product", numel, 4, 0)

    found = methods.memory_ratios([layer("a", 900), layer("b", 100)], ["a", "b", "unused"])
    a, b = -torch.tensor([0.9, 0.1]).log()
    assert found["a"] == pytest.approx(float(1 - a / b))
    assert found["b"] == found["unused"] == 0


def test_ratios_of_a_file_and_of_a_budget(capsys, tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"layer1.0.conv1": 0.75}))
    assert main([*SMALL, "--method", "surgeon", "--ratios", str(file)]) == 0
    assert "SURGEON, ratios of mine.json" in capsys.readouterr().out
    file.write_text(json.dumps({"layer1.0.conv9": 0.75}))
    assert main([*SMALL, "--method", "surgeon", "--ratios", str(file)]) == 2
    assert "layer1.0.conv9" in capsys.readouterr().err
    assert main([*SMALL, "--method", "surgeon", "--budget", "1MiB", "--json", str(tmp_path / "all.json")]) == 0
    assert "SURGEON, within 1MiB" in capsys.readouterr().out
    found = json.loads((tmp_path / "all.json").read_text())
    assert found["methods"][0]["plan"]["saved_bytes"] == found["fit"]["saved_bytes"] <= 1 << 20
    assert main([*SMALL, "--budget", "1KiB"]) == 2
    assert "cannot be met" in capsys.readouterr().err


def test_html_and_json_are_written(capsys, tmp_path):
    page, file = tmp_path / "plan.html", tmp_path / "plan.json"
    assert main([*SMALL, "--method", "full,static", "--ratio", "0.7", "--html", str(page), "--json", str(file)]) == 0
    assert "static 70 %" in capsys.readouterr().out
    assert 'class="peak-label' in page.read_text()
    found = json.loads(file.read_text())
    assert [one["title"] for one in found["methods"]] == ["full tuning", "static 70 %"]


def test_half_precision_takes_half(capsys):
    assert main([*SMALL, "--method", "full"]) == 0
    full = table(capsys.readouterr().out)["full tuning"]
    assert main([*SMALL, "--method", "full", "--dtype", "bfloat16"]) == 0
    assert float(table(capsys.readouterr().out)["full tuning"][0]) == pytest.approx(float(full[0]) / 2, abs=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "segfromer_b5"], "did you mean segformer_b5"),
        (["--model", "nobody:resnet"], "must start with one of"),
    ],
)
def test_a_name_nobody_has_is_no_traceback(arguments, message, capsys):
    assert main(["plan", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err


def test_text_models_are_planned_by_the_shape_of_their_tokens(capsys):
    pytest.importorskip("transformers")
    assert main(["plan", "--model", "hf:bert"]) == 2
    assert "no image size: give the shape of an input, as --shape 8x128 does" in capsys.readouterr().err
    assert main(["plan", "--model", "hf:distilbert", "--shape", "2x16", "--method", "full,static"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("hf:distilbert at 2x16, float32\n")
    rows = table(out)
    assert float(rows["static 90 %"][1]) < 0.7 * float(rows["full tuning"][1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "-3"], "--batch: must be a whole number of 1 or more, got '-3'"),
        (["--batch", "two"], "--batch: must be a whole number of 1 or more, got 'two'"),
        (["--size", "axb"], "--size: must be a size like 224 or 540x960, got 'axb'"),
        (["--ratio", "1.5"], "--ratio: must be a ratio from 0 (keep everything) to 1"),
        (["--shape", "8x"], "--shape: must be a shape with its batch"),
        (["--serve", "high"], "--serve: must be a port from 0 to 65535"),
    ],
)
def test_options_that_make_no_sense_are_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*SMALL, *arguments])
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert message in err


def test_a_size_the_model_refuses_is_one_line(capsys):
    pytest.importorskip("timm")
    for method in ("full", "surgeon"):  # planned as it is, and captured
        assert main(["plan", "--model", "vit_tiny_patch16_224", "--size", "97", "--method", method]) == 2
        err = capsys.readouterr().err
        assert len(err.splitlines()) == 1
        assert "vit_tiny_patch16_224 does not take an input of 1x3x97x97: Input height" in err
        assert "its usual input is 1x3x224x224" in err
    assert main([*SMALL, "--shape", "2x3x32x32"]) == 2
    assert "--shape is the whole input" in capsys.readouterr().err


def test_json_alone_on_standard_output(capsys):
    assert main([*SMALL, "--method", "full", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["methods"][0]["title"] == "full tuning"
    assert err == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_has_the_time_left_and_is_silent_where_nobody_looks(monkeypatch):
    clock = iter([0.0, 0.0, 3.0, 6.0])
    monkeypatch.setattr(commands.time, "monotonic", lambda: next(clock))
    out = Terminal()
    progress = commands.Progress(3, out=out)
    for what in ("one", "two", "three"):
        progress.step(what)
    assert [line.removeprefix("\x1b[K") for line in out.getvalue().split("\r")[1:]] == [
        *("[1/3] one", "[2/3] two, about 6 s left", "[3/3] three, about 3 s left")
    ]
    for quiet, out in ((True, Terminal()), (False, io.StringIO())):
        monkeypatch.setattr(commands.time, "monotonic", lambda: 0.0)
        commands.Progress(1, quiet, out).step("one")
        assert out.getvalue() == ""


def test_unknown_methods_are_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--method", "magic"])
    assert "no method is called 'magic'" in capsys.readouterr().err
