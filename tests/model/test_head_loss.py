"""The loss over a large vocabulary in chunks: the same numbers, and never the logits of all tokens."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from layerwise.loss import head_loss, token_loss

VOCAB = 50


def inputs(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, 6, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(VOCAB, 6, dtype=torch.float64, generator=generator).requires_grad_()
    labels = torch.randint(0, VOCAB, (num_tokens,), generator=generator)
    labels[::3] = -100
    return hidden, weight, labels


@pytest.mark.parametrize("num_tokens", [0, 1, 4, 5, 11])
def test_chunks_change_no_loss_and_no_gradient(num_tokens: int) -> None:
    hidden, weight, labels = inputs(num_tokens)
    ours = head_loss(hidden, weight, labels, 7, chunk_tokens=4)
    expected = token_loss(F.linear(hidden, weight), labels, 7)
    torch.testing.assert_close(ours, expected, rtol=1e-14, atol=0)
    for grad, other in zip(*(torch.autograd.grad(x, [hidden, weight]) for x in (ours, expected)), strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-12, atol=1e-15)


def test_tokens_without_any_label_have_no_loss() -> None:
    hidden, weight, labels = inputs(11)
    loss = head_loss(hidden, weight, torch.full_like(labels, -100), 0, chunk_tokens=4)
    assert loss == 0
    assert all(not grad.any() for grad in torch.autograd.grad(loss, [hidden, weight]))


class LiveLogits(TorchDispatchMode):
    """The most rows, at any time, of all tensors that have a vocabulary dim and are not of the weight's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dim() == 2 and out.shape[1] == VOCAB and out.shape[0] != 6:
            self.seen.add(out)
            self.most = max(self.most, sum(len(tensor) for tensor in self.seen))
        return out


def test_no_more_logits_exist_than_those_of_a_chunk() -> None:
    hidden, weight, labels = inputs(80)
    with LiveLogits() as live:
        head_loss(hidden, weight, labels, 7, chunk_tokens=4).backward()
    assert 4 <= live.most <= 5 * 4, "logits, their logarithms and gradients of one chunk"
