"""The harness itself: bounds that are not idle, first differing terms, statuses, declared deviations, counts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from pairproof import fast
from pairproof.conformance.documents.load import load_worked
from pairproof.conformance.implementations import Deviation, Implementation, Unavailable
from pairproof.conformance.implementations.base import normalised
from pairproof.conformance.implementations.documents import StackedCriterion
from pairproof.conformance.implementations.fast import Fast, FastDense, FastExact, FastTiled, FastTriton
from pairproof.conformance.implementations.pml import PytorchMetricLearning
from pairproof.conformance.implementations.reference import Reference
from pairproof.conformance.implementations.supcontrast import SupContrast, SupContrastToday, load_file
from pairproof.conformance.judge import verify as running
from pairproof.conformance.judge.options import CouldNotRun, Selection, UsageError
from pairproof.conformance.judge.results import Check, Status, tally
from pairproof.conformance.judge.verify import load_cases, run
from pairproof.conformance.suite.cases import Case
from pairproof.conformance.suite.golden import load_golden
from pairproof.conformance.suite.records import Outcome, Truth
from pairproof.conformance.suite.subset import covering, traits_of
from pairproof.conformance.truth.baseline import plain_outcome
from pairproof.conformance.truth.certify import certify
from pairproof.conformance.truth.compare import compare
from pairproof.conformance.truth.evaluate import stored_truth, truth, weights
from pairproof.conformance.truth.tolerances import (
    SMALLEST_SUBNORMAL,
    WEIGHTS_LIFTED,
    bounds,
    held_to,
    unit_roundoff,
    with_narrowed_weights,
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
QUEUE = replace(TOWERS, id="test/queue", others={"embeddings_b": OTHERS[:4], "negatives": -OTHERS[1:]})
FURTHER = (REFERENCED, TOWERS, QUEUE)


def outcome(true: Truth) -> Outcome:
    assert true.gradient is not None
    return Outcome(
        values=list(true.values),
        gradient=true.gradient.copy(),
        anchors=dict(true.anchors),
        other_gradients={name: gradient.copy() for name, gradient in true.other_gradients.items()},
    )


@pytest.mark.parametrize("case", [CASE, *FURTHER], ids=lambda case: case.id)
def test_the_truth_conforms_to_itself(case: Case) -> None:
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
@pytest.mark.parametrize("case", FURTHER, ids=lambda case: case.id)
def test_bounds_of_every_matrix_are_a_few_roundings_wide(case: Case, dtype: str) -> None:
    true = truth(case)
    found = bounds(case, true, dtype)
    gradients = found.gradients(true)
    assert set(found.rows) == set(case.matrices) == set(gradients)
    for name, rows in found.rows.items():
        norms = np.linalg.norm(gradients[name], axis=1)
        assert (rows < 1000 * unit_roundoff(dtype) * norms.max()).all()
        assert (rows > unit_roundoff(dtype) * norms / 2).all()


@pytest.mark.parametrize("case", FURTHER, ids=lambda case: case.id)
def test_every_road_meets_the_truth_by_every_matrix(case: Case) -> None:
    """The balls, the complex step and the straightforward torch road: three ways to every gradient."""
    true = truth(case)
    proved = certify(case)
    assert proved.loss == true.loss
    for name, gradient in proved.other_gradients.items():
        assert np.array_equal(gradient, true.other_gradients[name])
    loops, plain = Reference({}, "cpu").evaluate(case, "float64"), plain_outcome(case, "float64")
    for found in (loops, plain):
        assert set(found.other_gradients) == set(case.others)
        assert compare(case, true, found, bounds(case, true, "float64")).ratio <= 1


@pytest.mark.parametrize("case", FURTHER, ids=lambda case: case.id)
def test_weights_are_softmaxes_without_their_positives(case: Case) -> None:
    """Over A(i) they add up to nothing; outside it they are nothing."""
    found = weights(case)
    assert found.shape == case.shape
    np.testing.assert_allclose(found.sum(axis=1), 0, atol=1e-15)
    for i, members in enumerate(case.members()):
        outside = [j for j in range(case.shape[1]) if j not in members]
        assert not found[i, outside].any()
        assert found[i, members].all()


def test_every_matrix_decides_which_dtypes_hold_a_case() -> None:
    assert REFERENCED.holds_in("bfloat16")
    for name in QUEUE.others:
        assert not replace(QUEUE, others={**QUEUE.others, name: QUEUE.others[name] / 3}).holds_in("float32")


def test_a_differing_gradient_is_named_with_its_matrix() -> None:
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


def test_similarities_are_those_that_the_reference_recorded() -> None:
    true = truth(QUEUE)
    assert true.similarity is not None
    found = Reference({}, "cpu").evaluate(QUEUE, "float64")
    assert found.terms is not None
    true.similarity[5, 6] += 1e-9
    first = compare(QUEUE, true, found, bounds(QUEUE, true, "float64")).first
    assert first.startswith("similarity of anchor and column 5 and 6: expected ")


def test_the_first_differing_term_is_named() -> None:
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
    assert compare(CASE, true, replace(good, values=[float("nan")]), allowed).ratio == np.inf


class Fake(Implementation):
    """An implementation that can be told to be right, wrong, broken or absent."""

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
            raise RuntimeError("out of order")
        found = Reference({}, "cpu").evaluate(case, dtype)
        return replace(found, values=[-v for v in found.values]) if self.mode == "wrong" else found


ONLY = Selection(
    cases=("supcon_notebook/supcon-3x3", "supcon_notebook/nt-xent-2x2"), implementations=("fake",), processes=1
)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(running, "ALL", (Reference, Fake))
    return monkeypatch


@pytest.mark.parametrize(
    ("mode", "status"), [("right", Status.PASSED), ("wrong", Status.FAILED), ("broken", Status.ERRORED)]
)
def test_statuses(fake: pytest.MonkeyPatch, mode: str, status: Status) -> None:
    fake.setattr(Fake, "mode", mode)
    report = run(ONLY)
    found = {check.case: check for check in report.checks}
    check = found["supcon_notebook/supcon-3x3"]
    assert check.status is status
    assert found["supcon_notebook/nt-xent-2x2"].status is Status.SKIPPED
    assert found["supcon_notebook/nt-xent-2x2"].message == "does not compute nt_xent"
    assert report.passed == (mode == "right")
    assert check.repeat == "pairproof verify --case supcon_notebook/supcon-3x3 --impl fake --dtype float64"
    if mode == "broken":
        assert check.message == "RuntimeError: out of order"


def test_a_check_of_a_live_peer_is_repeated_with_its_path(fake: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake.setattr(Fake, "mode", "wrong")
    found = run(replace(ONLY, peers={"folder": str(tmp_path)})).checks
    (check,) = (check for check in found if check.status is Status.FAILED)
    assert check.repeat.endswith(f" --impl fake --dtype float64 --peer folder={tmp_path}")


def deviation(applies: bool) -> Deviation:
    return Deviation("minus", lambda case, dtype, true: applies, "the sign is wrong", "https://example.org/1")


def test_a_declared_deviation_must_show(fake: pytest.MonkeyPatch) -> None:
    fake.setattr(Fake, "deviations", (deviation(True),))
    fake.setattr(Fake, "mode", "wrong")
    only = replace(ONLY, cases=("supcon_notebook/supcon-3x3",))
    (check,) = run(only).checks
    assert check.status is Status.DEVIATES
    assert "the sign is wrong (https://example.org/1)" in check.message
    fake.setattr(Fake, "mode", "right")
    (check,) = run(only).checks
    assert check.status is Status.FAILED
    assert "declared to deviate (minus) but conforms" in check.message


def test_an_unused_deviation_and_wrong_counts_are_problems(fake: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = {"format": running.EXPECTED_FORMAT, "counts": {"fake/supcon": {"passed": 1}}, "entries": {}}
    (tmp_path / "expected.json").write_text(json.dumps(expected))
    fake.setattr(running, "fixtures_root", lambda: tmp_path)
    fake.setattr(running, "load_golden", lambda losses: [])
    fake.setattr(Fake, "deviations", (deviation(False),))
    report = run(Selection(implementations=("fake",), processes=1))
    assert not report.passed
    assert any("minus: matches no check of fake" in problem for problem in report.problems)
    assert any(problem.startswith("fake/supcon: expected 1 passed, ran 4 passed") for problem in report.problems)
    (tmp_path / "expected.json").unlink()
    assert any("expected.json is missing" in p for p in run(Selection(implementations=("fake",), processes=1)).problems)


def test_absence_is_skipped_unless_required(fake: pytest.MonkeyPatch) -> None:
    fake.setattr(Fake, "mode", "absent")
    everyone = replace(ONLY, implementations=(), dtypes=("float64",))
    report = run(everyone)
    assert report.absent == {"fake": "not installed: pip install fake"}
    assert report.exit_code == 0
    for named in (replace(everyone, required=("fake",)), replace(everyone, implementations=("fake", "reference"))):
        with pytest.raises(CouldNotRun, match=r"fake is not available: not installed"):
            run(named)


def test_a_run_that_judged_nothing_does_not_pass(fake: pytest.MonkeyPatch) -> None:
    skipped = run(replace(ONLY, cases=("supcon_notebook/nt-xent-2x2",)))
    assert {check.status for check in skipped.checks} == {Status.SKIPPED}
    assert skipped.problems == ["nothing was judged: every check was skipped: does not compute nt_xent"]
    without_dtype = run(replace(ONLY, dtypes=("bfloat16",), cases=("supcon_notebook/supcon-3x3",)))
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
    ],
)
def test_a_selection_of_nothing_is_refused(selection: Selection, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run(selection)


def test_an_unusable_device_could_not_run() -> None:
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


def test_a_path_is_loaded_live(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no file"):
        SupContrastToday({"supcontrast": str(tmp_path)}, "cpu")
    (tmp_path / "losses.py").write_text("class SupConLoss: ...\n")
    assert "NOT the recorded revision" in SupContrastToday({"supcontrast": str(tmp_path)}, "cpu").version()
    (tmp_path / "other.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(Unavailable, match="imports a package that is not installed"):
        load_file(tmp_path / "other.py")


def test_the_yardstick_is_made_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Truth, bounds and the straightforward outcome are dear: they are shared by everyone who is judged on a case."""
    made: list[str] = []

    def counted(name: str) -> None:
        right = getattr(running, name)

        def count(*given: object) -> object:
            made.append(name)
            return right(*given)

        monkeypatch.setattr(running, name, count)

    for name in ("stored_truth", "bounds", "plain_outcome"):
        counted(name)
    names = ("fast", "fast-dense", "fast-tiled", "fast-exact", "reference")
    report = run(Selection(cases=("golden/supcon/refs-self-some",), implementations=names, processes=1))
    assert len(report.checks) == 4 * 4 + 1
    assert sorted(made) == ["bounds"] * 4 + ["plain_outcome"] * 4 + ["stored_truth"]


@pytest.mark.parametrize(
    ("kind", "backend"), [(Fast, None), (FastDense, "dense"), (FastTiled, "tiled"), (FastExact, "exact")]
)
def test_every_road_of_fast_is_asked_for_by_its_name(
    kind: type[Fast], backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    right = fast.info_nce_loss

    def ask(*given: object, **options: object) -> object:
        asked.append(options.pop("backend", None))
        for name in ("embeddings_a", "embeddings_b", "negatives"):
            assert isinstance(options[name], torch.Tensor)
        return right(*given, **options)

    monkeypatch.setattr(fast, "info_nce_loss", ask)
    found = kind({}, "cpu").evaluate(QUEUE, "float64")
    assert asked == [backend, backend]
    true = truth(QUEUE)
    assert compare(QUEUE, true, found, bounds(QUEUE, true, "float64")).ratio <= 1


NEEDS_PML = "pytorch-metric-learning is not installed: pip install 'pairproof[pml]'"


def test_who_has_no_references_says_so() -> None:
    pytest.importorskip("pytorch_metric_learning", reason=NEEDS_PML)
    paired = replace(REFERENCED, loss="nt_xent", arguments={"partners": [0, 3, 1, 1]}, keywords={"temperature": 0.5})
    for kind in (SupContrastToday, StackedCriterion):
        assert kind({}, "cpu").refuses(paired) == "takes no ref_embeddings"
        assert kind({}, "cpu").refuses(TOWERS) == "does not compute info_nce"
    pml = PytorchMetricLearning({}, "cpu")
    assert pml.refuses(paired) is None
    assert pml.refuses(REFERENCED) == "cannot exclude the row of an anchor from the references"


def test_pml_gives_gradients_by_the_references() -> None:
    pytest.importorskip("pytorch_metric_learning", reason=NEEDS_PML)
    case = replace(REFERENCED, arguments={k: v for k, v in REFERENCED.arguments.items() if k != "self_rows"})
    true = truth(case)
    found = PytorchMetricLearning({}, "cpu").evaluate(case, "float64")
    assert compare(case, true, found, bounds(case, true, "float64")).ratio <= 1


def test_rows_are_normalised_without_overflow() -> None:
    case = replace(CASE, embeddings=ROWS * np.array([1e-300, 1.0, 1e300, 1e-12])[:, None])
    rows = normalised(torch.tensor(case.embeddings), case)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(4, dtype=torch.float64))


def test_bounds_are_tightened_to_twice_the_error_of_the_baseline() -> None:
    true = truth(CASE)
    allowed = bounds(CASE, true, "float32")
    plain = plain_outcome(CASE, "float32")
    drawn = held_to(allowed, true, plain)
    assert drawn.values[0] < allowed.values[0]
    assert (drawn.rows[CASE.first] < allowed.rows[CASE.first]).all()
    assert drawn.values[0] >= allowed.share_of_floor * allowed.values[0]
    assert compare(CASE, true, plain, drawn).ratio <= 1
    far = replace(plain, values=[plain.values[0] + allowed.values[0]])
    assert held_to(allowed, true, far).values[0] == allowed.values[0]
    broken = replace(plain, values=[float("nan")], gradient=None, anchors=None)
    assert held_to(allowed, true, broken).values == allowed.values


def test_the_straightforward_road_is_right_on_ordinary_batches() -> None:
    """A yardstick must be straight: on batches without cancellation it meets the a-priori bounds in float64."""
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


STEEP = replace(CASE, id="test/steep", keywords={"temperature": 0.03, "reduction": "sum"})
DOTS = replace(CASE, id="test/dots", keywords={"temperature": 0.5, "similarity": "dot", "base_temperature": 0.1})


def rows_of_weights(case: Case, weights: np.ndarray, dtype: str | None) -> dict[str, np.ndarray]:
    """What every row of every matrix gathers from the others: complete weights times rows, as a fused kernel does it.

    Args:
        case: the case.
        weights: the derivative by each similarity.
        dtype: to which complete weights are rounded, after they were multiplied as the kernels multiply them; or None.
    """
    cosine = case.option("similarity") == "cosine"
    found = {name: np.zeros_like(matrix) for name, matrix in case.matrices.items()}
    base, temperature = case.option("base_temperature"), float(case.option("temperature"))
    upstream = (1 if base is None else temperature / base) / (1 if case.option("reduction") == "sum" else case.n)
    unit = upstream / temperature

    def gather(name: str, part: np.ndarray, other: str) -> None:
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
            gather(block.left, part + part.T, block.right)
        else:
            gather(block.left, part, block.right)
            gather(block.right, part.T, block.left)
    if cosine:
        for name, rows in found.items():
            norms = np.linalg.norm(case.matrices[name], axis=1, keepdims=True)
            units = case.matrices[name] / norms
            found[name] = (rows - (rows * units).sum(axis=1, keepdims=True) * units) / norms
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", [CASE, STEEP, DOTS, *FURTHER], ids=lambda case: case.id)
def test_narrowed_weights_cost_what_is_allowed_for_them(case: Case, dtype: str) -> None:
    """Weights rounded on purpose: the gradient moves by no more than the term says, and by a fair part of it."""
    true = truth(case)
    assert true.gradient is not None
    whole = rows_of_weights(case, true.weights, None)
    np.testing.assert_allclose(whole[case.first], true.gradient, rtol=1e-9, atol=1e-12)
    before = bounds(case, true, dtype)
    after = with_narrowed_weights(before, case, true, dtype)
    narrowed = rows_of_weights(case, true.weights, dtype)
    fullest = 0.0
    for name in case.matrices:
        without, allowed = (b.rows[name] for b in (before, after))
        moved = np.linalg.norm(narrowed[name] - whole[name], axis=1)
        assert (moved <= allowed - without).all()
        fullest = max(fullest, float((moved / (allowed - without)).max()))
    assert fullest > 0.05
    assert after.values == before.values
    assert after.anchors == before.anchors


@pytest.mark.parametrize("case", [CASE, *FURTHER], ids=lambda case: case.id)
def test_rows_of_full_precision_narrow_nothing(case: Case) -> None:
    true = truth(case)
    for dtype in ("float64", "float32"):
        before = bounds(case, true, dtype)
        assert with_narrowed_weights(before, case, true, dtype) is before


def test_weights_below_the_normal_numbers_have_an_error_of_their_own() -> None:
    """In float16 what is relative ends at 2^-14, which a lift of 2^12 moves to 2^-26."""
    true = replace(truth(CASE), weights=np.full((4, 4), 1e-13))
    before = bounds(CASE, true, "float16")
    more = with_narrowed_weights(before, CASE, true, "float16").rows[CASE.first] - before.rows[CASE.first]
    lifted = [np.linalg.norm(row) / 2.0 ** np.floor(np.log2(np.abs(row).max())) for row in ROWS]
    share = 1 / (0.5 * 4)
    least = share * SMALLEST_SUBNORMAL["float16"] / 2**13 * sum(lifted)
    np.testing.assert_allclose(more * np.linalg.norm(ROWS, axis=1), least + 2.0**-11 * 4 * 2e-13, rtol=1e-6)


def test_only_who_narrows_is_allowed_to(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(kind({}, "cpu").narrows_weights for kind in (Reference, Fast, FastDense, FastTiled, FastExact))
    monkeypatch.setattr(kernels, "chosen", lambda rows: rows.device.type == "meta")
    assert Fast({}, "meta").narrows_weights
    assert not FastTiled({}, "meta").narrows_weights
    monkeypatch.setattr(kernels, "refusal", lambda rows: None)
    assert FastTriton({}, "meta").narrows_weights


def test_the_kernels_say_why_they_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(Unavailable, match="on a CUDA device, got cpu"):
        FastTriton({}, "cpu")
    monkeypatch.setattr(running, "ALL", (Reference, FastTriton))
    everyone = replace(ONLY, implementations=(), cases=("golden/supcon/refs-self-some",))
    report = run(everyone)
    assert set(report.absent) == {"fast-triton"}
    assert {check.implementation for check in report.checks} == {"reference"}
    with pytest.raises(CouldNotRun, match="fast-triton is not available: it needs embeddings on a CUDA device"):
        run(replace(everyone, required=("fast-triton",)))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(kernels, "_importable", lambda: False)
    with pytest.raises(Unavailable, match="triton is not installed: pip install triton"):
        FastTriton({}, "cpu")


def test_a_check_of_the_interpreter_is_repeated_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "refusal", lambda rows: None)
    assert FastTriton({}, "cpu").environment == ("TRITON_INTERPRET=1",)
    assert FastTriton({}, "meta").environment == ()
    monkeypatch.setattr(FastTriton, "version", lambda self: "")
    monkeypatch.setattr(FastTriton, "evaluate", lambda self, case, dtype: 1 / 0)
    monkeypatch.setattr(running, "ALL", (FastTriton,))
    only = replace(ONLY, implementations=(), cases=("golden/supcon/refs-self-some",), dtypes=("bfloat16",))
    (check,) = run(only).checks
    command = "pairproof verify --case golden/supcon/refs-self-some --impl fast-triton --dtype bfloat16"
    assert check.repeat == f"TRITON_INTERPRET=1 {command}"


def test_who_runs_on_some_machines_only_is_counted_by_the_cases(fake: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of theirs is on file; a check that is missing, or that did not pass, is missed all the same."""
    expected = {"format": running.EXPECTED_FORMAT, "counts": {}, "entries": {}}
    (tmp_path / "expected.json").write_text(json.dumps(expected))
    fake.setattr(running, "fixtures_root", lambda: tmp_path)
    fake.setattr(running, "load_golden", lambda losses: [])
    fake.setattr(Fake, "anywhere", False)
    everyone = Selection(implementations=("fake",), processes=1)
    report = run(everyone)
    missed = [problem for problem in report.problems if "fake/supcon:" in problem]
    assert not missed
    # It has one loss: the others' cases are refused, and were to be passed.
    assert any(problem.startswith("fake/nt_xent: expected ") for problem in report.problems)
    counts = running.expected_counts(report, load_cases(report.fixtures))["counts"]
    assert not any(key.startswith("fake") for key in counts)
    fake.setattr(Fake, "mode", "wrong")
    assert any("fake/supcon: expected 4 passed, ran 4 failed" in problem for problem in run(everyone).problems)


def test_a_covering_choice_shows_all_that_any_case_shows() -> None:
    cases = load_cases(load_worked())
    chosen = covering(cases)
    traits = {case: traits_of(case, golden) for case, golden in cases.items()}
    assert set().union(*(traits[case] for case in chosen)) == set().union(*traits.values())
    assert len(chosen) < len(cases) / 5
    flags = {(case.loss, flag) for case, golden in cases.items() if golden for flag in golden.flags}
    assert flags == {(case.loss, flag) for case in chosen for flag in getattr(cases[case], "flags", ())}
    # In their own order, the same every time, whatever order they come in.
    assert [case for case in cases if case in set(chosen)] == chosen
    assert [case.id for case in covering(cases)] == [case.id for case in chosen]
    assert covering({}) == []


@pytest.mark.slow
def test_a_covering_run_says_what_it_left_out(fake: pytest.MonkeyPatch) -> None:
    selection = replace(ONLY, cases=("golden/supcon/*",), covering=True)
    assert not replace(selection, cases=()).whole
    report = run(selection)
    every = [case for case in load_cases(load_worked()) if case.id.startswith("golden/supcon/")]
    assert 10 < report.cases_chosen < len(every) / 4
    assert len({check.case for check in report.checks}) == report.cases_chosen
    assert report.cases_in_all == len(load_cases(load_worked()))
