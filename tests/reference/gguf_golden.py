#!/usr/bin/env python3
"""gguf_golden.py [--check]: tables and golden vectors of GGUF's block types, by the Python package `gguf` (0.19, with numpy).

Writes crates/fracbit-io/src/gguf/grids/*.bin, the tables of the types whose numbers come in groups, and
crates/fracbit-io/tests/golden/blocks.bin: for every type that the package dequantizes its number, and blocks of random
bytes with what they are in single precision. `--check` compares with what is committed.
"""
import struct, sys
from pathlib import Path
import numpy as np
from gguf import quants
from gguf.constants import GGMLQuantizationType as T, GGML_QUANT_SIZES

CRATE = Path(__file__).resolve().parents[2] / "crates" / "fracbit-io"
check, failed = "--check" in sys.argv[1:], []


def emit(path, data):
    if check:
        if not path.exists() or path.read_bytes() != data:
            failed.append(path)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


for name, kind in [("iq2_xxs", "IQ2_XXS"), ("iq2_xs", "IQ2_XS"), ("iq2_s", "IQ2_S"), ("iq3_xxs", "IQ3_XXS"), ("iq3_s", "IQ3_S"), ("iq1", "IQ1_S")]:
    q = getattr(quants, kind)
    q.init_grid()
    levels = list(q.grid_map)
    index = np.array([levels.index(int(v)) for v in q.grid.ravel()], dtype=np.uint8)
    bits = 2 if len(levels) <= 4 else 4
    parts = index.reshape(-1, 8 // bits)
    emit(CRATE / f"src/gguf/grids/{name}.bin", sum(parts[:, i] << (bits * i) for i in range(8 // bits)).astype(np.uint8).tobytes())

# Where the scales in half precision are: random bits would be infinite or no number at times.
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2],
          "Q6_K": [208], "IQ2_XXS": [0], "IQ2_XS": [0], "IQ2_S": [0], "IQ3_XXS": [0], "IQ3_S": [0], "IQ1_S": [0], "IQ4_NL": [0], "IQ4_XS": [0],
          "TQ1_0": [52], "TQ2_0": [64], "IQ1_M": [], "MXFP4": [], "NVFP4": []}
rng = np.random.default_rng(46)
out = b""
for name, halves in HALVES.items():
    kind = T[name]
    size, width = GGML_QUANT_SIZES[kind]
    n = 2 if size == 256 else 8
    blocks = rng.integers(0, 256, (n, width), dtype=np.uint8)
    for at in halves:
        blocks[:, at:at + 2] = (rng.standard_normal((n, 1)) * 0.01).astype(np.float16).view(np.uint8)
    if name == "IQ1_M":  # four bits of the scale in each of four words
        blocks[:, 49::2] &= 0x0f
        blocks[:, 49::2] |= np.array([0x50, 0x30, 0xa0, 0x10], dtype=np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = [0, 1, 2, 3, 100, 126, 127, 140]
    if name == "NVFP4":
        blocks[0, :4], blocks[1, :4] = [0, 1, 7, 8], [0x7e, 0x7f, 0x80, 0xff]
    numbers = quants.dequantize(blocks, kind).astype("<f4")
    assert np.isfinite(numbers).all(), name
    out += struct.pack("<II", kind, n) + blocks.tobytes() + numbers.tobytes()
emit(CRATE / "tests/golden/blocks.bin", out)

# What the package rounds: numbers and their blocks.
x = (rng.standard_normal((8, 32)) * np.array([[1, 0.02, 1e-3, 30, 0.1, 1, 1, 0]]).T).astype("<f4")
emit(CRATE / "tests/golden/q8_0.bin", x.tobytes() + quants.quantize(x, T.Q8_0).tobytes())
if failed:
    sys.exit("differ: " + ", ".join(map(str, failed)))
