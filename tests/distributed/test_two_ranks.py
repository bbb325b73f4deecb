"""Two processes under torchrun train, adapt, plan and save one model: `worker.py` has the checks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import surgeon_fx

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="torch without gloo"
)
HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def torchrun(script, *arguments):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        str(script),
        *map(str, arguments),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


@pytest.mark.parametrize(
    "checks",
    [("gradients", "layers"), ("refused", "refresh", "adapt"), ("scaler", "plan", "tensor_parallel")],
    ids="-".join,
)
def test_two_ranks(tmp_path, checks):
    out = torchrun(HERE / "worker.py", tmp_path, *checks)
    assert out.split() == [word for name in checks for word in (name, "passed")]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_two_ranks_is_read_by_one(tmp_path):
    from torch.distributed import checkpoint

    torchrun(HERE / "worker.py", tmp_path, "checkpoint")
    sys.path.insert(0, str(HERE))
    from worker import INTERPRETED, net

    model = surgeon_fx.transform(net(), INTERPRETED)
    state = model.state_dict()
    checkpoint.load(state, checkpoint_id=tmp_path / "sharded")
    model.load_state_dict(state)
    surgeon_fx.ratios(model).load(tmp_path / "ratios.json")
    saved = torch.load(tmp_path / "values.pt")
    assert saved.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, saved[name]), name
    assert not torch.equal(saved["head.1.weight"], net().head[1].weight)
    model(torch.randn(2, 3, 8, 8)).sum().backward()


@pytest.mark.parametrize("options", [(), ("--shard",)])
def test_the_example_runs(options):
    out = torchrun(ROOT / "examples" / "adapt_distributed.py", *options)
    assert out.count("the batch is empty") == 1
    assert "parameters are equal on both ranks: True" in out
    assert "ratios are equal on both ranks: True" in out


def test_data_parallel_is_refused():
    with pytest.raises(ValueError, match="use DistributedDataParallel"):
        surgeon_fx.transform(nn.DataParallel(nn.Linear(2, 2)))


def test_a_rank_of_many():
    model = surgeon_fx.transform(nn.Sequential(nn.Linear(64, 100, bias=False), nn.ReLU(), nn.Linear(100, 3)))
    weights = 4 * (6400 + 300 + 3)
    found = {
        (ranks, sharding): surgeon_fx.plan(model, (8, 64), world_size=ranks, sharding=sharding).rank
        for ranks in (1, 2, 1024)
        for sharding in ("none", "optimizer", "full")
    }
    held = surgeon_fx.plan(model, (8, 64)).saved_bytes
    assert all(rank.activations == held for rank in found.values())
    assert all(rank.weights == weights for (ranks, sharding), rank in found.items() if sharding != "full")
    assert found[2, "full"].weights == 4 * (3200 + 2 * 100 + 2)  # three rows are two and one, padded
    assert found[1024, "full"].weights == 4 * (64 + 100 + 1)  # a row each is the least
    assert found[2, "none"].optimizer == 2 * weights
    assert found[2, "optimizer"].optimizer == found[1024, "optimizer"].optimizer == 2 * 4 * 6400  # the largest, whole
    assert found[1, "full"].communication == found[1, "none"].communication == 0
    assert found[2, "none"].communication == weights
    assert found[2, "full"].total == sum(
        getattr(found[2, "full"], part)
        for part in ("weights", "gradients", "optimizer", "communication", "activations")
    )
    frozen = surgeon_fx.plan(model, (8, 64), train=lambda name, p: "2." in name, world_size=2, optimizer_states=1).rank
    assert frozen.gradients == frozen.optimizer == 4 * 303
    assert "of a rank of 2" in str(surgeon_fx.plan(model, (8, 64), world_size=2))
    for options, message in (
        ({"world_size": 0}, "world_size must be"),
        ({"world_size": 2, "sharding": "zero"}, "sharding must be one of"),
        ({"sharding": "full"}, "give world_size"),
        ({"world_size": 2, "optimizer_states": -1}, "optimizer_states must be"),
    ):
        with pytest.raises(ValueError, match=message):
            surgeon_fx.plan(model, (8, 64), **options)
