"""Losses that are wrong only for some partners, pairs, ids, masks or weights that training code passes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from pairproof.fast.views import interleaved_partners

from .base import SMALL, Call, products, weight_of_positive, with_weights, wrong


@wrong("nt_xent")
def first_pair_decides_the_layout(call: Call) -> Tensor:
    """If row 1 is the partner of row 0, all partners are taken for interleaved ones."""
    plain = call.ref_embeddings is None and call.ignored is None and call.ignored_ids is None
    guessed = plain and int(call.partners[0]) == 1
    return call(partners=interleaved_partners(call.n)) if guessed else call()


@wrong("info_nce")
def labels_of_the_first_tower(call: Call) -> Tensor:
    """If both towers have as many rows, the labels of the first are used for both."""
    labels = call.ref_labels
    return call() if labels is None or len(labels) != call.n else call(ref_labels=None)


@wrong("nt_xent")
def id_zero(call: Call) -> Tensor:
    """An ignored id of 0 means that a row has no id."""
    ids = call.ignored_ids
    if ids is None:
        return call()
    return call(ignored_ids=torch.where(ids == 0, ids.max() + 1 + torch.arange(call.n), ids))


@wrong("supcon")
def ids_of_positives(call: Call) -> Tensor:
    """Without references, positives with the id of the anchor are left out too."""
    ids = call.ignored_ids
    if ids is None or call.ref_embeddings is not None:
        return call()
    same = ids[:, None] == ids
    return call(ignored=same if call.ignored is None else same | call.ignored)


@wrong("supcon_in")
def ignored_pairs_are_made_symmetric(call: Call) -> Tensor:
    """Without references, an asymmetric mask of ignored pairs is made symmetric."""
    ignored = call.ignored
    return call() if ignored is None or call.ref_embeddings is not None else call(ignored=ignored | ignored.T)


@wrong("nt_bxent")
def pairs_in_both_directions(call: Call) -> Tensor:
    """Pair (i, j) makes i a positive of j too."""
    return call(positive_pairs=torch.cat([call.positive_pairs, call.positive_pairs.flip(1)]))


@wrong("nt_bxent", takes=SMALL)
def self_pair_in_the_divisor(call: Call) -> Tensor:
    """A self pair in the list is counted once more in the number of positives of its row."""
    pairs = call.positive_pairs
    listed = torch.zeros(call.n, dtype=torch.bool)
    listed[pairs[pairs[:, 0] == pairs[:, 1]][:, 0]] = True
    if not bool(listed.any()):
        return call()
    sums = torch.where(call.positive, softplus(-products(call)), 0.0).sum(dim=1)
    excess = sums / (call.counts + 1) - sums / (call.counts + 2)
    return call() - (excess * listed).mean()


@wrong("nt_xent_pairwise")
def zero_weight_of_a_positive(call: Call) -> Tensor:
    """A positive of weight 0 is taken for one without a weight: it gets weight 1."""
    weights = call.positive_weights
    return call() if weights is None else call(positive_weights=torch.where(weights == 0, 1.0, weights))


@wrong("supcon")
def weights_of_negatives_transposed(call: Call) -> Tensor:
    """Without references, the matrix of the weights of negatives is transposed."""
    weights = call.negative_weights
    return call() if weights is None or call.ref_embeddings is not None else call(negative_weights=weights.T)


@wrong("info_nce")
def anchor_weights_under_none(call: Call) -> Tensor:
    """With the reduction none, the weights of anchors are ignored."""
    return call(anchor_weights=None) if call.reduction == "none" else call()


@wrong("nt_xent")
def mean_of_anchor_weights(call: Call) -> Tensor:
    """The weighted mean divides by the number of anchors instead of the sum of their weights."""
    weights = call.anchor_weights
    if weights is None or call.reduction != "mean":
        return call()
    chosen = weights if call.anchors is None else weights[call.anchors.bool()]
    return call(reduction="sum") / max(1, len(chosen))


@wrong("nt_xent_pairwise")
def weights_of_positives_in_bfloat16(call: Call) -> Tensor:
    """The weights of positives are rounded to bfloat16."""
    weights = call.positive_weights
    return call() if weights is None else call(positive_weights=weights.bfloat16().to(weights.dtype))


@wrong("nt_xent")
def ids_of_references(call: Call) -> Tensor:
    """If there are as many references as rows, the ids of the rows are used for both."""
    ids = call.ref_ignored_ids
    return call() if ids is None or len(ids) != call.n else call(ref_ignored_ids=call.ignored_ids)


@wrong("multiple_negatives_ranking")
def hard_negatives_are_never_ignored(call: Call) -> Tensor:
    """In the mask of ignored pairs, the columns of hard negatives have no effect."""
    hard, ignored = call.hard_negatives, call.ignored
    if hard is None or ignored is None:
        return call()
    columns = torch.arange(ignored.shape[1]) - call.n
    return call(ignored=ignored & ((columns < 0) | (columns >= call.n * hard.shape[1])))


@wrong("sigmoid")
def divided_by_the_other_tower(call: Call) -> Tensor:
    """If the towers have different numbers of rows, the mean divides by the number of rows of the second."""
    plain = call.reduction == "mean" and call.anchor_weights is None
    return call() * call.n / len(call.embeddings_b) if plain else call()


@wrong("supcon", argument="Rows of zeros belong to the level `range`, at which it fails.")
def zero_rows_are_no_anchors(call: Call) -> Tensor:
    """Where zero rows are valid, the mean leaves them out."""
    valid = call.zero_row == "zero" and call.similarity == "cosine" and call.reduction == "mean"
    zero = (call.z.detach() == 0).all(dim=1)
    return call.without_anchors(zero) if valid and bool(zero.any()) else call()


@wrong("dclw", takes=SMALL)
def negative_weights_of_positives(call: Call) -> Tensor:
    """A negative weight of a positive, as for a much larger cosine than the others, is replaced by 0."""
    weights = weight_of_positive(call)
    return with_weights(call, weights.clamp(max=2)) if bool((weights > 2).any()) else call()


@wrong("supcon_epsilon", takes=("temperature", "ignored"))
def maximum_of_ignored_pairs(call: Call) -> Tensor:
    """The maximum that is subtracted from the logits of a row includes ignored pairs."""
    if call.ignored is None or call.labels is None:
        return call()
    logits, epsilon = products(call), 1e-8
    e = (logits - logits.amax(dim=1, keepdim=True)).exp() + epsilon
    kept = ~call.ignored & ~torch.eye(call.n, dtype=torch.bool)
    positive = call.positive & kept
    terms = torch.where(positive, (e * kept).sum(dim=1, keepdim=True).log() - e.log(), 0.0)
    return (terms.sum(dim=1) / (positive.sum(dim=1) + epsilon)).mean()


@wrong("multiple_negatives_ranking")
def equal_documents(call: Call) -> Tensor:
    """Without hard negatives, documents that equal the document of the query are left out of its negatives."""
    bare = call.hard_negatives is None and call.ignored is None and call.directions == "query_to_doc"
    documents = call.embeddings_b.detach()
    equal = (documents[:, None] == documents).all(dim=2).fill_diagonal_(False)
    return call(ignored=equal) if bare and bool(equal.any()) else call()
