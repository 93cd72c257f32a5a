"""API keys as people write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from launchers.keys import VARIABLE, KeysError, parse_keys, read_keys
from server.keys import ApiKey, KeyRing


def test_names_are_optional() -> None:
    found = parse_keys("# ours\nsk-1\n\n  ann   sk:2=+/  \n#x y\n", "keys")
    assert [(key.name, key.secret) for key in found] == [("", "sk-1"), ("ann", "sk:2=+/")]


def test_file_and_environment_add_up(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n")
    assert [key.secret for key in read_keys(file, {VARIABLE: "two,bob three"})] == ["one", "two", "three"]
    assert read_keys(None, {VARIABLE: "bob three"})[0].name == "bob"
    assert read_keys(None, {}) == ()
    file.write_text("# none\n")
    with pytest.raises(KeysError, match="holds no API key"):
        read_keys(file, {VARIABLE: "two"})


@pytest.mark.parametrize("line", ["a b secret", "na/me secret", "gehé1m", "x" * 513])
def test_what_is_no_key_is_not_repeated(line: str) -> None:
    with pytest.raises(KeysError, match="line 2 of keys is no API key") as caught:
        parse_keys(f"good\n{line}\n", "keys")
    assert line.split()[-1] not in str(caught.value)


def test_a_key_says_who_it_is_and_not_what_it_is() -> None:
    plain, named, next_one = (
        ApiKey(secret="s3cret"),
        ApiKey(secret="s3cret", name="ann"),
        ApiKey(secret="b", name="ann"),
    )
    assert "s3cret" not in f"{plain!r} {named!r} {plain.caller} {plain.namespace}"
    assert named.caller == "ann"
    assert named.namespace == next_one.namespace != plain.namespace
    assert KeyRing((plain, named, next_one)).callers == 2


def test_a_ring_finds_each_of_its_keys() -> None:
    ring = KeyRing([ApiKey(secret=f"k{n}") for n in range(9)])
    for n in range(9):
        assert ring.find("no", f"k{n}") == ApiKey(secret=f"k{n}")
    assert ring.find("", "k", "k10") is None
    ring.replace(())
    assert not ring
    assert ring.find("k1") is None
