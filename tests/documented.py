"""Read the pages of the documentation, their blocks and tables, and run their commands.

    ```console           commands after ``$ ``, each followed by lines of its output
    <!-- not run: … -->  above a block: why no test runs it
    <!-- run by FILE --> above a block: the test that runs it in an environment of its own
    <!-- exit 1 -->      above a block: the exit status of its commands, 0 by default

A line of output that is ``…`` alone stands for any number of lines.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = ROOT / "docs" / "pages"
NAVIGATION = tuple(re.findall(r'= "([\w/]+\.md)"', (ROOT / "docs" / "zensical.toml").read_text(encoding="utf-8")))
"""Pages below docs/pages in the order in which a reader meets them."""

_FENCE = re.compile(r"^```(\w*)\s*$")
_MARK = re.compile(r"^<!-- (?:not run: (?P<reason>.+)|run by (?P<test>\S+)|exit (?P<status>\d+)) -->$")
_ELLIPSIS = "…"
FEWER_IMAGES = {"optimize": ("--limit", "120"), "parity": ("--limit", "100")}
"""Command → what the tests add to it: the pages show what a reader types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block.

    line: of its opening fence, from 1.  reason: why no test runs it, or empty.  test: the file of the test that runs it
    in an environment of its own; empty if it runs with the other blocks of its page.
    """

    page: Path
    line: int
    language: str
    text: str
    reason: str
    test: str
    status: int

    @property
    def runs_here(self) -> bool:
        return not self.reason and not self.test

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """text: the command without its ``$ ``.  typed: its lines as they stand.  output: the lines written below it."""

    text: str
    typed: tuple[str, ...]
    output: tuple[str, ...]


def texts() -> dict[Path, str]:
    """Return the README and every page, in the order of the navigation."""
    return {path: path.read_text(encoding="utf-8") for path in (README, *(PAGES / name for name in NAVIGATION))}


def blocks(page: Path, text: str) -> Iterator[Block]:
    """Return every fenced block of a page."""
    mark: re.Match[str] | None = None
    opened: tuple[int, str] | None = None
    body: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        fence = _FENCE.match(line)
        if opened is None and fence is None:
            mark = _MARK.match(line) or (mark if not line else None)
        elif opened is None:
            opened, body = (number, fence[1] if fence else ""), []
        elif line == "```":
            reason = (mark["reason"] or "") if mark else ""
            status = int(mark["status"] or 0) if mark else 0
            test = (mark["test"] or "") if mark else ""
            yield Block(
                page=page,
                line=opened[0],
                language=opened[1],
                text="\n".join(body),
                reason=reason,
                test=test,
                status=status,
            )
            opened = mark = None
        else:
            body.append(line)


def commands(block: Block) -> list[Command]:
    """Return the commands of a console block; a line that ends with a backslash continues on the next line."""
    entries: list[tuple[list[str], list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            entries.append(([line], []))
        elif entries[-1][0][-1].endswith("\\") and not entries[-1][1]:
            entries[-1][0].append(line)
        else:
            entries[-1][1].append(line)
    return [
        Command(
            text=" ".join(line.removesuffix("\\").strip() for line in typed)[2:],
            typed=tuple(typed),
            output=tuple(output),
        )
        for typed, output in entries
    ]


def with_output(page_text: str, block: Block, output: Mapping[str, str]) -> str:
    """Return the page's text with the block's written output replaced.

    Commands without written output stay so, and those with ``…`` among their lines, which somebody shortened.
    """
    lines: list[str] = []
    for command in commands(block):
        lines += command.typed
        if _ELLIPSIS in command.output:
            lines += command.output
        elif command.output:
            actual = "\n".join(line.rstrip() for line in output[command.text].splitlines())
            lines += re.sub(r"\n{3,}", "\n\n", actual.strip("\n")).splitlines()
    fresh = "\n".join(lines)
    return page_text.replace(f"```console\n{block.text}\n```", f"```console\n{fresh}\n```")


def _skeleton(line: str) -> str:
    """Return a line without the parts that vary: numbers, hashes, which inputs differ most, widths of columns."""
    line = re.sub(r"\b[0-9a-f]{64}\b", "#", line)
    # The inputs that differ most are others on other machines.
    line = re.sub(r"\b(?:reference inputs|random|data: [a-z ]+)(?:, batch \d+)?: at most", "at most", line)
    line = re.sub(r"[-+±]?\d[\d,]*(?:\.\d+)*(?:e[-+]?\d+)?", "#", line)
    return " ".join(re.sub(r"─+", "─", line).split())


def mismatch(written: tuple[str, ...], actual: str, *, ignored: Callable[[str], bool] = lambda line: False) -> str:
    """Return the first written line that the output lacks or has in another place; empty without such a line."""
    remaining = iter([_skeleton(line) for line in actual.splitlines()])
    for line in written:
        if line == _ELLIPSIS or ignored(line) or not line.strip():
            continue
        if _skeleton(line) not in remaining:  # consumes up to the match
            return line
    return ""


def table(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table whose header begins with ``heading``, row by row, without the header."""
    lines = iter((PAGES / page).read_text(encoding="utf-8").splitlines())
    for line in lines:
        if line.startswith(f"| {heading} |"):
            next(lines)
            rows = []
            for row in lines:
                if not row.startswith("|"):
                    break
                rows.append([cell.strip() for cell in row.strip("|").split(" | ")])
            return rows
    raise AssertionError(f"{page} has no table that begins with {heading!r}")


def first_column(page: str, heading: str) -> list[str]:
    """Return every name in backticks in the first column of a table."""
    return [name for row in table(page, heading) for name in re.findall(r"`([^`]+)`", row[0])]


class Shell:
    """Runs the documentation's commands in ``folder``, with at most one server, on free ports; `close` stops it."""

    def __init__(self, folder: Path, gmmvit: Callable[..., subprocess.CompletedProcess[str]]) -> None:
        self._folder, self._gmmvit = folder, gmmvit
        self._server: subprocess.Popen[str] | None = None
        self._served = self._ready = ""
        self._urls: dict[str, str] = {}

    def run(self, text: str) -> subprocess.CompletedProcess[str]:
        """Errors: AssertionError for an unknown command, or a server that does not start."""
        program, command, *rest = shlex.split(text)
        if program == "curl":
            return self._curl(command, *rest)
        assert program == "gmmvit", f"{text}: mark the block as not run, with the reason"
        if command == "serve":
            return self._serve(text, rest)
        for documented, url in self._urls.items():
            rest = [word.replace(documented, url) for word in rest]
        fewer = FEWER_IMAGES.get(command, ()) if "--data" in rest else ()
        return self._gmmvit(command, *rest, *fewer, timeout_s=300)

    def _curl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Ask the server that runs."""
        words = ["curl", "--silent", "--show-error", "--fail-with-body", *arguments]
        for documented, url in self._urls.items():
            words = [word.replace(documented, url) for word in words]
        answer = subprocess.run(words, cwd=self._folder, capture_output=True, text=True, timeout=60, check=False)
        answer.stdout = _with_the_documented_runner(answer.stdout)
        return answer

    def _serve(self, text: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        if self._server is None or self._served != text:
            self.close()
            free = [part for name in ("http", "grpc", "metrics", "classify") for part in (f"--{name}-port", "0")]
            free += ["--log", "tritonserver.log"]
            words = [sys.executable, "-m", "gmmvit_cli.main", "serve", *arguments, *free]
            self._server = subprocess.Popen(words, cwd=self._folder, stdout=subprocess.PIPE, text=True, env=os.environ)
            assert self._server.stdout is not None
            self._served, self._ready = text, self._server.stdout.readline()
            urls = re.findall(r"(?:grpc|http)://\S+", self._ready)
            assert len(urls) >= 2, f"{text}: {self._ready!r}"
            self._urls = {"grpc://localhost:8001": urls[0], "http://localhost:8000": urls[1]}
            if classify := re.search(r"  classify (\S+)", self._ready):
                self._urls["http://127.0.0.1:8080/classify"] = classify[1]
        documented = re.sub(r"(?<=grpc://127\.0\.0\.1:)\d+", "8001", self._ready)
        documented = re.sub(r"(?<=  http://127\.0\.0\.1:)\d+(?=\s)", "8000", documented)
        documented = re.sub(r"(?<=page http://127\.0\.0\.1:)\d+", "8080", documented)
        documented = re.sub(r"(?<=:)\d+(?=/metrics)", "8002", documented)
        documented = re.sub(r"(?<=:)\d+(?=/classify)", "8080", documented)
        return subprocess.CompletedProcess([text], 0, _with_the_documented_runner(documented), "")

    def close(self) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server.wait(60)
            self._server = None


def _with_the_documented_runner(text: str) -> str:
    """Which runtime export finds fastest depends on the machine."""
    stated = r"(?<=/classify  )(?!page)\S+|(?<=:8080  )\S+|(?<=\"runner\":\")[^\"]+"
    return re.sub(stated, "openvino+kernels", text)
