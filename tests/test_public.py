"""Public losses: their recorded answers, or their code, have the expected level and words."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pairproof.conformance import cli
from pairproof.conformance.implementations.base import Unavailable
from pairproof.conformance.implementations.public import (
    FOLDER,
    WHERE,
    PublicLoss,
    PublicRanks,
    load_public,
    load_ranks,
)
from pairproof.conformance.judge import processes
from pairproof.conformance.judge import public as judging
from pairproof.conformance.judge.public import Finding, judge_live, judge_ranks, record, replay
from tools import audit_ranks

PUBLIC, RANKS = load_public(), load_ranks()

QUICK = ("fsce", "simclr-sthalles", "solo-mocov2plus")
"""The losses whose answers are judged in every run of the tests."""

SOURCE = """
import missing_package

FACTOR = 2.0

class Model:
    @missing_package.decorate
    def loss(self, z_i, z_j, temperature=0.5):
        z = F.normalize(torch.cat([z_i, z_j]), dim=1)
        logits = (z @ z.T / temperature).fill_diagonal_(-torch.inf)
        return FACTOR * F.cross_entropy(logits, torch.arange(len(z)).roll(len(z_i))) / self.divisor
"""


GATHER = """
import torch.distributed as dist

@torch.no_grad()
def gathered(rows):
    found = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(found, rows)
    found[dist.get_rank()] = rows
    return torch.cat(found)
"""

IN_RANKS = """
def whole(rows):
    if not dist.is_initialized():
        return rows
    parts = list(gathered(rows).chunk(dist.get_world_size()))
    parts[dist.get_rank()] = parts[dist.get_rank()] + rows - rows.detach()
    return torch.cat(parts)


def loss(view_a, view_b):
    return F.cross_entropy(whole(view_a) @ whole(view_b).T, torch.arange(len(whole(view_a))))
"""


def code_in(folder: Path) -> dict[str, Any]:
    """Commit the files of a repository, and return the fields that describe its code."""
    place = folder / "someone+models"
    place.mkdir()
    (place / "model.py").write_text(SOURCE)
    (place / "gather.py").write_text(GATHER)
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-C", str(place))
    for command in (("init", "-q"), ("add", "."), ("commit", "-qm", "a")):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    checksum = hashlib.sha256(SOURCE.encode()).hexdigest()
    found = {"name": "own", "repository": "someone/models", "commit": commit, "file": "model.py"}
    return found | {"sha256": checksum, "license": "none"}


def own_ranks(folder: Path) -> PublicRanks:
    """Return a loss whose ranks have the loss of all rows, and a gradient of their own rows. It uses two files."""
    return PublicRanks(
        **code_in(folder),
        others={"gather.py": hashlib.sha256(GATHER.encode()).hexdigest()},
        shown="`loss`",
        extracts=["FACTOR", "gather.py:gathered"],
        target="loss",
        stubs="import torch.distributed as dist",
        wrapper=IN_RANKS,
        agrees=(1,),
        mistakes=["gradient / world size"],
        gradient=(1, 1 / 2, 1 / 3),
    )


def own(folder: Path, **changed: object) -> PublicLoss:
    """Return a loss in a repository of its own."""
    wrapper = "def loss_of_views(z_i, z_j, temperature=0.5):\n"
    wrapper += "    return loss(SimpleNamespace(divisor=2), z_i, z_j, temperature)"
    public = PublicLoss(
        **code_in(folder),
        computes="NT-Xent of two views",
        loss="nt_xent",
        extracts=["FACTOR", "Model.loss"],
        target="loss_of_views",
        level="policies",
        wrapper=wrapper,
        says=["norms below 1e-12 are clamped"],
        options={"fuzz": 2},
    )
    return replace(public, **changed)  # type: ignore[arg-type]


FOUND: dict[str, Finding] = {}


def replayed(public: PublicLoss) -> Finding:
    """Replay the answers of a loss, once for all tests."""
    if public.name not in FOUND:
        FOUND[public.name] = replay(public)
    return replace(FOUND[public.name], public=public)


@pytest.mark.parametrize(
    "public", [pytest.param(one, id=one.name, marks=[pytest.mark.slow] * (one.name not in QUICK)) for one in PUBLIC]
)
def test_recorded_answers_have_the_expected_level_and_words(public: PublicLoss) -> None:
    found = replayed(public)
    assert found.problems == []
    assert found.checks >= 5


@pytest.mark.slow
@pytest.mark.parametrize("public", PUBLIC, ids=lambda one: one.name)
def test_code_has_the_expected_level_and_words(public: PublicLoss) -> None:
    if WHERE not in os.environ:
        pytest.skip(f"{WHERE} is not set")
    try:
        found, _ = judge_live(public, Path(os.environ[WHERE]))
    except Unavailable as error:
        pytest.skip(str(error))
    assert found.problems == []


def test_records_are_complete_and_small() -> None:
    answers = {path.stem for path in (FOLDER / "answers").glob("*.json")}
    assert answers == {one.name for one in PUBLIC}
    assert all(len(one.sha256) == 64 and one.license and one.computes for one in PUBLIC)
    assert all(one.says for one in PUBLIC)
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 1_000_000


@pytest.mark.slow
def test_loss_is_recorded_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    public = own(tmp_path)
    monkeypatch.setattr(judging, "FOLDER", tmp_path)
    live = record(public, tmp_path)
    assert live.problems == []
    found = replay(public)
    assert (found.level, found.problems) == ("policies", [])


def test_changed_answers_and_cases_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    public = next(one for one in PUBLIC if one.name == "solo-mocov2plus")
    wrong = replay(replace(public, level="policies", says=["the loss is doubled"]))
    assert wrong.problems == ["expected level: policies", "expected words: the loss is doubled"]
    data = json.loads((FOLDER / "answers" / f"{public.name}.json").read_text())
    path = tmp_path / "answers" / f"{public.name}.json"
    path.parent.mkdir()
    monkeypatch.setattr(judging, "FOLDER", tmp_path)
    first = next(iter(data["answers"].values()))
    for changed in ({"values": [(1.0).hex()]}, {"inputs": "those of another case"}):
        path.write_text(
            json.dumps({**data, "answers": data["answers"] | {next(iter(data["answers"])): first | changed}})
        )
        assert replay(public).level != "digits"


def test_changed_file_is_unavailable(tmp_path: Path) -> None:
    public = own(tmp_path, sha256="0" * 64)
    with pytest.raises(Unavailable, match=r"model\.py of someone/models at \w+ has another checksum"):
        public.source(tmp_path)
    with pytest.raises(Unavailable, match="is missing"):
        replace(public, repository="someone/else").source(tmp_path)
    with pytest.raises(Unavailable, match="own needs no_such_package"):
        replace(public, needs=["no_such_package"]).module(tmp_path)


def test_verify_judges_public_losses(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WHERE, raising=False)
    monkeypatch.setattr(judging, "replay", replayed)
    loss = next(one for one in PUBLIC if one.name == "fsce")
    monkeypatch.setattr("pairproof.conformance.implementations.public.load_public", lambda: [loss])
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify", "--public"])
    assert ended.value.code == 0
    assert "fsce as supcon: no level, " in capsys.readouterr().out
    monkeypatch.setattr(
        "pairproof.conformance.implementations.public.load_public", lambda: [replace(loss, level="formula")]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify", "--public"])
    assert ended.value.code == 1
    assert "FAILED: expected level: formula" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("public", RANKS, ids=lambda one: one.name)
def test_code_in_several_processes_has_the_expected_mistakes(public: PublicRanks) -> None:
    if WHERE not in os.environ:
        pytest.skip(f"{WHERE} is not set")
    try:
        found = judge_ranks(public, Path(os.environ[WHERE]))
    except Unavailable as error:
        pytest.skip(str(error))
    assert found.problems == []


def test_table_of_losses_in_several_processes_has_the_records() -> None:
    text = audit_ranks.PAGE.read_text(encoding="utf-8")
    assert text.count(audit_ranks.table()) == 1
    assert audit_ranks.page(text) == text
    names = [value for name, value in vars(processes).items() if name.isupper() and isinstance(value, str)]
    known = re.compile("|".join(re.escape(name).replace(r"\{\}", "(loss|gradient.*)") for name in names))
    for one in RANKS:
        assert all(known.fullmatch(name) or name.startswith("rank 0: ") for name in one.mistakes), one.name
        assert (len(one.agrees) < 3) == bool(one.mistakes), one.name


@pytest.mark.slow
def test_loss_in_several_processes_is_judged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = own_ranks(tmp_path)
    wrong = replace(right, name="wrong", agrees=(1, 2, 3), mistakes=(), gradient=(1.0, 1.0, 1.0))
    missing = replace(right, name="missing", repository="someone/else")
    for losses, code in (([right, missing], 0), ([wrong], 1), ([replace(right, wrapper="def loss(a): 1 / 0")], 1)):
        monkeypatch.setattr(audit_ranks, "load_ranks", lambda _, losses=losses: losses)
        assert audit_ranks.main([str(tmp_path)]) == code
    printed = capsys.readouterr().out
    assert "own:\n" in printed
    assert "missing: skipped: model.py of someone/else" in printed
    assert "own: skipped: " in printed
    assert [line for line in printed.splitlines() if "FAILED" in line] == [
        "  FAILED: expected agrees: (1, 2, 3)",
        "  FAILED: expected mistakes: ()",
        "  FAILED: expected gradient: (1.0, 1.0, 1.0)",
    ]
