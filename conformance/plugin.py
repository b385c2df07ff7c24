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
    from .adopting import CaseCheck, Suite

MARK = "pairproof"
PROPERTY = "pairproof"
"""Name of the property of a test's report in which a check is told: to whoever counts, and in JUnit files."""

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
        config.pluginmanager.register(Tally([f"--pairproof-{name}" for name in said]), "pairproof-tally")


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
        statuses: how each test ended, by its id.
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
    statuses: dict[str, str] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    met: set[str] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        """Whether every test of it has run."""
        return len(self.statuses) == self.of

    @property
    def judged(self) -> int:
        """How many checks were judged."""
        return sum(status != "skipped" for status in self.statuses.values())

    def problems(self, met: Collection[str]) -> list[str]:
        """What is wrong beyond the tests that failed, given the declarations that checks of this target met."""
        if not self.complete:
            return []
        found = []
        if not self.judged:
            found.append("none of its checks could be judged")
        if self.asserted is not None and self.judged != self.asserted:
            found.append(f"{self.judged} checks were judged where {self.asserted} are asserted")
        if self.whole:
            stale = [place for place in self.declared if place not in met]
            found += [f"{place}: meets no check: remove it" for place in stale]
        return found


class Tally:
    """What the tests told: counted in the process that reports, whichever processes ran them."""

    def __init__(self, said: Sequence[str]) -> None:
        """Begin to count.

        Args:
            said: the options that the command line has.
        """
        self.said, self.taken = said, False
        self.groups: dict[tuple[str, str], _Judged] = {}
        """By mark and target."""
        self.aside: dict[str, str] = {}

    def add(self, node: str, told: Mapping[str, Any]) -> None:
        """Count one check, of the test with this id; of a test that is repeated the last one."""
        key = told["group"], told["title"]
        if key not in self.groups:
            self.groups[key] = _Judged(told["of"], told["asserted"], told["declared"], told["notes"], told["whole"])
        group = self.groups[key]
        if told["status"] == "skipped" and node not in group.statuses:
            group.reasons[told["message"]] += 1
        group.statuses[node] = told["status"]
        group.met |= set(told["met"])
        self.aside |= told["aside"]
        self.taken = self.taken or told["said"]

    def problems(self) -> list[str]:
        """What is wrong beyond the tests that failed, with whose it is."""
        found = []
        for (_, title), group in self.groups.items():
            alike = [other for (_, name), other in self.groups.items() if name == title]
            met = set().union(*(other.met for other in alike))
            unsure = not all(other.complete for other in alike)
            found += [f"{title}: {problem}" for problem in group.problems(group.declared if unsure else met)]
        if self.said and self.groups and not self.taken:
            found.append(f"{', '.join(self.said)}: no test that ran took it, for each has a target of its own")
        return list(dict.fromkeys(found))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count what a test told."""
        told = [value for name, value in report.user_properties if name == PROPERTY]
        if report.when == "call" and told:
            self.add(report.nodeid, json.loads(str(told[-1])))

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
            counts = ", ".join(f"{n} {status}" for status, n in sorted(Counter(group.statuses.values()).items()))
            terminalreporter.line(f"{title}: {group.judged} of {group.of} checks judged: {counts}")
            for note in group.notes:
                terminalreporter.line(f"  {note}")
            for reason, count in group.reasons.most_common():
                terminalreporter.line(f"  {count} skipped: {reason}")
            if not group.complete:
                terminalreporter.line(f"  {group.of - len(group.statuses)} did not run: counts are not asserted")
            for place, words in group.declared.items():
                terminalreporter.line(f"  declared: {place}: {words}")
        spoken = {place for group in self.groups.values() for place in group.declared}
        for place, target in self.aside.items():
            if place not in spoken:
                whose = f"of {target}, which" if target else "of a loss that"
                terminalreporter.line(f"declared {whose} was not judged here: {place}")
        for problem in self.problems():
            terminalreporter.line(f"ERROR {problem}", red=True)
