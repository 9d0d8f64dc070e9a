"""Losses and gradient sums refuse what they would get wrong; elsewhere they are compared with one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from layerwise import LocalWorld, reduce_gradients, sum_gradients, token_loss
from layerwise.errors import SpecError
from layerwise.groups import World
from layerwise.train.launch import launch


def test_a_batch_dimension_is_refused() -> None:
    with pytest.raises(SpecError, match=r"logits \(1, 3, 5\) and shift_labels \(1, 3\) must be \[tokens, vocabulary\]"):
        token_loss(torch.zeros(1, 3, 5), torch.zeros(1, 3, dtype=torch.int64), 3)


def test_gradients_of_several_dtypes_are_summed_in_the_widest() -> None:
    """1 + 2**-40 on each of two ranks is 2 + 2**-39 in float64, and 2 in float32."""

    def on_rank(world: World) -> Tensor:
        weights = [nn.Parameter(torch.zeros(1, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
        for weight in weights:
            weight.grad = torch.full_like(weight, 1 + 2**-40)
        reduce_gradients(weights, world)
        assert [weight.grad.dtype for weight in weights if weight.grad is not None] == [torch.float32, torch.float64]
        assert weights[1].grad is not None
        return weights[1].grad

    for grad in LocalWorld(2, 1).run(on_rank):
        assert grad.item() == 2 + 2**-39


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(SpecError, match=r"weight of shape \(5, 2\) is sparse"):
        LocalWorld(2, 1).run(lambda world: reduce_gradients(embedding.parameters(), world))


def _on_sharded_rank(world: World, device: torch.device) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, whole = (nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).double() for _ in range(2))
    whole.load_state_dict(model.state_dict())
    with pytest.raises(SpecError, match="nothing in this Sequential is sharded: call fully_shard first"):
        sum_gradients(model)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    sum_gradients(model)
    rows = torch.randn(world.num_ranks, 4, dtype=torch.float64)
    model(rows[world.rank : world.rank + 1]).square().sum().backward()
    whole(rows).square().sum().backward()
    for ours, expected in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), expected.grad, rtol=1e-12, atol=1e-14)  # type: ignore[union-attr]
    with pytest.raises(SpecError, match=r"weight of shape .* is sharded: FSDP reduces its gradient"):
        reduce_gradients(model.parameters(), world)


@pytest.mark.ranks
def test_what_fsdp_has_sharded_sums_gradients() -> None:
    launch(_on_sharded_rank, num_ranks=2, ranks_per_node=1, device="cpu", timeout_s=100)
