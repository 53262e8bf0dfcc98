"""From the name a user gives to a folder or a file; nothing is read and nothing is downloaded."""

from __future__ import annotations

import re
from pathlib import Path

from asyncllm.env import hf_cache_dir
from asyncllm.errors import CheckpointError, ModelError, ModelNotFoundError, shown

__all__ = ["find_model"]

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
SPLIT_PART = re.compile(r"-(\d{5})-of-\d{5}\.gguf$")


def find_model(model: str) -> Path:
    """Return the folder with ``config.json``, or the ``.gguf`` file, that ``model`` names.

    :raises ModelNotFoundError: nothing is there.
    :raises CheckpointError: a folder is there, but no single model in it.
    """
    if not model:
        raise ModelNotFoundError(
            "the model's name is empty; give a folder, a .gguf file or a Hugging Face id", model=model
        )
    try:
        return _find(model)
    except ModelError:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # no permission, no such home folder, no name that can be
        raise ModelNotFoundError(f"the model {shown(model)!r} cannot be looked for: {error}", model=model) from error


def _find(model: str) -> Path:
    path = Path(model).expanduser()
    if path.is_file():
        return _checked_file(path, model)
    if path.is_dir():
        return _inside_folder(path, model)
    if HUB_ID.fullmatch(model) and not model.endswith((".gguf", ".safetensors")):
        return _inside_folder(_snapshot(model), model)
    raise ModelNotFoundError(f"there is no model at {model!r}: no such folder or file", model=model)


def _checked_file(path: Path, model: str) -> Path:
    if path.suffix.lower() == ".gguf":
        return path
    if (path.parent / "config.json").is_file():
        raise CheckpointError(
            f"{model!r} is a single file of a model; give its folder {str(path.parent)!r}", model=model, file=path.name
        )
    raise CheckpointError(f"{model!r} is neither a .gguf file nor a model folder", model=model, file=path.name)


def _inside_folder(path: Path, model: str) -> Path:
    if (path / "config.json").is_file():
        return path
    files = sorted(file for file in path.glob("*.gguf") if _part_number(file) == 1)
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files)
        raise CheckpointError(f"{path} holds several models ({names}); give the path of one of them", model=model)
    raise CheckpointError(f"{path} has no config.json and no .gguf file", model=model, file="config.json")


def _part_number(file: Path) -> int:
    """Return which part of a split GGUF ``file`` is; 1 for a file that is not split."""
    match = SPLIT_PART.search(file.name)
    return int(match[1]) if match else 1


def _snapshot(model_id: str) -> Path:
    """Return the folder of revision ``main`` of ``model_id`` in the local Hugging Face cache, else of the only one."""
    cache = hf_cache_dir()
    repository = cache / ("models--" + model_id.replace("/", "--"))
    reference = repository / "refs" / "main"
    if reference.is_file():
        snapshot = repository / "snapshots" / reference.read_text(encoding="utf-8").strip()
        if snapshot.is_dir():
            return snapshot
    snapshots = sorted((repository / "snapshots").glob("*/"))
    if len(snapshots) == 1:
        return snapshots[0]
    raise ModelNotFoundError(
        f"there is no folder {model_id!r}, and no model of this id in the Hugging Face cache {cache}; "
        f"to fetch it: hf download {model_id}",
        model=model_id,
    )
