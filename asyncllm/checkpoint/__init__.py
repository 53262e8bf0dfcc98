"""What a checkpoint says about itself: where it lies, its configuration, its special tokens; no weights, no torch.

Both processes read it: the caller's for tokenizer, chat template and limits, the engine's for the architecture. A
GGUF file is brought to the form of a Hugging Face folder here, so that nobody else asks which of the two it was, but
for those that read weights (:mod:`asyncllm.loader`) or build a tokenizer (:mod:`asyncllm.frontend`).
"""

from __future__ import annotations

from asyncllm.checkpoint.architectures import ARCHITECTURES, check_runnable
from asyncllm.checkpoint.checkpoint import Checkpoint, open_checkpoint
from asyncllm.checkpoint.gguf import GGUFFile, GGUFTensor

__all__ = ["ARCHITECTURES", "Checkpoint", "GGUFFile", "GGUFTensor", "check_runnable", "open_checkpoint"]
