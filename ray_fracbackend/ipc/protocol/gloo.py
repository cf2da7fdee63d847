"""Collectives over torch's Gloo backend, for the staged backend. Imports torch.

Gloo supports few element types, no AVG and not every reduce_scatter. Its MIN and MAX keep or lose a NaN, depending on
the order. If Gloo does not reduce as `Reduction` does, ranks exchange the bytes and each rank reduces them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch

from ray_fracbackend.shown import decoded

from .._torch import PrefixStore, ProcessGroupGloo, c10d
from .._torch import RedOpType as Op
from ..errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupClosedError,
    GroupPoisonedError,
    IpcError,
    PeerLostError,
)
from ..host.daemons import start_daemon
from ..host.liveness import Peer, start_time
from ..host.support import host_id
from .description import KEY_BYTES, Terms, describe_call, description_text
from .local import Parts, SomeParts, as_bytes
from .reductions import Reduction
from .setup import share

# Element types and operations for which Gloo's result equals that of `Reduction`.
_DTYPES = (torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64)
_OPS = {Op.SUM: Op.SUM, Op.AVG: Op.SUM, Op.PREMUL_SUM: Op.SUM, Op.PRODUCT: Op.PRODUCT}
_PROCESSES = describe_call("process of each rank")
# Time to wait for Gloo before checking whether another rank has failed: the first and the longest interval.
_FIRST_INTERVAL_S, _LAST_INTERVAL_S = 0.1, 2.0
# Time to wait for data that a rank may have sent before it left or died.
_WAIT_FOR_SENT_S = 2.0


def _options(kind: str, terms: Terms, **fields: Any) -> Any:
    made = getattr(c10d, f"{kind}Options")()
    made.timeout = terms.left()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


class GlooCollectives:
    """Collectives of CPU tensors for ranks without shared memory; for the arguments see `LocalCollectives`.

    Gloo's own abort and shutdown leave the other ranks waiting, and on Windows Gloo does not always notice a closed
    connection. A rank that fails or leaves therefore writes this to the store and drops its Gloo group, which closes
    the connections. Waiting ranks regularly check the store and the processes of their host.

    Args:
        store: The group's store; all ranks create this object in the same call.
        rank: This process's rank in the group.
        names: Name of each rank in messages.
        timeout: Time limit for connecting.

    Raises:
        IpcError: The ranks cannot connect.
    """

    def __init__(self, store: Any, rank: int, names: Sequence[str], timeout: timedelta) -> None:
        self.rank = rank
        self.num_ranks = len(names)
        self._names = names
        self._store = PrefixStore("gloo-collectives", store)
        self._peers: dict[int, Peer] = {}
        self._reason: str | None = None
        self._closed = False
        try:
            with decoded():
                self._gloo: Any = ProcessGroupGloo(PrefixStore("group", self._store), rank, len(names), timeout)
        except RuntimeError as error:
            raise IpcError(f"{len(names)} ranks cannot connect through Gloo: {error}") from error
        own = {"host": host_id(), "pid": os.getpid(), "started": start_time(os.getpid())}
        # All ranks wait here: if one left before another has connected, that one would report a broken network.
        infos = share(self, names, lambda: own, Terms.within(_PROCESSES, timeout.total_seconds()))
        for other, info in enumerate(infos):
            if other != rank and info["host"] == own["host"]:
                self._peers[other] = Peer(info["pid"], info["started"])

    def _wait(self, work: Any, terms: Terms) -> None:
        """Wait for Gloo in intervals; after each, check whether another rank has failed, left or died."""
        interval_s, lost_since, what = _FIRST_INTERVAL_S, None, description_text(terms.description)
        while True:
            try:
                work.wait(timedelta(seconds=interval_s))
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # the interval may have ended first: raise Gloo's error, if any
                    return
            # Another thread of this process, or another rank, may have broken the group.
            self.raise_if_unusable(what)
            if (failure := self._posted("failed")) is not None:
                raise GroupPoisonedError(f"{what}: {failure}")
            lost = self._lost()
            if lost is None:
                interval_s = min(2 * interval_s, _LAST_INTERVAL_S)
            elif lost_since is None:
                # The lost rank may have sent its data before; it may still arrive.
                lost_since, interval_s = time.monotonic(), _FIRST_INTERVAL_S
            elif time.monotonic() > lost_since + _WAIT_FOR_SENT_S:
                raise PeerLostError(f"{lost} before it reached {what}.")

    def _lost(self) -> str | None:
        """Return a message about a rank that is known to have left or died, or None."""
        for rank, peer in self._peers.items():
            if not peer.is_alive():
                return f"{self._names[rank]} (pid {peer.pid}) died"
        return self._posted("left")

    def _posted(self, key: str) -> str | None:
        """Return the message that the first rank that failed or left has written to the store, or None."""
        with suppress(RuntimeError):  # the process that hosts the store may have ended
            if self._store.check([key]):
                return str(self._store.get(key).decode("utf-8", "replace"))
        return None

    def _post(self, key: str, text: str) -> None:
        with suppress(RuntimeError):
            self._store.compare_set(key, "", text)

    def fail(self, reason: str) -> None:
        """Mark the group as broken: the other ranks raise with the reason of the first rank that failed."""
        if self._reason is not None:
            return
        self._reason = reason
        name = self._names[self.rank]
        self._post("failed", f"{name} failed and the process group cannot be used any more. Reason: {reason}")
        self._drop()

    def _drop(self, idle: bool = False) -> None:
        """Drop the Gloo group; in a thread if it may not be idle, as its destructor waits for running operations."""
        dropped, self._gloo = [self._gloo], None
        if not idle:
            start_daemon(dropped.clear, "drop a Gloo group")

    def raise_if_unusable(self, what: str) -> None:
        """Raise the error that a call would raise now, if the group is closed or broken.

        Raises:
            IpcError: The group was closed, or is broken.
        """
        if self._closed:
            raise GroupClosedError(f"{what}: the process group was shut down or aborted; create a new one.")
        if self._reason is not None:
            raise GroupPoisonedError(f"{what}: the process group cannot be used any more. Reason: {self._reason}")

    def abort(self, reason: str) -> None:
        """Mark the group as broken, then close it. May be called repeatedly and from any thread."""
        if not self._closed:
            self.fail(reason)
        self._closed = True

    def close(self, idle: bool) -> None:
        """Leave the group: ranks that wait for this one raise. May be called repeatedly."""
        if not self._closed and self._reason is None:
            self._post("left", f"{self._names[self.rank]} shut its process group down")
            self._drop(idle)
        self._closed = True

    @contextmanager
    def _checked(self, terms: Terms) -> Iterator[None]:
        """Compare descriptions, then run the block; mark the group as broken if either fails."""
        what = description_text(terms.description)
        self.raise_if_unusable(what)
        try:
            self._compare_descriptions(terms)
            yield
        except BaseException as error:
            reason, late = str(error), terms.is_late()
            if not isinstance(error, IpcError):
                self.raise_if_unusable(what)  # another thread has aborted the group
                failure, lost = self._posted("failed"), self._lost()
                reason = f"{what}: {failure}" if failure else f"{what} over Gloo: {f'{lost}. ' if lost else ''}{error}"
            self.fail(reason)
            if isinstance(error, IpcError) or not isinstance(error, Exception):
                raise
            # Gloo raises one exception type for all failures.
            kind = GroupPoisonedError if failure else CollectiveTimeoutError if late else PeerLostError
            raise kind(reason) from error

    def barrier(self, terms: Terms) -> None:
        """See `LocalCollectives.barrier`."""
        with self._checked(terms):
            pass  # all ranks have called it

    def reduce(self, tensor: torch.Tensor, root: int | None, reduction: Reduction, terms: Terms) -> None:
        """See `LocalCollectives.reduce`; all ranks get the result, and ranks other than the root drop it."""
        with self._checked(terms):
            out = tensor if root in (None, self.rank) else torch.empty_like(tensor)
            if reduction.accumulate_dtype not in _DTYPES or reduction.op not in _OPS or not tensor.numel():
                parts = self._gathered(as_bytes(tensor), terms)
                reduction.reduce(out, [part.view(tensor.dtype) for part in parts])
                return
            total = tensor.to(reduction.accumulate_dtype, copy=out is not tensor)
            options = _options("Allreduce", terms, reduceOp=_OPS[reduction.op])
            self._wait(self._gloo.allreduce([total], options), terms)
            reduction.finish(total)
            if total is not out:
                out.copy_(total)

    def broadcast(self, tensor: torch.Tensor, root: int, terms: Terms) -> None:
        """See `LocalCollectives.broadcast`."""
        with self._checked(terms):
            if tensor.numel():
                options = _options("Broadcast", terms, rootRank=root)
                self._wait(self._gloo.broadcast([as_bytes(tensor)], options), terms)

    def gather(self, tensor: torch.Tensor, outputs: Parts | None, root: int | None, terms: Terms) -> None:
        """See `LocalCollectives.gather`; an output may be `tensor` itself, but must not overlap it otherwise."""
        with self._checked(terms):
            self._gather(as_bytes(tensor), [as_bytes(output) for output in outputs or ()], root, terms)

    def reduce_scatter(self, inputs: Parts, output: torch.Tensor, reduction: Reduction, terms: Terms) -> None:
        """See `LocalCollectives.reduce_scatter`; each rank receives the parts that it reduces."""
        with self._checked(terms):
            received = torch.empty((self.num_ranks, output.numel()), dtype=output.dtype)
            if output.numel():
                self._exchange(inputs, list(received), terms)
            reduction.reduce(output, list(received))

    def exchange(self, inputs: SomeParts, outputs: SomeParts, max_bytes: int, terms: Terms) -> None:
        """See `LocalCollectives.exchange`."""
        with self._checked(terms):
            if max_bytes:
                self._exchange(inputs, outputs, terms)

    def _compare_descriptions(self, terms: Terms) -> None:
        """Compare the descriptions of a call; return once all ranks have called it.

        Raises:
            CollectiveMismatchError: Ranks have called different collectives; every rank raises.
        """
        own = torch.frombuffer(bytearray(terms.description), dtype=torch.uint8)
        for rank, tensor in enumerate(self._gathered(own, terms)):
            theirs = bytes(tensor.tolist())
            if theirs[:KEY_BYTES] != terms.description[:KEY_BYTES]:
                raise CollectiveMismatchError(
                    f"{self._names[self.rank]} called {description_text(terms.description)} while "
                    f"{self._names[rank]} called {description_text(theirs)} for the same collective "
                    f"of the group; all ranks must make the same calls in the same order."
                )

    def _gathered(self, tensor: torch.Tensor, terms: Terms) -> list[torch.Tensor]:
        """Return the `tensor` of every rank, indexed by rank; all have the same size."""
        parts = [torch.empty_like(tensor) for _ in self._names]
        self._gather(tensor, parts, None, terms)
        return parts

    def _gather(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor], root: int | None, terms: Terms) -> None:
        """Gather ``tensor`` into the root's `outputs`, or into every rank's if root is None."""
        if not tensor.numel():
            return
        if root is None:
            options = _options("Allgather", terms)
            self._wait(self._gloo.allgather([list(outputs)], [tensor], options), terms)
        else:
            options = _options("Gather", terms, rootRank=root)
            targets = [list(outputs)] if self.rank == root else []
            self._wait(self._gloo.gather(targets, [tensor], options), terms)

    def _exchange(self, inputs: SomeParts, outputs: SomeParts, terms: Terms) -> None:
        """Send the bytes of ``inputs[r]`` to rank r and receive ``outputs[r]`` from it; None means no data."""
        empty = torch.empty(0, dtype=torch.uint8)
        sources = [empty if t is None else as_bytes(t) for t in inputs]
        targets = [empty if t is None else as_bytes(t) for t in outputs]
        received = torch.empty(sum(t.numel() for t in targets), dtype=torch.uint8)
        out_sizes, in_sizes = [t.numel() for t in targets], [t.numel() for t in sources]
        options = _options("AllToAll", terms)
        self._wait(self._gloo.alltoall_base(received, torch.cat(sources), out_sizes, in_sizes, options), terms)
        for target, part in zip(targets, received.split_with_sizes(out_sizes), strict=True):
            target.copy_(part)
