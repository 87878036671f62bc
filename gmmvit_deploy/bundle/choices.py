"""Read and write ``runners.json``: which runner and precision to take on each kind of machine, with the evidence.

``gmmvit optimize`` writes the file into the bundle's folder. ``gmmvit export`` writes an entry without a gate: the
float32 programs of its proof, timed. The manifest does not list the file, so a bundle keeps its hash when it is tuned
for another machine. The file holds

    {"format": 1, "machines": [entry, …]}

with one entry for each kind of machine. A graph's SHA-256 ties a candidate to the graph that was judged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from gmmvit_deploy.bundle.gates import Gate
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.files.writing import new_file
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.intervals import Measured
from gmmvit_deploy.precision_names import precision_from

CHOICES_FILE = "runners.json"
_FORMAT = 1
_ENOUGH = 100
"""Shares of fewer images differ from those of others by chance: docs/pages/operate.md, GmmvitAnswersDiffer."""
Goal = Literal["latency", "throughput"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A kind of machine.  cpu: the processor's model name and its vector extensions.  gpu: the GPU's name, or ""."""

    cpu: str
    cores: int
    gpu: str = ""

    def __str__(self) -> str:
        return f"{self.cpu}, {self.cores} cores{f', {self.gpu}' if self.gpu else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedImages:
    """The images that judged the candidates.

    source: as typed.  count: the number of distinct images.  checked: the number of these on which all checks of parity
    ran, those of float32 too.  sha256: of all images.  accuracy: PyTorch's, a share; None if no labels judged.
    copies: the number of images with the pixels of another, which were left out.
    batches: the sizes of the batches at each of which a candidate was judged.
    answers: how sure PyTorch's answers in float32 are (`inference.answer_counts.sureness`), which no choice depends on.
    """

    source: str
    count: int
    checked: int
    sha256: str
    accuracy: float | None
    copies: int
    batches: tuple[int, ...]
    answers: Mapping[str, Mapping[str, int]]

    def __str__(self) -> str:
        batches = " and ".join(map(str, self.batches))
        checked = f", {self.checked:,} of them by all checks" if self.checked < self.count else ""
        copies = f"; {self.copies:,} others have the pixels of one of them, and do not count" if self.copies else ""
        return f"{self.count:,} images of {self.source}, at batch {batches}{checked}{copies}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnImages:
    """The times of a cascade on images that judged, because its time depends on the image: seconds of a batch.

    deferred: the share of the images that float32 computed again.  p99: None if there were too few batches.
    """

    deferred: float
    mean: float
    p50: float
    p99: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A runner that was tried.

    graph_sha256: the SHA-256 of the graph that was judged; "" if no graph was.
    passed: True if every check and the gate held.  reason: why the candidate was left out; "" if it passed.
    accuracy: the top-1 accuracy, a share; None without labelled images, and in float32.
    judged: the value that the gate judged, with its paired interval; None if it was not judged, or in float32.
    kept: the share of kept decisions, which is judged beside an accuracy; None if it is ``judged``.
    images_to_settle: the number of images that would bring the gate to one side of the interval; None if the
    interval settles it.  lacks_images: True if it is left out for nothing but the number of images.
    speed: the time of `Choice.base` divided by the candidate's time; None if it was not measured.
    seconds: the median time of a batch, in seconds, of a cascade the mean; None if it was not measured.
    on_images, threshold: of a cascade; the threshold of the margin that was judged.
    """

    runner: RunnerName
    passed: bool
    graph_sha256: str = ""
    reason: str = ""
    accuracy: float | None = None
    judged: Measured | None = None
    kept: Measured | None = None
    images_to_settle: int | None = None
    lacks_images: bool = False
    speed: Measured | None = None
    seconds: float | None = None
    on_images: OnImages | None = None
    threshold: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The candidates of a kind of machine, best first, and how they were judged.

    goal, batch: what was measured.  base: the runner whose speed is 1.
    gate, images: None if no images judged the candidates, as in an entry of export.
    versions: name → version of each runtime package, of this package and of the driver that the candidates ran with.
    made_at: when the entry was made, in UTC, ISO 8601.
    """

    machine: Machine
    goal: Goal
    batch: int
    candidates: tuple[Candidate, ...]
    versions: Mapping[str, str]
    made_at: str
    base: RunnerName
    gate: Gate | None = None
    images: JudgedImages | None = None

    @property
    def passed(self) -> tuple[Candidate, ...]:
        """The candidates that passed, best first."""
        return tuple(candidate for candidate in self.candidates if candidate.passed)

    def to_json(self) -> dict[str, Any]:
        candidates = [{**asdict(candidate), "runner": str(candidate.runner)} for candidate in self.candidates]
        return {**asdict(self), "base": str(self.base), "candidates": candidates}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Choice:
        """Read an entry.  Errors: KeyError, TypeError, ValueError or InputError for data of another form."""
        candidates = []
        for record in data["candidates"]:
            runner = RunnerName.parse(record["runner"])
            precision_from(runner.precision)
            if not isinstance(record["passed"], bool):
                raise ValueError(f"passed: expected true or false, got {record['passed']!r}")
            measured = {name: _read(Measured, record[name]) for name in ("judged", "kept", "speed")}
            measured["on_images"] = _read(OnImages, record["on_images"])
            candidates.append(_read(Candidate, {**record, "runner": runner, **measured}))
        if data["goal"] not in get_args(Goal):
            raise ValueError(f"goal: expected one of {', '.join(get_args(Goal))}, got {data['goal']!r}")
        images = data["images"] and {**data["images"], "batches": tuple(data["images"]["batches"])}
        read = {
            "machine": _read(Machine, data["machine"]),
            "base": RunnerName.parse(data["base"]),
            "candidates": tuple(candidates),
            "versions": dict(data["versions"]),
            "gate": _read(Gate, data["gate"]),
            "images": _read(JudgedImages, images),
        }
        return cls(**_complete(cls, {**data, **read}))


def read_choices(bundle: Path) -> tuple[tuple[Choice, ...], str]:
    """Return (the entries of a bundle's ``runners.json``, why the file is not used, or "").

    bundle: the bundle's folder.  A file that is missing, unreadable or of another program gives no entries.
    """
    path = bundle / CHOICES_FILE
    if not path.exists():
        return (), ""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != _FORMAT:
            raise ValueError(f"expected format {_FORMAT}, got {data['format']!r}")
        return tuple(Choice.from_json(entry) for entry in data["machines"]), ""
    except KeyError as exc:
        why = f"{exc} is missing"
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, InputError) as exc:
        why = str(exc)
    return (), f"{path} is not used, because it cannot be read: {why}; type gmmvit optimize {bundle} to write it again"


def recorded_answers(bundle: Path) -> Mapping[str, Mapping[str, int]]:
    """Return `JudgedImages.answers` of the newest entry with enough images, of any machine; empty if none has."""
    entries, _ = read_choices(bundle)
    judged = [(one.made_at, one.images.answers) for one in entries if one.images and one.images.count >= _ENOUGH]
    return max(judged, key=lambda each: each[0])[1] if judged else {}


def write_choice(bundle: Path, choice: Choice) -> Path:
    """Write an entry into ``runners.json`` in place of that of the same kind of machine, and return the file's path.

    A file that cannot be read is kept as ``runners.json.old``.
    bundle: the bundle's folder.  Errors: OutputError when the file cannot be written.
    """
    entries, unreadable = read_choices(bundle)
    if unreadable:
        (bundle / CHOICES_FILE).rename(bundle / f"{CHOICES_FILE}.old")
    kept = [entry for entry in entries if entry.machine != choice.machine]
    data = {"format": _FORMAT, "machines": [entry.to_json() for entry in (*kept, choice)]}
    with new_file(bundle / CHOICES_FILE, force=True) as file:
        file.write((json.dumps(data, indent=2) + "\n").encode())
    return bundle / CHOICES_FILE


def _read(kind: Any, data: Mapping[str, Any] | None) -> Any:
    return None if data is None else kind(**_complete(kind, data))


def _complete(kind: Any, data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the data if it has exactly the fields of a dataclass.  Errors: ValueError."""
    names = {field.name for field in fields(kind)}
    if differing := sorted(names ^ set(data)):
        raise ValueError(f"{kind.__name__}: expected {', '.join(sorted(names))}; differing: {', '.join(differing)}")
    return data
