"""Properties: relations that hold between the results of a loss on related batches.

A property needs no expected values, so it applies to any implementation and any batch. It tests a *subject* (an
implementation in one dtype) on a *case* (a batch with its options). It derives related cases, and reports a violation
if the results break the relation. Hypothesis draws the batches:

    subject = Subject.of(Fast({}, "cpu"), "float32")
    for prop in PROPERTIES:
        for loss in prop.losses:
            found = hunt(prop, loss, [subject])          # found.violation, found.tested

Cases are skipped if the subject does not support them, or if its dtype cannot represent their inputs exactly. To
restrict what is drawn, pass ``options={"reduction": "mean", "anchors": None}`` to ``hunt``.

*Results* are one table: the loss, the value of every anchor and the gradient of every row, each with the bound of its
error. A relation maps the tables of related cases to the same rows, and ``_agree`` compares their common entries.

*Tolerances.* A correct result is within its bound of the truth (``tolerances.bounds``), and the true results satisfy
the relation exactly. So two results may differ by the sum of their bounds. A factor in a relation also multiplies the
bound. A sum of n values adds n - 1 rounding errors. If a relation holds only in a limit, as in ``_hot``, its function
derives the tolerance.

Gradients are not compared if the loss is NaN or has a kink (``kinks.maximum_is_tied``).
"""

from __future__ import annotations

import itertools
import json
import math
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from pairproof import install_command
from pairproof.reference import stacked_partners

from ..suite.cases import Case
from ..suite.catalogue import CHOICES, COMMON, IGNORED, LOSSES, Loss
from ..suite.records import Matrix, Outcome, Truth
from ..truth.baseline import anchor_values
from ..truth.evaluate import truth
from ..truth.kinks import maximum_is_tied
from ..truth.tolerances import bounds
from .proofs import digest_of
from .shrink import with_rows

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from ..implementations import Implementation

Results = dict[tuple[str, int], tuple[Any, float]]
"""A subject's results on a case, each with the bound of its error.

- ("loss", 0): missing for the reductions "none" and "none_pairs"
- ("anchor", i): the value of an anchor
- ("pair", k): a value of "none_pairs"
- ("gradient", k): the gradient [D] of row k of ``_rows``
"""

Claim = Callable[[Loss], bool]
Relation = Callable[["Subject", Case], None]

HOT = 2.0**30
"""A temperature at which every logit is close to 0."""

ROUNDING = 2.0**-53
"""Unit roundoff of float64, in which relations are computed."""

NUMBERS_DRAWN = {"bias": (-10.0, 0.0, -2.5, 1.0), "tau_plus": (0.1, 0.0, 0.3), "beta": (1.0, 0.0, 0.5, 2.0)}
NUMBERS_DRAWN |= {"sigma": (0.5, 0.25, 1.0, 4.0), "hardness_strength": (0.0, 1.0, 5.0)}
"""The values that are drawn for numeric options."""

KINDS = ("any", "labelled", "views", "paired")


def _within(loss: Loss) -> bool:
    """Return whether anchors and columns are rows of the same batch. If not, there are no views and no ``anchors``."""
    return not loss.two_towers


def _chooses_anchors(loss: Loss) -> bool:
    return "anchors" in loss.keywords


def _labelled(loss: Loss) -> bool:
    """Return whether the loss takes labels, or a mask of positives in place of them."""
    return loss.positives_by == "labels" and "positives" in loss.keywords


def _ordered(loss: Loss) -> bool:
    """Return whether the loss is an upper bound of related losses, anchor by anchor."""
    return _labelled(loss) and loss.form == "mean" and "denominator" in loss.keywords


def _leaves_out(loss: Loss) -> bool:
    """Return whether the loss can ignore pairs."""
    return "ignored_ids" in loss.keywords


def _weights_pairs(loss: Loss) -> bool:
    return "positive_weights" in loss.keywords


def _weights_anchors(loss: Loss) -> bool:
    return {"anchor_weights", "anchors"} <= {*loss.keywords}


def _coincides(loss: Loss) -> bool:
    """Return whether the loss is a plain cross-entropy if every anchor has one positive."""
    plain = loss.form in ("mean", "inside") and not loss.epsilon
    return plain and _within(loss) and loss.variant.get("denominator", "all") != "only_negatives"


def _takes_zero_rows(loss: Loss) -> bool:
    return "zero_row" in loss.keywords


class Refused(Exception):
    """The subject does not support a case that the property needs. The message is the reason."""


class _Broken(Exception):
    """The relation does not hold. The message names the first result that breaks it."""


@dataclass(frozen=True)
class Subject:
    """An implementation to test, in one dtype.

    Attributes:
        evaluate: returns the loss of a case and, if available, the anchors' values and the gradient.
        dtype: the dtype of the inputs.
        refuses: returns the reason why the implementation does not support a case, or None.
        name: its name in messages.
    """

    evaluate: Callable[[Case], Outcome]
    dtype: str = "float64"
    refuses: Callable[[Case], str | None] = lambda case: None
    name: str = "the implementation"

    @classmethod
    def of(cls, implementation: Implementation, dtype: str) -> Subject:
        """Return the subject for an implementation in one of its dtypes."""
        name = f"{implementation.name} in {dtype}"
        return cls(lambda case: implementation.evaluate(case, dtype), dtype, implementation.refuses, name)


@dataclass(frozen=True)
class Property:
    """A relation that results must satisfy.

    Attributes:
        name: short name.
        claimed: returns whether the relation holds for a loss of the catalogue.
        kind: the batches that ``batches`` draws. "any"; "labelled": labels give the positives; "views": two stacked
            views of every item; "paired": every label occurs twice.
        fixed: the values of options that the relation requires.
        relate: raises an error if the relation does not hold. Its docstring states the relation.
    """

    name: str
    claimed: Claim
    kind: str
    fixed: Mapping[str, Any]
    relate: Relation = field(repr=False)

    @property
    def losses(self) -> tuple[str, ...]:
        """The names of the losses for which the relation holds."""
        return tuple(name for name, loss in LOSSES.items() if self.claimed(loss))

    def applies(self, case: Case) -> bool:
        """Return whether the relation must hold for a case."""
        as_fixed = all(case.option(name) == value for name, value in self.fixed.items() if name in case.entry.keywords)
        return self.claimed(case.entry) and _is_of_kind(case, self.kind) and as_fixed

    def violation(self, subject: Subject, case: Case) -> str | None:
        """Describe how the subject's results break the relation; None if they do not.

        Args:
            subject: what is tested.
            case: a case to which the property applies.

        Raises:
            Refused: the subject does not support the case or a related case.
            ValueError: the property does not apply to the case.
        """
        if not self.applies(case):
            raise ValueError(f"the property {self.name!r} does not apply to the case {case.id}")
        try:
            self.relate(subject, case)
        except _Broken as broken:
            return f"{subject.name}, {case.loss}: {self.name}: {broken}\nthe case: {_as_input(case)}"
        return None


@dataclass(frozen=True)
class Hunt:
    """The result of ``hunt``: the first violation or None, and the number of batches that each subject supported."""

    violation: str | None
    tested: Mapping[str, int]


def hunt(
    prop: Property,
    loss: str,
    subjects: Sequence[Subject],
    *,
    options: Mapping[str, Any] = MappingProxyType({}),
    examples: int = 50,
    simplify: bool = True,
) -> Hunt:
    """Draw batches, the same ones in every run, and test every subject on each of them.

    Args:
        prop: the property.
        loss: one of its losses.
        subjects: what is tested.
        options: fixed values of keywords, for subjects that support no other values. Keywords that the property
            fixes or that the loss lacks are ignored.
        examples: number of batches.
        simplify: whether to look for the simplest batch with a violation, which takes seconds.

    Raises:
        ImportError: hypothesis is not installed.
    """
    hypothesis = _hypothesis()
    asked = {subject.name: 0 for subject in subjects}

    # Hypothesis derives its seed from the source of this function. Renaming anything in it changes the batches.
    def ask(case: Case) -> None:
        for subject in subjects:
            try:
                violation = prop.violation(subject, case)
            except Refused:
                continue
            asked[subject.name] += 1
            if violation is not None:
                raise _Broken(violation)

    settings = hypothesis.settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        report_multiple_bugs=False,
        phases=[hypothesis.Phase.generate] + [hypothesis.Phase.shrink] * simplify,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    try:
        settings(hypothesis.given(batches(loss, prop.kind, {**options, **prop.fixed}))(ask))()
    except _Broken as broken:
        return Hunt(str(broken), asked)
    except hypothesis.errors.Flaky:
        noisy = f"{', '.join(asked)}, {loss}: {prop.name}: a violation was not repeated: not deterministic"
        return Hunt(noisy, asked)
    return Hunt(None, asked)


def batches(loss: str, kind: str = "any", fixed: Mapping[str, Any] = MappingProxyType({})) -> SearchStrategy[Case]:
    """Return a Hypothesis strategy that draws cases with every option of a loss.

    The entries of a row are integers from -15 to 15, times a power of two. With "dot", all rows have the same power.
    The inputs, also those that properties derive, are exactly representable in every dtype.

    Args:
        loss: short name in the catalogue.
        kind: the kind of batch; see ``Property``.
        fixed: values of options that are not drawn.

    Raises:
        ImportError: hypothesis is not installed.
        ValueError: the kind is unknown.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    st = _hypothesis().strategies
    entry = LOSSES[loss]

    def drawn(draw: Callable[[Any], Any]) -> Case:
        def several(strategy: Any, number: int) -> Any:
            return st.lists(strategy, min_size=number, max_size=number)

        even = entry.positives_by == "partners" or kind in ("views", "paired")
        n = 2 * draw(st.integers(1, 3)) if even else draw(st.integers(*((1, 4) if entry.two_towers else (2, 6))))
        more = {"embeddings_b": n} if entry.two_towers else {}
        if "negatives" in entry.keywords and draw(st.booleans()):
            more["negatives"] = draw(st.integers(1, 3))
        if "hard_negatives" in entry.keywords and draw(st.booleans()):
            more["hard_negatives"] = n * draw(st.integers(1, 2))
        total = n + sum(more.values())
        dim = draw(st.integers(1, 3))
        # These matter only with weights of pairs or rows of zeros, which properties add.
        left_out = ("weights_divisor", "zero_row")
        choices = {name: values for name, values in entry.choices.items() if name not in left_out}
        keywords = {name: draw(st.sampled_from(values)) for name, values in choices.items()}
        cosine = fixed.get("similarity", keywords["similarity"]) == "cosine"
        temperatures = (0.5, 0.07, 0.1, 1.0, 2.0) if cosine else (1.0, 0.5, 10.0, 64.0)
        keywords["temperature"] = draw(st.sampled_from(temperatures))
        keywords["base_temperature"] = draw(st.sampled_from((None, 0.07, 0.5)))
        for name, values in NUMBERS_DRAWN.items():
            if name in entry.keywords:
                keywords[name] = draw(st.sampled_from(values))
        if "anchors" in entry.keywords:
            keywords["anchors"] = draw(st.none() | several(st.booleans(), n))
        keywords |= {name: value for name, value in fixed.items() if name in entry.keywords}
        keywords = {name: value for name, value in entry.fitting({**keywords, **more}).items() if name not in more}

        rows = np.array(draw(several(st.integers(-15, 15), total * dim)), dtype=np.float64).reshape(total, dim)
        if cosine:
            rows[~rows.any(axis=1), 0] = 1.0
        sizes = draw(several(st.integers(-6, 6), total)) if cosine else [draw(st.integers(-4, -2))]
        first, *others = np.split(np.ldexp(rows, np.array(sizes)[:, None]), np.cumsum([n, *more.values()])[:-1])
        arguments = {entry.targets: _targets(draw, st, entry.targets, kind, n)} if entry.targets else {}
        if "partners" in entry.keywords and "negatives" not in more and draw(st.booleans()):
            way = draw(st.sampled_from(("partners", "labels", "positives")))
            pairs = several(several(st.booleans(), n), n) if way == "positives" else several(st.integers(0, n - 1), n)
            arguments = {way: draw(pairs)}
        both = "direction_weights" in entry.keywords and keywords["direction"] == "both"
        keywords |= {"direction_weights": draw(st.sampled_from((None, [0.75, 0.25], [0.0, 2.0])))} if both else {}
        if kind == "any" and _labelled(entry) and draw(st.booleans()):
            arguments = {"positives": draw(several(several(st.booleans(), n), n))}
        changed = {name: value for name, value in keywords.items() if value != entry.default(name, more)}
        return Case(f"drawn/{loss}", loss, first, arguments, changed, others=dict(zip(more, others, strict=True)))

    strategy: SearchStrategy[Case] = st.composite(drawn)()
    return strategy


def _targets(draw: Callable[[Any], Any], st: Any, name: str, kind: str, n: int) -> Any:
    if name == "positive_pairs" and kind == "any":
        return draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=2 * n))
    if name == "partners":
        rows = draw(st.permutations(range(n)))
        return stacked_partners(n).tolist() if kind == "views" else [rows[rows.index(i) ^ 1] for i in range(n)]
    if kind == "paired":
        labels = draw(st.permutations([k // 2 for k in range(n)]))
    else:
        items = n // 2 if kind == "views" else n
        labels = draw(st.lists(st.integers(0, 2), min_size=items, max_size=items)) * (n // items)
    pairs = itertools.permutations(range(n), 2)
    return labels if name == "labels" else [(i, j) for i, j in pairs if labels[i] == labels[j]]


def _hypothesis() -> Any:
    try:
        import hypothesis
    except ImportError as error:
        raise ImportError(f"batches are drawn with hypothesis ({error}): {install_command('verify')}") from None
    return hypothesis


def _is_of_kind(case: Case, kind: str) -> bool:
    if kind == "labelled":
        return "labels" in case.arguments
    if kind == "paired":
        return case.arguments.keys() <= {"labels", "partners"} and all(len(row) == 1 for row in case.positives())
    if kind == "views":
        half, mask = case.n // 2, np.array(case.positive_mask()) | np.eye(case.n, dtype=bool)
        return case.n % 2 == 0 and bool(mask[0, half]) and np.array_equal(mask, np.roll(mask, half, axis=(0, 1)))
    return True


def _as_input(case: Case) -> str:
    """Return the inputs of a case in the form of a golden file."""
    given = {name: np.asarray(value).tolist() for name, value in {**case.arguments, **case.others}.items()}
    return json.dumps({"embeddings": case.embeddings.tolist(), "arguments": given, "keywords": dict(case.keywords)})


@dataclass(frozen=True)
class _Inputs:
    """The inputs of a case: cases with the same digest have the same results."""

    digest: str
    case: Case = field(compare=False)


@lru_cache(maxsize=256)
def _proved(inputs: _Inputs) -> tuple[Case, Truth]:
    """Return the first case with these inputs, which keeps its rounding errors, and its true results."""
    return inputs.case, truth(inputs.case)


def _ask(subject: Subject, case: Case, **changed: Any) -> Results:
    case = _with(case, **changed)
    inexact = "" if case.holds_in(subject.dtype) else f"inputs are not exactly representable in {subject.dtype}"
    if reason := subject.refuses(case) or inexact:
        raise Refused(reason)
    try:
        outcome = subject.evaluate(case)
    except Exception as error:  # an error in external code is a violation
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        raise _Broken(f"{message} ({case.loss}, {dict(case.keywords)})") from error
    same, true = _proved(_Inputs(digest_of(case), case))
    if len(outcome.values) != len(true.values):
        raise _Broken(f"expected {len(true.values)} values for {dict(case.keywords)}, got {len(outcome.values)}")
    allowed = bounds(same, true, subject.dtype)
    found: Results = {}
    if case.option("reduction") == "none_pairs":
        found |= {("pair", k): pair for k, pair in enumerate(zip(outcome.values, allowed.values, strict=True))}
        anchors = outcome.anchors or {}
    elif case.option("reduction") == "none":
        anchors = dict(zip(case.counted(), outcome.values, strict=True))
    else:
        found["loss", 0], anchors = (outcome.values[0], allowed.values[0]), outcome.anchors or {}
    found |= {("anchor", i): (value, allowed.anchors[i]) for i, value in anchors.items()}
    if outcome.gradient is not None and true.gradient is not None and not maximum_is_tied(case):
        gradients = allowed.gradients(outcome)
        rows, limits = (np.concatenate([each[name] for name in case.matrices]) for each in (gradients, allowed.rows))
        found |= {("gradient", k): row for k, row in enumerate(zip(rows, limits, strict=True))}
    return found


def _agree(first: Results, second: Results) -> None:
    """Compare the entries that both tables have."""
    for what, k in filter(second.__contains__, first):
        (x, tolerance), (y, more) = first[what, k], second[what, k]
        _near("loss" if what == "loss" else f"{what} {k}", x, y, tolerance + more)


def _near(what: str, first: Any, second: Any, tolerance: float) -> None:
    """Compare two floats or two vectors. Floats may both be NaN or infinite."""
    if np.ndim(first) == 0 and np.array_equal(first, second, equal_nan=True):
        return
    error = math.dist(np.atleast_1d(first), np.atleast_1d(second))
    if not error <= tolerance:
        times = f"{error / tolerance if tolerance else math.inf:.3g} times the tolerance {tolerance:.3g}"
        found = f"{np.asarray(first).tolist()!r} and {np.asarray(second).tolist()!r}"
        raise _Broken(f"{what}: {found} differ by {times}")


def _only(results: Results, *what: str) -> Results:
    return {key: part for key, part in results.items() if key[0] in what}


def _sum(first: Results, second: Results) -> Results:
    """Add the losses and the gradients that both tables have. Keep the values of all anchors."""
    either = _only(second | first, "anchor")
    both = {key: (*first[key], *second[key]) for key in first if key in second and key not in either}
    return either | {key: (x + y, tolerance + more) for key, (x, tolerance, y, more) in both.items()}


def _multiplied(results: Results, factor: float) -> Results:
    return {key: (factor * value, factor * tolerance) for key, (value, tolerance) in results.items()}


def _reduced(case: Case, each: Results) -> Results:
    """Add the loss: the anchors' values in ``each``, reduced as the case requires."""
    reduction, counted, positives = case.option("reduction"), case.counted(), case.positives()
    if case.separate:
        return each
    if reduction == "mean" and case.groups():
        parts = [[part / case.divisors()[i] for part in each["anchor", i]] for i in counted]
        values, tolerances = np.array(parts).reshape(-1, 2).sum(axis=0).tolist()
        return each | {("loss", 0): (values, tolerances)}
    summed = case.entry.form == "sigmoid"
    sizes = [len(positives[i]) if case.over_pairs and not summed else 1 for i in counted]
    divisor = max({"mean": len(counted), "mean_pairs": len(case.pairs())}.get(reduction, 1), 1)
    values, tolerances = np.array([each["anchor", i] for i in counted]).reshape(-1, 2).T
    tolerances = tolerances + ROUNDING * (len(counted) - 1) * np.abs(values)
    return each | {("loss", 0): (float(values @ sizes) / divisor, float(tolerances @ sizes) / divisor)}


def _rows(case: Case) -> Matrix:
    """Return the rows of all input matrices, concatenated."""
    return np.concatenate(list(case.matrices.values()))


def _with_rows(case: Case, rows: Matrix) -> Case:
    """Return the case with other rows, in the order of ``_rows``."""
    ends = np.cumsum([len(matrix) for matrix in case.matrices.values()])[:-1]
    return case.with_matrices(dict(zip(case.matrices, np.split(rows, ends), strict=True)))


def _with(case: Case, **changed: Any) -> Case:
    """Return the case with other keywords. Keywords that its loss lacks are ignored."""
    changed = {name: value for name, value in changed.items() if name in case.entry.keywords}
    return case.with_options(**changed) if changed else case


def _with_mask(case: Case, mask: npt.NDArray[np.bool_]) -> Case:
    """Return the case with its positives given by a mask, or by pairs if the loss takes pairs."""
    if case.entry.positives_by == "pairs":
        return replace(case, arguments={"positive_pairs": [(int(i), int(j)) for i, j in np.argwhere(mask)]})
    return replace(case, arguments={"positives": mask.tolist()})


def _reordered(case: Case, order: list[int]) -> Case:
    """Return the case whose row k is row ``order[k]`` of this case, for the rows of all matrices.

    For two towers, positives and ignored pairs become masks. If the towers are swapped, so are their weights.
    """
    if case.entry.two_towers:
        return _reordered_towers(case, order)
    place = np.argsort(order)
    take: dict[str, Callable[[Any], Any]] = {
        "labels": lambda labels: np.array(labels)[order],
        "partners": lambda partners: place[np.array(partners)[order]],
        "positives": lambda mask: np.array(mask)[np.ix_(order, order)],
        "positive_pairs": lambda pairs: place[np.array(pairs, dtype=int).reshape(-1, 2)],
        "ignored": lambda mask: np.array(mask)[np.ix_(order, order)],
        "ignored_ids": lambda ids: np.array(ids)[order],
    }
    arguments = {name: take[name](value).tolist() for name, value in case.arguments.items()}
    chosen = case.option("anchors")
    reordered = replace(_with_rows(case, _rows(case)[order]), arguments=arguments)
    return reordered if chosen is None else _with(reordered, anchors=[chosen[i] for i in order])


def _reordered_towers(case: Case, order: list[int]) -> Case:
    n, m = case.n, len(case.others["embeddings_b"])
    swapped = order[0] >= n
    one_way = case.with_options(direction="a_to_b")
    given: dict[str, Any] = {}
    for name, pairs in (("positives", one_way.positive_array()), ("ignored", one_way.ignored_array())):
        if not case.arguments or (name == "ignored" and IGNORED.keys().isdisjoint(case.arguments)):
            continue
        whole = np.zeros((n + m, n + m), dtype=bool)
        whole[:n, n:] = pairs[:, :m]
        given[name] = (whole | whole.T)[
            np.ix_(order[: m if swapped else n], order[m if swapped else n : n + m])
        ].tolist()
    ends = np.cumsum([m, n] if swapped else [n, m])
    first, second, queue = np.split(_rows(case)[order], ends)
    others = {name: second if name == "embeddings_b" else queue for name in case.others}
    weights = case.option("direction_weights")
    keywords = {**case.keywords, "direction_weights": weights[::-1]} if weights and swapped else case.keywords
    return replace(case, embeddings=first, others=others, arguments=given, keywords=keywords)


def _anchor_rows(case: Case) -> list[int]:
    """Return the row of every anchor among the rows of all matrices."""
    if not case.entry.two_towers:
        return [*range(case.n)]
    starts = {"embeddings_a": 0, "embeddings_b": case.n}
    lefts = dict.fromkeys(block.left for block in case.blocks())
    return [starts[left] + k for left in lefts for k in range(len(case.matrices[left]))]


def _ask_reordered(subject: Subject, case: Case, order: list[int], **changed: Any) -> Results:
    """Return the results on the reordered case with changed keywords, indexed by the original rows."""
    reordered = _with(_reordered(case, order), **changed)
    old = {row: i for i, row in enumerate(_anchor_rows(case))}
    place: dict[str, list[Any]] = {"loss": [0]}
    place |= {"anchor": [old.get(order[row]) for row in _anchor_rows(reordered)], "gradient": order}
    return {(what, place[what][k]): part for (what, k), part in _ask(subject, reordered).items()}


def _hold_mapped(subject: Subject, case: Case, maps: Sequence[Matrix]) -> None:
    """Compare the results on mapped rows with those on the case.

    Each map is a multiple of a rotation or reflection. With dot products, all rows have the same map.
    """
    moved = _with_rows(case, np.array([row @ turn for row, turn in zip(_rows(case), maps, strict=True)]))
    lengths = [math.hypot(*turn[0]) for turn in maps]
    if case.option("similarity") == "dot":
        moved = _with(moved, **{name: x * lengths[0] ** 2 for name, x in _temperatures(case).items()})
    found = _ask(subject, moved)
    for (what, k), (row, tolerance) in _only(found, "gradient").items():
        found[what, k] = (maps[k] @ row, lengths[k] * tolerance)
    _agree(_ask(subject, case), found)


def _temperatures(case: Case) -> dict[str, float]:
    given = {name: case.option(name) for name in ("temperature", "base_temperature")}
    return {name: float(x) for name, x in given.items() if x is not None}


def _of_equal_logits(case: Case, logit: float, slack: float) -> Results:
    """Return the loss and the anchors' values if all logits, also on the diagonal, are equal.

    The tolerance of an anchor's value x is slack * (1 + abs(x)).
    """
    equal = torch.full(case.shape, logit, dtype=torch.float64)
    values = anchor_values(case, equal + case.bias, equal * case.temperature).numpy() * case.anchor_weights()
    values[list(case.undefined())] = math.nan
    return _reduced(case, {("anchor", i): (values[i], slack * (1 + abs(values[i]))) for i in case.counted()})


def _of_other_losses(
    subject: Subject, case: Case, arguments: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[Loss, str, Results]]:
    """Yield each loss and denominator that the subject supports on the batch, with the results.

    ``arguments`` gives every loss the arguments for the same positives.
    """
    keywords = {name: case.option(name) for name in (*COMMON, *case.keywords)}
    over_anchors = {"sum_pairs": "sum", "none_pairs": "none"}.get(case.option("reduction"), "mean")
    for name, given in arguments.items():
        loss, other = LOSSES[name], _with(replace(case, loss=name, arguments=given, keywords={}), **keywords)
        if other.option("reduction") not in loss.choices["reduction"]:
            other = _with(other, reduction=over_anchors)
        for denominator in loss.choices.get("denominator", (loss.variant.get("denominator", "all"),)):
            with suppress(Refused):
                yield loss, denominator, _ask(subject, other, denominator=denominator)


def _chance(case: Case) -> random.Random:
    """Return a random generator seeded by the batch, so that a violation can be repeated."""
    return random.Random(zlib.crc32(case.embeddings.tobytes()))


_PROPERTIES: list[Property] = []


def _property(claimed: Claim = lambda loss: True, kind: str = "any", **fixed: Any) -> Callable[[Relation], Relation]:
    """Return a decorator that adds a relation to the properties. The property has the name of the function."""

    def enter(relate: Relation) -> Relation:
        name = relate.__name__.strip("_").replace("_", " ")
        _PROPERTIES.append(Property(name, claimed, kind, fixed, relate))
        return relate

    return enter


@_property()
def _permutation(subject: Subject, case: Case) -> None:
    """Permuting the rows permutes the anchors' values and the gradient. Mean and sum do not change."""
    chance = _chance(case)
    order = chance.sample(range(case.n), case.n)
    if case.entry.two_towers:
        n, m, total = case.n, len(case.others["embeddings_b"]), len(_rows(case))
        # If no positives are given, both towers have the same permutation, which keeps the pairs.
        each = len(case.others.get("hard_negatives", ())) // n  # they are permuted with their queries
        moved = [n + m + i * each + k for i in order for k in range(each)]
        order += chance.sample(range(n, n + m), m) if case.arguments else [n + i for i in order]
        order += moved or chance.sample(range(n + m, total), total - n - m)
    _agree(_ask(subject, case), _ask_reordered(subject, case, order))


@_property(_labelled, "labelled")
def _relabelling(subject: Subject, case: Case) -> None:
    """Only the equality of labels matters, and a mask of positives gives the same results."""
    found, labels = _ask(subject, case), case.arguments["labels"]
    names = _chance(case).sample((-(2**40), -1, 0, 1, 2, 8, 256, 65536, 2**40), 9)
    new = dict(zip(sorted(set(labels)), itertools.chain(names, itertools.count(10**6)), strict=False))
    _agree(found, _ask(subject, replace(case, arguments={"labels": [new[label] for label in labels]})))
    _agree(found, _ask(subject, _with_mask(case, np.array(case.positive_mask()))))


@_property()
def _rotation(subject: Subject, case: Case) -> None:
    """Rotating or reflecting the embeddings does not change the loss, and rotates the gradient."""
    chance, dim = _chance(case), case.embeddings.shape[1]
    matrix = np.eye(dim)[chance.sample(range(dim), dim)] * [chance.choice((-1.0, 1.0)) for _ in range(dim)]
    exact = all(Fraction(x) * 25 == Fraction(x * 25) for x in _temperatures(case).values())
    if dim > 1 and (case.option("similarity") == "cosine" or exact):
        # The triangle 3, 4, 5 gives a rotation with integer entries, times five.
        turn = 5 * np.eye(dim)
        turn[:2, :2] = [[3, -4], [4, 3]]
        matrix = matrix @ turn
    _hold_mapped(subject, case, [matrix] * len(_rows(case)))


@_property()
def _scale(subject: Subject, case: Case) -> None:
    """With cosine, multiplying a row by c divides its gradient by c and changes nothing else.

    With dot, doubling all rows and multiplying the temperature by 4 does not change the loss.
    """
    chance, cosine = _chance(case), case.option("similarity") == "cosine"
    factors = [chance.choice((0.25, 0.5, 2.0, 3.0, 5.0)) if cosine else 2.0 for _ in _rows(case)]
    _hold_mapped(subject, case, [factor * np.eye(case.embeddings.shape[1]) for factor in factors])


@_property(_within, "views")
def _view_order(subject: Subject, case: Case) -> None:
    """Interleaved views give the same results as stacked views."""
    half = case.n // 2
    order = [row for item in range(half) for row in (item, half + item)]
    _agree(_ask(subject, case), _ask_reordered(subject, case, order))


@_property(_chooses_anchors, "views", anchors=None)
def _directions(subject: Subject, case: Case) -> None:
    """Swapping two views does not change the loss.

    The sums over the anchors of each view add up to the whole.
    """
    half = case.n // 2
    order = [*range(half, case.n), *range(half)]
    _agree(_ask(subject, case), _ask_reordered(subject, case, order))
    one_way = {"reduction": "sum", "anchors": [k < half for k in range(case.n)]}
    there, back = _ask(subject, case, **one_way), _ask_reordered(subject, case, order, **one_way)
    _agree(_ask(subject, case, reduction="sum"), _sum(there, back))


@_property(lambda loss: loss.two_towers and not {"direction", "directions"} & loss.keywords.keys())
def _swapped_towers(subject: Subject, case: Case) -> None:
    """If a loss sums over all pairs of two towers, swapping the towers keeps the sum and swaps the gradients."""
    order = [*range(case.n, len(_rows(case))), *range(case.n)]
    whole, swapped = _ask(subject, case, reduction="sum"), _ask_reordered(subject, case, order, reduction="sum")
    _agree(_only(whole, "loss", "gradient"), _only(swapped, "loss", "gradient"))


@_property(lambda loss: "direction" in loss.keywords)
def _towers(subject: Subject, case: Case) -> None:
    """Swapping towers and direction does not change the loss. Both directions add up to the whole."""
    n, m = case.n, len(case.others["embeddings_b"])
    order = [*range(n, n + m), *range(n), *range(n + m, len(_rows(case)))]
    turned = {"both": "both", "a_to_b": "b_to_a", "b_to_a": "a_to_b"}
    swapped = _ask_reordered(subject, case, order, direction=turned[case.option("direction")])
    _agree(_ask(subject, case), swapped)
    plain = _with(case, reduction="sum", direction_weights=None)
    whole, there, back = (_ask(subject, plain, direction=direction) for direction in turned)
    _agree(whole, _sum(there, back))


@_property(_chooses_anchors, anchors=None)
def _subset_of_anchors(subject: Subject, case: Case) -> None:
    """An anchor's value does not depend on which other rows are anchors. The sums over two parts add up."""
    chance = _chance(case)
    chosen = [chance.random() < 0.5 for _ in range(case.n)]
    chosen[0] = not all(chosen)
    whole = _ask(subject, case, reduction="sum")
    parts = [_ask(subject, case, reduction="sum", anchors=[x == side for x in chosen]) for side in (True, False)]
    _agree(whole, _sum(*parts))


@_property(similarity="cosine")
def _orthogonal_gradient(subject: Subject, case: Case) -> None:
    """With cosine similarity, the gradient of each row is orthogonal to the row."""
    rows = _rows(case)
    for (_, k), (gradient, tolerance) in _only(_ask(subject, case), "gradient").items():
        _near(f"gradient of row {k} along the row", 0.0, float(gradient @ rows[k]) / math.hypot(*rows[k]), tolerance)


@_property()
def _no_torque(subject: Subject, case: Case) -> None:
    """Rotating all rows together does not change the loss. So Z^T G is symmetric for rows Z and gradient G."""
    rows = _rows(case)
    products, tolerance = np.zeros((rows.shape[1],) * 2), 0.0
    for (_, k), (gradient, allowed) in _only(_ask(subject, case), "gradient").items():
        products += np.outer(rows[k], gradient)
        tolerance += 2 * math.hypot(*rows[k]) * allowed
    _near("rows transposed times gradient and its transpose", products.ravel(), products.T.ravel(), tolerance)


@_property()
def _identical_rows(subject: Subject, case: Case) -> None:
    """If all logits are equal, the loss is known: ln(N - 1) if the denominator sums over all other rows."""
    row, cosine = case.embeddings[0], case.option("similarity") == "cosine"
    same = _with(_with_rows(case, np.tile(row, (len(_rows(case)), 1))), base_temperature=None)
    logit = (1.0 if cosine else float(row @ row)) / case.temperature
    # The expected values are rounded too, by a few units in the last place of their terms.
    expected = _of_equal_logits(same, logit, 4 * ROUNDING * (1 + logit + abs(same.bias)))
    if cosine:
        expected |= {("gradient", k): (np.zeros_like(row), 0.0) for k in range(len(_rows(case)))}
    _agree(expected, _ask(subject, same))


@_property()
def _hot(subject: Subject, case: Case) -> None:
    """As the temperature grows, every logit goes to 0, and the loss goes to that of equal logits."""
    # Hardness weights do not depend on the temperature.
    hot = _with(case, temperature=HOT, base_temperature=None, hardness_strength=0.0)
    longest = 1.0 if case.option("similarity") == "cosine" else float(np.linalg.norm(_rows(case), axis=1).max())
    # Logits of magnitude at most S change a ratio of exponentials by a factor of at most e^(2S), and a softplus by S.
    # The slack is larger for a sigmoid loss, which sums over pairs, for weights, which multiply logits, and for "mass",
    # which divides by 1 - tau_plus.
    many = hot.entry.form == "sigmoid" or hot.entry.weights
    pairs = hot.shape[1] if many else 2 if hot.entry.form == "mass" else 1
    slack = 2 * longest**2 / HOT * pairs + 4 * ROUNDING * (1 + abs(hot.bias))
    _agree(_of_equal_logits(hot, 0.0, slack), _ask(subject, hot))


@_property(_coincides, "paired", denominator="all")
def _one_positive_each(subject: Subject, case: Case) -> None:
    """With one positive per anchor, supcon, supcon_in, nt_xent and nt_xent_pairwise are equal."""
    mates = [row[0] for row in case.positives()]
    pairs = list(enumerate(mates))
    given = {"labels": [min(pair) for pair in pairs], "partners": mates, "positive_pairs": pairs}
    arguments = {loss.name: {loss.targets: given[loss.targets]} for loss in filter(_coincides, LOSSES.values())}
    found, answered = _ask(subject, case), 0
    for loss, denominator, other in _of_other_losses(subject, case, arguments):
        if denominator != "only_negatives":
            answered += (loss.name, denominator) != (case.loss, "all")
            _agree(found, other)
    if not answered:
        raise Refused("takes none of the other losses that are equal here")


@_property(_ordered, denominator="all", reduction="none", no_positive="zero")
def _order(subject: Subject, case: Case) -> None:
    """nt_xent_pairwise <= supcon, supcon_in <= supcon, and only_negatives <= one_positive <= all, for every anchor."""
    arguments = {name: case.arguments for name, loss in LOSSES.items() if _coincides(loss) and _labelled(loss)}
    # Each denominator sums a subset of the terms of the one before it.
    rank = CHOICES["denominator"].index
    pairs = itertools.permutations(_of_other_losses(subject, case, arguments), 2)
    chains = [(a, b) for a, b in pairs if a[0].form in ("inside", b[0].form) and rank(a[1]) >= rank(b[1])]
    if not chains:
        raise Refused("takes only one of the ordered losses")
    # Without negatives, a denominator of negatives is empty, and the anchor adds 0 by policy.
    with_negatives = [i for i in case.anchors() if len(case.positives()[i]) < case.n - 1]
    for (less, denominator, lower), (more, other, higher) in chains:
        for i in with_negatives:
            (low, below), (high, above) = lower["anchor", i], higher["anchor", i]
            what = f"anchor {i}, by how much {less.name} {denominator} exceeds {more.name} {other}"
            _near(what, max(low - high, 0.0), 0.0, below + above)


@_property(_within)
def _duplicates(subject: Subject, case: Case) -> None:
    """Equal rows have equal values and gradients if they are positives of each other and share all other positives."""
    first, second = _chance(case).sample(range(case.n), 2)
    if "partners" in case.arguments:
        second = case.arguments["partners"][first]
    order = [first if k == second else k for k in range(case.n)]
    doubled = _reordered(case, order)
    if "partners" in case.arguments:
        doubled = replace(doubled, arguments=case.arguments)
    elif "labels" not in case.arguments:
        mask = np.array(case.positive_mask())[np.ix_(order, order)]
        mask[[first, second], [second, first]] = True
        doubled = _with_mask(doubled, mask)
    found, twin = _ask(subject, doubled), {first: second, second: first}
    _agree(found, {(what, twin[k]): part for (what, k), part in found.items() if what != "loss" and k in twin})


@_property(lambda loss: _labelled(loss) or loss.positives_by == "pairs")
def _never_its_own_positive(subject: Subject, case: Case) -> None:
    """The diagonal of a mask, a pair of a row with itself, and a repeated pair have no effect."""
    mask, diagonal = np.array(case.positive_mask()), np.eye(case.n, dtype=bool)
    without, full = _with_mask(case, mask & ~diagonal), _with_mask(case, mask | diagonal)
    if case.entry.positives_by == "pairs":
        pairs = full.arguments["positive_pairs"] * 2
        full = replace(case, arguments={"positive_pairs": _chance(case).sample(pairs, len(pairs))})
    _agree(_ask(subject, without), _ask(subject, full))


def _within_batch(case: Case) -> Case:
    """Return the case without a queue, because its pairs cannot be ignored.

    Two towers are cut to the same length. Their given positives and hard negatives are removed.
    """
    others = {name: rows for name, rows in case.others.items() if name != "negatives"}
    if not case.entry.two_towers:
        return replace(case, others=others)
    n = min(case.n, len(others["embeddings_b"]))
    return replace(
        case, embeddings=case.embeddings[:n], others={"embeddings_b": others["embeddings_b"][:n]}, arguments={}
    )


def _leaving_out(case: Case, **arguments: npt.NDArray[Any]) -> Case:
    """Return the case with a mask of ignored pairs, with ids, or with weights."""
    return replace(case, arguments={**case.arguments, **{name: x.tolist() for name, x in arguments.items()}})


@_property(_leaves_out)
def _nothing_ignored(subject: Subject, case: Case) -> None:
    """A mask without ignored pairs, ids that all differ, and ignored self pairs change nothing."""
    case = _within_batch(case)
    found, mask = _ask(subject, case), np.eye(case.n, dtype=bool) & _within(case.entry)
    _agree(found, _ask(subject, _leaving_out(case, ignored=mask)))
    ids = np.array(_chance(case).sample(range(-9, 9), case.n))
    _agree(found, _ask(subject, _leaving_out(case, ignored_ids=ids)))


@_property(lambda loss: _leaves_out(loss) and not loss.weights)
def _ignored_rows(subject: Subject, case: Case) -> None:
    """If anchors ignore their pairs with some rows, their values are those in the batch without these rows."""
    case = _within_batch(case)
    gone = {_chance(case).randrange(case.n)}
    if "partners" in case.arguments:
        gone |= {case.arguments["partners"][row] for row in gone}
    kept = [row for row in range(case.n) if row not in gone]
    if len(kept) < (2 if _within(case.entry) else 1):
        gone, kept = set(), [*range(case.n)]
    left_out, smaller = np.array([row in gone for row in range(case.n)]), with_rows(case, kept)
    assert smaller is not None
    whole = _leaving_out(case, ignored=left_out[:, None] != left_out)
    each, rest = (_ask(subject, one, reduction="none") for one in (whole, smaller))
    # With two towers, the anchors of the second direction follow those of the first.
    old = [start + row for start in range(0, case.shape[0], case.n) for row in kept]
    place = {("anchor", i): ("anchor", k) for k, i in enumerate(old)}
    _agree({place[key]: part for key, part in each.items() if key in place}, rest)


@_property(_leaves_out)
def _equal_ids(subject: Subject, case: Case) -> None:
    """Ids leave out the pairs that have equal ids and are not positives."""
    case = _within_batch(case)
    ids = np.array([_chance(case).randrange(3) for _ in range(case.n)])
    mask = np.equal.outer(ids, ids) & ~case.positive_array()[: case.n]
    _agree(_ask(subject, _leaving_out(case, ignored_ids=ids)), _ask(subject, _leaving_out(case, ignored=mask)))


@_property(_weights_pairs)
def _equal_weights(subject: Subject, case: Case) -> None:
    """Equal weights of all positives multiply the loss. If it is divided by the weights, they cancel."""
    weights, found = np.ones(case.shape), _ask(subject, case)
    _agree(found, _ask(subject, _leaving_out(case, positive_weights=weights, negative_weights=weights)))
    twice = _leaving_out(case, positive_weights=2 * weights)
    # A sum over pairs is not divided.
    reduction = "mean_pairs" if case.over_pairs else case.option("reduction")
    divided = _ask(subject, twice, reduction=reduction, weights_divisor="weight")
    _agree(_ask(subject, case, reduction=reduction), divided)
    sums = _with(case, reduction="sum", no_positive="zero"), _with(twice, reduction="sum", no_positive="zero")
    _agree(_multiplied(_ask(subject, sums[0]), 2), _ask(subject, sums[1]))


@_property(_weights_pairs)
def _negatives_of_weight_0(subject: Subject, case: Case) -> None:
    """A negative of weight 0 is left out, like an ignored pair."""
    chance = _chance(case)
    kept = np.array([[chance.random() < 0.7 for _ in range(case.shape[1])] for _ in range(case.shape[0])])
    ignored = ~kept & ~case.positive_array()
    _agree(
        _ask(subject, _leaving_out(case, negative_weights=kept.astype(float))),
        _ask(subject, _leaving_out(case, ignored=ignored)),
    )


@_property(_weights_anchors, anchors=None)
def _anchors_of_weight_0(subject: Subject, case: Case) -> None:
    """Anchors of weight 0 do not count. If the other weights are equal, they cancel in a mean."""
    reduction = case.option("reduction") if "mean" in case.option("reduction") else "mean"
    case = _with(case, reduction=reduction, no_positive="zero", no_negative="zero")
    chance = _chance(case)
    chosen = np.array([chance.random() < 0.6 for _ in range(case.n)])
    weighted = _ask(subject, _leaving_out(case, anchor_weights=3.0 * chosen))
    _agree(_only(weighted, "loss", "gradient"), _ask(subject, _with(case, anchors=chosen.tolist())))


@_property()
def _reductions(subject: Subject, case: Case) -> None:
    """The sum is the sum of the anchors' values. The mean is the sum divided by their number. Gradients likewise."""
    each, total, mean = (_ask(subject, case, reduction=reduction) for reduction in ("none", "sum", "mean"))
    _agree(_reduced(_with(case, reduction="sum"), each), total)
    if case.groups():
        _agree(_only(_reduced(_with(case, reduction="mean"), each), "loss", "anchor"), mean)
    else:
        _agree(_multiplied(total, 1 / max(len(case.counted()), 1)) | _only(each, "anchor"), mean)
    for reduction in ("mean_pairs", "sum_pairs") if "mean_pairs" in case.entry.choices["reduction"] else ():
        over_pairs = _with(case, reduction=reduction)
        _agree(_only(_reduced(over_pairs, each), "loss", "anchor"), _ask(subject, over_pairs))
    if "none_pairs" in case.entry.choices["reduction"] and not case.undefined():
        total, every = (_ask(subject, _with(case, reduction=f"{how}_pairs")) for how in ("sum", "none"))
        of_pairs = np.array([part for (what, _), part in every.items() if what == "pair"]).reshape(-1, 2)
        values, tolerances = of_pairs.T
        tolerances = tolerances + ROUNDING * len(values) * np.abs(values)
        whole = {("loss", 0): (float(values.sum()), float(tolerances.sum())), **_only(every, "gradient")}
        _agree(whole, total)


@_property(_takes_zero_rows, similarity="cosine")
def _zero_rows(subject: Subject, case: Case) -> None:
    """A row of zeros gives the loss of a row that is orthogonal to all others, and its gradient is 0."""
    rows, row = _rows(case).copy(), _chance(case).randrange(len(_rows(case)))
    rows[row] = 0.0
    zeros = _ask(subject, _with_rows(_with(case, zero_row="zero"), rows))
    axis = np.array([[float(k == row)] for k in range(len(rows))])
    apart = _ask(subject, _with_rows(case, np.hstack([rows, axis])))
    _agree(_only(zeros, "loss", "anchor"), apart)
    for (what, k), (found, tolerance) in _only(zeros, "gradient").items():
        expected = np.zeros(len(found)) if k == row else np.asarray(apart[what, k][0])[:-1]
        _near(f"gradient {k}", found, expected, tolerance + apart[what, k][1] * (k != row))


@_property()
def _base_temperature(subject: Subject, case: Case) -> None:
    """A base temperature multiplies the loss by temperature / base temperature."""
    base = case.option("base_temperature") or 2 * case.temperature
    plain = _ask(subject, case, base_temperature=None)
    _agree(_ask(subject, case, base_temperature=base), _multiplied(plain, case.temperature / base))


@_property(_within)
def _policies(subject: Subject, case: Case) -> None:
    """A policy sets the values of anchors without positives or without negatives. It changes no others."""
    plain = _with(case, no_positive="zero", no_negative="zero", reduction="none")
    zero, known = _ask(subject, plain), case.entry.choices
    if "no_positive" in known:
        _agree(zero, {("anchor", i): (0.0, 0.0) for i in case.anchors() if not case.positives()[i]})
    for name, policy in (("no_positive", "nan"), ("no_positive", "drop"), ("no_negative", "nan")):
        if name in known:
            other = _with(plain, **{name: policy})
            _agree(zero | {("anchor", i): (math.nan, 0.0) for i in other.undefined()}, _ask(subject, other))


PROPERTIES: tuple[Property, ...] = tuple(_PROPERTIES)
