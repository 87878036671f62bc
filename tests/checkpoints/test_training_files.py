"""Files as training scripts write them: wrappings, prefixes, settings, averaged weights and both formats of torch.save.

Each file holds the weights of a released golden checkpoint, and must give the logits of that checkpoint bit for bit.
"""

from __future__ import annotations

import runpy
import struct
import zipfile
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from gmmvit_deploy.checkpoints.loading import LoadedCheckpoint, load_checkpoint
from gmmvit_deploy.checkpoints.reading import read_tensors
from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.models.sources.hints import LoadHints, WeightsKind
from gmmvit_deploy.models.sources.record import RecordedOptions, TrainingRecord
from tests.conftest import GOLDEN, golden

TINY = "vit_tiny_patch16_224"
ARGS = Namespace(
    lr=1e-3,
    img_size=32,
    mean=[0.5, 0.25, 0.125],
    betas=(0.9, 0.95),
    model_kwargs={"qk_norm": True, "init_values": None},
    resume="",
    nested=Namespace(depth=2),
)
PLAIN_ARGS = {**vars(ARGS), "nested": {"depth": 2}}


STATE: dict[str, Tensor] = torch.load(GOLDEN / "vit_gmm.pth", weights_only=True)["model_state_dict"]
AVERAGE = {name: tensor * 1.01 for name, tensor in STATE.items()}


def prefixed(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in state.items()}


def saved(tmp_path: Path, content: Any, **options: Any) -> Path:
    path = tmp_path / "model.pth.tar"
    torch.save(content, path, **options)
    return path


def logits(loaded: LoadedCheckpoint) -> Tensor:
    with torch.no_grad():
        return loaded.model(torch.from_numpy(golden("vit_gmm").inputs))


@pytest.fixture(scope="module")
def expected() -> Tensor:
    return logits(load_checkpoint(GOLDEN / "vit_gmm.pth"))


def optimiser() -> dict[str, Any]:
    return {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(7)}}, "param_groups": [{"params": [0]}]}


KEYS = ("model_state_dict", "state_dict", "state_dict_ema", "model", "model_ema", "net", "teacher", None)


class TestWrappings:
    @pytest.mark.parametrize(("key", "old"), [*((key, False) for key in KEYS), ("net", True), (None, True)])
    def test_weights_under_each_key(self, key: str | None, old: bool, expected: Tensor, tmp_path: Path) -> None:
        content = {"epoch": 3, "optimizer": optimiser(), "args": ARGS, key: OrderedDict(STATE)} if key else STATE
        loaded = load_checkpoint(saved(tmp_path, content, _use_new_zipfile_serialization=not old))
        assert logits(loaded).equal(expected)
        if key is None:
            assert loaded.file.wrapping == "bare state dict"
        else:
            assert loaded.file.wrapping == f"training checkpoint, weights under '{key}'"
            assert loaded.file.record == TrainingRecord(args=RecordedOptions(PLAIN_ARGS), entries={"epoch": 3})

    def test_settings_under_a_wrapping_key_are_no_weights(self, expected: Tensor, tmp_path: Path) -> None:
        """`model` is often the configuration of the model."""
        loaded = load_checkpoint(saved(tmp_path, {"model": {"depth": 2}, "net": STATE}))
        assert logits(loaded).equal(expected)

    def test_dino_gives_the_teacher(self, tmp_path: Path) -> None:
        head = {"head.mlp.0.weight": torch.ones(2, 2), "head.last_layer.weight_v": torch.ones(2, 2)}
        content = {
            "student": prefixed("module.", prefixed("backbone.", AVERAGE) | head),
            "teacher": prefixed("backbone.", STATE) | head,
            "args": Namespace(arch="vit_tiny", patch_size=8),
        }
        path = saved(tmp_path, content)
        file = read_tensors(path)
        assert all(file.tensors[name].equal(STATE[name]) for name in STATE)
        assert set(file.left_out) == set(head)
        assert set(load_checkpoint(path).unused) >= set(head)
        with pytest.raises(CheckpointError, match="--set weights=averaged, but the file holds a teacher"):
            read_tensors(path, "averaged")


@pytest.mark.parametrize("prefix", ["module.", "backbone.", "_orig_mod.module.", "model.module.model."])
def test_prefix_of_every_name(prefix: str, expected: Tensor, tmp_path: Path) -> None:
    loaded = load_checkpoint(saved(tmp_path, {"state_dict": prefixed(prefix, STATE)}))
    assert logits(loaded).equal(expected)
    assert f"a '{prefix}' prefix" in loaded.file.wrapping


PAIRS = [("state_dict", "state_dict_ema"), ("model_state_dict", "model_ema")]


class TestTrainedAndAveraged:
    @pytest.mark.parametrize(("trained_key", "averaged_key"), PAIRS)
    def test_the_error_names_both(self, trained_key: str, averaged_key: str, tmp_path: Path) -> None:
        path = saved(tmp_path, {trained_key: STATE, averaged_key: AVERAGE, "args": ARGS})
        with pytest.raises(CheckpointError, match=f"under '{trained_key}' and .* under '{averaged_key}'") as caught:
            load_checkpoint(path)
        assert "--set weights=trained" in caught.value.hint
        assert "--set weights=averaged" in caught.value.hint
        kinds: tuple[WeightsKind, WeightsKind] = ("trained", "averaged")
        for kind, weights in zip(kinds, (STATE, AVERAGE), strict=True):
            loaded = load_checkpoint(path, LoadHints(weights=kind))
            assert all(read_tensors(path, kind).tensors[name].equal(weights[name]) for name in weights)
            assert loaded.file.weights == kind

    def test_torchvision_average(self, expected: Tensor, tmp_path: Path) -> None:
        average = {"n_averaged": torch.tensor(9), **prefixed("module.", STATE)}
        path = saved(tmp_path, {"model": AVERAGE, "model_ema": average})
        loaded = load_checkpoint(path, LoadHints(weights="averaged"))
        assert logits(loaded).equal(expected)
        assert loaded.unused["n_averaged"]

    def test_no_average(self, tmp_path: Path) -> None:
        path = saved(tmp_path, {"model": STATE, "model_ema": None})
        assert read_tensors(path).weights == "trained"
        with pytest.raises(CheckpointError, match="holds only trained weights, under 'model'"):
            read_tensors(path, "averaged")


class TestStorages:
    @pytest.mark.parametrize("old", [False, True], ids=["zip", "before torch 1.6"])
    def test_tied_and_transposed(self, old: bool, tmp_path: Path) -> None:
        weight = torch.randn(3, 5)
        content = {
            "a": weight,
            "tied": weight,
            "transposed": weight.T,
            "row": weight[1],
            "every second": weight[:, ::2],
            "scalar": torch.tensor(7),
            "empty": torch.zeros(0, 4),
            "half": weight.half(),
            "brain": weight.bfloat16(),
            "truth": weight > 0,
        }
        tensors = read_tensors(saved(tmp_path, content, _use_new_zipfile_serialization=not old)).tensors
        for name, tensor in content.items():
            assert tensors[name].equal(tensor.float() if name in ("half", "brain") else tensor), name
            assert tensors[name].stride() == tensor.stride()
        shared = {tensors[name].untyped_storage().data_ptr() for name in ("a", "tied", "transposed", "row")}
        assert len(shared) == 1

    def test_parameters_and_tensors_with_attributes(self, tmp_path: Path) -> None:
        tagged, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(3))
        tagged.note = "kept by nobody"  # type: ignore[attr-defined]
        named = torch.nn.Parameter(torch.ones(4))
        named.no_decay = True  # type: ignore[attr-defined]
        content = {
            "tagged": tagged,
            "parameter": parameter,
            "named": named,
            "unsigned": torch.ones(2, dtype=torch.uint16),
        }
        tensors = read_tensors(saved(tmp_path, {"net": content})).tensors
        assert all(tensors[name].equal(tensor.detach()) for name, tensor in content.items())
        assert not any(tensor.requires_grad for tensor in tensors.values())

    @pytest.mark.parametrize("protocol", [2, 3, 4, 5])
    def test_pickle_protocols(self, protocol: int, tmp_path: Path) -> None:
        content = {"net": {"a": torch.ones(2)}, "args": Namespace(name="é" * 300, data=b"\x00\xff"), "tags": {"x", "y"}}
        file = read_tensors(saved(tmp_path, content, pickle_protocol=protocol))
        assert file.tensors["a"].equal(torch.ones(2))
        assert file.record.args == {"name": "é" * 300, "data": b"\x00\xff"}

    def test_big_endian(self, tmp_path: Path) -> None:
        path, swapped = saved(tmp_path, {"a": torch.tensor([1.0, -2.5])}), tmp_path / "big.pth"
        with zipfile.ZipFile(path) as source, zipfile.ZipFile(swapped, "w") as target:
            for name in source.namelist():
                data = source.read(name)
                if name.endswith("/data/0"):
                    data = struct.pack(">2f", *struct.unpack("<2f", data))
                target.writestr(name, b"big" if name.endswith("byteorder") else data)
        assert read_tensors(swapped).tensors["a"].tolist() == [1.0, -2.5]


OWN = """
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.head = nn.Conv2d(3, 24, 8, 8), nn.Linear(24, 3)
    def forward(self, x):
        return self.head(self.patch(x).flatten(2).mean(-1))
"""


@pytest.mark.parametrize("beside", ["criterion.weight", "loss_fn.pos_weight", "class_weights", "val_acc.tp"])
@pytest.mark.parametrize("prefix", ["", "model.", "net."])
@pytest.mark.parametrize("own", [False, True], ids=["timm", "own class"])
@pytest.mark.first(4)
def test_states_of_losses_and_metrics_beside_the_network_are_left_out(
    own: bool, prefix: str, beside: str, tmp_path: Path
) -> None:
    (tmp_path / "net.py").write_text(OWN)
    args = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 3, "num_classes": 3}
    network = runpy.run_path(str(tmp_path / "net.py"))["Net"]() if own else timm.create_model(TINY, **args)
    state = {f"{prefix}{name}": tensor for name, tensor in network.state_dict().items()}
    torch.save({"state_dict": {**state, beside: torch.ones(3)}, "epoch": 1}, tmp_path / "a.ckpt")
    hints = (
        LoadHints(model=f"{tmp_path / 'net.py'}:Net", image_size=32, channels=3)
        if own
        else LoadHints(model=TINY, model_args=args)
    )
    loaded = load_checkpoint(tmp_path / "a.ckpt", hints)
    images = torch.rand(2, 3, 32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(images), network.eval()(images))
    assert beside in loaded.unused


# ---- a second set of weights, other data types -----------------------------------------------------------------------


def loaded_head(content: Any, folder: Path, weights: str | None = None) -> Tensor:
    torch.save(content, folder / "file.pth")
    return load_checkpoint(folder / "file.pth", LoadHints(weights=weights)).model.get_parameter("head.weight")


@pytest.mark.parametrize(
    ("content", "raw", "average"),
    [
        ({"model": STATE, "ema": AVERAGE}, "model", "ema"),
        ({"model": STATE, "ema": {"decay": 0.9, "shadow": AVERAGE}}, "model", "ema.shadow"),
        ({"model": STATE, "ema_model": prefixed("module.", AVERAGE)}, "model", "ema_model"),
        ({"net": STATE, "net_ema": AVERAGE}, "net", "net_ema"),
        ({"model_state_dict": STATE, "ema_model_state_dict": AVERAGE}, "model_state_dict", "ema_model_state_dict"),
        ({"raw": STATE, "avg": AVERAGE}, "raw", "avg"),
        ({"state_dict": prefixed("model.", STATE) | prefixed("ema.", AVERAGE)}, "model", "ema"),
        ({"state_dict": STATE, "callbacks": {"EMA": {"weights": AVERAGE}}}, "state_dict", "callbacks.EMA.weights"),
    ],
)
def test_a_second_set_of_weights_is_asked_for(content: Any, raw: str, average: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        loaded_head(content, tmp_path)
    assert raw in str(caught.value)
    assert average in str(caught.value)
    assert caught.value.hint == f"type --set weights={raw} or --set weights={average}"
    assert loaded_head(content, tmp_path, raw).equal(STATE["mlp_head.1.weight"])
    assert loaded_head(content, tmp_path, average).equal(AVERAGE["mlp_head.1.weight"])


WITHOUT_DOTS = {f"model_ema.{name.replace('.', '')}": tensor for name, tensor in AVERAGE.items()}  # of LitEma


@pytest.mark.parametrize(
    ("content", "named", "raw"),
    [
        ({"model": STATE, "ema": {"shadow_params": list(AVERAGE.values())}}, r"under 'ema\.shadow_params'", "model"),
        ({"state_dict": prefixed("net.", STATE) | WITHOUT_DOTS}, r"under net\. and model_ema\.", "net"),
    ],
    ids=["without names", "without dots"],
)
def test_averages_under_other_names_are_asked_for(content: Any, named: str, raw: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"of the same shapes {named}"):
        loaded_head(content, tmp_path)
    assert loaded_head(content, tmp_path, raw).equal(STATE["mlp_head.1.weight"])


def test_averages_without_names_are_no_choice(tmp_path: Path) -> None:
    content = {"model": STATE, "ema": {"shadow_params": list(AVERAGE.values())}}
    with pytest.raises(CheckpointError, match=r"tensors without names under 'ema\.shadow_params'"):
        loaded_head(content, tmp_path, "ema.shadow_params")


def test_containers_that_share_their_content_are_read_once(tmp_path: Path) -> None:
    """Without it, a file of 5 KB takes a minute, and one of 10 KB hours."""
    nested: Any = {str(index): {"a": torch.zeros(1)} for index in range(60)}
    for _ in range(3):
        nested = {str(index): nested for index in range(60)}
    assert loaded_head({"model": STATE, "other": nested}, tmp_path).equal(STATE["mlp_head.1.weight"])


@pytest.mark.nightly
def test_the_body_of_a_timm_network_is_no_prefix(tmp_path: Path) -> None:
    """The classifier of an EfficientViT is head.classifier.4."""
    network = timm.create_model("efficientvit_b0", num_classes=5).eval()
    torch.save(network.state_dict(), tmp_path / "file.pth")
    loaded = load_checkpoint(tmp_path / "file.pth", LoadHints(model="efficientvit_b0", image_size=64))
    assert loaded.unused == {}


def test_values_beyond_float32_are_refused(tmp_path: Path) -> None:
    state = {name: tensor.double() for name, tensor in STATE.items()}
    state["mlp_head.1.weight"][0, 0] = 1e300
    with pytest.raises(CheckpointError, match="infinite"):
        loaded_head(state, tmp_path)


@pytest.mark.parametrize(
    "optimiser",
    [
        {"state": {i: {"exp_avg": tensor, "exp_avg_sq": tensor} for i, tensor in enumerate(STATE.values())}},
        {"momentum": STATE},
        {"momentum": list(STATE.values())},
    ],
)
def test_the_state_of_an_optimiser_is_no_second_set(optimiser: Any, tmp_path: Path) -> None:
    content = {"model": STATE, "optimizer": optimiser}
    assert loaded_head(content, tmp_path).equal(STATE["mlp_head.1.weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_other_types_become_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.save({name: tensor.to(dtype) for name, tensor in STATE.items()}, tmp_path / "file.pth")
    loaded = load_checkpoint(tmp_path / "file.pth")
    head = loaded.model.get_parameter("head.weight")
    assert head.dtype == torch.float32
    assert head.equal(STATE["mlp_head.1.weight"].to(dtype).float())
    assert f", {str(dtype).removeprefix('torch.')} as float32" in loaded.file.wrapping
