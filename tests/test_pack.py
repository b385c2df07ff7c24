"""``pairproof pack`` writes a small test file that passes with a right loss and fails with nearly every fault."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pairproof import fast
from pairproof.conformance import cli
from pairproof.conformance import pack as packing
from pairproof.conformance.faults import FAULTS
from pairproof.conformance.judge.options import DEFAULT_LEVEL, Request
from pairproof.conformance.pack import LICENCE, MOST_BYTES, Pack, cover, pack
from pairproof.conformance.suite.golden import load_golden

ROOT = Path(__file__).resolve().parent.parent
UNEDITED = '    raise NotImplementedError("call the loss under test here")\n'


def views_of(features: Tensor, labels: Tensor | None, temperature: float) -> Tensor:
    """SupCon of features [B, V, D]."""
    labels = torch.arange(len(features)) if labels is None else labels
    rows = torch.cat(features.unbind(dim=1))
    return fast.supcon_loss(rows, labels.repeat(features.shape[1]), temperature=temperature)


def stacked(view_a: Tensor, view_b: Tensor, temperature: float) -> Tensor:
    """NT-Xent of two views."""
    partners = fast.stacked_partners(2 * len(view_a))
    return fast.nt_xent_loss(torch.cat([view_a, view_b]), partners, temperature=temperature)


RIGHT: dict[tuple[str, str], Callable[..., Any]] = {
    ("supcon", "labels"): fast.supcon_loss,
    ("supcon", "features"): lambda features, labels=None, *, temperature: views_of(features, labels, temperature),
    ("supcon_in", "labels"): fast.supcon_in_loss,
    ("nt_xent", "labels"): fast.supcon_loss,  # two rows per label
    ("nt_xent", "partners"): fast.nt_xent_loss,
    ("nt_xent", "views"): stacked,
    ("nt_xent_pairwise", "labels"): fast.nt_xent_pairwise_loss,
    ("nt_bxent", "pairs"): fast.nt_bxent_loss,
    ("supcon_epsilon", "labels"): fast.supcon_epsilon_loss,
    ("info_nce", "views"): lambda view_a, view_b, **options: fast.info_nce_loss(view_a, view_b, **options),
    ("sigmoid", "towers"): lambda view_a, view_b, **options: fast.sigmoid_loss(view_a, view_b, **options),
}
"""A right loss for each call."""


@cache
def made(loss: str, call: str | None = None, library: str = "torch", **settings: str) -> Pack:
    """Return a test file, made once."""
    return pack(Request(None, loss, call=call, settings=settings), library)


def failures(file: Pack, *losses: Callable[..., Any]) -> list[list[str]]:
    """Return, for each loss, the names of the cases and dtypes in which the test file fails. It is run only once."""
    names: dict[str, Any] = {}
    exec(compile(file.text, "test_pairproof.py", "exec"), names)
    test = next(thing for name, thing in names.items() if name.startswith("test_"))
    (dtypes,) = (mark.args[1] for mark in test.pytestmark if mark.args[0] == "dtype")
    found: list[list[str]] = [[] for _ in losses]
    for failed, loss in zip(found, losses, strict=True):
        names["loss"] = loss
        for case, dtype in product(names["CASES"], dtypes):
            try:
                test(case, dtype)
            except Exception:  # a fault may raise any exception
                failed.append(f"{case['name']} {dtype}")
    return found


def numpy_nt_xent(view_a: Any, view_b: Any, *, temperature: float) -> Any:
    """A plain loss of two views in numpy."""
    rows = np.concatenate([view_a, view_b])
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    logits = rows @ rows.T / temperature
    n = len(rows)
    np.fill_diagonal(logits, -np.inf)
    largest = logits.max(axis=1)
    below = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))
    return (below - logits[np.arange(n), (np.arange(n) + n // 2) % n]).mean()


def edited(file: Pack, body: str) -> str:
    """Return the text of a file whose loss is edited, and check that there is one place to edit."""
    assert file.text.count(UNEDITED) == 1
    return file.text.replace(UNEDITED, body)


def assert_finds(loss: str, call: str) -> None:
    """Assert that a file finds at least 95 % of the faults in reach, which include all that concern no further option.

    Only those with its own call are passed to the test in the file.
    """
    file = made(loss, call)
    reach = {*file.found, *file.missed}
    assert len(file.found) >= 0.95 * len(reach)
    faults = [fault for fault in FAULTS if fault.loss == loss and fault.call == call]
    plain = [fault for fault in faults if fault.level <= DEFAULT_LEVEL and not fault.settings]
    plain = [fault for fault in plain if len(inspect.signature(fault.function).parameters) <= 3]
    assert not {fault.name for fault in plain} - reach
    callable_ones = [fault for fault in faults if fault.name in reach]
    caught = failures(file, *(fault.function for fault in callable_ones))
    missed = [fault.name for fault, failed in zip(callable_ones, caught, strict=True) if not failed]
    assert {*missed} == {fault.name for fault in callable_ones} & {*file.missed}


def test_file_finds_the_faults_of_nt_xent_and_passes_the_right_loss() -> None:
    assert_finds("nt_xent", "views")
    assert failures(made("nt_xent", "views"), stacked) == [[]]


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "call"), [("supcon", "labels"), ("supcon", "features"), ("info_nce", "views")])
def test_file_finds_the_faults(loss: str, call: str) -> None:
    assert_finds(loss, call)


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "call"), RIGHT)
def test_file_is_small_and_passes_the_right_loss(loss: str, call: str) -> None:
    file = made(loss, call)
    assert len(file.text.encode()) <= MOST_BYTES <= 15_000
    assert failures(file, RIGHT[loss, call]) == [[]]


@pytest.mark.slow
def test_numpy_file_compares_values_alone() -> None:
    file = made("nt_xent", "views", "numpy")
    assert len(file.found) >= 0.95 * len(file.found + file.missed)
    wrong: Callable[..., Any] = lambda view_a, view_b, *, temperature: numpy_nt_xent(  # noqa: E731
        view_a, view_b, temperature=2 * temperature
    )
    right, doubled = failures(file, numpy_nt_xent, wrong)
    assert not right
    assert doubled
    assert 'gradient":' not in file.text
    assert file.counts.endswith("(not in reach, because only the gradient is wrong: 1)")
    assert not {*file.found} & {"nt_xent/gradient-times-the-ranks"}


@pytest.mark.slow
def test_cases_have_every_value_of_an_option_that_is_passed() -> None:
    file = made("nt_xent", "partners", reduction="*")
    assert 'def loss(embeddings, partners, *, temperature, reduction="mean"):' in file.text
    passing, failing = failures(file, fast.nt_xent_loss, lambda reduction, **given: fast.nt_xent_loss(**given))
    assert not passing
    assert failing


@pytest.mark.slow
def test_file_without_room_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = made("nt_xent", "partners", reduction="*")
    monkeypatch.setattr(packing, "MOST_BYTES", 6_000)
    file = pack(Request(None, "nt_xent", call="partners", settings={"reduction": "*"}), "torch")
    assert len(file.text.encode()) <= 6_000
    assert {*file.found, *file.missed} == {*whole.found, *whole.missed}
    assert {*file.found} < {*whole.found}
    words = " ".join(file.text.partition("import")[0].split())
    assert f"Not found: {', '.join(file.missed)}." in words
    assert f"In no case, for lack of room: {', '.join(file.unseen)}." in words
    assert {*file.unseen} < {"reduction=mean", "reduction=none", "reduction=sum"}
    assert f"finds {len(file.found)} of 24 known mistakes in reach" in words
    assert "training-128-by-64" in file.text


@pytest.mark.slow
def test_file_of_a_claim_with_options() -> None:
    # no_positive is built in, and reduction is passed.
    file = made("supcon", no_positive="drop", reduction="*")
    assert 'def loss(embeddings, labels, *, temperature, reduction="mean"):' in file.text
    assert "no_positive=drop" in file.text
    assert "supcon/without-positives-kept" in file.found
    assert "supcon/without-positives-dropped" not in {*file.found, *file.missed}

    def right(*given: Any, **options: Any) -> Tensor:
        return fast.supcon_loss(*given, **options, no_positive="drop")

    passing, failing = failures(file, right, fast.supcon_loss)
    assert not passing
    assert failing


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "temperature", "settings"),
    [
        ("sigmoid", 0.1, {}),
        ("nt_xent_pairwise", None, {"no_positive": "drop"}),
        ("nt_xent", 0.5, {"similarity": "dot"}),
    ],
)
def test_case_that_the_claim_changes_says_so(loss: str, temperature: float | None, settings: dict[str, str]) -> None:
    """A note such as "Temperature 0.001." is not printed as if it held for the new numbers."""
    claimed = packing.Claimed(Request(None, loss, temperature=temperature, settings=settings))
    claim = settings if temperature is None else {**settings, "temperature": temperature}
    stored = {one.id: one for one in load_golden(losses=(loss,))}
    small, large = claimed.cases()
    names = [one.id for one in (*small, *large)]
    assert any(name.endswith("-changed") for name in names)
    assert not all(name.endswith("-changed") for name in names)
    for one in (*small, *large):
        before = stored[one.id.removesuffix("-changed")]
        options = [name for name in before.case.keywords | claim if one.case.option(name) != before.case.option(name)]
        assert one.id.endswith("-changed") == bool(options)
        assert one.note.endswith(f", in the case: {before.note}" if options else before.note)
        for name in options:
            assert f"{name}={claim[name]} instead of {before.case.option(name)}" in one.note
        assert ("times a power of 2" in one.note) == (one.case.embeddings != before.case.embeddings).any()


@pytest.mark.slow
def test_file_in_float32_passes_a_loss_that_always_computes_in_float32() -> None:
    def narrow(view_a: Tensor, view_b: Tensor, *, temperature: float) -> Tensor:
        return stacked(view_a.float(), view_b.float(), temperature)

    file = pack(Request(None, "nt_xent", call="views", dtypes=("float32",)), "torch")
    assert len(file.found) >= 0.95 * len(file.found + file.missed)
    assert 'parametrize("dtype", ["float32"])' in file.text
    assert '"float64":' not in file.text
    in_float32, in_both = failures(file, narrow), failures(made("nt_xent", "views"), narrow)
    assert in_float32 == [[]]
    assert in_both[0]


@pytest.mark.slow
@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_file_imports_only_pytest_and_the_library(library: str) -> None:
    text = made("nt_xent", "views", library).text
    imports = [one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.Import | ast.ImportFrom)]
    assert {name.name for one in imports for name in one.names} == {"pytest", library}
    assert not any(isinstance(one, ast.ImportFrom) for one in imports)
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "-"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_file_states_its_licence_and_origin() -> None:
    text = made("nt_xent", "views").text
    docstring = ast.get_docstring(ast.parse(text)) or ""
    words = " ".join(docstring.split())
    assert LICENCE[1] in (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "\n".join(LICENCE) in docstring
    assert "pairproof pack --loss nt_xent --call views --for torch" in docstring
    assert "nt_xent: Chen et al. 2020 (SimCLR), arXiv 2002.05709, equation 1." in words
    assert made("nt_xent", "views").counts in words


@pytest.mark.parametrize("exists", [True, False])
def test_command_writes_the_file(
    exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Pack("the text", 3, "finds 24 of 24 known mistakes in reach", ("nt_xent/off-by-one",), (), ())
    asked: list[tuple[Request, str]] = []

    def known(request: Request, library: str, progress: object) -> Pack:
        asked.append((request, library))
        return replace(file, missed=("nt_xent/self-kept",))

    monkeypatch.setattr(packing, "pack", known)
    path = tmp_path / "tests" / "test_pairproof_nt_xent.py"
    if exists:
        path.parent.mkdir()
        path.write_text("old", encoding="utf-8")
    command = ["pack", "--loss", "nt-xent", "--for", "torch", "--set", "reduction=*", "--out", str(path.parent)]
    command += ["--force"] * exists
    with pytest.raises(SystemExit) as ended:
        cli.main(command)
    assert not ended.value.code
    assert path.read_text(encoding="utf-8") == file.text
    assert asked == [(Request(None, "nt_xent", settings={"reduction": "*"}), "torch")]
    assert " ".join(capsys.readouterr().out.split()).endswith(f"{file.summary} not found: nt_xent/self-kept")


@pytest.mark.slow
def test_written_file_runs_under_pytest(tmp_path: Path) -> None:
    file, path = made("nt_xent", "views"), tmp_path / "test_pairproof_nt_xent.py"
    body = "    from pairproof.fast import nt_xent_loss, stacked_partners\n\n"
    body += "    rows, partners = torch.cat([view_a, view_b]), stacked_partners(2 * len(view_a))\n"
    body += "    return nt_xent_loss(rows, partners, temperature=temperature)\n"
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    for text, counts in ((file.text, "failed"), (edited(file, body), "passed")):
        path.write_text(text, encoding="utf-8")
        done = subprocess.run(run, capture_output=True, text=True, check=False, cwd=tmp_path, env=alone)
        assert f"\n{2 * file.cases} {counts} in " in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--for", "torhc"], "unknown value of --for 'torhc'; known: torch, numpy; did you mean 'torch'?"),
        (["--for", "torch", "--loss", "ntx"], "unknown loss 'ntx'"),
        (["--for", "torch", "--call", "similarities"], "unknown value of --call 'similarities'; known: labels, mask"),
        (["--for", "torch", "--set", "speed=high"], "supcon_loss has no option 'speed'"),
        (["--for", "torch", "--dtype", "float16"], "unknown value of --dtype 'float16'; known: float64, float32"),
        (["--for", "torch", "--out", "here.py"], "--out: here.py exists: pass --force to replace it"),
        (
            ["--for", "torch", "--loss", "nt_xent", "--call", "stacked", "--set", "reduction=none"],
            "no golden case of nt_xent suits this claim (similarity=cosine, reduction=none, zero_row=error)",
        ),
    ],
)
def test_impossible_pack_is_an_error(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.py").touch()
    with pytest.raises(SystemExit) as ended:
        cli.main(["pack", *(["--loss", "supcon"] if "--loss" not in options else []), *options])
    assert ended.value.code == cli.MISUSED
    assert capsys.readouterr().err.startswith(f"pairproof: {message}")
    assert [path.name for path in tmp_path.iterdir()] == ["here.py"]


def test_cover_chooses_by_new_members_per_cost() -> None:
    finds = {"all but one": {"a", "b", "c"}, "dear": {"a", "b", "c", "d"}, "one": {"d"}, "nothing": set[str]()}
    equal = dict.fromkeys(finds, 1)
    assert cover(finds, equal, 1) == ["dear"]
    assert cover(finds, {**equal, "dear": 9}, 1) == ["all but one", "one"]
    assert cover(finds, equal, 2) == ["dear", "all but one", "one"]
    assert cover(finds, equal, 9) == ["dear", "all but one", "one"]
    assert cover({}, {}, 1) == []
