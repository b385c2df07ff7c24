"""The HTML page: what it contains, and what it does in a browser."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pairproof.conformance import cli
from pairproof.conformance import page as pages
from pairproof.conformance.documents.load import load_worked, worked_cases
from pairproof.conformance.judge.check import check_loss
from pairproof.conformance.judge.options import Selection
from pairproof.conformance.judge.verify import run
from pairproof.reference import nt_xent_pairwise_loss, supcon_loss

CASES = ("supcon_notebook/*", "batch_tutorial/*", "golden/supcon/lonely-*", "golden/nt_xent/one-positive*")
AXE = "PAIRPROOF_AXE"
"""The environment variable that names the file axe.min.js of the npm package axe-core."""


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    selection = Selection(implementations=("reference", "fast", "pair-notebook", "batch-tutorial"), cases=CASES)
    return pages.data_of(run(selection))


@pytest.fixture(scope="module")
def path(data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "index.html"
    file.write_text(pages.page_of(data), encoding="utf-8")
    return file


def test_the_page_contains_its_data_and_loads_nothing(path: Path, data: dict[str, Any]) -> None:
    text = path.read_text(encoding="utf-8")
    (embedded,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert json.loads(embedded) == json.loads(json.dumps(data))
    assert not re.findall(r"<(?:script|img|iframe)[^>]+src=|<link[^>]+href=|@import|url\(http", text)
    assert path.stat().st_size < pages.LARGEST


def test_terms_are_those_of_the_reference(data: dict[str, Any]) -> None:
    (notebook,) = (one for one in data["documents"] if one["id"] == "supcon_notebook")
    view = next(view for view in notebook["views"] if view["id"] == "supcon_notebook/supcon-3x3")
    cases = worked_cases(next(f for f in load_worked() if f.document.id == "supcon_notebook"))
    case = next(case for case in cases if case.id == view["id"])
    labels = case.arguments["labels"]
    assert view["positive"] == [[j for j in range(9) if j != i and labels[j] == labels[i]] for i in range(9)]
    for name, function in (("supcon", supcon_loss), ("nt_xent_pairwise", nt_xent_pairwise_loss)):
        loss, terms = function(case.embeddings, labels, temperature=case.temperature)
        shown = view["losses"][name]
        assert shown["value"] == pytest.approx(float(loss), rel=1e-5)
        for (anchor, other), pair in terms.pairs.items():
            found = next(entry for entry in shown["pairs"][str(anchor)] if entry[0] == other)
            assert found[2] == list(pair.members)
            assert found[5] == pytest.approx(float(pair.value), rel=1e-5)
    assert "nt_xent" not in view["losses"]  # two positives per row


def test_a_large_page_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = check_loss("pairproof.fast:nt_xent_loss", "nt_xent", cases=("golden/nt_xent/two-rows",))
    pages.write_page(found, tmp_path / "small.html")
    monkeypatch.setattr(pages, "LARGEST", 1000)
    with pytest.raises(ValueError, match="more than 1000"):
        pages.write_page(found, tmp_path / "large.html")
    assert not (tmp_path / "large.html").exists()


def test_commands_write_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*arguments: str) -> int:
        with pytest.raises(SystemExit) as caught:
            cli.main(list(arguments))
        return int(caught.value.code or 0)

    out = tmp_path / "made" / "here"
    assert call("report", "--out", str(out), "--case", "batch_tutorial/*", "--impl", "reference") == 0
    assert f"{out}/index.html: " in "".join(capsys.readouterr().out.split("\n"))
    assert "Worked examples" in (out / "index.html").read_text(encoding="utf-8")
    (tmp_path / "losses.py").write_text("def loss(embeddings, partners):\n    return (embeddings**2).sum()\n")
    monkeypatch.chdir(tmp_path)
    line = "check losses.py:loss --loss nt_xent --temperature 0.07 --case golden/nt_xent/two-rows --html page.html"
    assert call(*line.split()) == 1
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "losses.py:loss as nt_xent" in text
    assert 'id="failures"' in text
    assert "repeat: <code>pairproof check losses.py:loss" in text
    assert "Expected terms; the loss that was found: " in text
    (tmp_path / "file").touch()
    assert call("report", "--out", "file") == 2


@pytest.fixture
def browser() -> Iterator[Any]:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    if find_spec("playwright") is None:
        pytest.skip("playwright is not installed: pip install playwright")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        opened = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390)])
def test_the_page_works_in_a_browser(browser: Any, path: Path, data: dict[str, Any], scheme: str, width: int) -> None:
    errors: list[str] = []
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: errors.append(request.url) if not request.url.startswith("file:") else None)
    page.goto(path.as_uri())
    assert not page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")

    # Choose an anchor and a loss: the marked pairs and the numbers are those of the data.
    name = "supcon_notebook/supcon-3x3"
    view = next(view for one in data["documents"] for view in one["views"] if view["id"] == name)
    shown = page.locator(f'.view[data-view="{name}"]')
    if shown.get_attribute("open") is None:
        shown.locator("summary").click()
    for loss in ("supcon", "nt_xent_pairwise", "nt_bxent"):
        shown.locator(f'button[data-loss="{loss}"]').click()
        shown.locator('button[data-anchor="4"]').focus()
        page.keyboard.press("Enter")
        pairs = view["losses"][loss]["pairs"]["4"]
        table = shown.locator("table.heat").first
        for kind, columns in (
            ("numerator", {pair[0] for pair in pairs}),
            ("denominator", {j for pair in pairs for j in pair[2]}),
        ):
            marked = table.locator(f'tr[data-row="4"] td.{kind}')
            assert {int(cell.get_attribute("data-column")) for cell in marked.all()} == columns
            assert table.locator(f"td.{kind}").count() == len(columns)
        text = shown.locator(".terms").inner_text()
        assert text.endswith(f"Loss: {view['losses'][loss]['value']}.")
        assert all(str(pair[5]) in text for pair in pairs)

    # Filter the cases, by hand and by a cell of the table.
    total = len(data["cases"])
    page.locator("#by-flag").select_option("lonely-anchors")
    expected = sum("lonely-anchors" in case["flags"] for case in data["cases"])
    assert 0 < expected < total
    assert page.locator("#case-count").inner_text() == f"{expected} of {total} cases match"
    assert page.locator("#case-table tbody tr").count() == min(expected, 100)
    page.locator("#by-flag").select_option("")
    page.locator('#matrix a[data-who="fast"][data-loss="nt_xent"]').click()
    assert page.evaluate("location.hash") == "#cases"
    expected = sum(case["loss"] == "nt_xent" and "fast" in case["statuses"] for case in data["cases"])
    assert page.locator("#case-count").inner_text() == f"{expected} of {total} cases match"
    assert errors == []

    axe = os.environ.get(AXE)
    if axe:
        page.add_script_tag(path=axe)
        violations = page.evaluate("axe.run()")["violations"]
        assert [(one["id"], one["nodes"][0]["html"]) for one in violations] == []


def test_accessibility_is_checked_with_axe() -> None:
    if AXE not in os.environ:
        pytest.skip(f"the pages were not checked with axe: npm install axe-core, and set {AXE} to its axe.min.js")
    assert Path(os.environ[AXE]).is_file()
