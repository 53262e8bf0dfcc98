"""Masks of grammars: what they leave can be drawn, nothing else, whatever else a request asks for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncllm.sampling.token_mask import TokenMasks
from tests.support.kernels import native_kernels
from tests.support.sampling import sample, sampling

VOCAB = 1003  # the last byte of a mask has bits to spare


def mask_of(allowed: set[int], vocab_size: int = VOCAB) -> bytes:
    bits = np.zeros(vocab_size, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


@pytest.mark.parametrize("share", [0.0, 0.002, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("device", ["cpu", "other"])
def test_what_a_mask_leaves_keeps_its_logit(share: float, device: str) -> None:
    """By every way that is taken for more or fewer tokens, and as another device does it."""
    allowed = np.random.default_rng(1).random(VOCAB) < share
    logits = torch.randn((3, VOCAB))
    expected = logits.clone()
    expected[1][torch.from_numpy(~allowed)] = -torch.inf
    masks = TokenMasks({1: mask_of(set(np.flatnonzero(allowed).tolist()))}, torch.from_numpy)
    if device == "cpu":
        masks.apply(logits)
    else:
        masks.apply_on_device(logits)
    assert torch.equal(logits, expected)


def test_rows_have_masks_of_their_own() -> None:
    logits = torch.arange(VOCAB, dtype=torch.float32).repeat(3, 1)
    drawn = sample(logits, [sampling()] * 3, masks={0: mask_of({3, 5}), 2: mask_of({7})}).token_ids
    assert drawn.tolist() == [5, VOCAB - 1, 7]


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
def test_only_allowed_tokens_are_drawn(native: bool) -> None:
    kernels = native_kernels() if native else None
    params = [sampling(temperature=2.0, seed=seed) for seed in range(64)]
    masks = {row: mask_of({row, row + 100, row + 200}) for row in range(64)}
    found = sample(torch.randn((64, VOCAB)), params, masks=masks, kernels=kernels)
    assert all(int(token) in (row, row + 100, row + 200) for row, token in enumerate(found.token_ids))


def test_nothing_brings_an_excluded_token_back() -> None:
    params = sampling(logit_bias={9: 100.0}, repetition_penalty=0.1, presence_penalty=-2.0)
    logits = torch.zeros((1, VOCAB))
    found = sample(logits, [params], histories=[([1], [9])], masks={0: mask_of({4})})
    assert found.token_ids.tolist() == [4]


def test_a_row_without_any_token_left_says_so() -> None:
    params = sampling(allowed_token_ids=[5])
    found = sample(torch.zeros((1, VOCAB)), [params], histories=[([1], [])], masks={0: mask_of({4})})
    assert found.best_logits.tolist() == [-torch.inf]


def test_logprobs_are_those_of_the_model() -> None:
    logits = torch.randn((1, VOCAB))
    found = sample(logits, [sampling(logprobs=0)], masks={0: mask_of({4})})
    assert found.logprobs is not None
    expected = torch.log_softmax(logits, 1)[0, 4]
    assert torch.allclose(found.logprobs.logprobs[0, 0], expected)
