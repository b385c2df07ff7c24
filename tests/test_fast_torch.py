"""`pairproof.fast` within torch: compilation, transforms, autocast, no reads of values, no large tensors."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from inspect import signature
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pairproof import fast
from pairproof.fast import (
    InfoNCELoss,
    NTXentLoss,
    SupConLoss,
    dclw_loss,
    hard_negative_loss,
    info_nce_loss,
    kernels,
    multiple_negatives_ranking_loss,
    nt_bxent_loss,
    nt_xent_loss,
    nt_xent_pairwise_loss,
    sigmoid_loss,
    supcon_epsilon_loss,
    supcon_in_loss,
    supcon_loss,
)
from pairproof.fast.engine import Batch, References, Rule, Targets, autograd, device, plan, rowwise, tiles_of

Tensor = torch.Tensor
Call = Callable[..., Tensor]
FUNCTIONS = [getattr(fast, name) for name in fast.__all__ if name.endswith("_loss")]

BACKENDS = ("auto", "dense", "tiled", "exact")
ROWS = 8
LABELS = torch.tensor([2, 0, 1, 0, 1, 1, 2, 5])
PARTNERS = torch.tensor([3, 2, 1, 0, 6, 7, 4, 5])
PAIRS = torch.tensor([[0, 1], [2, 4], [4, 2], [1, 1], [0, 1], [7, 0]])
ANCHORS = torch.tensor([True, False, True, True, True, True, False, True])


def normal(rows: int, dim: int = 4, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


MASK = torch.rand(ROWS, ROWS, generator=torch.Generator().manual_seed(3)) < 0.4
BANK = normal(5, seed=9, dtype=torch.bfloat16).float()  # so that every dtype represents it exactly
BANK_LABELS = torch.tensor([0, 1, 1, 7, 2])
OWN = torch.tensor([0, -1, 1, 2, -1, 3, 4, -1])
HOT = torch.tensor(0.4)


def losses(where: str = "cpu") -> dict[str, Call]:
    """Return every loss, for every path of the engine: pairs, sorted rows, whole rows, references, a temperature."""
    labels, partners, pairs, mask, bank, ref_labels, own, hot = (
        t.to(where) for t in (LABELS, PARTNERS, PAIRS, MASK, BANK, BANK_LABELS, OWN, HOT)
    )
    views = torch.arange(ROWS, device=where) // 2
    of_bank = {"ref_labels": ref_labels, "self_rows": own}
    return {
        "supcon": lambda z, **o: supcon_loss(z, labels, **o),
        "supcon one_positive": lambda z, **o: supcon_loss(z, labels, denominator="one_positive", **o),
        "supcon only_negatives": lambda z, **o: supcon_loss(z, labels, denominator="only_negatives", **o),
        "supcon_in": lambda z, **o: supcon_in_loss(z, labels, **o),
        "supcon_in one_positive": lambda z, **o: supcon_in_loss(z, labels, denominator="one_positive", **o),
        "supcon_epsilon": lambda z, **o: supcon_epsilon_loss(z, labels, temperature=2.0, **o),
        "nt_xent_pairwise": lambda z, **o: nt_xent_pairwise_loss(z, labels, **o),
        "nt_xent": lambda z, **o: nt_xent_loss(z, partners, **o),
        "nt_bxent": lambda z, **o: nt_bxent_loss(z, pairs, **o),
        "two views by label": lambda z, **o: supcon_in_loss(z, views, **o),
        "mask": lambda z, **o: supcon_in_loss(z, positives=mask, **o),
        "shifted": lambda z, **o: supcon_loss(z, labels, temperature=2e-3, **o),
        "dot": lambda z, **o: supcon_loss(z, labels, similarity="dot", temperature=0.5, **o),
        "references": lambda z, **o: supcon_loss(z, labels, ref_embeddings=bank.to(z.dtype), **of_bank, **o),
        "temperature": lambda z, **o: supcon_loss(z, labels, temperature=hot, **o),
        "info_nce": lambda z, **o: info_nce_loss(z, z.flip(1), **o),
        "info_nce queue": lambda z, **o: info_nce_loss(
            z, z.flip(1), negatives=bank.to(z.dtype), direction="a_to_b", **o
        ),
        "hard_negative": lambda z, **o: hard_negative_loss(z, partners, **o),
        "dclw": lambda z, **o: dclw_loss(z, partners, detach_weights=False, **o),
        "sigmoid": lambda z, **o: sigmoid_loss(z, bank.to(z.dtype), labels=labels, ref_labels=ref_labels, **o),
    }


LOSSES = losses()


def value_and_gradient(call: Call, z: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    leaf = z.detach().clone().requires_grad_()
    value = call(leaf, **options)
    (gradient,) = torch.autograd.grad(value, leaf, torch.ones_like(value))
    return value.detach(), gradient


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


compiles = pytest.mark.usefixtures("_fresh_compiler")


def slow_except(quick: Sequence[Any], every: Iterable[Any]) -> list[Any]:
    """Parameters of a test that compiles, which takes seconds each: all but a few are left to ``make test-all``."""
    return [
        one if one in quick else pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.slow)
        for one in every
    ]


kinds_of_backend = pytest.mark.parametrize("backend", slow_except(("auto", "tiled", "exact"), BACKENDS))
"""For as few rows as here, "auto" uses the same form as "dense"."""
quick_backends = pytest.mark.parametrize("backend", slow_except(("auto",), BACKENDS))
"""The graph of the exact backend has hundreds of operations, which take the compiler seconds: one fast test uses it."""
needs_new_dynamo = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.13"),
    reason="torch.compile of a step with its gradient fails inside torch 2.6 to 2.9; it was seen to work with 2.13",
)
old_torch_warns = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Step:
    """A linear layer, a loss, a backward pass and an update; the temperature may be learned too."""

    def __init__(self, loss: Callable[[Tensor], Tensor], backend: str | None) -> None:
        self.layer = torch.nn.Linear(5, 4)
        with torch.no_grad():
            self.layer.weight.copy_(normal(4, 5, seed=4))
            self.layer.bias.copy_(normal(1, 4, seed=5)[0])
        self.optimiser = torch.optim.SGD(self.layer.parameters(), lr=0.05)

        def forward(x: Tensor) -> Tensor:
            return loss(self.layer(x))

        self.forward = forward if backend is None else torch.compile(forward, fullgraph=True, backend=backend)

    def run(self, steps: int = 2) -> list[Tensor]:
        values = []
        for seed in range(steps):
            self.optimiser.zero_grad()
            value = self.forward(normal(ROWS, 5, seed=20 + seed))
            value.backward()
            self.optimiser.step()
            values.append(value.detach())
        return [*values, *(p.detach().clone() for p in self.layer.parameters())]


def assert_same_step(loss: Callable[[Tensor], Tensor], backend: str) -> None:
    found, true = Step(loss, backend).run(), Step(loss, None).run()
    torch.testing.assert_close(found, true, rtol=1e-5, atol=1e-6)


@compiles
@old_torch_warns
@pytest.mark.slow  # test_step_with_its_gradient_compiles_as_one_graph is quicker
@pytest.mark.parametrize("backend", ["auto", "tiled"])
@pytest.mark.parametrize("name", LOSSES)
def test_training_step_compiles_as_one_graph(name: str, backend: str) -> None:
    with tiles_of(4):
        assert_same_step(lambda z: LOSSES[name](z, backend=backend), "aot_eager")


@compiles
@old_torch_warns
@pytest.mark.parametrize(
    "name",
    slow_except(["nt_bxent"], ["supcon", "supcon_in one_positive", "nt_xent", "nt_bxent", "references", "info_nce"]),
)
@pytest.mark.slow
def test_training_step_of_the_exact_backend_compiles_as_one_graph(name: str) -> None:
    assert_same_step(lambda z: LOSSES[name](z, backend="exact"), "aot_eager")


@compiles
@needs_new_dynamo
@old_torch_warns
@quick_backends
def test_step_with_its_gradient_compiles_as_one_graph(backend: str) -> None:
    layer = torch.nn.Linear(5, 4)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def step(parameters: dict[str, Tensor], x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        def loss(parameters: dict[str, Tensor]) -> Tensor:
            return supcon_loss(torch.func.functional_call(layer, parameters, (x,)), LABELS, backend=backend)

        gradients, value = torch.func.grad_and_value(loss)(parameters)
        return {name: p - 0.1 * gradients[name] for name, p in parameters.items()}, value

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    x = normal(ROWS, 5, seed=20)
    torch.testing.assert_close(compiled(parameters, x), step(parameters, x), rtol=1e-5, atol=1e-6)


@compiles
@old_torch_warns
@pytest.mark.slow
@pytest.mark.parametrize("module", [SupConLoss, NTXentLoss, InfoNCELoss])
def test_module_with_a_learned_temperature_compiles(module: type[torch.nn.Module]) -> None:
    target = {SupConLoss: LABELS, NTXentLoss: PARTNERS, InfoNCELoss: normal(ROWS, seed=7)}[module]
    found = []
    for compiler in ("aot_eager", None):
        made = module(temperature=torch.nn.Parameter(torch.tensor(0.3)))
        call = made if compiler is None else torch.compile(made, fullgraph=True, backend=compiler)
        z = normal(ROWS).requires_grad_()
        value = call(z, target)
        value.backward()
        assert made.temperature.grad is not None
        assert bool(made.temperature.grad != 0)
        found.append((value.detach(), z.grad, made.temperature.grad))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@compiles
@old_torch_warns
@quick_backends
@pytest.mark.parametrize(
    ("reduction", "anchors"),
    [
        pytest.param("mean", ANCHORS, marks=pytest.mark.slow),
        pytest.param("none", None, marks=pytest.mark.slow),
        ("none", ANCHORS),
        pytest.param("mean_pairs", None, marks=pytest.mark.slow),
    ],
    ids=["mean, anchors", "none", "none, anchors", "mean_pairs"],
)
@pytest.mark.slow
def test_reductions_and_anchors_compile(reduction: Any, anchors: Tensor | None, backend: str) -> None:
    def call(z: Tensor) -> Tensor:
        return nt_xent_pairwise_loss(z, LABELS, anchors=anchors, reduction=reduction, backend=backend)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    z = normal(ROWS)
    found, true = value_and_gradient(compiled, z), value_and_gradient(call, z)
    torch.testing.assert_close(found, true, rtol=1e-5, atol=1e-6)


WAYS = ("labels", "positives", "partners")
POSITIVES = {function: [way for way in WAYS if way in signature(function).parameters] for function in FUNCTIONS}
ALIKE = [(function, way) for function, ways in POSITIVES.items() for way in ways]
ALIKE += [
    (function, "") for function, ways in POSITIVES.items() if not ways or function in (info_nce_loss, sigmoid_loss)
]
"""Each loss with each way to give positives; "" if it needs none."""


def equal_arguments(function: Call, way: str) -> dict[str, Tensor]:
    """Return arguments of a loss except rows, with one tensor for all integers, masks, weights and numbers."""
    places = torch.tensor([1, 0, 3, 2, 5, 4])
    integers = "partners", "labels", "ref_labels", "self_rows", "ignored_ids", "ref_ignored_ids"
    given = dict.fromkeys(integers, places if way == "partners" else places // 2)
    given |= dict.fromkeys(("positives", "ignored"), torch.ones(6, 6).triu(2) > 0)
    given |= dict.fromkeys(("positive_weights", "negative_weights"), normal(6, 6).abs())
    given |= dict.fromkeys(("temperature", "bias"), torch.tensor(0.6))
    given["positive_pairs"] = torch.stack((places, places.flip(0)), 1)
    refused = {*WAYS} - {way} | ({"self_rows"} if way == "partners" else set())
    known = signature(function).parameters.keys() - refused - (set() if way == "labels" else {"ref_labels"})
    return {name: tensor for name, tensor in given.items() if name in known}


@compiles
@old_torch_warns
@pytest.mark.parametrize(
    ("function", "way"),
    slow_except([(supcon_loss, "labels")], ALIKE),
    ids=lambda part: part if isinstance(part, str) else part.__name__,
)
def test_compiled_loss_takes_one_tensor_for_any_two_arguments(function: Call, way: str) -> None:
    rows = {"embeddings", "embeddings_a", "embeddings_b", "ref_embeddings"} & signature(function).parameters.keys()
    given = equal_arguments(function, way)
    call = lambda z: function(**dict.fromkeys(rows, z), **given)  # noqa: E731
    compiled, z = torch.compile(call, fullgraph=True, backend="aot_eager"), normal(6, 6)
    found, true = value_and_gradient(compiled, z), value_and_gradient(call, z)
    torch.testing.assert_close(found, true, rtol=1e-5, atol=1e-6)


@compiles
@old_torch_warns
@pytest.mark.slow
def test_compiled_loss_does_not_depend_on_the_default_device() -> None:
    z, compiled = normal(ROWS), torch.compile(LOSSES["supcon"], fullgraph=True, backend="aot_eager")
    with torch.device("meta"):
        found = value_and_gradient(compiled, z)
    torch.testing.assert_close(found, value_and_gradient(LOSSES["supcon"], z), rtol=1e-5, atol=1e-6)


def of_any_size(z: Tensor, backend: str, loss: str) -> Tensor:
    place = torch.arange(len(z))
    if loss == "supcon":
        return supcon_loss(z, place % 3, backend=backend)
    return nt_xent_loss(z, place ^ 1, temperature=2e-3, backend=backend)


@compiles
@old_torch_warns
@quick_backends
@pytest.mark.parametrize("loss", slow_except(["supcon"], ["supcon", "nt_xent"]))
def test_one_graph_serves_every_batch_size(loss: str, backend: str) -> None:
    """There are more batch sizes than torch allows recompilations."""
    compiled = torch.compile(of_any_size, fullgraph=True, backend="aot_eager")
    counts = range(6, 6 + 2 * (torch._dynamo.config.recompile_limit + 2), 2)
    for count in (8, 14, *counts):
        found = value_and_gradient(lambda z: compiled(z, backend, loss), normal(count))
        true = value_and_gradient(lambda z: of_any_size(z, backend, loss), normal(count))
        torch.testing.assert_close(found, true, rtol=2e-4, atol=1e-4)


@compiles
@old_torch_warns
@quick_backends
@pytest.mark.parametrize("loss", slow_except(["info_nce"], ["supcon", "info_nce"]))
@pytest.mark.slow
def test_rows_stored_by_columns_compile(loss: str, backend: str) -> None:
    rows = normal(8).T.contiguous().T
    assert not rows.is_contiguous()
    if loss == "supcon":
        call = lambda z: of_any_size(z, backend, "supcon")  # noqa: E731
    else:
        call = lambda z: info_nce_loss(z, z.detach().flip(0).T.contiguous().T, backend=backend)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found, true = value_and_gradient(compiled, rows), value_and_gradient(call, rows.contiguous())
    torch.testing.assert_close(found, true, rtol=2e-4, atol=1e-4)


@compiles
@old_torch_warns
@quick_backends
@pytest.mark.parametrize("mode", slow_except([torch.no_grad], [torch.no_grad, torch.inference_mode, torch.enable_grad]))
@pytest.mark.parametrize(
    "name",
    slow_except(
        ("info_nce queue",),
        ["supcon", "nt_xent", "shifted", "references", "info_nce queue", "nt_bxent"],
    ),
)
def test_evaluation_without_gradient_compiles(name: str, mode: Callable[[], Any], backend: str) -> None:
    layer = torch.nn.Linear(4, 3).requires_grad_(mode is not torch.enable_grad)
    call = lambda z: LOSSES[name](torch.cat((layer(z), z), 1)[:, 3:], backend=backend)  # noqa: E731
    with mode():
        found = torch.compile(call, fullgraph=True, backend="aot_eager")(normal(ROWS))
        torch.testing.assert_close(found, call(normal(ROWS)), rtol=1e-5, atol=1e-5)


COMPILER = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")


@compiles
@old_torch_warns
@pytest.mark.slow  # inductor first compiles torch's headers, which takes 15 seconds
@pytest.mark.skipif(COMPILER is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("name", ["supcon", "nt_xent", "dot", "info_nce queue"])
def test_training_step_compiles_with_the_default_compiler(name: str) -> None:
    # In this process, because starting others takes longer than compiling.
    with torch._inductor.config.patch(compile_threads=1):
        assert_same_step(LOSSES[name], "inductor")


def operator_calls(call: Call, z: Tensor) -> list[tuple[Any, tuple[Any, ...]]]:
    """Return our operators and their arguments in a compiled forward and backward pass."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    calls: list[tuple[Any, tuple[Any, ...]]] = []

    class Recorder(torch.fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if str(target).startswith("pairproof"):
                calls.append((target, tuple(a.detach().clone() if isinstance(a, Tensor) else a for a in args)))
            return super().call_function(target, args, kwargs)

    def recorded(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return make_boxed_func(lambda *args: Recorder(graph).run(*args))

    compiled = torch.compile(call, fullgraph=True, backend=aot_autograd(fw_compiler=recorded))
    value_and_gradient(compiled, z)
    return calls


CHECKED = "nt_xent", "nt_bxent", "references"
"""Losses whose targets are rows or pairs, which a compiled graph checks when it runs."""


@compiles
@old_torch_warns
@pytest.mark.parametrize("dtype", slow_except([torch.float32], [torch.float64, torch.float32, torch.bfloat16]))
@pytest.mark.parametrize(
    "name",
    slow_except(
        ("references",),
        [
            *("supcon", "supcon_in one_positive", "nt_xent", "nt_bxent", "mask"),
            *("shifted", "dot", "references", "temperature"),
        ],
    ),
)
def test_operators_pass_opcheck(name: str, dtype: torch.dtype) -> None:
    extra = {"anchors": ANCHORS} if name in ("mask", "supcon") else {}
    with tiles_of(4):
        calls = operator_calls(lambda z: LOSSES[name](z, backend="tiled", **extra), normal(ROWS, dtype=dtype))
        used = {"pairproof.anchor_values.default", "pairproof.anchor_gradients.default"}
        used |= {"pairproof.checked.default"} if name in CHECKED else set()
        assert {str(operator) for operator, _ in calls} == used
        for operator, args in calls:
            torch.library.opcheck(operator, args)


@compiles
@old_torch_warns
@pytest.mark.parametrize("name", slow_except(["supcon"], ["supcon", "nt_xent", "dot", "references"]))
def test_operators_pass_opcheck_for_rows_stored_by_columns(name: str) -> None:
    rows = normal(ROWS).T.contiguous().T
    with tiles_of(4):
        calls = operator_calls(lambda z: LOSSES[name](z, backend="tiled"), rows)
        (_, forward), (_, backward) = (call for call in calls if str(call[0]) != "pairproof.checked.default")
        assert not forward[0].is_contiguous()
        assert not backward[1].is_contiguous()
        for operator, args in calls:
            torch.library.opcheck(operator, args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@kinds_of_backend
def test_autocast_changes_nothing(backend: str, dtype: torch.dtype) -> None:
    z = normal(ROWS, dtype=dtype)
    for name, loss in LOSSES.items():
        plain = value_and_gradient(loss, z, backend=backend)
        leaf = z.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(leaf, backend=backend)
            (within,) = torch.autograd.grad(value, leaf, retain_graph=True)
        (outside,) = torch.autograd.grad(value, leaf)
        assert value.dtype == torch.float32
        assert torch.equal(value.detach(), plain[0]), name
        assert torch.equal(within, plain[1]), name
        assert torch.equal(outside, plain[1]), name


@kinds_of_backend
def test_rows_of_two_dtypes_are_allowed_under_autocast(backend: str) -> None:
    """Autocast makes the encoder's rows bfloat16, and the bank stays float32."""
    calls: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda z, w: supcon_loss(z, LABELS, ref_embeddings=w, ref_labels=BANK_LABELS, backend=backend),
        lambda z, w: info_nce_loss(z[:5], w, backend=backend),
        lambda z, w: sigmoid_loss(z[:5], w, backend=backend),
        lambda z, w: info_nce_loss(z, z.float().flip(1), negatives=w, backend=backend),
    ]
    for call in calls:
        found = []
        for dtype in (torch.bfloat16, torch.float32):
            z, w = normal(ROWS).bfloat16().to(dtype).requires_grad_(), normal(5, seed=9).requires_grad_()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                value = call(z, w)
            value.backward()
            assert z.grad is not None
            assert z.grad.dtype == dtype
            found.append((value.detach(), z.grad.bfloat16(), w.grad))
        torch.testing.assert_close(*found)
        with pytest.raises(TypeError, match="expected the dtype of"):
            call(normal(ROWS).bfloat16(), BANK)


@kinds_of_backend
def test_autocast_does_not_change_the_second_derivative(backend: str) -> None:
    for name in ("supcon", "nt_xent", "shifted", "references"):
        found = []
        for enabled in (False, True):
            z = normal(ROWS).requires_grad_()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                (first,) = torch.autograd.grad(LOSSES[name](z, backend=backend), z, create_graph=True)
                (second,) = torch.autograd.grad((first * normal(ROWS, seed=2)).sum(), z)
            found.append((first.detach(), second))
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5 * float(found[0][1].abs().max()))


@kinds_of_backend
@pytest.mark.quick(1)
def test_functional_transforms_equal_the_backward_pass(backend: str) -> None:
    z, direction = normal(ROWS, dtype=torch.float64), normal(ROWS, seed=2, dtype=torch.float64)
    with tiles_of(4):
        for name, loss in LOSSES.items():
            call = lambda z, f=loss: f(z, backend=backend)  # noqa: E731
            leaf = z.clone().requires_grad_()
            value = call(leaf)
            (first,) = torch.autograd.grad(value, leaf, create_graph=True)
            (second,) = torch.autograd.grad((first * direction).sum(), leaf)
            close = {"rtol": 1e-10, "atol": 1e-11 * float(second.abs().max()), "msg": name}
            torch.testing.assert_close(torch.func.grad(call)(z), first.detach(), **close)
            output, back = torch.func.vjp(call, z)
            torch.testing.assert_close(output, value.detach(), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(back(torch.tensor(2.0, dtype=z.dtype))[0], 2 * first.detach(), **close)
            twice = torch.func.grad(lambda z, call=call: (torch.func.grad(call)(z) * direction).sum())(z)
            torch.testing.assert_close(twice, second, **close)
            # In a transform where the rows are constants, values are still computed.
            constant = torch.func.grad(lambda w, call=call: call(z) * w)(torch.tensor(1.0, dtype=z.dtype))
            torch.testing.assert_close(constant, value.detach(), rtol=1e-12, atol=1e-12)


@kinds_of_backend
def test_functional_gradients_of_references_and_temperature_are_right(backend: str) -> None:
    z, references = normal(ROWS, dtype=torch.float64), BANK.double()
    rest: dict[str, Any] = {"ref_labels": BANK_LABELS, "self_rows": OWN}
    hot = torch.tensor(0.4, dtype=torch.float64)

    def call(z: Tensor, references: Tensor, hot: Tensor) -> Tensor:
        return supcon_loss(z, LABELS, ref_embeddings=references, temperature=hot, backend=backend, **rest)

    inputs = [t.clone().requires_grad_() for t in (z, references, hot)]
    true = torch.autograd.grad(call(*inputs), inputs)
    torch.testing.assert_close(torch.func.grad(call, argnums=(0, 1, 2))(z, references, hot), true)
    for number in range(3):
        torch.testing.assert_close(torch.func.grad(call, argnums=number)(z, references, hot), true[number])


@kinds_of_backend
def test_functional_call_of_a_module_gives_the_gradient(backend: str) -> None:
    made = SupConLoss(temperature=torch.nn.Parameter(torch.tensor(0.3)), backend=backend)
    z = normal(ROWS)

    def call(temperature: Tensor) -> Tensor:
        return torch.func.functional_call(made, {"temperature": temperature}, (z, LABELS))

    gradient, value = torch.func.grad_and_value(call)(torch.tensor(0.7))
    leaf = torch.tensor(0.7, requires_grad=True)
    true = supcon_loss(z, LABELS, temperature=leaf, backend=backend)
    true.backward()
    torch.testing.assert_close(value, true.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-6, atol=0)


UNSUPPORTED = (NotImplementedError, RuntimeError)


@old_torch_warns
@pytest.mark.parametrize("recording", [True, False])
@kinds_of_backend
def test_forward_mode_raises(backend: str, recording: bool) -> None:
    """No tangent is silently ignored: of the rows, of the references or of the temperature."""
    z = normal(ROWS)
    rest: dict[str, Any] = {"ref_labels": BANK_LABELS, "self_rows": OWN}
    calls: list[tuple[Call, Tensor]] = [(lambda z, f=f: f(z, backend=backend), z) for f in LOSSES.values()]
    calls += [
        (lambda w: supcon_loss(z, LABELS, ref_embeddings=w, backend=backend, **rest), BANK),
        (lambda t: supcon_loss(z, LABELS, temperature=t, backend=backend), HOT),
        (lambda t: nt_xent_loss(z, PARTNERS, temperature=t, base_temperature=0.1, backend=backend), HOT),
        (lambda b: info_nce_loss(z, b, backend=backend), z.flip(1)),
        (lambda q: info_nce_loss(z, z.flip(1), negatives=q, backend=backend), BANK),
    ]
    for (call, primal), wanted in itertools.product(calls, (True, False)):
        with torch.set_grad_enabled(recording):
            leaf = primal.clone().requires_grad_(wanted)
            with forward_ad.dual_level(), pytest.raises(UNSUPPORTED, match=r"jvp|forward"):
                call(forward_ad.make_dual(leaf, torch.ones_like(primal)))
            with pytest.raises(UNSUPPORTED, match=r"jvp|forward"):
                torch.func.jvp(call, (leaf,), (torch.ones_like(primal),))


@kinds_of_backend
def test_batched_transforms_equal_a_loop(backend: str) -> None:
    stack = torch.stack([normal(ROWS, seed=seed, dtype=torch.float64) for seed in (1, 2)])
    for name in ("supcon", "supcon_in one_positive", "nt_xent", "nt_bxent", "references", "info_nce queue"):
        loss = LOSSES[name]
        call = lambda z, f=loss: f(z, backend=backend)  # noqa: E731
        each = lambda z, f=loss: f(z, backend=backend, reduction="none")  # noqa: E731
        close = {"rtol": 1e-9, "atol": 1e-9, "msg": name}
        for function in (call, torch.func.grad(call)):
            true = torch.stack([function(z) for z in stack])
            torch.testing.assert_close(torch.func.vmap(function)(stack), true, **close)
        true = torch.autograd.functional.jacobian(each, stack[0])
        torch.testing.assert_close(torch.func.jacrev(each)(stack[0]), true, **close)


def test_each_argument_may_be_batched_alone() -> None:
    """Batched values are not read, even if other values that they are checked with are not batched."""
    z, bank, places = normal(ROWS, dtype=torch.float64), BANK.double(), torch.tensor([1, 2, 0, 3, 4, 1, 2, 0])
    left_out = MASK & (PARTNERS[:, None] != torch.arange(ROWS))
    calls: dict[str, tuple[Call, Tensor]] = {
        "anchors": (lambda anchors: supcon_loss(z, LABELS, anchors=anchors), ~ANCHORS),
        "anchors of partners": (lambda anchors: nt_xent_loss(z, PARTNERS, anchors=anchors, backend="tiled"), ~ANCHORS),
        "ignored": (lambda mask: nt_xent_loss(z, PARTNERS, ignored=mask), left_out),
        "self_rows": (lambda own: nt_xent_loss(z, places, ref_embeddings=bank, self_rows=own), OWN),
        "self_rows of dclw": (lambda own: dclw_loss(z, places, ref_embeddings=bank, self_rows=own), OWN),
        "ignored pairs of towers": (
            lambda mask: info_nce_loss(z, z.flip(1), ignored=mask),
            MASK & ~torch.eye(ROWS, dtype=torch.bool),
        ),
    }
    for name, (call, given) in calls.items():
        stack = torch.stack((given, given.roll(0, 0)))
        true = torch.stack([call(one) for one in stack])
        torch.testing.assert_close(torch.func.vmap(call)(stack), true, msg=name)


@old_torch_warns
@pytest.mark.parametrize(
    ("name", "backend"),
    slow_except(
        [("supcon", "auto"), ("nt_xent", "tiled"), ("info_nce queue", "exact")],
        itertools.product(["supcon", "nt_xent", "info_nce queue"], BACKENDS),
    ),
)
def test_hessian_in_reverse_mode_is_right_and_forward_mode_names_it(name: str, backend: str) -> None:
    call, z = lambda z: LOSSES[name](z, backend=backend), normal(ROWS, dtype=torch.float64)
    found = torch.func.jacrev(torch.func.jacrev(call))(z)
    torch.testing.assert_close(found, torch.autograd.functional.hessian(call, z), rtol=1e-9, atol=1e-9)
    with pytest.raises(NotImplementedError, match=r"use reverse mode, such as torch\.func\.jacrev"):
        torch.func.hessian(call)(z)


@pytest.mark.parametrize(
    ("name", "backend"),
    slow_except(
        [("supcon", "auto"), ("nt_xent", "auto"), ("nt_bxent", "auto"), ("temperature", "auto")],
        itertools.product(LOSSES, ("auto", "exact")),
    ),
)
def test_fake_tensors_and_traced_graphs_are_supported(name: str, backend: str) -> None:
    call, z, other = lambda z: LOSSES[name](z, backend=backend), normal(ROWS), normal(ROWS, seed=5)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(z).requires_grad_()
        call(fake).backward()
        assert isinstance(fake.grad, FakeTensor)
        assert fake.grad.shape == z.shape
    step = torch.func.grad_and_value(call)
    for tracing in ("real", "symbolic"):
        graph = make_fx(step, tracing_mode=tracing, _allow_non_fake_inputs=True)(z)
        torch.testing.assert_close(graph(other), step(other), rtol=1e-5, atol=1e-6)


def test_fake_buffers_are_not_kept() -> None:
    def step() -> None:
        with FakeTensorMode():
            device.give_back("logits", torch.empty(8))
        assert type(device.borrow("logits", torch.empty(0), 4)) is Tensor

    in_a_new_thread(step)


@old_torch_warns
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_modules_are_exported(strict: bool) -> None:
    module = SupConLoss(temperature=torch.tensor(0.2))
    program = torch.export.export(module, (normal(ROWS), LABELS), strict=strict)
    other = normal(ROWS, seed=5)
    torch.testing.assert_close(program.module()(other, LABELS), module(other, LABELS))


@pytest.mark.slow
@compiles
@old_torch_warns
@quick_backends
def test_one_graph_serves_every_temperature(backend: str) -> None:
    """A number that changes is compiled twice: as a constant, then as a variable."""
    from torch._dynamo.testing import CompileCounterWithBackend  # takes seconds, in every process that collects tests

    counter = CompileCounterWithBackend("aot_eager")

    def call(z: Tensor, temperature: float) -> Tensor:
        return supcon_loss(z, LABELS, temperature=temperature, backend=backend)

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for temperature in (0.5, 0.4, 0.3, 2e-3):
        found = value_and_gradient(lambda z, t=temperature: compiled(z, t), normal(ROWS))
        true = value_and_gradient(lambda z, t=temperature: call(z, t), normal(ROWS))
        torch.testing.assert_close(found, true, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 2


class Watch(TorchDispatchMode):
    """Raises on operations that must read values from an accelerator, for their result or its shape.

    With ``ordered`` it also raises on operations that add floats in no fixed order.
    """

    READING = (
        "_local_scalar_dense",
        "item",
        "nonzero",
        "nonzero_numpy",
        "argwhere",
        "equal",
        "allclose",
        "is_nonzero",
        "masked_select",
        "bincount",
        "repeat_interleave",
        "unique_dim",
        "unique_consecutive",
        "_unique",
        "_unique2",
    )
    ADDING = (
        "index_add",
        "scatter_add",
        "scatter_reduce",
        "index_reduce",
        "put",
        "embedding_dense_backward",
        "histc",
        "bincount",
    )

    def __init__(self, *, ordered: bool = False) -> None:
        super().__init__()
        self.ordered = ordered
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        plain = name.rstrip("_")
        self.seen += 1
        if name in self.READING or plain in self.READING:
            raise AssertionError(f"{name} reads values")
        if plain in ("index", "index_put", "_index_put_impl"):
            flags = [t for t in tree_leaves(args[1]) if isinstance(t, Tensor) and t.dtype == torch.bool]
            if flags:
                raise AssertionError(f"{name} by flags reads values")
        if self.ordered and args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            accumulates = plain in ("index_put", "_index_put_impl") and len(args) > 3 and args[3]
            reduces = plain == "scatter" and (kwargs or {}).get("reduce")
            if plain in self.ADDING or accumulates or reduces:
                raise AssertionError(f"{name} adds in any order")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def _accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the code paths of an accelerator, where values may not be read, on the CPU."""
    monkeypatch.setattr(device, "may_read", lambda tensor, validate=False: validate)
    # These functions read the CPU's memory without a torch operation.
    for name in ("tolist", "numpy", "__array__"):
        monkeypatch.setattr(torch.Tensor, name, _unreadable)


def _unreadable(*args: Any) -> None:
    raise AssertionError("memory is read")


unread = pytest.mark.usefixtures("_accelerator")


def test_watch_detects_reads_and_unordered_additions() -> None:
    flags, floats = torch.tensor([True, False]), torch.ones(2)
    reading: list[Callable[[], Any]] = [
        lambda: float(floats[0]),
        lambda: floats[flags],
        lambda: bool(flags.any()),
        lambda: flags.nonzero(),
        lambda: torch.equal(flags, flags),
        lambda: floats.unique(),
        lambda: floats.masked_select(flags),
    ]
    for operation in reading:
        with Watch(), pytest.raises(AssertionError, match="reads values"):
            operation()
    place = torch.tensor([0, 0])
    adding: list[Callable[[], Any]] = [
        lambda: floats.index_add(0, place, floats),
        lambda: floats.scatter_add(0, place, floats),
        lambda: floats.index_put((place,), floats, accumulate=True),
        lambda: floats.scatter_reduce(0, place, floats, "sum"),
    ]
    for operation in adding:
        with Watch(ordered=True), pytest.raises(AssertionError, match="any order"):
            operation()
    # On the CPU values are read, so the operations that the tests below forbid do occur there.
    with Watch(), pytest.raises(AssertionError, match="reads values"):
        supcon_loss(normal(ROWS), LABELS)


@unread
@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.quick(7)
def test_no_value_is_read_on_an_accelerator(name: str) -> None:
    z = normal(ROWS)
    with tiles_of(4):
        for backend, reduction in itertools.product(BACKENDS, ("mean", "sum", "none")):
            leaf = z.clone().requires_grad_()
            with Watch(ordered=True) as watch:
                value = LOSSES[name](leaf, backend=backend, reduction=reduction)
                value.sum().backward()
            assert watch.seen > 10
            true = value_and_gradient(LOSSES[name], z, backend="exact", reduction=reduction)
            logit = 500 if name == "shifted" else 20
            torch.testing.assert_close(value.detach(), true[0], rtol=1e-6 * logit, atol=1e-6 * logit)
            torch.testing.assert_close(leaf.grad, true[1], rtol=1e-5 * logit, atol=1e-5 * logit)


@unread
@kinds_of_backend
def test_options_and_policies_read_no_value(backend: str) -> None:
    z = normal(ROWS)
    for policy, anchors, base in itertools.product(("zero", "drop", "nan"), (None, ANCHORS), (None, 0.2)):
        options: dict[str, Any] = {"no_positive": policy, "anchors": anchors, "base_temperature": base}
        for loss, extra in (
            (supcon_loss, {"denominator": "only_negatives", "no_negative": "nan"}),
            (nt_xent_pairwise_loss, {"reduction": "mean_pairs"}),
            (supcon_epsilon_loss, {}),
        ):
            with Watch(ordered=True):
                value = loss(z.clone().requires_grad_(), LABELS, backend=backend, **options, **extra)
                value.backward()
            true = loss(z.double(), LABELS, backend="exact", **options, **extra)
            torch.testing.assert_close(value.detach().double(), true, rtol=1e-4, atol=1e-5, equal_nan=True)
    temperature = torch.tensor(0.3, requires_grad=True)
    with Watch(ordered=True):
        supcon_loss(z, LABELS, temperature=temperature, backend=backend).backward()
    other = torch.tensor(0.3, requires_grad=True)
    supcon_loss(z, LABELS, temperature=other, backend="exact").backward()
    torch.testing.assert_close(temperature.grad, other.grad, rtol=1e-5, atol=1e-6)


@unread
@kinds_of_backend
def test_extreme_sizes_read_no_value(backend: str) -> None:
    """With extreme rows, extreme upstream gradients, and upstream gradients of rows that do not count."""
    lengths = torch.tensor([1e-30, 1e30, 1, 1e-18, 1e18, 3e37, 1e-34, 1])[:, None]
    for name in ("supcon", "nt_xent", "nt_bxent", "mask", "shifted"):
        z = normal(ROWS)
        true = value_and_gradient(LOSSES[name], z, backend="exact", reduction="none")
        leaf = (z * lengths).requires_grad_()
        with Watch():
            value = LOSSES[name](leaf, backend=backend, reduction="none")
            (gradient,) = torch.autograd.grad(value, leaf, torch.ones_like(value), retain_graph=True)
        scale = 500 if name == "shifted" else 20
        torch.testing.assert_close(value.detach(), true[0], rtol=1e-6 * scale, atol=1e-6 * scale)
        torch.testing.assert_close(gradient.double() * lengths.double(), true[1].double(), rtol=1e-3, atol=1e-5 * scale)
        for size in (1e-30, 1e30, 0.0):
            plain = z.clone().requires_grad_()
            again = LOSSES[name](plain, backend=backend, reduction="none")
            (first,) = torch.autograd.grad(again, plain, torch.ones_like(again), retain_graph=True)
            with Watch():
                (found,) = torch.autograd.grad(again, plain, torch.full_like(again, size))
            torch.testing.assert_close(found, first * size, rtol=1e-5, atol=1e-5 * size)
    no_positives = LABELS == 5
    for strange in (math.nan, math.inf, 1e38):
        leaf = normal(ROWS).requires_grad_()
        value = supcon_loss(leaf, LABELS, backend=backend, reduction="none")
        (true_row_gradients,) = torch.autograd.grad(value, leaf, torch.where(no_positives, 0.0, 1.0), retain_graph=True)
        (found,) = torch.autograd.grad(value, leaf, torch.where(no_positives, strange, 1.0))
        assert torch.equal(found, true_row_gradients)


@unread
def test_second_derivative_reads_no_value() -> None:
    for name, backend in itertools.product(("supcon", "nt_xent", "mask", "supcon_epsilon", "references"), BACKENDS):
        z = normal(ROWS).requires_grad_()
        with Watch():
            (first,) = torch.autograd.grad(LOSSES[name](z, backend=backend), z, create_graph=True)
            first.square().sum().backward()
        assert z.grad is not None
        assert bool(z.grad.isfinite().all())


def test_values_on_an_accelerator_are_checked_only_with_validate() -> None:
    """Without ``validate``, values on an accelerator are not checked, and bad ones give NaN."""
    z = normal(ROWS)
    z[3] = 0
    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        context.setattr(device, "may_read", lambda tensor, validate=False: validate)
        assert bool(supcon_loss(z, LABELS).isnan())
        with pytest.raises(ValueError, match="row 3"):
            supcon_loss(z, LABELS, validate=True)
    with pytest.raises(ValueError, match="row 3"):
        supcon_loss(z, LABELS)


@unread
@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_temperatures_are_not_rounded_again_on_an_accelerator(backend: str) -> None:
    """The temperature is a tensor that is not read, of fewer digits than the rows."""
    z, bank = normal(ROWS, dtype=torch.float64), BANK.double()
    calls: dict[str, Call] = {
        "supcon": lambda z, **o: supcon_loss(z, LABELS, **o),
        "dot": lambda z, **o: nt_xent_loss(z, PARTNERS, similarity="dot", **o),
        "base_temperature": lambda z, **o: nt_xent_loss(z, PARTNERS, base_temperature=0.1, **o),
        "supcon_epsilon": lambda z, **o: supcon_epsilon_loss(z, LABELS, **o),
        "nt_bxent": lambda z, **o: nt_bxent_loss(z, PAIRS, **o),
        "queue": lambda z, **o: info_nce_loss(z, z.flip(1), negatives=bank, **o),
        "dclw": lambda z, **o: dclw_loss(z, PARTNERS, **o),
        "hard_negative": lambda z, **o: hard_negative_loss(z, PARTNERS, **o),
        "sigmoid": lambda z, **o: sigmoid_loss(z, z.flip(1), **o),
        "hardened": lambda z, **o: multiple_negatives_ranking_loss(
            z,
            z.flip(1),
            hard_negatives=z[:, None] + 1,
            hard_negatives_scope="own",
            hardness_mode="all_negatives",
            hardness_strength=0.3,
            **o,
        ),
    }
    for name, call in calls.items():
        found, true = (value_and_gradient(call, z, temperature=t, backend=backend) for t in (HOT, HOT.double()))
        torch.testing.assert_close(found, true, rtol=1e-12, atol=1e-13, msg=name)


def unchecked(backend: str) -> Iterator[tuple[str, Tensor]]:
    """Yield losses of values that are not checked: rows of NaN in every matrix, and impossible temperatures."""
    places, mask = torch.arange(5), MASK[:, :5]
    of_bank: dict[str, Any] = {"ref_labels": BANK_LABELS}
    calls: dict[str, Callable[..., Tensor]] = {
        "supcon": lambda z, w, **o: supcon_loss(z, LABELS, **o),
        "supcon mask": lambda z, w, **o: supcon_loss(z, positives=mask, ref_embeddings=w, **o),
        "supcon_in": lambda z, w, **o: supcon_in_loss(z, LABELS, denominator="one_positive", **o),
        "only_negatives": lambda z, w, **o: supcon_loss(
            z, LABELS, ref_embeddings=w, denominator="only_negatives", **of_bank, **o
        ),
        "supcon_epsilon": lambda z, w, **o: supcon_epsilon_loss(z, LABELS, **o),
        "nt_xent": lambda z, w, **o: nt_xent_loss(z, PARTNERS, **o),
        "nt_xent references": lambda z, w, **o: nt_xent_loss(z[:5], places, ref_embeddings=w, **o),
        "nt_bxent": lambda z, w, **o: nt_bxent_loss(z, PAIRS, **o),
    }
    for direction in ("both", "a_to_b", "b_to_a"):
        calls[direction] = lambda z, w, d=direction, **o: info_nce_loss(z[:5], w, direction=d, **o)
        calls[f"queue {direction}"] = lambda z, w, d=direction, **o: info_nce_loss(
            z, z.flip(1), negatives=w, direction=d, **o
        )
    referred = {"supcon mask", "only_negatives", "nt_xent references", "both", "a_to_b", "b_to_a"}
    for (name, call), (similarity, low) in itertools.product(calls.items(), (("cosine", 2e-3), ("dot", 0.07))):
        for rows, matrix in itertools.product((slice(2, 3), slice(None)), (0, 1)):
            if matrix and name not in referred and not name.startswith("queue"):
                continue
            given = [normal(ROWS), BANK.clone()]
            given[matrix][rows] = math.nan
            title = f"{name}, {similarity}, temperature {low}, NaN in rows {rows} of matrix {matrix}"
            yield title, call(*given, temperature=low, similarity=similarity, backend=backend)
        for bad in (0.0, -1.0, math.nan, math.inf):
            value = call(normal(ROWS), BANK, temperature=torch.tensor(bad), similarity=similarity, backend=backend)
            yield f"{name}, {similarity}, temperature {bad}", value


@unread
@kinds_of_backend
def test_values_that_are_not_checked_give_nan(backend: str) -> None:
    with tiles_of(4):
        finite = [title for title, value in unchecked(backend) if not value.isnan()]
    assert finite == []


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that any operation returns, and of the largest storage.

    The given tensors are not counted.
    """

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.given = {t.untyped_storage().data_ptr() for t in given}
        self.entries = 0
        self.where = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.given:
                held = tensor.untyped_storage().nbytes() // tensor.element_size()
                if max(held, tensor.numel()) > self.entries:
                    self.entries, self.where = max(held, tensor.numel()), str(func)
        return result


def in_a_new_thread(function: Callable[[], None]) -> None:
    """Run a function in a new thread, where no buffer of an earlier call exists."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(function).result()


MANY, DIM = 2048, 16


def large_calls(where: str = "cpu") -> dict[str, tuple[Call, list[Tensor]]]:
    """Return losses of many rows, and their large inputs."""
    place = torch.arange(MANY, device=where)
    labels, mask = place % 10, (place[:, None] % 10) == (place % 10)
    listed = torch.stack((place, (place * 7 + 1) % MANY), 1)
    references, turned = normal(MANY, DIM, seed=8).to(where), labels.flip(0)
    ignored = (place[:, None] * 3 + place) % 5 == 4
    ignored[place, place ^ 1] = False
    calls: dict[str, tuple[Call, list[Tensor]]] = {
        "nt_xent": (lambda z, **o: nt_xent_loss(z, place ^ 1, **o), []),
        "nt_xent dot": (lambda z, **o: nt_xent_loss(z, place ^ 1, similarity="dot", temperature=0.01, **o), []),
        "nt_bxent": (lambda z, **o: nt_bxent_loss(z, listed, **o), []),
        "two views": (lambda z, **o: supcon_loss(z, place % (MANY // 2), **o), []),
        "info_nce": (lambda z, **o: info_nce_loss(z, references, **o), []),
        "info_nce queue": (lambda z, **o: info_nce_loss(z, z.flip(1), negatives=references, **o), []),
        "references": (
            lambda z, **o: supcon_loss(z, labels, ref_embeddings=references, ref_labels=turned, self_rows=place, **o),
            [],
        ),
        "nt_xent references": (lambda z, **o: nt_xent_loss(z, place, ref_embeddings=references, **o), []),
        "ids": (lambda z, **o: supcon_loss(z, labels, ignored_ids=place % 7, **o), []),
        "ids shifted": (lambda z, **o: supcon_loss(z, labels, ignored_ids=place % 7, temperature=2e-3, **o), []),
        "nt_xent ids": (lambda z, **o: nt_xent_loss(z, place ^ 1, ignored_ids=place % 7, **o), []),
        "nt_bxent ids": (lambda z, **o: nt_bxent_loss(z, listed, ignored_ids=place % 7, **o), []),
        "ignored": (lambda z, **o: nt_xent_loss(z, place ^ 1, ignored=ignored, **o), [ignored]),
    }
    for loss in (supcon_loss, supcon_in_loss, nt_xent_pairwise_loss, supcon_epsilon_loss):
        name = loss.__name__
        calls[f"{name} labels"] = (lambda z, f=loss, **o: f(z, labels, **o), [])
        calls[f"{name} shifted"] = (lambda z, f=loss, **o: f(z, labels, temperature=2e-3, **o), [])
        calls[f"{name} mask"] = (lambda z, f=loss, **o: f(z, positives=mask, **o), [mask])
    for loss, denominator in itertools.product((supcon_loss, supcon_in_loss), ("one_positive", "only_negatives")):
        calls[f"{loss.__name__} {denominator}"] = (
            lambda z, f=loss, d=denominator, **o: f(z, labels, denominator=d, **o),
            [],
        )
    return calls


LARGE = large_calls()
QUICK_LARGE = (
    *("nt_xent", "nt_bxent", "two views", "info_nce queue", "references", "supcon_loss labels", "supcon_loss shifted"),
    *("supcon_in_loss mask", "supcon_epsilon_loss labels", "supcon_in_loss one_positive", "ids", "ignored"),
)
"""One loss for each form of the engine and each kind of targets."""


def most_entries(count: int) -> int:
    """Return the allowed number of entries of a tensor: a panel and a line, a tile, or linear in the rows."""
    return max(plan.PANEL_ELEMENTS + count, plan.TILE_ROWS * plan.TILE_COLUMNS, 2 * count * DIM)


@pytest.fixture
def keeps_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exponentials of `MANY` rows are more than those that are kept, in a batch and between calls."""
    monkeypatch.setattr(plan, "KEPT_ELEMENTS", MANY * MANY // 4)
    monkeypatch.setattr(device, "MOST_ENTRIES", MANY * MANY // 4)


@pytest.mark.usefixtures("keeps_less")
@pytest.mark.parametrize("name", slow_except(QUICK_LARGE, LARGE))
@pytest.mark.quick(4)
def test_no_tensor_grows_with_the_square_of_the_rows(name: str) -> None:
    loss, given = LARGE[name]
    z = normal(MANY, DIM).requires_grad_()
    assert most_entries(MANY) < MANY * MANY / 4
    largest = Largest(*given)

    def step() -> None:
        with largest:
            loss(z, backend="tiled", validate=True).backward()

    in_a_new_thread(step)
    assert z.grad is not None
    assert bool(z.grad.isfinite().all())
    assert largest.entries <= most_entries(MANY), largest.where


@pytest.mark.usefixtures("keeps_less")
@unread
@pytest.mark.parametrize("name", ["nt_xent", "supcon_loss labels", "supcon_in_loss one_positive", "nt_bxent"])
def test_no_tensor_grows_with_the_square_of_the_rows_on_an_accelerator(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles have the size of those on a CPU; tiles on an accelerator are larger than this batch."""
    monkeypatch.setattr(plan, "ACCELERATOR_FACTOR", 1)
    largest = Largest()

    def step() -> None:
        with largest:
            LARGE[name][0](normal(MANY, DIM).requires_grad_(), backend="auto").backward()

    in_a_new_thread(step)
    assert largest.entries <= most_entries(MANY), largest.where


@unread
def test_tiles_and_panels_of_an_accelerator_are_bounded() -> None:
    most = plan.ACCELERATOR_FACTOR**2 * plan.PANEL_ELEMENTS
    for count, temperature in itertools.product((1000, 8192, 8193, 2**16, 2**20), (0.1, 2e-3)):
        rows, targets = torch.empty(count, 1), Targets("labels", torch.empty(count, dtype=torch.int64))
        for backend in ("auto", "tiled"):
            found, _ = plan.choose(Batch(rows, targets, Rule("out", "cosine", temperature), References()), backend)
            assert found.form == ("symmetric" if temperature == 0.1 else "rowwise")
            assert min(found.rows, count) * min(found.columns, count) <= max(most, plan.LEAST_ROWS * count)


@pytest.mark.usefixtures("keeps_less")
@pytest.mark.parametrize("name", slow_except(["references"], ["nt_xent", "supcon_loss labels", "references"]))
def test_no_tensor_of_a_second_derivative_grows_with_the_square_of_the_rows(name: str) -> None:
    loss, given = LARGE[name]
    z = normal(MANY, DIM).requires_grad_()
    largest = Largest(*given)

    def step() -> None:
        with largest:
            (first,) = torch.autograd.grad(loss(z, backend="tiled"), z, create_graph=True)
            first.square().sum().backward()

    in_a_new_thread(step)
    assert largest.entries <= most_entries(MANY), largest.where


def test_panels_with_many_columns_have_at_least_64_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of fewer rows are slow: with 65,536 columns, a panel of 2^18 entries would have 4 rows."""
    choose, panels = autograd.choose, rowwise.panels
    heights: list[int] = []

    def recorded(*given: Any, **options: Any) -> Any:
        found = choose(*given, **options)
        heights.append(found[0].rows)
        return found

    monkeypatch.setattr(autograd, "choose", recorded)
    monkeypatch.setattr(rowwise, "panels", lambda *given: heights.append(given[2]) or panels(*given))
    bank, rows = normal(2**13, 2), normal(3, 2).requires_grad_()
    options: dict[str, Any] = {"ref_embeddings": bank, "ref_labels": torch.arange(len(bank)) % 3}
    for temperature in (0.1, 0.002):  # unshifted and rowwise
        loss = supcon_loss(rows, torch.arange(3), temperature=temperature, **options)
        (first,) = torch.autograd.grad(loss, rows, create_graph=True)
        first.sum().backward()
    assert set(heights) == {64}
    assert len(heights) == 6  # plan and second derivative; the rowwise form also splits its values and its gradient


def test_buffers_of_other_devices_are_not_kept() -> None:
    def step() -> None:
        device.give_back("logits", torch.empty(8, device="meta"))
        assert device.borrow("logits", torch.empty(0), 4).device.type == "cpu"

    in_a_new_thread(step)


def test_no_loss_depends_on_the_default_device() -> None:
    calls = LOSSES | {
        "none_pairs": lambda z, **o: nt_xent_pairwise_loss(z, LABELS, reduction="none_pairs", **o),
        "none_pairs, sigmoid": lambda z, **o: sigmoid_loss(z, z.flip(1), reduction="none_pairs", **o),
        "ranking": lambda z, **o: multiple_negatives_ranking_loss(z, z.flip(1), **o),
    }

    def step() -> None:  # in a new thread, so that no buffer is idle
        for (name, call), backend in itertools.product(calls.items(), ("auto", "tiled")):
            leaf, upstream = normal(ROWS).requires_grad_(), torch.tensor(2.0)
            with torch.device("meta"):
                value = call(leaf, backend=backend)
                (gradient,) = torch.autograd.grad(value, leaf, upstream.expand_as(value))
            torch.testing.assert_close(gradient, 2 * value_and_gradient(call, leaf, backend=backend)[1], msg=name)

    in_a_new_thread(step)


@pytest.mark.usefixtures("keeps_less")
def test_matrix_of_the_dense_backend_is_detected_and_not_kept() -> None:
    """The dense backend may allocate a matrix, but must release it after the call."""
    largest, after = Largest(), Largest()

    def steps() -> None:
        with largest:
            supcon_loss(normal(MANY).requires_grad_(), torch.arange(MANY) % 3, backend="dense").backward()
        with after:
            supcon_loss(normal(MANY).requires_grad_(), torch.arange(MANY) % 3, backend="tiled").backward()

    in_a_new_thread(steps)
    assert largest.entries == MANY * MANY
    assert after.entries <= most_entries(MANY)


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is present")
CUDA_BACKENDS = (*BACKENDS, "triton")
"""On CUDA "auto" uses the kernels for the dtypes that they support."""
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def on_cuda(name: str, values: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a CUDA test. Without a CUDA device, the test has a single parameter, and is skipped once."""
    every = list(values)
    return pytest.mark.parametrize(name, every if torch.cuda.is_available() else every[:1])


def needs_kernels() -> None:
    refusal = kernels.refusal(torch.empty(2, 1, device="cuda"))
    if refusal is not None:
        pytest.skip(f"the kernels cannot run: {refusal}")


@cuda
@on_cuda("backend", CUDA_BACKENDS)
@on_cuda("name", list(LOSSES))
def test_cuda_agrees_with_the_exact_values_and_gradients(name: str, backend: str) -> None:
    loss = losses("cuda")[name]
    if backend == "triton":
        needs_kernels()
    for dtype in KERNEL_DTYPES if backend == "triton" else (torch.float64, torch.float32, torch.bfloat16):
        z = normal(ROWS, dtype=dtype)
        true = value_and_gradient(LOSSES[name], z.double(), backend="exact")
        found = value_and_gradient(loss, z.cuda(), backend=backend)
        unit = (500 if name == "shifted" else 20) * (1e-14 if dtype == torch.float64 else 1e-6)
        rounding = torch.finfo(dtype).eps
        torch.testing.assert_close(found[0].cpu().double(), true[0], rtol=unit, atol=unit)
        # For half precision, kernels round the result and also the weights, which partly cancel in a sum.
        narrowed = 8 * rounding * float(true[1].abs().max()) if dtype in KERNEL_DTYPES[1:] else 0.0
        torch.testing.assert_close(
            found[1].cpu().double(), true[1], rtol=10 * unit + rounding, atol=10 * unit + narrowed
        )


@cuda
@on_cuda("backend", CUDA_BACKENDS)
@on_cuda("name", list(LOSSES))
def test_cuda_is_not_synchronised(name: str, backend: str) -> None:
    if backend == "triton":
        needs_kernels()
    loss = losses("cuda")[name]
    z = normal(ROWS).cuda().requires_grad_()
    # Run once before: loading libraries and creating handles may synchronise.
    loss(z, backend=backend).backward()
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        value = loss(z, backend=backend)
        value.backward()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert bool(value.isfinite())


@cuda
@on_cuda("backend", CUDA_BACKENDS)
@on_cuda("name", list(LOSSES))
def test_cuda_graphs_capture_a_step(name: str, backend: str) -> None:
    if backend == "triton":
        needs_kernels()
    loss = losses("cuda")[name]
    static = normal(ROWS).cuda().requires_grad_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            static.grad = None
            loss(static, backend=backend).backward()
    torch.cuda.current_stream().wait_stream(side)
    static.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = loss(static, backend=backend)
        value.backward()
    for seed in (5, 6):
        fresh = normal(ROWS, seed=seed).cuda()
        with torch.no_grad():
            static.copy_(fresh)
        graph.replay()
        assert static.grad is not None
        true = value_and_gradient(loss, fresh, backend=backend)
        torch.testing.assert_close((value.detach(), static.grad), true, rtol=1e-6, atol=1e-7)


@cuda
@on_cuda("deterministic", [False, True])
@on_cuda("backend", ["auto", "tiled", "triton"])
def test_cuda_results_are_bitwise_reproducible(backend: str, deterministic: bool) -> None:
    if backend == "triton":
        needs_kernels()
    before = torch.are_deterministic_algorithms_enabled()
    z = normal(MANY, DIM).cuda()
    for name, (loss, _) in large_calls("cuda").items():
        if backend == "triton" and name == "ignored":
            continue  # the kernels do not support a mask of ignored pairs
        try:
            # torch raises an error if an operation has no deterministic implementation.
            torch.use_deterministic_algorithms(deterministic)
            first, second = (value_and_gradient(loss, z, backend=backend) for _ in range(2))
        finally:
            torch.use_deterministic_algorithms(before)
        assert torch.equal(first[0], second[0]), name
        assert torch.equal(first[1], second[1]), name


def small_large(where: str) -> dict[str, Call]:
    """Return one loss for each kind of targets, of `MANY` rows."""
    names = (
        "nt_xent",
        "nt_bxent",
        "supcon_loss labels",
        "supcon_loss mask",
        "supcon_in_loss one_positive",
        "references",
    )
    calls = large_calls(where)
    return {name: calls[name][0] for name in names}


@cuda
@on_cuda("dtype", KERNEL_DTYPES)
@on_cuda("name", list(small_large("cpu")))
def test_cuda_kernels_are_right_for_many_rows(name: str, dtype: torch.dtype) -> None:
    """With many panels, shares of columns and tiles without positives, compared with float64 on whole matrices."""
    needs_kernels()
    loss, z = small_large("cuda")[name], normal(MANY, DIM, dtype=dtype)
    wide = z.double().cuda()

    def in_float64(z: Tensor, **options: Any) -> Tensor:
        # Some calls have float32 references; these are evaluated in float32 on the same rows.
        return loss(z.float() if name == "references" else z, **options)

    narrow: Call = (lambda z, **o: loss(z.float(), **o)) if name == "references" else loss
    true = value_and_gradient(in_float64, wide, backend="exact", reduction="none")
    found = value_and_gradient(narrow, z.cuda(), backend="triton", reduction="none")
    torch.testing.assert_close(found[0].double(), true[0].double(), rtol=2e-5, atol=2e-5)
    rounding = torch.finfo(dtype).eps
    errors = (found[1].double() - true[1].double()).norm(dim=1)
    assert float(errors.max()) <= (2 * rounding + 2e-5) * float(true[1].double().norm(dim=1).amax())


@cuda
def test_cuda_kernels_work_on_every_stream() -> None:
    """Steps run at the same time on separate streams, each with separate buffers."""
    needs_kernels()
    labels = torch.arange(MANY, device="cuda") % 10
    batches = [normal(MANY, DIM, seed=seed).cuda() for seed in range(4)]

    def call(z: Tensor, **options: Any) -> Tensor:
        return supcon_loss(z, labels, backend="triton", **options)

    true = [value_and_gradient(call, z) for z in batches]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in batches]
    found = []
    for stream, z in zip(streams, batches, strict=True):
        with torch.cuda.stream(stream):
            found.append(value_and_gradient(call, z))
    torch.cuda.synchronize()
    for one, other in zip(found, true, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices are present")
@on_cuda("backend", ["auto", "triton"])
def test_cuda_kernels_work_on_a_device_that_is_not_the_current_one(backend: str) -> None:
    z = normal(64, DIM).to("cuda:1")
    labels = torch.arange(64, device="cuda:1") % 5
    assert torch.cuda.current_device() == 0
    value, gradient = value_and_gradient(lambda z, **o: supcon_loss(z, labels, **o), z, backend=backend)
    assert torch.cuda.current_device() == 0
    assert value.device == gradient.device == z.device
    true = value_and_gradient(lambda z, **o: supcon_loss(z, labels.cpu(), **o), z.double().cpu(), backend="exact")
    torch.testing.assert_close(value.cpu().double(), true[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.cpu().double(), true[1], rtol=1e-4, atol=1e-5)


@cuda
@on_cuda("dtype", KERNEL_DTYPES)
def test_memory_of_cuda_kernels_is_linear_in_the_rows(dtype: torch.dtype) -> None:
    """At 32768 rows an N x N tensor, or a buffer for every tile, would take gigabytes."""
    needs_kernels()
    peaks = []
    for count in (16384, 32768):
        labels = torch.arange(count, device="cuda") % 1000
        z = normal(count, 64, dtype=dtype).cuda().requires_grad_()
        supcon_loss(z, labels, backend="triton").backward()
        z.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        supcon_loss(z, labels, backend="triton").backward()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 2.2 * peaks[0]
    # At most sixteen shares of the columns for each of two kernels, in addition to the rows.
    assert peaks[1] < 32768 * 64 * 4 * (2 * 16 + 8)


@cuda
def test_cuda_uses_the_kernels_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a ``backend`` argument, for the dtypes that the kernels support."""
    needs_kernels()
    from pairproof.fast.kernels import launch

    met: list[str] = []
    right = launch.run

    def noted(kernel: Any, grid: tuple[int, ...], given: dict[str, Any]) -> None:
        met.append(kernel.fn.__name__)
        right(kernel, grid, given)

    monkeypatch.setattr(launch, "run", noted)
    labels = LABELS.cuda()
    for dtype in (*KERNEL_DTYPES, torch.float64):
        for backend in BACKENDS:
            met.clear()
            value_and_gradient(
                lambda z, **o: supcon_loss(z, labels, **o), normal(ROWS, dtype=dtype).cuda(), backend=backend
            )
            assert bool(met) == (backend == "auto" and dtype in KERNEL_DTYPES)


@cuda
@compiles
@old_torch_warns
@on_cuda("compiler", ["aot_eager", "inductor"])
def test_cuda_kernels_compile_within_a_graph(compiler: str) -> None:
    needs_kernels()
    labels, z = LABELS.cuda(), normal(ROWS).cuda()

    def step(z: Tensor) -> Tensor:
        return supcon_loss(torch.nn.functional.relu(z) + z, labels, backend="triton")

    found = value_and_gradient(torch.compile(step, fullgraph=True, backend=compiler), z)
    torch.testing.assert_close(found, value_and_gradient(step, z), rtol=1e-5, atol=1e-6)
