"""Update what a checkout derives from the cases outside ``fixtures/``: two tables, and counts in examples."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from ..documents.load import load_worked
from ..implementations.callable import External
from ..judge.check import check_loss
from ..judge.fresh import FRESH
from ..judge.options import CouldNotRun
from ..judge.results import Status, phrase
from ..judge.verify import load_cases
from ..suite.store import write_atomically

TABLES = {
    "tools/peer_table.py": "conformance/implementations/README.md",
    "tools/fault_table.py": "conformance/faults/README.md",
}
"""The scripts that write tables, and the file that each of them writes."""

ADOPTER = "examples/adopter"
COUNTED = ("README.md", f"{ADOPTER}/tests/test_conformance.py", f"{ADOPTER}/.github/workflows/conformance.yml")
"""The files that state how many checks the tests of the example project make."""
ASSERTED = re.compile(r'parametrize\((\w+), loss="(\w+)", checks=(\d+)\)')


def renew(top: Path, loss: str) -> list[str]:
    """Update the derived files after the cases of a loss have changed.

    Args:
        top: folder that contains ``fixtures/``. If it is not a checkout, nothing is written.
        loss: short name of the loss. Only faults of this loss are judged again.

    Returns:
        The files that changed, relative to ``top``.

    Raises:
        CouldNotRun: A script failed.
    """
    names = [*TABLES.values(), *COUNTED]
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
        _sample(top / "README.md")
    return [name for name, content in before.items() if (top / name).read_bytes() != content]


def _count(top: Path) -> None:
    """Update the numbers of checks in the files of ``COUNTED``."""
    cases = load_cases(load_worked())
    texts = {name: (top / name).read_text(encoding="utf-8") for name in COUNTED}
    for attribute, loss, old in set(ASSERTED.findall("".join(texts.values()))):
        target = External(f"{top / ADOPTER}/mylib/losses.py:{attribute}", loss=loss)
        accepted = [case for case in cases if case.loss == loss and target.refuses(case) is None]
        new = sum(case.holds_in(dtype) for case in accepted for dtype in target.dtypes) + FRESH * len(target.dtypes)
        stated = re.compile(f'(loss="{loss}", checks=|--pairproof-loss={loss} --pairproof-checks=){old}\\b')
        texts = {name: stated.sub(rf"\g<1>{new}", text) for name, text in texts.items()}
    for name, text in texts.items():
        write_atomically(top / name, text)


def _sample(readme: Path) -> None:
    """Update the counts in the README's sample of the output of ``pairproof check`` on its first example."""
    text = readme.read_text(encoding="utf-8")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "losses.py"
        path.write_text(text.split("```python\n")[1].partition("```")[0], encoding="utf-8")
        found = check_loss(f"{path}:supcon", "supcon", seed=0)
    text = re.sub(r"\d+ of \d+(?= supcon cases)", f"{found.report.cases_chosen} of {found.cases}", text)
    for level, statuses in found.levels.items():
        ends = ", ".join(phrase(status, statuses[status]) for status in Status if statuses[status])
        text = re.sub(rf"(?m)^{level}: \d.*$", f"{level}: {ends}", text)
    failed, above = len(found.failures_required), len(found.failures_above)
    counts = f"{found.counts[Status.PASSED]} passed, {failed} failed,\n  {above} failed above {found.level}"
    write_atomically(readme, re.sub(r"\d+ passed, \d+ failed,\s+\d+ failed above \w+(?= in )", counts, text))
