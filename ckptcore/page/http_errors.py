"""The reasons why a request is refused, with their HTTP status and message.

Errors of signatures and tokens share one message, whatever was wrong; the log has the details.
"""

from __future__ import annotations

REFUSALS: dict[str, tuple[int, str]] = {
    "malformed": (400, "the request cannot be parsed"),
    "unauthorized": (401, "the signature or token is missing, wrong or too old"),
    "forbidden-root": (403, "the URI is not below an allowed root"),
    "unknown-source": (404, "no source of this name is configured"),
    "id-reused": (409, "the id of the event belongs to another one; send it under its own"),
    "too-slow": (408, "the request did not arrive in time"),
    "too-large": (413, "the body is too large"),
    "unsupported-type": (415, "the content type is not supported for this kind of sender"),
    "not-understood": (422, "the event does not announce a checkpoint"),
    "headers-too-large": (431, "the headers of the request are too large"),
    "unavailable": (503, "the inbox cannot store the event now; send it again"),
}


class RequestRefused(Exception):
    """A request that is refused.

    name: a key of `REFUSALS`. why: the details for the log. The sender gets them unless the status is 401 or
    503.
    """

    def __init__(self, name: str, why: str = "") -> None:
        super().__init__(why or name)
        self.name, self.why = name, why

    @property
    def status(self) -> int:
        """The HTTP status."""
        return REFUSALS[self.name][0]

    @property
    def reply(self) -> dict[str, str]:
        """The body of the reply."""
        text = REFUSALS[self.name][1]
        message = f"{text}: {self.why}" if self.why and self.status not in (401, 503) else text
        return {"error": self.name, "message": message}
