"""The HTML page: what it contains, and what it does in a browser."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pairproof.conformance import cli
from pairproof.conformance.diagnose.explain import Diagnosis, Reason
from pairproof.conformance.documents.load import load_worked, worked_cases
from pairproof.conformance.implementations import ALL, Unavailable
from pairproof.conformance.implementations.documents import stacked_criterion
from pairproof.conformance.implementations.fast import Fast
from pairproof.conformance.judge import ranges
from pairproof.conformance.judge.check import Failing, check_loss
from pairproof.conformance.judge.options import CouldNotRun, Selection
from pairproof.conformance.judge.parity import parity
from pairproof.conformance.judge.results import Check, Status
from pairproof.conformance.judge.verify import run
from pairproof.conformance.page import differences, findings
from pairproof.conformance.page import write as pages
from pairproof.conformance.page.plots import BOTTOM, HEIGHT, LEFT, NAME_ROW, TOP, WIDTH, Chart, Line, bars, range_bar
from pairproof.conformance.suite.cases import Case
from pairproof.conformance.suite.golden import load_golden
from pairproof.conformance.suite.records import Outcome
from pairproof.conformance.training import diagnose
from pairproof.fast import supcon_loss as fast_supcon
from pairproof.reference import nt_xent_pairwise_loss, supcon_loss

CASES = (
    *("supcon_notebook/*", "batch_tutorial/*", "pair_notebook/*"),
    *("golden/supcon/lonely-*", "golden/nt_xent/one-positive*", "golden/nt_xent/temperature-0-001"),
)
LABELS = [0, 1, 2] * 3
"""The labels of the notebook's batch of nine rows."""
THREE = "supcon_notebook/supcon-3x3"
IMPLEMENTATIONS = ("reference", "fast", "pair-notebook", "batch-tutorial", "stacked-criterion")
FAILING = ("golden/supcon/two-positives", "golden/supcon/two-views-stacked")


@pytest.fixture(scope="session")
def data() -> dict[str, Any]:
    selection = Selection(implementations=IMPLEMENTATIONS, cases=CASES)
    return pages.data_of(run(selection))


@pytest.fixture(scope="session")
def failing_data() -> dict[str, Any]:
    return pages.data_of(check_loss(self_kept, "supcon", cases=FAILING))


@pytest.fixture(scope="session")
def path(data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "index.html"
    file.write_text(pages.page_of(data), encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def check_path(failing_data: dict[str, Any], path: Path) -> Path:
    file = path.with_name("check.html")
    file.write_text(pages.page_of(failing_data), encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def figure_paths(path: Path) -> Sequence[Path]:
    """The pages of a run, of a right loss in several processes, and of one without gradients through the gather."""
    targets = Path(__file__).parent / "targets" / "distributed.py"
    run, *ranks = [path.with_name(f"{name}.html") for name in ("run", "right", "no_gradient")]
    pages.write_figures(diagnose(class_sizes=[2] * 4, temperature=0.5, values=[2.5, 2.2, math.nan, 0.9]), run)
    for file in ranks:
        pages.write_figures(parity(f"{targets}:{file.stem}", world_size=3, only="gradient", html=file), file)
    return run, *ranks


def test_the_page_contains_its_data_and_loads_nothing(path: Path, data: dict[str, Any]) -> None:
    text = path.read_text(encoding="utf-8")
    (embedded,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert json.loads(embedded) == json.loads(json.dumps(data))
    assert not re.findall(r"<(?:script|img|iframe)[^>]+src=|<link[^>]+href=|@import|url\(http", text)
    assert path.stat().st_size < pages.LARGEST


def view_of(data: dict[str, Any], name: str) -> dict[str, Any]:
    """The batch of the worked examples with this call."""
    (found,) = (view for one in data["documents"] for view in one["views"] if name in view["calls"])
    return dict(found)


def test_terms_are_those_of_the_reference(data: dict[str, Any]) -> None:
    view = view_of(data, THREE)
    cases = worked_cases(next(f for f in load_worked() if f.document.id == "supcon_notebook"))
    case = next(case for case in cases if case.id == view["id"])
    assert case.arguments["labels"] == tuple(LABELS)
    assert view["positive"] == [[j for j in range(9) if j != i and LABELS[j] == LABELS[i]] for i in range(9)]
    for name, function in (("supcon", supcon_loss), ("nt_xent_pairwise", nt_xent_pairwise_loss)):
        loss, terms = function(case.embeddings, LABELS, temperature=case.temperature)
        shown = view["losses"][name]
        assert shown["value"] == pytest.approx(float(loss), rel=1e-5)
        for (anchor, other), pair in terms.pairs.items():
            found = next(entry for entry in shown["pairs"][str(anchor)] if entry[0] == other)
            assert found[2] == list(pair.members)
            assert found[5] == pytest.approx(float(pair.value), rel=1e-5)
            assert found[3] / found[4] == pytest.approx(found[6], rel=1e-4) == math.exp(-found[5])
    assert "nt_xent" not in view["losses"]  # two positives per row
    assert view["lacks"] == ["nt_xent_loss"]


def test_matrices_are_those_of_the_batch(data: dict[str, Any]) -> None:
    view = view_of(data, THREE)
    rows = np.array(view["embeddings"])
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    assert np.abs(unit @ unit.T - np.array(view["similarity"])).max() < 1e-3
    weights = np.exp(unit @ unit.T) * (1 - np.eye(9))
    assert np.abs(weights / weights.sum(axis=1, keepdims=True) - np.array(view["softmax"])).max() < 1e-3


def test_sums_have_the_value_that_they_state(data: dict[str, Any]) -> None:
    names = {"__builtins__": {}, "log": math.log}
    checked = 0
    for view in (view for one in data["documents"] for view in one["views"]):
        for loss in view["losses"].values():
            text, _, value = loss["expression"].rpartition(" = ")
            if "e-" in text or "log 0" in text.replace("log 0.", ""):
                continue  # a ratio that is rounded to one digit, or to 0
            found = eval(re.sub(r"log ([0-9.e+-]+)", r"log(\1)", text.replace(" x ", " * ")), names)
            assert found == pytest.approx(float(value), rel=5e-2, abs=2e-3)
            assert float(value) == pytest.approx(loss["value"], rel=1e-3)
            checked += 1
    assert checked > 20


def test_a_batch_is_shown_once_with_the_figures_of_all_its_calls(data: dict[str, Any]) -> None:
    view = view_of(data, THREE)
    assert view["calls"] == [THREE, "supcon_notebook/pairwise-3x3", "supcon_notebook/views-3x3"]
    assert view["losses"]["supcon"]["calls"] == [THREE, "supcon_notebook/views-3x3"]
    assert view["losses"]["nt_xent_pairwise"]["calls"] == ["supcon_notebook/pairwise-3x3"]
    for document in data["documents"]:
        calls = [call for one in document["views"] for loss in one["losses"].values() for call in loss["calls"]]
        assert sorted(calls) == sorted(call for one in document["views"] for call in one["calls"])
        for figure in document["figures"]:
            if figure["call"] and figure["value"] and figure["verdict"] == "reproduced":
                (loss,) = (
                    x for one in document["views"] for x in one["losses"].values() if figure["call"] in x["calls"]
                )
                assert loss["value"] == pytest.approx(float(figure["value"]), rel=1e-5)
                assert float(figure["printed"]) == pytest.approx(loss["value"], rel=1e-4, abs=1e-4)


def test_every_button_of_a_batch_has_its_own_label() -> None:
    report = run(Selection(implementations=("reference",), cases=("supcon_tests/*",), dtypes=("float64",)))
    (document,) = (one for one in pages.data_of(report)["documents"] if one["id"] == "supcon_tests")
    for view in document["views"]:
        labels = [loss["label"] for loss in view["losses"].values()]
        assert len(set(labels)) == len(labels)
    (capped,) = (view for view in document["views"] if view["id"] == "supcon_tests/out-zero-cap")
    supcon = capped["losses"]["supcon"]
    assert (supcon["label"], supcon["calls"]) == ("supcon_loss (8 ignored pairs)", ["supcon_tests/out-zero-cap"])
    members = {(int(i), j) for i, pairs in supcon["pairs"].items() for pair in pairs for j in pair[2]}
    assert len(supcon["ignored"]) == 8
    assert not members & set(map(tuple, supcon["ignored"]))
    (figure,) = (one for one in document["figures"] if one["id"] == "supcon_tests/out-zero-cap")
    assert figure["call"] == "supcon_tests/out-zero-cap"


def test_cases_of_documents_have_a_size_and_name_their_document(data: dict[str, Any]) -> None:
    (case,) = (one for one in data["cases"] if one["id"] == THREE)
    assert case["sizes"] == "9 rows of 5 numbers"
    assert (case["document"], case["flags"]) == ("supcon_notebook", [])
    assert set(data["flags"]) == {flag for one in data["cases"] for flag in one["flags"]}


def self_kept(embeddings: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
    """supcon, wrong: the anchor itself is in the denominator."""
    z = torch.nn.functional.normalize(embeddings, dim=1)
    logits = z @ z.T / temperature
    positive = (labels[:, None] == labels) & ~torch.eye(len(z), dtype=torch.bool)
    each = torch.logsumexp(logits, dim=1, keepdim=True) - logits
    return ((each * positive).sum(dim=1) / positive.sum(dim=1)).mean()


def test_the_reason_of_a_check_leads_and_its_numbers_add_up(failing_data: dict[str, Any], check_path: Path) -> None:
    levels = {one["level"]: one for one in failing_data["levels"]}
    assert list(levels) == ["formula", "policies", "required: up to policies", "range", "digits", "all levels"]
    for name in ("formula", "required: up to policies", "all levels"):
        assert (levels[name]["checks"], levels[name]["cases"]) == ({"failed": 4}, len(FAILING))
    assert (levels["range"]["checks"], levels["range"]["cases"]) == ({"failed": 0}, 0)
    shown = check_path.read_text(encoding="utf-8").partition("<main>")[0]
    reason = "the anchor itself is kept in the denominator: explains 2 of 2 failing cases, none left"
    assert shown.index("✗ does not conform at level policies</p>") < shown.index(reason) < shown.index("reading: ")
    assert shown.count(failing_data["title"]) == 2  # the title of the window, and the heading


def test_failures_deviations_and_passes_differ_by_more_than_colour(data: dict[str, Any]) -> None:
    assert list(data["matrix"]) == [kind.name for kind in ALL if kind.name in IMPLEMENTATIONS]
    counts = {"passed": 3, "failed": 1, "errored": 1, "deviates": 4, "skipped": 5, "wrong": True}
    text = pages.page_of(data | {"matrix": {"fast": {"supcon": counts}}, "documents": [], "findings": []})
    links = re.findall(r'<a class="(\w+)" href="#cases" data-who="fast" [^>]+>(.+?)<', text)
    assert links == [("bad", "✗ 2"), ("deviates", "! 4"), ("good", "✓ 3")]
    assert re.search(r"#matrix a.bad, mark {[^}]*background: var\(--bad\)", text)


def test_a_failing_case_shows_expected_and_computed_terms_side_by_side(failing_data: dict[str, Any]) -> None:
    name, data = FAILING[0], failing_data
    failing = data["failures"][0]
    assert (failing["case"], data["more_failures"]) == (name, 0)
    assert failing["computed"] == "the anchor itself is kept in the denominator"
    assert failing["repeat"].startswith("pairproof check ")
    tables = {table["title"]: table for table in failing["tables"]}
    assert list(tables) == [
        *("The loss", "The values of the anchors", "The pairs"),
        "The gradient with respect to embeddings",
    ]
    for table in tables.values():
        assert [row["first"] for row in table["rows"]] == [True] + [False] * (len(table["rows"]) - 1)

    golden = next(one for one in load_golden() if one.id == name)
    rows = torch.tensor(golden.case.embeddings, requires_grad=True)
    labels = torch.tensor(golden.case.arguments["labels"])
    value = self_kept(rows, labels, golden.case.temperature)
    (gradient,) = torch.autograd.grad(value, rows)
    (loss,) = tables["The loss"]["rows"]
    assert loss["name"] == "loss"
    assert (loss["expected"], loss["found"]) == ([pytest.approx(golden.expected.loss)], [pytest.approx(value.item())])
    assert golden.expected.gradient is not None
    for k, row in enumerate(tables["The gradient with respect to embeddings"]["rows"]):
        assert row["name"] == f"gradient of row {k}"
        assert row["expected"] == pytest.approx(golden.expected.gradient[k].tolist(), rel=1e-5)
        assert row["found"] == pytest.approx(gradient[k].tolist(), rel=1e-5)

    # By hand: the denominator of a pair has e^(1/temperature) in addition.
    z = golden.case.embeddings / np.linalg.norm(golden.case.embeddings, axis=1, keepdims=True)
    exponentials = np.exp(z @ z.T / golden.case.temperature)
    pairs = [(i, j) for i in range(len(z)) for j in range(len(z)) if i != j and labels[i] == labels[j]]
    table = tables["The pairs"]
    assert (table["columns"], table["found"]) == (["numerator", "denominator", "-log of the ratio"], "as computed")
    for (i, j), row in zip(pairs, table["rows"], strict=True):
        whole = exponentials[i].sum()
        others = whole - exponentials[i, i]
        assert row["name"] == f"anchor {i} with {j}"
        for shown, below in ((row["expected"], others), (row["found"], whole)):
            above = exponentials[i, j]
            assert shown == pytest.approx([above, below, math.log(below / above)], rel=1e-4)
    means = {
        i: np.mean([row["found"][2] for (a, _), row in zip(pairs, table["rows"], strict=True) if a == i])
        for i in range(len(z))
    }
    for i, row in enumerate(tables["The values of the anchors"]["rows"]):
        assert row["found"] == [pytest.approx(means[i], rel=1e-5)]


def test_a_failing_case_is_drawn_with_its_terms_as_bars(failing_data: dict[str, Any], check_path: Path) -> None:
    failing = failing_data["failures"][0]
    rows = next(one for one in load_golden() if one.id == failing["case"]).case.embeddings
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    assert np.array(failing["batch"]["similarity"]) == pytest.approx(unit @ unit.T, abs=5e-3)
    (table,) = (one for one in failing["tables"] if one["title"] == "The pairs")
    text = bars(table)
    assert text in check_path.read_text(encoding="utf-8")
    values = [x for row in table["rows"] for x in (row["expected"][-1], row["found"][-1])]
    drawn = re.findall(r'class="mark (c0|c1 hollow)" d="M([0-9.]+) [0-9]+H([0-9.]+)v10', text)
    assert [kind for kind, _, _ in drawn] == ["c0", "c1 hollow"] * len(table["rows"])
    lengths = np.array([float(end) - float(start) for _, start, end in drawn])
    assert lengths / lengths.max() == pytest.approx(np.array(values) / max(values), abs=1e-3)
    assert re.findall(r"▶ ([^<]+)", text) == [table["rows"][0]["name"]]
    missing = table | {"rows": [table["rows"][0] | {"found": [None, "inf", "nan"]}]}
    assert re.findall(r">([^<>]+)</text>", bars(missing))[1:] == [str(values[0]), "nan"]


def test_a_failure_without_known_terms_shows_what_was_returned() -> None:
    golden = next(one for one in load_golden() if one.id == "golden/supcon/two-positives")
    gradient = golden.expected.gradient
    assert gradient is not None
    values, shift = golden.expected.values, np.zeros_like(gradient)
    shift[3, 0] = 0.123
    outcome = Outcome([values[0] + 0.123 * golden.case.embeddings[3, 0]], gradient + shift)
    check = Check("case", "target", "supcon", golden.id, "float64", Status.FAILED, "loss: expected 1, got 2")
    evidence = Failing(golden.case, golden.expected, {"float64": outcome})
    failing = differences._failure([check], evidence, None, {}, search=True)
    assert failing["computed"] == ""
    assert [(one["title"], one["found"]) for one in failing["tables"]] == [
        ("The loss", "returned"),
        ("The pairs", ""),
        ("The gradient with respect to embeddings", "returned"),
    ]
    assert all(row["found"] == [] and not row["first"] for row in failing["tables"][1]["rows"])
    assert [row["first"] for row in failing["tables"][2]["rows"]] == [k == 3 for k in range(len(gradient))]


def test_an_option_that_explains_a_failure_gives_the_terms() -> None:
    def dropped(embeddings: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
        return fast_supcon(embeddings, labels, temperature=temperature, denominator="one_positive")

    name = "golden/supcon/two-positives"
    data = pages.data_of(check_loss(dropped, "supcon", cases=(name,)))
    (failing,) = data["failures"]
    assert "denominator" in failing["computed"]
    golden = next(one for one in load_golden() if one.id == name)
    right = nt_xent_pairwise_loss(
        golden.case.embeddings, golden.case.arguments["labels"], temperature=golden.case.temperature
    )
    (table,) = (one for one in failing["tables"] if one["title"] == "The pairs")
    for row, (key, pair) in zip(table["rows"], sorted(right.terms.pairs.items()), strict=True):
        assert row["name"] == f"anchor {key[0]} with {key[1]}"
        assert row["found"][2] == pytest.approx(float(pair.value), rel=1e-5)


def test_an_anchor_that_is_left_out_has_no_computed_value() -> None:
    golden = next(one for one in load_golden() if one.id == "golden/supcon/lonely-zero")
    case, lonely = golden.case, [i for i, positives in enumerate(golden.case.positives()) if not positives]
    loss = fast_supcon(
        torch.tensor(case.embeddings),
        torch.tensor(case.arguments["labels"]),
        temperature=case.temperature,
        no_positive="drop",
    )
    check = Check("case", "target", "supcon", case.id, "float64", Status.FAILED, "loss: expected 1, got 2")
    reason = Reason("anchors without positives are left out of the mean", (case.id,), "no_positive=drop")
    evidence = Failing(case, golden.expected, {"float64": Outcome([loss.item()])})
    failing = differences._failure([check], evidence, Diagnosis([reason], 1), {}, search=True)
    assert failing["computed"] == reason.words
    (table,) = (one for one in failing["tables"] if one["title"] == "The values of the anchors")
    assert [i for i, row in enumerate(table["rows"]) if row["found"] == [None]] == lonely != []
    assert [i for i, row in enumerate(table["rows"]) if row["first"]] == lonely[:1]
    assert all(row["found"] in ([None], row["expected"]) for row in table["rows"])


def test_a_long_table_shows_the_rows_at_the_first_difference() -> None:
    rows = [(f"row {k}", [float(k)], [float(k) + (k >= 60)]) for k in range(100)]
    table = differences._table("Rows", "returned", ["value"], rows, "")
    assert len(table["rows"]) == differences.MOST_LINES
    assert [row["name"] for row in table["rows"] if row["first"]] == ["row 60"]
    assert table["rows"][0]["name"] == f"row {60 - differences.BEFORE}"
    assert table["left_out"] == 100 - differences.MOST_LINES
    named = differences._table("Rows", "returned", ["value"], rows, "row 99: expected 99.0, got 100.0")
    assert [row["name"] for row in named["rows"] if row["first"]] == ["row 99"]


def test_failures_of_a_run_are_evaluated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Fast.evaluate

    def wrong(self: Fast, case: Case, dtype: str) -> Outcome:
        found = right(self, case, dtype)
        return replace(found, values=[1.5 * value for value in found.values])

    monkeypatch.setattr(Fast, "evaluate", wrong)
    selection = Selection(implementations=("fast",), cases=("golden/nt_xent/one-positive*",), dtypes=("float64",))
    report = run(selection)
    found = differences.failures(report, differences.failing_cases(report))
    assert [one["implementation"] for one in found] == ["fast"] * len(found) != []
    for failing in found:
        (loss,) = failing["tables"][0]["rows"]
        assert loss["found"] == [pytest.approx(1.5 * loss["expected"][0])]
        assert loss["first"]


def test_places_in_a_chart_are_proportional_to_the_numbers() -> None:
    lines = [Line("a <b>", [(0, 1), (5, 3), (10, math.nan), (20, 5)]), Line("c", [(0, 2), (20, 2)], faint=True)]
    chart = Chart('A "title"', "x", "y", lines)
    text = chart.svg()
    assert "a &lt;b&gt;" in text
    assert 'aria-label="A &quot;title&quot;"' in text
    path = re.findall(r'<path class="line c0" d="(M[^"]+)"/>', text)[0]
    assert re.sub(r"[^ML]", "", path) == "MLM"  # interrupted where the value is not finite
    (ax, ay), (bx, by), (cx, cy) = (map(float, place.split()) for place in re.findall(r"[ML]([^ML]+)", path))
    assert (bx - ax) / (cx - ax) == pytest.approx(5 / 20, abs=2e-3)
    assert (by - ay) / (cy - ay) == pytest.approx(2 / 4, abs=2e-3)
    assert LEFT <= ax < cx <= WIDTH
    assert TOP <= cy < ay <= HEIGHT
    (cross,) = re.findall(r'<path class="cross c0" d="M([0-9.]+) ', text)
    assert float(cross) + 4 == pytest.approx((ax + cx) / 2, abs=0.2)
    assert Chart.from_data(json.loads(json.dumps(chart.data()))).svg() == text


def test_a_curve_is_drawn_among_the_levels_of_its_run(tmp_path: Path) -> None:
    levels = diagnose(class_sizes=[2] * 4, temperature=0.5).levels
    assert levels.lowest is not None
    values = [levels.chance, *([levels.collapsed, 1e9, math.nan, -1e9] * 500), levels.lowest]
    found = diagnose(class_sizes=[2] * 4, temperature=0.5, values=values)
    pages.write_figures(found, tmp_path / "run.html")
    (text,) = re.findall("<svg.*</svg>", (tmp_path / "run.html").read_text(encoding="utf-8"))
    rules = [float(y) for y in re.findall(r'class="rule" d="M[0-9.]+ ([0-9.]+)H', text)]
    scale = (rules[0] - rules[1]) / (levels.chance - levels.lowest)
    assert (rules[0] - rules[2]) / (levels.collapsed - levels.lowest) == pytest.approx(scale, rel=0.01)
    ((top, bottom),) = re.findall(r'class="band" d="M[0-9.]+ ([0-9.]+)H[0-9.]+V([0-9.]+)H', text)
    assert float(bottom) - float(top) == pytest.approx(6 * levels.spread * scale, abs=0.2)
    # The first and the last point lie on their levels, and the others that cannot be drawn are crosses on the edges.
    (path,) = re.findall(r'class="line c0" d="M([^"]+)"', text)
    points = [[float(x) for x in point.split()] for point in re.split("[ML]", path)]
    assert (points[0][1], points[-1][1]) == (rules[1], rules[0])
    crosses = {round(float(y)) for y in re.findall(r'class="cross c0" d="M[0-9.]+ ([0-9.]+)', text)}
    assert crosses == {TOP - 4, HEIGHT - BOTTOM - 4}
    assert len(points) < 1000
    # The names are those of the levels and of the last value, and do not overlap.
    names = re.findall(r'y="([0-9.]+)"( class="strong")?>((?:lowest|chance|collapsed|value)[^<]+)<', text)
    assert [name.split()[0] for _, _, name in names] == ["chance", "collapsed", "lowest", "value"]
    assert [name for _, strong, name in names if strong] == [f"value {levels.lowest:.4g}"]
    places = [float(y) for y, _, _ in names]
    assert all(after - before >= NAME_ROW - 0.1 for before, after in pairwise(places))
    undefined = diagnose(class_sizes=[1, 2], no_positive="nan", value=1.0)
    pages.write_figures(undefined, tmp_path / "run.html")
    assert "<svg" not in (tmp_path / "run.html").read_text(encoding="utf-8")


def test_a_logarithmic_chart_draws_zeros_at_its_lowest_value() -> None:
    chart = Chart("t", "x", "y", [Line("a", [(1, 1e-4), (10, 0.0), (100, 1.0)])], True, True, lowest=1e-8)
    path = re.findall(r'<path class="line c0" d="(M[^"]+)"/>', chart.svg())[0]
    (ax, ay), (bx, by), (cx, cy) = (map(float, place.split()) for place in re.findall(r"[ML]([^ML]+)", path))
    assert bx - ax == pytest.approx(cx - bx, abs=0.2)
    assert ay - by == pytest.approx(cy - ay, abs=0.2) == pytest.approx((cy - by) / 2, abs=0.2)
    assert by > ay > cy
    places = [float(x) for x in re.findall(r"M([0-9.]+) 7m", range_bar(0.001, 0.1, 1.0))]
    assert places == [4.0, 154.0]


def test_the_tutorials_loss_is_constant_where_its_gradient_is_zero(data: dict[str, Any]) -> None:
    (found,) = (one for one in data["findings"] if one["id"] == "constant")
    losses, slopes = (chart["lines"][0]["points"] for chart in found["charts"])
    assert slopes[-1] == [1.0, 0.0]
    assert slopes[0][1] > 0.01
    for (factor, loss), (same, slope) in zip(losses, slopes, strict=True):
        assert factor == same
        assert slope > 0 or loss == pytest.approx(2 * math.log(4) / 5, rel=1e-5)
    assert "0.5545" in found["because"]


def test_the_clamped_logarithm_is_exact_at_first_and_then_100(data: dict[str, Any]) -> None:
    (found,) = (one for one in data["findings"] if one["id"] == "clamp")
    exact, single, double = (dict(map(tuple, line["points"])) for line in found["charts"][0]["lines"])
    assert all(y == pytest.approx(math.log1p(math.exp(x)), rel=1e-5) for x, y in exact.items())
    assert (single[8.0], single[20.0], double[20.0], double[40.0]) == (
        pytest.approx(8.0, rel=1e-2),
        100,
        pytest.approx(20),
        100,
    )
    assert "62.898780822753906" in found["because"]
    assert "48.2864" in found["proof"]


def test_charts_of_pml_show_a_rising_mean_and_a_saturated_loss() -> None:
    try:
        pml = next(kind for kind in ALL if kind.name == "pml")({}, "cpu")
    except Unavailable as reason:
        pytest.skip(str(reason))
    reasons = {one.name: one for one in pml.deviations}
    rising = findings._rising_mean(pml, reasons["solved anchors are left out of the mean"])
    exact, returned = ([y for _, y in line.points] for line in rising.charts[0].lines)
    assert exact == sorted(exact, reverse=True)
    assert returned == sorted(returned)
    # The anchors of solved pairs have a loss of 0 and are left out: the sum is divided by fewer.
    assert returned == pytest.approx([value * 8 / (8 - k) for k, value in enumerate(exact)], rel=1e-5)
    saturated = findings._saturation(pml, reasons["saturated logarithm"])
    points = saturated.charts[0].lines[0].points
    assert [y for x, y in points if x < 80] == pytest.approx([x for x, _ in points if x < 80], rel=1e-4)
    assert {round(y, 2) for x, y in points if x > 95} == {87.34}
    assert [y for x, y in saturated.charts[1].lines[0].points if x > 105] == [0.0] * sum(x > 105 for x, _ in points)


def test_sweeps_show_the_temperature_at_which_a_loss_breaks(data: dict[str, Any]) -> None:
    assert {one["loss"] for one in data["sweeps"]} <= set(data["losses"])
    (sweep,) = (one for one in data["sweeps"] if one["loss"] == "nt_xent")
    rows = torch.tensor(ranges.ROWS, dtype=torch.float32)
    half = len(rows) // 2
    found = {t: float(stacked_criterion(rows[:half], rows[half:], t)) for t in findings.TEMPERATURES}
    broken = max(t for t, value in found.items() if not math.isfinite(value))
    (row,) = (row for row in sweep["breaks"] if row["who"] == ["stacked-criterion"])
    assert row["value"] == {"at": broken, "error": "not finite"}
    assert sweep["right"] == ["fast"]
    lines = {line["name"]: dict(map(tuple, line["points"])) for line in sweep["chart"]["lines"]}
    assert {t for t, y in lines["stacked-criterion"].items() if y == "inf"} >= {t for t in found if t <= broken}
    (faint,) = (line["name"] for line in sweep["chart"]["lines"] if line["faint"])
    assert max(lines[faint].values()) < 1e-5


def test_speed_is_that_of_the_benchmark(data: dict[str, Any]) -> None:
    timings = json.loads(pages.BENCH.read_text(encoding="utf-8"))["timings"]
    rows = [row for row in timings if row["implementation"] == "plain" and row["form"] == "supcon, two views"]
    rows = [row for row in rows if (row["regime"], row["d"], row["dtype"]) == ("default", 128, "float32")]
    (supcon,) = (one for one in data["speed"] if one["loss"] == "supcon")
    for chart, part in zip(supcon["charts"], ("both_ratio", "forward_ratio"), strict=True):
        (line,) = (line for line in chart["lines"] if line["name"] == "two views")
        expected = [[row["n"], pytest.approx(row[part][1], rel=1e-5)] for row in sorted(rows, key=lambda row: row["n"])]
        assert line["points"] == expected


def test_every_bug_names_its_source_and_a_case_that_shows_it(data: dict[str, Any]) -> None:
    golden = {one.id: one for one in load_golden()}
    wrong = [one for one in data["public"] if one["verdict"] == "does not conform"]
    assert len(wrong) > 10
    for one in wrong:
        assert one["who"] in one["link"] or "/" not in one["who"]
        assert one["at"]
        assert one["case"] in golden
        assert "expected" in one["message"]
    assert [one["case"] for one in data["public"] if one not in wrong] == [""] * (len(data["public"]) - len(wrong))
    (stacked,) = (one for one in data["deviations"] if one["wrong"] and one["who"] == ["stacked-criterion"])
    assert stacked["found"] in ("inf", "nan")
    assert (
        stacked["expected"] == pytest.approx(golden[stacked["case"]].expected.loss, rel=1e-5)
        if stacked["case"] in golden
        else stacked["expected"] == ""
    )


def test_a_bug_of_the_gradient_shows_the_gradient() -> None:
    cases = ("golden/supcon_epsilon/one-positive-balanced-dot",)
    found = pages.data_of(run(Selection(implementations=("batch-tutorial",), cases=cases, dtypes=("float64",))))
    (shown,) = found["deviations"]
    assert (shown["case"], shown["expected"], shown["found"]) == (*cases, "", "")
    assert re.fullmatch(r"gradient of row \d+: .*expected [-0-9.e]+, got [-0-9.e]+", shown["term"])


def test_printed_digits_that_differ_name_their_dtype(data: dict[str, Any]) -> None:
    figures = {one["id"]: one for document in data["documents"] for one in document["figures"]}
    assert figures["pair_notebook/in-99-loss-0.01"]["rounded"] == "float32"  # 167.333969 printed, 167.333972 exact
    assert figures["supcon_notebook/out-14-loss"]["rounded"] == "float64"  # differs in the last of 17 digits
    assert figures["batch_tutorial/loss"]["value"] == "0.554517744"


def test_a_large_page_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = check_loss("pairproof.fast:nt_xent_loss", "nt_xent", cases=("golden/nt_xent/two-rows",))
    pages.write_page(found, tmp_path / "small.html")
    monkeypatch.setattr(pages, "LARGEST", 1000)
    with pytest.raises(CouldNotRun, match="more than 1000"):
        pages.write_page(found, tmp_path / "large.html")
    assert not (tmp_path / "large.html").exists()


@pytest.mark.slow
def test_commands_write_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*arguments: str) -> int:
        with pytest.raises(SystemExit) as caught:
            cli.main(list(arguments))
        return int(caught.value.code or 0)

    out = tmp_path / "made" / "here"
    assert call("report", "--out", str(out), "--case", "batch_tutorial/*", "--impl", "reference") == 0
    assert f"{out}/index.html: " in "".join(capsys.readouterr().out.split("\n"))
    assert "Worked examples" in (out / "index.html").read_text(encoding="utf-8")
    (tmp_path / "losses.py").write_text("def loss(embeddings, partners):\n    return (embeddings**2).sum()\n")
    monkeypatch.chdir(tmp_path)
    line = "check losses.py:loss --loss nt_xent --temperature 0.07 --case golden/nt_xent/two-rows --html page.html"
    assert call(*line.split()) == 1
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "losses.py:loss as nt_xent" in text
    assert 'id="failures"' in text
    assert "repeat: <code>pairproof check losses.py:loss" in text
    assert re.search('>expected</th><th scope="colgroup" colspan="1">returned</th>', text)
    (tmp_path / "file").touch()
    assert call("report", "--out", "file") == 2


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    if find_spec("playwright") is None:
        pytest.skip("playwright is not installed: pip install playwright")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        opened = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


def cells(table: Any) -> list[list[str]]:
    """The texts of a table, row by row."""
    found: list[list[str]] = table.evaluate(
        "(table) => [...table.rows].map((row) => [...row.cells].map((x) => x.textContent))"
    )
    return found


def assert_rows_are_lists_on_a_phone(table: Any) -> None:
    """Assert that a table fits on a narrow screen: its header is hidden, and every cell shows its own label."""
    assert table.evaluate("(table) => table.parentElement.scrollWidth <= table.parentElement.clientWidth")
    assert not table.locator(".head").first.is_visible()
    labels = table.evaluate(
        """(table) => [...table.querySelectorAll("td")].map((one) => [getComputedStyle(one, "::before").content,
            one.dataset.label])"""
    )
    assert labels
    assert all(label and shown.startswith(f'"{label}') for shown, label in labels)


@pytest.mark.parametrize(
    ("scheme", "width"),
    [("light", 390), *(pytest.param(name, 1280, marks=pytest.mark.slow) for name in ("light", "dark"))],
)
def test_the_page_works_in_a_browser(browser: Any, path: Path, data: dict[str, Any], scheme: str, width: int) -> None:
    errors: list[str] = []
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: errors.append(request.url) if not request.url.startswith("file:") else None)
    page.goto(path.as_uri())

    # Choose an anchor and a loss: the marked pairs and the numbers are those of the data.
    view = view_of(data, THREE)
    shown = page.locator(f'.view[data-view="{view["id"]}"]')
    if shown.get_attribute("open") is None:
        shown.locator("summary").click()
    for loss in ("supcon", "nt_xent_pairwise", "nt_bxent"):
        shown.locator(f'button[data-loss="{loss}"]').click()
        shown.locator('button[data-anchor="4"]').focus()
        page.keyboard.press("Enter")
        given = view["losses"][loss]
        pairs = given["pairs"]["4"]
        binary = loss == "nt_bxent"
        for table in shown.locator("table.heat").all()[1:]:
            for kind, columns in (
                ("numerator", {pair[0] for pair in pairs if not binary}),
                ("denominator", {j for pair in pairs for j in pair[2]}),
                ("positive-term", {pair[0] for pair in pairs if binary and LABELS[pair[0]] == LABELS[4]}),
                ("negative-term", {pair[0] for pair in pairs if binary and LABELS[pair[0]] != LABELS[4]}),
            ):
                marked = table.locator(f'tr[data-row="4"] td.{kind}')
                assert {int(cell.get_attribute("data-column")) for cell in marked.all()} == columns
                assert table.locator(f"td.{kind}").count() == len(columns)
        assert shown.locator(".said").inner_text().endswith(f"Loss of the batch: {given['value']}.")
        assert shown.locator(".expression code").inner_text() == given["expression"]
        rows = cells(shown.locator("table.terms"))[1:]
        assert [float(row[-1]) for row in rows] == [pair[5] for pair in pairs]
        assert [int(row[0]) for row in rows] == [pair[0] for pair in pairs]
        if loss != "nt_bxent":
            assert [[float(row[2]), float(row[3]), float(row[5])] for row in rows] == [
                [pair[3], pair[4], pair[6]] for pair in pairs
            ]
        published = shown.locator(".published").inner_text()
        printed = [
            one for document in data["documents"] for one in document["figures"] if one["call"] in given["calls"]
        ]
        assert all(f"Published: {one['printed']} " in published and one["value"] in published for one in printed)
        assert published.count("reproduced") == len(printed)
        assert bool(printed) == (loss != "nt_bxent")

    # Every pair, by hand: rows 1 and 7 are the positives of row 4.
    head, *rows = cells(shown.locator("table.members"))
    assert head == ["pair with", "supcon_loss", "nt_xent_loss", "nt_xent_pairwise_loss", "nt_bxent_loss"]
    for name, *found in rows:
        positive = LABELS[int(name)] == LABELS[4]
        assert found == [
            "numerator and denominator" if positive else "denominator",
            "does not apply",
            "numerator, and denominator of this pair only" if positive else "denominator",
            "positive term" if positive else "negative term",
        ]
    assert [int(row[0]) for row in rows] == [0, 1, 2, 3, 5, 6, 7, 8]
    if width == 390:
        for name in ("terms", "members"):
            assert_rows_are_lists_on_a_phone(shown.locator(f"table.{name}"))
    heat = shown.locator("table.heat").nth(1)
    assert heat.locator("td.self").count() == 9
    assert heat.locator("td.positive").count() == 18
    texts = [[float(x) for x in row[1:]] for row in cells(heat)[1:]]
    assert np.abs(np.array(texts) - np.array(view["similarity"])).max() <= 0.0051

    # The charts, and the numbers of one of them.
    charts = [chart for one in data["findings"] for chart in one["charts"]]
    charts += [one["chart"] for one in data["sweeps"] if one["breaks"]]
    assert page.locator("#findings figure > svg.chart").count() == len(charts) > 3
    assert page.locator("#speed figure > svg.chart").count() == 2 * len(data["speed"])
    plot = page.locator("#finding-clamp figure").first
    plot.locator("summary").click()
    (clamp,) = (one["charts"][0] for one in data["findings"] if one["id"] == "clamp")
    numbers = [[float(x) for x in row] for row in cells(plot.locator("table"))[1:]]
    assert [row[:2] for row in numbers] == clamp["lines"][0]["points"]
    assert [[row[0], row[2]] for row in numbers] == clamp["lines"][1]["points"]
    assert page.locator("#breaks tr").count() == 1 + sum(1 + len(one["breaks"]) for one in data["sweeps"])

    # A bug leads to the case that shows it.
    link = page.locator("table.bugs a[data-case^=golden]").first
    name = link.get_attribute("data-case")
    link.click()
    assert page.evaluate("location.hash") == "#cases"
    assert name in page.locator("#case-table tbody").inner_text()
    page.locator("#by-name").fill("")

    # Filter the cases, by hand and by a cell of the table.
    total = len(data["cases"])
    page.locator("#by-flag").select_option("lonely-anchors")
    expected = sum("lonely-anchors" in case["flags"] for case in data["cases"])
    assert 0 < expected < total
    assert page.locator("#case-count").inner_text() == f"{expected} of {total} cases match"
    assert page.locator("#case-table tbody tr").count() == min(expected, 100)
    page.locator("#by-flag").select_option("")
    for who, status in (("fast", "passed"), ("stacked-criterion", "deviates")):
        page.locator(f'#matrix a[data-who="{who}"][data-loss="nt_xent"][data-status="{status}"]').click()
        assert page.evaluate("location.hash") == "#cases"
        expected = sum(case["loss"] == "nt_xent" and case["statuses"].get(who) == status for case in data["cases"])
        assert expected > 0
        assert page.locator("#case-count").inner_text() == f"{expected} of {total} cases match"
    assert errors == []


@pytest.mark.slow
def test_a_case_that_fails_leads_to_its_terms_in_a_browser(
    browser: Any, failing_data: dict[str, Any], check_path: Path
) -> None:
    name, data = FAILING[1], failing_data
    page, errors = browser.new_page(viewport={"width": 390, "height": 900}), list[str]()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(check_path.as_uri())
    (place,) = (k for k, one in enumerate(data["failures"]) if one["case"] == name)
    shown = page.locator(f"#failure-{place}")
    assert shown.get_attribute("open") is None
    page.locator(f'#case-table a[href="#failure-{place}"]').click()
    assert shown.get_attribute("open") is not None
    assert shown.locator("tr.first").count() == len(data["failures"][place]["tables"])
    pairs = next(one for one in data["failures"][place]["tables"] if one["title"] == "The pairs")
    texts = [row[1:] for row in cells(shown.locator("table", has_text="-log of the ratio"))[2:]]
    assert [[float(x) for x in row] for row in texts] == [row["expected"] + row["found"] for row in pairs["rows"]]
    assert data["failures"][place]["repeat"] in shown.inner_text()
    for table in shown.locator("table.stacked").all():
        assert_rows_are_lists_on_a_phone(table)
    # Expected and computed numbers of a term stand beside each other.
    row = shown.locator("table", has_text="-log of the ratio").locator("tr.first td")
    boxes = [row.nth(k).bounding_box() for k in range(6)]
    assert all(boxes[k]["y"] == boxes[k + 3]["y"] and boxes[k]["x"] < boxes[k + 3]["x"] for k in range(3))
    assert errors == []


@pytest.mark.slow
def test_pages_do_not_scroll_sideways(browser: Any, path: Path, check_path: Path) -> None:
    for file in (path, check_path):
        page = browser.new_page()
        page.goto(file.as_uri())
        for width in (1280, 768, 390):
            page.set_viewport_size({"width": width, "height": 900})
            assert not page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_violate_no_rule_of_axe(
    browser: Any, path: Path, check_path: Path, figure_paths: Sequence[Path], scheme: str
) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed"
    ).Axe()
    for file in (path, check_path, *figure_paths):
        page = browser.new_page(viewport={"width": 390, "height": 900}, color_scheme=scheme)
        page.goto(file.as_uri())
        assert not page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
        violations = axe.run(page, options={"resultTypes": ["violations"]}).response["violations"]
        assert [(one["id"], one["nodes"][0]["html"]) for one in violations] == []
