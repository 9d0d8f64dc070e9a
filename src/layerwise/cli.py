"""The command line: its commands, and how they end. Torch is imported only by those that train or measure."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import typer
from typer.core import TyperGroup

from layerwise.commands import speaks_for_node
from layerwise.commands.calibrate import calibrate
from layerwise.commands.doctor import doctor
from layerwise.commands.evaluate import evaluate
from layerwise.commands.plan import plan
from layerwise.commands.simulate import simulate
from layerwise.commands.train import compare, train
from layerwise.errors import LayerwiseError, RankFailedError

ALONE_AFTER_S = 2.0


class _Commands(TyperGroup):
    """Ctrl-C ends a command with one line, and with the exit status that shells give it."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            if speaks_for_node():
                print("layerwise: interrupted", file=sys.stderr)
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train hybrid-attention models with a parallel layout of its own for each kind of layer.",
)
for command in (plan, simulate, evaluate, calibrate, doctor, train, compare):
    app.command()(command)


def main() -> None:
    """Entry point: a LayerwiseError becomes one message on stderr and exit status 1."""
    try:
        app()
    except LayerwiseError as error:
        # Before training, settings and files are mostly wrong for all ranks of a node alike, and one says it. Where
        # that one fails, torchrun ends the others meanwhile; a rank that is still here is alone with its fault.
        alone = not isinstance(error, RankFailedError) and not speaks_for_node()
        if alone:
            time.sleep(ALONE_AFTER_S)
        rank = f"rank {os.environ.get('RANK', '?')}: " if alone else ""
        sys.stderr.write(f"layerwise: {rank}{error}\n")  # in one piece: other ranks write there, too
        sys.stderr.flush()
        if isinstance(error, RankFailedError) and (_has_other_threads() or _is_in_a_process_group()):
            # What waits for a rank that is gone, to save a checkpoint or within NCCL, would not let this end.
            sys.stdout.flush()
            os._exit(1)
        sys.exit(1)


def _is_in_a_process_group() -> bool:
    torch_distributed = sys.modules.get("torch.distributed")
    return torch_distributed is not None and torch_distributed.is_initialized()


def _has_other_threads() -> bool:
    return any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())
