"""The wheel contains the files of the folders, and every requirement is pinned."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from pairproof import __version__, install_command
from tools import check_release, check_wheel

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAPPING: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]


def test_every_folder_with_code_is_a_listed_package() -> None:
    found = set()
    for package, folder in MAPPING.items():
        for path in (ROOT / folder).rglob("*.py"):
            found.add(".".join([package, *path.parent.relative_to(ROOT / folder).parts]))
            assert (path.parent / "__init__.py").is_file(), f"{path.parent} contains code but no __init__.py"
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(found)


def pins_of(file: str) -> dict[str, str]:
    """Read the versions of a file of constraints."""
    return {
        canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
        for line in (ROOT / file).read_text().splitlines()
        if line and not line.startswith("#")
        for pin in [Requirement(line)]
    }


def test_every_requirement_is_pinned_within_its_bounds() -> None:
    pins = pins_of("constraints.txt")
    project = PROJECT["project"]
    required = [*project["dependencies"], *PROJECT["build-system"]["requires"]]
    for extra in project["optional-dependencies"].values():
        required += extra
    for requirement in map(Requirement, required):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


def test_oldest_versions_are_the_lower_bounds() -> None:
    pins = pins_of("constraints-oldest.txt")
    extras = PROJECT["project"]["optional-dependencies"]
    tested = [line for name in ("verify", "cpu", "pml", "bench", "examples", "safetensors") for line in extras[name]]
    tested += [line for line in extras["dev"] if Requirement(line).name in ("pytest-xdist", "pyyaml")]
    for requirement in map(Requirement, [*PROJECT["project"]["dependencies"], *tested]):
        pin = Version(pins[canonicalize_name(requirement.name)])
        (bound,) = requirement.specifier
        assert bound.contains(pin), requirement
        assert pin == Version(bound.version.removesuffix(".*")), requirement


def test_base_install_needs_three_packages() -> None:
    assert {Requirement(line).name for line in PROJECT["project"]["dependencies"]} == {"numpy", "scipy", "torch"}


def small_project(root: Path) -> None:
    """Write a repository with one mapped folder, in the form that check_wheel reads."""
    (root / "inside" / "__pycache__").mkdir(parents=True)
    (root / "inside" / "__init__.py").write_text("")
    (root / "inside" / "__pycache__" / "old.pyc").write_text("")
    (root / "inside" / "case.json").write_text("{}")
    (root / "pyproject.toml").write_text('[tool.setuptools.package-dir]\n"top.inside" = "inside"\n')


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["top/inside/__init__.py", "top/inside/case.json"], []),
        (["top/inside/__init__.py"], ["missing from the wheel: top/inside/case.json"]),
        (
            ["top/inside/__init__.py", "top/inside/case.json", "tests/test_it.py"],
            ["does not belong in the wheel: tests/test_it.py"],
        ),
    ],
)
def test_check_wheel_reports_differences(tmp_path: Path, names: list[str], expected: list[str]) -> None:
    small_project(tmp_path)
    wheel = tmp_path / "top-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in [*names, "top-1.dist-info/RECORD"]:
            archive.writestr(name, "")
    assert check_wheel.differences(wheel, tmp_path) == expected


def test_make_help_names_every_target() -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("make is not installed")
    shown = subprocess.run([make, "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    targets = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(".PHONY:"))
    assert [line.split()[1] for line in shown.stdout.splitlines()] == targets.removeprefix(".PHONY:").split()


def test_a_release_needs_its_version_and_a_section_of_the_changelog(tmp_path: Path) -> None:
    (tmp_path / "src/pairproof").mkdir(parents=True)
    (tmp_path / "src/pairproof/__init__.py").write_text('__version__ = "0.2.0"\n')
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text(
        "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2027-01-01\n\n- New.\n\n## [0.1.0]\n\n- Old.\n"
    )
    assert check_release.notes_of("v0.2.0", tmp_path) == "- New."
    with pytest.raises(ValueError, match=r"the tag is v0\.1\.0, but the version .* is 0\.2\.0"):
        check_release.notes_of("v0.1.0", tmp_path)
    changelog.write_text("# Changelog\n\n## [Unreleased]\n\n- New.\n")
    with pytest.raises(ValueError, match=r"expected a section ## \[0\.2\.0\] with text"):
        check_release.notes_of("v0.2.0", tmp_path)


HINTING = ("bench", "compat", "conformance", "tests", "tools")
"""The folders with code that calls `install_command`."""


@pytest.mark.parametrize("folder", [*HINTING, "docs", "examples", "fast", "reference", "src"])
def test_hints_name_no_package_index(folder: str) -> None:
    """pairproof is on no index: hints come from `install_command`, and documents install from the clone."""
    hint = re.compile(r"""pip install\b[^\n]*["' ]pairproof\\?\[""")
    found = [
        f"{path}: {line}"
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md", ".yml")
        for line in path.read_text(encoding="utf-8").splitlines()
        if hint.search(line)
    ]
    assert not found


def test_hint_names_extras_that_exist() -> None:
    assert install_command("verify") == 'pip install "./pairproof[verify]" (./pairproof is the path of the clone)'
    text = "".join(path.read_text(encoding="utf-8") for name in HINTING for path in (ROOT / name).rglob("*.py"))
    named = re.findall(r"install_command\(['\"]([\w,]+)['\"]\)", text)
    assert len(named) >= 12
    assert {extra for names in named for extra in names.split(",")} <= PROJECT["project"][
        "optional-dependencies"
    ].keys()


@pytest.mark.slow
def test_wheel_has_no_file_of_an_earlier_build(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in {Path(folder).parts[0] for folder in MAPPING.values()}:
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md"):
        shutil.copy(ROOT / name, clone)
    stale = clone / "build/lib/pairproof/fast/deleted.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    before = {path.name for path in clone.iterdir()}
    build = "from setuptools.build_meta import build_wheel as build; import sys; build(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=clone, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert check_wheel.differences(wheel, clone) == []
    assert {path.name for path in clone.iterdir()} - before <= {"pairproof.egg-info"}
    assert [path for path in (clone / "build").rglob("*") if path.is_file()] == [stale]


def test_citation_has_the_versions_of_the_suite_and_of_the_vectors() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install pyyaml")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    (vectors,) = cited["references"]
    versions = re.findall(r"^## (\S+)$", (ROOT / "fixtures/CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert (cited["version"], vectors["version"]) == (__version__, versions[0])
    assert cited["license"] == vectors["license"] == PROJECT["project"]["license"]
