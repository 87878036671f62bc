"""Classify a shard: images → batches of a fixed size → logits → rows of a Parquet file.

Every batch has the same size and the same images in the same places, whatever was interrupted before: in the place of
an image that cannot be decoded, and after the last image, the network gets black pixels. With the same program on the
same kind of processor, the rows of a shard are therefore always the same, bit for bit.

The images of a shard are read, hashed and decoded ahead of the network, in threads. At most `_PIECES_AHEAD` pieces a
thread are read ahead, and a thread holds the bytes of a single image at a time (of Parquet: of a few rows), so memory
does not grow with the shard.

Until a shard is complete, its rows are kept in files of their own, every `_KEEP_EVERY_S` of work. The next process
continues after them.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from gmmvit_deploy.bulk._filesystems import UnreadableImage
from gmmvit_deploy.bulk._plan import Plan, Rows, ShardRecord, entries_of, kept_rows, shard_name
from gmmvit_deploy.bulk._storage import Storage
from gmmvit_deploy.bulk.source import Entry, Source
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.images.data.other_formats import pixels_of_file
from gmmvit_deploy.inference import DEFERRED
from gmmvit_deploy.inference.preprocess import UnusableImage

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gmmvit_deploy.bundle.artifacts import Bundle
    from gmmvit_deploy.images.spec import ImageSpec
    from gmmvit_deploy.runtimes.runners.runner import Runner

_ROW_GROUP = 1024
"""Minimum number of rows in each row group of a shard, but the last."""
_KEEP_EVERY_S = 30.0
_MAX_IN_MEMORY = 16 * _ROW_GROUP
"""Rows that are kept sooner: with 1,000 logits and 1,000 features each, about 130 MB."""
_PIECE = 16
_PIECES_AHEAD = 3


class Decoded(NamedTuple):
    """An image before the network: its hash and pixels, or the reason why there are no pixels.

    sha256: hexadecimal hash of the encoded bytes; None if they could not be read.
    pixels: uint8 (height, width, channels), or None.  error: the reason, or None.
    """

    sha256: str | None
    pixels: NDArray[Any] | None
    error: str | None


class ShardProgram:
    """Classifies any shard of a job, until it is closed."""

    def __init__(
        self,
        plan: Plan,
        source: Source,
        storage: Storage,
        bundle: Bundle,
        runner: Runner,
        *,
        decode_threads: int,
    ) -> None:
        self._plan, self._source, self._storage = plan, source, storage
        self._bundle, self._runner = bundle, runner
        self._threads = decode_threads
        self._pool = ThreadPoolExecutor(decode_threads, thread_name_prefix="decode")
        self._image = bundle.manifest.image
        self._outputs = bundle.manifest.output_names
        self._schema = _schema(bundle, cascade=runner.record is not None)

    def write(self, shard: ShardRecord, on_images: Callable[[int], None]) -> None:
        """Classify the images of a shard whose rows are not kept yet, and write the file of the shard.

        The file is not written if another process has removed the kept rows, as it does when it has written the file.
        on_images: called with the number of images of each batch that is done.
        Errors: OutputError when the file cannot be written; InputError when the source has changed or cannot be read.
        """
        import pyarrow
        import pyarrow.parquet as parquet

        entries = entries_of(self._storage, self._plan, shard)
        kept = kept_rows(self._storage).get(shard.number, [])
        start = end = kept[-1].end if kept else 0
        fresh, since = [], time.monotonic()
        for images in self._decoded_batches(self._source.contents(shard.file, entries[start:])):
            fresh.append(self._rows(entries[end : end + len(images)], images))
            end += len(images)
            enough = end - start >= _MAX_IN_MEMORY or time.monotonic() - since >= _KEEP_EVERY_S
            if enough and end < len(entries):
                kept.append(Rows(shard=shard.number, start=start, end=end))
                with self._storage.written(kept[-1].name) as file, pyarrow.ipc.new_stream(file, self._schema) as stream:
                    stream.write_table(pyarrow.Table.from_batches(fresh))
                start, fresh, since = end, [], time.monotonic()
            on_images(len(images))
        rows, batches_at_once = chain(self._read(kept), fresh), -(-_ROW_GROUP // self._plan.settings.batch)
        try:
            with (
                self._storage.written(shard_name(shard.number)) as file,
                parquet.ParquetWriter(file, self._schema) as writer,
            ):
                while group := list(islice(rows, batches_at_once)):
                    writer.write_table(pyarrow.Table.from_batches(group))
        except InputError as exc:
            if not isinstance(exc.__cause__, FileNotFoundError):
                raise

    def _decoded_batches(self, contents: Iterable[Callable[[], bytes]]) -> Iterator[list[Decoded]]:
        """Yield the images in their order, in batches of the plan; the last may be smaller.

        contents: functions that return the bytes of an image.  Errors: those of the functions but `UnreadableImage`.
        """
        batch, pieces = self._plan.settings.batch, iter(contents)
        ahead = _PIECES_AHEAD * self._threads + batch // _PIECE
        waiting: deque[Future[list[Decoded]]] = deque()
        ready: list[Decoded] = []
        try:
            while True:
                while len(waiting) < ahead and (piece := [*islice(pieces, _PIECE)]):
                    waiting.append(self._pool.submit(_decode, piece, self._image))
                if not waiting:
                    break
                ready += waiting.popleft().result()
                while len(ready) >= batch:
                    yield ready[:batch]
                    ready = ready[batch:]
            if ready:
                yield ready
        finally:
            for future in waiting:
                future.cancel()

    def _read(self, kept: Sequence[Rows]) -> Iterator[Any]:
        """Yield the kept batches as they were.  Errors: InputError when a file is damaged."""
        import pyarrow

        for rows in kept:
            with opened_rows(self._storage, rows.name, pyarrow.ipc.open_stream) as batches:
                yield from batches

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._runner.close()

    def _rows(self, entries: Sequence[Entry], images: Sequence[Decoded]) -> Any:
        import pyarrow

        usable = [row for row, image in enumerate(images) if image.pixels is not None]
        answers = {name: rows[usable] for name, rows in self._answers(images).items()} if usable else {}
        columns: dict[str, Any] = {
            "id": [_text(entry.id) for entry in entries],
            "sha256": [image.sha256 for image in images],
            "error": [None if image.error is None else _text(image.error) for image in images],
            "bundle_sha256": [self._plan.settings.bundle_sha256] * len(images),
        }
        for name in self._outputs:
            columns[name] = _at(usable, answers.get(name, ()), len(images))
        if DEFERRED in self._schema.names:
            columns[DEFERRED] = _at(usable, [bool(row) for (row,) in answers.get(DEFERRED, ())], len(images))
        if "features" in self._outputs:
            # Before version 26, pyarrow cannot write a list of fixed size that is null, nor read it.
            nothing = [math.nan] * self._schema.field("features").type.list_size
            columns["features"] = [nothing if row is None else row for row in columns["features"]]
        if "logits" in self._outputs:
            labels, probabilities = self._labels(answers["logits"]) if usable else ([], [])
            columns["label"] = _at(usable, labels, len(images))
            columns["probability"] = _at(usable, probabilities, len(images))
        arrays = [pyarrow.array(columns[field.name], field.type) for field in self._schema]
        return pyarrow.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _answers(self, images: Sequence[Decoded]) -> dict[str, NDArray[Any]]:
        import numpy as np

        pixels = np.zeros((self._plan.settings.batch, *self._image.pixels_shape), np.uint8)
        for row, image in enumerate(images):
            if image.pixels is not None:
                pixels[row] = image.pixels
        answers = self._runner.run_all(self._bundle.inputs_from_pixels(pixels))
        return {str(name): rows for name, rows in answers.items()}

    def _labels(self, logits: NDArray[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return (labels, probabilities) of logits (N, C): of a multi-label network, a list of each for an image."""
        label_set = self._bundle.manifest.label_set
        probabilities = label_set.probabilities(logits)
        names = label_set.names or tuple(str(index) for index in range(logits.shape[1]))
        if label_set.task == "single-label":
            best = logits.argmax(-1)
            return [names[c] for c in best], [row[c] for row, c in zip(probabilities, best, strict=True)]
        present = [[c for c, limit in enumerate(label_set.thresholds) if row[c] >= limit] for row in probabilities]
        return (
            [[names[c] for c in chosen] for chosen in present],
            [[row[c] for c in chosen] for row, chosen in zip(probabilities, present, strict=True)],
        )


def _decode(contents: Sequence[Callable[[], bytes]], image: ImageSpec) -> list[Decoded]:
    return [_decoded(content, image) for content in contents]


def _decoded(content: Callable[[], bytes], image: ImageSpec) -> Decoded:
    try:
        data = content()
    except UnreadableImage as exc:
        return Decoded(None, None, str(exc))
    digest = hashlib.sha256(data).hexdigest()
    try:
        return Decoded(digest, pixels_of_file(data, image), None)
    except UnusableImage as exc:
        return Decoded(digest, None, str(exc))


def _text(text: str) -> str:
    """Return text that Parquet can store: names of files need not be UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def _at(usable: Sequence[int], values: Any, count: int) -> list[Any]:
    """Return a value for each of ``count`` images: that of a usable image, None for the others."""
    of_rows = dict(zip(usable, values, strict=True))
    return [of_rows.get(row) for row in range(count)]


def _schema(bundle: Bundle, *, cascade: bool) -> Any:
    import pyarrow as pa

    manifest = bundle.manifest
    several = manifest.label_set.task == "multi-label"

    def maybe_list(kind: Any) -> Any:
        return pa.list_(kind) if several else kind

    labels = [("label", maybe_list(pa.string())), ("probability", maybe_list(pa.float64()))]
    # Vector databases take features as lists of a fixed size.
    sizes = {output.name: output.shape[0] if output.name == "features" else -1 for output in manifest.outputs}
    outputs = [(name, pa.list_(pa.float32(), size)) for name, size in sizes.items()]
    return pa.schema(
        [
            ("id", pa.string()),
            ("sha256", pa.string()),
            *(labels if manifest.has_logits else []),
            *outputs,
            *([(DEFERRED, pa.bool_())] if cascade else []),
            ("error", pa.string()),
            ("bundle_sha256", pa.string()),
        ]
    )


def opened_shard(storage: Storage, number: int) -> AbstractContextManager[Any]:
    """Open a complete shard as pyarrow's ParquetFile.  Errors: InputError when the file is damaged."""
    import pyarrow.parquet as parquet

    return opened_rows(storage, shard_name(number), parquet.ParquetFile)


@contextmanager
def opened_rows(storage: Storage, name: str, opened: Callable[[Any], Any]) -> Iterator[Any]:
    """Yield what ``opened`` makes of a file with complete rows.  Errors: InputError when the file is damaged."""
    import pyarrow

    try:
        with storage.open(name) as file:
            yield opened(file)
    except (OSError, pyarrow.ArrowException) as exc:
        raise InputError(
            f"{storage.url}/{name}: expected complete rows: {exc}",
            hint="remove this file and type the same command again",
        ) from exc


def count_of_shard(storage: Storage, number: int) -> tuple[int, int]:
    """Return (rows, rows with an error) of a complete shard, from the statistics in its file.

    Errors: InputError when the file is damaged.
    """
    with opened_shard(storage, number) as shard:
        metadata = shard.metadata
    column = next(c for c in range(metadata.num_columns) if metadata.schema.column(c).path == "error")
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    errors = sum(group.num_rows - group.column(column).statistics.null_count for group in groups)
    return metadata.num_rows, errors
