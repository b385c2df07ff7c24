"""Every call of docs/names.md computes the loss that it is listed for, evaluated here as the papers write it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pairproof import fast
from pairproof.conformance.diagnose.identify import PUBLISHED, Identification, _published_names
from pairproof.conformance.suite.catalogue import LOSSES

TABLE = Path(__file__).parent.parent / "docs/names.md"
ROWS = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| ") and "`" in line]
CALLS = {name.split(",")[0]: call for name, _, call in (re.findall(r"[^|]+", row)[:3] for row in ROWS)}
CALLS = {name.strip(): call.strip(" `") for name, call in CALLS.items()}

GENERATOR = torch.Generator().manual_seed(16)
A, B, QUEUE = (torch.randn(n, 5, dtype=torch.float64, generator=GENERATOR) for n in (6, 6, 4))
Z, ITEMS = torch.cat([A, B]), torch.arange(6).repeat(2)
LABELS = torch.tensor([0, 1, 0, 2, 1, 0]).repeat(2)
LABELS_A, LABELS_B = LABELS[:6], torch.tensor([1, 2, 0, 0, 1, 2])
GIVEN = {"a": A, "b": B, "z": Z, "items": ITEMS, "labels": LABELS, "queue": QUEUE}
HARD = torch.randn(6, 2, 5, dtype=torch.float64, generator=GENERATOR)
GUIDE_A = torch.randn(6, 3, dtype=torch.float64, generator=GENERATOR)
GUIDE_B = GUIDE_A + torch.randn(6, 3, dtype=torch.float64, generator=GENERATOR)
GIVEN |= {"hard": HARD, "guide_a": GUIDE_A, "guide_b": GUIDE_B}
GIVEN |= {"labels_a": LABELS_A, "labels_b": LABELS_B}

SETS = [{0, 1}, {0}, {1, 2, 3}, {0, 1, 2}, {3}, {2, 3}] * 2
JACCARD = torch.tensor([[len(s & t) / len(s | t) for t in SETS] for s in SETS], dtype=torch.float64)
PROTOTYPES, TARGETS = QUEUE, torch.softmax(torch.randn(6, 4, dtype=torch.float64, generator=GENERATOR), dim=1)
TRIPLETS = [
    (0, 6, 1),
    (0, 6, 1),
    (0, 2, 3),
    (1, 4, 5),
    (4, 1, 3),
    (4, 7, 3),
    (4, 7, 3),
    (9, 3, 0),
    (5, 11, 7),
    (11, 0, 1),
]
"""The rows of anchors, positives and negatives of a miner; some pairs are chosen twice."""
CHOSEN = torch.zeros(2, 12, 12, dtype=torch.float64)
for _anchor, *_others in TRIPLETS:
    for _kind, _other in enumerate(_others):
        CHOSEN[_kind, _anchor, _other] += 1
GIVEN |= {"jaccard": JACCARD, "prototypes": PROTOTYPES, "targets": TARGETS}
GIVEN |= {"chosen_positives": CHOSEN[0], "chosen_negatives": CHOSEN[1]}


def exponentials(rows: Tensor, columns: Tensor, temperature: float) -> list[list[float]]:
    cosines = F.normalize(rows, dim=1) @ F.normalize(columns, dim=1).T
    found: list[list[float]] = (cosines / temperature).exp().tolist()
    return found


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def of_labels(labels: Tensor, temperature: float, value: Callable[[list[float], list[float]], float]) -> float:
    """The mean over the rows of a function of the exponentials of the positives and of the negatives."""
    e = exponentials(Z, Z, temperature)
    values = []
    for i, label in enumerate(labels.tolist()):
        others = [(e[i][j], other == label) for j, other in enumerate(labels.tolist()) if j != i]
        values.append(value([x for x, same in others if same], [x for x, same in others if not same]))
    return mean(values)


def hard(beta: float) -> float:
    def value(positives: list[float], negatives: list[float]) -> float:
        (positive,), n = positives, len(negatives)
        weights = [x**beta for x in negatives]
        reweighted = math.fsum(w * x for w, x in zip(weights, negatives, strict=True)) / mean(weights)
        mass = max((-0.1 * n * positive + reweighted) / 0.9, n * math.exp(-2))
        return -math.log(positive / (positive + mass))

    return of_labels(ITEMS, 0.5, value)


def dclw() -> float:
    e, cosines = exponentials(Z, Z, 0.1), exponentials(A, B, 0.5)
    weights = [2 - cosines[i][i] / mean([row[j] for j, row in enumerate(cosines)]) for i in range(6)] * 2
    values = []
    for i, item in enumerate(ITEMS.tolist()):
        p = (i + 6) % 12
        below = math.fsum(x for x, other in zip(e[i], ITEMS.tolist(), strict=True) if other != item)
        values.append(-weights[i] * math.log(e[i][p]) + math.log(below))
    return mean(values)


def of_towers(temperature: float) -> float:
    e = exponentials(A, B, temperature)
    return mean([-math.log(e[i][i] / sum(e[i])) for i in range(6)])


def several_positives() -> float:
    e, values = exponentials(A, B, 0.07), []
    for row, label in zip(e, LABELS_A.tolist(), strict=True):
        same = [x for x, other in zip(row, LABELS_B.tolist(), strict=True) if other == label]
        values.append(mean([-math.log(x / sum(row)) for x in same]))
    return mean(values)


def clip(temperature: float = 0.07) -> float:
    e = exponentials(A, B, temperature)
    back = mean([-math.log(e[i][i] / sum(row[i] for row in e)) for i in range(6)])
    return (of_towers(temperature) + back) / 2


def without_duplicates() -> float:
    """CLIP in which rows with the label of the anchor, except its partner, are not in the denominator."""
    e, labels, values = exponentials(A, B, 0.07), LABELS_A.tolist(), []
    for i in range(6):
        kept = [j for j in range(6) if j == i or labels[i] != labels[j]]
        values += [-math.log(e[i][i] / sum(e[i][j] for j in kept)), -math.log(e[i][i] / sum(e[j][i] for j in kept))]
    return mean(values)


def convirt() -> float:
    e = exponentials(A, B, 0.1)
    there = mean([-math.log(e[i][i] / sum(e[i])) for i in range(6)])
    back = mean([-math.log(e[i][i] / sum(row[i] for row in e)) for i in range(6)])
    return 0.75 * there + 0.25 * back


def moco() -> float:
    keys, queue = exponentials(A, B, 0.07), exponentials(A, QUEUE, 0.07)
    return mean([-math.log(keys[i][i] / (keys[i][i] + sum(queue[i]))) for i in range(6)])


def with_hard_negatives() -> float:
    e, of_hard = exponentials(A, B, 1 / 20), exponentials(A, HARD.flatten(0, 1), 1 / 20)
    return mean([-math.log(e[i][i] / (sum(e[i]) + sum(of_hard[i]))) for i in range(6)])


def gte() -> float:
    across, queries, documents = exponentials(A, B, 0.01), exponentials(A, A, 0.01), exponentials(B, B, 0.01)
    values = []
    for i in range(6):
        total = sum(across[i]) + sum(row[i] for row in across)
        total += sum(queries[i][j] + documents[i][j] for j in range(6) if j != i)
        values.append(-math.log(across[i][i] / total))
    return mean(values)


def gistembed() -> float:
    e = [exponentials(x, y, 0.01) for x, y in ((A, B), (A, A), (B, B))]
    guided = [exponentials(x, y, 1.0) for x, y in ((GUIDE_A, GUIDE_B), (GUIDE_A, GUIDE_A), (GUIDE_B, GUIDE_B))]
    values = []
    for i in range(6):
        others = [(k, j) for k in range(3) for j in range(6) if j != i]
        kept = [e[k][i][j] for k, j in others if not guided[k][i][j] > guided[0][i][i]]
        assert 0 < len(kept) <= len(others)
        values.append(-math.log(e[0][i][i] / (e[0][i][i] + sum(kept))))
    return mean(values)


def n_pairs() -> float:
    s = (A @ B.T).tolist()
    return mean([math.log(1 + sum(math.exp(s[i][j] - s[i][i]) for j in range(6) if j != i)) for i in range(6)])


def siglip() -> float:
    s = (F.normalize(A, dim=1) @ F.normalize(B, dim=1).T / 0.1 - 10).tolist()
    costs = [math.log1p(math.exp(-s[i][j] if i == j else s[i][j])) for i in range(6) for j in range(6)]
    return math.fsum(costs) / 6


def jaccard() -> float:
    e, values = exponentials(Z, Z, 0.07), []
    for i, row in enumerate(e):
        others = [j for j in range(12) if j != i]
        logs = {j: -math.log(row[j] / sum(row[k] for k in others)) for j in others}
        values.append(mean([JACCARD[i, j].item() * logs[j] for j in others if JACCARD[i, j] >= 0.3]))
    return mean(values)


def with_miner(loss: str, temperature: float) -> float:
    """The loss of pytorch-metric-learning with the triplets of a miner."""
    losses = pytest.importorskip("pytorch_metric_learning.losses", reason="pytorch-metric-learning is not installed")
    triplets = tuple(torch.tensor(rows) for rows in zip(*TRIPLETS, strict=True))
    return float(getattr(losses, loss)(temperature=temperature)(Z, LABELS, indices_tuple=triplets))


FORMULAS: dict[str, Callable[[], float]] = {
    "SimCLR": lambda: of_labels(ITEMS, 0.5, lambda p, n: -math.log(p[0] / sum(p + n))),
    "SupCon": lambda: of_labels(LABELS, 0.1, lambda p, n: mean([-math.log(x / sum(p + n)) for x in p])),
    "DCL": lambda: of_labels(ITEMS, 0.1, lambda p, n: -math.log(p[0]) + math.log(sum(n))),
    "DCLW": dclw,
    "SINCERE": lambda: of_labels(LABELS, 0.1, lambda p, n: mean([-math.log(x / (x + sum(n))) for x in p])),
    "SuNCEt": lambda: of_labels(LABELS, 0.1, lambda p, n: -math.log(sum(p) / sum(p + n))),
    "debiased": lambda: hard(0.0),
    "HCL": lambda: hard(1.0),
    "CLIP": clip,
    "CLIP without duplicate captions": without_duplicates,
    "ConVIRT": convirt,
    "SimCSE": lambda: of_towers(0.05),
    "MoCo": moco,
    "MultipleNegativesRankingLoss": with_hard_negatives,
    "MultipleNegativesSymmetricRankingLoss": lambda: clip(0.05),
    "GTE": gte,
    "GISTEmbed": gistembed,
    "InfoNCE": several_positives,
    "N-pairs": n_pairs,
    "MultiSupCon": jaccard,
    "cross-entropy with soft targets": lambda: float(F.cross_entropy(A @ PROTOTYPES.T, TARGETS)),
    "NTXentLoss": lambda: with_miner("NTXentLoss", 0.07),
    "SupConLoss": lambda: with_miner("SupConLoss", 0.1),
    "SigLIP": siglip,
}


@pytest.mark.parametrize("name", CALLS)
def test_call_computes_the_loss_of_the_paper(name: str) -> None:
    value = eval(CALLS[name], {**vars(fast), **GIVEN})  # the table is part of the repository
    assert float(value) == pytest.approx(FORMULAS[name](), rel=1e-12)


def test_every_name_has_a_formula() -> None:
    assert [*CALLS] == [*FORMULAS]


def arguments(published):
    """The embeddings, the targets and the other rows of the call of a published loss."""
    entry = LOSSES[published.loss]
    given = {"views": (A, B), "queue": (A, B), "hard": (A, B), "labels": (Z, LABELS)}[published.call]
    if not entry.two_towers and published.call == "views":
        given = (Z, fast.stacked_partners(len(Z)) if entry.targets == "partners" else ITEMS)
    return given, {"queue": {"negatives": QUEUE}, "hard": {"hard_negatives": HARD}}.get(published.call, {})


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda one: f"{one.name}-{one.call}")
def test_names_that_identify_reports_are_those_of_the_table(published) -> None:
    """The loss and the options of a name give the value of its call, which is at the temperature of the table."""
    entry, call = LOSSES[published.loss], CALLS[published.name]
    stated = re.search(r"temperature=([\d./ ]+)", call)
    temperature = eval(stated[1]) if stated else LOSSES[call.partition("_loss(")[0]].keywords["temperature"]
    assert published.temperature in (None, temperature)
    given, more = arguments(published)
    value = entry.fast(*given, **more, **published.options, temperature=temperature)
    if published.name.startswith("MultipleNegatives"):  # the call of the table may have hard negatives
        call = call.replace(", hard_negatives=hard", "").replace("(a, b", "(a, b, **more")
    assert float(value) == pytest.approx(float(eval(call, {**vars(fast), **GIVEN, "more": more})), rel=1e-12)


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda one: f"{one.name}-{one.call}")
def test_name_is_reported_only_for_options_that_give_the_value_of_the_published_loss(published) -> None:
    """Every other reduction, policy and base temperature has the name only if it changes nothing."""
    entry, (given, more) = LOSSES[published.loss], arguments(published)
    stored = {name: str(value) for name, value in published.options.items()}
    right = float(entry.fast(*given, **more, **published.options, temperature=0.2))
    for name in ("reduction", "no_positive", "base_temperature"):
        for option in entry.choices.get(name, (None, 0.07) if name in entry.keywords else ()):
            changed = {} if option == entry.default(name) else {name: option}
            value = entry.fast(*given, **more, **published.options, **changed, temperature=0.2)
            found = Identification("", "", loss=published.loss, options={**stored, **changed})
            found.temperature = published.temperature
            same = value.dim() == 0 and float(value) == pytest.approx(right, rel=1e-9)
            assert (published.name in _published_names(found, published.call)) == same, (name, option)
