"""Refusals: what is a request told that is not taken?

A closed table: name -> status and words. What a sender is told about its proof is one sentence, whatever was
wrong with it; the log has the details.
"""

from __future__ import annotations

REFUSALS: dict[str, tuple[int, str]] = {
    "malformed": (400, "the request cannot be read"),
    "unauthorized": (401, "the proof is missing, wrong or too old"),
    "forbidden-root": (403, "the place named is not below an allowed root"),
    "unknown-source": (404, "no such source is configured"),
    "too-slow": (408, "the request did not arrive in time"),
    "too-large": (413, "the body is larger than allowed"),
    "unsupported-type": (415, "the content type is not one of this kind of sender"),
    "not-understood": (422, "the event does not say what a checkpoint's announcement must say"),
    "headers-too-large": (431, "the head of the request is larger than allowed"),
    "unavailable": (503, "the inbox cannot be written now; send it again"),
}


class RequestRefused(Exception):
    """A request that is not taken.

    name: a key of `REFUSALS`. why: for the log, and for the sender unless it is about its proof.
    """

    def __init__(self, name: str, why: str = "") -> None:
        super().__init__(why or name)
        self.name, self.why = name, why

    @property
    def status(self) -> int:
        """The HTTP status."""
        return REFUSALS[self.name][0]

    @property
    def told(self) -> dict[str, str]:
        """What the sender may know."""
        words = REFUSALS[self.name][1]
        detail = f"{words}: {self.why}" if self.why and self.status not in (401, 503) else words
        return {"error": self.name, "message": detail}
