# SPDX-License-Identifier: Apache-2.0
"""Useful tokens/s of the rollout engine against transformers' generate, as a ratio measured in one run.

    python tests/bench/bench_rollout.py MODEL_FOLDER            # 48 prompts, own lengths of 8 to 96 new tokens: minutes
    python tests/bench/bench_rollout.py MODEL_FOLDER --prompts 16 --rounds 1    # for a look

Both sides sample at temperature 1 from the same model, in fp32, 16 rows at a time, and get the prompts in the same
order. transformers decodes static batches, padded left, each to the longest length in it; only useful tokens count. The
engine is measured twice: taking the prompts in the given order, as where nobody knows how long an answer gets, and in
its own, longest limit first. Rounds of the sides alternate and the fastest round of each counts, so that a busy machine
slows all of them.
"""
from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from distill_core.build import load_lm
from distill_core.generate import sample_stream


def fastest_s(sides: dict[str, Callable[[], int]], rounds: int, *, num_tokens: int) -> dict[str, float]:
    """Fastest of `rounds` for each side, which gives back its useful tokens; the sides take turns."""
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(rounds):
        for name, side in sides.items():
            start = time.perf_counter()
            assert side() == num_tokens
            best[name] = min(best[name], time.perf_counter() - start)
    return best


@torch.no_grad()
def peer(model: torch.nn.Module, prompts: list[list[int]], lengths: list[int], batch_size: int) -> int:
    """transformers: `batch_size` prompts after `batch_size` prompts."""
    useful = 0
    for start in range(0, len(prompts), batch_size):
        batch, wanted = prompts[start:start + batch_size], lengths[start:start + batch_size]
        width = max(map(len, batch))
        tokens_BT = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch])
        mask_BT = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        out_BT = model.generate(tokens_BT, attention_mask=mask_BT, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                                max_new_tokens=max(wanted), min_new_tokens=max(wanted), use_cache=True,
                                eos_token_id=None, pad_token_id=0)
        assert out_BT.shape[1] == width + max(wanted)
        useful += sum(wanted)
    return useful


def engine(model: torch.nn.Module, prompts: list[list[int]], lengths: list[int], batch_size: int, *,
           queue: list[int] | None, capture_top_k: int = 0) -> int:
    stream = sample_stream(model, prompts, max_new_tokens=lengths, batch_size=batch_size, queue=queue,
                           capture_top_k=capture_top_k)
    return sum(len(sample.tokens) for _, sample in stream)


def bench(folder: Path, *, num_prompts: int, batch_size: int, rounds: int) -> dict[str, float]:
    """Useful tokens/s of each side."""
    from transformers import AutoModelForCausalLM, __version__

    ours = load_lm(folder).requires_grad_(False).fuse()
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, 97, (num_prompts,), generator=generator).tolist()
    prompts = [torch.randint(0, ours.config.vocab_size, (size,), generator=generator).tolist()
               for size in torch.randint(8, 33, (num_prompts,), generator=generator).tolist()]
    common = dict(prompts=prompts, lengths=lengths, batch_size=batch_size)
    given = list(range(num_prompts))
    sides = {"transformers": partial(peer, theirs, **common),
             "engine, given order": partial(engine, ours, queue=given, **common),
             "engine, own order": partial(engine, ours, queue=None, **common),
             "engine, own order, top-16 captured": partial(engine, ours, queue=None, capture_top_k=16, **common)}
    print(f"{num_prompts} prompts of 8 to 32 tokens, 8 to 96 new ones, batch {batch_size}, torch {torch.__version__}, "
          f"transformers {__version__}, {torch.get_num_threads()} threads")
    best = fastest_s(sides, rounds, num_tokens=sum(lengths))
    for name, seconds in best.items():
        print(f"  {name:<36} {sum(lengths) / seconds:7.1f} useful tokens/s   {best['transformers'] / seconds:5.2f} x")
    return {name: sum(lengths) / seconds for name, seconds in best.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a Hugging Face folder, such as SmolLM2-135M")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    bench(args.folder, num_prompts=args.prompts, batch_size=args.batch_size, rounds=args.rounds)
