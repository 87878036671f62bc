"""Train the paper's five networks on a task that is hard enough to tell int8 from float32.

The networks are the presets vit, swin, cait, pit and t2t (32×32, GMM masks with K = 5 a head). They read a character:
one of 32 letters and digits, rendered from fonts of Debian and distorted. A font is used for training, for calibration
or for judging, never for two of these, and neither is another font of the same package.

The folder OUTPUT gets

    FAMILY.pth          a checkpoint for `gmmvit export`, with preprocessing and labels
    trained.json        top-1 of each network on the judged images, and how it was trained
    data/calibration.npz, data/judged.npz, data/shifted.npz     images for --calibration and --data, as array:PATH
    data/labels.txt     the names of the classes
    glyphs/*.npz        the rendered characters; if they are there, no font is needed

The shifted images show the same characters as the judged images, with less contrast, more blur and more noise.

    python benchmarks/trained_networks.py [--family vit] [--epochs N] [--device cuda] [--check] [--output FOLDER]

On a CPU, the networks are trained in turn, in half an hour on two cores with bf16; on a GPU, at the same time.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import shutil
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional

from benchmarks.shared.options import parsed, script_parser
from benchmarks.shared.places import FAMILIES
from gmmvit_deploy.checkpoints.reading import IMAGES_METADATA_KEY, MODEL_METADATA_KEY, WEIGHTS_METADATA_KEY
from gmmvit_deploy.images.spec import ImageSpec
from gmmvit_deploy.models.families import model_from_spec, preset_spec, spec_to_json
from gmmvit_deploy.models.specs import MaskSpec

CHARACTERS = "23456789ABCDEFGHJKLMNPQRSTUVWXYZ"  # without 0, 1, O and I, which many fonts draw alike
SIDE = 32
CANVAS = 48
CAPITAL = 28
"""Pixels: the side of an image, the side of a rendered character with its margin, and the height of its capitals."""
IMAGE = ImageSpec(height=SIDE, width=SIDE, channels=3, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
BATCH = 32
FONTS_OF_A_PACKAGE = 8
"""At most, so that packages with many styles do not outweigh the others."""

PACKAGES = {
    "train": """
        fonts-adf-accanthis fonts-adf-baskervald fonts-adf-berenis fonts-adf-gillius fonts-adf-libris fonts-adf-romande
        fonts-adf-switzera fonts-adf-universalis fonts-adf-verana fonts-aenigma fonts-agave fonts-averia-gwf
        fonts-averia-sans-gwf fonts-averia-serif-gwf fonts-b612 fonts-cabin fonts-century-catalogue fonts-clear-sans
        fonts-comfortaa fonts-comic-neue fonts-courier-prime fonts-crosextra-carlito fonts-dejavu-core fonts-dosis
        fonts-dustin fonts-ebgaramond fonts-fanwood fonts-fantasque-sans fonts-femkeklaver fonts-firacode
        fonts-freefont-ttf fonts-georgewilliams fonts-go fonts-hack fonts-humor-sans fonts-jetbrains-mono
        fonts-johnsmith-induni fonts-junction fonts-junicode fonts-karla fonts-kaushanscript fonts-lato
        fonts-leckerli-one fonts-levien-museum fonts-liberation fonts-linuxlibertine fonts-lmodern fonts-lobster
        fonts-lobstertwo fonts-manrope fonts-mononoki fonts-ocr-a fonts-oldstandard fonts-open-sans fonts-opendyslexic
        fonts-paratype fonts-quicksand fonts-roboto-unhinted fonts-roboto-slab fonts-sil-charis fonts-sil-gentium
        fonts-sjfonts fonts-solide-mirage fonts-sora fonts-texgyre fonts-ubuntu-title fonts-urw-base35 fonts-yrsa-rasa
        """,
    "calibration": """
        fonts-adf-irianis fonts-adf-tribun fonts-cantarell fonts-crosextra-caladea fonts-dkg-handwriting
        fonts-goudybookletter fonts-inconsolata fonts-jura fonts-league-spartan fonts-ocr-b fonts-opendin
        fonts-quattrocento fonts-summersby fonts-tuffy
        """,
    "judged": """
        fonts-adf-ikarius fonts-adf-mekanus fonts-adf-oldania fonts-adf-solothurn fonts-anonymous-pro fonts-arapey
        fonts-breip fonts-cardo fonts-dancingscript fonts-ecolier-court fonts-essays1743 fonts-gfs-neohellenic
        fonts-levien-typoscript fonts-lindenhill fonts-monofur fonts-national-park fonts-oxygen fonts-play
        fonts-prociono fonts-rufscript fonts-sil-andika fonts-tomsontalks fonts-vollkorn fonts-yanone-kaffeesatz
        """,
}
"""The Debian packages of fonts of each split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distortion:
    """How an image is changed; each field is a range from which every image has its own value.

    contrast: the difference between character and background, of 1.  blur: the share of the blurred image.
    noise: the standard deviation of the noise of a pixel, of 1.
    """

    contrast: tuple[float, float] = (0.45, 0.8)
    blur: tuple[float, float] = (0.0, 0.5)
    noise: tuple[float, float] = (0.0, 0.08)


TRAINED = Distortion()
SHIFTED = Distortion(contrast=(0.3, 0.55), blur=(0.4, 0.8), noise=(0.06, 0.12))
WRITTEN = {"calibration": (64, TRAINED, 0.6), "judged": (320, TRAINED, 0.6), "shifted": (320, SHIFTED, 0.8)}
"""File of images → images of a class, distortion and its strength.  Training ends with strength 1."""


def rendered(fonts: list[ImageFont.FreeTypeFont]) -> tuple[np.ndarray, np.ndarray]:
    """Return the characters of the fonts as uint8 (n, CANVAS, CANVAS), and their classes.

    A font that lacks a character, or draws two alike, is left out: it holds symbols or another script.
    """
    glyphs, classes = [], []
    for font in fonts:
        drawn = [_drawn(font, character) for character in CHARACTERS]
        if len({glyph.tobytes() for glyph in drawn}) == len(CHARACTERS) and all(glyph.max() > 0 for glyph in drawn):
            glyphs += drawn
            classes += range(len(CHARACTERS))
    return np.stack(glyphs), np.array(classes)


def _drawn(font: ImageFont.FreeTypeFont, character: str) -> np.ndarray:
    left, top, right, bottom = font.getbbox(character)
    width, height = max(int(right - left), 1), max(int(bottom - top), 1)
    image = Image.new("L", (width, height))
    ImageDraw.Draw(image).text((-left, -top), character, fill=255, font=font)
    image.thumbnail((CANVAS - 4, CANVAS - 4))
    canvas = Image.new("L", (CANVAS, CANVAS))
    canvas.paste(image, ((CANVAS - image.width) // 2, (CANVAS - image.height) // 2))
    return np.asarray(canvas)


def fonts_of(packages: list[str]) -> list[ImageFont.FreeTypeFont]:
    """Return fonts of the packages, evenly spaced if a package has many, in a size with capitals of CAPITAL pixels.

    Errors: SystemExit with the command that installs what is missing.
    """
    if shutil.which("dpkg") is None:
        raise SystemExit(
            "Error: the fonts are those of Debian's packages, and this machine has no dpkg\n"
            "hint: add --glyphs with the characters that this script rendered on Debian"
        )
    listed = {name: _files_of(name) for name in packages}
    missing = [name for name, files in listed.items() if not files]
    if missing:
        raise SystemExit(
            f"Error: {len(missing)} of {len(packages)} packages with fonts are not installed\n"
            f"hint: apt-get install {' '.join(missing)}"
        )
    fonts = []
    for files in listed.values():
        for number in np.unique(np.linspace(0, len(files) - 1, FONTS_OF_A_PACKAGE).astype(int)):
            font = ImageFont.truetype(files[number], 64)
            _, top, _, bottom = font.getbbox("H")
            fonts.append(font.font_variant(size=round(64 * CAPITAL / max(bottom - top, 16))))
    return fonts


def _files_of(package: str) -> list[str]:
    done = subprocess.run(["dpkg", "-L", package], capture_output=True, text=True, check=False)
    return sorted(line for line in done.stdout.splitlines() if line.lower().endswith((".ttf", ".otf")))


def glyphs_of(folder: Path, split: str, *, check: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Read the rendered characters of a split, or render and write them.  check: of the font in Pillow."""
    path = folder / f"{split}.npz"
    if not path.is_file():
        fonts = [ImageFont.load_default(30)] if check else fonts_of(PACKAGES[split].split())
        glyphs, classes = rendered(fonts)
        folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, glyphs=glyphs, classes=classes)
        print(f"{split}: {len(glyphs) // len(CHARACTERS)} of {len(fonts)} fonts", flush=True)
    with np.load(path) as stored:
        return stored["glyphs"], stored["classes"]


def distorted(glyphs: Tensor, distortion: Distortion, random: torch.Generator, strength: float = 1.0) -> Tensor:
    """Distort characters uint8 (n, CANVAS, CANVAS) to images: whole numbers of 0 to 255, float32 (n, 3, SIDE, SIDE).

    A character is rotated, sheared, scaled, moved and warped, and gets a neighbour at its side, a tint, a dark and
    uneven background, blur and noise.  strength: 0 for white on black in the middle, 1 for all of that.
    """
    count, device = len(glyphs), glyphs.device

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *(shape or (1, 1, 1)), generator=random, device=device)

    def normal(*shape: int) -> Tensor:
        return strength * torch.randn(count, *shape, generator=random, device=device)

    def around_zero(most: float, *shape: int) -> Tensor:
        return strength * uniform(-most, most, *shape)

    angle, shear, scale = around_zero(0.2, 1), around_zero(0.15, 1), 0.95 + around_zero(0.12, 1)
    cos, sin = torch.cos(angle) / scale, torch.sin(angle) / scale
    rows = torch.stack([torch.cat([cos, shear - sin], 1), torch.cat([sin, cos], 1)], 1)
    moved = torch.cat([rows, around_zero(0.1, 2, 1)], 2)
    grid = functional.affine_grid(moved, [count, 1, SIDE, SIDE], align_corners=False)
    warp = functional.interpolate(0.045 * normal(2, 5, 5), (SIDE, SIDE), mode="bicubic", align_corners=True)
    grid = grid + warp.permute(0, 2, 3, 1)
    coverage = glyphs[:, None].float() / 255
    character = functional.grid_sample(coverage, grid, align_corners=False)
    side = torch.sign(uniform(-1, 1, 1)) * uniform(1.0, 1.5, 1)
    aside = torch.cat([side, uniform(-0.3, 0.3, 1)], 1)[:, None, None]
    neighbour = functional.grid_sample(coverage.roll(1, 0), grid + aside, align_corners=False)

    background = strength * uniform(0, 0.2, 3, 1, 1)
    difference = torch.lerp(torch.ones(1, device=device), uniform(*distortion.contrast), strength) + 0.1 * normal(
        3, 1, 1
    )
    uneven = functional.interpolate(0.06 * normal(3, 4, 4), (SIDE, SIDE), mode="bicubic", align_corners=True)
    both = torch.maximum(character, strength * uniform(0.2, 0.6) * neighbour)
    images = background + uneven + difference * both

    offsets = torch.arange(-2, 3, device=device)
    weights = torch.exp(-(offsets**2) / (2 * 1.2**2))
    kernel = torch.outer(weights, weights)
    kernel = (kernel / kernel.sum()).expand(3, 1, 5, 5)
    blurred = functional.conv2d(functional.pad(images, (2, 2, 2, 2), mode="replicate"), kernel, groups=3)
    images = torch.lerp(images, blurred, strength * uniform(*distortion.blur))
    images = images + uniform(*distortion.noise) * normal(3, SIDE, SIDE)
    return (255 * images).clamp(0, 255).round()


def write_data(folder: Path, glyphs: Path, *, check: bool) -> None:
    """Write the images for calibration and for judging, computed on the CPU, so that they do not depend on a GPU."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "labels.txt").write_text("\n".join(CHARACTERS) + "\n", encoding="utf-8")
    for name, (count, distortion, strength) in WRITTEN.items():
        stored, classes = glyphs_of(glyphs, "calibration" if name == "calibration" else "judged", check=check)
        choice = np.random.default_rng(1)
        count = 2 if check else count
        chosen = np.concatenate([choice.choice(np.flatnonzero(classes == n), count) for n in range(len(CHARACTERS))])
        chosen = choice.permutation(chosen)
        random = torch.Generator().manual_seed(2)
        parts = [torch.from_numpy(stored[part]) for part in np.split(chosen, 32)]
        images = torch.cat([distorted(part, distortion, random, strength) for part in parts])
        pixels = images.permute(0, 2, 3, 1).to(torch.uint8).numpy()
        np.savez(folder / f"{name}.npz", images=pixels, labels=classes[chosen])


def normalised(images: Tensor) -> Tensor:
    """Return what the network takes, from pixels of 0 to 255, as a server computes it with IMAGE."""
    return (images / 255 - 0.5) / 0.25


@torch.no_grad()
def start(network: torch.nn.Module) -> None:
    """Change the random weights so that the loss falls from the first steps, not after a thousand.

    At the start, every block adds little to its input, tokens at different places differ, and what the class token
    gathers from the image is not small beside the token itself.
    """
    for name, module in network.named_modules():
        if isinstance(module, torch.nn.Linear) and name.endswith(("attention.out", "mlp.2")):
            module.weight.mul_(0.1)
            module.bias.zero_()
    for name, parameter in network.named_parameters():
        if name == "position_embedding":
            parameter.normal_(std=0.5)
        elif name == "class_token":
            parameter.normal_(std=0.02)


def trained(family: str, output: Path, glyphs: Path, *, device: str, epochs: int) -> dict[str, Any]:
    """Train a network, write its checkpoint, and return its line of the record."""
    torch.manual_seed(0)
    spec = preset_spec(family, classes=len(CHARACTERS), image_size=SIDE, mask=MaskSpec(kind="gmm", kernels=5))
    network = model_from_spec(spec).train()
    start(network)
    network.to(device)
    characters, classes = (torch.from_numpy(array).to(device) for array in glyphs_of(glyphs, "train"))
    steps = max(epochs * len(characters) // BATCH, 1)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (0.05 * steps), 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    random = torch.Generator(device).manual_seed(3)
    began, losses = time.monotonic(), []
    for step in range(steps):
        chosen = torch.randint(len(characters), (BATCH,), generator=random, device=device)
        images = distorted(characters[chosen], TRAINED, random, min(step / (0.7 * steps), 1.0))
        with torch.autocast(device, torch.bfloat16):  # 1.6 times as fast, also on a CPU with bf16
            logits = network(normalised(images))
        loss = functional.cross_entropy(logits.float(), classes[chosen], label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        if (step + 1) % 50 == 0 or step + 1 == steps:
            mean = float(torch.stack(losses[-50:]).mean())
            print(f"{family}: {step + 1}/{steps}, loss {mean:.3f}, {time.monotonic() - began:.0f} s", flush=True)
    seconds = time.monotonic() - began
    content = {
        "model_state_dict": network.cpu().state_dict(),
        MODEL_METADATA_KEY: json.dumps(spec_to_json(spec)),
        IMAGES_METADATA_KEY: json.dumps({"image": IMAGE.to_json(), "labels": [*CHARACTERS]}),
        WEIGHTS_METADATA_KEY: "trained",
    }
    torch.save(content, output / f"{family}.pth")
    accuracies = {
        f"top1_{name}": top1(network.to(device), output / "data" / f"{name}.npz") for name in ("judged", "shifted")
    }
    return {**accuracies, "epochs": epochs, "steps": steps, "batch": BATCH, "seconds": round(seconds), "device": device}


@torch.no_grad()
def top1(network: torch.nn.Module, path: Path) -> float:
    """Return the share of the images that the network classifies correctly in float32, in percent."""
    device = next(network.parameters()).device
    with np.load(path) as stored:
        images, labels = torch.from_numpy(stored["images"]), torch.from_numpy(stored["labels"])
    network.eval()
    correct = sum(
        int((network(normalised(part.to(device).permute(0, 3, 1, 2).float())).argmax(1).cpu() == expected).sum())
        for part, expected in zip(images.split(256), labels.split(256), strict=True)
    )
    return round(100 * correct / len(labels), 2)


def main() -> None:
    parser = script_parser(__doc__, __file__, suffix="")
    parser.add_argument("--family", choices=FAMILIES, action="append", help="train only this network; can be repeated")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the rendered characters (default: 2)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--glyphs", type=Path, help="folder of the rendered characters (default: OUTPUT/glyphs)")
    arguments = parsed(parser, epochs=1)
    output, families = arguments.output, arguments.family or [*FAMILIES]
    glyphs = arguments.glyphs or output / "glyphs"
    for split in PACKAGES:
        glyphs_of(glyphs, split, check=arguments.check)
    write_data(output / "data", glyphs, check=arguments.check)
    train = partial(trained, output=output, glyphs=glyphs, device=arguments.device, epochs=arguments.epochs)
    at_once = len(families) if arguments.device == "cuda" else 1
    path = output / "trained.json"
    records = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    with ProcessPoolExecutor(at_once, multiprocessing.get_context("spawn")) as processes:
        for family, record in zip(families, processes.map(train, families), strict=True):
            print(f"{family}: {record}", flush=True)
            records[family] = record
            path.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
