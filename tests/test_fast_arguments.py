"""Bad input to ``pairproof.fast``: one clear error each, naming the argument, what is expected and what was got."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pairproof.fast import (
    NTBXentLoss,
    NTXentLoss,
    NTXentPairwiseLoss,
    SupConEpsilonLoss,
    SupConInLoss,
    SupConLoss,
    kernels,
    nt_bxent_loss,
    nt_xent_loss,
    nt_xent_pairwise_loss,
    supcon_epsilon_loss,
    supcon_in_loss,
    supcon_loss,
)

Tensor = torch.Tensor
Loss = Callable[..., Tensor]
Z = torch.tensor([[1.0, 2.0], [0.5, -1.0], [-2.0, 0.1], [0.3, 0.4]])
GOOD: dict[Loss, dict[str, Any]] = {
    supcon_loss: {"labels": torch.tensor([0, 0, 1, 1])},
    supcon_in_loss: {"labels": torch.tensor([0, 0, 1, 1])},
    supcon_epsilon_loss: {"labels": torch.tensor([0, 0, 1, 1]), "similarity": "cosine"},
    nt_xent_pairwise_loss: {"labels": torch.tensor([0, 0, 1, 1])},
    nt_xent_loss: {"partners": torch.tensor([1, 0, 3, 2])},
    nt_bxent_loss: {"positive_pairs": torch.tensor([[0, 1], [2, 3]])},
}
LABELLED = [supcon_loss, supcon_in_loss, supcon_epsilon_loss, nt_xent_pairwise_loss]


def spoiled(row: int, value: float) -> Tensor:
    rows = Z.clone()
    rows[row, 1] = value
    return rows


def zeroed(row: int) -> Tensor:
    rows = Z.clone()
    rows[row] = 0
    return rows


ANY_LOSS: list[tuple[dict[str, Any], type[Exception], str, list[str]]] = [
    ({"embeddings": Z[0]}, ValueError, "embeddings", ["[N, D]", "[2]"]),
    ({"embeddings": Z[None]}, ValueError, "embeddings", ["[N, D]", "[1, 4, 2]"]),
    ({"embeddings": Z[:0]}, ValueError, "embeddings", ["at least 2", "[0, 2]"]),
    ({"embeddings": Z[:1]}, ValueError, "embeddings", ["at least 2", "[1, 2]"]),
    ({"embeddings": Z[:, :0]}, ValueError, "embeddings", ["at least 1", "[4, 0]"]),
    ({"embeddings": Z.long()}, TypeError, "embeddings", ["floating", "int64"]),
    ({"embeddings": Z.bool()}, TypeError, "embeddings", ["floating", "bool"]),
    ({"embeddings": Z.cfloat()}, TypeError, "embeddings", ["floating", "complex64"]),
    ({"embeddings": Z.tolist()}, TypeError, "embeddings", ["tensor", "list"]),
    ({"embeddings": Z.numpy()}, TypeError, "embeddings", ["tensor", "ndarray"]),
    ({"embeddings": spoiled(3, torch.nan)}, ValueError, "embeddings", ["finite", "row 3"]),
    ({"embeddings": spoiled(1, torch.inf)}, ValueError, "embeddings", ["finite", "row 1"]),
    ({"embeddings": spoiled(2, -torch.inf)}, ValueError, "embeddings", ["finite", "row 2"]),
    ({"embeddings": zeroed(2)}, ValueError, "embeddings", ["zero", "row 2"]),
    ({"embeddings": -zeroed(0)}, ValueError, "embeddings", ["zero", "row 0"]),
    ({"anchors": torch.ones(3, dtype=torch.bool)}, ValueError, "anchors", ["[4]", "[3]"]),
    ({"anchors": torch.ones(4, 1, dtype=torch.bool)}, ValueError, "anchors", ["[4]", "[4, 1]"]),
    ({"anchors": torch.ones(4)}, TypeError, "anchors", ["bool", "float32"]),
    ({"anchors": [True] * 4}, TypeError, "anchors", ["tensor", "list"]),
    ({"anchors": torch.ones(4, dtype=torch.bool, device="meta")}, ValueError, "anchors", ["device", "meta", "cpu"]),
    ({"temperature": 0.0}, ValueError, "temperature", ["positive", "0.0"]),
    ({"temperature": -0.5}, ValueError, "temperature", ["positive", "-0.5"]),
    ({"temperature": float("nan")}, ValueError, "temperature", ["positive", "nan"]),
    ({"temperature": float("inf")}, ValueError, "temperature", ["positive", "inf"]),
    ({"temperature": 10**400}, ValueError, "temperature", ["positive"]),
    ({"temperature": "0.1"}, TypeError, "temperature", ["number", "str"]),
    ({"temperature": None}, TypeError, "temperature", ["number", "NoneType"]),
    ({"temperature": True}, TypeError, "temperature", ["number", "bool"]),
    ({"temperature": torch.tensor([0.1])}, ValueError, "temperature", ["without dimension", "[1]"]),
    ({"temperature": torch.tensor(1)}, TypeError, "temperature", ["floating", "int64"]),
    ({"temperature": torch.tensor(0.0)}, ValueError, "temperature", ["positive", "0.0"]),
    ({"temperature": torch.tensor(float("nan"))}, ValueError, "temperature", ["positive", "nan"]),
    ({"backend": "fastest"}, ValueError, "backend", ["auto", "dense", "tiled", "exact", "triton", "fastest"]),
    ({"base_temperature": 0}, ValueError, "base_temperature", ["positive", "0"]),
    ({"base_temperature": float("inf")}, ValueError, "base_temperature", ["positive", "inf"]),
    ({"base_temperature": "1"}, TypeError, "base_temperature", ["number", "str"]),
    ({"base_temperature": False}, TypeError, "base_temperature", ["number", "bool"]),
    ({"similarity": "euclid"}, ValueError, "similarity", ["'cosine'", "'dot'", "'euclid'"]),
    ({"similarity": None}, ValueError, "similarity", ["'cosine'", "'dot'", "None"]),
    ({"reduction": "average"}, ValueError, "reduction", ["'mean'", "'sum'", "'none'", "'average'"]),
]
LABELLED_LOSS: list[tuple[dict[str, Any], type[Exception], str, list[str]]] = [
    ({"labels": torch.tensor([0, 0, 1])}, ValueError, "labels", ["one label per embedding", "[4]", "[3]"]),
    ({"labels": torch.zeros(4, 1, dtype=torch.int64)}, ValueError, "labels", ["[4]", "[4, 1]"]),
    ({"labels": torch.zeros(4)}, TypeError, "labels", ["integer", "float32"]),
    ({"labels": [0, 0, 1, 1]}, TypeError, "labels", ["tensor", "list"]),
    ({"labels": torch.zeros(4, dtype=torch.int64, device="meta")}, ValueError, "labels", ["device", "meta"]),
    ({"labels": None}, ValueError, "labels", ["exactly one", "positives", "neither"]),
    ({"positives": torch.eye(4, dtype=torch.bool)}, ValueError, "labels", ["exactly one", "positives", "both"]),
    ({"labels": None, "positives": torch.eye(3, dtype=torch.bool)}, ValueError, "positives", ["[4, 4]", "[3, 3]"]),
    ({"labels": None, "positives": torch.ones(4, dtype=torch.bool)}, ValueError, "positives", ["[4, 4]", "[4]"]),
    ({"labels": None, "positives": torch.eye(4)}, TypeError, "positives", ["bool", "float32"]),
    ({"labels": None, "positives": [[True]]}, TypeError, "positives", ["tensor", "list"]),
    (
        {"labels": None, "positives": torch.ones(4, 4, dtype=torch.bool, device="meta")},
        ValueError,
        "positives",
        ["device", "meta"],
    ),
    ({"no_positive": "skip"}, ValueError, "no_positive", ["'zero'", "'drop'", "'nan'", "'skip'"]),
]
DENOMINATED: list[tuple[dict[str, Any], type[Exception], str, list[str]]] = [
    ({"denominator": "some"}, ValueError, "denominator", ["'all'", "'one_positive'", "'only_negatives'", "'some'"]),
    ({"no_negative": "drop"}, ValueError, "no_negative", ["'zero'", "'nan'", "'drop'"]),
    ({"reduction": "mean_pairs"}, ValueError, "reduction", ["'mean'", "'sum'", "'none'", "'mean_pairs'"]),
]
PARTNERED: list[tuple[dict[str, Any], type[Exception], str, list[str]]] = [
    ({"partners": torch.tensor([1, 0, 3])}, ValueError, "partners", ["[4]", "[3]"]),
    ({"partners": torch.tensor([[1, 0, 3, 2]])}, ValueError, "partners", ["[4]", "[1, 4]"]),
    ({"partners": torch.tensor([1.0, 0.0, 3.0, 2.0])}, TypeError, "partners", ["integer", "float32"]),
    ({"partners": torch.ones(4, dtype=torch.bool)}, TypeError, "partners", ["integer", "bool"]),
    ({"partners": [1, 0, 3, 2]}, TypeError, "partners", ["tensor", "list"]),
    ({"partners": torch.tensor([1, 0, 4, 2])}, ValueError, "partners", ["range", "got 4", "row 2"]),
    ({"partners": torch.tensor([1, 0, 3, -2])}, ValueError, "partners", ["range", "got -2", "row 3"]),
    ({"partners": torch.tensor([1, 0, 2, 3])}, ValueError, "partners", ["itself", "row 2"]),
    ({"partners": torch.tensor([1, 2, 3, 0])}, ValueError, "partners", ["mutual", "row 0"]),
    ({"partners": torch.tensor([1, 0, 3, 2], device="meta")}, ValueError, "partners", ["device", "meta"]),
]
PAIRED: list[tuple[dict[str, Any], type[Exception], str, list[str]]] = [
    ({"positive_pairs": torch.tensor([0, 1])}, ValueError, "positive_pairs", ["[M, 2]", "[2]"]),
    ({"positive_pairs": torch.tensor([[0, 1, 2]])}, ValueError, "positive_pairs", ["[M, 2]", "[1, 3]"]),
    ({"positive_pairs": torch.tensor([[0.0, 1.0]])}, TypeError, "positive_pairs", ["integer", "float32"]),
    ({"positive_pairs": [[0, 1]]}, TypeError, "positive_pairs", ["tensor", "list"]),
    (
        {"positive_pairs": torch.tensor([[0, 1], [2, 4]])},
        ValueError,
        "positive_pairs",
        ["range", "position 1", "[2, 4]"],
    ),
    ({"positive_pairs": torch.tensor([[-1, 1]])}, ValueError, "positive_pairs", ["range", "position 0"]),
    ({"positive_pairs": torch.tensor([[0, 1]], device="meta")}, ValueError, "positive_pairs", ["device", "meta"]),
    ({"no_negative": "drop"}, ValueError, "no_negative", ["'zero'", "'nan'", "'drop'"]),
]
TABLE = [
    *((loss, *row) for loss in GOOD for row in ANY_LOSS),
    *((loss, *row) for loss in LABELLED for row in LABELLED_LOSS),
    *((loss, *row) for loss in (supcon_loss, supcon_in_loss) for row in DENOMINATED),
    *((nt_xent_loss, *row) for row in PARTNERED),
    *((nt_bxent_loss, *row) for row in PAIRED),
]


@pytest.mark.parametrize(
    ("loss", "change", "error", "argument", "phrases"),
    TABLE,
    ids=[f"{row[0].__name__}-{'-'.join(row[1])}-{k}" for k, row in enumerate(TABLE)],
)
def test_bad_arguments(
    loss: Loss, change: dict[str, Any], error: type[Exception], argument: str, phrases: list[str]
) -> None:
    arguments = {"embeddings": Z, **GOOD[loss], **change}
    with pytest.raises(error) as caught:
        loss(**arguments)
    message = str(caught.value)
    assert message.startswith(f"{argument}: expected ")
    assert "\n" not in message
    for phrase in phrases:
        assert phrase in message


@pytest.mark.parametrize("loss", list(GOOD))
def test_the_good_arguments_are_good(loss: Loss) -> None:
    assert bool(loss(Z, **GOOD[loss]).isfinite())
    assert bool(loss(Z, **GOOD[loss], temperature=1, base_temperature=2, validate=True).isfinite())


@pytest.mark.parametrize("loss", list(GOOD))
def test_a_zero_row_is_fine_under_dot(loss: Loss) -> None:
    rows = zeroed(1).requires_grad_()
    value = loss(rows, **{**GOOD[loss], "similarity": "dot"})
    value.backward()
    assert bool(value.isfinite())
    assert rows.grad is not None
    assert bool(rows.grad.isfinite().all())


def refused(loss: Loss, rows: Tensor, **arguments: Any) -> str:
    with pytest.raises(ValueError, match=r'^backend="triton": ') as caught:
        loss(rows, **arguments, backend="triton")
    return str(caught.value).removeprefix('backend="triton": ')


@pytest.mark.parametrize("loss", list(GOOD))
def test_the_kernels_say_what_they_cannot_take(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each refusal is a ValueError that says what would be taken, whichever loss asks."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    told = "it needs embeddings on a CUDA device, got cpu (with TRITON_INTERPRET=1 its interpreter takes those)"
    assert refused(loss, Z, **GOOD[loss]) == told
    assert "take float32, bfloat16 and float16, not float64" in refused(loss, Z.double(), **GOOD[loss])
    assert "take at most 1024 columns, got 1025" in refused(loss, torch.ones(4, 1025), **GOOD[loss])
    on_meta = {key: value.to("meta") if isinstance(value, Tensor) else value for key, value in GOOD[loss].items()}
    assert refused(loss, Z.to("meta"), **on_meta) == "it needs embeddings on a CUDA device, got meta"


def test_the_kernels_need_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(kernels, "_importable", lambda: False)
    assert refused(supcon_loss, Z, **GOOD[supcon_loss]) == "triton is not installed: pip install triton"
    # Whoever asks for nothing is served without.
    assert bool(supcon_loss(Z, **GOOD[supcon_loss]).isfinite())


def test_every_kind_of_refusal_names_what_would_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    given = (Z, Z.double(), Z.to(torch.float8_e4m3fn), torch.ones(4, 2000))
    assert all(kernels.refusal(rows) for rows in given)
    assert not any(kernels.chosen(rows) for rows in given)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(kernels, "_importable", lambda: True)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert kernels.refusal(Z.to(dtype)) is None
        # The interpreter serves tests: nobody is given it without asking.
        assert not kernels.chosen(Z.to(dtype))


@pytest.mark.parametrize("loss", list(GOOD))
def test_everything_but_the_first_two_arguments_is_keyword_only(loss: Loss) -> None:
    with pytest.raises(TypeError, match="positional"):
        loss(Z, *(value for key, value in GOOD[loss].items() if key != "similarity"), None)


def test_values_are_not_read_on_a_device_without_them() -> None:
    loss = supcon_loss(torch.empty(4, 2, device="meta"), torch.zeros(4, dtype=torch.int64, device="meta"))
    assert loss.shape == ()
    assert loss.device.type == "meta"


@pytest.mark.parametrize(
    ("module", "options", "error", "argument"),
    [
        (module, options, error, argument)
        for module in (SupConLoss, SupConInLoss, SupConEpsilonLoss, NTXentLoss, NTXentPairwiseLoss, NTBXentLoss)
        for options, error, argument in (
            ({"temperature": -1.0}, ValueError, "temperature"),
            ({"temperature": "low"}, TypeError, "temperature"),
            ({"base_temperature": 0.0}, ValueError, "base_temperature"),
            ({"similarity": "l2"}, ValueError, "similarity"),
            ({"reduction": "max"}, ValueError, "reduction"),
        )
    ]
    + [
        (SupConLoss, {"denominator": "none"}, ValueError, "denominator"),
        (SupConInLoss, {"no_negative": "drop"}, ValueError, "no_negative"),
        (SupConEpsilonLoss, {"no_positive": "skip"}, ValueError, "no_positive"),
        (NTXentPairwiseLoss, {"no_positive": "skip"}, ValueError, "no_positive"),
        (NTXentLoss, {"reduction": "mean_pairs"}, ValueError, "reduction"),
        (NTBXentLoss, {"no_negative": "drop"}, ValueError, "no_negative"),
    ],
)
def test_modules_check_their_options_when_made(
    module: type[torch.nn.Module], options: dict[str, Any], error: type[Exception], argument: str
) -> None:
    with pytest.raises(error, match=re.escape(f"{argument}: expected")):
        module(**options)
