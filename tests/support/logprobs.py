"""Hold the log-probabilities of a completion to transformers' log-softmax."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncllm import Completion
from asyncllm.outputs import TokenLogprobs
from tests.support import models

TOLERANCE = 1e-4
"""Of a natural logarithm, in float32; both sides add up in their own order."""


def check_position(row: Any, found: TokenLogprobs, token_id: int, num_top: int, requested: Sequence[int]) -> None:
    """Check one position against ``row``, the log-softmax over the vocabulary that was there."""
    assert found.chosen.token_id == token_id
    assert [one.token_id for one in found.requested] == list(requested)
    for one in (found.chosen, *found.top, *found.requested):
        assert one.logprob == pytest.approx(row[one.token_id].item(), abs=TOLERANCE, rel=0)
        surely_above, maybe_above = (row > row[one.token_id] + d for d in (2 * TOLERANCE, -2 * TOLERANCE))
        assert int(surely_above.sum()) < one.rank <= max(int(maybe_above.sum()), 1)
    best = row.sort(descending=True).values[:num_top].tolist()
    assert [one.logprob for one in found.top] == pytest.approx(best, abs=TOLERANCE, rel=0)
    assert [one.rank for one in found.top] == list(range(1, num_top + 1))
    assert len({one.token_id for one in found.top}) == num_top


def check_completion(
    folder: Path, completion: Completion, *, num_top: int, num_prompt_top: int, requested: Sequence[int] = ()
) -> None:
    """Check every position of prompt and output; ``folder`` is the same model for transformers."""
    prompt, output = completion.prompt_token_ids, completion.token_ids
    expected = models.log_probabilities(folder, [*prompt, *output])
    assert completion.prompt_logprobs is not None
    assert completion.prompt_logprobs[0] is None
    for row, found, token_id in zip(expected, completion.prompt_logprobs[1:], prompt[1:], strict=False):
        assert found is not None
        check_position(row, found, token_id, num_prompt_top, found_ids(found))
    assert len(completion.prompt_logprobs) == len(prompt)
    assert completion.logprobs is not None
    for row, found, token_id in zip(expected[len(prompt) - 1 : -1], completion.logprobs, output, strict=True):
        check_position(row, found, token_id, num_top, requested)


def found_ids(found: TokenLogprobs) -> list[int]:
    """Return the requested ids that were reported; of a prompt none are asked for."""
    return [one.token_id for one in found.requested]
