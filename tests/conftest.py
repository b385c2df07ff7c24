"""Fixtures of several files, and hooks that print how many slow tests the options in pyproject.toml leave out."""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import pytest

from tests import snapshots

LEFT_OUT = pytest.StashKey[int]()
RESIDENT = pytest.StashKey[int]()

UNRETURNED = 300 * 2**20
"""Growth of the memory after which freed memory is returned to the system, in bytes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--machine", type=int, metavar="SEED", help="run each test on the simulated machine of this seed")


@pytest.fixture(autouse=True)
def _simulated_machine(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the test on a simulated machine (``tools/simulated.py``) if the option --machine is given."""
    seed = request.config.getoption("--machine", None)
    if seed is None:
        yield
        return
    from simulated import Machine

    with Machine(seed):
        yield


@pytest.fixture
def torch_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluate small batches in torch operations, as without Numba."""
    from pairproof.fast.engine import jit

    monkeypatch.setattr(jit.State, "failure", "turned off by a test")


def _end_at_once(process: int) -> None:
    if os.getpid() == process:  # not in a fork
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if "PYTEST_XDIST_WORKER" in os.environ:
    # The last thing that a worker does. Otherwise it frees every object, which takes seconds after a long run.
    atexit.register(_end_at_once, os.getpid())


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = config.stash[RESIDENT] = 0
    # Nothing that pytest allocates while it collects tests is garbage.
    gc.disable()


def _import_what_targets_import() -> None:
    """Import what usages make torch import and what small batches use. Otherwise, each forked target does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit.script is deprecated
        for name in ("torch._dynamo", "torch._decomp.decompositions_for_jvp", "torch.fx.experimental.symbolic_shapes"):
            importlib.import_module(name)
    importlib.import_module("pairproof.fast").warm_up()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude modules and tests from garbage collection, and collect garbage less often.

    Runs of pytest inside tests collect garbage often. Proofs and references allocate many small objects, none of them
    garbage.
    """
    if "PYTEST_XDIST_WORKER" in os.environ and not session.config.getoption("markexpr"):  # slow tests judge often
        _import_what_targets_import()
    gc.enable()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out the slow ones
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of each test with the mark ``quick(number)``, mark all but ``number`` parameter sets as slow.

    The sets are drawn at random, but are always the same. Evenly spaced sets could all have the same dtype, because
    parameters are often taken in turn.
    """
    sets: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        quick = item.get_closest_marker("quick")
        if quick and not item.get_closest_marker("slow"):
            sets.setdefault((item.nodeid.partition("[")[0], *quick.args), []).append(item)
    for (test, number), found in sets.items():
        left_out = max(0, len(found) - number)
        for item in Random(test).sample(found, left_out):
            item.add_marker(pytest.mark.slow)


def _resident_memory() -> int:
    """Return the memory that this process uses, in bytes; 0 elsewhere than on Linux."""
    statm = Path("/proc/self/statm")
    return int(statm.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Return freed memory. Each fork copies the page tables of all memory, and explanations free gigabytes."""
    if _resident_memory() > item.config.stash[RESIDENT] + UNRETURNED:
        gc.collect()
        if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)
        item.config.stash[RESIDENT] = _resident_memory()


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count the slow tests. Pytest deselects by name in one call and by mark in another, which has only slow tests."""
    if items and all(item.get_closest_marker("slow") for item in items):
        items[0].config.stash[LEFT_OUT] += len(items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    # Pytest collects garbage ten times before it ends, to find errors in finalizers: once is enough.
    gc.collect()
    gc.freeze()
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["slow"] = session.config.stash[LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the number from a worker of pytest-xdist; any will do, because every worker collects all tests."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("slow", 0)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, line in getattr(report, "user_properties", ()):
                if name == snapshots.PROPERTY and report.when == "call":
                    terminalreporter.write_line(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and config.stash.get(LEFT_OUT, 0) and not hasattr(config, "workerinput"):
        number, targets = config.stash[LEFT_OUT], "make test-all, make kernels-golden-slow"
        reporter.write_line(f'slow tests left out: {number}; to run them: -m "" ({targets})')


@pytest.fixture
def without_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not search for the reasons of failures, for tests of verdicts: the search takes longer than the check."""
    from pairproof.conformance.diagnose.explain import Diagnosis
    from pairproof.conformance.judge import check

    monkeypatch.setattr(check, "find_reasons", lambda observations, known: Diagnosis())


@pytest.fixture
def verdict_only(without_reasons: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither search for the reasons of failures nor shrink a random batch that fails."""
    from pairproof.conformance.judge import check

    monkeypatch.setattr(check, "smallest_failure", lambda *given: None)


@pytest.fixture
def in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run targets in this process, for tests of verdicts: forking twice takes longer than a small check.

    A test that also requests ``own_process`` keeps the process of the target. Modules in the folders of targets are
    removed after the test, because a later test may have another module of the same name. JAX is not tried: its threads
    in this process would stop forks of later tests.
    """
    if "own_process" in request.fixturenames:
        yield
        return
    from pairproof.conformance.implementations import callable as loading
    from pairproof.conformance.implementations import child

    def import_jax() -> NoReturn:
        raise child.TargetError("jax is not imported in the process of the tests")

    class Here(child.Child):
        """Answers requests in this process; errors and answers are handled as those of a worker process."""

        def __init__(self, load: Any, limit: float | None) -> None:
            self._deaths = self._owner = self._worker = self._spawner = 0
            self.last_death, self._warned = "", set()
            try:
                self.facts, self._serve = load()
            except Exception as error:
                text = " ".join(line.strip() for line in child.described(error).splitlines())
                self._result({"error": text, "misused": isinstance(error, child.TargetMisused)}, "facts")

        def ask(self, *asked: Any) -> Any:
            try:
                answer = {"result": self._serve(*asked)}
            except Exception as error:
                answer = {"error": child.described(error), "late": isinstance(error, child.Overtime)}
            return self._result(json.loads(json.dumps(answer)), "result")

    folders, names = list(sys.path), set(sys.modules)
    monkeypatch.setattr(child, "Child", Here)
    monkeypatch.setattr(loading, "import_jax", import_jax)
    monkeypatch.setattr(sys, "path", list(folders))
    yield
    for name in set(sys.modules) - names:
        file = getattr(sys.modules[name], "__file__", None)
        if "." not in name and file and Path(file).name != "__init__.py" and str(Path(file).parent) not in folders:
            del sys.modules[name]


@pytest.fixture(scope="session")
def _jax() -> None:
    """Import jax, if it is installed. A run of ``pytester`` forgets its imports, and a second import of jax aborts."""
    with suppress(ImportError):
        importlib.import_module("jax")


@pytest.fixture
def pytester(_jax: None, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Run pytest without the plugin of hypothesis, which imports hypothesis again in every run."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest")
    return pytester


@pytest.fixture
def own_process() -> None:
    """Run targets in their own process, although the other tests of the file do not."""


PROVED = 1200
"""Maximum number of random batches whose proofs are kept: those of about a dozen checks, some 600 MB."""


@pytest.fixture(scope="session")
def proved_once() -> Iterator[None]:
    """Prove each random batch once in a process, and evaluate its rounding errors once.

    This takes most of the time of a check. Only the latest ``PROVED`` batches with a seed of one digit are kept. Those
    of random seeds never occur again, and forks of a larger process take longer.
    """
    from pairproof.conformance.judge import fresh, proofs

    with_proof, proved = fresh.with_proof, dict[tuple[Any, ...], Any]()

    def once(case: Any) -> Any:
        if not re.match(r"[a-z]+-\d-", case.id):
            return with_proof(case)
        key = case.id, proofs._content(case), repr(case.keywords)
        proved[key] = proved.pop(key, None) or with_proof(case)
        if len(proved) > PROVED:
            del proved[next(iter(proved))]
        return replace(proved[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fresh, "with_proof", once)
        patch.setattr(fresh, "LEAST_AHEAD", math.inf)
        yield
