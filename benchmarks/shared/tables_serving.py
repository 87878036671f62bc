"""Make the tables of the results about servers on a network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.shared.results import interval, table

_ANSWERS = ("refused", "answered", "failed", "closed", "crash", "hang")
_PLACES = {"direct": "Triton directly", "gateway": "through the gateway"}


def hostile_table(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a row for each kind of input, and below it the inputs with a wrong outcome.  runs: target → result."""
    rows = [
        (target, kind, *(str(counts.get(answer, 0)) for answer in _ANSWERS))
        for target, run in runs.items()
        for kind, counts in run["summary"]["kinds"].items()
    ]
    lines = [table(("target", "inputs", *_ANSWERS), rows)]
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
    ended = _ended(runs.get("unprotected", {}))
    rows = []
    for target in ("commands", "gateway"):
        run = runs.get(target, {"summary": {"kinds": ()}})
        for kind in run["summary"]["kinds"]:
            names = {record["name"] for record in run["records"] if record["kind"] == kind}
            bad = [
                str(sum(text.startswith(f"{kind}: ") for text in texts))
                for texts in (*(run["summary"]["wrong"][a] for a in ("crash", "hang")), run["summary"]["files_outside"])
            ]
            count = "" if target == "commands" else str(sum(key[0] == kind for key in ended))
            rows.append((kind, str(len(names)), *bad, count))
    head = ("inputs", "number", "crashes", "hangs", "files outside", "end an unprotected server")
    return table(head, rows)


def hostile_memory(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table with the memory of each process of the service after each round, in MB."""
    memory = runs["gateway"]["memory"]
    times = (memory["before_mb"], *memory["rounds"])
    rows = {name: [each.get(name, 0) for each in times] for name in memory["before_mb"]}
    rows["all"] = [sum(each.values()) for each in times]
    head = ("MB", "before", *(f"round {number}" for number in range(1, len(times))))
    lines = table(head, [(name, *map(str, values)) for name, values in rows.items()])
    return f"Memory of the service after each round of all requests:\n\n{lines}"


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
    sent = [record for record in records if record.get("key") is not False]
    for kind in dict.fromkeys(record["kind"] for record in sent):
        rows = []
        for record in (each for each in sent if each["kind"] == kind):
            name = (kind, record["name"])
            bare = unprotected.get(name, {}).get("answer", "")
            cells = [record["name"], record["answer"], without.get(name, ""), record["reason"][:110]]
            rows.append((*map(_cell, cells), "**ended**" if bare == "crash" else bare))
        lines += ["", f"## {kind}", "", table(("input", "answer", "without a key", "reason", "unprotected"), rows)]
    return "\n".join([*lines, ""])


def _cell(text: str) -> str:
    """Return text of a stranger as a cell: printable, without the signs of Markdown and HTML."""
    shown = "".join(sign if sign.isprintable() else " " for sign in text)
    for sign, code in (("&", "&amp;"), ("<", "&lt;"), ("|", "&#124;"), ("*", "&#42;"), ("`", "&#96;")):
        shown = shown.replace(sign, code)
    return shown.strip()


def _memory(memory: Mapping[str, Any]) -> str:
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
    first, *others = next(iter(results["inputs"].values()))["steps"]
    rows = []
    for name, row in results["inputs"].items():
        cells = [name, f"{row['steps'][first]['ms']:.2f}"]
        for step in others:
            over = row["steps"][step]["over_in_process_ms"]
            low, high = over["quartiles"]
            cells.append(f"{over['median']:+.2f} ({low:+.2f} to {high:+.2f})")
        rows.append(cells)
    return table(("input, runner", f"{first}, ms", *(f"{step}: more, ms" for step in others)), rows)


def one_image_parts_table(results: Mapping[str, Any]) -> str:
    """Return a table with a row for each model that a step calls: the parts of a request's time in Triton, in µs."""
    parts = ("queue", "input", "infer", "output")
    rows = [
        (name, f"{step}: `{model}`", *(f"{measured[f'{model} {part}'] * 1e3:.0f}" for part in parts))
        for name, row in results["inputs"].items()
        for step, measured in row["server_parts_ms"].items()
        for model in dict.fromkeys(key.rpartition(" ")[0] for key in measured)
    ]
    return table(("input, runner", "step: model", *(f"{part}, µs" for part in parts)), rows)


def overload_table(results: Mapping[str, Any]) -> str:
    """Return a table with a row for each protocol, directly and through the gateway."""
    rows = []
    for protocol in ("grpc", "http"):
        capacity = results[protocol]["direct"]["capacity_per_second"]
        for place, words in _PLACES.items():
            row = results[protocol][place]
            over = row["overload"]
            rate = over["answered_per_second"]
            rows.append(
                (
                    protocol,
                    f"{capacity:.0f}/s",
                    words,
                    f"{rate:.1f}/s, {rate / capacity:.0%} of the capacity",
                    f"{over['slowest_refusal_ms']:.0f} ms" if over["slowest_refusal_ms"] else "none refused",
                    f"{over['statuses'].get('DEADLINE', 0) / over['requests']:.0%}",
                    f"{row['recovered_s']:.2f} s",
                )
            )
    head = ("protocol", "capacity", "clients send to", "answered in time", "slowest refusal")
    return table((*head, "clients that gave up", "recovered after"), rows)


def gateway_cost_table(results: Mapping[str, Any]) -> str:
    """Return a table with a row for each protocol and number of clients."""
    rows = [
        (
            name.replace(" 1 clients", " 1 client"),
            *(f"{row['requests_per_second'][place]:,.0f}/s" for place in _PLACES),
            interval(row["share"]),
            f"{row['cost_ms']['median']:.2f} ms",
        )
        for name, row in results["rows"].items()
    ]
    head = ("protocol, clients", "directly", "through the gateway", "share of the throughput", "cost of a request")
    return table(head, rows)


def rollout_table(result: Mapping[str, Any]) -> str:
    """Return a sentence on the requests, and a table with a row for each rollout."""
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(result["by_kind"].items()))
    sentence = (
        f"{result['requests']:,} requests ({kinds}) at {result['requests_per_second']:.0f}/s; the clients reach "
        f"{result['capacity_per_second']:.0f}/s in closed loop. Lost: {result['lost']}. Wrong: {result['wrong']}."
    )
    rows = [
        (
            str(number),
            *(row[name] for name in ("bundle", "expected", "outcome")),
            f"{row['seconds']:.1f} s",
            f"{row['requests']:,}",
            f"{row['answers'].get(row['bundle'], 0):,}",
        )
        for number, row in enumerate(result["rollouts"], start=1)
    ]
    head = ("rollout", "bundle", "expected", "outcome", "time", "requests meanwhile", "answers of the new bundle")
    return f"{sentence}\n\n{table(head, rows)}"


def peers_table(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Return for each network a table with a row for each program, and one of every service that was tried."""
    parts = []
    for name, run in runs.items():
        counts = list(run["closed"])
        columns = [run[part][clients] for part in ("closed", "tensors") for clients in counts]
        services = dict.fromkeys(_served_by(program) for column in columns for program in column["programs"])
        rows = [
            (service, *(_rate_cell(column, service) for column in columns), _p99_cell(run["open"], service))
            for service in services
        ]
        clients = [f"{count} client{'s' if count != '1' else ''}" for count in counts]
        heads = [f"{what}, {count}" for what in ("image files", "pixels") for count in clients]
        p99 = f"p99 at {run['open']['rate']:.1f} image files a second"
        parts += [f"{name}: {run['network']}; {run['bundle']}. Answers a second:", table(("", *heads, p99), rows)]
        tried = [(service, *(f"{rate:,.1f}/s" for rate in rates.values())) for service, rates in run["tried"].items()]
        parts += [
            "Each service of a peer in a short trial:",
            table(("peer, runtime, processes × threads", *clients), tried),
        ]
        parts += [f"- not measured: {service}: {_cell(reason)}" for service, reason in run["missing"].items()]
    return "\n\n".join(parts)


def _served_by(program: str) -> str:
    """Return the peer of a program, whose runtime and threads may differ with the clients; for ours, the program."""
    peer, _, settings = program.partition(", ")
    if settings.startswith("openvino:"):
        return f"{peer}, {settings.partition(',')[0].removeprefix('openvino:')}"
    return program if ":" in program else peer


def over_reduced(row: Mapping[str, Any]) -> str:
    """Return the speed of a program relative to the fastest peer in each precision other than float32, in words."""
    ratios = {name: row[key] for name in ("bf16", "int8") if (key := f"over_{name}_peer") in row}
    return "".join(f", {interval(speed)} × the fastest in {name}" for name, speed in ratios.items())


def _rate_cell(column: Mapping[str, Any], service: str) -> str:
    for program, row in column["programs"].items():
        if _served_by(program) == service:
            rate, settings = f"{row['requests_per_second']:,.1f}/s", program.partition(", ")[2]
            if "over_best_peer" in row:
                return (
                    f"{rate}, {interval(row['over_best_peer'])} × {_served_by(column['best_peer'])}{over_reduced(row)}"
                )
            return f"{rate} ({settings})"
    return "–"


def _p99_cell(measured: Mapping[str, Any], service: str) -> str:
    times = [row["p99_ms"] for program, row in measured["programs"].items() if _served_by(program) == service]
    return f"{times[0]:.1f} ms" if times else "–"
