"""No pass is added, but by the strategy made of passes: what a model's forward and backward really call, by rank."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from layerwise import LocalWorld, PlannedLoader, balance_loss, token_loss
from layerwise.groups import World
from layerwise.plan import HOME
from layerwise.traffic import exchange_blocks, move_blocks, shard_blocks
from tests.runtime.test_strategies import LENGTHS, STRATEGIES, make_samples, model_for, planner_for

NUM_RANKS = 16


class CountingComm:
    """A comm that notes each collective."""

    def __init__(self, comm: object, calls: Counter) -> None:
        self.comm, self.block, self.peer, self.calls = comm, comm.block, comm.peer, calls

    def start_all_to_all(self, send, recv, send_splits, recv_splits):
        assert send_splits[self.peer] == 0, "rows to oneself stay off the wire"
        self.calls["all_to_all"] += 1
        return self.comm.start_all_to_all(send, recv, send_splits, recv_splits)

    def all_reduce(self, tensor):
        self.calls["all_reduce"] += 1
        self.comm.all_reduce(tensor)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_all_to_alls_per_site_and_nothing_else(strategy: str) -> None:
    model = model_for((8, 2))
    lengths = LENGTHS["one long"]
    planner = planner_for(strategy, NUM_RANKS, model.spec, lengths)
    dataset = [s.input_ids.numpy() for s in make_samples(lengths, model.spec.vocab_size)]

    def on_rank(world: World):
        calls: Counter = Counter()
        plain_comm = world.comm
        world.comm = lambda block: None if block is None else CountingComm(plain_comm(block), calls)
        (step,) = PlannedLoader(
            dataset=dataset, planner=lambda n: planner(tuple(n)), world=world, steps=[range(len(dataset))]
        )
        for microbatch in step.microbatches:
            with microbatch.routes():
                output = model(microbatch.input_ids, microbatch.position_ids)
                between_layers = Counter(calls)
                loss = token_loss(output.logits, microbatch.shift_labels, step.num_valid_tokens)
                loss = loss + balance_loss(
                    output.router.counts,
                    output.router.prob_sums,
                    experts_per_token=2,
                    num_tokens=step.num_tokens,
                )
            after_loss = Counter(calls)
            torch.autograd.grad(loss, list(model.parameters()))
        assert len(step.microbatches) == 1
        return step.plan, between_layers, after_loss - between_layers, calls - after_loss

    for rank, (plan, forward, at_loss, backward) in enumerate(LocalWorld(NUM_RANKS, 8).run(on_rank)):
        microbatch = plan.microbatches[0]
        layers = sum(
            model.spec.num_layers_of(kind)
            for kind in plan.attention
            if any(rank in range(b.lo, b.hi) for b in exchange_blocks(microbatch, kind, NUM_RANKS, 8))
        )
        # One full layer, the first: a strategy that keeps it elsewhere moves hidden states there and back.
        moves = 2 * any(
            rank in range(b.lo, b.hi)
            for kind in microbatch.shards_by_kind
            for b in move_blocks(microbatch, HOME, kind, NUM_RANKS, 8)
        )
        assert strategy == "redistribute" or not moves
        shares_samples = any(rank in range(b.lo, b.hi) for b in shard_blocks(microbatch, NUM_RANKS, 8))
        assert forward == backward == Counter({"all_to_all": 2 * layers + moves} if layers + moves else {})
        assert at_loss == Counter({"all_reduce": 1} if shares_samples else {})
