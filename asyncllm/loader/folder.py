"""Weights of a Hugging Face folder: safetensors, single or sharded, else pickled ones, read without running code."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open

from asyncllm.checkpoint.folder import read_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncllm.checkpoint import Checkpoint

__all__ = ["iter_folder"]

SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"


def iter_folder(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor, float]]:
    """Yield name, tensor and the fraction of all bytes that this one completes.

    :raises UnsupportedModelError: the numbers are of a kind that is no plain floating point.
    :raises CheckpointError: a file is missing or damaged; names it.
    """
    files = _weight_files(checkpoint)
    total = sum(file.stat().st_size for file in files) or 1
    done = 0
    for file, expected in files.items():
        read = _iter_safetensors if file.suffix == ".safetensors" else _iter_pickled
        found: set[str] = set()
        for name, tensor in read(checkpoint, file):
            if not tensor.is_floating_point() or tensor.itemsize < 2:
                raise checkpoint.unsupported(f"has {name!r} in {tensor.dtype}", feature=str(tensor.dtype))
            done += tensor.numel() * tensor.itemsize
            found.add(name)
            yield name, tensor, min(done / total, 1.0)
        if missing := expected - found:
            raise checkpoint.damaged(f"lacks the tensor {min(missing)!r} that the index places there", file=file.name)


def _weight_files(checkpoint: Checkpoint) -> dict[Path, set[str]]:
    """Return the files with weights, and for each the tensors that an index says are in it."""
    for name in (SAFETENSORS, PICKLED):
        if index := checkpoint.find(f"{name}.index.json"):
            return _indexed_files(checkpoint, index)
        if file := checkpoint.find(name):
            return {file: set()}
    others = sorted(checkpoint.path.glob("*.safetensors"))
    if len(others) == 1:
        return {others[0]: set()}
    raise checkpoint.damaged(f"is missing: {checkpoint.path} holds no weights that we know", file=SAFETENSORS)


def _indexed_files(checkpoint: Checkpoint, index: Path) -> dict[Path, set[str]]:
    weight_map: Any = read_json(index, checkpoint.source).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise checkpoint.damaged("has no 'weight_map'", file=index.name)
    files: dict[Path, set[str]] = {}
    for name, file_name in cast("dict[str, Any]", weight_map).items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise checkpoint.damaged(
                f"places {name!r} in {file_name!r}, which is no file of the folder", file=index.name
            )
        files.setdefault(checkpoint.path / file_name, set()).add(name)
    for file in files:
        if not file.is_file():
            raise checkpoint.damaged(f"is missing; {index.name} names it", file=file.name)
    return dict(sorted(files.items()))


def _iter_safetensors(checkpoint: Checkpoint, file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        opened: Any = safe_open(file, framework="pt")  # a memory map: a tensor's pages are read when it is copied
        with opened as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                yield name, tensors.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise checkpoint.damaged(f"is damaged: {error}", file=file.name) from error


def _iter_pickled(checkpoint: Checkpoint, file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        tensors: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError) as error:
        raise checkpoint.damaged(f"cannot be read: {error}", file=file.name) from error
    if not isinstance(tensors, dict):
        raise checkpoint.damaged("holds no tensors by name", file=file.name)
    for name, tensor in cast("dict[str, Any]", tensors).items():
        if isinstance(tensor, torch.Tensor):
            yield name, tensor
