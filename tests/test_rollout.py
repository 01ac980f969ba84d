# SPDX-License-Identifier: Apache-2.0
"""Dealing, packing and collating: every response token counts once, padding and prompts never."""
from __future__ import annotations

import random

import torch

from distill_core.generate import Sample
from distill_core.losses_kl import response_rows
from distill_core.rollout import collate, deal, pack, plan_batches, repetition_frac

CPU, K = torch.device("cpu"), 3


def sample(prompt: list[int], tokens: list[int]) -> Sample:
    """Records that name their token, so that a mix-up shows."""
    values = torch.tensor([float(token) for token in tokens])
    ids = torch.tensor([[token, token + 1, token + 2] for token in tokens], dtype=torch.int32).reshape(-1, K)
    return Sample(prompt, tokens, -values, ids, -ids.float(), values / 10, True, values)


def test_deal_is_a_balanced_partition_and_pure():
    """Catches prompts sampled twice or never, ranks with all the long ones, and an order that a resume would not repeat."""
    rng = random.Random(0)
    for num_ranks in (1, 2, 3, 5):
        for count in (0, 1, 4, 33):
            costs = [rng.randint(1, 50) for _ in range(count)]
            dealt = deal(costs, num_ranks)
            assert sorted(i for part in dealt for i in part) == list(range(count)) and dealt == deal(list(costs), num_ranks)
            assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
            if count == 33:
                sums = [sum(costs[i] for i in part) for part in dealt]
                assert max(sums) - min(sums) <= 2 * max(costs)


def test_plan_batches_respects_the_budget_and_covers_everything():
    """Catches a micro-batch beyond the memory it was planned for; only a single longer row may exceed it."""
    rng = random.Random(1)
    for budget in (1, 16, 64, 10**6):
        lengths = [rng.randint(1, 40) for _ in range(30)]
        batches = plan_batches(lengths, budget)
        assert sorted(i for batch in batches for i in batch) == list(range(30))
        assert all(len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget for batch in batches)
    assert plan_batches([], 8) == []


def test_response_rows_by_brute_force():
    """Catches a shift by one, counted padding, a counted prompt, and a row of one prompt token or no response."""
    rng, width = random.Random(2), 9
    for _ in range(200):
        lengths = [rng.randint(1, width) for _ in range(4)]
        starts = [rng.randint(1, length) for length in lengths]
        want = [row * width + t for row in range(4) for t in range(width) if starts[row] <= t + 1 < lengths[row]]
        assert response_rows(torch.tensor(starts), torch.tensor(lengths), width).tolist() == want


def test_collate_keeps_every_record_beside_its_token():
    """Catches rows in another order than their captured ids, and an EOS that is dropped because it is also the padding."""
    eos = 0  # also the padding value
    samples = [sample([5, 6], [7, 8, eos]), sample([9], [1]), sample([3, 4, 2, 2], []), sample([1, 1], [eos])]
    batch = collate(samples, top_k=K, device=CPU)
    assert batch.tokens_BT.tolist() == [[5, 6, 7, 8, 0], [9, 1, 0, 0, 0], [3, 4, 2, 2, 0], [1, 1, 0, 0, 0]]
    assert batch.lengths_B.tolist() == [5, 2, 4, 3] and batch.starts_B.tolist() == [2, 1, 4, 2]
    assert batch.targets_N.tolist() == [7, 8, eos, 1, eos] and batch.num_positions == 5
    following = torch.cat([batch.tokens_BT[:, 1:], torch.full((4, 1), -1)], dim=1)  # the token that position t predicts
    assert following.flatten()[batch.rows_N].tolist() == batch.targets_N.tolist()
    assert batch.ids_NK[:, 0].tolist() == batch.targets_N.tolist() and (-batch.logprobs_N).tolist() == batch.targets_N.tolist()


def test_padding_batches_contribute_nothing_and_have_the_right_shapes():
    """Catches a rank without samples that crashes, or that adds a token to the global count."""
    batches = pack([sample([5, 6], [7])], token_budget=8, num_batches=3, top_k=K, device=CPU)
    assert [batch.num_positions for batch in batches] == [1, 0, 0]
    for batch in batches[1:]:
        assert batch.tokens_BT.shape == (1, 1) and batch.ids_NK.shape == (0, K) and batch.ids_NK.dtype == torch.long
        assert batch.topk_logprobs_NK.shape == (0, K) and batch.logprobs_N.shape == batch.entropy_N.shape == (0,)
    only_empty = pack([sample([5, 6], [])], token_budget=8, num_batches=1, top_k=K, device=CPU)
    assert only_empty[0].num_positions == 0 and only_empty[0].ids_NK.shape == (0, K)


def test_repetition_frac():
    """Catches an alarm blind to loops, or one that fires on short or varied responses."""
    assert repetition_frac([1, 2] * 50) > 0.9 and repetition_frac(list(range(100))) == 0.0
    assert repetition_frac([1, 1, 1]) == 0.0 and repetition_frac([]) == 0.0
