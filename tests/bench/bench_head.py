# SPDX-License-Identifier: Apache-2.0
"""Time and peak extra memory of log-probs at K ids against the dense way, as ratios measured in one run.

    python tests/bench/bench_head.py               # the sizes of a Qwen vocabulary: 1 to 3 minutes, 5 GB
    python tests/bench/bench_head.py --scale 8     # the same with V / 8, for a look

Rounds of the two sides alternate and the fastest round of each counts, so that a busy machine slows both. Memory is the
sum of the CPU allocator's events, temporaries inside a kernel included: no resident-set noise.
"""
from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # silences the profiler, before it is loaded
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from distill_core.losses_kl import reverse_kl_topk
from distill_core.topk_logprobs import chunked_gather_logprobs, sparse_head_logits


def peak_extra_bytes(fn: Callable[[], object]) -> int:
    """Highest sum of live CPU allocations made by `fn`, its result included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        result = fn()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    del result
    return peak


def fastest_s(fns: list[Callable[[], object]], rounds: int) -> list[float]:
    """Fastest of `rounds` for each function, the functions taking turns; one unmeasured round first."""
    best = [float("inf")] * len(fns)
    for index in range(rounds + 1):
        for which, fn in enumerate(fns):
            start = time.perf_counter()
            fn()
            if index:
                best[which] = min(best[which], time.perf_counter() - start)
    return best


def bench_gather(vocab: int, rounds: int, *, num_rows: int = 1536, num_k: int = 16, chunk_size: int = 128) -> None:
    logits_NV = 3.0 * torch.randn(num_rows, vocab)
    ids_NK = torch.randint(0, vocab, (num_rows, num_k))

    def dense() -> Tensor:
        return torch.log_softmax(logits_NV, dim=-1).gather(-1, ids_NK)

    def chunked() -> Tensor:
        return chunked_gather_logprobs(logits_NV, ids_NK, chunk_size)

    error = (dense() - chunked()).abs().max().item()
    dense_s, chunked_s = fastest_s([dense, chunked], rounds)
    chunk_bytes = chunk_size * vocab * 4
    print(f"gather at ids, N {num_rows}, V {vocab}, K {num_k}, chunk {chunk_size}; max |difference| {error:.1e}")
    print(f"  time            {chunked_s / dense_s:6.3f} x   {chunked_s:.3f} s / {dense_s:.3f} s   (reach 0.6)")
    print(f"  memory          {peak_extra_bytes(chunked) / chunk_bytes:6.3f} chunks of {chunk_bytes / 1e6:.0f} MB, "
          f"dense {peak_extra_bytes(dense) / chunk_bytes:.3f}   (reach 1.05)")


def bench_sparse(vocab: int, rounds: int, *, num_rows: int = 1024, num_k: int = 16, width: int = 1024) -> None:
    hidden_ND = torch.randn(num_rows, width, requires_grad=True)
    weight_VD = (torch.randn(vocab, width) / width**0.5).requires_grad_()
    ids_NK = torch.randint(0, vocab, (num_rows, num_k))
    teacher_NK = torch.randn(num_rows, num_k)

    def backward(student_NK: Tensor) -> None:
        reverse_kl_topk(student_NK, teacher_NK).sum().backward()
        hidden_ND.grad = weight_VD.grad = None  # so that no round frees, or adds to, what another one left

    def dense() -> None:
        logits_NV = hidden_ND @ weight_VD.t()  # alive until the end of the step, as the output of a model is
        backward(torch.log_softmax(logits_NV, dim=-1).gather(-1, ids_NK))

    def frugal() -> None:
        backward((hidden_ND @ weight_VD.t()).gather(-1, ids_NK))

    def sparse() -> None:
        backward(sparse_head_logits(hidden_ND, weight_VD, ids_NK))

    dense_s, frugal_s, sparse_s = fastest_s([dense, frugal, sparse], rounds)
    dense_bytes, frugal_bytes, sparse_bytes = (peak_extra_bytes(fn) for fn in (dense, frugal, sparse))
    beside_head_bytes = sparse_bytes - weight_VD.numel() * 4
    print(f"student head + loss, forward + backward, N {num_rows}, D {width}, V {vocab}, K {num_k}")
    print("  against dense logits, log_softmax, gather [against dense logits, gather, nothing kept]")
    print(f"  time            {sparse_s / dense_s:6.3f} x   [{sparse_s / frugal_s:.3f}]   "
          f"{sparse_s:.3f} s / {dense_s:.3f} s   (reach 0.08)")
    print(f"  memory          {sparse_bytes / dense_bytes:6.3f} x   [{sparse_bytes / frugal_bytes:.3f}]   "
          f"{sparse_bytes / 1e6:.0f} MB / {dense_bytes / 1e6:.0f} MB   (reach 0.3)")
    print(f"  beside the head's gradient {beside_head_bytes / dense_bytes:.3f} x   "
          f"[{beside_head_bytes / frugal_bytes:.3f}]   (reach 0.05)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=int, default=1, help="divide the vocabulary by this")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    bench_gather(151_936 // args.scale, args.rounds)
    bench_sparse(151_936 // args.scale, args.rounds)
