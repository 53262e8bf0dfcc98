"""Compile kernels for GPUs that are not there, and print what they use: run as a program, without the interpreter.

    python -m tests.support.compile_kernels fused sample

One line of JSON per kernel and architecture: name, registers, bytes of stack (where spilled registers go) and of shared
memory, as ``cuobjdump`` of triton's own wheel reads them from the machine code.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ARCHITECTURES = (80, 90)


def compile_kernel(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], architecture: int, **options: Any
) -> dict[str, int]:
    """Return the resources of ``kernel`` for ``sm_<architecture>``; pointers and strides are multiples of 16."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if name not in constants and (types[name].startswith("*") or "stride" in name or name == "vocabulary")
    }
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=aligned,
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    return read_resources(compiled.asm["cubin"])


def read_resources(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    assert found is not None, text
    return dict(zip(("registers", "stack", "shared"), map(int, found.groups()), strict=True))


def fused_kernels() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """Return name, kernel, types, constants and options of those in ``fused.py``, of sizes of real models."""
    from asyncllm.kernels.triton import fused

    def pointers(dtype: str, **others: str) -> dict[str, str]:
        names = ("out", "hidden", "update", "weight", "gate_up", "query", "heads", "cos", "sin", "cache")
        found = {f"{name}_ptr": f"*{dtype}" for name in names}
        found |= {"query_weight_ptr": f"*{dtype}", "key_weight_ptr": f"*{dtype}", "slots_ptr": "*i64", "eps": "fp32"}
        strides = ("hidden", "update", "gate_up", "heads", "cos", "sin")
        found |= {f"{name}_stride": "i32" for name in strides}
        found |= {f"cache_stride_{name}": "i32" for name in ("block", "offset", "head")}
        return found | {"cache_stride_kind": "i64"} | others

    norm = {"SIZE": 4096, "BLOCK": 4096, "ADD": True, "WIDE": False}
    heads = {"H": 32, "KV": 8, "D": 128, "BLOCK_SIZE": 16, "BLOCK_H": 16, "BLOCK_D": 64, "NORM": False, "WIDE": False}
    odd = {"H": 6, "KV": 2, "D": 80, "BLOCK_H": 16, "NORM": True, "WIDE": True}
    return [
        ("norm", fused.rms_norm_kernel, pointers("bf16"), norm, {"num_warps": 8}),
        ("norm fp16", fused.rms_norm_kernel, pointers("fp16"), norm | {"SIZE": 960, "BLOCK": 1024}, {"num_warps": 2}),
        (
            "norm wide",
            fused.rms_norm_kernel,
            pointers("bf16", weight_ptr="*fp32"),
            norm | {"SIZE": 5376, "BLOCK": 8192, "WIDE": True},
            {"num_warps": 16},
        ),
        ("silu", fused.gate_kernel, pointers("bf16"), {"SIZE": 14336, "BLOCK": 1024, "TANH": False}, {}),
        ("gelu", fused.gate_kernel, pointers("fp16"), {"SIZE": 6912, "BLOCK": 1024, "TANH": True}, {}),
        ("heads", fused.rotate_and_write_kernel, pointers("bf16"), heads, {}),
        ("heads fp32", fused.rotate_and_write_kernel, pointers("fp32", cache_ptr="*bf16"), heads, {}),
        (
            "heads normed",
            fused.rotate_and_write_kernel,
            pointers("bf16", query_weight_ptr="*fp32", key_weight_ptr="*fp32"),
            heads | odd,
            {},
        ),
    ]


def sample_kernels() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """Return the kernel in ``sample_kernels.py`` as :func:`fused_kernels` does, for a large vocabulary."""
    from asyncllm.kernels.triton.sample import DEPTH, LANES
    from asyncllm.kernels.triton.sample_kernels import draw_kernel

    floats = ("best", "logits", "temperature", "top_p", "min_p", "copied_values")
    types = {f"{name}_ptr": "*fp32" for name in floats} | {"number_ptr": "*fp64", "ids_ptr": "*i64"}
    types |= {"top_k_ptr": "*i32", "copied_columns_ptr": "*i32", "vocabulary": "i32"}
    types |= {f"{name}_stride": "i32" for name in ("logits", "temperature", "top_k", "top_p", "min_p", "number")}
    return [("draw", draw_kernel, types, {"LANES": LANES, "DEPTH": DEPTH}, {"num_warps": 8})]


def main(wanted: list[str]) -> None:
    groups = {"fused": fused_kernels, "sample": sample_kernels}
    for group in wanted:
        for name, kernel, types, constants, options in groups[group]():
            for architecture in ARCHITECTURES:
                used = compile_kernel(kernel, types, constants, architecture, enable_fp_fusion=False, **options)
                print(json.dumps({"kernel": name, "architecture": architecture, **used}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
