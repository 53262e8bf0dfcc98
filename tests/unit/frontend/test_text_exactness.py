"""Property: whatever the ids, a stream's text is what the ``tokenizers`` library decodes of them at once.

The whole way of a token behind the engine: output processor, detokenizer, stop strings, last item. The expected text
comes from the library itself (and from transformers), never from ours.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.checkpoint import GGUFFile
from asyncllm.frontend.gguf_tokenizer import tokenizer_json
from asyncllm.frontend.output_processor import OutputProcessor
from asyncllm.frontend.tokenizer import DecodeStyle, Tokenizer
from asyncllm.testing import write_tiny_checkpoint
from tests.support.frontend import FrontEnd, RecordingSink, sentencepiece_json, wordpiece_json

EMOJI = "😀🏳️‍🌈e\u0301中"
LLAMA_PIECES = ("▁", "▁a", "a", "b", "▁▁", "▁Paris", "é", "▁é", ".", "中文", "c▁d", "�", "<0xZZ>", "\u0301", "▁😀")


def byte_level_json(folder: Path) -> bytes:
    pieces = ["own f", b"\x98\x80 x", b"a\xf0", "e\u0301", "  ", b"\x9f\x98", "\u200d", "中", b"\xe4\xb8"]
    return (write_tiny_checkpoint(folder, pieces=pieces) / "tokenizer.json").read_bytes()


def gemma_json(_: Path) -> bytes:
    """Gemma's way: no space is put before the text, and none is cut off."""
    steps = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    return sentencepiece_json(decoder={"type": "Sequence", "decoders": steps}, pieces=LLAMA_PIECES)


def suffix_json(_: Path) -> bytes:
    """A BPE whose words end in ``</w>``: the text of its last token depends on whether it is the last."""
    names = ["<unk>", "a</w>", "b", "b</w>", "Paris</w>", "é", "é</w>", ".", "</w>"]
    content = json.loads(sentencepiece_json(decoder={"type": "BPEDecoder", "suffix": "</w>"}))
    content["added_tokens"] = []
    content["model"] = {
        "type": "BPE",
        "unk_token": "<unk>",
        "end_of_word_suffix": "</w>",
        "vocab": {name: index for index, name in enumerate(names)},
        "merges": [],
    }
    return json.dumps(content).encode()


KINDS: dict[str, Callable[[Path], bytes]] = {
    "byte-level": byte_level_json,
    "llama 2": lambda _: sentencepiece_json(pieces=LLAMA_PIECES),
    "gemma": gemma_json,
    "wordpiece": lambda _: wordpiece_json(),
    "words with a suffix": suffix_json,
}


class Streams:
    """A front end for one ``tokenizer.json``, with the library's own object beside it."""

    def __init__(self, folder: Path, content: bytes) -> None:
        self.front = FrontEnd(folder)
        self.library = tokenizers.Tokenizer.from_buffer(content)
        self.tokenizer = Tokenizer(content, {})
        self.front.output = OutputProcessor(self.tokenizer)
        self.num_ids = self.library.get_vocab_size() + 2  # ids without a token too

    def decode(self, ids: list[int], skip: bool) -> str:
        return self.library.decode(ids, skip_special_tokens=skip)

    def play(self, ids: list[int], per_message: int = 1, **params: Any) -> RecordingSink:
        """Let the engine send ``ids``, some per message, the last with the end; stop where the stream stops."""
        request, sink = self.front.open([65], **params)
        *chunks, last = [ids[i : i + per_message] for i in range(0, len(ids), per_message)] or [[]]
        for chunk in chunks:
            if self.front.send(request, *chunk):
                return sink
        self.front.finish(request, *last)
        return sink


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Streams]:
    found = {}
    for kind, make in KINDS.items():
        folder = tmp_path_factory.mktemp("kind")
        found[kind] = Streams(folder / "front", make(folder))
    return found


def check(of: Streams, ids: list[int], skip: bool, per_message: int) -> None:
    sink = of.play(ids, per_message, skip_special_tokens=skip)
    assert sink.text == of.decode(ids, skip) == of.tokenizer.decode(ids, skip)
    assert sink.token_ids == ids
    assert all(sink.texts[:-1])
    assert sink.completion is not None
    assert sink.completion.text == sink.text


def first_match(text: str, stops: list[str]) -> tuple[str, int] | None:
    """Return the stop string that ends first in ``text`` (of those the longest) and where it ends."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return max(found, key=len), end
    return None


def check_stops(of: Streams, ids: list[int], skip: bool, stops: list[str], include: bool) -> None:
    sink = of.play(ids, skip_special_tokens=skip, stop=stops, include_stop_str_in_output=include)
    whole = of.decode(ids, skip)
    match = first_match(whole, stops)
    assert sink.completion is not None
    if match is None:
        assert (sink.text, sink.token_ids, sink.completion.stop_reason) == (whole, ids, None)
        return
    stop, end = match
    assert sink.text == whole[: end if include else end - len(stop)]
    assert (sink.completion.finish_reason, sink.completion.stop_reason) == ("stop", stop)
    assert sink.token_ids == ids[: len(sink.token_ids)]
    assert all(sink.texts[:-1])


def draw_ids(data: st.DataObject, of: Streams, max_size: int = 40) -> list[int]:
    """Draw ids of which stretches are bytes of real text, cut anywhere, so that characters do come about."""
    byte_id = {index: of.library.token_to_id(f"<0x{index:02X}>") for index in range(256)}
    if of.tokenizer.style is DecodeStyle.BYTE_LEVEL:
        byte_id = {index: index for index in range(256)}
    ids = data.draw(st.lists(st.integers(0, of.num_ids - 1), max_size=max_size))
    if None not in byte_id.values():
        stretch = data.draw(st.lists(st.sampled_from(EMOJI.encode() + b" a\xff"), max_size=12))
        real = list(EMOJI.encode())[data.draw(st.integers(0, 5)) :][: data.draw(st.integers(0, 12))]
        place = data.draw(st.integers(0, len(ids)))
        ids[place:place] = [byte_id[byte] for byte in [*real, *stretch]]
    return ids


# ------------------------------------------------------------------------------------------- tokenizers of every kind
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), skip=st.booleans(), per_message=st.sampled_from([1, 3, 100]))
@settings(max_examples=150, deadline=None)
def test_a_stream_is_what_the_library_decodes(
    streams: dict[str, Streams], kind: str, data: st.DataObject, skip: bool, per_message: int
) -> None:
    check(streams[kind], draw_ids(data, streams[kind]), skip, per_message)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), skip=st.booleans(), include=st.booleans())
@settings(max_examples=150, deadline=None)
def test_stop_strings_cut_what_the_library_decodes(
    streams: dict[str, Streams], kind: str, data: st.DataObject, skip: bool, include: bool
) -> None:
    of = streams[kind]
    ids = draw_ids(data, of)
    whole = of.decode(ids, skip)
    if whole and data.draw(st.booleans()):  # one that is there
        start = data.draw(st.integers(0, len(whole) - 1))
        stops = [whole[start : start + data.draw(st.integers(1, 6))]]
    else:
        stops = data.draw(st.lists(st.text(alphabet="ab é.\ufffd😀P", min_size=1, max_size=4), min_size=1, max_size=3))
    check_stops(of, ids, skip, stops, include)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_decodes_alike(streams: dict[str, Streams], kind: str) -> None:
    from transformers import PreTrainedTokenizerFast

    of = streams[kind]
    peer = PreTrainedTokenizerFast(tokenizer_object=of.library, clean_up_tokenization_spaces=False)
    draw = random.Random(5)
    for skip in (False, True):
        for _ in range(100):
            ids = [draw.randrange(of.library.get_vocab_size()) for _ in range(draw.randrange(30))]
            assert of.play(ids, skip_special_tokens=skip).text == peer.decode(ids, skip_special_tokens=skip)


def test_the_kinds_take_the_ways_they_stand_for(streams: dict[str, Streams]) -> None:
    styles = {kind: of.tokenizer.style for kind, of in streams.items()}
    assert styles == {
        "byte-level": DecodeStyle.BYTE_LEVEL,
        "llama 2": DecodeStyle.BYTE_FALLBACK,
        "gemma": DecodeStyle.BYTE_FALLBACK,
        "wordpiece": DecodeStyle.GENERAL,
        "words with a suffix": DecodeStyle.GENERAL,
    }
    assert streams["llama 2"].decode(streams["llama 2"].library.encode("Paris a").ids, True) == "Paris a"


# ------------------------------------------------------------------------------------------------ those of real models
_REAL: dict[Path, Streams] = {}


def real(path: Path, folder: Path) -> Streams:
    if path not in _REAL:
        _REAL[path] = Streams(folder, tokenizer_json(GGUFFile(path).metadata, path.name))
    return _REAL[path]


def check_real(of: Streams, data: st.DataObject) -> None:
    skip = data.draw(st.booleans())
    ids = data.draw(st.lists(st.integers(0, of.num_ids - 1), max_size=40))
    text = data.draw(st.text(alphabet=st.sampled_from(EMOJI + "ab 한ქ\n"), max_size=12))
    ids += of.library.encode(text, add_special_tokens=False).ids
    ids += data.draw(st.lists(st.integers(0, 300), max_size=20))  # special and byte tokens stand at the front
    check(of, ids, skip, data.draw(st.sampled_from([1, 4])))
    whole = of.decode(ids, skip)
    if whole:
        start = data.draw(st.integers(0, len(whole) - 1))
        check_stops(of, ids, skip, [whole[start : start + data.draw(st.integers(1, 5))]], data.draw(st.booleans()))


@pytest.mark.model
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    check_real(real(smollm2_gguf, tmp_path_factory.getbasetemp() / "smollm2-front"), data)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_gemma3(gemma3_gguf: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    check_real(real(gemma3_gguf, tmp_path_factory.getbasetemp() / "gemma3-front"), data)
