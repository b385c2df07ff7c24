"""Denominators that sum too many terms, too few, or the wrong ones."""

from __future__ import annotations

import torch
from torch import Tensor

from . import parts
from .base import fault, github


@fault("supcon", build=parts.labelled)
def supcon_self_kept(batch: parts.Batch) -> Tensor:
    """The denominator includes the self pair: the diagonal is removed from the positives only."""
    all_columns = torch.ones_like(batch.other)
    return parts.row_means(parts.log_sum(batch.s, all_columns) - batch.s, batch.positive)


@fault("nt_xent")
def nt_xent_self_kept(view_a: Tensor, view_b: Tensor, *, temperature: float) -> parts.Rows:
    """The denominator includes the self pair: the diagonal of the logits is not masked."""
    rows = parts.unit(torch.cat([view_a, view_b]))
    return parts.Rows(rows @ rows.T / temperature, parts.stacked(len(rows)))


@fault("supcon", github("zhoujiahuan1991/CVPR2024-FCS", "issues/3"), build=parts.labelled)
def supcon_other_positives_dropped(batch: parts.Batch) -> Tensor:
    """The denominator of a pair lacks the other positives of its anchor."""
    return parts.row_means(batch.pairwise, batch.positive)


@fault("supcon_in", build=parts.labelled)
def supcon_in_other_positives_dropped(batch: parts.Batch) -> Tensor:
    """Each ratio inside the logarithm has its own denominator, without the other positives."""
    inside = parts.log_sum(-batch.pairwise, batch.positive)[:, 0]
    return (batch.counts.clamp(min=1).log() - inside).where(batch.counts > 0, 0)


@fault("supcon", github("HobbitLong/SupContrast", "issues/64"), build=parts.labelled)
def supcon_positives_dropped(batch: parts.Batch) -> Tensor:
    """The denominator sums only the negatives, which is one reading of the paper's supplement."""
    values = parts.row_means(parts.log_sum(batch.s, batch.negative) - batch.s, batch.positive)
    return values.where(batch.negative.any(dim=1), 0)


@fault("nt_xent", github("amazon-science/sccl", "issues/27"), build=parts.views)
def nt_xent_positive_dropped(rows: parts.Rows) -> Tensor:
    """The denominator sums only the negatives, without the positive."""
    return rows.negatives - rows.logits[rows.positive]


@fault("nt_xent", github("torchgeo/torchgeo", "pull/1208"))
def nt_xent_other_view_only(view_a: Tensor, view_b: Tensor, *, temperature: float) -> parts.Direction:
    """A row is contrasted only with the other view, and only rows of the first view are anchors."""
    return parts.Direction(view_a, view_b, temperature)


@fault("nt_xent", build=parts.views)
def nt_xent_own_view_only(rows: parts.Rows) -> parts.Rows:
    """Only rows of the anchor's own view are negatives: those of the other view are left out."""
    first = rows.target >= len(rows.target) // 2
    kept = (first[:, None] == first) | rows.positive
    return rows._replace(logits=rows.logits.masked_fill(~kept, -torch.inf))


@fault("supcon_in", "https://pypi.org/project/infonce/", build=parts.cosines)
def supcon_in_diagonal_is_exp_0(batch: parts.Batch) -> Tensor:
    """The self pair's logit is set to 0 and exponentiated: e^0 = 1 is added to numerator and denominator."""
    s, eye = batch.s.where(batch.other, 0), ~batch.other
    value = parts.log_sum(s, batch.other | eye) - parts.log_sum(s, batch.positive | eye)
    return (value[:, 0] + batch.counts.clamp(min=1).log()).where(batch.counts > 0, 0)


@fault(
    "nt_xent",
    github("taesungp/contrastive-unpaired-translation", "issues/34"),
    right_at=(0.0, 0.2),
    because="The self pair's exponential is at most e^(-9/T) times any other one, which is lost in rounding.",
)
def nt_xent_diagonal_is_minus_ten(view_a: Tensor, view_b: Tensor, *, temperature: float) -> parts.Rows:
    """The self pair's cosine is set to -10 instead of minus infinity: at a high temperature it still counts."""
    rows = parts.views(view_a, view_b, temperature)
    return rows._replace(logits=rows.logits.where(parts.off_diagonal(len(rows.logits)), -10 / temperature))


@fault("supcon", build=parts.labelled)
def supcon_mean_of_exponentials(batch: parts.Batch) -> Tensor:
    """The denominator averages the exponentials instead of summing them: only the gradient is right."""
    mean = parts.log_sum(batch.s, batch.other) - batch.other.sum(dim=1, keepdim=True).to(batch.s.dtype).log()
    return parts.row_means(mean - batch.s, batch.positive)


@fault("nt_xent_pairwise", github("KevinMusgrave/pytorch-metric-learning", "issues/699"), build=parts.labelled)
def nt_xent_pairwise_other_positives_kept(batch: parts.Batch) -> Tensor:
    """The denominator of a pair includes the other positives of its anchor: this is SupCon."""
    return parts.anchors("supcon", batch)


@fault("nt_xent_pairwise", build=parts.labelled)
def nt_xent_pairwise_positive_dropped(batch: parts.Batch) -> Tensor:
    """The denominator of a pair sums only the negatives, without the pair itself."""
    return supcon_positives_dropped(batch)


@fault("supcon_epsilon", build=parts.products)
def supcon_epsilon_self_kept(batch: parts.Batch) -> Tensor:
    """The denominator includes the self pair."""
    return parts.epsilon_anchors(batch._replace(other=torch.ones_like(batch.other)), parts.exponentials(batch))


@fault("nt_bxent", build=parts.paired)
def nt_bxent_positives_among_negatives(batch: parts.Batch) -> Tensor:
    """The mean over negatives runs over all other rows, positives included."""
    as_positive, as_negative = batch.costs
    return parts.row_sums(as_positive, batch.positive) / (batch.counts + 1) + parts.row_means(as_negative, batch.other)


@fault("info_nce", build=parts.directions)
def info_nce_positive_twice(direction: parts.Direction) -> parts.Direction:
    """The denominator counts the positive twice: as the first column, and among the keys that follow."""
    return direction._replace(negatives=direction.keys) if direction.negatives is None else direction


@fault("info_nce", github("Seonghoon-Yu/MoCov2_Pytorch_tutorial", "issues/2"), build=parts.directions)
def info_nce_every_sum_for_every_anchor(direction: parts.Direction) -> parts.Evaluable:
    """A column of positives and a row of sums broadcast to a matrix: each positive is divided by every sum."""
    if direction.negatives is None:
        return direction
    positive, negatives = direction.rows.logits.tensor_split([1], dim=1)
    return torch.logaddexp(positive, negatives.logsumexp(dim=1)) - positive


@fault("hard_negative", github("joshr17/HCL", "issues/1"), build=parts.hard)
def hard_negative_weights_over_the_mean_similarity(given: parts.Hard) -> Tensor:
    """The weights are divided by the mean of e^s, as in the paper's pseudocode, not by their own mean."""
    s = given.rows.logits
    return given.against(given.log_sum((1 + given.beta) * s) - given.log_sum(s))


@fault("hard_negative", github("joshr17/HCL", "issues/5"), build=parts.hard)
def hard_negative_beta_as_a_factor(given: parts.Hard) -> Tensor:
    """The weights are beta e^s, as in the paper's pseudocode, not e^(beta s): beta scales the sum of the negatives."""
    s = given.rows.logits
    weighted = given.log_sum(2 * s) - given.log_sum(s)
    return given.against(weighted + s.new_tensor(given.beta).log())


@fault("hard_negative", build=parts.hard)
def hard_negative_floor_of_one_negative(given: parts.Hard) -> Tensor:
    """The floor of the sum over n negatives is e^(-1/T) instead of n e^(-1/T)."""
    return given.against(given.log_mean, floors=min(1, given.number))


@fault("info_nce", build=parts.directions)
def info_nce_closer_negatives_left_out(direction: parts.Direction) -> parts.Rows:
    """Negatives closer than the positive are left out as false negatives, although no option requests it."""
    rows = direction.rows
    own = rows.logits.detach()[rows.positive][:, None]
    return rows._replace(logits=rows.logits.masked_fill(rows.logits > own, -torch.inf))


@fault("multiple_negatives_ranking", build=parts.ranking)
def multiple_negatives_ranking_positive_once(given: parts.Ranking) -> parts.Ranking:
    """With partition "joint", the positive is left out of doc_to_query: the denominator contains it once, not twice."""
    other = parts.off_diagonal(len(given.doc_to_query)) | (given.partition != "joint")
    return given._replace(doc_to_query=given.doc_to_query.where(other, -torch.inf))


@fault("multiple_negatives_ranking", build=parts.ranking)
def multiple_negatives_ranking_self_pairs_kept(given: parts.Ranking) -> parts.Ranking:
    """The pairs of a query with itself, and of a document with itself, stay in the denominator."""
    return given._replace(query_to_query=given.raw.query_to_query, doc_to_doc=given.raw.doc_to_doc)


@fault("multiple_negatives_ranking", build=parts.ranking)
def multiple_negatives_ranking_own_hard_negatives_of_a_document(given: parts.Ranking) -> parts.Ranking:
    """A document is contrasted with the hard negatives of its own query too."""
    return given._replace(doc_to_hard=given.raw.doc_to_hard if given.hard_of_doc == "others" else given.doc_to_hard)


@fault("multiple_negatives_ranking", build=parts.ranking)
def multiple_negatives_ranking_hard_negatives_of_documents_follow_the_scope(given: parts.Ranking) -> parts.Ranking:
    """The hard negatives of a document are those of the default, whatever doc_to_doc_hard says."""
    return given._replace(doc_to_hard=given.again(doc_to_doc_hard=None, ignored=None).doc_to_hard)


@fault("dclw", build=parts.decoupled)
def dclw_positive_in_the_denominator(given: parts.Decoupled) -> Tensor:
    """The positive is left in the denominator, as in NT-Xent."""
    return given.against(given.weights, parts.off_diagonal(len(given.own)))
