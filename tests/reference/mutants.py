"""Shows that the reference logits can tell right from wrong: breaks one thing at a time and measures how far the logits move.

    python3 mutants.py      # prints the table; exit status 1 when a mistake moves no logit by more than FLOOR

Also runs the right model in float32, whose distance from float64 is the part of the tolerance (1e-3) that rounding needs.
"""

import contextlib
import json
import math
import sys
from unittest import mock

import numpy as np

import reference
import st

TOLERANCE = 1e-3  # of the comparison in the Rust tests
FLOOR = 50 * TOLERANCE


def interleaved(x, freq, gain):
    """RoPE on neighbouring pairs instead of halves."""
    angle = np.arange(x.shape[0])[:, None] * freq[None, :]
    cos, sin = gain * np.cos(angle), gain * np.sin(angle)
    out, turning = x.copy(), 2 * len(freq)
    out[:, 0:turning:2] = x[:, 0:turning:2] * cos - x[:, 1:turning:2] * sin
    out[:, 1:turning:2] = x[:, 1:turning:2] * cos + x[:, 0:turning:2] * sin
    return out


def wide_planes(x, freq, gain):
    """Planes (k, k + d/2) of the whole head where only its first channels turn."""
    half = x.shape[1] // 2
    at = np.concatenate([np.arange(len(freq)), half + np.arange(len(freq))])
    out = x.copy()
    out[:, at] = RIGHT_ROTATE(x[:, at], freq, gain)
    return out


def swapped_parts(config, tensors, name):
    """Keys and values, gate and up in each other's place."""
    block, own = name.rsplit(".", 1)
    other = {"k_proj": "v_proj", "v_proj": "k_proj", "gate_proj": "up_proj", "up_proj": "gate_proj"}.get(own, own)
    return RIGHT_WEIGHT(config, tensors, f"{block}.{other}")


def late_by_one(length, window):
    """The window one position too wide."""
    return RIGHT_VISIBLE(length, None if window is None else window + 1)


def linear_for_llama3(head_dim, theta, scaling):
    """All planes slowed down alike."""
    return RIGHT_FREQUENCIES(head_dim, theta, {**scaling, "rope_type": "linear"})


def step_for_llama3(head_dim, theta, scaling):
    """No interpolation between kept and slowed planes."""
    freq = RIGHT_FREQUENCIES(head_dim, theta, None)
    turns = scaling["original_max_position_embeddings"] * freq / (2 * math.pi)
    return np.where(turns < scaling["high_freq_factor"], freq / scaling["factor"], freq)


def plain_norm(config, tensors, name, x):
    """Gains as they are stored, without the 1."""
    return reference.rms_norm(x, tensors[f"{name}.weight"], config["rms_norm_eps"])


def plain_norm_of(*names):
    """The same for norms of some names only."""
    return lambda config, tensors, name, x: (plain_norm if name.endswith(names) else RIGHT_NORM)(config, tensors, name, x)


def norms_of_heads(config, tensors, name, x):
    """Queries and keys normalized head by head, where all heads should be together."""
    if not name.endswith(("q_norm", "k_norm")):
        return RIGHT_NORM(config, tensors, name, x)
    _, _, d = reference.head_sizes(config)
    heads = x.reshape(x.shape[0], -1, d)
    one = np.ones(d)
    return reference.rms_norm(heads, one, config["rms_norm_eps"]).reshape(x.shape) * tensors[f"{name}.weight"]


def without_norm(left_out):
    """The norms of one name left out."""
    return lambda config, tensors, name, x: x if name.endswith(left_out) else RIGHT_NORM(config, tensors, name, x)


def read_normalized(config, tensors, name, x):
    """The residual stream normalized, without a gain, where it is read as it is."""
    return reference.rms_norm(x, np.ones(x.shape[1]), config["rms_norm_eps"])


def unit_of_embedding(config, tensors, name, x):
    """Epsilon divided by h where the residual stream is read, as if that were kept without the factor of the embedding."""
    read = name.endswith(("input_layernorm", "pre_feedforward_layernorm", "model.norm"))
    unit = config["hidden_size"] if read else 1
    return RIGHT_NORM({**config, "rms_norm_eps": config["rms_norm_eps"] / unit}, tensors, name, x)


def grown_keys(config, k):
    """Keys that grow as queries do: here queries by the square."""
    return RIGHT_GROWN(config, RIGHT_GROWN(config, k))


def scaled_everywhere(config, layer):
    """Every layer's planes slowed down, those of sliding layers too."""
    return {**RIGHT_SETTINGS(config, layer), "rope_scaling": config["rope_scaling"]}


def swapped_experts(config, tensors, layer, expert, which):
    """Gate and up of experts in each other's place."""
    return RIGHT_EXPERT(config, tensors, layer, expert, {"gate": "up", "up": "gate"}.get(which, which))


def next_expert(config, tensors, layer, expert, which):
    """The matrices of another expert."""
    return RIGHT_EXPERT(config, tensors, layer, (expert + 1) % reference.experts_of(config), which)


def interleaved_parts(config, tensors, layer, expert, which):
    """Gates and ups of a fused tensor row by row in turn."""
    if which == "down":
        return RIGHT_EXPERT(config, tensors, layer, expert, which)
    whole = tensors[f"model.layers.{layer}.block_sparse_moe.input_linear.weight"][expert]
    return whole[(which == "up") :: 2]


def shares_over_all(config, scores):
    """The softmax over all experts, not divided by the sum of the chosen."""
    return RIGHT_SHARES({**config, "model_type": "", "norm_topk_prob": False}, scores)


def equal_shares(config, scores):
    """The mean of the chosen experts."""
    return (RIGHT_SHARES(config, scores) > 0) / config["num_experts_per_tok"]


def sigmoid_shares(config, scores):
    share = 1.0 / (1.0 + np.exp(-scores)) * (RIGHT_SHARES(config, scores) > 0)
    return share / share.sum()


RIGHT_EXPERT, RIGHT_SHARES = reference.expert_weight, reference.shares
RIGHT_ROTATE, RIGHT_WEIGHT = reference.rotate, reference.weight
RIGHT_ROTATES = reference.rotates
RIGHT_VISIBLE, RIGHT_FREQUENCIES = reference.visible, reference.rope_frequencies
RIGHT_NORM, RIGHT_SETTINGS = reference.norm, reference.rope_settings
RIGHT_GROWN = reference.grown
unrotated = {"rotate": lambda x, freq, gain: x}
early_full_layers = {"slides": lambda config, layer: layer % config["sliding_window_pattern"] != 0}
unscaled = {"rope_frequencies": lambda d, theta, scaling: RIGHT_FREQUENCIES(d, theta, None)}
wrong_gqa = {"kv_head_of": lambda head, heads, kv_heads: head % kv_heads}

# (models or "all", mistake, replaced functions, names of tensors left out, changes of the configuration)
MISTAKES = [
    ("all", "no RoPE", unrotated, (), {}),
    ("all", "interleaved RoPE", {"rotate": interleaved}, (), {}),
    ("qwen3-moe mixtral granite-moe olmoe", "gate and up of experts swapped", {"expert_weight": swapped_experts}, (), {}),
    ("qwen3-moe mixtral granite-moe olmoe", "experts one off", {"expert_weight": next_expert}, (), {}),
    ("qwen3-moe mixtral granite-moe olmoe", "one expert", {}, (), {"num_experts_per_tok": 1}),
    ("qwen3-moe mixtral granite-moe olmoe", "the mean of the chosen experts", {"shares": equal_shares}, (), {}),
    ("qwen3-moe mixtral granite-moe", "sigmoid of the router", {"shares": sigmoid_shares}, (), {}),
    ("mixtral granite-moe", "softmax over all experts", {"shares": shares_over_all}, (), {}),
    ("qwen3-moe", "norm_topk_prob false", {}, (), {"norm_topk_prob": False}),
    ("olmoe", "norm_topk_prob true", {}, (), {"norm_topk_prob": True}),
    ("qwen3-moe olmoe", "four experts", {}, (), {"num_experts_per_tok": 4}),
    ("granite-moe", "parts of the fused tensor in turn", {"expert_weight": interleaved_parts}, (), {}),
    ("granite-moe", "residual_multiplier 1", {}, (), {"residual_multiplier": 1.0}),
    ("granite-moe", "embedding_multiplier 1", {}, (), {"embedding_multiplier": 1.0}),
    ("granite-moe", "attention_multiplier 1 / sqrt(d)", {}, (), {"attention_multiplier": 0.25}),
    ("granite-moe", "logits_scaling 1", {}, (), {"logits_scaling": 1.0}),
    ("mixtral", "theta 10000", {}, (), {"rope_theta": 10000.0}),
    ("olmoe olmo2 olmo3", "norms of heads", {"norm": norms_of_heads}, (), {}),
    ("qwen3-moe", "q norm dropped", {}, ("q_norm.weight",), {}),
    ("qwen3-moe", "k norm dropped", {}, ("k_norm.weight",), {}),
    ("olmoe olmo2 olmo3", "no q norm", {"norm": without_norm("q_norm")}, (), {}),
    ("olmoe olmo2 olmo3", "no k norm", {"norm": without_norm("k_norm")}, (), {}),
    ("olmo2 olmo3 exaone4", "no post_attention_layernorm", {"norm": without_norm("post_attention_layernorm")}, (), {}),
    ("olmo2 olmo3 exaone4", "no post_feedforward_layernorm", {"norm": without_norm("post_feedforward_layernorm")}, (), {}),
    ("olmo2", "a norm where the residual stream is read", {"read": read_normalized}, (), {}),
    ("olmo2", "rms_norm_eps 1e-6", {}, (), {"rms_norm_eps": 1e-6}),
    ("olmo3", "rope_scaling in every layer", {"rope_settings": scaled_everywhere}, (), {}),
    ("all", "no causal mask", {"visible": lambda length, window: np.ones((length, length), bool)}, (), {}),
    ("smollm2", "rms_norm_eps 1e-5", {}, (), {"rms_norm_eps": 1e-5}),
    ("llama2 llama-tied llama-bias mistral qwen2 qwen3 smollm2 smollm3", "kv head = head mod kv heads", wrong_gqa, (), {}),
    ("llama2 llama-bias mistral qwen3", "norm weights ignored", {}, ("layernorm.weight", "model.norm.weight"), {}),
    ("llama3 llama-bias gemma3 olmo3 exaone4", "no rope scaling", unscaled, (), {}),
    ("llama3", "linear in place of llama3 scaling", {"rope_frequencies": linear_for_llama3}, (), {}),
    ("llama3", "no interpolated planes", {"rope_frequencies": step_for_llama3}, (), {}),
    ("llama3 qwen2 qwen3 smollm2 smollm3 gemma3 olmo2 olmo3 exaone4 seed-oss ernie45", "theta 10000", {}, (), {"rope_theta": 10000.0}),
    ("llama-bias qwen2 seed-oss glm4", "q bias dropped", {}, ("q_proj.bias",), {}),
    ("llama-bias qwen2 seed-oss glm4", "k bias dropped", {}, ("k_proj.bias",), {}),
    ("llama-bias qwen2 seed-oss glm4", "v bias dropped", {}, ("v_proj.bias",), {}),
    ("llama-bias", "o bias dropped", {}, ("o_proj.bias",), {}),
    ("llama-bias", "gate bias dropped", {}, ("gate_proj.bias",), {}),
    ("llama-bias", "up bias dropped", {}, ("up_proj.bias",), {}),
    ("llama-bias", "down bias dropped", {}, ("down_proj.bias",), {}),
    ("mistral gemma2 gemma3 olmo3", "no window", {}, (), {"sliding_window": None}),
    ("mistral gemma2 gemma3 olmo3 exaone4", "window one too wide", {"visible": late_by_one}, (), {}),
    ("qwen2", "switched-off window applied", {}, (), {"use_sliding_window": True, "max_window_layers": 0}),
    ("qwen3 gemma3 exaone4", "q norm dropped", {}, ("q_norm.weight",), {}),
    ("qwen3 gemma3 exaone4", "k norm dropped", {}, ("k_norm.weight",), {}),
    ("ernie45 glm4", "halves in place of neighbours", {"in_halves": lambda x, turning: x}, (), {}),
    ("glm4", "planes of the whole head", {"rotate": wide_planes}, (), {}),
    ("glm4", "no post_self_attn_layernorm", {"norm": without_norm("post_self_attn_layernorm")}, (), {}),
    ("glm4", "no post_mlp_layernorm", {"norm": without_norm("post_mlp_layernorm")}, (), {}),
    ("glm4", "no post_attention_layernorm", {"norm": without_norm("post_attention_layernorm")}, (), {}),
    ("ministral3", "queries do not grow", {"grown": lambda config, q: q}, (), {}),
    ("ministral3", "queries grow twice", {"grown": grown_keys}, (), {}),
    ("ministral3", "gain of plain YaRN", {"rope_gain": lambda config: 0.1 * math.log(8.0) + 1.0}, (), {}),
    ("ministral3", "no gain", {"rope_gain": lambda config: 1.0}, (), {}),
    ("ministral3", "no YaRN", {"yarn_frequencies": lambda freq, *_: freq}, (), {}),
    ("qwen3-fp8", "q norm dropped", {}, ("q_norm.weight",), {}),
    ("qwen3-fp8", "k norm dropped", {}, ("k_norm.weight",), {}),
    ("exaone4", "RoPE in every layer", {"rotates": lambda config, layer: True}, (), {}),
    ("exaone4", "no RoPE in layers with a window", {"rotates": lambda config, layer: not RIGHT_ROTATES(config, layer)}, (), {}),
    ("exaone4", "no window", {"window_of": lambda config, layer: None}, (), {}),
    ("smollm3", "RoPE in every layer", {}, (), {"no_rope_layers": [1, 1, 1, 1]}),
    ("smollm3", "flags inverted", {}, (), {"no_rope_layers": [0, 0, 0, 1]}),
    ("phi3", "no window", {}, (), {"sliding_window": None}),
    ("phi3 phi4-mini granite4", "parts of fused tensors swapped", {"weight": swapped_parts}, (), {}),
    ("phi4-mini", "planes of the whole head", {"rotate": wide_planes}, (), {}),
    ("phi4-mini", "short factors", {"longrope_frequencies": lambda freq, s, *_: freq / np.array(s["short_factor"])}, (), {}),
    ("phi4-mini", "no factors", {"longrope_frequencies": lambda freq, *_: freq}, (), {}),
    ("phi4-mini", "no gain", {"rope_gain": lambda config: 1.0}, (), {}),
    ("granite granite4", "embedding_multiplier 1", {}, (), {"embedding_multiplier": 1.0}),
    ("granite granite4", "residual_multiplier 1", {}, (), {"residual_multiplier": 1.0}),
    ("granite granite4", "attention_multiplier 1 / sqrt(d)", {}, (), {"attention_multiplier": 0.25}),
    ("granite granite4", "logits_scaling 1", {}, (), {"logits_scaling": 1.0}),
    ("granite", "epsilon of the unit of the embedding", {}, (), {"rms_norm_eps": 1e-2 / 9}),
    ("granite", "o bias dropped", {}, ("o_proj.bias",), {}),
    ("granite", "down bias dropped", {}, ("down_proj.bias",), {}),
    ("gemma2 gemma3", "w in place of 1 + w", {"norm": plain_norm}, (), {}),
    ("gemma3", "w in place of 1 + w, q and k norm", {"norm": plain_norm_of("q_norm", "k_norm")}, (), {}),
    ("gemma2 gemma3", "w in place of 1 + w, last norm", {"norm": plain_norm_of("model.norm")}, (), {}),
    ("gemma2 gemma3", "no factor of the embedding", {}, (), {"embedding_multiplier": 1.0}),
    ("gemma2 gemma3", "no post_attention_layernorm", {"norm": without_norm("post_attention_layernorm")}, (), {}),
    ("gemma2 gemma3", "no pre_feedforward_layernorm", {"norm": without_norm("pre_feedforward_layernorm")}, (), {}),
    ("gemma2 gemma3", "no post_feedforward_layernorm", {"norm": without_norm("post_feedforward_layernorm")}, (), {}),
    ("gemma2 gemma3", "silu", {}, (), {"hidden_activation": "silu"}),
    ("gemma2 gemma3", "head_dim for query_pre_attn_scalar", {}, (), {"query_pre_attn_scalar": 16}),
    ("gemma2", "no cap of scores", {}, (), {"attn_logit_softcapping": None}),
    ("gemma2", "no cap of logits", {}, (), {"final_logit_softcapping": None}),
    ("gemma2", "the published caps", {}, (), {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    ("gemma2", "theta 1000000", {}, (), {"rope_theta": 1000000.0}),
    ("gemma3", "rope_theta in every layer", {}, (), {"rope_local_base_freq": 1000000.0}),
    ("gemma3", "rope_scaling in every layer", {"rope_settings": scaled_everywhere}, (), {}),
    ("gemma2 gemma3 olmo3", "full layers one early", early_full_layers, (), {}),
    ("gemma3", "rms_norm_eps 1e-6", {}, (), {"rms_norm_eps": 1e-6}),
    ("gemma3", "epsilon of the unit of the embedding", {"norm": unit_of_embedding}, (), {}),
]


def main():
    bad = 0
    loaded = {}
    for directory in sorted(p for p in reference.MODELS.iterdir() if p.is_dir()):
        config = json.loads((directory / "config.json").read_text())
        tensors = st.load_model(directory)
        tokens = json.loads((directory / "reference.json").read_text())["tokens"]
        right = reference.logits(config, tensors, tokens)
        loaded[directory.name] = config, tensors, tokens, right
        # `rope_frequencies` and the angles stay float64; everything that touches weights or activations is float32.
        single = {name: values.astype(np.float32) for name, values in tensors.items()}
        rotate = reference.rotate
        with mock.patch.object(reference, "rotate", lambda x, *how: rotate(x, *how).astype(np.float32)):
            rounding = np.abs(reference.logits(config, single, tokens) - right).max()
        print(f"{directory.name:12} {'(none: the same in float32)':36} {rounding:.1e}")
        bad += not rounding < TOLERANCE / 10
    for models, mistake, functions, dropped, changes in MISTAKES:
        for name in loaded if models == "all" else models.split():
            config, tensors, tokens, right = loaded[name]
            kept = {key: values for key, values in tensors.items() if not key.endswith(dropped)}
            if mistake == "norm weights ignored":
                kept = {key: kept.get(key, np.ones_like(values)) for key, values in tensors.items()}
            with contextlib.ExitStack() as patches:
                for function, wrong in functions.items():
                    patches.enter_context(mock.patch.object(reference, function, wrong))
                moved = np.abs(reference.logits({**config, **changes}, kept, tokens) - right).max()
            caught = moved > FLOOR
            bad += not caught
            print(f"{name:12} {mistake:36} {moved:8.4f}{'' if caught else '   too small to notice'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
