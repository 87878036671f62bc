"""Write the card of an engine, a report on its origin, options and checks, as a self-contained HTML page.

The page shows which attentions are a single GPU kernel, and in which data type each matrix product runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from gmmvit_deploy.counts import counted
from gmmvit_deploy.reports.pages import Summary, VerdictWord, rendered, written_page
from gmmvit_deploy.runtimes.engines.card import Engine, EngineCard


def write_page(engine: Engine, path: Path, *, force: bool = False) -> None:
    """Errors: as in `written_page`."""
    written_page(page_of(engine), path, force=force)


def page_of(engine: Engine) -> str:
    """Return the page as HTML text.  The page loads nothing from the network."""
    card = engine.card
    kinds = list(dict.fromkeys(kind for shares in card.shares.values() for kind in shares))
    return rendered(
        "runtimes/engines/page.html",
        title=f"Engine {engine.path.name}: {card.precision}, {card.flavor} {card.tensorrt_version}",
        summary=_verdict(engine),
        facts=facts_of(card),
        attentions=[
            (
                proof.name,
                proof.target,
                str(proof.profile),
                "masked" if proof.masked else "plain",
                VerdictWord("passed", "yes") if proof.fused else VerdictWord("undecided", "NO"),
                proof.precision,
                proof.reason or ", ".join(proof.kernels),
            )
            for proof in card.attentions
        ],
        misses=[(miss.node, miss.target, str(miss.profile), miss.expected, miss.actual) for miss in card.misses],
        kinds=kinds,
        layers=[
            (target, "+".join(map(str, card.layers[target])), *(f"{shares.get(kind, 0):.0%}" for kind in kinds))
            for target, shares in card.shares.items()
        ],
        mask_cost=_mask_cost(card),
        provenance=_provenance(engine),
    )


def _verdict(engine: Engine) -> Summary:
    card = engine.card
    scattered = [proof for proof in card.attentions if not proof.fused]
    fused = f"{len(card.attentions) - len(scattered)} of {len(card.attentions)} attentions are a single kernel each"
    changes = (*_shortcomings(card), *_scope(engine))
    if card.misses or card.unfolded:
        misses, unfolded = len(card.misses), len(card.unfolded)
        what = [f"{misses} matrix products do not run in the type that {card.precision} promises"] * bool(misses)
        what += [f"{unfolded} parts of the graph are not folded"] * bool(unfolded)
        sentence = f"The engine is not what was promised: {' and '.join(what)}; {fused}."
        return Summary(outcome="failed", word="NOT AS PROMISED", sentence=sentence, changes=changes)
    if card.unjudged:
        sentence = f"The types of the matrix products cannot be judged; {fused}."
        return Summary(outcome="undecided", word="NOT JUDGED", sentence=sentence, changes=changes)
    if scattered or not card.attentions:
        sentence = f"Every matrix product runs in the type that {card.precision} promises, but only {fused}."
        return Summary(outcome="undecided", word="NOT ALL FUSED", sentence=sentence, changes=changes)
    sentence = (
        f"Every matrix product runs in the type that {card.precision} promises, "
        f"and all {len(card.attentions)} attentions are a single kernel each."
    )
    return Summary(outcome="passed", word="PROVEN", sentence=sentence, changes=changes)


def _shortcomings(card: EngineCard) -> Iterator[str]:
    """Yield a line for each shortcoming of the engine; attentions with the same reason share a line."""
    yield from (f"Not folded: {what}" for what in card.unfolded)
    missed: dict[tuple[str, str], list[str]] = defaultdict(list)
    for miss in card.misses:
        missed[miss.expected, miss.actual].append(miss.node)
    for (promised, actual), nodes in missed.items():
        yield f"{counted(len({*nodes}), 'matrix product')} in {actual}, expected {promised}: {_some(nodes)}"
    if card.unjudged:
        yield f"The types of the matrix products were not judged: {card.unjudged}"
    reasons: dict[str, list[str]] = defaultdict(list)
    for proof in card.attentions:
        if not proof.fused:
            reasons[proof.reason].append(proof.name)
    for reason, names in reasons.items():
        yield f"{counted(len({*names}), 'attention')} not fused into a single kernel: {reason} ({_some(names)})"
    if not card.attentions:
        yield "The graph has no attention, so fusion could not be checked"


def _scope(engine: Engine) -> Iterator[str]:
    runner = engine.card.flavor
    yield (
        "Wrong logits: this page covers kernels and types only. Type gmmvit parity BUNDLE "
        f"--runner {runner} --engine {engine.path} to compare the engine's logits with PyTorch's"
    )
    yield "Another GPU, TensorRT version, precision or batch range: the builder chooses the kernels anew for each build"


def _some(names: list[str], shown: int = 3) -> str:
    unique = list(dict.fromkeys(names))
    more = f" and {len(unique) - shown} more" if len(unique) > shown else ""
    return ", ".join(unique[:shown]) + more


def facts_of(card: EngineCard) -> dict[str, str]:
    """Return what an engine is, for the page and the terminal: precision, target, profiles, input, size and flags."""
    target = ", ".join(card.target["capabilities"])
    if card.target["gpu"]:
        target = f"{card.target['gpu']} ({target}), driver {card.target['driver']}"
    flags = [f"{name}={value}" for name, value in card.flags.items() if value not in (None, False, "none")]
    shape = ", ".join(map(str, card.tensor["shape"]))
    return {
        "precision": card.precision,
        "built for": f"{target}, with {card.flavor} {card.tensorrt_version}",
        "profiles": f"{', '.join(map(str, card.profiles))} (minimum, optimum and maximum batch)",
        "input": f"{card.tensor['name']}: {card.tensor['dtype']} (B, {shape})",
        "size": f"{card.size_bytes / 2**20:.2f} MiB, built in {card.build_seconds:.1f} s",
        "flags": ", ".join(flags) or "TF32 off",
    }


def _mask_cost(card: EngineCard) -> list[tuple[str, ...]]:
    cost = card.mask_cost
    if cost is None:
        return []
    rows: list[tuple[str, ...]] = [
        (name, f"{own:,}", f"{twin:,}", f"{own - twin:+,}")
        for name, own, twin in (
            ("layers", cost.layers, cost.twin_layers),
            ("kernels", cost.kernels, cost.twin_kernels),
            ("bytes of the plan", cost.bytes, cost.twin_bytes),
        )
    ]
    twins = cost.twin_milliseconds or {}
    return rows + [
        (f"median ms at batch {batch}", f"{own:.3f}", f"{twins[batch]:.3f}", f"{own - twins[batch]:+.3f}")
        for batch, own in (cost.milliseconds or {}).items()
        if batch in twins
    ]


def _provenance(engine: Engine) -> dict[str, str]:
    card = engine.card
    return {
        "engine": str(engine.path),
        **{f"{name} SHA-256": digest for name, digest in card.sha256.items()},
        "masks": f"{len(card.masks)} constants; card.json has the SHA-256 of each",
        "trtexec": card.trtexec,
        "versions": ", ".join(f"{name} {version}" for name, version in card.versions.items()),
    }
