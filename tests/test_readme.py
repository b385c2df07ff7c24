"""The documents: examples run, commands parse, targets and links exist, and the table of losses matches the code."""

from __future__ import annotations

import inspect
import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch.nn import functional
from typer.testing import CliRunner

from pairproof import fast
from pairproof.conformance.cli import app
from pairproof.conformance.suite.catalogue import LOSSES, REFERENCES

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (
        README,
        ROOT / "CONTRIBUTING.md",
        ROOT / "fixtures" / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *ROOT.glob("examples/*/*.md"),
    )
}


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of a language, each after empty lines that keep its line numbers in the text."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return ["\n" * text.count("\n", 0, one.start(1)) + one[1] for one in found]


EXAMPLES = blocks(TEXT, "python")


def commands(program: str, *, inline: bool) -> list[tuple[str, str]]:
    """The commands of all documents that begin with a program, with the document: from shell blocks or inline code."""
    found = []
    for name, text in DOCUMENTS.items():
        if inline:
            lines = [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]
        else:
            lines = "".join(blocks(text, "sh")).replace("\\\n", " ").splitlines()
        found += [(name, line.strip().removeprefix(".venv/bin/")) for line in lines]
    return [(name, line) for name, line in found if line.startswith(f"{program} ")]


@pytest.fixture(scope="module")
def names() -> dict[str, object]:
    """What the examples of the README define, run in their order."""
    torch.manual_seed(0)
    found: dict[str, object] = {"__name__": "readme"}
    for example in EXAMPLES:
        exec(compile(example, str(README), "exec"), found)
    return found


def test_examples_run(names: dict[str, object]) -> None:
    assert len(EXAMPLES) == TEXT.count("```python") == 2
    assert {"supcon", "simclr", "clip", "moco"} <= set(names)


def test_the_example_of_the_plugin_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    example, _ = blocks(DOCUMENTS["docs/judging.md"], "python")  # tests/test_docs.py has the other one
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "adopter"))
    found: dict[str, object] = {"__name__": "example"}
    exec(compile(example, "docs/judging.md", "exec"), found)
    assert callable(found["test_supcon"])


def test_python_is_only_in_documents_whose_examples_are_run() -> None:
    # here, in tests/test_docs.py and, of docs/distributed.md, in tests/test_distributed.py
    pages = ("calls", "compat", "distributed", "judging", "losses", "start", "symptoms", "train")
    run = ["README.md", *(f"docs/{page}.md" for page in pages)]
    assert [name for name, text in DOCUMENTS.items() if "```python" in text] == run


def test_training_examples_compute_the_losses_they_name(names: dict[str, Any]) -> None:
    """Each loss against torch's cross-entropy, on the examples' own batch."""
    a, b = (functional.normalize(names["encoder"](names[view]), dim=1) for view in ("view_a", "view_b"))
    rows, diagonal = torch.cat([a, b]), torch.eye(16, dtype=torch.bool)
    logits = (rows @ rows.T).masked_fill(diagonal, float("-inf"))
    simclr = functional.cross_entropy(logits / 0.5, torch.arange(16).roll(8))
    classes = names["labels"].repeat(2)
    positives = (classes[:, None] == classes[None, :]) & ~diagonal
    supcon = -(logits / 0.1).log_softmax(dim=1)[positives].mean()  # every class has as many rows
    texts = functional.normalize(names["other_encoder"](names["view_b"]), dim=1)
    scores = a @ texts.T / 0.07
    clip = (functional.cross_entropy(scores, torch.arange(8)) + functional.cross_entropy(scores.T, torch.arange(8))) / 2
    queue = functional.normalize(names["queue"], dim=1)
    scores = torch.cat([(a * texts).sum(dim=1, keepdim=True), a @ queue.T], dim=1)
    moco = functional.cross_entropy(scores / 0.07, torch.zeros(8, dtype=torch.long))
    for name, expected in (("simclr", simclr), ("supcon", supcon), ("clip", clip), ("moco", moco)):
        torch.testing.assert_close(names[name], expected)
    assert names["log_scale"].grad is not None


def test_the_queue_begins_with_the_new_keys() -> None:
    examples = blocks(DOCUMENTS["docs/train.md"], "python")
    (moco,) = (example for example in examples if "queue" in example)
    found: dict[str, Any] = {}
    for block in (examples[0], moco):
        exec(compile(block, "docs/train.md", "exec"), found)
    assert found["queue"].shape == (64, 16)
    torch.testing.assert_close(found["queue"][:8], found["keys"])


def parse(line: str, *, inline: bool = False) -> None:
    """Parse a command line as the command does, without running it.

    Args:
        line: the command line.
        inline: whether it may be the name of a command only.

    Raises:
        Exception: the command line has an unknown command, option or value.
    """
    arguments = shlex.split(line, comments=True)[1:]
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):  # a group
        context = command.make_context("pairproof", arguments[:1])
        _, command, arguments = command.resolve_command(context, arguments)
    if arguments or not inline:
        with suppress(typer.Exit):  # after --help
            command.make_context("pairproof", arguments)


@pytest.mark.parametrize(("document", "line"), commands("pairproof", inline=False))
def test_command_parses(document: str, line: str) -> None:
    parse(line)


@pytest.mark.parametrize(("document", "line"), sorted(set(commands("pairproof", inline=True))))
def test_command_in_a_sentence_parses(document: str, line: str) -> None:
    parse(line, inline=True)


@pytest.mark.parametrize("line", ["pairproof judge", "pairproof verify --los supcon", "pairproof check"])
def test_wrong_command_does_not_parse(line: str) -> None:
    with pytest.raises(Exception, match=r"No such|Missing"):
        parse(line)


def test_make_targets_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9.-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    lines = [line for inline in (False, True) for _, line in commands("make", inline=inline)]
    named = {line.partition("#")[0].split()[1] for line in lines}
    assert len(named) > 10
    assert named <= targets


def test_links_in_the_documents_exist() -> None:
    count = 0
    for name, text in DOCUMENTS.items():
        for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
            path = (ROOT / name).parent / link if link else ROOT / name
            assert path.exists(), f"{name}: {link}"
            if anchor:
                titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
                # GitHub drops punctuation from the anchors of titles.
                anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
                assert anchor in anchors, f"{name}: {link}#{anchor}"
            count += 1
        for image in re.findall(r'<img src="([^"]*)"', text):
            assert ((ROOT / name).parent / image).exists(), f"{name}: {image}"
    assert count > 15


def test_table_of_losses_has_the_signatures_and_the_keywords_of_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)\((.*?)\)` \|.*\| (.*?) \|$", DOCUMENTS["docs/losses.md"], re.MULTILINE)
    assert [name for name, *_ in rows] == [loss.function for loss in LOSSES.values()]
    for (name, positional, others), loss in zip(rows, LOSSES.values(), strict=True):
        for function in (getattr(fast, name), loss.reference):
            parameters = inspect.signature(function).parameters
            before_star = [key for key, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
            assert positional.split(", ") == before_star
            keywords = [key for key in (*REFERENCES, "negatives", "hard_negatives") if key in parameters]
            assert others == (", ".join(f"`{key}`" for key in keywords) or "none"), name


def assert_sample(document: str, line: str, exit_code: int) -> None:
    """Assert that each sample of output in a document occurs in the output of a command, except for the seconds.

    ``[...]`` in the sample stands for omitted lines.
    """
    samples = [block.lstrip("\n") for block in blocks(DOCUMENTS[document], "text")]
    assert samples
    done = CliRunner().invoke(app, shlex.split(line)[1:])
    assert done.exit_code == exit_code, done.output
    printed = "".join(f"{line.rstrip()}\n" for line in done.output.splitlines())
    *samples, printed = (re.sub(r"(?<= in )\d+\.\d s$", "", text, flags=re.MULTILINE) for text in (*samples, printed))
    for sample in samples:
        rest = printed
        for part in filter(None, sample.split("[...]\n")):
            assert part in rest
            rest = rest.partition(part)[2]


@pytest.mark.slow
def test_sample_in_the_readme_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "losses.py").write_text(EXAMPLES[0], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    line = "pairproof check losses.py:supcon --loss supcon"
    assert line in TEXT
    # The levels of the random batches depend on the seed.
    assert_sample("README.md", f"{line} --seed 0", exit_code=1)


def test_sample_of_verify_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (line,) = (
        line for name, line in commands("pairproof", inline=True) if name == "docs/judging.md" and "--impl" in line
    )
    assert_sample("docs/judging.md", line, exit_code=0)


@pytest.mark.slow
def test_masked_diagonal_fails_only_for_extreme_norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    masked = EXAMPLES[0].replace("(rows @ rows.T / temperature)", "(rows @ rows.T / temperature).fill_diagonal_(-1e9)")
    assert masked != EXAMPLES[0]
    (tmp_path / "losses.py").write_text(masked, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["check", "losses.py:supcon", "--loss", "supcon", "--all"])
    assert done.exit_code == 0
    assert "\nconforms at level policies: " in done.output
    failures = re.findall(r"^failed golden/supcon/(\S+) ", done.output, re.MULTILINE)
    assert 0 < len(failures) < 10
    assert all(re.fullmatch(r"(tiny|huge|mixed)-norms-.*|near-largest-.*", name) for name in failures), failures
