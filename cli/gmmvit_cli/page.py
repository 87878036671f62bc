from __future__ import annotations

from pathlib import Path

import typer

from gmmvit_cli.access import CA, KEY_FILE, access_from
from gmmvit_cli.choices import read_by
from gmmvit_cli.models import CLASS_OF_BUNDLE, permit_class
from gmmvit_cli.options import CPU_KERNELS, INPUT, SERVED_NAME, TARGET, cpu_kernels_from
from gmmvit_cli.output import JSON_OPTION, note, print_json
from gmmvit_cli.progress import progress

EXAMPLE = """gmmvit page bundle
gmmvit page bundle --url grpc://localhost:8001 --port 0"""

_PAGE = "Page"


def _require_url(text: str) -> None:
    from gmmvit_deploy.runtimes.programs.access import parse_url

    parse_url(text)


def page(
    bundle: Path = typer.Argument(metavar="BUNDLE", rich_help_panel=INPUT, help="The bundle to try."),
    host: str = typer.Option(
        "127.0.0.1",
        metavar="ADDRESS",
        rich_help_panel=_PAGE,
        help="Address to listen on. Other machines can open the page, without a password, unless the address is "
        "loopback (127.0.0.1).",
    ),
    port: int = typer.Option(
        8080, min=0, max=65535, metavar="PORT", rich_help_panel=_PAGE, help="Port to listen on; 0 chooses a free port."
    ),
    url: str | None = typer.Option(
        None,
        metavar="URL",
        rich_help_panel=TARGET,
        callback=read_by(_require_url),
        help="Also classify with this Triton server (grpc://HOST:PORT or http://HOST:PORT; with TLS, grpcs:// or "
        "https://), and show whether the logits of the server and of this machine agree with PyTorch.",
    ),
    key_file: Path | None = KEY_FILE,
    ca: Path | None = CA,
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
        access = access_from(key_file, ca)
        trial = Trial(opened, url=url, model=served_name, access=access, cpu_kernels=kernels != "off")

    def ready(address: str) -> None:
        if as_json:
            print_json({"url": address, "bundle": str(bundle), "sha256": opened.sha256, "server": url})
        else:
            typer.echo(f"ready: {address}")

    if not is_loopback(host):
        note(f"warning: every machine that can reach {host} can use this page")
    with trial:
        serve_page(trial, listener, on_ready=ready)
