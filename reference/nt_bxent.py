"""NT-BXent: the normalised, temperature-scaled binary cross-entropy of every pair of rows.

Let s_ij = similarity(z_i, z_j) / temperature and σ(x) = 1 / (1 + e^-x). P(i) is the set of positives of i among the
other rows, N(i) the rest of the other rows. The loss of row i is

    nt_bxent_loss  L_i = 1/(|P(i)| + 1) Σ_{p∈P(i)} -log σ(s_ip)  +  1/|N(i)| Σ_{n∈N(i)} -log(1 - σ(s_in))

The 1 counts the diagonal, a positive whose loss is 0. Source: the *code* of the multi-label notebook
(fixtures/worked/pair_notebook.json), cell 103. The notebook's formula differs from its code: it has
σ((1 - similarity) / temperature) for negatives, and lacks the minus sign.
"""

from __future__ import annotations

import numpy.typing as npt

from .batch import evaluate
from .scalars import mean, total
from .terms import Anchor, Columns, Result, Row, binary_cross_entropy


def nt_bxent_anchor(s: Row, i: int, A: Columns, P: Columns, N: Columns, *, no_negative: str = "zero") -> Anchor:
    """L_i = 1/(|P(i)| + 1) Σ_{p∈P(i)} -log σ(s_ip) + 1/|N(i)| Σ_{n∈N(i)} -log(1 - σ(s_in)): the notebook's cell 103."""
    positive = [binary_cross_entropy(s, i, p, positive=True) for p in P]
    negative = [binary_cross_entropy(s, i, n, positive=False) for n in N]
    of_positives = total(pair.value for pair in positive) / (len(P) + 1)
    return of_positives + mean([pair.value for pair in negative], empty=no_negative), positive + negative


def nt_bxent_loss(
    embeddings: npt.ArrayLike,
    positive_pairs: npt.ArrayLike,
    *,
    anchors: npt.ArrayLike | None = None,
    ignored: npt.ArrayLike | None = None,
    ignored_ids: npt.ArrayLike | None = None,
    temperature: float = 0.07,
    base_temperature: float | None = None,
    similarity: str = "cosine",
    no_negative: str = "zero",
    reduction: str = "mean",
) -> Result:
    """Binary cross-entropy of every pair, with separate means over the positives and the negatives of each row.

    Example:
        >>> z = [[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]]
        >>> loss, terms = nt_bxent_loss(z, [(0, 1), (1, 0), (2, 3)], temperature=0.5)
        >>> print(f"{loss:.4f}")
        0.9560

    Args:
        embeddings: [N, D] floats; complex numbers and intervals (balls of python-flint) are accepted too.
        positive_pairs: [M, 2] integers: (i, j) makes j a positive of i, but not i a positive of j. Duplicates and
            diagonal entries are allowed and have no effect.
        anchors: bool [N], the rows that are anchors; all rows by default.
        ignored: bool [N, N], the pairs (row, column) that are left out of both means, positives included. May be
            asymmetric; self pairs have no effect.
        ignored_ids: [N] integers; a pair of rows with equal ids is left out unless the column is a positive of the row.
        temperature: number from 1e-10 to 1e10; logits are similarities divided by it.
        base_temperature: if given, the loss is multiplied by temperature / base_temperature.
        similarity: "cosine" or "dot".
        no_negative: the mean over the negatives of a row that has none: "zero" or "nan".
        reduction: "mean" over the anchors, "sum", or "none" (a list, one value per anchor).

    Returns:
        The loss and its terms.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value.

    Source:
        The multi-label notebook, cell 103.
    """
    return evaluate(nt_bxent_anchor, **locals())
