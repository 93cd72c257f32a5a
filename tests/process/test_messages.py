"""Every message survives the wire unchanged, and nothing else gets through."""

from __future__ import annotations

import asyncio
import builtins
import collections.abc
import dataclasses
import struct
import types
import typing
from dataclasses import replace
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import messages
from engine.api import Abort, Anchor, Done, EngineConfig, GetStats, Request, Reuse, Sampling, Tokens, Watch
from engine.messages import LoadFailed, Loading, Message, MessageError, Ready, Status

SCALARS: dict[object, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(),
    bool: st.booleans(),
}


def values(annotation: Any) -> st.SearchStrategy[Any]:
    """Every value of an annotated type that has a wire form."""
    args = get_args(annotation)
    if isinstance(annotation, type) and (dataclasses.is_dataclass(annotation) or hasattr(annotation, "_fields")):
        return st.builds(annotation, **{name: values(hint) for name, hint in get_type_hints(annotation).items()})
    if annotation in SCALARS:
        return SCALARS[annotation]
    match get_origin(annotation):
        case typing.Literal:
            return st.sampled_from(args)
        case builtins.tuple | collections.abc.Sequence if args in ((int, ...), (int,)):
            return st.lists(st.integers(0, 2**32 - 1), max_size=20).map(tuple)
        case builtins.tuple if args[-1] is Ellipsis:
            return st.lists(values(args[0]), max_size=3).map(tuple)
        case builtins.tuple:
            return st.tuples(*map(values, args))
        case builtins.dict:
            return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
        case types.UnionType | typing.Union:
            return st.one_of([st.none() if arg is type(None) else values(arg) for arg in args])
    raise TypeError(annotation)


MESSAGE_TYPES: tuple[Any, ...] = get_args(Message)
ANY_MESSAGE = st.one_of([values(cls) for cls in MESSAGE_TYPES])


def split(frame: bytes) -> tuple[bytes, bytes]:
    header, payload = struct.unpack_from("<II", frame)
    assert len(frame) == 8 + header + payload
    return frame[8 : 8 + header], frame[8 + header :]


def read_all(data: bytes) -> list[Message]:
    async def read() -> list[Message]:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        found: list[Message] = []
        while not reader.at_eof():
            found.append(await messages.read_message(reader))
        return found

    return asyncio.run(read())


def test_the_table_is_complete() -> None:
    assert len(MESSAGE_TYPES) == 14
    for cls in (GetStats, Abort, Request):
        assert cls in MESSAGE_TYPES


@given(st.lists(ANY_MESSAGE, max_size=4))
def test_messages_round_trip(sent: list[Message]) -> None:
    assert read_all(b"".join(messages.encode(message) for message in sent)) == sent


@given(st.one_of([values(cls) for cls in get_args(Status)]))
def test_statuses_round_trip(status: Status) -> None:
    line = messages.status_line(status)
    assert "\n" not in line
    assert messages.parse_status(line.encode()) == status


@given(values(EngineConfig))
def test_configurations_round_trip(config: EngineConfig) -> None:
    assert messages.config_from_json(messages.config_to_json(config)) == config


def test_token_ids_never_become_text() -> None:
    prompt = tuple(range(100_000))
    header, payload = split(messages.encode(Request("r", prompt, Sampling(max_tokens=1, forced=(7, 8)))))
    assert len(payload) == 4 * 100_002
    assert len(header) < 600


def test_a_view_of_u32_is_sent_as_it_is() -> None:
    ids = (0, 7, 2**32 - 1)
    view = memoryview(struct.pack("=3I", *ids)).cast("I")
    sampling = Sampling(max_tokens=1)
    frame = messages.encode(Request("r", view, sampling))
    assert frame == messages.encode(Request("r", ids, sampling))
    assert messages.decode(*split(frame)) == Request("r", ids, sampling)
    for wrong in (memoryview(b"1234"), memoryview(bytes(8)).cast("i"), memoryview(bytes(8)).cast("Q"), view[::-1], [1]):
        with pytest.raises(MessageError):
            messages.encode(Request("r", wrong, sampling))


def test_a_long_prompt_is_sent_in_few_pieces_and_not_copied() -> None:
    view = memoryview(bytes(4 * 100_000)).cast("I")
    watches = tuple(Watch((token,), "turn_end", 1.0) for token in range(50))
    request = Request("r", view, Sampling(max_tokens=1, stop_tokens=(1, 2)), watches=watches)
    header, prompt, rest = messages.encode_parts(request)
    assert isinstance(prompt, memoryview) and prompt.obj is view.obj and len(rest) == 4 * 52
    assert messages.decode(*split(b"".join((header, prompt, rest)))) == replace(request, tokens=tuple(view))


def test_rows_are_all_of_one_kind_and_have_every_column() -> None:
    anchors = (Anchor(1, "a", 2.0, True), Anchor(2, "b", 1.0))
    frame = messages.encode(Request("r", (1, 2), Sampling(max_tokens=1), anchors))
    header, payload = split(frame)
    assert b'[[1,2],["a","b"],[2.0,1.0],[true,false]]' in header
    for wrong in (
        b"[[1,2]]",
        b"[[1,2],[],[],[]]",
        b'[[1,2],["a","b"],[2.0,1.0],[1,0]]',
        b'[[1.0,2],["a","b"],[2.0,1.0],[true,false]]',
    ):
        with pytest.raises(MessageError):
            messages.decode(header.replace(b'[[1,2],["a","b"],[2.0,1.0],[true,false]]', wrong), payload)
    for bad in ((1, "a", 2.0, True), Anchor(1, "a", "high", True), Anchor(1 << 63, "a", 1.0)):  # type: ignore[arg-type]
        with pytest.raises(MessageError):
            messages.encode(Request("r", (1,), Sampling(max_tokens=1), (bad,)))  # type: ignore[arg-type]


@given(ANY_MESSAGE, st.data())
def test_a_damaged_frame_is_refused_or_a_message(message: Message, data: st.DataObject) -> None:
    """No damage raises anything but MessageError, and what still decodes is well-typed enough to encode again."""
    header, payload = split(messages.encode(message))
    part = bytearray(header)
    for _ in range(data.draw(st.integers(1, 3))):
        part[data.draw(st.integers(0, len(part) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = messages.decode(bytes(part), payload)
    except MessageError:
        return
    messages.encode(decoded)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{}",
        b"[" * 100_000,
        b"\xff\xfe",
        b'["nonsense",{}]',
        b'["loading",{"what":"x","done":1,"total":2}]',
        b'["abort",{}]',
        b'["abort",{"id":"a","more":1}]',
        b'["abort",{"id":1}]',
        b'["abort",["a"]]',
        b'["tokens",{"id":"a","tokens":1,"logprobs":[]}]',
        b'["tokens",{"id":"a","tokens":-1,"logprobs":[]}]',
        b'["tokens",{"id":"a","tokens":true,"logprobs":[]}]',
        b'["tokens",{"id":"a","tokens":0,"logprobs":[{"token":1.5,"logprob":0,"top":[]}]}]',
        b'["failed",{"id":"a","kind":"bored","message":"","limit":0}]',
        b'["failed",{"id":"a","kind":"internal","message":"","limit":true}]',
        b'["failed",{"id":"a","kind":"internal","message":"","limit":' + b"9" * 5000 + b"}]",
        b'["stats",{"values":{"a":"b"}}]',
        b'["stats",{"values":{"a":1' + b"0" * 400 + b"}}]",
    ],
)
def test_nonsense_is_refused(header: bytes) -> None:
    with pytest.raises(MessageError):
        messages.decode(header, b"")


def test_left_over_payload_is_refused() -> None:
    header, payload = split(messages.encode(Tokens("a", (1, 2))))
    with pytest.raises(MessageError):
        messages.decode(header, payload + b"\0\0\0\0")
    with pytest.raises(MessageError):
        messages.decode(header, payload[:-4])


@pytest.mark.parametrize("lengths", [(messages.MAX_HEADER + 1, 0), (2, messages.MAX_PAYLOAD + 4), (2, 3)])
def test_lengths_are_bounded_before_anything_is_read(lengths: tuple[int, int]) -> None:
    with pytest.raises(MessageError):
        read_all(struct.pack("<II", *lengths))


def test_a_cut_frame_is_an_end() -> None:
    frame = messages.encode(Abort("abc"))
    for cut in range(1, len(frame)):
        with pytest.raises(EOFError):
            read_all(frame[:cut])


@pytest.mark.parametrize("tokens", [(-1,), (2**32,), (1.5,), ("a",), [1]])
def test_ids_that_are_no_u32_are_not_sent(tokens: Any) -> None:
    with pytest.raises(MessageError):
        messages.encode(Tokens("a", tokens))


def test_wrongly_typed_messages_are_not_sent() -> None:
    wrong: Any = "many"
    with pytest.raises(MessageError):
        messages.encode(Done("a", wrong, Reuse(0, 0, 0, 0, 0)))
    with pytest.raises(MessageError):
        messages.encode(Request("a", (1,), Sampling(max_tokens=wrong)))
    with pytest.raises(MessageError):
        messages.encode(Request("a", (0,) * (messages.MAX_PAYLOAD // 4 + 1), Sampling(max_tokens=1)))


@pytest.mark.parametrize("line", [b"", b"loading...\n", b"[1,2]", b'["tokens",{}]', b'["ready",{"a":1}]', b"\xff"])
def test_other_lines_on_stdout_are_no_status(line: bytes) -> None:
    assert messages.parse_status(line) is None


def test_status_types() -> None:
    assert set(get_args(Status)) == {Loading, Ready, LoadFailed}
