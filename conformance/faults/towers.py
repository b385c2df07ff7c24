"""Wrong positives, ignored pairs and weights of two towers in both directions."""

from __future__ import annotations

import torch
from torch import Tensor

from . import parts
from .base import fault


@fault("info_nce", build=parts.both_sides, takes=())
def info_nce_weights_of_the_other_direction(sides: parts.Sides, direction_weights: tuple[float, float]) -> Tensor:
    """The two weights are swapped: the first one multiplies the mean over the second tower's anchors."""
    of_back, of_there = direction_weights
    means = [parts.info_nce_values(side).mean() for side in sides]
    return of_there * means[0] + of_back * means[1]


@fault("info_nce", build=parts.both_sides, takes=())
def info_nce_weights_normalised(sides: parts.Sides, direction_weights: tuple[float, float]) -> Tensor:
    """The weights of the directions are divided by their sum."""
    means = [parts.info_nce_values(side).mean() for side in sides]
    first, second = direction_weights
    return (first * means[0] + second * means[1]) / (first + second)


@fault("info_nce", build=parts.both_sides, takes=("partners",))
def info_nce_weights_in_the_mean_of_all_anchors(sides: parts.Sides, direction_weights: tuple[float, float]) -> Tensor:
    """The weighted values are averaged over all anchors, not within each direction."""
    weighted = [w * parts.info_nce_values(side) for w, side in zip(direction_weights, sides, strict=True)]
    return torch.cat(weighted)


@fault("info_nce", build=parts.both_sides, takes=("partners",), level="policies")
def info_nce_unpartnered_rows_counted(sides: parts.Sides) -> Tensor:
    """Rows of the second tower without a partner count as anchors of loss 0."""
    return torch.cat([parts.anchors("info_nce", side) for side in sides])


@fault("info_nce", build=parts.both_sides, takes=("partners",), level="policies")
def info_nce_first_partner_only(sides: parts.Sides) -> parts.Sides:
    """If several rows have the same partner, only the first row is a positive of this partner."""
    positive = sides.back.positive
    return sides._replace(back=sides.back._replace(positive=positive & (positive.cumsum(dim=1) == 1)))


@fault("info_nce", build=parts.both_sides, takes=("partners",), level="policies")
def info_nce_partners_in_one_direction(sides: parts.Sides) -> parts.Sides:
    """In the second direction, the positives are always on the diagonal, whatever the partners."""
    own = torch.eye(*sides.back.positive.shape, dtype=torch.bool)
    return sides._replace(back=sides.back._replace(positive=own))


@fault("info_nce", build=parts.both_sides, takes=("labels", "ref_labels"), level="policies")
def info_nce_positives_summed(sides: parts.Sides) -> Tensor:
    """The cross-entropies of several positives are summed, not averaged."""
    values = [(side.counts * parts.anchors("info_nce", side))[side.positive.any(dim=1)] for side in sides]
    return torch.cat(values)


@fault("info_nce", build=parts.both_sides, takes=("labels", "ref_labels"), level="policies", inside_reduction="mean")
def info_nce_mean_outside(sides: parts.Sides) -> parts.Sides:
    """The mean over several positives is taken outside the logarithm, although inside_reduction is "mean"."""
    return sides


@fault("info_nce", build=parts.both_sides, takes=("labels", "ref_labels"), level="policies", inside_reduction="sum")
def info_nce_sum_divided_by_the_positives(sides: parts.Sides) -> Tensor:
    """The ratios inside the logarithm are averaged, although inside_reduction is "sum"."""
    return torch.cat([parts.info_nce_values(side, "mean") for side in sides])


@fault("info_nce", build=parts.both_sides, takes=(), level="policies")
def info_nce_ignored_pairs_not_transposed(sides: parts.Sides, ignored: Tensor) -> parts.Sides:
    """The mask of ignored pairs is not transposed for the anchors of the second tower."""
    back = parts.without(sides.back, ignored.T)
    back = back._replace(other=~ignored) if ignored.shape == back.other.shape else back
    return parts.Sides(parts.without(sides.there, ignored), back)


@fault("info_nce", build=parts.both_sides, takes=(), level="policies")
def info_nce_ignored_pairs_in_one_direction(sides: parts.Sides, ignored: Tensor) -> parts.Sides:
    """Pairs are ignored only for the anchors of the first tower."""
    return sides._replace(there=parts.without(sides.there, ignored))


@fault("info_nce", build=parts.both_sides, takes=(), level="policies")
def info_nce_ignored_ids_of_one_direction(sides: parts.Sides, ignored_ids: Tensor) -> parts.Sides:
    """Rows with the anchor's id are ignored only in the first direction: duplicates stay in the other one."""
    kept = (ignored_ids[:, None] != ignored_ids) | sides.there.positive
    return sides._replace(there=sides.there._replace(other=kept))


@fault("info_nce", build=parts.both_sides, takes=(), level="policies")
def info_nce_equal_ids_are_positives(sides: parts.Sides, ignored_ids: Tensor) -> parts.Sides:
    """Rows with equal ids are additional positives instead of being left out."""
    equal = ignored_ids[:, None] == ignored_ids
    return parts.Sides(*(side._replace(positive=equal) for side in sides))


@fault("info_nce", build=parts.both_sides, takes=(), level="policies")
def info_nce_anchor_weights_of_one_direction(sides: parts.Sides, anchor_weights: Tensor) -> Tensor:
    """The weights are those of the first tower's anchors; the second tower's anchors have weight 1."""
    there, back = map(parts.info_nce_values, sides)
    return torch.cat([there * anchor_weights, back]).sum() / (anchor_weights.sum() + len(back))


@fault("info_nce", build=parts.both_sides, takes=(), level="policies")
def info_nce_anchor_weights_mean_over_the_anchors(sides: parts.Sides, anchor_weights: Tensor) -> Tensor:
    """The mean of the weighted values divides by the number of anchors, not by the sum of their weights."""
    return torch.cat([parts.info_nce_values(side) * anchor_weights for side in sides])


@fault("info_nce", build=parts.both_sides, takes=("labels", "ref_labels"), level="policies")
def info_nce_anchor_weights_of_dropped_anchors(sides: parts.Sides, anchor_weights: Tensor) -> Tensor:
    """Anchors without positives are left out, but their weights stay in the divisor of the mean."""
    values = torch.cat([parts.info_nce_values(side) for side in sides])
    weights = torch.cat([anchor_weights[side.positive.any(dim=1)] for side in sides])
    return (values * weights).sum() / (2 * anchor_weights.sum())
