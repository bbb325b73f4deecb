"""Methods with a teacher: CoTTA and RoTTA, against loops written out in plain torch."""

import copy
import functools
import gc
import math

import pytest
import torch
import torch.nn.functional as F
from adapt_cases import Pixels, Small, seeing
from model_cases import watch
from torch import nn

from surgeon_fx import adapt
from surgeon_fx.adapt.augment import augment, jitter
from surgeon_fx.adapt.norms import RobustNorm
from surgeon_fx.adapt.rotta import Item, Memory


def batches(count=3, batch=8):
    generator = torch.Generator().manual_seed(5)
    return [torch.rand(batch, 3, 12, 12, generator=generator, dtype=torch.float64) for _ in range(count)]


def assert_close(model, expected):
    for name, parameter in expected.named_parameters():
        assert torch.allclose(dict(model.named_parameters())[name], parameter, rtol=1e-4, atol=1e-6), name


def written_out_cotta(student, stream, confidence, symmetric, lr=1e-2, restore=0.2, momentum=0.9, views=3, seed=7):
    teacher, anchor = copy.deepcopy(student), copy.deepcopy(student)
    for model in (student, teacher, anchor):
        seeing(model)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(student.parameters(), lr=lr)
    outputs = []
    for x in stream:
        with torch.no_grad():
            target = teacher(x)
            if F.softmax(anchor(x), 1).max(1).values.mean() < confidence:
                target = torch.stack([teacher(augment(x, generator)) for _ in range(views)]).mean(0)
        logits = student(x)
        loss = -(F.softmax(target, 1) * F.log_softmax(logits, 1)).sum(1).mean()
        if symmetric:
            other = -(F.softmax(logits, 1) * F.log_softmax(target, 1)).sum(1).mean()
            loss = 0.5 * loss + 0.5 * other
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
                t.copy_(momentum * t + (1 - momentum) * s)
            for s, source in zip(student.parameters(), anchor.parameters(), strict=True):
                lost = torch.rand(s.shape, generator=generator) < restore
                s[lost] = source[lost]
        outputs.append(target)
    return teacher, outputs


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("confidence", [0.0, 1.1])
def test_three_steps_of_cotta(confidence, symmetric, model):
    model.double()
    reference = copy.deepcopy(model)
    teacher, outputs = written_out_cotta(reference, batches(), confidence, symmetric)
    options = {"confidence": confidence, "symmetric": symmetric, "restore": 0.2, "momentum": 0.9, "views": 3, "seed": 7}
    adapter = adapt.CoTTA(model, lr=1e-2, **options)
    start = copy.deepcopy(model.state_dict())
    for x, expected in zip(batches(), outputs, strict=True):
        assert torch.allclose(adapter(x), expected, rtol=1e-4, atol=1e-5)
    assert_close(model, reference)
    assert_close(adapter.teacher, teacher)
    assert all(torch.equal(p, start[name]) for name, p in adapter.anchor.named_parameters())
    adapter.reset()
    assert all(torch.equal(p, start[name]) for name, p in model.named_parameters())
    assert all(torch.equal(p, start[name]) for name, p in adapter.teacher.named_parameters())
    assert torch.allclose(adapter(batches()[0]), outputs[0], rtol=1e-4, atol=1e-5)


def test_views_are_made_only_where_they_are_needed(model, x):
    seen = []

    def view(y, generator):
        seen.append(y)
        return y

    adapt.CoTTA(model, confidence=0.0, augment=view)(x)
    assert not seen
    adapt.CoTTA(model, confidence=1.1, augment=view)(x)
    assert len(seen) == 32
    with pytest.raises(ValueError, match="pixels in"):
        adapt.CoTTA(model, confidence=1.1)(x - 1)


def test_teacher_and_anchor_hold_no_graph(model, x):
    adapter = adapt.CoTTA(model, confidence=1.1, views=2)
    enabled, alive = {}, []
    for name, one in (("student", model), ("teacher", adapter.teacher), ("anchor", adapter.anchor)):
        one.register_forward_hook(lambda m, args, out, name=name: enabled.update({name: out.requires_grad}))
    model.register_forward_hook(lambda m, args, out: alive.extend(watch(out)))
    kept = adapter(x)
    gc.collect()
    assert enabled == {"student": True, "teacher": False, "anchor": False}
    assert alive
    assert all(reference() is None for reference in alive)
    assert not kept.requires_grad
    assert adapter._initial["trained"]["conv.weight"].data_ptr() == adapter.anchor.conv.weight.data_ptr()


def test_pixels_learn_the_teachers_class(x):
    """Where the source is sure its teacher's class at scale 1, else the mean over scales and flips."""
    torch.manual_seed(0)
    student = Pixels().double()
    teacher, anchor = copy.deepcopy(student), copy.deepcopy(student)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)
    adapter = adapt.CoTTA(copy.deepcopy(student), lr=1e-2, confidence=0.3, restore=0.0, momentum=0.5)
    for batch in batches(3, 2):
        with torch.no_grad():
            own = F.softmax(teacher(batch)["out"], 1)
            sure = F.softmax(anchor(batch)["out"], 1).max(1, keepdim=True).values > 0.3
            views = []
            for size in (6, 9, 12, 15, 18, 21, 24):
                scaled = F.interpolate(batch, size=(size, size), mode="bilinear", align_corners=False)
                for flipped in (False, True):
                    seen = F.softmax(teacher(scaled.flip(3) if flipped else scaled)["out"], 1)
                    seen = F.interpolate(seen, size=(12, 12), mode="bilinear", align_corners=False)
                    views.append(seen.flip(3) if flipped else seen)
            target = torch.where(sure, own, torch.stack(views).mean(0))
        assert 0 < sure.float().mean() < 1
        F.cross_entropy(student(batch)["out"], target.argmax(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
                t.copy_(0.5 * t + 0.5 * s)
        found = adapter(batch)
        assert set(found) == {"out"}
        assert torch.allclose(found["out"], target.log(), atol=1e-4)
    assert_close(adapter.model, student)
    assert_close(adapter.teacher, teacher)


class Written(nn.Module):
    """RoTTA's norm, from its formula."""

    def __init__(self, norm, momentum):
        super().__init__()
        self.weight, self.bias, self.eps, self.momentum = norm.weight, norm.bias, norm.eps, momentum
        self.mean, self.var = norm.running_mean.clone(), norm.running_var.clone()

    def forward(self, x):
        if self.training:
            mean = (1 - self.momentum) * self.mean + self.momentum * x.mean((0, 2, 3))
            var = (1 - self.momentum) * self.var + self.momentum * x.var((0, 2, 3), unbiased=False)
            self.mean, self.var = mean.detach(), var.detach()
        else:
            mean, var = self.mean, self.var
        x = (x - mean[:, None, None]) / (var[:, None, None] + self.eps).sqrt()
        return self.weight[:, None, None] * x + self.bias[:, None, None]


def written_out_rotta(student, stream, capacity, every, seed=3, lr=1e-2, momentum=0.9):
    """RoTTA over a memory that never has to give anything up."""
    teacher = copy.deepcopy(student)
    for model in (student, teacher):
        model.norm, model.blocks[0].norm = Written(model.norm, 0.05), Written(model.blocks[0].norm, 0.05)
    generator = torch.Generator().manual_seed(seed)
    own = [p for name, p in student.named_parameters() if "norm" in name]
    optimizer = torch.optim.Adam(own, lr=lr)
    memory, count, outputs = [], 0, []
    for x in stream:
        teacher.eval()
        with torch.no_grad():
            outputs.append(teacher(x))
        for sample in x:
            memory.append([sample, 0])
            for item in memory:
                item[1] += 1
            count += 1
            if count % every == 0:
                data = torch.stack([item[0] for item in memory])
                age = torch.tensor([item[1] / capacity for item in memory])
                for model in (student, teacher):
                    model.eval()
                    model.norm.train()
                    model.blocks[0].norm.train()
                with torch.no_grad():
                    target = F.softmax(teacher(data), 1)
                found = F.log_softmax(student(augment(data, generator)), 1)
                loss = (-(target * found).sum(1) * torch.sigmoid(-age)).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    for (name, t), s in zip(teacher.named_parameters(), student.parameters(), strict=True):
                        if "norm" in name:
                            t.copy_(momentum * t + (1 - momentum) * s)
    return teacher, outputs


def test_three_batches_of_rotta(model):
    model.double().norm.running_mean.fill_(0.2)
    model.norm.running_var.fill_(0.7)
    reference, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    capacity = 1000  # more than three classes can fill
    teacher, outputs = written_out_rotta(reference, batches(3, 4), capacity, every=6)
    adapter = adapt.RoTTA(model, lr=1e-2, capacity=capacity, every=6, momentum=0.9, seed=3)
    learnt = []
    for x, expected in zip(batches(3, 4), outputs, strict=True):
        assert torch.allclose(adapter(x), expected, rtol=1e-4, atol=1e-5)
        learnt.append(not adapter.last.skipped)
    assert learnt == [False, True, True]
    assert_close(model, reference)
    assert_close(adapter.teacher, teacher)
    for mine, written in ((adapter.norms, reference), (adapter.teacher_norms, teacher)):
        for norm, expected in zip(mine.values(), (written.norm, written.blocks[0].norm), strict=True):
            assert torch.allclose(norm.mean, expected.mean, atol=1e-5)
            assert torch.allclose(norm.var, expected.var, atol=1e-5)
    assert torch.equal(model.norm.running_mean, before["norm.running_mean"])
    assert len(adapter.memory.items) == 12
    adapter.reset()
    assert not adapter.memory.items
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.allclose(adapter(batches(3, 4)[0]), outputs[0], rtol=1e-4, atol=1e-5)


def test_the_state_of_teachers_travels(model):
    for method in (functools.partial(adapt.RoTTA, capacity=5), functools.partial(adapt.CoTTA, views=2, confidence=1.1)):
        first = method(copy.deepcopy(model.double()))
        for x in batches(2):
            first(x)
        second = method(copy.deepcopy(model))
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        for x in batches(3):
            assert torch.equal(first(x), second(x))


def dispensable(item, capacity, classes):
    return 1 / (1 + math.exp(-item.age / capacity)) + item.entropy / math.log(classes)


def test_memory_keeps_classes_in_balance():
    memory = Memory(4)

    def add(label, entropy):
        memory.add(Item(torch.zeros(1), label, entropy), 2)

    for entropy in (0.1, 0.5, 0.3):
        add(0, entropy)
    assert [item.entropy for item in memory.items] == [0.1, 0.3]  # two places a class: the least certain went
    add(0, 0.69)
    assert [item.entropy for item in memory.items] == [0.1, 0.3]  # more dispensable than what is there
    assert [item.age for item in memory.items] == [4, 2]
    add(1, 0.6)
    add(1, 0.6)
    assert sorted(item.label for item in memory.items) == [0, 0, 1, 1]
    full = Memory(3)
    for label, entropy in ((0, 0.2), (0, 0.6), (1, 0.1)):
        full.add(Item(torch.zeros(1), label, entropy), 2)
    full.add(Item(torch.zeros(1), 1, 0.05), 2)  # has room by class, and the memory is full: a majority class gives
    assert sorted((item.label, item.entropy) for item in full.items) == [(0, 0.2), (1, 0.05), (1, 0.1)]


def test_memory_is_what_the_rule_says():
    """A long random stream against the rule applied to plain lists."""
    generator = torch.Generator().manual_seed(0)
    capacity, classes = 6, 3
    memory, plain = Memory(capacity), []
    for i in range(80):
        label = min(int(torch.randint(0, 5, (), generator=generator)), 2)
        entropy = float(torch.rand((), generator=generator))
        memory.add(Item(torch.tensor(i), label, entropy), classes)
        counts = [sum(item.label == c for item in plain) for c in range(classes)]
        new, fits = Item(torch.tensor(i), label, entropy), True
        if counts[label] >= capacity / classes or len(plain) == capacity:
            among = (
                [label] if counts[label] >= capacity / classes else [c for c in range(3) if counts[c] == max(counts)]
            )
            scores = [dispensable(item, capacity, classes) if item.label in among else -1 for item in plain]
            worst = max(range(len(plain)), key=scores.__getitem__)
            fits = scores[worst] > dispensable(new, capacity, classes)
            if fits:
                plain.pop(worst)
        plain += [new] if fits else []
        for item in plain:
            item.age += 1
        assert [(int(a.sample), a.age) for a in memory.items] == [(int(b.sample), b.age) for b in plain]
    assert len(plain) > 4


def test_what_teachers_refuse(model, x):
    with pytest.raises(ValueError, match="leave out loss"):
        adapt.CoTTA(model, loss="eata")
    with pytest.raises(ValueError, match="before transform"):
        adapt.RoTTA(adapt.Surgeon(model).model)
    with pytest.raises(ValueError, match="are maps"):
        adapt.RoTTA(Pixels())(x)
    with pytest.raises(ValueError, match="must be a tensor"):
        adapt.RoTTA(model)((x,))
    with pytest.raises(ValueError, match="prior"):
        adapt.RoTTA(model, prior=3)
    with pytest.raises(ValueError, match="views"):
        adapt.CoTTA(model, views=0)


def test_a_norm_without_statistics_takes_the_first_batch(x):
    norm = RobustNorm(nn.BatchNorm2d(3, track_running_stats=False))
    expected = F.batch_norm(x, None, None, training=True)
    assert torch.allclose(norm(x), expected, atol=1e-5)
    assert torch.allclose(
        norm(x[:1] + 5), (x[:1] + 5 - norm.mean[:, None, None]) * (norm.var[:, None, None] + 1e-5).rsqrt()
    )


def test_jitter_changes_some_images(x):
    generator = torch.Generator().manual_seed(0)
    made = jitter(x.repeat(8, 1, 1, 1), generator)
    changed = (made - x.repeat(8, 1, 1, 1)).abs().amax((1, 2, 3)) > 1e-3
    assert 16 < changed.sum() < 56
    assert made.min() >= 0
    assert made.max() <= 1
    assert Small()(made[:2]).shape == (2, 3)


@pytest.mark.parametrize("name", ["mecta", "rotta"])
def test_norms_with_an_activation_inside(name, x):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("tf_efficientnet_lite0", num_classes=3).eval()
    expected = model(x)
    adapter = adapt.METHODS[name](model, **({"capacity": 4} if name == "rotta" else {}))
    if name == "rotta":
        assert torch.allclose(adapter.predict(x), expected, rtol=1e-3, atol=1e-5)
    norms = adapter.norms
    assert len(norms) > 40
    for norm, ours in norms.items():  # each by itself, with the source's statistics
        values = torch.randn(2, ours.mean.numel(), 3, 3)
        assert torch.allclose(ours(values), norm(values), rtol=1e-4, atol=1e-5)
    assert any(ours.behind for ours in norms.values())
    assert adapter(x).isfinite().all()


@pytest.mark.parametrize("method", [adapt.MECTA, adapt.RoTTA])
def test_norms_that_do_more_are_refused(method):
    class Odd(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x) * 2

    with pytest.raises(ValueError, match="Odd has a forward of its own"):
        method(nn.Sequential(nn.Conv2d(3, 4, 1), Odd(4)))


@pytest.mark.parametrize("name", ["mecta", "rotta"])
def test_statistics_of_their_own_under_autocast(name, model, x):
    adapter = adapt.METHODS[name](model, **({"capacity": 4} if name == "rotta" else {}))
    before = [norm.mean for norm in adapter.norms.values()]
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            assert adapter(x).isfinite().all()
    assert not adapter.last.skipped
    for norm, mean in zip(adapter.norms.values(), before, strict=True):
        assert norm.mean.dtype is torch.float32
        assert not torch.equal(norm.mean, mean)


def test_scores_of_pixels_are_finite(x):
    model = Pixels()
    with torch.no_grad():
        next(model.parameters()).mul_(1e4)
    assert adapt.CoTTA(model)(x)["out"].isfinite().all()
    assert adapt.CoTTA(model, confidence=0.0)(x)["out"].isfinite().all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: adapt.CoTTA(model, momentum=2), "momentum must be from 0 to 1"),
        (lambda model: adapt.CoTTA(model, restore=float("nan")), "restore must be from 0 to 1"),
        (lambda model: adapt.RoTTA(model, norm_momentum=5), "norm_momentum must be from 0 to 1"),
        (lambda model: adapt.EATA(model, margin=float("nan")), "margin must be a number, 0 or more"),
        (lambda model: adapt.EATA(model, d=-1), "d must be a number, 0 or more"),
        (lambda model: adapt.SAR(model, rho=float("inf")), "rho must be a number, 0 or more"),
        (lambda model: adapt.Tent(model, prior=float("nan")), "prior must be a number of samples"),
        (lambda model: adapt.Tent(model, lr=float("nan")), "lr must not be negative"),
        (lambda model: adapt.EATA(model, fisher=[torch.full((2, 3, 12, 12), float("nan"))]), "fisher is not finite"),
    ],
)
def test_settings_that_make_no_sense(make, message, model):
    with pytest.raises(ValueError, match=message):
        make(model)


def test_fisher_takes_images_with_or_without_labels(model, x):
    labels = torch.zeros(len(x), dtype=torch.int64)
    plain, *others = (adapt.find_fisher(model, [batch]) for batch in (x, (x, labels), [x, labels], (x,)))
    for other in others:
        assert all(torch.equal(plain[name][0], other[name][0]) for name in plain)
