"""What a trainer is given: a Run, and batches of held-out sets."""

from common.run.evaluation import EvaluationLoader
from common.run.run import Run

__all__ = ["EvaluationLoader", "Run"]
