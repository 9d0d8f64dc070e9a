"""Arbitrary legal plans, made without any strategy: the runtime must execute every one of them."""

from itertools import pairwise

import numpy as np

from layerwise.plan import MicrobatchPlan, Shard, StepPlan, Tile, shard_table, tile_table
from layerwise.spec import AttentionSpec


def random_step(
    rng: np.random.Generator,
    lengths: list[int],
    specs: dict[str, AttentionSpec],
    num_ranks: int,
    ranks_per_node: int,
    moving_kinds: tuple[str, ...] = (),
) -> StepPlan:
    """One micro-batch whose shards and tiles are cut and placed at random; some ranks stay empty.

    Layers of `moving_kinds` keep hidden states on shards of their own.
    """
    allowed = rng.permutation(num_ranks)[: max(1, num_ranks - int(rng.integers(0, num_ranks // 2 + 1)))]
    home, *own = (
        [shard for sample, length in enumerate(lengths) for shard in _random_shards(rng, sample, length, allowed)]
        for _ in range(1 + len(moving_kinds))
    )
    tiles = {
        kind: [
            tile for sample, length in enumerate(lengths) for tile in _random_tiles(rng, sample, length, spec, allowed)
        ]
        for kind, spec in specs.items()
    }
    microbatch = MicrobatchPlan(
        shards=shard_table(home),
        tiles={kind: tile_table(rows) for kind, rows in tiles.items()},
        shards_by_kind={kind: shard_table(rows) for kind, rows in zip(moving_kinds, own, strict=True)},
    )
    plan = StepPlan(
        strategy="random",
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node,
        max_tokens_per_rank=sum(lengths),
        lengths=tuple(lengths),
        attention=specs,
        microbatches=(microbatch,),
    )
    plan.validate()
    return plan


def _random_shards(rng: np.random.Generator, sample: int, length: int, ranks: np.ndarray) -> list[Shard]:
    num_cuts = int(rng.integers(0, min(length, 5)))
    cuts = [0, *sorted(rng.choice(np.arange(1, length), num_cuts, replace=False).tolist()), length]
    return [Shard(sample, int(rng.choice(ranks)), lo, hi) for lo, hi in pairwise(cuts)]


def _random_tiles(
    rng: np.random.Generator, sample: int, length: int, spec: AttentionSpec, ranks: np.ndarray
) -> list[Tile]:
    rectangles, done = [(0, length, 0, spec.num_heads)], []
    while rectangles:
        q0, q1, h0, h1 = rectangles.pop()
        choice = rng.random()
        step = spec.queries_per_kv if h1 - h0 > spec.queries_per_kv else 1
        if choice < 0.35 and h1 - h0 > step:
            cut = h0 + step * int(rng.integers(1, (h1 - h0) // step))
            rectangles += [(q0, q1, h0, cut), (q0, q1, cut, h1)]
        elif choice < 0.6 and q1 - q0 > 1:
            cut = int(rng.integers(q0 + 1, q1))
            rectangles += [(q0, cut, h0, h1), (cut, q1, h0, h1)]
        else:
            done.append(Tile(sample, int(rng.choice(ranks)), q0, q1, int(spec.first_key(q0)), h0, h1))
    return done
