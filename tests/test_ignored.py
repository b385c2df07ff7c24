"""Ignored pairs: values and derivatives beyond the golden cases, and which implementations support them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pairproof import fast, reference
from pairproof.conformance.faults.parts import RIGHT
from pairproof.conformance.implementations import ALL
from pairproof.conformance.implementations.callable import External
from pairproof.conformance.judge.fresh import draw
from pairproof.conformance.judge.shrink import _with_others, with_rows
from pairproof.conformance.suite.cases import Case
from pairproof.conformance.suite.catalogue import IGNORED, LOSSES
from pairproof.fast.engine import tiles_of
from pairproof.reference import scipy_losses

N = 9
LABELS = torch.tensor([0, 0, 1, 1, 1, 2, 2, 3, 3])
PARTNERS = torch.tensor([1, 0, 3, 2, 8, 6, 5, 0, 4])  # with references, partners need not be mutual
IDS = torch.tensor([5, 5, 5, 1, 2, 1, 3, 3, -9])
PAIRS = torch.tensor([[0, 1], [1, 0], [2, 3], [5, 4], [5, 6]])


def rows(count: int = N, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def mask(count: int = N, columns: int = N, seed: int = 3) -> Tensor:
    """A mask that is not symmetric and leaves each row a column."""
    found = torch.rand(count, columns, generator=torch.Generator().manual_seed(seed)) < 0.4
    found[torch.arange(count), (torch.arange(count) + 1) % columns] = False
    return found


def mask_without_partners() -> Tensor:
    found = mask(N, N + 2)
    found[torch.arange(N), PARTNERS] = False
    return found


REF_IDS = IDS[[*range(9), 0, 1]]
OF_REFERENCES = {
    "partners": PARTNERS,
    "ref_embeddings": rows(N + 2, 1),
    "ignored": mask_without_partners(),
    "ignored_ids": IDS,
    "ref_ignored_ids": REF_IDS,
}
Call = Callable[..., Tensor]

CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "labels": ("supcon", {"labels": LABELS, "ignored": mask()}),
    "labels, ids": ("supcon_in", {"labels": LABELS, "ignored_ids": IDS}),
    "own denominators": ("nt_xent_pairwise", {"labels": LABELS, "ignored": mask(), "ignored_ids": IDS}),
    "negatives only": ("supcon", {"labels": LABELS, "ignored": mask(), "denominator": "only_negatives"}),
    "references": (
        "nt_xent",
        {
            "partners": PARTNERS,
            "ref_embeddings": rows(N + 2, 1),
            "ignored_ids": IDS,
            "ref_ignored_ids": REF_IDS,
        },
    ),
    "pairs": ("nt_bxent", {"positive_pairs": PAIRS, "ignored": mask(), "ignored_ids": IDS}),
    "hard negatives": ("hard_negative", OF_REFERENCES),
    "weighted positives": ("dclw", {**OF_REFERENCES, "detach_weights": False}),
    "epsilon": ("supcon_epsilon", {"labels": LABELS, "ignored": mask(), "ignored_ids": IDS, "similarity": "dot"}),
    "epsilon, cosine": ("supcon_epsilon", {"positives": mask(seed=8), "ignored": mask(), "similarity": "cosine"}),
}


def called(name: str) -> Call:
    loss, given = CALLS[name]
    function = LOSSES[loss].fast
    return lambda z, **options: function(z, **given, **options)


def expected(name: str, temperature: float) -> float:
    loss, given = CALLS[name]
    arrays = {key: x.tolist() if isinstance(x, Tensor) else x for key, x in given.items()}
    for key in ("ignored",):
        if key in arrays:
            arrays[key] = np.array(arrays[key], dtype=bool)
    values = getattr(scipy_losses, f"{loss}_loss")(rows().tolist(), temperature=temperature, **arrays)
    return float(values.loss)


@pytest.mark.parametrize("temperature", [0.2, 2e-3])
@pytest.mark.parametrize("name", CALLS)
def test_backends_compute_the_independent_value(name: str, temperature: float) -> None:
    for backend in ("auto", "dense", "tiled", "exact"):
        with tiles_of(4):
            found = called(name)(rows(), temperature=temperature, backend=backend)
        assert found.item() == pytest.approx(expected(name, temperature), rel=1e-11), backend


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if k % 3 == 0 else pytest.mark.slow) for k, name in enumerate(CALLS)]
)
@pytest.mark.quick(1)
def test_second_derivatives_are_correct(name: str) -> None:
    z = rows().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda z: called(name)(z, temperature=0.5), (z,))
    (by_double,) = torch.autograd.grad(called(name)(z, temperature=0.5), z, create_graph=True)
    (plain,) = torch.autograd.grad(called(name)(z, temperature=0.5), z)
    assert torch.allclose(by_double, plain, rtol=1e-12, atol=1e-13)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from torch
@pytest.mark.parametrize(
    "name", [name if name == "own denominators" else pytest.param(name, marks=pytest.mark.slow) for name in CALLS]
)
@pytest.mark.slow
def test_compiled_call_gives_the_same_gradient(name: str) -> None:
    z = rows().requires_grad_()
    torch.compiler.reset()  # torch compiles a function a limited number of times
    compiled = torch.compile(called(name), fullgraph=True, backend="aot_eager")
    (found,) = torch.autograd.grad(compiled(z, temperature=0.5), z)
    (plain,) = torch.autograd.grad(called(name)(z, temperature=0.5), z)
    assert torch.allclose(found, plain, rtol=1e-12, atol=1e-13)


@pytest.mark.slow
def test_compiled_call_checks_that_no_partner_is_ignored() -> None:
    ignored = torch.zeros(4, 4, dtype=torch.bool)
    compiled = torch.compile(fast.nt_xent_loss, fullgraph=True, backend="aot_eager")
    compiled(rows(4), torch.tensor([1, 0, 3, 2]), ignored=ignored)
    ignored[2, 3] = True
    with pytest.raises(ValueError, match=r"^ignored: expected False for every row and its positive, got True in row 2"):
        compiled(rows(4), torch.tensor([1, 0, 3, 2]), ignored=ignored)


@pytest.mark.parametrize("given", [{"labels": LABELS, "ignored": mask()}, {"positives": mask(), "ignored_ids": IDS}])
def test_triton_refuses_a_mask_of_ignored_pairs_and_ids_with_a_mask_of_positives(given: dict[str, Tensor]) -> None:
    z = rows(dtype=torch.float32)
    with pytest.raises(ValueError, match=r'^backend="triton": the kernels support ignored pairs by ids only'):
        fast.supcon_loss(z, **given, backend="triton")


def test_triton_refuses_ignored_ids_in_supcon_epsilon_loss() -> None:
    with pytest.raises(ValueError, match=r"mask of positives or in supcon_epsilon_loss; backend=\"auto\""):
        fast.supcon_epsilon_loss(rows(dtype=torch.float32), LABELS, ignored_ids=IDS, backend="triton")


@pytest.mark.parametrize("changed", ["ignored", "ignored_ids"])
def test_mask_and_ids_must_not_change_before_the_backward_pass(changed: str) -> None:
    given = {"ignored": mask(), "ignored_ids": IDS.clone()}
    loss = fast.supcon_loss(rows().requires_grad_(), LABELS, **given)
    given[changed].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_module_passes_the_arguments_on() -> None:
    z = rows()
    found = fast.SupConLoss(temperature=0.5)(z, LABELS, ignored=mask(), ignored_ids=IDS)
    assert found == fast.supcon_loss(z, LABELS, ignored=mask(), ignored_ids=IDS, temperature=0.5)


def test_unsigned_and_signed_ids_are_compared_as_numbers() -> None:
    z, references = rows(2), rows(3, 1)
    ids, others = torch.tensor([2**64 - 1, 4], dtype=torch.uint64), torch.tensor([-1, 4, 7])
    options = {"ref_embeddings": references, "ref_labels": torch.tensor([0, 1, 2])}
    found = fast.supcon_loss(z, torch.tensor([0, 0]), ignored_ids=ids, ref_ignored_ids=others, **options)
    ignored = torch.tensor([[False, False, False], [False, True, False]])
    assert found == fast.supcon_loss(z, torch.tensor([0, 0]), ignored=ignored, **options)


def test_ignored_positives_do_not_count_and_ignored_columns_leave_no_trace() -> None:
    """Each anchor's value is that of the batch without the column that all anchors ignore."""
    z, kept = rows(), torch.arange(N) != 4
    ignored = (torch.arange(N) == 4).expand(N, N)
    each = fast.supcon_loss(z, LABELS, ignored=ignored, reduction="none")
    assert torch.allclose(each[kept], fast.supcon_loss(z[kept], LABELS[kept], reduction="none"), rtol=1e-13)


def test_large_norm_of_a_row_that_is_ignored_does_not_overflow() -> None:
    z = rows(4)
    z[3] = 1e200
    ignored = torch.zeros(4, 4, dtype=torch.bool)
    ignored[:, 3] = ignored[3] = True
    found = fast.supcon_loss(z, torch.tensor([0, 0, 1, 1]), ignored=ignored, similarity="dot", temperature=1.0)
    result = reference.supcon_loss(
        z.tolist(), [0, 0, 1, 1], ignored=ignored.tolist(), similarity="dot", temperature=1.0
    ).loss
    assert found.item() == pytest.approx(result, rel=1e-12)


@pytest.mark.parametrize("backend", ["auto", "tiled", "exact"])
def test_epsilon_loss_compares_with_the_largest_pair_that_counts(backend: Any) -> None:
    """The anchor's logits are 1 (itself), 2 and 0.5 (pairs that count), and 60 (ignored)."""
    z = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.5, 0.0], [60.0, 0.0]], dtype=torch.float64)
    ignored = torch.zeros(4, 4, dtype=torch.bool)
    ignored[0, 3] = True
    options = {"temperature": 1.0, "anchors": torch.tensor([True, False, False, False]), "backend": backend}
    found = fast.supcon_epsilon_loss(z, torch.tensor([0, 1, 0, 1]), ignored=ignored, **options)
    e = [math.exp(s - 2.0) + 1e-8 for s in (2.0, 0.5)]
    assert found.item() == pytest.approx(-math.log(e[1] / sum(e)) / (1 + 1e-8), rel=1e-14)


@pytest.mark.parametrize("backend", ["auto", "tiled", "exact"])
def test_epsilon_loss_has_finite_derivatives_beside_ignored_pairs(backend: Any) -> None:
    """The ignored pair's exponential would overflow; the last anchor has only ignored pairs."""
    z = rows(4).requires_grad_()
    ignored = torch.zeros(4, 4, dtype=torch.bool)
    ignored[0, 3] = ignored[3] = True

    def loss(z: Tensor) -> Tensor:
        far = torch.tensor([1.0, 1.0, 1.0, 2000.0], dtype=z.dtype)[:, None]
        labels, options = torch.tensor([0, 0, 1, 1]), {"temperature": 0.5, "backend": backend}
        return fast.supcon_epsilon_loss(z * far, labels, ignored=ignored, reduction="none", **options)[[0, 1, 3]].sum()

    (gradient,) = torch.autograd.grad(loss(z), z, create_graph=True)
    (again,) = torch.autograd.grad(gradient.square().sum(), z)
    assert gradient.isfinite().all()
    assert again.isfinite().all()
    assert gradient.any()


def case(**arguments: Any) -> Case:
    given = {"labels": LABELS.tolist(), **arguments}
    return Case("drawn/supcon", "supcon", rows().numpy(), given, {})


def test_case_leaves_out_the_pairs_of_the_reference() -> None:
    for name, value in (("ignored", mask().tolist()), ("ignored_ids", IDS.tolist())):
        one = case(**{name: value})
        terms = reference.supcon_loss(
            one.embeddings, LABELS.tolist(), **{name: np.array(value) if name == "ignored" else value}
        ).terms
        assert one.positives() == terms.positives
        positive = [set(p) for p in one.positives()]
        negatives = [[a for a in members if a not in p] for members, p in zip(one.members(), positive, strict=True)]
        assert negatives == terms.negatives


def test_peers_skip_ignored_pairs() -> None:
    ours = ("reference", "scipy_losses", "fast")
    peers = [kind for kind in ALL if kind.__module__.rpartition(".")[2] not in ours]
    assert peers
    for kind in peers:
        for name, value in (("ignored", mask().tolist()), ("ignored_ids", IDS.tolist())):
            assert kind.support.refuses(case(**{name: value})), kind.name
    takes = [kind.name for kind in ALL if kind not in peers and not kind.support.refuses(case(ignored=mask().tolist()))]
    assert {"fast", "fast-exact", "fast-tiled", "fast-dense", "reference"} <= set(takes)
    assert "fast-triton" not in takes


def test_target_without_the_parameter_is_not_judged_on_ignored_pairs() -> None:
    plain = External(RIGHT["supcon", "labels"], loss="supcon")
    assert plain.refuses(case(ignored=mask().tolist())) == "has no parameter ignored"
    ours = External(fast.supcon_loss, loss="supcon")
    assert ours.refuses(case(ignored=mask().tolist())) is None
    assert set(IGNORED) <= ours.claim.passed


def test_random_batches_have_ignored_pairs_only_for_targets_that_take_them() -> None:
    ours = External(fast.supcon_loss, loss="supcon").claim
    drawn = [draw(ours, 0, number) for number in range(24)]
    assert {name for one in drawn for name in one.arguments} >= {"ignored", "ignored_ids", "ref_ignored_ids"}
    plain = External(RIGHT["supcon", "labels"], loss="supcon").claim
    assert all(IGNORED.keys().isdisjoint(draw(plain, 0, number).arguments) for number in range(8))


def test_shrinking_keeps_the_pairs_of_the_remaining_rows() -> None:
    one = case(ignored=mask().tolist(), ignored_ids=IDS.tolist())
    found = with_rows(one, [0, 2, 5])
    assert found is not None
    assert found.arguments["ignored"] == mask()[[0, 2, 5]][:, [0, 2, 5]].tolist()
    assert found.arguments["ignored_ids"] == IDS[[0, 2, 5]].tolist()
    referring = case(
        ignored=mask(N, 4).tolist(), ignored_ids=IDS.tolist(), ref_ignored_ids=[1, 2, 3, 4], ref_labels=[0] * 4
    )
    referring.others["ref_embeddings"] = rows(4).numpy()  # type: ignore[index]
    smaller = _with_others(referring, "ref_embeddings", [1, 3])
    assert smaller is not None
    assert smaller.arguments["ignored"] == mask(N, 4)[:, [1, 3]].tolist()
    assert smaller.arguments["ref_ignored_ids"] == [2, 4]


def test_all_pairs_ignored_gives_zero() -> None:
    z = rows().requires_grad_()
    for backend in ("auto", "tiled", "exact"):
        loss = fast.supcon_loss(z, LABELS, ignored=torch.ones(N, N, dtype=torch.bool), backend=backend)
        (gradient,) = torch.autograd.grad(loss, z)
        assert loss.item() == 0
        assert not gradient.any()
    every = fast.supcon_loss(z, LABELS, ignored=torch.ones(N, N, dtype=torch.bool), no_positive="nan")
    assert math.isnan(every.item())
