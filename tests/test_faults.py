"""Training follows the model as it is now: attributes, globals, containers, NumPy, side effects."""

import copy
import inspect

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from model_cases import assert_equal, step
from torch import fx, nn

import surgeon_fx
from surgeon_fx.api import rewrite_of

FACTOR = 1.0
X = torch.randn(20, 16, generator=torch.Generator().manual_seed(0))


class Changing(nn.Module):
    """Reads everything that may change between two steps."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.scale, self.config, self.drop, self.rate = 1.0, {"act": "relu", "power": 1}, nn.Dropout(0.0), 0.0

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x = F.relu(x) if self.config["act"] == "relu" else F.gelu(x)
        x = self.drop(x) * self.scale * FACTOR
        if self.rate > 0:
            x = F.dropout(x, self.rate, self.training)
        return x ** self.config["power"] if self.config["power"] > 1 else x


class Acting(Changing):
    """And does more than return a value."""

    def __init__(self):
        super().__init__()
        self.seen, self.calls = [], 0

    def forward(self, x):
        self.calls += 1
        x = super().forward(x) * float(np.random.rand())
        self.seen.append(x.detach().mean().item())
        return x


def set_global(model):
    global FACTOR
    FACTOR = 3.0


CHANGES = {
    "attribute": lambda model: setattr(model, "scale", 3.0),
    "config": lambda model: model.config.update(act="gelu"),
    "number in the config": lambda model: model.config.update(power=2),
    "longer list": lambda model: model.layers.append(copy.deepcopy(model.layers[0])),
    "shorter list": lambda model: model.layers.__delitem__(1),
    "replaced layer": lambda model: model.layers.__setitem__(0, copy.deepcopy(model.layers[1])),
    "drop rate": lambda model: setattr(model, "rate", 0.5),
    "dropout layer": lambda model: setattr(model.drop, "p", 0.5),
    "mode": lambda model: model.eval(),
    "global": set_global,
    "frozen": lambda model: model.layers[0].requires_grad_(False),
}


@pytest.fixture(autouse=True)
def same_global():
    global FACTOR
    FACTOR = 1.0
    yield
    FACTOR = 1.0


@pytest.mark.parametrize("build", [Changing, Acting])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_after_the_first_step_counts(name, build):
    torch.manual_seed(0)
    model = build()
    transformed = surgeon_fx.transform(copy.deepcopy(model))
    surgeon_fx.ratios(transformed).fill(0.9)  # of 1280 bytes, which is too little to prune: exact all the same
    for change in (None, CHANGES[name], None):
        if change is not None:
            change(transformed)
            change(model)
        np.random.seed(0)
        expected = step(model, X)
        np.random.seed(0)
        assert_equal(step(transformed, X), expected)
    if build is Acting:
        assert transformed.calls == model.calls == 3
        assert transformed.seen == model.seen


def timm_drop_path(timm):
    model = timm.models.VisionTransformer(
        img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=5, drop_path_rate=0.1
    )
    return model, lambda one: setattr(one.blocks[1].drop_path1, "drop_prob", 0.9)


def timm_drop_rate(timm):
    block = timm.models.resnet.BasicBlock
    model = timm.models.ResNet(block, (1, 1, 1, 1), channels=(4, 4, 4, 4), stem_width=4, num_classes=5)
    return model, lambda one: setattr(one, "drop_rate", 0.5)


@pytest.mark.parametrize("build", [timm_drop_path, timm_drop_rate])
def test_rates_of_timm(build):
    torch.manual_seed(0)
    model, change = build(pytest.importorskip("timm"))
    transformed, x = surgeon_fx.transform(copy.deepcopy(model)), torch.randn(20, 3, 8, 8)
    for changes in (False, True):
        if changes:
            before = step(copy.deepcopy(model), x)["output"]
            change(model)
            change(transformed)
        expected = step(model, x)
        assert_equal(step(transformed, x), expected)
    assert not torch.equal(before, expected["output"])


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return F.relu(self.layer(x)) * np.random.rand()


@pytest.mark.parametrize("build", [Noise, Acting])
def test_numpy_draws_anew(build):
    model = surgeon_fx.transform(build())
    np.random.seed(0)
    outputs = [model(X) for _ in range(4)]
    assert len({out.sum().item() for out in outputs}) == 4


class Collecting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.features = nn.Linear(16, 16), []

    def forward(self, x):
        y = F.relu(self.layer(x))
        self.features.append(y)
        return y


def test_a_list_of_the_model_is_appended_to():
    model = surgeon_fx.transform(Collecting())
    outputs = [model(X) for _ in range(3)]
    assert len(model.features) == 3
    assert all(torch.equal(one, out) for one, out in zip(model.features, outputs, strict=True))


class Defaults(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x, size=(2, 8), *, scales=[0.5, 2.0], options={"act": "relu"}, text="'\"\n"):  # noqa: B006
        x = F.relu(self.layer(x)) if options["act"] == "relu" else self.layer(x)
        return (x.unflatten(1, size) * scales[0]).flatten(1) * scales[1] + len(text)


def test_container_defaults():
    model = Defaults()
    transformed = surgeon_fx.transform(copy.deepcopy(model))
    assert_equal(step(transformed, X), step(model, X))
    assert torch.equal(transformed(X, (4, 4), options={"act": ""}), model(X, (4, 4), options={"act": ""}))
    assert torch.equal(transformed(X, scales=[3.0, 1.0]), model(X, scales=[3.0, 1.0]))


def test_the_signature_is_the_models():
    model = surgeon_fx.transform(Defaults())
    assert inspect.signature(model.forward) == inspect.signature(Defaults().forward)
    assert list(inspect.signature(model.forward).parameters) == ["x", "size", "scales", "options", "text"]


class AdaptivePool(nn.AdaptiveAvgPool2d):
    pass


class MyLinear(nn.Linear):
    def forward(self, input):
        return super().forward(input) + 1


class MyNormlessNorm(nn.Module):
    """A name is not a kind."""

    def forward(self, x):
        return F.relu(x)


@pytest.mark.parametrize("ratio", [0.0, 0.9])
def test_subclasses_with_unlucky_names(ratio):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), MyNormlessNorm(), AdaptivePool(5), nn.Flatten(), MyLinear(100, 7))
    x = torch.randn(4, 3, 20, 20)
    expected = step(copy.deepcopy(model), x)
    transformed = surgeon_fx.transform(model)
    surgeon_fx.ratios(transformed).fill(ratio)
    actual = step(transformed, x)
    assert torch.equal(actual["output"], expected["output"])
    if ratio == 0:
        assert_equal(actual, expected)
    assert list(surgeon_fx.ratios(transformed)) == ["0", "4"]


def test_graph_modules():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(1296, 5))
    traced, x = fx.symbolic_trace(model), torch.randn(4, 3, 20, 20)
    expected = step(copy.deepcopy(traced), x)
    transformed = surgeon_fx.transform(traced)
    assert_equal(step(transformed, x), expected)
    assert list(surgeon_fx.ratios(transformed)) == ["0", "1", "4"]
    surgeon_fx.ratios(transformed).fill(0.9)
    (graph,) = surgeon_fx.explain(transformed, x).graphs
    assert "surgeon_fx_ops_conv_conv2d" in graph.code


def test_feature_extractors():
    models = pytest.importorskip("torchvision.models")
    extraction = pytest.importorskip("torchvision.models.feature_extraction")
    torch.manual_seed(0)
    model = extraction.create_feature_extractor(models.squeezenet1_1(), {"features.5": "low", "features.7": "high"})
    x = torch.randn(1, 3, 64, 64)
    transformed = surgeon_fx.transform(model)
    for name, value in transformed(x).items():
        assert torch.equal(value, model(x)[name])


def test_restore_after_a_change_of_precision():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    transformed = surgeon_fx.transform(model).double()
    x = torch.randn(2, 3, 9, 9).double()
    transformed(x).sum().backward()
    plain = surgeon_fx.restore(transformed)
    assert type(plain) is nn.Sequential
    assert not surgeon_fx.api.is_transformed(plain)
    for name, value in plain.state_dict(keep_vars=True).items():
        assert value is transformed.state_dict(keep_vars=True)[name]
    assert plain[1].running_mean.dtype == torch.float64
    assert torch.equal(plain.eval()(x), transformed.eval()(x))
    assert surgeon_fx.ratios(surgeon_fx.transform(plain))


def test_models_that_are_compiled_are_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.compile()
    with pytest.raises(ValueError, match="compiled: transform it first"):
        surgeon_fx.transform(model)
    part = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    part[1].compile()
    with pytest.raises(ValueError, match="its part 1 is compiled"):
        surgeon_fx.transform(part)
    with pytest.raises(ValueError, match="compiled"):
        surgeon_fx.transform(torch.compile(nn.Linear(4, 4)))


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@pytest.fixture
def wrapped():
    torch.manual_seed(0)
    inner = surgeon_fx.transform(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)))
    return Wrapper(Wrapper(inner)), inner, torch.randn(100, 16)


def test_ratios_through_wrappers(wrapped):
    model, inner, _ = wrapped
    assert surgeon_fx.ratios(model) is surgeon_fx.ratios(inner)
    two = Wrapper(nn.ModuleList([inner, surgeon_fx.transform(nn.Sequential(nn.Linear(2, 2)))]))
    with pytest.raises(ValueError, match="several transformed"):
        surgeon_fx.ratios(two)


def test_refresh_through_wrappers(wrapped):
    model, inner, x = wrapped
    surgeon_fx.refresh(model, x, loss_fn=surgeon_fx.entropy)
    assert any(surgeon_fx.ratios(inner).values())


def test_explain_through_wrappers(wrapped):
    model, inner, x = wrapped
    surgeon_fx.ratios(inner).fill(0.9)
    found = surgeon_fx.explain(model, x)
    assert found.transformed
    assert found.held_bytes < 0.5 * found.dense_bytes
    assert len(found.graphs) == 1
    assert surgeon_fx.plan(model, x).saved_bytes == found.held_bytes


def test_batch_sizes_may_change():
    model = surgeon_fx.transform(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)))
    surgeon_fx.ratios(model).fill(0.9)
    for batch in (4, 6, 3, 9, 15, 16, 33):
        model(torch.randn(batch, 3, 24, 24)).sum().backward()
    assert len(rewrite_of(model).captures) <= 2
    for size in (20, 28, 36, 44):
        model(torch.randn(4, 3, size, size)).sum().backward()
    assert len(rewrite_of(model).captures) <= 3


def test_ratios_do_not_trace_again():
    model = surgeon_fx.transform(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)))
    x = torch.randn(50, 64)
    for i in range(10):
        surgeon_fx.ratios(model).update({"0": i / 10, "2": 0.9 - i / 10})
        model(x).sum().backward()
    assert len(rewrite_of(model).captures) == 1
