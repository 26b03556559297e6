#!/usr/bin/env python3
"""gguf_check.py FILE.gguf CHECKPOINT: what `fracbit export` wrote of a Llama, read by the Python package `gguf` (0.19).

Every tensor of the checkpoint is found under llama.cpp's name, queries and keys in llama.cpp's order of rows. F32 and F16 hold its
numbers, Q8_0 the bytes that the package itself makes of them, other types come as near as their levels allow. The vocabulary
is that of tokenizer.json. Prints what was compared; exits with 1 and the reason on a difference.
"""
import json, sys
from pathlib import Path
import numpy as np
from gguf import GGUFReader, GGMLQuantizationType as T, quants
import st

file, source = Path(sys.argv[1]), Path(sys.argv[2])
config = json.loads((source / "config.json").read_text())
weights = st.load_model(source)
heads = config["num_attention_heads"]
kv = config.get("num_key_value_heads", heads)
NAMES = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
         "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LIMITS = {T.Q4_0: 0.011, T.Q5_0: 0.0028, T.Q4_K: 0.008, T.Q6_K: 0.0007}


def fail(text):
    sys.exit(f"{file}: {text}")


def expected(name):
    part, kind = name.rsplit(".", 1)
    if part in OUTER:
        return weights[f"{OUTER[part]}.{kind}"]
    _, layer, own = part.split(".")
    w = weights[f"model.layers.{layer}.{NAMES[own]}.{kind}"]
    if own in ("attn_q", "attn_k"):
        n = heads if own == "attn_q" else kv
        w = w.reshape(n, 2, w.shape[0] // n // 2, -1).swapaxes(1, 2).reshape(w.shape)
    return w


reader, seen = GGUFReader(file), {}
for t in reader.tensors:
    if t.name == "rope_freqs.weight":
        continue
    want = np.ascontiguousarray(expected(t.name), dtype=np.float32)
    if tuple(int(d) for d in reversed(t.shape)) != want.shape:
        fail(f"{t.name}: shape {t.shape}, want {want.shape}")
    got = quants.dequantize(t.data, t.tensor_type).reshape(want.shape)
    if t.tensor_type == T.F32:
        good = np.array_equal(got, want)
    elif t.tensor_type == T.F16:
        good = np.array_equal(got, want.astype(np.float16).astype(np.float32))
    elif t.tensor_type == T.Q8_0:
        good = np.array_equal(t.data.ravel(), quants.quantize(want, T.Q8_0).ravel())
    else:
        good = ((got - want) ** 2).sum() < LIMITS[t.tensor_type] * (want ** 2).sum()
    if not good:
        fail(f"{t.name} ({t.tensor_type.name}) differs")
    seen[t.tensor_type.name] = seen.get(t.tensor_type.name, 0) + 1
stored = 9 * config["num_hidden_layers"] + 2 + (not config.get("tie_word_embeddings", False))
if sum(seen.values()) != stored:
    fail(f"{sum(seen.values())} tensors, want {stored}")
field = lambda key: reader.fields[key].contents()
vocab = json.loads((source / "tokenizer.json").read_text())
known = dict(vocab["model"]["vocab"], **{t["content"]: t["id"] for t in vocab["added_tokens"]})
tokens = field("tokenizer.ggml.tokens")
if len(tokens) != config["vocab_size"] or any(tokens[i] != text for text, i in known.items()):
    fail("the vocabulary differs")
print(f"{file.name}: {seen}, {len(tokens)} tokens")
