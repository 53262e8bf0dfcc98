"""A whole decoder in one call: the bits of its operators in sequence, equal to torch, and blind to its neighbours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from asyncllm.kernels.base import Activation, Batch, Format, Kernels, Norm, NormKind, Rotary
from asyncllm.kernels.composed_decoder import ComposedDecoder
from asyncllm.kernels.decoder import Decoder, DecoderSpec, LayerSpec
from asyncllm.kernels.native import NativeKernels
from asyncllm.kernels.reference import TorchKernels
from tests.unit.kernels.batches import batch_over, make_batch

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCABULARY, BLOCK = 72, 6, 2, 16, 100, 203, 16


class Maker:
    """Makes the parts of a decoder; equal for equal seeds, whatever kernels pack them."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.generator = torch.Generator().manual_seed(1)

    def values(self, *shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=self.generator) * 0.15).bfloat16().float()

    def weight(self, n: int, k: int, *, bias: bool = False) -> Any:
        return self.kernels.pack(self.values(n, k), bias=self.values(n) if bias else None)

    def norm(self, n: int, kind: NormKind = NormKind.RMS) -> Norm:
        bias = self.values(n) if kind is NormKind.LAYER else None
        return Norm(kind=kind, weight=1 + self.values(n), bias=bias, eps=1e-5)

    def layer(self, *, bias: bool = False, kind: NormKind = NormKind.RMS, gated: bool = True, **more: Any) -> LayerSpec:
        q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        return LayerSpec(
            attention_norm=self.norm(HIDDEN, kind),
            q=self.weight(q, HIDDEN, bias=bias),
            k=self.weight(kv, HIDDEN, bias=bias),
            v=self.weight(kv, HIDDEN, bias=bias),
            o=self.weight(HIDDEN, q, bias=bias),
            mlp_norm=self.norm(HIDDEN, kind),
            gate=self.weight(INNER, HIDDEN) if gated else None,
            up=self.weight(INNER, HIDDEN, bias=bias),
            down=self.weight(HIDDEN, INNER, bias=bias),
            attention_scale=HEAD_DIM**-0.5,
            **more,
        )

    def spec(self, layers: list[LayerSpec], **more: Any) -> DecoderSpec:
        table = self.weight(VOCABULARY, HIDDEN)
        parts = {"embedding": table, "head": table, "final_norm": self.norm(HIDDEN), "activation": Activation.SILU}
        sizes = {"hidden_size": HIDDEN, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
        return DecoderSpec(**{**sizes, "block_size": BLOCK, "layers": layers, **parts, **more})


def rotary(base: float) -> Rotary:
    angles = torch.outer(torch.arange(600.0), base ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    return Rotary(cos=angles.cos(), sin=angles.sin())


def llama(maker: Maker) -> DecoderSpec:
    return maker.spec([maker.layer(rotary=rotary(10000.0)) for _ in range(3)])


def qwen(maker: Maker) -> DecoderSpec:
    head = maker.weight(VOCABULARY, HIDDEN)
    return maker.spec([maker.layer(bias=True, rotary=rotary(1e6)) for _ in range(2)], head=head)


def gemma(maker: Maker) -> DecoderSpec:
    """Windows and two rotary bases, norms of query and key heads, norms after attention and MLP, a scaled embedding."""
    layers = [
        maker.layer(
            rotary=rotary(base),
            window=window,
            q_norm=maker.norm(HEAD_DIM),
            k_norm=maker.norm(HEAD_DIM),
            attention_out_norm=maker.norm(HIDDEN),
            mlp_out_norm=maker.norm(HIDDEN),
        )
        for base, window in ((10000.0, 40), (1e6, None))
    ]
    return maker.spec(layers, activation=Activation.GELU_TANH, embedding_scale=HIDDEN**0.5)


def opt(maker: Maker, *, post_norm: bool = False) -> DecoderSpec:
    layers = [maker.layer(bias=True, kind=NormKind.LAYER, gated=False) for _ in range(2)]
    return maker.spec(
        layers,
        activation=Activation.RELU,
        position_embedding=maker.values(600, HIDDEN),
        position_offset=2,
        post_norm=post_norm,
        final_norm=Norm() if post_norm else maker.norm(HIDDEN, NormKind.LAYER),
    )


def opt_350m(maker: Maker) -> DecoderSpec:
    spec, narrow = opt(maker, post_norm=True), 24
    table = maker.weight(VOCABULARY, narrow)
    project = {"project_in": maker.weight(HIDDEN, narrow), "project_out": maker.weight(narrow, HIDDEN)}
    return replace(spec, embedding=table, head=table, **project)


def no_layers(maker: Maker) -> DecoderSpec:
    return maker.spec([])


MODELS = [llama, qwen, gemma, opt, opt_350m, no_layers]
ROWS = [(150, 150), (1, 70), (30, 300), (1, 1)]


def with_tokens(batch: Batch) -> Batch:
    generator = np.random.default_rng(2)
    return batch._replace(token_ids=generator.integers(0, VOCABULARY, len(batch.positions)))


def step(kernels: Kernels, decoder: Decoder, batch: Batch, num_blocks: int, **wanted: bool) -> Any:
    caches = [kernels.allocate_kv(decoder.spec.kv_shape, num_blocks) for _ in decoder.spec.layers]
    return decoder.step(batch, caches, batch.query_start[1:] - 1, **wanted)


@pytest.mark.parametrize("model", MODELS)
def test_one_call_gives_the_bits_of_its_operators_and_equals_torch(
    kernels: NativeKernels, reference: TorchKernels, model: Any
) -> None:
    batch, num_blocks = make_batch(ROWS, BLOCK)
    batch = with_tokens(batch)
    spec = model(Maker(kernels))
    found = step(kernels, kernels.make_decoder(spec), batch, num_blocks, with_hidden=True)
    composed = step(kernels, ComposedDecoder(kernels, spec), batch, num_blocks, with_hidden=True)
    for name in ("hidden", "logits", "best"):
        assert torch.equal(getattr(found, name), getattr(composed, name)), name
    expected = step(reference, reference.make_decoder(model(Maker(reference))), batch, num_blocks, with_hidden=True)
    torch.testing.assert_close(found.hidden, expected.hidden, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("model", MODELS[:5])
def test_logits_do_not_depend_on_chunks_neighbours_or_threads(
    kernels: NativeKernels, alone: NativeKernels, model: Any
) -> None:
    lengths, table = (290, 70, 33), np.arange(1, 91, dtype=np.int32).reshape(3, 30)
    tokens = np.random.default_rng(3).integers(0, VOCABULARY, (3, 300))
    spec = model(Maker(kernels))

    def run(each: NativeKernels, rows: list[int], chunks: list[int]) -> list[torch.Tensor]:
        """Prefill ``rows`` together in chunks of these sizes, round and round; return the logits of every token."""
        decoder = each.make_decoder(spec)
        caches = [each.allocate_kv(spec.kv_shape, 100) for _ in spec.layers]
        done, found, turn = dict.fromkeys(rows, 0), {row: [] for row in rows}, 0
        while any(done[row] < lengths[row] for row in rows):
            going = [row for row in rows if done[row] < lengths[row]]
            ends = [min(done[row] + chunks[turn % len(chunks)], lengths[row]) for row in going]
            shape = [(end - done[row], end) for row, end in zip(going, ends, strict=True)]
            batch = batch_over(shape, table[going], BLOCK)
            ids = [tokens[row, done[row] : end] for row, end in zip(going, ends, strict=True)]
            batch = batch._replace(token_ids=np.concatenate(ids))
            logits = decoder.step(batch, caches, np.arange(len(batch.token_ids), dtype=np.int32)).logits
            for row, part in zip(going, torch.split(logits, [new for new, _ in shape]), strict=True):
                found[row].append(part)
            done.update(zip(going, ends, strict=True))
            turn += 1
        return [torch.cat(found[row]) for row in rows]

    whole = run(kernels, [0, 1, 2], [290])
    for each, rows, chunks in (
        (kernels, [0, 1, 2], [7]),
        (alone, [0, 1, 2], [64]),
        (kernels, [2, 0], [1, 40, 3]),
        (alone, [1], [70]),
        (kernels, [1], [1]),
    ):
        for row, logits in zip(rows, run(each, rows, chunks), strict=True):
            assert torch.equal(logits, whole[row]), (rows, chunks, row)


def test_only_what_is_asked_for_is_returned(kernels: NativeKernels) -> None:
    batch, num_blocks = make_batch([(5, 5), (2, 9)], BLOCK)
    decoder = kernels.make_decoder(llama(Maker(kernels)))
    all_ = step(kernels, decoder, batch, num_blocks, with_hidden=True)
    greedy = step(kernels, decoder, batch, num_blocks, with_logits=False)
    assert greedy.hidden is None
    assert greedy.logits is None
    assert torch.equal(greedy.best, all_.best)
    hidden = step(kernels, decoder, batch, num_blocks, with_hidden=True, with_logits=False, with_best=False)
    assert torch.equal(hidden.hidden, all_.hidden)
    assert hidden.best is None


def test_a_step_in_which_nobody_samples_still_writes_keys(kernels: NativeKernels) -> None:
    batch, num_blocks = make_batch([(20, 20)], BLOCK)
    decoder = kernels.make_decoder(llama(Maker(kernels)))
    caches = [kernels.allocate_kv(decoder.spec.kv_shape, num_blocks) for _ in range(3)]
    output = decoder.step(batch, caches, np.empty(0, np.int32))
    assert output.best is not None
    assert output.best.shape == (0,)
    assert all(cache.any() for cache in caches)


@pytest.mark.parametrize("kv_format", [Format.BF16, Format.F16, Format.I8], ids=lambda f: f.name)
def test_narrow_caches_stay_near(kernels: NativeKernels, kv_format: Format) -> None:
    batch, num_blocks = make_batch(ROWS, BLOCK)
    batch = with_tokens(batch)
    spec = llama(Maker(kernels))
    exact = step(kernels, kernels.make_decoder(spec), batch, num_blocks)
    narrow = step(kernels, kernels.make_decoder(replace(spec, kv_format=kv_format)), batch, num_blocks)
    torch.testing.assert_close(narrow.logits, exact.logits, rtol=0.1, atol=0.05)


def test_bad_steps_are_refused(kernels: NativeKernels, reference: TorchKernels) -> None:
    batch, num_blocks = make_batch([(5, 5)], BLOCK)
    for each in (kernels, reference):
        decoder = each.make_decoder(llama(Maker(each)))
        with pytest.raises(ValueError, match=r"range|rows"):
            step(each, decoder, batch._replace(token_ids=np.full(5, VOCABULARY)), num_blocks)
        caches = [each.allocate_kv(decoder.spec.kv_shape, num_blocks) for _ in range(3)]
        with pytest.raises(ValueError, match="out of range"):
            decoder.step(batch, caches, np.array([5], np.int32))


def test_contradicting_sizes_are_named(kernels: NativeKernels) -> None:
    spec = llama(Maker(kernels))
    with pytest.raises(ValueError, match="layer 0: k is 32 x 72, not 48 x 72"):
        kernels.make_decoder(replace(spec, num_kv_heads=3))
    with pytest.raises(ValueError, match="embedding gives 8"):
        kernels.make_decoder(replace(spec, embedding=kernels.pack(torch.randn(VOCABULARY, 8))))
