"""Transforms many models and says what came of it: exact at ratio 0? layers rewritten? share of retained bytes handled?

    python bench/coverage.py --suite timm --quick
    python bench/coverage.py --suite all --json bench/results/coverage.jsonl

One smallest model of each timm family, torchvision's classification and segmentation models, and small Hugging Face
models with random weights. A step is forward, entropy of the output, backward, in training mode. The last figure sets
the bytes that rewritten operations hold at ratio 0.9 against what eager autograd retains, parameters apart; what
operations outside them save is not in it yet.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

import surgeon_fx
from surgeon_fx.ops.layers import PRUNABLE
from surgeon_fx.ops.saved import held_bytes

QUICK = 12


@dataclass(frozen=True)
class Row:
    suite: str
    model: str
    transforms: bool
    forward_equal: bool = False
    gradients_equal: bool = False
    forward_equal_pruned: bool = False
    finite: bool = False
    layers: int = 0
    rewritten: int = 0
    eager_bytes: int = 0
    held_bytes: int = 0
    note: str = ""


def timm_models() -> Iterator[tuple[str, Callable[[], tuple[nn.Module, Any]]]]:
    import timm

    for family in timm.list_modules():
        best: tuple[int, str] | None = None
        for name in timm.list_models(module=family):
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    size = sum(p.numel() for p in timm.create_model(name).parameters())
                except Exception:  # some cannot be built on the meta device
                    continue
            if best is None or size < best[0]:
                best = (size, name)
        if best:
            yield best[1], partial(_timm, best[1])


def _timm(name: str) -> tuple[nn.Module, Any]:
    import timm

    model = timm.create_model(name)
    return model, torch.randn(2, *timm.data.resolve_model_data_config(model)["input_size"])


def torchvision_models() -> Iterator[tuple[str, Callable[[], tuple[nn.Module, Any]]]]:
    import torchvision

    for module, options in ((torchvision.models, {}), (torchvision.models.segmentation, {"weights_backbone": None})):
        for name in torchvision.models.list_models(module=module):
            yield name, partial(_torchvision, name, options)


def _torchvision(name: str, options: dict[str, Any]) -> tuple[nn.Module, Any]:
    import torchvision

    size = 299 if name == "inception_v3" else 224
    return torchvision.models.get_model(name, weights=None, **options), torch.randn(2, 3, size, size)


def transformers_models() -> Iterator[tuple[str, Callable[[], tuple[nn.Module, Any]]]]:
    import transformers as hf

    text = {
        "vocab_size": 100,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    }
    vision = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    tokens, image = torch.randint(0, 100, (2, 24)), torch.randn(2, 3, 224, 224)
    for name, config, model, x in (
        ("segformer", "SegformerConfig", "SegformerForSemanticSegmentation", image),
        ("vit", "ViTConfig", "ViTForImageClassification", image),
        ("swin", "SwinConfig", "SwinForImageClassification", image),
        ("bert", "BertConfig", "BertForSequenceClassification", tokens),
        ("gpt2", "GPT2Config", "GPT2LMHeadModel", tokens),
        ("llama", "LlamaConfig", "LlamaForCausalLM", tokens),
    ):
        options = {"bert": text, "llama": text, "vit": vision}.get(name, {})
        if name == "gpt2":
            options = {"vocab_size": 100, "n_embd": 64, "n_layer": 2, "n_head": 4}
        yield name, lambda c=config, m=model, o=options, x=x: (getattr(hf, m)(getattr(hf, c)(**o)), x)


SUITES = {"timm": timm_models, "torchvision": torchvision_models, "transformers": transformers_models}


def first_tensor(out: Any) -> Tensor:
    if isinstance(out, Tensor):
        return out
    values = out.values() if isinstance(out, dict) else out
    return next(first_tensor(v) for v in values if isinstance(v, (Tensor, tuple, list, dict)))


def step(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor], int]:
    """Output, gradients by name, and the bytes rewritten operations hold after forward."""
    model.zero_grad()
    torch.manual_seed(0)
    if x.is_floating_point():
        x = x.clone().requires_grad_()
    out = first_tensor(model(x)).float()
    held = held_bytes()
    (-(out.softmax(1) * out.log_softmax(1)).sum(1).mean()).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return out.detach(), gradients | ({"": x.grad} if x.grad is not None else {}), held


def retained_bytes(model: nn.Module, x: Tensor) -> int:
    """What eager autograd keeps for backward: unique storages, parameters and buffers apart."""
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, tuple[int, Tensor]] = {}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage()._cdata not in own:
            kept[t.untyped_storage()._cdata] = t.untyped_storage().nbytes(), t.detach()
        return t

    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x.clone().requires_grad_() if x.is_floating_point() else x)
    return sum(size for size, _ in kept.values())


def check(suite: str, name: str, build: Callable[[], tuple[nn.Module, Any]]) -> Row:
    try:
        torch.manual_seed(0)
        model, x = build()
        model.train()
        state = copy.deepcopy(model.state_dict())
        out, gradients, _ = step(model, x)
        model.load_state_dict(state)
        again, repeated, _ = step(model, x)
        deterministic = torch.equal(out, again) and all(torch.equal(g, repeated[n]) for n, g in gradients.items())
        model.load_state_dict(state)
        eager = retained_bytes(model, x)
        model.load_state_dict(state)
    except Exception as error:
        return Row(suite, name, False, note=f"eager: {type(error).__name__}: {error}"[:150])
    try:
        transformed = surgeon_fx.transform(model)
        exact, exact_gradients, _ = step(transformed, x)
        model.load_state_dict(state)
        surgeon_fx.ratios(transformed).fill(0.9)
        pruned, pruned_gradients, held = step(transformed, x)
    except Exception as error:
        return Row(suite, name, False, note=f"{type(error).__name__}: {error}"[:150])
    same = exact_gradients.keys() == gradients.keys()
    layers = [n for n, m in model.named_modules() if isinstance(m, PRUNABLE)]
    return Row(
        suite,
        name,
        True,
        torch.equal(exact, out),
        same and all(torch.equal(g, exact_gradients[n]) for n, g in gradients.items()),
        torch.equal(pruned, out),
        all(bool(g.isfinite().all()) for g in pruned_gradients.values()),
        len(layers),
        len(surgeon_fx.ratios(transformed)),
        eager,
        held,
        "" if deterministic else "eager itself is not deterministic",
    )


def report(rows: list[Row]) -> str:
    table = [
        {
            "model": f"{row.suite}:{row.model}",
            "transforms": row.transforms,
            "forward": row.forward_equal,
            "gradients": row.gradients_equal,
            "forward 0.9": row.forward_equal_pruned,
            "finite 0.9": row.finite,
            "layers": f"{row.rewritten}/{row.layers}",
            "held/eager": f"{row.held_bytes / max(row.eager_bytes, 1):.2f}",
            "note": row.note,
        }
        for row in rows
    ]
    done = [row for row in rows if row.transforms]
    equal = sum(row.gradients_equal for row in done)
    lines = [tabulate(table, headers="keys"), f"{len(done)} of {len(rows)} transform; {equal} with equal gradients"]
    if done:
        share = median(row.held_bytes / max(row.eager_bytes, 1) for row in done)
        lines.append(f"median of bytes held by rewritten operations at 0.9 over eager's: {share:.3f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=[*SUITES, "all"], default="all")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} models of each suite, evenly spread")
    parser.add_argument("--only", help="models whose name contains this")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "coverage.jsonl")
    arguments = parser.parse_args()
    rows: list[Row] = []
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    with arguments.json.open("w") as file, contextlib.suppress(KeyboardInterrupt):  # what is done is reported
        for suite in SUITES if arguments.suite == "all" else (arguments.suite,):
            models = [m for m in SUITES[suite]() if not arguments.only or arguments.only in m[0]]
            if arguments.quick:
                models = models[:: math.ceil(len(models) / QUICK)]
            for name, build in (bar := tqdm(models, unit="model", file=sys.stderr)):
                bar.set_description(f"{suite}:{name}")
                rows.append(check(suite, name, build))
                file.write(json.dumps(asdict(rows[-1])) + "\n")
                file.flush()
    print(report(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
