"""The options of the Python functions, of the command line and of the pytest plugin, each defined once.

A dataclass, called a table, lists the options of one command:

- Each field is a keyword of the Python function.
- The metadata of the field contains the flag of the command line.
- The docstring of the dataclass contains the help text.

In pytest, the flags of a ``Request`` have the prefix ``--pairproof-``.
"""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from types import NoneType
from typing import Any, ParamSpec, Self, TypeVar, cast, get_args, get_type_hints

from ..suite.levels import Level

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_LEVEL = Level.POLICIES

DRAWN_IDS = ("fresh-", "training-")
"""The starts of the ids of random batches: small ones, and those of training size."""

RANDOM_BATCHES = 80
"""Default number of random batches."""

CALLED, JUDGED = "How the target is called", "What is judged"
RUN, WRITTEN = "How it runs", "What is printed and written"
"""Headings in the help of commands with many options."""

KEY_VALUE = "KEY=VALUE"
NAME_PATH = "NAME=PATH"


class UsageError(ValueError):
    """An option is invalid, or names something that does not exist."""


def meant(name: str, known: Collection[str]) -> str:
    """Return the end of a message that suggests the most similar known name; "" if none is similar."""
    return "".join(f"; did you mean {near!r}?" for near in get_close_matches(name, known, 1))


def unknown(what: str, name: str, known: Collection[str]) -> UsageError:
    """Return the error for an unknown name."""
    return UsageError(f"unknown {what} {name!r}; known: {', '.join(known)}{meant(name, known)}")


def loss_named(name: str) -> str:
    """Return the catalogue's name of a loss from another spelling, such as ``nt-xent`` or ``NTXentLoss``.

    Args:
        name: a spelling of the name. If it matches no loss, it is returned unchanged.
    """
    from ..suite.catalogue import LOSSES

    plain = {loss.replace("_", ""): loss for loss in LOSSES}
    return plain.get(re.sub("[^a-z]", "", name.lower()).removesuffix("loss"), name)


class CouldNotRun(RuntimeError):
    """A run is not possible, for example because a package or a device is missing. The message gives the reason."""


class CannotBeCalled(CouldNotRun):
    """Every plausible call of the target raises an error. The message ends with a wrapper to copy."""


@dataclass(frozen=True)
class Option:
    """An option of the command line.

    Attributes:
        keyword: the name of the field that it sets.
        help: the help text.
        type: the type of one value.
        default: the default of the field.
        flags: the flags, the long one first; empty for a positional argument.
        metavar: the placeholder for the value in help texts.
        read: converts the texts of a repeatable option to the value of the field; None if it is not repeatable.
        required: whether it is mandatory on the command line.
        panel: the heading under which the help lists it.
    """

    keyword: str
    help: str
    type: Any
    default: Any
    flags: tuple[str, ...]
    metavar: str | None = None
    read: Callable[[Sequence[str]], Any] | None = None
    required: bool = False
    panel: str | None = None

    def value(self, given: Any, flag: str) -> Any:
        """Return the value of the field for the arguments of a command line.

        Args:
            given: the parsed value, or the texts of a repeatable option.
            flag: the name of the option in error messages.

        Raises:
            UsageError: a text does not have the format of the option.
        """
        try:
            return self.read(given or ()) if self.read else given
        except ValueError as error:
            raise UsageError(f"{flag}: {error}") from None


@cache
def options_of(kind: type) -> dict[str, Option]:
    """Return the options of a table by keyword, in the order of the fields."""
    helps: dict[str, str] = defaultdict(str)
    for base in reversed(kind.__mro__):
        helps |= re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", inspect.cleandoc(base.__doc__ or ""), re.MULTILINE)
    hints = get_type_hints(kind)
    types = {name: next(one for one in (*get_args(hint), hint) if one is not NoneType) for name, hint in hints.items()}
    return {
        one.name: Option(one.name, " ".join(helps[one.name].split()), types[one.name], one.default, **one.metadata)
        for one in fields(kind)
        if one.metadata
    }


def takes(table: Callable[P, object]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Return a decorator that replaces the signature ``*args, **kwargs`` of a function by that of a table."""

    def decorate(function: Callable[..., R]) -> Callable[P, R]:
        signature = inspect.signature(table)
        returns = inspect.signature(function).return_annotation
        function.__signature__ = signature.replace(return_annotation=returns)  # type: ignore[attr-defined]
        return cast("Callable[P, R]", function)

    return decorate


def read_commas(texts: Iterable[str]) -> tuple[str, ...]:
    """Split texts at their commas, and return all parts.

    Raises:
        ValueError: a text has no parts, which would select everything.
    """
    found = [(text, [part for part in text.split(",") if part]) for text in texts]
    if empty := [text for text, parts in found if not parts]:
        raise ValueError(f"expected a name, or several with commas between them, got {empty[0]!r}")
    return tuple(part for _, parts in found for part in parts)


def read_pairs(texts: Iterable[str], form: str = NAME_PATH) -> dict[str, str]:
    """Convert texts of the form ``KEY=VALUE`` to a mapping.

    Args:
        texts: the texts.
        form: the form, as the error message names it.

    Raises:
        ValueError: a text does not have this form.
    """
    found = {}
    for text in texts:
        key, _, value = text.partition("=")
        if not key or not value:
            raise ValueError(f"expected {form}, got {text!r}")
        found[key] = value
    return found


read_choices = partial(read_pairs, form=KEY_VALUE)


def read_settings(texts: Iterable[str]) -> dict[str, object]:
    """Convert texts of the form ``KEY=VALUE`` to a mapping. The values of a repeated key become a tuple.

    Raises:
        ValueError: a text does not have this form.
    """
    values: dict[str, tuple[str, ...]] = defaultdict(tuple)
    for text in texts:
        ((key, value),) = read_choices([text]).items()
        values[key] += (value,)
    return {key: found if len(found) > 1 else found[0] for key, found in values.items()}


def read_literal(text: str) -> object:
    """Convert a text to a Python literal, such as a number or True. Other texts are returned unchanged."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def read_literals(texts: Iterable[str]) -> dict[str, object]:
    """Convert texts of the form ``KEY=VALUE`` to a mapping whose values are Python literals.

    Raises:
        ValueError: a text does not have this form.
    """
    return {key: read_literal(value) for key, value in read_choices(texts).items()}


def option(default: Any, *flags: str, **more: Any) -> Any:
    """Return a dataclass field that is also an option of the command line.

    Args:
        default: the default of the field. If it is an empty mapping, each object gets its own.
        flags: the flags, the long one first; none for a positional argument.
        more: ``metavar``, ``read``, ``required`` and ``panel`` of :class:`Option`.
    """
    metadata = {"flags": flags, **more}
    if default == {}:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def command_options(values: object, table: type) -> list[str]:
    """Return the arguments of the command line that set these values. Defaults are omitted.

    Args:
        values: an instance of the table, or of a subclass.
        table: the dataclass whose options are returned.
    """
    words: list[str] = []
    for keyword, one in options_of(table).items():
        value = getattr(values, keyword)
        if not one.flags or value in (one.default, {}):
            continue
        flag, _, negation = one.flags[0].partition("/")
        if isinstance(value, bool):
            words.append(flag if value else negation)
            continue
        choices = value if one.read else (value,)
        if isinstance(value, Mapping):
            several = {key: given if isinstance(given, tuple) else (given,) for key, given in value.items()}
            choices = [f"{key}={choice}" for key, given in several.items() for choice in given]
        for choice in choices:
            words += [flag, repr(choice).removesuffix(".0") if isinstance(choice, float) else str(choice)]
    return words


DEFAULT_DTYPES = ("float64", "float32")
"""The dtypes that run by default."""


@dataclass(frozen=True)
class Selection:
    """What ``pairproof verify`` runs. By default, everything except what needs ``thorough``.

    Attributes:
        losses: Only this loss (repeatable or comma-separated).
        cases: Only this case, figure or claim; * and ? are wildcards (repeatable or comma-separated).
        implementations: Only this implementation (repeatable or comma-separated).
        dtypes: Only this dtype: float64, float32, bfloat16 or float16 (repeatable or comma-separated).
        device: The torch device on which the torch implementations run.
        flush_denormal: Flush subnormal numbers to zero in every process, as torch.set_flush_denormal(True) does.
        required: Exit with 3 if this implementation is missing (repeatable or comma-separated).
        peers: supcontrast=PATH also runs the current SupContrast code; PATH is its repository or its losses.py.
            folder=PATH is the folder with the files of the peers (public implementations). Default: the environment
            variable PAIRPROOF_PEERS, or .peers if it is not set (repeatable).
        processes: Number of processes. Default: one per core, at most 8. Runs of fewer than 50 cases, on accelerators,
            or on systems other than Linux use one process.
        covering: Run only a small fixed subset of the selected cases. The subset still reaches every flag (kind of
            mistake), every value of every option and every kernel.
        thorough: Also run bfloat16, float16 and the cases of more than 258 rows. --case and --covering include all of
            these, too. Of fast-dense, fast-tiled and fast-exact, only one runs each case by default, in one dtype. All
            three run it, in every selected dtype, with --thorough or if --loss, --case, --dtype, --covering or --impl
            selects a part.
    """

    losses: Sequence[str] = option((), "--loss", "-l", metavar="LOSS", read=read_commas)
    cases: Sequence[str] = option((), "--case", "-c", metavar="CASE", read=read_commas)
    implementations: Sequence[str] = option((), "--impl", "-i", metavar="NAME", read=read_commas)
    dtypes: Sequence[str] = option((), "--dtype", "-d", metavar="DTYPE", read=read_commas)
    device: str = option("cpu", "--device", metavar="DEVICE", panel=RUN)
    flush_denormal: bool = option(False, "--flush-denormal", panel=RUN)
    required: Sequence[str] = option((), "--require", metavar="NAME", read=read_commas, panel=RUN)
    peers: Mapping[str, str] = option({}, "--peer", metavar=NAME_PATH, read=read_pairs, panel=RUN)
    processes: int | None = option(None, "--jobs", "-j", metavar="N", panel=RUN)
    covering: bool = option(False, "--covering")
    thorough: bool = option(False, "--thorough")

    def __post_init__(self) -> None:
        object.__setattr__(self, "losses", tuple(map(loss_named, self.losses)))

    @property
    def whole(self) -> bool:
        """Whether no loss, case or dtype is left out. Only then are the counts compared with the expected ones."""
        return not (self.losses or self.cases or self.dtypes or self.covering)

    def command(self) -> str:
        """The command that runs this selection."""
        return shlex.join(["pairproof", "verify", *command_options(self, Selection)])

    def takes_loss(self, loss: str) -> bool:
        """Whether a loss is selected."""
        return not self.losses or loss in self.losses

    def takes_dtype(self, dtype: str) -> bool:
        """Whether a dtype is selected."""
        return dtype in (self.dtypes or DEFAULT_DTYPES) or (not self.dtypes and self.complete)

    @property
    def alternates(self) -> bool:
        """Whether each case runs with only one of several similar implementations, in one dtype."""
        return self.whole and not (self.complete or self.implementations)

    @property
    def complete(self) -> bool:
        """Whether large cases are included and, unless dtypes are selected, bfloat16 and float16."""
        return bool(self.thorough or self.cases or self.covering)

    def takes_case(self, case: str) -> bool:
        """Whether a case, figure or claim is selected."""
        return not self.cases or any(fnmatchcase(case, pattern) for pattern in self.cases)


@dataclass(frozen=True)
class Printing:
    """What a run prints and writes.

    Attributes:
        quiet: Print only the failures, what follows from them, and the verdict.
        json: Also write the report as JSON to this file.
        junit: Also write the report as JUnit XML to this file.
        summary: Also write a summary as Markdown to this file.
        badge: Also write the verdict to this file, as JSON for a badge of shields.io.
    """

    quiet: bool = option(False, "--quiet", "-q", panel=WRITTEN)
    json: Path | None = option(None, "--json", metavar="FILE", panel=WRITTEN)  # noqa: RUF009 - it makes a field
    junit: Path | None = option(None, "--junit", metavar="FILE", panel=WRITTEN)  # noqa: RUF009 - it makes a field
    summary: Path | None = option(None, "--summary", metavar="FILE", panel=WRITTEN)  # noqa: RUF009 - it makes a field
    badge: Path | None = option(None, "--badge", metavar="FILE", panel=WRITTEN)  # noqa: RUF009 - it makes a field


@dataclass(frozen=True)
class CheckPrinting(Printing):
    """What ``pairproof check`` prints and writes.

    Attributes:
        save: If only random batches fail, write the smallest failing one to this folder, for pairproof fixtures add.
        html: Also write the report as one HTML page, with figures, to this file.
    """

    html: Path | None = option(None, "--html", metavar="FILE", panel=WRITTEN)  # noqa: RUF009 - it makes a field
    save: Path | None = option(None, "--save", metavar="FOLDER", panel=WRITTEN)  # noqa: RUF009 - it makes a field


DETAILS = ("versions", "skips", "figures", "claims", "deviations", "bounds", "flags")
"""The parts of a report that are printed only on request."""


@dataclass(frozen=True)
class RunPrinting(Printing):
    """What ``pairproof verify`` prints and writes.

    Attributes:
        show: Also show versions, skips, figures, claims, deviations (declared differences), bounds (allowed errors),
            flags (kinds of mistakes), or all (repeatable or comma-separated).
    """

    show: Sequence[str] = option((), "--show", metavar="DETAILS", read=read_commas, panel=WRITTEN)


class _Targeted:
    target: object

    @property
    def name(self) -> str:
        """The name of the target: the given text, or its module and name."""
        from ..implementations.sandbox import describe

        return describe(self.target)


@dataclass(frozen=True)
class Request(_Targeted):
    """The target of ``pairproof check``, the loss that it claims to compute, and the cases to run.

    Attributes:
        target: package.module:attribute or file.py:attribute: a function, an instance, or a class, which is constructed
            with the options that its constructor takes. With --call command, a shell command line.
        loss: The loss that the target should compute; see: pairproof list.
        level: The highest level at which the target must pass: formula, policies (the default; also batches without
            positives or negatives, and duplicates), range (also extreme inputs) or digits (also rounding errors).
            Failures above it do not change the verdict.
        temperature: The only temperature to judge: the one that is built into the target. It is passed to a parameter
            with another default.
        settings: An option of the loss that is built into the target, such as no_positive=drop (repeatable). KEY=*: the
            target takes it as a keyword, for example through **kwargs.
        normalised: In cases with cosine similarity, pass rows of norm 1, for a target that does not normalise. Default:
            raw.
        frozen: A matrix that the target treats as constant, as MoCo does its queue, such as negatives (repeatable or
            comma-separated). Its gradient may be zero.
        call: The arguments of the target: labels, partners, mask, features, views, one_way, towers, stacked,
            interleaved, similarities or pairs; see docs/judging.md. By default inferred, and reported. With --call
            command, a program that reads and writes JSON lines.
        arrays: Kind of arrays passed to the target: torch, numpy or jax. By default inferred, and reported.
        scale: The parameter that gets 1/temperature, or its logarithm if the target applies exp to it, if its name does
            not show that.
        init: Pass VALUE, read as a Python literal if possible, to the parameter KEY of the function or the constructor
            (repeatable). Facts such as the batch size are passed automatically.
        result: The name or position of the loss, if the target returns several results. By default inferred, and
            reported.
        device: The torch device of the target.
        flush_denormal: Flush subnormal numbers to zero in every process.
        limit: Maximum time of one evaluation, in seconds.
        deviations: TOML file of declared deviations: known, intended differences, which do not fail. Default:
            tool.pairproof in the nearest pyproject.toml.
        cases: Only this case, random batch (fresh-SEED-NUMBER or training-SEED-NUMBER) or usage (usage/NAME); * and ?
            are wildcards (repeatable or comma-separated).
        dtypes: float64, float32, bfloat16 or float16 (repeatable or comma-separated). Default: float64 and float32.
        fuzz: Number of small random batches. Unless it is 0, there are also six of the size of training batches.
        seed: The seed of the random batches. By default random, and reported; in pytest 0.
        thorough: Also run two random batches of up to 2048 rows, and the stored cases whose new proofs take long.

    In Python, the target may be the function, class or instance itself, and a setting with several values is a tuple.
    """

    target: object = option(None, required=True)
    loss: str = option("", "--loss", "-l", metavar="LOSS", required=True)
    _: KW_ONLY
    level: str | None = option(None, "--level", metavar="LEVEL")
    temperature: float | None = option(None, "--temperature", metavar="T")
    settings: Mapping[str, object] = option({}, "--set", metavar=KEY_VALUE, read=read_settings)
    normalised: bool | None = option(None, "--normalised/--raw")
    frozen: Sequence[str] = option((), "--frozen", metavar="MATRIX", read=read_commas)
    call: str | None = option(None, "--call", metavar="HOW", panel=CALLED)
    arrays: str | None = option(None, "--arrays", metavar="KIND", panel=CALLED)
    scale: str | None = option(None, "--scale", metavar="NAME", panel=CALLED)
    init: Mapping[str, Any] = option({}, "--init", metavar=KEY_VALUE, read=read_literals, panel=CALLED)
    result: str | None = option(None, "--result", metavar="NAME", panel=CALLED)
    device: str = option("cpu", "--device", metavar="DEVICE", panel=CALLED)
    flush_denormal: bool = option(False, "--flush-denormal", panel=CALLED)
    limit: float = option(60.0, "--limit", metavar="SECONDS", panel=CALLED)
    cases: Sequence[str] = option((), "--case", "-c", metavar="CASE", read=read_commas, panel=JUDGED)
    dtypes: Sequence[str] = option((), "--dtype", "-d", metavar="DTYPE", read=read_commas, panel=JUDGED)
    fuzz: int = option(RANDOM_BATCHES, "--fuzz", metavar="N", panel=JUDGED)
    seed: int | None = option(None, "--seed", metavar="S", panel=JUDGED)
    thorough: bool = option(False, "--thorough", panel=JUDGED)
    deviations: Path | None = option(None, "--deviations", metavar="FILE", panel=JUDGED)  # noqa: RUF009 - it makes a field

    def __post_init__(self) -> None:
        for name in ("cases", "dtypes", "frozen"):
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given))
        object.__setattr__(self, "loss", loss_named(self.loss))

    @property
    def whole(self) -> bool:
        """Whether no case or dtype is left out. Only then must every declared deviation match a check."""
        return not self.cases and not self.dtypes

    def with_seed(self, seed: int) -> Self:
        """Return the request with a seed: its own, else that of a random batch in ``cases``, else ``seed``."""
        named = (re.match(r"(?:fresh|training)-(\d+)-", name) for name in self.cases)
        given = (int(match[1]) for match in named if match)
        return replace(self, seed=next(given, seed)) if self.seed is None else self

    @property
    def required(self) -> Level:
        """The highest level at which the target must pass."""
        return DEFAULT_LEVEL if self.level is None else Level(self.level)

    def repeat(self, case: str, dtype: str, level: Level = Level.FORMULA) -> str:
        """Return the command that repeats one check. Its ``--level`` includes the level of the check."""
        fuzz, seed = (self.fuzz, self.seed) if case.startswith(DRAWN_IDS) else (RANDOM_BATCHES, None)
        above = level > self.required
        asked = level.value if above else self.level
        return replace(self, cases=(case,), dtypes=(dtype,), fuzz=fuzz, seed=seed, level=asked).command

    @property
    def command(self) -> str:
        """The command that makes this request."""
        return shlex.join(["pairproof", "check", self.name, *command_options(self, Request)])


def read_varied(texts: Iterable[str]) -> dict[str, tuple[object, ...]]:
    """Convert texts of the form ``KEY=A,B`` to a mapping whose values are tuples of Python literals.

    Raises:
        ValueError: a text does not have this form, or has fewer than two values.
    """
    found = {}
    for key, text in read_pairs(texts, form="KEY=A,B").items():
        found[key] = tuple(read_literals([f"{key}={part}"])[key] for part in text.split(",") if part)
        if len(found[key]) < 2:
            raise ValueError(f"expected KEY=A,B with at least two values, got {key}={text!r}")
    return found


def read_numbers(texts: Iterable[str]) -> tuple[int, ...]:
    """Convert texts such as ``1,2,4`` to whole numbers.

    Raises:
        ValueError: a part is not a whole number from 1 to 9999.
    """
    parts = read_commas(texts)
    for part in parts:
        if not re.fullmatch(r"[1-9]\d{0,3}", part):
            raise ValueError(f"expected positive whole numbers such as 1,2,4, got {part!r}")
    return tuple(map(int, parts))


@dataclass(frozen=True)
class ParityRequest(_Targeted):
    """The target of ``pairproof parity``, and what is compared.

    Attributes:
        target: package.module:attribute or file.py:attribute: a function, an instance, or a class.
        call: The arguments of the target, as in pairproof check, except command. By default inferred from the parameter
            names, and reported.
        arrays: Kind of arrays passed to the target: torch, numpy or jax. By default inferred, and reported.
        init: Pass VALUE to the parameter KEY of the function, or of the constructor of the class (repeatable). The
            value is read as a Python literal if possible.
        result: The name or position of the loss, if the target returns several results. By default inferred, and
            reported.
        vary: An argument whose values should all give the same results, such as chunk_size=0,4 (repeatable). Default:
            arguments with a name like chunk_size.
        temperature: The temperature to pass; an error if the target takes none. Default: 0.1; batches of nearly equal
            positives are also evaluated at 0.05.
        scale: The parameter that gets 1/temperature, as in pairproof check.
        linear_memory: Require that memory grows linearly with the batch size.
        rows: Memory is measured at this batch size, and at two and four times this size.
        only: Only this comparison: repetition, permutation, chunks, float32, bfloat16, autocast, compile or memory.
            With --against: float64, float32, bfloat16 or autocast. With --world-size: loss, gradient or uneven, which
            means ranks with different numbers of rows (repeatable or comma-separated).
        world_size: Run the loss in these numbers of processes (torch.distributed, gloo), such as 1,2,3,4 (repeatable or
            comma-separated), instead of the other comparisons. The loss and the gradients of parameters, averaged over
            the ranks, are compared with those of one process.
        against: Compare with another loss, in the format of TARGET, instead of with the target itself: in float64,
            float32, bfloat16 and under autocast or, with --world-size, in the single process. It gets the same batches,
            but none of --call, --arrays, --init, --result and --scale.
        seed: The seed of the random batches. Default: 0, so that every run judges the same batches.
        device: The torch device on which the target runs.
        limit: Maximum time of one evaluation, in seconds. Ranks wait for each other up to this time.
        json: Also write the result as JSON to this file.
        html: With --world-size: also write the result as an HTML page to this file. It draws which gradients reach the
            rows of each of 2 to 8 processes.

    In Python, the target may be the function, class or instance itself.
    """

    target: object = option(None, required=True)
    _: KW_ONLY
    call: str | None = option(None, "--call", metavar="HOW")
    arrays: str | None = option(None, "--arrays", metavar="KIND")
    init: Mapping[str, Any] = option({}, "--init", metavar=KEY_VALUE, read=read_literals)
    result: str | None = option(None, "--result", metavar="NAME")
    vary: Mapping[str, Sequence[object]] = option({}, "--vary", metavar="KEY=A,B", read=read_varied)
    temperature: float | None = option(None, "--temperature", metavar="T")
    scale: str | None = option(None, "--scale", metavar="NAME")
    linear_memory: bool = option(False, "--linear-memory")
    rows: int = option(1024, "--rows", metavar="N")
    only: Sequence[str] = option((), "--only", metavar="NAME", read=read_commas)
    world_size: Sequence[int] = option((), "--world-size", metavar="SIZES", read=read_numbers)
    against: object = option(None, "--against", metavar="TARGET")
    seed: int = option(0, "--seed", metavar="SEED")
    device: str = option("cpu", "--device", metavar="DEVICE")
    limit: float = option(60.0, "--limit", metavar="SECONDS")
    json: Path | None = option(None, "--json", metavar="FILE")  # noqa: RUF009 - it makes a field
    html: Path | None = option(None, "--html", metavar="FILE")  # noqa: RUF009 - it makes a field

    def __post_init__(self) -> None:
        object.__setattr__(self, "only", (self.only,) if isinstance(self.only, str) else tuple(self.only))
        sizes = (self.world_size,) if isinstance(self.world_size, int) else tuple(self.world_size)
        object.__setattr__(self, "world_size", sizes)

    @property
    def expected(self) -> str:
        """The name of the loss that gives the expected results: that of ``against``, or of the target."""
        from ..implementations.sandbox import describe

        return describe(self.target if self.against is None else self.against)


@dataclass(frozen=True)
class Batch:
    """The input of ``pairproof fixtures add``: the path of each array, and the options as texts.

    Attributes:
        loss: The loss; see: pairproof list.
        embeddings: File with an [N, D] array; for a loss of two towers, the first one.
        id: A new name: lower-case letters, digits and hyphens.
        labels: File with [N] integers. The loss determines which is needed: labels (or positives instead), partners,
            positive pairs, or a second tower.
        partners: File with [N] integers, the row of each row's positive; or the word interleaved or stacked.
        positive_pairs: File with [P, 2] row numbers, each an anchor and its positive.
        positives: File with [N, M] booleans, instead of labels. Row i marks the positives of anchor i.
        anchors: File with [N] booleans, true for the rows that are anchors. By default all are.
        ref_embeddings: File with an [M, D] array, the rows that anchors are contrasted with instead of the batch.
        ref_labels: File with [M] integers, the labels of the reference rows or of the second tower.
        self_rows: File with [N] integers: each anchor's own row in the reference rows, or -1 if it is not among them.
        ignored: File with [N, M] booleans: the pairs that are left out. With hard negatives, there are more columns;
            see the docstring of the loss.
        ignored_ids: File with [N] integers. Pairs with equal ids are left out unless they are positives.
        ref_ignored_ids: File with [M] integers, the ids of the reference rows or of the second tower.
        positive_weights: File with [N, M] weights of positives, at least 0.
        negative_weights: File with [N, M] weights of negatives, at least 0.
        anchor_weights: File with [N] weights of the anchors' losses, at least 0.
        embeddings_b: File with an [M, D] array, the second tower.
        negatives: File with a [K, D] array, the queue of info_nce.
        hard_negatives: File with an [N, H, D] array, the hard negatives of every query.
        settings: A non-default option of the loss (repeatable).
    """

    loss: str = option("", "--loss", "-l", metavar="LOSS", required=True)
    id: str = option("", "--id", metavar="NAME", required=True)
    embeddings: str = option("", "--embeddings", required=True)
    labels: str | None = option(None, "--labels")
    partners: str | None = option(None, "--partners")
    positive_pairs: str | None = option(None, "--positive-pairs")
    positives: str | None = option(None, "--positives")
    anchors: str | None = option(None, "--anchors")
    ref_embeddings: str | None = option(None, "--ref-embeddings")
    ref_labels: str | None = option(None, "--ref-labels")
    self_rows: str | None = option(None, "--self-rows")
    ignored: str | None = option(None, "--ignored")
    ignored_ids: str | None = option(None, "--ignored-ids")
    ref_ignored_ids: str | None = option(None, "--ref-ignored-ids")
    positive_weights: str | None = option(None, "--positive-weights")
    negative_weights: str | None = option(None, "--negative-weights")
    anchor_weights: str | None = option(None, "--anchor-weights")
    embeddings_b: str | None = option(None, "--embeddings-b")
    negatives: str | None = option(None, "--negatives")
    hard_negatives: str | None = option(None, "--hard-negatives")
    settings: Mapping[str, str] = option({}, "--set", metavar=KEY_VALUE, read=read_choices)

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", loss_named(self.loss))


def read_sizes(texts: Iterable[str]) -> tuple[int, ...]:
    """Read sizes of classes, such as ``10,10,12``. ``256x2`` stands for 256 classes of 2 rows.

    Raises:
        ValueError: a part is neither a positive number nor two joined by x.
    """
    sizes: list[int] = []
    for part in read_commas(texts):
        found = re.fullmatch(r"(?:([1-9]\d{0,8})x)?([1-9]\d{0,8})", part)
        if not found:
            raise ValueError(f"expected sizes such as 10,10,12 or 256x2, got {part!r}")
        sizes += [int(found[2])] * int(found[1] or 1)
    return tuple(sizes)


@dataclass(frozen=True)
class TrainingBatch:
    """The input of ``pairproof diagnose``: the path of each array, and the options as texts.

    Attributes:
        loss: The loss; see: pairproof list.
        embeddings: File with an [N, D] array; for two towers, the first one.
        labels: File with [N] integers, the classes of the rows.
        partners: File with [N] integers, the row of each row's positive; or the word interleaved or stacked. Default:
            stacked, the first views of all items before the second views.
        embeddings_b: File with an [N, D] array, the second tower.
        negatives: File with a [K, D] array, the queue of info_nce. With --class-sizes, the number K of its rows.
        class_sizes: Instead of embeddings: the number of rows of every class, such as 10,10,12 (repeatable or
            comma-separated). 256x2 stands for 256 classes of 2 rows, or for 256 positive pairs.
        dim: With --class-sizes: the number of columns of the random embeddings. Default: 128.
        value: The value that the training loop prints. Default: the loss of the embeddings.
        values: File with [T] numbers, the value of every step of a run, instead of --value, which is the last one.
        settings: A non-default option of the loss (repeatable).
        json: Also write the diagnosis as JSON to this file.
        html: Also write the diagnosis as an HTML page to this file. It draws the value or the curve of --values among
            the levels.
    """

    loss: str = option("supcon", "--loss", "-l", metavar="LOSS")
    embeddings: str | None = option(None, "--embeddings")
    labels: str | None = option(None, "--labels")
    partners: str | None = option(None, "--partners")
    embeddings_b: str | None = option(None, "--embeddings-b")
    negatives: str | None = option(None, "--negatives", metavar="FILE|K")
    class_sizes: tuple[int, ...] = option((), "--class-sizes", metavar="SIZES", read=read_sizes)
    dim: int | None = option(None, "--dim", metavar="D")
    value: float | None = option(None, "--value", metavar="NUMBER")
    values: str | None = option(None, "--values")
    settings: Mapping[str, str] = option({}, "--set", metavar=KEY_VALUE, read=read_choices)
    json: Path | None = option(None, "--json", metavar="FILE")  # noqa: RUF009 - it makes a field
    html: Path | None = option(None, "--html", metavar="FILE")  # noqa: RUF009 - it makes a field

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", loss_named(self.loss))


@dataclass(frozen=True)
class Rebuild:
    """The options of ``pairproof fixtures rebuild`` and ``check``.

    Attributes:
        peers: supcontrast=PATH runs the current SupContrast code, and compares its results with the recorded ones; PATH
            is its repository or its losses.py. pairproof fixtures rebuild also replaces the recorded results.
            folder=PATH is the folder with the files of the peers (public implementations). Default: the environment
            variable PAIRPROOF_PEERS, or .peers if it is not set (repeatable).
    """

    peers: Mapping[str, str] = option({}, "--peer", metavar=NAME_PATH, read=read_pairs)
