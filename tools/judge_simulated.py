"""Judge right implementations on simulated machines: no result may exceed its bound.

    .venv/bin/python tools/judge_simulated.py --results 20000
    .venv/bin/python tools/judge_simulated.py --results 1000000 --processes 2 --output runs.jsonl

Every implementation of ``right`` evaluates golden cases on machines drawn from seeds (``simulated.py``). The tool
prints the number of results, the results above their bound and the largest ratio of error to bound, for each
implementation and dtype, and a histogram of the ratios. It exits with 1 if a ratio is above 1.

With ``--output``, each case is written to a file as soon as it is judged. If the file exists, the cases in it are not
judged again.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import multiprocessing
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from simulated import Machine, turned

from pairproof.conformance.faults import RIGHT, Fault
from pairproof.conformance.faults.judging import target_of
from pairproof.conformance.implementations import ALL, Implementation
from pairproof.conformance.implementations.callable import External
from pairproof.conformance.implementations.fast import Fast, FastDense, FastExact, FastTiled
from pairproof.conformance.judge.verify import Limits, truth_of
from pairproof.conformance.suite.cases import Case
from pairproof.conformance.suite.golden import GoldenCase, load_golden
from pairproof.conformance.suite.records import Outcome

ROOT = Path(__file__).resolve().parent.parent

FAST = (Fast, FastDense, FastTiled, FastExact)

WITHOUT_TORCH = frozenset({"reference", "scipy", "optax", "with_numpy"})
"""The implementations that do not compute in torch. They are judged on turned cases."""

RANGE = "right in the whole range"
"""Part of the names of the losses that are right on every case. The others clamp norms, for example."""

FUNCTIONS = {
    "with_cross_entropy": "nt_xent",
    "with_gather": "nt_xent",
    "with_log_softmax": "supcon",
    "with_einsum": "supcon",
    "with_binary_cross_entropy": "nt_bxent",
    "with_softplus": "nt_bxent",
    "with_numpy": "supcon",
}
"""Straightforward losses in ``tests/test_rounding.py``, and what they compute."""

EDGES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 2.0, 5.0)
"""The intervals of the histogram: each number is the upper end of one."""


class Result(NamedTuple):
    """An outcome on a simulated machine.

    Attributes:
        implementation: name of the implementation.
        case: id of the case.
        dtype: dtype of the inputs.
        seed: the machine.
        ratio: the largest ratio of an error to its bound; inf if the evaluation raised an error.
        message: the first term that exceeds its bound, or "".
        compared: how many numbers were compared: values, anchors and rows of gradients.
    """

    implementation: str
    case: str
    dtype: str
    seed: int
    ratio: float
    message: str
    compared: int


def fast() -> list[Implementation]:
    """Return ``pairproof.fast`` with each backend."""
    return [kind({}, "cpu") for kind in FAST]


def right() -> list[Implementation]:
    """Return ``fast``, the correct losses of the faults, those of the tests, and the reference."""
    found = fast()
    for (loss, call), function in RIGHT.items():
        found.append(target_of(Fault(f"{loss}, {RANGE}, called with {call}", loss, call, "", "", function, {}, "")))
    written: dict[str, tuple[Any, str, dict[str, Any]]] = {}
    tests = importlib.import_module("tests.test_rounding")
    for name, loss in FUNCTIONS.items():
        written[name] = getattr(tests, name), loss, {"arrays": "numpy" if name == "with_numpy" else "torch"}
    for name, (loss, options, _) in importlib.import_module("tests.test_honest").HONEST.items():
        written[name] = f"{ROOT / 'tests/targets/honest.py'}:{name}", loss, options
    for name, (spec, loss, options) in written.items():
        target = External(spec, loss=loss, limit=None, **options)
        vars(target).update(name=name)
        found.append(target)
    return found + [kind({}, "cpu") for kind in ALL if kind.name in ("reference", "scipy")]


def always_right(implementation: Implementation) -> bool:
    """Whether an implementation is right on every case that it supports. The others lack range, for example."""
    return not isinstance(implementation, External) or RANGE in implementation.name


def evaluate(implementation: Implementation, case: Case, dtype: str, seed: int | None) -> Outcome:
    """Evaluate a case on a machine; None for the machine at hand."""
    if isinstance(implementation, External):
        implementation.outcomes.clear()
    if seed is None:
        return implementation.evaluate(case, dtype)
    undo: Callable[[Outcome], Outcome] | None = None
    if implementation.name in WITHOUT_TORCH:
        case, undo = turned(case, seed)
    with nullcontext() if undo else Machine(seed):
        found = implementation.evaluate(case, dtype)
    return undo(found) if undo else found


def judge(
    golden: GoldenCase,
    implementations: Iterable[Implementation],
    seeds: Sequence[int],
    limits: Callable[..., Any] = Limits,
) -> Iterator[Result]:
    """Judge implementations on a golden case, in every dtype that represents it, on every machine.

    Args:
        golden: the case.
        implementations: right implementations. Some targets are only judged where they are right on the machine at
            hand, because they lack range.
        seeds: the machines.
        limits: returns the bounds of a case, from the case and its truth.
    """
    case = golden.case
    true = truth_of(case, golden)
    bounds = limits(case, true)
    for one in implementations:
        if one.refuses(case):
            continue
        for dtype in filter(case.holds_in, one.dtypes):
            if not always_right(one) and bounds.compare(one, evaluate(one, case, dtype, None), dtype).ratio > 1:
                continue
            for seed in seeds:
                try:
                    outcome = evaluate(one, case, dtype, seed)
                    comparison = bounds.compare(one, outcome, dtype)
                    ratio, message, compared = comparison.ratio, comparison.first, _compared(outcome)
                except Exception as error:
                    ratio, message, compared = math.inf, f"{type(error).__name__}: {error}", 0
                yield Result(one.name, case.id, dtype, seed, ratio, message, compared)


def _compared(outcome: Outcome) -> int:
    gradients = [] if outcome.gradient is None else [outcome.gradient, *outcome.other_gradients.values()]
    return len(outcome.values) + len(outcome.anchors or ()) + sum(map(len, gradients))


class Summary:
    """Counts of many results."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.above: Counter[tuple[str, str]] = Counter()
        self.largest: dict[tuple[str, str], tuple[float, str]] = defaultdict(lambda: (0.0, ""))
        self.bins: Counter[float] = Counter()
        self.compared = 0

    def add(self, implementation: str, dtype: str, case: str, ratios: Iterable[float]) -> None:
        """Count the ratios of an implementation on a case."""
        key = implementation, dtype
        for ratio in ratios:
            self.counts[key] += 1
            self.above[key] += ratio > 1
            self.largest[key] = max(self.largest[key], (ratio, case))
            self.bins[next((edge for edge in EDGES if ratio <= edge), math.inf)] += 1

    def lines(self) -> Iterator[str]:
        """Yield the table and the histogram."""
        width = max(len(name) for name in ("implementation", *(name for name, _ in self.counts)))
        yield f"{'implementation':{width}}  dtype      results   above  largest ratio"
        for (name, dtype), count in self.counts.items():
            ratio, case = self.largest[name, dtype]
            yield f"{name:{width}}  {dtype:8} {count:9} {self.above[name, dtype]:7}  {ratio:.3f} {case}"
        total, low = self.counts.total(), None
        compared = f", {self.compared} numbers and rows compared" if self.compared else ""
        yield f"{total} results, {self.above.total()} above the bound{compared}"
        for edge in (*EDGES, math.inf):
            interval = "ratio = 0" if low is None else f"{low:g} < ratio <= {edge:g}"
            yield f"  {interval:20} {self.bins[edge]:9}  {self.bins[edge] / max(total, 1):.3%}"
            low = edge


_cases: Sequence[GoldenCase] = ()
_implementations: Sequence[Implementation] = ()
"""What forked processes inherit."""


def _judge_one(work: tuple[int, int, int]) -> dict[str, Any]:
    """Judge a case on some machines, and return a line of the file."""
    k, first, count = work
    torch.set_num_threads(1)
    began, ratios, failures, compared = time.perf_counter(), defaultdict[str, list[float]](list), [], 0
    for result in judge(_cases[k], _implementations, range(first, first + count)):
        ratios[f"{result.implementation}|{result.dtype}"].append(float(f"{result.ratio:.4g}"))
        compared += result.compared
        if result.ratio > 1:
            failures.append(result._asdict())
    facts = {"seconds": round(time.perf_counter() - began, 2), "compared": compared}
    return {"case": _cases[k].case.id, "seed": first, **facts, "ratios": ratios, "failures": failures}


def run(wanted: int, seeds: int, processes: int, output: Path | None, first: int = 0) -> Summary:
    """Judge cases until there are enough results. Print failures, and write a line per case to ``output``."""
    summary, done = Summary(), set[tuple[str, int]]()

    def count(line: dict[str, Any]) -> None:
        summary.compared += line.get("compared", 0)
        for key, ratios in line["ratios"].items():
            name, _, dtype = key.partition("|")
            summary.add(name, dtype, line["case"], ratios)
        for one in line["failures"]:
            named = f"{one['implementation']}, {one['case']}, {one['dtype']}, seed {one['seed']}"
            print(f"above: {named}: {one['ratio']:.3g}: {one['message']}", flush=True)

    if output and output.is_file():
        for text in output.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            done.add((line["case"], line["seed"]))
            count(line)
        print(f"{output}: {summary.counts.total()} results", flush=True)
    file = output.open("a", encoding="utf-8") if output else None
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for start in itertools.count(first, seeds):
            order = random.Random(start).sample(range(len(_cases)), len(_cases))
            work = [(k, start, seeds) for k in order if (_cases[k].case.id, start) not in done]
            for line in pool.imap_unordered(_judge_one, work):
                count(line)
                if file:
                    print(json.dumps(line), file=file, flush=True)
                if summary.counts.total() >= wanted:
                    return summary
    return summary


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge the right implementations; return the exit code."""
    global _cases, _implementations
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=int, default=20_000, help="number of results; default: %(default)s")
    parser.add_argument("--seeds", type=int, default=5, help="machines per case at a time; default: %(default)s")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed; default: %(default)s")
    parser.add_argument("--processes", type=int, default=1, help="cases judged in parallel; default: %(default)s")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the ratios of each case; continue from FILE")
    parser.add_argument("--case", default="*", metavar="PATTERN", help="judge only these cases")
    parser.add_argument("--size", type=int, default=10**6, help="judge only cases with up to SIZE^2 similarities")
    parser.add_argument("--impl", default="*", metavar="PATTERN", help="judge only these implementations")
    options = parser.parse_args(arguments)
    _cases = [one for one in load_golden() if fnmatchcase(one.case.id, options.case) and one.case.size <= options.size]
    _implementations = [one for one in right() if fnmatchcase(one.name, options.impl)]
    if not _cases or not _implementations:
        parser.error("no case or no implementation matches")
    summary = run(options.results, options.seeds, options.processes, options.output, options.first)
    print(*summary.lines(), sep="\n")
    return int(summary.above.total() > 0)


if __name__ == "__main__":
    sys.path.append(str(ROOT))
    sys.exit(main())
