# SPDX-License-Identifier: Apache-2.0
"""The discriminator's head against its formula in float64, and its start."""
from __future__ import annotations

import pytest
import torch

from distill_core.models.discriminator import Discriminator


def head(seed: int = 0, width: int = 6) -> Discriminator:
    module = Discriminator(width)
    module.reset_parameters(seed)
    return module


def features(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(1)).to(dtype)


def reference(module: Discriminator, x_BTD: torch.Tensor) -> torch.Tensor:
    x_BTD = x_BTD.double()
    x_BTD = (x_BTD - x_BTD.mean(-1, keepdim=True)) / (x_BTD.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    hidden = x_BTD @ module.hidden.weight.double().T + module.hidden.bias
    scores_BT = (hidden * torch.sigmoid(hidden)) @ module.score.weight.double()[0] + module.score.bias
    return scores_BT.mean(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_means_of_token_scores_in_fp32(dtype):
    """Catches one score of an average token in place of an average of scores, and logits computed in bf16."""
    module, x_BTD = head(), features(dtype)
    torch.nn.init.normal_(module.hidden.bias)  # or zeros would hide a bias that is left out
    logits_B = module(x_BTD)
    assert logits_B.shape == (3,) and logits_B.dtype == torch.float32
    torch.testing.assert_close(logits_B.double(), reference(module, x_BTD), rtol=1e-5, atol=1e-6)
    assert (logits_B - reference(module, x_BTD.mean(1, keepdim=True))).abs().max() > 1e-3, "negative control"


def test_the_size_of_features_says_nothing():
    """Catches a head that judges by the length of hidden states, which the fake score's own training moves."""
    module, x_BTD = head(), features()
    torch.testing.assert_close(module(x_BTD), module(10 * x_BTD + 3), rtol=1e-4, atol=1e-4)


def test_gradients_reach_features_and_head():
    """Catches a head that is detached from what it judges: the generator would learn nothing."""
    module, x_BTD = head(), features().requires_grad_()
    module(x_BTD).sum().backward()
    assert x_BTD.grad.norm() > 1e-3 and all(p.grad.norm() > 1e-3 for p in module.parameters())


def test_the_start_is_a_function_of_the_seed():
    """Catches heads that differ between ranks, and a global generator that moves."""
    module = Discriminator(6)
    before = torch.get_rng_state()
    module.reset_parameters(5)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, module.parameters(), head(5).parameters()))
    assert not torch.equal(module.hidden.weight, head(6).hidden.weight)
    assert not module.hidden.bias.any() and module.hidden.weight.abs().max() <= 6**-0.5
