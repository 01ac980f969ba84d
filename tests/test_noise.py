# SPDX-License-Identifier: Apache-2.0
"""noise.py: its integers against pure Python, its laws against closed forms, independence by correlation."""
from __future__ import annotations

import math
import zlib

import pytest
import torch
from torch import Tensor

from distill_core import noise
from distill_core.noise import normal, uniform

AT = dict(seed=3, stream="rollout 0", step=17)
GOLDEN = ["0xf9566576332953f8", "0x41f5a0a6b253c74a"]  # keys of the samples 0 and 1 at AT


# ---------------------------------------------------------------------------------------------------------------------
# The integers

WORD = (1 << 64) - 1


def mix(x: int) -> int:
    """splitmix64's finaliser on Python's integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
    return x ^ (x >> 31)


def key_of(sample_id: int, seed: int, stream: str, step: int) -> int:
    state = 0
    for word in (seed, zlib.crc32(stream.encode()), step, sample_id):
        state = mix((state ^ word & WORD) + 0x9E3779B97F4A7C15 & WORD)
    return state


def unsigned(bits: Tensor) -> list[int]:
    return [value & WORD for value in bits.flatten().tolist()]


def test_python_reference_is_splitmix64():
    """Catches a wrong constant or shift in the reference above: published outputs of splitmix64 with seed 1234567."""
    outputs = [mix(1234567 + 0x9E3779B97F4A7C15 * n & WORD) for n in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize(("seed", "stream", "step"), [(0, "", 0), (3, "rollout 0", 17), (-1, "x", 1),
                                                      (2**63 + 5, "score time", 2**40)])
def test_keys_are_those_of_pure_python(seed, stream, step):
    """Catches a sign bit copied by a right shift and a product that is not modulo 2^64."""
    ids = [0, 1, 2, 3, 1000, 2**31, 2**40 + 1, 2**62]
    keys = unsigned(noise._keys(torch.tensor(ids), seed, stream, step))
    assert keys == [key_of(sample_id, seed, stream, step) for sample_id in ids]


@pytest.mark.parametrize("size", [4, 5])
def test_numbers_are_those_of_pure_python(size):
    """Catches a change of any number, which would break the resume of every older run; half is cos, half is sin."""
    ids = [0, 5, 123_456_789]
    keys = [key_of(sample_id, **AT) for sample_id in ids]
    assert uniform(torch.tensor(ids), **AT).tolist() == pytest.approx([((key >> 32) + 0.5) / 2**32 for key in keys],
                                                                      abs=2.0**-23)
    for key, row in zip(keys, normal((size,), torch.tensor(ids), **AT).tolist(), strict=True):
        bits = [mix((key ^ pair) + 0x9E3779B97F4A7C15 & WORD) for pair in range((size + 1) // 2)]
        radii = [math.sqrt(-2 * math.log(((word >> 32) + 0.5) / 2**32)) for word in bits]
        angles = [2 * math.pi * ((word & 0xFFFFFFFF) + 0.5) / 2**32 for word in bits]
        both = [r * math.cos(a) for r, a in zip(radii, angles, strict=True)] + [
            r * math.sin(a) for r, a in zip(radii, angles, strict=True)]
        assert row == pytest.approx(both[:size], abs=3e-6)


def test_golden_integers():
    """Catches a change that reached the reference above as well."""
    assert [hex(key_of(sample_id, **AT)) for sample_id in (0, 1)] == GOLDEN
    assert [hex(key) for key in unsigned(noise._keys(torch.tensor([0, 1]), *AT.values()))] == GOLDEN


# ---------------------------------------------------------------------------------------------------------------------
# What a number depends on

@pytest.mark.parametrize("shape", [(), (1,), (2,), (3,), (1, 7, 3), (4, 8, 8)])
def test_cut_and_order_of_the_batch_do_not_matter(shape):
    """Catches numbers that depend on the place in the batch: ranks and micro-batches would change the training."""
    ids = torch.tensor([7, 3, 900, 0, 2**40, 12])
    whole, whole_u = normal(shape, ids, **AT), uniform(ids, **AT)
    assert whole.shape == (6, *shape) and whole.dtype == torch.float32
    assert whole_u.shape == (6,) and whole_u.dtype == torch.float32
    for cut in (1, 2, 4):
        pieces = [(normal(shape, part, **AT), uniform(part, **AT)) for part in ids.split(cut)]
        assert torch.equal(torch.cat([x for x, _ in pieces]), whole)
        assert torch.equal(torch.cat([u for _, u in pieces]), whole_u)
    order = torch.tensor([5, 2, 0, 1, 4, 3])
    assert torch.equal(normal(shape, ids[order], **AT), whole[order])
    assert torch.equal(uniform(ids[order], **AT), whole_u[order])


def test_calls_leave_and_take_no_state():
    """Catches use of torch's generator: another draw in between would change what follows."""
    ids, before = torch.arange(4), torch.get_rng_state()
    first = normal((3,), ids, **AT)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(normal((3,), ids, **AT), first)


def test_empty_batches_and_samples():
    """Catches a rank without samples that fails."""
    nothing = torch.empty(0, dtype=torch.int64)
    assert normal((2, 3), nothing, **AT).shape == (0, 2, 3) and uniform(nothing, **AT).shape == (0,)


def same_share(a: Tensor, b: Tensor) -> float:
    return float((a == b).double().mean())


@pytest.mark.parametrize("other", [dict(seed=4), dict(seed=2**32 + 3), dict(stream="rollout 1"), dict(stream="rollout"),
                                   dict(step=18), dict(step=16), dict(step=17 + 2**32)])
def test_every_key_counts(other):
    """Catches a key that is left out or cut to 32 bits; and correlation between neighbours (5 sigma)."""
    ids = torch.arange(2000)
    a, b = normal((50,), ids, **AT).double(), normal((50,), ids, **{**AT, **other}).double()
    assert same_share(a, b) < 1e-4
    assert abs(float((a * b).mean())) < 5 / math.sqrt(a.numel())
    assert abs(float((uniform(ids, **AT) - 0.5) @ (uniform(ids, **{**AT, **other}) - 0.5)) * 12) < 5 * math.sqrt(2000)


def test_seed_stream_and_step_are_not_interchangeable():
    """Catches keys that are added up, where seed 1 at step 0 repeats seed 0 at step 1."""
    ids = torch.arange(100)
    draws = [uniform(ids + shift, seed=seed, stream="x", step=step)
             for seed, step, shift in [(0, 1, 0), (1, 0, 0), (0, 0, 1), (1, 1, 0), (0, 0, 0), (2, 0, 0)]]
    for index, draw in enumerate(draws):
        for other in draws[:index]:
            assert same_share(draw, other) == 0.0
    assert same_share(uniform(ids + 1, **AT)[:-1], uniform(ids, **AT)[1:]) == 1.0  # control: the same ids, shifted


# ---------------------------------------------------------------------------------------------------------------------
# The law

def normal_cdf(x: Tensor) -> Tensor:
    return torch.special.ndtr(x.double())


def distance(cdf_values: Tensor) -> float:
    """Kolmogorov-Smirnov: sqrt(n) * largest gap between the empirical law and the uniform; above 1.95 in 1 of 1,000."""
    values, n = cdf_values.double().flatten().sort().values, cdf_values.numel()
    grid = torch.arange(n + 1, dtype=torch.float64) / n
    return math.sqrt(n) * float(torch.maximum((grid[1:] - values).max(), (values - grid[:-1]).max()))


def test_laws_by_kolmogorov_smirnov():
    """Catches a wrong scale, a law cut short and a sine or cosine half that is off; over ids and over places."""
    ids = torch.arange(200_000)
    assert distance(uniform(ids, **AT)) < 1.95
    assert distance(normal_cdf(normal((1,), ids, **AT))) < 1.95  # cosines only
    for place in (0, 5, 6, 7, 12):
        assert distance(normal_cdf(normal((13,), ids[:50_000], **AT)[:, place])) < 1.95, place
    for sample_id in (0, 1, 77):
        assert distance(normal_cdf(normal((50_001,), torch.tensor([sample_id]), **AT))) < 1.95, sample_id
    assert distance(normal_cdf(1.01 * normal((5,), ids, **AT))) > 1.95  # controls: 1 % in scale or shift are seen
    assert distance(normal_cdf(0.01 + normal((5,), ids, **AT))) > 1.95


def test_moments_and_tails():
    """Catches what the distance is blind to: tails, cut off or too heavy (5 sigma); and bounds."""
    x = normal((100,), torch.arange(20_000), **AT).double()
    n = x.numel()
    for power, mean, variance in [(1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0), (6, 15.0, 10_170.0)]:
        assert abs(float((x**power).mean()) - mean) < 5 * math.sqrt(variance / n), power
    tail = n * math.erfc(4 / math.sqrt(2))
    assert abs(int((x.abs() > 4).sum()) - tail) < 5 * math.sqrt(tail)
    assert x.abs().max() < 6.8 and x.isfinite().all()
    u = uniform(torch.arange(1_000_000), **AT)
    assert 0 < float(u.min()) < 1e-5 and 1 - 1e-5 < float(u.max()) <= 1


def test_the_extreme_bits_are_finite():
    """Catches the logarithm of 0, which one number in 2^32 would meet."""
    extremes = noise._fraction(torch.tensor([0, 1, 2**31, 2**32 - 1]))
    assert 0 < float(extremes.min()) and float(extremes.max()) <= 1
    assert (-2 * extremes.log()).sqrt().isfinite().all() and float((-2 * extremes.log()).sqrt().max()) < 6.8


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 31, 64])
def test_places_of_a_sample_are_independent(size):
    """Catches a number used twice (an odd size, the halves of a pair) and correlation of places, values and squares."""
    x = normal((size,), torch.arange(20_000), **AT).double()
    assert all(row.unique().numel() == size for row in x[:100])
    for values in (x, (x**2 - 1) / math.sqrt(2)):
        correlation = values.T @ values / len(x) - torch.eye(size, dtype=torch.float64)
        assert correlation.abs().max() < 6 * math.sqrt((2 if values is x else 10) / len(x)), size


def test_neighbouring_samples_are_independent():
    """Catches a generator in which sample i + 1 repeats sample i one place on."""
    x = normal((256,), torch.arange(1001), **AT).double()
    for shift in (0, 1, 2, 3, 64, 128):
        products = x[:-1, shift:shift + 128] * x[1:, :128]
        assert abs(float(products.mean())) < 5 / math.sqrt(products.numel()), shift
    assert float((x * x).mean()) > 0.9  # control


@pytest.mark.parametrize("stream", ["rollout 0", "score time"])
def test_uniforms_and_normals_are_independent(stream):
    """Catches a time that is a function of the sample's noise, in one stream or in two (5 sigma)."""
    ids = torch.arange(100_000)
    u, x = uniform(ids, **{**AT, "stream": stream}).double() - 0.5, normal((2,), ids, **AT).double()
    for place in (0, 1):
        assert abs(float((u * x[:, place]).mean())) * math.sqrt(12 * len(ids)) < 5
        assert abs(float((u * (x[:, place]**2 - 1)).mean())) * math.sqrt(6 * len(ids)) < 5
