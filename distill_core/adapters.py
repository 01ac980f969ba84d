# SPDX-License-Identifier: Apache-2.0
"""What an architecture supplies to distribution-matching distillation, and a self-test for it.

    adapter = read_adapter("examples/digits/teacher")         # or make_adapter({"model_type": "dit", ...}, source="")
    with torch.device("meta"):
        module = adapter.build()
    condition, null = adapter.conditioning(labels_B)
    raw = adapter.forward(module, x_s, s_B, condition)        # whatever the network predicts
    x0 = adapter.to_x0(raw, x_s, s_B)                         # fp32 at least; x_s = (1 - s) x0 + s noise
    check_adapter(adapter, module, x0_of_data, labels_B)      # once, with trained weights

An architecture of your own is a class with the members of `Adapter` and a line in `make_adapter`; it need not inherit
anything, and its network may predict something else than the velocity (flow.py has the conversions).

Shapes: B batch; x, raw [B, *latent_shape]; s [B] in fp32, 1 is noise; labels [B] int64.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import noop_context_fn

from distill_core import flow
from distill_core.models import dit, mlp2d
from distill_core.safetensors_io import read_json, shown

MODEL_TYPES = ("dit", "mlp2d")
MAX_LAYERS = 4096  # a config.json can ask for billions, which would be built one by one before anything is compared
CHECK_LEVELS = (0.2, 0.4, 0.6, 0.8)  # none at 0.5, where a reversed time cannot be seen
CHECK_SAMPLES = 64  # at least; fewer tell little
# At high levels one class of data hardly differs from noise, at low ones a label says little: then chance decides.
CHECK_CHANCE = 1.1


class Adapter(Protocol):
    """The members that roles, samplers and exports use."""

    kind: str
    latent_shape: tuple[int, ...]
    num_classes: int
    lora_targets: tuple[str, ...]  # ends of paths of nn.Linear layers, as in lora.inject
    feature_size: int  # width of `features`; like these only read where gan.weight > 0

    def build(self) -> nn.Module:
        """A new module; the caller chooses the device, which may be meta."""

    def fsdp_units(self, module: nn.Module) -> list[list[nn.Module]]:
        """Modules to shard together; the rest is the root's."""

    def conditioning(self, labels: Tensor) -> tuple[Any, Any]:
        """(condition, null condition) of a batch, as `forward` takes them."""

    def forward(self, module: nn.Module, x_s: Tensor, s: Tensor, condition: Any, *, recompute: bool = False,
                context_fn: Callable = noop_context_fn) -> Tensor:
        """The raw prediction. recompute: activation checkpointing, with torch.utils.checkpoint's context_fn."""

    def features(self, module: nn.Module, x_s: Tensor, s: Tensor, condition: Any, *, recompute: bool = False,
                 context_fn: Callable = noop_context_fn) -> Tensor:
        """Hidden states [B, tokens, width] in the middle of the network, for a discriminator (gan.weight > 0 only)."""

    def to_x0(self, raw: Tensor, x_s: Tensor, s: Tensor) -> Tensor:
        """Clean samples of a raw prediction, in fp32 at least."""

    def to_velocity(self, raw: Tensor, x_s: Tensor, s: Tensor) -> Tensor:
        """noise - x0 of a raw prediction, in fp32 at least."""

    def student_grid(self, num_steps: int, shift: float) -> list[float]:
        """Noise levels 1 ... 0 of a few-step student, num_steps + 1 of them."""

    def state_dict(self) -> dict[str, Any]:
        """State that sampling changes and a resumed run needs; {} if there is none."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts back what `state_dict` gave."""


@dataclass(frozen=True)
class VelocityAdapter:
    """Both built-in architectures: module(x, s, labels) predicts noise - x0, the label num_classes is no condition."""

    kind: str
    latent_shape: tuple[int, ...]
    num_classes: int
    lora_targets: tuple[str, ...]
    feature_size: int
    build: Callable[[], nn.Module]

    @property
    def null_class(self) -> int:
        return self.num_classes

    def fsdp_units(self, module: nn.Module) -> list[list[nn.Module]]:
        return module.fsdp_units()

    def conditioning(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        return labels, torch.full_like(labels, self.null_class)

    def forward(self, module: nn.Module, x_s: Tensor, s: Tensor, condition: Tensor, *, recompute: bool = False,
                context_fn: Callable = noop_context_fn) -> Tensor:
        return module(x_s, s, condition, recompute=recompute, context_fn=context_fn)

    def features(self, module: nn.Module, x_s: Tensor, s: Tensor, condition: Tensor, *, recompute: bool = False,
                 context_fn: Callable = noop_context_fn) -> Tensor:
        middle = module.config.depth // 2
        return module(x_s, s, condition, recompute=recompute, context_fn=context_fn, features=middle)[1]

    def to_x0(self, raw: Tensor, x_s: Tensor, s: Tensor) -> Tensor:
        return flow.x0_from_velocity(x_s, raw, s)

    def to_velocity(self, raw: Tensor, x_s: Tensor, s: Tensor) -> Tensor:
        return raw.to(torch.promote_types(raw.dtype, torch.float32))

    def student_grid(self, num_steps: int, shift: float) -> list[float]:
        return flow.student_grid(num_steps, shift)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise ValueError(f"{self.kind} keeps no sampling state, got {', '.join(map(str, state))}")


# --- predictions, as training and sampling take them ----------------------------------------------------------------

def predict_x0(adapter: Adapter, module: nn.Module, x_s: Tensor, s: Tensor, condition: Any, *, recompute: bool = False,
               context_fn: Callable = noop_context_fn) -> Tensor:
    """Clean samples [B, ...] of one forward, in fp32 at least."""
    raw = adapter.forward(module, x_s, s, condition, recompute=recompute, context_fn=context_fn)
    return adapter.to_x0(raw, x_s, s)


def guided_velocity(adapter: Adapter, module: nn.Module, x_s: Tensor, s: Tensor, condition: Any, null: Any, *,
                    scale: float, norm: str = "none") -> Tensor:
    """Velocity [B, ...] under classifier-free guidance, see flow.guide; scale 1 takes one forward, others two."""
    conditional = adapter.to_velocity(adapter.forward(module, x_s, s, condition), x_s, s)
    if scale == 1.0:
        return conditional
    unconditional = adapter.to_velocity(adapter.forward(module, x_s, s, null), x_s, s)
    last = (v.movedim(1, -1) for v in (conditional, unconditional))  # norm layer_norm is over the channels
    return flow.guide(*last, scale, norm).movedim(-1, 1)


# --- which adapter --------------------------------------------------------------------------------------------------

def make_adapter(config: dict[str, Any], *, source: str) -> Adapter:
    """The adapter of a config.json's content. ValueError naming `source` for whatever it does not describe."""
    model_type, depth = config.get("model_type"), config.get("depth")
    if type(depth) is int and depth > MAX_LAYERS:
        raise ValueError(f"{source}: depth must be at most {MAX_LAYERS}, got {str(depth)[:20]}")
    if model_type == "dit":
        size = dit.config_from_json(config, source=source)
        return VelocityAdapter("dit", (size.channels, size.input_size, size.input_size), size.num_classes,
                               ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"), size.hidden_size, lambda: dit.DiT(size))
    if model_type == "mlp2d":
        size = mlp2d.config_from_json(config, source=source)
        return VelocityAdapter("mlp2d", (mlp2d.NUM_COORDINATES,), size.num_classes, ("fc1", "fc2", "modulation"),
                               size.hidden_size, lambda: mlp2d.MLP2D(size))
    raise ValueError(f"{source}: model_type {repr(model_type)[:60]} has no adapter (there are: "
                     f"{', '.join(MODEL_TYPES)}; for one of your own add a line to make_adapter)")


def read_adapter(folder: str | Path) -> Adapter:
    """The adapter of a model folder, from its config.json; ValueError of one line that names the file."""
    path = Path(folder) / "config.json"
    raw = read_json(path, remedy="give a model folder")
    try:
        return make_adapter(raw, source=str(path))
    except ValueError as error:
        raise ValueError(shown(str(error), 500)) from None  # it quotes values, which may be of any length


# --- self-test ------------------------------------------------------------------------------------------------------

@torch.no_grad()
def check_adapter(adapter: Adapter, module: nn.Module, x0: Tensor, labels: Tensor) -> None:
    """Whether the adapter says what the trained `module` means. ValueError that names the first thing that is wrong.

    x0 [B, *latent_shape], labels [B]: real data, or samples of the module; 64 or more, on the module's device. Checked:
    shapes and the student grid; that to_x0 and to_velocity agree; that the null condition makes a difference; that two
    forwards are identical in train mode, where the student runs; and at each of CHECK_LEVELS that the prediction fits
    better than with its sign turned or the time reversed, data better than noise (up to chance), and not better with
    the null condition. A module of one class need not tell its condition from the null condition.
    """
    if len(x0) < CHECK_SAMPLES or tuple(x0.shape[1:]) != tuple(adapter.latent_shape) or labels.shape != x0.shape[:1]:
        raise ValueError(f"adapter {adapter.kind}: the check takes x0 [{CHECK_SAMPLES} or more, "
                         f"{', '.join(map(str, adapter.latent_shape))}] and labels [B], got {list(x0.shape)} and "
                         f"{list(labels.shape)}")
    probe = _Probe(adapter, module, x0.float(), _noise_like(x0, seed=0), labels)
    with _mode(module, training=False):
        _check_shapes(probe)
        _check_null(probe)
        for s in CHECK_LEVELS:
            _check_conversions(probe, s)
            _check_fit(probe, s)
    with _mode(module, training=True):
        _check_repeats(probe)


@dataclass(frozen=True)
class _Probe:
    """One batch that all checks look at."""

    adapter: Adapter
    module: nn.Module
    x0: Tensor
    noise: Tensor
    labels: Tensor

    def predict(self, s: float, *, told: float | None = None, null: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """(raw prediction, x_s, s [B]); the network is told the level `told`."""
        s_B = torch.full((len(self.x0),), s, device=self.x0.device)
        x_s = flow.add_noise(self.x0, self.noise, s_B)
        told_B = s_B if told is None else torch.full_like(s_B, told)
        condition = self.adapter.conditioning(self.labels)[1 if null else 0]
        return self.adapter.forward(self.module, x_s, told_B, condition), x_s, s_B

    def loss(self, s: float, *, told: float | None = None, null: bool = False, sign: float = 1.0) -> float:
        """mean((v - (noise - x0))^2)"""
        v = sign * self.adapter.to_velocity(*self.predict(s, told=told, null=null))
        return float((v - (self.noise - self.x0)).square().mean())

    def fail(self, reason: str) -> NoReturn:
        raise ValueError(f"adapter {self.adapter.kind}: {reason}")


def _check_shapes(probe: _Probe) -> None:
    raw = probe.predict(0.6)[0]
    if raw.shape != probe.x0.shape or not raw.isfinite().all():
        probe.fail(f"forward must give finite values of shape {list(probe.x0.shape)}, got {list(raw.shape)}, all "
                   f"finite: {bool(raw.isfinite().all())}")
    grid = list(probe.adapter.student_grid(4, 1.0))
    if len(grid) != 5 or grid[0] != 1.0 or grid[-1] != 0.0 or not all(s > after for s, after in pairwise(grid)):
        probe.fail(f"student_grid(4, 1.0) must be 5 levels from 1 down to 0, got {grid}")


def _check_null(probe: _Probe) -> None:
    if probe.adapter.num_classes == 1:  # one class says nothing: its prediction may well be that of the null condition
        return
    raw, null = probe.predict(0.6)[0], probe.predict(0.6, null=True)[0]
    if not _rms(raw - null) > 1e-4 * _rms(raw):
        probe.fail("the null condition gives the same prediction as the condition (guidance would do nothing; see "
                   "`conditioning`)")


def _check_conversions(probe: _Probe, s: float) -> None:
    raw, x_s, s_B = probe.predict(s)
    x0, v = probe.adapter.to_x0(raw, x_s, s_B), probe.adapter.to_velocity(raw, x_s, s_B)
    if not {x0.dtype, v.dtype} <= {torch.float32, torch.float64}:
        probe.fail(f"to_x0 and to_velocity must give at least float32, got {x0.dtype} and {v.dtype}")
    gap = _rms(flow.x0_from_velocity(x_s, v, s_B) - x0) / _rms(x_s)
    if not gap < 1e-3:
        probe.fail(f"the conversions do not make a round trip: x_s - s to_velocity differs from to_x0 by {gap:.2g} of "
                   f"x_s at s = {s}")


def _check_fit(probe: _Probe, s: float) -> None:
    loss = probe.loss(s)
    # Noise as wide as the data, element by element: wide data may be harder to denoise than plain noise.
    wide = probe.x0.mean(0) + probe.x0.std(0) * _noise_like(probe.x0, seed=1)
    wrong = {
        "better with its sign turned (negate the prediction, or mend the conversions)": probe.loss(s, sign=-1.0),
        "better with the time reversed (give the network 1 - s, or mend the conversions)": probe.loss(s, told=1.0 - s),
        "noise better than data (is the module trained, on data of this scale?)":
            CHECK_CHANCE * replace(probe, x0=wide).loss(s),
        "better with the null condition (see the order in `conditioning`)": CHECK_CHANCE * probe.loss(s, null=True),
    }
    for reason, other in wrong.items():
        if not loss < other:
            probe.fail(f"the prediction at s = {s} fits {reason}: loss {loss:.4g} against {other:.4g}")


def _check_repeats(probe: _Probe) -> None:
    if not torch.equal(probe.predict(0.6)[0], probe.predict(0.6)[0]):
        probe.fail("two forwards of one input differ in train mode (turn off dropout, also of labels in the module)")


def _rms(x: Tensor) -> Tensor:
    return x.float().square().mean().sqrt()


def _noise_like(x: Tensor, *, seed: int) -> Tensor:
    """Drawn on CPU: the same on every device and rank."""
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x.device)


@contextmanager
def _mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Train or eval mode for a while; each submodule gets back its own."""
    before = [(part, part.training) for part in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for part, was in before:
            part.training = was
