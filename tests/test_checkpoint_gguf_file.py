"""The header and the data of GGUF files, against the `gguf` package, and every kind of hostile or damaged file."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf as package
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf_bytes import (
    ARRAY,
    BOOL,
    F16,
    F32,
    FLOAT32,
    INT32,
    Q2_K,
    Q4_0,
    Q8_0,
    STRING,
    UINT8,
    UINT32,
    UINT64,
    gguf,
    pair,
    string,
    tensor,
)  # fmt: skip
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt.checkpoint import gguf_file
from minigpt.checkpoint.gguf_file import TYPES, GGUFFile
from minigpt.errors import ModelFolderError

PAIRS = [
    pair("general.architecture", STRING, "llama"),
    pair("llama.context_length", UINT32, 77),
    pair("llama.rope.freq_base", FLOAT32, 500.0),
    pair("flag", BOOL, True),
    pair("words", ARRAY, (STRING, ["", "猫", "a b"])),
    pair("numbers", ARRAY, (INT32, [-1, 0, 7])),
    pair("nothing", ARRAY, (UINT8, [])),
]
VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)
SOUND = gguf(PAIRS, [tensor("m", (2, 3), F32, 0)], VALUES.tobytes())


def write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return path


def refusal(tmp_path: Path, data: bytes) -> str:
    path = write(tmp_path, data)
    with pytest.raises(ModelFolderError) as caught:
        GGUFFile(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def test_values_of_every_kind_and_a_tensor_come_back(tmp_path: Path) -> None:
    file = GGUFFile(write(tmp_path, SOUND))
    assert file.metadata == {
        "general.architecture": "llama", "llama.context_length": 77, "llama.rope.freq_base": 500.0, "flag": True,
        "words": ["", "猫", "a b"], "numbers": [-1, 0, 7], "nothing": [],
    }  # fmt: skip
    assert torch.equal(file.read("m", torch.float32), torch.from_numpy(VALUES))


def test_header_equals_that_of_the_package(tmp_path: Path) -> None:
    path = write(tmp_path, SOUND)
    file, reader = GGUFFile(path), package.GGUFReader(path)
    assert file.metadata == {name: field.contents() for name, field in reader.fields.items() if "GGUF." not in name}
    assert [(t.name, tuple(map(int, t.shape[::-1])), int(t.data_offset)) for t in reader.tensors] == [
        (name, stored.shape, stored.offset) for name, stored in file.tensors.items()
    ]


def blocks(kind: GGMLQuantizationType, rows: int, width: int) -> np.ndarray:
    """Random blocks of a type; the scales inside them are small floats, as in real files."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(int(kind))
    raw = draw.integers(0, 256, (rows * width // block, block_bytes), dtype=np.uint8)
    scale = np.array([0.013], dtype=np.float16).view(np.uint8)
    places = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q4_K": [0, 2], "Q6_K": [208]}.get(kind.name, [])
    for place in places:
        raw[:, place : place + 2] = scale
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("name", TYPES)
def test_every_type_is_dequantised_as_the_package_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(gguf_file, "CHUNK_VALUES", 1024)  # several parts, the last one smaller
    kind, rows, width = GGMLQuantizationType[name], 5, 512
    if name in ("F32", "F16", "BF16"):
        raw = package.quantize(np.random.default_rng(0).normal(size=(rows, width)).astype(np.float32), kind)
        raw = np.ascontiguousarray(raw).view(np.uint8).reshape(rows, -1)
    else:
        raw = blocks(kind, rows, width)
    path = write(tmp_path, gguf([], [tensor("m", (rows, width), int(kind), 0)], raw.tobytes()))
    expected = torch.from_numpy(package.dequantize(raw, kind).copy()).view(rows, width)
    assert expected.unique().numel() > 10
    assert torch.equal(GGUFFile(path).read("m", torch.float32), expected)
    assert torch.equal(GGUFFile(path).read("m", torch.bfloat16), expected.to(torch.bfloat16))


def test_values_beyond_the_wanted_type_are_refused(tmp_path: Path) -> None:
    data = np.array([[1.0, 1e6]], dtype=np.float32).tobytes()
    file = GGUFFile(write(tmp_path, gguf([], [tensor("m", (1, 2), F32, 0)], data)))
    assert file.read("m", torch.bfloat16).shape == (1, 2)
    with pytest.raises(ModelFolderError, match="m holds values that float16 cannot"):
        file.read("m", torch.float16)


def test_a_scale_that_is_no_number_is_refused_without_a_warning(tmp_path: Path) -> None:
    for scale in (b"\x00\x7c", b"\x00\x7e"):  # infinite, none
        file = GGUFFile(write(tmp_path, gguf([], [tensor("m", (1, 32), Q8_0, 0)], scale + bytes(range(32)))))
        with pytest.raises(ModelFolderError, match="m holds values that float32 cannot"):
            file.read("m", torch.float32)


def test_the_alignment_is_kept(tmp_path: Path) -> None:
    pairs = [pair("general.alignment", UINT32, 64)]
    head = gguf(pairs, [tensor("m", (1, 2), F32, 64)])
    data = head.ljust(-(-len(head) // 64) * 64 + 64, b"\0") + np.array([3.0, 4.0], dtype=np.float32).tobytes()
    assert GGUFFile(write(tmp_path, data)).read("m", torch.float32).tolist() == [[3.0, 4.0]]


def test_cut_anywhere_it_is_refused(tmp_path: Path) -> None:
    for length in range(len(SOUND)):
        assert refusal(tmp_path, SOUND[:length])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no GGUF file"),
        (b"\x80\x04pickle" * 9, "no GGUF file"),
        (gguf([], [], magic=b"GGML"), "no GGUF file"),
        (gguf([], [], version=1), "version 1"),
        (gguf([], [], version=4), "version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (gguf([], [], counts=(2**63, 0)), "claims"),
        (gguf([], [], counts=(0, 2**64 - 1)), "claims"),
        (gguf([], [], counts=(0, 5)), "cut short"),
        (gguf([string("k") + struct.pack("<I", 99) + bytes(64)], []), "unknown kind 99"),
        (gguf([string("k") + struct.pack("<IIQ", ARRAY, STRING, 2**62)], []), "array of"),
        (gguf([string("k") + struct.pack("<IIQ", ARRAY, UINT8, 2**64 - 1)], []), "cut short"),
        (gguf([string("k") + struct.pack("<IIQ", ARRAY, ARRAY, 3) + bytes(64)], []), "array of arrays"),
        (gguf([struct.pack("<Q", 2**64 - 1)], [], counts=(0, 1)), "cut short"),
        (gguf([pair(b"\xff\xfe", UINT32, 1)], []), "no UTF-8"),
        (gguf([pair("k", STRING, b"\xff")], []), "no UTF-8"),
        (gguf([pair("k", UINT32, 1), pair("k", UINT32, 1)], []), "twice"),
        (gguf([pair("general.alignment", UINT32, 0)], []), "power of two"),
        (gguf([pair("general.alignment", UINT32, 48)], []), "power of two"),
        (gguf([pair("general.alignment", UINT64, 2**40)], []), "power of two"),
        (gguf([pair("general.alignment", STRING, "32")], []), "power of two"),
        (gguf([], [tensor("m", (2, 3), F32, 0)] * 2, bytes(64)), "twice"),
        (gguf([], [tensor("m", (2, 3), F32, 2**60)], bytes(64)), "cut short"),
        (gguf([], [tensor("m", (2**40, 2**40), F32, 0)], bytes(64)), "cut short"),
        (gguf([], [tensor("m", (2, 0), F32, 0)], bytes(64)), "cannot hold"),
        (gguf([], [tensor("m", (2, 31), Q4_0, 0)], bytes(64)), "cannot hold"),
        (gguf([], [tensor("m", (2, 3), 9999, 0)], bytes(64)), "unknown type 9999"),
        (gguf([], [tensor("m", (1, 256), Q2_K, 0)], bytes(256)), "m has type Q2_K"),
        (gguf([], [tensor("m", (1, 1, 1, 1, 1), F16, 0)], bytes(64)), "5 dimensions"),
        (gguf([], [tensor("m", (), F32, 0)], bytes(64)), "0 dimensions"),
        (gguf([pair("split.count", UINT32, 3)], []), "one of 3 parts"),
    ],
)  # fmt: skip
def test_hostile_files_are_refused_in_one_line_and_little_memory(tmp_path: Path, data: bytes, words: str) -> None:
    tracemalloc.start()
    try:
        message = refusal(tmp_path, data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert words in message
    assert peak < 2_000_000


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="no such file"):
        GGUFFile(tmp_path / "none.gguf")
    with pytest.raises(ModelFolderError, match="directory"):
        GGUFFile(tmp_path)


def test_a_file_that_shrinks_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, SOUND)
    file = GGUFFile(path)
    path.write_bytes(SOUND[:-8])
    with pytest.raises(ModelFolderError, match="became shorter"):
        file.read("m", torch.float32)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(SOUND) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_damaged_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    data = bytearray(SOUND)
    for place, byte in changes:
        data[place] = byte
    path = write(tmp_path_factory.getbasetemp(), bytes(data))
    try:
        file = GGUFFile(path)
        for name in file.tensors:
            file.read(name, torch.float32)
    except ModelFolderError as error:
        assert "\n" not in str(error)  # noqa: PT017
