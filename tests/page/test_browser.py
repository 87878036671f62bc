"""The page in a real Chromium: every way to give an image, every wrong input, and no contact with other machines."""

from __future__ import annotations

import base64
import http.client
import io
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.images.preprocess import MAX_IMAGE_BYTES
from gmmvit_deploy.images.spec import image_from_pixels
from gmmvit_deploy.page import _html as html
from gmmvit_deploy.page.trial import Trial
from gmmvit_deploy.reports.pictures.attention_report import rollout_image
from gmmvit_deploy.reports.pictures.drawings import filter_images
from gmmvit_deploy.reports.pictures.mask_images import overlay_image, token_map
from gmmvit_deploy.reports.pictures.mask_numbers import LayerMasks
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.conftest import FREE_PORTS
from tests.documented import PAGES
from tests.images.test_preprocess import encoded, photo, png_bomb
from tests.page.conftest import Served, Visitor, served

if TYPE_CHECKING:
    from playwright.sync_api import APIResponse, Browser, Locator, Route

# Each test starts a page in a process of its own, with a bundle exported for it.
pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.export]

PHONE = {"viewport": {"width": 360, "height": 740}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True}
SEVEN = [(60, 40), (220, 40), (110, 245)]


@pytest.fixture(scope="module", autouse=True)
def _browser_first(chromium: Browser) -> None:
    """Skip before anything is trained, exported or served if there is no browser."""


@pytest.fixture(scope="module")
def trial(digits_bundle: Bundle) -> Iterator[Trial]:
    with Trial(digits_bundle) as opened:
        yield opened


@pytest.fixture(scope="module")
def page_of_bundle(
    chromium: Browser, digits_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """The page of the demo's bundle, without a server."""
    with served(digits_bundle, tmp_path_factory.mktemp("page")) as running:
        yield running


@pytest.fixture
def visit(chromium: Browser, page_of_bundle: Served) -> Iterator[Callable[..., Visitor]]:
    """Open windows; at the end no window may have contacted another machine or have had a failed script."""
    visitors: list[Visitor] = []

    def opened(url: str = page_of_bundle.url, **options: Any) -> Visitor:
        visitors.append(Visitor(chromium, url, **options))
        return visitors[-1]

    yield opened
    for visitor in visitors:
        assert visitor.requests
        assert visitor.foreign() == []
        assert visitor.problems == []
        visitor.close()


def upload(visitor: Visitor, data: bytes, name: str = "photo.png") -> None:
    file = {"name": name, "mimeType": "image/png", "buffer": data}
    visitor.page.locator("input.choose").set_input_files([file])  # type: ignore[list-item]  # a dict of this form


def draw(visitor: Visitor, points: list[tuple[int, int]]) -> None:
    """Draw with the mouse, in pixels of the canvas."""
    canvas = visitor.page.locator("canvas.sketch")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box is not None
    scale = box["width"] / 280
    places = [(box["x"] + x * scale, box["y"] + y * scale) for x, y in points]
    visitor.page.mouse.move(*places[0])
    visitor.page.mouse.down()
    for place in places[1:]:
        visitor.page.mouse.move(*place, steps=8)
    visitor.page.mouse.up()


def drawn(visitor: Visitor) -> bytes:
    """Return the drawing as the page reads it."""
    url: str = visitor.page.evaluate("gmmvitSketch.read()")
    return base64.b64decode(url.partition(",")[2])


def picture(image: Locator) -> np.ndarray:
    source = image.get_attribute("src") or ""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(source.partition("base64,")[2]))))


def answered(visitor: Visitor, source: str) -> None:
    visitor.page.locator("[role=status]", has_text=f"Answer for {source}").wait_for()


def refused(visitor: Visitor, message: str) -> None:
    """Assert that an error message stands in the place of the answer, without a traceback."""
    error = visitor.page.locator("[role=status] .error")
    error.filter(has_text=message).wait_for()
    assert error.inner_text().startswith("Error: ")
    everything = visitor.text(".try")
    assert "Traceback" not in everything
    assert visitor.page.locator(".verdict").count() == 0
    assert visitor.page.locator(".seen img").count() == 0


def shows_answer_of(visitor: Visitor, trial: Trial, data: bytes) -> None:
    """Assert that the page shows the library's answer."""
    answer = trial.answer(data)
    best = answer.predictions[0]
    assert visitor.text(".verdict") == f"{best.label}, {best.probability:.1%}"
    rows = visitor.page.locator(".predictions tbody tr")
    assert rows.count() == len(answer.predictions)
    assert rows.locator("th").all_inner_texts() == [p.label for p in answer.predictions]
    assert np.array_equal(picture(visitor.page.locator(".seen img")), np.asarray(html.shown_picture(answer.pixels)))
    assert np.array_equal(
        picture(visitor.page.locator(".attention-pictures img").first),
        np.asarray(rollout_image(answer.pixels, answer.attention.rollout)),
    )
    assert visitor.page.locator(".steps tbody th").all_inner_texts() == [step.name for step in answer.steps]
    assert visitor.page.locator(".agreement tbody td").last.inner_text() == "yes"


class TestImages:
    @pytest.mark.rest
    def test_upload(self, visit: Callable[..., Visitor], trial: Trial) -> None:
        visitor, data = visit(), encoded(photo(64, 48), "JPEG")
        upload(visitor, data, "photo.jpg")
        answered(visitor, "photo.jpg")
        shows_answer_of(visitor, trial, data)
        upload(visitor, encoded(photo(20, 20, seed=4), "PNG"), "second.png")
        answered(visitor, "second.png")
        shows_answer_of(visitor, trial, encoded(photo(20, 20, seed=4), "PNG"))

    @pytest.mark.rest
    def test_draw(self, visit: Callable[..., Visitor], trial: Trial) -> None:
        visitor = visit()
        visitor.page.get_by_role("tab", name="Draw").click()
        visitor.page.get_by_role("button", name="Classify the drawing").click()
        refused(visitor, "the canvas is empty")
        draw(visitor, SEVEN)
        visitor.page.get_by_role("button", name="Classify the drawing").click()
        answered(visitor, "the drawing")
        pixels = picture(visitor.page.locator(".seen img"))
        assert (pixels.min(), pixels.max()) == (0, 255)
        shows_answer_of(visitor, trial, drawn(visitor))
        visitor.screenshot("drawing")
        visitor.page.get_by_role("button", name="Clear").click()
        visitor.page.get_by_role("button", name="Classify the drawing").click()
        refused(visitor, "the canvas is empty")

    def test_example(self, visit: Callable[..., Visitor], trial: Trial) -> None:
        visitor = visit()
        visitor.page.get_by_role("tab", name="Examples").click()
        buttons = visitor.page.locator(".example")
        buttons.last.wait_for()
        assert buttons.count() == len(trial.examples)
        visitor.page.get_by_role("button", name="Example 3").click()
        answered(visitor, "example 3")
        shows_answer_of(visitor, trial, trial.examples[2])

    def test_a_file_that_cannot_be_used(self, visit: Callable[..., Visitor]) -> None:
        visitor = visit()
        upload(visitor, encoded(photo(8, 8), "PNG"), "good.png")
        answered(visitor, "good.png")
        upload(visitor, png_bomb(8_000, 8_000), "bad.png")
        refused(visitor, "bad.png: the image cannot be used: the image is 8000×8000 pixels; the maximum is 50000000")
        visitor.screenshot("bomb", full=False)
        upload(visitor, encoded(photo(8, 8), "PNG"), "good.png")
        answered(visitor, "good.png")

    def test_a_file_that_is_too_large_is_not_uploaded(self, visit: Callable[..., Visitor], tmp_path: Path) -> None:
        (tmp_path / "heavy.png").write_bytes(bytes(MAX_IMAGE_BYTES + 1))
        visitor = visit()
        before = len(visitor.requests)
        visitor.page.locator("input.choose").set_input_files(tmp_path / "heavy.png")
        refused(visitor, "the file was not uploaded: expected JPEG, PNG, WEBP or BMP, at most 32 MiB")
        assert not [url for url in visitor.requests[before:] if "upload" in url]

    def test_a_file_of_another_kind_is_not_uploaded(self, visit: Callable[..., Visitor]) -> None:
        visitor = visit()
        upload(visitor, b"text", "notes.txt")
        refused(visitor, "the file was not uploaded")

    def test_an_answer_may_arrive_before_the_response_of_the_upload(self, visit: Callable[..., Visitor]) -> None:
        visitor = visit()
        held: list[tuple[Route, APIResponse]] = []
        aborted: list[str] = []
        visitor.page.on("requestfailed", lambda request: aborted.append(request.url))
        visitor.page.route("**/upload/**", lambda route: held.append((route, route.fetch())))
        upload(visitor, encoded(photo(24, 24), "PNG"), "first.png")
        answered(visitor, "first.png")
        route, response = held.pop()
        route.fulfill(response=response)
        visitor.page.unroute_all()
        upload(visitor, encoded(photo(24, 24, seed=1), "PNG"), "second.png")
        answered(visitor, "second.png")
        assert aborted == []

    def test_an_upload_that_fails_is_stated_and_the_next_succeeds(self, visit: Callable[..., Visitor]) -> None:
        visitor = visit()
        visitor.page.route("**/upload/**", lambda route: route.abort())
        upload(visitor, encoded(photo(24, 24), "PNG"), "first.png")
        refused(visitor, "the upload failed")
        visitor.page.unroute_all()
        sent: list[str] = []
        visitor.page.on("request", lambda request: sent.append(request.url) if "/upload/" in request.url else None)
        upload(visitor, encoded(photo(24, 24, seed=1), "PNG"), "second.png")
        answered(visitor, "second.png")
        assert len(sent) == 1


class TestMasks:
    @pytest.mark.rest
    def test_layer_head_and_token_are_chosen(self, visit: Callable[..., Visitor], trial: Trial) -> None:
        visitor, data = visit(), encoded(photo(32, 32), "PNG")
        overlay = visitor.page.locator(".overlay img")
        assert "over a grey field" in (overlay.get_attribute("alt") or "")
        upload(visitor, data)
        answered(visitor, "photo.png")
        choose(visitor, "Layer", trial.masks[1].layer)
        choose(visitor, "Head", "head 2")
        layer = trial.masks[1]
        self._framed(visitor, layer, layer.grid[0] // 2, layer.grid[1] // 2)
        last = layer.grid[1] - 1
        middle = layer.grid[1] // 2
        for name, key, value, place in (
            ("Row of the token", "Home", 0, (0, middle)),
            ("Row of the token", "ArrowRight", 1, (1, middle)),
            ("Column of the token", "End", last, (1, last)),
        ):
            slider = visitor.page.get_by_role("slider", name=name)
            for _ in range(5):  # a menu that closes may take the focus back, and with it the key
                slider.press(key)
                if slider.input_value() == str(value):
                    break
            self._framed(visitor, layer, *place)  # a slider keeps its place when the new picture comes
        values = token_map(layer, 2, row=1, column=last)
        seen = image_from_pixels(trial.answer(data).pixels)
        expected = overlay_image(seen, layer, values, row=1, column=last)
        assert np.array_equal(picture(overlay), np.asarray(expected))

    @staticmethod
    def _framed(visitor: Visitor, layer: LayerMasks, row: int, column: int) -> None:
        alt = f"Mask of {layer.layer}, head 2, for the token at row {row}, column {column}, over the image"
        visitor.page.locator(f'.overlay img[alt="{alt}"]').wait_for()


class TestDrawings:
    def test_a_part_is_chosen(self, visit: Callable[..., Visitor], trial: Trial) -> None:
        visitor, parts = visit(), dict(html.drawn_parts(trial.drawings))
        drawing = visitor.page.locator(".drawing")
        assert list(parts) == ["Patch embedding", "Position embeddings", "Steps with a number for each head"]
        assert trial.drawings.filters is not None
        for number, title in enumerate(parts):
            if number:
                choose(visitor, "Drawing", title)
            expected = re.findall(r'alt="([^"]+)"', parts[title]())
            drawing.locator(f'img[alt="{expected[0]}"]' if expected else "table").first.wait_for()
            assert [image.get_attribute("alt") for image in drawing.locator("img").all()] == expected
        choose(visitor, "Drawing", "Patch embedding")
        (_, sheet), *_ = filter_images(trial.drawings.filters)
        assert np.array_equal(picture(drawing.locator("img").first), np.asarray(sheet))


def choose(visitor: Visitor, name: str, option: str) -> None:
    visitor.page.get_by_role("combobox", name=name).click()
    visitor.page.get_by_role("option", name=option, exact=True).click()
    # The menu gives the focus back to its field when it has closed; a slider must not have the focus before.
    visitor.page.get_by_role("listbox").wait_for(state="detached")


class TestFacts:
    def test_bundle_and_parity_are_stated(self, visit: Callable[..., Visitor], digits_bundle: Bundle) -> None:
        visitor = visit()
        assert digits_bundle.sha256 in visitor.text(".this-bundle")
        assert "Parity at export: passed." in visitor.text(".try")
        visitor.page.get_by_text("Programs compared at export").click()
        for program in ("onnxruntime", "openvino"):
            assert visitor.page.get_by_role("rowheader", name=program, exact=True).is_visible()


class TestEveryone:
    def test_with_a_keyboard_alone(self, visit: Callable[..., Visitor], trial: Trial) -> None:
        visitor = visit()
        keyboard = visitor.page.keyboard

        def tab_to(selector: str) -> None:
            for _ in range(40):
                keyboard.press("Tab")
                if visitor.page.evaluate(f"document.activeElement.matches({selector!r})"):
                    return
            pytest.fail(f"Tab does not reach {selector}")

        tab_to("[role=tab]")
        keyboard.press("ArrowRight")
        keyboard.press("Enter")
        visitor.page.locator("canvas.sketch").wait_for()
        tab_to("canvas.sketch")
        assert visitor.page.locator(".pen").is_visible()
        keyboard.press("ArrowUp")
        keyboard.press("Space")
        for _ in range(6):
            keyboard.press("ArrowDown")
        keyboard.press("Space")
        tab_to("button")
        keyboard.press("Enter")
        answered(visitor, "the drawing")
        data = drawn(visitor)
        ink = np.asarray(Image.open(io.BytesIO(data)).convert("L"))
        assert ink[140:200, 130:150].min() == 255
        assert ink[:, :100].max() == 0
        shows_answer_of(visitor, trial, data)

    def test_on_a_phone(self, visit: Callable[..., Visitor], trial: Trial) -> None:
        visitor = visit(**PHONE)
        visitor.page.get_by_role("tab", name="Draw").tap()
        visitor.page.locator("canvas.sketch").tap()  # a finger leaves a dot
        visitor.page.get_by_role("button", name="Classify the drawing").tap()
        answered(visitor, "the drawing")
        shows_answer_of(visitor, trial, drawn(visitor))
        width = visitor.page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        assert width[0] <= width[1] <= 360
        for button in visitor.page.locator(".try button:visible").all():
            box = button.bounding_box()
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 360
        visitor.screenshot("phone", full=False)

    @pytest.mark.first(1)
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_an_accessibility_checker_finds_nothing_serious(self, visit: Callable[..., Visitor], scheme: str) -> None:
        axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-core is not installed").Axe()
        visitor = visit(color_scheme=scheme)
        violations = []
        background = visitor.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(18, 18, 18)") == (scheme == "dark"), background
        for tab in ("Upload", "Draw", "Examples"):
            visitor.page.get_by_role("tab", name=tab).click()
            visitor.page.get_by_role("tab", name=tab, selected=True).wait_for()
            visitor.at_rest()
            if tab == "Examples":
                visitor.page.get_by_role("button", name="Example 1").click()
                answered(visitor, "example 1")
                visitor.page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true })")
            response = axe.run(visitor.page).response
            assert len(response["passes"]) > 20, "axe-core checked nothing"
            violations += [
                (tab, rule["impact"], rule["id"], rule["nodes"][0]["html"]) for rule in response["violations"]
            ]
        assert [rule for rule in violations if rule[1] in ("serious", "critical")] == []
        assert visitor.page.locator("[role=status][aria-live=polite]").count() == 1
        if scheme == "dark":
            visitor.screenshot("dark")

    def test_a_file_is_chosen_with_a_keyboard_dropped_and_pasted(
        self, visit: Callable[..., Visitor], trial: Trial
    ) -> None:
        visitor, data = visit(), encoded(photo(24, 24), "PNG")
        with visitor.page.expect_file_chooser() as chosen:
            visitor.page.locator("input.choose").press("Enter")
        chosen.value.set_files([{"name": "chosen.png", "mimeType": "image/png", "buffer": data}])
        answered(visitor, "chosen.png")
        for number, (event, property_name) in enumerate((("drop", "dataTransfer"), ("paste", "clipboardData"))):
            other = encoded(photo(24, 24, seed=number + 1), "PNG")
            visitor.page.evaluate(
                """([kind, name, bytes]) => {
                  const carried = new DataTransfer();
                  carried.items.add(new File([new Uint8Array(bytes)], `${kind}.png`, { type: "image/png" }));
                  const event = new Event(kind, { bubbles: true, cancelable: true });
                  Object.defineProperty(event, name, { value: carried });
                  document.querySelector(".try").dispatchEvent(event);
                }""",
                [event, property_name, list(other)],
            )
            answered(visitor, f"{event}.png")
            shows_answer_of(visitor, trial, other)


def asked(
    page: Served, method: str = "GET", headers: dict[str, str] | None = None
) -> tuple[int, http.client.HTTPMessage, str]:
    """Return (status, headers, text) of a request that does not come from a browser."""
    connection = http.client.HTTPConnection(urlsplit(page.url).netloc, timeout=10)
    connection.putrequest(method, "/", skip_host="Host" in (headers or {}))
    for name, value in (headers or {}).items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    try:
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


class TestNoOtherMachine:
    def test_the_page_names_no_other_address(self, page_of_bundle: Served) -> None:
        _, headers, text = asked(page_of_bundle)
        loaded = re.findall(r"""(?:src|href)=["'](https?:)?//""", text)
        assert loaded == []
        assert "default-src 'self'" in headers["Content-Security-Policy"]

    def test_the_browser_refuses_other_addresses(self, chromium: Browser, page_of_bundle: Served) -> None:
        """Also proves that `Visitor.foreign` lists requests to other machines: this window makes such requests."""
        visitor = Visitor(chromium, page_of_bundle.url)
        blocked = visitor.page.evaluate(
            """async () => {
              const seen = [];
              document.addEventListener("securitypolicyviolation", (event) => seen.push(event.effectiveDirective));
              const script = Object.assign(document.createElement("script"), { src: "http://192.0.2.1/x.js" });
              document.head.append(script);
              document.body.append(Object.assign(new Image(), { src: "http://192.0.2.1/x.png" }));
              await fetch("http://192.0.2.1/x").catch(() => {});
              await new Promise((resolve) => setTimeout(resolve, 300));
              return seen.sort();
            }"""
        )
        assert blocked == ["connect-src", "img-src", "script-src-elem"]
        assert {urlsplit(url).path for url in visitor.foreign()} >= {"/x.js", "/x.png"}
        visitor.close()

    def test_the_program_reaches_no_other_machine(self, visit: Callable[..., Visitor], page_of_bundle: Served) -> None:
        visitor = visit()
        upload(visitor, encoded(photo(8, 8), "PNG"))
        answered(visitor, "photo.png")
        elsewhere = [
            line for line in page_of_bundle.connections if line.split()[1] not in ("127.0.0.1", "localhost", "::1")
        ]
        assert elsewhere == []

    def test_the_guard_is_in_front(self, page_of_bundle: Served) -> None:
        status, _, text = asked(page_of_bundle, "POST", {"Content-Length": str(2 * MAX_IMAGE_BYTES)})
        assert status == 413
        assert "expected at most" in text
        assert asked(page_of_bundle, headers={"Host": "rebound.example"})[0] == 421


class TestServer:
    @pytest.mark.rest
    @pytest.mark.server
    def test_that_agrees_and_then_goes_away(
        self, visit: Callable[..., Visitor], digits_bundle: Bundle, tmp_path: Path
    ) -> None:
        repository = repository_from_bundle(digits_bundle, tmp_path / "models")
        with (
            TritonServer(repository.path, options=ServerOptions(**FREE_PORTS)) as server,
            served(digits_bundle, tmp_path, "--url", server.grpc_url) as page,
        ):
            visitor = visit(page.url)
            visitor.page.get_by_role("tab", name="Draw").click()
            draw(visitor, SEVEN)
            visitor.page.get_by_role("button", name="Classify the drawing").click()
            answered(visitor, "the drawing")
            assert f"The server at {server.grpc_url} agrees" in visitor.text(".agreement")
            assert visitor.page.locator(".agreement tbody tr").count() == 3
            assert "infer" in visitor.text(".steps")
            visitor.screenshot("server")
            server.stop()
            visitor.page.get_by_role("button", name="Classify the drawing").click()
            visitor.page.locator(".agreement .error", has_text="no Triton server answers").wait_for()
            visitor.screenshot("server_gone")
            assert visitor.page.locator(".verdict").count() == 1


def test_the_documentation_shows_the_screenshots_of_these_tests() -> None:
    taken = {
        f"page_{name}.png" for name in re.findall(r'screenshot\("(\w+)"', Path(__file__).read_text(encoding="utf-8"))
    }
    assert {path.name for path in (PAGES / "screenshots").iterdir()} == taken
    text = (PAGES / "jobs" / "try.md").read_text(encoding="utf-8")
    assert set(re.findall(r"screenshots/(\w+\.png)", text)) == taken


@pytest.mark.rest
def test_stops_when_interrupted_and_leaves_nothing(digits_bundle: Bundle, tmp_path: Path) -> None:
    with served(digits_bundle, tmp_path) as page:
        page.process.send_signal(signal.SIGINT)
        assert page.process.wait(timeout=20) == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "connections.txt", "stderr.txt"]
    lines = (tmp_path / "stderr.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("·")] == []
