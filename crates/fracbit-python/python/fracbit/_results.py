"""What the commands return."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found."""

    perplexity: float
    """Exponential of `nats_per_token`."""
    nats_per_token: float
    """Mean negative log-likelihood of a token."""
    tokens: int
    """Predictions scored."""
    bits_per_weight: float
    """Stored bits per parameter, everything counted."""
    kl: float | None = None
    """Mean KL divergence from the baseline, nats per token; None without one."""
    top1_agreement: float | None = None
    """Share of predictions where both models find the same token most likely, 0 to 1."""


@dataclass(frozen=True)
class Distortion:
    """The error of a scheme on Gaussian weights."""

    scheme: str
    """Its family, such as `tcq`; of a nested or progressive scheme the whole name."""
    code: str | None
    """Trellis code, `fine`, `fast` or `hyb`; None for others."""
    bits: float
    """Payload bits per weight."""
    nmse: float
    """Squared error over the squared weights."""
    bound: float
    """The least that any code can reach at this rate, `2 ** (-2 * bits)`."""
    published: float | None
    """The value that Q-Palette publishes, if any."""


@dataclass(frozen=True)
class Calibrated:
    """What every layer of a model reads, as it was written."""

    path: Path
    """Its directory."""
    tokens: int
    """Tokens that it was measured on."""
    sequences: int
    """Sequences that they make up."""
    text: str
    """Where they came from, in words."""

    @classmethod
    def _of(cls, path: Path, document: dict[str, Any]) -> Calibrated:
        return cls(path, document["tokens"], document["sequences"], document["text"])


@dataclass(frozen=True)
class Quantized:
    """A quantized model as it was written."""

    path: Path
    """Its directory."""
    bytes: int
    """Bytes of all stored tensors."""
    bits_per_weight: float
    """Stored bits per parameter, everything counted."""
    predicted_loss: float
    """Rise of the loss that the plan predicts, nats per token."""

    @classmethod
    def _of(cls, path: Path, document: dict[str, Any]) -> Quantized:
        return cls(path, *(document[key] for key in ("bytes", "bits_per_weight", "predicted_loss")))


class Plan(dict[str, Any]):
    """Which scheme each matrix gets: the document `plan.json`, a dict.

    Print it, edit it, save it, give it to `quantize`. `plan["layers"]` is a list of dicts with
    `name`, `scheme`, `bits`, `rows`, `cols`, `bytes`, `sensitivity` and `predicted_loss`.

    >>> plan = fracbit.plan(demo, bits=3, sensitivity="prior")
    >>> plan
    Plan(bits_per_weight=2.9997, bytes=1033028, predicted_loss=0.0246, layers=43)
    >>> plan["layers"][0]["scheme"]
    'tcq-3.75'
    """

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per parameter, everything counted."""
        return float(self["bits_per_weight"])

    @property
    def bytes(self) -> int:
        """Bytes of all stored tensors."""
        return int(self["bytes"])

    @property
    def predicted_loss(self) -> float:
        """Predicted rise of the loss, nats per token."""
        return float(self["predicted_loss"])

    @property
    def layers(self) -> list[dict[str, Any]]:
        """The matrices, in the order of the model."""
        layers: list[dict[str, Any]] = self["layers"]
        return layers

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads a plan that was saved, here or by `fracbit plan --save`."""
        return cls(json.loads(Path(path).read_text(encoding="utf-8")))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a file, for `quantize` and the command line."""
        Path(path).write_text(json.dumps(self, indent=2) + "\n", encoding="utf-8")

    def __repr__(self) -> str:
        return (
            f"Plan(bits_per_weight={self.bits_per_weight:.4f}, bytes={self.bytes}, "
            f"predicted_loss={self.predicted_loss:.4f}, layers={len(self.layers)})"
        )
