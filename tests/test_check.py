"""``pairproof check``: verdicts, exit codes, printed output and report files."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import sys
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from pairproof import conformance, fast
from pairproof.conformance import cli, report
from pairproof.conformance.diagnose import explain
from pairproof.conformance.documents.load import load_worked
from pairproof.conformance.judge import check as checking
from pairproof.conformance.judge import verify as run
from pairproof.conformance.judge.check import CheckResult, check_loss
from pairproof.conformance.judge.options import CouldNotRun, Request, UsageError, read_settings
from pairproof.conformance.judge.results import Check, Status
from pairproof.conformance.judge.usages import NONE_PASSES
from pairproof.conformance.suite.cases import Case
from pairproof.conformance.suite.golden import GoldenCase
from pairproof.conformance.suite.levels import Level

FOLDER = Path(__file__).parent / "targets"
LOSSES = FOLDER / "losses.py"
SOME = "golden/supcon/temperature-1*"
NO_POSITIVES = "golden/supcon/lonely*"
REFERENCES = "golden/supcon/refs-shape-*"

pytestmark = pytest.mark.usefixtures("in_this_process")


@pytest.fixture(autouse=True)
def loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the cases once for all tests."""
    monkeypatch.setattr(checking, "load_cases", lambda fixtures, losses=(): _cases(losses))
    monkeypatch.setattr(checking, "load_worked", list)


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the terminal so wide that no text is wrapped."""
    monkeypatch.setenv("COLUMNS", "1000")


@cache
def _cases(losses: tuple[str, ...] = ()) -> dict[Case, GoldenCase | None]:
    return {case: golden for case, golden in _every_case().items() if not losses or case.loss in losses}


@cache
def _every_case() -> dict[Case, GoldenCase | None]:
    return run.load_cases(load_worked())


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    return int(caught.value.code or 0)


def of(name: str, *cases: str, loss: str = "supcon", **options: object) -> CheckResult:
    return check_loss(f"{LOSSES}:{name}", loss, cases=cases, **options)  # type: ignore[arg-type]


def command(mode: str, case: str = SOME, **options: object) -> CheckResult:
    line = f"{sys.executable} {FOLDER / 'command.py'} {mode}"
    return check_loss(line, "supcon", call="command", cases=(case,), **options)  # type: ignore[arg-type]


@pytest.mark.usefixtures("own_process")
def test_check_loss_returns_results_as_data() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        result = conformance.check_loss(fast.supcon_loss, "supcon", cases=SOME)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert (result.verdict, result.exit_code) == ("conforms", 0)
    assert result.counts == {Status.PASSED: len(result.checks)}
    assert result.claim.loss == "supcon"
    assert result.summary.startswith("conforms at level policies: pairproof.fast.supcon:supcon_loss as supcon: ")
    assert list(inspect.signature(conformance.check_loss).parameters)[:2] == ["target", "loss"]
    with pytest.raises(UsageError, match="unknown loss"):
        conformance.check_loss(fast.supcon_loss, "supkon")
    with pytest.raises(AttributeError, match="no attribute 'check_los'"):
        conformance.check_los  # noqa: B018 - reading it is the test


@pytest.mark.parametrize("chosen", [["--case", "golden/supcon/[a-l]*"], pytest.param([], marks=pytest.mark.slow)])
def test_right_loss_conforms(chosen: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert call("check", f"{LOSSES}:supcon", "--loss", "supcon", *chosen) == 0
    text = capsys.readouterr().out
    assert f"{LOSSES}:supcon as supcon_loss" in text
    assert "call: labels, guessed from the parameters (embeddings, labels, temperature); override with --call" in text
    assert "arrays: torch, the first kind that raises no error; override with --arrays" in text
    assert "rows: not normalised before the call" in text
    assert "skipped: needs similarity=dot" in text
    assert "other reasons: --all shows them" in text
    assert f"conforms at level policies: {LOSSES}:supcon as supcon: " in text
    assert "Checks by flag" not in text
    assert "\nfailed " not in text


@pytest.mark.parametrize("cases", ["refs-shape-*", pytest.param("*ref*", marks=pytest.mark.slow)])
def test_fast_loss_is_judged_on_every_case(cases: str) -> None:
    checked = check_loss("pairproof.fast:supcon_loss", "supcon", cases=(f"golden/supcon/{cases}", SOME))
    assert checked.verdict == "conforms"
    assert not checked.left_out
    assert checked.report.cases_chosen == checked.cases
    statuses = {one.status for one in checked.report.checks}
    assert statuses <= {Status.PASSED, Status.SKIPPED}


@cache
def _right_verdict(*cases: str) -> str:
    return of("supcon", *cases).verdict


@pytest.mark.parametrize("name", ["without_other_positives", "mean_over_pairs", "drops", "detached", "dot", "breaks"])
@pytest.mark.quick(1)
def test_wrong_loss_does_not_conform(name: str) -> None:
    checked = of(name, NO_POSITIVES, "supcon_notebook/*", "golden/supcon/unbalanced-classes")
    assert checked.verdict == "does not conform"
    assert checked.exit_code == 1
    assert checked.failures
    assert checked.advice == [] or name in ("drops", "dot")
    assert _right_verdict(NO_POSITIVES, "supcon_notebook/*", "golden/supcon/unbalanced-classes") == "conforms"


def test_failure_is_printed_with_its_term_and_a_command_to_repeat_it(capsys: pytest.CaptureFixture[str]) -> None:
    case = "supcon_notebook/supcon-3x3"
    arguments = ["check", f"{LOSSES}:without_other_positives", "--loss", "supcon", "--raw", "--limit", "30"]
    assert call(*arguments, "--case", case) == 1
    text = capsys.readouterr().out
    assert f"failed {case} float64, float32: 9 rows of 5 numbers\n    loss: expected 2.19" in text
    reason = "the denominator lacks the other positives"
    assert f"\n    {reason}\n" in text
    share = "(if intended: --set denominator=one_positive): explains 1 of 1 failing case, none left"
    assert f"{reason} {share}\n" in text
    assert f"as supcon: {reason} (1 of 1 failing case); 2 checks failed in " in text.splitlines()[-1]
    assert "2 checks failed" in text
    (repeat,) = (line.partition("repeat: ")[2] for line in text.splitlines() if "repeat: " in line)
    words = shlex.split(repeat)
    assert words == ["pairproof", *arguments, "--case", case, "--dtype", "float64"]
    assert call(*words[1:]) == 1
    assert "1 check failed" in capsys.readouterr().out


def test_repeat_command_contains_all_options() -> None:
    request = Request(
        "./run it",
        "supcon",
        call="command",
        temperature=0.1,
        normalised=True,
        settings={"no_positive": ("drop", "nan"), "reduction": "*"},
        device="cuda",
        limit=5.0,
    )
    assert request.repeat("golden/a", "float32") == (
        "pairproof check './run it' --loss supcon --temperature 0.1 --set no_positive=drop --set no_positive=nan"
        " --set 'reduction=*' --normalised --call command --device cuda --limit 5 --case golden/a --dtype float32"
    )


def test_first_failures_are_shown_and_option_all_shows_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["check", f"{LOSSES}:dot", "--loss", "supcon", "--case", "golden/supcon/temperature*"]
    assert call(*arguments) == 1
    short = capsys.readouterr().out
    assert short.count(", none left") == short.count("repeat: ") == 1  # one reason explains all
    assert re.search(r"and \d+ more cases( and \d+ more usages?)?: --all shows them", " ".join(short.split()))
    assert "Checks by flag" not in short
    assert call(*arguments, "--all") == 1
    text = capsys.readouterr().out
    assert text.count("repeat: ") > 3
    assert "more cases" not in text
    assert "Checks by flag" in text


@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [("ab", "", "acd"), ("ab", "de", "acd"), ("abc", "de", "ad"), ("abcde", "", "a"), ("", "", "abc")],
)
def test_an_example_of_each_reason_and_one_without_a_reason_are_shown(
    first: str, second: str, shown: str, without_reasons: None, capsys: pytest.CaptureFixture[str]
) -> None:
    result = of("supcon", "golden/supcon/two-positives", fuzz=0)
    result.report.checks = [
        Check("case", "target", "supcon", name, "float64", Status.FAILED, level=Level.FORMULA) for name in "abcde"
    ]
    result.diagnosis = explain.Diagnosis([explain.Reason("first", (*first,)), explain.Reason("second", (*second,))], 5)
    report.show(result, cli.Output(), seconds=1.0)
    text = capsys.readouterr().out
    assert re.findall(r"failed (.) float64", text) == [*shown]
    rest = 5 - len(shown)
    assert f"and {rest} more case{'s' * (rest > 1)}: --all shows them" in text


def test_the_commonest_reasons_for_skipped_cases_are_shown_and_option_all_shows_the_rest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["check", f"{LOSSES}:supcon", "--loss", "supcon", "--case", "golden/supcon/[a-l]*"]
    assert call(*arguments) == 0
    short = capsys.readouterr().out
    assert call(*arguments, "--all") == 0
    text = capsys.readouterr().out
    every = re.findall(r"^  (\d+) (skipped: .*)$", text, re.MULTILINE)
    assert len(every) > 5
    shown = re.findall(r"^  (\d+) (skipped: .*)$", short, re.MULTILINE)
    assert shown == every[:3]
    rest = sum(int(count) for count, _ in every[3:])
    assert f"  {rest} skipped for {len(every) - 3} other reasons: --all shows them" in short


def test_failure_is_kept_if_its_explanation_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    case = "supcon_notebook/supcon-3x3"

    def broken(*given: object) -> None:
        raise KeyError("lost")

    monkeypatch.setattr(explain, "plain_outcome", broken)
    monkeypatch.setattr(explain.suspects, "suspects", broken)
    monkeypatch.setattr(checking, "_searched", lambda *given, **known: None)
    checked = of("without_other_positives", case)
    assert checked.diagnoses == {}
    assert checked.diagnosis.sentences() == ["no known mistake explains any of 1 failing case"]
    assert checked.verdict == "does not conform"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            "tiny-norms-float64",
            "6 rows, including row 0, are not normalised: the norm 1.1e-271 is clamped, or its square",
        ),
        (
            "huge-norms-float64",
            "6 rows, including row 0, are not normalised: the square of the norm 8.1e+270 overflows",
        ),
        ("near-largest-float64", "4 rows, including row 0, are not normalised: the norm overflows"),
    ],
)
def test_norms_that_normalize_does_not_handle_are_explained(case: str, words: str) -> None:
    def clamps(embeddings: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
        rows = torch.nn.functional.normalize(embeddings, dim=1)
        return fast.supcon_loss(rows, labels, temperature=temperature, similarity="dot")

    (explanation,) = conformance.check_loss(
        clamps, "supcon", cases=f"golden/supcon/{case}", level="range"
    ).diagnoses.values()
    assert explanation.startswith(words)


def test_skipped_cases_are_counted_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    checked = of("drops", NO_POSITIVES, settings={"no_positive": "drop"})
    assert checked.verdict == "conforms"
    assert checked.report.cases_chosen + checked.left_out.total() == checked.cases
    assert not any("no_positive" in reason for reason in checked.left_out)
    ((reason, count),) = checked.left_out.most_common(1)
    assert {one.case for one in checked.judged}
    assert of("drops", NO_POSITIVES).verdict == "does not conform"
    arguments = ["check", f"{LOSSES}:drops", "--loss", "supcon", "--case", NO_POSITIVES, "--set", "no_positive=drop"]
    assert call(*arguments) == 0
    text = capsys.readouterr().out
    assert f"{checked.report.cases_chosen} of {checked.cases} supcon cases apply to this target" in text
    assert f"{count} skipped: {reason}" in text


def test_several_values_of_one_option_can_be_claimed() -> None:
    assert read_settings(["reduction=mean", "reduction=sum", "reduction=none", "no_positive=drop"]) == {
        "reduction": ("mean", "sum", "none"),
        "no_positive": "drop",
    }
    checked = of("Module", "golden/supcon/*sum*", "golden/supcon/*none*", settings={"reduction": ("sum", "mean")})
    assert not any("reduction" in reason for reason in checked.left_out)
    assert checked.verdict == "conforms"


@pytest.mark.parametrize(
    "chosen",
    [
        ["--case", "golden/supcon/shape-6*", "--case", "golden/supcon/large-*"],
        pytest.param(["--all"], marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_built_in_temperature_is_an_option(chosen: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["check", f"{LOSSES}:built_in", "--loss", "supcon"]
    assert call(*arguments) == 2
    error = capsys.readouterr().err
    assert "no argument temperature (or tau, or logit_scale): pass the temperature that is built in with" in error
    assert call(*arguments, "--temperature", "0.5", *chosen) == 0
    text = capsys.readouterr().out
    assert "temperature: 0.5 built in; the cases are proved again with it, except slow ones (--thorough)" in text
    assert "skipped: needs a temperature other than 0.5" in text
    assert call(*arguments, "--temperature", "0.3", "--case", "golden/supcon/two-*") == 1


@pytest.mark.usefixtures("verdict_only")
@pytest.mark.parametrize(
    "chosen",
    ["golden/supcon/*shape-[1-35][13-7]*-by-[2-57-9]*", pytest.param("golden/supcon/*shape-*", marks=pytest.mark.slow)],
)
def test_loss_is_judged_at_a_temperature_that_no_case_has(chosen: str) -> None:
    right = of("at_0_033", chosen, temperature=0.033)
    assert right.verdict == "conforms"
    small = {c.id for c in _cases(("supcon",)) if fnmatchcase(c.id, chosen) and c.size < 300 and not c.others}
    assert {one.case for one in right.judged} == small
    wrong = of("at_0_033_without_the_last_row", chosen, temperature=0.033)
    odd = {case.id for case in _cases(("supcon",)) if case.id in small and case.n % 2}
    assert {one.case for one in wrong.failures} == odd


@pytest.mark.usefixtures("verdict_only")
@pytest.mark.parametrize("name", ["ignores_upstream", "sign_of_upstream"])
def test_backward_pass_must_use_its_upstream_gradient(name: str) -> None:
    wrong = of(name, SOME)
    assert wrong.verdict == "does not conform"
    assert all("gradient" in one.message for one in wrong.failures)


@pytest.mark.usefixtures("verdict_only")
def test_claimed_options_replace_those_of_the_cases() -> None:
    both = {case.id for case in _cases(("info_nce",)) if case.option("direction") == "both"}
    options = {"loss": "info_nce", "temperature": 0.37, "settings": {"direction": "a_to_b"}}
    right = of("one_way_at_0_37", "golden/info_nce/shape-[27]*-by-[45]", **options)
    assert right.verdict == "conforms"
    assert both & {one.case for one in right.judged}
    assert of("other_way_at_0_37", "golden/info_nce/shape-[27]*-by-[45]", **options).verdict == "does not conform"
    nan = of("supcon", NO_POSITIVES, settings={"no_positive": "nan"})
    assert nan.failures
    assert all("expected nan" in one.message for one in nan.failures)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--loss", "supkon"], "unknown loss 'supkon'"),
        (["--loss", "supcon", "--call", "rows"], "unknown call 'rows'"),
        (["--loss", "supcon", "--arrays", "lists"], "unknown kind of arrays 'lists'"),
        (["--loss", "supcon", "--dtype", "float8"], "unknown dtype 'float8'"),
        (["--loss", "supcon", "--set", "no_positive=maybe"], "no_positive: expected one of zero, drop, nan"),
        (["--loss", "supcon", "--case", "nothing/like-it"], "no case of supcon matches nothing/like-it"),
        (["--loss", "supcon", "--limit", "0"], "--limit: expected a positive number of seconds"),
        (["--loss", "supcon", "--temperature", "-1"], "--temperature: expected a positive number"),
        (["--loss", "info_nce"], "info_nce cannot be computed by a target that is called with labels"),
        (
            ["--loss", "supcon", "--normalised", "--dtype", "float16"],
            "rows of norm 1 are not exactly representable in float16",
        ),
        (["--loss", "supcon", "--arrays", "numpy", "--dtype", "bfloat16"], "numpy has no bfloat16"),
    ],
)
def test_misuse_exits_2(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("check", f"{LOSSES}:supcon", *words) == 2
    assert error in capsys.readouterr().err


def test_misuse_of_the_command_line_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("check", f"{LOSSES}:supcon") == 2
    assert call("check", f"{LOSSES}:supcon", "--loss", "supcon", "--set", "reduction") == 2
    assert call("check", f"{LOSSES}:unclear", "--loss", "supcon") == 2
    assert "cannot guess from the parameters (a_thing, something_else, more, temperature) how to call the target" in (
        capsys.readouterr().err
    )


def test_target_that_cannot_run_exits_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("check", "nowhere.py:supcon", "--loss", "supcon") == 3
    assert "could not run: there is no file nowhere.py" in capsys.readouterr().err
    assert call("check", f"{LOSSES}:supkon", "--loss", "supcon") == 3
    assert call("check", f"{LOSSES}:supcon", "--loss", "supcon", "--device", "cuda:77") == 3
    capsys.readouterr()
    # Nothing to judge: the loss takes no references.
    assert call("check", f"{LOSSES}:supcon", "--loss", "supcon", "--case", REFERENCES) == 3
    text = capsys.readouterr().out
    number = sum(case.loss == "supcon" and fnmatchcase(case.id, REFERENCES) for case in _cases())
    assert f"could not run: none of the {number} supcon cases applies to this target" in text
    assert f"{number} skipped: has no parameter ref_embeddings" in text
    # Every check is an error.
    assert call("check", f"{LOSSES}:returns_text", "--loss", "supcon", "--case", SOME) == 3
    text = capsys.readouterr().out
    assert "could not run: each of 6 checks ended in an error: returned a str where a tensor is expected" in text
    with pytest.raises(CouldNotRun):
        check_loss("nowhere:f", "supcon")
    with pytest.raises(UsageError):
        check_loss("nowhere", "supcon")


def test_exception_is_an_error_of_its_case() -> None:
    checked = of("breaks", "supcon_notebook/supcon-3x3", SOME)
    assert checked.verdict == "does not conform"
    errored = [one for one in checked.failures if one.status is Status.ERRORED]
    assert errored
    assert {one.message for one in errored} == {"RuntimeError: the batch size must be even"}
    assert ": an error: RuntimeError: the batch size must be even; " in checked.summary
    assert all(one.repeat for one in errored)
    assert any(one.status is Status.PASSED for one in checked.judged)


@pytest.mark.usefixtures("own_process")
def test_target_that_hangs_is_an_error() -> None:
    checked = of("hangs", "golden/supcon/temperature-1", limit=0.2)
    assert checked.exit_code == 3
    assert {one.message for one in checked.failures} == {"took longer than 0.2 s (--limit)"}
    with pytest.raises(CouldNotRun, match=r"it fails: tried to exit the process: SystemExit\(5\)"):
        of("leaves", "golden/supcon/temperature-1")


def test_right_command_conforms(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{sys.executable} {FOLDER / 'command.py'} right"
    assert call("check", line, "--call", "command", "--loss", "supcon", "--case", SOME, "--set", "reduction=*") == 0
    text = capsys.readouterr().out
    assert "6 checks passed" in text
    assert "gradients were not checked" not in text


@pytest.mark.parametrize(
    ("mode", "verdict", "words"),
    [
        ("values", "conforms", ""),
        ("one", "does not conform", "loss: expected 1.98"),
        ("null", "does not conform", "got nan; the error is not a rounding error"),
        (
            "crash",
            "could not run",
            "the command ended without an answer (exit code 7); its last message: out of memory",
        ),
        ("no-json", "could not run", "the command's answer is not JSON"),
        ("wrong-id", "could not run", "the command answered id 2 to request 1"),
        ("text", "could not run", 'value: expected a number, got the text "NaN"'),
        ("short-gradient", "could not run", "gradients.embeddings: expected 8 rows of 4 numbers"),
        ("hang", "could not run", "the command did not answer within 0.3 s (--limit) and was killed"),
    ],
)
@pytest.mark.quick(3)
def test_command_gets_a_verdict(mode: str, verdict: str, words: str) -> None:
    checked = command(mode, limit=0.3 if mode == "hang" else 60.0)
    assert checked.verdict == verdict
    if verdict == "could not run":
        assert {one.status for one in checked.judged} == {Status.ERRORED}
        assert words in checked.summary
    else:
        assert "values only" in checked.summary
    if words:
        assert words in checked.failures[0].message


def moco(q: torch.Tensor, k: torch.Tensor, queue: torch.Tensor, temperature: float) -> torch.Tensor:
    """MoCo's loss. The queue is constant; its columns are its rows."""
    q, k, queue = (torch.nn.functional.normalize(x, dim=dim) for x, dim in ((q, 1), (k, 1), (queue.detach(), 0)))
    logits = torch.cat([(q * k).sum(dim=1, keepdim=True), q @ queue], dim=1) / temperature
    return torch.nn.functional.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))


def test_constant_queue_can_be_claimed() -> None:
    queue = "golden/info_nce/queue-tau-half"
    judged = partial(check_loss, loss="info_nce", cases=(queue,), fuzz=0)
    reason = judged(moco).diagnosis.reasons[0]
    assert (reason.words[-33:], reason.intended) == ("gradient flows into the negatives", "--frozen negatives")
    usages = ("usage/retained-graph", "usage/second-derivatives")
    found = judged(moco, frozen="negatives", cases=(queue, *usages))
    assert found.verdict == "conforms"
    untried = ["the gradient of negatives (--frozen)", "second-derivatives (not judged with --frozen)"]
    assert found.not_tried[-2:] == untried
    # pairproof swaps the towers for the second case, so that the keys would be the first tower.
    cases = (queue, "golden/info_nce/b-to-a-queue-mean")
    both = partial(judged, lambda q, k, queue, temperature: moco(q, k.detach(), queue, temperature), cases=cases)
    assert both().diagnosis.reasons[0].intended == "--frozen embeddings_b,negatives"
    found = both(frozen=("embeddings_b", "negatives"))
    assert (found.verdict, {one.case for one in found.judged}) == ("conforms", {queue})
    inverse = judged(lambda q, k, queue, temperature: moco(q, k, queue, 1 / temperature), frozen="negatives")
    assert inverse.diagnosis.reasons[0].words == "logits are multiplied by the temperature instead of divided"
    with pytest.raises(UsageError, match="--frozen queue: info_nce can freeze embeddings_b, negatives"):
        judged(moco, frozen=("queue",))


@pytest.mark.usefixtures("without_reasons")
def test_gradient_that_is_neither_right_nor_zero_is_not_claimed_to_be_constant() -> None:
    def scaled(q: torch.Tensor, k: torch.Tensor, queue: torch.Tensor, temperature: float) -> torch.Tensor:
        half = (queue + queue.detach()) / 2
        return fast.info_nce_loss(q, k, negatives=half.T, temperature=temperature, direction="a_to_b")

    found = check_loss(scaled, "info_nce", frozen="negatives", cases=("golden/info_nce/queue-tau-half",), fuzz=0)
    assert {check.message.partition(",")[0] for check in found.failures} == {"gradient of negatives"}


@pytest.mark.slow
def test_command_that_hangs_once_fails_one_check() -> None:
    checked = command("hang-once", "golden/supcon/temperature-1", limit=2.5)
    assert checked.verdict == "does not conform"
    assert [one.status for one in checked.judged] == [Status.PASSED, Status.ERRORED]


def test_numpy_target_is_reported_as_judged_by_values_only(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["check", f"{FOLDER / 'plain.py'}:supcon", "--loss", "supcon", "--case", SOME]
    assert call(*arguments) == 0
    text = capsys.readouterr().out
    assert "arrays: numpy, guessed from its annotations" in text
    assert "gradients were not checked: the target returns none" in text
    assert "as supcon, values only: 6 checks passed" in text
    nt_xent = ["check", f"{FOLDER / 'plain.py'}:nt_xent", "--loss", "nt_xent", "--case", "golden/nt_xent/temperature-1"]
    assert call(*nt_xent) == 0


def test_cases_that_a_dtype_cannot_represent_are_counted_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    checked = of("supcon", "golden/supcon/huge-norms-float64", "golden/supcon/temperature-1", dtypes=("float32",))
    assert checked.report.cases_chosen == 1
    assert checked.left_out == {"inputs are not exactly representable in float32": 1}
    arguments = ["check", f"{LOSSES}:supcon", "--loss", "supcon"]
    assert call(*arguments, "--case", "golden/supcon/huge-norms-float64", "--dtype", "float32") == 3
    text = capsys.readouterr().out
    assert "0 of 1 supcon cases apply to this target" in text
    assert "1 skipped: inputs are not exactly representable in float32" in text


def test_pattern_without_a_match_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = ("--case", "golden/supcon/temperature-1"), ("--case", "golden/supcon/temprature-0-01")
    assert call("check", f"{LOSSES}:supcon", "--loss", "supcon", *good, *bad) == 2
    assert "no case of supcon matches golden/supcon/temprature-0-01" in capsys.readouterr().err
    assert call("verify", "--impl", "reference", "--dtype", "float64", *good, *bad) == 2
    assert "no case matches golden/supcon/temprature-0-01" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--junit"])
def test_report_path_is_validated_before_the_run(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["check", f"{LOSSES}:supcon", "--loss", "supcon", "--case", "golden/supcon/temperature-1"]
    for path, words in ((".", "cannot write .: it is a folder"), ("none/report", "the folder none does not exist")):
        assert call(*arguments, option, path) == 2
        assert words in capsys.readouterr().err
    assert call(*arguments, option, "report") == 0
    assert Path("report").is_file()


def test_advice_names_the_options_that_make_a_loss_conform() -> None:
    (advice,) = of("dot", SOME).advice
    assert "--normalised" in advice
    assert "--set similarity=dot" in advice
    assert of("dot", SOME, normalised=True).verdict == "conforms"
    dropped = of("drops", NO_POSITIVES)
    assert dropped.advice == []
    assert dropped.diagnosis.reasons[0].setting == "no_positive=drop"
    (advice,) = of("per_anchor", SOME).advice
    assert advice == "it returns one value per anchor: pass --set reduction=none if that is intended"
    assert of("per_anchor", SOME, settings={"reduction": "none"}).verdict == "conforms"


def test_half_precision_is_judged_on_request() -> None:
    checked = check_loss("pairproof.fast:supcon_loss", "supcon", cases=(SOME,), dtypes=("bfloat16", "float16"))
    assert {one.dtype for one in checked.judged} <= {"bfloat16", "float16"}
    assert checked.verdict == "conforms"


def test_json_report_has_all_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    arguments = ["check", f"{LOSSES}:mean_over_pairs", "--loss", "supcon", "--json", str(path)]
    arguments += ["--case", "golden/supcon/unbalanced-classes", "--case", "*2x2", "--case", "golden/supcon/reduction*"]
    assert call(*arguments) == 1
    data = json.loads(path.read_text())
    assert data["format"] == "pairproof-check/2"
    assert data["passed"] is False
    assert data["verdict"] == "does not conform"
    assert data["target"] == f"{LOSSES}:mean_over_pairs"
    assert data["claim"] == {
        "loss": "supcon",
        "call": "labels",
        "arrays": "torch",
        "temperature": None,
        "normalised": False,
        "settings": {},
        "passed": [],
        "required": [],
        "unused": [],
        "default_temperature": 0.1,
        "unlabelled": False,
        "queue": "",
    }
    assert data["gradients_judged"] is True
    assert data["statuses"] == {
        status: sum(one["status"] == status for one in data["checks"]) for status in data["statuses"]
    }
    assert data["flags"]["unbalanced-classes"] == {"failed": 2}
    assert data["worst"]["float64"] > 1
    assert sum(data["left_out"].values()) + data["cases"]["run"] == data["cases"]["in all"]
    failed = [one for one in data["checks"] if one["status"] == "failed"]
    assert {one["case"] for one in failed} == {"golden/supcon/unbalanced-classes"}
    assert failed[0]["diagnosis"]
    assert {(one["level"], one["rounding"]) for one in data["checks"]} == {("formula", False)}
    assert data["level"] == "policies"
    assert data["limits"] == []
    assert data["levels"]["formula"] == {"verdict": "does not conform", "statuses": {"passed": 4, "failed": 2}}
    assert data["levels"]["digits"] == {"verdict": "does not conform", "statuses": {}}
    assert failed[0]["repeat"].endswith("--case golden/supcon/unbalanced-classes --dtype float64")


def test_junit_report_counts_the_checks(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    checked = of("breaks", "supcon_notebook/supcon-3x3", SOME, NO_POSITIVES)
    report.write_junit(checked, path)
    (suite,) = ElementTree.parse(path).getroot()
    assert suite.get("name") == "target"
    counts = {name: int(suite.get(name, "")) for name in ("tests", "failures", "errors", "skipped")}
    errored = sum(one.status is Status.ERRORED for one in checked.report.checks)
    skipped = sum(one.status is Status.SKIPPED for one in checked.report.checks)
    assert counts == {"tests": len(checked.report.checks), "failures": 0, "errors": errored, "skipped": skipped}
    (message,) = {error.get("message") for error in suite.iter("error")}
    assert message == "RuntimeError: the batch size must be even"
    checked = of("mean_over_pairs", "golden/supcon/unbalanced-classes")
    report.write_junit(checked, path)
    (suite,) = ElementTree.parse(path).getroot()
    failure = next(suite.iter("failure"))
    assert checked.diagnoses["golden/supcon/unbalanced-classes", "float64"] in (failure.text or "")
    assert "repeat: pairproof check" in (failure.text or "")
    nothing = of("supcon", REFERENCES)
    report.write_junit(nothing, path)
    suites = {suite.get("name"): suite for suite in ElementTree.parse(path).getroot()}
    assert nothing.summary == str(next(suites["counts"].iter("failure")).get("message"))


def test_reports_hold_every_character_of_a_message(tmp_path: Path) -> None:
    # The message has no line break, because only the first line of a message is reported.
    message = "".join(c for c in map(chr, range(32)) if c.splitlines() == [c])
    message += "\x7f \ud800 \ufffe \U0010ffff < & \" '"

    checked = of("supcon", SOME)
    checked.report.checks[:] = [replace(one, status=Status.ERRORED, message=message) for one in checked.checks]
    path = tmp_path / "report.xml"
    report.write_junit(checked, path)
    for error in ElementTree.parse(path).getroot().iter("error"):
        for text in (error.text, error.get("message")):
            assert r"\x00\x01\x02" in str(text)
            assert "\x7f \\ud800 \\ufffe \U0010ffff < & \" '" in str(text)
    assert list(ElementTree.parse(path).getroot().iter("error"))
    report.write_json(checked, path)
    assert message in json.loads(path.read_text())["checks"][0]["message"]


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("check", "--help") == 0
    text = capsys.readouterr().out
    assert "pairproof check mylib.losses:SupConLoss --loss supcon" in text
    text = text[text.index("─ Options ") :]
    order = ["Options", "--loss", "--level", "How the target is called", "--call", "What is judged", "--case"]
    places = [
        text.index(f"{one} ") for one in (*order, "--deviations", "What is printed and written", "--html", "--all")
    ]
    assert places == sorted(places)
    assert call("--help") == 0
    assert "check" in capsys.readouterr().out


@pytest.mark.slow
def test_declared_deviations_must_occur_and_match_a_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``drops`` excludes anchors without positives from the mean; it conforms if exactly this is declared."""
    path = tmp_path / "known.toml"
    entry = '[[deviations]]\n{}\nreason = "anchors without positives are not counted"\nlink = "https://example.org/7"\n'
    # Random batches, which the loss also fails, cannot be declared by their ids.
    arguments = [f"{LOSSES}:drops", "--loss", "supcon", "--fuzz", "0", "--deviations", str(path)]
    wrong = of("drops", loss="supcon", fuzz=0)
    failures = wrong.failures
    failed = sorted({one.case for one in failures})
    assert {one.partition("/")[0] for one in failed} == {"golden", "usage"}
    path.write_text(entry.format(f"case = {json.dumps(failed)}"))
    assert call("check", *arguments) == 0
    text = capsys.readouterr().out
    assert (
        "declared: known.toml, deviations 1: anchors without positives are not counted (https://example.org/7)" in text
    )
    assert f"{len(failures)} deviate" in text
    elsewhere = entry.format('case = "golden/nt_xent/one-positive-balanced"')
    elsewhere += entry.format('flag = "lonely-anchors"\ndtype = "float16"')
    path.write_text(entry.format(f"case = {json.dumps(failed)}") + elsewhere)
    assert call("check", *arguments) == 0
    unclaimed = entry.format('case = "golden/supcon/one-positive-balanced-dot"')
    path.write_text(entry.format(f"case = {json.dumps(failed)}") + elsewhere + unclaimed)
    capsys.readouterr()
    assert call("check", *arguments) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "matches no check" in line]
    assert len(lines) == 1
    assert lines[0].startswith("known.toml, deviations 4: matches no check of")
    passed = [one.case for one in wrong.judged if one.status is Status.PASSED and one.case not in failed]
    for kind in ("golden/", "usage/"):
        right = next(one for one in passed if one.startswith(kind))
        path.write_text(entry.format(f"case = {json.dumps([*failed, right])}"))
        assert call("check", *arguments, "--case", right) == 1
        text = capsys.readouterr().out
        assert "declared to deviate (known.toml, deviations 1) but conforms" in text
        assert "no reason was found" not in text
        assert f"--deviations {path}" in text
    # The usage is judged in float64.
    path.write_text(entry.format(f'case = "{right}"\ndtype = "float32"'))
    assert call("check", *arguments, "--case", right) == 0
    path.write_text("[[deviations]]")
    assert call("check", *arguments) == 2
    assert "known.toml, deviations 1: reason is missing" in capsys.readouterr().err


def test_declared_usage_is_not_called_unused_where_usages_could_not_be_judged(tmp_path: Path) -> None:
    path = tmp_path / "known.toml"
    entry = '[[deviations]]\ncase = "usage/learned-temperature"\nreason = "it does not learn"\nlink = "https://example.org/7"\n'
    path.write_text(entry)
    given: dict[str, object] = {"loss": "supcon", "fuzz": 0, "deviations": path}
    wrong, right = (check_loss(f"{LOSSES}:{name}", **given) for name in ("detached", "supcon"))
    assert any(why.startswith(NONE_PASSES) for why in wrong.inapplicable.values())
    assert wrong.unused == []
    assert len(right.unused) == 1  # it stores no temperature


def test_usages_that_need_torch_are_counted_for_other_arrays() -> None:
    found = check_loss(
        f"{FOLDER / 'losses.py'}:supcon", "supcon", cases=("golden/supcon/temperature-1", "usage/no-grad")
    )
    found.inapplicable = {f"usage/{name}": "not possible for arrays of numpy" for name in ("autocast", "upstream")}
    assert "autocast, upstream (not possible for arrays of numpy)" in found.not_tried
    found.request = replace(found.request, cases=())
    assert "2 usages (not possible for arrays of numpy: --case 'usage/*' lists them)" in found.not_tried


def test_errors_do_not_hide_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    def often_raises(embeddings: torch.Tensor, labels: torch.Tensor, temperature: float = 0.1) -> torch.Tensor:
        if len(embeddings) in (4, 5, 9):
            raise RuntimeError("these batches are refused")
        return 3.1 * fast.supcon_loss(embeddings, labels, temperature=temperature) ** 1.5

    found = check_loss(often_raises, "supcon", cases="golden/supcon/*", dtypes="float64")
    report.show(found, cli.Output(), seconds=1.0)
    shown = re.findall(r"^(failed|errored) golden", capsys.readouterr().out, re.MULTILINE)
    assert {*shown} == {"failed", "errored"}
