"""Small models with every way to write a layer, and one step of training."""

import weakref

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import surgeon_fx
from surgeon_fx.retained import nodes


class Residual(nn.Module):
    """Every way to write an activation, a shared input, a gate, dropout."""

    def __init__(self, channels=8):
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.shortcut = nn.Conv2d(channels, channels, 1)
        self.norm2 = nn.GroupNorm(2, channels)
        self.act = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, padding_mode="reflect", groups=2)
        self.squeeze = nn.Conv2d(channels, channels, 1)

    def forward(self, x, scale=None):
        h = F.relu(self.norm1(x))
        out = self.conv2(self.act(self.norm2(self.conv1(h))))
        gate = torch.sigmoid(self.squeeze(F.adaptive_avg_pool2d(out, 1)))
        out = F.dropout(out * gate, 0.3, self.training) + self.shortcut(h)
        return out if scale is None else out * scale


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(2))
        self.blocks = nn.ModuleList([Residual(), Residual()])
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.norm = nn.InstanceNorm2d(8, affine=True)
        self.unused, self.empty = nn.Linear(2, 2), nn.Sequential()
        self.head = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 5))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        if x.shape[0] > 1000:  # control flow on data: this level stays Python
            return None
        x = F.leaky_relu(self.norm(self.up(x)))
        return self.head(F.silu(x).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, dim=16, heads=2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))
        return (x + self.fc2(F.gelu(self.fc1(self.norm2(x)))))[:, 0]


MODELS = {"network": (Network, (4, 3, 24, 24)), "attention": (Attention, (3, 40, 16))}


def step(model, x):
    """Output, input gradient and every parameter gradient of one step."""
    model.zero_grad()
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"output": out.detach(), "input": x.grad, **gradients}


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def distributed_step(rank, store, results):
    """One of two processes: a step under DistributedDataParallel, its gradients left in a file."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = surgeon_fx.transform(Residual().eval())
    wrapped = nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(rank)
    wrapped(torch.randn(2, 8, 6, 6)).square().mean().backward()
    torch.save({n: p.grad for n, p in model.named_parameters()}, f"{results}/{rank}.pt")
    torch.distributed.destroy_process_group()


class Squares(Dataset):
    """Samples that are made with torch, gradients off and on."""

    def __len__(self):
        return 12

    def __getitem__(self, i):
        with torch.no_grad():
            x = torch.full((16,), float(i)).square()
        w = torch.ones(16, requires_grad=True)
        (w * x).sum().backward()
        return w.grad / 144


class Probe:
    """Lives as long as the node it is put on."""


def watch(output):
    """Weak references that die with the graph behind an output: one of each node, and the output's."""
    found = [weakref.ref(output)]
    for node in nodes(output):
        node.metadata["probe"] = Probe()
        found.append(weakref.ref(node.metadata["probe"]))
    return found
