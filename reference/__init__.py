"""Every loss in plain loops, term by term as the published worked examples spell it out. Nothing here is fast.

Each loss is a formula of one anchor's logits and sets, ``<name>_anchor(s, i, A, P, N)``, under its equation in the file
of its family. ``batch`` turns arguments into logits and sets, and the anchors' losses into one. ``terms`` has the pairs
that formulas are made of and the record that every function returns beside its loss. ``scipy_losses`` evaluates every
loss once more and shares nothing with the loops.

The loops use plain arithmetic alone (``+ - * /``, ``np.exp``, ``np.expm1``, ``np.log``, ``np.log1p``, ``np.sqrt`` of
scalars), so they run unchanged on float64, on complex128 (the complex step yields gradients), on arrays of such
scalars, and on the balls of ``python-flint``.
"""

from .info_nce import info_nce_loss
from .nt_bxent import nt_bxent_loss
from .nt_xent import nt_xent_loss, nt_xent_pairwise_loss
from .supcon import supcon_epsilon_loss, supcon_in_loss, supcon_loss
from .terms import Pair, Result, Terms
from .views import flatten_views, interleaved_partners, repeat_labels, split_views, stacked_partners

__all__ = [
    "Pair",
    "Result",
    "Terms",
    "flatten_views",
    "info_nce_loss",
    "interleaved_partners",
    "nt_bxent_loss",
    "nt_xent_loss",
    "nt_xent_pairwise_loss",
    "repeat_labels",
    "split_views",
    "stacked_partners",
    "supcon_epsilon_loss",
    "supcon_in_loss",
    "supcon_loss",
]
