from collections.abc import Callable
from typing import Any

from triton import language as language

__version__: str
knobs: Any

def jit(fn: Callable[..., Any] | None = None, *, do_not_specialize: list[str] | None = None) -> Any: ...
def next_power_of_2(n: int) -> int: ...
def cdiv(x: int, y: int) -> int: ...
def compile(  # noqa: A001
    src: Any, target: Any = None, options: dict[str, Any] | None = None
) -> Any: ...
