"""Losses over many processes: values and gradients of the golden cases when their rows are distributed over ranks."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
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
from pairproof.fast import Ring, SigmoidLoss, SupConLoss, distributed, supcon_loss
from pairproof.reference.ranking import hard_of_documents
from tests.distributed_jobs import Learner, end_early, evaluate, memory, record, train, work_with_torch
from tests.ranks import LIMIT, run_ranks

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
            # The rows k of both towers share one weight, so they must be on the same rank.
            weighted = "anchor_weights" in given and m == n
            matched = weighted or not {"labels", "positives", "partners"} & given.keys()
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
        kind = hard_of_documents(self.case.option("doc_to_doc_hard"), self.case.option("hard_negatives_scope"))
        shared = hard and "doc_to_doc" in chosen and kind != "none"
        return widths + ([n * h] if shared else [])

    def job(self, rank: int, **options: Any) -> tuple[str, dict[str, Any], list[str]]:
        """The call of a rank."""
        return self.case.entry.function, self.calls[rank] | options, list(self.case.matrices)

    def outcome(self, found: list[Any], each: list[Any] | None) -> Outcome:
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
        anchors = None if each is None else self._anchors([rank[0] for rank in each], every=True)
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
            if self.case.option("direction") == "b_to_a":
                rows = list(b)
            elif self.case.entry.two_towers and len(self.case.anchors()) != self.case.n:
                rows += [self.case.n + row for row in b]
            rows = [row for row in rows if row in chosen and (every or counts[row])]
            found |= dict(zip(map(int, rows), part.tolist(), strict=True))
        return dict(sorted(found.items()))


def chosen_cases(every: bool) -> list[GoldenCase]:
    """The cases; in the default run, every 30th of the small ones, and references whose weights have a gradient."""
    found = [case for case in load_golden() if case.case.option("reduction") != "none_pairs"]
    chosen = [case for case in found if case.case.size <= SMALL][::30]
    return found if every else [*chosen, *(case for case in found if case.id == "golden/dclw/refs-differentiated")]


def check_cases(
    folder: Path,
    world: int,
    cases: list[GoldenCase],
    *,
    each_anchor: bool,
    backend: str = "auto",
    dtype: str = "float64",
    limit: float = LIMIT,
) -> dict[str, float]:
    """Evaluate cases on a number of ranks; return the largest error of each loss in units of its bound.

    Cases that a `Ring` supports are evaluated with one, too; the name of the loss is then followed by " in a ring".
    """
    splits = [(golden, Split(golden.case, world), "world") for golden in cases]
    splits += [(golden, split, Ring()) for golden, split, _ in splits if suits_ring(golden.case)]
    arguments = []
    calls = 2 if each_anchor else 1
    for rank in range(world):
        jobs = []
        for _, split, group in splits:
            more = {"no_positive": "zero"} if split.case.option("no_positive") == "drop" else {}
            both = {"backend": backend, "group": group}
            jobs += [split.job(rank, **both), split.job(rank, reduction="none", **more, **both)][:calls]
        arguments.append([jobs, dtype])
    results = run_ranks(folder, world, evaluate, arguments, limit=limit, timeout=limit / 5)
    worst: dict[str, float] = {}
    wrong = []
    for place, (golden, split, group) in enumerate(splits):
        found = [rank[calls * place] for rank in results]
        each = [rank[2 * place + 1] for rank in results] if calls == 2 else None
        errors = [text for text in (*found, *(each or [])) if isinstance(text, str)]
        if errors:
            wrong.append((golden.id, errors[0]))
            continue
        truth = stored_truth(golden.case, golden.expected)
        comparison = compare(golden.case, truth, split.outcome(found, each), bounds(golden.case, truth, dtype), dtype)
        if not comparison.ratio <= 1:
            wrong.append((golden.id, group, comparison))
        name = golden.case.loss if group == "world" else f"{golden.case.loss} in a ring"
        worst[name] = max(worst.get(name, 0.0), comparison.ratio)
    assert not wrong, f"{len(wrong)} of {len(splits)}: {wrong[:5]}"
    return worst


IN_A_RING = ("supcon", "supcon_in", "nt_xent", "nt_xent_pairwise", "info_nce")
EVERY = {*LOSSES, *(f"{loss} in a ring" for loss in IN_A_RING)}


def suits_ring(case: Case) -> bool:
    weighted = {"positive_weights", "negative_weights"} & case.arguments.keys()
    own = case.loss == "supcon_in" and case.option("denominator") == "one_positive"
    first, second = [float(np.abs(rows).max()) for rows in (case.embeddings, *case.matrices.values())][-2:]
    huge = case.option("similarity") == "dot" and first * second > 1e290
    return case.loss in IN_A_RING and not weighted and not own and not huge


@pytest.mark.slow
def test_golden_cases_are_met_by_three_ranks(tmp_path: Path) -> None:
    worst = check_cases(tmp_path, 3, chosen_cases(False), each_anchor=False)
    assert worst.keys() == EVERY
    assert min(worst.values()) > 0


def test_golden_cases_are_met_by_panels_of_two_ranks(tmp_path: Path) -> None:
    cases = [case for case in chosen_cases(True) if case.case.loss in ("supcon", "nt_xent") and case.case.size <= SMALL]
    worst = check_cases(tmp_path, 2, cases[::20], each_anchor=False, backend="tiled")
    assert worst.keys() == {"supcon", "nt_xent", "supcon in a ring", "nt_xent in a ring"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_golden_cases_in_other_dtypes_are_met_by_two_ranks(dtype: str, tmp_path: Path) -> None:
    """Without queues and references, which all ranks share: each rank rounds its part of their gradient."""
    found = [case for case in chosen_cases(True) if case.case.size <= SMALL and dtype in case.dtypes]
    found = [case for case in found if not {"negatives", "ref_embeddings"} & case.case.others.keys()][::50]
    assert check_cases(tmp_path, 2, found, each_anchor=False, dtype=dtype).keys() == EVERY


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_golden_cases_are_met_by_any_number_of_ranks(world: int, tmp_path: Path) -> None:
    cases = chosen_cases(True)[:: 1 if world in (2, 3) else 4]
    assert check_cases(tmp_path, world, cases, each_anchor=True, limit=3600).keys() == EVERY


ROWS = torch.randn(11, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
OTHERS = torch.randn(11, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
COUNTS = (5, 4, 2)
"""The rows of each rank in the tests that follow."""
LABELS = torch.tensor([0, 1, 0, 2, 3, 0, 1, 1, 4, 5, 6])
"""Rank 2 has no anchor with a positive."""
PARTNERS = (torch.tensor([1, 0, 3, 2]), torch.tensor([3, 2, 1, 0]), torch.tensor([1, 0]))

LEARNED: list[tuple[str, dict[str, Any], str]] = [
    ("SupConLoss", {"temperature": 0.3}, "labels"),
    ("SupConLoss", {"temperature": 0.3, "no_positive": "drop"}, "labels"),
    ("SupConLoss", {"temperature": 0.3, "denominator": "only_negatives", "similarity": "dot"}, "labels"),
    ("SupConLoss", {"temperature": 0.3, "reduction": "sum", "base_temperature": 0.1}, "labels"),
    ("SupConInLoss", {"temperature": 0.3, "no_positive": "drop"}, "labels"),
    ("SupConEpsilonLoss", {"temperature": 0.7, "similarity": "cosine", "no_positive": "drop"}, "labels"),
    ("NTXentLoss", {"temperature": 0.3}, "partners"),
    ("NTXentPairwiseLoss", {"temperature": 0.3, "reduction": "mean_pairs"}, "labels"),
    ("NTXentPairwiseLoss", {"temperature": 0.3, "reduction": "sum_pairs", "no_positive": "drop"}, "labels"),
    ("NTBXentLoss", {"temperature": 0.3}, "pairs"),
    ("InfoNCELoss", {"temperature": 0.3}, "towers"),
    ("InfoNCELoss", {"temperature": 0.3, "direction": "b_to_a"}, "towers"),
    ("InfoNCELoss", {"temperature": 0.3, "direction_weights": (0.75, 0.25)}, "towers"),
    ("SigmoidLoss", {"temperature": 0.3, "bias": -2.0}, "towers"),
    ("SigmoidLoss", {"temperature": 0.3, "bias": -2.0, "reduction": "mean_pairs"}, "towers"),
    ("HardNegativeLoss", {"temperature": 0.3}, "partners"),
    ("DCLWLoss", {"temperature": 0.3, "detach_weights": False}, "partners"),
    ("MultipleNegativesRankingLoss", {"temperature": 0.3}, "towers"),
]
"""A module, its options, and how its positives are given. Temperature and bias are learned."""
LEARNED += [
    (loss, {**options, "group": Ring()}, kind)
    for loss, options, kind in LEARNED
    if loss in ("SupConLoss", "SupConInLoss", "NTXentLoss", "NTXentPairwiseLoss", "InfoNCELoss")
]


def shares_of(counts: tuple[int, ...], kind: str) -> tuple[list[Any], tuple[list[Any], dict[str, Any]]]:
    """The rows and arguments of each rank, and those of one process with all rows."""
    total = sum(counts)
    z, other, labels = ROWS[:total], OTHERS[:total], LABELS[:total]
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    parts = [slice(start, start + count) for start, count in zip(starts, counts, strict=True)]
    if kind == "labels":
        return [([z[p]], {"labels": labels[p]}) for p in parts], ([z], {"labels": labels})
    if kind == "towers":
        return [([z[p], other[p]], {}) for p in parts], ([z, other], {})
    if kind == "partners":
        whole = torch.cat([own + start for own, start in zip(PARTNERS, starts, strict=False)])
        return [([z[p]], {"partners": own}) for p, own in zip(parts, PARTNERS, strict=False)], (
            [z],
            {"partners": whole},
        )
    pairs = torch.tensor([[0, 1], [1, 0], [0, 7], [6, 10], [10, 2]])
    pairs = pairs[(pairs < total).all(1)]
    shares = [
        torch.tensor([[i - p.start, j] for i, j in pairs.tolist() if p.start <= i < p.stop], dtype=torch.int64).view(
            -1, 2
        )
        for p in parts
    ]
    own = [([z[p]], {"positive_pairs": mine}) for p, mine in zip(parts, shares, strict=True)]
    return own, ([z], {"positive_pairs": pairs})


def check_learning(folder: Path, cases: list[tuple[str, dict[str, Any], str]], world: int, *, ddp: bool) -> None:
    jobs: list[list[Any]] = [[] for _ in range(world)]
    expected = []
    for loss, options, kind in cases:
        counts = (4, 4, 2)[:world] if kind == "partners" else COUNTS[:world]
        shares, whole = shares_of(counts, kind)
        for rank, share in enumerate(shares):
            jobs[rank].append((loss, options, *share))
        model = Learner(loss, {**options, "group": None})
        value = model(*whole)
        value.backward()
        expected.append((value.item(), {name: p.grad.numpy() for name, p in model.named_parameters()}))
    for found in run_ranks(folder, world, train, [[job, ddp] for job in jobs]):
        for case, (value, gradients), (true, wanted) in zip(cases, found, expected, strict=True):
            assert value == pytest.approx(true, rel=1e-12), case
            assert gradients.keys() == wanted.keys()
            for name, gradient in gradients.items():
                np.testing.assert_allclose(
                    gradient,
                    wanted[name],
                    rtol=1e-12,
                    atol=1e-12 * np.abs(wanted[name]).max(),
                    err_msg=f"{case} {name}",
                )


def test_averaged_gradients_are_those_of_one_process(tmp_path: Path) -> None:
    check_learning(tmp_path, LEARNED, 3, ddp=False)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradients_averaged_by_ddp_are_those_of_one_process(world: int, tmp_path: Path) -> None:
    check_learning(tmp_path, LEARNED, world, ddp=True)


def call(name: str, count: int, *leaves: str, **given: Any) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    return name, {"embeddings": ROWS[:count], "labels": LABELS[:count], **given}, leaves or ("embeddings",)


NAN = torch.full((3, 5), torch.nan, dtype=torch.float64)
TOWERS = {"embeddings_a": ROWS[:3], "embeddings_b": OTHERS[:3]}
WRONG: list[tuple[list[Any], str]] = [
    (
        [call("supcon_loss", 3, temperature=t) for t in (0.1, 0.2, 0.1)],
        "ValueError: temperature: expected the same on all ranks, got 0.1 on ranks 0, 2, 0.2 on rank 1",
    ),
    (
        [call("supcon_loss", 3), call("supcon_loss", 4), call("supcon_loss", 3, embeddings=ROWS[:3, :4])],
        "ValueError: embeddings: expected the same on all ranks, got float64 [any, 5] on cpu, requires_grad on ranks "
        "0, 1, float64 [any, 4] on cpu, requires_grad on rank 2",
    ),
    (
        [call("supcon_loss", 3), call("supcon_loss", 3, embeddings=ROWS[:3].float()), call("supcon_loss", 3)],
        "ValueError: embeddings: expected the same on all ranks, got float64 [any, 5] on cpu, requires_grad on ranks "
        "0, 2, float32 [any, 5] on cpu, requires_grad on rank 1",
    ),
    (
        [call("supcon_loss", 3), ("supcon_loss", call("supcon_loss", 3)[1], ()), call("supcon_loss", 3)],
        "ValueError: embeddings: expected the same on all ranks, got float64 [any, 5] on cpu, requires_grad on ranks "
        "0, 2, float64 [any, 5] on cpu on rank 1",
    ),
    (
        [call("supcon_loss", 3), call("supcon_in_loss", 3), call("nt_xent_pairwise_loss", 3)],
        "ValueError: group: expected the same on all ranks, got supcon_loss on rank 0, supcon_in_loss on rank 1, "
        "nt_xent_pairwise_loss on rank 2",
    ),
    (
        [call("supcon_loss", 3), call("supcon_loss", 3, no_positive="drop"), call("supcon_loss", 3, no_positive="nan")],
        "ValueError: no_positive: expected the same on all ranks, got None on rank 0, 'drop' on rank 1, "
        "'nan' on rank 2",
    ),
    (
        [call("supcon_loss", 3), call("supcon_loss", 3), call("supcon_loss", 3, labels=LABELS[:2])],
        "ValueError: labels: expected one label per embedding, shape [3], got shape [2], on rank 2",
    ),
    (
        [call("supcon_loss", 3), call("supcon_loss", 3, embeddings=NAN), call("supcon_loss", 3, embeddings=NAN)],
        "ValueError: embeddings: expected finite values, got NaN or infinity in row 0, on ranks 1, 2",
    ),
    (
        [call("supcon_loss", 3, labels=None, positives=torch.ones(3, 3, dtype=torch.bool)) for _ in range(3)],
        "ValueError: positives: expected one column for each row of all ranks, shape [3, 9], got shape [3, 3]",
    ),
    (
        [
            ("nt_bxent_loss", {"embeddings": ROWS[:n], "positive_pairs": torch.tensor([pair])}, ("embeddings",))
            for n, pair in ((2, [0, 8]), (3, [2, 0]), (4, [4, 0]))
        ],
        "ValueError: positive_pairs: expected rows in the ranges 0 to 3 and 0 to 8, got [4, 0] at position 0, "
        "on rank 2",
    ),
    (
        [call("nt_xent_loss", 2, labels=None, partners=torch.tensor(own)) for own in ([1, 0], [1, 0], [2, 3])],
        "TypeError: nt_xent_loss() got an unexpected keyword argument 'labels', on ranks 0, 1, 2",
    ),
    (
        [
            ("nt_xent_loss", {"embeddings": ROWS[:n], "partners": torch.ones(n, dtype=torch.int64)}, ("embeddings",))
            for n in (0, 1, 0)
        ],
        "ValueError: partners: expected rows in the range 0 to 0, got 1 in row 0, on rank 1",
    ),
    (
        [call("supcon_loss", 0) for rank in range(3)],
        "ValueError: embeddings: expected at least 1 row on all ranks together, got 0",
    ),
    (
        [("info_nce_loss", {**TOWERS, "embeddings_b": OTHERS[:n]}, ("embeddings_a",)) for n in (3, 3, 2)],
        "ValueError: embeddings_b: expected the shape of embeddings_a, [3, 5], got shape [2, 5], on rank 2",
    ),
    (
        [call("supcon_loss", 3), call("supcon_loss", 3, group=Ring()), call("supcon_loss", 3)],
        "ValueError: group: expected the same on all ranks, got supcon_loss on ranks 0, 2, supcon_loss with a Ring on "
        "rank 1",
    ),
    (
        [("sigmoid_loss", {**TOWERS, "group": Ring()}, ("embeddings_a",))] * 3,
        'ValueError: group: expected a process group or "world", got a Ring, which only supcon_loss, supcon_in_loss, '
        "nt_xent_loss, nt_xent_pairwise_loss and info_nce_loss support, on ranks 0, 1, 2",
    ),
    (
        [call("supcon_loss", 3, group=Ring(), backend="exact")] * 3,
        'ValueError: group: expected a process group or "world" with backend="exact", got a Ring, which does not '
        "support it, on ranks 0, 1, 2",
    ),
    (
        [call("supcon_loss", 3, group=Ring(), similarity="dot", embeddings=ROWS[:3] * 10.0**n) for n in (0, 160, 0)],
        'ValueError: group: expected a process group or "world" for rows whose dot products, divided by the '
        "temperature, exceed the range of float64, got a Ring",
    ),
    (
        [call("supcon_loss", 3, group=Ring(), create_graph=True)] * 3,
        'NotImplementedError: group: expected a process group or "world", and backend="exact", for second derivatives, '
        "which a Ring does not support",
    ),
    (
        [call("supcon_loss", 3, create_graph=True)] * 3,
        'NotImplementedError: group: expected backend="exact" for second derivatives of this loss with a group; other '
        "backends exchange only coefficients of the first derivative",
    ),
    (
        [
            ("info_nce_loss", {**TOWERS, "ignored": torch.zeros(3, 9, dtype=torch.bool).index_fill(1, at, True)}, ())
            for at in (torch.tensor([5]), torch.tensor([0]), torch.tensor([7]))
        ],
        "ValueError: ignored: expected False for every row and its positive, got True in row 1, on rank 2",
    ),
]
"""The calls of three ranks, and the error that all of them raise."""


def test_errors_are_raised_on_all_ranks(tmp_path: Path) -> None:
    found = run_ranks(tmp_path, 3, evaluate, [[[calls[rank] for calls, _ in WRONG]] for rank in range(3)])
    for rank in found:
        for text, (_, expected) in zip(rank, WRONG, strict=True):
            assert text == expected


@pytest.mark.parametrize(
    ("waits", "kind"),
    [
        (False, "all_gather"),
        pytest.param(True, "all_gather", marks=pytest.mark.slow, id="a rank that waits"),
        pytest.param(False, "ring", marks=pytest.mark.slow, id="in a ring"),
        pytest.param(True, "ring", marks=pytest.mark.slow, id="a rank that waits in a ring"),
    ],
)
def test_missing_rank_is_named_while_it_is_missing(waits: bool, kind: str, tmp_path: Path) -> None:
    given = [(rank, tmp_path if waits else None, kind == "ring") for rank in range(3)]
    found = run_ranks(tmp_path, 3, end_early, given, survive=True, timeout=3)
    for rank in (0, 2):
        assert found[rank].startswith(f"group: {kind} failed on rank {rank}, because rank 1 did not take part: ")
    assert found[1] is None


def test_backward_of_symmetric_positives_exchanges_only_coefficients(tmp_path: Path) -> None:
    """Forward: header of 4 integers, labels, rows, 3 sums. Backward: 3 coefficients of each row, or 2 with partners."""
    n, dim = 6, 5
    calls = [
        ("supcon_loss", {"embeddings": ROWS[:n], "labels": LABELS[:n]}, ("embeddings",)),
        ("nt_xent_loss", {"embeddings": ROWS[:n], "partners": torch.tensor([1, 0, 3, 2, 5, 4])}, ("embeddings",)),
        ("supcon_loss", {"embeddings": ROWS[:n], "labels": LABELS[:n], "backend": "exact"}, ("embeddings",)),
        ("info_nce_loss", {"embeddings_a": ROWS[:n], "embeddings_b": OTHERS[:n]}, ("embeddings_a", "embeddings_b")),
    ]
    for name, given, leaves in calls[:2] + calls[3:]:  # rings also take rows that are stored by columns
        stored = {leaf: given[leaf].T.contiguous().T for leaf in leaves}
        calls.append((name, {**given, **stored, "group": Ring()}, leaves))
    # The rows of rank 1 need float64, so those of rank 0 are converted, too.
    towers = [
        {"embeddings_a": ROWS[:n].float() * size, "embeddings_b": OTHERS[:n].float(), "similarity": "dot"}
        for size in (1.0, 1e35)
    ]
    jobs = [[[*calls, ("info_nce_loss", given, ("embeddings_a", "embeddings_b"))]] for given in towers]
    supcon, nt_xent, exact, info_nce, *rings, wide = run_ranks(tmp_path, 2, record, jobs)[0]
    header, rows, labels, value = ("all_gather", 32), ("all_gather", n * dim * 8), ("all_gather", n * 8), "all_reduce"
    assert supcon == ([header, labels, rows, (value, 24)], [("all_gather", n * 3 * 8)])
    assert nt_xent == ([header, rows, (value, 24)], [("all_gather", n * 2 * 8)])
    assert exact == ([header, labels, rows, (value, 24)], [("reduce_scatter", 2 * n * dim * 8)])
    assert info_nce == ([header, rows, rows, (value, 24)], [("reduce_scatter", 2 * n * dim * 8)] * 2)
    assert wide == ([header, ("all_gather", 8), rows, rows, (value, 24)], [("reduce_scatter", 2 * n * dim * 8)] * 2)
    block = ("ring", n * dim * 8)
    supcon, nt_xent, info_nce = rings
    assert supcon == ([header, labels, block, (value, 24)], [block, block])
    assert nt_xent == ([header, block, (value, 24)], [block, block])
    assert info_nce == ([header, block, block, (value, 24)], [block] * 4)


@pytest.mark.slow
def test_rank_in_a_ring_holds_a_few_blocks_of_rows(tmp_path: Path) -> None:
    """A block has n rows; the panels of 16 rows and 16 columns are negligible."""
    n, dim = 16, 2**16
    rows = torch.randn(n, dim, generator=torch.Generator().manual_seed(3))
    towers = {"embeddings_a": rows[: n // 2], "embeddings_b": rows[n // 2 :]}
    calls: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
        ("supcon_loss", {"embeddings": rows, "labels": torch.arange(n) % 3}, ("embeddings",)),
        ("info_nce_loss", towers, ("embeddings_a", "embeddings_b")),
    ]
    calls = [(name, {**given, "group": group}, leaves) for name, given, leaves in calls for group in ("world", Ring())]
    for found in run_ranks(tmp_path, 4, memory, [[calls]] * 4):
        supcon, supcon_ring, info_nce, info_nce_ring = (size / (n * dim * 4) for size in found)
        assert supcon_ring < 8 < supcon
        assert info_nce_ring < 8 < info_nce


@pytest.mark.slow
def test_gradients_under_compile_fsdp_and_accumulation(tmp_path: Path) -> None:
    shares, ([rows], given) = shares_of((5, 4), "labels")
    found = run_ranks(tmp_path, 2, work_with_torch, [(share[0][0], share[1]["labels"]) for share in shares])
    torch.manual_seed(5)
    model = torch.nn.Linear(5, 4).double()
    (2 * supcon_loss(model(rows), given["labels"], temperature=0.3)).backward()
    for rank in found:
        assert rank.keys() == {"eager", "compiled", "accumulated", "sharded"}
        for name, gradient in rank.items():
            torch.testing.assert_close(gradient, model.weight.grad, rtol=1e-12, atol=1e-12, msg=name)


def test_module_with_a_group_is_copied_and_pickled(tmp_path: Path) -> None:
    made = SupConLoss(group="world")
    assert pickle.loads(pickle.dumps(made)).group == copy.deepcopy(made).group == "world"
    assert "group='world'" in repr(made)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    group = torch.distributed.ProcessGroup(store, 0, 1)
    made = SupConLoss(group=Ring())
    assert pickle.loads(pickle.dumps(made)).group == Ring("world")
    for given in (group, Ring(group)):
        made = SupConLoss(group=given)
        assert copy.deepcopy(made).group is given
        assert made.state_dict() == {}
        with pytest.raises(TypeError, match='group: expected "world" or None in a module that is pickled'):
            pickle.dumps(made)


RING_REFUSES = [
    ("supcon_loss", {"positive_weights": torch.ones(3, 9)}, "positive_weights"),
    ("nt_xent_pairwise_loss", {"negative_weights": torch.ones(3, 9)}, "negative_weights"),
    ("nt_xent_pairwise_loss", {"reduction": "none_pairs"}, 'reduction="none_pairs"'),
    ("supcon_in_loss", {"denominator": "one_positive"}, 'denominator="one_positive"'),
    ("info_nce_loss", {"backend": "triton"}, 'backend="triton"'),
]


@pytest.mark.parametrize(("function", "given", "named"), RING_REFUSES, ids=lambda part: str(part)[:20])
def test_ring_refuses_what_it_does_not_support(function: str, given: dict[str, Any], named: str) -> None:
    expected = f'group: expected a process group or "world" with {named}, got a Ring, which does not support it'
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        distributed.check_ring(function, given)


def test_module_of_a_loss_without_ring_refuses_it() -> None:
    with pytest.raises(ValueError, match=r"^group: expected .*, got a Ring, which only supcon"):
        SigmoidLoss(group=Ring())
    with pytest.raises(ValueError, match=r'^group: .* with backend="exact", got a Ring'):
        SupConLoss(group=Ring(), backend="exact")


@pytest.mark.parametrize(
    ("group", "error", "message"),
    [
        ("all", ValueError, "group: expected a process group, \"world\" or None, got 'all'"),
        (2, TypeError, 'group: expected a process group, "world" or None, got int'),
        (
            Ring(),
            ValueError,
            "group: expected torch.distributed to be initialised, got no default process group",
        ),
        ("world", ValueError, "group: expected torch.distributed to be initialised, got no default process group"),
    ],
)
def test_impossible_group_is_rejected(group: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        supcon_loss(ROWS, LABELS, group=group)
    if group not in ("world", Ring()):
        with pytest.raises(error, match=f"^{re.escape(message)}$"):
            SupConLoss(group=group)


EXAMPLE = re.compile(r"^```python\n# (train_\w+\.py)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_examples_of_the_documentation_print_the_same_with_any_number_of_processes(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs/distributed.md").read_text(encoding="utf-8")
    printed = []
    for name, code in EXAMPLE.findall(page):
        script = tmp_path / name
        script.write_text(code, encoding="utf-8")
        for world in (1, 3):
            programs = (str(Path(__file__).with_name("late_threads.py")), str(script))
            run = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", *programs)
            done = subprocess.run([sys.executable, *run], capture_output=True, text=True, timeout=200, check=False)
            assert done.returncode == 0, done.stderr
            printed.append([float(line) for line in done.stdout.split()])
    assert len(printed) == 4
    assert len(printed[0]) == 5
    assert printed[0] == sorted(printed[0], reverse=True)
    assert printed[0][-1] < 0.6 * printed[0][0]
    assert printed[1:] == [pytest.approx(printed[0], rel=1e-5)] * 3
