# SPDX-License-Identifier: Apache-2.0
"""Named low-rank adapters on a frozen base: y = W x + b + (alpha / R) B A x, with A and B of the active adapter.

    inject(model, ["attn.qkv", "mlp.fc1"], rank=32, alpha=32, adapters=("student", "fake_score"))   # before sharding
    with use(model, "student"):
        out = model(x, recompute=True, context_fn=checkpoint_context_fn(model))
    with use(model, None), torch.no_grad():
        teacher_out = model(x)                  # the base alone
    loss(out, teacher_out).backward()           # recomputes `out` with "student", whatever is active by then

LoRA: arXiv:2106.09685; scale, initialisation and file format of peft. The active adapter is a plain attribute of each
layer, since activation recomputation runs on autograd's own thread on CUDA, where a contextvar or thread-local would be
unset. So one thread at a time runs a module.

Legend: R rank of an adapter; lora_A.<adapter> [R, in], lora_B.<adapter> [out, R].
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


class LoRALinear(nn.Linear):
    """A frozen nn.Linear that keeps its parameter names (`weight`, `bias`), with named adapters beside it.

    active: the adapter that the forward adds, None for the base alone; set by the scope `use`. Adapters are stored in
    fp32 at least, since an optimizer trains them, and computed in the dtype of the input.
    """

    def __init__(self, linear: nn.Linear, *, rank: int, alpha: float, adapters: Sequence[str]) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias, self.training = linear.weight, linear.bias, linear.training
        self.rank, self.alpha, self.active = rank, alpha, None
        dtype = torch.promote_types(linear.weight.dtype, torch.float32)
        down, up = (linear.weight.new_empty(shape, dtype=dtype)
                    for shape in ((rank, self.in_features), (self.out_features, rank)))
        self.lora_A = nn.ParameterDict({name: nn.Parameter(torch.empty_like(down)) for name in adapters})
        self.lora_B = nn.ParameterDict({name: nn.Parameter(torch.empty_like(up)) for name in adapters})

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.active is None:
            return out
        down = F.linear(x, self.lora_A[self.active].to(x.dtype))
        return out + F.linear(down, self.lora_B[self.active].to(x.dtype)) * self.scale


# --- injection ------------------------------------------------------------------------------------------------------

def inject(module: nn.Module, targets: Sequence[str], *, rank: int, alpha: float,
           adapters: Sequence[str] = ("default",)) -> list[str]:
    """Replace the nn.Linear layers that `targets` name by LoRALinear, in place; returns their paths.

    targets: whole paths or ends of paths at a dot ("attn.qkv" names every "blocks.N.attn.qkv"). Everything but the
    adapters is frozen. Each adapter starts as a no-op (`reset_lora`, seed: its index) and none is active. On meta the
    adapters have no values either: call `reset_lora` for each once there is storage.
    ValueError: a target that names nothing or something else than an nn.Linear, a module that has adapters already or
    is sharded, rank < 1, alpha not positive and finite, repeated or unusable adapter names.
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"LoRA rank must be an integer of at least 1, got {rank!r}")
    if not 0 < alpha < math.inf:
        raise ValueError(f"LoRA alpha must be a positive number, got {alpha!r}")
    if isinstance(adapters, str) or not adapters or len(set(adapters)) < len(adapters) or not all(
            name.isidentifier() for name in adapters):
        raise ValueError(f"LoRA adapters must be a list of different names of letters, digits and _, got {adapters!r}")
    taken = [name for name in adapters if hasattr(nn.ParameterDict(), name)]
    if taken:
        raise ValueError(f"LoRA adapter {taken[0]!r}: torch uses that name itself (choose another)")
    if lora_layers(module):
        raise ValueError("the module has LoRA adapters already (give all names in one call of inject)")
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        raise ValueError("the module is sharded (inject LoRA adapters before fully_shard)")
    found = _find_linears(module, targets)
    module.requires_grad_(False)
    for path, linear in found.items():
        module.set_submodule(path, LoRALinear(linear, rank=rank, alpha=alpha, adapters=adapters))
    for index, adapter in enumerate(adapters):
        reset_lora(module, adapter, seed=index)
    return list(found)


def _find_linears(module: nn.Module, targets: Sequence[str]) -> dict[str, nn.Linear]:
    if isinstance(targets, str) or not targets:
        raise ValueError(f"LoRA targets must be a list of layer names, got {targets!r}")
    found = {}
    for target in targets:
        named = {path: layer for path, layer in module.named_modules(remove_duplicate=False)
                 if f".{path}".endswith(f".{target}")}
        if not named:
            linears = [path for path, layer in module.named_modules() if type(layer) is nn.Linear]
            raise ValueError(f"LoRA target {target!r} names no layer (give paths or their ends; there are "
                             f"{len(linears)} nn.Linear: {', '.join(linears[:5])}{', ...' * (len(linears) > 5)})")
        for path, layer in named.items():
            if type(layer) is not nn.Linear:  # a subclass may use its weight in its own way, past the adapter
                raise ValueError(f"LoRA target {target!r} names {path}, a {type(layer).__name__}, not an nn.Linear "
                                 "(give a longer end of the path)")
        found |= named
    if len(set(found.values())) < len(found):
        raise ValueError(f"LoRA targets {list(targets)} name one layer by two paths (leave shared layers out)")
    return found


@torch.no_grad()
def reset_lora(module: nn.Module, adapter: str, *, seed: int) -> None:
    """Start `adapter` again as a no-op: A uniform in +-1 / sqrt(in) as in peft, B zero.

    A depends on the seed and the order of the layers only: not on the adapter's name, the sharding or the device.
    torch's global generator is not used.
    """
    generator = torch.Generator().manual_seed(seed)
    for layer in _layers_with(module, adapter):
        whole = torch.empty(layer.rank, layer.in_features).uniform_(-1.0, 1.0, generator=generator)
        _fill(layer.lora_A[adapter], whole * layer.in_features**-0.5)
        layer.lora_B[adapter].zero_()


def _fill(parameter: Tensor, whole: Tensor) -> None:
    if isinstance(parameter, DTensor):  # every rank has the whole value: no communication
        mesh, placements = parameter.device_mesh, parameter.placements
        whole = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
        parameter = parameter.to_local()
    parameter.copy_(whole)


# --- which adapter runs ---------------------------------------------------------------------------------------------

def lora_layers(module: nn.Module) -> dict[str, LoRALinear]:
    """The adapted layers by path; empty before `inject`."""
    return {path: layer for path, layer in module.named_modules() if isinstance(layer, LoRALinear)}


def named_adapter(module: nn.Module, adapter: str) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters of one adapter: what its role trains and saves."""
    _layers_with(module, adapter)
    return [(name, parameter) for name, parameter in module.named_parameters()
            if name.split(".")[-2:] in (["lora_A", adapter], ["lora_B", adapter])]


def _layers_with(module: nn.Module, adapter: str) -> list[LoRALinear]:
    layers = list(lora_layers(module).values())
    if not layers:
        raise ValueError(f"LoRA adapter {adapter!r}: {type(module).__name__} has no adapters (call inject first)")
    if adapter not in layers[0].lora_A:
        raise ValueError(f"LoRA adapter {adapter!r} does not exist (choose from {', '.join(layers[0].lora_A)})")
    return layers


class _Scope:
    """Sets the active adapter of each layer on entry and puts back what was active on exit.

    A class, since recomputation enters the same scope once for each backward through its graph.
    """

    def __init__(self, layers: Sequence[LoRALinear], adapters: Sequence[str | None]) -> None:
        self.layers, self.adapters, self.before = layers, adapters, []

    def __enter__(self) -> None:
        self.before.append([layer.active for layer in self.layers])
        _activate(self.layers, self.adapters)

    def __exit__(self, *exception: object) -> None:
        _activate(self.layers, self.before.pop())


def _activate(layers: Sequence[LoRALinear], adapters: Sequence[str | None]) -> None:
    for layer, adapter in zip(layers, adapters):
        layer.active = adapter


def use(module: nn.Module, adapter: str | None) -> AbstractContextManager[None]:
    """A scope in which forwards of `module` add `adapter`; None: the base alone, also of a module without adapters.

    Scopes nest and restore the outer choice, on exceptions too. Recomputation in a later backward needs
    `checkpoint_context_fn` as well. Ranks must agree on the adapter: FSDP would mix gradients of equal shapes silently.
    """
    layers = list(lora_layers(module).values()) if adapter is None else _layers_with(module, adapter)
    return _Scope(layers, [adapter] * len(layers))


def checkpoint_context_fn(module: nn.Module) -> Callable[[], tuple[AbstractContextManager, AbstractContextManager]]:
    """`context_fn` of torch.utils.checkpoint (use_reentrant=False): recomputes with the adapters of the forward.

    Without it recomputation takes what is active at backward time: wrong gradients, and no error where shapes agree.
    """
    layers = list(lora_layers(module).values())

    def context_fn() -> tuple[AbstractContextManager, AbstractContextManager]:
        return nullcontext(), _Scope(layers, [layer.active for layer in layers])

    return context_fn


# --- merge and peft's format ----------------------------------------------------------------------------------------

@torch.no_grad()
def merge(module: nn.Module, adapter: str) -> nn.Module:
    """Add `adapter` to the base weights and put plain nn.Linear layers back, in place; returns `module`.

    The other adapters are dropped. ValueError for a sharded module: merge a plain copy.
    """
    layers = _layers_with(module, adapter)
    if any(isinstance(layer.weight, DTensor) for layer in layers):
        raise ValueError("the module is sharded (merge LoRA adapters in a plain copy of it)")
    for path, layer in lora_layers(module).items():
        merged = merged_weight(layer.weight, layer.lora_A[adapter], layer.lora_B[adapter], layer.scale)
        layer.weight.copy_(merged)
        linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        linear.weight, linear.bias, linear.training = layer.weight, layer.bias, layer.training
        module.set_submodule(path, linear)
    return module


def merged_weight(weight: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float) -> Tensor:
    """weight + scale * B A [out, in], summed in at least fp32 and rounded once to the dtype of `weight`."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) + scale * (lora_B.to(wide) @ lora_A.to(wide))).to(weight.dtype)


@torch.no_grad()
def peft_state(module: nn.Module, adapter: str) -> dict[str, Tensor]:
    """Whole tensors under the names of peft's adapter_model.safetensors. A collective where the module is sharded."""
    _layers_with(module, adapter)
    state = {}
    for path, layer in lora_layers(module).items():
        for side, parameters in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
            tensor = parameters[adapter].detach()
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            state[f"base_model.model.{path}.{side}.weight"] = whole
    return state


def peft_config(module: nn.Module, *, base_model: str) -> dict[str, Any]:
    """What peft's adapter_config.json must say so that `peft_state` is applied with the same scale to the same layers.

    base_model: name or folder of the model that the adapter belongs to. Every key that changes the result is written.
    """
    layers = lora_layers(module)
    if not layers:
        raise ValueError(f"{type(module).__name__} has no LoRA adapters (call inject first)")
    layer = next(iter(layers.values()))
    return {"peft_type": "LORA", "task_type": None, "base_model_name_or_path": base_model, "inference_mode": True,
            "r": layer.rank, "lora_alpha": layer.alpha, "lora_dropout": 0.0, "target_modules": sorted(layers),
            "bias": "none", "fan_in_fan_out": False, "use_rslora": False, "use_dora": False, "lora_bias": False,
            "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {}}
