"""redistribute: full-attention layers as in `dynamic`, all others on node-local children, and a pass between them.

What `repack` saves is this pass: here hidden states move from the children to the wide parents before every run of
full-attention layers and back after it, instead of changing hands on the exchanges that those layers have anyway. A
parent falls back to its wide layout where the cost model predicts no gain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from layerwise.plan import Ints, MicrobatchPlan, Parent, shard_table
from layerwise.planners.layout import Placement, batched, lay_out, place, shard_rows
from layerwise.planners.problem import StepProblem
from layerwise.planners.repack import Planned, RepackOptions, plan_repack
from layerwise.spec import FULL, AttentionSpec


def plan_redistribute(problem: StepProblem, options: RepackOptions) -> Planned:
    """The micro-batches of `dynamic` with children for all but full-attention layers; notes as of `plan_repack`."""
    return plan_repack(problem, options, lay_out_apart)


def lay_out_apart(
    lengths: Ints,
    attention: Mapping[str, AttentionSpec],
    parents: Iterable[Parent],
    children: Mapping[Parent, Placement] | None = None,
) -> MicrobatchPlan:
    """As `lay_out`, but full-attention layers keep hidden states on the parents: their shards are not the home's."""
    parents = tuple(parents)
    microbatch = lay_out(lengths, attention, parents, children)
    if not children or FULL not in attention:
        return microbatch
    return replace(microbatch, shards_by_kind={FULL: shard_table(shard_rows(batched(place(parents), lengths)))})
