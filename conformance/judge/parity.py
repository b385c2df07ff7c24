"""Compare a loss with itself or another one: :func:`parity`, ``pairproof parity``. It need not be in the catalogue.

The same batches are evaluated in several ways that should agree: twice, with permuted rows, with other chunk sizes, in
other dtypes, compiled, and under autocast. Memory is measured as the batch grows. All rows are exactly representable in
bfloat16, so every dtype gets the same numbers.

*Tolerances.* The effect of rounding is measured for each batch. The results of torch operations are multiplied by 1 + e
or 1 - e at random, and the change of the loss and of the gradient is divided by e. There are two such *slopes*:

- If the rows and all arithmetic are changed, the slope bounds differences within a dtype, and between float32 and
  float64.
- If only the rows and the matrix products are changed, the slope bounds differences from bfloat16. Everything else can
  be computed in float32. A loss that computes more than the products in bfloat16 loses more digits. It may: such a
  difference has the status "rounded", which is no disagreement, and the message says what to do.
"""

from __future__ import annotations

import copy
import math
import re
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from ..implementations.base import gradients_of, one_thread, unusable
from ..implementations.callable import REQUIRED, Answer, Batch, Target
from ..implementations.child import CannotFork, Child, Served, read_answer
from ..implementations.sandbox import TargetError, TargetMisused, copy_of, find, within, within_memory
from ..truth.rounding import Dispatch
from .comparisons import (
    AGAINST,
    BIAS,
    COMPARISONS,
    DIFFERS,
    ERRORED,
    FACTOR,
    LEAST,
    LOWER,
    MEASURED,
    MOST_DRAWN,
    NOISE,
    NOT_APPLICABLE,
    PASSED,
    ROUNDED,
    ROUNDING,
    TEMPERATURE,
    TRIALS,
    UNITS,
    WIDTH,
    Comparison,
    ParityResult,
    check_facts,
    check_options,
    note_on_batches,
    signs,
)
from .options import CouldNotRun, ParityRequest, UsageError, meant, takes
from .processes import compare_processes

Tensor = torch.Tensor

CHUNKS = re.compile(r"(\w+_)?(chunk|cache|block|tile|mini_?batch|micro_?batch|sub_?batch)_?(size|len|length)")
"""Names of parameters that should not change the result, because they only divide the work into parts."""

ITEMS = (7, 10, 13)
"""Numbers of items of the random batches. An item is one row or two views."""

NEGLIGIBLE = 1e-12
"""A batch of nearly equal positives is left out if its loss, divided by that of random batches, is below this."""

UNITS_UNMEASURED = 2.0**12
"""Allowed difference in unit roundoffs for numpy and jax targets, whose rounding is not measured."""

SIZES = (1, 2, 4)
"""Memory is measured at these multiples of the number of rows."""

MEMORY_WIDTH, MEMORY_CHUNK, SMALLER = 64, 128, 8
"""The number of columns and the chunk size of the batches for memory. If memory does not suffice, the number of rows is
divided by ``SMALLER``."""

LINEAR, QUADRATIC = 1.25, 1.75
"""Memory grows like N^p. It is linear if p <= LINEAR, and quadratic if QUADRATIC <= p <= 4 - QUADRATIC."""

PRODUCTS = frozenset(("mm", "bmm", "addmm", "baddbmm", "mv", "dot", "vdot", "_cdist_forward", "_euclidean_dist"))
"""Operations that compute similarities, by their names in ``torch.ops.aten``."""

ARITHMETIC = PRODUCTS | frozenset(
    """
    add addcdiv addcmul addmv addr binary_cross_entropy_with_logits cumsum div exp exp2 expm1 linalg_vector_norm log
    log1p log2 log_sigmoid_backward log_sigmoid_forward logaddexp logsumexp mean mse_loss mul norm pow prod reciprocal
    rsqrt rsub sigmoid sigmoid_backward softplus softplus_backward sqrt std sub sum tanh tanh_backward var _log_softmax
    _log_softmax_backward_data _softmax _softmax_backward_data
    """.split()  # noqa: SIM905 - one name per line would take 45 lines
)
"""Operations that round."""


# In the process of the target


class _Eager(Dispatch):
    """A mode in which compiled functions run uncompiled, because the compiler cannot trace modes."""

    def __enter__(self) -> Any:
        imported = "torch._dynamo" in sys.modules  # otherwise nothing is compiled, and the import takes a second
        stance: Any = torch.compiler.set_stance("force_eager") if imported else nullcontext()
        self._stance = stance
        stance.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stance.__exit__(*error)


class _Noise(_Eager):
    """Multiply the results of operations by 1 + NOISE or 1 - NOISE at random."""

    def __init__(self, operations: frozenset[str], chance: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations, self.chance = operations, chance

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__.rstrip("_") in self.operations:
            first = found[0] if isinstance(found, (tuple, list)) else found
            if isinstance(first, Tensor) and first.is_floating_point():
                first.mul_(signs(first, self.chance))
        return found


class _Memory(_Eager):
    """The bytes of the tensors that operations create.

    Attributes:
        alive: the bytes of each storage that is alive, by its address.
        peak: the largest sum of ``alive`` so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for each in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                address, size = storage.data_ptr(), storage.nbytes()
                if size and address not in self.alive:
                    self.alive[address] = size
                    weakref.finalize(storage, self.alive.pop, address, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return found


class _Logits(_Eager):
    """The largest similarity, also after it was multiplied or divided by a number.

    Attributes:
        kept: the tensors of these numbers, by the address of their storage, which is not used again while they live.
        largest: the largest of them so far; 0 if none is positive.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept: dict[int, Tensor] = {}
        self.largest = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, name = function(*args, **(kwargs or {})), function.overloadpacket.__name__.rstrip("_")
        tensors = [one for one in args if isinstance(one, Tensor)]
        scaled = name in ("mul", "div") and any(one.untyped_storage().data_ptr() in self.kept for one in tensors)
        if name in PRODUCTS or scaled:
            self.kept[found.untyped_storage().data_ptr()] = found
            self.largest = max([self.largest, *filter(math.isfinite, found.flatten().tolist())])
        return found


class _Subject:
    def __init__(self, request: ParityRequest) -> None:
        thing = find(request.target) if isinstance(request.target, str) else request.target
        given = thing, request.call, request.arrays
        more: dict[str, Any] = {"init": request.init, "result": request.result, "scale": request.scale}
        self.target = Target(*given, **more, spec=request.target)
        self.device, self.limit = request.device, request.limit

    def facts(self) -> dict[str, Any]:
        """Return how the target is called, as JSON data."""
        target, signature = self.target, self.target.signature
        names = [*signature.constructor, *signature.call]
        return {
            "call": target.call,
            "probed_as": target.probed_as,
            "choice": target.choice,
            "arrays": target.arrays,
            "notes": list(target.notes),
            "takes": {"temperature": target.takes_temperature, "bias": signature.keyword("bias") is not None},
            "requires_bias": signature.requires("bias"),
            "parameters": names,
            "partners": target.probed_as == "partners",
            "takes_labels": target.call != "features" or signature.keyword("labels") is not None,
            "version": copy_of(target.thing),
        }

    def __call__(self, choice: tuple[int, str | None] | None, *request: Any) -> Any:
        """Find out how to call the target if ``choice`` is None; otherwise call a method.

        ``choice`` is that of ``facts``. ``request`` has three items: "evaluate", "largest" or "memory", the batch, and
        the options of the method.
        """
        if choice is None:
            try:
                self.target.settle(limit=self.limit)
                if required := REQUIRED.get(self.target.probed_as):
                    raise TargetError(f"it requires {required[1]}, and parity passes none")
            except TargetError as error:
                return {"failed": str(error).splitlines()}
            return self.facts()
        if tuple(choice) != self.target.choice:
            self.target.call_as(*choice)
        what, batch, options = request
        batch = replace(batch, embeddings=batch.embeddings.to(self.device).requires_grad_())
        limited = within_memory() if self.device == "cpu" else nullcontext()
        with within(self.limit), limited:
            return getattr(self, what)(batch, **options)

    def evaluate(
        self, batch: Batch, backend: str = "", autocast: bool = False, noise: tuple[bool, int] | None = None
    ) -> tuple[list[float], list[list[float]] | None]:
        """Return the values and the gradient of a batch.

        ``backend`` is that of torch.compile, or "". ``noise`` is None, or a pair: whether all arithmetic is changed
        instead of only the products, and a seed.
        """
        rows, target = batch.embeddings, self.target
        mode: AbstractContextManager[Any] = nullcontext()
        if backend:
            target = self._compiled(backend)
        if autocast:
            mode = torch.autocast(torch.device(self.device).type, dtype=torch.bfloat16)
        if noise is not None:
            chance = torch.Generator().manual_seed(noise[1])
            batch = replace(batch, embeddings=rows * signs(rows, chance))
            mode = _Noise(ARITHMETIC if noise[0] else PRODUCTS, chance)
        with mode, warnings.catch_warnings():
            if backend:
                # The compiler warns of its own use of deprecated functions.
                warnings.simplefilter("ignore")
            loss = target.loss(batch)
        with mode if noise is not None else nullcontext():
            gradient = gradients_of(loss, {"": rows})[""].tolist() if loss.requires_grad else None
        return loss.detach().tolist(), gradient

    def largest(self, batch: Batch) -> float:
        """Return the largest similarity, or logit if similarities are multiplied or divided by a number."""
        measured = _Logits()
        with measured:
            self.target.loss(batch)
        return measured.largest

    def _compiled(self, backend: str) -> Target:
        target, compiled = copy.copy(self.target), partial(torch.compile, backend=backend)
        thing = target.thing
        target.thing = (lambda **options: compiled(thing(**options))) if target.constructs else compiled(thing)
        return target

    def memory(self, batch: Batch) -> tuple[int, int]:
        """Return the bytes kept for the backward pass, inputs included, and the peak of both passes."""
        saved: dict[int, int] = {}

        def pack(kept: Tensor) -> Tensor:
            saved[kept.untyped_storage().data_ptr()] = kept.untyped_storage().nbytes()
            return kept.detach()

        measured = _Memory()
        with measured:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
                loss = self.target.loss(batch)
            kept = sum((saved | measured.alive).values())
            gradients_of(loss, {"": batch.embeddings})
        return kept, measured.peak


# In the process that judges

_Asked = tuple[Mapping[str, Any], Callable[..., Any]]
"""The facts of a loss, and a function that sends it a request."""


@dataclass
class _Drawn:
    """A batch with its result, both in float64, and the effects of rounding.

    ``slopes`` contains the slopes of the values and of the gradient: for all arithmetic (True), and for products only
    (False). It is empty if they cannot be measured.
    """

    batch: Batch
    result: Answer
    slopes: dict[bool, tuple[float, float]] = field(default_factory=dict)


class _Parity:
    def __init__(self, request: ParityRequest, own: _Asked, expected: _Asked) -> None:
        """Judge the loss ``own`` by the results of ``expected``, which is the same one without ``--against``."""
        self.request, self.own, self.expected = request, own, expected
        self.facts = facts = own[0]
        takes = [one["takes"]["temperature"] for one, _ in (own, expected)]
        check_facts(request, any(takes), facts["probed_as"], expected[0]["probed_as"])
        self.torch = facts["arrays"] == "torch"
        if request.against is not None and not (self.torch and expected[0]["arrays"] == "torch"):
            raise UsageError("--against: both losses must take torch tensors; see --arrays")
        self.chance = torch.Generator().manual_seed(request.seed)
        known = facts["parameters"]
        for key in request.vary:
            if known and key not in known and "kwargs" not in known:
                raise UsageError(f"--vary {key}: the target has no parameter {key}{meant(key, known)}")
        self.lower = all(takes) and request.temperature is None
        self.keywords: dict[str, Any] = {}
        if any(takes):
            self.keywords["temperature"] = request.temperature or TEMPERATURE
        if any(one["requires_bias"] for one, _ in (own, expected)):
            self.keywords["bias"] = BIAS
        names = [name for name, one in zip((request.name, request.expected), takes, strict=True) if one]
        self.notes = [*facts["notes"]]
        if request.against is not None:
            self.notes += [f"{request.expected}: {note}" for note in expected[0]["notes"]]
        if len(names) == 1:
            self.notes.append(f"temperature: passed to {names[0]} only")
        self.memory: list[tuple[int, int, int]] = []
        # Set by ``batches``: whether the target returns float32 values for float64 rows, and the largest norms of its
        # values and of its gradient.
        self.single = False
        self.scale = [0.0, 0.0]

    # Batches

    def draw(self, items: int, name: str, fitted: bool = False, width: int = WIDTH) -> Batch:
        """Draw a batch with rows of norm 1, rounded to bfloat16.

        For "labels" and "similarities", an item is a row; otherwise it is a pair of views. In a ``fitted`` batch, rows
        of the same class or item are nearly equal, and others nearly orthogonal.
        """
        call = self.facts["probed_as"]
        views = 1 if call in ("labels", "similarities") else 2
        n = items * views
        labels = [int(k) for k in torch.randint(0, max(items // 3, 1), (items,), generator=self.chance)]
        group = torch.tensor(labels if views == 1 else list(range(items)) * views)
        rows = torch.randn(n, width, generator=self.chance, dtype=torch.float64)
        if fitted:
            centres = torch.linalg.qr(torch.randn(width, width, generator=self.chance, dtype=torch.float64))[0]
            rows = centres[group % width] + 0.02 * rows
        rows = torch.nn.functional.normalize(rows).bfloat16().double()
        partners = [(k + items) % n for k in range(n)]
        if self.facts["partners"]:
            labels = partners
        passed = labels if self.facts["takes_labels"] and call in ("labels", "partners", "features") else None
        # Only these calls divide the rows into views; for the others, labels and pairs refer to single rows.
        divided = views if call in ("views", "features") else 1
        pairs = list(enumerate(partners)) if call == "pairs" else None
        return Batch(name, call, rows, passed, pairs, divided, self.keywords)

    def permuted(self, batch: Batch) -> tuple[Batch, list[int], list[int]]:
        """Permute the items of a batch. Return the batch, the order of its items and the order of its rows."""
        items = len(batch.embeddings) // batch.n_views
        order = torch.randperm(items, generator=self.chance).tolist()
        rows = [view * items + k for view in range(batch.n_views) for k in order]
        place = {row: k for k, row in enumerate(rows)}
        labels, pairs = batch.labels, batch.positive_pairs
        if labels is not None:
            labels = [place[labels[k]] if self.facts["partners"] else labels[k] for k in order]
        if pairs is not None:
            pairs = [(place[i], place[j]) for i, j in pairs]
        return replace(batch, embeddings=batch.embeddings[rows], labels=labels, positive_pairs=pairs), order, rows

    # Evaluations

    def ask(self, batch: Batch, dtype: str = "", expected: bool = False, **how: Any) -> Answer:
        """Evaluate a batch: with the target or, if ``expected``, with the loss that gives the expected results."""
        if dtype:
            batch = replace(batch, embeddings=batch.embeddings.to(getattr(torch, dtype)))
        return read_answer(self.sent(self.expected if expected else self.own, "evaluate", batch, **how), batch)

    @staticmethod
    def sent(loss: _Asked, what: str, batch: Batch, **how: Any) -> Any:
        """Call a method of ``_Subject`` with a batch, without the temperature and the bias if the loss takes none."""
        facts, ask = loss
        keywords = {name: value for name, value in batch.keywords.items() if facts["takes"].get(name, True)}
        return ask(facts["choice"], what, replace(batch, keywords=keywords), how)

    def with_value(self, batch: Batch, key: str, value: Any) -> Batch:
        """Return the batch with a value of an argument. "all" is the size of the whole batch."""
        size = self.whole(batch) if value == "all" else value
        return replace(batch, keywords={**batch.keywords, key: size})

    def batches(self) -> list[_Drawn]:
        """Draw the batches and evaluate them.

        A batch is left out, with a note, if the target raises an error, or if its result is not finite or becomes so by
        a rounding error. A batch with a negligible loss is left out without a note.

        Raises:
            CouldNotRun: no batch can be compared.
        """
        drawn = [self.draw(items, f"random batch of {items}") for items in ITEMS]
        pair = 2 if drawn[0].call == "labels" else 1
        for items, name in ((ITEMS[0], f"fitted batch of {ITEMS[0]}"), (pair, "one fitted pair")):
            drawn.append(self.draw(items, name, fitted=True))
            if self.lower:
                lower = {**self.keywords, "temperature": LOWER}
                drawn.append(replace(drawn[-1], name=f"{name} at temperature {LOWER:g}", keywords=lower))
        found, reasons = [], []
        for batch in drawn:
            try:
                result = self.ask(batch, expected=True)
            except TargetError as error:
                reasons.append((batch.name, str(error)))
            else:
                if result.finite:
                    found.append(_Drawn(batch, result))
                else:
                    reasons.append((batch.name, "the loss or the gradient is not finite"))
        if not found:
            raise CouldNotRun(f"{self.request.expected}: {reasons[0][1]}")
        if any(one.result.gradient is None for one in found):
            self.notes.append(f"gradient: not compared, because {self.request.expected} returns none")
        self.notes += [f"left out: {name}: {reason}" for name, reason in reasons]
        self.single = all(one.result.single for one in found)
        if self.request.against is not None:
            with suppress(TargetError):
                self.single |= all(self.ask(one.batch).single for one in found)
        if self.single:
            self.notes.append("precision: the target returns float32 values for float64 rows")
        for one in found:
            if one.batch.name.startswith("random"):
                for k, (part, _) in enumerate(_parts(one.result, one.result)):
                    self.scale[k] = max(self.scale[k], float(part.norm()))
        found = [one for one in found if float(one.result.values.norm()) >= NEGLIGIBLE * self.scale[0]]
        for one in found if self.torch else ():
            one.slopes = {every: self.slope(one, every) for every in (True, False)}
        # Any difference would be allowed on these batches.
        steep = {one.batch.name for one in found if not all(map(math.isfinite, chain(*one.slopes.values())))}
        self.notes += [f"left out: {name}: a rounding error makes the result infinite or NaN" for name in sorted(steep)]
        if len(steep) == len(found):
            raise CouldNotRun(f"{self.request.expected}: a rounding error makes every result infinite or NaN")
        found = [one for one in found if one.batch.name not in steep]
        self.notes.append(note_on_batches((len(one.batch.embeddings), one.batch.keywords) for one in found))
        return found

    def slope(self, one: _Drawn, every: bool) -> tuple[float, float]:
        """Measure the effect of relative changes on the values and on the gradient, per unit of change.

        All arithmetic is changed if ``every`` is true, and only the products otherwise.
        """
        worst = [0.0, 0.0]
        for seed in range(TRIALS):
            found = self.ask(one.batch, expected=True, noise=(every, seed))
            for k, (a, b) in enumerate(_parts(one.result, found)):
                change = float((a - b).norm()) / NOISE if a.shape == b.shape else 0.0
                worst[k] = max(worst[k], change if math.isfinite(change) else math.inf)
        return worst[0], worst[1]

    def compare(
        self,
        name: str,
        batches: Sequence[_Drawn],
        other: Callable[[_Drawn], Iterable[Answer]],
        precision: str = "",
        equal: bool = True,
    ) -> Comparison:
        """Compare two evaluations of each batch. ``other`` returns the expected and the given result.

        ``precision`` is the less precise dtype. By default, it is the dtype in which the target computes. If the two
        losses are not ``equal`` in float64, rounding does not excuse a difference.
        """
        found: list[tuple[float, Comparison]] = []
        rounded: list[tuple[float, Comparison]] = []
        coarse = ""  # a batch on which the difference exceeds that of float32, and of a result rounded once
        for one in batches:
            try:
                pair = tuple(other(one))
            except TargetError as error:
                return Comparison(name, ERRORED, f"{one.batch.name}: {error}", batch=one.batch.name)
            for k, (expected, given) in enumerate(_parts(*pair)):
                part, size = ("loss", "gradient")[k], float(expected.norm())
                same = expected.shape == given.shape
                away = float((given - expected).norm()) if same and bool(given.isfinite().all()) else math.inf
                words = f"{one.batch.name}: the gradient differs: its difference is {away:.2g}, its norm {size:.2g}"
                if part == "loss":
                    words = f"{one.batch.name}: the loss is {_short(given)} instead of {_short(expected)}"
                if (
                    precision == "bfloat16"
                    and away > self.allowed(one, k, size, "float32") + ROUNDING[precision] * size
                ):
                    coarse = one.batch.name
                for into, throughout in ((found, False), (rounded, True)):
                    allowed, unit = self.allowed(one, k, size, precision, throughout), size or 1.0
                    told = Comparison(name, "", words, away / unit, allowed / unit, one.batch.name)
                    into.append((away / allowed, told))
        ratio, worst = max(found, key=lambda pair: pair[0])
        numbers = f"relative difference at most {worst.difference:.1g} (allowed {worst.allowed:.1g})"
        if ratio <= 1:
            hint = f"; {self.steps(coarse, batches)}" if coarse else ""
            return replace(worst, status=PASSED, message=f"{len(batches)} batches, {numbers}{hint}")
        ratio, most = max(rounded, key=lambda pair: pair[0])
        if ratio <= 1 and equal:
            return replace(worst, status=ROUNDED, message=f"{worst.message}: {self.steps(worst.batch, batches)}")
        words = f"{most.message}; the relative difference is {most.difference:.2g}, allowed {most.allowed:.1g}"
        return replace(most, status=DIFFERS, message=words)

    def steps(self, name: str, batches: Sequence[_Drawn]) -> str:
        """Say that a target rounds its logits to bfloat16 on the batch with this name, and by how much."""
        if self.facts["takes"]["temperature"]:
            used = next(one.batch.keywords["temperature"] for one in batches if one.batch.name == name)
            largest = 1 / used  # the logit of equal rows of norm 1
        else:
            rows = batches[0].batch.embeddings
            equal = replace(batches[0].batch, embeddings=rows[:1].repeat(len(rows), 1))
            largest = self.sent(self.own, "largest", equal) if self.torch else 0.0
        if not largest:
            return "logits are rounded to bfloat16, by up to 1/256 of their size: compute them in float32"
        step = 2.0 ** (math.frexp(largest)[1] - 8)
        return f"logits near {largest:.3g} have steps of {step:g} in bfloat16: compute them in float32"

    def allowed(self, one: _Drawn, part: int, size: float, precision: str, throughout: bool = False) -> float:
        """Return the difference that rounding may cause in the values (part 0) or the gradient (part 1).

        All arithmetic on bfloat16 rows is done in bfloat16 if ``throughout``, and otherwise all but the products in
        float32.
        """
        unit = ROUNDING[precision or ("float32" if self.single else "float64")]
        if not one.slopes:
            return UNITS_UNMEASURED * unit * max(size, self.scale[part]) + LEAST
        everything, products = one.slopes[True][part], one.slopes[False][part]
        finer = unit if throughout else min(unit, ROUNDING["float32"])
        noise = finer * everything + (unit * products if finer < unit else 0.0)
        return (
            FACTOR * noise
            + UNITS * (unit / 4 if finer < unit else unit) * size
            + UNITS * finer * self.scale[part]
            + LEAST
        )

    # The comparisons

    def varied(self) -> dict[str, Sequence[Any]]:
        """Return the arguments to vary, each with its values. "all" is the size of a whole batch."""
        names = [key for key in self.facts["parameters"] if CHUNKS.fullmatch(key) and key not in self.request.init]
        return dict(self.request.vary) or dict.fromkeys(names, ("all", 1, 3))

    def whole(self, batch: Batch) -> int:
        """Return the size of a chunk that contains the whole batch."""
        return len(batch.embeddings) // (batch.n_views if self.facts["call"] in ("views", "towers") else 1)

    def in_precision(
        self, name: str, batches: Sequence[_Drawn], dtype: str, precision: str, **how: Any
    ) -> Iterator[Comparison]:
        """Compare another precision with float64; also with the last value of each varied argument.

        With another loss, compare with its results in float64, for all values.
        """
        alone = self.request.against is None
        expected = "float64" if alone else self.request.expected
        varied = [(key, x) for key, values in self.varied().items() for x in (values[-1:] if alone else values)]
        for key, value in [("", None), *varied]:

            def other(one: _Drawn, key: str = key, value: Any = value) -> tuple[Answer, Answer]:
                batch = self.with_value(one.batch, key, value) if key else one.batch
                return one.result, self.ask(batch, dtype, **how)

            words = f", {key}={value}" if key else ""
            found = self.compare(f"{name} against {expected}{words}", batches, other, precision)
            if found.status == ROUNDED and not alone and not self._equal(batches):
                found = self.compare(found.name, batches, other, precision, equal=False)
            yield found

    def _equal(self, batches: Sequence[_Drawn]) -> bool:
        """Return whether the two losses agree in float64."""
        found = self.compare("", batches, lambda one: (one.result, self.ask(one.batch, "float64")))
        return found.status == PASSED

    def comparisons(self, batches: Sequence[_Drawn]) -> Iterator[Comparison]:
        """Yield the requested comparisons and, without another loss, the repetition if it does not pass."""
        if self.request.against is not None:
            for name in AGAINST:
                if name in self.request.only or not self.request.only:
                    yield from getattr(self, f"of_{name}")(batches)
            return
        again = self.compare("repetition", batches, lambda one: (one.result, self.ask(one.batch)))
        wanted = [name for name in COMPARISONS if name in self.request.only or not self.request.only]
        if "repetition" in wanted or again.status != PASSED:
            yield again
        if again.status == DIFFERS:
            reason = "the target returns different results for the same batch: it is random or keeps state"
            yield from (
                Comparison(name, NOT_APPLICABLE, reason) for name in wanted if name not in ("repetition", "memory")
            )
            wanted = [name for name in wanted if name == "memory"]
        for name in wanted:
            if name != "repetition":
                yield from getattr(self, f"of_{name}")(batches)

    def of_permutation(self, batches: Sequence[_Drawn]) -> Iterator[Comparison]:
        """Permuting the items permutes the gradient and the values of anchors."""

        def other(one: _Drawn) -> tuple[Answer, Answer]:
            batch, order, rows = self.permuted(one.batch)
            values = [2 * k + view for k in order for view in (0, 1)] if self.facts["call"] == "interleaved" else rows
            return _reordered(one.result, order, values, rows), self.ask(batch)

        yield self.compare("permutation", batches, other)

    def of_chunks(self, batches: Sequence[_Drawn]) -> Iterator[Comparison]:
        vary = self.varied()
        if not vary:
            yield Comparison("chunks", NOT_APPLICABLE, "no parameter is named like a chunk size; see --vary")
        for key, (first, *others) in vary.items():
            for value in others:

                def both(one: _Drawn, key: str = key, values: Sequence[Any] = (first, value)) -> Iterator[Answer]:
                    return (self.ask(self.with_value(one.batch, key, x)) for x in values)

                yield self.compare(f"{key}={value} against {first}", batches, both)

    def of_float64(self, batches: Sequence[_Drawn]) -> Iterator[Comparison]:
        yield from self.in_precision("float64", batches, "float64", "")

    def of_float32(self, batches: Sequence[_Drawn]) -> Iterator[Comparison]:
        yield from self.in_precision("float32", batches, "float32", "float32")

    def of_bfloat16(self, batches: Sequence[_Drawn]) -> Iterator[Comparison]:
        """bfloat16 and float64 agree up to the rounding of products."""
        if self.facts["arrays"] == "numpy":
            yield Comparison("bfloat16 against float64", NOT_APPLICABLE, "numpy has no bfloat16")
            return
        for found in self.in_precision("bfloat16", batches, "bfloat16", "bfloat16"):
            refused = found.status == ERRORED and re.search("bfloat16|dtype", found.message, re.IGNORECASE)
            yield replace(found, status=NOT_APPLICABLE) if refused else found

    def of_autocast(self, batches: Sequence[_Drawn]) -> Iterator[Comparison]:
        """Autocast and float64 agree up to the rounding of products."""
        if self.torch:
            yield from self.in_precision("autocast bfloat16", batches, "float32", "bfloat16", autocast=True)
        else:
            yield Comparison("autocast bfloat16 against float64", NOT_APPLICABLE, "autocast is a feature of torch")

    def of_compile(self, batches: Sequence[_Drawn]) -> Iterator[Comparison]:
        if not self.torch:
            yield Comparison("compiled against eager", NOT_APPLICABLE, "torch.compile is a feature of torch")
            return
        reasons = []
        for backend in ("aot_eager", "eager"):

            def other(one: _Drawn, backend: str = backend) -> tuple[Answer, Answer]:
                return one.result, self.ask(one.batch, backend=backend)

            found = self.compare(f"compiled ({backend}) against eager", batches, other)
            if found.status != ERRORED:
                break
            reasons.append(f"{backend}: {found.message}")
        if found.status != ERRORED and reasons:
            found = replace(found, message=f"{found.message}; does not compile with {reasons[0]}")
        yield found

    def of_memory(self, batches: Sequence[_Drawn]) -> Iterator[Comparison]:
        if not self.torch:
            yield Comparison("memory", NOT_APPLICABLE, "memory is measured for torch targets only")
            return
        if self.request.device != "cpu":
            yield Comparison("memory", NOT_APPLICABLE, "memory is measured on the CPU only")
            return
        if batches[0].result.gradient is None:
            yield Comparison("memory", NOT_APPLICABLE, "the target returns no gradient")
            return
        chunked = {key: MEMORY_CHUNK for key in self.facts["parameters"] if CHUNKS.fullmatch(key)}
        chunked = {key: value for key, value in chunked.items() if key not in self.request.init}
        failed = ""
        for rows in (self.request.rows, max(self.request.rows // SMALLER, 2)):
            try:
                self.memory = [(rows * size, *self.bytes_at(rows * size, chunked)) for size in SIZES]
                break
            except TargetError as error:
                failed = failed or f"{rows * SIZES[-1]} rows: {error}"
        if not self.memory:
            yield Comparison("memory", ERRORED, failed)
            return
        with_chunks = "".join(f", {key}={value}" for key, value in chunked.items())
        at = ", ".join(str(size) for size, *_ in self.memory)
        for name, column in (("bytes kept for backward", 1), ("peak of bytes", 2)):
            sizes = [row[column] for row in self.memory]
            power = exponent(self.memory, column)
            linear = power <= LINEAR
            quadratic = QUADRATIC <= power <= 4 - QUADRATIC
            grows = "linear" if linear else "quadratic" if quadratic else f"about N^{power:.1f}"
            words = f"{', '.join(f'{size / 2**20:.3g}' for size in sizes)} MiB at N = {at}{with_chunks}: {grows}"
            status = MEASURED if not self.request.linear_memory else PASSED if linear else DIFFERS
            yield Comparison(name, status, words + (f"; {failed}" if failed else ""))

    def bytes_at(self, rows: int, chunked: Mapping[str, int]) -> tuple[int, int]:
        """Return the bytes kept and the peak, for a float32 batch of this many rows or pairs of views."""
        items = (
            rows // 2 if self.facts["call"] in ("stacked", "interleaved", "pairs") or self.facts["partners"] else rows
        )
        batch = self.draw(items, "large batch", width=MEMORY_WIDTH)
        keywords = {**batch.keywords, **chunked}
        batch = replace(batch, embeddings=batch.embeddings.float(), keywords=keywords)
        kept, peak = self.sent(self.own, "memory", batch)
        return int(kept), int(peak)


def exponent(memory: Sequence[tuple[int, int, int]], column: int) -> float:
    """Return p if a column of ``memory`` (1 kept, 2 peak) grows like N^p between the two largest sizes."""
    (few, *before), (many, *after) = memory[-2:]
    return math.log(max(after[column - 1], 1) / max(before[column - 1], 1)) / math.log(many / few)


def _parts(expected: Answer, given: Answer) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the values, and the gradients as vectors if one is expected. A missing gradient is NaN."""
    yield expected.values, given.values
    if (gradient := expected.gradient) is not None:
        other = torch.full_like(gradient, math.nan) if given.gradient is None else given.gradient
        yield gradient.flatten(), other.flatten()


def _reordered(found: Answer, items: Sequence[int], anchors: Sequence[int], rows: Sequence[int]) -> Answer:
    """Return the result that a batch with permuted items should have.

    If there is one value per item, ``items`` is their new order; if there is one per row, ``anchors`` is. ``rows`` is
    that of the rows of the gradient.
    """
    order = next((order for order in (items, anchors) if len(found.values) == len(order) > 1), None)
    values = found.values if order is None else found.values[[*order]]
    return Answer(values, None if found.gradient is None else found.gradient[[*rows]])


def _short(values: Tensor) -> str:
    return f"{float(values[0]):.6g}" if len(values) == 1 else f"{len(values)} values of norm {float(values.norm()):.6g}"


@takes(ParityRequest)
def parity(*target: Any, **options: Any) -> ParityResult:
    """Compare a loss with itself: ``parity(MyLoss, call="views")``.

    The keywords are the options of ``pairproof parity``; see
    :class:`~pairproof.conformance.judge.options.ParityRequest`.

    Returns:
        All comparisons with their status and numbers, and the verdict.

    Raises:
        UsageError: an option is wrong or missing.
        CouldNotRun: the target cannot be loaded or called, or the device cannot be used.
    """
    return compare_with_itself(ParityRequest(*target, **options))


@one_thread()
def compare_with_itself(request: ParityRequest) -> ParityResult:
    """Run the comparisons of a request. The errors are those of ``parity``."""
    start = time.perf_counter()
    check_options(request)
    if not request.limit > 0 or request.rows < 2:
        raise UsageError("--limit and --rows: expected a positive number of seconds, and at least 2 rows")
    if request.temperature is not None and not 0 < request.temperature < math.inf:
        raise UsageError(f"--temperature: expected a positive number, got {request.temperature:g}")
    if request.call == "command":
        raise UsageError("--call command: parity needs a Python target")
    if request.html is not None and not any(1 < world <= MOST_DRAWN for world in request.world_size):
        raise UsageError(f"--html: needs a --world-size from 2 to {MOST_DRAWN}, whose gradients it draws")
    if reason := unusable(request.device):
        raise CouldNotRun(reason)
    result = ParityResult(request)
    with _named(request):
        if request.world_size:
            compare_processes(result)
        else:
            _compare(result)
    result.seconds = time.perf_counter() - start
    return result


def _compare(result: ParityResult) -> None:
    """Compare the target of a result with itself or with another loss, and add the comparisons to the result."""
    request = result.request
    other = replace(request, target=request.against, call=None, arrays=None, init={}, result=None, scale=None)
    with _loaded(request) as own, nullcontext(own) if request.against is None else _loaded(other) as expected:
        result.call, result.version = own[0]["call"], own[0]["version"]
        judge = _Parity(request, own, expected)
        result.notes = judge.notes
        batches = judge.batches()
        result.comparisons += judge.comparisons(batches)
        result.memory = judge.memory


@contextmanager
def _named(request: ParityRequest) -> Iterator[None]:
    """Name the target in errors."""
    try:
        yield
    except TargetMisused as error:
        raise UsageError(f"{request.name}: {error}") from None
    except TargetError as error:
        raise CouldNotRun(f"{request.name}: {error}") from None


@contextmanager
def _loaded(request: ParityRequest) -> Iterator[_Asked]:
    """Load the target, in a child process if possible. Yield its facts and a function that sends it a request."""

    def load() -> Served:
        subject = _Subject(request)
        return subject.facts(), subject

    with ExitStack() as stack:
        with _named(request):
            try:
                child = Child(load, request.limit)
                asked: _Asked = child.settle(), child.ask
                stack.callback(child.close)
            except CannotFork as reason:
                _, serve = load()
                facts = serve(None)
                if "failed" in facts:
                    raise TargetError("\n".join(facts["failed"])) from None
                facts["notes"].append(f"process: the target runs in the process that judges it: {reason}")
                asked = facts, serve
        yield asked
