"""The command line: ``python -m bench``, from the repository root.

Exit codes: 0 measured; 1 with --floors, a floor is missed; 2 the command was misused; 3 it could not run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
except ImportError as error:  # the base install has the losses alone
    sys.exit(f'bench: the command needs {error.name}: pip install "pairproof[verify,bench]"')

from . import cuda, goals, jobs, measure, report
from .batches import DTYPES, LOSSES
from .machine import machine, versions
from .peers import CAPTURED, Unavailable

MISSED, MISUSED, COULD_NOT_RUN = 1, 2, 3

MORE_PROCESSES = 14
"""For a floor that seems missed."""

FILE_WIDTH = 180
"""Columns where the output goes to no terminal."""

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)


def _split(values: list[str] | None) -> tuple[str, ...]:
    return tuple(part for value in values or () for part in value.split(",") if part)


def _run(plan: jobs.Plan, date: str | None) -> dict[str, Any]:
    """Do every job of a plan. On standard error: a progress bar on a terminal, else a line for each job."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    found: dict[str, Any] = {
        "format": report.FORMAT,
        "date": date,
        "protocol": {
            "device": plan.device,
            "dtypes": plan.dtypes,
            "backend": plan.backend,
            "temperature": jobs.TEMPERATURE,
            "columns": plan.columns,
            "threads": 1,
            "rounds": {f"up to {plan.small}": plan.small_rounds, "above": plan.large_rounds},
            "regimes": {name: jobs.TUNED if name == "tuned" else {} for name in plan.regimes},
        },
        "machine": machine() | ({} if plan.on_cpu else {"gpu": cuda.device_facts(plan.device)}),
        "versions": versions(),
    }
    work = {
        "timings": plan.timings(),
        "memory": plan.memories(),
        "accuracy": plan.accuracies(),
        "large": plan.larges(),
    }
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=sum(map(len, work.values())))
        for table, some in work.items():
            found[table] = []
            for job in some:
                progress.update(task, description=jobs.describe(job))
                if not console.is_terminal:
                    console.print(jobs.describe(job), markup=False, highlight=False)
                found[table] += jobs.attempt(job)
                progress.advance(task)
    if not plan.on_cpu:  # the peaks came with the timings
        names = (*jobs.SHAPE, "implementation", "status", "reason")
        for row in found["timings"]:
            if row["implementation"] != CAPTURED:
                peak = {"bytes": row.pop("bytes")} if "bytes" in row else {}
                found["memory"].append({key: row[key] for key in names if key in row} | peak)
    found["large"] = next(iter(found["large"]), None)
    found["goals"] = goals.judge(found) if plan.on_cpu else goals.judge_device(found)
    return found


def _retry(found: dict[str, Any], plan: jobs.Plan, fraction: float, console: Console) -> list[goals.Goal]:
    """Time what seems to miss a floor in more processes, and judge the median of them all.

    How costly fresh memory is to a peer is drawn once per process: more rounds in one process would not tell.
    """

    def shape(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["loss"], row["n"], row["regime"]

    judged = goals.floors(found, fraction)
    missed = {shape(goal) for goal in judged if goal["met"] is False and "loss" in goal}
    for job in plan.timings():
        if shape(job) in missed:
            console.print(f"below a floor, measured in {MORE_PROCESSES} more processes: {jobs.describe(job)}")
            runs = [[row for row in found["timings"] if shape(row) == shape(job)]]
            runs += [jobs.attempt(job) for _ in range(MORE_PROCESSES)]
            others = [row for row in found["timings"] if shape(row) != shape(job)]
            found["timings"] = others + measure.median_of_processes(runs)
    return goals.floors(found, fraction)


def _write(found: dict[str, Any], folder: Path, console: Console) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stem = "cpu" if found["protocol"]["device"] == "cpu" else "cuda"
    report.write_json(found, folder / f"{stem}.json")
    report.plot(found, folder / f"{stem}.svg")
    console.print(f"written: {folder / stem}.json, {folder / stem}.svg")


@app.command(epilog="Exit codes: 0 measured; 1 with --floors, one is missed; 2 misused; 3 could not run.")
def bench(
    quick: Annotated[
        bool, typer.Option("--quick", help="N = 256 and 1024, default allocator, fewer rounds, writes nothing.")
    ] = False,
    floors: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=1.0,
            help="For CI: a quick run that fails (exit code 1) where a ratio is below this fraction of its goal or the"
            " memory above its goal divided by it. What seems to fail is timed in more processes; their median counts.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for the JSON and the plot. Default: bench/results, for a full run of everything."),
    ] = None,
    loss: Annotated[
        list[str] | None,
        typer.Option("--loss", "-l", help=f"Only this loss (repeatable, or a,b): {', '.join(LOSSES)}."),
    ] = None,
    size: Annotated[list[str] | None, typer.Option("--size", "-n", help="Only this N (repeatable, or a,b).")] = None,
    columns: Annotated[
        list[str] | None, typer.Option("--columns", "-d", help="On cuda: only this D (repeatable, or a,b).")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds at every size, in place of the protocol's.")] = None,
    backend: Annotated[str, typer.Option(help="Backend of pairproof.fast.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, or cuda: events on the same alternation, N up to 262144.")] = "cpu",
    dtype: Annotated[
        list[str] | None,
        typer.Option(help=f"On cuda: only this dtype (repeatable, or a,b): {', '.join(DTYPES)} (float32 with TF32)."),
    ] = None,
    date: Annotated[str | None, typer.Option(help="Written into the report as it is.")] = None,
) -> None:
    """Measure pairproof.fast beside its peers: times, errors, memory.

    Every size, allocator and loss runs in its own process on one thread. Implementations alternate, each is timed only
    after its float64 value was found right on the same batch, and ratios are medians over neighbouring samples. A full
    run takes about 25 minutes, a quick one under two.

    With --device cuda the same on a GPU, with its own sizes, columns and dtypes, in one process for each of these and
    each loss. Peers whose matrices would not fit its memory are refused beforehand.

    python -m bench --quick

    python -m bench --loss supcon --size 4096 --rounds 3 --backend tiled
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=FILE_WIDTH)
    plan = _plan(quick, floors, device, rounds, _split(loss), _split(size), _split(columns), _split(dtype))
    plan = replace(plan, backend=backend)
    whole = plan in (jobs.FULL, replace(jobs.DEVICE, device=device))
    try:
        if not plan.on_cpu:
            cuda.require(device)
        if output is not None or whole:
            report.pyplot()  # said before half an hour of measuring, not after
        (trial,) = jobs.run(plan.trial())
        if trial["status"] != "measured":
            raise Unavailable(f"pairproof.fast fails on a small batch: {trial['reason']}")
        found = _run(plan, date)
        judged = None if floors is None else _retry(found, plan, floors, console)
    except Unavailable as error:
        console.print(f"bench: {error}", style="red", markup=False)
        raise typer.Exit(COULD_NOT_RUN) from None
    report.show(found if floors is None else found | {"goals": []}, console)
    if output is not None or whole:
        _write(found, output or jobs.ROOT / "bench" / "results", console)
    if judged is not None:
        console.print(report.goals_table(judged, f"Floors: {floors} of the goals"))
        if any(goal["met"] is False for goal in judged):
            raise typer.Exit(MISSED)
        if not judged or any(goal["met"] is None for goal in judged):
            console.print("bench: a floor could not be judged: see what is not measured", style="red")
            raise typer.Exit(COULD_NOT_RUN)


def _plan(
    quick: bool,
    floors: float | None,
    device: str,
    rounds: int | None,
    losses: tuple[str, ...],
    sizes: tuple[str, ...],
    columns: tuple[str, ...],
    dtypes: tuple[str, ...],
) -> jobs.Plan:
    """The plan that the options ask for.

    Raises:
        typer.BadParameter: an option's value is not one of its choices.
    """
    on_cpu = device == "cpu"
    if not on_cpu and device.partition(":")[0] != "cuda":
        raise typer.BadParameter(f"expected cpu or cuda, got {device!r}", param_hint="--device")
    choices = ("float32",) if on_cpu else tuple(DTYPES)
    unknown = [name for name in dtypes if name not in choices]
    if unknown:
        message = f"expected float32, or on cuda one of {', '.join(DTYPES)}, got {unknown[0]!r}"
        raise typer.BadParameter(message, param_hint="--dtype")
    if floors is not None and not on_cpu:
        raise typer.BadParameter("expected --device cpu with it: the goals are a CPU's", param_hint="--floors")
    if columns and on_cpu:
        raise typer.BadParameter(f"expected --device cuda with it: a CPU's is {jobs.COLUMNS}", param_hint="--columns")
    if on_cpu:
        plan = jobs.FLOORS if floors is not None else jobs.QUICK if quick else jobs.FULL
    else:
        plan = replace(jobs.DEVICE_QUICK if quick else jobs.DEVICE, device=device)
    unknown = [name for name in losses if name not in LOSSES]
    if unknown:
        raise typer.BadParameter(f"expected one of {', '.join(LOSSES)}, got {unknown[0]!r}", param_hint="--loss")
    if losses:
        plan = replace(plan, losses=tuple(name for name in LOSSES if name in losses))
    if dtypes:
        plan = replace(plan, dtypes=tuple(name for name in choices if name in dtypes))
    if columns:
        plan = replace(plan, columns=tuple(_number(text, "--columns", 16) for text in columns))
    if sizes:
        wanted = tuple(_number(text, "--size", 32) for text in sizes)
        plan = replace(plan, sizes=wanted, memory_sizes=wanted if on_cpu else (), large=False, temperatures=())
    if rounds is not None:
        plan = replace(plan, small_rounds=rounds, large_rounds=rounds)
    return plan


def _number(text: str, option: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least or int(text) % 2:
        raise typer.BadParameter(f"expected even numbers from {least}, got {text!r}", param_hint=option)
    return int(text)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    runner: Callable[..., None] = app
    runner(args=arguments, prog_name="python -m bench")


if __name__ == "__main__":
    main()
