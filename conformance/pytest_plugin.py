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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .judge.adopting import CaseCheck, Suite

MARK = "pairproof"
PROPERTY = "pairproof"
"""Name of the property of a test's report in which a check is told: to whoever counts, and in JUnit files."""
ASKED = "pairproof-asked"
"""The same of what was asked for, which a test that ends before its check tells as well."""

FIXTURE = "check"
_OPTIONS = (
    *("target", "loss", "call", "arrays", "temperature", "normalised"),
    *("set", "case", "dtype", "device", "limit", "checks"),
)
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
        "cases": (cases,) if isinstance(cases, str) else tuple(cases),
        "dtypes": (dtypes,) if isinstance(dtypes, str) else tuple(dtypes),
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
    group = parser.getgroup(
        "pairproof",
        "pairproof: a contrastive loss held to its proved values. These options are for pytest --pyargs"
        " pairproof.conformance, and for tests whose parametrize names no target.",
    )
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
    add("--pairproof-device", metavar="DEVICE", help="torch device (cpu).")
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
        said = [name for name in _OPTIONS if config.getoption(f"--pairproof-{name}") not in (None, [])]
        options = [] if config.option.collectonly else [f"--pairproof-{name}" for name in said]
        config.pluginmanager.register(Tally(options), "pairproof-tally")


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
            from .judge.adopting import Suite
        except ImportError as error:
            raise pytest.UsageError(
                f'pairproof: {error.name or error} is not installed: pip install "pairproof[verify]"'
            ) from None
        said = config.getoption("--pairproof-deviations")
        config.stash[_SUITE] = Suite(Path(said) if said else None, config.rootpath)
        config.add_cleanup(config.stash[_SUITE].close)
    return config.stash[_SUITE]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each case and dtype that a mark asks for."""
    marks = list(metafunc.definition.iter_markers(MARK))
    if not marks:
        return
    found: list[CaseCheck] = []
    try:
        if FIXTURE not in metafunc.fixturenames:
            raise pytest.UsageError(f"{metafunc.definition.nodeid}: takes no argument named {FIXTURE}")
        for number, mark in enumerate(reversed(marks)):
            said = _said(metafunc.config, mark.kwargs)
            given = {**mark.kwargs, **said}
            found += _suite(metafunc.config).checks(given, number, said=bool(said))
    except pytest.UsageError as error:
        # Said in a line, where a collector's other errors are shown with their tracebacks.
        raise pytest.Collector.CollectError(f"pairproof: {error}") from None
    several = len({id(check.asked) for check in found}) > 1
    for check in found:
        # Ids that pytest would have to number could not be told apart from others'.
        check.id = f"{check.asked.loss}-{check.asked.number}-{check.name}" if several else check.name
    metafunc.parametrize(FIXTURE, found, ids=[check.id for check in found])


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
                f"--pairproof-{name} is missing: pytest --pyargs pairproof.conformance"
                " --pairproof-target=mylib.losses:MyLoss --pairproof-loss=supcon"
            )
    settings: dict[str, object] = {}
    for text in config.getoption("--pairproof-set"):
        key, _, value = text.partition("=")
        if not key or not value:
            raise pytest.UsageError(f"--pairproof-set: expected KEY=VALUE, got {text!r}")
        before = settings.get(key)
        settings[key] = value if before is None else (*before, value) if isinstance(before, tuple) else (before, value)
    said = {
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
    return {name: value for name, value in said.items() if value not in (None, (), {})}


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


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tell the reports of a test what was asked for, whether or not it comes to its check."""
    check = _check_of(item)
    if check is not None:
        check.begin(item.nodeid)
        item.user_properties[:] = [kept for kept in item.user_properties if kept[0] not in (PROPERTY, ASKED)]
        item.user_properties.append((ASKED, json.dumps(check.asking)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Tell the report of a test how its check ended; a test that asked for no check has proved nothing."""
    check = _check_of(item)
    if check is None:
        return (yield)
    try:
        result = yield
    finally:
        if check.told is not None:
            item.user_properties.append((PROPERTY, json.dumps(check.told)))
    if check.told is None:
        pytest.fail("the test did not call check(), so nothing was judged", pytrace=False)
    return result


@dataclass
class _Asked:
    """What was reported of the checks that one mark asks for.

    Attributes:
        of: how many tests there are of it.
        asserted: how many checks must be judged; None says nothing.
        title: of whom it asks.
        statuses: how each test's check ended, by its id.
        before: the tests that ended before their check.
    """

    of: int
    asserted: int | None
    title: str
    statuses: dict[str, str] = field(default_factory=dict)
    before: set[str] = field(default_factory=set)

    @property
    def missing(self) -> int:
        """How many of its tests did not run."""
        return self.of - len(self.before | self.statuses.keys())

    @property
    def judged(self) -> int:
        """How many checks were judged."""
        return sum(status != "skipped" for status in self.statuses.values())

    def problems(self) -> list[str]:
        """What is wrong beyond the tests that failed."""
        found: list[str] = []
        if self.missing:
            return found
        if not self.judged:
            found.append("none of its checks could be judged" if self.statuses else "none of its checks was judged")
        if self.asserted is not None and self.judged != self.asserted:
            found.append(f"{self.judged} checks were judged where {self.asserted} are asserted")
        return found


@dataclass
class _Judged:
    """What was reported of one target as one loss, in the tests of one mark.

    Attributes:
        asked: the mark.
        declared: what is declared of it, by place, in words.
        met: the places of the declarations that a check met.
        notes: what was guessed, and what was not judged.
        whole: whether nothing was filtered by case or dtype.
        statuses: how each test's check ended, by its id.
        reasons: why tests were skipped.
    """

    asked: _Asked
    declared: Mapping[str, str]
    whole: bool
    notes: list[str] = field(default_factory=list)
    statuses: dict[str, str] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    met: set[str] = field(default_factory=set)

    @property
    def judged(self) -> int:
        """How many checks were judged."""
        return sum(status != "skipped" for status in self.statuses.values())

    def stale(self, met: Collection[str]) -> list[str]:
        """The declarations that no check met, given those that checks of this target met."""
        if self.asked.missing or not self.whole:
            return []
        return [f"{place}: meets no check: remove it" for place in self.declared if place not in met]


class Tally:
    """What the tests told: counted in the process that reports, whichever processes ran them."""

    def __init__(self, said: Sequence[str]) -> None:
        """Begin to count.

        Args:
            said: the options that the command line has.
        """
        self.said, self.taken = said, False
        self.asked: dict[str, _Asked] = {}
        """By mark."""
        self.groups: dict[tuple[str, str], _Judged] = {}
        """By mark and target."""
        self.aside: dict[str, str] = {}

    def expect(self, node: str, asked: Mapping[str, Any], *, ended: bool) -> _Asked:
        """Take in that a test belongs to a mark, and whether it ended before its check."""
        mark = self.asked.setdefault(asked["group"], _Asked(asked["of"], asked["asserted"], asked["title"]))
        self.taken = self.taken or asked["said"]
        if ended:
            mark.before.add(node)
        return mark

    def add(self, node: str, told: Mapping[str, Any]) -> None:
        """Count one check, of the test with this id; of a test that is repeated the last one."""
        mark = self.expect(node, told, ended=False)
        key = told["group"], told["title"]
        if key not in self.groups:
            self.groups[key] = _Judged(mark, told["declared"], told["whole"])
        group = self.groups[key]
        if told["status"] == "skipped" and node not in group.statuses:
            group.reasons[told["message"]] += 1
        mark.statuses[node] = group.statuses[node] = told["status"]
        group.notes += [note for note in told["notes"] if note not in group.notes]
        group.met |= set(told["met"])
        self.aside |= told["aside"]

    def problems(self) -> list[str]:
        """What is wrong beyond the tests that failed, with whose it is."""
        found = []
        for name, mark in self.asked.items():
            titles = [title for group, title in self.groups if group == name] or [mark.title]
            found += [f"{', '.join(titles)}: {problem}" for problem in mark.problems()]
        for (_, title), group in self.groups.items():
            alike = [other for (_, name), other in self.groups.items() if name == title]
            met = set().union(*(other.met for other in alike))
            unsure = any(other.asked.missing for other in alike)
            found += [f"{title}: {problem}" for problem in group.stale(group.declared if unsure else met)]
        if self.said and not self.taken and self.asked:
            found.append(f"{', '.join(self.said)}: no test that ran took it, for each has a target of its own")
        elif "--pairproof-target" in self.said and not self.asked:
            found.append("--pairproof-target: no test that ran took it: pytest --pyargs pairproof.conformance has one")
        return list(dict.fromkeys(found))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count what a test told."""
        told = {name: json.loads(str(value)) for name, value in report.user_properties if name in (ASKED, PROPERTY)}
        if ASKED not in told or report.when == "teardown":
            return
        if report.when == "call" and PROPERTY in told:
            self.add(report.nodeid, told[PROPERTY])
        else:
            self.expect(report.nodeid, told[ASKED], ended=report.when == "call" or not report.passed)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run whose tests passed and whose counts or declarations are wrong."""
        if self.problems() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say how many checks of what ended how, and what was not judged."""
        problems = self.problems()
        if not self.asked and not problems:
            return
        terminalreporter.section("pairproof")
        for (_, title), group in self.groups.items():
            counts = ", ".join(f"{n} {status}" for status, n in sorted(Counter(group.statuses.values()).items()))
            terminalreporter.line(f"{title}: {group.judged} of {group.asked.of} checks judged: {counts}")
            for note in group.notes:
                terminalreporter.line(f"  {note}")
            for reason, count in group.reasons.most_common():
                terminalreporter.line(f"  {count} skipped: {reason}")
            if group.asked.missing:
                terminalreporter.line(f"  {group.asked.missing} did not run: counts are not asserted")
            for place, words in group.declared.items():
                terminalreporter.line(f"  declared: {place}: {words}")
        for mark in self.asked.values():
            if mark.before:
                terminalreporter.line(f"{mark.title}: {len(mark.before)} tests ended before their check")
        spoken = {place for group in self.groups.values() for place in group.declared}
        for place, target in self.aside.items():
            if place not in spoken:
                whose = f"of {target}, which" if target else "of a loss that"
                terminalreporter.line(f"declared {whose} was not judged here: {place}")
        for problem in problems:
            terminalreporter.line(f"ERROR {problem}", red=True)
