"""A whole decoder as one call into the native library per step."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import torch

from asyncllm.kernels.decoder import Decoder, DecoderSpec, LayerSpec, StepOutput
from asyncllm.kernels.library import CDecoder, CLayer, CRotary, CStepOutput
from asyncllm.kernels.native import address, aligned_zeros, c_linear, c_norm, c_rotary, check, make_c_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from asyncllm.kernels.base import Batch
    from asyncllm.kernels.native import NativeKernels

__all__ = ["NativeDecoder"]


class NativeDecoder(Decoder):
    """``spec`` as C structs that point into its tensors (kept alive by it), and a workspace that grows with steps."""

    def __init__(self, kernels: NativeKernels, spec: DecoderSpec) -> None:
        spec.check()
        self.spec = spec
        self._kernels = kernels
        self._layers = (CLayer * len(spec.layers))(*map(c_layer, spec.layers))
        self._decoder = c_decoder(spec, ctypes.addressof(self._layers))
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._caches: list[int] = []
        self._cache_pointers = (ctypes.c_void_p * len(spec.layers))()

    def step(
        self,
        batch: Batch,
        kv_caches: Sequence[torch.Tensor],
        sample_rows: npt.NDArray[np.int32],
        *,
        with_hidden: bool = False,
        with_logits: bool = True,
        with_best: bool = True,
    ) -> StepOutput:
        """Run all layers over the flat batch in one call."""
        num_tokens, num_samples = len(batch.token_ids), len(sample_rows)
        if sample_rows.dtype != np.int32:
            raise ValueError(f"sample_rows are int32, not {sample_rows.dtype}")
        if len(kv_caches) != len(self._layers):
            raise ValueError(f"there are {len(kv_caches)} caches for {len(self._layers)} layers")
        head = self.spec.head
        hidden = torch.empty(num_tokens, head.k) if with_hidden else None
        logits = torch.empty(num_samples, head.n) if with_logits else None
        best = torch.empty(num_samples, dtype=torch.int64) if with_best else None
        pointers = [tensor.data_ptr() if tensor is not None else None for tensor in (hidden, logits, best)]
        output = CStepOutput(address(sample_rows), num_samples, pointers[0], pointers[1], head.n, pointers[2])
        c_batch, workspace = make_c_batch(batch, num_tokens), self._reserve(num_tokens, num_samples)
        args = (ctypes.byref(c_batch), ctypes.byref(output), workspace)
        status = self._kernels.dll.allm_decoder_step(
            self._kernels.pool.handle, ctypes.byref(self._decoder), self._pointers_to(kv_caches), *args
        )
        check(status, "a token id or a sample row of the step is out of range")
        return StepOutput(hidden, logits, best)

    def _reserve(self, num_tokens: int, num_samples: int) -> int:
        wanted = self._kernels.dll.allm_decoder_workspace_bytes(ctypes.byref(self._decoder), num_tokens, num_samples)
        if wanted > self._workspace.numel():
            self._workspace = aligned_zeros(wanted)
        return self._workspace.data_ptr()

    def _pointers_to(self, kv_caches: Sequence[torch.Tensor]) -> ctypes.Array[ctypes.c_void_p]:
        addresses = [cache.data_ptr() for cache in kv_caches]
        if addresses != self._caches:
            self._caches = addresses
            self._cache_pointers[:] = addresses
        return self._cache_pointers


def c_layer(layer: LayerSpec) -> CLayer:
    """Return ``layer`` as the C interface takes it."""
    return CLayer(
        attention_norm=c_norm(layer.attention_norm),
        q=c_linear(layer.q),
        k=c_linear(layer.k),
        v=c_linear(layer.v),
        q_norm=c_norm(layer.q_norm),
        k_norm=c_norm(layer.k_norm),
        o=c_linear(layer.o),
        attention_out_norm=c_norm(layer.attention_out_norm),
        mlp_norm=c_norm(layer.mlp_norm),
        gate=c_linear(layer.gate),
        up=c_linear(layer.up),
        down=c_linear(layer.down),
        mlp_out_norm=c_norm(layer.mlp_out_norm),
        rotary=c_rotary(layer.rotary) if layer.rotary is not None else CRotary(),
        attention_scale=layer.attention_scale,
        window=layer.window or 0,
    )


def c_decoder(spec: DecoderSpec, layers: int) -> CDecoder:
    """Return ``spec`` as the C interface takes it; ``layers`` is where its layers lie."""
    positions = spec.position_embedding
    if positions is not None and (positions.dtype != torch.float32 or not positions.is_contiguous()):
        raise ValueError("position embeddings are contiguous float32")
    return CDecoder(
        num_layers=len(spec.layers),
        hidden_size=spec.hidden_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=spec.block_size,
        kv_format=spec.kv_format,
        activation=spec.activation,
        post_norm=spec.post_norm,
        position_offset=spec.position_offset,
        embedding_scale=spec.embedding_scale,
        embedding=c_linear(spec.embedding),
        position_embedding=positions.data_ptr() if positions is not None else None,
        project_in=c_linear(spec.project_in),
        project_out=c_linear(spec.project_out),
        final_norm=c_norm(spec.final_norm),
        head=c_linear(spec.head),
        layers=layers,
    )
