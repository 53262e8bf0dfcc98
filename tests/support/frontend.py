"""Tokenizers small enough to build per test, a sink that records, and engine outputs written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncllm.checkpoint import Checkpoint, open_checkpoint
from asyncllm.config import EngineConfig
from asyncllm.frontend.input_processor import InputProcessor, ProcessedRequest
from asyncllm.frontend.output_processor import OutputProcessor
from asyncllm.frontend.tokenizer import Tokenizer
from asyncllm.sampling_params import SamplingParams
from asyncllm.testing import write_tiny_checkpoint
from asyncllm.wire.messages import EngineCoreOutputs, EngineFinishReason, EngineInfo, FinishedRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.outputs import Completion, TokenDelta, Usage

MARK = "▁"


# ---------------------------------------------------------------------------------------------------- tokenizers
def byte_tokenizer(folder: Path, pieces: Sequence[str | bytes] = (), **options: Any) -> Tokenizer:
    """Return the tokenizer of a tiny checkpoint: ids 0 … 255 are bytes, 256 … 259 special, then ``pieces``."""
    return Tokenizer.from_checkpoint(open_checkpoint(str(write_tiny_checkpoint(folder, pieces=pieces, **options))))


SENTENCEPIECE_PIECES = ("▁", "▁a", "a", "b", "▁▁", "▁Paris", "é", "▁é", ".", "▁the", "c▁d", "�")


def sentencepiece_json(*, decoder: dict[str, Any] | None = None, pieces: Sequence[str] = SENTENCEPIECE_PIECES) -> bytes:
    """Return a SentencePiece-like ``tokenizer.json``: 0 … 2 special, 3 … 258 the bytes, then ``pieces``."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [
                {
                    "id": index,
                    "content": names[index],
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
                for index in range(3)
            ],
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": MARK}, replace]},
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": decoder
            or {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": MARK}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                ],
            },
            "model": {
                "type": "BPE",
                "unk_token": "<unk>",
                "fuse_unk": True,
                "byte_fallback": True,
                "vocab": {name: index for index, name in enumerate(names)},
                "merges": [],
            },
        }
    ).encode()


FIRST_BYTE_ID = 3
FIRST_PIECE_ID = 259


def wordpiece_json() -> bytes:
    """Return a WordPiece ``tokenizer.json`` (its decoder joins ``##`` pieces and cleans up spaces before marks)."""
    names = [
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "hello",
        "world",
        "##s",
        "##ing",
        ",",
        ".",
        "'",
        "##'",
        "n",
        "##t",
        "a",
        "do",
        "not",
    ]
    special = [
        {
            "id": index,
            "content": names[index],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index in range(3)
    ]
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": special,
            "normalizer": {
                "type": "BertNormalizer",
                "clean_text": True,
                "handle_chinese_chars": True,
                "strip_accents": None,
                "lowercase": True,
            },
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "post_processor": None,
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
            "model": {
                "type": "WordPiece",
                "unk_token": "[UNK]",
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100,
                "vocab": {name: index for index, name in enumerate(names)},
            },
        }
    ).encode()


# ------------------------------------------------------------------------------------------------------ requests
class RecordingSink:
    """Keeps what it is given, and complains if anything follows the end."""

    def __init__(self) -> None:
        self.deltas: list[TokenDelta] = []
        self.completion: Completion | None = None
        self.error: BaseException | None = None
        self.usage: Usage | None = None

    @property
    def is_open(self) -> bool:
        return self.completion is None and self.error is None

    def put(self, delta: TokenDelta) -> None:
        assert self.is_open
        self.deltas.append(delta)

    def finish(self, completion: Completion) -> None:
        assert self.is_open
        self.completion, self.usage = completion, completion.usage

    def fail(self, error: BaseException, usage: Usage) -> None:
        assert self.is_open
        self.error, self.usage = error, usage

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def texts(self) -> list[str]:
        return [delta.text for delta in self.deltas]

    @property
    def token_ids(self) -> list[int]:
        return [token_id for delta in self.deltas for token_id in delta.token_ids]


def engine_info(**changes: Any) -> EngineInfo:
    """Return what a small engine would tell at its start."""
    values: dict[str, Any] = {
        "max_model_len": 8192,
        "vocab_size": 260,
        "eos_token_ids": [256, 259],
        "block_size": 16,
        "num_blocks": 1024,
        "kv_cache_bytes": 1 << 20,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 1024,
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "reference",
        "pid": 1,
    }
    return EngineInfo(**{**values, **changes})


class FrontEnd:
    """Both processors over one tiny checkpoint, and an engine played by hand: tests say which tokens it sent."""

    def __init__(self, folder: Path, *, pieces: Sequence[str | bytes] = (), **options: Any) -> None:
        write_tiny_checkpoint(folder, pieces=pieces, **options)
        self.checkpoint: Checkpoint = open_checkpoint(str(folder))
        self.tokenizer = Tokenizer.from_checkpoint(self.checkpoint)
        self.config = EngineConfig.from_options(str(folder))
        self.input = InputProcessor(self.config, self.checkpoint, self.tokenizer)
        self.input.set_info(engine_info(vocab_size=260 + len(pieces)))
        self.now = 100.0
        self.output = OutputProcessor(self.tokenizer, clock=lambda: self.now)

    def open(
        self, prompt: str | list[int] = "Hi", *, request_id: str | None = None, **params: Any
    ) -> tuple[ProcessedRequest, RecordingSink]:
        """Register a request and return it with its sink."""
        processed = self.input.process(prompt, SamplingParams(**params), request_id=request_id)
        sink = RecordingSink()
        self.output.add_request(processed, sink)
        return processed, sink

    def send(self, request: ProcessedRequest | int, *token_ids: int, **columns: Any) -> list[int]:
        """Let the engine send ``token_ids`` for a request (its first sample) in one message; return the aborts."""
        engine_id = request if isinstance(request, int) else request.engine_ids[0]
        return self.output.process(EngineCoreOutputs([engine_id] * len(token_ids), list(token_ids), **columns))

    def finish(
        self,
        request: ProcessedRequest | int,
        *token_ids: int,
        reason: EngineFinishReason = EngineFinishReason.LENGTH,
        **columns: Any,
    ) -> list[int]:
        """Let the engine send the last ``token_ids`` and end the request."""
        engine_id = request if isinstance(request, int) else request.engine_ids[0]
        of_message = {name: columns.pop(name) for name in ("logprobs", "prompt_logprobs", "timings") if name in columns}
        row = FinishedRequest(engine_id, int(reason), **columns)
        return self.send(request, *token_ids, finished=[row], **of_message)
