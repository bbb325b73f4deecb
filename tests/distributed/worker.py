"""What one of two ranks checks, under torchrun: `worker.py FOLDER CHECK ...`. A check that fails ends the run."""

import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import surgeon_fx
from surgeon_fx import adapt
from surgeon_fx.distributed import local
from surgeon_fx.retained import retained_bytes, storages

# The same operations, without the seconds that a capture takes. Sharded norms lose their weights before a layer that
# shares their save goes backward.
INTERPRETED = surgeon_fx.Config(capture=False, share_saves=True)


class Net(nn.Module):
    def __init__(self, norm=nn.BatchNorm2d):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.ReLU())
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), norm(8), nn.ReLU()) for _ in range(2))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 64, 33), nn.GELU(), nn.Linear(33, 10))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def net(norm=nn.BatchNorm2d):
    torch.manual_seed(0)
    return Net(norm)


def half_net():
    """In bfloat16: FSDP leaves the statistics of batch norms in float32, which torch's refuse."""
    return net(lambda channels: nn.GroupNorm(2, channels))


def batch(seed=0):
    """A rank's own."""
    return torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(100 * dist.get_rank() + seed))


def shard(model, **options):
    for part in (model.stem, *model.blocks):
        fully_shard(part, **options)
    return fully_shard(model, **options)


WRAPPERS = {"ddp": DistributedDataParallel, "fsdp": shard}


def full(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def values(model):
    return {name.removeprefix("module."): full(p.detach()).clone() for name, p in model.named_parameters()}


def gradients(model):
    return {name.removeprefix("module."): full(p.grad) for name, p in model.named_parameters()}


def same(first, second):
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, different


def everywhere(value):
    """The same on every rank."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    assert all(one == found[0] for one in found), found


def parameters_everywhere(model):
    everywhere({name: value.tolist() for name, value in values(model).items()})


def step(model, x):
    model.zero_grad()
    model(x).square().mean().backward()
    return gradients(model)


def check_gradients(folder):
    """At ratio 0 gradients are those of eager under the same wrapper, in graphs and without."""
    for wrap in WRAPPERS.values():
        expected = step(wrap(net()), batch())
        for config in (surgeon_fx.Config(), INTERPRETED):
            same(step(wrap(surgeon_fx.transform(net(), config)), batch()), expected)
    expected = step(DistributedDataParallel(net()), batch())
    wrapped = surgeon_fx.transform(DistributedDataParallel(net()), INTERPRETED)  # the wrapper itself is let go
    same(step(wrapped, batch()), expected)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    expected = step(shard(half_net(), mp_policy=half), batch())
    same(step(shard(surgeon_fx.transform(half_net(), INTERPRETED), mp_policy=half), batch()), expected)


def check_layers(folder):
    """Gathered parameters belong to their layers: ratios of one layer change its gradient and those before it alone."""
    for config in (surgeon_fx.Config(), INTERPRETED):
        exact = step(shard(surgeon_fx.transform(net(), config)), batch())
        model = shard(surgeon_fx.transform(net(), config))
        surgeon_fx.ratios(model)["head.1"] = 0.9
        pruned = step(model, batch())
        different = [name for name in exact if not torch.equal(exact[name], pruned[name])]
        assert different == ["head.1.weight"], different


def check_refused(folder):
    sharded = shard(net())
    for make, message in (
        (lambda: surgeon_fx.transform(sharded), "transform the model first, then call fully_shard"),
        (lambda: adapt.Surgeon(sharded), "transform the model first, then call fully_shard"),
        (lambda: surgeon_fx.transform(nn.DataParallel(net())), "use DistributedDataParallel"),
        (lambda: adapt.CoTTA(DistributedDataParallel(net())), "adapts in one process"),
        (lambda: adapt.Tent(DistributedDataParallel(net())), "waits for a gradient of module.stem.0.weight"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def check_refresh(folder):
    """One table on all ranks; the model as it was; without samples or finite numbers on one rank, that of the other."""
    expected = None
    for name, wrap in WRAPPERS.items():
        model = wrap(surgeon_fx.transform(net(), INTERPRETED))
        model(batch()).square().mean().backward()
        before = (values(model), gradients(model), [b.clone() for b in model.buffers()])
        found = surgeon_fx.refresh(model, batch(), samples=None)
        everywhere(dict(surgeon_fx.ratios(model)))
        everywhere(found.G)
        assert min(found.p.values()) == 0 < max(found.p.values())
        same(values(model), before[0])
        same(gradients(model), before[1])
        assert all(torch.equal(*pair) for pair in zip(model.buffers(), before[2], strict=True))
        step(model, batch())  # and it still trains
        if name == "ddp":  # G by hand: squares over both ranks' own gradients
            alone = surgeon_fx.transform(net(), INTERPRETED)
            alone.load_state_dict({name.removeprefix("module."): x for name, x in model.state_dict().items()})
            expected = surgeon_fx.refresh(alone, batch(), samples=None, group=dist.new_subgroups(1)[0]).G
            squares = torch.tensor([value**2 for value in expected.values()], dtype=torch.float64)
            dist.all_reduce(squares)
            by_hand = dict(zip(expected, (squares / 2).sqrt().tolist(), strict=True))
            assert all(abs(found.G[name] - by_hand[name]) < 1e-4 * by_hand[name] for name in by_hand), (
                found.G,
                by_hand,
            )
    for bad in (torch.full((8, 3, 8, 8), torch.nan), torch.empty(0, 3, 8, 8)):
        for name, wrap in WRAPPERS.items():
            model = wrap(surgeon_fx.transform(net(), INTERPRETED))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = surgeon_fx.refresh(model, bad if dist.get_rank() else batch())
            everywhere(dict(surgeon_fx.ratios(model)))
            if name == "ddp" or not len(bad):
                assert found.G  # the other rank's


def check_adapt(folder):
    """Five batches: ratios and parameters equal on both ranks after each; then one rank's is of no use."""
    for wrap in WRAPPERS.values():
        for options in (
            {},
            {"css": True},
            {"cr": True, "every": 2, "on_shift": True},
            {"loss": "sar"},
            {"loss": "eata"},
        ):
            model = wrap(surgeon_fx.transform(net(), INTERPRETED))
            adapter = adapt.Surgeon(model, lr=1e-2, **options)
            for i in range(5 if not options else 2):
                before = values(model)
                adapter(batch(i).abs().clamp(max=1))
                everywhere(dict(surgeon_fx.ratios(model)))
                parameters_everywhere(model)
            if not options:
                assert any(not torch.equal(before[n], value) for n, value in values(model).items())
                assert adapter.last.refreshed
                adapter.reset()
                same(values(model), {n: p.detach() for n, p in net().named_parameters()})
        for bad in (torch.full((8, 3, 8, 8), torch.nan), torch.empty(0, 3, 8, 8)):
            for make in (adapt.FullTuning, adapt.Surgeon):
                model = wrap(surgeon_fx.transform(net(), INTERPRETED))
                adapter = make(model, lr=1e-2)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    before = values(model)
                    mine = bad if dist.get_rank() else batch()
                    assert len(adapter.predict(mine)) == len(mine)
                    output = adapter(mine)
                    assert output.shape == (len(bad) if dist.get_rank() else 8, 10)
                    assert bool(adapter.last.skipped) == bool(dist.get_rank())
                    parameters_everywhere(model)
                    learnt = values(model)
                    assert any(not torch.equal(before[n], value) for n, value in learnt.items())  # from the other's
                    adapter(bad)  # nobody has anything
                same(values(model), learnt)
                adapter(batch(1))
                parameters_everywhere(model)
                assert not adapter.last.skipped
    # a rank that sits out leaves the others' mean, as if it were not there
    model = DistributedDataParallel(surgeon_fx.transform(net(), INTERPRETED))
    alone = net()
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapt.FullTuning(model, optimizer=sgd)(torch.full((8, 3, 8, 8), torch.nan) if dist.get_rank() else batch())
    first = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))  # rank 0's batch
    adapt.FullTuning(alone, optimizer=sgd)(first)
    for name, value in values(model).items():
        assert torch.allclose(value, alone.get_parameter(name), atol=1e-6), name


def check_scaler(folder):
    """float16 and its scaler under both wrappers: an overflow on one rank lowers the scale on all."""
    for wrap in WRAPPERS.values():
        model = wrap(surgeon_fx.transform(net(), INTERPRETED))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        adapter = adapt.Surgeon(model, lr=1e-2, scaler=scaler)
        with torch.autocast("cpu", torch.float16):
            adapter(batch())
        assert not adapter.last.skipped, adapter.last
        parameters_everywhere(model)
        scaler.update(2.0**40)  # more than float16 bears
        with torch.autocast("cpu", torch.float16), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            before = values(model)
            adapter(batch(1))
        same(values(model), before)
        everywhere(scaler.get_scale())
        assert scaler.get_scale() == 2.0**39


def check_plan(folder):
    """Held activations to the byte, under both wrappers, eager and at three ratios; weights and optimizer in shards."""
    size = dist.get_world_size()
    for name, wrap in WRAPPERS.items():
        sharding = {"ddp": "none", "fsdp": "full"}[name]
        for ratio in (None, 0.0, 0.5, 0.9):
            model = wrap(net() if ratio is None else surgeon_fx.transform(net(), INTERPRETED))
            if ratio is not None:
                surgeon_fx.ratios(model).fill(ratio)
            plan = surgeon_fx.plan(model, batch(), world_size=size, sharding=sharding)
            optimizer = torch.optim.Adam(model.parameters())
            step(model, batch())
            optimizer.step()
            output = model(batch())
            held = retained_bytes(output, model)
            assert plan.saved_bytes == plan.rank.activations == held, (name, ratio, plan.saved_bytes, held)
            assert surgeon_fx.explain(model, batch()).held_bytes == held
            output.sum().backward()
            weights = [local(p) for p in model.parameters()]
            states = [local(x) for one in optimizer.state.values() for x in one.values() if x.dim()]
            grads = [local(p.grad) for p in model.parameters()]
            found = [sum(storages(xs).values()) for xs in (weights, grads, states)]
            found[0] += sum(b.nbytes for b in model.buffers())
            wanted = [plan.rank.weights, plan.rank.gradients, plan.rank.optimizer]
            assert found == wanted or (name == "fsdp" and dist.get_rank()), (name, ratio, found, wanted)
            assert all(a <= b for a, b in zip(found, wanted, strict=True))
    model = DistributedDataParallel(net())
    plan = surgeon_fx.plan(model, batch(), world_size=size, sharding="optimizer")
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    step(model, batch())
    optimizer.step()
    states = optimizer.optim.state.values()
    mine = sum(x.nbytes for one in states for x in one.values() if isinstance(x, torch.Tensor) and x.dim())
    fullest = torch.tensor(mine)
    dist.all_reduce(fullest, dist.ReduceOp.MAX)
    assert fullest == plan.rank.optimizer, (fullest, plan.rank.optimizer)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = shard(surgeon_fx.transform(half_net(), INTERPRETED), mp_policy=half)
    surgeon_fx.ratios(model).fill(0.9)
    plan = surgeon_fx.plan(model, batch())
    assert plan.saved_bytes == retained_bytes(model(batch()), model)
    fit = surgeon_fx.fit(model, batch(), budget=plan.saved_bytes)
    assert 0 <= fit.gap_bytes < 100


def check_tensor_parallel(folder):
    """Layers whose weights are spread over ranks keep what they keep natively; the others are pruned."""

    def build():
        torch.manual_seed(0)
        layers = (nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.LayerNorm(64), nn.Linear(64, 10))
        return nn.Sequential(*layers)

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ways = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    expected = step(parallelize_module(build(), mesh, ways), x)
    for model in (
        parallelize_module(surgeon_fx.transform(build()), mesh, ways),
        surgeon_fx.transform(parallelize_module(build(), mesh, ways), INTERPRETED),
    ):
        same(step(model, x), expected)
        surgeon_fx.ratios(model).fill(0.9)
        found = step(model, x)
        different = [name for name in expected if not torch.equal(found[name], expected[name])]
        assert "4.weight" in different
        assert all(torch.isfinite(grad).all() for grad in found.values())


def check_checkpoint(folder):
    """Saved by two ranks, read by one afterwards: keys are those of the model."""
    model = shard(surgeon_fx.transform(net(), INTERPRETED))
    adapter = adapt.Surgeon(model, lr=1e-2)
    adapter(batch())
    state = get_model_state_dict(model)
    assert state.keys() == net().state_dict().keys()
    checkpoint.save(state, checkpoint_id=folder / "sharded")
    if dist.get_rank() == 0:
        torch.save(values(model), folder / "values.pt")
        surgeon_fx.ratios(model).save(folder / "ratios.json")
    else:
        values(model)
    wrapped = DistributedDataParallel(surgeon_fx.transform(net(), INTERPRETED))
    plain = DistributedDataParallel(net())
    plain.load_state_dict(wrapped.state_dict())
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in sys.argv[2:]:
        globals()[f"check_{name}"](Path(sys.argv[1]))
        if dist.get_rank() == 0:
            print(name, "passed", flush=True)
    dist.destroy_process_group()
