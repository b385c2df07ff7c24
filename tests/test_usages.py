"""Usages and side effects: each wrong loss is found by one of them, and right losses pass all."""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pairproof import fast
from pairproof.conformance import cli, report
from pairproof.conformance.documents.load import load_worked
from pairproof.conformance.implementations.usages import SIDE_EFFECTS, USAGES
from pairproof.conformance.judge import check as checking
from pairproof.conformance.judge import usages as judging
from pairproof.conformance.judge import verify as run
from pairproof.conformance.judge.check import CheckResult, check_loss
from pairproof.conformance.judge.options import Request
from pairproof.conformance.judge.proofs import as_claimed
from pairproof.conformance.judge.results import BAD, Status
from pairproof.conformance.judge.suggest import suggested
from pairproof.conformance.judge.usages import UsageJudge
from pairproof.conformance.suite.cases import Case
from pairproof.conformance.suite.golden import GoldenCase
from pairproof.conformance.suite.levels import Level
from pairproof.conformance.truth.evaluate import truth

FILE = Path(__file__).parent / "targets" / "usages.py"
EVERY = ("usage/*", "golden/*/two-*[sde]")
"""All usages, and a few cases that are judged as usual."""

RIGHT = (
    "supcon",
    "SupCon",
    "DrawsItsFirstWeights",
    "LearnedSupCon",
    "Clip",
    "ClipWithAccuracy",
    "nt_xent",
    "nt_xent_by_partners",
    "refuses_bfloat16",
    "reads_a_number",
    "siglip",
    "SigLip",
)
"""Straightforward losses."""

QUICK = ("supcon", "DrawsItsFirstWeights", "LearnedSupCon", "ClipWithAccuracy", "nt_xent", "siglip")
"""Those of them that ``make test`` judges."""


def _module() -> Any:
    spec = importlib.util.spec_from_file_location("usages_of_targets", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FINDINGS = _module().FINDINGS


@cache
def _every_case() -> dict[Case, GoldenCase | None]:
    return run.load_cases(load_worked())


pytestmark = pytest.mark.usefixtures("verdict_only", "in_this_process")


@pytest.fixture(autouse=True)
def loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the cases once for all tests, and judge usages on fewer of them; no text is wrapped."""

    def cases(_: object, losses: tuple[str, ...] = ()) -> dict[Case, GoldenCase | None]:
        return {case: golden for case, golden in _every_case().items() if not losses or case.loss in losses}

    monkeypatch.setattr(checking, "load_cases", cases)
    monkeypatch.setattr(checking, "load_worked", list)
    monkeypatch.setattr(judging, "CANDIDATES", 6)
    monkeypatch.setenv("COLUMNS", "1000")


def of(name: str, *cases: str) -> CheckResult:
    loss = "nt_xent" if name.startswith("nt_xent") or name == "wrong_for_shared_memory" else "supcon"
    if name.startswith("Clip") or "tower" in name:
        loss = "info_nce"
    if name.lower().startswith("siglip"):
        loss = "sigmoid"
    # The parameters of these modules are float32.
    learned = name.startswith(("Clip", "Learned", "SigLip"))
    return check_loss(f"{FILE}:{name}", loss, cases=cases or EVERY, dtypes=("float32",) if learned else ())


def found(result: CheckResult) -> dict[str, str]:
    """The message of every failed check, apart from those about range."""
    return {one.case: one.message for one in result.failures if (one.level or Level.FORMULA) < Level.RANGE}


def is_found(name: str) -> None:
    """Assert that the usage of a wrong loss finds it, and that its ordinary cases pass."""
    result = of(name, FINDINGS[name], EVERY[1])
    failed = found(result)
    assert FINDINGS[name] in failed, failed
    assert not [case for case in failed if case.startswith("golden/")], "it is right as usual"
    (check,) = (one for one in result.failures if one.case == FINDINGS[name])
    assert check.repeat.startswith("pairproof check ")


def test_module_that_starts_a_parameter_at_a_number_gets_no_tensor_for_it() -> None:
    result = check_loss(f"{FILE}:SigLip", "sigmoid", cases=("usage/*bias*", EVERY[1]))
    judged = {one.case for one in result.judged}
    assert "usage/learned-bias" in judged
    assert "usage/bias-tensor" not in judged
    assert not found(result)


LEARNED = "usage/*learned*"


def learned(target: Any, loss: str, **options: Any) -> dict[str, tuple[Status, str]]:
    """The status and the message of the usages that judge the parameters of a target."""
    result = check_loss(target, loss, cases=options.pop("cases", (LEARNED,)), **options)
    return {one.case.removeprefix("usage/"): (one.status, one.message) for one in result.checks}


class Stored(torch.nn.Module):
    """Losses at a temperature that a scalar under a meaningless name stores."""

    def __init__(self, p: torch.Tensor, read: Any, detached: bool = False, offset: Any = lambda p: 0.0) -> None:
        super().__init__()
        if isinstance(p, torch.nn.Parameter):
            self.p = p
        else:
            self.register_buffer("p", p)
        self.read, self.detached, self.offset = read, detached, offset

    def loss(self, function: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        p = self.p.detach() if self.detached else self.p
        return function(first, second, temperature=self.read(p)) + self.offset(p)


class OfRows(Stored):
    def forward(self, embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(fast.supcon_loss, embeddings, labels)


class OfViews(Stored):
    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(2 * len(first)).roll(len(first))
        return self.loss(fast.nt_xent_loss, torch.cat([first, second]), rows)


class OfTowers(Stored):
    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return self.loss(fast.info_nce_loss, first, second)


class OneWay(Stored):
    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return self.loss(partial(fast.info_nce_loss, direction="a_to_b"), query, key)


def parameter(value: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones([]) * value)


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (0.07, lambda p: p),
        (1 / 0.07, lambda p: 1 / p),
        (math.log(0.07), torch.exp),
        (-math.log(0.07), lambda p: (-p).exp()),
    ],
    ids=["itself", "inverse", "logarithm", "logarithm of the inverse"],
)
@pytest.mark.parametrize(
    ("module", "loss"), [(OfRows, "supcon"), (OfViews, "nt_xent"), (OfTowers, "info_nce"), (OneWay, "info_nce")]
)
@pytest.mark.quick(3)
def test_parameter_that_stores_the_temperature_is_judged(module: Any, loss: str, value: float, read: Any) -> None:
    options: dict[str, Any] = {"settings": {"direction": "a_to_b"}} if module is OneWay else {}
    for detached, status in ((False, Status.PASSED), (True, Status.FAILED)):
        found = learned(module(parameter(value), read, detached), loss, temperature=0.07, **options)
        names = ("learned-temperature", "frozen-rows-learned-temperature", "second-call-learned-temperature")
        assert {name: one for name, (one, _) in found.items()} == dict.fromkeys(names, status), found


@pytest.mark.parametrize(
    ("module", "learnable"),
    [(OfTowers(parameter(0.07), lambda p: p), True), (OfTowers(torch.tensor(0.07), lambda p: p), False)],
)
def test_a_checked_gradient_of_a_learned_temperature_is_named(
    module: torch.nn.Module, learnable: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    result = check_loss(module, "info_nce", temperature=0.07, cases=(LEARNED, "usage/upstream"))
    report.show(result, cli.Output(), seconds=1.0)
    assert ("gradients were checked, also those of a learned temperature\n" in capsys.readouterr().out) == learnable


@pytest.mark.parametrize("name", ["SigLipHead", "SigLipHeadOfNumbers", "SigLipHeadOfTensors", "SigLipHeadInFloat32"])
@pytest.mark.quick(2)
def test_own_parameters_are_judged_instead_of_the_tensors_of_the_caller(name: str) -> None:
    options: dict[str, Any] = {"temperature": 0.1} if name == "SigLipHead" else {}
    cases = (LEARNED, "usage/*temperature-tensor*", "usage/bias-tensor")
    for detached, status in (("", Status.PASSED), ("Detached", Status.FAILED)):
        found = learned(f"{FILE}:{name}{detached}", "sigmoid", cases=cases, **options)
        assert {case: one for case, (one, _) in found.items()} == {
            "learned-temperature": status,
            "learned-bias": status,
            "frozen-rows-learned-temperature": status,
            "second-call-learned-temperature": status,
        }


def test_scalars_without_gradient_are_noted_but_not_judged() -> None:
    frozen = parameter(0.07).requires_grad_(requires_grad=False)
    for stored in (frozen, torch.tensor(0.07)):
        found = learned(OfRows(stored, lambda p: p), "supcon", temperature=0.07)["learned-temperature"]
        assert found == (Status.SKIPPED, "not judged: p stores the temperature but requires no gradient")


def test_parameter_that_is_not_the_temperature_is_not_judged() -> None:
    margin = OfRows(parameter(0.07), lambda p: 0.07, offset=lambda p: 2 * p - 0.14)
    status, message = learned(margin, "supcon", temperature=0.07)["learned-temperature"]
    assert status is Status.SKIPPED
    assert message.endswith("a parameter has the value of the temperature, but the loss depends on it in another way")
    assert margin.p.item() == parameter(0.07).item()
    weight = OfRows(torch.nn.Linear(1, 1, bias=False).weight, lambda p: 0.07, offset=lambda p: (p - p).sum())
    assert learned(weight, "supcon", temperature=0.07) == {}


def test_parameter_with_a_known_value_is_judged_beside_one_with_another_value() -> None:
    class Scaled(OfRows):
        def __init__(self, detached: bool) -> None:
            super().__init__(parameter(0.07), lambda p: p, detached)
            self.scale = torch.nn.Parameter(torch.tensor(3.0))

    for detached, status in ((False, Status.PASSED), (True, Status.FAILED)):
        assert learned(Scaled(detached), "supcon", temperature=0.07)["learned-temperature"][0] is status


@pytest.mark.parametrize(("detached", "status"), [("", Status.PASSED), ("Detached", Status.FAILED)])
def test_temperature_tensor_is_judged_if_the_target_rounds_it_to_float32(detached: str, status: Status) -> None:
    cases = ("usage/temperature-tensor", "usage/low-temperature-tensor", "usage/bias-tensor")
    found = learned(f"{FILE}:SigLipRounded{detached}", "sigmoid", cases=cases)
    assert [one for one, _ in found.values()] == [status] * 3, found


def test_selected_usages_that_do_not_apply_are_named_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    result = check_loss(fast.info_nce_loss, "info_nce", cases=("usage/learned*",))
    reason = "no scalar parameter of the target stores the temperature"
    assert result.summary == (
        f"could not run: {reason} (usage/learned-temperature); no ordinary case fits (usage/learned-bias)"
    )
    assert result.not_tried[-2:] == [f"learned-temperature ({reason})", "learned-bias (no ordinary case fits)"]
    with pytest.raises(SystemExit):
        cli.main(["check", "pairproof.fast:info_nce_loss", "--loss=info_nce", "--case=usage/learned*"])
    assert "0 of 2 selected usages apply to this target\n" in capsys.readouterr().out
    bfloat16 = check_loss(fast.info_nce_loss, "info_nce", cases=("usage/bfloat16",), dtypes=("float32",)).summary
    assert bfloat16 == "could not run: judged in bfloat16, which --dtype does not select (usage/bfloat16)"
    effects = check_loss(fast.info_nce_loss, "info_nce", cases=("side-effects/*",)).summary
    assert effects.startswith("could not run: side effects are watched in the calls of cases and usages")


def is_found_in_a_process(name: str) -> None:
    """Call ``is_found`` in a new process: a fork of one with threads cannot start others, and tests may start some."""
    code = f"from tests.test_usages import is_found; is_found({name!r})"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent, check=True)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if usage in ("usage/compiled", "usage/threads") else ())
        for name, usage in FINDINGS.items()
        if usage.startswith("usage/")
    ],
)
@pytest.mark.quick(12)
def test_wrong_loss_is_found_by_its_usage(name: str) -> None:
    (is_found_in_a_process if FINDINGS[name] == "usage/threads" else is_found)(name)


@pytest.mark.usefixtures("own_process")
@pytest.mark.parametrize("name", [name for name, usage in FINDINGS.items() if not usage.startswith("usage/")])
@pytest.mark.quick(5)
def test_side_effect_of_a_loss_is_found(name: str) -> None:
    (is_found_in_a_process if name == "changes_the_threads" else is_found)(name)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in RIGHT]
)
@pytest.mark.quick(1)
def test_right_loss_passes_every_usage(name: str) -> None:
    result = of(name)
    assert found(result) == {}
    assert sum(one.case.startswith("usage/") and one.status is Status.PASSED for one in result.checks) > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "loss"),
    [
        (fast.supcon_loss, "supcon"),
        (fast.SupConLoss, "supcon"),
        (fast.supcon_in_loss, "supcon_in"),
        (fast.nt_xent_loss, "nt_xent"),
        (fast.nt_xent_pairwise_loss, "nt_xent_pairwise"),
        (fast.nt_bxent_loss, "nt_bxent"),
        (fast.supcon_epsilon_loss, "supcon_epsilon"),
        (fast.info_nce_loss, "info_nce"),
        (fast.sigmoid_loss, "sigmoid"),
        (fast.InfoNCELoss, "info_nce"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_losses_of_this_package_pass_every_usage(target: Any, loss: str) -> None:
    result = check_loss(target, loss, cases=EVERY)
    assert [one.message for one in result.checks if one.status in BAD] == []


def test_usages_of_two_matrices_are_judged_in_the_direction_of_the_target() -> None:
    target = f"{FILE.parent / 'shapes.py'}:required_queue"
    cases = ("usage/*frozen", "usage/same-tensor")
    result = check_loss(target, "info_nce", settings={"direction": "a_to_b"}, cases=cases)
    judged = {one.case: one.status for one in result.checks if one.status is not Status.SKIPPED}
    assert judged == dict.fromkeys(
        ("usage/first-frozen", "usage/others-frozen", "usage/same-tensor", "usage/all-frozen"), Status.PASSED
    )


def test_usages_of_two_matrices_do_not_concern_a_matrix_of_similarities() -> None:
    result = check_loss(f"{FILE.parent / 'shapes.py'}:of_similarities", "info_nce", cases=("usage/*frozen", EVERY[1]))
    assert result.judged
    assert found(result) == {}


def test_failing_usages_are_printed_after_failing_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first failure shows the mistake on an ordinary batch, if there is one."""
    target = tmp_path / "losses.py"
    target.write_text(
        "import torch\n"
        "from pairproof import fast\n"
        "def supcon(embeddings, labels, temperature=0.1):\n"
        "    loss = fast.supcon_loss(embeddings, labels, temperature=float(torch.as_tensor(temperature).detach()))\n"
        "    return loss * (2 if len(embeddings) == 8 else 1)\n"
    )
    cases = ("golden/supcon/two-positives", "golden/supcon/agreement-eight-rows", "usage/temperature-tensor")
    with pytest.raises(SystemExit):
        cli.main(["check", f"{target}:supcon", "--loss=supcon", *(f"--case={one}" for one in cases)])
    text = capsys.readouterr().out
    assert -1 < text.find("failed golden/supcon/agreement-eight-rows") < text.find("failed usage/temperature-tensor")


def test_refused_usages_are_listed_as_not_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "bfloat16 (refused: TypeError: the dtype bfloat16 is not supported)"
    path = str(tmp_path / "a.json")
    with pytest.raises(SystemExit):
        cli.main(["check", f"{FILE}:refuses_bfloat16", "--loss", "supcon", "--case", "usage/*16", "--json", path])
    assert f"  not tried: {words}\n" in capsys.readouterr().out
    assert json.loads(Path(path).read_text())["not_tried"] == [words]


def test_temperature_that_is_read_as_a_number_is_not_judged() -> None:
    (check,) = of("reads_a_number", "usage/temperature-tensor").checks
    assert check.status is Status.SKIPPED
    assert check.message == "not judged: it reads the temperature as a number (__float__), which has no gradient"


def test_temperature_that_is_also_the_base_temperature_counts_as_unchanged() -> None:
    def scaled(
        embeddings: torch.Tensor, labels: torch.Tensor, temperature: float = 0.1, base_temperature: float = 0.1
    ) -> torch.Tensor:
        return fast.supcon_loss(embeddings, labels, temperature=temperature) * (temperature / base_temperature)

    (check,) = check_loss(scaled, "supcon", cases="usage/temperature-tensor", dtypes="float64").checks
    assert (check.status, check.message) == (Status.PASSED, "")


class Default(float):
    """A default that a function can tell from an equal number that is passed."""


DEFAULT = Default(0.3)


@pytest.mark.parametrize(("only_by_default", "also"), [(False, ", also if it is passed"), (True, "")])
def test_mistake_at_the_default_temperature_is_told_from_a_wrong_default(only_by_default: bool, also: str) -> None:
    def loss(embeddings: torch.Tensor, labels: torch.Tensor, temperature: float = DEFAULT) -> torch.Tensor:
        wrong = isinstance(temperature, Default) if only_by_default else temperature == DEFAULT
        return (1 + wrong) * fast.supcon_loss(embeddings, labels, temperature=float(temperature))

    (check,) = check_loss(loss, "supcon", cases=("usage/default-temperature",), dtypes="float64").failures
    assert check.message.startswith(f"the default temperature of the target{also}: loss: expected")


def test_usages_of_a_loss_that_is_wrong_as_usual_are_not_judged() -> None:
    def wrong(embeddings: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
        return 2 * fast.supcon_loss(embeddings, labels, temperature=temperature)

    result = check_loss(wrong, "supcon", cases=("usage/*",))
    assert result.checks == []
    assert result.summary.startswith(
        "could not run: usages are judged on cases that pass in an ordinary call, and none does: golden/supcon/"
    )
    assert ": value of anchor 0: expected" in result.summary or ": loss: expected" in result.summary
    refused = check_loss(f"{FILE}:refuses_bfloat16", "supcon", cases=("usage/bfloat16",)).summary
    assert refused.startswith("could not run: every selected usage is skipped: refused: ")


def leaking(first: torch.Tensor, second: torch.Tensor, temperature: float | torch.Tensor = 0.5) -> torch.Tensor:
    """NT-Xent in which each denominator also contains exp(0), which is negligible at low temperatures in float32."""
    rows = torch.nn.functional.normalize(torch.cat([first, second]), dim=1)
    logits = (rows @ rows.T / temperature) * (1 - torch.eye(len(rows), dtype=rows.dtype))
    return torch.nn.functional.cross_entropy(logits, torch.arange(len(rows)).roll(len(first)))


@pytest.mark.slow
def test_temperature_tensor_is_not_judged_if_the_loss_is_wrong_at_this_temperature() -> None:
    result = check_loss(
        leaking, "nt_xent", dtypes=("float32",), cases=("golden/nt_xent/*", "usage/temperature-tensor"), fuzz=0
    )
    (usage,) = (check for check in result.checks if check.case == "usage/temperature-tensor")
    assert usage.status is Status.SKIPPED
    assert usage.message.startswith("the loss is already wrong with the temperature as a number")


def test_one_usage_is_repeated_by_its_name() -> None:
    (check,) = of("wrong_in_bfloat16", "usage/bfloat16").failures
    assert check.dtype == "bfloat16"
    assert check.level is Level.POLICIES
    assert (
        check.repeat == f"pairproof check {FILE}:wrong_in_bfloat16 --loss supcon --case usage/bfloat16 --dtype bfloat16"
    )
    (again,) = check_loss(
        f"{FILE}:wrong_in_bfloat16", "supcon", cases=("usage/bfloat16",), dtypes=("bfloat16",)
    ).failures
    assert again.message == check.message


def test_verdict_of_one_usage_is_that_of_its_check() -> None:
    assert of("wrong_in_bfloat16", "usage/bfloat16").verdict == "does not conform"
    assert of("supcon", "usage/bfloat16").verdict == "conforms"
    # A finding above the required level does not affect the verdict.
    assert of("supcon", "usage/zero-row").verdict == "conforms"
    lines = suggested(check_loss(f"{FILE}:supcon", "supcon", cases=("usage/zero-row",), level="range"))
    assert lines[:3] == ["[[tool.pairproof.deviations]]", 'loss = "supcon"', 'case = [\n    "usage/zero-row"\n]']


def test_a_zero_row_with_a_finite_loss_is_a_finding_about_range() -> None:
    (check,) = of("supcon", "usage/zero-row").failures
    assert check.level is Level.RANGE
    assert "a row of zeros: the loss is" in check.message


def test_column_of_labels_with_another_loss_is_a_finding_about_range() -> None:
    (check,) = of("supcon", "usage/labels-column").failures
    assert check.level is Level.RANGE
    assert "labels of shape [N, 1]: loss: expected" in check.message
    # An error about the shape is an answer too.
    (check,) = check_loss(fast.supcon_loss, "supcon", cases=("usage/labels-column",)).checks
    assert check.status is Status.PASSED


def test_squares_that_overflow_in_float16_are_a_finding_about_range() -> None:
    (check,) = of("squares_in_float16", "usage/float16-long-rows").failures
    assert check.level is Level.RANGE
    assert of("supcon", "usage/float16-long-rows").failures == []


def test_names_are_unique() -> None:
    names = [usage.name for usage in USAGES]
    assert len({*names}) == len(names)
    assert all(words.split()[0] in ("changes", "sets", "returns") for words in SIDE_EFFECTS.values())


@pytest.mark.parametrize(
    ("name", "keywords"),
    [
        ("golden/supcon/two-positives", {}),
        ("golden/supcon/two-positives", {"base_temperature": 0.07, "reduction": "none"}),
        ("golden/supcon/two-positives", {"denominator": "only_negatives", "reduction": "sum"}),
        ("golden/info_nce/two-towers", {}),
    ],
)
def test_gradient_of_the_temperature_equals_a_difference_of_values(name: str, keywords: dict[str, object]) -> None:
    (stored,) = (case for case in _every_case() if case.id == name)
    case = replace(stored, keywords={**stored.keywords, **keywords})
    step = 1e-4 * case.temperature

    def total(temperature: float) -> float:
        return math.fsum(truth(replace(case, keywords={**case.keywords, "temperature": temperature})).values)

    # Richardson's extrapolation of two central differences.
    near, far = ((total(case.temperature + h) - total(case.temperature - h)) / (2 * h) for h in (step, 2 * step))
    assert truth(case).temperature_gradient == pytest.approx((4 * near - far) / 3, rel=1e-9)


def test_truth_with_upstream_gradients_is_their_combination() -> None:
    (stored,) = (case for case in _every_case() if case.id == "golden/supcon/two-positives")
    case = replace(stored, keywords={**stored.keywords, "reduction": "none"})
    count = len(case.counted())
    each = [truth(case, upstream=[float(i == k) for i in range(count)]) for k in range(count)]
    upstream = [0.5, -0.25, *[0.0] * (count - 2)]
    combined = truth(case, upstream=upstream)
    for part in ("gradient", "weights"):
        expected = sum(w * getattr(one, part) for w, one in zip(upstream, each, strict=True))
        np.testing.assert_allclose(getattr(combined, part), expected, atol=1e-15)


def test_target_is_released_after_its_check() -> None:
    def loss(embeddings: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
        return fast.supcon_loss(embeddings, labels, temperature=temperature)

    gc.freeze()  # collecting what earlier tests keep takes seconds
    kept = weakref.ref(loss)
    assert check_loss(loss, "supcon", cases=("usage/bfloat16",)).verdict == "conforms"
    del loss
    gc.collect()
    assert kept() is None


def test_usages_of_one_target_are_repeated_by_their_own_requests() -> None:
    calls = []

    def offered() -> Iterator[Case]:
        calls.append(1)
        yield from checking.load_cases([], ("supcon",))

    request = Request(f"{FILE}:supcon", "supcon", dtypes=("float32",))
    stored = checking.load_cases([], ("supcon",))
    with closing(checking.load_target(request, ())) as target:
        judge = UsageJudge(target, request.dtypes, offered(), lambda one: as_claimed(one, stored[one], target.claim))
        found = [judge.checks(replace(request, cases=("usage/no-grad",), limit=limit)) for limit in (30.0, 40.0)]
        checks = [check for each in found for check in each]
    assert len(calls) == 1
    assert ["--limit 30" in check.repeat for check in checks] == [True, False]
    assert ["--limit 40" in check.repeat for check in checks] == [False, True]


@pytest.mark.parametrize(("added", "status"), [(0.0, Status.PASSED), (1e-3, Status.FAILED)])
def test_temperature_without_effect_is_judged_where_its_bound_is_zero(
    monkeypatch: pytest.MonkeyPatch, added: float, status: Status
) -> None:
    """All logits are 0, so the derivative with respect to the temperature is exactly 0."""
    monkeypatch.setattr(judging, "ordinary", lambda case, claim: case.id == "golden/supcon/orthogonal-dot")
    monkeypatch.setattr(judging, "DRAWN", {})
    monkeypatch.setattr(judging, "scalar_bounds", lambda *_: (0.0, 0.0))

    def loss(embeddings: torch.Tensor, labels: torch.Tensor, temperature: float | torch.Tensor = 0.1) -> torch.Tensor:
        found = fast.supcon_loss(embeddings, labels, temperature=temperature, similarity="dot")
        if isinstance(temperature, torch.Tensor):
            found = found + added * (temperature - temperature.detach())
        return found

    cases = ("usage/temperature-tensor", "golden/supcon/orthogonal-dot")
    result = check_loss(loss, "supcon", settings={"similarity": "dot"}, cases=cases, dtypes=("float64",))
    (check,) = (one for one in result.checks if one.case == "usage/temperature-tensor")
    assert check.status is status, check.message


@pytest.mark.parametrize("kind", judging.DRAWN)
@pytest.mark.parametrize("loss", ["supcon", "nt_bxent", "info_nce"])
def test_drawn_batches_are_as_they_should_be(kind: str, loss: str) -> None:
    with closing(checking.load_target(Request(f"pairproof.fast:{loss}_loss", loss), ())) as target:
        case = judging.drawn_batch(target.claim, kind)
    if (kind != "training-size" and loss == "info_nce") or (kind, loss) == ("large-labels", "nt_bxent"):
        assert case is None
        return
    assert case is not None
    if kind == "large-labels":
        labels = torch.tensor(case.arguments["labels"])
        assert all(len(labels.to(dtype).unique()) < len(labels.unique()) for dtype in (torch.float32, torch.bfloat16))
        return
    positives = [len(case.positives()[i]) for i in case.anchors()]
    if kind == "training-size":
        assert min(case.n, case.embeddings.shape[1]) > 32
        assert min(positives) > 0
    else:
        assert min(positives) == 0 < max(positives)


def test_second_derivatives_equal_a_difference_of_gradients() -> None:
    (case,) = (case for case in _every_case() if case.id == "golden/supcon/two-positives")
    found = judging.second_derivatives(case)
    assert found is not None
    direction, step = judging.direction_of(case.embeddings.shape).numpy(), 1e-5
    ends = [truth(replace(case, embeddings=case.embeddings + h * direction)).gradient for h in (step, -step)]
    np.testing.assert_allclose(found["embeddings"], (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_slow_usage_is_judged_only_if_it_is_selected() -> None:
    (check,) = (one for one in of("supcon", "usage/compiled").checks if one.case == "usage/compiled")
    assert check.status is Status.PASSED
    request = Request(f"{FILE}:supcon", "supcon")
    with closing(checking.load_target(request, ())) as target:
        judge = UsageJudge(target, (), [], lambda one: (one, None))
        (usage,) = (one for one in USAGES if one.name == "compiled")
        skipped = judge.check(request, usage)
    assert skipped is not None
    assert skipped.message == "takes seconds: --thorough, or --case usage/compiled"


def test_usage_of_shared_memory_includes_the_hard_negatives() -> None:
    shared: list[bool] = []

    def loss(
        embeddings_a: torch.Tensor,
        embeddings_b: torch.Tensor,
        hard_negatives: torch.Tensor | None = None,
        temperature: float = 0.05,
    ) -> torch.Tensor:
        if hard_negatives is not None:
            every = (embeddings_a, embeddings_b, hard_negatives)
            shared.append(len({rows.untyped_storage().data_ptr() for rows in every}) == 1)
        return fast.multiple_negatives_ranking_loss(
            embeddings_a, embeddings_b, hard_negatives=hard_negatives, temperature=temperature
        )

    assert check_loss(loss, "multiple_negatives_ranking", cases=("usage/shared-memory",)).verdict == "conforms"
    assert any(shared)


def test_usage_that_raises_can_be_declared(tmp_path: Path) -> None:
    error: list[Exception] = [IndexError("out of range")]

    def loss(embeddings: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
        if labels.dtype == torch.int32:
            raise error[0]
        return fast.supcon_loss(embeddings, labels, temperature=temperature)

    declared = tmp_path / "known.toml"
    usage = "usage/labels-int32"
    declared.write_text(f'[[deviations]]\ncase = "{usage}"\nreason = "no int32"\nlink = "https://example.org/1"\n')
    (check,) = check_loss(loss, "supcon", cases=(usage,)).failures
    assert check.status is Status.ERRORED
    result = check_loss(loss, "supcon", cases=(usage,), deviations=declared)
    assert result.verdict == "conforms"
    (check,) = (one for one in result.judged if one.case == usage)
    assert check.status is Status.DEVIATES
    assert "out of range" in check.message
    assert "no int32" in check.message
    # A usage that the loss refuses stays skipped.
    error[0] = TypeError("labels: int32 is not supported")
    result = check_loss(loss, "supcon", cases=(usage,), deviations=declared)
    (check,) = (one for one in result.checks if one.case == usage)
    assert check.status is Status.SKIPPED
    assert check.declared


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
@pytest.mark.slow
@pytest.mark.parametrize(
    "found",
    [
        pytest.param(
            "HANGS_AFTER = float('inf')  # because all its threads sleep",
            marks=pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the threads are listed in /proc"),
        ),
        "ASLEEP, usages.HANGS_AFTER = float('inf'), 2.0  # after a time",
    ],
)
def test_process_forked_from_one_with_threads_is_not_given_threads(found: str) -> None:
    """GNU OpenMP would hang. The answer of the first process must not hold for the second."""
    code = f"""
import os, sys
import torch
from pairproof.conformance.implementations import usages
assert usages._can_use_threads(os.getpid())
torch.set_num_threads(2)
torch.ones(1 << 17).exp()
usages.{found}
child = os.fork()
if not child:
    try:
        with usages._threads("cpu"):
            torch.ones(1 << 17).exp()
    except usages.NotJudged:
        pass
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=600, check=False).returncode == 0
