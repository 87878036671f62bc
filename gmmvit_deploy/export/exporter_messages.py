"""Keep the exporter of PyTorch quiet, and put the reason of a failure into a single line."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

__all__ = ["quiet_exporter", "reason_of_exporter"]

_GRAPHS = ("def forward(", "class GraphModule")
_PLACE = re.compile(r'File "([^"]+)", line (\d+), in forward\n(.*)')


def reason_of_exporter(exc: Exception) -> str:
    """Return the first line of the first cause, and the last line of a forward that the exporter's report names."""
    cause: BaseException = exc
    while cause.__cause__ is not None:
        cause = cause.__cause__
    first = next(iter(str(cause).strip().splitlines()), "")
    reason = f"{type(cause).__name__}: {first}" if first else type(cause).__name__
    places = _PLACE.findall(str(exc))
    if not places:
        return reason
    file, number, code = places[-1]
    return f"{reason}; the exporter stopped at {file}, line {number}: {code.strip()}"


@contextlib.contextmanager
def quiet_exporter() -> Iterator[None]:
    """Suppress the exporter's messages about progress, deprecations, missing torchvision, and graphs that fail."""
    level = logging.root.manager.disable
    logging.disable(max(level, logging.ERROR))
    stderr: Any = _WithoutGraphs(sys.stderr)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(stderr):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


class _WithoutGraphs:
    """A stream without the graphs that ``torch.export`` prints when it fails."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._graph_before = False

    def write(self, text: str) -> int:
        is_graph = text.lstrip().startswith(_GRAPHS)
        if is_graph or (self._graph_before and text == "\n"):
            self._graph_before = is_graph
            return len(text)
        self._graph_before = False
        return int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
