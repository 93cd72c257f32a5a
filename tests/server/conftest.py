"""A model family over plain bytes, once per run."""

from __future__ import annotations

from pathlib import Path

import pytest

from parsers.load import Family
from tests.server.support import build_family


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return build_family(Path(tmp_path_factory.mktemp("family")))
