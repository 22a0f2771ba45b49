"""What a load will do, decided before a byte copies: pure, no I/O, no tensors."""

from streamload.planning.build import build_plan
from streamload.planning.records import (
    Comparison,
    MappedView,
    Plan,
    PlannedTensor,
    Targets,
    TargetSpec,
)

__all__ = [
    "Comparison",
    "MappedView",
    "Plan",
    "PlannedTensor",
    "TargetSpec",
    "Targets",
    "build_plan",
]
