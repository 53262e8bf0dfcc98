"""The flash-attn packages behind one interface: FlashAttention-2, -3 and -4, each imported when it is asked for.

What each takes was read in flash-attn 2.8.3.post2 (``flash_attn/flash_attn_interface.py``, ``csrc/flash_attn/
flash_api.cpp``; ``hopper/`` for 3) and in flash-attn-4 4.0.0b36 (``flash_attn/cute/interface.py``).

Invariant: what a row gets depends on its own lengths, and on the step's limits, only. So the parts into which keys are
cut for few rows are never left to the packages, which choose their number by how many rows there are.
"""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from asyncllm.platforms import cuda

if TYPE_CHECKING:
    from asyncllm.attention.base import AttentionSpec, StepLimits

__all__ = ["PACKAGES", "Package", "PrefillRows", "Rows", "capability_of", "choose_block_size", "choose_package"]

E = TypeVar("E", int, None)

MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8
WHOLE_PAGES = 64
"""From this size on, a page may be read whole, past a row's end: there a NaN of an earlier owner is still a NaN."""
TOKENS_PER_PART = 2048
MAX_PARTS = 16


@dataclass(kw_only=True)
class Rows:
    """The rows of one call on the device; all static while a graph is replayed."""

    tables: torch.Tensor  # [B, max_blocks] int32
    seq_lens: torch.Tensor  # [B] int32


@dataclass(kw_only=True)
class PrefillRows(Rows):
    """Rows of more than one new token."""

    query_start: torch.Tensor  # [B + 1] int32
    key_start: torch.Tensor  # [B + 1] int32: the sums of seq_lens
    max_query_len: int


class Package(ABC):
    """One version: what it can serve, and its calls. ``keys`` and ``values`` are the pages [N, S, KV, D]."""

    name: ClassVar[str]
    module: ClassVar[str]
    distribution: ClassVar[str]
    functions: ClassVar[dict[str, tuple[str, ...]]]
    """The functions that are called, with parameters that an older version lacks."""
    block_size: ClassVar[int] = 16
    """What to take where nobody asked for one."""

    def __init__(self, limits: StepLimits) -> None:
        self.limits = limits

    @classmethod
    def why_not(cls, spec: AttentionSpec, capability: tuple[int, int]) -> str | None:
        """Return why it cannot serve ``spec`` on such a device, ``None`` if it can. Imports it last."""
        return cls.why_not_device(spec, capability) or cls.why_not_block_size(spec.block_size) or cls.why_not_import()

    @classmethod
    @abstractmethod
    def why_not_device(cls, spec: AttentionSpec, capability: tuple[int, int]) -> str | None:
        """Return why it has no kernel for this device and head dim."""

    @classmethod
    def why_not_block_size(cls, block_size: int) -> str | None:
        """Return why it cannot read blocks of this size."""
        if block_size >= WHOLE_PAGES:
            return f"block_size is {block_size}; below {WHOLE_PAGES} it never reads past the end of a row"
        return None

    @classmethod
    def why_not_import(cls) -> str | None:
        """Return why the package cannot be used."""
        try:
            module = importlib.import_module(cls.module)
        except ModuleNotFoundError as error:
            if error.name is not None and cls.module.startswith(error.name):
                return f"{cls.distribution} is not installed"
            return f"{cls.module} cannot be imported: {error}"
        except (ImportError, OSError) as error:  # built for another torch, for one
            return f"{cls.module} cannot be imported: {error}"
        for name, parameters in cls.functions.items():
            function = getattr(module, name, None)
            if function is None:
                return f"{cls.module} has no {name}: {cls.distribution} is not installed"
            known = inspect.signature(function).parameters
            if missing := [parameter for parameter in parameters if parameter not in known]:
                return f"{cls.module}.{name} is too old: it does not take {missing[0]!r}"
        return None

    @abstractmethod
    def decode(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: Rows,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Return attention [B, H, D] of one ``query`` [B, H, D] for each row; may be captured in a graph."""

    @abstractmethod
    def prefill(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: PrefillRows,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Return attention [T, H, D] of ``query`` [T, H, D], of which each row has more than one."""


class FlashAttention2(Package):
    """``flash_attn``: Ampere and newer; pages of 256.

    ``flash_attn_varlen_func`` takes the lengths of keys from sums, also where there is a block table; it never cuts
    keys for rows of more than one query. ``flash_attn_with_kvcache`` cuts them into as many equal parts of the block
    table's width as it is told.
    """

    name = "flash-attn 2"
    module = "flash_attn"
    distribution = "flash-attn"
    functions: ClassVar = {
        "flash_attn_varlen_func": ("block_table", "window_size"),
        "flash_attn_with_kvcache": ("block_table", "num_splits", "window_size"),
    }
    block_size = 256

    def __init__(self, limits: StepLimits) -> None:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        super().__init__(limits)
        self._with_kvcache, self._varlen = flash_attn_with_kvcache, flash_attn_varlen_func
        self.num_parts = min(max(limits.max_model_len // TOKENS_PER_PART, 1), MAX_PARTS)

    @classmethod
    def why_not_device(cls, spec: AttentionSpec, capability: tuple[int, int]) -> str | None:
        return None if capability >= cuda.MIN_CAPABILITY else f"it needs {_dotted(cuda.MIN_CAPABILITY)} or newer"

    @classmethod
    def why_not_block_size(cls, block_size: int) -> str | None:
        if block_size % cls.block_size:
            return f"block_size is {block_size}; it must be a multiple of {cls.block_size}"
        return None

    def decode(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: Rows,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        return self._with_kvcache(
            query.unsqueeze(1),
            keys,
            values,
            cache_seqlens=rows.seq_lens,
            block_table=rows.tables,
            softmax_scale=scale,
            causal=True,
            window_size=_window(window, -1),
            num_splits=self.num_parts,
        ).squeeze(1)

    def prefill(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: PrefillRows,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        return self._varlen(
            query,
            keys,
            values,
            rows.query_start,
            rows.key_start,
            rows.max_query_len,
            self.limits.max_model_len,
            softmax_scale=scale,
            causal=True,
            window_size=_window(window, -1),
            block_table=rows.tables,
        )


class OneFunction(Package):
    """A package of which one function serves both, told of sums of the query lengths where these are not all one."""

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: Rows,
        scale: float,
        window: int | None,
        **more: Any,
    ) -> torch.Tensor:
        """Call it."""

    def max_query_len(self, rows: PrefillRows) -> int:
        """Return what it is told of the longest row."""
        return rows.max_query_len

    def decode(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: Rows,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        return self.attend(query.unsqueeze(1), keys, values, rows, scale, window).squeeze(1)

    def prefill(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: PrefillRows,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        more = {"cu_seqlens_q": rows.query_start, "max_seqlen_q": self.max_query_len(rows)}
        return self.attend(query, keys, values, rows, scale, window, **more)


class FlashAttention3(OneFunction):
    """``flash_attn_interface``: Hopper.

    Cut into parts, the number for each row would depend on the other rows' lengths (``hopper/
    flash_prepare_scheduler.cu``): one part it is.
    """

    name = "flash-attn 3"
    module = "flash_attn_interface"
    distribution = "flash-attn 3 (hopper/)"
    functions: ClassVar = {"flash_attn_with_kvcache": ("page_table", "cu_seqlens_q", "max_seqlen_q", "num_splits")}

    def __init__(self, limits: StepLimits) -> None:
        from flash_attn_interface import flash_attn_with_kvcache

        super().__init__(limits)
        self._with_kvcache = flash_attn_with_kvcache

    @classmethod
    def why_not_device(cls, spec: AttentionSpec, capability: tuple[int, int]) -> str | None:
        return None if capability[0] == 9 else f"it needs 9.0 (Hopper), not {_dotted(capability)}"

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: Rows,
        scale: float,
        window: int | None,
        **more: Any,
    ) -> torch.Tensor:
        return self._with_kvcache(
            query,
            keys,
            values,
            cache_seqlens=rows.seq_lens,
            page_table=rows.tables,
            softmax_scale=scale,
            causal=True,
            window_size=_window(window, -1),
            num_splits=1,
            **more,
        )


class FlashAttention4(OneFunction):
    """``flash_attn.cute``: Hopper and Blackwell of data centres; compiled when first called.

    On Hopper it cannot cut keys into parts. How long the longest row is may choose its tiles, so it is told the limit.
    """

    name = "flash-attn 4"
    module = "flash_attn.cute"
    distribution = "flash-attn-4"
    functions: ClassVar = {"flash_attn_varlen_func": ("page_table", "seqused_k", "num_splits", "max_seqlen_q")}

    def __init__(self, limits: StepLimits) -> None:
        from flash_attn.cute import flash_attn_varlen_func

        super().__init__(limits)
        self._varlen = flash_attn_varlen_func

    @classmethod
    def why_not_device(cls, spec: AttentionSpec, capability: tuple[int, int]) -> str | None:
        if capability[0] not in (9, 10, 11):
            return f"with paged keys and values it needs 9.0, 10.x or 11.x, not {_dotted(capability)}"
        if capability[0] > 9 and spec.head_dim > 128:
            return f"the head dim is {spec.head_dim}; on {_dotted(capability)} it takes 128 at most"
        return None

    def max_query_len(self, rows: PrefillRows) -> int:
        return self.limits.max_num_batched_tokens

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: Rows,
        scale: float,
        window: int | None,
        **more: Any,
    ) -> torch.Tensor:
        out, _ = self._varlen(
            query,
            keys,
            values,
            seqused_k=rows.seq_lens,
            page_table=rows.tables,
            softmax_scale=scale,
            causal=True,
            window_size=_window(window, None),
            num_splits=1,
            **more,
        )
        return out


PACKAGES: tuple[type[Package], ...] = (FlashAttention3, FlashAttention4, FlashAttention2)
"""Best first, where several can serve."""


def choose_package(spec: AttentionSpec) -> tuple[type[Package] | None, str]:
    """Return the first package that can serve ``spec``, and the reasons against those before it."""
    if (reason := _why_none(spec)) is not None:
        return None, reason
    capability = capability_of(spec.device)
    if capability is None:
        return None, f"it needs a CUDA device, not {spec.device.type!r}"
    reasons: list[str] = []
    for package in PACKAGES:
        reason = package.why_not(spec, capability)
        if reason is None:
            return package, "; ".join(reasons)
        reasons.append(f"{package.name}: {reason}")
    return None, "; ".join(reasons)


def choose_block_size(spec: AttentionSpec) -> int:
    """Return the block size that the first package which can serve ``spec`` prefers; else the one in ``spec``."""
    for package in PACKAGES:
        wanted = replace(spec, block_size=package.block_size)
        if choose_package(wanted)[0] is package:
            return package.block_size
    return spec.block_size


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of ``device``, ``None`` if it is no CUDA device."""
    if device.type != "cuda":
        return None
    return cuda.probe().gpus[device.index or 0].capability


def _why_none(spec: AttentionSpec) -> str | None:
    """Return what no version can serve."""
    if spec.num_heads % spec.num_kv_heads:
        return f"{spec.num_heads} query heads are not a multiple of {spec.num_kv_heads} key/value heads"
    if spec.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype is {str(spec.dtype).removeprefix('torch.')!r}; it computes in bfloat16 or float16"
    if not spec.kv_format.is_plain or spec.kv_format.dtype != spec.dtype:
        return f"kv_cache_dtype is {spec.kv_cache_dtype!r}; it reads keys and values that are stored as dtype"
    if spec.head_dim > MAX_HEAD_DIM or spec.head_dim % HEAD_DIM_MULTIPLE:
        return f"the head dim is {spec.head_dim}; it takes multiples of {HEAD_DIM_MULTIPLE} up to {MAX_HEAD_DIM}"
    return None


def _window(window: int | None, endless: E) -> tuple[int | E, int | E]:
    """Return how many tokens before and after its own a query sees, as the packages want it."""
    return (endless, endless) if window is None else (window - 1, 0)


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
