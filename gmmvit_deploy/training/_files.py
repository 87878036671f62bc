"""The files of a run: ``checkpoint.pth``, ``log.jsonl`` and TensorBoard's event files in ``tensorboard``.

    checkpoint.pth
        model_state_dict      the weights, under the names of this package's modules
        state_dict_ema        the moving average of the weights, if the recipe has an average
        gmmvit_model          the spec of the network as JSON
        gmmvit_images         the preprocessing and the class names as JSON
        gmmvit_training       the settings of the run, and the length of the log, as JSON
        trainer               the state of the optimiser, and the number of steps

``gmmvit export`` reads the file without options. A resumed run reads the same file, so that there is no moment at which
the weights and the state of the optimiser belong to different steps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch

from gmmvit_deploy.checkpoints.reading import IMAGES_METADATA_KEY, MODEL_METADATA_KEY, WEIGHTS_METADATA_KEY
from gmmvit_deploy.errors import CheckpointError, InputError
from gmmvit_deploy.extras import require
from gmmvit_deploy.files.writing import new_file
from gmmvit_deploy.training.trainer import Epoch, Step, Trainer

CHECKPOINT, LOG, EVENTS = "checkpoint.pth", "log.jsonl", "tensorboard"
_TRAINING = "gmmvit_training"


def save(folder: Path, trainer: Trainer, settings: Mapping[str, Any], *, log_bytes: int) -> None:
    """Write ``checkpoint.pth``.  Errors: OutputError.

    settings: what a resumed run must have in common with this one, as JSON values; ``network``, ``preprocessing`` and
    ``labels`` among them.  log_bytes: the length of the log so far.
    """
    averaged = {} if trainer.average is None else {"state_dict_ema": trainer.average.module.state_dict()}
    content = {
        "model_state_dict": trainer.network.state_dict(),
        **averaged,
        "epoch": trainer.step // trainer.steps_of_epoch,
        MODEL_METADATA_KEY: json.dumps(settings["network"]),
        IMAGES_METADATA_KEY: json.dumps({"image": settings["preprocessing"], "labels": settings["labels"]}),
        WEIGHTS_METADATA_KEY: "averaged" if averaged else "trained",
        _TRAINING: json.dumps({"settings": settings, "log_bytes": log_bytes}),
        "trainer": trainer.state(),
    }
    with new_file(folder / CHECKPOINT, force=True) as file:
        torch.save(content, file)


def load(folder: Path, trainer: Trainer, settings: Mapping[str, Any]) -> int:
    """Restore the trainer from ``checkpoint.pth``, and return the length of the log at that moment.

    Errors: CheckpointError when `save` did not write the file; InputError when it is absent, or its run had other
    settings.
    """
    path = folder / CHECKPOINT
    if not path.is_file():
        raise InputError(
            f"{path}: no such file, so there is no run to resume", hint="leave --resume out to start the training"
        )
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        recorded = json.loads(content[_TRAINING])
        _require_equal(path, recorded["settings"], json.loads(json.dumps(settings)))
        trainer.network.load_state_dict(content["model_state_dict"])
        if trainer.average is not None:
            trainer.average.module.load_state_dict(content["state_dict_ema"])
        trainer.restore(content["trainer"])
        return int(recorded["log_bytes"])
    except InputError:
        raise
    # torch.load raises errors of many classes for damaged and foreign files.
    except Exception as exc:
        raise CheckpointError(
            f"{path}: expected a checkpoint that gmmvit train wrote: {type(exc).__name__}: {exc}",
            hint="type -o with the folder of the interrupted run",
        ) from exc


def _require_equal(path: Path, recorded: Mapping[str, Any], typed: Mapping[str, Any]) -> None:
    names = [name for name in {**recorded, **typed} if recorded.get(name) != typed.get(name)]
    if names:
        listed = "; ".join(f"{name}: {_short(recorded.get(name))}, now {_short(typed.get(name))}" for name in names)
        raise InputError(
            f"{path}: the run to resume had other settings: {listed}",
            hint="type the command of that run and --resume, or another -o",
        )


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:197]}..."


class Log:
    """Writes ``log.jsonl`` and TensorBoard's event files.

    A line of the log is a `Step`, or an `Epoch`, which has the field accuracy. The log has no times, so that the log of
    a resumed run equals the log of a run that was not interrupted.

    size: the length to which the log is cut, and the number of steps before which TensorBoard keeps its events.
    """

    def __init__(self, folder: Path, *, size: int = 0, step: int = 0) -> None:
        writer = require("torch.utils.tensorboard", package="tensorboard", extra="train").SummaryWriter
        self._file: IO[bytes] = (folder / LOG).open("r+b")
        self._file.truncate(size)
        self._file.seek(size)
        self._events = writer(str(folder / EVENTS), purge_step=step + 1)

    def write(self, record: Step) -> None:
        values = asdict(record)
        self._file.write(json.dumps(values).encode() + b"\n")
        self._file.flush()
        part = "epoch" if isinstance(record, Epoch) else "step"
        for name in ("loss", "rate", "accuracy"):
            if values.get(name) is not None and (part == "step" or name != "rate"):
                self._events.add_scalar(f"{name}/{part}", values[name], record.step)

    def flushed_size(self) -> int:
        """Return the length of the log.  TensorBoard's events of a checkpoint are on the disk before the checkpoint."""
        self._events.flush()
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        self._events.close()
