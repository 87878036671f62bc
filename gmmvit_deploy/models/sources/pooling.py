"""What the classifier of a file reads, the class token or the mean of all tokens, if no tensor of the file shows it."""

from __future__ import annotations

from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.models.sources.hints import LoadHints, Pool


def asked_pool(source: str, hints: LoadHints) -> Pool:
    """Return the user's ``--set pool``.  Errors: CheckpointError without the option."""
    if hints.pool is None or hints.pool == "pooler":
        raise CheckpointError(
            f"{source}: no tensor of this file shows what the classifier reads: the class token or the mean of all "
            "tokens",
            hint="type --set pool=cls or --set pool=mean, as in training; the wrong value raises no error, but the "
            "predictions are wrong",
        )
    return hints.pool


def known_pool(source: str, hints: LoadHints, *, pool: Pool, evidence: str) -> Pool:
    """Return the pooling that the file shows.

    evidence: a clause such as "the file has no class token, so the pooling is".
    Errors: CheckpointError when the user's ``--set pool`` differs.
    """
    if hints.pool not in (None, pool):
        raise CheckpointError(
            f"{source}: --set pool={hints.pool}, but {evidence} {pool}",
            hint=f"leave --set pool out, or type --set pool={pool}",
        )
    return pool
