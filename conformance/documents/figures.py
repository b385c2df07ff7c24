"""Judge printed figures: recompute each in ball arithmetic, and compare it with the printed digits.

A printed number stands for the interval of all numbers that round to it. The figure is *reproduced* if this interval
overlaps the computed interval. A number is computed in up to three ways, and every way must reproduce it:

* ``printed inputs``: from the printed embeddings, each known to half a unit of its last place;
* ``printed cosines``: from the printed cosine matrix, if it has more digits than the embeddings;
* ``exact inputs``: from the exact embeddings, if they are known.

Some figures are judged differently:

* A public test may accept a larger difference than the printed digits suggest (``Figure.within``).
* A loss printed with all digits of its dtype is compared with a computation in that dtype (``own arithmetic``) instead
  of ``exact inputs``.
* Masks, indices and layouts must be equal to the computed ones.

A figure that is not reproduced is an *artefact*. It passes only if its cause is known (a clamped logarithm or an
unpublished input) and the recorded explanation is correct.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import getitem
from typing import Any

import numpy as np
import torch
from flint import arb

from pairproof import reference
from pairproof.reference import similarity, supcon
from pairproof.reference.batch import evaluate_similarities

from ..implementations.documents import pair_notebook
from ..suite.cases import Case, call_reference, reference_of_similarities
from ..suite.store import place
from ..truth.intervals import Rounded, ball, exact, precision
from .load import INFINITE, Call, Figure, Input, WorkedFixture, case_of
from .quantities import QUANTITIES
from .replay import own_loss

PRINTED_INPUTS = "printed inputs"
PRINTED_COSINES = "printed cosines"
EXACT_INPUTS = "exact inputs"


@dataclass(frozen=True)
class Match:
    """The result of comparing a figure with one way of computing it.

    ``message`` describes the first difference or, for the way ``run in float32``, the result.
    """

    way: str
    met: bool
    message: str


@dataclass(frozen=True)
class Judgement:
    """The judgement of one figure.

    Attributes:
        document: id of the document.
        figure: the figure.
        verdict: the computed verdict; ``figure.verdict`` is the recorded one.
        matches: the comparisons that were made.
        value: the exact loss, rounded to float64; None if the figure shows no loss, or its exact inputs are unknown.
        finding: an explanation of the verdict, or "".
    """

    document: str
    figure: Figure
    verdict: str
    matches: tuple[Match, ...]
    value: float | None
    finding: str

    @property
    def case(self) -> str:
        """The id of the figure on the command line."""
        return f"{self.document}/{self.figure.id}"

    @property
    def passed(self) -> bool:
        """Whether the computed verdict equals the recorded one and every comparison succeeded."""
        return self.verdict == self.figure.verdict and all(a.met for a in self.matches)

    @property
    def message(self) -> str:
        """The differences from what is recorded, or "" if there are none."""
        missed = [f"{a.way}: {a.message}" for a in self.matches if not a.met]
        if self.verdict != self.figure.verdict:
            missed.insert(0, f"recorded as {self.figure.verdict}, found to be {self.verdict}")
        return "; ".join(missed)


def judge(fixture: WorkedFixture, only: Collection[str] | None = None) -> Iterator[Judgement]:
    """Judge the figures of a document in order; ``only`` selects them by id."""
    for figure in fixture.figures:
        if only is None or figure.id in only:
            with precision():
                judgement = _judge(fixture, figure)
            yield judgement


@dataclass(frozen=True, eq=False)
class Evaluation:
    """One way of computing a figure.

    Attributes:
        figure: the figure.
        call: the figure's call; None if the figure depends only on its input.
        source: the figure's input.
        way: ``PRINTED_INPUTS``, ``PRINTED_COSINES`` or ``EXACT_INPUTS``.
        matrix: the printed cosines for ``PRINTED_COSINES``, otherwise None.
    """

    figure: Figure
    call: Call | None
    source: Input
    way: str = EXACT_INPUTS
    matrix: list[list[arb]] | None = None

    @property
    def quantity(self) -> Any:
        """The quantity that the figure shows: a scalar or nested sequences."""
        return QUANTITIES[self.figure.quantity].compute(self)

    @property
    def n(self) -> int:
        """Number of rows of the input."""
        return self.source.shape[0]

    @cached_property
    def rows(self) -> np.ndarray[Any, Any]:
        """The input [N, D] as balls."""
        if self.way == PRINTED_INPUTS:
            return self.source.table(lambda text: _printed(text, self.source.decimals), printed=True)
        return self.source.table(exact)

    @property
    def units(self) -> list[list[arb]]:
        """The rows divided by their norms."""
        return [[x / similarity.dot(row, row).sqrt() for x in row] for row in self.rows.tolist()]

    @cached_property
    def case(self) -> Case:
        """The case of the call. Its embeddings are 0 if the exact inputs are unknown."""
        if self.call is None:
            raise ValueError(f"{self.figure.id}: {self.figure.quantity} needs a call")
        return case_of(self.figure.id, self.call, self.source)

    @cached_property
    def result(self) -> reference.Result:
        """The loss and its terms, computed from the printed cosines or from the rows."""
        if self.matrix is not None:
            return reference_of_similarities(self.case, self.matrix)
        return call_reference(self.case, {self.case.first: self.rows})

    @cached_property
    def cosines(self) -> Any:
        """The similarities [N, N]."""
        if self.call is not None:
            return self.result.terms.similarity
        return self.matrix or similarity.similarity_matrix(self.rows.tolist(), "cosine")

    @property
    def logits(self) -> Any:
        """The similarities, divided by the temperature if there is a call."""
        return self.cosines if self.call is None else self.result.terms.logits

    @cached_property
    def positive_pairs(self) -> list[tuple[int, int]]:
        """All pairs (anchor, positive)."""
        return [(i, p) for i, positives in enumerate(self.result.terms.positives) for p in positives]


def _judge(fixture: WorkedFixture, figure: Figure) -> Judgement:
    known = Evaluation(figure, fixture.call_of(figure), fixture.input_of(figure))
    source = known.source
    verdict, value, finding = "reproduced", None, ""
    if figure.kind != "number":
        matches = [_compare("structure", figure, known.quantity)]
    elif known.call and source.exact is None and source.printed is None:
        matches, finding = _constant(figure, known.case)
        verdict = "artefact"
    else:
        matches = [_compare(way.way, figure, way.quantity) for way in _ways(fixture, known)]
        if figure.quantity == "loss" and source.exact is not None:
            value = float(known.quantity)
        if figure.within:
            off = max(abs(float(reduce(getitem, at, known.quantity)) - float(str(x))) for at, x in figure.entries())
            finding = f"at most {off:.1g} from the exact value; the test accepts {float(figure.within):g}"
        if figure.length and known.call:
            own, verdict, finding = _own_arithmetic(known)
            # An artefact differs from the exact value, so only its explanation is checked.
            matches = own if verdict == "artefact" else [*matches, *own]
    if not all(match.met for match in matches):
        verdict = "artefact"
    return Judgement(fixture.document.id, figure, verdict, tuple(matches), value, finding)


def _ways(fixture: WorkedFixture, known: Evaluation) -> Iterator[Evaluation]:
    figure, source = known.figure, known.source
    if source.decimals is not None:
        yield replace(known, way=PRINTED_INPUTS)
        for other in (
            fixture.figures if figure.quantity not in ("similarity", "normalised", "normalised_features") else ()
        ):
            printed = other.quantity == "similarity" and not other.cut and fixture.input_of(other) is source
            if printed and (other.decimals or 0) > source.decimals:
                entries, n = dict(other.entries()), range(known.n)
                matrix = [[arb(1) if i == j else _printed(str(entries[i, j]), other.decimals) for j in n] for i in n]
                yield replace(known, way=PRINTED_COSINES, matrix=matrix)
                break
    if source.exact is not None and not figure.length:
        yield known


def _compare(way: str, figure: Figure, quantity: Any) -> Match:
    """Compare printed entries with computed ones, up to the first difference."""
    for index, entry in figure.entries():
        on_diagonal = len(index) == 2 and index[0] == index[1]
        difference = _difference(figure, on_diagonal, entry, reduce(getitem, index, quantity))
        if difference:
            return Match(way, False, f"{figure.quantity}{place(index)} is printed {entry}{difference}")
    return Match(way, True, "")


def _difference(figure: Figure, on_diagonal: bool, entry: str | bool, value: Any) -> str:
    """Describe how a printed entry differs from the computed one, as the end of a sentence; "" if they agree."""
    if figure.kind != "number":
        found = float(entry) if figure.kind != "layout" and isinstance(entry, str) else entry
        return "" if found == value else f" but computed {value}"
    if entry in INFINITE:
        allowed = f", which is allowed only on the diagonal, and only if it is recorded as {entry}"
        return "" if on_diagonal and figure.diagonal == entry else allowed
    if on_diagonal and figure.diagonal in INFINITE and figure.quantity == "similarity":
        return f", but the diagonal is recorded as {figure.diagonal}"
    computed = arb(value)
    if computed.overlaps(_interval(figure, str(entry))):
        return ""
    distance = float(abs(computed.mid() - exact(str(entry)))) * 10.0 ** (figure.decimals or 0)
    away = f", {distance:.2f} units of the last printed place away" if figure.decimals is not None else ""
    return f" but computed {_show(computed)}{away}"


def _interval(figure: Figure, text: str) -> arb:
    """The numbers that round to an entry, or that the public test accepts."""
    return exact(text) + exact(figure.within) * arb(0, 1) if figure.within else _printed(text, figure.decimals)


def _printed(text: str, decimals: int | None) -> arb:
    return exact(text) if decimals is None else ball(text, decimals)


def _show(value: arb) -> str:
    return str(value.str(17)) if value.is_finite() else "an unbounded interval"


def _own_arithmetic(known: Evaluation) -> tuple[list[Match], str, str]:
    """Compare a figure printed in full with the document's own arithmetic.

    The text must be what ``repr`` gives for a number of the dtype, converted to float64. The number must be a possible
    result of the document's operations.

    If a sigmoid rounds to 1, log(1 - sigmoid) is -inf, and the possible results are unbounded. The figure is then an
    artefact: torch clamps the logarithm. The number must be a possible result of the clamped operations, and the
    recorded true value is checked.

    Returns:
        The comparisons, the verdict and the finding.
    """
    figure, case, proper = known.figure, known.case, known.quantity
    text, true = str(figure.printed), proper.str(12, radius=False)
    number = np.dtype(figure.length).type(text)
    spelled = repr(float(number))
    message = f"{text} is not a {figure.length} printed in full; the nearest one is {spelled}"
    matches = [Match("printed in full", spelled == text, message)]
    allowed = own_loss(case, figure.arithmetic, slack=1)
    if not allowed.is_bounded:
        clamped = own_loss(case, figure.arithmetic, slack=1, clamp=True)
        here = _run_here(figure, case, clamped)
        differs = Match("differs", not proper.overlaps(exact(text)), f"{text} is the exact value")
        inside = _inside("clamped arithmetic", text, clamped, "its operations with the clamp")
        matches += [inside, here, _instead(figure, proper), differs]
        because = figure.instead["because"] if figure.instead else ""
        return matches, "artefact", f"exactly {true}; {because} ({here.message})"
    matches.append(_inside("own arithmetic", text, allowed, "its own operations"))
    rounded = own_loss(case, figure.arithmetic, slack=0).lower
    ulp = float(np.spacing(number))
    away, replay = float(abs(proper - exact(text)).mid()) / ulp, abs(rounded - float(text)) / ulp
    digits = "the same digits" if replay == 0 else f"a value {replay:.0f} ulp away"
    finding = f"{away:.2g} ulp from the exact {true}; its own operations, correctly rounded, print {digits}"
    if figure.length == "float64":
        # In float64, correctly rounded operations must give exactly the printed digits.
        message = f"{text} is printed, the same operations give {rounded!r}, {replay:.0f} ulp away"
        matches.append(Match("same operations", replay == 0, message))
    if figure.arithmetic == "float32":
        matches.append(_run_here(figure, case, allowed))
        finding += f"; {matches[-1].message}"
    return matches, "reproduced", finding


def _inside(way: str, text: str, interval: Rounded, operations: str) -> Match:
    """Check that a printed number lies in a bounded interval."""
    message = f"{text} is outside [{interval.lower!r}, {interval.upper!r}], the values that {operations} can give"
    return Match(way, float(text) in interval and interval.is_bounded, message)


def _run_here(figure: Figure, case: Case, allowed: Rounded) -> Match:
    """Run the document's function in float32. It must give the printed digits or a value in ``allowed``."""
    found = float(pair_notebook(case, torch.tensor(case.embeddings, dtype=torch.float32)))
    same = repr(found) == figure.printed
    message = f"run in float32 here, {'the same digits' if same else repr(found)}"
    return Match("run in float32", same or found in allowed, message)


def _instead(figure: Figure, proper: arb) -> Match:
    """Compare the recorded true value of an artefact with the computed enclosure."""
    text = figure.instead["value"] if figure.instead else "nothing"
    met = figure.instead is not None and bool(proper.overlaps(ball(text, len(text.partition(".")[2]))))
    return Match("true value", met, f"recorded as {text}, computed {_show(proper)}")


def _constant(figure: Figure, case: Case) -> tuple[list[Match], str]:
    """Judge the batch tutorial's 0.5545, whose input is not published.

    The loss adds epsilon to e^(logit - maximum of the row). If all off-diagonal logits are at least ``gap`` below the
    maximum, their exponentials are negligible beside epsilon. The printed digits then do not depend on the input, and
    the derivative of the loss has the factor e^-gap / epsilon.
    """
    gap = 100
    below = arb(-(10**9)).union(arb(-gap))
    logits = [[arb(0) if i == j else below for j in range(case.n)] for i in range(case.n)]
    loss = evaluate_similarities(case.entry.formula, logits, case.positive_mask(), temperature=1.0).loss
    matches = [_compare("any input", figure, loss), _instead(figure, loss * (1 + arb(supcon.EPSILON)))]
    finding = f"2 ln 4 / 5 for every input whose off-diagonal logits are at least {gap} below the maximum of their row;"
    slope = math.exp(-gap) / supcon.EPSILON
    return matches, f"{finding} its relative change per logit is at most {slope:.0e}, so training cannot reduce it"
