"""Replay cases about text: what forced tokens become in the stream of a caller, the whole way from the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import anyio
import pytest

from asyncllm import AsyncLLM, FinishReason, TokenDelta
from asyncllm.testing import EOS
from tests.support.scripted import assert_settled, letters_llm, set_script

pytestmark = pytest.mark.anyio

EMOJI = "😀🎉🚀🦊"
PIECES = ["own f", "EF", "HI", "e\u0301", "  "]
OWN_F, EF, HI, E_ACUTE, SPACES = range(260, 260 + len(PIECES))
IM_END = 259


@pytest.fixture(scope="module")
async def module_text_llm(anyio_backend: Any) -> AsyncIterator[AsyncLLM]:
    checkpoint = {"pieces": PIECES, "generation_config": {"eos_token_id": [EOS, IM_END]}}
    async with letters_llm(checkpoint=checkpoint) as llm:
        yield llm


@pytest.fixture
async def llm(module_text_llm: AsyncLLM) -> AsyncIterator[AsyncLLM]:
    """A scripted engine whose tokenizer has a few pieces beside the bytes; each test finds it empty."""
    yield module_text_llm
    await assert_settled(module_text_llm)


async def play(llm: AsyncLLM, forced: Sequence[int], prompt: Any = "prompt", **options: Any) -> list[TokenDelta]:
    """Return the items of a stream whose engine draws ``forced``, then ends of sequence."""
    await set_script(llm, tokens=[], scripts=[[[ord("p")], list(forced)]])
    return [delta async for delta in llm.stream(prompt, **options)]


def text_of(deltas: Sequence[TokenDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def ids_of(deltas: Sequence[TokenDelta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


# ------------------------------------------------------------------------------------------------ unfinished characters
@pytest.mark.parametrize("num_bytes", [1, 2, 3])
async def test_r34_a_prompt_that_ends_inside_a_character(llm: AsyncLLM, num_bytes: int) -> None:
    """No text of the prompt comes out; each byte of the rest is a replacement character, as in one-shot decoding."""
    smile = list("😀".encode())
    deltas = await play(llm, [*smile[num_bytes:], *b"ok"], [ord("p"), *smile[:num_bytes]])
    assert text_of(deltas) == "\ufffd" * (4 - num_bytes) + "ok"
    assert ids_of(deltas) == [*smile[num_bytes:], *b"ok", EOS]


async def test_r35_emoji_byte_by_byte_in_sixteen_streams(llm: AsyncLLM) -> None:
    await set_script(llm, tokens=list(EMOJI.encode()))
    texts: list[list[str]] = []

    async def read() -> None:
        deltas = [delta async for delta in llm.stream("x", max_tokens=len(EMOJI.encode()))]
        texts.append([delta.text for delta in deltas if delta.text])

    async with anyio.create_task_group() as group:
        for _ in range(16):
            group.start_soon(read)
    assert texts == [list(EMOJI)] * 16


async def test_r36_combining_marks_and_joiners_come_once(llm: AsyncLLM) -> None:
    flag = "\U0001f3f3\ufe0f\u200d\U0001f308"
    assert text_of(await play(llm, [E_ACUTE, *flag.encode()])) == "e\u0301" + flag


async def test_r37_a_token_that_starts_with_a_space_inside_a_character(llm: AsyncLLM) -> None:
    euro = list("€".encode())
    assert text_of(await play(llm, [*euro[:2], SPACES, euro[2]])) == "\ufffd  \ufffd"


async def test_r38_the_end_inside_a_character(llm: AsyncLLM) -> None:
    prompt = "prompt"
    await set_script(llm, scripts=[[[ord("p")], [*b"hi", *"😀".encode()]]])
    stream = llm.stream(prompt, max_tokens=4)
    deltas = [delta async for delta in stream]
    assert (deltas[-1].text, deltas[-1].token_ids) == ("\ufffd", list("😀".encode())[:2])
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert stream.usage is not None
    assert (stream.usage.prompt_tokens, stream.usage.completion_tokens) == (len(prompt), 4)


# -------------------------------------------------------------------------------------------------------- stop strings
async def test_r39_nothing_of_a_stop_string_is_delivered(llm: AsyncLLM) -> None:
    deltas = await play(llm, [ord("x"), ord("D"), EF, ord("G"), HI, ord("J"), *b"more"], stop="DEFGHIJ")
    assert [delta.text for delta in deltas] == ["x", ""]
    assert ids_of(deltas) == [ord("x"), ord("D"), EF, ord("G"), HI, ord("J")]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, "DEFGHIJ")


async def test_r40_held_text_comes_with_the_end(llm: AsyncLLM) -> None:
    deltas = await play(llm, [OWN_F], stop="own fox")
    assert [(delta.text, delta.token_ids) for delta in deltas] == [("own f", [OWN_F, EOS])]


async def test_r42_no_item_without_text_but_the_last(llm: AsyncLLM) -> None:
    deltas = await play(llm, b"A long text with a long stop string. THE E_D THE END", stop="THE END")
    assert all(delta.text for delta in deltas[:-1])
    assert text_of(deltas) == "A long text with a long stop string. THE E_D "


async def test_b97_a_stop_string_ends_the_request_in_the_engine_too(llm: AsyncLLM) -> None:
    await set_script(llm, tokens=list(b"abc"))
    for include, text in ((False, "a"), (True, "abc")):
        completion = await llm.generate("x", stop="bc", include_stop_str_in_output=include, ignore_eos=True)
        assert (completion.text, completion.stop_reason) == (text, "bc")
        await assert_settled(llm)


# ----------------------------------------------------------------------------------------------------- ends of sequence
async def test_r46_ids_are_those_of_the_usage_with_the_end_of_sequence(llm: AsyncLLM) -> None:
    await set_script(llm, tokens=[], replies={"prompt": "done"})
    stream = llm.stream("prompt")
    deltas = [delta async for delta in stream]
    assert ids_of(deltas) == [*b"done", EOS]
    assert stream.usage is not None
    assert stream.usage.completion_tokens == len(ids_of(deltas))
    completion = await stream.completion()
    assert (completion.text, completion.token_ids) == (text_of(deltas), ids_of(deltas))


async def test_r49_ignore_eos_holds_for_every_end_of_sequence_the_model_names(llm: AsyncLLM) -> None:
    assert llm.info.eos_token_ids == [EOS, IM_END]
    forced = [*b"ab", IM_END, *b"cd", EOS, *b"efgh"] * 6
    assert ids_of(await play(llm, forced)) == [*b"ab", IM_END]
    deltas = await play(llm, forced, ignore_eos=True, max_tokens=50)
    assert ids_of(deltas) == forced[:50]
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    deltas = await play(llm, forced, ignore_eos=True, max_tokens=50, stop_token_ids=[EOS])
    assert ids_of(deltas) == forced[:6]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, EOS)


async def test_b103_the_order_of_stop_ids_does_not_matter(llm: AsyncLLM) -> None:
    for stop_token_ids in ([ord("c"), ord("e")], [ord("e"), ord("c")]):
        deltas = await play(llm, b"abcdef", stop_token_ids=stop_token_ids)
        assert ids_of(deltas) == list(b"abc")
        assert deltas[-1].stop_reason == ord("c")


async def test_b103_without_detokenizing_there_is_no_text(llm: AsyncLLM) -> None:
    deltas = await play(llm, b"abc", detokenize=False, logprobs=1)
    assert [(delta.text, delta.token_ids) for delta in deltas] == [("", [i]) for i in [*b"abc", EOS]]
    assert all(delta.logprobs and delta.logprobs[0].chosen.text is None for delta in deltas)


async def test_b95_as_many_logprobs_as_asked_for_at_each_position(llm: AsyncLLM) -> None:
    await set_script(llm, tokens=list("€".encode()))
    completion = await llm.generate("prompt", max_tokens=6, logprobs=3, prompt_logprobs=2)
    assert completion.logprobs is not None
    assert completion.prompt_logprobs is not None
    assert [len(entry.top) for entry in completion.logprobs] == [3] * 6
    assert completion.prompt_logprobs[0] is None
    assert [len(entry.top) for entry in completion.prompt_logprobs[1:] if entry] == [2] * 5
    assert [entry.chosen.text for entry in completion.logprobs] == ["", "", "€"] * 2
