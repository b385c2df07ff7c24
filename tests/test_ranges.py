"""The limits of a loss: the temperatures, norms and logits from which it breaks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pairproof import fast
from pairproof.conformance import cli, report
from pairproof.conformance.implementations.base import one_thread
from pairproof.conformance.implementations.callable import External
from pairproof.conformance.implementations.child import load_loss
from pairproof.conformance.judge import check as checking
from pairproof.conformance.judge.ranges import COLDEST, Limit, find_limits, sentences
from pairproof.conformance.judge.verify import load_cases

Tensor = torch.Tensor


def cosines(embeddings: Tensor) -> Tensor:
    rows = F.normalize(embeddings, dim=1)
    return rows @ rows.T


def mean_of_positives(log_probabilities: Tensor, labels: Tensor) -> Tensor:
    positives = labels[:, None] == labels[None, :]
    positives.fill_diagonal_(False)
    return -(log_probabilities.where(positives, 0.0).sum(dim=1) / positives.sum(dim=1)).mean()


def softmax_of(logits: Tensor, labels: Tensor) -> Tensor:
    own = torch.eye(len(labels), dtype=torch.bool)
    return mean_of_positives(logits.masked_fill(own, -torch.inf).log_softmax(dim=1), labels)


def with_normalize(embeddings: Tensor, labels: Tensor, temperature: float) -> Tensor:
    return softmax_of(cosines(embeddings) / temperature, labels)


def with_cosine_similarity(embeddings: Tensor, labels: Tensor, temperature: float) -> Tensor:
    return softmax_of(F.cosine_similarity(embeddings[:, None], embeddings[None], dim=-1) / temperature, labels)


def with_added_epsilon(embeddings: Tensor, labels: Tensor, temperature: float) -> Tensor:
    rows = embeddings / (embeddings.norm(dim=1, keepdim=True) + 1e-12)
    return softmax_of(rows @ rows.T / temperature, labels)


def without_maximum(embeddings: Tensor, labels: Tensor, temperature: float) -> Tensor:
    logits = cosines(embeddings) / temperature
    others = logits.exp() * (1 - torch.eye(len(labels), dtype=logits.dtype))
    return mean_of_positives(logits - others.sum(dim=1, keepdim=True).log(), labels)


def minus_the_self_pair(embeddings: Tensor, labels: Tensor, temperature: float) -> Tensor:
    logits = cosines(embeddings) / temperature
    own = torch.tensor(1 / temperature, dtype=logits.dtype).exp()
    return mean_of_positives(logits - (logits.exp().sum(dim=1, keepdim=True) - own).log(), labels)


def of_products(embeddings: Tensor, labels: Tensor, temperature: float) -> Tensor:
    logits = embeddings @ embeddings.T / temperature
    others = logits.exp() * (1 - torch.eye(len(labels), dtype=logits.dtype))
    return mean_of_positives(logits - others.sum(dim=1, keepdim=True).log(), labels)


def refuses_low_temperatures(embeddings: Tensor, labels: Tensor, temperature: float) -> Tensor:
    if temperature < 0.01:
        raise ValueError("temperature: too low")
    return with_normalize(embeddings, labels, temperature)


def limits_of(loss: Callable[..., Tensor], name: str = "supcon", **options: Any) -> list[Limit]:
    target = External(loss, loss=name, **options)
    with one_thread():  # as in a check
        return find_limits(target, target.claim)


def one(limits: list[Limit], dtype: str, quantity: str, direction: str, part: str = "loss") -> Limit:
    key = dtype, quantity, direction
    (found,) = [it for it in limits if (it.dtype, it.quantity, it.direction) == key and it.part in ("", part)]
    return found


@pytest.mark.parametrize(("loss", "least"), [(with_normalize, 1e-12), (with_cosine_similarity, 1e-8)])
def test_clamp_of_norms_is_found(loss: Callable[..., Tensor], least: float) -> None:
    limits = limits_of(loss)
    assert sentences(limits) == [
        "float64, float32: no error found down to temperature 0.0001",
        f"float64, float32: norms below {least:g} are clamped",
        "float64: norms above 1.34e+154 overflow",
        "float32: norms above 1.85e+19 overflow",
    ]
    assert one(limits, "float32", "norm", "above").at == pytest.approx(torch.finfo(torch.float32).max ** 0.5, rel=0.02)


def test_norms_with_an_added_epsilon_are_not_called_clamped() -> None:
    found = one(limits_of(with_added_epsilon), "float64", "norm", "below")
    assert found.kind == "wrong"
    assert (found.at or 0) > 2e-12


def test_overflow_of_exponentials_is_found_at_the_logarithm_of_the_maximum() -> None:
    limits = limits_of(without_maximum)
    for dtype, largest in (("float64", 709.78), ("float32", 88.72)):
        found = one(limits, dtype, "temperature", "below")
        assert found.kind == "overflow"
        assert found.at == pytest.approx(1 / largest, rel=0.02)
        # The sum of a row overflows slightly before its largest exponential does.
        words = f"{dtype}: exponentials overflow below temperature {found.at:.3g}, and the loss is not finite"
        assert words in sentences(limits)


def test_cancellation_of_the_self_pair_is_found() -> None:
    found = one(limits_of(minus_the_self_pair), "float32", "temperature", "below")
    # Exponentials of the far row are e^(-1.6 / T) times that of the self pair, whose rounding error is 2^-24.
    assert found.kind == "wrong"
    assert 0.05 < (found.at or 0) < 0.3


def test_overflow_of_products_is_reported_in_logits() -> None:
    limits = limits_of(of_products, settings={"similarity": "dot"})
    found = one(limits, "float32", "logit", "above")
    assert found.kind == "overflow"
    assert found.at == pytest.approx(88.72, rel=0.02)
    assert {it.quantity for it in limits} == {"logit"}


def test_refused_temperatures_are_a_limit() -> None:
    found = one(limits_of(refuses_low_temperatures), "float64", "temperature", "below")
    assert found.kind == "error"
    assert found.at == pytest.approx(0.01, rel=0.01)
    assert found.words.endswith("ValueError: temperature: too low")


def test_search_stops_at_the_first_call_that_exceeds_the_time_limit(tmp_path: Path) -> None:
    late = tmp_path / "late"

    def hangs(embeddings: Tensor, labels: Tensor, temperature: float) -> Tensor:
        if temperature < 0.1:
            with late.open("a") as file:
                file.write(f"{temperature}\n")
            time.sleep(1000)
        return with_normalize(embeddings, labels, temperature)

    for load in (External, load_loss):
        with closing(load(hangs, loss="supcon", limit=0.2, settings={"similarity": "cosine"})) as target:
            (limit,) = find_limits(target, target.claim)
        assert (limit.kind, limit.quantity, limit.at, limit.tried) == ("late", "temperature", None, 0.0625)
        words = "float64: took longer than 0.2 s (--limit) at temperature 0.0625: the search for limits stopped"
        assert limit.sentence == words
    assert late.read_text() == 2 * "0.0625\n"


def test_limits_that_are_found_before_a_call_exceeds_the_time_limit_are_kept() -> None:
    def hangs(embeddings: Tensor, labels: Tensor, temperature: float) -> Tensor:
        if embeddings.norm(dim=1).min() < 1e-6:
            time.sleep(1000)
        return without_maximum(embeddings, labels, temperature)

    limits = limits_of(hangs, limit=0.2)
    assert [(it.dtype, it.quantity, it.kind) for it in limits] == [
        ("float64", "temperature", "overflow"),
        ("float64", "norm", "late"),
    ]


@pytest.mark.parametrize(
    "name",
    [
        "supcon",
        pytest.param("nt_xent", marks=pytest.mark.slow),
        pytest.param("nt_bxent", marks=pytest.mark.slow),
        "supcon_epsilon",
        pytest.param("info_nce", marks=pytest.mark.slow),
    ],
)
@pytest.mark.quick(1)
def test_fast_loss_has_no_limit_in_its_range(name: str) -> None:
    loss, calls = getattr(fast, f"{name}_loss"), Counter[str]()

    @wraps(loss)
    def counted(*given: Any, **options: Any) -> Tensor:
        calls.update(["loss"])
        return loss(*given, **options)

    limits = limits_of(counted, name)
    assert {it.quantity for it in limits} == {"temperature", "norm", "logit"}
    assert not [it.sentence for it in limits if it.at is not None]
    assert one(limits, "float64", "temperature", "below").tried == pytest.approx(COLDEST)
    assert calls["loss"] <= 208  # without a limit there is no bisection


def test_built_in_temperature_and_normalised_rows_leave_nothing_to_vary() -> None:
    def built_in(embeddings: Tensor, labels: Tensor) -> Tensor:
        return with_normalize(embeddings, labels, 0.1)

    assert {it.quantity for it in limits_of(built_in, temperature=0.1)} == {"norm"}
    assert limits_of(built_in, temperature=0.1, normalised=True) == []


def test_check_finds_and_reports_limits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    some = {
        case: golden for case, golden in load_cases([], ("supcon",)).items() if case.id == "golden/supcon/temperature-1"
    }
    assert some
    monkeypatch.setattr(checking, "load_cases", lambda fixtures, losses=(): some)
    monkeypatch.setattr(checking.UsageJudge, "checks", lambda *_: [])
    found = checking.check_loss(with_normalize, "supcon", fuzz=0)
    words = [limit.sentence for limit in found.limits]
    assert "float32: norms below 1e-12 are clamped" in words
    report.show(found, cli.Output(), seconds=1.0)
    assert "float64, float32: norms below 1e-12 are clamped" in " ".join(capsys.readouterr().out.split())
    data = report.as_json(found)["limits"]
    assert [one["words"] for one in data] == words
    assert {"dtype", "quantity", "direction", "at", "tried", "kind", "part", "message"} <= set(data[0])
    assert checking.check_loss(with_normalize, "supcon", fuzz=0, cases=("golden/*",)).limits == []


def test_wrong_loss_has_no_limits() -> None:
    def wrong(embeddings: Tensor, labels: Tensor, temperature: float) -> Tensor:
        return 2 * with_normalize(embeddings, labels, temperature)

    assert limits_of(wrong) == []
