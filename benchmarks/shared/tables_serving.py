"""Make the tables of the results about servers on a network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.shared.results import interval

__all__ = [
    "every_input",
    "hostile_memory",
    "hostile_summary",
    "hostile_table",
    "large_images_table",
    "one_image_parts_table",
    "one_image_table",
]

_ANSWERS = ("refused", "answered", "failed", "closed", "crash", "hang")


def hostile_table(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table with a row for each kind of input, and below it the inputs with a wrong outcome.

    runs: target → result: ``commands``, ``gateway``, ``direct`` (Triton and the front) or ``unprotected`` (the same,
    with the usual stack).
    """
    lines = [f"| target | inputs | {' | '.join(_ANSWERS)} |", "|---|---|" + "---|" * len(_ANSWERS)]
    for target, run in runs.items():
        for kind, counts in run["summary"]["kinds"].items():
            lines.append(f"| {target} | {kind} | {' | '.join(str(counts.get(a, 0)) for a in _ANSWERS)} |")
    for target, run in runs.items():
        summary = run["summary"]
        lines += ["", f"{target}: {summary['inputs']} inputs{_memory(run.get('memory', {}))}"]
        for answer, names in summary["wrong"].items():
            lines += ["", f"{target}, {answer} (not right): {'; '.join(names) or 'no input'}."]
        for names in run.get("ended_together", []):
            lines += ["", f"{target}, a process ended after these inputs, but after none of them alone: {names}."]
        lines += [
            "",
            f"{target}, files outside the folders of the input: {'; '.join(summary['files_outside']) or 'none'}.",
        ]
    return "\n".join(lines)


def hostile_summary(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table with a row for each kind of input, for the documentation."""
    lines = [
        "| inputs | number | crashes | hangs | files outside | end an unprotected server |",
        "|---|---|---|---|---|---|",
    ]
    ended = _ended(runs.get("unprotected", {}))
    for target, run in runs.items():
        if target not in ("commands", "gateway"):
            continue
        for kind in run["summary"]["kinds"]:
            names = {record["name"] for record in run["records"] if record["kind"] == kind}
            bad = [
                sum(text.startswith(f"{kind}: ") for text in texts)
                for texts in (*(run["summary"]["wrong"][a] for a in ("crash", "hang")), run["summary"]["files_outside"])
            ]
            count = "" if target == "commands" else str(sum(key[0] == kind for key in ended))
            lines.append(f"| {kind} | {len(names)} | {' | '.join(map(str, bad))} | {count} |")
    return "\n".join(lines)


def hostile_memory(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table with the resident memory of each process of the service after each round, in MB."""
    memory = runs["gateway"]["memory"]
    times = (memory["before_mb"], *memory["rounds"])
    numbers = " | ".join(f"round {number}" for number in range(1, len(times)))
    rows = {name: [each[name] for each in times] for name in memory["before_mb"]}
    rows["all"] = [sum(each.values()) for each in times]
    return "\n".join(
        [
            f"| MB | before | {numbers} |",
            "|---" * (len(times) + 1) + "|",
            *(f"| {name} | {' | '.join(map(str, values))} |" for name, values in rows.items()),
        ]
    )


def _ended(run: Mapping[str, Any]) -> set[tuple[str, str]]:
    return {(r["kind"], r["name"]) for r in run.get("records", []) if "crash" in (r["answer"], r.get("later"))}


def every_input(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a page with a row for each input: what was answered, and whether it ends an unprotected server."""
    lines = [
        "# Every hostile input",
        "",
        "`python benchmarks/tables.py --write` writes this page. For checkpoints and bundles, the answer is that of "
        "the command. For other inputs, it is the answer through the gateway with a key, then without a key. The last "
        "column is the answer of Triton without gateway, with the stack of 8 MiB that Linux gives by default; "
        "**ended** marks an input that alone ends that server.",
    ]
    unprotected = {(r["kind"], r["name"]): r for r in runs.get("unprotected", {}).get("records", [])}
    records = [r for target in ("commands", "gateway") for r in runs.get(target, {}).get("records", [])]
    without = {(r["kind"], r["name"]): r["answer"] for r in records if r.get("key") is False}
    kind = ""
    for record in records:
        if record.get("key") is False:
            continue
        if record["kind"] != kind:
            kind = record["kind"]
            lines += ["", f"## {kind}", "", "| input | answer | without a key | reason | unprotected |"]
            lines.append("|---|---|---|---|---|")
        name = (kind, record["name"])
        bare = unprotected.get(name, {}).get("answer", "")
        cells = [record["name"], record["answer"], without.get(name, ""), record["reason"][:110]]
        lines.append(f"| {' | '.join(map(_cell, cells))} | {'**ended**' if bare == 'crash' else bare} |")
    return "\n".join([*lines, ""])


def _cell(text: str) -> str:
    """Return text of a stranger as a cell: printable, without the signs of Markdown and HTML."""
    shown = "".join(sign if sign.isprintable() else " " for sign in text)
    for sign, code in (("&", "&amp;"), ("<", "&lt;"), ("|", "&#124;"), ("*", "&#42;"), ("`", "&#96;")):
        shown = shown.replace(sign, code)
    return shown.strip()


def _memory(memory: Mapping[str, Any]) -> str:
    """Return the memory before the first and after each round, by process."""
    if "before_mb" not in memory:
        return "."
    restarts = f", {memory['restarts']} restarts" if "restarts" in memory else ""
    states = [memory["before_mb"], *memory["rounds"]]
    names = [name for name in states[0] if any(state.get(name, 0) != states[0][name] for state in states)]
    parts = [f"{name} {', '.join(str(state.get(name, 0)) for state in states)}" for name in names]
    totals = ", ".join(str(sum(state.values())) for state in states)
    return f"{restarts}; memory in MB before, and after each round: {totals} ({'; '.join(parts)})."


def one_image_table(results: Mapping[str, Any]) -> str:
    """Return a table with a row for each input and runner: ms in process, and how much longer other steps take."""
    rows = results["inputs"]
    first, *others = next(iter(rows.values()))["steps"]
    lines = [f"| input, runner | {first}, ms | {' | '.join(f'{step}: more, ms' for step in others)} |"]
    lines.append("|---" * (2 + len(others)) + "|")
    for name, row in rows.items():
        cells = [f"{row['steps'][first]['ms']:.2f}"]
        for step in others:
            over = row["steps"][step]["over_in_process_ms"]
            low, high = over["quartiles"]
            cells.append(f"{over['median']:+.2f} ({low:+.2f} to {high:+.2f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def one_image_parts_table(results: Mapping[str, Any]) -> str:
    """Return a table with a row for each model that a step calls: the parts of a request's time in Triton, in µs."""
    parts = ("queue", "input", "infer", "output")
    lines = [f"| input, runner | step: model | {' | '.join(f'{part}, µs' for part in parts)} |", "|---" * 6 + "|"]
    for name, row in results["inputs"].items():
        for step, measured in row["server_parts_ms"].items():
            for model in dict.fromkeys(key.rpartition(" ")[0] for key in measured):
                cells = [f"{measured[f'{model} {part}'] * 1e3:.0f}" for part in parts]
                lines.append(f"| {name} | {step}: `{model}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def large_images_table(results: Mapping[str, Any]) -> str:
    """Return a table with a row for each number of threads of the preprocessing."""
    lines = [
        "| threads | decoder, images/s | network, images/s | ensemble, images/s | ensemble / sum | ensemble / slower |",
        "|---|---|---|---|---|---|",
    ]
    for threads, row in results["threads"].items():
        rates = [f"{row['images_per_second'][name]:,.1f}" for name in ("decoder", "network", "ensemble")]
        name = "a thread per core" if threads == "0" else threads
        shares = [interval(row[share]) for share in ("share_of_sum", "share_of_slower")]
        lines.append(f"| {name} | {' | '.join([*rates, *shares])} |")
    return "\n".join(lines)
