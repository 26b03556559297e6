"""Logits of GGUF files by fracbit and by llama.cpp: python3 llama_check.py LOGITS FILE.gguf...

LOGITS is the built example (cargo build --example logits). Wants the package llama-cpp-python; not part of the tests, which have
neither it nor a model. Prints for each file the largest difference of logits relative to their standard deviation, the mean divergence
and how often both have the same likeliest token.
"""

import subprocess
import sys
import tempfile

import llama_cpp
import numpy as np

TEXT = (
    "The harbour lay still in the morning. Two boats had come in with the tide, and their crews were carrying "
    "baskets up the steps: herring, mostly, and a few crabs that nobody had ordered. def area(r): return 3.14159 * r * r"
)


def theirs(path, text):
    # Both caches in single precision.
    single = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    model = llama_cpp.Llama(path, n_ctx=512, n_batch=512, logits_all=True, verbose=False, **single)
    tokens = model.tokenize(text.encode(), add_bos=True, special=False)
    model.eval(tokens)
    return tokens, np.array(model.scores[: len(tokens)], dtype=np.float32)


def ours(program, path, tokens):
    with tempfile.NamedTemporaryFile() as out:
        subprocess.run([program, path, out.name, *map(str, tokens)], check=True)
        return np.fromfile(out.name, dtype="<f4").reshape(len(tokens), -1)


def main(program, *paths):
    for path in paths:
        tokens, a = theirs(path, TEXT)
        b = ours(program, path, tokens)
        assert a.shape == b.shape, (a.shape, b.shape)
        p, q = (x - np.log(np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True)) - x.max(1, keepdims=True) for x in (a, b))
        worst = np.abs(a - b).max() / a.std()
        mean = np.sqrt(((a - b) ** 2).mean()) / a.std()
        kl = (np.exp(p) * (p - q)).sum(1).mean()
        same = (a.argmax(1) == b.argmax(1)).mean()
        print(f"{path}: {len(tokens)} tokens, worst {worst:.2e}, rms {mean:.2e}, KL {kl:.2e}, same {100 * same:.1f} %")


main(*sys.argv[1:])
