"""Reader of the GGUF container: metadata and the table of tensors, from a memory map.

Here is the container only: what the metadata means for a model is in :mod:`asyncllm.checkpoint.gguf_config`, what the
bytes of a quantized tensor mean is in :mod:`asyncllm.kernels.ggml_blocks`. Nothing is decoded but what is asked for,
and no numpy is needed: with 49,000 tokens and as many merges, opening takes some 8 ms and decoding both lists 25 ms.

Invariant: an opened file is whole as far as its header says; every tensor's bytes lie inside it.

Source: the GGUF specification (ggml/docs/gguf.md), versions 2 and 3, little endian.
"""

from __future__ import annotations

import array
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncllm.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["GGML_TYPES", "GGMLType", "GGUFFile", "GGUFMetadata", "GGUFTensor"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 8

STRING, ARRAY = 8, 9
TYPE_TO_FORMAT = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TYPE_TO_STRUCT = {kind: struct.Struct("<" + code) for kind, code in TYPE_TO_FORMAT.items()}
FLOAT32 = 6
U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")


class GGMLType(NamedTuple):
    """How one tensor type is stored: ``block_bytes`` bytes hold ``block_elements`` numbers."""

    name: str
    block_elements: int
    block_bytes: int


GGML_TYPES = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1),
    25: GGMLType("I16", 1, 2),
    26: GGMLType("I32", 1, 4),
    27: GGMLType("I64", 1, 8),
    28: GGMLType("F64", 1, 8),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
}
"""Every tensor type that files hold, by its number there; which of them we read is the loader's knowledge."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One entry of the tensor table."""

    name: str
    shape: tuple[int, ...]
    """Row-major, outermost first (the file stores the reverse): a linear layer's weight is (out, in)."""
    type_name: str
    """Name in :data:`GGML_TYPES`, such as ``Q4_1``."""
    offset: int
    """First byte, from the start of the file."""
    num_bytes: int


class GGUFMetadata(Mapping[str, Any]):
    """The metadata, decoded on first use of each key; a float32 is given as the shortest decimal of the same number.

    Strings are ``str``, arrays are lists. ``length`` counts an array without decoding it.
    """

    def __init__(self, reader: _Reader, key_to_place: dict[str, tuple[int, int]]) -> None:
        self._reader = reader
        self._key_to_place = key_to_place
        self._decoded: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._decoded:
            kind, offset = self._key_to_place[key]
            self._decoded[key] = self._reader.value(kind, offset)
        return self._decoded[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._key_to_place)

    def __len__(self) -> int:
        return len(self._key_to_place)

    def __contains__(self, key: object) -> bool:
        return key in self._key_to_place

    def length(self, key: str) -> int:
        """Return how many elements the array ``key`` has, 0 if there is no such array."""
        kind, offset = self._key_to_place.get(key, (0, 0))
        return self._reader.unpack(U64, offset + 4) if kind == ARRAY else 0


class GGUFFile:
    """An open GGUF file: ``metadata``, ``tensors`` by name, and the bytes of each tensor as a view of the memory map.

    :raises ModelNotFoundError: there is no such file.
    :raises CheckpointError: it is not a GGUF file, or it is damaged or cut off.
    :raises UnsupportedModelError: its version, byte order or a tensor type is unknown.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = _map_file(path)
        reader = _Reader(path, self._map)
        num_tensors, num_keys = reader.header()
        self.metadata = GGUFMetadata(reader, reader.metadata_places(num_keys))
        infos = reader.tensor_infos(num_tensors)
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise reader.damaged(f"general.alignment is {alignment!r}")
        data_start = -(-reader.offset // alignment) * alignment
        self.tensors = {name: _place(reader, data_start, name, *info) for name, info in infos.items()}

    def tensor_bytes(self, name: str) -> memoryview:
        """Return the stored bytes of tensor ``name``: a view of the map, not a copy; not to be written to.

        :raises KeyError: there is no such tensor.
        """
        tensor = self.tensors[name]
        return memoryview(self._map)[tensor.offset : tensor.offset + tensor.num_bytes]

    def release(self) -> None:
        """Let go of the memory that holds what was read; reading again fetches it from the file again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def __repr__(self) -> str:
        return f"GGUFFile({str(self.path)!r}, {len(self.metadata)} keys, {len(self.tensors)} tensors)"


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            # private, not read-only: torch warns about memory it may not write; nobody writes, so no page is copied
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"there is no file {path}", model=str(path)) from error
    except ValueError as error:  # mmap refuses an empty file
        raise CheckpointError(f"{path} is empty", model=str(path), file=path.name) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}", model=str(path), file=path.name) from error


def _place(
    reader: _Reader, data_start: int, name: str, shape: tuple[int, ...], type_id: int, relative: int
) -> GGUFTensor:
    kind = GGML_TYPES.get(type_id)
    if kind is None:
        raise UnsupportedModelError(
            f"tensor {name!r} of {reader.path.name} has the unknown type {type_id}",
            model=str(reader.path),
            feature=f"GGUF tensor type {type_id}",
        )
    num_elements = 1
    for size in shape:
        num_elements *= size
    if (shape[-1] if shape else 1) % kind.block_elements:
        raise reader.damaged(f"tensor {name!r} of type {kind.name} has rows of {shape[-1]} numbers")
    num_bytes = num_elements // kind.block_elements * kind.block_bytes
    offset = data_start + relative
    if offset + num_bytes > reader.size:
        missing = offset + num_bytes - reader.size
        raise reader.damaged(f"it is cut off: tensor {name!r} ends {missing} bytes after the end of the file")
    return GGUFTensor(name, shape, kind.name, offset, num_bytes)


class _Reader:
    """Reads from a position that moves through the header; every step over the end is the same typed error."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.offset = 0

    def damaged(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is not a usable GGUF file: {why}", model=str(self.path), file=self.path.name
        )

    def unpack(self, form: struct.Struct, offset: int) -> Any:
        try:
            return form.unpack_from(self.data, offset)[0]
        except struct.error as error:
            raise self.damaged("it is cut off inside its header") from error

    def take(self, form: struct.Struct) -> Any:
        value = self.unpack(form, self.offset)
        self.offset += form.size
        return value

    def text(self, offset: int) -> tuple[str, int]:
        """Return the string at ``offset`` and the position after it. Bytes that are not UTF-8 are replaced."""
        start = offset + 8
        end = start + self.unpack(U64, offset)
        if end > self.size:
            raise self.damaged("it is cut off inside its header")
        return self.data[start:end].decode("utf-8", "replace"), end

    def take_text(self) -> str:
        value, self.offset = self.text(self.offset)
        return value

    def header(self) -> tuple[int, int]:
        """Return how many tensors and how many metadata keys follow."""
        if self.data[:4] != MAGIC:
            raise self.damaged(f"it starts with {self.data[:4]!r}, not {MAGIC!r}")
        self.offset = 4
        version = self.take(U32)
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            what = "big-endian GGUF" if swapped in VERSIONS else f"GGUF version {version}"
            raise UnsupportedModelError(f"{self.path} is {what}", model=str(self.path), feature=what)
        return self.take(U64), self.take(U64)

    def metadata_places(self, num_keys: int) -> dict[str, tuple[int, int]]:
        places: dict[str, tuple[int, int]] = {}
        for _ in range(num_keys):
            key = self.take_text()
            if key in places:  # also what keeps a wrong count from reading zeros for minutes
                raise self.damaged(f"it has the key {key!r} twice")
            kind = self.take(U32)
            places[key] = (kind, self.offset)
            self.offset = self.end_of_value(kind, self.offset)
            if self.offset > self.size:
                raise self.damaged(f"it is cut off inside the value of {key!r}")
        return places

    def tensor_infos(self, num_tensors: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
        """Return shape, type number and offset in the data section of each tensor."""
        infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(num_tensors):
            name = self.take_text()
            if name in infos:
                raise self.damaged(f"it has the tensor {name!r} twice")
            num_dims = self.take(U32)
            if num_dims > MAX_DIMS:
                raise self.damaged(f"tensor {name!r} claims {num_dims} dimensions")
            dims = [self.take(U64) for _ in range(num_dims)]
            infos[name] = (tuple(reversed(dims)), self.take(U32), self.take(U64))
        return infos

    def end_of_value(self, kind: int, offset: int) -> int:
        if kind == STRING:
            return offset + 8 + self.unpack(U64, offset)
        if kind != ARRAY:
            return offset + self.form(kind).size
        element, count = self.unpack(U32, offset), self.unpack(U64, offset + 4)
        offset += 12
        if element == STRING:
            return self.end_of_strings(offset, count)
        if element == ARRAY:
            for _ in range(count):
                offset = self.end_of_value(ARRAY, offset)
            return offset
        return offset + self.form(element).size * count

    def end_of_strings(self, offset: int, count: int) -> int:
        if count * 8 > self.size:
            raise self.damaged(f"an array claims {count} strings")
        unpack_from, data = U64.unpack_from, self.data
        try:
            for _ in range(count):  # the one loop that a large vocabulary makes hot
                offset += 8 + unpack_from(data, offset)[0]
        except (struct.error, OverflowError) as error:
            raise self.damaged("it is cut off inside its header") from error
        return offset

    def form(self, kind: int) -> struct.Struct:
        form = TYPE_TO_STRUCT.get(kind)
        if form is None:
            raise self.damaged(f"a metadata value has the unknown type {kind}")
        return form

    def value(self, kind: int, offset: int) -> Any:
        if kind == STRING:
            return self.text(offset)[0]
        if kind != ARRAY:
            value = self.unpack(self.form(kind), offset)
            return shortest_float(value) if kind == FLOAT32 else value
        return self.array(offset)

    def array(self, offset: int) -> list[Any]:
        element, count = self.unpack(U32, offset), self.unpack(U64, offset + 4)
        offset += 12
        if element == STRING:
            return self.strings(offset, count)
        if element == ARRAY:
            nested: list[Any] = []
            for _ in range(count):
                nested.append(self.array(offset))
                offset = self.end_of_value(ARRAY, offset)
            return nested
        raw = self.data[offset : offset + self.form(element).size * count]
        if element == 7:
            return [byte != 0 for byte in raw]
        numbers = array.array(TYPE_TO_FORMAT[element], raw)
        return numbers.tolist()

    def strings(self, offset: int, count: int) -> list[str]:
        unpack_from, data = U64.unpack_from, self.data
        found: list[str] = []
        append = found.append
        for _ in range(count):
            start = offset + 8
            offset = start + unpack_from(data, offset)[0]
            append(data[start:offset].decode("utf-8", "replace"))
        return found


def shortest_float(value: float) -> float:
    """Return the decimal with fewest digits that rounds to the same float32: 9.999999747378752e-06 becomes 1e-05.

    A configuration is written in decimals; without this, a rotary base or an epsilon read from a GGUF differs from the
    same number read from config.json, and so does every token after it.
    """
    if value != value or value in (float("inf"), float("-inf")):
        return value
    pack = struct.Struct("<f")
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        try:
            if pack.unpack(pack.pack(short))[0] == value:
                return short
        except OverflowError:  # rounded up past the largest float32
            continue
    return value
