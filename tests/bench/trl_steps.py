# SPDX-License-Identifier: Apache-2.0
"""Steps of TRL's DistillationTrainer, one for each line on stdin; answers "SECONDS TOKENS", tokens seen so far.

    python tests/bench/trl_steps.py STUDENT TEACHER PROMPTS LENGTHS       # bench_step.py runs it

Each step uses all prompts of the file; LENGTHS, as 12,30,8, are those of their responses. Settings, to TRL's advantage where
there is a choice: fp32 as on our side, no activation recomputation (its default is to recompute), all prompts in one
batch without accumulation, no logging, no checkpoints, dynamic KV cache and SDPA (transformers' defaults), reverse KL
(beta 1, its default), its own AdamW. End of text is what each response has at its length, and nowhere else.
"""
from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import torch
from datasets import Dataset
from transformers import AutoTokenizer, LogitsProcessor, LogitsProcessorList, TrainerCallback
from trl import DistillationConfig, DistillationTrainer


class Turns(TrainerCallback):
    """Waits for its turn before each step; says afterwards how long the step took."""

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if not sys.stdin.readline():
            raise SystemExit(0)
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        print(time.perf_counter() - self.began, state.num_input_tokens_seen, file=ANSWERS, flush=True)


class EndAt(LogitsProcessor):
    """Makes end of text the last token of each row's own length."""

    def __init__(self, lengths: list[int], end: int) -> None:
        self.lengths, self.end, self.start = torch.tensor(lengths), end, None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.start = self.start or input_ids.shape[1]
        ends = self.lengths == input_ids.shape[1] - self.start + 1
        scores[:, self.end] = torch.where(ends, 1e9, -torch.inf)
        return scores


def with_lengths(generate, lengths: list[int], end: int):
    """A model's `generate` whose rows have these lengths."""
    return lambda *args, **settings: generate(
        *args, **settings, logits_processor=LogitsProcessorList([EndAt(lengths, end)]))


def config(folder: str, lengths: list[int]) -> DistillationConfig:
    return DistillationConfig(
        folder, max_steps=10**6, per_device_train_batch_size=len(lengths), max_completion_length=max(lengths),
        temperature=1.0, beta=1.0, bf16=False, use_cpu=True,
        gradient_checkpointing=False, model_init_kwargs={"dtype": "float32"},
        teacher_model_init_kwargs={"dtype": "float32"}, shuffle_dataset=False, disable_tqdm=True, report_to="none",
        save_strategy="no", logging_strategy="no", dataloader_pin_memory=False)


def main(student: str, teacher: str, prompts: str, lengths: str) -> None:
    lengths = [int(length) for length in lengths.split(",")]
    messages = [json.loads(line)["messages"] for line in Path(prompts).read_text().splitlines()]
    dataset = Dataset.from_list([{"prompt": prompt} for prompt in messages * 100])  # an epoch is longer than the match
    tokenizer = AutoTokenizer.from_pretrained(student)
    with tempfile.TemporaryDirectory() as folder:
        trainer = DistillationTrainer(student, teacher, config(folder, lengths), train_dataset=dataset,
                                      processing_class=tokenizer, callbacks=[Turns()])
        trainer.model.generate = with_lengths(trainer.model.generate, lengths, tokenizer.eos_token_id)
        trainer.train()


if __name__ == "__main__":
    ANSWERS, sys.stdout = sys.stdout, sys.stderr  # what others print must not stand between the answers
    main(*sys.argv[1:])
