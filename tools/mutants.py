"""Mutate ``reference/`` and the losses and the engine of ``fast/``, and see whether the conformance cases notice.

A mutant is one small mistake, made by one operator of cosmic-ray in one place: a number one larger, ``<`` for ``<=``,
a condition turned round, a loop that is not entered. It is killed where some case says so. Asked are the golden and the
worked cases, of every implementation of the room and in every dtype; the error cases; and of ``reference/`` the
printed figures and claims. Cases say more than a value and a gradient, and are held to that too: what the record of
terms holds, which rows are partners in a layout of views, and, from the proved derivatives, the derivative by a learned
temperature and the second one along the rows (`Learned`). No test of ``tests/`` is asked: what survives is either no
mistake at all or one that an adopter's loss could make unseen.

Each mutant lives in a process of its own, forked from one that has loaded everything and computed all truths and bounds
from the code as it is. In the fork the mutated room is imported anew, beside the old one: the implementations run the
new one, and everything that judges them keeps the old. Before the first mutant every check is run once and it is noted
which lines it executes: a mutant is put to those checks alone that come by its statement, the covering cases first,
quick ones before slow ones, until one fails. A mutant that survives has been put to all of them.

Not mutated: what is no code (strings, annotations, type aliases, the text of an error). Operators stay what they are:
arithmetic stays arithmetic, an equality becomes no identity, and an option's name is not asked for its place in the
alphabet. The score is the share of the mistakes that are killed: a survivor that is explained in ``mutants.toml`` as no
mistake, and a mutant that no check comes by, are told apart and listed.
"""

from __future__ import annotations

import argparse
import ast
import gc
import hashlib
import importlib
import importlib.machinery
import importlib.util
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import platform
import resource
import signal
import sys
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Literal

import numpy as np
import torch

import pairproof
from pairproof.conformance.documents.load import load_worked
from pairproof.conformance.implementations import fast as fast_peers
from pairproof.conformance.implementations import scipy_losses as scipy_peer
from pairproof.conformance.implementations.base import Implementation
from pairproof.conformance.implementations.reference import Reference
from pairproof.conformance.judge.verify import load_cases
from pairproof.conformance.suite import cases as case_module
from pairproof.conformance.suite.cases import Case
from pairproof.conformance.suite.catalogue import LOSSES
from pairproof.conformance.suite.golden import ErrorCase, GoldenCase, load_errors
from pairproof.conformance.suite.records import Bounds, Outcome, Truth
from pairproof.conformance.suite.subset import covering
from pairproof.conformance.truth.baseline import plain_outcome
from pairproof.conformance.truth.compare import compare
from pairproof.conformance.truth.evaluate import stored_truth, truth
from pairproof.conformance.truth.tolerances import bounds, held_to

ROOT = Path(__file__).resolve().parent.parent
EXPLAINED = ROOT / "tools" / "mutants.toml"
RESULTS = ROOT / "tools" / "mutants.json"
REPORT = ROOT / "tools" / "mutants.md"

SEED = 20261121
COUNT = 640
LEAST = 500
"""Mutants that a whole run makes at least."""
GOAL = 0.95

Room = Literal["reference", "fast"]
ROOMS: tuple[Room, ...] = ("reference", "fast")

LEFT_OUT = ("fast/modules.py", "fast/views.py", "fast/kernels/*")
"""Of ``fast/`` what is neither a loss nor the engine; the kernels have proofs of their own."""

DTYPES = ("float64", "float32", "bfloat16", "float16")

KINDS = {
    "equivalent": "no input gives another result",
    "speed": "the same results by another road, in other portions, or with more work",
    "rounding": "the same numbers in other steps: another rounding",
    "accuracy": "fewer digits, but within every bound",
    "range": "another result, but only beyond the range that is promised",
    "message": "the same refusal in other words",
    "elsewhere": "what a case cannot show: other devices, and arguments that no case has; tests/ has tests of it",
    "missing": "a case is missing",
}
"""Why a mutant may survive."""

NO_MISTAKE = ("equivalent", "speed", "rounding")
"""Kinds of mutants that the score leaves out: there is nothing to find."""


# Making mutants.

ARITHMETIC = ("Add", "Sub", "Mul", "Div", "FloorDiv", "Mod", "Pow")
BITS = ("BitOr", "BitAnd", "BitXor", "LShift", "RShift")
ORDER = ("Eq", "NotEq", "Lt", "LtE", "Gt", "GtE")
IDENTITY = ("Is", "IsNot")


@dataclass(frozen=True)
class Mutant:
    """One mutation of one place.

    Attributes:
        file: below the repository.
        operator: name of cosmic-ray's operator.
        occurrence: which of the places that the operator finds in the file.
        line: where it is.
        column: where in the line.
        text: the line as it stands in the file, stripped.
        turn: which of the mutants by this operator of lines with this text.
        lines: first and last of the lines of which whoever is touched by the mutation runs one.
        inside: whether the statement is run when a function is called, not when the module is imported.
    """

    file: str
    operator: str
    occurrence: int
    line: int
    column: int
    text: str
    turn: int
    lines: tuple[int, int]
    inside: bool

    @property
    def id(self) -> str:
        """A name that other lines of the file do not change."""
        text = "\0".join((self.file, self.operator, self.text, str(self.turn)))
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    @property
    def room(self) -> Room:
        """The folder of whose package the file is part."""
        return "reference" if self.file.startswith("reference/") else "fast"

    @property
    def module(self) -> str:
        """The dotted name by which the file is imported."""
        parts = Path(self.file).with_suffix("").parts
        return ".".join(("pairproof", *(part for part in parts if part != "__init__")))

    def source(self) -> str:
        """The mutated text of the whole file."""
        from cosmic_ray import mutating, plugins

        operator = plugins.get_operator(f"core/{self.operator}")()
        text: str | None = mutating.mutate_code(source(self.file), operator, self.occurrence)
        assert text is not None
        return text

    def change(self) -> tuple[str, str]:
        """The changed lines before and after, stripped."""
        before, after = source(self.file).splitlines(), self.source().splitlines()
        same = len(before) == len(after)
        if not same:  # a decorator that is gone
            return self.text, ""
        changed = [(old.strip(), new.strip()) for old, new in zip(before, after, strict=True) if old != new]
        return changed[0] if changed else (self.text, self.text)


@cache
def source(file: str) -> str:
    """The text of a file below the repository."""
    return (ROOT / file).read_text(encoding="utf-8")


def files() -> list[str]:
    """The files that are mutated."""
    found = [path.relative_to(ROOT) for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    return [path.as_posix() for path in found if not any(path.match(pattern) for pattern in LEFT_OUT)]


def operators() -> Iterator[tuple[str, Any]]:
    """cosmic-ray's operators that are used, by name, each with an instance.

    Left out are those that make of a number a bit pattern or of an order an identity, which nothing can miss, and the
    replacement of a sign by another sign where its removal is the same.
    """
    from cosmic_ray import plugins

    for full in sorted(plugins.operator_names()):
        provider, _, name = full.partition("/")
        kind, *between = name.split("_")
        if provider != "core" or kind in ("VariableReplacer", "VariableInserter"):
            continue
        if kind == "ReplaceUnaryOperator" and between[0] != "Delete":
            continue
        if kind in ("ReplaceBinaryOperator", "ReplaceComparisonOperator") and not any(
            set(between) <= set(family) for family in (ARITHMETIC, BITS, ORDER, IDENTITY)
        ):
            continue
        yield name, plugins.get_operator(full)()


@cache
def mutants(file: str) -> tuple[Mutant, ...]:
    """Every mutant of a file, in the order of its places."""
    from cosmic_ray.ast import ast_nodes, get_ast

    text = source(file)
    lines = text.splitlines()
    nodes = list(ast_nodes(get_ast(text)))
    anatomy = _Anatomy(text)
    found: list[tuple[tuple[int, int], str, int]] = []
    for name, operator in operators():
        places = (start for node in nodes for start, _ in operator.mutation_positions(node))
        found += [(place, name, k) for k, place in enumerate(places)]
    made: list[Mutant] = []
    turns: Counter[tuple[str, str]] = Counter()
    for (line, column), name, occurrence in sorted(found):
        here = lines[line - 1].strip()
        turn = turns[name, here]
        turns[name, here] += 1
        if not anatomy.dead(line, column, name):
            span, inside = anatomy.statement(line)
            made.append(Mutant(file, name, occurrence, line, column, here, turn, span, inside))
    return tuple(made)


def _is_name(node: ast.expr) -> bool:
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    return any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in parts)


class _Anatomy:
    """What is code in a file, and where its statements begin and end."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.dead_spans: list[tuple[tuple[int, int], tuple[int, int]]] = []
        self.statements: list[tuple[int, int, tuple[int, int], bool]] = []
        self.sums: list[tuple[tuple[int, int], tuple[int, int]]] = []
        self.names: list[tuple[tuple[int, int], tuple[int, int]]] = []
        tree = ast.parse(text)
        for node in ast.walk(tree):
            match node:
                case ast.arg() | ast.AnnAssign() if node.annotation is not None:
                    self._bury(node.annotation)
                case ast.FunctionDef():
                    if node.returns is not None:
                        self._bury(node.returns)
                case ast.If() if "TYPE_CHECKING" in ast.dump(node.test):
                    self._bury(node)
                case ast.BinOp() | ast.AugAssign():
                    self.sums.append((self._place(node, "lineno", "col_offset"), self._end(node)))
                case ast.Compare() if any(_is_name(part) for part in (node.left, *node.comparators)):
                    self.names.append((self._place(node, "lineno", "col_offset"), self._end(node)))
                case ast.Raise():
                    # What an error says is for its reader; the error cases hold it to some words.
                    for part in ast.walk(node):
                        if isinstance(part, ast.JoinedStr):
                            self._bury(part)
        self._walk(tree, False)

    def _bury(self, node: ast.AST) -> None:
        self.dead_spans.append((self._place(node, "lineno", "col_offset"), self._end(node)))

    def _end(self, node: ast.AST) -> tuple[int, int]:
        return self._place(node, "end_lineno", "end_col_offset")

    def _place(self, node: ast.AST, line: str, column: str) -> tuple[int, int]:
        row: int = getattr(node, line)
        # The syntax tree counts bytes, cosmic-ray's counts characters.
        return row, len(self.lines[row - 1].encode()[: getattr(node, column)].decode())

    def _walk(self, node: ast.AST, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.stmt, ast.ExceptHandler)):
                body: list[ast.stmt] = getattr(child, "body", [])
                last = child.end_lineno or child.lineno
                if body:
                    last = max(child.lineno, min(part.lineno for part in body) - 1)
                decorators: list[ast.expr] = getattr(child, "decorator_list", [])
                first = min([child.lineno, *(decorator.lineno for decorator in decorators)])
                reach = (child.lineno, last)
                if isinstance(child, ast.FunctionDef):
                    # A default is made at import, but nobody sees it who does not call the function.
                    self.statements.append((child.lineno, last, (child.lineno, child.end_lineno or last), True))
                    reach, last = (first, last), child.lineno - 1
                if first <= last:
                    self.statements.append((first, last, reach, inside))
            self._walk(child, inside or isinstance(child, ast.FunctionDef))

    def dead(self, line: int, column: int, operator: str) -> bool:
        """Whether a place is no code: an annotation, an alias of types, the text of an error."""
        if operator.startswith("ReplaceBinaryOperator_BitOr") and not self.statement(line)[1]:
            return True  # outside functions it joins types
        if operator.startswith("ReplaceBinaryOperator") and not any(a <= (line, column) < b for a, b in self.sums):
            return True  # a star among parameters
        ordered = operator.startswith("ReplaceComparisonOperator") and operator.endswith(("Lt", "LtE", "Gt", "GtE"))
        if ordered and any(start <= (line, column) < stop for start, stop in self.names):
            return True  # options have names, and nobody asks which comes first in the alphabet
        return any(start <= (line, column) < stop for start, stop in self.dead_spans)

    def statement(self, line: int) -> tuple[tuple[int, int], bool]:
        """The lines by which one comes who runs the innermost statement; and whether that takes a call.

        They are those of the statement, its header alone if it has a body, but of the whole function where the place is
        in its header.
        """
        around = [
            (last - first, -first, reach, inside)
            for first, last, reach, inside in self.statements
            if first <= line <= last
        ]
        if not around:
            return (line, line), False
        _, _, reach, inside = min(around)
        return reach, inside


def draw(chosen: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Draw mutants, from every file its share of all.

    The lot of a mutant hangs on the seed and its name alone: lines that come and go elsewhere leave it in the draw, and
    a longer draw holds a shorter one.

    Args:
        chosen: files.
        count: how many, or a few more, because shares are rounded up; all if there are fewer.
        seed: of the draw.

    Returns:
        The mutants, in the order of their lots.
    """

    def lot(mutant: Mutant) -> str:
        return hashlib.sha256(f"{seed} {mutant.id}".encode()).hexdigest()

    number = sum(len(mutants(file)) for file in chosen)
    drawn = []
    for file in chosen:
        share = math.ceil(min(count, number) * len(mutants(file)) / max(number, 1))
        drawn += sorted(mutants(file), key=lot)[:share]
    return sorted(drawn, key=lot)


# The checks.


@dataclass(frozen=True)
class Held:
    """What an implementation is held to on one case in one dtype."""

    case: Case
    true: Truth
    allowed: Bounds
    dtype: str


@dataclass
class Check:
    """One question to the code: a case to an implementation in a dtype, or a call that it must refuse.

    Attributes:
        name: what is asked, as it is told.
        ask: returns what is wrong, or nothing.
        covers: whether its case is one of the covering ones.
        beyond: whether the suite makes no such promise, so that it is asked only where the code as it is passes it.
        seconds: what it took on the code as it is.
    """

    name: str
    ask: Callable[[], str]
    covers: bool
    beyond: bool = False
    seconds: float = 0.0


class Learned(fast_peers.Fast):
    """The losses as they are differentiated in training: with a learned temperature, by ``torch.func``, and twice.

    The cases prove more than they say. A logit is a similarity over the temperature T, so that the loss's derivative by
    T follows from its derivatives by the similarities. Cosines do not change with a row's length, and products as long
    as T grows with the rows' squares: by Euler's identity the second derivative, taken along the rows (and 2 T), is a
    multiple of the first. In tiles the losses are run under autocast, which must not reach them.
    """

    name = "fast-learned"

    def __init__(self, options: Mapping[str, str], device: str, backend: str | None = None) -> None:
        """See the base class; ``backend`` is the road that is asked for."""
        super().__init__(options, device)
        self.road = backend
        if backend:
            self.name = f"{self.name}-{backend}"  # type: ignore[misc]

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        with ExitStack() as around:
            if self.road == "tiled":
                around.enter_context(vars(fast_peers)["tiles_of"](4))
                around.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
            yield

    def _given(self, case: Case, dtype: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        return self.tensors(case, dtype), torch.tensor(float(case.option("temperature")), dtype=torch.float64)

    def _total(self, case: Case, given: Mapping[str, torch.Tensor], temperature: torch.Tensor) -> torch.Tensor:
        return self._loss(case, given, temperature=temperature, **({"backend": self.road} if self.road else {}))

    def evaluate(self, case: Case, dtype: str) -> Outcome:
        """Value and gradients by ``torch.func``."""
        with self._surroundings():
            values, gradients, _ = self._differentiated(case, dtype)
        gradient = gradients.pop(case.first)
        return Outcome(values, gradient, other_gradients=gradients)

    def _differentiated(self, case: Case, dtype: str) -> tuple[list[float], dict[str, Any], float]:
        given, temperature = self._given(case, dtype)

        def total(given: dict[str, torch.Tensor], temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            found = self._total(case, given, temperature)
            return found.sum(), found

        given = {name: tensor.detach() for name, tensor in given.items()}
        (gradients, by_temperature), loss = torch.func.grad(total, argnums=(0, 1), has_aux=True)(given, temperature)
        arrays = {name: gradient.double().numpy() for name, gradient in gradients.items()}
        return loss.detach().double().reshape(-1).tolist(), arrays, float(by_temperature)

    def asking_temperature(self, held: Held) -> Callable[[], str]:
        """The derivative by the temperature: gross mistakes alone are looked for."""
        case, true = held.case, held.true

        def asked() -> str:
            temperature = float(case.option("temperature"))
            assert true.similarity is not None
            parts = true.weights * true.similarity
            scale = sum(true.values) if case.option("base_temperature") is not None else 0.0
            expected = (scale - parts.sum()) / temperature
            room = ROUGH * (abs(scale) + np.abs(parts).sum()) / temperature
            with self._surroundings():
                found = self._differentiated(case, held.dtype)[2]
            return "" if abs(found - expected) <= room else f"by temperature: expected {expected}, got {found}"

        return _guarded(asked)

    def asking_twice(self, held: Held) -> Callable[[], str]:
        """The second derivative along the rows: gross mistakes alone are looked for."""
        case, true = held.case, held.true
        assert true.gradient is not None
        proved = {case.first: true.gradient, **true.other_gradients}

        def asked() -> str:
            given, temperature = self._given(case, held.dtype)
            temperature.requires_grad_()
            leaves = [*given.values(), temperature]
            dot = case.option("similarity") == "dot"
            along = [*(rows.detach() for rows in given.values()), 2 * temperature.detach() * dot]
            with self._surroundings():
                total = self._total(case, given, temperature).sum()
                first = torch.autograd.grad(total, leaves, create_graph=True)
                second = torch.autograd.grad(first, leaves, along)
            # Under "dot" the base temperature makes the loss itself grow with T.
            degree = 1 if dot and case.option("base_temperature") is not None else -1
            for name, found, model in zip(given, second, first, strict=False):
                gradient = proved[name]
                room = ROUGH * (np.abs(gradient).max() or 1.0)
                if not np.abs(found.numpy() - degree * gradient).max() <= room:
                    return f"second derivative by {name}: expected {degree} times the first"
                if not np.abs(model.detach().numpy() - gradient).max() <= room:
                    return f"gradient by {name}, kept for a second derivative"
            return ""

        return _guarded(asked)


ROUGH = 1e-3
"""Beyond which a derivative that the cases prove only by a relation counts as a mistake."""


def _guarded(asked: Callable[[], str]) -> Callable[[], str]:
    def ask() -> str:
        try:
            return asked()
        except Exception as error:  # whatever the mutated code raises is a result
            return f"{type(error).__name__}: {error}".splitlines()[0]

    return ask


class Judge:
    """The checks of one room, with truths and bounds from the code as it is."""

    def __init__(self, room: Room, takes: Callable[[str], bool] = lambda _: True) -> None:
        """Compute truths and bounds.

        Args:
            room: whose implementations are asked.
            takes: whether a case of this id is used.
        """
        self.room = room
        self.checks: list[Check] = []
        self.hits: dict[tuple[str, int], list[int]] = {}
        stored = {case: golden for case, golden in load_cases(load_worked()).items() if takes(case.id)}
        few = set(covering(stored)) if stored else set()
        for case, golden in stored.items():
            self._add_case(case, golden, case in few)
        for error in load_errors():
            if takes(f"golden/{error.id}"):
                self._add_error(error)

    def implementations(self) -> list[Implementation]:
        """Who runs the code of the room."""
        kinds: tuple[type[Implementation], ...] = (Reference, scipy_peer.ScipyLosses)
        if self.room == "fast":
            kinds = (fast_peers.Fast, fast_peers.FastDense, fast_peers.FastTiled, fast_peers.FastExact)
        return [kind({}, "cpu") for kind in kinds]

    def _add_case(self, case: Case, golden: GoldenCase | None, covers: bool) -> None:
        true = truth(case) if golden is None else stored_truth(case, golden.expected)
        for dtype in DTYPES if self.room == "fast" else DTYPES[:1]:
            if not case.holds_in(dtype):
                continue
            allowed = bounds(case, true, dtype)
            if self.room == "fast":
                allowed = held_to(allowed, true, plain_outcome(case, dtype))
            held = Held(case, true, allowed, dtype)
            for implementation in self.implementations():
                if implementation.refuses(case) is None:
                    self.checks.append(
                        Check(f"{case.id} {implementation.name} {dtype}", _asking(implementation, held), covers)
                    )
            if self.room == "fast" and covers:
                self._add_roads(held)
            if self.room == "reference" and Reference({}, "cpu").refuses(case) is None:
                self.checks.append(Check(f"{case.id} record", _guarded(_recording(case)), covers))
        if self.room == "reference" and "partners" in case.arguments and not case.others:
            for name, partners in fast_peers.PARTNERS.items():
                if list(case.arguments["partners"]) == partners(case.n):
                    layout = name.removesuffix("_partners")
                    self.checks.append(Check(f"{case.id} {layout}", _guarded(_laying_out(case, layout)), covers))

    def _add_roads(self, held: Held) -> None:
        """What a case tells beyond value and gradient: of the learned temperature, and of the second derivative."""
        for backend in (None, "tiled", "exact"):
            road = Learned({}, "cpu", backend)
            name = f"{held.case.id} {road.name} {held.dtype}"
            self.checks.append(Check(name, _asking(road, held), covers=True, beyond=True))
            if held.true.gradient is None or held.true.similarity is None:
                continue
            self.checks.append(Check(f"{name} temperature", road.asking_temperature(held), covers=True, beyond=True))
            if held.dtype == "float64":
                self.checks.append(Check(f"{name} twice", road.asking_twice(held), covers=True, beyond=True))

    def _add_error(self, error: ErrorCase) -> None:
        self.checks.append(Check(f"golden/{error.id} {self.room}", _refusing(self.room, error), True))

    def survey(self, told: Callable[[int, int], None]) -> None:
        """Run every check on the code as it is: note the lines that it comes by, and how long it takes.

        Args:
            told: of how many checks how many are done.

        Raises:
            RuntimeError: a check does not pass.
        """
        ours = {str(ROOT / file): file for file in files() if file.startswith(f"{self.room}/")}
        hits: set[tuple[str, int]] = set()

        def line(frame: FrameType, event: str, _: Any) -> Any:
            hits.add((frame.f_code.co_filename, frame.f_lineno))
            return line

        def call(frame: FrameType, event: str, _: Any) -> Any:
            return line if frame.f_code.co_filename in ours else None

        forgetful = [
            value
            for name, module in list(sys.modules.items())
            if name.startswith(f"pairproof.{self.room}")
            for value in vars(module).values()
            if hasattr(value, "cache_clear")
        ]
        for k, check in enumerate(self.checks):
            # What an earlier check left in a cache would hide the lines that this one needs.
            for function in forgetful:
                function.cache_clear()
            hits.clear()
            sys.settrace(call)
            try:
                wrong = check.ask()
            finally:
                sys.settrace(None)
            if wrong and check.beyond:
                continue
            if wrong:
                raise RuntimeError(f"{check.name} does not pass on the code as it is: {wrong}")
            for file, number in hits:
                self.hits.setdefault((ours[file], number), []).append(k)
            began = time.perf_counter()
            check.ask()
            check.seconds = time.perf_counter() - began
            told(k + 1, len(self.checks))

    def drop_unfit(self) -> None:
        """Leave out the checks beyond the promises that the code as it is does not pass, as a survey does."""
        self.checks = [check for check in self.checks if not (check.beyond and check.ask())]

    @property
    def unfit(self) -> int:
        """How many checks the code as it is does not pass, which are asked of no mutant."""
        return sum(check.seconds == 0 for check in self.checks) if self.hits else 0

    def order(self, mutant: Mutant) -> list[Check]:
        """The checks that come by a mutant's statement: covering cases first, then the quick ones.

        Without a survey, and where the statement is run at import, that is all of them.
        """
        found: Iterable[int] = [k for k, check in enumerate(self.checks) if check.seconds or not self.hits]
        if self.hits and mutant.inside:
            first, last = mutant.lines
            found = sorted({k for n in range(first, last + 1) for k in self.hits.get((mutant.file, n), ())})
        return sorted((self.checks[k] for k in found), key=lambda check: (not check.covers, check.seconds))


def _asking(implementation: Implementation, held: Held) -> Callable[[], str]:
    def ask() -> str:
        try:
            outcome = implementation.evaluate(held.case, held.dtype)
            return compare(held.case, held.true, outcome, held.allowed, held.dtype).first
        except Exception as error:  # whatever the mutated code raises is a result
            return f"{type(error).__name__}: {error}".splitlines()[0]

    return ask


def _recording(case: Case) -> Callable[[], str]:
    """What the case says of the record of terms, beside the numbers that are compared anyway."""

    def asked() -> str:
        terms = case_module.call_reference(case).terms
        base = case.option("base_temperature")
        positives, members = case.positives(), case.members()
        negatives = [[j for j in row if j not in own] for row, own in zip(members, positives, strict=True)]
        said: dict[str, tuple[Any, Any]] = {
            "positives": (terms.positives, positives),
            "negatives": (terms.negatives, negatives),
            "counted": (terms.counted, case.counted()),
            "anchors": (sorted(terms.anchor_losses), case.anchors()),
            "scale": (terms.scale, 1.0 if base is None else float(case.option("temperature")) / base),
            "pairs": ([(pair.anchor, pair.other) for pair in terms.pairs.values()], list(terms.pairs)),
            "positive pairs": (
                [place for place, pair in terms.pairs.items() if pair.positive],
                [(i, j) for i, j in terms.pairs if j in positives[i]],
            ),
        }
        for name, (found, expected) in said.items():
            if not (math.isclose(found, expected) if name == "scale" else found == expected):
                return f"{name}: expected {expected}, got {found}"
        return ""

    return asked


def _laying_out(case: Case, layout: str) -> Callable[[], str]:
    """That a layout of two views makes those rows partners which the case says are, and gives the rows back."""

    def asked() -> str:
        package = vars(case_module)["reference"]
        partners = [int(p) for p in case.arguments["partners"]]
        views = package.split_views(case.embeddings, 2, layout)
        if views.shape != (case.n // 2, 2, case.embeddings.shape[1]):
            return f"views: got shape {list(views.shape)}"
        rows = package.flatten_views(views, layout)
        if rows.shape != case.embeddings.shape or not (rows == case.embeddings).all():
            return "rows: expected those of the case"
        numbers = package.split_views(np.arange(case.n)[:, None], 2, layout)[:, :, 0]
        if [partners[i] for i in numbers[:, 0]] != numbers[:, 1].tolist():
            return f"views: expected partners, got rows {numbers.tolist()}"
        labels = package.repeat_labels(np.arange(case.n // 2), 2, layout)
        if labels[numbers].tolist() != [[item, item] for item in range(case.n // 2)]:
            return f"labels: expected one for partners, got {labels.tolist()}"
        if getattr(package, f"{layout}_partners")(case.n).tolist() != partners:
            return "partners: expected those of the case"
        return ""

    return asked


def _refusing(room: Room, error: ErrorCase) -> Callable[[], str]:
    def ask() -> str:
        package: ModuleType = vars(fast_peers)["fast"] if room == "fast" else vars(case_module)["reference"]
        given = dict(error.arguments)
        if room == "fast":
            given = {k: torch.from_numpy(v.copy()) if isinstance(v, np.ndarray) else v for k, v in given.items()}
        try:
            getattr(package, LOSSES[error.loss].function)(**given)
        except Exception as raised:  # of which type is what is asked
            message = str(raised)
            if type(raised) is not error.exception:
                return f"expected {error.exception.__name__}, got {type(raised).__name__}: {message}"
            if not message.startswith(f"{error.argument}:") or any(word not in message for word in error.words):
                return f"expected {error.argument}: ... {', '.join(error.words)}, got {message}"
            return ""
        return f"expected {error.exception.__name__}, got a result"

    return ask


# Judging a mutant, in a process of its own.


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant.

    Attributes:
        how: "case" (or an error case), "document" (a figure or a claim), "import" (it cannot be imported), "crash" (the
            process died), "time" (it did not end), "survived", or "unreached" (no check comes by its statement).
        check: the first that failed.
        message: what it said.
        asked: how many checks there were that could tell.
        seconds: what it took.
    """

    how: str
    check: str = ""
    message: str = ""
    asked: int = 0
    seconds: float = 0.0


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from a text in place of its file."""

    def __init__(self, name: str, path: str, text: str) -> None:
        super().__init__(name, path)
        self.text = text

    def get_code(self, fullname: str) -> Any:
        return compile(self.text, self.path, "exec", dont_inherit=True)


class _Finder:
    """Finds one module in a text, and leaves all others to who comes after."""

    def __init__(self, name: str, path: Path, text: str) -> None:
        self.name, self.path, self.text = name, path, text

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        folders = [str(self.path.parent)] if self.path.name == "__init__.py" else None
        loader = _Loader(name, str(self.path), self.text)
        return importlib.util.spec_from_file_location(
            name, self.path, loader=loader, submodule_search_locations=folders
        )


def _forget(package: str) -> None:
    for name in list(sys.modules):
        if name == package or name.startswith(f"{package}."):
            del sys.modules[name]


def put_in_place(mutant: Mutant, text: str) -> None:
    """Import the mutated room beside the one that is loaded, and have the implementations run it."""
    sys.meta_path.insert(0, _Finder(mutant.module, ROOT / mutant.file, text))
    package = f"pairproof.{mutant.room}"
    _forget(package)
    mutated = importlib.import_module(package)
    if mutant.room == "fast":
        kernels, engine = (importlib.import_module(f"{package}.{name}") for name in ("kernels", "engine"))
        vars(fast_peers).update(fast=mutated, kernels=kernels, tiles_of=engine.tiles_of)
    else:
        vars(case_module).update(reference=mutated)
        vars(scipy_peer).update(scipy_losses=importlib.import_module(f"{package}.scipy_losses"))


def _documents() -> tuple[str, str]:
    """The first figure or claim that does not hold, and what is wrong; their truth is what is printed.

    The judges of figures and claims are imported anew as well, because they run the reference themselves.
    """
    _forget("pairproof.conformance")
    try:
        worked = importlib.import_module("pairproof.conformance.documents.figures")
        claims = importlib.import_module("pairproof.conformance.documents.claims")
        fixtures = importlib.import_module("pairproof.conformance.documents.load").load_worked()
        for fixture in fixtures:
            for judgement in worked.judge(fixture):
                if not judgement.passed:
                    return judgement.case, judgement.message
            for claim in claims.judge_claims(fixture):
                if not claim.passed:
                    return claim.case, f"recorded as {claim.claim.verdict!r}, found {claim.verdict!r}"
    except Exception as error:  # whatever the mutated code raises is a result
        return "figures and claims", f"{type(error).__name__}: {error}".splitlines()[0]
    return "", ""


def judge_here(
    judge: Judge, mutant: Mutant, text: str | None = None, watch: Callable[[float], object] = lambda _: None
) -> Verdict:
    """Judge a mutant in this process, which is of no use for anything else afterwards.

    Args:
        judge: the checks.
        mutant: the mutant.
        text: the mutated file, in place of the mutant's own.
        watch: told before each step how many seconds it may take.
    """
    order = judge.order(mutant)
    watch(PATIENCE)
    try:
        put_in_place(mutant, mutant.source() if text is None else text)
    except Exception as error:  # whatever the mutated code raises is a result
        return Verdict("import", "import", f"{type(error).__name__}: {error}".splitlines()[0], len(order))
    for check in order:
        watch(PATIENCE + 100 * check.seconds)
        wrong = check.ask()
        if wrong:
            return Verdict("case", check.name, wrong, len(order))
    if mutant.room == "reference":
        watch(10 * PATIENCE)
        name, wrong = _documents()
        if wrong:
            return Verdict("document", name, wrong, len(order))
    return Verdict("survived" if order else "unreached", asked=len(order))


PATIENCE = 10.0
"""Seconds that a check may take in any case, and the import."""

ROOM_TO_GROW = 8 * 2**30
"""Bytes that a mutant may ask for beyond what its process has: a wrong size must not take the machine's memory."""


def _child(judge: Judge, mutant: Mutant, text: str | None, answers: Any) -> None:
    # Nothing of Python's own can interrupt a loop within torch; the signal's default, death, can.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silent, stream)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + ROOM_TO_GROW
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    np.seterr(all="ignore")
    try:
        answers.send(judge_here(judge, mutant, text, lambda most: signal.setitimer(signal.ITIMER_REAL, most)))
    except BaseException:  # the tool's own mistake, which must not look like a killed mutant
        answers.send(traceback.format_exc())
    answers.close()
    os._exit(0)


def judge_all(
    judge: Judge, work: Sequence[Mutant], processes: int, texts: Mapping[str, str] | None = None
) -> Iterator[tuple[Mutant, Verdict]]:
    """Judge mutants, each in a fork of this process.

    Args:
        judge: the checks.
        work: the mutants.
        processes: how many at a time.
        texts: by id a mutated text, in place of the mutant's own.

    Yields:
        Every mutant with its verdict, as they end.

    Raises:
        RuntimeError: this tool itself went wrong.
    """
    context = multiprocessing.get_context("fork")
    waiting = list(reversed(work))
    running: dict[Any, tuple[Mutant, Any, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < processes:
            mutant = waiting.pop()
            answers, sending = context.Pipe(duplex=False)
            given = judge, mutant, (texts or {}).get(mutant.id), sending
            child = context.Process(target=_child, args=given, daemon=True)
            child.start()
            sending.close()
            running[child.sentinel] = mutant, child, answers, time.perf_counter()
        for sentinel in multiprocessing.connection.wait(list(running)):
            mutant, child, answers, began = running.pop(sentinel)
            child.join()
            seconds = time.perf_counter() - began
            # A process that died has closed its end without a word.
            said = _last_word(answers)
            if isinstance(said, str):
                raise RuntimeError(f"{mutant.id}: {said}")
            if said is None:
                how = "time" if child.exitcode == -signal.SIGALRM else "crash"
                said = Verdict(how, message=f"exit code {child.exitcode}")
            yield mutant, Verdict(**{**asdict(said), "seconds": seconds})


def _last_word(answers: Any) -> Verdict | str | None:
    try:
        said: Verdict | str | None = answers.recv() if answers.poll() else None
    except EOFError:
        return None
    return said


# Results and explanations.


@dataclass(frozen=True)
class Explanation:
    """Why a mutant may survive.

    Attributes:
        mutant: its id.
        told: what the file says of it, for whoever reads the file: `describe` of the mutant.
        kind: one of `KINDS`.
        why: the argument.
    """

    mutant: str
    told: str
    kind: str
    why: str


def explanations(path: Path = EXPLAINED) -> dict[str, Explanation]:
    """The explanations on file, by the mutant's id.

    Raises:
        ValueError: an explanation of unknown kind or without words, or two of one mutant.
    """
    found: dict[str, Explanation] = {}
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["explained"] if path.is_file() else []:
        if entry["kind"] not in KINDS or not entry["why"]:
            raise ValueError(f"{path.name}: expected a kind of {', '.join(KINDS)}, and why; got {entry['kind']!r}")
        for line in entry["mutants"]:
            name, _, told = line.partition(" ")
            if name in found:
                raise ValueError(f"{path.name}: {name} is explained twice")
            found[name] = Explanation(name, told, entry["kind"], entry["why"])
    return found


def describe(mutant: Mutant) -> str:
    """A mutant in a line that stays as it is while its line does."""
    before, after = mutant.change()
    return f"{mutant.file}: {before} becomes {after or 'nothing'}"


def record(mutant: Mutant, verdict: Verdict) -> dict[str, Any]:
    """What is kept of a judged mutant."""
    kept: dict[str, Any] = {"id": mutant.id, "file": mutant.file, "line": mutant.line, "operator": mutant.operator}
    kept |= {"how": verdict.how}
    if verdict.how not in ALIVE:
        return kept | {"check": verdict.check or verdict.message}
    return kept | {"change": describe(mutant)}


@dataclass(frozen=True)
class Score:
    """How many mutants there are of each sort.

    Attributes:
        judged: that some check comes by.
        killed: of those.
        harmless: of those that survive, and are explained as no mistake.
    """

    judged: int
    killed: int
    harmless: int

    @property
    def of_all(self) -> float:
        """The share of all judged mutants that is killed."""
        return self.killed / max(self.judged, 1)

    @property
    def of_mistakes(self) -> float:
        """The share that is killed of those that are mistakes."""
        return self.killed / max(self.judged - self.harmless, 1)


def score(records: Iterable[Mapping[str, Any]], explained: Mapping[str, Explanation]) -> Score:
    """Count the mutants of a run."""
    judged = [one for one in records if one["how"] != "unreached"]
    alive = [one["id"] for one in judged if one["how"] == "survived"]
    harmless = sum(name in explained and explained[name].kind in NO_MISTAKE for name in alive)
    return Score(len(judged), len(judged) - len(alive), harmless)


def problems(records: Sequence[Mapping[str, Any]], explained: Mapping[str, Explanation]) -> list[str]:
    """What is wrong with a run, beside what the checks of the tool itself say: a line for each thing."""
    found = []
    total = score(records, explained)
    if total.of_mistakes < GOAL:
        found.append(f"{total.of_mistakes:.1%} of the mistakes are killed, {GOAL:.0%} is the least")
    how = {one["id"]: one for one in records}
    found += [
        f"{one['id']} survives unexplained: {one['file']}:{one['line']}: {one['change']}"
        for one in records
        if one["how"] == "survived" and one["id"] not in explained
    ]
    every = {mutant.id: mutant for file in files() for mutant in mutants(file)}
    for name, explanation in explained.items():
        if name not in every:
            found.append(f"{name} is explained, and no mutant: {explanation.told}")
        elif how.get(name, {}).get("how", "survived") != "survived":
            what = how[name].get("check") or ENDED[how[name]["how"]]
            found.append(f"{name} is explained, and did not survive ({what}): {explanation.told}")
        elif explanation.told != describe(every[name]):
            found.append(f"{name} is explained as {explanation.told}, and is {describe(every[name])}")
    return found


def report(data: Mapping[str, Any], explained: Mapping[str, Explanation]) -> str:
    """The text of ``mutants.md``."""
    records: list[dict[str, Any]] = data["mutants"]
    total = score(records, explained)
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    lines = [
        "# Mutants",
        "",
        "Written by `make mutants`, together with `mutants.json`; the explanations are those of `mutants.toml`. What a",
        "mutant is, and who judges it, stands at the top of `mutants.py`.",
        "",
        f"{len(records)} mutants were drawn with seed {data['seed']} from {data['of']}.",
        f"By {len(records) - total.judged} of them no check comes; they stand at the end.",
        f"Of the {total.judged} others **{total.killed} are killed, {total.of_all:.1%}**.",
        f"{total.judged - total.killed} survive, of which {total.harmless} are no mistakes:",
        f"of the mistakes **{total.of_mistakes:.1%}** are killed.",
        f"It took {data['minutes']} minutes with {data['processes']} process{'es' if data['processes'] > 1 else ''},",
        f"with {versions}.",
        "",
        "How they ended: " + "; ".join(f"{n} {ENDED[how]}" for how, n in _ends(records)) + ".",
        "",
        "| file | judged | killed | survive, no mistake | survive | killed of all | of the mistakes |",
        "|---|---|---|---|---|---|---|",
    ]
    for file in files():
        here = score([one for one in records if one["file"] == file], explained)
        if here.judged:
            alive = here.judged - here.killed - here.harmless
            numbers = f"{here.judged} | {here.killed} | {here.harmless} | {alive}"
            lines.append(f"| `{file}` | {numbers} | {here.of_all:.0%} | {here.of_mistakes:.0%} |")
    lines += ["", "## Survivors"]
    for kind, words in KINDS.items():
        of_kind: dict[str, list[str]] = {}
        for one in records:
            explanation = explained.get(one["id"])
            if one["how"] == "survived" and explanation is not None and explanation.kind == kind:
                of_kind.setdefault(explanation.why, []).append(_told(one))
        if of_kind:
            lines += ["", f"### {kind.capitalize()}: {words} ({sum(map(len, of_kind.values()))})"]
        for why, told_of in of_kind.items():
            lines += ["", why, "", *told_of]
    lines += ["", "## Unreached", ""]
    lines += [
        "No case on a CPU comes by these: kernels and other devices, graphs that are compiled, arguments no case has."
    ]
    lines += ["", *(_told(one) for one in records if one["how"] == "unreached")]
    return "\n".join(lines) + "\n"


def _told(one: Mapping[str, Any]) -> str:
    before, _, after = one["change"].partition(": ")[2].partition(" becomes ")
    return f"- `{one['id']}` {one['file']}:{one['line']}: `{before}` becomes `{after}`"


ENDED = {
    "case": "failed a case",
    "document": "failed a printed figure or a claim alone",
    "import": "could not be imported",
    "crash": "ended the process",
    "time": "did not end in time",
    "survived": "survived",
    "unreached": "no check comes by",
}
ALIVE = ("survived", "unreached")


def _ends(records: Iterable[Mapping[str, Any]]) -> list[tuple[str, int]]:
    counts = Counter(one["how"] for one in records)
    return [(how, counts[how]) for how in ENDED if counts[how]]


# The command.


def digest() -> str:
    """Of everything that a verdict depends on."""
    total = hashlib.sha256(Path(__file__).read_bytes())
    paths = [path for folder in ("conformance", "fast", "fixtures", "reference") for path in (ROOT / folder).rglob("*")]
    for path in sorted(path for path in paths if path.suffix in (".py", ".json")):
        total.update(path.read_bytes())
    return total.hexdigest()[:16]


class _Session:
    """Verdicts that a run cut off has left in a file: a line for each, and at the top what they depend on."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.known: dict[str, Verdict] = {}
        if path is None:
            return
        if path.is_file():
            first, *rest = path.read_text(encoding="utf-8").splitlines() or [""]
            if first != digest():
                raise ValueError(f"--resume: {path} belongs to other code, or other cases; remove it")
            for line in rest:
                said = json.loads(line)
                name = said.pop("id")
                self.known[name] = Verdict(**said)
        else:
            path.write_text(digest() + "\n", encoding="utf-8")

    def add(self, mutant: Mutant, verdict: Verdict) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"id": mutant.id, **asdict(verdict)}) + "\n")


def _killed_before() -> dict[str, Verdict]:
    """The mutants that the run on file killed. A case more kills none of them less."""
    return {one["id"]: Verdict(one["how"], one["check"]) for one in _before()["mutants"] if one["how"] not in ALIVE}


def _minutes_before() -> int:
    return int(_before()["minutes"])


def _before() -> dict[str, Any]:
    nothing: dict[str, Any] = {"mutants": [], "minutes": 0}
    return nothing | (json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {})


def _judged(
    work: Sequence[Mutant], processes: int, session: _Session, *, survey: bool
) -> Iterator[tuple[Mutant, Verdict]]:
    """Judge mutants of both rooms, or take the verdicts that are known."""
    for room in ROOMS:
        left = []
        for mutant in (mutant for mutant in work if mutant.room == room):
            if mutant.id in session.known:
                yield mutant, session.known[mutant.id]
            else:
                left.append(mutant)
        if not left:
            continue
        print(f"{room}: computing truths and bounds", flush=True)
        judge = Judge(room)
        if survey:
            print(f"{room}: noting which lines each of {len(judge.checks)} checks comes by", flush=True)
            judge.survey(lambda done, of: None)
            print(f"{room}: {judge.unfit} checks beyond the suite's promises are left out", flush=True)
        else:
            judge.drop_unfit()
        # What is collected in a child would copy the pages of all that the parent has loaded.
        gc.collect()
        gc.freeze()
        for mutant, verdict in judge_all(judge, left, processes):
            session.add(mutant, verdict)
            yield mutant, verdict


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=SEED, help="of the draw; default: %(default)s")
    parser.add_argument("--count", type=int, default=COUNT, help="how many mutants are drawn; default: %(default)s")
    parser.add_argument(
        "--only", action="append", metavar="FILE", help="of this file alone; may be repeated; writes nothing"
    )
    parser.add_argument("--list", action="store_true", help="print what is drawn, judge nothing")
    parser.add_argument(
        "--id", action="append", metavar="ID", help="judge this mutant again; may be repeated; writes nothing"
    )
    parser.add_argument("--processes", type=int, default=1, help="how many mutants at a time; default: %(default)s")
    parser.add_argument(
        "--survivors", action="store_true", help="of the run on file judge the survivors alone: for cases that are new"
    )
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keep verdicts in FILE, and take those that it has")
    return parser


def _chosen(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[Mutant]:
    for file in options.only or ():
        if file not in files():
            parser.error(f"--only: expected a file of {', '.join(files())}, got {file}")
    for name, least in (("count", 1), ("processes", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name}: expected at least {least}, got {getattr(options, name)}")
    if options.id:
        every = {mutant.id: mutant for file in files() for mutant in mutants(file)}
        for name in options.id:
            if name not in every:
                parser.error(f"--id: no mutant {name}; see --list")
        return [every[name] for name in options.id]
    return draw(options.only or files(), options.count, options.seed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw and judge; the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        version = metadata.version("cosmic-ray")
    except metadata.PackageNotFoundError:
        print('cosmic-ray is not installed: pip install "pairproof[mutants]"', file=sys.stderr)
        return 3
    if sys.platform != "linux":
        print(
            "mutants are judged in forks of one process, with limits on time and memory: on Linux alone",
            file=sys.stderr,
        )
        return 3
    if Path(next(iter(pairproof.fast.__path__))).resolve() != ROOT / "fast":
        print(f"pairproof is imported from elsewhere, not from {ROOT}", file=sys.stderr)
        return 3
    work = _chosen(parser, options)
    if options.list:
        for mutant in sorted(work, key=lambda one: (one.file, one.line, one.column)):
            print(f"{mutant.id} {mutant.file}:{mutant.line}: {' -> '.join(mutant.change())}")
        return 0
    try:
        session = _Session(options.resume)
    except ValueError as error:
        parser.error(str(error))
    if options.survivors:
        session.known |= _killed_before()
    torch.set_num_threads(1)
    began, done, alive = time.perf_counter(), 0, 0
    verdicts: dict[str, Verdict] = {}
    for mutant, verdict in _judged(work, options.processes, session, survey=not options.id):
        verdicts[mutant.id] = verdict
        done, alive = done + 1, alive + (verdict.how == "survived")
        if options.id or verdict.how in ALIVE:
            said = f"survived {verdict.asked} checks" if verdict.how == "survived" else ENDED[verdict.how]
            told = " ".join(filter(None, (verdict.check, verdict.message)))
            print(f"{mutant.id} {mutant.file}:{mutant.line}: {' -> '.join(mutant.change())}: {said} {told}", flush=True)
        if done % 20 == 0 or done == len(work):
            spent = time.perf_counter() - began
            left = spent / done * (len(work) - done) / 60
            print(f"  {done} of {len(work)}: {alive} survived; {left:.0f} min left", flush=True)
    if options.id:
        return 0
    order = sorted(work, key=lambda one: (one.file, one.line, one.column))
    records = [record(mutant, verdicts[mutant.id]) for mutant in order]
    explained = explanations()
    total = score(records, explained)
    if not options.only and total.judged >= LEAST:
        data = {
            "format": "pairproof-mutants/1",
            "seed": options.seed,
            "of": sum(len(mutants(file)) for file in files()),
            "minutes": _minutes_before() * options.survivors
            + math.ceil(sum(verdict.seconds for verdict in verdicts.values()) / options.processes / 60),
            "processes": options.processes,
            "versions": {"cosmic-ray": version, "torch": torch.__version__, "python": platform.python_version()},
            "mutants": records,
        }
        lines = ",\n  ".join(json.dumps(one) for one in records)
        head = json.dumps({**data, "mutants": None}, indent=1).replace(
            '"mutants": null', f'"mutants": [\n  {lines}\n ]'
        )
        RESULTS.write_text(head + "\n", encoding="utf-8")
        REPORT.write_text(report(data, explained), encoding="utf-8")
        print(f"{RESULTS.relative_to(ROOT)} and {REPORT.relative_to(ROOT)} written")
    wrong = problems(records, explained)
    for line in wrong:
        print(line, file=sys.stderr)
    ends = "; ".join(f"{number} {ENDED[how]}" for how, number in _ends(records))
    print(f"{len(records)} mutants: {ends}")
    print(f"{total.of_all:.1%} killed of all that a check comes by, {total.of_mistakes:.1%} of the mistakes")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
