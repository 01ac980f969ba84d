# SPDX-License-Identifier: Apache-2.0
"""Every benchmark as one table: ratios measured in this run, what they should reach, absolute numbers.

    python tests/bench/run.py --model .cache/smollm2 --trl-python OTHER_VENV/bin/python     # some 15 minutes
    python tests/bench/run.py --model .cache/smollm2 --only overlap,growth                  # each row: 1 to 3 minutes
    python tests/bench/run.py --model .cache/smollm2 --scale 16                             # tiny sizes, for a look

Each benchmark has a process of its own, one after another. Rows go to tests/bench/results.jsonl, with machine, versions
and date, where --scale is 1; another file, or another scale, needs --results. Peers (transformers, TRL) are optional.
"""
from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

from timing import Row, append_results, print_rows

VOCAB = 151_936  # of Qwen


# Imports stand in the functions: each runs in a process of its own.

def gather(options: Namespace) -> list[Row]:
    from bench_head import bench_gather
    return bench_gather(VOCAB // options.scale, rounds=3)


def sparse_head(options: Namespace) -> list[Row]:
    from bench_head import bench_sparse
    return bench_sparse(VOCAB // options.scale, rounds=3)


def rollout(options: Namespace) -> list[Row]:
    what, against = "rollout, SmolLM2-135M, own lengths 8-96, batch 16: useful tokens/s", "transformers generate"
    if importlib.util.find_spec("transformers") is None:
        return [Row(what, against, None, "transformers is not installed", ">= 2.0")]
    import torch
    from bench_rollout import bench

    torch.set_num_threads(options.threads)
    speeds = bench(options.model / "teacher", num_prompts=max(48 // options.scale, 2), batch_size=16,
                   rounds=2 if options.scale == 1 else 1)
    peer = speeds.pop("transformers")
    return [Row(f"{what}, {side}", against, speed / peer, f"{speed:.1f} / {peer:.1f} tokens/s", ">= 2.0")
            for side, speed in speeds.items()]


def step(options: Namespace, num_ranks: int = 1) -> list[Row]:
    from bench_step import bench
    return bench(options.model, num_ranks=num_ranks, num_prompts=max(16 // options.scale, 2),
                 new_tokens=max(96 // options.scale, 12), rounds=2 if options.scale == 1 else 1,
                 threads=options.threads, trl=options.trl_python)


def overlap(options: Namespace) -> list[Row]:
    from bench_overlap import bench
    return bench(7 if options.scale == 1 else 1, options.scale)


def growth(options: Namespace) -> list[Row]:
    from bench_growth import bench
    return bench(3 if options.scale == 1 else 1, options.scale)


def dmd(options: Namespace) -> list[Row]:
    from bench_dmd import bench
    return bench(max(256 // options.scale, 32), 6 if options.scale == 1 else 1, 5 if options.scale == 1 else 1)


def checkpoint(options: Namespace) -> list[Row]:
    from bench_checkpoint import bench
    from ranks import run_ranks

    rows = []
    for num_ranks in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            values = run_ranks(lambda rank: bench(rank, num_ranks, Path(folder), 516 // options.scale, 3), num_ranks,
                               timeout_s=600)[0]
        rows.append(Row(f"checkpoint, {516 // options.scale} MB on {num_ranks} rank(s): stall of the training loop",
                        "synchronous save", values["stall"] / values["synchronous"],
                        f"{1000 * values['stall']:.0f} ms / {1000 * values['synchronous']:.0f} ms", "<= 0.2"))
    return rows


BENCHES: dict[str, Callable[[Namespace], list[Row]]] = {
    "gather": gather, "sparse_head": sparse_head, "rollout": rollout, "step": step,
    "step_ranks": partial(step, num_ranks=2), "overlap": overlap, "growth": growth, "dmd": dmd,
    "checkpoint": checkpoint}


def alone(name: str, options: Namespace) -> list[Row]:
    """In a fresh process: no other benchmark's memory, threads or process groups. A failure is a row too."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(BENCHES[name], options).result()
        except Exception as error:
            traceback.print_exc()
            return [Row(name, "-", None, f"FAILED: {f'{error!r}: {error}'.strip().splitlines()[-1]}")]


def trl_version(python: str | None) -> dict[str, str]:
    if python is None:
        return {}
    command = [python, "-c", "from importlib.metadata import version as v; print(v('trl'), v('transformers'))"]
    trl, transformers = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return {"trl": trl, "trl_transformers": transformers}


def parse_args() -> Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=HERE.parents[1] / ".cache/smollm2",
                        help="folder with teacher/ and student/, as tests/real_model/make_smollm2.py writes it")
    parser.add_argument("--only", default=",".join(BENCHES), help="names, by comma (default: all of %(default)s)")
    parser.add_argument("--scale", type=int, default=1, help="divide sizes by this")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--trl-python", help="interpreter that has TRL (default: this one, if it does)")
    parser.add_argument("--results", type=Path, help="file to append to")
    args = parser.parse_args()
    unknown = set(args.only.split(",")) - set(BENCHES)
    if unknown:
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(BENCHES)}")
    args.model = args.model.resolve()
    if args.trl_python is None and importlib.util.find_spec("trl"):
        args.trl_python = sys.executable
    if args.results is None and args.scale == 1:
        args.results = HERE / "results.jsonl"
    return args


def main() -> int:
    args, failed = parse_args(), False
    if args.scale > 1:
        print(f"sizes are divided by {args.scale}: the ratios mean nothing, and what they should reach neither")
    for name in args.only.split(","):
        rows = alone(name, args)
        print_rows(rows)
        failed = failed or any(row.measured.startswith("FAILED") for row in rows)
        if args.results:
            append_results(args.results, rows, bench=name, scale=args.scale, threads=args.threads,
                           **trl_version(args.trl_python if name.startswith("step") else None))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
