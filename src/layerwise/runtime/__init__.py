"""Plans at work: the routes of a micro-batch, and the attention call that follows them.

routes          the routes of a micro-batch, and `attention`, which follows them
attention_call  one call: what it must look like, and the kernels it runs on
"""

from layerwise.runtime.routes import (
    MOVES,
    Routes,
    agree,
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
    "attention",
    "build_routes",
    "checkpoint",
    "current_routes",
    "in_routes",
    "plan_blocks",
    "relocate",
    "use_routes",
]
