"""Write a report about a checkpoint, as a page (.html) or as a picture (.png).

The page shows pictures and measurements of the masks, of the other steps on the attention scores, of the patch
embedding and of the position embeddings, and needs no other file. The picture shows the masks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gmmvit_deploy.checkpoints.audit import DEAD_MASK, layer_of
from gmmvit_deploy.checkpoints.loading import LoadedCheckpoint, describe_checkpoint
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.files.writing import new_file
from gmmvit_deploy.reports.pages import Figure, Outcome, Summary, VerdictWord, png, rendered
from gmmvit_deploy.reports.pictures.drawings import Drawings, drawings_of, page_values
from gmmvit_deploy.reports.pictures.mask_images import colour_end, matrix_image, position_maps_image, sheet
from gmmvit_deploy.reports.pictures.mask_numbers import NEAR, LayerMasks, masks_of

_SEVERITIES: Mapping[str, Outcome] = {"error": "failed", "warning": "undecided", "note": "skipped"}
_BUILT_FROM_ARGUMENTS = ("timm", "custom")
"""Families whose architecture the user or the file names."""


def write_report(loaded: LoadedCheckpoint, path: Path, *, force: bool = False) -> dict[str, Any]:
    """Write the report to ``path``, as a page (.html) or a picture of the masks (.png).

    Returns what `describe_checkpoint` returns, and the numbers of the masks.
    Errors: InputError for another suffix, or a picture without masks; OutputError.
    """
    suffix = path.suffix.lower()
    if suffix not in (".html", ".png"):
        raise InputError(f"{path}: expected a report with the suffix .html (page) or .png (picture)")
    described, drawings = describe_checkpoint(loaded), drawings_of(loaded.model)
    dead = {finding["where"] for finding in described["audit"] if finding["what"] == DEAD_MASK}
    layers = [replace(layer, dead=layer_of(layer.layer) in dead) for layer in masks_of(loaded.model)]
    if suffix == ".png" and not layers:
        raise InputError(
            f"{loaded.file.path}: the model has no masks to draw",
            hint="type --report FILE.html for a page with the audit, the sizes of the model, the other steps on "
            "the attention scores, the memories, and the patch and position embeddings",
        )
    title = f"{loaded.file.path.name}: {loaded.spec.title}"
    with new_file(path, force=force) as file:
        page = suffix == ".html"
        file.write(page_of(loaded, layers, described, drawings).encode() if page else png(sheet(layers, title=title)))
    return {**described, "report": str(path), "masks": [layer.to_json() for layer in layers]}


def page_of(
    loaded: LoadedCheckpoint, layers: list[LayerMasks], described: Mapping[str, Any], drawings: Drawings
) -> str:
    """Return the page as HTML.  described, drawings: of `describe_checkpoint` and `drawings_of`."""
    return rendered(
        "reports/templates/checkpoint.html",
        title=f"{loaded.file.path.name}: masks, steps and embeddings of {loaded.spec.description}",
        summary=_verdict(described),
        model=_model(described),
        audit=[
            (VerdictWord(_SEVERITIES[finding["severity"]], finding["severity"]), finding["where"], finding["what"])
            for finding in described["audit"]
        ],
        unused=list(described["unused_keys"].items()),
        kind=loaded.spec.mask.kind,
        layers=list(map(_layer, layers)),
        **page_values(drawings),
    )


def _verdict(described: Mapping[str, Any]) -> Summary:
    findings = described["audit"]
    errors = [finding for finding in findings if finding["severity"] == "error"]
    warnings = [finding for finding in findings if finding["severity"] == "warning"]
    outcome: Outcome = "failed" if errors else "undecided" if warnings else "passed"
    words = {"failed": "UNUSABLE", "undecided": "WARNINGS", "passed": "NO WARNINGS", "skipped": ""}
    count = len(errors) + len(warnings)
    if outcome == "passed":
        sentence = "Every key is used or known to be unused, and the audit has no warnings."
    else:
        sentence = f"Examine {count} finding{'s' * (count > 1)} of the audit before the export."
    return Summary(
        outcome=outcome,
        word=words[outcome],
        sentence=f"The file holds {described['model']}. {sentence}",
        changes=(
            *(f"{finding['where']}: {finding['what']}" for finding in (*errors, *warnings)),
            *_other_options(described),
            "The export: this page does not check the exported model; gmmvit export and gmmvit parity check it",
            f"Another file: this page covers only the file with SHA-256 {described['checkpoint']['sha256']}",
        ),
    )


def _other_options(described: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a line that names the values that options or presets state, or no line if the tensors show all values."""
    origins = [f"{name.replace('_', ' ')} ({where})" for name, where in described.get("taken_from", {}).items()]
    if described["mask"] == "gmm":
        origins.append(f"mask form (--set closed_form={'yes' if described['spec']['mask']['closed_form'] else 'no'})")
    if described["family"] in _BUILT_FROM_ARGUMENTS:
        origins.append("architecture and its arguments (--model and --model-args, or the entries of the file)")
    return (f"Other options: options, presets or defaults state {', '.join(origins)}",) if origins else ()


def _model(described: Mapping[str, Any]) -> dict[str, str]:
    sizes = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in described["spec"].items() if k not in ("family", "mask"))
    return {
        "model": described["model"],
        "sizes": sizes,
        "trainable parameters": f"{described['trainable_parameters']:,}",
        "multiply-accumulates": f"{described['macs'] / 1e6:,.1f} million per image",
        "SHA-256": described["checkpoint"]["sha256"],
        **{f"origin of {name.replace('_', ' ')}": where for name, where in described.get("taken_from", {}).items()},
    }


def _layer(layer: LayerMasks) -> dict[str, Any]:
    limit, (rows, columns) = colour_end(layer.matrices), layer.grid
    underflow = (
        f", {layer.underflowed} of {(rows * columns) ** 2} entries of the stored base underflowed to zero"
        if layer.underflowed
        else ""
    )
    names = [f"head {head}" for head in range(len(layer.heads))] if len(layer.heads) > 1 else ["all heads"]
    return {
        "name": layer.layer,
        "dead": f"{DEAD_MASK[0].upper()}{DEAD_MASK[1:]}." if layer.dead else "",
        "note": f"{rows}×{columns} tokens; full colour at ±{limit:.3g}{underflow}",
        "heads": [_head(layer, head, name) for head, name in enumerate(names)],
        "kernel_head": ["kernel", *(f"α, σ of {name}" for name in names)],
        "kernels": [
            (str(kernel), *(f"{head.alpha[kernel]:.3g}, {head.sigma[kernel]:.3g}" for head in layer.heads))
            for kernel in range(len(layer.heads[0].alpha))
        ],
    }


def _head(layer: LayerMasks, head: int, name: str) -> Figure:
    numbers = layer.heads[head]
    near = ", ".join(f"≤{d}: {share:.0%}" for d, share in zip(NEAR, numbers.within, strict=True))
    far = 1 - numbers.within[-1]
    dead = f"; kernels without effect: {', '.join(map(str, numbers.dead))}" if numbers.dead else ""
    return Figure(
        name,
        (
            f"mass at distance {near}, farther: {far:.0%}",
            f"own token: {numbers.itself:.2g}× the mean of all entries; {numbers.negative:.0%} negative; "
            f"{numbers.smallest:.3g} to {numbers.largest:.3g}{dead}",
        ),
        (
            (f"{layer.layer} {name}: mask matrix", matrix_image(layer, head)),
            (f"{layer.layer} {name}: a map for each token", position_maps_image(layer, head)),
        ),
    )
