"""A small set of cases in which everything that any case shows is shown by some case.

For implementations that take long for each case: Triton's interpreter, a device behind a slow line. Choosing the least
such set is hard; taking again and again the case that adds most is nearly as good, and the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping

import torch

from pairproof.fast.engine.spec import UNSHIFTED

from .cases import SIGNIFICAND, Case
from .catalogue import LOSSES
from .golden import TARGETS, GoldenCase

SIZES = (1, 2, 3, 16, 32, 64, 128)
"""Numbers of rows at which something changes: no pair, one pair, one triple, then the tiles of the kernels."""


def covering(cases: Mapping[Case, GoldenCase | None]) -> list[Case]:
    """Choose cases, in their own order, that together have every trait which any of them has.

    Args:
        cases: to choose from, with their golden entries where they have them.
    """
    traits = {case: traits_of(case, golden) for case, golden in cases.items()}
    missing: set[Hashable] = set().union(*traits.values())
    chosen: set[Case] = set()
    while missing:
        # The most of what is missing, then the smallest, then the first.
        best = max(traits, key=lambda case: (len(traits[case] & missing), -case.size))
        chosen.add(best)
        missing -= traits[best]
    return [case for case in cases if case in chosen]


def traits_of(case: Case, golden: GoldenCase | None) -> set[Hashable]:
    """What a case shows, each with its loss: flags, values of options, sizes, dtypes, and the kernels that it takes."""
    loss = case.loss
    found: set[Hashable] = {(loss, "flag", flag) for flag in (golden.flags if golden else ())}
    found |= {(loss, option, case.option(option)) for option in LOSSES[loss].choices}
    given = (option for option, value in case.keywords.items() if value is not None)
    found |= {(loss, "given", name) for name in (*given, *case.arguments, *case.others)}
    found |= {(loss, "dtype", dtype) for dtype in SIGNIFICAND if case.holds_in(dtype)}
    rows, columns = case.shape
    found |= {("rows", sum(side > size for size in SIZES)) for side in (rows, columns)}
    return found | {("more columns", columns > rows), (loss, "kernels", *_kernels(case))}


def _kernels(case: Case) -> tuple[Hashable, ...]:
    """What decides which kernels a case takes: its formula, targets, references and anchors, and how steep it is."""
    cosine = case.option("similarity") == "cosine"
    largest = 1 / float(case.option("temperature")) + math.log(max(case.shape))
    moderate = cosine and largest <= UNSHIFTED[torch.float32]
    targets = next((name for name in TARGETS if name in case.arguments), "")
    some = case.option("anchors") is not None
    return case.option("denominator"), targets, tuple(case.others), cosine, moderate, some
