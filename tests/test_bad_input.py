"""Bad input gives one clear error, the same in both packages, and never a silent NaN."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from pairproof import fast, reference
from pairproof.conformance.suite.catalogue import FAST_ONLY_KEYWORDS, IGNORED, LOSSES, TOWER_TARGETS, WEIGHTS, Loss
from pairproof.fast.engine import tiles_of
from tests.each import each

PACKAGES = {"reference": reference, "fast": fast}
EMBEDDINGS = np.array([[1.0, 0.5, -0.25], [0.75, 0.5, 0.125], [-0.5, 1.0, 0.25], [0.25, -1.0, 0.5]])
MATRICES = {
    "embeddings": EMBEDDINGS,
    "embeddings_a": EMBEDDINGS,
    "embeddings_b": EMBEDDINGS[::-1] + 0.125,
    "ref_embeddings": np.concatenate([EMBEDDINGS[1:] - 0.375, EMBEDDINGS[:2] * 2]),
    "negatives": np.concatenate([EMBEDDINGS + 0.625, EMBEDDINGS[2:] / 4]),
    "hard_negatives": EMBEDDINGS[[2, 3, 0, 1], None] - 0.125,
}
TARGETS = {
    "labels": np.array([0, 0, 1, 1]),
    "partners": np.array([1, 0, 3, 2]),
    "positive_pairs": np.array([[0, 1], [1, 0], [2, 3], [3, 2], [0, 1], [1, 0]]),
}
POSITIVES = np.array([[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]], dtype=bool)
ANCHORS = np.array([True, False, True, True])
REF_LABELS = np.array([0, 1, 1, 0, 2])
SELF_ROWS = np.array([3, -1, 0, -1])
REF_PARTNERS = np.array([0, 4, 1, 1])
REF_POSITIVES = np.array([[1, 0, 0, 1, 0], [1, 0, 0, 1, 0], [0, 1, 1, 0, 0], [0, 1, 1, 0, 0]], dtype=bool)
WEIGHTS_OF_PAIRS = np.array([[1, 1, 2, 1], [2, 1, 1, 1], [1, 1, 1, 0.5], [1, 0.25, 1, 1]])
NAN_IN_ROW_1 = np.array([[0], [np.nan], [0], [0]])
IN_RANGE = "numbers in the range 0 to 1e+10"
BATCH_TENSORS = (*TARGETS, "positives", "anchors", "ref_labels", "self_rows", *IGNORED, *WEIGHTS)
"""Arguments that belong to one batch, in addition to its matrices; all other keywords are options of a module."""


def forms(loss: Loss) -> tuple[str, ...]:
    """Return the forms of a call: "plain", and one per matrix that anchors may be contrasted with instead."""
    return ("plain", *loss.matrices)


def good_arguments(loss: Loss, form: str) -> dict[str, np.ndarray]:
    """Return valid arguments of the loss in this form: every array except the masks."""
    names = [*loss.embeddings, *([loss.targets] if loss.targets else [])]
    good: dict[str, np.ndarray] = {name: {**MATRICES, **TARGETS}[name] for name in names}
    if form in MATRICES:
        good[form] = MATRICES[form]
    if form == "ref_embeddings":
        further = {"ref_labels": REF_LABELS, "self_rows": SELF_ROWS}
        good |= {name: value for name, value in further.items() if name in loss.keywords}
        good |= {"partners": REF_PARTNERS} if loss.targets == "partners" else {}
    return good


def good_masks(loss: Loss, form: str) -> dict[str, np.ndarray]:
    """Return valid masks of the loss in this form."""
    masks = {"positives": REF_POSITIVES if form == "ref_embeddings" else POSITIVES, "anchors": ANCHORS}
    if form == "negatives":  # which take the place of the pairs of two towers
        masks = {}
    return {name: value for name, value in masks.items() if name in loss.keywords}


def arguments_of(loss: Loss) -> set[str]:
    """Return the names of the arguments that the functions of both packages take."""
    return {*loss.embeddings, *loss.keywords, *([loss.targets] if loss.targets else [])}


def needs_two_rows(loss: Loss) -> bool:
    """Return whether a batch without references needs two rows, because every row has another row as its partner."""
    return loss.positives_by == "partners"


@dataclasses.dataclass(frozen=True)
class Bad:
    """One bad call: the arguments that replace valid ones, and the error that it must give.

    The message is ``<argument>: expected <expected>``, as in the reference. ``arguments`` replace those of a valid call
    (None removes the target). ``losses``, ``forms`` and ``packages`` restrict where it applies.
    """

    title: str
    argument: str
    arguments: Mapping[str, Any]
    error: type[Exception]
    expected: str
    losses: Callable[[Loss], bool] = lambda _: True
    forms: Sequence[str] = ("plain", "ref_embeddings", "negatives", "hard_negatives")
    packages: Sequence[str] = ("reference", "fast")

    def applies(self, loss: Loss, form: str) -> bool:
        names = arguments_of(loss) | (set() if "reference" in self.packages else set(FAST_ONLY_KEYWORDS))
        return (
            form in self.forms
            and names.issuperset(self.arguments)
            and self.argument in names
            # Negatives take the place of the pairs of two towers.
            and not (form == "negatives" and self.arguments.keys() & {*TOWER_TARGETS, *IGNORED})
            # Adding a matrix to a form without it would make a call of another form.
            and (self.argument not in MATRICES or self.argument in good_arguments(loss, form))
            and self.losses(loss)
        )

    def message(self, package: str) -> str:
        """Return the complete message of the error in a package."""
        message = f"{self.argument}: expected {self.expected}"
        for pattern, wording in FAST_WORDING.items() if package == "fast" else ():
            message = re.sub(pattern, wording, message)
        return message


FAST_WORDING = {
    "an integer dtype, got object": "a tensor, got NoneType",
    r"^(\w+)(: expected an integer dtype, got )(float\w+)$": r"\1\2torch.\3; pass \1.long()",
    r"^(\w+)(: expected dtype bool, got )(\w+)$": r"\1\2torch.\3; pass \1.bool()",
    r"(got zeros in row \d+)$": r'\1; SupCon and NT-Xent accept such rows with zero_row="zero"',
    r"(dtype\b.* got )(\w+)$": r"\1torch.\2",
}
"""The only differences between the messages of the packages: types of arrays, names of dtypes, and hints for torch."""
NOT_LABELS = "; partners are row numbers: for labels use nt_xent_pairwise_loss or NTXentPairwiseLoss"
ROWS_NOT_ITEMS = "; stacked_partners and interleaved_partners take the number of rows, not of items"
LEARNED = "; to learn it, pass torch.exp(-log_scale) of a parameter log_scale, which is always positive"
PLAIN = ("plain",)
REFERENCES = ("ref_embeddings",)


def with_value(array: np.ndarray, index: tuple[int, ...], value: float) -> np.ndarray:
    changed = array.copy()
    changed[index] = value
    return changed


def only(*names: str) -> Callable[[Loss], bool]:
    return lambda loss: loss.name in names


def bad_values(argument: str, *rows: tuple[str, Any, type[Exception], str], **limits: Any) -> list[Bad]:
    """Return one row for each bad value of the argument: its title, the value, the error and what is expected."""
    return [Bad(title, argument, {argument: value}, error, text, **limits) for title, value, error, text in rows]


def matrices() -> list[Bad]:
    """Return bad matrices: all matrices have the same rules, and each message names its own matrix."""
    rows = []
    for name, good in MATRICES.items():
        if good.ndim == 3:
            rows += _hard_negatives(name, good)
            continue
        n, d = good.shape
        shape = {"ref_embeddings": "[M, D]", "negatives": "[K, D]"}.get(name, "[N, D]")
        views = "; flatten_views lays out [batch, views, dim] as rows" if name == "embeddings" else ""
        rows += bad_values(
            name,
            ("rank 1", good[0], ValueError, f"shape {shape}, got shape [3]"),
            ("rank 3", good[None], ValueError, f"shape {shape}, got shape [1, {n}, 3]{views}"),
            ("rank 4", good[None, None], ValueError, f"shape {shape}, got shape [1, 1, {n}, 3]"),
            ("rank 0", np.array(1.0), ValueError, f"shape {shape}, got shape []"),
            ("no columns", np.zeros((n, 0)), ValueError, f"at least 1 column, got shape [{n}, 0]"),
            ("integers", np.ones((n, d), dtype=np.int64), TypeError, "a floating dtype, got int64"),
            ("booleans", np.ones((n, d), dtype=bool), TypeError, "a floating dtype, got bool"),
        )
        for row, column, value in ((2, 1, math.nan), (3, 0, math.inf), (0, 2, -math.inf), (n - 1, 2, math.nan)):
            text = f"finite values, got NaN or infinity in row {row}"
            rows += bad_values(
                name, (f"{value} in row {row}", with_value(good, (row, column), value), ValueError, text)
            )
        for row, value in ((2, 0.0), (1, -0.0), (n - 1, 0.0)):
            text = f"no zero row under cosine similarity, got zeros in row {row}"
            arguments = {name: with_value(good, (row,), value), "similarity": "cosine"}
            rows.append(Bad(text, name, arguments, ValueError, text))
        for least, columns in itertools.product(("1 row", "2 rows"), (0, 3)):
            text = f"at least {least}, got shape [0, {columns}]"
            row = text, np.zeros((0, columns)), ValueError, text
            if least == "2 rows":
                rows += bad_values(name, row, losses=needs_two_rows, forms=PLAIN)
            else:
                rows += bad_values(name, row, losses=lambda loss: not needs_two_rows(loss))
                rows += bad_values(name, row, losses=needs_two_rows, forms=REFERENCES)
    for name, model in (("ref_embeddings", "embeddings"), ("negatives", "embeddings_a")):
        good = MATRICES[name]
        for other in (good[:, :1], good[:, :2], np.hstack([good, good])):
            text = f"3 columns as in {model}, got shape {list(other.shape)}"
            rows += bad_values(name, (text, other, ValueError, text))
    good = MATRICES["embeddings_b"]
    for other in (good[:3], np.vstack([good, good]), good[:1], good[:, :2], good.T):
        text = f"the shape of embeddings_a, [4, 3], got shape {list(other.shape)}"
        rows += bad_values("embeddings_b", (text, other, ValueError, text))
    return rows


def _hard_negatives(name: str, good: np.ndarray) -> list[Bad]:
    """Return bad hard negatives, [N, H, D]."""
    shapes = (good[0], good[:, 0], good[None], good[:3], np.vstack([good, good]), good[:, :0], np.array(1.0))
    texts = [(f"shape [4, H, 3], H >= 1, got shape {list(bad.shape)}", bad) for bad in shapes]
    rows = bad_values(name, *((text, bad, ValueError, text) for text, bad in texts))
    for other in (good[..., :1], good[..., :2]):
        text = f"3 columns as in embeddings_a, got shape {[4, other.shape[2]]}"
        rows += bad_values(name, (text, other, ValueError, text))
    for dtype in (np.int64, bool):
        text = f"a floating dtype, got {np.dtype(dtype)}"
        rows += bad_values(name, (text, np.ones_like(good, dtype=dtype), TypeError, text))
    for row, value in ((2, math.nan), (0, -math.inf)):
        text = f"finite values, got NaN or infinity in row {row}"
        rows += bad_values(name, (f"{value}", with_value(good, (row, 0, 1), value), ValueError, text))
    text = "no zero row under cosine similarity, got zeros in row 2"
    return [*rows, *bad_values(name, (text, with_value(good, (2,), 0.0), ValueError, text))]


def ranking() -> list[Bad]:
    """Return options of a ranking loss that do not fit each other."""
    alike = "\"joint\" with query_to_query or doc_to_doc, which have no positives, got 'per_direction'"
    chosen = [{"directions": f"query_to_doc+{name}"} for name in ("query_to_query", "doc_to_doc")]
    return [Bad(alike, "partition", {"partition": "per_direction", **more}, ValueError, alike) for more in chosen]


NOT_POSITIVE = (0.0, -0.5, math.nan, math.inf)


def temperatures(name: str) -> list[Bad]:
    numbers = [*NOT_POSITIVE, 0, 10**400]
    others = ["0.1", True, *([] if name == "base_temperature" else [None])]
    return bad_values(
        name,
        *((f"{value}"[:9], value, ValueError, f"a positive finite number, got {value}") for value in numbers),
        *(
            (f"{value}", value, ValueError, f"a number in the range 1e-10 to 1e+10, got {value}")
            for value in (1e-300, 9.9e-11, 1.1e10, 1e300)
        ),
        *((str(value), value, TypeError, f"a number, got {type(value).__name__}") for value in others),
        forms=PLAIN,
    )


def tensor_temperatures() -> list[Bad]:
    """Return bad tensors: only the temperature of ``fast`` may be a tensor, and it must be 0-dimensional."""
    scalar = "a number or a 0-dimensional tensor, got shape"
    rows = bad_values(
        "temperature",
        ("1-D tensor", torch.tensor([0.07]), ValueError, f"{scalar} [1]"),
        ("2-D tensor", torch.full((2, 2), 0.07), ValueError, f"{scalar} [2, 2]"),
        ("empty tensor", torch.empty(0), ValueError, f"{scalar} [0]"),
        ("tensor of integer", torch.tensor(1), TypeError, "a floating dtype, got int64"),
        ("tensor of bool", torch.tensor(True), TypeError, "a floating dtype, got bool"),
        ("complex tensor", torch.tensor(0.07 + 0j), TypeError, "a floating dtype, got complex64"),
        *(
            (
                f"{number} in a tensor",
                value,
                ValueError,
                f"a positive finite number, got {number}{LEARNED if number <= 0 else ''}",
            )
            for number in NOT_POSITIVE
            for value in (
                torch.tensor(number),
                torch.tensor(number, dtype=torch.bfloat16),
                torch.nn.Parameter(torch.tensor(number, dtype=torch.float64)),
            )
        ),
        forms=PLAIN,
        packages=("fast",),
    )
    for value in (torch.tensor(0.07), torch.full((2, 2), 0.07)):
        for name, packages in (("temperature", ("reference",)), ("base_temperature", Bad.packages)):
            row = (f"{value.ndim}-D tensor", value, TypeError, "a number, got Tensor")
            rows += bad_values(name, row, forms=PLAIN, packages=packages)
    return rows


def options() -> list[Bad]:
    """Return an unknown value of every option, and a value of the wrong type."""
    rows = []
    for loss in LOSSES.values():
        for keyword, allowed in loss.choices.items():
            wrong = ("True", 1, 0.0) if True in allowed else ("mystery", allowed[0].upper())
            for value in (*wrong, *([] if loss.keywords[keyword] is None else [None])):
                text = f"one of {', '.join(map(str, allowed))}, got {value!r}"
                rows += bad_values(keyword, (text, value, ValueError, text), losses=only(loss.name), forms=PLAIN)
    for value in ("mystery", "AUTO", None):
        text = f"one of auto, dense, tiled, exact, triton, got {value!r}"
        rows += bad_values("backend", (text, value, ValueError, text), packages=("fast",))
    rows += bad_values("no_negative", ("drop", "drop", ValueError, "one of zero, nan, got 'drop'"))
    text = "one of mean, sum, none, got 'mean_pairs'"
    losses = only(*(name for name, loss in LOSSES.items() if "mean_pairs" not in loss.choices["reduction"]))
    return rows + bad_values("reduction", ("mean_pairs", "mean_pairs", ValueError, text), losses=losses)


def targets() -> list[Bad]:
    """Return bad labels, positives, partners and pairs, with and without references."""
    labels, partners, pairs = TARGETS.values()
    label, partner = "one label per embedding, shape [4], got", "one partner per embedding, shape [4], got"
    both, mask = "exactly one of labels and positives, got", {"labels": None, "positives": POSITIVES}
    itself = "another row as partner, got row {} as partner of itself"
    rows = [
        *bad_values(
            "labels",
            ("too few", np.array([0, 0, 1]), ValueError, f"{label} shape [3]"),
            ("too many", np.array([0, 0, 1, 1, 2]), ValueError, f"{label} shape [5]"),
            ("none at all", labels[:0], ValueError, f"{label} shape [0]"),
            ("one row", labels[None], ValueError, f"{label} shape [1, 4]"),
            ("one column", labels[:, None], ValueError, f"{label} shape [4, 1]"),
            ("one-hot", np.eye(4, dtype=np.int64), ValueError, f"{label} shape [4, 4]"),
            ("floats", labels.astype(float), TypeError, "an integer dtype, got float64"),
            ("neither", None, ValueError, f"{both} neither"),
        ),
        Bad("both", "labels", mask | {"labels": labels}, ValueError, f"{both} both", forms=PLAIN),
        Bad("both", "labels", {"positives": REF_POSITIVES}, ValueError, f"{both} both", forms=REFERENCES),
        *bad_values(
            "partners",
            ("too few", partners[:3], ValueError, f"{partner} shape [3]"),
            ("one per item", np.array([1, 0]), ValueError, f"{partner} shape [2]{ROWS_NOT_ITEMS}"),
            ("2-D", partners[None], ValueError, f"{partner} shape [1, 4]"),
            ("floats", partners.astype(float), TypeError, "an integer dtype, got float64"),
            ("booleans", partners.astype(bool), TypeError, "an integer dtype, got bool"),
            ("None", None, TypeError, "an integer dtype, got object"),
        ),
        *bad_values(
            "partners",
            ("itself", np.array([1, 0, 2, 3]), ValueError, itself.format(2)),
            ("not mutual", np.array([1, 2, 3, 0]), ValueError, "mutual partners, got 1 in row 0 but 2 in row 1"),
            (
                "shared",
                np.array([1, 0, 0, 0]),
                ValueError,
                f"mutual partners, got 0 in row 2 but 1 in row 0{NOT_LABELS}",
            ),
            ("labels", np.array([0, 0, 1, 1]), ValueError, f"{itself.format(0)}{NOT_LABELS}"),
            (
                "labels of views",
                np.array([1, 0, 1, 0]),
                ValueError,
                f"mutual partners, got 1 in row 2 but 0 in row 1{NOT_LABELS}",
            ),
            (
                "labels out of range",
                np.array([7, 7, 8, 8]),
                ValueError,
                f"rows in the range 0 to 3, got 7 in row 0{NOT_LABELS}",
            ),
            forms=PLAIN,
        ),
        *bad_values(
            "partners",
            ("the anchor's own reference, row 0", with_value(REF_PARTNERS, (0,), 3), ValueError, itself.format(0)),
            ("the anchor's own reference, row 2", with_value(REF_PARTNERS, (2,), 0), ValueError, itself.format(2)),
            forms=REFERENCES,
        ),
        *bad_values(
            "positive_pairs",
            ("1-D", np.array([0, 1]), ValueError, "shape [M, 2], got shape [2]"),
            ("triples", np.array([[0, 1, 2]]), ValueError, "shape [M, 2], got shape [1, 3]"),
            ("floats", pairs.astype(float), TypeError, "an integer dtype, got float64"),
            ("booleans", np.eye(2, dtype=bool), TypeError, "an integer dtype, got bool"),
            ("None", None, TypeError, "an integer dtype, got object"),
        ),
    ]
    for forms, last, good in ((PLAIN, 3, partners), (REFERENCES, 4, REF_PARTNERS)):
        for row, value in ((2, 97), (0, -1), (2, last + 1)):
            text = f"rows in the range 0 to {last}, got {value} in row {row}"
            rows += bad_values("partners", (text, with_value(good, (row,), value), ValueError, text), forms=forms)
    for column, value, got in ((1, 97, "[1, 97]"), (0, -1, "[-1, 0]")):
        text = f"rows in the range 0 to 3, got {got} at position 5"
        rows += bad_values("positive_pairs", (text, with_value(pairs, (5, column), value), ValueError, text))
    for forms, shape, good, others in (
        (PLAIN, "one flag per pair, shape [4, 4], got shape", POSITIVES, (POSITIVES[:3], POSITIVES[0], REF_POSITIVES)),
        (
            REFERENCES,
            "one flag per pair, shape [4, 5], got shape",
            REF_POSITIVES,
            (POSITIVES, REF_POSITIVES.T, REF_POSITIVES[0]),
        ),
    ):
        without: dict[str, Any] = {"labels": None} | ({} if forms == PLAIN else {"ref_labels": None})
        given = [(value, ValueError, f"{shape} {list(value.shape)}") for value in others]
        given += [(good.astype(dtype), TypeError, f"dtype bool, got {dtype.__name__}") for dtype in DTYPES_OF_NUMBERS]
        rows += [Bad(text, "positives", without | {"positives": x}, e, text, forms=forms) for x, e, text in given]
    return rows


def within_one_batch(rows: list[Bad]) -> list[Bad]:
    """Limit the rows about positives to the losses of one batch; those of two towers have other rules."""
    targets = (*TARGETS, "positives", "ref_labels")
    return [
        dataclasses.replace(bad, losses=lambda loss: not loss.two_towers) if bad.argument in targets else bad
        for bad in rows
    ]


def targets_of_towers() -> list[Bad]:
    """Return bad partners, labels and positives of a loss of two towers."""
    labels, partners = TARGETS["labels"], TARGETS["partners"]
    label, partner = "one label per embedding, shape [4], got", "one partner per embedding, shape [4], got"
    ref_label = "one label per reference, shape [4], got"
    mask, several = "one flag per pair, shape [4, 4], got shape", "at most one of partners, labels and positives, got"
    rows = [
        *bad_values(
            "labels",
            ("too few", labels[:3], ValueError, f"{label} shape [3]"),
            ("one column", labels[:, None], ValueError, f"{label} shape [4, 1]"),
            ("floats", labels.astype(float), TypeError, "an integer dtype, got float64"),
        ),
        *bad_values(
            "partners",
            ("too few", partners[:3], ValueError, f"{partner} shape [3]"),
            ("2-D", partners[None], ValueError, f"{partner} shape [1, 4]"),
            ("floats", partners.astype(float), TypeError, "an integer dtype, got float64"),
            ("too large", np.array([0, 1, 4, 2]), ValueError, "rows in the range 0 to 3, got 4 in row 2"),
            ("negative", np.array([-1, 1, 3, 2]), ValueError, "rows in the range 0 to 3, got -1 in row 0"),
        ),
        *bad_values(
            "positives",
            ("too few rows", POSITIVES[:3], ValueError, f"{mask} [3, 4]"),
            ("too many columns", REF_POSITIVES, ValueError, f"{mask} [4, 5]"),
            ("integers", POSITIVES.astype(np.int64), TypeError, "dtype bool, got int64"),
        ),
        *bad_values("ref_labels", ("without labels", labels, ValueError, "labels with it, got none")),
    ]
    for argument, changes, expected in (
        ("ref_labels", {"ref_labels": labels, "partners": partners}, "labels with it, got partners"),
        ("ref_labels", {"ref_labels": labels[:3], "labels": labels}, f"{ref_label} shape [3]"),
        ("ref_labels", {"ref_labels": REF_LABELS, "labels": labels}, f"{ref_label} shape [5]"),
        ("partners", {"partners": partners, "labels": labels}, f"{several} partners and labels"),
        ("labels", {"positives": POSITIVES, "labels": labels}, f"{several} labels and positives"),
        ("partners", {"positives": POSITIVES, "partners": partners}, f"{several} partners and positives"),
    ):
        rows.append(Bad(expected, argument, changes, ValueError, expected))
    other = MATRICES["embeddings_b"][:, :2]
    text = f"3 columns as in embeddings_a, got shape {list(other.shape)}"
    rows.append(Bad(text, "embeddings_b", {"embeddings_b": other, "partners": partners}, ValueError, text))
    return [dataclasses.replace(bad, losses=lambda loss: loss.two_towers) for bad in rows]


def biases() -> list[Bad]:
    """Return bad biases: a number, or in ``fast`` a 0-dimensional tensor, in a range around 0."""
    where = "a number in the range -1e+10 to 1e+10, got"
    scalar = "a number or a 0-dimensional tensor, got shape"
    numbers = (math.nan, math.inf, -math.inf, 1.1e10, -1e300)
    return [
        *bad_values("bias", *((str(value), value, ValueError, f"{where} {value}") for value in numbers)),
        *bad_values(
            "bias",
            *((str(v), v, TypeError, f"a number, got {type(v).__name__}") for v in ("-10", True, None)),
        ),
        *bad_values(
            "bias",
            ("1-D tensor", torch.tensor([-10.0]), ValueError, f"{scalar} [1]"),
            ("tensor of integer", torch.tensor(-10), TypeError, "a floating dtype, got int64"),
            ("NaN in a tensor", torch.tensor(math.nan), ValueError, f"{where} nan"),
            ("infinity in a tensor", torch.tensor(math.inf), ValueError, f"{where} inf"),
            packages=("fast",),
        ),
        *bad_values(
            "bias",
            ("0-D tensor", torch.tensor(-10.0), TypeError, "a number, got Tensor"),
            packages=("reference",),
        ),
    ]


def numbers_in_a_range() -> list[Bad]:
    """Return bad values of the options that are numbers and never tensors."""
    rows = []
    for name, words, values in (
        ("tau_plus", "0 to 1, 1 excluded", (math.nan, math.inf, -0.1, 1.0, 2)),
        ("beta", "0 to 1e+10", (math.nan, math.inf, -1e-9, 1.1e10)),
        ("hardness_strength", "0 to 1e+10", (math.nan, math.inf, -1e-9, 1.1e10)),
        ("sigma", "1e-10 to 1e+10", (math.nan, math.inf, -1.0, 0, 9e-11, 1.1e10)),
    ):
        where = f"a number in the range {words}, got"
        rows += bad_values(name, *((f"{value}", value, ValueError, f"{where} {value}") for value in values))
        others = ("0.1", True, None, torch.tensor(0.1))
        rows += bad_values(name, *((f"{x}", x, TypeError, f"a number, got {type(x).__name__}") for x in others))
    return rows


DTYPES_OF_NUMBERS = (np.int64, np.float64)
BEFORE = "ref_embeddings with it, got none"
REF_LABEL, SELF_ROW = "one label per reference, shape [5], got", "one row per embedding, shape [4], got"
REF_ID = "one id per reference, shape [5], got"
TABLE = [
    *biases(),
    *numbers_in_a_range(),
    *matrices(),
    Bad(
        "one row",
        "embeddings",
        {"embeddings": EMBEDDINGS[:1]},
        ValueError,
        "at least 2 rows, got shape [1, 3]",
        losses=needs_two_rows,
        forms=PLAIN,
    ),
    *bad_values("ref_labels", ("without references", REF_LABELS, ValueError, BEFORE), forms=PLAIN),
    *bad_values("self_rows", ("without references", SELF_ROWS, ValueError, BEFORE), forms=PLAIN),
    Bad("first", "ref_labels", {"ref_labels": REF_LABELS, "self_rows": SELF_ROWS}, ValueError, BEFORE, forms=PLAIN),
    *bad_values(
        "ref_labels",
        ("missing", None, ValueError, f"{REF_LABEL} none"),
        ("too few", REF_LABELS[:4], ValueError, f"{REF_LABEL} shape [4]"),
        ("too many", np.arange(6), ValueError, f"{REF_LABEL} shape [6]"),
        ("2-D", REF_LABELS[None], ValueError, f"{REF_LABEL} shape [1, 5]"),
        ("none at all", REF_LABELS[:0], ValueError, f"{REF_LABEL} shape [0]"),
        ("floats", REF_LABELS.astype(float), TypeError, "an integer dtype, got float64"),
        forms=REFERENCES,
    ),
    Bad(
        "before ref_labels",
        "ref_embeddings",
        {"ref_embeddings": np.ones((5, 3), dtype=int), "ref_labels": np.array([0.5])},
        TypeError,
        "a floating dtype, got int64",
    ),
    Bad(
        # ``fast`` checks self_rows before labels, so it reports self_rows.
        "before self_rows",
        "ref_labels",
        {"ref_labels": np.arange(6), "self_rows": np.array([0.5])},
        ValueError,
        f"{REF_LABEL} shape [6]",
        forms=REFERENCES,
        packages=("reference",),
    ),
    Bad(
        "with positives",
        "ref_labels",
        {"labels": None, "positives": REF_POSITIVES},
        ValueError,
        "labels with it, got positives",
        forms=REFERENCES,
    ),
    *bad_values(
        "self_rows",
        ("too few", SELF_ROWS[:3], ValueError, f"{SELF_ROW} shape [3]"),
        ("one per reference", np.arange(5), ValueError, f"{SELF_ROW} shape [5]"),
        ("2-D", SELF_ROWS[None], ValueError, f"{SELF_ROW} shape [1, 4]"),
        ("one for all", np.array(-1), ValueError, f"{SELF_ROW} shape []"),
        ("floats", SELF_ROWS.astype(float), TypeError, "an integer dtype, got float64"),
        ("booleans", np.zeros(4, dtype=bool), TypeError, "an integer dtype, got bool"),
        ("too large", with_value(SELF_ROWS, (1,), 5), ValueError, "rows in the range -1 to 4, got 5 in row 1"),
        ("negative", with_value(SELF_ROWS, (3,), -2), ValueError, "rows in the range -1 to 4, got -2 in row 3"),
        forms=REFERENCES,
    ),
    *targets(),
    *bad_values(
        "anchors",
        ("too few", ANCHORS[:3], ValueError, "one flag per embedding, shape [4], got shape [3]"),
        ("one row", ANCHORS[None], ValueError, "one flag per embedding, shape [4], got shape [1, 4]"),
        ("one column", ANCHORS[:, None], ValueError, "one flag per embedding, shape [4], got shape [4, 1]"),
        ("row numbers", np.array([0, 2, 3, 1]), TypeError, "dtype bool, got int64"),
        ("floats", np.ones(4), TypeError, "dtype bool, got float64"),
    ),
    *bad_values(
        "ignored",
        ("too few columns", POSITIVES[:, :3], ValueError, "one flag per pair, shape [4, 4], got shape [4, 3]"),
        ("one row", POSITIVES[0], ValueError, "one flag per pair, shape [4, 4], got shape [4]"),
        ("integers", POSITIVES.astype(int), TypeError, "dtype bool, got int64"),
        forms=PLAIN,
    ),
    *bad_values(
        "ignored",
        ("partners", POSITIVES, ValueError, "False for every row and its positive, got True in row 0"),
        forms=PLAIN,
        losses=lambda loss: loss.positives_by == "partners",
    ),
    *bad_values(
        "ignored",
        ("pairs of the batch", POSITIVES, ValueError, "one flag per pair, shape [4, 5], got shape [4, 4]"),
        forms=REFERENCES,
    ),
    *bad_values(
        "ignored_ids",
        ("too few", np.arange(3), ValueError, "one id per embedding, shape [4], got shape [3]"),
        ("one column", np.ones((4, 1), dtype=int), ValueError, "one id per embedding, shape [4], got shape [4, 1]"),
        ("floats", np.ones(4), TypeError, "an integer dtype, got float64"),
        forms=PLAIN,
    ),
    *(
        row
        for name in ("positive_weights", "negative_weights")
        for row in bad_values(
            name,
            ("too few columns", np.ones((4, 3)), ValueError, "one weight per pair, shape [4, 4], got shape [4, 3]"),
            ("one row", np.ones(4), ValueError, "one weight per pair, shape [4, 4], got shape [4]"),
            ("flags", POSITIVES, TypeError, "dtype float32 or float64, got bool"),
            ("integers", POSITIVES.astype(int), TypeError, "dtype float32 or float64, got int64"),
            ("half precision", np.ones((4, 4), dtype=np.float16), TypeError, "dtype float32 or float64, got float16"),
            ("negative", WEIGHTS_OF_PAIRS - 1, ValueError, f"{IN_RANGE}, got -0.5 in row 2"),
            ("NaN", WEIGHTS_OF_PAIRS + NAN_IN_ROW_1, ValueError, f"{IN_RANGE}, got nan in row 1"),
            ("infinite", WEIGHTS_OF_PAIRS * np.inf, ValueError, f"{IN_RANGE}, got inf in row 0"),
            forms=PLAIN,
        )
    ),
    *bad_values(
        "positive_weights",
        ("pairs of the batch", np.ones((4, 4)), ValueError, "one weight per pair, shape [4, 5], got shape [4, 4]"),
        forms=REFERENCES,
    ),
    *bad_values(
        "anchor_weights",
        ("too few", np.ones(3), ValueError, "one weight per embedding, shape [4], got shape [3]"),
        ("one column", np.ones((4, 1)), ValueError, "one weight per embedding, shape [4], got shape [4, 1]"),
        ("flags", ANCHORS, TypeError, "dtype float32 or float64, got bool"),
        ("integers", np.arange(4), TypeError, "dtype float32 or float64, got int64"),
        ("negative", np.array([1.0, 0.0, -0.25, -2.0]), ValueError, f"{IN_RANGE}, got -0.25 in row 2"),
        ("NaN", np.array([1.0, np.nan, 1.0, 1.0]), ValueError, f"{IN_RANGE}, got nan in row 1"),
        ("infinite", np.array([1.0, 1.0, 1.0, np.inf]), ValueError, f"{IN_RANGE}, got inf in row 3"),
        ("too large", np.array([2e10, 1.0, 1.0, 1.0]), ValueError, f"{IN_RANGE}, got 2e+10 in row 0"),
    ),
    *bad_values(
        "ref_ignored_ids",
        ("without references", np.arange(5), ValueError, BEFORE),
        forms=PLAIN,
        losses=lambda loss: not loss.two_towers,
    ),
    *bad_values(
        "ref_ignored_ids",
        ("without ids of the rows", np.arange(4), ValueError, "ignored_ids with it, got none"),
        forms=PLAIN,
        losses=lambda loss: loss.two_towers,
    ),
    *bad_values(
        "direction_weights",
        ("number", 0.75, TypeError, "a pair of numbers, got float"),
        ("three", (0.5, 0.25, 0.25), ValueError, "a pair of numbers, got 3 entries"),
        ("text", ("0.75", "0.25"), TypeError, "a number, got str"),
        ("truth", (True, False), TypeError, "a number, got bool"),
        ("negative", (0.75, -0.25), ValueError, "a number in the range 0 to 1e+10, got -0.25"),
        ("NaN", (math.nan, 0.25), ValueError, "a number in the range 0 to 1e+10, got nan"),
        forms=PLAIN,
    ),
    *[
        Bad(title, "direction_weights", {"direction_weights": (0.75, 0.25), **given}, ValueError, text, forms=(form,))
        for title, given, form in (
            ("one direction", {"direction": "a_to_b"}, "plain"),
            ("default direction of negatives", {}, "negatives"),
        )
        for text in ("direction 'both' with them, got 'a_to_b'",)
    ],
    *bad_values(
        "ref_ignored_ids",
        ("without ids of the rows", np.arange(5), ValueError, "ignored_ids with it, got none"),
        forms=REFERENCES,
    ),
    *[
        Bad(title, "ref_ignored_ids", {"ignored_ids": np.arange(4), **given}, error, text, forms=REFERENCES)
        for title, given, error, text in (
            ("missing", {}, ValueError, f"{REF_ID} none"),
            ("too few", {"ref_ignored_ids": np.arange(4)}, ValueError, f"{REF_ID} shape [4]"),
            ("floats", {"ref_ignored_ids": np.ones(5)}, TypeError, "an integer dtype, got float64"),
        )
    ],
    *tensor_temperatures(),
    *temperatures("temperature"),
    *temperatures("base_temperature"),
    *options(),
    *ranking(),
]

BAD_CALLS = [
    (bad, loss, form)
    for bad, loss in itertools.product([*within_one_batch(TABLE), *targets_of_towers()], LOSSES.values())
    for form in forms(loss)
    if bad.applies(loss, form)
]


def bad_calls(package: str, loss: Loss, form: str) -> list[Bad]:
    return [bad for bad, where, how in BAD_CALLS if (where, how) == (loss, form) and package in bad.packages]


FORMS = [pytest.param(loss, form, id=f"{loss.name}-{form}") for loss in LOSSES.values() for form in forms(loss)]
WITH_ANCHORS = [row for row in FORMS if "anchors" in row.values[0].keywords]


def for_package(package: str, value: Any) -> Any:
    """Return the value as the package takes it: numpy arrays become tensors for ``fast``."""
    return torch.from_numpy(value.copy()) if package == "fast" and isinstance(value, np.ndarray) else value


def call(package: str, loss: Loss, form: str = "plain", **changes: Any) -> Any:
    """Call the loss of a package with valid arguments of the form, some of them replaced by ``changes``."""
    arguments = {name: for_package(package, value) for name, value in (good_arguments(loss, form) | changes).items()}
    result = getattr(PACKAGES[package], loss.function)(**arguments)
    return result.loss if package == "reference" else result


def assert_message(error: BaseException, argument: str, phrases: Sequence[str]) -> None:
    message = str(error)
    assert message.startswith(f"{argument}: expected "), message
    assert "\n" not in message
    for phrase in phrases:
        assert phrase in message, f"{phrase!r} is not in: {message}"


@each("package", PACKAGES)
@each(("loss", "form"), FORMS)
def test_good_calls_are_accepted(package: str, loss: Loss, form: str) -> None:
    """A row of the table is bad only because of the arguments that it changes."""
    masks = good_masks(loss, form)
    anchors = {name: mask for name, mask in masks.items() if name == "anchors"}
    assert math.isfinite(float(call(package, loss, form, **anchors)))
    if "positives" in masks:
        labels = {name: None for name in good_arguments(loss, form) if "labels" in name}
        assert math.isfinite(float(call(package, loss, form, **labels, **masks)))


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(("loss", "form"), FORMS)
def test_bad_call_gives_one_clear_error(package: str, loss: Loss, form: str) -> None:
    @each("bad", bad_calls(package, loss, form), ids=lambda bad: f"{bad.argument}: {bad.title}")
    def check(bad: Bad) -> None:
        with pytest.raises(bad.error) as caught:
            call(package, loss, form, **bad.arguments)
        assert type(caught.value) is bad.error
        assert str(caught.value) == bad.message(package)

    check()


@each("package", PACKAGES)
@each(("loss", "form"), [form for form in FORMS if "dot" in form.values[0].choices["similarity"]])
def test_zero_row_is_accepted_under_dot(package: str, loss: Loss, form: str) -> None:
    for name in matrices_of(loss, form):
        matrix = for_package(package, with_value(MATRICES[name], (1,), 0.0))
        if package == "reference":
            assert math.isfinite(call(package, loss, form, similarity="dot", **{name: matrix}))
        else:
            value = call(package, loss, form, similarity="dot", **{name: matrix.requires_grad_()})
            value.backward()
            assert bool(value.isfinite())
            assert bool(matrix.grad.isfinite().all())


@each("argument", sorted({"backend"}.union(*(arguments_of(loss) for loss in LOSSES.values()))))
def test_table_covers_every_loss_that_has_the_argument(argument: str) -> None:
    takes = {loss.name for loss in LOSSES.values() if argument in {*arguments_of(loss), *FAST_ONLY_KEYWORDS}}
    assert takes
    assert {loss.name for bad, loss, _ in BAD_CALLS if bad.argument == argument} == takes


@each(("loss", "form"), FORMS)
def test_table_covers_every_array_in_every_form(loss: Loss, form: str) -> None:
    arrays = {*good_arguments(loss, form), *good_masks(loss, form)}
    assert arrays <= {bad.argument for bad, where, how in BAD_CALLS if (where, how) == (loss, form)}


@each("package", PACKAGES)
@each("loss", LOSSES.values(), ids=LOSSES)
def test_keywords_of_other_losses_are_rejected(package: str, loss: Loss) -> None:
    every = set(FAST_ONLY_KEYWORDS).union(*(other.keywords for other in LOSSES.values()))
    unknown = every - arguments_of(loss) - (set(FAST_ONLY_KEYWORDS) if package == "fast" else set())
    assert unknown
    for name in sorted(unknown):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            call(package, loss, **{name: None})


def good_tensor_arguments(loss: Loss, form: str, name: str) -> dict[str, Any]:
    """Return valid arguments of the form as tensors, including ``name``."""
    good = good_arguments(loss, form)
    masks = good_masks(loss, form)
    if name in masks:
        good[name] = masks[name]
    if name == "positives":
        good = {key: value for key, value in good.items() if key not in ("labels", "ref_labels")}
    return {key: for_package("fast", value) for key, value in good.items()}


def matrices_of(loss: Loss, form: str) -> list[str]:
    return [name for name in good_arguments(loss, form) if name in MATRICES]


EXTREME: list[tuple[type[np.floating[Any]], str, float, float]] = [
    (np.float32, "cosine", 1e-8, 1.0),
    (np.float32, "cosine", 1e-5, 1.0),
    (np.float32, "cosine", 1e10, 1e38),
    (np.float64, "cosine", 0.1, 1e300),
    (np.float32, "dot", 0.1, 1e19),
    (np.float32, "dot", 1.0, 1e38),
    (np.float64, "dot", 1.0, 1e153),
    (np.float64, "dot", 0.1, 1e154),
    (np.float64, "dot", 1.0, 1e300),
]
"""Dtypes, similarities, temperatures and factors of the rows that are far outside the usual range."""


@pytest.mark.parametrize(("loss", "form"), FORMS)
@pytest.mark.quick(8)
def test_extreme_rows_and_temperatures_give_the_same_result_in_both_packages(loss: Loss, form: str) -> None:
    """The right value, rounded to the returned dtype, or the same error."""
    extreme = [case for case in EXTREME if case[1] in loss.choices["similarity"]]
    for (dtype, similarity, temperature, factor), backend in itertools.product(extreme, ("auto", "tiled", "exact")):
        rows = {name: (MATRICES[name] * factor).astype(dtype) for name in matrices_of(loss, form)}
        options = {**rows, "similarity": similarity, "temperature": temperature}
        title = f"{np.dtype(dtype)}, {similarity}, temperature {temperature}, factor {factor}, {backend}"
        try:
            expected = float(call("reference", loss, form, **options))
        except ValueError as error:
            assert_message(error, "similarity", ["exceed the range of float64"])
            with pytest.raises(ValueError, match=f"^{re.escape(str(error))}$"):
                call("fast", loss, form, **options, backend=backend)
            continue
        with tiles_of(2):
            found = float(call("fast", loss, form, **options, backend=backend))
        too_large = dtype == np.float32 and expected > float(np.finfo(np.float32).max)
        true = math.inf if too_large else expected
        assert found == pytest.approx(true, rel=1e-6), title


def tensor_rows(names: Callable[[Loss, str], Sequence[str]]) -> list[Any]:
    return [
        pytest.param(loss, form, name, id=f"{loss.name}-{form}-{name}")
        for loss in LOSSES.values()
        for form in forms(loss)
        for name in names(loss, form)
    ]


def tensors_of(loss: Loss, form: str) -> list[str]:
    return [*good_arguments(loss, form), *good_masks(loss, form)]


@each(("loss", "form", "name"), tensor_rows(tensors_of))
def test_fast_rejects_non_tensors(loss: Loss, form: str, name: str) -> None:
    arguments = good_tensor_arguments(loss, form, name)
    for value in (arguments[name].tolist(), arguments[name].numpy()):
        with pytest.raises(TypeError) as caught:
            getattr(fast, loss.function)(**arguments | {name: value})
        assert_message(caught.value, name, ("tensor", f"{type(value).__name__}; pass torch.as_tensor({name})"))
    with pytest.raises(TypeError) as caught:
        getattr(fast, loss.function)(**arguments | {name: [arguments[name], arguments[name]]})
    assert str(caught.value) == f"{name}: expected a tensor, got list"


@each(("loss", "form", "name"), tensor_rows(tensors_of))
def test_fast_rejects_sparse_tensors(loss: Loss, form: str, name: str) -> None:
    arguments = good_tensor_arguments(loss, form, name)
    with pytest.raises(TypeError) as caught:
        getattr(fast, loss.function)(**arguments | {name: arguments[name].to_sparse()})
    hint = f"pass {name}.to_dense()"
    assert str(caught.value) == f"{name}: expected a dense tensor, got layout torch.sparse_coo; {hint}"


def test_one_hot_labels_of_a_floating_dtype_are_not_told_to_be_converted() -> None:
    with pytest.raises(TypeError, match=r"^labels: expected an integer dtype, got torch.float32$"):
        fast.supcon_loss(torch.tensor(EMBEDDINGS), torch.eye(4))


@each(("loss", "form", "name"), tensor_rows(lambda loss, form: tensors_of(loss, form)[1:]))
def test_fast_rejects_mixed_devices(loss: Loss, form: str, name: str) -> None:
    arguments = good_tensor_arguments(loss, form, name)
    with pytest.raises(ValueError, match="device") as caught:
        getattr(fast, loss.function)(**arguments | {name: arguments[name].to("meta")})
    assert_message(caught.value, name, ("device", "cpu", "meta"))


@each("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@each(("loss", "form", "name"), tensor_rows(lambda loss, form: matrices_of(loss, form)[1:]))
def test_fast_rejects_mixed_dtypes(loss: Loss, form: str, name: str, dtype: torch.dtype) -> None:
    arguments = good_tensor_arguments(loss, form, name)
    with pytest.raises(TypeError) as caught:
        getattr(fast, loss.function)(**arguments | {name: arguments[name].to(dtype)})
    assert_message(caught.value, name, ("dtype", loss.embeddings[0], "float64", str(dtype)))


@each(("loss", "form", "name"), tensor_rows(matrices_of))
def test_fast_rejects_complex_embeddings(loss: Loss, form: str, name: str) -> None:
    with pytest.raises(TypeError) as caught:
        call("fast", loss, form, **{name: MATRICES[name].astype(np.complex128)})
    assert_message(caught.value, name, ("floating", "complex128"))


@each(("loss", "form", "name"), tensor_rows(matrices_of))
@each("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_fast_rejects_non_finite_values_in_every_dtype(loss: Loss, form: str, name: str, dtype: torch.dtype) -> None:
    arguments = good_tensor_arguments(loss, form, name)
    matrices = {key: arguments[key].to(dtype) for key in matrices_of(loss, form)}
    matrices[name][1, 0] = math.inf
    with pytest.raises(ValueError, match="finite") as caught:
        getattr(fast, loss.function)(**arguments | matrices)
    assert_message(caught.value, name, ("finite", "row 1"))


@pytest.mark.parametrize(("loss", "form"), FORMS)
@pytest.mark.quick(8)
def test_modules_reject_what_their_functions_reject(loss: Loss, form: str) -> None:
    """The messages are the same. A bad option is rejected when the module is created, before any batch."""

    @each("bad", bad_calls("fast", loss, form), ids=lambda bad: f"{bad.argument}: {bad.title}")
    def check(bad: Bad) -> None:
        arguments = {
            key: for_package("fast", value) for key, value in (good_arguments(loss, form) | bad.arguments).items()
        }
        batch = {key: value for key, value in arguments.items() if key in MATRICES or key in BATCH_TENSORS}
        options = {key: value for key, value in arguments.items() if key not in batch}
        module = getattr(fast, loss.module_class)
        # The default direction depends on the batch, on whether it has negatives.
        if bad.argument in options and bad.title != "default direction of negatives":
            with pytest.raises(bad.error) as from_module:
                module(**options)
        else:
            made = module(**options)
            with pytest.raises(bad.error) as from_module:
                made(**batch)
        assert str(from_module.value) == bad.message("fast")

    check()


LAYOUT_TABLE: list[tuple[str, tuple[Any, ...], type[Exception], str, tuple[str, ...]]] = [
    ("interleaved_partners", (5,), ValueError, "n", ("even number of rows, two for each item", "5")),
    ("interleaved_partners", (0,), ValueError, "n", ("even", "0")),
    ("interleaved_partners", (-2,), ValueError, "n", ("even", "-2")),
    ("interleaved_partners", (4.0,), TypeError, "n", ("integer", "float")),
    ("stacked_partners", (5,), ValueError, "n", ("even number of rows, two for each item", "5")),
    ("stacked_partners", (1,), ValueError, "n", ("even", "1")),
    ("stacked_partners", (0,), ValueError, "n", ("even", "0")),
    ("stacked_partners", (4.0,), TypeError, "n", ("integer", "float")),
    ("flatten_views", (np.zeros((2, 2, 3)), "mystery"), ValueError, "layout", ("stacked", "interleaved", "'mystery'")),
    ("flatten_views", (np.zeros((2, 3)),), ValueError, "features", ("[2, 3]",)),
    ("split_views", (EMBEDDINGS, 2, "mystery"), ValueError, "layout", ("stacked", "interleaved", "'mystery'")),
    ("split_views", (EMBEDDINGS, 3), ValueError, "n_views", ("4", "3")),
    ("split_views", (EMBEDDINGS, 0), ValueError, "n_views", ("0",)),
    ("split_views", (EMBEDDINGS, 2.0), TypeError, "n_views", ("integer", "float")),
    ("split_views", (EMBEDDINGS[0], 2), ValueError, "embeddings", ("expected shape", "[3]")),
    ("repeat_labels", (TARGETS["labels"], 2, "mystery"), ValueError, "layout", ("stacked", "interleaved", "'mystery'")),
    ("repeat_labels", (TARGETS["labels"], 0), ValueError, "n_views", ("0",)),
    ("repeat_labels", (TARGETS["labels"], 2.0), TypeError, "n_views", ("integer", "float")),
    ("repeat_labels", (np.array([[0, 1]]), 2), ValueError, "labels", ("[1, 2]",)),
]


@each("package", PACKAGES)
@each(
    ("function", "arguments", "error", "name", "phrases"),
    [pytest.param(*row, id=f"{k}-{row[0]}-{row[3]}") for k, row in enumerate(LAYOUT_TABLE)],
)
def test_layout_helpers_reject_bad_arguments(
    package: str, function: str, arguments: tuple[Any, ...], error: type[Exception], name: str, phrases: tuple[str, ...]
) -> None:
    helper = getattr(PACKAGES[package], function)
    with pytest.raises(error, match=f"^{name}: ") as caught:
        helper(*(for_package(package, argument) for argument in arguments))
    assert_message(caught.value, name, phrases)


@each(("function", "arguments"), [row[:2] for row in LAYOUT_TABLE])
def test_layout_helpers_of_both_packages_give_the_same_message(function: str, arguments: tuple[Any, ...]) -> None:
    messages = []
    for package, module in PACKAGES.items():
        with pytest.raises((TypeError, ValueError)) as caught:
            getattr(module, function)(*(for_package(package, argument) for argument in arguments))
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@each(
    ("function", "value", "name"),
    [
        ("flatten_views", np.zeros((2, 2, 3)), "features"),
        ("split_views", EMBEDDINGS, "embeddings"),
        ("repeat_labels", TARGETS["labels"], "labels"),
    ],
)
def test_layout_helpers_of_fast_reject_non_tensors(function: str, value: np.ndarray, name: str) -> None:
    arguments = [value] if function == "flatten_views" else [value, 2]
    with pytest.raises(TypeError) as caught:
        getattr(fast, function)(*arguments)
    assert_message(caught.value, name, ("tensor", "ndarray"))


@each(("loss", "form", "name"), tensor_rows(matrices_of))
@each("scalar", [1, True, "1.0", None], ids=repr)
def test_reference_rejects_objects_that_are_not_floating_scalars(
    loss: Loss, form: str, name: str, scalar: object
) -> None:
    """Balls and other number types are passed as objects, so the entries of an object array are checked."""
    matrix = MATRICES[name].astype(object)
    matrix[2, ..., 1] = scalar
    with pytest.raises(TypeError) as caught:
        call("reference", loss, form, **{name: matrix})
    assert_message(caught.value, name, ("floating", "row 2"))


HARD_EMBEDDINGS = {
    "plain": EMBEDDINGS,
    "all rows equal": np.ones((4, 3)),
    "opposite rows": np.array([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]]),
    "largest numbers": EMBEDDINGS * 2.0**500,
    "smallest numbers": EMBEDDINGS * 2.0**-500,
}
HARD_TARGETS = {
    "labels": {
        "as given": TARGETS["labels"],
        "one class": np.zeros(4, dtype=np.int64),
        "one anchor without positives": np.array([0, 0, 0, 1]),
        "no anchor with positives": np.arange(4),
        "bool": np.array([True, True, False, False]),
        "uint8": np.array([0, 255, 0, 255], dtype=np.uint8),
        "uint64": np.array([2**63, 2**63, 0, 2**64 - 1], dtype=np.uint64),
    },
    "partners": {"as given": TARGETS["partners"], "int32": np.array([2, 3, 0, 1], dtype=np.int32)},
    "positive_pairs": {
        "as given": TARGETS["positive_pairs"],
        "no pairs": np.zeros((0, 2), dtype=np.int64),
        "diagonal and duplicates": np.array([[0, 0], [0, 1], [0, 1], [2, 2]]),
        "every pair": np.array([(i, j) for i in range(4) for j in range(4)]),
    },
}
HARD_ANCHORS = {"all": None, "some": ANCHORS, "none": np.zeros(4, dtype=bool)}


def hard_batches(loss: Loss, embeddings: np.ndarray) -> list[tuple[str, dict[str, Any]]]:
    """Return valid arguments at the limits of what is allowed, from four hard rows, for every form of the loss."""
    if loss.targets:
        batches = [
            (f"{title}, anchors {which}", {"embeddings": embeddings, loss.targets: targets, "anchors": anchors})
            for (title, targets), (which, anchors) in itertools.product(
                HARD_TARGETS[loss.targets].items(), HARD_ANCHORS.items()
            )
        ]
    else:
        batches = [
            (title, {"embeddings_a": embeddings, "embeddings_b": other})
            for title, other in {
                "towers alike": embeddings,
                "towers opposite": -embeddings,
                "towers in another order": embeddings[::-1],
                "towers of another scale": ordinary(embeddings),
            }.items()
        ] + [("one pair", {"embeddings_a": embeddings[:1], "embeddings_b": embeddings[1:2]})]
    if "negatives" in loss.matrices:
        batches += [
            (f"{title}, {what}", batch | {"negatives": negatives})
            for title, batch in batches
            for what, negatives in {
                "the batch as negatives": embeddings,
                "one negative": -embeddings[:1],
                "negatives of another scale": ordinary(embeddings),
            }.items()
        ]
    if "ref_embeddings" in loss.matrices:
        batches += hard_references(loss, embeddings)
    return batches


def ordinary(embeddings: np.ndarray) -> np.ndarray:
    return embeddings / np.abs(embeddings).max()


def hard_references(loss: Loss, embeddings: np.ndarray) -> list[tuple[str, dict[str, Any]]]:
    """Return calls with references: the batch itself, one row, or rows of another scale.

    Labels have the same or another dtype; positives are given by labels or by a mask.
    """
    own, one = np.arange(4), embeddings[:1]
    if loss.targets == "partners":
        found: list[tuple[str, dict[str, Any]]] = [
            ("the batch", {"ref_embeddings": embeddings, "partners": np.array([1, 2, 3, 0]), "self_rows": own}),
            ("one reference", {"ref_embeddings": one, "partners": np.zeros(4, dtype=np.int64)}),
            ("another scale", {"ref_embeddings": ordinary(embeddings), "partners": own, "anchors": ANCHORS}),
            ("one anchor", {"embeddings": one, "ref_embeddings": embeddings, "partners": np.array([3])}),
        ]
    else:
        first = np.array([0, -1, -1, -1], dtype=np.int8)
        zeros = np.zeros(4, dtype=np.int64)
        mask = np.eye(4, dtype=bool)
        found = [
            ("the batch", {"ref_embeddings": embeddings, "labels": own % 2, "ref_labels": own % 2, "self_rows": own}),
            ("one reference", {"ref_embeddings": one, "labels": zeros, "ref_labels": zeros[:1], "self_rows": first}),
            ("another scale", {"ref_embeddings": ordinary(embeddings), "labels": own, "ref_labels": own[::-1]}),
            (
                "uint64",
                {
                    "ref_embeddings": embeddings,
                    "labels": own,
                    "ref_labels": np.uint64(2**64 - 1) - zeros.astype(np.uint64),
                },
            ),
            ("one anchor", {"embeddings": one, "ref_embeddings": embeddings, "labels": zeros[:1], "ref_labels": own}),
            ("only the self pair by mask", {"ref_embeddings": embeddings, "positives": mask, "self_rows": own}),
            ("all by mask", {"ref_embeddings": embeddings, "positives": mask | True, "anchors": ANCHORS}),
        ]
    return [(f"references: {title}", {"embeddings": embeddings, **batch}) for title, batch in found]


def option_values(loss: Loss) -> list[dict[str, str]]:
    """Return every combination of the loss's options, except policies that return NaN."""
    values = {name: [value for value in allowed if value != "nan"] for name, allowed in loss.choices.items()}
    found = (dict(zip(values, choice, strict=True)) for choice in itertools.product(*values.values()))
    possible = [options for options in found if not loss.unfit(options)]
    # Hardness changes only query_to_doc, which every value of ``directions`` contains.
    return [x for x in possible if x.get("hardness_mode", "none") == "none" or x["directions"] == "query_to_doc"]


def hard_calls(loss: Loss, embeddings: np.ndarray) -> list[tuple[str, dict[str, Any], dict[str, str]]]:
    """Return every hard batch with every combination of options, except "sum" with references (covered by "none")."""
    return [
        (title, batch, options)
        for (title, batch), options in itertools.product(hard_batches(loss, embeddings), option_values(loss))
        if not ("ref_embeddings" in batch and options["reduction"] == "sum")
    ]


def evaluate(package: str, loss: Loss, arguments: Mapping[str, Any]) -> Any:
    """Call the loss of a package with exactly these arguments."""
    result = getattr(PACKAGES[package], loss.function)(
        **{name: for_package(package, value) for name, value in arguments.items()}
    )
    return result.loss if package == "reference" else result


HardCall = tuple[str, dict[str, Any], dict[str, str]]


def some_of(calls: list[HardCall], step: int, start: int = 0) -> list[HardCall]:
    """Return every ``step``-th call, and more, so that every batch and every value of every option occurs."""

    def choices(call: HardCall) -> set[object]:
        title, _, options = call
        return {title, *options.items()}

    chosen = calls[start % step :: step]
    seen = set[object]().union(*map(choices, chosen))
    for call in calls:
        if not choices(call) <= seen:
            chosen.append(call)
            seen |= choices(call)
    return chosen


FEW = 1000
"""Losses with at most so many hard calls are tested with all of them for all embeddings and temperatures."""

parts = pytest.mark.parametrize("step", [1000, pytest.param(5, marks=pytest.mark.slow)])
HARD_TEMPERATURES = [1e-3, 0.07, 1e3]


def chosen_calls(loss: Loss, name: str, temperature: float, step: int) -> list[HardCall]:
    """Return some hard calls for these embeddings and this temperature; for others, they start at other calls."""
    calls = hard_calls(loss, HARD_EMBEDDINGS[name])
    if step == 5 and len(calls) <= FEW:
        return calls
    return some_of(calls, step, 2 * list(HARD_EMBEDDINGS).index(name) + HARD_TEMPERATURES.index(temperature))


@each("loss", LOSSES.values(), ids=LOSSES)
def test_some_of_the_hard_calls_have_every_batch_and_every_pair_of_option_values(loss: Loss) -> None:
    def pairs(calls: list[HardCall]) -> set[object]:
        return {pair for _, _, options in calls for pair in itertools.combinations(options.items(), 2)}

    every = hard_calls(loss, HARD_EMBEDDINGS["plain"])
    fifths = [chosen_calls(loss, "plain", temperature, 5) for temperature in HARD_TEMPERATURES]
    for calls in (some_of(every, 13), *fifths):
        assert {title for title, _, _ in calls} == {title for title, _, _ in every}
        for name in loss.choices:
            values = {options[name] for _, _, options in calls}
            assert values == {options[name] for options in option_values(loss)}, name
    for calls in fifths:
        assert pairs(calls) == pairs(every)


@parts
@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("temperature", [1e-3, pytest.param(0.07, marks=pytest.mark.slow), 1e3])
@pytest.mark.parametrize("name", HARD_EMBEDDINGS)
@pytest.mark.quick(80)
def test_good_input_gives_no_nan(package: str, loss: Loss, temperature: float, name: str, step: int) -> None:
    """Finite input gives NaN only under the policy "nan"."""
    for title, batch, options in chosen_calls(loss, name, temperature, step):
        loss_value = evaluate(package, loss, {**batch, "temperature": temperature, **options})
        values = np.asarray(loss_value, dtype=np.float64)
        assert np.isfinite(values).all(), (title, options, values)


@parts
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("temperature", [1e-3, pytest.param(0.07, marks=pytest.mark.slow), 1e3])
@pytest.mark.parametrize("name", ["plain", "all rows equal", "opposite rows"])
@pytest.mark.quick(22)
def test_good_input_gives_no_nan_in_the_gradient(loss: Loss, temperature: float, name: str, step: int) -> None:
    for title, batch, options in chosen_calls(loss, name, temperature, step):
        leaves = {key: for_package("fast", batch[key]).requires_grad_() for key in batch if key in MATRICES}
        evaluate("fast", loss, {**batch, **leaves, "temperature": temperature, **options}).sum().backward()
        for key, leaf in leaves.items():
            assert leaf.grad is not None, (title, key)
            assert torch.isfinite(leaf.grad).all(), (title, options, key, leaf.grad)


@parts
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("temperature", [1e-3, 1e3])
@pytest.mark.parametrize("name", ["all rows equal", "opposite rows"])
@pytest.mark.quick(15)
def test_good_input_gives_no_nan_in_the_gradient_of_the_temperature(
    loss: Loss, temperature: float, name: str, step: int
) -> None:
    for title, batch, options in chosen_calls(loss, name, temperature, step):
        if options["reduction"] != "mean":
            continue
        leaves = {key: for_package("fast", batch[key]).requires_grad_() for key in batch if key in MATRICES}
        leaves["temperature"] = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
        evaluate("fast", loss, {**batch, **leaves, **options}).backward()
        for key, leaf in leaves.items():
            assert leaf.grad is not None, (title, key)
            assert torch.isfinite(leaf.grad).all(), (title, options, key, leaf.grad)


@each(("loss", "form"), FORMS)
def test_learnable_temperature_gives_no_warning(loss: Loss, form: str) -> None:
    warns_always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # otherwise torch warns only once per process
    try:
        temperature = torch.nn.Parameter(torch.tensor(0.07, dtype=torch.float64))
        call("fast", loss, form, temperature=temperature).backward()
    finally:
        torch.set_warn_always(warns_always)
    assert temperature.grad is not None
    assert torch.isfinite(temperature.grad)


@each(
    "loss",
    [loss for loss in LOSSES.values() if "ref_embeddings" in loss.matrices and "ref_labels" in loss.keywords],
    ids=lambda x: x.name,
)
def test_labels_of_two_dtypes_are_equal_by_value(loss: Loss) -> None:
    """The largest uint64 label differs from the int64 label -1, although their bits are equal."""
    changes = {"labels": np.array([2**64 - 1, 2**64 - 1, 0, 2**63], dtype=np.uint64)}
    for ref_labels in (np.array([-1, -1, 0, -(2**63), 0]), np.array([-1, 0, 0, 0, 1], dtype=np.int8)):
        expected = call("reference", loss, "ref_embeddings", ref_labels=ref_labels, reduction="none", **changes)
        found = call("fast", loss, "ref_embeddings", ref_labels=ref_labels, reduction="none", **changes)
        np.testing.assert_allclose(found.numpy(), np.asarray(expected, dtype=np.float64), rtol=1e-9, atol=1e-12)


@each("package", PACKAGES)
@each(("loss", "form"), WITH_ANCHORS)
def test_no_anchors_give_zero(package: str, loss: Loss, form: str) -> None:
    for reduction in loss.choices["reduction"]:
        value = call(package, loss, form, anchors=np.zeros(4, dtype=bool), reduction=reduction)
        if reduction in ("none", "none_pairs"):
            assert len(value) == 0
        else:
            assert float(value) == 0.0


@each(("loss", "form"), WITH_ANCHORS)
def test_no_anchors_give_a_zero_gradient(loss: Loss, form: str) -> None:
    for reduction in loss.choices["reduction"]:
        leaves = {name: for_package("fast", MATRICES[name]).requires_grad_() for name in matrices_of(loss, form)}
        call("fast", loss, form, **leaves, anchors=np.zeros(4, dtype=bool), reduction=reduction).sum().backward()
        for name, leaf in leaves.items():
            assert leaf.grad is not None, name
            assert not leaf.grad.any(), name


NAN_POLICIES: list[tuple[str, str, dict[str, Any], list[bool]]] = [
    ("plain", "no_positive", {"labels": np.array([0, 0, 0, 1])}, [False, False, False, True]),
    ("plain", "no_negative", {"labels": np.zeros(4, dtype=np.int64), "denominator": "only_negatives"}, [True] * 4),
    ("plain", "no_negative", {"positive_pairs": np.array([[1, 0], [1, 2], [1, 3]])}, [False, True, False, False]),
    ("ref_embeddings", "no_positive", {"labels": np.array([0, 3, 1, 1])}, [False, True, False, False]),
    (
        "ref_embeddings",
        "no_positive",
        {"labels": np.array([2, 2, 0, 0]), "self_rows": np.array([4, -1, 0, -1])},
        [True, False, False, False],
    ),
    (
        "ref_embeddings",
        "no_positive",
        {
            "labels": np.zeros(4, dtype=np.int64),
            "ref_embeddings": MATRICES["ref_embeddings"][:1],
            "ref_labels": np.array([0]),
            "self_rows": np.array([-1, -1, 0, -1]),
        },
        [False, False, True, False],
    ),
    (
        "ref_embeddings",
        "no_negative",
        {"ref_labels": np.array([0, 0, 0, 0, 0]), "denominator": "only_negatives"},
        [True, True, False, False],
    ),
    (
        "ref_embeddings",
        "no_negative",
        {
            "ref_labels": np.array([0, 1, 0, 0, 0]),
            "self_rows": np.array([1, -1, 0, -1]),
            "denominator": "only_negatives",
        },
        [True, False, False, False],
    ),
]


@each("package", PACKAGES)
@each(
    ("loss", "form", "policy", "changes", "expected"),
    [
        pytest.param(loss, *row, id=f"{loss.name}-{row[0]}-{row[1]}")
        for loss in LOSSES.values()
        for row in NAN_POLICIES
        if row[0] in forms(loss) and not loss.two_towers and arguments_of(loss).issuperset({row[1], *row[2]})
    ],
)
def test_nan_policies_give_nan_for_the_affected_anchors(
    package: str, loss: Loss, form: str, policy: str, changes: dict[str, Any], expected: list[bool]
) -> None:
    values = np.asarray(call(package, loss, form, reduction="none", **changes, **{policy: "nan"}), dtype=np.float64)
    assert np.isnan(values).tolist() == expected
    for reduction in loss.choices["reduction"]:
        found = call(package, loss, form, reduction=reduction, **changes, **{policy: "nan"})
        if reduction == "none_pairs":  # an anchor with the value NaN has no pairs
            assert np.isfinite(np.asarray(found, dtype=np.float64)).all()
        elif reduction != "none":
            assert math.isnan(float(found))


SHAPES = st.one_of(
    st.just((4, 3)), st.lists(st.integers(0, 4), max_size=3).map(tuple), st.tuples(st.integers(0, 5), st.integers(0, 4))
)
DTYPES = st.sampled_from([np.float64, np.float32, np.float16, np.int64, np.int32, np.uint8, np.bool_])
NUMBERS = st.sampled_from([0.0, 0.0, 1.0, -1.0, 0.5, 2.0, 3.0, 4.0, 97.0, -0.25, math.nan, math.inf])


TEMPERATURES = st.sampled_from([0.07, 1, 1e-3, 1e3, 0, -1.0, math.nan, math.inf, "1", True, None])


@st.composite
def arrays(draw: st.DrawFn, good: np.ndarray) -> np.ndarray:
    """Draw an array of some shape, dtype and values, often those of the valid one."""
    shape = draw(st.one_of(st.just(good.shape), SHAPES))
    dtype = draw(st.one_of(st.just(good.dtype), DTYPES))
    values = draw(st.lists(NUMBERS, min_size=math.prod(shape), max_size=math.prod(shape)))
    if np.dtype(dtype).kind != "f":
        values = [abs(value) if math.isfinite(value) else 1.0 for value in values]
    return np.array(values, dtype=dtype).reshape(shape)


@st.composite
def calls(draw: st.DrawFn) -> tuple[Loss, dict[str, Any]]:
    """Draw a loss and arguments of one of its forms; at most two may be bad, and some may be missing."""
    loss, form = draw(st.sampled_from([(loss, form) for loss in LOSSES.values() for form in forms(loss)]))
    arrays_of = good_arguments(loss, form)
    arguments: dict[str, Any] = dict(arrays_of)
    arrays_of |= good_masks(loss, form)
    for name in draw(st.sets(st.sampled_from([*arrays_of, "temperature", "base_temperature"]), max_size=2)):
        if name in arrays_of:
            arguments[name] = draw(st.one_of(arrays(arrays_of[name]), st.just(arrays_of[name])))
        else:
            arguments[name] = draw(TEMPERATURES)
    if "positives" in arguments and draw(st.booleans()):
        arguments["labels"] = None
        if "ref_labels" in arguments and draw(st.booleans()):
            arguments["ref_labels"] = None
    optional = [name for name in arguments if name in loss.keywords and name in arrays_of]
    if optional and draw(st.sampled_from([False, False, True])):
        arguments[draw(st.sampled_from(optional))] = None
    for name, allowed in loss.choices.items():
        if draw(st.booleans()):
            arguments[name] = draw(st.sampled_from([value for value in allowed if value != "nan"]))
    return loss, arguments


def outcome(package: str, loss: Loss, arguments: dict[str, Any]) -> str:
    """Return "accepted" or "refused"; check that a value is not NaN and that an error names an argument."""
    try:
        values = evaluate(package, loss, arguments)
    except (TypeError, ValueError) as error:
        refusal = error
    else:
        assert not np.isnan(np.asarray(values, dtype=np.float64)).any(), values
        return "accepted"
    name = str(refusal).split(":")[0]
    assert name in arguments_of(loss), refusal
    assert_message(refusal, name, ())
    return "refused"


def mixed_dtypes(arguments: dict[str, Any]) -> bool:
    return len({value.dtype for name, value in arguments.items() if name in MATRICES and value is not None}) > 1


@pytest.mark.parametrize("examples", [300, pytest.param(1000, marks=pytest.mark.slow)])
def test_both_packages_reject_the_same_calls(examples: int) -> None:
    """Except matrices of different dtypes, which only ``fast`` rejects, because it computes in one dtype."""

    @settings(max_examples=examples, derandomize=True, deadline=None, database=None)
    @given(calls())
    def compare(drawn: tuple[Loss, dict[str, Any]]) -> None:
        loss, arguments = drawn
        expected = outcome("reference", loss, arguments)
        if mixed_dtypes(arguments):
            expected = "refused"
        event(f"{loss.name} {expected}")
        assert outcome("fast", loss, arguments) == expected

    compare()
