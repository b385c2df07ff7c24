"""Autograd functions and custom operators for the values and gradients of a batch.

`torch.compile` would unroll the tiles, so custom operators hide them. The operators have no derivative; the autograd
functions provide it. Their backward passes are autograd functions too, so that second derivatives work.

An operator takes only tensors and plain values. A batch and its plan are flattened into their fields, and rebuilt
inside the operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import is_dataclass, replace
from typing import Any, cast, get_args, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import anchored, compiled, device, exact, formulas, frozen, jit, pairs, rowwise, small, symmetric, unshifted
from .device import dtypes_of
from .direct import Hardened
from .plan import LEAST_ROWS, PANEL_ELEMENTS, choose, panel_rows, precision
from .scaling import Saved, Scaled, differentiable_rows, of_ordinary_size
from .spec import KERNELS, AnchorValues, Backend, Batch, Form, Gradients, Plan, Policy, References
from .transforms import Reverse


def loss_of(batch: Batch, policy: Policy, backend: Backend, hardened: Hardened | None = None) -> Tensor:
    """Evaluate a batch and reduce its values to the loss; for ``hardened``, see `hardened_loss`."""
    if policy.ranks is not None:
        return formulas.reduced(policy.ranks.anchor_values(batch, backend), batch, policy)
    usual = hardened is None and backend == "auto"
    fused = usual and jit.State.failure is None and compiled.suits(batch, policy)
    if not (fused or hardened is not None or (usual and small.suits(batch, policy, large=True))):
        return formulas.reduced(anchor_values(batch, backend), batch, policy)
    rows, others, temperature = batch.embeddings, batch.references.embeddings, batch.rule.temperature
    learned = temperature if isinstance(temperature, Tensor) else None
    bias = batch.rule.bias if isinstance(batch.rule.bias, Tensor) else None
    wanted = rows.requires_grad or (learned is not None and learned.requires_grad)
    wanted = wanted or (bias is not None and bias.requires_grad)
    if torch.is_grad_enabled() and (wanted or (others is not None and others.requires_grad)):
        inputs = (rows,) if others is None and learned is None else (rows, others, learned, bias)
        result: Tensor = _Loss.apply((batch, policy, hardened, fused), *inputs)  # type: ignore[no-untyped-call]
        return result
    if fused:
        return compiled.evaluate(batch, policy, backward=False)[0]
    return formulas.reduced(small.evaluate(batch, backward=False, hardened=hardened)[0], batch, policy)


def hardened_loss(batch: Batch, policy: Policy, hardened: Hardened) -> Tensor | None:
    """Return the loss of a batch with hardness weights; None if `direct` does not support the batch.

    Args:
        batch: two towers. The temperature of the rule is that of the weighted negatives; see `Hardened`.
        policy: how the values are reduced.
        hardened: the hardness weights.
    """
    suits = small.suits(batch, policy, large=True) and small.is_direct(batch)
    return loss_of(batch, policy, "auto", hardened) if suits else None


def anchor_values(batch: Batch, backend: Backend = "auto") -> AnchorValues:
    """Evaluate one value per anchor, differentiable with respect to embeddings, references, temperature and bias.

    Args:
        batch: the batch, already checked.
        backend: "auto", "dense", "tiled", "exact" or "triton".

    Returns:
        The values in the computing dtype, and the numbers of positives and negatives. Each has the shape ``[N]``, or
        ``[2N]`` with mutual references.

    Raises:
        ValueError: ``backend="triton"`` does not support this batch, or dot products exceed the range of float64.
    """
    compiling = device.traced(batch.embeddings)
    transformed = compiling or torch._C._are_functorch_transforms_active()
    if not compiling and batch.embeddings.shape[0] == 0:
        return _of_no_rows(batch)
    rows, others = batch.embeddings, batch.references.embeddings
    matrices = (batch.sizes,) if others is None else (batch.sizes, batch.references.sizes)
    needed = "" if compiling or backend == "triton" else precision(batch.rule, rows, matrices)
    if batch.targets.weighted and "exact" in (needed, backend):
        if needed == "exact":
            raise ValueError(OVERFLOW)
        needed, backend = "float64", "dense"
    if needed == "float64" or (others is not None and others.dtype != rows.dtype):
        wide = torch.float64 if needed or others is None else torch.promote_types(rows.dtype, others.dtype)
        rows, others = rows.to(wide), None if others is None else others.to(wide)
        batch = replace(batch, embeddings=rows, references=replace(batch.references, embeddings=others, sizes=None))
        batch = replace(batch, sizes=None)
    backend = "exact" if needed == "exact" else backend
    temperature = batch.rule.temperature if isinstance(batch.rule.temperature, Tensor) else None
    if temperature is not None and not device.may_read(temperature):
        # The value cannot be checked here: an invalid temperature makes the result NaN.
        temperature = torch.where(temperature.log().isfinite(), temperature, math.nan)
        batch = replace(batch, rule=replace(batch.rule, temperature=temperature))
    bias = batch.rule.bias if isinstance(batch.rule.bias, Tensor) else None
    if bias is not None and not device.may_read(bias):
        bias = torch.where(bias.isfinite(), bias, math.nan)
        batch = replace(batch, rule=replace(batch.rule, bias=bias))
    wanted = torch.is_grad_enabled() and (
        rows.requires_grad
        or (others is not None and others.requires_grad)
        or (temperature is not None and temperature.requires_grad)
        or (bias is not None and bias.requires_grad)
    )
    if compiling or backend == "exact":
        plan = Plan(backend)
    else:
        fixed = others is not None and not (transformed or (wanted and others.requires_grad))
        plan, batch = choose(batch, backend, backward=wanted, fixed=fixed, shifts=not transformed)
    references = batch.references
    together = plan.form == "triton" or (plan.form == "unshifted" and not transformed)
    if references.mutual and references.embeddings is not None and (compiling or not together):
        sides = [anchor_values(side, backend) for side in _sides(batch)]
        return AnchorValues(*map(torch.cat, zip(*sides, strict=True)))
    if backend == "exact":
        values = exact.anchor_values(batch)
        if needed == "exact":
            limited = values.values.detach()
            if batch.rule.terms in ("binary", "sigmoid"):  # an infinite logit may add 0 to the value
                scaled = differentiable_rows(rows.detach(), batch.rule)
                if others is None:
                    limited = (scaled @ scaled.T).fill_diagonal_(0)
                else:
                    limited = scaled @ differentiable_rows(others.detach(), batch.rule).T
            if not bool(limited.isfinite().all()):
                raise ValueError(OVERFLOW)
        return values
    if not (transformed or wanted) and forward_ad._current_level < 0:
        return evaluate(batch, plan)[0]
    if transformed:
        tensors, plain = _flat(batch, plan)
        if compiling and temperature is None:
            # A number would be a constant of the graph.
            tensors[_TEMPERATURE] = torch.ones((), dtype=torch.float64, device="cpu") * plain[_NUMBER]
            plain[_NUMBER] = _IN_TENSOR
        if compiling:  # a traced function takes no tensor twice, such as labels that are also those of the references
            tensors = [
                x.view_as(x) if x is not None and any(x is other for other in tensors[:k]) else x
                for k, x in enumerate(tensors)
            ]
        by_autograd = _Traceable if torch.compiler.is_compiling() else _Transformable
        evaluation: Any = torch.ops.pairproof.anchor_values if compiling and not wanted else by_autograd.apply
        return AnchorValues(*evaluation(*tensors, *plain)[:3])
    return AnchorValues(*_Values.apply(batch, plan, rows, others, temperature, bias))  # type: ignore[no-untyped-call]


def _of_no_rows(batch: Batch) -> AnchorValues:
    """Return empty values, with a gradient of 0 for every input."""
    rows, others, rule = batch.embeddings, batch.references.embeddings, batch.rule
    dtype = dtypes_of(rows)[0]
    values = (rows.to(dtype) @ (rows if others is None else others).to(dtype).T).sum(1) / rule.temperature + rule.bias
    none = torch.empty(0, dtype=torch.int64, device=rows.device)
    return AnchorValues(values.to(dtype), none.to(rowwise.dtype_of_positives(batch)), none)


def _sides(batch: Batch) -> tuple[Batch, Batch]:
    """Return the two directions of a batch with mutual references."""
    references, back, targets = batch.references, References(batch.embeddings, sizes=batch.sizes), batch.targets
    turned = replace(batch, embeddings=cast(Tensor, references.embeddings), sizes=references.sizes, references=back)
    if targets.omits:
        across = None if targets.ignored is None else targets.ignored.T
        turned = replace(
            turned, targets=replace(targets, ignored=across, ids=targets.column_ids, column_ids=targets.ids)
        )
    return replace(batch, references=replace(references, mutual=False)), turned


OVERFLOW = (
    'similarity: expected "cosine" for rows whose dot products, divided by the temperature, exceed the range of '
    "float64, got 'dot'"
)

_Evaluate = Callable[[Batch, Plan], tuple[AnchorValues, Saved]]
_Differentiate = Callable[[Tensor, float | Tensor, Batch, Plan, Saved], Gradients]
_FORMS: dict[str, tuple[_Evaluate, _Differentiate]] = {
    "unshifted": (unshifted.evaluate, unshifted.differentiate),
    "symmetric": (symmetric.evaluate, symmetric.differentiate),
    "rowwise": (rowwise.evaluate, rowwise.differentiate),
    "pairs": (pairs.evaluate, pairs.differentiate),
    "frozen": (frozen.evaluate, frozen.differentiate),
    "anchored": (anchored.evaluate, anchored.differentiate),
}


def evaluate(batch: Batch, plan: Plan) -> tuple[AnchorValues, Saved, Plan]:
    """Run the forward pass; return the result, what is saved for the backward pass, and the plan that was used."""
    if device.autocast(batch.embeddings):
        with torch.autocast(batch.embeddings.device.type, enabled=False):
            return evaluate(batch, plan)
    if plan.form != "triton":
        try:
            return *_FORMS[plan.form][0](batch, plan), plan
        except formulas.Underflow:
            rows = panel_rows(batch, "dense" if plan.rows >= len(batch.embeddings) else "tiled")
            plan = replace(plan, form="rowwise", rows=rows)
            return *rowwise.evaluate(batch, plan), plan
    found, stats, prepared = KERNELS["triton"].forward(batch, plan)
    none = found.values.new_empty(0)
    return found, Saved(Scaled(none, none, None), (stats,), classes=prepared), plan


def differentiate(grad: Tensor, batch: Batch, plan: Plan, saved: Saved) -> Gradients:
    """Run the backward pass; return the gradients of the inputs from those of the values, ``grad`` ``[N]``."""
    if device.autocast(batch.embeddings):
        with torch.autocast(batch.embeddings.device.type, enabled=False):
            return differentiate(grad, batch, plan, saved)
    if plan.form == "triton":  # the kernels skip the rows that do not count, and scale the gradient themselves
        return KERNELS["triton"].backward(grad, batch, plan, saved.stats[0], saved.classes)
    grad = grad if saved.valid is None else torch.where(saved.valid, grad, 0.0)
    size, grad = of_ordinary_size(grad, reads=device.may_read(grad))
    return _FORMS[plan.form][1](grad, size, batch, plan, saved)


_SCHEMAS: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    torch.dtype | None: "ScalarType?",
    bool: "bool",
    int: "int",
    float: "float",
}
_NESTED: dict[Any, list[Any]] = {}
"""For each dataclass, one entry per field: the field's class if that is a dataclass too, else None."""


def _fields(kind: type, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path of each field, such as ``rule.terms``, and its type in a schema; fill ``_NESTED``."""
    hints = {name: hint for name, hint in get_type_hints(kind).items() if name != "sizes"}  # an operator computes them
    _NESTED[kind] = [hint if is_dataclass(hint) else None for hint in hints.values()]
    for name, hint in hints.items():
        if is_dataclass(hint):
            yield from _fields(cast(type, hint), f"{path}{name}.")
        elif hint == float | Tensor:
            yield from ((path + name, "Tensor?"), (path + name, "float"))
        else:
            yield path + name, _SCHEMAS.get(hint, "str")


_BATCH = list(_fields(Batch))
_PLAN = list(_fields(Plan))
_TENSORS = [path for path, schema in _BATCH if schema.startswith("Tensor")]
_PLAIN = [path for path, schema in _BATCH if not schema.startswith("Tensor")]
_TEMPERATURE, _NUMBER = _TENSORS.index("rule.temperature"), _PLAIN.index("rule.temperature")
_EITHER = [(_TENSORS.index(path), _PLAIN.index(path)) for path in ("rule.temperature", "rule.bias")]
"""The indices in ``_TENSORS`` and ``_PLAIN`` of each field that may be a tensor or a number."""
_IN_TENSOR = 0.0
"""The plain temperature, if the actual number was moved to a tensor on the CPU."""
_INPUTS = ("embeddings", "references.embeddings", "rule.temperature", "rule.bias")
_DIFFERENTIATED = [_TENSORS.index(path) for path in _INPUTS]
_PLACES = [[*_TENSORS, *_PLAIN].index(path) for path in dict.fromkeys(path for path, _ in _BATCH)]
_NAMES = [path.split(".") for path in (*_TENSORS, *_PLAIN)]


def _flat(batch: Batch, plan: Plan) -> tuple[list[Any], list[Any]]:
    """Return the tensors and the plain values of a batch and its plan, each in the order of the fields."""
    values: list[Any] = []
    for names in _NAMES:
        value: Any = batch
        for name in names:
            value = getattr(value, name)
        values.append(value)
    tensors, plain = values[: len(_TENSORS)], values[len(_TENSORS) :]
    for path, _ in _PLAN:
        plain.append(getattr(plan, path))
    for tensor, number in _EITHER:
        if isinstance(tensors[tensor], Tensor):
            plain[number] = 1.0
        else:
            tensors[tensor] = None
    return tensors, plain


def _described(tensors: Sequence[Any], plain: Sequence[Any]) -> tuple[Batch, Plan]:
    """Undo `_flat`."""
    values = [*tensors, *plain]
    for tensor, number in _EITHER:
        if values[tensor] is None:
            values[tensor] = plain[number]
    temperature = tensors[_TEMPERATURE]
    if temperature is not None and plain[_NUMBER] == _IN_TENSOR and not device.traced(temperature):
        values[_TEMPERATURE] = float(temperature)
    return _built(Batch, iter([values[place] for place in _PLACES])), Plan(*plain[len(_PLAIN) :])


def _built(kind: Any, values: Iterator[Any]) -> Any:
    return kind(*[next(values) if nested is None else _built(nested, values) for nested in _NESTED[kind]])


def _placed(gradients: Sequence[Tensor | None], tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return one entry per tensor: its gradient, or None."""
    placed: list[Tensor | None] = [None] * len(_TENSORS)
    for place, gradient in zip(_DIFFERENTIATED, gradients, strict=True):
        placed[place] = None if tensors[place] is None else gradient
    return placed


class _Loss(Reverse):
    """The loss of a batch that `compiled` or `small` evaluates, in eager execution."""

    @staticmethod
    def forward(ctx: Any, described: tuple[Batch, Policy, Hardened | None, bool], *inputs: Tensor | None) -> Tensor:
        batch, policy, hardened, fused = described
        ctx.save_for_backward(*inputs, batch.targets.given, batch.targets.columns, batch.references.own)
        ctx.described = described
        if fused:
            result, ctx.saved = compiled.evaluate(batch, policy, backward=True)
            return result
        found, ctx.saved = small.evaluate(batch, backward=True, hardened=hardened)
        ctx.count = found.values.shape[0]
        return formulas.reduced(found, batch, policy)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, (batch, policy, hardened, fused), needed = grads[0], ctx.described, ctx.needs_input_grad[1:]
        inputs = ctx.saved_tensors[: len(needed)]  # raises if a saved tensor was changed in place
        gradients: Sequence[Tensor | None]
        again = torch.is_grad_enabled()
        if again or not device.may_read(grad):
            # Compute the loss again in differentiable operations. Differentiate with respect to views of the inputs,
            # because an input may have been computed from another one.
            with torch.enable_grad():
                views = [None if tensor is None else tensor.view_as(tensor) for tensor in inputs]
                rows, others, learned, bias = (*views, None, None, None)[:4]
                references = batch.references if others is None else replace(batch.references, embeddings=others)
                rule = batch.rule if learned is None else replace(batch.rule, temperature=learned)
                rule = rule if bias is None else replace(rule, bias=bias)
                batch = replace(batch, embeddings=cast(Tensor, rows), references=references, rule=rule)
                if hardened is None:
                    loss = formulas.reduced(anchor_values(batch), batch, policy)
                else:
                    loss = hardened.again(cast(Tensor, rows), cast(Tensor, others))
            wanted = [tensor for tensor, needs in zip(views, needed, strict=True) if needs]
            found = iter(torch.autograd.grad(loss, cast(list[Tensor], wanted), grad, create_graph=again))
            gradients = [next(found) if needs else None for needs in needed]
        elif fused:
            gradients = compiled.differentiate(grad.item(), batch, ctx.saved)
        else:
            saved, ctx.saved = ctx.saved, None
            size, each = small.of_each(grad, policy, ctx.count)
            if saved is None:  # overwritten by the first backward pass
                saved = small.evaluate(batch, backward=True, hardened=hardened)[1]
            if len(needed) > 1 and not needed[1]:
                saved = saved._replace(frozen=True)
            size = cast(float, size) * (1.0 if hardened is None else hardened.share)
            gradients = small.differentiate(each, size, batch, saved)
        return None, *(part if needs else None for part, needs in zip(gradients, needed, strict=False))


class _Values(Reverse):
    """The values ``[N]`` and the numbers of positives and negatives, in eager execution.

    Unlike `_Traceable`, it may save any object, and skips references that need no gradient.
    """

    @staticmethod
    def forward(ctx: Any, batch: Batch, plan: Plan, *inputs: Tensor | None) -> AnchorValues:
        found, saved, plan = evaluate(batch, plan)
        targets, own = batch.targets, batch.references.own
        ctx.set_materialize_grads(False)
        given = targets.given, targets.columns, targets.ignored, targets.ids, targets.column_ids
        weights = targets.positive_weights, targets.negative_weights
        ctx.save_for_backward(*inputs, *given, *weights, own, batch.anchors, found.positives, found.negatives)
        ctx.described, ctx.saved = (batch, plan), saved._replace(frozen=not ctx.needs_input_grad[3])
        ctx.mark_non_differentiable(found.positives, found.negatives)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        if grad is None:
            return (None,) * 6
        sizes = ctx.saved_tensors[-2:]  # raises if a saved tensor was changed in place
        (batch, plan), saved = ctx.described, ctx.saved
        if torch.is_grad_enabled():
            tensors, plain = _flat(batch, plan)
            gradients = _Gradient.apply(grad, *tensors, *_saved_tensors(AnchorValues(grad, *sizes), saved), *plain)  # type: ignore[no-untyped-call]
        else:
            # The gradient overwrites the exponentials: another backward pass computes them again.
            if saved.kept is not None:
                ctx.saved = saved._replace(kept=None)
            gradients = differentiate(grad, batch, plan, saved)
            if isinstance(saved.kept, Tensor):
                device.give_back("kept", saved.kept)
        needed = ctx.needs_input_grad[2:]
        return None, None, *(part if needs else None for part, needs in zip(gradients, needed, strict=True))


class _Traceable(torch.autograd.Function):
    """`_Values` for `torch.compile` and `torch.func`, where only inputs and outputs may be saved."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        if device.traced(arguments[0]):
            return tuple(torch.ops.pairproof.anchor_values(*arguments))
        return _forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.plain = inputs[len(_TENSORS) :]
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[: len(_TENSORS)], *output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        compiling = torch.compiler.is_compiling()
        gradient: Any = torch.ops.pairproof.anchor_gradients if compiling else _Gradient.apply
        gradients = gradient(grads[0], *ctx.saved_tensors, *ctx.plain)
        return *_placed(gradients, ctx.saved_tensors), *(None,) * len(ctx.plain)


class _Transformable(Reverse, _Traceable):
    """`_Traceable` with rules for `torch.func`."""


class _Gradient(Reverse):
    """The gradients of embeddings, references, temperature and bias, computed from those of the values."""

    @staticmethod
    def forward(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        if device.traced(grad):
            return tuple(torch.ops.pairproof.anchor_gradients(grad, *arguments))
        return _backward(grad, *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.plain = inputs[1 + len(_TENSORS) + _SAVED :]
        ctx.save_for_backward(*inputs[: 1 + len(_TENSORS)])

    @staticmethod
    def backward(ctx: Any, *directions: Tensor) -> tuple[Tensor | None, ...]:
        grad, *tensors = ctx.saved_tensors
        with device.without_autocast(grad):
            by_grad, *gradients = second_derivative(directions, grad, *_described(tensors, ctx.plain))
        return by_grad, *_placed(gradients, tensors), *(None,) * (_SAVED + len(ctx.plain))


_SAVED = 6
"""Number of tensors that `_forward` returns after the values."""


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    """Return the values, the numbers of positives and negatives, the fields of `Scaled`, and the sums per row."""
    batch, plan = _planned(*_described(arguments[: len(_TENSORS)], arguments[len(_TENSORS) :]))
    found, saved, _ = evaluate(batch, replace(plan, keep=False))
    if plan.form == "triton":
        # The kernels return no scaled rows, but the operator's outputs do not depend on the form.
        rows = batch.embeddings.new_zeros(batch.embeddings.shape, dtype=dtypes_of(batch.embeddings)[0])
        factor = rows.new_zeros((rows.shape[0] if batch.rule.similarity == "cosine" else 1, 1))
        saved = saved._replace(scaled=Scaled(rows, factor, None))
    return found.values, *_saved_tensors(found, saved)


def _planned(batch: Batch, plan: Plan) -> tuple[Batch, Plan]:
    """Choose the form, unless it is already chosen."""
    if plan.form in get_args(Form):
        return batch, plan
    plan, batch = choose(batch, cast(Backend, plan.form))
    return batch, plan


def _saved_tensors(found: AnchorValues, saved: Saved) -> tuple[Tensor, ...]:
    """Return the saved tensors as outputs of an operator, which must not share memory."""
    rows, factor, power = saved.scaled
    power = torch.ones_like(factor) if power is None else power
    if saved.stats and saved.stats[0].dim() == 2:
        stats = saved.stats[0]
    else:
        stats = rows.new_zeros((_most_stats(), len(found.values)))
        for line, part in enumerate(saved.stats):
            if part.numel():
                stats[line] = part
    parts = (rows.contiguous(), factor.contiguous(), power.contiguous())
    return found.positives, found.negatives.clone(), *parts, stats


def _most_stats() -> int:
    return max(len(formulas.Sums._fields), *(kernels.STATS for kernels in KERNELS.values()))


def _backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Return the gradients; an absent input has an empty one, because an operator cannot return None."""
    first, last = len(_TENSORS), len(_TENSORS) + _SAVED
    batch, plan = _planned(*_described(arguments[:first], arguments[last:]))
    positives, negatives, rows, factor, power, stats = arguments[first:last]
    valid = formulas.counted(batch, positives, negatives)
    saved = Saved(Scaled(rows, factor, power), (stats,) if plan.form == "triton" else tuple(stats), valid=valid)
    gradients = differentiate(grad, batch, replace(plan, keep=False), saved)
    given = (arguments[place] for place in _DIFFERENTIATED)
    return tuple(
        grad.new_empty(0) if part is None else torch.zeros_like(part) if g is None else g.contiguous()
        for part, g in zip(given, gradients, strict=True)
    )


def second_derivative(
    directions: Sequence[Tensor], grad: Tensor, batch: Batch, plan: Plan
) -> tuple[Tensor | None, ...]:
    """Differentiate the inner product of the gradients with ``directions``.

    The operations of `rowwise` are differentiated, one panel at a time, so memory is linear.

    Args:
        directions: for embeddings, references, temperature and bias, in the shapes of their gradients.
        grad: ``[N]``, the gradient of the values.
        batch: the batch that was evaluated.
        plan: how it was evaluated.

    Returns:
        The derivatives with respect to ``grad``, embeddings, references, temperature and bias; None for an absent one.
    """
    others, count = batch.references.embeddings, batch.embeddings.shape[0]
    if batch.references.mutual and others is not None:
        # In the other direction, rows and references are exchanged.
        one_way, turned = _sides(batch)
        there = second_derivative(directions, grad[:count], one_way, plan)
        back = second_derivative((directions[1], directions[0], *directions[2:]), grad[count:], turned, plan)
        by_grad = torch.cat([part for part in (there[0], back[0]) if part is not None])
        parts = zip(there[1:], (back[2], back[1], *back[3:]), strict=True)
        return by_grad, *(None if a is None or b is None else a + b for a, b in parts)
    columns = count if others is None else others.shape[0]
    given = {0: batch.embeddings, 1: others, 2: batch.rule.temperature, 3: batch.rule.bias}
    present = {place: tensor for place, tensor in given.items() if isinstance(tensor, Tensor)}
    height = plan.rows if plan.form == "rowwise" else max(LEAST_ROWS, PANEL_ELEMENTS // columns)

    def of_panel(panel: rowwise.Panel | rowwise.LonePanel, *inputs: Tensor) -> Tensor:
        one = dict(zip(present, inputs, strict=True))
        rule = replace(batch.rule, temperature=one[2]) if 2 in one else batch.rule
        rows = differentiable_rows(one[0], rule)
        across = rows if others is None else differentiable_rows(one[1], rule)
        logits = rows[panel.rows] @ across.T
        logits = logits + one.get(3, rule.bias) if rule.terms == "sigmoid" else logits
        values = rowwise.values(logits, panel, rule)
        anchors = None if batch.anchors is None else batch.anchors[panel.rows]
        valid = formulas.counted(replace(batch, anchors=anchors), *panel.sizes())
        return values if valid is None else torch.where(valid, values, 0.0)

    inputs = list(present.values())
    totals = [torch.zeros_like(t) for t in inputs]
    of_panels = []
    for panel in rowwise.panels(batch, columns, height):

        def along_directions(upstream: Tensor, *inputs: Tensor, panel: Any = panel) -> Tensor:
            pulled = torch.func.vjp(lambda *given: of_panel(panel, *given), *inputs)[1](upstream)
            along = (directions[place] for place in present)
            return sum(((g * v).sum() for g, v in zip(pulled, along, strict=True)), grad.new_zeros(()))

        numbers = tuple(range(len(inputs) + 1))
        first, *more = torch.func.grad(along_directions, argnums=numbers)(grad[panel.rows], *inputs)
        of_panels.append(first)
        totals = [total + part for total, part in zip(totals, more, strict=True)]
    by_input = dict(zip(present, totals, strict=True))
    return torch.cat(of_panels), *(by_input.get(place) for place in given)


def _schema(fields: Iterable[tuple[str, str]], prefix: str) -> str:
    return ", ".join(f"{schema} {prefix}{path.replace('.', '_')}" for path, schema in fields)


_TENSOR_SCHEMA = _schema((field for field in _BATCH if field[1].startswith("Tensor")), "")
_PLAIN_SCHEMA = _schema([*(field for field in _BATCH if not field[1].startswith("Tensor")), *_PLAN], "value_")
_GRADIENTS = ", ".join(["Tensor"] * len(_INPUTS))
_SAVED_SCHEMA = "Tensor positives, Tensor negatives, Tensor scaled, Tensor factor, Tensor power, Tensor stats"

_anchor_values: Any = torch.library.custom_op(
    "pairproof::anchor_values",
    _forward,
    mutates_args=(),
    schema=f"({_TENSOR_SCHEMA}, {_PLAIN_SCHEMA}) -> ({', '.join(['Tensor'] * (1 + _SAVED))})",
)
_anchor_gradients: Any = torch.library.custom_op(
    "pairproof::anchor_gradients",
    _backward,
    mutates_args=(),
    schema=f"(Tensor grad, {_TENSOR_SCHEMA}, {_SAVED_SCHEMA}, {_PLAIN_SCHEMA}) -> ({_GRADIENTS})",
)


def _fake_values(*arguments: Any) -> tuple[Tensor, ...]:
    batch, _ = _described(arguments[: len(_TENSORS)], arguments[len(_TENSORS) :])
    count, dim = batch.embeddings.shape
    floats = batch.embeddings.new_empty((), dtype=dtypes_of(batch.embeddings)[0])
    whole = batch.embeddings.new_empty((), dtype=torch.int64)
    factors = (count if batch.rule.similarity == "cosine" else 1, 1)
    shapes = ((count, dim), factors, factors, (_most_stats(), count))
    return (
        floats.new_empty(count),
        whole.new_empty(count, dtype=rowwise.dtype_of_positives(batch)),
        whole.new_empty(count),
        *(floats.new_empty(shape) for shape in shapes),
    )


def _fake_gradients(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    given = [arguments[place] for place in _DIFFERENTIATED]
    return tuple(grad.new_empty(0) if part is None else part.new_empty(part.shape) for part in given)


_anchor_values.register_fake(_fake_values)
_anchor_gradients.register_fake(_fake_gradients)
