"""FlexSP-style: how many groups of each width, and how many samples of each length bucket on them, by a MILP.

FlexSP (Wang et al., 2025) buckets lengths by dynamic programming, splits sorted samples into micro-batches of level
tokens, and for each minimises the seconds of the slowest group under a MILP. Here groups of one width are taken
together, which makes the MILP small: for a limit of seconds it asks whether all samples fit (HiGHS). Samples are then
assigned longest first within their width, and the fastest answer of many limits counts: not the least limit, since
whole samples may not fill groups as the MILP thought. A bucket counts with the mean of its samples, where FlexSP takes
the longest: closer, since groups are taken together.
"""

from __future__ import annotations

import numpy as np
from scipy.linalg import block_diag
from scipy.optimize import Bounds, LinearConstraint, milp

from benchmarks.peers.task import Groups, Task, parents_from
from layerwise.plan import Ints, StepPlan
from layerwise.planners.estimate import GroupClass, group_base, group_loads

NUM_BUCKETS = 16
DISTINCT_LENGTHS = 128  # what the bucketing looks at
MILP_LIMIT_S = 2.0
# Limits of seconds that are tried, in units of all work spread evenly; the coarse ones where no fine one fits.
FINE_LIMITS, COARSE_LIMITS = np.geomspace(1.003, 1.5, 24), np.geomspace(1.6, 64.0, 12)
MORE_MICROBATCHES = 2
OTHER_WIDTH_S = 1e9  # more than any group takes: the width that the MILP chose comes first


def plan_flexsp(task: Task) -> StepPlan | None:
    """The best of the fewest micro-batches that fit, and one more."""
    answers: list[list[Groups]] = []
    for num_microbatches in range(task.fewest_microbatches, len(task.lengths) + 1):
        chunks = _chunks(task.lengths, num_microbatches)
        found = [_Chunk(task, samples).groups() for samples in chunks]
        whole = [groups for groups in found if groups is not None]
        if len(whole) == len(chunks):
            answers.append(whole)
        if answers and num_microbatches >= task.fewest_microbatches + MORE_MICROBATCHES - 1:
            break
    return task.fastest(answers)


def _chunks(lengths: Ints, num_chunks: int) -> list[Ints]:
    """Samples sorted by length, in chunks of level tokens."""
    order = np.argsort(-lengths, kind="stable")
    before = np.cumsum(lengths[order]) - lengths[order]
    chunk_of = before * num_chunks // int(lengths.sum())
    return [order[chunk_of == chunk] for chunk in range(num_chunks) if (chunk_of == chunk).any()]


class _Chunk:
    """One micro-batch: its buckets, and the seconds and tokens of a sample of each bucket in a group of each width."""

    def __init__(self, task: Task, samples: Ints) -> None:
        self.task, self.samples = task, samples
        self.bucket_of, self.longest = bucket(task.lengths[samples], NUM_BUCKETS)
        self.count = np.bincount(self.bucket_of)
        self.degrees = np.array(task.degrees)
        classes = [GroupClass(degree) for degree in task.degrees]
        self.sample_s = group_loads(task.cost, task.lengths[samples], classes).loads.sum(axis=0)
        sums = [np.bincount(self.bucket_of, weights=column) for column in self.sample_s.T]
        self.load_s = np.stack(sums, axis=1) / self.count[:, None]
        self.mean_tokens = np.bincount(self.bucket_of, weights=task.lengths[samples]) / self.count
        self.base_s = group_base(task.cost, classes).sum(axis=0)

    def groups(self) -> Groups | None:
        """The fastest answer among those for many limits of seconds; None where nothing fits."""
        level_s = float(self.sample_s[:, 0].sum()) / self.task.num_ranks
        found: list[Groups] = []
        for limits in (FINE_LIMITS, COARSE_LIMITS):
            for limit in limits:
                counts = self._fit(limit * level_s)
                groups = None if counts is None else self._assign(*counts)
                found += [] if groups is None else [groups]
            if found:
                break
        return min(found, key=self.task.estimate_s, default=None)

    def _fit(self, limit_s: float) -> tuple[Ints, Ints] | None:
        """(groups of each width, samples of each width and bucket) within the limit, or None.

        The variables in this order; per width, the samples' seconds and tokens stay within those of its groups.
        """
        widths, buckets = len(self.degrees), len(self.longest)
        group_tokens = self.degrees * self.task.max_tokens_per_rank
        fits = (self.load_s + self.base_s <= limit_s) & (self.longest[:, None] <= group_tokens)
        seconds = np.hstack([np.diag(self.base_s - limit_s), block_diag(*self.load_s.T)])
        tokens = np.hstack([np.diag(-group_tokens), block_diag(*[self.mean_tokens] * widths)])
        ranks = np.concatenate([self.degrees, np.zeros(widths * buckets)])
        samples = np.hstack([np.zeros((buckets, widths)), np.tile(np.eye(buckets), widths)])
        most = np.concatenate([self.task.num_ranks // self.degrees, np.where(fits.T, self.count, 0).ravel()])
        result = milp(
            c=-ranks,
            constraints=[
                LinearConstraint(np.vstack([seconds, tokens]), ub=0),
                LinearConstraint(ranks, ub=self.task.num_ranks),
                LinearConstraint(samples, self.count, self.count),
            ],
            bounds=Bounds(0, most),
            integrality=np.ones(len(most)),
            options={"time_limit": MILP_LIMIT_S, "mip_rel_gap": 0.05},
        )
        if result.x is None:
            return None
        values = np.rint(result.x).astype(np.int64)
        return values[:widths], values[widths:].reshape(widths, buckets)

    def _assign(self, num_groups: Ints, counts: Ints) -> Groups | None:
        """Longest first, each sample where it ends lowest among the groups of its width; None where one fits nowhere.

        A MILP that takes groups together does not see that samples do not split: where no group of the width has room,
        any other may take the sample.
        """
        width_of = np.repeat(np.arange(len(self.degrees)), num_groups)[::-1]
        sizes = self.degrees[width_of]
        seconds, tokens = self.base_s[width_of], np.zeros(len(sizes), dtype=np.int64)
        members: list[list[int]] = [[] for _ in sizes]
        for item, width in self._widths(counts):
            length = int(self.task.lengths[self.samples[item]])
            ends_s = np.where(width_of == width, 0.0, OTHER_WIDTH_S) + seconds + self.sample_s[item, width_of]
            ends_s[tokens + length > sizes * self.task.max_tokens_per_rank] = np.inf
            group = int(ends_s.argmin())
            if np.isinf(ends_s[group]):
                return None
            seconds[group] += self.sample_s[item, width_of[group]]
            tokens[group] += length
            members[group].append(int(self.samples[item]))
        first = np.cumsum(sizes) - sizes
        return parents_from(list(zip(first.tolist(), sizes.tolist(), strict=True)), members)

    def _widths(self, counts: Ints) -> list[tuple[int, int]]:
        """(sample of the chunk, index of its width), longest first; the longest of a bucket get the widest groups."""
        chosen = []
        for q in range(len(self.longest)):
            items = np.flatnonzero(self.bucket_of == q)
            items = items[np.argsort(-self.task.lengths[self.samples[items]], kind="stable")]
            widths = np.repeat(np.arange(len(self.degrees))[::-1], counts[::-1, q])
            chosen += list(zip(items.tolist(), widths.tolist(), strict=True))
        return sorted(chosen, key=lambda pair: -int(self.task.lengths[self.samples[pair[0]]]))


def bucket(lengths: Ints, num_buckets: int) -> tuple[Ints, Ints]:
    """(bucket of each sample int64 [samples], longest sample of each bucket int64 [buckets]).

    The buckets minimise the tokens by which samples are shorter than the longest of their bucket, by dynamic
    programming over at most DISTINCT_LENGTHS candidate ends.
    """
    ordered = np.sort(lengths)
    picks = np.unique(np.rint(np.linspace(0, len(ordered) - 1, DISTINCT_LENGTHS)).astype(np.int64))
    ends = np.unique(ordered[picks])
    below = np.searchsorted(ordered, ends, side="right")  # samples up to each end
    tokens = np.concatenate([[0], np.cumsum(ordered)])[below]
    below, tokens = np.concatenate([[0], below]), np.concatenate([[0], tokens])
    # waste[i, j]: padding of one bucket that holds the samples after end i up to end j.
    waste = ends[None, :] * (below[None, 1:] - below[:-1, None]) - (tokens[None, 1:] - tokens[:-1, None])
    waste = np.where(np.arange(len(ends))[:, None] <= np.arange(len(ends)), waste, np.inf)
    best, cuts = waste[0], []
    for _ in range(min(num_buckets, len(ends)) - 1):
        total = np.concatenate([[np.inf], best[:-1]])[:, None] + waste
        cuts.append(total.argmin(axis=0))
        best = np.minimum(best, total.min(axis=0))
    chosen, end = [], len(ends) - 1
    for cut in reversed(cuts):
        if cut[end] > 0:  # else the samples up to `end` have fewer candidate ends than this many buckets
            chosen.append(end)
            end = int(cut[end]) - 1
    longest = np.sort(ends[[*chosen, end]])
    return np.searchsorted(longest, lengths), longest
