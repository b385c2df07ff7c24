"""Build the documentation with Sphinx, from docs/, documents in other folders, and generated pages.

Links between documents become links between pages, and links to other files become paths. Nothing is downloaded, and
every warning of Sphinx is an error.
"""

from __future__ import annotations

import argparse
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
    for path in (*(root / "bench/results").glob("*.svg"), *(root / "docs").glob("*.png")):
        shutil.copy(path, folder)
    for page, lines in (("every_loss.md", loss_page()), ("documents.md", findings_page())):
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
