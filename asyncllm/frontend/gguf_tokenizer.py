"""A ``tokenizer.json`` made from the tokenizer metadata of a GGUF file.

Two kinds are read: ``gpt2`` (byte-level BPE, whose word split is named by ``tokenizer.ggml.pre``) and ``llama``
(SentencePiece BPE with byte fallback, whose merges follow from the token scores). Invariant: a word split that is not
known here is an error, never taken for another one, since that would change ids without anybody noticing.

Sources: the split patterns are those of the models' own ``tokenizer.json`` files; which name means which of them, and
what is added in front, is as llama.cpp reads the names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from asyncllm.errors import CheckpointError, UnsupportedModelError
from asyncllm.frontend.tokenizer import BYTE_LETTERS, SPACE_MARK

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["PRE_TOKENIZERS", "tokenizer_json"]

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35 = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*%s"
CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = CASED_WORD % ("", "") + r"|\p{N}" + CASED_REST
GPT4O = CASED_WORD % (CONTRACTIONS + "?", CONTRACTIONS + "?") + r"|\p{N}{1,3}" + CASED_REST
DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """How a byte-level BPE splits text into words, and what goes with it."""

    splits: tuple[str, ...] = ()
    """Patterns applied one after the other; what a pattern matches stands alone."""
    digits: bool = False
    """Every digit stands alone."""
    gpt2: bool = True
    """GPT-2's own pattern comes last."""
    nfc: bool = False
    ignore_merges: bool = False
    """A word that is in the vocabulary is taken whole."""
    add_bos: bool = False
    """BOS is added where the file does not say."""


GPT2_SPLIT = PreTokenizer()
DIGITS_SPLIT = PreTokenizer(digits=True)
LLAMA3_SPLIT = PreTokenizer(splits=(LLAMA3,), gpt2=False, ignore_merges=True, add_bos=True)
LLAMA3_SPLIT_ONLY = PreTokenizer(splits=(LLAMA3,), gpt2=False)
QWEN2_SPLIT = PreTokenizer(splits=(QWEN2,), gpt2=False, nfc=True)
QWEN2_SPLIT_ONLY = PreTokenizer(splits=(QWEN2,), gpt2=False)
GPT4O_SPLIT = PreTokenizer(splits=(GPT4O,), gpt2=False)
DEEPSEEK3_SPLIT = PreTokenizer(splits=(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3), gpt2=False)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    # What converters write where they know of no name: llama.cpp's old general split.
    "default": PreTokenizer(splits=(r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"), gpt2=False),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"), GPT2_SPLIT),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"), DIGITS_SPLIT
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), LLAMA3_SPLIT),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), LLAMA3_SPLIT_ONLY),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), QWEN2_SPLIT),
    **dict.fromkeys(("stablelm2", "hunyuan", "grok-2", "kormo"), QWEN2_SPLIT_ONLY),
    "qwen35": PreTokenizer(splits=(QWEN35,), gpt2=False, nfc=True),
    "tekken": PreTokenizer(splits=(TEKKEN,), gpt2=False, ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), GPT4O_SPLIT),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), DEEPSEEK3_SPLIT),
}
"""Word splits by the name in ``tokenizer.ggml.pre``."""


def tokenizer_json(metadata: Mapping[str, Any], source: str) -> bytes:
    """Return the content of the ``tokenizer.json`` that ``metadata`` describes.

    :raises UnsupportedModelError: its kind or its word split is not one that we know; says what to do.
    :raises CheckpointError: lists are missing or do not fit each other.
    """
    file = _Vocabulary(metadata, source)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        content = _byte_level(file)
    elif kind == "llama":
        content = _sentencepiece(file)
    else:
        raise _unsupported(source, f"tokenizer.ggml.model is {kind!r}", f"GGUF tokenizer {kind!r}")
    return msgspec.json.encode(content)


class _Vocabulary:
    """The lists of the metadata, checked against each other."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self.metadata = metadata
        self.source = source
        self.tokens: list[str] = self.need("tokens")
        types: list[int] | None = metadata.get("tokenizer.ggml.token_type")
        self.types = [1] * len(self.tokens) if types is None else types
        if len(self.types) != len(self.tokens):
            raise self.damaged(f"has {len(self.tokens)} tokens and {len(self.types)} token types")
        self.vocab = {token: token_id for token_id, token in enumerate(self.tokens)}
        if len(self.vocab) != len(self.tokens):
            raise self.damaged("lists a token twice")

    def need(self, name: str) -> Any:
        value = self.metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, list) or not value:
            raise self.damaged(f"has no tokenizer.ggml.{name}")
        return value  # pyright: ignore[reportUnknownVariableType]

    def damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"the tokenizer of {self.source!r} {why}", model=self.source)

    def special(self, name: str) -> str | None:
        """Return the spelling of special token ``name`` (``bos``, ``unknown`` …)."""
        token_id = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(self.tokens):
            return self.tokens[token_id]
        return None

    def added_tokens(self) -> list[dict[str, Any]]:
        """Return control and user-defined tokens, which are matched in the text before anything else."""
        return [
            {
                "id": token_id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind == CONTROL,
            }
            for token_id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (CONTROL, USER_DEFINED)
        ]

    def post_processor(self, *, add_bos: bool) -> dict[str, Any] | None:
        """Return the template that adds BOS and EOS as the file says, or by default as given."""
        before = self._added("bos", add_bos)
        after = self._added("eos", False)
        if not before and not after:
            return None

        def template(type_id: int, sequence: str) -> list[dict[str, Any]]:
            def special(names: list[str]) -> list[dict[str, Any]]:
                return [{"SpecialToken": {"id": name, "type_id": type_id}} for name in names]

            return [*special(before), {"Sequence": {"id": sequence, "type_id": type_id}}, *special(after)]

        names = dict.fromkeys([*before, *after])
        return {
            "type": "TemplateProcessing",
            "single": template(0, "A"),
            "pair": [*template(0, "A"), *template(1, "B")],
            "special_tokens": {name: {"id": name, "ids": [self.vocab[name]], "tokens": [name]} for name in names},
        }

    def _added(self, name: str, otherwise: bool) -> list[str]:
        flag = self.metadata.get(f"tokenizer.ggml.add_{name}_token")
        wanted = flag if isinstance(flag, bool) else otherwise
        token = self.special(name)
        return [token] if wanted and token is not None else []


# ------------------------------------------------------------------------------------------------ byte-level BPE
def _byte_level(file: _Vocabulary) -> dict[str, Any]:
    pre = _pre_tokenizer(file)
    merges = [merge.split(" ", 1) for merge in file.need("merges")]
    steps: list[dict[str, Any]] = [_split(pattern) for pattern in pre.splits]
    if pre.digits:
        steps.append({"type": "Digits", "individual_digits": True})
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pre.gpt2}
    return {
        "version": "1.0",
        "added_tokens": file.added_tokens(),
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, byte_level]},
        "post_processor": file.post_processor(add_bos=pre.add_bos),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": _byte_vocab(file),
            "merges": merges,
            "ignore_merges": pre.ignore_merges,
        },
    }


def _pre_tokenizer(file: _Vocabulary) -> PreTokenizer:
    name = file.metadata.get("tokenizer.ggml.pre")
    known = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if known is None:
        shown = "is missing" if name is None else f"{name!r} is unknown"
        raise _unsupported(file.source, f"tokenizer.ggml.pre {shown}", f"GGUF pre-tokenizer {name!r}")
    return known


def _byte_vocab(file: _Vocabulary) -> dict[str, int]:
    """Return the vocabulary, which has to have some of the 256 byte tokens."""
    if file.vocab.keys().isdisjoint(BYTE_LETTERS):
        raise file.damaged("is called gpt2 but has none of the 256 byte tokens")
    return file.vocab


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


# ------------------------------------------------------------------------------------------------- SentencePiece
def _sentencepiece(file: _Vocabulary) -> dict[str, Any]:
    given = file.metadata.get("tokenizer.ggml.merges")
    merges = [merge.split(" ", 1) for merge in given] if given else _merges_by_score(file)
    space_first = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    unknown = file.special("unknown") or next(
        (token for token, kind in zip(file.tokens, file.types, strict=True) if kind == UNKNOWN), None
    )
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    prepend = {"type": "Prepend", "prepend": SPACE_MARK}
    strip: list[dict[str, Any]] = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if space_first else []
    return {
        "version": "1.0",
        "added_tokens": file.added_tokens(),
        "normalizer": {"type": "Sequence", "normalizers": [prepend, replace]} if space_first else replace,
        "pre_tokenizer": None,
        "post_processor": file.post_processor(add_bos=True),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": file.vocab,
            "merges": merges,
        },
    }


def _merges_by_score(file: _Vocabulary) -> list[tuple[str, str]]:
    """Return the merges that the scores imply: each way to make a token of two others, better score first.

    SentencePiece merges the pair whose result has the best score; equal scores keep the order of ids. Tokens that are
    matched whole in the text (Gemma's runs of spaces) are never merged to.
    """
    tokens, vocab = file.tokens, file.vocab
    scores: list[float] = file.need("scores")
    if len(scores) != len(tokens):
        raise file.damaged(f"has {len(tokens)} tokens and {len(scores)} scores")
    merges: list[tuple[str, str]] = []
    for token_id in sorted(range(len(tokens)), key=scores.__getitem__, reverse=True):
        token = tokens[token_id]
        if len(token) < 2 or file.types[token_id] in (CONTROL, USER_DEFINED):
            continue
        ways = [
            (left, right)
            for cut in range(1, len(token))  # the hot loop: 1.2 million cuts for Gemma's 262,144 tokens
            if (left := token[:cut]) in vocab and (right := token[cut:]) in vocab
        ]
        if len(ways) > 1:
            ways.sort(key=lambda way: (vocab[way[0]], vocab[way[1]]))
        merges += ways
    return merges


def _unsupported(source: str, why: str, feature: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the tokenizer of {source!r} cannot be built: {why}. "
        "Give `tokenizer=` a folder with the model's tokenizer.json",
        model=source,
        feature=feature,
    )
