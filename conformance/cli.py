"""The command line: ``pairproof verify``, ``check``, ``identify``, ``list``, ``explain`` and ``fixtures``.

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
    from .judge.options import Selection
    from .judge.verify import Report
    from .maintain.rebuild import Rebuilt
    from .suite.cases import Case

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
        " folder=PATH says where the peers' files lie (default: PAIRPROOF_PEERS, then .peers).",
    ),
]


def _split(values: list[str] | None) -> tuple[str, ...]:
    return tuple(part for value in values or () for part in value.split(",") if part)


def _pairs(values: list[str] | None, option: str = "--peer", form: str = "NAME=PATH") -> dict[str, str]:
    pairs = {}
    for text in values or ():
        name, _, value = text.partition("=")
        if not name or not value:
            raise typer.BadParameter(f"expected {form}, got {text!r}", param_hint=option)
        pairs[name] = value
    return pairs


class _Bar:
    """A progress bar on standard error, where that is a terminal; it appears with the first step."""

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

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        if not self.tasks:
            self.progress.start()
        if what not in self.tasks:
            self.tasks[what] = self.progress.add_task(what, total=total)
        self.progress.update(self.tasks[what], completed=done, total=total)


def _settings(values: list[str] | None) -> dict[str, object]:
    """KEY=VALUE, a tuple where a key is given several values."""
    settings: dict[str, object] = {}
    for text in values or ():
        for key, value in _pairs([text], "--set", "KEY=VALUE").items():
            before = settings.get(key, ())
            settings[key] = (*before, value) if isinstance(before, tuple) and before else value
            if isinstance(before, str):
                settings[key] = (before, value)
    return settings


def _check_writable(**paths: Path | None) -> None:
    """Refuse a file that could not be written, before the run and not after it."""
    for option, path in paths.items():
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            what = "is a folder" if path.is_dir() else "has no folder to be in"
            raise typer.BadParameter(f"{path} {what}", param_hint=f"--{option}")


def _run(selection: Selection) -> Report:
    from .judge.verify import run

    with _Bar() as bar:
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
    covering: Annotated[
        bool,
        typer.Option(
            "--covering",
            help="Of the selected cases only as few as together show every flag, every value of every option and"
            " every kernel; always the same ones.",
        ),
    ] = False,
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

        TRITON_INTERPRET=1 pairproof verify --impl fast-triton --covering
    """
    from . import report as pages
    from .judge.options import Selection

    _check_writable(json=json, junit=junit)
    selection = Selection(
        losses=_split(loss),
        implementations=_split(impl),
        cases=tuple(case or ()),
        dtypes=_split(dtype),
        device=device,
        required=_split(require),
        peers=_pairs(peer),
        covering=covering,
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


@app.command()
def check(
    target: Annotated[
        str,
        typer.Argument(
            help="package.module:attribute or file.py:attribute: a function, a class that is constructed with its"
            " options, or an instance. With --call command: a shell command line."
        ),
    ],
    loss: Annotated[str, typer.Option("--loss", "-l", help="What it is held to; see: pairproof list.")],
    call: Annotated[
        str | None,
        typer.Option(
            help="How it is called: labels (embeddings, labels), features (features, labels=None, mask=None; of two or"
            " three views where all classes divide so, else of one), views (view_a, view_b), stacked (all first views,"
            " then all second ones), pairs (embeddings, positive_pairs), or command. Guessed from the parameters'"
            " names, and said."
        ),
    ] = None,
    arrays: Annotated[
        str | None, typer.Option(help="What it is given: torch, numpy or jax. Guessed from its imports, and said.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="The temperature that is built in, where no parameter temperature (tau, or logit_scale, its inverse)"
            " takes a case's."
        ),
    ] = None,
    normalised: Annotated[
        bool | None,
        typer.Option(
            "--normalised/--raw",
            help="Whether it expects rows of norm 1, which cases of cosine similarity then bring. Default: raw.",
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="KEY=VALUE, an option that it claims (repeatable); KEY=* says that it takes the option by keyword.",
        ),
    ] = None,
    case: Annotated[
        list[str] | None, typer.Option("--case", "-c", help="Only this case; * and ? match (repeatable).")
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            "--dtype", "-d", help="float64, float32, bfloat16 or float16 (repeatable). Default: the first two."
        ),
    ] = None,
    device: Device = "cpu",
    limit: Annotated[float, typer.Option(help="Seconds that a case may take.")] = 60.0,
    deviations: Annotated[
        Path | None,
        typer.Option(
            help="TOML file that declares where it knowingly deviates, with reasons. Default: tool.pairproof of"
            " the pyproject.toml here."
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show and explain all failures, not the first 10.")] = False,
    json: Annotated[Path | None, typer.Option(help="Also write what was found as JSON to this file.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Also write what was found as JUnit XML to this file.")] = None,
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
    from .judge.options import Request

    _check_writable(json=json, junit=junit)
    request = Request(
        target,
        loss,
        call=call,
        arrays=arrays,
        temperature=temperature,
        normalised=normalised,
        settings=_settings(settings),
        cases=tuple(case or ()),
        dtypes=_split(dtype),
        device=device,
        limit=limit,
        deviations=deviations,
    )
    start = time.perf_counter()
    with _Bar() as bar:
        checked = checking.check(request, bar, explain=None if everything else checking.SHOWN)
    console = Console(width=None if sys.stdout.isatty() else 160)
    checking.show(checked, console, seconds=time.perf_counter() - start, everything=everything)
    if json is not None:
        checking.write_json(checked, json)
    if junit is not None:
        checking.write_junit(checked, junit)
    if checked.exit_code:
        raise typer.Exit(checked.exit_code)


@app.command()
def identify(
    target: Annotated[
        str,
        typer.Argument(help="package.module:attribute or file.py:attribute: a function, a class or an instance."),
    ],
    call: Annotated[
        str | None,
        typer.Option(help="How it is called: labels, features, views, stacked or pairs, see check. Guessed, and said."),
    ] = None,
    arrays: Annotated[
        str | None, typer.Option(help="What it is given: torch, numpy or jax. Guessed from its imports, and said.")
    ] = None,
    limit: Annotated[float, typer.Option(help="Seconds that one answer may take.")] = 60.0,
) -> None:
    """Say which loss a black box computes, with which options and which temperature.

    It is asked about batches on which losses differ, and what it answers is compared with every loss of the catalogue,
    every option, and the mistakes that are known. A temperature that is built in is recovered. Exit codes: 0 it is
    recognised, as a right loss or as a wrong one that has a name; 1 it is none of them, and the nearest is said; 2 how
    it is called must be said; 3 it cannot be asked.

    Examples:
        pairproof identify mylib.losses:contrastive_loss

        pairproof identify losses.py:MyLoss --call features
    """
    from .diagnose.identify import identify_command

    lines, code = identify_command(target, call=call, arrays=arrays, limit=limit)
    for line in lines:
        typer.echo(line)
    if code:
        raise typer.Exit(code)


@app.command("list")
def list_everything(loss: Losses = None) -> None:
    """List the losses, implementations, documents and cases by the names that the other commands take."""
    from .documents.load import load_worked
    from .implementations import ALL
    from .judge.verify import load_cases
    from .suite.catalogue import LOSSES

    console = Console(width=None if sys.stdout.isatty() else 160)
    chosen = _split(loss)
    console.print("[bold]losses[/]")
    for name, entry in LOSSES.items():
        if not chosen or name in chosen:
            given = ", ".join(filter(None, (*entry.embeddings, entry.targets)))
            console.print(f"  {name}: {entry.function}({given}); {entry.source}", highlight=False)
    console.print("[bold]implementations[/]")
    for kind in ALL:
        console.print(f"  {kind.name}: {kind.title}", highlight=False)
    fixtures = load_worked()
    console.print("[bold]cases[/]")
    for found in load_cases(fixtures):
        if not chosen or found.loss in chosen:
            console.print(f"  {found.id}: {found.loss}, {found.sizes()}", highlight=False, soft_wrap=True)
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
    from .documents.load import load_worked
    from .judge.verify import load_cases

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


fixtures = typer.Typer(
    name="fixtures",
    help="Rebuild, check, extend or explain the fixtures.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(fixtures)

RecordedPeers = Annotated[
    list[str] | None,
    typer.Option(
        "--peer",
        help="supcontrast=PATH takes the recorded values of today's SupContrast anew, from its repository or losses.py;"
        " folder=PATH says where the peers' files lie (default: PAIRPROOF_PEERS, then .peers).",
    ),
]
Source = Annotated[str | None, typer.Option(help="File of the array: npy, csv, or FILE.safetensors:TENSOR.")]


def _say(rebuilt: Rebuilt) -> None:
    from .maintain.rebuild import shortened

    for line in (*shortened(rebuilt.changes), *shortened(rebuilt.notes)):
        typer.echo(line)


@fixtures.command("rebuild")
def fixtures_rebuild(peer: RecordedPeers = None) -> None:
    """Make all that the fixtures derive anew, and write what differs; on a clean tree that is nothing.

    Golden results are proved, worked examples laid out and recounted, the counts of a whole run taken, the checksums
    renewed. Recorded values of a peer are taken anew only where its path is given; how they changed is printed. All
    files that differ are replaced together, or, if anything fails, none.

    Examples:
        pairproof fixtures rebuild

        pairproof fixtures rebuild --peer supcontrast=../SupContrast
    """
    from .maintain.rebuild import rebuild

    with _Bar() as bar:
        rebuilt = rebuild(_pairs(peer), progress=bar)
    _say(rebuilt)
    typer.echo(f"fixtures: {len(rebuilt.changes)} changes" if rebuilt.changes else "fixtures: nothing changed")


@fixtures.command("check")
def fixtures_check(peer: RecordedPeers = None) -> None:
    """Validate every file and say what a rebuild would change; change nothing. Exit code 1 if there is anything.

    Everything is proved and run anew: nothing is taken from the files but the inputs.
    """
    from .maintain.rebuild import check

    with _Bar() as bar:
        rebuilt = check(_pairs(peer), progress=bar)
    _say(rebuilt)
    if rebuilt.changes:
        typer.echo(f"fixtures: a rebuild would make {len(rebuilt.changes)} changes")
        raise typer.Exit(NOT_CONFORMING)
    typer.echo("fixtures: valid, and a rebuild would change nothing")


@fixtures.command("add")
def fixtures_add(
    loss: Annotated[str, typer.Option("--loss", "-l", help="The loss; see: pairproof list.")],
    embeddings: Annotated[
        str, typer.Option(help="File of [N, D]: npy, csv, or FILE.safetensors:TENSOR; of info_nce the first tower.")
    ],
    identity: Annotated[str, typer.Option("--id", help="A new name: small letters, digits, hyphens.")],
    flag: Annotated[list[str], typer.Option(help="Why the case exists, a name of golden/flags.json (repeatable).")],
    note: Annotated[str, typer.Option(help="What the case shows, in a sentence.")],
    labels: Source = None,
    partners: Annotated[str | None, typer.Option(help="File of [N], or: interleaved, stacked.")] = None,
    positive_pairs: Source = None,
    positives: Source = None,
    anchors: Source = None,
    ref_embeddings: Source = None,
    ref_labels: Source = None,
    self_rows: Source = None,
    embeddings_b: Source = None,
    negatives: Source = None,
    temperature: Annotated[str | None, typer.Option(help="Short for --set temperature=...")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, an option of the loss.")] = None,
    gradient: Annotated[bool, typer.Option(help="Prove the gradient too; takes long for large batches.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the case and change nothing.")] = False,
) -> None:
    """Make a batch of yours a golden case: checked, proved, written, with counts and checksums renewed.

    Examples:
        pairproof fixtures add --loss supcon --embeddings z.npy --labels y.npy --id mine --flag no-positive --note ...

        pairproof fixtures add --loss nt_xent --embeddings z.csv --partners stacked --set reduction=sum ... --dry-run

        pairproof fixtures add --loss info_nce --embeddings a.npy --embeddings-b b.npy --negatives queue.npy ...
    """
    from .maintain.add import Batch, add
    from .suite.store import dump_json

    chosen = _pairs(settings, "--set", "KEY=VALUE")
    if temperature is not None:
        chosen["temperature"] = temperature
    batch = Batch(
        loss,
        identity,
        embeddings,
        labels,
        partners,
        positive_pairs,
        positives,
        anchors,
        chosen,
        ref_embeddings=ref_embeddings,
        ref_labels=ref_labels,
        self_rows=self_rows,
        embeddings_b=embeddings_b,
        negatives=negatives,
    )
    with _Bar() as bar:
        added = add(batch, flag, note, gradient=gradient, dry_run=dry_run, progress=bar)
    if dry_run:
        typer.echo(dump_json(added.entry), nl=False)
        return
    typer.echo(f"fixtures: golden/{added.entry['id']} is proved and written")
    for line in added.notes:
        typer.echo(line)


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
    from .maintain.add import describe, find_golden
    from .suite.golden import load_flags

    for line in describe(find_golden(case), load_flags(), terms=terms):
        typer.echo(line)


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line."""
    from .implementations import Unavailable
    from .judge.options import CouldNotRun, UsageError
    from .suite.store import FixtureError
    from .truth.certify import CertificationError

    try:
        return app(args=arguments)
    except UsageError as error:
        typer.echo(f"pairproof: {error}", err=True)
        sys.exit(MISUSED)
    except (CouldNotRun, Unavailable) as error:
        typer.echo(f"pairproof: could not run: {error}", err=True)
        sys.exit(COULD_NOT_RUN)
    except (FixtureError, CertificationError) as error:
        typer.echo(f"pairproof: fixtures: {error}", err=True)
        sys.exit(NOT_CONFORMING)


if __name__ == "__main__":
    main()
