"""A checkpoint folder small enough to write per test: config and tokenizer, no weights.

Invariant: in its vocabulary the id of a byte is the byte itself, so ``list(b"Hello")`` are the ids of ``"Hello"`` and
any text, whole characters or not, can be scripted by hand. Special tokens follow at 256 …, then the caller's own
pieces.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BOS", "EOS", "IM_END", "IM_START", "TINY_VOCAB_SIZE", "write_tiny_checkpoint"]

EOS = 256
"""``<|endoftext|>``, the end-of-sequence id."""
BOS = 257
"""``<|begin|>``; written in front of a prompt only where ``add_bos`` was asked for."""
IM_START = 258
"""``<|im_start|>`` of the chat template."""
IM_END = 259
"""``<|im_end|>`` of the chat template; ends a sample too."""
TINY_VOCAB_SIZE = 260
"""Bytes and special tokens; pieces get the ids from here on."""

SPECIAL_TOKENS = {EOS: "<|endoftext|>", BOS: "<|begin|>", IM_START: "<|im_start|>", IM_END: "<|im_end|>"}
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ (tool | tojson) + '\n' }}{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tiny_checkpoint(
    path: str | Path,
    *,
    pieces: Sequence[str | bytes] = (),
    vocab_size: int | None = None,
    max_position: int = 8192,
    add_bos: bool = False,
    chat_template: str | None = CHAT_TEMPLATE,
    generation_config: dict[str, Any] | None = None,
) -> Path:
    """Write ``config.json``, ``tokenizer.json`` and ``tokenizer_config.json`` into ``path`` and return it.

    ``pieces`` are further tokens of several bytes (ids from :data:`TINY_VOCAB_SIZE` on): prompts are never encoded to
    them, but a script can emit them. ``vocab_size`` pads the model's vocabulary past the tokenizer's, as real models
    do. ``path`` is made where it does not exist; files in it are overwritten.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    num_tokens = TINY_VOCAB_SIZE + len(pieces)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": num_tokens if vocab_size is None else vocab_size,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": max_position,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    generation = {"eos_token_id": [EOS, IM_END], "bos_token_id": BOS, **(generation_config or {})}
    tokenizer_config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[EOS],
        "add_bos_token": add_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_position,
    }
    if chat_template is not None:
        tokenizer_config["chat_template"] = chat_template
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", generation)
    _write(folder / "tokenizer_config.json", tokenizer_config)
    _write(folder / "tokenizer.json", _tokenizer(pieces, add_bos=add_bos))
    return folder


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")


def _tokenizer(pieces: Sequence[str | bytes], *, add_bos: bool) -> dict[str, Any]:
    letters = _byte_letters()
    vocab = {letters[byte]: byte for byte in range(256)}
    vocab |= {text: token_id for token_id, text in SPECIAL_TOKENS.items()}
    for offset, piece in enumerate(pieces):
        raw = piece.encode() if isinstance(piece, str) else piece
        vocab["".join(letters[byte] for byte in raw)] = TINY_VOCAB_SIZE + offset
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token_id, text in SPECIAL_TOKENS.items()
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": _prepend_bos() if add_bos else byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    }


def _prepend_bos() -> dict[str, Any]:
    bos = {"SpecialToken": {"id": SPECIAL_TOKENS[BOS], "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [bos, text],
        "pair": [bos, text, bos, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            SPECIAL_TOKENS[BOS]: {"id": SPECIAL_TOKENS[BOS], "ids": [BOS], "tokens": [SPECIAL_TOKENS[BOS]]}
        },
    }


def _byte_letters() -> list[str]:
    """Return the printable letter that byte-level BPE writes for each byte (GPT-2's table)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    letters: list[str] = []
    next_letter = 256
    for byte in range(256):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(next_letter))
            next_letter += 1
    return letters
