"""Writes the files of `packed/`: small random matrices, quantized and packed by the tools' own packages, each beside
what the same package makes of it (`expected`, in the type that it computes in) and with the block of `config.json`
as metadata. `tests/packed.rs` reads them.

    pip install torch safetensors transformers compressed-tensors==0.20.1 bitsandbytes==0.50.2
    python packed.py SOURCES OUT

SOURCES holds the unpacked archives of `auto_gptq` 0.7.1 (the wheel) and `autoawq` 0.2.9 (the source), of which single
modules are imported: the packages themselves want a GPU. Written on 28 November 2026 with torch 2.15 and transformers 5.24.

bitsandbytes 0.50.2 dequantizes wrongly without a GPU where rows are no whole blocks; there are no such matrices here.
"""

import importlib
import json
import sys
import types

import torch
from safetensors.torch import save_file

SOURCES, OUT = sys.argv[1:]


def bare(name, path):
    """A package whose `__init__` is not run."""
    sys.modules[name] = module = types.ModuleType(name)
    module.__path__ = [path] if path else []


def save(name, tensors, **block):
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, f"{OUT}/{name}.safetensors", metadata={"quantization_config": json.dumps(block)})


def grid(weights, bits, index, symmetric=False):
    """Scales and zeros (out, groups) as GPTQ finds them, zeros from 1, the least that its first format can store."""
    groups, top = int(index.max()) + 1, 2**bits - 1
    scales, zeros = torch.zeros(weights.shape[0], groups), torch.zeros(weights.shape[0], groups)
    for group in range(groups):
        part = weights[:, index == group]
        low, high = part.min(1).values.clamp(max=0), part.max(1).values.clamp(min=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scales[:, group] = ((high - low) / top).half().float()
        zeros[:, group] = 2 ** (bits - 1) if symmetric else torch.round(-low / scales[:, group]).clamp(1, top)
    return scales, zeros


def gptq():
    bare("auto_gptq", f"{SOURCES}/auto_gptq")
    bare("auto_gptq.nn_modules", f"{SOURCES}/auto_gptq/nn_modules")
    bare("auto_gptq.nn_modules.qlinear", f"{SOURCES}/auto_gptq/nn_modules/qlinear")
    old, new = (importlib.import_module(f"auto_gptq.nn_modules.qlinear.qlinear_cuda{end}") for end in ["_old", ""])
    random, rows, cols = torch.Generator().manual_seed(1), 32, 64
    for name, bits, size, act, second, symmetric in [
        ("gptq-2", 2, 16, False, False, False),
        ("gptq-3", 3, 32, False, False, False),
        ("gptq-4", 4, 32, False, False, False),
        ("gptq-8", 8, -1, False, False, True),
        ("gptq-4-act", 4, 16, True, False, False),
        ("gptq-3-act", 3, 16, True, False, True),
        ("gptq-4-v2", 4, 32, False, True, False),
    ]:
        linear = torch.nn.Linear(cols, rows, bias=False)
        linear.weight.data = torch.randn(rows, cols, generator=random)
        each = cols if size == -1 else size
        index = torch.arange(cols) // each
        if act:
            index = index[torch.randperm(cols, generator=random)]
        scales, zeros = grid(linear.weight.data, bits, index, symmetric)
        module = (new if act else old).QuantLinear(bits, size, cols, rows, bias=False)
        module.pack(linear, scales.clone(), zeros.clone(), index.to(torch.int32))
        if act:
            module.g_idx = index.to(torch.int32)
        module.autogptq_cuda_available, module.scales = False, module.scales.half()
        # A product with the identity is the matrix as the module dequantizes it.
        tensors = {"m.qweight": module.qweight, "m.scales": module.scales, "expected": module(torch.eye(cols).half()).t()}
        # As `convert_gptq_v1_to_v2_format_module` of GPTQModel does it.
        tensors["m.qzeros"] = module.qzeros + 0x11111111 if second else module.qzeros
        if act or bits in (2, 8):
            tensors["m.g_idx"] = module.g_idx.to(torch.int32)
        more = {"checkpoint_format": "gptq_v2"} if second else {}
        save(name, tensors, quant_method="gptq", bits=bits, group_size=size, desc_act=act, sym=symmetric, **more)


def awq():
    bare("accelerate", None)
    for name in ["awq", "awq.modules", "awq.modules.linear", "awq.utils"]:
        bare(name, f"{SOURCES}/autoawq-0.2.9/{name.replace('.', '/')}")
    gemm = importlib.import_module("awq.modules.linear.gemm")
    packing = importlib.import_module("awq.utils.packing_utils")
    gemm.get_best_device = lambda: "cpu"
    rows, cols, size = 32, 64, 32
    linear = torch.nn.Linear(cols, rows, bias=False)
    linear.weight.data = torch.randn(rows, cols, generator=torch.Generator().manual_seed(2)).half()
    scales, zeros = grid(linear.weight.data.float(), 4, torch.arange(cols) // size)
    scales, zeros = scales.t().contiguous(), zeros.t().contiguous()
    module = gemm.WQLinear_GEMM.from_linear(linear, 4, size, scales=scales, zeros=zeros)
    expected = packing.dequantize_gemm(module.qweight, module.qzeros, module.scales, 4, size).t()
    tensors = {f"m.{name}": getattr(module, name) for name in ["qweight", "qzeros", "scales"]}
    save("awq-4", {**tensors, "expected": expected}, quant_method="awq", bits=4, group_size=size, version="gemm", zero_point=True)


def compressed():
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor as Mxfp4
    from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor as Float
    from compressed_tensors.compressors.naive_quantized.base import IntQuantizationCompressor as Int
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor as Pack
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    random, rows, cols = torch.Generator().manual_seed(3), 24, 64
    for name, codec, form, bits, strategy, size, symmetric, dtype in [
        ("ct-w4-group", Pack, "pack-quantized", 4, "group", 32, True, torch.bfloat16),
        ("ct-w4-asym", Pack, "pack-quantized", 4, "group", 16, False, torch.float16),
        ("ct-w4-channel", Pack, "pack-quantized", 4, "channel", None, False, torch.bfloat16),
        ("ct-w8-channel", Pack, "pack-quantized", 8, "channel", None, True, torch.bfloat16),
        ("ct-w8-group-asym", Pack, "pack-quantized", 8, "group", 32, False, torch.float16),
        ("ct-w8a8", Int, "int-quantized", 8, "channel", None, True, torch.bfloat16),
        ("ct-w8a8-asym", Int, "int-quantized", 8, "channel", None, False, torch.bfloat16),
        ("ct-w8a8-tensor", Int, "int-quantized", 8, "tensor", None, True, torch.bfloat16),
        ("ct-fp8", Float, "float-quantized", 8, "channel", None, True, torch.bfloat16),
        ("ct-mxfp4", Mxfp4, "mxfp4-pack-quantized", 4, "group", 32, True, torch.bfloat16),
    ]:
        weights = torch.randn(rows, cols, generator=random).to(dtype)
        kind = "float" if codec in (Float, Mxfp4) else "int"
        args = dict(num_bits=bits, type=kind, strategy=strategy, group_size=size, symmetric=symmetric)
        inputs = dict(num_bits=8, type=kind, strategy="token", dynamic=True) if codec in (Int, Float) else None
        more = {"scale_dtype": torch.uint8} if codec is Mxfp4 else {}
        scheme = QuantizationScheme(
            targets=["Linear"],
            weights=QuantizationArgs(**args, **more),
            input_activations=QuantizationArgs(**inputs) if inputs else None,
        )
        parts = weights.reshape({"group": (rows, -1, size or 1), "channel": (rows, 1, cols), "tensor": (1, 1, -1)}[strategy])
        if codec is Mxfp4:
            scale = torch.exp2(torch.floor(torch.log2(parts.abs().amax(-1).float())) - 2)
            zero = torch.zeros_like(scale)
        else:
            scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), scheme.weights)
        if strategy == "tensor":
            scale, zero = scale.reshape(1), zero.reshape(1)
        state = {"weight": weights, "weight_scale": scale.to(dtype), "weight_zero_point": zero}
        state = codec.compress(state, scheme)
        expected = codec.decompress(dict(state), scheme)["weight"]
        if more:
            args["scale_dtype"] = "torch.uint8"
        groups = {"group_0": dict(targets=["Linear"], weights=args, input_activations=inputs, output_activations=None)}
        tensors = {**{f"m.{name}": tensor for name, tensor in state.items()}, "expected": expected}
        save(name, tensors, quant_method="compressed-tensors", format=form, quantization_status="compressed",
             ignore=["lm_head"], config_groups=groups)


def bitsandbytes():
    import bitsandbytes.functional as bnb

    random = torch.Generator().manual_seed(4)
    for name, kind, size, nested, dtype, storage, shape in [
        ("bnb-nf4", "nf4", 64, False, torch.bfloat16, torch.uint8, (24, 64)),
        ("bnb-fp4", "fp4", 64, False, torch.float32, torch.uint8, (24, 64)),
        ("bnb-nf4-nested", "nf4", 64, True, torch.float16, torch.uint8, (296, 64)),
        ("bnb-nf4-bf16", "nf4", 128, True, torch.bfloat16, torch.bfloat16, (10, 128)),
    ]:
        weights = torch.randn(*shape, generator=random).to(dtype)
        codes, state = bnb.quantize_4bit(weights, blocksize=size, compress_statistics=nested, quant_type=kind, quant_storage=storage)
        tensors = {f"m.weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
        tensors |= {"m.weight": codes, "expected": bnb.dequantize_4bit(codes, state)}
        save(name, tensors, quant_method="bitsandbytes", load_in_4bit=True, load_in_8bit=False,
             bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=nested)
    codes, largest, _ = bnb.int8_vectorwise_quant(torch.randn(24, 64, generator=random).half())
    tensors = {"m.weight": codes, "m.SCB": largest, "m.weight_format": torch.tensor(0, dtype=torch.uint8)}
    tensors["expected"] = bnb.int8_vectorwise_dequant(codes, largest)
    save("bnb-int8", tensors, quant_method="bitsandbytes", load_in_4bit=False, load_in_8bit=True)


def mxfp4():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    random = torch.Generator().manual_seed(5)
    blocks = torch.randint(0, 256, (2, 12, 3, 16), generator=random, dtype=torch.uint8)
    scales = torch.randint(118, 130, (2, 12, 3), generator=random, dtype=torch.uint8)
    # transformers turns it to (experts, in, out).
    expected = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.bfloat16).transpose(1, 2)
    name = "m.mlp.experts.gate_up_proj"
    save("mxfp4-experts", {f"{name}_blocks": blocks, f"{name}_scales": scales, "expected": expected}, quant_method="mxfp4")


for write in [gptq, awq, compressed, bitsandbytes, mxfp4]:
    write()
