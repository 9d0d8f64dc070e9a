"""The front of the kernels: segments, checks and the choice of a backend."""

from typing import Any

import pytest
import torch
from torch import Tensor

from layerwise import kernels
from layerwise.errors import SpecError
from layerwise.kernels import Segments, varlen_attention

CPU = torch.device("cpu")


def rows(tokens: int, heads: int, dim: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.ones(tokens, heads, dim, dtype=dtype)


def test_segments_count_their_rows() -> None:
    segments = Segments((3, 0, 2), (5, 4, 2))
    assert (segments.total_q, segments.total_k, segments.max_q, segments.max_k) == (5, 11, 3, 5)
    cu_q, cu_k = segments.cu_seqlens(CPU)
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert (cu_q.tolist(), cu_k.tolist()) == ([0, 3, 3, 5], [0, 5, 9, 11])
    assert segments.cu_seqlens(CPU)[0] is cu_q
    assert segments == Segments((3, 0, 2), (5, 4, 2))
    assert segments.with_queries == Segments((3, 2), (5, 2))


def test_no_segments_have_offsets_too() -> None:
    empty = Segments((), ())
    assert (empty.total_q, empty.max_k) == (0, 0)
    assert [x.tolist() for x in empty.cu_seqlens(CPU)] == [[0], [0]]


@pytest.mark.parametrize(
    ("q_lens", "k_lens", "message"),
    [
        ((3,), (2,), "segment 0 has 3 queries over 2 keys"),
        ((1, 2), (3,), "2 q_lens but 1 k_lens"),
        ((-1,), (2,), "-1"),
    ],
)
def test_impossible_segments_are_refused(q_lens: tuple[int, ...], k_lens: tuple[int, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Segments(q_lens, k_lens)


@pytest.mark.parametrize(
    ("q", "k", "v", "options", "message"),
    [
        (rows(6, 4, 8), rows(5, 2, 8), rows(5, 2, 8), {}, r"q has shape \(6, 4, 8\).*with 5 tokens"),
        (rows(4, 5, 8), rows(5, 2, 8), rows(5, 2, 8), {}, "tokens and heads look swapped"),
        (rows(5, 4, 8)[None], rows(5, 2, 8), rows(5, 2, 8), {}, r"\[tokens, heads, head_dim\]"),
        (rows(5, 4, 8), rows(5, 2, 8), rows(4, 2, 8), {}, "v has shape"),
        (rows(5, 4, 8), rows(5, 2, 6), rows(5, 2, 8), {}, "head_dim 8 but k has 6"),
        (rows(5, 4, 8), rows(5, 2, 8), rows(5, 1, 8), {}, "k has 2 heads but v has 1"),
        (rows(5, 4, 8), rows(5, 3, 8), rows(5, 3, 8), {}, r"4 query heads over 3 KV heads.*\[1, 2, 4\]"),
        (
            rows(5, 4, 8),
            rows(5, 2, 8),
            rows(5, 2, 8),
            {"sinks": torch.ones(2)},
            r"sinks has shape \(2,\).*\(4,\)",
        ),
        (rows(5, 4, 8), rows(5, 2, 8), rows(5, 2, 8), {"window": 0}, "window=0"),
        (rows(5, 4, 8), rows(5, 2, 8, torch.float32), rows(5, 2, 8), {}, "k is torch.float32"),
        (
            rows(5, 4, 8),
            rows(5, 2, 8),
            rows(5, 2, 8),
            {"backend": "fast"},
            "unknown.*'fast'.*auto, reference, sdpa",
        ),
    ],
)
def test_what_does_not_fit_is_refused(q: Tensor, k: Tensor, v: Tensor, options: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        varlen_attention(q, k, v, Segments((5,), (5,)), **options)


def test_auto_runs_on_cpu() -> None:
    q = torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(0))
    segments = Segments((5,), (5,))
    chosen, sdpa = (varlen_attention(q, q, q, segments, backend=backend) for backend in ("auto", "sdpa"))
    assert torch.equal(chosen, sdpa)


def test_flash_backends_run_only_where_they_can() -> None:
    half = torch.empty(1, 1, 64, dtype=torch.bfloat16, device="meta")
    assert kernels.choose_backend(half, half, None) == "sdpa"  # not CUDA


@pytest.mark.parametrize(
    ("dtype", "dim", "sinks", "flash_attn", "torch_varlen", "expected"),
    [
        (torch.bfloat16, 128, False, True, True, "flash"),
        (torch.float16, 256, False, True, True, "flash"),
        (torch.bfloat16, 128, False, False, True, "torch_varlen"),
        (torch.bfloat16, 128, False, False, False, "sdpa"),
        (torch.float32, 128, False, True, True, "sdpa"),
        (torch.bfloat16, 512, False, True, True, "sdpa"),
        (torch.bfloat16, 128, True, True, True, "sdpa"),
    ],
)
def test_auto_on_cuda(monkeypatch, dtype, dim, sinks, flash_attn, torch_varlen, expected) -> None:
    class OnCuda:
        is_cuda, shape = True, (1, 1, dim)

    OnCuda.dtype = dtype
    monkeypatch.setattr("layerwise.kernels.flash.has_flash", lambda: flash_attn)
    monkeypatch.setattr("layerwise.kernels.flash.has_torch_varlen", lambda: torch_varlen)
    kernels._half_backend.cache_clear()
    assert kernels.choose_backend(OnCuda(), OnCuda(), torch.ones(1) if sinks else None) == expected
    kernels._half_backend.cache_clear()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out: out.float(), r"returned torch\.float32 \(5, 4, 8\) on cpu, expected torch\.bfloat16"),
        (lambda out: out.transpose(0, 1), r"returned torch\.bfloat16 \(4, 5, 8\) on cpu, expected .* = \(5, 4, 8\)"),
        (lambda out: out.to("meta"), r"on meta, expected .* on cpu"),
        (lambda out: (out, out), r"kernel <lambda> returned a tuple, expected a tensor"),
        (lambda out: out.detach(), r"without a graph, so q, k and v would get no gradient"),
    ],
)
def test_what_a_kernel_returns_is_looked_at(change: Any, message: str) -> None:
    """Ranks whose kernels have nothing to do send q's dtype: another one would be taken for other rows."""
    q = torch.ones(5, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(SpecError, match=message):
        varlen_attention(q, q, q, Segments((5,), (5,)), backend=lambda q, *_: change(q))
    with torch.no_grad():
        varlen_attention(q, q, q, Segments((5,), (5,)), backend=lambda q, *_: q.detach())


def test_sinks_of_many_segments_add_up_in_float32() -> None:
    """Of 300 segments of unlike lengths: in bfloat16 a sum of 256 does not notice another 0.5."""
    lengths = tuple(range(1, 301))
    q, k, v = (torch.zeros(sum(lengths), 1, 8) for _ in range(3))
    v += 1

    def sink_grad(dtype: torch.dtype, backend: str) -> float:
        sinks = torch.zeros(1, requires_grad=True)
        rows = (x.to(dtype) for x in (q, k, v))
        out = varlen_attention(*rows, Segments(lengths, lengths), sinks=sinks, backend=backend)
        (grad,) = torch.autograd.grad(out.float().sum(), sinks)
        return grad.item()

    exact = sink_grad(torch.float64, "reference")
    for backend in ("reference", "sdpa"):
        assert sink_grad(torch.bfloat16, backend) == pytest.approx(exact, rel=0.01)
