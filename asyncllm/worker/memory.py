"""How many KV blocks to allocate: pure arithmetic on what is free, what is wanted and what could ever be used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncllm.errors import InsufficientMemoryError

if TYPE_CHECKING:
    from asyncllm.config import EngineConfig

__all__ = ["KVCachePlan", "plan_kv_cache"]


@dataclass(frozen=True, kw_only=True)
class KVCachePlan:
    """Usable blocks (the null block comes on top) and the longest request that the engine takes."""

    num_blocks: int
    max_model_len: int


def plan_kv_cache(
    config: EngineConfig, *, model_max_len: int, bytes_per_block: int, free_bytes: int, cap_bytes: int | None
) -> KVCachePlan:
    """Return the blocks to allocate and the true ``max_model_len``.

    ``cache.num_blocks`` and ``cache.kv_cache_bytes`` are taken as they are. Otherwise the blocks are a share of
    ``free_bytes``, no more than ``cap_bytes``, and no more than ``max_num_seqs`` requests of full length could fill. A
    ``max_model_len`` that was not asked for is lowered to what the blocks hold. One that was asked for must fit, unless
    ``num_blocks`` was given too: then the caller chose the pool, and the scheduler ends what outgrows it.

    :raises InsufficientMemoryError: the blocks do not fit the free memory, or one request of the asked length does not
        fit the blocks.
    """
    cache, block_size = config.cache, config.cache.block_size
    wanted_len = config.model.max_model_len or model_max_len
    blocks_per_request = -(-wanted_len // block_size)
    if cache.num_blocks is not None:
        num_blocks = cache.num_blocks
        _check_fits(
            (num_blocks + 1) * bytes_per_block, free_bytes, f"num_blocks={num_blocks}", bytes_per_block, block_size
        )
    elif cache.kv_cache_bytes is not None:
        num_blocks = cache.kv_cache_bytes // bytes_per_block - 1
        _check_fits(
            cache.kv_cache_bytes, free_bytes, f"kv_cache_bytes={cache.kv_cache_bytes}", bytes_per_block, block_size
        )
    else:
        budget = int(free_bytes * cache.memory_fraction)
        budget = budget if cap_bytes is None else min(budget, cap_bytes)
        num_blocks = min(budget // bytes_per_block - 1, config.scheduler.max_num_seqs * blocks_per_request)
    num_blocks = max(num_blocks, 0)
    if num_blocks >= blocks_per_request:
        return KVCachePlan(num_blocks=num_blocks, max_model_len=wanted_len)
    if num_blocks and config.model.max_model_len is None:
        return KVCachePlan(num_blocks=num_blocks, max_model_len=num_blocks * block_size)
    if num_blocks and cache.num_blocks is not None:
        return KVCachePlan(num_blocks=num_blocks, max_model_len=wanted_len)
    raise _insufficient(
        f"one request of max_model_len={wanted_len} needs {blocks_per_request} KV blocks",
        needed_bytes=(blocks_per_request + 1) * bytes_per_block,
        available_bytes=(num_blocks + 1) * bytes_per_block if num_blocks else free_bytes,
        max_model_len_fit=num_blocks * block_size,
    )


def _check_fits(needed_bytes: int, free_bytes: int, option: str, bytes_per_block: int, block_size: int) -> None:
    if needed_bytes > free_bytes:
        fit = max(free_bytes // bytes_per_block - 1, 0) * block_size
        raise _insufficient(option, needed_bytes=needed_bytes, available_bytes=free_bytes, max_model_len_fit=fit)


def _insufficient(
    what: str, *, needed_bytes: int, available_bytes: int, max_model_len_fit: int
) -> InsufficientMemoryError:
    return InsufficientMemoryError(
        f"{what} ({needed_bytes / 2**20:.1f} MiB), but there is room for {available_bytes / 2**20:.1f} MiB; "
        f"the largest max_model_len that would fit is {max_model_len_fit}. Lower max_model_len, or give the KV cache "
        "more memory with kv_cache_bytes or memory_fraction.",
        phase="determine_num_blocks",
        max_model_len_fit=max_model_len_fit,
        needed_bytes=needed_bytes,
        available_bytes=available_bytes,
    )
