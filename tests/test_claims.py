"""The documents' claims in words: each is checked, and a wrong verdict shows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pairproof.conformance.documents.claims import CHECKS, judge_claims
from pairproof.conformance.documents.load import WorkedFixture, load_worked

FIXTURES = load_worked()


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda f: f.document.id)
def test_claims_stand_as_recorded(fixture: WorkedFixture) -> None:
    for judgement in judge_claims(fixture):
        assert judgement.passed, (judgement.case, judgement.verdict, judgement.evidence)
        assert judgement.evidence


def test_every_claim_has_its_check_and_every_check_its_claim() -> None:
    assert {f"{f.document.id}/{claim.id}" for f in FIXTURES for claim in f.claims} == set(CHECKS)


def test_a_wrong_verdict_and_a_missing_check_show() -> None:
    fixture = next(f for f in FIXTURES if f.document.id == "supcon_notebook")
    claim = fixture.claims[0]
    opposite = replace(claim, verdict="holds" if claim.verdict != "holds" else "does not hold")
    unknown = replace(claim, id="nobody-checks-this")
    for wrong in (opposite, unknown):
        (judgement,) = judge_claims(replace(fixture, claims=(wrong,)))
        assert not judgement.passed


def test_changed_figures_turn_a_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim is computed, not looked up: with another loss under its name the verdict turns."""
    from pairproof import reference

    def other_loss(embeddings, labels, *, temperature, reduction="mean"):
        return reference.supcon_loss(embeddings, labels, temperature=temperature)

    monkeypatch.setattr(reference, "nt_xent_pairwise_loss", other_loss)
    fixture = next(f for f in FIXTURES if f.document.id == "supcon_notebook")
    turned = {j.claim.id for j in judge_claims(fixture) if not j.passed}
    assert "pml-denominator" in turned
    assert {"agree-differ-3x3", "both-differ-from-supcon-2x2x2"} <= turned
