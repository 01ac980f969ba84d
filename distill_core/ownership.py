# SPDX-License-Identifier: Apache-2.0
"""A guard around one phase of training: only the phase's owner may receive gradients.

    with owns(student, [student, teacher, fake_score]):
        loss.backward()

A role is anything with `.name`, `.module` and `.named_trainable()`, which may be a part of the module (an adapter on a
shared base) or empty (a frozen role). A gradient that leaks into another role trains it with the wrong objective at its
next step, without any error: here it raises.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class GradientOwnershipError(RuntimeError):
    """A parameter that the running phase does not own received a gradient."""


class OwnedRole(Protocol):
    name: str
    module: nn.Module

    def named_trainable(self) -> list[tuple[str, Tensor]]: ...


@contextmanager
def owns(role: OwnedRole, roles: Sequence[OwnedRole]) -> Iterator[None]:
    """Inside, only parameters that `role` owns may receive gradients; modules' train / eval modes are restored on exit.

    roles: every role of the run, frozen ones too; their gradients must be empty on entry. All-zero leaked gradients
    are dropped, a non-zero one raises GradientOwnershipError naming role and parameters. Scopes nest.
    """
    owned = {id(parameter) for _, parameter in role.named_trainable()}
    modes = [(module, module.training) for other in roles for module in other.module.modules()]
    try:
        yield
        _refuse_leaks(role, roles, owned)
    finally:
        for module, training in modes:
            module.training = training


def _refuse_leaks(role: OwnedRole, roles: Sequence[OwnedRole], owned: set[int]) -> None:
    leaks = []
    for other in roles:
        for name, parameter in other.module.named_parameters():
            if parameter.grad is None or id(parameter) in owned:
                continue
            if _is_zero(parameter.grad):
                parameter.grad = None
            else:
                leaks.append(f"{other.name}.{name}")
    if leaks:
        shown = ", ".join(sorted(set(leaks))[:5]) + (" ..." if len(set(leaks)) > 5 else "")
        raise GradientOwnershipError(f"the {role.name} phase gave gradients to parameters it does not own: {shown}")


def _is_zero(gradient: Tensor) -> bool:
    shard = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return not torch.count_nonzero(shard).item()
