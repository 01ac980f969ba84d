# SPDX-License-Identifier: Apache-2.0
"""The MLP on points against an independent functional form, under recomputation, adapters and sharding."""
from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from distill_core.fsdp import local, shard
from distill_core.lora import checkpoint_context_fn, inject, named_adapter, use
from distill_core.models.mlp2d import MLP2D, MLP2DConfig

TINY = MLP2DConfig(hidden_size=10, depth=3, num_classes=5)


def batch(size: int = 6):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 2, generator=generator, dtype=torch.float64)
    return x, torch.rand(size, generator=generator, dtype=torch.float64), torch.arange(size) % 6


def tiny() -> MLP2D:
    torch.manual_seed(0)
    return MLP2D(TINY).double()


def reference(w: dict, x, s, labels):
    """The network written out by parameter name."""
    linear = lambda name, h: h @ w[f"{name}.weight"].T + w[f"{name}.bias"]  # noqa: E731
    angles = torch.stack([10 * s * 1000 ** (-i / 32) for i in range(32)], dim=1)
    waves = torch.cat([torch.cos(angles), torch.sin(angles)], dim=1)
    time = linear("t_embedder.mlp.2", F.silu(linear("t_embedder.mlp.0", waves)))
    condition = time + w["y_embedder.embedding_table.weight"][labels]
    h = linear("x_embedder", x)
    for i in range(3):
        change = linear(f"blocks.{i}.modulation", F.silu(condition))
        normed = (h - h.mean(1, keepdim=True)) / (h.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
        normed = normed * (1 + change[:, 10:]) + change[:, :10]
        h = h + linear(f"blocks.{i}.fc2", F.silu(linear(f"blocks.{i}.fc1", normed)))
    return linear("final_layer", h)


def test_forward_is_the_reference():
    """Catches a changed embedding, modulation or residual: trained weights would mean something else."""
    model, (x, s, labels) = tiny(), batch()
    assert torch.allclose(model(x, s, labels), reference(model.state_dict(), x, s, labels), atol=1e-12)
    assert not list(model.buffers()) and math.isclose(model.config.null_class, 5)


def test_recompute_and_adapters():
    """Catches recomputation with another adapter than the forward's."""
    model, (x, s, labels) = tiny(), batch()
    inject(model, ["fc1", "fc2", "modulation"], rank=2, alpha=2.0, adapters=("a", "b"))
    for name in ("a", "b"):
        torch.manual_seed(len(name))
        for _, parameter in named_adapter(model, name):
            torch.nn.init.normal_(parameter, std=0.3 if name == "a" else 0.6)
    gradients = []
    for recompute in (False, True):
        with use(model, "a"):
            out = model(x, s, labels, recompute=recompute, context_fn=checkpoint_context_fn(model))
        with use(model, "b"):
            out.square().sum().backward()
        gradients.append([parameter.grad.clone() for _, parameter in named_adapter(model, "a")])
        model.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*gradients)) and gradients[0][0].any()


def test_sharded_equals_plain():
    """Catches an FSDP unit that is not a module of the model, and parameters that cannot be sharded unevenly."""
    def work(rank: int) -> bool:
        x, s, labels = (tensor.float() if tensor.is_floating_point() else tensor for tensor in batch())
        plain, model = tiny().float(), tiny().float()
        shard(model, model.fsdp_units(), init_device_mesh("cpu", (3,)))
        wanted, got = plain(x, s, labels), model(x, s, labels)
        wanted.square().sum().backward()
        got.square().sum().backward()
        gradients = zip(plain.parameters(), model.parameters())
        return torch.allclose(wanted, got, atol=1e-6) and all(
            torch.allclose(a.grad, b.grad.full_tensor(), atol=1e-5) and local(b).shape[0] <= a.shape[0]
            for a, b in gradients)

    assert all(run_ranks(work, 3, timeout_s=30))


@pytest.mark.parametrize("x, s, labels, reason", [
    (torch.zeros(2, 3), torch.zeros(2), torch.zeros(2).long(), "mlp2d takes x [B, 2]"),
    (torch.zeros(2, 2), torch.zeros(2, 1), torch.zeros(2).long(), "got [2, 2], [2, 1], [2]"),
    (torch.zeros(2, 2), torch.zeros(2).bfloat16(), torch.zeros(2).long(), "takes s in float32, got torch.bfloat16"),
])
def test_bad_input(x, s, labels, reason):
    """Catches shapes that would broadcast, and noise levels of 8 bits."""
    with pytest.raises(ValueError) as caught:
        MLP2D(TINY)(x, s, labels)
    assert reason in str(caught.value) and "\n" not in str(caught.value)
