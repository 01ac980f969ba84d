# SPDX-License-Identifier: Apache-2.0
"""Dealing, packing and collating: every response token counts once, padding and prompts never."""
from __future__ import annotations

import random

import torch

from distill_core.generate import Sample
from distill_core.rollout import Packer, Row, claim, collate, deal, plan_batches, repetition_frac

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


def test_packer_fills_batches_of_like_rows_within_the_budget_and_loses_none():
    """Catches a row that is lost or sent twice, a batch beyond the budget, nothing going out before the last row, and
    short rows padded to long ones."""
    rng = random.Random(2)
    for budget in (1, 64, 500, 10**6):
        rows = [Row(sample([1] * rng.randint(1, 9), [2] * rng.randint(1, 200)), index) for index in range(60)]
        packer, early = Packer(budget), []
        for row in rows:
            early += packer.add(row)
        rest = packer.rest()
        assert sorted(row.route for batch in early + rest for row in batch) == list(range(60)) and packer.rest() == []
        lengths = [[row.num_tokens for row in batch] for batch in early + rest]
        assert all(len(batch) == 1 or len(batch) * max(batch) <= budget for batch in lengths)
        assert bool(early) == (budget < 10**6)
        assert all(max(batch) <= 1.2 * min(batch) for batch in lengths[:len(early)])


def test_claim_gives_each_index_once_however_the_ranks_interleave():
    """Catches prompts that two ranks sample, or none does, and a shared pool that one rank could take alone."""
    rng = random.Random(3)
    for num_ranks in (1, 2, 5):
        dealt = deal([rng.randint(1, 9) for _ in range(23)], num_ranks)
        turns = iter(range(1000))
        queues = [claim(dealt, rank, lambda: next(turns)) for rank in range(num_ranks)]
        taken = [[] for _ in range(num_ranks)]
        live = set(range(num_ranks))
        while live:
            rank = rng.choice(sorted(live))
            index = next(queues[rank], None)
            live -= {rank} if index is None else set()
            taken[rank] += [] if index is None else [index]
        assert sorted(i for part in taken for i in part) == list(range(23))
        assert all(part[:len(own) // 2] == own[:len(own) // 2] for part, own in zip(taken, dealt))


def test_collate_keeps_every_record_beside_its_token():
    """Catches a shift by one, counted padding or prompts, rows in another order than their captured ids, and an EOS that
    is dropped because it is also the padding."""
    eos = 0  # also the padding value
    samples = [sample([5, 6], [7, 8, eos]), sample([9], [1]), sample([3, 4, 2, 2], []), sample([1, 1], [eos])]
    batch = collate([Row(s, i % 2) for i, s in enumerate(samples)], top_k=K, token_fraction=1.0, device=CPU)
    assert batch.tokens_BT.tolist() == [[5, 6, 7, 8, 0], [9, 1, 0, 0, 0], [3, 4, 2, 2, 0], [1, 1, 0, 0, 0]]
    assert batch.lengths_B.tolist() == [5, 2, 4, 3] and batch.counts_B.tolist() == [3, 1, 0, 1]
    assert batch.positions_N.tolist() == [1, 2, 3, 0, 1] and batch.num_tokens == 5
    assert batch.targets_N.tolist() == [7, 8, eos, 1, eos] and batch.num_positions == 5
    assert batch.route_B.tolist() == [0, 1, 0, 1] and batch.route_N.tolist() == [0, 0, 0, 1, 1]
    following = torch.cat([batch.tokens_BT[:, 1:], torch.full((4, 1), -1)], dim=1)  # the token that position t predicts
    assert following.flatten()[batch.rows_N].tolist() == batch.targets_N.tolist()
    assert batch.ids_NK[:, 0].tolist() == batch.targets_N.tolist() and (-batch.logprobs_N).tolist() == batch.targets_N.tolist()


def test_selected_positions_are_those_of_highest_entropy_with_their_records():
    """Catches a selection over the batch instead of each response, and records of other positions than the selected."""
    samples = [sample([5, 6], [7, 3, 9, 4, 8]), sample([1], [2, 6])]  # entropies rise with the token's id
    batch = collate([Row(s) for s in samples], top_k=K, token_fraction=0.5, device=CPU)
    assert batch.counts_B.tolist() == [3, 1] and batch.targets_N.tolist() == [7, 9, 8, 6]
    assert batch.ids_NK[:, 0].tolist() == batch.targets_N.tolist() and batch.num_tokens == 7
    following = torch.cat([batch.tokens_BT[:, 1:], torch.full((2, 1), -1)], dim=1)
    assert following.flatten()[batch.rows_N].tolist() == batch.targets_N.tolist()


def test_a_batch_without_rows_contributes_nothing_and_has_the_right_shapes():
    """Catches a rank without samples that crashes, or that adds a token to the global count."""
    for rows in ([], [Row(sample([5, 6], []))]):
        batch = collate(rows, top_k=K, token_fraction=0.3, device=CPU)
        assert batch.num_positions == batch.num_tokens == 0 and batch.tokens_BT.shape[0] == 1
        assert batch.ids_NK.shape == (0, K) and batch.ids_NK.dtype == torch.long and batch.rows_N.shape == (0,)
        assert batch.topk_logprobs_NK.shape == (0, K) and batch.logprobs_N.shape == batch.entropy_N.shape == (0,)


def test_repetition_frac():
    """Catches an alarm blind to loops, or one that fires on short or varied responses."""
    assert repetition_frac([1, 2] * 50) > 0.9 and repetition_frac(list(range(100))) == 0.0
    assert repetition_frac([1, 1, 1]) == 0.0 and repetition_frac([]) == 0.0
