"""The kernels within torch: compilation, transforms, second derivatives, autocast, learned temperatures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

pytest.importorskip("triton", reason="triton is not installed: pip install triton")

from pairproof.fast import InfoNCELoss, SigmoidLoss, SupConLoss, nt_xent_loss, supcon_loss
from pairproof.fast.engine import device

Tensor = torch.Tensor
EVERY_KERNEL = (
    "supcon_loss all",
    "supcon_in_loss one_positive mask",
    "epsilon",
    "pairs",
    "partners",
    "queue",
    "sigmoid mask",
)
"""Calls that together use every kernel."""
MORE_CALLS = (*EVERY_KERNEL, "supcon_loss only_negatives references", "anchors", "both directions")
QUICK = ("supcon_loss all", "pairs", "partners", "supcon_loss only_negatives references")
"""Calls of different kinds, for tests of what all kernels have in common; tests of the other calls are slow."""


def quick_first(names: Sequence[str]) -> pytest.MarkDecorator:
    """Parametrize a test by the names of calls; it is slow for names that are not in `QUICK`."""
    slow = pytest.mark.slow
    return pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=slow) for n in names])


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


compiles = pytest.mark.usefixtures("_fresh_compiler")
old_torch_warns = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def assert_close(found: list[Tensor], true: list[Tensor], unit: float = 2e-6) -> None:
    assert len(found) == len(true)
    for one, other in zip(found, true, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=unit * max(1.0, float(other.abs().max())))


@compiles
@old_torch_warns
@quick_first(MORE_CALLS)
@pytest.mark.quick(1)
def test_step_compiles_as_one_graph(name: str, calls: dict[str, Any]) -> None:
    call = calls[name]
    given = [matrix.clone().requires_grad_() for matrix in (call.rows, *call.others)]

    def step(*matrices: Tensor) -> Tensor:
        return call.loss(*(matrix * 1.5 for matrix in matrices), backend="triton", temperature=0.3)

    found = torch.compile(step, fullgraph=True, backend="aot_eager")(*given)
    true = step(*given)
    assert torch.equal(found, true)
    assert_close(list(torch.autograd.grad(found, given)), list(torch.autograd.grad(true, given)), 1e-7)


@compiles
@old_torch_warns
def test_one_graph_serves_every_batch_size() -> None:
    def call(z: Tensor) -> Tensor:
        return supcon_loss(z, torch.arange(len(z)) % 3, backend="triton")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    compiled(torch.randn(6, 5))
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(torch.randn(6, 5))
    compiled(torch.randn(9, 5))
    for count in (12, 40, 130):
        z = torch.randn(count, 5)
        with torch.compiler.set_stance("fail_on_recompile"):
            assert torch.equal(compiled(z), call(z))


@compiles
@old_torch_warns
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["supcon_loss all", "pairs", "supcon_in_loss one_positive references"])
@pytest.mark.quick(1)
def test_operators_pass_opcheck(name: str, dtype: torch.dtype, calls: dict[str, Any]) -> None:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    calls_made: list[tuple[Any, tuple[Any, ...]]] = []

    class Recorder(torch.fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if str(target).startswith("pairproof"):
                calls_made.append((target, tuple(a.detach().clone() if isinstance(a, Tensor) else a for a in args)))
            return super().call_function(target, args, kwargs)

    def recorded(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return make_boxed_func(lambda *args: Recorder(graph).run(*args))

    call = calls[name]
    compiled = torch.compile(call.loss, fullgraph=True, backend=aot_autograd(fw_compiler=recorded))
    given = [matrix.to(dtype, copy=True).requires_grad_() for matrix in (call.rows, *call.others)]
    torch.autograd.grad(compiled(*given, backend="triton"), given)
    # Indices of columns, such as partners and self rows, are checked by an operator too.
    assert {str(operator) for operator, _ in calls_made} - {"pairproof.checked.default"} == {
        "pairproof.anchor_values.default",
        "pairproof.anchor_gradients.default",
    }
    for operator, args in calls_made:
        torch.library.opcheck(operator, args)


@quick_first(MORE_CALLS)
def test_functional_transforms_equal_the_backward_pass(name: str, calls: dict[str, Any]) -> None:
    call = calls[name]
    given = (call.rows, *call.others)
    numbers = tuple(range(len(given)))

    def loss(*matrices: Tensor) -> Tensor:
        return call.loss(*matrices, backend="triton", temperature=0.3)

    value, *true = call.results(temperature=0.3)
    found, again = torch.func.grad_and_value(loss, argnums=numbers)(*given)
    assert_close([again, *found], [value, *true])
    output, back = torch.func.vjp(loss, *given)
    assert_close([output, *back(torch.tensor(2.0))], [value, *(2 * gradient for gradient in true)])


@quick_first(EVERY_KERNEL)
def test_second_derivative_equals_the_exact_backend(name: str, calls: dict[str, Any]) -> None:
    """The second derivative is computed both by `torch.func` and by autograd."""
    call = calls[name]
    given = (call.rows, *call.others)
    direction = torch.randn(call.rows.shape, generator=torch.Generator().manual_seed(8))

    def first(backend: str) -> Callable[..., Tensor]:
        def along(z: Tensor, *others: Tensor) -> Tensor:
            def loss(z: Tensor) -> Tensor:
                return call.loss(z, *others, backend=backend, temperature=0.5)

            return (torch.func.grad(loss)(z) * direction.to(z.dtype)).sum()

        return along

    true = torch.func.grad(first("exact"))(*(matrix.double() for matrix in given))
    assert_close([torch.func.grad(first("triton"))(*given)], [true], 2e-5)
    leaf = call.rows.clone().requires_grad_()
    value = call.loss(leaf, *call.others, backend="triton", temperature=0.5)
    (gradient,) = torch.autograd.grad(value, leaf, create_graph=True)
    (found,) = torch.autograd.grad((gradient * direction).sum(), leaf)
    assert_close([found], [true], 2e-5)


@pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.slow) for turn in (1, 2))])
@pytest.mark.quick(6)
def test_gradient_of_a_learned_temperature_equals_the_exact_one(turn: int, call: Any, calls: dict[str, Any]) -> None:
    """The other gradients are compared too. The calls have three temperatures in turn."""
    temperature = (0.4, 0.02, 0.1)[(list(calls.values()).index(call) + turn) % 3]
    found = []
    for backend, dtype in (("triton", torch.float32), ("exact", torch.float64)):
        learned = torch.tensor(temperature, dtype=torch.float32).to(dtype).requires_grad_()
        given = [matrix.to(dtype, copy=True).requires_grad_() for matrix in (call.rows, *call.others)]
        values = call.loss(*given, backend=backend, temperature=learned)
        found.append([values.detach(), *torch.autograd.grad(values.sum(), [*given, learned])])
    # A logit is accurate to a few units in the last place, and low temperatures make logits large.
    assert_close(found[0], found[1], 4e-6 / temperature)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["sigmoid", "sigmoid labels", "sigmoid mask", "ids of labels in the sigmoid loss"])
def test_gradient_of_a_learned_bias_equals_the_exact_one(name: str, dtype: torch.dtype, calls: dict[str, Any]) -> None:
    call, found = calls[name], []
    for backend, wide in (("triton", dtype), ("exact", torch.float64)):
        given = [matrix.to(dtype).to(wide) for matrix in (call.rows, *call.others)]
        bias = torch.tensor(-1.5, dtype=torch.float32 if backend == "triton" else wide, requires_grad=True)
        values = call.loss(*given, backend=backend, bias=bias, temperature=0.4, reduction="none")
        up = torch.linspace(-1, 2, len(values), dtype=values.dtype)
        found.append([values.detach(), *torch.autograd.grad(values, bias, up)])
    assert_close(found[0], found[1], 1e-5)


def test_temperature_may_have_any_dtype() -> None:
    z, labels = torch.randn(9, 5), torch.arange(9) % 2
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        learned = torch.tensor(0.25, dtype=dtype, requires_grad=True)
        value = supcon_loss(z, labels, temperature=learned, backend="triton")
        value.backward()
        assert learned.grad is not None
        assert learned.grad.dtype == dtype
        torch.testing.assert_close(value.detach(), supcon_loss(z, labels, temperature=0.25, backend="triton"))


@pytest.mark.parametrize("module", [SupConLoss, InfoNCELoss, SigmoidLoss])
def test_module_learns_its_temperature(module: type[torch.nn.Module]) -> None:
    z = torch.randn(10, 4)
    target = torch.arange(10) % 3 if module is SupConLoss else torch.randn(10, 4)
    gradients = []
    for backend in ("triton", "exact"):
        made = module(temperature=torch.nn.Parameter(torch.tensor(0.3)), backend=backend)
        made(z, target).backward()
        assert made.temperature.grad is not None
        gradients.append(made.temperature.grad)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)])
@quick_first(EVERY_KERNEL)
def test_autocast_changes_nothing(name: str, dtype: torch.dtype, calls: dict[str, Any]) -> None:
    plain = calls[name].results(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = calls[name].results(dtype)
    for one, other in zip(within, plain, strict=True):
        assert torch.equal(one, other)


@quick_first(EVERY_KERNEL)
def test_backward_pass_may_run_twice(name: str, calls: dict[str, Any]) -> None:
    call = calls[name]
    leaf = call.rows.clone().requires_grad_()
    values = call.loss(leaf, *call.others, backend="triton", reduction="none")
    first, again = (torch.autograd.grad(values.sum(), leaf, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)


@old_torch_warns
@quick_first(EVERY_KERNEL)
def test_forward_mode_raises_and_vmap_equals_a_loop(name: str, calls: dict[str, Any]) -> None:
    call = calls[name]

    def loss(z: Tensor) -> Tensor:
        return call.loss(z, *call.others, backend="triton")

    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        loss(forward_ad.make_dual(call.rows, torch.ones_like(call.rows)))
    stack = torch.stack((call.rows, 2 * call.rows.flip(1)))
    assert_close([torch.func.vmap(loss)(stack)], [torch.stack([loss(rows) for rows in stack])])


def test_tf32_follows_the_setting_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With TF32, rows are rounded to ten fraction bits; the interpreter then multiplies them exactly."""
    z, labels = torch.randn(40, 16, generator=torch.Generator().manual_seed(2)), torch.arange(40) % 4
    monkeypatch.setattr(device, "tf32_allowed", lambda: True)
    leaf = z.clone().requires_grad_()
    value = supcon_loss(leaf, labels, temperature=0.1, backend="triton")
    (gradient,) = torch.autograd.grad(value, leaf)
    exact = z.double().requires_grad_()
    true = supcon_loss(exact, labels, temperature=0.1, backend="exact")
    (true_gradient,) = torch.autograd.grad(true, exact)
    error = abs(float(value.detach()) - float(true.detach()))
    assert 1e-7 < error < 2.0**-11 * 2 / 0.1
    gradient_error = (gradient.double() - true_gradient).norm() / true_gradient.norm()
    assert 1e-6 < float(gradient_error) < 2.0**-11 * 4 / 0.1


def test_result_under_no_grad_requires_no_gradient() -> None:
    z = torch.randn(12, 4)
    with torch.no_grad():
        value = nt_xent_loss(z.requires_grad_(), torch.arange(12) ^ 1, backend="triton")
    assert not value.requires_grad
    torch.testing.assert_close(value, nt_xent_loss(z.detach(), torch.arange(12) ^ 1, backend="exact"))
