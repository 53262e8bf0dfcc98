"""Streaming text equals one-shot text, whatever the ids are, and stop strings are cut out whole."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.frontend.decoders import GeneralDecoder, make_decoder
from asyncllm.frontend.detokenizer import StopStrings, make_detokenizer
from asyncllm.frontend.tokenizer import DecodeStyle, Tokenizer
from tests.support.frontend import FIRST_BYTE_ID, FIRST_PIECE_ID, byte_tokenizer, sentencepiece_json, wordpiece_json

EMOJI = "😀🎉🚀🦊"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    pieces = ["own f", "ox", "EF", "HI", b"\x98\x80 x", b"a\xf0", "e\u0301", "  ", "DEF", "GHIJ!"]
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"), pieces)


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    return Tokenizer(sentencepiece_json(), {})


@pytest.fixture(scope="module")
def wordpiece() -> Tokenizer:
    return Tokenizer(wordpiece_json(), {})


def piece(tokenizer: Tokenizer, text: str | bytes) -> int:
    data = text.encode() if isinstance(text, str) else text
    return next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == data)


def stream(tokenizer: Tokenizer, ids: list[int], **options: object) -> tuple[list[tuple[str, list[int]]], str | None]:
    """Return every piece that is delivered, the last one from ``close``, and the stop string that was found."""
    detokenizer = make_detokenizer(tokenizer, **options)  # type: ignore[arg-type]
    pieces: list[tuple[str, list[int]]] = []
    for token_id in ids:
        if (found := detokenizer.push(token_id)) is not None:
            pieces.append(found)
        if detokenizer.matched is not None:
            break
    return [*pieces, detokenizer.close()], detokenizer.matched


def check_exact(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    pieces, _ = stream(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(text for text, _ in pieces) == tokenizer.decode(ids, skip)
    assert [token_id for _, some in pieces for token_id in some] == ids
    assert all(text for text, _ in pieces[:-1])
    for count in {1, len(pieces) // 2} if len(pieces) > 1 else ():
        check_branch(tokenizer, pieces, count, skip)


def check_branch(tokenizer: Tokenizer, pieces: list[tuple[str, list[int]]], count: int, skip: bool) -> None:
    """Verify that a stream that goes on after the first ``count`` pieces has the text of the others."""
    after = [token_id for _, some in pieces[:count] for token_id in some]
    rest = [token_id for _, some in pieces[count:] for token_id in some]
    others, _ = stream(tokenizer, rest, skip_special_tokens=skip, after=after)
    assert "".join(text for text, _ in others) == "".join(text for text, _ in pieces[count:])


# ---------------------------------------------------------------------------------------------- streaming is exact
@given(ids=st.lists(st.integers(0, 272), max_size=40), skip=st.booleans())
def test_r37_byte_level_stream_equals_one_shot_decoding(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    check_exact(tokenizer, ids, skip)


@given(ids=st.lists(st.integers(0, 280), max_size=40), skip=st.booleans())
def test_sentencepiece_stream_equals_one_shot_decoding(sentencepiece: Tokenizer, ids: list[int], skip: bool) -> None:
    check_exact(sentencepiece, ids, skip)


@given(ids=st.lists(st.integers(0, 17), max_size=120), skip=st.booleans())
@settings(max_examples=50)
def test_wordpiece_stream_equals_one_shot_decoding(wordpiece: Tokenizer, ids: list[int], skip: bool) -> None:
    assert wordpiece.style is DecodeStyle.GENERAL
    check_exact(wordpiece, ids, skip)


@pytest.mark.model
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_smollm2_stream_equals_one_shot_decoding(smollm2_gguf: Path, data: st.DataObject) -> None:
    tokenizer = _smollm2(smollm2_gguf)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=60))
    check_exact(tokenizer, ids, data.draw(st.booleans()))


@pytest.mark.model
@given(text=st.text(st.characters(max_codepoint=0x2FFFF, exclude_categories=("Cs", "Cc")), max_size=80))
@settings(max_examples=60, deadline=None)
def test_smollm2_text_survives_encoding_and_streaming(smollm2_gguf: Path, text: str) -> None:
    tokenizer = _smollm2(smollm2_gguf)
    pieces, _ = stream(tokenizer, tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False)
    assert "".join(part for part, _ in pieces) == text


_LOADED: dict[Path, Tokenizer] = {}


def _smollm2(path: Path) -> Tokenizer:
    if path not in _LOADED:
        _LOADED[path] = Tokenizer.from_path(path)
    return _LOADED[path]


@given(text=st.text(alphabet=st.characters(codec="utf-8"), max_size=30))
def test_each_byte_alone_gives_the_text_back(tokenizer: Tokenizer, text: str) -> None:
    pieces, _ = stream(tokenizer, list(text.encode()))
    assert "".join(part for part, _ in pieces) == text
    assert [part for part, _ in pieces[:-1]] == list(text)  # one item per character


@given(data=st.lists(st.binary(min_size=1, max_size=4), max_size=12))
def test_byte_tokens_that_are_characters_give_them_back(sentencepiece: Tokenizer, data: list[bytes]) -> None:
    runs = [run.decode("utf-8", "ignore").encode() for run in data]
    ids: list[int] = []
    for run in runs:
        ids += [FIRST_BYTE_ID + byte for byte in run] + [FIRST_PIECE_ID + 2]
    text = "a".join(run.decode() for run in runs) + "a"
    assert sentencepiece.decode(ids) == (text.removeprefix(" ") if runs else "")
    check_exact(sentencepiece, ids, True)


def byte_ids(data: bytes) -> list[int]:
    return [FIRST_BYTE_ID + byte for byte in data]


def test_an_unfinished_run_of_byte_tokens_is_a_replacement_per_byte(sentencepiece: Tokenizer) -> None:
    a, (f0, x9f) = FIRST_PIECE_ID + 2, byte_ids(b"\xf0\x9f")
    assert stream(sentencepiece, [a, f0, x9f])[0] == [("a", [a]), ("\ufffd\ufffd", [f0, x9f])]


def test_a_run_of_byte_tokens_is_held_until_it_ends(sentencepiece: Tokenizer) -> None:
    run, a = byte_ids("é😀".encode()), FIRST_PIECE_ID + 2
    assert stream(sentencepiece, [*run, a, *run])[0] == [("é😀a", [*run, a]), ("é😀", run)]


def test_a_bad_byte_takes_its_whole_run_away_as_in_one_shot_decoding(sentencepiece: Tokenizer) -> None:
    run, a = byte_ids("é".encode() + b"\xffxy"), FIRST_PIECE_ID + 2
    assert (
        stream(sentencepiece, [*run, a, *run[:2], a])[0]
        == [
            ("\ufffd" * 3, run[:3]),  # known to be bad here, and no longer held
            ("\ufffd", run[3:4]),
            ("\ufffd", run[4:]),
            ("a", [a]),
            ("éa", [*run[:2], a]),
            ("", []),
        ]
    )


def test_special_tokens_that_are_skipped_do_not_end_a_run(sentencepiece: Tokenizer) -> None:
    first, second = byte_ids("é".encode())
    assert stream(sentencepiece, [first, 1, second])[0] == [("é", [first, 1, second])]
    shown = stream(sentencepiece, [first, 1, second], skip_special_tokens=False)[0]
    assert shown == [("\ufffd<s>", [first, 1]), ("\ufffd", [second]), ("", [])]


def test_a_first_space_is_lost_also_where_it_is_a_byte(sentencepiece: Tokenizer) -> None:
    assert stream(sentencepiece, byte_ids(b" a"))[0] == [("a", byte_ids(b" a"))]


# --------------------------------------------------------------------------------------------------- the cases
def test_r34_the_rest_of_a_character_of_the_prompt_becomes_a_replacement(tokenizer: Tokenizer) -> None:
    rest = list("😀".encode())[2:]  # the prompt ended with its first two bytes
    pieces, _ = stream(tokenizer, [*rest, *b"ok"])
    assert "".join(text for text, _ in pieces) == "\ufffd\ufffdok" == tokenizer.decode([*rest, *b"ok"])


def test_r35_emoji_byte_by_byte_have_no_replacement(tokenizer: Tokenizer) -> None:
    pieces, _ = stream(tokenizer, list(EMOJI.encode()))
    assert [text for text, _ in pieces] == [*EMOJI, ""]
    assert [len(ids) for _, ids in pieces] == [4, 4, 4, 4, 0]


def test_r36_combining_marks_are_sent_once(tokenizer: Tokenizer) -> None:
    text = "e\u0301 \U0001f3f3\ufe0f\u200d\U0001f308"
    pieces, _ = stream(tokenizer, [piece(tokenizer, "e\u0301"), *text[2:].encode()])
    assert "".join(part for part, _ in pieces) == text


def test_r37_a_space_does_not_flush_a_pending_character(tokenizer: Tokenizer) -> None:
    ids = [*"€".encode()[:2], piece(tokenizer, "  "), "€".encode()[2]]
    pieces, _ = stream(tokenizer, ids)
    assert "".join(text for text, _ in pieces) == "\ufffd  \ufffd" == tokenizer.decode(ids)


def test_r38_an_unfinished_character_at_the_end_becomes_one_replacement(tokenizer: Tokenizer) -> None:
    pieces, _ = stream(tokenizer, [*b"hi", *"😀".encode()[:2]])
    assert pieces == [("h", [104]), ("i", [105]), ("\ufffd", [0xF0, 0x9F])]


def test_r38_text_before_an_unfinished_character_is_not_lost_at_the_end(tokenizer: Tokenizer) -> None:
    a_f0 = piece(tokenizer, b"a\xf0")
    assert stream(tokenizer, [a_f0])[0] == [("a\ufffd", [a_f0])]
    assert stream(tokenizer, [104, a_f0, 0x9F])[0] == [("h", [104]), ("a\ufffd", [a_f0, 0x9F])]


def test_text_and_ids_are_held_together(tokenizer: Tokenizer) -> None:
    a_f0, rest = piece(tokenizer, b"a\xf0"), piece(tokenizer, b"\x98\x80 x")
    pieces, _ = stream(tokenizer, [a_f0, 0x9F, rest])
    assert pieces[0] == ("a😀 x", [a_f0, 0x9F, rest])


def test_b100_invalid_bytes_recover(tokenizer: Tokenizer) -> None:
    ids = [*b"ab", 0xC3, 0x28, 0xFF, *"é".encode(), *b"z"]
    pieces, _ = stream(tokenizer, ids)
    assert "".join(text for text, _ in pieces) == "ab\ufffd(\ufffdéz"


def test_invalid_bytes_are_delivered_one_by_one(tokenizer: Tokenizer) -> None:
    pieces, _ = stream(tokenizer, [0xE2] * 5)
    assert pieces == [("\ufffd", [0xE2])] * 5  # held until it is known that no character comes of it


@pytest.mark.parametrize("stop", [[], ["never"]], ids=["no stop", "stop"])
@pytest.mark.parametrize("style", ["byte-level", "byte-fallback"])
@pytest.mark.parametrize("byte", [0xE2, 0xFF, 0x80])
def test_invalid_bytes_cost_the_same_per_token_however_many(
    tokenizer: Tokenizer, sentencepiece: Tokenizer, byte: int, style: str, stop: list[str]
) -> None:
    chosen, byte = (tokenizer, byte) if style == "byte-level" else (sentencepiece, FIRST_BYTE_ID + byte)

    def seconds(num_tokens: int) -> float:
        detokenizer = make_detokenizer(chosen, stop=stop)
        start = time.process_time()
        for _ in range(num_tokens):
            detokenizer.push(byte)
        return time.process_time() - start

    seconds(1_000)
    per_byte = {count: min(seconds(count) for _ in range(5)) / count for count in (500, 4_000)}
    assert per_byte[4_000] < 4 * max(per_byte[500], 2e-7)


def test_special_tokens_wait_for_text_and_are_kept_if_wanted(tokenizer: Tokenizer) -> None:
    ids = [258, 104, 259]
    assert stream(tokenizer, ids)[0] == [("h", [258, 104]), ("", [259])]
    assert stream(tokenizer, ids, skip_special_tokens=False)[0] == [
        ("<|im_start|>", [258]),
        ("h", [104]),
        ("<|im_end|>", [259]),
        ("", []),
    ]


def test_sentencepiece_loses_the_first_space_only(sentencepiece: Tokenizer) -> None:
    paris, space = FIRST_PIECE_ID + 5, FIRST_PIECE_ID
    assert stream(sentencepiece, [paris, paris])[0] == [("Paris", [paris]), (" Paris", [paris]), ("", [])]
    assert stream(sentencepiece, [1, space, paris])[0] == [(" Paris", [1, space, paris]), ("", [])]


@given(ids=st.lists(st.integers(0, 272), max_size=20), skip=st.booleans())
def test_metaspace_decoder_equals_the_library(ids: list[int], skip: bool) -> None:
    tokenizer = _metaspace()
    assert tokenizer.style is DecodeStyle.BYTE_FALLBACK
    check_exact(tokenizer, ids, skip)


def _metaspace() -> Tokenizer:
    if Path("metaspace") not in _LOADED:
        decoder = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
        _LOADED[Path("metaspace")] = Tokenizer(sentencepiece_json(decoder=decoder), {})
    return _LOADED[Path("metaspace")]


def test_general_decoder_looks_at_a_bounded_window(wordpiece: Tokenizer) -> None:
    lengths: list[int] = []

    class Watched(GeneralDecoder):
        def _decode(self, ids):  # type: ignore[no-untyped-def]
            lengths.append(len(ids))
            return super()._decode(ids)

    decoder = Watched(wordpiece, True)
    for step in range(500):
        decoder.push(3 + step % 10)
    assert max(lengths) <= 32


def test_ids_only_has_no_text(tokenizer: Tokenizer) -> None:
    assert stream(tokenizer, [104, 105], detokenize=False)[0] == [("", [104]), ("", [105]), ("", [])]


# ------------------------------------------------------------------------------------------------- stop strings
def spell(tokenizer: Tokenizer, *texts: str) -> list[int]:
    return [piece(tokenizer, text) if len(text) > 1 else ord(text) for text in texts]


def test_r39_stop_string_is_never_delivered(tokenizer: Tokenizer) -> None:
    ids = spell(tokenizer, "x", "D", "EF", "G", "HI", "J", "y")
    pieces, matched = stream(tokenizer, ids, stop=["DEFGHIJ"])
    assert matched == "DEFGHIJ"
    assert pieces == [("x", ids[:1]), ("", ids[1:6])]


def test_r39_stop_string_inside_tokens_is_cut_out(tokenizer: Tokenizer) -> None:
    ids = spell(tokenizer, "x", "DEF", "GHIJ!")
    assert stream(tokenizer, ids, stop=["EFGHIJ"])[0] == [("x", ids[:1]), ("D", ids[1:])]


def test_r40_held_text_is_flushed_when_no_stop_string_comes(tokenizer: Tokenizer) -> None:
    ids = spell(tokenizer, "own f")
    detokenizer = make_detokenizer(tokenizer, stop=["own fox"])
    assert detokenizer.push(ids[0]) is None
    assert detokenizer.push_silent(256) is None
    assert detokenizer.close() == ("own f", [*ids, 256])


def test_r42_nothing_is_delivered_without_text(tokenizer: Tokenizer) -> None:
    ids = [*b"ab", *b"stop string that is lon", *b"!!"]
    pieces, _ = stream(tokenizer, ids, stop=["stop string that is long"])
    assert all(text for text, _ in pieces[:-1])
    assert "".join(text for text, _ in pieces) == bytes(ids).decode()


def test_only_what_may_become_a_stop_string_is_held(tokenizer: Tokenizer) -> None:
    pieces, _ = stream(tokenizer, list(b"a<b<<c"), stop=["<|end|>"])
    assert [text for text, _ in pieces] == ["a", "<b", "<", "<c", ""]


def test_b97_include_stop_string(tokenizer: Tokenizer) -> None:
    ids = spell(tokenizer, "x", "DEF", "GHIJ!")
    pieces, _ = stream(tokenizer, ids, stop=["FGH"], include_stop_str_in_output=True)
    assert "".join(text for text, _ in pieces) == "xDEFGH"
    assert [token_id for _, some in pieces for token_id in some] == ids


@pytest.mark.parametrize("stop", [["bcd", "c"], ["c", "bcd"]])
def test_the_match_that_ends_first_wins(tokenizer: Tokenizer, stop: list[str]) -> None:
    pieces, matched = stream(tokenizer, list(b"abcd"), stop=stop)
    assert (matched, "".join(text for text, _ in pieces)) == ("c", "ab")


def test_of_matches_with_one_end_the_longest_wins(tokenizer: Tokenizer) -> None:
    pieces, matched = stream(tokenizer, list(b"abcd"), stop=["c", "bc"])
    assert (matched, "".join(text for text, _ in pieces)) == ("bc", "a")


def test_min_tokens_lets_an_early_stop_string_pass(tokenizer: Tokenizer) -> None:
    pieces, matched = stream(tokenizer, list(b"a.b.c"), stop=["."], min_tokens=2)
    assert matched == "."
    assert "".join(text for text, _ in pieces) == "a.b"


def test_stop_string_of_an_unfinished_character_is_found_at_the_end(tokenizer: Tokenizer) -> None:
    assert stream(tokenizer, [*b"a", 0xE2], stop=["\ufffd"])[1] == "\ufffd"


def test_special_tokens_while_text_is_held_do_not_pile_up(tokenizer: Tokenizer) -> None:
    detokenizer = make_detokenizer(tokenizer, stop=["<end>"])
    assert detokenizer.push(ord("<")) is None
    for _ in range(100):
        assert detokenizer.push(258) is None
    assert detokenizer.push(ord("x")) == ("<x", [ord("<"), *[258] * 100, ord("x")])


def naive_stop(texts: list[str], stops: list[str], min_tokens: int) -> tuple[str, str | None, int]:
    """Return the text, the stop string and the number of tokens, by looking at every end in turn."""
    ends: list[int] = []
    for text in texts:
        ends.append((ends[-1] if ends else 0) + len(text))
    whole = "".join(texts)
    for end in range(1, len(whole) + 1):
        num_tokens = next(index for index, place in enumerate(ends) if place >= end) + 1
        found = [stop for stop in stops if whole[:end].endswith(stop)]
        if found and num_tokens > min_tokens:
            longest = max(found, key=len)
            return whole[: end - len(longest)], longest, num_tokens
    return whole, None, len(texts)


@given(
    letters=st.lists(st.sampled_from(["a", "b", "c", "ab", "ba", "abc", "é"]), max_size=25),
    stops=st.lists(st.text(alphabet="abcé", min_size=1, max_size=5), min_size=1, max_size=4),
    min_tokens=st.integers(0, 6),
)
@settings(max_examples=300)
def test_stop_strings_equal_a_naive_search(letters: list[str], stops: list[str], min_tokens: int) -> None:
    tokenizer = _letters()
    ids = [piece(tokenizer, letter) for letter in letters]
    pieces, matched = stream(tokenizer, ids, stop=stops, min_tokens=min_tokens)
    text, stop, num_tokens = naive_stop(letters, stops, min_tokens)
    assert ("".join(part for part, _ in pieces), matched) == (text, stop)
    assert [token_id for _, some in pieces for token_id in some] == ids[:num_tokens]
    assert all(part for part, _ in pieces[:-1])


def _letters() -> Tokenizer:
    if Path("letters") not in _LOADED:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            _LOADED[Path("letters")] = byte_tokenizer(Path(folder), ["ab", "ba", "abc", "é"])
    return _LOADED[Path("letters")]


@given(text=st.text(alphabet="ab", max_size=40), stops=st.lists(st.text(alphabet="ab", min_size=1), min_size=1))
def test_hold_back_is_the_longest_beginning_of_a_stop_string(text: str, stops: list[str]) -> None:
    strings = StopStrings(stops)
    state, _, _ = strings.scan(0, text, stop_at_match=False)
    beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
    assert strings.num_held(state) == max(
        length for length in range(len(text) + 1) if text[len(text) - length :] in beginnings
    )


def test_decoders_share_nothing(tokenizer: Tokenizer) -> None:
    first, second = make_decoder(tokenizer, True), make_decoder(tokenizer, True)
    assert first.push(0xF0) == ""
    assert second.push(104) == "h"
    assert first.flush() == "\ufffd"
