"""The command line: printed output, report files and exit codes."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

import pairproof
from pairproof.conformance import cli
from pairproof.conformance import report as reports
from pairproof.conformance.diagnose import identify as diagnosis
from pairproof.conformance.documents.load import load_worked
from pairproof.conformance.explain import find_case, find_golden
from pairproof.conformance.faults import FAULTS
from pairproof.conformance.implementations.forms import Form, wrapper
from pairproof.conformance.implementations.optax_ntxent import Optax
from pairproof.conformance.implementations.signatures import Signature
from pairproof.conformance.judge import check as checking
from pairproof.conformance.judge import parity, usages, verify
from pairproof.conformance.judge.options import (
    DETAILS,
    Batch,
    ParityRequest,
    Rebuild,
    Request,
    RunPrinting,
    Selection,
    TrainingBatch,
    UsageError,
    loss_named,
    options_of,
)
from pairproof.conformance.judge.results import Check, Status
from pairproof.conformance.judge.verify import Report, run
from pairproof.conformance.report import show
from pairproof.conformance.suite.catalogue import LOSSES
from pairproof.fast.engine import jit


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    return int(caught.value.code or 0)


def unwrapped(text: str) -> str:
    """Return printed text as one line, without the line breaks of wrapping."""
    return " ".join(text.replace(" \\\n", " ").split())


def test_help_lists_commands_and_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--help") == 0
    text = capsys.readouterr().out
    for command in ("verify", "list", "explain", "fixtures"):
        assert command in text
    assert call("verify", "--help") == 0
    text = capsys.readouterr().out
    assert "pairproof verify --loss supcon --impl pml" in text
    assert "artefact" in text


def test_verify_of_selected_cases_reports_only_these(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report, junit = tmp_path / "report.json", tmp_path / "report.xml"
    arguments = ["verify", "--case", "supcon_notebook/*", "--impl", "reference,fast"]
    assert call(*arguments, "--json", str(report), "--junit", str(junit)) == 0
    text = capsys.readouterr().out
    assert "everything holds" in text
    assert "counts not compared with the expected ones, because only a part ran" in text
    assert re.search(r"^supcon_notebook +31 +31 +0 +0 +14 +10 +2 +2$", text, re.MULTILINE)
    assert re.search(r"^fast +supcon 8, nt_xent 4, nt_xent_pairwise 8 +20$", text, re.MULTILINE)
    data = json.loads(report.read_text())
    assert data["passed"] is True
    assert data["format"] == "pairproof-report/1"
    assert {check["status"] for check in data["checks"]} == {"passed", "skipped"}
    assert data["counts"]["fast/supcon"]["passed"] == 8
    root = ElementTree.parse(junit).getroot()
    assert {suite.get("name") for suite in root} == {"figure", "claim", "reference", "fast"}
    assert sum(int(suite.get("tests", 0)) for suite in root) == len(data["checks"])


def test_verify_covering_runs_some_cases_and_reports_their_number(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    arguments = ["verify", "--case", "golden/nt_xent/*", "--impl", "reference", "--covering"]
    assert call(*arguments, "--json", str(report)) == 0
    text = capsys.readouterr().out
    data = json.loads(report.read_text())
    assert 5 < data["cases"]["run"] < 60
    counts = f"{data['cases']['run']} of {data['cases']['in all']}"
    assert f"{counts} cases ran, which cover all flags, options and kernels" in text
    assert len({check["case"] for check in data["checks"]}) == data["cases"]["run"]


def test_failure_exits_1_and_prints_the_command_that_repeats_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pairproof import fast

    right = fast.supcon_loss
    monkeypatch.setattr(fast, "supcon_loss", lambda *a, **k: -right(*a, **k))
    assert call("verify", "--case", "supcon_notebook/supcon-3x3", "--impl", "fast", "--dtype", "float64") == 1
    text = capsys.readouterr().out
    assert "NOT everything holds" in text
    assert "failed supcon_notebook/supcon-3x3 fast float64" in text
    assert "value of anchor 0: expected 1.80" in text
    assert "repeat: pairproof verify --case supcon_notebook/supcon-3x3 --impl fast --dtype float64" in unwrapped(text)


def test_misuse_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("verify", "--loss", "supkon") == 2
    assert "unknown loss 'supkon'; known: supcon" in capsys.readouterr().err
    assert call("verify", "--peer", "supcontrast") == 2
    assert call("explain", "nobody/knows") == 2
    assert call("explain", "supcon_notebook/supcon-2x2", "--anchor", "9") == 2
    assert "expected one of 0, 1, 2, 3" in capsys.readouterr().err


LISTS = [
    pytest.param(one, id=f"{table.__name__}-{one.flags[0]}")
    for table in (Selection, RunPrinting, Request, ParityRequest, Batch, TrainingBatch, Rebuild)
    for one in options_of(table).values()
    if one.read
]


@pytest.mark.parametrize("one", LISTS)
def test_options_with_several_values_have_one_style(one: Any) -> None:
    """A list is repeatable or comma-separated. KEY=VALUE is repeatable: a value may contain commas."""
    if "=" in one.metavar:
        assert "(repeatable)" in one.help
    else:
        assert [str(part) for part in one.value(["2,3", "4,"], "")] == ["2", "3", "4"]
        assert "repeatable or comma-separated" in one.help
        with pytest.raises(UsageError, match="got ''"):
            one.value([""], "")


def test_known_mistakes_are_listed_with_their_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("list", "faults") == 0
    text = unwrapped(capsys.readouterr().out)
    assert len(FAULTS) > 200
    assert not [fault.name for fault in FAULTS if f"{fault.name}: {fault.words}" not in text]
    assert call("list", "faults", "--loss", "sigmoid") == 0
    names = re.findall(r"^  (\w+)/", capsys.readouterr().out, re.MULTILINE)
    assert {*names} == {"sigmoid"}


def test_no_case_has_a_comma_in_its_id() -> None:
    worked = load_worked()
    ids = [case.id for case in verify.load_cases(worked)] + [*usages.names()]
    ids += [f"{one.document.id}/{it.id}" for one in worked for it in (*one.figures, *one.claims)]
    assert not [name for name in ids if "," in name]


def test_cases_are_selected_with_commas(capsys: pytest.CaptureFixture[str]) -> None:
    target = f"{Path(__file__).parent / 'targets/losses.py'}:supcon"
    both = "golden/supcon/temperature-1,usage/no-grad"
    assert call("check", target, "--loss", "supcon", "--case", both, "--dtype", "float64") == 0
    assert "2 checks passed" in unwrapped(capsys.readouterr().out)
    assert call("check", target, "--loss", "supcon", "--case", "") == 2
    assert "--case: expected a name" in capsys.readouterr().err


def test_unavailable_requirement_exits_3(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PAIRPROOF_PEERS", str(tmp_path))
    assert call("verify", "--require", "supcontrast") == 3
    assert "could not run: supcontrast is not available: no " in capsys.readouterr().err
    assert call("verify", "--device", "cuda:77") == 3


def test_explain_prints_the_whole_sum(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("explain", "supcon_notebook/supcon-3x3") == 0
    text = capsys.readouterr().out
    assert re.search(r" -\(\(log 0\.1407 \+ log 0\.1922\)/2 \+ .*\)/9 = 2\.1960 \(numbers are", unwrapped(text))
    assert "anchor 0: positives 3 6; negatives 1 2 4 5 7 8" in text
    assert call("explain", "supcon_notebook/out-27-loss", "--anchor", "0") == 0
    text = unwrapped(capsys.readouterr().out)
    assert "over rows 1 2 3 4 5 7 8" in text
    assert "anchor 1" not in text
    assert "= 2.0615" in text
    assert call("explain", "pair_notebook/in-103-loss-1.0") == 0
    assert "= 1.0727" in capsys.readouterr().out
    assert call("explain", "supcon/lonely-nan") == 0
    assert "-(log 0.0335 + log 0.0785 + nan + nan)/4 = nan" in capsys.readouterr().out


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_every_case_can_be_explained(step: int) -> None:
    from pairproof.conformance.documents.load import load_worked
    from pairproof.conformance.explain import explain
    from pairproof.conformance.judge.verify import load_cases

    explained = 0
    for case in [case for case in load_cases(load_worked()) if case.n <= 12][::step]:
        lines = list(explain(case))
        assert not any("inf" in line.split("=")[-1] for line in lines[-2:]), case.id
        explained += 1
    assert explained > 1000 / step


def test_list_prints_the_names_that_verify_accepts(capsys: pytest.CaptureFixture[str]) -> None:
    from pairproof.conformance.documents.load import load_worked
    from pairproof.conformance.judge.verify import load_cases

    number = sum(case.loss == "supcon" for case in load_cases(load_worked()))
    assert call("list") == 0
    text = capsys.readouterr().out
    for name in (
        "supcon_epsilon",
        "supcontrast-today",
        f"fast: pairproof.fast, torch, numba {jit.version()}" if jit.refusal() is None else f"torch; {jit.refusal()}",
        "fast-triton",
        "supcon_notebook: 31 figures, 14 claims",
        "batch_tutorial: 1 figure, ",
        f"supcon: supcon_loss(embeddings, labels), {number} cases",
    ):
        assert name in text
    assert len(text.splitlines()) <= 51
    for what, name in (
        ("losses", "  nt_xent: nt_xent_loss(embeddings, partners); "),
        ("implementations", "  fast: pairproof.fast, torch"),
        ("cases", "  supcon_notebook/supcon-3x3: supcon, 9 rows of 5 numbers"),
        ("figures", "  pair_notebook/in-103-loss-0.01: "),
        ("claims", "  supcon_notebook/"),
    ):
        assert call("list", what) == 0
        listed = capsys.readouterr().out.splitlines()
        assert listed[0] == what
        assert any(line.startswith(name) for line in listed)
    assert call("list", "--loss", "nt_bxent") == 0
    assert "supcon_notebook" not in capsys.readouterr().out


def test_explain_describes_rows_columns_and_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("explain", "golden/info_nce/queue-tau-half", "--anchor", "5") == 0
    text = unwrapped(capsys.readouterr().out)
    assert "info_nce_loss, 4 rows of 3 numbers in each of two towers, 5 negatives" in text
    assert "columns: 0 to 3 are the rows of the other tower; 4 to 8 are the negatives" in text
    assert "anchor 5 (row 1 of embeddings_b): positives 1; negatives 4 5 6 7 8" in text
    assert call("explain", "golden/supcon/refs-self-some", "--anchor", "0") == 0
    text = capsys.readouterr().out
    assert "supcon_loss, 4 rows of 3 numbers, 6 references" in text
    assert "  self_rows [3, -1, 0, -1]" in text
    assert "columns: the references" in text
    assert "anchor 0: positives 2 5; negatives 0 1 4" in text
    assert call("list", "--loss", "info_nce") == 0
    text = capsys.readouterr().out
    assert "info_nce: info_nce_loss(embeddings_a, embeddings_b); van den Oord" in unwrapped(text)
    assert (
        "golden/info_nce/one-negative: info_nce, 3 rows of 3 numbers in each of two towers, 1 negative golden/"
        in unwrapped(text)
    )


HEAVY = ("torch", "numpy", "scipy", "flint", "jsonschema", "jax", "pytorch_metric_learning")

COMMANDS = (
    *((), ("verify",), ("report",), ("check",), ("identify",), ("parity",), ("diagnose",), ("list",), ("new-loss",)),
    *(("explain",), ("pack",), ("fixtures",)),
    *(("fixtures", name) for name in ("rebuild", "check", "add", "show")),
)


LONGEST = 140
"""Maximum number of lines of a help text; what does not fit belongs in the documents."""


def test_help_of_every_command_imports_no_heavy_module_and_fits_80_columns() -> None:
    """All commands run in one process, so an import by one of them is found at the end."""
    program = f"""
import contextlib, io, sys
from pairproof.conformance import cli
for command in {COMMANDS!r}:
    for flag in ("-h", "--help"):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            cli.main([*command, flag])
        assert "Usage: " in out.getvalue(), command
        assert max(map(len, out.getvalue().splitlines())) <= 80, command
        assert len(out.getvalue().splitlines()) <= {LONGEST}, command
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=PLAIN, check=True)
    assert run.stdout == "[]\n"


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("check --loss dc", "dclw\n"),
        ("verify --loss supcon_", "supcon_in\nsupcon_epsilon\n"),
        ("check --level f", "formula\n"),
    ],
)
def test_shell_completes_values(
    words: str, offered: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMP_WORDS", f"pairproof {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
    monkeypatch.setenv("_PAIRPROOF_COMPLETE", "complete_bash")
    monkeypatch.setattr(sys, "argv", ["pairproof"])
    assert call() == 0
    assert capsys.readouterr().out == offered


@pytest.mark.parametrize(
    ("arguments", "words", "command"),
    [
        (["chek"], "No such command 'chek'. Did you mean 'check'?", "pairproof"),
        (["check"], "Missing argument 'target'.", "pairproof check"),
        (["verify", "--jobs", "some"], "Invalid value for '--jobs'", "pairproof verify"),
    ],
)
def test_wrong_command_line_is_a_plain_message(
    arguments: list[str], words: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"pairproof: {words}")
    assert printed.err.splitlines()[-1] == f"see: {command} --help"


def test_interrupted_check_says_what_was_judged(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C before the fourth case."""
    wrong = str(Path(__file__).parent / "targets/losses.py") + ":dot"
    judged: list[str] = []
    right = checking.judge_target

    def judge(request: Any, target: Any, case: Any, *more: Any) -> Any:
        if len(judged) == 3:
            raise KeyboardInterrupt
        judged.append(case.id)
        return right(request, target, case, *more)

    monkeypatch.setattr(checking, "judge_target", judge)
    assert call("check", wrong, "--loss", "supcon", "--case", "golden/supcon/[a-l]*") == 130
    message = capsys.readouterr().err
    assert message.startswith("pairproof: interrupted; at cases 3/"), message
    assert "; so far " in message
    assert f"failing: {judged[0]}" in message


@pytest.mark.parametrize(
    ("name", "module", "function", "step"),
    [
        ("identify", diagnosis, "identify", "comparing with every loss"),
        ("parity", parity, "compare_with_itself", "comparing"),
        ("report", verify, "run", "loading"),
    ],
)
def test_interrupted_command_names_its_step(
    name: str,
    module: Any,
    function: str,
    step: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*given: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, function, interrupt)
    assert call(name, *["losses.py:supcon"] * (name != "report")) == 130
    assert capsys.readouterr().err == f"pairproof: interrupted; at {step}\n"


def test_code_in_a_message_is_valid_where_a_terminal_wraps_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    signature = Signature(lambda features, some_target, *, temperature: None)
    code = wrapper("losses.py:my_contrastive_loss", signature, Form("labels"))
    cli._say("\n".join(["could not run: " + 9 * "word ", "", *(f"    {line}".rstrip() for line in code)]))
    first, second, blank, *lines = capsys.readouterr().err.splitlines()
    assert (first[:26], second[:6], blank) == ("pairproof: could not run: ", "  word", "")
    assert max(map(len, [first, second, *lines])) <= 60 < max(map(len, code))
    assert ast.dump(ast.parse(dedent("\n".join(lines)))) == ast.dump(ast.parse("\n".join(code)))


def test_wide_tables_are_lines_in_a_narrow_terminal() -> None:
    for width, expected in ((80, "dtype passed failed"), (40, "float64: passed 3, failed 1, worst")):
        output = io.StringIO()
        console = Console(file=output, width=width)
        rows = [("float64", "3", "1", "", "", "", "4.09e+13")]
        for part in reports._table("Checks", ("dtype", *Status, "worst"), rows):
            console.print(reports.fitted(part, console))
        assert expected in " ".join(output.getvalue().split())


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--version") == 0
    assert capsys.readouterr().out == f"pairproof {pairproof.__version__}\n"


PLAIN = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR", "GITHUB_ACTIONS")}

ONE_CHECK = """
import sys
from pairproof.conformance import cli
from pairproof.conformance.judge import verify
from pairproof.conformance.judge.results import Check, Status
passed = Check("case", "fast", "supcon", "golden/supcon/some", "float64", Status.PASSED)
verify.run = lambda selection, progress: verify.Report(selection, [passed], absent={"\\u03c4": "missing"})
"""
RUN = "cli.main(sys.argv[1:])"
"""The command line, with a run of one check that passed and a message that is not ASCII."""


def command(*arguments: str, shell: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a separate process; ``shell`` may contain redirections."""
    line = f"set -o pipefail; {shlex.join([sys.executable, '-c', ONE_CHECK + RUN, *arguments])}{shell}"
    return subprocess.run(["bash", "-c", line], check=False, capture_output=True, text=True, env=PLAIN | more)


RUN_WITH_EACH_OUTPUT = """
import os

read, closed = os.pipe()
os.close(read)
full, file = os.open("/dev/full", os.O_WRONLY), os.open("file", os.O_CREAT | os.O_WRONLY)
for name, output in {"closed": closed, "full": full, "file": file}.items():
    if not (child := os.fork()):
        os.dup2(output, 1)
        os.dup2(os.open(f"{name}.err", os.O_CREAT | os.O_WRONLY), 2)
        sys.exit(cli.main(["verify", "--json", f"{name}.json"]))
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
"""The command in three forks, one for each output; the imports take seconds."""


@pytest.fixture(scope="session")
def ends(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """The folder and the exit codes of ``RUN_WITH_EACH_OUTPUT`` in an ASCII locale."""
    folder = tmp_path_factory.mktemp("outputs")
    locale = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    program = [sys.executable, "-c", ONE_CHECK + RUN_WITH_EACH_OUTPUT]
    run = subprocess.run(program, check=True, cwd=folder, capture_output=True, text=True, env=PLAIN | locale)
    return folder, {name: int(code) for name, code in map(str.split, run.stdout.splitlines())}


@pytest.mark.slow
def test_a_closed_pipe_changes_neither_the_exit_code_nor_the_reports(ends: tuple[Path, dict[str, int]]) -> None:
    folder, codes = ends
    assert (codes["closed"], (folder / "closed.err").read_text()) == (0, "")
    assert json.loads((folder / "closed.json").read_text())["passed"] is True


@pytest.mark.slow
@pytest.mark.parametrize("shell", [" | true", " >&-", " >&- 2>&-"])
def test_a_closed_output_changes_neither_the_exit_code_nor_the_reports(tmp_path: Path, shell: str) -> None:
    report = tmp_path / "report.json"
    run = command("verify", "--json", str(report), shell=shell)
    assert (run.returncode, run.stderr) == (0, "")
    assert json.loads(report.read_text())["passed"] is True


@pytest.mark.slow
def test_a_full_device_is_reported(
    ends: tuple[Path, dict[str, int]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    passed = Check("case", "fast", "supcon", "golden/supcon/some", "float64", Status.PASSED)
    monkeypatch.setattr(verify, "run", lambda selection, progress: Report(selection, [passed]))
    assert call("verify", "--json", "/dev/full") == 3
    printed = capsys.readouterr()
    assert "everything holds" in printed.out
    assert printed.err == "pairproof: could not run: /dev/full cannot be written: No space left on device\n"
    folder, codes = ends
    assert codes["full"] == 3
    errors = (folder / "full.err").read_text().splitlines()
    assert errors == ["pairproof: could not run: [Errno 28] No space left on device"]


@pytest.mark.slow
def test_an_ascii_locale_prints_everything_without_colour(ends: tuple[Path, dict[str, int]]) -> None:
    folder, codes = ends
    assert (codes["file"], (folder / "file.err").read_text()) == (0, "")
    printed = (folder / "file").read_text(encoding="ascii")
    assert "not available: \\u03c4; the reasons: --show skips" in printed
    assert "\x1b" not in printed


@pytest.mark.parametrize(
    ("given", "loss"),
    [("supcon_loss", "supcon"), ("nt-xent", "nt_xent"), ("NTXentPairwiseLoss", "nt_xent_pairwise"), ("x", "x")],
)
def test_other_spellings_of_a_loss_are_understood(given: str, loss: str) -> None:
    assert loss_named(given) == loss
    assert Selection(losses=(given,)).losses == (loss,)
    assert Request("target", given).loss == loss
    assert Batch(loss=given, id="", embeddings="").loss == loss


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("verify", "--loss", "supcom"), "did you mean 'supcon'?"),
        (("verify", "--impl", "fsat"), "did you mean 'fast'?"),
        (("verify", "--case", "golden/supcon/lonely-na"), "did you mean 'golden/supcon/lonely-nan'?"),
        (("verify", "--show", "figure"), "did you mean 'figures'?"),
        (("explain", "supcon/lonely-na"), "did you mean 'supcon/lonely-nan'?"),
        (("explain", "supcon_notebook/supcon-3x"), "did you mean 'supcon_notebook/supcon-3x3'?"),
        (("fixtures", "show", "supcon/lonely-na"), "did you mean 'supcon/lonely-nan'?"),
        (("list", "case"), "did you mean 'cases'?"),
        (("list", "--loss", "supcom"), "did you mean 'supcon'?"),
        (("verfy",), "Did you mean 'verify'?"),
        (("verify", "--los", "supcon"), "--loss"),
    ],
)
def test_a_misspelt_name_exits_2_and_names_the_nearest(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*arguments) == 2
    assert words in capsys.readouterr().err


def test_a_named_peer_that_is_absent_exits_3(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert call("verify", "--impl", "supcontrast-today", "--peer", "supcontrast=missing.py") == 3
    assert "--peer supcontrast: there is no file or folder missing.py" in capsys.readouterr().err
    empty = tmp_path / "losses.py"
    empty.touch()
    assert call("verify", "--peer", f"supcontrast={empty}") == 3
    assert "supcontrast-today is not available: " in capsys.readouterr().err


def test_run_without_judged_checks_exits_3(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = ("verify", "--loss", "supcon_epsilon", "--case", "golden/*", "--impl", "supcontrast-today")
    assert call(*arguments, "--json", str(report)) == 3
    text = capsys.readouterr().out
    assert "nothing was judged: every check was skipped: does not compute supcon_epsilon" in text
    assert text.splitlines()[-1] == "NOT everything holds"
    assert json.loads(report.read_text())["passed"] is False


@pytest.mark.parametrize("name", ["info_nce/queue-tau-half", "golden/info_nce/queue-tau-half", "queue-tau-half"])
def test_explain_and_fixtures_show_accept_the_same_ids(name: str) -> None:
    assert find_case(name).id == find_golden(name).id == "golden/info_nce/queue-tau-half"


def sample(message: str, **more: object) -> Report:
    """Return a run of two checks, one of which failed with the message."""
    kind = Check("case", "fast", "supcon", "golden/supcon/some", "float64", Status.PASSED)
    repeat = "pairproof verify --case 'golden/supcon/a b' --impl pml-cross-batch-memory --dtype float32 --device cpu"
    failed = replace(kind, status=Status.FAILED, message=message, repeat=repeat)
    return Report(Selection(), [kind, failed], versions={"fast": message}, absent={"pml": message}, **more)


def screen(report: Report, details: tuple[str, ...] | None = DETAILS) -> str:
    """Return what a run prints on a terminal that interprets markup and emoji codes."""
    output = io.StringIO()
    console = Console(file=output, width=80, markup=True, emoji=True, force_terminal=True, color_system=None)
    show(report, console, seconds=1.0, details=details)
    return output.getvalue()


@pytest.mark.parametrize("text", ['pip install "./pairproof[peers]"', "[batch views dim]", "/tmp/[/x]/a", ":smile:"])
def test_messages_are_printed_as_they_are(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = screen(sample(text, problems=[text]))
    assert found.count(text) == 4
    assert call("verify", "--case", text) == 2
    assert text in capsys.readouterr().err
    assert call("list", text) == 2
    assert text in unwrapped(capsys.readouterr().err)


def test_a_line_is_wrapped_to_80_columns_and_its_command_stays_valid() -> None:
    text = screen(sample("value of anchor 0: expected 1.0, got 2.0, " + "far beyond the bound " * 20))
    assert max(map(len, text.splitlines())) <= 80
    assert "far beyond the bound" in text
    (command,) = re.findall(r"repeat: ((?:.*\\\n)*.*)", text)
    assert re.search(r" \\\n +--impl pml-cross-batch-memory --dtype float32 ", command)
    (_, failed) = sample("").checks
    assert shlex.split(command.replace("\\\n", " ")) == shlex.split(failed.repeat)
    narrow = reports.wrapped("    repeat: pairproof check losses.py:supcon --loss supcon --seed 0", 40)
    assert narrow.split(" \\\n      ") == ["    repeat: pairproof check", "losses.py:supcon --loss supcon", "--seed 0"]


def test_quiet_prints_the_failures_and_the_verdict() -> None:
    lines = screen(sample("wrong"), details=None).splitlines()
    assert lines[:3] == [
        "1 passed, 1 failed, 0 deviate, 0 skipped, 0 errored in 1.0 s",
        "failed golden/supcon/some fast float64",
        "    wrong",
    ]
    assert lines[3].startswith("    repeat: pairproof verify ")
    assert lines[-1] == "NOT everything holds"
    assert len(lines) == 6


def test_matrix_distinguishes_passes_deviations_mistakes_failures_and_skips() -> None:
    def checks(who: str, loss: str, *ends: tuple[Status, int], declared: tuple[str, ...] = ()) -> list[Check]:
        return [
            Check("case", who, loss, f"{loss}/{k}", "float64", status, declared=declared)
            for status, count in ends
            for k in range(count)
        ]

    passed, deviates, failed, skipped = Status.PASSED, Status.DEVIATES, Status.FAILED, Status.SKIPPED
    (mistake, *_) = (one.name for one in Optax.deviations if one.wrong)
    found = [
        *checks("fast", "supcon", (passed, 12), (skipped, 3)),
        *checks("fast", "nt_xent", (passed, 2), (failed, 1), (Status.ERRORED, 1)),
        *checks("optax", "supcon", (skipped, 4)),
        *checks("optax", "nt_xent", (passed, 5), (deviates, 2), declared=("norms are clamped",)),
        *checks("optax", "nt_xent_pairwise", (passed, 6), (deviates, 1), declared=("norms are clamped", mistake)),
    ]
    text = screen(Report(Selection(), found), details=())
    assert re.search(r"^fast +supcon 12, nt_xent 2x2 +3 *$", text, re.MULTILINE)
    assert re.search(r"^optax +nt_xent 5~2, nt_xent_pairwise 6!1 +4 *$", text, re.MULTILINE)
    everywhere = [check for loss in LOSSES for check in checks("fast-dense", loss, (passed, 7), (skipped, 1))]
    text = screen(Report(Selection(), [*found, *everywhere]), details=())
    first, other = (part.split("─\n", 1)[1] for part in re.split(r"\n *\n", text) if "─\n" in part)
    assert [line.split() for line in first.splitlines()] == [
        *([loss, "7"] for loss in LOSSES),
        ["skipped", str(len(LOSSES))],
    ]
    assert [line.split()[0] for line in other.splitlines()[:2]] == ["fast", "optax"]
    assert "left out" not in text
    text = screen(Report(Selection(), found, cases_left_out=12, dtypes_left_out=["float16"]), details=())
    assert "left out: 12 cases of more than 258 rows, float16; --thorough runs them" in text
    text = screen(Report(Selection(), found, dtypes_left_out=["float16"], alternates=True), details=())
    shared = "all but one check of fast-dense, fast-tiled and fast-exact on each case"
    assert f"left out: float16, {shared}; --thorough runs them" in " ".join(text.split())


def test_details_are_printed_only_on_request() -> None:
    report = run(Selection(cases=("supcon_notebook/*",), implementations=("reference", "fast"), processes=1))
    short = screen(report, details=())
    assert len(short.splitlines()) < 30
    assert "inputs are not exactly representable" not in short
    assert "2.1959722995368245" not in short
    full = screen(report)
    assert "2.1959722995368245" in full
    assert "Figures of supcon_notebook" in full
    assert "Claims in words" in full
    assert "inputs are not exactly representable in float16" in unwrapped(full)
    assert max(map(len, full.splitlines())) <= 80


def test_output_has_colour_only_on_a_terminal() -> None:
    def colours(**options: Any) -> bool:
        output = io.StringIO()
        show(sample("x"), Console(file=output, width=80, **options), seconds=1.0)
        return re.search(r"\x1b\[(\d;)?3\d", output.getvalue()) is not None

    assert colours(force_terminal=True, color_system="standard", no_color=False)
    assert not colours()
    assert not colours(force_terminal=True, no_color=True)


def test_internal_error_is_reported_as_one_of_pairproof(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr("pairproof.conformance.judge.check.check", fail)
    with pytest.raises(SystemExit) as caught:
        cli.main(["check", "pairproof.fast:supcon_loss", "--loss", "supcon"])
    assert caught.value.code == 3
    text = capsys.readouterr().err
    assert "Traceback" in text
    assert "pairproof: internal error: ZeroDivisionError: float division by zero\nThis is an error of pairproof" in text
