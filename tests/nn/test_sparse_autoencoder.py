"""BatchTopK at work: a sparse autoencoder of digits, beside the same written with torch.topk."""

import pytest
import torch
from sklearn.datasets import load_digits

from khot.nn import BatchTopK

UNITS, K, STEPS, BATCH = 64, 8, 600, 128


def digits():
    x = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    x = (x - x.mean(0))[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]
    return x[:1500], x[1500:]


def by_hand(hidden):
    values, indices = hidden.flatten().topk(K * len(hidden))
    return torch.zeros_like(hidden).flatten().scatter(0, indices, values).view_as(hidden)


def train(activation, data):
    torch.manual_seed(1)
    model = torch.nn.ModuleDict({"encoder": torch.nn.Linear(64, UNITS), "decoder": torch.nn.Linear(UNITS, 64)})
    optimizer, losses, active = torch.optim.Adam(model.parameters(), 3e-3), [], []
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)  # so that the threshold comes to rest
    for _ in range(STEPS):
        x = data[torch.randint(len(data), (BATCH,))]
        code = activation(model["encoder"](x).relu())
        loss = (model["decoder"](code) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
        losses.append(loss.item())
        active.append((code != 0).float().sum(-1).mean().item())
    return model, losses, active


@pytest.mark.slow
def test_as_written_with_topk():
    data, held_out = digits()
    activation = BatchTopK(K, n=UNITS)
    model, losses, active = train(activation, data)
    _, expected, _ = train(by_hand, data)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=1e-6)
    assert losses[-1] < 0.3 * losses[0]
    assert abs(sum(active) / STEPS / K - 1) < 0.01
    kept = (activation.eval()(model["encoder"](held_out).relu()) != 0).float().sum(-1).mean().item()
    assert abs(kept / K - 1) < 0.03
