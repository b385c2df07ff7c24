"""Small batches whose rows compiled functions evaluate: right digits, and torch operations wherever they are needed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pairproof import fast
from pairproof.fast.engine import compiled, jit
from pairproof.fast.engine.plan import DENSE_UP_TO

if jit.refusal() is not None:
    pytest.skip(str(jit.refusal()), allow_module_level=True)

GENERATOR = torch.Generator().manual_seed(43)
N, D = 12, 8
LABELS, PARTNERS = torch.arange(N) % 5, fast.stacked_partners(N)  # a label occurs once or several times
LABELS[-1] = 9
REF_LABELS = torch.tensor([0, 1, 2, 3, 0, 1, 2, 8, 8])
MASK = torch.rand(N, N, generator=GENERATOR) < 0.2  # asymmetric, and some rows have no positives

Loss = Callable[..., Tensor]
ONE: dict[str, Loss] = {
    "supcon": partial(fast.supcon_loss, labels=LABELS),
    "supcon, one class": partial(fast.supcon_loss, labels=torch.zeros(N, dtype=torch.int64)),
    "supcon, mask": partial(fast.supcon_loss, positives=MASK),
    "supcon, sum": partial(fast.supcon_loss, labels=LABELS, reduction="sum"),
    "supcon_in": partial(fast.supcon_in_loss, labels=LABELS),
    "supcon_in, sum of ratios": partial(fast.supcon_in_loss, positives=MASK, inside_reduction="sum"),
    "nt_xent": partial(fast.nt_xent_loss, partners=PARTNERS),
}
TWO: dict[str, Loss] = {
    "supcon, references": lambda a, b, **more: fast.supcon_loss(
        a, LABELS, ref_embeddings=b[:9], ref_labels=REF_LABELS, **more
    ),
    "nt_xent, references": lambda a, b, **more: fast.nt_xent_loss(a, PARTNERS, ref_embeddings=b, **more),
    "info_nce, both directions": fast.info_nce_loss,
    "info_nce, both directions, sum": partial(fast.info_nce_loss, reduction="sum"),
    "info_nce, one direction": partial(fast.info_nce_loss, direction="b_to_a"),
    "info_nce, labels": partial(fast.info_nce_loss, labels=LABELS, direction="a_to_b", no_positive="zero"),
    "info_nce, mask": partial(
        fast.info_nce_loss, positives=MASK, direction="a_to_b", inside_reduction="mean", no_positive="zero"
    ),
    "sigmoid": fast.sigmoid_loss,
    "sigmoid, labels": partial(fast.sigmoid_loss, labels=LABELS, reduction="sum"),
    "sigmoid, mask": partial(fast.sigmoid_loss, positives=MASK, bias=-2.0),
}
LOSSES = ONE | TWO
every = pytest.mark.parametrize("name", LOSSES)


def rows_of(name: str, noise: float = 10.0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return the rows of a loss, as leaves; the second half, or the other tower, is near the first up to ``noise``."""
    first, second, other = (torch.randn(n, D, generator=torch.Generator().manual_seed(n)) for n in (N // 2, 5 + N, N))
    rows = torch.cat((first, first + noise * second[: N // 2]))
    found = (rows,) if name in ONE else (rows, rows + noise * other)
    return [one.to(dtype).requires_grad_() for one in found]


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for each batch that the compiled form evaluates."""
    found: list[bool] = []
    original = compiled.evaluate
    monkeypatch.setattr(compiled, "evaluate", lambda *given, **more: found.append(True) or original(*given, **more))
    return found


def with_gradients(loss: Loss, rows: list[Tensor], **options: Any) -> list[Tensor]:
    value = loss(*rows, **options)
    numbers = [x for x in options.values() if isinstance(x, Tensor) and x.requires_grad]
    return [value.detach(), *torch.autograd.grad(value, rows + numbers)]


@every
@pytest.mark.parametrize("temperature", [0.5, 0.07, 0.02, 0.002])
@pytest.mark.parametrize("noise", [0.01, 10.0], ids=["solved", "random"])
@pytest.mark.quick(12)
def test_values_and_gradients_equal_the_exact_ones(
    name: str, temperature: float, noise: float, evaluated: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors are small, or at most twice those of torch operations."""
    loss, rows = LOSSES[name], rows_of(name, noise)
    found = with_gradients(loss, rows, temperature=temperature)
    assert len(evaluated) == 1
    with torch.no_grad():
        assert torch.equal(loss(*rows, temperature=temperature), found[0])
    wide = [one.detach().double().requires_grad_() for one in rows]
    right = with_gradients(loss, wide, temperature=temperature, backend="exact")
    monkeypatch.setattr(jit.State, "failure", "turned off by a test")
    usual = with_gradients(loss, rows, temperature=temperature)
    assert len(evaluated) == 2
    eps = torch.finfo(torch.float32).eps
    for ours, other, true in zip(found, usual, right, strict=True):
        error, of_operations = ((x.double() - true).abs().max() for x in (ours, other))
        assert error <= max(2 * of_operations, 4 * eps / min(temperature, 0.1) * true.abs().max(), 1e-37)


@every
def test_learned_temperature_and_bias_have_the_exact_gradients(name: str, evaluated: list[bool]) -> None:
    loss, rows = LOSSES[name], rows_of(name)
    wide = [one.detach().double().requires_grad_() for one in rows]
    numbers = {"temperature": 0.1, "bias": -3.0} if "sigmoid" in name else {"temperature": 0.1}
    learned = {key: torch.tensor(x, requires_grad=True) for key, x in numbers.items()}
    exact = {key: x.detach().double().requires_grad_() for key, x in learned.items()}
    found, right = with_gradients(loss, rows, **learned), with_gradients(loss, wide, **exact, backend="exact")
    assert len(evaluated) == 1
    for ours, true in zip(found, right, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), true, rtol=0, atol=2e-6 * float(true.abs().max()))


@every
def test_only_the_wanted_gradients_are_computed(name: str) -> None:
    rows = rows_of(name)
    whole = with_gradients(LOSSES[name], rows)
    for place in range(len(rows)):
        some = [one.detach().requires_grad_(k == place) for k, one in enumerate(rows)]
        assert torch.equal(torch.autograd.grad(LOSSES[name](*some), some[place])[0], whole[1 + place])


@every
def test_backward_passes_may_be_repeated_and_differentiated(name: str, evaluated: list[bool]) -> None:
    loss, rows = LOSSES[name], rows_of(name)
    value = loss(*rows, temperature=0.2)
    first = torch.autograd.grad(value, rows, retain_graph=True)
    doubled = torch.autograd.grad(value, rows, torch.tensor(2.0), retain_graph=True)
    graph = torch.autograd.grad(value, rows, create_graph=True)
    second = torch.autograd.grad(graph[0].square().sum(), rows)
    assert len(evaluated) == 1
    wide = [one.detach().double().requires_grad_() for one in rows]
    true = torch.autograd.grad(loss(*wide, temperature=0.2, backend="exact"), wide, create_graph=True)
    more = torch.autograd.grad(true[0].square().sum(), wide)
    for one, two, three, right in zip(first, doubled, graph, true, strict=True):
        assert torch.equal(2 * one, two)
        torch.testing.assert_close(three.detach(), one, rtol=0, atol=2e-6 * float(right.detach().abs().max()))
    for ours, right in zip(second, more, strict=True):
        torch.testing.assert_close(ours.double(), right, rtol=0, atol=2e-5 * float(right.abs().max()))


def test_rows_that_were_changed_after_the_forward_pass_are_refused(evaluated: list[bool]) -> None:
    for name, loss in LOSSES.items():
        copies = [row * 1.0 for row in rows_of(name)]
        value = loss(*copies)
        copies[-1].detach().add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            value.backward()
    assert len(evaluated) == len(LOSSES)


def test_layouts_dtypes_and_sizes_are_accepted(evaluated: list[bool]) -> None:
    """Rows in columns, masks and labels with steps, labels beyond int32, extreme norms, and unaligned memory."""
    (rows,) = rows_of("supcon")
    large = LABELS * 2**40
    expected = with_gradients(fast.supcon_loss, [rows], labels=LABELS)
    turned = rows.detach().T.contiguous().T.requires_grad_()
    unaligned = torch.frombuffer(bytearray(b"0" + rows.detach().numpy().tobytes()), dtype=torch.float32, offset=1)
    scaled = [(rows.detach() * factor).requires_grad_() for factor in (2.0**-50, 2.0**50)]
    spaced = torch.stack((large, large), 1)[:, 0]
    for given in (rows, turned, unaligned.view(N, D).requires_grad_()):
        for labels in (LABELS, LABELS.to(torch.uint8), large, spaced):
            for ours, right in zip(with_gradients(fast.supcon_loss, [given], labels=labels), expected, strict=True):
                torch.testing.assert_close(ours, right, rtol=1e-6, atol=1e-7)
    mask = (LABELS[:, None] == LABELS).T.contiguous().T
    for given in scaled:
        value, gradient = with_gradients(fast.supcon_loss, [given], positives=mask)
        torch.testing.assert_close(value, expected[0], rtol=1e-6, atol=0)
        torch.testing.assert_close(gradient * given.detach().norm(), expected[1] * rows.detach().norm())
    assert jit.array(unaligned).flags.aligned  # which Numba does not check
    assert len(evaluated) == 1 + 12 + 2
    assert torch.isnan(torch.tensor(jit.function("measure")(np.array([[1, np.nan]], "f4"), np.empty((1, 1))))).all()


class Watched(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        return function(*arguments, **(keywords or {}))


class Subclass(Tensor):
    pass


def _dual(rows: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        return fast.supcon_loss(rows.detach(), LABELS)


def _watched(rows: Tensor) -> Tensor:
    with Watched():
        return fast.supcon_loss(rows, LABELS)


ELSEWHERE: dict[str, Callable[[Tensor], Tensor]] = {
    "float64": lambda rows: fast.supcon_loss(rows.double(), LABELS).float(),
    "dot products": lambda rows: fast.supcon_loss(rows, LABELS, similarity="dot"),
    "zero rows": lambda rows: fast.supcon_loss(rows, LABELS, zero_row="zero"),
    "a row of self_rows": lambda rows: fast.supcon_loss(
        rows, LABELS, ref_embeddings=rows, ref_labels=LABELS, self_rows=torch.arange(N)
    ),
    "one value per anchor": lambda rows: fast.supcon_loss(rows, LABELS, reduction="none").mean(),
    "anchors that are dropped": lambda rows: fast.supcon_loss(rows, LABELS, no_positive="drop"),
    "weights": lambda rows: fast.supcon_loss(rows, LABELS, anchor_weights=torch.ones(N)),
    "another backend": lambda rows: fast.supcon_loss(rows, LABELS, backend="dense"),
    "another denominator": lambda rows: fast.supcon_loss(rows, LABELS, denominator="one_positive"),
    "an extreme temperature": lambda rows: fast.supcon_loss(rows, LABELS, temperature=1e-4),
    "extreme norms": lambda rows: fast.supcon_loss(rows * 2.0**70, LABELS),
    "many rows": lambda rows: fast.supcon_loss(
        rows.repeat(1 + DENSE_UP_TO // N, 1), LABELS.repeat(1 + DENSE_UP_TO // N)
    ),
    "torch.func": lambda rows: torch.func.grad(lambda x: fast.supcon_loss(x, LABELS))(rows).sum(),
    "vmap over the temperature": lambda rows: torch.func.vmap(lambda t: fast.info_nce_loss(rows, rows, temperature=t))(
        torch.tensor([0.1, 0.2])
    ).sum(),
    "forward mode": _dual,
    "a dispatch mode": _watched,
    "a subclass": lambda rows: fast.supcon_loss(rows.as_subclass(Subclass), LABELS),
    "labels of a subclass": lambda rows: fast.supcon_loss(rows, LABELS.as_subclass(Subclass)),
    "a negated view": lambda rows: fast.supcon_loss(torch._neg_view(rows.detach()), LABELS),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_torch_operations_evaluate(name: str, evaluated: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    (rows,) = rows_of("supcon")
    found = ELSEWHERE[name](rows)
    assert not evaluated
    monkeypatch.setattr(jit.State, "failure", "turned off by a test")
    assert torch.equal(found.detach(), ELSEWHERE[name](rows).detach())


def test_fake_and_meta_tensors_have_results_without_values(evaluated: list[bool]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    (rows,) = rows_of("supcon")
    assert fast.supcon_loss(rows.to("meta"), LABELS.to("meta")).shape == ()
    mode = FakeTensorMode()
    fake, labels = mode.from_tensor(rows.detach()), mode.from_tensor(LABELS)
    with mode:
        assert fast.supcon_loss(fake, labels).shape == ()
    assert not evaluated


def test_autocast_and_narrow_rows_have_the_results_of_float32(evaluated: list[bool]) -> None:
    for name in ("supcon", "info_nce, both directions", "sigmoid"):
        rows = rows_of(name)
        learned = torch.tensor(0.1, requires_grad=True)
        usual = with_gradients(LOSSES[name], rows, temperature=learned)
        with torch.autocast("cpu", torch.bfloat16):
            within = with_gradients(LOSSES[name], rows, temperature=learned)
        assert all(map(torch.equal, usual, within))
    assert len(evaluated) == 6
    narrow = [one.detach().bfloat16().requires_grad_() for one in rows_of("supcon")]
    wide = [one.detach().float().requires_grad_() for one in narrow]
    ours, right = (with_gradients(LOSSES["supcon"], rows) for rows in (narrow, wide))
    torch.testing.assert_close(ours[0], right[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(ours[1], right[1].bfloat16(), rtol=2.0**-7, atol=1e-6)


def test_results_do_not_depend_on_the_number_of_threads(evaluated: list[bool]) -> None:
    rows = torch.randn(2, 200, 32, generator=GENERATOR, requires_grad=True)
    labels, before, found = torch.arange(200) % 7, torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            value = fast.supcon_loss(rows[0], labels) + fast.info_nce_loss(*rows) + fast.sigmoid_loss(*rows)
            found.append((value.detach(), *torch.autograd.grad(value, rows)))
    finally:
        torch.set_num_threads(before)
    assert len(evaluated) == 6
    assert all(map(torch.equal, *found))


def test_threads_may_evaluate_at_once() -> None:
    inputs, expected = {name: rows_of(name) for name in LOSSES}, {}
    for name, rows in inputs.items():
        expected[name] = with_gradients(LOSSES[name], rows)
    wrong: list[Any] = []

    def work(names: list[str]) -> None:
        try:
            for name in names * 3:
                found = with_gradients(LOSSES[name], inputs[name])
                wrong.extend(name for x, y in zip(found, expected[name], strict=True) if not torch.equal(x, y))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(names,)) for names in ([*LOSSES], [*reversed(LOSSES)])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_may_evaluate_after_its_parent() -> None:
    rows = rows_of("supcon")
    expected = with_gradients(LOSSES["supcon"], rows)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            # Threads of autograd do not survive a fork, so only the value is computed.
            code = 0 if torch.equal(LOSSES["supcon"](rows[0].detach()), expected[0]) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class _Items(torch.utils.data.Dataset[Tensor]):
    """Each item is the value of a loss, computed in a worker process."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return LOSSES["nt_xent"](rows_of("nt_xent")[0].detach() * (1 + index))


@pytest.mark.slow
def test_workers_of_a_data_loader_may_evaluate() -> None:
    expected = _Items()[0]
    found = torch.cat(list(torch.utils.data.DataLoader(_Items(), num_workers=2, multiprocessing_context="fork")))
    torch.testing.assert_close(found, expected.expand(4), rtol=1e-6, atol=0)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled or has failed yet."""
    monkeypatch.setattr(jit.State, "functions", {})
    monkeypatch.setattr(jit.State, "failure", None)


def _without(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "pairproof.fast.engine.rows_numba", raising=False)
    monkeypatch.delattr(sys.modules["pairproof.fast.engine"], "rows_numba", raising=False)
    monkeypatch.setattr(jit.metadata, "version", partial(_raised, jit.metadata.PackageNotFoundError("numba")))
    return "import of numba halted"


def _raising_at_import(monkeypatch: pytest.MonkeyPatch) -> str:
    class Finder:
        @staticmethod
        def find_spec(name: str, *_: Any) -> None:
            if name.startswith("numba"):
                raise RuntimeError("this machine is not supported\nat all")

    _without(monkeypatch)
    monkeypatch.delitem(sys.modules, "numba")
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    return "RuntimeError: this machine is not supported"


def _raising_at_compilation(monkeypatch: pytest.MonkeyPatch) -> str:
    from pairproof.fast.engine import rows_numba

    monkeypatch.setattr(rows_numba.numba, "njit", lambda **_: partial(_raised, ValueError("no compiler")))
    return "ValueError: no compiler"


def _raised(error: Exception, *_: Any) -> None:
    raise error


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("fail", [_without, _raising_at_import, _raising_at_compilation])
def test_torch_operations_replace_functions_that_cannot_be_compiled(
    fail: Callable[[pytest.MonkeyPatch], str], monkeypatch: pytest.MonkeyPatch, evaluated: list[bool]
) -> None:
    expected_reason = fail(monkeypatch)
    if fail is _without:
        assert jit.refusal() == "numba is not installed"
    found = {name: with_gradients(loss, rows_of(name)) for name, loss in LOSSES.items()}
    assert not evaluated
    assert expected_reason in str(jit.refusal())
    assert fast.warm_up() == jit.refusal()
    assert "\n" not in str(jit.refusal())
    monkeypatch.setattr(jit.State, "failure", "turned off by a test")
    for name, ours in found.items():
        assert all(map(torch.equal, ours, with_gradients(LOSSES[name], rows_of(name)))), name


@pytest.mark.usefixtures("fresh")
def test_a_failure_does_not_stop_a_backward_pass(monkeypatch: pytest.MonkeyPatch, evaluated: list[bool]) -> None:
    rows = rows_of("supcon")
    value = LOSSES["supcon"](*rows)
    _raising_at_compilation(monkeypatch)
    other = LOSSES["sigmoid"](*rows_of("sigmoid"))
    assert len(evaluated) == 1
    assert torch.autograd.grad(value, rows)[0].any()
    assert other.isfinite()


def test_warm_up_compiles_every_function(monkeypatch: pytest.MonkeyPatch) -> None:
    from pairproof.fast.engine import rows_numba

    assert fast.warm_up() is None
    assert {*rows_numba.SIGNATURES} == {*jit.State.functions}
    monkeypatch.setattr(rows_numba, "ready", partial(_raised, AssertionError("compiled again")))
    assert fast.warm_up() is None


PROGRAM = """
import sys, torch
from pairproof.fast import supcon_loss, warm_up
from pairproof.fast.engine import jit
reason = warm_up() if sys.argv[1] == "all" else None
loss = supcon_loss(torch.eye(4, 3) + 1, torch.tensor([0, 0, 1, 1]))
print(reason or jit.refusal(), "numba" in sys.modules, f"{loss:.6f}")
"""


def started(folder: Path | str, what: str = "one", **environment: str) -> subprocess.Popen[str]:
    """Start a process that computes a loss, with its cache in ``folder``."""
    given = {**os.environ, "NUMBA_CACHE_DIR": str(folder), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, what], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=given, text=True
    )


@pytest.mark.slow
def test_processes_may_compile_at_once_and_damaged_files_are_replaced(tmp_path: Path) -> None:
    processes = [started(tmp_path, "all") for _ in range(2)]
    outputs = {process.communicate()[0] for process in processes}
    assert len(outputs) == 1
    assert "None True" in outputs.pop()
    files = sorted(tmp_path.rglob("*.nb?"))
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[:50])
    before = {file: file.stat().st_size for file in files}
    assert "None True" in started(tmp_path, "all").communicate()[0]
    assert all(file.stat().st_size > before[file] for file in files if file.exists())


@pytest.mark.slow
def test_no_folder_for_the_cache_is_needed(tmp_path: Path) -> None:
    """As in a read-only installation of a user without a home folder."""
    (tmp_path / "sitecustomize.py").write_text(
        "import numba.core.caching as caching\ncaching.CacheImpl._locator_classes = []\n"
    )
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    assert "None True" in started("", PYTHONPATH=path, HOME="/nonexistent").communicate()[0]


@pytest.mark.slow
def test_functions_run_as_python_and_can_be_turned_off(tmp_path: Path) -> None:
    values = [
        started(tmp_path, **environment).communicate()[0].split()
        for environment in ({}, {"NUMBA_DISABLE_JIT": "1"}, {jit.SWITCH: "0"})
    ]
    assert [value[-2] for value in values] == ["True", "True", "False"]
    assert len({value[-1] for value in values}) == 1
    assert values[2][:3] == [jit.SWITCH, "is", "0"]


@pytest.mark.slow
def test_python_functions_have_the_digits_of_compiled_ones() -> None:
    program = (
        "from tests import test_fast_compiled as tests\n"
        "for name in tests.LOSSES:\n"
        "    found = tests.with_gradients(tests.LOSSES[name], tests.rows_of(name))\n"
        "    print(*(float(x.double().sum()) for x in found))\n"
    )
    outputs = []
    for value in ("0", "1"):
        process = subprocess.run(
            [sys.executable, "-W", "error", "-c", program],
            env={**os.environ, "NUMBA_DISABLE_JIT": value},
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent.parent,
        )
        outputs.append([[float(x) for x in line.split()] for line in process.stdout.splitlines()])
    assert len(outputs[0]) == len(LOSSES)
    for ours, right in zip(*outputs, strict=True):
        assert ours == pytest.approx(right, rel=1e-6, abs=2e-6)
