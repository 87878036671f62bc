"""The errors with which the front refuses a request."""

from __future__ import annotations

from collections.abc import Mapping

from gmmvit_deploy.serving.front.options import RETRY_AFTER_S

__all__ = ["Refusal", "overloaded"]


class Refusal(Exception):  # noqa: N818 - a refused request is no error of the front
    """A request that the front refuses.

    status: the HTTP status.  reason: the text for the client.  image: the position of the image that is the reason, or
    None.  headers: headers of the answer.
    """

    def __init__(
        self, status: int, reason: str, *, image: int | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.image = image
        self.headers = dict(headers or {})


def overloaded(reason: str) -> Refusal:
    """Return the refusal of a request that the client may send again after `RETRY_AFTER_S`."""
    return Refusal(503, reason, headers={"Retry-After": str(RETRY_AFTER_S)})
