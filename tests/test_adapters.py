# SPDX-License-Identifier: Apache-2.0
"""adapters.py: both built-in architectures, a user's own, and a self-test that sees each way to get one wrong."""
from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from distill_core import flow
from distill_core.adapters import VelocityAdapter, check_adapter, make_adapter, read_adapter
from distill_core.data import read_latents
from distill_core.lora import checkpoint_context_fn, inject, use
from distill_core.models.mlp2d import MLP2D, MLP2DConfig
from distill_core.safetensors_io import load_into, open_folder
from distill_core.train_flow import train_flow

DIGITS = Path(__file__).resolve().parent.parent / "examples" / "digits"


def ring(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight Gaussians on a circle of radius 2, one class each."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 8
    angles = labels * (2 * math.pi / 8)
    centres = 2 * torch.stack([angles.cos(), angles.sin()], dim=1)
    return centres + 0.15 * torch.randn(count, 2, generator=generator), labels


@pytest.fixture(scope="module")
def points():
    """(adapter, trained module, x0, labels) of the MLP on points."""
    torch.manual_seed(0)
    module = MLP2D(MLP2DConfig(hidden_size=32, depth=2, num_classes=8))
    weights = train_flow(module, *ring(4096), null_class=8, steps=400, batch_size=256, lr=4e-3, label_dropout=0.1,
                         ema_decay=0.99, seed=0)
    module.load_state_dict(weights)
    module.zero_grad()
    adapter = make_adapter({"model_type": "mlp2d", "hidden_size": 32, "depth": 2, "num_classes": 8}, source="test")
    return adapter, module, *ring(512, seed=1)


@pytest.fixture(scope="module")
def digits():
    """(adapter, module, x0, labels) of the shipped teacher."""
    adapter = read_adapter(DIGITS / "teacher")
    with torch.device("meta"):
        module = adapter.build()
    module.to_empty(device="cpu")
    load_into(open_folder(DIGITS / "teacher"), dict(module.named_parameters()))
    x0, labels = read_latents(DIGITS / "digits.npz", num_classes=adapter.num_classes)
    return adapter, module, x0[:256], labels[:256]


def refusal(adapter, module, x0, labels) -> str:
    with pytest.raises(ValueError) as caught:
        check_adapter(adapter, module, x0, labels)
    message = str(caught.value)
    assert "\n" not in message and message.startswith(f"adapter {adapter.kind}: "), message
    return message


# --- the built-in adapters ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["points", "digits"])
def test_both_pass_their_self_test(name, request):
    """Catches a wrong sign, time or conversion in a shipped adapter, and a self-test that leaves modes changed."""
    adapter, module, x0, labels = request.getfixturevalue(name)
    module.train()
    next(module.children()).eval()
    before = [part.training for part in module.modules()]
    assert check_adapter(adapter, module, x0, labels) is None
    assert [part.training for part in module.modules()] == before
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("name", ["points", "digits"])
def test_pieces_fit_together(name, request):
    """Catches LoRA targets that name no layer, foreign FSDP units, and recomputation that is not passed on."""
    adapter, trained, x0, labels = request.getfixturevalue(name)
    module = adapter.build()
    module.load_state_dict(trained.state_dict())
    units = [part for unit in adapter.fsdp_units(module) for part in unit]
    assert units and set(units) <= set(module.modules())
    assert inject(module, adapter.lora_targets, rank=2, alpha=2.0)
    condition, null = adapter.conditioning(labels)
    assert torch.equal(condition, labels) and torch.equal(null, torch.full_like(labels, adapter.num_classes))
    gradients = []
    for recompute in (False, True):
        calls, s = [], torch.full((len(x0),), 0.5)
        counted = lambda: calls.append(1) or checkpoint_context_fn(module)()  # noqa: E731
        with use(module, "default"):
            raw = adapter.forward(module, x0, s, condition, recompute=recompute, context_fn=counted)
        adapter.to_x0(raw, x0, s).square().sum().backward()
        assert bool(calls) is recompute
        gradients.append([p.grad.clone() for p in module.parameters() if p.requires_grad])
        module.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*gradients))
    assert adapter.state_dict() == {} and adapter.load_state_dict({}) is None
    with pytest.raises(ValueError, match="keeps no sampling state, got step"):
        adapter.load_state_dict({"step": 1})


def test_conversions_are_those_of_the_path(points):
    """Catches an x0 computed in bf16, and one that is not x_s - s v."""
    adapter, x_s = points[0], torch.randn(5, 2)
    s, raw = torch.linspace(0.1, 0.9, 5), torch.randn(5, 2).bfloat16()
    assert torch.equal(adapter.to_x0(raw, x_s, s), x_s - s[:, None] * raw.float())
    assert torch.equal(adapter.to_velocity(raw, x_s, s), raw.float())
    assert adapter.to_velocity(raw.double(), x_s, s).dtype == torch.float64
    assert adapter.student_grid(4, 3.0) == flow.student_grid(4, 3.0)


# --- negative controls ----------------------------------------------------------------------------------------------

def changed(adapter: VelocityAdapter, **methods: Callable) -> VelocityAdapter:
    """The adapter with some methods replaced."""
    kind = type("Changed", (VelocityAdapter,), {name: staticmethod(method) for name, method in methods.items()})
    return kind(*(getattr(adapter, field.name) for field in dataclasses.fields(adapter)))


@pytest.mark.parametrize("name", ["points", "digits"])
@pytest.mark.parametrize("fault, reason", [
    ("sign", "fits better with its sign turned"),
    ("time", "fits better with the time reversed"),
    ("null", "the null condition gives the same prediction"),
    ("swapped", "fits better with the null condition"),
    ("x0", "do not make a round trip"),
    ("x0 in bf16", "at least float32, got torch.bfloat16"),
    ("shape", "forward must give finite values of shape"),
    ("grid", "must be 5 levels from 1 down to 0"),
    ("untrained", "fits "),
    ("scale", "fits "),
])
def test_the_self_test_sees(name, fault, reason, request):
    """Catches a self-test that lets a broken adapter pass, or blames something else."""
    adapter, module, x0, labels = request.getfixturevalue(name)
    velocity = lambda module, x, s, y, **_: module(x, s, y)  # noqa: E731
    null = lambda y: torch.full_like(y, adapter.num_classes)  # noqa: E731
    faults = {
        "sign": {"forward": lambda module, x, s, y: -velocity(module, x, s, y)},
        "time": {"forward": lambda module, x, s, y: velocity(module, x, 1 - s, y)},
        "null": {"conditioning": lambda y: (y, y)},
        "swapped": {"conditioning": lambda y: (null(y), y)},
        "x0": {"to_x0": lambda raw, x, s: flow.x0_from_velocity(x, -raw, s)},
        "x0 in bf16": {"to_x0": lambda raw, x, s: flow.x0_from_velocity(x, raw, s).bfloat16()},
        "shape": {"forward": lambda module, x, s, y: velocity(module, x, s, y).repeat(1, 2, *[1] * (x.dim() - 2))},
        "grid": {"student_grid": lambda num_steps, shift: [0.0, 0.25, 0.5, 0.75, 1.0]},
    }
    if fault == "untrained":
        module = adapter.build()
        torch.manual_seed(0)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.1)
    if fault == "scale":
        x0 = 30 * x0
    assert reason in refusal(changed(adapter, **faults.get(fault, {})), module, x0, labels)


def test_the_self_test_sees_dropout(points):
    """Catches label dropout inside the module, which acts in train mode only, and dropout left on."""
    adapter, module, x0, labels = points

    class LabelDropout(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x, s, y, **_):
            drop = (torch.rand(len(y)) < 0.1) & self.training
            return self.inner(x, s, y.masked_fill(drop, 8))

    assert "differ in train mode" in refusal(adapter, LabelDropout(module), x0, labels)
    dropping = lambda module, x, s, y: F.dropout(module(x, s, y), 0.01, training=module.training)  # noqa: E731
    assert "differ in train mode" in refusal(changed(adapter, forward=dropping), module, x0, labels)


def test_one_class_passes_without_a_null_condition_of_its_own():
    """Catches a verdict by chance: a ring without classes is hardly more than noise at high levels, in 64 samples."""
    torch.manual_seed(0)
    module, adapter = MLP2D(MLP2DConfig(32, 2, 1)), make_adapter(
        {"model_type": "mlp2d", "hidden_size": 32, "depth": 2, "num_classes": 1}, source="test")
    x0, labels = ring(4096)
    module.load_state_dict(train_flow(module, x0, 0 * labels, null_class=1, steps=300, batch_size=256, lr=4e-3,
                                      label_dropout=0.1, ema_decay=0.99, seed=0))
    for seed in (1, 2):
        check_adapter(adapter, module, ring(64, seed=seed)[0], 0 * labels[:64])
    same = changed(adapter, conditioning=lambda y: (y, y))
    assert check_adapter(same, module, x0[:64], 0 * labels[:64]) is None
    turned = changed(adapter, forward=lambda module, x, s, y: -module(x, s, y))
    assert "its sign turned" in refusal(turned, module, x0[:64], 0 * labels[:64])


def test_the_self_test_refuses_too_little_data(points):
    """Catches a verdict on a handful of samples, and data of another shape that would broadcast."""
    adapter, module, x0, labels = points
    assert "64 or more" in refusal(adapter, module, x0[:63], labels[:63])
    assert "64 or more, 2" in refusal(adapter, module, x0[:, :1], labels)
    assert "got [512, 2] and [64]" in refusal(adapter, module, x0, labels[:64])


# --- a user's own ---------------------------------------------------------------------------------------------------

class NoiseNet(nn.Module):
    """Predicts eps of a variance-preserving path from x_t, its angle and a one-hot class (zeros: none)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(2 + 2 + 8, 64), nn.Linear(64, 64), nn.Linear(64, 2)

    def forward(self, x_t, alpha, sigma, one_hot):
        hidden = F.silu(self.first(torch.cat([x_t, alpha, sigma, one_hot], dim=1)))
        return self.last(hidden + F.silu(self.second(hidden)))


class NoiseAdapter:
    kind, latent_shape, num_classes, lora_targets = "noise", (2,), 8, ("first", "second")

    def build(self):
        return NoiseNet()

    def fsdp_units(self, module):
        return [[module.second]]

    def conditioning(self, labels):
        one_hot = F.one_hot(labels, self.num_classes).float()
        return one_hot, torch.zeros_like(one_hot)

    def forward(self, module, x_s, s, condition, *, recompute=False, context_fn=noop_context_fn):
        x_t, alpha, sigma = flow.to_vp(x_s, s)
        if recompute:
            return checkpoint(module, x_t, alpha, sigma, condition, use_reentrant=False, context_fn=context_fn)
        return module(x_t, alpha, sigma, condition)

    def to_x0(self, raw, x_s, s):
        x_t, alpha, sigma = flow.to_vp(x_s, s)
        return flow.x0_from_vp_eps(x_t, raw, alpha=alpha.clamp_min(1e-2), sigma=sigma)

    def to_velocity(self, raw, x_s, s):
        return flow.velocity_from_x0(x_s, self.to_x0(raw, x_s, s), s)

    def student_grid(self, num_steps, shift):
        return flow.student_grid(num_steps, shift)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert not state


@pytest.fixture(scope="module")
def noise_net():
    """A NoiseNet trained as such networks are: on its own path, to predict eps."""
    torch.manual_seed(0)
    adapter, module = NoiseAdapter(), NoiseNet()
    x0, labels = ring(4096)
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    for _ in range(500):
        picked, noise, s = torch.randint(4096, (256,)), torch.randn(256, 2), torch.rand(256)
        condition, null = adapter.conditioning(labels[picked])
        condition = torch.where(torch.rand(256, 1) < 0.1, null, condition)
        eps = adapter.forward(module, flow.add_noise(x0[picked], noise, s), s, condition)
        optimizer.zero_grad()
        (eps - noise).square().mean().backward()
        optimizer.step()
    return module


def test_a_users_adapter_takes_at_most_60_lines_and_passes(noise_net):
    """Catches a protocol that needs more than the user should write, or fits velocity networks only."""
    lines = inspect.getsource(NoiseNet) + inspect.getsource(NoiseAdapter)
    assert len(lines.splitlines()) <= 60
    check_adapter(NoiseAdapter(), noise_net, *ring(512, seed=1))


def test_a_users_mistakes_are_seen(noise_net):
    """Catches the two classic ones: eps taken for the velocity, and the network given the flow's own state."""
    class EpsAsVelocity(NoiseAdapter):
        def to_velocity(self, raw, x_s, s):
            return raw

        def to_x0(self, raw, x_s, s):
            return flow.x0_from_velocity(x_s, raw, s)

    class OtherNormalisation(NoiseAdapter):
        def to_x0(self, raw, x_s, s):
            return (x_s - s[:, None] * raw).float()

    assert "fits" in refusal(EpsAsVelocity(), noise_net, *ring(512, seed=1))
    assert "fits" in refusal(OtherNormalisation(), noise_net, *ring(512, seed=1))


# --- folders --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("config, reason", [
    ('{"model_type": "unet"}', "model_type 'unet' has no adapter (there are: dit, mlp2d; for one of your own"),
    ("{}", "model_type None has no adapter"),
    ('{"model_type": "mlp2d", "hidden_size": 8, "depth": 1}', "missing keys ['num_classes']"),
    ('{"model_type": "mlp2d", "hidden_size": 8, "depth": true, "num_classes": 2}', "depth must be a positive int, got"),
    ('{"model_type": "dit", "hidden_size": 8}', "missing keys ['channels'"),
    ("[]", "expected a JSON object, got list"),
    ("{", "not valid JSON"),
])
def test_a_bad_config_is_refused_in_one_line(tmp_path, config, reason):
    """Catches a traceback from deep inside, and a message that does not name the file."""
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError) as caught:
        read_adapter(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'config.json'}: ") and reason in message and "\n" not in message, message


def test_a_folder_without_config_is_refused(tmp_path):
    """Catches an OSError for a path that a user has mistyped."""
    with pytest.raises(ValueError, match="nowhere/config.json: cannot be read: No such file"):
        read_adapter(tmp_path / "nowhere")


def test_a_module_is_built_on_meta():
    """Catches a build that allocates or that leaves buffers behind."""
    config = {"model_type": "mlp2d", "hidden_size": 8, "depth": 1, "num_classes": 3}
    adapter = make_adapter(json.loads(json.dumps(config)), source="test")
    with torch.device("meta"):
        module = adapter.build()
    assert all(parameter.is_meta and parameter.dim() > 0 for parameter in module.parameters())
    assert not list(module.buffers())
    assert (adapter.kind, adapter.latent_shape, adapter.num_classes, adapter.null_class) == ("mlp2d", (2,), 3, 3)
