"""Golden cases: what the loader accepts, error messages, proofs of the stored results, and identities between cases."""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from flint import arb

from pairproof import fast, reference
from pairproof.conformance.implementations.fast import Fast, FastDense, FastExact, FastTiled
from pairproof.conformance.judge.verify import truth_of
from pairproof.conformance.maintain import prove, rebuild
from pairproof.conformance.maintain.prove import prove_golden
from pairproof.conformance.suite import golden, store
from pairproof.conformance.suite.cases import MATRICES, Case, call_reference
from pairproof.conformance.suite.catalogue import LOSSES
from pairproof.conformance.suite.golden import GoldenCase, load_errors, load_flags, load_golden
from pairproof.conformance.suite.records import BY_CHOICE, LEFT_OUT, NAN_LOSS, TIE
from pairproof.conformance.suite.store import FixtureError, dump_json, fixtures_root, write_manifest
from pairproof.conformance.truth import certify as certifying
from pairproof.conformance.truth.certify import CertificationError, certify, nearest
from pairproof.conformance.truth.compare import compare
from pairproof.conformance.truth.evaluate import PROVE_UP_TO, stored_truth
from pairproof.conformance.truth.intervals import precision
from pairproof.conformance.truth.tolerances import bounds, rounded_once, scalar_bounds
from tests.each import each

ROOT = fixtures_root()
SCHEMAS = sorted((ROOT / "schema").glob("golden*.json"))
ERRORS = load_errors()
COUNTS = Counter(case.case.loss for case in load_golden())
COVERED = [loss for loss in LOSSES if COUNTS[loss] >= 60]
"""The losses with complete sets of cases. A new loss starts with few cases, or none."""

KEPT = (
    "supcon/one-positive-balanced-tau-half",
    "supcon/lonely-drop-none",
    "supcon/lonely-nan",
    "supcon/labels-huge",
    "supcon_in/unbalanced-only-negatives",
    "nt_xent/one-positive-balanced-tau-half",
    "nt_xent_pairwise/one-positive-balanced-tau-half",
    "nt_xent_pairwise/asymmetric-mask-mean-pairs",
    "nt_bxent/asymmetric-pairs",
    "supcon_epsilon/one-positive-balanced-tau-half",
    "supcon_epsilon/identical-tied",
    "supcon/refs-self-some",
    "nt_xent/refs-self-some",
    "nt_xent_pairwise/refs-mask-self",
    "info_nce/two-towers-tau-half",
    "info_nce/queue-tau-half",
    "sigmoid/two-towers-tau-half",
    "hard_negative/one-positive-balanced-tau-half",
    "multiple_negatives_ranking/in-batch-tau-half",
    "dclw/reduction-sum",
)
"""The cases of the small copy of the fixtures that tests damage."""


@pytest.fixture(scope="session")
def cases() -> dict[str, GoldenCase]:
    return {case.id.removeprefix("golden/"): case for case in load_golden()}


@pytest.fixture(scope="session")
def small_original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of fixtures with a few cases of each loss."""
    root = tmp_path_factory.mktemp("golden") / "fixtures"
    (root / "golden").mkdir(parents=True)
    shutil.copytree(ROOT / "schema", root / "schema")
    for name in ("flags", "errors"):
        shutil.copy(ROOT / "golden" / f"{name}.json", root / "golden")
    for loss in COUNTS:
        data = json.loads((ROOT / "golden" / f"{loss}.json").read_text(encoding="utf-8"))
        data["cases"] = [raw for raw in data["cases"] if raw["id"] in KEPT]
        (root / "golden" / f"{loss}.json").write_text(dump_json(data), encoding="utf-8")
    write_manifest(root)
    return root


@pytest.fixture
def small(small_original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_original, tmp_path / "fixtures"))


def files(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def edit(root: Path, name: str, change: Callable[[Any], object]) -> None:
    """Change the content of one file and renew the manifest, so that only this change is wrong."""
    path = root / "golden" / f"{name}.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(dump_json(data), encoding="utf-8")
    write_manifest(root)


def error(root: Path, load: Callable[[Path], object] = load_golden) -> str:
    with pytest.raises(FixtureError) as caught:
        load(root)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_every_loss_has_many_cases(cases: dict[str, GoldenCase]) -> None:
    counts = Counter(case.case.loss for case in cases.values())
    assert set(counts) <= set(LOSSES)
    assert sum(counts.values()) >= 420
    assert len(COVERED) >= 7


def test_ids_are_unique_and_begin_with_the_loss(cases: dict[str, GoldenCase]) -> None:
    loaded = load_golden()
    assert len(loaded) == len(cases)
    for case in loaded:
        assert case.id.startswith(f"golden/{case.case.loss}/")


def test_every_flag_is_used_and_has_its_own_explanation(cases: dict[str, GoldenCase]) -> None:
    flags = load_flags()
    used = {flag for case in cases.values() for flag in case.flags}
    assert used == set(flags)
    assert len({flag.hunts for flag in flags.values()}) == len(flags)


def test_every_value_of_every_keyword_is_used(cases: dict[str, GoldenCase]) -> None:
    for loss in map(LOSSES.__getitem__, COVERED):
        of_loss = [case.case for case in cases.values() if case.case.loss == loss.name]
        for keyword, allowed in loss.choices.items():
            # None stands for one of them, which depends on the other options.
            assert {case.option(keyword) for case in of_loss} - {None} == set(allowed), (loss.name, keyword)
        for keyword in {"anchors", "base_temperature"} & loss.keywords.keys():
            assert {case.option(keyword) is None for case in of_loss} == {True, False}, (loss.name, keyword)
        assert {case.option("temperature") for case in of_loss} >= {1e-3, 0.01, 0.05, 0.07, 0.1, 0.5, 1.0, 10.0, 100.0}
        given = {name for case in of_loss for name in (*case.arguments, *case.matrices)}
        arguments = ({"ref_embeddings"} | set(golden.ARGUMENTS)) & loss.keywords.keys()
        assert given == arguments | {*loss.embeddings, loss.targets} - {""}


REFERENCED = ("supcon", "supcon_in", "nt_xent", "nt_xent_pairwise")


def test_references_and_towers_have_many_cases(cases: dict[str, GoldenCase]) -> None:
    further = [case.case for case in cases.values() if case.case.others]
    counts = Counter(case.loss for case in further)
    assert all(counts[loss] >= 20 for loss in (*REFERENCED, "info_nce"))
    for loss in REFERENCED:
        of_loss = [case for case in further if case.loss == loss]
        assert {np.sign(case.n - case.shape[1]) for case in of_loss} == {-1, 0, 1}, loss
        assert any(case.n == 1 for case in of_loss), loss
        assert any(case.shape[1] == 1 for case in of_loss), loss
        own = [case.arguments["self_rows"] for case in of_loss if "self_rows" in case.arguments]
        assert len(own) < len(of_loss)
        assert any(-1 in rows and max(rows) >= 0 for rows in own), loss
        assert any(-1 not in rows for rows in own), loss
    assert sum(not all(case.members()) for case in further) >= 3
    towers = {
        (case.option("direction"), case.option("reduction"), "negatives" in case.others)
        for case in further
        if case.loss == "info_nce"
    }
    assert len(towers) == 3 * 3 * 2


def test_most_cases_are_exact_in_every_dtype(cases: dict[str, GoldenCase]) -> None:
    whole = [case for case in cases.values() if set(case.dtypes) == set(golden.DTYPES)]
    assert len(whole) > 0.85 * len(cases)
    assert all("float64" in case.dtypes for case in cases.values())


@pytest.mark.parametrize("path", sorted((ROOT / "golden").glob("*.json")), ids=lambda path: path.stem)
def test_file_has_the_fixed_layout(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert dump_json(json.loads(text)) == text


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.stem)
def test_schemas_define_additional_properties(path: Path) -> None:
    schema = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if node.get("type") == "object":
                assert "additionalProperties" in node, node
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(schema)


def test_schema_matches_the_catalogue() -> None:
    schema = json.loads((ROOT / "schema/golden.schema.json").read_text(encoding="utf-8"))
    assert all(re.fullmatch(schema["properties"]["loss"]["pattern"], loss) for loss in LOSSES)
    properties = schema["$defs"]["case"]["properties"]
    keywords = properties["keywords"]["properties"]
    assert set(keywords) == {name for loss in LOSSES.values() for name in loss.keywords} - set(golden.ARGUMENTS)
    for name, value in keywords.items():
        allowed = {choice for loss in LOSSES.values() for choice in loss.choices.get(name, ())}
        assert set(value.get("enum", ())) == allowed, name
    assert set(properties["arguments"]["properties"]) == set(golden.ARGUMENTS)
    taken = {name for loss in LOSSES.values() for name in (*loss.embeddings[1:], loss.targets, *loss.keywords)}
    assert set(golden.ARGUMENTS) == taken - set(keywords) - {""}
    assert set(properties["expected"]["properties"]["gradients"]["properties"]) == set(MATRICES)
    assert set(MATRICES) == {name for loss in LOSSES.values() for name in (*loss.embeddings[1:], *loss.matrices)}
    assert properties["expected"]["properties"]["gradient_left_out"]["enum"] == list(LEFT_OUT)


def test_missing_gradient_has_a_reason(cases: dict[str, GoldenCase]) -> None:
    for case in cases.values():
        expected = case.expected
        undefined = any(math.isnan(value) for value in expected.values)
        assert (expected.gradient is None) == (expected.gradient_left_out is not None)
        assert (expected.gradient is None) == (expected.temperature_gradient is None)
        assert set(expected.other_gradients) == (set() if expected.gradient is None else set(case.case.others))
        assert (expected.gradient_left_out == NAN_LOSS) == undefined
        assert expected.gradient_left_out != TIE or case.case.loss == "supcon_epsilon"
        assert expected.gradient_left_out != BY_CHOICE or case.case.n == 256
    left_out = sum(case.expected.gradient is None for case in cases.values())
    assert left_out < 0.06 * len(cases)


# Messages about damaged files.


def field_of(data: Any, path: str) -> tuple[Any, str | int]:
    """The container of a field, and the key or index of the field in it."""
    *way, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    return reduce(getitem, way, data), last


def put(path: str, value: Any) -> Callable[[Any], None]:
    """Return a function that sets one field of a file, by its path: cases.0.expected.loss."""

    def change(data: Any) -> None:
        holder, last = field_of(data, path)
        holder[last] = value

    return change


def remove(path: str) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        holder, last = field_of(data, path)
        del holder[last]

    return change


def located(path: str) -> str:
    """The path in the notation of messages: cases[0].expected.loss."""
    return re.sub(r"\.(\d+)", r"[\1]", path)


def repeat_first(data: Any) -> None:
    data["cases"].append(copy.deepcopy(data["cases"][0]))


FIRST = "golden/supcon/one-positive-balanced-tau-half"
UNTRUE = (
    *("asymmetric-mask", "low-temperature", "first-view-anchors", "identical-embeddings", "duplicate-embeddings"),
    *("self-similarity-dominates", "similarity", "labels-huge", "tiny-norms", "huge-norms", "rows-without-negatives"),
)
"""Flags that do not apply to the first case."""

FIELDS: list[tuple[str, str, Any, str]] = [
    ("supcon", "format", "pairproof-golden/1", "expected 'pairproof-golden/2', got 'pairproof-golden/1'"),
    ("supcon", "loss", "nt_xent", "expected 'supcon', got 'nt_xent'"),
    ("supcon", "function", "nt_xent_loss", "expected 'supcon_loss', got 'nt_xent_loss'"),
    ("supcon", "cases.0.id", "nt_xent/x", "expected 'supcon/' and a name, got"),
    ("supcon", "cases.0.id", "supcon/One", "'supcon/One' does not match"),
    ("supcon", "cases.0.flags.1", "mystery", "golden/flags.json does not explain 'mystery'"),
    ("supcon", "cases.0.flags", [], "[] should be non-empty"),
    ("supcon", "cases.0.dtypes", ["float64"], "expected ['float64', 'float32', 'bfloat16'"),
    ("supcon", "cases.0.embeddings.2.1", "1.5", "'1.5' is not of type 'number'"),
    ("supcon", "cases.0.embeddings.2.1", True, "True is not of type 'number'"),
    ("supcon", "cases.0.embeddings.2.1", math.inf, "expected a finite number"),
    ("nt_xent", "cases.0.embeddings", [[1.0]], "expected at least 2 rows, got 1"),
    ("supcon", "cases.0.embeddings.3", [0.0, -0.0, 0.0], "a zero vector has no cosine"),
    ("supcon", "cases.0.arguments", {}, "{} should be non-empty"),
    ("supcon", "cases.0.arguments.labels", [0, 0], "expected shape [6], got [2]"),
    ("supcon", "cases.0.arguments.labels.1", 2**53, "expected an integer below 2^53"),
    ("supcon", "cases.0.arguments.labels.1", "12", "expected an integer below 2^53"),
    ("supcon", "cases.0.arguments.labels.1", str(2**63), "expected an integer"),
    ("supcon", "cases.0.keywords.temperature", 0.07, "0.07 is the default"),
    ("supcon", "cases.0.keywords.temperature", -1.0, "-1.0 is less than or equal"),
    ("supcon", "cases.0.keywords.margin", 1, "supcon_loss has no such"),
    ("supcon", "cases.0.keywords.reduction", "mean_pairs", "expected one of mean, sum"),
    ("supcon", "cases.0.keywords.anchors", [True], "expected shape [6], got"),
    ("nt_xent", "cases.0.keywords.denominator", "all", "nt_xent_loss has no such"),
    ("supcon", "cases.0.expected.loss", "nan", "expected a finite number, got 'nan'"),
    ("supcon", "cases.0.expected.loss", [1.0], "expected one value, got [1.0]"),
    ("supcon", "cases.0.expected.loss", "2.5", "'2.5' is not valid"),
    ("supcon", "cases.0.expected.anchors", [1.0], "expected a list of 6, one value per"),
    ("supcon", "cases.0.rounding.anchors", [1.0], "expected 6 numbers, got 1"),
    ("supcon", "cases.0.rounding.rows.embeddings", [1.0], "expected 6 numbers, got 1"),
    ("supcon", "cases.0.rounding.loss.0", -1.0, "-1.0 is less than the minimum of 0"),
    ("supcon", "cases.0.expected.gradient", [[1.0]], "expected shape [6, 3], got [1, 1]"),
    ("supcon", "cases.0.expected.gradient.5.2", "nan", "'nan' is not of type 'number'"),
    # Case 4 of supcon, 1 of nt_xent and 2 of nt_xent_pairwise have references; case 1 of info_nce has negatives.
    ("supcon", "cases.4.arguments.ref_embeddings.1.0", "1.5", "'1.5' is not of type 'number'"),
    ("supcon", "cases.4.arguments.ref_embeddings.1", [0.0, -0.0, 0.0], "a zero vector has no cosine"),
    ("supcon", "cases.4.arguments.ref_embeddings", [[1.0, 2.0]], "expected shape [1, 3], got [1, 2]"),
    ("supcon", "cases.4.arguments.ref_labels", [0, 1], "expected shape [6], got [2]"),
    ("supcon", "cases.4.arguments.self_rows", [0, 1], "expected shape [4], got [2]"),
    ("supcon", "cases.4.arguments.self_rows.0", -2, "-2 is less than the min"),
    ("supcon", "cases.4.arguments.embeddings_b", [[1.0]], "supcon_loss has no"),
    ("supcon", "cases.0.arguments.self_rows", [-1] * 6, "requires ref_embeddings"),
    ("supcon", "cases.4.expected.gradients.ref_embeddings", [[1.0]], "expected shape [6, 3], got [1, 1]"),
    (
        "supcon",
        "cases.0.expected.gradients",
        {"ref_embeddings": [[1.0]]},
        "expected gradients for no matrix, got gradients for ref_embeddings",
    ),
    ("supcon", "cases.0.expected.gradients", {}, "{} should be non-empty"),
    ("nt_xent", "cases.1.arguments.ref_labels", [0] * 6, "nt_xent_loss has no"),
    ("nt_xent_pairwise", "cases.2.arguments.ref_labels", [0] * 6, "expected if and only if labels and"),
    ("info_nce", "cases.0.arguments.embeddings_b", [[1.0, 2.0, 3.0]], "expected shape [4, 3], got [1, 3]"),
    ("info_nce", "cases.0.arguments.positive_pairs", [[0, 1]], "info_nce_loss has no"),
    ("info_nce", "cases.1.arguments.partners", [0, 1, 2, 3], "not allowed with negatives"),
    ("info_nce", "cases.0.keywords.direction", "a->b", "'a->b' is not one of"),
    ("info_nce", "cases.0.keywords.direction", "both", "'both' is the default"),
    ("info_nce", "cases.0.keywords.temperature", 0.07, "0.07 is the default"),
    ("info_nce", "cases.0.keywords.anchors", [True] * 4, "info_nce_loss has no such"),
]
"""File, path of a field, wrong value, and the beginning of the message after the path."""
DAMAGE: list[tuple[str, Callable[[Any], None], str]] = [
    ("supcon", remove("format"), "$.format: expected 'pairproof-golden/2', got None"),
    ("supcon", put("author", "x"), "$: Additional properties are not allowed ('author' was unexpected)"),
    ("supcon", put("cases.0.comment", "x"), "$.cases[0]: Additional properties are not allowed"),
    ("supcon", remove("cases.0.note"), "$.cases[0]: 'note' is a required property"),
    ("supcon", repeat_first, "$.cases[5].id: duplicate id 'supcon/one-positive-balanced-tau-half'"),
    (
        "supcon",
        put("cases.0.flags.0", "lonely-anchors"),
        "$.cases[0].flags: golden/supcon/one-positive-balanced-tau-half: the flag 'lonely-anchors' needs a case in",
    ),
    *(
        ("supcon", put("cases.0.flags.0", flag), f"$.cases[0].flags: {FIRST}: the flag '{flag}' needs a case in which ")
        for flag in UNTRUE
    ),
    ("supcon", put("cases.0.flags.0", "queue"), "$.cases[0].flags: golden/supcon/one-positive-balanced-tau-half: the"),
    ("supcon", put("cases.0.flags.0", "repeated-pairs"), "$.cases[0].flags: golden/supcon/one-positive-balanced-tau-h"),
    ("supcon", put("cases.0.embeddings.1", [1.0, 2.0]), "$.cases[0].embeddings: expected a matrix, got rows of"),
    (
        "supcon",
        put("cases.0.arguments", {"partners": [1, 0]}),
        "$.cases[0].arguments.partners: supcon_loss has no such argument",
    ),
    (
        "supcon",
        put("cases.0.expected.gradient", None),
        "$.cases[0].expected: 'gradient_left_out' is a required property",
    ),
    ("supcon", put("cases.0.expected.gradient_left_out", TIE), "$.cases[0].expected"),
    (
        "supcon",
        remove("cases.0.expected.temperature_gradient"),
        "$.cases[0].expected: 'temperature_gradient' is a required property",
    ),
    (
        "supcon",
        put("cases.4.arguments.ref_embeddings.1.0", 1 / 3),
        "$.cases[4].dtypes: expected ['float64'], the dtypes that represent the matrices exactly",
    ),
    ("supcon", remove("cases.4.arguments.ref_labels"), "$.cases[4].arguments.ref_labels: expected if and only if"),
    (
        "supcon",
        remove("cases.4.expected.gradients"),
        "$.cases[4].expected.gradients: expected gradients for ref_embeddings, got gradients for no matrix",
    ),
    ("supcon", put("cases.2.expected.gradients", {"negatives": [[1.0]]}), "$.cases[2].expected"),
    (
        "nt_xent_pairwise",
        put("cases.2.arguments.positives.1", [True] * 4),
        "$.cases[2].arguments.positives: expected a matrix, got rows of",
    ),
    (
        "supcon",
        put("cases.4.arguments.self_rows.0", 6),
        "$.cases[4].arguments.self_rows: expected rows in the range -1 to 5, got 6 in row 0",
    ),
    (
        "nt_xent",
        put("cases.0.arguments.partners.0", 2),
        "$.cases[0].arguments.partners: expected mutual partners, got 2 in row 0 but 3 in row 2",
    ),
    (
        "nt_xent",
        put("cases.0.arguments.partners.0", 6),
        "$.cases[0].arguments.partners: expected rows in the range 0 to 5, got 6 in row 0",
    ),
    (
        "nt_xent",
        put("cases.1.arguments.partners.0", 3),
        "$.cases[1].arguments.partners: expected another row as partner, got row 0 as partner of itself",
    ),
    (
        "nt_bxent",
        put("cases.0.arguments.positive_pairs.0", [0, 5]),
        "$.cases[0].arguments.positive_pairs: expected rows in the range 0 to 4, got [0, 5] at position 0",
    ),
    (
        "nt_bxent",
        put("cases.0.arguments.positive_pairs.1", [1.5, 0]),
        "$.cases[0].arguments.positive_pairs: expected an integer dtype, got float64",
    ),
    ("info_nce", remove("cases.0.arguments.embeddings_b"), "$.cases[0].arguments: {} should be non-empty"),
    ("info_nce", remove("cases.1.arguments.embeddings_b"), "$.cases[1].arguments: expected 'embeddings_b', got none"),
    (
        "info_nce",
        put("cases.1.arguments.negatives.1", [1.0]),
        "$.cases[1].arguments.negatives: expected a matrix, got rows of",
    ),
    *((loss, put(path, value), f"$.{located(path)}: {message}") for loss, path, value, message in FIELDS),
]


@pytest.mark.parametrize(("loss", "change", "message"), DAMAGE, ids=[str(k) for k in range(len(DAMAGE))])
@pytest.mark.quick(30)
def test_message_names_the_damaged_file_and_field(
    small: Path, loss: str, change: Callable[[Any], None], message: str
) -> None:
    edit(small, loss, change)
    assert error(small).startswith(f"golden/{loss}.json: {message}")


def test_loss_must_be_nan_if_a_policy_makes_it_nan(small: Path) -> None:
    data = json.loads((small / "golden/supcon.json").read_text(encoding="utf-8"))
    position = next(k for k, raw in enumerate(data["cases"]) if raw["id"] == "supcon/lonely-nan")
    edit(small, "supcon", put(f"cases.{position}.expected.loss", 1.0))
    assert error(small) == f"golden/supcon.json: $.cases[{position}].expected.loss: expected nan, got 1.0"


def test_truncated_file_is_reported(small: Path) -> None:
    path = small / "golden/nt_xent.json"
    path.write_bytes(path.read_bytes()[:700])
    assert error(small).startswith("golden/nt_xent.json: altered: expected SHA-256")
    write_manifest(small)
    assert error(small).startswith("golden/nt_xent.json: not JSON: ")


def test_altered_digit_is_reported(small: Path) -> None:
    path = small / "golden/supcon.json"
    text = path.read_text(encoding="utf-8")
    assert text.count("2.0356476278275846") == 1
    path.write_text(text.replace("2.0356476278275846", "2.0356476278275847"), encoding="utf-8")
    assert error(small).startswith("golden/supcon.json: altered")
    path.write_text(text.replace("2.0356476278275846", "2.0356476278275886"), encoding="utf-8")
    write_manifest(small)
    assert load_golden(small)
    (change,) = prove_golden(small, processes=1)
    assert change == (
        "golden/supcon.json: supcon/one-positive-balanced-tau-half: "
        "expected.loss: 2.0356476278275886 stored, 2.0356476278275846 expected"
    )


def test_missing_and_unknown_files_are_reported(small: Path) -> None:
    (small / "golden/margin.json").write_text("{}", encoding="utf-8")
    assert error(small).startswith("golden/margin.json: not listed in manifest.json")
    write_manifest(small)
    assert error(small).startswith("golden/margin.json: belongs to no loss of the catalogue")
    (small / "golden/margin.json").unlink()
    write_manifest(small)
    (small / "golden/nt_bxent.json").unlink()
    assert error(small).startswith("golden/nt_bxent.json: missing; manifest.json lists it")


@pytest.mark.parametrize("empty", [True, False])
def test_loss_without_cases_is_accepted(small: Path, empty: bool) -> None:
    edit(small, "nt_bxent", put("cases", []))
    if not empty:
        (small / "golden/nt_bxent.json").unlink()
        write_manifest(small)
    assert {case.case.loss for case in load_golden(small)} == set(COVERED) - {"nt_bxent"}
    assert prove_golden(small, processes=1) == []


def test_damaged_flags_and_errors_are_reported(small: Path) -> None:
    edit(small, "flags", remove("flags.solved.effect"))
    assert error(small) == "golden/flags.json: $.flags.solved: 'effect' is a required property"
    assert error(small, load_flags) == "golden/flags.json: $.flags.solved: 'effect' is a required property"
    edit(small, "errors", put("format", "pairproof-golden-errors/2"))
    assert error(small, load_errors).startswith("golden/errors.json: $.format: expected 'pairproof-golden-errors/1'")
    edit(small, "errors", put("format", "pairproof-golden-errors/1"))
    edit(small, "errors", put("cases.0.losses", ["margin"]))
    assert error(small, load_errors) == "golden/errors.json: $.cases[0]: $.good has no call of margin"
    edit(small, "errors", put("cases.0.losses", ["supcon"]))
    edit(small, "errors", put("cases.0.expected.argument", "margin"))
    assert error(small, load_errors) == "golden/errors.json: $.cases[0]: supcon_loss has no argument 'margin'"
    edit(small, "errors", put("good.margin", {}))
    assert error(small, load_errors).startswith("golden/errors.json: $.good: unknown loss 'margin'; known: supcon, ")


def test_labels_above_2_53_are_exact(cases: dict[str, GoldenCase]) -> None:
    labels = cases["supcon/labels-huge"].case.arguments["labels"]
    assert sorted(set(labels)) == [2**53, 2**53 + 1, 2**53 + 2]
    assert all(type(label) is int for label in labels)


# Error cases.


def argument_for(package: str, value: Any) -> Any:
    return torch.from_numpy(value.copy()) if package == "fast" and isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("package", ["reference", "fast"])
@each("case", ERRORS, ids=lambda case: case.id)
def test_error_case_raises(package: str, case: golden.ErrorCase) -> None:
    function = getattr({"reference": reference, "fast": fast}[package], LOSSES[case.loss].function)
    with pytest.raises(case.exception) as caught:
        function(**{name: argument_for(package, value) for name, value in case.arguments.items()})
    assert type(caught.value) is case.exception
    message = str(caught.value)
    assert message.startswith(f"{case.argument}:")
    assert "\n" not in message
    for word in case.words:
        assert word in message


def test_error_cases_cover_every_argument_of_every_loss() -> None:
    for loss in map(LOSSES.__getitem__, COVERED):
        covered = {case.argument for case in ERRORS if case.loss == loss.name}
        assert covered == {*loss.embeddings, loss.targets, *loss.keywords} - {""}, loss.name


# Certification.


def small_enough(case: GoldenCase) -> bool:
    return case.case.embeddings.size <= 40 and all(len(rows) <= 40 for rows in case.case.others.values())


@pytest.mark.parametrize("step", [15, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("loops_up_to", [certifying.LOOPS_UP_TO, 0])
def test_certifying_gives_the_stored_results(
    cases: dict[str, GoldenCase], loops_up_to: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reference's loops, and with the closed forms that replace them on large cases."""
    monkeypatch.setattr(certifying, "LOOPS_UP_TO", loops_up_to)
    sample = [case for case in cases.values() if small_enough(case)][::step]
    assert len(sample) > 500 / step
    assert {case.case.loss for case in sample} >= set(COVERED)
    for case in sample:
        proved = certify(case.case, gradient=case.expected.gradient_left_out != BY_CHOICE)
        again = golden.as_json(case.case, case.flags, case.note, proved)
        stored = golden.as_json(case.case, case.flags, case.note, case.expected)
        assert again == stored, case.id


@pytest.mark.slow
@pytest.mark.parametrize("rows", [12, 33])
def test_reference_in_float64_is_close_to_the_proved_loss(cases: dict[str, GoldenCase], rows: int) -> None:
    unresolved = "supcon_in/equal-logits-beyond-float32"  # float64 rounds its logits of 2^130 to multiples of 2^78
    for name, case in cases.items():
        if case.case.n <= rows and case.case.loss != "supcon_epsilon" and name != unresolved:
            loss = call_reference(case.case).loss
            np.testing.assert_allclose(np.array(loss, dtype=float), case.expected.loss, rtol=1e-12, err_msg=case.id)


with precision():
    THIRD = arb(1) / 3


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (THIRD, 1 / 3),
        (arb(0.1), 0.1),
        (arb(1).union(arb(1 + 2**-54)), 1.0),
        (arb(1).union(arb(1 + 2**-52)), None),
        (arb((1, -1077)).union(-arb((1, -1077))), 0.0),
        (arb((1, -1075)), 0.0),
        (arb((1, -1074)), 5e-324),
        (arb((3, -1075)), 1e-323),
        (arb((1, -1074)).union(-arb((1, -1074))), None),
        (-arb((5, -1076)), -5e-324),
        (arb((1, 1023)), 2.0**1023),
        (arb((1, 1100)), None),
        (arb.nan(), None),
        (arb.pos_inf(), None),
        (arb(1).union(arb(-1)), None),
    ],
    ids=str,
)
def test_nearest_is_the_float64_to_which_the_whole_ball_rounds(value: arb, expected: float | None) -> None:
    found = nearest(value)
    assert found == expected
    assert found is None or math.copysign(1, found) == 1 or found < 0


def tiny(loss: str, rows: list[list[float]], labels: list[int], **keywords: Any) -> Case:
    return Case("test/tiny", loss, np.array(rows), {"labels": labels}, keywords)


def test_tie_leaves_out_the_gradient() -> None:
    tied = certify(tiny("supcon_epsilon", [[1.0, 0.5], [1.0, 0.5], [0.25, 1.0]], [0, 0, 0]))
    assert tied.gradient is None
    assert tied.gradient_left_out == TIE
    apart = certify(tiny("supcon_epsilon", [[1.0, 0.5], [1.0, 0.25], [0.25, 1.0]], [0, 0, 0]))
    assert apart.gradient is not None
    cosine = certify(tiny("supcon_epsilon", [[1.0, 0.5], [1.0, 0.5], [0.25, 1.0]], [0, 0, 0], similarity="cosine"))
    assert cosine.gradient is not None


def test_maximum_that_float64_cannot_determine_is_not_certified() -> None:
    near = tiny("supcon_epsilon", [[1.0, 2.0**-30], [1.0, 0.0], [-1.0, 0.5]], [0, 0, 0])
    with pytest.raises(CertificationError, match=r"^test/tiny: the largest products of row 0 are equal in float64$"):
        certify(near)
    parallel = tiny("supcon_epsilon", [[1.0, 2.0**-30], [1.0, 0.0], [-1.0, 0.5]], [0, 0, 0], similarity="cosine")
    with pytest.raises(CertificationError, match=r"^test/tiny: rows 0 and 1 are too close to parallel$"):
        certify(parallel)


def test_message_names_the_unproved_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pairproof.conformance.truth.certify.PRECISIONS", (128,))
    with pytest.raises(CertificationError, match=r"^test/tiny: the value of anchor 0 cannot be proved with 128 bits$"):
        certify(tiny("supcon", [[1.0, 0.5], [0.25, 1.0]], [0, 0]))


# Identities between stored results. Each is the float64 nearest to the true value, so equal values are equal numbers.


@pytest.mark.parametrize("n", [3, 6, 7, 17])
@pytest.mark.parametrize("loss", ["supcon", "supcon_in", "nt_xent"])
def test_identical_embeddings_give_log_of_n_minus_1(cases: dict[str, GoldenCase], loss: str, n: int) -> None:
    name = {3: "three", 6: "six", 7: "seven", 17: "seventeen"}[n]
    if loss == "nt_xent" and n != 6:
        assert f"{loss}/identical-{name}" not in cases
        return
    case = cases[f"{loss}/identical-{name}"]
    paired = [case.expected.anchors[i] for i, p in enumerate(case.case.positives()) if p]
    assert len(paired) >= 2
    assert set(paired) == {math.log(n - 1)}
    assert case.expected.gradient is not None
    assert not case.expected.gradient.any()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("nt_xent_pairwise/identical-pairwise", math.log(4)),
        ("supcon/identical-one-positive", math.log(4)),
        ("supcon_in/identical-only-negatives", math.log(3)),
        ("supcon/orthogonal", math.log(3)),
        ("nt_xent/identical-tau-0-001", math.log(5)),
        ("nt_xent/two-rows", 0.0),
        ("supcon_epsilon/two-rows", 0.0),
        ("nt_xent_pairwise/one-class-mean-pairs", 0.0),
        ("nt_xent/solved-pairs", math.log1p(2 * math.exp(-40))),
        ("supcon/collapsed-classes", math.log(3 + 4 * math.exp(-8))),
        ("supcon_epsilon/tutorial-constant", 2 * math.log(4) / 5 / (1 + 1e-8)),
        ("supcon/refs-identical", math.log(5)),
        ("supcon/refs-one-row-one-reference", 0.0),
        ("nt_xent/refs-one-reference", 0.0),
        ("info_nce/identical", math.log(5)),
        ("info_nce/identical-queue", math.log(7)),
        ("info_nce/orthogonal", math.log(3)),
        ("info_nce/solved", math.log1p(2 * math.exp(-40))),
        ("nt_bxent/identical-binary", math.log1p(math.exp(-2)) * 2 / 3 + math.log1p(math.exp(2))),
        ("nt_bxent/no-negative-default-drop", math.log1p(math.exp(-1 / 0.07)) * 3 / 4),
    ],
)
def test_stored_losses_equal_closed_forms(cases: dict[str, GoldenCase], name: str, value: float) -> None:
    assert cases[name].expected.loss == pytest.approx(value, rel=1e-14, abs=0)


def test_supcon_nt_xent_and_pairwise_agree_if_every_anchor_has_one_positive(cases: dict[str, GoldenCase]) -> None:
    names = {name.partition("/")[2] for name, case in cases.items() if "agreement" in case.flags}
    assert len(names) >= 5
    for name in names:
        supcon, nt_xent, pairwise = (cases[f"{loss}/{name}"] for loss in ("supcon", "nt_xent", "nt_xent_pairwise"))
        assert all(len(p) == 1 for p in supcon.case.positives())
        for other in (nt_xent, pairwise):
            assert other.expected.loss == supcon.expected.loss
            assert other.expected.anchors == supcon.expected.anchors
            assert np.array_equal(other.expected.gradient, supcon.expected.gradient)


SAME = [
    ("labels-unsorted", "labels-negative"),
    ("labels-unsorted", "labels-huge"),
    ("labels-unsorted", "labels-huge-negative"),
    ("labels-unsorted", "labels-modulo-2-32"),
    ("asymmetric-mask", "diagonal-true-mask"),
    ("asymmetric-pairs", "diagonal-pairs"),
    ("asymmetric-pairs", "repeated-pairs"),
]


@pytest.mark.parametrize("loss", COVERED)
def test_equivalent_positives_give_equal_results(cases: dict[str, GoldenCase], loss: str) -> None:
    for a, b in SAME:
        if f"{loss}/{a}" in cases and f"{loss}/{b}" in cases:
            one, other = cases[f"{loss}/{a}"].expected, cases[f"{loss}/{b}"].expected
            assert one.loss == other.loss
            assert one.anchors == other.anchors
            assert np.array_equal(one.gradient, other.gradient)


@pytest.mark.parametrize("loss", [name for name in COVERED if not LOSSES[name].two_towers])
def test_loss_does_not_depend_on_the_order_of_rows(cases: dict[str, GoldenCase], loss: str) -> None:
    stacked, interleaved, swapped, permuted, mixed_up = (
        cases[f"{loss}/two-views-{name}"] for name in ("stacked", "interleaved", "swapped", "permuted", "mixed-up")
    )
    for other in (interleaved, swapped, permuted):
        assert other.expected.loss == stacked.expected.loss
        assert sorted(other.expected.anchors.values()) == sorted(stacked.expected.anchors.values())
    assert mixed_up.expected.loss != stacked.expected.loss


@pytest.mark.parametrize("loss", COVERED)
@pytest.mark.parametrize("exponent", [("tiny", -12), ("huge", 12), ("tiny-float32", -100), ("huge-float64", 900)])
def test_norms_do_not_change_the_loss_under_cosine(
    cases: dict[str, GoldenCase], loss: str, exponent: tuple[str, int]
) -> None:
    size, power = exponent
    kind, _, suffix = size.partition("-")
    scaled = cases[f"{loss}/{kind}-norms" + (f"-{suffix}" if suffix else "")].expected
    towers = "in-batch" if loss == "multiple_negatives_ranking" else "two-towers"
    plain = cases[f"{loss}/{towers if LOSSES[loss].two_towers else 'one-positive-balanced'}-tau-half"].expected
    assert scaled.loss == plain.loss
    assert scaled.gradient is not None
    assert plain.gradient is not None
    assert np.array_equal(scaled.gradient * 2.0**power, plain.gradient)
    for name, gradient in plain.other_gradients.items():
        assert np.array_equal(scaled.other_gradients[name] * 2.0**power, gradient)


@pytest.mark.parametrize("loss", REFERENCED)
def test_batch_as_its_own_references_gives_the_loss_of_the_batch(cases: dict[str, GoldenCase], loss: str) -> None:
    """The losses are equal, and the gradient of the batch is the sum of both gradients."""
    name = "one-positive-balanced-tau-half" if loss == "nt_xent" else "unbalanced-classes"
    plain, referenced = cases[f"{loss}/{name}"], cases[f"{loss}/refs-self-all"]
    assert np.array_equal(referenced.case.others["ref_embeddings"], plain.case.embeddings)
    assert referenced.expected.loss == plain.expected.loss
    assert referenced.expected.anchors == plain.expected.anchors
    total = referenced.expected.gradient + referenced.expected.other_gradients["ref_embeddings"]
    np.testing.assert_allclose(total, plain.expected.gradient, rtol=1e-14, atol=1e-16)


def test_self_rows_exclude_the_right_references(cases: dict[str, GoldenCase]) -> None:
    """self_rows of -1 equal the default; a wrong offset excludes other references and changes the loss."""
    plain, none = cases["supcon/refs-tau-half"].expected, cases["supcon/refs-self-none"].expected
    assert none.loss == plain.loss
    assert np.array_equal(none.gradient, plain.gradient)
    assert np.array_equal(none.other_gradients["ref_embeddings"], plain.other_gradients["ref_embeddings"])
    for loss in ("supcon", "nt_xent"):
        right, wrong = (cases[f"{loss}/refs-gathered-{name}"].expected for name in ("second-rank", "first-offset"))
        assert right.loss != wrong.loss
    for policy, value in {"zero": 0.0, "drop": None, "nan": math.nan}.items():
        case = cases[f"supcon/refs-nothing-left-{policy}"]
        assert case.case.members()[0] == []
        found = case.expected.anchors.get(0)
        assert found == value or (math.isnan(value or 0.0) and math.isnan(found or 0.0))


def test_swapped_towers_have_swapped_gradients(cases: dict[str, GoldenCase]) -> None:
    plain, swapped = (cases[f"info_nce/{name}"].expected for name in ("two-towers-tau-half", "swapped"))
    assert swapped.loss == plain.loss
    assert np.array_equal(swapped.gradient, plain.other_gradients["embeddings_b"])
    assert np.array_equal(swapped.other_gradients["embeddings_b"], plain.gradient)
    there, back = (cases[f"info_nce/{name}-none"].expected for name in ("a-to-b", "b-to-a"))
    assert list(plain.anchors.values()) == [*there.anchors.values(), *back.anchors.values()]
    assert cases["info_nce/swapped-one-way"].expected.loss == cases["info_nce/a-to-b-mean"].expected.loss
    assert there.loss != back.loss
    for name in ("permuted", "permuted-queue"):
        right = cases["info_nce/queue-tau-half" if name == "permuted-queue" else "info_nce/two-towers-tau-half"]
        assert cases[f"info_nce/{name}"].expected.loss == right.expected.loss
    assert cases["info_nce/one-tower-permuted"].expected.loss != plain.loss


def test_single_pair_has_loss_and_gradient_0(cases: dict[str, GoldenCase]) -> None:
    expected = cases["info_nce/one-pair"].expected
    assert list(expected.anchors.values()) == [0.0, 0.0]
    assert expected.gradient is not None
    assert not expected.gradient.any()
    assert not expected.other_gradients["embeddings_b"].any()


def test_mean_and_sum_follow_from_the_anchors(cases: dict[str, GoldenCase]) -> None:
    for case in cases.values():
        expected = case.expected
        if case.case.first in case.formulas:  # only some anchors are stored
            continue
        if case.case.option("reduction") == "none":
            assert expected.loss == tuple(expected.anchors.values()) or any(map(math.isnan, expected.values))
        elif case.case.option("reduction") in ("mean", "sum") and expected.anchors:
            counts = case.case.divisors() if case.case.option("reduction") == "mean" else [1.0] * case.case.shape[0]
            value = math.fsum(x / counts[i] for i, x in expected.anchors.items())
            size = max(abs(x) for x in expected.anchors.values())
            assert expected.loss == pytest.approx(value, rel=1e-14, abs=1e-14 * size, nan_ok=True), case.id


def test_temperature_gradient_of_dot_products_follows_from_the_other_gradients(cases: dict[str, GoldenCase]) -> None:
    """Rows multiplied by c give the logits at the temperature T/c^2, so both derivatives are proportional."""
    found = 0
    for golden_case in cases.values():
        case, expected = golden_case.case, golden_case.expected
        if case.option("similarity") != "dot" or expected.temperature_gradient is None or expected.products:
            continue
        gradients = {case.first: expected.gradient, **expected.other_gradients}
        products = np.concatenate([(gradients[name] * rows).ravel() for name, rows in case.matrices.items()])
        scaled = 0.0 if case.option("base_temperature") is None else math.fsum(expected.values)
        value = (scaled - math.fsum(products) / 2) / case.temperature
        size = (np.abs(products).sum() + abs(scaled)) / case.temperature
        assert abs(expected.temperature_gradient - value) <= 1e-13 * size, case.id
        found += 1
    assert found > 200


@pytest.mark.parametrize("step", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_fast_has_the_stored_temperature_gradient(cases: dict[str, GoldenCase], step: int) -> None:
    chosen = [one for one in cases.values() if one.case.size <= PROVE_UP_TO and one.expected.gradient is not None]
    implementation, judged = Fast({}, "cpu"), set()
    for golden_case in chosen[::step]:
        case, true = golden_case.case, stored_truth(golden_case.case, golden_case.expected)
        temperature = torch.tensor(case.temperature, dtype=torch.float64, requires_grad=True)
        given = {**implementation.keywords(case), **implementation.tensors(case, "float64"), "temperature": temperature}
        implementation.loss(case, given).sum().backward()
        assert temperature.grad is not None
        assert true.temperature_gradient is not None
        error = abs(float(temperature.grad) - true.temperature_gradient)
        assert error <= scalar_bounds(case, "float64")[0], case.id
        judged.add(case.loss)
    assert judged >= set(COVERED)


# Rebuild.


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])  # processes start in seconds
def test_rebuild_changes_nothing(small: Path, processes: int) -> None:
    before = files(small)
    times = {name: (small / name).stat().st_mtime_ns for name in before}
    assert prove_golden(small, processes=processes) == []
    assert files(small) == before
    assert {name: (small / name).stat().st_mtime_ns for name in before} == times


def test_rebuild_restores_computed_fields(small: Path) -> None:
    before = files(small)

    def damage(data: Any) -> None:
        del data["cases"][0]["expected"]
        data["cases"][1]["dtypes"] = ["float64"]
        data["cases"][3]["expected"]["gradient"][0][1] += 1e-9
        data["cases"][4]["expected"]["gradients"]["ref_embeddings"][5][2] += 1e-9
        del data["cases"][2]["rounding"]
        data["cases"][4]["rounding"]["rows"]["embeddings"][1] *= 1.02

    edit(small, "supcon", damage)
    changes = prove_golden(small, processes=1)
    assert [change.split(": ")[2] for change in changes] == [
        "expected",
        "dtypes",
        "rounding",
        "expected.gradient[0][1]",
        "expected.gradients.ref_embeddings[5][2]",
        "rounding.rows.embeddings[1]",
    ]
    assert files(small) == before


def test_rebuild_replaces_bounds_that_are_not_those_of_the_rule(small: Path) -> None:
    before = files(small)

    def change(data: Any) -> None:
        data["cases"][4]["rounding"]["rows"]["embeddings"][1] *= 1.005

    edit(small, "supcon", change)
    (changed,) = prove_golden(small, processes=1)
    assert "rounding" in changed
    assert files(small) == before


def test_bounds_of_another_machine_are_stored_as_the_same_numbers() -> None:
    for units in (3.0, 7.5, 8.125, 1234.5678):
        stored = {golden._rounded_up(units * golden.ROUNDING_UNIT * (1 + k * 1e-11)) for k in range(-5, 6)}
        assert len(stored) == 1
        (number,) = stored
        assert units * (1 - 1e-8) <= number <= units * 1.01


def test_rebuild_restores_the_layout(small: Path) -> None:
    before = files(small)
    path = small / "golden/nt_xent.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8"))), encoding="utf-8")
    write_manifest(small)
    assert prove_golden(small, processes=1) == ["golden/nt_xent.json: the same content in another layout"]
    assert files(small) == before


def test_failing_rebuild_does_not_change_files(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(small, "supcon", remove("cases.0.expected"))
    before = files(small)

    def refuse(case: Case, **options: Any) -> None:
        if case.loss == "nt_bxent":
            raise CertificationError(f"{case.id}: refused")

    monkeypatch.setattr(prove, "certify", refuse)
    with pytest.raises(CertificationError, match="refused"):
        prove_golden(small, processes=1)
    assert files(small) == before


def test_rebuild_keeps_gradients_left_out_by_choice(small: Path) -> None:
    def leave_out(data: Any) -> None:
        data["cases"][0]["expected"] = {"gradient_left_out": BY_CHOICE}

    edit(small, "nt_xent", leave_out)
    prove_golden(small, processes=1)
    expected = next(case for case in load_golden(small) if case.case.loss == "nt_xent").expected
    assert expected.gradient is None
    assert expected.gradient_left_out == BY_CHOICE
    assert expected.loss == pytest.approx(2.0356476278275846, rel=1e-15)


def test_rebuild_refuses_unknown_fields_and_flags(small: Path) -> None:
    edit(small, "supcon", put("cases.1.comment", "x"))
    assert error(small, prove_golden) == (
        "golden/supcon.json: $.cases[1]: Additional properties are not allowed ('comment' was unexpected)"
    )
    edit(small, "supcon", remove("cases.1.comment"))
    edit(small, "supcon", put("cases.1.flags", ["mystery"]))
    assert error(small, prove_golden).startswith(
        "golden/supcon.json: $.cases[1].flags[0]: golden/flags.json does not explain"
    )


def test_float32_cases_distinguish_the_exact_backend_from_the_others() -> None:
    """Rounding once, at the end, meets bounds that sums in float32 exceed on most cases."""
    chosen = [one for one in load_golden() if one.case.loss == "supcon" and one.case.size <= 8]
    chosen = [one for one in chosen if "float32" in one.dtypes][::6]
    exceeded: Counter[str] = Counter()
    for one in chosen:
        true = truth_of(one.case, one)
        limits = rounded_once(bounds(one.case, true, "float64"), true, "float32")
        for backend in (Fast, FastDense, FastTiled, FastExact):
            outcome = backend({}, "cpu").evaluate(one.case, "float32")
            exceeded[backend.name] += compare(one.case, true, outcome, limits, "float32").ratio > 1
    assert exceeded.pop("fast-exact") == 0
    assert len(chosen) > 20
    assert all(number > len(chosen) / 2 for number in exceeded.values()), exceeded


@pytest.mark.slow  # validates every file; make fixtures-check does so too
def test_installed_files_match_their_schemas(tmp_path: Path) -> None:
    """The loaders validate a copy; of the installed folder they only compare the checksums."""
    rebuild.validate(Path(shutil.copytree(ROOT, tmp_path / "fixtures")))


def test_copy_of_loaded_installed_files_is_validated(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = small / "golden/nt_bxent.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    data["cases"][0]["unknown"] = 1
    path.write_text(json.dumps(data), encoding="utf-8")
    write_manifest(small)
    with monkeypatch.context() as installed:
        installed.setattr(store, "is_installed", lambda root: True)
        load_golden(small)
    with pytest.raises(FixtureError, match=r"golden/nt_bxent.json: \$.cases\[0\]: .*unknown"):
        load_golden(small)
