"""Prove the results of a case again, with the built-in temperature and the claimed options of a target.

Otherwise, a target with a built-in temperature could be judged only on the cases that have this temperature. The proofs
are stored in the user's cache folder, because they take half of the time of a check.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from pairproof import reference

from ..implementations import base
from ..implementations.base import matters
from ..implementations.signatures import Claim
from ..suite import cases, catalogue
from ..suite.cases import Case
from ..suite.flags import first_untrue
from ..suite.golden import GoldenCase
from ..suite.records import NAN_LOSS, Expected, Matrix, Truth
from ..suite.store import write_atomically
from ..truth import evaluate
from ..truth.evaluate import PROVE_UP_TO, truth
from ..truth.intervals import CertificationError
from ..truth.kinks import kink_of
from ..truth.matrices import has_formula

MOST_PRODUCTS = 2**18
"""Largest case that is changed by default: similarities times dimensions."""

LARGEST_LOGIT = 32.0
"""Rows are scaled so that the largest logit of dot products is at most this, and at least a quarter of it."""


def as_claimed(
    case: Case, golden: GoldenCase | None, claim: Claim, *, thorough: bool = False
) -> tuple[Case, GoldenCase | None]:
    """Return a case with the built-in temperature and the claimed options of a target, and prove its results again.

    Args:
        case: the case.
        golden: its golden entry, if it has one.
        claim: what the target computes.
        thorough: whether to change cases whose proof can take minutes.

    Returns:
        The case and its golden entry. They are unchanged if they agree with the claim, or if the case cannot be changed
        or proved.
    """
    changed = case_as_claimed(case, claim, thorough=thorough)
    if changed is case or golden is None:
        # A worked example is proved when it is judged.
        return changed, golden
    try:
        expected = _proved(changed, kink_of(changed))
    except CertificationError:  # for example, two entries of a row are too close to tell which is the largest
        return case, golden
    flags = tuple(flag for flag in golden.flags if first_untrue(changed, (flag,)) is None)
    return changed, replace(golden, case=changed, flags=flags, expected=expected)


def case_as_claimed(case: Case, claim: Claim, *, thorough: bool = False) -> Case:
    """Return a case with the built-in temperature and the claimed options of a target, without a proof.

    For dot products, the rows are scaled by a power of two, so that the logits have an ordinary size.

    Args:
        case: the case.
        claim: what the target computes.
        thorough: whether to change cases whose proof can take minutes.

    Returns:
        The case. It is the same object if it agrees with the claim or cannot be changed.
    """
    if case.size**2 * case.embeddings.shape[1] > MOST_PRODUCTS and not thorough:
        return case
    fixed = {name: values[0] for name, values in claim.support.options.items() if case.option(name) not in values}
    claimed = {"temperature", *claim.settings}
    both = case, case.with_options(**fixed)
    relevant = {name for name in fixed if any(matters(one, name) for one in both)}
    changed = {name: value for name, value in fixed.items() if name in claimed & relevant}
    if "direction_weights" in changed:
        if case.option("direction") != "both":
            return case
        if tuple(case.option("direction_weights") or ()) == changed["direction_weights"]:
            del changed["direction_weights"]
    if claim.directed_here and case.option("direction") == "both":
        # The mean of both directions would not show that they are exchanged.
        changed["direction"] = claim.settings["direction"]
    if not changed or case.entry.unfit({**case.keywords, **changed, **case.others}):
        return case
    found = _with(case, tuple(changed.items()))
    if len(found.row_weights()) != found.shape[0]:
        return case  # towers of unequal length, with weights for the anchors of the old direction
    slow = case.size > PROVE_UP_TO and not thorough and not has_formula(found)
    return case if slow else found


def repeated(stored: Sequence[Case], claim: Claim, *, thorough: bool = False) -> set[str]:
    """Return the cases that equal another case once they have the claimed options.

    Args:
        stored: the cases.
        claim: what the target computes.
        thorough: whether to change cases whose proof can take minutes.

    Returns:
        The ids of these cases, without one of each group of equal cases, which is to be judged.
    """
    pairs = [(case, case_as_claimed(case, claim, thorough=thorough)) for case in stored]
    if all(changed is case for case, changed in pairs):
        return set()
    seen = {_content(case) for case, changed in pairs if changed is case}
    found = set()
    for case, changed in pairs:
        if changed is not case:
            content = _content(changed)
            if content in seen:
                found.add(case.id)
            seen.add(content)
    return found


@lru_cache(maxsize=2048)
def _with(case: Case, options: tuple[tuple[str, object], ...]) -> Case:
    """Return a case with other values of some options.

    It is the same case if its rows cannot be scaled, or if a row is 0 under cosine.
    """
    changed = case.with_options(**dict(options))
    if changed.option("similarity") == "cosine":
        return changed if all(rows.any(axis=1).all() for rows in case.matrices.values()) else case
    if case.option("similarity") == "cosine":
        return scaled_to_logits(changed) or case
    # The logits keep their size.
    return scaled(changed, round(math.log(changed.temperature / case.temperature, 4))) or case


def scaled_to_logits(case: Case) -> Case | None:
    """Scale all rows by one power of two so that the largest logit of dot products is ordinary (see ``LARGEST_LOGIT``).

    Returns None if an entry would be rounded or leave the range of float64.
    """
    largest = max(float(np.abs(rows).max(initial=0.0)) for rows in case.matrices.values())
    if largest == 0.0:
        return case
    first = -math.frexp(largest)[1]
    moderate = scaled(case, first)
    if moderate is None:
        return None
    products = max(
        float(np.abs(moderate.matrices[block.left] @ moderate.matrices[block.right].T).max(initial=0.0))
        for block in case.blocks()
    )
    if products == 0.0:
        return moderate
    return scaled(case, first + math.floor(math.log(LARGEST_LOGIT * case.temperature / products, 4)))


def scaled(case: Case, exponent: int) -> Case | None:
    """Multiply all rows by 2^exponent. Return None if an entry is rounded or leaves the range of float64."""
    if not exponent:
        return case
    with np.errstate(all="ignore"):
        rows = {name: np.ldexp(matrix, exponent) for name, matrix in case.matrices.items()}
        if any((np.ldexp(rows[name], -exponent) != matrix).any() for name, matrix in case.matrices.items()):
            return None
    found = case.with_matrices(rows)
    return found if found.holds_in("float64") else None


def prove(case: Case) -> Truth:
    """Compute the true results of a case. If there is no gradient, the results contain the reason.

    Raises:
        CertificationError: a result cannot be proved.
    """
    return _with_reason(truth(case, by_loops=False), kink_of(case))


def _with_reason(true: Truth, kink: str | None) -> Truth:
    if any(map(math.isnan, true.values)):
        return replace(true, gradient_left_out=NAN_LOSS)
    return replace(true, gradient=None, other_gradients={}, gradient_left_out=kink) if kink else true


@lru_cache(maxsize=1)  # the checks of a case in several dtypes follow each other
def _proved(case: Case, kink: str | None) -> Expected:
    """Return the proved results of a case, from the cache folder if possible.

    ``kink`` is the reason why a loss that is not NaN has no gradient, or None.
    """
    name = f"{hashlib.sha256(_sources() + _content(case)).hexdigest()}.json"
    # If the cache cannot be read or written, the check only takes longer.
    with suppress(OSError, RuntimeError, ValueError, KeyError, TypeError):
        return _read((cache_folder() / name).read_text(encoding="utf-8"))
    true = _with_reason(truth(case, by_loops=False), kink)
    with suppress(OSError, RuntimeError):
        cache_folder().mkdir(parents=True, exist_ok=True)
        write_atomically(cache_folder() / name, _written(true))
    return true


def cache_folder() -> Path:
    """The folder of stored proofs: ``$XDG_CACHE_HOME/pairproof/proofs``, by default ``~/.cache/pairproof/proofs``.

    Raises:
        RuntimeError: the user has no home folder.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if Path(given).is_absolute() else Path.home() / ".cache") / "pairproof" / "proofs"


@cache
def _sources() -> bytes:
    """Return a digest of the code and the library that proofs depend on."""
    folders = (Path(module.__file__ or "").parent for module in (reference, evaluate))
    paths = sorted(path for folder in folders for path in folder.glob("*.py"))
    code = b"".join(
        path.read_bytes() for path in (*paths, *(Path(module.__file__ or "") for module in (base, cases, catalogue)))
    )
    return hashlib.sha256(code + version("python-flint").encode()).digest()


def _content(case: Case) -> bytes:
    """Return the inputs and options that affect the results of a case, as bytes."""
    options = {name: case.option(name) for name in (*case.keywords, *({"direction"} & case.entry.keywords.keys()))}
    options = {name: value for name, value in options.items() if value != case.entry.default(name)}
    options = {name: value for name, value in options.items() if matters(case, name)}
    rows = {name: _hexadecimal(matrix) for name, matrix in case.matrices.items()}
    return json.dumps([case.loss, rows, dict(case.arguments), options], sort_keys=True, default=_plain).encode()


def digest_of(case: Case) -> str:
    """Return a short digest of the inputs and the options of a case that affect its results."""
    return hashlib.sha256(_content(case)).hexdigest()[:16]


def _hexadecimal(matrix: Matrix) -> list[Any]:
    return [list(matrix.shape), hashlib.sha256(np.ascontiguousarray(matrix, dtype="<f8").tobytes()).hexdigest()]


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


def _written(expected: Expected) -> str:
    """Return the text of a cache entry: a digest, and the results as JSON on the second line."""
    data: dict[str, Any] = {
        "many": isinstance(expected.loss, tuple),
        "values": expected.values,
        "anchors": list(expected.anchors.items()),
        "left_out": expected.gradient_left_out,
        "gradient": None if expected.gradient is None else expected.gradient.tolist(),
        "others": {name: matrix.tolist() for name, matrix in expected.other_gradients.items()},
        "temperature": expected.temperature_gradient,
        "bias": expected.bias_gradient,
    }
    text = json.dumps(data)
    return f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}\n"


def _read(text: str) -> Expected:
    """Return the results of a cache entry. Raises a ValueError, KeyError or TypeError if it is damaged."""
    digest, body, *_ = text.split("\n")
    if hashlib.sha256(body.encode()).hexdigest() != digest:
        raise ValueError("the digest differs")
    data: Mapping[str, Any] = json.loads(body)
    gradient = None if data["gradient"] is None else np.array(data["gradient"], dtype=np.float64)
    others = {name: np.array(rows, dtype=np.float64) for name, rows in data["others"].items()}
    values = tuple(data["values"])
    loss = values if data["many"] else values[0]
    slopes = data["temperature"], data["bias"]
    return Expected(loss, dict(data["anchors"]), gradient, data["left_out"], others, *slopes)
