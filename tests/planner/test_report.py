import csv
import io
import json
import re
import shutil
import subprocess

import pytest
import torch

import surgeon_fx
from surgeon_fx import zoo
from surgeon_fx.planner import plan, report
from surgeon_fx.planner.plan import Plan, PlanRow

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def planned(name, transformed=True, shape=(4, 3, 32, 32), **options):
    with torch.device("meta"):
        model = zoo.create(name)
    if transformed:
        model = surgeon_fx.transform(model, surgeon_fx.Config(return_freed_memory=False))
        options.setdefault("ratios", 0.9)
    return plan(model, shape, train="all", **options)


@pytest.fixture(scope="module", params=["resnet20_cifar", "vit_cifar"])
def one(request):
    return planned(request.param)


def small_plan(rows=1, layer="<b>&", live=(("a", 1 << 20), ("backward", 3 << 20))):
    made = [PlanRow(layer, "Conv\"olution'", (2, 3), "float32", 0.5, 2048, 1024, 1 / rows, True, "", "a.py:1")] * rows
    return Plan("<script>Net", "2x3", True, made, [], {layer: 0.5}, 1024 * rows, list(live), 1)


def test_the_table_adds_up_and_is_short(one):
    lines = str(one).splitlines()
    assert len(lines) <= 25
    for size in (
        one.paper_cache_bytes,
        one.paper_cache_bytes_with_mask,
        one.saved_bytes,
        one.eager_bytes,
        one.peak_bytes,
    ):
        assert f" {report.mib(size)}" in lines[1].replace("(", " ")
    cells = [re.split(r"  +", line) for line in lines[4:]]
    held = [float(line[-2]) for line in cells]
    assert held[:-1] == sorted(held[:-1], reverse=True)
    assert sum(held[:-1]) == pytest.approx(held[-1], abs=0.1 * len(held))
    assert cells[-1][0] == "total"
    assert int(cells[-1][1]) == len(one.rows) == sum(int(line[1]) for line in cells[:-1])


def test_an_eager_table_has_no_ratios():
    text = str(planned("resnet20_cifar", transformed=False))
    assert "eager\n" in text
    assert "pruned" not in text


def test_deep_models_fold_by_group_and_deeper_ones_by_stage():
    assert "\nlayer1.0 " in str(planned("resnet20_cifar"))
    deep = str(planned("resnet56_cifar"))
    assert "\nlayer3.[0-8] " in deep
    assert len(deep.splitlines()) <= 25


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (["conv1", "layer1.0.conv1", "layer1.1.conv1"], ["conv1", "layer1.0", "layer1.1"]),
        (["model.layer1.0.downsample.0", "model.layer1.1.conv1"], ["model.layer1.0", "model.layer1.1"]),
        (["1.blocks.0.mlp.fc1", "1.blocks.11.mlp.fc1"], ["1.blocks.0", "1.blocks.11"]),
        (["", "head"], ["", "head"]),
    ],
)
def test_groups_are_read_off_names(names, groups):
    assert list(report.groups_of(names).values()) == groups


def test_json_parses_back_to_the_same_numbers(one, tmp_path):
    text = one.to_json(tmp_path / "plan.json")
    found = json.loads(text)
    assert (tmp_path / "plan.json").read_text() == text
    for name in (
        "saved_bytes",
        "eager_bytes",
        "peak_bytes",
        "paper_cache_bytes",
        "paper_norm_bytes",
        "ratios",
        "inputs",
    ):
        assert found[name] == getattr(one, name)
    assert sum(row["held_bytes"] for row in found["rows"]) == one.saved_bytes
    assert max(point["live_bytes"] for point in found["timeline"]) == one.peak_bytes
    assert [layer["bytes"] for layer in found["layers"]] == [layer.bytes for layer in one.layers]


def test_csv_parses_back_and_sums_up(one, tmp_path):
    text = one.to_csv(tmp_path / "plan.csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert (tmp_path / "plan.csv").read_text() == text
    assert [row["layer"] for row in rows] == [row.layer for row in one.rows]
    assert sum(int(row["held_bytes"]) for row in rows) == one.saved_bytes
    assert sum(int(row["dense_bytes"]) for row in rows) == one.eager_bytes
    assert sum(float(row["share"]) for row in rows) == pytest.approx(1)


def test_the_page_has_bars_a_peak_and_nothing_from_elsewhere(one):
    text = one.to_html()
    shown, _ = report.drawn(one)
    assert text.count('<g class="bar">') == len(shown)
    assert f"peak {one.peak_bytes / (1 << 20):.1f} MiB, {report.peak_at(one)}</text>" in text
    assert "://" not in text


def test_the_page_escapes_what_models_are_called():
    text = small_plan().to_html()
    assert "<b>" not in text.replace("<b>0", "").replace("<b>3", "")  # the totals' own
    assert "<script>Net" not in text
    assert "&lt;b&gt;&amp;" in text
    assert "</script><b>" not in small_plan(live=[("</script><b>", 5)]).to_html()


def test_a_plan_without_tensors_is_still_a_page_and_a_table(tmp_path):
    empty = Plan("Net", "1x3", False, [], [], {}, 0, [], 0)
    assert "total" in str(empty)
    assert "Peak in nothing" in empty.to_html(tmp_path / "plan.html")
    empty.plot(tmp_path / "plan.png")


def test_thinning_keeps_the_peak():
    timeline = [("x", i % 7) for i in range(50_000)]
    timeline[31_234] = ("peak", 99)
    points = report.thinned(timeline)
    assert (31_234, "peak", 99) in points
    assert len(points) <= 2200
    assert [i for i, _, _ in points] == sorted(i for i, _, _ in points)


def test_the_picture_is_drawn(one, tmp_path):
    pytest.importorskip("matplotlib")
    one.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium to open the page in")
def test_the_page_opens_in_a_browser(tmp_path):
    one = planned("resnet20_cifar")
    one.to_html(tmp_path / "plan.html")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    page = (tmp_path / "plan.html").as_uri()
    found = subprocess.run(
        [*command, "--dump-dom", page], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    bars = re.findall(r'<rect class="held" x="[^"]+" y="[^"]+" width="[^"]+" height="([^"]+)"', found)
    assert len(bars) == len(report.drawn(one)[0])
    assert max(map(float, bars)) > 10
    assert re.search(r'class="peak-label[^>]*>peak [0-9.]+ MiB, (forward|backward)', found)
    assert '<g class="bar"><title>' not in found  # the script ran: it shows them itself
    picture = tmp_path / "plan.png"
    subprocess.run([*command, f"--screenshot={picture}", page], capture_output=True, timeout=120, check=True)
    assert picture.stat().st_size > 10_000
