"""Text to token ids and back, over the ``tokenizers`` library.

Here: loading (``tokenizer.json``, or built from GGUF metadata by :mod:`asyncllm.frontend.gguf_tokenizer`), encoding,
one-shot decoding, and the tables that make streaming decoding O(1). Not here: the state of one stream
(:mod:`asyncllm.frontend.detokenizer`).

Invariant: for every tokenizer, the texts of a stream joined equal :meth:`Tokenizer.decode` of its ids.
"""

from __future__ import annotations

import ctypes
import enum
import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asyncllm.errors import CheckpointError, InvalidParameterError, ModelNotFoundError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.checkpoint import Checkpoint
    from asyncllm.config import EngineConfig

__all__ = ["DecodeStyle", "Tokenizer", "load_tokenizer"]

LONG_TEXT_CHARS = 4_000
"""Texts from this length on are encoded without the GIL and belong in a thread: 3 ms at 0.7 µs per character."""

LARGE_FILE_BYTES = 4 << 20
"""Size of a ``tokenizer.json`` from which on what its parsing left free is worth returning to the system."""

SPACE_MARK = "▁"
NO_IDS = frozenset[int]()


class DecodeStyle(enum.Enum):
    """How ids become text, which decides how a stream is decoded."""

    BYTE_LEVEL = "byte-level"
    """Every token is a piece of the UTF-8 text (GPT-2's alphabet of 256 letters)."""
    BYTE_FALLBACK = "byte-fallback"
    """Every token is a text of its own but ``<0xNN>``, which is one byte (SentencePiece)."""
    GENERAL = "general"
    """Anything else: a token's text depends on its neighbours as the library's decoder says (WordPiece …)."""


class ByteFallbackRules(msgspec.Struct, frozen=True):
    """What a SentencePiece-like decoder does: replacements in each token, then spaces cut off the whole's front."""

    replacements: tuple[tuple[str, str], ...] = ()
    has_byte_tokens: bool = True
    strip_start: int = 0
    drop_first_mark: bool = False
    """The first token loses its ``▁`` altogether (the Metaspace decoder)."""


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}
    merges: msgspec.Raw = msgspec.Raw(b"[]")
    continuing_subword_prefix: str | None = None


class _TokenizerFile(msgspec.Struct):
    """The parts of ``tokenizer.json`` that we look into; the rest is skipped by the parser."""

    model: _Model
    decoder: dict[str, Any] | None = None
    normalizer: dict[str, Any] | None = None


class TokenTable(dict[int, "str | None"]):
    """Token id to its text, ``None`` where its bytes are no text of their own; filled as tokens are met.

    ``data`` is the same as bytes for those. One table for each set of tokens to leave out, shared by all streams.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.skipped = skipped
        self.data: dict[int, bytes] = {}

    def __missing__(self, token_id: int) -> str | None:
        data = b"" if token_id in self.skipped else self.tokenizer.token_bytes(token_id)
        self.data[token_id] = data  # before the text, which is what readers in other threads look for
        text: str | None
        if self.tokenizer.is_byte_token(token_id):
            text = None
        else:
            try:
                text = data.decode("utf-8")
            except UnicodeDecodeError:
                text = None
        self[token_id] = text
        return text


class Tokenizer:
    """A tokenizer; safe to use from several threads."""

    def __init__(self, content: bytes, tokenizer_config: dict[str, Any], *, source: str = "") -> None:
        """Build it from the bytes of a ``tokenizer.json``; ``tokenizer_config`` names the special tokens.

        :raises CheckpointError: the library refuses the content.
        """
        import tokenizers

        try:
            file = msgspec.json.decode(content, type=_TokenizerFile)
            _check_merges(file.model)
            self._backend = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(
                f"the tokenizer of {source!r} cannot be read: {error}", model=source, file="tokenizer.json"
            ) from error
        self._backend.no_padding()
        self._backend.no_truncation()
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = self._backend.get_vocab_size(with_added_tokens=True)
        self.style, self.rules = _decode_style(file.decoder)
        self.bos_token_id = self._special_id(tokenizer_config, "bos_token")
        self.eos_token_id = self._special_id(tokenizer_config, "eos_token")
        entries = (entry if isinstance(entry, str) else entry[0] for entry in file.model.vocab)
        contents = (token.content for token in added.values())
        self.max_token_chars = max(map(len, itertools.chain(entries, contents)), default=1)
        self._shrinks_text = _shrinks_text(file.normalizer)
        self._has_every_byte = self.style is DecodeStyle.BYTE_LEVEL or self.rules.has_byte_tokens
        self._tables: dict[frozenset[int], TokenTable] = {}
        if len(content) >= LARGE_FILE_BYTES:
            del file
            _return_free_memory()

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Tokenizer:
        """Return the tokenizer of ``checkpoint``: its ``tokenizer.json``, or one built from the GGUF's metadata.

        Takes about 0.1 s for 50,000 tokens, 2.5 s for the 262,144 of a Gemma GGUF, and belongs in a thread where a loop
        runs. The library holds the GIL while it builds its tables: for Gemma's, 1 s at once.

        :raises UnsupportedModelError: there is no tokenizer that we can read; says which and what to do.
        :raises CheckpointError: its files are damaged.
        """
        if checkpoint.gguf is not None:
            return cls._from_gguf(checkpoint.gguf.metadata, checkpoint.tokenizer_config, checkpoint.source)
        return cls._from_folder(checkpoint.path, checkpoint.tokenizer_config, checkpoint.source)

    @classmethod
    def from_path(cls, path: str | Path) -> Tokenizer:
        """Return the tokenizer of a folder, a ``tokenizer.json`` or a ``.gguf`` file; no model needs to be there.

        :raises ModelNotFoundError: there is nothing at ``path``.
        :raises UnsupportedModelError: see :meth:`from_checkpoint`.
        :raises CheckpointError: see :meth:`from_checkpoint`.
        """
        from asyncllm.checkpoint import GGUFFile
        from asyncllm.checkpoint.folder import read_tokenizer_config
        from asyncllm.checkpoint.gguf_config import make_tokenizer_config

        path = Path(path)
        if path.suffix == ".gguf" and path.is_file():
            file = GGUFFile(path)
            return cls._from_gguf(file.metadata, make_tokenizer_config(file), str(path))
        folder = path.parent if path.is_file() else path
        if not folder.is_dir():
            raise ModelNotFoundError(f"there is no tokenizer at {str(path)!r}", model=str(path))
        return cls._from_folder(folder, read_tokenizer_config(folder, str(path)), str(path))

    @classmethod
    def _from_gguf(cls, metadata: Any, tokenizer_config: dict[str, Any], source: str) -> Tokenizer:
        from asyncllm.frontend.gguf_tokenizer import tokenizer_json

        return cls(tokenizer_json(metadata, source), tokenizer_config, source=source)

    @classmethod
    def _from_folder(cls, folder: Path, tokenizer_config: dict[str, Any], source: str) -> Tokenizer:
        path = folder / "tokenizer.json"
        try:
            content = path.read_bytes()
        except FileNotFoundError as error:
            raise UnsupportedModelError(
                f"{source!r} has no tokenizer.json. Save one with "
                "transformers.AutoTokenizer.from_pretrained(...).save_pretrained(folder), or give `tokenizer=` "
                "a folder or GGUF file that has one; prompts of token ids also need it, for the output's text",
                model=source,
                feature="a tokenizer without tokenizer.json",
            ) from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}", model=source, file=path.name) from error
        return cls(content, tokenizer_config, source=source)

    # ------------------------------------------------------------------------------------------------ text to ids
    def is_long(self, text: str) -> bool:
        """Return whether encoding ``text`` takes long enough (3 ms) that an event loop should do it in a thread."""
        return len(text) >= LONG_TEXT_CHARS

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of ``text``; ``add_special_tokens`` adds what the model's tokenizer adds (BOS …).

        What is added is the post-processor's word in ``tokenizer.json``, as in transformers 5; ``add_bos_token`` of
        ``tokenizer_config.json`` is not read where there is such a file.
        A long text (:meth:`is_long`) is encoded without the GIL: other threads run on. The library keeps native worker
        threads from then on.

        :raises InvalidParameterError: ``text`` holds half a surrogate pair, which is no text.
        """
        try:
            if len(text) >= LONG_TEXT_CHARS:  # only the batch call releases the GIL (tokenizers 0.23, measured)
                return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError):
            _refuse_surrogates(text)
            raise

    def min_num_tokens(self, num_chars: int) -> int:
        """Return how many tokens a text of ``num_chars`` characters has at the very least; O(1).

        No token spans more than ``max_token_chars`` characters; a text may have fewer tokens only where the vocabulary
        lacks its characters altogether. Normalizers that can drop or join characters make the bound sixteen times
        looser, and tokenizers that make one unknown token of any number of characters have none.
        """
        if not self._has_every_byte:
            return 1
        per_token = self.max_token_chars * (16 if self._shrinks_text else 1)
        return -(-num_chars // per_token)

    # ------------------------------------------------------------------------------------------------ ids to text
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``, as the library (so transformers) decodes them; ids in no vocabulary have none."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that ``token_id`` adds to a text, empty for an id outside the vocabulary."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.style is DecodeStyle.BYTE_LEVEL:
            return letters_to_bytes(token)
        if self.style is DecodeStyle.BYTE_FALLBACK:
            if self.rules.has_byte_tokens and (byte := _fallback_byte(token)) is not None:
                return bytes((byte,))
            return _replaced(token, self.rules.replacements).encode("utf-8")
        return self._backend.decode([token_id], skip_special_tokens=False).encode("utf-8")

    def is_byte_token(self, token_id: int) -> bool:
        """Return whether ``token_id`` is a byte token ``<0xNN>`` of a byte-fallback tokenizer."""
        if self.style is not DecodeStyle.BYTE_FALLBACK or not self.rules.has_byte_tokens:
            return False
        token = self._backend.id_to_token(token_id)
        return token is not None and _fallback_byte(token) is not None

    def token_string(self, token_id: int) -> str | None:
        """Return the vocabulary's spelling of ``token_id``, ``None`` if there is no such id."""
        return self._backend.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        """Return the id of the vocabulary entry spelled ``token``, ``None`` if there is none."""
        return self._backend.token_to_id(token)

    def table(self, skip_special_tokens: bool, shown_ids: frozenset[int] = NO_IDS) -> TokenTable:
        """Return the shared table of token texts for streams; ``shown_ids`` are special tokens with a text even so."""
        skipped = self.special_ids - shown_ids if skip_special_tokens else NO_IDS
        table = self._tables.get(skipped)
        return self._tables.setdefault(skipped, TokenTable(self, skipped)) if table is None else table

    def _special_id(self, tokenizer_config: dict[str, Any], name: str) -> int | None:
        text = _token_text(tokenizer_config.get(name))
        return None if text is None else self._backend.token_to_id(text)


def load_tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer:
    """Return the tokenizer that ``config`` asks for: the option ``tokenizer``, else that of ``checkpoint``.

    :raises ModelNotFoundError: the option names nothing that is there.
    :raises UnsupportedModelError: see :meth:`Tokenizer.from_checkpoint`.
    :raises CheckpointError: see :meth:`Tokenizer.from_checkpoint`.
    """
    if config.model.tokenizer is None:
        return Tokenizer.from_checkpoint(checkpoint)
    return Tokenizer.from_path(config.model.tokenizer)


# ---------------------------------------------------------------------------------------------------- byte tables
def byte_letters() -> list[str]:
    """Return the letter that stands for each byte in byte-level BPE (GPT-2's ``bytes_to_unicode``)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters: list[str] = []
    moved = 0
    for byte in range(256):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(256 + moved))
            moved += 1
    return letters


BYTE_LETTERS = byte_letters()
LETTER_TO_BYTE = {letter: byte for byte, letter in enumerate(BYTE_LETTERS)}


def letters_to_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token; a token with any other letter (added tokens) is text as it stands."""
    try:
        return bytes([LETTER_TO_BYTE[letter] for letter in token])
    except KeyError:
        return token.encode("utf-8")


def _fallback_byte(token: str) -> int | None:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


def _replaced(token: str, replacements: tuple[tuple[str, str], ...]) -> str:
    for old, new in replacements:
        token = token.replace(old, new)
    return token


# --------------------------------------------------------------------------------------- reading tokenizer.json
def _return_free_memory() -> None:
    """Return freed memory to the system where the C library can; of Gemma's tokenizer 350 MB become 150."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others keep little
        if trim is not None:
            trim(0)


def _check_merges(model: _Model) -> None:
    """Refuse merges that the library would cut in the middle of a character: it ends the whole process on that.

    :raises ValueError: the second half of a merge lacks the prefix that the model says it has.
    """
    prefix = model.continuing_subword_prefix
    if not prefix:
        return
    for merge in msgspec.json.decode(model.merges, type=list[str | tuple[str, str]]):
        second = merge.partition(" ")[2] if isinstance(merge, str) else merge[1]
        if not second.startswith(prefix):
            raise ValueError(f"the merge {merge!r} lacks the continuing_subword_prefix {prefix!r}")


def _decode_style(decoder: dict[str, Any] | None) -> tuple[DecodeStyle, ByteFallbackRules]:
    general = DecodeStyle.GENERAL, ByteFallbackRules(has_byte_tokens=False)
    if decoder is None:
        return general
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return DecodeStyle.BYTE_LEVEL, ByteFallbackRules(has_byte_tokens=False)
    if kinds in (["Metaspace"], ["Metaspace", "Fuse"]):
        return DecodeStyle.BYTE_FALLBACK, _metaspace_rules(steps[0])
    return _sentencepiece_rules(steps) or general


def _metaspace_rules(step: dict[str, Any]) -> ByteFallbackRules:
    never = step.get("prepend_scheme") == "never" or step.get("add_prefix_space") is False
    mark = step.get("replacement", SPACE_MARK)
    return ByteFallbackRules(replacements=((mark, " "),), has_byte_tokens=False, drop_first_mark=not never)


def _sentencepiece_rules(steps: list[dict[str, Any]]) -> tuple[DecodeStyle, ByteFallbackRules] | None:
    """Read ``Replace* ByteFallback? Fuse Strip?``; ``None`` where the decoder does something else."""
    replacements: list[tuple[str, str]] = []
    rest = list(steps)
    while rest and rest[0]["type"] == "Replace":
        step = rest.pop(0)
        if "String" not in step["pattern"]:
            return None
        replacements.append((step["pattern"]["String"], step["content"]))
    has_byte_tokens = bool(rest) and rest[0]["type"] == "ByteFallback"
    if has_byte_tokens:
        rest.pop(0)
    if not rest or rest.pop(0)["type"] != "Fuse":
        return None
    strip_start = 0
    if rest:
        step = rest.pop(0)
        if step["type"] != "Strip" or step["content"] != " " or step["stop"] or rest:
            return None
        strip_start = step["start"]
    rules = ByteFallbackRules(tuple(replacements), has_byte_tokens, strip_start)
    return DecodeStyle.BYTE_FALLBACK, rules


def _shrinks_text(normalizer: dict[str, Any] | None) -> bool:
    if normalizer is None:
        return False
    if normalizer["type"] == "Sequence":
        return any(_shrinks_text(step) for step in normalizer["normalizers"])
    if normalizer["type"] == "Replace":
        return len(normalizer["pattern"].get("String", "..")) > len(normalizer["content"])
    return normalizer["type"] != "Prepend"


def _token_text(value: Any) -> str | None:
    """Return the text of a special token, which is written as a string or as an object with ``content``."""
    if isinstance(value, dict):
        value = value.get("content")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return value if isinstance(value, str) else None


def _refuse_surrogates(text: str) -> None:
    for index, letter in enumerate(text):
        if "\ud800" <= letter <= "\udfff":
            raise InvalidParameterError(
                f"prompt has half a surrogate pair ({letter!r}) at index {index}; that is no text",
                parameter="prompt",
                value=repr(letter),
                limit="text that UTF-8 can hold",
            )
