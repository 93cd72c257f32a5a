"""Who may talk to the server: names in ``Host`` and ``Origin``, then API keys.

A web page that rebinds its own name to the loopback address still sends its own name as ``Host``; that, and any foreign
``Origin``, is refused before a key is looked at.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server import errors
from server.errors import ApiError
from server.settings import ServerSettings

_log = logging.getLogger(__name__)
_OPEN_PATHS = ("/health",)
"""Answered without a key, so that a supervisor needs none."""
_AUTHORITY = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]*)?", re.ASCII | re.IGNORECASE)
"""A name or an address, and a port: what a browser sends, and nothing that only looks like it (``evil@localhost``)."""


class Guard:
    """Wraps the application. A request that passes carries its key's cache namespace in ``scope["state"]``."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._hosts = frozenset(host.lower().strip("[]") for host in settings.allowed_hosts)
        self._keys = tuple(_digest(key) for key in settings.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check_names(headers)
            namespace = "" if scope["path"] in _OPEN_PATHS else self._namespace(headers)
        except ApiError as error:
            _log.warning("refused %s %r: %r", scope.get("method", "websocket"), scope["path"], error.message)
            await errors.response(error, errors.shape_of(scope["path"], headers))(scope, receive, send)
            return
        scope.setdefault("state", {})["namespace"] = namespace
        await self._app(scope, receive, send)

    def _check_names(self, headers: Headers) -> None:
        if not self._hosts:
            return
        host = headers.get("host", "")
        if _name(host) not in self._hosts:
            raise ApiError("forbidden", f"the Host header names {host!r}, which is not a name of this server")
        origin = headers.get("origin")
        if origin is not None and _name(origin.partition("://")[2]) not in self._hosts:
            raise ApiError("forbidden", f"requests from the web page {origin!r} are not allowed")

    def _namespace(self, headers: Headers) -> str:
        """The cache namespace of the caller's key; "" where no keys are configured."""
        if not self._keys:
            return ""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        for offered in (_digest(bearer), _digest(headers.get("x-api-key", ""))):
            known = False
            for key in self._keys:
                known |= hmac.compare_digest(key, offered)
            if known:
                return offered.hex()[:16]
        raise ApiError(
            "unauthorized", "missing or unknown API key; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"
        )


def _digest(key: str) -> bytes:
    """Keys are compared as digests, which have one length."""
    return hashlib.sha256(key.encode()).digest()


def _name(authority: str) -> str:
    """The host name in a ``name:port``, lower-case; "" if it is none."""
    match = _AUTHORITY.fullmatch(authority)
    return "" if match is None else (match[1] or match[2]).lower()
