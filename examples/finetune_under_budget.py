"""Fine-tune a model with labels while backward holds no more than a budget."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import surgeon_fx
from surgeon_fx.retained import retained_bytes

BUDGET = "12MiB"
BATCH, STEPS = 64, 31

torch.manual_seed(0)
digits = load_digits()
x = F.interpolate(torch.from_numpy(digits.images).float()[:, None] / 16, size=16, mode="bilinear").repeat(1, 3, 1, 1)
y = torch.from_numpy(digits.target)

eager = surgeon_fx.zoo.create("resnet20_cifar")
model = surgeon_fx.transform(eager)
shape = (BATCH, *x.shape[1:])
found = surgeon_fx.fit(model, shape, budget=BUDGET)  # from shapes alone: nothing has run yet
surgeon_fx.ratios(model).update(found.ratios)
print(found)

optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
most = 0
for step in range(STEPS):
    chosen = torch.randint(len(x), (BATCH,))
    out = model(x[chosen])
    most = max(most, retained_bytes(out, model))
    loss = F.cross_entropy(out, y[chosen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step:2}: loss {loss.item():.3f}")

dense = retained_bytes(eager(x[:BATCH]), eager)
print(f"budget {found.budget_bytes:,} bytes, held at most {most:,}; eager holds {dense:,}")
