"""The one exchange that every layout uses: rows in, rows out, over one all-to-all.

collective   departure, all-to-all, landing, and the same in reverse for gradients
progress     where a rank is, for messages of what fails
wire         what lies where in the flat buffers
check_calls  whether all ranks are at the same exchange, for those who ask
waits        how long the rank waited for exchanges
staging      the buffers, kept and used again
graph_break  what torch.compile leaves alone
"""

from layerwise.exchange.collective import (
    Comm,
    Count,
    Flight,
    GroupComm,
    Meter,
    Pending,
    Site,
    all_to_all,
    depart,
    exchange,
    land,
    profiler_range,
    range_name,
)
from layerwise.exchange.graph_break import outside_graph
from layerwise.exchange.progress import Point, Progress, first_line, waiting
from layerwise.exchange.staging import STAGING

__all__ = [
    "STAGING",
    "Comm",
    "Count",
    "Flight",
    "GroupComm",
    "Meter",
    "Pending",
    "Point",
    "Progress",
    "Site",
    "all_to_all",
    "depart",
    "exchange",
    "first_line",
    "land",
    "outside_graph",
    "profiler_range",
    "range_name",
    "waiting",
]
