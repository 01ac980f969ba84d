# SPDX-License-Identifier: Apache-2.0
"""The flow path: conversions against the definitions, laws of the score times, guidance, and samplers of one code path
with training."""
from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from distill_core.flow import (
    add_noise,
    edm_from_x0,
    euler_sample,
    few_step_sample,
    few_step_states,
    guide,
    sample_times,
    score_times,
    shift_time,
    student_grid,
    to_edm,
    to_vp,
    velocity_from_x0,
    vp_eps_from_x0,
    vp_v_from_x0,
    x0_from_edm,
    x0_from_velocity,
    x0_from_vp_eps,
    x0_from_vp_v,
)

SHAPE = (6, 3, 4, 4)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64).to(dtype)


def assert_near(actual, expected, atol=1e-12):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def column(level):
    return level.view(-1, 1, 1, 1)


def make_state():
    """(x0, noise, s) in float64, s in (0, 1) and different for each sample."""
    return randn(*SHAPE), randn(*SHAPE, seed=1), torch.linspace(0.03, 0.97, SHAPE[0], dtype=torch.float64)


# ---------------------------------------------------------------------------------------------------------------------
# Conversions


def test_flow_path_and_conversions():
    """A flipped sign or time: at s = 0 the state is the data, and v = noise - x0 points from data to noise."""
    x0, noise, s = make_state()
    x_s = add_noise(x0, noise, s)
    assert_near(x_s, (1 - column(s)) * x0 + column(s) * noise)
    assert_near(add_noise(x0, noise, torch.zeros_like(s)), x0)
    assert_near(add_noise(x0, noise, torch.ones_like(s)), noise)
    assert_near(x0_from_velocity(x_s, noise - x0, s), x0)
    assert_near(velocity_from_x0(x_s, x0, s), noise - x0)
    assert not torch.allclose(x0_from_velocity(x_s, x0 - noise, s), x0, atol=0.1)  # SiT's sign
    assert not torch.allclose(x0_from_velocity(x_s, noise - x0, 1 - s), x0, atol=0.1)  # SiT's time


def test_vp_conversions_recover_the_sample():
    """The definitions of eps- and v-prediction, on a state that the flow path made: sample and noise stay the same."""
    x0, noise, s = make_state()
    x_t, alpha, sigma = to_vp(add_noise(x0, noise, s), s)
    assert alpha.shape == sigma.shape == (6, 1, 1, 1)
    assert_near(alpha.square() + sigma.square(), torch.ones(6, 1, 1, 1, dtype=torch.float64))
    assert_near(x_t, alpha * x0 + sigma * noise)
    assert_near(x0_from_vp_eps(x_t, noise, alpha=alpha, sigma=sigma), x0)
    assert_near(x0_from_vp_v(x_t, alpha * noise - sigma * x0, alpha=alpha, sigma=sigma), x0)
    assert_near(vp_eps_from_x0(x_t, x0, alpha=alpha, sigma=sigma), noise)
    assert_near(vp_v_from_x0(x_t, x0, alpha=alpha, sigma=sigma), alpha * noise - sigma * x0)
    assert not torch.allclose(x0_from_vp_v(x_t, noise - x0, alpha=alpha, sigma=sigma), x0, atol=0.1)  # a flow velocity


def test_edm_conversion_is_the_paper_s_preconditioning():
    """Table 1 of arXiv 2206.00364; its purpose is a target of unit variance at every noise level, measured here."""
    x0, noise, s = make_state()
    x_t, sigma = to_edm(add_noise(x0, noise, s), s)
    assert_near(x_t, x0 + sigma * noise)
    raw = randn(*SHAPE, seed=2)
    expected = 0.25 / (sigma ** 2 + 0.25) * x_t + sigma * 0.5 / (sigma ** 2 + 0.25).sqrt() * raw
    assert_near(x0_from_edm(x_t, raw, sigma=sigma), expected)

    data, level = 0.5 * randn(3, 20000, seed=3), torch.tensor([0.01, 0.5, 20.0], dtype=torch.float64)
    target = edm_from_x0(data + level[:, None] * randn(3, 20000, seed=4), data, sigma=level)
    assert_near(target.std(1), torch.ones(3, dtype=torch.float64), atol=0.02)


@pytest.mark.parametrize("name", ["flow", "vp_eps", "vp_v", "edm"])
def test_conversions_round_trip(name):
    """x0 -> prediction -> x0 and prediction -> x0 -> prediction, at random inputs that belong to no path."""
    x, value, s = randn(*SHAPE), randn(*SHAPE, seed=1), torch.linspace(0.05, 0.95, 6, dtype=torch.float64)
    levels = {"alpha": torch.cos(s), "sigma": torch.sin(s)}
    there, back = {
        "flow": (lambda y: velocity_from_x0(x, y, s), lambda y: x0_from_velocity(x, y, s)),
        "vp_eps": (lambda y: vp_eps_from_x0(x, y, **levels), lambda y: x0_from_vp_eps(x, y, **levels)),
        "vp_v": (lambda y: vp_v_from_x0(x, y, **levels), lambda y: x0_from_vp_v(x, y, **levels)),
        "edm": (lambda y: edm_from_x0(x, y, sigma=s), lambda y: x0_from_edm(x, y, sigma=s)),
    }[name]
    assert_near(back(there(value)), value)
    assert_near(there(back(value)), value)
    assert not torch.allclose(there(value), value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_precision(dtype):
    """Computing in bf16: at s = 0.98 the x0 of a bf16 network would lose its digits to cancellation."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x, v, s = randn(*SHAPE, dtype=dtype), randn(*SHAPE, seed=1, dtype=dtype), torch.full((6,), 0.98)
    for result in (add_noise(x, v, s), x0_from_velocity(x, v, s), velocity_from_x0(x, v, s),
                   guide(x, v, 4.0, "layer_norm"), guide(x, None, 1.0), *to_vp(x, s), *to_edm(x, s)):
        assert result.dtype == wide
    exact = x0_from_velocity(x.double(), v.double(), s.double())
    assert_near(x0_from_velocity(x, v, s).double(), exact, atol=1e-6)


def test_levels_as_vector_or_column_and_nothing_else():
    """A level that broadcasts over the wrong axis: [B] beside [B, B] images is a noise level per pixel column."""
    x0, noise = randn(4, 4), randn(4, 4, seed=1)
    s = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    assert torch.equal(add_noise(x0, noise, s), add_noise(x0, noise, s[:, None]))
    assert_near(add_noise(x0, noise, s)[3], 0.6 * x0[3] + 0.4 * noise[3])
    for bad in (s[None], s[:3], s[:1], s[:, None, None], s[0]):
        with pytest.raises(ValueError, match="noise level must be"):
            add_noise(x0, noise, bad)
    with pytest.raises(ValueError, match="one shape"):
        x0_from_velocity(x0, noise[:, :1], s)


# ---------------------------------------------------------------------------------------------------------------------
# Times


def ks_distance(sample, cdf):
    """sqrt(n) sup |empirical - cdf|, on both sides of every jump; above 1.95 with probability 0.001 at the most."""
    values, counts = np.unique(sample.double().numpy().round(5), return_counts=True)  # as fine as two atoms are apart
    upper = counts.cumsum() / len(sample)
    lower = upper - counts / len(sample)
    beside = 6e-6  # more than a level was rounded by, less than the distance of any two atoms
    return math.sqrt(len(sample)) * max(np.abs(cdf(values + beside) - upper).max(),
                                        np.abs(cdf(values - beside) - lower).max())


def time_cdf(shift, low, high, discrete_steps):
    """P(level <= s) in closed form: the shift is undone by u = s / (shift - (shift - 1) s), u has atoms k / T."""
    def cdf(s):
        u = s / (shift - (shift - 1) * s)
        if discrete_steps:
            u = (np.floor(u * discrete_steps) + 1) / discrete_steps
        return np.select([s < low, s >= high], [0.0, 1.0], u.clip(0.0, 1.0))
    return cdf


@pytest.mark.parametrize("discrete_steps", [0, 10, 1000])
@pytest.mark.parametrize("shift, low, high", [(1.0, 0.0, 1.0), (1.0, 0.02, 0.98), (3.0, 0.02, 0.98), (5.0, 0.02, 1.0),
                                              (8.0, 0.02, 0.98)])
def test_law_of_the_score_times(shift, low, high, discrete_steps):
    """A clamp taken for a rescale, a shift the wrong way or taken twice, an end of the range never drawn."""
    settings = dict(discrete_steps=discrete_steps, shift=shift, low=low, high=high)
    s = sample_times(100_000, generator=seeded(7), device="cpu", **settings)
    assert s.shape == (100_000,) and s.dtype == torch.float32 and s.min() >= low and s.max() <= high
    assert ks_distance(s, time_cdf(shift, low, high, discrete_steps)) < 1.95
    # negative controls
    assert ks_distance(s, time_cdf(shift * 1.1, low, high, discrete_steps)) > 4
    assert ks_distance(low + (high - low) * torch.rand(100_000, generator=seeded(8)),
                       time_cdf(3.0, low, high, discrete_steps)) > 4


@pytest.mark.parametrize("shift, at_high, at_low", [(5.0, 0.093, 0.004), (8.0, 0.140, 0.0025), (1.0, 0.020, 0.020)])
def test_point_masses_of_the_clamp(shift, at_high, at_low):
    """The published laws (Self-Forcing 9.3 %, CausVid 14 % of all draws at t = 980): the clamp gathers, not drops."""
    for discrete_steps in (0, 1000):
        s = sample_times(400_000, generator=seeded(1), device="cpu", shift=shift, discrete_steps=discrete_steps)
        assert (s == torch.tensor(0.98)).double().mean().item() == pytest.approx(at_high, abs=2e-3)
        assert (s == torch.tensor(0.02)).double().mean().item() == pytest.approx(at_low, abs=1.5e-3)


@pytest.mark.parametrize("discrete_steps, levels", [
    (10, {"clamp": range(10), "ceil": range(1, 11), "inside": range(2, 8)}), (1000, {"inside": range(150, 751)})])
def test_levels_of_each_law(discrete_steps, levels):
    """An end of the range left out or doubled, and a law taken for another: exact levels, each as often as the next."""
    for law, wanted in levels.items():
        low, high = (0.15, 0.75) if law == "inside" else (0.0, 1.0)
        u_B = (torch.arange(len(wanted) * 100) + 0.5) / (len(wanted) * 100)
        s = score_times(u_B, law=law, discrete_steps=discrete_steps, low=low, high=high)
        values, counts = s.unique(return_counts=True)
        assert torch.equal(values, torch.tensor(list(wanted)) / discrete_steps) and set(counts.tolist()) == {100}


def test_inside_of_the_continuum():
    """A clamp in place of the uniform inside, and a shift before it: FastGen shifts what is uniform in the range."""
    u_B = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    s = score_times(u_B, law="inside", discrete_steps=0, low=0.2, high=0.6)
    assert_near(s.double(), 0.2 + 0.4 * u_B, atol=1e-7)
    s = score_times(u_B, law="inside", discrete_steps=0, low=0.2, high=0.6, shift=3.0)
    assert_near(s.double(), shift_time(0.2 + 0.4 * u_B, 3.0).clamp(0.2, 0.6), atol=1e-7)
    assert (s == torch.tensor(0.6)).double().mean() == pytest.approx(1 - (1 / 3 - 0.2) / 0.4, abs=2e-3)


@pytest.mark.parametrize("law, first, last", [("clamp", 0.0, 0.999), ("ceil", 0.001, 1.0), ("inside", 0.0, 1.0)])
def test_ends_of_the_uniforms(law, first, last):
    """A number of exactly 1, which rounding yields, that leads out of the levels; the smallest likewise."""
    ends = torch.tensor([2.0**-33, 1.0])
    s = score_times(ends, law=law, low=0.0, high=1.0)
    assert s.dtype == torch.float32 and torch.equal(s, torch.tensor([first, last]))
    assert torch.equal(score_times(ends, law=law, discrete_steps=0, low=0.0, high=1.0), ends)


@pytest.mark.parametrize("bad, message", [
    (dict(law="uniform"), "choose clamp, inside or ceil"), (dict(low=0.5, high=0.5), "low < high"),
    (dict(high=1.1), "high <= 1"), (dict(discrete_steps=-1), "discrete_steps"), (dict(shift=0.0), "shift"),
    (dict(law="inside", discrete_steps=1), "no k / 1 lies in")])
def test_score_times_refuses(bad, message):
    """A law that is not there, and a range without a level."""
    with pytest.raises(ValueError, match=message):
        score_times(torch.tensor([0.5]), **bad)


def test_discrete_times_are_multiples():
    """Levels that the teacher's table of times lacks, and a range of 1 ... T instead of 0 ... T - 1."""
    s = sample_times(20_000, generator=seeded(), device="cpu", discrete_steps=10, low=0.0, high=1.0)
    assert torch.equal(s.unique(), torch.arange(10) / 10)


def test_times_follow_the_generator():
    """Draws from the global RNG, which a resumed run does not restore."""
    draw = lambda seed: sample_times(64, generator=seeded(seed), device="cpu")
    first = draw(3)
    torch.manual_seed(0)
    assert torch.equal(draw(3), first) and not torch.equal(draw(4), first)


@pytest.mark.parametrize("settings", [dict(low=0.5, high=0.5), dict(low=-0.1), dict(high=1.1), dict(shift=0.0),
                                      dict(shift=math.nan), dict(discrete_steps=-1), dict(low=math.nan)])
def test_sample_times_refuses(settings):
    """A range out of order clamps every level to one value without any error."""
    with pytest.raises(ValueError):
        sample_times(4, generator=seeded(), device="cpu", **settings)


def test_student_grids():
    """The published grids; a grid shifted twice, or one that ends before 0."""
    assert student_grid(4, 3.0) == [1.0, 0.9, 0.75, 0.5, 0.0]  # Qwen-Image
    assert student_grid(4, 5.0) == pytest.approx([1.0, 0.9375, 5 / 6, 0.625, 0.0], abs=1e-15)  # Self-Forcing
    assert student_grid(1, 3.0) == [1.0, 0.0]
    assert student_grid(4, 1.0) == [1.0, 0.75, 0.5, 0.25, 0.0]
    with pytest.raises(ValueError, match="num_steps"):
        student_grid(0, 1.0)


@pytest.mark.parametrize("shift", [1.0, 1.1, 3.0, 3.3, 8.0])
def test_shift_keeps_the_ends_and_composes(shift):
    """shift(m) after shift(n) is shift(m n); the ends are exact, or the first level of a grid is not pure noise."""
    assert shift_time(0.0, shift) == 0.0 and shift_time(1.0, shift) == 1.0
    s = torch.linspace(0, 1, 101, dtype=torch.float64)
    assert_near(shift_time(shift_time(s, shift), 2.0), shift_time(s, 2.0 * shift))
    assert_near(shift_time(shift_time(s, shift), 1.0 / shift), s)


# ---------------------------------------------------------------------------------------------------------------------
# Guidance


def test_guidance_conventions():
    """s and s' = s - 1 mixed up: the published 3.0 of c + s'(c - u) is 4.0 of u + s(c - u)."""
    c, u = randn(*SHAPE), randn(*SHAPE, seed=1)
    assert_near(guide(c, u, 4.0), c + 3.0 * (c - u))
    assert_near(guide(c, u, 0.0), u)
    assert guide(c, None, 1.0) is c and torch.equal(guide(c, u, 1.0, "layer_norm"), c)
    assert not torch.allclose(guide(c, u, 3.0), c + 3.0 * (c - u))


def test_guidance_is_the_same_in_every_space():
    """v-, eps- and x0-space are one affine map at a given state; a norm is not, so it has to follow the publication."""
    x0, noise, s = make_state()
    x_s = add_noise(x0, noise, s)
    c, u = randn(*SHAPE, seed=2), randn(*SHAPE, seed=3)
    in_v = x0_from_velocity(x_s, guide(c, u, 4.0), s)
    in_x0 = guide(x0_from_velocity(x_s, c, s), x0_from_velocity(x_s, u, s), 4.0)
    eps = guide(x_s + (1 - column(s)) * c, x_s + (1 - column(s)) * u, 4.0)
    in_eps = (x_s - column(s) * eps) / (1 - column(s))
    assert_near(in_v, in_x0)
    assert_near(in_v, in_eps)
    with_norm = guide(x0_from_velocity(x_s, c, s), x0_from_velocity(x_s, u, s), 4.0, "layer_norm")
    assert not torch.allclose(x0_from_velocity(x_s, guide(c, u, 4.0, "layer_norm"), s), with_norm, atol=1e-3)


def test_guidance_norms():
    """layer_norm gives back |c| at every position, scalar never enlarges, and neither looks at other samples."""
    c, u = randn(*SHAPE), randn(*SHAPE, seed=1)
    c[0] *= 10.0  # here guidance shortens: (c - u) is along c, and u + 0.5 (c - u) is shorter
    guided = guide(c, u, 4.0)
    normed = guide(c, u, 4.0, "layer_norm")
    assert_near(normed.norm(dim=-1), c.norm(dim=-1))
    assert_near(torch.cosine_similarity(normed, guided, dim=-1), torch.ones(SHAPE[:-1], dtype=torch.float64))
    for scale in (0.5, 4.0):
        guided, scalar = guide(c, u, scale), guide(c, u, scale, "scalar")
        for i in range(len(c)):
            assert_near(scalar[i], guided[i] * min(1.0, (c[i].norm() / guided[i].norm()).item()))
            assert_near(guide(c[i:i + 1], u[i:i + 1], scale, "scalar")[0], scalar[i])
    assert_near(guide(torch.zeros(2, 4), torch.ones(2, 4), 2.0, "layer_norm"), torch.zeros(2, 4))  # not NaN
    assert guide(c, c.zero_(), 2.0, "scalar").isfinite().all()


def test_guide_refuses():
    """A forgotten unconditional pass, a misspelt norm, and shapes that would broadcast."""
    c = randn(2, 4)
    with pytest.raises(ValueError, match="unconditional"):
        guide(c, None, 4.0)
    with pytest.raises(ValueError, match="choose none, layer_norm or scalar"):
        guide(c, c, 4.0, "layernorm")
    with pytest.raises(ValueError, match="must have shape"):
        guide(c, c[:1], 4.0)


# ---------------------------------------------------------------------------------------------------------------------
# Samplers


class Student(nn.Module):
    """A small nonlinear x0 predictor that remembers (input, s, grad mode) of every call."""

    def __init__(self, dim=5, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(dim + 1, 16), nn.Tanh(), nn.Linear(16, dim)).to(dtype)
        self.calls = []

    def forward(self, x, s):
        self.calls.append((x.clone(), s.clone(), torch.is_grad_enabled()))
        return self.net(torch.cat([x, s[:, None]], 1).to(self.net[0].weight.dtype))


def roll_out(student, *, mode, exit_step=None, num_steps=4, noise_index=lambda k: k, seed=11):
    """One roll-out under a fresh generator: the noise first, then one draw a step; `noise_index` plants mistakes."""
    generator = seeded(seed)
    noise = torch.randn(7, 5, generator=generator)
    drawn = {}

    def noise_at(k):
        while len(drawn) < noise_index(k):
            drawn[len(drawn) + 1] = torch.randn(7, 5, generator=generator)
        return drawn[noise_index(k)]

    student.calls.clear()
    return few_step_sample(student, noise, student_grid(num_steps, 3.0), mode=mode, noise_at=noise_at,
                           exit_step=exit_step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["sde", "ode"])
def test_training_inputs_are_the_sampler_s(mode, dtype):
    """Training on other states than inference visits (FastVideo, FastGen threads): equal bit for bit at every step."""
    student = Student(dtype=dtype)
    with torch.no_grad():
        sample = roll_out(student, mode=mode)
    inference = list(student.calls)
    assert len(inference) == 4 and torch.equal(inference[0][1], torch.ones(7))
    for exit_step in range(4):
        x0 = roll_out(student, mode=mode, exit_step=exit_step)
        assert len(student.calls) == exit_step + 1  # no prediction that nobody needs
        for (x, s, _), (x_inference, s_inference, _) in zip(student.calls, inference):
            assert torch.equal(x, x_inference) and torch.equal(s, s_inference) and not x.requires_grad
        assert [grad_enabled for *_, grad_enabled in student.calls] == [False] * exit_step + [True]
    assert torch.equal(x0, sample)


def test_noise_of_the_wrong_step_is_seen():
    """Negative control of the equality above: step k fed the noise of step k + 1."""
    student = Student()
    roll_out(student, mode="sde")
    right = [x for x, *_ in student.calls]
    roll_out(student, mode="sde", exit_step=3, noise_index=lambda k: k + 1)
    wrong = [x for x, *_ in student.calls]
    assert torch.equal(wrong[0], right[0]) and not any(torch.equal(a, b) for a, b in zip(wrong[1:], right[1:]))


@pytest.mark.parametrize("mode", ["sde", "ode"])
def test_gradient_is_that_of_the_exit_step_alone(mode):
    """Backpropagation through the simulated steps, or a graph lost because they run without one."""
    student = Student(dtype=torch.float64)
    roll_out(student, mode=mode, exit_step=2).square().sum().backward()
    actual = [p.grad.clone() for p in student.parameters()]
    x, s, _ = student.calls[-1]
    student.zero_grad()
    student(x, s).square().sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(actual, student.parameters()))
    assert all(g.abs().sum() > 0 for g in actual)


def test_states_are_the_definitions():
    """x_k written out: noise of step k at level k (sde), Euler with the predicted velocity (ode)."""
    grid, noise, fresh = student_grid(3, 5.0), randn(4, 2), {k: randn(4, 2, seed=k) for k in (1, 2)}
    predict = lambda x, s: torch.tanh(x) * s[:, None] + 0.3
    column_of = lambda s: torch.full((4,), s, dtype=torch.float64)
    for mode in ("sde", "ode"):
        x, states = noise, dict(few_step_states(predict, noise, grid, mode=mode, noise_at=fresh.__getitem__))
        assert list(states) == [0, 1, 2]
        for k in range(3):
            assert_near(states[k], x)
            x0 = predict(x, column_of(grid[k]))
            velocity = (x - x0) / grid[k]
            if k < 2:
                renoised = (1 - grid[k + 1]) * x0 + grid[k + 1] * fresh[k + 1]
                x = renoised if mode == "sde" else x + (grid[k + 1] - grid[k]) * velocity


def test_states_leave_the_grad_mode_alone():
    """A no_grad block around a yield turns gradients off in the consumer's own code."""
    for mode in ("sde", "ode"):
        states = few_step_states(lambda x, s: x, randn(2, 3), student_grid(3, 1.0), mode=mode,
                                 noise_at=lambda k: randn(2, 3, seed=k))
        assert [torch.is_grad_enabled() for _ in states] == [True] * 3
        next(few_step_states(lambda x, s: x, randn(2, 3), student_grid(3, 1.0), mode="ode"))  # abandoned half-way
        assert torch.is_grad_enabled()


def test_draws_follow_the_steps_that_are_taken():
    """Noise drawn for steps behind the exit: the generator would run ahead of a sampler that stops there."""
    asked = []
    few_step_sample(lambda x, s: x, randn(2, 3), student_grid(4, 1.0), exit_step=2,
                    noise_at=lambda k: asked.append(k) or randn(2, 3, seed=k))
    assert asked == [1, 2]
    few_step_sample(lambda x, s: x, randn(2, 3), student_grid(1, 1.0))  # one step draws nothing
    few_step_sample(lambda x, s: x, randn(2, 3), student_grid(4, 1.0), mode="ode")


def test_ode_mode_is_euler():
    """The few-step ode sampler and the teacher's Euler sampler, which are written apart, on one velocity field."""
    velocity = lambda x, s: torch.sin(x) * (1 + s[:, None])
    noise, grid = randn(9, 3), student_grid(6, 3.0)
    few = few_step_sample(lambda x, s: x0_from_velocity(x, velocity(x, s), s), noise, grid, mode="ode")
    assert_near(few, euler_sample(velocity, noise, grid))


def test_euler_converges_to_the_gaussian_map():
    """Wrong direction of time or sign: the exact ODE carries z to m + sd z; the error falls like 1 / steps."""
    m, sd = 1.5, 0.4

    def velocity(x, s):
        s = s[:, None]
        x0 = m + (1 - s) * sd ** 2 / ((1 - s) ** 2 * sd ** 2 + s ** 2) * (x - (1 - s) * m)
        return (x - x0) / s

    z = randn(64, 2).clamp(-2, 2)
    errors = [(euler_sample(velocity, z, student_grid(n, 1.0)) - (m + sd * z)).abs().max().item() for n in (50, 100)]
    assert errors[1] < 0.02 and errors[0] / errors[1] == pytest.approx(2.0, abs=0.2)
    assert euler_sample(velocity, z.bfloat16(), student_grid(4, 1.0)).dtype == torch.float32


@pytest.mark.parametrize("grid", [[1.0], [1.0, 0.5], [0.0, 1.0], [1.0, 0.5, 0.5, 0.0], [1.5, 0.0],
                                  [1.0, math.nan, 0.0]])
def test_samplers_refuse_a_bad_grid(grid):
    """A grid given in ascending order or that stops before 0 gives noise, without any error."""
    with pytest.raises(ValueError, match="grid"):
        euler_sample(lambda x, s: x, randn(2, 3), grid)
    with pytest.raises(ValueError, match="grid|exit_step"):
        few_step_sample(lambda x, s: x, randn(2, 3), grid, mode="ode")


def test_few_step_sample_refuses():
    """A misspelt mode, noise that is missing, an exit behind the last step."""
    for settings, message in ((dict(mode="euler"), "choose sde or ode"), (dict(), "noise_at"),
                              (dict(mode="ode", exit_step=3), "exit_step"),
                              (dict(mode="ode", exit_step=-1), "exit_step")):
        with pytest.raises(ValueError, match=message):
            few_step_sample(lambda x, s: x, randn(2, 3), student_grid(3, 1.0), **settings)
