"""Write the tiny Llama that makes the engine's own cost visible: 2 layers, hidden 128, vocabulary 1024, random weights.

    python benchmarks/tiny_model.py FOLDER

Needs torch and safetensors only; nothing is downloaded. Heads 2 (1 for keys and values) of 64, intermediate 256,
2048 positions, tied embedding, float32. Ids 0 … 255 are bytes, then special tokens, then pairs of letters.
"""

from __future__ import annotations

import itertools
import json
import string
import sys
from pathlib import Path

from asyncllm.testing import TINY_VOCAB_SIZE, write_tiny_checkpoint

VOCAB_SIZE = 1024
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 128, 256, 2, 2, 1, 64


def write(folder: Path) -> Path:
    """Write config.json, tokenizer and model.safetensors into ``folder`` and return it."""
    import torch
    from safetensors.torch import save_file

    pairs = map("".join, itertools.product(string.ascii_letters, repeat=2))
    write_tiny_checkpoint(folder, pieces=list(itertools.islice(pairs, VOCAB_SIZE - TINY_VOCAB_SIZE)), max_position=2048)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")

    random = torch.Generator().manual_seed(0)
    weights = {"model.embed_tokens.weight": torch.randn(VOCAB_SIZE, HIDDEN, generator=random) * 0.02}
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = torch.randn(shape, generator=random) * 0.02
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = torch.ones(HIDDEN)
    weights["model.norm.weight"] = torch.ones(HIDDEN)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
