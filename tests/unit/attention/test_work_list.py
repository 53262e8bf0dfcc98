from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.attention.base import StepLimits
from asyncllm.attention.work_list import (
    LARGE_ITEMS,
    LARGE_MERGES,
    SMALL_ITEMS,
    SMALL_MERGES,
    Launches,
    WorkList,
    WorkListLimits,
)

Fields = dict[str, Any]
Row = tuple[int, int]  # new tokens, tokens in all

SMALL_CHUNK, LARGE_CHUNK = 4, 8


def make_work_list(
    *, rows: int = 8, tokens: int = 64, length: int = 200, small: int = 3, large: int = 7, parts: int = 6
) -> WorkList:
    limits = WorkListLimits(
        small_tokens=small, large_tokens=large, max_parts=parts, small_chunk=SMALL_CHUNK, large_chunk=LARGE_CHUNK
    )
    return WorkList(limits, StepLimits(max_num_seqs=rows, max_num_batched_tokens=tokens, max_model_len=length))


def run(work: WorkList, rows: list[Row]) -> tuple[Launches, Fields]:
    """Plan ``rows`` into arrays that hold what no list may hold."""
    fields = {field.name: np.full(field.shape, -7, field.dtype) for field in work.fields()}
    query_lens, seq_lens = np.array(rows, np.int32).T
    return work.plan(query_lens, seq_lens, fields), fields


def items(fields: Fields, kind: str, wave: int = 0) -> list[list[int]]:
    """Return the items or merges of a wave, in the way in which the kernels find them."""
    row = {
        "small_items": SMALL_ITEMS,
        "small_merges": SMALL_MERGES,
        "large_items": LARGE_ITEMS,
        "large_merges": LARGE_MERGES,
    }[kind]
    begin, end = fields["attn_bounds"][row, wave : wave + 2]
    return fields[f"attn_{kind}"][:, begin:end].T.tolist()


@st.composite
def steps(draw: st.DrawFn) -> tuple[WorkList, list[Row]]:
    work = make_work_list(
        rows=draw(st.integers(1, 8)),
        tokens=draw(st.integers(8, 64)),
        length=draw(st.integers(1, 200)),
        small=draw(st.integers(1, 5)),
        large=draw(st.integers(5, 9)),
        parts=draw(st.integers(1, 9)),
    )
    left, rows = work.step.max_num_batched_tokens, list[Row]()
    for _ in range(draw(st.integers(1, work.step.max_num_seqs))):
        if not left:
            break
        seq_len = draw(st.integers(1, work.step.max_model_len))
        query_len = draw(st.integers(1, min(seq_len, left)) | st.just(1))
        rows.append((query_len, seq_len))
        left -= query_len
    return work, rows


@settings(max_examples=300, deadline=None)
@given(steps())
def test_every_token_sees_every_position_before_it_once_and_no_two_results_share_a_slot(
    step: tuple[WorkList, list[Row]],
) -> None:
    work, rows = step
    launches, fields = run(work, rows)
    seen = [np.zeros((query_len, seq_len), np.int32) for query_len, seq_len in rows]
    starts = np.cumsum([0] + [query_len for query_len, _ in rows])
    waves = [("small", work.limits.small_tokens, 0)]
    waves += [("large", work.limits.large_tokens, wave) for wave in range(len(launches.waves))]
    for kind, size, wave in waves:
        parts: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        used = set[int]()
        for row, first, begin, end, slot in items(fields, f"{kind}_items", wave):
            query_len, seq_len = rows[row]
            tokens = min(size, query_len - first)
            assert 0 <= begin < end <= seq_len - query_len + first + tokens
            for token in range(first, first + tokens):
                seen[row][token, begin : min(end, seq_len - query_len + token + 1)] += 1
            if slot < 0:
                continue
            slots = set(range(slot, slot + tokens))
            assert not slots & used
            assert max(slots) < work.num_slots
            used |= slots
            parts.setdefault((starts[row] + first, tokens), []).append((begin, end, slot))
        merges = items(fields, f"{kind}_merges", wave)
        assert len(merges) == len(parts)
        for token, tokens, slot, num_parts in merges:
            ranges = sorted(parts[token, tokens])
            assert [at for _, _, at in ranges] == [slot + part * tokens for part in range(num_parts)]
            assert ranges[0][0] == 0
            assert all(left[1] == right[0] for left, right in itertools.pairwise(ranges))
    for row, (query_len, seq_len) in enumerate(rows):
        position = np.arange(seq_len - query_len, seq_len)
        assert (seen[row] == (np.arange(seq_len) <= position[:, None])).all()


@settings(max_examples=200, deadline=None)
@given(steps())
def test_a_row_is_cut_as_if_it_were_alone(step: tuple[WorkList, list[Row]]) -> None:
    work, rows = step
    launches, together = run(work, rows)

    def cuts(launches: Launches, fields: Fields, row: int) -> list[tuple[str, list[int], bool]]:
        found = [("small", item) for item in items(fields, "small_items")]
        for wave in range(len(launches.waves)):
            found += [("large", item) for item in items(fields, "large_items", wave)]
        return sorted((kind, item[1:4], item[4] < 0) for kind, item in found if item[0] == row)

    for number, row in enumerate(rows):
        assert cuts(launches, together, number) == cuts(*run(work, [row]), 0)


def test_decode_rows_are_cut_on_a_grid_that_doubles() -> None:
    work = make_work_list(parts=4, length=64)
    _, fields = run(work, [(1, 4), (1, 5), (1, 16), (1, 17), (1, 64)])
    ranges: dict[int, list[tuple[int, int]]] = {}
    for row, _, begin, end, _ in items(fields, "small_items"):
        ranges.setdefault(row, []).append((begin, end))
    assert ranges[0] == [(0, 4)]
    assert ranges[1] == [(0, 4), (4, 5)]
    assert ranges[2] == [(0, 4), (4, 8), (8, 12), (12, 16)]
    assert ranges[3] == [(0, 8), (8, 16), (16, 17)]
    assert ranges[4] == [(0, 16), (16, 32), (32, 48), (48, 64)]


def test_a_short_run_over_a_long_prefix_is_cut_and_a_long_run_is_not() -> None:
    work = make_work_list(parts=6, tokens=128, large=7)
    _, fields = run(work, [(10, 150), (60, 150)])
    rows = [row for row, *_ in items(fields, "large_items")]
    assert rows.count(0) == 2 * 3  # two tiles, three parts of 64 tokens each
    assert rows.count(1) == 9  # tiles


def test_rows_that_do_not_fit_in_scratch_together_take_turns() -> None:
    work = make_work_list(parts=6, rows=8, tokens=64)
    launches, fields = run(work, [(7, 200)] * 8)
    assert len(launches.waves) > 1
    assert all(launches.waves)
    assert sum(len(items(fields, "large_merges", wave)) for wave in range(len(launches.waves))) == 8


def test_the_longest_items_come_first() -> None:
    launches, fields = run(make_work_list(), [(60, 60)])
    lengths = [end - begin for _, _, begin, end, _ in items(fields, "large_items")]
    assert launches.waves == [False]
    assert lengths == sorted(lengths, reverse=True)


def test_scratch_does_not_grow_with_the_length_of_the_model() -> None:
    assert make_work_list(length=10_000).num_slots == make_work_list(length=1_000_000).num_slots == 2 * 7 * 6
