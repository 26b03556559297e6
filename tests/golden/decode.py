#!/usr/bin/env python3
"""A second reader of the packed layout, written from docs/formats.md: derives the tile lines of tiles.txt again.

Shares nothing with the Rust code but that page and the generator of the inputs (`Numbers` in tests/golden.rs). Needs
Python 3 only. `python3 decode.py` exits with 1 at the first line that differs.
"""

import pathlib
import sys

TILE = 256
M16 = 0xFFFF


class Numbers:
    """Knuth's 64-bit generator; the upper half of the state."""

    def __init__(self, seed):
        self.state = seed

    def next(self):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return self.state >> 32


def fnv(data):
    h = 0xCBF29CE484222325
    for b in data:
        h = (h ^ b) * 0x100000001B3 % 2**64
    return h


def bits(tape, at, count):
    """`count` bits of the circular tape from bit `at`, least significant first."""
    n = 8 * len(tape)
    return sum((tape[(at + i) % n // 8] >> (at + i) % 8 & 1) << i for i in range(count))


def signed(word):
    return word - 0x10000 if word & 0x8000 else word


def hash_fine(x):
    return x * (x + 0x79B5) & M16


def hash_hyb(x):
    return x * (x + 1) & M16


# By quarters of a bit.
FACTORS = {
    4: 0xE84B7101, 5: 0x89A3E601, 6: 0x62F08201, 7: 0x5D613201, 8: 0x28B86601, 10: 0x57CE01, 12: 0x176601,
    14: 0xB68F01, 16: 0xD6C401, 18: 0xE99401, 20: 0xB05201,
}


def hash_fast(x, v, rate):
    """The bytes of `v` weights."""
    factor = FACTORS[rate]
    if v == 4:
        return ((x << 16 | x) * factor >> 8 & 0xFFFFFFFF).to_bytes(4, "little")
    return (signed(x) * factor >> 8 & M16).to_bytes(2, "little")


def tile(family, code, rate, entries, tape):
    """The 256 integers of a tile, row-major. `rate` is in quarters of a bit."""
    if family == "nuq":
        r = rate // 4
        return [entries[bits(tape, i * r, r)] for i in range(TILE)]
    if family == "nest-nuq":
        # The table of whole codes is the last one.
        r = rate // 4
        return [entries[len(entries) - (1 << r) + bits(tape, i * r, r)] for i in range(TILE)]
    if family == "int":
        # Two's complement; the lowest code of eight bits means -127.
        r = rate // 4
        codes = [bits(tape, i * r, r) for i in range(TILE)]
        return [max(c - (c >> r - 1 << r), -127) for c in codes]
    if family == "gnuq":
        # Row i has codebook i, as far as there are so many.
        r = rate // 4
        books = len(entries) >> r
        return [entries[(i // 16 % books << r) + bits(tape, i * r, r)] for i in range(TILE)]
    if family == "qoq":
        # Row i has integer scale 16 - i and zero i.
        codes = [bits(tape, i * 4, 4) for i in range(TILE)]
        return [(16 - i // 16) * (c - i // 16) for i, c in enumerate(codes)]
    if family == "vq":
        r = rate // 2
        return [entries[2 * bits(tape, i // 2 * r, r) + i % 2] for i in range(TILE)]
    if family == "aq":
        # Codes by columns of a centroid, codebook and row; entries by codebook, centroid and weight.
        # A byte is a code, or two of four bits, the even codebook's in the low ones.
        m, v, width = code
        each = 8 // width
        byte = lambda r, c, b: tape[(c // v * (m // each) + b // each) * 16 + r]
        index = lambda r, c, b: byte(r, c, b) >> b % each * width & (1 << width) - 1
        cell = lambda r, c, b: ((b << width) + index(r, c, b)) * v + c % v
        return [sum(entries[cell(i // 16, i % 16, b)] for b in range(m)) for i in range(TILE)]
    v = {"fine": 1, "fast": 4 if rate <= 8 else 2, "hyb": 2}[code]
    out = []
    for t in range(TILE // v):
        x = bits(tape, t * v * rate // 4, 16)
        if code == "fine":
            h = hash_fine(x)
            q = len(entries).bit_length() - 1
            value = entries[(h & 0x7FFF) >> 15 - q]
            out.append(-value if h >> 15 else value)
        elif code == "fast":
            for b in hash_fast(x, v, rate):
                value = entries[b % len(entries)]
                out.append(-value if b >> 7 else value)
        else:
            h = hash_hyb(x)
            q = (len(entries) // 2).bit_length() - 1
            i = 2 * ((h & 0x7FFF) >> 15 - q)
            out += [-entries[i] if h >> 15 else entries[i], entries[i + 1]]
    return out


def parse(name):
    words = name.split("-")
    if words[0] == "qoq":
        return words[0], "fine", 16
    if name.startswith("nest-nuq-"):
        return "nest-nuq", "fine", 4 * int(name.split("..")[1])
    if words[0] == "aq":
        books, _, b = words[1].partition("b")
        m, v = map(int, books[1:].split("v"))
        b = int(b or 8)
        return "aq", (m, v, b), 4 * b * m // v
    rate = int(float(words[-1]) * 4)
    code = words[1] if len(words) == 3 else "fine"
    return words[0], code, rate


def main():
    path = pathlib.Path(__file__).parent / "tiles.txt"
    count = 0
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.startswith("tile "):
            continue
        _, name, length, want, *first = line.split()
        family, code, rate = parse(name)
        numbers = Numbers(rate << 32 | int(length))
        most = 127 if family in ("gnuq", "nest-nuq") else 127 // code[0] if family == "aq" else 32767
        entries = [numbers.next() % (2 * most + 1) - most for _ in range(int(length))]
        numbers = Numbers(1)
        tape = bytes(numbers.next() >> 24 for _ in range(8 * rate))
        got = tile(family, code, rate, entries, tape)
        digest = f"{fnv(b''.join(v.to_bytes(2, 'little', signed=True) for v in got)):016x}"
        if digest != want or [str(v) for v in got[:16]] != first:
            sys.exit(f"line {number} of tiles.txt, {name} with {length} entries: expected {want}, derived {digest} {got[:16]}")
        count += 1
    print(f"golden/tiles.txt: {count} tiles derived again")


if __name__ == "__main__":
    main()
