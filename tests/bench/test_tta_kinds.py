"""`bench/tta.py` over other streams, with source data, on road scenes, and after an interruption."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import tta_measure
import tta_runs
import tta_source
from common import read_rows
from PIL import Image
from stream_cases import camvid, cifar, picture, samples
from torch import nn
from tta import main
from tta_runs import Setting, Trial

from surgeon_fx import adapt
from surgeon_fx.adapt import METHODS
from surgeon_fx.zoo.registry import ENTRIES, Entry

REAL = Path(__file__).parents[3] / "shared" / "data"
JSON = ["--json", "tta.jsonl", "--no-measure"]


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(channels, 6, 3, padding=1), nn.BatchNorm2d(6)

    def forward(self, x):
        return self.bn(self.conv(x)).relu()


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.fc = nn.Sequential(Block(3), Block(6)), nn.Linear(6, 7)
        nn.init.normal_(self.fc.weight, std=3.0)

    def forward(self, x):
        return self.fc(self.blocks(x).mean((2, 3)))


class Road(nn.Module):
    """Maps at half the size, in a dict."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 11, 1))

    def forward(self, x):
        return {"logits": self.body(x)}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tta_source, "RESULTS", tmp_path / "results")
    monkeypatch.setitem(ENTRIES, "tiny", Entry("tiny", Tiny, (4, 3, 16, 16), 7, ""))
    monkeypatch.setitem(ENTRIES, "road", Entry("road", Road, (1, 3, 32, 48), 11, ""))
    cifar(tmp_path / "data", labels=np.arange(10) % 7)
    for i, name in enumerate(("fog", "gaussian_noise", "clean")):
        images = np.random.default_rng(i).integers(0, 256, (10, 16, 16, 3), dtype=np.uint8)
        np.save(tmp_path / "data" / f"{name}.npy", images)
    return tmp_path


def run(*arguments, model="tiny", data="data"):
    return main(["--data", data, "--model", model, *JSON, *arguments])


def rows(metric="error"):
    return [row for row in read_rows(Path("tta.jsonl"), "tta") if row.metric == metric]


@pytest.mark.parametrize("kind", ["reset", "gradual", "mixed", "correlated:0.1"])
def test_streams(kind, folder, capsys):
    for name in ("a", "b"):
        assert run("--stream", kind, "--method", "surgeon,tent", "--lr", "1e-2", "--json", f"{name}.jsonl") == 0
    first, second = ([(r.provider, r.p50, r.case) for r in read_rows(Path(f"{n}.jsonl"), "tta")] for n in "ab")
    assert first == second
    assert f"{kind} stream" in capsys.readouterr().out
    assert first[0][2]["setting"]["stream"] == kind
    names = {case["corruption"] for _, _, case in first}
    assert names == ({"mixed"} if kind == "mixed" else {"fog", "gaussian_noise"})
    count = {"gradual": 9 * 3, "mixed": 5}.get(kind, 3)
    assert {len(case["batch_errors"]) for _, _, case in first if "batch_errors" in case} == {count}


def test_a_reset_before_each_corruption(folder, monkeypatch):
    called = []
    monkeypatch.setattr(adapt.Tent, "reset", lambda self: called.append(1))
    assert run("--method", "tent") == 0
    assert not called
    assert run("--method", "tent", "--stream", "reset", "--rounds", "2") == 0
    assert len(called) == 3  # of four domains


def test_images_one_by_one_in_a_window(folder, capsys):
    assert run("--method", "tent,surgeon", "--batch", "1", "--window", "4") == 0
    assert "a window of 4" in capsys.readouterr().out
    assert {len(row.case["batch_errors"]) for row in rows()} == {10}
    assert all("the window waits" in row.note for row in rows())
    assert [len(row.case["batches"]) for row in rows("ratios")] == [2, 3]  # of twenty samples, every fourth
    assert run("--window", "4") == 2
    assert "add --batch 1" in capsys.readouterr().err


def test_an_interrupted_run_goes_on_where_it_stopped(folder, monkeypatch):
    arguments = ["--lr", "1e-2", "--rounds", "2", "--method"]
    for method in ("surgeon_eata", "cotta", "rotta", "mecta", "sar"):
        assert run(*arguments, method) == 0
        whole = [(row.p50, row.case) for row in rows()]
        calls = []

        def stops(self, trial, metric, name, *rest, calls=calls, real=tta_runs.Runner._write):
            calls.append(name)
            if len(calls) == 3:
                raise KeyboardInterrupt
            real(self, trial, metric, name, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(tta_runs.Runner, "_write", stops)
            assert run(*arguments, method) == 130  # as a shell counts an interrupt
        assert len(rows()) == 2
        assert Path("tta.state.pt").exists()
        batches = []

        def counted(self, x, batches=batches, real=adapt.Adapter.__call__):
            batches.append(1)
            return real(self, x)

        with monkeypatch.context() as patch:
            patch.setattr(adapt.Adapter, "__call__", counted)
            assert run(*arguments, method, "--resume") == 0
        assert len(batches) == 6  # two domains of four
        assert [(row.p50, row.case) for row in rows()] == whole, method
        assert not Path("tta.state.pt").exists()


def source(path, count=12):
    """Images as JPEG bytes, with offsets and labels."""
    data, offsets = b"", [0]
    for i in range(count):
        file = path.with_suffix(".jpg")
        Image.fromarray(np.random.default_rng(i).integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(file)
        data += file.read_bytes()
        offsets.append(len(data))
    np.savez(path, data=np.frombuffer(data, dtype=np.uint8), offsets=offsets, labels=np.arange(count) % 7)
    return path


def test_source_data_for_those_that_ask_for_it(folder, monkeypatch):
    source(folder / "source.npz")
    options = ["--source", "source.npz", "--method", "eata,ecotta", "--warm-up-epochs", "1"]
    monkeypatch.setitem(METHODS, "ecotta", lambda model, **options: adapt.EcoTTA(model, parts=2, **options))
    seen = []
    real = adapt.EcoTTA.warm_up
    monkeypatch.setattr(adapt.EcoTTA, "warm_up", lambda self, *a, **o: (seen.append(1), real(self, *a, **o))[1])
    assert run(*options) == 0
    first = [(row.provider, row.p50) for row in rows()]
    assert {row.provider: row.case["options"] for row in rows()} == {
        "eata": {"fisher_samples": 2000},
        "ecotta": {"warm_up_epochs": 1, "warm_up_limit": None},
    }
    assert run(*options) == 0
    assert [(row.provider, row.p50) for row in rows()] == first
    assert len(seen) == 1  # the second run finds what the first has learnt
    setting = Setting("data", "tiny", None, 4, None, 5, None, None, None, "given", "cpu", source="source.npz")
    for method in ("eata", "mecta_eata", "full_eata", "surgeon_eata", "surgeon_norm_eata"):
        adapter = Trial(method, {"fisher_samples": 8}, 1e-3, 0).adapter(setting.build(), setting)
        assert set(adapter.loss.fisher) == set(adapter.trained), method
        assert any(weight.abs().max() > 0 for weight, _ in adapter.loss.fisher.values())
    assert run("--method", "ecotta") == 2


def test_what_each_method_holds(folder, monkeypatch):
    """By one meter: what backward keeps, and MECTA's own count beside it."""
    source(folder / "source.npz")
    monkeypatch.setitem(METHODS, "ecotta", lambda model, **options: adapt.EcoTTA(model, parts=2, **options))
    setting = Setting("data", "tiny", None, 8, None, 5, None, None, None, "given", "cpu", source="source.npz")
    found = {}
    small = {"ecotta": {"warm_up_epochs": 1}, "mecta": {"ratio": 0.5}, "rotta": {"capacity": 8}}
    for method in ("tent", "eata", "sar", "rotta", "cotta", "mecta", "ecotta", "full", "surgeon_eata"):
        trial = Trial(method, small.get(method, {}), None, 0)
        worker = tta_measure.Worker(setting, trial, torch.get_num_threads())
        worker.turn("warm")
        found[method] = worker.turn("count")
    held = {method: one["held"] for method, one in found.items()}
    assert held["cotta"] == held["full"]  # teacher and source model hold nothing
    assert held["eata"] == held["tent"]
    assert 0 < held["surgeon_eata"] < held["full"]
    assert held["mecta"] < held["tent"]
    kept = 2 * 3 * 8 * 16 * 16 * 4  # half of six channels in two norms
    assert found["mecta"]["paper_cache"] == kept < held["mecta"]
    assert held["ecotta"] > 0
    assert held["sar"] == held["tent"]
    assert found["cotta"]["gflops"] > 10 * found["full"]["gflops"]
    assert held["rotta"] > 0


def test_source_data_of_every_kind(folder):
    x, y = tta_source.read_source(samples(folder / "samples"), 4)
    assert x.shape == (4, 3, 224, 224)
    assert sorted(y.tolist()) == [0, 7, 21, 28]  # spread over the folder
    for value, name in enumerate(("cat", "dog")):
        picture(folder / "classes" / name / "a.jpg", (224, 224), (100 * value,) * 3)
    x, y = tta_source.read_source(folder / "classes", None)
    assert sorted(zip(x[:, 0, 0, 0].tolist(), y.tolist(), strict=True)) == [(0, 0), (100, 1)]
    x, y = tta_source.read_source(camvid(folder / "camvid"), 2)
    assert x.shape == (2, 3, 240, 320)
    assert x.dtype == torch.uint8
    with pytest.raises(ValueError, match="--source must be"):
        tta_source.read_source(folder / "data", None)


def test_road_scenes_by_domain_and_round(folder, capsys):
    camvid(folder / "camvid", count=2)
    command = ["--size", "32x48", "--rounds", "2", "--lr", "1e-3", "--source", "camvid"]
    methods = "source,tent,eata,cotta,full,surgeon,surgeon_norm_eata"
    assert run(*command, "--method", methods, model="road", data="camvid") == 0
    out = capsys.readouterr().out
    assert "severity 5, test split, 2 rounds" in out
    assert "online mIoU in %" in out
    assert "mean over the domains, round by round" in out
    found = {(row.provider, row.case["corruption"]): 100 - row.p50 for row in rows()}
    days = (found["source", "day"] + found["source", "day@2"]) / 2
    assert re.search(rf"^source +{days:.1f} ", out, re.MULTILINE)
    assert len(found) == 7 * 10
    assert run(*command, "--method", "rotta", model="road", data="camvid") == 2
    assert "classes of pixels" in capsys.readouterr().err
    assert run(*command, "--method", "tent", "--plot", "plots/", model="road", data="camvid") == 0
    assert [path.name for path in Path("plots").iterdir()] == ["errors.png"]
    few = ["--size", "32x48", "--limit", "1", "--corruptions", "day"]
    assert run(*few, "--lr", "grid", "--method", "full", model="road", data="camvid") == 0
    assert {row.case["lr"] for row in rows("selection")} == {3e-7, 1e-6, 3e-6, 1e-5}


def test_old_rows_are_still_the_same_setting(folder):
    """Rows of a plain continual stream say nothing of streams, rounds and windows."""
    assert run("--method", "source") == 0
    assert set(rows()[0].case["setting"]) == {
        *("data", "model", "weights", "batch", "corruptions", "severity", "limit", "size", "split", "order")
    }
    json.dumps(rows()[0].case)


@pytest.mark.skipif(not (REAL / "imagenet_samples").is_dir(), reason="needs shared/data beside the repository")
def test_imagenet_images_are_known_to_the_efficientnet(tmp_path):
    pytest.importorskip("timm")
    weights = REAL / "weights" / "imagenet_efficientnet_lite0.safetensors"
    command = ["--data", str(REAL / "imagenet_samples"), "--model", "tf_efficientnet_lite0", "--weights", str(weights)]
    command += ["--corruptions", "clean,brightness", "--limit", "16", "--batch", "8", "--method", "source,surgeon"]
    assert main([*command, "--no-measure", "--json", str(tmp_path / "tta.jsonl")]) == 0
    found = {
        (r.provider, r.case["corruption"]): r.p50
        for r in read_rows(tmp_path / "tta.jsonl", "tta")
        if r.metric == "error"
    }
    assert found["source", "clean"] < 40
    assert found["surgeon", "brightness"] < 90


def test_a_warm_up_knows_its_files_by_more_than_their_names(tmp_path):
    first, second = tmp_path / "a" / "weights.pt", tmp_path / "b" / "weights.pt"
    for file in (first, second):
        file.parent.mkdir()
        file.write_bytes(b"one")
    known = tta_source.version(first)
    assert known == tta_source.version(first)
    assert known != tta_source.version(second)
    first.write_bytes(b"another")
    assert known != tta_source.version(first)
    assert tta_source.version(None) is None
