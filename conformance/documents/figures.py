"""Every printed figure judged: recomputed by the reference's own loops over balls, and compared with its rounding.

A figure is *reproduced* when the interval that its inputs allow meets the interval of numbers that print as it does.
No tolerance is chosen anywhere: the widths are those of the printed digits. Three roads lead to a figure, where the
document allows them, and all must arrive:

* ``printed inputs``: the embeddings as printed, each a ball of half a printed unit;
* ``printed cosines``: from the cosine matrix where the document prints that to more digits;
* ``exact inputs``: the embeddings themselves, where they are known.

A figure printed to the full length of its format is judged against that format's own arithmetic instead of the exact
value (``own arithmetic``). Anything else is an *artefact*, and what it is instead is checked too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flint import arb

from pairproof import reference
from pairproof.reference import scalars, similarity, supcon
from pairproof.reference.batch import evaluate_similarities

from ..implementations.documents import pair_notebook
from ..suite.cases import call_reference, reference_of_similarities
from ..truth.intervals import PRECISION, Rounded, ball, exact, precision
from .load import INFINITE, Call, Figure, Input, WorkedFixture, case_of
from .replay import own_loss

PRINTED_INPUTS = "printed inputs"
PRINTED_COSINES = "printed cosines"
EXACT_INPUTS = "exact inputs"
OWN_ARITHMETIC = "own arithmetic"
IN_FULL = "printed in full"
INSTEAD = "what it is instead"
STRUCTURE = "structure"


@dataclass(frozen=True)
class Arrival:
    """How one road ended: whether every entry was met, and if not, the first that was not."""

    road: str
    met: bool
    entries: int
    message: str


@dataclass(frozen=True)
class Judgement:
    """One figure judged.

    ``verdict`` is the one computed here; ``passed`` says that it equals the fixture's and that every road arrived.
    ``value`` is the exact value of a scalar, where its inputs are known.
    """

    document: str
    figure: Figure
    verdict: str
    arrivals: tuple[Arrival, ...]
    value: float | None
    finding: str

    @property
    def case(self) -> str:
        """The id by which the command line knows the figure."""
        return f"{self.document}/{self.figure.id}"

    @property
    def passed(self) -> bool:
        """Whether the computed verdict is the recorded one and nothing was missed on the way."""
        return self.verdict == self.figure.verdict and all(a.met for a in self.arrivals)

    @property
    def message(self) -> str:
        """What went wrong, first things first; empty if nothing did."""
        missed = [f"{a.road}: {a.message}" for a in self.arrivals if not a.met]
        if self.verdict != self.figure.verdict:
            missed.insert(0, f"recorded as {self.figure.verdict}, found to be {self.verdict}")
        return "; ".join(missed)


def judge(fixture: WorkedFixture, only: Collection[str] | None = None) -> Iterator[Judgement]:
    """Judge every figure of a document, or those whose ids are given, in the order of the page."""
    for figure in fixture.figures:
        if only is None or figure.id in only:
            with precision(PRECISION):
                judgement = _judge(fixture, figure)
            yield judgement


def _judge(fixture: WorkedFixture, figure: Figure) -> Judgement:
    call = fixture.calls[figure.call] if figure.call else None
    source = fixture.input_of(figure)
    verdict, value, finding = "reproduced", None, ""
    if figure.kind != "number":
        arrivals = [_structure(figure, call, source)]
    elif call and source.exact is None and source.printed is None:
        arrivals, verdict, finding = _constant(figure, call)
    else:
        arrivals = [_compare(name, figure, quantity) for name, quantity in _roads(fixture, figure, call, source)]
        if figure.quantity == "loss" and source.exact is not None and call:
            value = float(_quantity(figure, call, source, EXACT_INPUTS, None))
        if figure.length and call:
            own, verdict, finding = _own_arithmetic(figure, call, source)
            # The exact value is not expected of an artefact, only its explanation.
            arrivals = own if verdict == "artefact" else [*arrivals, *own]
    if verdict == "reproduced" and any(not a.met for a in arrivals):
        verdict = "artefact"
    return Judgement(fixture.document.id, figure, verdict, tuple(arrivals), value, finding)


def _roads(fixture: WorkedFixture, figure: Figure, call: Call | None, source: Input) -> Iterator[tuple[str, Any]]:
    if source.printed is not None and source.decimals is not None:
        yield PRINTED_INPUTS, _quantity(figure, call, source, PRINTED_INPUTS, None)
    matrix = _precise_cosines(fixture, figure, source)
    if matrix is not None:
        yield PRINTED_COSINES, _quantity(figure, call, source, PRINTED_COSINES, matrix)
    if source.exact is not None and not figure.length:
        yield EXACT_INPUTS, _quantity(figure, call, source, EXACT_INPUTS, None)


def _precise_cosines(fixture: WorkedFixture, figure: Figure, source: Input) -> list[list[arb]] | None:
    """The cosine matrix that the document prints for this input, if to more digits than the input; not for itself."""
    if figure.quantity in ("similarity", "normalised", "normalised_features") or source.decimals is None:
        return None
    for other in fixture.figures:
        if other.quantity == "similarity" and fixture.input_of(other) is source and not other.cut:
            if other.decimals is None or other.decimals <= source.decimals:
                continue
            n = source.shape[0]
            matrix = [[arb(1)] * n for _ in range(n)]
            for (i, j), text in ((index, entry) for index, entry in other.entries() if len(index) == 2):
                if i != j:
                    matrix[i][j] = ball(str(text), other.decimals)
            return matrix
    return None


def _rows(source: Input, road: str) -> np.ndarray[Any, Any]:
    rows = np.empty(source.shape, dtype=object)
    for i, j in np.ndindex(source.shape):
        if road == PRINTED_INPUTS and source.decimals is not None:
            rows[i, j] = ball(_entry(source.printed, i, j), source.decimals)
        elif source.exact is not None:
            rows[i, j] = exact(source.exact[i][j])
    return rows


def _entry(printed: Any, i: int, j: int) -> str:
    return str(printed[i][j])


def _terms(call: Call, source: Input, road: str, matrix: list[list[arb]] | None) -> reference.Result:
    """The reference's loss and terms for a call, from its input or from a matrix of cosines."""
    case = case_of(call, source)
    if matrix is not None:
        return reference_of_similarities(case, matrix)
    return call_reference(case, {case.first: _rows(source, road)})


def _quantity(figure: Figure, call: Call | None, source: Input, road: str, matrix: list[list[arb]] | None) -> Any:
    """What the figure shows, as balls: a scalar or nested lists."""
    n = source.shape[0]
    quantity = figure.quantity
    if quantity in ("normalised", "normalised_features"):
        rows = _rows(source, road)
        units = np.array([_unit(row) for row in rows.tolist()], dtype=object)
        if quantity == "normalised_features":
            return reference.split_views(units, _views(figure)).tolist()
        start, stop = figure.rows or (0, n)
        return units[start:stop].tolist()
    if call is None:
        cosines = matrix or similarity.similarity_matrix(_rows(source, road).tolist(), "cosine")
        logits = cosines
        terms = None
    else:
        loss, terms = _terms(call, source, road, matrix)
        if quantity == "loss":
            return loss
        if quantity == "anchor_losses":
            return [terms.anchor_losses[i] for i in range(n)]
        cosines, logits = terms.similarity, terms.logits
    if quantity == "similarity":
        return cosines
    if quantity == "similarity_row":
        return cosines[figure.row or 0]
    if quantity == "first_to_second":
        return [cosines[i][i + n // 2] for i in range(n // 2)]
    if quantity == "second_to_first":
        return [cosines[i + n // 2][i] for i in range(n // 2)]
    if quantity == "sigmoid":
        return [[arb(1) if i == j else 1 / (1 + (-logits[i][j]).exp()) for j in range(n)] for i in range(n)]
    if quantity == "exp_similarity":
        return [[arb(0) if i == j else logits[i][j].exp() for j in range(n)] for i in range(n)]
    if quantity == "softmax":
        return [_softmax(logits[i], i) for i in range(n)]
    if terms is not None and quantity in ("positives", "exp_positives", "denominators", "denominator"):
        partner = [terms.positives[i][0] for i in range(n)]
        if quantity == "positives":
            return [cosines[i][partner[i]] for i in range(n)]
        if quantity == "exp_positives":
            return [terms.pairs[i, partner[i]].log_numerator.exp() for i in range(n)]
        sums = [terms.pairs[i, partner[i]].log_denominator.exp() for i in range(n)]
        return sums if quantity == "denominators" else sums[figure.row or 0]
    raise ValueError(f"{figure.id}: no way to compute {quantity}")


def _views(figure: Figure) -> int:
    """The number of views of a figure [batch, views, dim]."""
    return 1 + max(index[1] for index, _ in figure.entries())


def _unit(row: list[arb]) -> list[arb]:
    norm = similarity.dot(row, row).sqrt()
    return [x / norm for x in row]


def _softmax(row: list[arb], i: int) -> list[arb]:
    others = [a for a in range(len(row)) if a != i]
    shift, rest = scalars.shifted_sum([row[a] for a in others])
    return [arb(0) if a == i else (row[a] - shift).exp() / (1 + rest) for a in range(len(row))]


def _compare(road: str, figure: Figure, quantity: Any) -> Arrival:
    """Whether every printed entry's rounding interval meets the enclosure computed for it."""
    entries = 0
    for index, text in figure.entries():
        entries += 1
        where = "".join(f"[{k}]" for k in index)
        on_diagonal = len(index) == 2 and index[0] == index[1]
        if text in INFINITE:
            if not (on_diagonal and figure.diagonal == text):
                return Arrival(road, False, entries, f"{where} is printed {text}, which belongs on a diagonal alone")
            continue
        if on_diagonal and figure.diagonal in INFINITE and figure.quantity == "similarity":
            return Arrival(road, False, entries, f"{where} is printed {text} where {figure.diagonal} belongs")
        value = quantity
        for k in index:
            value = value[k]
        printed = exact(str(text)) if figure.decimals is None else ball(str(text), figure.decimals)
        if not value.overlaps(printed):
            distance = float(abs(value.mid() - exact(str(text))))
            unit = 10.0 ** -(figure.decimals or 0)
            message = f"{figure.quantity}{where} is printed {text} but computed {_show(value)}"
            if figure.decimals is not None:
                message += f", {distance / unit:.2f} units of the last printed place away"
            return Arrival(road, False, entries, message)
    return Arrival(road, True, entries, "")


def _show(value: arb) -> str:
    return str(value.str(17)) if value.is_finite() else "something unbounded"


def _structure(figure: Figure, call: Call | None, source: Input) -> Arrival:
    """Masks, indices and rearrangements: exact."""
    expected = _expected_structure(figure, call, source)
    entries = 0
    for index, entry in figure.entries():
        entries += 1
        wanted = expected
        for k in index:
            wanted = wanted[k]
        if figure.kind == "layout":
            same = entry == wanted
        else:
            same = (entry if isinstance(entry, bool) else float(entry)) == wanted
        if not same:
            where = "".join(f"[{k}]" for k in index)
            return Arrival(STRUCTURE, False, entries, f"{figure.quantity}{where} is printed {entry}, not {wanted}")
    return Arrival(STRUCTURE, True, entries, "")


def _expected_structure(figure: Figure, call: Call | None, source: Input) -> Any:
    n = source.shape[0]
    quantity = figure.quantity
    if quantity == "features":
        texts = np.array([[_entry(source.printed, i, j) for j in range(source.shape[1])] for i in range(n)])
        return reference.split_views(texts, _views(figure)).tolist()
    if quantity == "eye":
        return [[i == j for j in range(n)] for i in range(n)]
    if quantity in ("not_eye", "negatives_mask"):
        return [[i != j for j in range(n)] for i in range(n)]
    if call is None:
        raise ValueError(f"{figure.id}: {quantity} needs a call")
    if quantity in ("partners", "partners_column"):
        partners = [int(p) for p in reference.interleaved_partners(n)]
        return partners if quantity == "partners" else [[p] for p in partners]
    if quantity == "positive_pairs_with_diagonal":
        return [list(pair) for pair in call.arguments["positive_pairs"]] + [[i, i] for i in range(n)]
    positives = _terms(call, source, EXACT_INPUTS, None).terms.positives
    if quantity == "one_hot_partners":
        return [[j in positives[i] for j in range(n)] for i in range(n)]
    mask = [[j == i or j in positives[i] for j in range(n)] for i in range(n)]
    if quantity == "negative_pairs":
        return [[not entry for entry in row] for row in mask]
    if quantity in ("positives_mask", "target"):
        return mask
    raise ValueError(f"{figure.id}: no way to compute {quantity}")


def _own_arithmetic(figure: Figure, call: Call, source: Input) -> tuple[list[Arrival], str, str]:
    """A figure printed in full against the arithmetic it was printed by.

    It must be a number of its format, printed as that number prints, and lie in the interval that the document's own
    operations allow. If that interval is unbounded the arithmetic proves nothing (a sigmoid rounded to 1, whose
    complement's logarithm is clamped): the figure is an artefact, and its explanation is checked instead.
    """
    text = str(figure.printed)
    number = float(text)
    dtype = np.float32 if figure.length == "float32" else np.float64
    spelled = repr(float(dtype(number)))
    arrivals = [
        Arrival(IN_FULL, spelled == text, 1, f"{text} is no {figure.length} printed in full; the nearest is {spelled}")
    ]
    proper = _quantity(figure, call, source, EXACT_INPUTS, None)
    ulp = float(np.spacing(dtype(number)))
    away = float(abs(proper - exact(text)).mid()) / ulp
    allowed = own_loss(call, source, figure.arithmetic, slack=1)
    if allowed.is_bounded:
        message = f"{text} lies outside [{allowed.lower!r}, {allowed.upper!r}], which its own operations allow"
        arrivals.append(Arrival(OWN_ARITHMETIC, number in allowed, 1, message))
        rounded = own_loss(call, source, figure.arithmetic, slack=0)
        replay = abs(rounded.lower - number) / ulp
        if figure.length == "float64":
            # In float64 the same operations, correctly rounded, end in the very digits that were printed.
            message = f"{text} is printed, {rounded.lower!r} is what the same operations give, {replay:.0f} ulp away"
            arrivals.append(Arrival("same operations", replay == 0, 1, message))
        finding = f"{away:.2g} ulp from the exact {proper.str(12, radius=False)}"
        finding += "; its own operations, correctly rounded, print " + (
            "the same digits" if replay == 0 else f"a value {replay:.0f} ulp away"
        )
        if figure.arithmetic == "float32":
            here = _run_here(figure, call, source, allowed)
            arrivals.append(here)
            finding += f"; {here.message}"
        return arrivals, "reproduced", finding
    clamped = own_loss(call, source, figure.arithmetic, slack=1, clamp=True)
    arrivals.append(
        Arrival(
            "clamped arithmetic",
            number in clamped and clamped.is_bounded,
            1,
            f"{text} lies outside [{clamped.lower!r}, {clamped.upper!r}], which its operations with the clamp allow",
        )
    )
    here = _run_here(figure, call, source, clamped)
    arrivals.append(here)
    arrivals.append(_instead(figure, proper))
    arrivals.append(Arrival("differs", not proper.overlaps(exact(text)), 1, f"{text} is the exact value after all"))
    because = figure.instead.because if figure.instead else ""
    return arrivals, "artefact", f"exactly {proper.str(12, radius=False)}; {because} ({here.message})"


def _run_here(figure: Figure, call: Call, source: Input, allowed: Rounded) -> Arrival:
    """The document's own function in float32 on this machine: the same digits, or at least within its own rounding."""
    case = case_of(call, source)
    found = float(pair_notebook(case, torch.tensor(case.embeddings, dtype=torch.float32)))
    same = repr(found) == str(figure.printed)
    message = "run in float32 here, the same digits" if same else f"run in float32 here, {found!r}"
    return Arrival("run in float32", same or found in allowed, 1, message)


def _instead(figure: Figure, proper: arb) -> Arrival:
    """The value that the fixture gives in an artefact's stead, against the enclosure of the true one."""
    if figure.instead is None:
        return Arrival(INSTEAD, False, 1, "the fixture does not say what the figure is instead")
    text = figure.instead.value
    decimals = len(text.partition(".")[2])
    met = bool(proper.overlaps(ball(text, decimals)))
    return Arrival(INSTEAD, met, 1, f"said to be {text}, computed {_show(proper)}")


def _constant(figure: Figure, call: Call) -> tuple[list[Arrival], str, str]:
    """The batch tutorial's 0.5545, whose input nobody knows, and need not know.

    Where every off-diagonal logit lies at least ``gap`` below its row's maximum, each exponential of the reference's
    loops is epsilon plus something in [0, e^-gap]. The loss is then the same for every such input; its derivative has
    the factor e^-gap / epsilon.
    """
    gap, far = 100, 10**9
    labels = call.arguments["labels"]
    n = len(labels)
    below = arb(-far).union(arb(-gap))
    loss = evaluate_similarities(
        supcon.supcon_epsilon_anchor,
        [[arb(0) if i == j else below for j in range(n)] for i in range(n)],
        [[labels[i] == labels[j] for j in range(n)] for i in range(n)],
        temperature=1.0,
    ).loss
    arrivals = [_compare("any input", figure, loss), _instead(figure, loss * (1 + arb(supcon.EPSILON)))]
    slope = math.exp(-gap) / supcon.EPSILON
    return (
        arrivals,
        "artefact",
        f"2 ln 4 / 5 for every input whose off-diagonal logits lie {gap} below the row's maximum;"
        f" no logit moves it by more than {slope:.0e} of itself, so nothing can be learnt from it",
    )
