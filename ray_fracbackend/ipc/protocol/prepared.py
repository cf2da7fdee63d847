"""Collectives of one chunk in host memory, prepared for one shape, element type and operation. Imports torch.

A small call spends its time in Python code, not on its data. What depends only on the shape, the type and the operation
is looked up once: the slots, the descriptions, the function of torch. The steps of a call and their order are those of
`engine`, so one rank may use this path while another rank uses the engine's.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from ..host.memory import HostMemory, copy_function
from .control import POISON_WORD
from .description import KEY_BYTES, description_text
from .local import LocalCollectives
from .reductions import Reduction
from .schedule import READ, WRITTEN

# Views of outputs that a call keeps.
_MAX_OUTPUTS = 16
# The rest of a call, once all ranks have written the chunk: addresses of output and input, number of the chunk, options.
_Take = Callable[[int, int, int, Any], None]
# Waits until the count of a kind has reached a chunk on all other ranks: kind, number of the chunk, options.
_Meet = Callable[[int, int, Any], None]


class PreparedCall(NamedTuple):
    """A call on tensors at given addresses, for the thread that has the group's turn.

    Attributes:
        run: ``run(output, source, opts)`` makes the call with torch's options. It returns False if this rank cannot begin:
            another rank still needs the slot, or the group is closed or broken. Nothing has happened then.
        start: ``start(output, source, opts, queue)`` begins the call, and ends it if the other ranks come within a short poll.
            If not, it returns ``queue(rest)``; `rest` ends the call, which is the next one of the group.
    """

    run: Callable[[int, int, Any], bool]
    start: Callable[[int, int, Any, Callable[[Callable[[], None]], Any]], Any]


def prepare(
    collectives: LocalCollectives,
    output: torch.Tensor,
    source: torch.Tensor,
    reduction: Reduction | None,
    num_parts: int,
    description: bytes,
    timeout_s: Callable[[Any], float],
) -> PreparedCall | None:
    """Prepare a collective for contiguous tensors of these shapes and types.

    Args:
        collectives: Collectives of the group.
        output: Dense tensor in host memory: of the size of a part of `source`, or of all ranks' if there is no `reduction`.
        source: The input, likewise.
        reduction: The operation on the elements; None for an all_gather.
        num_parts: Parts of the input: the number of ranks for a reduce_scatter, else 1.
        description: Description of the call.
        timeout_s: Returns the time limit in seconds of a call with given options.

    Returns:
        None if such a call needs several chunks, for a single rank, if the group is closed, or for other sizes.
    """
    engine, size, memory = collectives.engine, collectives.num_ranks, collectives.memory
    whole, part = (source, output) if reduction else (output, source)
    if whole.numel() != part.numel() * (num_parts if reduction else size) or whole.dtype != part.dtype:
        return None
    per_chunk, num_chunks = collectives.chunking(source.numel() // num_parts, source.itemsize, num_parts)
    if not isinstance(memory, HostMemory) or size == 1 or num_chunks > 1 or memory.is_closed:
        return None
    control, waiter, words, peers = engine.control, engine.waiter, engine.control.words, engine.peers
    counts = {kind: [(rank, control.counter_index[rank] + kind) for rank in peers] for kind in (WRITTEN, READ)}
    read = [at for _, at in counts[READ]]
    descriptions, key = [control.keys_of(rank, KEY_BYTES) for rank in peers], description[:KEY_BYTES]
    num_slots, what = memory.num_slots, description_text(description)
    # Bound methods, because looking them up takes as long as a call.
    copy, monotonic, describe = copy_function(), time.monotonic, control.describe
    publish, wait = waiter.publish, waiter.wait
    polls = range(waiter.bare_polls)

    # Of the call in progress; 0 until its first wait, because a call without one has no time to look at the clock.
    deadline = 0.0

    def meet(kind: int, chunk: int, opts: Any) -> None:
        nonlocal deadline
        for rank, at in counts[kind]:
            for _ in polls:
                if words[at] >= chunk:
                    break
            else:
                deadline = deadline or monotonic() + timeout_s(opts)
                wait(rank, kind, chunk, deadline, what)

    two_passes = num_parts == 1 and reduction is not None and collectives.takes_two_passes(source.nbytes)
    if reduction is None:
        take = _gathered(collectives, memory, source.nbytes)
    elif two_passes:
        take = _two_passes(collectives, memory, source, reduction, meet)
    else:
        take = _one_pass(collectives, memory, output, reduction, per_chunk if num_parts > 1 else 0)
    # Offsets in the slot and in the input, and bytes, of each piece that this rank writes; with two ranks, not its own part.
    step, num_bytes = per_chunk * source.itemsize, source.nbytes // num_parts
    pieces = [(r * step, r * num_bytes) for r in range(num_parts) if num_parts != 2 or r != collectives.rank]
    own_slots = memory.slot_addresses[collectives.rank]
    (slot_offset, offset), *others = pieces

    def begin(source: int) -> int:
        """Write and announce this rank's part, and return the number of the chunk; 0 if it cannot begin."""
        nonlocal deadline
        # The engine raises the error, and reports each step to an observer.
        if engine.is_closed or engine.observer is not None or words[POISON_WORD]:
            return 0
        before = engine.last_chunk
        chunk: int = before + 1
        for at in read:
            if words[at] < chunk - num_slots:
                return 0
        deadline = 0.0
        waiter.num_calls = number = waiter.num_calls + 1
        describe(number, description)
        slot = own_slots[chunk % num_slots]
        copy(slot + slot_offset, source + offset, num_bytes)
        for to, start in others:
            copy(slot + to, source + start, num_bytes)
        publish(chunk, before, before)
        return chunk

    def end(output: int, source: int, chunk: int, opts: Any) -> None:
        meet(WRITTEN, chunk, opts)
        parity = waiter.num_calls & 1
        for of_rank in descriptions:
            if of_rank[parity].tobytes() != key:
                engine.check(description)
        take(output, source, chunk, opts)
        engine.last_chunk = chunk

    def run(output: int, source: int, opts: Any) -> bool:
        try:
            if chunk := begin(source):
                end(output, source, chunk, opts)
            return bool(chunk)
        except BaseException as error:
            engine.failed(error, what)
            raise

    def rest(output: int, source: int, chunk: int, opts: Any) -> None:
        try:
            end(output, source, chunk, opts)
        except BaseException as error:
            engine.failed(error, what)
            raise

    def start(output: int, source: int, opts: Any, queue: Callable[[Callable[[], None]], Any]) -> Any:
        nonlocal deadline
        try:
            if chunk := begin(source):
                deadline = monotonic() + timeout_s(opts)
                for rank, at in counts[WRITTEN]:
                    if two_passes or not (words[at] >= chunk or waiter.poll(rank, WRITTEN, chunk)):
                        return queue(partial(rest, output, source, chunk, opts))
                end(output, source, chunk, opts)
            return bool(chunk)
        except BaseException as error:
            engine.failed(error, what)
            raise

    return PreparedCall(run, start)


class _Outputs(dict[int, torch.Tensor]):
    """Views of the caller's tensors, by address, because ``tensor.data`` takes five times as long as looking one up.

    They do not own the memory: one may be used only while a tensor at its address exists.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._dtype, self._block = tensor.dtype, ctypes.c_char * tensor.nbytes

    def __missing__(self, address: int) -> torch.Tensor:
        if len(self) >= _MAX_OUTPUTS:
            self.clear()
        with torch.inference_mode(False):
            out = self[address] = torch.frombuffer(self._block.from_address(address), dtype=self._dtype)
        return out


def _one_pass(
    collectives: LocalCollectives, memory: HostMemory, tensor: torch.Tensor, reduction: Reduction, per_part: int
) -> _Take:
    """Return a function that reduces all ranks' slots into an output like `tensor`: all of them, or the own part of each."""
    size, own, num_slots, outputs = collectives.num_ranks, collectives.rank, memory.num_slots, _Outputs(tensor)
    start, num_bytes, copy = own * per_part, tensor.nbytes, copy_function()
    own_offset = own * num_bytes if per_part else 0
    slots = memory.views(False, tensor.dtype, start, start + tensor.numel())
    function, theirs, is_first = reduction.pair_function, slots[own - 1], own == 0

    # With two ranks, each uses its own part in place: it is or will be in the output.
    def reduce_pair(output: int, source: int, chunk: int, opts: Any) -> None:
        if source + own_offset != output:
            copy(output, source + own_offset, num_bytes)
        out, slot = outputs[output], theirs[chunk % num_slots]
        if function is None:
            reduction.reduce(out, [out, slot] if is_first else [slot, out])
        elif is_first:
            function(out, slot, out=out)
        else:
            function(slot, out, out=out)

    def reduce_all(output: int, source: int, chunk: int, opts: Any) -> None:
        index = chunk % num_slots
        reduction.reduce(outputs[output], [views[index] for views in slots])

    return reduce_pair if size == 2 else reduce_all


def _gathered(collectives: LocalCollectives, memory: HostMemory, num_bytes: int) -> _Take:
    """Return a function that copies all ranks' slots, and this rank's input, into the output."""
    copy, num_slots, own_offset = copy_function(), memory.num_slots, collectives.rank * num_bytes
    others = [(r * num_bytes, memory.slot_addresses[r]) for r in collectives.engine.peers]

    def take(output: int, source: int, chunk: int, opts: Any) -> None:
        index = chunk % num_slots
        # Before the other ranks' parts, which the input may overlap.
        if source != output + own_offset:
            copy(output + own_offset, source, num_bytes)
        for offset, addresses in others:
            copy(output + offset, addresses[index], num_bytes)

    return take


def _two_passes(
    collectives: LocalCollectives, memory: HostMemory, tensor: torch.Tensor, reduction: Reduction, meet: _Meet
) -> _Take:
    """Return a function that reduces this rank's share of all slots into its folded area, then copies all ranks' shares."""
    engine, own, size, dtype = collectives.engine, collectives.rank, collectives.num_ranks, tensor.dtype
    bounds = [tensor.numel() * rank // size for rank in range(size + 1)]
    low, high = bounds[own], bounds[own + 1]
    slots, areas = memory.views(False, dtype, low, high), memory.views(True, dtype, 0, high - low)[own]
    edges = [bound * tensor.itemsize for bound in bounds]
    shares = list(zip(edges, edges[1:], memory.folded_addresses, strict=False))
    copy, num_slots = copy_function(), memory.num_slots
    fence, publish = memory.fence, engine.waiter.publish

    def take(output: int, source: int, chunk: int, opts: Any) -> None:
        index, before = chunk % num_slots, chunk - 1
        # All have written this chunk in this call, so they have finished the calls before it.
        reduction.reduce(areas[index], [views[index] for views in slots])
        fence()
        publish(chunk, chunk, before)
        meet(READ, chunk, opts)
        for start, end, addresses in shares:
            copy(output + start, addresses[index], end - start)

    return take
