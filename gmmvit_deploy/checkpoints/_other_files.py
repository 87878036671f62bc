"""Files and folders of other programs that hold weights but no state dict: what they are, and how to convert them.

Each error names the kind of the file, and the command or the line of Python that writes a state dict.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from zipfile import is_zipfile

from gmmvit_deploy.errors import CheckpointError

EXPECTED = "expected a PyTorch checkpoint (.pth) or a safetensors file"
RESAVE_HINT = (
    "where the file was made, save torch.save({'model_state_dict': model.state_dict()}, 'weights.pth') "
    "and use weights.pth"
)
_FULL_TENSORS_HINT = (
    "where the file was made, call get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, "
    "cpu_offload=True)) of torch.distributed.checkpoint.state_dict in each process, and save the result of rank 0 with "
    "torch.save"
)
_OTHER_FRAMEWORK_HINT = (
    "no command converts such a file for every network: build the network in PyTorch, copy the weights, and save "
    "model.state_dict() with torch.save; for a model of Hugging Face transformers, transformers 4 loads the folder "
    "with from_tf=True or from_flax=True, and save_pretrained then writes a folder that gmmvit reads"
)
_LORA = re.compile(r"(.+\.)?lora_[AB](\..+)?")
_ZERO_PART = re.compile(r"zero_pp_rank_.+_states\.pt|.+_optim_states\.pt")  # mp_rank_00_model_states.pt is a state dict
_OTHER_FRAMEWORKS = {"saved_model.pb", "tf_model.h5", "flax_model.msgpack"}
_TENSORFLOW_PART = re.compile(r".+\.(index|data-\d+-of-\d+)")


def _saved(expression: str, *, modules: str = "torch") -> str:
    return f"""type python -c "import {modules}; torch.save({expression}, 'weights.pth')", then give weights.pth"""


def _trusted(hint: str) -> str:
    return f"if you trust the author of the file, because this runs code in the file: {hint}"


def _refused(path: Path, kind: str, hint: str) -> CheckpointError:
    return CheckpointError(f"{path}: {EXPECTED}, got {kind}", hint=hint)


def _merge(folder: Path) -> str:
    return (
        f"merge it in Python: merged = peft.PeftModel.from_pretrained(base, '{folder}').merge_and_unload(), where base "
        "is the model that was adapted (base_model_name_or_path in adapter_config.json); then type "
        "merged.save_pretrained('merged') for a model of transformers, else torch.save(merged.state_dict(), "
        "'weights.pth'), and give the folder or the file"
    )


def _joined(folder: Path) -> str:
    return (
        f"type python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} weights.pth, then give "
        "weights.pth"
    )


def _joined_zero(folder: Path, *, step: str = "") -> str:
    """step: the name of the folder of a step in ``folder``; by default the one that its file ``latest`` names."""
    where = f"'{folder.resolve()}', tag='{step}'" if step else f"'{folder.resolve()}'"
    module = "deepspeed.utils.zero_to_fp32"
    return _saved(f"{module}.get_fp32_state_dict_from_zero_checkpoint({where})", modules=f"torch, {module}")


def refuse_folder(path: Path) -> None:
    """Errors: CheckpointError when a folder without a model is the checkpoint of a known program."""
    names = {entry.name for entry in path.iterdir()}
    if "adapter_config.json" in names:
        raise _refused(
            path, "an adapter of PEFT (LoRA), which holds only changes of another model's weights", _merge(path)
        )
    if "zero_to_fp32.py" in names:
        raise _refused(path, "a checkpoint of DeepSpeed, whose parts must be joined", _joined_zero(path))
    if any(map(_ZERO_PART.fullmatch, names)):
        hint = _joined_zero(path.resolve().parent, step=path.resolve().name)
        raise _refused(path, "a step of a checkpoint of DeepSpeed, whose parts must be joined", hint)
    # accelerate and torchtitan write the parts into a folder of the folder, beside one of the optimiser.
    for folder in (path, *(path / name for name in sorted(names) if not name.startswith("optim"))):
        if (folder / ".metadata").is_file():
            kind = "a checkpoint of torch.distributed.checkpoint (FSDP), whose parts must be joined"
            raise _refused(path, kind, _joined(folder))
    if names & _OTHER_FRAMEWORKS or any(map(_TENSORFLOW_PART.fullmatch, names)):
        raise _refused(path, "a model of TensorFlow or Flax", _OTHER_FRAMEWORK_HINT)


def refuse_file(path: Path, head: bytes) -> None:
    """head: the first bytes of the file.  Errors: CheckpointError when the file is of a known other kind."""
    if head.startswith(b"version https://"):
        raise _refused(path, "a pointer of Git LFS in place of the file", f"type git lfs pull --include={path.name}")
    if head.lower().startswith((b"<!doctype", b"<html")):
        raise _refused(path, "a web page", "download the file itself: the address showed a page about it, or a login")
    if head.startswith(b"\x89HDF") or path.suffix == ".keras" or _TENSORFLOW_PART.fullmatch(path.name):
        raise _refused(path, "a file of Keras or TensorFlow", _OTHER_FRAMEWORK_HINT)
    if path.suffix == ".msgpack":
        raise _refused(path, "a file of Flax", _OTHER_FRAMEWORK_HINT)
    if path.suffix == ".onnx":
        hint = (
            f"give the checkpoint of the graph; for a TensorRT engine of the graph, type gmmvit build {path} -o ENGINE"
        )
        raise _refused(path, "an ONNX graph, whose weights no longer have the names of the model", hint)
    if path.suffix == ".npz":
        network = f"timm.create_model(NAME, checkpoint_path='{path}', num_classes=CLASSES)"
        saved = _saved(f"{network}.state_dict()", modules="timm, torch")
        raise _refused(path, "arrays of NumPy", f"for a ViT of Google, with timm's NAME of the architecture: {saved}")
    if path.suffix == ".distcp":
        raise _refused(path, "a part of a checkpoint of torch.distributed.checkpoint", _joined(path.parent))
    if _ZERO_PART.fullmatch(path.name):
        hint = _joined_zero(path.resolve().parent.parent, step=path.resolve().parent.name)
        raise _refused(path, "a part of a checkpoint of DeepSpeed", hint)


def refuse_archive(path: Path, names: Iterable[str]) -> None:
    """names: of the records of a zip archive.  Errors: CheckpointError when the archive is of a known other kind."""
    records = {name.rpartition("/")[2] for name in names}
    if "archive_format" in records or "serialized_exported_program.json" in records:
        hint = _saved(f"torch.export.load('{path}').state_dict")
        raise _refused(path, "a program of torch.export (.pt2)", hint)
    if "constants.pkl" in records:
        hint = _saved(f"torch.jit.load('{path}', map_location='cpu').state_dict()")
        raise _refused(path, "a TorchScript archive, which is code", hint)


def refuse_adapter(path: Path, names: Iterable[str]) -> None:
    """names: of the tensors.  Errors: CheckpointError when tensors of LoRA are among them."""
    lora = next((name for name in names if isinstance(name, str) and _LORA.fullmatch(name)), None)
    if lora is not None:
        kind = f"an adapter (LoRA), which must be merged into the weights of its model: the tensor {lora}"
        raise _refused(path, kind, _merge(path.parent))


def unknown_name(path: Path, name: str, *, key: str | None = None, root: bool = False) -> CheckpointError:
    """Return the error for a file whose weights are objects of a class that this package does not read.

    name: the class, or the function that would build the objects.
    key: of the dict of weights in the file; None if the whole file is the dict.
    root: True if there is no dict: the whole file, or the value under ``key``, is such an object.
    """
    held = _loaded(path) if key is None else f"{_loaded(path)}['{key}']"
    if name.startswith("torch.distributed."):
        hint = _FULL_TENSORS_HINT
    elif name == "torch.storage._load_from_bytes":
        hint = _trusted(_saved(held, modules="pickle, torch"))
    elif root and name.rpartition(".")[2][:1].isupper():
        saved = _saved(f"{held}.state_dict()", modules="pickle, torch")
        hint = _trusted(f"where Python can import {name}, {saved}")
    else:
        tensors = f"{{k: torch.as_tensor(v) for k, v in {held}.items() if hasattr(v, 'shape')}}"
        hint = _trusted(_saved(tensors, modules="pickle, torch"))
    return CheckpointError(
        f"{path}: its pickle names {name}, which no checkpoint of tensors needs; no code of the file was run", hint=hint
    )


def _loaded(path: Path) -> str:
    """Return the expression of Python that loads the file, by running its code."""
    if is_zipfile(path):
        return f"torch.load('{path}', map_location='cpu', weights_only=False)"
    return f"pickle.load(open('{path}', 'rb'))"
