"""Wrong positives, ignored pairs and weights of two towers in both directions."""

from __future__ import annotations

import torch
from torch import Tensor

from . import parts
from .base import fault


def _values(side: parts.Batch, inside_reduction: str = "none") -> Tensor:
    """[K], the values of the anchors with positives."""
    return parts.info_nce_values(side, inside_reduction)


@fault("info_nce")
def info_nce_weights_of_the_other_direction(
    view_a: Tensor, view_b: Tensor, *, temperature: float, direction_weights: tuple[float, float] | None = None
) -> Tensor:
    """The two weights are swapped: the first one multiplies the mean over the second tower's anchors."""
    weights = (0.5, 0.5) if direction_weights is None else direction_weights[::-1]
    there, back = parts.both_sides(view_a, view_b, temperature=temperature)
    return weights[0] * _values(there).mean() + weights[1] * _values(back).mean()


@fault("info_nce")
def info_nce_weights_normalised(
    view_a: Tensor, view_b: Tensor, *, temperature: float, direction_weights: tuple[float, float] | None = None
) -> Tensor:
    """The weights of the directions are divided by their sum."""
    first, second = (0.5, 0.5) if direction_weights is None else direction_weights
    there, back = parts.both_sides(view_a, view_b, temperature=temperature)
    return (first * _values(there).mean() + second * _values(back).mean()) / (first + second)


@fault("info_nce")
def info_nce_weights_in_the_mean_of_all_anchors(
    view_a: Tensor,
    view_b: Tensor,
    *,
    temperature: float,
    partners: Tensor | None = None,
    direction_weights: tuple[float, float] | None = None,
) -> Tensor:
    """The weighted values are averaged over all anchors, not within each direction."""
    sides = parts.both_sides(view_a, view_b, temperature=temperature, partners=partners)
    weights = (1.0, 1.0) if direction_weights is None else direction_weights
    return torch.cat([weight * _values(side) for weight, side in zip(weights, sides, strict=True)])


@fault("info_nce", level="policies")
def info_nce_unpartnered_rows_counted(
    view_a: Tensor, view_b: Tensor, *, temperature: float, partners: Tensor | None = None
) -> Tensor:
    """Rows of the second tower without a partner count as anchors of loss 0."""
    sides = parts.both_sides(view_a, view_b, temperature=temperature, partners=partners)
    return torch.cat([parts.anchors("info_nce", side) for side in sides])


@fault("info_nce", level="policies")
def info_nce_first_partner_only(
    view_a: Tensor, view_b: Tensor, *, temperature: float, partners: Tensor | None = None
) -> Tensor:
    """If several rows have the same partner, only the first row is a positive of this partner."""
    there, back = parts.both_sides(view_a, view_b, temperature=temperature, partners=partners)
    first = back.positive & (back.positive.cumsum(dim=1) == 1)
    return torch.cat([_values(there), _values(back._replace(positive=first))])


@fault("info_nce", level="policies")
def info_nce_partners_in_one_direction(
    view_a: Tensor, view_b: Tensor, *, temperature: float, partners: Tensor | None = None
) -> Tensor:
    """In the second direction, the positives are always on the diagonal, whatever the partners."""
    there, back = parts.both_sides(view_a, view_b, temperature=temperature, partners=partners)
    own = torch.eye(*back.positive.shape, dtype=torch.bool)
    return torch.cat([_values(there), _values(back._replace(positive=own))])


@fault("info_nce", level="policies")
def info_nce_positives_summed(
    view_a: Tensor,
    view_b: Tensor,
    *,
    temperature: float,
    labels: Tensor | None = None,
    ref_labels: Tensor | None = None,
) -> Tensor:
    """The cross-entropies of several positives are summed, not averaged."""
    sides = parts.both_sides(view_a, view_b, temperature=temperature, labels=labels, ref_labels=ref_labels)
    values = [(side.counts * parts.anchors("info_nce", side))[side.positive.any(dim=1)] for side in sides]
    return torch.cat(values)


@fault("info_nce", level="policies", inside_reduction="mean")
def info_nce_mean_outside(
    view_a: Tensor,
    view_b: Tensor,
    *,
    temperature: float,
    labels: Tensor | None = None,
    ref_labels: Tensor | None = None,
) -> Tensor:
    """The mean over several positives is taken outside the logarithm, although inside_reduction is "mean"."""
    sides = parts.both_sides(view_a, view_b, temperature=temperature, labels=labels, ref_labels=ref_labels)
    return torch.cat([_values(side) for side in sides])


@fault("info_nce", level="policies", inside_reduction="sum")
def info_nce_sum_divided_by_the_positives(
    view_a: Tensor,
    view_b: Tensor,
    *,
    temperature: float,
    labels: Tensor | None = None,
    ref_labels: Tensor | None = None,
) -> Tensor:
    """The ratios inside the logarithm are averaged, although inside_reduction is "sum"."""
    sides = parts.both_sides(view_a, view_b, temperature=temperature, labels=labels, ref_labels=ref_labels)
    return torch.cat([_values(side, "mean") for side in sides])


@fault("info_nce", level="policies")
def info_nce_ignored_pairs_not_transposed(
    view_a: Tensor, view_b: Tensor, *, temperature: float, ignored: Tensor | None = None
) -> Tensor:
    """The mask of ignored pairs is not transposed for the anchors of the second tower."""
    there, back = parts.both_sides(view_a, view_b, temperature=temperature, ignored=ignored)
    if ignored is not None and ignored.shape == back.other.shape:
        back = back._replace(other=~ignored)
    return torch.cat([_values(there), _values(back)])


@fault("info_nce", level="policies")
def info_nce_ignored_pairs_in_one_direction(
    view_a: Tensor, view_b: Tensor, *, temperature: float, ignored: Tensor | None = None
) -> Tensor:
    """Pairs are ignored only for the anchors of the first tower."""
    there, _ = parts.both_sides(view_a, view_b, temperature=temperature, ignored=ignored)
    _, back = parts.both_sides(view_a, view_b, temperature=temperature)
    return torch.cat([_values(there), _values(back)])


@fault("info_nce", level="policies")
def info_nce_ignored_ids_of_one_direction(
    view_a: Tensor, view_b: Tensor, *, temperature: float, ignored_ids: Tensor | None = None
) -> Tensor:
    """Rows with the anchor's id are ignored only in the first direction: duplicates stay in the other one."""
    there, _ = parts.both_sides(view_a, view_b, temperature=temperature, ignored_ids=ignored_ids)
    _, back = parts.both_sides(view_a, view_b, temperature=temperature)
    return torch.cat([_values(there), _values(back)])


@fault("info_nce", level="policies")
def info_nce_equal_ids_are_positives(
    view_a: Tensor, view_b: Tensor, *, temperature: float, ignored_ids: Tensor | None = None
) -> Tensor:
    """Rows with equal ids are additional positives instead of being left out."""
    sides = parts.both_sides(view_a, view_b, temperature=temperature, labels=ignored_ids)
    return torch.cat([_values(side) for side in sides])


@fault("info_nce", level="policies")
def info_nce_anchor_weights_of_one_direction(
    view_a: Tensor, view_b: Tensor, *, temperature: float, anchor_weights: Tensor | None = None
) -> Tensor:
    """The weights are those of the first tower's anchors; the second tower's anchors have weight 1."""
    values = [_values(side) for side in parts.both_sides(view_a, view_b, temperature=temperature)]
    if anchor_weights is None:
        return torch.cat(values)
    weighted = torch.cat([values[0] * anchor_weights, values[1]])
    return weighted.sum() / (anchor_weights.sum() + len(values[1]))


@fault("info_nce", level="policies")
def info_nce_anchor_weights_mean_over_the_anchors(
    view_a: Tensor, view_b: Tensor, *, temperature: float, anchor_weights: Tensor | None = None
) -> Tensor:
    """The mean of the weighted values divides by the number of anchors, not by the sum of their weights."""
    values = [_values(side) for side in parts.both_sides(view_a, view_b, temperature=temperature)]
    return torch.cat(values if anchor_weights is None else [each * anchor_weights for each in values])


@fault("info_nce", level="policies")
def info_nce_anchor_weights_of_dropped_anchors(
    view_a: Tensor,
    view_b: Tensor,
    *,
    temperature: float,
    labels: Tensor | None = None,
    ref_labels: Tensor | None = None,
    anchor_weights: Tensor | None = None,
) -> Tensor:
    """Anchors without positives are left out, but their weights stay in the divisor of the mean."""
    sides = parts.both_sides(view_a, view_b, temperature=temperature, labels=labels, ref_labels=ref_labels)
    values = torch.cat([_values(side) for side in sides])
    if anchor_weights is None:
        return values
    weights = torch.cat([anchor_weights[side.positive.any(dim=1)] for side in sides])
    return (values * weights).sum() / (2 * anchor_weights.sum())
