"""Every printed figure judged: recomputed by the reference's own loops over balls, and compared with its rounding.

A figure is *reproduced* when the interval that its inputs allow meets the interval of numbers that print as it does.
No tolerance is chosen: the widths are those of the printed digits. A figure is computed in up to three ways, where the
document allows them, and all must reproduce it:

* ``printed inputs``: the embeddings as printed, each a ball of half a printed unit;
* ``printed cosines``: from the cosine matrix where the document prints that to more digits;
* ``exact inputs``: the embeddings themselves, where they are known.

A figure printed to the full length of its format is judged against that format's own arithmetic instead of the exact
value (``own arithmetic``). Anything else is an *artefact*, and its explanation is checked too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
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
    """Whether a figure is what one way of computing it gives, and if not, the first entry that is not."""

    way: str
    met: bool
    message: str
    entries: int = 1


@dataclass(frozen=True)
class Judgement:
    """One figure judged.

    ``verdict`` is the one computed here; ``passed`` says that it equals the fixture's and that no way of computing the
    figure differs from it.
    ``value`` is the exact value of a scalar, where its inputs are known.
    """

    document: str
    figure: Figure
    verdict: str
    matches: tuple[Match, ...]
    value: float | None
    finding: str

    @property
    def case(self) -> str:
        """The id by which the command line knows the figure."""
        return f"{self.document}/{self.figure.id}"

    @property
    def passed(self) -> bool:
        """Whether the computed verdict is the recorded one and nothing was missed on the way."""
        return self.verdict == self.figure.verdict and all(a.met for a in self.matches)

    @property
    def message(self) -> str:
        """What went wrong, first things first; empty if nothing did."""
        missed = [f"{a.way}: {a.message}" for a in self.matches if not a.met]
        if self.verdict != self.figure.verdict:
            missed.insert(0, f"recorded as {self.figure.verdict}, found to be {self.verdict}")
        return "; ".join(missed)


def judge(fixture: WorkedFixture, only: Collection[str] | None = None) -> Iterator[Judgement]:
    """Judge every figure of a document, or those whose ids are given, in the order of the page."""
    for figure in fixture.figures:
        if only is None or figure.id in only:
            with precision():
                judgement = _judge(fixture, figure)
            yield judgement


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What a figure's quantity is computed from, in one of the ways.

    Attributes:
        figure: the figure.
        call: its call, or None if it depends on its input alone.
        source: its input.
        way: ``PRINTED_INPUTS``, ``PRINTED_COSINES`` or ``EXACT_INPUTS``.
        matrix: the printed cosines for that way, otherwise None.
    """

    figure: Figure
    call: Call | None
    source: Input
    way: str = EXACT_INPUTS
    matrix: list[list[arb]] | None = None

    @property
    def quantity(self) -> Any:
        """What the figure shows: a scalar or nested sequences."""
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
        """The rows, each over its norm."""
        return [[x / similarity.dot(row, row).sqrt() for x in row] for row in self.rows.tolist()]

    @cached_property
    def case(self) -> Case:
        """The case of the call; its embeddings are 0 where they are unknown."""
        if self.call is None:
            raise ValueError(f"{self.figure.id}: {self.figure.quantity} needs a call")
        return case_of(self.figure.id, self.call, self.source)

    @cached_property
    def result(self) -> reference.Result:
        """The reference's loss and terms, from the input or from the matrix of cosines."""
        if self.matrix is not None:
            return reference_of_similarities(self.case, self.matrix)
        return call_reference(self.case, {self.case.first: self.rows})

    @property
    def terms(self) -> reference.Terms:
        """The reference's terms."""
        return self.result.terms

    @cached_property
    def cosines(self) -> Any:
        """The similarities [N, N]."""
        if self.call is not None:
            return self.terms.similarity
        return self.matrix or similarity.similarity_matrix(self.rows.tolist(), "cosine")

    @property
    def logits(self) -> Any:
        """The similarities over the temperature; without a call the similarities."""
        return self.cosines if self.call is None else self.terms.logits

    @cached_property
    def positive_pairs(self) -> list[tuple[int, int]]:
        """Every anchor with each of its positives."""
        return [(i, p) for i, positives in enumerate(self.terms.positives) for p in positives]


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
        matches = [_compare(way.way, figure, way.quantity) for way in _ways(fixture, figure)]
        if figure.quantity == "loss" and source.exact is not None:
            value = float(known.quantity)
        if figure.length and known.call:
            own, verdict, finding = _own_arithmetic(known)
            # The exact value is not expected of an artefact, only its explanation.
            matches = own if verdict == "artefact" else [*matches, *own]
    if not all(match.met for match in matches):
        verdict = "artefact"
    return Judgement(fixture.document.id, figure, verdict, tuple(matches), value, finding)


def _ways(fixture: WorkedFixture, figure: Figure) -> Iterator[Evaluation]:
    """The evaluations of a figure that the document allows."""
    call, source = fixture.call_of(figure), fixture.input_of(figure)
    if source.decimals is not None:
        yield Evaluation(figure, call, source, PRINTED_INPUTS)
    matrix = _precise_cosines(fixture, figure, source)
    if matrix is not None:
        yield Evaluation(figure, call, source, PRINTED_COSINES, matrix)
    if source.exact is not None and not figure.length:
        yield Evaluation(figure, call, source)


def _precise_cosines(fixture: WorkedFixture, figure: Figure, source: Input) -> list[list[arb]] | None:
    """The cosine matrix that the document prints for this input, if to more digits than the input; not for itself."""
    if figure.quantity in ("similarity", "normalised", "normalised_features") or source.decimals is None:
        return None
    for other in fixture.figures:
        printed = other.quantity == "similarity" and not other.cut and fixture.input_of(other) is source
        decimals = other.decimals or 0
        if printed and decimals > source.decimals:
            entries, n = dict(other.entries()), range(source.shape[0])
            return [[arb(1) if i == j else ball(str(entries[i, j]), decimals) for j in n] for i in n]
    return None


def _compare(way: str, figure: Figure, quantity: Any) -> Match:
    """Whether every printed entry is what is computed for it, up to the first that is not."""
    entries = 0
    for entries, (index, entry) in enumerate(figure.entries(), 1):
        on_diagonal = len(index) == 2 and index[0] == index[1]
        difference = _difference(figure, on_diagonal, entry, reduce(getitem, index, quantity))
        if difference:
            message = f"{figure.quantity}{place(index)} is printed {entry}{difference}"
            return Match(way, False, message, entries)
    return Match(way, True, "", entries)


def _difference(figure: Figure, on_diagonal: bool, entry: str | bool, value: Any) -> str:
    """How a printed entry differs from the computed one: the end of a sentence, or "" where it does not.

    A number's rounding interval must meet the enclosure computed for it; masks, indices and rearrangements are exact.
    """
    if figure.kind != "number":
        found = float(entry) if figure.kind != "layout" and isinstance(entry, str) else entry
        return "" if found == value else f", not {value}"
    if entry in INFINITE:
        return "" if on_diagonal and figure.diagonal == entry else ", which belongs on a diagonal alone"
    if on_diagonal and figure.diagonal in INFINITE and figure.quantity == "similarity":
        return f" where {figure.diagonal} belongs"
    computed = arb(value)
    if computed.overlaps(_printed(str(entry), figure.decimals)):
        return ""
    distance = float(abs(computed.mid() - exact(str(entry)))) * 10.0 ** (figure.decimals or 0)
    away = f", {distance:.2f} units of the last printed place away" if figure.decimals is not None else ""
    return f" but computed {_show(computed)}{away}"


def _printed(text: str, decimals: int | None) -> arb:
    return exact(text) if decimals is None else ball(text, decimals)


def _show(value: arb) -> str:
    return str(value.str(17)) if value.is_finite() else "something unbounded"


def _own_arithmetic(known: Evaluation) -> tuple[list[Match], str, str]:
    """A figure printed in full against the arithmetic it was printed by.

    It must be a number of its format, printed as that number prints, and lie in the interval that the document's own
    operations allow. If that interval is unbounded the arithmetic proves nothing (a sigmoid rounded to 1, whose
    complement's logarithm is clamped): the figure is an artefact, and its explanation is checked instead.
    """
    figure, case, proper = known.figure, known.case, known.quantity
    text, true = str(figure.printed), proper.str(12, radius=False)
    number = np.dtype(figure.length).type(text)
    spelled = repr(float(number))
    message = f"{text} is not a {figure.length} printed in full; the nearest is {spelled}"
    matches = [Match("printed in full", spelled == text, message)]
    allowed = own_loss(case, figure.arithmetic, slack=1)
    if not allowed.is_bounded:
        clamped = own_loss(case, figure.arithmetic, slack=1, clamp=True)
        here = _run_here(figure, case, clamped)
        matches += [_inside("clamped arithmetic", text, clamped, "its operations with the clamp"), here]
        matches.append(_instead(figure, proper))
        matches.append(Match("differs", not proper.overlaps(exact(text)), f"{text} is the exact value after all"))
        because = figure.instead["because"] if figure.instead else ""
        return matches, "artefact", f"exactly {true}; {because} ({here.message})"
    matches.append(_inside("own arithmetic", text, allowed, "its own operations"))
    rounded = own_loss(case, figure.arithmetic, slack=0).lower
    ulp = float(np.spacing(number))
    away, replay = float(abs(proper - exact(text)).mid()) / ulp, abs(rounded - float(text)) / ulp
    digits = "the same digits" if replay == 0 else f"a value {replay:.0f} ulp away"
    finding = f"{away:.2g} ulp from the exact {true}; its own operations, correctly rounded, print {digits}"
    if figure.length == "float64":
        # In float64 the same operations, correctly rounded, end in the very digits that were printed.
        message = f"{text} is printed, {rounded!r} is what the same operations give, {replay:.0f} ulp away"
        matches.append(Match("same operations", replay == 0, message))
    if figure.arithmetic == "float32":
        matches.append(_run_here(figure, case, allowed))
        finding += f"; {matches[-1].message}"
    return matches, "reproduced", finding


def _inside(way: str, text: str, interval: Rounded, operations: str) -> Match:
    """Whether a printed number lies in the interval that operations allow."""
    message = f"{text} lies outside [{interval.lower!r}, {interval.upper!r}], which {operations} allow"
    return Match(way, float(text) in interval and interval.is_bounded, message)


def _run_here(figure: Figure, case: Case, allowed: Rounded) -> Match:
    """The document's own function in float32 on this machine: the same digits, or at least within its own rounding."""
    found = float(pair_notebook(case, torch.tensor(case.embeddings, dtype=torch.float32)))
    same = repr(found) == figure.printed
    message = f"run in float32 here, {'the same digits' if same else repr(found)}"
    return Match("run in float32", same or found in allowed, message)


def _instead(figure: Figure, proper: arb) -> Match:
    """The value that the fixture gives in an artefact's stead, against the enclosure of the true one."""
    if figure.instead is None:
        return Match("what it is instead", False, "the fixture does not say what the figure is instead")
    text = figure.instead["value"]
    met = bool(proper.overlaps(ball(text, len(text.partition(".")[2]))))
    return Match("what it is instead", met, f"recorded as {text}, computed {_show(proper)}")


def _constant(figure: Figure, case: Case) -> tuple[list[Match], str]:
    """The batch tutorial's 0.5545, whose input is not published, and need not be.

    Where every off-diagonal logit lies at least ``gap`` below its row's maximum, each exponential of the reference's
    loops is epsilon plus something in [0, e^-gap]. The loss is then the same for every such input; its derivative has
    the factor e^-gap / epsilon.
    """
    gap = 100
    below = arb(-(10**9)).union(arb(-gap))
    logits = [[arb(0) if i == j else below for j in range(case.n)] for i in range(case.n)]
    loss = evaluate_similarities(case.entry.formula, logits, case.positive_mask(), temperature=1.0).loss
    matches = [_compare("any input", figure, loss), _instead(figure, loss * (1 + arb(supcon.EPSILON)))]
    finding = f"2 ln 4 / 5 for every input whose off-diagonal logits lie {gap} below the row's maximum;"
    slope = math.exp(-gap) / supcon.EPSILON
    return matches, f"{finding} no logit moves it by more than {slope:.0e} of itself, so nothing can be learnt from it"
