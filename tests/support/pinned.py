"""A model and requests that never change, and what seeds give on them: ``tests/data/seeded_ids.json``.

The weights come from this package's counter-based numbers, whose known answers are tested, not from a generator that
another version of a library may change. An id in that file depends on the arithmetic only where a number falls on a
border within rounding (about 1e-6 of the draws), so the file is the same for every instruction set and thread count.
Ids that differ from it mean that seeds people use give other answers than before: that is a breaking change.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from asyncllm import SamplingParams
from asyncllm.sampling.rng import uniforms
from tests.support.models import write_tiny_llama

SEEDED_IDS = Path(__file__).resolve().parents[1] / "data" / "seeded_ids.json"


def write_pinned_llama(folder: Path) -> Path:
    """Write the tiny Llama with weights that no library's random generator has a part in."""
    from safetensors.numpy import load_file, save_file

    write_tiny_llama(folder)
    path = folder / "model.safetensors"
    weights: dict[str, Any] = {}
    for index, (name, old) in enumerate(sorted(load_file(path).items())):
        places = np.arange(old.size, dtype=np.uint64)
        numbers = uniforms(np.full(old.size, index, np.uint64), np.zeros(old.size, np.int64), places)
        around_zero = ((numbers - 0.5) * (0.6 if old.ndim > 1 else 0.2)).astype(np.float32).reshape(old.shape)
        weights[name] = around_zero if old.ndim > 1 else around_zero + np.float32(1)  # scales of the norms
    save_file(weights, path, metadata={"format": "pt"})
    return folder


FIELDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"top_k": 20},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.5, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"n": 3, "top_p": 0.95},
]


def pinned_requests(num_requests: int = 64, max_tokens: int = 12) -> list[tuple[list[int], SamplingParams]]:
    """Return prompts of 1 … 48 bytes, some of which begin alike, with seeds and every kind of filter."""
    asked: list[tuple[list[int], SamplingParams]] = []
    for number in range(num_requests):
        shared = [(7 * place + 3) % 256 for place in range(35 if number % 3 else 0)]
        prompt = shared + [(number * 31 + 11 * place) % 256 for place in range(1 + number % 13)]
        fields = {"temperature": 1.0, **FIELDS[number % len(FIELDS)]}
        seed = (number * 0x9E3779B97F4A7C15) % 2**64  # all 64 bits
        asked.append((prompt, SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True, **fields)))
    return asked


def seeded_ids(model: str) -> list[list[list[int]]]:
    """Return the pinned ids of ``model``: request, sample, token."""
    return json.loads(SEEDED_IDS.read_text())[model]
