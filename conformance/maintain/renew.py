"""What a checkout derives from the cases outside ``fixtures/``: two generated tables, and the adopter's counts."""

from __future__ import annotations

import io
import re
import runpy
from contextlib import redirect_stdout
from pathlib import Path

from ..documents.load import load_worked
from ..faults import FAULTS
from ..implementations.callable import External
from ..judge.verify import load_cases
from ..suite.store import write_atomically

TABLES = {
    "tools/peer_table.py": "conformance/implementations/README.md",
    "tools/fault_table.py": "conformance/faults/README.md",
}
"""The scripts that write the tables, and what each writes."""

ADOPTER = "examples/adopter"
ASSERTED = re.compile(r'parametrize\((\w+), loss="(\w+)", checks=(\d+)\)')


def renew(top: Path, loss: str) -> list[str]:
    """Write again what differs.

    Args:
        top: the folder that holds ``fixtures/``; if it is not a checkout nothing is written.
        loss: short name of the loss whose cases have changed.

    Returns:
        The files that changed.
    """
    names = [*TABLES.values(), "README.md"]
    names += [f"{ADOPTER}/{name}" for name in ("tests/test_conformance.py", ".github/workflows/conformance.yml")]
    paths = [top / name for name in (*names, *TABLES)]
    if not all(path.is_file() for path in paths):
        return []
    before = {name: (top / name).read_text(encoding="utf-8") for name in names}
    for script in TABLES:
        if script != "tools/fault_table.py" or any(fault.loss == loss for fault in FAULTS):
            with redirect_stdout(io.StringIO()):
                runpy.run_path(str(top / script))["main"]([])
    _count(top, names[len(TABLES) :])
    return [name for name, text in before.items() if (top / name).read_text(encoding="utf-8") != text]


def _count(top: Path, names: list[str]) -> None:
    """Renew the numbers of checks that the adopter's tests assert, in each of these files."""
    cases = load_cases(load_worked())
    texts = {name: (top / name).read_text(encoding="utf-8") for name in names}
    for attribute, loss, old in set(ASSERTED.findall("".join(texts.values()))):
        target = External(f"{top / ADOPTER}/mylib/losses.py:{attribute}", loss=loss)
        taken = [case for case in cases if case.loss == loss and target.refuses(case) is None]
        new = sum(case.holds_in(dtype) for case in taken for dtype in target.dtypes)
        for name, text in texts.items():
            for pattern in (f'loss="{loss}", checks=', f"--pairproof-loss={loss} --pairproof-checks="):
                text = text.replace(f"{pattern}{old}", f"{pattern}{new}")
            texts[name] = text
    for name, text in texts.items():
        if text != (top / name).read_text(encoding="utf-8"):
            write_atomically(top / name, text)
