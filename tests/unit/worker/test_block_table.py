from __future__ import annotations

import numpy as np

from asyncllm.worker.block_table import BlockTable


def test_a_row_holds_one_block_more_than_the_longest_request_needs() -> None:
    assert BlockTable(1, max_model_len=16, block_size=4).max_blocks == 5
    assert BlockTable(1, max_model_len=15, block_size=4).max_blocks == 4


def test_put_append_clear() -> None:
    table = BlockTable(3, max_model_len=20, block_size=4)
    table.put(1, [7, 3])
    table.append(1, [9])
    table.append(1, [4, 5])
    assert table.block_ids(1) == [7, 3, 9, 4, 5]
    table.clear(1)
    assert table.block_ids(1) == []
    assert not table.ids.any()


def test_a_shorter_row_leaves_nothing_of_the_longer_one_before_it() -> None:
    table = BlockTable(1, max_model_len=20, block_size=4)
    table.put(0, [1, 2, 3, 4])
    table.put(0, [5])
    assert table.ids[0].tolist() == [5, 0, 0, 0, 0, 0]


def test_rows_are_as_wide_as_the_longest_of_them_and_a_copy() -> None:
    table = BlockTable(3, max_model_len=20, block_size=4)
    table.put(0, [1, 2, 3])
    table.put(2, [4])
    rows = table.rows(np.array([2, 0]))
    assert rows.tolist() == [[4, 0, 0], [1, 2, 3]]
    rows[:] = 0
    assert table.block_ids(0) == [1, 2, 3]
    assert table.rows(np.array([1])).tolist() == [[0]]


def test_kv_slots_are_block_times_size_plus_offset() -> None:
    table = BlockTable(2, max_model_len=20, block_size=4)
    table.put(0, [6, 2])
    table.put(1, [5])
    out = np.zeros(4, np.int64)
    table.kv_slots(np.array([0, 0, 1, 0]), np.array([3, 4, 1, 7]), out)
    assert out.tolist() == [27, 8, 21, 11]
