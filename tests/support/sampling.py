"""Drive the sampler without a model: logits in, tokens out, over a persistent batch of made-up histories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from asyncllm.kernels.base import Kernels
from asyncllm.sampling.columns import SamplingColumns
from asyncllm.sampling.device_draw import DeviceDraw
from asyncllm.sampling.penalties import TokenHistory
from asyncllm.sampling.sampler import Sampler, SamplerOutput
from asyncllm.sampling.token_mask import TokenMasks
from asyncllm.wire.messages import EngineSampling, RareSampling


def sampling(**fields: object) -> EngineSampling:
    """Return the parameters with ``fields``, those of :class:`RareSampling` among them."""
    rare: dict[str, Any] = {name: fields.pop(name) for name in RareSampling.__struct_fields__ if name in fields}
    values: dict[str, Any] = {"max_tokens": 100, "rare": RareSampling(**rare) if any(rare.values()) else None}
    return EngineSampling(**{**values, **fields})


def sample(
    logits: torch.Tensor,
    params: Sequence[EngineSampling],
    *,
    histories: Sequence[tuple[Sequence[int], Sequence[int]]] | None = None,
    positions: Sequence[int] | None = None,
    eos_token_ids: tuple[int, ...] = (2,),
    kernels: Kernels | None = None,
    masks: dict[int, bytes] | None = None,
    device_draw: DeviceDraw | None = None,
) -> SamplerOutput:
    """Sample one token per row; ``histories`` are (prompt, output) ids, ``positions`` stand for outputs of that length.

    Rows sit in slots in reverse order, so that a mix-up of rows and slots shows.
    """
    num_rows, vocab_size = logits.shape
    prompt_lens, output_lens = np.ones(num_rows, np.int64), np.array(positions or [0] * num_rows, np.int64)
    if histories is not None:
        prompt_lens = np.array([len(prompt) for prompt, _ in histories])
        output_lens = np.array([len(output) for _, output in histories])
    slots = np.arange(num_rows)[::-1].copy()
    columns = SamplingColumns(num_rows, vocab_size=vocab_size, eos_token_ids=eos_token_ids, upload=torch.from_numpy)
    for slot, row_params in zip(slots.tolist(), params, strict=True):
        columns.put(slot, row_params)
    reads_tokens = histories is not None or bool(columns.adjusted)
    tokens = np.zeros((num_rows, int((prompt_lens + output_lens).max()) if reads_tokens else 0), np.int64)
    for slot, (prompt, output) in zip(slots.tolist(), histories or [], strict=False):
        tokens[slot, : len(prompt) + len(output)] = [*prompt, *output]
    history = TokenHistory(torch.from_numpy(tokens), slots, prompt_lens, prompt_lens + output_lens)
    with torch.inference_mode():
        row_masks = None if masks is None else TokenMasks(masks, torch.from_numpy)
        return Sampler(kernels, device_draw).sample(logits.clone(), columns.select(slots), history, row_masks)
