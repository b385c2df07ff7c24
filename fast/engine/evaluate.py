"""Values and gradients of a planned batch, as torch sees them: two autograd functions over two operators.

The operators are opaque to `torch.compile`, which would otherwise unroll the tiles. They carry no derivative of their
own: that belongs to the autograd functions, whose backward passes are autograd functions too, so that `torch.func.grad`
and a second derivative work and forward mode raises instead of giving zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple, cast, get_args

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from . import device, pairs, rowwise, spec, symmetric
from .device import computing_dtype, wide_dtype
from .plan import PANEL_ELEMENTS, choose
from .scaling import Scaled, differentiable_rows, scale_rows, to_embeddings
from .spec import (
    KERNELS,
    LN2,
    AnchorValues,
    Backend,
    Denominator,
    Form,
    Kind,
    Plan,
    References,
    Rule,
    Similarity,
    Targets,
    Terms,
)
from .workspace import borrow, give_back

AnyPanel = rowwise.Panel | rowwise.LonePanel


class Batch(NamedTuple):
    """The tensors of one evaluation.

    Attributes:
        embeddings: ``[N, D]``.
        references: ``[M, D]``, or None: the batch itself.
        temperature: without dimension, or None where it is a number.
        given: what `Targets.given` holds.
        columns: what `Targets.columns` holds.
        own: which column is the row itself, ``[N]``; None: none is, or without references column i is row i.
        anchors: bool ``[N]``, or None: all.
        norms: of the embeddings ``[N, 1]``, or None.
        reference_norms: of the references ``[M, 1]``, or None.
    """

    embeddings: Tensor
    references: Tensor | None
    temperature: Tensor | None
    given: Tensor
    columns: Tensor | None
    own: Tensor | None
    anchors: Tensor | None
    norms: Tensor | None
    reference_norms: Tensor | None


@lru_cache(maxsize=64)
def _plan_of(fixed: Fixed) -> Plan:
    return Plan(cast(Form, fixed.form), fixed.rows, fixed.columns, fixed.keep, fixed.reads, fixed.tf32)


@lru_cache(maxsize=64)
def _rule_of(fixed: Fixed) -> Rule:
    return Rule(
        cast(Terms, fixed.terms),
        cast(Similarity, fixed.similarity),
        fixed.temperature,
        cast(Denominator, fixed.denominator),
    )


class Fixed(NamedTuple):
    """What is no tensor: the formula and the plan, in types that an operator takes.

    ``mutual`` is that of `References`; ``held`` is the name of a dtype, or empty.
    """

    temperature: float
    kind: str
    terms: str
    denominator: str
    similarity: str
    form: str
    rows: int
    columns: int
    keep: bool
    reads: bool
    tf32: bool
    mutual: bool
    held: str

    def rule(self, temperature: Tensor | None) -> Rule:
        """Return the formula, with the temperature as it was given."""
        rule = _rule_of(self)
        return rule if temperature is None else dataclasses.replace(rule, temperature=temperature)

    def plan(self) -> Plan:
        """Return the plan."""
        return _plan_of(self)

    def targets(self, batch: Batch) -> Targets:
        """Return who is whose positive."""
        return Targets(cast(Kind, self.kind), batch.given, batch.columns)


class Saved(NamedTuple):
    """What the backward pass needs of the forward pass, beside what went in.

    Attributes:
        rows: scaled rows ``[N, D]``; in the symmetric form they are sorted.
        factor: as in `Scaled`.
        power: as in `Scaled`.
        stats: sums per row in sorted order, ``[N]`` each; none in the rowwise form.
        kept: exponentials, flat; None where they are not kept.
        classes: the order of the rows; None in the rowwise form, and where it is to be found anew.
    """

    rows: Tensor
    factor: Tensor
    power: Tensor | None
    stats: tuple[Tensor, ...]
    kept: Tensor | None
    classes: symmetric.Classes | None


def anchor_values(
    embeddings: Tensor,
    targets: Targets,
    rule: Rule,
    plan: Plan | Backend,
    *,
    references: References | None,
    anchors: Tensor | None,
    norms: Tensor | None,
    held: torch.dtype | None = None,
) -> AnchorValues:
    """Evaluate one value per anchor as planned; see `pairproof.fast.engine.anchor_values`.

    In the place of a plan a backend leaves the planning to the operator.
    """
    temperature = rule.temperature if isinstance(rule.temperature, Tensor) else None
    planned = (plan, 0, 0, False, False, False) if isinstance(plan, str) else dataclasses.astuple(plan)
    number = 1.0 if isinstance(rule.temperature, Tensor) else rule.temperature
    formula = (number, targets.kind, rule.terms, rule.denominator, rule.similarity)
    mutual, narrow = references is not None and references.mutual, str(held or "").removeprefix("torch.")
    fixed = Fixed._make((*formula, *planned, mutual, narrow))
    batch = Batch(
        embeddings,
        None if references is None else references.embeddings,
        temperature,
        targets.given,
        targets.columns,
        None if references is None else references.own,
        anchors,
        norms,
        None,
    )
    differentiated = [t for t in (batch.embeddings, batch.references, batch.temperature) if t is not None]
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in differentiated)
    if torch.compiler.is_compiling():
        evaluation: Any = _Traceable.apply if wanted else torch.ops.pairproof.anchor_values
        return AnchorValues(*evaluation(*batch, *fixed)[:3])
    if torch._C._are_functorch_transforms_active():
        return AnchorValues(*_Traceable.apply(*batch, *fixed)[:3])  # type: ignore[no-untyped-call]
    if not wanted and all(unpack_dual(t).tangent is None for t in differentiated):  # type: ignore[no-untyped-call]
        return evaluate(batch, fixed._replace(keep=False))[0]
    return AnchorValues(*cast(Sequence[Tensor], _Values.apply(*batch, *fixed)))  # type: ignore[no-untyped-call]


def evaluate(batch: Batch, fixed: Fixed) -> tuple[AnchorValues, Saved]:
    """Forward pass: values and sizes, and what is saved."""
    with _full_precision(batch.embeddings):
        return _FORMS[fixed.form][0](batch, fixed)


def differentiate(
    grad: Tensor, batch: Batch, found: AnchorValues, saved: Saved, fixed: Fixed
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Backward pass.

    Args:
        grad: ``[N]``, by the values.
        batch: what went in.
        found: what came out.
        saved: what the forward pass left.
        fixed: formula and plan.

    Returns:
        The gradients by embeddings ``[N, D]``, references ``[M, D]`` and temperature; None where there is none.
    """
    with _full_precision(batch.embeddings):
        if fixed.form == "triton":  # which looks after both of these in its kernels
            return _triton_gradient(grad, 1.0, batch, saved, fixed)
        size, grad = _of_ordinary_size(_where(_valid(found.positives, found.negatives, fixed, batch.anchors), grad))
        return _FORMS[fixed.form][1](grad, size, batch, saved, fixed)


_Evaluation = Callable[[Batch, Fixed], tuple[AnchorValues, Saved]]
_Differentiation = Callable[[Tensor, float | Tensor, Batch, Saved, Fixed], tuple[Tensor, Tensor | None, Tensor | None]]


def _of_ordinary_size(grad: Tensor) -> tuple[float | Tensor, Tensor]:
    """Return a power of two and ``grad`` ``[N]`` over it, about one in size: the gradient is linear in it."""
    largest = grad.abs().amax()
    if device.may_read(grad) and _SMALL_GRAD < float(largest) < 1 / _SMALL_GRAD:
        return 1.0, grad
    limit = 1000 if grad.dtype == torch.float64 else 120
    exponent = torch.frexp(largest).exponent.clamp(-limit, limit).to(grad.dtype)
    return torch.exp2(exponent), grad * torch.exp2(-exponent)


_SMALL_GRAD = 2.0**-20


def _full_precision(embeddings: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which autocast does not reach the products."""
    kind = embeddings.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def _valid(positives: Tensor, negatives: Tensor, fixed: Fixed, anchors: Tensor | None) -> Tensor | None:
    """Return which rows are anchors with something to sum over, or None where all are by construction."""
    rows = anchors
    if fixed.terms not in ("binary", "lse") and fixed.kind != "partners":
        some = positives > 0
        rows = some if rows is None else rows & some
    if fixed.terms == "lse" or (fixed.terms in ("out", "in") and fixed.denominator != "all"):
        some = negatives > 0
        rows = some if rows is None else rows & some
    return rows


def _where(rows: Tensor | None, tensor: Tensor) -> Tensor:
    return tensor if rows is None else torch.where(rows, tensor, 0.0)


def _pairs(batch: Batch, fixed: Fixed) -> tuple[AnchorValues, Saved]:
    rule = fixed.rule(batch.temperature)
    rows, factor, power = scale_rows(batch.embeddings, rule.similarity, rule.temperature * LN2, batch.norms)
    count = rows.shape[0]
    kept = borrow("kept", rows, count * count) if fixed.keep else None
    stats = pairs.sums(rows, batch.given, kept)
    values = _where(batch.anchors, pairs.values(stats))
    positives = torch.ones_like(batch.given)
    found = AnchorValues(values, positives, positives * (count - 2))
    return found, Saved(rows, factor, power, stats, kept, None)


def _pairs_gradient(
    grad: Tensor, size: float | Tensor, batch: Batch, saved: Saved, fixed: Fixed
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    rule = fixed.rule(batch.temperature)
    pull = pairs.pull(grad, saved.rows, batch.given, pairs.Stats(*saved.stats[:2]), saved.kept)
    gradient, by_temperature = _of_binary_rows(pull, size, batch, saved, rule)
    return gradient, None, by_temperature


def _of_binary_rows(
    pull: Tensor, size: float | Tensor, batch: Batch, saved: Saved, rule: Rule
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients by embeddings, in the order of the rows, and by temperature.

    The rows' products are logits in units of log 2, and so is their gradient.
    """
    size = size * LN2
    by_temperature = _by_temperature(pull, saved.rows, size, batch.temperature)
    scaled = Scaled(saved.rows, saved.factor, saved.power)
    temperature = rule.temperature * LN2
    return to_embeddings(pull, scaled, rule.similarity, temperature, size, batch.embeddings.dtype), by_temperature


def _symmetric(batch: Batch, fixed: Fixed) -> tuple[AnchorValues, Saved]:
    plan, rule = fixed.plan(), fixed.rule(batch.temperature)
    classes = symmetric.sort_rows(fixed.targets(batch), plan)
    order, back = classes.order, classes.back
    scaled = scale_rows(batch.embeddings, rule.similarity, rule.temperature * LN2, batch.norms)
    rows, factor = scaled.rows.index_select(0, order), _in_order(scaled.factor, order)
    power = None if scaled.power is None else _in_order(scaled.power, order)
    kept = borrow("kept", rows, symmetric.kept_size(order.shape[0], plan)) if plan.keep else None
    stats = symmetric.sums(rows, classes, plan, rule, kept)
    positives = classes.positives if classes.paired else classes.positives[back]
    negatives = order.shape[0] - 1 - positives
    values = symmetric.values(stats, classes.positives.to(rows.dtype), rule, classes)[back]
    values = _where(_valid(positives, negatives, fixed, batch.anchors), values)
    return AnchorValues(values, positives, negatives), Saved(rows, factor, power, stats, kept, classes)


def _in_order(scale: Tensor, order: Tensor) -> Tensor:
    return scale.index_select(0, order) if scale.shape[0] == order.shape[0] else scale


def _symmetric_gradient(
    grad: Tensor, size: float | Tensor, batch: Batch, saved: Saved, fixed: Fixed
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    plan, rule = fixed.plan(), fixed.rule(batch.temperature)
    classes = saved.classes or symmetric.sort_rows(fixed.targets(batch), plan)
    stats, number = symmetric.Stats(*saved.stats[: len(symmetric.Stats._fields)]), classes.positives.to(grad.dtype)
    pull = symmetric.pull(grad[classes.order], saved.rows, classes, stats, number, plan, rule, saved.kept)
    gradient, by_temperature = _of_binary_rows(pull, size, batch, saved, rule)
    return gradient.index_select(0, classes.back), None, by_temperature


def _by_temperature(pull: Tensor, rows: Tensor, size: float | Tensor, temperature: Tensor | None) -> Tensor | None:
    """Return the gradient by the temperature: a logit is homogeneous in it of degree -1, in the rows of degree 2."""
    if temperature is None:
        return None
    total = torch.linalg.vecdot(pull, rows).sum(dtype=wide_dtype(pull))
    found: Tensor = total * size / (-2 * temperature.to(total.dtype))
    return found.to(temperature.dtype)


def _described(batch: Batch, fixed: Fixed) -> spec.Batch:
    references = References(batch.references, batch.own, fixed.mutual)
    storage = getattr(torch, fixed.held) if fixed.held else None
    rule = fixed.rule(batch.temperature)
    return spec.Batch(batch.embeddings, fixed.targets(batch), rule, references, batch.anchors, storage)


def _triton(batch: Batch, fixed: Fixed) -> tuple[AnchorValues, Saved]:
    """The backward pass makes the rows ready anew."""
    found, stats = KERNELS["triton"].forward(_described(batch, fixed), fixed.plan())
    nothing = found.values.new_empty(0)
    return found, Saved(nothing, nothing, None, (stats,), None, None)


def _triton_gradient(
    grad: Tensor, _size: float | Tensor, batch: Batch, saved: Saved, fixed: Fixed
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return KERNELS["triton"].backward(grad, _described(batch, fixed), fixed.plan(), saved.stats[0])


def _columns(batch: Batch, rule: Rule, rows: Tensor) -> tuple[Tensor, Scaled | None, Tensor | None]:
    """Return the scaled columns, their scales where they are not the rows themselves, and which column is each row."""
    if batch.references is None:
        return rows, None, torch.arange(rows.shape[0], device=rows.device)
    scaled = scale_rows(batch.references, rule.similarity, rule.temperature, batch.reference_norms)
    return scaled.rows, scaled, batch.own


def _rowwise(batch: Batch, fixed: Fixed) -> tuple[AnchorValues, Saved]:
    plan, rule, targets = fixed.plan(), fixed.rule(batch.temperature), fixed.targets(batch)
    rows, factor, power = scale_rows(batch.embeddings, rule.similarity, rule.temperature, batch.norms)
    columns, _, own = _columns(batch, rule, rows)
    count = rows.shape[0]
    values = rows.new_empty(count)
    positives = torch.empty(count, dtype=torch.int64, device=values.device)
    negatives = torch.empty_like(positives)
    for panel in rowwise.panels(targets, own, count, columns.shape[0], plan.rows, values.dtype):
        values[panel.rows] = rowwise.values(rows[panel.rows] @ columns.T, panel, rule)
        positives[panel.rows], negatives[panel.rows] = panel.sizes()
    values = _where(_valid(positives, negatives, fixed, batch.anchors), values)
    saved = Saved(rows, factor, power, (), None, None)
    return AnchorValues(values, positives, negatives), saved


def _rowwise_gradient(
    grad: Tensor, size: float | Tensor, batch: Batch, saved: Saved, fixed: Fixed
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    plan, rule, targets = fixed.plan(), fixed.rule(batch.temperature), fixed.targets(batch)
    rows = saved.rows
    columns, scaled, own = _columns(batch, rule, rows)
    pull = torch.zeros_like(rows)
    pull_columns = pull if scaled is None else torch.zeros_like(columns)
    for panel in rowwise.panels(targets, own, rows.shape[0], columns.shape[0], plan.rows, rows.dtype):
        weights = rowwise.weights(rows[panel.rows] @ columns.T, panel, rule, grad[panel.rows])
        pull[panel.rows].addmm_(weights, columns)
        pull_columns.addmm_(weights.T, rows[panel.rows])
    by_temperature = _by_temperature(pull, rows, size, batch.temperature)
    of_rows, how = Scaled(rows, saved.factor, saved.power), (rule.similarity, rule.temperature)
    if scaled is None or batch.references is None:
        return to_embeddings(pull, of_rows, *how, size, batch.embeddings.dtype), None, by_temperature
    of_columns = _by_temperature(pull_columns, columns, size, batch.temperature)
    if by_temperature is not None and of_columns is not None:
        # A row meets its columns only as an anchor, so half of the logits' homogeneity lies with the columns.
        by_temperature = by_temperature + of_columns
    by_references = to_embeddings(pull_columns, scaled, *how, size, batch.references.dtype)
    return to_embeddings(pull, of_rows, *how, size, batch.embeddings.dtype), by_references, by_temperature


_FORMS: dict[str, tuple[_Evaluation, _Differentiation]] = {
    "pairs": (_pairs, _pairs_gradient),
    "symmetric": (_symmetric, _symmetric_gradient),
    "rowwise": (_rowwise, _rowwise_gradient),
    "triton": (_triton, _triton_gradient),
}


class _Values(torch.autograd.Function):
    """Per-anchor values ``[N]``, and the sizes; the arguments are the fields of `Batch`, then those of `Fixed`.

    For plain eager execution: it saves what it likes, and pays for no more than it needs.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        batch, ctx.fixed = _parted(arguments)
        found, saved = evaluate(batch, ctx.fixed)
        ctx.mark_non_differentiable(found.positives, found.negatives)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*batch, found.positives, found.negatives, saved.rows, saved.factor, saved.power)
        ctx.left = saved.stats, saved.kept, saved.classes
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * (len(Batch._fields) + len(Fixed._fields) - 3)
        if grads[0] is None:
            return (None, None, None, *nothing)
        tensors = ctx.saved_tensors
        batch = Batch(*tensors[: len(Batch._fields)])
        positives, negatives, rows, factor, power = tensors[len(Batch._fields) :]
        stats, kept, classes = ctx.left
        if torch.is_grad_enabled():
            power = torch.ones_like(factor) if power is None else power
            stats = _stacked(Saved(rows, factor, power, stats, None, None))
            gradients = _Gradient.apply(  # type: ignore[no-untyped-call]
                grads[0], *batch, positives, negatives, rows, factor, power, stats, *ctx.fixed
            )
            return (*_present(gradients, batch), *nothing)
        found = AnchorValues(grads[0], positives, negatives)
        saved = Saved(rows, factor, power, stats, kept, classes)
        gradients = differentiate(grads[0], batch, found, saved, ctx.fixed)
        if kept is not None:
            # A second backward pass through the same graph computes the exponentials anew.
            ctx.left = stats, None, classes
            give_back("kept", kept)
        return (*gradients, *nothing)


def _parted(arguments: Sequence[Any]) -> tuple[Batch, Fixed]:
    return Batch(*arguments[: len(Batch._fields)]), Fixed(*arguments[len(Batch._fields) :])


def _present(gradients: Sequence[Tensor], batch: Batch) -> tuple[Tensor | None, ...]:
    """Return gradients with None for what there is not."""
    return (
        gradients[0],
        None if batch.references is None else gradients[1],
        None if batch.temperature is None else gradients[2],
    )


class _Traceable(torch.autograd.Function):
    """`_Values` for `torch.compile` and `torch.func`: whatever is saved is an input or an output."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        if torch.compiler.is_compiling():
            return tuple(torch.ops.pairproof.anchor_values(*arguments))
        return _forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        batch, ctx.fixed = _parted(inputs)
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*batch, *output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        batch = Batch(*tensors[: len(Batch._fields)])
        saved = tensors[len(Batch._fields) :]
        if torch.compiler.is_compiling():
            gradients = torch.ops.pairproof.anchor_gradients(grads[0], *batch, *saved, *ctx.fixed)
        else:
            gradients = _Gradient.apply(grads[0], *batch, *saved, *ctx.fixed)  # type: ignore[no-untyped-call]
        gradients = _present(gradients, batch)
        return (*gradients, *(None,) * (len(Batch._fields) + len(Fixed._fields) - 3))


class _Gradient(torch.autograd.Function):
    """The gradients by embeddings, references and temperature, from that by the values ``[N]``."""

    @staticmethod
    def forward(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        return _backward(grad, *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        batch, ctx.fixed = _parted((*inputs[1 : 1 + len(Batch._fields)], *inputs[-len(Fixed._fields) :]))
        ctx.save_for_backward(inputs[0], *batch)

    @staticmethod
    def backward(ctx: Any, *directions: Tensor) -> tuple[Tensor | None, ...]:
        grad, *rest = ctx.saved_tensors
        with _full_precision(grad):
            found = second_derivative(directions, grad, Batch(*rest), ctx.fixed)
        return (*found, *(None,) * (len(Batch._fields) + _SAVED + len(Fixed._fields) - 3))


_SAVED = 6
"""Tensors that `_forward` returns beside the values."""


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    """Return the values, the sizes of P and N, the scaled rows, their factor and power, and the sums per row."""
    batch, fixed = _planned(*_parted(arguments))
    found, saved = evaluate(batch, fixed._replace(keep=False))
    if fixed.form == "triton":
        # The kernels leave no rows, but the operator promises some, of one shape for every form.
        rows = batch.embeddings.new_zeros(batch.embeddings.shape, dtype=computing_dtype(batch.embeddings))
        factor = rows.new_zeros((rows.shape[0] if fixed.similarity == "cosine" else 1, 1))
        saved = saved._replace(rows=rows, factor=factor)
    power = torch.ones_like(saved.factor) if saved.power is None else saved.power
    # What an operator returns must share no memory with what else it returns, and lie in memory as was promised.
    parts = (saved.rows.contiguous(), saved.factor.contiguous(), power.contiguous())
    return found.values, found.positives, found.negatives.clone(), *parts, _stacked(saved)


def _planned(batch: Batch, fixed: Fixed) -> tuple[Batch, Fixed]:
    """Plan what a compiled graph could not: it serves batches of every size, and must not look at values."""
    if fixed.form in get_args(Form):
        return batch, fixed
    references = None if batch.references is None else References(batch.references, batch.own)
    plan, targets = choose(
        batch.embeddings,
        fixed.targets(batch),
        fixed.rule(batch.temperature),
        references,
        batch.norms,
        backend=cast(Backend, fixed.form),
    )
    fixed = fixed._replace(kind=targets.kind, **dataclasses.asdict(plan))
    return batch._replace(given=targets.given), fixed


def _stacked(saved: Saved) -> Tensor:
    """Return the sums per row as ``[S, N]``, S the most that any form has; those that are not there as 0."""
    if saved.stats and saved.stats[0].dim() == 2:
        return saved.stats[0]
    count = saved.rows.shape[0]
    found = saved.rows.new_zeros((_most_stats(), count))
    for line, part in enumerate(saved.stats):
        if part.numel():
            found[line] = part
    return found


def _most_stats() -> int:
    return max(len(symmetric.Stats._fields), *(kernels.STATS for kernels in KERNELS.values()))


def _backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Return the gradients, empty tensors where there is none: operators return tensors only."""
    batch, fixed = _parted((*arguments[: len(Batch._fields)], *arguments[-len(Fixed._fields) :]))
    batch, fixed = _planned(batch, fixed)
    positives, negatives, rows, factor, power, stats = arguments[len(Batch._fields) : -len(Fixed._fields)]
    lines = (stats,) if fixed.form == "triton" else tuple(stats)
    saved = Saved(rows, factor, power, lines, None, None)
    gradients = differentiate(grad, batch, AnchorValues(grad, positives, negatives), saved, fixed._replace(keep=False))
    return tuple(grad.new_empty(0) if g is None else g.contiguous() for g in gradients)


def second_derivative(
    directions: Sequence[Tensor], grad: Tensor, batch: Batch, fixed: Fixed
) -> tuple[Tensor | None, ...]:
    """Differentiate the gradients, taken along ``directions``, once more.

    One panel of anchors at a time: memory stays linear. The rowwise form's own operations are differentiated, in the
    computing dtype.

    Args:
        directions: by embeddings ``[N, D]``, references ``[M, D]`` and temperature, as the gradients are shaped.
        grad: ``[N]``, by the values.
        batch: what went into the forward pass.
        fixed: formula and plan.

    Returns:
        The derivatives by ``grad``, embeddings, references and temperature; None for what there is not.
    """
    if fixed.mutual:
        return _mutual_second_derivative(directions, grad, batch, fixed._replace(mutual=False))
    count = batch.embeddings.shape[0]
    columns = count if batch.references is None else batch.references.shape[0]
    targets = fixed.targets(batch)
    present = [k for k, t in enumerate((batch.embeddings, batch.references, batch.temperature)) if t is not None]
    own = batch.own if batch.references is not None else torch.arange(count, device=grad.device)
    along = [directions[k] for k in present]
    height = fixed.rows if fixed.form == "rowwise" else max(1, PANEL_ELEMENTS // columns)

    def of_panel(panel: AnyPanel, *inputs: Tensor) -> Tensor:
        given = dict(zip(present, inputs, strict=True))
        temperature = given.get(2)
        rule = fixed.rule(temperature)
        rows = differentiable_rows(given[0], rule)
        others = rows if 1 not in given else differentiable_rows(given[1], rule)
        values = rowwise.values(rows[panel.rows] @ others.T, panel, rule)
        valid = _valid(*panel.sizes(), fixed, _part(batch.anchors, panel.rows))
        return _where(valid, values)

    inputs = [t for t in (batch.embeddings, batch.references, batch.temperature) if t is not None]
    totals: list[Tensor] = [torch.zeros_like(t) for t in inputs]
    by_grad = []
    for panel in rowwise.panels(targets, own, count, columns, height, computing_dtype(batch.embeddings)):

        def along_directions(upstream: Tensor, *inputs: Tensor, panel: AnyPanel = panel) -> Tensor:
            pulled = torch.func.vjp(lambda *given: of_panel(panel, *given), *inputs)[1]
            return sum(((g * v).sum() for g, v in zip(pulled(upstream), along, strict=True)), grad.new_zeros(()))

        numbers = tuple(range(len(inputs) + 1))
        first, *more = torch.func.grad(along_directions, argnums=numbers)(grad[panel.rows], *inputs)
        by_grad.append(first)
        totals = [total + part for total, part in zip(totals, more, strict=True)]
    by_input = dict(zip(present, totals, strict=True))
    return torch.cat(by_grad), *(by_input.get(k) for k in range(3))


def _mutual_second_derivative(
    directions: Sequence[Tensor], grad: Tensor, batch: Batch, fixed: Fixed
) -> tuple[Tensor | None, ...]:
    """Add both directions' parts: in the other one rows and references change places."""
    assert batch.references is not None
    count = batch.embeddings.shape[0]
    turned = batch._replace(embeddings=batch.references, references=batch.embeddings)
    first = second_derivative(directions, grad[:count], batch, fixed)
    by_grad, by_columns, by_rows, by_temperature = second_derivative(
        (directions[1], directions[0], *directions[2:]), grad[count:], turned, fixed
    )
    back = (by_rows, by_columns, by_temperature)
    added = [None if a is None or b is None else a + b for a, b in zip(first[1:], back, strict=True)]
    return torch.cat([g for g in (first[0], by_grad) if g is not None]), *added


def _part(mask: Tensor | None, rows: slice) -> Tensor | None:
    return None if mask is None else mask[rows]


_FIXED_SCHEMA = (
    "float temperature_number, str kind, str terms, str denominator, str similarity, str form, int tile_rows,"
    " int tile_columns, bool keep, bool reads, bool tf32, bool mutual, str held"
)
_BATCH_SCHEMA = (
    "Tensor embeddings, Tensor? references, Tensor? temperature, Tensor given, Tensor? columns, Tensor? own,"
    " Tensor? anchors, Tensor? norms, Tensor? reference_norms"
)
_SAVED_SCHEMA = "Tensor positives, Tensor negatives, Tensor scaled, Tensor factor, Tensor power, Tensor stats"

_anchor_values = torch.library.custom_op(
    "pairproof::anchor_values",
    _forward,
    mutates_args=(),
    schema=f"({_BATCH_SCHEMA}, {_FIXED_SCHEMA}) -> ({', '.join(['Tensor'] * (1 + _SAVED))})",
)
_anchor_gradients = torch.library.custom_op(
    "pairproof::anchor_gradients",
    _backward,
    mutates_args=(),
    schema=f"(Tensor grad, {_BATCH_SCHEMA}, {_SAVED_SCHEMA}, {_FIXED_SCHEMA}) -> (Tensor, Tensor, Tensor)",
)


@_anchor_values.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    batch, fixed = _parted(arguments)
    count, dim = batch.embeddings.shape
    floats = batch.embeddings.new_empty((), dtype=computing_dtype(batch.embeddings))
    whole = batch.embeddings.new_empty((), dtype=torch.int64)
    factors = (count if fixed.similarity == "cosine" else 1, 1)
    return (
        floats.new_empty(count),
        whole.new_empty(count),
        whole.new_empty(count),
        floats.new_empty((count, dim)),
        floats.new_empty(factors),
        floats.new_empty(factors),
        floats.new_empty((_most_stats(), count)),
    )


@_anchor_gradients.register_fake
def _(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    batch = Batch(*arguments[: len(Batch._fields)])
    given = (batch.embeddings, batch.references, batch.temperature)
    # Contiguous, however the rows lie in memory.
    return tuple(grad.new_empty(0) if part is None else part.new_empty(part.shape) for part in given)
