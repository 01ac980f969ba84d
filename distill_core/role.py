# SPDX-License-Identifier: Apache-2.0
"""A role (module + optimizer + schedule + counters) and `run_phase`, the one place where gradients are accumulated,
checked, normalised, clipped and applied.

    student = Role("student", model, mesh.get_group(), gloo_group, adamw(model.parameters(), ...), schedule)
    result = run_phase(student, micro_batches, compute, roles=[student, teacher], max_grad_norm=1.0)

`compute(micro_batch)` returns a PhaseLoss. Every rank of the role runs the same number of micro-batches.
"""
from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distill_core.fsdp import global_grad_norm, local, reshard, scale_grads
from distill_core.lora import named_adapter, use
from distill_core.ownership import owns
from distill_core.topology import agree_max, agree_sum


class PhaseLoss(NamedTuple):
    """Loss of one micro-batch, fp32 and attached to the graph.

    normalizer None: `value` is a mean over `samples`; the phase takes the sample-weighted mean of all micro-batches. A
    count: `value` is a sum, and the phase divides the sum of all by the sum of the counts (0 is legal on one rank).
    """

    value: Tensor
    samples: int
    normalizer: float | None = None


class PhaseResult(NamedTuple):
    applied: bool
    loss: float  # global, normalised
    grad_norm: float  # global, normalised, before clipping
    count: float  # global normalizer, or samples
    lr: float


class RoleSpec(NamedTuple):
    """Where a role lives and what trains it."""

    name: str
    tree: str  # the module that holds it; several roles may share one
    adapter: str | None = None  # its LoRA adapter in that module; None: the module's own weights
    optimizer: str | None = None  # config section of its optimizer; None: frozen


def check_plan(specs: Sequence[RoleSpec], *, trained: Sequence[str], frozen: Sequence[str]) -> None:
    """Refuse a plan in which a role is missing, trains what is not its own, or is trained by two optimizers.

    ValueError of one line; to be called before any weight is loaded.
    """
    names = [spec.name for spec in specs]
    if sorted(names) != sorted([*trained, *frozen]):
        raise ValueError(f"roles {', '.join(names)}: exactly {', '.join([*trained, *frozen])} are needed, each once")
    for spec in specs:
        others = [other for other in specs if other is not spec]
        if (spec.optimizer is None) != (spec.name in frozen):
            raise ValueError(f"role {spec.name}: " + ("is frozen and takes no optimizer" if spec.name in frozen
                                                      else "is trained and needs an optimizer"))
        for other in others:
            if (other.tree, other.adapter) == (spec.tree, spec.adapter):
                raise ValueError(f"roles {spec.name} and {other.name} have the same "
                                 + (f"adapter {spec.adapter}" if spec.adapter else "weights") + " (give each its own)")
            if spec.optimizer is not None and other.optimizer == spec.optimizer:
                raise ValueError(f"roles {spec.name} and {other.name} share the optimizer {spec.optimizer}")
        if spec.optimizer and not spec.adapter and any(other.tree == spec.tree for other in others):
            raise ValueError(f"role {spec.name}: would train the base that other roles share (give it an adapter)")


@dataclass
class Role:
    """One model of the run. A frozen role has no optimizer and owns nothing.

    adapter: the role is this LoRA adapter of a module that other roles may share, not the module's own weights.
    group: ranks that share the shards and the batch; control: a gloo group of the same ranks (None: a single process).
    lr: applied updates so far -> learning rate of the next update.
    """

    name: str
    module: nn.Module
    group: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    optimizer: torch.optim.Optimizer | None = None
    lr: Callable[[int], float] | None = None
    adapter: str | None = None
    successes: int = 0
    skips: int = 0
    skips_in_a_row: int = 0

    def named_trainable(self) -> list[tuple[str, Tensor]]:
        return [] if self.optimizer is None else self.named_weights()

    def named_weights(self) -> list[tuple[str, Tensor]]:
        """What is the role's own: its adapter, or the weights that are trained (of a frozen one: all but adapters)."""
        if self.adapter is not None:
            return named_adapter(self.module, self.adapter)
        named = self.module.named_parameters()
        if self.optimizer is None:
            return [(name, p) for name, p in named if ".lora_A." not in name and ".lora_B." not in name]
        return [(name, p) for name, p in named if p.requires_grad]

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Inside, forwards of the module are this role's: its adapter, and eval mode if it is frozen."""
        switched = [m for m in self.module.modules() if m.training] if self.optimizer is None else []
        try:
            for module in switched:
                module.training = False
            with use(self.module, self.adapter):
                yield
        finally:
            for module in switched:
                module.training = True


def adamw(parameters: Iterable[Tensor], *, lr: float, betas: Sequence[float], eps: float,
          weight_decay: float) -> torch.optim.AdamW:
    """AdamW over those parameters of a module already sharded that are trainable; norms and biases are not decayed."""
    trainable = [p for p in parameters if p.requires_grad]
    assert trainable, "nothing to train"
    groups = [{"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
              {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=tuple(betas), eps=eps)


def run_phase(role: Role, micro_batches: Sequence[Any], compute: Callable[[Any], PhaseLoss], *, roles: Sequence[Role],
              max_grad_norm: float, key: int = 0) -> PhaseResult:
    """One optimizer step of `role` over all its micro-batches, or a counted skip that changes nothing else.

    The step is applied only where loss and gradient norm are finite on every rank. Loss and gradient do not depend on
    how the samples are cut into micro-batches and ranks. A faulty PhaseLoss raises ValueError on all ranks together.
    key: anything else that must be equal on all ranks, such as the step of a rollout that is trained.
    """
    _check_agreement(role, len(micro_batches), key)
    for other in roles:  # an evaluation leaves parameters gathered: other objects than the shards that are owned
        reshard(other.module)
    role.module.train()
    sums = torch.zeros(2, dtype=torch.float64)  # loss numerator, count
    with owns(role, roles):
        for micro_batch in micro_batches:
            numerator, count = _numerator(role, compute(micro_batch))
            numerator.backward()
            sums += torch.tensor([float(numerator.detach()), count], dtype=torch.float64)
    return _apply(role, sums, max_grad_norm)


def _apply(role: Role, sums: Tensor, max_grad_norm: float) -> PhaseResult:
    world = 1 if role.group is None else dist.get_world_size(role.group)
    parameters = [p for _, p in role.named_trainable()]
    raw_norm = float(global_grad_norm(parameters, role.group))
    totals = [*sums.tolist(), float(not math.isfinite(raw_norm))]
    loss_sum, count, num_bad = totals if role.control is None else agree_sum(role.control, *totals)
    if not count > 0:
        role.optimizer.zero_grad(set_to_none=True)
        raise ValueError(f"{role.name}: the global loss normalizer is {count}: no sample on any rank counts (every "
                         "response empty or masked?)")
    scale = world / count  # FSDP has averaged over the ranks: undo that, then divide by the global count
    grad_norm, loss, lr = raw_norm * scale, loss_sum / count, role.lr(role.successes)
    # The same on every rank: the sums are, and a norm that is not finite on one of them is counted.
    applied = not num_bad and math.isfinite(loss) and math.isfinite(grad_norm)
    if applied:
        reshard(role.module)
        scale_grads(parameters, scale * min(1.0, max_grad_norm / (grad_norm + 1e-6)))
        for group in role.optimizer.param_groups:
            group["lr"] = lr
        role.optimizer.step()
        role.successes, role.skips_in_a_row = role.successes + 1, 0
    else:
        role.skips, role.skips_in_a_row = role.skips + 1, role.skips_in_a_row + 1
    role.optimizer.zero_grad(set_to_none=True)
    return PhaseResult(applied, loss, grad_norm, count, lr)


FAULTS = ("", "is missing", "is not a scalar", "is detached from the graph", "has a negative or non-finite normalizer",
          "has no samples or a negative count")


def _numerator(role: Role, loss: PhaseLoss | None) -> tuple[Tensor, float]:
    """(what to differentiate, its count) after all ranks agree that every rank's loss is sound and of one kind."""
    fault = _fault(loss)
    explicit = loss is not None and loss.normalizer is not None
    if role.control is not None:
        fault, kind, other = agree_max(role.control, fault, explicit, not explicit)
        if not fault and kind == other:
            raise ValueError(f"{role.name}: some ranks give a loss normalizer, others none (give it on all or none)")
    if fault:
        raise ValueError(f"{role.name}: the loss of a micro-batch {FAULTS[int(fault)]} on some rank")
    if explicit:
        return loss.value, float(loss.normalizer)
    return loss.value * loss.samples, float(loss.samples)


def _fault(loss: PhaseLoss | None) -> int:
    if loss is None or not isinstance(loss.value, Tensor):
        return 1
    if loss.value.dim() != 0:
        return 2
    if not loss.value.requires_grad:
        return 3
    if loss.normalizer is not None and not (math.isfinite(loss.normalizer) and loss.normalizer >= 0):
        return 4
    return 5 if loss.samples < 0 else 0


def _check_agreement(role: Role, num_batches: int, key: int) -> None:
    """Ranks that run different roles or branches would not hang: FSDP adds up whatever has equal shapes."""
    if role.control is None:
        return
    phase = zlib.crc32(f"{role.name} {role.adapter} {key}".encode())
    high, low, high_phase, low_phase = agree_max(role.control, num_batches, -num_batches, phase, -phase)
    assert high_phase == -low_phase, f"ranks disagree on the phase: here {role.name} {role.adapter} {key}"
    if high != -low:
        raise ValueError(f"{role.name}: ranks have between {-low:.0f} and {high:.0f} micro-batches; pad with empty "
                         "ones")


# --- state for checkpoints ------------------------------------------------------------------------------------------

COUNTERS = ("successes", "skips", "skips_in_a_row")  # what `role_state` holds


def role_tensors(role: Role) -> dict[str, Tensor]:
    """Parameters and optimizer moments by name, to be saved and filled in place; moments are created when missing.

    Created as AdamW creates them at its first step, so that a run can be restored before it has stepped.
    """
    reshard(role.module)
    tensors = {}
    for name, parameter in role.named_trainable():
        tensors[f"{role.name}.{name}"] = parameter.detach()
        state = role.optimizer.state[parameter]
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        tensors[f"{role.name}.optimizer.exp_avg.{name}"] = state["exp_avg"]
        tensors[f"{role.name}.optimizer.exp_avg_sq.{name}"] = state["exp_avg_sq"]
    return tensors


def role_state(role: Role) -> dict[str, int]:
    return {counter: getattr(role, counter) for counter in COUNTERS}


def restore_role(role: Role, state: dict[str, int]) -> None:
    """Counters from `role_state`; AdamW's own step count equals the number of applied updates."""
    for counter in COUNTERS:
        setattr(role, counter, state[counter])
    for _, parameter in role.named_trainable():
        role.optimizer.state[parameter]["step"].fill_(role.successes)
        assert local(parameter).dtype == local(role.optimizer.state[parameter]["exp_avg"]).dtype
