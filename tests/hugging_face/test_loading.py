"""Folders of Hugging Face transformers are loaded as transformers loads them, or refused with the file and the field.

Expected are transformers' own results: the model that ``from_pretrained`` builds from the folder.
"""

from __future__ import annotations

import copy
import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.utils import _device
from transformers.initialization import meta_device_safe_creation_ops

from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.checkpoints.weights import bytes_from_model
from gmmvit_deploy.errors import CheckpointError, GmmvitError, InputError, SpecError
from gmmvit_deploy.exporting.options import ExportOptions
from gmmvit_deploy.models.layers.fused_call import AnsweredAttention
from gmmvit_deploy.models.sources.hints import LoadHints
from tests.golden_files import golden
from tests.hugging_face.folders import ARCHITECTURES, LABELS, built, edited, saved
from tests.hugging_face.golden import CASES, FOLDER

pytestmark = pytest.mark.integration

NOT_ANSWERED = {
    "swinv2",
    "convnext",
    "resnet",
}  # attention on cosines does not call the fused function; others have none
EXACT = 1e-12


@pytest.fixture
def vit(folders: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the folder ``vit`` that a test may change."""
    return Path(shutil.copytree(folders("vit"), tmp_path / "vit"))


def own_logits(folder: Path, images: torch.Tensor) -> torch.Tensor:
    """Return the float64 logits of transformers' own model."""
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, name).from_pretrained(folder).double().eval()
    with torch.no_grad():
        logits: torch.Tensor = model(images).logits
    return logits


def images_for(spec: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, spec.channels, *spec.image_shape, generator=generator, dtype=torch.float64)


@pytest.mark.first(2)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_logits_are_those_of_transformers(name: str, folders: Callable[[str], Path]) -> None:
    loaded = load_checkpoint(folders(name))
    assert loaded.spec.description == ARCHITECTURES[name][0]
    assert (loaded.spec.family, loaded.spec.image_shape, loaded.spec.classes) == ("hugging_face", (32, 32), 5)
    assert loaded.images.labels == LABELS
    answered = [module for module in loaded.model.modules() if isinstance(module, AnsweredAttention)]
    assert len(answered) == (0 if name in NOT_ANSWERED else 3 if name == "swin" else 2)
    images = images_for(loaded.spec)
    expected = own_logits(folders(name), images)
    with torch.no_grad():
        logits = copy.deepcopy(loaded.model).double()(images)
    assert float(expected.std()) > 0.05
    assert float((logits - expected).abs().max()) < EXACT


def test_every_way_to_store_the_weights_gives_the_same_model(tmp_path: Path) -> None:
    whole = load_checkpoint(saved("vit", tmp_path / "whole"))
    parts = load_checkpoint(saved("vit", tmp_path / "parts", max_shard_size="40KB"))
    assert len([*(tmp_path / "parts").glob("model-*.safetensors")]) > 1
    pickled = tmp_path / "pickled"
    shutil.copytree(tmp_path / "whole", pickled)
    tensors = load_file(pickled / "model.safetensors")
    (pickled / "model.safetensors").unlink()
    torch.save(tensors, pickled / "pytorch_model.bin")
    expected = bytes_from_model(whole.model)
    assert bytes_from_model(parts.model) == expected
    assert bytes_from_model(load_checkpoint(pickled).model) == expected
    assert "parts" in parts.file.wrapping
    assert parts.file.sha256 != whole.file.sha256


def test_labels_that_transformers_makes_up_are_no_labels(vit: Path) -> None:
    edited(vit, "config.json", id2label={str(index): f"LABEL_{index}" for index in range(5)})
    assert load_checkpoint(vit).images.labels is None


CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"


def test_each_value_names_its_file_and_what_no_file_states_is_asked_for(vit: Path) -> None:
    edited(vit, CONFIG, id2label={str(index): f"LABEL_{index}" for index in range(len(LABELS))})
    complete = load_checkpoint(vit)
    typed = ExportOptions()
    assert complete.taken_from == {"image_size": PREPROCESSOR}
    assert typed.completed(complete.images, default=None).origins(complete.images, typed) == {
        **dict.fromkeys(("mean", "std", "resize"), PREPROCESSOR),
        "labels": "the class indices; --labels gives names",
    }
    fields = json.loads((vit / PREPROCESSOR).read_text())
    (vit / PREPROCESSOR).write_text(json.dumps({name: fields[name] for name in fields if name != "image_mean"}))
    default = f"transformers' default, as {PREPROCESSOR} does not state it"
    assert load_checkpoint(vit).images.origins == {**complete.images.origins, "mean": default}
    (vit / PREPROCESSOR).unlink()
    without = load_checkpoint(vit)
    assert without.taken_from == {"image_size": CONFIG}
    with pytest.raises(InputError, match="does not state the mean and the std and the resize rule"):
        typed.completed(without.images, default=None)


@pytest.mark.parametrize("method", [{"quant_method": "bitsandbytes"}, {}], ids=["stated", "older transformers"])
def test_quantised_weights_have_a_line_that_saves_float_weights(vit: Path, method: dict[str, str]) -> None:
    edited(vit, CONFIG, quantization_config={"load_in_8bit": True, **method})
    with pytest.raises(SpecError, match="the weights are quantised") as caught:
        load_checkpoint(vit)
    line, _, folder = caught.value.hint.partition("type python -c ")[2].partition(", then give ")
    assert folder.startswith(f"{vit}-float32")
    code = shlex.split(line)[0]
    compile(code, "hint", "exec")
    assert f"t.ViTForImageClassification.from_pretrained('{vit}').dequantize().save_pretrained(" in code
    assert hasattr(transformers.ViTForImageClassification, "dequantize")
    edited(vit, CONFIG, quantization_config={"bits": 4, "quant_method": "gptq"})
    with pytest.raises(SpecError) as caught:
        load_checkpoint(vit)
    assert caught.value.hint.startswith("give the folder of the model before the quantisation; transformers ")


@pytest.mark.parametrize(
    ("file", "changes", "message", "hint"),
    [
        (CONFIG, {"architectures": ["ViTForMaskedImageModeling"]}, "has no classifier or backbone of images", "ViTFor"),
        (CONFIG, {"architectures": ["ViTForImageClasification"]}, "no classifier or backbone", "ViTForImageClassif"),
        (CONFIG, {"auto_map": {"AutoModel": "code.Model"}}, "the field auto_map is not", "type --model FILE.py:CLASS"),
        (CONFIG, {"num_hidden_layers": 1}, "keys do not fit this architecture", "save_pretrained"),
        (CONFIG, {"num_attention_heads": 5}, "transformers cannot build|do not fit", "again|save_pretrained"),
        (CONFIG, {"image_size": 64}, "position_embeddings has shape", "image_size or patch_size in config.json"),
        (PREPROCESSOR, {"sharpen": True}, "the field sharpen is True: gmmvit does not know", "correct sharpen"),
        (PREPROCESSOR, {"crop_pct": 0.9}, "the field crop_pct is 0.9: ViTImageProcessor does not read", "crop_pct"),
        (PREPROCESSOR, {"do_pad": True}, "the field do_pad is True: padding", "add --input tensor"),
        (PREPROCESSOR, {"resample": 1}, "the field resample is 1: the filter lanczos", "correct resample"),
        (PREPROCESSOR, {"image_processor_type": "PoolFormerImageProcessor"}, "image_processor_type is 'Pool", ""),
        (PREPROCESSOR, {"size": {"shortest_edge": 32}}, "the field do_center_crop is .*keep different sizes", ""),
        (PREPROCESSOR, {"size": {"longest_edge": 32}}, "the field size is .*not supported", "correct size"),
        (PREPROCESSOR, {"size": {"high": 32}}, "ViTImageProcessor does not take these fields", "again"),
        (PREPROCESSOR, {"image_mean": [0.5]}, "the field image_mean is .*reads 3 channels", "correct image_mean"),
        (PREPROCESSOR, {"image_std": [0.5, 0.5, 0]}, "the field image_std is .*above 0", "correct image_std"),
        (PREPROCESSOR, {"rescale_factor": -1}, "the field rescale_factor is -1", "correct rescale_factor"),
        (PREPROCESSOR, {"do_center_crop": True, "crop_size": {"height": 31, "width": 32}}, "even number", "crop_size"),
        (PREPROCESSOR, {"do_center_crop": True}, "the field crop_size is {}: other sizes", "correct crop_size"),
        (PREPROCESSOR, {"do_resize": False, "do_center_crop": True}, "a crop without resizing", "do_center_crop"),
    ],
)
def test_mistakes_name_the_file_and_the_field(
    file: str, changes: dict[str, Any], message: str, hint: str, vit: Path
) -> None:
    edited(vit, file, **changes)
    with pytest.raises(GmmvitError, match=message) as caught:
        load_checkpoint(vit)
    assert isinstance(caught.value, CheckpointError | SpecError)
    assert str(caught.value).startswith(str(vit))
    assert any(part in caught.value.hint for part in hint.split("|"))
    if "--input tensor" in caught.value.hint:
        assert load_checkpoint(vit, LoadHints(only_tensors=True)).images.mean is None


OWN_CLASS = """
import transformers
class Net(transformers.ViTForImageClassification):
    def __init__(self, **sizes):
        super().__init__(transformers.ViTConfig(**sizes))
    def forward(self, images):
        return super().forward(images).logits
"""


def test_the_line_for_what_transformers_must_load_itself(
    vit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    edited(vit, CONFIG, use_pretrained_backbone=True)
    with pytest.raises(SpecError) as caught:
        load_checkpoint(vit)
    exec(shlex.split(caught.value.hint.partition("type python -c ")[2].partition(", which")[0])[0], {})  # noqa: S102
    Path("net.py").write_text(OWN_CLASS)
    sizes = {**ARCHITECTURES["vit"][1], "num_labels": len(LABELS)}
    hints = LoadHints(model="net.py:Net", model_args=sizes, image_size=32, channels=3)
    loaded = load_checkpoint(tmp_path / "weights.pth", hints)
    images = images_for(loaded.spec)
    with torch.inference_mode():
        logits = loaded.model.double()(images)
    assert float((logits - own_logits(vit, images)).abs().max()) < EXACT


@pytest.mark.parametrize(
    ("break_index", "message"),
    [
        (lambda placed: {name: f"../{part}" for name, part in placed.items()}, "expected a file in the same folder"),
        (lambda placed: dict(list(placed.items())[1:]), "differ in the tensor"),
        (lambda placed: {}, "expected an object under 'weight_map'"),
    ],
)
def test_an_index_that_contradicts_the_parts_is_refused(
    break_index: Callable[[dict[str, str]], dict[str, str]], message: str, tmp_path: Path
) -> None:
    folder = saved("vit", tmp_path / "parts", max_shard_size="40KB")
    placed = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    edited(folder, "model.safetensors.index.json", weight_map=break_index(placed))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


def test_masks_are_built_on_meta_after_transformers_was_used() -> None:
    """Its from_pretrained exchanges `torch.linspace`, and PyTorch keeps a list of the functions that it met."""
    known = _device._device_constructors
    known.cache_clear()
    try:
        with torch.device("meta"), meta_device_safe_creation_ops():
            torch.empty(1)
        assert load_checkpoint(golden("vit_gmm").path).model.spec.mask.kind == "gmm"
    finally:
        known.cache_clear()


# ---- golden folders, whatever version of transformers builds the network ---------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_golden_folder_gives_the_logits_of_transformers(name: str) -> None:
    case, stored = CASES[name], np.load(FOLDER / f"{name}.npz")
    model = load_checkpoint(FOLDER / name, LoadHints(**case.hints)).model.double()
    with torch.no_grad():
        logits = model(torch.from_numpy(stored["images"]).double()).numpy()
    assert stored["logits"].std() > 0.05
    np.testing.assert_allclose(logits, stored["logits"], rtol=0, atol=case.atol)


# ---- problem_type and --task must agree ------------------------------------------------------------------------------


def test_features_need_no_task(tmp_path: Path) -> None:
    folder = saved("vit", tmp_path / "vit", built("vit", problem_type="multi_label_classification"))
    known = load_checkpoint(folder).images
    assert (known.task, known.task_evidence) == (
        "multi-label",
        f"{folder}/config.json: problem_type is 'multi_label_classification'",
    )
    options = ExportOptions(outputs=("features",)).completed(known)
    assert (options.agreed_task, options.fitting_thresholds(())) == ("single-label", ())
