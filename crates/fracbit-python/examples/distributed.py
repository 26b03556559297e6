"""How long `calibrate --ray` and `quantize --ray` take for a model of 405 billion weights: a
simulation of their dealer.

The machines are assumptions, written down here; the rates of a core were measured. `python
distributed.py` prints the tables of `docs/distributed.md`, which the tests compare with it.
"""

import heapq
from dataclasses import dataclass

# Llama 3.1 405B: width, width inside the MLP, of keys and values together, blocks, vocabulary.
WIDTH, INNER, KEYS, BLOCKS, WORDS = 16_384, 53_248, 1_024, 126, 128_256
STORED = 2  # bytes of a weight in the checkpoint
BITS = 3.125  # of a weight that is quantized, scales among them
AHEAD = 2  # tasks for each worker, as in `fracbit._ray`
TOKENS, SHARD = 262_144, 16_384  # of a calibration and of a shard of its text, as by default


@dataclass(frozen=True)
class Machine:
    """What a worker and the head are assumed to be."""

    cores: int = 64
    # Weights that a core rounds in a second: 1.84 M are searched, `tcq-3`, `balanced`, one core of
    # Zen 4 (docs/quality.md); of a whole run that is 0.68, as of the one in docs/perf.md.
    rate: float = 0.68 * 1.84e6
    # Operations of a core in a second of `calibrate`: 32 768 tokens of SmolLM2-135M in 110 s, by the
    # first third of a run on two cores with AMX; products of weights and sums of moments alone.
    flops: float = 46e9
    # Bytes in a second: of a network card (25 Gbit/s), and of a hash by 64 cores.
    link: float = 3.1e9
    hash: float = 30e9


def matrices():
    """Weights of every matrix, in the order in which they are written."""
    block = [WIDTH * WIDTH, KEYS * WIDTH, KEYS * WIDTH, WIDTH * WIDTH] + 3 * [WIDTH * INNER]
    return [WORDS * WIDTH, *(BLOCKS * block), WORDS * WIDTH]


@dataclass(frozen=True)
class Plan:
    """What a run takes."""

    workers: int
    hours: float
    busy: float  # share of the time that workers round
    read: float  # bytes that leave the checkpoint, the head's reading among them
    back: float  # bytes that workers send to the head


def simulate(workers, machine=Machine()):
    """Deals the matrices to so many workers: each task reads its matrix, rounds it and sends it;
    the head takes them in order, reads the matrix that each was made of, and writes it."""
    weights = matrices()
    source = [STORED * n for n in weights]
    packed = [BITS / 8 * n for n in weights]
    # The head looks first whether all numbers are finite, and hashes them.
    start = 2 * sum(source) / min(machine.link, machine.hash)
    free = [start] * workers
    heapq.heapify(free)
    head, begun, ready, busy = start, 0, {}, 0.0
    for index in range(len(weights)):
        while begun < min(index + AHEAD * workers, len(weights)):
            # A task is handed out when the head has taken the one that makes room for it.
            at = max(heapq.heappop(free), head)
            rounding = weights[begun] / (machine.rate * machine.cores)
            done = at + source[begun] / machine.link + rounding + packed[begun] / machine.link
            busy += rounding
            heapq.heappush(free, done)
            ready[begun] = done
            begun += 1
        took = packed[index] / machine.link + source[index] / min(machine.link, machine.hash)
        head = max(head, ready.pop(index)) + took
    return Plan(
        workers=workers,
        hours=head / 3600,
        busy=busy / (workers * (head - start)),
        read=4 * sum(source),
        back=sum(packed),
    )


def calibrate(workers, machine=Machine()):
    """Deals shards of a text, block by block: a task reads the block, runs its shard through it,
    collects and sends the sums; it waits for the shard's task at the block before. The head takes
    the sums in order and adds them up."""
    inputs = 3 * WIDTH**2 + INNER**2  # entries of the moments of a block's four inputs
    weights = 2 * WIDTH**2 + 2 * KEYS * WIDTH + 3 * WIDTH * INNER
    working = SHARD * (2 * weights + inputs) / (machine.flops * machine.cores)
    sums = 8 * inputs / 2
    shards = TOKENS // SHARD
    start = 2 * STORED * sum(matrices()) / min(machine.link, machine.hash)
    free, behind = [start] * workers, [start] * shards
    heapq.heapify(free)
    head, begun, ready, busy = start, 0, {}, 0.0
    for index in range(BLOCKS * shards):
        while begun < min(index + AHEAD * workers, BLOCKS * shards):
            shard = begun % shards
            # Hidden states come from another machine, if the worst comes to the worst.
            moved = 4 * SHARD * WIDTH / machine.link
            at = max(heapq.heappop(free), head, behind[shard])
            behind[shard] = at + moved + STORED * weights / machine.link + working
            busy += working
            heapq.heappush(free, behind[shard])
            ready[begun] = behind[shard] + sums / machine.link
            begun += 1
        head = max(head + sums / machine.link, ready.pop(index))
    return Plan(
        workers=workers,
        hours=head / 3600,
        busy=busy / (workers * (head - start)),
        read=STORED * ((shards + 1) * BLOCKS * weights + sum(matrices())),
        back=sums * BLOCKS * shards,
    )


def memory(machine=Machine()):
    """Bytes of a worker beside the mapped checkpoint: the largest matrix and its decoded copy in
    f32, its codes, and 6 MiB of tables for each core."""
    largest = max(matrices())
    return 2 * 4 * largest + BITS / 8 * largest + machine.cores * 6 * 2**20


def table():
    """The table of the documentation."""
    lines = ["| workers | hours | rounding, share of their time |", "| --- | --- | --- |"]
    for workers in (1, 4, 16, 64):
        plan = simulate(workers)
        lines.append(f"| {workers} | {plan.hours:.1f} | {plan.busy:.0%} |")
    plan = simulate(1)
    lines += [
        "",
        f"{sum(matrices()) / 1e9:.1f} G weights in {len(matrices())} matrices; "
        f"read {plan.read / 1e12:.2f} TB, of it {plan.read / 4e12:.2f} TB by workers; "
        f"sent back {plan.back / 1e9:.0f} GB; memory of a worker {memory() / 1e9:.1f} GB.",
    ]
    return "\n".join(lines)


def calibration_table():
    """The table of the documentation for `calibrate`."""
    lines = ["| workers | hours | running the text, share of their time |", "| --- | --- | --- |"]
    for workers in (1, 4, 16):
        plan = calibrate(workers)
        lines.append(f"| {workers} | {plan.hours:.1f} | {plan.busy:.0%} |")
    plan, inputs = calibrate(1), 3 * WIDTH**2 + INNER**2
    lines += [
        "",
        f"{TOKENS // SHARD} shards of {SHARD} tokens; read {plan.read / 1e12:.1f} TB; sent back "
        f"{plan.back / 1e12:.0f} TB, {8e-9 * inputs / 2:.1f} GB for a shard of a block; memory of "
        f"the command {1e-9 * 2 * 8 * inputs:.0f} GB for sums, of a worker half of it.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(calibration_table(), table(), sep="\n\n")
