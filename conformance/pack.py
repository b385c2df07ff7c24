"""Write a test file for the repository of a loss: the few golden cases that find nearly all known mistakes.

The file needs pytest and the array package of the loss, and nothing of pairproof. The known mistakes are the faults of
``faults/``. Cases are chosen greedily, by the number of further faults that they find for their length.
"""

from __future__ import annotations

import inspect
import math
import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import astuple, dataclass, replace
from decimal import ROUND_CEILING, Context
from typing import Any, TypeVar

import numpy as np
import torch

from pairproof import __version__

from .faults import FAULTS
from .faults.judging import LARGEST, target_of
from .implementations.base import matters, one_thread
from .implementations.callable import External
from .implementations.forms import Form
from .implementations.sandbox import TargetMisused
from .implementations.signatures import EVERY, Signature
from .judge.levels import level_of_case
from .judge.options import DEFAULT_LEVEL, Request, Selection, UsageError, command_options, unknown
from .judge.proofs import as_claimed
from .judge.verify import check_names
from .suite.cases import Case
from .suite.catalogue import LOSSES, NUMBERS
from .suite.golden import GoldenCase, load_golden
from .suite.progress import Progress, unreported
from .suite.records import Expected, Matrix, Outcome
from .truth.evaluate import stored_truth
from .truth.tolerances import bounds, formula_bounds

Tensor = torch.Tensor
K = TypeVar("K")

MOST_BYTES = 15_000
"""Largest size of the file."""

WIDTH = 110
"""Longest line of the file."""

ROUNDS = 2
"""Number of cases of the file that find each fault, if there is room."""

OFTEN = 3
"""A fault is evaluated until this number of cases find it. The smallest cases come first."""

CLEARLY = 2.0
"""A case finds a fault if an error is more than this many times its tolerance, so that every machine finds it."""

DTYPES = ("float64", "float32")

NOT_PACKED = ("one_way", "similarities", "command")
"""The calls that need pairproof at every call: it swaps views, computes similarities or starts a program."""

OF_CHUNKS = "This is the size of training batches: code for large batches, such as loops over chunks, runs here only."

FINER = 1000
"""Gradients are written in steps of their tolerance in float32 divided by this number. In float64, an error of one step
is allowed. Values have all digits.
"""

MOST_DIGITS = 17
"""Largest number of decimals of a gradient."""

LISTED = 16
"""Longest list of integers that is never written as a formula."""

LONGEST = 5_000
"""Longest code of a case in the file."""

FIXED = "\N{NO-BREAK SPACE}"

SPAN = 10**6
"""More than the number of rows of a matrix."""

LICENCE = ("SPDX-License-Identifier: MIT", "Copyright (c) 2026 pairproof contributors")


@dataclass(frozen=True)
class Library:
    """An array package.

    Attributes:
        imports: the import statements of the file.
        returns: what ``loss`` returns, in words.
        gradients: whether gradients are compared.
        code: the test and its helper. ``LOSS`` and ``DTYPES`` stand for the name of the loss and the list of dtypes.
    """

    imports: str
    returns: str
    gradients: bool
    code: str


TORCH = '''
def tensor(value, dtype):
    """Return a list as a tensor: numbers in the dtype, labels as int64, masks as bool."""
    if not isinstance(value, list):
        return value
    found = torch.tensor(value)
    return torch.tensor(value, dtype=dtype) if found.is_floating_point() else found


def assert_near(what, found, expected, within):
    expected = torch.tensor(expected, dtype=torch.float64).reshape(found.shape)
    options = {"rtol": 0, "atol": within, "equal_nan": True, "msg": lambda text: f"{what}: {text}"}
    torch.testing.assert_close(found.detach().double(), expected, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_LOSS(case, dtype):
    given = {name: tensor(value, getattr(torch, dtype)) for name, value in case["arguments"].items()}
    for name in case["gradient"]:
        given[name].requires_grad_()
    value = loss(**given)
    of_value, of_gradient = case["within"][dtype]
    assert_near("value", value.reshape(-1), case["value"], of_value)
    if value.requires_grad and case["gradient"]:
        (-2 * value.sum()).backward()  # the factor shows whether the gradient from above is used
    for name, expected in case["gradient"].items():
        found = torch.zeros_like(given[name]) if given[name].grad is None else given[name].grad / -2
        assert_near(f"gradient of {name}", found[case.get("rows", slice(None))], expected, of_gradient)
'''

NUMPY = '''
def array(value, dtype):
    """Return a list as an array: numbers in the dtype, labels as int64, masks as bool."""
    if not isinstance(value, list):
        return value
    found = np.array(value)
    return found.astype(dtype) if found.dtype.kind == "f" else found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_LOSS(case, dtype):
    value = loss(**{name: array(value, dtype) for name, value in case["arguments"].items()})
    found, expected = np.asarray(value, dtype="float64").reshape(-1), np.reshape(case["value"], -1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=case["within"][dtype])
'''

LIBRARIES: Mapping[str, Library] = {
    "torch": Library("import pytest\nimport torch", "a tensor with a gradient", True, TORCH),
    "numpy": Library("import numpy as np\nimport pytest", "a number or an array", False, NUMPY),
}

MATRIX = '''
def matrix(rows, columns, groups, seed, group_seed, exponent):
    """Return integers from a fixed sequence times 2^exponent; rows with equal i % groups are similar."""

    def integers(x, count):
        return [(x := 48271 * x % 2147483647) // 2**24 - 64 for _ in range(count * columns)]

    own, centers = integers(seed, rows), integers(group_seed, groups)
    return [
        [(own[i * columns + d] + centers[i % groups * columns + d]) * 2.0**exponent for d in range(columns)]
        for i in range(rows)
    ]
'''


@dataclass(frozen=True, eq=False)
class Entry:
    """A golden case of the file.

    Attributes:
        golden: the case, with the claimed options.
        arguments: the code of every argument of ``loss``, by name. Options with default values are left out.
        gradients: the expected gradients as they are written, by argument.
        rows: the rows of every gradient that are compared; empty for all.
        within: for each dtype, the tolerances of the value and of an entry of a gradient.
    """

    golden: GoldenCase
    arguments: Mapping[str, str]
    gradients: Mapping[str, Matrix]
    rows: Sequence[int]
    within: Mapping[str, tuple[float, float]]

    @property
    def values(self) -> Matrix:
        """The expected values."""
        return np.array(self.golden.expected.values)

    def text(self, library: Library, finds: str = "") -> str:
        """Return the code of the case. It begins with the reason: what the case shows, and what it finds, in words."""
        reason = f"{self.golden.note} {finds}".rstrip()
        values = ", ".join(map(_number, self.values.tolist()))
        value = values if len(self.values) == 1 else f"[{values}]"
        name = self.golden.id.rpartition("/")[2]
        lines = [
            *_filled(f"# {reason}", 8, "# "),
            f'        "name": "{name}",',
            *_dictionary("arguments", self.arguments),
            *_filled(f'"value": {value},', 8),
        ]
        if library.gradients:
            lines += _dictionary("gradient", {name: _code(rows.tolist()) for name, rows in self.gradients.items()})
            lines += [f'        "rows": {_code(self.rows)},'] * bool(self.rows)
        within = {dtype: found if library.gradients else found[0] for dtype, found in self.within.items()}
        lines += _dictionary("within", {dtype: _code(found) for dtype, found in within.items()})
        return "\n".join(["    {", *lines, "    },"])


class Claimed:
    """The claim of a user about a loss, and the arguments of its call.

    Attributes:
        subject: a target with this claim. It is never called.
        words: what the positional arguments are, by name.
        dtypes: the dtypes in which the file compares results. Faults are evaluated in the first one.
    """

    def __init__(self, request: Request) -> None:
        """Read the claim.

        Raises:
            UsageError: the loss, the call or an option is unknown, or the file cannot contain this call.
        """
        check_names(Selection(losses=(request.loss,)))
        entry = LOSSES[request.loss]
        calls = [call for call in entry.calls if call not in NOT_PACKED]
        if (call := request.call or calls[0]) not in calls:
            raise unknown("value of --call", call, calls)
        form = Form(call)
        words = form.given(Signature(lambda: None))
        self.words = {name: text for name, text in words.items() if not (form.several and name == "labels")}
        keywords = [name for name, value in request.settings.items() if value == EVERY]
        keywords += ["labels"] * (form.several and entry.targets == "labels")
        keywords += ["mask"] * (call == "features" and "positives" in keywords)
        keywords += ["temperature"] * (request.temperature is None)
        options: dict[str, Any] = {"temperature": request.temperature, "settings": request.settings, "limit": None}
        stub = _function(self.words, keywords)
        try:
            self.subject = External(stub, loss=request.loss, call=call, arrays="torch", **options)
        except TargetMisused as error:
            raise UsageError(str(error)) from None
        for dtype in request.dtypes:
            if dtype not in DTYPES:
                raise unknown("value of --dtype", dtype, DTYPES)
        self.dtypes = tuple(dtype for dtype in DTYPES if dtype in (request.dtypes or DTYPES))

    @property
    def options(self) -> str:
        """The options that are not passed, with their values."""
        claim = self.subject.claim
        judged = {name: claim.values_of(name) for name in LOSSES[claim.loss].scalars}
        fixed = {name: values[0] for name, values in judged.items() if values and values[0] is not None}
        fixed |= {} if claim.temperature is None else {"temperature": claim.temperature}
        return ", ".join(f"{name}={value}" for name, value in {**fixed, **claim.settings}.items())

    def cases(self) -> tuple[list[GoldenCase], list[GoldenCase]]:
        """The small cases and those of training size that the claim supports, in the order of their size.

        The cases have the claimed options.
        """
        claim, found = self.subject.claim, list[GoldenCase]()
        loaded = load_golden(losses=(claim.loss,))
        for golden in loaded:
            small, of_training = golden.case.n <= LARGEST and not golden.formulas, "training-size" in golden.flags
            as_returned = not claim.reduced_here or golden.case.option("reduction") == "none"
            if not (small or of_training) or not as_returned or not {*self.dtypes} <= {*golden.dtypes}:
                continue
            case, proved = as_claimed(golden.case, golden, claim)
            level = max(level_of_case(case, proved, dtype) for dtype in self.dtypes)
            if proved and not claim.support.refuses(case) and level <= DEFAULT_LEVEL:
                found.append(_as_changed(proved, golden))
        found.sort(key=lambda golden: sum(matrix.size for matrix in golden.case.matrices.values()))
        return [one for one in found if not one.formulas], [one for one in found if one.formulas]

    def arguments(self, case: Case, matrices: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return what the loss gets for a case, by name; None if it is called several times, or its values reordered.

        Args:
            case: the case.
            matrices: an array for each matrix of the case. Tensors with rows of them require a gradient.
        """
        rows = {name: torch.tensor(matrix).requires_grad_() for name, matrix in matrices.items()}
        batches, order = self.subject.batches(case, rows)
        if len(batches) > 1 or (order and case.separate):
            return None
        positional, keywords = batches[0].arguments(self.subject.claim.call)
        return {**dict(zip(self.words, positional, strict=True)), **keywords}

    def gradients(self, case: Case, result: Expected | Outcome) -> dict[str, Matrix]:
        """Return the gradients of a result by argument; empty if it has none."""
        known = case.gradients(result)
        found = self.arguments(case, known) if known else None
        return {name: x.detach().numpy() for name, x in (found or {}).items() if _is_matrix(x)}

    def shows(self, case: Case) -> set[str]:
        """Return the options that are passed and affect a case: names of arrays, and names with values."""
        passed, entry = self.subject.claim.passed, case.entry
        scalars = [name for name in entry.scalars if name in passed and matters(case, name)]
        numbers = {name for name in scalars if name in NUMBERS and case.option(name) != entry.default(name)}
        values = {f"{name}={case.option(name)}" for name in scalars if name not in NUMBERS}
        given = {**case.keywords, **case.arguments, **case.others}
        return {name for name in passed - {*entry.scalars} if given.get(name) is not None} | numbers | values

    def entry(self, golden: GoldenCase, rows: int = 2) -> Entry | None:
        """Return the entry of a case; None if the file cannot contain the case.

        Args:
            golden: the case.
            rows: how many rows of each gradient are compared, if a formula gives the matrices: 2, 1 or 0.
        """
        case, right, large = golden.case, golden.expected, bool(golden.formulas)
        given = self.arguments(case, case.matrices)
        numbered = {
            name: k * SPAN + np.arange(1.0 * len(it))[:, None] for k, (name, it) in enumerate(case.matrices.items())
        }
        places = self.arguments(case, numbered) or {}
        codes = {
            name: _rows_code(golden, places[name]) if large and _is_matrix(value) else _code(value)
            for name, value in (given or {}).items()
            if name not in case.entry.scalars or value != case.entry.default(name)
        }
        if not codes or "" in codes.values() or not right.values:
            return None
        gradients, kept = self.gradients(case, right), list[int]()
        if large:
            numbers = range(min(map(len, gradients.values())))
            stored = [i for i in numbers if all(np.isfinite(one[i]).all() for one in gradients.values())]
            kept = [stored[0], stored[-1]][2 - rows :]
            gradients = {name: one[kept] for name, one in gradients.items() if kept}
        allowed = {dtype: formula_bounds(bounds(case, stored_truth(case, right), dtype)) for dtype in DTYPES}
        of_rows = {dtype: max(float(rows.max()) for rows in one.rows.values()) for dtype, one in allowed.items()}
        digits = min(MOST_DIGITS, math.ceil(-math.log10(of_rows["float32"] / FINER)))
        written = {name: np.round(one, digits) + 0.0 for name, one in gradients.items()}  # without -0.0
        largest = {dtype: (max(allowed[dtype].values), of_rows[dtype] + 10.0**-digits) for dtype in self.dtypes}
        within = {dtype: (_up(of_value), _up(of_row)) for dtype, (of_value, of_row) in largest.items()}
        return Entry(golden, codes, written, kept, within)

    def finds(self, entry: Entry, target: External) -> str:
        """Return what an entry finds wrong with a target: "value", else "gradient", else "".

        A difference counts if it is clearly beyond the tolerances.
        """
        case, dtype = entry.golden.case, self.dtypes[0]
        try:
            outcome = target.evaluate(case, dtype)
        except Exception:  # a fault may raise any exception, which fails the test
            return "value"
        of_value, of_gradient = entry.within[dtype]
        values = np.array(outcome.values)
        if values.shape != entry.values.shape or _differ(values, entry.values, of_value):
            return "value"
        found = self.gradients(case, outcome) if entry.gradients else {}
        kept = entry.rows or slice(None)
        wrong = any(_differ(one[kept], entry.gradients[name], of_gradient) for name, one in found.items())
        return "gradient" if wrong else ""


def _as_changed(proved: GoldenCase, stored: GoldenCase) -> GoldenCase:
    """Return a case whose name and note say how the claim has changed the stored case."""
    case, before = proved.case, stored.case
    names = [name for name in case.keywords if case.option(name) != before.option(name)]
    if not names:
        return proved
    changes = ", ".join(f"{name}={case.option(name)} instead of {before.option(name)}" for name in names)
    scaled = "" if np.array_equal(case.embeddings, before.embeddings) else ", and rows times a power of 2"
    note = f"{changes}{scaled}, in the case: {stored.note}"
    return replace(proved, case=replace(case, id=f"{case.id}-changed"), note=note)


def _is_matrix(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _differ(found: Matrix, expected: Matrix, tolerance: float) -> bool:
    """Whether some entries are NaN in only one of two arrays, or clearly farther apart than the tolerance."""
    both = np.isnan(found) & np.isnan(expected)
    return not (both | (np.abs(found - expected) <= CLEARLY * tolerance)).all()


def _function(places: Iterable[str], keywords: Iterable[str]) -> Callable[..., None]:
    """Return a function with these parameters; those of ``keywords`` are optional."""

    def stub(*given: object, **options: object) -> None:
        """Do nothing."""

    either, only = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, either) for name in places]
    parameters += [inspect.Parameter(name, only, default=None) for name in dict.fromkeys(keywords)]
    vars(stub)["__signature__"] = inspect.Signature(parameters)
    return stub


def _code(value: Any) -> str:
    """Return the code of an argument; "" for an empty array, whose shape a list does not show."""
    if isinstance(value, Tensor):
        if not value.numel():
            return ""
        value = value.tolist()
    if isinstance(value, list) and len(value) > LISTED and all(type(x) is int for x in value):
        n = len(value)
        period, first = len({*value}), value[0]
        if value == [i % period for i in range(n)]:
            return f"[i % {period} for i in range({n})]"
        if value == [(i + first) % n for i in range(n)]:
            return f"[(i + {first}) % {n} for i in range({n})]"
    return repr(value).replace("'", '"')


def _rows_code(golden: GoldenCase, places: Tensor) -> str:
    """Return the code of rows of a matrix that a formula gives; "" if they are not successive rows or views.

    Args:
        golden: the case.
        places: the rows, [N, 1] or [items, views, 1]: their numbers, plus ``SPAN`` times the number of the matrix.
    """
    columns, parts = places[..., 0].long().reshape(len(places), -1).T.tolist(), list[str]()
    for column in columns:
        k, first = divmod(column[0], SPAN)
        name = [*golden.case.matrices][k]
        if name not in golden.formulas or column != [*range(column[0], column[0] + len(column))]:
            return ""
        formula = golden.formulas[name]
        end = first + len(column)
        part = "" if (first, end) == (0, formula.rows) else f"[{first}:{end}]"
        parts.append(f"matrix({', '.join(map(str, astuple(formula)))}){part}")
    return parts[0] if places.dim() == 2 else f"[*zip({', '.join(parts)})]"


def _number(x: float) -> str:
    return repr(x) if math.isfinite(x) else f'float("{x}")'


def _up(x: float) -> float:
    """Round a tolerance up to two digits."""
    return float(Context(prec=2, rounding=ROUND_CEILING).create_decimal_from_float(x))


def _filled(text: str, indent: int, mark: str = "    ") -> list[str]:
    """Break a comment or code into lines, at spaces, but not within a short row of a matrix."""
    begin = " " * indent
    wrapper = textwrap.TextWrapper(WIDTH, begin, begin + mark, break_long_words=False, break_on_hyphens=False)
    kept = re.sub(r"\[[^][]*\]", lambda row: row[0].replace(" ", FIXED) if len(row[0]) < WIDTH - 20 else row[0], text)
    return [line.replace(FIXED, " ") for line in wrapper.wrap(kept)]


def _dictionary(name: str, codes: Mapping[str, str]) -> list[str]:
    """Return the lines of a key whose value is a dictionary, with a line for each of its keys if they are long."""
    pairs = [f'"{key}": {code}' for key, code in codes.items()]
    short = f'        "{name}": {{{", ".join(pairs)}}},'
    if len(short) <= WIDTH:
        return [short]
    return [f'        "{name}": {{', *(line for pair in pairs for line in _filled(f"{pair},", 12)), "        },"]


def cover(finds: Mapping[K, AbstractSet[str]], cost: Mapping[K, int], times: int) -> list[K]:
    """Choose keys greedily, by the number of new members of their sets per cost.

    First every member is in one of the chosen sets, then in two, and so on up to ``times``, if as many sets have it.
    """
    chosen, often = list[K](), Counter[str]()
    for number in range(times):
        while True:
            gains = {key: sum(often[name] <= number for name in finds[key]) / cost[key] for key in finds}
            best = max((key for key in finds if key not in chosen), key=gains.__getitem__, default=None)
            if best is None or not gains[best]:
                break
            chosen.append(best)
            often.update(finds[best])
    return chosen


@dataclass(frozen=True)
class Pack:
    """A test file.

    Attributes:
        text: the content of the file.
        cases: the number of its cases.
        counts: how many known mistakes it finds, in words.
        found: the known mistakes that it finds.
        missed: those that it does not find, although a case that the claim supports does.
        unseen: passed options, with their values, that affect no case of the file.
    """

    text: str
    cases: int
    counts: str
    found: Sequence[str]
    missed: Sequence[str]
    unseen: Sequence[str]

    @property
    def summary(self) -> str:
        """The size of the file, and what it finds, in one line."""
        return f"{len(self.text.encode()):,} bytes, {self.cases} cases; {self.counts}"


@one_thread()
def pack(request: Request, library: str, progress: Progress = unreported) -> Pack:
    """Make a test file for a loss.

    Args:
        request: the claim: the loss, its call, and the options that are built in or passed. It needs no target.
        library: the array package, one of ``LIBRARIES``.
        progress: called for each case.

    Raises:
        UsageError: an option is unknown, or no case suits the claim.
    """
    if library not in LIBRARIES:
        raise unknown("value of --for", library, LIBRARIES)
    kind, claimed, of_gradient = LIBRARIES[library], Claimed(request), set[str]()
    small, of_training = claimed.cases()
    targets = {one.name: target_of(one) for one in FAULTS if one.loss == request.loss and one.level <= DEFAULT_LEVEL}

    def found_by(entry: Entry, names: Iterable[str]) -> set[str]:
        taken = [name for name in names if targets[name].refuses(entry.golden.case) is None]
        found = {name: claimed.finds(entry, targets[name]) for name in taken}
        of_gradient.update(name for name, what in found.items() if what == "gradient")
        return {name for name, what in found.items() if what == "value" or (what and kind.gradients)}

    finds, shows, times = dict[Entry, set[str]](), dict[Entry, set[str]](), Counter[str]()
    for k, golden in enumerate(small):
        progress("cases", k, len(small))
        entry = claimed.entry(golden)
        if entry is None:
            continue
        waiting = [name for name in targets if times[name] < OFTEN]
        finds[entry], shows[entry] = found_by(entry, waiting), claimed.shows(golden.case)
        times.update(finds[entry])
    often = Counter(name for names in shows.values() for name in names)
    options = {name for name in often if often[name] < len(shows)}
    costs = {entry: len(entry.text(kind)) for entry in finds}
    members = {entry: found | (shows[entry] & options) for entry, found in finds.items() if costs[entry] <= LONGEST}
    members = {entry: found_by(entry, times) | (shows[entry] & options) for entry in cover(members, costs, ROUNDS)}
    chosen = cover(members, costs, ROUNDS)  # fewer cases may suffice, because here they are judged on all mistakes
    more = [claimed.entry(golden, rows) for golden, rows in zip(of_training, (2, 0), strict=False)]
    less = [claimed.entry(golden, 1) for golden in of_training[:1]]
    training, least = ([one for one in found if one and len(one.text(kind)) <= LONGEST] for found in (more, less))
    if not chosen and not training:
        raise UsageError(f"no golden case of {request.loss} suits this claim ({claimed.options})")
    # Until the file is small enough, it gets fewer cases that find what others find, then less of training size.
    first = len(cover(members, costs, 1))
    attempts = [(k, training) for k in range(len(chosen), first - 1, -1)]
    attempts += [(k, least) for k in range(first, -1 if least else 0, -1)]
    for cases, large in attempts:
        reasons, often = dict[Entry, str](), Counter()
        for entry in chosen[:cases]:
            reasons[entry] = _reason(members[entry], often)
            often.update(members[entry])
        missed, unseen = sorted({*times} - {*often}), sorted(options - {*often})
        counts = f"finds {len({*times} & {*often})} of {len(times)} known mistakes in reach"
        if silent := of_gradient - {*times}:
            counts += f" (not in reach, because only the gradient is wrong: {len(silent)})"
        entries = {**reasons, **dict.fromkeys(large, OF_CHUNKS)}
        text = _text(request, library, claimed, entries, counts, missed, unseen)
        if len(text.encode()) <= MOST_BYTES:
            break
    return Pack(text, len(entries), counts, sorted({*times} & {*often}), missed, unseen)


def _reason(members: AbstractSet[str], often: Counter[str]) -> str:
    """Return the reason for a case in words: its members that no earlier case has, or else those that only one has."""
    number = min((often[name] for name in members), default=0)
    new = sorted(name for name in members if often[name] == number)
    mistakes, options = (
        [name.partition("/")[2] for name in new if "/" in name],
        [name for name in new if "/" not in name],
    )
    again = " again" if number else ""
    parts = {f"Finds{again}": mistakes, f"Passes{again}": options}
    return " ".join(f"{verb}: {', '.join(names)}." for verb, names in parts.items() if names)


def _text(
    request: Request,
    library: str,
    claimed: Claimed,
    entries: Mapping[Entry, str],
    counts: str,
    missed: Sequence[str],
    unseen: Sequence[str],
) -> str:
    kind, loss = LIBRARIES[library], LOSSES[request.loss]
    command = shlex.join(["pairproof", "pack", *command_options(request, Request), "--for", library])
    compared = "values and gradients" if kind.gradients else "values"
    formulas = any(entry.golden.formulas for entry in entries)
    paragraphs = [
        f"Check a loss on {len(entries)} batches with proved {compared}. Written by pairproof {__version__}:",
        "",
        f"    {command}",
        "",
        "Edit the function ``loss`` only: it calls the loss under test. The file does not need pairproof.",
        f"The formula is {loss.name}: {loss.source}.",
        f"Options that are not passed: {claimed.options}.",
        "Expected numbers are proved by interval arithmetic. Errors may be up to ``within``: twice the largest bound "
        "on the rounding errors of a straightforward implementation, which holds on every machine"
        + (", and the last digit of a gradient." if kind.gradients else "."),
        f"The file {counts}: those that some stored case of pairproof with these options finds. Comments name them; "
        f"pairproof list faults --loss {loss.name} explains the names.",
        f"If a test fails, pairproof check FILE.py:LOSS --loss {loss.name} says which mistake it is.",
        *["Gradients of batches of training size are compared in few rows or none."] * (formulas and kind.gradients),
        *([f"Not found: {', '.join(missed)}."] if missed else []),
        *([f"In no case, for lack of room: {', '.join(unseen)}."] if unseen else []),
        "",
        *LICENCE,
    ]
    always = set.intersection(*({*entry.arguments} for entry in entries))
    names = dict.fromkeys([*claimed.words, "temperature", *(name for entry in entries for name in entry.arguments)])
    used = [name for name in names if any(name in entry.arguments for entry in entries)]
    defaults = {name: _code(loss.default(name) if name in loss.scalars else None) for name in {*used} - always}
    further = [f"{name}={defaults[name]}" if name in defaults else name for name in used if name not in claimed.words]
    parameters = ", ".join([*claimed.words, *(["*", *further] if further else [])])
    given = "; ".join(f"{name}: {text}" for name, text in claimed.words.items())
    return "\n".join(
        [
            '"""' + "\n".join(line for text in paragraphs for line in (_filled(text, 0, "  ") or [""])),
            '"""',
            "",
            kind.imports,
            "",
            "",
            *_filled(f"def loss({parameters}):", 0, " " * 9),
            *_filled(f'"""Call the loss under test, and return {kind.returns}. {given}."""', 4, ""),
            '    raise NotImplementedError("call the loss under test here")',
            "",
            *([MATRIX] if formulas else []),
            "",
            "CASES = [",
            *(entry.text(kind, reason) for entry, reason in entries.items()),
            "]",
            "",
            kind.code.replace("LOSS", loss.name).replace("DTYPES", _code([*claimed.dtypes])).rstrip(),
            "",
        ]
    )
