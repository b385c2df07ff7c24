"""A pytest plugin that runs a library's own tests with our classes in place of the library's, and records the outcomes.

`tests/snapshots.py` loads it in a process of its own, with ``-p snapshots_plugin``.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

SETTINGS = "PAIRPROOF_SNAPSHOT_RUN"
"""Environment variable: the settings of a run as JSON, with the keys "replaced" and "report"."""

OUTCOMES: dict[str, str] = {}
CALLS: Counter[str] = Counter()


def pytest_load_initial_conftests() -> None:
    """Replace the classes before any test or conftest imports them."""
    for theirs, ours in settings()["replaced"].items():
        replace(theirs, ours)


def settings() -> dict[str, Any]:
    return json.loads(os.environ[SETTINGS])


def replace(theirs: str, ours: str) -> None:
    """Put our class, or our module, in every module of the library that has theirs. Both are "module:name"."""
    original, replacement = found(theirs), found(ours)
    if original is replacement:
        raise ValueError(f"{theirs} is replaced with itself")
    library = theirs.partition(".")[0].partition(":")[0]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == library:
            for attribute, value in list(vars(module).items()):
                if value is original:
                    setattr(module, attribute, replacement)

    def count(module: torch.nn.Module, *given: Any) -> None:
        if isinstance(module, replacement):
            CALLS[getattr(module, "evaluated_by", None) or "unknown"] += 1

    if isinstance(replacement, type):
        torch.nn.modules.module.register_module_forward_hook(count)


def found(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Start every test with the same random numbers, with our classes and without."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the tests draw from numpy's global generator
    torch.manual_seed(0)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed or report.skipped or report.when == "call":
        outcome = "failed" if report.failed else report.outcome
        if OUTCOMES.get(report.nodeid) != "failed":
            OUTCOMES[report.nodeid] = outcome


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        OUTCOMES[report.nodeid] = "failed"


def pytest_sessionfinish() -> None:
    Path(settings()["report"]).write_text(json.dumps({"tests": OUTCOMES, "calls": CALLS}))
