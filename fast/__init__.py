"""Contrastive losses for torch, on any device, with the names, keywords and defaults of `pairproof.reference`.

Embeddings are ``[N, D]`` in float64, float32, bfloat16 or float16. `pairproof.fast.engine` describes the backends and
the range of temperatures and norms in which values and gradients are correct.
"""

from __future__ import annotations

from . import kernels
from .caching import cached_backward
from .dclw import dclw_loss
from .distributed import Ring, gather_rows
from .engine.jit import warm_up
from .engine.spec import register
from .hard_negative import hard_negative_loss
from .info_nce import info_nce_loss
from .modules import (
    DCLWLoss,
    HardNegativeLoss,
    InfoNCELoss,
    MultipleNegativesRankingLoss,
    NTBXentLoss,
    NTXentLoss,
    NTXentPairwiseLoss,
    SigmoidLoss,
    SupConEpsilonLoss,
    SupConInLoss,
    SupConLoss,
)
from .nt_bxent import nt_bxent_loss
from .nt_xent import nt_xent_loss, nt_xent_pairwise_loss
from .ranking import gist_masks, multiple_negatives_ranking_loss
from .sigmoid import sigmoid_loss
from .supcon import supcon_epsilon_loss, supcon_in_loss, supcon_loss
from .views import flatten_views, interleaved_partners, repeat_labels, split_views, stacked_partners

register("triton", kernels)

__all__ = [
    "DCLWLoss",
    "HardNegativeLoss",
    "InfoNCELoss",
    "MultipleNegativesRankingLoss",
    "NTBXentLoss",
    "NTXentLoss",
    "NTXentPairwiseLoss",
    "Ring",
    "SigmoidLoss",
    "SupConEpsilonLoss",
    "SupConInLoss",
    "SupConLoss",
    "cached_backward",
    "dclw_loss",
    "flatten_views",
    "gather_rows",
    "gist_masks",
    "hard_negative_loss",
    "info_nce_loss",
    "interleaved_partners",
    "multiple_negatives_ranking_loss",
    "nt_bxent_loss",
    "nt_xent_loss",
    "nt_xent_pairwise_loss",
    "repeat_labels",
    "sigmoid_loss",
    "split_views",
    "stacked_partners",
    "supcon_epsilon_loss",
    "supcon_in_loss",
    "supcon_loss",
    "warm_up",
]
