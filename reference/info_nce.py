"""InfoNCE: the cross-entropy of two towers, whose rows are each other's positives by their place.

With s_ij = similarity(a_i, b_j) / temperature, row i of one tower is contrasted with the other tower:

    no negatives given     L_i = -log( e^s_ii / sum over j of e^s_ij )
    negatives n_1 .. n_K   L_i = -log( e^s_ii / (e^s_ii + sum over k of e^(similarity(a_i, n_k) / temperature)) )

The loss is the mean over the rows of the first tower, over those of the second (s_ji for s_ij), or over both. Sources:
van den Oord et al., "Representation Learning with Contrastive Predictive Coding", arXiv 1807.03748; both directions are
CLIP's, Radford et al., arXiv 2103.00020; one positive and a queue of negatives MoCo's, He et al., arXiv 1911.05722,
equation 1.
"""

from __future__ import annotations

import numpy.typing as npt

from .batch import Batch, check_numbers, lay_out
from .checks import check_choice, check_embeddings, check_further_rows, check_second_tower
from .similarity import similarity_matrix
from .supcon import add_pair
from .terms import Result, Scalar


def info_nce_anchors(batch: Batch) -> None:
    """Evaluate every anchor against its one positive."""
    for i in batch.anchors:
        (positive,) = batch.positives[i]
        batch.anchor_losses[i] = add_pair(batch, i, positive, batch.others[i]).value


def info_nce_loss(
    embeddings_a: npt.ArrayLike,
    embeddings_b: npt.ArrayLike,
    *,
    negatives: npt.ArrayLike | None = None,
    direction: str = "both",
    temperature: float = 0.07,
    base_temperature: float | None = None,
    similarity: str = "cosine",
    reduction: str = "mean",
) -> Result:
    """InfoNCE of two towers: row k of one is the positive of row k of the other.

    Args:
        embeddings_a: [N, D] floats, complexes or balls.
        embeddings_b: [N, D], the other tower.
        negatives: [K, D], what every anchor is contrasted with in place of the other rows of the other tower, the same
            for both directions.
        direction: whose rows are anchors: "both" (those of a, then those of b), "a_to_b" (those of a) or "b_to_a".
        temperature: positive; logits are similarities divided by it.
        base_temperature: if given, the loss is multiplied by temperature / base_temperature.
        similarity: "cosine" or "dot".
        reduction: "mean" over the anchors, "sum", or "none" (a list, one value per anchor: 2N for "both").

    Returns:
        The loss and its terms.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape or value.

    Source:
        arXiv 1807.03748; CLIP, arXiv 2103.00020; MoCo, arXiv 1911.05722, equation 1.
    """
    check_choice("direction", direction)
    check_choice("reduction", reduction)
    check_numbers(temperature, base_temperature, similarity)
    a = check_embeddings(embeddings_a, similarity, name="embeddings_a", least=1)
    n, columns = len(a), len(a[0])
    b = check_second_tower(embeddings_b, similarity, (n, columns))
    queue: list[list[Scalar]] = []
    if negatives is not None:
        queue = check_further_rows(
            "negatives", negatives, similarity, shape="[K, D]", columns=columns, like="embeddings_a"
        )

    matrix: list[list[Scalar]] = []
    if direction != "b_to_a":
        matrix += similarity_matrix(a, similarity, b + queue)
    if direction != "a_to_b":
        matrix += similarity_matrix(b, similarity, a + queue)
    if negatives is None:
        others = [list(range(n)) for _ in matrix]
    else:
        others = [[i % n, *range(n, n + len(queue))] for i in range(len(matrix))]
    batch = lay_out(
        matrix,
        [[j == i % n for j in range(n + len(queue))] for i in range(len(matrix))],
        anchors=list(range(len(matrix))),
        temperature=float(temperature),
        base_temperature=None if base_temperature is None else float(base_temperature),
        others=others,
    )
    info_nce_anchors(batch)
    return batch.finish(reduction)
