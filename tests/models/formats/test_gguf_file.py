"""Headers of GGUF files: held against the gguf package, damaged ones refused with the fix."""

import random
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from gllm.models.errors import ModelError
from gllm.models.formats.gguf_file import BLOCK_TYPES, GgufFile

MAX_PEAK_BYTES = 1 << 20
"""Memory that reading a header of a few kilobytes may use."""


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """Write a file with a value of every type, and tensors of some."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 255)
    writer.add_int8("a.i8", -7)
    writer.add_uint16("a.u16", 65535)
    writer.add_int16("a.i16", -300)
    writer.add_uint32("llama.block_count", 2)
    writer.add_int32("a.i32", -1)
    writer.add_uint64("a.u64", 1 << 63)
    writer.add_int64("a.i64", -(1 << 40))
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 1e-300)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "Ġhello 世界")
    writer.add_token_list(["<s>", "ä", "", "b" * 300])
    writer.add_token_scores([0.0, -1.5, 2.0, 3.0])
    writer.add_token_types([1, 2, 3, 6])
    random_numbers = np.random.default_rng(0)
    rows = random_numbers.standard_normal((4, 256)).astype(np.float32)
    writer.add_tensor("token_embd.weight", rows)
    writer.add_tensor("output_norm.weight", rows[0])
    half = random_numbers.standard_normal((2, 3, 64)).astype(np.float16)
    writer.add_tensor("blk.0.ffn_up_exps.weight", half)
    for kind in (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1):
        writer.add_tensor(f"{kind.name}.weight", gguf.quants.quantize(rows, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_types_are_those_of_ggml():
    expected = {
        kind.value: (kind.name, *sizes) for kind, sizes in gguf.constants.GGML_QUANT_SIZES.items()
    }
    types = {number: (t.name, t.weights, t.nbytes) for number, t in BLOCK_TYPES.items()}
    assert types == expected


def test_header_is_what_the_gguf_package_reads(path):
    file, reference = GgufFile(path), gguf.GGUFReader(path)
    assert file.architecture == "llama"
    metadata = {
        key: field.contents()
        for key, field in reference.fields.items()
        if not key.startswith("GGUF.")
    }
    assert dict(file.metadata) == metadata
    with file.open() as reader:
        for tensor in reference.tensors:
            own = file.tensors[tensor.name]
            assert own.shape == tuple(reversed(tensor.shape.tolist()))
            assert own.type.name == tensor.tensor_type.name
            assert reader.read(own.offset, own.nbytes) == tensor.data.tobytes()
    assert list(file.tensors) == [tensor.name for tensor in reference.tensors]


class Header:
    """Writer of headers that the gguf package refuses to write."""

    def __init__(self, version: int = 3, tensors: int = 0, keys: int = 0) -> None:
        self.data = b"GGUF" + struct.pack("<IQQ", version, tensors, keys)

    def text(self, text: str) -> "Header":
        data = text.encode()
        self.data += struct.pack("<Q", len(data)) + data
        return self

    def pack(self, format_: str, *numbers: float | bytes) -> "Header":
        self.data += struct.pack("<" + format_, *numbers)
        return self

    def tensor(self, name: str, *shape: int, kind: int = 0, offset: int = 0) -> "Header":
        return self.text(name).pack(f"I{len(shape)}QIQ", len(shape), *shape, kind, offset)

    def pad(self, size: int) -> "Header":
        self.data += bytes(-len(self.data) % 32 + size)
        return self


HUGE = (1 << 64) - 1
DAMAGED = {
    "empty": (b"", "is empty: download it again"),
    "magic": (b"PK\3\4" + bytes(100), "is no GGUF file"),
    "magic alone": (b"GGUF", "is cut off or damaged in the header"),
    "old": (Header(1).pad(0).data, "version 1 of the format, which is no longer read"),
    "newer": (Header(4).pad(0).data, "version 4 of the format.*update gllm"),
    "big-endian": (Header(3 << 24).pad(0).data, "big-endian"),
    "keys": (Header(keys=HUGE).pad(64).data, f"count or length of {HUGE}"),
    "tensors": (Header(tensors=1 << 40).pad(64).data, "count or length of 1099511627776"),
    "key's length": (Header(keys=1).pack("Q", 1 << 62).pad(64).data, "key 0 of 1 has a count"),
    "text's length": (
        Header(keys=1).text("a.b").pack("IQ", 8, 1 << 62).data,
        "the value of 'a.b' has a count or length of",
    ),
    "array's length": (
        Header(keys=1).text("a.b").pack("IIQ", 9, 4, 1 << 30).pad(64).data,
        "the value of 'a.b' has a count or length of 1073741824",
    ),
    "array's texts": (
        Header(keys=1).text("a.b").pack("IIQ", 9, 8, 1 << 30).pad(64).data,
        "the value of 'a.b' has a count",
    ),
    "type of a value": (
        Header(keys=1).text("a.b").pack("IQ", 13, 1).pad(64).data,
        "type 13 in the value of 'a.b', which this gllm does not know",
    ),
    "nested arrays": (
        Header(keys=1).text("a.b").pack("IIQ", 9, 9, 1).pad(64).data,
        "type 9 in the value of 'a.b'",
    ),
    "not UTF-8": (Header(keys=1).pack("Q2s", 2, b"\xff\xff").pad(64).data, "is no UTF-8"),
    "key twice": (
        Header(keys=2).text("a.b").pack("IB", 0, 1).text("a.b").pack("IB", 0, 1).pad(64).data,
        "has the key 'a.b' twice",
    ),
    "alignment": (
        Header(keys=1).text("general.alignment").pack("II", 4, 24).pad(64).data,
        "general.alignment 24, which has to be a power of two",
    ),
    "alignment's type": (
        Header(keys=1).text("general.alignment").pack("IQ", 8, 0).pad(64).data,
        "general.alignment ''",
    ),
    "tensor twice": (
        Header(tensors=2).tensor("w", 8).tensor("w", 8, offset=32).pad(64).data,
        "has the tensor 'w' twice",
    ),
    "dimensions": (Header(tensors=1).tensor("w", *[1] * 5).pad(64).data, "'w' has 5 dimensions"),
    "no dimension": (Header(tensors=1).tensor("w").pad(64).data, "'w' has 0 dimensions"),
    "length 0": (Header(tensors=1).tensor("w", 0).pad(64).data, r"'w' has shape \(0,\)"),
    "unknown type": (
        Header(tensors=1).tensor("w", 32, kind=99).pad(64).data,
        "the tensor 'w' of type 99, which this gllm does not know",
    ),
    "removed type": (Header(tensors=1).tensor("w", 32, kind=4).pad(64).data, "'w' of type 4"),
    "part of a block": (
        Header(tensors=1).tensor("w", 48, kind=8).pad(64).data,
        r"'w' has shape \(48,\), which Q8_0 cannot have in blocks of 32",
    ),
    "unaligned": (
        Header(tensors=1).tensor("w", 8, offset=8).pad(64).data,
        "'w' begins at 8, which is no multiple of 32",
    ),
    "beyond the end": (
        Header(tensors=1).tensor("w", 8, offset=64).pad(64).data,
        "its tensor 'w' ends at byte .*cut off or damaged",
    ),
    "far beyond": (Header(tensors=1).tensor("w", HUGE, HUGE).pad(64).data, "'w' ends at byte"),
    "overlap": (
        Header(tensors=2).tensor("v", 16).tensor("w", 8, offset=32).pad(64).data,
        "its tensors 'v' and 'w' overlap",
    ),
}
"""Damaged files and what the error says."""


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_file_is_refused_with_its_name_and_the_fix(tmp_path, case):
    data, message = DAMAGED[case]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=message) as caught:
            GgufFile(path)
        assert tracemalloc.get_traced_memory()[1] < MAX_PEAK_BYTES
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)


def test_file_without_an_architecture_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(Header(keys=1).text("general.architecture").pack("IB", 0, 1).data)
    file = GgufFile(path)
    with pytest.raises(ModelError, match="names no architecture"):
        _ = file.architecture


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        GgufFile(tmp_path / "missing.gguf")


def test_file_that_becomes_shorter_is_an_error(tmp_path, path):
    copy = tmp_path / "model.gguf"
    copy.write_bytes(path.read_bytes())
    file = GgufFile(copy)
    last = list(file.tensors.values())[-1]
    with file.open() as reader:
        copy.write_bytes(path.read_bytes()[: last.offset + 1])
        with pytest.raises(ModelError, match="has become shorter"):
            reader.read(last.offset, last.nbytes)


EXTREMES = (0, 1, 127, 255, 1 << 15, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, 1 << 63, HUGE)


def mutate(data: bytes, source: random.Random) -> bytes:
    """Return data with one to four changes: bits, numbers, cuts, insertions and repetitions."""
    changed = bytearray(data)
    for _ in range(source.randint(1, 4)):
        place = source.randrange(len(changed)) if changed else 0
        kind = source.randrange(5)
        if kind == 0 and changed:
            changed[place] ^= 1 << source.randrange(8)
        elif kind == 1:
            size = source.choice((1, 4, 8))
            number = source.choice(EXTREMES) & ((1 << 8 * size) - 1)
            changed[place : place + size] = number.to_bytes(size, "little")
        elif kind == 2:
            del changed[place:]
        elif kind == 3:
            changed[place:place] = source.randbytes(source.randint(1, 16))
        else:
            end = place + source.randint(1, 64)
            changed[place:place] = changed[place:end]
    return bytes(changed)


FULL_RUNS = 20
"""Runs of `make test-all`, of 5,000 files each."""


@pytest.mark.parametrize(
    "run", [0, *(pytest.param(run, marks=pytest.mark.full) for run in range(1, FULL_RUNS + 1))]
)
def test_mutated_headers_raise_nothing_but_model_errors(tmp_path, path, run):
    num_files = 5000 if run else 300
    source, copy = random.Random(run), tmp_path / "mutated.gguf"
    whole = path.read_bytes()
    data_begin = min(tensor.offset for tensor in GgufFile(path).tensors.values())
    num_refused = 0
    tracemalloc.start()
    try:
        for _ in range(num_files):
            mutated = mutate(whole[:data_begin], source) + whole[data_begin:]
            copy.write_bytes(mutated)
            try:
                tensors = GgufFile(copy).tensors.values()
            except ModelError:
                num_refused += 1
                continue
            for tensor in tensors:
                assert 0 < tensor.nbytes <= len(mutated) - tensor.offset
        assert tracemalloc.get_traced_memory()[1] < MAX_PEAK_BYTES
    finally:
        tracemalloc.stop()
    assert num_refused > num_files // 4
