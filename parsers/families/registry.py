"""All formats, in the order in which a checkpoint is compared with them."""

from __future__ import annotations

from parsers.families.hermes import CHATML, HERMES
from parsers.families.qwen3_xml import QWEN3_XML
from parsers.format import Format

FORMATS: tuple[Format, ...] = (HERMES, QWEN3_XML, CHATML)
