"""Every loss in plain loops, term by term. This code is written to be read; it is slow.

- ``supcon``, ``nt_xent`` and the other modules of losses define formulas. ``<name>_anchor(s, i, A, P, N)`` computes the
  loss of one anchor, and has the equation in its docstring.
- ``batch`` computes the logits and the sets A, P and N, applies the formula to every anchor, and reduces the results.
- ``terms`` defines the intermediate values that every loss returns.
- ``scipy_losses`` evaluates every loss independently, without the loops.

The loops use only ``+ - * /`` and ``np.exp``, ``np.expm1``, ``np.log``, ``np.log1p`` and ``np.sqrt`` of scalars. The
same code therefore runs on floats, on complex numbers (the complex step gives gradients), on arrays of either, and on
the balls of ``python-flint``, which are intervals with proved bounds.
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
