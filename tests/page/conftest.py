"""A Chromium, a page in a process of its own, and proof that neither reaches another machine."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from PIL import Image

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.demo._digits import load_digit_images, train
from gmmvit_deploy.demo.models import OwnModel, save_checkpoint
from gmmvit_deploy.export.bundle_from_checkpoint import bundle_from_checkpoint
from gmmvit_deploy.images.datasets import dataset
from gmmvit_deploy.page.server import LOOPBACK
from tests.browser import open_chromium
from tests.conftest import cifar_options, once

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SCREENSHOTS = os.environ.get("GMMVIT_SCREENSHOTS")
"""Folder for screenshots: GMMVIT_SCREENSHOTS=docs/pages/screenshots renews the documentation's screenshots."""
_EPOCHS = 30 if SCREENSHOTS else 4  # a test run without screenshots needs no good model

# An audit hook records the connections of the process that serves the page.
_AUDITED = """
import sys
log = open(sys.argv.pop(1), "a", buffering=1)

def on_event(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        address = arguments[1] if event != "socket.getaddrinfo" else arguments[0]
        print(event, address[0] if isinstance(address, tuple) else address, file=log)

sys.addaudithook(on_event)
from gmmvit_cli.main import main
main()
"""


@dataclass(frozen=True)
class Served:
    """A page.  connections: lines of the audit, ``EVENT ADDRESS``."""

    url: str
    process: subprocess.Popen[str]
    log: Path

    @property
    def connections(self) -> list[str]:
        return self.log.read_text().splitlines()


@contextlib.contextmanager
def served(bundle: Bundle, folder: Path, *options: str) -> Iterator[Served]:
    """Run ``gmmvit page BUNDLE`` in a process of its own, and stop it at the end as a user does."""
    log = folder / "connections.txt"
    log.touch()
    (folder / "bundle").symlink_to(bundle.path)
    command = [sys.executable, "-c", _AUDITED, str(log), "page", "bundle", "--port", "0", "--json", *options]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=(folder / "stderr.txt").open("w"), text=True
    )
    try:
        lines: list[str] = []
        while not lines or lines[-1] != "}\n":
            line = process.stdout.readline() if process.stdout else ""
            assert line, (folder / "stderr.txt").read_text()
            lines.append(line)
        yield Served(json.loads("".join(lines))["url"], process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def digits_bundle(shared: Path) -> Bundle:
    """The demo's model, trained for a few seconds."""

    def make(out: Path) -> None:
        checkpoint = out.with_name("digits_for_the_page.pth")
        own = OwnModel()
        save_checkpoint(train(load_digit_images(own), own, epochs=_EPOCHS), checkpoint, epoch=_EPOCHS)
        known = dataset("digits")
        options = cifar_options(mean=known.mean, std=known.std, labels=known.labels)
        bundle_from_checkpoint(checkpoint, out, options)

    return once(shared / "digits_for_the_page", make)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Module scope, because no other code can use asyncio while the browser is open.  Only names of this machine
    resolve, whatever a page requests.
    """
    with open_chromium("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1") as browser:
        yield browser


_AT_REST = """() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(
  document.getAnimations().every((each) => each.playState !== "running"
    || each.effect.getComputedTiming().endTime === Infinity)))))"""
"""Waits two frames, so that an animation that a click has started is listed."""


class Visitor:
    """A browser window.  requests: every address that it requested, sockets included."""

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1000, "height": 760}, **options})
        self.requests: list[str] = []
        self.problems: list[str] = []
        self.page: Page = self.context.new_page()
        self.context.on("request", lambda request: self.requests.append(request.url))
        self.page.on("websocket", lambda socket: self.requests.append(socket.url))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.set_default_timeout(15_000)
        self.page.goto(url)
        self.page.wait_for_selector(".try h1")
        # The page reloads itself if its first connection fails, and a reload takes the focus away.
        self.page.wait_for_function("window.did_handshake")

    def foreign(self) -> list[str]:
        """Return the requests that left this machine; pictures embedded in the page do not count."""
        return [
            url
            for url in self.requests
            if urlsplit(url).scheme not in ("data", "blob") and urlsplit(url).hostname not in LOOPBACK
        ]

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def at_rest(self) -> None:
        """Wait until the animations of tabs and buttons have ended; those without an end go on."""
        self.page.wait_for_function(_AT_REST)

    def screenshot(self, name: str, *, full: bool = True) -> None:
        """Write a picture for the documentation, if asked for."""
        if SCREENSHOTS:
            self.at_rest()
            picture = Image.open(io.BytesIO(self.page.screenshot(full_page=full)))
            picture.convert("RGB").quantize(128).save(Path(SCREENSHOTS) / f"page_{name}.png", optimize=True)

    def close(self) -> None:
        self.context.close()
