"""Properties: what must hold between the results of a loss on related batches, whatever the results are.

A property needs no expected value, so it can be asked of any implementation on any batch. Each takes a *subject* (an
implementation in one dtype) and a *case* (a drawn batch with its options), derives related cases whose inputs are exact
again, and says how their results break the relation, or nothing. Batches are drawn with Hypothesis:

    subject = Subject.of(Fast({}, "cpu"), "float32")
    for prop in PROPERTIES:
        for loss in prop.losses:
            found = hunt(prop, loss, [subject])          # found.violation, found.asked

An implementation refuses what it does not have; ``options={"reduction": "mean", "anchors": None}`` draws nothing else.

*Results* are one table: the loss, the value of every anchor, the gradient of every row, each with its bound. A relation
brings the tables of related cases to the same rows, and ``_agree`` compares what both have.

*Tolerances.* Every result is within its bound of the truth (``tolerances.bounds``), and of true results the relation
holds exactly; so two results may miss it by the sum of their bounds, each times the factor with which it enters the
relation, and by nothing else but the n - 1 roundings of a sum of n values, which is made here. Where the relation is a
limit, what is left at a finite temperature is derived there.

A gradient is compared unless it does not exist: the loss is NaN, or has a kink there (``certify.maximum_is_tied``).
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

from pairproof.reference import stacked_partners

from ..suite.cases import Case
from ..suite.catalogue import CHOICES, COMMON, LOSSES, Loss
from ..suite.records import Matrix, Outcome
from ..truth.baseline import anchor_values
from ..truth.certify import maximum_is_tied
from ..truth.evaluate import truth
from ..truth.tolerances import bounds

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from ..implementations import Implementation

Results = dict[tuple[str, int], tuple[Any, float]]
"""A subject's results on a case, and how far each may be off.

("loss", 0) is missing for reduction "none"; ("anchor", i) is the value of an anchor; ("gradient", k) is that of a row
[D], as ``_rows`` counts them.
"""

Claim = Callable[[Loss], bool]
Relation = Callable[["Subject", Case], None]

HOT = 2.0**30
"""A temperature at which every logit is next to 0."""

ROUNDING = 2.0**-53
"""Of the float64 in which relations are computed."""

KINDS = ("any", "labelled", "views", "paired")


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


def _ordered(loss: Loss) -> bool:
    """Whether the loss is at least what each of its relatives gives, anchor by anchor."""
    return _labelled(loss) and loss.form == "mean" and "denominator" in loss.keywords


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
        name = f"{implementation.name} in {dtype}"
        return cls(lambda case: implementation.evaluate(case, dtype), dtype, implementation.refuses, name)


@dataclass(frozen=True)
class Property:
    """A relation that results must satisfy.

    Attributes:
        name: short name.
        claimed: whether it holds for a loss of the catalogue.
        kind: of batch, as ``batches`` draws it: "any"; "labelled", its positives given by labels; "views", two views
            of every item stacked; "paired", every label twice.
        fixed: the options at which alone it holds.
        relate: raises where the relation breaks; its docstring says the relation in words.
    """

    name: str
    claimed: Claim
    kind: str
    fixed: Mapping[str, Any]
    relate: Relation = field(repr=False)

    @property
    def losses(self) -> tuple[str, ...]:
        """The losses for which it holds."""
        return tuple(name for name, loss in LOSSES.items() if self.claimed(loss))

    def applies(self, case: Case) -> bool:
        """Whether the relation is claimed for a case."""
        as_fixed = all(case.option(name) == value for name, value in self.fixed.items() if name in case.entry.keywords)
        return self.claimed(case.entry) and _is_of_kind(case, self.kind) and as_fixed

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

    # The batches that are drawn depend on this function's text.
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
    violation = None
    try:
        settings(hypothesis.given(batches(loss, prop.kind, {**options, **prop.fixed}))(ask))()
    except _Broken as broken:
        violation = str(broken)
    except hypothesis.errors.Flaky:
        violation = f"{', '.join(asked)}, {loss}: {prop.name}: broken once and not when asked again: not deterministic"
    return Hunt(violation, asked)


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
        if entry.two_towers and draw(st.booleans()):
            more["negatives"] = draw(st.integers(1, 3))
        total = n + sum(more.values())
        dim = draw(st.integers(1, 3))
        keywords = {name: draw(st.sampled_from(values)) for name, values in entry.choices.items()}
        cosine = fixed.get("similarity", keywords["similarity"]) == "cosine"
        temperatures = (0.5, 0.07, 0.1, 1.0, 2.0) if cosine else (1.0, 0.5, 10.0, 64.0)
        keywords["temperature"] = draw(st.sampled_from(temperatures))
        keywords["base_temperature"] = draw(st.sampled_from((None, 0.07, 0.5)))
        if "anchors" in entry.keywords:
            keywords["anchors"] = draw(st.none() | several(st.booleans(), n))
        keywords |= {name: value for name, value in fixed.items() if name in entry.keywords}

        rows = np.array(draw(several(st.integers(-15, 15), total * dim)), dtype=np.float64).reshape(total, dim)
        if cosine:
            rows[~rows.any(axis=1), 0] = 1.0
        sizes = draw(several(st.integers(-6, 6), total)) if cosine else [draw(st.integers(-4, -2))]
        first, *others = np.split(np.ldexp(rows, np.array(sizes)[:, None]), np.cumsum([n, *more.values()])[:-1])
        arguments = {entry.targets: _targets(draw, st, entry.targets, kind, n)} if entry.targets else {}
        if kind == "any" and "positives" in entry.keywords and draw(st.booleans()):
            arguments = {"positives": draw(several(several(st.booleans(), n), n))}
        changed = {name: value for name, value in keywords.items() if value != entry.keywords[name]}
        return Case(f"drawn/{loss}", loss, first, arguments, changed, others=dict(zip(more, others, strict=True)))

    strategy: SearchStrategy[Case] = st.composite(drawn)()
    return strategy


def _targets(draw: Callable[[Any], Any], st: Any, name: str, kind: str, n: int) -> Any:
    """Labels, partners or pairs of a batch of one kind."""
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
        raise ImportError(f'batches are drawn with hypothesis ({error}): pip install "pairproof[verify]"') from None
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
    """The case as a golden file takes it: with an id, flags and a note it is one, once its results are proved."""
    given = {name: np.asarray(value).tolist() for name, value in {**case.arguments, **case.others}.items()}
    return json.dumps({"embeddings": case.embeddings.tolist(), "arguments": given, "keywords": dict(case.keywords)})


_truth = lru_cache(maxsize=64)(truth)


def _ask(subject: Subject, case: Case, **changed: Any) -> Results:
    """Evaluate a case, some of its keywords changed."""
    if changed:
        case = _with(case, **changed)
    if (reason := subject.refuses(case)) is not None:
        raise Refused(reason)
    if not case.holds_in(subject.dtype):
        raise Refused(f"inputs are not exactly representable in {subject.dtype}")
    try:
        outcome = subject.evaluate(case)
    except Exception as error:  # a crash of outside code is a result
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        raise _Broken(f"{message} ({case.loss}, {dict(case.keywords)})") from error
    true = _truth(case)
    if len(outcome.values) != len(true.values):
        raise _Broken(f"expected {len(true.values)} values for {dict(case.keywords)}, got {len(outcome.values)}")
    allowed = bounds(case, true, subject.dtype)
    found: Results = {}
    if case.option("reduction") == "none":
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
    """Compare what both have."""
    for (what, k), (x, tolerance) in first.items():
        if (what, k) in second:
            y, more = second[what, k]
            _near("loss" if what == "loss" else f"{what} {k}", x, y, tolerance + more)


def _near(what: str, first: Any, second: Any, tolerance: float) -> None:
    """Compare two floats, which may both be NaN or infinite, or two vectors by their distance."""
    if np.ndim(first) == 0 and np.array_equal(first, second, equal_nan=True):
        return
    error = math.dist(np.atleast_1d(first), np.atleast_1d(second))
    if not error <= tolerance:
        times = f"{error / tolerance if tolerance else math.inf:.3g} times the tolerance {tolerance:.3g}"
        found = f"{np.asarray(first).tolist()!r} against {np.asarray(second).tolist()!r}"
        raise _Broken(f"{what}: {found}, apart by {times}")


def _only(results: Results, *what: str) -> Results:
    return {key: part for key, part in results.items() if key[0] in what}


def _sum(first: Results, second: Results) -> Results:
    """The loss and the gradient of two cases added up, as far as both have them, and the anchors that either has."""
    either = _only(second | first, "anchor")
    both = {key: (*first[key], *second[key]) for key in first if key in second and key not in either}
    return either | {key: (x + y, tolerance + more) for key, (x, tolerance, y, more) in both.items()}


def _multiplied(results: Results, factor: float) -> Results:
    return {key: (factor * value, factor * tolerance) for key, (value, tolerance) in results.items()}


def _reduced(case: Case, each: Results) -> Results:
    """Results that have the values of a case's anchors, and with them the loss, by the case's reduction."""
    reduction, counted, positives = case.option("reduction"), case.counted(), case.positives()
    if reduction == "none":
        return each
    sizes = [len(positives[i]) if reduction == "mean_pairs" else 1 for i in counted]
    divisor = 1 if reduction == "sum" else max(sum(sizes), 1)
    values, tolerances = np.array([each["anchor", i] for i in counted]).reshape(-1, 2).T
    tolerances = tolerances + ROUNDING * (len(counted) - 1) * np.abs(values)
    return each | {("loss", 0): (float(values @ sizes) / divisor, float(tolerances @ sizes) / divisor)}


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
    changed = {name: value for name, value in changed.items() if name in case.entry.keywords}
    return replace(case, keywords={**case.keywords, **changed})


def _with_mask(case: Case, mask: npt.NDArray[np.bool_]) -> Case:
    """The case with its positives given by a mask, or by pairs where the loss takes those."""
    if case.entry.positives_by == "pairs":
        return replace(case, arguments={"positive_pairs": [(int(i), int(j)) for i, j in np.argwhere(mask)]})
    return replace(case, arguments={"positives": mask.tolist()})


def _reordered(case: Case, order: list[int]) -> Case:
    """The case whose row k is this one's row ``order[k]``, of every matrix."""
    place = np.argsort(order)
    take: dict[str, Callable[[Any], Any]] = {
        "labels": lambda labels: np.array(labels)[order],
        "partners": lambda partners: place[np.array(partners)[order]],
        "positives": lambda mask: np.array(mask)[np.ix_(order, order)],
        "positive_pairs": lambda pairs: place[np.array(pairs, dtype=int).reshape(-1, 2)],
    }
    arguments = {name: take[name](value).tolist() for name, value in case.arguments.items()}
    chosen = case.option("anchors")
    reordered = replace(_with_rows(case, _rows(case)[order]), arguments=arguments)
    return reordered if chosen is None else _with(reordered, anchors=[chosen[i] for i in order])


def _ask_reordered(subject: Subject, case: Case, order: list[int], **changed: Any) -> Results:
    """The results on ``_reordered``, some keywords changed, by the rows of the case."""
    reordered = _with(_reordered(case, order), **changed)
    # The anchors of one direction between two towers are counted from 0, whichever tower they are.
    place = {"loss": [0], "anchor": [i % reordered.shape[0] for i in order], "gradient": order}
    return {(what, place[what][k]): part for (what, k), part in _ask(subject, reordered).items()}


def _hold_mapped(subject: Subject, case: Case, maps: Sequence[Matrix]) -> None:
    """Hold the results on mapped rows against the case's own.

    Args:
        subject: what is asked.
        case: the case.
        maps: a multiple of a rotation or of a reflection for each row; of dot products, the same one.
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
    """The loss and the anchors' values where every logit is the same, the diagonal's too, each to within a slack.

    Args:
        case: for the sets, the options and the reduction.
        logit: the value of every logit.
        slack: of an anchor's value, in units of 1 plus its size.
    """
    values = anchor_values(case, torch.full(case.shape, logit, dtype=torch.float64)).numpy()
    if case.entry.form == "binary":  # torch's softplus leaves out what is below e^-20
        positive, others = (np.array(list(map(len, sets))) for sets in (case.positives(), case.members()))
        attract, repel = np.logaddexp(0, (-logit, logit))
        values = positive / (positive + 1) * attract + np.where(others > positive, repel, 0.0)
    values[list(case.undefined())] = math.nan
    return _reduced(case, {("anchor", i): (values[i], slack * (1 + abs(values[i]))) for i in case.counted()})


def _of_other_losses(
    subject: Subject, case: Case, arguments: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[Loss, str, Results]]:
    """The results of other losses on the same batch with each of their denominators, as far as the subject has them.

    Args:
        subject: what is asked.
        case: for the batch and the options.
        arguments: by loss, what gives it the same positives.
    """
    keywords = {name: case.option(name) for name in (*COMMON, *case.keywords)}
    for name, given in arguments.items():
        loss, other = LOSSES[name], _with(replace(case, loss=name, arguments=given, keywords={}), **keywords)
        if other.option("reduction") not in loss.choices["reduction"]:
            other = _with(other, reduction="mean")
        for denominator in loss.choices.get("denominator", (loss.variant.get("denominator", "all"),)):
            with suppress(Refused):
                yield loss, denominator, _ask(subject, other, denominator=denominator)


def _chance(case: Case) -> random.Random:
    """A generator of which the batch alone decides, so that a case repeats its violation."""
    return random.Random(zlib.crc32(case.embeddings.tobytes()))


_PROPERTIES: list[Property] = []


def _property(claimed: Claim = lambda loss: True, kind: str = "any", **fixed: Any) -> Callable[[Relation], Relation]:
    """Enter a relation among the properties, by the words of its name."""

    def enter(relate: Relation) -> Relation:
        name = relate.__name__.strip("_").replace("_", " ")
        _PROPERTIES.append(Property(name, claimed, kind, fixed, relate))
        return relate

    return enter


@_property()
def _permutation(subject: Subject, case: Case) -> None:
    """Rows in another order: anchors and gradient move along, mean and sum stay."""
    chance = _chance(case)
    order = chance.sample(range(case.n), case.n)
    if case.entry.two_towers:  # Pairs stay pairs: both towers are reordered alike, and the negatives for themselves.
        queue = range(2 * case.n, len(_rows(case)))
        order += [*(case.n + i for i in order), *chance.sample(queue, len(queue))]
    _agree(_ask(subject, case), _ask_reordered(subject, case, order))


@_property(_labelled, "labelled")
def _relabelling(subject: Subject, case: Case) -> None:
    """Only the equality of labels counts, and their mask says the same."""
    found, labels = _ask(subject, case), case.arguments["labels"]
    names = _chance(case).sample((-(2**40), -1, 0, 1, 2, 8, 256, 65536, 2**40), 9)
    new = dict(zip(sorted(set(labels)), itertools.chain(names, itertools.count(10**6)), strict=False))
    _agree(found, _ask(subject, replace(case, arguments={"labels": [new[label] for label in labels]})))
    _agree(found, _ask(subject, _with_mask(case, np.array(case.positive_mask()))))


@_property()
def _rotation(subject: Subject, case: Case) -> None:
    """Embeddings rotated or reflected: only angles and lengths count, and the gradient turns along."""
    chance, dim = _chance(case), case.embeddings.shape[1]
    matrix = np.eye(dim)[chance.sample(range(dim), dim)] * [chance.choice((-1.0, 1.0)) for _ in range(dim)]
    exact = all(Fraction(x) * 25 == Fraction(x * 25) for x in _temperatures(case).values())
    if dim > 1 and (case.option("similarity") == "cosine" or exact):
        # The triangle 3, 4, 5: a rotation by integers, which makes every row five times as long.
        turn = 5 * np.eye(dim)
        turn[:2, :2] = [[3, -4], [4, 3]]
        matrix = matrix @ turn
    _hold_mapped(subject, case, [matrix] * len(_rows(case)))


@_property()
def _scale(subject: Subject, case: Case) -> None:
    """Cosine: no row's length counts; dot: double rows at the fourfold temperature cost the same."""
    chance, cosine = _chance(case), case.option("similarity") == "cosine"
    factors = [chance.choice((0.25, 0.5, 2.0, 3.0, 5.0)) if cosine else 2.0 for _ in _rows(case)]
    _hold_mapped(subject, case, [factor * np.eye(case.embeddings.shape[1]) for factor in factors])


@_property(_within, "views")
def _view_order(subject: Subject, case: Case) -> None:
    """Two views interleaved give what they give stacked."""
    half = case.n // 2
    order = [row for item in range(half) for row in (item, half + item)]
    _agree(_ask(subject, case), _ask_reordered(subject, case, order))


@_property(_chooses_anchors, "views", anchors=None)
def _directions(subject: Subject, case: Case) -> None:
    """Two views swapped give the same loss, and what each view costs as anchors adds up to the whole."""
    half = case.n // 2
    order = [*range(half, case.n), *range(half)]
    _agree(_ask(subject, case), _ask_reordered(subject, case, order))
    one_way = {"reduction": "sum", "anchors": [k < half for k in range(case.n)]}
    there, back = _ask(subject, case, **one_way), _ask_reordered(subject, case, order, **one_way)
    _agree(_ask(subject, case, reduction="sum"), _sum(there, back))


@_property(lambda loss: loss.two_towers)
def _towers(subject: Subject, case: Case) -> None:
    """Towers changed about give the same with the direction turned round, and both directions add up to the whole."""
    n = case.n
    order = [*range(n, 2 * n), *range(n), *range(2 * n, len(_rows(case)))]
    turned = {"both": "both", "a_to_b": "b_to_a", "b_to_a": "a_to_b"}
    swapped = _ask_reordered(subject, case, order, direction=turned[case.option("direction")])
    _agree(_ask(subject, case), swapped)
    whole, there, back = (_ask(subject, case, reduction="sum", direction=direction) for direction in turned)
    _agree(whole, _sum(there, back))


@_property(_chooses_anchors, anchors=None)
def _subset_of_anchors(subject: Subject, case: Case) -> None:
    """An anchor's value does not depend on which other rows are anchors; sums over two parts of the anchors add up."""
    chance = _chance(case)
    chosen = [chance.random() < 0.5 for _ in range(case.n)]
    chosen[0] = not all(chosen)
    whole = _ask(subject, case, reduction="sum")
    parts = [_ask(subject, case, reduction="sum", anchors=[x == side for x in chosen]) for side in (True, False)]
    _agree(whole, _sum(*parts))


@_property(similarity="cosine")
def _orthogonal_gradient(subject: Subject, case: Case) -> None:
    """Under cosine each row's gradient is orthogonal to the row."""
    rows = _rows(case)
    for (_, k), (gradient, tolerance) in _only(_ask(subject, case), "gradient").items():
        _near(f"gradient of row {k} along the row", 0.0, float(gradient @ rows[k]) / math.hypot(*rows[k]), tolerance)


@_property()
def _no_torque(subject: Subject, case: Case) -> None:
    """All rows turned together change nothing, so rows transposed times gradient is symmetric."""
    rows = _rows(case)
    products, tolerance = np.zeros((rows.shape[1],) * 2), 0.0
    for (_, k), (gradient, allowed) in _only(_ask(subject, case), "gradient").items():
        products += np.outer(rows[k], gradient)
        tolerance += 2 * math.hypot(*rows[k]) * allowed
    _near("rows transposed times gradient and its transpose", products.ravel(), products.T.ravel(), tolerance)


@_property()
def _identical_rows(subject: Subject, case: Case) -> None:
    """Equal logits have a known loss: ln(N - 1) where the denominator is all others."""
    row, cosine = case.embeddings[0], case.option("similarity") == "cosine"
    same = _with(_with_rows(case, np.tile(row, (len(_rows(case)), 1))), base_temperature=None)
    logit = (1.0 if cosine else float(row @ row)) / case.temperature
    # What it is held to is itself rounded, by a few units of what it adds up.
    expected = _of_equal_logits(same, logit, 4 * ROUNDING * (1 + logit))
    if cosine:
        expected |= {("gradient", k): (np.zeros_like(row), 0.0) for k in range(len(_rows(case)))}
    _agree(expected, _ask(subject, same))


@_property()
def _hot(subject: Subject, case: Case) -> None:
    """As the temperature grows every logit goes to 0: the loss goes to that of equal logits."""
    hot = _with(case, temperature=HOT, base_temperature=None)
    longest = 1.0 if case.option("similarity") == "cosine" else float(np.linalg.norm(_rows(case), axis=1).max())
    # Logits of at most S in size move each ratio of exponentials by a factor within e^(2S), each softplus by S.
    _agree(_of_equal_logits(hot, 0.0, 2 * longest**2 / HOT + 4 * ROUNDING), _ask(subject, hot))


@_property(_coincides, "paired", denominator="all")
def _one_positive_each(subject: Subject, case: Case) -> None:
    """With one positive per anchor and one class mate, supcon, supcon_in, nt_xent and the pairwise reading are one."""
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
        raise Refused("takes none of the losses that coincide")


@_property(_ordered, denominator="all", reduction="none", no_positive="zero")
def _order(subject: Subject, case: Case) -> None:
    """Pairwise <= supcon, supcon_in <= supcon, and only_negatives <= one_positive <= all, anchor by anchor."""
    arguments = {name: case.arguments for name, loss in LOSSES.items() if _coincides(loss) and _labelled(loss)}
    # Each denominator sums no more than the one before it.
    rank = CHOICES["denominator"].index
    pairs = itertools.permutations(_of_other_losses(subject, case, arguments), 2)
    chains = [(a, b) for a, b in pairs if a[0].form in ("inside", b[0].form) and rank(a[1]) >= rank(b[1])]
    if not chains:
        raise Refused("takes one of the ordered losses alone")
    # Without negatives their denominator is empty, and the anchor adds 0 by policy.
    with_negatives = [i for i in case.anchors() if len(case.positives()[i]) < case.n - 1]
    for (less, denominator, lower), (more, other, higher) in chains:
        for i in with_negatives:
            (low, below), (high, above) = lower["anchor", i], higher["anchor", i]
            what = f"anchor {i}, by how much {less.name} {denominator} exceeds {more.name} {other}"
            _near(what, max(low - high, 0.0), 0.0, below + above)


@_property(_within)
def _duplicates(subject: Subject, case: Case) -> None:
    """Two equal rows that are each other's positives and share all others cost and learn the same."""
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
    """The diagonal of a mask, a pair of a row with itself, and a pair named twice mean nothing."""
    mask, diagonal = np.array(case.positive_mask()), np.eye(case.n, dtype=bool)
    without, full = _with_mask(case, mask & ~diagonal), _with_mask(case, mask | diagonal)
    if case.entry.positives_by == "pairs":
        pairs = full.arguments["positive_pairs"] * 2
        full = replace(case, arguments={"positive_pairs": _chance(case).sample(pairs, len(pairs))})
    _agree(_ask(subject, without), _ask(subject, full))


@_property()
def _reductions(subject: Subject, case: Case) -> None:
    """The sum is that of the anchors' values, the mean the sum over their number, gradients too."""
    each, total, mean = (_ask(subject, case, reduction=reduction) for reduction in ("none", "sum", "mean"))
    _agree(_reduced(_with(case, reduction="sum"), each), total)
    _agree(_multiplied(total, 1 / max(len(case.counted()), 1)) | _only(each, "anchor"), mean)
    if "mean_pairs" in case.entry.choices["reduction"]:
        over_pairs = _with(case, reduction="mean_pairs")
        _agree(_only(_reduced(over_pairs, each), "loss", "anchor"), _ask(subject, over_pairs))


@_property()
def _base_temperature(subject: Subject, case: Case) -> None:
    """With a base temperature the loss is multiplied by temperature / base temperature."""
    base = case.option("base_temperature") or 2 * case.temperature
    plain = _ask(subject, case, base_temperature=None)
    _agree(_ask(subject, case, base_temperature=base), _multiplied(plain, case.temperature / base))


@_property(_within)
def _policies(subject: Subject, case: Case) -> None:
    """A policy decides what anchors without positives or without negatives add, and touches no other."""
    plain = _with(case, no_positive="zero", no_negative="zero", reduction="none")
    zero, known = _ask(subject, plain), case.entry.choices
    if "no_positive" in known:
        _agree(zero, {("anchor", i): (0.0, 0.0) for i in case.anchors() if not case.positives()[i]})
    for name, policy in (("no_positive", "nan"), ("no_positive", "drop"), ("no_negative", "nan")):
        if name in known:
            other = _with(plain, **{name: policy})
            _agree(zero | {("anchor", i): (math.nan, 0.0) for i in other.undefined()}, _ask(subject, other))


PROPERTIES: tuple[Property, ...] = tuple(_PROPERTIES)
"""Every property."""
