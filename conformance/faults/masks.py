"""Wrong masks of positives, and pairs that are wrongly kept or left out."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from . import parts
from .base import fault, github


@fault("supcon", github("KevinMusgrave/pytorch-metric-learning", "issues/141"), build=parts.labelled)
def supcon_self_a_positive(batch: parts.Batch) -> parts.Batch:
    """An anchor is its own positive: the diagonal is removed from the denominator only."""
    return batch._replace(positive=batch.positive | ~batch.other)


@fault("supcon", build=parts.features, level="policies")
def supcon_mask_transposed(given: parts.Features) -> parts.Batch:
    """The mask is transposed, which exchanges anchors and positives."""
    batch = given.cosines
    return batch._replace(positive=batch.positive.T)


@fault("supcon", build=parts.features, level="policies")
def supcon_mask_made_symmetric(given: parts.Features) -> parts.Batch:
    """The mask is made symmetric: if j is a positive of i, then i becomes a positive of j."""
    batch = given.cosines
    return batch._replace(positive=batch.positive | batch.positive.T)


@fault("supcon", level="policies")
def supcon_labels_as_floats(embeddings: Tensor, labels: Tensor, *, temperature: float) -> parts.Batch:
    """Labels are compared as float32: labels above 2^24 that lie close together become one class."""
    return parts.labelled(embeddings, labels.float(), temperature)


@fault("nt_xent_pairwise", level="policies")
def nt_xent_pairwise_labels_as_int32(embeddings: Tensor, labels: Tensor, *, temperature: float) -> parts.Batch:
    """Labels are converted to int32: labels that differ by a multiple of 2^32 become one class."""
    return parts.labelled(embeddings, labels.int(), temperature)


@fault("supcon_in", level="policies")
def supcon_in_labels_as_bytes(embeddings: Tensor, labels: Tensor, *, temperature: float) -> parts.Batch:
    """Labels are converted to uint8: labels that differ by a multiple of 256 become one class."""
    return parts.labelled(embeddings, labels.to(torch.uint8), temperature)


@fault("supcon", level="policies")
def supcon_labels_in_bfloat16(embeddings: Tensor, labels: Tensor, *, temperature: float) -> parts.Batch:
    """Labels are converted to bfloat16, as under mixed precision: above 256, neighbouring labels become one class."""
    return parts.labelled(embeddings, labels.bfloat16(), temperature)


@fault("supcon_epsilon", level="policies")
def supcon_epsilon_negative_labels_ignored(embeddings: Tensor, labels: Tensor, *, temperature: float) -> parts.Batch:
    """A negative label is read as no label: rows with a negative label have no positives."""
    unknown = labels.amax() + 1 + torch.arange(len(labels))
    return parts.products(embeddings, torch.where(labels < 0, unknown, labels), temperature)


@fault(
    "nt_xent",
    github("Lightning-Universe/lightning-bolts", "issues/695"),
    right_at=(0.37, math.inf),
    because="The self pair's e^(1/T) is at most e^5.4 times any other term, so subtracting it loses fewer than 8 bits.",
)
def nt_xent_self_subtracted(view_a: Tensor, view_b: Tensor, *, temperature: float) -> Tensor:
    """The self pair is removed by subtracting e^(1/temperature) from the sum, which loses digits or overflows."""
    rows = parts.unit(torch.cat([view_a, view_b]))
    e = torch.exp(rows @ rows.T / temperature)
    own = torch.exp(torch.tensor(1 / temperature, dtype=e.dtype))
    return (e.sum(dim=1) - own).log() - e[torch.arange(len(rows)), parts.stacked(len(rows))].log()


@fault("nt_xent", github("Lightning-Universe/lightning-bolts", "issues/695"), similarity="dot")
def nt_xent_self_in_the_gradient(view_a: Tensor, view_b: Tensor, *, temperature: float) -> Tensor:
    """The self pair is subtracted as a constant: the value is right, but the gradient still includes it."""
    rows = torch.cat([view_a, view_b])
    other = parts.off_diagonal(len(rows))
    s = parts.shifted(rows @ rows.T / temperature, other)
    e = torch.exp(s)
    total = parts.row_sums(e, other) + (e.diagonal() - e.diagonal().detach())
    return total.log() - s[torch.arange(len(rows)), parts.stacked(len(rows))]


@fault("nt_bxent", level="policies")
def nt_bxent_pairs_made_symmetric(embeddings: Tensor, positive_pairs: Tensor, *, temperature: float) -> parts.Batch:
    """A listed pair makes both rows positives of each other, although pairs are directed."""
    return parts.paired(embeddings, torch.cat([positive_pairs, positive_pairs.flip(1)]), temperature)


@fault("nt_bxent", level="policies")
def nt_bxent_pairs_reversed(embeddings: Tensor, positive_pairs: Tensor, *, temperature: float) -> parts.Batch:
    """A listed pair is read as (positive, anchor) instead of (anchor, positive)."""
    return parts.paired(embeddings, positive_pairs.flip(1), temperature)


@fault("nt_bxent", build=parts.paired)
def nt_bxent_diagonal_a_negative(batch: parts.Batch) -> parts.Batch:
    """The diagonal is not masked: every row is its own negative, with a similarity of 1."""
    return batch._replace(other=torch.ones_like(batch.other))


@fault("supcon", build=parts.labelled, level="policies")
def supcon_ignored_pairs_in_the_denominator(batch: parts.Batch, ignored: Tensor) -> parts.Batch:
    """Ignored pairs are left out of the positives, but stay in the denominator."""
    return batch._replace(positive=batch.positive & ~ignored)


@fault("supcon", build=parts.labelled, level="policies", denominator="only_negatives")
def supcon_ignored_pairs_by_a_large_number(batch: parts.Batch, ignored: Tensor | None = None) -> Tensor:
    """Ignored pairs get the logit -1e9: if all negatives of an anchor are ignored, its loss is about -1e9."""
    if ignored is not None:
        batch = batch._replace(s=batch.s.masked_fill(ignored, -1e9), positive=batch.positive & ~ignored)
    values = parts.log_sum(batch.s, batch.negative) - batch.s
    return parts.row_means(values, batch.positive).where(batch.negative.any(dim=1), 0)


@fault("nt_xent_pairwise", build=parts.cosines, level="policies")
def nt_xent_pairwise_ignored_pairs_by_a_logit_of_zero(batch: parts.Batch, ignored: Tensor) -> parts.Batch:
    """Ignored pairs get the logit 0 instead of being left out: each adds 1 to the denominator."""
    return batch._replace(s=batch.s.masked_fill(ignored, 0), positive=batch.positive & ~ignored)


@fault("nt_bxent", build=parts.paired, level="policies")
def nt_bxent_ignored_pairs_transposed(batch: parts.Batch, ignored: Tensor) -> parts.Batch:
    """The mask of ignored pairs is read by columns, although rows are the anchors."""
    return parts.without(batch, ignored.T)


@fault("supcon", build=parts.labelled, level="policies")
def supcon_ignored_ids_of_positives(batch: parts.Batch, ignored_ids: Tensor) -> parts.Batch:
    """Positives with the anchor's id are left out too."""
    return parts.without(batch, ignored_ids[:, None] == ignored_ids)


@fault("supcon_in", build=parts.labelled, level="policies")
def supcon_in_ignored_ids_left_out_of_all_rows(batch: parts.Batch, ignored_ids: Tensor) -> parts.Batch:
    """Only the first row with an id is a negative: its duplicates are left out even for anchors with other ids."""
    equal = ignored_ids[:, None] == ignored_ids
    first = equal.int().argmax(dim=1) == torch.arange(len(equal))
    return batch._replace(other=batch.other & (batch.positive | (first & ~equal)))


@fault("sigmoid", build=parts.across)
def sigmoid_positives_only(batch: parts.Batch) -> parts.Batch:
    """The negatives are left out: only the pairs on the diagonal are summed."""
    return batch._replace(other=batch.positive)


@fault("hard_negative", build=parts.hard)
def hard_negative_positive_among_the_negatives(given: parts.Hard) -> Tensor:
    """Only the self pair is masked: the positive is one of its own negatives."""
    s, others = given.rows.logits, parts.off_diagonal(len(given.rows.target))
    of_weighted, of_weights = (parts.log_sum(x, others)[:, 0] for x in ((1 + given.beta) * s, given.beta * s))
    return given.against(of_weighted - of_weights, number=given.number + 1)


@fault("multiple_negatives_ranking", build=parts.ranking, level="policies")
def multiple_negatives_ranking_ignored_pairs_with_logit_0(given: parts.Ranking) -> parts.Ranking:
    """The logits of ignored pairs are multiplied by 0, not left out: each adds 1 to the denominator."""
    return given.again(left_out=0.0)


@fault("multiple_negatives_ranking", build=parts.ranking, level="policies")
def multiple_negatives_ranking_hard_negatives_not_ignored(given: parts.Ranking) -> parts.Ranking:
    """The mask of ignored pairs is applied to the documents and queries, but not to the hard negatives."""
    mask, hard = given.arguments["ignored"], given.arguments["hard_negatives"]
    if mask is None or hard is None:
        return given
    n, columns = len(hard), len(hard) * hard.shape[1]
    kept = torch.cat([mask[:, :n], torch.zeros(n, columns, dtype=torch.bool), mask[:, n + columns :]], dim=1)
    return given.again(ignored=kept)


@fault("multiple_negatives_ranking", build=parts.ranking, level="policies")
def multiple_negatives_ranking_only_documents_ignored(given: parts.Ranking) -> parts.Ranking:
    """The mask of ignored pairs is applied only to the documents of a query: other pairs stay in the denominator."""
    mask, n = given.arguments["ignored"], len(given.arguments["view_a"])
    if mask is None:
        return given
    return given.again(ignored=mask & (torch.arange(mask.shape[1]) < n))


@fault("multiple_negatives_ranking", build=parts.ranking)
def multiple_negatives_ranking_hardness_of_the_positive(given: parts.Ranking) -> parts.Ranking:
    """The hardness also weights the positive of each query, not only its negatives."""

    def harder(mode: str, own: Tensor) -> Tensor:
        found = parts.harder_columns(mode, own)
        found[:, : len(own)] |= found.any() & ~parts.off_diagonal(len(own))
        return found

    return given.again(harder=harder)


@fault("multiple_negatives_ranking", build=parts.ranking)
def multiple_negatives_ranking_hardness_of_all_hard_negatives(given: parts.Ranking) -> parts.Ranking:
    """The hardness mode "hard_negatives" also weights the hard negatives of other queries."""

    def harder(mode: str, own: Tensor) -> Tensor:
        found = parts.harder_columns(mode, own)
        if mode == "hard_negatives":
            found[:, len(own) :] = True
        return found

    return given.again(harder=harder)


@fault("sigmoid", build=parts.across, takes=("bias",), level="policies")
def sigmoid_ignored_pairs_with_a_logit_of_zero(batch: parts.Batch, ignored: Tensor) -> parts.Batch:
    """The logits of ignored pairs are multiplied by 0, not left out: each adds log 2 to the value of its anchor."""
    return batch._replace(s=batch.s.masked_fill(ignored, 0))


@fault("sigmoid", build=parts.across, takes=("bias",), level="policies", reduction="mean_pairs")
def sigmoid_mean_over_ignored_pairs(batch: parts.Batch, ignored: Tensor | None = None) -> Tensor:
    """The mean over pairs divides by the number of all pairs, including the ignored ones."""
    batch = batch if ignored is None else batch._replace(other=~ignored)
    return parts.anchors("sigmoid", batch).sum() / batch.s.numel()


@fault("sigmoid", build=parts.across, takes=("bias",), level="policies")
def sigmoid_ignored_ids_of_positives(batch: parts.Batch, ignored_ids: Tensor) -> parts.Batch:
    """All pairs of rows with equal ids are left out, the positives too: row k of both towers has the same id."""
    return batch._replace(other=ignored_ids[:, None] != ignored_ids)


@fault("hard_negative", level="policies")
def hard_negative_ignored_pairs_in_the_number(
    embeddings: Tensor, labels: Tensor, *, temperature: float, ignored: Tensor | None = None
) -> Tensor:
    """The number of negatives, which multiplies their mean, includes the ignored pairs."""
    batch = parts.cosines(embeddings, labels, temperature)
    if ignored is None:
        return parts.hard_values(batch, temperature)
    kept = batch._replace(other=batch.other & ~ignored)
    value = parts.hard_values(kept, temperature)
    log_ratio = value + torch.log(-torch.expm1(-value))
    more = batch.negative.sum(dim=1) / kept.negative.sum(dim=1).clamp(min=1)
    return -F.logsigmoid(-log_ratio - more.log())


@fault("hard_negative", level="policies")
def hard_negative_ignored_ids_of_the_partner(
    embeddings: Tensor, labels: Tensor, *, temperature: float, ignored_ids: Tensor | None = None
) -> Tensor:
    """A negative is left out if it has the id of the anchor's partner, whatever the id of the anchor."""
    batch = parts.cosines(embeddings, labels, temperature)
    if ignored_ids is not None:
        of_partner = ignored_ids[batch.positive.int().argmax(dim=1)]
        batch = batch._replace(other=batch.positive | (batch.other & (of_partner[:, None] != ignored_ids)))
    return parts.hard_values(batch, temperature)


@fault("dclw", level="policies")
def dclw_ignored_pairs_with_a_logit_of_zero(
    embeddings: Tensor, labels: Tensor, *, temperature: float, ignored: Tensor | None = None
) -> Tensor:
    """The logits of ignored pairs are multiplied by 0, not left out: each adds 1 to the sum over the negatives."""
    batch = parts.cosines(embeddings, labels, temperature)
    weights = parts.decoupled_weights(batch, temperature).detach()
    return parts.decoupled_values(
        batch if ignored is None else batch._replace(s=batch.s.masked_fill(ignored, 0)), weights
    )


@fault("dclw", level="policies")
def dclw_weights_of_the_rows_that_are_not_ignored(
    embeddings: Tensor, labels: Tensor, *, temperature: float, ignored: Tensor | None = None
) -> Tensor:
    """The softmax of the weights is multiplied by N minus the number of the anchor's ignored pairs, not by N."""
    batch = parts.cosines(embeddings, labels, temperature)
    weights = parts.decoupled_weights(batch, temperature).detach()
    if ignored is not None:
        batch = batch._replace(other=batch.other & ~ignored)
        weights = 2 - (2 - weights) * (1 - ignored.sum(dim=1, keepdim=True) / len(ignored))
    return parts.decoupled_values(batch, weights)


@fault("supcon_epsilon", build=parts.products, level="policies")
def supcon_epsilon_maximum_of_ignored_pairs(batch: parts.Batch, ignored: Tensor) -> Tensor:
    """The maximum that is subtracted before exp includes the ignored pairs."""
    return parts.epsilon_anchors(parts.without(batch, ignored), parts.exponentials(batch))


@fault("supcon_epsilon", build=parts.products, level="policies")
def supcon_epsilon_of_ignored_pairs(batch: parts.Batch, ignored: Tensor) -> Tensor:
    """The logits of ignored pairs are -infinity, but the epsilon of each is still in the denominator."""
    e = parts.exponentials(batch._replace(s=batch.s.masked_fill(batch.other & ignored, -math.inf)))
    return parts.epsilon_anchors(batch._replace(positive=batch.positive & ~ignored), e)


@fault("supcon_epsilon", build=parts.products, level="policies")
def supcon_epsilon_maximum_without_the_self_pair(batch: parts.Batch, ignored: Tensor) -> Tensor:
    """With ignored pairs, the maximum runs over positives and negatives only, without the self pair."""
    kept = parts.without(batch, ignored)
    some = kept.other | ~kept.other.any(dim=1, keepdim=True)
    return parts.epsilon_anchors(kept, parts.exponentials(batch._replace(s=batch.s.masked_fill(~some, -math.inf))))


@fault("supcon_epsilon", build=parts.products, level="policies")
def supcon_epsilon_ignored_ids_of_positives(batch: parts.Batch, ignored_ids: Tensor) -> Tensor:
    """All pairs of rows with equal ids are left out, the positives too."""
    kept = parts.without(batch, ignored_ids[:, None] == ignored_ids)
    s = batch.s.masked_fill(batch.other & ~kept.other, -math.inf)
    return parts.epsilon_anchors(kept, parts.exponentials(batch._replace(s=s)))
