"""The command line: ``pairproof verify``, ``list``, ``explain``, ``fixtures``.

Exit codes: 0 everything holds, 1 something does not, 2 the command was misused, 3 it could not run.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
except ImportError as error:  # the base install has the losses alone
    sys.exit(f'pairproof: the command needs {error.name}: pip install "pairproof[verify]"')

if TYPE_CHECKING:
    from .cases import Case
    from .run import Report, Selection

NOT_CONFORMING, MISUSED, COULD_NOT_RUN = 1, 2, 3

app = typer.Typer(
    name="pairproof",
    help="Proves what contrastive losses compute, and holds implementations to it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

Losses = Annotated[list[str] | None, typer.Option("--loss", "-l", help="Only this loss (repeatable, or a,b).")]
Implementations = Annotated[
    list[str] | None, typer.Option("--impl", "-i", help="Only this implementation (repeatable, or a,b).")
]
Cases = Annotated[
    list[str] | None, typer.Option("--case", "-c", help="Only this case, figure or claim; * and ? match (repeatable).")
]
Dtypes = Annotated[
    list[str] | None, typer.Option("--dtype", "-d", help="Only this dtype: float64, float32, bfloat16 or float16.")
]
Device = Annotated[str, typer.Option(help="The torch device on which the torch implementations run.")]
Require = Annotated[
    list[str] | None,
    typer.Option(help="An implementation that must be present, else exit code 3 (repeatable, or a,b)."),
]
Peers = Annotated[
    list[str] | None,
    typer.Option(
        "--peer",
        help="supcontrast=PATH runs today's SupContrast live from its repository or its losses.py;"
        " folder=PATH says where bioencoder lies (default: PAIRPROOF_PEERS, then .peers).",
    ),
]


def _split(values: list[str] | None) -> tuple[str, ...]:
    return tuple(part for value in values or () for part in value.split(",") if part)


def _pairs(values: list[str] | None) -> dict[str, str]:
    pairs = {}
    for value in values or ():
        name, equals, path = value.partition("=")
        if not equals or not path:
            raise typer.BadParameter(f"expected NAME=PATH, got {value!r}", param_hint="--peer")
        pairs[name] = path
    return pairs


class _Bar:
    """A progress bar on standard error, where that is a terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.tasks: dict[str, TaskID] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        if what not in self.tasks:
            self.tasks[what] = self.progress.add_task(what, total=total)
        self.progress.update(self.tasks[what], completed=done, total=total)


def _run(selection: Selection) -> Report:
    from .run import run

    bar = _Bar()
    with bar.progress:
        return run(selection, bar)


@app.command()
def verify(
    loss: Losses = None,
    impl: Implementations = None,
    case: Cases = None,
    dtype: Dtypes = None,
    device: Device = "cpu",
    require: Require = None,
    peer: Peers = None,
    json: Annotated[Path | None, typer.Option(help="Also write the report as JSON to this file.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Also write the report as JUnit XML to this file.")] = None,
) -> None:
    """Judge every printed figure and every implementation.

    Each figure that the five documents print is recomputed by the reference over balls and is either *reproduced* or
    a proved *artefact*; each claim that they make in words is tried; each implementation is held to the certified
    value and gradient of every case. Exit code 0 only if all of it holds and the expected number of checks ran.

    Examples:
        pairproof verify

        pairproof verify --loss supcon --impl pml

        pairproof verify --case 'supcon_notebook/*' --dtype float32

        pairproof verify --peer supcontrast=../SupContrast --junit report.xml
    """
    from . import report as pages
    from .run import Selection

    selection = Selection(
        losses=_split(loss),
        implementations=_split(impl),
        cases=tuple(case or ()),
        dtypes=_split(dtype),
        device=device,
        required=_split(require),
        peers=_pairs(peer),
    )
    start = time.perf_counter()
    report = _run(selection)
    console = Console(width=None if sys.stdout.isatty() else 160)
    pages.show(report, console, seconds=time.perf_counter() - start)
    if json is not None:
        pages.write_json(report, json)
    if junit is not None:
        pages.write_junit(report, junit)
    if not report.passed:
        raise typer.Exit(NOT_CONFORMING)


@app.command("list")
def list_everything(loss: Losses = None) -> None:
    """List the losses, implementations, documents and cases by the names that the other commands take."""
    from .catalogue import LOSSES
    from .fixtures import load_worked
    from .peers import ALL
    from .run import load_cases

    console = Console(width=None if sys.stdout.isatty() else 160)
    chosen = _split(loss)
    console.print("[bold]losses[/]")
    for name, entry in LOSSES.items():
        if not chosen or name in chosen:
            console.print(f"  {name}: {entry.function}(embeddings, {entry.targets}); {entry.source}", highlight=False)
    console.print("[bold]implementations[/]")
    for kind in ALL:
        console.print(f"  {kind.name}: {kind.title}", highlight=False)
    fixtures = load_worked()
    console.print("[bold]cases[/]")
    for found in load_cases(fixtures):
        if not chosen or found.loss in chosen:
            console.print(f"  {found.id}: {found.loss}, {found.n} rows", highlight=False, soft_wrap=True)
    if not chosen:
        console.print("[bold]figures and claims[/]")
        for fixture in fixtures:
            for figure in fixture.figures:
                console.print(
                    f"  {fixture.document.id}/{figure.id}: {figure.what} ({figure.place})",
                    highlight=False,
                    soft_wrap=True,
                )
            for claim in fixture.claims:
                console.print(
                    f"  {fixture.document.id}/{claim.id}: “{claim.words}”",
                    highlight=False,
                    markup=False,
                    soft_wrap=True,
                )


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
    from .explain import explain as spell

    found = _find(case)
    try:
        for line in spell(found, anchor):
            typer.echo(line)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--anchor") from None


def _find(name: str) -> Case:
    from .fixtures import load_worked
    from .run import load_cases

    fixtures = load_worked()
    cases = {case.id: case for case in load_cases(fixtures)}
    if name in cases:
        return cases[name]
    for fixture in fixtures:
        for figure in fixture.figures:
            if f"{fixture.document.id}/{figure.id}" == name:
                called = f"{fixture.document.id}/{figure.call}"
                if called in cases:
                    return cases[called]
                raise typer.BadParameter(f"{name} is no loss of known inputs, so it has no terms", param_hint="CASE")
    raise typer.BadParameter(f"unknown case {name!r}; see: pairproof list", param_hint="CASE")


@app.command()
def fixtures(
    peer: Peers = None,
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit 1 if anything would change.")] = False,
) -> None:
    """Rebuild what the fixtures derive: recorded peers, expected counts, checksums.

    On a clean tree nothing changes. Recorded values of a peer are taken anew only when its path is given; the counts
    need every implementation present. Each file is replaced whole or not at all.
    """
    from .rebuild import rebuild

    changed = rebuild(_pairs(peer), check=check)
    for line in changed:
        typer.echo(line)
    if check and changed:
        raise typer.Exit(NOT_CONFORMING)
    if not changed:
        typer.echo("fixtures: nothing changed")


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line."""
    from .fixtures import FixtureError
    from .peers import Unavailable
    from .run import CouldNotRun, UsageError

    try:
        return app(args=arguments)
    except UsageError as error:
        typer.echo(f"pairproof: {error}", err=True)
        sys.exit(MISUSED)
    except (CouldNotRun, Unavailable) as error:
        typer.echo(f"pairproof: could not run: {error}", err=True)
        sys.exit(COULD_NOT_RUN)
    except FixtureError as error:
        typer.echo(f"pairproof: fixtures: {error}", err=True)
        sys.exit(NOT_CONFORMING)


if __name__ == "__main__":
    main()
