"""NT-BXent: the normalised, temperature-scaled binary cross-entropy of every pair of rows.

    s_ij  similarity(z_i, z_j) / temperature
    σ(x)  1 / (1 + e^-x)
    P(i)  the positives of i among the other rows
    N(i)  the rest of the other rows

The loss of row i is

    nt_bxent_loss  L_i = 1/(|P(i)| + 1) Σ_{p∈P(i)} -log σ(s_ip)  +  1/|N(i)| Σ_{n∈N(i)} -log(1 - σ(s_in))

The 1 in |P(i)| + 1 counts the diagonal, a positive whose loss is 0.

Source: the code of the multi-label notebook (fixtures/worked/pair_notebook.json), cell 103. The formula in this
notebook differs from the code: it has σ((1 - similarity) / temperature) for negatives, and lacks the minus sign.
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
        embeddings: [N, D] floats, complex numbers, or intervals (balls of python-flint).
        positive_pairs: [M, 2] integers; (i, j) makes j a positive of i, but not i a positive of j. Duplicates and pairs
            (i, i) have no effect.
        anchors: bool [N], the rows that are anchors; all rows by default.
        ignored: bool [N, N], the pairs (row, column) to leave out of both means, even positives. May be asymmetric; the
            diagonal has no effect.
        ignored_ids: [N] integers. Negatives with the anchor's id are left out, for example duplicates.
        temperature: number from 1e-10 to 1e10; logits are similarities divided by it.
        base_temperature: if given, the loss is multiplied by temperature / base_temperature.
        similarity: "cosine" or "dot".
        no_negative: the mean over the negatives of a row without negatives: "zero" or "nan".
        reduction: "mean" or "sum" over the anchors, or "none": a list with one value per anchor.

    Returns:
        The loss and its terms.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value.

    Source:
        The multi-label notebook, cell 103.
    """
    return evaluate(nt_bxent_anchor, **locals())
