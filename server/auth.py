"""Who may talk to the server: names in ``Host`` and ``Origin``, then API keys.

A web page that rebinds its own name to the loopback address still sends its own name as ``Host``; that, and any foreign
``Origin``, is refused before a key is looked at.
"""

from __future__ import annotations

import logging
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server import errors
from server.errors import ApiError
from server.keys import ApiKey, KeyRing
from server.settings import ServerSettings

_log = logging.getLogger(__name__)
UNKNOWN_KEY = "missing or unknown API key; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"
_OPEN_PATHS = ("/health",)
"""Paths that need no key, so that a supervisor needs none."""
_AUTHORITY = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]*)?", re.ASCII | re.IGNORECASE)
"""A name or an address, and a port: what a browser sends, and nothing that only looks like it (``evil@localhost``)."""


class Guard:
    """Wraps the application. A request that passes carries in ``scope["state"]`` its key's ``caller`` (what limits and
    numbers call it) and ``namespace`` (whose cache it uses), both "" where no keys are configured, and the ``key``
    itself, for what outlives a request."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, keys: KeyRing) -> None:
        self._app = app
        self._hosts = frozenset(host.lower().strip("[]") for host in settings.allowed_hosts)
        self._share_cache = settings.share_cache
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check_names(headers)
            key = None if scope["path"] in _OPEN_PATHS else self._identify(headers)
        except ApiError as error:
            _log.warning("refused %s %r: %r", scope.get("method", "websocket"), scope["path"], error.message)
            await errors.response(error, errors.shape_of(scope["path"], headers))(scope, receive, send)
            return
        caller, namespace = ("", "") if key is None else (key.caller, key.namespace)
        if self._share_cache:
            namespace = ""
        scope.setdefault("state", {}).update(caller=caller, namespace=namespace, key=key)
        await self._app(scope, receive, send)

    def _check_names(self, headers: Headers) -> None:
        if not self._hosts:
            return
        for host in headers.getlist("host") or [""]:
            if _name(host) not in self._hosts:
                raise ApiError("forbidden", f"the Host header names {host!r}, which is not a name of this server")
        for origin in headers.getlist("origin"):
            if _name(origin.partition("://")[2]) not in self._hosts:
                raise ApiError("forbidden", f"requests from the web page {origin!r} are not allowed")

    def _identify(self, headers: Headers) -> ApiKey | None:
        """None where no key is needed. Raises ApiError."""
        if not self._keys:
            return None
        scheme, _, token = headers.get("authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        key = self._keys.find(bearer, headers.get("x-api-key", ""))
        if key is None:
            raise ApiError("unauthorized", UNKNOWN_KEY)
        return key


def _name(authority: str) -> str:
    """The host name in a ``name:port``, lower-case; "" if it is none."""
    match = _AUTHORITY.fullmatch(authority)
    return "" if match is None else (match[1] or match[2]).lower()
