from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from gmmvit_cli.options import AS_JSON
from gmmvit_cli.output import note, print_error, print_json
from gmmvit_cli.panels import INPUT, OUTPUT, TARGET, Panel
from gmmvit_deploy.errors import InputError, ServerError
from gmmvit_deploy.serving.names import DEFAULT_AGREEMENT

EXAMPLE = """gmmvit rollout new-bundle --to service
gmmvit rollout new-bundle --to service --images photos/
gmmvit rollout new-cats --to service --name cats
gmmvit rollout --abort --to service"""

_COMPARE = Panel("Comparison")


def rollout(
    bundle: Path | None = INPUT.argument("BUNDLE", "The new bundle to serve.", default=None),
    to: Path = TARGET.option("DIR", "State folder of the service (gmmvit serve --state).", default=...),
    name: str | None = TARGET.option(
        "NAME", "Model that gets the new bundle, in a service of several models.", show_default="the only model"
    ),
    images: list[str] = _COMPARE.option(
        "IMAGE|FOLDER|GLOB", "Images that both bundles classify; repeatable.", default=[]
    ),
    agreement: float | None = _COMPARE.option(
        "SHARE",
        "Minimum share of the images of --images that get the same label from both bundles.",
        show_default=f"{DEFAULT_AGREEMENT:g}",
    ),
    allow_contract_change: bool = INPUT.flag(
        "--allow-contract-change",
        "Permit another task, other labels, inputs or outputs, or a smaller maximum batch size.",
    ),
    abort: bool = OUTPUT.flag("--abort", "End the running rollout; the old bundle is served."),
    status: bool = OUTPUT.flag(
        "--status", "Print the served and the previous bundle of each model, and the step of a rollout."
    ),
    as_json: bool = AS_JSON,
) -> None:
    """A service is a running 'gmmvit serve --gateway --state DIR'. It starts a second server with the new bundle
    beside the first. If the new server gives the reference outputs (the logits that are stored in its bundle), and the
    same labels to the images of --images, it gets all requests, and the first server ends. Otherwise the first server
    keeps all requests, and the exit status is 1. Other models of the service stay as they are.
    """
    from gmmvit_deploy.serving.rollout.control import send_order

    if sum((bundle is not None, abort, status)) != 1:
        raise InputError(
            "expected BUNDLE, --abort or --status, without the other two",
            hint=f"type gmmvit rollout BUNDLE --to {to}, or gmmvit rollout --abort --to {to}",
        )
    if name is not None and bundle is None:
        raise InputError("--name needs BUNDLE", hint="remove --name")
    if agreement is not None and not images:
        raise InputError("--agreement needs --images", hint="add --images FOLDER, or remove --agreement")
    order: dict[str, Any] = {"order": "abort" if abort else "status"}
    if bundle is not None:
        from gmmvit_deploy.bundle.artifacts import open_bundle
        from gmmvit_deploy.images.data.files import image_files

        open_bundle(bundle)  # a mistake is reported here, and not by the service
        order = {
            "order": "rollout",
            "name": name,
            "bundle": str(bundle.absolute()),
            "images": [str(path.absolute()) for path in image_files(images)] if images else [],
            "agreement": DEFAULT_AGREEMENT if agreement is None else agreement,
            "allow_contract_change": allow_contract_change,
        }
    last: dict[str, Any] = {}
    try:
        for last in send_order(to, order):
            if "step" in last:
                note(str(last["step"]))
    except (KeyboardInterrupt, SystemExit):  # SIGINT, SIGTERM
        if bundle is not None:
            print_error(f"the rollout goes on; type gmmvit rollout --abort --to {to} to end it")
        raise
    if "error" in last:
        raise ServerError(str(last["error"]), hint=str(last["hint"]))
    if as_json:
        print_json(last)
    else:
        typer.echo(str(last["done"]))
