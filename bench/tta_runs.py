"""One method on one stream: what it starts from, its errors along the way, and the rows they become."""

from __future__ import annotations

import json
import statistics
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import Environment, Row, progress
from torch import nn
from tta_folders import IMAGENET_CLASSES
from tta_score import Score
from tta_source import WARM_UP_EPOCHS, Source, version, warm_up
from tta_stream import SPLITS, SYNTHETIC, Stream, open_stream

from surgeon_fx import Config, transform, zoo
from surgeon_fx.adapt import METHODS, Adapter, EataLoss, EcoTTA, Window, find_fisher
from surgeon_fx.losses import logits_of
from surgeon_fx.zoo.external import require
from surgeon_fx.zoo.layers import ImageNormalizer
from surgeon_fx.zoo.resnet import IMAGENET_MEAN, IMAGENET_STD

BENCHMARK = "tta"
SEEDED = ("surgeon", "cotta", "rotta", "mecta", "ecotta")  # what names of methods that draw at random start with
TRANSFORMED = ("static", "surgeon")  # likewise, of those that run a transformed model
FORWARD_ONLY = ("source", "bn_stat")
NORM_ONLY = ("tent", "eata", "sar", "rotta", "surgeon_norm", "surgeon_norm_eata", "surgeon_norm_sar")
DIGITS = 4  # of ratios in rows


@dataclass(frozen=True)
class Setting:
    """What all runs of a command share. Made of plain values: it goes to other processes as JSON."""

    data: str
    model: str
    weights: str | None
    batch: int
    corruptions: list[str] | None
    severity: int
    limit: int | None
    size: list[int] | None
    split: str | None
    order: str
    device: str
    kind: str = "continual"
    rounds: int = 1
    window: int | None = None
    source: str | None = None
    share_saves: bool = False
    exact_saves: str | None = None

    def stream(self) -> Stream:
        size = None if self.size is None else (self.size[0], self.size[-1])
        classes = IMAGENET_CLASSES
        if self.data == SYNTHETIC:
            height, width = zoo.input_shape(self.model)[-2:]
            size = size or (height, width)
            classes = zoo.entry(self.model).classes if self.model in zoo.names() else classes
        return open_stream(
            self.data, self.corruptions, self.severity, self.limit, size, self.split, self.kind, self.rounds, classes
        )

    def build(self) -> nn.Module:
        """A fresh model; random weights are the same each time."""
        torch.manual_seed(0)
        return open_model(self.model, self.weights).to(self.device)

    def case(self, stream: Stream) -> dict[str, Any]:
        """What rows say of it: names of files without their folders, and the corruptions by name."""
        split = self.split or SPLITS.get(stream.kind)
        names = [domain.name for domain in stream.domains if "@" not in domain.name]
        others = {"stream": (self.kind, "continual"), "rounds": (self.rounds, 1), "window": (self.window, None)}
        others |= {"share_saves": (self.share_saves, False), "exact_saves": (self.exact_saves, None)}
        return {
            "data": Path(self.data).resolve().name,
            "model": self.model,
            "weights": "random" if self.weights is None else Path(self.weights).name,
            "batch": self.batch,
            "corruptions": names,
            "severity": None if stream.kind == "acdc" else self.severity,
            "limit": self.limit,
            "size": self.size,
            "split": split if stream.segmentation else None,
            "order": self.order,
            **{name: value for name, (value, usual) in others.items() if value != usual},
        }


@dataclass(frozen=True)
class Trial:
    """One method with all that makes it run as it does."""

    method: str
    options: dict[str, Any]
    lr: float | None
    seed: int

    def adapter(self, model: nn.Module, setting: Setting | None = None) -> Adapter:
        """The method, ready to adapt; without a setting, as far as it goes without source data."""
        options = dict(self.options)
        samples, epochs = options.pop("fisher_samples", None), options.pop("warm_up_epochs", WARM_UP_EPOCHS)
        limit = options.pop("warm_up_limit", None)
        if self.lr is not None:
            options["lr"] = self.lr
        if self.method.startswith(SEEDED):
            options["seed"] = self.seed
        source = None if setting is None else setting.source
        if samples and source and setting is not None:
            batches = Source(source, min(setting.batch, samples), samples, self.seed, setting.device).images()
            if self.method == "eata":
                options["fisher"] = batches
            else:
                train = "norm" if self.method in NORM_ONLY or self.method.startswith("mecta") else None
                options["loss"] = EataLoss(fisher=find_fisher(model, batches, train))
        if setting is not None and self.method.startswith(TRANSFORMED):
            config = Config(share_saves=setting.share_saves, exact_saves=setting.exact_saves)
            model = model if config == Config() else transform(model, config)
        adapter = METHODS[self.method](model, **options)
        if isinstance(adapter, EcoTTA) and setting is not None:
            if source is None:
                raise ValueError("ecotta needs labelled source data for its warm-up: --source names it")
            key = {"model": setting.model, "weights": version(setting.weights), "seed": self.seed}
            warm_up(adapter, source, setting.batch, epochs, limit, {**key, "options": self.options})
        return adapter

    def __str__(self) -> str:
        lr = "" if self.lr is None else f" lr {self.lr:g}"
        return f"{self.method}{lr} seed {self.seed}"


def open_model(name: str, weights: str | Path | None) -> nn.Module:
    """A model by name that takes pixels in [0, 1]: where it does not normalise inside, a module before it does."""
    if weights is not None and not Path(weights).is_file():
        raise ValueError(f"weights must be a file, and {weights} is none")
    model = zoo.create(name)
    if weights is not None:
        zoo.load(model, weights)
    mean, std = _normalisation(name)
    if mean is None or std is None:
        return model
    return nn.Sequential(OrderedDict(normalize=ImageNormalizer(mean, std), model=model))


def _normalisation(name: str) -> tuple[Any, Any]:
    """The zoo's own say what they need, timm's in their config; others are taken to want ImageNet's."""
    if name in zoo.names():
        return zoo.entry(name).mean, zoo.entry(name).std
    prefix, colon, rest = name.partition(":")
    if colon and prefix != "timm":
        return IMAGENET_MEAN, IMAGENET_STD
    timm = require("timm")
    config = timm.get_pretrained_cfg(rest if colon else name)
    found = timm.data.resolve_data_config(pretrained_cfg=config.to_dict() if config else {})
    return found["mean"], found["std"]


def identity(metric: str, method: str, case: dict[str, Any]) -> str:
    """What makes a row the one it is: later rows of the same identity replace earlier ones."""
    names = ("setting", "options", "lr", "seed", "corruption")
    return json.dumps([metric, method, *(case.get(name) for name in names)], sort_keys=True)


def latest(rows: Iterable[Row]) -> list[Row]:
    """Rows without those that were measured again."""
    return list({identity(row.metric, row.provider, row.case): row for row in rows}.values())


class Runner:
    """Runs trials over a stream and writes their rows; what `known` rows have is not run again.

    `states` is a file for the adapter's state at the end of each domain: where a run was interrupted, it goes on there.
    """

    def __init__(
        self,
        setting: Setting,
        stream: Stream,
        here: Environment,
        write: Callable[[Row], None],
        known: Iterable[Row] = (),
        states: Path | None = None,
        quiet: bool = False,
    ) -> None:
        self.setting, self.stream, self.here, self.write, self.states = setting, stream, here, write, states
        self.quiet = quiet
        self.case = setting.case(stream)
        self.known = {identity(row.metric, row.provider, row.case): row for row in known}

    def run(self, trial: Trial, metric: str = "error", first: int | None = None) -> float:
        """The mean error over the domains, or over the `first` of them."""
        domains = self.stream.reordered(self.setting.order, trial.seed).domains[:first]
        cases = [self._case(trial, domain.name) for domain in domains]
        found = [self.known.get(identity(metric, trial.method, case)) for case in cases]
        before = [row.p50 for row in found if row is not None and row.p50 is not None]
        if len(before) == len(domains):
            return statistics.fmean(before)
        return statistics.fmean(self._adapt(trial, metric, domains))

    def _case(self, trial: Trial, corruption: str) -> dict[str, Any]:
        case = {"setting": self.case, "options": trial.options, "lr": trial.lr, "seed": trial.seed}
        return case | {"corruption": corruption}

    def _adapt(self, trial: Trial, metric: str, domains: list[Any]) -> list[float]:
        setting = self.setting
        model = setting.build()
        torch.manual_seed(trial.seed)
        adapter: Any = trial.adapter(model, setting)
        adapter = adapter if setting.window is None else Window(adapter, setting.window)
        errors = self._restore(trial, metric, domains, adapter)
        total = sum(-(-len(domain) // setting.batch) for domain in domains[len(errors) :])
        with progress(self.quiet, total=total, desc=str(trial), unit="batch", leave=False) as bar:
            for position, domain in list(enumerate(domains))[len(errors) :]:
                if position and setting.kind == "reset":
                    adapter.reset()
                score = Score(self.stream.classes, self.stream.segmentation)
                trace = Trace()
                for x, y in domain.batches(setting.batch, trial.seed):
                    logits = logits_of(adapter(x.to(setting.device)))
                    trace.add(score.add(logits, y), adapter)
                    bar.set_postfix_str(f"{domain.name} {score.error:.1f} %", refresh=False)
                    bar.update()
                errors.append(score.error)
                self._write(trial, metric, domain.name, position, score.error, trace)
                self._save(trial, metric, domains, adapter, len(errors))
        return errors

    def _restore(self, trial: Trial, metric: str, domains: list[Any], adapter: Any) -> list[float]:
        """The errors that an interrupted run of the same kind left, with the adapter in the state it was in."""
        if self.states is None or not self.states.exists():
            return []
        saved = torch.load(self.states, weights_only=True, map_location=self.setting.device)
        cases = [self._case(trial, domain.name) for domain in domains[: saved["done"]]]
        rows = [self.known.get(identity(metric, trial.method, case)) for case in cases]
        if saved["run"] != self._run(trial, metric, domains) or any(row is None or row.p50 is None for row in rows):
            return []
        adapter.load_state_dict(saved["state"])
        return [row.p50 for row in rows if row is not None and row.p50 is not None]

    def _save(self, trial: Trial, metric: str, domains: list[Any], adapter: Any, done: int) -> None:
        if self.states is None:
            return
        if done == len(domains):
            self.states.unlink(missing_ok=True)
        elif hasattr(adapter, "state_dict"):
            part = self.states.with_suffix(".part")
            run = self._run(trial, metric, domains)
            torch.save({"run": run, "done": done, "state": adapter.state_dict()}, part)
            part.replace(self.states)

    def _run(self, trial: Trial, metric: str, domains: list[Any]) -> str:
        """What a saved state belongs to."""
        names = [domain.name for domain in domains]
        return json.dumps([identity(metric, trial.method, self._case(trial, "")), names])

    def _write(self, trial: Trial, metric: str, name: str, position: int, error: float, trace: Trace) -> None:
        case, count = self._case(trial, name), len(trace.errors)
        extra = {"position": position, "batch_errors": [round(error, 3) for error in trace.errors]}
        made: list[tuple[str, str, float, int, dict[str, Any]]] = [(metric, "%", error, count, extra)]
        if trace.ratios and metric == "error":
            mean = statistics.fmean(statistics.fmean(ratios) for ratios in trace.ratios)
            found = {"position": position, "layers": trace.layers, "batches": trace.at, "ratios": trace.ratios}
            made.append(("ratios", "share dropped", mean, len(trace.ratios), found))
        for what, unit, value, repetitions, more in made:
            row = Row(
                *(BENCHMARK, case | more, trial.method, what, unit, value, None, None, repetitions, "", trace.note),
                environment=self.here,
            )
            self.write(row)


class Trace:
    """What happened batch by batch in one domain."""

    def __init__(self) -> None:
        self.errors: list[float] = []
        self.skipped: list[str] = []
        self.layers: list[str] = []
        self.at: list[int] = []  # batches with a refresh
        self.ratios: list[list[float]] = []

    def add(self, error: float, adapter: Any) -> None:
        importance = getattr(getattr(adapter, "adapter", adapter), "importance", None)
        if adapter.last.refreshed and importance is not None:
            self.layers = list(importance.p)
            self.at.append(len(self.errors))
            self.ratios.append([round(ratio, DIGITS) for ratio in importance.p.values()])
        if adapter.last.skipped:
            self.skipped.append(adapter.last.skipped)
        self.errors.append(error)

    @property
    def note(self) -> str:
        if not self.skipped:
            return ""
        return f"{len(self.skipped)} of {len(self.errors)} batches skipped: {self.skipped[0]}"
