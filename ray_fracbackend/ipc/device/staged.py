"""Tensors of a device over collectives of CPU tensors, by way of pinned host memory. Runs in every rank; imports torch.

A chunk is copied to pinned memory on the group's stream, the host waits for the copy, runs the collective on the pinned
memory, and issues the copy back. The copy of the next chunk is issued before the host's collective of this one, so the two run
side by side. Two buffers are enough: the copy into a buffer is issued to the same stream as the copy out of it before.

No memory of another process is mapped on the device, so the ranks may be on any devices, also ones that share nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import knobs
from ..errors import CollectiveTimeoutError, IpcError, IpcUnavailableError
from ..protocol.collectives import HostCollectives
from ..protocol.description import Terms, description_text, first_on_device
from ..protocol.local import Parts, SomeParts, as_bytes, overlaps_shifted
from ..protocol.reductions import Reduction
from ..protocol.setup import share
from .runtime import CommunicationStream

_LINE_BYTES = 64
# Looks at an event before the first sleep, of which each is so long: small copies are over within them.
_NUM_LOOKS = 200
_SLEEP_S = 100e-6

# Bytes on the host for each tensor of a call, None for nothing.
Pieces = list[Any]


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

    def barrier(self, terms: Terms) -> None:
        """Return once every rank's host has called this."""
        self._host.barrier(terms)

    def reduce(self, tensor: torch.Tensor, root: int | None, reduction: Reduction, terms: Terms) -> None:
        """See `LocalCollectives.reduce`."""

        def work(chunk: int, inputs: Pieces, outputs: Pieces) -> None:
            self._host.reduce(inputs[0].view(tensor.dtype), root, reduction, terms)

        self._run([tensor], [tensor if root in (None, self.rank) else None], tensor.nbytes, terms, work, in_place=True)

    def broadcast(self, tensor: torch.Tensor, root: int, terms: Terms) -> None:
        """See `LocalCollectives.broadcast`."""
        source, target = (tensor, None) if self.rank == root else (None, tensor)

        def work(chunk: int, inputs: Pieces, outputs: Pieces) -> None:
            self._host.broadcast(outputs[0] if source is None else inputs[0], root, terms)

        self._run([source], [target], tensor.nbytes, terms, work, in_place=True)

    def gather(self, tensor: torch.Tensor, outputs: Parts | None, root: int | None, terms: Terms) -> None:
        """See `LocalCollectives.gather`."""
        wanted = outputs if root in (None, self.rank) else None

        def work(chunk: int, inputs: Pieces, received: Pieces) -> None:
            self._host.gather(inputs[0], None if wanted is None else received, root, terms)

        self._run([tensor], wanted or [None] * self.num_ranks, tensor.nbytes, terms, work)

    def reduce_scatter(self, inputs: Parts, output: torch.Tensor, reduction: Reduction, terms: Terms) -> None:
        """See `LocalCollectives.reduce_scatter`."""
        dtype = output.dtype

        def work(chunk: int, parts: Pieces, reduced: Pieces) -> None:
            self._host.reduce_scatter([part.view(dtype) for part in parts], reduced[0].view(dtype), reduction, terms)

        self._run(inputs, [output], output.nbytes, terms, work)

    def exchange(self, inputs: SomeParts, outputs: SomeParts, max_bytes: int, terms: Terms) -> None:
        """See `LocalCollectives.exchange`."""
        per_part = self._per_part(len(inputs) + len(outputs), max_bytes)

        def work(chunk: int, sent: Pieces, received: Pieces) -> None:
            self._host.exchange(sent, received, max(0, min(per_part, max_bytes - chunk * per_part)), terms)

        self._run(inputs, outputs, max_bytes, terms, work)

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
        work: Callable[[int, Pieces, Pieces], None],
        in_place: bool = False,
    ) -> None:
        """Run a call chunk by chunk; break the group if this rank cannot go on: the other ranks must not wait for it.

        Args:
            sources: Tensors on the device whose bytes go to the host, None for nothing.
            targets: Tensors on the device whose bytes come back from it, None for nothing.
            num_bytes: Of the largest of all ranks' tensors; equal on all ranks.
            terms: Of the call.
            work: Does the host's part, with the number of the chunk and the bytes of `sources` and `targets` on the host.
            in_place: Whether sources and targets have the same place there.
        """
        try:
            outputs = [None if target is None else as_bytes(target) for target in targets]
            inputs = [None if source is None else as_bytes(source) for source in sources]
            # A chunk is written before the next but one is read.
            written = [output for output in outputs if output is not None]
            inputs = [data.clone() if data is not None and overlaps_shifted(data, written) else data for data in inputs]
            first_output = 0 if in_place else len(inputs)
            num_parts = first_output + len(outputs)
            per_part = self._per_part(num_parts, num_bytes)
            num_chunks = max(1, -(-num_bytes // per_part))
            stream, runtime = self._stream.stream, self._stream.runtime
            buffers = [runtime.pinned(per_part * num_parts) for _ in range(min(2, num_chunks))]

            def pairs(parts: SomeParts, first: int, chunk: int) -> list[tuple[Any, Any]]:
                """Return each part's bytes of a chunk on the device, and their place on the host; None for nothing."""
                pieces = [None if part is None else part[chunk * per_part : (chunk + 1) * per_part] for part in parts]
                places = [buffers[chunk % 2][index * per_part :] for index in range(first, first + len(parts))]
                return [
                    (piece, None if piece is None else place[: piece.shape[0]])
                    for piece, place in zip(pieces, places, strict=True)
                ]

            def begin(chunk: int) -> tuple[Any, Pieces]:
                """Issue the copies to the host."""
                sent, copied = pairs(inputs, 0, chunk), runtime.new_event()
                for piece, place in sent:
                    if piece is not None:
                        place.copy_(piece, non_blocking=True)
                copied.record(stream)
                return copied, [place for _, place in sent]

            started = begin(0)
            for chunk in range(num_chunks):
                copied, sent = started
                if chunk + 1 < num_chunks:
                    started = begin(chunk + 1)
                _wait_for(copied, terms)
                received = pairs(outputs, first_output, chunk)
                work(chunk, sent, [place for _, place in received])
                for piece, place in received:
                    if piece is not None:
                        piece.copy_(place, non_blocking=True)
        except BaseException as error:
            # A failure that came from them has its mark already.
            what = description_text(terms.description)
            self._host.fail(str(error) if isinstance(error, IpcError) else f"{type(error).__name__}: {error} in {what}")
            raise


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
