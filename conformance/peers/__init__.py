"""Implementations under test, one file each. To add a peer, write its file and name it in ``ALL``."""

from .base import Deviation, Implementation, Unavailable
from .documents import DOCUMENTS
from .fast import Fast, FastDense, FastExact, FastTiled, FastTriton
from .pml import PytorchMetricLearning
from .reference import Reference
from .scipy_road import ScipyRoad
from .supcontrast import SupContrast, SupContrastToday

ALL: tuple[type[Implementation], ...] = (
    Reference,
    ScipyRoad,
    Fast,
    FastDense,
    FastTiled,
    FastExact,
    FastTriton,
    PytorchMetricLearning,
    SupContrast,
    SupContrastToday,
    *DOCUMENTS,
)

__all__ = ["ALL", "Deviation", "Implementation", "Unavailable"]
