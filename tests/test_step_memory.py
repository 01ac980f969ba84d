# SPDX-License-Identifier: Apache-2.0
"""What a training step may hold: nothing of tokens x vocabulary, on the student or on the teacher."""
from __future__ import annotations

import logging

import pytest
import torch
from test_train_opd import live
from tiny import write_config, write_lm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train_opd
from distill_core.metrics import Metrics

VOCAB = 5003


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation gives, backward and custom functions included."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))])
        return result


def largest_of_a_step(tmp_path, *overrides) -> tuple[int, int]:
    """(elements of the largest tensor of a step with an inline teacher, number of response tokens)."""
    folders = [f"{role}.path={write_lm(tmp_path / f'wide_{role}', seed=1, vocab_size=VOCAB)}"
               for role in ("student", "teacher")]
    path = write_config(tmp_path, topology__teacher_ranks=0, train__micro_batch_tokens=4000, teacher__chunk_size=9,
                        rollout__max_new_tokens=40, rollout__stop_ids=[], train__prompts_per_step=8)

    def on_student(job, world):
        run = train_opd.build_student(job, world, logging.getLogger("test"))
        run.teachers = train_opd.connect_teachers(job, world, probing=False)
        rollout, metrics = train_opd.roll(run), Metrics()
        with Largest() as largest:
            train_opd.train_step(run, rollout.batches[0], metrics)
        return largest.numel, int(metrics.reduce()["tokens"])

    [found] = live(path, 1, on_student, [*folders, *overrides])
    return found


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
