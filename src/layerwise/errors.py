"""Every error that layerwise raises on purpose.

    LayerwiseError
      SpecError(ValueError)        a cluster, model, strategy or training setting is not legal
      DataError(ValueError)        a data file, length file or sample cannot be used
      InfeasibleError(ValueError)  a sample or a step fits nowhere within the token budget
      PlanError(RuntimeError)      a plan breaks an invariant: a bug, or a plan edited by hand
        PlanMismatchError          ranks hold different plans for the same step
      UnsupportedError(NotImplementedError)  a feature that is refused rather than ignored
      RankFailedError(RuntimeError)          a rank process ended before its work did
        CollectiveError            ranks that were waited for are gone, late or cannot be reached
      DivergedError(ArithmeticError)         the loss or the gradient is no longer finite
      CheckpointError(RuntimeError)          a checkpoint is damaged, or could not be written

Messages name both numbers, the rule, the legal values and the option to change.
"""


class LayerwiseError(Exception):
    """Base class: catch this to catch everything that layerwise raises on purpose."""


class SpecError(LayerwiseError, ValueError):
    """A cluster, model, strategy or training setting is not legal."""


class DataError(LayerwiseError, ValueError):
    """A data file, a length file or one sample in it cannot be used."""


class InfeasibleError(LayerwiseError, ValueError):
    """A sample, or a whole step, fits nowhere within the token budget."""


class PlanError(LayerwiseError, RuntimeError):
    """A plan breaks an invariant; the plan is wrong, not the input."""


class PlanMismatchError(PlanError):
    """Ranks hold different plans for the same step."""


class UnsupportedError(LayerwiseError, NotImplementedError):
    """A model or kernel feature that is refused rather than ignored."""


class DivergedError(LayerwiseError, ArithmeticError):
    """The loss or the gradient is no longer finite."""


class CheckpointError(LayerwiseError, RuntimeError):
    """A checkpoint is damaged, or could not be written."""


class RankFailedError(LayerwiseError, RuntimeError):
    """A rank process ended before its work did."""


class CollectiveError(RankFailedError):
    """Ranks that this one waited for are gone, late or cannot be reached.

    rank, where: which rank waited, at which step, micro-batch and layer. peers: whom it waited for.
    """

    def __init__(self, where: str, reason: str, *, rank: int, peers: list[int]) -> None:
        super().__init__(f"{', '.join([f'rank {rank}', *([where] if where else [])])}: {reason}")
        self.where, self.reason, self.rank, self.peers = where, reason, rank, peers
