"""The documentation: its examples run, its losses conform, and its links lead to the pages that are built."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import pairproof
from pairproof import conformance, fast, install_command
from pairproof.conformance.cli import app
from pairproof.conformance.judge.options import Request, options_of
from pairproof.conformance.suite.golden import load_golden
from tools import build_docs

ROOT = Path(__file__).resolve().parent.parent
RUN = ("compat", "start", "losses", "train")
CALLS = (ROOT / "docs/calls.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n# (\w+\.py)\n(.*?)```\n\n```sh\n(.*?)```", CALLS, re.DOTALL)
DOCTESTS = [
    f"pairproof.{path.relative_to(ROOT).with_suffix('').as_posix().replace('/', '.')}"
    for folder in ("compat", "conformance")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]
"""The modules with examples in docstrings, apart from those that test_reference and test_fast_modules run."""
COMMANDS = [(name, code, line) for name, code, lines in EXAMPLES for line in lines.splitlines()]


@pytest.mark.parametrize("page", RUN)
def test_the_examples_of_a_page_run(page: str) -> None:
    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    torch.manual_seed(1)
    names: dict[str, object] = {"__name__": page}
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, f"docs/{page}.md", "exec"), names)


def test_the_values_of_the_page_of_symptoms_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/symptoms.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", text, re.MULTILINE | re.DOTALL)
    assert all(bool(printed) == ("print(" in code) for code, printed in blocks)
    assert sum(bool(printed) for _, printed in blocks) == text.count("```text") == 7
    names: dict[str, object] = {}
    for code, printed in blocks:
        exec(compile(code, "docs/symptoms.md", "exec"), names)
        assert capsys.readouterr().out == printed


def test_the_commands_of_the_page_of_symptoms_are_right() -> None:
    text = " ".join((ROOT / "docs/symptoms.md").read_text(encoding="utf-8").split())
    outputs = {}
    for line in re.findall(r"`(pairproof [^`]*)`", text):
        command, *arguments = shlex.split(line)[1:]
        done = CliRunner().invoke(app, [command, *arguments] if command == "diagnose" else [command, "--help"])
        assert done.exit_code in ((0, 1) if command == "diagnose" else (0,)), done.output
        assert all(one in done.output for one in arguments if one.startswith("--") and command != "diagnose"), line
        outputs[command] = outputs.get(command, "") + done.output
    assert {*outputs} == {"check", "diagnose", "identify", "parity"}
    assert "A negative value is possible" in outputs["diagnose"]
    assert "value       1.9459, near 'collapsed'" in outputs["diagnose"]


@pytest.mark.parametrize("name", DOCTESTS)
def test_the_examples_of_a_docstring_run(name: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(name))
    assert attempted
    assert failed == 0


def test_every_example_of_a_call_is_found() -> None:
    assert len(EXAMPLES) == CALLS.count("```python") == CALLS.count("```sh")
    assert len(COMMANDS) == CALLS.count("pairproof check ")


def conforms(line: str, code: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> None:
    name = line.partition(".py")[0].rpartition(" ")[2].strip("'")
    (folder / f"{name}.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    _, *arguments = shlex.split(line)
    done = CliRunner().invoke(app, [*arguments, *more])
    assert done.exit_code == 0, done.output
    assert "\nconforms at level policies: " in done.output


@pytest.mark.parametrize(("name", "code", "line"), COMMANDS, ids=[line.split()[2] for _, _, line in COMMANDS])
@pytest.mark.quick(8)
def test_an_example_of_a_call_conforms_on_some_cases(
    name: str, code: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = re.findall(r"--loss (\w+)", line)[0]
    ordinary = [golden.id for golden in load_golden(losses=[loss]) if golden.case.size <= 12]
    conforms(line, code, tmp_path, monkeypatch, *(f"--case={name}" for name in ordinary[:10]))


@pytest.mark.slow
@pytest.mark.usefixtures("proved_once")
@pytest.mark.parametrize(("name", "code", "line"), COMMANDS, ids=[line.split()[2] for _, _, line in COMMANDS])
def test_an_example_of_a_call_conforms(
    name: str, code: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Examples of the same loss share the proofs of random batches.
    conforms(line, code, tmp_path, monkeypatch, "--seed=1", "--fuzz=8")


def test_the_table_of_losses_is_complete() -> None:
    text = (ROOT / "docs/losses.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == list(build_docs.LOSSES)


def test_every_page_is_in_the_contents() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    lists = [
        found for text in texts for found in re.findall(r"^```{toctree}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]
    listed = [name for one in lists for name in re.findall(r"^(\w+)$", one, re.MULTILINE)]
    written = {name.removesuffix(".md") for name in build_docs.pages(ROOT).values()}
    assert sorted(listed) == sorted(written - {"index"} | {"every_loss", "every_speed", "documents"})


def test_the_speeds_of_ten_forms_are_those_of_the_page_on_every_form() -> None:
    def ratios(lines: list[str]) -> dict[str, dict[str, str]]:
        tables: dict[str, dict[str, str]] = {}
        for line in lines:
            form, *cells = (cell.strip().removeprefix("N = ") for cell in line.strip("|").split("|"))
            if form == "form":
                sizes = cells
            elif any(" / " in cell for cell in cells):
                tables[form] = dict(zip(sizes, cells, strict=True))
        return tables

    every = ratios([line for line in build_docs.speed_page(ROOT) if line.startswith("|")])
    text = (ROOT / "docs/speed.md").read_text(encoding="utf-8").partition("## Beside plain torch")[2]
    ten = ratios([line for line in text.partition("\n## ")[0].splitlines() if line.startswith("|")])
    assert len(ten) == 10
    for form, cells in ten.items():
        assert cells.items() <= every[form].items()
    assert len(every) > 40


def test_links_to_files_become_links_to_pages() -> None:
    names = build_docs.pages(ROOT)
    text = "[a](docs/speed.md#accuracy) [b](tools/mutants.md) ![c](bench/results/cpu.svg) [d](https://x.y/z.md) [e](#f)"
    assert build_docs.relinked(text, "README.md", names) == (
        "[a](speed.md#accuracy) b (`tools/mutants.md`) ![c](cpu.svg) [d](https://x.y/z.md) [e](#f)"
    )
    assert build_docs.relinked('<img src="docs/a.png" width="9"\nalt="b">', "README.md", names) == "![b](a.png)"
    assert build_docs.relinked("[a](../README.md)", "fixtures/README.md", names) == "[a](readme.md)"


def test_generated_pages_name_every_loss_and_document() -> None:
    page = "\n".join(build_docs.loss_page())
    for name, entry in build_docs.LOSSES.items():
        assert f"### `{name}`\n\nSource: {entry.source}." in page
        assert all(f"| `{keyword}` |" in page for keyword in entry.keywords)
    findings = "\n".join(build_docs.findings_page())
    assert findings.count("- **Artefact**") == sum(
        figure.verdict == "artefact" for fixture in build_docs.load_worked() for figure in fixture.figures
    )


@pytest.mark.slow
def test_the_documentation_is_built_without_warnings(tmp_path: Path) -> None:
    if find_spec("sphinx") is None:
        pytest.skip(f"sphinx is not installed: {install_command('docs')}")
    command = [sys.executable, str(ROOT / "tools/build_docs.py"), "--output", str(tmp_path)]
    subprocess.run(command, check=True, timeout=300)
    html = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "html").glob("*.html")}
    assert 'id="pairproof.fast.supcon_loss"' in html["api.html"]
    for name, text in html.items():
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', text)
        assert not loaded, f"{name} loads {loaded}"


def test_options_of_check_are_keywords_of_parametrize() -> None:
    """The names differ only as docs/judging.md says, its example is accepted, and the docstring has every keyword."""
    text = (ROOT / "docs/judging.md").read_text(encoding="utf-8")
    flags = {keyword: one.flags[0] for keyword, one in options_of(Request).items() if one.flags}
    parameters = inspect.signature(conformance.parametrize).parameters
    assert {*flags} <= {*parameters}
    differ = {keyword for keyword, flag in flags.items() if flag != f"--{keyword.replace('_', '-')}"}
    assert differ == {"settings", "cases", "dtypes", "normalised"}
    assert "Three names differ: `settings`, `cases` and `dtypes`. `--raw` is `normalised=False`." in text
    described = re.findall(r"^    (\w+): ", inspect.getdoc(conformance.parametrize) or "", re.MULTILINE)
    assert sorted(described) == sorted(parameters)
    example = re.search(r"@(pairproof\.conformance\.parametrize\(\n.*?^\))", text, re.DOTALL | re.MULTILINE)
    assert example
    mark = eval(example[1], {"pairproof": pairproof, "SupConLoss": fast.SupConLoss}).args[0]
    options = [word for line in re.findall(r"  # (--.*)", example[1]) for word in shlex.split(line)]
    assert sorted(shlex.split(mark.command)[3:]) == sorted(["--loss", "supcon", *options])
