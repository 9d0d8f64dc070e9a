"""One rank's view of a plan: which rows it sends, receives and computes, at every attention site.

build  from a plan to the rows of one attention site, or of one move of hidden states
runs   runs of tokens, joined and cut into the pieces that are copied
"""

from layerwise.route.build import Move, Route, RowMap, Side, block_of, build_move, build_parts, build_route, listed_side
from layerwise.route.runs import Cut, Runs, cut

__all__ = [
    "Cut",
    "Move",
    "Route",
    "RowMap",
    "Runs",
    "Side",
    "block_of",
    "build_move",
    "build_parts",
    "build_route",
    "cut",
    "listed_side",
]
