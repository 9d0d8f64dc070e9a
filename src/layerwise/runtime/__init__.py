"""Plans at work: the routes of a micro-batch, and the attention call that follows them.

routes          the routes of a micro-batch, and `attention`, which follows them
agreement       whether all ranks hold the same plan
attention_call  one call: what it must look like, and the kernels it runs on
"""

from layerwise.runtime.agreement import agree, agree_on_end
from layerwise.runtime.routes import (
    MOVES,
    Routes,
    attention,
    build_routes,
    checkpoint,
    current_routes,
    in_routes,
    plan_blocks,
    relocate,
    use_routes,
)

__all__ = [
    "MOVES",
    "Routes",
    "agree",
    "agree_on_end",
    "attention",
    "build_routes",
    "checkpoint",
    "current_routes",
    "in_routes",
    "plan_blocks",
    "relocate",
    "use_routes",
]
