"""Labels become the classes of a CLIP or SigLIP: the text tower runs at export, and an image network is served.

Expected are transformers' own results: its tokenizer, and ``logits_per_image`` of the model that ``from_pretrained``
builds from the folder.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import numpy_helper
from PIL import Image
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")
import transformers

from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.bundle.variants import open_variant, record_of
from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.errors import GmmvitError, InputError
from gmmvit_deploy.exporting import bundle_from_checkpoint as export
from gmmvit_deploy.exporting.bundle_from_checkpoint import bundle_from_checkpoint
from gmmvit_deploy.exporting.options import ExportOptions
from gmmvit_deploy.exporting.other_classes import bundle_of_same_tower
from gmmvit_deploy.exporting.variants import variants_from_bundle
from gmmvit_deploy.graphs.roles import roles_of
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.parity._calibration import check_calibration
from gmmvit_deploy.parity._quantised import QuantisedGraph
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.parity.report import ParityReport
from gmmvit_deploy.runtimes.runners.onnxruntime import OnnxRuntimeRunner
from tests.cli.terminal import gmmvit_here
from tests.hugging_face.folders import IMAGES_AND_TEXTS, edited
from tests.parity.faults import rebuilt, with_graph

pytestmark = pytest.mark.integration

LABELS = ("cat", "dog", "fox", "great owl")
PROMPTS = ("a photo of a {}", "an {}", "the {} in snow")
MULTI = {"task": "multi-label", "thresholds": 0.5}
UNMOVED: dict[str, Any] = {"dynamic": [], "float32": []}


def hints(count: int = 1) -> LoadHints:
    return LoadHints(labels=LABELS, prompts=PROMPTS[:count])


@torch.no_grad()
def own(folder: Path, prompts: tuple[str, ...], images: torch.Tensor | None = None) -> tuple[Any, torch.Tensor]:
    """Return (transformers' float64 output, its text embeddings (P, C, D)) for the labels in each prompt."""
    network = transformers.AutoModel.from_pretrained(folder).double().eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    clip = network.config.model_type == "clip"
    texts = [prompt.format(label) for prompt in prompts for label in LABELS]
    padding = {"padding": True} if clip else {"padding": "max_length", "max_length": 40}
    tokens = tokenizer(texts, return_tensors="pt", **padding)
    images = torch.zeros(1, 3, 32, 32, dtype=torch.float64) if images is None else images
    output = network(pixel_values=images, input_ids=tokens.input_ids, attention_mask=tokens.attention_mask)
    return network, output


@pytest.mark.parametrize("name", IMAGES_AND_TEXTS)
def test_the_logits_are_those_of_transformers(name: str, folders: Callable[[str], Path]) -> None:
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loaded = load_checkpoint(folders(name), hints())
    assert (loaded.spec.description, loaded.spec.classes, loaded.images.labels) == (
        IMAGES_AND_TEXTS[name][0],
        len(LABELS),
        LABELS,
    )
    network, output = own(folders(name), PROMPTS[:1], images)
    expected = output.logits_per_image
    assert float(expected.std()) > 0.05
    with torch.no_grad():
        logits = loaded.model.double()(images)
    scale = float(network.logit_scale.detach().exp())
    torch.testing.assert_close(logits, expected, rtol=0, atol=2**-23 * scale)
    assert {key.partition(".")[0] for key in loaded.unused} >= {"text_model", "logit_scale"}
    assert not any("text" in key for key in loaded.model.state_dict())


def test_position_ids_of_older_files_are_left_out(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders("clip_model"), tmp_path / "clip"))
    tensors = load_file(folder / "model.safetensors")
    older = {f"{tower}_model.embeddings.position_ids": torch.arange(17)[None] for tower in ("text", "vision")}
    save_file(tensors | older, folder / "model.safetensors")
    loaded = load_checkpoint(folder, hints())
    assert older.keys() <= loaded.unused.keys()


@pytest.mark.parametrize("name", IMAGES_AND_TEXTS)
def test_several_prompts_are_averaged_as_clip_s_authors_do(name: str, folders: Callable[[str], Path]) -> None:
    network, output = own(folders(name), PROMPTS)
    texts = output.text_embeds.unflatten(0, (len(PROMPTS), len(LABELS)))
    torch.testing.assert_close(texts.norm(dim=-1), torch.ones(texts.shape[:2], dtype=torch.float64))
    mean = texts.mean(0)
    expected = (network.logit_scale.exp() * mean / mean.norm(dim=-1, keepdim=True)).float()
    (layer,) = (layer for _, layer in load_checkpoint(folders(name), hints(3)).model.classifier_heads())
    torch.testing.assert_close(layer.weight.detach(), expected, rtol=2**-22, atol=0)


@pytest.fixture(scope="module")
def bundles(folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bundle]:
    root = tmp_path_factory.mktemp("bundles")

    def bundle(name: str) -> Bundle:
        if (root / name).exists():
            return open_bundle(root / name)
        options = ExportOptions(max_batch=16, **({} if name == "clip_model" else MULTI))
        return bundle_from_checkpoint(folders(name), root / name, options, hints=hints())

    return bundle


def judged(bundle: Bundle) -> ParityReport:
    with OnnxRuntimeRunner(bundle) as runner:
        return check_parity(bundle, [runner])


@pytest.mark.parametrize("name", IMAGES_AND_TEXTS)
def test_the_graph_stores_the_text_embeddings_bit_for_bit(name: str, bundles: Callable[[str], Bundle]) -> None:
    bundle = bundles(name)
    manifest = bundle.manifest
    assert manifest.task == ("single-label" if name == "clip_model" else "multi-label")
    assert manifest.labels == LABELS
    assert manifest.spec.prompts == PROMPTS[:1]
    assert "unknown" not in roles_of(ir.load(bundle.onnx_path).graph).values()
    report = judged(bundle)
    constants = next(check for check in report.checks if check.name == "constants")
    assert constants.verdict == "passed"
    assert constants.summary == "the text embeddings of 4 classes in the graph are those of the weights, bit for bit"
    assert report.runners[0].check("numeric").verdict == "passed"


def test_the_features_are_the_normalised_image_embeddings(folders: Callable[[str], Path], tmp_path: Path) -> None:
    options = ExportOptions(max_batch=4, outputs=("logits", "features"))
    bundle = bundle_from_checkpoint(folders("clip_model"), tmp_path / "both", options, hints=hints())
    report = judged(bundle)
    assert {check.name: check.verdict for check in report.checks}["constants"] == "passed"
    with OnnxRuntimeRunner(bundle) as runner:
        _, features = runner.computed(bundle.golden_rows()[0][:4])
    np.testing.assert_allclose(np.linalg.norm(features, axis=1), 1, rtol=1e-6)


def exchange(model: Model) -> None:
    (layer,) = (layer for _, layer in model.classifier_heads())
    layer.weight[2] = layer.weight[1].clone()


def unnormalised(model: Model) -> None:
    model.network.normalises = False


@pytest.mark.parametrize(
    ("name", "change", "failed", "reason"),
    [
        ("clip_model", exchange, {"constants", "numeric"}, "the class 'fox' has the logits of 'dog'"),
        ("siglip_model", unnormalised, {"numeric"}, "the image embedding not normalised"),
    ],
)
def test_parity_names_a_planted_mistake(
    name: str,
    change: Callable[[Model], None],
    failed: set[str],
    reason: str,
    bundles: Callable[[str], Bundle],
    tmp_path: Path,
) -> None:
    report = judged(rebuilt(bundles(name), tmp_path / "bundle", change))
    checks = {check.name: check for check in (*report.checks, *report.runners[0].checks)}
    assert {name for name, check in checks.items() if check.verdict == "failed"} == failed
    assert f"likely cause: {reason}" in checks["numeric"].reasons[-1]
    if "constants" in failed:
        assert "'fox' has the text embedding of 'dog'" in checks["constants"].reasons[0]


def test_a_changed_bit_of_a_text_embedding_is_found(bundles: Callable[[str], Bundle], tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(bundles("clip_model").path, tmp_path / "bundle"))
    proto = onnx.load(bundle / "model.onnx")
    (constant,) = (each for each in proto.graph.initializer if each.name.endswith("classifier.weight"))
    weight = numpy_helper.to_array(constant).copy()
    weight[3, 0] = np.nextafter(weight[3, 0], np.float32(np.inf))
    constant.CopyFrom(numpy_helper.from_array(weight, constant.name))
    report = judged(with_graph(open_bundle(bundle), tmp_path / "changed", proto))
    constants = next(check for check in report.checks if check.name == "constants")
    assert constants.verdict == "failed"
    assert "'great owl' differs by up to" in constants.reasons[0]


def test_the_command_line_exports_the_classes(folders: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("\n".join(LABELS))
    words = ("--labels", tmp_path / "labels.txt", "--prompt", PROMPTS[0], "--prompt", PROMPTS[1])
    answer = gmmvit_here("export", folders("clip_model"), "-o", tmp_path / "bundle", *words, columns=300)
    assert answer.status == 0, answer.err
    assert "classes: the text tower, run once in float64 with the prompts 'a photo of a {}', 'an {}'" in answer.out
    assert open_bundle(tmp_path / "bundle").manifest.labels == LABELS
    words = ("--labels", "newt,bat", "--prompt", PROMPTS[0], "--force")
    again = gmmvit_here("export", folders("clip_model"), "-o", tmp_path / "bundle", *words, columns=300)
    assert again.status == 0, again.err
    assert "graphs: the earlier bundle" in again.out
    assert f"gmmvit optimize {tmp_path / 'bundle'} --data DATA" in again.err


def test_other_labels_keep_the_graphs_of_the_image_tower(
    bundles: Callable[[str], Bundle], folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again, images = Path(shutil.copytree(bundles("clip_model").path, tmp_path / "again")), tmp_path / "images.npz"
    np.savez(images, images=np.random.default_rng(0).integers(0, 256, (24, 32, 32, 3), dtype=np.uint8))
    recipe: Any = SimpleNamespace(
        calibration={"recipe": {"rounding": "compensated", "smoothing": 0.5, "ranges": "percentile", **UNMOVED}}
    )
    _, earlier, _ = variants_from_bundle(again, "fp16,int8", str(images), like=recipe)
    options = ExportOptions(max_batch=16)
    others = LoadHints(labels=("newt", "dog", "bat"), prompts=PROMPTS[:2])
    fresh = bundle_from_checkpoint(folders("clip_model"), tmp_path / "fresh", options, hints=others)
    variants_from_bundle(fresh, "fp16,int8", str(images), like=recipe)
    monkeypatch.setattr(export, "onnx_from_model", None)  # the image tower is not traced
    kept = bundle_from_checkpoint(folders("clip_model"), again, options, hints=others, force=True)
    assert kept.onnx_path.read_bytes() == fresh.onnx_path.read_bytes()
    assert (kept.path / "golden.npz").read_bytes() == (fresh.path / "golden.npz").read_bytes()
    for form in ("fp16", "int8", "int8-static"):
        graphs = [ir.load(bundle.path / "graphs" / f"{form}.onnx") for bundle in (kept, fresh)]
        assert [graph.metadata_props.pop("gmmvit.bundle_sha256") for graph in graphs] == [kept.sha256, fresh.sha256]
        assert ir.to_proto(graphs[0]).SerializeToString() == ir.to_proto(graphs[1]).SerializeToString()
    record = open_variant(kept, "int8", "static").record
    assert record is not None
    assert record.golden == record_of(fresh, "int8", "static").golden
    calibration, before = dict(record.calibration or {}), dict(earlier.record.calibration)
    before.pop("screened")
    assert before.pop("tried")
    assert before["recipe"].pop("db")
    assert calibration == before
    assert check_calibration(kept, QuantisedGraph(kept, "int8", "static"), None).verdict == "passed"


def test_only_another_class_matrix_keeps_graphs(bundles: Callable[[str], Bundle]) -> None:
    bundle = bundles("clip_model")
    manifest = bundle.manifest
    other = {**manifest.checkpoint, "sha256": "0" * 64}
    for changed in ({"max_batch": 8}, {"checkpoint": other}, {"versions": {}}, {"input_kind": "tensor"}):
        assert bundle_of_same_tower(bundle.path, replace(manifest, **changed)) is None
    assert bundle_of_same_tower(bundle.path.parent, manifest) is None
    assert bundle_of_same_tower(bundle.path, replace(manifest, labels=("a", "b"))) == bundle


@pytest.mark.nightly
def test_int8_and_fp16_are_held_to_the_same_limits(bundles: Callable[[str], Bundle], tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(bundles("siglip_model").path, tmp_path / "bundle"))
    generator = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    for index in range(40):
        scene = Image.fromarray(generator.integers(0, 256, (5, 5, 3), dtype=np.uint8)).resize((40, 48))
        scene.save(tmp_path / "images" / f"{index}.png")
    words = ("--precision", "int8,fp16", "--calibration", tmp_path / "images")
    answer = gmmvit_here("convert", bundle, *words)
    assert answer.status == 0, answer.err
    runners = "onnxruntime:int8-static,onnxruntime:fp16"
    report = json.loads(gmmvit_here("parity", bundle, "--runner", runners, "--json").out)
    verdicts = [{check["name"]: check["verdict"] for check in runner["checks"]} for runner in report["runners"]]
    assert {verdict["numeric"] for verdict in verdicts} == {"passed"}
    assert verdicts[0]["calibration"] == "passed"


@pytest.mark.parametrize(
    ("name", "words", "message", "hint"),
    [
        (
            "clip_model",
            ("--labels", "cat,dog", "--prompt", "a photo"),
            r"'a photo': expected \{\}",
            "'a photo of a {}'",
        ),
        ("clip_model", ("--prompt", "a {}"), "labels, which are not given", "--labels FILE"),
        ("clip_model", (), "has no classes of its own", "--labels FILE and --prompt 'a photo of a {}'"),
        (
            "vit",
            ("--labels", "cat,dog", "--prompt", "a {}"),
            r"CLIPModel or SiglipModel, .* got \['ViTForImageClassification'\]",
            "leave --prompt out",
        ),
        ("siglip_model", ("--labels", "cat,dog", "--prompt", "a {}"), "trained with the sigmoid", "--task multi"),
        (
            "clip_model",
            ("--labels", f"cat,{'o' * 50}", "--prompt", "a {}"),
            "has 53 tokens, and the text tower reads at most 40",
            "shorten the label",
        ),
    ],
)
def test_what_is_missing_is_asked_for(
    name: str, words: tuple[str, ...], message: str, hint: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    answer = gmmvit_here("export", folders(name), "-o", tmp_path / "b", *words, columns=500)
    assert answer.status == 1
    assert re.search(message, answer.err)
    assert hint in answer.err
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompts": "a {}", "labels": ["cat"], "head": "head.pt"}, "--prompt and --head both state the classes"),
        ({"labels": ["cat"]}, "become the classes by prompts, which are not given"),
    ],
)
def test_hints_that_contradict_each_other_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        LoadHints(**values)


def test_a_folder_without_tokenizer_or_text_tower_is_refused(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders("clip_model"), tmp_path / "clip"))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(GmmvitError, match="no tokenizer, which --prompt needs; expected one of the files") as caught:
        load_checkpoint(folder, hints())
    assert "AutoTokenizer.from_pretrained('OWNER/NAME').save_pretrained" in caught.value.hint
    shutil.copy(folders("clip_model") / "tokenizer.json", folder)
    tensors = load_file(folder / "model.safetensors")
    images = {name: tensor for name, tensor in tensors.items() if not name.startswith("text")}
    save_file(images, folder / "model.safetensors")
    with pytest.raises(GmmvitError, match=r"no text tower: the tensor text_.* of CLIPModel is missing"):
        load_checkpoint(folder, hints())


def test_a_tokenizer_that_needs_another_package_is_named(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders("siglip_model"), tmp_path / "siglip"))
    edited(folder, "tokenizer_config.json", tokenizer_class="SiglipTokenizer")
    if transformers.utils.is_sentencepiece_available():
        pytest.skip("sentencepiece is installed")
    with pytest.raises(InputError, match="needs a package that is not installed") as caught:
        load_checkpoint(folder, hints())
    assert caught.value.hint == "pip install sentencepiece protobuf"


@pytest.mark.parametrize("architecture", ["Siglip2Model", "Siglip2VisionModel", "Siglip2ForImageClassification"])
def test_naflex_is_refused_with_the_reason(architecture: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders("siglip_model"), tmp_path / "naflex"))
    edited(folder, "config.json", architectures=[architecture], model_type="siglip2")
    with pytest.raises(GmmvitError, match=r"cuts images of any size into patches \(NaFlex\)") as caught:
        load_checkpoint(folder, LoadHints(only_features=True))
    assert "fixed resolution" in caught.value.hint
