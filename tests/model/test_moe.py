"""Experts and router against a loop over tokens."""

import pytest
import torch
from torch import Tensor

from layerwise.model.moe import MoE, grouped_matmul
from layerwise.spec import ModelSpec

SPEC = ModelSpec(
    num_layers=1,
    layer_types=("full_attention",),
    hidden_size=8,
    vocab_size=2,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    num_experts=4,
    experts_per_token=2,
    moe_intermediate_size=8,
)


def build(dtype: torch.dtype) -> MoE:
    moe = MoE(SPEC, dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return moe


def rows(num_rows: int, dtype: torch.dtype = torch.float64, width: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_rows, width, generator=generator).to(dtype).requires_grad_()


def one_token(moe: MoE, x: Tensor) -> Tensor:
    probs = (moe.router.weight @ x).softmax(0)
    best = probs.detach().argsort(descending=True)[:2].tolist()
    total = sum(probs[e] for e in best)
    output = torch.zeros_like(x)
    for e in best:
        gate, up = (x @ moe.experts.gate_up[e]).split(8)
        output = output + probs[e] / total * ((torch.nn.functional.silu(gate) * up) @ moe.experts.down[e])
    return output


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_experts_equal_a_loop_over_tokens(dtype: torch.dtype, tolerance: float) -> None:
    moe, x = build(dtype), rows(9, dtype)
    weight = torch.randn(9, 8, generator=torch.Generator().manual_seed(2)).to(dtype)
    inputs = [x, *moe.parameters()]
    actual, _ = moe(x, torch.zeros(9, dtype=torch.int64), 1)
    expected = torch.stack([one_token(moe, token) for token in x])
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    for grad, other in zip(
        torch.autograd.grad((actual * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(grad, other, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[0, 5, 0, 3], [8, 0, 0, 0], [0, 0, 0, 0]])
def test_groups_without_rows_get_zero_gradients(dtype: torch.dtype, counts: list[int]) -> None:
    x = rows(sum(counts), dtype)
    weight = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(3)).to(dtype).requires_grad_()
    out = grouped_matmul(x, weight, torch.tensor(counts))
    expected = torch.cat([part @ matrix for part, matrix in zip(x.split(counts), weight, strict=True)])
    torch.testing.assert_close(out, expected)
    (out * 2).square().sum().backward()
    assert weight.grad.abs().sum((1, 2)).ne(0).tolist() == [count > 0 for count in counts]


def test_widths_that_the_kernel_does_not_take_still_work() -> None:
    x, weight = rows(5, torch.float32, width=7), torch.ones(2, 7, 3)
    out = grouped_matmul(x, weight, torch.tensor([2, 3]))
    torch.testing.assert_close(out, x.sum(1, keepdim=True).expand(5, 3))


def test_router_sums_by_piece_need_no_order() -> None:
    moe, x = build(torch.float64), rows(6)
    piece = torch.tensor([2, 0, 2, 0, 2, 0])
    _, stats = moe(x, piece, 4)
    probs = (x @ moe.router.weight.T).softmax(-1)
    for p in range(4):
        mine = probs[piece == p]
        chosen = [int(e) for token in mine for e in token.argsort(descending=True)[:2]]
        assert stats.counts[p].tolist() == [chosen.count(e) for e in range(4)]
        torch.testing.assert_close(stats.prob_sums[p], mine.sum(0))


def test_router_stays_in_float32_under_autocast() -> None:
    moe, x = build(torch.float32), rows(6, torch.float32)
    piece = torch.zeros(6, dtype=torch.int64)
    output, stats = moe(x, piece, 1)
    with torch.autocast("cpu", torch.bfloat16):
        low_output, low_stats = moe(x, piece, 1)
    assert low_output.dtype == torch.bfloat16
    assert torch.equal(low_stats.prob_sums, stats.prob_sums)
    torch.testing.assert_close(low_output.float(), output, rtol=0.05, atol=0.5)
