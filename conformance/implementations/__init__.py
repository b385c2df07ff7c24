"""Implementations under test, one file each. To add a peer, write its file and name it in ``ALL``."""

from .base import Deviation, Implementation, Unavailable
from .documents import DOCUMENTS
from .fast import Fast, FastDense, FastExact, FastTiled, FastTriton
from .info_nce_pytorch import InfoNCEPytorch
from .infonce import InfoNCEPackage
from .lightly import Lightly
from .open_clip import OpenClip
from .optax_ntxent import Optax
from .pml import CrossBatchMemory, PytorchMetricLearning, Reducers, SelfSupervised
from .reference import Reference
from .scipy_losses import ScipyLosses
from .setfit import SetFit
from .supcontrast import SupContrast, SupContrastToday

ALL: tuple[type[Implementation], ...] = (
    Reference,
    ScipyLosses,
    Fast,
    FastDense,
    FastTiled,
    FastExact,
    FastTriton,
    PytorchMetricLearning,
    Reducers,
    SelfSupervised,
    CrossBatchMemory,
    SupContrast,
    SupContrastToday,
    SetFit,
    InfoNCEPytorch,
    InfoNCEPackage,
    Optax,
    OpenClip,
    Lightly,
    *DOCUMENTS,
)

__all__ = ["ALL", "Deviation", "Implementation", "Unavailable"]
