"""The reference with reference rows and with two towers: equivalences and hand computation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flint import arb

from pairproof import fast, reference
from pairproof.conformance.truth import autodiff as tape
from pairproof.reference import info_nce, scipy_losses, supcon
from pairproof.reference.batch import evaluate_similarities
from pairproof.reference.similarity import similarity_matrix

ROWS = np.array([[1.0, 0.5, -0.25], [0.75, -1.0, 0.5], [-0.5, 0.25, 1.5], [1.25, 1.0, 0.125], [-1.0, -0.5, 0.375]])
OTHERS = np.array([[0.5, 0.5, 1.0], [-0.75, 1.0, 0.25], [1.0, -0.25, -0.5], [0.125, 1.5, -1.0], [0.25, -1.0, 0.75]])
QUEUE = np.array([[0.25, -0.75, 1.0], [1.0, 1.0, -0.5], [-1.0, 0.5, 0.125]])
LABELS = [0, 1, 0, 1, 2]
MASK = np.array([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [1, 0, 1, 0, 1], [1, 1, 1, 1, 1], [0, 0, 1, 0, 0]], dtype=bool)

LABEL_LOSSES = {name: getattr(reference, f"{name}_loss") for name in ("supcon", "supcon_in", "nt_xent_pairwise")}


def label_options(name: str) -> list[dict[str, Any]]:
    """Return every combination of the options that select a formula, and of the policies."""
    reductions = ["mean", "sum", "none", *(["mean_pairs"] if name == "nt_xent_pairwise" else [])]
    choices: dict[str, list[Any]] = {
        "similarity": ["cosine", "dot"],
        "reduction": reductions,
        "no_positive": ["zero", "drop", "nan"],
        "base_temperature": [None, 0.25],
    }
    if name != "nt_xent_pairwise":
        choices |= {"denominator": ["all", "one_positive", "only_negatives"], "no_negative": ["zero", "nan"]}
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def assert_same(found: reference.Result, expected: reference.Result) -> None:
    """Assert the same loss, the same value of each anchor, and the same positives and negatives."""
    np.testing.assert_array_equal(np.array(found.loss), np.array(expected.loss))
    assert found.terms.anchor_losses.keys() == expected.terms.anchor_losses.keys()
    assert (found.terms.positives, found.terms.negatives) == (expected.terms.positives, expected.terms.negatives)
    assert found.terms.counted == expected.terms.counted


@pytest.mark.parametrize("given", ["labels", "positives"])
@pytest.mark.parametrize("name", LABEL_LOSSES)
@pytest.mark.quick(2)
def test_batch_as_its_own_references_gives_the_plain_loss(name: str, given: str) -> None:
    loss = LABEL_LOSSES[name]
    plain: dict[str, Any] = {"labels": LABELS} if given == "labels" else {"positives": MASK}
    refs = {"ref_embeddings": ROWS, "self_rows": np.arange(5)} | ({"ref_labels": LABELS} if given == "labels" else {})
    for options, anchors in itertools.product(label_options(name), (None, np.array([True, False, True, True, True]))):
        options = {"temperature": 0.5, "anchors": anchors, **options}
        assert_same(loss(ROWS, **plain, **refs, **options), loss(ROWS, **plain, **options))


def test_batch_as_its_own_references_gives_the_plain_loss_of_partners() -> None:
    partners = [2, 3, 0, 1]
    refs = {"ref_embeddings": ROWS[:4], "self_rows": [0, 1, 2, 3]}
    for similarity, reduction, base in itertools.product(("cosine", "dot"), ("mean", "sum", "none"), (None, 0.25)):
        options: dict[str, Any] = {"similarity": similarity, "reduction": reduction, "base_temperature": base}
        found = reference.nt_xent_loss(ROWS[:4], partners, **refs, **options)
        assert_same(found, reference.nt_xent_loss(ROWS[:4], partners, **options))


def complex_step(loss: Callable[..., reference.Result], *matrices: np.ndarray) -> list[np.ndarray]:
    """Return the gradient with respect to each matrix: the imaginary part of the loss at x + 1e-200 i, over 1e-200."""
    gradients = []
    for k, matrix in enumerate(matrices):
        gradient = np.zeros_like(matrix)
        for index in np.ndindex(matrix.shape):
            moved = [m.astype(complex) for m in matrices]
            moved[k][index] += 1e-200j
            gradient[index] = np.imag(loss(*moved).loss) / 1e-200
        gradients.append(gradient)
    return gradients


def central_differences(loss: Callable[..., reference.Result], *matrices: np.ndarray) -> list[np.ndarray]:
    """Return the gradient with respect to each matrix: (f(x + h) - f(x - h)) / 2h."""
    gradients = []
    for k, matrix in enumerate(matrices):
        gradient = np.zeros_like(matrix)
        for index in np.ndindex(matrix.shape):
            values = []
            for step in (1e-6, -1e-6):
                moved = [m.copy() for m in matrices]
                moved[k][index] += step
                values.append(loss(*moved).loss)
            gradient[index] = (values[0] - values[1]) / 2e-6
        gradients.append(gradient)
    return gradients


def over_balls(loss: Callable[..., reference.Result], *matrices: np.ndarray) -> tuple[arb, list[np.ndarray]]:
    """Return the loss over balls, and its gradient with respect to each matrix from the tape over balls."""
    inputs = [tape.variables([[arb(x) for x in row] for row in matrix.tolist()]) for matrix in matrices]
    total = loss(*(np.array(rows, dtype=object) for rows in inputs)).loss
    gradients = [np.array([[float(x) for x in row] for row in tape.gradient(total, rows)]) for rows in inputs]
    return total.value, gradients


CALLS: dict[str, tuple[Callable[..., reference.Result], tuple[np.ndarray, ...]]] = {
    "supcon": (
        lambda z, r: reference.supcon_loss(
            z, LABELS, ref_embeddings=r, ref_labels=[0, 1, 1, 0, 0], self_rows=[-1, 2, -1, 0, 1], temperature=0.5
        ),
        (ROWS, OTHERS),
    ),
    "supcon_in": (
        lambda z, r: reference.supcon_in_loss(
            z, positives=MASK, ref_embeddings=r, denominator="one_positive", base_temperature=0.25, temperature=0.5
        ),
        (ROWS, OTHERS),
    ),
    "nt_xent": (
        lambda z, r: reference.nt_xent_loss(
            z, [2, 2, 0], ref_embeddings=r, self_rows=[0, -1, 1], similarity="dot", temperature=0.5
        ),
        (ROWS[:3], QUEUE),
    ),
    "nt_xent_pairwise": (
        lambda z, r: reference.nt_xent_pairwise_loss(
            z, LABELS, ref_embeddings=r, ref_labels=[1, 0, 0], reduction="mean_pairs", temperature=0.5
        ),
        (ROWS, QUEUE),
    ),
    "info_nce": (lambda a, b: reference.info_nce_loss(a, b, temperature=0.5), (ROWS, OTHERS)),
    "info_nce with negatives": (
        lambda a, b, c: reference.info_nce_loss(a, b, negatives=c, temperature=0.5),
        (ROWS, OTHERS, QUEUE),
    ),
    "info_nce one way": (
        lambda a, b, c: reference.info_nce_loss(a, b, negatives=c, direction="b_to_a", similarity="dot"),
        (ROWS, OTHERS, QUEUE),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_every_matrix_agree_across_three_methods(name: str) -> None:
    """The methods are the complex step, central differences, and the tape over balls."""
    loss, matrices = CALLS[name]
    value, proved = over_balls(loss, *matrices)
    plain = loss(*matrices).loss
    assert value.rel_accuracy_bits() > 30
    assert float(value) == pytest.approx(plain, rel=1e-13)
    for stepped, differences, true in zip(
        complex_step(loss, *matrices), central_differences(loss, *matrices), proved, strict=True
    ):
        assert np.abs(true).max() > 1e-2
        np.testing.assert_allclose(stepped, true, rtol=1e-10, atol=1e-13)
        np.testing.assert_allclose(differences, true, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", LABEL_LOSSES)
def test_gradients_of_anchors_and_references_add_up_to_the_plain_one(name: str) -> None:
    """The plain gradient is the sum of both parts, and neither part is zero."""
    labels = [0, 1, 0, 1, 0]

    def referring(z: np.ndarray, r: np.ndarray) -> reference.Result:
        loss = LABEL_LOSSES[name]
        return loss(z, labels, ref_embeddings=r, ref_labels=labels, self_rows=range(5), temperature=0.5)

    as_anchor, as_reference = complex_step(referring, ROWS, ROWS)
    (plain,) = complex_step(lambda z: LABEL_LOSSES[name](z, labels, temperature=0.5), ROWS)
    assert min(np.abs(as_anchor).max(), np.abs(as_reference).max()) > 1e-2
    np.testing.assert_allclose(as_anchor + as_reference, plain, rtol=1e-12, atol=1e-15)


SIMPLE = np.array([[1.0, 0.0], [0.0, 2.0]])
BANK = np.array([[2.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
E = math.e


def test_supcon_with_references_equals_hand_computation() -> None:
    """Under cosine the similarities with the bank are 1, 0, -1 for the first row and 0, 1, 0 for the second."""

    def values(**options: Any) -> list[float]:
        found = reference.supcon_loss(
            SIMPLE, [5, 7], ref_embeddings=BANK, ref_labels=[5, 5, 7], temperature=1.0, reduction="none", **options
        )
        return list(found.loss)

    first = [-math.log(E / (E + 1 + 1 / E)), -math.log(1 / (E + 1 + 1 / E))]
    second = -math.log(1 / (1 + E + 1))
    assert values() == pytest.approx([sum(first) / 2, second], rel=1e-14)
    # The first row is row 0 of the bank; the second is not in the bank.
    assert values(self_rows=[0, -1]) == pytest.approx([-math.log(1 / (1 + 1 / E)), second], rel=1e-14)
    one = [-math.log(E / (E + 1 / E)), -math.log(1 / (1 + 1 / E))]
    assert values(denominator="one_positive") == pytest.approx([sum(one) / 2, second], rel=1e-14)
    only = [-math.log(E / (1 / E)), -math.log(1 / (1 / E))]
    assert values(denominator="only_negatives") == pytest.approx([sum(only) / 2, -math.log(1 / (1 + E))], rel=1e-14)


def test_other_losses_with_references_equal_hand_computation() -> None:
    """With the same similarities at temperature 1/2, logits are 2, 0, -2 and 0, 2, 0."""
    bank: dict[str, Any] = {"ref_embeddings": BANK, "temperature": 0.5, "reduction": "none"}
    squared = E**2
    inside = reference.supcon_in_loss(SIMPLE, [5, 7], ref_labels=[5, 5, 7], **bank).loss
    total = squared + 1 + 1 / squared
    assert inside == pytest.approx([-math.log((squared + 1) / total / 2), -math.log(1 / (2 + squared))], rel=1e-14)
    pairs = reference.nt_xent_pairwise_loss(SIMPLE, [5, 7], ref_labels=[5, 5, 7], **bank | {"reduction": "mean_pairs"})
    costs = [
        -math.log(squared / (squared + 1 / squared)),
        -math.log(1 / (1 + 1 / squared)),
        -math.log(1 / (2 + squared)),
    ]
    assert pairs.loss == pytest.approx(sum(costs) / 3, rel=1e-14)
    partners = reference.nt_xent_loss(SIMPLE, [1, 1], self_rows=[2, 0], **bank).loss
    assert partners == pytest.approx([-math.log(1 / (squared + 1)), -math.log(squared / (squared + 1))], rel=1e-14)


def test_info_nce_equals_hand_computation() -> None:
    """The cosines of the towers are [[1, 0], [0, 1]]; those with the negative [-1, 0] are -1 and 0."""

    def values(**options: Any) -> list[float]:
        found = reference.info_nce_loss(SIMPLE, BANK[:2], temperature=1.0, reduction="none", **options)
        return list(found.loss)

    each = -math.log(E / (E + 1))
    assert values() == pytest.approx([each] * 4, rel=1e-14)
    queued = [-math.log(E / (E + 1 / E)), each]
    assert values(negatives=BANK[2:], direction="both") == pytest.approx(queued * 2, rel=1e-14)
    assert values(negatives=BANK[2:], direction="a_to_b") == pytest.approx(queued, rel=1e-14)
    # MoCo's loss, the default with negatives.
    assert values(negatives=BANK[2:]) == pytest.approx(queued, rel=1e-14)
    # Dot products [[2, 0], [0, 2]]; negatives -1 and 0 for a's rows, -2 and 0 for b's.
    dots = [
        -math.log(E**2 / (E**2 + 1 / E)),
        -math.log(E**2 / (E**2 + 1)),
        -math.log(E**2 / (E**2 + 1 / E**2)),
        -math.log(E**2 / (E**2 + 1)),
    ]
    queued_dots = values(negatives=BANK[2:], direction="both", similarity="dot")
    assert queued_dots == pytest.approx(dots, rel=1e-14)
    assert values(similarity="dot", direction="b_to_a") == pytest.approx([-math.log(E**2 / (E**2 + 1))] * 2, rel=1e-14)


TOWER_OPTIONS: list[dict[str, Any]] = [
    {"similarity": similarity, "base_temperature": base, "temperature": temperature}
    for similarity, base, temperature in itertools.product(("cosine", "dot"), (None, 0.25), (0.07, 0.5))
]


@pytest.mark.parametrize("negatives", [None, QUEUE], ids=["batch", "queue"])
@pytest.mark.parametrize("options", TOWER_OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_both_directions_average_the_two_directions(options: dict[str, Any], negatives: np.ndarray | None) -> None:
    def loss(a: np.ndarray, b: np.ndarray, direction: str, reduction: str = "mean") -> Any:
        found = reference.info_nce_loss(a, b, negatives=negatives, direction=direction, reduction=reduction, **options)
        return found.loss

    forth, back = loss(ROWS, OTHERS, "a_to_b"), loss(ROWS, OTHERS, "b_to_a")
    assert abs(forth - back) > 1e-3
    assert back == loss(OTHERS, ROWS, "a_to_b")
    assert loss(ROWS, OTHERS, "both") == pytest.approx((forth + back) / 2, rel=1e-14)
    each = {way: loss(ROWS, OTHERS, way, "none") for way in ("both", "a_to_b", "b_to_a")}
    assert each["both"] == each["a_to_b"] + each["b_to_a"]
    assert loss(ROWS, OTHERS, "both", "sum") == pytest.approx(sum(each["both"]), rel=1e-14)


@pytest.mark.parametrize("package", ["reference", "scipy", "fast"])
def test_direction_is_a_to_b_by_default_if_negatives_are_given(package: str) -> None:
    def values(*rows: np.ndarray, negatives: np.ndarray | None = None, **options: Any) -> list[float]:
        queue = {} if negatives is None else {"negatives": negatives}
        if package == "fast":
            tensors = [torch.tensor(z) for z in rows]
            found = fast.info_nce_loss(*tensors, **{k: torch.tensor(z) for k, z in queue.items()}, **options)
            return [float(x) for x in found]
        module: Any = reference if package == "reference" else scipy_losses
        return [float(x) for x in module.info_nce_loss(*rows, **queue, **options)[0]]

    one_way = values(ROWS, OTHERS, negatives=QUEUE, direction="a_to_b", reduction="none")
    assert values(ROWS, OTHERS, negatives=QUEUE, reduction="none") == one_way
    assert values(ROWS, OTHERS, negatives=QUEUE, direction="both", reduction="none")[:5] == pytest.approx(one_way)
    assert len(values(ROWS, OTHERS, negatives=QUEUE, direction="both", reduction="none")) == 10
    assert values(ROWS, OTHERS, reduction="none") == values(ROWS, OTHERS, direction="both", reduction="none")


@pytest.mark.parametrize("options", TOWER_OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_one_direction_equals_nt_xent_with_references(options: dict[str, Any]) -> None:
    towers = reference.info_nce_loss(ROWS, OTHERS, direction="a_to_b", **options)
    assert_same(towers, reference.nt_xent_loss(ROWS, range(5), ref_embeddings=OTHERS, **options))


@pytest.mark.parametrize("options", TOWER_OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_info_nce_with_negatives_equals_supcon_per_anchor(options: dict[str, Any]) -> None:
    """Each anchor is evaluated separately, with its positive and the queue as references."""
    found = reference.info_nce_loss(ROWS, OTHERS, negatives=QUEUE, direction="both", reduction="none", **options)
    pairs = [*zip(ROWS, OTHERS, strict=True), *zip(OTHERS, ROWS, strict=True)]
    separate = [
        reference.supcon_loss([z], [1], ref_embeddings=[p, *QUEUE], ref_labels=[1, 0, 0, 0], **options)
        for z, p in pairs
    ]
    assert found.loss == pytest.approx([result.loss for result in separate], rel=1e-14)
    terms = found.terms
    assert (len(terms.logits), {len(row) for row in terms.logits}) == (10, {8})
    assert terms.positives == [[i % 5] for i in range(10)]
    assert terms.negatives == [[5, 6, 7]] * 10
    assert terms.pairs[6, 1].members == (1, 5, 6, 7)
    assert terms.pairs[6, 1].log_numerator == separate[6].terms.logits[0][0]


def test_terms_of_towers_cover_both_directions() -> None:
    terms = reference.info_nce_loss(ROWS, OTHERS, similarity="dot", temperature=0.5).terms
    np.testing.assert_allclose(terms.similarity, np.concatenate([ROWS @ OTHERS.T, OTHERS @ ROWS.T]), rtol=1e-14)
    np.testing.assert_allclose(terms.logits, 2 * np.array(terms.similarity))
    assert terms.negatives[6] == [0, 2, 3, 4]
    assert terms.counted == list(range(10))
    single = reference.info_nce_loss(ROWS, OTHERS, direction="b_to_a", similarity="dot").terms
    np.testing.assert_allclose(single.similarity, OTHERS @ ROWS.T, rtol=1e-14)
    assert list(single.anchor_losses) == list(range(5))


def test_terms_of_references_follow_labels_and_self_rows() -> None:
    found = reference.supcon_loss(
        ROWS, LABELS, ref_embeddings=QUEUE, ref_labels=[1, 0, 0], self_rows=[2, -1, -1, 0, -1], similarity="dot"
    )
    np.testing.assert_allclose(found.terms.similarity, ROWS @ QUEUE.T, rtol=1e-14)
    assert found.terms.positives == [[1], [0], [1, 2], [], []]
    assert found.terms.negatives == [[0], [1, 2], [0], [1, 2], [0, 1, 2]]
    assert found.terms.pairs[0, 1].members == (0, 1)


def test_loss_of_one_pair_is_zero() -> None:
    found = reference.info_nce_loss(ROWS[:1], OTHERS[:1])
    assert found.loss == 0
    assert found.terms.negatives == [[], []]
    assert reference.nt_xent_loss(ROWS[:1], [0], ref_embeddings=OTHERS[:1]).loss == 0
    assert all(not gradient.any() for gradient in complex_step(reference.info_nce_loss, ROWS[:1], OTHERS[:1]))


@pytest.mark.parametrize("name", LABEL_LOSSES)
def test_anchor_whose_only_reference_is_itself_has_no_positives(name: str) -> None:
    """Its value follows the policy for anchors without positives."""
    call: dict[str, Any] = {"ref_embeddings": ROWS[:1], "ref_labels": [0], "self_rows": [0]}
    values = {
        (policy, reduction): LABEL_LOSSES[name](ROWS[:1], [0], no_positive=policy, reduction=reduction, **call).loss
        for policy in ("zero", "drop", "nan")
        for reduction in ("mean", "none")
    }
    assert values["zero", "mean"] == values["drop", "mean"] == 0
    assert (values["zero", "none"], values["drop", "none"]) == ([0], [])
    assert math.isnan(values["nan", "mean"])
    assert math.isnan(values["nan", "none"][0])


def test_anchor_with_only_positives_has_no_negatives() -> None:
    call: dict[str, Any] = {"ref_embeddings": QUEUE, "ref_labels": [0, 0, 1], "self_rows": [2, -1]}
    for loss in (reference.supcon_loss, reference.supcon_in_loss):
        each = loss(ROWS[:2], [0, 0], denominator="only_negatives", no_negative="nan", reduction="none", **call).loss
        assert [math.isnan(value) for value in each] == [True, False]
        assert loss(ROWS[:2], [0, 0], denominator="only_negatives", reduction="none", **call).loss[0] == 0


def test_rows_may_share_a_reference_and_number_types_may_differ() -> None:
    shared = reference.supcon_loss(ROWS, LABELS, ref_embeddings=OTHERS, ref_labels=LABELS, self_rows=[1] * 5)
    left_out = np.delete(OTHERS, 1, axis=0)
    expected = reference.supcon_loss(ROWS, LABELS, ref_embeddings=left_out, ref_labels=np.delete(LABELS, 1))
    assert shared.loss == expected.loss
    balls = np.array([[arb(x) for x in row] for row in OTHERS.tolist()], dtype=object)
    mixed = reference.info_nce_loss(ROWS, balls).loss
    assert float(mixed) == pytest.approx(reference.info_nce_loss(ROWS, OTHERS).loss, rel=1e-13)
    single = reference.info_nce_loss(ROWS, OTHERS.astype(np.float32)).loss
    assert single == reference.info_nce_loss(ROWS, OTHERS).loss


def test_evaluate_similarities_accepts_sets_of_columns() -> None:
    """Rows and columns differ, and A(i) is given as lists."""
    matrix = similarity_matrix(ROWS.tolist(), "cosine", QUEUE.tolist())
    assert [[matrix[4][2]]] == similarity_matrix([ROWS[4].tolist()], "cosine", [QUEUE[2].tolist()])
    loss, terms = evaluate_similarities(
        supcon.supcon_anchor,
        matrix,
        [[True, False, True]] * 5,
        anchors=[1, 4],
        members=[[0, 1], [0, 1], [1, 2], [0, 1, 2], [1]],
        temperature=0.5,
        no_positive="zero",
        reduction="none",
    )
    assert terms.positives == [[0], [0], [2], [0, 2], []]
    assert terms.negatives == [[1], [1], [1], [1], [1]]
    one, other, _ = map(math.exp, terms.logits[1])
    assert loss == pytest.approx([-math.log(one / (one + other)), 0.0], rel=1e-13)
    towers = evaluate_similarities(
        info_nce.info_nce_anchor,
        matrix,
        [[j == i % 2 for j in range(3)] for i in range(5)],
        members=[[i % 2, 2] for i in range(5)],
        temperature=0.5,
        reduction="none",
    )
    found = [math.log1p(math.exp(2 * (row[2] - row[i % 2]))) for i, row in enumerate(matrix)]
    assert towers.loss == pytest.approx(found, rel=1e-13)
