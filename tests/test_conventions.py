# SPDX-License-Identifier: Apache-2.0
"""dmd.convention against the code bases it names: their formulas, transcribed here in float64 in their own variables.

Every test compares all presets with one code base and asks which of them agree with it: exactly those that must. The
other presets are the negative controls.

u, c: the teacher's predictions without and with condition; x: the student's samples; x_s = (1 - s) x + s noise.
"""
from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from distill_core.config import PRESETS, DMDMethodConfig, score_time_law
from distill_core.flow import add_noise, guide, score_times, x0_from_velocity
from distill_core.losses_dmd import (
    dmd_gradient,
    fake_loss_weight,
    fake_score_loss_per_sample,
    surrogate_per_sample,
)
from distill_core.phases import phase_at

SHAPE = (5, 2, 3, 4)
SIZE = 2 * 3 * 4
NUM = 961_000  # draws: a multiple of the levels of all discrete laws


def preset(name):
    return dataclasses.replace(DMDMethodConfig(), convention=name, **PRESETS[name])


def agreeing(matches):
    """The conventions whose preset `matches`."""
    return {name for name in PRESETS if matches(preset(name))}


def randn(*, seed):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def near(actual, expected, rtol=1e-9):
    return torch.allclose(actual, expected, rtol=rtol, atol=1e-12)


def column(values):
    return values.reshape(-1, 1, 1, 1)


# ---------------------------------------------------------------------------------------------------------------------
# The student's loss: its gradient at x


def published_student_loss(name, x, real, fake):
    """(loss as published, how many times our gradient its gradient is)."""
    with torch.no_grad():
        if name == "dmd2":
            p_real, p_fake = x - real, x - fake
            grad = (p_real - p_fake) / p_real.abs().mean(dim=[1, 2, 3], keepdim=True)
        elif name in ("causvid", "self_forcing", "lightx2v"):
            grad = (fake - real) / (x - real).abs().mean(dim=[1, 2, 3], keepdim=True)
        elif name == "fastgen":
            grad = (fake - real) * (1 / ((x - real).abs().mean(dim=[1, 2, 3], keepdim=True) + 1e-6))
        elif name == "fastvideo":
            grad = (fake - real) / (x - real).abs().mean()
        elif name == "rcm":
            grad = (fake - real) / (x - real).abs().mean(dim=[1, 2, 3], keepdim=True).clip(min=0.00001)
        elif name == "verl_omni":
            grad = (fake - real) / (x - real).abs().mean(dim=[1, 2, 3], keepdim=True).clamp_min(1e-6)
        grad = torch.nan_to_num(grad)
    squares = (x - (x - grad).detach()) ** 2
    if name == "rcm":  # a sum over the sample, without the 1/2
        return squares.sum(dim=[1, 2, 3]).mean(), 2 * SIZE
    return 0.5 * squares.mean(), 1


def published_student_gradient(name, x, real, fake):
    x = x.clone().requires_grad_()
    loss, scale = published_student_loss(name, x, real, fake)
    return torch.autograd.grad(loss, x)[0] / scale


def our_gradient(dmd, x, real, fake):
    x = x.clone().requires_grad_()
    g = dmd_gradient(x, real, fake, dmd.normalization_epsilon, dmd.normalizer).g
    return torch.autograd.grad(surrogate_per_sample(x, g).mean(), x)[0]


@pytest.mark.parametrize("names", [{"dmd2", "causvid", "self_forcing", "lightx2v"}, {"fastgen"}, {"fastvideo"},
                                   {"rcm"}, {"verl_omni"}], ids=lambda names: "+".join(sorted(names)))
def test_student_gradient(names):
    """Catches another normaliser or epsilon: the second batch lies so near the teacher that the latter decides."""
    x, real, fake = randn(seed=0), randn(seed=1), randn(seed=2)
    batches = [(x, real, fake), (x, x + 1e-7 * real, fake)]
    for name in names:
        wanted = [published_student_gradient(name, *batch) for batch in batches]
        assert all(gradient.isfinite().all() and gradient.abs().max() > 1e-3 for gradient in wanted)
        assert agreeing(lambda dmd: all(near(our_gradient(dmd, *batch), gradient)
                                        for batch, gradient in zip(batches, wanted))) == names


# ---------------------------------------------------------------------------------------------------------------------
# The teacher's guidance


def published_guided_x0(name, x_s, v_c, v_u, s):
    """The guided x0, from the number that the code base publishes, in its form, space and path."""
    s = column(s)
    if name == "dmd2":  # SDXL, VP: the eps of each prediction, u + 8 (c - u)
        r = ((1 - s) ** 2 + s ** 2).sqrt()
        alpha, sigma, x_t = (1 - s) / r, s / r, x_s / r
        eps_c, eps_u = x_s + (1 - s) * v_c, x_s + (1 - s) * v_u
        return (x_t - sigma * (eps_u + 8.0 * (eps_c - eps_u))) / alpha
    if name in ("lightx2v", "verl_omni"):  # velocity, with the norm of c over the last dim
        v = v_u + 4.0 * (v_c - v_u)
        norm = torch.sqrt((v_c ** 2).sum(-1, keepdim=True)) / torch.sqrt((v ** 2).sum(-1, keepdim=True)).clamp(1e-12)
        return x_s - s * v * norm
    if name == "rcm":  # TrigFlow: x0 = cos t x_t - sin t F, with F the network's output; u + 5 (c - u) in x0
        t, norm = torch.atan2(s, 1 - s), torch.hypot(s, 1 - s)
        x_t = x_s / norm
        x0_c, x0_u = (torch.cos(t) * x_t - torch.sin(t) * (torch.cos(t) * x_t - (x_s - s * v)) / torch.sin(t)
                      for v in (v_c, v_u))
        return x0_u + 5.0 * (x0_c - x0_u)
    x0_c, x0_u = x_s - s * v_c, x_s - s * v_u
    if name == "causvid":
        return x0_c + 3.5 * (x0_c - x0_u)
    if name == "self_forcing":
        return x0_c + 3.0 * (x0_c - x0_u)
    if name == "fastgen":
        return x0_c + (5.0 - 1) * (x0_c - x0_u)
    if name == "fastvideo":
        return x0_u + (x0_c - x0_u) * 4.5


@pytest.mark.parametrize("names", [{"dmd2"}, {"causvid", "fastvideo"}, {"self_forcing"}, {"fastgen", "rcm"},
                                   {"lightx2v", "verl_omni"}], ids=lambda names: "+".join(sorted(names)))
def test_guidance(names):
    """Catches a published number taken in the other convention (3.5 for 4.5), and a rescale left out or too many."""
    x_s, v_c, v_u = randn(seed=0), randn(seed=1), randn(seed=2)
    s = torch.tensor([0.02, 0.3, 0.5, 0.8, 0.98], dtype=torch.float64)

    def guided_x0(dmd):
        return x0_from_velocity(x_s, guide(v_c, v_u, dmd.teacher_guidance_scale, dmd.cfg_norm), s)

    for name in names:
        wanted = published_guided_x0(name, x_s, v_c, v_u, s)
        assert agreeing(lambda dmd: near(guided_x0(dmd), wanted)) == names


# ---------------------------------------------------------------------------------------------------------------------
# Noise levels


def shifted(t, shift):
    return shift * t / (1 + (shift - 1) * t)


def published_levels(name, role):
    """NUM equally likely levels on the flow path, ascending: each code base's draws for an even grid of its numbers."""
    u = (np.arange(NUM) + 0.5) / NUM
    index = np.arange(NUM) * 1000 // NUM  # randint(0, 1000)
    if name == "dmd2" and role == "student":
        return (20 + np.arange(NUM) * 961 // NUM) / 1000  # randint(min_step, max_step + 1), of the teacher's schedule
    if name == "dmd2":
        return index / 1000
    if name in ("causvid", "self_forcing", "fastvideo", "verl_omni"):
        shift = {"causvid": 8.0, "self_forcing": 5.0, "fastvideo": 8.0, "verl_omni": 3.0}[name]
        return (1000 * shifted(index / 1000, shift)).clip(20, 980) / 1000
    if name == "fastgen":
        return shifted(u * (0.999 - 0.001) + 0.001, 5.0).clip(0.001, 0.999)
    if name == "rcm":
        sigma = shifted(u, 5.0)
        t = np.arctan(sigma / (1 - sigma))
        return np.sin(t) / (np.sin(t) + np.cos(t))
    if name == "lightx2v":
        return shifted(np.ceil(u * 1000) / 1000, 5.0).clip(0.02, 1.0)


def our_levels(dmd, role):
    u_B = (torch.arange(NUM, dtype=torch.float64) + 0.5) / NUM
    return score_times(u_B[torch.randperm(NUM)].float(), **score_time_law(dmd, role)).sort().values.double().numpy()


# The levels of DMD2's fake score and of rCM go down to 0, ours to these.
FLOORS = {("dmd2", "fake_score"): 0.001, ("rcm", "student"): 0.0001, ("rcm", "fake_score"): 0.0001}
NAMES_BY_LAW = [{"dmd2"}, {"causvid", "fastvideo"}, {"self_forcing"}, {"fastgen"}, {"rcm"}, {"lightx2v"}, {"verl_omni"}]


@pytest.mark.parametrize("role", ["student", "fake_score"])
def test_law_of_the_levels(role):
    """Catches a law of the same range and another shape: clamped for inside, another shift, 1 ... T for 0 ... T - 1.

    The distance of two laws is that of their quantile functions, so that the masses at the ends count.
    """
    ours = {name: our_levels(preset(name), role) for name in PRESETS}
    for names in NAMES_BY_LAW:
        for name in names:
            published = published_levels(name, role)
            wanted = np.maximum(published, FLOORS.get((name, role), 0.0))
            assert (wanted != published).mean() <= 0.001
            assert {other for other in PRESETS if np.abs(ours[other] - wanted).max() <= 2e-7} == names


@pytest.mark.parametrize("name, at_low, at_high", [("self_forcing", 0.005, 0.092), ("causvid", 0.003, 0.140),
                                                   ("dmd2", 1 / 961, 1 / 961), ("lightx2v", 0.004, 0.001)])
def test_masses_at_the_ends(name, at_low, at_high):
    """The known figures: 9 % of Self-Forcing's draws and 14 % of CausVid's are t = 980. Control: the others' differ."""
    law = score_time_law(preset(name), "student")

    def mass(other, level):
        return (our_levels(preset(other), "student").astype(np.float32) == np.float32(level)).mean()

    assert mass(name, law["low"]) == pytest.approx(at_low) and mass(name, law["high"]) == pytest.approx(at_high)
    for other in {"self_forcing", "causvid", "dmd2"} - {name}:
        assert mass(other, law["high"]) != pytest.approx(at_high)


def test_one_level_for_a_batch_in_fastvideo_alone():
    """Catches one level per sample where randint(0, T, [1]) is drawn, and the reverse."""
    assert agreeing(lambda dmd: dmd.score_time_per == "batch") == {"fastvideo"}


# ---------------------------------------------------------------------------------------------------------------------
# The fake score's loss


def published_fake_loss(name, x, noise, v, s):
    """[B]: the loss of each sample as published, from the velocity that the fake score's prediction amounts to."""
    s = column(s)
    x_s = (1 - s) * x + s * noise
    x_hat = x_s - s * v
    if name == "dmd2":  # SDXL, VP: of the eps prediction
        r = ((1 - s) ** 2 + s ** 2).sqrt()
        alpha, sigma, x_t = (1 - s) / r, s / r, x_s / r
        return (((x_t - alpha * x_hat) / sigma - noise) ** 2).mean(dim=[1, 2, 3])
    if name == "dmd2_edm":  # ImageNet, x_t = x + sigma noise
        sigma = s / (1 - s)
        return ((sigma ** -2 + 1 / 0.5 ** 2) * (x_hat - x) ** 2).mean(dim=[1, 2, 3])
    if name == "fastgen":
        return ((x_hat - x) ** 2).mean(dim=[1, 2, 3])
    if name == "rcm":  # a sum over the sample
        return ((x - x_hat) ** 2 / torch.sin(torch.atan2(s, 1 - s)) ** 2).sum(dim=[1, 2, 3]) / SIZE
    return ((v - (noise - x)) ** 2).mean(dim=[1, 2, 3])


def our_fake_loss(form, x, noise, v, s):
    return fake_score_loss_per_sample(v, x, noise) * fake_loss_weight(s, form)


LEVELS = torch.tensor([0.001, 0.2, 0.5, 0.9, 0.9999], dtype=torch.float64)


@pytest.mark.parametrize("names", [{"dmd2"}, {"fastgen"}, {"rcm"},
                                   {"causvid", "self_forcing", "fastvideo", "lightx2v", "verl_omni"}],
                         ids=lambda names: "+".join(sorted(names)))
def test_fake_loss(names):
    """Catches an error of x0, noise or velocity that is weighted as another's."""
    x, noise, v = randn(seed=0), randn(seed=1), randn(seed=2)
    for name in names:
        wanted = published_fake_loss(name, x, noise, v, LEVELS)
        assert agreeing(lambda dmd: near(our_fake_loss(dmd.fake_loss, x, noise, v, LEVELS), wanted, rtol=1e-6)) == names


def test_fake_loss_of_edm():
    """DMD2's ImageNet loss, a form that no preset takes. Control: no other form agrees."""
    x, noise, v = randn(seed=0), randn(seed=1), randn(seed=2)
    wanted = published_fake_loss("dmd2_edm", x, noise, v, LEVELS)
    forms = ("flow", "x0", "eps", "edm", "vp_v")
    assert [form for form in forms if near(our_fake_loss(form, x, noise, v, LEVELS), wanted, rtol=1e-6)] == ["edm"]


def test_fake_score_sees_the_flow_path():
    """The state that all of the above assume is the one that training noises to."""
    x, noise = randn(seed=0), randn(seed=1)
    assert near(add_noise(x, noise, LEVELS), (1 - column(LEVELS)) * x + column(LEVELS) * noise)


# ---------------------------------------------------------------------------------------------------------------------
# Cadence


def published_updates(name, num):
    """The first `num` updates, as (role, whether a fake update is on the samples of the student update before it)."""
    updates, iteration = [], 0
    while len(updates) < num:
        if name == "dmd2":  # every iteration makes samples; each fifth trains the student on them, each the fake score
            trains_student = iteration % 5 == 0
            updates += [("student", False)] * trains_student + [("fake_score", trains_student)]
        elif name in ("causvid", "self_forcing", "fastvideo"):  # as DMD2, the fake score on samples of its own
            updates += [("student", False)] * (iteration % 5 == 0) + [("fake_score", False)]
        elif name in ("fastgen", "rcm"):  # either, or
            updates.append(("student", False) if iteration % 5 == 0 else ("fake_score", False))
        elif name in ("lightx2v", "verl_omni"):  # a cycle
            updates += [("student", False)] + 2 * [("fake_score", False)]
        iteration += 1
    return updates[:num]


def our_updates(dmd, num):
    phases = [phase_at(attempt, dmd.fake_update_ratio) for attempt in range(num)]
    return [(phase.role, dmd.fake_batch == "reuse_student" and phase.index == 1) for phase in phases]


@pytest.mark.parametrize("names, share", [({"dmd2"}, 1 / 6), ({"causvid", "self_forcing", "fastvideo"}, 1 / 6),
                                          ({"fastgen", "rcm"}, 1 / 5), ({"lightx2v", "verl_omni"}, 1 / 3)],
                         ids=lambda value: "+".join(sorted(value)) if isinstance(value, set) else None)
def test_cadence(names, share):
    """Catches a "5" that means 1:5 in one code base and 1:4 in another, and the wrong samples for the fake score."""
    for name in names:
        wanted = published_updates(name, 60)
        assert np.mean([role == "student" for role, _ in wanted]) == pytest.approx(share)
        assert agreeing(lambda dmd: our_updates(dmd, 60) == wanted) == names
