"""Update the files outside ``fixtures/`` that depend on the cases: tables, numbers of checks, the README's sample."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from ..judge.check import check_loss
from ..judge.options import CouldNotRun
from ..suite.store import write_atomically

TABLES = {
    "tools/peer_table.py": "conformance/implementations/README.md",
    "tools/fault_table.py": "conformance/faults/README.md",
}
"""The scripts that write tables, and the files that they write."""

ADOPTER = "examples/adopter"
COUNTED = ("docs/judging.md", f"{ADOPTER}/tests/test_conformance.py", f"{ADOPTER}/.github/workflows/conformance.yml")
"""The files that state the number of checks in the tests of the example project."""
README = "README.md"
ASSERTED = re.compile(r'parametrize\((\w+), loss="(\w+)", checks=(\d+)\)')


def renew(top: Path, loss: str) -> list[str]:
    """Update the derived files after the cases of a loss have changed.

    Args:
        top: folder that contains ``fixtures/``. If it is not a checkout, nothing is written.
        loss: short name of the loss. Only faults of this loss are judged again.

    Returns:
        The files that changed, relative to ``top``.

    Raises:
        CouldNotRun: a script failed, or a part of the README's sample is missing.
    """
    names = [*TABLES.values(), *COUNTED, README]
    if not all((top / name).is_file() for name in (*TABLES, *names)):
        return []
    before = {name: (top / name).read_bytes() for name in names}
    for script, arguments in zip(TABLES, ([], ["--loss", loss]), strict=True):
        command = [sys.executable, str(top / script), *arguments]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
            raise CouldNotRun(f"the fixtures are written, but {script} failed: {reason}; run it again")
    _count(top)
    if loss == "supcon":
        _sample(top / README)
    return [name for name, content in before.items() if (top / name).read_bytes() != content]


def _count(top: Path) -> None:
    """Update the numbers of checks in ``COUNTED``."""
    texts = {name: (top / name).read_text(encoding="utf-8") for name in COUNTED}
    for attribute, loss, old in set(ASSERTED.findall("".join(texts.values()))):
        new = len(check_loss(f"{top / ADOPTER}/mylib/losses.py:{attribute}", loss, seed=0).judged)
        stated = re.compile(f'(loss="{loss}", checks=|--pairproof-loss={loss} --pairproof-checks=){old}\\b')
        texts = {name: stated.sub(rf"\g<1>{new}", text) for name, text in texts.items()}
    for name, text in texts.items():
        write_atomically(top / name, text)


def _sample(readme: Path) -> None:
    """Update the diagnosis and the verdict in the README's sample output."""
    text = readme.read_text(encoding="utf-8")
    main = "from pairproof.conformance.cli import main; main()"
    command = [sys.executable, "-c", main, "check", "losses.py:supcon", "--loss=supcon", "--seed=0"]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "losses.py"
        path.write_text(text.split("```python\n")[1].partition("```")[0], encoding="utf-8")
        environment = os.environ | {"COLUMNS": "80"}
        done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    printed = "\n".join(map(str.rstrip, done.stdout.splitlines()))
    for begin in (r"^[^\n]*: explains \d+ of ", r"^does not conform"):
        part = re.compile(f"{begin}.*?(?=\nfailed |\n\\[|\n```|\\Z)", re.DOTALL | re.MULTILINE)
        old, new = part.search(text), part.search(printed)
        if old is None or new is None:
            raise CouldNotRun(f"{readme.name}, or the output of its first example, lacks {begin}")
        text = text.replace(old[0], new[0])
    write_atomically(readme, text)
