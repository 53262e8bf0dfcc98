"""Keys of blocks: what they depend on."""

from __future__ import annotations

from asyncllm.core.block_hash import hash_block, make_block_key, root_hash


def test_b74_the_chain_names_the_whole_prefix():
    root = root_hash(())
    first = make_block_key(root, [1, 2, 3, 4])
    second = make_block_key(first.hash, [5, 6, 7, 8])
    assert second.hash == hash_block(hash_block(root, first.token_ids), second.token_ids)
    assert second.hash != make_block_key(make_block_key(root, [1, 2, 3, 9]).hash, [5, 6, 7, 8]).hash
    assert len(second.hash) == 32


def test_equal_inputs_give_equal_keys():
    assert make_block_key(b"p", [1, 2]) == make_block_key(b"p", (1, 2))


def test_b90_extra_keys_change_the_root_by_tag_and_value():
    keys = [(), (("salt", "a"),), (("salt", "b"),), (("adapter", "a"),), (("salt", "a"), ("adapter", "a"))]
    assert len({root_hash(extra) for extra in keys}) == len(keys)


def test_b90_extra_keys_have_clear_borders_and_no_order():
    assert root_hash((("salt", "a4:saltb"),)) != root_hash((("salt", "a"), ("salt", "b")))
    assert root_hash((("a", "bc"),)) != root_hash((("ab", "c"),))
    assert root_hash((("a", "1"), ("b", "2"))) == root_hash((("b", "2"), ("a", "1")))


def test_token_ids_beyond_32_bits_have_a_key():
    assert make_block_key(b"p", [2**40, 0]).token_ids != make_block_key(b"p", [0, 2**8]).token_ids
