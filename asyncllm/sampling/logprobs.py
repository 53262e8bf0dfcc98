"""Log-probabilities of the chosen, the most likely and requested tokens, from the logits as the model gave them."""

# pyright: reportUnknownMemberType=false
# (torch does not say of what tolist is a list, and which arrays from_numpy takes)

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from asyncllm.wire.messages import LogprobRows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncllm.sampling.upload import Upload

__all__ = ["LogprobTensors", "RequestedTokens", "compute_logprobs"]

MAX_TOP = 64  # SamplingParams refuses more; one width for all rows keeps a row's ties independent of its neighbours


class RequestedTokens:
    """Tokens that rows want to hear of whatever the draw: row i those of ``ids[i]``, which may be none."""

    def __init__(self, ids: list[list[int]], upload: Upload) -> None:
        self.ids = ids
        counts = [len(row_ids) for row_ids in ids]
        columns = np.zeros((len(ids), max(counts)), np.int64)  # short rows are filled up with any token
        for row, row_ids in enumerate(ids):
            columns[row, : len(row_ids)] = row_ids
        self.token_ids = upload(columns)  # [R, largest count]
        self.rows = upload(np.flatnonzero(counts))  # those with any


@dataclass(slots=True)
class RequestedLogprobs:
    """What became of :class:`RequestedTokens`."""

    tokens: RequestedTokens
    logprobs: torch.Tensor  # [R, largest count]
    ranks: torch.Tensor  # [rows with any, largest count]

    def append_to(self, rows: list[LogprobRows]) -> None:
        """Append each row's requested tokens to its candidates."""
        logprobs = cast("list[list[float]]", self.logprobs.tolist())
        ranks_of = iter(cast("list[list[int]]", self.ranks.tolist()))
        for row, ids in enumerate(self.tokens.ids):
            if ids:
                rows[row].width += len(ids)
                rows[row].token_ids += ids
                rows[row].logprobs += logprobs[row][: len(ids)]
                rows[row].ranks += next(ranks_of)[: len(ids)]


@dataclass(slots=True)
class LogprobTensors:
    """Candidates of R rows: the chosen token first, then the most likely ones in order."""

    token_ids: torch.Tensor  # [R, 1 + top]
    logprobs: torch.Tensor  # [R, 1 + top]
    ranks: torch.Tensor  # [R] of the chosen token; the others are 1, 2, …
    requested: RequestedLogprobs | None = None

    def tensors(self) -> list[torch.Tensor]:
        """Return what lies on the device."""
        found = [self.token_ids, self.logprobs, self.ranks]
        return found if self.requested is None else [*found, self.requested.logprobs, self.requested.ranks]

    def on_host(self, tensors: Iterator[torch.Tensor]) -> LogprobTensors:
        """Return the same with the next of ``tensors``, copies of those of :meth:`tensors`."""
        token_ids, logprobs, ranks = next(tensors), next(tensors), next(tensors)
        requested = self.requested
        if requested is not None:
            requested = RequestedLogprobs(requested.tokens, next(tensors), next(tensors))
        return LogprobTensors(token_ids, logprobs, ranks, requested)

    def to_rows(self, num_top: list[int]) -> list[LogprobRows]:
        """Return one :class:`LogprobRows` of one position per row: ``num_top[row]`` top tokens, then the requested."""
        ids, logprobs, ranks = self._to_lists()
        rows = [
            LogprobRows(1 + k, ids[row][: 1 + k], logprobs[row][: 1 + k], [ranks[row], *range(1, 1 + k)])
            for row, k in enumerate(num_top)
        ]
        if self.requested is not None:
            self.requested.append_to(rows)
        return rows

    def to_block(self, num_top: int) -> LogprobRows:
        """Return all rows as consecutive positions of one request."""
        width = 1 + num_top
        ids, logprobs, ranks = self._to_lists()
        return LogprobRows(
            width,
            [token_id for row in ids for token_id in row[:width]],
            [logprob for row in logprobs for logprob in row[:width]],
            [rank for chosen in ranks for rank in (chosen, *range(1, width))],
        )

    def _to_lists(self) -> tuple[list[list[int]], list[list[float]], list[int]]:
        return (
            cast("list[list[int]]", self.token_ids.tolist()),
            cast("list[list[float]]", self.logprobs.tolist()),
            cast("list[int]", self.ranks.tolist()),
        )


def compute_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, *, with_top: bool, requested: RequestedTokens | None = None
) -> LogprobTensors:
    """Return the candidates of ``logits`` [R, V] with the tokens ``chosen`` [R]; no top tokens unless ``with_top``."""
    token_ids = chosen.unsqueeze(1)
    value = logits.gather(1, token_ids)
    ranks = (logits > value).sum(1) + 1
    if with_top:
        top_values, top_ids = logits.topk(min(MAX_TOP, logits.shape[1]), dim=1)
        value, token_ids = torch.cat([value, top_values], 1), torch.cat([token_ids, top_ids], 1)
    total = logits.logsumexp(1, keepdim=True)
    found = None if requested is None else _requested_logprobs(logits, total, requested)
    return LogprobTensors(token_ids, value - total, ranks, found)


def _requested_logprobs(logits: torch.Tensor, total: torch.Tensor, requested: RequestedTokens) -> RequestedLogprobs:
    values = logits.gather(1, requested.token_ids)
    ordered = _ascending(logits.index_select(0, requested.rows))
    wanted = values.index_select(0, requested.rows)
    ranks = logits.shape[1] - torch.searchsorted(ordered, wanted, right=True) + 1  # 1 + how many are larger
    return RequestedLogprobs(requested, values - total, ranks)


def _ascending(logits: torch.Tensor) -> torch.Tensor:
    """Return each row of ``logits`` [R, V] sorted; by numpy on a CPU, whose vector sort is many times torch's."""
    if logits.device.type != "cpu":
        return logits.sort(1).values
    return torch.from_numpy(np.sort(logits.numpy(), axis=1))
