"""Simulated machines: torch evaluates sums in another order, and functions with other last digits.

A correct BLAS may add the terms of a product in any order, with or without fused multiply-add, and a correct library of
functions may return a neighbour of the nearest number. A ``Machine`` is one such choice, drawn from a seed:

    with Machine(seed=7):
        loss = supcon_loss(embeddings, labels)

- Every sum and every product of matrices adds its terms in a random order.
- Every elementary function such as exp, log or sigmoid is moved by up to one unit in the last place.
- Functions that consist of several of these, such as logsumexp, softmax or a norm, are evaluated by their parts,
  because their last operation is correctly rounded. They are not moved as a whole.

Results of bfloat16 and float16 are added up in float32 and rounded once. Integers and booleans are not changed.

Implementations that do not call torch, such as the loops of the reference, are judged on a ``turned`` case instead.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pairproof.conformance.suite.cases import Case
from pairproof.conformance.suite.records import Matrix, Outcome
from pairproof.conformance.truth.rounding import Dispatch

ATEN: Any = torch.ops.aten

MOVED = frozenset(
    {
        *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cos", "cosh", "digamma", "erf", "erfc"),
        *("erfinv", "exp", "exp2", "expm1", "lgamma", "log", "log10", "log1p", "log2", "logit", "pow", "rsqrt"),
        *("sigmoid", "sin", "sinh", "special_log_ndtr", "tan", "tanh", "xlogy"),
    }
)
"""Elementary functions, which are moved by up to one unit in the last place."""

POWERS = frozenset({"exp", "exp2", "pow"})
"""Of these, results that are powers of two stay. The C standard prescribes exp(0) = 1; the others scale rows."""

ORDERS = 64
"""Number of orders of each length from which machines choose."""

STEPS = 1 << 16
"""Number of random steps from which machines choose consecutive ones."""

NUMBERS = 16
"""How many random numbers a machine draws for each operation; more than one operation needs."""

PRODUCTS_UP_TO = 1 << 15
"""Largest number of products that are rounded one by one, as without fused multiply-add."""

MANTISSA = {
    torch.float64: (torch.int64, (1 << 52) - 1),
    torch.float32: (torch.int32, (1 << 23) - 1),
}
"""The dtypes whose functions are moved, each with the integers of the same size and the mask of its fraction."""

WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
"""The dtype in which sums of a narrow dtype are computed."""


class Machine(Dispatch):
    """Another machine, which torch uses inside a ``with`` statement.

    Equal seeds give equal digits. As on a real machine, the same operation on the same tensors gives the same result
    each time: orders and steps depend only on the seed, the operation and the shape of its first tensor.
    """

    def __init__(self, seed: int, *, orders: bool = True, functions: bool = True) -> None:
        """Draw a machine.

        Args:
            seed: selects the orders of the sums and the steps of the functions.
            orders: whether sums and products have another order.
            functions: whether elementary functions are moved.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.orders, self.functions, self.seed = orders, functions, seed
        self._numbers: dict[tuple[str, torch.Size], list[float]] = {}
        self._left: Iterator[float] = iter(())
        self._rules: dict[Any, _Rule | None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Evaluate an operation as this machine does."""
        kwargs = kwargs or {}
        try:
            rule = self._rules[func]
        except KeyError:
            rule = self._rules[func] = self._rule(func)
        if rule is None or not _applies(args):
            return func(*args, **kwargs)
        given = {key: value for key, value in kwargs.items() if key not in rule.out} if rule.out else kwargs
        key = rule.name, args[0].shape
        if key not in self._numbers:
            draw = random.Random(f"{self.seed} {rule.name} {tuple(args[0].shape)}")
            self._numbers[key] = [draw.random() for _ in range(NUMBERS)]
        self._left = itertools.cycle(self._numbers[key])
        found = rule.evaluate(*args, **given)
        if found is None:  # the rule leaves these arguments alone
            return func(*args, **kwargs)
        if rule.in_place:
            return args[0].copy_(found)
        if not rule.out:
            return found
        for target, result in zip(rule.out, found if isinstance(found, tuple) else (found,), strict=True):
            kwargs[target].resize_(result.shape).copy_(result)
        return kwargs[rule.out[0]] if len(rule.out) == 1 else tuple(kwargs[key] for key in rule.out)

    def _rule(self, func: Any) -> _Rule | None:
        """Return how an operation is evaluated; None for one whose result is the same on every machine."""
        name, in_place, out = _described(func)
        if name in MOVED:
            return _Rule(name, partial(self._function, name), in_place, out) if self.functions else None
        evaluate = getattr(self, f"_op_{name.lstrip('_')}", None)
        if evaluate is None or not (self.orders or name in COMPOSITE):
            return None
        return _Rule(name, evaluate, in_place, out)

    def _below(self, n: int) -> int:
        """Return a random whole number below n."""
        return int(next(self._left) * n)

    # Elementary functions.

    def _function(self, name: str, *args: Any, **kwargs: Any) -> Tensor | None:
        if name == "pow" and not isinstance(args[1], Tensor) and args[1] in (-2, -1, 0, 0.5, 1, 2):
            return None  # a product, a quotient or a root, which are correctly rounded
        return self.moved(getattr(ATEN, name)(*args, **kwargs), exact_powers=name in POWERS)

    def moved(self, x: Tensor, *, exact_powers: bool = False) -> Tensor:
        """Return numbers moved by one unit in the last place, or by none. Zeros, infinities and NaN stay."""
        count = x.numel()
        if not self.functions or x.dtype not in MANTISSA or count == 0:
            return x
        factors = _factors(x.dtype)
        if count > STEPS // 2:
            factors = factors.repeat(-(-count // STEPS) + 1)
        start = self._below(len(factors) - count)
        # The next number in the direction of x / 2, of x, which is x itself, or of 2 x.
        found = torch.nextafter(x, x * factors[start : start + count].view(x.shape))
        if not exact_powers:
            return found
        integer, mask = MANTISSA[x.dtype]
        return torch.where(x.contiguous().view(integer) & mask == 0, x, found)

    def _exp(self, x: Tensor) -> Tensor:
        return self.moved(x.exp(), exact_powers=True)

    def _log(self, x: Tensor) -> Tensor:
        return self.moved(x.log())

    def _log1p(self, x: Tensor) -> Tensor:
        return self.moved(x.log1p())

    # Sums.

    def added(self, x: Tensor) -> Tensor:
        """Return the sums over the last axis, in a random order."""
        n = x.shape[-1]
        if n < 2 or not self.orders or x.numel() == 0:
            return x.sum(-1)
        x = x.index_select(-1, self._order(n))
        kind = self._below(3)
        if kind == 0:
            return x.sum(-1)
        if kind == 1:  # two parts
            cut = 1 + self._below(n - 1)
            return x[..., :cut].sum(-1) + x[..., cut:].sum(-1)
        if n > 8:  # as BLAS adds
            return x.matmul(x.new_ones(n))
        total, *rest = x.unbind(-1)
        for term in rest:
            total = total + term
        return total

    def _order(self, n: int) -> Tensor:
        return _orders(n)[self._below(ORDERS)]

    def _summed(self, x: Tensor, dim: Any, keepdim: bool, dtype: torch.dtype | None) -> tuple[Tensor, int] | None:
        """Return the sums over some axes in the dtype of the computation, and the number of terms of each."""
        kind = dtype or x.dtype
        if not kind.is_floating_point or x.is_complex():
            return None
        x = x.to(WIDE.get(kind, kind))
        if x.dim() == 2 and dim in ([1], [-1], 1, -1):
            found = self.added(x)
            return (found.unsqueeze(1) if keepdim else found), x.shape[1]
        dims = [dim] if isinstance(dim, int) else [*(dim or range(x.dim()))]
        dims = [d % x.dim() for d in dims] if x.dim() else []
        rest = [d for d in range(x.dim()) if d not in dims]
        shape = [1 if d in dims else size for d, size in enumerate(x.shape)]
        count = math.prod(x.shape[d] for d in dims)
        found = self.added(x.permute([*rest, *dims]).reshape([*(x.shape[d] for d in rest), count]))
        return (found.reshape(shape) if keepdim else found), count

    def _total(self, x: Tensor, dim: Any) -> Tensor:
        """Return the sums over some axes, which are kept with length 1."""
        found = self._summed(x, dim, True, None)
        assert found is not None
        return found[0]

    def _op_sum(self, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor | None:
        found = self._summed(x, dim, keepdim, dtype)
        return None if found is None else found[0].to(dtype or x.dtype)

    def _op_mean(self, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor | None:
        found = self._summed(x, dim, keepdim, dtype)
        return None if found is None else (found[0] / found[1]).to(dtype or x.dtype)

    def _op_linalg_vector_norm(
        self, x: Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
    ) -> Tensor | None:
        if p not in (1, 2):
            return None
        wide = x.to(WIDE.get(dtype or x.dtype, dtype or x.dtype))
        found = self._summed(wide * wide if p == 2 else wide.abs(), dim, keepdim, wide.dtype)
        if found is None:
            return None
        return (found[0].sqrt() if p == 2 else found[0]).to(dtype or x.dtype)

    def _op_norm(self, x: Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
        return self._op_linalg_vector_norm(x, 2 if p is None else p, dim, keepdim, dtype=dtype)

    def _op_prod(self, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor | None:
        if (dtype or x.dtype) not in (torch.float64, torch.float32):
            return None
        x = x.to(dtype or x.dtype)
        if dim is None:
            x, dim = x.reshape(-1), 0
        if not x.dim() or not x.shape[dim]:
            return None
        return x.index_select(dim, self._order(x.shape[dim])).prod(dim, keepdim)

    def _op_cumsum(self, x: Tensor, dim: int, *, dtype: Any = None) -> Tensor | None:
        n = x.shape[dim] if x.dim() else 1
        if n < 2 or (dtype or x.dtype) not in (torch.float64, torch.float32):
            return None
        x, cut = x.to(dtype or x.dtype), 1 + self._below(n - 1)
        first, second = (part.cumsum(dim) for part in torch.split(x, [cut, n - cut], dim))
        return torch.cat([first, second + first.narrow(dim, cut - 1, 1)], dim)

    def _op_index_add(self, x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor | None:
        if not index.dim() or len(index) < 2:
            return None
        order = self._order(len(index))
        return x.index_add(dim, index[order], source.index_select(dim, order), alpha=alpha)

    def _op_scatter_add(self, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor | None:
        n = index.shape[dim] if index.dim() else 1
        if n < 2:
            return None
        order = self._order(n)
        return x.scatter_add(dim, index.index_select(dim, order), source.narrow(dim, 0, n).index_select(dim, order))

    def _op_index_put(
        self, x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False, *unused: bool
    ) -> Tensor | None:
        if not accumulate or len(indices) != 1 or indices[0] is None or indices[0].dim() != 1 or not values.dim():
            return None
        index = indices[0].nonzero().squeeze(1) if indices[0].dtype == torch.bool else indices[0]
        values, order = values.expand(len(index), *x.shape[1:]), self._order(len(index))
        return x.index_put((index[order],), values[order], accumulate=True)

    _op_index_put_impl = _op_index_put

    def _op_segment_reduce(
        self, x: Tensor, reduce: str, *, lengths: Tensor | None = None, axis: int = 0, **more: Any
    ) -> Tensor | None:
        if reduce not in ("sum", "mean") or lengths is None or lengths.dim() != 1 or axis:
            return None
        segments, order = torch.repeat_interleave(lengths), self._order(len(x))
        order = order[segments[order].argsort(stable=True)]
        found: Tensor = ATEN.segment_reduce(x[order], reduce, lengths=lengths, axis=axis, **more)
        return found

    # Products.

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the product of matrices or stacks of them, its terms added in a random order."""
        kind, n = a.dtype, a.shape[-1]
        a, b = a.to(WIDE.get(kind, kind)), b.to(WIDE.get(kind, kind))
        if n < 2 or not self.orders:
            return a.matmul(b).to(kind)
        order = self._order(n)
        a, b = a.index_select(-1, order), b.index_select(-2, order)
        terms = math.prod(a.shape) * b.shape[-1]
        if terms <= PRODUCTS_UP_TO and self._below(2):  # without fused multiply-add
            return self.added(a.unsqueeze(-2) * b.transpose(-1, -2).unsqueeze(-3)).to(kind)
        cuts = sorted({0, n, *(1 + self._below(n - 1) for _ in range(self._below(3)))})
        parts = [a[..., i:j].contiguous().matmul(b[..., i:j, :].contiguous()) for i, j in itertools.pairwise(cuts)]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total.to(kind)

    def _op_mm(self, a: Tensor, b: Tensor) -> Tensor:
        return self.product(a, b)

    _op_bmm = _op_mm

    def _op_mv(self, a: Tensor, b: Tensor) -> Tensor:
        return self.product(a, b[:, None])[:, 0]

    def _op_dot(self, a: Tensor, b: Tensor) -> Tensor:
        return self.product(a[None], b[:, None])[0, 0]

    _op_vdot = _op_dot

    def _op_linalg_vecdot(self, a: Tensor, b: Tensor, *, dim: int = -1) -> Tensor | None:
        return self._op_sum(a * b, dim)

    def _op_addmm(self, x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        product = self.product(a, b)
        product = product if alpha == 1 else product * alpha
        return product if beta == 0 else (x if beta == 1 else x * beta) + product

    _op_baddbmm = _op_addmm

    def _op_addmv(self, x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        product = self._op_mv(a, b)
        product = product if alpha == 1 else product * alpha
        return product if beta == 0 else (x if beta == 1 else x * beta) + product

    def _op_addbmm(self, x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        return self._op_addmm(x, a.transpose(0, 1).flatten(1), b.flatten(0, 1), beta=beta, alpha=alpha)

    def _op_addcmul(self, x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
        return self.multiplied_and_added(a if value == 1 else a * value, b, x)

    def _op_add(self, x: Any, other: Any, *, alpha: float = 1) -> Tensor | None:
        if alpha in (1, -1) or not isinstance(other, Tensor):
            return None
        return self.multiplied_and_added(other, other.new_tensor(alpha), x)

    def _op_sub(self, x: Any, other: Any, *, alpha: float = 1) -> Tensor | None:
        return self._op_add(x, other, alpha=-alpha)

    def _op_lerp(self, x: Tensor, end: Tensor, weight: Any) -> Tensor:
        weight = torch.as_tensor(weight, dtype=x.dtype)
        near = self.multiplied_and_added(weight, end - x, x)
        return torch.where(weight.abs() < 0.5, near, self.multiplied_and_added(weight - 1, end - x, end))

    def multiplied_and_added(self, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
        """Return ``a * b + x``, rounded once or twice."""
        product = a * b
        plain = x + product
        if plain.dtype not in (torch.float64, torch.float32) or self._below(2):
            return plain
        if plain.dtype == torch.float32:
            return (x.double() + a.double() * b.double()).float()
        # The errors of the product (Dekker) and of the sum (Knuth), which are exact unless something overflows.
        (a1, a2), (b1, b2) = _halves(a), _halves(b)
        lost = ((a1 * b1 - product) + a1 * b2 + a2 * b1) + a2 * b2
        rest = plain - x
        once = plain + ((x - (plain - rest)) + (product - rest) + lost)
        return torch.where(once.isfinite(), once, plain)

    # Functions that are evaluated by their parts.

    def _op_logsumexp(self, x: Tensor, dim: Any, keepdim: bool = False) -> Tensor | None:
        if not x.dim() or x.numel() == 0 or x.dtype in WIDE:
            return None
        top = x.amax(dim, keepdim=True)
        shift = top.masked_fill(~top.isfinite(), 0)
        found = self._log(self._total(self._exp(x - shift), dim)) + shift
        return found if keepdim else found.squeeze(dim)

    def _op_log_softmax(self, x: Tensor, dim: int, half_to_float: bool = False) -> Tensor | None:
        if not x.dim() or x.numel() == 0 or x.dtype in WIDE:
            return None
        shifted = x - x.amax(dim, keepdim=True)
        return shifted - self._log(self._total(self._exp(shifted), dim))

    def _op_log_softmax_backward_data(self, grad: Tensor, found: Tensor, dim: int, dtype: Any) -> Tensor | None:
        if not grad.dim() or found.dtype in WIDE:
            return None
        return grad - self._exp(found) * self._total(grad, dim)

    def _op_softmax(self, x: Tensor, dim: int, half_to_float: bool = False) -> Tensor | None:
        if not x.dim() or x.numel() == 0 or x.dtype in WIDE:
            return None
        exponentials = self._exp(x - x.amax(dim, keepdim=True))
        return exponentials / self._total(exponentials, dim)

    def _op_softmax_backward_data(self, grad: Tensor, found: Tensor, dim: int, dtype: Any) -> Tensor | None:
        if not grad.dim() or found.dtype in WIDE:
            return None
        product = grad * found
        return product - found * self._total(product, dim)

    def _op_log_sigmoid_forward(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        if x.dtype in WIDE:
            return None
        exponential = self._exp(-x.abs())
        return x.clamp(max=0) - self._log1p(exponential), exponential

    def _op_softplus(self, x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor | None:
        if x.dtype in WIDE:
            return None
        return torch.where(x * beta > threshold, x, self._log1p(self._exp(x * beta)) / beta)

    def _op_softplus_backward(self, grad: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor | None:
        if x.dtype in WIDE:
            return None
        exponential = self._exp(x * beta)
        return torch.where(x * beta > threshold, grad, grad * exponential / (exponential + 1))

    def _op_logaddexp(self, x: Tensor, other: Tensor) -> Tensor | None:
        if x.dtype in WIDE:
            return None
        found = torch.maximum(x, other) + self._log1p(self._exp(-(x - other).abs()))
        return torch.where((x == other) & x.isinf(), x, found)

    def _op_binary_cross_entropy_with_logits(
        self, x: Tensor, target: Tensor, weight: Tensor | None = None, of_positives: Tensor | None = None, how: int = 1
    ) -> Tensor | None:
        if x.dtype in WIDE:
            return None
        logs, _ = self._op_log_sigmoid_forward(x)  # type: ignore[misc]
        logs = logs if of_positives is None else logs * ((of_positives - 1) * target + 1)
        found = (1 - target) * x - logs
        found = found if weight is None else found * weight
        return found if how == 0 else self._op_mean(found) if how == 1 else self._op_sum(found)

    def _op_nll_loss_forward(
        self, x: Tensor, target: Tensor, weight: Tensor | None, how: int, ignored: int
    ) -> tuple[Tensor, Tensor] | None:
        if how == 0 or x.dim() != 2 or x.dtype in WIDE:
            return None
        each, _ = ATEN.nll_loss_forward(x, target, weight, 0, ignored)
        total = ATEN.nll_loss_forward(x, target, weight, 2, ignored)[1]
        found = self.added(each)
        return (found / total if how == 1 else found), total


COMPOSITE = frozenset(
    {
        *("logsumexp", "_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data"),
        *("log_sigmoid_forward", "softplus", "softplus_backward", "logaddexp", "binary_cross_entropy_with_logits"),
    }
)
"""Operations that contain an elementary function."""


class _Rule(NamedTuple):
    """How an operation is evaluated.

    Attributes:
        name: name of the operation, the same for all its variants.
        evaluate: returns the result, or None if these arguments give the same result on every machine.
        in_place: whether the result replaces the first argument.
        out: the names of arguments that take the results.
    """

    name: str
    evaluate: Callable[..., Any]
    in_place: bool
    out: tuple[str, ...]


@cache
def _described(func: Any) -> tuple[str, bool, tuple[str, ...]]:
    """Return the name of an operation, whether its result replaces the first argument, and what takes its results."""
    schema = func._schema
    name = schema.name.partition("::")[2]
    written = [one for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    out = tuple(one.name for one in written if one.kwarg_only)
    in_place = bool(written) and not out
    return name.rstrip("_") if in_place else name, in_place, out


@cache
def _orders(n: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(n)
    return [torch.randperm(n, generator=generator) for _ in range(ORDERS)]


@cache
def _factors(dtype: torch.dtype) -> Tensor:
    return torch.randint(-1, 2, (STEPS,), generator=torch.Generator().manual_seed(0)).to(dtype).exp2()


def _applies(args: Sequence[Any]) -> bool:
    """Whether an operation is evaluated on ordinary tensors on the CPU."""
    x = args[0] if args else None
    return isinstance(x, Tensor) and type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu"


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split float64 numbers into two parts of 26 bits (Veltkamp)."""
    big = x * 134217729.0
    high = big - (big - x)
    return high, x - high


def turned(case: Case, seed: int) -> tuple[Case, Callable[[Outcome], Outcome]]:
    """Permute the columns of every matrix of a case, and flip the signs of some.

    Dot products and norms add the same terms in another order, so the values stay the same up to rounding.

    Args:
        case: the case.
        seed: selects the order and the signs.

    Returns:
        The new case, and a function that undoes the change in the gradients of an outcome.
    """
    draw, width = np.random.default_rng(seed), case.embeddings.shape[1]
    order, signs = draw.permutation(width), draw.choice([-1.0, 1.0], width)
    back = np.argsort(order)

    def turn(matrix: Matrix) -> Matrix:
        return np.ascontiguousarray((matrix * signs)[:, order])

    def undo(outcome: Outcome) -> Outcome:
        others = {name: found[:, back] * signs for name, found in outcome.other_gradients.items()}
        gradient = None if outcome.gradient is None else outcome.gradient[:, back] * signs
        return replace(outcome, gradient=gradient, other_gradients=others)

    others = {name: turn(matrix) for name, matrix in case.others.items()}
    return replace(case, embeddings=turn(case.embeddings), others=others), undo
