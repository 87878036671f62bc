"""The hints of errors on the way from a checkpoint to a bundle, followed: what a hint says is typed, and the export
then starts to compute. Each kind of hint is followed once.

A command of Python and the options are taken from the hint by themselves; a case names what a hint leaves to the user,
such as N, or does what the hint says to a file. Of several ways in a hint, a case follows the first.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from gmmvit_cli.main import app
from gmmvit_deploy.checkpoints._model_folder import read_checkpoint
from gmmvit_deploy.checkpoints.loading import load_checkpoint, released_state_dict
from gmmvit_deploy.checkpoints.reading import MODEL_METADATA_KEY
from gmmvit_deploy.checkpoints.weights import bytes_from_model
from gmmvit_deploy.errors import GmmvitError
from gmmvit_deploy.files.writing import sha256_of_bytes
from gmmvit_deploy.models.families import model_from_spec, preset_spec, spec_to_json
from gmmvit_deploy.models.families.custom import CustomSpec
from gmmvit_deploy.models.folding.fold import fold
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.specs import MaskSpec
from tests.checkpoints.test_training_files import OWN as OWN_CLASS
from tests.conftest import GOLDEN

TINY_ARGS: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
TINY = "vit_tiny_patch16_224"


def own_net() -> Any:
    """Return a network of the class of ``net.py`` in the current folder, which the pickles of the cases name."""
    sys.modules.pop("net", None)
    sys.path.insert(0, str(Path.cwd()))
    try:
        import net
    finally:
        sys.path.pop(0)
    return net.Net()


def state(factor: float = 1.0) -> dict[str, torch.Tensor]:
    return {name: tensor * factor for name, tensor in own_net().state_dict().items()}


def backbone() -> None:
    network = timm.create_model(TINY, num_classes=0, **TINY_ARGS)
    torch.save({"teacher": {f"backbone.{k}": v for k, v in network.state_dict().items()}}, "file.pth")


def linear_head() -> None:
    backbone()
    torch.save(torch.nn.Linear(24, 3).state_dict(), "head.pth")


def many_heads() -> None:
    backbone()
    heads = {f"classifier_{n}_blocks_avgpool_False_lr_0_1": torch.nn.Linear(24 * n, 3) for n in (2, 1)}
    held = {f"module.classifiers_dict.{n}.linear.{k}": v for n, h in heads.items() for k, v in h.state_dict().items()}
    torch.save({"linear_classifiers": held}, "head.pth")


def train_py(**changes: Any) -> Callable[[], None]:
    """Return a function that writes a checkpoint of timm's train.py; changes: of the arguments `TINY_ARGS`."""

    def write() -> None:
        arguments = {**TINY_ARGS, **changes}
        network = timm.create_model(TINY, num_classes=3, **arguments)
        stated = dict.fromkeys(("crop_pct", "mean", "std", "interpolation"))
        options = {**stated, "model": TINY, "model_kwargs": arguments}
        torch.save({"args": Namespace(**options), "state_dict": network.state_dict()}, "file.pth")

    return write


def bare(name: str = TINY, **kwargs: Any) -> Callable[[], None]:
    """Return a function that writes the state dict of a network of timm, by default with `TINY_ARGS`."""
    return saved(lambda: timm.create_model(name, num_classes=3, **(kwargs or TINY_ARGS)).state_dict())


def saved(content: Callable[[], Any]) -> Callable[[], None]:
    return lambda: torch.save(content(), "file.pth")


def golden(name: str) -> Callable[[], None]:
    return lambda: Path("file.pth").write_bytes((GOLDEN / name).read_bytes())


GMM = {"--mean": "0.5,0.5,0.5", "--std": "0.5,0.5,0.5"}
NAMES = ("airplane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def file_and(*lines: str, name: str = "names.txt", encoding: str = "utf-8") -> Callable[[], None]:
    """Return a function that writes a checkpoint of 10 classes, and a text file."""

    def write() -> None:
        golden("vit_gmm.pth")()
        Path(name).write_text("\n".join(lines), encoding=encoding)

    return write


def own_again(hint: str) -> None:
    Path("net.py").write_text(OWN_CLASS)


def weights_saved(hint: str) -> None:
    """Run the line of Python in the hint, and give the file that it writes."""
    assert "runs code in the file" in hint
    command = shlex.split(hint.partition("type python ")[2].partition(", then give ")[0])
    exec(command[1], {})  # noqa: S102 - a user types it; a Python of its own would import torch for seconds
    Path("weights.pth").rename("file.pth")


def converted(hint: str) -> None:
    command = re.search(r"iconv -f \S+ -t utf-8", hint)
    assert command is not None, hint
    made = subprocess.run([*shlex.split(command[0]), "names.txt"], capture_output=True, check=True)
    Path("names.txt").write_bytes(made.stdout)


def folder(name: str = "vit", file: str = "config.json", **changes: Any) -> Callable[[], None]:
    """Return a function that writes a model folder of transformers, with changed fields of one of its files."""

    def write() -> None:
        pytest.importorskip("transformers")
        from tests.hugging_face.folders import edited, saved

        edited(saved(name, Path("file.pth")), file, **changes)

    return write


def corrected(**changes: Any) -> Callable[[str], None]:
    """Return a function that changes fields of config.json; a value ... removes the field."""

    def correct(hint: str) -> None:
        from tests.hugging_face.folders import edited

        edited(Path("file.pth"), "config.json", **changes)

    return correct


def given(inner: str) -> Callable[[str], None]:
    """Return a function that gives ``inner``, a file of the folder, in place of the folder."""

    def give(hint: str) -> None:
        Path("file.pth").rename("folder")
        Path("folder", inner).rename("file.pth")

    return give


def without_base_masks() -> None:
    tensors = read_checkpoint(GOLDEN / "vit_gmm.pth").tensors
    torch.save({name: tensor for name, tensor in tensors.items() if ".mask.mask" not in name}, "file.pth")


def with_code(source: str) -> Callable[[], None]:
    """Return a function that writes a checkpoint of the own class, and then other code into ``net.py``."""

    def write() -> None:
        torch.save(state(), "file.pth")
        Path("net.py").write_text(source)

    return write


def bundle_of_own_class() -> None:
    """Write the weights file of a bundle of an own class, and the code, which no other case has allowed."""
    source = f"{OWN_CLASS}# not yet allowed"
    spec = CustomSpec(
        image_size=32,
        channels=3,
        classes=3,
        mask=MaskSpec(),
        code_file="net.py",
        class_name="Net",
        code_sha256=sha256_of_bytes(source.encode()),
        model_args={},
    )
    tensors = {f"network.{name}": tensor for name, tensor in state().items()}
    save_file(tensors, "file.pth", metadata={MODEL_METADATA_KEY: json.dumps(spec_to_json(spec))})
    Path("net.py").write_text(source)


def weights(name: str, **hints: Any) -> Callable[[], None]:
    """Return a function that writes the weights file of a bundle of a golden file."""
    return lambda: Path("file.pth").write_bytes(
        bytes_from_model(load_checkpoint(GOLDEN / name, LoadHints(**hints)).model)
    )


def root_mask_left_out() -> None:
    tensors = read_checkpoint(GOLDEN / "cait_plain.pth").tensors
    torch.save({name: tensor for name, tensor in tensors.items() if name != "mask"}, "file.pth")


def with_preset() -> None:
    torch.manual_seed(0)
    spec = preset_spec("vit", classes=10, image_size=32, mask=MaskSpec())
    torch.save(released_state_dict(model_from_spec(spec)), "file.pth")


def wide_head() -> None:
    backbone()
    torch.save(torch.nn.Linear(72, 3).state_dict(), "head.pth")


def two_layers() -> None:
    backbone()
    torch.save(torch.nn.Sequential(torch.nn.Linear(24, 8), torch.nn.Linear(8, 3)).state_dict(), "head.pth")


def conv_stem_folder() -> None:
    Path("file.pth").mkdir()
    Path("file.pth/config.json").write_text('{"architecture": "torchvision:VisionTransformer"}')
    tensors = read_checkpoint(GOLDEN / "timm/torchvision_vit_conv_stem.pth", "trained").tensors
    save_file(dict(tensors), f"file.pth/{WEIGHTS}")


def weights_of_folder() -> None:
    folder()()
    Path("file.pth").rename("folder")
    shutil.copy(f"folder/{WEIGHTS}", "file.pth")


def folder_again(hint: str) -> None:
    Path("file.pth").unlink()
    Path("folder").rename("file.pth")


def timm_wrapper() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.TimmWrapperConfig(architecture=TINY, model_args=TINY_ARGS, num_labels=3)
    transformers.TimmWrapperForImageClassification(config).save_pretrained("file.pth")
    corrected(architecture=...)("")  # with it, the folder is read as one of timm


def registered(hint: str) -> None:
    Path("net.py").write_text(RANDOM.replace("self.shift = rand(3)", 'self.register_buffer("shift", rand(3))'))
    torch.save(state(), "file.pth")


REGISTERS = json.loads((GOLDEN / "timm/timm_vit_registers/config.json").read_text())
OF_REGISTERS = f"--model {REGISTERS['architecture']} --model-args '{json.dumps(REGISTERS['model_args'])}'"
WEIGHTS = "model.safetensors"
TENSOR = {"--input": "tensor"}
TYPED_ARGS = json.dumps(TINY_ARGS)
OF_TIMM = {**TENSOR, "--model": TINY, "--model-args": TYPED_ARGS}
WITH_HEAD = {**OF_TIMM, "--head": "head.pth"}
MINE = {**TENSOR, "--model": "net.py:Net", "--image-size": "32", "--set channels": "3"}
STEM = {**TENSOR, "--model": "torchvision:VisionTransformer", "--set weights": "trained"}
STEM_ARGS = '{"num_heads": 4, "conv_stem_strides": [2, 2, 2]}'
STEM_EXAMPLE = '{"num_heads": 2, "conv_stem_strides": [2, 1, 2, 1]}'
FEATURES = {**TENSOR, "--outputs": "features"}
RANDOM = (
    OWN_CLASS.replace("self.patch, ", "self.shift = rand(3)\n        self.patch, ")
    .replace("return ", "return self.shift + ")
    .replace("import nn", "import nn, rand")
)


@dataclass(frozen=True)
class Export:
    """write: writes file.pth, a file or a folder.  typed: option → value, such as ``--set heads`` → 3.
    fill: text of the hint → what the user types for it.
    do: does to a file what the hint says; with ``fill``, the hint also has options.
    """

    write: Callable[[], None]
    typed: dict[str, str]
    fill: tuple[str, str] = ("", "")
    do: Callable[[str], None] | None = None


EXPORTS = {
    # Weights and facts that the file does not show
    "arrays": Export(
        saved(lambda: {"state_dict": {name: tensor.numpy() for name, tensor in state().items()}}),
        MINE,
        do=weights_saved,
    ),
    "no number of blocks": Export(linear_head, WITH_HEAD, ("head_blocks=N", "head_blocks=1")),
    "many heads": Export(many_heads, WITH_HEAD),
    "heads that no tensor shows": Export(golden("vit_plain.pth"), TENSOR, ("heads=N", "heads=3")),
    "a class in the arguments": Export(train_py(act_layer=torch.nn.ReLU), TENSOR, ("VALUE", '"relu"')),
    # Labels and preprocessing
    "fewer labels than classes": Export(
        file_and(*NAMES),
        {**GMM, "--labels": "cat,dog"},
        ("--labels with the label of each class", "--labels names.txt"),
    ),
    "no file of labels": Export(
        file_and(*NAMES), {**GMM, "--labels": "classes.txt"}, ("--labels FILE", "--labels names.txt")
    ),
    "labels in Latin-1": Export(
        file_and("caf\u00e9", *NAMES[1:], encoding="latin-1"), {**GMM, "--labels": "names.txt"}, do=converted
    ),
    "mean and std up to 255": Export(golden("vit_gmm.pth"), {"--mean": "123.7,116.3,103.5", "--std": "58.4,57.1,57.4"}),
    "mean beside a data set": Export(golden("vit_gmm.pth"), {**GMM, "--dataset": "cifar10"}),
    "several labels without thresholds": Export(
        file_and(*["0.5"] * 10, name="numbers.txt"),
        {**GMM, "--task": "multi"},
        ("--thresholds FILE", "--thresholds numbers.txt"),
    ),
    "an image processor of another kind": Export(folder(file="preprocessor_config.json", do_pad=True), {}),
    "an option that config.json states": Export(folder(), {"--model": "vit_tiny_patch16_224"}),
    "no class of the model": Export(
        folder(architectures=[]), {}, do=corrected(architectures=["ViTForImageClassification"])
    ),
    "a task of config.json": Export(
        folder(problem_type="multi_label_classification"), {}, ("--thresholds FILE", "--thresholds 0.5")
    ),
    "a backbone": Export(folder("swin_backbone"), {}),
    # Options of the network
    "a preset that does not exist": Export(with_preset, {**TENSOR, "--set pool": "cls", "--preset": "vit_d8"}),
    "no base mask": Export(without_base_masks, TENSOR),
    "weights of a teacher": Export(backbone, {**OF_TIMM, **FEATURES, "--set weights": "averaged"}),
    "a setting without its size": Export(train_py(), {**TENSOR, "--set interpolation": "timm"}, ("PIXELS", "64")),
    "a head that is not named": Export(linear_head, {**OF_TIMM, "--set head_blocks": "1"}, ("FILE", "head.pth")),
    "a setting that does not exist": Export(
        golden("vit_plain.pth"), {**TENSOR, "--set head": "3"}, ("type for example", "without --set head, type")
    ),
    # Other families
    "two codes with the same names": Export(root_mask_left_out, TENSOR),
    "no pooling": Export(golden("vit_pytorch/vp_deepvit.pt"), TENSOR),
    "no scales of a DeepViT": Export(golden("deepvit/deepvit_patch.pth.tar"), TENSOR, ("=NUMBER", "=1")),
    "neither size nor channels": Export(
        golden("naive_vit/mnist_vit.pt"),
        TENSOR,
        ("--image-size N and --set channels=N", "--image-size 28 and --set channels=1"),
    ),
    "neither size nor stages of an RMT": Export(
        golden("rmt/rmt_2023.pth"),
        TENSOR,
        ("--image-size N and --set decomposed_stages=LIST", "--image-size 64 and --set decomposed_stages=1,2,3"),
    ),
    "an image that is too large": Export(
        golden("rmt/rmt_2023.pth"),
        {**TENSOR, "--image-size": "4096", "--set decomposed_stages": "1,2,3"},
        ("a smaller --image-size", "--image-size 64"),
    ),
    # timm
    "no architecture": Export(
        bare(),
        TENSOR,
        (
            "with timm's name of the architecture, and --model-args with the arguments of training",
            f"{TINY} --model-args '{TYPED_ARGS}'",
        ),
    ),
    "an architecture that timm does not have": Export(
        train_py(), {**TENSOR, "--model": "vit_tiny_patch16"}, ("with a name of timm, such as ", "")
    ),
    "a tag that timm does not have": Export(train_py(), {**TENSOR, "--model": f"{TINY}.mine"}),
    "arguments that do not fit the tensors": Export(
        bare(),
        {**OF_TIMM, "--model-args": json.dumps({**TINY_ARGS, "patch_size": 4})},
        ("--model, --model-args and --image-size with", f"--model-args '{TYPED_ARGS}' with"),
    ),
    "an argument that is refused": Export(
        train_py(),
        {**TENSOR, "--model-args": '{"pretrained": true}'},
        ("remove pretrained;", "type --model-args '{}';"),
    ),
    "other heads than the arguments": Export(train_py(), {**TENSOR, "--set heads": "2"}),
    "no size of the images anywhere": Export(
        bare("test_byobnet", in_chans=3),
        {**TENSOR, "--model": "test_byobnet"},
        ("with the size of the training images in pixels, such as ", ""),
    ),
    "no classifier": Export(backbone, OF_TIMM, (", add --head", "; add --head")),
    "a network of torchvision in config.json": Export(conv_stem_folder, {**TENSOR, "--model-args": STEM_ARGS}),
    "a folder without config.json": Export(
        lambda: shutil.copytree(GOLDEN / "timm/timm_vit_registers", "file.pth", ignore=lambda *_: ["config.json"]),
        TENSOR,
        do=given("model.safetensors"),
        fill=("; if timm builds the model, also type --model and --model-args", f" and type {OF_REGISTERS}"),
    ),
    "a folder without weights": Export(
        lambda: shutil.copytree(GOLDEN / "timm/timm_vit_registers", "file.pth", ignore=lambda *_: [WEIGHTS]),
        TENSOR,
        do=lambda hint: shutil.copy(GOLDEN / "timm/timm_vit_registers" / WEIGHTS, "file.pth"),
    ),
    # Linear heads
    "a head for another network": Export(
        linear_head,
        {**WITH_HEAD, "--set head_blocks": "1", "--model": "vit_base_patch16_siglip_224"},
        ("--model with the architecture of the backbone", f"--model {TINY}"),
    ),
    "a head with the mean of the patches": Export(wide_head, {**WITH_HEAD, "--set head_blocks": "3"}),
    "a head of two layers": Export(
        two_layers,
        {**WITH_HEAD, "--set head_blocks": "1"},
        do=lambda hint: torch.save(torch.nn.Linear(24, 3).state_dict(), "head.pth"),
    ),
    # Another size of the images
    "a size that patches do not cover": Export(train_py(), {**TENSOR, "--resize-to": "36"}),
    "a family that cannot be resized": Export(golden("vit_gmm.pth"), {**TENSOR, "--resize-to": "64"}),
    "weights that were resized": Export(
        weights("timm/timm_vit.pth.tar", weights="trained", resize_to=48),
        {**TENSOR, "--resize-to": "64"},
        do=lambda hint: train_py()(),
    ),
    "no algorithm for the positions": Export(bare(), {**OF_TIMM, "--resize-to": "64"}, ("=CODE", "=timm")),
    "a stored mask at another size": Export(golden("timm/timm_vit_gmm.pth.tar"), {**TENSOR, "--resize-to": "64"}),
    # torchvision
    "an argument that torchvision's network does not have": Export(
        golden("timm/torchvision_vit_conv_stem.pth"),
        {**STEM, "--model-args": '{"depth": 2}'},
        (STEM_EXAMPLE, STEM_ARGS),
    ),
    # An own class
    "a class that is not in the file": Export(saved(state), {**MINE, "--model": "net.py:Network"}, ("CLASS", "Net")),
    "a module that is not installed": Export(with_code(f"import layers_of_mine\n{OWN_CLASS}"), MINE, do=own_again),
    "an argument of the class": Export(
        with_code(OWN_CLASS.replace("(self)", "(self, width)").replace("24", "width")),
        MINE,
        ('{"depth": 6}', '{"width": 24}'),
    ),
    "two outputs of the class": Export(with_code(OWN_CLASS.replace("return ", "return x, ")), MINE, do=own_again),
    "logits of the whole batch": Export(
        with_code(OWN_CLASS.replace("self.patch(x)", "self.patch(x - x.mean(0))")), MINE, do=own_again
    ),
    "random values of the class": Export(with_code(RANDOM), MINE, do=registered),
    "another class than that of training": Export(
        with_code(
            f"{OWN_CLASS}\nclass Wide(Net):\n    def __init__(self):\n        super().__init__()\n"
            "        self.more = nn.Linear(3, 3)\n"
        ),
        {**MINE, "--model": "net.py:Wide"},
        ("--model and --model-args with the class and the arguments of training", "--model net.py:Net"),
    ),
    # Weights of a bundle
    "another size than a bundle": Export(weights("vit_gmm.pth"), {**TENSOR, "--image-size": "64"}),
    "a bundle of an own class": Export(bundle_of_own_class, TENSOR),
    # Model folders of transformers
    "weights of transformers without their folder": Export(weights_of_folder, TENSOR, do=folder_again),
    "a task that is no classification": Export(
        folder(problem_type="regression"), {}, do=corrected(problem_type="single_label_classification")
    ),
    "the mean of a backbone": Export(folder("vit_backbone"), {**FEATURES, "--set pool": "mean"}),
    "a pooler that transformers lacks": Export(folder("vit_msn_backbone"), FEATURES),
    "a model of timm in transformers": Export(
        timm_wrapper,
        TENSOR,
        do=given("model.safetensors"),
        fill=("--model with timm's name of the architecture", f"--model {TINY} --model-args '{TYPED_ARGS}'"),
    ),
}
_OPTION = re.compile(r"(--set \w+|--[a-z][a-z-]*)[ =]('[^']*'|[^\s;,]+(?:,[^\s;,]+)*)")
_NAME = re.compile(r"--set \w+|--[a-z-]+")
_LEFT_OUT = re.compile(r"(?:leave|omit|without) (--[^,;]+)")


def following(hint: str, typed: dict[str, str]) -> dict[str, str]:
    """Return the options after the first way of a hint."""
    way = re.split(r"; (?!also)|, or | or (?=--)|\. ", hint.rpartition("otherwise ")[2])[0]
    removed = _NAME.findall(" ".join(_LEFT_OUT.findall(way)))
    added = {option: value.strip("'") for option, value in _OPTION.findall(_LEFT_OUT.sub("", way))}
    assert removed or added, hint
    return {option: value for option, value in typed.items() if option not in removed} | added


class ReadyError(Exception):
    """The export has read all options and files, and starts to compute."""


def exported(typed: dict[str, str]) -> Any:
    words = [
        word
        for option, value in typed.items()
        for word in (("--set", f"{option[6:]}={value}") if option.startswith("--set ") else (option, value))
    ]
    return CliRunner().invoke(app, ["export", "file.pth", "-o", "bundle", *words]).exception


@pytest.mark.first(12)
@pytest.mark.parametrize("name", EXPORTS)
def test_the_export_starts_when_the_hint_is_followed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ready(*_: object) -> None:
        raise ReadyError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gmmvit_deploy.exporting.bundle_from_checkpoint.golden_from_model", ready)
    Path("net.py").write_text(OWN_CLASS)
    case = EXPORTS[name]
    case.write()
    error, typed = exported(case.typed), case.typed
    assert isinstance(error, GmmvitError), error
    assert not case.fill[0] or case.fill[0] in error.hint, error.hint
    if case.do is not None:
        case.do(error.hint)
    if case.do is None or case.fill[0]:
        typed = following(error.hint.replace(*case.fill) if case.fill[0] else error.hint, typed)
    after = exported(typed)
    assert isinstance(after, ReadyError), (error.hint, typed, after, getattr(after, "hint", ""))


def test_a_model_in_training_mode_is_folded_after_eval() -> None:
    model = load_checkpoint(GOLDEN / "vit_gmm.pth").model.train()
    with pytest.raises(GmmvitError) as caught:
        fold(model)
    assert caught.value.hint == "call model.eval()"
    assert fold(model.eval()).passes
