"""An all_reduce of one chunk in host memory, prepared for one shape, element type and operation. Imports torch.

A small call spends its time in Python code, not on its data. What depends only on the shape, the type and the operation
is looked up once: the slots, the descriptions, the function of torch. The steps of a call and their order are those of
`engine`, so one rank may use this path while another rank uses the engine's.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch

from ..host.memory import HostMemory, copy_function
from .control import POISON_WORD
from .description import KEY_BYTES, description_text
from .local import LocalCollectives
from .reductions import Reduction
from .schedule import READ, WRITTEN

# Views of outputs that a call keeps.
_MAX_OUTPUTS = 16
# Runs the call on the tensor at an address, with torch's options. False if this rank cannot begin: another rank still
# needs the slot, or the group is closed or broken. Nothing has happened then.
PreparedCall = Callable[[int, Any], bool]
# The rest of a call, once all ranks have written the chunk: address of the tensor, number of the chunk, options.
_Finish = Callable[[int, int, Any], None]
# Waits until the count of a kind has reached a chunk on all other ranks: kind, number of the chunk, options.
_Meet = Callable[[int, int, Any], None]


def prepare_all_reduce(
    collectives: LocalCollectives,
    tensor: torch.Tensor,
    reduction: Reduction,
    description: bytes,
    timeout_s: Callable[[Any], float],
) -> PreparedCall | None:
    """Prepare an all_reduce for contiguous tensors of the shape and type of `tensor`.

    Args:
        collectives: Collectives of the group's only host.
        tensor: Dense tensor in host memory.
        reduction: The operation.
        description: Description of the call.
        timeout_s: Returns the time limit in seconds of a call with given options.

    Returns:
        None if such a tensor needs several chunks, for a single rank, or if the group is closed.
    """
    engine, size, memory = collectives.engine, collectives.num_ranks, collectives.memory
    if not isinstance(memory, HostMemory) or size == 1 or tensor.nbytes > memory.chunk_bytes or memory.is_closed:
        return None
    control, waiter, words, peers = engine.control, engine.waiter, engine.control.words, engine.peers
    counts = {kind: [(rank, control.counter_index[rank] + kind) for rank in peers] for kind in (WRITTEN, READ)}
    read = [at for _, at in counts[READ]]
    descriptions, key = [control.keys_of(rank, KEY_BYTES) for rank in peers], description[:KEY_BYTES]
    own_slots, num_slots, num_bytes = memory.own_addresses, memory.num_slots, tensor.nbytes
    what = description_text(description)
    # Bound methods, because looking them up takes as long as a call.
    copy, monotonic, describe = copy_function(), time.monotonic, control.describe
    acquire, after_copy, publish, wait = memory.acquire, memory.copy_fence, waiter.publish, waiter.wait
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
        acquire()

    if collectives.takes_two_passes(num_bytes):
        finish = _two_passes(collectives, memory, tensor, reduction, meet)
    else:
        finish = _one_pass(collectives, memory, tensor, reduction)

    def run(address: int, opts: Any) -> bool:
        nonlocal deadline
        # The engine raises the error, and reports each step to an observer.
        if engine.is_closed or engine.observer is not None or words[POISON_WORD]:
            return False
        before = engine.last_chunk
        chunk = before + 1
        for at in read:
            if words[at] < chunk - num_slots:
                return False
        deadline = 0.0
        try:
            waiter.num_calls = number = waiter.num_calls + 1
            describe(number, description)
            acquire()
            copy(own_slots[chunk % num_slots], address, num_bytes)
            after_copy()
            publish(chunk, before, before)
            meet(WRITTEN, chunk, opts)
            for of_rank in descriptions:
                if of_rank[number & 1].tobytes() != key:
                    engine.check(description)
            finish(address, chunk, opts)
        except BaseException as error:
            engine.failed(error, what)
            raise
        engine.last_chunk = chunk
        return True

    return run


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


def _one_pass(collectives: LocalCollectives, memory: HostMemory, tensor: torch.Tensor, reduction: Reduction) -> _Finish:
    """Return a function that reduces all ranks' slots into the tensor."""
    size, own, num_slots, outputs = collectives.num_ranks, collectives.rank, memory.num_slots, _Outputs(tensor)
    slots = memory.views(False, tensor.dtype, 0, tensor.numel())
    function, theirs, is_first = reduction.pair_function, slots[own - 1], own == 0

    def reduce_pair(address: int, chunk: int, opts: Any) -> None:
        assert function is not None
        # Each rank reads its own part in place.
        out, slot = outputs[address], theirs[chunk % num_slots]
        if is_first:
            function(out, slot, out=out)
        else:
            function(slot, out, out=out)

    def reduce_all(address: int, chunk: int, opts: Any) -> None:
        out, index = outputs[address], chunk % num_slots
        parts = [views[index] for views in slots]
        if size == 2:  # with more, the output would overwrite the own part too early
            parts[own] = out
        reduction.reduce(out, parts)

    return reduce_pair if size == 2 and function is not None else reduce_all


def _two_passes(
    collectives: LocalCollectives, memory: HostMemory, tensor: torch.Tensor, reduction: Reduction, meet: _Meet
) -> _Finish:
    """Return a function that reduces this rank's share of all slots into its folded area, then copies all ranks' shares."""
    engine, own, size, dtype = collectives.engine, collectives.rank, collectives.num_ranks, tensor.dtype
    bounds = [tensor.numel() * rank // size for rank in range(size + 1)]
    low, high = bounds[own], bounds[own + 1]
    slots, areas = memory.views(False, dtype, low, high), memory.views(True, dtype, 0, high - low)[own]
    edges = [bound * tensor.itemsize for bound in bounds]
    shares = list(zip(edges, edges[1:], memory.folded_addresses, strict=False))
    copy, num_slots = copy_function(), memory.num_slots
    release, publish = memory.release_fence, engine.waiter.publish

    def finish(address: int, chunk: int, opts: Any) -> None:
        index, before = chunk % num_slots, chunk - 1
        # All have written this chunk in this call, so they have finished the calls before it.
        reduction.reduce(areas[index], [views[index] for views in slots])
        release()
        publish(chunk, chunk, before)
        meet(READ, chunk, opts)
        for start, end, addresses in shares:
            copy(address + start, addresses[index], end - start)

    return finish
