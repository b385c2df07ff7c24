"""The original SupCon code (HobbitLong/SupContrast, ``losses.py``), in two revisions.

``supcontrast`` is the revision that the SupCon notebook shows, before pull request 142; the PyPI package bioencoder
1.0.5 carries it statement for statement in one file, which is loaded by path after its checksum is verified.
``supcontrast-today`` is commit 66a8fe5: live from a path that the user names, otherwise by its recorded values.

Its words translated: features [batch, views, dim] are embeddings, a mask is positives, ``contrast_mode="one"`` takes
the first view's rows as anchors. It does not normalise; under cosine similarity the rows are normalised for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch

from ..suite.cases import Case
from ..suite.records import Outcome
from ..suite.store import fixtures_root
from .base import (
    Deviation,
    Implementation,
    Unavailable,
    items_of,
    logits,
    lonely,
    normalised,
    one_thread,
    outcome_of,
    stacked_order,
    takes_a_batch_alone,
)
from .files import load_file, peer_file, sha256

NOTEBOOK_FILE = "bioencoder/bioencoder/core/losses.py"
NOTEBOOK_SHA256 = "3715db82773bcecf3f6152fcf0f86858684913bf2e14e2aebf104d5b651db834"
TODAY_COMMIT = "66a8fe53880d6a1084b2e4e0db0a019024d6d41a"
TODAY_SHA256 = "a432e24bdff118aa0ab3013a4c85a4b099871ebef554177054d91fe6fca616db"
RECORDED = "recorded/supcontrast-today.json"
LARGEST_RECORDED = 40
"""Rows up to which a case is recorded: a gradient of a large batch fills a page that nobody reads."""

RECORDED_FORMAT = "pairproof-recorded/1"


def _row_drowns(case: Case, dtype: str) -> bool:
    """Whether some anchor's own logit exceeds all others by more than the dtype's exponentials can hold."""
    deepest = -math.log(torch.finfo(getattr(torch, dtype)).tiny)
    found, positives = logits(case), case.positives()
    own = found.diagonal().copy()
    np.fill_diagonal(found, -np.inf)
    return any(positives[i] and own[i] - found[i].max() > deepest for i in case.anchors())


ROW_DROWNS = Deviation(
    name="its own similarity drowns the row",
    applies=lambda case, dtype, true: _row_drowns(case, dtype),
    reason="the row's maximum is taken with the anchor itself in it: once all others lie far below, their"
    " exponentials are 0, and so is the sum whose logarithm is taken",
    link="https://github.com/HobbitLong/SupContrast/issues/104",
    wrong=True,
)

NAN_FOR_THE_LONELY = Deviation(
    name="NaN for an anchor without positive",
    applies=lambda case, dtype, true: case.loss == "supcon" and lonely(case) and case.option("no_positive") == "zero",
    reason="divides by the number of positives, 0 for a class with one member: the loss is NaN",
    link="https://github.com/HobbitLong/SupContrast/pull/142",
    wrong=True,
)


class _SupConCode(Implementation):
    """What both revisions share: how a case is put to ``SupConLoss``."""

    loss: Any
    deviations: ClassVar[tuple[Deviation, ...]] = (ROW_DROWNS,)

    def refuses(self, case: Case) -> str | None:
        """What the class cannot be asked."""
        if case.loss not in ("supcon", "nt_xent"):
            return f"has no {case.loss}"
        alone = takes_a_batch_alone(case)
        if alone is not None:
            return alone
        if case.option("reduction") != "mean":
            return f"has no reduction {case.option('reduction')}"
        if case.loss == "supcon" and case.option("denominator") != "all":
            return f"has no denominator {case.option('denominator')}"
        if case.option("anchors") is not None and _one_of_each(case) is None:
            return "has no subset of anchors but the first views"
        if case.loss == "supcon" and lonely(case) and case.option("no_positive") == "drop":
            return "does not drop anchors without positive"
        return None

    def evaluate(self, case: Case, dtype: str) -> Outcome:
        """Value and gradient of ``SupConLoss``."""
        temperature = float(case.option("temperature"))
        base = case.option("base_temperature")
        first = _one_of_each(case)
        loss = self.loss(
            temperature=temperature,
            base_temperature=temperature if base is None else base,
            contrast_mode="all" if first is None else "one",
        )
        embeddings = self.tensor(case, dtype)
        rows = normalised(embeddings, case)
        if case.loss == "nt_xent":
            order = stacked_order(case) if first is None else first
            features = torch.stack(rows[torch.as_tensor(order, device=self.device)].chunk(2), dim=1)
            return outcome_of(loss(features), embeddings)
        items = items_of(case)
        some = [item[0] for item in items]
        features = torch.stack([rows[list(view)] for view in zip(*items, strict=True)], dim=1)
        if "labels" in case.arguments:
            labels = torch.tensor([case.arguments["labels"][i] for i in some], dtype=torch.int64, device=self.device)
            return outcome_of(loss(features, labels=labels), embeddings)
        mask = torch.tensor(case.arguments["positives"], dtype=rows.dtype, device=self.device)[some][:, some]
        if len(items[0]) > 1:
            mask.fill_diagonal_(1)
        return outcome_of(loss(features, mask=mask), embeddings)


def _one_of_each(case: Case) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """For NT-Xent with one anchor out of each pair: those rows, then their partners. None if it is another subset."""
    if case.loss != "nt_xent" or case.option("anchors") is None:
        return None
    anchors = case.anchors()
    partners = [int(case.arguments["partners"][i]) for i in anchors]
    if sorted(anchors + partners) != list(range(case.n)):
        return None
    return np.array(anchors + partners)


class SupContrast(_SupConCode):
    """The notebook's revision, live."""

    name: ClassVar[str] = "supcontrast"
    title: ClassVar[str] = "the original SupCon code, in the notebook's revision (bioencoder 1.0.5, core/losses.py)"
    deviations: ClassVar[tuple[Deviation, ...]] = (ROW_DROWNS, NAN_FOR_THE_LONELY)

    def __init__(self, options: Mapping[str, str], device: str) -> None:
        """Find the file, verify it, load it.

        Raises:
            Unavailable: it is not there, not that file, or lacks what it imports.
        """
        super().__init__(options, device)
        self.path = peer_file(options, NOTEBOOK_FILE, NOTEBOOK_SHA256, "bioencoder==1.0.5")
        self.loss = load_file(self.path).SupConLoss

    def version(self) -> str:
        """The package and the checksum of the file."""
        return f"bioencoder 1.0.5, SHA-256 {NOTEBOOK_SHA256[:12]}"


class SupContrastToday(_SupConCode):
    """Commit 66a8fe5: live where a path is given, else its recorded values."""

    name: ClassVar[str] = "supcontrast-today"
    title: ClassVar[str] = "the original SupCon code, commit 66a8fe5"
    path: Path | None = None
    records: Mapping[tuple[str, str], Outcome] = MappingProxyType({})

    def __init__(self, options: Mapping[str, str], device: str) -> None:
        """Load the file that the user names, or the recorded values.

        Raises:
            Unavailable: the path holds no losses.py, or nothing is recorded.
        """
        super().__init__(options, device)
        if "supcontrast" in options:
            path = Path(options["supcontrast"])
            self.path = path / "losses.py" if path.is_dir() else path
            self.loss = load_file(self.path).SupConLoss
            return
        recorded = fixtures_root() / RECORDED
        if not recorded.is_file():
            raise Unavailable(f"nothing is recorded in {RECORDED}; name its repository with --peer supcontrast=PATH")
        data = json.loads(recorded.read_text(encoding="utf-8"))
        if data.get("format") != RECORDED_FORMAT:
            raise Unavailable(f"{RECORDED}: $.format: expected {RECORDED_FORMAT!r}, got {data.get('format')!r}")
        self.torch = str(data["torch"])
        records = {}
        for record in data["records"]:
            # Texts are the shortest of the dtype; read in that dtype they are the numbers that were returned.
            number = np.dtype(record["dtype"]).type
            values = [float(number(v)) for v in record["values"]]
            gradient = np.array(record["gradient"], dtype=number).astype(np.float64)
            records[record["case"], record["dtype"]] = Outcome(values=values, gradient=gradient)
        self.records = records

    def version(self) -> str:
        """Live or recorded, and which copy."""
        if self.path is None:
            return f"recorded with torch {self.torch}, losses.py SHA-256 {TODAY_SHA256[:12]}"
        found = sha256(self.path)
        same = "the recorded revision" if found == TODAY_SHA256 else "NOT the recorded revision"
        return f"live, SHA-256 {found[:12]}, {same}"

    def refuses(self, case: Case) -> str | None:
        """What the class cannot be asked, or what was never recorded."""
        reason = super().refuses(case)
        if reason is None and case.option("no_positive") == "nan" and lonely(case):
            return "has no policy nan for anchors without positive"
        if reason is None and self.path is None and not any(key[0] == case.id for key in self.records):
            return "nothing is recorded for this case"
        return reason

    def evaluate(self, case: Case, dtype: str) -> Outcome:
        """The live outcome, or the recorded one."""
        return super().evaluate(case, dtype) if self.path is not None else self.records[case.id, dtype]


def _shortest(values: Any, dtype: str) -> Any:
    """Numbers of a dtype as JSON, each the shortest decimal that it is nearest to; non-finite ones as texts."""
    if isinstance(values, (list, np.ndarray)):
        return [_shortest(v, dtype) for v in values]
    return float(str(np.dtype(dtype).type(values))) if math.isfinite(values) else str(float(values))


@one_thread()
def record(cases: Sequence[Case], path: str) -> dict[str, Any]:
    """Run a revision live on every case that it can be asked, and put down what it returned.

    Args:
        cases: to run.
        path: of the repository, or of its losses.py.

    Returns:
        The JSON object of ``fixtures/recorded/supcontrast-today.json``. Its ``sha256`` is that of the file which ran;
        ``commit`` is None where that is not the revision whose checksum is known.

    Raises:
        Unavailable: there is no such file, or it cannot be loaded, or it breaks on a case.
    """
    live = SupContrastToday({"supcontrast": path}, "cpu")
    assert live.path is not None  # a path was given
    checksum = sha256(live.path)
    records = []
    for case in cases:
        for dtype in live.dtypes:
            if case.n > LARGEST_RECORDED or live.refuses(case) is not None or not case.holds_in(dtype):
                continue
            try:
                outcome = live.evaluate(case, dtype)
            except Exception as error:  # outside code may raise anything
                message = f"{live.path} breaks on {case.id}, {dtype}: {type(error).__name__}: {error}"
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
