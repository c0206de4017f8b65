"""Makes docs/report.png from a report: python docs/picture.py runs/demo/report.html (needs playwright and Chromium)."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browser import open_page  # noqa: E402

WIDE, MARGIN = 1010, 12


def take(report: Path, target: Path) -> None:
    """Write what a report shows first, down to its heat maps."""
    with open_page(report, width=WIDE, height=1400, device_scale_factor=1.25) as opened:
        bottom = opened.page.evaluate("document.querySelector('#maps').getBoundingClientRect().bottom")
        clip = {"x": 0, "y": 0, "width": WIDE, "height": bottom + MARGIN}
        opened.page.screenshot(path=str(target), clip=clip)


if __name__ == "__main__":
    take(Path(sys.argv[1]), ROOT / "docs" / "report.png")
