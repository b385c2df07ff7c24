"""On every simulated machine, right implementations are within their bounds; the simulation itself is correct."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from judge_simulated import Result, Summary, evaluate, fast, judge, right
from simulated import MOVED, Machine, turned
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pairproof.conformance.judge.verify import Limits
from pairproof.conformance.suite.golden import GoldenCase, load_golden
from pairproof.conformance.suite.subset import covering
from pairproof.conformance.truth import rounding
from pairproof.conformance.truth.evaluate import stored_truth

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

FLOATS = (torch.float64, torch.float32)


def randoms(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Right implementations are within their bounds.


def small_covering(largest: int) -> list[GoldenCase]:
    """Cases that have every trait of all cases of up to this size."""
    stored: dict[Any, GoldenCase | None] = {g.case: g for g in load_golden() if g.case.size <= largest}
    return [golden for case in covering(stored) if (golden := stored[case]) is not None]


def judged(cases: list[GoldenCase], seeds: Any, limits: Callable[..., Any] = Limits, names: str = "") -> list[Result]:
    implementations = [one for one in right() if one.name in names.split(",")] if names else right()
    return [result for golden in cases for result in judge(golden, implementations, seeds, limits)]


def assert_within_bounds(results: list[Result], least: int) -> None:
    assert sum(result.compared for result in results) >= least
    above = [result for result in results if not result.ratio <= 1]
    assert not above, f"{len(above)} of {len(results)} results are above their bound: {above[:3]}"


@pytest.mark.parametrize("part", range(2))
def test_no_result_of_a_small_case_exceeds_its_bound_on_a_simulated_machine(part: int) -> None:
    assert_within_bounds(judged(small_covering(8)[part::32], range(1)), least=2500)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(16))
def test_no_result_exceeds_its_bound_on_any_simulated_machine(part: int) -> None:
    results = judged(load_golden()[2 * part + part % 2 :: 32], range(part, part + 1))
    assert len(results) >= 1250
    assert_within_bounds(results, least=20_000)


class Scaled(Limits):
    """Bounds multiplied by a factor."""

    factor = 1.0

    def of(self, *given: Any, **more: Any) -> Any:
        found = super().of(*given, **more)
        found = found.map_values(lambda bound: bound * self.factor)
        return replace(found, rows={name: rows * self.factor for name, rows in found.rows.items()})


class Sixteenth(Scaled):
    factor = 1 / 16


class OnlyValues(Scaled):
    """The bounds on gradients are too small."""

    def of(self, *given: Any, **more: Any) -> Any:
        found = Limits.of(self, *given, **more)
        return replace(found, rows={name: rows / 16 for name, rows in found.rows.items()})


@pytest.mark.parametrize("limits", [Sixteenth, pytest.param(OnlyValues, marks=pytest.mark.slow)])
def test_bounds_that_are_too_small_are_exceeded(limits: type[Limits]) -> None:
    cases = [golden for golden in small_covering(8) if golden.case.loss in ("supcon", "info_nce")][:12]
    results = judged(cases, range(2), limits, "fast-dense,scipy")
    assert any(1 < result.ratio < math.inf for result in results)


def test_summary_counts_results_above_their_bound() -> None:
    summary = Summary()
    summary.add("fast", "float64", "golden/a", [0.0, 0.45, 1.5])
    summary.add("fast", "float32", "golden/b", [math.inf])
    lines = "\n".join(summary.lines())
    assert "4 results, 2 above the bound" in lines
    assert "fast            float64          3       1  1.500 golden/a" in lines
    assert "0.4 < ratio <= 0.5           1  25.000%" in lines
    assert "5 < ratio <= inf             1  25.000%" in lines


# The simulation is correct.


def run(operation: Callable[..., Any], *given: Any, seed: int = 0, **options: bool) -> Any:
    with Machine(seed, **options):
        return operation(*given)


SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda a, b: a.sum(),
    "sum of rows": lambda a, b: a.sum(1),
    "sum of columns": lambda a, b: a.sum(0, keepdim=True),
    "sum into a tensor": lambda a, b: torch.sum(a, 1, out=a.new_empty(len(a))),
    "mean": lambda a, b: a.mean(),
    "mean of rows": lambda a, b: a.mean(dim=-1, keepdim=True),
    "prod": lambda a, b: a[:, :9].prod(1),
    "cumsum": lambda a, b: a.cumsum(1),
    "norm": lambda a, b: a.norm(dim=1),
    "vector_norm": lambda a, b: torch.linalg.vector_norm(a, dim=1),
    "normalize": lambda a, b: F.normalize(a, dim=1),
    "mm": lambda a, b: a @ b.T,
    "mm into a tensor": lambda a, b: torch.mm(a, b.T, out=a.new_empty(len(a), len(b))),
    "mv": lambda a, b: a @ b[0],
    "dot": lambda a, b: a[0] @ b[0],
    "bmm": lambda a, b: a[None] @ b.T[None],
    "vecdot": lambda a, b: torch.linalg.vecdot(a, b),
    "einsum": lambda a, b: torch.einsum("id,jd->ij", a, b),
    "einsum of rows": lambda a, b: torch.einsum("id,id->i", a, b),
    "addmm": lambda a, b: torch.addmm(a[:, : len(b)], a, b.T, beta=0.5, alpha=2),
    "addmm in place": lambda a, b: a[:, : len(b)].clone().addmm_(a, b.T),
    "addmv": lambda a, b: torch.addmv(a[:, 0], a, b[0]),
    "baddbmm": lambda a, b: torch.baddbmm(a[None, :, : len(b)], a[None], b.T[None]),
    "addbmm": lambda a, b: torch.addbmm(a[:, : len(b)], a[None], b.T[None]),
    "addcmul": lambda a, b: torch.addcmul(a, b, a, value=-1),
    "addcmul in place": lambda a, b: a.clone().addcmul_(b, a),
    "add a multiple": lambda a, b: a.add(b, alpha=0.3),
    "lerp": lambda a, b: a.lerp(b, 0.3),
    "index_add": lambda a, b: a[0].index_add(0, torch.zeros(a.shape[1], dtype=torch.long), b[0]),
    "scatter_add": lambda a, b: a.scatter_add(1, torch.zeros(a.shape, dtype=torch.long), b),
    "index_put": lambda a, b: a.index_put((torch.zeros(len(b), dtype=torch.long),), b, accumulate=True),
    "segment_reduce": lambda a, b: torch.segment_reduce(a[:, 0], "sum", lengths=torch.tensor([5, len(a) - 5])),
}

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(torch, name) for name in ("exp", "exp2", "expm1", "log1p", "sigmoid", "tanh", "rsqrt", "log")},
    "exp in place": lambda a: a.clone().exp_(),
    "log1p into a tensor": lambda a: torch.log1p(a, out=torch.empty_like(a)),
    "pow": lambda a: a**1.7,
}

COMPOSITES: dict[str, Callable[[Tensor], Tensor]] = {
    "logsumexp": lambda a: a.logsumexp(1),
    "logsumexp of both": lambda a: a.logsumexp((0, 1), keepdim=True),
    "log_softmax": lambda a: a.log_softmax(1),
    "softmax": lambda a: a.softmax(1),
    "logsigmoid": F.logsigmoid,
    "softplus": F.softplus,
    "logaddexp": lambda a: torch.logaddexp(a, a.flip(0)),
    "cross_entropy": lambda a: F.cross_entropy(a, torch.arange(len(a)) % a.shape[1]),
    "binary_cross_entropy_with_logits": lambda a: F.binary_cross_entropy_with_logits(a, (a > 0).to(a.dtype)),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", SUMS)
def test_sums_have_other_orders_within_the_error_of_any_order(name: str, dtype: torch.dtype) -> None:
    a, b = (
        randoms(24, 33, dtype=dtype),
        randoms(17 if "mm" in name or name == "einsum" else 24, 33, dtype=dtype, seed=1),
    )
    here, exact = SUMS[name](a, b), SUMS[name](a.double(), b.double())
    found = [run(SUMS[name], a, b, seed=seed) for seed in range(20)]
    again = run(SUMS[name], a, b, seed=3)
    assert torch.equal(again, found[3])
    assert all(one.shape == here.shape and one.dtype == dtype for one in found)
    assert len({one.numpy().tobytes() for one in found}) > 1
    sizes = SUMS[name](a.abs().double(), b.abs().double()).abs() + 2 * (a.abs().amax() + b.abs().amax())
    for one in found:
        assert ((one.double() - exact).abs() <= 40 * torch.finfo(dtype).eps * sizes).all()
    off = run(SUMS[name], a, b, orders=False)
    assert torch.equal(off, here)


def steps_between(one: Tensor, other: Tensor) -> Tensor:
    kind = torch.int64 if one.dtype == torch.float64 else torch.int32
    return (one.view(kind) - other.view(kind)).abs()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_move_by_up_to_one_unit_in_the_last_place(name: str, dtype: torch.dtype) -> None:
    a = randoms(30, 20, dtype=dtype).abs() + 0.1
    here, found = FUNCTIONS[name](a), run(FUNCTIONS[name], a)
    steps = steps_between(here, found)
    assert steps.max() == 1
    assert 0.2 < (steps == 0).double().mean() < 0.5
    assert (found > here).any()
    assert (found < here).any()
    assert torch.equal(run(FUNCTIONS[name], a, functions=False), here)
    assert torch.equal(run(FUNCTIONS[name], a), found)
    assert not torch.equal(run(FUNCTIONS[name], a, seed=1), found)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", COMPOSITES)
def test_composite_functions_move_in_their_parts(name: str, dtype: torch.dtype) -> None:
    a = randoms(30, 20, dtype=dtype)
    here, found = COMPOSITES[name](a), [run(COMPOSITES[name], a, seed=seed) for seed in range(20)]
    assert len({one.numpy().tobytes() for one in found}) > 1
    for one in found:
        assert one.shape == here.shape
        assert ((one - here).abs() <= 30 * torch.finfo(dtype).eps * (1 + here.abs())).all()


@pytest.mark.parametrize("name", COMPOSITES)
def test_gradients_of_composite_functions_move_too(name: str) -> None:
    def gradient() -> Tensor:
        a = randoms(12, 7).requires_grad_()
        return torch.autograd.grad((COMPOSITES[name](a) ** 2).sum(), a)[0]

    here, found = gradient(), [run(gradient, seed=seed) for seed in range(5)]
    assert len({one.numpy().tobytes() for one in found}) == 5
    assert all(torch.allclose(one, here, rtol=1e-12, atol=1e-14) for one in found)


def test_machine_repeats_its_digits() -> None:
    a, b = randoms(24, 33), randoms(24, 33, seed=1)
    with Machine(0):
        first, second = ([operation(a, b) for operation in SUMS.values()] for _ in range(2))
        assert all(map(torch.equal, first, second))
        assert torch.equal(a.exp(), a.exp())
        assert torch.equal(a.exp(), a.clone().exp_())


def test_exact_results_and_special_values_stay() -> None:
    inf, nan = math.inf, math.nan
    special = torch.tensor([0.0, inf, -inf, nan], dtype=torch.float64)
    for seed in range(20):
        assert run(torch.exp, special, seed=seed)[1:3].tolist() == [inf, 0.0]
        assert run(torch.log, torch.ones(9), seed=seed).eq(0).all()
        assert run(torch.exp2, torch.arange(-9.0, 9.0), seed=seed).tolist() == [2.0**k for k in range(-9, 9)]
        assert run(lambda: torch.pow(torch.tensor(2.0), torch.tensor([3.0, -7.0])), seed=seed).tolist() == [8, 2**-7]
        squares = randoms(40)
        assert torch.equal(run(lambda x=squares: x**2, seed=seed), squares**2)
        assert torch.equal(run(torch.sqrt, squares.abs(), seed=seed), squares.abs().sqrt())
        assert run(lambda: torch.tensor([[-inf, -inf], [1.0, -inf]]).logsumexp(1), seed=seed)[0] == -inf
        found = run(lambda: torch.logaddexp(torch.tensor([inf, -inf]), torch.tensor([inf, -inf])), seed=seed)
        assert found.tolist() == [inf, -inf]


def test_integers_and_booleans_are_untouched() -> None:
    whole = torch.arange(24).reshape(4, 6)
    operations: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.sum(1),
        lambda x: x.cumsum(0),
        lambda x: x.prod(),
        lambda x: x @ x.T,
        lambda x: (x > 5).sum(0),
        lambda x: x**3,
        lambda x: x.index_add(0, torch.tensor([0, 0]), x[:2]),
    ]
    for operation in operations:
        assert torch.equal(run(operation, whole), operation(whole))


def test_products_are_added_with_and_without_fused_multiply_add() -> None:
    x, a, b = (randoms(500, seed=seed) for seed in range(3))
    twice = x + a * b
    pairs = zip(x.tolist(), a.tolist(), b.tolist(), strict=True)
    once = torch.tensor([float(Fraction(x) + Fraction(a) * Fraction(b)) for x, a, b in pairs], dtype=torch.float64)
    assert not torch.equal(twice, once)
    found = [run(torch.addcmul, x, a, b, seed=seed) for seed in range(20)]
    assert {torch.equal(one, twice) for one in found} == {True, False}
    assert all(torch.equal(one, twice) or torch.equal(one, once) for one in found)


def test_halves_are_summed_in_float32_and_rounded_once() -> None:
    x = randoms(4, 50, dtype=torch.bfloat16)
    for seed in range(10):
        found = run(lambda: x.sum(1), seed=seed)
        assert found.dtype == torch.bfloat16
        assert ((found.double() - x.double().sum(1)).abs() <= 2.0**-8 * x.double().sum(1).abs() + 1e-5).all()


class Names(TorchDispatchMode):
    """Records the names of operations with a result of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if (
            isinstance(found, Tensor)
            and found.is_floating_point()
            and not any(r.alias_info for r in func._schema.returns)
        ):
            self.seen.add(func._schema.name.partition("::")[2])
        return found


EXACT = frozenset(
    {
        *("_to_copy", "_unsafe_view", "abs", "add", "arange", "amax", "amin", "argmax", "cat", "ceil", "clamp"),
        *("clamp_max", "clamp_min", "clone", "constant_pad_nd", "copy", "diag_embed", "div", "empty", "empty_like"),
        *("empty_strided", "eye", "flip", "floor", "floor_divide", "full", "full_like", "gather", "index"),
        *("index_select", "log_sigmoid_backward", "masked_fill", "masked_scatter", "masked_select", "max", "maximum"),
        *("min", "minimum", "mul", "ne", "neg", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"),
        *("nll_loss_backward", "nll_loss_forward", "ones", "ones_like", "reciprocal", "remainder", "repeat"),
        *("repeat_interleave", "roll", "round", "rsub", "scalar_tensor", "scatter", "select_backward", "sgn", "sign"),
        *("slice_backward", "sort", "sqrt", "stack", "sub", "threshold_backward", "tril", "triu", "trunc"),
        *("unfold_backward", "where", "zeros", "zeros_like", "diagonal_backward", "select_scatter", "slice_scatter"),
        *("index_fill", "sigmoid_backward", "tanh_backward"),
    }
)
"""Operations whose results are copied or correctly rounded, so they are the same on every machine."""


@pytest.mark.slow
def test_every_operation_of_the_implementations_is_simulated_or_exact() -> None:
    names = Names()
    for golden in small_covering(16)[::3]:
        for one in right():
            if not one.refuses(golden.case):
                with names:
                    evaluate(one, golden.case, "float64", None)
    machine = Machine(0)
    unknown = {
        name for name in names.seen if name not in MOVED | EXACT and not hasattr(machine, f"_op_{name.lstrip('_')}")
    }
    assert not unknown
    assert len(names.seen) > 40


def test_turned_case_has_the_same_truth_and_other_digits() -> None:
    cases = [golden for golden in load_golden(losses=("supcon",)) if "/wide-" in golden.case.id]
    changed = 0
    numpy = [one for one in right() if one.name in ("reference", "scipy", "with_numpy")]
    for golden in (golden for golden in cases if golden.case.size <= 8):
        for one in (one for one in numpy if not one.refuses(golden.case)):
            here, there = (evaluate(one, golden.case, "float64", seed) for seed in (None, 5))
            changed += here.values != there.values
            true = stored_truth(golden.case, golden.expected)
            assert Limits(golden.case, true).compare(one, there, "float64").ratio <= 1
    assert changed


def test_turning_permutes_columns_and_flips_signs_of_every_matrix_alike() -> None:
    (case,) = [g.case for g in load_golden() if g.case.id == "golden/info_nce/queue"]
    found, undo = turned(case, 1)
    for name, matrix in case.matrices.items():
        assert not np.array_equal(found.matrices[name], matrix)
        np.testing.assert_allclose(found.matrices[name] @ found.embeddings.T, matrix @ case.embeddings.T, rtol=1e-12)
    (one,) = (one for one in fast() if one.name == "fast-exact")
    outcome = one.evaluate(found, "float64")
    back, here = undo(outcome), one.evaluate(case, "float64")
    np.testing.assert_allclose(back.gradient, here.gradient, rtol=1e-9, atol=1e-12)
    for name in case.others:
        np.testing.assert_allclose(back.other_gradients[name], here.other_gradients[name], rtol=1e-9, atol=1e-12)


# Each rule of the bounds holds, and is needed.

OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "rsub": lambda x, y: torch.rsub(x, 0.3),
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "reciprocal": lambda x, y: x.reciprocal(),
    "exp": lambda x, y: x.exp(),
    "log": lambda x, y: y.log(),
    "log1p": lambda x, y: y.log1p(),
    "sqrt": lambda x, y: y.sqrt(),
    "expm1": lambda x, y: x.expm1(),
    "pow": lambda x, y: x**2,
    "sum": lambda x, y: x.sum(1),
    "mm": lambda x, y: x @ y.T,
    "linalg_vector_norm": lambda x, y: torch.linalg.vector_norm(x, 2, 1, True),
    "logsumexp": lambda x, y: x.logsumexp(1),
    "logaddexp": torch.logaddexp,
    "log_sigmoid_forward": lambda x, y: F.logsigmoid(x),
    "log_sigmoid_backward": lambda x, y: slopes_of(F.logsigmoid, x),
    "_softmax": lambda x, y: x.softmax(1),
    "_softmax_backward_data": lambda x, y: torch._softmax_backward_data(x, y, 1, y.dtype),
}
"""For each rule of ``truth/rounding.py``, an operation to which it applies. The entries of y are positive."""

WITHOUT_ROUNDING = {"abs", "neg", "maximum", "amax", "max"}
"""The rules of operations that have no rounding errors of their own."""


def slopes_of(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    given = x.detach().requires_grad_()
    return torch.autograd.grad(function(given).sum(), given)[0]


def test_there_is_an_operation_for_every_rule_with_rounding_errors() -> None:
    assert OPERATIONS.keys() | WITHOUT_ROUNDING == rounding.RULES.keys()


@pytest.mark.parametrize("columns", [3, 200])
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_is_within_its_bound_and_not_without_its_own_rounding_errors(
    name: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation, u = OPERATIONS[name], 2.0**-24
    x = 4 * randoms(6, columns, dtype=torch.float32)
    y = 0.1 + randoms(6, columns, dtype=torch.float32, seed=1).abs()
    true = operation(x.double(), y.double())

    def bound() -> Tensor:
        arithmetic = rounding.Arithmetic(u)
        given = (rounding.Bounded(z.double(), torch.zeros_like(z).double(), arithmetic) for z in (x, y))
        return rounding.error_of(operation(*given))

    errors = [(run(operation, x, y, seed=seed).double() - true).abs() for seed in range(20)]
    allowed = bound()
    assert all((error <= allowed).all() for error in errors)
    rule = rounding.RULES[name]
    exact = rounding.Arithmetic(0.0)
    monkeypatch.setitem(rounding.RULES, name, lambda func, of, *given, **more: rule(func, exact, *given, **more))
    assert any((error > bound()).any() for error in errors)
