# SPDX-License-Identifier: Apache-2.0
"""What a training step may hold: nothing of tokens x vocabulary, on the student or on the teacher."""
from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch
from test_train_opd import live
from tiny import write_config, write_lm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train_opd
from distill_core.metrics import Metrics

sys.path.insert(0, str(Path(__file__).parent / "bench"))
from timing import peak_extra_bytes  # noqa: E402

VOCAB = 5003


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation gives, backward and custom functions included."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))])
        return result


def measured_step(tmp_path, measure, *overrides, vocab_size: int = VOCAB):
    """(what `measure` finds of a step with an inline teacher, number of response tokens)."""
    names = {role: tmp_path / f"{role}_{vocab_size}" for role in ("student", "teacher")}
    folders = [f"{role}.path={name if name.exists() else write_lm(name, seed=1, vocab_size=vocab_size)}"
               for role, name in names.items()]
    path = write_config(tmp_path, topology__teacher_ranks=0, train__micro_batch_tokens=4000, teacher__chunk_size=9,
                        rollout__max_new_tokens=40, rollout__stop_ids=[], train__prompts_per_step=8)

    def on_student(job, world):
        run = train_opd.build_student(job, world, logging.getLogger("test"))
        run.teachers = train_opd.connect_teachers(job, world, probing=False)
        rollout, metrics = train_opd.roll(run), Metrics()
        found = measure(lambda: train_opd.train_step(run, rollout.batches[0], metrics))
        return found, int(metrics.reduce()["tokens"])

    [found] = live(path, 1, on_student, [*folders, *overrides])
    return found


def largest_of_a_step(tmp_path, *overrides) -> tuple[int, int]:
    def measure(step):
        with Largest() as largest:
            step()
        return largest.numel

    return measured_step(tmp_path, measure, *overrides)


@pytest.mark.parametrize("options", [[], ["loss.mode=jsd_topk"], ["rollout.samples_per_prompt=2", "loss.token_fraction=0.5"]])
def test_a_default_step_forms_no_logits(tmp_path, options):
    """Catches dense logits, whole or by the chunk, on either side: the largest tensor is a head or its gradient."""
    largest, num_tokens = largest_of_a_step(tmp_path, "metrics.mass_every=0", *options)
    assert num_tokens >= 300 and largest <= VOCAB * 32 < num_tokens * VOCAB


@pytest.mark.parametrize("options", [["metrics.mass_every=1"], ["loss.mode=generalized_kl_topk"], ["loss.mode=reverse_kl_full"]])
def test_a_step_that_looks_at_the_vocabulary_does_so_by_the_chunk(tmp_path, options):
    """Catches a chunked path that still holds all tokens' logits at once."""
    largest, num_tokens = largest_of_a_step(tmp_path, "loss.chunk_size=40", "teacher.chunk_size=40", *options)
    assert largest <= 40 * VOCAB < num_tokens * VOCAB


def test_dense_logits_would_be_seen(tmp_path):
    """Negative control: one chunk of all tokens is a tensor of tokens x vocabulary."""
    largest, num_tokens = largest_of_a_step(tmp_path, "loss.mode=reverse_kl_full", "loss.chunk_size=100000")
    assert largest >= num_tokens * VOCAB


def test_memory_is_flat_in_the_vocabulary_and_linear_in_one_micro_batch(tmp_path):
    """Catches anything per token and vocabulary entry, and anything kept of all micro-batches of a step."""
    def peak(*options, vocab_size=2003):
        return measured_step(tmp_path, peak_extra_bytes, "metrics.mass_every=0", *options, vocab_size=vocab_size)[0]

    small, prompts = "train.micro_batch_tokens=400", "train.prompts_per_step=8"
    base, wide = peak(small, prompts), peak(small, prompts, vocab_size=8011)
    head_bytes = (8011 - 2003) * 32 * 4  # one row an entry: gradients of head and embedding, and the optimizer's state
    assert wide - base <= 5 * head_bytes < 320 * (8011 - 2003) * 4, "the last: one tensor of tokens x vocabulary"
    assert peak(small, "train.prompts_per_step=32") <= 1.25 * base, "four times the batch"
    assert 2 * base <= peak("train.micro_batch_tokens=1600", "train.prompts_per_step=32"), "four times a micro-batch"
