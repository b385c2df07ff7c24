"""Choose a small subset of cases that together have every trait of the whole set.

The subset is for slow implementations, such as Triton's interpreter. The choice is greedy, because finding the smallest
subset is NP-hard (set cover).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Mapping

import torch

from pairproof.fast.engine.spec import UNSHIFTED

from .cases import SIGNIFICAND, Case
from .catalogue import LOSSES
from .golden import TARGETS, GoldenCase

SIZES = (1, 2, 3, 16, 32, 64, 128)
"""Numbers of rows at which behaviour changes: no pair, one pair, three rows, then the tile sizes of the kernels."""


def covering(
    cases: Mapping[Case, GoldenCase | None],
    traits_of_case: Callable[[Case, GoldenCase | None], set[Hashable]] | None = None,
) -> list[Case]:
    """Choose cases that together have every trait of the given ones.

    Args:
        cases: the cases to choose from, each with its golden case, or None if it has none.
        traits_of_case: a function that returns the traits of a case; by default :func:`traits_of`.

    Returns:
        The chosen cases, in the order of ``cases``.
    """
    traits = {case: (traits_of_case or traits_of)(case, golden) for case, golden in cases.items()}
    missing: set[Hashable] = set().union(*traits.values())
    order = list(cases)
    # The heap yields the case with the most missing traits; among equals the smallest, then the first. The numbers in
    # the heap may be out of date, but are never too small: the missing traits of a case never grow.
    heap = [(-len(traits[case]), case.size, k) for k, case in enumerate(order)]
    heapq.heapify(heap)
    chosen: set[int] = set()
    while missing:
        number, size, k = heap[0]
        now = -len(traits[order[k]] & missing)
        if now != number:
            heapq.heapreplace(heap, (now, size, k))
            continue
        heapq.heappop(heap)
        chosen.add(k)
        missing -= traits[order[k]]
    return [case for k, case in enumerate(order) if k in chosen]


def traits_of(case: Case, golden: GoldenCase | None) -> set[Hashable]:
    """The traits of a case: flags, options, arguments, sizes, dtypes, and the kernels that evaluate it."""
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
    """The properties that select a kernel, such as the denominator, the kind of targets and the similarity."""
    cosine = case.option("similarity") == "cosine"
    largest = 1 / float(case.option("temperature")) + math.log(max(case.shape))
    moderate = cosine and largest <= UNSHIFTED[torch.float32]
    targets = next((name for name in TARGETS if name in case.arguments), "")
    some = case.option("anchors") is not None
    ids = "ignored_ids" in case.arguments
    return case.option("denominator"), targets, tuple(case.others), cosine, moderate, some, ids
