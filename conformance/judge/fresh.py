"""Random batches, drawn anew for every check, so that a target cannot pass by recognising the golden cases.

A batch is determined by its seed, its number and the claim about the target. Batches are drawn in blocks of
``BLOCK``: in each block, every value of every option that the claim accepts occurs as evenly as possible, in random
combinations. Entries have at most 8 significant bits, so they are exactly representable in every dtype.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..implementations.signatures import Claim
from ..suite.cases import Case
from ..suite.catalogue import LOSSES
from ..suite.flags import true_flags
from ..suite.golden import DTYPES, GoldenCase
from ..suite.records import Matrix
from .options import Request, Selection
from .proofs import prove, scaled_to_logits

BLOCK = 8
"""Number of batches that are drawn together."""

ROWS = ((2, 6), (7, 10), (11, 17), (18, 24))
"""Ranges of the number of rows; each occurs equally often."""

COLUMNS = ((2, 3), (4, 8), (9, 16), (17, 40))
"""Ranges of the embedding dimension; each occurs equally often."""

COMMON_CLASSES = ("unbalanced", "balanced", "views")
"""Class structures in which every row has a positive: unequal sizes, equal sizes if possible, and even sizes."""

TEMPERATURES = (0.06, 0.95)
"""Range of the temperature if it can be passed."""

SPREAD = 0.4
"""Distance of trained-like rows from the centre of their class, relative to the distance of the centre from 0."""

SIGNIFICANT = 255
"""Largest integer of 8 bits."""

MOST_NEGATIVES = 8
"""Largest number of rows of a queue, and of references in addition to the rows of the batch."""

NOT_SHOWN = {"self-similarity-dominates", "low-temperature", "high-temperature"}
"""Flags of golden cases that are chosen for an extreme value; a batch may have the property without that value."""

ONLY_WITH = {
    "asymmetric-mask": "positives",
    "diagonal-true": "positives",
    "directed-pairs": "positive_pairs",
    "own-copy": "ref_embeddings",
    "own-key-in-queue": "negatives",
}
"""Flags about an argument. Their conditions can also be true of a batch without it."""

COPIES = {"duplicate-embeddings", "own-copy"}
"""Flags of equal rows; with ``self_rows``, the rows of the batch are among the references, so they always hold."""


@dataclass(frozen=True)
class FreshBatch:
    """The name of a batch that is not drawn yet.

    Attributes:
        loss: short name in the catalogue.
        seed: the seed of the check.
        number: the number of the batch, from 0.
    """

    loss: str
    seed: int
    number: int

    @property
    def id(self) -> str:
        """The id of the case."""
        return f"fresh-{self.seed}-{self.number}"

    def proved(self, claim: Claim) -> GoldenCase:
        """Draw the batch and prove its results.

        Args:
            claim: what the target computes.
        """
        return with_proof(draw(claim, self.seed, self.number))


def fresh_batches(request: Request) -> list[FreshBatch]:
    """Return the batches that a request selects.

    Args:
        request: the request of the check; its seed is given.
    """
    batches = [FreshBatch(request.loss, request.seed or 0, number) for number in range(request.fuzz)]
    return [batch for batch in batches if Selection(cases=request.cases).takes_case(batch.id)]


def with_proof(case: Case) -> GoldenCase:
    """Prove the results of a drawn case, and determine its flags.

    Raises:
        CertificationError: a result cannot be proved.
    """
    given, omitted = {"", *case.arguments, *case.others}, NOT_SHOWN
    if "self_rows" in case.arguments:
        omitted = omitted | COPIES
    if "ref_embeddings" in case.others:
        omitted = omitted | {"asymmetric-mask", "diagonal-true"}
    flags = (flag for flag in true_flags(case) if ONLY_WITH.get(flag, "") in given and flag not in omitted)
    dtypes = tuple(dtype for dtype in DTYPES if case.holds_in(dtype))
    return GoldenCase(case, tuple(flags), "a random batch", dtypes, prove(case))


def draw(claim: Claim, seed: int, number: int) -> Case:
    """Draw a batch.

    Args:
        claim: what the target computes.
        seed: the seed of the check.
        number: the number of the batch.

    Returns:
        The case, with options and arguments that the claim accepts.
    """
    block, place = divmod(number, BLOCK)
    plan = _plan(claim, random.Random(f"block {seed} {block}"))[place]
    return _Drawing(claim, plan, random.Random(f"batch {seed} {number}")).case(f"fresh-{seed}-{number}")


def _plan(claim: Claim, chance: random.Random) -> list[dict[str, Any]]:
    """Choose the sizes, the structures and the options of a block of batches."""
    entry, support = LOSSES[claim.loss], claim.support

    def takes(name: str) -> bool:
        return name in entry.keywords and name not in support.lacks

    options = {name: claim.values_of(name) or values for name, values in entry.choices.items()}
    if base := claim.values_of("base_temperature"):
        options["base_temperature"] = base
    else:
        options["base_temperature"] = (None, True)
    references = ["none"]
    if takes("ref_embeddings") and (entry.targets != "labels" or takes("ref_labels")):
        references += ["others", "own"] if takes("self_rows") else ["others"]
    special = ["single"] * len(options.get("no_positive", ())) + ["one"] * len(options.get("no_negative", ()))
    common = itertools.islice(itertools.cycle(COMMON_CLASSES), BLOCK - len(special))
    columns: dict[str, Sequence[Any]] = {
        "rows": ROWS,
        "columns": COLUMNS,
        "trained": (False, True),
        "mixed norms": (False, True),
        "layout": ("stacked", "interleaved", "shuffled"),
        "classes": [*special, *common],
        "directed": (False, False, True),
        "anchors": (False, False, True) if takes("anchors") else (False,),
        "mask": (False, False, True) if takes("positives") else (False,),
        "references": references,
        "queue": (False, True) if takes("negatives") else (False,),
        **options,
    }
    plans: list[dict[str, Any]] = [{} for _ in range(BLOCK)]
    for name, values in columns.items():
        column = list(itertools.islice(itertools.cycle(values), BLOCK))
        chance.shuffle(column)
        for plan, value in zip(plans, column, strict=True):
            plan[name] = value
    # A policy is exercised only by a batch with a class of that kind.
    for kind, name in (("single", "no_positive"), ("one", "no_negative")):
        concerned = [plan for plan in plans if plan["classes"] == kind]
        for plan, value in zip(concerned, itertools.cycle(options.get(name, (None,))), strict=False):
            plan |= {name: value, "mask": False, "references": "none", "anchors": False}
    return plans


class _Drawing:
    """One batch that is being drawn.

    Args:
        claim: what the target computes.
        plan: the choices of ``_plan``.
        chance: the random generator.
    """

    def __init__(self, claim: Claim, plan: Mapping[str, Any], chance: random.Random) -> None:
        self.claim, self.plan, self.chance, self.entry = claim, plan, chance, LOSSES[claim.loss]
        n, dim = chance.randint(*plan["rows"]), chance.randint(*plan["columns"])
        even = self.entry.positives_by == "partners" or (plan["classes"] == "views" and n > 2)
        # A class of one beside a pair.
        self.n, self.dim = (n + n % 2 if even else max(n, 3) if plan["classes"] == "single" else n), dim
        self.centres: dict[int, list[float]] = {}

    def case(self, name: str) -> Case:
        """Draw the classes, the rows and the options."""
        classes = self._classes()
        arguments, further = self._arguments(classes)
        rows = {self.entry.embeddings[0]: self._rows(classes)}
        if self.entry.two_towers:
            rows["embeddings_b"] = self._rows(classes)
            if self.plan["queue"]:
                count = self.chance.randint(1, MOST_NEGATIVES)
                rows["negatives"] = self._rows([self.n + k for k in range(count)])
        elif further is not None:
            rows["ref_embeddings"] = self._rows(further)
        keywords = {name: self.plan[name] for name in self.entry.choices}
        low, high = map(math.log, TEMPERATURES)
        drawn = round(math.exp(self.chance.uniform(low, high)), 3)
        keywords["temperature"] = drawn if self.claim.temperature is None else self.claim.temperature
        base = self.plan["base_temperature"]
        keywords["base_temperature"] = round(drawn * self.chance.choice((0.5, 3.0)), 3) if base is True else base
        if self.plan["anchors"]:
            keywords["anchors"] = self._anchors()
        keywords = {key: value for key, value in keywords.items() if value != self.entry.keywords[key]}
        matrices = self._exact(rows)
        if "self_rows" in arguments:
            matrices["ref_embeddings"][arguments["self_rows"]] = matrices[self.entry.embeddings[0]]
        case = Case(name, self.claim.loss, matrices.pop(self.entry.embeddings[0]), arguments, keywords, matrices)
        return (scaled_to_logits(case) or case) if case.option("similarity") == "dot" else case

    def _sizes(self) -> list[int]:
        """The sizes of the classes; at least 2, except for a class of one."""
        kind, n, chance = self.plan["classes"], self.n, self.chance
        if kind == "one" or n < 4:
            return [1, n - 1] if kind == "single" else [n]
        if kind == "single":
            return [1, *self._unequal(n - 1)]
        if kind == "views":
            return [2 * size for size in self._unequal(n // 2, 1)]
        if kind == "balanced":
            equal = [k for k in range(2, n // 2 + 1) if n % k == 0]
            count = chance.choice(equal or range(2, n // 2 + 1))
            return [len(range(k, n, count)) for k in range(count)]
        return self._unequal(n)

    def _unequal(self, n: int, least: int = 2) -> list[int]:
        """Divide rows into at least two classes, if that is possible, of usually unequal sizes."""
        fewest = 2 if n >= 2 * least else 1
        count = self.chance.randint(fewest, max(fewest, n // (2 * least)))
        sizes = [least] * count
        for _ in range(n - least * count):
            sizes[min(self.chance.randrange(count), self.chance.randrange(count))] += 1
        return sizes

    def _classes(self) -> list[int]:
        """The class of every row, in the layout of the batch."""
        if self.entry.two_towers:
            return list(range(self.n))
        sizes = [2] * (self.n // 2) if self.entry.positives_by == "partners" else self._sizes()
        # The first of two numbers is the place in the class, the second is the class.
        members = [(place, k) for k, size in enumerate(sizes) for place in range(size)]
        if self.plan["layout"] == "stacked":
            members.sort()
        elif self.plan["layout"] == "shuffled":
            self.chance.shuffle(members)
        return [k for _, k in members]

    def _arguments(self, classes: Sequence[int]) -> tuple[dict[str, Any], list[int] | None]:
        """The arguments that give the positives, and the classes of the references if there are any."""
        chance, n = self.chance, self.n
        if self.entry.positives_by == "towers":
            return {}, None
        if self.entry.positives_by == "pairs":
            pairs = [pair for pair in itertools.permutations(range(n), 2) if classes[pair[0]] == classes[pair[1]]]
            chance.shuffle(pairs)
            return {"positive_pairs": pairs[: -(-3 * len(pairs) // 4)] if self.plan["directed"] else pairs}, None
        arguments: dict[str, Any] = {}
        further: list[int] | None = None
        if self.plan["references"] == "own":
            # The references are the rows of the batch and some more, in random order.
            own = chance.sample(range(n + chance.randint(0, MOST_NEGATIVES)), n)
            further = [chance.choice(classes) for _ in range(max(own) + 1)]
            for row, place in enumerate(own):
                further[place] = classes[row]
            arguments["self_rows"] = own
        elif self.plan["references"] == "others":
            further = [*dict.fromkeys(classes), *(chance.choice(classes) for _ in range(chance.randint(0, n)))]
            chance.shuffle(further)
        if self.entry.positives_by == "partners":
            own = arguments.get("self_rows", range(n))
            if self.plan["references"] == "others":
                assert further is not None
                return {"partners": [further.index(k) for k in classes]}, further
            mates = [next(j for j in range(n) if j != i and classes[j] == classes[i]) for i in range(n)]
            return {"partners": [own[j] for j in mates], **arguments}, further
        if self.plan["mask"]:
            return {"positives": self._mask(arguments.get("self_rows"), further), **arguments}, further
        names = chance.sample(range(max(8, max(classes) + 1)), max(classes) + 1)
        arguments["labels"] = [names[k] for k in classes]
        if further is not None:
            arguments["ref_labels"] = [names[k] for k in further]
        return arguments, further

    def _mask(self, own: Sequence[int] | None, further: Sequence[int] | None) -> list[list[bool]]:
        """A mask in which every row has a positive: symmetric or not within the batch, any if there are references."""
        chance, n = self.chance, self.n
        m = n if further is None else len(further)
        mask = [[chance.random() < 0.3 for _ in range(m)] for _ in range(n)]
        for i in range(n):
            itself = own[i] if own is not None else i if further is None else -1
            if itself >= 0:
                mask[i][itself] = False
            others = [j for j in range(m) if j != itself]
            if not any(mask[i]) and others:
                mask[i][chance.choice(others)] = True
        if further is None and chance.random() < 0.5:
            mask = [[mask[i][j] or mask[j][i] for j in range(n)] for i in range(n)]
        return mask

    def _anchors(self) -> list[bool]:
        chosen = [self.chance.random() < 0.6 for _ in range(self.n)]
        chosen[self.chance.randrange(self.n)] = True
        return chosen

    def _rows(self, classes: Sequence[int]) -> list[list[float]]:
        """Gaussian rows, or rows near the centre of their class."""
        return [self._row(k) for k in classes]

    def _row(self, k: int) -> list[float]:
        noise = [self.chance.gauss(0.0, 1.0) for _ in range(self.dim)]
        if not self.plan["trained"]:
            return noise
        if k not in self.centres:
            self.centres[k] = [self.chance.gauss(0.0, 1.0) for _ in range(self.dim)]
        return [centre + SPREAD * x for centre, x in zip(self.centres[k], noise, strict=True)]

    def _exact(self, rows: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Matrix]:
        """Round rows to integers of 8 bits times a power of two, which under cosine can differ between rows."""
        largest = max(abs(x) for matrix in rows.values() for row in matrix for x in row)
        return {name: np.array(list(map(list, self._integers(matrix, largest)))) for name, matrix in rows.items()}

    def _integers(self, rows: Sequence[Sequence[float]], largest: float) -> Iterator[list[float]]:
        for row in rows:
            integers = [float(round(x / largest * SIGNIFICANT)) for x in row]
            if not any(integers):
                integers[0] = 1.0
            mixed = self.plan["mixed norms"] and self.plan["similarity"] == "cosine"
            size = self.chance.choice((-2, -1, 0, 1, 2)) if mixed else 0
            yield [math.ldexp(x, size - 7) for x in integers]
