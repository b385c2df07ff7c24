"""The pytest plugin: one test for each case and dtype on which a loss is judged.

In a project's own test file::

    import pairproof.conformance

    from mylib.losses import MyLoss

    @pairproof.conformance.parametrize(MyLoss, loss="supcon")
    def test_conformance(check):
        check()

Without one: ``pytest --pyargs pairproof.conformance --pairproof-target=mylib.losses:MyLoss --pairproof-loss=supcon``.

pytest loads this module wherever pairproof is installed, so it imports only pytest until a test asks for a check.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import pairproof

from .judge.options import CouldNotRun, Request, UsageError, option, options_of, takes
from .judge.results import Status, grouped, unused

if TYPE_CHECKING:
    from .implementations.base import Deviation
    from .implementations.callable import External
    from .judge.results import Check
    from .suite.cases import Case
    from .suite.golden import GoldenCase

MARK = "pairproof"
PROPERTY = "pairproof"
"""Name of the property of a test's report that says to which mark it belongs and how its check ended, as JSON."""
FIXTURE = "check"
_SUITE = pytest.StashKey["Suite"]()

Record = dict[str, Any]
"""What the last report of a test says: the mark to which it belongs, whether it ended, and how its check ended."""


@dataclass(frozen=True, kw_only=True)
class Mark(Request):
    """What one use of ``parametrize`` requests.

    Attributes:
        checks: How many checks must be judged, neither more nor fewer.

    Without ``checks`` it is only asserted that there are any; nothing is asserted unless all of them run.
    """

    checks: int | None = option(None, "--checks", metavar="N")

    @property
    def title(self) -> str:
        """The target and the loss, in words."""
        return f"{'a target that the test names' if self.target is None else self.name} as {self.loss}"


@takes(Mark)
def parametrize(  # noqa: D417 - its arguments are those of Mark
    *given: Any, **options: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make one test of each case and dtype of a loss out of a test function that takes the argument ``check``.

    ``check()`` judges the target, ``check(other)`` another in its place. It passes the test, or ends it: a failure says
    which term differs and by how much, a case that the target does not claim is skipped with the reason, a declared
    deviation is reported as an expected failure.

    Args:
        target: a function, a class that is constructed with its options, an instance, "package.module:attribute" or
            "file.py:attribute". None: the argument of ``check``, or ``--pairproof-target``.
        loss: short name in the catalogue; None: ``--pairproof-loss``.
        call: how the target is called: labels, features, views, stacked, pairs or command; guessed when None.
        arrays: torch, numpy or jax; guessed when None.
        temperature: the one that is built in, where the target takes none by keyword.
        normalised: whether rows are brought to norm 1 under cosine before the target is called.
        settings: options that the target claims, by name; a tuple for several values, "*" for an option that it takes
            by keyword.
        cases: ids or shell patterns; empty means all.
        dtypes: empty means float64 and float32.
        device: torch device.
        limit: seconds that one evaluation may take.
        deviations: TOML file of declared deviations; None: ``--pairproof-deviations``, or the nearest pyproject.toml.
        checks: how many checks must be judged, neither more nor fewer, when all of them run; None asserts only that
            there are any.

    Returns:
        The decorator.
    """
    mark = Mark(*given, **{name: value for name, value in options.items() if value is not None})
    return pytest.mark.pairproof.with_args(mark)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of a request."""
    group = parser.getgroup(
        "pairproof",
        "pairproof: a contrastive loss held to its proved values. These options are for pytest --pyargs"
        " pairproof.conformance, and for tests whose parametrize names no target.",
    )
    for keyword, one in options_of(Mark).items():
        form: dict[str, Any] = {"type": one.type if one.type in (int, float) else str, "metavar": one.metavar}
        if one.read:
            form = {"action": "append", "default": [], "metavar": one.metavar}
        elif one.type is bool:
            form = {"action": "store_true", "default": None}
        group.addoption(_flag(keyword), help=one.help, **form)


def _flag(keyword: str) -> str:
    flag, *_ = options_of(Mark)[keyword].flags or (keyword,)
    return f"--pairproof-{flag.lstrip('-').partition('/')[0]}"


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark, and the tally in the process that prints the summary."""
    config.addinivalue_line("markers", "pairproof: made by pairproof.conformance.parametrize")
    if not hasattr(config, "workerinput"):
        given = {} if config.option.collectonly else _given(config)
        config.pluginmanager.register(Tally([_flag(keyword) for keyword in given]), "pairproof-tally")


def _given(config: pytest.Config) -> dict[str, Any]:
    """The options of the command line that belong to a mark, as texts, by keyword."""
    values = {keyword: config.getoption(_flag(keyword)) for keyword in options_of(Mark) if keyword != "deviations"}
    return {keyword: value for keyword, value in values.items() if value not in (None, [])}


def pytest_report_header(config: pytest.Config) -> str | None:
    """Name the target of the command line; those of test files are named once they are collected."""
    target, loss = config.getoption("--pairproof-target"), config.getoption("--pairproof-loss")
    return f"pairproof {pairproof.__version__}: {target} as {loss}" if target else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each case and dtype that a mark requests."""
    marks: list[Mark] = [mark.args[0] for mark in metafunc.definition.iter_markers(MARK)]
    if not marks:
        return
    found: list[CaseCheck] = []
    try:
        if FIXTURE not in metafunc.fixturenames:
            raise UsageError(f"{metafunc.definition.nodeid}: takes no argument named {FIXTURE}")
        for number, mark in enumerate(reversed(marks)):
            found += _suite(metafunc.config).checks(mark, number)
    except UsageError as error:
        # pytest shows this error in one line, and a collector's other errors with their tracebacks.
        raise pytest.Collector.CollectError(f"pairproof: {error}") from None
    # Ids that pytest had to number would look like those of other marks.
    prefixes = [f"{check.group.mark.loss}-{check.group.number}-" if len(marks) > 1 else "" for check in found]
    metafunc.parametrize(FIXTURE, found, ids=[p + check.id for p, check in zip(prefixes, found, strict=True)])


def _from_command_line(config: pytest.Config, mark: Mark) -> dict[str, Any]:
    """The values that the command line sets in a mark without a target: the target, and all other options with it."""
    given = _given(config)
    target, loss = given.get("target"), given.get("loss", mark.loss)
    if mark.target is not None or (mark.loss and (target is None or loss != mark.loss)):
        return {}
    for name, value in (("target", target), ("loss", loss)):
        if not value:
            raise UsageError(
                f"--pairproof-{name} is missing: pytest --pyargs pairproof.conformance"
                " --pairproof-target=mylib.losses:MyLoss --pairproof-loss=supcon"
            )
    return {keyword: options_of(Mark)[keyword].value(value, _flag(keyword)) for keyword, value in given.items()}


def _suite(config: pytest.Config) -> Suite:
    """The suite, loaded when the first test that needs it is collected."""
    if _SUITE not in config.stash:
        try:
            config.stash[_SUITE] = Suite(config)
        except ImportError as error:
            missing = error.name or error
            raise UsageError(f'pairproof: {missing} is not installed: pip install "pairproof[verify]"') from None
    return config.stash[_SUITE]


def pytest_report_collectionfinish(config: pytest.Config, items: Sequence[pytest.Item]) -> list[str]:
    """Name what is tested, with the number of its checks."""
    groups = [check.group for item in items if (check := _check_of(item))]
    titles = Counter(group.mark.title for group in groups)
    declared = {group.file: len(group.entries) for group in groups if group.entries}
    return [
        *(f"pairproof {pairproof.__version__}: {title}, {count} checks" for title, count in titles.items()),
        *(f"declared deviations: {count} in {file}" for file, count in declared.items()),
    ]


def _check_of(item: pytest.Item) -> CaseCheck | None:
    found = item.callspec.params.get(FIXTURE) if hasattr(item, "callspec") else None
    return found if isinstance(found, CaseCheck) else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Put into the reports of a test to which mark it belongs, whether or not it reaches its check."""
    if check := _check_of(item):
        check.item = item
        check.report({})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that did not call its check."""
    result = yield
    if (check := _check_of(item)) and not check.called:
        pytest.fail("the test did not call check(), so nothing was judged", pytrace=False)
    return result


class Suite:
    """The cases of the losses that are tested, loaded once in a process, and the file of declared deviations."""

    def __init__(self, config: pytest.Config) -> None:
        """Load the cases.

        Raises:
            UsageError: a ``pyproject.toml`` is not TOML.
        """
        from .documents.load import load_worked
        from .judge.deviations import project_file

        self.config = config
        self.worked = load_worked()
        self.cases: dict[str, dict[Case, GoldenCase | None]] = {}
        self.explained = 0
        self.nearest = project_file(Path.cwd())
        given = config.getoption("--pairproof-deviations")
        self.file = Path(given) if given else project_file(config.rootpath) or self.nearest

    def checks(self, mark: Mark, number: int) -> list[CaseCheck]:
        """The checks that a mark requests, with what the command line says of it, in the order of the cases.

        Args:
            mark: as the test file has it.
            number: of the mark, among those of its test function.

        Raises:
            UsageError: an option is wrong, or no case is selected.
        """
        from .implementations.callable import External
        from .judge.check import chosen_cases
        from .judge.deviations import read_declarations
        from .judge.verify import load_cases
        from .suite.catalogue import LOSSES

        changes = _from_command_line(self.config, mark)
        mark = replace(mark, **changes)
        if not mark.loss:
            raise UsageError("pairproof.conformance.parametrize: loss is missing; known: " + ", ".join(LOSSES))
        file = mark.deviations or self.file
        # The command that repeats a check finds the nearest file itself.
        mark = replace(mark, deviations=None if file == self.nearest else file)
        if mark.loss not in self.cases:
            self.cases[mark.loss] = load_cases(self.worked, (mark.loss,))
        cases, dtypes = chosen_cases(mark, self.cases[mark.loss]), mark.dtypes or External.dtypes
        count = len(cases) * len(dtypes)
        record = {"of": count, "asserted": mark.checks, "overridden": bool(changes), "title": mark.title}
        group = Group(mark, self, number, record, file, read_declarations(file) if file else {})
        return [CaseCheck(group, case, dtype) for case in cases for dtype in dtypes]


@dataclass(eq=False)
class Group:
    """The checks of one mark.

    Attributes:
        mark: what it requests; the target is None where the test names it.
        suite: the cases.
        number: of the mark, among those of its test function.
        record: what the reports of all its tests say: how many checks there are and must be judged, whether the command
            line says anything of the mark, and its title.
        file: of the declared deviations.
        entries: of that file, by place.
        loaded: the mark's own target, and those that the test names by a text, by name.
    """

    mark: Mark
    suite: Suite
    number: int
    record: Record
    file: Path | None
    entries: dict[str, dict[str, Any]]
    loaded: dict[str, External] = field(default_factory=dict)

    @cached_property
    def deviations(self) -> tuple[Deviation, ...]:
        """The declared deviations, of whatever loss and target.

        Raises:
            UsageError: one of them names what does not exist.
        """
        from .judge.deviations import deviations
        from .judge.verify import load_cases

        return deviations(self.entries, load_cases(self.suite.worked)) if self.entries else ()

    def target(self, request: Request) -> External:
        """Load a target: once where it is named, or the mark's own.

        Raises:
            UsageError: an option contradicts it or is missing.
            CouldNotRun: it cannot be loaded, or the device cannot be used.
        """
        from .judge.check import load_target

        kept = isinstance(request.target, str) or request.target is self.mark.target
        if kept and request.name in self.loaded:
            return self.loaded[request.name]
        found = load_target(request, self.deviations)
        if kept:
            self.loaded[request.name] = found
            self.suite.config.add_cleanup(found.close)
        return found


@dataclass(eq=False)
class CaseCheck:
    """One case in one dtype: the argument ``check`` of a test function.

    Attributes:
        group: the checks to which it belongs.
        inputs: the case.
        dtype: of the inputs.
        called: whether the test called it.
    """

    group: Group
    inputs: Case
    dtype: str
    called: bool = False
    item: pytest.Item = field(init=False, repr=False)

    @property
    def case(self) -> str:
        """The id of the case."""
        return self.inputs.id

    @property
    def golden(self) -> GoldenCase | None:
        """The golden entry of the case, if it has one."""
        return self.group.suite.cases[self.inputs.loss][self.inputs]

    @property
    def id(self) -> str:
        """Its part of the test's id."""
        return f"{self.inputs.id}-{self.dtype}"

    def report(self, outcome: Mapping[str, Any]) -> None:
        """Put into the reports of the test how the check ended; nothing as long as it was not called."""
        self.called = bool(outcome)
        group = f"{self.item.nodeid.replace(self.id, '')} {self.group.number}"
        record = json.dumps({"group": group, **self.group.record, **outcome})
        others = [kept for kept in self.item.user_properties if kept[0] != PROPERTY]
        self.item.user_properties[:] = [*others, (PROPERTY, record)]

    def __call__(self, target: object | None = None) -> None:
        """Judge a target on this case, and end the test as the verdict says.

        Args:
            target: in place of the one of ``parametrize`` or of the command line.

        Raises:
            pytest.fail.Exception: it fails or errs, or is declared to and does not.
            pytest.skip.Exception: the case is not one that the target claims.
            pytest.xfail.Exception: it deviates as declared.
        """
        __tracebackhide__ = True
        from .implementations.base import one_thread
        from .judge.check import judge_target

        mark = self.group.mark if target is None else replace(self.group.mark, target=target)
        if mark.target is None:
            pytest.fail("no target: check(MyLoss), or --pairproof-target=mylib.losses:MyLoss", pytrace=False)
        try:
            judged = self.group.target(mark)
        except (UsageError, CouldNotRun) as error:
            pytest.fail(f"{mark.name} cannot be judged: {error}", pytrace=False)
        with one_thread():
            (check,) = judge_target(mark, judged, self.inputs, self.golden, (self.dtype,))
        self.report(self._outcome(check, mark, judged))
        if check.status is Status.SKIPPED:
            pytest.skip(check.message)
        if check.status is Status.DEVIATES:
            pytest.xfail(check.message)
        if check.status is not Status.PASSED:
            pytest.fail("\n".join(self._failure(check, mark, judged)), pytrace=False)

    def _outcome(self, check: Check, mark: Mark, judged: External) -> dict[str, Any]:
        declared = self.group.deviations
        mine = [one for one in declared if one.concerns(mark.loss, mark.name)]
        due = [one for one in mine if one.concerns(mark.loss, mark.name, mark.dtypes or judged.dtypes)]
        notes = list(judged.notes)
        if judged.claim.call == "command" and judged.gradients_judged is False and check.status is not Status.SKIPPED:
            notes.append("gradients were not judged: the target gives none")
        return {
            "title": mark.title,
            "status": check.status.value,
            "message": check.message,
            "whole": mark.whole,
            "notes": notes,
            "declared": {one.name: f"{one.reason} ({one.link})" for one in due},
            "aside": {one.name: one.target for one in declared if one not in mine},
            "met": check.declared,
        }

    def _failure(self, check: Check, mark: Mark, judged: External) -> Iterator[str]:
        """The lines that a failed test prints."""
        from .judge.check import SHOWN, explanation

        yield f"{self.case} {self.dtype}: {check.status}: {check.message}"
        suite, case = self.group.suite, self.inputs
        if check.status is Status.FAILED:
            if suite.explained == SHOWN:
                yield f"{SHOWN} failures of this run are explained above; run alone, this one is too"
            elif words := explanation(check, case, self.golden, judged.outcomes.get((case.id, self.dtype))):
                suite.explained += 1
                yield words
        if check.flags:
            yield f"the case is there for: {', '.join(check.flags)}"
        yield "repeat: " + (check.repeat if isinstance(mark.target, str) else f"pytest '{self.item.nodeid}'")


class Tally:
    """What the reports of the tests say, counted in the process that prints, whichever processes ran them."""

    def __init__(self, given: Sequence[str]) -> None:
        """Begin to count.

        Args:
            given: the options of the command line that a mark can take.
        """
        self.given = given
        self.tests: dict[str, Record] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what a report says; of a test that is repeated the last one."""
        record = next((json.loads(str(value)) for name, value in report.user_properties if name == PROPERTY), None)
        ended = report.when == "call" or not report.passed
        if record and report.when != "teardown" and (ended or report.nodeid not in self.tests):
            self.tests[report.nodeid] = {**record, "ended": ended}

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run whose tests passed and whose counts or declarations are wrong."""
        if session.exitstatus == pytest.ExitCode.OK and any(self.problems()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print how many checks of what ended how, and what was not judged."""
        problems = dict.fromkeys(self.problems())
        if self.tests or problems:
            terminalreporter.section("pairproof")
        for line in self.lines():
            terminalreporter.line(line)
        for problem in problems:
            terminalreporter.line(f"ERROR {problem}", red=True)

    def called(self) -> list[Record]:
        """The tests whose check was called."""
        return [test for test in self.tests.values() if "status" in test]

    def marks(self) -> dict[str, list[Record]]:
        """The tests of each mark."""
        return grouped((test["group"], test) for test in self.tests.values())

    def missing(self) -> dict[str, int]:
        """How many tests of each mark did not run."""
        return {mark: tests[0]["of"] - sum(test["ended"] for test in tests) for mark, tests in self.marks().items()}

    def problems(self) -> Iterator[str]:
        """What is wrong beyond the tests that failed."""
        missing = self.missing()
        for mark, tests in self.marks().items():
            if missing[mark]:
                continue
            called = [test for test in tests if "status" in test]
            judged, asserted = _judged(called), tests[0]["asserted"]
            who = ", ".join(dict.fromkeys(test["title"] for test in called or tests[:1]))
            if not judged:
                yield f"{who}: none of its checks {'could be' if called else 'was'} judged"
            if asserted not in (None, judged):
                yield f"{who}: {judged} checks were judged where {asserted} are asserted"
        for title, tests in grouped((test["title"], test) for test in self.called()).items():
            if not any(missing[test["group"]] for test in tests):
                declared = dict.fromkeys(name for test in tests if test["whole"] for name in test["declared"])
                yield from unused(declared, [name for test in tests for name in test["met"]], title)
        if self.given and self.tests and not any(test["overridden"] for test in self.tests.values()):
            yield f"{', '.join(self.given)}: no test used it, because every test names its own target"
        elif "--pairproof-target" in self.given and not self.tests:
            yield "--pairproof-target: no test used it: pytest --pyargs pairproof.conformance has one"

    def lines(self) -> Iterator[str]:
        """The summary, without the problems."""
        for (mark, title), tests in grouped(((test["group"], test["title"]), test) for test in self.called()).items():
            counts = ", ".join(f"{n} {status}" for status, n in sorted(Counter(t["status"] for t in tests).items()))
            yield f"{title}: {_judged(tests)} of {tests[0]['of']} checks judged: {counts}"
            yield from dict.fromkeys(f"  {note}" for test in tests for note in test["notes"])
            skipped = Counter(test["message"] for test in tests if test["status"] == "skipped")
            yield from (f"  {count} skipped: {reason}" for reason, count in skipped.most_common())
            if missing := self.missing()[mark]:
                yield f"  {missing} did not run: counts are not asserted"
            yield from (f"  declared: {place}: {words}" for place, words in tests[0]["declared"].items())
        for tests in self.marks().values():
            if titles := [test["title"] for test in tests if test["ended"] and "status" not in test]:
                yield f"{titles[0]}: {len(titles)} tests ended before their check"
        declared = {place for test in self.called() for place in test["declared"]}
        for place, target in dict.fromkeys(other for test in self.called() for other in test["aside"].items()):
            if place not in declared:
                whose = f"of {target}, which" if target else "of a loss that"
                yield f"declared {whose} was not judged here: {place}"


def _judged(tests: Sequence[Record]) -> int:
    return sum(test["status"] != "skipped" for test in tests)
