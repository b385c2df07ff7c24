"""Mutation testing: make one small change at a time in ``reference/`` or ``fast/``, and check whether a case fails.

A mutant is one change by an operator of cosmic-ray, such as a number plus one, ``<`` for ``<=``, a negated condition or
a skipped loop. It is judged by these checks:

- golden and worked cases up to the size ``MOST_ROWS``, for ``fast/`` also larger ones of up to ``FEW_COLUMNS`` columns,
  with every adapter of the package, in every supported dtype;
- error cases, which are calls with invalid inputs;
- for ``reference/``, the terms that it records: positives, negatives and anchors;
- for ``fast/``, first and second derivatives on the *covering cases*: a few cases with every trait of the whole set.

``tests/`` is not run: the score measures the cases, which also judge other implementations.

First, every check runs once on the unchanged code, to record its time and the lines that it executes. Each mutant is
then judged in a forked process. The process imports the changed package and runs the checks that execute the changed
statement, until one fails: first the covering cases, then the others in order of time.

The score is the share of mistakes that are killed. Survivors that ``mutants.toml`` explains as "equivalent", "speed" or
"rounding" are not mistakes.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
import tomllib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from importlib.machinery import SourceFileLoader
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

import numpy as np
import torch
from cosmic_ray import mutating, plugins
from cosmic_ray.ast import ast_nodes, get_ast

from pairproof.conformance.documents.load import load_worked
from pairproof.conformance.judge.verify import Limits, load_cases, truth_of
from pairproof.conformance.suite import catalogue, golden, subset
from pairproof.conformance.suite.cases import Case
from pairproof.conformance.suite.records import Bounds, Truth
from pairproof.conformance.truth.compare import compare

ROOT = Path(__file__).resolve().parent.parent
EXPLAINED, RESULTS, REPORT = (ROOT / "tools" / f"mutants.{kind}" for kind in ("toml", "jsonl", "md"))

MOST_ROWS = 130
"""Maximum ``Case.size``. Larger cases take seconds each."""

FEW_COLUMNS = 4
"""For ``fast/``, larger cases are judged too if their matrices have at most so many columns."""

COUNT = 320
GOAL = 0.95
"""Minimum share of mistakes that must be killed."""

PACKAGES = {"reference": ("reference", "scipy"), "fast": ("fast", "fast-dense", "fast-tiled", "fast-exact")}
"""The mutated packages, each with the implementations that run its code."""

SEVERAL = ("fast/distributed.py", "fast/caching.py", "fast/engine/ring.py", "fast/engine/shared.py")
LEFT_OUT = ("*/views.py", "fast/modules.py", "fast/kernels/*", "fast/engine/jit.py", *SEVERAL)
"""Files that are not mutated: they compute no part of a loss, or no case runs them."""

KINDS = {
    "equivalent": "the same result for every input",
    "speed": "the same results by another path, with other block sizes, or with more work",
    "rounding": "mathematically the same result with different rounding",
    "accuracy": "less accurate, but within every bound",
    "range": "a different result, but only outside the documented range",
    "message": "the same exception with a different message",
    "elsewhere": "no check can show it: other devices, larger batches, arguments that no case has; tests/ covers it",
    "missing": "a case is missing",
}
"""Reasons why a mutant may survive."""

HARMLESS = ("equivalent", "speed", "rounding")
"""Kinds of survivors that are not mistakes."""


# Making mutants.

NAMES = ("Add Sub Mul Div FloorDiv Mod Pow", "BitOr BitAnd BitXor LShift RShift", "Eq NotEq Lt LtE Gt GtE", "Is IsNot")
FAMILIES = [set(names.split()) for names in NAMES]
"""An operator is replaced only by another one of its family."""

SUMS = ("arith_expr", "term", "power", "expr", "and_expr", "xor_expr", "shift_expr")
STATEMENTS = ("simple_stmt", "if_stmt", "while_stmt", "for_stmt", "with_stmt", "try_stmt", "funcdef", "decorated")


@dataclass(frozen=True)
class Mutant:
    """One change at one position.

    Attributes:
        operator: name of cosmic-ray's operator.
        occurrence: index among the operator's positions in the file.
        text: the unchanged line, stripped.
        turn: index among the mutants with this operator and text.
        lines: lines of the changed statement; empty for code that runs at import.
    """

    file: str
    operator: str
    occurrence: int
    line: int
    text: str
    turn: int
    lines: range

    @property
    def id(self) -> str:
        """An identifier that depends on the text of the line, not on its number."""
        return _hash("\0".join((self.file, self.operator, self.text, str(self.turn))))[:10]

    def source(self) -> str:
        """Return the changed text of the file."""
        operator = plugins.get_operator(f"core/{self.operator}")()
        text: str = mutating.mutate_code(source(self.file), operator, self.occurrence)
        return text

    def change(self) -> str:
        """Describe the change without line numbers."""
        lines = zip(source(self.file).splitlines(), self.source().splitlines(), strict=False)
        return f"{self.file}: {self.text} becomes {next(new.strip() for old, new in lines if old != new)}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def source(file: str) -> str:
    """Return the text of a file below the repository."""
    return (ROOT / file).read_text(encoding="utf-8")


def files() -> list[str]:
    """Return the files that are mutated."""
    found = [path.relative_to(ROOT) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return [path.as_posix() for path in found if not any(path.match(pattern) for pattern in LEFT_OUT)]


def operators() -> Iterator[tuple[str, Any]]:
    """Yield the operators of cosmic-ray that are used, with their names.

    Operators with arguments, replacements across families, and replacements of one sign by another are not used.
    """
    for full in sorted(plugins.operator_names()):
        name = full.removeprefix("core/")
        kind, *between = name.split("_")
        same_family = len(between) < 2 or "Delete" in between or any(set(between) <= family for family in FAMILIES)
        if same_family and not kind.startswith("Variable"):
            yield name, plugins.get_operator(full)()


@cache
def mutants(file: str) -> tuple[Mutant, ...]:
    """Return all mutants of a file, in the order of their positions."""
    tree = get_ast(source(file))
    lines, nodes = source(file).splitlines(), list(ast_nodes(tree))
    found: list[tuple[tuple[int, int], str, int]] = []
    for name, operator in operators():
        starts = (start for node in nodes for start, _ in operator.mutation_positions(node))
        found += [(start, name, k) for k, start in enumerate(starts)]
    made: list[Mutant] = []
    turns: Counter[tuple[str, str]] = Counter()
    for (line, column), name, occurrence in sorted(found):
        text = lines[line - 1].strip()
        path = [tree.get_leaf_for_position((line, column + 1))]  # at a boundary, this finds the leaf after
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        if not _is_ignored(name, path):
            made.append(Mutant(file, name, occurrence, line, text, turns[name, text], _lines(path)))
        turns[name, text] += 1
    return tuple(made)


def _is_ignored(operator: str, path: Sequence[Any]) -> bool:
    """Return whether no check can judge a change at a position. ``path`` is its leaf and the enclosing nodes."""
    leaf, *around = path
    types = [node.type for node in around]
    if "fstring" in types or leaf.value == "TYPE_CHECKING":
        return True
    for child, parent in pairwise(path):
        annotated = {"annassign": 1, "tfpdef": 2}.get(parent.type)
        if child is (parent.children[annotated] if annotated else getattr(parent, "annotation", None)):
            return True
    if operator.startswith("ReplaceBinaryOperator"):  # a star in a parameter list, or a type alias
        return types[0] not in SUMS or ("BitOr" in operator and "funcdef" not in types)
    if operator.startswith("ReplaceComparisonOperator") and operator.endswith(("Lt", "LtE", "Gt", "GtE")):
        return '"' in around[types.index("comparison")].get_code()  # comparing the order of strings has no meaning
    return False


def _lines(path: Sequence[Any]) -> range:
    """Return the lines of the statement at a position. Of a block, it is the header; of a function, all lines."""
    for k, (child, parent) in enumerate(pairwise(path)):
        if parent.type in STATEMENTS:
            place = {"funcdef": parent, "decorated": parent.children[-1]}.get(parent.type, child)
            inside = "funcdef" in (place.type, *(node.type for node in path[k + 2 :]))
            return range(place.start_pos[0], place.end_pos[0] + 1) if inside else range(0)
    return range(0)


def draw(chosen: Sequence[str], count: int) -> list[Mutant]:
    """Draw mutants in a pseudorandom order; a larger draw contains a smaller one."""
    every = [mutant for file in chosen for mutant in mutants(file)]
    return sorted(every, key=lambda mutant: _hash(f"20261121 {mutant.id}"))[:count]


# The checks.


class Loaded:
    """A package and the adapters that run it."""

    def __init__(self, package: str) -> None:
        self.package: Any = importlib.import_module(f"pairproof.{package}")
        kinds = importlib.import_module("pairproof.conformance.implementations").ALL
        self.adapters: dict[str, Any] = {kind.name: kind({}, "cpu") for kind in kinds if kind.name in PACKAGES[package]}


@dataclass
class Check:
    """One check of the loaded code.

    Attributes:
        name: case, implementation and dtype.
        run: returns a description of the failure, or "".
        covers: whether its case is a covering case.
        optional: whether to drop the check if the unchanged code fails it.
        seconds: time on the unchanged code.
    """

    name: str
    run: Callable[[Loaded], str]
    covers: bool
    optional: bool = False
    seconds: float = 0.0

    def failure(self, loaded: Loaded) -> str:
        """Return the failure on one line, or "". An exception is a failure."""
        try:
            return self.run(loaded)
        except Exception as error:  # whatever the mutated code raises is a result
            return f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]


def _evaluated(case: Case, true: Truth, allowed: Bounds, dtype: str, name: str, loaded: Loaded) -> str:
    outcome = loaded.adapters[name].evaluate(case, dtype)
    return compare(case, true, outcome, allowed, dtype).first


def _differentiated(case: Case, name: str, loaded: Loaded) -> str:
    """Compare first and second derivatives, also by the temperature, with finite differences."""
    adapter, names = loaded.adapters[name], [*case.matrices, "temperature"]
    temperature = torch.tensor(float(case.option("temperature")), dtype=torch.float64, requires_grad=True)

    def loss(*given: torch.Tensor) -> Any:
        return adapter.loss(case, {**adapter.keywords(case), **dict(zip(names, given, strict=True))})

    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        check(loss, (*adapter.tensors(case, "float64").values(), temperature), fast_mode=True, rtol=1e-3)
    return ""


def _recorded(case: Case, loaded: Loaded) -> str:
    """Check the recorded terms, which ``_evaluated`` does not compare."""
    terms = importlib.import_module("pairproof.conformance.suite.cases").call_reference(case).terms
    positives, members, pairs = case.positives(), case.members(), terms.pairs.items()
    negatives = [[j for j in row if j not in own] for row, own in zip(members, positives, strict=True)]
    expected = [positives, negatives, case.counted(), case.anchors(), [j in positives[i] for (i, j), _ in pairs]]
    recorded = [sorted(terms.anchor_losses), [pair.positive for _, pair in pairs]]
    found = [terms.positives, terms.negatives, terms.counted, *recorded]
    return "" if found == expected else f"expected {expected}, got {found}"


def _refused(error: golden.ErrorCase, loaded: Loaded) -> str:
    """Check that an invalid call raises the right exception with the right message."""
    given = dict(error.arguments)
    if loaded.package.__name__.endswith("fast"):
        given = {k: torch.from_numpy(v.copy()) if isinstance(v, np.ndarray) else v for k, v in given.items()}
    try:
        getattr(loaded.package, catalogue.LOSSES[error.loss].function)(**given)
    except error.exception as raised:
        right = str(raised).startswith(f"{error.argument}:") and all(word in str(raised) for word in error.words)
        return "" if right else f"expected {error.argument}: ... {', '.join(error.words)}, got {raised}"
    return f"expected {error.exception.__name__}, got a result"


def _checks_of(case: Case, true: Truth, loaded: Loaded, covers: bool) -> Iterator[Check]:
    limits = Limits(case, true)
    for dtype in filter(case.holds_in, golden.DTYPES):
        for name, adapter in loaded.adapters.items():
            if dtype in adapter.dtypes and not adapter.refuses(case):
                run = partial(_evaluated, case, true, limits.of(adapter, dtype), dtype, name)
                yield Check(f"{case.id} {name} {dtype}", run, covers)
                if covers and dtype == "float64" and "fast" in name and case.size <= 32:  # they take time
                    yield Check(f"{case.id} {name} derivatives", partial(_differentiated, case, name), covers, True)
    if "reference" in loaded.adapters and not loaded.adapters["reference"].refuses(case):
        yield Check(f"{case.id} record", partial(_recorded, case), covers)


class Judge:
    """All checks of a package, with true values and bounds from the unchanged code."""

    def __init__(self, package: str, takes: Callable[[str], bool] = lambda name: True) -> None:
        """Compute true values and bounds.

        Args:
            package: "reference" or "fast".
            takes: whether to use the case or error case of this name.
        """
        self.loaded, self.code = Loaded(package), digest()
        self.hits: dict[tuple[str, int], list[int]] = {}
        every = {case: entry for case, entry in load_cases(load_worked()).items() if takes(case.id)}
        few = set(subset.covering({case: entry for case, entry in every.items() if case.size <= MOST_ROWS}))
        narrow = FEW_COLUMNS if package == "fast" else 0
        stored = {
            case: entry for case, entry in every.items() if case.size <= MOST_ROWS or case.embeddings.shape[1] <= narrow
        }
        self.checks: list[Check] = []
        for case, entry in stored.items():
            self.checks += _checks_of(case, truth_of(case, entry), self.loaded, case in few)
        for error in golden.load_errors():
            if takes(f"golden/{error.id}"):
                self.checks.append(Check(f"golden/{error.id} {package}", partial(_refused, error), covers=True))

    def survey(self, traced: Iterable[str] = ()) -> None:
        """Run every check on the unchanged code, and record its time and lines. Drop optional checks that fail.

        Args:
            traced: the files whose lines are recorded; all files by default.

        Raises:
            RuntimeError: a check that is not optional fails, or all optional checks fail.
        """
        ours = {str(ROOT / file): file for file in traced or files()}
        executed: set[tuple[str, int]] = set()

        def line(frame: Any, *_: object) -> Any:
            executed.add((ours[frame.f_code.co_filename], frame.f_lineno))
            return line

        def call(frame: Any, *_: object) -> Any:
            return line if frame.f_code.co_filename in ours else None

        modules = [module for name, module in sys.modules.items() if name.startswith(self.loaded.package.__name__)]
        cached = {value for module in modules for value in vars(module).values() if hasattr(value, "cache_clear")}
        kept: list[Check] = []
        for check in self.checks:
            for function in cached:  # a cached result would hide the lines that compute it
                function.cache_clear()
            executed.clear()
            began = time.process_time()
            sys.settrace(call)
            wrong = check.failure(self.loaded)
            sys.settrace(None)
            check.seconds = time.process_time() - began
            if wrong and not check.optional:
                raise RuntimeError(f"{check.name} fails on the unchanged code: {wrong}")
            if not wrong:
                for place in executed:
                    self.hits.setdefault(place, []).append(len(kept))
                kept.append(check)
        if any(check.optional for check in self.checks) and not any(check.optional for check in kept):
            raise RuntimeError("every check of derivatives fails on the unchanged code")
        self.checks = kept

    def order(self, mutant: Mutant) -> list[Check]:
        """Return the checks that execute the changed statement: covering cases first, then in order of time."""
        found = {k for number in mutant.lines for k in self.hits.get((mutant.file, number), ())}
        chosen = [self.checks[k] for k in found] if mutant.lines else self.checks
        return sorted(chosen, key=lambda check: (not check.covers, check.seconds))


# Judging a mutant, in a separate process.

PATIENCE = 10.0
"""CPU time limit of an import, in seconds. For a check, 100 times its time on the unchanged code is added."""

STUCK = 900
"""Time limit of an import or a check, in seconds. A process that reaches it before its limit on CPU time is waiting."""

MEMORY = 12 * 2**30
"""Maximum memory of a process in bytes: a mutant may allocate arrays of a wrong size."""


class Verdict(NamedTuple):
    """The outcome for one mutant. The first four fields describe the mutant.

    Attributes:
        outcome: "killed", "survived", or "unreached" if no check executes the changed statement.
        check: the first check that failed, with its message; or how the process ended; or the number of checks.
        seconds: the time of the whole process.
        code: the digest of the judged code.
    """

    file: str
    line: int
    id: str
    change: str
    outcome: str
    check: str
    seconds: float
    code: str


def load_mutated(mutant: Mutant) -> Loaded:
    """Import the mutated package and its adapters again."""
    package, text, path = mutant.file.partition("/")[0], mutant.source(), str(ROOT / mutant.file)
    original: Any = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, name: str) -> Any:
        return compile(text, path, "exec", dont_inherit=True) if self.path == path else original(self, name)

    SourceFileLoader.get_code = get_code  # type: ignore[assignment, method-assign]
    for name in list(sys.modules):
        if name.startswith(("pairproof.conformance", f"pairproof.{package}")):
            del sys.modules[name]
    return Loaded(package)


def _limit(seconds: float) -> None:
    """Limit the CPU time of what follows, and its waiting: a fork can wait for a lock of a thread that it lacks."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.alarm(STUCK)


def _outcome(judge: Judge, mutant: Mutant) -> tuple[str, str]:
    """Return the outcome of a mutant and the deciding check. The process must not be used afterwards."""
    order = judge.order(mutant)
    _limit(PATIENCE)
    try:
        loaded = load_mutated(mutant)
    except Exception as error:  # whatever the mutated code raises is a result
        return "killed", f"import: {type(error).__name__}: {error}"
    for check in order:
        _limit(PATIENCE + 100 * check.seconds)
        wrong = check.failure(loaded)
        if wrong:
            return "killed", f"{check.name}: {wrong}"
    return "survived" if order else "unreached", f"{len(order)} checks"


def _answer(judge: Judge, mutant: Mutant, file: IO[str]) -> NoReturn:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # kills the process even in a loop within torch
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    warnings.simplefilter("ignore")
    try:
        print(json.dumps(_outcome(judge, mutant)), file=file, flush=True)
    finally:
        os._exit(0)


def judge_one(judge: Judge, mutant: Mutant) -> Verdict:
    """Judge a mutant in a fork of this process.

    Raises:
        RuntimeError: this tool failed.
    """
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        pid = os.fork()
        if pid == 0:
            _answer(judge, mutant, file)
        status = os.waitpid(pid, 0)[1]
        file.seek(0)
        text = file.read()
    if status == signal.SIGALRM:
        raise RuntimeError(f"{mutant.id}: the process waited for {STUCK} s: {mutant.change()}")
    if status == 0 and not text:
        raise RuntimeError(f"{mutant.id}: the process ended without an answer: {mutant.change()}")
    end = "killed", "time limit" if status == signal.SIGPROF else f"exit status {status}"
    outcome, check = json.loads(text) if text else end
    seconds = round(time.perf_counter() - began, 1)
    return Verdict(mutant.file, mutant.line, mutant.id, mutant.change(), outcome, check, seconds, judge.code)


# Results and explanations.


Explained = Mapping[str, tuple[str, str]]
"""By id of a mutant: its kind, one of ``KINDS``, and a description of its change."""


def explanations(path: Path = EXPLAINED) -> Explained:
    """Read the explanations of survivors.

    Raises:
        ValueError: an explanation has an unknown kind or no reason, or a mutant has two explanations.
    """
    found: dict[str, tuple[str, str]] = {}
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["explained"]:
        for name, _, change in (line.partition(" ") for line in entry["mutants"]):
            if name in found or entry["kind"] not in KINDS or not entry["why"]:
                expected = f"expected one explanation with a kind of {', '.join(KINDS)} and a reason"
                raise ValueError(f"{path.name}: {name}: {expected}")
            found[name] = entry["kind"], change
    return found


def score(verdicts: Iterable[Verdict], explained: Explained) -> tuple[int, int, int, float]:
    """Count the mutants of a run.

    Returns:
        Three numbers of mutants (judged; killed; survivors that are not mistakes), and the share of mistakes that are
        killed. A mutant is judged if a check executes it.
    """
    judged = [one for one in verdicts if one.outcome != "unreached"]
    alive = [one.id for one in judged if one.outcome == "survived"]
    harmless = sum(name in explained and explained[name][0] in HARMLESS for name in alive)
    killed = len(judged) - len(alive)
    return len(judged), killed, harmless, killed / max(len(judged) - harmless, 1)


def problems(verdicts: Sequence[Verdict], explained: Explained) -> list[str]:
    """Return the problems of a run and of the explanations, one line each."""
    *_, killed = score(verdicts, explained)
    found = [f"{killed:.1%} of the mistakes are killed, expected at least {GOAL:.0%}"] if killed < GOAL else []
    alive = [one for one in verdicts if one.outcome == "survived" and one.id not in explained]
    found += [f"{one.id} survives without an explanation: line {one.line} of {one.change}" for one in alive]
    every = {mutant.id: mutant for file in files() for mutant in mutants(file)}
    ended = {one.id: (one.outcome, one.check) for one in verdicts}
    for name, (_, change) in explained.items():
        if name not in every or change != every[name].change():
            found.append(f"{name} is explained but is not a mutant: {change}")
        elif ended.get(name, ("survived",))[0] != "survived":
            found.append(f"{name} is explained but was {'{} ({})'.format(*ended[name])}: {change}")
    return found


HEAD = """# Mutants

`make mutants` writes this file. A mutant is a small change in the code. It is judged if a check executes the changed
statement, and killed if a check fails. Results are in `mutants.jsonl`, reasons of survivors in `mutants.toml`.

| file | judged | killed | survive, not mistakes | mistakes killed |
|---|---|---|---|---|"""


def report(verdicts: Sequence[Verdict], explained: Explained) -> str:
    """Return the text of ``mutants.md``."""
    lines = [HEAD]
    for name in ("", *files()):
        *counts, share = score([one for one in verdicts if one.file.startswith(name)], explained)
        lines += [f"| {name or 'all'} | {' | '.join(map(str, counts))} | {share:.1%} |"] if counts[0] else []
    kinds = Counter(explained[one.id][0] for one in verdicts if one.outcome == "survived" and one.id in explained)
    lines += ["", "Why mutants survive:", "", *(f"- {kind} ({kinds[kind]}): {KINDS[kind]}" for kind in KINDS), ""]
    unreached = [f"- line {one.line} of {one.change}" for one in verdicts if one.outcome == "unreached"]
    return "\n".join([*lines, f"No check executes these {len(unreached)} mutants:", "", *unreached, ""])


# The command.


def digest() -> str:
    """Return a checksum of everything that a verdict depends on."""
    folders = [ROOT / folder for folder in ("conformance", "fast", "fixtures", "reference")]
    paths = sorted(path for folder in folders for path in folder.rglob("*.*") if path.suffix in (".py", ".json"))
    return _hash("\0".join(path.read_text(encoding="utf-8") for path in (Path(__file__), *paths)))[:12]


def stored(path: Path) -> list[Verdict]:
    """Return the verdicts in a file with one verdict per line."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [Verdict(*json.loads(line)) for line in lines]


def judge_all(package: str, work: Sequence[Mutant], processes: int, cases: Sequence[str] = ()) -> Iterator[Verdict]:
    """Judge mutants of one package, several at a time, and print the outcomes.

    Args:
        package: "reference" or "fast".
        work: the mutants.
        processes: how many are judged in parallel.
        cases: patterns of the cases that are used; all by default.
    """
    print(f"{package}: computing true values and bounds, then running every check once", flush=True)
    judge = Judge(package, lambda name: not cases or any(fnmatchcase(name, pattern) for pattern in cases))
    judge.survey({mutant.file for mutant in work})
    print(f"{package}: {len(judge.checks)} checks, {len(work)} mutants", flush=True)
    gc.freeze()  # otherwise garbage collection in a child would copy all pages
    with ThreadPoolExecutor(processes) as pool:
        for future in as_completed([pool.submit(judge_one, judge, mutant) for mutant in work]):
            one = future.result()
            print(f"{one.outcome}: {one.id} line {one.line} of {one.change}: {one.check}", flush=True)
            yield one


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw mutants and judge them; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    many: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument("--count", type=int, default=COUNT, help="number of mutants to draw; default: %(default)s")
    parser.add_argument("--only", **many, metavar="FILE", help="mutate only this file; may be repeated; writes nothing")
    parser.add_argument("--id", **many, help="judge this mutant; may be repeated; writes nothing")
    patterns = "use only these cases; may be repeated; a survivor must be judged again with all cases; writes nothing"
    parser.add_argument("--case", **many, metavar="PATTERN", help=patterns)
    parser.add_argument("--processes", type=int, default=1, help="mutants to judge in parallel; default: %(default)s")
    parser.add_argument("--survivors", action="store_true", help="judge only mutants that the stored run did not kill")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="store verdicts in FILE, and reuse those in it")
    options = parser.parse_args(arguments)
    every = {mutant.id: mutant for file in files() for mutant in mutants(file)}
    unknown = {*options.only, *options.id} - {*files(), *every}
    if options.case and options.resume:
        parser.error("--case: not possible with --resume, whose file stores verdicts on all cases")
    if unknown:
        parser.error(f"no such file or mutant: {', '.join(unknown)}")
    work = [every[name] for name in options.id] or draw(options.only or files(), options.count)
    known = [one for one in stored(RESULTS) if one.outcome == "killed"] if options.survivors else []
    if options.resume:
        code = digest()
        known += [one for one in stored(options.resume) if one.code == code]
    verdicts = {one.id: one for one in known}
    torch.set_num_threads(1)
    for package in PACKAGES:
        left = [mutant for mutant in work if mutant.file.startswith(package) and mutant.id not in verdicts]
        for one in judge_all(package, left, options.processes, options.case) if left else ():
            verdicts[one.id] = one
            if options.resume:
                with options.resume.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(one) + "\n")
    if options.id or options.case:
        return 0
    judged = sorted(verdicts[mutant.id] for mutant in work)
    explained = explanations()
    if not options.only and len(judged) >= COUNT:
        RESULTS.write_text("".join(json.dumps(one) + "\n" for one in judged), encoding="utf-8")
        REPORT.write_text(report(judged, explained), encoding="utf-8")
    wrong = problems(judged, explained)
    print(*wrong, sep="\n", file=sys.stderr)
    print("{} judged, {} killed, {} not mistakes; {:.1%} of the mistakes killed".format(*score(judged, explained)))
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ["NUMBA_DISABLE_JIT"] = "1"  # the functions run as Python, whose lines can be recorded
    sys.exit(main())
