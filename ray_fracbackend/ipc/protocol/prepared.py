"""An all_reduce of one chunk in host memory, prepared for one shape, element type and operation. Imports torch.

A small call spends its time in Python code, not on its data. What depends only on the shape, the type and the operation
is looked up once: the slots, the descriptions, the function of torch. The steps of a call and their order are those of
`engine`, so one rank may use this path while another rank uses the engine's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ..host.memory import HostMemory, copy_function
from .description import KEY_BYTES, description_text
from .local import LocalCollectives
from .reductions import Reduction
from .schedule import READ, WRITTEN

# Runs the call on a tensor, from its address, with torch's options. False if this rank cannot begin: another rank still
# needs the slot, or the group is closed or broken. Nothing has happened then.
PreparedCall = Callable[[torch.Tensor, int, Any], bool]


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
        None if such a tensor needs several chunks or two passes, for a single rank, or if the group is closed.
    """
    engine, plan, size, own = collectives.engine, collectives.plan, collectives.num_ranks, collectives.rank
    memory, num_bytes = engine.transport, tensor.nbytes
    one_pass = size < plan.two_pass_ranks or num_bytes <= plan.one_pass_bytes
    if not isinstance(memory, HostMemory) or size == 1 or not one_pass or num_bytes > memory.chunk_bytes:
        return None
    control, waiter, words, peers = engine.control, engine.waiter, engine.control.words, engine.peers
    views, places = memory.slots(tensor.dtype, tensor.numel()), memory.slot_places
    if not views:  # the group is closed
        return None
    own_slots, own_places, slots = memory.own_addresses, places[own], list(zip(views, places, strict=True))
    read = [control.counter_index[rank] + READ for rank in peers]
    written = [(rank, control.counter_index[rank] + WRITTEN) for rank in peers]
    descriptions, key = [control.keys_of(rank, KEY_BYTES) for rank in peers], description[:KEY_BYTES]
    function, (first_slots, first_places) = reduction.pair_function if size == 2 else None, slots[peers[0]]
    num_slots, what, is_first, is_flat = memory.num_slots, description_text(description), own == 0, tensor.dim() == 1
    # Bound methods, because looking them up takes as long as a call.
    copy, monotonic, describe, prepare_put = copy_function(), time.monotonic, control.describe, memory.prepare_put
    acquire, release, publish, wait = memory.acquire, memory.release_fence, waiter.publish, waiter.wait
    polls = range(waiter.bare_polls)

    def run(tensor: torch.Tensor, address: int, opts: Any) -> bool:
        if engine.is_hindered():
            return False
        before = engine.last_chunk
        chunk, least = before + 1, before
        for at in read:
            count = words[at]
            if count < least:
                least = count
        if least < chunk - num_slots:
            return False
        index = chunk % num_slots
        try:
            waiter.num_calls = number = waiter.num_calls + 1
            describe(number, description)
            acquire()
            prepare_put(chunk, least, peers)
            copy(own_slots[own_places[index]], address, num_bytes)
            release()
            publish(chunk, before, before)
            for rank, at in written:
                for _ in polls:
                    if words[at] >= chunk:
                        break
                else:
                    wait(rank, WRITTEN, chunk, monotonic() + timeout_s(opts), what)
            acquire()
            for of_rank in descriptions:
                if of_rank[number & 1].tobytes() != key:
                    engine.check(description)
            # Not detach(), see `flat_view`.
            out = tensor.data if is_flat else tensor.data.view(-1)
            # With two ranks, each can read its own part in place; with more, the output would overwrite it too early.
            if function is None:
                parts = [out if size == 2 and r == own else s[p[index]] for r, (s, p) in enumerate(slots)]
                reduction.reduce(out, parts)
            elif is_first:
                function(out, first_slots[first_places[index]], out=out)
            else:
                function(first_slots[first_places[index]], out, out=out)
        except BaseException as error:
            engine.failed(error, what)
            raise
        engine.last_chunk = chunk
        return True

    return run
