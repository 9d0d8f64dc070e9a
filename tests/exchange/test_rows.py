"""Moves of rows, by torch and by Triton in its interpreter, against a loop over rows."""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from layerwise import LocalWorld
from layerwise.exchange import Site, exchange
from layerwise.groups import World
from layerwise.kernels.pieces import Moves, Pieces
from layerwise.kernels.rows import SCRATCH_ELEMENTS, move_rows
from layerwise.runtime import build_routes, plan_blocks
from layerwise.spec import AttentionSpec
from tests.random_plans import random_step

Mover = Callable[..., None]


def triton_mover() -> Mover:
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("runs in a process of its own, with TRITON_INTERPRET=1")
    from layerwise.kernels.rows_triton import move_rows_triton

    return move_rows_triton


@pytest.fixture(params=["torch", "triton"])
def mover(request: pytest.FixtureRequest) -> Mover:
    return move_rows if request.param == "torch" else triton_mover()


def units_of(pieces: Pieces) -> list[list[int]]:
    """The rows, or the elements, of each piece in order."""
    units = []
    for block in pieces.blocks:
        tokens = range(block.size[0]) if block.tokens is None else block.tokens.tolist()
        units.append([block.first + t * block.strides[0] + i for t in tokens for i in range(block.size[1])])
    return units


def expected(x: Tensor, out: Tensor, moves: Moves, add: bool) -> Tensor:
    """One element at a time."""
    result = out.flatten().clone()
    for source, target in zip(units_of(moves.sources), units_of(moves.targets), strict=True):
        for here, there in zip(source, target, strict=True):
            value = x.flatten()[here]
            result[there] = result[there] + value.to(out.dtype) if add else value
    return result.view_as(out)


def pieces_of(*pieces: tuple[int, int, int, int, int, list[int]]) -> Pieces:
    """Each by first, stride, width, num_tokens, span, and the tokens that it has, [] for all."""
    rows, listed = [], list[int]()
    for *row, tokens in pieces:
        rows.append([*row, len(listed) if tokens else -1])
        listed += tokens
    return Pieces(np.array(rows), torch.tensor(listed, dtype=torch.int64))


# Of [12 tokens x 4 heads] rows of 5 elements: a block, a long block of one head, and tokens that are listed.
ROWS = pieces_of((2, 4, 2, 3, 3, []), (0, 4, 1, 12, 12, []), (15, 4, 1, 3, 9, [0, 3, 8])).in_elements(5)
FLAT = pieces_of((5, 10, 10, 3, 3, []), (40, 5, 5, 12, 12, []), (100, 5, 5, 3, 3, []))
PACKED = pieces_of((0, 2, 2, 3, 3, []), (6, 1, 1, 12, 12, []), (18, 1, 1, 3, 4, [0, 1, 3])).in_elements(5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("way", ["pack", "unpack", "stay", "sum"])
def test_moves_equal_a_loop(mover: Mover, way: str, dtype: torch.dtype) -> None:
    make = torch.Generator().manual_seed(0)
    rows, flat, packed = (torch.randn(*s, generator=make).to(dtype) for s in ((48, 5), (120, 1), (24, 5)))
    wide = torch.promote_types(dtype, torch.float32)
    x, out, moves = {
        "pack": (rows, flat, Moves(ROWS, FLAT)),
        "unpack": (flat, packed, Moves(FLAT, PACKED)),
        "stay": (rows, packed, Moves(ROWS, PACKED)),
        "sum": (flat, rows.to(wide), Moves(FLAT, ROWS)),
    }[way]
    wanted = expected(x, out, moves, add=way == "sum")
    mover(x, out, moves, add=way == "sum")
    torch.testing.assert_close(out, wanted, rtol=1e-6, atol=1e-6)


def test_rows_named_by_several_pieces_are_summed(mover: Mover) -> None:
    flat, out = torch.arange(1.0, 13.0).view(-1, 1), torch.zeros(6, 1)
    sources = pieces_of((0, 1, 1, 6, 6, []), (6, 1, 1, 3, 3, []), (9, 1, 1, 3, 3, []))
    twice = pieces_of((0, 1, 1, 6, 6, []), (2, 1, 1, 3, 3, []), (0, 1, 1, 3, 6, [1, 2, 5]))
    mover(flat, out, Moves(sources, twice), add=True)
    assert out.flatten().tolist() == [1.0, 2 + 10, 3 + 7 + 11, 4 + 8, 5 + 9, 6 + 12]


def test_long_and_wide_pieces(mover: Mover) -> None:
    """More tokens than one program takes, and more elements of each than fit one block."""
    x = torch.randn(70 * 3, 150, generator=torch.Generator().manual_seed(1))
    order = np.random.default_rng(0).permutation(70).tolist()
    out = torch.zeros(140, 150)
    sources, targets = pieces_of((1, 3, 2, 70, 70, order)), pieces_of((0, 2, 2, 70, 70, []))
    mover(x, out, Moves(sources.in_elements(150), targets.in_elements(150)), add=False)
    assert torch.equal(out.view(70, 2, 150), x.view(70, 3, 150)[:, 1:][order])


@pytest.mark.parametrize("is_listed", [(True, True), (False, True), (True, False), (False, False)])
@pytest.mark.parametrize("add", [False, True])
def test_more_tokens_than_the_scratch_holds(mover: Mover, add: bool, is_listed: tuple[bool, bool]) -> None:
    """Listed on both sides, converted, or added: all of it where one copy in between would not do."""
    width, num_tokens = 4096, 20
    assert width * num_tokens > 2 * SCRATCH_ELEMENTS
    random = np.random.default_rng(0)
    x = torch.randn(2 * num_tokens, width, generator=torch.Generator().manual_seed(1)).bfloat16()
    out = torch.ones(3 * num_tokens, width)
    tokens = [
        sorted(random.permutation(span)[:num_tokens].tolist()) if listed else []
        for listed, span in zip(is_listed, (len(x), len(out)), strict=True)
    ]
    spans = [len(side) if listed else num_tokens for listed, side in zip(is_listed, (x, out), strict=True)]
    sources, targets = (
        pieces_of((0, 1, 1, num_tokens, span, some)).in_elements(width)
        for span, some in zip(spans, tokens, strict=True)
    )
    source, target = (some or list(range(num_tokens)) for some in tokens)
    wanted = out.clone()
    wanted[target] = x[source].float() + (1.0 if add else 0.0)
    place = out if add else out.bfloat16()
    mover(x, place, Moves(sources, targets), add=add)
    assert torch.equal(place.float(), wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_exchange_by_triton_is_one_by_torch(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Rows out, and gradients back to the rows that went to several places."""
    mover = triton_mover()
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=3)
    plan = random_step(np.random.default_rng(4), [37, 1, 9], {"full_attention": spec}, 4, 2)

    def on_rank(world: World) -> list[Tensor]:
        world.prepare(plan_blocks(plan))
        routes = build_routes(plan, 0, world)
        route = routes.by_kind["full_attention"]
        site = Site("full_attention", world.comm(route.block), routes.meter)
        make = torch.Generator().manual_seed(world.rank)
        sizes = zip((m.src.num_rows for m in route.to_tiles), (8, 8, 3), strict=True)
        rows = tuple(torch.randn(*size, generator=make).to(dtype).requires_grad_() for size in sizes)
        arrived = exchange(rows, route.to_tiles, site)
        grads = torch.autograd.grad(arrived, rows, [torch.randn(x.shape, generator=make).to(dtype) for x in arrived])
        return [*arrived, *grads]

    by_torch = LocalWorld(4, 2).run(on_rank)
    one_at_a_time = Lock()  # ranks are threads, and the interpreter is for one

    def move(*args: Any, **kwargs: Any) -> None:
        with one_at_a_time:
            mover(*args, **kwargs)

    monkeypatch.setattr("layerwise.exchange.collective.move_rows", move)
    for ours, theirs in zip(LocalWorld(4, 2).run(on_rank), by_torch, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
