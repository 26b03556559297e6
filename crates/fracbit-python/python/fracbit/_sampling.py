"""What few change of how tokens are picked; see `Model.generate`."""

from typing import TypedDict


class Sampling(TypedDict, total=False):
    """Keywords of `generate` beside its own: settings of the samplers that are off by default."""

    typical_p: float
    xtc_probability: float
    xtc_threshold: float
    mirostat_tau: float
    mirostat_eta: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_window: int
