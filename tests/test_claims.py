"""Claims of the documents: each has its recorded verdict, and a wrong verdict is detected."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pairproof.conformance.documents.claims import CHECKS, judge_claims
from pairproof.conformance.documents.load import WorkedFixture, load_worked

FIXTURES = load_worked()


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda f: f.document.id)
def test_claims_have_the_recorded_verdicts(fixture: WorkedFixture) -> None:
    for judgement in judge_claims(fixture):
        assert judgement.passed, (judgement.case, judgement.verdict, judgement.evidence)
        assert judgement.evidence


def test_every_claim_has_a_check_and_every_check_a_claim() -> None:
    assert {f"{f.document.id}/{claim.id}" for f in FIXTURES for claim in f.claims} == set(CHECKS)


def test_wrong_verdict_and_missing_check_do_not_pass() -> None:
    fixture = next(f for f in FIXTURES if f.document.id == "supcon_notebook")
    claim = fixture.claims[0]
    opposite = replace(claim, verdict="holds" if claim.verdict != "holds" else "does not hold")
    unknown = replace(claim, id="without-a-check")
    for wrong in (opposite, unknown):
        (judgement,) = judge_claims(replace(fixture, claims=(wrong,)))
        assert not judgement.passed


def test_another_loss_changes_the_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts are computed: they change if another loss replaces the pairwise one."""
    from pairproof import reference

    def other_loss(embeddings, labels, *, temperature, reduction="mean"):
        return reference.supcon_loss(embeddings, labels, temperature=temperature)

    monkeypatch.setattr(reference, "nt_xent_pairwise_loss", other_loss)
    fixture = next(f for f in FIXTURES if f.document.id == "supcon_notebook")
    changed = {j.claim.id for j in judge_claims(fixture) if not j.passed}
    assert "pml-denominator" in changed
    assert {"agree-differ-3x3", "both-differ-from-supcon-2x2x2"} <= changed
