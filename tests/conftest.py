"""Of all tests: none fails for the time that it takes, and asynchronous ones run on asyncio."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
