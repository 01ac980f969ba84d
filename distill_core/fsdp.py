# SPDX-License-Identifier: Apache-2.0
"""FSDP2 as this project uses it: shard from a list of units, gather into a plain replica, clip over local shards.

    shard(model, model.fsdp_units(), mesh, compute_dtype=torch.bfloat16)   # before the optimizer is built
    hidden = model(tokens); logits = model.lm_head(hidden)                 # always both calls, on every rank
    norm = global_grad_norm(parameters, group)
    gather_into(model, replica)                                            # a collective: every rank

Why not torch's clip: `clip_grad_norm_` returns a DTensor whose `.item()` may be the local value, and fails on mixed
plain and sharded parameters. Why gradients are not divided here: FSDP averages over the mesh, the caller normalises by
counts.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

try:
    from torch.distributed import all_gather_single
except ImportError:  # its name before torch 2.13
    from torch.distributed import all_gather_into_tensor as all_gather_single


def shard(model: nn.Module, units: Sequence[Sequence[nn.Module]], mesh: DeviceMesh, *,
          compute_dtype: torch.dtype | None = None, offload: bool = False, cast_forward_inputs: bool = True) -> None:
    """Shard `units` (modules gathered together) and then the rest of `model` over a 1-D mesh, in place.

    compute_dtype: cast for forward and backward; parameters keep theirs, and gradients are reduced in fp32.
    offload: keep shards in host memory (needs an accelerator).
    cast_forward_inputs: inputs too; False where the model casts what may be cast (a noise level must stay fp32).
    Everything is resharded after its forward, the root too: a root that stays gathered would go stale at the next step.
    On a mesh of one rank a module that needs neither stays as it is: FSDP would only copy its parameters around.
    """
    if mesh.size() == 1 and compute_dtype is None and not offload:
        return
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32 if compute_dtype else None,
                                  cast_forward_inputs=cast_forward_inputs)
    offload_policy = CPUOffloadPolicy() if offload else OffloadPolicy()
    for unit in [*units, [model]]:
        fully_shard(list(unit) if len(unit) > 1 else unit[0], mesh=mesh, mp_policy=policy,
                    offload_policy=offload_policy, reshard_after_forward=True)


def reshard(model: nn.Module) -> None:
    """Free every gathered parameter, so that `parameters()` are the shards and no stale copy outlives a step."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor (the tensor itself when it is plain)."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def gather_into(model: nn.Module, replica: nn.Module) -> None:
    """Copy sharded parameters into the plain module `replica` in place, cast to its dtypes; a collective.

    One all-gather for each module that was sharded as one, in the replica's dtype. A replica parameter with fewer rows
    (a vocabulary that was cut) takes the first ones.
    """
    reshard(model)
    parameters, targets = dict(model.named_parameters()), dict(replica.named_parameters())
    assert set(parameters) == set(targets), f"not a replica: they differ in {sorted(set(parameters) ^ set(targets))}"
    for names in _units(model):
        _gather_unit([parameters[name] for name in names], [targets[name] for name in names])


def _units(model: nn.Module) -> list[list[str]]:
    """Names of the parameters that stand in the same innermost FSDP module, or in none."""
    owners = dict.fromkeys(dict(model.named_parameters()), "")
    for path, module in model.named_modules():  # outer ones first
        if isinstance(module, FSDPModule):
            owners |= {name: path for name, _ in module.named_parameters(prefix=path) if name in owners}
    return [[name for name, owner in owners.items() if owner == path] for path in dict.fromkeys(owners.values())]


def _gather_unit(parameters: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """FSDP2 shards rows by torch.chunk: all shards but the last have equally many, and padding makes it all of them."""
    sharded = [(p, target) for p, target in zip(parameters, targets) if isinstance(p, DTensor)]
    for parameter, target in zip(parameters, targets):
        if not isinstance(parameter, DTensor):
            target.copy_(parameter[:target.shape[0]])
    for dtype in {target.dtype for _, target in sharded}:
        pairs = [(p, target) for p, target in sharded if target.dtype == dtype]
        mesh = pairs[0][0].device_mesh
        num_rows = [-(-p.shape[0] // mesh.size()) for p, _ in pairs]  # of a shard
        sizes = [rows * p.shape[1:].numel() for rows, (p, _) in zip(num_rows, pairs)]
        mine = torch.zeros(sum(sizes), dtype=dtype, device=pairs[0][1].device)
        for part, (p, _) in zip(mine.split(sizes), pairs):
            part[:p.to_local().numel()] = p.to_local().flatten()
        whole = mine.new_empty(mesh.size(), len(mine))
        all_gather_single(whole.view(-1), mine, group=mesh.get_group())
        for part, rows, (p, target) in zip(whole.split(sizes, dim=1), num_rows, pairs):
            target.copy_(part.reshape(mesh.size() * rows, *p.shape[1:])[:target.shape[0]])


@torch.no_grad()
def global_grad_norm(parameters: Iterable[Tensor], group: dist.ProcessGroup | None) -> Tensor:
    """L2 norm of all gradients over all shards, fp32 on the gradients' device. Non-finite anywhere: non-finite here.

    All parameters are sharded over the ranks of `group`; every rank calls it, also one whose shards are empty.
    """
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    assert gradients, "no parameter has a gradient: was the optimizer built before sharding?"
    total = torch.stack([g.float().square().sum() for g in gradients]).sum()
    if group is not None:
        dist.all_reduce(total, group=group)
    return total.sqrt()


@torch.no_grad()
def scale_grads(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply every local gradient shard by `factor`."""
    gradients = [gradient for p in parameters if p.grad is not None and (gradient := local(p.grad)).numel()]
    if gradients:  # a rank may hold no rows of any
        torch._foreach_mul_(gradients, factor)


def num_parameters(model: nn.Module) -> int:
    """Global count; tied parameters count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of this rank's shards."""
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors)
