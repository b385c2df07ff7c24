"""Bad input gives one clear error, the same in both rooms, and never a silent NaN."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from pairproof import fast, reference
from pairproof.conformance.catalogue import LOSSES, Loss

ROOMS = {"reference": reference, "fast": fast}
EMBEDDINGS = np.array([[1.0, 0.5, -0.25], [0.75, 0.5, 0.125], [-0.5, 1.0, 0.25], [0.25, -1.0, 0.5]])
TARGETS = {
    "labels": np.array([0, 0, 1, 1]),
    "partners": np.array([1, 0, 3, 2]),
    "positive_pairs": np.array([[0, 1], [1, 0], [2, 3], [3, 2], [0, 1], [1, 0]]),
}
POSITIVES = np.array([[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]], dtype=bool)
ANCHORS = np.array([True, False, True, True])


@dataclasses.dataclass(frozen=True)
class Bad:
    """One bad call: what is put in place of good arguments, and the error it must give.

    ``argument`` is what the message must start with; ``arguments`` replace those of a good call (None takes the target
    away); ``losses`` limits the row to some losses, where the argument alone does not.
    """

    title: str
    argument: str
    arguments: Mapping[str, Any]
    error: type[Exception]
    phrases: Sequence[str]
    losses: Callable[[Loss], bool] = lambda _: True

    def applies(self, loss: Loss) -> bool:
        names = {"embeddings", loss.targets, *loss.keywords}
        return names.issuperset(self.arguments) and self.argument in names and self.losses(loss)


def with_value(array: np.ndarray, index: tuple[int, ...], value: float) -> np.ndarray:
    changed = array.copy()
    changed[index] = value
    return changed


def only(*names: str) -> Callable[[Loss], bool]:
    return lambda loss: loss.name in names


def temperatures(name: str) -> list[Bad]:
    bad_values = {"zero": 0.0, "negative": -0.5, "nan": math.nan, "infinite": math.inf}
    bad_types: dict[str, object] = {"string": "0.1", "bool": True} | (
        {} if name == "base_temperature" else {"None": None}
    )
    return [
        Bad(f"{name} too large for a float", name, {name: 10**400}, ValueError, ("positive",)),
        *(
            Bad(f"{name} {title}", name, {name: value}, ValueError, ("positive", str(value)))
            for title, value in bad_values.items()
        ),
    ] + [Bad(f"{name} {title}", name, {name: value}, TypeError, ("number",)) for title, value in bad_types.items()]


def options() -> list[Bad]:
    """An unknown value of every option, and a value of the wrong type."""
    rows = []
    for loss in LOSSES.values():
        for keyword, allowed in loss.choices.items():
            for value in ("mystery", allowed[0].upper(), None):
                rows.append(
                    Bad(
                        f"{keyword} {value}",
                        keyword,
                        {keyword: value},
                        ValueError,
                        (*allowed, repr(value)),
                        only(loss.name),
                    )
                )
    return rows


TABLE = [
    Bad("rank 1", "embeddings", {"embeddings": EMBEDDINGS[0]}, ValueError, ("[N, D]", "[3]")),
    Bad("rank 3", "embeddings", {"embeddings": EMBEDDINGS[None]}, ValueError, ("[N, D]", "[1, 4, 3]")),
    Bad("rank 0", "embeddings", {"embeddings": np.array(1.0)}, ValueError, ("[N, D]", "[]")),
    Bad("no rows", "embeddings", {"embeddings": np.zeros((0, 3))}, ValueError, ("at least 2", "[0, 3]")),
    Bad("one row", "embeddings", {"embeddings": EMBEDDINGS[:1]}, ValueError, ("at least 2", "[1, 3]")),
    Bad("no columns", "embeddings", {"embeddings": np.zeros((4, 0))}, ValueError, ("at least 1", "[4, 0]")),
    Bad("integers", "embeddings", {"embeddings": np.ones((4, 3), dtype=np.int64)}, TypeError, ("floating", "int64")),
    Bad("booleans", "embeddings", {"embeddings": np.ones((4, 3), dtype=bool)}, TypeError, ("floating", "bool")),
    Bad("nan", "embeddings", {"embeddings": with_value(EMBEDDINGS, (2, 1), math.nan)}, ValueError, ("finite", "row 2")),
    Bad("inf", "embeddings", {"embeddings": with_value(EMBEDDINGS, (3, 0), math.inf)}, ValueError, ("finite", "row 3")),
    Bad(
        "-inf", "embeddings", {"embeddings": with_value(EMBEDDINGS, (0, 2), -math.inf)}, ValueError, ("finite", "row 0")
    ),
    Bad(
        "zero vector under cosine",
        "embeddings",
        {"embeddings": with_value(EMBEDDINGS, (2,), 0.0), "similarity": "cosine"},
        ValueError,
        ("zero", "row 2"),
    ),
    Bad(
        "vector of negative zeros under cosine",
        "embeddings",
        {"embeddings": with_value(EMBEDDINGS, (1,), -0.0), "similarity": "cosine"},
        ValueError,
        ("zero", "row 1"),
    ),
    Bad("too few", "labels", {"labels": np.array([0, 0, 1])}, ValueError, ("[4]", "[3]")),
    Bad("too many", "labels", {"labels": np.array([0, 0, 1, 1, 2])}, ValueError, ("[4]", "[5]")),
    Bad("none at all", "labels", {"labels": np.array([], dtype=np.int64)}, ValueError, ("[4]", "[0]")),
    Bad("2-D", "labels", {"labels": np.array([[0, 0, 1, 1]])}, ValueError, ("[4]", "[1, 4]")),
    Bad("one-hot", "labels", {"labels": np.eye(4, dtype=np.int64)}, ValueError, ("[4]", "[4, 4]")),
    Bad("floats", "labels", {"labels": np.array([0.0, 0.0, 1.0, 1.0])}, TypeError, ("integer", "float64")),
    Bad(
        "labels and positives",
        "labels",
        {"labels": TARGETS["labels"], "positives": POSITIVES},
        ValueError,
        ("positives", "exactly one", "both"),
    ),
    Bad("neither", "labels", {"labels": None}, ValueError, ("positives", "exactly one", "neither")),
    Bad("shape", "positives", {"labels": None, "positives": POSITIVES[:3]}, ValueError, ("[4, 4]", "[3, 4]")),
    Bad("one row", "positives", {"labels": None, "positives": POSITIVES[0]}, ValueError, ("[4, 4]", "[4]")),
    Bad(
        "integers", "positives", {"labels": None, "positives": POSITIVES.astype(np.int64)}, TypeError, ("bool", "int64")
    ),
    Bad("floats", "positives", {"labels": None, "positives": POSITIVES.astype(float)}, TypeError, ("bool", "float64")),
    Bad("too few", "anchors", {"anchors": ANCHORS[:3]}, ValueError, ("[4]", "[3]")),
    Bad("2-D", "anchors", {"anchors": ANCHORS[None]}, ValueError, ("[4]", "[1, 4]")),
    Bad("row numbers", "anchors", {"anchors": np.array([0, 2, 3, 1])}, TypeError, ("bool", "int64")),
    Bad("too few", "partners", {"partners": np.array([1, 0, 3])}, ValueError, ("[4]", "[3]")),
    Bad("2-D", "partners", {"partners": np.array([[1, 0, 3, 2]])}, ValueError, ("[4]", "[1, 4]")),
    Bad("floats", "partners", {"partners": np.array([1.0, 0.0, 3.0, 2.0])}, TypeError, ("integer", "float64")),
    Bad("booleans", "partners", {"partners": TARGETS["partners"].astype(bool)}, TypeError, ("integer", "bool")),
    Bad("too large", "partners", {"partners": np.array([1, 0, 97, 2])}, ValueError, ("range", "row 2", "97")),
    Bad("negative", "partners", {"partners": np.array([-1, 0, 3, 2])}, ValueError, ("range", "row 0", "-1")),
    Bad("itself", "partners", {"partners": np.array([1, 0, 2, 3])}, ValueError, ("itself", "row 2")),
    Bad("not mutual", "partners", {"partners": np.array([1, 2, 3, 0])}, ValueError, ("mutual", "row 0")),
    Bad("shared partner", "partners", {"partners": np.array([1, 0, 0, 0])}, ValueError, ("mutual", "row 2")),
    Bad("None", "partners", {"partners": None}, TypeError, ()),
    Bad("1-D", "positive_pairs", {"positive_pairs": np.array([0, 1])}, ValueError, ("[M, 2]", "[2]")),
    Bad("triples", "positive_pairs", {"positive_pairs": np.array([[0, 1, 2]])}, ValueError, ("[M, 2]", "[1, 3]")),
    Bad("floats", "positive_pairs", {"positive_pairs": np.array([[0.0, 1.0]])}, TypeError, ("integer", "float64")),
    Bad("booleans", "positive_pairs", {"positive_pairs": np.eye(2, dtype=bool)}, TypeError, ("integer", "bool")),
    Bad(
        "too large",
        "positive_pairs",
        {"positive_pairs": with_value(TARGETS["positive_pairs"], (5, 1), 97)},
        ValueError,
        ("range", "5", "97"),
    ),
    Bad(
        "negative",
        "positive_pairs",
        {"positive_pairs": with_value(TARGETS["positive_pairs"], (5, 0), -1)},
        ValueError,
        ("range", "5", "-1"),
    ),
    Bad("None", "positive_pairs", {"positive_pairs": None}, TypeError, ()),
    Bad(
        "mean_pairs",
        "reduction",
        {"reduction": "mean_pairs"},
        ValueError,
        ("sum", "none", "got 'mean_pairs'"),
        only(*(name for name in LOSSES if name != "nt_xent_pairwise")),
    ),
    *temperatures("temperature"),
    *temperatures("base_temperature"),
    *options(),
]

ROWS = [
    pytest.param(bad, loss, id=f"{loss.name}-{bad.argument}: {bad.title}")
    for bad, loss in itertools.product(TABLE, LOSSES.values())
    if bad.applies(loss)
]


def for_room(room: str, value: Any) -> Any:
    """The value as the room takes it: numpy arrays become tensors for ``fast``."""
    return torch.from_numpy(value.copy()) if room == "fast" and isinstance(value, np.ndarray) else value


def call(room: str, loss: Loss, **changes: Any) -> Any:
    """Call the loss in a room with good arguments, ``changes`` put in their place."""
    good = {"embeddings": EMBEDDINGS, loss.targets: TARGETS[loss.targets]}
    arguments = {name: for_room(room, value) for name, value in (good | changes).items()}
    result = getattr(ROOMS[room], loss.function)(**arguments)
    return result.loss if room == "reference" else result


def assert_message(error: BaseException, argument: str, phrases: Sequence[str]) -> None:
    message = str(error)
    assert message.startswith(f"{argument}:"), message
    assert "\n" not in message
    for phrase in phrases:
        assert phrase in message, f"{phrase!r} is not in: {message}"


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize(("bad", "loss"), ROWS)
def test_one_clear_error(room: str, bad: Bad, loss: Loss) -> None:
    with pytest.raises(bad.error) as caught:
        call(room, loss, **bad.arguments)
    assert type(caught.value) is bad.error
    assert_message(caught.value, bad.argument, bad.phrases)


@pytest.mark.parametrize("argument", ["embeddings", *TARGETS, "positives", "anchors", "temperature", "reduction"])
def test_the_table_reaches_every_loss_that_takes_the_argument(argument: str) -> None:
    takes = {loss.name for loss in LOSSES.values() if argument in {"embeddings", loss.targets, *loss.keywords}}
    assert takes
    assert {
        loss.name for bad in TABLE if bad.argument == argument for loss in LOSSES.values() if bad.applies(loss)
    } == takes


MASKS = {"positives": POSITIVES, "anchors": ANCHORS}


def tensor_arguments(loss: Loss) -> list[str]:
    return [loss.targets, *(name for name in MASKS if name in loss.keywords)]


FAST_ROWS = [(loss, name) for loss in LOSSES.values() for name in ["embeddings", *tensor_arguments(loss)]]


def good_tensor_arguments(loss: Loss, name: str) -> dict[str, Any]:
    """Good arguments, ``name`` among them."""
    good: dict[str, np.ndarray] = {"embeddings": EMBEDDINGS}
    if name != "positives":
        good[loss.targets] = TARGETS[loss.targets]
    if name in MASKS:
        good[name] = MASKS[name]
    return {key: for_room("fast", value) for key, value in good.items()}


@pytest.mark.parametrize(("loss", "name"), [pytest.param(*row, id=f"{row[0].name}-{row[1]}") for row in FAST_ROWS])
def test_fast_refuses_what_is_not_a_tensor(loss: Loss, name: str) -> None:
    arguments = good_tensor_arguments(loss, name)
    for value in (arguments[name].tolist(), arguments[name].numpy()):
        with pytest.raises(TypeError) as caught:
            getattr(fast, loss.function)(**arguments | {name: value})
        assert_message(caught.value, name, ("tensor", type(value).__name__))


@pytest.mark.parametrize(
    ("loss", "name"), [pytest.param(*row, id=f"{row[0].name}-{row[1]}") for row in FAST_ROWS if row[1] != "embeddings"]
)
def test_fast_refuses_mixed_devices(loss: Loss, name: str) -> None:
    arguments = good_tensor_arguments(loss, name)
    with pytest.raises(ValueError, match="device") as caught:
        getattr(fast, loss.function)(**arguments | {name: arguments[name].to("meta")})
    assert_message(caught.value, name, ("device", "cpu", "meta"))


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_fast_refuses_complex_embeddings(loss: Loss) -> None:
    with pytest.raises(TypeError) as caught:
        call("fast", loss, embeddings=EMBEDDINGS.astype(np.complex128))
    assert_message(caught.value, "embeddings", ("floating", "complex128"))


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_fast_refuses_values_that_are_not_finite_in_every_dtype(loss: Loss, dtype: torch.dtype) -> None:
    embeddings = torch.from_numpy(with_value(EMBEDDINGS, (1, 0), math.inf)).to(dtype)
    with pytest.raises(ValueError, match="finite") as caught:
        call("fast", loss, embeddings=embeddings)
    assert_message(caught.value, "embeddings", ("finite", "row 1"))


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize(
    ("keyword", "value"),
    [("temperature", 0.0), ("temperature", "0.1"), ("similarity", "mystery"), ("reduction", "avg")],
)
def test_modules_refuse_what_their_functions_refuse(loss: Loss, keyword: str, value: object) -> None:
    with pytest.raises((TypeError, ValueError)) as from_function:
        call("fast", loss, **{keyword: value})
    with pytest.raises(type(from_function.value)) as from_module:
        getattr(fast, loss.module_class)(**{keyword: value})(
            for_room("fast", EMBEDDINGS), for_room("fast", TARGETS[loss.targets])
        )
    assert str(from_module.value) == str(from_function.value)


LAYOUT_TABLE: list[tuple[str, tuple[Any, ...], type[Exception], str, tuple[str, ...]]] = [
    ("interleaved_partners", (5,), ValueError, "n", ("even", "5")),
    ("interleaved_partners", (0,), ValueError, "n", ("even", "0")),
    ("interleaved_partners", (-2,), ValueError, "n", ("even", "-2")),
    ("interleaved_partners", (4.0,), TypeError, "n", ("integer", "float")),
    ("stacked_partners", (5,), ValueError, "n", ("even", "5")),
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
    (
        "repeat_labels",
        (TARGETS["labels"], 2, "mystery"),
        ValueError,
        "layout",
        ("stacked", "interleaved", "'mystery'"),
    ),
    ("repeat_labels", (TARGETS["labels"], 0), ValueError, "n_views", ("0",)),
    ("repeat_labels", (TARGETS["labels"], 2.0), TypeError, "n_views", ("integer", "float")),
    ("repeat_labels", (np.array([[0, 1]]), 2), ValueError, "labels", ("[1, 2]",)),
]


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize(
    ("function", "arguments", "error", "name", "phrases"),
    [pytest.param(*row, id=f"{k}-{row[0]}-{row[3]}") for k, row in enumerate(LAYOUT_TABLE)],
)
def test_layout_helpers_refuse(
    room: str, function: str, arguments: tuple[Any, ...], error: type[Exception], name: str, phrases: tuple[str, ...]
) -> None:
    helper = getattr(ROOMS[room], function)
    with pytest.raises(error, match=f"^{name}: ") as caught:
        helper(*(for_room(room, argument) for argument in arguments))
    assert_message(caught.value, name, phrases)


@pytest.mark.parametrize(
    ("function", "value", "name"),
    [
        ("flatten_views", np.zeros((2, 2, 3)), "features"),
        ("split_views", EMBEDDINGS, "embeddings"),
        ("repeat_labels", TARGETS["labels"], "labels"),
    ],
)
def test_layout_helpers_of_fast_refuse_what_is_not_a_tensor(function: str, value: np.ndarray, name: str) -> None:
    arguments = [value] if function == "flatten_views" else [value, 2]
    with pytest.raises(TypeError) as caught:
        getattr(fast, function)(*arguments)
    assert_message(caught.value, name, ("tensor", "ndarray"))


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("scalar", [1, True, "1.0", None], ids=repr)
def test_reference_refuses_objects_that_are_no_floating_scalars(loss: Loss, scalar: object) -> None:
    """Balls and other number types come as objects, so an object array is looked into."""
    embeddings = EMBEDDINGS.astype(object)
    embeddings[2, 1] = scalar
    with pytest.raises(TypeError) as caught:
        call("reference", loss, embeddings=embeddings)
    assert_message(caught.value, "embeddings", ("floating", "row 2"))


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
        "one lonely anchor": np.array([0, 0, 0, 1]),
        "all anchors lonely": np.arange(4),
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


def option_values(loss: Loss) -> list[dict[str, str]]:
    """Every combination of the loss's options, but the policy that asks for NaN."""
    values = {name: [value for value in allowed if value != "nan"] for name, allowed in loss.choices.items()}
    return [dict(zip(values, choice, strict=True)) for choice in itertools.product(*values.values())]


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("temperature", [1e-3, 0.07, 1e3])
@pytest.mark.parametrize("name", HARD_EMBEDDINGS)
def test_good_input_gives_no_nan(room: str, loss: Loss, temperature: float, name: str) -> None:
    """No choice of options but "nan" makes a NaN of finite input; a dot product out of range may be infinite."""
    for (title, targets), anchors, options in itertools.product(
        HARD_TARGETS[loss.targets].items(), HARD_ANCHORS.values(), option_values(loss)
    ):
        if options["similarity"] == "dot" and name == "largest numbers":
            continue
        changes = {loss.targets: targets, "anchors": anchors, "temperature": temperature, **options}
        values = np.asarray(call(room, loss, embeddings=HARD_EMBEDDINGS[name], **changes), dtype=np.float64)
        assert np.isfinite(values).all(), (title, options, values)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("temperature", [1e-3, 0.07, 1e3])
@pytest.mark.parametrize("name", ["plain", "all rows equal", "opposite rows"])
def test_good_input_gives_no_nan_in_the_gradient(loss: Loss, temperature: float, name: str) -> None:
    for (title, targets), anchors, options in itertools.product(
        HARD_TARGETS[loss.targets].items(), HARD_ANCHORS.values(), option_values(loss)
    ):
        embeddings = torch.from_numpy(HARD_EMBEDDINGS[name].copy()).requires_grad_()
        changes = {loss.targets: targets, "anchors": anchors, "temperature": temperature, **options}
        call("fast", loss, embeddings=embeddings, **changes).sum().backward()
        assert embeddings.grad is not None
        assert torch.isfinite(embeddings.grad).all(), (title, options, embeddings.grad)


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_no_anchors_give_zero(room: str, loss: Loss) -> None:
    for reduction in loss.choices["reduction"]:
        value = call(room, loss, anchors=np.zeros(4, dtype=bool), reduction=reduction)
        if reduction == "none":
            assert len(value) == 0
        else:
            assert float(value) == 0.0


NAN_POLICIES: list[tuple[str, dict[str, Any], list[bool]]] = [
    ("no_positive", {"labels": np.array([0, 0, 0, 1])}, [False, False, False, True]),
    ("no_negative", {"labels": np.zeros(4, dtype=np.int64), "denominator": "only_negatives"}, [True] * 4),
    (
        "no_negative",
        {"positive_pairs": np.array([[1, 0], [1, 2], [1, 3]])},
        [False, True, False, False],
    ),
]


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize(
    ("loss", "policy", "changes", "expected"),
    [
        pytest.param(loss, *row, id=f"{loss.name}-{row[0]}")
        for loss in LOSSES.values()
        for row in NAN_POLICIES
        if {loss.targets, *loss.keywords}.issuperset({row[0], *row[1]})
    ],
)
def test_nan_comes_where_it_was_asked_for(
    room: str, loss: Loss, policy: str, changes: dict[str, Any], expected: list[bool]
) -> None:
    values = np.asarray(call(room, loss, reduction="none", **changes, **{policy: "nan"}), dtype=np.float64)
    assert np.isnan(values).tolist() == expected
    for reduction in loss.choices["reduction"]:
        if reduction != "none":
            assert math.isnan(float(call(room, loss, reduction=reduction, **changes, **{policy: "nan"})))


SHAPES = st.one_of(
    st.just((4, 3)), st.lists(st.integers(0, 4), max_size=3).map(tuple), st.tuples(st.integers(0, 5), st.integers(0, 4))
)
DTYPES = st.sampled_from([np.float64, np.float32, np.float16, np.int64, np.int32, np.uint8, np.bool_])
NUMBERS = st.sampled_from([0.0, 0.0, 1.0, -1.0, 0.5, 2.0, 3.0, 4.0, 97.0, -0.25, math.nan, math.inf])


TEMPERATURES = st.sampled_from([0.07, 1, 1e-3, 1e3, 0, -1.0, math.nan, math.inf, "1", True, None])


@st.composite
def arrays(draw: st.DrawFn, good: np.ndarray) -> np.ndarray:
    """An array of some shape, dtype and values, often those of the good one."""
    shape = draw(st.one_of(st.just(good.shape), SHAPES))
    dtype = draw(st.one_of(st.just(good.dtype), DTYPES))
    values = draw(st.lists(NUMBERS, min_size=math.prod(shape), max_size=math.prod(shape)))
    if np.dtype(dtype).kind != "f":
        values = [abs(value) if math.isfinite(value) else 1.0 for value in values]
    return np.array(values, dtype=dtype).reshape(shape)


@st.composite
def calls(draw: st.DrawFn) -> tuple[Loss, dict[str, Any]]:
    """A loss and arguments, of which at most two may be bad."""
    loss = draw(st.sampled_from(list(LOSSES.values())))
    arrays_of = {"embeddings": EMBEDDINGS, loss.targets: TARGETS[loss.targets]}
    arguments: dict[str, Any] = dict(arrays_of)
    arrays_of |= {name: mask for name, mask in MASKS.items() if name in loss.keywords}
    for name in draw(st.sets(st.sampled_from([*arrays_of, "temperature", "base_temperature"]), max_size=2)):
        if name in arrays_of:
            arguments[name] = draw(st.one_of(arrays(arrays_of[name]), st.just(arrays_of[name])))
        else:
            arguments[name] = draw(TEMPERATURES)
    if "positives" in arguments and draw(st.booleans()):
        arguments["labels"] = None
    for name, allowed in loss.choices.items():
        if draw(st.booleans()):
            arguments[name] = draw(st.sampled_from([value for value in allowed if value != "nan"]))
    return loss, arguments


def outcome(room: str, loss: Loss, arguments: dict[str, Any]) -> str:
    """Whether the call is refused; an error is checked to name an argument, a value to be no NaN."""
    try:
        values = call(room, loss, **arguments)
    except (TypeError, ValueError) as error:
        refusal = error
    else:
        assert not np.isnan(np.asarray(values, dtype=np.float64)).any(), values
        return "accepted"
    name = str(refusal).split(":")[0]
    assert name in {"embeddings", loss.targets, *loss.keywords}, refusal
    assert_message(refusal, name, ())
    return "refused"


@settings(max_examples=1000, derandomize=True, deadline=None, database=None)
@given(calls())
def test_both_rooms_refuse_the_same_calls(drawn: tuple[Loss, dict[str, Any]]) -> None:
    loss, arguments = drawn
    expected = outcome("reference", loss, arguments)
    event(f"{loss.name} {expected}")
    assert outcome("fast", loss, arguments) == expected
