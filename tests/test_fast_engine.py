"""The engine of `pairproof.fast`: its forms agree with each other, with the exact form and with plain formulas."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

from pairproof.conformance.truth.rounding import Dispatch
from pairproof.fast import (
    InfoNCELoss,
    NTBXentLoss,
    NTXentLoss,
    NTXentPairwiseLoss,
    SupConEpsilonLoss,
    SupConInLoss,
    SupConLoss,
    info_nce_loss,
    interleaved_partners,
    nt_bxent_loss,
    nt_xent_loss,
    nt_xent_pairwise_loss,
    sigmoid_loss,
    stacked_partners,
    supcon_epsilon_loss,
    supcon_in_loss,
    supcon_loss,
)
from pairproof.fast.engine import (
    Batch,
    References,
    Rule,
    Similarity,
    Targets,
    anchor_values,
    pair_logits,
    pairs,
    plan,
    rowwise,
    tiles_of,
)
from pairproof.fast.engine.spec import Plan

Tensor = torch.Tensor
Call = Callable[..., Tensor]

DENOMINATORS = ("all", "one_positive", "only_negatives")
SIMILARITIES = ("cosine", "dot")
TEMPERATURES = (1e-3, 0.02, 0.1, 1.0, 1e3)
ENGINES: dict[str, tuple[str, int | None]] = {
    "dense": ("dense", None),
    "tiled by 4": ("tiled", 4),
    "tiled by 6": ("tiled", 6),
    "auto": ("auto", None),
    "exact": ("exact", None),
}
FORMS = [name for name in ENGINES if name != "exact"]
SEAMS = ["dense", "tiled by 4", "exact"]
"""One engine of each kind, for tests in which all engines would take too long."""
KINDS_FIRST = [form if form in SEAMS else pytest.param(form, marks=pytest.mark.slow) for form in ENGINES]
"""Parameters of a test that takes seconds: the engines of a kind that is already tested are left to make test-all."""


@contextmanager
def engine(name: str) -> Iterator[str]:
    """Yield the backend of an engine; within the context, tiles have the size of that engine."""
    backend, rows = ENGINES[name]
    with nullcontext() if rows is None else tiles_of(rows):
        yield backend


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(rows: int, dim: int = 4, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return random rows that float32 represents exactly, so that both dtypes can be compared."""
    return torch.randn(rows, dim, generator=seeded(seed)).to(dtype)


def trained_like(rows: int, dim: int = 16, seed: int = 5) -> Tensor:
    """Return two stacked views; the cosine of a pair is about 0.95, other cosines are about 0."""
    base = F.normalize(torch.randn(rows // 2, dim, generator=seeded(seed), dtype=torch.float64))
    noise = torch.randn(rows, dim, generator=seeded(seed + 1), dtype=torch.float64) * (0.23 / dim**0.5)
    return (base.repeat(2, 1) + noise).float()


def layouts(count: int) -> dict[str, Tensor]:
    """Return labels for every code path: few classes, pairs, rows without positives, extreme values."""
    place = torch.arange(count)
    shuffle = torch.randperm(count, generator=seeded(count))
    names = torch.tensor([-(2**63), 2**63 - 1, 0, -7, 10**12])
    return {
        "balanced": place % 3,
        "unbalanced": (place >= count - 3) * (place - count + 4),
        "one without positives": torch.where(place == count // 2, 9, place % 2),
        "one class": torch.zeros_like(place),
        "distinct": shuffle,
        "stacked views": place % ((count + 1) // 2),
        "interleaved views": place // 2,
        "shuffled views": (place // 2)[shuffle],
        "pairs and a class of four": (place // 2).clamp(max=max(0, count // 2 - 2)),
        "unsorted and extreme": names[(place * 7 + place // 3) % 5],
    }


def shuffled_partners(count: int) -> Tensor:
    order = torch.randperm(count, generator=seeded(count + 1))
    partners = torch.empty_like(order)
    partners[order[0::2]], partners[order[1::2]] = order[1::2], order[0::2]
    return partners


def pairs_of(labels: Tensor) -> Tensor:
    """Return the pairs of equal labels, with diagonal entries, duplicates, and one pair in one direction only."""
    pairs = (labels[:, None] == labels).nonzero()
    return torch.cat((pairs, pairs[::2], torch.tensor([[0, len(labels) - 1]])))


LABELLED: dict[str, Call] = {
    **{f"out {d}": partial(supcon_loss, denominator=d) for d in DENOMINATORS},
    **{f"in {d}": partial(supcon_in_loss, denominator=d) for d in DENOMINATORS},
    "epsilon": supcon_epsilon_loss,
    "pairwise": nt_xent_pairwise_loss,
}
BY_MASK: dict[str, Call] = {name: lambda z, t, f=f, **o: f(z, positives=t, **o) for name, f in LABELLED.items()}


def cases(count: int) -> Iterator[tuple[str, Call, Tensor]]:
    """Yield every loss with every layout of its targets: a name, the loss, the targets."""
    for (layout, labels), (name, loss) in itertools.product(layouts(count).items(), LABELLED.items()):
        yield f"{name}, {layout}", loss, labels
    for layout, labels in layouts(count).items():
        yield f"binary, {layout}", nt_bxent_loss, pairs_of(labels)
    yield "binary, no pair", nt_bxent_loss, torch.empty((0, 2), dtype=torch.int64)
    if count % 2 == 0:
        for make in (stacked_partners, interleaved_partners, shuffled_partners):
            yield f"partners, {make.__name__}", nt_xent_loss, make(count)
    mask = torch.rand(count, count, generator=seeded(count + 2)) < 0.4
    for name, loss in BY_MASK.items():
        yield f"{name}, asymmetric mask", loss, mask


def part(cases: Iterable[Any], step: int, first: int) -> list[Any]:
    """Return every ``step``-th case, beginning at ``first`` modulo ``step``; other tests begin at other cases."""
    return list(cases)[first % step :: step]


part_or_all = pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])


def spread(count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return upstream gradients that are all different."""
    return torch.linspace(-1, 2, count, dtype=dtype) + 0.07


def both(loss: Call, inputs: Tensor | tuple[Tensor, ...], *rest: Any, **options: Any) -> tuple[Tensor, ...]:
    """Return the anchors' values, and the gradients of their weighted sum with respect to the inputs."""
    leaves = [t.detach().clone().requires_grad_() for t in (inputs if isinstance(inputs, tuple) else (inputs,))]
    values = loss(*leaves, *rest, reduction="none", **options)
    gradients = torch.autograd.grad(values, leaves, spread(len(values), values.dtype))
    return values.detach(), *gradients


def largest_logit(z: Tensor, similarity: str, temperature: float) -> float:
    return (1.0 if similarity == "cosine" else float(z.double().norm(dim=1).amax()) ** 2) / temperature


def slope(z: Tensor, similarity: str, temperature: float) -> float:
    """Return the size of a logit's derivative with respect to an entry of a row."""
    norms = z.double().norm(dim=1)
    return (1 / float(norms.amin()) if similarity == "cosine" else float(norms.amax())) / temperature


def assert_near(found: Tensor, true: Tensor, bound: float, what: str) -> None:
    worst = float((found.double() - true.double()).detach().abs().max()) if found.numel() else 0.0
    assert worst <= bound, f"{what}: off by {worst:.3g}, allowed {bound:.3g}"


def assert_agree(
    name: str, loss: Call, target: Tensor, z: Tensor, temperature: float, similarity: str, engines: dict[str, Any]
) -> None:
    """Check engines against the exact one: float64 up to rounding, float32 within a few units in the last place."""
    options: dict[str, Any] = {"temperature": temperature, "similarity": similarity}
    values, gradient = both(loss, z.double(), target, backend="exact", **options)
    assert bool(values.isfinite().all())
    assert bool(gradient.isfinite().all())
    logit = max(1.0, largest_logit(z, similarity, temperature))
    steep = slope(z, similarity, temperature)
    for dtype, forms in engines.items():
        rows = z.to(getattr(torch, dtype))
        unit = 32 * torch.finfo(rows.dtype).eps * logit
        for form in forms:
            with engine(form) as backend:
                found, found_grad = both(loss, rows, target, backend=backend, **options)
            what = f"{name}, {form}, {dtype}, {len(z)} rows, {similarity}, temperature {temperature}"
            assert_near(found, values, unit, f"values: {what}")
            assert_near(found_grad, gradient, 4 * unit * steep, f"gradient: {what}")


@pytest.mark.parametrize(
    ("temperature", "similarity", "step"),
    [
        *itertools.product((1e-3, 0.1, 1e3), SIMILARITIES, (7,)),
        *(pytest.param(*chosen, 1, marks=pytest.mark.slow) for chosen in itertools.product(TEMPERATURES, SIMILARITIES)),
    ],
)
@pytest.mark.quick(3)
def test_every_form_agrees_with_the_exact_values_and_gradients(temperature: float, similarity: str, step: int) -> None:
    engines = {"float64": ["dense", "tiled by 4"], "float32": ["tiled by 6"]}
    if temperature == 0.1:
        engines = {"float64": FORMS, "float32": FORMS}
    first = TEMPERATURES.index(temperature) + SIMILARITIES.index(similarity)
    for name, loss, target in part(cases(10), step, first):
        assert_agree(name, loss, target, normal(10), temperature, similarity, engines)


@part_or_all
@pytest.mark.parametrize("count", [2, 3, 4, 5, 7, 8, 9, 13])
def test_batch_sizes_near_the_tile_size_are_right(count: int, step: int) -> None:
    engines = {"float64": ["auto", "tiled by 4"], "float32": ["tiled by 6"]}
    chosen = [case for case in cases(count) if not case[0].endswith(("stacked views", "distinct", "unbalanced"))]
    # A low temperature selects the shifted form, a moderate one the unshifted form; sizes alternate between them.
    temperatures = itertools.islice(itertools.cycle((5e-4, 0.3)), count // 2, None)
    for temperature, (name, loss, target) in part(zip(temperatures, chosen, strict=False), step, count):
        assert_agree(name, loss, target, normal(count, 3), temperature, "cosine", engines)


@part_or_all
def test_embeddings_of_one_column_are_right(step: int) -> None:
    engines = {"float64": ["auto", "tiled by 4"], "float32": ["dense", "tiled by 6"]}
    settings = (("cosine", 0.01), ("dot", 0.5))
    for (similarity, temperature), (name, loss, target) in part(itertools.product(settings, cases(7)), step, 0):
        assert_agree(name, loss, target, normal(7, 1), temperature, similarity, engines)


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_batches_larger_than_the_default_tiles_are_right(step: int) -> None:
    """With the default tile size: one row more than one tile, than two tiles, and than the largest dense batch."""
    few = [
        ("balanced", "epsilon"),
        ("balanced", "out one_positive"),
        ("interleaved views", "in all"),
        ("one without positives", "in one_positive"),
    ]
    counts = (plan.TILE_ROWS + 1, plan.DENSE_UP_TO + 1, plan.NARROW_UP_TO + 1)
    for count, (layout, name) in part(itertools.product(counts, few), step, 0):
        settings: tuple[Any, ...] = (0.1, "cosine", {"float32": ["auto"]})
        if name == "epsilon":
            settings = (1.0, "dot", {"float64": ["auto"]})
        assert_agree(name, LABELLED[name], layouts(count)[layout], normal(count, 6), *settings)


def test_pairs_over_several_tiles_are_right() -> None:
    """Pairs whose rows fill several tiles of the default size."""
    for count in (plan.DENSE_UP_TO + 2, plan.NARROW_UP_TO + 2):
        partners = shuffled_partners(count)
        assert_agree("partners", nt_xent_loss, partners, normal(count, 6), 0.5, "cosine", {"float64": ["auto"]})


def plain_value(name: str, positive: Tensor, negative: Tensor, row: Tensor) -> Tensor:
    """Return one anchor's value from the logits of its positives, of its negatives and of all columns."""
    terms, _, denominator = name.partition(" ")
    if terms == "binary":
        repel = F.softplus(negative).mean() if len(negative) else row.new_zeros(())
        return F.softplus(-positive).sum() / (len(positive) + 1) + repel
    if not len(positive) or (denominator == "only_negatives" and not len(negative)):
        return row.sum() * 0
    if terms == "epsilon":
        top = row.max()
        guarded = torch.cat((positive, negative)).sub(top).exp() + 1e-8
        return -(((positive - top).exp() + 1e-8) / guarded.sum()).log().sum() / (len(positive) + 1e-8)
    against = {
        "all": torch.cat((positive, negative)).logsumexp(0).expand(len(positive)),
        "only_negatives": negative.logsumexp(0).expand(len(positive)),
        "one_positive": torch.stack([torch.cat((p[None], negative)).logsumexp(0) for p in positive]),
    }[denominator]
    logarithms = positive - against
    return -(logarithms.mean() if terms == "out" else logarithms.exp().mean().log())


def plain(
    name: str, z: Tensor, columns: Tensor, mask: Tensor, own: list[int], *, temperature: float, similarity: str
) -> Tensor:
    """Return the anchors' values ``[N]``, computed from the formulas one anchor after the other."""
    rows = (F.normalize(z), F.normalize(columns)) if similarity == "cosine" else (z, columns)
    logits = rows[0] @ rows[1].T / temperature
    others = torch.arange(len(columns)) != torch.tensor(own)[:, None]
    return torch.stack(
        [
            plain_value(name, row[marked & other], row[~marked & other], row)
            for row, marked, other in zip(logits, mask, others, strict=True)
        ]
    )


def test_every_form_equals_the_plain_formulas() -> None:
    z, weights, own = normal(9), spread(9), list(range(9))
    mask = torch.rand(9, 9, generator=seeded(4)) < 0.4
    mask[3] = False
    formulas: list[tuple[str, Call]] = [(name, loss) for name, loss in BY_MASK.items() if name != "pairwise"]
    formulas.append(("binary", lambda z, mask, **o: nt_bxent_loss(z, mask.nonzero(), **o)))
    for similarity, (name, loss) in itertools.product(SIMILARITIES, formulas):
        leaf = z.clone().requires_grad_()
        true = plain(name, leaf, leaf, mask, own, temperature=0.5, similarity=similarity)
        (true_grad,) = torch.autograd.grad(true, leaf, weights)
        for form in ENGINES:
            with engine(form) as backend:
                found = both(loss, z, mask, temperature=0.5, similarity=similarity, backend=backend)
            torch.testing.assert_close(
                found, (true.detach(), true_grad), rtol=1e-11, atol=1e-12, msg=lambda m, f=form: f"{f}: {m}"
            )


@pytest.mark.parametrize("forms", [SEAMS, pytest.param(list(ENGINES), marks=pytest.mark.slow)], ids=["some", "all"])
def test_references_equal_the_plain_formulas(forms: list[str]) -> None:
    z, bank = normal(7), normal(11, seed=8)
    labels, ref_labels = torch.arange(7) % 3, torch.arange(11) * 5 % 4
    own = torch.tensor([3, -1, 0, 10, -1, 7, 3])
    mask = torch.rand(7, 11, generator=seeded(6)) < 0.3
    partners = torch.tensor([0, 10, 4, 4, 9, 1, 2])
    ours: list[tuple[str, Tensor, Call, dict[str, Tensor]]] = []
    for name, loss in LABELLED.items():
        if name not in ("epsilon", "pairwise"):
            same = labels[:, None] == ref_labels
            of_labels, of_mask = {"labels": labels, "ref_labels": ref_labels}, {"positives": mask}
            ours += [(name, same, loss, of_labels), (name, mask, loss, of_mask)]
    one = partners[:, None] == torch.arange(11)
    ours.append(("out all", one, nt_xent_loss, {"partners": partners}))
    ours.append(("out one_positive", mask, nt_xent_pairwise_loss, {"positives": mask}))
    for similarity, self_rows, (name, positive, loss, targets) in itertools.product(SIMILARITIES, (None, own), ours):
        leaves = z.clone().requires_grad_(), bank.clone().requires_grad_()
        rows = [-1] * 7 if self_rows is None else self_rows.tolist()
        true = plain(name, *leaves, positive, rows, temperature=0.5, similarity=similarity)
        true_grads = torch.autograd.grad(true, leaves, spread(7))
        options: dict[str, Any] = {"temperature": 0.5, "similarity": similarity, "self_rows": self_rows, **targets}
        call = lambda z, w, f=loss, **o: f(z, ref_embeddings=w, **o)  # noqa: E731
        for form in forms:
            with engine(form) as backend:
                found = both(call, (z, bank), backend=backend, **options)
            torch.testing.assert_close(
                found, (true.detach(), *true_grads), rtol=1e-11, atol=1e-12, msg=lambda m, f=form: f"{f}: {m}"
            )


@part_or_all
def test_references_are_right_at_every_temperature(step: int) -> None:
    z, bank, labels, ref_labels = normal(5), normal(9, seed=8), torch.arange(5) % 2, torch.arange(9) % 3
    own = torch.tensor([8, -1, 1, 0, 3])
    losses = [(name, loss) for name, loss in LABELLED.items() if name != "epsilon"]
    for similarity, (name, loss), temperature in part(itertools.product(SIMILARITIES, losses, TEMPERATURES), step, 3):

        def call(z: Tensor, w: Tensor, f: Call = loss, **o: Any) -> Tensor:
            return f(z, labels, ref_embeddings=w, ref_labels=ref_labels, self_rows=own, **o)

        options: dict[str, Any] = {"temperature": temperature, "similarity": similarity}
        values, *true_grads = both(call, (z, bank), backend="exact", **options)
        all_rows = torch.cat((z, bank))
        logit = max(1.0, largest_logit(all_rows, similarity, temperature))
        steep = slope(all_rows, similarity, temperature)
        for dtype, form in ((torch.float64, "tiled by 4"), (torch.float32, "auto")):
            unit = 32 * torch.finfo(dtype).eps * logit
            with engine(form) as backend:
                found, *found_grad = both(call, (z.to(dtype), bank.to(dtype)), backend=backend, **options)
            what = f"{name}, {form}, {similarity}, temperature {temperature}"
            assert_near(found, values, unit, f"values: {what}")
            for one, true in zip(found_grad, true_grads, strict=True):
                assert_near(one, true, 4 * unit * steep, f"gradient: {what}")


@pytest.mark.parametrize("form", KINDS_FIRST)
def test_batch_as_its_own_references_gives_the_plain_loss(form: str) -> None:
    z, labels, own, partners = normal(8), torch.tensor([4, 1, 4, 1, 1, 0, 4, 2]), torch.arange(8), shuffled_partners(8)
    losses: list[tuple[Call, dict[str, Any], dict[str, Any]]] = [
        (loss, {"labels": labels}, {"ref_labels": labels})
        for loss in (supcon_loss, supcon_in_loss, nt_xent_pairwise_loss)
    ]
    losses.append((nt_xent_loss, {"partners": partners}, {}))
    for similarity, (loss, targets, more) in itertools.product(SIMILARITIES, losses):
        options: dict[str, Any] = {"similarity": similarity, "temperature": 0.4, **targets}
        with engine(form) as backend:
            values, true_grad = both(loss, z, backend=backend, **options)
            found, by_rows, by_references = both(
                lambda z, w, f=loss, **o: f(z, ref_embeddings=w, self_rows=own, **o),
                (z, z),
                backend=backend,
                **options,
                **more,
            )
        torch.testing.assert_close(found, values, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(by_rows + by_references, true_grad, rtol=1e-11, atol=1e-12)
        assert not torch.allclose(by_rows, true_grad, atol=1e-3)


@pytest.mark.parametrize("form", KINDS_FIRST)
def test_single_anchor_and_single_reference_are_right(form: str) -> None:
    z, bank, label = normal(1), normal(1, seed=8), torch.tensor([2])
    with engine(form) as backend:
        for loss, denominator in itertools.product((supcon_loss, supcon_in_loss), DENOMINATORS):
            call = lambda z, w, f=loss, d=denominator, **o: f(  # noqa: E731
                z, label, ref_embeddings=w, ref_labels=label, denominator=d, backend=backend, **o
            )
            # The only reference is a positive: the loss is log 1 with it, and the sum is empty without it.
            assert all(not bool(t.any()) for t in both(call, (z, bank)))
            # Without any reference the anchor has no positives.
            assert all(not bool(t.any()) for t in both(call, (z, bank), self_rows=torch.tensor([0])))
            unmatched = call(z, bank, self_rows=torch.tensor([0]), no_positive="nan")
            assert bool(unmatched.isnan())


@pytest.mark.parametrize("direction", ["both", "a_to_b", "b_to_a"])
@pytest.mark.parametrize("queue", [False, True])
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_info_nce_equals_cross_entropy(direction: str, queue: bool, similarity: str) -> None:
    towers = (normal(7, seed=2), normal(7, seed=3)) + ((normal(5, seed=4),) if queue else ())
    keys = {"both": (0, 1), "a_to_b": (0,), "b_to_a": (1,)}[direction]

    def hand_written(a: Tensor, b: Tensor, negatives: Tensor | None = None, temperature: float = 1.0) -> Tensor:
        rows = [t if t is None or similarity == "dot" else F.normalize(t) for t in (a, b, negatives)]
        values = []
        for side in keys:
            anchors, others = rows[side], rows[1 - side]
            if rows[2] is None:
                logits, goal = anchors @ others.T, torch.arange(7)
            else:
                logits = torch.cat(((anchors * others).sum(1, keepdim=True), anchors @ rows[2].T), 1)
                goal = torch.zeros(7, dtype=torch.int64)
            values.append(F.cross_entropy(logits / temperature, goal, reduction="none"))
        return torch.cat(values)

    def ours(a: Tensor, b: Tensor, negatives: Tensor | None = None, **options: Any) -> Tensor:
        return info_nce_loss(a, b, negatives=negatives, direction=direction, similarity=similarity, **options)

    for temperature in (0.02, 0.3, 10.0):
        leaves = [t.clone().requires_grad_() for t in towers]
        true = hand_written(*leaves, temperature=temperature)
        true_grads = torch.autograd.grad(true, leaves, spread(len(true)))
        logit = max(1.0, *(largest_logit(t, similarity, temperature) for t in towers))
        steep = max(slope(t, similarity, temperature) for t in towers)
        for dtype, form in itertools.product((torch.float64, torch.float32), ENGINES):
            with engine(form) as backend:
                found, *found_grad = both(
                    ours, tuple(t.to(dtype) for t in towers), temperature=temperature, backend=backend
                )
            unit = 32 * torch.finfo(dtype).eps * logit
            assert_near(found, true, unit, f"values: {form}, {dtype}, temperature {temperature}")
            for one, one_true_grad in zip(found_grad, true_grads, strict=True):
                assert_near(
                    one, one_true_grad, 4 * unit * steep, f"gradient: {form}, {dtype}, temperature {temperature}"
                )


@pytest.mark.parametrize("form", KINDS_FIRST)
def test_info_nce_of_one_pair_is_right(form: str) -> None:
    a, b, queue = normal(1, seed=2), normal(1, seed=3), normal(1, seed=4)
    with engine(form) as backend:
        assert all(not bool(t.any()) for t in both(info_nce_loss, (a, b), backend=backend))
        options: dict[str, Any] = {"direction": "both", "temperature": 0.5, "reduction": "none"}
        found = info_nce_loss(a, b, negatives=queue, backend=backend, **options)
    goal = F.softplus((F.cosine_similarity(a, queue) - F.cosine_similarity(a, b)) / 0.5)
    assert found[0].item() == pytest.approx(goal.item(), rel=1e-14)
    assert len(found) == 2


@pytest.mark.parametrize("form", ENGINES)
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_queue_without_a_gradient_gives_the_derivatives_of_plain_code(similarity: str, form: str) -> None:
    """Rows and temperature have the same first and second derivatives; a second backward pass repeats the first."""
    a, b, queue, temperature = normal(9, seed=2), normal(9, seed=3), normal(11, seed=4), torch.tensor(0.5).double()

    def by_hand(a: Tensor, b: Tensor, temperature: Tensor) -> Tensor:
        rows = [t if similarity == "dot" else F.normalize(t) for t in (a, b, queue)]
        logits = torch.cat(((rows[0] * rows[1]).sum(1, keepdim=True), rows[0] @ rows[2].T), 1) / temperature
        return F.cross_entropy(logits, torch.zeros(9, dtype=torch.int64), reduction="none")

    def ours(a: Tensor, b: Tensor, temperature: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        options = {"similarity": similarity, "reduction": "none", "backend": backend}
        given = [t.to(dtype) for t in (a, b, queue)]
        return info_nce_loss(*given[:2], negatives=given[2], temperature=temperature, **options)

    leaves = [t.clone().requires_grad_() for t in (a, b, temperature)]
    true = by_hand(*leaves)
    true_grads = torch.autograd.grad(true, leaves, spread(9), create_graph=True)
    true_second = torch.autograd.grad(sum((g * g).sum() for g in true_grads), leaves)
    with engine(form) as backend:
        for dtype in (torch.float64, torch.float32):
            found, bound = ours(*leaves, dtype), 64 * torch.finfo(dtype).eps
            assert_near(found, true, bound * float(true.detach().abs().max()), f"values in {dtype}")
            for _ in range(2):
                grads = torch.autograd.grad(found, leaves, spread(9).to(dtype), retain_graph=True)
                for one, right in zip(grads, true_grads, strict=True):
                    assert_near(one, right, 16 * bound * float(right.detach().abs().max()), f"gradient in {dtype}")
        grads = torch.autograd.grad(ours(*leaves), leaves, spread(9), create_graph=True)
        second = torch.autograd.grad(sum((g * g).sum() for g in grads), leaves)
        for one, right in zip(second, true_second, strict=True):
            torch.testing.assert_close(one, right, rtol=1e-11, atol=1e-12)


def test_queue_without_a_gradient_takes_two_products_for_each_tile() -> None:
    """Although there are more exponentials than are kept for a backward pass."""
    a, b, queue = (normal(count, 8, count, torch.float32) for count in (1500, 1500, 4000))
    rows = a.requires_grad_()
    with Products() as products:
        info_nce_loss(rows, b, negatives=queue).backward()
    large = [number for number in products.entries if number > rows.numel()]
    assert sum(large) == 1500 * 4000
    assert max(large) <= 2**18
    assert len(products.entries) == 2 * len(large)


def test_anchors_against_a_queue_without_a_gradient_are_the_chosen_rows() -> None:
    rows, queue, anchors = normal(6), normal(5, seed=2), torch.tensor([1, 0, 1, 1, 0, 0]).bool()
    none = Targets("none", torch.empty(0, dtype=torch.int64))
    given = rows.clone().requires_grad_()
    found = anchor_values(Batch(given, none, Rule("lse", "dot", 0.5), References(queue), anchors)).values
    true = torch.where(anchors, torch.stack([sum((x @ q / 0.5).exp() for q in queue).log() for x in rows]), 0.0)
    torch.testing.assert_close(found.detach(), true, rtol=1e-14, atol=0)
    found.sum().backward()
    by_row = [F.softmax(queue @ x / 0.5, 0) @ queue / 0.5 * on for x, on in zip(rows, anchors, strict=True)]
    torch.testing.assert_close(given.grad, torch.stack(by_row), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("form", ENGINES)
@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("layout", ["balanced", "one without positives", "distinct", "shuffled views", "partners"])
@pytest.mark.quick(17)
def test_few_anchors_give_the_derivatives_of_plain_code(layout: str, similarity: str, form: str) -> None:
    """Rows and temperature have the same first and second derivatives; a second backward pass repeats the first."""
    count = 14
    rows, temperature, anchors = normal(count), torch.tensor(0.7).double(), torch.zeros(count, dtype=torch.bool)
    anchors[[1, 2, 5, 7, 12, 13]] = True
    if layout == "partners":
        labels, loss = torch.arange(count) % (count // 2), partial(nt_xent_loss, partners=stacked_partners(count))
    else:
        labels = layouts(count)[layout]
        loss = partial(supcon_loss, labels=labels, no_positive="zero")
    same = (labels[:, None] == labels) & ~torch.eye(count, dtype=torch.bool)

    def by_hand(rows: Tensor, temperature: Tensor) -> Tensor:
        rows = rows if similarity == "dot" else F.normalize(rows)
        logits = (rows @ rows.T / temperature).masked_fill(torch.eye(count, dtype=torch.bool), -math.inf)
        ratios = torch.where(same, logits - logits.logsumexp(1, keepdim=True), 0.0)
        return (-ratios.sum(1) / same.sum(1).clamp(min=1))[anchors]

    def ours(rows: Tensor, temperature: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        options = {"similarity": similarity, "reduction": "none", "backend": backend}
        return loss(rows.to(dtype), anchors=anchors, temperature=temperature, **options)

    leaves = [t.clone().requires_grad_() for t in (rows, temperature)]
    true = by_hand(*leaves)
    true_grads = torch.autograd.grad(true, leaves, spread(6), create_graph=True)
    true_second = torch.autograd.grad(sum((g * g).sum() for g in true_grads), leaves)
    with engine(form) as backend:
        for dtype in (torch.float64, torch.float32):
            found, bound = ours(*leaves, dtype), 64 * torch.finfo(dtype).eps
            assert_near(found, true, bound * float(true.detach().abs().max()), f"values in {dtype}")
            for _ in range(2):
                grads = torch.autograd.grad(found, leaves, spread(6).to(dtype), retain_graph=True)
                for one, right in zip(grads, true_grads, strict=True):
                    scale = max(float(right.detach().abs().max()), 0.1)
                    assert_near(one, right, 16 * bound * scale, f"gradient in {dtype}")
        grads = torch.autograd.grad(ours(*leaves), leaves, spread(6), create_graph=True)
        second = torch.autograd.grad(sum((g * g).sum() for g in grads), leaves)
        for one, right in zip(second, true_second, strict=True):
            torch.testing.assert_close(one, right, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("classes", [pytest.param(1, marks=pytest.mark.slow), 40])
def test_few_anchors_are_multiplied_with_all_rows_only(classes: int) -> None:
    """With one class, the matrices of positives are too large to be kept for the backward pass."""
    count = 1600 if classes == 1 else 800
    rows, anchors = normal(count, 8, dtype=torch.float32).requires_grad_(), torch.arange(count) % 4 == 0
    with Products() as products:
        loss = supcon_loss(rows, torch.arange(count) % classes, anchors=anchors)
    assert sum(products.entries) == count // 4 * count
    (found,) = torch.autograd.grad(loss, rows)
    exact = supcon_loss(rows, torch.arange(count) % classes, anchors=anchors, backend="exact")
    (right,) = torch.autograd.grad(exact, rows)
    assert (found - right).abs().max() < 1e-5 * right.abs().max()


REDUCTIONS = {"mean": lambda v: v.mean(), "sum": lambda v: v.sum(), "none": lambda v: v}


@part_or_all
@pytest.mark.parametrize("form", KINDS_FIRST)
def test_anchors_and_reductions_select_values_and_gradients(form: str, step: int) -> None:
    """Anchors select from the values of all rows, and the gradient is that of the selected values."""
    z, anchors = normal(10), torch.arange(10) % 3 != 1
    kinds = ("balanced", "mask", "shuffled views", "shuffled_partners")
    chosen = itertools.product((torch.float64, torch.float32), (case for case in cases(10) if case[0].endswith(kinds)))
    for dtype, (name, loss, target) in part(chosen, step, list(ENGINES).index(form)):
        leaf = z.clone().requires_grad_()
        every = loss(leaf, target, backend="exact", reduction="none")
        tight = 1e3 * torch.finfo(dtype).eps
        for reduction, reduce in REDUCTIONS.items():
            goal = reduce(every[anchors])
            (true_grad,) = torch.autograd.grad(goal, leaf, torch.ones_like(goal), retain_graph=True)
            rows = z.to(dtype, copy=True).requires_grad_()
            with engine(form) as backend:
                found = loss(rows, target, anchors=anchors, reduction=reduction, backend=backend)
                (found_grad,) = torch.autograd.grad(found, rows, torch.ones_like(found))
            torch.testing.assert_close(found.double(), goal.double(), rtol=tight, atol=tight, msg=name)
            torch.testing.assert_close(found_grad.double(), true_grad, rtol=tight, atol=tight, msg=name)


@pytest.mark.parametrize("form", FORMS)
def test_mean_pairs_follows_the_policies(form: str) -> None:
    z = normal(10)
    for policy, layout in itertools.product(
        ("zero", "drop", "nan"), ("one without positives", "unbalanced", "one class")
    ):
        labels = layouts(10)[layout]
        for loss, options in (
            (nt_xent_pairwise_loss, {"reduction": "mean_pairs"}),
            (supcon_loss, {"reduction": "none", "denominator": "only_negatives", "no_negative": "nan"}),
            (supcon_in_loss, {"reduction": "mean", "denominator": "one_positive"}),
        ):
            exact, rows = z.clone().requires_grad_(), z.clone().requires_grad_()
            true = loss(exact, labels, no_positive=policy, backend="exact", **options)
            with engine(form) as backend:
                found = loss(rows, labels, no_positive=policy, backend=backend, **options)
                torch.testing.assert_close(found, true, rtol=1e-11, atol=1e-12, equal_nan=True)
                if bool(true.isfinite().all()):
                    found.sum().backward()
                    true.sum().backward()
                    torch.testing.assert_close(rows.grad, exact.grad, rtol=1e-10, atol=1e-12)


def chosen(
    embeddings: Tensor,
    kind: Any = "labels",
    *,
    terms: Any = "out",
    similarity: Any = "cosine",
    temperature: float | Tensor = 0.1,
    denominator: Any = "all",
    references: bool = False,
    backend: Any = "tiled",
    shifts: bool = False,
) -> Plan:
    given = torch.zeros(len(embeddings), dtype=torch.int64)
    bank = References(embeddings) if references else References()
    rule = Rule(terms, similarity, temperature, denominator)
    return plan.choose(Batch(embeddings, Targets(kind, given), rule, bank), backend, shifts=shifts)[0]


def test_plan_chooses_each_form_where_it_is_safe() -> None:
    z, narrow = normal(10), normal(10, dtype=torch.float32)
    for backend in ("auto", "dense", "tiled"):
        moderate = "symmetric" if backend == "tiled" else "unshifted"
        for kind in ("labels", "partners"):
            assert chosen(z, kind, backend=backend).form == moderate
        for kind in ("mask", "pairs", "none"):
            assert chosen(z, kind, backend=backend).form == "unshifted"
        assert chosen(z, terms="epsilon", backend=backend).form == moderate
        assert chosen(z, terms="epsilon", similarity="dot", temperature=1.0, backend=backend).form == "unshifted"
        assert chosen(z, references=True, backend=backend).form == "unshifted"
        assert chosen(z, references=True, temperature=1e-3, backend=backend).form == "rowwise"
        assert chosen(z, temperature=torch.tensor(0.1), backend=backend).form == moderate
        assert chosen(z, temperature=torch.tensor(1e-3), backend=backend).form == "rowwise"
    for rows, dtype in ((z, torch.float64), (narrow, torch.float32)):
        bound = plan.UNSHIFTED[dtype]
        assert chosen(rows, temperature=1 / (bound - 5)).form == "symmetric"
        assert chosen(rows, temperature=1 / (bound + 1)).form == "rowwise"
        assert chosen(rows, temperature=1 / (bound - 5), terms="in", denominator="one_positive").form == "rowwise"
        assert chosen(rows * bound, temperature=1.0, similarity="dot").form == "rowwise"
        assert chosen(rows, temperature=1.0, similarity="dot").form == "symmetric"
        for kind in ("mask", "labels"):
            for largest, extreme in ((bound - 5) / 2, False), ((bound + 1) / 2, True):
                found = chosen(rows, kind, temperature=1 / largest, backend="dense")
                assert (found.form, found.extreme, found.shift) == ("unshifted", extreme, 0)
            for terms in ("in", "binary"):
                assert chosen(rows, kind, temperature=2 / (bound + 1), terms=terms, backend="dense").form != "unshifted"
            # Larger logits need one shift; without it, and for much larger logits, each row needs its own.
            one = {"mask": "unshifted", "labels": "symmetric"}[kind]
            for largest, form in ((bound + 1, one), (1.3 * bound, one), (1.4 * bound, "rowwise")):
                found = chosen(rows, kind, temperature=1 / largest, shifts=True)
                assert (found.form, found.shift > 0) == (form, form == one)
                if found.shift:
                    assert largest + math.log(len(rows)) - found.shift * math.log(2) <= bound
                assert chosen(rows, kind, temperature=1 / largest).form == "rowwise"
    # Few anchors, unless there are too many exponentials to keep.
    for count, number, form in (
        (10, 5, "anchored"),
        (10, 6, "symmetric"),
        (2896, 1448, "anchored"),
        (2898, 1449, "symmetric"),
    ):
        anchors, two = torch.arange(count) < number, Targets("labels", torch.arange(count) % 2)
        batch = Batch(normal(count), two, Rule("out", "cosine", 0.1), References(), anchors)
        assert plan.choose(batch, "tiled")[0].form == form
    # A queue that needs no gradient, unless sums of its rows might overflow or underflow.
    none = Targets("none", torch.empty(0, dtype=torch.int64))
    for long, fixed, similarity, form in (
        (1.0, True, "cosine", "frozen"),
        (1e-9, True, "cosine", "frozen"),
        (1.0, False, "cosine", "unshifted"),
        (1.0, True, "dot", "frozen"),
        (1e4, True, "dot", "unshifted"),
        (1e-4, True, "dot", "unshifted"),
    ):
        batch = Batch(narrow / long, none, Rule("lse", similarity, 1.0), References(F.normalize(narrow) * long))
        assert plan.choose(batch, "auto", fixed=fixed)[0].form == form
    # Half-precision embeddings are computed in float32.
    assert chosen(narrow.bfloat16(), temperature=1 / (plan.UNSHIFTED[torch.float32] + 1)).form == "rowwise"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_unshifted_form_is_right_at_its_bound(dtype: torch.dtype) -> None:
    """At the largest logits for which exponentials need no shift, batches of equal and of opposite rows are right."""
    bound = plan.UNSHIFTED[dtype]
    bound = bound - math.log(6) - 1e-6
    # All rows equal; classes opposite to each other; one row of a class among the opposites.
    one = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    for signs in ([1, 1, 1, 1, 1, 1], [1, 1, 1, -1, -1, -1], [1, -1, 1, -1, 1, -1], [1, 1, -1, -1, -1, -1]):
        z = torch.tensor(signs, dtype=torch.float64)[:, None] * one + 1e-3 * normal(6, 2)
        labels = torch.tensor([0, 0, 0, 1, 1, 1])
        for name, loss in LABELLED.items():
            temperature = (2 if name == "in one_positive" else 1) / bound
            if name != "epsilon":
                terms, _, denominator = name.partition(" ")
                terms, denominator = ("out", "one_positive") if terms == "pairwise" else (terms, denominator)
                rows = z.to(dtype)
                for hotter, form in ((1, "symmetric"), (0.99, "rowwise")):
                    found = chosen(rows, temperature=temperature * hotter, terms=terms, denominator=denominator)
                    assert found.form == form
            assert_agree(
                name, loss, labels, z.float(), temperature, "cosine", {str(dtype)[6:]: ["dense", "tiled by 4"]}
            )


@pytest.mark.usefixtures("torch_operations")
@pytest.mark.parametrize(("backend", "reduction"), [("auto", "mean"), ("dense", "sum"), ("tiled", "none")])
@pytest.mark.parametrize("underflows", [False, True])
def test_one_shift_is_replaced_if_a_sum_would_lose_digits(
    backend: Any, reduction: Any, underflows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At temperature 0.01, one shift serves ordinary rows, but not rows whose positives are all opposite to them."""
    rows, labels = normal(12, 4, dtype=torch.float32), torch.arange(12) % 4
    if underflows:
        rows[4], rows[8] = rows[0], -rows[0]
    replaced: list[Any] = []
    original = rowwise.evaluate
    monkeypatch.setattr(rowwise, "evaluate", lambda batch, plan: replaced.append(plan) or original(batch, plan))
    loss = partial(supcon_loss, labels=labels, temperature=0.01, reduction=reduction)
    z, wide = rows.clone().requires_grad_(), rows.double().requires_grad_()
    with tiles_of(4):
        found = loss(z, backend=backend).sum()
        assert bool(replaced) == underflows
        gradients = [torch.autograd.grad(found, z, create_graph=True)[0].detach()]
        gradients += [torch.autograd.grad(found, z, retain_graph=True)[0] for _ in range(2)]
    exact = loss(wide, backend="exact").sum()
    (true,) = torch.autograd.grad(exact, wide)
    bound = 4 * torch.finfo(torch.float32).eps / 0.01
    torch.testing.assert_close(found.double(), exact, rtol=bound, atol=0)
    for gradient in gradients:
        torch.testing.assert_close(gradient.double(), true, rtol=0, atol=bound * float(true.abs().max()))


@pytest.mark.parametrize("opposite", [False, True])
def test_log_sums_of_exponentials_contain_the_shift(opposite: bool) -> None:
    rows, none = normal(5, 4, dtype=torch.float32), Targets("none", torch.empty(0, dtype=torch.int64))
    queue = -rows[:1] if opposite else normal(7, 4, 1, dtype=torch.float32)
    batch = Batch(rows, none, Rule("lse", "cosine", 0.01), References(queue))
    assert plan.choose(batch, "auto", shifts=True)[0].shift > 0
    logits = F.normalize(rows.double()) @ F.normalize(queue.double()).T / 0.01
    torch.testing.assert_close(anchor_values(batch).values.double(), logits.logsumexp(1), rtol=1e-5, atol=0)


class Products(Dispatch):
    """Records the number of entries of every matrix product that grows with the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.entries.append(result.numel())
        return result


@pytest.mark.parametrize(("temperature", "form"), [(0.1, "symmetric"), (1e-3, "rowwise")])
def test_tiled_uses_several_tiles(temperature: float, form: str) -> None:
    z, labels = normal(14, 1), torch.arange(14) % 3
    most = {"symmetric": 4 * 8, "rowwise": 4 * 14}[form]
    with tiles_of(4), Products() as tiled:
        assert chosen(z, temperature=temperature).form == form
        supcon_loss(z, labels, temperature=temperature, backend="tiled")
    with Products() as dense:
        supcon_loss(z, labels, temperature=temperature, backend="dense")
    assert dense.entries == [14 * 14]
    assert len(tiled.entries) >= 4
    assert max(tiled.entries) <= most


def test_tiles_of_restores_the_tile_size() -> None:
    before = plan.tile_size(5000)
    with tiles_of(4):
        with tiles_of(6):
            assert plan.tile_size(5000)[0] == 6
        assert plan.tile_size(5000)[0] == 4
        with pytest.raises(ValueError, match="temperature"), tiles_of(6):
            supcon_loss(normal(4), torch.arange(4), temperature=-1)
        assert plan.tile_size(5000)[0] == 4
    assert plan.tile_size(5000) == before


def test_small_losses_keep_their_digits() -> None:
    """A small loss must not be computed as a difference of large numbers."""
    z = trained_like(24)
    partners = stacked_partners(24)
    labels = torch.arange(24) % 12
    calls: list[tuple[Call, Tensor]] = [
        (nt_xent_loss, partners),
        (supcon_loss, labels),
        (supcon_in_loss, labels),
        (nt_xent_pairwise_loss, labels),
    ]
    for temperature, (loss, target), form in itertools.product((0.07, 0.05, 0.02), calls, FORMS):
        exact = z.double().requires_grad_()
        true = loss(exact, target, temperature=temperature, backend="exact")
        true.backward()
        rows = z.clone().requires_grad_()
        with engine(form) as backend:
            found = loss(rows, target, temperature=temperature, backend=backend)
            found.backward()
        assert exact.grad is not None
        assert rows.grad is not None
        # Errors of logits become relative errors of the loss here: two units of float32 at 1/temperature.
        tight = 2 * torch.finfo(torch.float32).eps / temperature
        assert found.item() == pytest.approx(true.item(), rel=tight)
        assert float((rows.grad - exact.grad).norm() / exact.grad.norm()) < 2 * tight


TARGETS: dict[str, tuple[Call, dict[str, Any]]] = {
    "supcon": (supcon_loss, {"labels": torch.tensor([3, -1, 3, 8, -1, 3])}),
    "supcon pairs": (supcon_loss, {"labels": torch.tensor([2, 1, 0, 0, 1, 2])}),
    "supcon mask": (supcon_loss, {"positives": torch.rand(6, 6, generator=seeded(3)) < 0.5}),
    "supcon only_negatives": (
        supcon_loss,
        {"labels": torch.tensor([3, -1, 3, 8, -1, 3]), "denominator": "only_negatives"},
    ),
    "supcon_in": (supcon_in_loss, {"labels": torch.tensor([1, 1, 0, 0, 1, 0])}),
    "supcon_in one_positive": (
        supcon_in_loss,
        {"labels": torch.tensor([1, 1, 0, 0, 1, 7]), "denominator": "one_positive"},
    ),
    "supcon_in only_negatives": (
        supcon_in_loss,
        {"labels": torch.tensor([1, 1, 0, 0, 1, 0]), "denominator": "only_negatives"},
    ),
    "supcon_epsilon": (supcon_epsilon_loss, {"labels": torch.tensor([1, 1, 0, 0, 1, 0])}),
    "nt_xent": (nt_xent_loss, {"partners": torch.tensor([5, 2, 1, 4, 3, 0])}),
    "nt_xent_pairwise": (nt_xent_pairwise_loss, {"labels": torch.tensor([1, 1, 0, 0, 1, 5])}),
    "nt_bxent": (nt_bxent_loss, {"positive_pairs": torch.tensor([[0, 1], [2, 4], [4, 2], [0, 1], [3, 3]])}),
    "anchors": (
        supcon_loss,
        {"labels": torch.tensor([3, -1, 3, 8, -1, 3]), "anchors": torch.tensor([True, True, False, False, True, True])},
    ),
    "shifted": (supcon_loss, {"labels": torch.tensor([1, 1, 0, 0, 1, 0]), "temperature": 1.5e-3}),
}
WITH_REFERENCES: dict[str, tuple[Call, dict[str, Any]]] = {
    "supcon references": (
        supcon_loss,
        {
            "labels": torch.tensor([3, -1, 3, 8, -1, 3]),
            "ref_labels": torch.tensor([3, 3, -1, 0]),
            "self_rows": torch.tensor([0, -1, 1, 2, 3, -1]),
        },
    ),
    "supcon_in references": (
        supcon_in_loss,
        {"positives": torch.rand(6, 4, generator=seeded(9)) < 0.5, "denominator": "one_positive"},
    ),
    "nt_xent references": (nt_xent_loss, {"partners": torch.tensor([3, 3, 1, 0, 2, 0])}),
}


def by_everything(
    name: str, backend: str, temperature: float = 0.6, **options: Any
) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """Return a loss as a function of all its differentiable inputs, and these inputs."""
    hot = torch.tensor(temperature, dtype=torch.float64)
    if name.startswith("info_nce"):
        towers = normal(3, 2, seed=5), normal(3, 2, seed=6), normal(2, 2, seed=7)
        if name == "info_nce":
            return lambda a, b, t: info_nce_loss(a, b, temperature=t, backend=backend, **options), (*towers[:2], hot)
        return (
            lambda a, b, n, t: info_nce_loss(a, b, negatives=n, temperature=t, backend=backend, **options),
            (*towers, hot),
        )
    if name in WITH_REFERENCES:
        loss, targets = WITH_REFERENCES[name]
        return (
            lambda z, w, t: loss(z, ref_embeddings=w, temperature=t, backend=backend, **targets, **options),
            (normal(6, 2), normal(4, 2, seed=8), hot),
        )
    loss, targets = TARGETS[name]
    targets = dict(targets)
    hot = torch.tensor(targets.pop("temperature", temperature), dtype=torch.float64)
    return lambda z, t: loss(z, temperature=t, backend=backend, **targets, **options), (normal(6, 2), hot)


EVERYTHING = [*TARGETS, *WITH_REFERENCES, "info_nce", "info_nce queue"]


def forms_in_turn(first: int) -> pytest.MarkDecorator:
    """Parametrize by the names in `EVERYTHING` and by `SEAMS`; for each name, all engines but one are marked slow."""
    return pytest.mark.parametrize(
        ("name", "form"),
        [
            pytest.param(name, form, marks=() if (number + first) % len(SEAMS) == k else pytest.mark.slow)
            for number, name in enumerate(EVERYTHING)
            for k, form in enumerate(SEAMS)
        ],
    )


@forms_in_turn(0)
@pytest.mark.quick(6)
def test_gradient_of_the_temperature_is_right(name: str, form: str) -> None:
    for similarity, base in itertools.product(SIMILARITIES, (None, 0.3)):
        options = {"similarity": similarity, "base_temperature": base, "reduction": "none"}
        with engine(form) as backend:
            call, inputs = by_everything(name, backend, **options)
            *rows, hot = inputs
            if float(hot) < 0.1 and similarity == "dot":
                hot = 4 * hot
            tight = {"eps": 1e-6 * float(hot), "rtol": 1e-4, "atol": 1e-5 / float(hot)}
            assert gradcheck(lambda t, call=call, rows=rows: call(*rows, t), hot.requires_grad_(), **tight)
            # A number and a tensor with the same value give the same loss.
            number = call(*rows, hot.item())
            torch.testing.assert_close(call(*rows, hot).detach(), number, rtol=1e-12, atol=1e-12)


@forms_in_turn(1)
@pytest.mark.quick(6)
def test_second_derivatives_with_respect_to_every_input_are_right(name: str, form: str) -> None:
    """With respect to rows, references and temperature at once."""
    with engine(form) as backend:
        call, inputs = by_everything(name, backend, similarity="cosine", reduction="none")
        if float(inputs[-1]) < 0.1:
            # Differences cannot resolve exponentials this steep, so the exact form is the reference.
            inputs = tuple(t.requires_grad_() for t in inputs)
            exact, _ = by_everything(name, "exact", similarity="cosine", reduction="none")
            seconds = []
            for each in (call, exact):
                first = torch.autograd.grad(each(*inputs), inputs, spread(6), create_graph=True)
                seconds.append(torch.autograd.grad(first, inputs, tuple(torch.cos(t) for t in inputs)))
            for found, true in zip(*seconds, strict=True):
                torch.testing.assert_close(found, true, rtol=1e-8, atol=1e-8 * float(true.abs().max()))
            return
        leaves = tuple(t.requires_grad_() for t in inputs)
        assert gradcheck(call, leaves, fast_mode=True)
        assert gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("form", SEAMS)
@pytest.mark.quick(1)
def test_second_derivatives_of_unnormalised_rows_are_right(form: str) -> None:
    with engine(form) as backend:
        for name in ("supcon", "supcon_in one_positive", "nt_xent", "supcon_epsilon", "supcon references"):
            call, inputs = by_everything(name, backend, temperature=2.0, similarity="dot", reduction="sum")
            assert gradgradcheck(call, tuple(t.requires_grad_() for t in inputs), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_temperature_may_have_another_dtype(dtype: torch.dtype) -> None:
    z, labels = normal(8), torch.arange(8) % 3
    for form, rows in itertools.product(ENGINES, (z, z.float(), z.bfloat16())):
        hot = torch.tensor(0.25, dtype=dtype, requires_grad=True)
        rows = rows.detach().clone().requires_grad_()
        true, exact = torch.tensor(0.25, dtype=torch.float64, requires_grad=True), rows.detach().double()
        supcon_loss(exact, labels, temperature=true, backend="exact").backward()
        with engine(form) as backend:
            supcon_loss(rows, labels, temperature=hot, backend=backend).backward()
        assert hot.grad is not None
        assert hot.grad.dtype == dtype
        assert true.grad is not None
        unit = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps * (rows.dtype != torch.float64))
        assert hot.grad.item() == pytest.approx(true.grad.item(), rel=20 * unit)


MODULES: list[tuple[type[torch.nn.Module], tuple[Tensor, ...]]] = [
    (SupConLoss, (torch.tensor([0, 0, 1, 1, 1, 2]),)),
    (SupConInLoss, (torch.tensor([0, 0, 1, 1, 1, 2]),)),
    (SupConEpsilonLoss, (torch.tensor([0, 0, 1, 1, 1, 2]),)),
    (NTXentPairwiseLoss, (torch.tensor([0, 0, 1, 1, 1, 2]),)),
    (NTXentLoss, (torch.tensor([1, 0, 3, 2, 5, 4]),)),
    (NTBXentLoss, (torch.tensor([[0, 1], [3, 2]]),)),
    (InfoNCELoss, (normal(6, seed=3, dtype=torch.float32),)),
]


@pytest.mark.parametrize("backend", ["auto", "dense", "tiled", "exact"])
@pytest.mark.parametrize(("module", "targets"), MODULES)
def test_module_learns_its_temperature(
    module: type[torch.nn.Module], targets: tuple[Tensor, ...], backend: str
) -> None:
    made = module(temperature=torch.nn.Parameter(torch.tensor(0.5)), backend=backend)
    assert [name for name, _ in made.named_parameters()] == ["temperature"]
    assert "temperature" in made.state_dict()
    optimiser = torch.optim.SGD(made.parameters(), lr=0.01)
    z = normal(6, dtype=torch.float32)
    before = made(z, *targets)
    before.backward()
    optimiser.step()
    after = made(z, *targets)
    assert made.temperature.item() != 0.5
    assert after.item() < before.item()
    assert "temperature=" in repr(made)


KEPT: dict[str, tuple[Call, Tensor]] = {
    "pairs": (nt_xent_loss, torch.arange(40) ^ 1),
    "classes": (supcon_loss, torch.arange(40) % 3),
    "own denominators": (nt_xent_pairwise_loss, torch.arange(40) % 3),
    "rowwise": (supcon_epsilon_loss, torch.arange(40) % 3),
}
WITH_FEW_ANCHORS = KEPT | {"few anchors": (partial(supcon_loss, anchors=torch.arange(40) < 10), torch.arange(40) % 3)}


@pytest.mark.parametrize("form", KINDS_FIRST)
@pytest.mark.parametrize("name", list(WITH_FEW_ANCHORS))
def test_retained_graph_gives_the_same_gradient_again(name: str, form: str) -> None:
    loss, target = WITH_FEW_ANCHORS[name]
    z = normal(40).requires_grad_()
    with engine(form) as backend:
        values = loss(z, target, backend=backend, reduction="none")
        found, upstream = [], spread(len(values))
        for seed in range(3):
            found += torch.autograd.grad(values, z, upstream, retain_graph=True)
            # Other evaluations now use the buffers that the graph gave back.
            both(loss, normal(40, seed=seed + 5), target, backend=backend)
            loss(normal(40, seed=seed + 8).requires_grad_(), target, backend=backend)
        first, second, third = found
        (twice,) = torch.autograd.grad(values, z, 2 * upstream, create_graph=True)
        (once,) = torch.autograd.grad(values, z, upstream)
    torch.testing.assert_close(second, first, rtol=1e-13, atol=1e-14)
    assert torch.equal(second, third)
    torch.testing.assert_close(once, first, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(twice.detach(), 2 * first, rtol=1e-12, atol=1e-13)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(values, z, upstream)


@pytest.mark.parametrize("form", KINDS_FIRST)
@pytest.mark.parametrize("name", list(WITH_FEW_ANCHORS))
@pytest.mark.quick(4)
def test_simultaneous_graphs_are_independent(name: str, form: str) -> None:
    loss, target = WITH_FEW_ANCHORS[name]
    batches = [normal(40, seed=seed) for seed in (1, 2, 3)]
    with engine(form) as backend:
        apart = [both(loss, z, target, backend=backend) for z in batches]
        for order in itertools.permutations(range(3)):
            leaves = [z.clone().requires_grad_() for z in batches]
            values = [loss(z, target, backend=backend, reduction="none") for z in leaves]
            for k in order:
                # Evaluations without a graph, and graphs that are discarded, happen in between.
                loss(batches[0] * 3, target, backend=backend)
                loss(leaves[0] * 2, target, backend=backend)
                (true_grad,) = torch.autograd.grad(values[k], leaves[k], spread(len(values[k])))
                assert torch.equal(values[k], apart[k][0])
                assert torch.equal(true_grad, apart[k][1])


@pytest.mark.parametrize("form", KINDS_FIRST)
def test_changing_a_saved_tensor_in_place_raises(form: str) -> None:
    labels = torch.arange(10) % 3
    # The exact form has already converted the labels to masks.
    for changed in (0,) if form == "exact" else (0, 1):
        rows = normal(10).requires_grad_() * 1
        given = (rows, labels.clone())
        with engine(form) as backend:
            loss = supcon_loss(*given, backend=backend)
        with torch.no_grad():
            given[changed].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("form", KINDS_FIRST)
def test_two_threads_are_independent(form: str) -> None:
    loss, target = KEPT["classes"]
    batches = [normal(40, seed=seed) for seed in (1, 2)]
    with engine(form) as backend:
        true = [both(loss, z, target, backend=backend) for z in batches]
        wrong: list[int] = []
        start = threading.Barrier(2)

        def work(k: int) -> None:
            start.wait()
            for _ in range(15):
                found = both(loss, batches[k], target, backend=backend)
                if not all(torch.equal(one, other) for one, other in zip(found, true[k], strict=True)):
                    wrong.append(k)

        threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


@pytest.mark.parametrize("form", KINDS_FIRST)
def test_graph_of_one_thread_runs_backward_in_another(form: str) -> None:
    loss, target = KEPT["pairs"]
    z = normal(40).requires_grad_()
    with engine(form) as backend:
        true = both(loss, z, target, backend=backend)[1]
        values = loss(z, target, backend=backend, reduction="none")
        walked: list[Tensor] = []
        thread = threading.Thread(target=lambda: walked.extend(torch.autograd.grad(values, z, spread(40))))
        thread.start()
        thread.join()
        again = both(loss, z, target, backend=backend)[1]
    assert torch.equal(walked[0], true)
    assert torch.equal(again, true)


@pytest.mark.parametrize("form", KINDS_FIRST)
def test_buffers_are_usable_inside_and_outside_inference_mode(form: str) -> None:
    """Buffers are reused by the next evaluation, in whatever mode each of them runs."""

    def work(loss: Call, target: Tensor, z: Tensor) -> list[Tensor]:
        with torch.inference_mode():
            # Larger than later batches, so that the buffers are allocated here.
            loss(torch.cat((z, z.flip(0))), torch.cat((target, target + 40)), backend=backend)
            within = loss(z, target, backend=backend, reduction="none")
        outside = loss(z, target, backend=backend, reduction="none")
        values, true_grad = both(loss, z, target, backend=backend)
        with torch.inference_mode():
            again = loss(z, target, backend=backend, reduction="none")
        assert bool(true_grad.isfinite().all())
        return [values, within, outside, again]

    for loss, target in KEPT.values():
        # In a new thread, no other test has allocated the buffers before.
        with engine(form) as backend, ThreadPoolExecutor(1) as threads:
            values, *others = threads.submit(work, loss, target, normal(40)).result()
        assert all(torch.equal(values, other) for other in others)


STEEP = {"moderate": 0.1, "steep": 2e-3}


@part_or_all
@pytest.mark.parametrize("temperature", list(STEEP.values()), ids=list(STEEP))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("form", KINDS_FIRST)
def test_upstream_gradients_of_any_size_are_applied(
    form: str, dtype: torch.dtype, temperature: float, step: int
) -> None:
    z = normal(10, dtype=dtype)
    sizes = (1e-30, 1e-36, 1e30, 1e36, 0.0) if dtype == torch.float32 else (1e-290, 1e290, 0.0)
    kinds = ("unsorted and extreme", "mask", "shuffled views", "stacked_partners")
    chosen = [case for case in cases(10) if case[0].endswith(kinds)]
    first = 2 * list(ENGINES).index(form) + (dtype == torch.float32) + 2 * (temperature < 0.1)
    for name, loss, target in part(chosen, step, first):
        rows = z.clone().requires_grad_()
        with engine(form) as backend:
            values = loss(rows, target, reduction="none", temperature=temperature, backend=backend)
        true = torch.autograd.grad(values, rows, spread(10, dtype), retain_graph=True)[0].double()
        for size in sizes:
            factor = size / 2**10
            upstream = spread(10, dtype) * factor
            (found,) = torch.autograd.grad(values, rows, upstream, retain_graph=True)
            assert bool(found.isfinite().all())
            if not size:
                assert not bool(found.any())
                continue
            scale = float(true.abs().max())
            # Subnormal results have fewer digits.
            smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / factor
            assert_near(
                found.double() / factor, true, 50 * torch.finfo(dtype).eps * scale + smallest, f"{name}, {size}"
            )


@pytest.mark.parametrize("form", KINDS_FIRST)
def test_upstream_gradients_of_rows_that_do_not_count_are_ignored(form: str) -> None:
    """A row without positives, or that is not an anchor, has value 0; its upstream gradient has no effect."""
    z, labels = normal(9, dtype=torch.float32), torch.tensor([0, 0, 1, 1, 5, 0, 1, 0, 1])
    anchors = torch.arange(9) != 7
    for strange in (math.nan, math.inf, 1e38, -1e38):
        for size in (1.0, 1e-30):
            rows = z.clone().requires_grad_()
            with engine(form) as backend:
                values = supcon_loss(rows, labels, reduction="none", backend=backend)
                upstream = spread(9, torch.float32) * size
                (true,) = torch.autograd.grad(values, rows, upstream.where(labels != 5, 0.0), retain_graph=True)
                (found,) = torch.autograd.grad(values, rows, upstream.where(labels != 5, strange))
                assert torch.equal(found, true)
                # Under "none" only anchors are returned, so no upstream gradient can reach another row.
                chosen_values = supcon_loss(rows, labels, anchors=anchors, reduction="none", backend=backend)
                kept = upstream.where(labels != 5, strange)[anchors]
                (found,) = torch.autograd.grad(chosen_values, rows, kept)
            assert bool(found.isfinite().all())


@pytest.mark.parametrize("form", KINDS_FIRST)
def test_nan_in_the_upstream_gradient_is_propagated(form: str) -> None:
    for loss, target in KEPT.values():
        z = normal(40).requires_grad_()
        with engine(form) as backend:
            values = loss(z, target, reduction="none", backend=backend)
            upstream = spread(40)
            upstream[11] = math.nan
            (found,) = torch.autograd.grad(values, z, upstream)
            assert bool(found[11].isnan().all())
            # No buffer keeps values that were computed with NaN.
            assert bool(both(loss, z, target, backend=backend)[1].isfinite().all())


@part_or_all
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("form", KINDS_FIRST)
def test_results_are_bitwise_reproducible(form: str, deterministic: bool, step: int) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    with engine(form) as backend:
        try:
            torch.use_deterministic_algorithms(deterministic)
            every = itertools.product((torch.float64, torch.float32), EVERYTHING)
            for dtype, name in part(every, step, list(ENGINES).index(form) + deterministic):
                call, inputs = by_everything(name, backend, reduction="none")
                found = []
                for _ in range(2):
                    leaves = [t.detach().to(dtype, copy=True).requires_grad_() for t in inputs]
                    values = call(*leaves)
                    first = torch.autograd.grad(values.sum(), leaves, create_graph=True)
                    second = torch.autograd.grad(sum((g * g).sum() for g in first), leaves)
                    found.append((values, *first, *second))
                    # Change the contents of the buffers, and the addresses of later allocations.
                    both(supcon_loss, normal(23, dtype=dtype) * 1e3, torch.arange(23) % 4, backend=backend)
                assert all(torch.equal(one, other) for one, other in zip(*found, strict=True)), (name, dtype)
        finally:
            torch.use_deterministic_algorithms(before)


NORMS = {
    torch.float32: (1e-30, 1e30, 1.0, 1e-18, 1e18, 3e37, 1e-34),
    torch.float64: (1e-250, 1e250, 1.0, 1e-150, 1e150, 1e300, 1e-300),
}


@pytest.mark.parametrize("forms", [SEAMS, pytest.param(list(ENGINES), marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("temperature", list(STEEP.values()), ids=list(STEEP))
@pytest.mark.parametrize("dtype", list(NORMS))
@pytest.mark.quick(2)
def test_rows_of_extreme_norm_are_right(dtype: torch.dtype, temperature: float, forms: list[str]) -> None:
    """For very long and very short rows, the gradient equals the gradient of the unit row divided by the norm."""
    lengths = torch.tensor(NORMS[dtype] + NORMS[dtype][:3], dtype=torch.float64)
    unit = F.normalize(normal(10))
    z = (unit * lengths[:, None]).to(dtype)
    tight = 64 * torch.finfo(dtype).eps / temperature
    for name, loss, target in cases(10):
        if not name.endswith(("balanced", "mask", "shuffled views", "stacked_partners")):
            continue
        options: dict[str, Any] = {"temperature": temperature, "similarity": "cosine"}
        values, true_grad = both(loss, unit, target, backend="exact", **options)
        for form in forms:
            with engine(form) as backend:
                found, found_grad = both(loss, z, target, backend=backend, **options)
            assert_near(found, values, tight, f"values: {name}, {form}")
            # The gradient is multiplied by the row's length, in steps that stay within the range.
            root = lengths.sqrt()[:, None]
            assert_near(found_grad.double() * root * root, true_grad, tight / temperature, f"gradient: {name}, {form}")


@pytest.mark.parametrize("form", KINDS_FIRST)
def test_references_of_extreme_norm_are_right(form: str) -> None:
    z, bank, labels = normal(6), normal(9, seed=8), torch.arange(9) % 3
    lengths = torch.tensor([1e-30, 1e30, 1, 1e-18, 1e18, 3e37, 1, 1e30, 1e-30])[:, None]
    call = lambda z, w, **o: supcon_loss(z, labels[:6], ref_embeddings=w, ref_labels=labels, **o)  # noqa: E731
    values, by_rows, by_references = both(call, (z, bank), backend="exact")
    with engine(form) as backend:
        found, *found_grad = both(call, (z.float(), bank.float() * lengths), backend=backend)
    assert_near(found, values, 1e-4, "values")
    assert_near(found_grad[0], by_rows, 1e-3, "by rows")
    root = lengths.double().sqrt()
    assert_near(found_grad[1].double() * root * root, by_references, 1e-3, "by references")


@pytest.mark.parametrize("form", KINDS_FIRST)
def test_inputs_may_have_any_memory_layout(form: str) -> None:
    """Transposed, strided and expanded inputs give the same results as contiguous ones."""
    z, labels = normal(10), torch.arange(10) % 3
    mask = torch.rand(10, 10, generator=seeded(2)) < 0.4
    turned = z.T.contiguous().T
    sliced = torch.stack((z, -z), 2)[:, :, 0]
    with engine(form) as backend:
        for call in (
            lambda z, **o: supcon_loss(z, torch.stack((labels, -labels), 1)[:, 0], **o),
            lambda z, **o: supcon_in_loss(z, positives=mask.T.contiguous().T, **o),
            lambda z, **o: nt_xent_loss(z, torch.stack((torch.arange(10) ^ 1,) * 2, 1)[:, 0], **o),
            lambda z, **o: supcon_loss(z, labels, ref_embeddings=z.flip(0).T.contiguous().T, ref_labels=labels, **o),
        ):
            true = both(call, z, backend=backend)
            for other in (turned, sliced):
                leaf = other.detach().requires_grad_()
                assert not leaf.is_contiguous()
                values = call(leaf, reduction="none", backend=backend)
                (true_grad,) = torch.autograd.grad(values, leaf, spread(10))
                torch.testing.assert_close((values.detach(), true_grad), true, rtol=1e-13, atol=1e-14)
        # Rows that share memory are equal, so all gradients are zero.
        alike = z[:1].expand(10, 4).requires_grad_()
        loss = supcon_loss(alike, labels, backend=backend)
        assert loss.item() == pytest.approx(math.log(9), rel=1e-13)
        (true_grad,) = torch.autograd.grad(loss, alike)
        torch.testing.assert_close(true_grad, torch.zeros_like(true_grad), rtol=0, atol=1e-14)


REUSED = {
    "towers in one panel": (600, lambda a, b: info_nce_loss(a, b, temperature=0.1)),
    "towers in panels": (1100, lambda a, b: info_nce_loss(a, b, temperature=0.1)),
    "one direction in panels": (1100, lambda a, b: info_nce_loss(a, b, temperature=0.1, direction="a_to_b")),
    "pairs in panels": (600, lambda a, b: sigmoid_loss(a, b, temperature=0.1, bias=-3.0)),
    "queue in panels": (600, lambda a, b: info_nce_loss(a, a.flip(0), negatives=b, temperature=0.1)),
}
"""Losses that keep exponentials in memory that later calls reuse, with their numbers of rows."""


@pytest.mark.parametrize("name", REUSED)
def test_kept_exponentials_of_one_call_are_not_overwritten_by_another(name: str) -> None:
    count, loss = REUSED[name]
    batches = [[normal(count, 8, seed + k, torch.float32).requires_grad_() for k in range(2)] for seed in (0, 10)]
    wide = [[rows.detach().double().requires_grad_() for rows in batch] for batch in batches]
    expected = [torch.autograd.grad(loss(*batch), batch) for batch in wide]
    for _ in range(2):  # the second time, memory is reused
        losses = [loss(*batch) for batch in batches]
        for value, batch, right in zip(losses, batches, expected, strict=True):
            for _ in range(2):  # the second backward pass computes the exponentials again
                found = torch.autograd.grad(value, batch, retain_graph=True)
                for grad, exact in zip(found, right, strict=True):
                    assert (grad - exact).abs().max() < 1e-5 * exact.abs().max()


def test_reference_that_is_the_anchor_itself_is_left_out_in_panels() -> None:
    """Some anchors are a reference, and others are not."""
    rows, references = normal(40), normal(30, seed=2)
    own = torch.arange(40) - 10  # rows 10 to 39 are references 0 to 29
    references[own[10:]] = rows[10:]
    own = own.clamp(min=-1)
    given = torch.empty(0, dtype=torch.int64)
    batch = Batch(rows, Targets("none", given), Rule("lse", "cosine", 0.5), References(references, own))
    found = anchor_values(batch, "dense")
    cosines = F.normalize(rows) @ F.normalize(references).T
    for i in range(40):
        others = [float(cosines[i, j]) / 0.5 for j in range(30) if j != i - 10]
        assert math.isclose(float(found.values[i]), math.log(math.fsum(map(math.exp, others))), rel_tol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("columns", [1, 2, 7, 12, 64])
def test_sum_of_softplus_keeps_its_digits(columns: int, dtype: torch.dtype) -> None:
    logits = torch.tensor([-1e5, -200.0, -80.0, -20.0, -1.0, -0.01, 0.0, 0.5, 15.0, 80.0, 1e5], dtype=dtype)
    x = logits[:, None] + 0.3 * torch.arange(columns, dtype=dtype).cos()
    x = torch.cat([x, torch.full((1, columns), -math.inf, dtype=dtype)])
    found = torch.empty(len(x), dtype=dtype)
    pairs._softplus_sum(x, out=found)
    for total, row in zip(found.tolist(), x.tolist(), strict=True):
        right = math.fsum(max(each, 0) + math.log1p(math.exp(-abs(each))) for each in row)
        smallest = math.exp(pairs.LOWEST_LOG[dtype]) * 2 * columns
        assert math.isclose(total, right, rel_tol=8 * torch.finfo(dtype).eps, abs_tol=smallest)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_logits_of_pairs_have_right_first_and_second_derivatives(similarity: Similarity, *, learned: bool) -> None:
    rows, others = (normal(5, seed=seed).requires_grad_() for seed in (1, 2))
    inputs = [rows, others, torch.tensor(0.3, dtype=torch.float64, requires_grad=True)][: 3 if learned else 2]

    def logits(first: Tensor, second: Tensor, temperature: float | Tensor = 0.3) -> Tensor:
        return pair_logits(first, second, Rule("out", similarity, temperature))

    products = [row @ other for row, other in zip(rows, others, strict=True)]
    if similarity == "cosine":
        norms = [row.norm() * other.norm() for row, other in zip(rows, others, strict=True)]
        products = [product / norm for product, norm in zip(products, norms, strict=True)]
    torch.testing.assert_close(logits(*inputs), torch.stack(products) / 0.3, rtol=1e-14, atol=1e-15)
    assert gradcheck(logits, inputs)
    assert gradgradcheck(logits, inputs)
