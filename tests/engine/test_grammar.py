"""Constrained decoding: what is drawn follows the grammar, and nothing else of a request or its neighbours changes."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_support import Bench

from engine.api import Sampling
from engine.grammar import GrammarError, Grammars, Guide, Vocabulary

END, OTHER_END = 258, 259
PROMPT = tuple(range(40, 90))
WORDS = 'start: WORD ("," WORD){2}\nWORD: /[a-c]{1,3}/\n'
DRAWN = Sampling(max_tokens=60, seed=3, stop_tokens=(END, OTHER_END))


def vocabulary() -> Vocabulary:
    """Bytes, two control tokens, two ends of turn; the model has more scores than that."""
    texts = (b"<open>", b"<close>", b"<end>", b"<other end>")
    return Vocabulary([*(bytes([byte]) for byte in range(256)), *texts], frozenset(range(256, 260)))


@pytest.fixture
def bench(tiny: Callable[..., Path]) -> Bench:
    return Bench(tiny("qwen3_5_moe"), vocabulary=vocabulary)


def text(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode()


def guide(grammar: str, size: int = 270, **options: object) -> Guide:
    made = Grammars(vocabulary, size).guide(replace(DRAWN, constraint=grammar, **options))  # type: ignore[arg-type]
    assert made is not None
    return made


def allowed(following: Guide) -> set[int]:
    return set(np.flatnonzero(following.allowed()).tolist())


def follow(following: Guide, *tokens: int | str) -> set[int]:
    for token in tokens:
        for one in token.encode() if isinstance(token, str) else [token]:
            assert one in allowed(following)
            following.advance(one)
    return allowed(following)


# ── masks ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_only_what_the_grammar_knows_may_come_next() -> None:
    following = guide('start: "ab" | <[256]> "c"')
    assert allowed(following) == {ord("a"), 256}
    assert follow(following, "a") == {ord("b")}
    assert follow(following, "b") == {END, OTHER_END}
    assert follow(guide('start: "ab" | <[256]> "c"'), 256) == {ord("c")}


def test_the_text_of_a_control_token_is_not_the_token() -> None:
    assert follow(guide('start: "<open>"'), "<open>") == {END, OTHER_END}
    assert 256 not in allowed(guide("start: /(.|\\n)*/"))


def test_ends_are_allowed_where_the_grammar_may_end_or_names_them() -> None:
    following = guide('start: "a" ("b" <[258]>)?')
    assert allowed(following) == {ord("a")}
    assert follow(following, "a") == {ord("b"), END, OTHER_END}
    assert follow(following, "b") == {END}


def test_a_mask_is_as_long_as_the_scores() -> None:
    """No text matches a score that has no token; where any token may come it may come too, as without a grammar."""
    assert max(allowed(guide("start: /(?s:.*)/"))) <= OTHER_END
    assert allowed(guide("start: <[^256]>*")) == {*range(256), *range(257, 270)}
    assert len(guide('start: "a"', size=258).allowed()) == 258


def test_half_of_a_code_point_is_followed_by_the_other() -> None:
    following = guide("start: /[éa]/")
    assert allowed(following) == {0xC3, ord("a")}
    assert follow(following, 0xC3) == {0xA9}


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (
            'start: b\n# the tool f\nb: %json {"not": {}, "if": {}}',
            r'^the tool f cannot be enforced: no answer can be held to the keyword "if", "not": leave it out of',
        ),
        ('# f\nstart: %json {"type": "string", "format": "x-y"}', r'^f cannot .* the format "x-y": leave it out of'),
        ('# the tool f\nb: "x"\n# the answer\nc: %json {"type": "x"}\nstart: b c', r"^the answer .*Invalid type: x"),
        ("start: missing", r"^the grammar cannot be enforced: .*missing"),
        ("start: /(?=a)/", r"^the grammar cannot be enforced: look-around"),
        ("start: <[999]>", r"cannot be enforced"),
        ("(", r"cannot be enforced"),
        ('# the tool f\nstart: %json {"$ref": "#"}', r"^the tool f cannot be enforced: it allows nothing"),
        ("# the tool f\nstart: A\nA: /[^\\s\\S]/", r"^the tool f cannot be enforced: it allows nothing"),
    ],
)
def test_what_cannot_be_compiled_says_why_and_for_whom(grammar: str, message: str) -> None:
    following = guide(grammar)
    while not following.ready:
        following.wait()
    assert re.search(message, following.failure) and "\n" not in following.failure
    with pytest.raises(GrammarError):
        following.allowed()


def test_a_vocabulary_that_cannot_be_read_fails_the_requests_that_need_it() -> None:
    def broken() -> Vocabulary:
        raise OSError("no such file")

    made = Grammars(broken, 270).guide(replace(DRAWN, constraint='start: "a"'))
    assert made is not None
    while not made.ready:
        made.wait()
    assert made.failure == "no such file"


def test_grammars_are_compiled_once_and_forgotten_in_time() -> None:
    grammars = Grammars(vocabulary, 270)

    def compiled(number: int) -> object:
        made = grammars.guide(replace(DRAWN, constraint=f'start: "{number}"'))
        assert made is not None
        made.allowed()
        return grammars._known[f'start: "{number}"']

    first = compiled(0)
    assert compiled(0) is first
    for number in range(1, 70):
        compiled(number)
    assert len(grammars._known) == 64 and compiled(0) is not first


# ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_drawn_follows_the_grammar(bench: Bench) -> None:
    names = [bench.submit(PROMPT, replace(DRAWN, constraint=WORDS, seed=seed)) for seed in range(6)]
    names += [bench.submit(PROMPT, replace(DRAWN, constraint=WORDS, temperature=0.0, top_k=1))]
    names += [bench.submit(PROMPT, replace(DRAWN, constraint=WORDS, top_p=0.2, min_p=0.3, presence_penalty=2.0))]
    bench.run()
    for name in names:
        outcome = bench.outcomes[name]
        assert outcome.done is not None and outcome.done.reason == "stop"
        assert re.fullmatch("[a-c]{1,3}(,[a-c]{1,3}){2}", text(outcome.tokens)), text(outcome.tokens)
        assert outcome.tokens[-1] in (END, OTHER_END)
    assert len({text(bench.outcomes[name].tokens) for name in names}) > 1


def test_the_same_seed_draws_the_same_whoever_else_is_there(bench: Bench, tiny: Callable[..., Path]) -> None:
    """Neighbours with and without a grammar draw what they draw alone."""
    free, bound = replace(DRAWN, seed=11), replace(DRAWN, seed=12, constraint=WORDS)
    together = [bench.submit(PROMPT, one) for one in (free, bound, replace(bound, seed=13))]
    bench.run()
    for name, sampling in zip(together, (free, bound, replace(bound, seed=13)), strict=True):
        alone = Bench(tiny("qwen3_5_moe"), vocabulary=vocabulary)
        single = alone.submit(PROMPT, sampling)
        alone.run()
        assert alone.outcomes[single].tokens == bench.outcomes[name].tokens


def test_a_grammar_that_allows_anything_changes_nothing(bench: Bench) -> None:
    for sampling in (DRAWN, replace(DRAWN, top_p=0.9, top_k=40, min_p=0.01), replace(DRAWN, frequency_penalty=1.0)):
        plain = bench.ask(PROMPT, sampling)
        bound = bench.ask(PROMPT, replace(sampling, constraint="start: <[*]>*"))
        assert bound.tokens == plain.tokens and len(bound.tokens) > 3


def test_log_probabilities_are_the_models_own(bench: Bench) -> None:
    name = bench.submit(PROMPT, replace(DRAWN, constraint='start: "ab"', logprobs=3))
    bench.run()
    outcome = bench.outcomes[name]
    assert outcome.tokens[:2] == [ord("a"), ord("b")]
    for position, (token, entry) in enumerate(zip(outcome.tokens, outcome.logprobs, strict=True), start=len(PROMPT)):
        scores = outcome.logits[position].astype(np.float64)
        expected = scores[token] - scores.max() - np.log(np.exp(scores - scores.max()).sum())
        assert entry.token == token and entry.logprob == pytest.approx(expected) and len(entry.top) == 3
        assert all(value > -100 for _, value in entry.top)


def test_a_cut_is_a_cut_and_a_script_is_no_draw(bench: Bench) -> None:
    cut = bench.submit(PROMPT, replace(DRAWN, constraint=WORDS, max_tokens=2))
    forced = bench.submit(PROMPT, replace(DRAWN, constraint=WORDS, forced=(1, 2, 3)))
    nothing = bench.submit(PROMPT, replace(DRAWN, constraint=WORDS, max_tokens=0))
    bench.run()
    done = [bench.outcomes[name].done for name in (cut, forced, nothing)]
    assert [one and one.reason for one in done] == ["length", "stop", "length"]
    assert len(bench.outcomes[cut].tokens) == 2 and bench.outcomes[forced].tokens == [1, 2, 3]


def test_a_complete_grammar_without_stop_tokens_fails_its_request_alone(bench: Bench) -> None:
    bad = bench.submit(PROMPT, replace(DRAWN, constraint='start: "a"', stop_tokens=()))
    good = bench.submit(PROMPT, replace(DRAWN, constraint=WORDS))
    bench.run()
    failed = bench.outcomes[bad].failed
    assert failed is not None and failed.kind == "invalid" and bench.outcomes[bad].tokens == [ord("a")]
    assert bench.outcomes[good].done is not None


def test_where_a_grammar_leads_nowhere_its_request_fails_alone(bench: Bench) -> None:
    """It is the client's grammar that is at fault, and no one else's answer."""
    bad = bench.submit(PROMPT, replace(DRAWN, constraint='start: "ab" B\nB: /[^\\s\\S]/'))
    good = bench.submit(PROMPT, replace(DRAWN, constraint=WORDS))
    bench.run()
    failed = bench.outcomes[bad].failed
    assert failed is not None and failed.kind == "invalid" and failed.message.endswith("it allows nothing")
    assert bench.outcomes[good].done is not None


def test_who_gives_way_goes_on_where_it_stood(tiny: Callable[..., Path]) -> None:
    """Sequences that are preempted for lack of pages, and resumed, are no different from those that are not."""
    long = Sampling(max_tokens=150, seed=5, stop_tokens=(END,), constraint="start: /[a-z]{120}/")
    roomy, tight = Bench(tiny("qwen3_5_moe"), vocabulary=vocabulary), None
    expected = []
    for seed in range(3):
        name = roomy.submit(PROMPT, replace(long, seed=seed))
        roomy.run()
        expected.append(roomy.outcomes[name].tokens)
    page = int(roomy.scheduler.stats().values["page_bytes"])
    tight = Bench(tiny("qwen3_5_moe"), vocabulary=vocabulary, kv_bytes=5 * page)
    names = [tight.submit(PROMPT, replace(long, seed=seed)) for seed in range(3)]
    tight.run()
    assert tight.scheduler.stats().values["preempted"] > 0
    assert [tight.outcomes[name].tokens for name in names] == expected


def test_a_bad_grammar_fails_before_admission(bench: Bench) -> None:
    bad = bench.submit(PROMPT, replace(DRAWN, constraint='start: %json {"not": {}}'))
    bench.run()
    outcome = bench.outcomes[bad]
    assert outcome.failed is not None and outcome.failed.kind == "invalid" and '"not"' in outcome.failed.message
    assert outcome.admitted is None


def test_without_a_vocabulary_there_are_no_grammars(tiny: Callable[..., Path]) -> None:
    bench = Bench(tiny("qwen3_5_moe"))
    name = bench.submit(PROMPT, replace(DRAWN, constraint=WORDS))
    bench.run()
    assert bench.outcomes[name].failed is not None


def test_others_go_on_while_a_mask_is_made(
    bench: Bench, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own sequence waits for it, and may end meanwhile, or give way and come back."""
    bound, free = replace(DRAWN, constraint=WORDS), replace(DRAWN, max_tokens=20)
    expected = Bench(tiny("qwen3_5_moe"), vocabulary=vocabulary).ask(PROMPT, bound).tokens
    gate, quick, made = threading.Event(), iter(range(4)), Guide._allowed

    def slow(self: Guide, matcher: object) -> object:
        if next(quick, None) is None:
            assert gate.wait(60)
        return made(self, matcher)

    monkeypatch.setattr(Guide, "_allowed", slow)
    late, aborted = bench.submit(PROMPT, bound), bench.submit(PROMPT, bound)
    others = [bench.submit(PROMPT, replace(free, seed=seed)) for seed in range(2)]
    bench.run(lambda: all(bench.outcomes[name].done for name in others))
    assert 0 < len(bench.outcomes[late].tokens) + len(bench.outcomes[aborted].tokens) <= 4
    bench.step()
    bench.scheduler.abort(aborted)
    (waiting,) = bench.scheduler._running
    assert waiting.late and not waiting.remaining
    bench.scheduler._preempt(waiting)
    bench.step()
    gate.set()
    bench.run()
    assert bench.outcomes[late].tokens == expected
    bench.check()


def test_others_go_on_while_a_grammar_is_compiled(tiny: Callable[..., Path]) -> None:
    """The vocabulary takes as long as it likes; who needs no grammar is served meanwhile, and aborts are heeded."""
    gate = threading.Event()

    def slow() -> Vocabulary:
        assert gate.wait(60)
        return vocabulary()

    bench = Bench(tiny("qwen3_5_moe"), vocabulary=slow)
    bound = bench.submit(PROMPT, replace(DRAWN, constraint=WORDS))
    given_up = bench.submit(PROMPT, replace(DRAWN, constraint=WORDS))
    free = bench.submit(PROMPT[:-1], replace(DRAWN, max_tokens=5, stop_tokens=()))
    deadline = time.monotonic() + 60
    while bench.outcomes[free].done is None:
        bench.step()
        assert time.monotonic() < deadline
    bench.scheduler.abort(given_up)
    began = time.monotonic()
    for _ in range(3):
        bench.step()  # nothing to do: it waits a moment instead of spinning
    assert time.monotonic() - began > 0.03
    assert bench.outcomes[bound].admitted is None
    assert bench.outcomes[given_up].done is not None and bench.outcomes[given_up].done.reason == "abort"
    gate.set()
    bench.run()
    assert bench.outcomes[bound].done is not None and bench.outcomes[bound].done.reason == "stop"
