"""A slow sampler written apart from the engine's, and combinations of options that hold every pair of their values.

The reference works on one row in float64, with a loop for every rule; it shares with the engine only the uniform
number at which a row draws. A number so close to a border between two tokens that rounding decides allows both.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncllm.kernels.base import Kernels
from asyncllm.sampling.rng import uniforms
from asyncllm.wire.messages import EngineSampling, LogprobRows
from tests.support.sampling import sample, sampling

Float64 = npt.NDArray[np.float64]

VOCAB = 61
EOS = 2
BORDER = 1e-5  # share of the whole within which a uniform number counts as on the border

FACTORS: dict[str, Sequence[Any]] = {
    "temperature": (0.0, 1.0, 0.6, 1.8),
    "top_k": (0, 1, 4, 30),
    "top_p": (1.0, 0.85, 0.3),
    "min_p": (0.0, 0.08, 0.5),
    "repetition_penalty": (1.0, 1.4, 0.7),
    "frequency_penalty": (0.0, 0.6, -0.4),
    "presence_penalty": (0.0, 0.9, -0.5),
    "logit_bias": ({}, {7: 4.0, 11: -3.0, EOS: 100.0}, {5: 2.5, 20: -100.0}),
    "allowed_token_ids": ([], [EOS, 5, 7, 8, 9, 11, 20, 21, 33, 40, 59]),
    "bad_words": ([], [[7]], [[20, 7], [8, 20, 5], [21], [9, 9, 9, 9, 9, 9, 9, 9, 11]]),
    "min_tokens": (0, 3, 50),
    "stop_token_ids": ([], [5, 9]),
    "ignore_eos": (False, True),
    "logprobs": (-1, 0, 5),
    "logprob_token_ids": ([], [60, 7, 0]),
    "sample_index": (0, 3),
}

HISTORIES = (  # prompt, output
    ([1, 7, 7, 30, 8, 20], []),
    ([8, 20], [5]),
    ([4, 5, 6], [9, 11, 8, 20]),
    ([20], [33, 20]),
    ([50, 51, 52, 53, 54, 55], [7, 40, 7, 7, 21, 59, 20, 20]),
)


def covering_array(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return combinations of one value per factor such that every pair of values of two factors stands in one.

    Each begins with a pair that is still missing and takes, factor by factor, the value that adds most missing pairs.
    """
    names = list(factors)
    missing = set(_all_pairs(factors))
    found: list[dict[str, Any]] = []
    while missing:
        (first, i), (second, j) = min(missing, key=lambda pair: [(names.index(name), at) for name, at in pair])
        chosen = {first: i, second: j}
        for name in names:
            if name not in chosen:
                new = [
                    sum(_pair(names, (name, at), other) in missing for other in chosen.items())
                    for at in range(len(factors[name]))
                ]
                chosen[name] = new.index(max(new))
        missing -= {_pair(names, a, b) for a, b in itertools.combinations(chosen.items(), 2)}
        found.append({name: factors[name][chosen[name]] for name in names})
    return found


Place = tuple[str, int]
"""A factor and the place of one of its values."""


def _all_pairs(factors: Mapping[str, Sequence[Any]]) -> list[tuple[Place, Place]]:
    return [
        ((first, i), (second, j))
        for first, second in itertools.combinations(factors, 2)
        for i in range(len(factors[first]))
        for j in range(len(factors[second]))
    ]


def _pair(names: list[str], one: Place, other: Place) -> tuple[Place, Place]:
    return (one, other) if names.index(one[0]) < names.index(other[0]) else (other, one)


# -------------------------------------------------------------------------------------------------- the reference
@dataclass
class Row:
    """One request at one output position."""

    params: EngineSampling
    logits: Float64
    prompt: list[int]
    output: list[int]

    def adjusted(self) -> Float64:
        """Return the logits from which the row draws."""
        x, params = self.logits.copy(), self.params
        for token, bias in params.logit_bias.items():
            x[token] += bias
        if params.allowed_token_ids:
            x[[token for token in range(VOCAB) if token not in params.allowed_token_ids]] = -np.inf
        for word in params.bad_words:
            start = len(self.output) - (len(word) - 1)
            if start >= 0 and self.output[start:] == word[:-1]:
                x[word[-1]] = -np.inf
        for token in set(self.prompt) | set(self.output):
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        for token in self.output:
            x[token] -= params.frequency_penalty
        for token in set(self.output):
            x[token] -= params.presence_penalty
        if len(self.output) < params.min_tokens:
            x[[*params.stop_token_ids, *([] if params.ignore_eos else [EOS])]] = -np.inf
        return x

    def drawn(self) -> set[int]:
        """Return the tokens that may be drawn: one, unless the number is on a border."""
        x, params = self.adjusted(), self.params
        if params.temperature == 0:
            return {max(range(VOCAB), key=lambda token: (x[token], -token))}
        weights = np.exp(x / params.temperature - max(x / params.temperature))
        order = list(range(VOCAB))
        if params.top_k or params.top_p < 1:
            order.sort(key=lambda token: (-x[token], token))
        kept = order[: params.top_k or None]
        total, before = sum(weights[kept]), 0.0
        for token in kept.copy():
            if params.top_p < 1 and before >= params.top_p * total:
                kept.remove(token)
            before += weights[token]
        kept = [token for token in kept if weights[token] >= params.min_p]
        return self._at_the_number(kept, weights)

    def _at_the_number(self, kept: list[int], weights: Float64) -> set[int]:
        [number] = uniforms([self.params.seed], [self.params.sample_index], [len(self.output)])
        total, cumulative = sum(weights[kept]), 0.0
        found: set[int] = set()
        for token in kept:
            low, cumulative = cumulative, cumulative + weights[token]
            if weights[token] and low - BORDER * total <= number * total < cumulative + BORDER * total:
                found.add(token)
        return found

    def candidates(self, drawn: int) -> list[tuple[int, float, int]]:
        """Return what the row reports: (token, logprob, rank)."""
        logprobs = self.logits - np.log(np.exp(self.logits - self.logits.max()).sum()) - self.logits.max()
        ranks = [1 + int((self.logits > value).sum()) for value in self.logits]
        top = sorted(range(VOCAB), key=lambda token: (-self.logits[token], token))[: self.params.logprobs]
        return [(t, logprobs[t], ranks[t]) for t in [drawn, *top, *self.params.logprob_token_ids]]


def make_rows() -> list[Row]:
    """Return every combination at every history, each with logits and a seed of its own."""
    chance = random.Random(11)
    rows: list[Row] = []
    for combination, (prompt, output) in itertools.product(covering_array(FACTORS), HISTORIES):
        least = 0 if combination["logprob_token_ids"] else -1  # as the front end sends it
        fields = {**combination, "logprobs": max(combination["logprobs"], least)}
        params = sampling(seed=chance.getrandbits(64), **fields)
        # Some of the tokens that rules are about are likely, and single precision holds each value exactly.
        values = [chance.gauss(0, 2) + 2 * (token in (EOS, 5, 7, 11, 20)) for token in range(VOCAB)]
        rows.append(Row(params, np.array(values, np.float32).astype(np.float64), prompt, output))
    return rows


# ------------------------------------------------------------------------------------------------- the comparison
def check_rows(rows: Sequence[Row], kernels: Kernels | None) -> None:
    """Hold the engine's sampler to the reference, with all ``rows`` in one batch."""
    logits = torch.from_numpy(np.stack([row.logits for row in rows]).astype(np.float32))
    params, histories = [row.params for row in rows], [(row.prompt, row.output) for row in rows]
    out = sample(logits, params, histories=histories, eos_token_ids=(EOS,), kernels=kernels)
    tokens: list[int] = out.token_ids.tolist()
    wrong = [
        (row.params, token, row.drawn()) for row, token in zip(rows, tokens, strict=True) if token not in row.drawn()
    ]
    assert not wrong
    reporting = [(row, token) for row, token in zip(rows, tokens, strict=True) if row.params.logprobs >= 0]
    if out.logprobs is None:
        assert not reporting
        return
    found = out.logprobs.to_rows([row.params.logprobs for row, _ in reporting])
    for (row, token), reported in zip(reporting, found, strict=True):
        check_candidates(reported, row.candidates(token))


def check_candidates(reported: LogprobRows, expected: list[tuple[int, float, int]]) -> None:
    assert reported.width == len(expected)
    assert reported.token_ids == [token for token, _, _ in expected]
    assert reported.ranks == [rank for _, _, rank in expected]
    np.testing.assert_allclose(reported.logprobs, [logprob for _, logprob, _ in expected], atol=1e-5)
