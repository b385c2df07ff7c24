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

from . import cuda, goals, jobs, report
from .batches import LOSSES
from .machine import machine, versions
from .peers import Unavailable

MISSED, MISUSED, COULD_NOT_RUN = 1, 2, 3

MORE_ROUNDS = 3
"""Times as many for a floor that seems missed."""

FILE_WIDTH = 160
"""Columns where the output goes to no terminal."""

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)


def _split(values: list[str] | None) -> tuple[str, ...]:
    return tuple(part for value in values or () for part in value.split(",") if part)


def _run(plan: jobs.Plan, date: str | None) -> dict[str, Any]:
    """Do every job of a plan. On standard error: a progress bar where that is a terminal, else a line for each job."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    found: dict[str, Any] = {
        "format": report.FORMAT,
        "date": date,
        "protocol": {
            "device": plan.device,
            "dtype": plan.dtype,
            "backend": plan.backend,
            "temperature": jobs.TEMPERATURE,
            "columns": jobs.COLUMNS,
            "threads": 1,
            "rounds": {"up to 1024": plan.small_rounds, "above": plan.large_rounds},
            "regimes": {"default": {}, "tuned": jobs.TUNED},
        },
        "machine": machine() | ({} if plan.device == "cpu" else {"gpu": cuda.device_facts(plan.device)}),
        "versions": versions(),
        "timings": [],
        "memory": [],
        "accuracy": [],
        "large": None,
    }
    timings, memories, accuracies, larges = plan.timings(), plan.memories(), plan.accuracies(), plan.larges()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(timings) + len(memories) + len(accuracies) + len(larges))

        def done(job: dict[str, Any]) -> dict[str, Any]:
            progress.update(task, description=jobs.describe(job))
            if not console.is_terminal:
                console.print(jobs.describe(job), markup=False, highlight=False)
            result = jobs.attempt(job)
            progress.advance(task)
            return result

        for job in timings:
            found["timings"] += [_named(job, row) for row in done(job)["rows"]]
        for job in memories:
            found["memory"].append(done(job)["row"])
        for job in accuracies:
            found["accuracy"] += done(job)["rows"]
        for job in larges:
            found["large"] = done(job)["row"]
    found["goals"] = goals.judge(found) if plan.device == "cpu" else []
    return found


def _named(job: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    return {"loss": job["loss"], "n": job["n"], "regime": job["regime"], **row}


def _retry(found: dict[str, Any], plan: jobs.Plan, fraction: float, console: Console) -> list[goals.Goal]:
    """Time once more, with more rounds, what seems to miss a floor: noise can do that, and it is said."""
    judged = goals.floors(found, fraction)
    missed = {(g["loss"], g["n"], g["regime"]) for g in judged if g["met"] is False and "loss" in g}
    for job in plan.timings():
        if (job["loss"], job["n"], job["regime"]) not in missed:
            continue
        job["rounds"] *= MORE_ROUNDS
        console.print(f"below a floor, measured again with {job['rounds']} rounds: {jobs.describe(job)}")
        rows = [_named(job, row) for row in jobs.attempt(job)["rows"]]
        kept = [
            r for r in found["timings"] if (r["loss"], r["n"], r["regime"]) != (job["loss"], job["n"], job["regime"])
        ]
        found["timings"] = kept + rows
    return goals.floors(found, fraction) if missed else judged


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
            " memory above its goal divided by it. What seems to fail is timed once more, with more rounds.",
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
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds at every size, in place of the protocol's.")] = None,
    backend: Annotated[str, typer.Option(help="Backend of pairproof.fast.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, or cuda: events on the same alternation, N up to 262144.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Of the embeddings: float32, or on cuda bfloat16.")] = "float32",
    date: Annotated[str | None, typer.Option(help="Written into the report as it is.")] = None,
) -> None:
    """Measure pairproof.fast beside its peers: times, errors, memory.

    Every size, allocator and loss runs in its own process on one thread. Implementations alternate, each is timed only
    after its float64 value was found right on the same batch, and ratios are medians over neighbouring samples. A full
    run takes about 25 minutes, a quick one under two.

    python -m bench --quick

    python -m bench --loss supcon --size 4096 --rounds 3 --backend tiled
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=FILE_WIDTH)
    plan = _plan(quick, floors, _split(loss), _split(size), rounds, backend=backend, device=device, dtype=dtype)
    whole = plan == jobs.FULL or (device != "cpu" and not (quick or loss or size or rounds))
    try:
        if output is not None or whole:
            report.pyplot()  # said before half an hour of measuring, not after
        if device != "cpu":
            cuda.require(device)
        trial = jobs.run(plan.trial())["row"]
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
    losses: tuple[str, ...],
    sizes: tuple[str, ...],
    rounds: int | None,
    **chosen: str,
) -> jobs.Plan:
    """The plan that the options ask for.

    Raises:
        typer.BadParameter: an option's value is not one of its choices.
    """
    device, dtype = chosen["device"], chosen["dtype"]
    if device != "cpu" and device.partition(":")[0] != "cuda":
        raise typer.BadParameter(f"expected cpu or cuda, got {device!r}", param_hint="--device")
    if dtype not in (("float32",) if device == "cpu" else ("float32", "bfloat16")):
        raise typer.BadParameter(f"expected float32, or bfloat16 on cuda, got {dtype!r}", param_hint="--dtype")
    if floors is not None and device != "cpu":
        raise typer.BadParameter("expected --device cpu with it: the goals are a CPU's", param_hint="--floors")
    plan = jobs.FLOORS if floors is not None else jobs.QUICK if quick else jobs.FULL
    plan = replace(plan, **chosen)  # type: ignore[arg-type]
    if device != "cpu":
        on_device = cuda.SIZES[:1] if quick else cuda.SIZES
        plan = replace(plan, sizes=on_device, memory_sizes=on_device)
        plan = replace(plan, regimes=jobs.REGIMES[:1], temperatures=(), large=False)
    unknown = [name for name in losses if name not in LOSSES]
    if unknown:
        raise typer.BadParameter(f"expected one of {', '.join(LOSSES)}, got {unknown[0]!r}", param_hint="--loss")
    if losses:
        plan = replace(plan, losses=tuple(name for name in LOSSES if name in losses))
    if sizes:
        wanted = tuple(_size(text) for text in sizes)
        plan = replace(plan, sizes=wanted, memory_sizes=wanted, large=False, temperatures=())
    if rounds is not None:
        plan = replace(plan, small_rounds=rounds, large_rounds=rounds)
    return plan


def _size(text: str) -> int:
    if not text.isdecimal() or int(text) < 32 or int(text) % 2:
        raise typer.BadParameter(f"expected even numbers from 32, got {text!r}", param_hint="--size")
    return int(text)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    runner: Callable[..., None] = app
    runner(args=arguments, prog_name="python -m bench")


if __name__ == "__main__":
    main()
