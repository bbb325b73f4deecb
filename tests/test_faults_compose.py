"""What others do around a model: checkpointing inside it, export, functional transforms, threads, data loaders."""

import copy
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from model_cases import Network, Residual, Squares, assert_equal, step
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import surgeon_fx
from surgeon_fx.retained import retained_bytes

OPTIONS = [{}, {"capture": False}]  # graphs, or call by call


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.q, self.k = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.fc1, self.fc2 = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        h = self.norm(x)
        return x + self.fc2(F.gelu(self.fc1(self.q(h) * torch.sigmoid(self.k(h)))))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList([Layer() for _ in range(3)]), nn.Linear(32, 4)

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("ratio", [0.0, 0.9])
def test_checkpointing_inside_a_model(options, ratio):
    torch.manual_seed(0)
    model, x = Checkpointed(), torch.randn(8, 40, 32)
    eager = retained_bytes(model(x), model)
    expected = step(copy.deepcopy(model), x)
    transformed = surgeon_fx.transform(model, surgeon_fx.Config(**options))
    surgeon_fx.ratios(transformed).fill(ratio)
    assert retained_bytes(transformed(x), transformed) <= eager
    actual = step(transformed, x)
    assert torch.equal(actual["output"], expected["output"])
    if ratio == 0:
        assert_equal(actual, expected)
    surgeon_fx.refresh(transformed, x, loss_fn=lambda out: out.square().mean())
    step(transformed, x)  # ratios of all kinds, some of them 0


def hugging_face(name):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 50,
    }
    if name == "bert":
        return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2))


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_hugging_face_checkpointing(name):
    torch.manual_seed(0)
    model = hugging_face(name)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    ids = torch.randint(0, 50, (4, 40))
    batch = {"input_ids": ids, "labels": ids[:, 0] % 2 if name == "bert" else ids}

    def loss_of(one):
        torch.manual_seed(1)
        return one(**batch).loss

    loss = loss_of(model)
    eager = retained_bytes(loss, model)
    loss.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    transformed = surgeon_fx.transform(model)
    for ratio in (0.0, 0.9):
        surgeon_fx.ratios(transformed).fill(ratio)
        ours = loss_of(transformed)
        assert torch.equal(ours, loss)
        assert retained_bytes(ours, transformed) <= eager
        ours.backward()
        if ratio == 0:
            assert_equal({n: p.grad for n, p in transformed.named_parameters() if p.grad is not None}, expected)
        model.zero_grad()


def test_timm_checkpointing():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.models.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=5, drop_path_rate=0.5
    )
    model.set_grad_checkpointing()
    x = torch.randn(8, 3, 16, 16)
    eager = retained_bytes(model(x), model)
    expected = step(copy.deepcopy(model), x)
    transformed = surgeon_fx.transform(model)
    assert_equal(step(transformed, x), expected)
    for ratio in (0.0, 0.9):
        surgeon_fx.ratios(transformed).fill(ratio)
        assert retained_bytes(transformed(x), transformed) <= eager
    assert torch.equal(step(transformed, x)["output"], expected["output"])


def test_hooks_around_a_model_see_all_that_is_saved():
    """`save_on_cpu` and its like move what backward needs somewhere else: nothing may stay behind."""
    torch.manual_seed(0)
    model, x = Layer(), torch.randn(8, 40, 32)
    transformed = surgeon_fx.transform(model, surgeon_fx.Config(share_saves=True))
    apart = surgeon_fx.transform(model)  # what was moved cannot be shared
    for ratio in (0.0, 0.9):
        surgeon_fx.ratios(transformed).fill(ratio)
        surgeon_fx.ratios(apart).fill(ratio)
        expected, elsewhere = step(apart, x), []

        def pack(tensor, elsewhere=elsewhere):
            elsewhere.append(tensor.detach().clone())
            return len(elsewhere) - 1

        transformed.zero_grad()
        with saved_tensors_hooks(pack, elsewhere.__getitem__):
            out = transformed(x)
        assert elsewhere
        assert retained_bytes(out, transformed) == 0
        out.square().mean().backward()
        for name, p in transformed.named_parameters():
            torch.testing.assert_close(p.grad, expected[name])


@pytest.mark.filterwarnings("ignore")  # theirs
def test_the_trainer_finds_the_columns(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    ids = torch.randint(0, 50, (4, 8))
    samples = [{"input_ids": one, "labels": one[0] % 2, "text": "not the model's"} for one in ids]
    arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    model = surgeon_fx.transform(hugging_face("bert"))
    (batch,) = transformers.Trainer(model, arguments, train_dataset=samples).get_train_dataloader()
    assert batch.keys() == {"input_ids", "labels"}
    assert model(**batch).loss.requires_grad


@pytest.fixture
def deployed():
    """A model in evaluation mode, the same one transformed and trained, an input."""
    torch.manual_seed(0)
    model, x = Residual().eval(), torch.randn(2, 8, 10, 10)
    transformed = surgeon_fx.transform(model)
    surgeon_fx.ratios(transformed).fill(0.9)
    transformed(x).sum().backward()
    return model, transformed, x


@pytest.mark.parametrize("grad", [True, False])
def test_export(deployed, grad):
    model, transformed, x = deployed
    with torch.set_grad_enabled(grad):
        exported = torch.export.export(transformed, (x,)).module()
        assert torch.equal(exported(x), model(x))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # group norm checks sizes: torch's own model warns too
@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("grad", [True, False])
def test_jit_trace(deployed, grad):
    model, transformed, x = deployed
    with torch.set_grad_enabled(grad):
        assert torch.equal(torch.jit.trace(transformed, x)(x), model(x))  # its group norm included
        plain = nn.Sequential(nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 3)).eval()
        transformed = surgeon_fx.transform(plain)
        surgeon_fx.ratios(transformed).fill(0.9)
        assert torch.equal(torch.jit.trace(transformed, x)(x), plain(x))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_jit_script_takes_the_restored_model():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval(), torch.randn(2, 3, 9, 9)
    transformed = surgeon_fx.transform(model)
    for one in (transformed, nn.Sequential(transformed), transformed[0]):
        with pytest.raises(AttributeError, match=r"torch.jit.script .*: give it surgeon_fx.restore\(model\)"):
            torch.jit.script(one)
    assert torch.equal(torch.jit.script(surgeon_fx.restore(transformed))(x), model(x))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, of jvp
def test_functional_transforms():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)), torch.randn(40, 64)
    transformed = surgeon_fx.transform(model)
    surgeon_fx.ratios(transformed).fill(0.9)
    parameters = {name: p.detach().clone() * 2 for name, p in model.named_parameters()}

    def loss(values, x, one=transformed):
        return torch.func.functional_call(one, values, (x,)).square().mean()

    actual, expected = torch.func.grad(loss)(parameters, x), torch.func.grad(loss)(parameters, x, model)
    assert_equal(actual, expected)
    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    assert per_sample["0.weight"].shape == (40, 64, 64)
    assert torch.equal(torch.func.vmap(transformed)(x), torch.func.vmap(model)(x))
    _, tangent = torch.func.jvp(transformed, (x,), (x,))
    assert torch.equal(tangent, torch.func.jvp(model, (x,), (x,))[1])


def test_functional_call_trains_what_it_is_given():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)), torch.randn(40, 64)
    transformed = surgeon_fx.transform(model)
    surgeon_fx.ratios(transformed).fill(0.9)
    given = {name: (p.detach() * 2).requires_grad_() for name, p in model.named_parameters()}
    out = torch.func.functional_call(transformed, given, (x,))
    assert torch.equal(out, torch.func.functional_call(model, given, (x,)))
    assert all(g is not None for g in torch.autograd.grad(out.sum(), list(given.values())))


def test_another_thread_without_gradients_during_the_first_step():
    torch.manual_seed(0)
    model, x = Network(), torch.randn(4, 3, 24, 24)
    expected = step(copy.deepcopy(model.eval()), x)
    transformed, started, stop, errors = surgeon_fx.transform(model), threading.Event(), threading.Event(), []

    def work():
        other = nn.Linear(8, 8)
        try:
            while not stop.is_set():
                with torch.no_grad():
                    assert not other(torch.randn(4, 8)).requires_grad
                assert other(torch.randn(4, 8)).requires_grad
                started.set()
        except BaseException as error:
            errors.append(error)

    thread, interval = threading.Thread(target=work), sys.getswitchinterval()
    thread.start()
    started.wait()
    sys.setswitchinterval(1e-5)  # so that many of its rounds fall into the step
    try:
        actual = step(transformed, x)
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert not errors
    assert_equal({k: v for k, v in actual.items() if k != "input"}, {k: v for k, v in expected.items() if k != "input"})


@pytest.mark.parametrize("ratio", [0.0, 0.9])
@pytest.mark.parametrize("options", OPTIONS)
def test_four_threads_train_one_model(ratio, options):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )
    transformed = surgeon_fx.transform(model, surgeon_fx.Config(**options))
    surgeon_fx.ratios(transformed).fill(ratio)
    inputs = [torch.randn(33, 64) for _ in range(4)]
    parameters, results, errors = list(transformed.parameters()), {}, []
    start = threading.Barrier(4)

    def work(i):
        try:
            start.wait()
            results[i] = [torch.autograd.grad(transformed(inputs[i]).square().mean(), parameters) for _ in range(3)]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    alone = surgeon_fx.transform(model)
    surgeon_fx.ratios(alone).fill(ratio)
    for i, steps in results.items():
        expected = torch.autograd.grad(alone(inputs[i]).square().mean(), parameters)
        for found in steps:
            for actual, value in zip(found, expected, strict=True):
                assert torch.equal(actual, value)


@pytest.mark.filterwarnings("ignore:.*fork")  # Python's own, of processes with threads
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_data_loaders_during_the_first_step(start):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    transformed, eager = surgeon_fx.transform(copy.deepcopy(model)), model
    loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context=start, persistent_workers=True)
    count = 0
    for _ in range(2):
        for x in loader:
            for one in (transformed, eager):
                one.zero_grad()
                one(x).square().mean().backward()
            for ours, theirs in zip(transformed.parameters(), eager.parameters(), strict=True):
                assert torch.equal(ours.grad, theirs.grad)
            count += 1
    assert count == 6
