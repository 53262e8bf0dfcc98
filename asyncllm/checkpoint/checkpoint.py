"""The :class:`Checkpoint` and how one is opened.

Invariant: an open checkpoint has a configuration with an architecture; everything else that can be absent is asked for
through a property that either answers or raises an error naming the file and the key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

from asyncllm.checkpoint import folder, gguf_config, resolve
from asyncllm.checkpoint.defaults import with_defaults
from asyncllm.checkpoint.gguf import GGUFFile
from asyncllm.errors import CheckpointError, UnsupportedModelError, shown

__all__ = ["Checkpoint", "open_checkpoint"]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model's files, as plain data."""

    source: str
    """The model as the user named it."""
    path: Path
    """A folder, or a ``.gguf`` file."""
    format: Literal["safetensors", "gguf"]
    config: dict[str, Any]
    """The content of ``config.json``; made from the metadata for a GGUF file."""
    generation_config: dict[str, Any]
    """The content of ``generation_config.json``, ``{}`` where there is none."""
    tokenizer_config: dict[str, Any]
    """Special tokens as strings (``bos_token`` …), ``chat_template`` text; ``chat_templates`` by name if several."""
    gguf: GGUFFile | None = field(default=None, repr=False, compare=False)
    """The open file where ``format`` is ``gguf``."""

    @property
    def text_config(self) -> dict[str, Any]:
        """The part of :attr:`config` about the language model: ``text_config`` of a multimodal one, else all."""
        nested = self.config.get("text_config")
        return cast("dict[str, Any]", nested) if isinstance(nested, dict) else self.config

    @property
    def architecture(self) -> str:
        """Class name of the architecture, such as ``LlamaForCausalLM``.

        :raises CheckpointError: the configuration names none.
        """
        names = self.config.get("architectures")
        if isinstance(names, list) and names and isinstance(names[0], str):
            return names[0]
        raise self.damaged("has no 'architectures'")

    @property
    def vocab_size(self) -> int:
        """Rows of the output head: ids that the model can produce.

        :raises CheckpointError: the configuration does not say.
        """
        return self._positive("vocab_size")

    @cached_property
    def num_tokens(self) -> int | None:
        """How many ids stand for a token: the rest of :attr:`vocab_size` is padding that must not be sampled.

        ``None`` where there is no token list. Reads ``tokenizer.json`` once: some 20 ms per 50,000 tokens.

        :raises CheckpointError: ``tokenizer.json`` is damaged.
        """
        if self.gguf is not None:
            return self.gguf.metadata.length(gguf_config.TOKENS) or None
        return folder.count_tokens(self.path, self.source)

    @property
    def max_position(self) -> int:
        """Longest sequence in tokens that the model was made for.

        :raises CheckpointError: the configuration does not say.
        """
        for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx"):
            if self.text_config.get(name) is not None:
                return self._positive(name)
        raise self.damaged("has no 'max_position_embeddings'")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text: those of the generation config, else those of the config; may be empty."""
        for source in (self.generation_config, self.text_config, self.config):
            if ids := self._token_ids(source, "eos_token_id"):
                return ids
        return ()

    @property
    def bos_token_id(self) -> int | None:
        """Id that begins a text, ``None`` where the model has none."""
        for source in (self.generation_config, self.text_config, self.config):
            if ids := self._token_ids(source, "bos_token_id"):
                return ids[0]
        return None

    @property
    def dtype(self) -> str | None:
        """Name of the dtype that the weights are stored in, such as ``bfloat16``; ``None`` if not said."""
        name = self.text_config.get("dtype") or self.text_config.get("torch_dtype") or self.config.get("torch_dtype")
        return name.removeprefix("torch.") if isinstance(name, str) else None

    def find(self, name: str) -> Path | None:
        """Return the path of file ``name`` of the folder, ``None`` if there is none; a GGUF has no such files."""
        path = self.path / name
        return path if self.format == "safetensors" and path.is_file() else None

    def damaged(self, why: str, *, file: str = "config.json") -> CheckpointError:
        """Return the error that says: file ``file`` of this checkpoint ``why`` (a predicate)."""
        name = self.path.name if self.format == "gguf" else file
        return CheckpointError(f"{name} of model {self.source!r} {why}", model=self.source, file=name)

    def unsupported(self, why: str, *, feature: str) -> UnsupportedModelError:
        """Return the error that says: this model ``why`` (a predicate); ``feature`` is what we do not run."""
        return UnsupportedModelError(f"model {self.source!r} {why}", model=self.source, feature=feature)

    def _positive(self, name: str) -> int:
        value = self.text_config.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
            raise self.damaged(f"has {name!r} = {shown(value)!r}; it must be a positive integer of 31 bits")
        return value

    def _token_ids(self, source: dict[str, Any], name: str) -> tuple[int, ...]:
        value: Any = source.get(name)
        if value is None:
            return ()
        ids: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
            file = "generation_config.json" if source is self.generation_config else "config.json"
            raise self.damaged(f"has {name!r} = {value!r}; it must be an id or a list of ids", file=file)
        return tuple(dict.fromkeys(item for item in ids if item >= 0))


def open_checkpoint(model: str) -> Checkpoint:
    """Return the checkpoint ``model``: a folder, a ``.gguf`` file, or an id in the local Hugging Face cache.

    Reads configuration files only, no weights; blocks on the disk for milliseconds. Nothing is downloaded.

    :raises ModelNotFoundError: there is nothing at the path, or the id is not in the cache; says what to do.
    :raises UnsupportedModelError: the GGUF's version, architecture or a feature is not one that we run.
    :raises CheckpointError: a file is missing or damaged; names it.
    """
    path = resolve.find_model(model)
    if path.is_file():
        return _open_gguf(model, path)
    return Checkpoint(
        source=model,
        path=path,
        format="safetensors",
        config=with_defaults(folder.read_config(path, model)),
        generation_config=folder.read_json(path / "generation_config.json", model, otherwise={}),
        tokenizer_config=folder.read_tokenizer_config(path, model),
    )


def _open_gguf(model: str, path: Path) -> Checkpoint:
    file = GGUFFile(path)
    config = with_defaults(gguf_config.make_config(file, model))
    return Checkpoint(
        source=model,
        path=path,
        format="gguf",
        config=config,
        generation_config=gguf_config.make_generation_config(file),
        tokenizer_config=gguf_config.make_tokenizer_config(file),
        gguf=file,
    )
