"""Draw the documentation's pictures: they are what the program itself draws.

python docs/pictures.py demo-output     after make demo; writes docs/pages/pictures

    masks.png       gmmvit inspect checkpoint.pth --report masks.png
    parity.svg      from parity.html: the error by block of the last runner with readable inner values
    waterfall.svg   from bench.html: the time of one image, step by step
"""

from __future__ import annotations

import re
import sys
from html import unescape
from pathlib import Path

from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.reports.pictures.mask_report import write_report

PICTURES = Path(__file__).parent / "pages" / "pictures"
FROM_PAGES = {"parity.svg": ("parity.html", "Error by block"), "waterfall.svg": ("bench.html", "Where the time goes")}
"""Picture → the page that it is taken from, and how its title begins there."""

_FIGURE = re.compile(r"<figure>(<svg.*?</svg>)\s*<figcaption><b>(.*?)</b>", re.DOTALL)


def draw(source: Path, out: Path) -> None:
    """Draw every picture.  source: a folder with checkpoint.pth, parity.html and bench.html.

    Errors: ValueError when a page has no figure of the expected title; OSError; GmmvitError.
    """
    out.mkdir(parents=True, exist_ok=True)
    write_report(load_checkpoint(source / "checkpoint.pth"), out / "masks.png", force=True)
    for name, (page, title) in FROM_PAGES.items():
        figures = _FIGURE.findall((source / page).read_text(encoding="utf-8"))
        svgs = [svg for svg, shown in figures if unescape(shown).startswith(title)]
        if not svgs:
            titles = ", ".join(dict.fromkeys(shown for _, shown in figures))
            raise ValueError(
                f"{source / page}: expected a figure whose title begins with {title!r}, got {titles or 'no figure'}"
            )
        # Outside its page a plot has no colours to follow, so it brings its paper along.
        alone = svgs[-1].replace("<svg ", '<svg style="color: #000000; background: #ffffff" ', 1)
        (out / name).write_text(alone + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/pictures.py FOLDER, such as demo-output after make demo")
    draw(Path(sys.argv[1]), PICTURES)
