"""attention() over arbitrary shards and tiles equals a dense computation of each whole sample."""

import numpy as np
import pytest
import torch
from torch import Tensor

from layerwise.errors import SpecError
from layerwise.exchange import Count, Meter
from layerwise.groups import LocalWorld, World, solo_world
from layerwise.plan import MicrobatchPlan, Shard, StepPlan, Tile, shard_table, tile_table
from layerwise.runtime import agree, attention, build_routes, checkpoint, use_routes
from layerwise.spec import AttentionSpec
from tests.random_plans import random_step

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def specs(num_heads: int, num_kv_heads: int, head_dim: int = 4, v_head_dim: int = 4) -> dict[str, AttentionSpec]:
    size = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "v_head_dim": v_head_dim}
    return {
        FULL: AttentionSpec(**size),
        SLIDING: AttentionSpec(**size, window=5),
        CHUNKED: AttentionSpec(**size, chunk=4),
    }


def dense(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    """One whole sample by the definition of the mask; [L, H, Dv]."""
    length, groups = q.shape[0], spec.num_heads // spec.num_kv_heads
    i, j = torch.arange(length)[:, None], torch.arange(length)[None, :]
    visible = j <= i
    if spec.window is not None:
        visible &= i - j < spec.window
    if spec.chunk is not None:
        visible &= i // spec.chunk == j // spec.chunk
    scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(groups, 1)) * spec.head_dim**-0.5
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, length, 1)], dim=2)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1)[..., :length], v.repeat_interleave(groups, 1))


def run_site(plan: StepPlan, seed: int, with_sinks: bool) -> dict[str, list[Count]]:
    """Compare outputs and all gradients of one site per kind; returns each rank's counts."""
    make = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=make)

    counts: dict[str, list[Count]] = {}
    for kind, spec in plan.attention.items():
        inputs = [[random(n, heads, dim) for heads, dim in _row_shapes(spec)] for n in plan.lengths]
        weights = [random(n, spec.num_heads, spec.v_head_dim) for n in plan.lengths]
        sinks = random(spec.num_heads) if with_sinks else None

        leaves = [[x.clone().requires_grad_() for x in sample] for sample in inputs]
        sink_leaf = None if sinks is None else sinks.clone().requires_grad_()
        outs = [dense(*sample, spec, sink_leaf) for sample in leaves]
        total = sum((out * w).sum() for out, w in zip(outs, weights, strict=True))
        flat = [x for sample in leaves for x in sample] + ([] if sink_leaf is None else [sink_leaf])
        expected = list(torch.autograd.grad(total, flat))

        def on_rank(world: World, kind=kind, inputs=inputs, weights=weights, sinks=sinks, spec=spec):
            agree(plan, world, num_valid_tokens=0)
            meter = Meter(plan.ranks_per_node)
            routes = build_routes(plan, 0, world, meter=meter, backend="reference")
            mine = [s for s in plan.microbatches[0].shards if s.rank == world.rank]
            local = [
                torch.cat([inputs[s.sample][i][s.lo : s.hi] for s in mine] or [inputs[0][i][:0]]).requires_grad_()
                for i in range(3)
            ]
            local_weights = torch.cat([weights[s.sample][s.lo : s.hi] for s in mine] or [weights[0][:0]])
            my_sinks = None if sinks is None else sinks.clone().requires_grad_()
            with use_routes(routes):
                out = attention(*local, kind=kind, sinks=my_sinks)
            wanted = [*local] if my_sinks is None else [*local, my_sinks]
            grads = torch.autograd.grad((out * local_weights).sum(), wanted)
            return mine, out, grads, meter.counts.get(kind, Count())

        results = LocalWorld(plan.num_ranks, plan.ranks_per_node).run(on_rank)
        got_out = [torch.full_like(w, torch.nan) for w in weights]
        got = [torch.full_like(x, torch.nan) for sample in inputs for x in sample]
        for mine, out, grads, _ in results:
            offset = 0
            for s in mine:
                rows = slice(offset, offset + s.hi - s.lo)
                got_out[s.sample][s.lo : s.hi] = out[rows]
                for i in range(3):
                    got[3 * s.sample + i][s.lo : s.hi] = grads[i][rows]
                offset += s.hi - s.lo
            assert all(g.is_contiguous() for g in grads)
            assert out.is_contiguous()
        if sinks is not None:
            got.append(torch.stack([grads[3] for _, _, grads, _ in results]).sum(0))
        for a, b in zip([*got_out, *got], [*[o.detach() for o in outs], *expected], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
        counts[kind] = [count for *_, count in results]
    return counts


def _row_shapes(spec: AttentionSpec) -> list[tuple[int, int]]:
    return [
        (spec.num_heads, spec.head_dim),
        (spec.num_kv_heads, spec.head_dim),
        (spec.num_kv_heads, spec.v_head_dim),
    ]


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 2), (7, 7), (20, 20), (6, 3), (40, 8), (4, 1)])
@pytest.mark.parametrize("num_ranks", [1, 4, 8])
def test_any_shards_and_tiles_equal_the_dense_computation(num_heads: int, num_kv_heads: int, num_ranks: int) -> None:
    rng = np.random.default_rng(num_heads * 100 + num_ranks)
    for lengths in ([37, 51, 40], [1, 1, 5, 1], [13], [3], [7] * 8):
        plan = random_step(rng, lengths, specs(num_heads, num_kv_heads), num_ranks, max(1, num_ranks // 2))
        run_site(plan, seed=len(lengths), with_sinks=False)


def test_sinks_travel_with_their_heads() -> None:
    plan = random_step(np.random.default_rng(5), [11, 4, 9], specs(8, 4), 4, 2)
    run_site(plan, seed=1, with_sinks=True)


def test_value_dim_may_differ_from_query_dim() -> None:
    plan = random_step(np.random.default_rng(6), [11, 4, 9], specs(4, 2, head_dim=6, v_head_dim=3), 4, 2)
    run_site(plan, seed=2, with_sinks=False)


@pytest.mark.parametrize("seed", range(8))
def test_counted_bytes_and_calls_equal_the_prediction(seed: int) -> None:
    rng = np.random.default_rng(seed)
    plan = random_step(rng, rng.integers(1, 30, 5).tolist(), specs(8, 2), 8, 4)
    counts = run_site(plan, seed, with_sinks=False)
    for kind, by_rank in counts.items():
        fast, slow, calls = _definition_of_bytes(plan, kind)
        assert (sum(c.fast_bytes for c in by_rank), sum(c.slow_bytes for c in by_rank)) == (
            fast * 8,
            slow * 8,
        )
        assert [c.calls for c in by_rank] == calls


def _definition_of_bytes(plan: StepPlan, kind: str) -> tuple[int, int, list[int]]:
    """Elements of one site by link, forward and backward, counted token by token; and calls per rank."""
    spec, microbatch = plan.attention[kind], plan.microbatches[0]
    owner = {(s.sample, t): s.rank for s in microbatch.shards for t in range(s.lo, s.hi)}
    moved = {True: 0, False: 0}
    busy: set[int] = set()
    for tile in microbatch.tiles[kind]:
        kv_heads = len({h // spec.queries_per_kv for h in range(tile.h0, tile.h1)})
        for t in range(tile.k0, tile.q1):
            rank = owner[tile.sample, t]
            if rank == tile.rank:
                continue
            busy |= {rank, tile.rank}
            elements = kv_heads * (spec.head_dim + spec.v_head_dim)
            if t >= tile.q0:
                elements += (tile.h1 - tile.h0) * (spec.head_dim + spec.v_head_dim)
            moved[rank // plan.ranks_per_node == tile.rank // plan.ranks_per_node] += 2 * elements
    route_calls = [
        4 if any(rank in range(b.lo, b.hi) for b in _blocks(plan, kind)) else 0 for rank in range(plan.num_ranks)
    ]
    assert all(route_calls[rank] == 4 for rank in busy)
    return moved[True], moved[False], route_calls


def _blocks(plan: StepPlan, kind: str):
    from layerwise.traffic import exchange_blocks

    return exchange_blocks(plan.microbatches[0], kind, plan.num_ranks, plan.ranks_per_node)


def test_an_unknown_backend_is_refused_before_any_layer() -> None:
    plan = random_step(np.random.default_rng(0), [3], specs(2, 2), 1, 1)
    with pytest.raises(SpecError, match=r"unknown attention backend 'flsh'; legal: auto, .*flash"):
        build_routes(plan, 0, solo_world(), backend="flsh")
    with pytest.raises(SpecError, match=r"backend=5 is neither a name nor a kernel: a function"):
        build_routes(plan, 0, solo_world(), backend=5)  # type: ignore[arg-type]


def lopsided_plan(overlap_parts: int = 1) -> StepPlan:
    """Rank 1 has half of the tokens and no tile."""
    spec = AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=4, v_head_dim=4)
    return StepPlan(
        strategy="by hand",
        num_ranks=2,
        ranks_per_node=1,
        max_tokens_per_rank=3,
        lengths=(6,),
        attention={FULL: spec},
        microbatches=(
            MicrobatchPlan(
                shards=shard_table([Shard(0, 0, 0, 3), Shard(0, 1, 3, 6)]),
                tiles={FULL: tile_table([Tile(0, 0, 0, 6, 0, 0, 2)])},
            ),
        ),
        overlap_parts=overlap_parts,
    )


@pytest.mark.parametrize("overlap_parts", [1, 2])
def test_a_rank_without_tiles_recomputes_attention_with_the_others(overlap_parts: int) -> None:
    """It would else save nothing, never recompute, and the others would wait for its exchanges."""

    def on_rank(world: World, *, recompute: bool) -> tuple[Tensor, ...]:
        agree(plan := lopsided_plan(overlap_parts), world, num_valid_tokens=0)
        make = torch.Generator().manual_seed(world.rank)
        rows = [torch.randn(3, 2, 4, dtype=torch.float64, generator=make, requires_grad=True) for _ in range(3)]

        def core(q: Tensor, k: Tensor, *, v: Tensor) -> Tensor:
            return attention(q, k, v, kind=FULL)

        with use_routes(build_routes(plan, 0, world)):
            out = checkpoint(core, *rows[:2], v=rows[2]) if recompute else core(*rows[:2], v=rows[2])
        return torch.autograd.grad(out.square().sum(), rows)

    with_it, without = (
        LocalWorld(2, 1).run(lambda world, recompute=recompute: on_rank(world, recompute=recompute))
        for recompute in (True, False)
    )
    for a, b in zip(with_it, without, strict=True):
        assert all(map(torch.equal, a, b))


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_autocast_casts_what_travels_on_all_ranks_alike(backend: str) -> None:
    """A rank without tiles sends and gets the dtype that kernels on others make."""

    def on_rank(world: World, *, low: bool) -> tuple[Tensor, ...]:
        agree(plan := lopsided_plan(), world, num_valid_tokens=0)
        make = torch.Generator().manual_seed(world.rank)
        rows = [torch.randn(3, 2, 4, generator=make, requires_grad=True) for _ in range(3)]
        dtypes = (torch.float32, torch.bfloat16, torch.bfloat16)  # a norm of Q under autocast makes float32
        mixed = [x.to(torch.bfloat16 if low else dtype) for x, dtype in zip(rows, dtypes, strict=True)]
        with use_routes(build_routes(plan, 0, world, backend=backend)), torch.autocast("cpu", enabled=not low):
            out = attention(*mixed, kind=FULL)
        assert out.dtype == torch.bfloat16
        return (out, *torch.autograd.grad(out.float().square().sum(), rows))

    under, by_hand = (LocalWorld(2, 1).run(lambda world, low=low: on_rank(world, low=low)) for low in (False, True))
    for a, b in zip(under, by_hand, strict=True):
        assert all(map(torch.equal, a, b))


def test_autocast_leaves_float64_alone() -> None:
    rows = [torch.randn(4, 2, 4, dtype=torch.float64) for _ in range(3)]
    plan = random_step(np.random.default_rng(0), [4], {FULL: specs(2, 2)[FULL]}, 1, 1)
    with use_routes(build_routes(plan, 0, solo_world())), torch.autocast("cpu"):
        assert attention(*rows, kind=FULL).dtype == torch.float64
