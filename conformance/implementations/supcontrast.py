"""The original SupCon code (HobbitLong/SupContrast, ``losses.py``), in two revisions.

- ``supcontrast``: the revision in the SupCon notebook, before pull request 142. A file of the PyPI package bioencoder
  1.0.5 has the same statements; this file is loaded.
- ``supcontrast-today``: commit 66a8fe5. The code runs (*live*) if the user passes its path. Otherwise, recorded results
  are used.

Terms: features [batch, views, dim] are embeddings, and ``mask`` is ``positives``. With ``contrast_mode="one"``, only
the first views are anchors. The code does not normalise; under cosine similarity, the adapter does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from ..suite.cases import Case
from ..suite.machine import machine
from ..suite.records import Outcome, Truth
from ..suite.store import fixtures_root, read_checked
from ..truth.tolerances import lost, unit_roundoff
from . import base
from .base import Support, TorchImplementation, Unavailable
from .files import FilePeer, load_file, sha256

TODAY_COMMIT = "66a8fe53880d6a1084b2e4e0db0a019024d6d41a"
TODAY_SHA256 = "a432e24bdff118aa0ab3013a4c85a4b099871ebef554177054d91fe6fca616db"
RECORDED = "recorded/supcontrast-today.json"
LARGEST_RECORDED = 40
"""Largest number of rows of a recorded case."""

RECORDED_FORMAT = "pairproof-recorded/1"


@base.deviation(
    "the self pair makes the row underflow", "https://github.com/HobbitLong/SupContrast/issues/104", wrong=True
)
def row_underflows(case: Case, dtype: str, true: Truth) -> bool:
    """Whether the exponentials of other logits of some anchor underflow next to its self pair.

    The maximum of a row includes the self pair. If all other logits lie far below it, their exponentials are 0, and the
    loss contains the logarithm of 0. If only some of them are 0, the sum is too small. This matters where subnormal
    numbers are flushed to 0.
    """
    found, positives = base.logits(case), case.positives()
    own = found.diagonal().copy()
    np.fill_diagonal(found, -np.inf)

    def underflows(row: npt.NDArray[np.float64]) -> bool:
        if row.max() < math.log(np.finfo(dtype).tiny):
            return True
        underflowed = np.exp(row[row < math.log(lost(dtype))]).sum()
        return bool(underflowed > unit_roundoff(dtype) * np.exp(row).sum())

    return any(positives[i] and underflows(found[i] - own[i]) for i in case.anchors())


PULL_142 = "https://github.com/HobbitLong/SupContrast/pull/142"


@base.deviation("NaN for an anchor without positives", PULL_142, wrong=True, losses=("supcon",))
def nan_without_positives(case: Case, dtype: str, true: Truth) -> bool:
    """The sum over positives is divided by their number. For a class with one member, this is 0 / 0 = NaN."""
    return base.lacks_positives(case) and case.option("no_positive") == "zero"


def _one_of_each(case: Case) -> list[tuple[int, ...]] | None:
    """Return (anchor, partner) pairs if exactly one row of each pair of nt_xent is an anchor, else None."""
    if case.loss != "nt_xent" or case.option("anchors") is None:
        return None
    items = [(i, int(case.arguments["partners"][i])) for i in case.anchors()]
    return [*items] if sorted(chain(*items)) == list(range(case.n)) else None


def _other_anchors(case: Case) -> bool:
    return case.option("anchors") is not None and _one_of_each(case) is None


SUPPORT = Support(
    losses=("supcon", "nt_xent"),
    options={"reduction": ("mean",), "denominator": ("all",), "no_positive": ("zero", "nan")},
    lacks=("ref_embeddings",),
    also=(("takes either all rows or the first views as anchors", _other_anchors),),
)


def temperatures(case: Case) -> dict[str, float]:
    """Return the temperature and the base temperature, which is by default the temperature."""
    found = {name: case.option(name) for name in ("temperature", "base_temperature")}
    return {name: case.temperature if value is None else value for name, value in found.items()}


class _SupConCode(TorchImplementation):
    """The call that both revisions share."""

    loss: Callable[..., Callable[..., torch.Tensor]]
    support = SUPPORT

    def value(self, case: Case, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Evaluate ``SupConLoss`` on features [batch, views, dim]."""
        first = _one_of_each(case)
        loss = self.loss(**temperatures(case), contrast_mode="all" if first is None else "one")
        rows = base.normalised(given[case.first], case)
        items = base.items_of(case) if first is None else first
        return loss(rows[torch.tensor(items, device=self.device)], **base.targets_of(case, items, rows))


class SupContrast(_SupConCode, FilePeer):
    """The notebook's revision."""

    name = "supcontrast"
    title = "the original SupCon code, as in bioencoder 1.0.5"
    requirement = "bioencoder==1.0.5"
    files: ClassVar[Mapping[str, str]] = {
        "bioencoder/bioencoder/core/losses.py": "3715db82773bcecf3f6152fcf0f86858684913bf2e14e2aebf104d5b651db834"
    }
    attribute = "SupConLoss"
    deviations = (row_underflows, nan_without_positives)


class SupContrastToday(_SupConCode):
    """Commit 66a8fe5: live if a path is given, else its recorded values."""

    name = "supcontrast-today"
    title = "the original SupCon code, commit 66a8fe5"
    support = replace(SUPPORT, options={**SUPPORT.options, "no_positive": ("zero",)})
    deviations = (row_underflows,)
    path: Path | None = None
    records: dict[tuple[str, str], Outcome]

    def load(self, options: Mapping[str, str]) -> None:
        """Load the file from the command line, or the recorded values."""
        if "supcontrast" in options:
            path = Path(options["supcontrast"])
            self.path = path / "losses.py" if path.is_dir() else path
            self.loss = load_file(self.path).SupConLoss
            return
        if machine()["denormals"] == "flushed":
            raise Unavailable("its results were recorded where subnormal numbers are kept")
        recorded = fixtures_root() / RECORDED
        if not recorded.is_file():
            raise Unavailable(f"{RECORDED} is missing; pass the path of the repository with --peer supcontrast=PATH")
        data = read_checked(fixtures_root(), RECORDED, RECORDED_FORMAT)
        self.torch = str(data["torch"])
        self.records = {}
        for record in data["records"]:
            # Each number is stored as the shortest decimal that restores it in its dtype.
            values, gradient = (np.array(record[key], record["dtype"]).astype(float) for key in ("values", "gradient"))
            self.records[record["case"], record["dtype"]] = Outcome(values.tolist(), gradient)

    def version(self) -> str:
        """Return whether the results are live or recorded, and the checksum."""
        if self.path is None:
            return f"recorded with torch {self.torch}, losses.py SHA-256 {TODAY_SHA256[:12]}"
        found = sha256(self.path)
        same = "the recorded revision" if found == TODAY_SHA256 else "NOT the recorded revision"
        return f"from a file, SHA-256 {found[:12]}, {same}"

    def refuses(self, case: Case) -> str | None:
        """Return the reason to skip a case that is not supported or not recorded; None otherwise."""
        recorded = self.path is not None or any((case.id, dtype) in self.records for dtype in self.dtypes)
        return super().refuses(case) or (None if recorded else "this case is not recorded")

    def evaluate(self, case: Case, dtype: str) -> Outcome:
        """Evaluate the case, or return the recorded outcome."""
        return super().evaluate(case, dtype) if self.path is not None else self.records[case.id, dtype]


def _shortest(values: Any, dtype: str) -> Any:
    """Convert numbers to JSON: the shortest decimals that restore them in their dtype; non-finite ones as strings."""
    if np.ndim(values):
        return [_shortest(v, dtype) for v in values]
    return float(str(np.dtype(dtype).type(values))) if math.isfinite(values) else str(float(values))


@base.one_thread()
def record(cases: Sequence[Case], path: str) -> dict[str, Any]:
    """Run a revision on every case that it computes, and record the results.

    Args:
        cases: the cases to run.
        path: path of the repository, or of its losses.py.

    Returns:
        The JSON object of ``fixtures/recorded/supcontrast-today.json``. Its ``sha256`` is the checksum of the file that
        ran. Its ``commit`` is None if this is not the checksum of commit 66a8fe5.

    Raises:
        Unavailable: the file does not exist, cannot be loaded, or fails on a case.
    """
    live = SupContrastToday({"supcontrast": path}, "cpu")
    assert live.path is not None  # a path was given
    checksum = sha256(live.path)
    records = []
    for case in (case for case in cases if case.n <= LARGEST_RECORDED and live.refuses(case) is None):
        for dtype in filter(case.holds_in, live.dtypes):
            try:
                outcome = live.evaluate(case, dtype)
            except Exception as error:  # external code may raise any exception
                message = f"{live.path} fails on {case.id}, {dtype}: {type(error).__name__}: {error}"
                raise Unavailable(message.splitlines()[0]) from error
            values, gradient = _shortest(outcome.values, dtype), _shortest(outcome.gradient, dtype)
            records.append({"case": case.id, "dtype": dtype, "values": values, "gradient": gradient})
    return {
        "format": RECORDED_FORMAT,
        "peer": "supcontrast-today",
        "repository": "https://github.com/HobbitLong/SupContrast",
        "commit": TODAY_COMMIT if checksum == TODAY_SHA256 else None,
        "file": "losses.py",
        "sha256": checksum,
        "torch": torch.__version__.partition("+")[0],
        "records": records,
    }
