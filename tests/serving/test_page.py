"""The page of ``gmmvit serve`` in a real Chromium: files, drawings, errors, keyboard, phone, both colour schemes."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from PIL import Image

from gmmvit_deploy.serving.front.process import FrontProcess
from tests.browser import accessibility_problems, open_chromium
from tests.inference.test_preprocess import encoded, photo
from tests.serving.conftest import MAX_BYTES

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.integration

PHONE = {"viewport": {"width": 400, "height": 740}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True}
DROP = """([bytes, text]) => {
    const carried = new DataTransfer();
    if (text) carried.setData("text/plain", text);
    else carried.items.add(new File([new Uint8Array(bytes)], "photo.png", { type: "image/png" }));
    document.querySelector("h1").dispatchEvent(new DragEvent("drop", { dataTransfer: carried, bubbles: true }));
}"""
COPY = """async bytes => {
    const image = new Blob([new Uint8Array(bytes)], { type: "image/png" });
    await navigator.clipboard.write([new ClipboardItem({ "image/png": image })]);
}"""


@contextmanager
def visit(front: FrontProcess, **options: Any) -> Iterator[Page]:
    """Open the page; at the end no script may have failed, and no other address may have been requested."""
    with open_chromium() as browser:
        context = browser.new_context(permissions=["clipboard-read", "clipboard-write"], **options)
        page = context.new_page()
        problems: list[str] = []
        requests: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(front.url)
        yield page
        assert [text for text in problems if "Failed to load resource" not in text] == []  # a refused image
        assert {urlsplit(url).netloc for url in requests if not url.startswith(("blob:", "data:"))} == {
            urlsplit(front.url).netloc
        }


def shown(page: Page) -> list[list[str]]:
    """Return the (label, probability) cells of the answer, when it is there."""
    page.locator("#answer table").wait_for()
    return [row.locator("th, td").all_inner_texts() for row in page.locator("#answer tbody tr").all()]


def answer_for(front: FrontProcess, data: bytes) -> list[list[str]]:
    answer = httpx.post(front.classify_url, content=data, timeout=30, trust_env=False).json()
    return [[guess["label"], f"{100 * guess['probability']:.1f} %"] for guess in answer["predictions"][0]]


def refused(page: Page, message: str) -> None:
    page.locator("#answer .error", has_text=f"Error: {message}").wait_for()
    assert page.locator("#answer table").count() == 0


def sent(page: Page, *, tap: bool = False) -> tuple[bytes, np.ndarray]:
    """Send the drawing; return (PNG, brightness of each pixel)."""
    button = page.get_by_role("button", name="Classify the drawing")
    button.tap() if tap else button.press("Enter")
    url: str = page.evaluate("document.querySelector('canvas').toDataURL('image/png')")
    data = base64.b64decode(url.partition(",")[2])
    return data, np.asarray(Image.open(io.BytesIO(data)).convert("L"))


def test_a_file_is_chosen_dropped_and_pasted(front: FrontProcess, tmp_path: Path) -> None:
    images = [encoded(photo(24, 24, seed=seed), "PNG") for seed in range(3)]
    expected = [answer_for(front, data) for data in images]
    (tmp_path / "photo.png").write_bytes(images[0])
    with visit(front) as page:
        page.set_input_files("#file", tmp_path / "photo.png")
        assert shown(page) == expected[0]
        bars = page.evaluate(
            "[...document.querySelectorAll('.bar')].map(bar => bar.offsetWidth / bar.parentElement.offsetWidth)"
        )
        assert bars == pytest.approx([float(share.split()[0]) / 100 for _, share in expected[0]], abs=0.02)
        page.reload()
        page.evaluate(DROP, [list(images[1]), ""])
        assert shown(page) == expected[1]
        page.reload()
        page.evaluate(COPY, list(images[2]))
        page.keyboard.press("Control+V")
        assert shown(page) == expected[2]


def test_a_drawing_by_mouse(front: FrontProcess) -> None:
    with visit(front) as page:
        box = page.locator("canvas").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 60, box["y"] + 40)
        page.mouse.down()
        page.mouse.move(box["x"] + 220, box["y"] + 40, steps=8)
        page.mouse.up()
        page.mouse.move(box["x"] + 220, box["y"] + 240)  # the pen is up
        data, ink = sent(page)
        assert ink[35:45, 60:220].min() == 255
        assert ink[70:].max() == 0
        assert shown(page) == answer_for(front, data)
        page.get_by_role("button", name="Clear").click()
        page.get_by_role("button", name="Classify the drawing").click()
        refused(page, "the drawing is empty")


@pytest.mark.nightly
def test_a_drawing_by_keyboard(front: FrontProcess) -> None:
    with visit(front) as page:
        for _ in range(3):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.matches('canvas')"):
                break
        assert page.locator("#pen").is_visible()
        for key in ("Space", "Delete", "ArrowUp", *["ArrowDown"] * 6, "Space", *["ArrowLeft"] * 20):
            page.keyboard.press(key)
        data, ink = sent(page)
        assert ink[130:200, 135:145].min() == 255
        assert ink[:, :100].max() == 0
        assert shown(page) == answer_for(front, data)


@pytest.mark.nightly
def test_on_a_phone(front: FrontProcess) -> None:
    with visit(front, **PHONE) as page:
        page.locator("canvas").tap()
        data, ink = sent(page, tap=True)
        assert ink[140, 140] == 255
        assert shown(page) == answer_for(front, data)
        box = page.locator("#answer table").bounding_box()
        assert box is not None
        assert 0 <= box["y"] <= box["y"] + box["height"] <= PHONE["viewport"]["height"]  # type: ignore[index]
        assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_errors(front: FrontProcess, tmp_path: Path) -> None:
    (tmp_path / "large.png").write_bytes(bytes(MAX_BYTES + 1))
    with visit(front) as page:
        page.evaluate(DROP, [list(b"no image"), ""])
        refused(page, "image 0: the file is not a JPEG")
        assert page.locator("#image").is_hidden()
        page.evaluate(DROP, [[], "text"])
        refused(page, "expected the file of an image")
        page.set_input_files("#file", tmp_path / "large.png")
        refused(page, f"the request is too large; the limit is {MAX_BYTES} bytes")
        page.route("**/classify", lambda route: route.abort())
        page.evaluate(DROP, [list(encoded(photo(8, 8), "PNG")), ""])
        refused(page, "the server does not answer")


def test_an_accessibility_checker_has_no_complaint(front: FrontProcess, tmp_path: Path) -> None:
    with visit(front) as page:
        page.evaluate(DROP, [list(encoded(photo(24, 24), "PNG")), ""])
        shown(page)
        page.evaluate("document.querySelector('#image').removeAttribute('src')")  # a blob of the browser
        (tmp_path / "page.html").write_text(page.content(), encoding="utf-8")
    assert accessibility_problems(tmp_path / "page.html") == []


def test_the_page_may_load_nothing_from_elsewhere(front: FrontProcess) -> None:
    assert "default-src 'none'" in httpx.get(front.url, trust_env=False).headers["Content-Security-Policy"]
