"""Cases: one evaluation of one loss, with exact inputs; from the worked examples and from ``fixtures/options``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pairproof import reference
from pairproof.reference import batch as layouts
from pairproof.reference import nt_bxent, nt_xent, supcon

from .catalogue import LOSSES
from .fixtures import Call, Figure, Input, WorkedFixture

SIGNIFICAND = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
"""Bits of significand of each dtype, the hidden one counted."""


@dataclass(frozen=True, eq=False)
class Case:
    """One evaluation of one loss.

    Attributes:
        id: stable name, "document/call" or "options/name".
        loss: short name in the catalogue.
        embeddings: [N, D] float64, the exact inputs.
        arguments: labels, partners, positive_pairs or positives.
        keywords: the options that are not at their default.
        figures: the losses that a document prints for this very evaluation.
        why: what the case is for.
    """

    id: str
    loss: str
    embeddings: npt.NDArray[np.float64]
    arguments: Mapping[str, Any]
    keywords: Mapping[str, Any]
    figures: tuple[Figure, ...] = field(default=())
    why: str = ""

    @property
    def n(self) -> int:
        """Number of rows."""
        return len(self.embeddings)

    def option(self, name: str) -> Any:
        """The value of a keyword: the case's, or the catalogue's default."""
        return self.keywords.get(name, LOSSES[self.loss].keywords.get(name))

    def holds_in(self, dtype: str) -> bool:
        """Whether every input is a number of this dtype, so that nothing but the implementation's error is measured."""
        bits = SIGNIFICAND[dtype]
        smallest = {"float16": -14, "bfloat16": -126, "float32": -126, "float64": -1022}[dtype]
        largest = {"float16": 15, "bfloat16": 127, "float32": 127, "float64": 1023}[dtype]
        for x in self.embeddings.ravel():
            if x == 0:
                continue
            fraction, exponent = math.frexp(x)
            if fraction * 2**bits % 1 or not smallest <= exponent - 1 <= largest:
                return False
        return True

    def positives(self) -> list[list[int]]:
        """P(i) of every row."""
        mask = self.positive_mask()
        return [[j for j in range(self.n) if j != i and mask[i][j]] for i in range(self.n)]

    def positive_mask(self) -> list[list[bool]]:
        """The mask [N][N] of positives, whichever way the case gives them."""
        if "labels" in self.arguments:
            labels = self.arguments["labels"]
            return [[a == b for b in labels] for a in labels]
        if "positives" in self.arguments:
            return [[bool(x) for x in row] for row in self.arguments["positives"]]
        if "partners" in self.arguments:
            return [[j == p for j in range(self.n)] for p in self.arguments["partners"]]
        pairs = {tuple(pair) for pair in self.arguments["positive_pairs"]}
        return [[(i, j) in pairs for j in range(self.n)] for i in range(self.n)]

    def anchors(self) -> list[int]:
        """The rows that are anchors."""
        chosen = self.option("anchors")
        return [i for i in range(self.n) if chosen is None or chosen[i]]

    def counted(self) -> list[int]:
        """The anchors that reduction "none" returns: all of them, but the lonely ones where they are dropped."""
        positives = self.positives()
        return [i for i in self.anchors() if positives[i] or self.option("no_positive") != "drop"]


def call_reference(case: Case, rows: npt.ArrayLike | None = None, **changed: Any) -> reference.Result:
    """The reference's loss and terms for a case, on its embeddings or on other scalars in their place."""
    function = getattr(reference, LOSSES[case.loss].function)
    given = {**case.arguments, **case.keywords, **changed}
    given = {
        k: np.array(v, dtype=bool) if k in ("positives", "anchors") and v is not None else v for k, v in given.items()
    }
    if "positive_pairs" in given:
        given["positive_pairs"] = np.array(given["positive_pairs"], dtype=np.int64).reshape(-1, 2)
    result: reference.Result = function(case.embeddings if rows is None else rows, **given)
    return result


def reference_of_similarities(case: Case, matrix: Sequence[Sequence[Any]]) -> reference.Result:
    """The reference's loss and terms for a case whose similarities [N][N] are given."""
    laid = layouts.lay_out(
        [list(row) for row in matrix],
        case.positive_mask(),
        anchors=case.anchors(),
        temperature=float(case.option("temperature")),
        base_temperature=case.option("base_temperature"),
    )
    if case.loss in ("supcon", "supcon_in"):
        supcon.sum_anchors(
            laid,
            denominator=case.option("denominator"),
            no_negative=case.option("no_negative"),
            inside=case.loss == "supcon_in",
        )
    elif case.loss == "supcon_epsilon":
        supcon.epsilon_anchors(laid)
    elif case.loss == "nt_xent":
        nt_xent.nt_xent_anchors(laid)
    elif case.loss == "nt_xent_pairwise":
        nt_xent.nt_xent_pairwise_anchors(laid)
    else:
        nt_bxent.nt_bxent_anchors(laid, no_negative=case.option("no_negative"))
    return laid.finish(case.option("reduction"), case.option("no_positive") or "zero")


def worked_cases(fixture: WorkedFixture) -> list[Case]:
    """One case per call of a document whose inputs are known exactly."""
    cases = []
    for call in fixture.calls.values():
        source = fixture.inputs[call.input]
        if source.exact is None:
            continue
        figures = tuple(f for f in fixture.figures if f.call == call.id and f.quantity == "loss")
        cases.append(_case(f"{fixture.document.id}/{call.id}", call, source, figures))
    return cases


def case_of(call: Call, source: Input) -> Case:
    """The case of one call, for whoever wants its loss and terms."""
    return _case(call.id, call, source, ())


def _case(identity: str, call: Call, source: Input, figures: tuple[Figure, ...]) -> Case:
    keywords = {key: float(v) if key.endswith("temperature") else v for key, v in call.keywords.items()}
    exact = source.exact if source.exact is not None else [["0"] * source.shape[1]] * source.shape[0]
    embeddings = np.array([[float(x) for x in row] for row in exact])
    return Case(identity, call.loss, embeddings, call.arguments, keywords, figures, why="a worked example")
