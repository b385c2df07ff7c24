"""``pairproof check`` finds the implementations that are wrong in one regime only; ``tests/wrong`` declares them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pairproof.conformance.implementations.callable import External
from pairproof.conformance.judge.check import CONFORMS, check
from pairproof.conformance.judge.fresh import draw
from pairproof.conformance.judge.options import Request
from pairproof.conformance.suite.catalogue import LOSSES
from pairproof.conformance.suite.levels import Level
from tests.wrong import BEFORE, MISSED, REGIMES, WRONG, Wrong
from tests.wrong.__main__ import PAGE, page
from tests.wrong.base import target_of
from tests.wrong.judging import SEED, judged, refused

pytestmark = pytest.mark.usefixtures("proved_once", "verdict_only")

SAMPLE = ("references/last-of-the-queue",)
"""A wrong implementation of InfoNCE, which has the fewest cases; the others are slow."""


def of(names: Sequence[str]) -> list[Wrong]:
    """Return the wrong implementations with these names."""
    return [one for one in WRONG if one.name in names]


def test_wrong_implementations_are_described() -> None:
    assert len(WRONG) >= 120
    assert len({one.name for one in WRONG}) == len(WRONG)
    assert {one.regime for one in WRONG} == set(REGIMES)
    assert {one.loss for one in WRONG} == set(LOSSES)
    assert {*MISSED, *BEFORE} <= {one.name for one in WRONG}
    for one in WRONG:
        assert re.fullmatch(r"[a-z]+/[A-Za-z0-9]+(-[a-z0-9]+)*", one.name)
        assert one.level in set(Level)
        assert one.words.endswith("."), one.name
        assert not (one.argument and one.name in MISSED), one.name
        assert not one.argument or one.argument.endswith("."), one.name


def test_table_lists_the_counts() -> None:
    argued = [one.name for one in WRONG if one.argument]
    text = "python -m tests.wrong --write"
    assert PAGE.read_text(encoding="utf-8") == page([*MISSED, *argued]), text


@pytest.mark.parametrize("regime", [regime for regime in REGIMES if regime != "effects"])
@pytest.mark.quick(5)
def test_wrong_implementation_can_be_called(regime: str) -> None:
    """``effects`` is left out: its implementations call the right loss and change the state of the process."""
    for one in (one for one in WRONG if one.regime == regime):
        subject = External(one.target, loss=one.loss, **one.options)
        case = draw(subject.claim, SEED, 0)
        separate = case.pairs() if case.option("reduction") == "none_pairs" else case.counted()
        wanted = len(separate) if case.separate else 1
        assert len(subject.evaluate(case, subject.dtypes[0]).values) == wanted, one.name


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_a_target_is_the_right_loss_outside_its_regime() -> None:
    # The control: with nothing wrong, a target built in the same way conforms.
    right = target_of("info_nce", lambda call: call())
    assert check(Request(right, "info_nce", dtypes=("float64",), fuzz=8, seed=SEED), explain=0).verdict == CONFORMS


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_the_right_loss_conforms(loss: str) -> None:
    assert check(Request(target_of(loss, lambda call: call()), loss), explain=0).verdict == CONFORMS
    fewer = target_of(loss, lambda call: call(), ("temperature",))
    assert check(Request(fewer, loss, fuzz=8), explain=0).verdict == CONFORMS


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("one", of(SAMPLE), ids=lambda one: one.name)
@pytest.mark.slow
def test_sample_is_caught(one: Wrong) -> None:
    assert judged(replace(one, options={**one.options, "dtypes": ("float64",), "fuzz": 8})).first


@pytest.mark.slow
@pytest.mark.parametrize("one", WRONG, ids=lambda one: one.name)
def test_wrong_implementation_is_caught(one: Wrong, request: pytest.FixtureRequest) -> None:
    if one.name in MISSED:
        request.node.add_marker(pytest.mark.xfail(strict=True, reason="not caught yet"))
    assert one.argument or (refused_in_a_process if "thread" in one.name else refused)(one)


def refused_in_a_process(one: Wrong) -> bool:
    """``refused`` in a new process. A fork of a process with threads cannot start others; tests may start some."""
    code = f"from tests.test_wrong import of, refused; raise SystemExit(not refused(of([{one.name!r}])[0]))"
    return subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent, check=False).returncode == 0


def test_weights_of_anchors_are_applied() -> None:
    # The hook that most wrong implementations use: weights of 1 give the right loss, others change it.
    z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8], [0.6, 0.8]], dtype=torch.float64)
    labels = torch.tensor([0, 0, 1, 1, 2])
    for reduction in LOSSES["nt_xent_pairwise"].choices["reduction"]:
        for policy in ("zero", "drop"):
            options = {"reduction": reduction, "no_positive": policy, "temperature": 0.5}
            right = target_of("nt_xent_pairwise", lambda call: call())(z, labels, **options)
            same = target_of("nt_xent_pairwise", lambda call: call.weighted(torch.ones(5)))(z, labels, **options)
            twice = target_of("nt_xent_pairwise", lambda call: call.weighted(torch.full((5,), 2.0)))
            torch.testing.assert_close(same, right)
            torch.testing.assert_close(twice(z, labels, **options), 2 * right)
