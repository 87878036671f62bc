"""What a path probably is, by its name: for the words of an error."""

from __future__ import annotations

from pathlib import Path

from gmmvit_deploy.errors import BundleError

WEIGHTS_SUFFIXES = (".pth", ".pt", ".tar", ".ckpt", ".bin", ".safetensors")


def refuse_checkpoint(path: Path) -> None:
    """Errors: BundleError when the path of a bundle is a file of weights or a model folder."""
    if (path.is_file() and path.suffix in WEIGHTS_SUFFIXES) or (path / "config.json").is_file():
        raise BundleError(
            f"{path}: expected a bundle, got a checkpoint",
            hint=f"type gmmvit export {path} -o BUNDLE, then give BUNDLE",
        )
