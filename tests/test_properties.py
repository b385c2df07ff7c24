"""Properties: ``reference`` and ``fast`` satisfy all of them, and each of them catches a mistake."""

from __future__ import annotations

import builtins
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pairproof.conformance.implementations.fast import Fast, FastExact, FastTiled
from pairproof.conformance.implementations.reference import Reference
from pairproof.conformance.implementations.scipy_losses import ScipyLosses
from pairproof.conformance.judge.properties import PROPERTIES, Property, Refused, Subject, batches, hunt
from pairproof.conformance.suite.cases import Case, call_reference
from pairproof.conformance.suite.catalogue import IGNORED, LOSSES, WEIGHTS
from pairproof.conformance.suite.records import Outcome
from pairproof.conformance.truth.certify import certify

Evaluate = Callable[[Case], Outcome]

FAST = Fast({}, "cpu")
OURS = (
    Subject.of(Reference({}, "cpu"), "float64"),
    Subject.of(FAST, "float64"),
    Subject.of(FAST, "float32"),
    Subject.of(FastTiled({}, "cpu"), "float32"),
    Subject.of(FastExact({}, "cpu"), "float32"),
)
BY_NAME = {prop.name: prop for prop in PROPERTIES}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def properties_and_losses() -> Iterator[Any]:
    """Yield every property with every loss and six examples, which is slow, and every second one with two examples."""
    for number, prop in enumerate(PROPERTIES):
        if number % 2:
            loss = prop.losses[number % len(prop.losses)]
            yield pytest.param(prop, loss, 2, id=f"{prop.name}-{loss}-2")
        for loss in prop.losses:
            yield pytest.param(prop, loss, 6, id=f"{prop.name}-{loss}-6", marks=pytest.mark.slow)


@pytest.mark.parametrize(("prop", "loss", "examples"), list(properties_and_losses()))
def test_reference_and_fast_satisfy_the_property(prop: Property, loss: str, examples: int) -> None:
    found = hunt(prop, loss, OURS, examples=examples)
    assert found.violation is None, found.violation
    # Draws may repeat for small batches, but every subject must be tested on at least half as many.
    assert min(found.tested.values()) >= examples // 2


def honest(case: Case) -> Outcome:
    return FAST.evaluate(case, "float64")


def changed(**changes: Callable[[Case], Any]) -> Evaluate:
    """The right loss on a case with changed fields."""
    return lambda case: honest(replace(case, **{name: change(case) for name, change in changes.items()}))


def keyword(name: str, change: Callable[[Any], Any]) -> Evaluate:
    """The right loss with one changed keyword."""
    return changed(keywords=lambda case: {**case.keywords, name: change(case.option(name))})


def one_direction(case: Case) -> Outcome:
    """Only the first view's rows are anchors."""
    if case.option("anchors") is not None:
        return honest(case)
    return honest(replace(case, keywords={**case.keywords, "anchors": [2 * k < case.n for k in range(case.n)]}))


def anchors_alone(case: Case) -> Outcome:
    """Denominators contain only the rows that are anchors."""
    kept = case.anchors()
    if len(kept) < 2:
        return honest(case)
    labels = [case.arguments["labels"][i] for i in kept]
    keywords = {**case.keywords, "anchors": None}
    found = honest(replace(case, embeddings=case.embeddings[kept], arguments={"labels": labels}, keywords=keywords))
    assert found.anchors is not None
    assert found.gradient is not None
    gradient = np.zeros_like(case.embeddings)
    gradient[kept] = found.gradient
    return replace(found, gradient=gradient, anchors={i: found.anchors[k] for k, i in enumerate(kept)})


def detached_norm(case: Case) -> Outcome:
    """The gradient does not flow through the norm of a row."""
    if case.option("similarity") == "dot":
        return honest(case)
    norms = np.linalg.norm(case.embeddings, axis=1, keepdims=True)
    found = honest(replace(case, embeddings=case.embeddings / norms, keywords={**case.keywords, "similarity": "dot"}))
    assert found.gradient is not None
    return replace(found, gradient=found.gradient / norms)


def detached_others(case: Case) -> Outcome:
    """The gradient flows only to the anchor: the gathered rows of the batch are detached."""
    rows = torch.tensor(case.embeddings, requires_grad=True)
    labels = torch.tensor(case.arguments["labels"])
    unit = torch.nn.functional.normalize(rows, dim=1) if case.option("similarity") == "cosine" else rows
    s = unit @ unit.detach().T / case.option("temperature")
    others = ~torch.eye(case.n, dtype=torch.bool)
    log_prob = s - s.masked_fill(~others, -math.inf).logsumexp(1, keepdim=True)
    positives = (labels[:, None] == labels) & others
    each = -(log_prob * positives).sum(1) / positives.sum(1).clamp(min=1)
    (gradient,) = torch.autograd.grad(each.mean(), rows)
    return Outcome(values=[each.mean().item()], gradient=gradient.numpy())


def naive(case: Case, *, self_in_denominator: bool = False, keep_diagonal: bool = False) -> Outcome:
    """L_out in numpy, without a gradient; optionally with the diagonal in the denominator or among the positives."""
    s = np.array(call_reference(case).terms.logits)
    mask = np.array(case.positive_mask())
    diagonal = np.eye(case.n, dtype=bool)
    top = s.max(axis=1, keepdims=True)
    denominator = np.log(np.exp(s - top).sum(axis=1, where=~diagonal | self_in_denominator)) + top[:, 0]
    each = np.zeros(case.n)
    for i in case.anchors():
        positives = [j for j in range(case.n) if mask[i, j] and (j != i or keep_diagonal)]
        each[i] = np.mean([denominator[i] - s[i, j] for j in positives]) if positives else 0.0
    return Outcome(values=[float(np.mean(each[case.anchors()]))] if case.anchors() else [0.0])


def doubled(case: Case) -> Outcome:
    """The sum of two directions instead of their mean; other losses are right."""
    found = honest(case)
    if case.loss != "nt_xent":
        return found
    assert found.gradient is not None
    assert found.anchors is not None
    anchors = {i: 2 * v for i, v in found.anchors.items()}
    return Outcome([2 * v for v in found.values], 2 * found.gradient, anchors)


def upper_triangle(case: Case) -> Mapping[str, Any]:
    """Each pair of positives is used only in one direction."""
    return {"positives": np.triu(np.array(case.positive_mask())).tolist()}


def repeated_pairs_count(case: Case) -> Outcome:
    """A pair counts as often as it is listed."""
    found = honest(case)
    extra = len(case.arguments["positive_pairs"]) - len({tuple(pair) for pair in case.arguments["positive_pairs"]})
    return replace(found, values=[v * (1 + extra) for v in found.values], anchors=None)


def swapped_logarithm(case: Case) -> str:
    return {"supcon": "supcon_in", "supcon_in": "supcon"}.get(case.loss, case.loss)


def stacked(case: Case) -> Mapping[str, Any]:
    return {"partners": [(i + case.n // 2) % case.n for i in range(case.n)]}


def detached_tower(case: Case) -> Outcome:
    """The second tower gets no gradient."""
    found = honest(case)
    others = {name: gradient * (name != "embeddings_b") for name, gradient in found.other_gradients.items()}
    return replace(found, other_gradients=others)


def rows_beside_the_queue(case: Case) -> Outcome:
    """With explicit negatives, the rows of the second tower, except the first, stay in the denominator."""
    if "negatives" not in case.others:
        return honest(case)
    more = np.concatenate([case.others["negatives"], case.others["embeddings_b"][1:]])
    found = honest(replace(case, others={**case.others, "negatives": more}))
    cut = {**found.other_gradients, "negatives": found.other_gradients["negatives"][: len(case.others["negatives"])]}
    return replace(found, other_gradients=cut)


def ignored_positives_only(case: Case) -> Mapping[str, Any]:
    """Ignored pairs are left out of the positives, but not of the denominator."""
    arguments = dict(case.arguments)
    if "ignored" in arguments and "labels" in arguments:
        mask = np.array(case.positive_mask()) & ~np.array(arguments.pop("ignored"))
        del arguments["labels"]
        arguments["positives"] = mask.tolist()
    return arguments


def positives_with_equal_ids_left_out(case: Case) -> Mapping[str, Any]:
    """Positives with the id of the row are left out too."""
    arguments = dict(case.arguments)
    if "ignored_ids" in arguments:
        ids = arguments.pop("ignored_ids")
        arguments["ignored"] = np.equal.outer(ids, ids).tolist()
    return arguments


def inverted(case: Case) -> Mapping[str, Any]:
    """The mask marks the pairs that are kept."""
    arguments = dict(case.arguments)
    if "ignored" in arguments:
        arguments["ignored"] = (~np.array(arguments["ignored"])).tolist()
    return arguments


def no_zero_weights(case: Case) -> Mapping[str, Any]:
    """Weights of negatives are at least 0.01."""
    arguments = dict(case.arguments)
    if "negative_weights" in arguments:
        arguments["negative_weights"] = np.maximum(arguments["negative_weights"], 0.01).tolist()
    return arguments


def mean_over_the_rows(case: Case) -> Outcome:
    """The mean divides by the number of anchors, not by the sum of their weights."""
    found = honest(case)
    if "anchor_weights" not in case.arguments or case.option("reduction") != "mean":
        return found
    factor = sum(case.arguments["anchor_weights"]) / case.n
    assert found.gradient is not None
    return replace(found, values=[factor * x for x in found.values], gradient=factor * found.gradient)


DEFAULTS = dict.fromkeys(("anchors", "base_temperature"))
PLAIN = {"denominator": "all", "reduction": "mean", "no_positive": "zero", "no_negative": "zero", **DEFAULTS}

FAULTS: dict[str, tuple[str, tuple[str, ...], Evaluate]] = {
    "stacked partners instead of those passed": ("nt_xent", ("permutation", "view order"), changed(arguments=stacked)),
    "labels narrowed to eight bits": (
        "supcon",
        ("relabelling",),
        changed(arguments=lambda case: {k: np.array(v).astype(np.int8).tolist() for k, v in case.arguments.items()}),
    ),
    "the last column is doubled": (
        "supcon",
        ("rotation",),
        changed(embeddings=lambda case: case.embeddings * ([1.0] * (case.embeddings.shape[1] - 1) + [2.0])),
    ),
    "one direction instead of both": (
        "info_nce",
        ("towers",),
        keyword("direction", lambda direction: "a_to_b" if direction == "both" else direction),
    ),
    "the second tower is detached": ("info_nce", ("no torque", "towers"), detached_tower),
    "the second tower of a sum of pairs is detached": ("sigmoid", ("swapped towers",), detached_tower),
    "rows beside the queue": ("info_nce", ("permutation", "identical rows", "hot"), rows_beside_the_queue),
    "rows are never normalised": (
        "nt_xent_pairwise",
        ("scale", "orthogonal gradient"),
        keyword("similarity", lambda _: "dot"),
    ),
    "the norm is detached": ("supcon", ("orthogonal gradient",), detached_norm),
    "the gathered rows are detached": ("supcon", ("no torque",), detached_others),
    "one direction": ("nt_xent", ("directions",), one_direction),
    "each positive pair in one direction": (
        "supcon_in",
        ("duplicates", "permutation"),
        changed(arguments=upper_triangle),
    ),
    "only anchors are in the denominator": ("supcon", ("subset of anchors",), anchors_alone),
    "self in the denominator": (
        "supcon",
        ("identical rows", "hot"),
        lambda case: naive(case, self_in_denominator=True),
    ),
    "the temperature is ignored": ("nt_bxent", ("hot", "identical rows"), keyword("temperature", lambda _: 1.0)),
    "both directions added": ("nt_xent", ("one positive each", "identical rows"), doubled),
    "logarithms inside and outside swapped": ("supcon", ("order",), changed(loss=swapped_logarithm)),
    "the mask's diagonal counts": ("supcon", ("never its own positive",), lambda case: naive(case, keep_diagonal=True)),
    "repeated pairs count": ("nt_bxent", ("never its own positive",), repeated_pairs_count),
    "mean over pairs instead of anchors": (
        "nt_xent_pairwise",
        ("reductions",),
        keyword("reduction", lambda x: "mean_pairs" if x == "mean" else x),
    ),
    "anchors without positives are dropped": (
        "supcon",
        ("policies", "reductions", "identical rows"),
        keyword("no_positive", lambda _: "drop"),
    ),
    "base temperature inverted": (
        "supcon_epsilon",
        ("base temperature",),
        changed(
            keywords=lambda case: {
                **case.keywords,
                "base_temperature": case.option("base_temperature")
                and case.option("temperature") ** 2 / case.option("base_temperature"),
            }
        ),
    ),
    "ignored pairs stay in the denominator": (
        "supcon",
        ("ignored rows",),
        changed(arguments=ignored_positives_only),
    ),
    "positives with equal ids are left out": (
        "nt_bxent",
        ("equal ids",),
        changed(arguments=positives_with_equal_ids_left_out),
    ),
    "the mask of ignored pairs is inverted": ("supcon_in", ("nothing ignored",), changed(arguments=inverted)),
    "weights of positives are always divided by": (
        "supcon",
        ("equal weights",),
        changed(
            keywords=lambda case: (
                {**case.keywords, "weights_divisor": "weight"}
                if "positive_weights" in case.arguments
                else case.keywords
            )
        ),
    ),
    "negatives of weight 0 have a small weight": (
        "nt_xent_pairwise",
        ("negatives of weight 0",),
        changed(arguments=no_zero_weights),
    ),
    "the mean divides by the number of anchors": ("nt_xent", ("anchors of weight 0",), mean_over_the_rows),
    "a row of zeros gets a unit vector of equal entries": (
        "supcon",
        ("zero rows",),
        changed(embeddings=lambda case: case.embeddings + ~case.embeddings.any(axis=1, keepdims=True)),
    ),
    "the policy no_negative is ignored": ("nt_bxent", ("policies",), keyword("no_negative", lambda _: "zero")),
}
CAUGHT = [(fault, name) for fault, (_, names, _) in FAULTS.items() for name in names]
DEFAULTS_ONLY = ("self in the denominator", "the mask's diagonal counts", "the gathered rows are detached")
"""Faults that support only the default options and return no values of anchors."""


def plain_only(case: Case) -> str | None:
    if not {*IGNORED, *WEIGHTS}.isdisjoint(case.arguments):
        return "takes no ignored pairs and no weights"
    different = [name for name, value in PLAIN.items() if case.option(name) not in (value, None)]
    return f"supports only the default of {different[0]}" if different else None


NAIVE = Subject(naive, refuses=plain_only)


@pytest.mark.parametrize(("fault", "name"), CAUGHT, ids=[f"{fault}-{name}" for fault, name in CAUGHT])
@pytest.mark.quick(14)
def test_property_catches_the_mistake(fault: str, name: str) -> None:
    loss, _, evaluate = FAULTS[fault]
    prop = BY_NAME[name]
    refuses = (lambda case: None) if fault not in DEFAULTS_ONLY else plain_only
    options = PLAIN if fault in DEFAULTS_ONLY else {}
    if fault == "the gathered rows are detached":
        prop = replace(prop, kind="labelled")
    subject = Subject(evaluate, refuses=refuses, name=fault)
    violation = hunt(prop, loss, [subject], options=options, examples=150, simplify=False).violation
    assert violation is not None
    first, batch = violation.split("\nthe case: ")
    assert first.startswith(f"{fault}, {loss}: {name}: ")
    assert "Error" not in first, "caught for the wrong reason"
    assert set(json.loads(batch)) == {"embeddings", "arguments", "keywords"}


def test_every_property_catches_a_mistake() -> None:
    assert {name for _, name in CAUGHT} == set(BY_NAME)
    assert {name for prop in PROPERTIES for name in prop.losses} == set(LOSSES)
    assert len(BY_NAME) == len(PROPERTIES)


@pytest.mark.parametrize("examples", [5, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("prop", [p for p in PROPERTIES if "supcon" in p.losses], ids=lambda prop: prop.name)
@pytest.mark.quick(8)
def test_naive_loss_without_mistakes_satisfies_the_properties(prop: Property, examples: int) -> None:
    found = hunt(prop, "supcon", [NAIVE], options=PLAIN, examples=examples)
    assert found.violation is None, found.violation


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_subject_without_gradients_is_supported(step: int) -> None:
    subject = Subject.of(ScipyLosses({}, "cpu"), "float64")
    for prop in PROPERTIES[::step]:
        found = hunt(prop, prop.losses[0], [subject], examples=2)
        assert found.violation is None, found.violation
        assert found.tested[subject.name]


CASE = Case("drawn/supcon", "supcon", np.array([[1.0, 2.0], [2.0, -1.0], [1.0, 1.0]]), {"labels": [0, 0, 1]}, {})


def test_exception_and_wrong_number_of_values_are_violations() -> None:
    def crash(case: Case) -> Outcome:
        raise RuntimeError("out of\norder")

    text = BY_NAME["permutation"].violation(Subject(crash), CASE)
    assert text is not None
    assert "RuntimeError: out of (" in text
    text = BY_NAME["permutation"].violation(Subject(lambda case: Outcome(values=[1.0, 2.0])), CASE)
    assert text is not None
    assert "expected 1 values" in text


def test_nan_breaks_only_relations_with_a_finite_result() -> None:
    subject = Subject(lambda case: Outcome(values=[math.nan]))
    assert BY_NAME["permutation"].violation(subject, CASE) is None
    assert BY_NAME["identical rows"].violation(subject, CASE) is not None


def test_nondeterministic_subject_is_reported() -> None:
    noise = iter(range(10**6))

    def noisy(case: Case) -> Outcome:
        return Outcome(values=[float(next(noise) == 15)])

    found = hunt(BY_NAME["permutation"], "supcon", [Subject(noisy, name="noisy")], options=PLAIN)
    assert found.violation is not None
    assert found.violation.startswith("noisy, supcon: permutation: ")
    assert "not deterministic" in found.violation


def test_refused_cases_are_not_counted() -> None:
    subject = Subject(honest, refuses=lambda case: "does nothing")
    with pytest.raises(Refused, match="does nothing"):
        BY_NAME["permutation"].violation(subject, CASE)
    with pytest.raises(Refused, match="not exactly representable in bfloat16"):
        BY_NAME["permutation"].violation(
            Subject(honest, "bfloat16"), replace(CASE, embeddings=CASE.embeddings + 2.0**-20)
        )
    found = hunt(BY_NAME["permutation"], "supcon", [subject], examples=5)
    assert found.violation is None
    assert found.tested == {subject.name: 0}
    one_loss = Subject(honest, refuses=lambda case: None if case.loss == "supcon" else "another loss")
    paired = replace(CASE, embeddings=CASE.embeddings[:2], arguments={"labels": [5, 5]})
    assert BY_NAME["one positive each"].violation(one_loss, paired) is None


def test_property_applies_to_its_kind_of_case() -> None:
    assert not BY_NAME["one positive each"].applies(CASE)
    assert not BY_NAME["view order"].applies(CASE)
    assert not BY_NAME["directions"].applies(CASE)
    assert not BY_NAME["relabelling"].applies(replace(CASE, arguments={"positives": np.eye(3, dtype=bool).tolist()}))
    assert not BY_NAME["orthogonal gradient"].applies(replace(CASE, keywords={"similarity": "dot"}))
    assert not BY_NAME["never its own positive"].applies(replace(CASE, loss="nt_xent"))
    with pytest.raises(ValueError, match="'one positive each' does not apply to the case drawn/supcon"):
        BY_NAME["one positive each"].violation(OURS[0], CASE)


@pytest.mark.parametrize(
    "loss",
    [
        loss if loss in ("supcon", "nt_xent", "nt_bxent", "info_nce") else pytest.param(loss, marks=pytest.mark.slow)
        for loss in LOSSES
    ],
)
@pytest.mark.quick(1)
def test_drawn_batches_are_of_the_kind_of_the_property(loss: str) -> None:
    def check(subject: Subject, case: Case) -> None:
        assert case.holds_in("bfloat16")
        assert case.holds_in("float16")

    for prop in PROPERTIES:
        if loss in prop.losses:
            found = hunt(replace(prop, relate=check), loss, [Subject(honest)], examples=10)
            assert found.violation is None
            assert min(found.tested.values()) >= 5


def test_violation_shows_the_simplest_batch() -> None:
    subject = Subject(lambda case: naive(case, self_in_denominator=True))
    prop = replace(BY_NAME["identical rows"], kind="labelled")
    text = hunt(prop, "supcon", [subject], options=PLAIN, examples=20).violation
    assert text is not None
    simplest = json.loads(text.split("\nthe case: ")[1])
    assert simplest["embeddings"] == [[1.0], [1.0]]
    assert simplest["arguments"] == {"labels": [0, 0]}


def test_violation_can_become_a_golden_case() -> None:
    text = BY_NAME["identical rows"].violation(Subject(lambda case: naive(case, self_in_denominator=True)), CASE)
    assert text is not None
    data = json.loads(text.split("\nthe case: ")[1])
    case = Case("golden/supcon/found", "supcon", np.array(data["embeddings"]), data["arguments"], data["keywords"])
    assert certify(case).loss == pytest.approx(call_reference(case).loss, rel=1e-14)


def test_unknown_kind_raises_an_error() -> None:
    with pytest.raises(ValueError, match="kind: expected one of any, labelled, views, paired, got 'odd'"):
        batches("supcon", "odd")


@pytest.mark.slow  # starts a process that imports torch
def test_hypothesis_is_imported_only_to_draw_batches() -> None:
    program = "import sys, pairproof.conformance.judge.properties; print('hypothesis' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


def test_batches_without_hypothesis_name_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("hypothesis"):
            raise ImportError("No module named 'hypothesis'")
        return plain(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r'drawn with hypothesis .*: pip install "\./pairproof\[verify\]"'):
        batches("supcon")
