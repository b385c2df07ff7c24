"""Straightforward right losses conform at the level of policies, and the report names their range."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pairproof.conformance import check_loss
from pairproof.conformance.judge.check import CONFORMS
from pairproof.conformance.judge.ranges import sentences
from pairproof.conformance.suite.levels import Level

FILE = Path(__file__).parent / "targets" / "honest.py"

pytestmark = pytest.mark.usefixtures("proved_once")

HONEST: dict[str, tuple[str, dict[str, Any], str]] = {
    "simclr": ("nt_xent", {}, "norms below 1e-12 are clamped"),
    "simclr_unshifted": ("nt_xent", {}, "float32: the gradient is wrong below temperature 0.0298"),
    "supcon": ("supcon", {}, "norms below 1e-12 are clamped"),
    "clip": ("info_nce", {}, "norms below 1e-12 are clamped"),
    "nt_bxent": ("nt_bxent", {}, "norms below 1e-12 are clamped"),
    "moco": ("info_nce", {"settings": {"direction": "a_to_b"}}, "norms below 1e-12 are clamped"),
}
"""The loss of each target, the options that it needs, and what the report says about its range."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("supcon", "moco") else pytest.mark.slow) for name in HONEST]
)
@pytest.mark.quick(1)
def test_right_loss_conforms_on_some_cases(name: str) -> None:
    loss, options, _ = HONEST[name]
    cases = ("golden/*/*queue*" if name == "moco" else "golden/*/t*", "usage/[stu]*")
    result = check_loss(f"{FILE}:{name}", loss, cases=cases, seed=1, **options)
    assert result.verdict == CONFORMS, [(one.case, one.message) for one in result.failures]
    assert result.levels[Level.FORMULA].total() > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", HONEST)
def test_right_loss_conforms_at_policies_and_its_range_is_reported(name: str) -> None:
    loss, options, words = HONEST[name]
    result = check_loss(f"{FILE}:{name}", loss, seed=1, **options)
    assert result.verdict_at(Level.POLICIES) == CONFORMS, result.summary
    assert words in "; ".join(sentences(result.limits))
