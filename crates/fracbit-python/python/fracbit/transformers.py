"""Quantized models in Hugging Face transformers.

After `import fracbit.transformers` a directory that `fracbit quantize` wrote loads like any other:

    import fracbit.transformers
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("small", dtype="float32")

The weights are then decoded and dense, in the type and on the device that is asked for, and the
model is an ordinary one: it trains, it is saved, it runs on a GPU. To keep the matrices packed in
memory and multiply by them on the CPU, as `fracbit.load` does, ask for it:

    from fracbit.transformers import FracbitConfig

    packed = FracbitConfig(packed=True)
    model = AutoModelForCausalLM.from_pretrained("small", quantization_config=packed)

Needs torch and transformers 5: `pip install 'fracbit[transformers]'`.
"""

import functools
import os
from typing import Any

import numpy as np

from fracbit._errors import ArgumentError, InputError
from fracbit._fracbit import Dense

try:
    import torch
    import transformers
    from torch import nn
    from transformers import modeling_utils
    from transformers.quantizers import auto
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    _load = modeling_utils.convert_and_load_state_dict_in_model
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"fracbit.transformers needs torch and transformers 5, which `pip install "
        f"'fracbit[transformers]'` brings: {error}"
    ) from error

__all__ = ["FracbitConfig", "FracbitQuantizer", "PackedEmbedding", "PackedLinear"]


@auto.register_quantization_config("fracbit")
class FracbitConfig(QuantizationConfigMixin):
    """How to load a directory of fracbit: decoded, or with `packed` as it is stored.

    Further fields are those of `quantization_config` in the directory's `config.json`.
    """

    def __init__(self, packed: bool = False, **block: Any):
        self.quant_method = "fracbit"
        self.packed = packed
        for name, value in block.items():
            if name not in ("quant_method", "dequantize"):
                setattr(self, name, value)
        # What transformers asks: whether the loaded model is one like any other.
        self.dequantize = not packed

    def get_loading_attributes(self) -> dict[str, bool]:
        """What the caller of `from_pretrained` decides, not the directory."""
        return {"packed": self.packed, "dequantize": self.dequantize}


# So that `quantization_config=FracbitConfig(packed=True)` counts beside what the directory says.
auto.LOADING_ATTRIBUTES_CONFIG_TYPES += (FracbitConfig,)


class _Tensor:
    """A tensor that is decoded when it is read, as transformers reads those of a file."""

    def __init__(self, dense: Dense, name: str):
        self.dense, self.name = dense, name

    def get_dtype(self) -> str:
        return "F32"

    def get_shape(self) -> list[int]:
        return list(self.dense.shapes[self.name])

    def __getitem__(self, part: Any) -> torch.Tensor:
        return torch.from_numpy(self.dense.tensor(self.name))[part]


class PackedLinear(nn.Module):
    """A linear layer whose matrix stays as it is stored, and is multiplied on the CPU.

    Inputs are (..., `in_features`), outputs (..., `out_features`), of one type, on the CPU; inside
    they are float32. It has no parameters and no gradient.
    """

    def __init__(self, dense: Dense, name: str, in_features: int, out_features: int):
        super().__init__()
        self.dense, self.name = dense, name
        self.in_features, self.out_features = in_features, out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.detach().reshape(-1, self.in_features).to("cpu", torch.float32)
        y = torch.from_numpy(self.dense.product(self.name, rows.numpy()))
        return y.to(x.device, x.dtype).reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.name}, in_features={self.in_features}, out_features={self.out_features}"


class PackedEmbedding(nn.Module):
    """An embedding whose rows stay as they are stored, and are decoded as they are asked for.

    Tokens of any shape become (..., `embedding_dim`) of `dtype`, times `scale`.
    """

    def __init__(
        self, dense: Dense, name: str, shape: tuple[int, int], dtype: torch.dtype, scale: float
    ):
        super().__init__()
        self.dense, self.name = dense, name
        self.num_embeddings, self.embedding_dim = shape
        self.dtype, self.scale = dtype, scale

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        flat = tokens.detach().reshape(-1).to("cpu", torch.int64)
        rows = torch.from_numpy(self.dense.rows(self.name, flat.numpy())) * self.scale
        return rows.to(tokens.device, self.dtype).reshape(*tokens.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        return f"{self.name}, {self.num_embeddings}, {self.embedding_dim}"


@auto.register_quantizer("fracbit")
class FracbitQuantizer(HfQuantizer):
    """Loads directories of fracbit; transformers makes and calls it."""

    requires_calibration = True
    dense: Dense
    kept: frozenset[str] = frozenset()

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        places = device_map.values() if isinstance(device_map, dict) else [device_map]
        if "disk" in places:
            raise ArgumentError("device_map: weights are decoded into memory, not read from a disk")
        packed = self.quantization_config.packed
        if packed and any(str(place) not in ("None", "cpu", "auto") for place in places):
            raise ArgumentError(
                "device_map: packed matrices are multiplied on the CPU; load them decoded "
                f"(packed=False), got {device_map!r}"
            )

    def update_device_map(self, device_map: Any) -> Any:
        return (
            {"": "cpu"}
            if self.quantization_config.packed and device_map is not None
            else device_map
        )

    def _process_model_before_weight_loading(
        self, model, checkpoint_files=None, dtype=None, **kwargs
    ):
        if not checkpoint_files:
            raise InputError(
                "a model of fracbit is loaded from its directory, not from a state dict"
            )
        self.dense = Dense(os.path.dirname(os.path.abspath(checkpoint_files[0])))
        if self.quantization_config.packed:
            self._pack(model, dtype or torch.get_default_dtype())
        return model

    def _pack(self, model, dtype: torch.dtype) -> None:
        """Puts packed layers in the place of those whose matrices the directory has."""
        shapes = self.dense.shapes
        experts = [name for name, shape in shapes.items() if len(shape) == 3 or ".experts." in name]
        if experts:
            raise InputError(
                f"`{experts[0]}`: experts cannot stay packed; load them decoded (packed=False)"
            )
        kept, head = set(), model.get_output_embeddings()
        tied = "lm_head.weight" not in shapes
        for name, module in list(model.named_modules()):
            own = f"{name}.weight"
            if module is head and tied:
                own = "model.embed_tokens.weight"
            if len(shapes.get(own, ())) != 2:
                continue
            if isinstance(module, nn.Embedding):
                scale = getattr(module, "scalar_embed_scale", 1.0)
                packed = PackedEmbedding(self.dense, own, shapes[own], dtype, scale)
            elif type(module) is nn.Linear:
                packed = PackedLinear(self.dense, own, module.in_features, module.out_features)
            else:
                raise InputError(
                    f"`{own}`: a {type(module).__name__} cannot stay packed; load it decoded "
                    "(packed=False)"
                )
            model.set_submodule(name, packed)
            kept |= {own, own.removesuffix(".weight") + ".bias"}
        self.kept = frozenset(kept)
        # Two layers read one packed matrix; there is no parameter to tie.
        model.all_tied_weights_keys = {}

    def state_dict(self) -> dict[str, _Tensor]:
        """What is decoded, by the names of the checkpoint."""
        return {
            name: _Tensor(self.dense, name) for name in self.dense.shapes if name not in self.kept
        }

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return not self.quantization_config.packed

    @property
    def is_trainable(self) -> bool:
        return not self.quantization_config.packed


@functools.wraps(_load)
def _decoded(model, state_dict, load_config, *args, **kwargs):
    """Gives transformers tensors of its own names in place of those that lie in the files.

    A quantizer may change tensors one by one, by patterns of their names; ours come from several,
    and some from none, such as norms of ones.
    """
    quantizer = load_config.hf_quantizer
    if not isinstance(quantizer, FracbitQuantizer):
        return _load(model, state_dict, load_config, *args, **kwargs)
    info, rest = _load(model, quantizer.state_dict(), load_config, *args, **kwargs)
    missing = sorted(set(info.missing_keys) - set(model.all_tied_weights_keys))
    for names, rule in [
        (missing, "is wanted by {}, and not in the directory"),
        (sorted(info.unexpected_keys), "is in the directory, and not wanted by {}"),
    ]:
        if names:
            rule = rule.format(f"{type(model).__name__} of transformers {transformers.__version__}")
            raise InputError(f"`{names[0]}` {rule}")
    return info, rest


modeling_utils.convert_and_load_state_dict_in_model = _decoded
