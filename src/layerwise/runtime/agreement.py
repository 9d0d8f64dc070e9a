"""All ranks follow the same plan, or none begins with it."""

from __future__ import annotations

import hashlib

from layerwise.agreement import first_difference
from layerwise.errors import PlanMismatchError
from layerwise.groups import World
from layerwise.labels import ranks_label
from layerwise.plan import Shard, StepPlan, Table, Tile
from layerwise.runtime.routes import plan_blocks


def agree(plan: StepPlan, world: World, *, num_valid_tokens: int, content: int = 0) -> int:
    """Compare the plan over all ranks, make its groups, and return the valid tokens of the whole step.

    To be called on every rank before the first collective that depends on the plan. `num_valid_tokens` are this rank's
    tokens with a label; `content` is a hash of the step's samples.
    Raises PlanMismatchError, on every rank, where two ranks hold different plans or one has no more; says what differs.
    """
    world.progress.at = "agreement on the plan"
    gathered = _gather(world, [plan.digest() ^ content, num_valid_tokens, 1])
    digests = [row[0] for row in gathered]
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            difference = first_difference(_parts(plan), world)
            raise PlanMismatchError(
                f"rank 0 holds plan {digests[0]:016x} and rank {rank} holds {digest:016x}: "
                f"{difference or 'the tokens of the samples differ'}; all ranks must see the same samples and tokens "
                "in the same order (seed anything random by step, not by rank), and the same cluster, model, strategy "
                "and version"
            )
    world.prepare(plan_blocks(plan))
    return sum(row[1] for row in gathered)


def agree_on_end(world: World) -> None:
    """To be called instead of `agree` by a rank that has no more plans. Raises PlanMismatchError where another has."""
    world.progress.at = "agreement on the end of the loader"
    _gather(world, [0, 0, 0])


def _gather(world: World, row: list[int]) -> list[list[int]]:
    """The rows of all ranks, whose last entry says whether they have a plan; all have one, or none."""
    gathered = world.gather_ints(row)
    with_plan = [rank for rank, other in enumerate(gathered) if other[-1]]
    if 0 < len(with_plan) < len(gathered):
        without = sorted(set(range(len(gathered))) - set(with_plan))
        raise PlanMismatchError(
            f"no more steps on {ranks_label(without)}, another one on {ranks_label(with_plan)}: give all ranks equally "
            "many samples and steps"
        )
    return gathered


def _parts(plan: StepPlan) -> dict[str, str]:
    """Everything that ranks must agree on, for people; of long tables how many rows, and a hash."""
    parts = {
        "overlap_parts": str(plan.overlap_parts),
        "the strategy": plan.strategy,
        "num_ranks": str(plan.num_ranks),
        "ranks_per_node": str(plan.ranks_per_node),
        "max_tokens_per_rank": str(plan.max_tokens_per_rank),
        "the number of samples": str(len(plan.lengths)),
        "the number of their tokens": str(plan.num_tokens),
        "the hash of their lengths": _hash(repr(plan.lengths).encode()),
        "layer_types": ", ".join(plan.layer_types),
        **{kind: repr(spec) for kind, spec in sorted(plan.attention.items())},
    }
    for index, microbatch in enumerate(plan.microbatches):
        parts[f"micro-batch {index}, the shards"] = _table(microbatch.shards)
        for kind, shards in sorted(microbatch.shards_by_kind.items()):
            parts[f"micro-batch {index}, the shards of {kind} layers"] = _table(shards)
        for kind, tiles in sorted(microbatch.tiles.items()):
            parts[f"micro-batch {index}, the tiles of {kind} layers"] = _table(tiles)
    return parts


def _table(table: Table[Shard] | Table[Tile]) -> str:
    return f"{len(table)} rows, hash {_hash(table.rows.tobytes())}"


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=4).hexdigest()
