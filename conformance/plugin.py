"""The pytest plugin: a loss held to every case of the suite, one test for each case and dtype.

In a project's own test file::

    import pairproof.conformance

    from mylib.losses import MyLoss

    @pairproof.conformance.parametrize(MyLoss, loss="supcon")
    def test_conformance(check):
        check()

Without one: ``pytest --pyargs pairproof.conformance --pairproof-target=mylib.losses:MyLoss --pairproof-loss=supcon``.

pytest loads this module wherever pairproof is installed, so it imports nothing but pytest until a test is of the suite.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .adopting import CaseCheck, Suite

MARK = "pairproof"
PROPERTY = "pairproof"
"""Name of the property of a test's report in which a check is told: to whoever counts, and in JUnit files."""

FIXTURE = "check"
_SUITE = pytest.StashKey["Suite"]()


def parametrize(
    target: object | None = None,
    *,
    loss: str | None = None,
    call: str | None = None,
    arrays: str | None = None,
    temperature: float | None = None,
    normalised: bool | None = None,
    settings: Mapping[str, object] | None = None,
    cases: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    device: str = "cpu",
    limit: float | None = None,
    checks: int | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make one test of each case and dtype of a loss out of a test function, which is given ``check``.

    ``check()`` judges the target, ``check(other)`` another in its place. It passes the test, or ends it: a failure says
    which term differs and by how much, a case that is not claimed is skipped with its reason, a declared deviation
    is reported as an expected failure.

    Args:
        target: a function, a class that is constructed with its options, an instance, "package.module:attribute" or
            "file.py:attribute". None: what ``check`` is given, or ``--pairproof-target``.
        loss: short name in the catalogue; None: ``--pairproof-loss``.
        call: how it is called: labels, features, views, stacked, pairs or command; guessed when None.
        arrays: torch, numpy or jax; guessed when None.
        temperature: the one that is built in, where no parameter takes a case's.
        normalised: whether rows are brought to norm 1 under cosine before it is called.
        settings: options that it claims, by name; a tuple for several values, "*" where it takes the option by keyword.
        cases: ids or shell patterns; nothing means all.
        dtypes: nothing means float64 and float32.
        device: torch device.
        limit: seconds that a case may take.
        checks: how many checks must be judged, neither more nor fewer, when all of them run; None asserts only that
            there are any.

    Returns:
        The decorator.
    """
    given = {
        "target": target,
        "loss": loss,
        "call": call,
        "arrays": arrays,
        "temperature": temperature,
        "normalised": normalised,
        "settings": dict(settings or {}),
        "cases": tuple(cases),
        "dtypes": tuple(dtypes),
        "device": device,
        "limit": limit,
        "checks": checks,
    }

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        decorated: Callable[..., None] = pytest.mark.pairproof(**given)(function)
        return decorated

    return decorate


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that stand for a test file."""
    group = parser.getgroup("pairproof", "pairproof: a contrastive loss held to its proved values")
    add = group.addoption
    add("--pairproof-target", metavar="TARGET", help="package.module:attribute or file.py:attribute.")
    add("--pairproof-loss", metavar="LOSS", help="What it is held to: supcon, nt_xent, ...; see: pairproof list.")
    add("--pairproof-call", metavar="HOW", help="labels, features, views, stacked, pairs, command; else guessed.")
    add("--pairproof-arrays", metavar="KIND", help="torch, numpy or jax; guessed otherwise.")
    add("--pairproof-temperature", metavar="T", type=float, help="The temperature that is built in.")
    add(
        "--pairproof-normalised",
        action="store_true",
        default=None,
        help="It expects rows of norm 1, which cases of cosine similarity then bring.",
    )
    add(
        "--pairproof-set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="An option that it claims (repeatable); KEY=* says that it takes the option by keyword.",
    )
    add("--pairproof-case", metavar="ID", action="append", default=[], help="Only this case; * and ? match.")
    add("--pairproof-dtype", metavar="DTYPE", action="append", default=[], help="Default: float64 and float32.")
    add("--pairproof-device", metavar="DEVICE", default="cpu", help="torch device.")
    add("--pairproof-limit", metavar="SECONDS", type=float, help="Seconds that a case may take (60).")
    add(
        "--pairproof-deviations",
        metavar="FILE",
        help="TOML file of declared deviations, in place of tool.pairproof in pyproject.toml.",
    )
    add(
        "--pairproof-checks",
        metavar="N",
        type=int,
        help="How many checks must be judged, neither more nor fewer.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known; count what the tests report, in the process that prints it."""
    config.addinivalue_line("markers", "pairproof: made by pairproof.conformance.parametrize")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Tally(), "pairproof-tally")


def pytest_report_header(config: pytest.Config) -> str | None:
    """Name what is tested, where the command line says it; a test file's targets are named once they are collected."""
    target = config.getoption("--pairproof-target")
    if target is None:
        return None
    return f"pairproof {_version()}: {target} as {config.getoption('--pairproof-loss')}"


def _version() -> str:
    try:
        return importlib.metadata.version("pairproof")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _suite(config: pytest.Config) -> Suite:
    """The cases and the declarations, read when the first test of the suite is collected."""
    if _SUITE not in config.stash:
        try:
            from .adopting import Suite
        except ImportError as error:
            raise pytest.UsageError(
                f'pairproof: {error.name} is not installed: pip install "pairproof[verify]"'
            ) from None
        said = config.getoption("--pairproof-deviations")
        project = config.rootpath / "pyproject.toml"
        path = Path(said) if said else project if project.is_file() else None
        config.stash[_SUITE] = Suite(path)
    return config.stash[_SUITE]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each case and dtype that a mark asks for."""
    marks = list(metafunc.definition.iter_markers(MARK))
    if not marks:
        return
    if FIXTURE not in metafunc.fixturenames:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: takes no argument named {FIXTURE}")
    found: list[CaseCheck] = []
    for mark in reversed(marks):
        found += _suite(metafunc.config).checks({**mark.kwargs, **_said(metafunc.config, mark.kwargs)})
    several = len({check.asked.loss for check in found}) > 1
    names = [f"{check.asked.loss}-{check.name}" if several else check.name for check in found]
    metafunc.parametrize(FIXTURE, found, ids=names)


def _said(config: pytest.Config, given: Mapping[str, Any]) -> dict[str, Any]:
    """What the command line says for a mark: the target, where the mark has none, and all that belongs to it."""
    if given.get("target") is not None:
        return {}
    target, loss = config.getoption("--pairproof-target"), config.getoption("--pairproof-loss")
    if given.get("loss") is not None and (target is None or loss not in (None, given["loss"])):
        return {}
    for name, value in (("target", target), ("loss", loss or given.get("loss"))):
        if value is None:
            raise pytest.UsageError(
                f"pairproof: --pairproof-{name} is missing: pytest --pyargs pairproof.conformance"
                " --pairproof-target=mylib.losses:MyLoss --pairproof-loss=supcon"
            )
    settings: dict[str, object] = {}
    for text in config.getoption("--pairproof-set"):
        key, _, value = text.partition("=")
        if not key or not value:
            raise pytest.UsageError(f"--pairproof-set: expected KEY=VALUE, got {text!r}")
        before = settings.get(key)
        settings[key] = value if before is None else (*before, value) if isinstance(before, tuple) else (before, value)
    return {
        "target": target,
        "loss": loss or given.get("loss"),
        "settings": settings,
        "cases": tuple(config.getoption("--pairproof-case")),
        "dtypes": tuple(config.getoption("--pairproof-dtype")),
        **{
            name: config.getoption(f"--pairproof-{name}")
            for name in ("call", "arrays", "temperature", "normalised", "device", "limit", "checks")
        },
    }


def pytest_report_collectionfinish(config: pytest.Config, items: Sequence[pytest.Item]) -> list[str]:
    """Name what is tested, with the number of its checks."""
    checks = [check for item in items if (check := _check_of(item)) is not None]
    counts = Counter(check.asked.title for check in checks)
    if not counts:
        return []
    lines = [f"pairproof {_version()}: {title}, {count} checks" for title, count in counts.items()]
    return [*lines, *_suite(config).describe()]


def _check_of(item: pytest.Item) -> CaseCheck | None:
    if next(item.iter_markers(MARK), None) is None:
        return None
    found: CaseCheck | None = item.callspec.params.get(FIXTURE) if hasattr(item, "callspec") else None
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Tell the report of a test how its check ended; a test that asked for no check has proved nothing."""
    check = _check_of(item)
    if check is None:
        return (yield)
    check.begin(item.nodeid)
    try:
        result = yield
    finally:
        if check.told is not None:
            item.user_properties.append((PROPERTY, json.dumps(check.told)))
    if check.told is None:
        pytest.fail("the test did not call check(), so nothing was judged", pytrace=False)
    return result


@dataclass
class _Judged:
    """What was reported of one target as one loss.

    Attributes:
        of: how many tests there are of it.
        asserted: how many checks must be judged; None says nothing.
        statuses: how the tests ended.
        reasons: why tests were skipped.
        declared: what is declared of it, by place, in words.
        met: the places of the declarations that a check met.
        notes: what was guessed.
        whole: whether nothing was filtered by case or dtype.
    """

    of: int
    asserted: int | None
    declared: Mapping[str, str]
    notes: Sequence[str]
    whole: bool
    statuses: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    met: set[str] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        """Whether every test of it has run."""
        return self.statuses.total() == self.of

    @property
    def judged(self) -> int:
        """How many checks were judged."""
        return self.statuses.total() - self.statuses["skipped"]

    def problems(self) -> list[str]:
        """What is wrong beyond the tests that failed."""
        if not self.complete:
            return []
        found = []
        if not self.judged:
            found.append("none of its checks could be judged")
        if self.asserted is not None and self.judged != self.asserted:
            found.append(f"{self.judged} checks were judged where {self.asserted} are asserted")
        if self.whole:
            stale = [place for place in self.declared if place not in self.met]
            found += [f"{place}: meets no check: remove it" for place in stale]
        return found


class Tally:
    """What the tests told: counted in the process that reports, whichever processes ran them."""

    def __init__(self) -> None:
        self.groups: dict[tuple[str, str], _Judged] = {}
        """By test function and target."""

    def add(self, test: str, told: Mapping[str, Any]) -> None:
        """Count one check of a test function."""
        group = self.groups.get((test, told["title"]))
        if group is None:
            group = _Judged(told["of"], told["asserted"], told["declared"], told["notes"], told["whole"])
            self.groups[test, told["title"]] = group
        group.statuses[told["status"]] += 1
        if told["status"] == "skipped":
            group.reasons[told["message"]] += 1
        group.met |= set(told["met"])

    def problems(self) -> list[str]:
        """What is wrong beyond the tests that failed, with whose it is."""
        return [f"{title}: {problem}" for (_, title), group in self.groups.items() for problem in group.problems()]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count what a test told."""
        if report.when == "call":
            for name, value in report.user_properties:
                if name == PROPERTY:
                    self.add(report.nodeid.partition("[")[0], json.loads(str(value)))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run whose tests passed and whose counts or declarations are wrong."""
        if self.problems() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say how many checks of what ended how, and what was not judged."""
        if not self.groups:
            return
        terminalreporter.section("pairproof")
        for (_, title), group in self.groups.items():
            counts = ", ".join(f"{n} {status}" for status, n in sorted(group.statuses.items()))
            terminalreporter.line(f"{title}: {group.judged} of {group.of} checks judged: {counts}")
            for note in group.notes:
                terminalreporter.line(f"  {note}")
            for reason, count in group.reasons.most_common():
                terminalreporter.line(f"  {count} skipped: {reason}")
            if not group.complete:
                terminalreporter.line(f"  {group.of - group.statuses.total()} did not run: counts are not asserted")
            for place, words in group.declared.items():
                terminalreporter.line(f"  declared: {place}: {words}")
        for problem in self.problems():
            terminalreporter.line(f"ERROR {problem}", red=True)
