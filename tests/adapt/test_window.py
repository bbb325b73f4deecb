"""Samples one by one."""

import copy
from types import SimpleNamespace

import pytest
import torch
from adapt_cases import Pixels, seeing
from torch import nn

import surgeon_fx
from surgeon_fx import adapt


def test_a_window_predicts_each_sample_and_learns_once_it_is_full(model, x):
    reference = seeing(copy.deepcopy(model))
    optimizer = torch.optim.Adam(reference.parameters(), lr=1e-2)
    window = adapt.Window(adapt.FullTuning(model, lr=1e-2), 3)
    learnt = []
    for i in range(7):
        seen = x[max(0, i - 2) : i + 1]
        out = reference(seen)
        assert torch.allclose(window(x[i : i + 1]), out[-1:], rtol=1e-4, atol=1e-4), i
        learnt.append(not window.last.skipped)
        if i % 3 == 2:
            optimizer.zero_grad()
            surgeon_fx.entropy(out).backward()
            optimizer.step()
    assert learnt == [False, False, True, False, False, True, False]
    state = copy.deepcopy(window.state_dict())
    other = adapt.Window(adapt.FullTuning(copy.deepcopy(model), lr=1e-2), 3)
    other.load_state_dict(state)
    for i in range(3):
        assert torch.equal(window(x[i : i + 1]), other(x[i : i + 1]))
    window.reset()
    assert window.samples == []
    assert "size 3" in repr(window)


def test_without_batch_norm_a_sample_is_predicted_alone(x):
    model = Pixels()
    seen = []
    model.register_forward_hook(lambda m, args, out: seen.append(len(args[0])))
    window = adapt.Window(adapt.FullTuning(model), 2)
    for i in range(4):
        assert window(x[i : i + 1])["out"].shape == (1, 4, 12, 12)
    assert seen == [1, 2, 1, 2]
    with pytest.raises(ValueError, match="one sample at a time"):
        window(x)
    with pytest.raises(ValueError, match="size"):
        adapt.Window(adapt.FullTuning(nn.Linear(2, 2)), 0)


@pytest.mark.parametrize("name", [name for name in adapt.METHODS if name != "ecotta"])
def test_predict_learns_nothing_and_is_what_a_call_returns(name, model, x):
    adapter = adapt.METHODS[name](model, **({"confidence": 0.0} if name == "cotta" else {}))
    state = copy.deepcopy(model.state_dict())
    found = adapter.predict(x)
    assert not found.requires_grad
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(found, adapter(x))


@pytest.mark.parametrize("name", ["cotta", "mecta", "rotta", "surgeon"])
def test_predictions_between_calls_change_nothing(name, model, x):
    options = {"confidence": 1.1, "views": 2} if name == "cotta" else {}
    outputs = []
    for asked in (0, 3):
        adapter = adapt.METHODS[name](copy.deepcopy(model), **options)
        for _ in range(3):
            for _ in range(asked):
                adapter.predict(1 - x)
            outputs.append(adapter(x))
    assert all(map(torch.equal, outputs[:3], outputs[3:]))


def test_a_window_returns_the_last_of_all_that_a_model_says(model, x):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            logits = self.model(x)
            return {"logits": logits, "features": x.mean((2, 3)), "classes": torch.arange(7)}

    window = adapt.Window(adapt.FullTuning(Both()), 3)
    for i in range(4):
        found = window(x[i : i + 1])
        assert {key: value.shape for key, value in found.items()} == {
            "logits": (1, 3),
            "features": (1, 3),
            "classes": (7,),
        }
        assert torch.equal(found["features"], x[i : i + 1].mean((2, 3)))


def test_a_window_over_a_model_that_returns_an_object(model, x):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return SimpleNamespace(logits=self.model(x))

    window = adapt.Window(adapt.FullTuning(Wrapped()), 2)
    for i in range(3):
        assert window(x[i : i + 1]).logits.shape == (1, 3)
