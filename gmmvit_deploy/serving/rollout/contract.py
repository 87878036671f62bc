"""Compare what two bundles promise to clients: a new bundle must take the same requests and name the same classes.

labels, input size, input type, name and meaning of the outputs, normalisation    must be equal
largest batch                                                                     must not shrink
"""

from __future__ import annotations

from gmmvit_deploy.bundle.artifacts import Bundle, Manifest
from gmmvit_deploy.errors import InputError

__all__ = ["contract_changes", "require_same_contract"]


def contract_changes(old: Manifest, new: Manifest) -> tuple[str, ...]:
    """Return a sentence for each promise of ``old`` that ``new`` does not keep; empty if clients notice no change."""
    changes = [*_changed_labels(old.labels, new.labels)]
    for name, before, after in (
        ("input type", old.input_kind, new.input_kind),
        ("input size", _size(old), _size(new)),
        ("task", old.task, new.task),
        ("outputs", _outputs(old), _outputs(new)),
    ):
        if before != after:
            changes.append(f"{name}: the served bundle has {before}, the new bundle has {after}")
    if old.image.normalisation is not None and new.image.normalisation is None:
        changes.append("encoded images: the served bundle takes PNG and JPEG, the new bundle has no mean and std")
    if new.max_batch < old.max_batch:
        changes.append(f"largest batch: the served bundle takes {old.max_batch}, the new bundle {new.max_batch}")
    return tuple(changes)


def require_same_contract(old: Bundle, new: Bundle) -> None:
    """Check that ``new`` keeps every promise of ``old``.  Errors: InputError that lists each change."""
    changes = contract_changes(old.manifest, new.manifest)
    if changes:
        listed = "".join(f"\n  {change}" for change in changes)
        raise InputError(
            f"{new.path}: clients of the served bundle {old.sha256[:12]} would notice a change:{listed}",
            hint="export a bundle with the same labels and input, or add --allow-contract-change if every client "
            "expects the change",
        )


def _size(manifest: Manifest) -> str:
    channels, height, width = manifest.image.tensor_shape
    return f"{height}×{width} pixels with {channels} channel{'' if channels == 1 else 's'}"


def _outputs(manifest: Manifest) -> str:
    return ", ".join(
        f"{output.name} of shape ({', '.join(map(str, output.shape))}), {output.meaning}" for output in manifest.outputs
    )


def _changed_labels(old: tuple[str, ...], new: tuple[str, ...]) -> tuple[str, ...]:
    if old == new:
        return ()
    if len(old) != len(new):
        return (f"labels: the served bundle has {len(old)}, the new bundle has {len(new)}",)
    index = next(index for index, (before, after) in enumerate(zip(old, new, strict=True)) if before != after)
    others = sum(before != after for before, after in zip(old, new, strict=True)) - 1
    also = f", and {others} other classes differ" if others else ""
    return (f"labels: class {index} is {old[index]!r} in the served bundle and {new[index]!r} in the new bundle{also}",)
