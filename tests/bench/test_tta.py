import re
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
import tta
import tta_measure
from common import Row, read_rows
from stream_cases import acdc, cifar
from torch import nn
from tta import main
from tta_runs import Setting, Trial, latest, open_model

from surgeon_fx import zoo
from surgeon_fx.adapt import METHODS, Step
from surgeon_fx.retained import retained_bytes
from surgeon_fx.zoo.registry import ENTRIES, Entry

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench" / "tta.py"
REAL = ROOT.parent / "shared" / "data"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)

    def forward(self, x):
        return self.bn(self.conv(x)).relu()


class Tiny(nn.Module):
    """A block of a convolution and a norm, and a classifier."""

    def __init__(self):
        super().__init__()
        self.blocks, self.fc = nn.Sequential(Block()), nn.Linear(4, 7)

    def forward(self, x):
        return self.fc(self.blocks(x).mean((2, 3)))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(ENTRIES, "tiny", Entry("tiny", Tiny, (4, 3, 8, 8), 7, "", (0.5,) * 3, (0.5,) * 3))
    cifar(tmp_path / "data", labels=np.arange(10) % 7)
    for i, name in enumerate(("fog", "gaussian_noise")):
        images = np.random.default_rng(i).integers(0, 256, (10, 8, 8, 3), dtype=np.uint8)
        np.save(tmp_path / "data" / f"{name}.npy", images)
    return tmp_path


JSON = ["--json", "tta.jsonl"]


def adapt(*arguments):
    return main(["--data", "data", "--model", "tiny", "--no-measure", *JSON, *arguments])


def rows(path="tta.jsonl"):
    return read_rows(Path(path), "tta")


def numbers(found):
    return [(row.provider, row.metric, row.p50, row.case) for row in found]


def test_all_methods_in_order_with_a_row_per_corruption(folder, capsys):
    assert adapt() == 0
    out, err = capsys.readouterr()
    assert "random weights" in err
    assert out.startswith("tiny (random) on data, severity 5, batches of 4;")
    lines = out.splitlines()
    assert lines[2].split() == ["method", "lr", "Gauss", "Fog", "Mean"]
    methods = [name for name in METHODS if name != "ecotta"]
    assert "ecotta is left out: EcoTTA cuts the blocks of a network into 5 parts, and found 1" in err
    assert [line.split()[0] for line in lines[4:24]] == methods
    assert lines[24] == "online error in %, before each update; seed 0"
    found = [row for row in rows() if row.metric == "error"]
    assert [row.provider for row in found[::2]] == methods
    for row in found:
        errors = row.case["batch_errors"]
        assert len(errors) == row.repetitions == 3
        assert row.p50 == pytest.approx((4 * errors[0] + 4 * errors[1] + 2 * errors[2]) / 10, abs=1e-2)
        assert Row.from_json(row.to_json()) == row
    assert {row.case["lr"] for row in found} == {None, 1e-4, 1e-3, 2.5e-4, 2.5e-3}
    mean = (found[0].p50 + found[1].p50) / 2
    assert re.search(rf"^source +{found[0].p50:.1f} +{found[1].p50:.1f} +{mean:.2f}$", out, re.MULTILINE)


def test_ratios_are_kept_per_layer_and_pass(folder):
    assert adapt("--method", "surgeon", "tent", "--every", "2") == 0
    found = [row for row in rows() if row.metric == "ratios"]
    assert [row.provider for row in found] == ["surgeon", "surgeon"]
    first, second = (row.case for row in found)
    assert first["layers"] == ["model.blocks.0.conv", "model.blocks.0.bn", "model.fc"]
    assert first["batches"] == [0, 2]  # of six batches, every other
    assert second["batches"] == [1]
    assert all(len(ratios) == 3 and all(0 <= ratio <= 1 for ratio in ratios) for ratios in first["ratios"])


def test_same_seed_same_rows(folder):
    arguments = ["--method", "surgeon_css_cr,full", "--lr", "1e-2"]
    assert adapt(*arguments, "--seeds", "0,1") == 0
    first = numbers(rows())
    assert adapt(*arguments, "--seeds", "0,1", "--json", "again.jsonl") == 0
    assert numbers(rows("again.jsonl")) == first
    seeds = [[row[3]["batch_errors"] for row in first if row[1] == "error" and row[3]["seed"] == n] for n in (0, 1)]
    assert seeds[0] != seeds[1]


def test_seeds_are_averaged_with_their_deviation(folder, capsys):
    assert adapt("--method", "bn_stat", "--seeds", "0,1,2") == 0
    out = capsys.readouterr().out
    means = [sum(row.p50 for row in rows() if row.case["seed"] == seed) / 2 for seed in range(3)]
    assert f"{np.mean(means):.2f} +- {np.std(means, ddof=1):.2f}" in out
    assert "mean over seeds 0, 1, 2" in out


class Fake:
    """Knows the labels where its learning rate is 3e-4, and counts its batches."""

    built: ClassVar[list[float]] = []
    batches = 0

    def __init__(self, model, lr, **options):
        self.model, self.lr, self.last = model, lr, Step()
        Fake.built.append(lr)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    def __call__(self, x):
        Fake.batches += 1
        self.last = Step(skipped="there was nothing to learn")
        image = (255 * x[:, 0, 0, 0]).round().long()
        return nn.functional.one_hot(image % 7 if self.lr == 3e-4 else image * 0, 7).float()


@pytest.fixture
def fake(folder, monkeypatch):
    monkeypatch.setattr(Fake, "built", [])
    monkeypatch.setattr(Fake, "batches", 0)
    monkeypatch.setitem(METHODS, "full", Fake)
    monkeypatch.setitem(METHODS, "tent", Fake)
    cifar(folder / "data")
    return folder


def test_the_better_learning_rate_is_chosen(fake, capsys):
    assert adapt("--method", "full", "--lr", "grid", "--select", "1", "--seeds", "4,5") == 0
    assert Fake.built[1:] == [1e-5, 3e-5, 1e-4, 3e-4, 3e-4, 3e-4]  # after the one that was built to see whether it fits
    assert Fake.batches == 4 * 3 + 2 * 6
    selected = [row for row in rows() if row.metric == "selection"]
    assert {(row.case["seed"], row.case["corruption"]) for row in selected} == {(4, "gaussian_noise")}
    assert {row.case["lr"] for row in rows() if row.metric == "error"} == {3e-4}
    out = capsys.readouterr().out
    assert re.search(r"^full +0.0003 +0.0 +0.0 +0.00 \+- 0.00$", out, re.MULTILINE)
    assert re.search(r"^full +80.00 +80.00 +80.00 +0.00 \*!$", out, re.MULTILINE)
    assert "mean error in % on Gauss by learning rate; * chosen; ! at an end of its grid" in out


def test_rates_that_do_as_well_as_each_other_give_the_smaller(fake):
    assert adapt("--method", "tent", "--lr", "2e-4,1e-4") == 0
    assert {row.case["lr"] for row in rows() if row.metric == "error"} == {1e-4}


def test_skipped_batches_are_noted(fake):
    assert adapt("--method", "full") == 0
    assert rows()[0].note == "3 of 3 batches skipped: there was nothing to learn"


def test_resume_runs_what_is_missing(fake, capsys):
    assert adapt("--method", "full") == 0
    capsys.readouterr()
    lines = Path("tta.jsonl").read_text().splitlines(keepends=True)
    Path("tta.jsonl").write_text(lines[0] + lines[1][:50])  # interrupted in the middle of a line
    assert adapt("--method", "full,tent", "--resume") == 0
    assert Fake.batches == 3 * 6  # without the state of its adapter, the run that was cut off starts again
    first = capsys.readouterr().out
    assert adapt("--method", "full,tent", "--resume") == 0
    assert Fake.batches == 3 * 6
    assert capsys.readouterr().out == first
    assert len(rows()) == 5
    assert len(latest(rows())) == 4
    assert adapt("--method", "full", "--resume", "--limit", "4") == 0  # another setting beside it
    assert "4 images each" in capsys.readouterr().out
    assert adapt("--method", "full", "--resume", "--lr", "3e-4") == 0
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith("full ")]) == 2


def test_from_json_reports_every_setting_and_runs_nothing(fake, capsys):
    assert adapt("--method", "full") == 0
    first = capsys.readouterr().out
    assert main(["--from-json", *JSON]) == 0
    assert capsys.readouterr().out == first
    assert adapt("--method", "full", "--batch", "5", "--resume") == 0
    second = capsys.readouterr().out
    ran = Fake.batches
    assert main(["--from-json", *JSON]) == 0
    assert capsys.readouterr().out == f"{first}\n{second}"
    assert Fake.batches == ran


def test_an_interrupted_run_has_no_mean(fake, capsys):
    assert adapt("--method", "full") == 0
    Path("tta.jsonl").write_text(Path("tta.jsonl").read_text().splitlines()[0] + "\n")
    capsys.readouterr()
    assert main(["--from-json", *JSON]) == 0
    assert re.search(r"^full +0.0001 +80.0$", capsys.readouterr().out.replace("  \n", "\n"), re.MULTILINE)


def test_options_that_differ_are_named(folder, capsys):
    assert adapt("--method", "static") == 0
    assert adapt("--method", "static", "--ratio", "0.5", "--resume") == 0
    out = capsys.readouterr().out
    assert re.search(r"^static ratio 0.9 +0.0001 ", out, re.MULTILINE)
    assert re.search(r"^static ratio 0.5 +0.0001 ", out, re.MULTILINE)


def test_random_order_is_another_for_each_seed(folder):
    assert adapt("--method", "source", "--order", "random", "--seeds", "0,1,2,3") == 0
    assert len({tuple(row.case["corruption"] for row in rows()[i : i + 2]) for i in range(0, 8, 2)}) == 2


def test_segmentation_counts_classes_of_pixels(folder, monkeypatch, capsys):
    monkeypatch.setitem(ENTRIES, "tiny", Entry("tiny", lambda: nn.Conv2d(3, 19, 3, 2), (1, 3, 16, 24), 19, ""))
    acdc(folder / "acdc")
    assert main(["--data", "acdc", "--model", "tiny", "--size", "16x24", "--no-measure", *JSON]) == 0
    out, err = capsys.readouterr()
    assert "train split, batches of 1" in out
    assert "online mIoU in %" in out
    assert "bn_stat is left out: BNStat needs batch norm layers" in err
    assert all(0 <= row.p50 <= 100 and row.repetitions == 3 for row in rows() if row.metric == "error")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere"], "data must be a folder"),
        (["--corruptions", "fogg"], "did you mean fog?"),
        (["--weights", "none.pt"], "weights must be a file"),
        (["--model", "tinny"], "no model is called 'tinny'"),
        (["--batch", "0"], "--batch must be 1 or more, got 0"),
        (["--stream", "correlated:inf"], "must be above 0"),
        (["--method", "tent", "--prior", "nan"], "prior must be a number of samples"),
        (["--method", "static", "--ratio", "2"], "ratio must"),
        (["--from-json"], "--json must be a file that a run has written"),
    ],
)
def test_what_makes_no_sense_is_an_error(folder, capsys, arguments, message):
    assert adapt(*arguments) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "magic"], "no method is called 'magic'"),
        (["--lr", "fast"], "must be learning rates like"),
        (["--lr", "1e-4,inf"], "must be learning rates like"),
        (["--seeds", "-1"], "must be numbers like 0,1,2"),
        (["--device", "nothing"], "--device: must be a device like cpu or cuda:0"),
        (["--device", "cpu:9"], "there is no cpu:9"),
    ],
)
def test_arguments_are_checked(folder, capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        adapt(*arguments)
    assert message in capsys.readouterr().err


def test_no_data_and_too_few_classes(folder, monkeypatch, capsys):
    assert main([]) == 2
    assert "--data must name a folder of images, or be synthetic" in capsys.readouterr().err
    np.save("data/labels.npy", np.arange(10))
    assert adapt("--method", "source") == 2
    assert "the model tells 7 classes apart, and labels have 10" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one here")
def test_a_device_that_is_not_there_is_one_line(folder, capsys):
    with pytest.raises(SystemExit, match="2"):
        adapt("--device", "cuda")
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert "finds no cuda here; there is cpu" in err


@pytest.mark.parametrize(("name", "content"), [("junk.pt", b"\x80junk" * 9), ("junk.safetensors", b"<html>" * 20)])
def test_junk_weights_are_one_line(folder, capsys, name, content):
    Path(name).write_bytes(content)
    assert adapt("--weights", name, "-q") == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert f"{name} is no checkpoint" in err


def test_synthetic_images_take_the_models_size_and_classes(folder, capsys):
    arguments = ["--data", "synthetic", "--limit", "4", "--corruptions", "fog", "--method", "source,surgeon"]
    assert adapt(*arguments) == 0
    assert "errors mean nothing" in capsys.readouterr().err
    found = [(row.provider, row.repetitions) for row in rows() if row.metric == "error"]
    assert found == [("source", 1), ("surgeon", 1)]


def test_quiet_says_nothing_beside_the_tables(folder, capsys):
    assert adapt("--method", "source", "-q") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "online error" in out


def test_normalisation_goes_before_models_that_need_it(folder):
    assert list(dict(open_model("tiny", None).named_children())) == ["normalize", "model"]
    assert type(open_model("wrn16_1", None)) is type(zoo.create("wrn16_1"))
    timm = pytest.importorskip("timm")
    mean = timm.get_pretrained_cfg("resnet10t").mean
    assert open_model("resnet10t", None).normalize.mean.flatten().tolist() == pytest.approx(list(mean))


def setting(folder, model, batch=4):
    return Setting(str(folder / "data"), model, None, batch, None, 5, None, None, "train", "given", "cpu")


def test_a_worker_finds_what_a_call_holds(folder):
    threads, found = torch.get_num_threads(), {}
    for method in ("source", "full", "checkpoint", "static", "surgeon"):
        options = {"ratio": 0.9} if method == "static" else {}
        worker = tta_measure.Worker(setting(folder, "wrn16_1"), Trial(method, options, None, 0), threads)
        assert worker.turn("warm") == {}
        found[method] = worker.turn("count") | worker.turn("time")
        if method == "full":
            x = torch.rand(4, 3, 8, 8)
            worker.adapter.model.train()
            assert found["full"]["held"] == retained_bytes(worker.adapter.model(x), worker.adapter.model)
    assert found["source"]["held"] == 0
    assert all(0 < found[method]["held"] < found["full"]["held"] for method in ("checkpoint", "static", "surgeon"))
    flops = {method: one["gflops"] for method, one in found.items()}
    assert 0 < flops["source"] < flops["full"] < min(flops["checkpoint"], flops["surgeon"])
    assert set(found["static"]["ratios"].values()) == {0.9}
    assert found["full"]["ratios"] == {}


def test_a_call_of_rotta_is_one_that_learns(folder):
    worker = tta_measure.Worker(setting(folder, "wrn16_1"), Trial("rotta", {"every": 12}, None, 0), 1)
    assert worker.calls == 3  # batches of 4
    before = worker.adapter.samples
    found = worker.turn("count") | worker.turn("memory")
    assert worker.adapter.samples == before + 24
    assert not worker.adapter.last.skipped
    assert found["held"] > 0
    assert 0 < found["samples"] <= 24
    assert found.get("peak", 1) > 0


def test_the_papers_count_follows_method_and_ratios():
    count = tta_measure.paper_count(zoo.create("wrn16_1"), (4, 3, 8, 8))
    full, tent = count("full", {}), count("tent", {})
    assert count("source", {}) < tent < full
    assert count("source", {}) < count("checkpoint", {}) < full
    names = [name for name, _ in zoo.create("wrn16_1").named_modules()]
    assert count("static", dict.fromkeys(names, 0.5)) == pytest.approx(full / 2, rel=1e-2)
    assert count("surgeon_norm", dict.fromkeys(names, 0.5)) == pytest.approx(tent / 2, rel=1e-2)


def test_the_script_measures_in_a_process(folder):
    command = [sys.executable, str(SCRIPT), "--data", "data", "--model", "wrn16_1", "--batch", "4", "--repeats", "1"]
    command += ["--method", "full", "--json", "out/tta.jsonl", "--threads", "1"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    table = out[out.index("paper cache MiB") :]
    (full,) = re.findall(r"^full .*", table, re.MULTILINE)
    assert full.count("(1.00)") == (3 if "peak MiB" in table else 2)
    assert "a call on 4x3x8x8; p50 [p20 p80] of 1 calls in turn; in brackets, over full" in table
    costs = {row.metric for row in rows("out/tta.jsonl")} - {"error"}
    assert costs - {"peak"} == {"paper_cache", "held", "batch", "gflops"}


def test_measured_again_only_where_something_is_missing(folder, monkeypatch, capsys):
    asked = []

    def turns(setting, trials, repeats, threads, quiet):
        asked.append([trial.method for trial in trials])
        values = {"held": 1 << 20, "peak": 3 << 20, "gflops": 2.0, "ratios": {}}
        return {trial.method: [values, {"batch": 0.5}, {"batch": 1.5}] for trial in trials}

    monkeypatch.setattr(tta, "measure", turns)
    for methods in ("full", "full", "source,full"):
        assert adapt("--method", methods, "--measure", "--resume") == 0
    assert asked == [["full"], ["source", "full"]]
    last = capsys.readouterr().out
    assert re.search(
        r"^full +\S+ +1.0 \(1.00\) +3.0 \(1.00\) +1.000 \[0.700 1.300\] \(1.00\) +2.00$", last, re.MULTILINE
    )


def test_plots_are_made_of_rows(folder):
    pytest.importorskip("matplotlib")
    assert adapt("--method", "source,surgeon", "--plot", "plots/") == 0
    assert sorted(path.name for path in Path("plots").iterdir()) == ["errors.png", "ratios_surgeon.png"]
    assert main(["--from-json", *JSON, "--plot", "some/tiny"]) == 0
    assert sorted(path.name for path in Path("some").iterdir()) == ["tiny_errors.png", "tiny_ratios_surgeon.png"]


def test_a_measuring_process_that_fails_is_named(folder):
    bad = setting(folder, "wrn16_1")
    process = tta_measure.Process(bad, Trial("full", {"no_such_option": 1}, None, 0), 1)
    try:
        with pytest.raises(ValueError, match="full: the process that measures it ended with code 1"):
            process.ask("warm")
    finally:
        process.close()


@pytest.mark.skipif(not REAL.is_dir(), reason="needs shared/data beside the repository: CIFAR-10-C and weights")
def test_adapting_batch_statistics_helps_on_real_fog(tmp_path):
    command = ["--data", str(REAL / "cifar10c"), "--model", "resnet20_cifar", "--no-measure"]
    command += ["--weights", str(REAL / "weights" / "cifar10_resnet20.safetensors"), "--corruptions", "fog,contrast"]
    command += ["--limit", "100", "--batch", "50", "--method", "source,tent", "--json", str(tmp_path / "tta.jsonl")]
    assert main(command) == 0
    found = rows(tmp_path / "tta.jsonl")
    source, tent = (sum(row.p50 for row in found if row.provider == method) / 2 for method in ("source", "tent"))
    assert tent < source < 80


@pytest.mark.skipif(not REAL.is_dir(), reason="needs shared/data beside the repository: CIFAR-10-C and weights")
def test_the_transformer_in_the_repository_knows_clean_images_and_adapts(tmp_path):
    """`bench/train_vit.py` wrote its weights: four of five clean images are right."""
    weights = ROOT / "bench" / "weights" / "vit_cifar.safetensors"
    assert weights.stat().st_size < 5e6
    command = ["--data", str(REAL / "cifar10c"), "--model", "vit_cifar", "--weights", str(weights)]
    command += ["--corruptions", "clean,fog", "--limit", "200", "--batch", "100", "--no-measure"]
    assert main([*command, "--method", "source,surgeon", "--json", str(tmp_path / "tta.jsonl")]) == 0
    found = {(row.provider, row.case["corruption"]): row.p50 for row in rows(tmp_path / "tta.jsonl")}
    assert found["source", "clean"] < 30
    assert found["surgeon", "clean"] < 30
