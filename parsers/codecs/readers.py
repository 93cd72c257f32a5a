"""Which reader reads which codec."""

from __future__ import annotations

from dataclasses import replace

from parsers.codecs.call import Fence, Reader
from parsers.codecs.elements import ElementsReader
from parsers.codecs.json_text import JsonCallReader, JsonReader
from parsers.codecs.literals import LiteralsReader, PythonReader
from parsers.codecs.tagged import TaggedReader
from parsers.format import Codec, Elements, Json, JsonCall, Literals, Pair, PythonCalls, Tagged
from parsers.source import certain
from parsers.wire import Wire


def reader_for(codec: Codec, fence: Fence, wire: Wire) -> Reader:
    """``fence`` is coded already, ``codec`` is not."""
    code = wire.code
    spelled = frozenset(wire.text_of(text) for text in (*fence.closes, *fence.opens) if certain(text))
    match codec:
        case Json():
            return JsonReader(fence)
        case JsonCall():
            return JsonCallReader(codec, fence)
        case Tagged():
            whole = codec.whole and Pair(code(codec.whole.open), code(codec.whole.close))
            coded = replace(codec, open=code(codec.open), open_end=code(codec.open_end), close=code(codec.close))
            return TaggedReader(replace(coded, key_end=code(codec.key_end), whole=whole), fence, spelled)
        case Literals():
            return LiteralsReader(Literals(code(codec.quote)), fence, spelled=codec.quote)
        case Elements():
            return ElementsReader(replace(codec, prefix=code(codec.prefix)), fence, spelled)
        case PythonCalls():
            return PythonReader(codec, fence)
