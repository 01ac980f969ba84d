# SPDX-License-Identifier: Apache-2.0
"""The DMD losses against the closed form for Gaussians, their defining identities, and a student trained to the end."""
from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from distill_core.flow import (
    add_noise,
    few_step_sample,
    sample_times,
    student_grid,
    to_edm,
    to_vp,
    velocity_from_x0,
    vp_v_from_x0,
    x0_from_velocity,
)
from distill_core.losses_dmd import (
    dmd_gradient,
    dmd_surrogate,
    dmd_surrogate_per_sample,
    fake_loss_weight,
    fake_score_loss,
    fake_score_loss_per_sample,
    gan_discriminator_loss,
    gan_generator_losses,
    gradient_at,
    noise_bins,
    surrogate_per_sample,
    with_gradient,
)
from distill_core.phases import phase_at

SHAPE = (5, 3, 4, 4)


def randn(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def assert_near(actual, expected, atol=1e-12):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def make_predictions(dtype=torch.float64):
    """(x that requires grad, x0_real, x0_fake)."""
    x, real, fake = (randn(*SHAPE, seed=seed, dtype=dtype) for seed in range(3))
    return x.requires_grad_(), real, fake


# ---------------------------------------------------------------------------------------------------------------------
# Closed form


def gaussian_x0(x_s, s, mean, std):
    """E[x0 | x_s] for data N(mean, std^2); s broadcasts."""
    variance = (1 - s) ** 2 * std ** 2 + s ** 2
    return mean + (1 - s) * std ** 2 / variance * (x_s - (1 - s) * mean)


def normal_grid(num=24):
    """Nodes (z, noise) [num^2] and weights of two independent standard normals (Gauss-Hermite)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(num)
    z, noise = np.meshgrid(nodes, nodes)
    weight = np.outer(weights, weights) / weights.sum() ** 2
    return [torch.from_numpy(array.ravel().copy()) for array in (z, noise, weight)]


def student_gradient(b, a, *, m, std, s, swap=False, state=add_noise):
    """d/d(b, a) of the expected surrogate without Z, for the student x = b + a z in b's number of dims."""
    b, a = b.clone().requires_grad_(), a.clone().requires_grad_()
    z, noise, weight = normal_grid()
    x = b + a * z[:, None]
    x_s = state(x.detach(), noise[:, None].expand_as(x), torch.full_like(z, s))
    real, fake = gaussian_x0(x_s, s, m, std), gaussian_x0(x_s, s, b.detach(), a.detach())
    gradient = dmd_gradient(x, fake, real) if swap else dmd_gradient(x, real, fake)
    loss = (weight * surrogate_per_sample(x, gradient.g * gradient.normaliser_B[:, None])).sum()
    return torch.autograd.grad(loss, (b, a))


def closed_form(b, a, *, m, std, s):
    variance = lambda scale: (1 - s) ** 2 * scale ** 2 + s ** 2
    grad_b = (b - m) * s ** 2 / variance(std) / len(b)
    return grad_b, (1 - s) ** 2 * a * s ** 2 * (a ** 2 - std ** 2) / (variance(a) * variance(std))


@pytest.mark.parametrize("s", [0.1, 0.5, 0.9])
def test_gaussian_closed_form(s):
    """Any error of sign, conversion or weight in the path from sample to gradient: exact to quadrature in float64."""
    b, m = torch.tensor([0.7, -0.2, 1.5], dtype=torch.float64), torch.tensor([1.0, 0.4, -0.5], dtype=torch.float64)
    a, std = torch.tensor(1.3, dtype=torch.float64), 0.6
    expected = closed_form(b, a, m=m, std=std, s=s)
    for actual, wanted in zip(student_gradient(b, a, m=m, std=std, s=s), expected):
        assert_near(actual, wanted, atol=1e-10)
        assert wanted.abs().min() > 1e-4  # else the comparison would show nothing
    for grad in student_gradient(m, torch.tensor(std, dtype=torch.float64), m=m, std=std, s=s):
        assert_near(grad, torch.zeros_like(grad))  # at b = m, a = std

    # negative controls: swapped roles, and a noised sample whose level is not the one the denoisers are told
    swapped = student_gradient(b, a, m=m, std=std, s=s, swap=True)
    assert_near(swapped[0], -expected[0], atol=1e-10)
    shifted = student_gradient(b, a, m=m, std=std, s=s, state=lambda x, noise, s: add_noise(x, noise, 0.8 * s))
    assert (shifted[1] - expected[1]).abs() > 1e-4


# ---------------------------------------------------------------------------------------------------------------------
# Identities of the surrogate


def test_surrogate_is_half_the_mean_square_and_its_gradient_g_over_numel():
    """A missing 1/2, a sum for a mean, a gradient through the target."""
    x, real, fake = make_predictions()
    gradient = dmd_gradient(x, real, fake)
    loss = dmd_surrogate(x, real, fake)
    grad, = torch.autograd.grad(loss, x)
    assert_near(loss, 0.5 * gradient.g.square().mean())
    assert_near(grad, gradient.g / x.numel(), atol=1e-16)
    target = (x - gradient.g).detach()
    assert_near(loss, 0.5 * F.mse_loss(x, target))  # the published form
    assert not gradient.g.requires_grad and gradient.num_nonfinite == 0


def test_published_form_rounds_g_and_this_does_not():
    """x - (x - g) in fp32 keeps of a small g what the last bits of x allow; here value and gradient are exact."""
    x = (100.0 + randn(4, 64, dtype=torch.float32)).requires_grad_()
    g = 1e-5 * randn(4, 64, seed=1, dtype=torch.float32)
    loss = surrogate_per_sample(x, g)
    grad, = torch.autograd.grad(loss.mean(), x)
    torch.testing.assert_close(grad, g / x.numel(), rtol=1e-6, atol=0)
    torch.testing.assert_close(loss, 0.5 * g.square().mean(1), rtol=1e-6, atol=0)
    published, = torch.autograd.grad(0.5 * F.mse_loss(x, (x - g).detach()), x)
    assert (published - g / x.numel()).norm() > 0.1 * (g / x.numel()).norm()


def test_normaliser_is_per_sample_over_everything_else():
    """One Z for a batch (FastVideo), or one per channel: written out, and each sample alone gives the same."""
    x, real, fake = make_predictions()
    gradient = dmd_gradient(x, real, fake)
    for i in range(len(x)):
        z = (x[i] - real[i]).abs().mean()
        assert_near(gradient.normaliser_B[i], z)
        assert_near(gradient.g[i], (fake[i] - real[i]) / z)
        assert_near(dmd_gradient(x[i:i + 1], real[i:i + 1], fake[i:i + 1]).g[0], gradient.g[i])


def test_invariant_to_a_common_scale():
    """Z taken from other tensors than the difference's: scaling everything by 1000 must change nothing."""
    x, real, fake = make_predictions()
    for scale in (1e-3, 1.0, 1e3):
        scaled = dmd_gradient(scale * x, scale * real, scale * fake)
        assert_near(scaled.g, dmd_gradient(x, real, fake).g)
        assert_near(dmd_surrogate(scale * x, scale * real, scale * fake), dmd_surrogate(x, real, fake))


def test_normaliser_floor():
    """0 / 0 where the student already equals the teacher's prediction, and an eps that is added, not a floor."""
    x, real, fake = make_predictions()
    assert_near(dmd_gradient(x, real, fake, eps=0.1).g, dmd_gradient(x, real, fake, eps=0.0).g)
    gradient = dmd_gradient(real, real, real + 1.0, eps=1e-3)
    assert_near(gradient.normaliser_B, torch.full((5,), 1e-3, dtype=torch.float64))
    assert_near(gradient.g, torch.full(SHAPE, 1e3, dtype=torch.float64), atol=1e-9)
    assert dmd_surrogate(real, real, real) == 0.0


def test_other_normalisers():
    """One Z for a whole batch, and an eps that is added: written out, with an eps that counts. Control: they differ."""
    x, real, fake = make_predictions()
    whole = dmd_gradient(x, real, fake, normalizer="batch")
    assert_near(whole.g, (fake - real) / (x - real).abs().mean())
    assert_near(whole.normaliser_B, (x - real).abs().mean().detach().expand(5))
    assert_near(dmd_gradient(x, real, fake, 10.0, "batch").g, (fake - real) / 10.0)
    added = dmd_gradient(x, real, fake, 0.1, "sample_add")
    assert_near(added.g, (fake - real) / ((x - real).abs().mean((1, 2, 3), keepdim=True) + 0.1))
    default = dmd_gradient(x, real, fake, 0.1)
    assert torch.equal(default.g, dmd_gradient(x, real, fake, 0.1, "sample").g)
    for other in (whole, added):
        assert (other.g - default.g).abs().max() > 1e-3
    for i in range(5):  # what the others of a batch change
        alone = dmd_gradient(x[i:i + 1], real[i:i + 1], fake[i:i + 1], normalizer="batch").g[0]
        assert_near(alone, dmd_gradient(x, real, fake).g[i])
    with pytest.raises(ValueError, match="choose sample, sample_add or batch"):
        dmd_gradient(x, real, fake, 1e-6, "mean")


def test_per_sample_forms_sum_to_the_means():
    """Sample-weighted sums over ragged micro-batches must give the loss and the gradient of the whole batch."""
    x, real, fake = make_predictions()
    noise = randn(*SHAPE, seed=7)
    for per_sample, whole, arguments in ((dmd_surrogate_per_sample, dmd_surrogate, (x, real, fake)),
                                         (fake_score_loss_per_sample, fake_score_loss, (x, real, noise))):
        parts = [per_sample(*(tensor[rows] for tensor in arguments)) for rows in (slice(0, 2), slice(2, 5))]
        assert [part.shape for part in parts] == [(2,), (3,)]
        loss = sum(part.sum() for part in parts) / 5
        assert_near(loss, whole(*arguments))
        assert_near(*(torch.autograd.grad(value, x)[0] for value in (loss, whole(*arguments))), atol=1e-15)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_entries_are_counted_then_dropped(bad):
    """nan_to_num before the count, which then reads 0 for ever; or an inf that becomes 3e38 and wrecks the step."""
    x, real, fake = make_predictions()
    clean = dmd_gradient(x, real, fake).g
    fake[1, 0, 0, 0] = fake[3, 2, 1, 1] = bad
    gradient = dmd_gradient(x, real, fake)
    assert gradient.num_nonfinite == 2 and gradient.num_nonfinite.dtype == torch.int64
    assert gradient.g[1, 0, 0, 0] == gradient.g[3, 2, 1, 1] == 0.0
    clean[1, 0, 0, 0] = clean[3, 2, 1, 1] = 0.0
    assert torch.equal(gradient.g, clean)
    assert dmd_surrogate(x, real, fake).isfinite()

    real[2, 0, 0, 0] = math.nan  # spoils Z of its sample, and no other sample
    gradient = dmd_gradient(x, real, fake)
    assert gradient.num_nonfinite == 2 + x[0].numel()
    assert torch.equal(gradient.g[2], torch.zeros_like(clean[2])) and torch.equal(gradient.g[4], clean[4])


def test_nonfinite_student_shows_in_the_loss():
    """A student gone NaN must reach the step's verdict (skip), not be cleaned into a harmless zero."""
    x, real, fake = make_predictions()
    with torch.no_grad():
        x[1, 0, 0, 0] = math.nan
    assert torch.equal(dmd_surrogate_per_sample(x, real, fake).isnan(), torch.tensor([0, 1, 0, 0, 0]).bool())


def test_predictions_get_no_gradient():
    """A surrogate that also trains fake score or teacher through their predictions."""
    x, real, fake = make_predictions()
    real.requires_grad_(), fake.requires_grad_()
    dmd_surrogate(x, real, fake).backward()
    assert real.grad is None and fake.grad is None and x.grad is not None
    v, x0, noise = (randn(*SHAPE, seed=seed).requires_grad_() for seed in range(3))
    fake_score_loss(v, x0, noise).backward()
    assert x0.grad is None and noise.grad is None and v.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_precision(dtype):
    """Losses computed in bf16, where a mean of squares is off by percents; float64 must not be cut to fp32."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    atol = 1e-14 if dtype == torch.float64 else 1e-6
    x, real, fake = make_predictions(dtype)
    exact = (x.double(), real.double(), fake.double())
    for loss_fn in (dmd_surrogate, dmd_surrogate_per_sample, fake_score_loss, fake_score_loss_per_sample):
        loss = loss_fn(x, real, fake)
        assert loss.dtype == wide
        assert_near(loss.double(), loss_fn(*exact), atol)
    gradient = dmd_gradient(x, real, fake)
    assert gradient.g.dtype == gradient.normaliser_B.dtype == wide
    grad, = torch.autograd.grad(dmd_surrogate(x, real, fake), x)
    assert grad.dtype == dtype
    assert_near(grad, (gradient.g / x.numel()).to(dtype), atol=1e-9)
    logits = x.detach()[:, 0, 0, 0]
    assert gan_generator_losses(logits).dtype == gan_discriminator_loss(logits, logits).dtype == wide


def test_refuses_shapes_that_would_broadcast():
    """[B, 1] beside [B, D] broadcasts into a plausible loss."""
    x, real, fake = make_predictions()
    for arguments, name in (((x, real[:, :1], fake), "x0_real"), ((x, real, fake[:1]), "x0_fake")):
        with pytest.raises(ValueError, match=f"{name} must have shape"):
            dmd_surrogate(*arguments)
    with pytest.raises(ValueError, match="noise must have shape"):
        fake_score_loss(x, real, fake[:, :1])
    with pytest.raises(ValueError, match="g must have shape"):
        surrogate_per_sample(x, real[:1])
    with pytest.raises(ValueError, match="at least two dims"):
        dmd_surrogate(x[0, 0, 0], real[0, 0, 0], fake[0, 0, 0])
    for eps in (-1.0, math.nan):
        with pytest.raises(ValueError, match="eps"):
            dmd_gradient(x, real, fake, eps)


# ---------------------------------------------------------------------------------------------------------------------
# Fake score and discriminator


def test_fake_loss_is_zero_at_the_true_velocity_only():
    """The target noise instead of noise - x0 (a reported bug), or x0 - noise (SiT's sign)."""
    x0, noise = randn(*SHAPE), randn(*SHAPE, seed=1)
    assert fake_score_loss(noise - x0, x0, noise) == 0.0
    assert_near(fake_score_loss(noise, x0, noise), x0.square().mean())
    assert fake_score_loss(x0 - noise, x0, noise) > 1.0


def test_fake_loss_in_x0_and_noise_form():
    """(v - (noise - x0))^2 s^2 = (x0_hat - x0)^2 and times (1 - s)^2 the error of the noise: weights of other codes."""
    x0, noise, v = randn(*SHAPE), randn(*SHAPE, seed=1), randn(*SHAPE, seed=2)
    s = torch.linspace(0.1, 0.9, 5, dtype=torch.float64)
    x_s = add_noise(x0, noise, s)
    loss = fake_score_loss_per_sample(v, x0, noise)
    assert_near(s ** 2 * loss, (x0_from_velocity(x_s, v, s) - x0).square().mean((1, 2, 3)))
    noise_hat = x_s + (1 - s.view(-1, 1, 1, 1)) * v
    assert_near((1 - s) ** 2 * loss, (noise_hat - noise).square().mean((1, 2, 3)))
    assert_near(fake_loss_weight(s, "x0"), s ** 2)
    assert_near(fake_loss_weight(s, "eps"), (1 - s) ** 2)
    assert_near(fake_loss_weight(s, "flow"), torch.ones(5, dtype=torch.float64))


def test_fake_loss_in_edm_and_vp_form():
    """The other weights, by the conversions of flow.py that networks of those families pass through."""
    x0, noise, v = randn(*SHAPE), randn(*SHAPE, seed=1), randn(*SHAPE, seed=2)
    s = torch.linspace(0.1, 0.9, 5, dtype=torch.float64)
    x_s = add_noise(x0, noise, s)
    x0_hat = x0_from_velocity(x_s, v, s)
    loss = fake_score_loss_per_sample(v, x0, noise)
    _, sigma = to_edm(x_s, s)
    assert_near(fake_loss_weight(s, "edm") * loss, ((sigma ** -2 + 4) * (x0_hat - x0) ** 2).mean((1, 2, 3)), atol=1e-10)
    x_t, alpha, sigma = to_vp(x_s, s)
    v_hat, v_true = (vp_v_from_x0(x_t, x, alpha=alpha, sigma=sigma) for x in (x0_hat, x0))
    assert_near(v_true, alpha * noise - sigma * x0)
    assert_near(fake_loss_weight(s, "vp_v") * loss, (v_hat - v_true).square().mean((1, 2, 3)))


@pytest.mark.parametrize("form, at_data, at_noise", [("flow", 1, 1), ("x0", 0, 1), ("eps", 1, 0), ("edm", 1, 4),
                                                     ("vp_v", 1, 1)])
def test_fake_loss_weights_at_the_ends(form, at_data, at_noise):
    """0 / 0 or an overflow where s is 0 or 1, or within bf16's reach of them."""
    ends = torch.tensor([0.0, 1e-30, 1.0])
    assert fake_loss_weight(ends, form).tolist() == [at_data, at_data, at_noise]
    assert fake_loss_weight(ends.bfloat16(), form).dtype == torch.float32
    with pytest.raises(ValueError, match="choose flow, x0, eps, edm or vp_v"):
        fake_loss_weight(ends, "v")


def test_gan_terms():
    """Real and generated mixed up, or the saturating generator loss: against logistic loss with labels."""
    real, fake = randn(8), randn(5, seed=1).requires_grad_()
    ones, zeros = torch.ones(8, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    logistic = F.binary_cross_entropy_with_logits
    assert_near(gan_discriminator_loss(real, fake), logistic(real, ones) + logistic(fake, zeros))
    assert_near(gan_generator_losses(fake).mean(), logistic(fake, ones[:5]))
    grad, = torch.autograd.grad(gan_generator_losses(fake).mean(), fake)
    assert (grad < 0).all()  # descending raises D(generated)
    assert gan_generator_losses(torch.tensor([-1e4])).isfinite()


# ---------------------------------------------------------------------------------------------------------------------
# Diagnostics


def test_noise_bins():
    """Values lost at the clamped ends, a level on an edge counted twice, means of means over micro-batches."""
    s = torch.tensor([0.02, 0.25, 0.3, 0.5, 0.98, 1.0, 0.1])
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    bins = noise_bins(values, s, (0.05, 0.25, 0.5, 0.9))
    assert bins.sums.tolist() == [8.0, 5.0, 15.0] and bins.counts.tolist() == [2, 2, 3]
    parts = [noise_bins(values[rows], s[rows], (0.05, 0.25, 0.5, 0.9)) for rows in (slice(0, 3), slice(3, 7))]
    assert torch.equal(parts[0].sums + parts[1].sums, bins.sums)
    assert torch.equal(parts[0].counts + parts[1].counts, bins.counts)

    values[0] = math.nan  # shows in its own bin, and only there
    assert noise_bins(values, s, (0.0, 0.2, 1.0)).sums.isnan().tolist() == [True, False]
    s, values = torch.rand(1000, dtype=torch.float64), randn(1000)
    edges = [0.0, 0.1, 0.35, 0.8, 1.0]
    expected, _ = np.histogram(s, edges, weights=values)
    assert_near(noise_bins(values, s, edges).sums, torch.from_numpy(expected))


@pytest.mark.parametrize("edges", [(0.5,), (0.0, 0.5, 0.5), (1.0, 0.0)])
def test_noise_bins_refuses(edges):
    """Edges out of order give empty bins."""
    with pytest.raises(ValueError, match="edges"):
        noise_bins(torch.ones(3), torch.ones(3), edges)


# ---------------------------------------------------------------------------------------------------------------------
# A whole distillation with an analytic teacher


MEAN, STD = torch.tensor([1.5, -0.5], dtype=torch.float64), 0.6


def antithetic(num, generator):
    """(z, noise) [num, 2]: pairs and their negatives, so that means are exact."""
    half = torch.randn(2, num // 2, 2, generator=generator, dtype=torch.float64)
    return torch.cat([half, -half], 1)


def distil(*, num_cycles=150, ratio=2, seed=0, student_loss=dmd_surrogate, fake_loss=fake_score_loss):
    """(b, a) of the one-step student x = b + a z, trained towards N(MEAN, STD^2) with a trained Gaussian fake score."""
    generator = torch.Generator().manual_seed(seed)
    student, fake = ([torch.zeros(2, dtype=torch.float64).requires_grad_(),
                      torch.ones((), dtype=torch.float64).requires_grad_()] for _ in range(2))  # mean and std
    optimizers = {role: torch.optim.Adam(parameters, betas=(0.5, 0.99))
                  for role, parameters in (("student", student), ("fake_score", fake))}
    for attempt in range(num_cycles * (1 + ratio)):
        role, cycle, _ = phase_at(attempt, ratio)
        z, noise = antithetic(2048, generator)
        s = sample_times(2048, generator=generator, device="cpu", discrete_steps=0).double()
        with torch.set_grad_enabled(role == "student"):
            x = few_step_sample(lambda z, s: student[0] + student[1] * z, z, student_grid(1, 1.0))
        x_s = add_noise(x.detach(), noise, s)
        fake_x0 = gaussian_x0(x_s, s[:, None], *fake)
        if role == "student":
            loss = student_loss(x, gaussian_x0(x_s, s[:, None], MEAN, STD), fake_x0)
        else:
            loss = fake_loss(velocity_from_x0(x_s, fake_x0, s), x, noise)
        optimizer = optimizers[role]
        optimizer.param_groups[0]["lr"] = {"student": 0.1, "fake_score": 0.15}[role] * (1.0 - cycle / num_cycles) ** 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return student[0].detach(), student[1].detach()


def relative_error(b, a):
    return max(((b - MEAN).abs().max() / STD).item(), (a.abs() / STD - 1).abs().item())


def test_student_reaches_the_teacher():
    """The losses, conversions, times and phases together: mean and std of the student within 1 % of the true std."""
    assert relative_error(*distil()) < 0.01


@pytest.mark.parametrize("broken", [
    dict(student_loss=lambda x, real, fake: surrogate_per_sample(x, -dmd_gradient(x, real, fake).g).mean()),
    dict(student_loss=lambda x, real, fake: dmd_surrogate(x, fake, real)),
    dict(fake_loss=lambda v, x0, noise: fake_score_loss(v, torch.zeros_like(x0), noise)),
    dict(fake_loss=lambda v, x0, noise: fake_score_loss(v, x0, noise.roll(1, 0))),
    dict(fake_loss=lambda v, x0, noise: 0.0 * fake_score_loss(v, x0, noise)),
], ids=["wrong_sign", "swapped_roles", "eps_target", "noise_of_another_sample", "fake_never_trained"])
def test_broken_distillations_fail_the_same_check(broken):
    """Negative controls: the check above sees each of these mistakes, by a wide margin and in half the time."""
    assert not relative_error(*distil(num_cycles=60, **broken)) < 0.3  # the healthy run is at 0.07 by then


def test_a_gradient_taken_at_an_input_is_that_of_autograd():
    """Catches a detour that loses or scales the gradient, and one that leaves gradients in the network it passes."""
    generator = torch.Generator().manual_seed(3)
    net = torch.nn.Linear(5, 1).double()
    base = torch.randn(4, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(4, generator=generator, dtype=torch.float64)

    def losses_of(x):
        return gan_generator_losses(net(x.sin())[:, 0])

    x = base * 2
    losses, gradient = gradient_at(x, losses_of)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert not losses.requires_grad and not gradient.requires_grad
    (with_gradient(losses, gradient, x) * weights).sum().backward()
    assert all(parameter.grad is None for parameter in net.parameters())
    taken, base.grad = base.grad, None
    direct = losses_of(base * 2)
    assert torch.equal(direct, losses)
    (direct * weights).sum().backward()
    assert torch.allclose(taken, base.grad, rtol=1e-12)
    with torch.no_grad():  # also where the caller has switched gradients off
        assert torch.equal(gradient_at(x, losses_of)[1], gradient)
