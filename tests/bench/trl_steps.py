# SPDX-License-Identifier: Apache-2.0
"""Steps of TRL's DistillationTrainer, one for each line on stdin; answers "SECONDS TOKENS", tokens seen so far.

    python tests/bench/trl_steps.py STUDENT TEACHER PROMPTS NEW_TOKENS       # bench_step.py runs it

Each step uses all prompts of the file, and every response has NEW_TOKENS tokens. Settings, to TRL's advantage where
there is a choice: fp32 as on our side, no activation recomputation (its default is to recompute), all prompts in one
batch without accumulation, no logging, no checkpoints, dynamic KV cache and SDPA (transformers' defaults), reverse KL
(beta 1, its default), its own AdamW. The end-of-text id is suppressed by min_new_tokens.
"""
from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import DistillationConfig, DistillationTrainer


class Turns(TrainerCallback):
    """Waits for its turn before each step; says afterwards how long the step took."""

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if not sys.stdin.readline():
            raise SystemExit(0)
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        print(time.perf_counter() - self.began, state.num_input_tokens_seen, file=ANSWERS, flush=True)


def config(folder: str, num_prompts: int, new_tokens: int) -> DistillationConfig:
    return DistillationConfig(
        folder, max_steps=10**6, per_device_train_batch_size=num_prompts, max_completion_length=new_tokens,
        generation_kwargs={"min_new_tokens": new_tokens}, temperature=1.0, beta=1.0, bf16=False, use_cpu=True,
        gradient_checkpointing=False, model_init_kwargs={"dtype": "float32"},
        teacher_model_init_kwargs={"dtype": "float32"}, shuffle_dataset=False, disable_tqdm=True, report_to="none",
        save_strategy="no", logging_strategy="no", dataloader_pin_memory=False)


def main(student: str, teacher: str, prompts: str, new_tokens: str) -> None:
    messages = [json.loads(line)["messages"] for line in Path(prompts).read_text().splitlines()]
    dataset = Dataset.from_list([{"prompt": prompt} for prompt in messages * 100])  # an epoch is longer than the match
    with tempfile.TemporaryDirectory() as folder:
        DistillationTrainer(student, teacher, config(folder, len(messages), int(new_tokens)), train_dataset=dataset,
                            processing_class=AutoTokenizer.from_pretrained(student), callbacks=[Turns()]).train()


if __name__ == "__main__":
    ANSWERS, sys.stdout = sys.stdout, sys.stderr  # what others print must not stand between the answers
    main(*sys.argv[1:])
