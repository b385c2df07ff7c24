"""Tests marked slow are left out by the options in pyproject.toml; the last line of the output gives their number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

LEFT_OUT = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = 0


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Tests are deselected by name first, then by mark: only the second leaves out slow tests and no other."""
    if items and all(item.get_closest_marker("slow") for item in items):
        items[0].config.stash[LEFT_OUT] += len(items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["slow"] = session.config.stash[LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every worker of pytest-xdist collects all tests, so that any of them has the number."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("slow", 0)


def pytest_unconfigure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and config.stash.get(LEFT_OUT, 0) and not hasattr(config, "workerinput"):
        number, targets = config.stash[LEFT_OUT], "make test-all, make kernels-golden-slow"
        reporter.write_line(f'slow tests left out: {number}; to run them: -m "" ({targets})')
