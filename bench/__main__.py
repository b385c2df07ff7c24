"""The command ``python -m bench``, run from the repository root.

Exit codes: 0 measured; 1 a floor is missed (with --floors); 2 wrong command line; 3 could not run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Annotated, Any, NoReturn

from pairproof import install_command

try:
    import typer
    from rich.console import Console
except ImportError as error:
    sys.exit(f"bench: the command needs {error.name}: {install_command('verify,bench')}")

from . import cuda, goals, jobs, measure, report
from .forms import COLUMNS, FORMS, RECIPES, TEMPERATURE
from .machine import machine, versions
from .peers import CAPTURED, Unavailable

MISSED, COULD_NOT_RUN = 1, 3

MORE_PROCESSES = (4, 10)
"""Numbers of additional processes that measure a missed floor, in a first and in a second attempt."""

FORK_MARGIN, FORK_MARGIN_FROM = 1.2, 1024
"""A ratio that was measured in a fork is measured again if it is below `FORK_MARGIN` times its floor.

Forks exaggerate the ratio at 1024 rows or more. Their allocator returns large arrays to the system more often, and the
page faults slow plain torch down by 15 %.
"""

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)


def _run(plan: jobs.Plan, date: str | None) -> dict[str, Any]:
    """Run all jobs of a plan and return the report."""
    console = Console(stderr=True)
    found: dict[str, Any] = {
        "format": report.FORMAT,
        "date": date,
        "protocol": vars(plan) | {"temperature": TEMPERATURE, "threads": 1, "allocators": jobs.REGIMES},
        "machine": machine() | ({} if plan.on_cpu else {"gpu": cuda.device_facts(plan.device)}),
        "versions": versions(),
    }
    work = plan.work()
    done, total = count(1), sum(map(len, work.values()))
    for table, some in work.items():
        found[table] = []
        for job in some:
            console.print(f"{next(done)}/{total} {jobs.describe(job)}", markup=False, highlight=False)
            found[table] += jobs.attempt(job)
    if not plan.on_cpu:  # the timing jobs also measured peak memory
        names = (*jobs.SHAPE, "n", "implementation", "status", "reason")
        for row in found["timings"]:
            if row["implementation"] != CAPTURED:
                peak = {"bytes": row.pop("bytes")} if "bytes" in row else {}
                found["memory"].append({key: row[key] for key in names if key in row} | peak)
    found["large"] = next(iter(found["large"]), None)
    found["goals"] = goals.judge(found) if plan.on_cpu else goals.judge_device(found)
    return found


def _retry(found: dict[str, Any], plan: jobs.Plan, fraction: float, console: Console) -> list[goals.Goal]:
    """Measure the jobs that miss or nearly miss a floor in more processes, and judge the medians.

    More rounds in one process do not help: the time that a peer spends on fresh memory differs between processes. It is
    the same in all forks of one process.
    """
    recorded = json.loads(goals.MISSED.read_text(encoding="utf-8"))
    runs: dict[tuple[str, str, int], list[list[goals.Row]]] = {}
    for number in MORE_PROCESSES:
        judged = [goal for goal in goals.floors(found, fraction, recorded) if "form" in goal]
        missed = {_shape(goal) for goal in judged if goal["met"] is False or (_shape(goal) not in runs and _near(goal))}
        for job in plan.timings():
            job["sizes"] = [n for n in job["sizes"] if _shape({**job, "n": n}) in missed]
            job["forked"] = False
            if not job["sizes"]:
                continue
            console.print(f"below or near a floor, measuring in {number} more processes: {jobs.describe(job)}")
            more = [jobs.attempt(job) for _ in range(number)]
            for n in job["sizes"]:
                shape = _shape({**job, "n": n})
                before = runs.get(shape) or [[row for row in found["timings"] if _shape(row) == shape]]
                runs[shape] = before + [[row for row in rows if _shape(row) == shape] for rows in more]
        found["timings"] = [row for row in found["timings"] if _shape(row) not in runs]
        found["timings"] += [row for rows in runs.values() for row in measure.median_of_processes(rows)]
    return goals.floors(found, fraction, recorded)


def _near(goal: goals.Goal) -> bool:
    """Return whether a ratio from a fork is too close to its floor."""
    return goal["n"] >= FORK_MARGIN_FROM and goal["value"] is not None and goal["value"] < FORK_MARGIN * goal["goal"]


def _shape(row: goals.Row) -> tuple[str, str, int]:
    """Return form, allocator regime and N of a timing row, a goal, or a job with one size."""
    return row["form"], row["regime"], row["n"]


def _record(found: dict[str, Any], console: Console) -> None:
    """Write the ratios that miss their goals to `goals.MISSED`. Forms that were not measured keep theirs."""
    figures = json.loads(goals.MISSED.read_text(encoding="utf-8"))
    for goal in goals.ratio_goals(found):
        figures.pop(goal["what"], None)
        if goal["met"] is False:
            figures[goal["what"]] = round(goal["value"], 3)
    goals.MISSED.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    console.print(f"written: {goals.MISSED}, {len(figures)} goals that are missed")


def _several(*flags: str, only: str) -> Any:
    return typer.Option(*flags, help=f"{only} (repeatable, or separated by commas).")


FORM = typer.Option("--form", "-f", help="Only forms whose name is or contains this text (repeatable).")
SIZE = _several("--size", "-n", only="Only these N")
WIDTHS = _several("--columns", "-d", only="On cuda: only these D")
DTYPE = _several("--dtype", only="On cuda: only these dtypes, of float32, bfloat16 and tf32 (TF32 products)")
FLOORS = typer.Option(
    min=0.01,
    max=1.0,
    help="For CI: a quick run that fails (exit code 1) if a ratio is below this fraction of its goal, or the memory"
    f" above its goal divided by {goals.MEMORY_FRACTION}. A ratio that is too low is measured in more processes, and"
    " the median is judged. For a goal listed in bench/missed.json, the fraction applies to the figure in that file."
    f" On processors that are not from {goals.RECORDED_ON}, ratios get {goals.ELSEWHERE} of this fraction.",
)
OUTPUT = typer.Option(help="Folder for the JSON and the plot. Default: bench/results for a full run, else none.")
QUICK = typer.Option(
    "--quick",
    help="Time only N = 64, 256 and 1024 (on cuda 4096 and 16384) with the default allocator, with fewer rounds and"
    " peers. Writes nothing without --output.",
)
RECORD = typer.Option("--record", help="A quick run that writes the figures of missed goals to bench/missed.json.")


@app.command(epilog="Exit codes: 0 measured; 1 a floor is missed; 2 wrong command line; 3 could not run.")
def bench(
    quick: Annotated[bool, QUICK] = False,
    floors: Annotated[float | None, FLOORS] = None,
    output: Annotated[Path | None, OUTPUT] = None,
    record: Annotated[bool, RECORD] = False,
    form: Annotated[list[str] | None, FORM] = None,
    size: Annotated[list[str] | None, SIZE] = None,
    columns: Annotated[list[str] | None, WIDTHS] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Number of rounds at every size.")] = None,
    backend: Annotated[str, typer.Option(help="Backend of pairproof.fast.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu or cuda; on cuda N is up to 262144.")] = "cpu",
    dtype: Annotated[list[str] | None, DTYPE] = None,
    date: Annotated[str | None, typer.Option(help="Date to write into the report.")] = None,
) -> None:
    """Measure time, errors and memory of pairproof.fast, plain torch and public implementations (peers).

    A form is a loss with one way of giving its positives. Each form runs in its own process with one thread, once per
    allocator. Peers run with the default allocator only, up to N = 4096. An implementation is timed only if its float64
    value is right. Timings of two implementations alternate, and a ratio is the median over neighbouring timings. A
    full run takes up to an hour, a quick run less than three minutes.

    On cuda, sizes, columns and dtypes differ, and each size has its own process. Peers whose matrices do not fit into
    GPU memory are not measured.

    python -m bench --quick

    python -m bench --form 'nt_xent, partners' --size 64,256 --rounds 15 --backend tiled
    """
    console = report.open_console()
    if record and device != "cpu":
        _misused("--record", "--device cpu: the goals are for a CPU")
    plan = _plan(quick or record, floors, device, rounds, form=form, size=size, columns=columns, dtype=dtype)
    plan = replace(plan, backend=backend)
    everything = (jobs.FULL, replace(jobs.DEVICE, device=device))
    folder = output or (jobs.ROOT / "bench" / "results" if plan in everything else None)
    try:
        if not plan.on_cpu:
            cuda.require(device)
        if folder is not None:
            report.pyplot()  # fail before the measurements if matplotlib is missing
        (trial,) = jobs.run(plan.trial())
        if trial["status"] != "measured":
            raise Unavailable(f"pairproof.fast fails on a small batch: {trial['reason']}")
        found = _run(plan, date)
        floors = None if floors is None else goals.fraction_on(machine()["cpu"], floors)
        judged = None if floors is None else _retry(found, plan, floors, console)
    except Unavailable as error:
        console.print(f"bench: {error}", style="red", markup=False)
        raise typer.Exit(COULD_NOT_RUN) from None
    report.show(found if floors is None else found | {"goals": []}, console)
    if record:
        _record(found, console)
    if folder is not None:
        report.write(found, folder / ("cpu" if plan.on_cpu else "cuda"), console)
    if judged is not None:
        console.print(report.goals_table(judged, f"Floors: {floors:.3g} of the goals"))
        met = {goal["met"] for goal in judged}
        if False in met:
            raise typer.Exit(MISSED)
        if met != {True}:
            console.print("bench: a floor could not be judged; its figures were not measured", style="red")
            raise typer.Exit(COULD_NOT_RUN)


def _misused(option: str, expected: str, got: str | None = None) -> NoReturn:
    raise typer.BadParameter(f"expected {expected}" + ("" if got is None else f", got {got!r}"), param_hint=option)


def _names(given: list[str], option: str, choices: Iterable[str], expected: str) -> tuple[str, ...]:
    """Return the given names in the order of the choices."""
    for name in given:
        if name not in choices:
            _misused(option, expected, name)
    return tuple(name for name in choices if name in given)


def _numbers(given: list[str], option: str, least: int) -> tuple[int, ...]:
    for text in given:
        if not text.isdecimal() or int(text) < least or int(text) % 8:
            _misused(option, f"multiples of 8 from {least}", text)
    return tuple(map(int, given))


def _forms(given: list[str], choices: Iterable[str]) -> tuple[str, ...]:
    """Return the choices that equal a given word or, if none does, contain it."""
    found = [name for word in given for name in choices if name == word or (word in name and word not in choices)]
    if given and not found:
        _misused("--form", f"a part of one of: {'; '.join(FORMS)}", given[0])
    return tuple(dict.fromkeys(found))


def _plan(
    quick: bool, floors: float | None, device: str, rounds: int | None, *, form: list[str] | None, **several: Any
) -> jobs.Plan:
    given = {
        key: [part for value in values or () for part in value.split(",") if part] for key, values in several.items()
    }
    on_cpu = device == "cpu"
    if not on_cpu and device.partition(":")[0] != "cuda":
        _misused("--device", "cpu or cuda", device)
    if floors is not None and not on_cpu:
        _misused("--floors", "--device cpu: the goals are for a CPU")
    if given["columns"] and on_cpu:
        _misused("--columns", f"--device cuda; on a CPU D is {COLUMNS}")
    quick = quick or floors is not None
    plan = (jobs.QUICK if quick else jobs.FULL) if on_cpu else (jobs.DEVICE_QUICK if quick else jobs.DEVICE)
    plan = replace(plan, device=device)
    dtypes = f"float32, or on cuda one of {', '.join(jobs.DEVICE.dtypes)}"
    changes: dict[str, Any] = {
        "forms": _forms(form or [], RECIPES if on_cpu else FORMS),
        "dtypes": _names(given["dtype"], "--dtype", (jobs.FULL if on_cpu else jobs.DEVICE).dtypes, dtypes),
        "columns": _numbers(given["columns"], "--columns", 16),
        "rounds": rounds,
        "pair_seconds": rounds and jobs.UNLIMITED,
    }
    if sizes := _numbers(given["size"], "--size", 32):
        changes |= {"sizes": sizes, "regimes": tuple((name, ()) for name, _ in plan.regimes)}
        plan = replace(plan, memory_sizes=(), temperatures=())
    return replace(plan, **{key: value for key, value in changes.items() if value})


if __name__ == "__main__":
    app(prog_name="python -m bench")
