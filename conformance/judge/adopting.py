"""What the pytest plugin asks for: the checks of one loss, and the verdict on each as pytest says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from ..implementations.callable import External, describe
from ..suite.cases import Case
from ..suite.catalogue import LOSSES
from ..suite.golden import GoldenCase
from ..suite.store import load_worked
from .check import (
    LIMIT,
    SHARED,
    SHOWN,
    Request,
    check_device,
    check_request,
    chosen_cases,
    conforms,
    diagnosis,
    is_shared,
    truth_of,
)
from .deviations import Declaration, DeclarationError, looked_up, project_file, read_declarations
from .results import Check, Status
from .verify import CouldNotRun, Selection, UsageError, judge_case, load_cases


@dataclass(eq=False)
class Asked:
    """What one mark asks for.

    Attributes:
        request: who is judged, as what, on what; its target is None where the test tells it.
        asserted: how many checks must be judged; None says nothing.
        suite: the cases.
        count: how many checks there are.
        number: of the mark, among those of its test function.
        said: whether the command line says something of it.
    """

    request: Request
    asserted: int | None
    suite: Suite
    count: int = 0
    number: int = 0
    said: bool = False

    @property
    def loss(self) -> str:
        """Short name of the loss."""
        return self.request.loss

    @property
    def title(self) -> str:
        """Who is judged as what, in words."""
        return _title(self.request)


def _title(request: Request) -> str:
    who = "a target that the test names" if request.target is None else request.name
    return f"{who} as {request.loss}"


class Suite:
    """Every case, and what is declared of targets: read once in a process."""

    def __init__(self, declared: Path | None, root: Path) -> None:
        """Read the cases and the declarations.

        Args:
            declared: TOML file of declared deviations; None is the nearest ``pyproject.toml`` that has any.
            root: where the search for that begins; then comes the working directory.

        Raises:
            pytest.UsageError: the file cannot be read as one.
        """
        self.cases: dict[Case, GoldenCase | None] = load_cases(load_worked())
        self.by_id = {case.id: case for case in self.cases}
        self.explained = 0
        self._targets: dict[tuple[int, int | str], tuple[object, External]] = {}
        try:
            found = project_file(Path.cwd())
            self.declared = declared or project_file(root) or found
            read: list[Declaration] = [] if self.declared is None else read_declarations(self.declared)
            self.declarations = looked_up(read, self.cases)
            self.to_say = None if self.declared == found else self.declared
        except DeclarationError as error:
            raise pytest.UsageError(str(error)) from None

    def describe(self) -> list[str]:
        """The file of declarations and how many there are, where there are any."""
        if not self.declarations:
            return []
        return [f"declared deviations: {len(self.declarations)} in {self.declared}"]

    def close(self) -> None:
        """End the commands that were judged."""
        for _, target in self._targets.values():
            target.close()

    def checks(self, given: Mapping[str, Any], number: int, *, said: bool) -> list[CaseCheck]:
        """The checks that a mark asks for, in the order of the cases.

        Args:
            given: the arguments of ``pairproof.conformance.parametrize``.
            number: of the mark, among those of its test function.
            said: whether the command line says something of it.

        Raises:
            pytest.UsageError: one of them is wrong, or no case is selected.
        """
        if given["loss"] is None:
            raise pytest.UsageError("pairproof.conformance.parametrize: loss is missing; known: " + ", ".join(LOSSES))
        words = {name: given[name] for name in given if name not in ("limit", "checks")}
        limit = LIMIT if given["limit"] is None else given["limit"]
        request = Request(**words, limit=limit, deviations=self.to_say)
        try:
            check_request(request)
        except UsageError as error:
            raise pytest.UsageError(str(error)) from None
        asked = Asked(request, given["checks"], self, number=number, said=said)
        try:
            cases = chosen_cases(request, self.cases)
        except UsageError as error:
            raise pytest.UsageError(str(error)) from None
        found = [CaseCheck(asked, case.id, dtype) for case in cases for dtype in request.dtypes or External.dtypes]
        asked.count = len(found)
        return found

    def target(self, asked: Asked, thing: object) -> External:
        """Find a target: once where it is named, or the mark's own.

        Raises:
            UsageError: what is said of it is wrong or too little.
            CouldNotRun: it cannot be loaded.
        """
        request = replace(asked.request, target=thing)
        check_device(request)
        key = id(asked), thing if isinstance(thing, str) else id(thing)
        if key in self._targets:
            return self._targets[key][1]
        found = request.load(self.declarations, self.cases)
        if isinstance(thing, str) or thing is asked.request.target:
            # A thing is kept, so that its id stays its own.
            self._targets[key] = thing, found
        return found


@dataclass(eq=False)
class CaseCheck:
    """One case in one dtype, as a test function is given it.

    Attributes:
        asked: by whom it was asked for.
        case: id of the case.
        dtype: of the inputs.
        told: how it ended, for whoever counts; None as long as it was not called.
        id: what its test's id says of it.
    """

    asked: Asked
    case: str
    dtype: str
    told: dict[str, Any] | None = None
    id: str = ""
    _node: str = field(default="", repr=False)

    @property
    def name(self) -> str:
        """The case and the dtype."""
        return f"{self.case}-{self.dtype}"

    def begin(self, node: str) -> None:
        """Forget how it ended before: the test with this id is about to run."""
        self._node, self.told = node, None

    @property
    def asking(self) -> dict[str, Any]:
        """To which mark's checks it belongs, how many they are, and how many of them must be judged."""
        return {
            "group": f"{self._node.replace(self.id, '')} {self.asked.number}",
            "of": self.asked.count,
            "asserted": self.asked.asserted,
            "said": self.asked.said,
            "title": self.asked.title,
        }

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
        thing = self.asked.request.target if target is None else target
        if thing is None:
            pytest.fail("no target: check(MyLoss), or --pairproof-target=mylib.losses:MyLoss", pytrace=False)
        suite, case = self.asked.suite, self.asked.suite.by_id[self.case]
        try:
            judged = suite.target(self.asked, thing)
        except (UsageError, CouldNotRun) as error:
            pytest.fail(f"{describe(thing)} cannot be judged: {error}", pytrace=False)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        judged.outcomes.clear()
        try:
            checks, met = judge_case(
                case, suite.cases[case], [judged], Selection(dtypes=(self.dtype,), device=self.asked.request.device)
            )
        finally:
            torch.set_num_threads(threads)
        (check,) = checks
        self._tell(check, thing, judged, {name for _, name in met})
        self._end(check, case, judged, thing)

    def _tell(self, check: Check, thing: object, judged: External, met: set[str]) -> None:
        request = replace(self.asked.request, target=thing)
        dtypes = request.dtypes or External.dtypes
        mine = [one for one in self.asked.suite.declarations if one.of(request.loss, request.name)]
        declared = [one for one in mine if one.in_any(dtypes)]
        notes = list(judged.notes)
        if judged.claim.call == "command" and judged.gradients_judged is False and check.status is not Status.SKIPPED:
            notes.append("gradients were not judged: the target gives none")
        self.told = {
            **self.asking,
            "title": _title(request),
            "case": self.case,
            "dtype": self.dtype,
            "status": check.status.value,
            "message": check.message,
            "whole": request.whole,
            "notes": notes,
            "declared": {one.place: f"{one.reason} ({one.link})" for one in declared},
            "aside": {one.place: one.target for one in self.asked.suite.declarations if one not in mine},
            "met": sorted(met),
        }

    def _end(self, check: Check, case: Case, judged: External, thing: object) -> None:
        __tracebackhide__ = True
        message = check.message.removeprefix("TargetError: ")
        if check.status is Status.SKIPPED:
            pytest.skip(message)
        if check.status is Status.DEVIATES:
            pytest.xfail(message)
        if check.status is not Status.PASSED:
            self._fail(check, message, case, judged, thing)

    def _fail(self, check: Check, message: str, case: Case, judged: External, thing: object) -> NoReturn:
        __tracebackhide__ = True
        request, suite = self.asked.request, self.asked.suite
        lines = [f"{self.case} {self.dtype}: {check.status.value}: {message}"]
        outcome = judged.outcomes.get((self.case, self.dtype))
        wrong = check.status is Status.FAILED and outcome is not None and not conforms(check)
        if wrong and suite.explained == SHOWN:
            lines.append(f"{SHOWN} failures of this run are explained above; run alone, this one is too")
        elif wrong and outcome is not None:
            suite.explained += 1
            true = truth_of(case, suite.cases[case])
            lines.append(SHARED if is_shared(check, case, true) else diagnosis(case, outcome, true) or "")
        if check.flags:
            lines.append(f"the case is there for: {', '.join(check.flags)}")
        known = isinstance(thing, str)
        again = replace(request, target=thing).repeat(self.case, self.dtype) if known else f"pytest '{self._node}'"
        lines.append(f"repeat: {again}")
        pytest.fail("\n".join(filter(None, lines)), pytrace=False)
