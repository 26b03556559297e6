"""safetensors files in plain Python: just enough to write and read the checkpoints of this directory.

A file is: u64 little-endian length N of the header; N bytes of JSON, `{name: {dtype, shape, data_offsets}}`, padded with
spaces; then the tensor bytes, row-major little-endian, offsets counted from the end of the header.

Numbers are stored by rounding to nearest even (F16, BF16 go through F32, as in the usual tools) and read back into float64, which
holds every F32, F16 and BF16 value exactly.
"""

import json
import struct

import numpy as np

BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def encode(values, dtype):
    """The little-endian bytes of `values` stored as `dtype`."""
    f32 = np.ascontiguousarray(values, dtype="<f4")
    if dtype == "F32":
        return f32.tobytes()
    if dtype == "F16":
        return f32.astype("<f2").tobytes()
    if dtype == "BF16":
        bits = f32.view("<u4")
        # Round to nearest, ties to even: add half of the dropped range, less one when the kept part is even. No NaN here.
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    raise ValueError(f"encode: dtype should be one of {sorted(BYTES)}, got {dtype}")


def decode(data, dtype, shape):
    """float64 array of `shape` from the bytes of a `dtype` tensor."""
    if dtype == "F32":
        flat = np.frombuffer(data, dtype="<f4")
    elif dtype == "F16":
        flat = np.frombuffer(data, dtype="<f2")
    elif dtype == "BF16":
        flat = (np.frombuffer(data, dtype="<u2").astype("<u4") << 16).view("<f4")
    else:
        raise ValueError(f"decode: dtype should be one of {sorted(BYTES)}, got {dtype}")
    return flat.astype(np.float64).reshape(shape)


def dump(tensors, dtype):
    """File bytes of `tensors` (name -> array), all stored as `dtype`, in the order of the dictionary."""
    header, body = {"__metadata__": {"format": "pt"}}, b""
    for name, values in tensors.items():
        data = encode(values, dtype)
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def load(data):
    """name -> float64 array from the bytes of a file."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    body = data[8 + length :]
    out = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        want = BYTES[entry["dtype"]] * int(np.prod(entry["shape"], dtype=np.int64))
        if not (0 <= begin <= end <= len(body) and end - begin == want):
            raise ValueError(f"load: {name}: data_offsets should span {want} bytes inside {len(body)}, got {begin}..{end}")
        out[name] = decode(body[begin:end], entry["dtype"], entry["shape"])
    return out


def load_model(directory):
    """All tensors of a model directory (one file, or shards named by an index) as float64."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return load((directory / "model.safetensors").read_bytes())
    where = json.loads(index.read_text())["weight_map"]
    shards = {shard: load((directory / shard).read_bytes()) for shard in sorted(set(where.values()))}
    return {name: shards[shard][name] for name, shard in where.items()}
