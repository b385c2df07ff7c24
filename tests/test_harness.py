"""The harness: the size of the bounds, first differing terms, statuses, declared deviations, counts."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from pairproof import fast, install_command
from pairproof.conformance.documents.load import load_worked
from pairproof.conformance.implementations import Deviation, Implementation, Unavailable, reference
from pairproof.conformance.implementations.base import normalised, outcome_of
from pairproof.conformance.implementations.documents import StackedCriterion
from pairproof.conformance.implementations.fast import Fast, FastDense, FastExact, FastTiled, FastTriton
from pairproof.conformance.implementations.pml import PytorchMetricLearning
from pairproof.conformance.implementations.reference import Reference
from pairproof.conformance.implementations.supcontrast import SupContrast, SupContrastToday, load_file
from pairproof.conformance.judge import verify as running
from pairproof.conformance.judge.options import CouldNotRun, Selection, UsageError
from pairproof.conformance.judge.results import Check, Status, tally
from pairproof.conformance.judge.verify import load_cases, run
from pairproof.conformance.report import _of_run, as_json
from pairproof.conformance.suite.cases import Case, once
from pairproof.conformance.suite.garbage import without_collections
from pairproof.conformance.suite.golden import known_rounding, load_golden
from pairproof.conformance.suite.machine import described, machine
from pairproof.conformance.suite.records import Outcome, Truth
from pairproof.conformance.suite.subset import covering, traits_of
from pairproof.conformance.truth import tolerances
from pairproof.conformance.truth.baseline import plain_outcome
from pairproof.conformance.truth.certify import certify
from pairproof.conformance.truth.compare import compare
from pairproof.conformance.truth.evaluate import sensitivity_of, stored_truth, truth
from pairproof.conformance.truth.tolerances import (
    SMALLEST_SUBNORMAL,
    WEIGHTS_LIFTED,
    bounds,
    unit_roundoff,
)
from pairproof.fast import kernels

ROWS = np.array([[1.0, 0.5, -0.25], [0.75, -1.0, 0.5], [-0.5, 0.25, 1.5], [1.25, 1.0, 0.125]])
CASE = Case("test/case", "supcon", ROWS, {"labels": [0, 1, 0, 1]}, {"temperature": 0.5})


OTHERS = np.array([[-0.5, 1.0, 0.75], [1.5, 0.25, -1.0], [0.5, 0.5, -0.125], [-0.25, -1.0, 1.0], [1.0, -0.5, 0.375]])
REFERENCED = Case(
    "test/references",
    "supcon",
    ROWS,
    {"labels": [0, 1, 0, 1], "ref_labels": [1, 0, 0, 1, 0], "self_rows": [2, -1, -1, 0]},
    {"temperature": 0.5},
    others={"ref_embeddings": OTHERS},
)
TOWERS = Case("test/towers", "info_nce", ROWS, {}, {"temperature": 0.5}, others={"embeddings_b": OTHERS[:4]})
QUEUE = replace(
    TOWERS,
    id="test/queue",
    keywords={**TOWERS.keywords, "direction": "both"},
    others={"embeddings_b": OTHERS[:4], "negatives": -OTHERS[1:]},
)
OTHER_SHAPES = (REFERENCED, TOWERS, QUEUE)


def outcome(true: Truth) -> Outcome:
    assert true.gradient is not None
    return Outcome(
        values=list(true.values),
        gradient=true.gradient.copy(),
        anchors=dict(true.anchors),
        other_gradients={name: gradient.copy() for name, gradient in true.other_gradients.items()},
    )


@pytest.mark.parametrize("case", [CASE, *OTHER_SHAPES], ids=lambda case: case.id)
def test_proved_results_have_error_zero(case: Case) -> None:
    true = truth(case)
    comparison = compare(case, true, outcome(true), bounds(case, true, "float64"))
    assert comparison.ratio == 0
    assert not comparison.first


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_bounds_are_a_few_roundings_wide(dtype: str) -> None:
    """Check only the size of the bounds, which are derived elsewhere: neither too loose nor impossible to satisfy."""
    true = truth(CASE)
    found = bounds(CASE, true, dtype)
    accumulated = unit_roundoff("float64" if dtype == "float64" else "float32")
    assert accumulated * true.values[0] < found.values[0] < 100 * accumulated * true.values[0]
    assert true.gradient is not None
    norms = np.linalg.norm(true.gradient, axis=1)
    (rows,) = found.rows.values()
    assert (rows < 1000 * unit_roundoff(dtype) * norms.max()).all()
    assert (rows > unit_roundoff(dtype) * norms / 2).all()


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", OTHER_SHAPES, ids=lambda case: case.id)
def test_bounds_of_every_matrix_are_a_few_roundings_wide(case: Case, dtype: str) -> None:
    true = truth(case)
    found = bounds(case, true, dtype)
    gradients = found.gradients(true)
    assert set(found.rows) == set(case.matrices) == set(gradients)
    for name, rows in found.rows.items():
        norms = np.linalg.norm(gradients[name], axis=1)
        assert (rows < 1000 * unit_roundoff(dtype) * norms.max()).all()
        assert (rows > unit_roundoff(dtype) * norms / 2).all()


@pytest.mark.parametrize("case", OTHER_SHAPES, ids=lambda case: case.id)
def test_three_evaluations_agree_on_every_gradient(case: Case) -> None:
    """Interval arithmetic, the complex step and the torch baseline compute every gradient independently."""
    true = truth(case)
    proved = certify(case)
    assert proved.loss == true.loss
    for name, gradient in proved.other_gradients.items():
        assert np.array_equal(gradient, true.other_gradients[name])
    loops, plain = Reference({}, "cpu").evaluate(case, "float64"), plain_outcome(case, "float64")
    for found in (loops, plain):
        assert set(found.other_gradients) == set(case.others)
        assert compare(case, true, found, bounds(case, true, "float64")).ratio <= 1


@pytest.mark.parametrize("case", OTHER_SHAPES, ids=lambda case: case.id)
def test_weights_sum_to_zero_over_the_contrasted_columns(case: Case) -> None:
    """The weights dL/ds of an anchor sum to 0 over A(i), and are 0 outside A(i)."""
    found = sensitivity_of(case)
    assert found.shape == case.shape
    np.testing.assert_allclose(found.sum(axis=1), 0, atol=1e-15)
    for i, members in enumerate(case.members()):
        outside = [j for j in range(case.shape[1]) if j not in members]
        assert not found[i, outside].any()
        assert found[i, members].all()
    np.testing.assert_allclose(found, truth(case).weights, rtol=1e-13, atol=1e-16)
    # The squares of these rows overflow.
    others = {name: matrix * 2.0**700 for name, matrix in case.others.items()}
    large = replace(case, embeddings=case.embeddings * 2.0**700, others=others)
    np.testing.assert_array_equal(sensitivity_of(large), found)


@pytest.mark.parametrize(
    "name",
    [
        *("supcon/solved-pairs", "supcon_in/solved-tilted", "supcon/refs-solved", "info_nce/solved-queue"),
        # The enclosures of the closed form are wide.
        *("supcon/solved-pairs-tau-0-005", "nt_xent_pairwise/huge-logits-float64"),
    ],
)
def test_weights_keep_their_digits_in_solved_batches(name: str) -> None:
    """They give the proved temperature gradient, whose digits the straightforward implementation loses."""
    (golden,) = (one for one in load_golden(losses=[name.partition("/")[0]]) if one.case.id == f"golden/{name}")
    true = stored_truth(golden.case, golden.expected)
    assert true.similarity is not None
    found = -(true.weights * true.similarity).sum() / golden.case.temperature
    assert found == pytest.approx(golden.expected.temperature_gradient, rel=1e-12, abs=0)


def test_kernels_skip_only_what_they_do_not_support() -> None:
    """Products and logits beyond float32, some kinds of ignored pairs, weights of pairs, and rows of zeros."""
    held = [case for case in load_cases(load_worked()) if case.holds_in("float32")]
    expected = [
        {case.id for case in held if "ignored" in case.arguments},
        {case.id for case in held if "ignored_ids" in case.arguments and "positives" in case.arguments},
        {case.id for case in held if "ignored_ids" in case.arguments and case.loss == "supcon_epsilon"},
        {case.id for case in held if {"positive_weights", "negative_weights"} & case.arguments.keys()},
        {case.id for case in held if case.option("zero_row") == "zero"},
    ]
    assert all(expected)
    skipped = {case.id for case in held if FastTriton.support.refuses(case)}
    large = {"golden/info_nce/queue-beyond-float32", "golden/supcon_in/equal-logits-beyond-float32"}
    assert skipped == large.union(*expected)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_undefined_anchors_leave_the_weights_of_the_others(reduction: str) -> None:
    alone = replace(CASE, arguments={"labels": [0, 0, 1, *range(3, CASE.n)]})
    kept, undefined = (
        replace(alone, keywords={"no_positive": policy, "reduction": reduction}) for policy in ("zero", "nan")
    )
    assert undefined.undefined() == {2, 3}
    assert sensitivity_of(kept)[:2].all(axis=1).tolist() == [False, False]
    for case in (kept, undefined):
        assert np.count_nonzero(sensitivity_of(case).any(axis=1)) == 2
        np.testing.assert_allclose(sensitivity_of(case), sensitivity_of(kept), rtol=1e-12)
        np.testing.assert_allclose(truth(case).weights, sensitivity_of(kept), rtol=1e-12)


def test_several_processes_find_the_same_checks_in_the_same_order() -> None:
    chosen = Selection(losses=("info_nce",), implementations=("fast-dense",), dtypes=("float64",))
    one, two = (run(replace(chosen, processes=processes)).checks for processes in (1, 2))
    assert len(one) > 50
    assert two == one
    golden = [check.case for check in one if check.case.startswith("golden/")]
    assert golden == [found.id for found in load_golden(losses=["info_nce"]) if found.id in golden]


def test_dtype_must_represent_every_matrix_exactly() -> None:
    assert REFERENCED.holds_in("bfloat16")
    for name in QUEUE.others:
        assert not replace(QUEUE, others={**QUEUE.others, name: QUEUE.others[name] / 3}).holds_in("float32")


def test_message_names_the_matrix_of_a_wrong_gradient() -> None:
    true = truth(QUEUE)
    allowed = bounds(QUEUE, true, "float64")
    good = outcome(true)

    def first(**changes: np.ndarray) -> str:
        others = {name: changes.get(name, gradient) for name, gradient in good.other_gradients.items()}
        return compare(QUEUE, true, replace(good, other_gradients=others), allowed).first

    changed = good.other_gradients["negatives"].copy()
    changed[3, 1] += 1e-9
    assert first(negatives=changed).startswith("gradient of negatives, row 3: worst at column 1, expected ")
    changed[2, 0] = np.inf
    assert first(negatives=changed).startswith("gradient of negatives, row 2: expected finite numbers, got [inf, ")
    text = first(embeddings_b=changed[:2])
    assert text == "gradient of embeddings_b: expected shape [4, 3], got [2, 3]"
    assert good.gradient is not None
    swapped = replace(good, gradient=-good.gradient)
    assert compare(QUEUE, true, swapped, allowed).first.startswith("gradient of embeddings_a, row 0: worst at column ")
    none = compare(QUEUE, true, replace(good, other_gradients={}), allowed)
    assert none.first == "gradient of embeddings_b: expected shape [4, 3], got none"
    assert none.ratio == np.inf


def test_similarities_recorded_by_the_reference_are_compared() -> None:
    true = truth(QUEUE)
    assert true.similarity is not None
    found = Reference({}, "cpu").evaluate(QUEUE, "float64")
    assert found.terms is not None
    true.similarity[5, 6] += 1e-9
    first = compare(QUEUE, true, found, bounds(QUEUE, true, "float64")).first
    assert first.startswith("similarity of anchor and column 5 and 6: expected ")


def test_message_names_the_first_differing_term() -> None:
    true = truth(CASE)
    allowed = bounds(CASE, true, "float64")
    good = outcome(true)
    assert good.anchors is not None
    assert good.gradient is not None
    wrong_anchor = replace(
        good, anchors={**good.anchors, 2: good.anchors[2] * (1 + 1e-12)}, values=[good.values[0] + 1e-9]
    )
    found = compare(CASE, true, wrong_anchor, allowed)
    assert found.first.startswith("value of anchor 2: expected ")
    assert "times the bound" in found.first
    wrong_loss = replace(good, values=[-good.values[0]])
    assert compare(CASE, true, wrong_loss, allowed).first.startswith("loss: expected ")
    gradient = good.gradient.copy()
    gradient[1, 2] *= -1
    text = compare(CASE, true, replace(good, gradient=gradient), allowed).first
    assert text.startswith("gradient of row 1: worst at column 2, expected ")
    gradient[3, 0] = np.nan
    assert "finite" in compare(CASE, true, replace(good, gradient=gradient), allowed).first
    assert "shape" in compare(CASE, true, replace(good, gradient=gradient[:2]), allowed).first
    assert "values" in compare(CASE, true, replace(good, values=good.values * 2), allowed).first
    for value in (np.nan, np.inf):
        comparison = compare(CASE, true, replace(good, values=[value]), allowed)
        assert (comparison.ratio, comparison.ulps) == (np.inf, np.inf)


class Fake(Implementation):
    """An implementation that is right, wrong, broken or absent, depending on ``mode``."""

    name: ClassVar[str] = "fake"
    title: ClassVar[str] = "a fake"
    dtypes: ClassVar[tuple[str, ...]] = ("float64",)
    mode: ClassVar[str] = "right"

    def __init__(self, options: Mapping[str, str], device: str) -> None:
        super().__init__(options, device)
        if self.mode == "absent":
            raise Unavailable("not installed: pip install fake")

    def version(self) -> str:
        return "1"

    def refuses(self, case: Case) -> str | None:
        return None if case.loss == "supcon" else f"does not compute {case.loss}"

    def evaluate(self, case: Case, dtype: str) -> Outcome:
        if self.mode == "broken":
            raise RuntimeError("broken")
        found = Reference({}, "cpu").evaluate(case, dtype)
        return replace(found, values=[-v for v in found.values]) if self.mode == "wrong" else found


TWO_CASES = Selection(
    cases=("supcon_notebook/supcon-3x3", "supcon_notebook/nt-xent-2x2"), implementations=("fake",), processes=1
)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(running, "ALL", (Reference, Fake))
    return monkeypatch


@pytest.mark.parametrize(
    ("mode", "status"), [("right", Status.PASSED), ("wrong", Status.FAILED), ("broken", Status.ERRORED)]
)
def test_status_follows_from_the_result(fake: pytest.MonkeyPatch, mode: str, status: Status) -> None:
    fake.setattr(Fake, "mode", mode)
    report = run(TWO_CASES)
    found = {check.case: check for check in report.checks}
    check = found["supcon_notebook/supcon-3x3"]
    assert check.status is status
    assert found["supcon_notebook/nt-xent-2x2"].status is Status.SKIPPED
    assert found["supcon_notebook/nt-xent-2x2"].message == "does not compute nt_xent"
    assert report.passed == (mode == "right")
    assert check.repeat == "pairproof verify --case supcon_notebook/supcon-3x3 --impl fake --dtype float64"
    if mode == "broken":
        assert check.message == "RuntimeError: broken"


def test_repeat_command_contains_the_path_of_the_peer(fake: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake.setattr(Fake, "mode", "wrong")
    found = run(replace(TWO_CASES, peers={"folder": str(tmp_path)})).checks
    (check,) = (check for check in found if check.status is Status.FAILED)
    assert check.repeat.endswith(f" --impl fake --dtype float64 --peer folder={tmp_path}")


def deviation(applies: bool) -> Deviation:
    return Deviation("minus", lambda case, dtype, true: applies, "the sign is wrong", "https://example.org/1")


def test_declared_deviation_that_does_not_occur_fails(fake: pytest.MonkeyPatch) -> None:
    fake.setattr(Fake, "deviations", (deviation(True),))
    fake.setattr(Fake, "mode", "wrong")
    only = replace(TWO_CASES, cases=("supcon_notebook/supcon-3x3",))
    (check,) = run(only).checks
    assert check.status is Status.DEVIATES
    assert "the sign is wrong (https://example.org/1)" in check.message
    fake.setattr(Fake, "mode", "right")
    (check,) = run(only).checks
    assert check.status is Status.FAILED
    assert "declared to deviate (minus) but conforms" in check.message


def test_unused_deviation_and_wrong_counts_are_reported_as_problems(fake: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = {"format": running.EXPECTED_FORMAT, "counts": {"fake/supcon": {"passed": 1}}, "entries": {}}
    (tmp_path / "expected.json").write_text(json.dumps(expected))
    fake.setattr(running, "fixtures_root", lambda: tmp_path)
    fake.setattr(running, "load_golden", lambda losses: [])
    fake.setattr(Fake, "deviations", (deviation(False),))
    report = run(Selection(implementations=("fake",), processes=1))
    assert not report.passed
    assert any("minus: matches no check of fake" in problem for problem in report.problems)
    assert any(problem.startswith("fake/supcon: expected 1 passed, ran 14 passed") for problem in report.problems)
    (tmp_path / "expected.json").unlink()
    assert any("expected.json is missing" in p for p in run(Selection(implementations=("fake",), processes=1)).problems)


@pytest.mark.parametrize("step", [45, pytest.param(15, marks=pytest.mark.slow)])
def test_limits_computed_for_several_dtypes_equal_those_of_each_dtype(step: int) -> None:
    compared = 0
    for case, golden in list(load_cases(load_worked()).items())[::step]:
        if case.size > 64:
            continue
        true = running.truth_of(case, golden)
        limits = running.Limits(case, true)
        for dtype in filter(case.holds_in, ("float32", "bfloat16", "float16", "float64")):
            expected = bounds(case, true, dtype)
            found = limits.of(FastDense({}, "cpu"), dtype)
            np.testing.assert_array_equal(found.values, expected.values)
            np.testing.assert_array_equal([*found.anchors.values()], [*expected.anchors.values()])
            assert all(np.array_equal(found.rows[name], rows) for name, rows in expected.rows.items())
            compared += 1
    assert compared > 3000 / step


def test_cached_functions_of_one_name_in_two_modules_do_not_share_results() -> None:
    def first(case: Case) -> str:
        return "first"

    def second(case: Case) -> str:
        return "second"

    for one in (first, second):
        one.__name__ = one.__qualname__ = "sizes"
    second.__module__ = "another"
    case = load_golden(losses=("supcon",))[0].case
    assert [once(first)(case), once(second)(case)] == ["first", "second"]


def test_collections_resume_after_an_error() -> None:
    @without_collections()
    def fails() -> None:
        raise ValueError(gc.isenabled())

    with pytest.raises(ValueError, match="False"):
        fails()
    assert gc.isenabled()


def test_large_cases_and_narrow_dtypes_run_only_if_selected(fake: pytest.MonkeyPatch, tmp_path: Path) -> None:
    large = "golden/supcon/shape-513-by-2"
    chosen = [golden for golden in load_golden(losses=("supcon",)) if golden.id in ("golden/supcon/two-rows", large)]
    fake.setattr(running, "fixtures_root", lambda: tmp_path)
    fake.setattr(running, "load_golden", lambda losses: chosen)
    fake.setattr(running, "load_worked", lambda: [])
    fake.setattr(Fake, "evaluate", lambda self, case, dtype: plain_outcome(case, dtype))
    fake.setattr(Fake, "dtypes", ("float64", "bfloat16"))

    def problems(thorough: bool, passed: int, skipped: int = 0) -> list[str]:
        counts = {"fake/supcon": {"passed": passed, "skipped": skipped} if skipped else {"passed": passed}}
        expected = {"format": running.EXPECTED_FORMAT, "counts": counts, "entries": {}}
        (tmp_path / "expected.json").write_text(json.dumps(expected))
        report = run(Selection(implementations=("fake",), processes=1, thorough=thorough))
        assert (report.cases_chosen, report.cases_left_out) == ((2, 0) if thorough else (1, 1))
        assert report.dtypes_left_out == ([] if thorough else ["bfloat16", "float16"])
        assert len(report.checks) == (4 if thorough else 1)
        return report.problems

    assert problems(True, 4) == []
    assert problems(False, 4) == []
    for passed, skipped in ((3, 0), (5, 0), (3, 1)):
        (problem,) = problems(False, passed, skipped)
        assert problem.startswith(f"fake/supcon: expected {passed} passed")
    assert [check.dtype for check in run(replace(TWO_CASES, cases=(large,))).checks] == ["float64", "bfloat16"]
    assert [check.dtype for check in run(replace(TWO_CASES, cases=(), dtypes=("bfloat16",))).checks] == ["bfloat16"]


def test_alternates_share_the_cases_of_a_run_that_selects_nothing(fake: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Second(Fake):
        name = "second"

    chosen = [golden for golden in load_golden(losses=("supcon",)) if golden.case.size < 9][:12]
    fake.setattr(running, "ALL", (Fake, Second))
    fake.setattr(running, "fixtures_root", lambda: tmp_path)
    fake.setattr(running, "load_golden", lambda losses: chosen)
    fake.setattr(running, "load_worked", lambda: [])
    fake.setattr(Fake, "evaluate", lambda self, case, dtype: plain_outcome(case, dtype))
    fake.setattr(Fake, "alternates", ("fake", "second"))

    def judged(passed: int = len(chosen), **more: Any) -> tuple[list[str], list[str]]:
        counts = {"fake/supcon": {"passed": passed}, "second/supcon": {"passed": len(chosen)}}
        expected = {"format": running.EXPECTED_FORMAT, "counts": counts, "entries": {}}
        (tmp_path / "expected.json").write_text(json.dumps(expected))
        report = run(Selection(processes=1, **more))
        return [f"{check.implementation} {check.case}" for check in report.checks], report.problems

    names, problems = judged()
    assert sorted(name.split()[1] for name in names) == sorted(golden.id for golden in chosen)
    assert {name.split()[0] for name in names} == {"fake", "second"}
    assert problems == []
    (problem,) = judged(len(chosen) + 1)[1]
    assert problem.startswith("fake/supcon: expected 13 passed")
    for more, number in (({"thorough": True}, 24), ({"implementations": ("fake",)}, 12), ({"losses": ("supcon",)}, 24)):
        found, problems = judged(**more)
        assert (len(found), problems) == (number, [])


def test_one_backend_of_fast_is_judged_on_each_case_in_one_dtype() -> None:
    backends = [kind({}, "cpu") for kind in (FastDense, FastTiled, FastExact)]
    turns = Counter[tuple[str, str]]()
    for golden in load_golden(losses=("supcon",)):
        case = golden.case
        ((name, dtype),) = ((one.name, dtype) for one in backends for dtype in one.shared(case, ["float64", "float32"]))
        assert case.holds_in(dtype)
        turns[name, dtype] += 1
    assert len(turns) == 6
    assert min(turns.values()) > 0.6 * max(turns.values())
    assert Fast({}, "cpu").shared(case, ["float64", "float32"]) == ["float64", "float32"]


def test_killed_process_ends_the_run(fake: pytest.MonkeyPatch) -> None:
    fake.setattr(running, "LEAST_CASES", 1)
    fake.setattr(Fake, "evaluate", lambda self, case, dtype: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(CouldNotRun, match=r"was killed; if memory is short, use --jobs 1"):
        run(replace(TWO_CASES, processes=2))


def test_absent_implementation_is_skipped_unless_named(fake: pytest.MonkeyPatch) -> None:
    fake.setattr(Fake, "mode", "absent")
    selection = replace(TWO_CASES, implementations=(), dtypes=("float64",))
    report = run(selection)
    assert report.absent == {"fake": "not installed: pip install fake"}
    assert report.exit_code == 0
    for named in (replace(selection, required=("fake",)), replace(selection, implementations=("fake", "reference"))):
        with pytest.raises(CouldNotRun, match=r"fake is not available: not installed"):
            run(named)


def test_run_without_judged_checks_does_not_pass(fake: pytest.MonkeyPatch) -> None:
    skipped = run(replace(TWO_CASES, cases=("supcon_notebook/nt-xent-2x2",)))
    assert {check.status for check in skipped.checks} == {Status.SKIPPED}
    assert skipped.problems == ["nothing was judged: every check was skipped: does not compute nt_xent"]
    without_dtype = run(replace(TWO_CASES, dtypes=("bfloat16",), cases=("supcon_notebook/supcon-3x3",)))
    assert without_dtype.problems == ["nothing was judged: no implementation has the selected dtypes"]
    for report in (skipped, without_dtype):
        assert not report.passed
        assert report.exit_code == 3


@pytest.mark.parametrize(
    ("selection", "words"),
    [
        (Selection(losses=("supkon",)), "unknown loss 'supkon'"),
        (Selection(implementations=("nobody",)), "unknown implementation 'nobody'"),
        (Selection(dtypes=("float8",)), "unknown dtype 'float8'"),
        (Selection(cases=("nothing/like-it",)), "no case matches nothing/like-it"),
        (Selection(peers={"somebody": "x"}), "unknown peer"),
        (Selection(processes=0), "--jobs: expected a positive number, got 0"),
    ],
)
def test_selection_that_matches_nothing_raises(selection: Selection, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run(selection)


def test_unusable_device_raises() -> None:
    with pytest.raises(CouldNotRun, match="device 'nowhere' cannot be used"):
        run(Selection(device="nowhere"))


def test_tally_counts_by_implementation_loss_and_status() -> None:
    checks = [
        Check("case", "a", "supcon", "1", "float64", Status.PASSED),
        Check("case", "a", "supcon", "2", "float64", Status.FAILED),
        Check("figure", "reference", "supcon", "3", "", Status.PASSED),
    ]
    assert tally(checks) == {"a/supcon": {"failed": 1, "passed": 1}, "figure": {"passed": 1}}


def test_the_original_code_is_verified_before_it_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"pip install --no-deps --target .*bioencoder==1\.0\.5"):
        SupContrast({"folder": str(tmp_path)}, "cpu")
    path = tmp_path / "bioencoder/bioencoder/core/losses.py"
    path.parent.mkdir(parents=True)
    path.write_text("class SupConLoss: ...\n")
    with pytest.raises(Unavailable, match="expected SHA-256"):
        SupContrast({"folder": str(tmp_path)}, "cpu")


def test_peer_is_loaded_from_a_given_path(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no file"):
        SupContrastToday({"supcontrast": str(tmp_path)}, "cpu")
    (tmp_path / "losses.py").write_text("class SupConLoss: ...\n")
    assert "NOT the recorded revision" in SupContrastToday({"supcontrast": str(tmp_path)}, "cpu").version()
    (tmp_path / "other.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(Unavailable, match="imports a package that is not installed"):
        load_file(tmp_path / "other.py")


@pytest.mark.parametrize("entries", [1, 7, 12])
def test_gradient_of_the_reference_does_not_depend_on_the_size_of_the_parts(
    entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (case,) = (golden.case for golden in load_golden(losses=("supcon",)) if golden.id == "golden/supcon/refs-self-some")
    assert case.embeddings.size + sum(rows.size for rows in case.others.values()) > 12
    whole = reference.complex_step(case)
    monkeypatch.setattr(reference, "AT_ONCE", entries)
    parts = reference.complex_step(case)
    assert whole.keys() == parts.keys() == case.matrices.keys()
    for name, gradient in whole.items():
        assert np.array_equal(parts[name], gradient)


def test_bounds_are_computed_once_for_all_implementations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proved results and the bounds are expensive, so implementations share them."""
    computed: list[str] = []

    def counted(module: ModuleType, name: str) -> None:
        right = getattr(module, name)

        def count(*given: object) -> object:
            computed.append(name)
            return right(*given)

        monkeypatch.setattr(module, name, count)

    (case,) = (golden.case for golden in load_golden(losses=("supcon",)) if golden.id == "golden/supcon/refs-self-some")
    counted(running, "stored_truth")
    counted(tolerances, "evaluated_rounding")
    names = ("fast", "fast-dense", "fast-tiled", "fast-exact", "reference")
    selection = Selection(cases=(case.id,), implementations=names, processes=1)
    assert len(run(selection).checks) == 4 * 4 + 1
    assert computed == ["stored_truth"]  # the bounds of a golden case are stored
    monkeypatch.delitem(known_rounding(case), ("float32", ""))
    run(selection)
    assert computed[1:] == ["stored_truth", "evaluated_rounding"]


@pytest.mark.parametrize(
    ("kind", "backend"), [(Fast, None), (FastDense, "dense"), (FastTiled, "tiled"), (FastExact, "exact")]
)
def test_each_fast_implementation_passes_its_backend(
    kind: type[Fast], backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends: list[object] = []
    right = fast.info_nce_loss

    def call(*given: object, **options: object) -> object:
        backends.append(options.pop("backend", None))
        for name in ("embeddings_a", "embeddings_b", "negatives"):
            assert isinstance(options[name], torch.Tensor)
        return right(*given, **options)

    monkeypatch.setattr(fast, "info_nce_loss", call)
    found = kind({}, "cpu").evaluate(QUEUE, "float64")
    assert backends == [backend, backend]
    true = truth(QUEUE)
    assert compare(QUEUE, true, found, bounds(QUEUE, true, "float64")).ratio <= 1


NEEDS_PML = f"pytorch-metric-learning is not installed: {install_command('pml')}"


def test_implementations_without_references_refuse_them() -> None:
    pytest.importorskip("pytorch_metric_learning", reason=NEEDS_PML)
    paired = replace(REFERENCED, loss="nt_xent", arguments={"partners": [0, 3, 1, 1]}, keywords={"temperature": 0.5})
    for kind in (SupContrastToday, StackedCriterion):
        assert kind({}, "cpu").refuses(paired) == "has no parameter ref_embeddings"
        assert kind({}, "cpu").refuses(TOWERS) == "does not compute info_nce"
    pml = PytorchMetricLearning({}, "cpu")
    assert pml.refuses(paired) is None
    assert pml.refuses(REFERENCED) == "cannot exclude the row of an anchor from the references"


def test_pml_returns_gradients_of_the_references() -> None:
    pytest.importorskip("pytorch_metric_learning", reason=NEEDS_PML)
    case = replace(REFERENCED, arguments={k: v for k, v in REFERENCED.arguments.items() if k != "self_rows"})
    true = truth(case)
    found = PytorchMetricLearning({}, "cpu").evaluate(case, "float64")
    assert compare(case, true, found, bounds(case, true, "float64")).ratio <= 1


def test_unused_rows_have_gradient_zero_if_torch_fills_with_zeros_that_require_a_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``torch.autograd.grad`` of torch before 2.10 does."""
    newer = torch.autograd.grad

    def older(*arguments: Any, materialize_grads: bool = False, **given: Any) -> Any:
        found = newer(*arguments, allow_unused=materialize_grads, **given)
        return [
            torch.zeros_like(z, requires_grad=True) if g is None else g
            for g, z in zip(found, arguments[1], strict=True)
        ]

    monkeypatch.setattr(torch.autograd, "grad", older)
    leaves = {name: torch.ones(2, 3, requires_grad=True) for name in ("embeddings", "negatives")}
    found = outcome_of((2 * leaves["embeddings"]).sum(), leaves)
    assert np.array_equal(found.gradient, np.full((2, 3), 2.0))
    assert np.array_equal(found.other_gradients["negatives"], np.zeros((2, 3)))


def test_rows_are_normalised_without_overflow() -> None:
    case = replace(CASE, embeddings=ROWS * np.array([1e-300, 1.0, 1e300, 1e-12])[:, None])
    rows = normalised(torch.tensor(case.embeddings), case)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(4, dtype=torch.float64))


def test_baseline_is_accurate_on_ordinary_batches() -> None:
    """In float64, on batches without cancellation, the error of the baseline is below four times the bounds."""
    tried = 0
    for golden in load_golden():
        case = golden.case
        if case.n > 12 or "temperature" not in golden.flags or float(case.option("temperature")) < 0.1:
            continue
        true = stored_truth(case, golden.expected)
        comparison = compare(case, true, plain_outcome(case, "float64"), bounds(case, true, "float64"))
        assert comparison.ratio < 4, (case.id, comparison.first)
        tried += 1
    assert tried > 20


LOW_TEMPERATURE = replace(CASE, id="test/low-temperature", keywords={"temperature": 0.03, "reduction": "sum"})
DOTS = replace(CASE, id="test/dots", keywords={"temperature": 0.5, "similarity": "dot", "base_temperature": 0.1})


def rows_of_weights(case: Case, weights: np.ndarray, dtype: str | None) -> dict[str, np.ndarray]:
    """Return the gradient of every matrix: weights times rows, computed in the order of a fused kernel.

    Args:
        case: the case.
        weights: the derivative with respect to each similarity.
        dtype: the dtype to which weights are rounded, after they are scaled as in the kernels; None for no rounding.
    """
    cosine = case.option("similarity") == "cosine"
    found = {name: np.zeros_like(matrix) for name, matrix in case.matrices.items()}
    base, temperature = case.option("base_temperature"), float(case.option("temperature"))
    upstream = (1 if base is None else temperature / base) / (1 if case.option("reduction") == "sum" else case.n)
    unit = upstream / temperature

    def accumulate(name: str, part: np.ndarray, other: str) -> None:
        rows = case.matrices[other]
        norms = np.linalg.norm(rows, axis=1) if cosine else np.ones(len(rows))
        complete = part / norms
        if dtype is not None:
            lift = 2.0 ** np.floor(np.log2(upstream)) / upstream * WEIGHTS_LIFTED[dtype] / unit
            complete = torch.tensor(complete * lift).to(getattr(torch, dtype)).double().numpy() / lift
        found[name] += complete @ rows

    for block in case.blocks():
        part = weights[block.part]
        if block.left == block.right:
            accumulate(block.left, part + part.T, block.right)
        else:
            accumulate(block.left, part, block.right)
            accumulate(block.right, part.T, block.left)
    if cosine:
        for name, rows in found.items():
            norms = np.linalg.norm(case.matrices[name], axis=1, keepdims=True)
            units = case.matrices[name] / norms
            found[name] = (rows - (rows * units).sum(axis=1, keepdims=True) * units) / norms
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", [CASE, LOW_TEMPERATURE, DOTS, *OTHER_SHAPES], ids=lambda case: case.id)
def test_rounding_of_weights_is_within_its_term_of_the_bounds(case: Case, dtype: str) -> None:
    """Rounding the weights changes the gradient by at most this term, and by more than 5 % of it in some row."""
    true = truth(case)
    assert true.gradient is not None
    whole = rows_of_weights(case, true.weights, None)
    np.testing.assert_allclose(whole[case.first], true.gradient, rtol=1e-9, atol=1e-12)
    before, after = (bounds(case, true, dtype, narrowed=narrowed) for narrowed in (False, True))
    narrowed = rows_of_weights(case, true.weights, dtype)
    largest_share = 0.0
    for name in case.matrices:
        without, allowed = (b.rows[name] for b in (before, after))
        moved = np.linalg.norm(narrowed[name] - whole[name], axis=1)
        assert (moved <= allowed - without).all()
        largest_share = max(largest_share, float((moved / (allowed - without)).max()))
    assert largest_share > 0.05
    assert after.values == before.values
    assert after.anchors == before.anchors


@pytest.mark.parametrize("case", [CASE, *OTHER_SHAPES], ids=lambda case: case.id)
def test_float64_and_float32_rows_do_not_change_the_bounds(case: Case) -> None:
    true = truth(case)
    for dtype in ("float64", "float32"):
        before, after = (bounds(case, true, dtype, narrowed=narrowed) for narrowed in (False, True))
        assert before.values == after.values
        assert all(np.array_equal(after.rows[name], rows) for name, rows in before.rows.items())


def test_subnormal_weights_have_an_absolute_error() -> None:
    """In float16 errors are relative only above 2^-14; scaling by 2^12 moves this limit to 2^-26."""
    rows = np.array([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
    solved = replace(CASE, embeddings=rows, keywords={"temperature": 0.01})
    true = truth(solved)
    assert np.abs(true.weights).max() < 2.0**-30
    before, after = (bounds(solved, true, "float16", narrowed=narrowed) for narrowed in (False, True))
    more = after.rows[solved.first] - before.rows[solved.first]
    least = SMALLEST_SUBNORMAL["float16"] / 2**13 / (0.01 * 4)
    norms = np.linalg.norm(solved.embeddings, axis=1)
    # Every row is in eight similarities with this error, which the projection of the gradient may double.
    assert (more * norms > 8 * least).all()
    assert (more * norms < 17 * least).all()


def test_only_the_kernels_declare_narrowed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(kind({}, "cpu").narrows_weights for kind in (Reference, Fast, FastDense, FastTiled, FastExact))
    monkeypatch.setattr(kernels, "chosen", lambda rows: rows.device.type == "meta")
    assert Fast({}, "meta").narrows_weights
    assert not FastTiled({}, "meta").narrows_weights
    monkeypatch.setattr(kernels, "refusal", lambda rows: None)
    assert FastTriton({}, "meta").narrows_weights


def test_message_explains_why_the_kernels_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(Unavailable, match="on a CUDA device, got cpu"):
        FastTriton({}, "cpu")
    monkeypatch.setattr(running, "ALL", (Reference, FastTriton))
    selection = replace(TWO_CASES, implementations=(), cases=("golden/supcon/refs-self-some",))
    report = run(selection)
    assert set(report.absent) == {"fast-triton"}
    assert {check.implementation for check in report.checks} == {"reference"}
    with pytest.raises(CouldNotRun, match="fast-triton is not available: it needs embeddings on a CUDA device"):
        run(replace(selection, required=("fast-triton",)))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(kernels, "_importable", lambda: False)
    with pytest.raises(Unavailable, match="triton is not installed: pip install triton"):
        FastTriton({}, "cpu")


def test_repeat_command_of_the_interpreter_sets_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "refusal", lambda rows: None)
    assert FastTriton({}, "cpu").environment == ("TRITON_INTERPRET=1",)
    assert FastTriton({}, "meta").environment == ()
    monkeypatch.setattr(FastTriton, "version", lambda self: "")
    monkeypatch.setattr(FastTriton, "evaluate", lambda self, case, dtype: 1 / 0)
    monkeypatch.setattr(running, "ALL", (FastTriton,))
    only = replace(TWO_CASES, implementations=(), cases=("golden/supcon/refs-self-some",), dtypes=("bfloat16",))
    (check,) = run(only).checks
    command = "pairproof verify --case golden/supcon/refs-self-some --impl fast-triton --dtype bfloat16"
    assert check.repeat == f"TRITON_INTERPRET=1 {command}"


@pytest.mark.slow
def test_counts_of_device_implementations_follow_from_the_cases(fake: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No counts are stored for such an implementation, but missing checks are still problems."""
    expected = {"format": running.EXPECTED_FORMAT, "counts": {}, "entries": {}}
    (tmp_path / "expected.json").write_text(json.dumps(expected))
    fake.setattr(running, "fixtures_root", lambda: tmp_path)
    fake.setattr(running, "load_golden", lambda losses: [])
    fake.setattr(Fake, "anywhere", False)
    selection = Selection(implementations=("fake",), processes=1)
    report = run(selection)
    # The fake supports only supcon: each case of another loss is one skipped check.
    assert not [problem for problem in report.problems if problem.startswith("fake/")]
    assert {check.loss for check in report.checks if check.status is Status.SKIPPED} >= {"nt_xent", "nt_bxent"}
    counts = running.expected_counts(report, load_cases(report.fixtures))["counts"]
    assert not any(key.startswith("fake") for key in counts)
    fake.setattr(Fake, "mode", "wrong")
    failed = run(selection)
    # Failed checks are reported themselves; counts would only repeat this.
    assert failed.problems == []
    assert failed.exit_code == 1
    assert failed.first_problem.endswith("(and 13 more)")
    judge = running.judge_case
    (dropped, *_) = (check.case for check in report.checks if check.status is Status.PASSED)
    fake.setattr(running, "judge_case", lambda case, *more: [] if case.id == dropped else judge(case, *more))
    assert "fake/supcon: expected 14 passed, ran 13 failed" in run(selection).problems[0]


@pytest.mark.parametrize("flushed", [False, True])
def test_header_and_json_name_what_rounding_depends_on(flushed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.set_flush_denormal(flushed)
    try:
        found = machine()
    finally:
        torch.set_flush_denormal(False)
    assert found["denormals"] == ("flushed" if flushed else "kept")
    assert found["capability"] == torch.backends.cpu.get_cpu_capability()
    assert found["threads"] == str(torch.get_num_threads())
    assert found["processor"]
    assert re.match(r"BLAS of torch \w+.*; of numpy \S", found["blas"])
    report = running.Report(Selection(), machine=found)
    assert found.items() <= report.header().items()
    assert found.items() <= as_json(report)["header"].items()
    header = " ".join(" ".join(str(part) for part in _of_run(report, 1.0, ())).split())
    assert f" on {described(found)}" in header


def test_covering_subset_has_every_trait() -> None:
    cases = load_cases(load_worked())
    traits = {case: traits_of(case, golden) for case, golden in cases.items()}
    chosen = covering(cases, lambda case, golden: traits[case])
    assert set().union(*(traits[case] for case in chosen)) == set().union(*traits.values())
    assert len(chosen) < len(cases) / 5
    flags = {(case.loss, flag) for case, golden in cases.items() if golden for flag in golden.flags}
    assert flags == {(case.loss, flag) for case in chosen for flag in getattr(cases[case], "flags", ())}
    # The subset keeps the order of the cases and is the same in every run.
    assert [case for case in cases if case in set(chosen)] == chosen
    assert [case.id for case in covering(cases)] == [case.id for case in chosen]
    assert covering({}) == []


@pytest.mark.slow
def test_covering_run_reports_the_number_of_cases(fake: pytest.MonkeyPatch) -> None:
    selection = replace(TWO_CASES, cases=("golden/supcon/*",), covering=True)
    assert not replace(selection, cases=()).whole
    report = run(selection)
    every = [case for case in load_cases(load_worked()) if case.id.startswith("golden/supcon/")]
    assert 10 < report.cases_chosen < len(every) / 4
    assert len({check.case for check in report.checks}) == report.cases_chosen
    assert report.cases_in_all == len(load_cases(load_worked()))
