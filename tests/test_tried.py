"""What ``check`` reports as not tried: cases that need ``--thorough``, and calls after too many time-outs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from pairproof import fast
from pairproof.conformance import check_loss
from pairproof.conformance.implementations.callable import LATE
from pairproof.conformance.judge.results import Status

SMALL, LARGE = (
    f"not run: {LATE} batches of {size} 40 rows took longer than 0.2 s (--limit)" for size in ("up to", "more than")
)


def sleeps_under_usages(embeddings: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
    if embeddings.stride() != (embeddings.shape[1], 1) or labels.dtype != torch.int64 or not embeddings.requires_grad:
        time.sleep(1000)
    return fast.supcon_loss(embeddings, labels, temperature=temperature)


def built_in(embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return fast.supcon_loss(embeddings, labels, temperature=0.37)


@pytest.mark.slow
def test_target_that_always_hangs_is_given_up(tmp_path: Path) -> None:
    calls = tmp_path / "calls"

    def sleeps(embeddings: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
        with calls.open("a") as file:
            file.write(f"{len(embeddings)}\n")
        time.sleep(1000)
        return embeddings.sum()

    result = check_loss(sleeps, "supcon", limit=0.2, fuzz=2, seed=1)
    assert result.verdict == "could not run"
    assert {check.message for check in result.judged} == {"took longer than 0.2 s (--limit)"}
    # The last case of each kind is run in two dtypes.
    assert [len({check.case for check in result.judged}), len(result.judged)] == [4, 8]
    # One call before the cases, to find out how the loss is called, and one after them.
    assert len(calls.read_text().split()) == len(result.judged) + 2
    assert result.left_out[SMALL] > 100
    assert result.left_out[LARGE] > 2
    assert f"2 of the random batches ({SMALL})" in result.not_tried


@pytest.mark.slow
def test_usages_are_given_up_after_three_time_outs() -> None:
    result = check_loss(
        sleeps_under_usages, "supcon", limit=0.2, cases=("golden/supcon/t[!r]*", "golden/supcon/trained*", "usage/*")
    )
    late = [check for check in result.judged if check.message.endswith("took longer than 0.2 s (--limit)")]
    usages = [check for check in result.checks if check.case.startswith("usage/")]
    assert [check.status for check in usages].count(Status.ERRORED) == LATE
    assert any(f"(not run: {LATE} usages took longer" in name for name in result.not_tried), late


def test_cases_that_need_thorough_are_listed() -> None:
    cases = ("golden/supcon/shape-513*", "golden/supcon/two-positives", "golden/supcon/shape-257*")
    result = check_loss(built_in, "supcon", temperature=0.37, cases=cases)
    words, largest = result.not_tried
    assert largest == "batches larger than 257 x 3 (rows x columns)"
    proof = "whose results take long to prove for an option that the loss fixes (--thorough)"
    assert words == f"1 case of up to 513^2 similarities, {proof}"
    result = check_loss(built_in, "supcon", temperature=0.37, cases=cases[1:])
    assert result.not_tried == [largest]
