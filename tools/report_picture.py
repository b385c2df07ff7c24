"""Write ``docs/report.png``, the picture of the report in the README.

This tool needs Chromium and the packages playwright and pillow. It fails if the picture is larger than ``LARGEST``.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright  # type: ignore[import-not-found,unused-ignore]

from pairproof.conformance.judge.options import Selection
from pairproof.conformance.judge.verify import run
from pairproof.conformance.page.write import OPENED, write_page

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "report.png"
LARGEST = 150_000
"""Maximum size of the picture in bytes."""
WIDTH = 1200
COLOURS = 64
MARGIN = 8
ANCHOR = 4
"""The anchor whose pairs are shown."""


def picture() -> bytes:
    """Return a PNG of the matrices of the worked example that the page shows first."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("no Chromium is installed: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        path = Path(folder) / "index.html"
        cases = (f"{OPENED.partition('/')[0]}/*",)
        write_page(run(Selection(cases=cases, implementations=("reference",), dtypes=("float64",))), path)
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
        page.goto(path.as_uri())
        view = page.locator(f'.view[data-view="{OPENED}"]')
        view.locator(f'button[data-anchor="{ANCHOR}"]').click()
        page.mouse.move(0, 0)
        page.evaluate("window.scrollTo(0, 0)")
        # From the choice of the loss to the end of the matrix of similarities.
        top, last = view.locator(".choices").first.bounding_box(), view.locator("table.heat").nth(1).bounding_box()
        assert top
        assert last
        height = last["y"] + last["height"] - top["y"] + 2 * MARGIN
        clip: Any = {
            "x": top["x"] - MARGIN,
            "y": top["y"] - MARGIN,
            "width": last["x"] + last["width"] - top["x"] + 2 * MARGIN,
            "height": height,
        }
        found = page.screenshot(full_page=True, clip=clip)
        browser.close()
    image = Image.open(io.BytesIO(found)).convert("RGB").quantize(COLOURS)
    written = io.BytesIO()
    image.save(written, "PNG", optimize=True)
    return written.getvalue()


def main() -> int:
    """Write the picture."""
    data = picture()
    if len(data) > LARGEST:
        print(f"the picture has {len(data)} bytes, more than {LARGEST}", file=sys.stderr)
        return 1
    PICTURE.write_bytes(data)
    print(f"{PICTURE}: {len(data)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
