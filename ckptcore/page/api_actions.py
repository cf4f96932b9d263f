"""The changes of the pages as a JSON API, for programs with a token.

Only ``Authorization: Bearer TOKEN`` counts here: a browser adds neither that header nor a body of JSON to a
request of another site, so these routes need no token of a form. Who asks is checked before the body is read.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ckptcore.catalog import as_dict
from ckptcore.page import changes
from ckptcore.page.access import PageRefused, body_of, require_token
from ckptcore.page.api import ERRORS, JsonError
from ckptcore.page.views import Caller, Ref


class AliasChange(BaseModel):
    """An alias to set.

    Attributes:
        name: the alias.
        expect: the checkpoint that it must refer to now; "" for a new name; absent for any.
        force: set it though the checkpoint is damaged, a source, or unproven.
    """

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(max_length=200)]
    expect: Annotated[str, Field(max_length=1000)] | None = None
    force: bool = False


class AliasRollback(AliasChange):
    """An alias to set back.

    Attributes:
        name: the alias.
        expect: the checkpoint that it must refer to now; absent for any.
        force: set it though the earlier checkpoint is damaged, a source, or unproven.
    """

    expect: Annotated[str, Field(min_length=4, max_length=1000)] | None = None


class NewHold(BaseModel):
    """A hold to place. until: the day on which it ends, ``YYYY-MM-DD``; absent for no end."""

    model_config = ConfigDict(extra="forbid")

    reason: Annotated[str, Field(max_length=1000)]
    until: Annotated[str, Field(max_length=10)] | None = None


_Body = TypeVar("_Body", bound=BaseModel)
_CHANGES: dict[int | str, dict[str, Any]] = {
    **ERRORS,
    403: {"model": JsonError, "description": "the request comes from another site"},
    409: {"model": JsonError, "description": "the catalog has changed since"},
    413: {"model": JsonError, "description": "the body is too large"},
    415: {"model": JsonError, "description": "the body is not JSON"},
}


def _described(kind: type[BaseModel]) -> dict[str, Any]:
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": kind.model_json_schema()}},
        }
    }


ROUTER = APIRouter(prefix="/api/v1", responses=_CHANGES, default_response_class=JSONResponse)


@ROUTER.post(
    "/checkpoints/{ref}/aliases", response_model=dict[str, Any], openapi_extra=_described(AliasChange)
)
async def set_alias(visit: Caller, ref: Ref) -> Any:
    """Set an alias to a checkpoint; it is recorded with the token's user."""
    user = require_token(visit.request, visit.site.access)
    body = await _read(visit.request, AliasChange)
    row = await asyncio.to_thread(
        changes.set_alias, visit.site.catalog, user, ref, body.name, body.expect, body.force
    )
    return as_dict(row)


@ROUTER.post("/checkpoints/{ref}/holds", response_model=dict[str, Any], openapi_extra=_described(NewHold))
async def place_hold(visit: Caller, ref: Ref) -> Any:
    """Keep a checkpoint from being deleted."""
    user = require_token(visit.request, visit.site.access)
    body = await _read(visit.request, NewHold)
    until = changes.day(body.until or "")
    return as_dict(
        await asyncio.to_thread(changes.place_hold, visit.site.catalog, user, ref, body.reason, until)
    )


@ROUTER.post("/holds/{hold}/release", response_model=dict[str, Any])
async def release_hold(visit: Caller, hold: Ref) -> Any:
    """End a hold; returns it as it was."""
    user = require_token(visit.request, visit.site.access)
    return as_dict(await asyncio.to_thread(changes.release_hold, visit.site.catalog, user, hold))


@ROUTER.post("/aliases/rollback", response_model=dict[str, Any], openapi_extra=_described(AliasRollback))
async def roll_back(visit: Caller) -> Any:
    """Let an alias refer to the checkpoint that it referred to before its last change."""
    user = require_token(visit.request, visit.site.access)
    body = await _read(visit.request, AliasRollback)
    row = await asyncio.to_thread(
        changes.roll_back, visit.site.catalog, user, body.name, body.expect, body.force
    )
    return as_dict(row)


@ROUTER.post("/inbox/{ref}/retry", response_model=dict[str, list[str]])
async def retry_event(visit: Caller, ref: Ref) -> Any:
    """Make a failed event due again."""
    user = require_token(visit.request, visit.site.access)
    return {"events": list(await asyncio.to_thread(changes.retry, visit.site.catalog, user, "inbox", ref))}


@ROUTER.post("/outbox/{ref}/retry", response_model=dict[str, list[str]])
async def retry_message(visit: Caller, ref: Ref) -> Any:
    """Make a failed message due again."""
    user = require_token(visit.request, visit.site.access)
    return {"messages": list(await asyncio.to_thread(changes.retry, visit.site.catalog, user, "outbox", ref))}


async def _read(request: Request, kind: type[_Body]) -> _Body:
    """Return the body of a request. Raises `PageRefused`."""
    body = await body_of(request, "application/json")
    try:
        return kind.model_validate_json(bytes(body))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise PageRefused(
            400, f"the body cannot be used: {place}: {first['msg']}".replace(": :", ":")
        ) from error
