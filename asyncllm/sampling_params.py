"""What a caller asks of one request. Fields are checked when the object is made and never rewritten afterwards.

``None`` means "the model's ``generation_config``, else the neutral value". Limits that depend on the model (vocabulary,
context) are checked by :class:`asyncllm.frontend.input_processor.InputProcessor`.
"""

from __future__ import annotations

import difflib
import math
from typing import TYPE_CHECKING, Any, NoReturn, cast

import msgspec

from asyncllm.errors import InvalidParameterError, UnknownParameterError, shown

__all__ = ["RepetitionDetectionParams", "SamplingParams"]

MAX_LOGPROBS = 64
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_CHOICES = 10_000
MAX_STRUCTURE_CHARS = 1 << 20
MAX_PATTERN_SIZE = 256
MAX_PATTERN_COUNT = 1024
MAX_SAMPLES = 256
MAX_SEED = 2**64 - 1
MAX_LOOKUP_TOKENS = 32
MAX_ID = 2**31 - 1
FLAGS = (
    "ignore_eos",
    "include_stop_str_in_output",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "json_object",
)
STRUCTURES = ("schema", "regex", "choice", "grammar", "json_object")
"""The fields that say what the output as a whole has to match; a request has one of them at most."""

OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens",
    "num_return_sequences": "n",
    "response_format": "schema",
}
"""What other libraries call a field, where the letters do not tell."""


class _NamesUnknownFields(msgspec.StructMeta):
    """Makes an unknown keyword an error that names the field which may be meant; costs nothing where there is none."""

    if not TYPE_CHECKING:  # type checkers know the fields from the class itself

        def __call__(self, *args, **options):
            try:
                return super().__call__(*args, **options)
            except TypeError as error:
                known = self.__struct_fields__
                unknown = [name for name in options if name not in known]
                if not unknown:
                    raise
                raise _unknown(unknown[0], known) from error


class RepetitionDetectionParams(
    msgspec.Struct, metaclass=_NamesUnknownFields, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Which repetition ends a sample; names and meaning are those of vLLM.

    :raises InvalidParameterError: a field is of the wrong type or out of range; names field, value and limit.
    :raises UnknownParameterError: there is no field of this name.
    """

    max_pattern_size: int
    """Tokens of the longest pattern looked for, 1 … 256."""
    min_pattern_size: int = 1
    """Tokens of the shortest one."""
    min_count: int
    """How many times in a row the pattern stands at the end of the output, 2 … 1024."""

    def __post_init__(self) -> None:
        _integer("max_pattern_size", self.max_pattern_size, 1, MAX_PATTERN_SIZE)
        _integer("min_pattern_size", self.min_pattern_size, 1, MAX_PATTERN_SIZE)
        _integer("min_count", self.min_count, 2, MAX_PATTERN_COUNT)
        if self.min_pattern_size > self.max_pattern_size:
            limit = f"at most max_pattern_size ({self.max_pattern_size})"
            _refuse("min_pattern_size", self.min_pattern_size, limit)


class SamplingParams(
    msgspec.Struct, metaclass=_NamesUnknownFields, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """How the tokens of one request are drawn and when it ends.

    :raises InvalidParameterError: a field is of the wrong type or out of range; names field, value and limit.
    :raises UnknownParameterError: there is no field of this name.
    """

    n: int = 1
    """Independent samples of the same prompt, 1 … 256; their deltas carry ``index`` 0 … n-1."""
    temperature: float | None = None
    """0 is greedy; otherwise logits are divided by it. ``None``: the model's default, else 1."""
    top_p: float | None = None
    """Keep the smallest set of most likely tokens whose mass reaches this; in (0, 1]."""
    top_k: int | None = None
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: float | None = None
    """Drop tokens less likely than this fraction of the most likely one; in [0, 1]."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token already generated; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence from the logit of each token already generated; in [-2, 2]."""
    repetition_penalty: float | None = None
    """Divides (or multiplies, below zero) logits of tokens in the prompt or output; > 0, 1 is neutral."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these token ids; each in [-100, 100]."""
    allowed_token_ids: list[int] | None = None
    """Only these ids can be drawn."""
    bad_words: list[str] | None = None
    """Words that the output does not spell, at most 128 of at most 256 characters. Each is tokenized with and without a
    space before it; the last token of either sequence cannot be drawn where the output ends in the tokens before it. As
    in vLLM and transformers this is a rule on tokens: another way to cut the same letters into tokens is not found."""
    seed: int | None = None
    """0 … 2**64-1. The draw at output position i depends only on (seed, sample index, i). ``None``: a random one."""
    max_tokens: int | None = None
    """Most tokens to generate per sample; ``None``: up to the end of the context."""
    min_tokens: int = 0
    """No end-of-sequence or stop token before this many tokens."""
    stop: str | list[str] | None = None
    """Strings that end the sample; the text is cut before the match."""
    stop_token_ids: list[int] | None = None
    """Token ids that end the sample, beside the model's own end-of-sequence ids."""
    repetition_detection: RepetitionDetectionParams | None = None
    """End the sample, not before ``min_tokens``, when its last tokens are a pattern several times in a row; all of them
    are delivered, ``finish_reason`` is "repetition" and ``stop_reason`` "repetition_detected"."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence ids (``stop_token_ids`` still end the sample)."""
    include_stop_str_in_output: bool = False
    """Keep the matched stop string (or stop token's text) in the text."""
    logprobs: int | None = None
    """Report this many most likely tokens per output position, 0 … 64 (0: the chosen one only)."""
    prompt_logprobs: int | None = None
    """The same for each prompt position; such a request does not read the prefix cache."""
    logprob_token_ids: list[int] | None = None
    """Report these tokens, at most 128, at each output position, in this order, as ``TokenLogprobs.requested``. As in
    vLLM: exactly these beside the chosen one, and alone it needs no ``logprobs``. With ``logprobs`` the most likely
    ones are reported too (where vLLM would have them replaced)."""
    schema: Any = None
    """The output is JSON that fits this: a JSON schema (a dict, or its text), or a type (a pydantic model or
    ``TypeAdapter``, a msgspec Struct, a dataclass, a ``TypedDict``, ``list[int]`` …). ``Completion.parsed`` then holds
    the object. The JSON stands on one line, with properties in the schema's order."""
    regex: str | None = None
    """The whole output matches this regular expression (syntax of Rust's ``regex`` crate: no look-around)."""
    choice: list[str] | None = None
    """The output is one of these texts, at most 10,000."""
    grammar: str | None = None
    """The output follows this grammar, in Lark's notation or GBNF."""
    json_object: bool = False
    """The output is some JSON object."""
    truncate_prompt_tokens: int | None = None
    """Keep only the last so many tokens of the prompt, special ones at its front counted like any other; -1: as many as
    leave ``max_tokens`` (``None``: one token) of the context free."""
    prompt_lookup_num_tokens: int | None = None
    """Guess up to so many next tokens in each step by looking up what followed the last ones earlier in prompt and
    output, and let the model check them together; 0 … 32, 0 guesses nothing, 8 is a good number. The output is the same
    to the token; it comes faster where it repeats something (quotes, edits, extracts), and costs nothing to speak of
    where it does not: after wrong guesses there are fewer. Without effect where the output has to match a grammar.
    ``None``: the engine's option of this name."""
    detokenize: bool = True
    """``False``: deltas carry ids only and empty text; stop strings need it on."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Taken for the sake of code written for vLLM and transformers, and without effect: it matters to transformers'
    slow SentencePiece tokenizers alone. Those of a ``tokenizer.json`` (byte-level BPE, byte fallback, WordPiece), which
    are all that we read, join added tokens to the text by the rules of their decoder, in transformers as here."""

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_SAMPLES)
        _number("temperature", self.temperature, 0.0, math.inf, optional=True)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True, optional=True)
        _integer("top_k", self.top_k, 0, None, optional=True)
        _number("min_p", self.min_p, 0.0, 1.0, optional=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True, optional=True)
        _integer("seed", self.seed, 0, MAX_SEED, optional=True)
        _integer("max_tokens", self.max_tokens, 1, None, optional=True)
        _integer("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"at most max_tokens ({shown(self.max_tokens)})")
        _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, optional=True)
        if self.truncate_prompt_tokens != -1 or isinstance(self.truncate_prompt_tokens, float):
            _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, None, optional=True, also="or -1")
        _integer("prompt_lookup_num_tokens", self.prompt_lookup_num_tokens, 0, MAX_LOOKUP_TOKENS, optional=True)
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "True or False")
        watched = cast("object", self.repetition_detection)
        if watched is not None and not isinstance(watched, RepetitionDetectionParams):
            _refuse("repetition_detection", watched, "RepetitionDetectionParams")
        self._check_stop()
        self._check_ids()
        self._check_structure()
        if self.bad_words is not None:
            self._check_bad_words(self.bad_words)

    @property
    def stop_strings(self) -> list[str]:
        """Return ``stop`` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def wants_logprobs(self) -> bool:
        """Return whether output positions are reported with candidates."""
        return self.logprobs is not None or self.logprob_token_ids is not None

    def _check_stop(self) -> None:
        stop = cast("object", self.stop)  # callers without a type checker pass anything
        if stop is not None and not isinstance(stop, (str, list, tuple)):
            _refuse("stop", stop, "a string or a list of strings")
        texts: list[object] = list(self.stop_strings)
        for text in texts:
            if not isinstance(text, str) or not text:
                _refuse("stop", text, "non-empty strings")
        if self.stop_strings and not self.detokenize:
            _refuse("stop", self.stop_strings, "detokenize=True, since stop strings are matched in the text")

    def _check_ids(self) -> None:
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            ids: object = getattr(self, name)
            if ids is None:
                continue
            if not isinstance(ids, (list, tuple)):
                _refuse(name, ids, "a list of token ids")
            for token_id in cast("list[object]", ids):
                _integer(name, token_id, 0, MAX_ID)
            if not ids and name != "stop_token_ids":
                _refuse(name, [], "at least one token id")
        if self.logprob_token_ids is not None and len(self.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
            _refuse("logprob_token_ids", self.logprob_token_ids, f"at most {MAX_LOGPROB_TOKEN_IDS} token ids")
        biases = cast("object", self.logit_bias)
        if biases is not None:
            if not isinstance(biases, dict):
                _refuse("logit_bias", biases, "a dict of token id to bias")
            for token_id, bias in cast("dict[object, object]", biases).items():
                _integer("logit_bias", token_id, 0, MAX_ID)
                _number(f"logit_bias[{token_id}]", bias, -100.0, 100.0)

    @property
    def structure(self) -> str | None:
        """Return which field says what the output has to match, ``None`` if none does."""
        for name in STRUCTURES:
            if getattr(self, name) not in (None, False):
                return name
        return None

    def _check_structure(self) -> None:
        given = [name for name in STRUCTURES if getattr(self, name) not in (None, False)]
        if not given:
            return
        if len(given) > 1:
            _refuse(given[1], getattr(self, given[1]), f"absent beside {given[0]}: one of {', '.join(STRUCTURES)}")
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                _text(name, getattr(self, name))
        schema = self.schema
        if isinstance(schema, str):
            _text("schema", schema)
        elif isinstance(schema, (bool, int, float, bytes, list, tuple, set)):
            _refuse("schema", cast("object", schema), "a JSON schema, as a dict or text, or a type")
        choice = cast("object", self.choice)
        if choice is None:
            return
        texts = cast("list[object]", choice)
        if not isinstance(choice, (list, tuple)) or not 0 < len(texts) <= MAX_CHOICES:
            _refuse("choice", texts, f"a list of 1 … {MAX_CHOICES} texts")
        for text in texts:
            _text("choice", text)

    def _check_bad_words(self, words: object) -> None:
        if not isinstance(words, (list, tuple)):
            _refuse("bad_words", words, "a list of strings")
        words = cast("list[object]", words)
        if len(words) > MAX_BAD_WORDS:
            _refuse("bad_words", words, f"at most {MAX_BAD_WORDS} words")
        for word in words:
            if not isinstance(word, str) or not 0 < len(word) <= MAX_BAD_WORD_CHARS:
                _refuse("bad_words", word, f"non-empty strings of at most {MAX_BAD_WORD_CHARS} characters")
            if any("\ud800" <= letter <= "\udfff" for letter in word):
                _refuse("bad_words", word, "text that UTF-8 can hold")


def _unknown(name: str, known: tuple[str, ...]) -> UnknownParameterError:
    near = [OTHER_NAMES[name]] if OTHER_NAMES.get(name) in known else difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return UnknownParameterError(f"there is no sampling parameter {name!r}{hint}", parameter=name)


def _refuse(parameter: str, value: object, limit: str) -> NoReturn:
    value = shown(value)
    raise InvalidParameterError(
        f"{parameter} is {value!r}; it must be {limit}", parameter=parameter, value=value, limit=limit
    )


def _text(name: str, value: object) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_STRUCTURE_CHARS:
        _refuse(name, value, f"a text of 1 … {MAX_STRUCTURE_CHARS} characters")
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        _refuse(name, value, "text that UTF-8 can hold")


def _integer(name: str, value: object, low: int, high: int | None, *, optional: bool = False, also: str = "") -> None:
    if value is None and optional:
        return
    limit = f"an integer of at least {low}" if high is None else f"an integer in {low} … {high}"
    limit = f"{limit}, {also}" if also else limit
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        _refuse(name, value, limit)


def _number(
    name: str, value: object, low: float, high: float, *, open_low: bool = False, optional: bool = False
) -> None:
    if value is None and optional:
        return
    bracket = "(" if open_low else "["
    limit = f"a finite number in {bracket}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_finite(value):
        _refuse(name, value, limit)
    if not low <= value <= high or (open_low and value == low):
        _refuse(name, value, limit)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False
