"""What the documents say in words, each statement computed.

Two numbers of the reference are *the same* when their enclosures at 256 bits overlap, *different* when they are apart.
Where a program in float64 is held against them, the margin stands beside it: far above rounding, far below what is told
apart. A claim that holds only under a condition is tried where the condition is met and where it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flint import arb

from pairproof import reference
from pairproof.reference import scalars

from ..implementations.documents import batch_tutorial, pair_nt_xent
from ..suite.catalogue import LOSSES
from ..truth.intervals import ball, exact, precision
from .figures import judge
from .load import Claim, WorkedFixture

HOLDS, FAILS = "holds", "does not hold"


@dataclass(frozen=True)
class ClaimJudgement:
    """A claim, the verdict computed for it, and the numbers that decide it."""

    document: str
    claim: Claim
    verdict: str
    evidence: str

    @property
    def case(self) -> str:
        """The id by which the command line knows the claim."""
        return f"{self.document}/{self.claim.id}"

    @property
    def passed(self) -> bool:
        """Whether the computed verdict is the recorded one."""
        return self.verdict == self.claim.verdict


class Desk:
    """A document's exact inputs at hand, and the reference over balls to compute with."""

    def __init__(self, fixture: WorkedFixture) -> None:
        self.fixture = fixture

    def rows(self, name: str) -> np.ndarray[Any, Any]:
        """An input [N, D] as balls."""
        source = self.fixture.inputs[name]
        rows = np.empty(source.shape, dtype=object)
        for i, j in np.ndindex(source.shape):
            rows[i, j] = exact((source.exact or ())[i][j])
        return rows

    def loss(
        self, name: str, rows: str | np.ndarray[Any, Any], *target: Any, temperature: float = 1, **options: Any
    ) -> arb:
        """A loss of the reference on an input, by name or given."""
        function = getattr(reference, LOSSES[name].function)
        values = self.rows(rows) if isinstance(rows, str) else rows
        result: arb = function(values, *target, temperature=temperature, **options).loss
        return result

    def printed(self, *figures: str) -> list[float]:
        """Scalars as printed."""
        found = {figure.id: figure for figure in self.fixture.figures}
        return [float(str(found[name].printed)) for name in figures]

    def reproduced(self, *figures: str) -> bool:
        """Whether these figures are what the reference's terms give."""
        return all(j.passed for j in judge(self.fixture, figures))

    def call(self, name: str) -> Mapping[str, Any]:
        """The arguments of a call."""
        return self.fixture.calls[name].arguments


Finding = tuple[str, str]
CheckClaim = Callable[[Desk], Finding]


def same(*values: arb) -> bool:
    """Whether all enclosures overlap the first."""
    return all(bool(values[0].overlaps(v)) for v in values[1:])


def apart(*values: arb) -> bool:
    """Whether no two enclosures overlap."""
    return not any(a.overlaps(b) for k, a in enumerate(values) for b in values[:k])


def show(*values: arb) -> str:
    """Values to six digits."""
    return ", ".join(v.str(6, radius=False) for v in values)


def _either(condition: bool, evidence: str) -> Finding:
    return (HOLDS if condition else FAILS), evidence


def _only(phrase: str, met: bool, unmet: bool, evidence: str) -> Finding:
    """A conditional claim: true where the condition is met, false where it is not."""
    if met and not unmet:
        return f"holds only for {phrase}", evidence
    return (HOLDS if met else FAILS), evidence


TWO, THREE, VIEWS = "embeddings_2x2", "embeddings_3x3", "embeddings_2x2x2"
LABELS_TWO, LABELS_THREE, LABELS_VIEWS = [0, 1, 0, 1], [0, 1, 2] * 3, [0, 0, 1, 1] * 2


def _formula_sums(desk: Desk) -> Finding:
    total = desk.loss("supcon", TWO, LABELS_TWO, reduction="sum")
    mean = desk.loss("supcon", TWO, LABELS_TWO)
    (printed,) = desk.printed("out-14-loss")
    return _either(abs(float(total) - printed) < abs(float(mean) - printed), f"sum {show(total)}, mean {show(mean)}")


def _same_2x2(desk: Desk) -> Finding:
    values = (
        desk.loss("supcon", TWO, LABELS_TWO),
        desk.loss("nt_xent_pairwise", TWO, LABELS_TWO),
        desk.loss("nt_xent", TWO, reference.stacked_partners(4)),
    )
    return _either(same(*values), show(*values))


def _agree_differ_3x3(desk: Desk) -> Finding:
    supcon = desk.loss("supcon", THREE, LABELS_THREE)
    pairwise = desk.loss("nt_xent_pairwise", THREE, LABELS_THREE)
    views = desk.loss("supcon", THREE, reference.repeat_labels([0, 1, 2], 3))
    agree = len(set(desk.printed("out-17-loss", "out-22-loss"))) == 1
    return _either(agree and same(supcon, views) and apart(views, pairwise), show(supcon, views, pairwise))


def _numerator_average(desk: Desk) -> Finding:
    outside, inside = desk.loss("supcon", THREE, LABELS_THREE), desk.loss("supcon_in", THREE, LABELS_THREE)
    (printed,) = desk.printed("out-26-loss")
    return _only(
        "the average of the logarithms",
        met=same(outside, ball(f"{printed:.8f}", 8)),
        unmet=same(inside, ball(f"{printed:.8f}", 8)),
        evidence=f"mean of logarithms {show(outside)}, logarithm of the mean {show(inside)}",
    )


def _denominator_all(desk: Desk) -> Finding:
    terms = reference.supcon_loss(desk.rows(THREE), LABELS_THREE, temperature=1).terms
    everyone = all(pair.members == tuple(a for a in range(9) if a != i) for (i, _), pair in terms.pairs.items())
    return _either(everyone and desk.reproduced("out-25-softmax", "out-26-loss"), "8 members in each denominator")


def _pml_per_point(desk: Desk) -> Finding:
    def pair(labels: Sequence[int]) -> tuple[arb, arb]:
        return (
            desk.loss("nt_xent_pairwise", THREE, labels),
            desk.loss("nt_xent_pairwise", THREE, labels, reduction="mean_pairs"),
        )

    balanced, unbalanced = pair(LABELS_THREE), pair([0, 1, 2, 0, 0, 2, 0, 1, 2])
    return _only(
        "balanced classes",
        met=same(*balanced),
        unmet=same(*unbalanced),
        evidence=f"balanced {show(*balanced)}; classes of 4, 2 and 3: by data point and by pair {show(*unbalanced)}",
    )


def _pml_denominator(desk: Desk) -> Finding:
    terms = reference.nt_xent_pairwise_loss(desk.rows(THREE), LABELS_THREE, temperature=1).terms
    right = all(pair.members == tuple(sorted([p, *terms.negatives[i]])) for (i, p), pair in terms.pairs.items())
    return _either(right and desk.reproduced("out-18-loss", "out-27-loss"), "7 members in each denominator")


def _one_positive(desk: Desk) -> Finding:
    terms = reference.supcon_loss(desk.rows(THREE), reference.repeat_labels([0, 1, 2], 3), temperature=1).terms
    counts = {len(p) for p in terms.positives}
    return _either(counts == {1}, f"positives per anchor with three views: {sorted(counts)}")


def _three_ways_2x2x2(desk: Desk) -> tuple[arb, arb, arb]:
    return (
        desk.loss("supcon", VIEWS, LABELS_VIEWS),
        desk.loss("nt_xent_pairwise", VIEWS, LABELS_VIEWS),
        desk.loss("nt_xent", VIEWS, reference.stacked_partners(8)),
    )


def _agree_differ_2x2x2(desk: Desk) -> Finding:
    supcon, pairwise, paper = _three_ways_2x2x2(desk)
    agree = len(set(desk.printed("out-30-loss", "out-35-loss"))) == 1
    return _either(agree and apart(pairwise, paper), show(supcon, pairwise, paper))


def _both_differ(desk: Desk) -> Finding:
    values = _three_ways_2x2x2(desk)
    return _either(apart(*values), show(*values))


def _views_alike(desk: Desk) -> Finding:
    terms = reference.supcon_loss(desk.rows(VIEWS), LABELS_VIEWS, temperature=1).terms
    alike = all(4 + i if i < 4 else i - 4 in terms.positives[i] for i in range(8))
    return _either(alike and {len(p) for p in terms.positives} == {3}, f"anchor 0 has positives {terms.positives[0]}")


def _ignores_labels(desk: Desk) -> Finding:
    paper = desk.loss("nt_xent", VIEWS, reference.stacked_partners(8))
    by_image = desk.loss("supcon", VIEWS, [0, 1, 2, 3] * 2)
    return _either(same(paper, by_image) and desk.reproduced("out-36-loss", "out-41-loss"), show(paper, by_image))


def _relabelling(desk: Desk) -> Finding:
    paper = desk.loss("nt_xent", VIEWS, reference.stacked_partners(8))
    relabelled = desk.loss("nt_xent_pairwise", VIEWS, [0, 1, 2, 3] * 2)
    return _either(same(paper, relabelled), show(paper, relabelled))


def _neighbours(desk: Desk) -> Finding:
    partners = reference.interleaved_partners(8).tolist()
    interleaved = all(p == i + (1 if i % 2 == 0 else -1) for i, p in enumerate(partners))
    return _either(interleaved and desk.reproduced("in-95-partners", "in-97-one-hot"), str(partners))


def _cross_entropy(desk: Desk) -> Finding:
    anchors = reference.nt_xent_loss(
        desk.rows("x"), reference.interleaved_partners(8), temperature=1, reduction="none"
    ).loss
    mean = sum(anchors, arb(0)) / 8
    short, full = desk.printed("in-98-loss", "in-99-loss-1.0")
    return _either(f"{float(mean):.4f}" == f"{short:.4f}" == f"{full:.4f}", show(mean))


def _masked_softmax(desk: Desk) -> Finding:
    masked = float(torch.tensor([float("-inf"), 0.5]).softmax(dim=0)[0])
    return _either(masked == 0, f"softmax of -inf is {masked}")


def _index_shape(desk: Desk) -> Finding:
    (figure,) = [f for f in desk.fixture.figures if f.id == "in-96-partners-column"]
    shape = tuple(1 + max(index[k] for index, _ in figure.entries()) for k in range(2))
    return _either(shape == (1, 8), f"{shape[0]} rows, {shape[1]} column")


def _labels_in_y(desk: Desk) -> Finding:
    (y,) = [f for f in desk.fixture.figures if f.id == "in-94-similarity"]
    labels = {str(p) for p in reference.interleaved_partners(8)}
    return _either({str(entry) for _, entry in y.entries()} <= labels, f"y is {y.quantity}")


def _batch_of_8(desk: Desk) -> Finding:
    def works(n: int) -> bool:
        x = torch.linspace(-1, 1, 2 * n, dtype=torch.float64).reshape(n, 2).sin()
        try:
            found = pair_nt_xent(x, 0.5)
        except (ValueError, IndexError, RuntimeError):
            return False
        rows = np.array([[arb(v) for v in row] for row in x.tolist()], dtype=object)
        true = desk.loss("nt_xent", rows, reference.interleaved_partners(n), temperature=0.5)
        return abs(float(found) - float(true)) < 1e-12

    return _only("a batch of 8", met=works(8), unmet=works(6) or works(10), evidence="6 and 10 rows raise an error")


def _bxent_terms(desk: Desk, negative: Callable[[arb], arb]) -> arb:
    """The code's averages at temperature 1 with another loss for negative pairs."""
    terms = reference.nt_bxent_loss(desk.rows("x"), desk.call("nt-bxent-1.0")["positive_pairs"], temperature=1).terms
    total = arb(0)
    for i in range(8):
        positive = sum((scalars.softplus(-terms.logits[i][p]) for p in terms.positives[i]), arb(0))
        row = sum((negative(terms.logits[i][n]) for n in terms.negatives[i]), arb(0))
        total = total + positive / (len(terms.positives[i]) + 1) + row / len(terms.negatives[i])
    return total / 8


def _formula_sigma(desk: Desk) -> Finding:
    code = desk.loss("nt_bxent", "x", desk.call("nt-bxent-1.0")["positive_pairs"])
    formula = _bxent_terms(desk, lambda s: scalars.softplus(s - 1))
    return _either(same(code, formula), f"code {show(code)}, formula with its sign mended {show(formula)}")


def _formula_sign(desk: Desk) -> Finding:
    formula = -_bxent_terms(desk, lambda s: scalars.softplus(s - 1))
    printed = desk.printed(*(f"in-103-loss-{t}" for t in ("0.01", "0.1", "1.0", "10.0", "20.0")))
    return _either(not (formula < 0 and min(printed) > 0), f"formula {show(formula)}, smallest printed {min(printed)}")


def _formula_counts(desk: Desk) -> Finding:
    pairs = desk.call("nt-bxent-1.0")["positive_pairs"]
    terms = reference.nt_bxent_loss(desk.rows("x"), pairs, temperature=1).terms
    total = {True: arb(0), False: arb(0)}
    for i in range(8):
        negative = sum((terms.pairs[i, n].value for n in terms.negatives[i]), arb(0)) / len(terms.negatives[i])
        positive = sum((terms.pairs[i, p].value for p in terms.positives[i]), arb(0))
        for diagonal in (True, False):
            count = len(terms.positives[i]) + (1 if diagonal else 0)
            total[diagonal] = total[diagonal] + negative + (positive / count if count else 0)
    code = desk.loss("nt_bxent", "x", pairs)
    with_diagonal, without = total[True] / 8, total[False] / 8
    return _only(
        "positive pairs counted with the diagonal",
        met=same(code, with_diagonal),
        unmet=same(code, without),
        evidence=f"with the diagonal {show(with_diagonal)}, without {show(without)}",
    )


def _sigmoid_first(desk: Desk) -> Finding:
    infinite = torch.tensor([float("inf")])
    with_logits = torch.nn.functional.binary_cross_entropy_with_logits(infinite, torch.ones(1))
    sigmoid_first = torch.nn.functional.binary_cross_entropy(infinite.sigmoid(), torch.ones(1))
    no_nan = bool(with_logits.isnan()) and float(sigmoid_first) == 0
    true = desk.loss("nt_bxent", "x", desk.call("nt-bxent-0.01")["positive_pairs"], temperature=0.01)
    (printed,) = desk.printed("in-103-loss-0.01")
    return _only(
        "the NaN",
        met=no_nan,
        unmet=same(true, ball(f"{printed:.8f}", 8)),
        evidence=f"with logits {float(with_logits)}, sigmoid first {float(sigmoid_first)}; {printed} for {show(true)}",
    )


def _diagonal_gradient(desk: Desk) -> Finding:
    x = torch.tensor([[float(v) for v in row] for row in desk.rows("x")], dtype=torch.float64, requires_grad=True)
    cosines = torch.nn.functional.cosine_similarity(x[None], x[:, None], dim=-1)
    diagonal = cosines.masked_fill(torch.eye(8, dtype=torch.bool), float("inf")).sigmoid().diagonal()
    loss = torch.nn.functional.binary_cross_entropy(diagonal, torch.ones_like(diagonal))
    (gradient,) = torch.autograd.grad(loss, x)
    return _either(
        float(loss.detach()) == 0 and not gradient.any(),
        f"loss {float(loss.detach())}, gradient {float(gradient.norm())}",
    )


# SiT's article; its code is the vectorized notebook's, on whose batch it is tried.


def _batch() -> np.ndarray[Any, Any]:
    rows = [[1, 8, 2], [5, 10, 4], [0, 9, 9], [9, 2, 2], [6, 1, 3], [4, 8, 9]]
    return np.array([[arb(v) for v in row] for row in rows], dtype=object)


def _directions(desk: Desk, batch: np.ndarray[Any, Any]) -> tuple[arb, arb, arb]:
    """Formula (2): the mean over the first views, over the second; and the code's mean over both."""
    partners = reference.stacked_partners(6)
    first = [True] * 3 + [False] * 3
    return (
        desk.loss("nt_xent", batch, partners, temperature=0.5, anchors=first),
        desk.loss("nt_xent", batch, partners, temperature=0.5, anchors=[not a for a in first]),
        desk.loss("nt_xent", batch, partners, temperature=0.5),
    )


def _infonce(desk: Desk) -> Finding:
    # InfoNCE as published contrasts each first view with the second views alone.
    terms = reference.nt_xent_loss(_batch(), reference.stacked_partners(6), temperature=0.5).terms
    term = terms.anchor_losses[0]
    same_candidates = -(terms.logits[0][3] - sum((terms.logits[0][a].exp() for a in range(1, 6)), arb(0)).log())
    cross = sum(
        (sum((terms.logits[i][a].exp() for a in range(3, 6)), arb(0)).log() - terms.logits[i][i + 3] for i in range(3)),
        arb(0),
    )
    one, _, both = _directions(desk, _batch())
    return _only(
        "a single term",
        met=same(term, same_candidates),
        unmet=same(cross / 3, one) or same(cross / 3, both),
        evidence=f"term of anchor 0 {show(term)}; whole losses: cross-view InfoNCE {show(cross / 3)}, SiT {show(both)}",
    )


def _self_similarity(desk: Desk) -> Finding:
    terms = reference.nt_xent_loss(_batch(), reference.stacked_partners(6), temperature=0.5).terms
    one = all(terms.similarity[i][i].contains(arb(1)) for i in range(6))
    left_out = all(i not in pair.members for (i, _), pair in terms.pairs.items())
    return _either(one and left_out, "every cosine with itself encloses 1; no denominator holds its own anchor")


def _mask_zeroes(desk: Desk) -> Finding:
    terms = reference.nt_xent_loss(_batch(), reference.stacked_partners(6), temperature=0.5).terms
    sums = [pair.log_denominator.exp() for pair in terms.pairs.values()]
    off = [sum((terms.logits[i][a].exp() for a in range(6) if a != i), arb(0)) for i in range(6)]
    zero_similarity = [value + 1 for value in off]
    return _only(
        "the matrix of exponentials",
        met=all(same(a, b) for a, b in zip(sums, off, strict=True)),
        unmet=all(same(a, b) for a, b in zip(sums, zero_similarity, strict=True)),
        evidence=f"denominator 0: {show(sums[0])}; with a similarity of 0 on the diagonal {show(zero_similarity[0])}",
    )


def _formula_1(desk: Desk) -> Finding:
    term = reference.nt_xent_loss(_batch(), reference.stacked_partners(6), temperature=0.5).terms.anchor_losses[0]
    ratio = (-term).exp()
    return _either(same(term, ratio), f"loss_partial {show(term)}, formula (1) {show(ratio)}")


def _formula_2(desk: Desk) -> Finding:
    one, other, both = _directions(desk, _batch())
    # Two views that are one and the same make the two directions one.
    alike = _directions(desk, np.concatenate([_batch()[:3], _batch()[:3]]))
    return _only(
        "batches whose two directions have equal means",
        met=same(*alike),
        unmet=same(both, one) or same(both, other),
        evidence=f"1/N over one direction {show(one)}, over the other {show(other)}; 1/2N over both {show(both)}",
    )


DOCUMENT_LABELS = [0, 1, 2, 1, 1]
"""D1 to D5 in the tutorial's table."""


def _tutorial_input() -> np.ndarray[Any, Any]:
    """Five rows of 192 numbers of about unit size, as the tutorial draws them."""
    return np.array([[np.sin(1.0 + 7.3 * i + 2.9 * d + 0.1 * i * d) * 1.4 for d in range(192)] for i in range(5)])


def _positives_of_d2(desk: Desk) -> Finding:
    terms = reference.supcon_epsilon_loss(_tutorial_input(), DOCUMENT_LABELS).terms
    right = terms.positives[1] == [3, 4] and terms.negatives[1] == [0, 2]
    return _either(right, f"D2 has positives {', '.join(f'D{p + 1}' for p in terms.positives[1])}")


def _tutorial_gradient(scale: float = 1.0) -> tuple[float, float]:
    x = torch.tensor(_tutorial_input() * scale, requires_grad=True)
    loss = batch_tutorial(x, torch.tensor([0, 3, 9, 3, 1]), 0.07)
    (gradient,) = torch.autograd.grad(loss, x)
    return float(loss.detach()), float(gradient.abs().max())


def _loss_value(desk: Desk) -> Finding:
    one, other = _tutorial_gradient(1.0), _tutorial_gradient(0.7)
    moved = f"{one[0]:.4f}" != f"{other[0]:.4f}"
    return _either(
        moved or one[1] > 1e-30, f"two inputs: losses {one[0]:.9f} and {other[0]:.9f}, gradient {one[1]:.0e}"
    )


def _is_cosine(desk: Desk) -> Finding:
    one = reference.supcon_epsilon_loss(_tutorial_input() / 40, DOCUMENT_LABELS)
    twice = reference.supcon_epsilon_loss(_tutorial_input() / 20, DOCUMENT_LABELS)
    ratio = twice.terms.similarity[0][1] / one.terms.similarity[0][1]
    return _either(abs(ratio - 1) < 1e-9, f"twice the vectors, {ratio:.1f} times the similarity")


def _symmetric(desk: Desk) -> Finding:
    (figure,) = [f for f in desk.fixture.figures if f.id == "similarity"]
    entries = dict(figure.entries())
    return _either(all(entries[i, j] == entries[j, i] for i, j in entries), "the printed matrix equals its transpose")


def _offset_diagonal(desk: Desk) -> Finding:
    partners = reference.stacked_partners(6).tolist()
    right = [p - i for i, p in enumerate(partners)] == [3] * 3 + [-3] * 3
    return _either(right and desk.reproduced("sim-ij", "sim-ji"), f"partners {partners}")


def _formula_index(desk: Desk) -> Finding:
    terms = reference.nt_xent_loss(_batch(), reference.stacked_partners(6), temperature=0.5).terms
    s = terms.logits[0][3]
    as_written = -(s.exp() / sum((s.exp() for _ in range(5)), arb(0))).log()
    return _either(
        same(as_written, terms.anchor_losses[0]),
        f"as written {show(as_written)}, printed term {show(terms.anchor_losses[0])}",
    )


def _all_others(desk: Desk) -> Finding:
    terms = reference.nt_xent_loss(_batch(), reference.stacked_partners(6), temperature=0.5).terms
    right = all(pair.members == tuple(a for a in range(6) if a != i) for (i, _), pair in terms.pairs.items())
    return _either(right and desk.reproduced("denominator", "denominators"), "5 members in each denominator")


def _mask_of_negatives(desk: Desk) -> Finding:
    (figure,) = [f for f in desk.fixture.figures if f.id == "negatives-mask"]
    entries = dict(figure.entries())
    holds_positive = any(float(str(entries[i, int(p)])) == 1 for i, p in enumerate(reference.stacked_partners(6)))
    return _either(not holds_positive, "its entry [0][3] is 1, and 3 is the positive of 0")


CHECKS: Mapping[str, CheckClaim] = {
    "supcon_notebook/formula-sums-over-anchors": _formula_sums,
    "supcon_notebook/same-2x2": _same_2x2,
    "supcon_notebook/nt-xent-is-supcon-2x2": _same_2x2,
    "supcon_notebook/agree-differ-3x3": _agree_differ_3x3,
    "supcon_notebook/numerator-is-the-average": _numerator_average,
    "supcon_notebook/denominator-is-all-pairs": _denominator_all,
    "supcon_notebook/pml-averages-per-data-point": _pml_per_point,
    "supcon_notebook/pml-denominator": _pml_denominator,
    "supcon_notebook/paper-assumes-one-positive": _one_positive,
    "supcon_notebook/agree-differ-2x2x2": _agree_differ_2x2x2,
    "supcon_notebook/both-differ-from-supcon-2x2x2": _both_differ,
    "supcon_notebook/views-and-class-alike": _views_alike,
    "supcon_notebook/paper-ignores-labels": _ignores_labels,
    "supcon_notebook/relabelling-agrees": _relabelling,
    "pair_notebook/neighbours-are-positives": _neighbours,
    "pair_notebook/cross-entropy-per-row": _cross_entropy,
    "pair_notebook/masked-softmax-is-zero": _masked_softmax,
    "pair_notebook/index-shape": _index_shape,
    "pair_notebook/labels-are-in-y": _labels_in_y,
    "pair_notebook/nt-xent-complete": _batch_of_8,
    "pair_notebook/formula-sigma": _formula_sigma,
    "pair_notebook/formula-sign": _formula_sign,
    "pair_notebook/formula-counts": _formula_counts,
    "pair_notebook/sigmoid-first-avoids-nan": _sigmoid_first,
    "pair_notebook/diagonal-without-gradient": _diagonal_gradient,
    "sit_article/same-as-infonce": _infonce,
    "sit_article/self-similarity-is-one": _self_similarity,
    "sit_article/mask-zeroes-similarity": _mask_zeroes,
    "sit_article/loss-partial-is-formula-1": _formula_1,
    "sit_article/code-is-formula-2": _formula_2,
    "batch_tutorial/positives-of-d2": _positives_of_d2,
    "batch_tutorial/loss-value": _loss_value,
    "batch_tutorial/it-is-a-cosine": _is_cosine,
    "vectorized_notebook/similarity-is-symmetric": _symmetric,
    "vectorized_notebook/positives-are-the-offset-diagonal": _offset_diagonal,
    "vectorized_notebook/formula-index": _formula_index,
    "vectorized_notebook/divided-by-all-others": _all_others,
    "vectorized_notebook/mask-of-negatives": _mask_of_negatives,
}


def judge_claims(fixture: WorkedFixture) -> list[ClaimJudgement]:
    """Judge every claim of a document; no fixture expects "unchecked" or "broken"."""
    judgements = []
    with precision():
        for claim in fixture.claims:
            check = CHECKS.get(f"{fixture.document.id}/{claim.id}")
            try:
                verdict, evidence = check(Desk(fixture)) if check else ("unchecked", "no check is written for it")
            except Exception as error:  # what breaks one claim must not hide the others
                verdict, evidence = "broken", f"{type(error).__name__}: {error}"
            judgements.append(ClaimJudgement(fixture.document.id, claim, verdict, evidence))
    return judgements
