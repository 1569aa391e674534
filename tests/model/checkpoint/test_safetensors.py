"""`read_header` refuses every damaged or malicious header with a `WeightsError`."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from aengine.errors import WeightsError
from aengine.model.checkpoint.safetensors import TensorEntry, read_header
from aengine.sizes import format_bytes

Header = dict[str, object]


def tensor(dtype: str, shape: object, *offsets: object) -> Header:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


def write(path: Path, header: Header | bytes, data: int = 0, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(data))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def test_reads_what_the_library_writes(path: Path) -> None:
    save_file(
        {"a": torch.zeros(2, 3), "b": torch.zeros(5, dtype=torch.bfloat16), "c": torch.tensor(1.0)},
        path,
        metadata={"format": "pt"},
    )
    header = read_header(path)
    assert {name: (entry.dtype, entry.shape, entry.nbytes) for name, entry in header.items()} == {
        "a": ("F32", (2, 3), 24),
        "b": ("BF16", (5,), 10),
        "c": ("F32", (), 4),
    }


def test_order_and_padding_of_the_header_are_free(path: Path) -> None:
    text = json.dumps({"late": tensor("F32", [1], 4, 8), "early": tensor("F32", [1], 0, 4)}).encode() + b"   "
    at = 8 + len(text)
    assert read_header(write(path, text, data=8))["late"] == TensorEntry("F32", (1,), at + 4, at + 8)


@pytest.mark.parametrize(
    ("header", "data", "why"),
    [
        ({"a": tensor("F32", [2], 0, 8)}, 7, "truncated"),
        ({"a": tensor("F32", [2], 0, 8)}, 9, "describes 8 bytes"),
        ({"a": tensor("F32", [2], 0, 8), "b": tensor("F32", [2], 4, 12)}, 12, "b starts at byte 4 where 8"),
        ({"a": tensor("F32", [2], 0, 8), "b": tensor("F32", [2], 0, 8)}, 8, "starts at byte 0 where 8"),
        ({"a": tensor("F32", [2], 0, 8), "b": tensor("F32", [1], 12, 16)}, 16, "b starts at byte 12 where 8"),
        ({"a": tensor("F32", [2], 8, 0)}, 8, "a is F32"),
        ({"a": tensor("F32", [2], -8, 0)}, 8, "a has invalid data_offsets"),
        ({"a": tensor("F32", [2], 0, 2**63 + 8)}, 8, "a has invalid data_offsets"),
        ({"a": tensor("F32", [2], 0)}, 8, "a has invalid data_offsets"),
        ({"a": tensor("F32", [2], 0.0, 8.0)}, 8, "a has invalid data_offsets"),
        ({"a": tensor("F32", [3], 0, 8)}, 8, "a is F32"),
        ({"a": tensor("F32", [2**62, 4, 2], 0, 8)}, 8, "a is F32"),
        ({"a": tensor("F32", [2**32, 2**32], 0, 0)}, 0, "a is F32"),
        ({"a": tensor("F32", [-2], 0, 8)}, 8, "a has an invalid shape"),
        ({"a": tensor("F32", [True, 2], 0, 8)}, 8, "a has an invalid shape"),
        ({"a": tensor("F32", [1] * 9, 0, 4)}, 4, "a has an invalid shape"),
        ({"a": tensor("F32", "2", 0, 8)}, 8, "a has an invalid shape"),
        ({"a": tensor("F31", [2], 0, 8)}, 8, "a has the unknown dtype 'F31'"),
        ({"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}, 8, "a has the unknown dtype"),
        ({"a": 5}, 0, "a has the unknown dtype"),
        ({"a": {}}, 0, "a has the unknown dtype"),
        (b'{"a": {}, "a": {}}', 0, "'a' appears twice"),
        (
            {"a\n\x1b[2Jb": tensor("F32", [1], 0, 4)},
            4,
            r"a tensor is 'a\\n\\x1b\[2Jb', which is not printable",
        ),
        (b"[]", 0, "not a JSON object"),
        (b"", 0, "not valid JSON"),
        (b"{", 0, "not valid JSON"),
        (b"\xff\xfe", 0, "not valid JSON"),
        (b"[" * 200_000, 0, "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", 0, "not valid JSON"),
    ],
)
def test_lies_are_told_by_name(path: Path, header: Header | bytes, data: int, why: str) -> None:
    with pytest.raises(WeightsError, match=why) as error:
        read_header(write(path, header, data))
    assert str(path) in str(error.value)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("length", [3, 2**32, 2**63, 2**64 - 1, 100_000_001])
def test_a_header_length_beyond_the_file_is_refused_before_anything_is_read(path: Path, length: int) -> None:
    with pytest.raises(WeightsError, match=re.escape(f"header of {format_bytes(length)} in")):
        read_header(write(path, b"{}", length=length))


def test_a_header_of_more_than_100_mb_is_refused(path: Path) -> None:
    write(path, b"{}", length=100_000_001)
    with path.open("r+b") as file:
        file.truncate(200_000_000)  # sparse
    with pytest.raises(WeightsError, match=r"header of 95\.4 MiB in"):
        read_header(path)


@pytest.mark.parametrize("content", [b"", b"1234567"])
def test_files_too_short_for_a_length(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(WeightsError):
        read_header(path)


def test_missing_files_and_folders(path: Path) -> None:
    with pytest.raises(WeightsError, match="no such file"):
        read_header(path)
    path.mkdir()
    with pytest.raises(WeightsError, match="no such file"):
        read_header(path)


def _flip(content: bytes, at: int, value: int) -> bytes:
    at %= len(content)
    return content[:at] + bytes([value]) + content[at + 1 :]


_DAMAGES: list[Callable[[bytes, int, int], bytes]] = [
    _flip,
    lambda content, at, value: content[: at % len(content)],
    lambda content, at, value: content + bytes([value]),
    lambda content, at, value: content[: at % len(content)] + bytes([value]) + content[at % len(content) :],
]


@given(
    damages=st.lists(
        st.tuples(st.sampled_from(_DAMAGES), st.integers(0, 300), st.integers(0, 255)), min_size=1, max_size=4
    )
)
def test_what_passes_is_safe_to_hand_to_the_library(path: Path, damages: list[tuple[object, int, int]]) -> None:
    save_file({"a": torch.zeros(2, 3), "b": torch.ones(4, dtype=torch.float16)}, path)
    content = path.read_bytes()
    for damage, at, value in damages:
        if content:
            content = damage(content, at, value)  # type: ignore[operator]
    path.write_bytes(content)
    try:
        header = read_header(path)
    except WeightsError:
        return
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(header)
        for name, entry in header.items():
            try:
                assert tuple(file.get_tensor(name).shape) == entry.shape
            except (SafetensorError, RuntimeError) as error:
                pytest.fail(f"{name}: {error}")
