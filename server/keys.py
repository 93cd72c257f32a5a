"""API keys: who a caller is, and whose cache it uses."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ApiKey(BaseModel):
    """Written as its secret alone where it needs no name. Keys of one name are one caller: while a secret is replaced,
    the old and the new one are both good."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    secret: str = Field(min_length=1, max_length=512, pattern=r"^[!-+\x2d-~]+$", repr=False)
    """Visible ASCII without commas."""
    name: str = Field(default="", max_length=64, pattern="^[A-Za-z0-9_.@-]*$")

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"secret": value} if isinstance(value, str) else value

    @property
    def caller(self) -> str:
        """What logs and numbers call it; nothing in it can be used as the key."""
        return self.name or f"key-{digest(self.secret).hex()[-6:]}"

    @property
    def namespace(self) -> str:
        """Of its cache and its sessions. A named key keeps them when its secret is replaced."""
        return digest(f"name {self.name}" if self.name else self.secret).hex()[:16]


class KeyRing:
    """The keys that are good now; none: everybody may come in. ``replace`` changes them while the server runs."""

    def __init__(self, keys: Sequence[ApiKey] = ()) -> None:
        self.replace(keys)

    def replace(self, keys: Sequence[ApiKey]) -> None:
        self._keys = tuple((digest(key.secret), key) for key in keys)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def callers(self) -> int:
        return len({key.namespace for _, key in self._keys})

    def admits(self, key: ApiKey | None) -> bool:
        """Whether one who came in with this key (None: without, when none was needed) still may."""
        return not self._keys or any(known == key for _, known in self._keys)

    def find(self, *offered: str) -> ApiKey | None:
        """The key of the first text that is one. Each is compared with all keys, in the same time whatever it is."""
        for text in offered:
            theirs = digest(text)
            found = None
            for ours, key in self._keys:
                if hmac.compare_digest(ours, theirs):
                    found = key
            if found is not None:
                return found
        return None


def digest(text: str) -> bytes:
    """Keys are compared as digests, which have one length."""
    return hashlib.sha256(text.encode()).digest()
