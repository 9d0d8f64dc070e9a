"""Why a sample sits where it sits, and what the other places would have cost: exact predictions of whole plans."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table as RichTable

from layerwise.cost import CostModel, Floats, pair_flops
from layerwise.errors import SpecError
from layerwise.explain.elsewhere import Elsewhere, Moving
from layerwise.labels import counted, format_seconds, kind_label
from layerwise.plan import Ints, MicrobatchPlan, StepPlan
from layerwise.report.summary import SampleRow, ranks_of, sample_row
from layerwise.spec import FULL


@dataclass(frozen=True, kw_only=True)
class Term:
    """Seconds of one sort of work in all layers of a kind, or in the LM head, on the rank that is waited for there."""

    name: str
    rank: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Option:
    """Another place for a sample; `seconds` of the step, and `change`, are None where it has no room.

    moved: the layers that move there. needed_tokens: of the fullest rank there. change: the term that differs most from
    that of the plan, with its rank there and the difference in seconds.
    """

    moved: str
    first_rank: int
    sp_degree: int
    needed_tokens: int
    seconds: float | None
    change: Term | None


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A sample's place, the term of its micro-batch that takes longest, and its other places, fastest first.

    token_share, attention_share: of the step's tokens, and of its attention FLOPs in all layers. is_waited_for: whether
    the rank of `largest` has a part of the sample. seconds: of the step as planned.
    """

    sample: SampleRow
    token_share: float
    attention_share: float
    max_tokens_per_rank: int
    seconds: float
    largest: Term
    is_waited_for: bool
    options: tuple[Option, ...]


def check_sample(sample: int, num_samples: int) -> None:
    """Raise SpecError unless a step of `num_samples` samples has this one."""
    if not 0 <= sample < num_samples:
        raise SpecError(f"there is no sample {sample}: the step has {num_samples}, numbered 0 to {num_samples - 1}")


def explain_sample(plan: StepPlan, sample: int, cost: CostModel) -> Explanation:
    """Where the sample sits, and what every other place would have cost. Raises SpecError for a sample out of range."""
    check_sample(sample, len(plan.lengths))
    row = sample_row(plan, sample)
    moving = Moving(plan=plan, index=row.microbatch, sample=sample, cost=cost)
    terms = find_terms(moving, moving.microbatch)
    largest = max(terms.values(), key=lambda term: term.seconds)
    ranks = [ranks_of(table, sample) for table in moving.microbatch.places.values()]
    ranks += [ranks_of(table, sample) for table in moving.microbatch.tiles.values()]
    flops = _attention_flops(np.array(plan.lengths, dtype=np.int64), cost)
    options = [_option(moving, place, terms) for place in moving.places()]
    return Explanation(
        sample=row,
        token_share=row.num_tokens / plan.num_tokens,
        attention_share=float(flops[sample] / flops.sum()),
        max_tokens_per_rank=plan.max_tokens_per_rank,
        seconds=moving.predict(moving.microbatch),
        largest=largest,
        is_waited_for=largest.rank in np.concatenate(ranks),
        options=tuple(sorted(options, key=lambda option: (option.seconds is None, option.seconds or 0.0))),
    )


def _attention_flops(lengths: Ints, cost: CostModel) -> Floats:
    """Forward FLOPs of each sample's attention in all layers, float64 [samples]."""
    flops = np.zeros(len(lengths))
    for layer in cost.layers:
        per_pair = layer.num_layers * layer.spec.num_heads * pair_flops(layer.spec)
        flops += per_pair * layer.spec.pairs(lengths * 0, lengths)
    return flops


def _option(moving: Moving, place: Elsewhere, planned: dict[str, Term]) -> Option:
    change = None
    if place.microbatch is not None:
        terms = find_terms(moving, place.microbatch)
        name = max(terms, key=lambda name: abs(terms[name].seconds - planned[name].seconds))
        change = Term(name=name, rank=terms[name].rank, seconds=terms[name].seconds - planned[name].seconds)
    return Option(
        moved="all" if place.kinds == set(moving.plan.attention) else f"all but {FULL}",
        first_rank=place.first,
        sp_degree=place.degree,
        needed_tokens=place.needed_tokens,
        seconds=place.seconds,
        change=change,
    )


def find_terms(moving: Moving, microbatch: MicrobatchPlan) -> dict[str, Term]:
    """What the seconds of a micro-batch add up from; where ranks wait only at the end of the step, all of the step's.

    `microbatch` stands in for the one that the sample of `moving` is in.
    """
    sites = _sites(moving.cost, microbatch)
    slowest = None
    if moving.cost.cluster.sync == "step":
        sites["other micro-batches"] = {"all work": moving.others_s}
        slowest = int(np.sum([part for parts in sites.values() for part in parts.values()], axis=0).argmax())
    terms = {}
    for site, parts in sites.items():
        rank = int(np.sum(list(parts.values()), axis=0).argmax()) if slowest is None else slowest
        for part, rank_s in parts.items():
            name = f"{part}, {site}"
            terms[name] = Term(name=name, rank=rank, seconds=float(rank_s[rank]))
    return terms


def _sites(cost: CostModel, microbatch: MicrobatchPlan) -> dict[str, dict[str, Floats]]:
    """Seconds of each rank, float64 [num_ranks], by where ranks wait for one another and by sort of work."""
    times = cost.layer_times(microbatch)
    sites: dict[str, dict[str, Floats]] = {}
    for layer in cost.layers:
        one = times[layer.kind]
        parts = {"linear work": one.linear_s, "attention": one.attention_s, "exchange": one.exchange_s}
        parts["exposed traffic"] = one.exposed_s
        sites[kind_label(layer.kind)] = {part: layer.num_layers * rank_s for part, rank_s in parts.items()}
    head_s = np.asarray(cost.head_token_s * microbatch.tokens_per_rank(cost.cluster.num_ranks), dtype=np.float64)
    sites["LM head"] = {"linear work": head_s}
    for moved in cost.moves(microbatch):
        sites[f"{moved.source} to {moved.target}"] = {"moves": moved.times * cost.move_s(moved.sent)}
    return sites


def render(explanation: Explanation, console: Console) -> None:
    """Print the explanation: where, why, a table of other places, and a verdict."""
    row, largest = explanation.sample, explanation.largest
    tiles = ", ".join(f"{kind} {ranks}" for kind, ranks in row.attention_ranks.items())
    console.print(
        f"[bold]sample {row.sample}[/bold]: {counted(row.num_tokens, 'token')}, {explanation.token_share:.2%} of the "
        f"step and {explanation.attention_share:.2%} of its attention FLOPs; micro-batch {row.microbatch}\n"
        f"ranks of its shards {row.owner_ranks}, of its tiles: {tiles}\n"
        f"predicted step {format_seconds(explanation.seconds)}; most of it {largest.name}: "
        f"{format_seconds(largest.seconds)} on rank {largest.rank}, which has "
        f"{'a part' if explanation.is_waited_for else 'no part'} of this sample"
    )
    if explanation.options:
        console.print(_options_table(explanation))
    console.print(_verdict(explanation))


def _options_table(explanation: Explanation) -> RichTable:
    table = RichTable(title="The best other block of each width, all other samples as they are", title_justify="left")
    is_apart = len({option.moved for option in explanation.options}) > 1
    for column in ("layers moved", "SP degree", "ranks", "step changes by", "mostly in")[not is_apart :]:
        table.add_column(column, justify="left" if column in ("layers moved", "mostly in") else "right")
    for option in explanation.options:
        where = (option.moved, str(option.sp_degree), _ranks_text(option))[not is_apart :]
        if option.seconds is None or option.change is None:
            needed, allowed = option.needed_tokens, explanation.max_tokens_per_rank
            table.add_row(
                *where, "does not fit", f"{counted(needed, 'token')} on a rank, max_tokens_per_rank={allowed:,}"
            )
        else:
            change = option.change
            table.add_row(
                *where, _difference(option.seconds, explanation.seconds), f"{change.name}, rank {change.rank}"
            )
    return table


def _verdict(explanation: Explanation) -> str:
    best = next(iter(explanation.options), None)
    if best is None or best.seconds is None:
        return "it fits nowhere else"
    place = f"SP degree {best.sp_degree} on ranks {_ranks_text(best)}: {_difference(best.seconds, explanation.seconds)}"
    if best.seconds < explanation.seconds * (1 - 1e-9):
        return (
            f"predicted to be faster: {place}. Strategies search with estimates, have rules of their own for what may "
            "share ranks, and do not try every place"
        )
    return f"next best: {place}"


def _ranks_text(option: Option) -> str:
    last = option.first_rank + option.sp_degree - 1
    return str(last) if option.sp_degree == 1 else f"{option.first_rank}-{last}"


def _difference(seconds: float, planned_s: float) -> str:
    added_ms = 1e3 * (seconds - planned_s)
    digits = ",.0f" if abs(added_ms) >= 1000 else ".4g"
    return f"{added_ms:+{digits}} ms ({100 * (seconds / planned_s - 1):+,.2f}%)"
