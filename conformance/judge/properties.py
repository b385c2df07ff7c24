"""Properties: what must hold between the results of a loss on related batches, whatever the results are.

A property needs no expected value, so it can be asked of any implementation on any batch. Each takes a *subject* (an
implementation in one dtype) and a *case* (a drawn batch with its options), derives related cases whose inputs are exact
again, and says how their results break the relation, or nothing. Batches are drawn with Hypothesis:

    subject = Subject.of(Fast({}, "cpu"), "float32")
    for prop in PROPERTIES:
        for loss in prop.losses:
            found = hunt(prop, loss, [subject])          # found.violation, found.asked

An implementation refuses what it does not have; ``options={"reduction": "mean", "anchors": None}`` draws nothing else.

*Tolerances.* Every result is within its bound of the truth (``tolerances.bounds``), and of true results the relation
holds exactly; so two results may miss it by the sum of their bounds, each times the factor with which it enters the
relation, and by nothing else. Where the relation is a limit, what is left at a finite temperature is derived there.

A gradient is compared unless it does not exist: the loss is NaN, or has a kink there (``certify.maximum_is_tied``).
"""

from __future__ import annotations

import itertools
import json
import math
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from pairproof.reference import interleaved_partners, stacked_partners

from ..suite.cases import Case
from ..suite.catalogue import LOSSES, Loss
from ..suite.records import Bounds, Outcome, Truth
from ..truth.certify import maximum_is_tied
from ..truth.evaluate import truth
from ..truth.tolerances import bounds

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from ..implementations import Implementation

Matrix = npt.NDArray[np.float64]

HOT = 2.0**30
"""A temperature at which every logit is next to 0."""

DENOMINATORS = ("all", "one_positive", "only_negatives")
"""Each sums no more than the one before it."""


def _within(loss: Loss) -> bool:
    """Whether the rows of one batch are anchors and columns at once.

    Only then are there views, subsets of anchors, positives to choose and policies for what is missing.
    """
    return not loss.two_towers


def _chooses_anchors(loss: Loss) -> bool:
    """Whether some rows of a batch may be anchors and others not."""
    return "anchors" in loss.keywords


def _labelled(loss: Loss) -> bool:
    """Whether the loss takes labels, and a mask of positives in place of them."""
    return loss.positives_by == "labels" and "positives" in loss.keywords


def _coincides(loss: Loss) -> bool:
    """Whether the loss is a plain cross-entropy where every anchor has one positive."""
    plain = loss.form in ("mean", "inside") and not loss.epsilon
    return plain and _within(loss) and loss.variant.get("denominator", "all") != "only_negatives"


class Refused(Exception):
    """The subject does not take a case that the property needs; the message is its reason."""


class _Broken(Exception):
    """The relation does not hold; the message says where."""


@dataclass(frozen=True)
class Subject:
    """What is asked: an implementation in one dtype.

    Attributes:
        evaluate: gives value, anchors' values and gradient of a case, as far as it has them.
        dtype: in which it works.
        refuses: why a case is not for it, or None.
        name: for messages.
    """

    evaluate: Callable[[Case], Outcome]
    dtype: str = "float64"
    refuses: Callable[[Case], str | None] = lambda case: None
    name: str = "the implementation"

    @classmethod
    def of(cls, implementation: Implementation, dtype: str) -> Subject:
        """An adapter of ``peers`` in one of its dtypes."""
        return cls(
            evaluate=lambda case: implementation.evaluate(case, dtype),
            dtype=dtype,
            refuses=implementation.refuses,
            name=f"{implementation.name} in {dtype}",
        )


@dataclass(frozen=True)
class Property:
    """A relation that results must satisfy.

    Attributes:
        name: short name.
        says: the relation in words.
        claimed: whether it holds for a loss of the catalogue.
        kind: of batch, as ``batches`` draws it: "any"; "labelled", its positives given by labels; "views", two views
            of every item stacked; "paired", every label twice.
        fixed: the options at which alone it holds.
        relate: raises where the relation breaks.
    """

    name: str
    says: str
    claimed: Callable[[Loss], bool]
    kind: str
    fixed: Mapping[str, Any]
    relate: Callable[[Subject, Case], None] = field(repr=False)

    @property
    def losses(self) -> tuple[str, ...]:
        """The losses for which it holds."""
        return tuple(name for name, loss in LOSSES.items() if self.claimed(loss))

    def applies(self, case: Case) -> bool:
        """Whether the relation is claimed for a case."""
        known = case.entry.keywords
        return (
            self.claimed(case.entry)
            and _is_of_kind(case, self.kind)
            and all(case.option(name) == value for name, value in self.fixed.items() if name in known)
        )

    def violation(self, subject: Subject, case: Case) -> str | None:
        """How the subject's results on a case and on its relatives break the relation; None if they do not.

        Args:
            subject: what is asked.
            case: a batch; the property must apply to it.

        Raises:
            Refused: the subject does not take the case or one that the relation needs.
            ValueError: the property does not apply to the case.
        """
        if not self.applies(case):
            raise ValueError(f"the property {self.name!r} says nothing of the case {case.id}")
        try:
            self.relate(subject, case)
        except _Broken as broken:
            return f"{subject.name}, {case.loss}: {self.name}: {broken}\nthe case: {_as_input(case)}"
        return None


@dataclass(frozen=True)
class Hunt:
    """What a hunt found: a violation, if there is one, and how many batches each subject answered."""

    violation: str | None
    asked: Mapping[str, int]


def hunt(
    prop: Property,
    loss: str,
    subjects: Sequence[Subject],
    *,
    options: Mapping[str, Any] = MappingProxyType({}),
    examples: int = 50,
    simplify: bool = True,
) -> Hunt:
    """Draw batches, always the same ones, and ask every subject of each.

    Args:
        prop: the property.
        loss: one of its losses.
        subjects: what is asked.
        options: keywords that are not drawn, for subjects that have no such choice; those that the property fixes and
            those that the loss lacks are passed over.
        examples: how many batches are drawn.
        simplify: look for the simplest batch that shows a violation, which takes seconds.

    Raises:
        ImportError: hypothesis is not installed.
    """
    hypothesis = _hypothesis()
    asked = {subject.name: 0 for subject in subjects}

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
        database=None,
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
        names = ", ".join(subject.name for subject in subjects)
        return Hunt(
            f"{names}, {loss}: {prop.name}: broken on a batch and not when asked again: not deterministic", asked
        )
    return Hunt(None, asked)


def batches(loss: str, kind: str = "any", fixed: Mapping[str, Any] = MappingProxyType({})) -> SearchStrategy[Case]:
    """A Hypothesis strategy of cases with every option of a loss.

    Entries are integers up to 15 times a power of two, one per row: they, and what the properties make of them, are
    numbers of every dtype.

    Args:
        loss: short name in the catalogue.
        kind: of batch; see ``Property``.
        fixed: options that are not drawn.

    Raises:
        ImportError: hypothesis is not installed.
        ValueError: an unknown kind.
    """
    if kind not in ("any", "labelled", "views", "paired"):
        raise ValueError(f"kind: expected one of any, labelled, views, paired, got {kind!r}")
    st = _hypothesis().strategies
    catalogue = LOSSES[loss]

    def drawn(draw: Callable[[Any], Any]) -> Case:
        towers = catalogue.two_towers
        even = catalogue.positives_by == "partners" or kind in ("views", "paired")
        n = 2 * draw(st.integers(1, 3)) if even else draw(st.integers(1, 4) if towers else st.integers(2, 6))
        more = {}
        if towers:
            more = {"embeddings_b": n}
            if draw(st.booleans()):
                more["negatives"] = draw(st.integers(1, 3))
        total = n + sum(more.values())
        dim = draw(st.integers(1, 3))
        keywords = {name: draw(st.sampled_from(values)) for name, values in catalogue.choices.items()}
        cosine = fixed.get("similarity", keywords["similarity"]) == "cosine"
        temperatures = (0.5, 0.07, 0.1, 1.0, 2.0) if cosine else (1.0, 0.5, 10.0, 64.0)
        keywords["temperature"] = draw(st.sampled_from(temperatures))
        keywords["base_temperature"] = draw(st.sampled_from((None, 0.07, 0.5)))
        if "anchors" in catalogue.keywords:
            keywords["anchors"] = draw(st.none() | st.lists(st.booleans(), min_size=n, max_size=n))
        keywords |= {name: value for name, value in fixed.items() if name in catalogue.keywords}

        entries = draw(st.lists(st.integers(-15, 15), min_size=total * dim, max_size=total * dim))
        rows = np.array(entries, dtype=np.float64).reshape(total, dim)
        if cosine:
            rows[~rows.any(axis=1), 0] = 1.0
        sizes = (
            st.lists(st.integers(-6, 6), min_size=total, max_size=total)
            if cosine
            else st.integers(-4, -2).map(lambda k: [k])
        )
        rows = np.ldexp(rows, np.array(draw(sizes))[:, None])
        arguments = {}
        if catalogue.targets:
            arguments[catalogue.targets] = _targets(draw, st, catalogue.targets, kind, n)
        if kind == "any" and "positives" in catalogue.keywords and draw(st.booleans()):
            line = st.lists(st.booleans(), min_size=n, max_size=n)
            arguments = {"positives": draw(st.lists(line, min_size=n, max_size=n))}
        changed = {name: value for name, value in keywords.items() if value != catalogue.keywords[name]}
        ends = np.cumsum([n, *more.values()])[:-1]
        others = dict(zip(more, np.split(rows, ends)[1:], strict=True))
        return Case(f"drawn/{loss}", loss, rows[:n], arguments, changed, others=others)

    strategy: SearchStrategy[Case] = st.composite(drawn)()
    return strategy


def _targets(draw: Callable[[Any], Any], st: Any, name: str, kind: str, n: int) -> Any:
    """Labels, partners or pairs of a batch of one kind."""
    if kind == "paired":
        labels = draw(st.permutations([k // 2 for k in range(n)]))
    elif kind == "views":
        labels = draw(st.lists(st.integers(0, 2), min_size=n // 2, max_size=n // 2)) * 2
    else:
        labels = draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    if name == "labels":
        return labels
    if name == "partners":
        if kind == "views":
            return stacked_partners(n).tolist()
        rows = draw(st.permutations(range(n)))
        if kind == "paired":
            rows = sorted(range(n), key=lambda i: labels[i])
        partners = [0] * n
        for i, j in zip(rows[::2], rows[1::2], strict=True):
            partners[i], partners[j] = j, i
        return partners
    if kind == "any":
        return draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=2 * n))
    return [(i, j) for i in range(n) for j in range(n) if i != j and labels[i] == labels[j]]


def _hypothesis() -> Any:
    try:
        import hypothesis
        import hypothesis.errors
        import hypothesis.strategies
    except ImportError as error:
        raise ImportError(f'batches are drawn with hypothesis ({error}): pip install "pairproof[verify]"') from None
    return hypothesis


def _is_of_kind(case: Case, kind: str) -> bool:
    if kind == "labelled":
        return "labels" in case.arguments
    half = case.n // 2
    if kind == "views":
        mask = np.array(case.positive_mask()) | np.eye(case.n, dtype=bool)
        return case.n % 2 == 0 and np.array_equal(mask, np.roll(mask, half, axis=(0, 1))) and bool(mask[0, half])
    if kind == "paired":
        return case.entry.positives_by == "partners" or (
            "labels" in case.arguments and all(case.arguments["labels"].count(x) == 2 for x in case.arguments["labels"])
        )
    return True


def _as_input(case: Case) -> str:
    """The case as a golden file takes it: with an id, flags and a note it is one, once its results are proved."""
    return json.dumps(
        {
            "embeddings": case.embeddings.tolist(),
            "arguments": {
                name: np.asarray(value).tolist() for name, value in {**case.arguments, **case.others}.items()
            },
            "keywords": dict(case.keywords),
        }
    )


@dataclass(frozen=True)
class _Found:
    """A subject's results on a case, and how far each may be off.

    ``gradient`` has the rows of every matrix, one matrix after the other, as ``_rows`` has; ``rows`` bounds them.
    """

    case: Case
    values: list[float]
    anchors: dict[int, float]
    gradient: Matrix | None
    bounds: Bounds
    rows: Matrix


@lru_cache(maxsize=64)
def _truth(case: Case) -> Truth:
    return truth(case)


def _ask(subject: Subject, case: Case, **changed: Any) -> _Found:
    """Evaluate a case, some of its keywords changed."""
    if changed:
        case = _with(case, **changed)
    reason = subject.refuses(case)
    if reason is not None:
        raise Refused(reason)
    if not case.holds_in(subject.dtype):
        raise Refused(f"its inputs are no numbers of {subject.dtype}")
    try:
        outcome = subject.evaluate(case)
    except Exception as error:  # a crash of outside code is a result
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        raise _Broken(f"{message} ({case.loss}, {dict(case.keywords)})") from error
    true = _truth(case)
    many = isinstance(true.loss, list)
    if len(outcome.values) != len(true.values):
        raise _Broken(f"expected {len(true.values)} values for {dict(case.keywords)}, got {len(outcome.values)}")
    anchors = outcome.anchors or {}
    if many and not anchors:
        anchors = dict(zip(case.counted(), outcome.values, strict=True))
    defined = true.gradient is not None and not maximum_is_tied(case)
    gradient = None
    if defined and outcome.gradient is not None:
        gradient = np.concatenate([outcome.gradient, *(outcome.other_gradients[name] for name in case.others)])
    allowed = bounds(case, true, subject.dtype)
    return _Found(
        case=case,
        values=outcome.values,
        anchors=anchors,
        gradient=gradient,
        bounds=allowed,
        rows=np.concatenate([allowed.rows, *(allowed.other_rows[name] for name in case.others)]),
    )


def _rows(case: Case) -> Matrix:
    """The rows of every matrix that goes in, one matrix after the other."""
    return np.concatenate(list(case.matrices.values()))


def _with_rows(case: Case, rows: Matrix) -> Case:
    """The case with other rows, as ``_rows`` has them."""
    ends = np.cumsum([len(matrix) for matrix in case.matrices.values()])[:-1]
    embeddings, *others = np.split(rows, ends)
    return replace(case, embeddings=embeddings, others=dict(zip(case.others, others, strict=True)))


def _with(case: Case, **changed: Any) -> Case:
    """The case with other keywords, those that its loss has."""
    known = case.entry.keywords
    keywords = {**case.keywords, **{name: value for name, value in changed.items() if name in known}}
    return replace(case, keywords=keywords)


def _near(what: str, first: float, second: float, tolerance: float) -> None:
    both_nan = math.isnan(first) and math.isnan(second)
    if first == second or both_nan or abs(first - second) <= tolerance:
        return
    raise _Broken(f"{what}: {first!r} against {second!r}, apart by {_times(abs(first - second), tolerance)}")


def _near_rows(what: str, first: Matrix, second: Matrix, tolerances: Matrix) -> None:
    for i, (error, tolerance) in enumerate(zip(np.linalg.norm(first - second, axis=1), tolerances, strict=True)):
        if not error <= tolerance:
            rows = f"{first[i].tolist()} against {second[i].tolist()}"
            raise _Broken(f"{what}, row {i}: {rows}, apart by {_times(float(error), float(tolerance))}")


def _times(error: float, tolerance: float) -> str:
    return f"{error / tolerance if tolerance else math.inf:.3g} times the tolerance {tolerance:.3g}"


def _agree(
    first: _Found,
    second: _Found,
    *,
    order: Sequence[int] | None = None,
    anchors: Sequence[int] | None = None,
    factor: float = 1.0,
    pull: Callable[[Matrix], Matrix] = lambda gradient: gradient,
    stretch: Matrix | float = 1.0,
) -> None:
    """Hold ``factor`` times the second results against the first.

    Args:
        first: results on a case.
        second: results on its relative, whose row k is the case's row ``order[k]``.
        order: the case's own order by default; of the rows of every matrix.
        anchors: the same of the anchors alone; by default ``order``, where one batch is all that goes in.
        factor: of the second loss.
        pull: brings the second gradient back to the case's coordinates, and lengthens no row more than ``stretch``.
        stretch: by row of the second case.
    """
    rows = list(range(len(first.rows))) if order is None else list(order)
    for k, i in enumerate(rows if anchors is None else anchors):
        if i in first.anchors and k in second.anchors:
            tolerance = first.bounds.anchors[i] + factor * second.bounds.anchors[k]
            _near(f"anchor {i}", first.anchors[i], factor * second.anchors[k], tolerance)
    if len(first.values) == len(second.values) == 1:
        tolerance = first.bounds.values[0] + factor * second.bounds.values[0]
        _near("loss", first.values[0], factor * second.values[0], tolerance)
    if first.gradient is not None and second.gradient is not None:
        tolerances = first.rows[rows] + factor * stretch * second.rows
        _near_rows("gradient", first.gradient[rows], factor * pull(second.gradient), tolerances)


def _reordered(case: Case, order: Sequence[int]) -> Case:
    """The case whose row k is this one's row ``order[k]``."""
    place = {i: k for k, i in enumerate(order)}
    arguments = dict(case.arguments)
    if "labels" in arguments:
        arguments["labels"] = [arguments["labels"][i] for i in order]
    if "partners" in arguments:
        arguments["partners"] = [place[int(arguments["partners"][i])] for i in order]
    if "positives" in arguments:
        arguments["positives"] = [[arguments["positives"][i][j] for j in order] for i in order]
    if "positive_pairs" in arguments:
        arguments["positive_pairs"] = [(place[i], place[j]) for i, j in arguments["positive_pairs"]]
    chosen = case.option("anchors")
    reordered = replace(case, embeddings=case.embeddings[list(order)], arguments=arguments)
    return reordered if chosen is None else _with(reordered, anchors=[chosen[i] for i in order])


def _with_mask(case: Case, mask: npt.NDArray[np.bool_]) -> Case:
    """The case with its positives given by a mask, or by pairs where the loss takes those."""
    if case.entry.positives_by == "pairs":
        return replace(case, arguments={"positive_pairs": [(int(i), int(j)) for i, j in np.argwhere(mask)]})
    return replace(case, arguments={"positives": mask.tolist()})


def _chance(case: Case) -> random.Random:
    """A generator of which the batch alone decides, so that a case repeats its violation."""
    return random.Random(zlib.crc32(case.embeddings.tobytes()))


_PROPERTIES: list[Property] = []


def _property(
    name: str, says: str, claimed: Callable[[Loss], bool] = lambda loss: True, kind: str = "any", **fixed: Any
) -> Callable[[Callable[[Subject, Case], None]], Callable[[Subject, Case], None]]:
    def enter(relate: Callable[[Subject, Case], None]) -> Callable[[Subject, Case], None]:
        _PROPERTIES.append(Property(name, says, claimed, kind, MappingProxyType(fixed), relate))
        return relate

    return enter


@_property("permutation", "rows in another order: anchors and gradient move along, mean and sum stay")
def _permutation(subject: Subject, case: Case) -> None:
    chance = _chance(case)
    order = chance.sample(range(case.n), case.n)
    if not case.entry.two_towers:
        _agree(_ask(subject, case), _ask(subject, _reordered(case, order)), order=order)
        return
    # Pairs stay pairs: both towers are reordered alike, and the negatives for themselves.
    queue = range(2 * case.n, len(_rows(case)))
    rows = [*order, *(case.n + i for i in order), *chance.sample(queue, len(queue))]
    anchors = [side * case.n + i for side in range(case.shape[0] // case.n) for i in order]
    _agree(_ask(subject, case), _ask(subject, _with_rows(case, _rows(case)[rows])), order=rows, anchors=anchors)


@_property("relabelling", "only the equality of labels counts, and their mask says the same", _labelled, "labelled")
def _relabelling(subject: Subject, case: Case) -> None:
    found = _ask(subject, case)
    names = _chance(case).sample((-(2**40), -1, 0, 1, 2, 8, 256, 65536, 2**40), 9)
    known = sorted(set(case.arguments["labels"]))
    new = [names[known.index(label) % 9] for label in case.arguments["labels"]]
    if len(known) <= len(names):
        _agree(found, _ask(subject, replace(case, arguments={"labels": new})))
    _agree(found, _ask(subject, _with_mask(case, np.array(case.positive_mask()))))


@_property("rotation", "embeddings rotated or reflected: only angles and lengths count, and the gradient turns along")
def _rotation(subject: Subject, case: Case) -> None:
    chance, dim = _chance(case), case.embeddings.shape[1]
    matrix = np.eye(dim)[chance.sample(range(dim), dim)] * [chance.choice((-1.0, 1.0)) for _ in range(dim)]
    length = 1.0
    exact = all(Fraction(x) * 25 == Fraction(x * 25) for x in _temperatures(case))
    if dim > 1 and (case.option("similarity") == "cosine" or exact):
        # The triangle 3, 4, 5: a rotation by integers, which makes every row five times as long.
        length, turn = 5.0, 5 * np.eye(dim)
        turn[:2, :2] = [[3, -4], [4, 3]]
        matrix = matrix @ turn
    turned = _with_rows(case, _rows(case) @ matrix)
    if case.option("similarity") == "dot":
        turned = _hotter(turned, length**2)
    _agree(
        _ask(subject, case),
        _ask(subject, turned),
        pull=lambda gradient: np.asarray(gradient @ matrix.T),
        stretch=length,
    )


@_property("scale", "cosine: no row's length counts; dot: double rows at the fourfold temperature cost the same")
def _scale(subject: Subject, case: Case) -> None:
    cosine = case.option("similarity") == "cosine"
    chance, rows = _chance(case), _rows(case)
    factors = np.array([chance.choice((0.25, 0.5, 2.0, 3.0, 5.0)) for _ in rows] if cosine else [2.0])
    scaled = _with_rows(case, rows * factors[:, None])
    _agree(
        _ask(subject, case),
        _ask(subject, scaled if cosine else _hotter(scaled, 4)),
        pull=lambda gradient: gradient * factors[:, None],
        stretch=factors,
    )


def _temperatures(case: Case) -> list[float]:
    given = (case.option("temperature"), case.option("base_temperature"))
    return [float(x) for x in given if x is not None]


def _hotter(case: Case, factor: float) -> Case:
    """Temperature and base temperature times a factor."""
    base = case.option("base_temperature")
    return _with(
        case,
        temperature=float(case.option("temperature")) * factor,
        base_temperature=None if base is None else float(base) * factor,
    )


@_property("view order", "two views interleaved give what they give stacked", _within, "views")
def _view_order(subject: Subject, case: Case) -> None:
    half = case.n // 2
    order = [row for item in range(half) for row in (item, half + item)]
    interleaved = _reordered(case, order)
    if "partners" in case.arguments:
        interleaved = replace(interleaved, arguments={"partners": interleaved_partners(case.n).tolist()})
    _agree(_ask(subject, case), _ask(subject, interleaved), order=order)


@_property(
    "directions",
    "two views swapped give the same loss, and what each view costs as anchors adds up to the whole",
    _chooses_anchors,
    "views",
    anchors=None,
)
def _directions(subject: Subject, case: Case) -> None:
    half = case.n // 2
    order = [*range(half, case.n), *range(half)]
    swapped = replace(case, embeddings=case.embeddings[order])
    _agree(_ask(subject, case), _ask(subject, swapped), order=order)
    one_way = [k < half for k in range(case.n)]
    whole = _ask(subject, case, reduction="sum")
    there = _ask(subject, case, reduction="sum", anchors=one_way)
    back = _ask(subject, swapped, reduction="sum", anchors=one_way)
    _adds_up(whole, (there, back), (list(range(case.n)), order))


@_property(
    "towers",
    "towers changed about give the same with the direction turned round, and both directions add up to the whole",
    lambda loss: loss.two_towers,
)
def _towers(subject: Subject, case: Case) -> None:
    n, queue = case.n, range(2 * case.n, len(_rows(case)))
    order = [*range(n, 2 * n), *range(n), *queue]
    turned = {"both": "both", "a_to_b": "b_to_a", "b_to_a": "a_to_b"}
    swapped = _with(_with_rows(case, _rows(case)[order]), direction=turned[case.option("direction")])
    anchors = order[: 2 * n] if case.option("direction") == "both" else range(n)
    _agree(_ask(subject, case), _ask(subject, swapped), order=order, anchors=anchors)
    whole, *parts = (_ask(subject, case, reduction="sum", direction=direction) for direction in turned)
    _adds_up(whole, parts, [range(len(order))] * 2)


def _adds_up(whole: _Found, parts: Sequence[_Found], orders: Sequence[Sequence[int]]) -> None:
    """Hold the sum of some sums against the whole; row k of a part is the whole's row ``order[k]``."""
    tolerance = whole.bounds.values[0] + sum(part.bounds.values[0] for part in parts)
    _near("sum", whole.values[0], sum(part.values[0] for part in parts), tolerance)
    gradient, tolerances = np.zeros_like(_rows(whole.case)), whole.rows.copy()
    for part, order in zip(parts, orders, strict=True):
        if part.gradient is None or whole.gradient is None:
            return
        gradient[list(order)] += part.gradient
        tolerances[list(order)] += part.rows
    assert whole.gradient is not None
    _near_rows("gradient of the sum", whole.gradient, gradient, tolerances)


@_property(
    "subset of anchors",
    "an anchor costs the same whoever else is one, and sums over parts add up",
    _chooses_anchors,
    anchors=None,
)
def _subset(subject: Subject, case: Case) -> None:
    chance = _chance(case)
    chosen = [chance.random() < 0.5 for _ in range(case.n)]
    chosen[0] = not all(chosen)
    whole = _ask(subject, case, reduction="sum")
    parts = [_ask(subject, case, reduction="sum", anchors=[x == side for x in chosen]) for side in (True, False)]
    for part in parts:
        for i in part.case.counted():
            if i in whole.anchors and i in part.anchors:
                tolerance = whole.bounds.anchors[i] + part.bounds.anchors[i]
                _near(f"anchor {i}", whole.anchors[i], part.anchors[i], tolerance)
    _adds_up(whole, parts, [range(case.n)] * 2)


@_property("orthogonal gradient", "under cosine each row's gradient is orthogonal to the row", similarity="cosine")
def _orthogonal(subject: Subject, case: Case) -> None:
    found = _ask(subject, case)
    if found.gradient is None:
        return
    for i, (gradient, row) in enumerate(zip(found.gradient, _rows(case), strict=True)):
        along = float(gradient @ row) / math.hypot(*row)
        _near(f"gradient of row {i} along the row", 0.0, along, float(found.rows[i]))


@_property("no torque", "all rows turned together change nothing, so rows transposed times gradient is symmetric")
def _torque(subject: Subject, case: Case) -> None:
    found = _ask(subject, case)
    if found.gradient is None:
        return
    products = _rows(case).T @ found.gradient
    lengths = np.array([math.hypot(*row) for row in _rows(case)])
    tolerance = 2 * float(lengths @ found.rows)
    for i, k in zip(*np.triu_indices(len(products), 1), strict=True):
        _near(f"coordinates {i} and {k}", float(products[i, k]), float(products[k, i]), tolerance)


@_property("identical rows", "equal logits have a known loss: ln(N - 1) where the denominator is all others")
def _identical(subject: Subject, case: Case) -> None:
    row = case.embeddings[0]
    same = _with(_with_rows(case, np.tile(row, (len(_rows(case)), 1))), base_temperature=None)
    logit = (1.0 if case.option("similarity") == "cosine" else float(row @ row)) / float(case.option("temperature"))
    found = _ask(subject, same)
    # The closed form is itself rounded, by a few units of what it adds up.
    _matches(found, logit, 4 * 2.0**-53 * (1 + logit))
    if found.gradient is not None and case.option("similarity") == "cosine":
        _near_rows("gradient", np.zeros_like(found.gradient), found.gradient, found.rows)


@_property("hot", "as the temperature grows every logit goes to 0: the loss goes to that of equal logits")
def _hot(subject: Subject, case: Case) -> None:
    found = _ask(subject, case, temperature=HOT, base_temperature=None)
    lengths = np.ones(1) if case.option("similarity") == "cosine" else np.linalg.norm(_rows(case), axis=1)
    # Logits of at most S in size move each ratio of exponentials by a factor within e^(2S), each softplus by S.
    _matches(found, 0.0, 2 * float(lengths.max()) ** 2 / HOT + 4 * 2.0**-53)


def _matches(found: _Found, logit: float, slack: float) -> None:
    """Hold results against the closed form of a batch whose logits are all equal, to within bound and slack."""
    case = found.case
    anchors = {i: _of_equal_logits(case, i, logit) for i in case.anchors()}
    for i, value in found.anchors.items():
        _near(f"anchor {i}", anchors[i], value, found.bounds.anchors[i] + slack * (1 + abs(anchors[i])))
    reduction = case.option("reduction")
    if reduction == "none":
        return
    counted = case.counted()
    weights = [1] * len(counted)
    if reduction == "mean_pairs":
        positives = case.positives()
        weights = [len(positives[i]) or int(case.option("no_positive") == "nan") for i in counted]
    total, size = 0.0, 0.0
    for weight, i in zip(weights, counted, strict=True):
        total, size = total + weight * anchors[i], size + weight * (1 + abs(anchors[i]))
    divisor = 1 if reduction == "sum" else max(sum(weights), 1)
    _near("loss", total / divisor, found.values[0], found.bounds.values[0] + case.shape[0] * slack * size / divisor)


def _of_equal_logits(case: Case, i: int, logit: float) -> float:
    """An anchor's loss where every logit is the same; the diagonal's too."""
    if i in case.undefined():
        return math.nan
    positive = len(case.positives()[i])
    others = len(case.members()[i])
    negative = others - positive
    entry = case.entry
    if entry.form == "binary":
        cost = positive / (positive + 1) * math.log1p(math.exp(-logit))
        return cost + (logit + math.log1p(math.exp(-logit)) if negative else 0.0)
    if not positive:
        return 0.0
    if not entry.form:
        row = np.arange(others)[None]
        return float(
            entry.baseline(
                torch.full(row.shape, logit, dtype=torch.float64),
                torch.as_tensor(row >= 0),
                torch.as_tensor(row < positive),
                **case.formula_options(),
            )
        )
    if entry.epsilon:
        return positive * math.log(others) / (positive + entry.epsilon)
    denominator = case.option("denominator") or entry.variant.get("denominator", "all")
    if denominator == "only_negatives" and not negative:
        return 0.0
    return math.log({"all": others, "one_positive": negative + 1, "only_negatives": negative}[denominator])


@_property(
    "one positive each",
    "with one positive per anchor and one class mate, supcon, supcon_in, nt_xent and the pairwise reading are one loss",
    _coincides,
    "paired",
    denominator="all",
)
def _coincidence(subject: Subject, case: Case) -> None:
    mates = [row[0] for row in case.positives()]
    labels = [min(i, mate) for i, mate in enumerate(mates)]
    found, answered = _ask(subject, case), 0
    for loss in filter(_coincides, LOSSES.values()):
        given = {"labels": labels, "partners": mates, "positive_pairs": list(enumerate(mates))}
        keywords = {name: value for name, value in case.keywords.items() if name in loss.keywords}
        same = replace(case, loss=loss.name, arguments={loss.targets: given[loss.targets]}, keywords=keywords)
        if case.option("reduction") not in loss.choices["reduction"]:
            same = _with(same, reduction="mean")
        for denominator in ("all", "one_positive") if "denominator" in loss.keywords else ("all",):
            try:
                other = _ask(subject, same, denominator=denominator)
            except Refused:
                continue
            answered += (loss.name, denominator) != (case.loss, "all")
            _agree(found, other)
    if not answered:
        raise Refused("takes none of the losses that coincide")


@_property(
    "order",
    "pairwise <= supcon, supcon_in <= supcon, and only_negatives <= one_positive <= all, anchor by anchor",
    lambda loss: _labelled(loss) and loss.form == "mean" and "denominator" in loss.keywords,
    denominator="all",
    reduction="none",
    no_positive="zero",
)
def _order(subject: Subject, case: Case) -> None:
    plain = {name: case.option(name) for name in ("anchors", "temperature", "base_temperature", "similarity")}
    found: dict[tuple[str, str, int], _Found] = {}
    for loss in filter(_coincides, LOSSES.values()):
        own = (loss.variant.get("denominator", "all"),)
        for denominator in loss.choices.get("denominator", own) if _labelled(loss) else ():
            keywords = {**plain, "reduction": "none", "denominator": denominator}
            keywords = {name: value for name, value in keywords.items() if name in loss.keywords}
            try:
                other = _ask(subject, replace(case, loss=loss.name, keywords=keywords))
            except Refused:
                continue
            found[loss.name, loss.form, DENOMINATORS.index(denominator)] = other
    chains = [
        (less, more)
        for less, more in itertools.permutations(found, 2)
        if (less[1] == more[1] and less[2] == more[2] + 1) or (less[1:] == ("inside", more[2]) and more[1] == "mean")
    ]
    if not chains:
        raise Refused("takes one of the ordered losses alone")
    # Without negatives their denominator is empty, and the anchor adds 0 by policy.
    with_negatives = [i for i in case.anchors() if len(case.positives()[i]) < case.n - 1]
    for less, more in chains:
        for i in with_negatives:
            low, high = found[less], found[more]
            if i in low.anchors and i in high.anchors:
                tolerance = low.bounds.anchors[i] + high.bounds.anchors[i]
                if not low.anchors[i] <= high.anchors[i] + tolerance:
                    names = " <= ".join(f"{name} {DENOMINATORS[k]}" for name, _, k in (less, more))
                    raise _Broken(f"anchor {i}: expected {names}, got {low.anchors[i]!r} and {high.anchors[i]!r}")


@_property(
    "duplicates", "two equal rows that are each other's positives and share all others cost and learn the same", _within
)
def _duplicates(subject: Subject, case: Case) -> None:
    first, second = _chance(case).sample(range(case.n), 2)
    mask = np.array(case.positive_mask())
    arguments = dict(case.arguments)
    if "partners" in arguments:
        second = int(arguments["partners"][first])
    elif "labels" in arguments:
        arguments["labels"] = list(arguments["labels"])
        arguments["labels"][second] = arguments["labels"][first]
    else:
        mask[second] = mask[first]
        mask[:, second] = mask[:, first]
        mask[first, second] = mask[second, first] = True
        arguments = dict(_with_mask(case, mask).arguments)
    embeddings = case.embeddings.copy()
    embeddings[second] = embeddings[first]
    doubled = replace(case, embeddings=embeddings, arguments=arguments)
    chosen = case.option("anchors")
    if chosen is not None:
        doubled = _with(doubled, anchors=[chosen[first] if k == second else x for k, x in enumerate(chosen)])
    found = _ask(subject, doubled)
    pair = [first, second]
    if first in found.anchors:
        tolerance = sum(found.bounds.anchors[i] for i in pair)
        _near(f"anchors {first} and {second}", found.anchors[first], found.anchors[second], tolerance)
    if found.gradient is not None:
        what = f"gradients of rows {first} and {second}"
        rows = found.gradient[pair]
        _near_rows(what, rows[:1], rows[1:], np.array([sum(found.rows[pair])]))


@_property(
    "never its own positive",
    "the diagonal of a mask, a pair of a row with itself, and a pair named twice mean nothing",
    lambda loss: _labelled(loss) or loss.positives_by == "pairs",
)
def _diagonal(subject: Subject, case: Case) -> None:
    chance, mask = _chance(case), np.array(case.positive_mask())
    spelled = []
    for truthful in (False, True):
        np.fill_diagonal(mask, truthful)
        spelled.append(_with_mask(case, mask.copy()))
    if case.entry.positives_by == "pairs":
        pairs = [*spelled[1].arguments["positive_pairs"]] * 2
        spelled[1] = replace(case, arguments={"positive_pairs": chance.sample(pairs, len(pairs))})
    _agree(_ask(subject, spelled[0]), _ask(subject, spelled[1]))


@_property("reductions", "the sum is that of the anchors' values, the mean the sum over their number, gradients too")
def _reductions(subject: Subject, case: Case) -> None:
    each = _ask(subject, case, reduction="none")
    total = _ask(subject, case, reduction="sum")
    mean = _ask(subject, case, reduction="mean")
    sizes = 2.0**-53 * case.shape[0] * sum(abs(v) for v in each.values)
    _near("sum", sum(each.values), total.values[0], sum(each.bounds.values) + total.bounds.values[0] + sizes)
    number = max(len(case.counted()), 1)
    _near("mean", total.values[0] / number, mean.values[0], total.bounds.values[0] / number + mean.bounds.values[0])
    if each.gradient is not None and total.gradient is not None and mean.gradient is not None:
        _near_rows("gradient of the sum", each.gradient, total.gradient, each.rows + total.rows)
        tolerances = total.rows / number + mean.rows
        _near_rows("gradient of the mean", total.gradient / number, mean.gradient, tolerances)
    if "mean_pairs" in case.entry.choices["reduction"]:
        counted, positives = case.counted(), case.positives()
        pairs = [len(positives[i]) for i in counted]
        over_pairs = _ask(subject, case, reduction="mean_pairs")
        weighted = sum(max(k, 1) * v for k, v in zip(pairs, each.values, strict=True)) / max(sum(pairs), 1)
        allowed = sum(k * b for k, b in zip(pairs, each.bounds.values, strict=True)) / max(sum(pairs), 1)
        _near("mean over pairs", weighted, over_pairs.values[0], allowed + over_pairs.bounds.values[0] + sizes)


@_property("base temperature", "with a base temperature the loss is multiplied by temperature / base temperature")
def _base_temperature(subject: Subject, case: Case) -> None:
    temperature = float(case.option("temperature"))
    base = case.option("base_temperature") or 2 * temperature
    based = _ask(subject, case, base_temperature=base)
    _agree(based, _ask(subject, case, base_temperature=None), factor=temperature / base)


@_property(
    "policies",
    "a policy decides what anchors without positives or without negatives add, and touches no other",
    _within,
)
def _policies(subject: Subject, case: Case) -> None:
    positives = case.positives()
    anchors = case.anchors()
    known = case.entry.choices
    zero = _ask(subject, case, no_positive="zero", no_negative="zero", reduction="none")
    lonely = [i for i in anchors if not positives[i]]
    if "no_positive" in known:
        for i in lonely:
            _near(f"anchor {i}, without positive", 0.0, zero.anchors[i], zero.bounds.anchors[i])
        _same_but(zero, _ask(subject, case, no_positive="nan", no_negative="zero", reduction="none"), lonely)
        dropped = _ask(subject, case, no_positive="drop", no_negative="zero", reduction="none")
        for i, value in zip((i for i in anchors if i not in lonely), dropped.values, strict=True):
            tolerance = zero.bounds.anchors[i] + dropped.bounds.anchors[i]
            _near(f"anchor {i}, the lonely dropped", zero.anchors[i], value, tolerance)
    if "no_negative" in known:
        policies = {"no_positive": "zero", "no_negative": "nan"}
        undefined = sorted(_with(case, **policies).undefined())
        _same_but(zero, _ask(subject, case, reduction="none", **policies), undefined)


def _same_but(plain: _Found, found: _Found, undefined: Sequence[int]) -> None:
    """The same values, but NaN for the anchors that the policy is about."""
    for i, value in plain.anchors.items():
        tolerance = 0.0 if i in undefined else plain.bounds.anchors[i] + found.bounds.anchors[i]
        _near(f"anchor {i}", math.nan if i in undefined else value, found.anchors[i], tolerance)


PROPERTIES: tuple[Property, ...] = tuple(_PROPERTIES)
"""Every property."""
