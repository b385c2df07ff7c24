"""Levels: of flags, of cases, and in the results of ``check``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pairproof import fast
from pairproof.conformance import check_loss, cli, report
from pairproof.conformance.judge import check as checking
from pairproof.conformance.judge.fresh import with_proof
from pairproof.conformance.judge.levels import (
    IN_FLOAT32,
    ROUNDS_BIAS,
    ROUNDS_TEMPERATURE,
    Level,
    level_of,
    level_of_case,
)
from pairproof.conformance.judge.options import Request, UsageError
from pairproof.conformance.judge.ranges import Limit
from pairproof.conformance.judge.results import Status
from pairproof.conformance.judge.verify import load_cases, truth_of
from pairproof.conformance.suite.cases import Case
from pairproof.conformance.suite.golden import FLAGS, GoldenCase, load_flags, load_golden
from pairproof.conformance.suite.store import FixtureError, fixtures_root, write_manifest
from pairproof.conformance.truth.tolerances import FORMULA_TIMES, bounds, formula_bounds

FORMULA, POLICIES, RANGE, DIGITS = Level


def test_levels_are_ordered_from_formula_to_digits() -> None:
    assert FORMULA < POLICIES < RANGE < DIGITS
    assert sorted([DIGITS, POLICIES, RANGE, FORMULA]) == [FORMULA, POLICIES, RANGE, DIGITS]
    assert POLICIES >= FORMULA
    assert not POLICIES <= FORMULA
    assert FORMULA <= FORMULA >= FORMULA


def test_every_flag_has_exactly_one_level_and_every_level_has_flags_and_cases() -> None:
    raw = json.loads((fixtures_root() / FLAGS).read_text(encoding="utf-8"))["flags"]
    assert {name: Level(flag["level"]) for name, flag in raw.items()} == {
        name: flag.level for name, flag in load_flags().items()
    }
    assert {flag.level for flag in load_flags().values()} == set(Level)
    assert {level_of(case.flags) for case in load_golden()} == set(Level)


pytestmark = pytest.mark.usefixtures("verdict_only", "in_this_process")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), FORMULA),
        (("temperature", "unbalanced-classes"), FORMULA),
        (("temperature", "lonely-anchors"), POLICIES),
        (("low-temperature", "lonely-anchors"), RANGE),
        (("trained-like", "low-temperature", "duplicate-embeddings"), DIGITS),
    ],
)
def test_level_of_a_case_is_the_highest_of_its_flags(flags: tuple[str, ...], expected: Level) -> None:
    assert level_of(flags) is expected


def test_unknown_flag_has_no_level() -> None:
    with pytest.raises(KeyError, match="mystery"):
        level_of(("mystery",))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"level": None}, "'level' is a required property"), ({"level": "hard"}, "'hard' is not one of")],
)
def test_flag_with_a_missing_or_unknown_level_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    for name in ("golden", "schema"):
        shutil.copytree(fixtures_root() / name, tmp_path / name)
    path = tmp_path / FLAGS
    data = json.loads(path.read_text(encoding="utf-8"))
    flag = data["flags"]["solved"] | change
    data["flags"]["solved"] = {name: value for name, value in flag.items() if value is not None}
    path.write_text(json.dumps(data), encoding="utf-8")
    write_manifest(tmp_path)
    with pytest.raises(FixtureError, match=message):
        load_flags(tmp_path)


@cache
def stored(losses: tuple[str, ...] = ()) -> dict[Case, GoldenCase | None]:
    return load_cases([], losses)


@pytest.fixture(autouse=True)
def loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the cases once for all tests, without worked examples."""
    monkeypatch.setattr(checking, "load_cases", lambda fixtures, losses=(): stored(losses))
    monkeypatch.setattr(checking, "load_worked", list)


def case_of(name: str) -> tuple[Case, GoldenCase]:
    (found,) = ((case, golden) for case, golden in stored(("supcon",)).items() if case.id == f"golden/supcon/{name}")
    assert found[1] is not None
    return found[0], found[1]


def honest(embeddings: Tensor, labels: Tensor, temperature: float = 0.1) -> Tensor:
    """Right; norms are clamped at 1e-12."""
    rows = F.normalize(embeddings, dim=1)
    own = torch.eye(len(rows), dtype=torch.bool)
    logs = (rows @ rows.T / temperature).masked_fill(own, -torch.inf).log_softmax(dim=1)
    positive = (labels[:, None] == labels) & ~own
    return (-logs.masked_fill(~positive, 0).sum(dim=1) / positive.sum(dim=1).clamp(min=1)).mean()


def wrong_divisor(embeddings: Tensor, labels: Tensor, temperature: float = 0.1) -> Tensor:
    return honest(embeddings, labels, temperature) * len(labels) / (len(labels) + 1)


def nan_without_positives(embeddings: Tensor, labels: Tensor, temperature: float = 0.1) -> Tensor:
    """Wrong only for anchors without positives."""
    without_positives = (labels[:, None] == labels).sum(dim=1) == 1
    return honest(embeddings, labels, temperature) * (torch.nan if without_positives.any() else 1)


def in_float32(embeddings: Tensor, labels: Tensor, temperature: float = 0.1) -> Tensor:
    return honest(embeddings.float(), labels, temperature)


def half_the_loss_in_float32(embeddings: Tensor, labels: Tensor, temperature: float = 0.1) -> Tensor:
    return in_float32(embeddings, labels, temperature) / 2


CASES = ("unbalanced-classes*", "temperature-1", "labels-negative", "all-distinct-zero", "lonely-zero*")
EXTREME = ("tiny-norms-float64", "huge-norms-float64", "near-largest-float64")


def of(target: Callable[..., Tensor], *names: str, **options: Any) -> checking.CheckResult:
    return check_loss(target, "supcon", cases=[f"golden/supcon/{name}" for name in names], **options)


def test_clamped_norms_fail_only_at_range() -> None:
    found = of(honest, *CASES, *EXTREME)
    assert (found.verdict, found.exit_code, found.failures_required) == ("conforms", 0, [])
    assert {check.level for check in found.failures} == {RANGE}
    assert f"{len(found.failures)} failed above this level" in found.summary
    assert found.summary.startswith("conforms at level policies: ")
    others = (level for level in Level if level is not POLICIES)
    at = {POLICIES: found} | {level: of(honest, *CASES, *EXTREME, level=level.value) for level in others}
    assert [at[level].verdict for level in Level] == ["conforms", "conforms", "does not conform", "does not conform"]
    assert [at[level].exit_code for level in Level] == [0, 0, 1, 1]
    assert {found.verdict_at(level) for level in (FORMULA, POLICIES)} == {"conforms"}
    assert at[RANGE].failures_required == at[RANGE].failures


def test_wrong_divisor_fails_at_formula() -> None:
    found = of(wrong_divisor, *CASES, level="formula")
    assert (found.verdict, found.exit_code) == ("does not conform", 1)
    assert FORMULA in {check.level for check in found.failures_required}


def test_wrong_policy_passes_at_formula_and_fails_at_policies() -> None:
    found = of(nan_without_positives, *CASES, level="formula")
    assert found.verdict == "conforms"
    assert {check.level for check in found.failures} == {POLICIES}
    assert of(nan_without_positives, *CASES).verdict == "does not conform"


def test_target_that_computes_in_float32_is_judged_as_float32() -> None:
    found = of(in_float32, *CASES, dtypes="float64")
    assert found.verdict == "conforms"
    assert {check.status for check in found.judged} == {Status.PASSED}
    assert IN_FLOAT32 in found.notes
    assert IN_FLOAT32 not in of(honest, *CASES).notes
    wrong = of(half_the_loss_in_float32, *CASES, dtypes="float64")
    assert (wrong.verdict, IN_FLOAT32 in wrong.notes) == ("does not conform", True)


def test_target_that_rounds_its_temperature_is_judged_as_float32() -> None:
    def rounds(embeddings: Tensor, labels: Tensor, temperature: float = 0.1) -> Tensor:
        return honest(embeddings, labels, torch.as_tensor(temperature))

    def wrong(embeddings: Tensor, labels: Tensor, temperature: float = 0.1) -> Tensor:
        return 1.00001 * rounds(embeddings, labels, temperature)

    found = of(rounds, *CASES, dtypes="float64")
    assert (found.verdict, ROUNDS_TEMPERATURE in found.notes) == ("conforms", True)
    found = of(wrong, *CASES, dtypes="float64")
    assert (found.verdict, ROUNDS_TEMPERATURE in found.notes) == ("does not conform", True)


def test_target_that_rounds_its_bias_is_judged_as_float32() -> None:
    def rounds(image: Tensor, text: Tensor, temperature: float = 0.1, bias: float = -10.0) -> Tensor:
        rows, columns = (torch.nn.functional.normalize(x, dim=1) for x in (image, text))
        logits = rows @ columns.T / temperature + torch.as_tensor(bias)
        signs = 2 * torch.eye(len(logits), dtype=logits.dtype) - 1
        return -torch.nn.functional.logsigmoid(signs * logits).sum() / len(logits)

    def wrong(image: Tensor, text: Tensor, temperature: float = 0.1, bias: float = -10.0) -> Tensor:
        return 1.00001 * rounds(image, text, temperature, bias)

    for target, verdict in ((rounds, "conforms"), (wrong, "does not conform")):
        found = check_loss(
            target, "sigmoid", call="towers", dtypes="float64", seed=1, fuzz=8, cases=("fresh-*", "golden/*/t*")
        )
        assert (found.verdict, ROUNDS_BIAS in found.notes) == (verdict, True)


def test_target_that_stores_its_built_in_temperature_in_float32_is_judged_as_float32() -> None:
    log_scale = torch.nn.Parameter(torch.tensor(1 / 0.07).log())

    def stored(embeddings: Tensor, labels: Tensor) -> Tensor:
        return honest(embeddings, labels, 1 / log_scale.exp())

    def wrong(embeddings: Tensor, labels: Tensor) -> Tensor:
        return 1.00001 * stored(embeddings, labels)

    def other(embeddings: Tensor, labels: Tensor) -> Tensor:
        return honest(embeddings, labels, 0.0700001)

    for target, conforms in ((stored, "conforms"), (wrong, "does not conform"), (other, "does not conform")):
        found = of(target, *CASES, dtypes="float64", temperature=0.07)
        assert (found.verdict, ROUNDS_TEMPERATURE in found.notes) == (conforms, target is stored)


def test_target_with_one_value_per_anchor_in_float32_is_judged_as_float32() -> None:
    """The mean, which the harness computes, is not representable in float32."""

    def each(embeddings: Tensor, labels: Tensor, temperature: float = 0.1) -> Tensor:
        return fast.supcon_loss(embeddings.float(), labels, temperature=temperature, reduction="none")

    found = of(each, *CASES, dtypes="float64", settings={"reduction": "none"})
    assert (found.verdict, IN_FLOAT32 in found.notes) == ("conforms", True)


def test_target_that_rounds_similarities_is_judged_as_float32() -> None:
    """Its value is representable in float32, but its gradient is not."""

    def rounds(embeddings: Tensor, labels: Tensor, temperature: float = 0.1) -> Tensor:
        z = torch.nn.functional.normalize(embeddings, dim=1)
        own = torch.eye(len(z), dtype=torch.bool)
        positives = (labels[:, None] == labels) & ~own
        logits = (z @ z.T / temperature).float().masked_fill(own, -torch.inf)
        sums = logits.log_softmax(dim=1).masked_fill(~positives, 0).sum(dim=1)
        return -(sums / positives.sum(dim=1).clamp(min=1)).mean()

    found = of(rounds, *CASES, dtypes="float64")
    assert (found.verdict, IN_FLOAT32 in found.notes) == ("conforms", True)


def test_float32_is_decided_from_several_cases() -> None:
    """The result of one selected case may fit float32 by chance; other cases are evaluated to find out."""

    def zero_for_odd_batches(embeddings: Tensor, labels: Tensor, temperature: float = 0.1) -> Tensor:
        return honest(embeddings, labels, temperature) * (len(labels) + 1 & 1)

    odd = "unbalanced-classes"
    assert case_of(odd)[0].n % 2 == 1
    found = of(zero_for_odd_batches, odd, dtypes="float64")
    assert IN_FLOAT32 not in found.notes
    assert [check.status for check in found.judged] == [Status.FAILED]
    assert of(in_float32, odd, dtypes="float64").verdict == "conforms"


def test_result_between_both_bounds_fails_only_at_digits() -> None:
    case, golden = case_of("temperature-1")
    true = truth_of(case, golden)
    derived = bounds(case, true, "float64")
    (least,), (most,) = derived.values, formula_bounds(derived).values
    assert most == FORMULA_TIMES * least

    def shifted_by(error: float) -> Callable[..., Tensor]:
        def loss(embeddings: Tensor, labels: Tensor, temperature: float = 0.1) -> Tensor:
            found = honest(embeddings, labels, temperature)
            return found + (true.values[0] + error - found).detach()

        return loss

    options = {"dtypes": "float64"}
    found = of(shifted_by((least + most) / 2), "temperature-1", **options)
    assert [(check.level, check.rounding, check.status) for check in found.judged] == [(DIGITS, True, Status.FAILED)]
    assert (found.verdict, found.verdict_at(RANGE), found.verdict_at(DIGITS)) == (
        *("conforms", "conforms"),
        "does not conform",
    )
    explained = of(shifted_by((least + most) / 2), "temperature-1", level="digits", **options)
    assert list(explained.diagnoses.values()) == [checking.ROUNDED]
    assert [check.level for check in of(shifted_by(2 * most), "temperature-1", **options).failures] == [FORMULA]


OPPOSITE = Case(
    "tests/opposite-positives",
    "supcon",
    np.array([(120.0, 15), (-117, 22), (103, 60), (-110, 41), (5, 127)]),
    {"labels": [0, 0, 1, 1, 1]},
    {"temperature": 0.055},
)
"""An ordinary batch in which logits reach -18, so that exponentials are as small as 2e-8."""


def with_epsilon(numerator: float, denominator: float, *, each: bool = False, factor: float = 1.0) -> Any:
    """SupCon with a number added to each numerator, and one to each denominator."""

    def loss(embeddings: Tensor, labels: Tensor, temperature: float = 0.1) -> Tensor:
        rows = F.normalize(embeddings, dim=1)
        own = torch.eye(len(rows), dtype=torch.bool)
        exponentials = (rows @ rows.T / temperature).exp()
        below = exponentials.masked_fill(own, 0).sum(dim=1, keepdim=True)
        logs = (exponentials + numerator).log() - (below + denominator).log()
        positive = (labels[:, None] == labels) & ~own
        values = -factor * (logs * positive).sum(dim=1) / positive.sum(dim=1).clamp(min=1)
        return values if each else values.mean()

    return loss


@pytest.mark.parametrize(
    ("target", "level", "words"),
    [
        (with_epsilon(1e-20, 1e-20), RANGE, "1e-20 is added to the numerator and to the denominator"),
        (with_epsilon(1e-20, 1e-20, each=True), RANGE, "1e-20 is added to the numerator and to the denominator"),
        (with_epsilon(1e-16, 1e-16), FORMULA, ""),
        (with_epsilon(1e-8, 1e-8), FORMULA, ""),
        (with_epsilon(1e-20, 1e-8), FORMULA, ""),
        (with_epsilon(1e-20, 1e-20, factor=1 + 1e-9), FORMULA, ""),
    ],
)
def test_epsilon_that_only_affects_extreme_logits_fails_at_range(target: Any, level: Level, words: str) -> None:
    golden = with_proof(OPPOSITE)
    each = target(torch.eye(3), torch.zeros(3)).dim() == 1
    request = Request(target, "supcon", settings={"reduction": "none"} if each else {})
    assert level_of_case(OPPOSITE, golden) is FORMULA
    with closing(checking.load_target(request, ())) as loaded:
        (check,) = checking.judge_target(request, loaded, OPPOSITE, golden, ("float64",), ())
        notes = "; ".join(loaded.notes)
    assert (check.status, check.level) == (Status.FAILED, level)
    assert words in check.message
    for text, found in (("count at the level range", notes), ("changes numbers below 9e-05 by more", check.message)):
        assert (text in found) is (level is RANGE)


@pytest.mark.parametrize(("epsilon", "level"), [(1e-20, RANGE), (1e-8, FORMULA)])
def test_tiny_epsilon_is_recognised_in_a_batch_of_training_size(epsilon: float, level: Level) -> None:
    angles = np.linspace(0, 2 * np.pi, 120, endpoint=False)
    rows = np.round(64 * np.stack([np.cos(angles), np.sin(angles)], axis=1))
    case = replace(OPPOSITE, embeddings=rows, arguments={"labels": [k % 60 for k in range(120)]})
    golden = with_proof(case)
    request = Request(with_epsilon(epsilon, epsilon), "supcon")
    assert level_of_case(case, golden) is FORMULA
    with closing(checking.load_target(request, ())) as loaded:
        (check,) = checking.judge_target(request, loaded, case, golden, ("float64",), ())
    assert (check.status, check.level) == (Status.FAILED, level)


def test_finite_value_where_nan_is_required_is_not_taken_for_a_tiny_epsilon() -> None:
    settings = {"no_positive": "nan", "reduction": "mean"}
    case = replace(OPPOSITE, arguments={"labels": [0, 0, 1, 1, 2]}, keywords={**OPPOSITE.keywords, **settings})
    request = Request(with_epsilon(1e-20, 1e-20), "supcon", settings=settings)
    golden = with_proof(case)
    with closing(checking.load_target(request, ())) as loaded:
        (check,) = checking.judge_target(request, loaded, case, golden, ("float64",), ())
    assert (check.status, check.level) == (Status.FAILED, level_of_case(case, golden))
    assert check.level is not RANGE


def test_failures_above_the_level_are_counted_with_one_example(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("temperature-1", *EXTREME)
    report.show(found := of(honest, *names), cli.Output(), seconds=1.0)
    text = capsys.readouterr().out
    first, *_ = found.failures
    assert "formula: 2 passed" in text
    assert "policies: no checks" in text
    assert f"range: {len(found.failures)} failed" in text
    assert f"for example {first.case} in {first.dtype}: " in " ".join(text.split())
    assert "\nfailed golden" not in text
    assert text.count("for example") == 1
    found.limits = [Limit("float64", "norm", "below", 1e-12, 1e-300, "clamped", "loss")]
    report.show(found, cli.Output(), seconds=1.0)
    assert f"range: {len(found.failures)} failed; float64: norms below 1e-12 are clamped" in capsys.readouterr().out
    report.show(found, cli.Output(), seconds=1.0, details=None)
    assert "range: " not in capsys.readouterr().out


def test_junit_marks_failures_above_the_level_as_skipped(tmp_path: Path) -> None:
    names, path = ("temperature-1", *EXTREME), tmp_path / "report.xml"
    found = of(honest, *names)
    report.write_junit(found, path)
    (suite,) = ElementTree.parse(path).getroot()
    skipped = [str(element.get("message")) for element in suite.iter("skipped")]
    assert suite.get("failures") == "0"
    assert suite.get("skipped") == str(len(skipped))
    assert sum(one.startswith("fails at the level range, above policies: ") for one in skipped) == len(found.failures)
    report.write_junit(of(honest, *names, level="range"), path)
    assert next(iter(ElementTree.parse(path).getroot())).get("failures") == str(len(found.failures))


def test_level_without_results_could_not_run() -> None:
    found = of(honest, "tiny-norms-float64")
    assert (found.verdict, found.exit_code) == ("could not run", 3)
    assert found.summary.endswith("pass --level range")
    assert "--level range" in found.failures[0].repeat


def test_unknown_level_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="unknown level 'polices'; known: formula, policies, range, digits; did you"):
        check_loss(honest, "supcon", level="polices")
    with pytest.raises(SystemExit) as caught:
        cli.main(["check", "losses:supcon", "--loss", "supcon", "--level", "hard"])
    assert caught.value.code == 2
    assert "unknown level 'hard'" in capsys.readouterr().err


def test_command_to_repeat_a_check_keeps_the_level() -> None:
    request = Request("losses:supcon", "supcon", level="digits")
    assert " --level digits " in request.repeat("some", "float64")
    assert "--level" not in Request("losses:supcon", "supcon").repeat("some", "float64", POLICIES)


def test_declared_deviation_counts_at_its_level_and_must_occur_at_every_level(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    entry = '[[deviations]]\ncase = "golden/supcon/{}"\nreason = "clamped"\nlink = "https://example.org/7"\n'
    path.write_text(entry.format("tiny-norms-float64"), encoding="utf-8")
    found = of(honest, "temperature-1", "tiny-norms-float64", deviations=path)
    assert found.levels[RANGE] == {Status.DEVIATES: 1}
    assert found.verdict == "conforms"
    path.write_text(entry.format("temperature-0-01"), encoding="utf-8")
    assert level_of(case_of("temperature-0-01")[1].flags) is RANGE
    stale = of(honest, "temperature-1", "temperature-0-01", deviations=path)
    assert {check.level for check in stale.failures_required} == {RANGE}
    assert stale.verdict == "does not conform"


def test_level_of_a_case_without_flags_follows_from_its_batch() -> None:
    for name in ("temperature-1", "lonely-zero", "tiny-norms-float64", "temperature-0-01"):
        case, golden = case_of(name)
        assert level_of_case(case, golden) is level_of_case(case, None) is level_of(golden.flags)
