"""How a kernel becomes a torch operator of the namespace ``asyncllm``.

As operators, kernels are seen by dispatch modes, by ``FakeTensor`` and by ``torch.compile``, with what they write said
in their schema. This low-level form costs a few microseconds a call; ``torch.library.custom_op`` more than ten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["define_operator"]

# A fragment: each module of kernels defines its own operators.
_torch_library: Any = torch.library  # hardly annotated
_LIBRARY = _torch_library.Library("asyncllm", "FRAGMENT")


def define_operator(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Return the operator of ``schema`` that calls ``run`` on every device, and ``fake`` for shapes alone."""
    name = schema[: schema.index("(")]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    _torch_library.register_fake(f"asyncllm::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.asyncllm, name).default
