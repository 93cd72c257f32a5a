"""The running server, as a program beside it sees it."""

from __future__ import annotations

import json
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import httpx

from launchers import keys
from server.keys import ApiKey
from sessions.store.words import why

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_SECONDS = 10.0
AGENT_CONTEXT = 24_000
"""Tokens of context below which a coding agent's first request leaves no room to work."""


class ServerProblem(Exception):
    """The server cannot be used; the message says why and what to do next."""


@dataclass(frozen=True)
class RunningServer:
    """``url`` has no path and no trailing slash; ``context_length`` is in tokens, and so is ``max_output``, the longest
    answer (0: what the context leaves). ``efforts``: the levels of thinking that the model knows, from less to more;
    with "none" it can do without."""

    url: str
    model: str
    context_length: int
    api_key: str = ""
    efforts: tuple[str, ...] = ()
    max_output: int = 0

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    def output_tokens(self, most: int) -> int:
        """The longest answer a client should ask for: most of the context is the prompt's."""
        return min(most, self.context_length // 4, self.max_output or most)


def read_keys(path: Path | None) -> tuple[ApiKey, ...]:
    """The API keys in a file and in the environment. Raises ServerProblem."""
    try:
        return keys.read_keys(path)
    except keys.KeysError as error:
        raise ServerProblem(str(error)) from error


def first_key(path: Path | None) -> str:
    """The key a client of the server sends, or "" where there is none. Raises ServerProblem."""
    return next((key.secret for key in read_keys(path)), "")


def get(url: str, path: str, api_key: str = "", *, any_status: bool = False) -> dict[str, Any]:
    """GET a JSON object; ``any_status`` accepts error statuses too. Raises ServerProblem."""
    try:
        response = _exchange("GET", url, path, api_key)
        body = response.json()
    except ValueError as error:
        raise not_ft(url) from error
    if not isinstance(body, dict) or (response.is_error and not any_status):
        words = words_of(response) or response.text[:200]
        raise ServerProblem(
            f"{url}{path} answered {response.status_code} ({words}): if this is ft, look at its log; "
            "else name the right address with --url http://HOST:PORT"
        )
    return body


def ask(
    method: str,
    url: str,
    path: str,
    api_key: str = "",
    *,
    json: object = None,
    content: bytes | None = None,
    timeout: float | None = TIMEOUT_SECONDS,
) -> httpx.Response:
    """The answer to a request that succeeded. Raises ServerProblem, with the server's own words where it refused."""
    response = _exchange(method, url, path, api_key, timeout=timeout, json=json, content=content)
    if response.is_error:
        raise ServerProblem(
            words_of(response)
            or f"{url}{path} answered {response.status_code}: name the right address with --url http://HOST:PORT"
        )
    return response


def asked(method: str, url: str, path: str, api_key: str = "", **more: Any) -> Told:
    """As ``ask``: the JSON object of the answer."""
    response = ask(method, url, path, api_key, **more)

    def told(members: dict[str, Any]) -> Told:
        return Told(members, url)

    try:
        body = json.loads(response.content, object_hook=told)
    except ValueError as error:
        raise not_ft(url) from error
    if not isinstance(body, Told):
        raise not_ft(url)
    return body


class Told(dict[str, Any]):
    """An object of the answer that came from ``url``. What ft would have said and is not there raises ServerProblem."""

    def __init__(self, members: dict[str, Any], url: str) -> None:
        super().__init__(members)
        self._url = url

    def __missing__(self, name: str) -> NoReturn:
        raise not_ft(self._url)


def not_ft(url: str) -> ServerProblem:
    return ServerProblem(f"what answers at {url} is not ft: name the right address with --url http://HOST:PORT")


def words_of(response: httpx.Response) -> str:
    """The server's own words about what was wrong, or "" where it has none."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def _exchange(
    method: str, url: str, path: str, api_key: str, *, timeout: float | None = TIMEOUT_SECONDS, **body: Any
) -> httpx.Response:
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        # trust_env=False: a proxy named in the environment must not stand between two programs of one machine.
        verify = ssl.create_default_context() if url.startswith("https:") else False
        with httpx.Client(trust_env=False, timeout=timeout, verify=verify) as client:
            response = client.request(method, f"{url.rstrip('/')}{path}", headers=headers, **body)
    except httpx.InvalidURL as error:
        raise ServerProblem(f"{url} is not a URL ({error}): write --url http://HOST:PORT") from error
    except httpx.UnsupportedProtocol as error:
        raise ServerProblem(f"{url} is not a URL: write --url http://HOST:PORT") from error
    except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
        raise ServerProblem(
            f"{url} has taken the request, and has not answered in {timeout:g} seconds: it is busy, and may yet do "
            "what was asked; try again, and if that does not help, look at its log"
        ) from error
    except httpx.HTTPError as error:
        raise ServerProblem(
            f"no server answers at {url} ({why(error)}): start one with `ft serve`, "
            "or name another with --url http://HOST:PORT"
        ) from error
    if response.status_code == 401:
        wants = "does not know the API key that was sent" if api_key else "wants an API key"
        raise ServerProblem(f"{url} {wants}: name the file that holds it with --api-key-file FILE")
    return response


def find_server(url: str, api_key: str = "") -> RunningServer:
    """Ask the server at ``url`` for its model and context length. Raises ServerProblem."""
    try:
        first = get(url, "/v1/models", api_key)["data"][0]
        efforts = tuple(map(str, first.get("reasoning_efforts", ())))
        limits = int(first["context_length"]), int(first.get("max_output_tokens", 0))
        server = RunningServer(url.rstrip("/"), str(first["id"]), limits[0], api_key, efforts, limits[1])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ServerProblem(
            f"what answers at {url} is not ft (its models have no context length): name the right address with "
            "--url http://HOST:PORT"
        ) from error
    if server.context_length <= 0:
        raise ServerProblem(f"the server at {url} has no worker yet: try again when `ft ctl health` says ok")
    return server
