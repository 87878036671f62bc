from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gmmvit_cli.models import CLASS_OF_BUNDLE, permit_class
from gmmvit_cli.options import CPU_KERNELS, SERVED_NAME, access_from, cpu_kernels_from
from gmmvit_cli.output import note, print_json
from gmmvit_cli.panels import INPUT, JSON_OPTION, TARGET, Panel, together
from gmmvit_cli.progress import progress

if TYPE_CHECKING:
    from gmmvit_deploy.runtimes.programs.access import Access

EXAMPLE = """gmmvit page bundle
gmmvit page bundle --url grpc://localhost:8001 --port 0"""

_PAGE = Panel("Page")


def _require_url(text: str) -> None:
    from gmmvit_deploy.runtimes.programs.access import parse_url

    parse_url(text)


def page(
    bundle: Path = INPUT.argument("BUNDLE", "The bundle to try."),
    host: str = _PAGE.option(
        "ADDRESS",
        "Address to listen on. Other machines can open the page, without a password, unless the address is "
        "loopback (127.0.0.1).",
        default="127.0.0.1",
    ),
    port: int = _PAGE.option("PORT", "Port to listen on; 0 chooses a free port.", default=8090, min=0, max=65535),
    url: str | None = TARGET.option(
        "URL",
        "Also classify with this Triton server (grpc://HOST:PORT or http://HOST:PORT; with TLS, grpcs:// or "
        "https://), and show whether the logits of the server and of this machine agree with PyTorch.",
        read=_require_url,
    ),
    access: partial[Access] = together(access_from),
    served_name: str = SERVED_NAME,
    model: str | None = CLASS_OF_BUNDLE,
    cpu_kernels: str | None = CPU_KERNELS,
    as_json: bool = JSON_OPTION,
) -> None:
    """A bundle is the folder that gmmvit export writes. The page shows the labels of an image with their probabilities,
    the image after preprocessing, the attention masks, and the time of each step. The command prints the address of
    the page and serves it until Ctrl-C or SIGTERM. The page needs no internet connection.
    """
    kernels = cpu_kernels_from(cpu_kernels)
    with progress("page") as on_progress:
        from gmmvit_deploy.bundle.artifacts import open_bundle
        from gmmvit_deploy.progress import Progress

        on_progress(Progress("open the bundle"))
        opened = open_bundle(bundle)
        permit_class(opened, model)

        # Imports PyTorch: a bundle that is missing is refused without it.
        from gmmvit_deploy.page.server import is_loopback, listening_socket, require_page_library, serve_page
        from gmmvit_deploy.page.trial import Trial

        require_page_library()
        listener = listening_socket(host, port)
        on_progress(Progress("load the model"))
        trial = Trial(opened, url=url, model=served_name, access=access(), cpu_kernels=kernels != "off")

    def ready(address: str) -> None:
        if as_json:
            print_json({"url": address, "bundle": str(bundle), "sha256": opened.sha256, "server": url})
        else:
            typer.echo(f"ready: {address}")

    if not is_loopback(host):
        note(f"warning: every machine that can reach {host} can use this page")
    with trial:
        serve_page(trial, listener, on_ready=ready)
