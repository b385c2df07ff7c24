"""Forms: the plausible ways to call a user's loss (a *target*), in the order in which they are tried.

A form is chosen by the loss, by the names and the number of the parameters, and by whether the call raises an error. It
is never chosen by the value that the target returns, because that would hide a wrong loss.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch

from ..suite.cases import Case
from ..suite.catalogue import LOSSES
from .gpu import OF_GPU, lacks_gpu
from .sandbox import TargetMisused, describe
from .signatures import (
    ALIASES,
    ARRAYS,
    CALLS,
    HARD,
    OF_VIEWS,
    ONE_EACH,
    ONE_NEGATIVE,
    PARTNERS,
    SAME_ROWS,
    SCALARS,
    SETTINGS,
    VARIED,
    Signature,
    is_ignored,
    method_of,
    snake_case,
)

Tensor = torch.Tensor

_PARTNERS = "|".join(PARTNERS)
_MASKS = r"(?:\w+_)?masks?"
_ONE_HOT = r"(?:\w+_)?(?:one_?hot|multi_?hot)(?:_\w+)?"
_LABELS = f"labels?|lbls|classes|class_labels|y_true|y|ids|targets?|{_ONE_HOT}"
_MATRICES = "sim|sims|similarity|similarities|similarity_matrix|sim_matrix|cos_sim|cosine_similarity|logits|scores?"
_OF_TOWERS = r"logits_(per_)?\w+|(sim|sims|similarity|scores)_\w+|\w+_logits"
_ROWS = "embeddings?|z|reps|representations?|projections?|outputs?|hidden|embs?|x"
_NO_VIEWS = "neg|hard|contradict|queue|memory|bank|ref|proto|cent(er|re|roid)|class|label"
_OF_ARRAYS = re.compile(
    rf"(?!(n|num|use|return)_)(\w+_)?({_ROWS}|{_LABELS}|{_MASKS}|{_MATRICES}|{_PARTNERS}|{'|'.join(ALIASES['negatives'])}"
    r"|feats?|features?|pairs|keys?|k|quer(y|ies)|q|(positive|negative|anchor|view|row|vector)s?|[a-z]\d)"
)
"""Names of arrays."""

_WORDS = (
    ("features", r"\S+(?=.* labels\b)(?=.* mask\b).*"),
    ("similarities", rf"({_MATRICES}|{_OF_TOWERS})( .*)?"),
    ("views", r"((online|source) target|\S+ targets? labels?)( .*)?"),
    ("partners", rf"(\S+ ({_PARTNERS})|({_PARTNERS}) \S+)( .*)?"),
    ("mask", rf"\S+ ({_MASKS})( .*)?"),
    ("views", rf"(student teacher|{VARIED})( .*)?"),
    ("labels", rf"(\S+ ({_LABELS})|({_LABELS}) (?!({_LABELS})\b)\S+)( .*)?"),
    ("pairs", r"\S+ (positive_pairs|pos_pairs|pairs|pos_indices|positive_indices)( .*)?"),
    (
        "views",
        r"((query|queries) (positive_)?keys?|q k|anchors? (positives?|contrasts?)|embeddings ref_emb"
        r"|premises?(_\S+)? (entailments?|hypothes[ei]s)(_\S+)?)( .*)?",
    ),
    ("views", r"(query|queries|questions?) (docs?|documents?|passages?|answers?|items?)( .*)?"),
    ("views", r"(user|query|question|anchor)s?_\S+ (item|doc|document|passage|pos|positive|key)s?_\S+( .*)?"),
    ("views", r"(image|images|img|imgs|vision|visual)(_\S+)? (text|texts|txt|caption|captions|language)(_\S+)?( .*)?"),
    # Names with the same last word: mentor_emb and mentee_emb.
    ("views", rf"\S+_(embs?|embeddings?|feats?|features?|vecs?|vectors?|reps?) (?!\S*({_NO_VIEWS}))\S+_\1( .*)?"),
    # Names that differ in one character: z_i and z_j, view_a and view_b.
    ("views", r"(\S*)(\S)(\S*) \1(?!\2)\S\3( .*)?"),
    ("features", r"features?( .*)?"),
    ("stacked", rf"({_ROWS})"),
)
"""Calls in the order in which they are tried, with regular expressions for the names of parameters, joined by spaces.

First the names of all positional parameters are matched, then those of the required ones."""

_WEAK = re.compile(rf"\S \S( .*)?|\S+ (targets?|y|ids|{_MASKS})( .*)?|{_ROWS}|features?")
"""Names that are too general: if they do not fit the loss, no error is raised."""

_DOCUMENTED = (
    ("interleaved", r"interleav", r"stacked"),
    ("features", r"[\[(]\w+, *(n_|num_)?views?, *(\w+|\.\.\.)[\])]", r"$^"),
    (
        "similarities",
        r"\b(matrix of (all )?similarities|similarity matrix)\b",
        r"embedding|feature|representation|comput",
    ),
)
"""Calls of a single array, with regular expressions that the name or the docstring of the target must match and must
not match. Similarities and features may be followed by labels."""

_ONE_WAY = re.compile(r"\bone[- ](way|sided|directional)\b")
"""What a docstring says of a loss of two views whose anchors are the first ones."""

_ORDER = ("labels", "towers", "views", "pairs", "stacked", "features", "similarities")
"""Calls that are tried next if the number of parameters fits, whatever the names are.

Other calls are tried only if the names or the docstring indicate them, or if the user passes them."""

_NUMBER = {"stacked": (1, 1), "features": (1, 2), "similarities": (1, 1)}
"""Smallest and largest number of arrays that a call passes; (2, 2) for the other calls."""


@dataclass(frozen=True)
class Form:
    """One way to call a target.

    Attributes:
        call: one of ``CALLS``.
        words: what the call was guessed from; "" if the user gave it.
        labels: how labels are passed: "" for [N], "column" for [N, 1], "one-hot" for [N, C], "mask" for the mask of
            positives, "signs" and "pairs" for a matrix of all pairs of two towers, and "transposed" for the transposed
            similarities instead. How a mask is passed: "" for bool,
            "float" for numbers.
        queue: how the queue is passed: "" for [K, D], or "[D, K]", or "[N, K, D]" with the same rows for each anchor.
            How hard negatives are passed: "" for [N, H, D], or "[N, D]" for one hard negative of each query.
        arrays: the arrays that are passed, one of ``ARRAYS``.
        guess: what the arrays were guessed from; "" if the user gave them.
        tensors: why the temperature and the bias are passed as tensors; "" if they are passed as floats.
        matrices: the required matrices of negatives that are passed, by their names in the catalogue.
    """

    call: str
    words: str = ""
    labels: str = ""
    queue: str = ""
    arrays: str = "torch"
    guess: str = ""
    tensors: str = ""
    matrices: tuple[str, ...] = ()

    @property
    def notes(self) -> Iterator[str]:
        """What was guessed, in words."""
        if self.words:
            yield f"call: {self.call}, {self.words}; override with --call"
        if self.labels == "float":
            yield "mask: passed as numbers, because a mask of bool raises an error"
        elif self.labels in ("column", "one-hot"):
            yield f"labels: passed as a {self.labels} matrix, because a vector does not fit"
        if self.queue == ONE_EACH:
            yield "hard negatives: passed as [N, D]; only batches with one for each query are judged"
        elif self.queue:
            yield f"negatives: passed as {self.queue}, because [K, D] raises an error"
        if self.tensors:
            yield f"temperature and bias: tensors where they are passed, because {self.tensors}"
        if self.guess:
            yield f"arrays: {self.arrays}, {self.guess}; override with --arrays"

    @property
    def several(self) -> bool:
        """Whether several views of each item are passed, or two towers, and the labels of the items by keyword."""
        return self.call in ("features", "towers", *OF_VIEWS)

    @property
    def of_tensors(self) -> Form:
        """The same form with tensors for numbers."""
        return replace(self, tensors="a float raises an error")

    def given(self, signature: Signature) -> dict[str, str]:
        """Return the arrays that are passed, by their names in a wrapper, in words."""
        given = dict(_GIVEN[self.call])
        if self.call == "mask" and signature.takes_negative_mask:
            given["negative_mask"] = "mask of negatives [N, N], without the diagonal"
        if self.labels in ("column", "one-hot") and "labels" in given:
            given["labels"] += f", as a {self.labels} matrix"
        if self.labels in _INSTEAD and "labels" in given:
            given["labels"] = _INSTEAD[self.labels]
        return given

    def shaped(self, name: str, value: Any, rows: Tensor) -> Any:
        """Return an argument in the shape of this form; ``rows`` are those of the anchors."""
        if name == "labels" and self.labels in ("column", "one-hot") and isinstance(value, Tensor):
            classes = torch.searchsorted(torch.tensor(sorted({*value.tolist()}), device=value.device), value)
            return value[:, None] if self.labels == "column" else torch.nn.functional.one_hot(classes)
        if name == "labels" and self.labels in ("signs", "pairs"):
            same = (value[:, None] == value).to(rows.dtype)
            return 2 * same - 1 if self.labels == "signs" else same
        if name == "labels" and self.labels == "mask":
            return (value[:, None] == value).fill_diagonal_(False).float()
        if name == "mask" and self.labels == "float" and isinstance(value, Tensor):
            return value.float()
        if name == HARD and self.queue == ONE_EACH:
            return value.reshape(len(rows), -1)
        if name == "negatives" and self.queue and isinstance(value, Tensor):
            return value.T if self.queue == "[D, K]" else value.repeat(len(rows), 1, 1)
        return value


def plausible_forms(
    signature: Signature, call: str | None = None, loss: str = "", arrays: Sequence[str] = ARRAYS[:1], guess: str = ""
) -> list[Form]:
    """Return the ways to call a target, the best guess first; at the end, the same ways with tensors for numbers.

    Args:
        signature: its parameters.
        call: the call that the user gives; guessed if None.
        loss: the loss that it should compute, short name in the catalogue; "" if unknown. Only calls that can express
            the loss are returned.
        arrays: the kinds of arrays to try in turn.
        guess: what the arrays were guessed from.

    Raises:
        TargetMisused: no call fits the parameters, or their names contradict the loss.
    """
    if call == "labels" and any(snake_case(p.name) in PARTNERS for p in signature.places[:2]):
        call = "partners" if "partners" in (LOSSES[loss].calls if loss in LOSSES else CALLS) else call
    calls = [(call, "")] if call else _guessed(signature, loss)
    queues: tuple[str, ...] = ("", "[D, K]", SAME_ROWS) if signature.keyword("negatives") is not None else ("",)
    if signature.further == HARD and (hard := signature.keyword(HARD)) is not None:
        queues = (ONE_EACH, "") if ONE_NEGATIVE.fullmatch(snake_case(hard.name)) else ("", ONE_EACH)
    several = re.search(r"multi[-_ ]?(label|hot)|one[-_ ]?hot", signature.source.lower())
    of_labels = ("", "one-hot", "column") if several else ("", "column", "one-hot")
    shapes: dict[str, tuple[str, ...]] = dict.fromkeys(("labels", "features", "similarities"), of_labels)
    shapes["mask"] = ("", "float")
    if any(re.fullmatch(_ONE_HOT, snake_case(p.name)) for p in signature.places):
        shapes["labels"] = ("one-hot",)
    if loss == "sigmoid" and (matrix := _matrix_of_pairs(signature)):
        shapes |= dict.fromkeys(("towers", "similarities"), (matrix,))
    second = "".join(snake_case(p.name) for p in signature.places[1:2])
    for shape, names in (("transposed", f"{_MATRICES}|{_OF_TOWERS}"), ("mask", _MASKS)):
        if re.fullmatch(names, second):
            shapes["similarities"] = (shape,)
    known = LOSSES[loss].matrices if loss in LOSSES else ("negatives", HARD)
    matrices = tuple(name for name in known if name != "ref_embeddings" and signature.requires(name))
    forms = [
        Form(call, words, labels, queue, kind, guess, matrices=matrices)
        for kind, (call, words), queue in product(arrays, calls, queues)
        for labels in shapes.get(call, ("",))
    ]
    # Try all calls before reshaping labels or the queue, and all of these before other arrays.
    plain = {call: shapes.get(call, ("",))[0] for call, _ in calls}
    forms.sort(
        key=lambda form: (
            arrays.index(form.arrays),
            form.labels not in (plain[form.call], "float"),
            queues.index(form.queue),
        )
    )
    numbers = [
        p for p in map(signature.keyword, ("temperature", "bias")) if p and not isinstance(p.default, (int, float))
    ]
    if "torch" in arrays and any(re.search(r"\A(?!.*float).*Tensor", str(p.annotation)) for p in numbers):
        return [replace(form, tensors="the annotation says so") for form in forms]
    return [*forms, *(it.of_tensors for it in forms if numbers and it.arrays == "torch")]


def _matrix_of_pairs(signature: Signature) -> str:
    """Return "signs" or "pairs" if the source shows that the labels of two towers are such a matrix; else ""."""
    labels, text = signature.keyword("labels"), signature.source
    if labels is None or re.search(rf"\b{labels.name}( *==?[^=]|\[|\.(unsqueeze|view|reshape))", text):
        return ""
    if re.search(rf"binary_cross_entropy_with_logits\(.*, *(target=)?{labels.name}\b", text):
        return "pairs"
    return "signs" if re.search(rf"sigmoid\(.*(\b{labels.name} *\*|\* *{labels.name}\b)", text) else ""


def _guessed(signature: Signature, loss: str) -> list[tuple[str, str]]:
    allowed = LOSSES[loss].calls if loss in LOSSES else tuple(call for call in CALLS if call != "towers")
    names = [p.name for p in signature.named]
    words = f"the parameters ({', '.join(names)})"
    places = [p for p in signature.places if p.kind is not p.KEYWORD_ONLY]
    required = [p for p in places if p.default is p.empty]
    found: dict[str, str] = {}
    strong: list[str] = []
    labelled = len(places) == 2 and re.fullmatch(_LABELS, places[1].name.lower()) is not None

    def misfits(call: str) -> bool:
        """Whether a call passes labels to a mask, or a view to the labels that the loss needs."""
        if call == "labels":
            return any(re.fullmatch(_MASKS, snake_case(p.name)) for p in places[1:2])
        needed, found = loss in LOSSES and LOSSES[loss].targets == "labels", signature.keyword("labels")
        return call == "views" and needed and any(found is p for p in places[:2])

    for call, shown, contrary in _DOCUMENTED:
        text = signature.documentation
        fits = len(places) == 1 or (call in ("similarities", "features") and labelled)
        if fits and call in allowed and re.search(shown, text) and not re.search(contrary, text):
            found[call] = "guessed from its name or docstring"
    for kept in (places, required):
        text = " ".join(snake_case(p.name) for p in kept).lower()
        for call, pattern in _WORDS:
            if re.fullmatch(pattern, text):
                named = "towers" if call == "views" and "towers" in allowed else call
                strong += [] if _WEAK.fullmatch(text) else [named]
                if named in allowed and not misfits(named):
                    found.setdefault(named, f"guessed from {words}")
    if "views" in found and "one_way" in allowed and _ONE_WAY.search(signature.documentation):
        found = {"one_way" if call == "views" else call: why for call, why in found.items()}
        found["one_way"] = "guessed from its docstring"
    if loss and not found and strong:
        what = f"{loss} cannot be computed by a target that is called with {strong[0]}"
        usable = [call for call in allowed if call != "command"]
        raise TargetMisused(f"{what}; {words} suggest this call; to use another, pass --call {'|'.join(usable)}")
    variadic = any(p.kind is p.VAR_POSITIONAL for p in signature.call.values())
    if not (variadic and not required):
        for call in _ORDER:
            least, most = _NUMBER.get(call, (2, 2))
            fits = len(required) <= most and len(places) >= least
            if call in allowed and fits and call not in found and not misfits(call):
                why = f"the loss {loss} and {words}" if loss else f"the number of {words.removeprefix('the ')}"
                found[call] = f"guessed from {why}"
    if not found:
        usable = [call for call in allowed if call != "command"]
        more = {"one_way": "; only the first views are anchors"}
        meant = "".join(f"\n    {it}: {', '.join(_GIVEN[it].values())}{more.get(it, '')}" for it in usable)
        raise TargetMisused(f"cannot guess from {words} how to call the target: pass --call {'|'.join(usable)}{meant}")
    return list(found.items())


_ROWS_OF_TRIAL = np.random.default_rng(20).normal(size=(8, 3)).round(2)
_MATRICES_OF_TRIAL = {"negatives": 7, HARD: 8}
"""The number of rows of each optional matrix."""
_LABELS_OF_TRIAL = [0, 1, 0, 2, 1, 0, 2, 0]


def trial_case(loss: str, options: Mapping[str, Any], matrices: Collection[str] = (), queue: str = "") -> Case:
    """Return a small batch: eight rows, or four in each of two towers. Every anchor has a positive.

    Args:
        loss: short name in the catalogue.
        options: values of options, such as the temperature.
        matrices: the optional matrices that it has, such as "negatives".
        queue: how hard negatives are passed; see ``Form``.
    """
    entry, rows = LOSSES[loss], _ROWS_OF_TRIAL
    half = len(rows) // 2
    others: dict[str, Any] = {"embeddings_b": rows[half:]} if entry.two_towers else {}
    numbers = _MATRICES_OF_TRIAL | ({HARD: half} if queue == ONE_EACH else {})
    others |= {name: rows[:number] + 1 for name, number in numbers.items() if name in matrices}
    partners = [(k + half) % len(rows) for k in range(len(rows))]
    arguments: dict[str, Any] = {
        "labels": _LABELS_OF_TRIAL,
        "partners": partners,
        "positive_pairs": [*map(list, enumerate(partners))],
    }
    own = {entry.targets: arguments[entry.targets]} if entry.targets else {}
    return Case("trial", loss, rows[:half] if entry.two_towers else rows, own, dict(options), others=others)


_ROWS_IN_WORDS = {"embeddings": "embeddings [N, D]"}
_VIEWS_IN_WORDS = {"view_a": "first views [N, D]", "view_b": "second views [N, D]"}
_GIVEN: Mapping[str, Mapping[str, str]] = {
    "labels": {**_ROWS_IN_WORDS, "labels": "class ids [N]"},
    "partners": {**_ROWS_IN_WORDS, "partners": "row of each row's positive [N]"},
    "mask": {**_ROWS_IN_WORDS, "mask": "mask of positives [N, N], without the diagonal"},
    "features": {"features": "features [items, views, D]", "labels": "class ids [items]"},
    **dict.fromkeys(OF_VIEWS, _VIEWS_IN_WORDS),
    "towers": {"view_a": "first tower [N, D]", "view_b": "second tower [N, D]"},
    "stacked": {"embeddings": "all first views, then all second views [N, D]"},
    "interleaved": {"embeddings": "views of each item in neighbouring rows [N, D]"},
    "similarities": {"similarities": "similarities [N, N]", "labels": "class ids [N]"},
    "pairs": {**_ROWS_IN_WORDS, "positive_pairs": "row numbers of positive pairs [P, 2]"},
}
"""The arrays of each call, by their names in a wrapper, in words."""

_INSTEAD = {
    **{"mask": _GIVEN["mask"]["mask"], "transposed": "the same, transposed"},
    "signs": "matrix of all pairs [N, N], 1 for positive and -1 for negative ones",
    "pairs": "matrix of all pairs [N, N], 1 for positive and 0 for negative ones",
}
"""What is passed instead of labels, by ``Form.labels``, in words."""


@dataclass(frozen=True)
class Reading:
    """Another reading of a signature: what would be a mistake as the target was called is right in this reading.

    Attributes:
        options: the options of ``pairproof check`` that choose this reading.
        mistake: the mistake, if the target was called rightly.
        meaning: what the signature means, if it was not.
    """

    options: Mapping[str, str]
    mistake: str
    meaning: str

    @property
    def question(self) -> str:
        """The question to the user."""
        option = " ".join(f"--{name} {value}" for name, value in self.options.items())
        return f"either {self.mistake}, or {self.meaning}: then {option}"


_INDEX = re.compile(r"p|t|j|idx|(\w+_)?(partners?|pos|positives?|pairs?|targets?|match(es)?|ind(ex|ices)|idx)(_\w+)?")
_NEIGHBOURS = re.compile(
    r"interleav|adjacent|neighbou?r|consecutive|\^ ?1\b|bitwise_xor|\[\d?::2|(//|%) ?2\b|2 ?\* ?\w+ ?\+ ?1\b"
)
_HALVES = re.compile(r"/ ?2\b|\.(chunk|roll)\(|\bstack(ed)?\b|first views")
_SCALED = r"(\b(scale|inverse|1 ?/ ?(temperature|tau|t))\b|multipl)"


def other_readings(signature: Signature, form: Form, loss: str) -> Iterator[Reading]:
    """Yield the other readings of a signature that the source supports, at most three.

    Args:
        signature: the parameters.
        form: how the target is called.
        loss: the loss that it claims to compute, short name in the catalogue.
    """
    calls, places, text = LOSSES[loss].calls, signature.places, signature.documentation
    if form.call == "labels" and "partners" in calls and len(places) > 1:
        name = places[0 if signature.labels_first else 1].name
        if _INDEX.fullmatch(name.lower()) or re.search(r"\bpartner|(row|index|indices) of", text):
            mistake = "class ids are used as row numbers"
            yield Reading({"call": "partners"}, mistake, f"{name} means the row of each row's positive")
    alone = [p for p in places if p.default is p.empty] == places[:1]
    labelled = form.call == "labels" and "interleaved" in calls and alone
    if (form.call == "stacked" or labelled) and form.words and _NEIGHBOURS.search(text + signature.source):
        although = ", whatever labels are passed" if labelled else " although the views are stacked"
        mistake = f"neighbouring rows are positives{although}"
        yield Reading({"call": "interleaved"}, mistake, f"the views of {places[0].name} are interleaved")
    if form.call == "interleaved" and form.words and _HALVES.search(text + signature.source):
        mistake = "rows k and k + N/2 are positives although the views are interleaved"
        yield Reading({"call": "stacked"}, mistake, f"the views of {places[0].name} are stacked")
    own = signature.keyword("temperature")
    if own is not None and not signature.inverted(own.name):
        default = own.default if isinstance(own.default, (int, float)) else 0
        named = default > 1 and own.name not in ("temperature", "tau", "T")
        if named or re.search(rf"\b{own.name.lower()}\b[^.]*{_SCALED}", text):
            mistake = f"similarities are multiplied by {own.name} instead of divided"
            yield Reading({"scale": own.name}, mistake, f"{own.name} means 1 / temperature")


def reading(signature: Signature, form: Form, keywords: Collection[str], loss: str = "") -> dict[str, str]:
    """Return what each parameter of a target gets, in words.

    Args:
        signature: its parameters.
        form: how it is called.
        keywords: the names in the catalogue of the further arguments that are passed.
        loss: the loss that it claims to compute, short name in the catalogue; "" if unknown.
    """
    own = form.given(signature)
    given = {**own, "labels": own.get("labels", "class ids [items]")}
    one_each = LOSSES[loss].targets != "labels" if loss in LOSSES else form.call in OF_VIEWS
    if one_each:
        each = _INSTEAD.get(form.labels, "one class per item [items]")
        given["labels"] = each if signature.requires("labels") else ""
    words = {it: f"{it} {ONE_EACH}" if it == HARD and form.queue == ONE_EACH else it for it in keywords}
    constructor, call = _passed(signature, form, given if form.several else own, words)
    return {**constructor, **call}


def listed(found: Mapping[str, str]) -> str:
    """Return a reading in one line."""
    return READING + ", ".join(f"{name} = {words}" for name, words in found.items())


READING = "reading: "


def _passed(
    signature: Signature, form: Form, given: Mapping[str, str], keywords: Mapping[str, str], **facts: Any
) -> tuple[dict[str, str], dict[str, str]]:
    """Return what each parameter of the constructor and of the call gets, in words or as code."""
    positional, more = dict(given), dict(keywords)
    if form.several and (labels := positional.pop("labels", "")) and signature.keyword("labels"):
        more["labels"] = labels
    values = [*positional.values()]
    if form.call == "similarities":
        if signature.keyword("temperature") is None and "temperature" in more:
            values[0] += f" / {more.pop('temperature')}"
        if signature.keyword("bias") is None and "bias" in more:
            values[0] += f" + {more.pop('bias')}"
        values = values[: max(len(signature.places), 1)]
    if signature.labels_first and form.call in ("labels", "partners", "mask", "similarities"):
        values.reverse()
    return signature.arguments(values, more, **facts)


def wrapper(spec: object, signature: Signature, form: Form) -> list[str]:
    """Return the lines of a function that calls a target, with ``...`` for unknown arguments.

    Args:
        spec: the target, or the text that names it.
        signature: its parameters.
        form: how the wrapper is called.
    """
    place, _, attribute = describe(spec).rpartition(":")
    module = re.sub(r"\.py$", "", place.rpartition("/")[2])
    root, _, rest = attribute.partition(".")
    names = {name: name for name in form.given(signature)}
    if form.several and signature.keyword("labels") is not None:
        names["labels"] = "labels"
    first = next(iter(names))
    features = form.call == "features"
    facts = {
        "batch_size": f"len({first})",
        "n_views": f"{first}.shape[1]" if features else "2" if form.call in OF_VIEWS else "1",
        **{"device": f"{first}.device", "dim": f"{first}.shape[-1]", "world_size": "1", "rank": "0"},
    }
    required = (it for it in SCALARS if signature.requires(it))
    # Without a parameter for it, the temperature is built in and claimed.
    takes = signature.keyword("temperature") is not None or signature.takes_anything or form.call == "similarities"
    options = {name: name for name in (*["temperature"] * takes, *form.matrices, *required)}
    dtype = f"{first}.dtype" if form.tensors else None
    constructor, call = _passed(signature, form, names, options, facts=facts, dtype=dtype)
    importable = "<" not in attribute and bool(root)
    start = f"from {module} import {root}" if importable else "target = ...  # a local function has no name to import"
    thing = (f"{root}.{rest}" if rest else root) if importable else "target"
    own = f"adapted_{re.sub(chr(92) + 'W', '_', attribute) if importable else 'target'}"
    given = ", ".join(_code(signature, signature.call, call))
    if signature.constructs:
        made = ", ".join(_code(signature, signature.constructor, constructor))
        made, given = (given, "") if signature.of_constructor else (made, given)
        method = method_of(signature.thing)
        thing = f"{thing}({made})" + ("" if method == "__call__" else f".{method}")
    imports = [f"import {it}" for it in ("types", "torch") if f"{it}." in thing + given]
    imports += [""] * bool(imports)
    lines = [*imports, start, "", "", f"def {own}({', '.join((*names, *options))}):"]
    return [*lines, "    # return only the loss, as a tensor", f"    return {thing}({given})"]


def _code(signature: Signature, parameters: Mapping[str, inspect.Parameter], values: Mapping[str, str]) -> list[str]:
    """Return the arguments of a call as code."""
    texts: dict[str, str] = {}
    for p in parameters.values():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            continue
        value = repr(signature.init[p.name]) if p.name in signature.init else values.get(p.name)
        if value is None and p.default is p.empty:
            value = "None" if is_ignored(p) else "..."
        if value is not None:
            texts[p.name] = re.sub(r"\Alog\((.*)\)\Z", r"torch.as_tensor(\1, dtype=torch.float64).log()", value)
    for pack in signature.packs:
        if pack.keys[0] in parameters:
            own = {key: texts.pop(key) for key in pack.keys if key in texts}
            texts = {pack.name: pack.code(own), **texts}
    unnamed = [
        name for name in texts if name in parameters and parameters[name].kind is inspect.Parameter.POSITIONAL_ONLY
    ]
    return [text if name in unnamed else f"{name}={text}" for name, text in texts.items()]


def cannot_be_called(spec: object, signature: Signature, failures: Sequence[tuple[Form, str]]) -> list[str]:
    """Return the lines of the error for a target that no form fits.

    The error of the most plausible form comes first: an error of the machine, such as a missing GPU, or else that of
    the first form.

    Args:
        spec: the target, or the text that names it.
        signature: its parameters.
        failures: the forms that were tried, and the errors.
    """
    form, error = next((one for one in failures if _OF_MACHINE.search(one[1])), failures[0])
    several = len({it.arrays for it, _ in failures}) > 1
    others: dict[str, str] = {}
    for it, words in failures:
        if _line(words) not in (_line(error), *others.values()):
            others.setdefault(f"{it.call}{f', {it.arrays} arrays' if several else ''}", _line(words))
    first = [
        f"called with {form.call} on a small batch, it fails: {error}",
        *(f"    {name}: {words}" for name, words in others.items()),
    ]
    if lacks_gpu(error):
        return [*first, "It needs a GPU, and there is none here: where there is one, pass --device cuda."]
    lines = wrapper(spec, signature, replace(form, labels=""))
    unknown = re.findall(r"(\w+)=\.\.\.", lines[-1])
    own = getattr(signature.thing, "__name__", type(signature.thing).__name__)
    if needed := [name for name in unknown if not _is_setting(signature, name)] or _objects(signature, form, error):
        advice = f"Called this way, it needs an array or object that the small batch lacks: {', '.join(needed)}. Copy"
    elif unknown:
        advice = f"Pass {' '.join(f'--init {name}=VALUE' for name in unknown)}. Or copy"
    elif re.match(rf"NameError: |AttributeError: '{own}' object has no attribute ", error):
        advice = "The loss itself raises this error, not the call. To work around it, copy"
    elif not several and _is_named(signature, [it for it, _ in failures]) and not _OF_CALL.search(error):
        advice = "If its parameters mean what their names say, the loss itself raises this error. Otherwise, pass "
        advice += "--call, or copy"
    else:
        advice = "To call it in another way, pass --call or --init. Or copy"
    filled = "fill in each ..." if "..." in "".join(lines) else "change it"
    return [
        *first,
        f"{advice} this wrapper, {filled}, and check it:",
        "",
        *(f"    {line}".rstrip() for line in lines),
    ]


def _is_named(signature: Signature, forms: Sequence[Form]) -> bool:
    """Whether one call was guessed from names that are not too general, and the user gives no values."""
    required = [p for p in signature.places if p.default is p.empty]
    texts = (" ".join(snake_case(p.name) for p in kept).lower() for kept in (signature.places, required))
    named = {form.call for form in forms if form.words.startswith("guessed from the parameters")}
    return named == {forms[0].call} and not signature.init and not any(map(_WEAK.fullmatch, texts))


def _is_setting(signature: Signature, name: str) -> bool:
    """Whether a parameter can be a setting, by its annotation, by what takes it, or by its name and its use."""
    if any(pack.name.lower() in SETTINGS and name in pack.keys for pack in signature.packs):
        return True
    annotation = str((signature.constructor.get(name) or signature.call[name]).annotation)
    if not re.search(r"\binspect\._empty\b|\bAny\b", annotation):
        return re.search(r"\b(int|float|bool|Literal|str\b(?!,))", annotation) is not None
    used = re.search(rf"(?<![\w.]){name}(\.[a-z]|\[)", signature.source)
    return name in signature.constructor or not (used or _OF_ARRAYS.fullmatch(snake_case(name)))


def _objects(signature: Signature, form: Form, error: str) -> list[str]:
    """Return the queue if the target reads an attribute of it that arrays do not have, as the error shows."""
    lacks = re.search(r"'(?:Tensor|ndarray)' object has no attribute '(\w+)'", error)
    queues = [p.name for p in map(signature.keyword, form.matrices) if p]
    return [name for name in queues if lacks and re.search(rf"(?<![\w.]){name}\.{lacks[1]}\b", signature.source)]


_OF_CALL = re.compile(r"(?i)\A(?!\w*(error|exception): )|\A(type|attribute)error|shape|size|dim|expect|must|require")
"""What an error says if arguments of another kind or shape may be needed, or if it is none of the target."""

_OF_MACHINE = re.compile(rf"{OF_GPU.pattern}|No module named", re.IGNORECASE)


def _line(error: str) -> str:
    first, _, rest = error.partition("\n")
    return f"{first[:160]}{'...' if rest or len(first) > 160 else ''}"
