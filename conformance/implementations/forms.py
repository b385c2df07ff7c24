"""Forms: the plausible ways to call a user's loss (a *target*), in the order in which they are tried.

A form is chosen by the loss, by the names and the number of the parameters, and by whether the call raises an error. It
is never chosen by the value that the target returns, because that would hide a wrong loss.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ..suite.cases import Case
from ..suite.catalogue import LOSSES
from .sandbox import TargetMisused, describe
from .signatures import CALLS, FACTS, PARTNERS, Signature

Tensor = torch.Tensor

_LABELS = "|".join(("labels?|classes|class_labels|y_true|y|ids|targets?", *PARTNERS))
_MATRICES = "sim|sims|similarity|similarities|similarity_matrix|sim_matrix|cos_sim|cosine_similarity|logits|scores"
_ROWS = "embeddings?|z|reps|representations?|projections?|outputs?|hidden|embs?|x"

_WORDS = (
    ("features", r"\S+(?=.* labels\b)(?=.* mask\b).*"),
    ("similarities", rf"({_MATRICES}|logits_per_(image|text))( .*)?"),
    ("views", r"(online|source) target( .*)?"),
    ("labels", rf"(\S+ ({_LABELS})|({_LABELS}) (?!({_LABELS})\b)\S+)( .*)?"),
    ("pairs", r"\S+ (positive_pairs|pos_pairs|pairs|pos_indices|positive_indices)( .*)?"),
    ("views", r"(query|queries) (positive_)?keys?( .*)?|q k( .*)?|anchors? positives?( .*)?|embeddings ref_emb( .*)?"),
    ("views", r"(image|images|img|imgs|vision|visual)(_\S+)? (text|texts|txt|caption|captions|language)(_\S+)?( .*)?"),
    ("views", r"(student teacher|(\S+?)_?1? \2_?(2|aug|pos|bar|hat|tilde|prime))( .*)?"),
    # Names that differ in one character: z_i and z_j, view_a and view_b.
    ("views", r"(\S*)(\S)(\S*) \1(?!\2)\S\3( .*)?"),
    ("features", r"features?( .*)?"),
    ("stacked", rf"({_ROWS})"),
)
"""Calls in the order in which they are tried, with regular expressions for the names of parameters, joined by spaces.

First the names of all positional parameters are matched, then those of the required ones."""

_WEAK = re.compile(rf"\S \S( .*)?|\S+ (targets?|y|ids)( .*)?|{_ROWS}|features?")
"""Names that are too general: if they do not fit the loss, no error is raised."""

_ORDER = ("labels", "towers", "views", "pairs", "stacked", "features")
"""Calls that are tried next if the number of parameters fits, whatever the names are.

``similarities`` is tried only if the names indicate it, ``interleaved`` only if the user passes it."""

_NUMBER = {"stacked": (1, 1), "features": (1, 2)}
"""Smallest and largest number of arrays that a call passes; (2, 2) for the other calls."""


@dataclass(frozen=True)
class Form:
    """One way to call a target.

    Attributes:
        call: one of ``CALLS``.
        words: what the call was guessed from; "" if the user gave it.
        labels: how labels are passed: "" for [N], "column" for [N, 1], "one-hot" for [N, C].
        transposed: whether the queue is passed as [D, K].
    """

    call: str
    words: str = ""
    labels: str = ""
    transposed: bool = False

    @property
    def notes(self) -> Iterator[str]:
        """What was guessed, in words."""
        if self.words:
            yield f"call: {self.call}, {self.words}; override with --call"
        if self.labels:
            yield f"labels: passed as a {self.labels} matrix, because a vector does not fit"
        if self.transposed:
            yield "negatives: passed as [D, K], because [K, D] raises an error"

    def shaped(self, name: str, value: Any) -> Any:
        """Return an argument in the shape of this form."""
        if name == "labels" and self.labels and isinstance(value, Tensor):
            classes = torch.searchsorted(torch.tensor(sorted({*value.tolist()}), device=value.device), value)
            return value[:, None] if self.labels == "column" else torch.nn.functional.one_hot(classes)
        return value.T if name == "negatives" and self.transposed and isinstance(value, Tensor) else value


def plausible_forms(signature: Signature, call: str | None = None, loss: str = "") -> list[Form]:
    """Return the ways to call a target, the best guess first.

    Args:
        signature: its parameters.
        call: the call that the user gives; guessed if None.
        loss: the loss that it should compute, short name in the catalogue; "" if unknown. Only calls that can express
            the loss are returned.

    Raises:
        TargetMisused: no call fits the parameters, or their names contradict the loss.
    """
    calls = [(call, "")] if call else _guessed(signature, loss)
    queue = signature.keyword("negatives") is not None
    forms = [
        Form(call, words, labels, transposed)
        for call, words in calls
        for labels in (("", "column", "one-hot") if call in ("labels", "features", "similarities") else ("",))
        for transposed in ((False, True) if queue else (False,))
    ]
    # Try all calls before reshaping labels or the queue.
    return sorted(forms, key=lambda form: (bool(form.labels), form.transposed))


def _guessed(signature: Signature, loss: str) -> list[tuple[str, str]]:
    allowed = LOSSES[loss].calls if loss in LOSSES else tuple(call for call in CALLS if call != "towers")
    names = [p.name for p in signature.named]
    words = f"the parameters ({', '.join(names)})"
    places = [p for p in signature.places if p.kind is not p.KEYWORD_ONLY]
    required = [p for p in places if p.default is p.empty]
    found: dict[str, str] = {}
    strong: list[str] = []
    for kept in (places, required):
        text = " ".join(p.name for p in kept).lower()
        for call, pattern in _WORDS:
            if re.fullmatch(pattern, text):
                named = "towers" if call == "views" and "towers" in allowed else call
                strong += [] if _WEAK.fullmatch(text) else [named]
                if named in allowed:
                    found.setdefault(named, f"guessed from {words}")
    if loss and not found and strong:
        what = f"{loss} cannot be computed by a target that is called with {strong[0]}"
        usable = [call for call in allowed if call != "command"]
        raise TargetMisused(f"{what}; {words} suggest this call; to use another, pass --call {'|'.join(usable)}")
    variadic = any(p.kind is p.VAR_POSITIONAL for p in signature.call.values())
    if not (variadic and not required):
        for call in _ORDER:
            least, most = _NUMBER.get(call, (2, 2))
            fits = len(required) <= most and len(places) >= least
            if call in allowed and fits and call not in found:
                why = f"the loss {loss} and {words}" if loss else f"the number of {words.removeprefix('the ')}"
                found[call] = f"guessed from {why}"
    if not found:
        usable = [call for call in allowed if call != "command"]
        raise TargetMisused(f"cannot guess from {words} how to call the target: pass --call {'|'.join(usable)}")
    return list(found.items())


_ROWS_OF_TRIAL = np.random.default_rng(20).normal(size=(8, 3)).round(2)
_MATRICES_OF_TRIAL = {"negatives": 7, "hard_negatives": 8}
"""The number of rows of each optional matrix."""
_LABELS_OF_TRIAL = [0, 1, 0, 2, 1, 0, 2, 0]


def trial_case(loss: str, options: Mapping[str, Any], matrices: Collection[str] = ()) -> Case:
    """Return a small batch: eight rows, or four in each of two towers. Every anchor has a positive.

    Args:
        loss: short name in the catalogue.
        options: values of options, such as the temperature.
        matrices: the optional matrices that it has, such as "negatives".
    """
    entry, rows = LOSSES[loss], _ROWS_OF_TRIAL
    half = len(rows) // 2
    others: dict[str, Any] = {"embeddings_b": rows[half:]} if entry.two_towers else {}
    others |= {name: rows[:number] + 1 for name, number in _MATRICES_OF_TRIAL.items() if name in matrices}
    partners = [(k + half) % len(rows) for k in range(len(rows))]
    arguments: dict[str, Any] = {
        "labels": _LABELS_OF_TRIAL,
        "partners": partners,
        "positive_pairs": [*map(list, enumerate(partners))],
    }
    own = {entry.targets: arguments[entry.targets]} if entry.targets else {}
    return Case("trial", loss, rows[:half] if entry.two_towers else rows, own, dict(options), others=others)


_OWN = {
    "labels": "embeddings, labels",
    "features": "features, labels",
    "views": "view_a, view_b",
    "towers": "view_a, view_b",
    "stacked": "embeddings",
    "interleaved": "embeddings",
    "similarities": "similarities",
    "pairs": "embeddings, positive_pairs",
}


def wrapper(spec: object, signature: Signature, call: str) -> list[str]:
    """Return the lines of a function that calls a target, with ``...`` for unknown arguments.

    Args:
        spec: the target, or the text that names it.
        signature: its parameters.
        call: one of ``CALLS``: how the wrapper is called.
    """
    place, _, attribute = describe(spec).rpartition(":")
    module = re.sub(r"\.py$", "", place.rpartition("/")[2])
    root, _, rest = attribute.partition(".")
    own = _OWN[call]
    values = iter(re.findall(r"\w+(?=,|=|$)", own.replace("=None", "")))
    signature_text = partial(_arguments, signature=signature)
    importable = "<" not in attribute and bool(root)
    start = f"from {module} import {root}" if importable else "target = ...  # a local function has no name to import"
    lines = [start, "", "", f"def loss({own}, temperature):"]
    thing = (f"{root}.{rest}" if rest else root) if importable else "target"
    if signature.constructs:
        thing = f"{thing}({', '.join(signature_text(signature.constructor.values(), iter(())))})"
        thing += "" if any("__call__" in vars(kind) for kind in signature.thing.__mro__) else ".forward"
    given = ", ".join(signature_text(signature.named, values))
    if signature.keys:
        given = "{" + re.sub(r"(\w+)=", r'"\1": ', given) + "}"
    return [*lines, f"    return {thing}({given})  # return only the loss, as a tensor"]


def _arguments(parameters: Any, values: Iterator[str], signature: Signature) -> Iterator[str]:
    temperature = signature.keyword("temperature")
    places = {p.name for p in signature.places}
    for p in parameters:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            continue
        fact = next((fact for fact, names in FACTS.items() if p.name in names), "")
        known = {"batch_size": "...", "device": '"cpu"', "world_size": "1", "rank": "0"}.get(fact, "...")
        if temperature is not None and p.name == temperature.name:
            inverse = p.name not in ("temperature", "tau", "temp", "T", "t")
            yield f"{p.name}={'1 / temperature' if inverse else 'temperature'}"
        elif p.name in signature.init:
            yield f"{p.name}={signature.init[p.name]!r}"
        elif p.name in places and (value := next(values, None)):
            yield f"{p.name}={value}" if p.kind is not p.POSITIONAL_ONLY else value
        elif p.default is p.empty:
            yield f"{p.name}={known}"


def cannot_be_called(spec: object, signature: Signature, failures: Sequence[tuple[Form, str]]) -> list[str]:
    """Return the lines of the error for a target that no form fits.

    Args:
        spec: the target, or the text that names it.
        signature: its parameters.
        failures: the forms that were tried, and the errors.
    """
    (first, error), *others = failures
    calls = dict.fromkeys(form.call for form, _ in others if form.call != first.call)
    also = f"; other calls fail too: {', '.join(calls)}" if calls else ""
    return [
        f"called with {first.call} on a small batch, it fails: {error}{also}",
        "To call it in another way, pass --call or --init. Or copy this wrapper, fill in each ..., and check it:",
        "",
        *(f"    {line}".rstrip() for line in wrapper(spec, signature, first.call)),
    ]
