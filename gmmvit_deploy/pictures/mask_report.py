"""The masks of a checkpoint as one self-contained page: pictures and numbers, on a phone and in print."""

from __future__ import annotations

import base64
import io
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

from gmmvit_deploy.checkpoints.loading import LoadedCheckpoint
from gmmvit_deploy.checkpoints.report import describe_checkpoint
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.pages import definitions, page
from gmmvit_deploy.pictures.mask_images import colour_limit, matrix_image, position_maps_image, sheet
from gmmvit_deploy.pictures.mask_numbers import NEAR, HeadNumbers, LayerMasks, masks_of
from gmmvit_deploy.writing import new_file

__all__ = ["page_of", "write_report"]

_STYLE = """
.heads { display: grid; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); gap: 1rem; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: .5rem; }
.pair img { width: 100%; image-rendering: pixelated; border: 1px solid #bbb; box-sizing: border-box; }
@media print { .heads { grid-template-columns: repeat(3, 1fr); } }
"""


def write_report(loaded: LoadedCheckpoint, path: Path, *, force: bool = False) -> list[LayerMasks]:
    """Write the report to ``path``: a page (.html) or one picture (.png).  Returns the masks it shows.

    Errors: InputError on another suffix, or a model without masks as a picture; OutputError.
    """
    suffix = path.suffix.lower()
    if suffix not in (".html", ".png"):
        raise InputError(f"{path}: a report is a .html page or a .png picture")
    layers = masks_of(loaded.model)
    if suffix == ".png":
        if not layers:
            raise InputError(
                f"{loaded.file.path}: it has no masks to draw",
                hint="type --report FILE.html for the rest of the report",
            )
        title = f"{loaded.file.path.name}: {loaded.spec.family}, {loaded.spec.mask}"
        data = _png(sheet(layers, title=title))
    else:
        data = page_of(loaded, layers).encode()
    with new_file(path, force=force) as file:
        file.write(data)
    return layers


def page_of(loaded: LoadedCheckpoint, layers: list[LayerMasks]) -> str:
    """The HTML text.  Nothing in it is fetched from elsewhere."""
    described = describe_checkpoint(loaded)
    body = [
        f"<h1>{escape(loaded.file.path.name)}: masks of a {escape(loaded.spec.family)}</h1>",
        _summary(described),
        _audit(described["audit"]),
        _legend(layers),
        *(_layer(layer) for layer in layers),
    ]
    return page(f"Masks of {loaded.file.path.name}", "".join(body), style=_STYLE)


def _summary(described: dict[str, Any]) -> str:
    sizes = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in described["spec"].items() if k not in ("family", "mask"))
    rows = {
        "mask": described["mask_description"],
        "sizes": sizes,
        "trainable parameters": f"{described['trainable_parameters']:,}",
        "multiply-accumulates": f"{described['macs'] / 1e6:,.1f} M an image",
        "SHA-256": described["checkpoint"]["sha256"],
    }
    return definitions(rows)


def _audit(findings: list[dict[str, str]]) -> str:
    if not findings:
        return "<p>Audit: nothing odd.</p>"
    items = "".join(
        f'<li><span class="{f["severity"]}">{f["severity"]}</span> {escape(f["where"])}: {escape(f["what"])}</li>'
        for f in findings
    )
    return f"<h2>Audit</h2><ul>{items}</ul>"


def _legend(layers: list[LayerMasks]) -> str:
    if not layers:
        return "<p>A plain model: its attention has no mask.</p>"
    return (
        '<p class="quiet">Left: the mask as a matrix, a row for each token that asks. Right: one small map for each '
        "token position, showing what that token may look at. White is 0, blue above, red below, on one scale for all "
        "heads of a layer. Masses are shares of the absolute mask.</p>"
    )


def _layer(layer: LayerMasks) -> str:
    limit = colour_limit(layer)
    underflow = (
        f", {layer.underflowed} of {layer.grid**4} base entries underflowed to zero" if layer.underflowed else ""
    )
    figures = "".join(_head(layer, head) for head in range(len(layer.heads)))
    kernels = _kernel_table(layer) if layer.heads[0].alpha else ""
    return (
        f"<h2>{escape(layer.layer)}</h2>"
        f'<p class="quiet">{layer.grid}×{layer.grid} tokens; full colour at ±{limit:.3g}{underflow}</p>'
        f'<div class="heads">{figures}</div>{kernels}'
    )


def _head(layer: LayerMasks, head: int) -> str:
    numbers = layer.heads[head]
    name = f"head {head}" if len(layer.heads) > 1 else "all heads"
    pictures = "".join(
        f'<img alt="{escape(layer.layer)} {name}: {what}" src="data:image/png;base64,{_encoded(image)}">'
        for what, image in (
            ("mask matrix", matrix_image(layer, head)),
            ("one map a token", position_maps_image(layer, head)),
        )
    )
    return (
        f'<figure><div class="pair">{pictures}</div><figcaption><b>{name}</b>{_caption(numbers)}</figcaption></figure>'
    )


def _caption(numbers: HeadNumbers) -> str:
    near = ", ".join(f"≤{d}: {share:.0%}" for d, share in zip(NEAR, numbers.within, strict=True))
    far = 1 - numbers.within[-1]
    dead = f"; dead kernels {', '.join(map(str, numbers.dead))}" if numbers.dead else ""
    return (
        f"mass at distance {near}, farther: {far:.0%}<br>gives itself {numbers.itself:.2g}× the mean; "
        f"{numbers.negative:.0%} negative; {numbers.smallest:.3g} to {numbers.largest:.3g}{dead}"
    )


def _kernel_table(layer: LayerMasks) -> str:
    count = len(layer.heads[0].alpha)
    head = "<tr><th>kernel</th>" + "".join(f"<th>α, σ of head {h}</th>" for h in range(len(layer.heads))) + "</tr>"
    rows = "".join(
        f"<tr><td>{k}</td>" + "".join(f"<td>{h.alpha[k]:.3g}, {h.sigma[k]:.3g}</td>" for h in layer.heads) + "</tr>"
        for k in range(count)
    )
    return f'<div class="scroll"><table>{head}{rows}</table></div>'


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _encoded(image: Image.Image) -> str:
    # Few colours are enough for the eye, and a page of hundreds of pictures stays light.
    return base64.b64encode(_png(image.quantize(64))).decode()
