"""Tensors of a device over collectives of CPU tensors, by way of pinned host memory. Runs in every rank; imports torch.

A chunk is copied to pinned memory on the group's stream, the host waits for the copy, runs the collective on the pinned
memory, and issues the copy back. The copy of the next chunk is issued before the host's collective of this one, so the two run
side by side. Two buffers are enough: the copy into a buffer is issued to the same stream as the copy out of it before.

No memory of another process is mapped on the device, so the ranks may be on any devices, also ones that share nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .. import knobs
from ..errors import CollectiveTimeoutError, IpcError, IpcUnavailableError
from ..protocol.collectives import HostCollectives
from ..protocol.description import Terms, description_text, first_on_device
from ..protocol.local import Parts, SomeParts, as_bytes, overlaps_shifted
from ..protocol.reductions import Reduction
from ..protocol.setup import share
from .runtime import AcceleratorRuntime, CommunicationStream

# Pinned memory of a device that a process keeps for later calls.
KEPT_BYTES = 64 << 20
_MIN_BUFFER_BYTES = 64 * 1024
_LINE_BYTES = 64
# Looks at an event before the first sleep, of which each is so long: small copies are over within them.
_NUM_LOOKS = 200
_SLEEP_S = 100e-6


class PinnedPool:
    """Pinned buffers of one device, for all groups of a process.

    A call gets what it asks for, whatever others hold: calls of several groups may wait for each other's ranks. What is
    bounded is the memory that is kept between calls.

    Args:
        runtime: The device.
        kept_bytes: Bound on it.
    """

    def __init__(self, runtime: AcceleratorRuntime, kept_bytes: int = KEPT_BYTES) -> None:
        self._runtime = runtime
        self._kept_bytes = kept_bytes
        # Buffers with the event behind their last copy, the one that was used last at the end.
        self._idle: list[tuple[torch.Tensor, Any]] = []
        self._lock = threading.Lock()

    @contextmanager
    def borrow(self, count: int, num_bytes: int, stream: Any) -> Iterator[list[torch.Tensor]]:
        """Lend `count` buffers of at least `num_bytes` to work on `stream`; 1-D uint8 on the host.

        What the block issues to the stream may use them after its end.
        """
        num_bytes = max(_MIN_BUFFER_BYTES, 1 << (num_bytes - 1).bit_length())
        buffers = [self._take(num_bytes, stream) for _ in range(count)]
        yield buffers
        # Not after an error: the stream may be stuck. torch frees pinned memory behind the copies that use it.
        last = self._runtime.new_event()
        last.record(stream)
        with self._lock:
            self._idle += [(buffer, last) for buffer in buffers]
            kept = sum(buffer.numel() for buffer, _ in self._idle)
            while kept > self._kept_bytes:
                kept -= self._idle.pop(0)[0].numel()

    def _take(self, num_bytes: int, stream: Any) -> torch.Tensor:
        with self._lock:
            for index in range(len(self._idle) - 1, -1, -1):
                if self._idle[index][0].numel() == num_bytes:
                    buffer, last = self._idle.pop(index)
                    break
            else:
                with torch.inference_mode(False):
                    return self._runtime.pinned(num_bytes)
        stream.wait_event(last)
        return buffer


_pools: dict[torch.device, PinnedPool] = {}
_pools_lock = threading.Lock()


def pool_of(runtime: AcceleratorRuntime) -> PinnedPool:
    """Return the process's pool for a device."""
    with _pools_lock:
        if runtime.device not in _pools:
            _pools[runtime.device] = PinnedPool(runtime)
        return _pools[runtime.device]


class StagedCollectives:
    """Collectives of a device's tensors; the arguments are those of `LocalCollectives`. Called under the group's stream.

    The host waits until the device has come to the call and has copied the last chunk; the copies back have been issued when a
    method returns.

    Args:
        host: Carries the chunks. Nothing else may use it at the same time.
        stream: The group's stream on the device.
        chunk_bytes: Size of a buffer; equal on all ranks.
    """

    def __init__(self, host: HostCollectives, stream: CommunicationStream, chunk_bytes: int) -> None:
        self.rank = host.rank
        self.num_ranks = host.num_ranks
        self.chunk_bytes = chunk_bytes
        self._host = host
        self._stream = stream
        self._pool = pool_of(stream.runtime)

    def barrier(self, terms: Terms) -> None:
        """Return once every rank's host has called this."""
        self._host.barrier(terms)

    def reduce(self, tensor: torch.Tensor, root: int | None, reduction: Reduction, terms: Terms) -> None:
        """See `LocalCollectives.reduce`."""
        dtype, is_root = tensor.dtype, root in (None, self.rank)

        def work(chunk: int, inputs: SomeParts, outputs: SomeParts) -> None:
            assert inputs[0] is not None
            self._host.reduce(inputs[0].view(dtype), root, reduction, terms)

        self._run([tensor], [tensor if is_root else None], tensor.nbytes, terms, work, in_place=True)

    def broadcast(self, tensor: torch.Tensor, root: int, terms: Terms) -> None:
        """See `LocalCollectives.broadcast`."""
        is_root = self.rank == root

        def work(chunk: int, inputs: SomeParts, outputs: SomeParts) -> None:
            piece = inputs[0] if is_root else outputs[0]
            assert piece is not None
            self._host.broadcast(piece, root, terms)

        source, target = (tensor, None) if is_root else (None, tensor)
        self._run([source], [target], tensor.nbytes, terms, work, in_place=True)

    def gather(self, tensor: torch.Tensor, outputs: Parts | None, root: int | None, terms: Terms) -> None:
        """See `LocalCollectives.gather`."""
        wanted = outputs is not None and root in (None, self.rank)

        def work(chunk: int, inputs: SomeParts, received: SomeParts) -> None:
            assert inputs[0] is not None
            parts = [part for part in received if part is not None] if wanted else None
            self._host.gather(inputs[0], parts, root, terms)

        targets = outputs if outputs is not None and wanted else [None] * self.num_ranks
        self._run([tensor], targets, tensor.nbytes, terms, work)

    def reduce_scatter(self, inputs: Parts, output: torch.Tensor, reduction: Reduction, terms: Terms) -> None:
        """See `LocalCollectives.reduce_scatter`."""
        dtype = output.dtype

        def work(chunk: int, parts: SomeParts, reduced: SomeParts) -> None:
            assert reduced[0] is not None
            whole = [part.view(dtype) for part in parts if part is not None]
            self._host.reduce_scatter(whole, reduced[0].view(dtype), reduction, terms)

        self._run(inputs, [output], output.nbytes, terms, work)

    def exchange(self, inputs: SomeParts, outputs: SomeParts, max_bytes: int, terms: Terms) -> None:
        """See `LocalCollectives.exchange`."""
        per_part = self._per_part(len(inputs) + len(outputs), max_bytes)

        def work(chunk: int, sent: SomeParts, received: SomeParts) -> None:
            self._host.exchange(sent, received, max(0, min(per_part, max_bytes - chunk * per_part)), terms)

        self._run(inputs, outputs, max_bytes, terms, work)

    @contextmanager
    def _breaking(self, terms: Terms) -> Iterator[None]:
        """Break the group if the block fails: the other ranks must not wait for this one."""
        try:
            yield
        except BaseException as error:
            # A failure that came from them has its mark already.
            what = description_text(terms.description)
            self._host.fail(str(error) if isinstance(error, IpcError) else f"{type(error).__name__}: {error} in {what}")
            raise

    def _per_part(self, num_parts: int, num_bytes: int) -> int:
        """Return the bytes of a part in a buffer for `num_parts` of up to `num_bytes`; a multiple of every element's size."""
        largest = max(_LINE_BYTES, self.chunk_bytes // num_parts // _LINE_BYTES * _LINE_BYTES)
        return min(largest, -(-max(num_bytes, 1) // _LINE_BYTES) * _LINE_BYTES)

    def _run(
        self,
        sources: SomeParts,
        targets: SomeParts,
        num_bytes: int,
        terms: Terms,
        work: Callable[[int, SomeParts, SomeParts], None],
        in_place: bool = False,
    ) -> None:
        """Run a call chunk by chunk; break the group if this rank cannot go on.

        Args:
            sources: Tensors on the device whose bytes go to the host, None for nothing.
            targets: Tensors on the device whose bytes come back from it, None for nothing.
            num_bytes: Of the largest of all ranks' tensors; equal on all ranks.
            terms: Of the call.
            work: Does the host's part, with the number of the chunk and the bytes of `sources` and `targets` on the host.
            in_place: Whether sources and targets have the same place there.
        """
        written = [as_bytes(target) for target in targets if target is not None]
        inputs = [None if source is None else as_bytes(source) for source in sources]
        outputs = [None if target is None else as_bytes(target) for target in targets]
        # A chunk is written before the next but one is read.
        inputs = [data.clone() if data is not None and overlaps_shifted(data, written) else data for data in inputs]
        first_output = 0 if in_place else len(inputs)
        num_parts = first_output + len(outputs)
        per_part = self._per_part(num_parts, num_bytes)
        num_chunks = max(1, -(-num_bytes // per_part))
        stream, new_event = self._stream.stream, self._stream.runtime.new_event
        num_buffers = min(2, num_chunks)
        with self._breaking(terms), self._pool.borrow(num_buffers, per_part * num_parts, stream) as buffers:

            def pieces(parts: SomeParts, first: int, chunk: int) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
                """Return each part's bytes of a chunk on the device, and their place on the host."""
                buffer = buffers[chunk % 2]
                found: list[tuple[torch.Tensor, torch.Tensor] | None] = []
                for index, part in enumerate(parts, first):
                    if part is None:
                        found.append(None)
                    else:
                        piece = part[chunk * per_part : (chunk + 1) * per_part]
                        found.append((piece, buffer[index * per_part :][: piece.shape[0]]))
                return found

            def begin(chunk: int) -> tuple[Any, SomeParts]:
                """Issue the copies to the host."""
                sent = pieces(inputs, 0, chunk)
                for pair in sent:
                    if pair is not None:
                        pair[1].copy_(pair[0], non_blocking=True)
                copied = new_event()
                copied.record(stream)
                return copied, [None if pair is None else pair[1] for pair in sent]

            started = begin(0)
            for chunk in range(num_chunks):
                copied, sent = started
                if chunk + 1 < num_chunks:
                    started = begin(chunk + 1)
                _wait_for(copied, terms)
                received = pieces(outputs, first_output, chunk)
                work(chunk, sent, [None if pair is None else pair[1] for pair in received])
                for pair in received:
                    if pair is not None:
                        pair[0].copy_(pair[1], non_blocking=True)


def set_up_staging(
    host: HostCollectives, names: Sequence[str], stream: CommunicationStream, first_call: Terms
) -> StagedCollectives:
    """Agree on the size of a chunk; every rank of the group calls it in the same call.

    Args:
        host: Collectives of the group's CPU tensors.
        names: Name of each rank in messages.
        stream: The group's stream on this rank's device.
        first_call: Terms of the call that needs it, and for which the ranks wait.

    Raises:
        IpcError: A rank did not come or died, or has a wrong setting; the group is broken.
    """
    try:
        answers = share(host, names, lambda: {"chunk": knobs.staged_chunk_bytes()}, first_on_device(first_call))
    except IpcUnavailableError as error:
        host.fail(str(error))
        raise
    return StagedCollectives(host, stream, min(answer["chunk"] for answer in answers))


def _wait_for(event: Any, terms: Terms) -> None:
    """Return after the device has reached `event`.

    Raises:
        CollectiveTimeoutError: It did not before the deadline of the call.
    """
    looks = 0
    while not event.query():
        looks += 1
        # Sleeping or not, it lets other threads of Python run.
        time.sleep(0.0 if looks < _NUM_LOOKS else _SLEEP_S)
        if time.monotonic() > terms.deadline:
            raise CollectiveTimeoutError(
                f"The device of this rank did not reach {description_text(terms.description)} in time: earlier work on "
                "the device takes longer, or hangs. Look there first, or raise the timeout of the group."
            )
