"""Losses that are wrong only for some combinations of options."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Call, wrong


@wrong("supcon")
def references_with_a_mask_and_drop(call: Call) -> Tensor:
    """With references and a mask of positives, the policy drop is ignored."""
    three = call.ref_embeddings is not None and call.positives is not None and call.no_positive == "drop"
    return call(no_positive="zero") if three else call()


@wrong("supcon_in")
def one_positive_with_drop_and_sum(call: Call) -> Tensor:
    """With the denominator one_positive, the policy drop and the reduction sum, the mean is multiplied by N."""
    three = call.denominator == "one_positive" and call.no_positive == "drop" and call.reduction == "sum"
    return call(reduction="mean") * call.n if three else call()


@wrong("supcon")
def one_positive_by_dot_at_low_temperature(call: Call) -> Tensor:
    """With the denominator one_positive and dot products, temperatures below 0.1 are replaced by 0.1."""
    three = call.denominator == "one_positive" and call.similarity == "dot" and float(call.temperature) < 0.1
    return call(temperature=0.1) if three else call()


@wrong("supcon_in")
def base_temperature_with_references(call: Call) -> Tensor:
    """With references, the base temperature is ignored."""
    return call(base_temperature=None) if call.ref_embeddings is not None else call()


@wrong("nt_xent_pairwise")
def base_temperature_under_none(call: Call) -> Tensor:
    """With the reduction none, the base temperature is ignored."""
    return call(base_temperature=None) if call.reduction == "none" else call()


@wrong("info_nce")
def base_temperature_with_a_queue(call: Call) -> Tensor:
    """With a queue, the base temperature is ignored."""
    return call(base_temperature=None) if call.negatives is not None else call()


@wrong("info_nce")
def base_temperature_by_dot(call: Call) -> Tensor:
    """With dot products, the base temperature divides twice."""
    base = call.base_temperature
    return call() / base if base is not None and call.similarity == "dot" else call()


@wrong("supcon")
def anchors_with_self_rows(call: Call) -> Tensor:
    """With a subset of anchors, self rows are indexed by the place among the anchors, not by the row."""
    own, keep = call.self_rows, call.anchors
    if own is None or keep is None:
        return call()
    shifted = own.clone()
    shifted[keep] = own[: int(keep.sum())]
    return call(self_rows=shifted)


@wrong("nt_xent")
def anchors_with_references_under_sum(call: Call) -> Tensor:
    """With references and a subset of anchors, the reduction sum is a mean times the number of rows."""
    keep = call.anchors
    three = keep is not None and call.ref_embeddings is not None and call.reduction == "sum"
    return call(reduction="mean") * call.n if three else call()


@wrong("supcon")
def only_negatives_with_references(call: Call) -> Tensor:
    """With the denominator only_negatives and references, positives stay in the denominator."""
    both = call.denominator == "only_negatives" and call.ref_embeddings is not None
    return call(denominator="all") if both else call()


@wrong("supcon_in")
def only_negatives_with_anchors(call: Call) -> Tensor:
    """With the denominator only_negatives and a subset of anchors, each positive stays in its own denominator."""
    both = call.denominator == "only_negatives" and call.anchors is not None
    return call(denominator="one_positive") if both else call()


@wrong("supcon_in", "policies")
def no_negative_nan_with_drop(call: Call) -> Tensor:
    """With the policy drop, an anchor without negatives is 0, although the policy is NaN."""
    both = call.no_negative == "nan" and call.no_positive == "drop"
    return call(no_negative="zero") if both else call()


@wrong("supcon", "policies")
def no_negative_nan_with_references(call: Call) -> Tensor:
    """With references, an anchor without negatives is 0, although the policy is NaN."""
    both = call.no_negative == "nan" and call.ref_embeddings is not None
    return call(no_negative="zero") if both else call()


@wrong("supcon_in", "policies")
def no_positive_nan_under_sum(call: Call) -> Tensor:
    """With the reduction sum, anchors without positives are 0, although the policy is NaN."""
    return call(no_positive="zero") if call.no_positive == "nan" and call.reduction == "sum" else call()


@wrong("nt_xent_pairwise", "policies")
def no_positive_nan_with_mean_pairs(call: Call) -> Tensor:
    """With the reduction mean_pairs, anchors without positives are 0, although the policy is NaN."""
    return call(no_positive="zero") if call.no_positive == "nan" and call.reduction == "mean_pairs" else call()


@wrong("nt_xent_pairwise")
def mean_pairs_with_references(call: Call) -> Tensor:
    """With references, the reduction mean_pairs is the mean over the anchors."""
    both = call.reduction == "mean_pairs" and call.ref_embeddings is not None
    return call(reduction="mean") if both else call()


@wrong("nt_xent_pairwise")
def mean_pairs_with_anchors(call: Call) -> Tensor:
    """With a subset of anchors, mean_pairs divides by all pairs of the batch."""
    keep = call.anchors
    if call.reduction != "mean_pairs" or keep is None:
        return call()
    return call() * call.counts[keep].sum().clamp(min=1) / call.counts.sum().clamp(min=1)


@wrong("nt_xent_pairwise")
def mean_pairs_by_dot_with_a_mask(call: Call) -> Tensor:
    """With the reduction mean_pairs, dot products and a mask, the loss is the mean over the anchors."""
    three = call.reduction == "mean_pairs" and call.similarity == "dot" and call.positives is not None
    return call(reduction="mean") if three else call()


@wrong("info_nce")
def queue_under_one_direction(call: Call) -> Tensor:
    """From b to a, the queue is ignored, because it holds keys of tower b."""
    return call(negatives=None) if call.direction == "b_to_a" else call()


@wrong("info_nce")
def none_of_one_direction_with_a_queue(call: Call) -> Tensor:
    """With the reduction none, a queue and the direction b_to_a, the values of the other direction are returned."""
    three = call.reduction == "none" and call.negatives is not None and call.direction == "b_to_a"
    return call(direction="a_to_b") if three else call()


@wrong("info_nce")
def sum_of_both_directions_by_dot(call: Call) -> Tensor:
    """With the reduction sum and dot products, both directions are averaged instead of added."""
    three = call.reduction == "sum" and call.similarity == "dot" and call.direction == "both"
    return call() / 2 if three else call()


@wrong("nt_bxent")
def anchors_under_sum(call: Call) -> Tensor:
    """With a subset of anchors and the reduction sum, all rows are anchors."""
    both = call.anchors is not None and call.reduction == "sum"
    return call(anchors=None) if both else call()


@wrong("nt_bxent")
def dot_with_base_temperature(call: Call) -> Tensor:
    """With dot products, the base temperature is ignored."""
    return call(base_temperature=None) if call.similarity == "dot" else call()


@wrong("supcon_epsilon")
def cosine_with_a_mask(call: Call) -> Tensor:
    """With a mask of positives, dot products are used instead of cosines."""
    both = call.positives is not None and call.similarity == "cosine"
    return call(similarity="dot") if both else call()


@wrong("supcon_epsilon")
def drop_with_anchors_under_sum(call: Call) -> Tensor:
    """With a subset of anchors, the policy drop and the reduction sum, the loss is a mean."""
    three = call.no_positive == "drop" and call.reduction == "sum" and call.anchors is not None
    return call(reduction="mean") if three else call()


@wrong("supcon")
def none_with_anchors_and_drop(call: Call) -> Tensor:
    """With the reduction none, a subset of anchors and drop, values are in reverse order."""
    three = call.reduction == "none" and call.anchors is not None and call.no_positive == "drop"
    return call().flip(0) if three else call()


@wrong("supcon_in")
def self_rows_with_a_mask(call: Call) -> Tensor:
    """With a mask, self rows are ignored."""
    return call(self_rows=None) if call.positives is not None else call()


@wrong("nt_xent")
def dot_with_references(call: Call) -> Tensor:
    """With references and dot products, the references are normalised."""
    references = call.ref_embeddings
    if references is None or call.similarity != "dot":
        return call()
    return call(ref_embeddings=torch.nn.functional.normalize(references, dim=1, eps=1e-300))


@wrong("sigmoid")
def positive_bias(call: Call) -> Tensor:
    """A positive bias is taken as 0."""
    return call(bias=min(call.bias, 0.0))


@wrong("hard_negative")
def beta_above_one(call: Call) -> Tensor:
    """A beta above 1 is taken as 1."""
    return call(beta=min(call.beta, 1.0))


@wrong("hard_negative")
def small_tau_plus(call: Call) -> Tensor:
    """A tau_plus below 0.05 is taken as 0."""
    return call(tau_plus=call.tau_plus if call.tau_plus >= 0.05 else 0.0)


@wrong("dclw")
def large_sigma(call: Call) -> Tensor:
    """A sigma of 1 or more is taken as infinite: all weights are 1."""
    return call(sigma=call.sigma if call.sigma < 1 else 1e10)


@wrong("dclw")
def detached_with_references(call: Call) -> Tensor:
    """With references, the weights are always constants."""
    return call(detach_weights=call.detach_weights or call.ref_embeddings is not None)


@wrong("multiple_negatives_ranking")
def own_only_with_one_hard_negative(call: Call) -> Tensor:
    """With one hard negative per query, the scope own_only also has the documents of the other queries."""
    hard = call.hard_negatives
    one = hard is not None and hard.shape[1] == 1 and call.hard_negatives_scope == "own_only"
    return call(hard_negatives_scope="own") if one else call()


@wrong("multiple_negatives_ranking")
def hardness_of_all_negatives_by_dot(call: Call) -> Tensor:
    """With dot products, the hardness mode all_negatives leaves out the hard negatives of the query itself."""
    both = call.hardness_mode == "all_negatives" and call.similarity == "dot"
    return call(hardness_mode="in_batch_negatives") if both else call()
