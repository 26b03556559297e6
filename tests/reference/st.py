"""safetensors files in plain Python: just enough to write and read the checkpoints of this directory.

A file is: u64 little-endian length N of the header; N bytes of JSON, `{name: {dtype, shape, data_offsets}}`, padded with
spaces; then the tensor bytes, row-major little-endian, offsets counted from the end of the header.

Numbers are stored by rounding to nearest even (F16, BF16 go through F32, as in the usual tools) and read back into float64, which
holds every F32, F16, BF16 and F8_E4M3 value exactly. A matrix `name` in F8_E4M3 has its scales beside it, as `name_scale_inv`: of all numbers, or of
each block of 128 x 128.
"""

import json
import struct

import numpy as np

BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1}
BLOCK = 128


def e4m3():
    """The 127 numbers of F8_E4M3 that are not negative, by their bytes: 4 bits of exponent, 3 of mantissa, the last of 128 is no number."""
    byte = np.arange(127)
    exponent, mantissa = byte >> 3, byte & 7
    return np.where(exponent == 0, mantissa / 512.0, (1.0 + mantissa / 8.0) * 2.0 ** (exponent - 7.0))


def encode_e4m3(values):
    """The nearest numbers, the even one of two; at most 448 in magnitude."""
    known = e4m3()
    size = np.abs(np.asarray(values, dtype=np.float64).reshape(-1))
    above = np.clip(np.searchsorted(known, size), 1, 126)
    low, high = size - known[above - 1], known[above] - size
    byte = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    return (byte + 128 * (np.asarray(values).reshape(-1) < 0)).astype("u1").tobytes()


def scales_of(values, dtype, blocks):
    """(the numbers to be stored in F8_E4M3, their scales): the largest number that meets a scale becomes 448. Scales are rounded to `dtype` first."""
    rows, cols = values.shape
    size = BLOCK if blocks else max(rows, cols)
    down, across = -(-rows // size), -(-cols // size)
    part = [[np.s_[r * size : (r + 1) * size, c * size : (c + 1) * size] for c in range(across)] for r in range(down)]
    most = np.array([[np.abs(values[at]).max() for at in row] for row in part])
    scale = decode(encode(most / 448.0, dtype), dtype, most.shape if blocks else ())
    return values / spread(scale, values.shape), scale


def spread(scale, shape):
    """A scale for each number."""
    if scale.ndim == 0:
        return np.broadcast_to(scale, shape)
    return scale.repeat(BLOCK, axis=0).repeat(BLOCK, axis=1)[: shape[0], : shape[1]]


def encode(values, dtype):
    """The little-endian bytes of `values` stored as `dtype`."""
    if dtype == "F8_E4M3":
        return encode_e4m3(values)
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
    elif dtype == "F8_E4M3":
        known = np.append(e4m3(), np.nan)
        flat = np.append(known, -known)[np.frombuffer(data, dtype="u1")]
    else:
        raise ValueError(f"decode: dtype should be one of {sorted(BYTES)}, got {dtype}")
    return flat.astype(np.float64).reshape(shape)


def dump(tensors, dtype):
    """File bytes of `tensors` (name -> array), stored as `dtype`, those with scales as F8_E4M3, in the order of the dictionary."""
    header, body = {"__metadata__": {"format": "pt"}}, b""
    for name, values in tensors.items():
        own = "F8_E4M3" if f"{name}_scale_inv" in tensors else dtype
        data = encode(values, own)
        header[name] = {"dtype": own, "shape": list(values.shape), "data_offsets": [len(body), len(body) + len(data)]}
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


def with_scales(tensors):
    """The numbers that 8-bit ones and their scales stand for; scales of activations are left out."""
    out = {}
    for name, values in tensors.items():
        scale = tensors.get(f"{name}_scale_inv")
        if not name.endswith("_scale_inv") and not name.endswith("activation_scale"):
            out[name] = values if scale is None else values * spread(scale, values.shape)
    return out


def load_model(directory):
    """All tensors of a model directory (one file, or shards named by an index) as float64."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return with_scales(load((directory / "model.safetensors").read_bytes()))
    where = json.loads(index.read_text())["weight_map"]
    shards = {shard: load((directory / shard).read_bytes()) for shard in sorted(set(where.values()))}
    return {name: shards[shard][name] for name, shard in where.items()}
