# The part of tqdm that this package uses; tqdm ships no types of its own.
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, Self, TextIO, TypeVar

__all__ = ["tqdm"]

T = TypeVar("T")

class tqdm(Generic[T]):
    n: int | float
    total: int | float | None
    def __init__(
        self,
        iterable: Iterable[T] | None = None,
        desc: str | None = None,
        total: int | float | None = None,
        leave: bool | None = True,
        file: TextIO | None = None,
        ncols: int | None = None,
        mininterval: float = 0.1,
        maxinterval: float = 10.0,
        miniters: int | float | None = None,
        ascii: bool | str | None = None,
        disable: bool | None = False,
        unit: str = "it",
        unit_scale: bool | int | float = False,
        dynamic_ncols: bool = False,
        smoothing: float = 0.3,
        bar_format: str | None = None,
        initial: int | float = 0,
        position: int | None = None,
        postfix: dict[str, Any] | str | None = None,
    ) -> None: ...
    def __iter__(self) -> Iterator[T]: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def update(self, n: float = 1) -> bool | None: ...
    def set_description(self, desc: str | None = None, refresh: bool = True) -> None: ...
    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None: ...
    def refresh(self) -> bool | None: ...
    def close(self) -> None: ...
    def clear(self) -> None: ...
    @classmethod
    def write(cls, s: str, file: TextIO | None = None, end: str = "\n") -> None: ...
