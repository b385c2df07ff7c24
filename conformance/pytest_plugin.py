"""The pytest plugin, which checks a loss (the target) in one pytest test per check.

In a test file::

    import pairproof.conformance

    from mylib.losses import MyLoss

    @pairproof.conformance.parametrize(MyLoss, loss="supcon")
    def test_conformance(check):
        check()

Without a test file::

    pytest --pyargs pairproof.conformance --pairproof-target=mylib.losses:MyLoss --pairproof-loss=supcon

pytest loads this module wherever pairproof is installed, so large packages are imported only when tests need them.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import pairproof

from .judge.options import CannotBeCalled, CouldNotRun, Request, UsageError, option, options_of, takes
from .judge.results import BAD, Status, grouped, unused

if TYPE_CHECKING:
    from .implementations.base import Deviation
    from .implementations.callable import External
    from .implementations.usages import Usage
    from .judge.fresh import FreshBatch
    from .judge.results import Check
    from .judge.usages import UsageJudge
    from .suite.cases import Case
    from .suite.golden import GoldenCase

MARK = "pairproof"
PROPERTY = "pairproof"
"""The property of a test's report that contains a ``Record`` as JSON."""
FIXTURE = "check"
GLOBAL = ("deviations", "level")
"""Options of the command line that are defaults for every mark."""
_SUITE = pytest.StashKey["Suite"]()

Record = dict[str, Any]
"""The result of a test's check, with facts about its mark; ``Tally`` adds whether the test ended, and its outcome."""


@dataclass(frozen=True, kw_only=True)
class Mark(Request):
    """The arguments of one use of ``parametrize``.

    Attributes:
        checks: The exact number of checks that must be judged.

    Without ``checks``, at least one check must be judged. The number is asserted only if all tests of the mark run.
    """

    checks: int | None = option(None, "--checks", metavar="N")

    @property
    def title(self) -> str:
        """The target and the loss, as messages name them."""
        return f"{'a target that the test names' if self.target is None else self.name} as {self.loss}"


@takes(Mark)
def parametrize(  # noqa: D417 - its arguments are those of Mark
    *given: Any, **options: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Parametrize a test function with the checks of a loss (the target).

    There is one test per check: for each case or random batch in each dtype, and for each usage. A usage is another way
    to call the target, such as under autocast.

    The test function has the argument ``check``. ``check()`` judges the target; ``check(other)`` judges another one.

    * A failure reports the term that differs and the error.
    * Unsupported cases and failures above the required level are skipped, with the reason.
    * A declared deviation is reported as an expected failure.

    Args:
        target: a function, a class that is constructed with its options, an instance, "package.module:attribute" or
            "file.py:attribute". None: the argument of ``check``, or ``--pairproof-target``.
        loss: short name in the catalogue. None: ``--pairproof-loss``.
        call: how the target is called, one of the values of ``pairproof check --call``; guessed when None.
        arrays: torch, numpy or jax; guessed when None.
        temperature: the built-in temperature of a target that has no such keyword.
        scale: the parameter that gets 1 / temperature, if its name does not show it.
        normalised: whether rows are normalised before the target is called, if the similarity is cosine.
        frozen: the matrices that the target may treat as constant, such as "negatives".
        settings: options that the target supports, by name. A tuple gives several values; "*" means that the target
            takes the option by keyword.
        init: arguments of the target, by the names of its parameters.
        result: the name or position of the loss, if the target returns several results; guessed when None.
        cases: ids or shell patterns; empty means all.
        dtypes: empty means float64 and float32.
        fuzz: the number of random batches.
        seed: the seed of the random batches; None means 0, so every run judges the same batches.
        thorough: also run the cases whose proof takes long. This matters only for a target with a built-in temperature
            or option, whose cases must be proved again.
        device: torch device.
        flush_denormal: whether to flush subnormal numbers to zero.
        limit: maximum duration of one evaluation, in seconds.
        deviations: TOML file of declared deviations. None: ``--pairproof-deviations``, or the nearest pyproject.toml.
        level: the highest level at which the target must pass: formula, policies, range or digits. None:
            ``--pairproof-level``, or policies.
        checks: the exact number of checks that must be judged if all tests run; None requires at least one.

    Returns:
        The decorator.
    """
    mark = Mark(*given, **{name: value for name, value in options.items() if value is not None})
    return pytest.mark.pairproof.with_args(mark)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add one option per argument of ``parametrize``."""
    group = parser.getgroup(
        "pairproof",
        "pairproof: checks of a contrastive loss against proved values. These options are for pytest --pyargs"
        " pairproof.conformance, and for uses of parametrize without a target. --pairproof-deviations and"
        " --pairproof-level apply to every use of parametrize that has no such argument.",
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
    """Register the mark and the tally. Workers of pytest-xdist have no tally, because they print no summary."""
    config.addinivalue_line("markers", "pairproof: made by pairproof.conformance.parametrize")
    if not hasattr(config, "workerinput"):
        given = {} if config.option.collectonly else _given(config)
        config.pluginmanager.register(Tally([_flag(keyword) for keyword in given]), "pairproof-tally")


def _given(config: pytest.Config) -> dict[str, Any]:
    own = [keyword for keyword in options_of(Mark) if keyword not in GLOBAL]
    values = {keyword: config.getoption(_flag(keyword)) for keyword in own}
    return {keyword: value for keyword, value in values.items() if value not in (None, [])}


def pytest_report_header(config: pytest.Config) -> str | None:
    """Name the target of the command line. Targets of test files are known only after collection."""
    target, loss = config.getoption("--pairproof-target"), config.getoption("--pairproof-loss")
    return f"pairproof {pairproof.__version__}: {target} as {loss}" if target else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make the tests of each mark."""
    marks: list[Mark] = [mark.args[0] for mark in metafunc.definition.iter_markers(MARK)]
    if not marks:
        return
    found: list[CaseCheck] = []
    try:
        if FIXTURE not in metafunc.fixturenames:
            raise UsageError(f"{metafunc.definition.nodeid}: the test function needs an argument named {FIXTURE}")
        for number, mark in enumerate(reversed(marks)):
            found += _suite(metafunc.config).checks(mark, number)
    except UsageError as error:
        # pytest prints a CollectError without a traceback.
        raise pytest.Collector.CollectError(f"pairproof: {error}") from None
    # With several marks, a prefix makes ids unique; otherwise pytest would number them.
    prefixes = [f"{check.group.mark.loss}-{check.group.number}-" if len(marks) > 1 else "" for check in found]
    metafunc.parametrize(FIXTURE, found, ids=[p + check.id for p, check in zip(prefixes, found, strict=True)])


def _from_command_line(config: pytest.Config, mark: Mark) -> dict[str, Any]:
    """Return the fields that the command line sets in a mark.

    A mark with a target, or with a loss that the command line does not test, gets no fields.
    """
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
    """Return the suite; the first call loads it."""
    if _SUITE not in config.stash:
        try:
            config.stash[_SUITE] = Suite(config)
        except ImportError as error:
            from pairproof import install_command

            missing = error.name or error
            raise UsageError(f"pairproof: {missing} is not installed: {install_command('verify')}") from None
    return config.stash[_SUITE]


def pytest_report_collectionfinish(config: pytest.Config, items: Sequence[pytest.Item]) -> list[str]:
    """List the targets with their numbers of checks, and the files of declared deviations."""
    groups = [check.group for item in items if (check := _check_of(item))]
    titles = Counter(group.mark.title for group in groups)
    marked = sum(item.get_closest_marker("xfail") is not None for item in items if _check_of(item))
    declared = {group.file: len(group.entries) for group in groups if group.entries}
    return [
        *(f"pairproof {pairproof.__version__}: {title}, {count} checks" for title, count in titles.items()),
        *(f"declared deviations: {count} in {file}" for file, count in declared.items()),
        *([f"expected to fail, by xfail marks: {marked} of {len(groups)} checks"] if marked else []),
    ]


def _check_of(item: pytest.Item) -> CaseCheck | None:
    found = item.callspec.params.get(FIXTURE) if hasattr(item, "callspec") else None
    return found if isinstance(found, CaseCheck) else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Record the mark of a test, even if the test never calls its check."""
    if check := _check_of(item):
        check.item = item
        check.report({})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that does not call its check."""
    result = yield
    if (check := _check_of(item)) and not check.called:
        pytest.fail("the test did not call check(), so nothing was judged", pytrace=False)
    return result


class Suite:
    """The cases of the tested losses, and the file of declared deviations. Loaded once per process."""

    def __init__(self, config: pytest.Config) -> None:
        """Load the worked examples, and find the file of declared deviations.

        Raises:
            UsageError: A ``pyproject.toml`` cannot be read or is malformed.
        """
        from .documents.load import load_worked
        from .judge.deviations import project_file

        self.config = config
        self.worked = load_worked()
        self.cases: dict[str, dict[Case, GoldenCase | None]] = {}
        self.explained = 0
        self.repeated: dict[str, set[str]] = {}
        self.nearest = project_file(Path.cwd())
        self.level: str | None = config.getoption("--pairproof-level")
        given = config.getoption("--pairproof-deviations")
        self.file = Path(given) if given else project_file(config.rootpath) or self.nearest

    def checks(self, mark: Mark, number: int) -> list[CaseCheck]:
        """Return the checks of a mark, in the order of the cases.

        Args:
            mark: the mark in the test file. The command line completes it.
            number: index of the mark among those of its test function.

        Raises:
            UsageError: An option is invalid, or no case is selected.
        """
        from .implementations.callable import External
        from .judge.check import chosen_cases
        from .judge.deviations import read_declarations
        from .judge.fresh import fresh_batches
        from .judge.usages import chosen
        from .judge.verify import load_cases
        from .suite.golden import DTYPES

        changes = _from_command_line(self.config, mark)
        mark = replace(mark, **changes)
        if not mark.loss:
            raise UsageError("pairproof.conformance.parametrize: the argument loss is missing; see: pairproof list")
        file = mark.deviations or self.file
        # The command that repeats a check finds the nearest file without an option.
        mark = replace(mark, deviations=None if file == self.nearest else file, level=mark.level or self.level)
        mark = mark.with_seed(0)
        if mark.loss not in self.cases:
            self.cases[mark.loss] = load_cases(self.worked, (mark.loss,))
        if mark.target is not None and not self.config.option.collectonly:
            self.try_call(mark)
        dtypes = mark.dtypes or External.dtypes
        cases = chosen_cases(mark, self.cases[mark.loss])
        inputs: list[Case | FreshBatch] = [*cases, *fresh_batches(mark)]
        found: list[tuple[Case | FreshBatch | Usage, str]] = [(one, dtype) for one in inputs for dtype in dtypes]
        usages = [one for one in chosen(mark) if not one.slow or mark.cases or mark.thorough]
        found += [(one, one.dtype or dtypes[0]) for one in usages if one.dtype in ("", *(mark.dtypes or DTYPES))]
        record = {"of": len(found), "asserted": mark.checks, "overridden": bool(changes), "title": mark.title}
        group = Group(mark, self, number, record, file, read_declarations(file) if file else {}, cases)
        _ = group.deviations  # a wrong declaration is one error of the collection, not one of each test
        return [CaseCheck(group, one, dtype) for one, dtype in found]

    def try_call(self, mark: Mark) -> None:
        """Check in a separate process that the target can be called. Here, it must not run before pytest's fixtures.

        Raises:
            UsageError: Every plausible call raises an error. The tests report other errors.
        """
        from .judge.check import load_target

        try:
            load_target(mark, ()).close()
        except CannotBeCalled as error:
            raise UsageError(f"{mark.title}: {error}") from None
        except (UsageError, CouldNotRun):
            pass


@dataclass(eq=False)
class Group:
    """The checks of one mark.

    Attributes:
        mark: the mark; its target is None if the test passes one to ``check``.
        suite: the cases of all tested losses.
        number: index of the mark among those of its test function.
        record: facts that are the same for all tests: the number of checks, the asserted number of judged checks,
            whether the command line changed the mark, and the title of the mark.
        file: file of the declared deviations.
        entries: declarations in that file, by place, such as "pyproject.toml, tool.pairproof.deviations 1".
        cases: the cases that the mark selects, without the random batches.
        loaded: targets by name, to load them only once: the mark's own target, and targets given as text.
        usages: the judge of usages for each target in ``loaded``.
    """

    mark: Mark
    suite: Suite
    number: int
    record: Record
    file: Path | None
    entries: dict[str, dict[str, Any]]
    cases: list[Case]
    loaded: dict[str, External] = field(default_factory=dict)
    usages: dict[str, UsageJudge] = field(default_factory=dict)

    @cached_property
    def deviations(self) -> tuple[Deviation, ...]:
        """All declared deviations, also those of other losses and targets.

        Raises:
            UsageError: A declaration names an unknown case, flag, loss or dtype.
        """
        from .judge.deviations import deviations
        from .judge.verify import load_cases

        return deviations(self.entries, load_cases(self.suite.worked)) if self.entries else ()

    def repeats(self, case: str, judged: External) -> bool:
        """Return whether the target's built-in options make a case equal to another one that is judged."""
        from .judge.proofs import repeated

        key = f"{self.mark.cases} {self.mark.thorough} {judged.claim}"
        if key not in self.suite.repeated:
            self.suite.repeated[key] = repeated(self.cases, judged.claim, thorough=self.mark.thorough)
        return case in self.suite.repeated[key]

    def target(self, request: Request) -> External:
        """Load a target. The mark's own target and targets given as text are loaded only once.

        Raises:
            UsageError: An option is missing or contradicts the target.
            CouldNotRun: The target cannot be loaded, or the device cannot be used.
        """
        from .judge.check import load_target

        if not (isinstance(request.target, str) or request.target is self.mark.target):
            return load_target(request, self.deviations)
        if request.name not in self.loaded:
            self.loaded[request.name] = load_target(request, self.deviations)
            self.suite.config.add_cleanup(self.loaded[request.name].close)
        return self.loaded[request.name]

    def usage_judge(self, request: Request, judged: External) -> UsageJudge:
        """Return the judge of a target's usages."""
        from .judge.proofs import as_claimed
        from .judge.usages import UsageJudge

        stored = self.suite.cases[request.loss]
        made = UsageJudge(judged, request.dtypes, stored, lambda one: as_claimed(one, stored[one], judged.claim))
        return self.usages.setdefault(request.name, made) if judged in self.loaded.values() else made


@dataclass(eq=False)
class CaseCheck:
    """The argument ``check`` of a test function.

    Attributes:
        group: the checks of the same mark.
        inputs: a case, a random batch (which is drawn later), or a usage.
        dtype: dtype of the inputs.
        called: whether the test has called ``check``.
        item: the test, once it starts.
    """

    group: Group
    inputs: Case | FreshBatch | Usage
    dtype: str
    called: bool = False
    item: pytest.Item = field(init=False, repr=False)

    @property
    def case(self) -> str:
        """Id of the case, random batch or usage."""
        return self.inputs.id

    @property
    def id(self) -> str:
        """Part of the test's id."""
        return f"{self.inputs.id}-{self.dtype}"

    def report(self, outcome: Mapping[str, Any]) -> None:
        """Add the result of the check to the report of the test. ``outcome`` is empty until the check is called."""
        self.called = bool(outcome)
        group = f"{self.item.nodeid.replace(self.id, '')} {self.group.number}"
        record = {"group": group, **self.group.record, **outcome}
        others = [kept for kept in self.item.user_properties if kept[0] != PROPERTY]
        self.item.user_properties[:] = [*others, (PROPERTY, json.dumps(record))]

    def __call__(self, target: object | None = None) -> None:
        """Judge a target, and end the test according to the result.

        Args:
            target: replaces the target of ``parametrize`` or of the command line.

        Raises:
            pytest.fail.Exception: The check failed or ended in an error, a declared deviation did not occur, or no
                target can be judged.
            pytest.skip.Exception: The target does not support the case or fails above the required level, or its
                built-in options make the case equal to another one.
            pytest.xfail.Exception: The target deviates as declared.
        """
        __tracebackhide__ = True
        from .implementations.base import one_thread
        from .implementations.usages import Usage
        from .judge.check import SAME, inputs_of, is_above, judge_target, probes
        from .suite.levels import Level

        mark = self.group.mark if target is None else replace(self.group.mark, target=target)
        if mark.target is None:
            pytest.fail("no target: check(MyLoss), or --pairproof-target=mylib.losses:MyLoss", pytrace=False)
        try:
            judged = self.group.target(mark)
        except (UsageError, CouldNotRun) as error:
            pytest.fail(f"{mark.name} cannot be judged: {error}", pytrace=False)
        with one_thread():
            stored = self.group.suite.cases[mark.loss]
            if isinstance(self.inputs, Usage):
                check, case, golden = self._of_usage(mark, judged), None, None
            else:
                case, golden = inputs_of(self.inputs, stored, judged.claim, mark)
                (check,) = judge_target(mark, judged, case, golden, (self.dtype,), probes(stored, judged.claim))
                outcome = judged.outcomes.get((case.id, self.dtype))
                seen = outcome.observed.get("seen") if outcome else None
                if seen and check.status is Status.PASSED and mark.required >= Level.POLICIES:
                    check = replace(check, status=Status.FAILED, message=f"it {', and '.join(seen.values())}")
        if self.group.repeats(self.case, judged):
            check = replace(check, status=Status.SKIPPED, message=SAME)
        if judged not in self.group.loaded.values():
            judged.close()
        above = check.status in BAD and is_above(check, mark.required)
        self.report(self._outcome(check, mark, judged, above=above))
        if above:
            pytest.skip(f"{check.status} at the level {check.level}, above {mark.required}: {check.message}")
        if check.status is Status.SKIPPED:
            pytest.skip(check.message)
        if check.status is Status.DEVIATES:
            pytest.xfail(check.message)
        if check.status is not Status.PASSED:
            pytest.fail("\n".join(self._failure(check, mark, judged, case, golden)), pytrace=False)

    def _of_usage(self, mark: Mark, judged: External) -> Check:
        from .judge.results import Check

        judge = self.group.usage_judge(mark, judged)
        found = list(judge.checks(replace(mark, cases=(self.case,))))
        words = judge.inapplicable.get(self.case, "")
        return found[0] if found else Check("usage", "", mark.loss, self.case, self.dtype, Status.SKIPPED, words)

    def _outcome(self, check: Check, mark: Mark, judged: External, *, above: bool) -> dict[str, Any]:
        declared = self.group.deviations
        mine = [one for one in declared if one.concerns(mark.loss, mark.name)]
        due = [one for one in mine if one.concerns(mark.loss, mark.name, mark.dtypes or judged.dtypes)]
        notes = list(judged.notes)
        if judged.claim.call == "command" and judged.gradients_judged is False and check.status is not Status.SKIPPED:
            notes.append("gradients were not judged: the target returns none")
        return {
            "title": mark.title,
            "status": f"failed above {mark.required}" if above else check.status.value,
            "message": check.message,
            "whole": mark.whole,
            "notes": notes,
            "declared": {one.name: f"{one.reason} ({one.link})" for one in due},
            "aside": {one.name: one.target for one in declared if one not in mine},
            "met": check.declared,
            "command": mark.command if isinstance(mark.target, str) or self._can_be_imported(mark) else "",
        }

    def _can_be_imported(self, mark: Mark) -> bool:
        """Return whether other programs find the target by its name; they do not find the module of a test."""
        module, _, name = mark.name.partition(":")
        found = sys.modules.get(module)
        return found is not getattr(self.item, "module", None) and getattr(found, name, None) is mark.target

    def _failure(
        self, check: Check, mark: Mark, judged: External, case: Case | None, golden: GoldenCase | None
    ) -> Iterator[str]:
        from .judge.check import EXPLAINED, explanation

        yield f"{self.case} {self.dtype}: {check.status}: {check.message}"
        suite = self.group.suite
        if check.status is Status.FAILED and case is not None:
            if suite.explained == EXPLAINED:
                yield f"only the first {EXPLAINED} failures of a run are explained; to explain this one, run it alone"
            elif words := explanation(check, case, golden, judged.outcomes.get((case.id, self.dtype))):
                suite.explained += 1
                yield re.sub(r"(?:--set \w+=\S+ ?)+(?=\))", _as_settings, words)
        if check.flags:
            yield f"flags of the case: {', '.join(check.flags)}"
        yield "repeat: " + (check.repeat if isinstance(mark.target, str) else f"pytest '{self.item.nodeid}'")


def _as_settings(options: re.Match[str]) -> str:
    """Return the argument of ``parametrize`` that equals options ``--set name=value``."""
    settings = dict(one.split("=", 1) for one in re.findall(r"--set (\S+)", options[0]))
    return f"settings={settings}"


class Tally:
    """Counts the results of all tests, and prints the summary."""

    def __init__(self, given: Sequence[str]) -> None:
        """Start with no results. ``given`` are the options of the command line that complete a mark."""
        self.given = given
        self.tests: dict[str, Record] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Store the record of a report. If a test is repeated, the last report counts."""
        record = next((json.loads(str(value)) for name, value in report.user_properties if name == PROPERTY), None)
        ended = report.when == "call" or not report.passed
        if record and report.when != "teardown" and (ended or report.nodeid not in self.tests):
            self.tests[report.nodeid] = {**record, "ended": ended, "outcome": report.outcome}

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the run if counts or declarations are wrong, even if all tests passed."""
        if session.exitstatus == pytest.ExitCode.OK and any(self.problems()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the number of checks of each status, and what was not judged."""
        problems = dict.fromkeys(self.problems())
        if self.tests or problems:
            terminalreporter.section("pairproof")
        for line in self.lines():
            terminalreporter.line(line)
        for problem in problems:
            terminalreporter.line(f"ERROR {problem}", red=True)

    def called(self) -> list[Record]:
        """Return the tests that called their check."""
        return [test for test in self.tests.values() if "status" in test]

    def marks(self) -> dict[str, list[Record]]:
        """Return the tests of each mark."""
        return grouped((test["group"], test) for test in self.tests.values())

    def problems(self) -> Iterator[str]:
        """Yield wrong counts, unused declarations and unused options."""
        complete = {mark: tests for mark, tests in self.marks().items() if not _missing(tests)}
        for tests in complete.values():
            called = [test for test in tests if "status" in test]
            judged, asserted = _judged(called), tests[0]["asserted"]
            who = ", ".join(dict.fromkeys(test["title"] for test in called or tests[:1]))
            if not judged:
                yield f"{who}: none of its checks {'could be' if called else 'was'} judged"
            if asserted not in (None, judged):
                yield f"{who}: {judged} checks were judged, expected {asserted}"
        for title, tests in grouped((test["title"], test) for test in self.called()).items():
            if complete.keys() >= {test["group"] for test in tests}:
                declared = dict.fromkeys(name for test in tests if test["whole"] for name in test["declared"])
                yield from unused(declared, [name for test in tests for name in test["met"]], title)
        if self.given and self.tests and not any(test["overridden"] for test in self.tests.values()):
            yield f"{', '.join(self.given)}: no test used it, because every test names its own target"
        elif "--pairproof-target" in self.given and not self.tests:
            yield "--pairproof-target: no test used it; to run the checks: pytest --pyargs pairproof.conformance"

    def lines(self) -> Iterator[str]:
        """Yield the summary without the problems."""
        for tests in self.marks().values():
            for title, called in grouped((test["title"], test) for test in tests if "status" in test).items():
                counts = ", ".join(f"{n} {name}" for name, n in sorted(Counter(t["status"] for t in called).items()))
                yield f"{title}: {_judged(called)} of {tests[0]['of']} checks judged: {counts}"
                yield from dict.fromkeys(f"  {note}" for test in called for note in test["notes"])
                skipped = Counter(test["message"] for test in called if test["status"] == "skipped")
                yield from (f"  {count} skipped: {reason}" for reason, count in skipped.most_common())
                excused = sum(test["status"] in BAD and test["outcome"] != "failed" for test in called)
                if excused:
                    yield f"  {excused} undeclared failures did not fail their tests, because of marks or hooks"
                failed = [test for test in called if test["status"] in BAD and test["command"]]
                if len(failed) > 1:
                    yield f"  for the reasons that failures have in common: {failed[0]['command']}"
                if missing := _missing(tests):
                    yield f"  {missing} did not run: counts are not asserted"
                yield from (f"  declared: {place}: {words}" for place, words in called[0]["declared"].items())
            if titles := [test["title"] for test in tests if test["ended"] and "status" not in test]:
                yield f"{titles[0]}: {len(titles)} tests ended before their check"
        declared = {place for test in self.called() for place in test["declared"]}
        for place, target in dict.fromkeys(other for test in self.called() for other in test["aside"].items()):
            if place not in declared:
                yield f"declaration not used, because {target or 'its loss'} was not judged in this run: {place}"


def _judged(tests: Sequence[Record]) -> int:
    return sum(test["status"] != "skipped" for test in tests)


def _missing(tests: Sequence[Record]) -> int:
    return int(tests[0]["of"] - sum(test["ended"] for test in tests))
