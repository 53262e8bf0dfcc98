"""Sampling parameters by slot, and what the sampler needs of them for the rows of one step.

:class:`SamplingColumns` holds every parameter as a column over slots and changes only when a request comes.
:class:`SamplingMetadata` is cut from it for the rows that sample, and kept as long as those rows stay the same. Which
path a row takes (greedy, plain, filtered; penalties; logprobs) is known here, on the host, from its parameters alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from asyncllm.kernels.base import SAMPLING_DTYPE
from asyncllm.sampling.logprobs import RequestedTokens
from asyncllm.sampling.penalties import Adjustments
from asyncllm.sampling.upload import Upload

if TYPE_CHECKING:
    from asyncllm.wire.messages import EngineSampling

__all__ = ["RandomRows", "SamplingColumns", "SamplingMetadata"]

Int64 = npt.NDArray[np.int64]

TOP_P_WINDOW = 1024  # most likely tokens in which a top-p is looked for before the whole vocabulary is sorted
LARGEST_TEMPERATURE = float(np.finfo(np.float32).max)  # infinity would make nan of logits that are minus infinity
GREEDY_BELOW = 1e-5  # logits divided by less than this overflow float32; the draw is the most likely token anyway
SMALLEST_TOP_P = float(np.finfo(np.float32).tiny)  # less is 0 in float32, which would keep no token at all


@dataclass(slots=True)
class RandomRows:
    """Rows of a step that draw, all by one path; columns are tensors on the device."""

    rows: torch.Tensor | None  # [R] places among the rows of the step; None: all of them, in order
    temperature: torch.Tensor | None  # [R, 1]; None: all 1
    top_k: torch.Tensor | None  # [R, 1]; None: no row has one
    top_p: torch.Tensor | None  # [R, 1]; None: nor this
    min_p: torch.Tensor | None  # [R, 1]; None: all 0
    num_top: int  # largest logits to sort: the largest top-k, or a guess for top-p alone; 0: nothing needs an order


@dataclass(slots=True)
class TorchRows:
    """The rows of a step by the path that each takes where torch draws."""

    greedy: torch.Tensor | None  # places of those that do not draw; None: all rows do
    random: list[RandomRows]


@dataclass(slots=True)
class SamplingMetadata:
    """What the rows of a step ask for, in their order."""

    slots: Int64
    all_greedy: bool
    parameters: npt.NDArray[np.void]  # [R] of SAMPLING_DTYPE
    adjustments: Adjustments | None
    logprob_rows: torch.Tensor | None  # rows that want logprobs
    logprob_slots: list[int]
    num_logprobs: list[int]  # top tokens wanted by each of them
    requested: RequestedTokens | None  # tokens that some of them name; None: none does
    vocab_size: int
    upload: Upload
    _torch_rows: TorchRows | None = None

    def torch_rows(self) -> TorchRows:
        """Return the rows as torch draws them; made when first asked for, since kernels that draw never ask."""
        if self._torch_rows is None:
            self._torch_rows = split_rows(self.parameters, self.vocab_size, self.upload)
        return self._torch_rows

    @property
    def only_greedy(self) -> bool:
        """Return whether the most likely token of each row is all that is wanted."""
        return self.all_greedy and self.adjustments is None and self.logprob_rows is None


class SamplingColumns:
    """Sampling parameters of the requests in the slots of a persistent batch."""

    def __init__(self, num_slots: int, *, vocab_size: int, eos_token_ids: tuple[int, ...], upload: Upload) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self._upload = upload
        self.parameters = np.zeros(num_slots, SAMPLING_DTYPE)
        self.temperature: npt.NDArray[np.float32] = self.parameters["temperature"]
        self.top_k: npt.NDArray[np.int32] = self.parameters["top_k"]
        self.top_p: npt.NDArray[np.float32] = self.parameters["top_p"]
        self.min_p: npt.NDArray[np.float32] = self.parameters["min_p"]
        self.num_logprobs = np.full(num_slots, -1, np.int64)
        self.adjusted: dict[int, EngineSampling] = {}  # slots whose logits are changed before the draw
        self.requested: dict[int, list[int]] = {}  # slots that report on tokens of their choice

    def put(self, slot: int, sampling: EngineSampling) -> None:
        """Take the parameters of the request that now owns ``slot``."""
        greedy = sampling.temperature < GREEDY_BELOW or sampling.top_k == 1
        self.parameters[slot] = (
            0.0 if greedy else min(sampling.temperature, LARGEST_TEMPERATURE),
            max(sampling.top_p, SMALLEST_TOP_P),
            sampling.min_p,
            sampling.top_k if sampling.top_k < self.vocab_size else 0,
            sampling.seed,
            sampling.sample_index,
        )
        self.num_logprobs[slot] = min(sampling.logprobs, self.vocab_size)
        self.forget(slot)
        if Adjustments.wanted(sampling):
            self.adjusted[slot] = sampling
        if sampling.rare is not None and sampling.rare.logprob_token_ids:
            self.requested[slot] = sampling.rare.logprob_token_ids

    def forget(self, slot: int) -> None:
        """Drop what is held only of some requests: that of ``slot`` has left it."""
        self.adjusted.pop(slot, None)
        self.requested.pop(slot, None)

    def select(self, slots: Int64) -> SamplingMetadata:
        """Return the metadata of the rows in ``slots``, in this order."""
        want_logprobs = np.flatnonzero(self.num_logprobs[slots] >= 0)
        rows_to_sampling = {
            row: self.adjusted[slot] for row, slot in enumerate(slots.tolist()) if slot in self.adjusted
        }
        logprob_slots: list[int] = slots[want_logprobs].tolist()
        return SamplingMetadata(
            slots=slots,
            all_greedy=bool((self.temperature[slots] == 0).all()),
            parameters=self.parameters[slots],
            adjustments=self._adjustments(rows_to_sampling) if rows_to_sampling else None,
            logprob_rows=self._upload(want_logprobs) if len(want_logprobs) else None,
            logprob_slots=logprob_slots,
            num_logprobs=self.num_logprobs[slots[want_logprobs]].tolist(),
            requested=self._requested(logprob_slots) if self.requested else None,
            vocab_size=self.vocab_size,
            upload=self._upload,
        )

    def _requested(self, slots: list[int]) -> RequestedTokens | None:
        ids = [self.requested.get(slot, []) for slot in slots]
        return RequestedTokens(ids, self._upload) if any(ids) else None

    def _adjustments(self, rows_to_sampling: dict[int, EngineSampling]) -> Adjustments:
        return Adjustments(
            rows_to_sampling, vocab_size=self.vocab_size, eos_token_ids=self.eos_token_ids, upload=self._upload
        )


def split_rows(parameters: npt.NDArray[np.void], vocab_size: int, upload: Upload) -> TorchRows:
    """Return the rows of ``parameters`` [R] by the path that each takes."""
    random, top_k, top_p = parameters["temperature"] != 0, parameters["top_k"], parameters["top_p"]
    kinds = (
        (random & (top_k == 0) & (top_p >= 1), 0),
        (random & (top_k > 0), int(top_k.max())),
        (random & (top_k == 0) & (top_p < 1), min(TOP_P_WINDOW, vocab_size)),
    )
    groups = [_group(parameters, np.flatnonzero(rows), num_top, upload) for rows, num_top in kinds if rows.any()]
    return TorchRows(None if random.all() else upload(np.flatnonzero(~random)), groups)


def _group(parameters: npt.NDArray[np.void], rows: Int64, num_top: int, upload: Upload) -> RandomRows:
    chosen = parameters[rows]

    def column(name: str) -> torch.Tensor:
        return upload(np.ascontiguousarray(chosen[name])).unsqueeze(1)

    return RandomRows(
        rows=None if len(rows) == len(parameters) else upload(rows),
        temperature=None if (chosen["temperature"] == 1).all() else column("temperature"),
        top_k=column("top_k") if chosen["top_k"][0] else None,
        top_p=column("top_p") if num_top else None,
        min_p=None if (chosen["min_p"] == 0).all() else column("min_p"),
        num_top=num_top,
    )
