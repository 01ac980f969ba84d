# SPDX-License-Identifier: Apache-2.0
"""Time and peak extra memory of log-probs at K ids against the dense way, as ratios measured in one run.

    python tests/bench/bench_head.py               # the sizes of a Qwen vocabulary: 1 to 3 minutes, 5 GB
    python tests/bench/bench_head.py --scale 8     # the same with V / 8, for a look

Rounds of the two sides alternate and the fastest round of each counts, so that a busy machine slows both.
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from timing import Row, fastest_s, peak_extra_bytes, print_rows  # before torch: silences the profiler

import torch
from torch import Tensor

from distill_core.losses_kl import reverse_kl_topk
from distill_core.topk_logprobs import chunked_gather_logprobs, sparse_head_logits


def bench_gather(vocab: int, rounds: int, *, num_rows: int = 1536, num_k: int = 16,
                 chunk_size: int = 128) -> list[Row]:
    logits_NV = 3.0 * torch.randn(num_rows, vocab)
    ids_NK = torch.randint(0, vocab, (num_rows, num_k))

    def dense() -> Tensor:
        return torch.log_softmax(logits_NV, dim=-1).gather(-1, ids_NK)

    def chunked() -> Tensor:
        return chunked_gather_logprobs(logits_NV, ids_NK, chunk_size)

    error = (dense() - chunked()).abs().max().item()
    dense_s, chunked_s = fastest_s([dense, chunked], rounds)
    chunk_bytes = chunk_size * vocab * 4
    chunked_bytes, dense_bytes = peak_extra_bytes(chunked), peak_extra_bytes(dense)
    what = f"gather at ids, N {num_rows}, V {vocab}, K {num_k}, chunk {chunk_size}"
    against = "fp32 log_softmax + gather"
    return [Row(f"{what}: time", against, chunked_s / dense_s,
                f"{chunked_s:.3f} s / {dense_s:.3f} s; max |difference| {error:.1e}", "<= 0.6"),
            Row(f"{what}: extra memory", "one chunk x V x 4 B", chunked_bytes / chunk_bytes,
                f"{chunked_bytes / 1e6:.0f} MB / {chunk_bytes / 1e6:.0f} MB; dense {dense_bytes / 1e6:.0f} MB",
                "<= 1.05")]


def bench_sparse(vocab: int, rounds: int, *, num_rows: int = 1024, num_k: int = 16,
                 width: int = 1024) -> list[Row]:
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
    what = f"student head + loss, fwd + bwd, N {num_rows}, D {width}, V {vocab}, K {num_k}"
    against = "dense logits, log_softmax, gather"

    def memory(ours: int) -> str:
        return (f"{ours / 1e6:.0f} MB / {dense_bytes / 1e6:.0f} MB; against logits and gather, nothing kept: "
                f"{ours / frugal_bytes:.3f}")

    return [Row(f"{what}: time", against, sparse_s / dense_s,
                f"{sparse_s:.3f} s / {dense_s:.3f} s; against logits and gather, nothing kept: "
                f"{sparse_s / frugal_s:.3f}", "<= 0.08"),
            Row(f"{what}: peak extra memory", against, sparse_bytes / dense_bytes, memory(sparse_bytes), "<= 0.3"),
            Row("the same beside the head's own gradient", against, beside_head_bytes / dense_bytes,
                memory(beside_head_bytes), "<= 0.05")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=int, default=1, help="divide the vocabulary by this")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for bench in (bench_gather, bench_sparse):
        print_rows(bench(151_936 // args.scale, args.rounds))
