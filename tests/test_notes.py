"""The notes of the golden cases: every number and every term of a note is computed from its case."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import pytest

from pairproof.conformance.suite.catalogue import WEIGHTS
from pairproof.conformance.suite.flags import Facts
from pairproof.conformance.suite.golden import GoldenCase, load_golden
from pairproof.conformance.suite.records import FLOOR

WORDS = "no one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
NUMBERS = {word: k for k, word in enumerate(WORDS.split())} | {"thirty": 30, "single": 1, "only": 1}
COUNT = rf"(\d+|{'|'.join(NUMBERS)})"
REAL = r"(-?\d+(?:\.\d+)?(?:e-?\d+)?(?:/\d+)?)"
POWER = r"2\^(-?\d+)"


def number(text: str) -> int:
    return NUMBERS[text.lower()] if text.lower() in NUMBERS else int(text)


def real(text: str) -> float:
    top, _, bottom = text.partition("/")
    return float(top) / float(bottom or 1)


class Noted(Facts):
    """The facts of a golden case that notes state."""

    def __init__(self, golden: GoldenCase) -> None:
        super().__init__(golden.case)
        self.golden, self.note, self.name = golden, golden.note, golden.id.split("/")[-1]
        self.n, self.t = golden.case.n, golden.case.temperature
        self.anchors = golden.case.anchors()
        values = golden.expected.loss
        self.loss = values if isinstance(values, float) else math.fsum(values)
        self.results = dict(golden.expected.anchors)

    def option(self, name: str) -> Any:
        return self.case.option(name)

    @cached_property
    def others(self) -> list[Noted]:
        return [one for one in FILES[self.case.loss] if one is not self]

    def named(self, name: str) -> Noted:
        return next(one for one in FILES[self.case.loss] if one.name == name)

    @cached_property
    def mask(self) -> Any:
        return np.array([[j in p for j in range(self.case.shape[1])] for p in self.case.positives()])

    @cached_property
    def given_weights(self) -> list[float]:
        """All weights of pairs and of anchors."""
        return [x for name in WEIGHTS if name in self.given for x in np.ravel(self.given[name]).tolist()]

    def has_weight(self, weight: float) -> bool:
        return weight in self.given_weights

    @cached_property
    def within(self) -> bool:
        return len(self.case.matrices) == 1

    @cached_property
    def paired(self) -> list[int]:
        return [i for i in self.anchors if self.positives[i]]

    @cached_property
    def without_positives(self) -> list[int]:
        return [i for i in self.anchors if not self.positives[i]]

    @cached_property
    def classes(self) -> list[list[int]]:
        """The rows of each class, if positives are an equivalence; without references."""
        if "labels" in self.given:
            labels = self.given["labels"]
            return [[i for i, x in enumerate(labels) if x == label] for label in dict.fromkeys(labels)]
        same = self.mask | np.eye(self.n, dtype=bool) if self.within else self.mask
        groups = {tuple(np.flatnonzero(row)) for row in same}
        assert sum(map(len, groups)) == self.n, f"{self.case.id}: positives are not classes"
        return [list(group) for group in groups]

    @cached_property
    def sizes(self) -> list[int]:
        return sorted(map(len, self.classes), reverse=True)

    @cached_property
    def units(self) -> dict[str, Any]:
        scaled = {
            name: np.array([np.ldexp(r, -np.frexp(np.abs(r).max())[1]) if r.any() else r for r in m])
            for name, m in self.case.matrices.items()
        }
        return {name: m / np.linalg.norm(m, axis=1, keepdims=True) for name, m in scaled.items()}

    @cached_property
    def cosines(self) -> Any:
        found = np.empty(self.case.shape)
        for block in self.case.blocks():
            found[block.part] = self.units[block.left] @ self.units[block.right].T
        return found

    @cached_property
    def products(self) -> Any:
        found = np.empty(self.case.shape)
        for block in self.case.blocks():
            found[block.part] = self.case.matrices[block.left] @ self.case.matrices[block.right].T
        return found

    @cached_property
    def member(self) -> Any:
        return np.array([[j in set(m) for j in range(self.case.shape[1])] for m in self.case.members()])

    @cached_property
    def logits(self) -> Any:
        return (self.cosines if self.option("similarity") == "cosine" else self.products) / self.t

    @cached_property
    def over_floor(self) -> list[float]:
        """The mass of the negatives of each anchor, divided by its floor, before it is raised to the floor."""
        tau_plus, found = self.option("tau_plus"), []
        for i in self.anchors:
            s, own = (self.logits[i][self.member[i] & (self.mask[i] == kind)] for kind in (False, True))
            mean = np.average(np.exp(s), weights=np.exp(self.option("beta") * s))
            found.append((mean - tau_plus * np.exp(own[0])) / (1 - tau_plus) / math.exp(-1 / self.t))
        return found

    @cached_property
    def weights(self) -> Any:
        """The weight of the positive of each row."""
        closeness = self.cosines[self.member & self.mask] / self.option("sigma")
        e = np.exp(closeness - closeness.max())
        return 2 - e / e.mean()

    def cosines_of(self, positive: bool) -> Any:
        """The cosines of the positives or of the negatives of the anchors."""
        chosen = self.member & (self.mask == positive)
        return self.cosines[self.anchors][chosen[self.anchors]]

    def same_rows(self) -> list[Noted]:
        return [one for one in self.others if np.array_equal(one.case.embeddings, self.case.embeddings)]


FILES: dict[str, list[Noted]] = {}
for _golden in load_golden():
    FILES.setdefault(_golden.case.loss, []).append(Noted(_golden))
EVERY = [one for group in FILES.values() for one in group]

Rule = tuple[str, Callable[..., Any]]


def near(found: float, wanted: float, tolerance: float = 1e-9) -> bool:
    return math.isclose(found, wanted, rel_tol=tolerance, abs_tol=1e-300)


def same_classes(c: Noted, labels: list[int]) -> bool:
    """Whether the labels of a case, or else its positives, are those of a list."""
    equal = np.equal.outer(labels, labels) & ~np.eye(c.n, dtype=bool)
    return bool(c.given["labels"] == labels if "labels" in c.given else (c.mask == equal).all())


def every_result(c: Noted, wanted: float, tolerance: float = 1e-9) -> bool:
    """Whether every anchor with a positive has a value."""
    scale = c.t / c.option("base_temperature") if c.option("base_temperature") else 1.0
    return all(near(c.results[i], wanted * scale, tolerance) for i in c.paired or c.anchors)


def all_equal(c: Noted) -> bool:
    return len(np.unique(c.rows, axis=0)) == 1


def softplus(x: float) -> float:
    return float(np.logaddexp(0, x))


def without(c: Noted, kind: list[int]) -> list[int]:
    """The anchors without positives or negatives."""
    return [i for i in c.anchors if not kind[i]]


def of_norms(c: Noted, low: float, high: float) -> bool:
    """Whether the smallest norm is ``low`` and the largest ``high``, each within a factor of two."""
    norms = [x for x in c.norms if x]
    return low / 2 <= min(norms) <= 2 * low and high / 2 <= max(norms) <= 2 * high


def times(c: Noted, name: str, low: int | None, high: int | None) -> bool:
    """Whether the rows are those of another case times powers of two."""
    quotients = c.rows[c.rows != 0] / c.named(name).rows[c.rows != 0]
    exponents = np.log2(quotients)
    return bool((exponents % 1 == 0).all()) and low in (None, exponents.min()) and high in (None, exponents.max())


REDUCTIONS = {
    "none": r"one value per (?:anchor|row)|one value each|[Ee]very (?:anchor|row)'s value|reduction none",
    "mean_pairs": r"mean over (?:pairs|no pairs|their pairs|all pairs of rows and references)",
    "sum_pairs": r"the sum over (?:pairs|their pairs)",
    "none_pairs": r"[Oo]ne value per pair",
    "sum": r"[Tt]he sum(?= over anchors| over the anchors|[,.;:]| with|$)|summed|and a sum|scales the sum"
    r"|reduction sum",
    "mean": r"the mean(?=[.;]| over a)|reduction mean",
}


def listed(text: str) -> list[int]:
    return [number(word) for word in re.split(r", | and ", text)]


def layout(c: Noted, views: int, kind: str) -> bool:
    """Whether the positives are those of an item's other views, in a layout."""
    items = c.n // views
    item = [i % items if kind == "stacked" else i // views for i in range(c.n)]
    return c.n % views == 0 and bool(
        (c.mask == np.array([[a == b and i != j for j, b in enumerate(item)] for i, a in enumerate(item)])).all()
    )


def first_views(c: Noted, views: int) -> bool:
    return c.anchors in (list(range(c.n // views)), list(range(0, c.n, views)))


def sure(c: Noted) -> float:
    """The largest entry of a softmax over the columns that an anchor is contrasted with."""
    z = np.where(c.member, c.logits, -np.inf)[c.anchors]
    with np.errstate(all="ignore"):
        z = np.exp(z - z.max(axis=1, keepdims=True))
        return float((z / z.sum(axis=1, keepdims=True)).max())


def on_row_0(c: Noted) -> tuple[list[float], list[float]]:
    """The logits of the positives and of the negatives of row 0, in descending order."""
    return tuple(sorted(c.logits[0][c.member[0] & (c.mask[0] == kind)], reverse=True) for kind in (True, False))  # type: ignore[return-value]


def finite_exponentials(c: Noted, dtype: str) -> bool:
    largest = math.log(float(np.finfo(dtype).max))
    return 1 / c.t < largest < 2 / c.t


RULES: list[Rule] = [
    # Batches of other cases with other options. They are first, because their names contain other terms.
    (
        r"The batch of ([a-z0-9-]+) with the ratios summed inside the logarithm",
        lambda c, name: c.option("inside_reduction") == "sum" and sums_the_ratios(c, c.named(name)),
    ),
    (r"the ratios add up to exactly 1, so the loss is exactly 0", lambda c: c.loss == 0 and not any(c.negatives)),
    # Weights.
    (
        rf"All (negatives|positives) of {COUNT} rows have weight 0",
        lambda c, kind, k: (
            (c.negatives if kind == "negatives" else c.positives).count(0) == number(k) and c.has_weight(0.0)
        ),
    ),
    (
        r"All anchors have weight 0: the mean and its gradient are 0",
        lambda c: not any(c.case.anchor_weights()) and c.loss == 0 and not np.any(c.golden.expected.gradient),
    ),
    (r"(?:have|has|of) weight 0|of which some are 0", lambda c: c.has_weight(0.0)),
    (r"of which one is 0|one of them 0", lambda c: c.given_weights.count(0.0) == 1),
    (
        r"Weights from 1e-6 to 1e6",
        lambda c: min(c.given_weights) == 1e-6 and max(c.given_weights) == 1e6,
    ),
    # Queries, documents and hard negatives.
    (rf"{COUNT} hard negatives? per query", lambda c, k: len(c.given["hard_negatives"]) == number(k) * c.n),
    (
        rf"{COUNT} documents? and {COUNT} hard negatives?|"
        rf"{COUNT} document and {COUNT} hard negatives in each denominator",
        lambda c, *found: (
            [number(k) for k in found if k] == [int(c.member[0, : c.n].sum()), int(c.member[0, c.n :].sum())]
            and (c.member.sum(1) == c.member[0].sum()).all()
            and c.case.shape == (c.n, c.n + len(c.given["hard_negatives"]))
        ),
    ),
    (
        r"shared among the four queries",
        lambda c: c.n == 4 and c.member[:, c.n :].all() and "hard_negatives" in c.given,
    ),
    (r"One value per query|one value per query", lambda c: c.option("reduction") == "none" and len(c.results) == c.n),
    (rf"({'|'.join(NUMBERS)}) of the four directions", lambda c, k: c.option("directions").count("+") == number(k) - 1),
    (r"[Aa]ll four directions", lambda c: c.option("directions").count("+") == 3),
    (
        r"the positive stands twice, and the loss (?:is ln (2)|stays above 0\.69)",
        lambda c, two: near(c.loss, math.log(2)) if two else 0.69 < c.loss < 0.7,
    ),
    (
        r"the loss is ln (\d+), the logarithm of the number of terms",
        lambda c, k: near(c.loss, math.log(int(k))) and set(c.member.sum(1)) == {int(k)},
    ),
    (
        r"hard negatives far away: a loss near 0",
        lambda c: 0 < c.loss < 1e-6 and c.cosines_of(True).min() > 0.9 and c.products[:, c.n :].max() <= 0,
    ),
    # Whole sentences.
    (
        rf"Dot products are {POWER}, and logits {POWER}, beyond the range of (float\d\d)",
        lambda c, j, k, dtype: (
            near(np.abs(c.products).max(), 2.0 ** int(j))
            and near(np.abs(c.logits).max(), 2.0 ** int(k))
            and 2.0 ** int(k) > float(np.finfo(dtype).max)
        ),
    ),
    (
        r"The loss of the first (two) anchors is ln (\d+)",
        lambda c, n, x: all(near(c.results[i], math.log(int(x))) for i in c.anchors[: number(n)]),
    ),
    (
        rf"Single products of an anchor's entries with the queue's are {POWER}, beyond the range of (float\d\d)",
        lambda c, k, dtype: (
            (np.abs(c.case.embeddings[:, None] * c.case.others["negatives"]).max(2) == 2.0 ** int(k)).all()
            and 2.0 ** int(k) > float(np.finfo(dtype).max)
        ),
    ),
    (
        r"They cancel, so that every logit of the queue is (\d+)",
        lambda c, x: (c.logits[c.member & ~c.mask] == int(x)).all(),
    ),
    (r"Without positives it (?:is counted as|has the value) 0", lambda c: c.results[0] == 0 == c.positives[0]),
    (
        r"the second row, which has no negative, is NaN",
        lambda c: math.isnan(c.results[1]) and c.negatives[1] == 0 < c.positives[1],
    ),
    (r"A mask with one pair in one direction", lambda c: c.mask.sum() == 1),
    (
        r"Two classes of four, each on one point, at opposite ends",
        lambda c: c.sizes == [4, 4] and np.allclose(c.cosines_of(True), 1) and np.allclose(c.cosines_of(False), -1),
    ),
    (rf"anchor 0 has a value of {REAL}", lambda c, x: abs(c.results[0] - real(x)) < 0.05),
    (
        r"the diagonal is the largest entry of five of the six rows",
        lambda c: [c.products[i].argmax() == i for i in range(c.n)].count(True) == 5 == c.n - 1,
    ),
    (
        r"the mean over pairs is the mean over anchors",
        lambda c: (
            c.option("reduction") == "mean_pairs" and near(c.loss, float(np.mean(list(c.results.values()))), 1e-12)
        ),
    ),
    (r"each of its pairs has a loss of exactly 0", lambda c: c.results[0] == 0),
    (
        r"every exponential is far below the epsilon",
        lambda c: np.exp((c.logits - c.logits.max(1, keepdims=True))[c.member].max()) < 1e-11,
    ),
    (
        r"[Tt]wo of three positives of row 0 are near and one is far: at temperature 0.01, the logits of "
        r"the near ones exceed that of the far one by 99",
        lambda c: (lambda p: len(p) == 3 and p[1] - p[2] > 99)(on_row_0(c)[0]),
    ),
    (
        r"The logits of two positives of row 0 exceed (?:all others|those of the negatives) by hundreds",
        lambda c: (lambda p, q: p[1] - max([*q, *p[2:]]) > 200)(*on_row_0(c)),
    ),
    (r"sums only one of them", lambda c: c.option("denominator") == "one_positive"),
    (r"the first gives no NaN, the second gives 0", lambda c: 0 not in c.results and c.results[1] == 0),
    (
        r"Two positives far away at different distances, negatives near",
        lambda c: (lambda p, q: len(p) == 2 and p[0] != p[1] and p[0] * c.t < -0.5 and q[0] * c.t > 0.9)(*on_row_0(c)),
    ),
    (
        r"one wrong label: large values among small ones",
        lambda c: max(c.results.values()) > 3 > 0.01 > min(c.results.values()),
    ),
    (r"one of them dominates every cosine", lambda c: np.abs(c.cosines).min() > 0.99),
    (
        r"everything fits float64, with little margin",
        lambda c: np.isfinite(c.logits).all() and np.abs(c.logits).max() > 1e304,
    ),
    (
        r"Row 0 is opposite to row (\d), and its largest logit is below -(\d+)\. The rows are not exactly "
        r"representable in float32",
        lambda c, j, x: (
            (c.case.embeddings[0] == -c.case.embeddings[int(j)]).all()
            and c.logits[0][c.member[0]].max() < -float(x)
            and "float32" not in c.golden.dtypes
        ),
    ),
    (
        r"so low that a quotient of exponentials of an anchor exceeds the range of float32",
        lambda c: (
            max(np.ptp(row[member]) for row, member in zip(c.logits, c.member, strict=True))
            > math.log(np.finfo("float32").max)
        ),
    ),
    (
        r"Row 0 is opposite to its positives\. Relative to the exponential of its similarity to itself, "
        r"the sum over them is subnormal in float32",
        lambda c: (
            c.cosines[0][c.mask[0]].max() < -0.9
            and 2.0**-149 < np.exp(c.logits[0][c.mask[0]] - 1 / c.t).sum() < float(np.finfo("float32").tiny)
        ),
    ),
    (
        r"Row 2 is opposite to its positives: the mean of their ratios, near e\^-72, underflows float32 "
        r"when it is squared",
        lambda c: (
            c.cosines[2][c.mask[2]].max() < -0.9
            and abs(c.results[2] - 72) < 2
            and math.exp(-2 * c.results[2]) < 2.0**-149
        ),
    ),
    (r"in (float\d\d) each exponential is finite, but the quotient of two is not", finite_exponentials),
    (
        r"the difference of two logits fits float64, 66 times the difference does not",
        lambda c: np.isfinite(np.ptp(c.logits[c.member])) and np.ptp(c.logits[c.member]) > np.finfo("float64").max / 66,
    ),
    (
        r"a term times 62 exceeds the range of float64",
        lambda c: np.abs(c.logits[c.member]).max() > np.finfo("float64").max / 62,
    ),
    (
        r"-log\(1 - sigmoid\(s\)\) is s itself, not 100 and not infinite",
        lambda c: (lambda s: near(softplus(s), s, 1e-15) and abs(s - 100) > 1)(
            float(c.logits[c.member & ~c.mask].max())
        ),
    ),
    (r"the sigmoid is not yet saturated", lambda c: c.logits[c.member].max() < 16),
    (r"e\^-40 compared with 1e-8", lambda c: 1 / c.t == 20 and c.case.entry.epsilon == 1e-8),
    (
        r"the largest entry is the self-similarity, 1 over the temperature",
        lambda c: np.allclose(c.logits.max(axis=1), 1 / c.t) and np.allclose(np.diagonal(c.logits), 1 / c.t),
    ),
    (
        r"exponentials on either side of the epsilon",
        lambda c: (lambda e: e.min() < 1e-8 < e.max())(np.exp((c.logits - c.logits.max(1, keepdims=True))[c.member])),
    ),
    (r"whose squares leave the range", lambda c: max(c.norms) > 2.0**512),
    (
        r"The pairs of two classes in mixed order",
        lambda c: len(c.classes) == 2 and c.given["positive_pairs"] != sorted(c.given["positive_pairs"]),
    ),
    (r"An even number of rows of one class", lambda c: c.n % 2 == 0 and len(c.classes) == 1),
    (r"The largest product of row 0 is with its positive", lambda c: c.mask[0, c.products[0].argmax()]),
    (
        r"one positive and six negatives",
        lambda c: set(c.positives) == {1} and set(c.negatives) == {len(c.given["negatives"])} == {6},
    ),
    (
        r"whose gradient is the sum of the two|a gradient of exactly the sum",
        lambda c: np.allclose(
            sum(c.golden.expected.other_gradients.values(), c.golden.expected.gradient),
            c.named(re.search("loss of ([-a-z]+)", c.note)[1]).golden.expected.gradient,
        ),
    ),  # type: ignore[index]
    (r"more than one tile of them", lambda c: max(c.case.shape) > 64),
    (r"a positive at cosine 1", lambda c: np.isclose(c.cosines_of(True).max(), 1)),
    (r"a gradient as small as the loss", lambda c: np.abs(c.golden.expected.gradient).max() <= c.loss),
    (
        r"(?:logits of up to|Under dot, logits of up to) (\d+) from rows whose entries are at most (\d+)",
        lambda c, x, y: (
            c.logits[c.member].max() == float(x) > math.log(np.finfo("float32").max)
            and np.abs(c.rows).max() == float(y)
        ),
    ),
    (
        r"the mean over its (\w+) pairs",
        lambda c, k: c.mask.sum() == number(k) and c.option("reduction") == "mean_pairs",
    ),
    (r"two of them are partners", lambda c: len({c.given["partners"][i] for i in c.anchors} & set(c.anchors)) == 2),
    (r"with rows 0, 3 and 6 as anchors", lambda c: c.anchors == [0, 3, 6]),
    (r"The same mask", lambda c: any(one.given.get("positives") == c.given["positives"] for one in c.others)),
    (
        r"and the copies are (not )?positives of each other",
        lambda c, no: all(
            c.mask[i, j] != bool(no)
            for i in range(c.n)
            for j in range(c.n)
            if i != j and np.array_equal(c.rows[i], c.rows[j])
        ),
    ),
    (
        r"three, one or no positives each; most pairs are in one direction",
        lambda c: {0, 1, 3} == set(c.positives) and (c.mask & c.mask.T).sum() < c.mask.sum() / 2,
    ),
    (r"One pair, one negative", lambda c: c.n == 1 == len(c.given["negatives"])),
    (r"One positive each|Two positives each", lambda c: set(c.positives) == {1 if "One" in c.note else 2}),
    (r"is over exactly one", lambda c: c.mask.sum() == 1),
    (
        r"each pair only has its own positive in the denominator|a loss far below the rounding error of 1",
        lambda c: True if "each pair" in c.note else max(c.results.values()) < 2.0**-24,
    ),
    (r"the loss is near 0", lambda c: 0 <= c.loss < 0.01),
    (r"ln (\d) / \(1 \+ 1e-8\)(?! =)", lambda c, x: every_result(c, math.log(int(x)) / (1 + 1e-8), 1e-12)),
    (r"nearly 1\.5 ln 2", lambda c: every_result(c, 1.5 * math.log(2), 1e-6)),
    (r"1\.5 ln 2", lambda c: every_result(c, 1.5 * math.log(2), 1e-14)),
    (r"1\.5 softplus\(-20\)", lambda c: every_result(c, 1.5 * softplus(-20), 1e-12)),
    (rf"a loss above {REAL}", lambda c, x: c.loss > real(x)),
    (r"logits of hundreds of thousands", lambda c: 1e5 <= np.abs(c.logits[c.member]).max() < 1e6),
    (rf"{COUNT} rows of width (\d+)", lambda c, n, d: (c.n, c.rows.shape[1]) == (number(n), int(d))),
    (r"of width (\d+)", lambda c, d: c.rows.shape[1] == int(d)),
    (r"^Two rows(?=, )", lambda c: c.n == 2),
    (r"two-towers of the|Eight rows", lambda c: c.n == 8),
    (rf"^{COUNT} rows(?=, each with)", lambda c, n: c.n == number(n)),
    (
        rf"Dot products near {POWER}",
        lambda c, k: (
            c.option("similarity") == "dot"
            and 2.0 ** (int(k) - 2) < np.abs(c.products[c.member]).max() / min(c.t, 1) < 2.0 ** (int(k) + 2)
        ),
    ),
    (
        r"named 2\^53, 2\^53\+1 and 2\^53\+2, of which float64 represents two",
        lambda c: set(c.given["labels"]) == {2**53, 2**53 + 1, 2**53 + 2},
    ),
    (
        r"named by the smallest and largest int64 and -2\^53-1",
        lambda c: set(c.given["labels"]) == {-(2**63), 2**63 - 1, -(2**53) - 1},
    ),
    (
        r"named 1, 2\^32\+1 and 2\^33\+1, which are equal in int32",
        lambda c: set(c.given["labels"]) == {1, 2**32 + 1, 2**33 + 1},
    ),
    (
        r"named 257, 2\^24 and 2\^24\+1, of which two are equal in an 8-bit integer and two in float32",
        lambda c: set(c.given["labels"]) == {257, 2**24, 2**24 + 1},
    ),
    (
        rf"{COUNT} (?:pairs|pair) against {COUNT} negatives?",
        lambda c, n, k: (c.n, len(c.given["negatives"])) == (number(n), number(k)),
    ),
    (
        r"cosines of ([-0-9/]+(?:, [-0-9/]+)* and [-0-9/]*\d)",
        lambda c, x: set(np.round(c.cosines[c.member], 12)) == {real(y) for y in re.split(", | and ", x)},
    ),
    (
        r"Classes of three at cosines above ([0-9.]+\d)",
        lambda c, x: set(c.sizes) == {3} and c.cosines_of(True).min() > real(x),
    ),
    (r"softplus\(-1\) / 2 \+ softplus\(1\)", lambda c: every_result(c, softplus(-1) / 2 + softplus(1), 1e-3)),
    (r"all logits are nearly 0", lambda c: np.abs(c.logits).max() < 1e-4),
    (r"the gradient small but not 0", lambda c: 0 < np.abs(c.golden.expected.gradient).max() < 1e-3),
    (r"unless the row is divided by a power of two", lambda c: True),
    (
        rf"{COUNT} of {COUNT} rows have no positive(?! and)",
        lambda c, k, n: (len(c.without_positives), c.n) == (number(k), number(n)),
    ),
    (r"one other row(?=, whose ratio)", lambda c: c.members == [1, 1]),
    (r"at cosine 1, and is not masked", lambda c: np.allclose(c.cosines_of(True), 1)),
    (
        r"gradient under cosine is exactly 0",
        lambda c: not np.abs(c.golden.expected.gradient).any() and c.option("similarity") == "cosine",
    ),
    (rf"^{COUNT} pairs(?= ·| of width)", lambda c, n: c.case.entry.two_towers and c.n == number(n)),
    (r"2 e\^-1000 is below the smallest float64, so the loss is 0", lambda c: c.loss == 0 and 2 * math.exp(-1000) == 0),
    (
        r"Row 0's products with rows 1 and 2 are equal, and are its largest",
        lambda c: c.products[0, 1] == c.products[0, 2] == c.products[0].max(),
    ),
    # Options.
    *((text, lambda c, name=name: c.option("reduction") == name) for name, text in REDUCTIONS.items()),
    (r"at (?:the |its )?default(?: temperature)?(?: similarity)?", lambda c: True),
    (
        rf"[Tt]emperature (?:of )?{REAL}(?: over base temperature {REAL}: the loss times {REAL})?",
        lambda c, t, b, f: (
            near(c.t, real(t))
            and (b is None or (c.option("base_temperature") == real(b) and abs(c.t / real(b) - real(f)) < 0.005))
        ),
    ),
    (
        r"base temperature above the temperature: the loss times 1/4",
        lambda c: c.t / c.option("base_temperature") == 0.25,
    ),
    (
        r"Base temperature equal to the temperature: a factor of exactly 1",
        lambda c: c.option("base_temperature") == c.t,
    ),
    (r"[Bb]ase temperature|temperature / base_temperature", lambda c: c.option("base_temperature") is not None),
    (r"[Bb]oth directions", lambda c: c.option("direction") in (None, "both")),
    (r"one direction(?=,|:)", lambda c: c.option("direction") in ("a_to_b", "b_to_a")),
    (
        r"rows of the (first|second) tower as anchors",
        lambda c, k: c.option("direction") == {"first": "a_to_b", "second": "b_to_a"}[k],
    ),
    (r"[Dd]ot products|under dot\b", lambda c: c.option("similarity") == "dot" or "default" in c.note),
    (r"[Cc]osines where dot products are the default|under cosine", lambda c: c.option("similarity") == "cosine"),
    (r"[Dd]enominator (all|one_positive|only_negatives)", lambda c, name: c.option("denominator") == name),
    (r"Denominators of only the negatives", lambda c: c.option("denominator") == "only_negatives"),
    (r"(no_positive|no_negative) (?:is )?(zero|drop|nan)\b", lambda c, name, policy: c.option(name) == policy),
    (r"policy (zero|drop|nan)", lambda c, policy: policy in (c.option("no_positive"), c.option("no_negative"))),
    # Anchors, positives and negatives.
    (
        rf"Labels ((?:-?\d+, )+-?\d+): {COUNT} anchors of {COUNT} have no positive",
        lambda c, x, k, n: (
            list(map(int, x.split(", "))) == [int(y) for y in c.given.get("labels", [])]
            and (len(c.without_positives), c.n) == (number(k), number(n))
        ),
    ),
    (
        r"Labels ((?:-?\d+, )+-?\d+)",
        lambda c, x: same_classes(c, list(map(int, x.split(", ")))),
    ),
    (
        rf"The first and the last of {COUNT} anchors have no positive",
        lambda c, n: c.without_positives == [0, number(n) - 1] and c.n == number(n),
    ),
    (
        rf"{COUNT} of {COUNT} anchors ha(?:s|ve) no positive(?: and (?:is|are) (counted as 0|left out))?",
        lambda c, k, n, policy: (
            (len(c.without_positives), len(c.anchors)) == (number(k), number(n))
            and (
                policy is None
                or c.option("no_positive") in (None, {"counted as 0": "zero", "left out": "drop"}[policy])
            )
        ),
    ),
    (
        rf"{COUNT} of {COUNT} rows have a class that no reference has",
        lambda c, k, n: (len(c.without_positives), c.n) == (number(k), number(n)),
    ),
    (
        rf"{COUNT} of {COUNT} rows are among the references",
        lambda c, k, n: (sum(j >= 0 for j in c.given["self_rows"]), c.n) == (number(k), number(n)),
    ),
    (
        rf"{COUNT} of the {COUNT} rows are anchors; all {COUNT} references",
        lambda c, k, n, m: (len(c.anchors), *c.case.shape) == (number(k), number(n), number(m)),
    ),
    (rf"{COUNT} of the {COUNT} rows are anchors", lambda c, k, n: (len(c.anchors), c.n) == (number(k), number(n))),
    (
        rf"{COUNT} anchors of {COUNT} with (\w+, \w+ and \w+) positives: the mean over {COUNT} pairs",
        lambda c, k, n, p, pairs: (
            (len(c.anchors), c.n) == (number(k), number(n))
            and [c.positives[i] for i in c.anchors] == listed(p)
            and sum(listed(p)) == number(pairs)
        ),
    ),
    (rf"{COUNT} anchors of {COUNT}", lambda c, k, n: (len(c.anchors), c.n) == (number(k), number(n))),
    (rf"{COUNT} paired anchors of {COUNT}", lambda c, k, n: (len(c.paired), c.n) == (number(k), number(n))),
    (r"Only rows (\d) and (\d) are anchors", lambda c, *rows: c.anchors == list(map(int, rows))),
    (r"The last row is the only anchor", lambda c: c.anchors == [c.n - 1]),
    (r"The only anchor has no positive", lambda c: len(c.anchors) == len(c.without_positives) == 1),
    (r"[Nn]o row is an anchor", lambda c: not c.anchors),
    (r"a mean over no (?:anchors|pairs)", lambda c: not c.case.counted() or not c.paired),
    (
        r"(?:[Nn]o row|No pair|no row) (?:has a|is) positive(?! and no negative)|mask without any positive",
        lambda c: not any(c.positives),
    ),
    (r"[Nn]o row has a negative|[Ww]ithout negatives(?=\.|,)", lambda c: not any(c.negatives)),
    (r"All pairs positive between equal rows", lambda c: c.mask[c.member].all() and all_equal(c)),
    (
        r"Row 0 has (?:every other row as positive and )?no negative(?:, the others have negatives)?",
        lambda c: c.negatives[0] == 0 and all(c.negatives[1:]),
    ),
    (r"row 3 has (?:no positive|none)", lambda c: c.positives[3] == 0),
    (r"row 4 has all others", lambda c: c.negatives[4] == 0 and c.positives[4] == c.n - 1),
    (
        r"row 0 has 1 as positive, but 1 has not 0|\(0, 1\) without \(1, 0\)",
        lambda c: c.mask[0, 1] and not c.mask[1, 0],
    ),
    (r"Row 0 has no positive and row 1 has no negative", lambda c: c.positives[0] == c.negatives[1] == 0),
    (
        r"The row without negatives is not an anchor",
        lambda c: 0 in c.negatives and all(c.negatives[i] for i in c.anchors),
    ),
    (
        r"The rows without positives are not anchors",
        lambda c: 0 in c.positives and all(c.positives[i] for i in c.anchors),
    ),
    (
        r"the second row's only negative is its own row, which is left out, so it has none",
        lambda c: c.negatives[1] == 0 and c.given["self_rows"][1] >= 0,
    ),
    (rf"each(?: anchor)? has {COUNT} positives?", lambda c, k: set(c.positives) == {number(k)}),
    (
        rf"each with {COUNT} positive among {COUNT} references",
        lambda c, k, m: set(c.positives) == {number(k)} and c.case.shape[1] == number(m),
    ),
    (rf"{COUNT} positives against {COUNT}", lambda c, a, b: set(c.positives) == {number(a), number(b)}),
    (
        r"with three positives the loss does not go to 0 but to ln 3",
        lambda c: set(c.positives) == {3} and every_result(c, math.log(3), 1e-3),
    ),
    (r"thirty pairs of the one, six of the other", lambda c: Counter(map(len, c.classes)) == {6: 1, 3: 1}),
    (
        r"(?:[Pp]ositives by|anchors of) an asymmetric mask(?:, the mean over its eight pairs)?",
        lambda c: not np.array_equal(c.mask, c.mask.T) and ("eight" not in c.note or c.mask.sum() == 8),
    ),
    (
        r"Every row has the rows after it as positives",
        lambda c: np.array_equal(c.mask, np.triu(np.ones((c.n, c.n), bool), 1)),
    ),
    (
        r"no class labels could give them",
        lambda c: any(
            c.mask[i, j] and c.mask[j, k] and i != k and not c.mask[i, k]
            for i in range(c.n)
            for j in range(c.n)
            for k in range(c.n)
        ),
    ),
    (
        r"diagonal true|Only pairs \(i, i\)|and all \(i, i\)|true only on the diagonal",
        lambda c: (
            np.diagonal(np.array(c.case.positive_mask())).all()
            if "Only pairs" not in c.note
            else np.diagonal(np.array(c.case.positive_mask())).any()
        ),
    ),
    (
        r"Every pair of two classes twice, one \(i, i\) three times",
        lambda c: (
            len(c.classes) == 2
            and sorted(Counter(map(tuple, c.given["positive_pairs"])).values()) == [2] * int(c.mask.sum()) + [3]
        ),
    ),
    (r"three of them twice", lambda c: sorted(Counter(map(tuple, c.given["positive_pairs"])).values()).count(2) == 3),
    (
        r"One pair four times, another once",
        lambda c: sorted(Counter(map(tuple, c.given["positive_pairs"])).values()) == [1, 4],
    ),
    (
        r"A single pair, in (one direction|both directions)",
        lambda c, k: (c.mask.sum(), (c.mask == c.mask.T).all()) == ((1, False) if k == "one direction" else (2, True)),
    ),
    (
        r"Row i and row N-1-i are partners",
        lambda c: (
            c.given["partners"] == list(range(c.n))[::-1]
            if "partners" in c.given
            else np.array_equal(c.mask, np.eye(c.n, dtype=bool)[::-1])
        ),
    ),
    # Classes and views.
    (
        r"Three rows of a class and three of another, two of each nearly parallel",
        lambda c: (
            ("self_rows" in c.given or c.sizes == [3, 3] or c.case.loss in ("nt_xent", "nt_bxent", "info_nce"))
            and c.n == 6
        ),
    ),
    (rf"{COUNT} class(?:es)? of {COUNT}", lambda c, k, n: c.sizes == [number(n)] * number(k)),
    (r"[Cc]lasses of (\w+(?:, \w+)* and \w+)", lambda c, x: c.sizes == listed(x)),
    (rf"in {COUNT} classes", lambda c, k: len(c.classes) == number(k)),
    (rf"{COUNT} rows of {COUNT} class(?:es)?", lambda c, n, k: (c.n, len(c.classes)) == (number(n), number(k))),
    (
        rf"{COUNT} items with {COUNT} views each, (stacked|interleaved)",
        lambda c, k, v, kind: c.n == number(k) * number(v) and layout(c, number(v), kind),
    ),
    (
        rf"{COUNT} views of {COUNT} items of {COUNT} classes(, the first views anchors)?",
        lambda c, v, k, m, first: (
            c.n == number(k) * number(v)
            and len(c.classes) == number(m)
            and (first is None or first_views(c, number(v)))
        ),
    ),
    (
        rf"Interleaved embeddings of {COUNT} views with the positives of a stacked batch",
        lambda c, v: layout(c, number(v), "stacked"),
    ),
    (rf"Only the first of {COUNT} views are anchors", lambda c, v: first_views(c, number(v))),
    (r", (stacked|interleaved)(?=[.,])", lambda c, kind: layout(c, 2, kind)),
    (r"mostly in pairs", lambda c: c.sizes[len(c.sizes) // 2] == 2),
    # References.
    (r"self_rows given for every row", lambda c: min(c.given["self_rows"]) >= 0),
    (r"[Aa]ll self_rows are -1|\(self_rows is -1\)", lambda c: set(c.given.get("self_rows", [-1])) == {-1}),
    (r"self_rows is -1 for the others", lambda c: -1 in c.given["self_rows"]),
    (r"self_rows is the row number plus four", lambda c: c.given["self_rows"] == [i + 4 for i in range(c.n)]),
    (rf"{COUNT} rows? and {COUNT} references?", lambda c, n, m: c.case.shape == (number(n), number(m))),
    (
        rf"{COUNT} rows? against {COUNT} references?(?: of {COUNT} classes)?",
        lambda c, n, m, k: (
            c.case.shape == (number(n), number(m)) and (k is None or len(set(c.given["ref_labels"])) == number(k))
        ),
    ),
    (r"two of them its positives: N = 1", lambda c: c.positives == [2] and c.n == 1),
    (r"M < N", lambda c: c.case.shape[1] < c.n),
    (
        r"which is the positive of two and the negative of one",
        lambda c: c.positives.count(1) == 2 and c.negatives.count(1) == 1,
    ),
    (
        rf"{COUNT} row with {COUNT} positive and {COUNT} negative: {COUNT} references",
        lambda c, n, p, k, m: (
            (c.n, c.positives, c.negatives, c.case.shape[1]) == (number(n), [number(p)], [number(k)], number(m))
        ),
    ),
    (
        r"One reference, which is the first row itself: its A\(i\) is empty",
        lambda c: c.case.shape[1] == 1 and c.given["self_rows"][0] == 0 and c.members[0] == 0,
    ),
    (r"One reference, the partner of every row", lambda c: c.case.shape[1] == 1 and set(c.positives) == {1}),
    (
        rf"(?:Positives by a mask of|in a mask of) {COUNT} rows and {COUNT} columns",
        lambda c, n, m: c.case.shape == (number(n), number(m)),
    ),
    (
        r"(?:[Oo]ne reference three times|[Oo]ne negative three times: it counts three times)",
        lambda c: (
            Counter(
                map(tuple, c.given["ref_embeddings" if "ref_embeddings" in c.given else "negatives"].tolist())
            ).most_common(1)[0][1]
            == 3
        ),
    ),
    (r"a row that two anchors share", lambda c: len(np.unique(c.case.embeddings, axis=0)) == c.n - 1),
    (
        r"Two references of which neither is the anchor",
        lambda c: c.case.shape[1] == 2 and set(c.given["self_rows"]) == {-1},
    ),
    (r"(?:one is the positive, the other the only negative)", lambda c: set(c.positives) == set(c.negatives) == {1}),
    (
        r"Two references equal the first row; the one given by self_rows",
        lambda c: (c.given["ref_embeddings"] == c.case.embeddings[0]).all(1).sum() == 2,
    ),
    (
        r"The second and the fourth reference equal the first row; self_rows gives only the fourth",
        lambda c: (
            np.flatnonzero((c.given["ref_embeddings"] == c.case.embeddings[0]).all(1)).tolist() == [1, 3]
            and c.given["self_rows"][0] == 3
        ),
    ),
    (r"rows of the second of two ranks", lambda c: c.case.shape[1] == 2 * c.n),
    # Towers.
    (rf"^{COUNT} pairs? (?:of rows|of width \d+|against)", lambda c, n: c.case.entry.two_towers and c.n == number(n)),
    (rf"^{COUNT} pair(?:,| and no)", lambda c, n: c.case.entry.two_towers and c.n == number(n)),
    (r"same four pairs", lambda c: c.case.entry.two_towers and c.n == 4),
    (rf"(?:against|pair,) {COUNT} negatives?", lambda c, k: len(c.given["negatives"]) == number(k)),
    (rf"weights {REAL} and {REAL}", lambda c, x, y: c.option("direction_weights") == [real(x), real(y)]),
    (
        rf"towers of {COUNT} and {COUNT} rows",
        lambda c, n, m: (c.n, len(c.given["embeddings_b"])) == (number(n), number(m)),
    ),
    (
        rf"the means are over {COUNT} and {COUNT} anchors",
        lambda c, x, y: [sum(i in rows for i in c.case.counted()) for rows in c.case.groups()] == [int(x), int(y)],
    ),
    (rf"the mean is over {COUNT} anchors", lambda c, x: len(c.case.counted()) == number(x)),
    (r"as its partner are negatives, but no anchors", lambda c: len(c.case.counted()) < c.case.shape[0]),
    (r"a row (?:without|of each has no) positives? (?:and )?is left out", lambda c: c.option("no_positive") == "drop"),
    (r"every row of both towers has a partner", lambda c: sorted(c.given["partners"]) == list(range(c.n))),
    (r"the first and the third row have the same id", lambda c: c.given["ignored_ids"][0] == c.given["ignored_ids"][2]),
    (
        r"[Tt]he third row has only ignored pairs, and the value 0",
        lambda c: all(c.given["ignored"][2]) and c.golden.expected.loss[2] == 0,
    ),
    (r"[Aa] batch of one row", lambda c: c.n == 1 and c.case.members() == [[]]),
    (r"All pairs are ignored, and their mean is 0", lambda c: not any(c.case.members()) and c.loss == 0),
    (
        r"[Aa]ll negatives of the second row are ignored, and its value is 0",
        lambda c: c.negatives[1] == 0 and c.golden.expected.loss[1] == 0,
    ),
    (r"that is not symmetric", lambda c: (np.array(c.given["ignored"]) != np.transpose(c.given["ignored"])).any()),
    (rf"bias {REAL}", lambda c, x: c.option("bias") == real(x)),
    (rf"beta {REAL}", lambda c, x: c.option("beta") == real(x)),
    (rf"tau_plus {REAL}", lambda c, x: c.option("tau_plus") == real(x)),
    (rf"sigma {REAL}", lambda c, x: c.option("sigma") == real(x)),
    (r"differentiated weights", lambda c: c.option("detach_weights") is False),
    (
        r"the closest pair alone has a weight other than 2",
        lambda c: sorted(np.abs(c.weights - 2) > 1e-9) == [False] * (c.n - 2) + [True] * 2,
    ),
    (r"all weights are nearly 1", lambda c: 0 < np.abs(c.weights - 1).max() < 1e-5),
    (r"all weights are 1|its weight is 1", lambda c: (c.weights == 1).all()),
    (
        r"another gradient",
        lambda c: any(
            c.loss == other.loss and not np.allclose(c.golden.expected.gradient, other.golden.expected.gradient)
            for other in c.same_rows()
        ),
    ),
    (
        r"just (above|below) its floor",
        lambda c, side: all(1 < x < 1.5 if side == "above" else 0.5 < x < 1 for x in c.over_floor),
    ),
    (r"every mass is (?:raised to|at) its floor", lambda c: max(c.over_floor) < 1),
    (r"no mass is at its floor", lambda c: min(c.over_floor) > 1),
    (
        r"mass is equal to its floor",
        lambda c: np.allclose(c.over_floor, 1) and c.golden.expected.gradient_left_out == FLOOR,
    ),
    (r"ln\(1 \+ 2 e\^\(-2/temperature\)\)", lambda c: every_result(c, math.log1p(2 * math.exp(-2 / c.t)))),
    (rf"(?:The second tower has|a tower of) {COUNT} rows", lambda c, m: c.case.shape[1] == number(m)),
    (r"the logit is 0", lambda c: np.allclose(c.logits + c.option("bias"), 0)),
    (r"ln\(1 \+ e\^-5\.75\)", lambda c: every_result(c, math.log1p(math.exp(-5.75)))),
    (r"K = 1", lambda c: len(c.given["negatives"]) == 1),
    (r"One query, its key, and a queue", lambda c: c.n == 1 and "negatives" in c.given),
    (
        r"two rows of the second tower swapped: two wrong pairs",
        lambda c: any(
            (c.given["embeddings_b"] != other.given["embeddings_b"]).any(1).sum() == 2 for other in c.same_rows()
        ),
    ),
    (
        r"[Tt]wo equal pairs",
        lambda c: len(np.unique(np.hstack([c.case.embeddings, c.given["embeddings_b"]]), axis=0)) == c.n - 1,
    ),
    (
        r"its? positive is itself, at cosine 1|Both towers the same rows",
        lambda c: np.array_equal(c.case.embeddings, c.given["embeddings_b"]),
    ),
    (r"The second tower is the first times -1", lambda c: np.array_equal(c.case.embeddings, -c.given["embeddings_b"])),
    (
        r"the first pair's own key and the second pair's own query",
        lambda c: (
            {tuple(c.given["embeddings_b"][0]), tuple(c.case.embeddings[1])} <= set(map(tuple, c.given["negatives"]))
        ),
    ),
    # Results.
    (
        r"(?:(?:the|a) loss (?:and the gradient are|is|of exactly|exactly|with loss)|with loss) 0(?: and "
        r"the gradient too)?",
        lambda c: c.loss == 0,
    ),
    (r"two zeros", lambda c: c.golden.expected.loss == (0.0, 0.0)),
    (r"every ratio is 1|every pair's ratio is 1|whose ratio is 1", lambda c: c.loss == 0),
    (
        r"a gradient of (?:exactly )?0|gradient (?:under cosine )?is exactly 0",
        lambda c: not np.abs(c.golden.expected.gradient).max() > 1e-300,
    ),
    (r"a gradient that is not 0|the gradient is not 0", lambda c: np.abs(c.golden.expected.gradient).max() > 0),
    (r"ln\(1 \+ 2 e\^\(-1/temperature\)\)", lambda c: every_result(c, math.log1p(2 * math.exp(-1 / c.t)))),
    (r"ln\(1 \+ 2 e\^-40\)", lambda c: every_result(c, math.log1p(2 * math.exp(-40)))),
    (r"ln\(1 \+ 3\)", lambda c: every_result(c, math.log(4))),
    (
        r"(?:softplus\(-1/t\) 2/3 \+ softplus\(1/t\))",
        lambda c: every_result(c, softplus(-1 / c.t) * 2 / 3 + softplus(1 / c.t)),
    ),
    (r"softplus\(-1/t\) 3/4", lambda c: every_result(c, softplus(-1 / c.t) * 3 / 4)),
    (r"2 ln 5 / \(2 \+ 1e-8\)", lambda c: every_result(c, 2 * math.log(5) / (2 + 1e-8))),
    (
        r"\(2/5\) ln 4 / \(1 \+ 1e-8\) = 0\.5545\.\.\.",
        lambda c: near(c.loss, 0.4 * math.log(4) / (1 + 1e-8)) and str(c.loss).startswith("0.5545"),
    ),
    (r"nearly ln\(N-1\)", lambda c: every_result(c, math.log(c.n - 1), 1e-3)),
    (r"a loss near ln 5", lambda c: every_result(c, math.log(5), 0.01)),
    (r"far below ln\(3\)", lambda c: c.loss < math.log(3) / 2),
    (r"ln ?\(?(\d+)\)?", lambda c, x: every_result(c, math.log(int(x)))),
    (rf"a loss of {REAL}(?![.\d]*e)", lambda c, x: near(c.loss, real(x), 0.05)),
    (r"a loss above a thousand", lambda c: c.loss > 1000),
    (r"a loss (?:near 0|far below 1)", lambda c: c.loss < 0.1),
    (r"below the rounding error of 1", lambda c: max(c.results.values()) < 2.0**-24),
    (r"a single softplus", lambda c: near(c.loss, softplus(float(c.logits[0, 1] - c.logits[0, 0])), 1e-6)),
    # Geometry.
    (rf"{COUNT} equal rows", lambda c, n: c.n == number(n) and all_equal(c)),
    (r"[Aa]ll rows (?:and negatives equal|of both towers equal|and references equal)", all_equal),
    (rf"all cosines above {REAL}", lambda c, x: c.cosines[c.member].min() > real(x)),
    (
        r"[Rr]ows? (\d) and (\d) are equal",
        lambda c, i, j: np.array_equal(c.case.embeddings[int(i)], c.case.embeddings[int(j)]),
    ),
    (
        r"Rows 2 and 5 are rows 0 and 4 times powers of two",
        lambda c: all(
            len(set(c.case.embeddings[a][c.case.embeddings[b] != 0] / c.case.embeddings[b][c.case.embeddings[b] != 0]))
            == 1
            for a, b in ((2, 0), (5, 4))
        ),
    ),
    (r"The largest product of row 0 is with row 3(?:, not with itself)?", lambda c: c.products[0].argmax() == 3),
    (
        r"Every row occurs twice(?:, in two classes| and the copies)?",
        lambda c: set(Counter(map(tuple, c.rows.tolist())).values()) == {2},
    ),
    (r"[Rr]ow 3 is the zero vector(?:, at dot product 0 with everything)?", lambda c: not c.case.embeddings[3].any()),
    (r"all its products are 0, so the largest is 0", lambda c: not c.products[3].any()),
    (r"A zero vector in each tower", lambda c: all(not m.any(axis=1).all() for m in c.case.matrices.values())),
    (r"zeros but for one or two entries", lambda c: (c.rows != 0).sum(axis=1).max() <= 2),
    (r"[Ff]our orthogonal rows", lambda c: c.n == 4 and not (c.products[c.member]).any()),
    (r"of four orthogonal classes", lambda c: not c.cosines[~c.mask].any()),
    (
        r"Partners parallel, all other rows orthogonal",
        lambda c: np.allclose(c.cosines_of(True), 1) and not c.cosines_of(False).any(),
    ),
    (r"[Ee]very row of one tower orthogonal to every row of the other", lambda c: not c.products.any()),
    (
        r"([Pp]ositives|anchor's positive is its negative:|One positive) ?(?:at )?cosine -1|Every "
        r"anchor's positive is its negative: cosine -1",
        lambda c, _: np.isclose(c.cosines_of(True).min(), -1),
    ),
    (
        r"and a negative at 1(?=,)|a negative at similarity 1|A negative at similarity 1",
        lambda c: np.isclose(c.cosines_of(False).max(), 1),
    ),
    (r"A negative at a high cosine", lambda c: c.cosines_of(False).max() > 0.9),
    (
        r"[Tt]wo opposite points, one for each class",
        lambda c: (
            len(np.unique(c.rows, axis=0)) == 2
            and np.isclose(c.cosines.min(), -1)
            and np.allclose(c.cosines_of(True), 1)
        ),
    ),
    (
        r"Pairs of equal rows at opposite ends",
        lambda c: np.allclose(c.cosines_of(True), 1) and np.allclose(c.cosines_of(False), -1),
    ),
    (
        rf"pairs at cosines from {REAL} to {REAL}",
        lambda c, a, b: [round(float(f(c.cosines_of(True))), 2) for f in (np.min, np.max)] == [real(a), real(b)],
    ),
    (
        r"(?:all other rows far apart|Rows near their partners)",
        lambda c: c.cosines_of(True).min() > 0.9 > 0.6 > c.cosines_of(False).max(),
    ),
    (r"References near (?:their rows|the rows of their class)", lambda c: c.cosines_of(True).min() > 0.99),
    (
        r"Partners at opposite ends|[Aa] positive opposite to its anchor|The positive opposite to its anchor",
        lambda c: c.cosines_of(True).min() < -0.99,
    ),
    (rf"Pairs {REAL} and {REAL} degrees apart", lambda c, a, b: {round(x, 1) for x in angles(c)} == {real(a), real(b)}),
    (
        rf"(Positives|Negatives) whose rows differ by {POWER} of their size",
        lambda c, kind, k: any(
            differ(c, i, j, int(k))
            for i, j in zip(*np.nonzero(c.member & (c.mask == (kind == "Positives"))), strict=True)
        ),
    ),
    (r"[Rr]ows of (?:length|norm) about 16", lambda c: max(abs(x - 16) for x in c.norms) < 4),
    (
        r"exceeds everything else in its row by hundreds over the temperature",
        lambda c: (
            all((c.products[i, i] - np.delete(c.products[i], i)).max() > 0 for i in range(c.n))
            and min((c.products[i, i] - np.delete(c.products[i], i)).min() for i in range(c.n)) > 100
        ),
    ),
    (
        rf"[Rr]ows of ([-a-z0-9]+) times powers of two from {POWER} to {POWER}: the same loss",
        lambda c, name, a, b: times(c, name, int(a), int(b)) and c.loss == c.named(name).loss,
    ),
    (
        r"[Rr]ows of ([-a-z0-9]+) times powers of two(?:: the same loss)?",
        lambda c, name: (
            times(c, name, None, None) and (": the same loss" not in c.note or c.loss == c.named(name).loss)
        ),
    ),
    (
        rf"(?:The rows of )?([a-z][-a-z0-9]+) times {POWER}(?:: the same loss, the gradient times "
        rf"{POWER}|: under cosine the same loss)?",
        lambda c, name, k, g: (
            times(c, name, int(k), int(k))
            and c.loss == c.named(name).loss
            and (
                g is None
                or np.array_equal(c.golden.expected.gradient, c.named(name).golden.expected.gradient * 2.0 ** int(g))
            )
        ),
    ),
    (
        rf"[Rr]ows of (?:norm|length) {POWER}(, whose squares (?:underflow|overflow) in (float32|float64))?",
        lambda c, k, _, dtype: of_norms(c, 2.0 ** int(k), 2.0 ** int(k)) and (dtype is None or squares_leave(c, dtype)),
    ),
    (rf"[Rr]ows of norms from {POWER} to {POWER}", lambda c, a, b: of_norms(c, 2.0 ** int(a), 2.0 ** int(b))),
    (
        rf"Row 0 has norm {POWER}, the smallest normal number of float32",
        lambda c, k: c.norms[0] == 2.0 ** int(k) == np.finfo("float32").tiny,
    ),
    (
        r"reciprocal of its norm times the root of the temperature overflows float32",
        lambda c: 1 / (c.norms[0] * math.sqrt(c.t)) > np.finfo("float32").max,
    ),
    (r"[Rr]ows of norm exactly 1", lambda c: set(c.norms) == {1.0}),
    (r"Entries near 2\^1024", lambda c: np.abs(c.rows).max() > 2.0**1022),
    (
        r"each anchor's value fits float32, as does their mean; their sum does not",
        lambda c: max(c.results.values()) < np.finfo("float32").max < math.fsum(c.results.values()),
    ),
    (
        rf"(?:use all|with all) {COUNT} bits of (float32|float64)",
        lambda c, k, dtype: (
            number(k) == np.finfo(dtype).nmant + 1
            and (np.frexp(c.rows)[0] * 2.0 ** (number(k) - 1) % 1).any()
            and not (np.frexp(c.rows)[0] * 2.0 ** number(k) % 1).any()
        ),
    ),
    (
        r"[Rr]ows normalised in float32",
        lambda c: np.allclose(c.norms, 1, atol=1e-6) and "float32" in c.golden.dtypes and set(c.norms) != {1.0},
    ),
    (r"the softmaxes are far from one-hot", lambda c: sure(c) < 0.99),
    # Labels.
    (r"named (-?\d+(?:, -?\d+)+)", lambda c, x: list(map(int, x.split(", "))) == c.given["labels"]),
    (r"negative and beyond 2\^53", lambda c: min(c.labels) < 0 and max(map(abs, c.labels)) > 2**53),
    # Other cases.
    (
        r"(?:t|T)he (?:loss|value|gradient)s?(?: and gradients)? of ([a-z]+(?:-[a-z0-9]+)+)",
        lambda c, name: near(c.loss, c.named(name).loss, 1e-15),
    ),
    (r"another loss(?!,)", lambda c: c.loss not in {one.loss for one in c.others}),
    (
        r"The (two views|towers|rows|mask|pairs) of ([a-z]+(?:-[a-z0-9]+)+)",
        lambda c, what, name: (
            np.array_equal(c.mask, c.named(name).mask)
            if what in ("mask", "pairs")
            else sorted(c.rows.tolist()) == sorted(c.named(name).rows.tolist())
        ),
    ),
    (r"(?<!has )the same loss|give the same loss", lambda c: any(near(c.loss, one.loss, 1e-15) for one in c.others)),
    (
        r"([a-z]+(?:-[a-z]+)+) has the same loss and another gradient",
        lambda c, name: near(c.loss, c.named(name).loss, 1e-15),
    ),
    (r"The same\b|the same batch|The same batch", lambda c: any(c.same_rows())),
]


def angles(c: Noted) -> list[float]:
    """The angles between positives, in degrees."""
    return np.degrees(np.arccos(np.clip(c.cosines_of(True), -1, 1))).tolist()


def differ(c: Noted, i: int, j: int, k: int) -> bool:
    """Whether the difference of rows i and j is 2^k times the norm of row i, within a factor of four."""
    a = c.case.embeddings[i]
    b = c.case.embeddings[j] if c.within else next(iter(c.case.others.values()))[j]
    return 2.0 ** (k - 2) < np.linalg.norm(a - b) / np.linalg.norm(a) < 2.0 ** (k + 2)


def sums_the_ratios(c: Noted, averaged: Noted) -> bool:
    """Whether the values are those of another case minus the logarithms of the numbers of positives."""
    scale = c.t / (c.option("base_temperature") or c.t)
    less = {i: scale * math.log(max(c.positives[i], 1)) for i in c.results}
    values = [(c.results[i], averaged.results[i] - less[i]) for i in c.results]
    gradients = c.golden.expected.gradient, averaged.golden.expected.gradient
    same = gradients[0] is gradients[1] is None or np.allclose(*gradients, rtol=1e-12, atol=1e-300)
    return same and c.results.keys() == averaged.results.keys() and np.allclose(*np.transpose(values), equal_nan=True)


def squares_leave(c: Noted, dtype: str) -> bool:
    squares = [2 * math.log2(x) for x in c.norms]
    found = np.finfo(dtype)
    return max(squares) < math.log2(float(found.smallest_subnormal)) or min(squares) >= found.maxexp


NUMERAL = re.compile(rf"\d|\b(?:{'|'.join(set(NUMBERS) - {'only', 'single', 'no'})})\b", re.IGNORECASE)


def read(c: Noted, note: str) -> tuple[list[str], list[str]]:
    """The statements of a note that are false for a case, and the numbers that no rule reads."""
    false: list[str] = []
    for pattern, holds in RULES:

        def check(match: re.Match[str], holds: Callable[..., Any] = holds) -> str:
            try:
                with np.errstate(all="ignore"):
                    right = bool(holds(c, *match.groups()))
            except Exception as error:  # such as a name that no case has
                false.append(f"{match[0]}: {type(error).__name__}: {error}")
            else:
                if not right:
                    false.append(match[0])
            return "·"

        note = re.sub(pattern, check, note, flags=re.IGNORECASE)
    return false, NUMERAL.findall(note)


@pytest.mark.parametrize("loss", FILES)
def test_every_number_and_term_of_a_note_is_true(loss: str) -> None:
    found = {c.case.id: read(c, c.note) for c in FILES[loss]}
    assert not {case: (false, left) for case, (false, left) in found.items() if false or left}


@pytest.mark.parametrize(
    "loss",
    [
        loss if loss in ("nt_xent", "nt_bxent", "info_nce") else pytest.param(loss, marks=pytest.mark.slow)
        for loss in FILES
    ],
)
@pytest.mark.quick(1)
def test_a_note_with_another_number_is_not_true(loss: str) -> None:
    """Every number of every note is changed. "Above" and "up to" also hold of some other numbers."""
    missed = []
    for c in FILES[loss]:
        for match in NUMERAL.finditer(
            re.sub(r"(?:above|at most|about|[a-z]-)[ 0-9.a-z]*[0-9a]", lambda m: "·" * len(m[0]), c.note)
        ):
            old = match[0]
            new = str((int(old) + 3) % 10) if old.isdigit() else {"four": "six"}.get(old.lower(), "four")
            if read(c, c.note[: match.start()] + new + c.note[match.end() :]) == ([], []):
                missed.append((c.case.id, c.note[: match.start()] + new + c.note[match.end() :]))
    assert not missed, missed[:9]
