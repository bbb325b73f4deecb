"""`surgeon-fx plan --serve`: the plan as a page with sliders, served to this machine alone.

A model is traced once per input shape. What backward holds at another ratio is arithmetic on the facts of that trace;
the peak and the pictures come from the captured graphs, run again on tensors without memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import webbrowser
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch

from surgeon_fx import commands, zoo
from surgeon_fx.api import ratios as ratio_table
from surgeon_fx.planner import arithmetic, facts, methods
from surgeon_fx.planner.app import BATCHES, app_page, curve_panel
from surgeon_fx.planner.page import panels, tooltips
from surgeon_fx.planner.plan import Plan, plan
from surgeon_fx.zoo.external import require

PORT = 8760
MOST_TRACES = 6  # kept for coming back to
CURVE = [i / 20 for i in range(20)] + [0.99]  # ratios of the curve
TRAIN = ("all", "norm")
LOCAL = ("127.0.0.1", "localhost")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = f"open a page with sliders at this port of this machine (default {PORT}; 0: any free one)"
    parser.add_argument("--serve", type=_port, nargs="?", const=PORT, metavar="PORT", help=what)


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a port from 0 to 65535, got {text!r}")
    return int(text)


class Trace:
    """One model at one input: its facts, its eager plan, and its plans at the ratios asked for."""

    def __init__(self, name: str, shape: tuple[int, ...], train: str) -> None:
        self.name, self.shape, self.train = name, shape, train
        model = methods.build(name)
        self.study = methods.Study(model, methods.empty_input(model, shape, torch.float32))
        try:
            self.eager = plan(self.study.model, self.study.x, train=train)
            self.facts = facts.step(self.study.rewritten, (self.study.x,), {}, 0.5, train, backward=False)
        except Exception as error:
            raise methods.refusal(self.study, name, error) from None
        self.layers = list(ratio_table(self.study.rewritten))
        self.plans: dict[float, Plan] = {}

    def saved_bytes(self, ratio: float) -> int:
        """What backward holds at one ratio for every layer: arithmetic alone."""
        return arithmetic.held_bytes(self.facts.savings, dict.fromkeys(self.layers, ratio))

    def plan(self, ratio: float) -> Plan:
        if ratio not in self.plans:
            self.plans[ratio] = plan(self.study.rewritten, self.study.x, ratios=ratio, train=self.train)
        return self.plans[ratio]

    def totals(self, ratio: float) -> dict[str, Any]:
        """What the page shows while the ratio moves."""
        return {"ratio": ratio, "saved": self.saved_bytes(ratio), "eager": self.eager.saved_bytes}

    def answer(self, ratio: float) -> dict[str, Any]:
        """Everything the page shows."""
        found = self.plan(ratio)
        curve = [(one, self.saved_bytes(one)) for one in CURVE]
        return self.totals(ratio) | {
            "title": f"{self.name} at {'x'.join(map(str, self.shape))}",
            "peak": found.peak_bytes,
            "eager_peak": self.eager.peak_bytes,
            "curve": curve_panel(curve, ratio, self.saved_bytes(ratio), self.eager.saved_bytes),
            "panels": panels(found),
            "tooltips": tooltips(found),
        }


class Planner:
    """Answers requests, all on one thread: a capture belongs to the thread it was made on."""

    def __init__(self) -> None:
        self.traces: OrderedDict[tuple[Any, ...], Trace] = OrderedDict()
        self.traced = 0
        self._thread = ThreadPoolExecutor(1)

    def ask(self, path: str, query: dict[str, str]) -> dict[str, Any]:
        return self._thread.submit(self._answer, path, query).result()

    def _answer(self, path: str, query: dict[str, str]) -> dict[str, Any]:
        if path == "/model":
            usual = zoo.input_shape(_required(query, "model"))
            return {"batch": usual[0], "size": list(usual[-2:]), "batches": sorted({*BATCHES, usual[0]})}
        trace = self._trace(query)
        ratio = _parsed(query, "ratio", commands.ratio)
        found = trace.answer(ratio) if path == "/plan" else trace.totals(ratio)
        return found | {"traced": self.traced}

    def _trace(self, query: dict[str, str]) -> Trace:
        name, train = _required(query, "model"), query.get("train", "all")
        if train not in TRAIN:
            raise ValueError(f"train must be one of {', '.join(TRAIN)}, got {train!r}")
        size = _parsed(query, "size", commands.size)
        shape = methods.input_shape(name, _parsed(query, "batch", commands.count), size)
        key = (name, shape, train)
        if key not in self.traces:
            self.traces[key] = Trace(name, shape, train)
            self.traced += 1
            while len(self.traces) > MOST_TRACES:
                self.traces.popitem(last=False)
        self.traces.move_to_end(key)
        return self.traces[key]


def _required(query: dict[str, str], name: str) -> str:
    if not query.get(name):
        raise ValueError(f"{name} is missing")
    return query[name]


def _parsed(query: dict[str, str], name: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(_required(query, name))
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{name} {error}") from None


def model_names() -> list[str]:
    """The models to choose from: the zoo's, then those of the packages that are installed."""
    names = zoo.names()
    if importlib.util.find_spec("torchvision") is not None:
        names += [f"tv:{name}" for name in require("torchvision").models.list_models()]
    if importlib.util.find_spec("timm") is not None:
        names += [f"timm:{name}" for name in require("timm").list_models()]
    return names


class Handler(BaseHTTPRequestHandler):
    planner: Planner
    page: bytes

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rpartition(":")[0]
        if host not in LOCAL:  # another site's name that resolves to this machine
            self._send(403, "text/plain", b"this page is for 127.0.0.1 alone\n")
            return
        parts = urlsplit(self.path)
        if parts.path == "/":
            self._send(200, "text/html; charset=utf-8", self.page)
        elif parts.path in ("/model", "/held", "/plan"):
            query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
            try:
                status, found = 200, self.planner.ask(parts.path, query)
            except (ValueError, ImportError) as error:
                status, found = 400, {"error": str(error)}
            except Exception as error:  # the page goes on with another choice; the terminal has the whole story
                status, found = 500, {"error": f"{type(error).__name__}: {error}"}
                self.log_error("%s", repr(error))
            self._send(status, "application/json", json.dumps(found).encode())
        else:
            self._send(404, "text/plain", b"not found\n")

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Requests that went well are no news."""


def open_server(port: int, model: str, ratio: float = 0.9) -> ThreadingHTTPServer:
    """A server on this machine, not yet running."""
    page = app_page(model_names(), model, ratio).encode()
    handler = type("PlanHandler", (Handler,), {"planner": Planner(), "page": page})
    try:
        return ThreadingHTTPServer((LOCAL[0], port), handler)
    except OSError as error:
        raise ValueError(f"--serve cannot use port {port}: {error.strerror}; 0 takes any free one") from error


def run(arguments: argparse.Namespace) -> int:
    """Serves until it is interrupted."""
    zoo.input_shape(arguments.model)  # a name nobody has is told before anything opens
    server = open_server(arguments.serve, arguments.model, arguments.ratio[-1])
    address = f"http://{LOCAL[0]}:{server.server_address[1]}/"
    print(f"{address} (Ctrl-C ends it)", flush=True)
    if sys.stdout.isatty() and not arguments.quiet:
        webbrowser.open(address)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
    return 0
