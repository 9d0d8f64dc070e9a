"""Functions that torch.compile leaves alone: what follows a plan changes every step, and must not be traced."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

ArgsT = ParamSpec("ArgsT")
ResultT = TypeVar("ResultT")


def outside_graph(fn: Callable[ArgsT, ResultT]) -> Callable[ArgsT, ResultT]:
    """`fn`, before which compiled code ends a graph and after which it begins another.

    What torch.compiler.disable does, without its import of torch._dynamo where nothing is compiled.
    """
    untraced: Callable[ArgsT, ResultT] = torch._disable_dynamo(fn)

    @wraps(fn)
    def call(*args: ArgsT.args, **kwargs: ArgsT.kwargs) -> ResultT:
        return (untraced if torch.compiler.is_compiling() else fn)(*args, **kwargs)

    return call
