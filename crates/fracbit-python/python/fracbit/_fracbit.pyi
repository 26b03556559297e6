# Types of what is written in Rust; its documentation is there and in `help()`.
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import numpy.typing as npt
from typing_extensions import Unpack

from fracbit._progress import Progress
from fracbit._results import Evaluation
from fracbit._sampling import Sampling

__version__: str

def command(
    args: Sequence[str], progress: Progress = None, cluster: Callable[[str], Any] | None = None
) -> str: ...
def main(args: Sequence[str], cluster: Callable[[str], Any] | None = None) -> int: ...
def make_part(job: str, index: int, before: bytes | None = None) -> tuple[bytes, bytes]: ...
def load(path: str | PathLike[str], *, verify: bool = True) -> Model: ...
def quantize_matrix(
    weights: npt.ArrayLike,
    scheme: str,
    *,
    rotate: bool = True,
    seed: int = 0,
    moments: npt.ArrayLike | None = None,
    effort: str = "balanced",
    progress: Progress = None,
) -> PackedMatrix: ...
def dequantize(matrix: PackedMatrix) -> npt.NDArray[np.float32]: ...

@final
class Model:
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 256,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float | None = None,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        kv: int = 16,
        **sampling: Unpack[Sampling],
    ) -> Generation: ...
    def chat(
        self,
        messages: str | Sequence[Mapping[str, str]],
        *,
        max_tokens: int = 256,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float | None = None,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        kv: int = 16,
        allow_special: bool = False,
        **sampling: Unpack[Sampling],
    ) -> Generation: ...
    def logits(
        self, tokens: Sequence[int] | npt.NDArray[Any], *, kv: int = 16
    ) -> npt.NDArray[np.float32]: ...
    def evaluate(
        self,
        text: str,
        *,
        baseline: Model | None = None,
        ctx: int | None = None,
        windows: int | None = None,
        bos: bool | None = None,
        separator: str | None = None,
        prefix_space: bool = True,
        kv: int = 16,
        progress: Progress = None,
    ) -> Evaluation: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def path(self) -> Path: ...
    @property
    def parameters(self) -> int: ...
    @property
    def bits_per_weight(self) -> float: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...

@final
class Dense:
    def __new__(cls, path: str | PathLike[str], *, verify: bool = True) -> Dense: ...
    def tensor(self, name: str) -> npt.NDArray[np.float32]: ...
    def product(self, name: str, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]: ...
    def rows(self, name: str, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]: ...
    @property
    def shapes(self) -> dict[str, tuple[int, ...]]: ...
    @property
    def nbytes(self) -> int: ...

@final
class Generation(Iterator[str]):
    def __next__(self) -> str: ...
    @property
    def tokens(self) -> list[int]: ...
    @property
    def stop(self) -> Literal["end", "complete", "max_tokens", "context_full", "failed"] | None: ...

@final
class Tokenizer:
    def __new__(cls, path: str | PathLike[str]) -> Tokenizer: ...
    def encode(self, text: str, *, bos: bool | None = None) -> list[int]: ...
    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str: ...
    def chat(
        self, messages: str | Sequence[Mapping[str, str]], *, allow_special: bool = False
    ) -> list[int]: ...
    def token(self, id: int) -> str: ...
    def __len__(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_ids(self) -> list[int]: ...

@final
class PackedMatrix:
    @property
    def scheme(self) -> str: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def bits_per_weight(self) -> float: ...
    @property
    def relative_error(self) -> float: ...
