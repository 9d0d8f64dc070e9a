"""The arguments that reach the CUDA kernels, seen by stand-ins that follow the kernels' documentation."""

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from layerwise.errors import UnsupportedError
from layerwise.kernels import Segments, check_backend, varlen_attention

SEGMENTS = Segments((5, 0, 20, 7), (5, 3, 20, 30))


def documented_attention(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, **options) -> Tensor:
    """Query i sees the keys [i + k_len - q_len - left, i + k_len - q_len + right]; -1 is no limit."""
    left, right = options["window_size"]
    outputs = [q[:0]]
    for q0, q1, k0, k1 in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        centre = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0)
        keys = torch.arange(k1 - k0)[None, :]
        visible = (left < 0) | (keys >= centre - left)
        visible = visible & ((right < 0) | (keys <= centre + right))
        groups = q.shape[1] // k.shape[1]
        keys_qhd, values_qhd = (x[k0:k1].repeat_interleave(groups, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[q0:q1], keys_qhd) * options["scale"]
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values_qhd))
    return torch.cat(outputs)


def check_operands(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> None:
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 8 == 0
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert max_q == int(cu_q.diff().max())
    assert max_k == int(cu_k.diff().max())
    assert cu_q.diff().min() > 0, "a segment without queries crashes the backward of some versions"


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A stand-in for the package; returns the `deterministic` of each call."""
    seen: list[bool] = []

    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
    ):
        check_operands(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        assert causal
        seen.append(deterministic)
        left, _ = window_size  # causal means no key to the right
        return documented_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, scale=softmax_scale, window_size=(left, 0))

    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return seen


@pytest.fixture
def torch_varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    def varlen_attn(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        *,
        scale=None,
        window_size=(-1, -1),
        enable_gqa=False,
    ):
        check_operands(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)
        assert enable_gqa or query.shape[1] == key.shape[1]
        return documented_attention(query, key, value, cu_seq_q, cu_seq_k, scale=scale, window_size=window_size)

    varlen = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)


def run(backend: str, heads: tuple[int, int], dims: tuple[int, int], window: int | None, scale: float | None):
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (SEGMENTS.total_q, heads[0], dims[0]),
        (SEGMENTS.total_k, heads[1], dims[0]),
        (SEGMENTS.total_k, heads[1], dims[1]),
    ]
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
    out = varlen_attention(*inputs, SEGMENTS, window=window, scale=scale, backend=backend)
    return [out, *torch.autograd.grad(out.square().sum(), inputs)]


@pytest.mark.parametrize("window", [None, 1, 4, 1000])
@pytest.mark.parametrize(
    ("heads", "dims", "scale"), [((4, 4), (8, 8), None), ((4, 2), (12, 8), None), ((6, 1), (8, 20), 0.3)]
)
@pytest.mark.parametrize("backend", ["flash", "torch_varlen"])
def test_translated_calls_equal_the_reference(request, backend, heads, dims, scale, window) -> None:
    request.getfixturevalue("flash_attn" if backend == "flash" else backend)
    expected = run("reference", heads, dims, window, scale)
    for actual, other in zip(run(backend, heads, dims, window, scale), expected, strict=True):
        torch.testing.assert_close(actual, other, rtol=1e-12, atol=1e-12)


def test_torchs_switch_makes_flash_deterministic(flash_attn: list[bool]) -> None:
    run("flash", (4, 2), (8, 8), None, None)
    torch.use_deterministic_algorithms(True)
    try:
        run("flash", (4, 2), (8, 8), None, None)
    finally:
        torch.use_deterministic_algorithms(False)
    assert flash_attn == [False, True]


@pytest.mark.parametrize("backend", ["flash", "torch_varlen"])
def test_sinks_are_refused_not_ignored(backend: str) -> None:
    q = torch.ones(5, 4, 8)
    with pytest.raises(UnsupportedError, match=f"'{backend}' has no attention sinks"):
        varlen_attention(q, q, q, Segments((5,), (5,)), sinks=torch.ones(4), backend=backend)


def test_a_torch_varlen_without_windows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(varlen, "varlen_attn", lambda query, key, value, is_causal=False: query)
    q = torch.ones(5, 4, 8)
    with pytest.raises(UnsupportedError, match=r"windows and grouped heads.*upgrade torch"):
        varlen_attention(q, q, q, Segments((5,), (5,)), backend="torch_varlen")
    with pytest.raises(UnsupportedError, match=r"windows and grouped heads.*upgrade torch"):
        check_backend("torch_varlen")


def test_flash_without_the_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    q = torch.ones(5, 4, 8)
    with pytest.raises(UnsupportedError, match=r"pip install 'layerwise\[flash\]'"):
        varlen_attention(q, q, q, Segments((5,), (5,)), backend="flash")
    with pytest.raises(UnsupportedError, match=r"pip install 'layerwise\[flash\]'"):
        check_backend("flash")


def test_a_backend_whose_kernel_is_there_is_accepted(flash_attn: list[bool], torch_varlen: None) -> None:
    for backend in ("auto", "reference", "sdpa", "flash", "torch_varlen"):
        check_backend(backend)
