"""Runs a library's own test files with our classes in place of the library's.

The files are not in this repository. The environment variable ``PAIRPROOF_SNAPSHOTS`` names a folder with a copy of
each library's repository; ``snapshots.json`` names the repository, the commit, and the checksum of each file that a
test needs. A file that is absent or differs skips the test, with the reason.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
WHERE = "PAIRPROOF_SNAPSHOTS"
LIBRARIES: dict[str, dict[str, Any]] = json.loads((HERE / "snapshots.json").read_text())

PROPERTY = "own tests of a library"
"""Name of the property of a test's report whose value is a line of figures. `conftest.py` prints these lines."""


@dataclass(frozen=True)
class Outcomes:
    """The outcomes of one run of a library's tests.

    Attributes:
        tests: "passed", "failed" or "skipped" for the id of each test.
        calls: how many calls of our classes the engine ("engine") and torch ("plain") evaluated.
    """

    tests: dict[str, str]
    calls: dict[str, int]

    def having(self, outcome: str) -> set[str]:
        return {test for test, given in self.tests.items() if given == outcome}


def snapshot(library: str) -> Path:
    """Return the folder of a library, or skip the test if a file of `snapshots.json` is absent or differs."""
    place = os.environ.get(WHERE)
    source = LIBRARIES[library]
    if place is None:
        pytest.skip(f"{WHERE} is not set: the folder with copies of the libraries' repositories")
    folder = Path(place) / library
    for file, checksum in source["files"].items():
        if not (folder / file).is_file():
            pytest.skip(f"{WHERE} has no {library}/{file}: copy {source['repository']} at {source['commit']}")
        if hashlib.sha256((folder / file).read_bytes()).hexdigest() != checksum:
            pytest.skip(f"{WHERE}: {library}/{file} is not that of {source['repository']} at {source['commit']}")
    return folder


def run(
    library: str,
    tests: Sequence[str],
    replaced: Mapping[str, str],
    scratch: Path,
    *,
    environment: Mapping[str, str],
    plugins: Sequence[str],
    path: Sequence[str],
    limit: float,
) -> Outcomes:
    """Run the tests once, in a process of its own; `check_own_tests` explains the arguments."""
    folder, report = snapshot(library), scratch / "report.json"
    report.unlink(missing_ok=True)
    settings = json.dumps({"replaced": dict(replaced), "report": str(report)})
    paths = [str(HERE), *(str(folder / part) for part in path)]
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(folder)]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:pairproof", "-p", "snapshots_plugin"]
    for plugin in plugins:
        command += ["-p", plugin]
    done = subprocess.run(
        [*command, *(str(folder / test) for test in tests)],
        cwd=scratch,
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PAIRPROOF_SNAPSHOT_RUN": settings,
            "OMP_NUM_THREADS": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    if not report.is_file():
        raise AssertionError(f"pytest did not finish:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return Outcomes(**json.loads(report.read_text()))


def check_own_tests(
    library: str,
    tests: Sequence[str],
    replaced: Mapping[str, str],
    scratch: Path,
    record_property: Any,
    *,
    failing: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
    plugins: Sequence[str] = (),
    path: Sequence[str] = (),
    limit: float = 1800,
    unused: bool = False,
) -> None:
    """Run a library's tests with its own classes and with ours; the same tests must pass.

    Both runs start each test with the same random seeds. The figures of both are printed after pytest's summary.

    Args:
        library: a name of `snapshots.json`.
        tests: files, or ids of tests ("FILE::TEST"), relative to the library's folder.
        replaced: our class for each of theirs, both as "module:name". A class is replaced in every module of the
            library that has it.
        scratch: an empty folder, the working directory of both runs.
        record_property: the fixture of pytest.
        failing: the last parts of the ids of tests that fail with the library's own classes. All others must pass.
        environment: environment variables for both runs.
        plugins: further plugins for both runs, modules of this folder.
        path: folders of the library's copy to import from, such as "src", if the library is not installed.
        limit: seconds for one run.
        unused: whether the tests call our classes only in other processes, where calls are not counted.
    """
    given = {"environment": environment or {}, "plugins": plugins, "path": path, "limit": limit}
    theirs = run(library, tests, {}, scratch, **given)
    ours = run(library, tests, replaced, scratch, **given)
    calls = ", ".join(f"{number} {by}" for by, number in sorted(ours.calls.items()))
    names = ", ".join(Path(test).name for test in tests)
    record_property(
        PROPERTY,
        f"{library}, {names}: {len(theirs.having('passed'))} passed with its own classes, "
        f"{len(ours.having('passed'))} with ours (calls: {calls})",
    )
    assert theirs.having("passed"), f"no test of {names} passes with the library's own classes: {theirs.tests}"
    failed = {test for test in theirs.having("failed") if not test.endswith(tuple(failing))}
    assert not failed, f"these tests fail with the library's own classes: {sorted(failed)}"
    assert ours.having("passed") == theirs.having("passed"), (
        f"only with the library's own classes pass {sorted(theirs.having('passed') - ours.having('passed'))}, "
        f"only with ours {sorted(ours.having('passed') - theirs.having('passed'))}"
    )
    assert unused or sum(ours.calls.values()), f"{names} calls none of {sorted(replaced.values())}"
