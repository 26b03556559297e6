"""The commands as functions: flags are keyword arguments, documents are results.

Arguments are not checked here but by the command itself, so that both refuse the same in the same
words; messages therefore name flags (`--bits`), which are keywords by the same name.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fracbit import _fracbit, _ray
from fracbit._errors import ArgumentError
from fracbit._progress import Progress
from fracbit._results import Calibrated, Distortion, Evaluation, Plan, Quantized

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fracbit._sampling import Sampling

StrPath = str | os.PathLike[str]


def _run(command: str, *operands: StrPath, progress: Progress, **options: Any) -> str:
    """What a command prints. `None` and `False` leave an option out, `True` is a flag, and what can
    be given several times is a list."""
    line = [command]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        values = value if isinstance(value, (list, tuple)) else [value]
        for each in values:
            if each is True:
                line.append(flag)
            elif each is not None and each is not False:
                each = os.fspath(each) if isinstance(each, os.PathLike) else each
                line.append(f"{flag}={each}")
    line += ["--", *(os.fspath(operand) for operand in operands)]
    return _fracbit.command(line, progress, _ray.Dealer)


def _seconds(time: str | float | None) -> str | None:
    """A time as the command line takes it; numbers are seconds."""
    return time if time is None or isinstance(time, str) else f"{time}s"


def _listed(values: str | Iterable[str] | None) -> list[str]:
    """One or several."""
    return [] if values is None else [values] if isinstance(values, str) else list(values)


def _bos(bos: bool | None) -> dict[str, bool]:
    """Whether sequences begin with BOS, as flags."""
    return {"bos": bos is True, "no_bos": bos is False}


def plan(
    model: StrPath,
    *,
    bits: float | None = None,
    size: str | int | None = None,
    latency: str | float | None = None,
    tokens_per_second: float | None = None,
    memory: str | int | None = None,
    sequences: int | None = None,
    scheme: str | None = None,
    profile: StrPath | None = None,
    context: int | None = None,
    batch: int | None = None,
    palette: str | None = None,
    also: str | Sequence[str] | None = None,
    code: str | None = None,
    rotation: str | None = None,
    smoothing: bool = True,
    bands: bool = True,
    seed: int = 0,
    keep_head: bool = False,
    pin: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    sensitivity: StrPath | None = None,
    progress: Progress = None,
) -> Plan:
    """Choose a scheme for every matrix of a checkpoint within a budget, as `fracbit plan` does.

    The budget is one or several of: `bits`, stored bits per weight with everything counted; `size`,
    bytes of the directory, a number or text such as "600MB"; `latency` of a decode step, seconds or
    text such as "20ms", or `tokens_per_second`, both with `profile`, a file of `fracbit profile`;
    `memory` of weights and cache together for `sequences` of `context` tokens; or `scheme` for
    every matrix.

    `palette` ("tcq", "vq", "nuq", "nest", "all"), `also` (schemes beside it) and `code` ("fine",
    "fast", "hyb") say what to choose from, `rotation` ("auto", "online", "fold", "none"),
    `smoothing` and `seed` how weights are prepared, `bands` whether rows whose errors cost most may
    have more bits than the rest of their matrix. `pin` ("layers.0.*=tcq-4") gives layers a scheme,
    `exclude` forbids them some. `sensitivity` is "quick" (measure on 1024 to 4096 tokens, the
    default), "prior" (measure nothing) or a file of `fracbit sensitivity`.

    Raises BudgetError when the budget is out of reach.

    >>> plan = fracbit.plan(demo, bits=2.5, sensitivity="prior")
    >>> plan.bits_per_weight <= 2.5
    True
    """
    document = _run(
        "plan",
        model,
        progress=progress,
        bits=bits,
        size=size,
        latency=_seconds(latency),
        tokens_per_second=tokens_per_second,
        memory=memory,
        sequences=sequences,
        scheme=scheme,
        profile=profile,
        context=context,
        batch=batch,
        palette=palette,
        also=_listed(also),
        code=code,
        rotation=rotation,
        no_smoothing=not smoothing,
        no_bands=not bands,
        seed=seed,
        keep_head=keep_head,
        pin=_listed(pin),
        exclude=_listed(exclude),
        sensitivity=sensitivity,
        json=True,
    )
    return Plan(json.loads(document))


def quantize(
    model: StrPath,
    out: StrPath,
    *,
    bits: float | None = None,
    size: str | int | None = None,
    latency: str | float | None = None,
    tokens_per_second: float | None = None,
    memory: str | int | None = None,
    sequences: int | None = None,
    scheme: str | None = None,
    plan: Plan | StrPath | None = None,
    text: StrPath | None = None,
    data_free: bool = False,
    learn: StrPath | bool = False,
    calibration: StrPath | None = None,
    sequential: bool = False,
    time: str | float | None = None,
    tokens: int | None = None,
    bos: bool | None = None,
    separator: str | None = None,
    prefix_space: bool = True,
    effort: str | None = None,
    profile: StrPath | None = None,
    context: int | None = None,
    batch: int | None = None,
    palette: str | None = None,
    also: str | Sequence[str] | None = None,
    code: str | None = None,
    rotation: str | None = None,
    smoothing: bool = True,
    bands: bool = True,
    seed: int | None = None,
    keep_head: bool = False,
    pin: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    sensitivity: StrPath | None = None,
    max_memory: str | int | None = None,
    ray: str | None = None,
    resume: bool = False,
    force: bool = False,
    progress: Progress = None,
) -> Quantized:
    """Write a smaller model of a checkpoint into the directory `out`, as `fracbit quantize` does.

    The budget and the choices are those of `plan`; `plan` is a Plan, edited or not, or its file.
    The model is calibrated on a built-in text, or on the file `text`, for which `bos`, `separator`
    and `prefix_space` say how it becomes tokens; with `data_free` on nothing. `learn` (True, or a
    text file) takes longest and loses least. `tokens` or `time` (seconds, or text such as "5m")
    limit the calibration; `calibration` is a directory of `fracbit calibrate`. `effort` is how
    thoroughly codes are searched: "fast", "balanced" (the default) or "exact". `ray` is the address
    of a cluster that rounds the matrices, "auto" or "local", with `data_free` or `calibration`.
    `force` replaces `out` when it is a model directory.

    The same checkpoint, options and seed give the same bytes as the command. `out` gets its name
    when everything in it is on disk; the same call with `resume` continues one that was stopped.

    >>> fracbit.quantize(demo, out, bits=4, data_free=True, sensitivity="prior", effort="fast")
    Quantized(path=PosixPath('...'), bytes=13..., bits_per_weight=3.9..., predicted_loss=0.0...)
    """
    with tempfile.TemporaryDirectory() as scratch:
        if isinstance(plan, Plan):
            if resume:
                raise ArgumentError("plan: should be the file of a plan, to resume")
            file = Path(scratch, "plan.json")
            plan.save(file)
            plan = file
        document = _run(
            "quantize",
            model,
            progress=progress,
            out=out,
            bits=bits,
            size=size,
            latency=_seconds(latency),
            tokens_per_second=tokens_per_second,
            memory=memory,
            sequences=sequences,
            scheme=scheme,
            plan=plan,
            text=text,
            data_free=data_free,
            learn=learn,
            calibration=calibration,
            sequential=sequential,
            time=_seconds(time),
            tokens=tokens,
            **_bos(bos),
            separator=separator,
            no_prefix_space=not prefix_space,
            effort=effort,
            profile=profile,
            context=context,
            batch=batch,
            palette=palette,
            also=_listed(also),
            code=code,
            rotation=rotation,
            no_smoothing=not smoothing,
            no_bands=not bands,
            seed=seed,
            keep_head=keep_head,
            pin=_listed(pin),
            exclude=_listed(exclude),
            sensitivity=sensitivity,
            max_memory=max_memory,
            ray=ray,
            resume=resume,
            force=force,
            json=True,
        )
    # A run that is resumed and had finished has nothing to report but its plan.
    report = json.loads(document) if document else Plan.read(Path(out, "plan.json"))
    return Quantized._of(Path(out), report)


def calibrate(
    model: StrPath,
    out: StrPath,
    text: StrPath | None = None,
    *,
    tokens: int | None = None,
    ctx: int | None = None,
    bos: bool | None = None,
    separator: str | None = None,
    prefix_space: bool = True,
    seed: int = 0,
    max_memory: str | int | None = None,
    ray: str | None = None,
    resume: bool = False,
    force: bool = False,
    progress: Progress = None,
) -> Calibrated:
    """Measure what every layer of a model reads, as `fracbit calibrate` does, for
    `quantize(..., calibration=out)`.

    On at most `tokens` tokens of the file `text`, in sequences of `ctx`; `bos`, `separator` and
    `prefix_space` say how it becomes tokens. Without a text the model writes one, drawn with
    `seed`. `ray` is the address of a cluster that runs shards of the text, "auto" or "local".
    `force` replaces `out` when it is such a directory; the same call with `resume` continues one
    that was stopped. The same arguments give the same bytes.

    >>> fracbit.calibrate(demo, stats, Path(demo, "stories.txt"), tokens=512)
    Calibrated(path=PosixPath('...'), tokens=512, sequences=..., text='stories.txt (blake3 ...)')
    """
    document = _run(
        "calibrate",
        model,
        progress=progress,
        out=out,
        text=text,
        tokens=tokens,
        ctx=ctx,
        **_bos(bos),
        separator=separator,
        no_prefix_space=not prefix_space,
        seed=seed,
        max_memory=max_memory,
        ray=ray,
        resume=resume,
        force=force,
        json=True,
    )
    return Calibrated._of(Path(out), json.loads(document))


def evaluate(
    model: StrPath,
    text: StrPath,
    *,
    baseline: StrPath | None = None,
    ctx: int | None = None,
    windows: int | None = None,
    bos: bool | None = None,
    separator: str | None = None,
    prefix_space: bool = True,
    kv: int = 16,
    progress: Progress = None,
) -> Evaluation:
    """Measure a model on a text file, alone or beside `baseline`, as `fracbit eval` does.

    `Model.evaluate` does the same for a model in memory and a text in memory, and explains the
    arguments.

    >>> fracbit.evaluate(demo, stories, ctx=128, windows=2)
    Evaluation(perplexity=14.89..., nats_per_token=2.700..., tokens=256, bits_per_weight=16.0, ...)
    """
    document = _run(
        "eval",
        model,
        progress=progress,
        text=text,
        baseline=baseline,
        ctx=ctx,
        windows=windows,
        **_bos(bos),
        separator=separator,
        no_prefix_space=not prefix_space,
        kv=kv,
        json=True,
    )
    return Evaluation(**json.loads(document))


def generate(
    model: _fracbit.Model | StrPath,
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
) -> _fracbit.Generation:
    """Continue a text with a model, in memory or of a path, as `fracbit run` does.

    `Model.generate` explains the arguments.

    >>> "".join(fracbit.generate(demo, "Once upon a time", max_tokens=5, temperature=0))
    ', there was a little'
    """
    loaded = model if isinstance(model, _fracbit.Model) else _fracbit.load(model)
    return loaded.generate(
        prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        kv=kv,
        **sampling,
    )


def distortion(
    schemes: str | Sequence[str] | None = None,
    *,
    weights: int = 1 << 20,
    seed: int = 0,
    progress: Progress = None,
) -> list[Distortion]:
    """Error of schemes on that many Gaussian weights, beside the bound, as `fracbit distortion`.

    Without `schemes` those of the default palette.

    >>> [found] = fracbit.distortion("nuq-4", weights=1 << 16)
    >>> round(found.nmse, 3), round(found.bound, 5)
    (0.009, 0.00391)
    """
    options = {"scheme": _listed(schemes), "weights": weights, "seed": seed, "json": True}
    return [
        Distortion(**row) for row in json.loads(_run("distortion", progress=progress, **options))
    ]
