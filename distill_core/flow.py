# SPDX-License-Identifier: Apache-2.0
"""The flow path between data and noise: conversions, score times, guidance, and samplers of many and of few steps.

    path        x_s = (1 - s) x0 + s noise, s = 0 data, s = 1 noise (rectified flow; SiT's own time is 1 - s)
    velocity    v = noise - x0, hence x0 = x_s - s v and noise = x_s + (1 - s) v

Networks of other families live on the same path: `to_vp` and `to_edm` rescale a state x_s for them, and
`x0_from_vp_eps`, `x0_from_vp_v` and `x0_from_edm` read their outputs. Results are fp32 whatever the inputs (float64 is
kept): at s near 0 or 1 the differences taken here have no digits left in bf16.

Shapes: B batch, x [B, ...], noise levels s, alpha, sigma [B] or [B, 1, ..., 1], S steps of a few-step student.

    s = score_times(u_B, shift=3.0)                                # u_B uniform in (0, 1]
    x_s = add_noise(x0, noise, s)
    v = guide(net(x_s, s, labels), net(x_s, s, null), scale=4.0)
    x0_real = x0_from_velocity(x_s, v, s)
    images = few_step_sample(predict_x0, noise, student_grid(4, shift=3.0), mode="ode")
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise

import torch
from torch import Tensor

# ---------------------------------------------------------------------------------------------------------------------
# The path and its conversions


def add_noise(x0: Tensor, noise: Tensor, s: Tensor) -> Tensor:
    """x_s = (1 - s) x0 + s noise."""
    x0, noise, s = _aligned([x0, noise], [s])
    return (1.0 - s) * x0 + s * noise


def x0_from_velocity(x_s: Tensor, v: Tensor, s: Tensor) -> Tensor:
    """x0 = x_s - s v."""
    x_s, v, s = _aligned([x_s, v], [s])
    return x_s - s * v


def velocity_from_x0(x_s: Tensor, x0: Tensor, s: Tensor) -> Tensor:
    """v = (x_s - x0) / s, for s > 0 (at s = 0 the state does not tell the velocity)."""
    x_s, x0, s = _aligned([x_s, x0], [s])
    return (x_s - x0) / s


def to_vp(x_s: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(x_t, alpha, sigma): the same sample and noise as alpha x0 + sigma noise with alpha^2 + sigma^2 = 1.

    alpha and sigma are [B, 1, ..., 1]. The network's own time index is the one whose sigma / alpha is s / (1 - s).
    """
    x_s, s = _aligned([x_s], [s])
    norm = torch.hypot(1.0 - s, s)
    return x_s / norm, (1.0 - s) / norm, s / norm


def x0_from_vp_eps(x_t: Tensor, eps: Tensor, *, alpha: Tensor, sigma: Tensor) -> Tensor:
    """x0 = (x_t - sigma eps) / alpha of a noise prediction, for alpha > 0."""
    x_t, eps, alpha, sigma = _aligned([x_t, eps], [alpha, sigma])
    return (x_t - sigma * eps) / alpha


def vp_eps_from_x0(x_t: Tensor, x0: Tensor, *, alpha: Tensor, sigma: Tensor) -> Tensor:
    """eps = (x_t - alpha x0) / sigma, for sigma > 0."""
    x_t, x0, alpha, sigma = _aligned([x_t, x0], [alpha, sigma])
    return (x_t - alpha * x0) / sigma


def x0_from_vp_v(x_t: Tensor, v: Tensor, *, alpha: Tensor, sigma: Tensor) -> Tensor:
    """x0 = alpha x_t - sigma v of a v-prediction v = alpha eps - sigma x0 (not the flow velocity). arXiv 2202.00512."""
    x_t, v, alpha, sigma = _aligned([x_t, v], [alpha, sigma])
    return alpha * x_t - sigma * v


def vp_v_from_x0(x_t: Tensor, x0: Tensor, *, alpha: Tensor, sigma: Tensor) -> Tensor:
    """v = (alpha x_t - x0) / sigma, for sigma > 0."""
    x_t, x0, alpha, sigma = _aligned([x_t, x0], [alpha, sigma])
    return (alpha * x_t - x0) / sigma


def to_edm(x_s: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """(x_t, sigma): the same sample and noise as x0 + sigma noise, sigma = s / (1 - s) [B, 1, ..., 1], for s < 1."""
    x_s, s = _aligned([x_s], [s])
    return x_s / (1.0 - s), s / (1.0 - s)


def x0_from_edm(x_t: Tensor, raw: Tensor, *, sigma: Tensor, sigma_data: float = 0.5) -> Tensor:
    """x0 = c_skip x_t + c_out raw: EDM's preconditioning of a bare network. arXiv 2206.00364, table 1.

    A network that comes wrapped in its preconditioning returns x0 already.
    """
    x_t, raw, sigma = _aligned([x_t, raw], [sigma])
    c_skip, c_out = _edm_scales(sigma, sigma_data)
    return c_skip * x_t + c_out * raw


def edm_from_x0(x_t: Tensor, x0: Tensor, *, sigma: Tensor, sigma_data: float = 0.5) -> Tensor:
    """raw = (x0 - c_skip x_t) / c_out, for sigma > 0."""
    x_t, x0, sigma = _aligned([x_t, x0], [sigma])
    c_skip, c_out = _edm_scales(sigma, sigma_data)
    return (x0 - c_skip * x_t) / c_out


# ---------------------------------------------------------------------------------------------------------------------
# Times


def shift_time(s: float | Tensor, shift: float) -> float | Tensor:
    """shift s / (1 + (shift - 1) s): towards noise for shift > 1, with 0 and 1 where they were."""
    if not shift > 0.0:
        raise ValueError(f"shift must be positive, got {shift}")
    return shift * s / (1.0 + (shift - 1.0) * s)


def score_times(u_B: Tensor, *, law: str = "clamp", discrete_steps: int = 1000, shift: float = 1.0, low: float = 0.02,
                high: float = 0.98) -> Tensor:
    """Noise levels [B] in fp32 of a score loss, from numbers uniform in (0, 1].

    law, with T = discrete_steps (0: the continuum):
    "clamp": uniform on 0, 1/T ... (T - 1)/T, shifted, clamped to [low, high] (CausVid, Self-Forcing, verl-omni). The
        clamp gathers what lies outside: at shift 5 and the default range 9 % of all levels are exactly `high`.
    "ceil": the same on 1/T ... 1 (LightX2V).
    "inside": uniform on the k/T in [low, high], shifted, clamped. Without a shift none is gathered (DMD2's
        randint(20, 981)); FastGen's with one.
    """
    if not 0.0 <= low < high <= 1.0:
        raise ValueError(f"low and high must satisfy 0 <= low < high <= 1, got {low} and {high}")
    if discrete_steps < 0:
        raise ValueError(f"discrete_steps must be 0 (continuous) or positive, got {discrete_steps}")
    if law not in ("clamp", "inside", "ceil"):
        raise ValueError(f"law {law!r}: choose clamp, inside or ceil")
    if discrete_steps == 0:
        s = low + (high - low) * u_B if law == "inside" else u_B
    else:
        first, last = {"clamp": (0, discrete_steps - 1), "ceil": (1, discrete_steps),
                       "inside": (math.ceil(low * discrete_steps), math.floor(high * discrete_steps))}[law]
        if first > last:
            raise ValueError(f"law inside: no k / {discrete_steps} lies in [{low}, {high}]")
        s = (first + (u_B * (last - first + 1)).ceil() - 1.0) / discrete_steps
    return shift_time(s.float(), shift).clamp(low, high)


def sample_times(num: int, *, generator: torch.Generator, device: torch.device | str, discrete_steps: int = 1000,
                 shift: float = 1.0, low: float = 0.02, high: float = 0.98) -> Tensor:
    """Noise levels [num] in fp32, one per sample: `score_times` by the law "clamp".

    Drawn on the generator's own device, so that a CPU generator gives the same levels on any device.
    """
    u_B = 1.0 - torch.rand(num, generator=generator, device=generator.device)
    return score_times(u_B, discrete_steps=discrete_steps, shift=shift, low=low, high=high).to(device)


def student_grid(num_steps: int, shift: float) -> list[float]:
    """The noise levels of a few-step student, 1 ... 0, num_steps + 1 of them: evenly spaced, then shifted."""
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}")
    return [shift_time(1.0 - step / num_steps, shift) for step in range(num_steps + 1)]


# ---------------------------------------------------------------------------------------------------------------------
# Guidance


def guide(conditional: Tensor, unconditional: Tensor | None, scale: float, norm: str = "none") -> Tensor:
    """Classifier-free guidance u + scale (c - u); scale 1 is no guidance and needs no second pass (None).

    Two conventions are published. This one (DMD2, rCM, LightX2V, verl-omni; FastGen writes it c + (scale - 1)(c - u))
    and c + scale' (c - u) (CausVid, Self-Forcing): scale = scale' + 1, so that Self-Forcing's 3.0 is 4.0 here.
    Without `norm` it is the same whether applied to v, eps or x0. `norm` scales the result back towards |c|, which is
    not: "layer_norm" to |c| over the last dim, which must be the channels; "scalar" at most to |c| over each sample
    (the published code takes one ratio for a whole micro-batch, usually of one sample).
    """
    conditional = conditional.to(_wide_dtype(conditional))
    if scale == 1.0:
        return conditional
    if unconditional is None:
        raise ValueError(f"guidance scale {scale} needs an unconditional prediction (only 1 does not)")
    if unconditional.shape != conditional.shape:
        raise ValueError(f"unconditional must have shape {tuple(conditional.shape)}, got {tuple(unconditional.shape)}")
    unconditional = unconditional.to(conditional.dtype)
    guided = unconditional + scale * (conditional - unconditional)
    if norm == "none":
        return guided
    if norm == "layer_norm":
        return guided * _norm_ratio(conditional, guided, dims=(-1,))
    if norm == "scalar":
        return guided * _norm_ratio(conditional, guided, dims=tuple(range(1, guided.dim()))).clamp_max(1.0)
    raise ValueError(f"norm {norm!r}: choose none, layer_norm or scalar")


# ---------------------------------------------------------------------------------------------------------------------
# Samplers


@torch.no_grad()
def euler_sample(velocity: Callable[[Tensor, Tensor], Tensor], noise: Tensor, grid: Sequence[float]) -> Tensor:
    """Samples [B, ...] by Euler steps of dx/ds = velocity(x, s) along a descending grid; s comes as [B]."""
    _check_grid(grid)
    x = noise.to(_wide_dtype(noise))
    for s, s_next in pairwise(grid):
        x = x + (s_next - s) * velocity(x, _level(x, s))
    return x


@torch.no_grad()
def few_step_states(predict_x0: Callable[[Tensor, Tensor], Tensor], noise: Tensor, grid: Sequence[float], *,
                    mode: str = "sde", noise_at: Callable[[int], Tensor] | None = None) -> Iterator[tuple[int, Tensor]]:
    """Yields (k, x_k), k = 0 ... S - 1: what a few-step student is given at noise level grid[k]; x_0 is the noise.

    mode: "sde" noises the predicted x0 to the next level with fresh noise, noise_at(k) for x_k, k >= 1 (DMD2,
    Self-Forcing); "ode" takes an Euler step along the predicted velocity and draws nothing. Each state is computed when
    it is asked for, without gradients (the caller's grad mode is untouched): a consumer that stops at x_k has paid for
    k predictions and drawn the noises of steps 1 ... k only.
    """
    _check_grid(grid)
    if mode not in ("sde", "ode"):
        raise ValueError(f"mode {mode!r}: choose sde or ode")
    if mode == "sde" and noise_at is None and len(grid) > 2:
        raise ValueError("mode sde with more than one step needs noise_at")
    x = noise.to(_wide_dtype(noise))
    yield 0, x
    for k in range(1, len(grid) - 1):
        s, s_next = _level(x, grid[k - 1]), _level(x, grid[k])
        x0 = predict_x0(x, s)
        if mode == "sde":
            x = add_noise(x0, noise_at(k), s_next)
        else:
            x = x + (grid[k] - grid[k - 1]) * velocity_from_x0(x, x0, s)
        yield k, x


def few_step_sample(predict_x0: Callable[[Tensor, Tensor], Tensor], noise: Tensor, grid: Sequence[float], *,
                    mode: str = "sde", noise_at: Callable[[int], Tensor] | None = None,
                    exit_step: int | None = None) -> Tensor:
    """The x0 [B, ...] that the student predicts at step `exit_step` (default: the last, whose x0 is the sample).

    Gradients, where the caller has them enabled, flow through that prediction alone (backward simulation of DMD2,
    arXiv 2405.14867). Sampling and training are this one function: at equal noises the input of step k is
    the same, bit for bit, however far the roll-out goes on. predict_x0(x, s): s is [B].
    """
    num_steps = len(grid) - 1
    exit_step = num_steps - 1 if exit_step is None else exit_step
    if not 0 <= exit_step < num_steps:
        raise ValueError(f"exit_step must lie in 0 ... {num_steps - 1}, got {exit_step}")
    states = few_step_states(predict_x0, noise, grid, mode=mode, noise_at=noise_at)
    _, x = next(islice(states, exit_step, None))
    return predict_x0(x, _level(x, grid[exit_step]))


# ---------------------------------------------------------------------------------------------------------------------
# Pieces


def _wide_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any tensor is float64, else float32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def _aligned(tensors: list[Tensor], levels: list[Tensor]) -> list[Tensor]:
    """All in one dtype of at least fp32, levels as [B, 1, ..., 1]; broadcasting beyond that would hide a mistake."""
    shape, dtype = tensors[0].shape, _wide_dtype(*tensors, *levels)
    column = shape[:1] + (1,) * (len(shape) - 1)
    if any(tensor.shape != shape for tensor in tensors):
        raise ValueError(f"both tensors must have one shape, got {[tuple(tensor.shape) for tensor in tensors]}")
    for level in levels:
        if level.shape not in (shape[:1], column):
            raise ValueError(f"a noise level must be [B] or [B, 1, ..., 1] beside x of shape {tuple(shape)}, got "
                             f"{tuple(level.shape)}")
    return [tensor.to(dtype) for tensor in tensors] + [level.to(dtype).reshape(column) for level in levels]


def _level(x: Tensor, s: float) -> Tensor:
    return torch.full((len(x),), s, dtype=x.dtype, device=x.device)


def _edm_scales(sigma: Tensor, sigma_data: float) -> tuple[Tensor, Tensor]:
    variance = sigma.square() + sigma_data ** 2
    return sigma_data ** 2 / variance, sigma * sigma_data / variance.sqrt()


def _norm_ratio(conditional: Tensor, guided: Tensor, *, dims: tuple[int, ...]) -> Tensor:
    norm = torch.linalg.vector_norm
    return norm(conditional, dim=dims, keepdim=True) / norm(guided, dim=dims, keepdim=True).clamp_min(1e-12)


def _check_grid(grid: Sequence[float]) -> None:
    descending = all(s > s_next for s, s_next in pairwise(grid))
    if len(grid) < 2 or not descending or not grid[0] <= 1.0 or grid[-1] != 0.0:
        raise ValueError(f"a grid descends from at most 1 to 0, got {list(grid)}")
