"""The JSON files of a Hugging Face folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec

from asyncllm.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["count_tokens", "read_config", "read_json", "read_tokenizer_config"]

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_json(path: Path, model: str, *, otherwise: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the JSON object in ``path``; ``otherwise``, if given, where there is no such file.

    :raises CheckpointError: it is missing, unreadable, or not a JSON object.
    """
    try:
        value: Any = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError as error:
        if otherwise is not None:
            return otherwise
        raise CheckpointError(f"{path.parent} has no {path.name}", model=model, file=path.name) from error
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", model=model, file=path.name) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object", model=model, file=path.name)
    return cast("dict[str, Any]", value)


def read_config(path: Path, model: str) -> dict[str, Any]:
    """Return ``config.json``.

    :raises CheckpointError: it is missing or damaged.
    """
    return read_json(path / "config.json", model)


def read_tokenizer_config(path: Path, model: str) -> dict[str, Any]:
    """Return ``tokenizer_config.json`` with special tokens as plain strings and the chat template as text.

    The template is the default one of several, which are all under ``chat_templates``. Files that replace a key win
    over it, as in transformers: ``chat_template.jinja`` and the older ``chat_template.json``.
    ``special_tokens_map.json`` fills gaps.
    """
    config = dict(read_json(path / "tokenizer_config.json", model, otherwise={}))
    special = read_json(path / "special_tokens_map.json", model, otherwise={})
    for name in SPECIAL_TOKENS:
        token = _plain_token(config.get(name)) or _plain_token(special.get(name))
        if token is not None or name in config:
            config[name] = token
    templates = _chat_templates(path, model, config.get("chat_template"))
    if templates:
        config["chat_template"] = templates.get("default")
    if len(templates) > 1:
        config["chat_templates"] = templates
    return config


class _AddedToken(msgspec.Struct):
    id: int


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = {}


class _TokenizerFile(msgspec.Struct):
    """The part of ``tokenizer.json`` that lists tokens; the rest is skipped over."""

    model: _Vocabulary
    added_tokens: list[_AddedToken] = []


def count_tokens(path: Path, model: str) -> int | None:
    """Return one more than the largest id in the ``tokenizer.json`` of folder ``path``, ``None`` where there is none.

    :raises CheckpointError: the file is damaged.
    """
    file = path / "tokenizer.json"
    try:
        found = msgspec.json.decode(file.read_bytes(), type=_TokenizerFile)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}", model=model, file=file.name) from error
    vocab = found.model.vocab
    in_model = max(vocab.values(), default=-1) + 1 if isinstance(vocab, dict) else len(vocab)
    return max(in_model, max((token.id for token in found.added_tokens), default=-1) + 1)


def _plain_token(token: Any) -> str | None:
    """Return the text of a special token, which may be written as a string or as an object with its ``content``."""
    if isinstance(token, dict):
        token = cast("dict[str, Any]", token).get("content")
    return token if isinstance(token, str) else None


def _chat_templates(path: Path, model: str, configured: Any) -> dict[str, str]:
    """Return every chat template by name; the usual one is ``default``."""
    templates: dict[str, str] = {}
    if isinstance(configured, str):
        templates["default"] = configured
    elif isinstance(configured, list):  # [{"name": …, "template": …}, …]
        for entry in cast("list[Any]", configured):
            if isinstance(entry, dict):
                named = cast("dict[str, Any]", entry)
                templates[str(named.get("name"))] = str(named.get("template"))
    legacy = read_json(path / "chat_template.json", model, otherwise={}).get("chat_template")
    if isinstance(legacy, str):
        templates["default"] = legacy
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = _read_text(file, model)
    if (path / "chat_template.jinja").is_file():
        templates["default"] = _read_text(path / "chat_template.jinja", model)
    return templates


def _read_text(path: Path, model: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", model=model, file=path.name) from error
