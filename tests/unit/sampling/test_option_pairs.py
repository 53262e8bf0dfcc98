"""Every pair of options, drawn by torch, against a slow sampler in numpy."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from tests.support.option_pairs import FACTORS, HISTORIES, Row, check_rows, covering_array, make_rows


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return make_rows()


def test_the_combinations_hold_every_pair_of_values_and_are_few() -> None:
    combinations = covering_array(FACTORS)
    for first, second in itertools.combinations(FACTORS, 2):
        for pair in itertools.product(FACTORS[first], FACTORS[second]):
            assert any((one[first], one[second]) == pair for one in combinations), (first, second, pair)
    assert len(combinations) < 40
    assert combinations == covering_array(FACTORS)


def test_the_rows_are_worth_comparing(rows: list[Row]) -> None:
    """Rules decide in many of them what is drawn, and hardly a number is on a border."""
    drawn = [row.drawn() for row in rows]
    assert sum(len(tokens) > 1 for tokens in drawn) <= 2
    assert len(set().union(*drawn)) > 20
    for field in ("bad_words", "allowed_token_ids", "logit_bias", "stop_token_ids"):
        name, neutral = ("rare", None) if field == "bad_words" else (field, type(getattr(rows[0].params, field))())
        changed = 0
        for row, tokens in zip(rows, drawn, strict=True):
            params = msgspec.structs.replace(row.params, **{name: neutral})
            changed += Row(params, row.logits, row.prompt, row.output).drawn() != tokens
        assert changed >= 3, field


def test_every_pair_of_options_agrees_with_the_reference(rows: list[Row]) -> None:
    check_rows(rows, None)


@pytest.mark.parametrize("place", range(len(HISTORIES)))
def test_each_row_alone_agrees_too(rows: list[Row], place: int) -> None:
    for row in rows[place :: len(HISTORIES)]:
        check_rows([row], None)
