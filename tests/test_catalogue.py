"""The catalogue matches ``reference`` and ``fast``; packages import only what they may."""

from __future__ import annotations

import ast
import dataclasses
import graphlib
import importlib
import inspect
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from pairproof import conformance, fast, fixtures, reference
from pairproof.conformance import _moved
from pairproof.conformance.suite.cases import Case
from pairproof.conformance.suite.catalogue import (
    FAST_ONLY_KEYWORDS,
    IGNORED,
    LOSSES,
    WEIGHTS,
    Loss,
    find_loss,
    register,
    registered,
)
from pairproof.conformance.truth.baseline import plain_outcome

PACKAGES = {"reference": reference, "fast": fast}
MAY_IMPORT = {"reference": {"numpy", "scipy"}, "fast": {"numba", "numpy", "torch", "triton"}}
TENSOR_KEYWORDS = {
    *(
        "partners",
        "labels",
        "positives",
        "anchors",
        "ref_embeddings",
        "ref_labels",
        "self_rows",
        "negatives",
        "hard_negatives",
    ),
    *IGNORED,
    *WEIGHTS,
}
LOSS_IDS = list(LOSSES)


def positional(loss: Loss) -> list[str]:
    return [*loss.embeddings, *([loss.targets] if loss.targets else [])]


def folder(package: ModuleType) -> Path:
    return Path(next(iter(package.__path__)))


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSS_IDS)
def test_function_is_defined_in_the_module_of_the_catalogue(package: str, loss: Loss) -> None:
    module = importlib.import_module(f"pairproof.{package}.{loss.module}")
    function = getattr(module, loss.function)
    assert function.__module__ == module.__name__
    assert getattr(PACKAGES[package], loss.function) is function
    assert loss.function in PACKAGES[package].__all__


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSS_IDS)
def test_signature_matches_the_catalogue(package: str, loss: Loss) -> None:
    parameters = list(inspect.signature(getattr(PACKAGES[package], loss.function)).parameters.values())
    names = positional(loss)
    first, keywords = parameters[: len(names)], parameters[len(names) :]
    assert [parameter.name for parameter in first] == names
    assert {parameter.kind for parameter in first} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    optional = [loss.targets] if loss.targets and "positives" in loss.keywords else []
    assert [parameter.name for parameter in first if parameter.default is None] == optional
    assert len([p for p in first if p.default is inspect.Parameter.empty]) == len(names) - len(optional)
    assert {parameter.kind for parameter in keywords} == {inspect.Parameter.KEYWORD_ONLY}
    expected = dict(loss.keywords) | (dict(FAST_ONLY_KEYWORDS) if package == "fast" else {})
    assert {parameter.name: parameter.default for parameter in keywords} == expected


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSS_IDS)
def test_keywords_have_the_same_order_in_reference_and_fast(loss: Loss) -> None:
    names = {
        package: list(inspect.signature(getattr(module, loss.function)).parameters)
        for package, module in PACKAGES.items()
    }
    assert [name for name in names["fast"] if name not in FAST_ONLY_KEYWORDS] == names["reference"]


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSS_IDS)
def test_module_class_matches_the_catalogue(loss: Loss) -> None:
    module_class = getattr(fast, loss.module_class)
    assert issubclass(module_class, torch.nn.Module)
    parameters = [p for name, p in inspect.signature(module_class.__init__).parameters.items() if name != "self"]
    assert {parameter.kind for parameter in parameters} == {inspect.Parameter.KEYWORD_ONLY}
    options = {name: default for name, default in loss.keywords.items() if name not in TENSOR_KEYWORDS}
    assert {p.name: p.default for p in parameters} == options | dict(FAST_ONLY_KEYWORDS)
    forward = list(inspect.signature(module_class.forward).parameters)
    assert forward[:3] == ["self", *positional(loss)]
    assert set(forward[3:]) == TENSOR_KEYWORDS.intersection(loss.keywords)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSS_IDS)
def test_catalogue_lists_the_float_matrices_of_every_loss(loss: Loss) -> None:
    """Float matrices are positional, or keywords that are documented as [M, D], [K, D] or [N, H, D]."""
    assert len(positional(loss)) == 2
    assert all(name.startswith("embeddings") for name in loss.embeddings)
    documented = inspect.getdoc(getattr(reference, loss.function)) or ""
    if loss.name == "supcon_in":
        documented = inspect.getdoc(reference.supcon_loss) or ""
    matrices = {
        name for name in loss.keywords if re.search(rf"^ +{name}: \[([MK]|N, H), D\]", documented, re.MULTILINE)
    }
    assert set(loss.matrices) == matrices


def test_every_exported_loss_is_in_the_catalogue() -> None:
    functions = {loss.function for loss in LOSSES.values()}
    assert {name for name in reference.__all__ if name.endswith("_loss")} == functions
    assert {name for name in fast.__all__ if name.endswith("_loss")} == functions
    assert {name for name in fast.__all__ if name.endswith("Loss")} == {loss.module_class for loss in LOSSES.values()}


def test_registered_loss_is_in_the_catalogue() -> None:
    entry = dataclasses.replace(LOSSES["supcon"], name="margin", functions={"reference": len, "fast": max})
    with registered(entry):
        assert list(LOSSES)[-1] == "margin"
        assert find_loss("margin") is entry
        assert (entry.reference, entry.fast, entry.function) == (len, max, "margin_loss")
        with pytest.raises(ValueError, match="margin: the catalogue already has a loss of this name"):
            register(entry)
    with pytest.raises(ValueError, match="unknown loss 'margin'; known: supcon, supcon_in, nt_xent"):
        find_loss("margin")
    with pytest.raises(ValueError, match="unknown loss 'margin'"):
        plain_outcome(Case("test/margin", "margin", np.eye(2), {"labels": [0, 0]}, {}), "float64")


def test_inconsistent_entry_raises() -> None:
    with pytest.raises(ValueError, match="positives_by: expected one of labels, partners, pairs, towers, got 'rows'"):
        dataclasses.replace(LOSSES["supcon"], positives_by="rows")
    with pytest.raises(ValueError, match="keywords: temperature is missing"):
        dataclasses.replace(LOSSES["supcon"], keywords={"reduction": "mean"})


def test_layout_helpers_have_the_same_parameters_in_reference_and_fast() -> None:
    helpers = ("interleaved_partners", "stacked_partners", "flatten_views", "split_views", "repeat_labels")
    for name in helpers:
        packages = {
            package: dict(inspect.signature(getattr(module, name)).parameters) for package, module in PACKAGES.items()
        }
        packages["fast"].pop("device", None)
        defaults = {
            package: {key: p.default for key, p in parameters.items()} for package, parameters in packages.items()
        }
        assert defaults["fast"] == defaults["reference"], name


def foreign_imports(source: str, depth: int, allowed: set[str]) -> list[str]:
    """Return the imports of a module other than the standard library, the allowed packages and its own package.

    Args:
        source: text of the module.
        depth: number of folders between the module and its package; relative imports may go up this far.
        allowed: other top-level packages that the module may import.
    """
    foreign = []
    for node in nodes_of(source):
        match node:
            case ast.Import(names=names):
                imported = [alias.name for alias in names]
            case ast.ImportFrom(level=level, module=module) if level:
                imported = [] if level <= depth + 1 else ["." * level + (module or "")]
            case ast.ImportFrom(module=str(module)):
                imported = [module]
            case ast.Name(id="__import__") | ast.Attribute(attr="import_module"):
                imported = ["a name computed at run time"]
            case _:
                continue
        foreign += [name for name in imported if name.split(".")[0] not in sys.stdlib_module_names | allowed]
    return foreign


@pytest.mark.parametrize("package", PACKAGES)
def test_package_imports_only_what_it_may(package: str) -> None:
    root = folder(PACKAGES[package])
    files = sorted(root.rglob("*.py"))
    assert len(files) > 3
    for path in files:
        depth = len(path.relative_to(root).parents) - 1
        assert foreign_imports(path.read_text(), depth, MAY_IMPORT[package]) == [], path


@pytest.mark.parametrize(
    ("source", "depth", "found"),
    [
        ("import torch", 0, ["torch"]),
        ("import torch.nn.functional as F", 0, ["torch.nn.functional"]),
        ("def f():\n    from pairproof.fast import supcon", 0, ["pairproof.fast"]),
        ("from ..fast import supcon", 0, ["..fast"]),
        ("from ..checks import check", 1, []),
        ("from ...fast import supcon", 1, ["...fast"]),
        ("import importlib\nimportlib.import_module('torch')", 0, ["a name computed at run time"]),
        ("__import__('torch')", 0, ["a name computed at run time"]),
        (
            "from . import terms\nfrom .terms import Pair\nimport math, numpy as np\nfrom scipy.special import expit",
            0,
            [],
        ),
    ],
)
def test_foreign_imports_are_found(source: str, depth: int, found: list[str]) -> None:
    assert foreign_imports(source, depth, MAY_IMPORT["reference"]) == found


@pytest.mark.parametrize(
    ("package", "absent"),
    [
        ("reference", ["torch", "pairproof.fast", "pairproof.conformance"]),
        ("fast", ["scipy", "flint", "pairproof.reference", "pairproof.conformance"]),
    ],
)
def test_importing_a_package_loads_no_other_package(package: str, absent: list[str]) -> None:
    program = f"import sys, pairproof.{package}; print([name for name in {absent!r} if name in sys.modules])"
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "[]"


LAYERS = (
    {"suite"},
    {"truth"},
    {"implementations"},
    {"documents", "diagnose"},
    {"judge"},
    {"faults"},
    {"maintain"},
    {"explain", "pack", "report", "summary", "training"},
    {"page"},
    {"cli", "pytest_plugin", "test_target", "__init__", "_moved"},
)
"""The subpackages of ``conformance/`` in layers: each layer but the last two imports only from earlier layers."""


@cache
def nodes_of(source: str) -> list[ast.AST]:
    """Parse a module, once for all tests."""
    return [*ast.walk(ast.parse(source))]


def own_imports(root: Path) -> dict[tuple[str, ...], set[tuple[str, ...]]]:
    """The modules of a package and, for each, the modules of the same package that it imports, as tuples of names."""
    files = {path.relative_to(root).with_suffix("").parts: path for path in root.rglob("*.py")}
    found: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for module, path in files.items():
        found[module] = set()
        for node in nodes_of(path.read_text()):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = (*module[: -node.level], *(node.module.split(".") if node.module else ()))
                for name in ((*base, alias.name) for alias in node.names):
                    imported = next((m for m in (name, base, (*base, "__init__")) if m in files), None)
                    found[module] |= {imported} - {None, module}
    return found


def test_conformance_imports_only_earlier_layers() -> None:
    layer = {part: k for k, parts in enumerate(LAYERS) for part in parts}
    imports = own_imports(folder(conformance))
    upwards = {
        (module, other)
        for module, others in imports.items()
        for other in others
        if module[0] != other[0] and layer[other[0]] >= layer[module[0]] and layer[module[0]] < len(LAYERS) - 2
    }
    assert upwards == set()
    # An import of a package itself is not counted as a dependency between modules.
    graph = {module: {other for other in others if other[-1] != "__init__"} for module, others in imports.items()}
    graphlib.TopologicalSorter(graph).prepare()


def test_conformance_catches_no_import_error_of_its_own_modules() -> None:
    for path in sorted(folder(conformance).rglob("*.py")):
        for node in nodes_of(path.read_text()):
            if not isinstance(node, ast.Try) or not any(
                handler.type is not None and "ImportError" in ast.unparse(handler.type) for handler in node.handlers
            ):
                continue
            for part in (part for statement in node.body for part in ast.walk(statement)):
                assert not (isinstance(part, ast.ImportFrom) and part.level), f"{path}:{node.lineno}"
                assert "'pairproof." not in ast.unparse(part), f"{path}:{node.lineno}"


def test_fixtures_contain_only_data() -> None:
    root = folder(fixtures)
    files = [path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.suffix for path in files} <= {".py", ".json", ".md"}
    assert [path for path in files if path.suffix == ".py"] == [root / "__init__.py"]
    (statement,) = ast.parse((root / "__init__.py").read_text()).body
    assert isinstance(statement, ast.Expr)
    assert isinstance(statement.value, ast.Constant)


def test_all_packages_are_in_one_checkout() -> None:
    assert len({folder(package).parent for package in (conformance, fast, fixtures, reference)}) == 1


@pytest.mark.parametrize(("old", "new"), _moved.MOVED.items())
def test_old_module_path_warns_and_gives_the_new_module(old: str, new: str) -> None:
    sys.modules.pop(f"pairproof.conformance.{old}", None)
    with pytest.warns(
        DeprecationWarning, match=rf"pairproof\.conformance\.{old} has moved to pairproof\.conformance\.{new}"
    ):
        module = importlib.import_module(f"pairproof.conformance.{old}")
    assert module is importlib.import_module(f"pairproof.conformance.{new}")
