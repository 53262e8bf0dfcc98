"""Compile the attention kernels for GPUs that are not here, and print what each took: one JSON line per kernel.

To be run in a process of its own: without ``TRITON_INTERPRET``, and with ``TRITON_CACHE_DIR`` at a private folder.
Arguments: ``capability,head_dim,dtype,kernel[,key=value …]`` each, ``dtype`` as Triton writes it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from asyncllm.kernels.triton import attention_kernels as kernels
from asyncllm.kernels.triton import paged_attention

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TORCH_TYPE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
POINTERS = {
    "slots_ptr": "*i32",
    "query_start_ptr": "*i32",
    "seq_lens_ptr": "*i32",
    "tables_ptr": "*i32",
    "items_ptr": "*i32",
    "merges_ptr": "*i32",
    "bounds_ptr": "*i32",
    "slot_mapping_ptr": "*i64",
    "part_out_ptr": "*fp32",
    "part_stat_ptr": "*fp32",
}
SCALARS = {"scale_log2": "fp32", "softcap": "fp32", "value_offset": "i64"}
UNALIGNED = {"first_bound", "window", "stride_items", "stride_merges", "bounds_ptr"}
"""Arguments that are not multiples of 16 in a real launch, or not always."""


def compile_kernel(name: str, capability: int, head_dim: int, dtype: str, options: dict[str, int]) -> dict[str, Any]:
    heads, kv_heads = options.get("heads", 32), options.get("kv_heads", 8)
    tiles = paged_attention.small_and_large_tile(capability, heads // kv_heads, head_dim, TORCH_TYPE[dtype])
    tile = tiles[name == "prefill"]
    tile = tile._replace(**{key: value for key, value in options.items() if key in tile._fields})
    padded = paged_attention.padded_dim(head_dim)
    if name in ("decode", "prefill"):
        fn = kernels.paged_attention_kernel
        constants: dict[str, Any] = {
            "NUM_KV_HEADS": kv_heads,
            "GROUP": heads // kv_heads,
            "HEAD_DIM": head_dim,
            "PADDED_DIM": padded,
            "BLOCK_SIZE": options.get("block_size", 16),
            "ROWS": tile.rows,
            "TILE": tile.tile,
            "WINDOW": bool(options.get("window", 0)),
            "SOFTCAP": bool(options.get("softcap", 0)),
            "F32": dtype == "fp32",
            "INTERPRET": False,
        }
    elif name == "merge":
        fn = kernels.merge_parts_kernel
        constants = {
            "NUM_HEADS": heads,
            "HEAD_DIM": head_dim,
            "PADDED_DIM": padded,
            "TOKENS": tile.rows * kv_heads // heads,
            "BLOCK_HEADS": max(1, paged_attention.MERGE_NUMBERS // padded),
        }
        tile = tile._replace(num_warps=4)
    else:
        fn = kernels.kv_write_kernel
        width = kv_heads * head_dim
        constants = {"WIDTH": width, "PADDED_WIDTH": triton.next_power_of_2(width)}
        tile = tile._replace(num_warps=4)
    return {"kernel": name, "capability": capability, "head_dim": head_dim, "dtype": dtype, **options} | usage(
        fn, constants, capability, dtype, tile
    )


def usage(fn: Any, constants: dict[str, Any], capability: int, dtype: str, tile: Any) -> dict[str, Any]:
    """Compile ``fn`` and return its registers, stack, shared memory and matrix instructions."""
    signature = {
        name: "constexpr"
        if name in constants
        else POINTERS.get(name) or SCALARS.get(name) or ("*" + dtype if name.endswith("_ptr") else "i32")
        for name in fn.arg_names
    }
    divisible = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(fn.arg_names)
        if signature[name] not in ("constexpr", "fp32") and name not in UNALIGNED
    }
    source = ASTSource(
        fn=fn,
        signature=signature,
        constexprs={(fn.arg_names.index(name),): value for name, value in constants.items()},
        attrs=divisible,
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        dump = subprocess.run(
            [TOOLS / "cuobjdump", "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    [(registers, stack)] = re.findall(r"REG:(\d+).*?STACK:(\d+)", dump)
    ptx = compiled.asm["ptx"]
    return {
        "tile": list(tile),
        "registers": int(registers),
        "stack": int(stack),
        "spilled": max(map(int, re.findall(r"LOCAL:(\d+)", dump)), default=0),
        "shared": compiled.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        "tcgen05": ptx.count("tcgen05.mma"),
        "cp_async": len(re.findall(r"cp\.async\.c[ag]", ptx)),
    }


def main(arguments: list[str]) -> None:
    for argument in arguments:
        capability, head_dim, dtype, name, *rest = argument.split(",")
        options = {key: int(value) for key, value in (pair.split("=") for pair in rest)}
        print(json.dumps(compile_kernel(name, int(capability), int(head_dim), dtype, options)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
