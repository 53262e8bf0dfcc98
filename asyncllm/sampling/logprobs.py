"""Log-probabilities of the chosen and the most likely tokens, from the logits as the model gave them."""

# pyright: reportUnknownMemberType=false
# (torch does not say of what tolist is a list)

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from asyncllm.wire.messages import LogprobRows

__all__ = ["LogprobTensors", "compute_logprobs"]

MAX_TOP = 64  # SamplingParams refuses more; one width for all rows keeps a row's ties independent of its neighbours


@dataclass(slots=True)
class LogprobTensors:
    """Candidates of R rows: the chosen token first, then the most likely ones in order."""

    token_ids: torch.Tensor  # [R, 1 + top]
    logprobs: torch.Tensor  # [R, 1 + top]
    ranks: torch.Tensor  # [R] of the chosen token; the others are 1, 2, …

    def to_rows(self, num_top: list[int]) -> list[LogprobRows]:
        """Return one :class:`LogprobRows` of one position per row, with ``num_top[row]`` top tokens each."""
        ids, logprobs, ranks = self._to_lists()
        return [
            LogprobRows(1 + k, ids[row][: 1 + k], logprobs[row][: 1 + k], [ranks[row], *range(1, 1 + k)])
            for row, k in enumerate(num_top)
        ]

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


def compute_logprobs(logits: torch.Tensor, chosen: torch.Tensor, *, with_top: bool) -> LogprobTensors:
    """Return the candidates of ``logits`` [R, V] with the tokens ``chosen`` [R]; no top tokens unless ``with_top``."""
    token_ids = chosen.unsqueeze(1)
    value = logits.gather(1, token_ids)
    ranks = (logits > value).sum(1) + 1
    if with_top:
        top_values, top_ids = logits.topk(min(MAX_TOP, logits.shape[1]), dim=1)
        value, token_ids = torch.cat([value, top_values], 1), torch.cat([token_ids, top_ids], 1)
    return LogprobTensors(token_ids, value - logits.logsumexp(1, keepdim=True), ranks)
