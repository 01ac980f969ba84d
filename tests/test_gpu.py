# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show: captured graphs decode as the eager step does, the sparse head is right there, bf16 rounds
and nothing more. Run with `pytest -m gpu`, or with the benchmark by `launch/gpu_check.sh`."""
from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from distill_core import generate as generate_module
from distill_core.generate import Engine, Sample
from distill_core.losses_kl import reverse_kl_topk
from distill_core.models import lm
from distill_core.topk_logprobs import sparse_head_logits

sys.path.append(str(Path(__file__).resolve().parent / "bench"))
from bench_gpu import agreement, peak_bytes, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

V = 4099
RAW = dict(model_type="qwen3", vocab_size=V, hidden_size=256, intermediate_size=512, num_hidden_layers=4, head_dim=64,
           num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True)
PROMPTS = [[(7 * i + j) % V for j in range(1 + 37 * i % 150)] for i in range(40)]
LIMITS = [1 + 53 * i % 200 for i in range(40)]


def model_on_gpu(dtype: torch.dtype) -> lm.CausalLM:
    model = lm.CausalLM(lm.config_from_hf(RAW, source="config.json"))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, 1.0 if name.endswith("norm.weight") else 0.0, 0.06, generator=generator)
    return model.to("cuda", dtype).requires_grad_(False).fuse()


def samples_of(engine: Engine, **settings: object) -> list[Sample]:
    samples = dict(engine.stream(PROMPTS, max_new_tokens=LIMITS, n=2, batch_size=24, capture_top_k=16, stop_ids=(3, 99),
                                 **settings))
    return [samples[place] for place in range(len(samples))]


def assert_alike(left: list[Sample], right: list[Sample], *, margin: float) -> None:
    """Token for token, up to the first one of a sample whose uniform lies within `margin` of an edge of the CDF."""
    differ = 0
    for one, other in zip(left, right, strict=True):
        pairs = list(zip(one.tokens, other.tokens))
        first = next((t for t, (a, b) in enumerate(pairs) if a != b), None)
        if first is not None:
            differ += 1
            assert float(one.cdf_margins[first]) < margin, (first, one.cdf_margins[first])
    assert differ <= len(left) // 4, differ


@pytest.mark.parametrize("dtype, margin", [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_graphs_decode_as_the_eager_step_does(monkeypatch, dtype, margin):
    """Catches a step that cannot be captured, a replay on stale memory, and new weights that graphs do not see."""
    model = model_on_gpu(dtype)
    engine = Engine(model)
    for step, settings in enumerate([{}, {"temperature": 0.7, "top_p": 0.9}, {}]):
        samples = samples_of(engine, step=step, **settings)
        with monkeypatch.context() as patch:
            patch.setattr(generate_module, "uses_graphs", lambda device: False)
            patch.setattr(generate_module, "look_interval", lambda device: 1)
            assert_alike(samples_of(Engine(model), step=step, **settings), samples, margin=margin)
        model.model.layers[1].mlp.down_proj.weight.mul_(1.1)  # in place: the graphs stay
    assert len(engine.graphs) > 5


def test_decoding_does_not_wait_for_the_device():
    """Catches a synchronisation hidden in the step (an item, a mask that is indexed): none between two looks."""
    model = model_on_gpu(torch.bfloat16)
    batch = generate_module._Batch(model, generate_module._Sizes(8, 200, 64, 16))
    batch.ended_B.fill_(False)
    with torch.no_grad():
        generate_module.decode_step(model, batch.window(8, 128), generate_module.Sampling(capture_top_k=16))
        torch.cuda.set_sync_debug_mode("error")
        try:
            generate_module.decode_step(model, batch.window(8, 128), generate_module.Sampling(capture_top_k=16))
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_an_engine_gives_its_memory_back():
    """Catches graphs or caches that outlive `release`."""
    model = model_on_gpu(torch.bfloat16)
    before = torch.cuda.memory_allocated()
    engine = Engine(model)
    samples_of(engine)
    assert torch.cuda.memory_allocated() > before
    engine.release()
    assert torch.cuda.memory_allocated() <= before + 64 * 2**20, "the workspaces of libraries may stay"


# --- what trains ----------------------------------------------------------------------------------------------------

def head_inputs(dtype: torch.dtype, *, vocab: int, rows: int = 300) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, head, ids with many repetitions, the teacher's logits: the same numbers in each dtype."""
    generator = torch.Generator().manual_seed(0)
    hidden_ND, weight_VD = torch.randn(rows, 128, generator=generator), torch.randn(vocab, 128, generator=generator)
    ids_NK = torch.randint(64, (rows, 16), generator=generator)
    teacher_NK = torch.randn(rows, 16, generator=generator)
    return (hidden_ND.to("cuda", dtype).requires_grad_(), (0.1 * weight_VD).to("cuda", dtype).requires_grad_(),
            ids_NK.cuda(), teacher_NK.cuda())


def head_grads(inputs: tuple[Tensor, Tensor, Tensor, Tensor], logits_NK: Tensor) -> tuple[Tensor, Tensor]:
    return torch.autograd.grad(reverse_kl_topk(logits_NK, inputs[3]).sum(), inputs[:2])


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_sparse_head_equals_the_dense_one(dtype, tolerance):
    """Catches a scatter on CUDA that loses or doubles rows, and sums in bf16."""
    inputs = hidden_ND, weight_VD, ids_NK, _ = head_inputs(dtype, vocab=V)
    sparse_NK = sparse_head_logits(hidden_ND, weight_VD, ids_NK)
    wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs]
    dense_NK = (wide[0] @ wide[1].t()).gather(1, ids_NK)
    for sparse, dense in zip((sparse_NK, *head_grads(inputs, sparse_NK)), (dense_NK, *head_grads(inputs, dense_NK))):
        assert relative_error(sparse.detach(), dense.detach()) < tolerance


def test_deterministic_head_repeats_bit_for_bit():
    """Catches atomics in the way that is said to be deterministic."""
    inputs = head_inputs(torch.bfloat16, vocab=V, rows=4000)
    first, *others = (head_grads(inputs, sparse_head_logits(*inputs[:3], deterministic=True)) for _ in range(5))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other))


def test_memory_of_the_head_is_flat_in_the_vocabulary():
    """Catches an [N, V]: only what has the head's own size may grow."""
    def extra(vocab: int) -> int:
        inputs = head_inputs(torch.float32, vocab=vocab, rows=20_000)
        return peak_bytes(lambda: head_grads(inputs, sparse_head_logits(*inputs[:3])), torch.device("cuda"))

    extra(1_000)  # workspaces of libraries
    small, large = extra(1_000), extra(50_000)
    assert large - small < 3 * 49_000 * 128 * 4, "a few [V, D]; one [N, V] would be 4 GB"


def test_bf16_is_a_rounding_of_fp32():
    """Catches a bf16 forward, loss or gradient that sums in bf16, or takes a kernel that computes something else."""
    assert [row for row in agreement(torch.device("cuda"), 8) if row.verdict != "reached"] == []
