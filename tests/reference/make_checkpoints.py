"""Writes the tiny random checkpoints under models/, one per architecture feature. Needs Python 3 and numpy.

    python3 make_checkpoints.py            # (re)write models/*/
    python3 make_checkpoints.py --check    # compare with the committed bytes; exit status 1 on any difference

The bytes are the same on every machine and numpy: random numbers come from the raw 64-bit output of PCG64 (whose stream numpy
guarantees, unlike that of its normal distribution) by integer sums, so no libm and no BLAS takes part.

Scales are chosen so that a wrong implementation shows: attention scores have a standard deviation near 2 (far from uniform
attention), logits near 1..3, norm weights are not 1, biases are not 0. mutants.py measures that.
"""

import argparse
import json
import math
import pathlib
import sys

import numpy as np

import make_tokenizer
import st

MODELS = pathlib.Path(__file__).resolve().parent / "models"
LIMIT = 320_000  # bytes per directory, reference logits and hidden states included


class Normal:
    """Nearly normal numbers of mean 0 and variance 1: centred sums of eight 16-bit uniforms (bounded by 4.9)."""

    def __init__(self, seed):
        self.bits = np.random.PCG64(seed)

    def draw(self, shape):
        raw = self.bits.random_raw(2 * math.prod(shape)).astype("<u8")
        total = raw.view("<u2").reshape(-1, 8).astype(np.int64).sum(axis=1)
        sigma = math.sqrt(8 * (65536.0**2 - 1) / 12)
        return ((total - 8 * 32767.5) / sigma).reshape(shape)


# Shapes: hidden, inter, layers, heads, kv heads, head_dim, vocab. `config` holds what differs from one family to the next; keys that
# real configurations of the family leave out (llama1: kv heads, theta, tying) are left out, so defaults are covered too.
# `specials`: names, BOS, EOS; `ends`: EOS of generation_config.json; `qk_norm`, `final_norm`: mean gains; `sandwich`: norms as in Gemma 2 and 3; `behind`: norms as in OLMo 2; `glm`: as in GLM-4 0414; `fp8`: matrices in 8 bits with one scale each or with blocks; `experts`:
# their number, how they are stored (`inter` is the width of one) and the standard deviation of what their router says.
SPECS = {
    "llama1": dict(
        seed=101, dtype="F32", style="pieces", shape=(48, 100, 2, 4, 4, 12, 101), arch="LlamaForCausalLM", eps=1e-6,
        config={"model_type": "llama", "max_position_embeddings": 2048},
    ),
    "llama2": dict(
        seed=102, dtype="F16", style="pieces", shape=(64, 160, 2, 8, 4, 8, 128), arch="LlamaForCausalLM", eps=1e-5,
        config={"model_type": "llama", "num_key_value_heads": 4, "attention_bias": False, "pretraining_tp": 1, "rope_scaling": None,
                "rope_theta": 10000.0, "tie_word_embeddings": False, "max_position_embeddings": 4096},
    ),
    "llama3": dict(
        seed=103, dtype="BF16", style="bytes", shape=(64, 112, 3, 4, 1, 16, 192), arch="LlamaForCausalLM", eps=1e-5, shards=3, chat=True,
        config={"model_type": "llama", "num_key_value_heads": 1, "head_dim": 16, "attention_bias": False, "mlp_bias": False,
                "rope_theta": 500000.0, "tie_word_embeddings": False, "max_position_embeddings": 512,
                "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                 "original_max_position_embeddings": 64, "rope_type": "llama3"}},
    ),
    "llama-tied": dict(
        seed=104, dtype="F32", style="pieces", shape=(48, 96, 2, 6, 3, 8, 112), arch="LlamaForCausalLM", eps=1e-6, tied="lm_head.weight",
        config={"model_type": "llama", "num_key_value_heads": 3, "attention_bias": False, "mlp_bias": False, "rope_scaling": None,
                "rope_theta": 10000.0, "tie_word_embeddings": True, "max_position_embeddings": 512},
    ),
    "llama-bias": dict(
        seed=105, dtype="BF16", style="bytes", shape=(56, 120, 2, 4, 2, 14, 109), arch="LlamaForCausalLM", eps=1e-5,
        biased=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        config={"model_type": "llama", "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True,
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_theta": 10000.0, "tie_word_embeddings": False, "max_position_embeddings": 1024},
    ),
    "mistral": dict(
        seed=106, dtype="BF16", style="pieces", shape=(48, 112, 3, 4, 2, 24, 160), arch="MistralForCausalLM", eps=1e-5,
        config={"model_type": "mistral", "num_key_value_heads": 2, "head_dim": 24, "sliding_window": 8, "attention_dropout": 0.0,
                "rope_theta": 10000.0, "tie_word_embeddings": False, "max_position_embeddings": 1024},
    ),
    "qwen2": dict(
        seed=107, dtype="BF16", style="bytes", shape=(84, 136, 2, 6, 2, 14, 144), arch="Qwen2ForCausalLM", eps=1e-6, chat=True, unused=5,
        biased=("q_proj", "k_proj", "v_proj"), tied="model.embed_tokens.weight",
        # The window is switched off, as in the published Qwen2 configurations: an implementation that reads only `sliding_window` fails.
        config={"model_type": "qwen2", "num_key_value_heads": 2, "sliding_window": 8, "use_sliding_window": False,
                "max_window_layers": 1, "rope_theta": 1000000.0, "tie_word_embeddings": True, "max_position_embeddings": 1024},
    ),
    "qwen3": dict(
        seed=108, dtype="BF16", style="bytes", shape=(64, 104, 2, 6, 2, 16, 275), arch="Qwen3ForCausalLM", eps=1e-6, qk_norm=1.4,
        config={"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16, "attention_bias": False, "rope_scaling": None,
                "sliding_window": None, "use_sliding_window": False, "max_window_layers": 2,
                "rope_theta": 1000000.0, "tie_word_embeddings": False, "max_position_embeddings": 1024},
    ),
    "smollm2": dict(
        seed=109, dtype="BF16", style="bytes", shape=(72, 108, 3, 9, 3, 8, 128), arch="LlamaForCausalLM",
        eps=1e-3,  # larger than the published 1e-5, so that a constant in place of the configured value shows
        tied="model.embed_tokens.weight",
        config={"model_type": "llama", "num_key_value_heads": 3, "attention_bias": False, "mlp_bias": False, "rope_interleaved": False,
                "rope_scaling": None, "rope_theta": 100000.0, "tie_word_embeddings": True, "max_position_embeddings": 1024},
    ),
    "smollm3": dict(
        seed=110, dtype="BF16", style="bytes", shape=(64, 88, 4, 8, 2, 8, 128), arch="SmolLM3ForCausalLM", eps=1e-6,
        tied="model.embed_tokens.weight",
        # 1 = the layer rotates, 0 = it does not, despite the key's name.
        config={"model_type": "smollm3", "num_key_value_heads": 2, "attention_bias": False, "mlp_bias": False,
                "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0], "layer_types": ["full_attention"] * 4,
                "sliding_window": None, "use_sliding_window": False, "rope_scaling": None,
                "rope_theta": 5000000.0, "tie_word_embeddings": True, "max_position_embeddings": 1024},
    ),
    "phi3": dict(
        seed=111, dtype="BF16", style="pieces", shape=(48, 104, 3, 4, 4, 12, 117), arch="Phi3ForCausalLM", eps=1e-5, fused=True,
        config={"model_type": "phi3", "num_key_value_heads": 4, "original_max_position_embeddings": 512, "sliding_window": 11,
                "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False, "attention_bias": False,
                "max_position_embeddings": 512},
    ),
    "phi4-mini": dict(
        seed=112, dtype="BF16", style="bytes", shape=(96, 88, 2, 6, 2, 16, 140), arch="Phi3ForCausalLM", eps=1e-5, fused=True,
        tied="model.embed_tokens.weight",
        # Three quarters of a head turn; the sequence is longer than the original context, so the long factors count.
        config={"model_type": "phi3", "num_key_value_heads": 2, "original_max_position_embeddings": 32, "sliding_window": None,
                "partial_rotary_factor": 0.75, "rope_theta": 10000.0, "tie_word_embeddings": True, "max_position_embeddings": 512,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.0, 1.25, 1.5, 1.75, 2.0],
                                 "long_factor": [1.0, 1.5, 2.5, 4.0, 7.0, 11.0]}},
    ),
    "granite": dict(
        seed=113, dtype="BF16", style="bytes", shape=(64, 96, 3, 4, 2, 16, 131), arch="GraniteForCausalLM",
        eps=1e-2,  # so large that its unit shows
        biased=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), tied="model.embed_tokens.weight",
        config={"model_type": "granite", "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True, "rope_scaling": None,
                "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.4, "logits_scaling": 1.5,
                "rope_theta": 10000.0, "tie_word_embeddings": True, "max_position_embeddings": 1024},
    ),
    "granite4": dict(
        seed=123, dtype="BF16", style="bytes", shape=(64, 104, 2, 4, 2, 16, 127), arch="GraniteMoeHybridForCausalLM", eps=1e-2,
        shared=True, tied="model.embed_tokens.weight",
        config={"model_type": "granitemoehybrid", "num_key_value_heads": 2, "attention_bias": False, "mlp_bias": False, "rope_scaling": None,
                "layer_types": ["attention", "attention"], "num_local_experts": 0, "num_experts_per_tok": 0, "intermediate_size": 512,
                "shared_intermediate_size": 104, "position_embedding_type": "rope", "mamba_n_heads": 128, "mamba_d_state": 256,
                "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.4, "logits_scaling": 1.5,
                "rope_theta": 10000.0, "tie_word_embeddings": True, "max_position_embeddings": 1024},
    ),
    "gemma2": dict(
        seed=124, dtype="BF16", style="pieces", shape=(48, 88, 4, 4, 2, 16, 127), arch="Gemma2ForCausalLM", eps=1e-6,
        tied="model.embed_tokens.weight", specials=(["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"], 2, 1),
        sandwich=True, embedding=0.5, final_norm=4.0,
        # Layers 0 and 2 slide. Caps so low that they show.
        config={"model_type": "gemma2", "num_key_value_heads": 2, "head_dim": 16, "attention_bias": False, "attention_dropout": 0.0,
                "attn_logit_softcapping": 1.5, "final_logit_softcapping": 5.0, "hidden_activation": "gelu_pytorch_tanh",
                "query_pre_attn_scalar": 24, "sliding_window": 8, "rope_theta": 10000.0, "max_position_embeddings": 1024},
    ),
    "gemma3": dict(
        seed=116, dtype="BF16", style="pieces", shape=(48, 88, 4, 4, 1, 16, 131), arch="Gemma3ForCausalLM",
        eps=2e-2,  # so large that its unit shows, although a later norm takes back most of what it changes
        tied="model.embed_tokens.weight", specials=(["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"], 2, 1),
        ends=[1, 5], qk_norm=1.55, sandwich=True,
        # sqrt(hidden) * embedding has the standard deviation 0.5, what each of the eight post norms adds has 1; with more of the embedding
        # the tied head would see little but the token itself.
        embedding=0.5, final_norm=4.0,
        # Layers 0, 1 and 3 slide. `tie_word_embeddings` and `layer_types` are left out, as in the first published configurations.
        config={"model_type": "gemma3_text", "num_key_value_heads": 1, "head_dim": 16, "attention_bias": False, "attention_dropout": 0.0,
                "attn_logit_softcapping": None, "final_logit_softcapping": None, "use_bidirectional_attention": False,
                "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24, "sliding_window": 8, "sliding_window_pattern": 3,
                "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0},
                "max_position_embeddings": 1024},
    ),
    "qwen3-moe": dict(
        seed=117, dtype="BF16", style="bytes", shape=(48, 32, 3, 4, 2, 16, 120), arch="Qwen3MoeForCausalLM", eps=1e-6, qk_norm=1.4,
        experts=(6, "apart", 2.0), chat=True,
        # `intermediate_size` is that of layers without experts, of which there are none.
        config={"model_type": "qwen3_moe", "num_key_value_heads": 2, "head_dim": 16, "attention_bias": False, "decoder_sparse_step": 1,
                "mlp_only_layers": [], "moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True,
                "intermediate_size": 96, "sliding_window": None, "use_sliding_window": False, "max_window_layers": 3, "rope_scaling": None,
                "rope_theta": 1000000.0, "tie_word_embeddings": False, "max_position_embeddings": 1024},
    ),
    "mixtral": dict(
        seed=118, dtype="F32", style="pieces", shape=(32, 48, 2, 4, 2, 8, 101), arch="MixtralForCausalLM", eps=1e-5,
        experts=(4, "mixtral", 2.0), shards=2,
        # Without `rope_theta`, whose default is another one here.
        config={"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None,
                "router_aux_loss_coef": 0.02, "tie_word_embeddings": False, "max_position_embeddings": 1024},
    ),
    "granite-moe": dict(
        seed=119, dtype="BF16", style="bytes", shape=(64, 32, 2, 4, 2, 16, 125), arch="GraniteMoeForCausalLM", eps=1e-2,
        experts=(5, "granite", 3.0), tied="model.embed_tokens.weight",
        config={"model_type": "granitemoe", "num_key_value_heads": 2, "attention_bias": False, "rope_scaling": None,
                "num_local_experts": 5, "num_experts_per_tok": 3, "embedding_multiplier": 3.0, "residual_multiplier": 0.6,
                "attention_multiplier": 0.4, "logits_scaling": 1.5, "rope_theta": 10000.0, "tie_word_embeddings": True,
                "max_position_embeddings": 1024},
    ),
    "olmoe": dict(
        seed=120, dtype="BF16", style="bytes", shape=(64, 16, 3, 4, 2, 16, 112), arch="OlmoeForCausalLM", eps=1e-5, qk_norm=1.4, whole_norm=True,
        experts=(8, "apart", 1.5),
        config={"model_type": "olmoe", "num_key_value_heads": 2, "attention_bias": False, "clip_qkv": None, "num_experts": 8,
                "num_experts_per_tok": 3, "norm_topk_prob": False, "rope_scaling": None, "rope_theta": 10000.0,
                "tie_word_embeddings": False, "max_position_embeddings": 1024},
    ),
    "olmo2": dict(
        seed=121, dtype="BF16", style="bytes", shape=(64, 88, 3, 4, 4, 16, 118), arch="Olmo2ForCausalLM", eps=1e-2, qk_norm=1.4, whole_norm=True,
        behind=True,
        config={"model_type": "olmo2", "num_key_value_heads": 4, "attention_bias": False, "rope_scaling": None, "rope_theta": 500000.0,
                "tie_word_embeddings": False, "max_position_embeddings": 1024},
    ),
    "olmo3": dict(
        seed=122, dtype="BF16", style="pieces", shape=(48, 80, 4, 4, 2, 12, 122), arch="Olmo3ForCausalLM", eps=1e-5, qk_norm=1.4, whole_norm=True,
        behind=True,
        # Without `layer_types`: layers 0 to 2 slide.
        config={"model_type": "olmo3", "num_key_value_heads": 2, "attention_bias": False, "sliding_window": 8, "rope_theta": 500000.0,
                "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "tie_word_embeddings": False, "max_position_embeddings": 1024},
    ),
    "exaone4": dict(
        seed=125, dtype="BF16", style="bytes", shape=(48, 80, 4, 4, 2, 16, 119), arch="Exaone4ForCausalLM", eps=1e-5, qk_norm=1.4,
        behind=True,
        # As in the published 32B the pattern is in letters and the layers are listed: the last one sees everything and does not rotate.
        config={"model_type": "exaone4", "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8, "sliding_window_pattern": "LLLG",
                "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "rope_theta": 1000000.0, "attention_dropout": 0.0,
                "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                 "original_max_position_embeddings": 64, "rope_type": "llama3"},
                "tie_word_embeddings": False, "max_position_embeddings": 1024},
    ),
    "seed-oss": dict(
        seed=126, dtype="BF16", style="bytes", shape=(48, 72, 2, 6, 2, 16, 116), arch="SeedOssForCausalLM", eps=1e-6,
        biased=("q_proj", "k_proj", "v_proj"),
        # Without `attention_bias`, which is true then.
        config={"model_type": "seed_oss", "num_key_value_heads": 2, "head_dim": 16, "attention_out_bias": False, "mlp_bias": False,
                "rope_scaling": {"rope_type": "default"}, "rope_theta": 1000000.0, "tie_word_embeddings": False,
                "max_position_embeddings": 1024},
    ),
    "ernie45": dict(
        seed=127, dtype="BF16", style="bytes", shape=(64, 80, 2, 4, 2, 16, 123), arch="Ernie4_5ForCausalLM", eps=1e-5,
        tied="model.embed_tokens.weight",
        # Without `rope_theta`, which is 500000 then.
        config={"model_type": "ernie4_5", "num_key_value_heads": 2, "head_dim": 16, "use_bias": False, "rope_scaling": None,
                "tie_word_embeddings": True, "max_position_embeddings": 1024},
    ),
    "ministral3": dict(
        seed=129, dtype="BF16", style="bytes", shape=(64, 96, 2, 4, 2, 16, 118), arch="Ministral3ForCausalLM", eps=1e-5, fp8="one",
        tied="model.embed_tokens.weight",
        # Positions from 16 on have larger queries; the two magnitudes of YaRN differ, unlike those of the published files.
        config={"model_type": "ministral3", "num_key_value_heads": 2, "head_dim": 16, "sliding_window": None, "attention_dropout": 0.0,
                "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16,
                                    "max_position_embeddings": 128, "beta_fast": 4.0, "beta_slow": 0.5, "mscale": 1.0,
                                    "mscale_all_dim": 0.4, "llama_4_scaling_beta": 0.5},
                "tie_word_embeddings": True, "max_position_embeddings": 128},
    ),
    "qwen3-fp8": dict(
        seed=130, dtype="BF16", style="bytes", shape=(136, 144, 2, 4, 2, 36, 110), arch="Qwen3ForCausalLM", eps=1e-6, qk_norm=1.4,
        fp8="blocks", tied="model.embed_tokens.weight",
        config={"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 36, "attention_bias": False, "rope_scaling": None,
                "sliding_window": None, "use_sliding_window": False, "max_window_layers": 2,
                "rope_theta": 1000000.0, "tie_word_embeddings": True, "max_position_embeddings": 1024},
    ),
    "glm4": dict(
        seed=128, dtype="BF16", style="bytes", shape=(48, 88, 3, 4, 2, 16, 121), arch="Glm4ForCausalLM", eps=1e-5, glm=True, fused=True,
        biased=("q_proj", "k_proj", "v_proj"),
        config={"model_type": "glm4", "num_key_value_heads": 2, "head_dim": 16, "attention_bias": True, "attention_dropout": 0.0,
                "partial_rotary_factor": 0.5, "rope_theta": 10000.0, "tie_word_embeddings": False, "max_position_embeddings": 1024},
    ),
}

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tensors(spec):
    """name -> float64 array, drawn in the order in which the tensors are stored."""
    normal = Normal(spec["seed"])
    hidden, inter, layers, heads, kv_heads, head_dim, vocab = spec["shape"]
    out = {}

    def linear(name, rows, cols, gain):
        out[f"{name}.weight"] = normal.draw((rows, cols)) * (gain / math.sqrt(cols))
        if name.rsplit(".", 1)[-1] in spec.get("biased", ()):
            out[f"{name}.bias"] = normal.draw((rows,)) * 0.5

    def norm(name, width, gain=1.0):
        gains = gain * (1.0 + normal.draw((width,)) * 0.25)
        out[f"{name}.weight"] = gains - 1.0 if spec.get("sandwich") else gains  # Gemma stores how far they are from 1

    def mixture(block):
        count, stored, gain = spec["experts"]
        own = f"{block}.mlp" if stored == "apart" else f"{block}.block_sparse_moe"
        linear(f"{own}.router.layer" if stored == "granite" else f"{own}.gate", count, hidden, gain)
        names = ("w1", "w3", "w2") if stored == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        for e in range(count):
            for name, rows, cols in zip(names, (inter, inter, hidden), (hidden, hidden, inter)):
                linear(f"{own}.experts.{e}.{name}", rows, cols, 1.6)
        if stored == "granite":
            parts = [[out.pop(f"{own}.experts.{e}.{name}.weight") for name in names] for e in range(count)]
            out[f"{own}.input_linear.weight"] = np.stack([np.concatenate(part[:2]) for part in parts])
            out[f"{own}.output_linear.weight"] = np.stack([part[2] for part in parts])

    tied = spec.get("tied")
    if tied is None:
        out["model.embed_tokens.weight"] = normal.draw((vocab, hidden))
    else:  # one matrix is both the embedding and the head: the head's scale decides
        out[tied] = normal.draw((vocab, hidden)) * (spec.get("embedding", 2.0) / math.sqrt(hidden))
    for i in range(layers):
        block = f"model.layers.{i}"
        if not spec.get("behind"):
            norm(f"{block}.input_layernorm", hidden)
        linear(f"{block}.self_attn.q_proj", heads * head_dim, hidden, 1.4)
        linear(f"{block}.self_attn.k_proj", kv_heads * head_dim, hidden, 1.4)
        linear(f"{block}.self_attn.v_proj", kv_heads * head_dim, hidden, 1.4)
        linear(f"{block}.self_attn.o_proj", hidden, heads * head_dim, 1.4)
        if spec.get("qk_norm"):
            whole = spec.get("whole_norm")  # of all heads together (OLMo)
            norm(f"{block}.self_attn.q_norm", heads * head_dim if whole else head_dim, spec["qk_norm"])
            norm(f"{block}.self_attn.k_norm", kv_heads * head_dim if whole else head_dim, spec["qk_norm"])
        norm(f"{block}.post_attention_layernorm", hidden)
        if spec.get("sandwich"):  # post_attention_layernorm is then applied to what attention adds
            norm(f"{block}.pre_feedforward_layernorm", hidden)
        if spec.get("glm"):  # norms of what attention and feed-forward add, under names of their own
            norm(f"{block}.post_self_attn_layernorm", hidden)
            norm(f"{block}.post_mlp_layernorm", hidden)
        if spec.get("sandwich") or spec.get("behind"):
            norm(f"{block}.post_feedforward_layernorm", hidden)
        if spec.get("experts"):
            mixture(block)
            continue
        linear(f"{block}.mlp.gate_proj", inter, hidden, 1.4)
        linear(f"{block}.mlp.up_proj", inter, hidden, 1.4)
        linear(f"{block}.mlp.down_proj", hidden, inter, 1.4)
        if spec.get("shared"):
            gate, up, down = [out.pop(f"{block}.mlp.{name}_proj.weight") for name in ("gate", "up", "down")]
            out[f"{block}.shared_mlp.input_linear.weight"] = np.concatenate([gate, up])
            out[f"{block}.shared_mlp.output_linear.weight"] = down
        if spec.get("fused"):
            for whole, parts in ("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up")):
                at = whole.split(".", 1)[0]
                if spec.get("glm") and at == "self_attn":
                    continue
                rows = [out.pop(f"{block}.{at}.{part}_proj.weight") for part in parts]
                out[f"{block}.{whole}.weight"] = np.concatenate(rows)
    norm("model.norm", hidden, spec.get("final_norm", 1.0))
    if tied is None:
        linear("lm_head", vocab, hidden, 2.0)
    return in_8_bits(spec, out) if "fp8" in spec else out


def in_8_bits(spec, tensors):
    """Matrices of blocks as numbers of 8 bits and scales; beside one scale for all, that of activations, which nobody reads here."""
    out = {}
    for name, values in tensors.items():
        if not name.endswith("_proj.weight"):
            out[name] = values
            continue
        if spec["fp8"] == "blocks":  # so that scales differ from block to block
            values = values * np.linspace(0.4, 1.4, values.shape[0])[:, None]
        out[name], out[f"{name}_scale_inv"] = st.scales_of(values, spec["dtype"], spec["fp8"] == "blocks")
        if spec["fp8"] == "one":
            out[name.replace(".weight", ".activation_scale")] = np.array(0.01)
    return out


def to_json(value):
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def files(name):
    """file name -> bytes of one checkpoint directory."""
    spec = SPECS[name]
    hidden, inter, layers, heads, _, _, vocab = spec["shape"]
    torch_name = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[spec["dtype"]]
    if "specials" in spec:
        specials, bos, eos = spec["specials"]
    elif spec["style"] == "pieces":
        specials, bos, eos = ["<unk>", "<s>", "</s>"], 1, 2
    else:
        specials, bos, eos = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], 0, 2
    config = {
        "architectures": [spec["arch"]],
        **spec["config"],
        "hidden_size": hidden,
        **({} if "intermediate_size" in spec["config"] else {"intermediate_size": inter}),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "rms_norm_eps": spec["eps"],
        **({} if "hidden_activation" in spec["config"] else {"hidden_act": "silu"}),
        "bos_token_id": bos,
        "eos_token_id": eos,
        "torch_dtype": torch_name,
    }
    if "fp8" in spec:
        config["quantization_config"] = {
            "quant_method": "fp8",
            **({"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [st.BLOCK, st.BLOCK]} if spec["fp8"] == "blocks"
               else {"activation_scheme": "static", "dequantize": False, "weight_block_size": None}),
        }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": specials[bos],
        "eos_token": specials[eos],
        "model_max_length": config["max_position_embeddings"],
    }
    if spec.get("chat"):
        tokenizer_config["chat_template"] = CHAT_TEMPLATE
    # `unused`: rows of the embedding beyond the tokenizer's last entry, as padded vocabularies have them.
    size = vocab - spec.get("unused", 0)
    out = {
        "config.json": to_json(config),
        "generation_config.json": to_json({"bos_token_id": bos, "eos_token_id": spec.get("ends", [eos] if spec.get("chat") else eos)}),
        "tokenizer.json": to_json(
            make_tokenizer.tokenizer(spec["style"], size, specials, specials[bos] if spec["style"] == "pieces" else None)
        ),
        "tokenizer_config.json": to_json(tokenizer_config),
    }
    weights, dtype, shards = tensors(spec), spec["dtype"], spec.get("shards", 1)
    if shards == 1:
        out["model.safetensors"] = st.dump(weights, dtype)
        return out
    # Cut at equal bytes, without regard to layers: a block's tensors then lie in two shards, as happens in large models.
    total = sum(w.size for w in weights.values())
    parts, done = [{} for _ in range(shards)], 0
    for key, values in weights.items():
        parts[min(done * shards // total, shards - 1)][key] = values
        done += values.size
    where = {}
    for i, part in enumerate(parts):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        out[file] = st.dump(part, dtype)
        where.update({key: file for key in part})
    out["model.safetensors.index.json"] = to_json(
        {"metadata": {"total_size": total * st.BYTES[dtype]}, "weight_map": dict(sorted(where.items()))}
    )
    return out


def main():
    parser = argparse.ArgumentParser(description="write or check the tiny random checkpoints")
    parser.add_argument("--check", action="store_true", help="compare with the committed files instead of writing")
    args = parser.parse_args()
    bad = 0
    for name in SPECS:
        made, where = files(name), MODELS / name
        if args.check:
            for file, data in made.items():
                path = where / file
                if not path.exists() or path.read_bytes() != data:
                    print(f"{path}: differs from what make_checkpoints.py writes", file=sys.stderr)
                    bad += 1
            stray = {p.name for p in where.glob("*")} - set(made) - {"reference.json", "logits.f32", "hidden.f32"}
            for file in sorted(stray):
                print(f"{where / file}: not written by any script here", file=sys.stderr)
                bad += 1
        else:
            where.mkdir(parents=True, exist_ok=True)
            for file, data in made.items():
                (where / file).write_bytes(data)
        total = sum(p.stat().st_size for p in where.glob("*"))
        if total >= LIMIT:
            print(f"{where}: should stay below {LIMIT} bytes, is {total}", file=sys.stderr)
            bad += 1
        print(f"{name:12} {total:7} bytes")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
