"""How near are the native CPU kernels to what this machine can do, and how far ahead of torch?

    python benchmarks/cpu_kernels.py [--shape smollm2] [--formats BF16 int8 Q4_1/int] [--kv-formats F32 BF16 F16 I8]
                                     [--threads 2] [--isa x86-64-v3]

The roofs come first, in the same run: multiply-adds in registers, and reading memory that no cache holds. Then, on
random weights in the shape of a model: all linear layers and the head for M rows (requests that decode, or tokens of a
prompt), paged attention for each format of keys and values, and whole decoder steps with the first of these. `roof` is
the share of the nearer roof; integer products (int8, int4, and stored blocks such as Q4_1/int) can pass that of fp32
multiply-adds. torch: the same linear layers through `torch.nn.functional.linear` in float32, and through the method
that the torch path of this package uses.
Each figure has the best and the median of its rounds: on a busy machine they differ, and the line holds the load.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import report
import torch
from torch.nn import functional

from asyncllm.kernels.base import Activation, Batch, Format, KvShape, Norm, NormKind, PackedWeight, Rotary
from asyncllm.kernels.decoder import DecoderSpec, LayerSpec
from asyncllm.kernels.native import NativeKernels
from asyncllm.layers.linear import Linear
from asyncllm.layers.linear_onednn import default_linear_method

BLOCK = 16
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int

    @property
    def linears(self) -> list[tuple[int, int]]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sizes = [(q + 2 * kv, self.hidden), (self.hidden, q), (2 * self.inner, self.hidden), (self.hidden, self.inner)]
        return sizes * self.layers


SHAPES = {
    "smollm2": Shape(30, 576, 9, 3, 64, 1536, 49152),
    "qwen2.5-0.5b": Shape(24, 896, 14, 2, 64, 4864, 151936),
    "tiny": Shape(2, 64, 4, 2, 16, 96, 512),
}


class Storage(NamedTuple):
    """How weights are stored and multiplied."""

    format: Format
    integer: bool = False

    @classmethod
    def of(cls, name: str) -> Storage:
        if name in ("int8", "int4"):
            return cls(Format.Q8_0 if name == "int8" else Format.Q4_1, True)
        return cls(Format[name.removesuffix("/int")], name.endswith("/int"))


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.kernels = NativeKernels(args.threads, args.isa)
        self.shape = SHAPES[args.shape]
        self.seconds = args.seconds
        self.roofs = self.measure_roofs()

    def times(self, call: Callable[[], Any]) -> dict[str, float]:
        """Return best and median milliseconds of ``call``, repeated for the wanted time."""
        call()
        taken: list[float] = []
        begun = time.perf_counter()
        while len(taken) < 3 or time.perf_counter() - begun < self.seconds:
            start = time.perf_counter()
            call()
            taken.append(1e3 * (time.perf_counter() - start))
        return {"ms": round(min(taken), 4), "median_ms": round(report.quantile(taken, 0.5), 4)}

    def measure_roofs(self) -> dict[str, float]:
        dll, pool = self.kernels.dll, self.kernels.pool.handle
        counted: list[int] = []
        adding = self.times(lambda: counted.append(dll.allm_probe_multiply_add(pool, 1_000_000)))
        memory = torch.zeros(1 << 27)  # 512 MiB
        reading = self.times(lambda: dll.allm_probe_read(pool, memory.data_ptr(), memory.nbytes))
        found = {"gflops": counted[-1] / 1e6 / adding["ms"], "gbytes_per_s": memory.nbytes / 1e6 / reading["ms"]}
        return {name: round(value, 1) for name, value in found.items()}

    def against_roofs(self, call: Callable[[], Any], operations: float, num_bytes: float) -> dict[str, float]:
        found = self.times(call)
        gflops, gbytes = operations / 1e6 / found["ms"], num_bytes / 1e6 / found["ms"]
        share = max(gflops / self.roofs["gflops"], gbytes / self.roofs["gbytes_per_s"])
        return found | {"gflops": round(gflops, 1), "gbytes_per_s": round(gbytes, 2), "roof": round(share, 3)}

    # ---- linear layers -----------------------------------------------------------------------------------------------

    def weight(self, n: int, k: int, storage: Storage) -> PackedWeight:
        stored_as = storage.format
        if not stored_as.is_quantized:
            return self.kernels.pack((torch.randn(n, k) * 0.02).to(stored_as.dtype), stored_as)
        blocks = torch.randint(0, 60, (n, stored_as.row_bytes(k)), dtype=torch.uint8)  # small fp16 scales
        return self.kernels.pack_blocks(blocks, stored_as, integer=storage.integer)

    def head(self, name: str) -> PackedWeight:
        storage = Storage.of("int8" if name == "int4" else name)  # as the engine does it
        return self.weight(self.shape.vocabulary, self.shape.hidden, storage)

    def linears(self, name: str, rows: list[int]) -> dict[str, Any]:
        weights = [self.weight(n, k, Storage.of(name)) for n, k in self.shape.linears]
        head = self.head(name)
        figures: dict[str, Any] = {}
        for m in rows:
            inputs = {weight.k: torch.randn(m, weight.k) for weight in weights}
            outputs = {weight.n: torch.empty(m, weight.n) for weight in weights}

            def stack(inputs: dict[int, torch.Tensor] = inputs, outputs: dict[int, torch.Tensor] = outputs) -> None:
                for weight in weights:
                    self.kernels.linear(inputs[weight.k], weight, out=outputs[weight.n])

            size = sum(weight.n * weight.k for weight in weights)
            num_bytes = sum(weight.data.numel() for weight in weights)
            figures[f"layers_{m}"] = self.against_roofs(stack, 2 * m * size, num_bytes)
            if m <= 32:
                x = inputs[self.shape.hidden]
                figures[f"head_{m}"] = self.against_roofs(
                    lambda x=x: self.kernels.head(x, head, with_logits=False),
                    2 * m * head.n * head.k,
                    head.data.numel(),
                )
        return figures

    def torch_linears(self, rows: list[int]) -> dict[str, Any]:
        figures: dict[str, Any] = {}
        method = default_linear_method(torch.float32, torch.device("cpu"))
        layers = [
            Linear(k, n, bias=False, dtype=torch.float32, device=torch.device("cpu")) for n, k in self.shape.linears
        ]
        for layer in layers:
            layer.weight.normal_()
        plain = [layer.weight for layer in layers]
        for layer in layers:
            method.prepare(layer)
        for m in rows:
            inputs = {layer.in_size: torch.randn(m, layer.in_size) for layer in layers}

            def by_linear(inputs: dict[int, torch.Tensor] = inputs) -> None:
                for weight in plain:
                    functional.linear(inputs[weight.shape[1]], weight)

            def by_method(inputs: dict[int, torch.Tensor] = inputs) -> None:
                for layer in layers:
                    method.apply(layer, inputs[layer.in_size])

            figures[f"linear_{m}"] = self.times(by_linear)
            figures[f"{type(method).__name__}_{m}"] = self.times(by_method)
        return figures

    # ---- attention and whole steps -----------------------------------------------------------------------------------

    def attention(self, cases: list[tuple[int, int, int]], kv_format: Format) -> dict[str, Any]:
        spec = self.spec("BF16", kv_format, num_layers=0)
        figures: dict[str, Any] = {}
        for count, new, length in cases:
            batch, num_blocks = self.batch(count, new, length)
            layers = [self.filled_cache(spec.kv_shape, num_blocks) for _ in range(4)]  # one after the other
            query = torch.randn(count * new, spec.num_heads, spec.head_dim)
            turn = iter(range(1 << 60))
            pairs = count * (new * (length - new) + new * (new + 1) / 2)
            num_bytes = (num_blocks - 1) * self.kernels.kv_block_bytes(spec.kv_shape)
            figures[f"{count}x{new}_of_{length}"] = self.against_roofs(
                lambda layers=layers, batch=batch, query=query, turn=turn: self.kernels.attention(
                    spec.kv_shape, layers[next(turn) % 4], batch, query, scale=0.1
                ),
                4 * pairs * spec.num_heads * spec.head_dim,
                num_bytes,
            )
        return figures

    def filled_cache(self, shape: KvShape, num_blocks: int) -> torch.Tensor:
        """Return one layer's cache with random keys and values in every slot but those of the null block."""
        cache = self.kernels.allocate_kv(shape, num_blocks)
        slots = np.arange(shape.block_size, num_blocks * shape.block_size)
        key, value = torch.randn(2, len(slots), shape.num_kv_heads, shape.head_dim)
        nothing = np.zeros(1, np.int32)
        batch = Batch(slots, slots * 0, slots, nothing, nothing, nothing[:, None])
        self.kernels.rotate_and_write(shape, cache, batch, None, key, value)
        return cache

    def steps(self, cases: list[tuple[int, int, int]], name: str, kv_format: Format) -> dict[str, Any]:
        spec = self.spec(name, kv_format, num_layers=self.shape.layers)
        decoder = self.kernels.make_decoder(spec)
        figures: dict[str, Any] = {}
        for count, new, length in cases:
            batch, num_blocks = self.batch(count, new, length)
            caches = [self.kernels.allocate_kv(spec.kv_shape, num_blocks) for _ in spec.layers]
            last = batch.query_start[1:] - 1
            found = self.times(
                lambda batch=batch, caches=caches, last=last: decoder.step(batch, caches, last, with_logits=False)
            )
            found["tokens_per_s"] = round(1e3 * count * new / found["ms"], 1)
            found["median_tokens_per_s"] = round(1e3 * count * new / found["median_ms"], 1)
            figures[f"{count}x{new}_of_{length}"] = found
        return figures

    def batch(self, count: int, new: int, length: int) -> tuple[Batch, int]:
        """Return ``count`` rows with ``new`` tokens at the end of ``length``, over scattered blocks."""
        per_row = -(-length // BLOCK)
        table = (np.random.permutation(count * per_row) + 1).reshape(count, per_row).astype(np.int32)
        positions = np.arange(length - new, length)
        slots = table[:, positions // BLOCK] * BLOCK + positions % BLOCK
        batch = Batch(
            token_ids=np.random.randint(0, self.shape.vocabulary, count * new),
            positions=np.tile(positions, count).astype(np.int64),
            slot_mapping=slots.reshape(-1).astype(np.int64),
            query_start=(np.arange(count + 1) * new).astype(np.int32),
            seq_lens=np.full(count, length, np.int32),
            block_table=table,
        )
        return batch, count * per_row + 1

    def spec(self, name: str, kv_format: Format, *, num_layers: int) -> DecoderSpec:
        shape, storage = self.shape, Storage.of(name)
        q, kv, hidden = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.hidden
        norm = Norm(kind=NormKind.RMS, weight=torch.ones(hidden), eps=1e-5)
        angles = torch.outer(torch.arange(9000.0), 1e4 ** -torch.linspace(0, 1, shape.head_dim // 2))
        rotary = Rotary(cos=angles.cos(), sin=angles.sin())
        layers = [
            LayerSpec(
                attention_norm=norm,
                q=self.weight(q, hidden, storage),
                k=self.weight(kv, hidden, storage),
                v=self.weight(kv, hidden, storage),
                o=self.weight(hidden, q, storage),
                mlp_norm=norm,
                gate=self.weight(shape.inner, hidden, storage),
                up=self.weight(shape.inner, hidden, storage),
                down=self.weight(hidden, shape.inner, storage),
                rotary=rotary,
                attention_scale=shape.head_dim**-0.5,
            )
            for _ in range(num_layers)
        ]
        head = self.head(name)
        return DecoderSpec(
            hidden_size=hidden,
            num_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            block_size=BLOCK,
            kv_format=kv_format,
            activation=Activation.SILU,
            embedding=head,
            layers=layers,
            final_norm=norm,
            head=head,
        )


def case(text: str) -> tuple[int, int, int]:
    """Read ``REQUESTSxNEW@LENGTH``."""
    rows, _, length = text.partition("@")
    count, _, new = rows.partition("x")
    return int(count), int(new), int(length)


def main() -> None:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--shape", choices=list(SHAPES), default="smollm2")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--isa", help="x86-64-v3, x86-64-v4 …; default: the best one here")
    parser.add_argument("--formats", nargs="+", default=["BF16", "F32", "Q8_0", "Q4_1", "int8", "int4", "Q4_1/int"])
    parser.add_argument("--kv-formats", nargs="+", default=["F32", "BF16", "F16", "I8"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 512])
    decode = ["1x1@128", "8x1@128", "32x1@128", "1x1@1024", "8x1@1024", "32x1@1024"]
    parser.add_argument("--cases", type=case, nargs="+", default=[case(text) for text in [*decode, "1x512@512"]])
    long = ["1x1@8192", "1x512@512", "1x512@2048"]
    parser.add_argument("--attention-cases", type=case, nargs="+", default=[case(text) for text in [*decode, *long]])
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each figure")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    bench = Bench(args)
    figures: dict[str, Any] = {"kernels": bench.kernels.description, "shape": args.shape, "roofs": bench.roofs}
    figures["linear"] = {name: bench.linears(name, args.rows) for name in args.formats}
    figures["torch"] = bench.torch_linears(args.rows)
    figures["attention"] = {name: bench.attention(args.attention_cases, Format[name]) for name in args.kv_formats}
    kv_format = Format[args.kv_formats[0]]
    figures["step"] = {name: bench.steps(args.cases, name, kv_format) for name in args.formats}
    report.emit("cpu_kernels", figures, args)


if __name__ == "__main__":
    main()
