"""Every loss in plain loops, term by term as in the published worked examples. Nothing here is fast.

Each loss is a formula of one anchor's logits and sets, ``<name>_anchor(s, i, A, P, N)``, next to its equation in the
module of its family. ``batch`` turns arguments into logits and sets, and the anchors' losses into one loss. ``terms``
defines the pairs that formulas are built from, and the record that every function returns together with its loss.
``scipy_losses`` is an independent evaluation of every loss; it shares no code with the loops.

The loops use only plain arithmetic (``+ - * /``, ``np.exp``, ``np.expm1``, ``np.log``, ``np.log1p``, ``np.sqrt`` of
scalars). So they run unchanged on float64, on complex128 (the complex step gives gradients), on arrays of such scalars,
and on the balls of ``python-flint``, which are intervals with proved bounds.
"""

from .dclw import dclw_loss
from .hard_negative import hard_negative_loss
from .info_nce import info_nce_loss
from .nt_bxent import nt_bxent_loss
from .nt_xent import nt_xent_loss, nt_xent_pairwise_loss
from .ranking import multiple_negatives_ranking_loss
from .sigmoid import sigmoid_loss
from .supcon import supcon_epsilon_loss, supcon_in_loss, supcon_loss
from .terms import Pair, Result, Terms
from .views import flatten_views, interleaved_partners, repeat_labels, split_views, stacked_partners

__all__ = [
    "Pair",
    "Result",
    "Terms",
    "dclw_loss",
    "flatten_views",
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
]
