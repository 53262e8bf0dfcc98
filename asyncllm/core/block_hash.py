"""Names for the content of full KV blocks.

A block's hash covers its token ids and its parent's hash, so it names the whole prefix that ends with it. The chain
starts from a root made of *tagged* extra keys: whatever else the KV of a prefix depends on, such as a cache salt or an
adapter. Equal prefixes under different keys never meet, and a salt cannot be mistaken for an adapter of the same name.

Invariant: nobody trusts a hash alone. A key carries its token ids, and :mod:`asyncllm.core.block_pool` compares them
and the parent on a hit, so a clash costs a miss and never takes a wrong block.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from hashlib import sha256

import msgspec

__all__ = ["BlockKey", "ExtraKeys", "HashFunction", "extra_keys", "hash_block", "make_block_key", "root_hash"]

ExtraKeys = tuple[tuple[str, str], ...]
"""(tag, value) pairs, such as ``("salt", "tenant-7")``."""

HashFunction = Callable[[bytes, bytes], bytes]
"""``hash(parent, content)``; tests put a poor one here."""


def extra_keys(cache_salt: str | None) -> ExtraKeys:
    """Return the extra keys of a request."""
    return () if cache_salt is None else (("salt", cache_salt),)


class BlockKey(msgspec.Struct, frozen=True, gc=False):
    """The hash of a full block and its token ids as 64-bit machine integers."""

    hash: bytes
    token_ids: bytes


def hash_block(parent: bytes, content: bytes) -> bytes:
    """Return the SHA-256 of a parent's hash (a fixed 32 bytes, so the border is clear) and a block's content."""
    return sha256(parent + content).digest()


def root_hash(extra_keys: ExtraKeys, hash_function: HashFunction = hash_block) -> bytes:
    """Return the hash that the first block of a chain has as its parent."""
    fields = (field for pair in sorted(extra_keys) for field in pair)
    return hash_function(b"", b"".join(b"%d:%b" % (len(raw), raw) for raw in (field.encode() for field in fields)))


def make_block_key(parent: bytes, token_ids: Sequence[int], hash_function: HashFunction = hash_block) -> BlockKey:
    """Return the key of a full block of ``token_ids`` that follows the block (or root) hashed ``parent``."""
    content = array("q", token_ids).tobytes()
    return BlockKey(hash_function(parent, content), content)
