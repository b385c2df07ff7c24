"""The command line: ``pairproof verify``, ``check``, ``identify``, ``list``, ``explain`` and ``fixtures``.

Exit codes: 0 everything holds, 1 something does not, 2 the command was misused, 3 it could not run.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars
except ImportError as error:  # the base install has the losses alone
    sys.exit(f'pairproof: the command needs {error.name}: pip install "pairproof[verify]"')

from .judge.options import Batch, CouldNotRun, Rebuild, Request, Selection, UsageError, options_of

if TYPE_CHECKING:
    from .judge.check import CheckResult
    from .judge.verify import Report
    from .suite.progress import Progress

KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
NOT_CONFORMING, MISUSED, COULD_NOT_RUN = 1, 2, 3

Group = functools.partial(typer.Typer, no_args_is_help=True, rich_markup_mode="rich", add_completion=False)
app = Group(
    help="Proves what contrastive losses compute, and holds implementations to it.", pretty_exceptions_enable=False
)
fixtures = Group(help="Rebuild, check, extend or explain the fixtures.")
app.add_typer(fixtures, name="fixtures")

Json = Annotated[Path | None, typer.Option("--json", help="Also write the report as JSON to this file.")]
Junit = Annotated[Path | None, typer.Option("--junit", help="Also write the report as JUnit XML to this file.")]


def with_options(table: type, *keywords: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of a table.

    Args:
        table: of :mod:`pairproof.conformance.judge.options`.
        keywords: the fields of the table to use; all if there are none.

    Returns:
        A decorator. The command takes the options by keyword, with the values that the table's fields have.
    """
    chosen = [one for name, one in options_of(table).items() if name in keywords or not keywords]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters = []
        for one in chosen:
            kind, default = (list[str], None) if one.read else (one.type if one.flags else str, one.default)
            form = typer.Option if one.flags else typer.Argument
            about = form(*one.flags, help=one.help, metavar=one.metavar, show_default=default is not None)
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
def _bar() -> Iterator[Progress]:
    """A progress bar on standard error, where that is a terminal."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = functools.cache(bars.add_task)
        yield lambda what, done, total: bars.update(task(what), completed=done, total=total)


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(line)


def _judge(judge: Callable[[Progress], Report | CheckResult], json: Path | None, junit: Path | None) -> None:
    """Judge, print the report, write it, and end with its exit code; a file that cannot be written stops it before."""
    from . import report as pages

    for option, path in (("--json", json), ("--junit", junit)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise UsageError(f"{option}: {path} {'is a folder' if path.is_dir() else 'has no folder to be in'}")
    start = time.perf_counter()
    with _bar() as bar:
        found = judge(bar)
    console = Console(width=None if sys.stdout.isatty() else 160, markup=False, highlight=False, emoji=False)
    pages.show(found, console, seconds=time.perf_counter() - start)
    for write, path in ((pages.write_json, json), (pages.write_junit, junit)):
        if path is not None:
            write(found, path)
    raise typer.Exit(found.exit_code)


@app.command()
@with_options(Selection)
def verify(json: Json = None, junit: Junit = None, **options: Any) -> None:
    """Judge every printed figure and every implementation.

    Each figure that the five documents print is recomputed by the reference over balls and is either *reproduced* or
    a proved *artefact*; each claim that they make in words is tried; each implementation is held to the certified
    value and gradient of every case. Exit code 0 only if all of it holds and the expected number of checks ran.

    Examples:
        pairproof verify

        pairproof verify --loss supcon --impl pml

        pairproof verify --case 'supcon_notebook/*' --dtype float32

        pairproof verify --peer supcontrast=../SupContrast --junit report.xml

        TRITON_INTERPRET=1 pairproof verify --impl fast-triton --covering
    """
    from .judge.verify import run

    _judge(functools.partial(run, Selection(**options)), json, junit)


@app.command()
@with_options(Request)
def check(
    everything: Annotated[bool, typer.Option("--all", help="Show and explain all failures, not the first 10.")] = False,
    json: Json = None,
    junit: Junit = None,
    **options: Any,
) -> None:
    """Judge a loss of your own, or anybody's.

    It is held to the proved values and gradients of every case that it claims, within the bounds of [bold]verify[/].
    Options of the catalogue that it takes by keyword are passed, and all their values judged; of every other option
    only the default, or what --set claims. How many cases that leaves out is said, by reason. Exit codes: 0 it
    conforms, 1 it does not, 2 the command was misused, 3 it could not run.

    A declared deviation must show on every check that it names, and must name one: its form is described by
    pydoc pairproof.conformance.judge.deviations.

    Examples:
        pairproof check mylib.losses:SupConLoss --loss supcon

        pairproof check losses.py:my_loss --loss supcon --temperature 0.1 --set no_positive=drop

        pairproof check losses.py:nt_xent --loss nt_xent --call views --normalised --junit report.xml

        pairproof check './loss --stdin' --call command --loss supcon --set 'reduction=*' --limit 5

    A command speaks JSON lines. It is started once; for every line on its standard input, such as

        {"id": 7, "loss": "supcon", "dtype": "float64", "matrices": {"embeddings": [[0.5, -1.25], ...]},
        "arguments": {"labels": [0, ...]}, "options": {"temperature": 0.1, "reduction": "mean", ...}}

    it writes one line to its standard output, with gradients or without, and flushes it:

        {"id": 7, "value": 1.25, "gradients": {"embeddings": [[0.01, -0.02], ...]}}

    or "values", one per anchor, for reduction "none"; or "error" with a text. What is no number is NaN, Infinity or
    null, never a text. One that hangs, crashes or answers anything else gives errored, and is started anew at most
    three times. pydoc pairproof.conformance.implementations.subprocess has the whole of it.
    """
    from .judge import check as checking

    explain = None if everything else checking.SHOWN
    _judge(functools.partial(checking.check, Request(**options), explain=explain), json, junit)


@app.command()
@with_options(Request, "target", "call", "arrays", "limit")
def identify(target: str, **options: Any) -> None:
    """Identify which loss a black box computes, with which options and which temperature.

    It is called with batches on which losses differ, and the results are compared with every loss of the catalogue,
    every option, and known mistakes. A temperature that is built in is recovered. Exit codes: 0 it is recognised, as a
    right loss or as a known wrong one; 1 it is not recognised, and the nearest is reported; 2 --call is needed; 3 it
    cannot be called.

    Examples:
        pairproof identify mylib.losses:contrastive_loss

        pairproof identify losses.py:MyLoss --call features
    """
    from .diagnose import identify as diagnosis
    from .faults import FAULTS
    from .implementations.sandbox import TargetError, TargetMisused, find

    try:
        found = diagnosis.identify(find(target), **options, title=target, faults=FAULTS)
    except TargetError as error:
        typer.echo(f"{target}: {error}")
        raise typer.Exit(MISUSED if isinstance(error, TargetMisused) else COULD_NOT_RUN) from None
    _say([*found.lines(), f"  {found.seconds:.1f} s"])
    raise typer.Exit(found.exit_code)


@app.command("list")
@with_options(Selection, "losses")
def list_everything(losses: tuple[str, ...]) -> None:
    """List the losses, implementations, documents and cases by the names that the other commands take."""
    from .documents.load import load_worked
    from .implementations import ALL
    from .judge.verify import load_cases
    from .suite.catalogue import LOSSES

    chosen, fixtures = Selection(losses), load_worked()
    entries = {name: entry for name, entry in LOSSES.items() if chosen.takes_loss(name)}
    takes = {name: ", ".join(filter(None, (*entry.embeddings, entry.targets))) for name, entry in entries.items()}
    groups = {
        "losses": [f"{name}: {it.function}({takes[name]}); {it.source}" for name, it in entries.items()],
        "implementations": [f"{kind.name}: {kind.title}" for kind in ALL],
        "cases": [f"{it.id}: {it.loss}, {it.sizes()}" for it in load_cases(fixtures) if it.loss in entries],
    }
    if not losses:
        groups["figures and claims"] = lines = []
        for fixture in fixtures:
            lines += [f"{fixture.document.id}/{it.id}: {it.what} ({it.place})" for it in fixture.figures]
            lines += [f"{fixture.document.id}/{it.id}: “{it.words}”" for it in fixture.claims]
    for title, lines in groups.items():
        typer.secho(title, bold=True)
        _say(f"  {line}" for line in lines)


@app.command("new-loss")
def new_loss(
    name: Annotated[str, typer.Argument(help="A new short name: small letters, digits, underscores.")],
    like: Annotated[str, typer.Option(help="The loss to start from: its arguments, options and formula are copied.")],
    source: Annotated[str, typer.Option(help="Where the new loss is published.")],
) -> None:
    """Write the skeleton of a new loss into a checkout, and say what is left to do.

    The skeleton computes what the other loss does, under its own name, without a case. Three files are edited then: its
    entry in the catalogue, its formula in reference/ and its function in fast/.

    Examples:
        pairproof new-loss dcl --like nt_xent --source "Yeh et al. 2022, arXiv 2110.06848, equation 6"
    """
    from .maintain import new_loss as writing

    made = writing.new_loss(name, like, source)
    _say([*(f"written: {path}" for path in made.written), *(f"left: {line}" for line in made.left)])


@app.command()
def explain(
    case: Annotated[str, typer.Argument(help="A case, or a loss figure of a document; see: pairproof list.")],
    anchor: Annotated[int | None, typer.Option(help="Only this row.")] = None,
) -> None:
    """Print the terms of one case as the notebooks do, and the whole sum written out.

    Examples:
        pairproof explain supcon_notebook/supcon-3x3 --anchor 0

        pairproof explain pair_notebook/in-103-loss-0.01
    """
    from . import explain as words

    _say(words.explain(words.find_case(case), anchor))


def _rebuild(peers: dict[str, str], *, keep: bool) -> None:
    """Rebuild the fixtures, write the changes or not, and print them; exit code 1 if a check fails."""
    from .maintain.rebuild import rebuild, shortened

    with _bar() as bar:
        found = rebuild(peers, progress=bar, keep=keep)
    _say([*shortened(found.changes), *shortened(found.notes), *shortened(found.failed)])
    changes = len(found.changes)
    if keep:
        typer.echo(f"fixtures: {changes} changes" if changes else "fixtures: nothing changed")
    else:
        typer.echo(f"fixtures: a rebuild would {f'make {changes} changes' if changes else 'change nothing'}")
    if found.failed:
        advice = "correct the implementations or declare the deviations, then run this command again"
        typer.echo(f"fixtures: {len(found.failed)} checks failed, counted as declared; {advice}")
    if found.failed or (changes and not keep):
        raise typer.Exit(NOT_CONFORMING)


@fixtures.command("rebuild")
@with_options(Rebuild)
def fixtures_rebuild(peers: dict[str, str]) -> None:
    """Derive everything again in the fixtures, and write what differs. On a clean tree this changes nothing.

    This proves the golden results, formats the worked examples, runs every check, and updates the counts and
    checksums. The recorded values of a peer are recorded again only if its path is given; the changes are printed. If a
    proof fails, nothing is written. Exit code 1 if a check of an implementation fails.

    Examples:
        pairproof fixtures rebuild

        pairproof fixtures rebuild --peer supcontrast=../SupContrast
    """
    _rebuild(peers, keep=True)


@fixtures.command("check")
@with_options(Rebuild)
def fixtures_check(peers: dict[str, str]) -> None:
    """Validate every file and report what a rebuild would change, without writing.

    Everything but the inputs is proved and run again. Exit code 1 if anything would change or a check fails.
    """
    _rebuild(peers, keep=False)


@fixtures.command("add")
@with_options(Batch)
def fixtures_add(
    flag: Annotated[list[str], typer.Option(help="Why the case exists, a name of golden/flags.json (repeatable).")],
    note: Annotated[str, typer.Option(help="What the case shows, in a sentence.")],
    temperature: Annotated[str | None, typer.Option(help="Short for --set temperature=...")] = None,
    gradient: Annotated[bool, typer.Option(help="Prove the gradient too; takes long for large batches.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the case and change nothing.")] = False,
    **options: Any,
) -> None:
    """Add a batch to the golden cases: validate it, prove its results, write it, and update counts and checksums.

    Every file is npy, csv, or FILE.safetensors:TENSOR.

    Examples:
        pairproof fixtures add --loss supcon --embeddings z.npy --labels y.npy --id mine --flag no-positive --note ...

        pairproof fixtures add --loss nt_xent --embeddings z.csv --partners stacked --set reduction=sum ... --dry-run

        pairproof fixtures add --loss info_nce --embeddings a.npy --embeddings-b b.npy --negatives queue.npy ...
    """
    from .maintain.add import add
    from .suite.store import dump_json

    if temperature is not None:
        options["settings"]["temperature"] = temperature
    with _bar() as bar:
        added = add(Batch(**options), flag, note, gradient=gradient, dry_run=dry_run, progress=bar)
    written = [f"fixtures: golden/{added.entry['id']} is proved and written", *added.notes]
    _say([dump_json(added.entry).rstrip("\n")] if dry_run else written)


@fixtures.command("show")
def fixtures_show(
    case: Annotated[str, typer.Argument(help="The id of a golden case.")],
    terms: Annotated[
        bool | None, typer.Option(help="Spell out every term; without either, batches of up to 12 rows are.")
    ] = None,
) -> None:
    """Explain a golden case: why it exists, what goes in, what must come out, and its terms.

    Examples:
        pairproof fixtures show supcon/lonely-nan
    """
    from .explain import describe, find_golden
    from .suite.golden import load_flags

    _say(describe(find_golden(case), load_flags(), terms=terms))


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line."""
    from .implementations import Unavailable
    from .suite.store import FixtureError
    from .truth.certify import CertificationError

    try:
        return app(args=arguments)
    except UsageError as error:
        words, code = str(error), MISUSED
    except (CouldNotRun, Unavailable) as error:
        words, code = f"could not run: {error}", COULD_NOT_RUN
    except (FixtureError, CertificationError) as error:
        words, code = f"fixtures: {error}", NOT_CONFORMING
    typer.echo(f"pairproof: {words}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
