"""dynamic: groups of unlike widths, chosen for each micro-batch; one layout for all layers (repacking off).

Long samples get wide groups as far as the cost model says so, shorter ones fill those groups' tokens, and the
ranks that remain form narrow groups. For a micro-batch the search is: many partitions of the ranks, each
packed longest first; the best few refined by moves and swaps; the best of those by the exact prediction.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from layerwise.plan import Ints, MicrobatchPlan, Parent
from layerwise.planners.estimate import GroupClass, group_base, group_loads
from layerwise.planners.layout import lay_out
from layerwise.planners.packing import Packing, pack_longest_first, refine, split_parts
from layerwise.planners.problem import GroupOptions, StepProblem, degree_ladder, tile_cluster
from layerwise.traffic import Block

# A sample gets the smallest group in which its seconds per rank stay below this multiple of the mean over
# ranks.
WORK_SHARES = (0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0, np.inf)
NUM_REFINED = 2
# Above this share of the budget, packing gets hard, and one more micro-batch may be faster.
TIGHT_FILL = 0.85


def plan_dynamic(problem: StepProblem, options: GroupOptions) -> tuple[MicrobatchPlan, ...]:
    """The micro-batches with the least predicted seconds among those tried."""
    ladder = [d for d in degree_ladder(problem.cluster) if d <= (options.max_sp_degree or problem.cluster.num_ranks)]
    problem.check_fits(ladder[-1], "raise max_sp_degree" if options.max_sp_degree else "use more ranks")
    fewest = problem.fewest_microbatches
    fill = problem.lengths.sum() / (fewest * problem.cluster.num_ranks * problem.max_tokens_per_rank)
    best: list[list[Packed]] = []
    for num_microbatches in range(fewest, len(problem.lengths) + 1):
        packed = [
            [_pack_microbatch(problem, samples, ladder) for samples in parts]
            for parts in _splits(problem, num_microbatches)
        ]
        best = min(
            [*([best] if best else []), *(parts for parts in packed if all(parts))],
            key=_estimate_s,
            default=[],
        )
        if best and (num_microbatches > fewest or fill < TIGHT_FILL):
            break
    return tuple(_choose(problem, candidates) for candidates in best)


class Packed(NamedTuple):
    """The samples of a micro-batch in disjoint blocks of ranks, and the estimate of its seconds."""

    estimate_s: float
    blocks: tuple[Block, ...]
    samples: Ints
    packing: Packing
    bin_of: Ints


def _estimate_s(microbatches: list[list[Packed]]) -> float:
    return sum(candidates[0].estimate_s for candidates in microbatches)


def _splits(problem: StepProblem, num_microbatches: int) -> Iterator[list[Ints]]:
    """Ways to divide the samples over micro-batches: the longest together, or the work spread evenly."""
    capacity = problem.cluster.num_ranks * problem.max_tokens_per_rank
    for together in (True, False) if num_microbatches > 1 else (True,):
        part_of = split_parts(problem.lengths, problem.work_s, num_microbatches, capacity, longest_together=together)
        if part_of is not None:
            parts = [np.flatnonzero(part_of == part) for part in range(num_microbatches)]
            yield [samples for samples in parts if len(samples)]


def _pack_microbatch(problem: StepProblem, samples: Ints, ladder: list[int]) -> list[Packed]:
    """The samples packed into the partitions that suit them best, fastest first; [] where none does."""
    partitions = _partitions(problem, samples, ladder)
    degrees = sorted({block.size for blocks in partitions for block in blocks})
    classes = [GroupClass(degree) for degree in degrees]
    loads, base = (
        group_loads(problem.cost, problem.lengths[samples], classes),
        group_base(problem.cost, classes),
    )
    packed = []
    for blocks in partitions:
        sizes = np.array([block.size for block in blocks])
        packing = Packing(
            loads=loads,
            base=base,
            bin_class=np.searchsorted(degrees, sizes),
            tokens=problem.lengths[samples],
            capacity_tokens=sizes * problem.max_tokens_per_rank,
        )
        bin_of = pack_longest_first(packing)
        if bin_of is not None:
            packed.append(Packed(packing.makespan(bin_of), blocks, samples, packing, bin_of))
    packed = sorted(packed, key=lambda found: found[:2])[:NUM_REFINED]
    return sorted((_refined(found) for found in packed), key=lambda found: found[:2])


def _refined(packed: Packed) -> Packed:
    bin_of = refine(packed.packing, packed.bin_of)
    return packed._replace(estimate_s=packed.packing.makespan(bin_of), bin_of=bin_of)


def _choose(problem: StepProblem, candidates: list[Packed]) -> MicrobatchPlan:
    """The candidate with the least predicted seconds."""
    microbatches = [
        lay_out(problem.lengths, problem.cost.attention, form_groups(p.samples, p.blocks, p.bin_of)) for p in candidates
    ]
    return min(microbatches, key=lambda m: problem.cost.predict_microbatch(m).seconds)


def form_groups(samples: Ints, blocks: tuple[Block, ...], bin_of: Ints) -> list[Parent]:
    """The packed bins as groups."""
    return [
        Parent(first_rank=block.lo, sp_degree=block.size, samples=tuple(samples[bin_of == index].tolist()))
        for index, block in enumerate(blocks)
    ]


def _partitions(problem: StepProblem, samples: Ints, ladder: list[int]) -> list[tuple[Block, ...]]:
    """Ways to divide the ranks into groups: all alike, and by what the samples demand; each way once."""
    found: dict[tuple[Block, ...], None] = {}
    for degree in ladder:
        found[tile_cluster(iter([degree] * problem.cluster.num_ranks), problem.cluster)] = None
    for share in WORK_SHARES:
        demand = _demand(problem, samples, ladder, share)
        for round_up in (True, False):
            degrees = _group_degrees(problem, samples, demand, ladder, round_up)
            found[tile_cluster(degrees, problem.cluster)] = None
    return list(found)


def _demand(problem: StepProblem, samples: Ints, ladder: list[int], share: float) -> Ints:
    """The group size that each sample asks for, int64 [samples]."""
    work, mean = problem.work_s[samples], problem.work_s[samples].sum() / problem.cluster.num_ranks
    sizes = np.array(ladder)
    by_tokens = np.searchsorted(sizes * problem.max_tokens_per_rank, problem.lengths[samples])
    by_work = np.searchsorted(sizes * share * mean, work * (1 - 1e-9))
    return np.asarray(sizes[np.minimum(np.maximum(by_tokens, by_work), len(sizes) - 1)])


def _group_degrees(
    problem: StepProblem, samples: Ints, demand: Ints, ladder: list[int], round_up: bool
) -> Iterator[int]:
    """How many groups of each size the demand fills, widest first."""
    work = problem.work_s[samples]
    mean = work.sum() / problem.cluster.num_ranks
    for degree in reversed(ladder[1:]):
        groups = work[demand == degree].sum() / (degree * mean)
        if groups > 0:
            yield from [degree] * max(1, int(np.ceil(groups) if round_up else groups))
