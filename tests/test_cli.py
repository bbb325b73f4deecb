import json

import pytest

from surgeon_fx import __version__, zoo
from surgeon_fx.cli import main
from surgeon_fx.kernels import native


@pytest.mark.skipif(native.unavailable_reason() != "", reason="needs the C kernels")
def test_doctor_names_the_backend_in_use(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert __version__ in out
    assert native.instruction_set() in out
    assert [line.split()[:3] for line in out.splitlines() if line.startswith("cpu ")] == [["cpu", "in", "use"]]


def test_doctor_says_why_the_c_kernels_are_not_in_use(capsys, monkeypatch):
    monkeypatch.setattr(native, "unavailable_reason", lambda: "the C kernels were not built: no gcc")
    assert main(["doctor"]) == 0
    assert "not in use: the C kernels were not built: no gcc" in capsys.readouterr().out


def test_version_and_bad_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.strip() == __version__
    with pytest.raises(SystemExit, match="2"):
        main(["operate"])


def test_models_lists_the_zoo_with_its_parameters(capsys):
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[:3] for line in out.splitlines() if line.startswith("wrn28_10")] == [
        ["wrn28_10", "200x3x32x32", "36,479,194"]
    ]
    assert all(name in out for name in zoo.names())


def test_models_searches_other_packages_too(capsys):
    pytest.importorskip("timm")
    pytest.importorskip("torchvision")
    assert main(["models", "ResNet50"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert {"tv:resnet50", "tv:wide_resnet50_2", "seresnet50"} <= set(out)
    assert [line.split()[0] for line in out if line.startswith("resnet50 ")] == ["resnet50"]
    assert not any("wrn28_10" in line for line in out)


def test_models_suggests_the_nearest(capsys):
    assert main(["models", "segfromer_b5"]) == 1
    assert "did you mean segformer_b5" in capsys.readouterr().err


def test_json_for_machines(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["environment"]["surgeon-fx"] == __version__
    assert {row["backend"] for row in found["kernels"]["cpu"]} == {"reference", "cpu", "triton", "torch"}
    assert main(["models", "wrn28", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["zoo"] == [{"name": "wrn28_10", "input": [200, 3, 32, 32], "parameters": 36479194}]
    assert main(["models", "nosuchmodel", "--json"]) == 1


def test_plan_is_the_command_of_the_bench(capsys):
    assert main(["plan", "--model", "resnet20_cifar", "--batch", "2", "--method", "tent"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("resnet20_cifar at 2x3x32x32, float32\n")
    assert "TENT, norm layers" in out
    assert "full tuning" not in out
