"""Summaries for CI: Markdown, badges, and the GitHub action that writes them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pairproof.conformance.judge.check import check_loss
from pairproof.conformance.judge.options import Selection
from pairproof.conformance.judge.results import Check, Status
from pairproof.conformance.judge.verify import Report
from pairproof.conformance.summary import SHOWN, _code, write_badge, write_summary

ROOT = Path(__file__).resolve().parent.parent
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
LOSSES = """
import torch
import torch.nn.functional as F


def nt_xent(embeddings, partners, temperature=0.07):
    rows = F.normalize(embeddings)
    logits = (rows @ rows.T / temperature).fill_diagonal_(-1e9)
    return F.cross_entropy(logits, partners)


def summed(embeddings, partners, temperature=0.07):
    return nt_xent(embeddings, partners, temperature) * len(embeddings)
"""
CASES = ("golden/nt_xent/one-positive-balanced", "golden/nt_xent/agreement-eight-rows")


@pytest.fixture
def losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "losses.py").write_text(LOSSES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tables(text: str) -> list[list[str]]:
    """The cells of every line of the tables of a page, without escapes."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[re.sub(r"\\(.)", r"\1", cell.strip()) for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_summary_and_badge_of_a_check_have_its_verdict_and_counts(losses: Path) -> None:
    for name, verdict, colour in (("nt_xent", "conforms", "brightgreen"), ("summed", "does not conform", "red")):
        found = check_loss("losses.py:" + name, "nt_xent", cases=CASES)
        write_summary(found, losses / "summary.md")
        write_badge(found, losses / "badge.json")
        text = (losses / "summary.md").read_text()
        assert json.loads((losses / "badge.json").read_text()) == {
            "schemaVersion": 1,
            "label": "pairproof",
            "message": f"nt_xent {verdict} at policies",
            "color": colour,
        }
        assert text.startswith(f"### {'✅' if verdict == 'conforms' else '❌'} `losses.py:{name}` as `nt_xent`\n")
        head, *rows = tables(text)
        status = "passed" if verdict == "conforms" else "failed"
        assert status in head
        judged = [check for check in found.judged if check.level is not None]
        place = head.index(status)
        assert sum(int(row[place] or 0) for row in rows) == sum(check.status == status for check in judged)
        repeats = re.findall(r"^  `(pairproof check .*)`$", text, re.MULTILINE)
        assert len(repeats) == (0 if verdict == "conforms" else 2)
        assert all(f"losses.py:{name} --loss nt_xent --case golden/nt_xent/" in line for line in repeats)


def test_summary_of_a_run_escapes_texts(tmp_path: Path) -> None:
    checks = [
        Check("case", "fast", "supcon", f"supcon/case-{k}", "float64", Status.FAILED, "a|b <b>*x*</b>", repeat="a | b")
        for k in range(SHOWN + 2)
    ]
    checks.append(Check("case", "my_peer", "supcon", "supcon/case-0", "float64", Status.PASSED))
    write_summary(Report(Selection(), checks, problems=["fast/supcon: expected 3"]), tmp_path / "summary.md")
    write_badge(Report(Selection(), checks[-1:]), tmp_path / "badge.json")
    text = (tmp_path / "summary.md").read_text()
    assert "❌ not everything holds" in text
    assert tables(text) == [["judged", "passed", "failed"], ["fast", "", str(SHOWN + 2)], ["my_peer", "1", ""]]
    assert text.count(r"a\|b &lt;b>\*x\*&lt;/b>") == SHOWN
    assert "- and 2 more cases" in text
    assert "- fast/supcon: expected 3" in text
    assert json.loads((tmp_path / "badge.json").read_text())["message"] == "everything holds"


def test_code_is_shown_as_it_is() -> None:
    assert [_code(text) for text in ("a | b", "a`b", "a``b`")] == ["`a | b`", "``a`b``", "``` a``b` ```"]


def act(folder: Path, targets: str) -> subprocess.CompletedProcess[str]:
    """Run the script of the action as GitHub does."""
    step = ACTION["runs"]["steps"][1]
    given: dict[str, Any] = {name: it.get("default") for name, it in ACTION["inputs"].items()}
    given |= {"targets": targets, "python": sys.executable}
    assert step["env"] == {name.upper(): f"${{{{ inputs.{name} }}}}" for name in ("python", "targets", "folder")}
    environment = {**os.environ, "GITHUB_STEP_SUMMARY": str(folder / "page.md")}
    environment |= {name.upper(): value for name, value in given.items()}
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.slow
def test_the_action_checks_every_target(losses: Path) -> None:
    (losses / "page.md").write_text("earlier\n")
    options = f"--loss nt_xent --case '{CASES[0]}' --case {CASES[1]}"
    done = act(losses, f"losses.py:summed {options}\n\nlosses.py:nt_xent {options}\n")
    assert done.returncode == 1, done.stderr + done.stdout
    assert {path.name for path in (losses / "pairproof-report").iterdir()} == {
        f"{k}{end}" for k in (1, 2) for end in (".json", ".xml", ".md", ".badge.json")
    }
    page = (losses / "page.md").read_text()
    assert page.startswith("earlier\n### ❌ `losses.py:summed`")
    assert "### ✅ `losses.py:nt_xent`" in page
    assert json.loads((losses / "pairproof-report/2.badge.json").read_text())["color"] == "brightgreen"


def test_the_action_needs_a_target(losses: Path) -> None:
    done = act(losses, "\n")
    assert (done.returncode, done.stderr) == (2, "targets: expected at least one line\n")
