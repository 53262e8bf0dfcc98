"""The sampler against an independent numpy reference, and against itself in other company."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from asyncllm.sampling import columns, sampler
from asyncllm.wire.messages import EngineSampling
from tests.support.distributions import Float64, reference
from tests.support.sampling import sample, sampling

VOCAB = 50
DRAWS = 20_000


def draws(logits: torch.Tensor, params: EngineSampling, count: int = DRAWS) -> npt.NDArray[np.int64]:
    """Return the tokens at output positions 0 … count - 1 of one request whose logits never change."""
    rows = [
        sample(logits.expand(2000, -1), [params] * 2000, positions=range(n, n + 2000)) for n in range(0, count, 2000)
    ]
    return torch.cat([row.token_ids for row in rows]).numpy()


def chi_square_per_freedom(tokens: npt.NDArray[np.int64], shares: Float64) -> float:
    expected = shares * len(tokens)
    seen = np.bincount(tokens, minlength=len(shares))
    assert not seen[shares == 0].any(), "a token of probability zero was drawn"
    likely = expected >= 5
    return float(((seen - expected)[likely] ** 2 / expected[likely]).sum() / max(likely.sum() - 1, 1))


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 20, "top_p": 0.9, "temperature": 1.3},
        {"top_k": 30, "top_p": 0.95, "min_p": 0.05},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(logits: torch.Tensor, fields: dict[str, float]) -> None:
    params = sampling(**{"temperature": 1.0, "seed": 1234, **fields})
    assert chi_square_per_freedom(draws(logits, params), reference(logits, params)) < 1.9


@pytest.mark.parametrize("fields", [{"top_k": 4}, {"top_p": 0.7}, {"top_k": 6, "top_p": 0.9}], ids=str)
def test_equal_logits_are_ordered_by_id(fields: dict[str, float]) -> None:
    logits = torch.tensor([0.0, 1.0, 0.5, 1.0, 1.0, -1.0, 0.5, 0.5, 1.0, 0.0])
    params = sampling(**{"temperature": 1.0, "seed": 8, **fields})
    assert chi_square_per_freedom(draws(logits, params), reference(logits, params)) < 2.5


@pytest.mark.parametrize("fields", [{}, {"min_p": 0.01}], ids=str)
def test_a_top_p_beyond_the_window_draws_from_all(
    logits: torch.Tensor, fields: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows whose first four tokens have the mass, and rows whose have not, draw what they draw from a full sort."""
    flat, peaked = logits * 0.2, logits * 4
    rows = torch.stack([flat, peaked] * 50)
    params = [sampling(temperature=1.0, top_p=0.9, seed=i, **fields) for i in range(100)]
    whole = sample(rows, params).token_ids.tolist()
    monkeypatch.setattr(columns, "TOP_P_WINDOW", 4)
    assert sample(rows, params).token_ids.tolist() == whole


def test_a_value_is_found_at_its_nth_place() -> None:
    logits = torch.tensor([[3.0, 1.0, 3.0, 2.0], [5.0, 5.0, 5.0, 0.0], [torch.nan, 1.0, 1.0, 1.0]])
    value, nth = torch.tensor([[3.0], [5.0], [torch.nan]]), torch.tensor([[1], [2], [1]])
    assert sampler.find(logits, value, nth).tolist() == [2, 2, 0]


def test_greedy_takes_the_largest_and_the_first_of_equals() -> None:
    logits = torch.zeros(3, 8)
    logits[0, 5] = logits[1, 2] = logits[1, 6] = 1.0
    params = [sampling(), sampling(temperature=1e-6), sampling(temperature=1.0, top_k=1)]
    assert sample(logits, params).token_ids.tolist() == [5, 2, 0]


def test_argmax_invariant_parameters_do_not_change_greedy(logits: torch.Tensor) -> None:
    params = [sampling(), sampling(top_p=0.3, top_k=7, min_p=0.2)]
    first, second = sample(logits.expand(2, -1), params).token_ids.tolist()
    assert first == second == int(logits.argmax())


def test_a_token_of_probability_zero_is_never_drawn_at_the_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.full((2, 10), -torch.inf)
    logits[:, 4] = 0.0
    for number in (0.0, 1.0 - 2.0**-53):
        monkeypatch.setattr(sampler, "uniforms", lambda *_, number=number: np.full(2, number))
        params = [sampling(temperature=1.0), sampling(temperature=1.0, top_p=0.9)]
        assert sample(logits, params).token_ids.tolist() == [4, 4]


def mixed_params() -> list[EngineSampling]:
    kinds: list[dict[str, float]] = [
        {},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 0.0},
        {"top_k": 100, "top_p": 0.9},
        {"temperature": 0.5},
        {"frequency_penalty": 0.5},
        {"top_p": 0.999},
        {"top_k": 2000},
    ]
    return [
        sampling(**{"temperature": 1.0, "seed": 5 + i, "sample_index": i % 3, **kind}) for i, kind in enumerate(kinds)
    ]


def test_r48_a_draw_does_not_depend_on_its_neighbours() -> None:
    """Alone, together and backwards: rows of every path get the same token bit for bit."""
    params = mixed_params()
    logits = torch.randn(len(params), 3000, generator=torch.Generator().manual_seed(1))
    positions = [3 * i for i in range(len(params))]
    together = sample(logits, params, positions=positions).token_ids.tolist()
    backwards = sample(logits.flip(0), params[::-1], positions=positions[::-1]).token_ids.tolist()[::-1]
    alone = [
        sample(logits[i : i + 1], [params[i]], positions=[positions[i]]).token_ids.item() for i in range(len(params))
    ]
    assert together == backwards == alone


def test_r47_the_same_seed_gives_the_same_tokens(logits: torch.Tensor) -> None:
    params = sampling(temperature=1.0, seed=42)
    assert (draws(logits, params, 2000) == draws(logits, params, 2000)).all()


def test_case103_another_seed_or_sample_gives_other_tokens(logits: torch.Tensor) -> None:
    first = draws(logits, sampling(temperature=1.0, seed=42), 2000)
    assert (first != draws(logits, sampling(temperature=1.0, seed=43), 2000)).any()
    assert (first != draws(logits, sampling(temperature=1.0, seed=42, sample_index=1), 2000)).any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}], ids=str)
def test_a_row_that_is_not_finite_shows_and_leaves_its_neighbours_alone(value: float, fields: dict[str, float]) -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    params = [sampling(seed=i, **fields) for i in range(3)]
    clean = sample(logits, params)
    logits[1, 17] = value
    spoiled = sample(logits, params)
    assert torch.isfinite(spoiled.best_logits).tolist() == [True, False, True]
    assert spoiled.token_ids[[0, 2]].tolist() == clean.token_ids[[0, 2]].tolist()
    assert 0 <= int(spoiled.token_ids[1]) < 100


def test_rows_are_cut_into_slices_without_effect(logits: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [sampling(temperature=1.0, min_p=0.01 * i, seed=i) for i in range(10)]
    rows = logits.expand(10, -1)
    whole = sample(rows, params).token_ids.tolist()
    monkeypatch.setattr(sampler, "SLICE_ELEMENTS", 3 * VOCAB)
    assert sample(rows, params).token_ids.tolist() == whole


@pytest.mark.parametrize("top_p", [1e-320, 1e-45, 1e-9])
def test_the_smallest_top_p_keeps_the_most_likely_token(logits: torch.Tensor, top_p: float) -> None:
    found = sample(logits.expand(50, -1), [sampling(temperature=1.0, top_p=top_p)] * 50, positions=range(50))
    assert set(found.token_ids.tolist()) == {int(logits.argmax())}


@pytest.mark.parametrize("fields", [{}, {"top_k": 40}, {"top_p": 0.9}], ids=str)
@pytest.mark.parametrize("temperature", [1e38, 1e39, 1e300])
def test_a_temperature_beyond_float32_draws_evenly_from_what_is_allowed(
    logits: torch.Tensor, temperature: float, fields: dict[str, float]
) -> None:
    params = [sampling(temperature=temperature, seed=i, allowed_token_ids=[3, 7], **fields) for i in range(200)]
    tokens = sample(logits.expand(200, -1), params).token_ids.tolist()
    assert set(tokens) == {3, 7}
    assert 60 < tokens.count(3) < 140
