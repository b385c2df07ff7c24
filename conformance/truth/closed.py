"""Closed forms of an anchor's value and its derivatives, for batches that are too large for the reference.

The reference loops over the denominator of every positive. A closed form computes shared sums once. A test compares
both on small cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import cast

from flint import arb

from ..suite.cases import Case
from ..suite.catalogue import WEIGHTS

Columns = Sequence[int]
Closed = tuple[arb, dict[int, arb]]
"""The value of an anchor, and its derivatives with respect to the logits, by column; 0 for other columns."""
Form = Callable[[Sequence[arb], Columns, Columns], Closed]
"""A closed form, as a function of the logits, the members and the positives of an anchor."""


def closed_form(case: Case) -> Form | None:
    """Return the closed form of the loss of a case, or None if the loss has none.

    Also return None if an anchor's value is NaN, a row has no negatives, the reduction is over pairs, or there are
    weights (of pairs, anchors, directions or hardness).
    """
    entry, options = case.entry, case.formula_options()
    sets = zip(case.positives(), case.members(), strict=True)
    if case.option("hardness_mode") not in (None, "none"):
        return None
    if not WEIGHTS.keys().isdisjoint(case.arguments):
        return None
    if case.undefined() or case.groups() or case.over_pairs or any(len(p) == len(m) for p, m in sets):
        return None
    if entry.epsilon:
        return partial(_with_epsilon, epsilon=entry.epsilon)
    denominator = options.get("denominator", entry.variant.get("denominator", "all"))
    form = FORMS.get((case.form, denominator))
    return _summed(form) if form and options.get("inside_reduction") == "sum" else form


def evaluated(case: Case, form: Form, i: int, row: Sequence[arb]) -> tuple[arb, list[arb]]:
    """Return the value of anchor i, and its derivatives with respect to its row of similarities."""
    if case.option("no_positive") and not case.positives()[i]:
        return arb(0), [arb(0)] * len(row)
    temperature, base = arb(case.temperature), case.option("base_temperature")
    scale = arb(1) if base is None else temperature / arb(base)
    form = partial(cast(Callable[..., Closed], form), own=i) if case.entry.epsilon else form
    value, slopes = form([x / temperature + case.bias for x in row], case.members()[i], case.positives()[i])
    factor = scale / temperature
    return value * scale, [slopes[k] * factor if k in slopes else arb(0) for k in range(len(row))]


def _exponentials(s: Sequence[arb], members: Columns) -> tuple[dict[int, arb], arb, arb]:
    """e^(s - top) of every member, the sum of these, and the logsumexp of the members."""
    top = max((s[a] for a in members), key=float)
    e = {a: (s[a] - top).exp() for a in members}
    total = _sum(e.values())
    return e, total, top + total.log()


def _sum(values: Iterable[arb]) -> arb:
    return sum(values, arb(0))


def _mean(s: Sequence[arb], members: Columns, positives: Columns) -> Closed:
    """L = log Σ_A e^s - Σ_P s / |P|."""
    e, total, log = _exponentials(s, members)
    slopes = {a: e[a] / total for a in members}
    for p in positives:
        slopes[p] = slopes.get(p, arb(0)) - arb(1) / len(positives)
    return log - _sum(s[p] for p in positives) / len(positives), slopes


def _inside(s: Sequence[arb], members: Columns, positives: Columns) -> Closed:
    """L = log Σ_A e^s - log Σ_P e^s + log |P|."""
    e, total, log = _exponentials(s, members)
    among, total_among, log_among = _exponentials(s, positives)
    slopes = {a: e[a] / total for a in members}
    for p in positives:
        slopes[p] = slopes.get(p, arb(0)) - among[p] / total_among
    return log - log_among + arb(len(positives)).log(), slopes


def _summed(form: Form) -> Form:
    """The form with the sum of the ratios inside the logarithm in place of their mean."""

    def changed(s: Sequence[arb], members: Columns, positives: Columns) -> Closed:
        value, slopes = form(s, members, positives)
        return value - arb(len(positives)).log(), slopes

    return changed


def _one_positive(s: Sequence[arb], members: Columns, positives: Columns) -> Closed:
    """L = Σ_P log(1 + e^-s_p Σ_N e^s) / |P|."""
    negatives = sorted({*members} - {*positives})
    e, total, log = _exponentials(s, negatives)
    ratios = {p: (log - s[p]).exp() for p in positives}
    count = len(positives)
    slopes = {p: -ratio / (1 + ratio) / count for p, ratio in ratios.items()}
    pushed = -_sum(slopes.values())
    slopes |= {n: e[n] / total * pushed for n in negatives}
    return _sum(ratio.log1p() for ratio in ratios.values()) / count, slopes


def _binary(s: Sequence[arb], members: Columns, positives: Columns) -> Closed:
    """L = Σ_P log(1 + e^-s) / (|P| + 1) + Σ_N log(1 + e^s) / |N|."""
    negatives = sorted({*members} - {*positives})
    value, slopes = arb(0), dict[int, arb]()
    for sign, columns, count in ((-1, positives, len(positives) + 1), (1, negatives, len(negatives))):
        for k in columns:
            e = (sign * s[k]).exp()
            value += e.log1p() / count
            slopes[k] = sign * e / (1 + e) / count
    return value, slopes


def _sigmoid(s: Sequence[arb], members: Columns, positives: Columns) -> Closed:
    """L = Σ_P log(1 + e^-s) + Σ_N log(1 + e^s)."""
    value, slopes = arb(0), dict[int, arb]()
    for k in members:
        sign = -1 if k in positives else 1
        e = (sign * s[k]).exp()
        value += e.log1p()
        slopes[k] = sign * e / (1 + e)
    return value, slopes


def _with_epsilon(s: Sequence[arb], members: Columns, positives: Columns, epsilon: float, own: int) -> Closed:
    """L = Σ_P (log Σ_A x - log x_p) / (|P| + ε), where x = e^(s - top) + ε; top is the largest s of A and ``own``."""
    largest = max(sorted([own, *members]), key=lambda k: float(s[k]))
    e = {a: (s[a] - s[largest]).exp() for a in members}
    total = _sum(e.values()) + arb(epsilon) * len(members)
    count = len(positives) + arb(epsilon)
    value = (len(positives) * total.log() - _sum((e[p] + arb(epsilon)).log() for p in positives)) / count
    slopes = {a: e[a] / total * len(positives) / count for a in members}
    for p in positives:
        slopes[p] -= e[p] / (e[p] + arb(epsilon)) / count
    # The value depends only on differences from the largest logit, so the derivatives add up to 0.
    rest = _sum(slopes.values())
    slopes[largest] = slopes.get(largest, arb(0)) - rest
    return value, slopes


def _against_negatives(form: Form) -> Form:
    """The form whose denominator is the sum over the negatives."""

    def changed(s: Sequence[arb], members: Columns, positives: Columns) -> Closed:
        return form(s, sorted({*members} - {*positives}), positives)

    return changed


FORMS: Mapping[tuple[str, str], Form] = {
    ("mean", "all"): _mean,
    ("mean", "one_positive"): _one_positive,
    ("mean", "only_negatives"): _against_negatives(_mean),
    ("inside", "all"): _inside,
    ("inside", "only_negatives"): _against_negatives(_inside),
    ("binary", "all"): _binary,
    ("sigmoid", "all"): _sigmoid,
}
"""The closed forms by the form of the loss and its denominator."""
