"""The command line: what it prints, and exit codes that mean something."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pairproof.conformance import cli


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    return int(caught.value.code or 0)


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--help") == 0
    text = capsys.readouterr().out
    for command in ("verify", "list", "explain", "fixtures"):
        assert command in text
    assert call("verify", "--help") == 0
    text = capsys.readouterr().out
    assert "pairproof verify --loss supcon --impl pml" in text
    assert "artefact" in text


def test_verify_filtered(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report, junit = tmp_path / "report.json", tmp_path / "report.xml"
    arguments = ["verify", "--case", "supcon_notebook/*", "--impl", "reference,fast"]
    assert call(*arguments, "--json", str(report), "--junit", str(junit)) == 0
    text = capsys.readouterr().out
    assert "everything holds" in text
    assert "the counts are not asserted: the run was filtered" in text
    assert "2.1959722995368245" in text
    data = json.loads(report.read_text())
    assert data["passed"] is True
    assert data["format"] == "pairproof-report/1"
    assert {check["status"] for check in data["checks"]} == {"passed", "skipped"}
    assert data["counts"]["fast/supcon"]["passed"] == 8
    root = ElementTree.parse(junit).getroot()
    assert {suite.get("name") for suite in root} == {"figure", "claim", "reference", "fast"}
    assert sum(int(suite.get("tests", 0)) for suite in root) == len(data["checks"])


def test_verify_a_covering_choice(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = ["verify", "--case", "golden/nt_xent/*", "--impl", "reference", "--covering"]
    assert call(*arguments, "--json", str(report)) == 0
    text = capsys.readouterr().out
    data = json.loads(report.read_text())
    assert 5 < data["cases"]["run"] < 60
    assert f"{data['cases']['run']} of {data['cases']['in all']} cases were run: a covering choice" in text
    assert len({check["case"] for check in data["checks"]}) == data["cases"]["run"]


def test_a_failure_exits_1_and_says_how_to_repeat_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pairproof import fast

    right = fast.supcon_loss
    monkeypatch.setattr(fast, "supcon_loss", lambda *a, **k: -right(*a, **k))
    assert call("verify", "--case", "supcon_notebook/supcon-3x3", "--impl", "fast", "--dtype", "float64") == 1
    text = capsys.readouterr().out
    assert "NOT everything holds" in text
    assert "value of anchor 0: expected 1.80" in text
    assert "repeat: pairproof verify --case supcon_notebook/supcon-3x3 --impl fast --dtype float64" in text


def test_misuse_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("verify", "--loss", "supkon") == 2
    assert "unknown loss 'supkon'; known: supcon" in capsys.readouterr().err
    assert call("verify", "--peer", "supcontrast") == 2
    assert call("explain", "nobody/knows") == 2
    assert call("explain", "supcon_notebook/supcon-2x2", "--anchor", "9") == 2
    assert "expected one of 0, 1, 2, 3" in capsys.readouterr().err


def test_what_is_not_here_exits_3(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PAIRPROOF_PEERS", str(tmp_path))
    assert call("verify", "--require", "supcontrast") == 3
    assert "supcontrast is required and not here" in capsys.readouterr().err
    assert call("verify", "--device", "cuda:77") == 3


def test_explain_writes_the_whole_sum_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("explain", "supcon_notebook/supcon-3x3") == 0
    text = capsys.readouterr().out
    assert re.search(r"^-\(\(log 0\.1407 \+ log 0\.1922\)/2 \+ .*\)/9 = 2\.1960$", text, re.MULTILINE)
    assert "anchor 0: positives 3 6; negatives 1 2 4 5 7 8" in text
    assert call("explain", "supcon_notebook/out-27-loss", "--anchor", "0") == 0
    text = capsys.readouterr().out
    assert "over rows 1 2 3 4 5 7 8" in text
    assert "anchor 1" not in text
    assert "= 2.0615" in text
    assert call("explain", "pair_notebook/in-103-loss-1.0") == 0
    assert "= 1.0727" in capsys.readouterr().out


def test_every_case_can_be_explained(capsys: pytest.CaptureFixture[str]) -> None:
    from pairproof.conformance.documents.load import load_worked
    from pairproof.conformance.explain import explain
    from pairproof.conformance.judge.verify import load_cases

    explained = 0
    for case in load_cases(load_worked()):
        if case.n <= 12:
            lines = list(explain(case))
            assert not any("inf" in line.split("=")[-1] for line in lines[-2:]), case.id
            explained += 1
    assert explained > 100


def test_list_names_what_verify_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("list") == 0
    text = capsys.readouterr().out
    for name in (
        "supcon_epsilon",
        "supcontrast-today",
        "fast-triton",
        "supcon_notebook/supcon-3x3",
        "pair_notebook/in-103-loss-0.01",
    ):
        assert name in text
    assert call("list", "--loss", "nt_bxent") == 0
    assert "supcon_notebook" not in capsys.readouterr().out


def test_explain_says_what_is_contrasted_with_what(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("explain", "golden/info_nce/queue-tau-half", "--anchor", "5") == 0
    text = capsys.readouterr().out
    assert "info_nce_loss, 4 rows of 3 numbers in each of two towers, 5 negatives" in text
    assert "columns: 0 to 3 the rows of the other tower, 4 to 8 the negatives" in text
    assert "anchor 5 (row 1 of embeddings_b): positives 1; negatives 4 5 6 7 8" in text
    assert call("explain", "golden/supcon/refs-self-some", "--anchor", "0") == 0
    text = capsys.readouterr().out
    assert "supcon_loss, 4 rows of 3 numbers, 6 references" in text
    assert "  self_rows [3, -1, 0, -1]" in text
    assert "columns: the references" in text
    assert "anchor 0: positives 2 5; negatives 0 1 4" in text
    assert call("list", "--loss", "info_nce") == 0
    text = capsys.readouterr().out
    assert "info_nce: info_nce_loss(embeddings_a, embeddings_b); van den Oord" in text
    assert "golden/info_nce/one-negative: info_nce, 3 rows of 3 numbers in each of two towers, 1 negative\n" in text
