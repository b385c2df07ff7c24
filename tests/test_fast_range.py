"""The exact backend of `pairproof.fast` against an oracle in ball arithmetic, over its whole guaranteed range.

The oracle is a small reverse tape over python-flint's ``arb``, with an independent implementation of each formula. Its
precision is far beyond that of any float, so an error found here is an error of the backend.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from flint import arb, ctx

from pairproof import fast
from tests.each import each

Tensor = torch.Tensor
BITS = 3600


def exactly(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function with the backend that guarantees the whole range."""
    bound = functools.partial(function, backend="exact")
    functools.update_wrapper(bound, function)
    return bound


nt_bxent_loss = exactly(fast.nt_bxent_loss)
nt_xent_loss = exactly(fast.nt_xent_loss)
nt_xent_pairwise_loss = exactly(fast.nt_xent_pairwise_loss)
supcon_epsilon_loss = exactly(fast.supcon_epsilon_loss)
supcon_in_loss = exactly(fast.supcon_in_loss)
supcon_loss = exactly(fast.supcon_loss)


class Node:
    """A number on the tape: its value, its parents, and its derivative with respect to each parent."""

    def __init__(self, value: arb, parents: Sequence[tuple[Node, arb]] = ()) -> None:
        self.value, self.parents, self.grad = value, parents, arb(0)

    def __add__(self, other: Node) -> Node:
        return Node(self.value + other.value, [(self, arb(1)), (other, arb(1))])

    def __sub__(self, other: Node) -> Node:
        return Node(self.value - other.value, [(self, arb(1)), (other, arb(-1))])

    def __mul__(self, other: Node) -> Node:
        return Node(self.value * other.value, [(self, other.value), (other, self.value)])

    def __truediv__(self, other: Node) -> Node:
        ratio = self.value / other.value
        return Node(ratio, [(self, 1 / other.value), (other, -ratio / other.value)])

    def exp(self) -> Node:
        value = self.value.exp()
        return Node(value, [(self, value)])

    def log(self) -> Node:
        return Node(self.value.log(), [(self, 1 / self.value)])

    def sqrt(self) -> Node:
        value = self.value.sqrt()
        return Node(value, [(self, 1 / (2 * value))])


def constant(value: float) -> Node:
    return Node(arb(value))


def total(nodes: Sequence[Node]) -> Node:
    return Node(sum((node.value for node in nodes), arb(0)), [(node, arb(1)) for node in nodes])


def backward(root: Node) -> None:
    order: list[Node] = []
    seen: set[int] = set()
    stack = [(root, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack.extend((parent, False) for parent, _ in node.parents)
    root.grad = arb(1)
    for node in reversed(order):
        for parent, local in node.parents:
            parent.grad = parent.grad + node.grad * local


@dataclass(frozen=True)
class Loss:
    """One loss: its function, and the value of anchor i computed from its logits, positives and negatives."""

    name: str
    call: Callable[..., Tensor]
    anchor: Callable[[list[Node], int, list[int], list[int]], Node]
    targets: str = "labels"


def mean(nodes: Sequence[Node]) -> Node:
    return total(nodes) / constant(len(nodes))


def ratios(s: list[Node], positives: list[int], negatives: list[int], denominator: str) -> list[Node]:
    among = {"all": positives + negatives, "only_negatives": negatives}
    return [s[p].exp() / total([s[a].exp() for a in among.get(denominator, [p, *negatives])]) for p in positives]


def out_anchor(denominator: str) -> Callable[[list[Node], int, list[int], list[int]], Node]:
    def anchor(s: list[Node], i: int, positives: list[int], negatives: list[int]) -> Node:
        return constant(0) - mean([ratio.log() for ratio in ratios(s, positives, negatives, denominator)])

    return anchor


def in_anchor(denominator: str) -> Callable[[list[Node], int, list[int], list[int]], Node]:
    def anchor(s: list[Node], i: int, positives: list[int], negatives: list[int]) -> Node:
        return constant(0) - mean(ratios(s, positives, negatives, denominator)).log()

    return anchor


def binary_anchor(s: list[Node], i: int, positives: list[int], negatives: list[int]) -> Node:
    one = constant(1)
    attract = [(one + (constant(0) - s[p]).exp()).log() for p in positives]
    repel = [(one + s[n].exp()).log() for n in negatives]
    return total(attract) / constant(len(positives) + 1) + mean(repel)


def epsilon_anchor(s: list[Node], i: int, positives: list[int], negatives: list[int]) -> Node:
    top = s[max(range(len(s)), key=lambda j: (s[j].value.mid(), -j))]
    e = [(x - top).exp() + constant(1e-8) for x in s]
    below = total([e[a] for a in positives + negatives])
    terms = [(e[p] / below).log() for p in positives]
    return constant(0) - total(terms) / (constant(len(positives)) + constant(1e-8))


LOSSES = [
    *(
        Loss(f"supcon-{d}", lambda z, t, d=d, **k: supcon_loss(z, t, denominator=d, **k), out_anchor(d))
        for d in ("all", "one_positive", "only_negatives")
    ),
    *(
        Loss(f"supcon_in-{d}", lambda z, t, d=d, **k: supcon_in_loss(z, t, denominator=d, **k), in_anchor(d))
        for d in ("all", "one_positive", "only_negatives")
    ),
    Loss("nt_xent", nt_xent_loss, out_anchor("all"), "partners"),
    Loss("nt_xent_pairwise", nt_xent_pairwise_loss, out_anchor("one_positive")),
    Loss("nt_bxent", nt_bxent_loss, binary_anchor, "positive_pairs"),
    Loss("supcon_epsilon", supcon_epsilon_loss, epsilon_anchor),
]


@dataclass(frozen=True)
class Truth:
    values: list[arb]
    gradient: list[list[arb]]


def oracle(
    loss: Loss,
    embeddings: Tensor,
    positive: list[list[int]],
    *,
    temperature: float,
    similarity: str,
    upstream: Sequence[float],
) -> Truth:
    """Return the anchors' values, and the gradient of their sum weighted by ``upstream``."""
    rows = [[Node(arb(x)) for x in row] for row in embeddings.double().tolist()]
    count = len(rows)
    vectors = rows
    if similarity == "cosine":
        norms = [total([x * x for x in row]).sqrt() for row in rows]
        vectors = [[x / norm for x in row] for row, norm in zip(rows, norms, strict=True)]
    tau = constant(temperature)
    logits: dict[tuple[int, int], Node] = {}
    for i in range(count):
        for j in range(i, count):
            logits[i, j] = logits[j, i] = total([a * b for a, b in zip(vectors[i], vectors[j], strict=True)]) / tau
    if similarity == "cosine":
        logits |= {(i, i): constant(1) / tau for i in range(count)}
    values = []
    for i in range(count):
        negatives = [j for j in range(count) if j != i and j not in positive[i]]
        values.append(loss.anchor([logits[i, j] for j in range(count)], i, positive[i], negatives))
    backward(total([value * constant(g) for value, g in zip(values, upstream, strict=True)]))
    return Truth([value.value for value in values], [[x.grad for x in row] for row in rows])


def check(found: Tensor, truth: Sequence[arb], relative: float) -> float:
    """Check that each entry is finite, not zero, and close to its true value; return the largest relative error.

    Entries whose true value exceeds the dtype's largest number are skipped. Below its smallest, zero is right too.
    """
    info = torch.finfo(found.dtype)
    least = info.smallest_normal * info.eps
    worst = 0.0
    entries = found.double().flatten().tolist()
    assert len(entries) == len(truth)
    for k, (x, exact) in enumerate(zip(entries, truth, strict=True)):
        size = exact.abs_upper()
        if not size < info.max:
            continue
        assert math.isfinite(x), f"entry {k}: {x}, true {exact.str(10)}"
        if exact.abs_lower() < least:
            assert size < 2 * least, "the oracle's ball is too wide to judge"
            assert abs(x) <= 2 * least, f"entry {k}: {x}, true {exact.str(10)}"
            continue
        assert x != 0, f"entry {k}: zero, true {exact.str(10)}"
        error = float(abs(arb(x) - exact) / size)
        error -= 2 * float(arb(least) / size)
        assert error <= relative, f"entry {k}: {x}, true {exact.str(20)}, relative error {error:.2e}"
        worst = max(worst, error)
    return worst


LOSS_BY_NAME = {loss.name: loss for loss in LOSSES}
# One unit in the last place of the returned dtype; for float64, the accuracy that logits of up to 2000 allow.
RELATIVE = {torch.float64: 3e-12, torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@pytest.fixture(autouse=True)
def _digits() -> Iterator[None]:
    before = ctx.prec
    ctx.prec = BITS
    yield
    ctx.prec = before


def pairs_of(loss: Loss, labels: Sequence[int]) -> tuple[Tensor, list[list[int]]]:
    """Return the loss's second argument for these labels, and the positives of every row."""
    count = len(labels)
    if loss.targets == "partners":
        partners = torch.arange(count) ^ 1
        return partners, [[int(partner)] for partner in partners]
    positive = [[j for j in range(count) if j != i and labels[j] == labels[i]] for i in range(count)]
    if loss.targets == "positive_pairs":
        return torch.tensor([[i, j] for i in range(count) for j in positive[i]]), positive
    return torch.tensor(labels), positive


def judge(
    loss: Loss,
    embeddings: Tensor,
    labels: Sequence[int],
    *,
    temperature: float,
    similarity: str,
    upstream: Sequence[float] | None = None,
    relative: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compare the anchors' values and the gradient with the oracle; return both."""
    leaf = embeddings.clone().requires_grad_()
    targets, positive = pairs_of(loss, labels)
    values = loss.call(leaf, targets, temperature=temperature, similarity=similarity, reduction="none")
    weights = torch.tensor([1.0] * len(labels) if upstream is None else upstream, dtype=values.dtype)
    values.backward(weights)
    truth = oracle(
        loss, embeddings, positive, temperature=temperature, similarity=similarity, upstream=weights.tolist()
    )
    assert leaf.grad is not None
    assert leaf.grad.dtype == embeddings.dtype
    assert values.dtype == (torch.float64 if embeddings.dtype == torch.float64 else torch.float32)
    # Under "dot", products of nearly orthogonal rows and of rows of very different size partly cancel.
    factor = 32 if similarity == "dot" and embeddings.dtype == torch.float64 else 1
    check(values.detach(), truth.values, relative or factor * RELATIVE[values.dtype])
    flat = [entry for row in truth.gradient for entry in row]
    check(leaf.grad, flat, relative or factor * RELATIVE[leaf.grad.dtype])
    return values.detach(), leaf.grad


def batch(kind: str, labels: Sequence[int], dim: int, dtype: torch.dtype, exponents: Sequence[float]) -> Tensor:
    """Return unit rows, random or close to the centre of their class ("solved"), scaled by powers of ten."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(len(labels), dim, dtype=torch.float64, generator=generator)
    if kind == "solved":
        centres = torch.nn.functional.normalize(torch.randn(8, dim, dtype=torch.float64, generator=generator), dim=1)
        rows = centres[torch.tensor(labels)] + 0.05 * rows
    rows = torch.nn.functional.normalize(rows, dim=1)
    return (rows * 10.0 ** torch.tensor(exponents, dtype=torch.float64)[:, None]).to(dtype)


COSINE_NORMS = {
    torch.float64: [[-307] * 6, [300] * 6, [-300, 0, 300, -150, 250, 100]],
    torch.float32: [[0] * 6, [-37] * 6, [30] * 6, [-30, 0, 30, -15, 25, -37]],
    torch.bfloat16: [[-30, 0, 30, -15, 25, -37]],
    torch.float16: [[-4] * 6, [-3, 0, 4, -4, 3, 1]],
}
DOT_NORMS = {
    torch.float64: [[-160] * 6, [140] * 6, [-140, 0, 140, -100, 2, 1]],
    torch.float32: [[0] * 6, [-18] * 6, [15] * 6, [-15, 0, 15, -10, 2, 1]],
    torch.bfloat16: [[-15, 0, 15, -10, 2, 1]],
    torch.float16: [[0] * 6, [-3, 0, 3, -2, 2, 1]],
}


@pytest.mark.parametrize("temperature", [1e-3, *(pytest.param(t, marks=pytest.mark.slow) for t in (0.07, 1.0)), 1e3])
@each("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@each("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
@pytest.mark.quick(7)
def test_value_and_gradient_are_right_over_the_range(
    loss: Loss, similarity: str, temperature: float, dtype: torch.dtype
) -> None:
    labels = [0, 0, 1, 1, 2, 2] if loss.targets == "partners" else [0, 1, 0, 1, 0, 1]
    norms = (COSINE_NORMS if similarity == "cosine" else DOT_NORMS)[dtype]
    for kind, exponents in [("random", norms[-1]), *(("solved", exponents) for exponents in norms)]:
        rows = batch(kind, labels, 3, dtype, exponents)
        judge(loss, rows, labels, temperature=temperature, similarity=similarity)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
@pytest.mark.quick(7)
def test_upstream_gradients_of_any_size_are_applied(loss: Loss, dtype: torch.dtype) -> None:
    labels = [0, 0, 1, 1, 2, 2] if loss.targets == "partners" else [0, 1, 0, 1, 0, 1]
    rows = batch("solved", labels, 3, dtype, [0, 1, -1, 2, -2, 0])
    for upstream in ([2.0**16] * 6, [1e-20] * 6, [1e30] * 6, [1e-44] * 6, [1.0, 0.0, 3.0, 2.0**16, 1e-3, 0.5]):
        judge(loss, rows, labels, temperature=0.07, similarity="cosine", upstream=upstream)
    # Upstream gradient and norms bring weights of e^-500 back into the range of float64.
    if dtype == torch.float64:
        far = batch("solved", labels, 3, dtype, [-200] * 6)
        judge(loss, far, labels, temperature=1e-3, similarity="cosine", upstream=[1e250] * 6)


@pytest.mark.parametrize(
    "name", ["nt_xent", "supcon-all", "supcon_in-all", "nt_xent_pairwise", "supcon_in-one_positive"]
)
def test_tiny_loss_and_gradient_are_not_rounded_to_zero(name: str) -> None:
    """The softmax of the positive rounds to 1 here, and 1 minus it to 0."""
    rows = torch.tensor([[1.0, 0.01], [0.999, 0.02], [0.02, 1.0], [0.01, 0.999]])
    values, gradient = judge(LOSS_BY_NAME[name], rows, [0, 0, 1, 1], temperature=0.014, similarity="cosine")
    assert float(values.max()) < 2e-29
    assert bool((values > 0).all())
    assert bool((gradient != 0).all())


@pytest.mark.parametrize("name", ["supcon-all", "supcon_epsilon"])
@pytest.mark.parametrize("spread", [1e-3, 1e-6, 0.0])
def test_gradient_of_nearly_equal_positives_is_accurate(name: str, spread: float) -> None:
    """q - 1/|P| is a difference of nearly equal numbers, and the negatives' part is far below its rounding error."""
    offsets = torch.tensor([[0.0, 0.0], [1.0, -2.0], [-1.5, 0.5], [0.0, 0.0], [2.0, 1.0], [-1.0, -1.0]])
    rows = torch.tensor([[1.0, 0.0]] * 3 + [[-0.8, 0.6]] * 3, dtype=torch.float64) + spread * offsets.double()
    if spread:
        labels = [0, 0, 0, 1, 1, 1]
        judge(LOSS_BY_NAME[name], rows, labels, temperature=0.05, similarity="cosine", relative=1e-6)
        return
    # For copies, the positives' part of the gradient is exactly zero, and only the negatives' part remains.
    judge(LOSS_BY_NAME[name], rows[[0, 1, 3, 4]], [0, 0, 1, 1], temperature=0.05, similarity="cosine", relative=1e-6)


def test_collapsed_class_without_negatives_has_a_gradient() -> None:
    """Cosines that differ from 1 by 1e-18 are all 1 in float64, but the gradient depends on these differences."""
    rows = torch.tensor(
        [[1.0, 1e-9, 0.0], [1.0, -2e-9, 1e-9], [1.0, 0.0, 3e-9], [1.0, 2e-9, 2e-9]], dtype=torch.float64
    )
    for name in ("supcon-all", "supcon_epsilon"):
        _, gradient = judge(LOSS_BY_NAME[name], rows, [0] * 4, temperature=0.07, similarity="cosine", relative=1e-6)
        assert bool((gradient != 0).all())


@pytest.mark.parametrize("name", ["nt_xent", "supcon-all", "nt_xent_pairwise"])
def test_weights_that_underflow_are_recovered_by_small_norms(name: str) -> None:
    """e^-120 is zero in float32, e^-1200 in float64; times 1 / (temperature * norm) both are representable."""
    near = torch.tensor([[1.0, 0.1], [1.0, 0.11], [-0.2, 1.0], [-0.21, 1.0]], dtype=torch.float64)
    single = (near * 1e-30).float()
    values, gradient = judge(LOSS_BY_NAME[name], single, [0, 0, 1, 1], temperature=0.009, similarity="cosine")
    assert float(values.max()) == 0
    assert bool((gradient != 0).all())
    values, gradient = judge(LOSS_BY_NAME[name], near * 1e-290, [0, 0, 1, 1], temperature=9e-4, similarity="cosine")
    assert float(values.max()) == 0
    assert bool((gradient != 0).all())


def test_gradient_of_a_row_that_is_only_a_negative_is_not_zero() -> None:
    """The last row is not an anchor and far from all rows: its gradient has only weights of about e^-1300."""
    near = torch.tensor([[1.0, 0.1], [1.0, 0.11], [-1.0, 0.3]], dtype=torch.float64) * 1e-300
    leaf = near.clone().requires_grad_()
    supcon_loss(leaf, torch.tensor([0, 0, 1]), temperature=1.5e-3, reduction="sum").backward()
    truth = oracle(
        Loss("", supcon_loss, lambda s, i, p, n: out_anchor("all")(s, i, p, n) if p else constant(0)),
        near,
        [[1], [0], []],
        temperature=1.5e-3,
        similarity="cosine",
        upstream=[1.0] * 3,
    )
    assert leaf.grad is not None
    check(leaf.grad, [entry for row in truth.gradient for entry in row], 3e-12)
    assert 0 < float(leaf.grad[2].abs().max()) < 1e-200


def test_gradient_of_the_dominant_entry_is_not_lost_to_cancellation() -> None:
    """v - (v.u) u cancels completely in the large entry of a row like (1, 1e-20)."""
    rows = torch.tensor([[1.0, 1e-20], [0.8, 0.6], [0.5, -1.0], [1e-25, -1.0]])
    _, gradient = judge(LOSS_BY_NAME["nt_xent"], rows, [0, 0, 1, 1], temperature=0.5, similarity="cosine")
    assert 0 < abs(float(gradient[0, 0])) < 1e-18


@pytest.mark.parametrize(
    ("dtype", "norm", "temperature", "cosines"),
    [(torch.float32, 1e-36, 5e-3, (0.5, 0.1)), (torch.float64, 1e-300, 1e-3, (0.5, -0.4))],
)
def test_contributions_of_very_different_size_add_up_in_one_row(
    dtype: torch.dtype, norm: float, temperature: float, cosines: tuple[float, float]
) -> None:
    """The second and third entries of row 0 come from one pair each; the weights differ by e^80 or e^900."""
    near, far = cosines
    rows = torch.tensor(
        [[1, 0, 0]] * 2 + [[near, math.sqrt(1 - near**2), 0]] * 2 + [[far, 0, math.sqrt(1 - far**2)]] * 2,
        dtype=torch.float64,
    )
    rows = (rows * norm).to(dtype)
    labels = [0, 0, 1, 1, 2, 2]
    _, gradient = judge(LOSS_BY_NAME["nt_xent"], rows, labels, temperature=temperature, similarity="cosine")
    assert 0 < abs(float(gradient[0, 2])) < 1e-30 * abs(float(gradient[0, 1]))


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_epsilon_loss_has_a_gradient_where_its_exponentials_underflow(similarity: str) -> None:
    rows = torch.tensor([[9.0, 1.0], [1.0, 8.0], [-7.0, 3.0], [2.0, -9.0]], dtype=torch.float64)
    values, gradient = judge(LOSS_BY_NAME["supcon_epsilon"], rows, [0, 1, 0, 1], temperature=0.2, similarity=similarity)
    if similarity == "dot":
        # The tutorial's constant: every e^(s - max) is far below epsilon, and the tutorial's gradient rounds to zero.
        assert torch.allclose(values, torch.full_like(values, math.log(3)), rtol=1e-7)
    assert bool((gradient != 0).all())


def test_binary_cross_entropy_is_right_at_logits_of_a_thousand() -> None:
    rows = torch.tensor([[1.0, 0.0], [1.0, 1e-3], [-1.0, 1e-3], [-1.0, 2e-3]], dtype=torch.float64)
    for labels in ([0, 0, 1, 1], [0, 1, 1, 0]):
        for scale in (1.0, 1e-250):
            judge(LOSS_BY_NAME["nt_bxent"], rows * scale, labels, temperature=1e-3, similarity="cosine")


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss.name != "supcon_epsilon"], ids=lambda loss: loss.name)
def test_self_products_may_overflow(loss: Loss) -> None:
    rows = torch.tensor(
        [[1e200, 0.0, 1e-101], [0.0, 1e200, -2e-101], [3e-200, 1e-200, 1e100], [-1e-200, 2e-200, 1e99]],
        dtype=torch.float64,
    )
    assert bool((rows[:2] @ rows[:2].T).diagonal().isinf().all())
    judge(loss, rows, [0, 0, 1, 1], temperature=1.0, similarity="dot")


def test_products_may_overflow_before_the_temperature_divides_them() -> None:
    rows = torch.tensor([[1e154, 1e154], [1.2e154, -1e154], [1e152, 5e153], [-9e153, 1e154]], dtype=torch.float64)
    targets = torch.tensor([0, 0, 1, 1])
    for call in (supcon_loss, supcon_in_loss, nt_xent_pairwise_loss):
        assert math.isfinite(float(call(rows, targets, similarity="dot", temperature=1e3)))
    judge(LOSS_BY_NAME["supcon-all"], rows, [0, 0, 1, 1], temperature=1e3, similarity="dot", relative=1e-9)


def test_mean_of_large_losses_does_not_overflow() -> None:
    rows = torch.tensor([[1e154, 0.0], [-1e154, 1.0]], dtype=torch.float64).repeat(4, 1)
    leaf = rows.clone().requires_grad_()
    loss = nt_xent_loss(leaf, torch.arange(8) ^ 1, similarity="dot", temperature=1.25)
    assert float(loss.detach()) == pytest.approx(1.6e308)
    loss.backward()
    assert leaf.grad is not None
    assert bool(leaf.grad.isfinite().all())


def test_smallest_losses_are_not_rounded_to_zero() -> None:
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [-1.0, 0.0]])
    for temperature, size in ((0.0289, 1e-30), (0.0197, 1e-44)):
        loss = float(nt_xent_loss(rows, torch.tensor([1, 0, 3, 2]), temperature=temperature))
        assert loss == pytest.approx(2 * math.exp(-2 / temperature), rel=1e-6, abs=2e-45)
        assert 0.1 * size < loss < 10 * size
    loss = float(nt_xent_loss(rows.double(), torch.tensor([1, 0, 3, 2]), temperature=2.75e-3))
    assert loss == pytest.approx(2 * math.exp(-2 / 2.75e-3), rel=1e-6)
    assert 0 < loss < 1e-307


def test_smallest_losses_with_only_negatives_are_not_rounded_to_zero() -> None:
    """With only negatives in the denominator the loss can be zero; here it is a difference of logits of 1e-24."""
    rows = torch.tensor([[2e-12, 1e-12], [1e-12, -3e-12], [-1e-12, 2e-12], [3e-12, 4e-12]])
    for name in ("supcon-only_negatives", "supcon_in-only_negatives"):
        targets = torch.tensor([0, 0, 0, 1])
        loss = LOSS_BY_NAME[name].call(rows, targets, temperature=1.0, similarity="dot", reduction="none")
        s = rows.double() @ rows.double().T
        true = [float(s[i, 3] - (s[i, :3].sum() - s[i, i]) / 2) for i in range(3)]
        assert loss[:3].tolist() == pytest.approx(true, rel=1e-6)
        assert 0 < float(loss[:3].abs().max()) < 1e-22


def test_subnormal_float16_rows_are_normalised() -> None:
    smallest = 2.0**-24
    rows = torch.tensor([[1.0, 2.0], [2.0, 3.0], [-3.0, 1.0], [-2.0, 1.0]])
    tiny = (rows * smallest).half()
    assert bool((tiny != 0).all())
    partners = torch.tensor([1, 0, 3, 2])
    assert torch.equal(nt_xent_loss(tiny, partners), nt_xent_loss(rows, partners))
