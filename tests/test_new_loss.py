"""A new loss, defined and registered in this module, works with every command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pairproof.conformance import explain as explaining
from pairproof.conformance.diagnose.explain import explain_case
from pairproof.conformance.diagnose.identify import identify
from pairproof.conformance.implementations.base import outcome_of
from pairproof.conformance.implementations.fast import Fast
from pairproof.conformance.implementations.reference import Reference
from pairproof.conformance.judge import verify
from pairproof.conformance.judge.check import check_loss
from pairproof.conformance.judge.options import Selection
from pairproof.conformance.judge.properties import PROPERTIES, Subject, hunt
from pairproof.conformance.judge.results import Status
from pairproof.conformance.maintain import rebuild
from pairproof.conformance.maintain.add import Batch, add
from pairproof.conformance.suite.catalogue import COMMON, Loss, registered
from pairproof.conformance.suite.golden import load_errors, load_flags
from pairproof.conformance.suite.store import dump_json, fixtures_at, fixtures_root, write_manifest
from pairproof.conformance.truth.evaluate import stored_truth
from pairproof.reference.batch import evaluate
from pairproof.reference.scalars import mean
from pairproof.reference.terms import cross_entropy

pytestmark = pytest.mark.slow

Tensor = torch.Tensor


def hardest_anchor(s: Any, i: int, A: Any, P: Any, N: Any) -> Any:  # noqa: N803
    """Mean over P of -log( e^s_ip / (e^s_ip + e^s_in) ), n the negative with the largest logit."""
    hardest = [max(N, key=lambda n: float(np.ravel(np.real(s[n]))[0]))] if N else []
    pairs = [cross_entropy(s, i, p, sorted([p, *hardest])) for p in P]
    return mean([pair.value for pair in pairs]), pairs


def hardest_reference(
    embeddings: Any,
    labels: Any,
    *,
    temperature: float = 0.07,
    base_temperature: float | None = None,
    similarity: str = "cosine",
    no_positive: str = "zero",
    reduction: str = "mean",
) -> Any:
    """The reference implementation, in loops."""
    return evaluate(hardest_anchor, **locals())


def hardest_baseline(logits: Tensor, member: Tensor, positive: Tensor) -> Tensor:
    """The straightforward torch implementation."""
    hardest = logits.masked_fill(~member | positive, -torch.inf).amax(dim=1, keepdim=True)
    # torch's softplus is the identity above 20, an error of up to 2e-9.
    each = torch.logaddexp(hardest - logits, torch.zeros(())).where(positive, 0.0)
    return each.sum(dim=1) / positive.sum(dim=1).clamp(min=1)


def hardest_loss(
    embeddings: Tensor,
    labels: Tensor,
    *,
    temperature: float = 0.07,
    base_temperature: float | None = None,
    similarity: str = "cosine",
    no_positive: str = "zero",
    reduction: str = "mean",
    backend: str = "auto",
) -> Tensor:
    """The torch implementation."""
    rows = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
    if similarity == "cosine":
        rows = torch.nn.functional.normalize(rows, dim=1)
    member = ~torch.eye(len(rows), dtype=torch.bool)
    positive = (labels[:, None] == labels) & member
    values = hardest_baseline(rows @ rows.T / temperature, member, positive)
    if base_temperature is not None:
        values = values * (temperature / base_temperature)
    paired = positive.any(dim=1)
    if no_positive == "nan":
        values = values.where(paired, torch.nan)
    if no_positive == "drop":
        values = values[paired]
    if reduction == "none":
        return values
    return values.sum() / (max(len(values), 1) if reduction == "mean" else 1)


HARDEST = Loss(
    name="hardest",
    module="hardest",
    source="a test",
    positives_by="labels",
    keywords={**COMMON, "no_positive": "zero"},
    baseline=hardest_baseline,
    functions={"reference": hardest_reference, "fast": hardest_loss, "formula": hardest_anchor},
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the fixtures, to which golden cases and an error case of the new loss are added."""
    root = Path(shutil.copytree(fixtures_root(), tmp_path_factory.mktemp("new") / "fixtures"))
    errors = json.loads((root / "golden/errors.json").read_text())
    errors["good"]["hardest"] = errors["good"]["supcon"]
    mistake = next(case for case in errors["cases"] if case["id"] == "errors/embeddings-rank-1")
    mistake["losses"].append("hardest")
    (root / "golden/errors.json").write_text(dump_json(errors))
    for name in ("supcon", "supcon_in", "nt_xent", "nt_xent_pairwise", "nt_bxent", "info_nce"):
        (root / f"golden/{name}.json").unlink()  # validating them takes seconds
    write_manifest(root)
    folder = root.parent
    np.save(folder / "z.npy", np.array([[1, 0.5], [0.25, 1], [-1, 0.5], [0.5, -1], [0.75, 0.25]]))
    np.save(folder / "y.npy", np.array([0, 1, 0, 1, 2]))
    with registered(HARDEST), fixtures_at(root), pytest.MonkeyPatch.context() as patch:
        for module in (verify, rebuild):
            patch.setattr(module, "ALL", (Reference, Fast))
        for temperature in ("0.5", "0.1", "1"):
            name = f"five-rows-{temperature.replace('.', '-')}"
            batch = Batch(
                "hardest", name, str(folder / "z.npy"), str(folder / "y.npy"), settings={"temperature": temperature}
            )
            assert add(batch, ["lonely-anchors"], "Two pairs and a row without positives.", root).notes == ()
        yield root


def test_verify_passes_for_the_new_loss(root: Path) -> None:
    report = verify.run(Selection(losses=("hardest",), cases=("golden/hardest/*",)))
    judged = [check for check in report.checks if check.status is not Status.SKIPPED]
    assert {check.implementation for check in judged} == {"reference", "fast"}
    assert {check.status for check in judged} == {Status.PASSED}
    assert json.loads((root / "expected.json").read_text())["counts"]["reference/hardest"] == {"passed": 3}


@pytest.mark.slow
def test_check_explains_a_mistake(root: Path) -> None:
    cases = ("golden/*", "usage/*", "fresh-*-[0-9]")
    assert check_loss(hardest_loss, loss="hardest", cases=cases).exit_code == 0

    def halved(embeddings: Tensor, labels: Tensor, temperature: float) -> Tensor:
        return hardest_loss(embeddings, labels, temperature=temperature) / 2

    assert check_loss(halved, loss="hardest", cases=cases).exit_code == 1
    golden = explaining.find_golden("hardest/five-rows-0-5")
    embeddings = torch.tensor(golden.case.embeddings, requires_grad=True)
    loss = halved(embeddings, torch.tensor(golden.case.arguments["labels"]), 0.5)
    outcome = outcome_of(loss, {"embeddings": embeddings})
    words = explain_case(golden.case, outcome, stored_truth(golden.case, golden.expected))
    assert words is not None
    assert words.startswith("values are 2 times too small")


def test_new_loss_is_identified(root: Path) -> None:
    found = identify(hardest_loss, call="labels", arrays="torch")
    assert (found.verdict, found.loss) == ("match", "hardest")


def test_explain_describes_the_new_loss(root: Path) -> None:
    golden = explaining.find_golden("hardest/five-rows-0-5")
    text = "\n".join(explaining.describe(golden, load_flags()))
    assert "hardest_loss(embeddings, labels), a test" in text
    assert f"loss {golden.expected.loss!r}" in text


@pytest.mark.slow
def test_properties_hold(root: Path) -> None:
    subject = Subject.of(Fast({}, "cpu"), "float64")
    applied = [prop for prop in PROPERTIES if "hardest" in prop.losses]
    assert len(applied) >= 10
    for prop in applied:
        assert hunt(prop, "hardest", [subject], examples=3).violation is None, prop.name


def test_error_case_raises(root: Path) -> None:
    (case,) = [case for case in load_errors() if case.loss == "hardest"]
    with pytest.raises(case.exception, match="embeddings: "):
        hardest_reference(**case.arguments)
