# SPDX-License-Identifier: Apache-2.0
"""What needs a GPU to be measured: agreement of bf16 with fp32, graph decode, sparse head, decode speed, training MFU.

    python tests/bench/bench_gpu.py                            # 2 to 4 minutes, 24 GB of GPU memory or more
    python tests/bench/bench_gpu.py --device cpu --scale 32    # the same code on tiny sizes, for a look

The model is random, of the shape of Qwen2.5-1.5B, and made on the device: nothing is read but the code. Limits are what
this GPU does in the same run: copy bandwidth of a large tensor for decoding, which reads all weights and the keys and
values once a step, and bf16 matrix products for training.
"""
from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1])]

from timing import Row, append_results, peak_extra_bytes, print_rows, seconds_of

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distill_core import generate as engine
from distill_core.build import shard_meta
from distill_core.losses_kl import reverse_kl_topk
from distill_core.models.lm import CausalLM, LMConfig, config_from_hf
from distill_core.role import PhaseLoss, Role, adamw, run_phase
from distill_core.topk_logprobs import sparse_head_logits
from distill_core.topology import plan_ranks, start, stop

K = 16
BIG_GPU_BYTES = 60e9  # from here on the training step is measured at all 28 layers


# --- the model and clocks -------------------------------------------------------------------------------------------

def shape(scale: int, *, num_layers: int = 28) -> LMConfig:
    """Qwen2.5-1.5B, or the same in small: 12 query heads and 2 key heads, tied."""
    width = max(1536 // scale, 96) // 24 * 24
    raw = {"model_type": "qwen2", "vocab_size": 151_936 // scale, "hidden_size": width,
           "intermediate_size": max(8960 // scale, 64), "num_hidden_layers": max(num_layers // scale, 1),
           "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 32_768,
           "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True}
    return config_from_hf(raw, source="shape")


def fill(model: nn.Module, *, seed: int = 0) -> nn.Module:
    """Random weights, the same in every dtype but for rounding."""
    with torch.no_grad():
        for index, (_, parameter) in enumerate(model.named_parameters()):
            generator = torch.Generator(parameter.device).manual_seed(seed * 10_000 + index)
            values = torch.randn(parameter.shape, generator=generator, device=parameter.device)
            parameter.copy_(1.0 + 0.1 * values if parameter.dim() == 1 else 0.02 * values)
    return model


def random_lm(config: LMConfig, device: torch.device, dtype: torch.dtype) -> CausalLM:
    with torch.device("meta"):
        model = CausalLM(config).to(dtype)
    model.to_empty(device=device)
    model.tie()
    return fill(model)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_s(fn: Callable[[], object], device: torch.device, rounds: int = 5) -> float:
    """Median over rounds after a warm-up, the device's work included."""
    def whole() -> None:
        fn()
        wait(device)

    return statistics.median([seconds_of(whole) for _ in range(rounds + 1)][1:])


def peak_bytes(fn: Callable[[], object], device: torch.device) -> int:
    """Most memory that `fn` has allocated at a time, beside what was there before."""
    if device.type != "cuda":
        return peak_extra_bytes(fn)
    wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    fn()
    wait(device)
    return torch.cuda.max_memory_allocated(device) - before


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


# --- agreement ------------------------------------------------------------------------------------------------------

def agreement(device: torch.device, scale: int) -> list[Row]:
    """bf16 against fp32 on the same weights: logits, loss, gradients."""
    config = shape(scale, num_layers=4)
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(config.vocab_size, (4, 128), generator=generator).to(device)
    ids_NK = torch.randint(config.vocab_size, (512, K), generator=generator).to(device)
    teacher_NK = torch.randn(512, K, generator=generator).to(device)

    def once(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        model = random_lm(config, device, torch.bfloat16).to(dtype)  # the same rounded weights on both sides
        hidden_ND = model(tokens_BT).flatten(0, 1)
        logits_NK = model.lm_head(hidden_ND, lambda h, w: sparse_head_logits(h, w, ids_NK))
        loss = reverse_kl_topk(logits_NK, teacher_NK).mean()
        loss.backward()
        return logits_NK.detach(), loss.detach(), torch.cat([p.grad.flatten().float() for p in model.parameters()])

    logits, loss, grads = (relative_error(a, b) for a, b in zip(once(torch.bfloat16), once(torch.float32)))
    what = f"bf16 against fp32, {config.num_layers} layers, D {config.hidden_size}: relative error of"
    return [Row(f"{what} logits", "fp32", logits, "norm of the difference / norm", "<= 0.03"),
            Row(f"{what} the loss", "fp32", loss, "mean reverse KL of 512 positions", "<= 0.01"),
            Row(f"{what} gradients", "fp32", grads, "all parameters together", "<= 0.1")]


def graph_decode(device: torch.device, scale: int) -> list[Row]:
    """Graph replay against the same steps kernel by kernel, bf16: near an edge of the CDF a token may differ."""
    model = random_lm(shape(scale, num_layers=8), device, torch.bfloat16).requires_grad_(False).eval().fuse()
    prompts, new = random_prompts(model.config, 16, 32), 64
    run = partial(engine.generate, model, prompts, max_new_tokens=new, capture_top_k=K)
    with patch.object(engine, "uses_graphs", lambda device: False):
        eager, eager_s = run(), median_s(run, device, rounds=1)
    decoder = engine.Engine(model)

    def graphed() -> list[engine.Sample]:
        return [sample for _, sample in sorted(decoder.stream(prompts, max_new_tokens=new, capture_top_k=K),
                                               key=lambda item: item[0])]

    samples, graph_s = graphed(), median_s(graphed, device, rounds=1)
    differing = sum(a.tokens != b.tokens for a, b in zip(eager, samples))
    return [Row("decoding, 16 rows x 64 tokens: CUDA graphs, time", "the same steps without graphs", graph_s / eager_s,
                f"{16 * new / graph_s:.0f} tokens/s / {16 * new / eager_s:.0f} tokens/s"),
            Row("share of samples with a differing token", "the same steps without graphs", differing / len(samples),
                f"{differing} of {len(samples)}; exactness in fp32: tests/test_gpu.py")]


def random_prompts(config: LMConfig, count: int, length: int) -> list[list[int]]:
    return torch.randint(config.vocab_size, (count, length), generator=torch.Generator().manual_seed(0)).tolist()


# --- the head -------------------------------------------------------------------------------------------------------

def sparse_head(device: torch.device, scale: int) -> list[Row]:
    """Head, loss and backward on K ids against dense logits, in bf16."""
    num_rows, width, vocab = 8192 // scale, 1536, 151_936 // scale
    hidden_ND = torch.randn(num_rows, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight_VD = (0.02 * torch.randn(vocab, width, device=device)).to(torch.bfloat16).requires_grad_()
    ids_NK = torch.randint(vocab, (num_rows, K), device=device)
    teacher_NK = torch.randn(num_rows, K, device=device)

    def backward(logits_NK: Tensor) -> None:
        reverse_kl_topk(logits_NK, teacher_NK).sum().backward()
        hidden_ND.grad = weight_VD.grad = None

    sides = (lambda: backward(sparse_head_logits(hidden_ND, weight_VD, ids_NK)),
             lambda: backward(F.linear(hidden_ND, weight_VD).float().log_softmax(-1).gather(-1, ids_NK)))
    (sparse_s, sparse_bytes), (dense_s, dense_bytes) = ((median_s(fn, device), peak_bytes(fn, device)) for fn in sides)
    what = f"student head + loss, fwd + bwd, bf16, N {num_rows}, D {width}, V {vocab}, K {K}"
    against = "dense logits, fp32 log_softmax, gather"
    return [Row(f"{what}: time", against, sparse_s / dense_s, f"{1000 * sparse_s:.1f} ms / {1000 * dense_s:.1f} ms"),
            Row(f"{what}: peak memory", against, sparse_bytes / dense_bytes,
                f"{sparse_bytes / 1e6:.0f} MB / {dense_bytes / 1e6:.0f} MB", "<= 0.3")]


# --- decoding against the memory's bandwidth -------------------------------------------------------------------------

def copy_bandwidth(device: torch.device, scale: int) -> float:
    """Bytes read and written a second by a copy of 2 GB."""
    source = torch.zeros(1_000_000_000 // scale, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_s(lambda: target.copy_(source), device)


def decode_speed(device: torch.device, scale: int) -> list[Row]:
    """A step's time from two lengths, so that prefill and start-up cancel, against reading weights and KV once."""
    config, bandwidth = shape(scale), copy_bandwidth(device, scale)
    model = random_lm(config, device, torch.bfloat16).requires_grad_(False).eval().fuse()
    weight_bytes = sum(p.nbytes for p in model.parameters())
    token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2
    prompt, short, long = 256, max(32 // scale, 1), max(160 // scale, 5)
    rows = []
    for batch in (1, 32, 256):
        prompts, decoder = random_prompts(config, batch, prompt), engine.Engine(model)

        def decode(new_tokens: int) -> None:
            for _ in decoder.stream(prompts, max_new_tokens=new_tokens, capture_top_k=K):
                pass

        decode(long)  # captures all graphs
        long_s, short_s = (median_s(partial(decode, count), device, rounds=3) for count in (long, short))
        step_s = (long_s - short_s) / (long - short)
        kv_bytes = batch * (prompt + (short + long) // 2) * token_bytes
        floor_s = (weight_bytes + kv_bytes) / bandwidth
        rows.append(Row(f"decoding at batch {batch}, {weight_bytes / 2e9:.2f}B parameters in bf16, top-{K} captured: "
                        "a step's time", "reading weights and KV once", step_s / floor_s,
                        f"{batch / step_s:.0f} tokens/s, {1000 * step_s:.2f} ms / {1000 * floor_s:.2f} ms "
                        f"({(weight_bytes + kv_bytes) / 1e9:.2f} GB at {bandwidth / 1e9:.0f} GB/s)"))
        decoder.release()
    return rows


# --- training -------------------------------------------------------------------------------------------------------

def matmul_flops(device: torch.device, scale: int) -> float:
    """Operations a second of a square bf16 product."""
    size = 8192 // scale
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    return 2 * size**3 / median_s(lambda: a @ a, device)


def training(device: torch.device, scale: int) -> list[Row]:
    """The real optimizer step on one rank: FSDP2's mixed precision, sparse head, clipping, AdamW on fp32 masters."""
    big = device.type != "cuda" or torch.cuda.get_device_properties(device).total_memory > BIG_GPU_BYTES
    config = shape(scale, num_layers=28 if big else 8)
    world = start(plan_ranks(1, 1, []), device, 60)
    model = shard_meta(config, world.student_mesh, dtype=torch.float32, compute_dtype=torch.bfloat16, trainable=True)
    model.to_empty(device=device)
    fill_shards(model)
    optimizer = adamw(model.parameters(), lr=1e-6, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    role = Role("student", model, world.student_mesh.get_group(), world.students_control, optimizer, lambda step: 1e-6)
    rows, width = 8, 512 // scale
    tokens_BT = torch.randint(config.vocab_size, (rows, width), device=device)
    ids_NK = torch.randint(config.vocab_size, (rows * width, K), device=device)
    teacher_NK = torch.randn(rows * width, K, device=device)

    def compute(tokens_BT: Tensor) -> PhaseLoss:
        logits_NK = model.lm_head(model(tokens_BT).flatten(0, 1), lambda h, w: sparse_head_logits(h, w, ids_NK))
        return PhaseLoss(reverse_kl_topk(logits_NK, teacher_NK).sum(), rows, normalizer=rows * width)

    def step() -> None:
        assert run_phase(role, [tokens_BT] * 4, compute, roles=[role], max_grad_norm=1.0).applied

    seconds, peak = median_s(step, device, rounds=3), peak_bytes(step, device)
    stop(world)
    num_tokens, weights = 4 * rows * width, sum(p.numel() for p in model.model.layers.parameters())
    attention = 6 * config.num_layers * config.num_heads * config.head_dim * width  # causal: half of all pairs
    flops, limit = num_tokens * (6 * weights + attention), matmul_flops(device, scale)
    return [Row(f"training step, {weights / 1e9:.2f}B parameters in {config.num_layers} layers: MFU",
                "bf16 products of this GPU", flops / seconds / limit,
                f"{num_tokens} tokens, {num_tokens / seconds:.0f}/s, {flops / seconds / 1e12:.1f} / "
                f"{limit / 1e12:.1f} TFLOP/s, {seconds:.3f} s; {peak / 1e9:.1f} GB beside weights and optimizer")]


def fill_shards(model: CausalLM) -> None:
    for parameter in model.parameters():
        shard = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        nn.init.normal_(shard, std=0.02) if parameter.dim() > 1 else nn.init.ones_(shard)


BENCHES = (agreement, graph_decode, sparse_head, decode_speed, training)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=int, default=1, help="divide sizes by this")
    parser.add_argument("--only", default=",".join(bench.__name__ for bench in BENCHES), help="names, by comma")
    parser.add_argument("--results", type=Path, help="file to append to (default: none)")
    args = parser.parse_args()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    print(f"{name}, torch {torch.__version__}, scale {args.scale}")
    for bench in BENCHES:
        if bench.__name__ in args.only.split(","):
            rows = bench(device, args.scale)
            print_rows(rows)
            if args.results:
                append_results(args.results, rows, bench=bench.__name__, gpu=name, scale=args.scale)
            if device.type == "cuda":
                torch.cuda.empty_cache()  # graphs have pools of their own, which nothing else may use


if __name__ == "__main__":
    main()
