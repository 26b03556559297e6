"""A plain float64 decoder: the second, independent implementation that the Rust runtime is compared with.

    python3 reference.py                   # (re)write models/*/{reference.json,logits.f32,hidden.f32} and rope.json
    python3 reference.py --check           # recompute and compare with the committed files; exit status 1 on any difference

Written from the definitions of the models, for reading rather than for speed: the whole sequence at once, no cache, one head at a
time. All arithmetic is float64 on the stored (already rounded) weights.

    x = embedding[token]
    each block:   x += attention(rms_norm(x));  x += down(silu(gate(n)) * up(n)),  n = rms_norm(x)
    logits = head(rms_norm(x))

Where there are experts, the second line is  x += sum over a token's experts of r_e down_e(silu(gate_e(n)) * up_e(n)),  r = softmax(router(n)).

Gemma 2 and 3 multiply the embedding by sqrt(h), have gelu in place of silu and normalize what attention and feed-forward add, too;
Gemma 2 caps scores and logits: c tanh(x / c).
Ministral 3 multiplies the queries at position p by 1 + beta ln(1 + floor(p / original context)).
OLMo 2 and 3 and EXAONE 4 normalize only that. ERNIE 4.5 and GLM-4 rotate neighbouring channels, GLM-4 half of them.

Symbols: s = positions, h = hidden size, d = head dimension, i = a query's position, j = a key's.
"""

import argparse
import itertools
import json
import math
import pathlib
import sys
from unittest import mock

import numpy as np

import st

HERE = pathlib.Path(__file__).resolve().parent
MODELS = HERE / "models"


# ---- pieces ---------------------------------------------------------------------------------------------------------------------


def rms_norm(x, weight, eps):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def silu(x):
    # Same value as x / (1 + exp(-x)); tanh does not overflow for large negative x.
    return x * 0.5 * (1.0 + np.tanh(0.5 * x))


def gelu_tanh(x):
    """The tanh approximation of x * P(normal < x)."""
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def soft_cap(x, cap):
    """x below a cap in magnitude; as it is where that is None."""
    return x if cap is None else cap * np.tanh(x / cap)


GEMMAS = ("gemma2", "gemma3_text")

# The tensor that a matrix may be fused into, and which of its parts it is, from the top.
FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


def weight(config, tensors, name):
    """A matrix, or its rows of the tensor that it is fused into (Phi-3, Granite 4)."""
    found = tensors.get(f"{name}.weight")
    if found is not None:
        return found
    block, own = name.rsplit(".", 1)
    if config["model_type"] == "granitemoehybrid":
        shared = block.replace(".mlp", ".shared_mlp")
        if own == "down_proj":
            return tensors[f"{shared}.output_linear.weight"]
        return np.split(tensors[f"{shared}.input_linear.weight"], 2)[FUSED[own][1]]
    whole, place = FUSED[own]
    fused = tensors[f"{block}.{whole}.weight"]
    if whole == "gate_up_proj":
        return np.split(fused, 2)[place]
    heads, kv_heads, d = head_sizes(config)
    return np.split(fused, [heads * d, (heads + kv_heads) * d])[place]


def linear(config, tensors, name, x):
    """x W^T (+ b when stored)."""
    y = x @ weight(config, tensors, name).T
    bias = tensors.get(f"{name}.bias")
    return y if bias is None else y + bias


def norm(config, tensors, name, x):
    """The RMS norm of a name; Gemma stores how far its gain is from 1."""
    stored = tensors[f"{name}.weight"]
    gain = 1.0 + stored if config["model_type"] in GEMMAS else stored
    return rms_norm(x, gain, config.get("rms_norm_eps", 1e-6))


def rope_frequencies(head_dim, theta, scaling):
    """Angle per position of each of the head_dim/2 planes."""
    freq = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return freq
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "default":
        return freq
    factor = scaling["factor"]
    if kind == "linear":
        return freq / factor
    if kind == "llama3":
        # Planes that turn often within the original context keep their speed, planes that turn less than `low` times are slowed down
        # by `factor`, those between are interpolated linearly in the number of turns.
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * freq / (2.0 * math.pi)
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return keep * freq + (1.0 - keep) * freq / factor
    raise ValueError(f"rope_frequencies: rope_type should be default, linear or llama3, got {kind}")


def yarn_frequencies(freq, theta, scaling, original):
    """Planes that turn often within the original context keep their speed, those that turn seldom are slowed down by `factor`, those between are
    interpolated linearly in the plane's number; the ends of that ramp are whole planes."""
    dim = 2 * len(freq)

    def plane(turns):
        return dim * math.log(original / (turns * 2.0 * math.pi)) / (2.0 * math.log(theta))

    low, high = max(math.floor(plane(scaling.get("beta_fast", 32.0))), 0), min(math.ceil(plane(scaling.get("beta_slow", 1.0))), dim - 1)
    slow = np.clip((np.arange(len(freq)) - low) / (high - low if high > low else 0.001), 0.0, 1.0)
    return (1.0 - slow) * freq + slow * freq / scaling["factor"]


def longrope_frequencies(freq, scaling, original, length):
    """Each plane slowed down by its own number, of one list for texts up to the original context and another for longer ones."""
    return freq / np.array(scaling["long_factor" if length > original else "short_factor"])


def rope_gain(config):
    """What cosines and sines are multiplied by."""
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "yarn":
        def magnitude(times):
            return 0.1 * times * math.log(scaling["factor"]) + 1.0

        both = magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"]) if "mscale" in scaling else magnitude(1.0)
        return scaling.get("attention_factor", both)
    if kind == "longrope":
        original = config["original_max_position_embeddings"]
        return math.sqrt(1.0 + math.log(config["max_position_embeddings"] / original) / math.log(original))
    return 1.0


def frequencies_of(config, length):
    """Angle per position of each plane that turns, in a text of `length` tokens."""
    _, _, d = head_sizes(config)
    theta, scaling = config.get("rope_theta", 10000.0), config.get("rope_scaling")
    turning = int(d * config.get("partial_rotary_factor", 1.0))
    kind = None if scaling is None else scaling.get("rope_type", scaling.get("type"))
    if kind in ("yarn", "longrope"):
        freq = rope_frequencies(turning, theta, None)
        if kind == "yarn":
            return yarn_frequencies(freq, theta, scaling, scaling["original_max_position_embeddings"])
        return longrope_frequencies(freq, scaling, config["original_max_position_embeddings"], length)
    return rope_frequencies(turning, theta, scaling)


def rotate(x, freq, gain=1.0):
    """Rotates the planes (k, k + r/2) of the first r = 2 len(freq) channels of x (s, d) by position * freq[k]: the half-split convention of the
    stored weights. The other channels stay as they are."""
    angle = np.arange(x.shape[0], dtype=np.float64)[:, None] * freq[None, :]
    cos, sin = gain * np.cos(angle), gain * np.sin(angle)
    a, b, still = np.split(x, [len(freq), 2 * len(freq)], axis=1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, still], axis=1)


def in_halves(x, turning):
    """x (s, d) with the first of each pair of the channels that turn in front, then the second ones, then those that stand still."""
    return np.concatenate([x[:, 0:turning:2], x[:, 1:turning:2], x[:, turning:]], axis=1)


def visible(length, window):
    """(s, s) bool: position i sees j when 0 <= i - j, and i - j < window if there is one."""
    behind = np.arange(length)[:, None] - np.arange(length)[None, :]
    mask = behind >= 0
    return mask if window is None else mask & (behind < window)


def grown(config, q):
    """Queries (s, d) that grow with their position (Ministral 3)."""
    scaling = config.get("rope_scaling") or {}
    if "llama_4_scaling_beta" not in scaling:
        return q
    times = np.floor(np.arange(q.shape[0]) / scaling["original_max_position_embeddings"])
    return q * (1.0 + scaling["llama_4_scaling_beta"] * np.log(1.0 + times))[:, None]


def kv_head_of(head, heads, kv_heads):
    """Consecutive query heads share a key/value head."""
    return head // (heads // kv_heads)


def attend(q, k, v, mask, multiplier=None, cap=None):
    """softmax(q k^T / sqrt(d)) v for one head, or with another factor of the scores and a cap; q, k, v are (s, d)."""
    score = q @ k.T / math.sqrt(q.shape[1]) if multiplier is None else q @ k.T * multiplier
    score = np.where(mask, soft_cap(score, cap), -np.inf)
    weight = np.exp(score - score.max(axis=1, keepdims=True))
    return weight / weight.sum(axis=1, keepdims=True) @ v


# ---- configuration --------------------------------------------------------------------------------------------------------------

# What configurations of a family may leave out, where that differs from the defaults in the code.
DEFAULTS = {
    "mixtral": {"rope_theta": 1e6},
    "gemma2": {
        "tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 4096, "sliding_window_pattern": 2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        "tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window": 4096, "sliding_window_pattern": 6,
    },
    "olmo3": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "exaone4": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "ernie4_5": {"rope_theta": 5e5, "tie_word_embeddings": True},
    "glm4": {"partial_rotary_factor": 0.5},
}


def slides(config, layer):
    """Whether a layer of Gemma 2, 3, OLMo 3 or EXAONE 4 has a window; without a list every layer but each p-th has."""
    types = config.get("layer_types")
    if types is not None:
        return types[layer] == "sliding_attention"
    return (layer + 1) % config["sliding_window_pattern"] != 0


def window_of(config, layer):
    """The sliding window of a layer, or None."""
    window = config.get("sliding_window")
    if config["model_type"] in ("mistral", "phi3"):
        return window
    if config["model_type"] in (*GEMMAS, "olmo3", "exaone4"):
        return window if slides(config, layer) else None
    if config["model_type"] in ("qwen2", "qwen3", "smollm3") and config.get("use_sliding_window", False):
        types = config.get("layer_types")
        if types is not None:
            return window if types[layer] == "sliding_attention" else None
        return window if layer >= config["max_window_layers"] else None
    return None


def rotates(config, layer):
    """Whether a layer applies RoPE. SmolLM3's list says 1 where it does; without a list every fourth layer does not. In EXAONE 4 those with a window do, where any has one."""
    if config["model_type"] == "exaone4":
        return config["sliding_window"] is None or slides(config, layer)
    if config["model_type"] != "smollm3":
        return True
    flags = config.get("no_rope_layers")
    if flags is not None:
        return bool(flags[layer])
    return (layer + 1) % config.get("no_rope_layer_interval", 4) != 0


def rope_settings(config, layer):
    """The configuration with a layer's own RoPE: sliding layers of Gemma 3 and OLMo 3 have no scaling, those of Gemma another theta, too."""
    if config["model_type"] not in ("gemma3_text", "olmo3") or not slides(config, layer):
        return config
    return {**config, "rope_theta": config.get("rope_local_base_freq", config["rope_theta"]), "rope_scaling": None}


def score_factor(config):
    """What scores are multiplied by where that is not 1 / sqrt(d), or None."""
    scalar = config.get("query_pre_attn_scalar")
    return config.get("attention_multiplier") if scalar is None else scalar**-0.5


def head_sizes(config):
    """(heads, kv heads, head dimension), with the defaults of configurations that leave them out."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return heads, kv_heads, head_dim


# ---- the model ------------------------------------------------------------------------------------------------------------------


def attention(config, tensors, layer, x):
    """The attention of one block on normalized input x (s, h)."""
    block = f"model.layers.{layer}.self_attn"
    heads, kv_heads, d = head_sizes(config)
    rope = rope_settings(config, layer)
    freq, gain = frequencies_of(rope, x.shape[0]), rope_gain(rope)
    mask = visible(x.shape[0], window_of(config, layer))

    def split(name, count):
        y = linear(config, tensors, f"{block}.{name}_proj", x)
        if config["model_type"].startswith("olmo") and name != "v":  # over all heads together
            y = norm(config, tensors, f"{block}.{name}_norm", y)
        parts = [y[:, n * d : (n + 1) * d] for n in range(count)]
        if not config["model_type"].startswith("olmo") and f"{block}.{name}_norm.weight" in tensors:  # per head over d, before RoPE (Qwen3, Gemma 3)
            parts = [norm(config, tensors, f"{block}.{name}_norm", part) for part in parts]
        return parts

    q, k, v = split("q", heads), split("k", kv_heads), split("v", kv_heads)
    if config["model_type"] in ("ernie4_5", "glm4"):  # the same order of q's and k's channels changes no product
        q, k = [in_halves(part, 2 * len(freq)) for part in q], [in_halves(part, 2 * len(freq)) for part in k]
    if rotates(config, layer):
        q, k = [rotate(part, freq, gain) for part in q], [rotate(part, freq, gain) for part in k]
    q = [grown(config, part) for part in q]
    out = []
    for head in range(heads):
        shared = kv_head_of(head, heads, kv_heads)
        out.append(attend(q[head], k[shared], v[shared], mask, score_factor(config), config.get("attn_logit_softcapping")))
    return linear(config, tensors, f"{block}.o_proj", np.concatenate(out, axis=1))


def feed_forward(config, tensors, layer, x):
    """SwiGLU, or with gelu in place of silu, on normalized input x (s, h)."""
    block = f"model.layers.{layer}.mlp"
    activation = gelu_tanh if config.get("hidden_activation") == "gelu_pytorch_tanh" else silu
    gated = activation(linear(config, tensors, f"{block}.gate_proj", x)) * linear(config, tensors, f"{block}.up_proj", x)
    return linear(config, tensors, f"{block}.down_proj", gated)


def expert_weight(config, tensors, layer, expert, which):
    """The gate, up or down matrix of one expert."""
    block = f"model.layers.{layer}"
    if config["model_type"] == "mixtral":
        own = {"gate": "w1", "up": "w3", "down": "w2"}[which]
        return tensors[f"{block}.block_sparse_moe.experts.{expert}.{own}.weight"]
    if config["model_type"] == "granitemoe":
        whole = tensors[f"{block}.block_sparse_moe.{'output' if which == 'down' else 'input'}_linear.weight"][expert]
        return whole if which == "down" else np.split(whole, 2)[which == "up"]
    return tensors[f"{block}.mlp.experts.{expert}.{which}_proj.weight"]


def router_logits(config, tensors, layer, x):
    name = {"mixtral": "block_sparse_moe.gate", "granitemoe": "block_sparse_moe.router.layer"}.get(config["model_type"], "mlp.gate")
    return x @ tensors[f"model.layers.{layer}.{name}.weight"].T


def shares(config, scores):
    """What each expert's output is multiplied by, 0 for those that a token does not get, from the router's scores of one token."""
    share = np.exp(scores - scores.max())
    share = share / share.sum()
    chosen = np.argsort(-scores, kind="stable")[: config["num_experts_per_tok"]]
    out = np.zeros_like(share)
    out[chosen] = share[chosen]
    renormalized = config["model_type"] in ("mixtral", "granitemoe") or config.get("norm_topk_prob", False)
    return out / out.sum() if renormalized else out


def experts_of(config):
    return config.get("num_experts", config.get("num_local_experts"))


def mixture(config, tensors, layer, x):
    """Every expert for every token, weighed."""
    share = np.stack([shares(config, scores) for scores in router_logits(config, tensors, layer, x)])
    out = np.zeros_like(x)
    for expert in range(experts_of(config)):
        gate, up, down = [expert_weight(config, tensors, layer, expert, which) for which in ("gate", "up", "down")]
        out = out + share[:, expert : expert + 1] * ((silu(x @ gate.T) * (x @ up.T)) @ down.T)
    return out


def least_lead_of_experts(config, tensors, tokens):
    """The smallest distance, over tokens and layers, between the scores of the last expert that is chosen and the first that is not."""
    least = math.inf
    right = router_logits

    def watch(config, tensors, layer, x):
        nonlocal least
        scores = right(config, tensors, layer, x)
        ranked = -np.sort(-scores, axis=1)
        active = config["num_experts_per_tok"]
        least = min(least, float((ranked[:, active - 1] - ranked[:, active]).min()))
        return scores

    with mock.patch(f"{__name__}.router_logits", watch):
        logits(config, tensors, tokens)
    return least


def norms_only_behind(config):
    """Whether attention and feed-forward read the residual stream as it is (OLMo 2 and 3, EXAONE 4)."""
    return config["model_type"] in ("olmo2", "olmo3", "exaone4")


def read(config, tensors, name, x):
    """What attention or feed-forward reads of the residual stream."""
    return x if norms_only_behind(config) else norm(config, tensors, name, x)


def logits(config, tensors, tokens):
    """(s, vocab) float64 logits of a token sequence."""
    return outputs(config, tensors, tokens)[1]


def outputs(config, tensors, tokens):
    """(s, h) normalized final hidden states and (s, vocab) logits of a token sequence, float64."""
    config = {**DEFAULTS.get(config["model_type"], {}), **config}
    if "rope_parameters" in config:  # as transformers 5 writes it
        config = {**config, "rope_theta": config["rope_parameters"]["rope_theta"], "rope_scaling": config["rope_parameters"]}
    gemma = config["model_type"] in GEMMAS
    only_behind, glm = norms_only_behind(config), config["model_type"] == "glm4"
    # Tied models store one matrix, under either name.
    embedding, head = tensors.get("model.embed_tokens.weight"), tensors.get("lm_head.weight")
    if config.get("tie_word_embeddings", False):
        embedding = head if embedding is None else embedding
        head = embedding
    factor = math.sqrt(config["hidden_size"]) if gemma else 1.0
    x = embedding[np.asarray(tokens)] * config.get("embedding_multiplier", factor)
    share = config.get("residual_multiplier", 1.0)
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        added = attention(config, tensors, layer, read(config, tensors, f"{block}.input_layernorm", x))
        if gemma or only_behind or glm:
            added = norm(config, tensors, f"{block}.post_self_attn_layernorm" if glm else f"{block}.post_attention_layernorm", added)
        x = x + share * added
        before = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
        second = mixture if experts_of(config) else feed_forward
        added = second(config, tensors, layer, read(config, tensors, f"{block}.{before}", x))
        if gemma or only_behind or glm:
            added = norm(config, tensors, f"{block}.post_mlp_layernorm" if glm else f"{block}.post_feedforward_layernorm", added)
        x = x + share * added
    hidden = norm(config, tensors, "model.norm", x)
    out = hidden @ head.T / config.get("logits_scaling", 1.0)
    return hidden, soft_cap(out, config.get("final_logit_softcapping"))


def nll(rows, targets):
    """Negative log-likelihood in nats of each target under its row of logits."""
    top = rows.max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(rows - top).sum(axis=1)) + top[:, 0]
    return log_sum - rows[np.arange(len(targets)), targets]


# ---- the committed values -------------------------------------------------------------------------------------------------------

LENGTH = 40  # tokens; five times mistral's window, and beyond the wavelength of llama3's second plane
GREEDY = 16
# The winner of each greedy step leads by at least this much, 20 x the tolerance of the comparison, so that the continuation of a
# right implementation is the recorded one. Of the seeded sequences, the first with that property is taken.
MARGIN = 0.02
# Every chosen expert of every token leads by this much, a hundred times what rounding to f32 moves a router's scores.
EXPERT_MARGIN = 0.002


def sequence(name, attempt, config):
    """BOS, the last vocabulary entry, then tokens seeded by the checkpoint's name: adding a checkpoint leaves the others alone."""
    vocab = config["vocab_size"]
    raw = np.random.PCG64([attempt, *name.encode()]).random_raw(LENGTH - 2)
    return [config["bos_token_id"], vocab - 1] + [int(r % vocab) for r in raw]


def greedy(config, tensors, tokens):
    """GREEDY tokens by repeated argmax and the smallest lead of a winner; None as soon as a lead is below MARGIN."""
    out, least = [], math.inf
    for _ in range(GREEDY):
        last = logits(config, tensors, tokens + out)[-1]
        second, first = np.sort(last)[-2:]
        if first - second < MARGIN:
            return None
        out.append(int(np.argmax(last)))
        least = min(least, float(first - second))
    return out, least


def compute(directory):
    """(reference.json as a dictionary, float64 hidden states and logits by file) of one checkpoint."""
    config = json.loads((directory / "config.json").read_text())
    tensors = st.load_model(directory)
    for attempt in itertools.count():
        tokens = sequence(directory.name, attempt, config)
        found = greedy(config, tensors, tokens)
        if found is not None and experts_of(config):
            lead = least_lead_of_experts(config, tensors, tokens + found[0])
            found = found if lead >= EXPERT_MARGIN else None
        if found is not None:
            break
    continuation, least = found
    hidden, values = outputs(config, tensors, tokens)
    lines = {
        "tokens": tokens,
        "logits": {"file": "logits.f32", "dtype": "F32", "order": "little-endian, row-major", "shape": list(values.shape)},
        "nats_per_token": float(nll(values[:-1], tokens[1:]).mean()),
        "logit_std": float(values.std()),
        "greedy": continuation,
        "greedy_least_lead": least,
    }
    if experts_of(config):
        lines["experts_least_lead"] = least_lead_of_experts(config, tensors, tokens + continuation)
    return lines, {"logits.f32": values, "hidden.f32": hidden}


# Published RoPE settings: (head_dim, theta, factor), with low 1, high 4, original context 8192 for all of them.
ROPE = {"llama-3.1-8b": (128, 500000.0, 8.0), "llama-3.2-1b": (64, 500000.0, 32.0)}


def rope_tables():
    out = {}
    for name, (head_dim, theta, factor) in ROPE.items():
        scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 8192}
        freq = rope_frequencies(head_dim, theta, scaling)
        out[name] = {"head_dim": head_dim, "rope_theta": theta, "rope_scaling": scaling, "inv_freq": [float(f) for f in freq]}
    # Qwen2.5 with the YaRN settings of its model card.
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = {"hidden_size": 128, "num_attention_heads": 1, "rope_theta": 1000000.0, "rope_scaling": yarn}
    freq = frequencies_of(config, 1)
    out["qwen2.5-yarn"] = {"head_dim": 128, "rope_theta": 1000000.0, "rope_scaling": yarn, "inv_freq": [float(f) for f in freq],
                           "gain": rope_gain(config)}
    return out


def same(a, b):
    """Equal up to the last digits of a float (libm and BLAS differ from machine to machine), whatever the nesting."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return isinstance(b, float) and math.isclose(a, b, rel_tol=1e-9)
    return a == b


def check(directory, lines, files):
    """Complaints about the committed files of one checkpoint; empty when they agree."""
    absent = [name for name in ("reference.json", *files) if not (directory / name).exists()]
    if absent:
        return [f"{directory}: {name} should exist" for name in absent]
    json_file, out = directory / "reference.json", []
    if not same(lines, json.loads(json_file.read_text())):
        out.append(f"{json_file}: differs from what reference.py computes")
    return out + [complaint for name, values in files.items() for complaint in check_values(directory / name, values)]


def check_values(raw_file, values):
    """The same of one file of numbers."""
    out = []
    stored = np.frombuffer(raw_file.read_bytes(), dtype="<f4")
    if stored.size != values.size:
        return [f"{raw_file}: should hold {values.size} values, got {stored.size}"]
    fresh = values.astype("<f4").reshape(-1)
    # One unit in the last place of f32; a logit that happens to be near 0 carries the float64 error of its larger terms instead.
    error = np.abs(stored.astype(np.float64) - fresh.astype(np.float64))
    worst = int(np.argmax(error - np.maximum(np.spacing(np.abs(fresh)), 1e-9)))
    if error[worst] > max(float(np.spacing(abs(fresh[worst]))), 1e-9):
        out.append(f"{raw_file}: value {worst} should be {fresh[worst]!r} within one ulp, got {stored[worst]!r}")
    return out


def to_json(value):
    """Indented one level only: long lists of numbers stay on one line."""
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()) + "\n}\n"


def main():
    parser = argparse.ArgumentParser(description="write or check the float64 reference logits")
    parser.add_argument("--check", action="store_true", help="compare with the committed files instead of writing")
    args = parser.parse_args()
    complaints = []
    names = sorted(p.name for p in MODELS.iterdir() if p.is_dir())
    for name in names:
        lines, files = compute(MODELS / name)
        if args.check:
            complaints += check(MODELS / name, lines, files)
        else:
            (MODELS / name / "reference.json").write_text(to_json(lines))
            for file, values in files.items():
                (MODELS / name / file).write_bytes(values.astype("<f4").tobytes())
        print(f"{name:12} {lines['nats_per_token']:8.4f} nats/token, logit std {lines['logit_std']:.2f}, "
              f"{len(lines['greedy'])} greedy tokens, least lead {lines['greedy_least_lead']:.3f}")
    if args.check:
        rope = HERE / "rope.json"
        if not rope.exists() or not same(rope_tables(), json.loads(rope.read_text())):
            complaints.append(f"{rope}: differs from what reference.py computes")
    else:
        (HERE / "rope.json").write_text(to_json(rope_tables()))
    for line in complaints:
        print(line, file=sys.stderr)
    return 1 if complaints or not names else 0


if __name__ == "__main__":
    sys.exit(main())
