"""The straightforward torch implementation of every loss, from which the tolerances are derived.

It normalises, multiplies, divides by the temperature and applies the catalogue's baseline formula, without precautions
against cancellation. ``rounding.py`` bounds the rounding errors of its operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ..suite.cases import Case
from ..suite.records import Matrix, Outcome


def plain_outcome(case: Case, dtype: str, *, single: bool = True, gradient: bool = True) -> Outcome:
    """The results of the straightforward implementation on a case.

    Args:
        case: the case.
        dtype: dtype of the inputs and of the gradient.
        single: whether bfloat16 and float16 accumulate in float32.
        gradient: whether to compute the gradients.
    """
    given = {
        name: torch.tensor(matrix).to(getattr(torch, dtype)).requires_grad_(gradient)
        for name, matrix in case.matrices.items()
    }
    narrow = single and dtype != "float64"
    s = similarities(case, {name: z.float() for name, z in given.items()} if narrow else given)
    loss, values = reduced(case, s, logits_of(case, s))
    gradients = dict[str, Matrix]()
    if gradient:
        found = torch.autograd.grad(loss.sum(), list(given.values()))
        gradients = {name: slopes.double().numpy() for name, slopes in zip(given, found, strict=True)}
    return Outcome(
        values=loss.detach().double().reshape(-1).tolist(),
        gradient=gradients.pop(case.first, None),
        anchors=dict(zip(case.counted(), values.detach().double().tolist(), strict=True)),
        other_gradients=gradients,
    )


def plain_weights(case: Case) -> Matrix:
    """The derivative of the loss with respect to each similarity, of the case's ``shape``, in float64."""
    s = torch.from_numpy(scaled_similarities(case)).requires_grad_()
    (found,) = torch.autograd.grad(reduced(case, s, logits_of(case, s))[0].sum(), s)
    return found.numpy()


def scaled_similarities(case: Case) -> Matrix:
    """The similarity matrix, of the case's ``shape``, in float64. Under cosine, no norm overflows."""
    given = case.matrices
    if case.option("similarity") == "cosine":
        given = {name: z / _or_one(np.max(np.abs(z), axis=1, keepdims=True)) for name, z in given.items()}
    return np.asarray(similarities(case, {name: torch.from_numpy(z) for name, z in given.items()}).numpy())


def logits_of(
    case: Case, s: torch.Tensor, temperature: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The logits of the similarities ``s``. Tensors replace the temperature and the bias of the case."""
    logits = s / (case.temperature if temperature is None else temperature)
    return logits + (case.bias if bias is None else bias) if "bias" in case.entry.keywords else logits


def reduced(
    case: Case, s: torch.Tensor, logits: torch.Tensor, temperature: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and the values of the counted anchors, from the similarities ``s`` and their logits."""
    base, t = case.option("base_temperature"), case.temperature if temperature is None else temperature
    scale = 1.0 if base is None else t / float(base)
    each = anchor_values(case, logits, s, temperature) * scale * _constant(case.anchor_weights(), s)
    counted = case.counted()
    values = each[counted]
    reduction = case.option("reduction")
    if reduction == "none_pairs":
        return pair_values(case, logits[[i for i, _ in case.pairs()]]) * scale, values
    if reduction == "none":
        return values, values
    summed = case.entry.form == "sigmoid"  # an anchor's value is the sum over its pairs, not their mean
    sizes = _constant(case.pair_numbers(), s)[counted] if case.over_pairs and not summed else 1.0
    if case.groups():
        return (values / _constant(case.divisors(), s)[counted]).sum(), values
    return (values * sizes).sum() / case.divisor(), values


def _constant(numbers: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(numbers, dtype=like.dtype)


def _or_one(sizes: Matrix) -> Matrix:
    """Sizes, with 1 in place of 0."""
    return np.asarray(np.where(sizes == 0, 1.0, sizes))


def _units(z: torch.Tensor) -> torch.Tensor:
    """Rows divided by their norms. A row of zeros stays 0 and has the gradient 0."""
    norm: torch.Tensor = z.norm(dim=1, keepdim=True)
    zero = norm.detach() == 0
    if not bool(zero.any()):
        return z / norm
    found: torch.Tensor = torch.where(zero, 0.0, z / norm.where(~zero, 1.0))
    return found


def similarities(case: Case, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The similarity matrix, of the case's ``shape``, from the matrices ``given`` by argument name."""
    if case.option("similarity") == "cosine":
        given = {name: _units(z) for name, z in given.items()}
    bands: dict[int, list[torch.Tensor]] = {}
    for block in case.blocks():
        bands.setdefault(block.part[0].start or 0, []).append(given[block.left] @ given[block.right].T)
    joined = [torch.cat(parts, dim=1) for parts in bands.values()]
    return torch.cat([torch.nn.functional.pad(band, (0, case.shape[1] - band.shape[1])) for band in joined])


def pair_values(case: Case, s: torch.Tensor) -> torch.Tensor:
    """The value of every pair: what the value of its anchor would be without other positives.

    In the sigmoid loss: what the value of its anchor would be without other pairs.

    Args:
        case: the case.
        s: for each pair, the logits of its anchor.
    """
    rows, columns = (list(part) for part in zip(*case.pairs(), strict=True)) if case.pairs() else ([], [])
    alone = torch.zeros((len(rows), case.shape[1]), dtype=torch.bool)
    alone[range(len(rows)), columns] = True
    member, positive = (torch.from_numpy(mask)[rows] for mask in (case.member_array(), case.positive_array()))
    member = alone if case.entry.form == "sigmoid" else alone | (member & ~positive)
    options = {**case.formula_options(), **case.lowest}
    for name in ("positive_weights", "negative_weights"):
        if (weights := case.weights(name)) is not None:
            options |= {name: torch.from_numpy(weights)[rows], "weights_divisor": "count"}
    values = case.entry.baseline(s, member, positive & alone, **options)
    return values * _constant(case.anchor_weights(), s)[rows]


def anchor_values(
    case: Case, s: torch.Tensor, similarity: torch.Tensor, temperature: torch.Tensor | None = None
) -> torch.Tensor:
    """The value of every row, from the logits ``s``; 0 for a row without terms.

    The ``similarity`` is only used by losses with weights, and the ``temperature`` by those with a lowest logit.
    """
    member = case.member_array()
    positive = case.positive_array() & member
    masks = torch.from_numpy(member), torch.from_numpy(positive)
    options = {**case.formula_options(), **case.lowest}
    if case.entry.lowest is not None and temperature is not None:
        options["lowest"] = case.entry.lowest / temperature
    given = {name: case.weights(name) for name in ("positive_weights", "negative_weights")}
    options |= {name: torch.from_numpy(found) for name, found in given.items() if found is not None}
    if case.entry.weights:
        weights = case.entry.weights.baseline(similarity, *masks, **case.weights_options())
        options["weights"] = weights.detach() if case.detaches_weights else weights
    return case.entry.baseline(s, *masks, **options)
