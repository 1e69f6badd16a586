"""What a request can ask of the engine loop: to go on from partial completions, reports, stop texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forgelite.errors import ConfigError
from forgelite.policy.engine_loop import EngineLoop
from forgelite.policy.engine_protocol import Sampled
from forgelite.policy.groups import GroupProgress, GroupResult
from forgelite.policy.stop_texts import StopTexts
from forgelite.types import Completion, Failure, FinishReason, VersionSpan
from tests.unit.version_engine import (
    PROMPT,
    VersionEngine,
    positions,
    request,
    results,
    started_loops,
    until_result,
    weights,
)

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def start() -> Iterator[Callable[..., EngineLoop]]:
    with started_loops() as start:
        yield start


def saved(
    *runs: tuple[int, int], finish_reason: FinishReason = "abort", prompt: tuple[int, ...] = PROMPT
) -> Completion:
    """A completion of so many tokens of each version: `saved((0, 2), (1, 3))` has five."""
    tokens = [version for version, tokens in runs for _ in range(tokens)]
    spans: list[VersionSpan] = []
    for version, count in runs:
        begin = spans[-1].end if spans else 0
        spans.append(VersionSpan(version=version, start=begin, end=begin + count))
    return Completion(
        request_id="saved/0",
        prompt_ids=prompt,
        token_ids=tokens,
        logprobs=positions(len(tokens)),
        spans=spans,
        finish_reason=finish_reason,
    )


def test_a_group_goes_on_from_its_partials_within_the_budget_of_the_whole(start) -> None:
    engine = VersionEngine()
    loop = start(engine)
    loop.update(2, weights(2))
    finished = saved((0, 3), finish_reason="stop")
    partials = (saved((0, 1), (1, 2)), finished, saved(), saved((2, 2)))
    loop.submit([request("g", n=4, max_tokens=6, partials=partials)])
    first, second, third, fourth = results(loop)["g"]

    assert first.token_ids == [0, 1, 1, 2, 2, 2]
    assert [(span.version, span.start, span.end) for span in first.spans] == [(0, 0, 1), (1, 1, 3), (2, 3, 6)]
    assert (second.token_ids, second.finish_reason) == ([0, 0, 0], "stop")
    assert fourth.spans == [VersionSpan(version=2, start=0, end=6)]
    for each in (first, third, fourth):
        assert each.logprobs == positions(6)
        assert (each.finish_reason, each.prompt_ids) == ("length", PROMPT)
    assert [each.request_id for each in (first, second, third, fourth)] == ["g/0", "g/1", "g/2", "g/3"]


def test_partials_that_need_no_further_token_never_reach_the_engine(start) -> None:
    engine = VersionEngine()
    loop = start(engine)
    whole, short, ended = saved((0, 4)), saved((0, 1), finish_reason="length"), saved((0, 2), (7, 1))
    loop.submit([request("g", n=2, max_tokens=4, partials=(whole, short))])
    loop.update(7, weights(7))
    loop.submit([request("stopped", max_tokens=4, stop_token_ids=(7,), partials=(ended,))])
    found = results(loop, 2)

    assert [(c.finish_reason, len(c.token_ids)) for c in found["g"]] == [("length", 4), ("length", 1)]
    assert found["stopped"][0].finish_reason == "stop"
    assert engine.added == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partials": (saved((0, 1), prompt=(1, 3)),)}, "saved/0 has another prompt"),
        ({"partials": ()}, "0 partials for n=1 members"),
        ({"partials": (saved((0, 1)), saved((0, 1)))}, "2 partials for n=1 members"),
        ({"partials": (saved((0, 5)),)}, "has 5 tokens, more than max_tokens=4"),
        ({"partials": (saved((300, 1)),)}, "saved/0: token 300 is outside the vocabulary of 256"),
        ({"progress_s": -1.0}, "progress_s=-1.0"),
        ({"progress_s": float("nan")}, "progress_s=nan"),
        ({"temperature": 0.005}, "temperature=0.005 is below 0.01"),
        ({"temperature": float("nan")}, "temperature=nan is outside"),
        ({"stop_token_ids": (256,)}, "stop token 256 is outside"),
        ({"stop": ("a", "")}, "empty text"),
        ({"stop": ("a",)}, "stop texts need a tokenizer, and this policy has none"),
    ],
)
def test_a_request_that_does_not_fit_is_refused(start, options: dict, message: str) -> None:
    loop = start(VersionEngine(), **({"stop_texts": _NeverOpened()} if options.get("stop") == ("a", "") else {}))
    (refusal,) = loop.submit([request("g", **options)])

    assert isinstance(refusal, Failure)
    assert refusal.reason == "rejected"
    assert message in refusal.message


class _NeverOpened(StopTexts):
    def __init__(self) -> None:
        super().__init__("nowhere")

    def open(self) -> None:
        pass


def test_a_partial_of_newer_weights_than_the_engines_is_rejected(start) -> None:
    loop = start(VersionEngine())
    loop.submit([request("g", partials=(saved((3, 1)),))])
    failure = results(loop)["g"]

    assert failure.reason == "rejected"
    assert "sampled by version 3, newer than this engine's 0" in failure.message


def test_reports_hold_every_new_token_in_order_and_come_before_the_result(start) -> None:
    engine = VersionEngine(gate=True)
    loop = start(engine)
    loop.submit([request("g", n=2, max_tokens=4, partials=(saved((0, 1)), saved()), progress_s=0.0)])
    engine.open()
    *reports, result = until_result(loop)

    assert isinstance(result, GroupResult)
    for completion, given in zip(result.outcome, (1, 0), strict=True):
        mine = [m for r in reports for m in r.members if f"g/{m.index}" == completion.request_id]
        assert [m.start for m in mine] == list(range(given, 4))
        assert [t for m in mine for t in m.token_ids] == completion.token_ids[given:]
        assert [p for m in mine for p in m.logprobs] == completion.logprobs[given:]
        assert [s for m in mine for s in m.spans] == [
            VersionSpan(version=0, start=index, end=index + 1) for index in range(given, 4)
        ]


def test_reports_come_no_oftener_than_asked_and_the_last_one_brings_the_rest(start) -> None:
    loop = start(VersionEngine())
    loop.submit([request("g", max_tokens=50, progress_s=1e6)])
    first, last, result = until_result(loop)

    assert isinstance(first, GroupProgress)
    assert [len(each.members[0].token_ids) for each in (first, last)] == [1, 49]
    assert len(result.outcome[0].token_ids) == 50


def test_a_request_that_wants_no_reports_gets_none(start) -> None:
    loop = start(VersionEngine())
    loop.submit([request("g", max_tokens=50)])

    assert len(until_result(loop)) == 1


SPECIAL = 256  # its text is "<|end|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of bytes: token b is the byte b."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    shown = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=shown, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    made = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(made)
    return made


def _byte_characters() -> list[str]:
    """How ByteLevel writes each byte: printable ones as they are, the others moved up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(moved)) for byte in range(256)]


@pytest.fixture
def texts(folder: Path) -> StopTexts:
    opened = StopTexts(folder)
    opened.open()
    return opened


def watched(texts: StopTexts, stop: tuple[str, ...], *pieces: list[int], prompt: str = "prompt") -> list[int | None]:
    watch = texts.watch(list(prompt.encode()), stop)
    return [watch.feed(piece) for piece in pieces]


def test_a_stop_text_is_found_at_the_token_that_completes_it(texts: StopTexts) -> None:
    assert watched(texts, ("END",), list(b"the END and more")) == [7]
    assert watched(texts, ("END", "an"), list(b"an END")) == [2]
    assert watched(texts, ("END",), list(b"EN"), list(b"E"), list(b"ND")) == [None, None, 2]
    assert watched(texts, ("END",), list(b"E N D"), [], list(b"end")) == [None, None, None]


def test_a_stop_text_in_the_prompt_or_across_its_end_does_not_count(texts: StopTexts) -> None:
    assert watched(texts, ("END",), list(b"ND"), prompt="END E") == [None]


def test_characters_of_several_tokens_are_put_together(texts: StopTexts) -> None:
    snowman = list("\N{SNOWMAN}".encode())
    assert watched(texts, ("\N{SNOWMAN}!",), *[[byte] for byte in [*snowman, *b"!"]]) == [None, None, None, 1]
    assert watched(texts, ("\N{SNOWMAN}",), snowman[:2], snowman[2:]) == [None, 1]


def test_bytes_that_are_no_text_disturb_nobody(texts: StopTexts) -> None:
    noise = [0xFF, 0xC0, 0x80, 0xE2, 0xE2, 0x98, 0xF0, 0x9F]
    assert watched(texts, ("END",), noise, list(b"xEND")) == [None, 4]


def test_the_text_of_a_special_token_can_be_a_stop_text(texts: StopTexts) -> None:
    assert watched(texts, ("<|end|>",), [*b"ab", SPECIAL, *b"c"]) == [3]


def test_a_folder_without_a_tokenizer_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"no tokenizer in {tmp_path}"):
        StopTexts(tmp_path).open()


def saying(engine: VersionEngine, sequence_id: str, text: str) -> None:
    """Let a sequence sample the bytes of a text."""
    engine.script[sequence_id] = {len(PROMPT) + index: byte for index, byte in enumerate(text.encode())}


def test_a_completion_ends_with_the_token_that_completes_a_stop_text(start, folder: Path) -> None:
    engine = VersionEngine()
    loop = start(engine, stop_texts=StopTexts(folder))
    saying(engine, "g/0", "say END and on")
    saying(engine, "g/1", "never")
    saying(engine, "g/2", "123END")
    loop.submit([request("g", n=3, max_tokens=12, stop=("END",), progress_s=0.0)])
    *reports, result = until_result(loop)
    stopped, free, _ = result.outcome

    assert bytes(stopped.token_ids) == b"say END"
    assert stopped.logprobs == positions(7)
    assert [c.finish_reason for c in result.outcome] == ["stop", "length", "stop"]
    assert len(free.token_ids) == 12
    told = [t for r in reports for m in r.members if m.index == 0 for t in m.token_ids]
    assert bytes(told) == b"say END"
    assert engine._positions["g/0"] == len(PROMPT) + 7  # the engine went no further


class PairEngine(VersionEngine):
    """Samples two tokens in a step, as speculative decoding does."""

    def _sample(self, sequence_id: str) -> Sampled:
        first, second = super()._sample(sequence_id), super()._sample(sequence_id)
        tokens, logprobs = first.token_ids + second.token_ids, first.logprobs + second.logprobs
        return Sampled(sequence_id, tokens, logprobs, second.finish_reason)


def test_tokens_that_came_in_the_same_step_after_a_stop_text_are_left_out(start, folder: Path) -> None:
    engine = PairEngine()
    loop = start(engine, stop_texts=StopTexts(folder))
    saying(engine, "g/0", "say END and")
    loop.submit([request("g", max_tokens=12, stop=("END",))])
    (completion,) = results(loop)["g"]

    assert bytes(completion.token_ids) == b"say END"
    assert completion.logprobs == positions(7)
    assert completion.spans == [VersionSpan(version=0, start=0, end=7)]


def test_a_stop_text_at_the_end_of_the_budget_is_a_stop(start, folder: Path) -> None:
    engine = VersionEngine()
    loop = start(engine, stop_texts=StopTexts(folder))
    saying(engine, "g/0", "12END")
    loop.submit([request("g", max_tokens=5, stop=("END",))])

    assert results(loop)["g"][0].finish_reason == "stop"


def test_a_stop_text_may_begin_in_a_partial(start, folder: Path) -> None:
    engine = VersionEngine()
    loop = start(engine, stop_texts=StopTexts(folder))
    begun = Completion(
        request_id="saved/0",
        prompt_ids=PROMPT,
        token_ids=list(b"say EN"),
        logprobs=positions(6),
        spans=[VersionSpan(version=0, start=0, end=6)],
        finish_reason="abort",
    )
    saying(engine, "g/0", "say ENDLESS")
    loop.submit([request("g", max_tokens=12, stop=("END",), partials=(begun,))])
    loop.submit([request("done", max_tokens=12, stop=("EN",), partials=(begun,))])
    found = results(loop, 2)

    assert (bytes(found["g"][0].token_ids), found["g"][0].finish_reason) == (b"say END", "stop")
    assert (bytes(found["done"][0].token_ids), found["done"][0].finish_reason) == (b"say EN", "stop")
    assert engine.added == [["g/0"]]


def test_a_model_without_a_tokenizer_refuses_stop_texts_and_serves_the_rest(start, tmp_path: Path) -> None:
    loop = start(VersionEngine(), stop_texts=StopTexts(tmp_path))
    refused, accepted = loop.submit([request("stop", stop=("END",)), request("plain")])

    assert "no tokenizer in" in refused.message
    assert "use stop_token_ids" in refused.message
    assert accepted is None
    assert len(results(loop)["plain"]) == 1
