"""Pages in a real Chromium, and the accessibility checker axe-core in it.  Both come from the system and from PyPI; a
test without them is skipped with the reason.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

LOOKS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light", "viewport": {"width": 1280, "height": 900}},
    "dark": {"color_scheme": "dark", "viewport": {"width": 1280, "height": 900}},
    "phone": {"color_scheme": "light", "viewport": {"width": 360, "height": 740}},
    "print": {"color_scheme": "dark", "viewport": {"width": 794, "height": 1123}},
}
"""Name → settings of a browser context.  A page is printed in its light colours, whatever the screen shows."""


@contextmanager
def open_chromium(*arguments: str) -> Iterator[Any]:
    """Open Debian's Chromium with Playwright; skip the test if either is missing.

    arguments: options of the browser's command line.

    Close the browser before the test ends: Playwright's event loop blocks every other event loop.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="no browser: pip install playwright")
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no browser: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=[*arguments])
        try:
            yield browser
        finally:
            browser.close()


def accessibility_problems(path: Path) -> list[str]:
    """Return axe-core's complaints about an unfolded HTML page in each of `LOOKS`, its requests, and excess width."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe-core: pip install '.[dev]'").Axe()
    problems = []
    with open_chromium() as browser:
        for look, options in LOOKS.items():
            context = browser.new_context(**options)
            page = context.new_page()
            requests: list[str] = []
            page.on("request", lambda request, seen=requests: seen.append(request.url))
            page.emulate_media(media="print" if look == "print" else "screen", color_scheme=options["color_scheme"])
            page.goto(path.as_uri())
            page.evaluate("document.querySelectorAll('details').forEach(fold => { fold.open = true })")
            response = axe.run(page).response
            assert len(response["passes"]) > 10, "axe-core checked nothing"
            problems += [
                f"{look}: {violation['impact']}: {violation['id']}: {node['html'][:120]}"
                for violation in response["violations"]
                if violation["impact"] in ("serious", "critical")
                for node in violation["nodes"]
            ]
            problems += [f"{look}: request: {url}" for url in requests if not url.startswith(("file:", "data:"))]
            width = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            problems += [f"{look}: {width} pixels wider than its window"] if width > 0 else []
            context.close()
    return problems
