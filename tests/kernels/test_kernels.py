"""Every kernel against the reference kernel, and the reference kernel against the definition."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from layerwise.kernels import Segments, sdpa, varlen_attention

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 8 queries, so that short segments take the path of long ones."""
    monkeypatch.setattr(sdpa, "BLOCK_TOKENS", 8)


def make_inputs(
    segments: Segments,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (6, 6),
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """q, k, v, sinks and an output gradient."""
    generator = torch.Generator().manual_seed(0)
    (num_heads, num_kv_heads), (head_dim, v_head_dim) = heads, dims
    shapes = [
        (segments.total_q, num_heads, head_dim),
        (segments.total_k, num_kv_heads, head_dim),
        (segments.total_k, num_kv_heads, v_head_dim),
        (num_heads,),
        (segments.total_q, num_heads, v_head_dim),
    ]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def run(
    inputs: list[Tensor],
    segments: Segments,
    backend: str,
    *,
    window: int | None = None,
    with_sinks: bool = False,
) -> list[Tensor]:
    """The output and the gradients of q, k, v (and sinks)."""
    q, k, v, sinks = (x.clone().requires_grad_() for x in inputs[:4])
    out = varlen_attention(q, k, v, segments, window=window, sinks=sinks if with_sinks else None, backend=backend)
    wanted = [q, k, v, sinks] if with_sinks else [q, k, v]
    return [out, *torch.autograd.grad(out, wanted, inputs[4])]


def whole(*lengths: int) -> Segments:
    return Segments(lengths, lengths)


SEGMENTS = {
    "whole": whole(5, 1, 20, 5, 33),
    "ranges": Segments((5, 3, 1, 17, 9), (9, 3, 30, 40, 9)),
    "empty": Segments((0, 5, 0, 20), (0, 5, 7, 30)),
    "equal": whole(*[9] * 7),
}
WINDOWS = [None, 1, 4, 12, 1000]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_sdpa_equals_the_reference(segments: Segments, with_sinks: bool, window: int | None) -> None:
    inputs = make_inputs(segments)
    actual = run(inputs, segments, "sdpa", window=window, with_sinks=with_sinks)
    expected = run(inputs, segments, "reference", window=window, with_sinks=with_sinks)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dims", [(6, 6), (8, 4), (4, 8), (5, 3)])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1), (1, 1)])
def test_sdpa_takes_any_heads_dims_and_dtype(heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype) -> None:
    segments = Segments((20, 3, 17), (20, 3, 30))
    inputs = make_inputs(segments, heads, dims, dtype)
    for with_sinks in (False, True):
        actual = run(inputs, segments, "sdpa", window=6, with_sinks=with_sinks)
        exact = run([x.double() for x in inputs], segments, "reference", window=6, with_sinks=with_sinks)
        for one, other in zip(actual, exact, strict=True):
            assert one.dtype == dtype
            scale = float(other.detach().abs().max())
            torch.testing.assert_close(one.double(), other, rtol=0, atol=TOLERANCE[dtype] * max(scale, 1))


@pytest.mark.parametrize("window", [None, 5])
def test_reference_is_the_definition(window: int | None) -> None:
    segments = Segments((3, 7), (8, 7))
    q, k, v, sinks, _ = make_inputs(segments, dims=(6, 3))
    out = varlen_attention(q, k, v, segments, window=window, scale=0.7, sinks=sinks, backend="reference")
    row = 0
    for q_len, k_len, first_key in ((3, 8, 0), (7, 7, 8)):
        for position in range(k_len - q_len, k_len):
            seen = range(0 if window is None else max(0, position - window + 1), position + 1)
            for head in range(4):
                keys = [first_key + j for j in seen]
                exps = [math.exp(0.7 * float(q[row, head] @ k[j, head // 2])) for j in keys]
                total = sum(exps) + math.exp(float(sinks[head]))
                expected = sum(e / total * v[j, head // 2] for e, j in zip(exps, keys, strict=True))
                torch.testing.assert_close(out[row, head], expected)
            row += 1


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_a_window_of_8_lets_token_15_see_token_8_but_not_token_7(backend: str) -> None:
    segments = whole(16)
    q, k, v, *_ = make_inputs(segments)
    v = v.requires_grad_()
    out = varlen_attention(q, k, v, segments, window=8, backend=backend)
    (grad,) = torch.autograd.grad(out[15].sum(), v)
    assert grad.abs().sum((1, 2)).ne(0).tolist() == [False] * 8 + [True] * 8


@pytest.mark.parametrize("window", [None, 4])
def test_another_segments_values_never_matter(window: int | None) -> None:
    segments = Segments((20, 9, 20, 6), (20, 9, 20, 30))
    inputs = make_inputs(segments)
    before = run(inputs, segments, "sdpa", window=window)
    for x in (*inputs[:3], inputs[4]):
        x[20:29] = torch.randn(9, *x.shape[1:], generator=torch.Generator().manual_seed(9), dtype=x.dtype)
    for old, new in zip(before, run(inputs, segments, "sdpa", window=window), strict=True):
        assert torch.equal(old[:20], new[:20])
        assert torch.equal(old[29:], new[29:])
        assert not torch.equal(old[20:29], new[20:29])


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("segments", [Segments((), ()), Segments((0, 0), (0, 3))], ids=["none", "no-queries"])
def test_without_rows_the_output_still_has_a_graph(backend: str, segments: Segments) -> None:
    inputs = make_inputs(segments, dims=(6, 3))
    out, *grads = run(inputs, segments, backend, with_sinks=True)
    assert out.shape == (0, 4, 3)
    assert [g.shape for g in grads] == [x.shape for x in inputs[:4]]
    assert not any(g.any() for g in grads)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 40])
def test_masks_stay_narrow_and_equal_segments_share_a_call(
    monkeypatch: pytest.MonkeyPatch, window: int | None, with_sinks: bool
) -> None:
    calls = []

    def spy(q: Tensor, k: Tensor, v: Tensor, **kw: object) -> Tensor:
        mask = kw.get("attn_mask")
        calls.append((q.shape[0], q.shape[2], k.shape[2], 0 if mask is None else mask.numel()))
        return original(q, k, v, **kw)

    original = F.scaled_dot_product_attention
    monkeypatch.setattr(sdpa, "BLOCK_TOKENS", 32)
    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    segments = Segments((1000, *[20] * 500, 300), (1000, *[20] * 500, 1000))
    run(
        make_inputs(segments, (1, 1), (2, 2), torch.float32),
        segments,
        "sdpa",
        window=window,
        with_sinks=with_sinks,
    )

    assert [call[0] for call in calls if call[1] == call[2] - with_sinks == 20] == [500]
    widest = 1000 if window is None else window + 32 - 1
    assert max(mask for *_, mask in calls) <= 32 * (widest + with_sinks)
    if window:
        assert all(num_keys <= widest + with_sinks for _, _, num_keys, _ in calls)
    elif not with_sinks:
        assert (1, 1000, 1000, 0) in calls


def test_nothing_saved_for_backward_grows_faster_than_the_tokens() -> None:
    def saved_elements(length: int) -> int:
        segments = whole(length)
        q, k, v, *_ = (x.requires_grad_() for x in make_inputs(segments, (1, 1), (4, 4), torch.float32))
        storages = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: storages.update({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()}) or x,
            lambda x: x,
        ):
            varlen_attention(q, k, v, segments, window=16, backend="sdpa")
        return sum(storages.values())

    assert saved_elements(2048) <= 2.2 * saved_elements(1024)


def test_uninitialised_memory_never_leaks() -> None:
    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN
    try:
        for segments in SEGMENTS.values():
            for x in run(make_inputs(segments, dims=(8, 4)), segments, "sdpa", window=4, with_sinks=True):
                assert x.isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_large_scores_do_not_overflow() -> None:
    segments = whole(20)
    inputs = [x * 30 for x in make_inputs(segments)]  # scores of a thousand: exp() of them is infinite
    actual = run(inputs, segments, "sdpa", window=5, with_sinks=True)
    expected = run(inputs, segments, "reference", window=5, with_sinks=True)
    for one, other in zip(actual, expected, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-7)


def test_half_precision_keeps_the_small_contributions_of_late_blocks() -> None:
    segments = Segments((1024,), (1025,))
    q, k, v = (torch.zeros(n, 1, 4, dtype=torch.bfloat16) for n in (1024, 1025, 1025))
    v.requires_grad_()
    out = varlen_attention(q, k, v, segments, backend="sdpa")
    (grad,) = torch.autograd.grad(out, v, torch.ones_like(out))
    # Equal scores: the query at position i gives each of its i + 1 keys the weight 1 / (i + 1).
    expected = sum(1 / (i + 1) for i in range(1, 1025))
    assert grad[0, 0, 0].item() == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_sink_of_minus_infinity_is_none(dtype: torch.dtype) -> None:
    """Also beside the finite sinks of heads that share its keys."""
    inputs = make_inputs(whole(5, 20), dtype=dtype)
    inputs[3][0] = -math.inf
    expected = run([x.double() for x in inputs], whole(5, 20), "reference", with_sinks=True)
    for a, b in zip(run(inputs, whole(5, 20), "sdpa", with_sinks=True), expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
