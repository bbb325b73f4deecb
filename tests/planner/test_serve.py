"""`surgeon-fx plan --serve`: what the server answers, and the page clicked through in a browser."""

import base64
import json
import os
import threading
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlencode

import pytest
import torch
from browser_cases import CHROMIUM, Browser

import surgeon_fx
from surgeon_fx.cli import main
from surgeon_fx.planner import facts, methods
from surgeon_fx.planner.serve import open_server

CHOICE = {"model": "resnet20_cifar", "batch": "8", "size": "32", "ratio": "0.9"}


@pytest.fixture(scope="module")
def server():
    found = open_server(0, "resnet20_cifar")
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield found
    found.shutdown()
    found.server_close()
    thread.join()


def ask(server, path, query=None, host="127.0.0.1"):
    port = server.server_address[1]
    connection = HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("GET", f"{path}?{urlencode(query or {})}", headers={"Host": f"{host}:{port}"})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, json.loads(body) if "json" in answer.getheader("Content-Type") else body


def test_numbers_are_those_of_plan(server):
    status, found = ask(server, "/plan", CHOICE)
    assert status == 200
    model = methods.build("resnet20_cifar")
    pruned = surgeon_fx.plan(methods.rewritten(model), (8, 3, 32, 32), ratios=0.9, train="all")
    eager = surgeon_fx.plan(model, (8, 3, 32, 32), train="all")
    assert (found["saved"], found["peak"]) == (pruned.saved_bytes, pruned.peak_bytes)
    assert (found["eager"], found["eager_peak"]) == (eager.saved_bytes, eager.peak_bytes)
    assert found["title"] == "resnet20_cifar at 8x3x32x32"
    assert "<svg" in found["panels"]
    assert "<svg" in found["curve"]


def test_another_ratio_is_arithmetic_and_another_batch_one_trace(server, monkeypatch):
    _, first = ask(server, "/plan", CHOICE)
    with monkeypatch.context() as patch:
        patch.setattr(facts, "step", None)  # a step would raise
        held = {ratio: ask(server, "/held", CHOICE | {"ratio": str(ratio)})[1] for ratio in (0, 0.35, 0.9)}
    assert held[0]["saved"] > held[0.35]["saved"] > held[0.9]["saved"] == first["saved"]
    _, exact = ask(server, "/plan", CHOICE | {"ratio": "0.35"})
    assert exact["saved"] == held[0.35]["saved"]
    assert exact["traced"] == first["traced"]
    _, doubled = ask(server, "/plan", CHOICE | {"batch": "16"})
    assert doubled["traced"] == first["traced"] + 1
    assert doubled["eager"] == pytest.approx(2 * first["eager"], rel=0.01)
    _, again = ask(server, "/plan", CHOICE)
    assert again["traced"] == doubled["traced"]


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        ("/model", {"model": "resnet20_cifra"}, "did you mean resnet20_cifar"),
        ("/plan", {"batch": "-3"}, "batch must be a whole number of 1 or more, got '-3'"),
        ("/plan", {"size": "axb"}, "size must be a size like 224"),
        ("/plan", {"ratio": "7"}, "ratio must be a ratio from 0"),
        ("/plan", {"train": "some"}, "train must be one of all, norm"),
        ("/held", {"model": ""}, "model is missing"),
    ],
)
def test_what_makes_no_sense_is_told(server, path, change, message):
    status, found = ask(server, path, CHOICE | change)
    assert status == 400
    assert message in found["error"]


def test_a_size_the_model_refuses_is_told(server):
    pytest.importorskip("timm")
    status, found = ask(server, "/plan", CHOICE | {"model": "vit_tiny_patch16_224", "size": "97"})
    assert status == 400
    assert "vit_tiny_patch16_224 does not take an input of 8x3x97x97" in found["error"]


def test_only_this_machine_is_served(server):
    assert server.server_address[0] == "127.0.0.1"
    assert ask(server, "/", host="evil.example")[0] == 403
    assert ask(server, "/elsewhere")[0] == 404
    status, page = ask(server, "/")
    assert status == 200
    assert 'id="ratio"' in page
    assert '<option value="wrn28_10">' in page


def test_a_port_in_use_is_one_line(server, capsys):
    assert main(["plan", "--model", "resnet20_cifar", "--serve", str(server.server_address[1])]) == 2
    assert "--serve cannot use port" in capsys.readouterr().err


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_clicked_through(server, tmp_path):
    browser = Browser(tmp_path)
    ready = "!document.body.classList.contains('busy') && document.querySelector('svg.bars') !== null"

    def mib(selector):
        return float(browser.text(selector).removesuffix(" MiB"))

    try:
        browser.send("Page.navigate", url=f"http://127.0.0.1:{server.server_address[1]}/")
        browser.wait(f"document.readyState === 'complete' && {ready}")
        assert browser.text("#state") == "resnet20_cifar at 200x3x32x32, ratio 0.90 for every layer"
        model = methods.build("resnet20_cifar")
        x = torch.empty(200, 3, 32, 32, device="meta")
        pruned = surgeon_fx.plan(methods.rewritten(model), x, ratios=0.9)
        assert mib("#saved") == pytest.approx(pruned.saved_bytes / 2**20, abs=0.05)
        assert mib("#peak") == pytest.approx(pruned.peak_bytes / 2**20, abs=0.05)
        assert browser.text("#batch-value") == "200"

        saved, bars = mib("#saved"), browser.run("document.querySelector('#panels').innerHTML")
        browser.click("#ratio", 0.35)  # the mouse lets go: everything is planned anew
        browser.wait(f"document.querySelector('#ratio-value').textContent < 0.5 && {ready}")
        browser.wait("document.querySelector('#state').textContent.includes('ratio 0.3')")
        assert mib("#saved") > 2 * saved
        assert browser.run("document.querySelector('#panels').innerHTML") != bars

        eager = mib("#eager")
        browser.click("#batch", 0.02)
        browser.wait(f"document.querySelector('#state').textContent.includes(' at 1x3x32x32') && {ready}")
        assert mib("#eager") == pytest.approx(eager / 200, abs=0.06)
        browser.click("#size", 0.98)
        browser.wait(f"document.querySelector('#state').textContent.includes(' at 1x3x64x64') && {ready}")
        assert mib("#eager") == pytest.approx(4 * eager / 200, abs=0.06)

        browser.run("document.querySelector('#model').select(); document.querySelector('#model').focus()")
        browser.type("wrn16_1")
        browser.press("Enter", 13)
        browser.wait(f"document.querySelector('#state').textContent.includes('wrn16_1 at 200x3') && {ready}")
        browser.run("document.querySelector('#model').select(); document.querySelector('#model').focus()")
        browser.type("wrn16_2")
        browser.press("Enter", 13)
        browser.wait("document.querySelector('#state').className === 'error'")
        assert "did you mean wrn16_1" in browser.text("#state")
        if folder := os.environ.get("SURGEON_FX_SCREENSHOTS"):
            picture = browser.send("Page.captureScreenshot", format="png")["data"]
            Path(folder, "plan_serve.png").write_bytes(base64.b64decode(picture))
    finally:
        browser.close()
