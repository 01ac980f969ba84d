# SPDX-License-Identifier: Apache-2.0
"""Exponential moving average of a trained model: ema <- decay * ema + (1 - decay) * source, once per applied update.

    ema = EMA(dict(model.named_parameters()))        # exact copy; of the shards, if the model is sharded
    optimizer.step(); successes += 1
    ema.update(successes, decay=0.999, start_step=100)
    save(ema.shadow)                                 # all of its state: fill these tensors in place to resume

It works on local shards without communication. The average is kept in fp32 at least: at decay .999 a bf16 one stands
still, since its spacing is wider than the steps.
"""
from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class EMA:
    """source: tensors by name, plain or DTensor; of a sharded model, take them while it is resharded.

    shadow: tensors that hold the average, such as the parameters of another module or adapter, sharded like the source
    and overwritten with a copy of it; None makes new ones. No optimizer may own them.
    """

    def __init__(self, source: Mapping[str, Tensor], shadow: Mapping[str, Tensor] | None = None) -> None:
        # The tensors themselves, not detached views: moving a module (`to`, `to_empty`) gives a parameter other memory.
        self.source = dict(source)
        self.shadow = ({name: tensor.detach().to(_wide(tensor), copy=True) for name, tensor in source.items()}
                       if shadow is None else dict(shadow))
        _check_pairs(self.source, self.shadow)
        self.update(0, 0.0, start_step=1)  # a copy

    @torch.no_grad()
    def update(self, successes: int, decay: float, start_step: int = 0) -> None:
        """After the `successes`-th applied update of the source: a copy of it before `start_step`, the average after.

        `start_step` itself is averaged. Not to be called after a skipped step. Decay 1 never moves, 0 always copies.
        """
        if not 0.0 <= decay <= 1.0:  # NaN fails too
            raise ValueError(f"EMA decay must lie in [0, 1], got {decay}")
        for name, source in self.source.items():
            shadow = _local(self.shadow[name])
            if successes < start_step:
                shadow.copy_(_local(source))
            else:
                shadow.lerp_(_local(source).to(shadow.dtype), 1.0 - decay)


def _check_pairs(source: Mapping[str, Tensor], shadow: Mapping[str, Tensor]) -> None:
    if source.keys() != shadow.keys():
        raise ValueError(f"EMA: names differ between source and shadow: {sorted(source.keys() ^ shadow.keys())[:5]}")
    for name, tensor in source.items():
        if shadow[name].shape != tensor.shape or _local(shadow[name]).shape != _local(tensor).shape:
            raise ValueError(f"EMA: {name} has shape {tuple(tensor.shape)}, its shadow {tuple(shadow[name].shape)}, or "
                             "they are sharded differently (shard both alike, and reshard before building the EMA)")
        if shadow[name].dtype != _wide(tensor):
            raise ValueError(f"EMA: the shadow of {name} is {shadow[name].dtype} and must be {_wide(tensor)}")


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
