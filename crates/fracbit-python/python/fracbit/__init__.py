"""Make large language models small at any number of bits per weight, and run them on the CPU.

>>> model = fracbit.load(demo)
>>> "".join(model.generate("Once upon a time", max_tokens=5, temperature=0))
', there was a little'

Long calls let other threads run, stop at Ctrl-C, and take `progress`: True for a bar of tqdm, or a
function `progress(done, total, what)`, which may raise to stop them. What the command line notes
goes to the logger `fracbit`. Threads are those of `RAYON_NUM_THREADS`, by default all cores;
results do not depend on their number.
"""

from fracbit._commands import calibrate, distortion, evaluate, generate, plan, quantize
from fracbit._errors import ArgumentError, BudgetError, Error, InputError
from fracbit._fracbit import (
    Dense,
    Generation,
    Model,
    PackedMatrix,
    Tokenizer,
    __version__ as __version__,
    dequantize,
    load,
    quantize_matrix,
)
from fracbit._results import Calibrated, Distortion, Evaluation, Plan, Quantized

__all__ = [
    "ArgumentError",
    "BudgetError",
    "Calibrated",
    "Dense",
    "Distortion",
    "Error",
    "Evaluation",
    "Generation",
    "InputError",
    "Model",
    "PackedMatrix",
    "Plan",
    "Quantized",
    "Tokenizer",
    "calibrate",
    "dequantize",
    "distortion",
    "evaluate",
    "generate",
    "load",
    "plan",
    "quantize",
    "quantize_matrix",
]
