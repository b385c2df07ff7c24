"""Golden cases of training size: inputs by a formula over integers, and results of which only a part is stored."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pairproof.conformance.explain import describe
from pairproof.conformance.maintain.prove import prove_golden
from pairproof.conformance.suite.catalogue import LOSSES
from pairproof.conformance.suite.formulas import Formula, factors, integers, stored_rows, stored_rows_of
from pairproof.conformance.suite.golden import GoldenCase, load_flags, load_golden
from pairproof.conformance.suite.store import FixtureError, dump_json, fixtures_root, write_manifest
from pairproof.conformance.truth.baseline import plain_outcome
from pairproof.conformance.truth.certify import certify
from pairproof.conformance.truth.compare import compare
from pairproof.conformance.truth.evaluate import stored_truth
from pairproof.conformance.truth.tolerances import bounds
from tools import fixtures_archive

ROOT = fixtures_root()
LARGE = [golden for golden in load_golden() if golden.formulas]
NAMED = {golden.id.removeprefix("golden/"): golden for golden in LARGE}
FORMULA = {"rows": 40, "columns": 6, "groups": 16, "seed": 11, "group_seed": 12, "exponent": -6}


def test_every_loss_has_cases_of_training_size() -> None:
    sizes = [(128, 64), (256, 128), (512, 128), (1024, 64)]
    assert {f"{loss}/training-{n}-by-{d}" for loss in LOSSES for n, d in sizes} <= set(NAMED)
    assert all(set(golden.dtypes) == {"float64", "float32", "bfloat16", "float16"} for golden in LARGE)


@pytest.mark.parametrize("seed", [1, 12345, 2**31 - 2])
def test_integers_are_those_of_the_recurrence(seed: int) -> None:
    x, found = seed, []
    for _ in range(1500):
        x = 48271 * x % 2147483647
        found.append(x // 16777216 - 64)
    assert integers(seed, 1500).tolist() == found
    assert (min(found), max(found)) == (-64, 63)


def test_rows_of_a_group_share_their_center() -> None:
    rows = Formula(5, 3, 2, 7, 9, -4).matrix()
    own, centers = integers(7, 15).reshape(5, 3), integers(9, 6).reshape(2, 3)
    assert rows.tolist() == [[(own[i, d] + centers[i % 2, d]) / 16 for d in range(3)] for i in range(5)]


def test_stored_rows_are_the_first_the_last_and_those_at_the_sides_of_tiles() -> None:
    assert stored_rows(128, [64]) == [0, 31, 32, 63, 64, 127]
    assert stored_rows(256) == [0, 31, 32, 63, 64, 127, 128, 255]
    assert stored_rows(1024, [700]) == [0, 64, 127, 128, 255, 256, 700, 1023]
    assert stored_rows(1) == [0]
    for golden in LARGE:
        for name in golden.formulas:
            norms = np.linalg.norm(golden.case.matrices[name], axis=1)
            assert int(np.argmin(norms)) in stored_rows_of(golden.case.matrices[name])


def test_no_two_rows_have_the_same_factors() -> None:
    assert len({tuple(pair) for pair in factors(1024).T.tolist()}) == 1024
    assert (factors(1024).min(), factors(1024).max()) == (16, 52)


def judged(golden: GoldenCase, change: Callable[[Any], object], dtype: str = "float64") -> Any:
    """Compare the results of the straightforward implementation after a change of its gradient."""
    truth, outcome = stored_truth(golden.case, golden.expected), plain_outcome(golden.case, dtype)
    assert outcome.gradient is not None
    gradient = outcome.gradient.copy()
    change(gradient)
    return compare(golden.case, truth, replace(outcome, gradient=gradient), bounds(golden.case, truth, dtype), dtype)


def scale(row: int, factor: float) -> Callable[[Any], None]:
    def change(gradient: Any) -> None:
        gradient[row] *= factor

    return change


def swap(one: int, other: int) -> Callable[[Any], None]:
    def change(gradient: Any) -> None:
        gradient[[one, other]] = gradient[[other, one]]

    return change


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    "name", ["supcon/training-128-by-64", pytest.param("info_nce/training-256-by-128", marks=pytest.mark.slow)]
)
def test_no_row_of_a_gradient_is_free(name: str, dtype: str) -> None:
    golden = NAMED[name]
    assert judged(golden, lambda gradient: None, dtype).ratio < 0.5
    stored = stored_rows_of(golden.case.embeddings)
    free = [row for row in range(golden.case.n) if row not in stored]
    for row in (*free[:: len(free) // 7], stored[1]):
        assert f"row {row}: worst at column" in judged(golden, scale(row, 1.1), dtype).first
        assert judged(golden, scale(row, math.nan), dtype).ratio == math.inf
    assert f"row {free[1]}: worst at column" in judged(golden, swap(free[1], free[5]), dtype).first


def test_products_do_not_rely_on_the_straightforward_implementation() -> None:
    """Rows that are not stored may be wrong in the same way as those of the straightforward implementation."""
    golden = NAMED["supcon/training-256-by-128"]
    truth = stored_truth(golden.case, golden.expected)
    assert truth.gradient is not None
    allowed = bounds(golden.case, truth, "float64")
    free = [row for row in range(golden.case.n) if row not in stored_rows_of(golden.case.embeddings)]

    def found(change: Callable[[Any], object]) -> str:
        assert truth.gradient is not None
        gradient = truth.gradient.copy()
        change(gradient)
        wrong = replace(truth, gradient=gradient)
        outcome = replace(plain_outcome(golden.case, "float64"), gradient=gradient)
        return compare(golden.case, wrong, outcome, allowed).first

    assert found(lambda gradient: None) == ""
    for row in free[::40]:
        assert found(scale(row, 1 + 1e-6)).startswith("product 0 of the rows of the gradient with their factors")
    assert free[1] + 31 in free
    assert found(swap(free[1], free[1] + 31)).startswith("product 1")
    assert found(swap(free[1], free[1] + 37)).startswith("product 0")


@pytest.mark.parametrize("name", [name for name, golden in NAMED.items() if golden.case.size <= 258])
def test_the_straightforward_implementation_has_the_proved_products(name: str) -> None:
    golden = NAMED[name]
    truth = stored_truth(golden.case, golden.expected)
    allowed = bounds(golden.case, truth, "float64")
    assert compare(golden.case, truth, plain_outcome(golden.case, "float64"), allowed).ratio < 0.5


def test_only_some_anchors_are_compared_and_their_values_count() -> None:
    golden = NAMED["supcon/training-128-by-64"]
    assert [*golden.expected.anchors] == [0, 31, 32, 63, 64, 127]
    truth = stored_truth(golden.case, golden.expected)
    outcome = plain_outcome(golden.case, "float64")
    assert outcome.anchors is not None
    wrong = replace(outcome, anchors={**outcome.anchors, 63: outcome.anchors[63] * 1.01})
    found = compare(golden.case, truth, wrong, bounds(golden.case, truth, "float64"))
    assert found.first.startswith("value of anchor 63")


def test_the_truth_has_the_rows_that_are_not_stored_from_the_straightforward_implementation() -> None:
    golden = NAMED["dclw/training-128-by-64"]
    truth = stored_truth(golden.case, golden.expected)
    plain = plain_outcome(golden.case, "float64").gradient
    assert truth.gradient is not None
    assert golden.expected.gradient is not None
    assert plain is not None
    missing = np.isnan(golden.expected.gradient)
    assert missing.any()
    assert np.array_equal(truth.gradient[missing], plain[missing])
    np.testing.assert_allclose(truth.gradient, plain, rtol=1e-9, atol=1e-14)
    product = factors(golden.case.n) @ truth.gradient
    np.testing.assert_allclose(truth.products["embeddings"], product, rtol=1e-9, atol=1e-12)


def small(tmp_path: Path, change: Callable[[Any], object] = lambda case: None) -> Path:
    """A folder of fixtures with one case that a formula gives; ``change`` edits its JSON object after the proof."""
    root = tmp_path / "fixtures"
    (root / "golden").mkdir(parents=True)
    shutil.copytree(ROOT / "schema", root / "schema")
    for name in ("flags", "errors"):
        shutil.copy(ROOT / "golden" / f"{name}.json", root / "golden")
    data = json.loads((ROOT / "golden/info_nce.json").read_text(encoding="utf-8"))
    case = {"id": "info_nce/by-formula", "flags": ["two-towers"], "note": "A formula.", "embeddings": FORMULA}
    case |= {"arguments": {"embeddings_b": {**FORMULA, "seed": 13}}, "keywords": {"temperature": 0.5}}
    path = root / "golden/info_nce.json"
    path.write_text(dump_json({**data, "cases": [case]}), encoding="utf-8")
    write_manifest(root)
    prove_golden(root, processes=1)
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data["cases"][0])
    path.write_text(dump_json(data), encoding="utf-8")
    write_manifest(root)
    return root


def test_a_case_is_proved_from_its_formulas(tmp_path: Path) -> None:
    root = small(tmp_path)
    assert prove_golden(root, processes=1) == []
    (golden,) = load_golden(root)
    assert golden.formulas == {"embeddings_a": Formula(**FORMULA), "embeddings_b": Formula(**{**FORMULA, "seed": 13})}
    whole, part = certify(golden.case), golden.expected
    assert part.loss == whole.loss
    assert part.anchors == {i: whole.anchors[i] for i in stored_rows(80)}
    for name, right, found in (
        ("embeddings_a", whole.gradient, part.gradient),
        ("embeddings_b", whole.other_gradients["embeddings_b"], part.other_gradients["embeddings_b"]),
    ):
        assert right is not None
        assert found is not None
        rows = stored_rows_of(golden.case.matrices[name])
        np.testing.assert_array_equal(found[rows], right[rows])
        assert np.isnan(np.delete(found, rows, axis=0)).all()
        exact = [[math.fsum(column) for column in (f[:, None] * right).T.tolist()] for f in factors(40)]
        np.testing.assert_allclose(part.products[name], exact, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("embeddings", "seed"), 0, "$.cases[0].embeddings.seed: 0 is less than"),
        (("expected", "gradient", "rows"), [0, 1], "expected.gradient.rows: expected [0, "),
        (("expected", "anchors", "rows"), [0, 1], "expected.anchors.rows: expected [0, "),
        (("expected", "gradient", "products"), [[1.0] * 6], "expected.gradient.products: expected shape [2, 6]"),
        (("expected", "gradient", "values"), [[1.0] * 6], "expected.gradient.values: expected shape ["),
    ],
)
def test_a_damaged_part_is_named(tmp_path: Path, path: tuple[str, ...], value: Any, message: str) -> None:
    def change(case: Any) -> None:
        for key in path[:-1]:
            case = case[key]
        case[path[-1]] = value

    with pytest.raises(FixtureError) as caught:
        load_golden(small(tmp_path, change))
    assert message in str(caught.value)


def test_the_archive_and_show_write_out_the_rows() -> None:
    golden = NAMED["nt_xent/training-128-by-64"]
    data = json.loads(fixtures_archive.written_out((ROOT / "golden/nt_xent.json").read_bytes()))
    case = next(case for case in data["cases"] if case["id"] == "nt_xent/training-128-by-64")
    assert case["embeddings"] == golden.case.embeddings.tolist()
    assert isinstance(
        next(case for case in data["cases"] if "refs-520" in case["id"])["arguments"]["ref_embeddings"], list
    )
    text = list(describe(golden, load_flags()))
    words = "rows 128, columns 64, groups 64, seed 3001, group_seed 3002, exponent -6"
    assert f"  embeddings by a formula: {words}" in text
    assert f"  row 127: {', '.join(map(repr, golden.case.embeddings.tolist()[127]))}" in text
    assert not any("nan" in line for line in text)
