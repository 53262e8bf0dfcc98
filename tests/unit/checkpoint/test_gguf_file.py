"""The GGUF container: metadata, tensor table, and a typed error for every way a file can be damaged."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from asyncllm.checkpoint.gguf import GGUFFile, shortest_float
from asyncllm.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from tests.support.gguf_files import LLAMA_METADATA, llama_tensors, write_gguf


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


def test_every_metadata_type_is_read(tmp_path: Path) -> None:
    metadata = {
        "a.bool": True,
        "a.int": 7,
        "a.float": 0.1,
        "a.text": "naïve 東京",
        "a.ints": [1, 2, 3],
        "a.floats": [0.5, -2.0],
        "a.texts": ["", "x", "🙂"],
        "a.bools": [True, False],
    }
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", metadata))
    assert {key: file.metadata[key] for key in metadata} == metadata


def test_an_array_is_counted_without_decoding_it(path: Path) -> None:
    file = GGUFFile(path)
    assert file.metadata.length("tokenizer.ggml.tokens") == 5
    assert file.metadata.length("llama.block_count") == 0
    assert file.metadata.length("absent") == 0


def test_tensor_table_and_bytes_equal_the_reference_reader(path: Path) -> None:
    file, reference = GGUFFile(path), GGUFReader(path)
    assert list(file.tensors) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        ours = file.tensors[tensor.name]
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert (ours.offset, ours.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert bytes(file.tensor_bytes(tensor.name)) == tensor.data.tobytes()


def test_alignment_of_the_file_is_kept(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "aligned.gguf", {**LLAMA_METADATA, "general.alignment": 256})
    expected = {tensor.name: tensor.data_offset for tensor in GGUFReader(path).tensors}
    assert {tensor.name: tensor.offset for tensor in GGUFFile(path).tensors.values()} == expected


def test_what_was_read_can_be_released_and_read_again(path: Path) -> None:
    file = GGUFFile(path)
    before = bytes(file.tensor_bytes("token_embd.weight"))
    file.release()
    assert bytes(file.tensor_bytes("token_embd.weight")) == before


@pytest.mark.parametrize(
    ("value", "short"),
    [
        (9.999999747378752e-06, 1e-05),
        (0.10000000149011612, 0.1),
        (100000.0, 100000.0),
        (1.0, 1.0),
        (0.0, 0.0),
        (-3.4028234663852886e38, -3.4028235e38),
        (1.401298464324817e-45, 1e-45),
    ],
)
def test_float32_is_the_shortest_decimal_of_the_same_number(value: float, short: float) -> None:
    assert shortest_float(value) == short
    assert struct.pack("<f", shortest_float(value)) == struct.pack("<f", value)


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
def test_float32_infinity_stays(value: float) -> None:
    assert shortest_float(value) == value


def test_shortest_float_agrees_with_numpy() -> None:
    for value in np.random.default_rng(0).standard_normal(200).astype(np.float32) * np.float32(1e4):
        assert shortest_float(float(value)) == float(str(value))


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no file .*absent\.gguf"):
        GGUFFile(tmp_path / "absent.gguf")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(CheckpointError, match="is empty"):
        GGUFFile(tmp_path / "empty.gguf")


def test_a_wrong_magic_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"ggml" + bytes(100))
    with pytest.raises(CheckpointError, match="starts with b'ggml'") as caught:
        GGUFFile(tmp_path / "x.gguf")
    assert caught.value.file == "x.gguf"


@pytest.mark.parametrize(
    ("version", "what"), [(1, "GGUF version 1"), (99, "GGUF version 99"), (3 << 24, "big-endian GGUF")]
)
def test_an_unknown_version_is_unsupported(path: Path, version: int, what: str) -> None:
    raw = bytearray(path.read_bytes())
    raw[4:8] = struct.pack("<I", version)
    path.write_bytes(raw)
    with pytest.raises(UnsupportedModelError, match=what) as caught:
        GGUFFile(path)
    assert caught.value.feature == what


def test_a_file_cut_off_anywhere_is_a_checkpoint_error(path: Path) -> None:
    raw = path.read_bytes()
    header = GGUFFile(path).tensors["token_embd.weight"].offset
    cuts = [*range(4, header, 7), header + 10, len(raw) - 40]  # the last tensor ends in up to 31 bytes of padding
    for cut in cuts:
        path.write_bytes(raw[:cut])
        with pytest.raises(CheckpointError, match="cut off"):
            GGUFFile(path)


def test_an_array_that_claims_to_be_huge_is_refused_at_once(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"zz.texts": ["one", "two"]})
    raw = bytearray(path.read_bytes())
    place = raw.index(b"zz.texts") + len("zz.texts") + 8
    raw[place : place + 8] = struct.pack("<Q", 1 << 60)
    path.write_bytes(raw)
    with pytest.raises(CheckpointError):
        GGUFFile(path)


def test_an_unknown_metadata_type_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"zz.int": 5})
    raw = bytearray(path.read_bytes())
    place = raw.index(b"zz.int") + len("zz.int")
    raw[place : place + 4] = struct.pack("<I", 77)
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="unknown type 77"):
        GGUFFile(path)


def test_an_unknown_tensor_type_is_unsupported(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    name = b"token_embd.weight"
    place = raw.index(name) + len(name) + 4 + 2 * 8
    raw[place : place + 4] = struct.pack("<I", 250)
    path.write_bytes(raw)
    with pytest.raises(UnsupportedModelError, match=r"'token_embd\.weight'.* unknown type 250"):
        GGUFFile(path)


def test_rows_that_do_not_fill_blocks_are_refused(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    name = b"token_embd.weight"
    place = raw.index(name) + len(name) + 4
    raw[place : place + 8] = struct.pack("<Q", 33)  # the row length of the file's order
    raw[place + 16 : place + 20] = struct.pack("<I", 2)  # Q4_0: blocks of 32
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="rows of 33 numbers"):
        GGUFFile(path)


@pytest.mark.model
def test_the_real_vocabulary_is_read_in_a_tenth_of_a_second(smollm2_gguf: Path) -> None:
    start = time.perf_counter()
    file = GGUFFile(smollm2_gguf)
    tokens, merges = file.metadata["tokenizer.ggml.tokens"], file.metadata["tokenizer.ggml.merges"]
    took = time.perf_counter() - start
    assert (len(tokens), len(merges)) == (49152, 48900)
    assert took < 0.5  # 0.03 s on a quiet machine


def test_tensors_keep_their_numbers(path: Path) -> None:
    file = GGUFFile(path)
    for name, tensor in llama_tensors().items():
        assert np.array_equal(np.frombuffer(file.tensor_bytes(name), np.float32).reshape(tensor.shape), tensor)


@pytest.mark.parametrize(("offset", "what"), [(8, "tensor"), (16, "key")])
def test_a_wrong_count_of_entries_is_found_at_once(tmp_path: Path, offset: int, what: str) -> None:
    """Zeros read as entries without a name: millions of them would take minutes."""
    header = bytearray(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    struct.pack_into("<Q", header, offset, 2**40)
    path = tmp_path / "zeros.gguf"
    path.write_bytes(header + bytes(10_000_000))
    begin = time.perf_counter()
    with pytest.raises(CheckpointError, match=f"the {what} '' twice"):
        GGUFFile(path)
    assert time.perf_counter() - begin < 1.0
