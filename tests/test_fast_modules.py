"""The modules of `pairproof.fast`: the same options, defaults and results as the functions."""

from __future__ import annotations

import copy
import doctest
import importlib.util
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

from pairproof import fast
from pairproof.fast import (
    InfoNCELoss,
    NTBXentLoss,
    NTXentLoss,
    NTXentPairwiseLoss,
    SupConEpsilonLoss,
    SupConInLoss,
    SupConLoss,
    info_nce_loss,
    nt_bxent_loss,
    nt_xent_loss,
    nt_xent_pairwise_loss,
    supcon_epsilon_loss,
    supcon_in_loss,
    supcon_loss,
)

Z = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
LABELS = torch.tensor([0, 0, 1, 1, 1, 2])
ANCHORS = torch.tensor([True, True, False, True, True, True])
OPTIONS: dict[str, Any] = {"temperature": 0.3, "base_temperature": 0.1, "similarity": "dot", "reduction": "sum"}
PAIRS: list[tuple[type[torch.nn.Module], Callable[..., torch.Tensor], torch.Tensor, dict[str, Any]]] = [
    (SupConLoss, supcon_loss, LABELS, {"denominator": "only_negatives", "no_positive": "drop", "no_negative": "nan"}),
    (
        SupConInLoss,
        supcon_in_loss,
        LABELS,
        {"denominator": "one_positive", "no_positive": "drop", "no_negative": "nan"},
    ),
    (SupConEpsilonLoss, supcon_epsilon_loss, LABELS, {"similarity": "cosine", "no_positive": "drop"}),
    (NTXentPairwiseLoss, nt_xent_pairwise_loss, LABELS, {"reduction": "mean_pairs", "no_positive": "drop"}),
    (NTXentLoss, nt_xent_loss, torch.tensor([1, 0, 3, 2, 5, 4]), {}),
    (NTBXentLoss, nt_bxent_loss, torch.tensor([[0, 1], [3, 2]]), {"no_negative": "nan"}),
]


@pytest.mark.parametrize(("module", "function", "targets", "extra"), PAIRS)
def test_module_equals_function(
    module: type[torch.nn.Module], function: Callable[..., torch.Tensor], targets: torch.Tensor, extra: dict[str, Any]
) -> None:
    assert torch.equal(module()(Z, targets), function(Z, targets))
    options = {**OPTIONS, **extra, "validate": True}
    made = module(**options)
    plain = function(Z, targets, **options)
    assert torch.equal(made(Z, targets), plain)
    assert not torch.equal(made(Z, targets), function(Z, targets))
    assert torch.equal(made(Z, targets, anchors=ANCHORS), function(Z, targets, anchors=ANCHORS, **options))
    assert torch.equal(pickle.loads(pickle.dumps(made))(Z, targets), plain)
    for key, value in options.items():
        assert f"{key}={value!r}" in repr(made)
    assert not list(made.parameters())


@pytest.mark.parametrize(("module", "function", "targets", "extra"), PAIRS)
def test_options_are_keywords_with_the_defaults_of_the_function(
    module: type[torch.nn.Module], function: Callable[..., torch.Tensor], targets: torch.Tensor, extra: dict[str, Any]
) -> None:
    taken = dict(inspect.signature(module.__init__).parameters)
    taken.pop("self")
    wanted = {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if "Tensor" not in str(parameter.annotation) or name == "temperature"
    }
    assert {name: parameter.default for name, parameter in taken.items()} == {
        name: parameter.default for name, parameter in wanted.items()
    }
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in taken.values())
    assert set(extra) <= set(wanted)


def test_modules_accept_a_mask() -> None:
    mask = LABELS[:, None] == LABELS[None, :]
    for module in (SupConLoss, SupConInLoss, SupConEpsilonLoss, NTXentPairwiseLoss):
        torch.testing.assert_close(module()(Z, positives=mask), module()(Z, LABELS))
        exact = module(backend="exact")
        assert torch.equal(exact(Z, positives=mask), exact(Z, LABELS))


EVERY = [(module, function) for module, function, *_ in PAIRS] + [(InfoNCELoss, info_nce_loss)]


@pytest.mark.parametrize(("module", "function"), EVERY)
def test_types_and_documentation_come_from_the_function(
    module: type[torch.nn.Module], function: Callable[..., torch.Tensor]
) -> None:
    assert module.__doc__ is not None
    assert module.forward.__doc__ is not None
    options, hints = inspect.signature(module).parameters, get_type_hints(function)
    of_module = get_type_hints(module.__init__)
    for name, parameter in inspect.signature(function).parameters.items():
        has_option, where = name in options, inspect.signature(module.forward).parameters
        assert has_option != (name in where)
        assert f"\n    {name}: " in (module.__doc__ if has_option else module.forward.__doc__)
        assert f"\n    {name}: " not in (module.forward.__doc__ if has_option else module.__doc__)
        if has_option:
            assert of_module[name] == hints[name]
        else:
            assert where[name] == parameter
    assert "\nReturns:" not in module.__doc__
    assert module.__doc__.count("\nExample:\n") == 1
    assert "\nSource:\n" in module.__doc__


@pytest.mark.parametrize("module", [module for module, _ in EVERY])
def test_unknown_option_is_rejected_when_the_module_is_created(module: type[torch.nn.Module]) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'temprature'"):
        module(temprature=1)


def test_learned_temperature_is_a_parameter() -> None:
    made = SupConLoss(temperature=torch.nn.Parameter(torch.tensor(0.25)), no_positive="drop")
    assert list(made.state_dict()) == ["temperature"]
    assert "temperature=0.25, " in repr(made)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert other.temperature is not made.temperature
        assert other(Z, LABELS).item() == made(Z, LABELS).item()
        other.load_state_dict({"temperature": torch.tensor(0.5)})
        other(Z, LABELS).backward()
        assert other.temperature.grad is not None
        assert other(Z, LABELS).item() == supcon_loss(Z, LABELS, temperature=0.5, no_positive="drop").item()


def test_temperature_tensor_that_is_not_learned_is_a_buffer() -> None:
    made = SupConLoss(temperature=torch.tensor(0.25))
    assert [name for name, _ in made.named_buffers()] == list(made.state_dict()) == ["temperature"]
    assert not list(made.parameters())
    assert "temperature=0.25, " in repr(made)
    made.load_state_dict({"temperature": torch.tensor(0.5)})
    assert made(Z, LABELS).item() == supcon_loss(Z, LABELS, temperature=0.5).item()
    assert made.double().temperature.dtype == torch.float64
    assert made.to("meta").temperature.is_meta


def test_module_can_be_subclassed() -> None:
    class Projected(NTXentLoss):
        def __init__(self) -> None:
            super().__init__(temperature=0.2)
            self.head = torch.nn.Linear(4, 3)

        def forward(self, embeddings: torch.Tensor, partners: torch.Tensor) -> torch.Tensor:
            return super().forward(self.head(embeddings), partners)

    made, partners = Projected(), torch.tensor([1, 0, 3, 2, 5, 4])
    expected = nt_xent_loss(made.head(Z), partners, temperature=0.2)
    torch.testing.assert_close(made(Z, partners), expected)
    assert {name for name, _ in made.named_parameters()} == {"head.weight", "head.bias"}


TYPED = """
import torch
from pairproof.fast import NTXentPairwiseLoss, SupConEpsilonLoss, SupConLoss
SupConLoss(temperature=0.1, denominator="only_negatives", no_positive="drop", backend="tiled").denominator
SupConLoss(temperature=torch.nn.Parameter(torch.tensor(0.1)))
SupConEpsilonLoss(similarity="cosine")
NTXentPairwiseLoss(reduction="mean_pairs").state_dict()
"""
MISTYPED = {
    "SupConLoss(temprature=1)": 'Unexpected keyword argument "temprature" for "SupConLoss"',
    "SupConLoss(0.1)": 'Too many positional arguments for "SupConLoss"',
    'SupConLoss(reduction="mean_pairs")': 'Argument "reduction" to "SupConLoss" has incompatible type',
    'SupConEpsilonLoss(denominator="all")': 'Unexpected keyword argument "denominator" for "SupConEpsilonLoss"',
}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed: pip install mypy")
def test_mypy_rejects_wrong_options(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parent.parent
    package = tmp_path / "stubs" / "pairproof"
    package.mkdir(parents=True)
    (package / "fast").symlink_to(root / "fast")
    for name in ("__init__.py", "py.typed"):
        (package / name).symlink_to(root / "src" / "pairproof" / name)
    (tmp_path / "snippet.py").write_text(TYPED + "".join(f"{line}\n" for line in MISTYPED))
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nstrict = True\nmypy_path = stubs\n"
        "[mypy-pairproof.*]\nignore_errors = True\n[mypy-triton.*]\nignore_missing_imports = True\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", "snippet.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    first = TYPED.count("\n") + 1
    assert len(errors) == len(MISTYPED), done.stdout + done.stderr
    for number, (error, message) in enumerate(zip(errors, MISTYPED.values(), strict=True), first):
        assert error.startswith(f"snippet.py:{number}: error: {message}")


def test_every_export_has_documentation() -> None:
    for name in fast.__all__:
        assert getattr(fast, name).__doc__


@pytest.mark.parametrize("name", fast.__all__)
def test_docstring_example_runs(name: str) -> None:
    (example,) = (one for one in doctest.DocTestFinder(recurse=False).find(getattr(fast, name), name) if one.examples)
    assert doctest.DocTestRunner().run(example).failed == 0
