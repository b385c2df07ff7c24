"""The command ``pairproof``.

Exit codes: 0 everything holds, 1 something does not, 2 invalid command line, 3 could not run.
"""

from __future__ import annotations

import atexit
import functools
import gc
import inspect
import io
import json
import os
import re
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

from pairproof import __version__, install_command

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars
    from typer.core import TyperCommand, TyperGroup
except ImportError as error:  # the base install contains only the losses
    sys.exit(f"pairproof: the command needs {error.name}: {install_command('verify')}")

from .judge import options as tables
from .judge.options import CouldNotRun, Request, Selection, UsageError
from .suite.levels import Level

if TYPE_CHECKING:
    from .judge.check import CheckResult
    from .judge.comparisons import ParityResult
    from .judge.verify import Report
    from .suite.progress import Progress
    from .training import Diagnosis

T = TypeVar("T", bound=Callable[..., Any])

KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
NOT_CONFORMING, MISUSED, COULD_NOT_RUN = 1, 2, 3
INTERRUPTED = 130
"""The exit code of a process that Ctrl-C ends: 128 plus the number of the signal."""


class _NoTypeForFlags:
    """Removes the type of flags from the help, because flags take no value."""

    def get_params(self, *given: Any) -> Any:
        parameters = super().get_params(*given)  # type: ignore[misc]
        for one in parameters:
            if getattr(one, "is_flag", False):
                one.metavar = ""
        return parameters


class _Command(_NoTypeForFlags, TyperCommand): ...


class _Group(_NoTypeForFlags, TyperGroup): ...


Group = functools.partial(
    typer.Typer,
    cls=_Group,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app = Group(help="Check whether implementations of contrastive losses are correct.")
fixtures = Group(help="Rebuild, check, extend or explain the fixtures: the cases and their expected results.")
app.add_typer(fixtures, name="fixtures")

LISTS = ("losses", "implementations", "documents", "cases", "figures", "claims", "faults")


class Output(Console):
    """Standard output. A closed pipe does not end the command."""

    def __init__(self) -> None:
        super().__init__(markup=False, highlight=False, emoji=False)

    def on_broken_pipe(self) -> None:
        """Stop printing; the command still writes its reports and keeps its exit code."""
        self.quiet = True
        _discard_output()


def _discard_output() -> None:
    """Redirect standard output to the null device; otherwise Python fails when it flushes a closed pipe at exit."""
    with suppress(OSError), Path(os.devnull).open("w") as null:
        os.dup2(null.fileno(), sys.stdout.fileno())


def _command(group: typer.Typer, name: str | None = None) -> Callable[[T], T]:
    """Register a function as a command. Its docstring is the help text."""

    def register(function: T) -> T:
        @functools.wraps(function)
        def run(**given: Any) -> None:
            try:
                function(**given)
            except KeyboardInterrupt as error:
                _say("; ".join(["interrupted", *reversed(getattr(error, "__notes__", []))]))
                raise typer.Exit(INTERRUPTED) from None

        text = re.sub(r"(?<=\S)\n(?=\S)", " ", inspect.getdoc(function) or "")
        group.command(name, cls=_Command, help=escape(text))(run)
        return function

    return register


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pairproof {__version__}")
        raise typer.Exit


VERSION = typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version and exit.")


@app.callback()
def _main(version: Annotated[bool, VERSION] = False) -> None: ...


def _losses(incomplete: str) -> list[str]:
    from .suite.catalogue import LOSSES

    return [name for name in LOSSES if name.startswith(incomplete)]


def _levels(incomplete: str) -> list[str]:
    return [level for level in Level if level.startswith(incomplete)]


COMPLETED = {"loss": _losses, "losses": _losses, "level": _levels}
"""What a shell offers as the value of an option, by keyword."""


def with_options(
    *kinds: type, only: Sequence[str] = (), until: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of some tables.

    Args:
        kinds: tables of :mod:`pairproof.conformance.judge.options`.
        only: the fields to use; empty means all.
        until: cut each help text off before this phrase.

    Returns:
        A decorator. The command receives each option as a keyword argument.
    """
    chosen = [one for kind in kinds for name, one in tables.options_of(kind).items() if name in only or not only]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters = []
        for one in chosen:
            typed = one.flags and one.type is not object
            kind, default = (list[str], None) if one.read else (one.type if typed else str, one.default)
            form = typer.Option if one.flags else typer.Argument
            text = escape(one.help.partition(until)[0] if until else one.help)
            metavar = one.metavar or ("FILE" if one.help.startswith("File with ") else None)
            about: Any = form(
                *one.flags,
                help=text,
                metavar=metavar,
                show_default=default is not None,
                rich_help_panel=one.panel,
                autocompletion=COMPLETED.get(one.keyword),
            )
            default = inspect.Parameter.empty if one.required else default
            more = {"default": default, "annotation": Annotated[kind, about]}
            parameters.append(inspect.Parameter(one.keyword, KEYWORD_ONLY, **more))
        own = inspect.signature(command, eval_str=True).parameters.values()
        names = {"options", *(one.keyword for one in chosen)}
        parameters += [one.replace(kind=KEYWORD_ONLY) for one in own if one.name not in names]
        parameters.sort(key=lambda one: one.default is not one.empty)

        @functools.wraps(command)
        def run(**given: Any) -> None:
            read = {one.keyword: one.value(given[one.keyword], one.flags[0]) for one in chosen if one.read}
            command(**given | read)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


@contextmanager
def _bar(first: str = "loading", named: bool = False) -> Iterator[Progress]:
    """Show the current step, how far it is and its seconds, if standard error is a terminal.

    Args:
        first: the first step.
        named: whether to print the name of each step if standard error is not a terminal.
    """
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"), TimeElapsedColumn()
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        shown = bars.add_task(first, total=None, count="")

        def report(what: str, done: int, total: int) -> None:
            nonlocal shown
            count = f"{done}/{total}" if total else ""
            if bars.tasks[shown].description != what:
                bars.update(shown, visible=False)
                # Without a total, the bar moves to and fro.
                shown = bars.add_task(what, total=total or None, count=count)
                if named and not console.is_terminal:
                    _say(what)
            bars.update(shown, completed=done, count=count)

        try:
            yield report
        except KeyboardInterrupt as error:
            step = bars.tasks[shown]
            error.add_note(f"at {step.description} {step.fields['count']}".rstrip())
            raise


def _split(options: Mapping[str, Any], *kinds: type) -> Iterator[Any]:
    return (kind(**{name: options[name] for name in tables.options_of(kind)}) for kind in kinds)


def _print(lines: Iterable[str]) -> None:
    from .report import wrapped

    output = Output()
    for line in lines:
        output.print(wrapped(line, output.width), soft_wrap=True)


def _judge(judge: Callable[[Progress], Report | CheckResult], printing: tables.Printing) -> None:
    """Judge, print and write the results, and exit.

    Raises:
        UsageError: a path or a value of ``--show`` is invalid. This is raised before anything is judged.
        CouldNotRun: a file could not be written.
    """
    from . import report as pages
    from . import summary as summaries
    from .page.write import write_page

    writers = {
        "html": write_page,
        "json": pages.write_json,
        "junit": pages.write_junit,
        "summary": summaries.write_summary,
        "badge": summaries.write_badge,
    }
    files = _files(printing, writers)
    details = printing.show if isinstance(printing, tables.RunPrinting) else ()
    for name in details:
        if name not in (*tables.DETAILS, "all"):
            raise tables.unknown("value of --show", name, (*tables.DETAILS, "all"))
    start = time.perf_counter()
    with _bar() as bar:
        found = judge(bar)
    details = tables.DETAILS if "all" in details else details
    if isinstance(printing, tables.CheckPrinting) and printing.save and (shrunk := getattr(found, "shrunk", None)):
        try:
            shrunk.save(printing.save)
        except OSError as error:
            raise CouldNotRun(f"{printing.save} cannot be written: {error.strerror}") from None
    pages.show(found, Output(), seconds=time.perf_counter() - start, details=None if printing.quiet else details)
    for name, path in files.items():
        _write(functools.partial(writers[name], found), path)
    raise typer.Exit(found.exit_code)


def _finish(found: ParityResult | Diagnosis, lines: Iterable[str], files: Mapping[str, Path]) -> NoReturn:
    """Print the lines of a result, write the files, and exit."""
    _print(lines)
    if "json" in files:
        text = json.dumps(found.as_json(), indent=1, allow_nan=False)
        _write(lambda path: path.write_text(text + "\n", encoding="utf-8"), files["json"])
    if "html" in files:
        from .page.write import write_figures

        _write(functools.partial(write_figures, found), files["html"])
    raise typer.Exit(found.exit_code)


def _files(options: object, names: Iterable[str] = ("json", "html")) -> dict[str, Path]:
    """Return the files to write, by the name of their option.

    Raises:
        UsageError: a file cannot be written.
    """
    files = {name: path for name in names if (path := getattr(options, name, None)) is not None}
    for name, path in files.items():
        _check_path(f"--{name}", path)
    return files


def _check_path(option: str, path: Path) -> None:
    if path.is_dir() or not path.parent.is_dir():
        reason = "it is a folder" if path.is_dir() else f"the folder {path.parent} does not exist"
        raise UsageError(f"{option}: cannot write {path}: {reason}")


def _write(write: Callable[[Path], object], path: Path) -> None:
    try:
        write(path)
    except OSError as error:
        raise CouldNotRun(f"{path} cannot be written: {error.strerror}") from None


@_command(app)
@with_options(Selection, tables.RunPrinting)
def verify(
    public: Annotated[
        bool,
        typer.Option(
            "--public",
            help="Judge only the losses of public repositories, by their recorded values and gradients or, if "
            "PAIRPROOF_PUBLIC names a folder with the repositories, by running their code. Other options have no "
            "effect.",
        ),
    ] = False,
    **options: Any,
) -> None:
    """Check every implementation, and every number that five published documents and three public tests print.

    Every implementation is compared with the proved value and gradient of every case that it supports.

    Each printed number (a figure) is recomputed with interval arithmetic. If a figure cannot be reproduced (an
    artefact), its recorded explanation is checked. Claims that the documents make in words are tested, too.

    Exit codes: 0 everything holds and the expected number of checks ran, 1 something does not hold, 2 invalid command
    line, 3 could not run: something requested by an option is not available, or no result could be compared.

    Examples:
        pairproof verify
        pairproof verify --loss supcon --impl pml
        pairproof verify --case 'supcon_notebook/*' --dtype float32
        pairproof verify --show figures,claims
        pairproof verify --peer supcontrast=../SupContrast --junit report.xml
        TRITON_INTERPRET=1 pairproof verify --impl fast-triton --covering
        pairproof verify --public
    """
    from .judge.verify import run

    if public:
        _verify_public()
    selection, printing = _split(options, Selection, tables.RunPrinting)
    _judge(functools.partial(run, selection), printing)


@_command(app)
@with_options(Selection)
def report(
    out: Annotated[
        Path, typer.Option("--out", metavar="FOLDER", help="The folder for index.html; it is created.")
    ] = Path("report"),
    **options: Any,
) -> None:
    """Verify everything, and write the results as one HTML page, which works offline.

    The page shows a table of implementations and losses, worked examples with every term, the findings, the accuracy,
    and all cases. The exit codes and the options that select a part are those of pairproof verify.

    Examples:
        pairproof report
        pairproof report --out page --loss supcon,nt_xent --thorough
    """
    from .judge.verify import run
    from .page.write import write_page

    (selection,) = _split(options, Selection)
    if out.is_file():
        raise UsageError(f"--out: expected a folder, got the file {out}")
    with _bar() as bar:
        found = run(selection, bar)
    path = out / "index.html"
    _write(lambda path: out.mkdir(parents=True, exist_ok=True), path)
    _write(functools.partial(write_page, found), path)
    verdict = "everything holds" if found.passed else f"NOT everything holds: {found.first_problem}"
    _print([f"{path}: {path.stat().st_size / 1e6:.1f} MB; {verdict}"])
    raise typer.Exit(found.exit_code)


def _verify_public() -> NoReturn:
    """Judge the public losses, as recorded or by running their code."""
    from .implementations.base import Unavailable
    from .implementations.public import WHERE, load_public
    from .judge.public import judge_live, replay

    folder, wrong = os.environ.get(WHERE), False
    for loss in load_public():
        try:
            found = judge_live(loss, Path(folder))[0] if folder else replay(loss)
        except Unavailable as error:
            _print([f"{loss.name}: skipped: {error}"])
        else:
            _print(found.lines())
            wrong |= bool(found.problems)
    raise typer.Exit(wrong)


@_command(app)
@with_options(Request, tables.CheckPrinting)
def check(
    everything: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Show all failing cases instead of the first three, the counts for each flag, and all reasons for "
            "skipped cases.",
            rich_help_panel=tables.WRITTEN,
        ),
    ] = False,
    **options: Any,
) -> None:
    """Check a loss of your own.

    The loss is compared with the proved value and gradient of every case that it supports.

    A loss with a parameter for an option, such as no_positive, must support all its values. Without such a parameter,
    it must compute the default, or the value that --set names; cases with other values are skipped and counted.

    Exit codes: 0 it conforms, 1 it does not, 2 invalid command line, 3 could not run.

    docs/judging.md explains how the loss is called, levels, declared deviations, and programs in other languages.

    Examples:
        pairproof check mylib.losses:SupConLoss --loss supcon
        pairproof check losses.py:my_loss --loss supcon --temperature 0.1
        pairproof check losses.py:my_loss --loss supcon --set no_positive=drop
        pairproof check losses.py:nt_xent --loss nt_xent --call views --normalised
        pairproof check './loss --stdin' --call command --loss supcon --limit 5
    """
    from .judge import check as checking

    request, printing = _split(options, Request, tables.CheckPrinting)
    _judge(functools.partial(checking.check, request, explain=None if everything else checking.SHOWN), printing)


@_command(app)
@with_options(Request, only=("loss", "call", "temperature", "settings", "dtypes"), until=" By default inferred")
def pack(
    library: Annotated[str, typer.Option("--for", metavar="LIBRARY", help="The array package: torch or numpy.")],
    out: Annotated[
        Path,
        typer.Option("--out", metavar="PATH", help="A folder for test_pairproof_LOSS.py, or a file; it is created."),
    ] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    **options: Any,
) -> None:
    """Write a test file to commit to the repository of a loss. The file needs pytest and LIBRARY, but not pairproof.

    It contains the few cases that together find nearly all known mistakes that a loss with these options can have, and
    two batches of training size. In the file, edit the function that calls the loss. By default, it gets embeddings and
    labels, pairs, or two towers, depending on the loss. Values and, for torch, gradients of its matrices are compared
    in float64 and float32; use --dtype float32 if the loss always computes in float32. The options of the loss are
    those of pairproof check; KEY=* passes an option to the function in the file.

    Exit codes: 0 the file is written, 2 invalid command line, or no case suits it, 3 the file cannot be written.

    Examples:
        pairproof pack --loss supcon --for torch --out tests/
        pairproof pack --loss nt_xent --for numpy --call views
        pairproof pack --loss supcon --for torch --set no_positive=drop
    """
    from . import pack as packing

    request = Request(None, **options)
    path = out if out.suffix == ".py" else out / f"test_pairproof_{request.loss}.py"
    if path.parent.exists():
        _check_path("--out", path)
    if path.exists() and not force:
        raise UsageError(f"--out: {path} exists: pass --force to replace it")
    with _bar() as bar:
        made = packing.pack(request, library, bar)
    _write(lambda path: path.parent.mkdir(parents=True, exist_ok=True), path)
    _write(lambda path: path.write_text(made.text, encoding="utf-8"), path)
    left_out = {"not found": made.missed, "in no case": made.unseen}
    _print([f"{path}: {made.summary}", *(f"  {what}: {name}" for what, names in left_out.items() for name in names)])


@_command(app)
@with_options(Request, only=("target", "call", "arrays", "scale", "init", "result", "limit"), until=" With --")
def identify(
    target: str,
    bias: Annotated[
        float | None,
        typer.Option(
            "--bias", metavar="NUMBER", help="The bias that is built into a sigmoid loss. Default: -10 and 0 are tried."
        ),
    ] = None,
    **options: Any,
) -> None:
    """Identify which loss a function computes, with which options and which temperature.

    The function is called with batches on which losses differ. Its results are compared with those of every loss that
    pairproof list prints, with every option, and with known mistakes. A built-in temperature is recovered.

    Exit codes: 0 the function is recognised, as a correct loss or as a known wrong one; 1 it is not recognised (if a
    loss is near, it is reported); 2 invalid command line; 3 the function cannot be loaded or called.

    Examples:
        pairproof identify mylib.losses:contrastive_loss
        pairproof identify losses.py:MyLoss --call features
    """
    from .diagnose import identify as diagnosis
    from .faults import FAULTS
    from .implementations.sandbox import TargetError, TargetMisused

    try:
        with _bar("comparing with every loss"):
            found = diagnosis.identify(target, **options, bias=bias, title=target, faults=FAULTS)
    except TargetError as error:
        _say(f"{target}: {error}")
        raise typer.Exit(MISUSED if isinstance(error, TargetMisused) else COULD_NOT_RUN) from None
    _print([*found.lines(), f"  {found.seconds:.1f} s"])
    raise typer.Exit(found.exit_code)


@_command(app)
@with_options(tables.ParityRequest)
def parity(**options: Any) -> None:
    r"""Check that different ways to evaluate a loss agree. Any loss can be checked, even one unknown to pairproof.

    The same random batches are evaluated again: unchanged, with permuted rows, with other chunk sizes, in float32 and
    bfloat16, under autocast, and compiled. The results may differ only by rounding.

    Memory is measured at three batch sizes: what the loss keeps for its backward pass, and the peak. With
    --linear-memory, both must grow linearly.

    With --against, another loss gives the expected results, and only the precisions are compared.

    With --world-size, these comparisons are replaced: the loss and the averaged gradients of several processes are
    compared with those of one process. If they differ, the mistake is named.

    Exit codes: 0 all results agree, 1 a comparison differs or ended in an error, 2 invalid command line, 3
    could not run.

    Examples:
        pairproof parity mylib.losses:SigLipLoss --init bias=-10
        pairproof parity losses.py:chunked --vary chunk_size=0,4,7
        pairproof parity losses.py:my_loss --only memory --linear-memory
        pairproof parity losses.py:my_loss --against mylib.losses:MyLoss
        pairproof parity losses.py:NTXentLoss --world-size 1,2,4 \
            --init gather_distributed=True --html ranks.html
    """
    from .judge import parity as comparing

    request = tables.ParityRequest(**options)
    files = _files(request)
    with _bar("comparing"):
        found = comparing.compare_with_itself(request)
    _finish(found, found.lines(), files)


@_command(app)
@with_options(tables.TrainingBatch)
def diagnose(
    temperature: Annotated[str | None, typer.Option(metavar="T", help="Short for --set temperature=T.")] = None,
    **options: Any,
) -> None:
    r"""Report whether a loss value is plausible for a batch, and whether its embeddings can still improve.

    The value is compared with three levels: "lowest", the lowest value that is possible for these classes (rarely 0);
    "chance", the value of random embeddings; and "collapsed", the value of equal embeddings. All levels that the value
    is near are reported. At a high temperature, or with one class, they can be several, and the value alone does not
    tell them apart.

    If embeddings are given, their norms, cosines and gradient are examined, too, and they decide: embeddings have
    collapsed only if their directions are nearly equal, and are random only if positives are no closer than negatives.

    Files are npy, csv, pt (a tensor, as torch.save writes it), or a named tensor of a file: FILE.safetensors:TENSOR or
    FILE.pt:TENSOR. If the temperature is learned, pass the one that the last value was computed with.

    Exit codes: 0 no problem found, 1 a problem, such as a value that only a collapsed encoder has, a gradient of 0 or a
    value below the lowest, 2 invalid command line, 3 a file cannot be written.

    Examples:
        pairproof diagnose --class-sizes 256x2 --value 8.909 \
            --temperature 0.1 --set base_temperature=0.07
        pairproof diagnose --embeddings z.npy --labels y.npy --temperature 0.1
        pairproof diagnose --class-sizes 256x2 --values losses.csv --html run.html
        pairproof diagnose --loss info_nce --embeddings a.npy \
            --embeddings-b b.npy --value 3.2
    """
    from .maintain.add import read_training
    from .suite.machine import described, machine
    from .training import diagnose as examine

    if temperature is not None:
        options["settings"]["temperature"] = temperature
    batch = tables.TrainingBatch(**options)
    files = _files(batch)
    if bool(batch.embeddings) == bool(batch.class_sizes):
        got = "both" if batch.embeddings else "neither"
        raise UsageError(f"expected exactly one of --embeddings and --class-sizes, got {got}")
    try:
        found = examine(**read_training(batch))
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    batch_line, *more = found.lines()
    _finish(found, [batch_line, f"  on {described(machine())}", *more], files)


@_command(app, "list")
@with_options(Selection, only=("losses",))
def list_everything(
    what: Annotated[
        str | None, typer.Argument(metavar="WHAT", help=f"What to list: {', '.join(LISTS[:-1])} or {LISTS[-1]}.")
    ] = None,
    *,
    losses: tuple[str, ...],
) -> None:
    """List losses, implementations, documents, cases, figures, claims, and faults: the known mistakes.

    Without WHAT, losses, implementations and documents are listed. With only --loss, the loss and its cases are listed.
    --loss has no effect on implementations, documents, figures and claims.

    Examples:
        pairproof list
        pairproof list cases --loss nt_xent
        pairproof list figures
    """
    from pairproof.fast.engine import jit

    from .documents.load import load_worked
    from .faults import FAULTS
    from .implementations import ALL
    from .judge.results import several
    from .judge.verify import check_names, load_cases
    from .suite.catalogue import LOSSES

    chosen, fixtures = Selection(losses), load_worked()
    check_names(chosen)
    refusal = jit.refusal()
    compiled = f"; {refusal}" if refusal else f", numba {jit.version()}"
    if what not in (None, *LISTS):
        raise tables.unknown("list", str(what), LISTS)
    entries = {name: entry for name, entry in LOSSES.items() if chosen.takes_loss(name)}
    takes = {name: ", ".join(filter(None, (*entry.embeddings, entry.targets))) for name, entry in entries.items()}
    cases = [case for case in load_cases(fixtures) if case.loss in entries]
    count = Counter(case.loss for case in cases)
    figures = [(f"{fixture.document.id}/{it.id}", it) for fixture in fixtures for it in fixture.figures]
    claims = [(f"{fixture.document.id}/{it.id}", it) for fixture in fixtures for it in fixture.claims]
    lists = {
        "losses": [f"{name}: {it.function}({takes[name]}); {it.source}" for name, it in entries.items()],
        "implementations": [f"{kind.name}: {kind.title}{compiled if kind.name == 'fast' else ''}" for kind in ALL],
        "documents": [
            *(
                f"{it.document.id}: {several(len(it.figures), 'figure')}, {several(len(it.claims), 'claim')}"
                for it in fixtures
                if it.document.source is None
            ),
            "public tests: " + ", ".join(it.document.id for it in fixtures if it.document.source is not None),
        ],
        "cases": [f"{it.id}: {it.loss}, {it.sizes()}" for it in cases],
        "figures": [f"{name}: {it.what} ({it.place})" for name, it in figures],
        "claims": [f'{name}: "{it.words}"' for name, it in claims],
        "faults": [f"{it.name}: {it.words}" for it in FAULTS if it.loss in entries],
    }
    summary = {
        "losses": [f"{name}: {it.function}({takes[name]}), {count[name]} cases" for name, it in entries.items()],
        "implementations": lists["implementations"],
        "documents": lists["documents"],
        f"pairproof list {'|'.join(LISTS)}": [],
    }
    shown = {name: lists[name] for name in ([what] if what else ["losses", "cases"])} if what or losses else summary
    for title, lines in shown.items():
        _print([title, *(f"  {line}" for line in lines)])


@_command(app, "new-loss")
def new_loss(
    name: Annotated[str, typer.Argument(help="A new short name: lower-case letters, digits, underscores.")],
    like: Annotated[
        str, typer.Option(metavar="LOSS", help="The loss to start from: its arguments, options and formula are copied.")
    ],
    source: Annotated[str, typer.Option(metavar="TEXT", help="Where the new loss is published.")],
) -> None:
    r"""Create the files of a new loss in a checkout, and list the remaining steps.

    The files are copies of those of another loss, without its cases. Then edit three files: the entry in the
    catalogue, the formula in reference/ and the function in fast/.

    Examples:
        pairproof new-loss dcl --like nt_xent \
            --source "Yeh et al. 2022, equation 6"
    """
    from .maintain import new_loss as writing

    made = writing.new_loss(name, tables.loss_named(like), source)
    _print([*(f"written: {path}" for path in made.written), *(f"to do: {line}" for line in made.left)])


@_command(app)
def explain(
    case: Annotated[
        str, typer.Argument(metavar="CASE", help="The id of a case, or of a figure that is the value of a loss.")
    ],
    anchor: Annotated[
        int | None, typer.Option(metavar="ROW", help="Only the anchor in this row, counted from 0.")
    ] = None,
) -> None:
    """Print every term of the loss of one case, and their sum.

    pairproof list cases prints the names of the cases; the prefix golden/ may be omitted. pairproof fixtures show
    explains why a golden case exists.

    Examples:
        pairproof explain supcon_notebook/supcon-3x3 --anchor 0
        pairproof explain pair_notebook/in-103-loss-0.01
        pairproof explain supcon/two-positives
    """
    from . import explain as words

    _print(words.explain(words.find_case(case), anchor))


def _rebuild(peers: dict[str, str], *, keep: bool) -> None:
    """Rebuild the fixtures and print the changes. The changes are written only if ``keep``."""
    from .maintain.rebuild import rebuild, shortened
    from .maintain.renew import renew
    from .suite.catalogue import LOSSES
    from .suite.store import fixtures_root

    with _bar(named=True) as bar:
        found = rebuild(peers, progress=bar, keep=keep)
    _print([*shortened(found.changes), *shortened(found.notes), *shortened(found.failed)])
    changes = len(found.changes)
    if keep:
        for loss, entry in LOSSES.items():
            if any(change.startswith(f"{entry.golden_file}: ") for change in found.changes):
                _print([f"updated: {name}" for name in renew(fixtures_root().parent, loss)])
        typer.echo(f"fixtures: {changes} changes" if changes else "fixtures: nothing changed")
    else:
        typer.echo(f"fixtures: a rebuild would {f'make {changes} changes' if changes else 'change nothing'}")
    if found.failed:
        advice = "correct the implementations or declare the deviations, then run this command again"
        counted = "the stored counts of checks assume that they pass or deviate as declared"
        typer.echo(f"fixtures: {len(found.failed)} checks failed; {counted}; {advice}")
    if found.failed or (changes and not keep):
        raise typer.Exit(NOT_CONFORMING)


@_command(fixtures, "rebuild")
@with_options(tables.Rebuild)
def fixtures_rebuild(peers: dict[str, str]) -> None:
    """Recompute the derived parts of the fixtures, and write the changes.

    This proves the golden results, formats the worked examples, runs every check, and updates counts, checksums and, if
    golden cases have changed, the tables in the documents. The changes are printed. The results of a peer are recorded
    again only if its path is given. If a proof fails, nothing is written. Exit code 1 if a check of an implementation
    fails.

    Examples:
        pairproof fixtures rebuild
        pairproof fixtures rebuild --peer supcontrast=../SupContrast
    """
    _rebuild(peers, keep=True)


@_command(fixtures, "check")
@with_options(tables.Rebuild)
def fixtures_check(peers: dict[str, str]) -> None:
    """Validate every file and report what a rebuild would change, without writing.

    All results are computed and proved again. Exit code 1 if anything would change or a check fails.
    """
    _rebuild(peers, keep=False)


@_command(fixtures, "add")
@with_options(tables.Batch)
def fixtures_add(
    flag: Annotated[
        list[str],
        typer.Option(
            metavar="FLAG",
            help="The kind of mistake that the case can reveal, a key of flags.json in fixtures/golden (repeatable or "
            "comma-separated).",
        ),
    ],
    note: Annotated[str, typer.Option(metavar="TEXT", help="One sentence on what the case shows.")],
    temperature: Annotated[str | None, typer.Option(metavar="T", help="Short for --set temperature=T.")] = None,
    gradient: Annotated[bool, typer.Option(help="Prove the gradient too (slow for large batches).")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the case and change nothing.")] = False,
    **options: Any,
) -> None:
    r"""Add a batch to the golden cases: validate it, prove its results, write it, and update counts and checksums.

    Files are npy, csv, pt (a tensor, as torch.save writes it), or a named tensor of a file: FILE.safetensors:TENSOR or
    FILE.pt:TENSOR. In the shapes, N and D are the numbers of rows and columns of --embeddings. M is the number of rows
    of the references or of the second tower; without these, M = N. In a checkout, tables and counts are updated too,
    which takes one to three minutes; run make test and make verify afterwards.

    Examples:
        pairproof fixtures add --loss supcon --embeddings z.npy --labels y.npy \
            --id mine --flag no-positive --note "What the case shows."
        pairproof fixtures add --loss nt_xent --embeddings z.csv \
            --partners stacked --set reduction=sum ... --dry-run
        pairproof fixtures add --loss info_nce --embeddings a.npy \
            --embeddings-b b.npy --negatives queue.npy ...
    """
    from .maintain.add import add
    from .suite.store import dump_json

    if temperature is not None:
        options["settings"]["temperature"] = temperature
    with _bar(named=True) as bar:
        added = add(
            tables.Batch(**options), tables.read_commas(flag), note, gradient=gradient, dry_run=dry_run, progress=bar
        )
    written = [f"fixtures: golden/{added.entry['id']} is proved and written", *added.notes]
    if dry_run:
        typer.echo(dump_json(added.entry), nl=False)
    else:
        _print(written)


@_command(fixtures, "show")
def fixtures_show(
    case: Annotated[str, typer.Argument(metavar="CASE", help="The id of a golden case.")],
    terms: Annotated[
        bool | None, typer.Option(help="Write out every term. Default: for up to 144 similarities.")
    ] = None,
) -> None:
    """Explain a golden case: why it exists, its inputs, the expected results, and the terms of the loss.

    pairproof list cases prints the names of the cases; the prefix golden/ may be omitted.

    Examples:
        pairproof fixtures show supcon/two-positives
    """
    from .explain import describe, find_golden
    from .suite.golden import load_flags

    _print(describe(find_golden(case), load_flags(), terms=terms))


def _prepare_streams() -> None:
    """Make standard output and standard error accept any text, even if they are closed or encode ASCII."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - open until the end
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _first_problem(error: Exception) -> object:
    """Return the first message of a shutil.Error, which lists (source, copy, message) per file; else the error."""
    entries = error.args[0] if isinstance(error, shutil.Error) and error.args else None
    return entries[0][-1] if isinstance(entries, list) and entries else error


def _message(error: Exception) -> tuple[str, int]:
    """Return the message and the exit code of an error. Print the traceback of an unexpected one."""
    if isinstance(error, UsageError):
        return str(error), MISUSED
    if hasattr(error, "format_message"):  # an error of the command line, from typer
        command = getattr(getattr(error, "ctx", None), "command_path", "pairproof")
        words = error.format_message()  # empty if the help was printed because there are no arguments
        return words and f"{words}\nsee: {command} --help", MISUSED
    # Imported here, because --help must not wait for torch.
    from .implementations.base import Unavailable
    from .suite.store import FixtureError
    from .truth.certify import CertificationError

    if isinstance(error, (CouldNotRun, Unavailable, OSError)):
        return f"could not run: {_first_problem(error)}", COULD_NOT_RUN
    if isinstance(error, (FixtureError, CertificationError)):
        return f"fixtures: {error}", NOT_CONFORMING
    traceback.print_exception(error)
    whose = "This is an error of pairproof, not of your loss. Please report it with the traceback above."
    return f"internal error: {type(error).__name__}: {error}\n{whose}", COULD_NOT_RUN


def _say(words: str) -> None:
    """Print a message of the command itself to standard error."""
    text = f"pairproof: {words}"
    if sys.stderr.isatty():  # a terminal would break the message inside words
        lines, width = list[str](), shutil.get_terminal_size().columns
        for line in text.splitlines():
            more = " " * (len(line) - len(line.lstrip()) + 2)
            lines += wrap(line, width, subsequent_indent=more, break_long_words=False, break_on_hyphens=False) or [""]
        text = "\n".join(lines)
    typer.echo(text, err=True)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line, and exit."""
    # Otherwise Python searches all cases for reference cycles before it exits, which takes a second.
    atexit.register(gc.freeze)
    _prepare_streams()
    try:
        sys.exit(app(args=arguments, prog_name="pairproof", standalone_mode=False))
    except Exception as error:
        words, code = _message(error)
        if isinstance(error, OSError):
            _discard_output()
    if words:
        _say(words)
    sys.exit(code)


if __name__ == "__main__":
    main()
