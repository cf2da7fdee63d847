"""Collectives between the ranks of one host, chunk by chunk through the engine. Imports torch.

Every method blocks until this rank's part is done. Tensors are 1-D, contiguous and on the transport's device; the
caller owns them. Any failure raises an `IpcError`; the group cannot be used afterwards. A root of None means that
every rank is a root.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from .description import Terms
from .engine import Call, ChunkFunction, Engine
from .reductions import Reduction

_LINE_BYTES = 64
# The only rank that folds in memory that is reduced by one rank. Its folded area holds a whole chunk.
LEADER = 0

# One tensor for each rank; None if a rank sends or receives nothing.
Parts = Sequence[torch.Tensor]
SomeParts = Sequence[torch.Tensor | None]


class LocalCollectives:
    """Collectives of one host.

    Args:
        engine: Runs the calls.
        one_pass_bytes: Up to this size each rank reduces everything itself, in host memory with two ranks for any size.

    Attributes:
        engine: See above.
        one_pass_bytes: See above.
        memory: The engine's memory for tensors.
    """

    def __init__(self, engine: Engine, one_pass_bytes: int) -> None:
        self.engine = engine
        self.one_pass_bytes = one_pass_bytes
        self.rank = engine.rank
        self.num_ranks = engine.num_ranks
        self.memory = engine.transport

    def chunking(self, numel: int, itemsize: int, parts: int = 1) -> tuple[int, int]:
        """Return elements per chunk and number of chunks, for slots that hold `parts` pieces of each chunk."""
        if parts == 1:
            per_chunk = self.memory.chunk_bytes // itemsize
        else:
            per_chunk = self.memory.chunk_bytes // parts // _LINE_BYTES * _LINE_BYTES // itemsize
        return per_chunk, max(1, -(-numel // per_chunk))

    def raise_if_unusable(self, what: str) -> None:
        """See `Engine.raise_if_unusable`."""
        self.engine.raise_if_unusable(what)

    def fail(self, reason: str) -> None:
        """See `Engine.fail`."""
        self.engine.fail(reason)

    def abort(self, reason: str) -> None:
        """See `Engine.abort`."""
        self.engine.abort(reason)

    def close(self, idle: bool) -> None:
        """Leave the group, and release the memory if no call is in progress. May be called repeatedly."""
        self.engine.close()
        if idle:
            self.memory.close()

    def takes_two_passes(self, num_bytes: int) -> bool:
        """Return whether a tensor of this size is reduced in two passes: each rank or the leader folds, then all take the results."""
        return self.num_ranks > (1 if self.memory.by_leader else 2) and num_bytes > self.one_pass_bytes

    def barrier(self, terms: Terms) -> None:
        """Return once every rank has called this."""
        self.engine.run(Call(terms, 1, None, None))

    def reduce(self, tensor: torch.Tensor, root: int | None, reduction: Reduction, terms: Terms) -> None:
        """Reduce into the root's `tensor`; others are unchanged. If all ranks are roots, all get bitwise the same result."""
        out = tensor if root in (None, self.rank) else None
        dtype, own, memory = tensor.dtype, self.rank, self.memory
        per_chunk, num_chunks = self.chunking(tensor.shape[0], tensor.itemsize)

        def put(index: int, chunk: int) -> None:
            piece = tensor if num_chunks == 1 else tensor[index * per_chunk : (index + 1) * per_chunk]
            memory.copy(memory.slot(own, chunk, dtype, 0, piece.shape[0]), piece)

        # With a single root, a leader would only add a copy.
        if self.takes_two_passes(tensor.nbytes) and (root is None or not memory.by_leader):
            self.engine.run(self._two_pass_reduction(tensor, out, reduction, terms, put))
            return

        def take(index: int, chunk: int) -> None:
            assert out is not None
            piece, source = out, tensor
            if num_chunks > 1:
                low = index * per_chunk
                piece, source = out[low : low + per_chunk], tensor[low : low + per_chunk]
            # With two ranks, each can read its own part in place; with more, the output would overwrite it too early.
            self._reduce_slots(reduction, piece, chunk, 0, source if self.num_ranks == 2 else None)

        readers = None if root is None else (root,)
        self.engine.run(Call(terms, num_chunks, put, take if out is not None else None, readers=readers))

    def _two_pass_reduction(
        self, tensor: torch.Tensor, out: torch.Tensor | None, reduction: Reduction, terms: Terms, put: ChunkFunction
    ) -> Call:
        """Return a call that reduces in two passes: each rank or the leader folds, then all take the results."""
        dtype, numel, own, memory, size = tensor.dtype, tensor.shape[0], self.rank, self.memory, self.num_ranks
        per_chunk, num_chunks = self.chunking(numel, tensor.itemsize)
        by_leader = memory.by_leader
        folders = (LEADER,) if by_leader else range(size)
        # A rank reads its own share in place; it is not overwritten before it has been folded.
        reads_own = own in folders and not self._stacks(reduction)

        def bounds(index: int, rank: int) -> tuple[int, int]:
            n = min(per_chunk, numel - index * per_chunk)
            return (0, n) if by_leader else (n * rank // size, n * (rank + 1) // size)

        def put_others(index: int, chunk: int) -> None:
            piece = tensor[index * per_chunk : (index + 1) * per_chunk]
            low, high = bounds(index, own)
            for start, end in ((0, low), (high, piece.shape[0])):
                memory.copy(memory.slot(own, chunk, dtype, start, end), piece[start:end])

        def fold(index: int, chunk: int) -> None:
            low, high = bounds(index, own)
            out = memory.folded(own, chunk, dtype, high - low)
            source = tensor[index * per_chunk + low : index * per_chunk + high] if reads_own else None
            self._reduce_slots(reduction, out, chunk, low, source)

        def take(index: int, chunk: int) -> None:
            assert out is not None
            piece = out[index * per_chunk : (index + 1) * per_chunk]
            for r in folders:
                low, high = bounds(index, r)
                memory.copy(piece[low:high], memory.folded(r, chunk, dtype, high - low))

        return Call(
            terms,
            num_chunks,
            put if not reads_own else None if by_leader else put_others,
            take if out is not None else None,
            two_passes=True,
            fold=fold if own in folders else None,
            sources=folders,
            readers=folders,
        )

    def _stacks(self, reduction: Reduction) -> bool:
        """Return whether to reduce all ranks' parts at once; not for two ranks, which need only one kernel anyway."""
        return self.memory.by_leader and self.num_ranks > 2 and reduction.stacks

    def _reduce_slots(
        self, reduction: Reduction, out: torch.Tensor, chunk: int, start: int, own: torch.Tensor | None = None
    ) -> None:
        """Reduce the slots of a chunk, from element `start`, into `out`; `own` replaces this rank's (empty) slot."""
        memory, end = self.memory, start + out.shape[0]
        if own is None and self._stacks(reduction):
            reduction.reduce_stack(out, memory.stack(chunk, reduction.dtype, start, end))
            return
        inputs = [
            memory.slot(rank, chunk, reduction.dtype, start, end) if own is None or rank != self.rank else own
            for rank in range(self.num_ranks)
        ]
        reduction.reduce(out, inputs)

    def broadcast(self, tensor: torch.Tensor, root: int, terms: Terms) -> None:
        """Copy the root's `tensor` into every rank's `tensor`."""
        is_root = self.rank == root
        targets = [tensor if r == root and not is_root else None for r in range(self.num_ranks)]
        self._move([tensor if is_root else None], targets, 0, tensor.nbytes, terms)

    def gather(self, tensor: torch.Tensor, outputs: Parts | None, root: int | None, terms: Terms) -> None:
        """Copy every rank's `tensor` into the root's ``outputs[rank]``; all have the same size."""
        targets = outputs if outputs is not None and root in (None, self.rank) else [None] * self.num_ranks
        self._move([tensor], targets, 0, tensor.nbytes, terms, None if root is None else (root,))

    def reduce_scatter(self, inputs: Parts, output: torch.Tensor, reduction: Reduction, terms: Terms) -> None:
        """Reduce ``inputs[r]`` of all ranks into rank r's `output`; all have the same size."""
        dtype, memory = output.dtype, self.memory
        per_chunk, num_chunks = self.chunking(output.numel(), output.itemsize, self.num_ranks)
        result = torch.empty_like(output) if overlaps_shifted(output, inputs) else output

        def put(index: int, chunk: int) -> None:
            for r, tensor in enumerate(inputs):
                piece = tensor[index * per_chunk : (index + 1) * per_chunk]
                start = r * per_chunk
                memory.copy(memory.slot(self.rank, chunk, dtype, start, start + piece.shape[0]), piece)

        def take(index: int, chunk: int) -> None:
            piece = result[index * per_chunk : (index + 1) * per_chunk]
            self._reduce_slots(reduction, piece, chunk, self.rank * per_chunk)

        self.engine.run(Call(terms, num_chunks, put, take))
        if result is not output:
            output.copy_(result)

    def exchange(self, inputs: SomeParts, outputs: SomeParts, max_bytes: int, terms: Terms) -> None:
        """Copy ``inputs[r]`` of this rank into ``outputs[this rank]`` of rank r; used for scatter and all_to_all.

        Args:
            inputs: Data for each rank, of any dtype, or None.
            outputs: Memory for the data from each rank, or None.
            max_bytes: Size in bytes of the largest input of any rank; equal on all ranks.
            terms: Terms of the call.
        """
        self._move(inputs, outputs, self.rank, max_bytes, terms)

    def _move(
        self,
        sources: SomeParts,
        targets: SomeParts,
        part: int,
        max_bytes: int,
        terms: Terms,
        readers: Sequence[int] | None = None,
    ) -> None:
        """Put ``sources[p]`` into part p of this rank's slot; take `part` of every rank into ``targets[rank]``."""
        memory, num_parts, rank = self.memory, len(sources), self.rank
        inputs = [None if tensor is None else as_bytes(tensor) for tensor in sources]
        outputs = [None if tensor is None else as_bytes(tensor) for tensor in targets]
        received = [output for output in outputs if output is not None]
        if any(data is not None and overlaps_shifted(data, received) for data in inputs):
            inputs = [None if data is None else data.clone() for data in inputs]
        own, own_output = inputs[part], outputs[rank]
        if own is not None and own_output is not None and own.data_ptr() == own_output.data_ptr():
            own = None
        per_chunk, num_chunks = self.chunking(max_bytes, 1, num_parts)

        def put(index: int, chunk: int) -> None:
            for p, data in enumerate(inputs):
                # If there are several parts, no other rank reads a rank's own part.
                if data is not None and (num_parts == 1 or p != part):
                    piece, start = data[index * per_chunk : (index + 1) * per_chunk], p * per_chunk
                    memory.copy(memory.slot(rank, chunk, torch.uint8, start, start + piece.shape[0]), piece)
            # After the other inputs, which the output may overlap, and before other ranks' parts arrive.
            if own is not None and own_output is not None:
                own_output[index * per_chunk :][:per_chunk].copy_(own[index * per_chunk :][:per_chunk])

        def take(index: int, chunk: int) -> None:
            start = part * per_chunk
            for r, output in enumerate(outputs):
                if output is not None and r != rank:
                    piece = output[index * per_chunk : (index + 1) * per_chunk]
                    memory.copy(piece, memory.slot(r, chunk, torch.uint8, start, start + piece.shape[0]))

        sends = any(data is not None for data in inputs)
        origins = [r for r, output in enumerate(outputs) if output is not None]
        self.engine.run(Call(terms, num_chunks, put if sends else None, take, sources=origins, readers=readers))


def as_bytes(flat_tensor: torch.Tensor) -> torch.Tensor:
    """Return a 1-D tensor's memory as uint8."""
    return flat_tensor.view(torch.uint8)


def overlaps_shifted(tensor: torch.Tensor, others: Iterable[torch.Tensor]) -> bool:
    """Return whether a 1-D contiguous tensor overlaps one of `others` without starting at the same address.

    A collective reads a chunk of its inputs before it writes that chunk of its outputs, so an input may start at the
    address of an output.
    """
    start = tensor.data_ptr()
    end = start + tensor.nbytes
    for other in others:
        first = other.data_ptr()
        if first != start and first < end and start < first + other.nbytes:
            return True
    return False
