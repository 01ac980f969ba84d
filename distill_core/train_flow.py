# SPDX-License-Identifier: Apache-2.0
"""Trains a class-conditional flow model from a file of samples: the teacher that distillation starts from.

    python -m distill_core.train_flow --data examples/digits/digits.npz --out teacher --model dit --steps 3000 \
        --hidden-size 64 --depth 4 --num-heads 4 --patch-size 2

FILE is what `data.read_latents` reads. The loss is mean((v(x_s, s, label) - (noise - x0))^2) at x_s = (1 - s) x0 + s
noise; half of the noise levels are uniform and half logistic-normal, which dwells on the middle (arXiv 2403.03206). A
share of the labels is replaced by the null class, which is what guidance subtracts (arXiv 2207.12598). Written are the
averaged weights (EMA): config.json and model.safetensors. One process; equal arguments on one machine give equal files.
"""
from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from distill_core.data import batch_at, read_latents
from distill_core.ema import EMA
from distill_core.flow import add_noise
from distill_core.losses_dmd import fake_score_loss
from distill_core.models.dit import DiT, DiTConfig
from distill_core.models.mlp2d import MLP2D, NUM_COORDINATES, MLP2DConfig
from distill_core.phases import lr_at
from distill_core.safetensors_io import write_folder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Report = Callable[[int, float], None]  # step from 1, loss averaged since the last report


def train_flow(model: nn.Module, x: Tensor, labels: Tensor, *, null_class: int, steps: int, batch_size: int, lr: float,
               label_dropout: float, ema_decay: float, seed: int, log_every: int = 100,
               report: Report | None = None) -> dict[str, Tensor]:
    """Trains `model` in place, on its device; returns the averaged weights in fp32.

    x [N, ...] fp32, labels [N] int64. AdamW without weight decay; lr rises over the first 5 % of the steps and falls to
    0 as a cosine. The average's decay grows to `ema_decay` as step / (step + 9), so that it forgets the start.
    RuntimeError when the loss is not finite.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.0)
    ema = EMA(dict(model.named_parameters()))
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, lr=lr, schedule="cosine", warmup_steps=steps // 20, max_steps=steps,
                                min_lr_frac=0.0)
        picked = batch_at(step * batch_size, batch_size, len(x), seed)
        noised = _noised(x[picked], labels[picked], null_class, label_dropout, generator)
        x0, noise, s, dropped = (tensor.to(device) for tensor in noised)
        loss = fake_score_loss(model(add_noise(x0, noise, s), s, dropped), x0, noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(step + 1, decay=min(ema_decay, (step + 1) / (step + 10)))
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise RuntimeError(f"the loss is {losses[-1]} at step {step + 1}; lower --lr")
        if report is not None and ((step + 1) % log_every == 0 or step + 1 == steps):
            report(step + 1, sum(losses) / len(losses))
            losses.clear()
    return ema.shadow


def _noised(x0: Tensor, labels: Tensor, null_class: int, label_dropout: float, generator: torch.Generator
            ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x0, noise, s, labels with some replaced by the null class), drawn on CPU: the same on every device."""
    noise = torch.randn(x0.shape, generator=generator)
    s = torch.rand(len(x0), generator=generator)
    middle = torch.sigmoid(torch.randn(len(x0), generator=generator))
    s = torch.where(torch.arange(len(x0)) % 2 == 0, s, middle)
    drop = torch.rand(len(x0), generator=generator) < label_dropout
    return x0, noise, s, labels.masked_fill(drop, null_class)


def new_model(args: argparse.Namespace, x: Tensor, labels: Tensor) -> DiT | MLP2D:
    """A model of the size that the arguments ask for and of the shape that the data has, initialised from the seed."""
    num_classes = args.num_classes or int(labels.max()) + 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(args.seed)
        if args.model == "mlp2d":
            if tuple(x.shape[1:]) != (NUM_COORDINATES,):
                raise ValueError(f"{args.data}: mlp2d takes points [N, {NUM_COORDINATES}], got {list(x.shape)}")
            return MLP2D(MLP2DConfig(args.hidden_size, args.depth, num_classes))
        if x.dim() != 4 or x.shape[2] != x.shape[3]:
            raise ValueError(f"{args.data}: dit takes square images [N, C, H, H], got {list(x.shape)}")
        return DiT(DiTConfig(args.hidden_size, args.depth, args.num_heads, x.shape[2], args.patch_size, x.shape[1],
                             num_classes, time_scale=args.time_scale))


def write_model(folder: str | Path, model: DiT | MLP2D, weights: dict[str, Tensor], *, dtype: torch.dtype) -> None:
    """A new model folder: model.safetensors in `dtype`, then config.json, without which the folder is incomplete."""
    write_folder(folder, ((name, tensor.to(dtype)) for name, tensor in weights.items()))
    config = {"model_type": "dit" if isinstance(model, DiT) else "mlp2d", **dataclasses.asdict(model.config)}
    with open(Path(folder) / "config.json", "x", encoding="ascii") as file:
        file.write(json.dumps(config, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


def run(args: argparse.Namespace) -> None:
    if os.path.lexists(args.out):  # before the work, not after it
        raise ValueError(f"{args.out}: exists; choose another --out or remove it")
    x, labels = read_latents(args.data, num_classes=args.num_classes)
    model = new_model(args, x, labels).to(args.device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{args.model} with {num_parameters:,} parameters, {len(x)} samples of shape {list(x.shape[1:])}", flush=True)
    weights = train_flow(model, x, labels, null_class=model.config.null_class, steps=args.steps,
                         batch_size=args.batch_size, lr=args.lr, label_dropout=args.label_dropout,
                         ema_decay=args.ema_decay, seed=args.seed, log_every=args.log_every,
                         report=lambda step, loss: print(f"step {step:6d}  loss {loss:.4f}", flush=True))
    write_model(args.out, model, weights, dtype=DTYPES[args.dtype])
    print(f"wrote {args.out}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m distill_core.train_flow", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--data", required=True, metavar="FILE", help=".npz, or a folder of safetensors shards with an index.jsonl")
    add("--out", required=True, metavar="FOLDER", help="new folder for config.json and model.safetensors")
    add("--model", required=True, choices=("dit", "mlp2d"))
    add("--hidden-size", type=_positive, default=64)
    add("--depth", type=_positive, default=4, help="blocks (default: 4)")
    add("--num-heads", type=_positive, default=4, help="dit: attention heads (default: 4)")
    add("--patch-size", type=_positive, default=2, help="dit: pixels per token and side (default: 2)")
    add("--time-scale", type=float, default=1000.0, help="dit: noise level times this is embedded (default: 1000)")
    add("--num-classes", type=_positive, help="default: the largest label + 1")
    add("--steps", type=_positive, default=3000)
    add("--batch-size", type=_positive, default=128)
    add("--lr", type=float, default=1e-3, help="peak learning rate (default: 1e-3)")
    add("--label-dropout", type=float, default=0.1, help="share of labels replaced by the null class (default: .1)")
    add("--ema-decay", type=float, default=0.999)
    add("--seed", type=int, default=0)
    add("--device", default="cpu")
    add("--dtype", choices=tuple(DTYPES), default="float32", help="of the written weights (default: float32)")
    add("--log-every", type=_positive, default=100, metavar="STEPS")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _check(args: argparse.Namespace) -> None:
    for name, value, good in (("--lr", args.lr, 0.0 < args.lr < math.inf),
                              ("--label-dropout", args.label_dropout, 0.0 <= args.label_dropout < 1.0),
                              ("--ema-decay", args.ema_decay, 0.0 <= args.ema_decay <= 1.0),
                              ("--seed", args.seed, args.seed >= 0)):
        if not good:
            raise ValueError(f"{name}: {value} is out of range")


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        _check(args)
        run(args)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"train_flow: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
