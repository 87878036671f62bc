"""Write the tables of the README, of the documentation and of the pages of results from the scripts' result files.

    python benchmarks/tables.py            prints the tables
    python benchmarks/tables.py --write    replaces the tables between their markers, and writes the pages of results
    python benchmarks/tables.py --check    names each page whose tables are not current; the exit status is then 1

A marker is a pair of HTML comments around a table, such as ``<!-- served -->`` and ``<!-- /served -->``.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from benchmarks.shared.places import BENCHMARKS, RESULTS, ROOT
from benchmarks.shared.results import by_run, card_lines, result
from benchmarks.shared.systems import MEASURED
from benchmarks.shared.tables_int8 import int8_page
from benchmarks.shared.tables_reported import SHOWN, documented_tables, page_tables
from benchmarks.shared.tables_serving import every_input

HOSTILE = RESULTS / "hostile.md"
INT8 = ("int8_real", "int8_cascade")
"""Folders of results of int8_real.py: the first runs, and later ones with cascades and all programs of others."""
OVERVIEW = RESULTS / "README.md"


def overview() -> str:
    """Return the page of results: for each script the question, the tables and the run cards."""
    by_marker = {**documented_tables(), **page_tables()}
    lines = [
        "# Results",
        "",
        "`python benchmarks/tables.py --write` writes this page from the result files beside it. `make bench` runs the "
        "measurements again. Below each table stands the run card of its measurement: the machine, the versions, the "
        "settings, and for times a verdict. The verdict is INVALID if the machine was busy before or after the run, if "
        "its clock rate changed, if the interval of a ratio is wider than a quarter of the ratio, or if a program "
        "was faster than its roofline, the estimated shortest possible time.",
    ]
    for script, markers in SHOWN.items():
        if shown := [marker for marker in markers if marker in by_marker]:
            lines += ["", f"## {script}.py", "", question(script), ""]
            lines += [part for marker in shown for part in (by_marker[marker], "")]
            lines += _cards(script)
    return "\n".join([*lines, ""])


def question(script: str) -> str:
    """Return the first line of a script's docstring."""
    source = (BENCHMARKS / f"{script}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def _cards(script: str) -> list[str]:
    lines = []
    if (RESULTS / f"{script}.json").exists():
        lines += [*card_lines(result(script)["card"]), ""]
    runs = by_run(script)
    for run in sorted(runs, key=_position):
        lines += [f"### {run.replace('_', ' ')}", "", *card_lines(runs[run]["card"]), ""]
    return lines[:-1]


def _position(run: str) -> int:
    return MEASURED.index(run) if run in MEASURED else len(MEASURED)


def hostile_page() -> str:
    """Return the page of hostile inputs, which has a row for each input."""
    return every_input(by_run("hostile"))


def written(text: str) -> str:
    """Return ``text`` with the current table at each marker."""
    for marker, table in documented_tables().items():
        text = re.sub(
            rf"<!-- {marker} -->.*?<!-- /{marker} -->",
            f"<!-- {marker} -->\n{table}\n<!-- /{marker} -->",
            text,
            flags=re.DOTALL,
        )
    return text


def current() -> dict[Path, str]:
    """Return each page with tables of results → its text with the current tables."""
    documents = (ROOT / "README.md", *sorted((ROOT / "docs" / "pages").rglob("*.md")))
    texts = {page: written(page.read_text(encoding="utf-8")) for page in documents}
    pages = {OVERVIEW: overview(), HOSTILE: hostile_page()}
    pages |= {RESULTS / f"{folder}.md": int8_page(runs, folder) for folder in INT8 if (runs := by_run(folder))}
    return {**texts, **pages}


def problems() -> list[str]:
    """Return a sentence for each page whose tables are not current, and each table that is not on exactly one page."""
    texts = current()
    stale = [page for page, text in texts.items() if page.read_text(encoding="utf-8") != text]
    reasons = [f"{page.relative_to(ROOT)}: not current: run benchmarks/tables.py --write" for page in stale]
    for marker in documented_tables():
        places = [str(page.relative_to(ROOT)) for page, text in texts.items() if f"<!-- {marker} -->" in text]
        if len(places) != 1:
            reasons.append(f"{marker}: expected the marker on one page, got {', '.join(places) or 'none'}")
    return reasons


def main() -> int:
    if "--check" in sys.argv:
        reasons = problems()
        print("\n".join(reasons or ["every table is current"]))
        return 1 if reasons else 0
    if "--write" in sys.argv:
        for page, text in current().items():
            page.write_text(text, encoding="utf-8")
        return 0
    for marker, table in documented_tables().items():
        print(f"{marker}\n{table}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
