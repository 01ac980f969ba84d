# SPDX-License-Identifier: Apache-2.0
"""From a model folder to a model: meta -> LoRA -> shard -> materialise -> load slices -> check what was loaded.

    model = load_lm("models/student")                                # plain, on CPU
    model = build_lm("models/teacher", mesh, device, dtype=torch.bfloat16, trainable=False)   # sharded
    replica = build_replica(model.config, device, torch.bfloat16, vocab_size=32000)
    module = build_flow("models/dit", read_adapter("models/dit"), mesh, device, dtype=torch.float32, trainable=True)

No rank ever holds a whole sharded model: each reads the rows it owns from the safetensors files.
"""
from __future__ import annotations

import time
import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from distill_core.fsdp import local, shard
from distill_core.generate import num_parked
from distill_core.lora import inject, named_adapter, reset_lora
from distill_core.models.lm import CausalLM, LMConfig, LMHead, config_from_hf
from distill_core.safetensors_io import TensorIndex, check_tensors, load_into, open_folder, read_json, shown

Progress = Callable[[int, int], None]  # bytes done, bytes in all


def read_lm_config(folder: str | Path) -> LMConfig:
    """config.json of a model folder; ValueError naming the file for anything that is missing or not supported."""
    path = Path(folder) / "config.json"
    raw = read_json(path, remedy="give a folder in Hugging Face format")
    try:
        return config_from_hf(raw, source=str(path))
    except ValueError as error:
        raise ValueError(shown(str(error), 500)) from None  # it quotes values, which may be of any length


def check_folder(folder: str | Path) -> LMConfig:
    """Validate config.json and every safetensors header against each other without reading weights."""
    return _open_lm(folder)[0]


def _open_lm(folder: str | Path) -> tuple[LMConfig, TensorIndex]:
    """config.json and the headers, found to describe the same tensors before anything is allocated."""
    config, index = read_lm_config(folder), open_folder(folder)
    if config.num_layers > len(index.entries):  # before minutes are spent on building them
        raise ValueError(f"{Path(folder) / 'config.json'}: num_hidden_layers is {config.num_layers}, but the folder "
                         f"holds {len(index.entries)} tensors; download it again")
    model = _possible(folder, lambda: _on_meta(config))
    check_tensors(index, dict(model.named_parameters()), allow_extra=_tolerated(config))
    return config, index


def _possible(folder: str | Path, build: Callable[[], nn.Module]) -> nn.Module:
    try:
        return build()
    except RuntimeError as error:  # of torch, also on meta, where a tensor has more bytes than can be counted
        raise ValueError(f"{Path(folder) / 'config.json'}: describes no possible model "
                         f"({shown(str(error))}); download it again") from None


def load_lm(folder: str | Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    """The whole model on CPU: `model(tokens_BT)` gives hidden states, `model.lm_head(hidden)` logits."""
    config, index = _open_lm(folder)
    model = _on_meta(config, dtype).to_empty(device="cpu")
    model.tie()
    _load(index, model, config)
    return model


def build_lm(folder: str | Path, mesh: DeviceMesh, device: torch.device, *, dtype: torch.dtype, trainable: bool,
             compute_dtype: torch.dtype | None = None, offload: bool = False,
             progress: Progress | None = None) -> CausalLM:
    """A sharded model on this rank's part of `mesh`; every rank of the mesh calls it.

    dtype: of the stored shards (fp32 master weights of a trained model); compute_dtype: of forward and backward.
    """
    config, index = _open_lm(folder)
    model = shard_meta(config, mesh, dtype=dtype, compute_dtype=compute_dtype, offload=offload, trainable=trainable)
    model.to_empty(device="cpu" if offload else device)
    if mesh.size() == 1:
        model.tie()  # not sharded, perhaps: then to_empty has given the head other memory
    assert not config.tied or model.lm_head.weight is model.model.embed_tokens.weight, "sharding untied the head"
    _load(index, model, config, progress)
    return model


def shard_meta(config: LMConfig, mesh: DeviceMesh, *, dtype: torch.dtype, trainable: bool,
               compute_dtype: torch.dtype | None = None, offload: bool = False) -> CausalLM:
    """The sharded model without storage: what `build_lm` fills, and all that a dry run needs."""
    model = _on_meta(config, dtype)
    model.requires_grad_(trainable)  # before the first forward: FSDP2 derives its reduce dtype from what is trainable
    shard(model, model.fsdp_units(), mesh, compute_dtype=None if compute_dtype == dtype else compute_dtype,
          offload=offload)
    return model


def build_head(folder: str | Path, mesh: DeviceMesh, device: torch.device, *, dtype: torch.dtype) -> LMHead:
    """A frozen sharded copy of a model's output head alone, for whole-vocabulary losses on the student ranks."""
    config, index = _open_lm(folder)
    with torch.device("meta"):
        head = LMHead(config.hidden_size, config.vocab_size, bias=False).to(dtype)
    head.requires_grad_(False)
    shard(head, [], mesh)
    head.to_empty(device=device)
    name = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
    load_into(index, {name: head.weight}, allow_extra=lambda other: True)
    _refuse_nonfinite(folder, dict(head.named_parameters()))
    return head


def build_replica(config: LMConfig, device: torch.device, dtype: torch.dtype, *, vocab_size: int) -> CausalLM:
    """A plain frozen model for sampling, fused, with the first `vocab_size` rows of embedding and head; to be filled by
    `fsdp.gather_into` after each optimizer step."""
    replica = _on_meta(replace(config, vocab_size=vocab_size), dtype).to_empty(device=device)
    replica.tie()
    return replica.requires_grad_(False).eval().fuse()


# --- flow models ----------------------------------------------------------------------------------------------------

class Architecture(Protocol):
    """What is needed here of an adapter of adapters.py."""

    def build(self) -> nn.Module: ...

    def fsdp_units(self, module: nn.Module) -> list[list[nn.Module]]: ...


class LoRA(NamedTuple):
    """adapters: name -> whether it is trained; each starts as a no-op, its A drawn from `seed` and its name."""

    adapters: dict[str, bool]
    targets: Sequence[str]
    rank: int
    alpha: float
    seed: int = 0


def load_flow(folder: str | Path, architecture: Architecture, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The whole module on CPU, in eval mode."""
    check_flow(folder, architecture)
    module = _flow_on_meta(architecture, dtype).to_empty(device="cpu")
    _load_flow(folder, module)
    return module.eval()


def build_flow(folder: str | Path, architecture: Architecture, mesh: DeviceMesh, device: torch.device, *,
               dtype: torch.dtype, trainable: bool, compute_dtype: torch.dtype | None = None, lora: LoRA | None = None,
               progress: Progress | None = None) -> nn.Module:
    """A sharded module on this rank's part of `mesh`; every rank of the mesh calls it.

    trainable: all parameters are trained (False with `lora`: only its adapters may be, in fp32). dtype: of the stored
    shards; compute_dtype: of forward and backward.
    """
    check_flow(folder, architecture)
    module = shard_flow(architecture, mesh, dtype=dtype, trainable=trainable, compute_dtype=compute_dtype, lora=lora)
    module.to_empty(device=device)
    _load_flow(folder, module, progress)
    for name in lora.adapters if lora else ():
        reset_lora(module, name, seed=zlib.crc32(f"{lora.seed} {name}".encode()))
    return module


def shard_flow(architecture: Architecture, mesh: DeviceMesh, *, dtype: torch.dtype, trainable: bool,
               compute_dtype: torch.dtype | None = None, lora: LoRA | None = None) -> nn.Module:
    """The sharded module without storage: what `build_flow` fills, and all that a dry run needs."""
    module = meta_flow(architecture, dtype=dtype, trainable=trainable, lora=lora)
    stored = torch.float32 if trainable or lora else dtype  # of what is trained
    shard(module, architecture.fsdp_units(module), mesh,
          compute_dtype=None if compute_dtype == stored else compute_dtype,
          cast_forward_inputs=False)  # the noise level must stay fp32; the module casts the rest
    return module


def meta_flow(architecture: Architecture, *, dtype: torch.dtype, trainable: bool,
              lora: LoRA | None = None) -> nn.Module:
    """The whole module without storage, with adapters, and with requires_grad as it is to be trained."""
    assert not (trainable and lora), "with adapters the base is frozen"
    module = _flow_on_meta(architecture, dtype)
    module.requires_grad_(trainable)  # before the first forward: FSDP2 derives its reduce dtype from what is trainable
    if lora is not None:
        inject(module, lora.targets, rank=lora.rank, alpha=lora.alpha, adapters=list(lora.adapters))
        for name, is_trained in lora.adapters.items():
            for _, parameter in named_adapter(module, name):
                parameter.requires_grad_(is_trained)
    return module


def check_flow(folder: str | Path, architecture: Architecture) -> None:
    """Validate every safetensors header against the architecture without reading weights."""
    module = _possible(folder, lambda: _flow_on_meta(architecture, torch.float32))
    check_tensors(open_folder(folder), dict(module.named_parameters()))


def _flow_on_meta(architecture: Architecture, dtype: torch.dtype) -> nn.Module:
    with torch.device("meta"):
        module = architecture.build().to(dtype)
    buffers = [name for name, _ in module.named_buffers()]
    if buffers:
        raise ValueError(f"{type(module).__name__}: buffer {buffers[0]} would be left uninitialised by a meta build "
                         "(compute it in the forward)")
    return module


def _load_flow(folder: str | Path, module: nn.Module, progress: Progress | None = None) -> None:
    weights = {name: parameter for name, parameter in module.named_parameters()
               if ".lora_A." not in name and ".lora_B." not in name}
    load_into(open_folder(folder), weights, progress=progress)
    _refuse_nonfinite(folder, weights)


# --- vocabularies ---------------------------------------------------------------------------------------------------

def common_vocab(student: LMConfig, teacher: LMConfig, num_ids: int | None) -> int:
    """Vocabulary on which student and teacher are compared.

    num_ids: 1 + the largest id that the tokenizers use. Heads padded to different sizes are cut to the smaller one,
    which is refused when a token in use would be lost, or when no tokenizer says which rows are padding.
    """
    smaller = min(student.vocab_size, teacher.vocab_size)
    if num_ids is not None and num_ids > smaller:
        raise ValueError(f"student.path, teacher.path: the tokenizer uses ids up to {num_ids - 1}, but the heads have "
                         f"{student.vocab_size} and {teacher.vocab_size} rows (use models of one tokenizer)")
    if student.vocab_size != teacher.vocab_size and num_ids is None:
        raise ValueError(f"student.path, teacher.path: the heads have {student.vocab_size} and {teacher.vocab_size} "
                         "rows and no tokenizer.json says which are padding (put the tokenizer into both folders)")
    return smaller


def _on_meta(config: LMConfig, dtype: torch.dtype = torch.float32) -> CausalLM:
    with torch.device("meta"):
        model = CausalLM(config).to(dtype)
    model.tie()
    assert not list(model.buffers()), "a buffer would be left uninitialised by a meta build"
    return model


def _tolerated(config: LMConfig) -> Callable[[str], bool]:
    """Names a folder may hold beside the parameters: the tied head again, rotary tables of old exports."""
    return lambda name: name.endswith("rotary_emb.inv_freq") or (config.tied and name == "lm_head.weight")


def _load(index: TensorIndex, model: CausalLM, config: LMConfig, progress: Progress | None = None) -> None:
    load_into(index, dict(model.named_parameters()), allow_extra=_tolerated(config), progress=progress)
    _refuse_nonfinite(index.folder, dict(model.named_parameters()))


def _refuse_nonfinite(folder: str | Path, weights: dict[str, Tensor]) -> None:
    for name, parameter in weights.items():
        if not torch.isfinite(local(parameter)).all():
            raise ValueError(f"{folder}: tensor {name} holds NaN or infinity; download or train it again")


def load_progress(folder: str | Path, *, prints: bool, beat: Callable[[], None] = lambda: None) -> Progress:
    """A callback for `build_lm` that says every 10 s how far a long load is, and calls `beat` after each tensor."""
    last = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal last
        if prints and time.monotonic() - last > 10:
            print(f"loading {folder}: {done / 2**30:.1f} of {total / 2**30:.1f} GiB on this rank", flush=True)
            last = time.monotonic()
        beat()

    return progress


# --- memory ---------------------------------------------------------------------------------------------------------

def memory_plan(student: LMConfig, teacher: LMConfig, *, num_students: int, num_servers: int,
                student_dtype: torch.dtype, rollout_dtype: torch.dtype, teacher_dtype: torch.dtype, offload: bool,
                recompute: bool, batch_rows: int, row_tokens: int, micro_batch_tokens: int, vocab_size: int,
                chunk_size: int, prompt_tokens: int | None = None,
                samples_per_prompt: int = 1) -> dict[str, dict[str, int]]:
    """Bytes by part for a "student" and a "teacher" rank; activations are an estimate, the rest is exact up to padding.

    num_servers: ranks of the teacher alone; 0 puts its shards on the student ranks.
    row_tokens: longest prompt and answer; prompt_tokens: longest prompt (default: as if it could be all of that).
    """
    num_student, num_teacher = _num_parameters(student), _num_parameters(teacher)
    width = student_dtype.itemsize
    largest = max(student.vocab_size * student.hidden_size, (num_student - student.vocab_size * student.hidden_size)
                  // student.num_layers)
    teacher_bytes = num_teacher * teacher_dtype.itemsize // (num_servers or num_students)
    teacher_shard = 0 if offload else teacher_bytes
    head_bytes = teacher.vocab_size * teacher.hidden_size * teacher_dtype.itemsize
    forward = micro_batch_tokens * max(4 * teacher.hidden_size, 3 * teacher.intermediate_size) * teacher_dtype.itemsize
    teacher_part = {"teacher shard": teacher_shard, "gathered teacher head": head_bytes,
                    "teacher chunk": 2 * chunk_size * vocab_size * 4, "teacher activations": forward}
    block = 8 * student.hidden_size + 4 * student.intermediate_size  # kept per token by one block's forward
    kept = student.num_layers * student.hidden_size + block if recompute else student.num_layers * block
    parts = {
        "weights": 4 * num_student // num_students, "gradients": 4 * num_student // num_students,
        "optimizer": 8 * num_student // num_students, "rollout replica": num_student * rollout_dtype.itemsize,
        "KV cache": kv_bytes(student, rollout_dtype, rows=batch_rows, row_tokens=row_tokens,
                             prompt_tokens=prompt_tokens or row_tokens, samples_per_prompt=samples_per_prompt),
        "sampling": 4 * batch_rows * 4 * vocab_size,  # logits, log-probabilities, probabilities and one to spare
        "gathered head and block": 2 * largest * width, "head gradient": 4 * vocab_size * student.hidden_size,
        "activations": micro_batch_tokens * kept * width,
    }
    if not num_servers:
        return {"student": parts | {"teacher head shard": head_bytes // num_students} | teacher_part}
    return {"student": parts | {"teacher head shard": head_bytes // num_students, "gathered teacher head": head_bytes},
            "teacher": teacher_part}


def kv_bytes(config: LMConfig, dtype: torch.dtype, *, rows: int, row_tokens: int, prompt_tokens: int,
             samples_per_prompt: int = 1) -> int:
    """Keys and values that a rollout engine of `rows` rows allocates: theirs, and those of prompts read ahead.

    row_tokens: longest prompt and answer; prompt_tokens: longest prompt.
    """
    token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
    parked = num_parked(rows, samples_per_prompt, prompt_tokens) * max(prompt_tokens - 1, 1)
    return token_bytes * (rows * (row_tokens - 1) + parked)


def largest_batch(config: LMConfig, dtype: torch.dtype, available_bytes: int, *, row_tokens: int, prompt_tokens: int,
                  samples_per_prompt: int = 1) -> int:
    """Most rows whose keys and values fit; 0 where not even one does."""
    size = partial(kv_bytes, config, dtype, row_tokens=row_tokens, prompt_tokens=prompt_tokens,
                   samples_per_prompt=samples_per_prompt)
    return bisect_right(range(1, 2**20), available_bytes, key=lambda rows: size(rows=rows))


def _num_parameters(config: LMConfig) -> int:
    return sum(parameter.numel() for parameter in _on_meta(config).parameters())
