"""Responses that were stored, for clients that name one instead of sending its conversation again."""

from __future__ import annotations

from typing import Any


class Stored:
    def find(self, namespace: str, id: str) -> list[Any] | None:
        return None

    def keep(self, namespace: str, session: str, response: dict[str, Any], items: list[Any]) -> None:
        return None
