"""Values of `pairproof.fast`, compared with the formulas in plain Python; their options and policies."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pairproof.fast import (
    interleaved_partners,
    nt_bxent_loss,
    nt_xent_loss,
    nt_xent_pairwise_loss,
    stacked_partners,
    supcon_epsilon_loss,
    supcon_in_loss,
    supcon_loss,
)

Tensor = torch.Tensor
Loss = Callable[..., Tensor]
NAN = math.nan
EMBEDDINGS = torch.tensor(
    [[1.0, 2.0, -1.0], [0.5, 2.5, 0.0], [-1.0, 0.3, 2.0], [1.5, -0.5, 0.5], [-0.7, 0.1, 1.0], [0.2, -1.0, -0.4]],
    dtype=torch.float64,
)
LABELS = [0, 0, 1, 0, 1, 2]
TAU = 0.6


def logits(similarity: str, temperature: float = TAU) -> list[list[float]]:
    rows = EMBEDDINGS.tolist()
    norms = [math.sqrt(sum(x * x for x in row)) if similarity == "cosine" else 1.0 for row in rows]
    return [
        [
            sum(a * b for a, b in zip(u, v, strict=True)) / (norm_u * norm_v) / temperature
            for v, norm_v in zip(rows, norms, strict=True)
        ]
        for u, norm_u in zip(rows, norms, strict=True)
    ]


def positives_and_negatives(i: int) -> tuple[list[int], list[int]]:
    positives = [j for j in range(6) if j != i and LABELS[j] == LABELS[i]]
    return positives, [j for j in range(6) if j != i and j not in positives]


def ratios(s: list[float], i: int, denominator: str) -> list[float]:
    positives, negatives = positives_and_negatives(i)
    below = sum(math.exp(s[n]) for n in negatives)
    above = sum(math.exp(s[p]) for p in positives)
    return [
        math.exp(s[p])
        / {"all": below + above, "one_positive": below + math.exp(s[p]), "only_negatives": below}[denominator]
        for p in positives
    ]


def expected(loss: str, similarity: str, denominator: str = "all") -> list[float]:
    values = []
    for i, s in enumerate(logits(similarity)):
        positives, negatives = positives_and_negatives(i)
        parts = ratios(s, i, denominator)
        if loss == "binary":
            attract = sum(math.log1p(math.exp(-s[p])) for p in positives) / (len(positives) + 1)
            values.append(attract + sum(math.log1p(math.exp(s[n])) for n in negatives) / len(negatives))
        elif not positives:
            values.append(0.0)
        elif loss == "out":
            values.append(-sum(math.log(part) for part in parts) / len(parts))
        elif loss == "in":
            values.append(-math.log(sum(parts) / len(parts)))
        else:
            top = 1 / TAU if similarity == "cosine" else max(s)
            e = [math.exp(x - top) + 1e-8 for x in s]
            below = sum(e) - e[i]
            values.append(-sum(math.log(e[p] / below) for p in positives) / (len(positives) + 1e-8))
    return values


PAIRS = torch.tensor([[i, j] for i in range(6) for j in positives_and_negatives(i)[0]])


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("denominator", ["all", "one_positive", "only_negatives"])
@pytest.mark.parametrize(("loss", "name"), [(supcon_loss, "out"), (supcon_in_loss, "in")])
def test_supcon_equals_the_formula_in_plain_python(loss: Loss, name: str, denominator: str, similarity: str) -> None:
    found = loss(
        EMBEDDINGS,
        torch.tensor(LABELS),
        temperature=TAU,
        similarity=similarity,
        denominator=denominator,
        reduction="none",
    )
    assert found.tolist() == pytest.approx(expected(name, similarity, denominator), rel=1e-13)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_other_losses_equal_their_formulas_in_plain_python(similarity: str) -> None:
    options: dict[str, Any] = {"temperature": TAU, "similarity": similarity, "reduction": "none"}
    labels = torch.tensor(LABELS)
    pairwise = nt_xent_pairwise_loss(EMBEDDINGS, labels, **options)
    assert pairwise.tolist() == pytest.approx(expected("out", similarity, "one_positive"), rel=1e-13)
    guarded = supcon_epsilon_loss(EMBEDDINGS, labels, **options)
    assert guarded.tolist() == pytest.approx(expected("epsilon", similarity), rel=1e-13)
    binary = nt_bxent_loss(EMBEDDINGS, PAIRS, **options)
    assert binary.tolist() == pytest.approx(expected("binary", similarity), rel=1e-13)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_nt_xent_is_the_cross_entropy_of_each_row(similarity: str) -> None:
    for partners in (interleaved_partners(6), stacked_partners(6)):
        s = torch.tensor(logits(similarity), dtype=torch.float64).fill_diagonal_(-math.inf)
        true = torch.nn.functional.cross_entropy(s, partners, reduction="none")
        found = nt_xent_loss(EMBEDDINGS, partners, temperature=TAU, similarity=similarity, reduction="none")
        torch.testing.assert_close(found, true, rtol=1e-10, atol=0)


def test_defaults_are_those_documented() -> None:
    labels = torch.tensor(LABELS)
    assert torch.equal(supcon_loss(EMBEDDINGS, labels), supcon_loss(EMBEDDINGS, labels, temperature=0.07))
    assert torch.equal(
        supcon_epsilon_loss(EMBEDDINGS, labels), supcon_epsilon_loss(EMBEDDINGS, labels, similarity="dot")
    )


SUPERVISED: list[Loss] = [supcon_loss, supcon_in_loss, supcon_epsilon_loss, nt_xent_pairwise_loss]


@pytest.mark.parametrize("loss", SUPERVISED)
def test_reductions_follow_the_policy_for_anchors_without_positives(loss: Loss) -> None:
    labels = torch.tensor(LABELS)
    each = loss(EMBEDDINGS, labels, temperature=TAU, reduction="none")
    assert each.shape == (6,)
    assert each[5] == 0
    for policy, mean, total, kept in (
        ("zero", each.mean(), each.sum(), each),
        ("drop", each[:5].mean(), each[:5].sum(), each[:5]),
        ("nan", torch.tensor(NAN).double(), torch.tensor(NAN).double(), torch.cat([each[:5], each.new_tensor([NAN])])),
    ):
        for reduction, true in (("mean", mean), ("sum", total), ("none", kept)):
            found = loss(EMBEDDINGS, labels, temperature=TAU, reduction=reduction, no_positive=policy)
            torch.testing.assert_close(found, true, rtol=1e-14, atol=0, equal_nan=True)


def test_mean_pairs_weighs_anchors_by_their_pairs() -> None:
    labels = torch.tensor(LABELS)
    each = nt_xent_pairwise_loss(EMBEDDINGS, labels, temperature=TAU, reduction="none")
    count = torch.tensor([2.0, 2, 1, 2, 1, 0], dtype=torch.float64)
    for policy, true in (
        ("zero", (each * count).sum() / 8),
        ("drop", (each * count).sum() / 8),
        ("nan", each.sum() * NAN),
    ):
        found = nt_xent_pairwise_loss(EMBEDDINGS, labels, temperature=TAU, reduction="mean_pairs", no_positive=policy)
        torch.testing.assert_close(found, true, rtol=1e-14, atol=0, equal_nan=True)
    anchors = torch.tensor([True, False, True, False, False, False])
    found = nt_xent_pairwise_loss(EMBEDDINGS, labels, temperature=TAU, reduction="mean_pairs", anchors=anchors)
    torch.testing.assert_close(found, (2 * each[0] + each[2]) / 3, rtol=1e-14, atol=0)


@pytest.mark.parametrize("loss", SUPERVISED)
def test_anchors_select_rows_and_every_row_remains_a_contrast(loss: Loss) -> None:
    labels = torch.tensor(LABELS)
    each = loss(EMBEDDINGS, labels, temperature=TAU, reduction="none")
    anchors = torch.tensor([True, False, False, True, False, True])
    kept = loss(EMBEDDINGS, labels, temperature=TAU, anchors=anchors, reduction="none")
    torch.testing.assert_close(kept, each[anchors], rtol=1e-15, atol=0)
    mean = loss(EMBEDDINGS, labels, temperature=TAU, anchors=anchors)
    torch.testing.assert_close(mean, each[anchors].mean(), rtol=1e-14, atol=0)
    dropped = loss(EMBEDDINGS, labels, temperature=TAU, anchors=anchors, no_positive="drop")
    torch.testing.assert_close(dropped, each[[0, 3]].mean(), rtol=1e-14, atol=0)
    # Row 5 has no positives, but is not an anchor here, so its policy must not apply.
    others = torch.tensor([True] * 5 + [False])
    assert bool(loss(EMBEDDINGS, labels, temperature=TAU, anchors=others, no_positive="nan").isfinite())


@pytest.mark.parametrize("loss", [supcon_loss, supcon_in_loss])
def test_rows_without_negatives_follow_the_policy(loss: Loss) -> None:
    same = torch.zeros(6, dtype=torch.int64)
    for policy, true in (("zero", 0.0), ("nan", NAN)):
        found = loss(EMBEDDINGS, same, denominator="only_negatives", no_negative=policy, reduction="none")
        assert found.tolist() == pytest.approx([true] * 6, nan_ok=True)
    assert loss(EMBEDDINGS, same, denominator="one_positive", no_negative="nan", reduction="none").tolist() == [0.0] * 6
    assert bool((loss(EMBEDDINGS, same, denominator="all", no_negative="nan", reduction="none") > 0).all())
    # Row 0 has no negatives but counts in the mean. Row 1 has one negative. Row 2 has no positives.
    positives = torch.tensor([[False, True, True], [True, False, False], [False, False, False]])
    few = EMBEDDINGS[:3]
    each = loss(few, positives=positives, denominator="only_negatives", reduction="none")
    assert each[0] == 0
    assert each[1] != 0
    torch.testing.assert_close(loss(few, positives=positives, denominator="only_negatives"), each.sum() / 3)
    dropped = loss(few, positives=positives, denominator="only_negatives", no_positive="drop")
    torch.testing.assert_close(dropped, each.sum() / 2)
    pair = loss(EMBEDDINGS[:2], torch.tensor([0, 1]), denominator="only_negatives", no_negative="nan")
    assert pair == 0


def test_nt_bxent_without_negatives_follows_the_policy() -> None:
    all_pairs = torch.cartesian_prod(torch.arange(6), torch.arange(6))
    each = nt_bxent_loss(EMBEDDINGS, all_pairs, temperature=TAU, reduction="none")
    s = logits("cosine")
    true = [sum(math.log1p(math.exp(-s[i][j])) for j in range(6) if j != i) / 6 for i in range(6)]
    assert each.tolist() == pytest.approx(true, rel=1e-13)
    assert bool(nt_bxent_loss(EMBEDDINGS, all_pairs, no_negative="nan").isnan())
    assert not bool(nt_bxent_loss(EMBEDDINGS, PAIRS, no_negative="nan").isnan())


def test_positive_pairs_are_directed_and_duplicates_and_self_pairs_are_ignored() -> None:
    plain = nt_bxent_loss(EMBEDDINGS, torch.tensor([[0, 1], [2, 3]]), reduction="none")
    redundant = nt_bxent_loss(EMBEDDINGS, torch.tensor([[2, 3], [0, 1], [0, 1], [4, 4]]), reduction="none")
    assert torch.equal(plain, redundant)
    reversed_pair = nt_bxent_loss(EMBEDDINGS, torch.tensor([[1, 0], [2, 3]]), reduction="none")
    assert plain[0] != reversed_pair[0]
    none = nt_bxent_loss(EMBEDDINGS, torch.empty(0, 2, dtype=torch.int64), temperature=TAU, reduction="none")
    s = logits("cosine")
    true = [sum(math.log1p(math.exp(s[i][j])) for j in range(6) if j != i) / 5 for i in range(6)]
    assert none.tolist() == pytest.approx(true, rel=1e-13)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_base_temperature_scales_the_result(reduction: str) -> None:
    labels = torch.tensor(LABELS)
    calls: list[Loss] = [lambda z, f=f, **o: f(z, labels, **o) for f in SUPERVISED]
    calls += [lambda z, **o: nt_xent_loss(z, stacked_partners(6), **o), lambda z, **o: nt_bxent_loss(z, PAIRS, **o)]
    for call in calls:
        plain = call(EMBEDDINGS, temperature=0.5, reduction=reduction)
        scaled = call(EMBEDDINGS, temperature=0.5, base_temperature=0.125, reduction=reduction)
        torch.testing.assert_close(scaled, 4 * plain, rtol=1e-15, atol=0)


@pytest.mark.parametrize("loss", SUPERVISED)
def test_mask_of_equal_labels_gives_the_loss_of_the_labels(loss: Loss) -> None:
    labels = torch.tensor(LABELS)
    mask = labels[:, None] == labels[None, :]
    by_labels = loss(EMBEDDINGS, labels, reduction="none")
    by_mask = loss(EMBEDDINGS, positives=mask, reduction="none")
    torch.testing.assert_close(by_mask, by_labels, rtol=1e-14, atol=1e-15)
    exactly = loss(EMBEDDINGS, labels, reduction="none", backend="exact")
    assert torch.equal(loss(EMBEDDINGS, positives=mask, reduction="none", backend="exact"), exactly)
    off_diagonal = mask & ~torch.eye(6, dtype=torch.bool)
    assert torch.equal(loss(EMBEDDINGS, positives=off_diagonal, reduction="none"), by_mask)
    one_way = mask.triu()
    directed = loss(EMBEDDINGS, positives=one_way, reduction="none")
    assert directed[0] == by_mask[0]
    assert directed[3] == 0


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
)
def test_labels_may_have_any_integer_dtype(dtype: torch.dtype) -> None:
    true = supcon_loss(EMBEDDINGS, torch.tensor(LABELS))
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    extremes = torch.tensor([[high, low, high - 1][label] for label in LABELS], dtype=dtype)
    assert torch.equal(supcon_loss(EMBEDDINGS, extremes), true)


def test_bool_labels_equal_integer_labels() -> None:
    flags = torch.tensor([True, True, False, True, False, False])
    assert torch.equal(supcon_loss(EMBEDDINGS, flags), supcon_loss(EMBEDDINGS, flags.int()))


def test_nt_xent_equals_supcon_with_one_positive_per_anchor() -> None:
    by_labels = supcon_loss(EMBEDDINGS, torch.arange(6) // 2, reduction="none")
    by_partner = nt_xent_loss(EMBEDDINGS, interleaved_partners(6), reduction="none")
    torch.testing.assert_close(by_partner, by_labels, rtol=1e-15, atol=0)
    assert torch.equal(
        nt_xent_loss(EMBEDDINGS, interleaved_partners(6).int()), nt_xent_loss(EMBEDDINGS, interleaved_partners(6))
    )


def test_loss_of_identical_rows_is_the_logarithm_of_the_number_of_contrasts() -> None:
    same = torch.tensor([[0.3, -0.4]]).repeat(8, 1)
    assert nt_xent_loss(same, stacked_partners(8)).item() == pytest.approx(math.log(7), rel=1e-6)


def test_tutorial_loss_is_constant_for_unnormalised_rows() -> None:
    """If every dot product of two rows is far below both squared norms, the loss is 2 ln 4 / 5 for any such input."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, 200, generator=generator) * 3
    loss = supcon_epsilon_loss(rows, torch.tensor([0, 0, 1, 2, 3]))
    assert loss.item() == pytest.approx(2 * math.log(4) / 5, rel=1e-6)
