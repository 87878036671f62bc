"""Draw the page with NiceGUI: three ways to give an image, and the bundle's answer.

Each visitor has a `Visit` with separate pictures and choices. All visitors share a `Trial` and a single worker thread
that classifies an image at a time, so that neither memory nor times depend on the number of visitors.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from typing import TYPE_CHECKING, Any, TypeVar

from gmmvit_deploy.errors import GmmvitError, InputError
from gmmvit_deploy.images.preprocess import FORMATS, MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS
from gmmvit_deploy.images.spec import image_from_pixels
from gmmvit_deploy.page import _html as html
from gmmvit_deploy.page.server import require_page_library
from gmmvit_deploy.page.trial import Answer, Trial
from gmmvit_deploy.reports.pages import macro
from gmmvit_deploy.reports.pictures.mask_images import overlay_image, token_grid, token_map
from gmmvit_deploy.reports.pictures.step_numbers import CLOSED

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["PageView", "data_from_url"]

_MOST_WAITING = 8
_PRIMARY = "#1d5fa8"  # white text on this colour has a contrast of 6.3:1
_SKETCH_TIMEOUT_S = 5.0
_SUFFIXES = ".jpg,.jpeg,.jpe,.jfif,.png,.webp,.bmp"
_TAKEN = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}, at most {MAX_IMAGE_BYTES // 2**20} MiB"
_KEYS = "With a keyboard: arrows move the pen, Space lowers or lifts it, Delete clears."
_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class PageView:
    """The page of a trial; `build` draws the page for a new visitor."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._drawings = html.drawn_parts(trial.drawings)
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gmmvit-page")
        self._waiting = 0

    def build(self) -> None:
        Visit(self._trial, self._answer, self._drawings).build()

    async def _answer(self, data: bytes) -> Answer:
        """Classify an encoded image in the worker thread.

        Errors: InputError when too many images wait.
        Every error of `Trial.answer`.
        """
        if self._waiting >= _MOST_WAITING:
            raise InputError(f"{self._waiting} images are waiting already; try again in a moment")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, self._trial.answer, data)
        finally:
            self._waiting -= 1


class Visit:
    """The elements that a visitor sees.

    answer: async function that takes an encoded image and returns the `Answer` for the image.
    drawings: (title, function that draws the part as HTML) of each part of the drawings.
    """

    def __init__(
        self, trial: Trial, answer: Callable[[bytes], Any], drawings: tuple[tuple[str, Callable[[], str]], ...]
    ) -> None:
        self._trial, self._answer, self._drawings = trial, answer, drawings
        self._ui = require_page_library().ui
        # Masks are drawn over a grey field until the visitor gives an image.
        self._picture: Image.Image | None = None
        self._layer = self._head = 0
        self._token = [side // 2 for side in self._grid()] if trial.masks else []

    def build(self) -> None:
        ui, trial = self._ui, self._trial
        resources = files("gmmvit_deploy.page")
        ui.colors(primary=_PRIMARY)
        ui.add_css((resources / "page.css").read_text(encoding="utf-8"))
        for script in ("sketch.js", "upload.js"):
            ui.add_body_html(f"<script>{(resources / script).read_text(encoding='utf-8')}</script>")
        with ui.element("div").classes("try"):
            title = html.part("title", f"Try {trial.bundle.path.name}")
            manifest = trial.bundle.manifest
            self._html(title + html.parity_html(manifest.export_parity, manifest.export_skipped))
            if trial.notice:
                self._html(html.message_html(f"Not the fastest runner: {trial.notice}"))
            with ui.element("div").classes("columns"):
                self._section("Give an image", self._build_inputs)
                self._section("Answer", self._build_answer)
                self._section("What the network sees", self._build_seen)
                self._section("Masks over the image", self._build_masks)
            self._section("Attention", self._build_attention)
            self._section("Steps and embeddings", self._build_drawings)
            self._section("Time by step", self._build_steps)
            self._section("This bundle", self._build_card)

    def _section(self, title: str, build: Callable[[], object]) -> None:
        name = title.lower().replace(" ", "-")
        with self._ui.element("section").props(f'aria-labelledby="{name}"').classes(name):
            self._html(html.part("heading", title, name))
            build()

    def _html(self, content: str = "") -> Any:
        return self._ui.html(content, sanitize=False)  # the HTML comes from templates, which escape all text

    def _quiet(self, text: str) -> None:
        self._html(html.message_html(text, kind="quiet"))

    def _build_card(self) -> None:
        self._html(macro("reports/templates/parts.html", "definitions", html.bundle_card(self._trial.bundle)))

    # Ways to give an image

    def _build_inputs(self) -> None:
        ui, trial = self._ui, self._trial
        self._build_uploader()
        with ui.tabs().props('align="left" no-caps inline-label') as tabs:
            upload, draw = ui.tab("Upload"), ui.tab("Draw")
            example = ui.tab("Examples") if trial.examples else None
        with ui.tab_panels(tabs, value=upload).classes("inputs"):
            with ui.tab_panel(upload):
                self._build_choice()
            with ui.tab_panel(draw):
                self._build_sketch()
            if example is not None:
                with ui.tab_panel(example):
                    self._build_examples()

    def _build_uploader(self) -> None:
        """Add a hidden uploader.

        The visible elements work with a keyboard and a screen reader; `upload.js` passes their files to the uploader.
        The browser empties the uploader's list after each response: an order from here could arrive before the
        response, abort the upload, and so show an error for a file that was answered.
        """
        upload = self._ui.upload(
            auto_upload=True, max_file_size=MAX_IMAGE_BYTES, on_upload=self._on_upload, on_rejected=self._on_rejected
        )
        upload.props(f'accept="{_SUFFIXES}"').classes("upload")
        uploader = f"getElement({upload.id}).$refs.qRef"
        upload.on("uploaded", js_handler=f"() => {uploader}.removeUploadedFiles()")
        upload.on("failed", self._on_failed, args=[], js_handler=f"() => {{ {uploader}.removeQueuedFiles(); emit(); }}")

    def _build_choice(self) -> None:
        taken = f"{_TAKEN} and {MAX_IMAGE_PIXELS // 10**6} million pixels."
        self._html(html.part("file_choice", _SUFFIXES, taken))

    def _build_sketch(self) -> None:
        ui = self._ui
        with ui.element("div").classes("sketch-frame"):
            ui.element("canvas").classes("sketch").props(
                'width="280" height="280" tabindex="0" role="img" aria-label="Canvas: draw a digit" '
                'aria-describedby="sketch-keys"'
            )
            ui.element("span").classes("pen").props('aria-hidden="true"')
        self._html(html.part("drawing_keys", _KEYS))
        with ui.element("div").classes("controls"):
            ui.button("Classify the drawing", on_click=self._on_sketch).props("no-caps")
            clear = ui.button("Clear", color=None, on_click=lambda: ui.run_javascript("gmmvitSketch.clear()"))
            clear.props("no-caps outline")

    def _build_examples(self) -> None:
        ui, image = self._ui, self._trial.bundle.manifest.image
        with ui.element("div").classes("examples"):
            for number, data in enumerate(self._trial.examples, start=1):
                button = ui.button(on_click=lambda data=data, number=number: self._show(data, f"example {number}"))
                with button.props(f'flat padding="2px" aria-label="Example {number}"').classes("example"):
                    picture = image_from_pixels(image.pixels_from_bytes(data))
                    self._html(html.part("image", picture, "", "thumbnail"))
        self._quiet("The reference images of the bundle, whose logits were recorded at export.")

    async def _on_upload(self, event: Any) -> None:
        data = await event.file.read()
        await self._show(data, event.file.name)

    def _on_rejected(self) -> None:
        self._fail(f"the file was not uploaded: expected {_TAKEN}")

    def _on_failed(self) -> None:
        self._fail("the upload failed: the program that serves this page did not accept the file")

    async def _on_sketch(self) -> None:
        url = await self._ui.run_javascript("return gmmvitSketch.read()", timeout=_SKETCH_TIMEOUT_S)
        if url is None:
            self._fail("the canvas is empty: draw on the canvas first")
            return
        try:
            data = data_from_url(url)
        except InputError as exc:
            self._fail(str(exc))
            return
        await self._show(data, "the drawing")

    # The answer

    def _build_answer(self) -> None:
        self._status = self._html(html.message_html("No image yet.")).props('role="status" aria-live="polite"')
        self._predictions = self._html().classes("answer")
        self._agreement = self._html().classes("agreement")

    def _build_seen(self) -> None:
        self._seen = self._html().classes("seen")
        image = self._trial.bundle.manifest.image
        self._quiet(
            f"The image after decoding to {image.mode} and resizing to {image.height}×{image.width} "
            f"({image.resize_text}), before normalisation."
        )

    def _build_attention(self) -> None:
        self._attention = self._html(html.message_html("No image yet.")).classes("attention-pictures")

    def _build_drawings(self) -> None:
        ui, parts = self._ui, self._drawings
        with ui.element("div").classes("controls"):
            titles = {index: title for index, (title, _) in enumerate(parts)}
            choice = ui.select(titles, value=0, label="Drawing").props("dense outlined options-dense")
        drawing = self._html(parts[0][1]()).classes("drawing")
        choice.on_value_change(lambda event: drawing.set_content(parts[int(event.value)][1]()))
        legend = macro("reports/templates/drawings.html", "steps_legend", self._trial.drawings.steps, CLOSED)
        self._html(legend)

    def _build_steps(self) -> None:
        self._steps = self._html(html.message_html("No image yet.")).classes("steps-table")

    async def _show(self, data: bytes, source: str) -> None:
        """Show the answer for an image, or an error in place of the answer."""
        self._status.set_content(html.message_html(f"Working on {source}."))
        try:
            answer = await self._answer(data)
        except GmmvitError as exc:
            self._fail(f"{source}: {exc}", hint=exc.hint)
            return
        except Exception as exc:
            # Any other error is a defect: the traceback goes to the log of the program, not to the visitor.
            _log.exception("no answer for %s", source)
            self._fail(f"{source}: unexpected {type(exc).__name__}; see the log of the program that serves this page")
            return
        self._picture = image_from_pixels(answer.pixels)
        self._status.set_content(html.message_html(f"Answer for {source}:"))
        self._predictions.set_content(html.part("predictions", answer))
        self._agreement.set_content(html.agreement_html(answer, url=self._trial.url))
        self._seen.set_content(html.seen_html(answer))
        self._attention.set_content(html.attention_html(answer))
        self._steps.set_content(html.steps_html(answer.steps))
        self._draw_mask()

    def _fail(self, message: str, *, hint: str = "") -> None:
        """Show an error in place of the answer, and remove the results of the previous image."""
        self._status.set_content(html.message_html(f"{message}{f' ({hint})' if hint else ''}", kind="error"))
        for element in (self._predictions, self._agreement, self._seen):
            element.set_content("")
        for element in (self._attention, self._steps):
            element.set_content(html.message_html("No image yet."))
        self._picture = None
        self._draw_mask()

    # Masks

    def _build_masks(self) -> None:
        ui, masks = self._ui, self._trial.masks
        if not masks:
            self._html(html.message_html("This model has no masks: its attention is plain."))
            return
        with ui.element("div").classes("controls"):
            names = {index: layer.layer for index, layer in enumerate(masks)}
            ui.select(names, value=0, label="Layer", on_change=self._on_layer).props("dense outlined options-dense")
            self._heads = ui.select(_heads(len(masks[0].heads)), value=0, label="Head", on_change=self._on_head)
            self._heads.props("dense outlined options-dense")
        self._overlay = self._html().classes("overlay")
        with ui.element("div").classes("controls"):
            self._sliders = (self._slider("Row of the token", 0), self._slider("Column of the token", 1))
        self._quiet(
            "The colours show the mask row of the framed token: blue is above 0, red is below 0, and 0 has no colour. "
            "Dark tokens are outside the window of the framed token."
        )
        self._draw_mask()

    def _slider(self, label: str, axis: int) -> Any:
        """Add a slider.

        The slider is the browser's element, not NiceGUI's: NiceGUI's slider loses key presses during an update.
        Its place stands in ``defaultValue``: Vue sets ``value`` again at each update, so the slider would jump back.
        """
        ui, last = self._ui, self._grid()[axis] - 1
        with ui.element("label").classes("slider"):
            self._html(html.part("label", label))
            slider = ui.element("input").props(
                f'type="range" min="0" max="{last}" defaultValue="{self._token[axis]}" aria-label="{label}"'
            )

        def on_input(event: Any) -> None:
            self._token[axis] = min(max(int(event.args), 0), self._grid()[axis] - 1)
            self._draw_mask()

        slider.on("input", on_input, js_handler="(event) => emit(Number(event.target.value))", throttle=0.05)
        return slider

    def _grid(self) -> tuple[int, int]:
        layer = self._trial.masks[self._layer]
        return token_grid(layer, self._trial.windows.get(layer.layer))

    def _on_layer(self, event: Any) -> None:
        self._layer, self._head = int(event.value), 0
        self._heads.set_options(_heads(len(self._trial.masks[self._layer].heads)), value=0)
        for axis, slider in enumerate(self._sliders):
            last = self._grid()[axis] - 1
            self._token[axis] = min(self._token[axis], last)
            self._ui.run_javascript(
                f"Object.assign(getHtmlElement({slider.id}), {{max: {last}, value: {self._token[axis]}}})"
            )
        self._draw_mask()

    def _on_head(self, event: Any) -> None:
        self._head = int(event.value or 0)
        self._draw_mask()

    def _draw_mask(self) -> None:
        if not self._trial.masks:
            return
        layer = self._trial.masks[self._layer]
        windows = self._trial.windows.get(layer.layer)
        row, column = self._token
        head = min(self._head, len(layer.heads) - 1)
        picture = self._picture or _grey_field()
        values = token_map(layer, head, row=row, column=column, windows=windows)
        over = "the image" if self._picture is not None else "a grey field"
        alt = f"Mask of {layer.layer}, head {head}, for the token at row {row}, column {column}, over {over}"
        drawn = overlay_image(picture, layer, values, row=row, column=column)
        self._overlay.set_content(html.part("image", drawn, alt, "picture"))


def data_from_url(url: object) -> bytes:
    """Decode the PNG data URL that a browser sends.  Errors: InputError when ``url`` is not a PNG data URL."""
    prefix = "data:image/png;base64,"
    if not isinstance(url, str) or not url.startswith(prefix):
        raise InputError("the drawing: expected a PNG as a data URL, got other data")
    try:
        return base64.b64decode(url.removeprefix(prefix), validate=True)
    except (binascii.Error, ValueError) as exc:
        raise InputError("the drawing: expected a PNG as a data URL, got damaged base64") from exc


def _heads(count: int) -> dict[int, str]:
    return {0: "all heads"} if count == 1 else {head: f"head {head}" for head in range(count)}


def _grey_field() -> Image.Image:
    from PIL import Image

    return Image.new("L", (1, 1), 200)
