"""Bounds on rounding errors: tensors that carry, beside each entry, a bound on its error.

``Bounded`` wraps a float64 tensor. Every operation on it, autograd's backward pass included, also computes a bound on
the error that an implementation with unit roundoff u can make up to this point:

- the errors of the operands, multiplied by the absolute derivatives of the operation;
- plus the rounding errors of the operation itself, which the rules below state in units of u.

The bounds are of first order in u, except in exponentials of logits with large errors, whose results are at most 1.

*Sums.* Every addition has an error of at most u times its result, with or without fused multiply-add. In whatever order
n terms are added, the results add up to at most n - 1 times the sum of the absolute terms (Higham 2002, section 4.2).
The error of a dot product is at most n u times the sum of the absolute products (section 3.1). If the rounding errors
are independent and have mean 0, the sum of the errors may be replaced by lambda times the root of the sum of their
squares, and n by lambda sqrt(n), with a probability of at least 1 - 2 exp(-lambda^2 / 2) (Higham and Mary 2019, theorem
3.1). The smaller of both is used. Errors at equal terms may be equal, so they are added before they are squared.

*Functions.* Libraries state errors of up to one unit in the last place for exp and log, which is 2 u. ``FUNCTION`` is
twice that. Where exp(x) is computed as 2^(x log2(e)), the rounding of the product adds |x| u.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..suite.catalogue import EQUAL

LAMBDA = 9.0
"""Probabilistic factor: with it, one of 10^11 sums exceeds its bound with a probability of at most 6e-7."""

FUNCTION = 4.0
"""Error of exp, log, sqrt and similar functions, relative to their result, in units of u.

A square root should be rounded correctly, but torch's in float32 has an error of 1.47 u on some processors."""

FOLDED = 4.0
"""Error of a multiplication or division by a number, in units of u.

A fast implementation multiplies both rows by the root of log2(e) / temperature, and the results by ln(2)."""

LOWEST = -1e4
"""Exponents below this have a result of 0."""

NONLINEAR = 1e-3
"""Errors of logits above this are too large for first-order bounds."""


@dataclass
class Arithmetic:
    """What the bounds depend on.

    Attributes:
        u: the unit roundoff of the dtype in which an implementation computes.
        linear: whether all errors so far are proportional to u.
    """

    u: float
    linear: bool = True

    def are_small(self, errors: Tensor) -> bool:
        """Return whether first-order bounds apply to errors of logits."""
        small = not errors.numel() or float(errors.max()) <= NONLINEAR
        self.linear = self.linear and small
        return small


class Bounded(torch.Tensor):
    """A float64 tensor with a bound on the error of each entry.

    Attributes:
        value: the entries, computed in float64.
        error: the bounds, of the same shape.
        arithmetic: of the dtype in which an implementation computes.
        logits: for a logsumexp, its operand; else None.
        shares: for a logsumexp, bounds on the errors of the logits minus it. They are smaller than the sum of both
            errors, because an error of the largest logit changes both alike.
    """

    value: Tensor
    error: Tensor
    arithmetic: Arithmetic
    logits: Bounded | None = None
    shares: Tensor | None = None

    @staticmethod
    def __new__(cls: type[Bounded], value: Tensor, error: Tensor, arithmetic: Arithmetic) -> Bounded:  # noqa: D102
        return torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype)

    def __init__(self, value: Tensor, error: Tensor, arithmetic: Arithmetic) -> None:
        self.value, self.error, self.arithmetic = value, error, arithmetic

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Bounded({self.value}, {self.error})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        name = func.overloadpacket.__name__
        arithmetic = _arithmetic(args)
        if (rule := RULES.get(name)) is not None:
            value, error, *more = rule(func, arithmetic, *args, **(kwargs or {}))
            found = Bounded(value, error, arithmetic)
            if name == "logsumexp":
                found.logits, (found.shares,) = args[0], more
                return found
            return (found, *more) if more else found
        if name == "detach":
            return _moved(args[0], args[0].value, args[0].error)
        values = func(*_map(args, _value), **_map(kwargs or {}, _value))
        if name in STRUCTURE:
            errors = func(*_map(args, _error), **_map(kwargs or {}, _error))
            if name == "unsqueeze":
                return _moved(args[0], values, errors)
            if isinstance(values, Tensor):
                return Bounded(values, errors, arithmetic)
            return type(values)(Bounded(v, e, arithmetic) for v, e in zip(values, errors, strict=True))
        if name in EXACT:
            return values
        raise NotImplementedError(f"{func}: add a rule for its rounding errors to truth/rounding.py")


class Dispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode without the wrapper that torch adds.

    Importing what the wrapper needs takes seconds, and the wrapper itself takes longer than most operations.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Rules(Dispatch):  # type: ignore[no-untyped-call]
    """Applies the rules of ``Bounded`` inside a ``with`` statement.

    They apply without it as well. But then torch 2.13 imports ``torch.distributed.tensor`` at the first operation,
    which takes a second.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Evaluate an operation with ``Bounded``, if it is among the arguments."""
        if Bounded in types:
            return Bounded.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def _arithmetic(given: Any) -> Arithmetic:
    """The arithmetic of the first ``Bounded`` tensor among arguments, some of which are sequences."""
    for x in given:
        if isinstance(x, Bounded):
            return x.arithmetic
    return _arithmetic([y for x in given if isinstance(x, (list, tuple)) for y in x])


def _moved(x: Bounded, value: Tensor, error: Tensor) -> Bounded:
    """A tensor that is known to be the logsumexp of the same logits as ``x``, as its backward pass needs."""
    found = Bounded(value, error, x.arithmetic)
    found.logits, found.shares = x.logits, x.shares
    return found


def value_of(x: Tensor) -> Tensor:
    """The entries of a ``Bounded`` tensor."""
    assert isinstance(x, Bounded)
    return x.value


def error_of(x: Tensor) -> Tensor:
    """The bounds on the errors of a ``Bounded`` tensor."""
    assert isinstance(x, Bounded)
    return x.error


def _map(given: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(given, (list, tuple)):
        return type(given)(_map(x, function) for x in given)
    if isinstance(given, dict):
        return {name: _map(x, function) for name, x in given.items()}
    return function(given)


def _value(x: Any) -> Any:
    return x.value if isinstance(x, Bounded) else x


def _error(x: Any) -> Any:
    """The error of an operand of a structural operation; constants are exact."""
    if isinstance(x, Bounded):
        return x.error
    if isinstance(x, Tensor) and x.is_floating_point():
        return torch.zeros_like(x)
    return 0.0 if isinstance(x, float) else x


STRUCTURE = {
    *("view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "alias"),
    *("detach", "clone", "slice", "select", "index", "cat", "constant_pad_nd", "where", "masked_fill", "_to_copy"),
    *("slice_backward", "select_backward", "stack", "split", "repeat", "index_select", "masked_fill_", "diagonal"),
    *("lift_fresh", "narrow", "unbind", "gather", "zeros_like", "new_zeros", "squeeze_", "as_strided", "index_put"),
    *("_index_put_impl_", "lift", "scatter"),
}
"""Operations that move, copy or replace entries."""

EXACT = {"eq", "ne", "gt", "ge", "lt", "le", "isfinite", "isnan", "isinf", "any", "all", "sign", "ones_like"}
"""Operations whose results have no rounding errors."""

RULES: dict[str, Callable[..., Any]] = {}
"""For each other operation, the result and the bound on its error."""


def _rule(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def _size(x: Any) -> Any:
    x = _value(x)
    return x.double().abs() if isinstance(x, Tensor) else abs(x)


def _of(x: Any) -> Any:
    """The error of an operand, which is 0 for tensors without errors and for numbers."""
    return x.error if isinstance(x, Bounded) else 0.0


def _rounding(x: Any, u: float) -> Any:
    """The error of a multiplication or division by ``x``, which is 0 for 1, and for powers of two in tensors."""
    if isinstance(x, Bounded):
        return u
    if isinstance(x, Tensor):
        return u * (torch.frexp(x.double()).mantissa.abs() != 0.5).double()
    return 0.0 if abs(x) == 1 else FOLDED * u


def _finite(error: Tensor) -> Tensor:
    """Replace NaN, which is 0 times infinity, by 0."""
    return error.nan_to_num(nan=0.0, posinf=math.inf)


@_rule("add", "sub", "rsub")
def _sum_of_two(func: Any, of: Arithmetic, a: Any, b: Any) -> tuple[Tensor, Tensor]:
    value = func(_value(a), _value(b))
    # Infinite logits are exact: they stand for pairs that do not count.
    own = of.u * value.abs().nan_to_num(posinf=0.0)
    if isinstance(b, Bounded) and b.shares is not None and b.logits is a:
        return value, b.shares + own
    # Numbers such as 0.3 are rounded to the dtype.
    own += of.u * sum(abs(x) for x in (a, b) if isinstance(x, float) and x != round(x))
    return value, _of(a) + _of(b) + own


@_rule("mul")
def _product(func: Any, of: Arithmetic, a: Any, b: Any) -> tuple[Tensor, Tensor]:
    value = func(_value(a), _value(b))
    if not isinstance(a, Bounded):
        a, b = b, a
    if isinstance(b, (int, float)):
        return value, abs(b) * a.error + _rounding(b, of.u) * value.abs()
    error = _rounding(b, of.u) * value.abs() + a.error * _size(b)
    if isinstance(b, Bounded):
        error += a.value.abs() * b.error
    return value, _finite(error)


@_rule("div")
def _quotient(func: Any, of: Arithmetic, a: Any, b: Any) -> tuple[Tensor, Tensor]:
    value = func(_value(a), _value(b))
    return value, _finite(_rounding(b, of.u) * value.abs() + (_of(a) + value.abs() * _of(b)) / _size(b))


@_rule("reciprocal")
def _reciprocal(func: Any, of: Arithmetic, x: Bounded) -> Any:
    return _quotient(torch.div, of, 1.0, x)


@_rule("abs", "neg")
def _of_same_size(func: Any, of: Arithmetic, x: Bounded) -> tuple[Tensor, Tensor]:
    return func(x.value), x.error


@_rule("exp")
def _exponential(func: Any, of: Arithmetic, x: Bounded) -> tuple[Tensor, Tensor]:
    y = x.value.exp()
    own = of.u * (FUNCTION + x.value.clamp(min=LOWEST).abs())
    if of.are_small(x.error):
        return y, y * (x.error + own)
    moved = torch.where(y > 0, y * torch.expm1(x.error + own), (x.value + x.error).exp())
    # An exponent of at most 0, such as a logit minus the largest one, has a result of at most 1.
    return y, torch.where(x.value <= 0, moved.clamp(max=1.0), moved)


@_rule("log", "log1p", "sqrt", "expm1")
def _function(func: Any, of: Arithmetic, x: Bounded) -> tuple[Tensor, Tensor]:
    y, name = func(x.value), func.overloadpacket.__name__
    below = {"log": x.value, "log1p": 1 + x.value, "sqrt": 2 * y, "expm1": 1 / (1 + y)}[name]
    return y, x.error / below + of.u * FUNCTION * y.abs()


@_rule("pow")
def _square(func: Any, of: Arithmetic, x: Bounded, power: float) -> tuple[Tensor, Tensor]:
    assert power == 2
    y = x.value * x.value
    return y, of.u * y + 2 * x.value.abs() * x.error


def _independent(terms: Tensor, dim: int) -> Tensor:
    """The root of the sum of the squares of the multiplicities of the nonzero terms along ``dim``."""
    ordered = terms.movedim(dim, -1).sort(dim=-1, descending=True).values
    number = _of_equal_terms(torch.ones_like(ordered), ordered)
    return (number.where(ordered != 0, 0.0)).sum(dim=-1).sqrt()


def _of_equal_terms(numbers: Tensor, ordered: Tensor) -> Tensor:
    """Replace each number by the sum over the terms of its row that are equal to its own.

    The terms are positive and sorted from the largest to the smallest.
    """
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[..., 1:] = ordered[..., 1:] < ordered[..., :-1] * (1 - EQUAL)
    groups = starts.reshape(-1).cumsum(0) - 1
    return groups.bincount(numbers.reshape(-1))[groups].reshape(ordered.shape)


def _additions(terms: Tensor, dim: int) -> Tensor:
    """The error of a sum relative to the sum of the absolute terms, in units of u. The sum keeps its dimension.

    Every addition has an error of u times its result. The results are largest if the terms are added from the largest
    to the smallest.
    """
    ordered = terms.movedim(dim, -1).abs().sort(dim=-1, descending=True).values
    partial = ordered.cumsum(dim=-1)
    total = partial[..., -1:].clamp(min=torch.finfo(terms.dtype).tiny)
    added = (partial / total).where(ordered != 0, 0.0)
    added[..., :1] = 0.0
    found = added.sum(dim=-1, keepdim=True)
    if terms.shape[dim] > LAMBDA**2:
        found = found.minimum(LAMBDA * (added * _of_equal_terms(added, ordered)).sum(dim=-1, keepdim=True).sqrt())
    return found.movedim(-1, dim)


@_rule("sum")
def _sum(func: Any, of: Arithmetic, x: Bounded, dim: Any = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    value = func(x.value) if dim is None else func(x.value, dim, keepdim)
    if x.numel() == 1:
        return value, x.error.reshape(value.shape)
    if not dim or len(dim) > 1:  # a sum over all entries
        terms, errors = x.value.reshape(-1, 1), x.error.reshape(-1, 1)
        assert value.numel() == 1
    else:
        terms, errors = x.value.movedim(dim[0], 0), x.error.movedim(dim[0], 0)
    sizes = terms.abs() + errors  # a term that is 0 by chance has an error; those of other pairs have none
    error = errors.sum(dim=0) + of.u * _additions(sizes, 0)[0] * sizes.sum(dim=0)
    return value, error.reshape(value.shape)


@_rule("mm")
def _matrix_product(func: Any, of: Arithmetic, a: Any, b: Any) -> tuple[Tensor, Tensor]:
    x, y = _value(a), _value(b)
    left, right = x.abs(), y.abs()
    sizes = left + _of(a), right + _of(b)  # an entry that is 0 by chance has an error
    number = (sizes[0] != 0).double() @ (sizes[1] != 0).double()
    if x.shape[1] > LAMBDA**2:
        independent = _independent(sizes[0], 1)[:, None].minimum(_independent(sizes[1], 0)[None])
        number = number.minimum(LAMBDA * independent)
    error = of.u * number * (left @ right)
    if isinstance(a, Bounded):
        error += a.error @ right
    if isinstance(b, Bounded):
        error += left @ b.error
    return x @ y, error


@_rule("linalg_vector_norm")
def _norm(func: Any, of: Arithmetic, x: Bounded, order: float, dim: list[int], keepdim: bool) -> tuple[Tensor, Tensor]:
    assert (order, keepdim, len(dim)) == (2, True, 1)
    y = func(x.value, order, dim, True)
    inherited = (x.value.abs() * x.error).sum(dim=dim, keepdim=True) / y
    return y, inherited + of.u * ((2 + _additions(x.value.abs(), dim[0])) / 2 + FUNCTION) * y


@_rule("logsumexp")
def _log_sum_exp(
    func: Any, of: Arithmetic, x: Bounded, dim: Any, keepdim: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    y = x.value.logsumexp(dim, keepdim=True)
    share = (x.value - y).exp()
    number = (x.value > -math.inf).sum(dim, keepdim=True).clamp(min=1)
    size = x.value.masked_fill(x.value == -math.inf, 0.0).abs().amax(dim, True)
    # The exponentials, with or without a shift; their sum; its logarithm; and the shift, which is added back, twice if
    # the logsumexp is merged from those of blocks. Next to a shift above 1000, at most the logarithm itself is lost.
    own = of.u * (FUNCTION + _additions(share, dim[0]) + (FUNCTION + 1) * number.log())
    own += 2 * of.u * size.minimum(((y - x.value.amax(dim, True)) / of.u).clamp(min=1000.0))
    if of.are_small(x.error):
        error = own + (share * x.error).sum(dim, keepdim=True)
        of_shares = error + (1 - 2 * share) * x.error
    else:
        error, of_shares = own + x.error.amax(dim, keepdim=True), own + _moved_shares(x, dim)
    return (y, error, of_shares) if keepdim else (y.squeeze(dim[0]), error.squeeze(dim[0]), of_shares)


def _moved_shares(x: Bounded, dim: Any) -> Tensor:
    """The largest change of the logits minus their logsumexp, if every logit changes by its error."""

    def log_odds(own: Tensor, others: Tensor) -> Tensor:
        """The logarithm of the sum of the other exponentials divided by a logit's own."""
        total = others.logsumexp(dim, keepdim=True)
        return total + torch.log1p(-(others - total).exp().clamp(max=1.0)) - own

    least, exact, most = (x.value + sign * x.error for sign in (-1, 0, 1))
    least, exact, most = (
        torch.nn.functional.softplus(log_odds(*pair)) for pair in ((most, least), (exact, exact), (least, most))
    )
    return (most - exact).maximum(exact - least).nan_to_num(nan=0.0)


@_rule("logaddexp")
def _log_add_exp(func: Any, of: Arithmetic, a: Any, b: Any) -> tuple[Tensor, Tensor]:
    x, y = _value(a), _value(b)
    value = func(x, y)
    size = torch.where(x.isinf(), y, torch.where(y.isinf(), x, x.abs().maximum(y.abs()) + 2 * FUNCTION)).abs()
    own = of.u * (1 + size)
    of_x, of_y = (z.error if isinstance(z, Bounded) else torch.zeros_like(z) for z in (a, b))
    inherited = (x - value).exp() * of_x + (y - value).exp() * of_y
    if not of.are_small(of_x) or not of.are_small(of_y):
        inherited = of_x.maximum(of_y)
    return value, inherited + own


@_rule("log_sigmoid_forward")
def _log_sigmoid(func: Any, of: Arithmetic, x: Bounded) -> tuple[Tensor, Tensor, Tensor]:
    y, buffer = func(x.value)
    slope = torch.sigmoid(-x.value if of.are_small(x.error) else x.error - x.value)
    # log sigmoid(x) = min(x, 0) - log1p(e^-|x|)
    size = x.value.abs()
    own = y.abs() - (2 * FUNCTION + size) * torch.nn.functional.logsigmoid(size)
    return y, slope * x.error + of.u * own, buffer


@_rule("log_sigmoid_backward")
def _log_sigmoid_slope(func: Any, of: Arithmetic, grad: Any, x: Bounded, buffer: Any) -> tuple[Tensor, Tensor]:
    slope = torch.sigmoid(-x.value)
    moved = slope * (1 - slope) * x.error
    if not of.are_small(x.error):
        moved = torch.sigmoid(x.error - x.value) - torch.sigmoid(-x.error - x.value)
    own = of.u * (2 * FUNCTION + x.value.clamp(min=0)) * slope
    return slope * _value(grad), _size(grad) * (moved + own) + _of(grad) * slope


@_rule("maximum")
def _larger(func: Any, of: Arithmetic, a: Any, b: Any) -> tuple[Tensor, Tensor]:
    x, y = _value(a), _value(b)
    of_x, of_y = (z.error if isinstance(z, Bounded) else torch.zeros(()).double() for z in (a, b))
    clear, larger = (x - y).abs() > of_x + of_y, torch.where(x > y, of_x, of_y)
    return func(x, y), torch.where(clear, larger, larger.maximum(torch.where(x > y, of_y, of_x)))


@_rule("amax")
def _largest_of(func: Any, of: Arithmetic, x: Bounded, dim: Any, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    y = x.value.amax(dim, True)
    return func(x.value, dim, keepdim), x.error.where(x.value >= y - 2 * x.error, 0.0).amax(dim, keepdim)


@_rule("max")
def _largest(func: Any, of: Arithmetic, x: Bounded, dim: int, keepdim: bool) -> tuple[Tensor, Tensor, Tensor]:
    y, place = func(x.value, dim, keepdim)
    return y, _largest_of(torch.amax, of, x, dim, keepdim)[1], place


@_rule("_softmax")
def _softmax(func: Any, of: Arithmetic, x: Bounded, dim: int, half: bool) -> tuple[Tensor, Tensor]:
    p = x.value.softmax(dim)
    shifted = (x.value - x.value.amax(dim, True)).abs()
    own = of.u * (2 * FUNCTION + 1 + shifted + (p * shifted).sum(dim, keepdim=True) + _additions(p, dim))
    error = p * ((1 - 2 * p) * x.error + (p * x.error).sum(dim, keepdim=True) + own)
    return p, error if of.are_small(x.error) else error.clamp(max=1.0)


@_rule("_softmax_backward_data")
def _softmax_slope(func: Any, of: Arithmetic, grad: Any, p: Bounded, dim: int, dtype: Any) -> tuple[Tensor, Tensor]:
    g, error = _value(grad), _of(grad)
    inner = p.value * g
    number, left = of.u * (1 + _additions(inner, dim)), g - inner.sum(dim, keepdim=True)
    of_total = (p.value * error + p.error * g.abs() + number * inner.abs()).sum(dim, keepdim=True)
    return p.value * left, p.error * left.abs() + p.value * (error + of_total + 2 * of.u * left.abs())
