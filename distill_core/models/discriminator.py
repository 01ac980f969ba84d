# SPDX-License-Identifier: Apache-2.0
"""The discriminator of adversarial distillation: a head on hidden states of the fake score (DMD2, arXiv 2405.14867).

    head = Discriminator(width=1152)
    logits_B = head(features_BTD)        # > 0: taken for real

DMD2 puts convolutions on the bottleneck of a U-Net; tokens of a transformer have no such grid, so here each is scored
and the scores are averaged.

Legend: B batch, T tokens, D width.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Discriminator(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, width)
        self.score = nn.Linear(width, 1)

    def forward(self, features_BTD: Tensor) -> Tensor:
        """Logits [B] in fp32."""
        features_BTD = F.layer_norm(features_BTD.float(), features_BTD.shape[-1:])
        return self.score(F.silu(self.hidden(features_BTD))).mean(dim=(1, 2))

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """The same values on every rank: the head has to be in fp32 and unsharded."""
        generator = torch.Generator().manual_seed(seed)
        for linear in (self.hidden, self.score):
            bound = linear.in_features**-0.5
            linear.weight.copy_(torch.empty(linear.weight.shape).uniform_(-bound, bound, generator=generator))
            linear.bias.zero_()
