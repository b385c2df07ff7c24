"""Build the documentation with Sphinx, from docs/, documents in other folders, and generated pages.

Links between documents become links between pages, and links to other files become paths. Nothing is downloaded, and
every warning of Sphinx is an error.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from pairproof import install_command
from pairproof.conformance.documents.load import load_worked
from pairproof.conformance.implementations import ALL
from pairproof.conformance.suite.catalogue import CHOICES, LOSSES, Loss
from pairproof.conformance.suite.golden import load_golden

ROOT = Path(__file__).resolve().parent.parent
ELSEWHERE: Mapping[str, str] = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "readme.md",
    "conformance/faults/README.md": "faults.md",
    "conformance/implementations/README.md": "peers.md",
    "fixtures/CHANGELOG.md": "releases.md",
    "fixtures/README.md": "fixtures.md",
}
"""The documents outside docs/, and the names of their pages."""
IMAGE = re.compile(r"(!\[[^\]]*\])\((?!https?:)[^)\s]*?([^/)\s]+)\)")
TAG = re.compile(r'<img src="[^"]*?([^"/]+)".*?\salt="([^"]*)">', re.DOTALL)
"""An image in HTML, which can set its width and position."""
LINK = re.compile(r"(?<!\!)\[([^\]\[]*(?:`[^`]*`)?[^\]\[]*)\]\((?!https?:|#)([^)\s]+)\)")


def pages(root: Path) -> dict[str, str]:
    """Return the page of every document, by the document's path."""
    return {f"docs/{path.name}": path.name for path in sorted((root / "docs").glob("*.md"))} | dict(ELSEWHERE)


def relinked(text: str, document: str, names: Mapping[str, str]) -> str:
    """Replace the links to other documents by links to their pages.

    Args:
        text: the content of a document.
        document: its path.
        names: the result of ``pages``.
    """
    folder = str(PurePosixPath(document).parent)

    def replaced(found: re.Match[str]) -> str:
        words, (target, _, place) = found[1], found[2].partition("#")
        path = os.path.normpath(f"{folder}/{target}")
        if path in names:
            return f"[{words}]({names[path]}{'#' * bool(place)}{place})"
        return words if f"`{path}`" in words or words.strip("`") == path else f"{words} (`{path}`)"

    return LINK.sub(replaced, IMAGE.sub(r"\1(\2)", TAG.sub(r"![\2](\1)", text)))


def _default(loss: Loss, name: str) -> str:
    value = loss.keywords[name]
    return "both, or a_to_b with negatives" if name == "direction" else "none" if value is None else str(value)


def loss_page() -> Iterator[str]:
    """The page on every loss: formula, source, keywords, implementations and cases."""
    cases = load_golden()
    modules = {entry.module for entry in LOSSES.values()}
    yield from ("# Every loss", "", "This page is generated from the catalogue, the reference and the adapters.", "")
    for module in sorted(modules, key=[entry.module for entry in LOSSES.values()].index):
        entries = [entry for entry in LOSSES.values() if entry.module == module]
        text = (sys.modules[entries[0].reference.__module__].__doc__ or "").strip()
        heading, _, body = text.partition("\n")
        yield from (f"## {' and '.join(f'`{entry.function}`' for entry in entries)}", "", heading, "")
        yield from ("```text", body.strip(), "```", "")
        for entry in entries:
            own = [case for case in cases if case.case.loss == entry.name]
            yield from (f"### `{entry.name}`", "", f"Source: {entry.source}.", "")
            yield from ("| keyword | default | values |", "|---|---|---|")
            for name in entry.keywords:
                values = (
                    ", ".join(map(str, entry.choices.get(name, ()))) if name in {**CHOICES, **entry.own_choices} else ""
                )
                yield f"| `{name}` | {_default(entry, name)} | {values} |"
            judged = ", ".join(kind.name for kind in ALL if entry.name in kind.support.losses)
            yield from ("", f"Computed by: {judged or 'the reference and fast'}. Golden cases: {len(own)}.", "")


def findings_page() -> Iterator[str]:
    """The page on what five published documents print and state wrongly."""
    yield from ("# Findings in five documents", "", "This page is generated from `fixtures/worked`.", "")
    for fixture in load_worked():
        about = fixture.document
        yield from (f"## {about.title}", "", about.about, "")
        for figure in fixture.figures:
            if figure.instead:
                yield f"- **Artefact**, {figure.place}: {figure.what}. {figure.instead['because']}"
        for claim in fixture.claims:
            if claim.verdict != "holds":
                yield f"- **Claim that {claim.verdict}**, “{claim.words}”: {claim.because}"
        yield ""


def _ratios(forward: float, both: float) -> str:
    return " / ".join(f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}" for ratio in (both, forward))


def speed_page(root: Path) -> Iterator[str]:
    """The page on the speed of every form beside plain torch, from the results of the benchmark."""
    report = json.loads((root / "bench/results/cpu.json").read_text(encoding="utf-8"))
    later = json.loads((root / "bench/results/later.json").read_text(encoding="utf-8"))
    found: dict[str, dict[int, str]] = {}
    for row in report["timings"]:
        if (row["implementation"], row["regime"], row["status"]) == ("plain", "default", "measured"):
            ratios = row["forward_ratio"][1], row["both_ratio"][1]  # the medians
            found.setdefault(row["form"], {})[row["n"]] = _ratios(*ratios)
    date = report["date"][:10]
    combined = {form: found.pop(form) for form in [*found] if ", D=" in form}
    others = {
        form: {int(n): _ratios(forward, both) for n, (both, forward) in cells.items()}
        for form, cells in later["forms"].items()
    }
    yield from ("# Speed of every form", "", "This page is generated from `bench/results`. A cell says how many times")
    yield "faster `pairproof.fast` is than plain torch: forward and backward / the forward pass without autograd."
    yield ""
    parts = ((found, f"on {date}"), (combined, f"on {date}, drawn combinations"), (others, later["measured"]))
    for rows, measured in parts:
        sizes = sorted({n for cells in rows.values() for n in cells})
        yield from (f"Measured {measured}.", "", f"| form | {' | '.join(f'N = {n}' for n in sizes)} |")
        yield f"|---|{'---|' * len(sizes)}"
        for form, cells in rows.items():
            yield f"| {form} | {' | '.join(cells.get(n, '') for n in sizes)} |"
        yield ""


def write_pages(root: Path, folder: Path) -> None:
    """Write the sources of all pages into a new folder.

    Args:
        root: the repository.
        folder: replaced if it exists.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    names = pages(root)
    for document, page in names.items():
        text = (root / document).read_text(encoding="utf-8")
        (folder / page).write_text(relinked(text, document, names), encoding="utf-8")
    for pattern in ("bench/results/*.svg", "docs/*.png", "docs/*.svg"):
        for path in root.glob(pattern):
            shutil.copy(path, folder)
    generated = {"every_loss.md": loss_page(), "documents.md": findings_page(), "every_speed.md": speed_page(root)}
    for page, lines in generated.items():
        (folder / page).write_text("\n".join(lines) + "\n", encoding="utf-8")
    shutil.copy(root / "docs/conf.py", folder)


def main(arguments: list[str] | None = None) -> int:
    """Build the documentation; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, default=ROOT / "build/docs", metavar="FOLDER", help="default: build/docs"
    )
    options = parser.parse_args(arguments)
    for name in ("sphinx", "furo", "myst_parser"):
        if find_spec(name) is None:
            parser.error(f"{name} is not installed: {install_command('docs')}")
    write_pages(ROOT, options.output / "source")
    folders = [str(options.output / name) for name in ("source", "html")]
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", *folders]
    code = subprocess.run(command, check=False).returncode
    if not code:
        print(f"docs: open {options.output / 'html/index.html'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
