"""The kernels on batches of several tiles and row parts, compared with the exact form within the suite's bounds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: pip install triton")

from pairproof.conformance.implementations.fast import FastExact, FastTriton
from pairproof.conformance.suite.cases import Case
from pairproof.conformance.suite.records import Bounds, Outcome, Truth
from pairproof.conformance.truth import baseline as plain
from pairproof.conformance.truth.compare import compare
from pairproof.conformance.truth.tolerances import accumulating, bounds, unit_roundoff
from pairproof.fast import engine, nt_bxent_loss, nt_xent_loss, supcon_in_loss, supcon_loss
from pairproof.fast.engine import Batch, References, Rule, Targets

Tensor = torch.Tensor
Matrix = np.ndarray

HALVES = ("bfloat16", "float16")
DTYPES = ("float32", *HALVES)
DENOMINATORS = ("all", "one_positive", "only_negatives")

pytestmark = pytest.mark.usefixtures("small_tiles")


def rows_of(count: int, dim: int, dtype: str, seed: int = 1) -> Matrix:
    """Return random rows that the dtype represents exactly, as float64."""
    return rounded_to(torch.randn(count, dim, generator=torch.Generator().manual_seed(seed)), dtype)


def rounded_to(rows: Tensor, dtype: str) -> Matrix:
    """Return rows rounded to a dtype, as float64; subnormal numbers become 0."""
    kind = getattr(torch, dtype)
    rounded = rows.to(kind).double()
    return torch.where(rounded.abs() < torch.finfo(kind).tiny, 0.0, rounded).numpy()


def truth_of(case: Case) -> Truth:
    """Return the exact backend's float64 result, with the baseline's derivative with respect to each similarity."""
    found = FastExact({}, "cpu").evaluate(case, "float64")
    s = plain.similarities(case, {name: torch.tensor(matrix) for name, matrix in case.matrices.items()})
    s = s.detach().requires_grad_()
    each = plain.anchor_values(case, s / float(case.option("temperature")) + case.bias, s)[case.counted()]
    assert case.option("base_temperature") is None
    total = each.mean() if case.option("reduction") == "mean" else each.sum()
    (weights,) = torch.autograd.grad(total, s)
    return Truth(
        loss=tuple(found.values) if case.option("reduction") == "none" else found.values[0],
        anchors=found.anchors or {},
        gradient=found.gradient,
        similarities=lambda: None,
        sensitivity=lambda: weights.nan_to_num(0, 0, 0).numpy(),
        other_gradients=found.other_gradients,
    )


class Kernels(FastTriton):
    """The kernels, without values per anchor: only the bounds of the returned values are enlarged."""

    def evaluate(self, case: Case, dtype: str) -> Outcome:
        return replace(super().evaluate(case, dtype), anchors=None)


def enlarged_bounds(case: Case, true: Truth, dtype: str) -> Bounds:
    """Return the suite's bounds plus the rounding errors of the sums, which the suite counts as one rounding each."""
    found = bounds(case, true, dtype, narrowed=True)
    more = math.sqrt(case.shape[1]) * unit_roundoff(accumulating(dtype))
    return replace(found, values=[bound + more for bound in found.values])


def assert_right(case: Case, *dtypes: str) -> None:
    true = truth_of(case)
    assert true.gradient is not None
    assert np.isfinite(true.gradient).all()
    for dtype in dtypes:
        assert case.holds_in(dtype)
        found = Kernels({}, "cpu").evaluate(case, dtype)
        comparison = compare(case, true, found, enlarged_bounds(case, true, dtype), dtype)
        assert not comparison.first, f"{case.id}, {dtype}: {comparison.first}"


def layouts(count: int) -> dict[str, list[int]]:
    """Return labels in each order that the kernels treat differently."""
    place = torch.arange(count)
    shuffle = torch.randperm(count, generator=torch.Generator().manual_seed(count))
    found = {
        "sorted": place // 9,
        "unsorted": (place * 7 + place // 3) % 4,
        "one class": torch.zeros_like(place),
        "one without positives": torch.where(place == count // 2, -5, place % 2 * 2**40),
        "stacked views": place % ((count + 1) // 2),
        "interleaved views": place // 2,
        "no positives": shuffle,
    }
    return {name: labels.tolist() for name, labels in found.items()}


@dataclass(frozen=True)
class Formula:
    """A loss with options, and a function that makes its arguments from rows, labels and a dtype."""

    loss: str
    options: dict[str, Any]
    batch: Callable[[Matrix, list[int], str], tuple[dict[str, Any], dict[str, Matrix]]]


def by_labels(rows: Matrix, labels: list[int], dtype: str) -> tuple[dict[str, Any], dict[str, Matrix]]:
    return {"labels": labels}, {}


def by_mask(rows: Matrix, labels: list[int], dtype: str) -> tuple[dict[str, Any], dict[str, Matrix]]:
    """Return a mask that is not symmetric, with marks on the diagonal and rows without marks."""
    marks = torch.rand(len(rows), len(rows), generator=torch.Generator().manual_seed(len(rows))) < 0.1
    marks[3] = False
    marks[5, 5] = True
    return {"positives": marks.tolist()}, {}


def by_pairs(rows: Matrix, labels: list[int], dtype: str) -> tuple[dict[str, Any], dict[str, Matrix]]:
    """Return directed pairs, with duplicates and self pairs."""
    count = len(rows)
    pairs = [[i, (i * 5 + 2) % count] for i in range(count) if i % 4] + [[4, 4], [0, count - 1]]
    return {"positive_pairs": pairs + pairs[::3] + [[j, i] for i, j in pairs[::2]]}, {}


def by_partners(rows: Matrix, labels: list[int], dtype: str) -> tuple[dict[str, Any], dict[str, Matrix]]:
    """Return stacked partners if half the number of rows is even, else interleaved partners."""
    count = len(rows)
    half = count // 2
    stacked = [*range(half, count), *range(half)]
    return {"partners": stacked if half % 2 == 0 else [i ^ 1 for i in range(count)]}, {}


def by_references(rows: Matrix, labels: list[int], dtype: str) -> tuple[dict[str, Any], dict[str, Matrix]]:
    """Return more or fewer references than rows, and self rows for two thirds of the rows."""
    count, bank = len(rows), len(rows) + (11 if len(rows) % 2 else -9)
    own = [-1 if i % 3 == 0 else (i * 2 + 1) % bank for i in range(count)]
    given = {"labels": labels, "ref_labels": [labels[(k * 3) % count] for k in range(bank)], "self_rows": own}
    return given, {"ref_embeddings": rows_of(bank, rows.shape[1], dtype, seed=2)}


def ids_of(count: int) -> list[int]:
    """Return ids, four rows of each in mixed order. Those of id 1 + 2^32 equal those of id 1 in 32 bits."""
    ids = [(i * 7 % count) // 4 for i in range(count)]
    return [1 + 2**32 if each == 2 else each for each in ids]


def with_ids(
    batch: Callable[[Matrix, list[int], str], tuple[dict[str, Any], dict[str, Matrix]]],
) -> Callable[[Matrix, list[int], str], tuple[dict[str, Any], dict[str, Matrix]]]:
    """Return a function that adds ids to the arguments of another."""

    def found(rows: Matrix, labels: list[int], dtype: str) -> tuple[dict[str, Any], dict[str, Matrix]]:
        given, others = batch(rows, labels, dtype)
        given["ignored_ids"] = ids_of(len(rows))
        if others:
            given["ref_ignored_ids"] = ids_of(len(next(iter(others.values()))))[::-1]
        return given, others

    return found


def with_towers(rows: Matrix, labels: list[int], dtype: str) -> tuple[dict[str, Any], dict[str, Matrix]]:
    return {}, {"embeddings_b": rows_of(*rows.shape, dtype, seed=3)}


def with_labelled_towers(rows: Matrix, labels: list[int], dtype: str) -> tuple[dict[str, Any], dict[str, Matrix]]:
    """Return a shorter second tower."""
    given = {"labels": labels, "ref_labels": labels[-1:2:-1]}
    return given, {"embeddings_b": rows_of(len(rows) - 3, rows.shape[1], dtype, seed=3)}


def with_queue(rows: Matrix, labels: list[int], dtype: str) -> tuple[dict[str, Any], dict[str, Matrix]]:
    return {}, {
        **with_towers(rows, labels, dtype)[1],
        "negatives": rows_of(len(rows) + 13, rows.shape[1], dtype, seed=4),
    }


FORMULAS = {
    **{f"out {d}": Formula("supcon", {"denominator": d}, by_labels) for d in DENOMINATORS},
    **{f"in {d}": Formula("supcon_in", {"denominator": d}, by_labels) for d in DENOMINATORS},
    "out mask": Formula("supcon", {}, by_mask),
    "in mask one_positive": Formula("supcon_in", {"denominator": "one_positive"}, by_mask),
    "epsilon": Formula("supcon_epsilon", {}, by_labels),
    "epsilon mask": Formula("supcon_epsilon", {}, by_mask),
    "pairwise": Formula("nt_xent_pairwise", {}, by_labels),
    "partners": Formula("nt_xent", {}, by_partners),
    "pairs": Formula("nt_bxent", {}, by_pairs),
    "references": Formula("supcon", {}, by_references),
    "references in only_negatives": Formula("supcon_in", {"denominator": "only_negatives"}, by_references),
    "towers": Formula("info_nce", {}, with_towers),
    "queue": Formula("info_nce", {"direction": "a_to_b"}, with_queue),
    "sigmoid": Formula("sigmoid", {}, with_towers),
    "sigmoid labels": Formula("sigmoid", {"bias": -1.5}, with_labelled_towers),
    "sigmoid ids": Formula("sigmoid", {"bias": -1.5}, with_ids(with_labelled_towers)),
    **{f"out {d} ids": Formula("supcon", {"denominator": d}, with_ids(by_labels)) for d in DENOMINATORS},
    "in ids": Formula("supcon_in", {}, with_ids(by_labels)),
    "in one_positive ids": Formula("supcon_in", {"denominator": "one_positive"}, with_ids(by_labels)),
    "partners ids": Formula("nt_xent", {}, with_ids(by_partners)),
    "pairs ids": Formula("nt_bxent", {}, with_ids(by_pairs)),
    "references ids": Formula("supcon", {}, with_ids(by_references)),
}
SHAPES = ((33, 1), (65, 63), (34, 100), (33, 130), (33, 300), (34, 513))
LONG = ("out all", "in one_positive", "epsilon mask", "pairs", "queue")
"""Formulas that are also tested with more than 300 columns, for which the interpreter takes a second each."""
SIMILARITIES = (("cosine", 0.1), ("cosine", 0.01), ("dot", 1.0), ("cosine", 100.0), ("cosine", 1e-3))
"""Similarities and temperatures for unshifted exponentials, running maxima, arbitrary norms, and extreme logits."""


def alternating(values: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Return every pair of two values. One pair of each of ``values`` is not slow, with one of ``others`` in turn."""
    return [
        pytest.param(one, other, marks=() if k == number % len(others) else pytest.mark.slow)
        for number, one in enumerate(values)
        for k, other in enumerate(others)
    ]


def batches() -> Iterator[Any]:
    """Yield every formula with every shape; layouts, similarities and dtypes alternate to cover the combinations.

    All but a fifth of the batches are slow.
    """
    for (f, name), (k, (count, dim)) in itertools.product(enumerate(FORMULAS), enumerate(SHAPES)):
        if dim > 300 and name not in LONG:
            continue
        layout = list(layouts(count))[(f + k) % 7]
        similarity, temperature = SIMILARITIES[(f + 2 * k) % len(SIMILARITIES)]
        dtype = DTYPES[(f + k + k // 3) % len(DTYPES)]
        yield pytest.param(
            name,
            count + (count % 2 if name.startswith("partners") else 0),
            dim,
            layout,
            similarity,
            temperature,
            dtype,
            id=f"{name}-{count}x{dim}-{layout}-{similarity}-{temperature}-{dtype}".replace(" ", "_"),
            marks=pytest.mark.slow if (f + 3 * k) % 5 else (),
        )


def case_of(
    name: str, count: int, dim: int, layout: str, similarity: str, temperature: float, dtype: str, **options: Any
) -> Case:
    formula, labels = FORMULAS[name], layouts(count)[layout]
    rows = rows_of(count, dim, dtype)
    arguments, others = formula.batch(rows, labels, dtype)
    keywords = {"similarity": similarity, "temperature": temperature, "reduction": "none", **formula.options, **options}
    return Case(f"test/{name}", formula.loss, rows, arguments, keywords, others=others)


@pytest.mark.parametrize(("name", "count", "dim", "layout", "similarity", "temperature", "dtype"), list(batches()))
@pytest.mark.quick(10)
def test_batches_of_several_tiles_are_right(
    name: str, count: int, dim: int, layout: str, similarity: str, temperature: float, dtype: str
) -> None:
    assert_right(case_of(name, count, dim, layout, similarity, temperature, dtype), dtype)


def test_batches_cover_formulas_shapes_layouts_and_dtypes() -> None:
    """The batches above cover all shapes and most of the other combinations."""
    drawn, quick = [p.values for p in batches()], [p.values for p in batches() if not p.marks]
    assert {(v[0], v[2]) for v in drawn} == {
        (name, dim) for name in FORMULAS for _, dim in SHAPES if dim <= 300 or name in LONG
    }
    for place, number in ((3, 5), (5, 4), (6, 2)):
        for name in FORMULAS:
            assert len({v[place] for v in drawn if v[0] == name}) >= number
    for place, values in ((0, set(FORMULAS)), (2, {dim for _, dim in SHAPES}), (6, set(DTYPES))):
        assert {v[place] for v in quick} == values
    assert {(v[4], v[5]) for v in quick} == set(SIMILARITIES)
    assert {v[3] for v in quick} == set(layouts(4))


@pytest.mark.parametrize(("name", "dtype"), alternating(["out all", "in one_positive", "out mask", "pairs"], DTYPES))
@pytest.mark.quick(2)
def test_one_row_more_than_the_padding_is_right(name: str, dtype: str) -> None:
    """129 rows are one more than the kernels' padding."""
    assert_right(case_of(name, 129, 16, "unsorted", "cosine", 0.1, dtype), dtype)


@pytest.mark.parametrize(
    ("name", "temperature"),
    alternating(["out all", "in only_negatives", "out mask", "pairs", "epsilon"], [0.5, 0.01]),
)
def test_anchors_select_rows(name: str, temperature: float) -> None:
    for keep in ([i % 3 != 1 for i in range(40)], [i == 33 for i in range(40)]):
        case = case_of(name, 40, 8, "one without positives", "cosine", temperature, "float32", anchors=keep)
        assert_right(case, "float32")


@pytest.mark.parametrize(("name", "dtype"), alternating(["out all", "partners", "references", "pairs"], HALVES))
def test_rows_of_very_different_norms_are_right(name: str, dtype: str) -> None:
    """With cosine similarity, the norm of a row affects only the gradient of that row, as a divisor."""
    case = case_of(name, 34, 12, "unsorted", "cosine", 0.5, dtype, reduction="mean")
    norms = 2.0 ** np.linspace(-13, 13, 34).round()
    rows = rounded_to(torch.tensor(case.embeddings * norms[:, None]), dtype)
    assert_right(replace(case, embeddings=rows), dtype)


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=pytest.mark.slow) for dtype in DTYPES[:2]] + ["float16"])
@pytest.mark.parametrize("denominator", DENOMINATORS)
@pytest.mark.parametrize("loss", ["supcon", "supcon_in"])
def test_batches_with_tiny_weights_are_right(loss: str, denominator: str, dtype: str) -> None:
    """float16 can represent weights of 1e-7 or less only because the kernels scale them."""
    count, dim = 40, 64
    centres, noise = rows_of(8, dim, "float32"), rows_of(count, dim, "float32", seed=2)
    labels = [i % 8 for i in range(count)]
    rows = rounded_to(torch.tensor(centres[labels] + 0.1 * noise), dtype)
    keywords = {"temperature": 0.05, "denominator": denominator, "reduction": "mean"}
    case = Case("test/solved", loss, rows, {"labels": labels}, keywords)
    true = truth_of(case)
    apart = np.array(labels)[:, None] != np.array(labels)
    assert denominator == "only_negatives" or 0 < np.abs(true.weights[apart]).max() < 1e-6
    assert_right(case, dtype)


def counts_of(targets: Targets, references: References | None, rows: int, backend: Any) -> tuple[Tensor, Tensor]:
    z = torch.tensor(rows_of(rows, 4, "float32")).float()
    found = engine.anchor_values(Batch(z, targets, Rule("out", "cosine", 0.5), references or References()), backend)
    return found.positives, found.negatives


def batches_to_count(count: int, layout: str) -> list[tuple[Targets, References | None]]:
    """Return targets and references: labels in a layout, or other targets for the layout "none"."""
    bank = 35
    own = torch.arange(count) % (bank + 1) - 1
    others = References(torch.tensor(rows_of(bank, 4, "float32")).float(), own)
    if layout != "none":
        labels = torch.tensor(layouts(count)[layout])
        return [(Targets("labels", labels), None), (Targets("labels", labels, labels[:bank].flip(0)), others)]
    mask = torch.tensor(by_mask(np.zeros((count, 1)), [], "")[0]["positives"])
    pairs = torch.tensor(by_pairs(np.zeros((count, 1)), [], "")[0]["positive_pairs"])
    return [
        (Targets("mask", mask), None),
        (Targets("pairs", pairs), None),
        (Targets("mask", mask[:, :bank]), others),
        (Targets("partners", torch.arange(count) % bank), others),
        (Targets("none", torch.empty(0, dtype=torch.int64)), others),
    ]


@pytest.mark.parametrize("layout", [*layouts(4), "none"])
def test_numbers_of_positives_and_negatives_are_right(layout: str) -> None:
    count = 41
    for targets, references in batches_to_count(count, layout):
        found = counts_of(targets, references, count, "triton")
        true = counts_of(targets, references, count, "exact")
        assert found[0].dtype == found[1].dtype == torch.int64
        assert torch.equal(found[0], true[0]), targets.kind
        assert torch.equal(found[1], true[1]), targets.kind


def test_empty_pairs_and_empty_masks_are_right() -> None:
    none = np.zeros((0, 2)).tolist()
    rows = rows_of(35, 6, "float32")
    for similarity in ("cosine", "dot"):
        how = {"similarity": similarity, "reduction": "none", "temperature": 0.5}
        assert_right(Case("test/no pair", "nt_bxent", rows, {"positive_pairs": none}, how), "float32")
        blank = {"positives": [[False] * 35] * 35}
        assert_right(Case("test/no mark", "supcon", rows, blank, how), "float32")


@pytest.mark.parametrize("kind", [pytest.param(dtype, marks=pytest.mark.slow) for dtype in DTYPES[:2]] + ["float16"])
def test_strided_rows_and_masks_are_right(kind: str) -> None:
    """Rows and masks may be views: transposed, sliced, or with a step."""
    dtype = getattr(torch, kind)
    wide = torch.tensor(rows_of(7, 90, kind)).to(dtype)
    mask = torch.rand(80, 70, generator=torch.Generator().manual_seed(3)) < 0.2
    for z, marks in ((wide.T[:35], mask.T[:35, :35]), (wide.T[::2][:35, 1:6], mask[::2, ::2][:35, :35])):
        found, true = [], []
        for given, results in (((z, marks), found), ((z.contiguous(), marks.contiguous()), true)):
            leaf = given[0].detach().requires_grad_()
            for loss in (supcon_loss, supcon_in_loss):
                value = loss(leaf, positives=given[1], backend="triton")
                results += [value.detach(), *torch.autograd.grad(value, leaf)]
        for one, other in zip(found, true, strict=True):
            assert torch.equal(one, other)


def strided(given: Tensor) -> Tensor:
    """Return the same numbers as a view with stride 2."""
    return torch.stack((given, given.flip(0)), 1)[:, 0]


def test_strided_labels_and_anchors_are_right() -> None:
    """Labels are often a column of a larger tensor, such as ``batch[:, 0]``."""
    rows = torch.tensor(rows_of(40, 6, "float32")).float()
    references = rows[:36].flip(0).contiguous()
    numbers = torch.arange(40)
    labels, some = numbers % 3, numbers % 4 != 1
    own = torch.where(numbers < 36, 35 - numbers, -1)
    calls: dict[str, Callable[[Callable[[Tensor], Tensor]], Tensor]] = {
        "labels": lambda s: supcon_loss(rows, s(labels), backend="triton"),
        "one class": lambda s: supcon_loss(rows, s(torch.zeros(40, dtype=torch.int64)), backend="triton"),
        "anchors": lambda s: supcon_loss(rows, labels, anchors=s(some), backend="triton"),
        "partners": lambda s: nt_xent_loss(rows, s((numbers + 20) % 40), backend="triton"),
        "references": lambda s: supcon_loss(
            rows, s(labels), ref_embeddings=references, ref_labels=s(labels[:36]), self_rows=s(own), backend="triton"
        ),
        "partners among references": lambda s: nt_xent_loss(
            rows, s(numbers % 36), ref_embeddings=references, self_rows=s(own), backend="triton"
        ),
    }
    for name, call in calls.items():
        true = call(lambda given: given)
        assert torch.equal(call(strided), true), name
    one = torch.zeros(1, dtype=torch.int64).expand(40)
    assert torch.equal(supcon_loss(rows, one, backend="triton"), supcon_loss(rows, one.clone(), backend="triton"))


@pytest.mark.parametrize("loss", [nt_bxent_loss, nt_xent_loss])
def test_batch_of_two_rows_is_right(loss: Callable[..., Tensor]) -> None:
    """The smallest batch has a value and a gradient, which may be 0."""
    z = torch.tensor([[1.0, 2.0], [0.5, -1.0]])
    target = torch.tensor([1, 0]) if loss is nt_xent_loss else torch.tensor([[0, 1]])
    found, true = (loss(z, target, backend=backend, temperature=0.5) for backend in ("triton", "exact"))
    torch.testing.assert_close(found, true)
