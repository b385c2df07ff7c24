"""Multiple negatives ranking: InfoNCE of queries and documents, with hard negatives and up to four directions.

Row i of a is a query, row i of b is its document, and h_ik is its k-th hard negative. The document is the positive.
Let s(x, y) = similarity(x, y) / temperature. Each direction has these terms for query i:

    query_to_doc    s(a_i, b_j) for all j, and s(a_i, h_jk) for all j and k
    query_to_query  s(a_i, a_j) for j ≠ i
    doc_to_query    s(b_i, a_j) for all j
    doc_to_doc      s(b_i, b_j) for j ≠ i, and s(b_i, h_jk) for the h_jk that doc_to_doc_hard selects

With partition "joint", all chosen directions share one denominator:

    multiple_negatives_ranking_loss  L_i = -log( e^s(a_i, b_i) / Σ e^s over all terms of the directions )

With "doc_to_query", this denominator contains the positive twice, as s(a_i, b_i) and as s(b_i, a_i). With all four
directions, this is the improved contrastive loss of GTE.

With partition "per_direction", each direction has its own denominator, and "doc_to_query" makes documents anchors too:

    L_i = -log( e^s(a_i, b_i) / Σ e^s over query_to_doc ),  L_(N+i) = -log( e^s(a_i, b_i) / Σ e^s over doc_to_query )

The argument hard_negatives_scope selects what query i is contrasted with:

    "batch"     all documents and the hard negatives of all queries (the default)
    "own"       all documents and its own hard negatives
    "own_only"  its own document and its own hard negatives

The argument doc_to_doc_hard selects the hard negatives of doc_to_doc:

    "others"  those of the other queries (the default with scope "batch")
    "all"     those of all queries
    "none"    none (the default with scope "own" and "own_only")

With hardness strength α, the terms e^s of some negatives of query_to_doc are multiplied by e^(α · similarity). No
gradient flows through this factor. The hardness mode selects the negatives:

    "in_batch_negatives"  the documents and the hard negatives of the other queries
    "hard_negatives"      the hard negatives of the query itself
    "all_negatives"       both

Without hard negatives, this loss equals info_nce_loss at the same temperature:

    direction "a_to_b"  this loss with the default options
    direction "both"    this loss with directions="query_to_doc+doc_to_query", partition="per_direction"

The definition is sentence_transformers/sentence_transformer/losses/multiple_negatives_ranking.py of
huggingface/sentence-transformers at commit cad2119 (version 6.2.0 computes the same).

Sources:

    the loss             Henderson et al., "Efficient Natural Language Response Suggestion for Smart Reply",
                         arXiv 1705.00652, section 4.4
    all four directions  Li et al., "Towards General Text Embeddings with Multi-stage Contrastive Learning" (GTE),
                         arXiv 2308.03281, section 3.3
    hardness             Lan et al. 2025, arXiv 2503.04812, equation 5, as cited by the code above
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy.typing as npt

from . import checks
from .batch import evaluate_similarities
from .nt_xent import nt_xent_anchor
from .scalars import Scalar, zero_like
from .similarity import similarity_matrix
from .terms import Anchor, Columns, Result, Row


def hard_of_documents(doc_to_doc_hard: str | None, hard_negatives_scope: str) -> str:
    """Return doc_to_doc_hard, or its default for this scope if it is None."""
    return doc_to_doc_hard or ("others" if hard_negatives_scope == "batch" else "none")


def multiple_negatives_ranking_weights(
    similarity: Sequence[Row],
    P: Sequence[Columns],
    N: Sequence[Columns],
    *,
    hardness_mode: str,
    hardness_strength: float,
    hard_negatives_scope: str,
    directions: str,
    partition: str,
    doc_to_doc_hard: str | None,
) -> list[list[Scalar]]:
    """Return [R][C]: α · similarity for the negatives of query_to_doc that the hardness mode selects, else 0."""
    chosen = directions.split("+")
    apart = partition == "per_direction" and "doc_to_query" in chosen
    n = len(similarity) // 2 if apart else len(similarity)
    # The columns are N documents, the N H hard negatives, and the blocks of further directions.
    blocks = 0 if apart else len(chosen) - 1
    repeated = "doc_to_doc" in chosen and hard_of_documents(doc_to_doc_hard, hard_negatives_scope) != "none"
    each = (len(similarity[0]) - n * (1 + blocks)) // (2 if repeated else 1) // n

    def is_harder(i: int, k: int) -> bool:
        if i >= n or k >= n + n * each or k == i:
            return False
        own = k >= n and (k - n) // each == i
        return hardness_mode == "all_negatives" or own == (hardness_mode == "hard_negatives")

    zero = zero_like(similarity[0][0])
    alpha = 0.0 if hardness_mode == "none" else float(hardness_strength)
    return [[s * alpha if is_harder(i, k) else zero for k, s in enumerate(row)] for i, row in enumerate(similarity)]


def multiple_negatives_ranking_anchor(
    s: Row, i: int, A: Columns, P: Columns, N: Columns, *, weights: Row | None = None
) -> Anchor:
    """L_i = -log( e^s_ip / Σ_{a∈A(i)} e^(s_ia + w_a) ), where p is the one positive, w are the weights, and w_p = 0.

    Source: arXiv 1705.00652, section 4.4; the weights: arXiv 2503.04812, equation 5.
    """
    if weights is not None:
        s = [x + w for x, w in zip(s, weights, strict=True)]
    return nt_xent_anchor(s, i, A, P, N)


def multiple_negatives_ranking_loss(
    embeddings_a: npt.ArrayLike,
    embeddings_b: npt.ArrayLike,
    *,
    hard_negatives: npt.ArrayLike | None = None,
    hard_negatives_scope: str = "batch",
    directions: str = "query_to_doc",
    partition: str = "joint",
    doc_to_doc_hard: str | None = None,
    ignored: npt.ArrayLike | None = None,
    hardness_mode: str = "none",
    hardness_strength: float = 0.0,
    temperature: float = 0.05,
    base_temperature: float | None = None,
    similarity: str = "cosine",
    reduction: str = "mean",
) -> Result:
    """InfoNCE of queries and documents, with hard negatives and up to four directions (MNRL; GTE with all four).

    Example:
        >>> z = [[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]]
        >>> other = [[0.8, 0.6], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]
        >>> loss, terms = multiple_negatives_ranking_loss(z, other, temperature=0.5)
        >>> print(f"{loss:.4f}")
        1.0432

    Args:
        embeddings_a: [N, D] floats, complex numbers, or intervals (balls of python-flint); the queries.
        embeddings_b: [N, D], the documents; row i is the positive of query i.
        hard_negatives: [N, H, D], H hard negatives of every query.
        hard_negatives_scope: "batch": a hard negative is contrasted with every query. "own": only with its own query.
            "own_only": the same, and a query is contrasted with its own document only; requires hard_negatives.
        directions: "query_to_doc", or "query_to_doc" followed by some of "query_to_query", "doc_to_query" and
            "doc_to_doc", in this order and joined by "+".
        partition: "joint": one denominator for all directions. "per_direction": one denominator per direction. It is
            not available with query_to_query or doc_to_doc, which have no positives.
        doc_to_doc_hard: under doc_to_doc, a document is contrasted with the hard negatives of the "others" (the other
            queries), of "all" queries, or of "none". None: "others" with scope "batch", else "none".
        ignored: bool [N, C]; True leaves a pair out. Row i holds the pairs of query i and of its document. The columns
            are the N documents, the N H hard negatives (those of query 0 first), then N columns for each further
            direction, in the order of ``directions``. With doc_to_doc, N H columns follow for the hard negatives as
            negatives of the documents, unless doc_to_doc_hard selects none. Positives must not be ignored: the
            diagonal of the first N columns and, with "per_direction", of the columns of doc_to_query. Entries of pairs
            that are not contrasted have no effect.
        hardness_mode: the negatives of query_to_doc whose exponentials are multiplied by
            e^(hardness_strength · similarity): "none", "in_batch_negatives" (the documents and the hard negatives of
            the other queries), "hard_negatives" (those of the query itself) or "all_negatives" (both).
        hardness_strength: number from 0 to 1e10. No gradient flows through the factors.
        temperature: number from 1e-10 to 1e10; logits are similarities divided by it. The ``scale`` of
            sentence-transformers is 1 / temperature.
        base_temperature: if given, the loss is multiplied by temperature / base_temperature.
        similarity: "cosine" or "dot".
        reduction: "mean" or "sum" over the anchors, or "none": a list with one value per anchor. The anchors are the N
            queries and, with "per_direction" and doc_to_query, then the N documents.

    Returns:
        The loss and its terms.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value, or does not fit the others.

    Source:
        arXiv 1705.00652, section 4.4. Four directions: GTE, arXiv 2308.03281, section 3.3. Hardness: arXiv 2503.04812,
        equation 5. Code: multiple_negatives_ranking.py of sentence-transformers.
    """
    return _evaluate(**locals())


def _evaluate(
    embeddings_a: npt.ArrayLike,
    embeddings_b: npt.ArrayLike,
    *,
    hard_negatives: npt.ArrayLike | None,
    hard_negatives_scope: str,
    directions: str,
    partition: str,
    doc_to_doc_hard: str | None,
    ignored: object,
    hardness_mode: str,
    hardness_strength: float,
    similarity: str,
    **options: Any,
) -> Result:
    """Check the arguments, compute the logits and A(i) of every anchor, and evaluate the formula."""
    chosen = checks.check_directions(directions, partition, hard_negatives_scope, doc_to_doc_hard, hard_negatives)
    hardness = {"hardness_mode": hardness_mode, "hardness_strength": hardness_strength}
    checks.check_options({**options, **hardness, "similarity": similarity})
    a = checks.check_embeddings(embeddings_a, similarity, name="embeddings_a", least=1)
    b = checks.check_second_tower(embeddings_b, similarity, a)
    n = len(a)
    h = [] if hard_negatives is None else checks.check_hard_negatives(hard_negatives, similarity, a)
    owner = [k // (len(h) // n) for k in range(len(h))]  # the query of each hard negative
    shared = hard_negatives_scope == "batch"

    def block(rows: list[list[Scalar]], columns: list[list[Scalar]]) -> list[list[Scalar]]:
        return similarity_matrix(rows, similarity, columns) if columns else [[] for _ in rows]

    # Each block has similarities, [N][...], and a function that returns its columns in A(i).
    queries: list[tuple[list[list[Scalar]], Callable[[int], list[int]]]] = [
        (block(a, b), lambda i: [j for j in range(n) if j == i or hard_negatives_scope != "own_only"]),
        (block(a, h), lambda i: [k for k in range(len(h)) if shared or owner[k] == i]),
    ]
    if "query_to_query" in chosen:
        queries.append((block(a, a), lambda i: [j for j in range(n) if j != i]))
    documents: list[tuple[list[list[Scalar]], Callable[[int], list[int]]]] = []
    if "doc_to_query" in chosen:
        documents.append((block(b, a), lambda i: list(range(n))))
    if "doc_to_doc" in chosen:
        documents.append((block(b, b), lambda i: [j for j in range(n) if j != i]))
        if (kind := hard_of_documents(doc_to_doc_hard, hard_negatives_scope)) != "none":
            documents.append((block(b, h), lambda i: [k for k in range(len(h)) if kind == "all" or owner[k] != i]))

    width = sum(len(similarities[0]) for similarities, _ in queries + documents)
    left_out = [[False] * width] * n
    if ignored is not None:
        left_out = checks.check_mask("ignored", ignored, [n, width], per="pair").tolist()
        checks.check_kept(left_out, range(n))

    apart = partition == "per_direction" and documents
    # Documents that are anchors have their own rows. Columns outside A(i) make these as wide as the rows of queries.
    bands = [queries, [*documents, (block(b, h), lambda i: [])]] if apart else [queries + documents]
    matrix: list[list[Scalar]] = []
    members: list[list[int]] = []
    start = 0
    for band in bands:
        for i in range(n):
            row: list[Scalar] = []
            columns: list[int] = []
            for similarities, counted in band:
                columns += [len(row) + k for k in counted(i)]
                row += similarities[i]
            matrix.append(row)
            members.append([k for k in columns if not left_out[i][start + k]])
        start += len(matrix[0])
    if apart and ignored is not None:
        second = [row[len(matrix[0]) :] for row in left_out]
        checks.check_kept(second, range(n))
    # The positive of query i and of document i is column i.
    is_positive = [[j == i % n for j in range(len(matrix[0]))] for i in range(len(matrix))]
    weights = partial(
        multiple_negatives_ranking_weights,
        hardness_mode=hardness_mode,
        hardness_strength=hardness_strength,
        hard_negatives_scope=hard_negatives_scope,
        directions=directions,
        partition=partition,
        doc_to_doc_hard=doc_to_doc_hard,
    )
    return evaluate_similarities(
        multiple_negatives_ranking_anchor, matrix, is_positive, members=members, weights=weights, **options
    )
