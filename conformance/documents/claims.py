"""Check by computation what the published documents claim in words.

The reference runs in ball arithmetic: every value is an enclosure, an interval that contains the true value. Two values
are *the same* if their enclosures at 256 bits overlap, and *different* otherwise.

Each document has a class, and each claim has a method: ``same_2x2`` checks the claim ``same-2x2``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from flint import arb

from pairproof import reference
from pairproof.reference import scalars

from ..implementations.documents import batch_tutorial, pair_nt_xent
from ..suite.catalogue import find_loss
from ..truth.intervals import ball, exact, precision
from .figures import judge
from .load import Claim, WorkedFixture


@dataclass(frozen=True)
class ClaimJudgement:
    """A claim, its computed verdict, and the evidence."""

    document: str
    claim: Claim
    verdict: str
    evidence: str

    @property
    def case(self) -> str:
        """The id of the claim on the command line."""
        return f"{self.document}/{self.claim.id}"

    @property
    def passed(self) -> bool:
        """Whether the computed verdict equals the recorded one."""
        return self.verdict == self.claim.verdict


Finding = tuple[bool | str, str]
"""Whether the claim holds (or a verdict in words), and the evidence."""

Rows = np.ndarray[Any, Any]


@dataclass
class ClaimContext:
    """The base class of all checks."""

    document: ClassVar[str]
    fixture: WorkedFixture

    def rows(self, name: str) -> Rows:
        """A named input, [N, D], as balls."""
        return self.fixture.inputs[name].table(exact)

    def result(self, loss: str, rows: str | Rows, *target: Any, **options: Any) -> reference.Result:
        """Evaluate the reference on rows or on a named input. The default temperature is 1."""
        values = self.rows(rows) if isinstance(rows, str) else rows
        result: reference.Result = find_loss(loss).reference(values, *target, **{"temperature": 1, **options})
        return result

    def loss(self, *call: Any, **options: Any) -> Any:
        """The loss. Takes the arguments of ``result``."""
        return self.result(*call, **options).loss

    def terms(self, *call: Any, **options: Any) -> reference.Terms:
        """The terms of the loss. Takes the arguments of ``result``."""
        return self.result(*call, **options).terms

    def entries(self, figure: str) -> dict[tuple[int, ...], str | bool]:
        """The printed entries of a figure by index."""
        return dict(next(found for found in self.fixture.figures if found.id == figure).entries())

    def printed(self, *figures: str) -> list[float]:
        """The printed values of scalar figures."""
        return [float(str(self.entries(name)[()])) for name in figures]

    def reproduced(self, *figures: str) -> bool:
        """Whether all of these figures pass."""
        return all(j.passed for j in judge(self.fixture, figures))

    def of_call(self, name: str) -> reference.Result:
        """Evaluate the reference on a call of the document."""
        call = self.fixture.calls[name]
        (target,) = call.arguments.values()
        return self.result(call.loss, call.input, target, temperature=float(call.keywords["temperature"]))


def same(*values: arb) -> bool:
    """Whether every enclosure overlaps the first one."""
    return all(bool(values[0].overlaps(v)) for v in values[1:])


def different(*values: arb) -> bool:
    """Whether no two enclosures overlap."""
    return not any(a.overlaps(b) for k, a in enumerate(values) for b in values[:k])


def show(*values: arb) -> str:
    """Format values with six digits."""
    return ", ".join(v.str(6, radius=False) for v in values)


def contrasts_all(terms: reference.Terms) -> bool:
    """Whether every denominator is a sum over all rows except the anchor."""
    return all({*pair.members} == {*range(len(terms.logits))} - {i} for (i, _), pair in terms.pairs.items())


def _conditional(phrase: str, met: bool, unmet: bool, evidence: str) -> Finding:
    """Find "holds only for PHRASE" if the claim holds with the condition met, and fails without it."""
    return f"holds only for {phrase}" if met and not unmet else met, evidence


_balls = np.vectorize(arb, otypes=[object])

TWO, THREE, VIEWS = "embeddings_2x2", "embeddings_3x3", "embeddings_2x2x2"
LABELS_TWO, LABELS_THREE, LABELS_VIEWS = [0, 1, 0, 1], [0, 1, 2] * 3, [0, 0, 1, 1] * 2
ITEMS_VIEWS = [0, 1, 2, 3] * 2
LABELS_OF_ITEMS = reference.repeat_labels([0, 1, 2], 3)


class _SupConNotebook(ClaimContext):
    document = "supcon_notebook"

    def _three_ways(self, rows: str, labels: Sequence[int]) -> tuple[arb, arb, arb]:
        supcon, pairwise = (self.loss(name, rows, labels) for name in ("supcon", "nt_xent_pairwise"))
        return supcon, pairwise, self.loss("nt_xent", rows, reference.stacked_partners(len(labels)))

    def formula_sums_over_anchors(self) -> Finding:
        whole, mean = (self.loss("supcon", TWO, LABELS_TWO, reduction=how) for how in ("sum", "mean"))
        (printed,) = self.printed("out-14-loss")
        nearer = abs(float(whole) - printed) < abs(float(mean) - printed)
        return nearer, f"sum {show(whole)}, mean {show(mean)}"

    def same_2x2(self) -> Finding:
        values = self._three_ways(TWO, LABELS_TWO)
        return same(*values), show(*values)

    nt_xent_is_supcon_2x2 = same_2x2

    def agree_differ_3x3(self) -> Finding:
        supcon, pairwise = (self.loss(name, THREE, LABELS_THREE) for name in ("supcon", "nt_xent_pairwise"))
        views = self.loss("supcon", THREE, LABELS_OF_ITEMS)
        agree = len({*self.printed("out-17-loss", "out-22-loss")}) == 1
        return agree and same(supcon, views) and different(views, pairwise), show(supcon, views, pairwise)

    def numerator_is_the_average(self) -> Finding:
        outside, inside = (self.loss(name, THREE, LABELS_THREE) for name in ("supcon", "supcon_in"))
        printed = ball(f"{self.printed('out-26-loss')[0]:.8f}", 8)
        evidence = f"mean of logarithms {show(outside)}, logarithm of the mean {show(inside)}"
        return _conditional("the average of the logarithms", same(outside, printed), same(inside, printed), evidence)

    def denominator_is_all_pairs(self) -> Finding:
        right = contrasts_all(self.terms("supcon", THREE, LABELS_THREE))
        return right and self.reproduced("out-25-softmax", "out-26-loss"), "8 members in each denominator"

    def pml_averages_per_data_point(self) -> Finding:
        balanced, unbalanced = (
            [self.loss("nt_xent_pairwise", THREE, labels, reduction=how) for how in ("mean", "mean_pairs")]
            for labels in (LABELS_THREE, [0, 1, 2, 0, 0, 2, 0, 1, 2])
        )
        evidence = f"balanced {show(*balanced)}; classes of 4, 2 and 3: by data point and by pair {show(*unbalanced)}"
        return _conditional("balanced classes", same(*balanced), same(*unbalanced), evidence)

    def pml_denominator(self) -> Finding:
        terms = self.terms("nt_xent_pairwise", THREE, LABELS_THREE)
        right = all(pair.members == tuple(sorted([p, *terms.negatives[i]])) for (i, p), pair in terms.pairs.items())
        return right and self.reproduced("out-18-loss", "out-27-loss"), "7 members in each denominator"

    def paper_assumes_one_positive(self) -> Finding:
        counts = set(map(len, self.terms("supcon", THREE, LABELS_OF_ITEMS).positives))
        return counts == {1}, f"positives per anchor with three views: {sorted(counts)}"

    def agree_differ_2x2x2(self) -> Finding:
        values = self._three_ways(VIEWS, LABELS_VIEWS)
        agree = len({*self.printed("out-30-loss", "out-35-loss")}) == 1
        return agree and different(*values[1:]), show(*values)

    def both_differ_from_supcon_2x2x2(self) -> Finding:
        values = self._three_ways(VIEWS, LABELS_VIEWS)
        return different(*values), show(*values)

    def views_and_class_alike(self) -> Finding:
        positives = self.terms("supcon", VIEWS, LABELS_VIEWS).positives
        alike = all(len(p) == 3 and (i + 4) % 8 in p for i, p in enumerate(positives))
        return alike, f"anchor 0 has positives {positives[0]}"

    def paper_ignores_labels(self) -> Finding:
        values = self.loss("nt_xent", VIEWS, reference.stacked_partners(8)), self.loss("supcon", VIEWS, ITEMS_VIEWS)
        return same(*values) and self.reproduced("out-36-loss", "out-41-loss"), show(*values)

    def relabelling_agrees(self) -> Finding:
        _, relabelled, paper = self._three_ways(VIEWS, ITEMS_VIEWS)
        return same(paper, relabelled), show(paper, relabelled)


class _PairNotebook(ClaimContext):
    document = "pair_notebook"

    def _bxent(self, shift: int = 0, diagonal: int = 1) -> arb:
        """NT-BXent at temperature 1, by default as in the code.

        ``shift=1`` takes sigma(1 - s) for negatives, as the formula does. ``diagonal=0`` does not count the self pair
        as a positive.
        """
        terms, found = self.of_call("nt-bxent-1.0").terms, arb(0)
        for s, positives, negatives in zip(terms.logits, terms.positives, terms.negatives, strict=True):
            found += sum(scalars.softplus(-s[p]) for p in positives) / max(len(positives) + diagonal, 1)
            found += sum(scalars.softplus(s[n] - shift) for n in negatives) / len(negatives)
        return found / 8

    def neighbours_are_positives(self) -> Finding:
        partners = reference.interleaved_partners(8).tolist()
        right = partners == [1, 0, 3, 2, 5, 4, 7, 6] and self.reproduced("in-95-partners", "in-97-one-hot")
        return right, str(partners)

    def cross_entropy_per_row(self) -> Finding:
        mean = sum(self.loss("nt_xent", "x", reference.interleaved_partners(8), reduction="none")) / 8
        short, full = self.printed("in-98-loss", "in-99-loss-1.0")
        return f"{float(mean):.4f}" == f"{short:.4f}" == f"{full:.4f}", show(mean)

    def masked_softmax_is_zero(self) -> Finding:
        masked = float(torch.tensor([-np.inf, 0.5]).softmax(dim=0)[0])
        return masked == 0, f"softmax of -inf is {masked}"

    def index_shape(self) -> Finding:
        rows, columns = (1 + last for last in max(self.entries("in-96-partners-column")))
        return (rows, columns) == (1, 8), f"{rows} rows, {columns} column"

    def labels_are_in_y(self) -> Finding:
        entries = list(map(str, self.entries("in-94-similarity").values()))
        labels = set(map(str, reference.interleaved_partners(8)))
        return labels.issuperset(entries), f"y begins with {', '.join(entries[:3])}"

    def nt_xent_complete(self) -> Finding:
        def works(n: int) -> bool:
            x = torch.linspace(-1, 1, 2 * n, dtype=torch.float64).reshape(n, 2).sin()
            true = self.loss("nt_xent", _balls(x.tolist()), reference.interleaved_partners(n), temperature=0.5)
            with suppress(ValueError, IndexError, RuntimeError):
                return abs(float(pair_nt_xent(x, 0.5)) - float(true)) < 1e-12
            return False

        return _conditional("a batch of 8", works(8), works(6) or works(10), "6 and 10 rows raise an error")

    def formula_sigma(self) -> Finding:
        code, formula = self.of_call("nt-bxent-1.0").loss, self._bxent(shift=1)
        return same(code, formula), f"code {show(code)}, formula with its sign corrected {show(formula)}"

    def formula_sign(self) -> Finding:
        formula = -self._bxent(shift=1)
        least = min(self.printed(*(f"in-103-loss-{t}" for t in ("0.01", "0.1", "1.0", "10.0", "20.0"))))
        return not (formula < 0 < least), f"formula {show(formula)}, smallest printed {least}"

    def formula_counts(self) -> Finding:
        code, one, none = self.of_call("nt-bxent-1.0").loss, self._bxent(), self._bxent(diagonal=0)
        evidence = f"with the diagonal {show(one)}, without {show(none)}"
        return _conditional("positive pairs counted with the diagonal", same(code, one), same(code, none), evidence)

    def sigmoid_first_avoids_nan(self) -> Finding:
        infinite, one = torch.tensor([float("inf")]), torch.ones(1)
        with_logits = torch.nn.functional.binary_cross_entropy_with_logits(infinite, one)
        sigmoid_first = torch.nn.functional.binary_cross_entropy(infinite.sigmoid(), one)
        true = self.of_call("nt-bxent-0.01").loss
        (printed,) = self.printed("in-103-loss-0.01")
        evidence = f"with logits {float(with_logits)}, sigmoid first {float(sigmoid_first)}; {printed} for {show(true)}"
        avoided = bool(with_logits.isnan()) and float(sigmoid_first) == 0
        return _conditional("the NaN", avoided, same(true, ball(f"{printed:.8f}", 8)), evidence)

    def diagonal_without_gradient(self) -> Finding:
        x = torch.tensor(self.rows("x").astype(np.float64), requires_grad=True)
        cosines = torch.nn.functional.cosine_similarity(x[None], x[:, None], dim=-1)
        diagonal = cosines.masked_fill(torch.eye(8, dtype=torch.bool), float("inf")).sigmoid().diagonal()
        loss = torch.nn.functional.binary_cross_entropy(diagonal, torch.ones_like(diagonal))
        (gradient,) = torch.autograd.grad(loss, x)
        value, norm = float(loss.detach()), float(gradient.norm())
        return value == norm == 0, f"loss {value}, gradient {norm}"


class _VectorizedBatch(ClaimContext):
    """The batch of the vectorized notebook, which has the same code as the SiT article."""

    batch = _balls([[1, 8, 2], [5, 10, 4], [0, 9, 9], [9, 2, 2], [6, 1, 3], [4, 8, 9]])
    partners = reference.stacked_partners(6)

    def of_batch(self) -> reference.Terms:
        return self.terms("nt_xent", self.batch, self.partners, temperature=0.5)

    def directions(self, batch: Rows) -> list[arb]:
        """The article's formula (2), averaged over the first views, the second views, and both (as in the code)."""
        first = np.arange(6) < 3
        loss = partial(self.loss, "nt_xent", batch, self.partners, temperature=0.5)
        return [loss(anchors=anchors) for anchors in (first, ~first, None)]


class _SitArticle(_VectorizedBatch):
    document = "sit_article"

    def same_as_infonce(self) -> Finding:
        # InfoNCE as published contrasts each first view only with the second views.
        terms = self.of_batch()
        term, s = terms.anchor_losses[0], terms.logits
        same_candidates = sum(s[0][a].exp() for a in range(1, 6)).log() - s[0][3]
        cross = sum(sum(s[i][a].exp() for a in range(3, 6)).log() - s[i][i + 3] for i in range(3)) / 3
        one, _, both = self.directions(self.batch)
        unmet = same(cross, one) or same(cross, both)
        evidence = f"term of anchor 0 {show(term)}; whole losses: cross-view InfoNCE {show(cross)}, SiT {show(both)}"
        return _conditional("a single term", same(term, same_candidates), unmet, evidence)

    def self_similarity_is_one(self) -> Finding:
        terms = self.of_batch()
        one = all(terms.similarity[i][i].contains(arb(1)) for i in range(6))
        left_out = all(i not in pair.members for (i, _), pair in terms.pairs.items())
        return one and left_out, "every cosine with itself encloses 1; no denominator includes its own anchor"

    def mask_zeroes_similarity(self) -> Finding:
        terms = self.of_batch()
        sums = [pair.log_denominator.exp() for pair in terms.pairs.values()]
        off = [sum(terms.logits[i][a].exp() for a in range(6) if a != i) for i in range(6)]
        zero = [value + 1 for value in off]
        evidence = f"denominator 0: {show(sums[0])}; with a similarity of 0 on the diagonal {show(zero[0])}"
        return _conditional(
            "the matrix of exponentials", all(map(same, sums, off)), all(map(same, sums, zero)), evidence
        )

    def loss_partial_is_formula_1(self) -> Finding:
        term = self.of_batch().anchor_losses[0]
        ratio = (-term).exp()
        return same(term, ratio), f"loss_partial {show(term)}, formula (1) {show(ratio)}"

    def code_is_formula_2(self) -> Finding:
        one, other, both = self.directions(self.batch)
        # If both views of every item are equal, both directions have the same mean.
        alike = self.directions(np.tile(self.batch[:3], (2, 1)))
        unmet = same(both, one) or same(both, other)
        evidence = f"1/N over one direction {show(one)}, over the other {show(other)}; 1/2N over both {show(both)}"
        return _conditional("batches whose two directions have equal means", same(*alike), unmet, evidence)


class _BatchTutorial(ClaimContext):
    document = "batch_tutorial"
    labels = (0, 1, 2, 1, 1)
    """D1 to D5 in the tutorial's table."""
    drawn = np.array([[np.sin(1.0 + 7.3 * i + 2.9 * d + 0.1 * i * d) * 1.4 for d in range(192)] for i in range(5)])
    """Five rows of 192 numbers of order 1, as in the tutorial."""

    def positives_of_d2(self) -> Finding:
        terms = self.terms("supcon_epsilon", self.drawn, self.labels, temperature=0.07)
        right = terms.positives[1] == [3, 4] and terms.negatives[1] == [0, 2]
        return right, f"D2 has positives {', '.join(f'D{p + 1}' for p in terms.positives[1])}"

    def loss_value(self) -> Finding:
        x = torch.tensor(self.drawn, requires_grad=True)
        one, other = (batch_tutorial(rows, torch.tensor([0, 3, 9, 3, 1]), 0.07) for rows in (x, x * 0.7))
        largest = float(torch.autograd.grad(one, x)[0].abs().max())
        learns = f"{one:.4f}" != f"{other:.4f}" or largest > 1e-30
        return learns, f"two inputs: losses {one:.9f} and {other:.9f}, gradient {largest:.0e}"

    def it_is_a_cosine(self) -> Finding:
        terms = (self.terms("supcon_epsilon", self.drawn / by, self.labels, temperature=0.07) for by in (40, 20))
        one, twice = (found.similarity[0][1] for found in terms)
        return abs(twice / one - 1) < 1e-9, f"twice the vectors, {twice / one:.1f} times the similarity"


class _VectorizedNotebook(_VectorizedBatch):
    document = "vectorized_notebook"

    def similarity_is_symmetric(self) -> Finding:
        entries = self.entries("similarity")
        return all(entries[i, j] == entries[j, i] for i, j in entries), "the printed matrix equals its transpose"

    def positives_are_the_offset_diagonal(self) -> Finding:
        partners = self.partners.tolist()
        return partners == [3, 4, 5, 0, 1, 2] and self.reproduced("sim-ij", "sim-ji"), f"partners {partners}"

    def formula_index(self) -> Finding:
        terms = self.of_batch()
        s, term = terms.logits[0][3], terms.anchor_losses[0]
        as_written = -(s.exp() / sum([s.exp()] * 5)).log()
        return same(as_written, term), f"as written {show(as_written)}, printed term {show(term)}"

    def divided_by_all_others(self) -> Finding:
        right = contrasts_all(self.of_batch()) and self.reproduced("denominator", "denominators")
        return right, "5 members in each denominator"

    def mask_of_negatives(self) -> Finding:
        entries = self.entries("negatives-mask")
        right = all(float(str(entries[pair])) != 1 for pair in enumerate(self.partners))
        return right, "its entry [0][3] is 1, and 3 is the positive of 0"


CHECKS: Mapping[str, type[ClaimContext]] = {
    f"{kind.document}/{name.replace('_', '-')}": kind
    for kind in (_SupConNotebook, _PairNotebook, _SitArticle, _BatchTutorial, _VectorizedNotebook)
    for name, method in vars(kind).items()
    if callable(method) and not name.startswith("_")
}
"""The class that checks each claim."""


def judge_claims(fixture: WorkedFixture) -> list[ClaimJudgement]:
    """Judge every claim of a document.

    A claim without a check gets the verdict "unchecked". A check that raises an exception gives "broken". Neither
    passes.
    """
    with precision():
        return [ClaimJudgement(fixture.document.id, claim, *_judge(fixture, claim)) for claim in fixture.claims]


def _judge(fixture: WorkedFixture, claim: Claim) -> tuple[str, str]:
    kind = CHECKS.get(f"{fixture.document.id}/{claim.id}")
    if kind is None:
        return "unchecked", "no check is written for it"
    try:
        found, evidence = getattr(kind(fixture), claim.id.replace("-", "_"))()
    except Exception as error:  # an error in one check must not hide the other claims
        return "broken", f"{type(error).__name__}: {error}"
    return found if isinstance(found, str) else "holds" if found else "does not hold", evidence
