"""Run after a wheel is installed: the C kernels are inside, and a pruned step trains."""

import torch

import surgeon_fx
from surgeon_fx.kernels import active_backend, native

assert not native.unavailable_reason(), native.unavailable_reason()
assert active_backend("cpu") == "cpu"
model = surgeon_fx.transform(surgeon_fx.zoo.create("wrn16_1"))
surgeon_fx.ratios(model).fill(0.9)
surgeon_fx.entropy(model(torch.rand(2, 3, 32, 32))).backward()
assert all(parameter.grad is not None for parameter in model.parameters())
print(f"surgeon-fx {surgeon_fx.__version__}: {native.instruction_set()} kernels, a pruned step works")
