"""Losses over many processes: values and gradients of the golden cases when their rows are distributed over ranks."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pairproof.conformance.implementations.fast import Fast
from pairproof.conformance.suite.cases import Case, called
from pairproof.conformance.suite.catalogue import LOSSES
from pairproof.conformance.suite.golden import GoldenCase, load_golden
from pairproof.conformance.suite.records import Outcome
from pairproof.conformance.truth.compare import compare
from pairproof.conformance.truth.evaluate import stored_truth
from pairproof.conformance.truth.tolerances import bounds
from tests.distributed_jobs import evaluate
from tests.ranks import run_ranks

BY_ROW = ("labels", "anchors", "anchor_weights", "ignored_ids", "self_rows")
BY_PAIR = ("positives", "ignored", "positive_weights", "negative_weights")
SMALL = 40
"""Largest size of a case of the default run."""


class Split:
    """A case whose rows are distributed over ranks: units of rows that belong together, in an arbitrary order.

    Attributes:
        calls: the arguments of each rank.
        rows: the rows of each rank, in its order; those of the second tower are ``others``.
    """

    def __init__(self, case: Case, world: int) -> None:
        self.case, fast = case, Fast({}, "cpu")
        given = {**fast.keywords(case), **{name: z.detach() for name, z in fast.tensors(case, "float64").items()}}
        random = np.random.default_rng([zlib.crc32(case.id.encode()), world])
        towers = case.entry.two_towers
        queue = "negatives" in given
        alone = "ref_embeddings" in given
        n = case.n
        if towers:
            m = len(given["embeddings_b"])
            for name in ("labels", "ignored_ids"):
                if name in given and f"ref_{name}" not in given and m == n:
                    given[f"ref_{name}"] = given[name]
        partners = given.get("partners")
        # The rank of each row. Some ranks may have no rows.
        shares = random.permutation([1.0, 0.4, 2.0, 0.0][:world]) if world > 1 else np.ones(1)
        rank_of = random.choice(world, n, p=shares / shares.sum())
        if partners is not None and not towers and not alone:
            rank_of = rank_of[np.minimum(np.arange(n), partners.numpy())]
        if towers:
            matched = not {"labels", "positives", "partners"} & given.keys()
            of_b = rank_of if matched else random.choice(world, m, p=shares / shares.sum())
            if partners is not None:
                rank_of = of_b[partners.numpy()]
        self.rows = [random.permutation(np.flatnonzero(rank_of == rank)) for rank in range(world)]
        self.others = self.rows
        if towers and not matched:
            self.others = [random.permutation(np.flatnonzero(of_b == rank)) for rank in range(world)]
        order, order_b = (torch.tensor(np.concatenate(part)) for part in (self.rows, self.others))
        self.calls = [
            self._call(given, torch.tensor(a), torch.tensor(b), order, order_b, towers, queue, alone)
            for a, b in zip(self.rows, self.others, strict=True)
        ]

    def _call(
        self,
        given: dict[str, Any],
        a: torch.Tensor,
        b: torch.Tensor,
        order: torch.Tensor,
        order_b: torch.Tensor,
        towers: bool,
        queue: bool,
        alone: bool,
    ) -> dict[str, Any]:
        call = dict(given)
        for name in BY_ROW:
            if name in call:
                call[name] = call[name][a]
        for name in ("embeddings", "embeddings_a"):
            if name in call:
                call[name] = call[name][a]
        if towers:
            for name in ("embeddings_b", "ref_labels", "ref_ignored_ids"):
                if name in call:
                    call[name] = call[name][b]
        if "hard_negatives" in call:
            call["hard_negatives"] = called(given)["hard_negatives"][a]
        for name in BY_PAIR:
            if name in call:
                mask = call[name][a]
                if "directions" in self.case.entry.keywords:
                    n, h = len(order), call["hard_negatives"].shape[1] if "hard_negatives" in call else 1
                    every = (order[:, None] * h + torch.arange(h)).flatten()
                    blocks, at = [], 0
                    for width in self._widths(n, h, call):
                        blocks.append(mask[:, at : at + width][:, order if width == n else every])
                        at += width
                    call[name] = torch.cat(blocks, 1)
                elif not alone:
                    call[name] = mask[:, order_b if towers else order]
                else:
                    call[name] = mask
        local = {int(row): k for k, row in enumerate(b if towers else a)}
        if "partners" in call and not alone:
            call["partners"] = torch.tensor([local[int(p)] for p in call["partners"][a]], dtype=torch.int64)
        elif "partners" in call:
            call["partners"] = call["partners"][a]
        if "positive_pairs" in call:
            place = {int(row): k for k, row in enumerate(order)}
            pairs = [[local[i], place[j]] for i, j in call["positive_pairs"].tolist() if i in local]
            call["positive_pairs"] = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
        return call

    def _widths(self, n: int, h: int, call: dict[str, Any]) -> list[int]:
        chosen = str(self.case.option("directions")).split("+")
        hard = "hard_negatives" in call
        widths = [n, *([n * h] if hard else []), *[n] * (len(chosen) - 1)]
        shared = hard and "doc_to_doc" in chosen and self.case.option("hard_negatives_scope") == "batch"
        return widths + ([n * h] if shared else [])

    def job(self, rank: int, **options: Any) -> tuple[str, dict[str, Any], list[str]]:
        """The call of a rank."""
        return self.case.entry.function, self.calls[rank] | options, list(self.case.matrices)

    def outcome(self, found: list[Any], each: list[Any]) -> Outcome:
        """The outcome of all ranks together."""
        world, separate = len(found), self.case.separate
        values = [rank[0] for rank in found]
        if not separate:
            assert all(np.array_equal(value, values[0], equal_nan=True) for value in values)
        gradients = {}
        for place, name in enumerate(self.case.matrices):
            parts = [rank[1][place] for rank in found]
            if name in ("ref_embeddings", "negatives"):
                whole = sum(parts)
            else:
                whole = np.zeros(self.case.matrices[name].shape)
                rows = self.others if name == "embeddings_b" else self.rows
                for part, own in zip(parts, rows, strict=True):
                    if name == "hard_negatives":
                        h = whole.shape[0] // self.case.n
                        own = (own[:, None] * h + np.arange(h)).ravel()
                        part = part.reshape(-1, whole.shape[1])
                    whole[own] = part
            gradients[name] = whole if separate else whole / world
        anchors = self._anchors([rank[0] for rank in each], every=True)
        if separate and self.case.option("no_positive") == "drop":
            counted = set(self.case.anchors()) - {i for i, n in enumerate(self.case.positive_counts()) if not n}
            ordered = self._anchors(values, every=False)
            result = [ordered[i] for i in sorted(counted)]
        elif separate:
            result = list(self._anchors(values, every=True).values())
        else:
            result = [float(values[0])]
        return Outcome(result, gradients.pop(self.case.first), anchors, other_gradients=gradients)

    def _anchors(self, values: list[Any], *, every: bool) -> dict[int, float]:
        """The values of all anchors by row: those of the first tower, then those of the second."""
        chosen, counts = set(self.case.anchors()), self.case.positive_counts()
        found = {}
        for part, a, b in zip(values, self.rows, self.others, strict=True):
            rows = list(a)
            if self.case.entry.two_towers and len(self.case.anchors()) != self.case.n:
                rows += [self.case.n + row for row in b]
            elif self.case.option("direction") == "b_to_a":
                rows = list(b)
            rows = [row for row in rows if row in chosen and (every or counts[row])]
            found |= dict(zip(map(int, rows), part.tolist(), strict=True))
        return dict(sorted(found.items()))


def chosen_cases(every: bool) -> list[GoldenCase]:
    """The cases; in the default run, every 7th of the small ones of each loss."""
    found = [case for case in load_golden() if case.case.option("reduction") != "none_pairs"]
    return found if every else [case for case in found if case.case.size <= SMALL][::7]


def check_cases(folder: Path, world: int, cases: list[GoldenCase]) -> dict[str, float]:
    """Evaluate cases on a number of ranks; return the largest error of each loss in units of its bound."""
    splits = [Split(golden.case, world) for golden in cases]
    arguments = []
    for rank in range(world):
        jobs = []
        for split in splits:
            more = {"no_positive": "zero"} if "no_positive" in split.case.entry.keywords else {}
            if split.case.option("no_positive") != "drop":
                more = {}
            jobs += [split.job(rank), split.job(rank, reduction="none", **more)]
        arguments.append([jobs])
    results = run_ranks(folder, world, evaluate, arguments)
    worst: dict[str, float] = {}
    wrong = []
    for place, (golden, split) in enumerate(zip(cases, splits, strict=True)):
        found, each = ([rank[2 * place + k] for rank in results] for k in (0, 1))
        errors = [text for text in (*found, *each) if isinstance(text, str)]
        if errors:
            wrong.append((golden.id, errors[0]))
            continue
        truth = stored_truth(golden.case, golden.expected)
        comparison = compare(golden.case, truth, split.outcome(found, each), bounds(golden.case, truth, "float64"))
        if not comparison.ratio <= 1:
            wrong.append((golden.id, comparison))
        worst[golden.case.loss] = max(worst.get(golden.case.loss, 0.0), comparison.ratio)
    assert not wrong, f"{len(wrong)} of {len(cases)}: {wrong[:5]}"
    return worst


def test_golden_cases_are_met_by_three_ranks(tmp_path: Path) -> None:
    worst = check_cases(tmp_path, 3, chosen_cases(False))
    assert worst.keys() == LOSSES.keys()
    assert min(worst.values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_golden_cases_are_met_by_any_number_of_ranks(world: int, tmp_path: Path) -> None:
    assert check_cases(tmp_path, world, chosen_cases(True)).keys() == LOSSES.keys()
