"""Named losses: each step is that of a loop written out in plain torch, in eager and on a transformed model."""

import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from adapt_cases import Pixels, Small, seeing
from torch import nn

import surgeon_fx
from surgeon_fx import adapt
from surgeon_fx.adapt.losses import LOSSES, by_classes
from surgeon_fx.losses import logits_of, with_logits
from surgeon_fx.retained import retained_bytes

NORMS = ("norm.weight", "norm.bias", "blocks.0.norm.weight", "blocks.0.norm.bias")


def batches(count=3):
    """Images in different colors, so that predictions differ."""
    generator = torch.Generator().manual_seed(5)
    colors = torch.rand(count, 16, 3, 1, 1, generator=generator, dtype=torch.float64)
    return list(colors * torch.rand(count, 16, 3, 12, 12, generator=generator, dtype=torch.float64).sqrt())


@pytest.fixture
def model():
    torch.manual_seed(4)
    return Small().double()


@pytest.fixture
def x(x):
    return x.double()


def norms_of(model):
    return {name: p for name, p in model.named_parameters() if "norm" in name}


def written_out_eata(model, stream, d, lr, fisher=None, alpha=1.0):
    """EATA with Adam, from its formulas; what each step chose."""
    seeing(model)
    own = norms_of(model)
    start = {name: p.detach().clone() for name, p in own.items()}
    optimizer = torch.optim.Adam(own.values(), lr=lr)
    mean, counts = None, []
    for x in stream:
        probabilities = F.softmax(model(x), 1)
        entropy = -(probabilities * probabilities.log()).sum(1)
        margin = 0.4 * math.log(probabilities.shape[1])
        keep = [i for i in range(len(x)) if entropy[i] < margin]
        if mean is not None:
            keep = [i for i in keep if abs(F.cosine_similarity(mean, probabilities[i].detach(), dim=0)) < d]
        counts.append(len(keep))
        if not keep:
            continue
        now = probabilities[keep].detach().mean(0)
        mean = now if mean is None else 0.9 * mean + 0.1 * now
        loss = sum(entropy[i] * math.exp(margin - entropy[i].item()) for i in keep) / len(keep)
        if fisher is not None:
            loss = loss + alpha * sum((fisher[n] * (own[n] - start[n]) ** 2).sum() for n in own)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return counts, mean


def assert_close(model, expected):
    for name, parameter in expected.named_parameters():
        assert torch.allclose(dict(model.named_parameters())[name], parameter, rtol=1e-4, atol=1e-6), name


METHODS = {
    "eager": adapt.EATA,
    "loss": lambda model, d, **options: adapt.Tent(model, loss=adapt.EataLoss(d=d), **options),
    "exact": lambda model, d, **options: adapt.StaticSparsity(
        model, loss=adapt.EataLoss(d=d), ratio=0.0, train="norm", **options
    ),
}


@pytest.mark.parametrize(("seed", "d", "counts"), [(4, 0.9, [13, 3, 5]), (3, 0.8, [15, 0, 1])])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_three_steps_of_eata(method, seed, d, counts):
    torch.manual_seed(seed)
    model = Small().double()
    reference = copy.deepcopy(model)
    chosen, mean = written_out_eata(reference, batches(), d, 1e-2)
    assert chosen == counts  # some by both choices, and once none
    adapter = method(model, d=d, lr=1e-2)
    found = []
    for x in batches():
        adapter(x)
        found.append(adapter.last.selected)
    assert found == counts
    assert_close(model, reference)
    assert torch.allclose(adapter.loss.mean, mean, atol=1e-6)
    adapter.reset()
    assert adapter.loss.mean is None


def test_eata_with_fisher(model):
    """The penalty pulls back what clean images rely on; their weight is the squared gradient of a batch's mean."""
    clean, reference = batches(2), copy.deepcopy(model)
    seeing(reference)
    fisher = {name: torch.zeros_like(p) for name, p in norms_of(reference).items()}
    for x in clean:
        logits = reference(x)
        grads = torch.autograd.grad(F.cross_entropy(logits, logits.argmax(1)), list(norms_of(reference).values()))
        for name, grad in zip(fisher, grads, strict=True):
            fisher[name] += grad**2 / len(clean)
    running = model.norm.running_mean.clone()
    adapter = adapt.EATA(model, fisher=[[x, torch.zeros(16)] for x in clean], d=0.9, alpha=5000.0, lr=1e-2)
    assert torch.equal(model.norm.running_mean, running)
    assert all(p.grad is None for p in model.parameters())
    for name, (weight, _) in adapter.loss.fisher.items():
        assert torch.allclose(weight, fisher[name], rtol=1e-3, atol=1e-8), name
    free = copy.deepcopy(model)
    written_out_eata(reference, batches(), 0.9, 1e-2, fisher, 5000.0)
    written_out_eata(free, batches(), 0.9, 1e-2)
    for x in batches():
        adapter(x)
    assert_close(model, reference)
    assert not torch.allclose(free.norm.weight, model.norm.weight, rtol=1e-3)
    with pytest.raises(ValueError, match="at least one batch"):
        adapt.EATA(model, fisher=[])
    with pytest.raises(ValueError, match="fisher must be of parameters"):
        adapt.EATA(model, fisher={"other": (torch.zeros(1), torch.zeros(1))})


@pytest.mark.parametrize("loss", ["eata", "sar", "css"])
def test_uncertain_batches_teach_nothing(loss, model, x):
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    before = copy.deepcopy(model.state_dict())
    for adapter in (adapt.Tent(model, loss=loss), adapt.Surgeon(model, loss=loss)):
        adapter(x)
        assert adapter.last.skipped == "no sample was chosen"
        assert adapter.last.selected == 0
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert getattr(adapter.loss, "mean", None) is None
        assert adapter.optimizer.state == {}


def written_out_sar(model, stream, lr, floor):
    """SAR from its formulas, over norms before the last stage; the moving mean and where the model was reset."""
    seeing(model)
    own = norms_of(model)
    start = {name: p.detach().clone() for name, p in own.items()}
    optimizer = torch.optim.SGD(own.values(), lr=lr, momentum=0.9)
    mean, resets = None, []

    def entropies(x):
        probabilities = F.softmax(model(x), 1)
        return -(probabilities * probabilities.log()).sum(1)

    for i, x in enumerate(stream):
        first = entropies(x)
        margin = 0.4 * math.log(3)
        certain = (first < margin).nonzero().flatten()
        if not len(certain):
            continue
        optimizer.zero_grad()
        first[certain].mean().backward()
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in own.values()))
        before = {name: p.detach().clone() for name, p in own.items()}
        with torch.no_grad():
            for p in own.values():
                p += 0.05 * p.grad / (norm + 1e-12)
        optimizer.zero_grad()
        second = entropies(x)[certain]
        second = second[second < margin]
        if len(second):
            second.mean().backward()
        with torch.no_grad():
            for name, p in own.items():
                p.copy_(before[name])
        if not len(second):
            continue
        optimizer.step()
        mean = second.mean().item() if mean is None else 0.9 * mean + 0.1 * second.mean().item()
        if mean < floor:
            with torch.no_grad():
                for name, p in own.items():
                    p.copy_(start[name])
            optimizer = torch.optim.SGD(own.values(), lr=lr, momentum=0.9)
            mean = None
            resets.append(i)
    return mean, resets


@pytest.mark.parametrize("floor", [0.0, 0.06, 10.0])
@pytest.mark.parametrize("kind", ["eager", "tent", "exact"])
def test_four_steps_of_sar(kind, floor, model):
    reference = copy.deepcopy(model)
    mean, resets = written_out_sar(reference, batches(4), 0.5, floor)
    sgd = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9)
    loss = adapt.SarLoss(floor=floor)
    if kind == "eager":
        adapter = adapt.SAR(model, lr=0.5, floor=floor)
    elif kind == "tent":
        adapter = adapt.Tent(model, loss=loss, optimizer=sgd)
    else:
        adapter = adapt.StaticSparsity(model, loss=loss, ratio=0.0, train="norm", optimizer=sgd)
    found = []
    for i, x in enumerate(batches(4)):
        adapter(x)
        found += [i] if adapter.last.reset else []
    assert found == resets
    assert_close(model, reference)
    assert adapter.loss.mean == (None if mean is None else pytest.approx(mean, rel=1e-4))
    assert (len(resets) == 4) == (floor == 10.0)
    assert (adapter.loss.mean is None) == (floor == 10.0)  # starts anew: the published code writes the old one back


@pytest.mark.parametrize("method", [adapt.SAR, functools.partial(adapt.Surgeon, loss="sar")])
def test_sar_holds_one_graph_at_a_time(method, model):
    """While the second pass runs, nothing of the first is kept for backward any more."""
    outputs, held = [], []

    def leave(module, args, out):
        if out.requires_grad:
            held.append([retained_bytes(one, module) for one in (*outputs, out)])
            outputs.append(out)

    adapter = method(model)
    adapter.model.register_forward_hook(leave)
    adapter(batches(1)[0])
    first, second = held[-2:]
    assert second[-1] == first[-1] > 0
    assert second[-2] < 0.1 * first[-1]


def test_sar_steps_at_the_sharp_point(model):
    """The two passes differ from one: what is tested above is not entropy alone."""
    one, two = copy.deepcopy(model), copy.deepcopy(model)
    x = batches(1)[0]
    sgd = functools.partial(torch.optim.SGD, lr=0.5)
    adapt.Tent(one, loss=lambda out: adapt.SarLoss().value(out, {}), optimizer=sgd)(x)
    adapt.Tent(two, loss=adapt.SarLoss(floor=0.0), optimizer=sgd)(x)
    assert not torch.allclose(one.norm.weight, two.norm.weight, atol=1e-5)


def test_the_floor_of_sar_is_in_proportion_to_the_classes(model, x):
    adapter = adapt.SAR(model)
    adapter.mean_loss = 0.025
    adapter.loss._follow(adapter, 1000)
    assert adapter.last.reset  # 0.025 < 0.2
    adapter.mean_loss = 0.07
    adapter.last = adapt.Step(0.07)
    adapter.loss._follow(adapter, 10)
    assert not adapter.last.reset  # 0.07 > 0.2 * ln 10 / ln 1000
    with pytest.raises(ValueError, match="resettable"):
        adapt.SAR(model, resettable=False)


def test_sar_leaves_the_last_stage_alone():
    def trained(name, **options):
        return set(adapt.SAR(surgeon_fx.zoo.create(name, **options)).trained)

    resnet = trained("resnet20_cifar")
    assert {name.split(".")[0] for name in resnet} == {"bn1", "layer1", "layer2"}
    wide = trained("wrn16_1")
    assert {name.split(".")[0] for name in wide} == {"block1", "block2"}
    vit = trained("vit_cifar")
    every = set(adapt.Tent(surgeon_fx.zoo.create("vit_cifar")).trained)
    assert {name for name in every - vit if "blocks.3" in name}
    assert not {name for name in vit if "blocks.3" in name or name.startswith("norm")}
    with pytest.raises(ValueError, match="train='norm'"):
        adapt.SAR(nn.Linear(2, 2))
    assert adapt.SAR(surgeon_fx.zoo.create("vit_cifar")).optimizer.param_groups[0]["lr"] == 1e-3
    assert adapt.SAR(Small()).optimizer.param_groups[0]["lr"] == 2.5e-4


def test_surgeon_learns_by_any_loss(model, x):
    for loss in [*LOSSES, surgeon_fx.entropy, adapt.EataLoss(margin=0.9), adapt.SarLoss(floor=0.0)]:
        own = copy.deepcopy(model)
        adapter = adapt.Surgeon(own, loss=loss, lr=1e-2)
        adapter(x)
        assert adapter.last.refreshed, loss
        assert not adapter.last.skipped, loss
        assert adapter.last.reset or not torch.equal(own.conv.weight, model.conv.weight), loss
    adapter = adapt.Surgeon(model, loss="eata", cr=True)
    adapter(x)
    assert not adapter.last.skipped
    for options, match in (
        ({"loss": "sar", "cr": True}, "in one pass"),
        ({"loss": "eata", "css": True}, "css"),
        ({"loss": "magic"}, "one of entropy, css, eata, sar"),
        ({"loss": "eata", "loss_fn": surgeon_fx.entropy}, "two names"),
    ):
        with pytest.raises(ValueError, match=match):
            adapt.Surgeon(model, **options)
    with pytest.raises(TypeError, match="loss must be"):
        adapt.Surgeon(model, loss=3)


def test_the_state_of_a_loss_travels(model, x):
    adapter = adapt.EATA(model, lr=1e-2, d=0.99)
    adapter(x)
    other = adapt.EATA(copy.deepcopy(model), lr=1e-2, d=0.99)
    other.load_state_dict(copy.deepcopy(adapter.state_dict()))
    for batch in batches():
        assert torch.equal(adapter(batch), other(batch))
    assert torch.equal(adapter.loss.mean, other.loss.mean)


def test_pixels_are_chosen_one_by_one(x):
    """On maps of scores each pixel is a prediction: the loss is that of the pixels as rows."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(2, 4, 5, 6)
    rows = logits.permute(0, 2, 3, 1).reshape(-1, 4)
    for name in ("entropy", "css", "eata", "sar"):
        maps, flat = LOSSES[name](), LOSSES[name]()
        for _ in range(2):
            a, b = maps.value({"out": logits}, {}), flat.value(rows, {})
            assert maps.selected == flat.selected
            assert (a is None) == (b is None)
            assert a is None or torch.allclose(a, b)
    model = Pixels()
    adapter = adapt.EATA(model, margin=0.99)
    adapter(x.float())
    assert 8 < adapter.last.selected <= 8 * 12 * 12
    assert adapter.loss.mean.shape == (4,)


def test_published_settings_are_those_of_the_nearest_number_of_classes():
    assert [by_classes(n, adapt.EataLoss.PUBLISHED_D) for n in (2, 10, 19, 100, 365, 1000)] == [
        *(0.4, 0.4, 0.4, 0.1, 0.05, 0.05)
    ]


def test_scores_are_found_and_put_back():
    class Named(dict):
        pass

    class Holder:
        def __init__(self, logits):
            self.logits = logits

    old, new = torch.zeros(2, 3), torch.ones(2, 3)
    for output in (old, {"logits": old, "a": 1}, Named(out=old), (old, 5), [old], Holder(old)):
        changed = with_logits(output, new)
        assert type(changed) is type(output)
        assert logits_of(changed) is new
        assert logits_of(output) is old
    pair = torch.return_types.max((old, old))
    assert logits_of(with_logits((pair[0], 1), new)) is new
    for bad in ({"scores": old}, (), None, {"logits": None}):
        with pytest.raises(ValueError, match="class scores"):
            logits_of(bad)
