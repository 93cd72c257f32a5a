"""Which family is it, what does its template keep, and what is said when nothing fits."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from threading import Thread

import pytest

from parsers.conversation import Conversation, Role, Text, Thinking, ToolCall, ToolOutput, Turn
from parsers.families.hermes import HERMES
from parsers.load import Family, FamilyError, comparison, load_family
from parsers.template import ChatTemplate, TemplateMissing, TemplateRefusal
from parsers.tokens import Tokenizer, TokenizerError
from tests.parsers.parser_support import PLAIN_CHATML, TEMPLATES, TOOLS, checkpoint
from tests.parsers.vocabularies import sentencepiece


def test_families_are_recognised(families: Callable[[str], Family]) -> None:
    for name in ("byte-qwen3_xml", "qwen-qwen3_xml", "byte-hermes", "spelled-hermes", "byte-chatml"):
        assert families(name).name == name.partition("-")[2]


def test_what_the_templates_keep(families: Callable[[str], Family]) -> None:
    qwen, hermes, chatml = (families(f"byte-{name}").probe for name in ("qwen3_xml", "hermes", "chatml"))
    for probe in (qwen, hermes):
        assert probe.thinking_in_loop and not probe.thinking_survives
        assert probe.header_survives and not probe.turn_end_survives
    assert qwen.opener_prefilled and not qwen.prompt_end_survives
    assert not hermes.opener_prefilled and hermes.prompt_end_survives
    assert chatml.header_survives and chatml.prompt_end_survives and chatml.turn_end_survives
    assert not chatml.thinking_survives and not chatml.opener_prefilled


def test_a_template_that_keeps_all_thinking(vocabulary: Callable[[str], Path], tmp_path: Path) -> None:
    text = (TEMPLATES / "qwen3_xml.jinja").read_text().replace("loop.index0 > found.query", "true")
    family = load_family(checkpoint(vocabulary("byte"), tmp_path / "c", text))
    assert family.probe.thinking_survives and family.probe.prompt_end_survives and family.probe.turn_end_survives
    first = Conversation((Turn("user", (Text("Q"),)), Turn("assistant", (Thinking("T"), Text("A")))))
    prompt = family.render(Conversation((*first.turns, Turn("user", (Text("R"),)))))
    assert "T\n</think>" in family.tokenizer.decode(prompt.ids)


def test_stop_tokens_and_watches_are_ids_of_the_vocabulary(families: Callable[[str], Family]) -> None:
    family = families("byte-qwen3_xml")
    token = family.tokenizer.token_id
    assert family.stop_tokens == (token("<|im_end|>"), token("<|endoftext|>"))
    assert dict((kind, tokens) for tokens, kind in family.watches[:3]) == {
        "thinking_end": (token("</think>"),),
        "tool_call_start": (token("<tool_call>"),),
        "tool_call_end": (token("</tool_call>"),),
    }
    spelled = families("spelled-hermes")
    assert spelled.tokenizer.decode(spelled.watches[0][0]) == "</think>" and len(spelled.watches[0][0]) > 1


def test_thinking_on_and_off(families: Callable[[str], Family]) -> None:
    conversation = Conversation((Turn("user", (Text("Q"),)),))
    qwen, hermes = families("byte-qwen3_xml"), families("byte-hermes")
    on, off = qwen.render(conversation), qwen.render(conversation, thinking=False)
    assert (on.thinking_open, off.thinking_open) == (True, False)
    assert qwen.tokenizer.decode(off.ids).endswith("<think>\n\n</think>\n\n")
    assert not hermes.render(conversation).thinking_open
    assert not any(
        b"think" in qwen.tokenizer.token_bytes(t) for t in qwen.encode_output(off, [Thinking("x"), Text("y")])
    )


def test_tools_work_where_the_template_has_none(families: Callable[[str], Family]) -> None:
    family = families("byte-chatml")
    call = ToolCall("c1", "g", "{}")
    turns = (Turn("user", (Text("Q"),)), Turn("assistant", (Text("So."), call)), Turn("tool", (ToolOutput("c1", "R"),)))
    text = family.tokenizer.decode(family.render(Conversation(turns, TOOLS)).ids)
    assert text.startswith("<|im_start|>system\n## Tools") and "Does it." in text
    assert 'So.\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>user\n<tool_response>\nR\n</tool_response><|im_end|>" in text
    plain = family.tokenizer.decode(family.render(Conversation(turns[:1])).ids)
    assert plain == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"


def test_a_family_can_be_named(vocabulary: Callable[[str], Path], tmp_path: Path) -> None:
    directory = checkpoint(vocabulary("byte"), tmp_path / "c", "hermes")
    assert load_family(directory, "hermes").name == "hermes"
    with pytest.raises(FamilyError, match="does not parse back"):
        load_family(directory, "qwen3_xml")
    with pytest.raises(FamilyError, match="known are hermes, qwen3_xml, "):
        load_family(directory, "none_such")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages[0].content }}", "generation prompt"),
        ("{{ raise_exception('no chat') }}", "no chat"),
        (PLAIN_CHATML.replace("im_start", "im_begin"), "generation prompt"),
        (PLAIN_CHATML.replace("assistant\n{% endif %}", "assistant\n<wonder>\n{% endif %}"), "not understood"),
    ],
)
def test_what_does_not_match_is_named(
    vocabulary: Callable[[str], Path], tmp_path: Path, template: str, reason: str
) -> None:
    with pytest.raises(FamilyError, match=reason):
        load_family(checkpoint(vocabulary("byte"), tmp_path / "c", template))


def test_missing_and_damaged_files_are_named(vocabulary: Callable[[str], Path], tmp_path: Path) -> None:
    directory = checkpoint(vocabulary("byte"), tmp_path / "c", "hermes")
    template = directory / "chat_template.jinja"
    template.write_text("{% if %}")
    with pytest.raises(FamilyError, match="does not compile"):
        load_family(directory)
    template.unlink()
    with pytest.raises(FamilyError, match="no chat template"):
        load_family(directory)
    path = directory / "tokenizer.json"
    description = json.loads(path.read_text())
    for damage, reason in (
        (b"{", "cannot be read"),
        (b"[]", "not a tokenizer"),
        (b'{"model": {"vocab": {}}}', "no vocabulary"),
    ):
        path.write_bytes(damage)
        with pytest.raises(FamilyError, match=reason):
            load_family(directory)
    description["pre_tokenizer"] = {"type": "Nonsense"}
    with pytest.raises(TokenizerError, match="not usable"):
        Tokenizer(description)
    path.unlink()
    with pytest.raises(FamilyError, match="does not exist"):
        load_family(directory)


def test_templates_get_what_they_need() -> None:
    source = (
        "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% endfor %}{{ strftime_now('%Y') }}{{ {'k': 'é<'} | tojson }}{{ bos_token }}"
        "{{ ('[1]' | from_json)[0] }}{{ {'a': 1} | tojson(indent=1) }}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"}, datetime(2001, 2, 3))
    text = template.render([{"content": "one"}, {"content": "two"}], [], {})
    assert text == 'one2001{"k": "é<"}<s>1{\n "a": 1\n}'


def test_templates_cannot_reach_out() -> None:
    for source in ("{{ messages.clear() }}", "{{ ''.__class__.__mro__ }}", "{{ nothing.at.all }}", "{{ 1 / 0 }}"):
        with pytest.raises(TemplateRefusal):
            ChatTemplate(source, {}).render([], [], {})
    with pytest.raises(TemplateMissing):
        ChatTemplate("{% for %}", {})


def test_named_templates_and_special_tokens_in_the_configuration(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<b>"},
        "chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t{{ bos_token }}"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.load(tmp_path).render([], [], {}) == "t<b>"


def test_encoding_round_trips_and_knows_control_tokens(families: Callable[[str], Family]) -> None:
    tokenizer = families("qwen-qwen3_xml").tokenizer
    text = "Grüße 😀\n\n <|im_end|> <think>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    control = set(tokenizer.control.values())
    assert not control & set(tokenizer.encode("".join(tokenizer.control)))
    assert [t for t in tokenizer.encode_trusted(text) if t in control] == [
        tokenizer.control["<|im_end|>"],
        tokenizer.control["<think>"],
    ]
    assert tokenizer.vocab_size == 248077
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""


def test_remembered_pieces_are_bounded(vocabulary: Callable[[str], Path]) -> None:
    description = json.loads((vocabulary("byte") / "tokenizer.json").read_text())
    tokenizer = Tokenizer(description, memo_bytes=2000)
    for number in range(50):
        assert len(tokenizer.encode(f"{number:010}", remember=True)) == 10
    kept = list(tokenizer._memo._known)
    assert 1 < len(kept) < 50 and kept[-1] == f"{49:010}"
    assert sum(sys.getsizeof(text) + sys.getsizeof(ids) for text, ids in tokenizer._memo._known.items()) <= 2000
    assert tokenizer.encode("😀" * 500, remember=True) == tokenizer.encode("😀" * 500)
    assert list(tokenizer._memo._known) == kept


def test_other_threads_run_while_a_long_text_is_encoded(vocabulary: Callable[[str], Path]) -> None:
    tokenizer = Tokenizer.load(vocabulary("qwen"))
    text, turns = "The quick brown fox, number 12345. " * 10_000, 0
    encoding = Thread(target=tokenizer.encode, args=(text,))
    encoding.start()
    while encoding.is_alive():
        turns += 1
        encoding.join(0.001)
    assert turns > 3  # at most two where it held the interpreter


@pytest.mark.deep
@pytest.mark.parametrize("name", ["qwen-qwen3_xml", "qwen-hermes", "byte-chatml"])
def test_prompts_equal_those_of_transformers(
    vocabulary: Callable[[str], Path], families: Callable[[str], Family], tmp_path: Path, name: str
) -> None:
    from transformers import AutoTokenizer

    tokenizer, _, template = name.partition("-")
    reference = AutoTokenizer.from_pretrained(checkpoint(vocabulary(tokenizer), tmp_path / "c", template))
    texts = ("Sys.\n\nMore.", "Hello\n\nthere!  I am 42.", "Yes\n- é 😀", "ok\t\n")
    roles: tuple[Role, ...] = ("system", "user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    wanted = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    turns = tuple(Turn(role, (Text(text),)) for role, text in zip(roles, texts, strict=True))
    prompt = families(name).render(Conversation(turns))
    assert families(name).tokenizer.decode(prompt.ids) == wanted
    assert list(prompt.ids) == reference.encode(wanted, add_special_tokens=False)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_watches_are_spelled_as_in_the_middle_of_a_text(kind: str) -> None:
    """These vocabularies put a space before the start of one, which is no part of a delimiter."""
    description = sentencepiece(kind)
    for text in ("<|im_start|>", "<|im_end|>"):
        token = description["model"]["vocab"][text] = len(description["model"]["vocab"])
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        description["added_tokens"].append({"id": token, "content": text, "special": True} | flags)
    tokenizer = Tokenizer(description)
    template = ChatTemplate((TEMPLATES / "hermes.jinja").read_text(encoding="utf-8"), {})
    family = Family(comparison(tokenizer, [(HERMES, template)]).best, tokenizer)
    spelled = [tokenizer.decode(ids) for ids, kind in family.watches if kind != "turn_end"]
    assert spelled == ["</think>", "<tool_call>", "</tool_call>"]
    assert tuple(tokenizer.encode_trusted("x</think>")[-7:]) == family.watches[0][0]
