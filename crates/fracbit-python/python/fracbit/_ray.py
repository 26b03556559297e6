"""Work dealt to a cluster of Ray, for `quantize --ray ADDRESS` and `calibrate --ray ADDRESS`.

The process that was called asks for one part after the other and writes; workers make them, each
task a part, and hand them back as bytes. A part is a matrix to round, or the moments of a block's
inputs over a shard of the text; hidden states behind the block stay in the cluster, for the task
that runs the shard through the next one. What workers need is on every machine under the same
paths: the checkpoint, the calibration if there is one, and this package.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from fracbit import _fracbit
from fracbit._errors import ArgumentError, Error

# How often a part is begun again whose worker died.
RETRIES = 3
# Parts that are under way or wait, for each worker: one more than it makes.
AHEAD = 2
# Seconds in which a cluster should answer.
PATIENCE = 20


def _make(job: str, index: int, before: bytes | None, threads: int) -> tuple[bytes, bytes]:
    """One part, and what the one a stride behind goes on from, in a process of Ray."""
    # Read once, when the first part is made; results do not depend on it.
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
    return _fracbit.make_part(job, index, before)


class Dealer:
    """Deals the parts of one job, in order, and gives them back in order."""

    def __init__(self, address: str):
        try:
            import ray
        except ImportError:
            raise ArgumentError("needs Ray: pip install 'fracbit[ray]'") from None
        self.ray, self.address = ray, address
        # Of every part that is under way or waits; and what a stride behind it goes on from.
        self.tasks: dict[int, Any] = {}
        self.behind: dict[int, Any] = {}
        # A program that has a cluster already keeps it.
        self.own = not ray.is_initialized()

    def begin(self, job: str, first: int, count: int, stride: int | None = None) -> None:
        """Begins with part `first` of `count`; each goes on from the one `stride` before it."""
        ray = self.ray
        if self.own:
            address = None if self.address == "local" else self.address
            try:
                _answers(self.address)
                ray.init(
                    address=address,
                    log_to_driver=False,
                    logging_level="ERROR",
                    include_dashboard=False if address is None else None,
                )
            except Exception as error:
                raise Error(f"no cluster answers at {self.address}: {_first_line(error)}") from None
        processors = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        workers = [count for count in processors if count > 0]
        if not workers:
            raise Error(f"the cluster at {self.address} has no processors")
        # A task takes all processors of the smallest machine: memory is that of one part there.
        self.threads = min(workers)
        self.ahead = AHEAD * sum(count // self.threads for count in workers)
        self.make = ray.remote(num_cpus=self.threads, max_retries=RETRIES, num_returns=2)(_make)
        self.job, self.next, self.count, self.stride = ray.put(job), first, count, stride

    def take(self, index: int) -> bytes:
        while self.next < min(index + self.ahead, self.count):
            before = self.behind.pop(self.next - self.stride, None) if self.stride else None
            part, behind = self.make.remote(self.job, self.next, before, self.threads)
            self.tasks[self.next] = part
            if self.stride:
                self.behind[self.next] = behind
            self.next += 1
        exceptions = self.ray.exceptions
        try:
            return self.ray.get(self.tasks.pop(index))
        except exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, ModuleNotFoundError):
                raise Error(f"a worker has no fracbit, install this wheel there: {cause}") from None
            raise Error(str(cause)) from None
        except exceptions.RayError as error:
            raise Error(
                f"part {index} was lost {RETRIES + 1} times with the processes that made it "
                f"({type(error).__name__}: {_first_line(error)}); --resume goes on behind the last "
                "that was written"
            ) from None

    def end(self) -> None:
        for task in self.tasks.values():
            self.ray.cancel(task)
        self.tasks.clear()
        self.behind.clear()
        if self.own and self.ray.is_initialized():
            self.ray.shutdown()


def _answers(address: str) -> None:
    """Whether anybody listens there; Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE).close()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
