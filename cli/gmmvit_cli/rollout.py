from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from gmmvit_cli.options import INPUT, OUTPUT, TARGET
from gmmvit_cli.output import JSON_OPTION, complain, note, print_json
from gmmvit_deploy.errors import InputError, ServerError
from gmmvit_deploy.serving.rollout.canary import CanaryOptions

EXAMPLE = """gmmvit rollout new-bundle --to service
gmmvit rollout new-bundle --to service --canary 5% --canary-images photos/
gmmvit rollout --abort --to service"""

_CANARY = "Canary"
_DEFAULTS = CanaryOptions()


def rollout(
    bundle: Path | None = typer.Argument(
        None, metavar="BUNDLE", rich_help_panel=INPUT, help="The new bundle to serve."
    ),
    to: Path = typer.Option(
        ..., "--to", metavar="DIR", rich_help_panel=TARGET, help="State folder of the service (gmmvit serve --state)."
    ),
    canary: str | None = typer.Option(
        None,
        metavar="SHARE",
        rich_help_panel=_CANARY,
        help="Share of the requests that the new bundle gets before it gets all requests, such as 5%.",
    ),
    canary_requests: int | None = typer.Option(
        None,
        min=1,
        metavar="N",
        rich_help_panel=_CANARY,
        show_default=str(_DEFAULTS.requests),
        help="Number of requests that the new bundle must answer before the two bundles are compared.",
    ),
    canary_timeout: float | None = typer.Option(
        None,
        metavar="S",
        rich_help_panel=_CANARY,
        show_default=f"{_DEFAULTS.timeout_s:g}",
        help="Maximum time in seconds until the new bundle has answered these requests; then the rollout fails.",
    ),
    canary_slower: float | None = typer.Option(
        None,
        metavar="RATIO",
        rich_help_panel=_CANARY,
        show_default=f"{_DEFAULTS.slower:g}",
        help="Maximum ratio of the mean times of a request, new bundle divided by old bundle.",
    ),
    canary_images: list[str] = typer.Option(
        [], metavar="IMAGE|FOLDER|GLOB", rich_help_panel=_CANARY, help="Images that both bundles classify; repeatable."
    ),
    canary_agreement: float | None = typer.Option(
        None,
        metavar="SHARE",
        rich_help_panel=_CANARY,
        show_default=f"{_DEFAULTS.agreement:g}",
        help="Minimum share of the images of --canary-images that get the same label from both bundles.",
    ),
    allow_contract_change: bool = typer.Option(
        False,
        "--allow-contract-change",
        rich_help_panel=INPUT,
        help="Permit another task, other labels, inputs or outputs, or a smaller maximum batch size.",
    ),
    abort: bool = typer.Option(
        False, "--abort", rich_help_panel=OUTPUT, help="End the running rollout; the old bundle is served."
    ),
    status: bool = typer.Option(
        False,
        "--status",
        rich_help_panel=OUTPUT,
        help="Print the served bundle, the previous bundle, and the step of a rollout.",
    ),
    as_json: bool = JSON_OPTION,
) -> None:
    """A service is a running 'gmmvit serve --gateway --state DIR'. It starts a second server with the new bundle
    beside the first. If the new server gives the golden answers (the logits that are stored in its bundle) and passes
    the comparisons of --canary and --canary-images, it gets all requests, and the first server ends. Otherwise the
    first server keeps all requests, and the exit status is 1.
    """
    from gmmvit_deploy.serving.rollout.canary import share_from
    from gmmvit_deploy.serving.rollout.control import send_order

    if sum((bundle is not None, abort, status)) != 1:
        raise InputError(
            "expected BUNDLE, --abort or --status, without the other two",
            hint=f"type gmmvit rollout BUNDLE --to {to}, or gmmvit rollout --abort --to {to}",
        )
    compared = {
        "--canary-requests": canary_requests,
        "--canary-timeout": canary_timeout,
        "--canary-slower": canary_slower,
    }
    if canary is None:
        _require_needed("--canary", "--canary 5%", compared)
    if not canary_images:
        _require_needed("--canary-images", "--canary-images FOLDER", {"--canary-agreement": canary_agreement})
    order: dict[str, Any] = {"order": "abort" if abort else "status"}
    if bundle is not None:
        from gmmvit_deploy.bundle.artifacts import open_bundle

        open_bundle(bundle)  # a mistake is reported here, and not by the service
        order = {
            "order": "rollout",
            "bundle": str(bundle.absolute()),
            "canary_share": None if canary is None else share_from(canary),
            "canary_requests": canary_requests or _DEFAULTS.requests,
            "canary_timeout_s": _DEFAULTS.timeout_s if canary_timeout is None else canary_timeout,
            "canary_slower": _DEFAULTS.slower if canary_slower is None else canary_slower,
            "canary_images": _image_paths(canary_images),
            "canary_agreement": _DEFAULTS.agreement if canary_agreement is None else canary_agreement,
            "allow_contract_change": allow_contract_change,
        }
    last: dict[str, Any] = {}
    try:
        for last in send_order(to, order):
            if "step" in last:
                note(str(last["step"]))
    except (KeyboardInterrupt, SystemExit):  # SIGINT, SIGTERM
        if bundle is not None:
            complain(f"the rollout goes on; type gmmvit rollout --abort --to {to} to end it")
        raise
    if "error" in last:
        raise ServerError(str(last["error"]), hint=str(last["hint"]))
    if as_json:
        print_json(last)
    else:
        typer.echo(str(last["done"]))


def _require_needed(needed: str, typed: str, given: Mapping[str, object]) -> None:
    """Refuse options that have no effect without the option ``needed``.

    given: option → its value, or None if the option was not given.
    Errors: InputError.
    """
    for option, value in given.items():
        if value is not None:
            raise InputError(f"{option} needs {needed}", hint=f"add {typed}, or remove {option}")


def _image_paths(images: list[str]) -> list[str]:
    from gmmvit_deploy.images.data.files import image_files

    return [str(path.absolute()) for path in image_files(images)] if images else []
