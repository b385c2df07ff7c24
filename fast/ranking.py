"""Multiple negatives ranking: InfoNCE of queries and documents, with hard negatives and up to four directions.

Row i of a is a query, row i of b its document, and h_ik the k-th hard negative of query i. Let s(x, y) be the
similarity of two rows divided by the temperature. The terms of query i in each direction are

    query_to_doc    s(a_i, b_j) for all j, and s(a_i, h_jk) for all j and k
    query_to_query  s(a_i, a_j) for j != i
    doc_to_query    s(b_i, a_j) for all j
    doc_to_doc      s(b_i, b_j) for j != i, and s(b_i, h_jk) for the h_jk that doc_to_doc_hard selects

The loss of query i is -log(e^s(a_i, b_i) / sum of e^s over all terms of the chosen directions). With "doc_to_query",
the denominator contains the positive twice, as in GTE. With partition "per_direction", each direction has its own
denominator, and the documents are also anchors if "doc_to_query" is chosen.

A hardness mode multiplies the exponentials of some negatives of query_to_doc by e^(strength * similarity), without a
gradient. The product is e^(similarity / T') with 1 / T' = 1 / temperature + strength. The engine evaluates the sum at
the temperature T', and multiplies the gradient by T' / temperature.

Implementation: each direction returns the logarithm of (sum of e^s) / e^s(a_i, b_i); the sum of query_to_doc leaves out
the positive. The loss is log(1 + the sum of these ratios), which is accurate for small losses.

Sources:

- Henderson et al. 2017, arXiv 1705.00652, section 4.4.
- GTE: Li et al. 2023, arXiv 2308.03281, section 3.3.
- Hardness: Lan et al. 2025, arXiv 2503.04812, equation 5.
- multiple_negatives_ranking.py of huggingface/sentence-transformers at commit cad2119.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import (
    HARDNESS_MODES,
    SIMILARITIES,
    across_ranks,
    check_alike,
    check_choice,
    check_directions,
    check_embeddings,
    check_hard_negatives,
    check_ignored_blocks,
    check_options,
    check_range,
    ranks_of,
)
from .distributed import Group
from .engine import (
    AnchorValues,
    Backend,
    Batch,
    Hardened,
    Policy,
    References,
    Rule,
    Similarity,
    Sizes,
    Targets,
    anchor_values,
    blocks,
    hardened_loss,
    pair_logits,
    precision,
    reduced,
)
from .engine.device import dtypes_of, traced, without_autocast
from .engine.rowwise import masks_of, own_columns
from .engine.scaling import differentiable_rows
from .engine.transforms import Reverse

Scope = Literal["batch", "own", "own_only"]
Directions = Literal[
    "query_to_doc",
    "query_to_doc+query_to_query",
    "query_to_doc+doc_to_query",
    "query_to_doc+doc_to_doc",
    "query_to_doc+query_to_query+doc_to_query",
    "query_to_doc+query_to_query+doc_to_doc",
    "query_to_doc+doc_to_query+doc_to_doc",
    "query_to_doc+query_to_query+doc_to_query+doc_to_doc",
]
HardOfDoc = Literal["others", "all", "none"]
Partition = Literal["joint", "per_direction"]
HardnessMode = Literal["none", "in_batch_negatives", "hard_negatives", "all_negatives"]
Reduction = Literal["mean", "sum", "none"]
ROUNDING = 8
"""The error of a product of two rows of D numbers is at most this number times sqrt(D) eps / 2 times both norms, with
probability 1 - 2 exp(-32) (Higham and Mary 2019, "A New Approach to Probabilistic Rounding Error Analysis")."""


@across_ranks
def multiple_negatives_ranking_loss(
    embeddings_a: Tensor,
    embeddings_b: Tensor,
    *,
    hard_negatives: Tensor | None = None,
    hard_negatives_scope: Scope = "batch",
    directions: Directions = "query_to_doc",
    partition: Partition = "joint",
    doc_to_doc_hard: HardOfDoc | None = None,
    ignored: Tensor | None = None,
    hardness_mode: HardnessMode = "none",
    hardness_strength: float = 0.0,
    temperature: float | Tensor = 0.05,
    base_temperature: float | None = None,
    similarity: Similarity = "cosine",
    reduction: Reduction = "mean",
    validate: bool = False,
    backend: Backend = "auto",
    group: Group = None,
) -> Tensor:
    """InfoNCE of queries and documents, with hard negatives and up to four directions (MNRL; GTE with all four).

    Without hard negatives and at the same temperature, `info_nce_loss` computes the same loss in two cases:

    - ``direction="a_to_b"`` is this loss with the default options;
    - ``direction="both"`` is ``directions="query_to_doc+doc_to_query"`` with ``partition="per_direction"``.

    Example:
        >>> import torch
        >>> from pairproof.fast import multiple_negatives_ranking_loss
        >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]])
        >>> other = torch.tensor([[0.8, 0.6], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
        >>> loss = multiple_negatives_ranking_loss(z, other, temperature=0.5)
        >>> print(f"{loss:.4f}")
        1.0432

    Args:
        embeddings_a: floating ``[N, D]``, N >= 1: the queries.
        embeddings_b: floating ``[N, D]``: the documents. Row i is the positive of query i.
        hard_negatives: floating ``[N, H, D]``: H hard negatives of each query.
        hard_negatives_scope: "batch": each hard negative is contrasted with every query. "own": only with its own
            query. "own_only": only with its own query, and query_to_doc leaves out the documents of other queries;
            requires hard_negatives.
        directions: "query_to_doc", optionally followed by "query_to_query", "doc_to_query" and "doc_to_doc", in this
            order, joined by "+".
        partition: "joint": one denominator for all directions. "per_direction": one for each direction; not allowed
            with query_to_query or doc_to_doc, which have no positives.
        doc_to_doc_hard: the hard negatives of documents under doc_to_doc: those of the "others" (the other queries), of
            "all" queries, or "none". None: "others" with scope "batch", else "none".
        ignored: bool ``[N, C]``: pairs to leave out. Row i has the pairs of query i and of its document. The columns
            are blocks, in this order: N documents; N H hard negatives, if given, those of query 0 first; N columns for
            each further direction, in the order of ``directions``. With doc_to_doc, the N H hard negatives follow
            again, as negatives of the documents, unless ``doc_to_doc_hard`` is "none". The positive, column i of the
            first block, must not be ignored. With "per_direction", neither must the positive of doc_to_query. Entries
            of pairs that are not contrasted have no effect. `gist_masks` returns the mask of GISTEmbed.
        hardness_mode: which negatives of query_to_doc are weighted by e^(hardness_strength * similarity): "none",
            "in_batch_negatives" (documents and hard negatives of other queries), "hard_negatives" (those of the query
            itself) or "all_negatives" (both).
        hardness_strength: number from 0 to 1e10; no effect if the mode is "none". No gradient flows through the
            weights.
        temperature: number from 1e-10 to 1e10 that similarities are divided by. A 0-dimensional tensor may require a
            gradient. The ``scale`` of sentence-transformers is 1 / temperature.
        base_temperature: positive number; if given, the loss is multiplied by ``temperature / base_temperature``.
        similarity: "cosine" or "dot".
        reduction: "mean" or "sum" over the anchors, or "none": one value per anchor. The anchors are the N queries and,
            with "per_direction" and doc_to_query, then the N documents.
        validate: also check values on accelerators, which synchronises with the device.
        backend: "auto", "dense", "tiled", "exact" or "triton"; see `pairproof.fast.engine`.
        group: process group of torch.distributed, or "world", if other processes have further rows of the batch; see
            `pairproof.fast.distributed`.

    Returns:
        A scalar, or ``[anchors]`` under "none"; float64 for float64 embeddings, else float32.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, value or device, or does not fit the others, or an option is
            unknown.

    Source:
        arXiv 1705.00652, section 4.4; GTE, arXiv 2308.03281, section 3.3; hardness: arXiv 2503.04812, equation 5;
        multiple_negatives_ranking.py of sentence-transformers.
    """
    chosen = check_directions(directions, partition, hard_negatives_scope, doc_to_doc_hard, hard_negatives)
    hard_of_doc = _hard_of_doc(chosen, hard_negatives_scope, doc_to_doc_hard)
    rule, policy = Rule("out", similarity, temperature, "only_negatives"), Policy(reduction, base_temperature)
    check_options(rule, policy, backend, validate=validate)
    check_choice("hardness_mode", hardness_mode, HARDNESS_MODES)
    check_range("hardness_strength", hardness_strength)
    ranks = None if group is None else ranks_of(group)
    check = partial(check_embeddings, similarity=similarity, validate=validate, least=1 if ranks is None else 0)
    a, b = embeddings_a, embeddings_b
    of_a, of_b = check(a, name="embeddings_a"), check(b, name="embeddings_b")
    if a.shape != b.shape:
        raise ValueError(
            f"embeddings_b: expected the shape of embeddings_a, {list(a.shape)}, got shape {list(b.shape)}"
        )
    check_alike("embeddings_b", b, "embeddings_a", a)
    hard = of_hard = None
    if hard_negatives is not None:
        hard = check_hard_negatives(hard_negatives, a)
        of_hard = check(hard, name="hard_negatives", shape="[N, H, D]")
        check_alike("hard_negatives", hard, "embeddings_a", a)
    plain = ranks is None and ignored is None and (hardness_mode == "none" or not hardness_strength)
    to_query, to_doc = "doc_to_query" in chosen, "doc_to_doc" in chosen
    plain = plain and hard_negatives_scope == "batch" and (hard is None or not to_doc or hard_of_doc == "others")
    if backend == "auto" and plain:
        apart = partition == "per_direction" and to_query
        contrasted = blocks.Directions("query_to_query" in chosen, to_query, to_doc, apart)
        options: dict[str, Any] = {"directions": directions, "partition": partition, "similarity": similarity}
        again = partial(_composed, temperature=temperature, **options)
        rows, sizes = ((a, b), (of_a, of_b)) if hard is None else ((a, b, hard), (of_a, of_b, of_hard))
        with without_autocast(a):
            found = blocks.loss_of(rows, sizes, rule, contrasted, policy, again)
        if found is not None:
            return found
    storage, (returned, wide) = a.dtype, dtypes_of(a)
    needed = (
        ""
        if backend == "triton" or traced(a)
        else precision(rule, a, (of_a, of_b, *([] if hard is None else [of_hard])))
    )
    computing = wide if needed or backend == "exact" else returned
    if needed == "exact":
        backend = "exact"
    # Rows are converted here, so that the gradients of all blocks are added before they are rounded.
    a, b, hard = a.to(computing), b.to(computing), None if hard is None else hard.to(computing)
    in_batch = hardness_strength if hardness_mode in ("in_batch_negatives", "all_negatives") else 0.0
    own = hardness_strength if hardness_mode in ("hard_negatives", "all_negatives") else 0.0
    alone = hard is None and chosen == ["query_to_doc"] and ignored is None and ranks is None
    if alone and in_batch and backend == "auto" and not isinstance(temperature, Tensor):
        # One pass serves positives and negatives, although they have different temperatures.
        part = 1 / (1 + in_batch * temperature)
        same: dict[str, Any] = {"hardness_mode": hardness_mode, "hardness_strength": hardness_strength}
        same |= {"temperature": temperature, "similarity": similarity, "reduction": reduction}
        again = partial(multiple_negatives_ranking_loss, backend="tiled", **same)
        contrast = replace(rule, denominator="all", temperature=temperature * part)
        targets = Targets("partners", torch.arange(a.shape[0], device=a.device))
        batch = Batch(a, targets, contrast, References(b, sizes=of_b), storage=storage, sizes=of_a)
        loss = hardened_loss(batch, policy, Hardened(part, again))
        if loss is not None:
            return loss.to(returned)
    local, number = torch.arange(a.shape[0], device=a.device), 0 if hard_negatives is None else hard_negatives.shape[1]
    positives = pair_logits(a, b, rule, (of_a, of_b))
    of_queries: Rows = (a, of_a)
    of_documents: Rows = (b, of_b)
    every_hard: list[Rows] = [] if hard is None else [(hard, of_hard)]
    every_query, every_document, place, total = of_queries, of_documents, local, a.shape[0]
    if ranks is not None:
        ranks.meet(a, least=1)
        policy, share = replace(policy, ranks=ranks), ranks.first
        place, total = share.place(a), share.total
        # The columns are the rows of all ranks.
        every_document = share.rows(b).to(computing), None
        if chosen != ["query_to_doc"]:
            every_query = share.rows(a).to(computing), None
        if hard is not None and (hard_negatives_scope == "batch" or hard_of_doc != "none"):
            every_hard = [(share.rows(hard.view(len(a), number, a.shape[1])).flatten(0, 1).to(computing), None)]
    shared = every_hard if hard_negatives_scope == "batch" else []
    evaluate = partial(_log_sum, rule=rule, storage=storage, backend=backend)
    widths = _widths(total, number * total, chosen, hard_of_doc)
    masks = dict.fromkeys(widths)
    if ignored is not None:
        with_positives = ["query_to_doc"] if partition == "joint" else chosen
        check_masks = partial(check_ignored_blocks, ignored, a, widths, with_positives, place, validate=validate)
        masks = check_masks() if ranks is None else ranks.check(check_masks)

    queries, documents = [], []
    apart = hard is not None and (not shared or in_batch != own)  # whether own hard negatives are a separate sum
    owners = torch.arange(total, device=a.device).repeat_interleave(number)
    if hard is not None and apart:
        repeated = a.index_select(0, local.repeat_interleave(number))
        logits = pair_logits(repeated, hard, rule).view(a.shape[0], number)
        logits = logits + (logits * (own * rule.temperature_as(wide))).detach()
        if masks["hard"] is not None:
            kept = ~masks["hard"].view(a.shape[0], total, number)[local, place]
            queries.append(_log_sum_where(logits, kept) - positives)
        else:
            queries.append(logits.logsumexp(1) - positives)
    if hard_negatives_scope != "own_only":
        options = {"ignored": _beside(masks["query_to_doc"], masks["hard"] if shared else None)}
        if shared and apart:
            options["ids"] = place, torch.cat([owners.new_full((total,), -1), owners])
        columns = [every_document, *shared]
        if in_batch:
            queries.append(evaluate(of_queries, columns, own=place, strength=in_batch, **options) - positives)
        else:
            queries.append(evaluate(of_queries, columns, partners=place, **options))
    if "query_to_query" in chosen:
        queries.append(evaluate(of_queries, [every_query], own=place, ignored=masks["query_to_query"]) - positives)
    if "doc_to_query" in chosen and partition == "per_direction":
        documents.append(evaluate(of_documents, [every_query], partners=place, ignored=masks["doc_to_query"]))
    elif "doc_to_query" in chosen:
        queries.append(evaluate(of_documents, [every_query], ignored=masks["doc_to_query"]) - positives)
    if to_doc and every_hard and hard_of_doc != "none":
        left_out = owners if hard_of_doc == "others" else torch.full_like(owners, -1)
        ids = place, torch.cat([torch.arange(total, device=a.device), left_out])
        mask = _beside(masks["doc_to_doc"], masks["doc_to_hard"])
        queries.append(evaluate(of_documents, [every_document, *every_hard], ids=ids, ignored=mask) - positives)
    elif to_doc:
        queries.append(evaluate(of_documents, [every_document], own=place, ignored=masks["doc_to_doc"]) - positives)

    values = torch.cat([_cross_entropy(parts) for parts in (queries, documents) if parts])
    ones = torch.ones_like(values, dtype=torch.int64)
    batch = Batch(a, Targets("partners", place), rule, References(b))
    return reduced(AnchorValues(values, ones, ones), batch, policy).to(returned)


def _composed(a: Tensor, b: Tensor, hard: Tensor | None, learned: Tensor | None, **options: Any) -> Tensor:
    """Return one value per anchor, with each block evaluated on its own.

    ``hard`` is ``[N H, D]``; ``learned`` is the temperature if it is a tensor.
    """
    options |= {} if hard is None else {"hard_negatives": hard.view(len(a), -1, hard.shape[1])}
    options |= {} if learned is None else {"temperature": learned}
    found: Tensor = multiple_negatives_ranking_loss(a, b, reduction="none", backend="dense", **options)
    return found


Rows = tuple[Tensor, Sizes | None]
"""Rows ``[N, D]``, and their sizes if known."""


def _log_sum(
    rows: Rows,
    columns: list[Rows],
    *,
    partners: Tensor | None = None,
    own: Tensor | None = None,
    ids: tuple[Tensor, Tensor] | None = None,
    ignored: Tensor | None = None,
    strength: float = 0.0,
    rule: Rule,
    storage: torch.dtype,
    backend: Backend,
) -> Tensor:
    """Return the logarithm ``[N]`` of the sum of e^s over the columns; -inf for a row without columns.

    Args:
        rows: the anchors.
        columns: what the anchors are contrasted with.
        partners: int64 ``[N]``, the column p of each positive. The result is then log(sum of e^s_j / e^s_p), j != p.
        own: int64 ``[N]``, the column to leave out for each row.
        ids: int64 ``[N]`` and ``[M]``; columns with the id of the row are left out.
        ignored: bool ``[N, M]``, the pairs to leave out.
        strength: exponentials are multiplied by e^(strength * similarity), without a gradient.
        rule: the formula; without ``partners``, the terms are replaced by "lse".
        storage: the original dtype of the rows.
        backend: see `anchor_values`.
    """
    of_rows, of_columns = ids or (None, None)
    given = torch.empty(0, dtype=torch.int64, device=rows[0].device)
    targets = Targets("none", given, ids=of_rows, column_ids=of_columns, ignored=ignored)
    if partners is None:
        rule = replace(rule, terms="lse")
    else:
        targets = replace(targets, kind="partners", given=partners)
    others, sizes = columns[0]
    if len(columns) > 1:
        others, sizes = torch.cat([each for each, _ in columns]), blocks.together([size for _, size in columns])
    references = References(others, own, sizes=sizes)
    batch = Batch(rows[0], targets, rule, references, storage=storage, sizes=rows[1])
    if not strength:
        found = anchor_values(batch, backend)
        return torch.where(found.negatives > 0, found.values, -math.inf)
    # (1 / T + strength) * similarity is a logit at a lower temperature. The part with strength is a constant.
    temperature = rule.temperature_as(dtypes_of(rows[0])[1])
    share = 1 / (1 + strength * (temperature.detach() if isinstance(temperature, Tensor) else temperature))
    found = anchor_values(replace(batch, rule=replace(rule, temperature=temperature * share)), backend)
    still = found.values.detach()
    values = torch.where(found.negatives > 0, still + share * (found.values - still), -math.inf)
    if torch.compiler.is_compiling():
        return values
    learned = [temperature] if isinstance(temperature, Tensor) else []
    again = partial(_weighted_log_sum, batch, strength)
    repeatable: Tensor = _Repeatable.apply(values, again, rows[0], others, *learned)  # type: ignore[no-untyped-call]
    return repeatable


def _weighted_log_sum(
    batch: Batch, strength: float, rows: Tensor, columns: Tensor, temperature: Tensor | None = None
) -> Tensor:
    """Compute the result of `_log_sum` in differentiable operations on the whole matrix."""
    rule = batch.rule if temperature is None else replace(batch.rule, temperature=temperature)
    logits = differentiable_rows(rows, rule) @ differentiable_rows(columns, rule).T
    kept = masks_of(batch.targets, own_columns(batch), slice(0, len(rows)), *logits.shape)[1]
    return _log_sum_where(logits + (logits * (strength * rule.temperature)).detach(), kept).to(rows.dtype)


class _Repeatable(Reverse):
    """Values whose derivative, if it is itself to be differentiated, is that of another function.

    The values at a lower temperature have the right first derivative. Their second derivative would include that of
    the hardness weights, which are constants.
    """

    @staticmethod
    def forward(values: Tensor, again: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.again = inputs[1]
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return grad, None, *[None] * len(ctx.saved_tensors)
        with without_autocast(grad):
            return None, None, *torch.func.vjp(ctx.again, *ctx.saved_tensors)[1](grad)


def _hard_of_doc(chosen: list[str], scope: str, given: str | None) -> str:
    """Return the hard negatives of documents: "others", "all" or "none"."""
    default = "others" if scope == "batch" else "none"
    return (given or default) if "doc_to_doc" in chosen else "none"


def _widths(n: int, hard: int, chosen: list[str], hard_of_doc: str) -> dict[str, int]:
    """Return the number of columns of each block of ``ignored``, for n queries and ``hard`` hard negatives in total."""
    found = {"query_to_doc": n, "hard": hard, **dict.fromkeys(chosen[1:], n)}
    return found | ({} if hard_of_doc == "none" else {"doc_to_hard": hard})


def _beside(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return two masks ``[N, ...]`` side by side, or the first if one is None."""
    return first if first is None or second is None else torch.cat([first, second], dim=1)


def _log_sum_where(logits: Tensor, kept: Tensor) -> Tensor:
    """Return the logsumexp ``[N]`` of the kept logits ``[N, H]``; -inf for a row without kept logits."""
    some = kept.any(1)
    # A row without kept logits is not masked, because the gradient of log(0) would be NaN.
    sums = logits.masked_fill(~kept & some[:, None], -math.inf).logsumexp(1)
    return torch.where(some, sums, -math.inf)


def _cross_entropy(parts: list[Tensor]) -> Tensor:
    """Return log(1 + sum of e^x over the parts), ``[N]``. Each part is ``[N]``, and may be -inf."""
    together = torch.stack(parts)
    # A row whose parts are all -inf has the value 0. With 0 instead of -inf, the gradient is not NaN.
    some = (together > -math.inf).any(0) | together.isnan().any(0)
    odds = torch.where(some, together, 0.0).logsumexp(0)
    return torch.where(some, -F.logsigmoid(-odds), 0.0)


def gist_masks(
    guide_a: Tensor,
    guide_b: Tensor,
    guide_hard_negatives: Tensor | None = None,
    *,
    hard_negatives_scope: Scope = "batch",
    directions: Directions = "query_to_doc+query_to_query+doc_to_doc",
    margin_strategy: Literal["absolute", "relative"] = "absolute",
    margin: float = 0.0,
    similarity: Similarity = "cosine",
) -> Tensor:
    """Return the mask of pairs that GISTEmbed leaves out, because a guide model considers them too similar.

    Let s be the similarity of the guide's embeddings. A pair in row i is ignored if s is greater than the limit

        "absolute"  s(a_i, b_i) - margin
        "relative"  s(a_i, b_i) - margin * |s(a_i, b_i)|

    by more than rounding errors, so a second copy of the document is never ignored at margin 0. Pairs of a document and
    a hard negative are always ignored. The loss of GISTEmbed is

        multiple_negatives_ranking_loss(a, b, hard_negatives=h, directions=directions, ignored=gist_masks(...),
                                        temperature=0.01)

    The code of sentence-transformers differs if the limit is 1 or more, for example if the guide's embeddings of a
    query and its document are equal. That code then contrasts the query with itself, and the document with itself.

    Example:
        >>> import torch
        >>> from pairproof.fast import gist_masks
        >>> a, b = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.6, 0.8], [0.0, 1.0]])
        >>> gist_masks(a, b, directions="query_to_doc").tolist()
        [[False, False], [False, False]]
        >>> gist_masks(a, b, directions="query_to_doc", margin=0.5).tolist()
        [[False, False], [True, False]]

    Args:
        guide_a: floating ``[N, E]``, the guide's embeddings of the queries.
        guide_b: floating ``[N, E]``, the guide's embeddings of the documents.
        guide_hard_negatives: floating ``[N, H, E]``, the guide's embeddings of the hard negatives, if there are any.
        hard_negatives_scope: the scope of the loss, which decides whether documents have columns of hard negatives.
        directions: the directions of the loss.
        margin_strategy: "absolute" or "relative".
        margin: finite number, see the limit above.
        similarity: "cosine" or "dot".

    Returns:
        bool ``[N, C]``, the argument ``ignored`` of the loss.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, value or device, or an option is unknown.

    Source:
        Solatorio 2024, arXiv 2402.16829; gist_embed.py of sentence-transformers 6.2.0.
    """
    chosen = check_directions(directions, "joint", hard_negatives_scope, None, guide_hard_negatives)
    check_choice("margin_strategy", margin_strategy, ("absolute", "relative"))
    given: object = margin
    if isinstance(given, bool) or not isinstance(given, Real):
        raise TypeError(f"margin: expected a number, got {type(given).__name__}")
    if not math.isfinite(given):
        raise ValueError(f"margin: expected a finite number, got {given}")
    check_choice("similarity", similarity, SIMILARITIES)
    check = partial(check_embeddings, similarity=similarity, validate=False, least=1)
    check(guide_a, name="guide_a")
    check(guide_b, name="guide_b")
    if guide_a.shape != guide_b.shape:
        raise ValueError(f"guide_b: expected the shape of guide_a, {list(guide_a.shape)}, got {list(guide_b.shape)}")
    check_alike("guide_b", guide_b, "guide_a", guide_a)
    if guide_hard_negatives is not None:
        rows = check_hard_negatives(guide_hard_negatives, guide_a, "guide_hard_negatives")
        check(rows, name="guide_hard_negatives", shape="[N, H, E]")
        check_alike("guide_hard_negatives", rows, "guide_a", guide_a)
    with torch.no_grad(), without_autocast(guide_a):
        given = [guide_a, guide_b, guide_b[:0] if guide_hard_negatives is None else guide_hard_negatives.flatten(0, 1)]
        a, b, h = (rows.to(dtypes_of(rows)[0]) for rows in given)
        if similarity == "cosine":
            a, b, h = (F.normalize(rows, dim=1) for rows in (a, b, h))
        positive = (a * b).sum(dim=1, keepdim=True)
        limit = positive - margin * (positive.abs() if margin_strategy == "relative" else 1)
        pairs = {"query_to_doc": (a, b), "hard": (a, h), "query_to_query": (a, a)}
        pairs |= {"doc_to_query": (b, a), "doc_to_doc": (b, b), "doc_to_hard": (b, h)}
        found = {name: _exceeds(limit, *rows) for name, rows in pairs.items()}
        for name in ("query_to_doc", "doc_to_query"):
            found[name].fill_diagonal_(False)
        found["doc_to_hard"].fill_(True)
        widths = _widths(len(a), len(h), chosen, _hard_of_doc(chosen, hard_negatives_scope, None))
        return torch.cat([found[name] for name in widths], dim=1)


def _exceeds(limit: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return which products ``[N, M]`` of rows and columns are greater than their row's limit ``[N, 1]``.

    A product that rounding errors may have moved over the limit is not: equal documents have similarities that differ
    in their last bits, because products of matrices add their terms in another order. Both the product and the limit
    have these errors.
    """
    sizes = rows.norm(dim=1, keepdim=True) * columns.norm(dim=1)
    error = ROUNDING * math.sqrt(rows.shape[1]) * torch.finfo(rows.dtype).eps / 2
    found: Tensor = rows @ columns.T - limit > error * (sizes + sizes.maximum(limit.abs()))
    return found
