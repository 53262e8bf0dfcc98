"""How many bytes does one token cost on its way from the engine to the client?

    python benchmarks/wire_bytes.py [--streams 1 4 16 64 256 1024] [--plot FILE]

One step's message is encoded for so many streams as the engine encodes it, with request ids and token ids of
realistic size (ids past a million, a vocabulary of 150,000), without and with the scheduler's statistics. Also: time
to encode and to decode it, and for comparison the same step as one JSON object per token, as a server-sent event
would carry it.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

import msgspec
import report

from asyncllm.wire.codec import make_encoder, output_decoder
from asyncllm.wire.messages import EngineCoreOutputs, SchedulerStats

STATS = SchedulerStats(
    num_running=1024, num_free_blocks=100_000, num_steps=1_000_000, num_prefill_tokens=10**9, num_generated_tokens=10**9
)


def step_of(streams: int) -> EngineCoreOutputs:
    draw = random.Random(streams)
    first = 1_000_000
    return EngineCoreOutputs(list(range(first, first + streams)), [draw.randrange(150_000) for _ in range(streams)])


def best_us(function: Callable[[], Any], repeats: int = 200) -> float:
    best = float("inf")
    for _ in range(repeats):
        begun = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - begun)
    return best * 1e6


def measure(streams: int) -> dict[str, float]:
    encode, decode = make_encoder(), output_decoder()
    step = step_of(streams)
    message = encode(step)
    as_events = sum(
        len("data: " + json.dumps({"id": request, "token": token}) + "\n\n")
        for request, token in zip(step.request_ids, step.token_ids, strict=True)
    )
    return {
        "bytes_per_token": round(len(message) / streams, 2),
        "bytes_per_token_with_stats": round(len(encode(msgspec.structs.replace(step, stats=STATS))) / streams, 2),
        "bytes_per_token_as_events": round(as_events / streams, 2),
        "encode_us_per_step": round(best_us(lambda: encode(step)), 2),
        "decode_us_per_step": round(best_us(lambda: decode(message)), 2),
    }


def main() -> None:
    parser = report.parser(__doc__ or "", plot=True)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024])
    args = parser.parse_args()
    figures = {str(streams): measure(streams) for streams in args.streams}
    report.emit("wire_bytes", figures, args)
    if args.plot:
        names = ("bytes_per_token", "bytes_per_token_with_stats", "bytes_per_token_as_events")
        curves = {name: [row[name] for row in figures.values()] for name in names}
        labels = {"x_label": "streams", "y_label": "bytes per token", "title": "Bytes on the wire"}
        report.draw(args.plot, args.streams, curves, **labels)


if __name__ == "__main__":
    main()
