"""Does the memory of a device really work between its ranks? Real collectives with known answers. Imports torch."""

from __future__ import annotations

import torch

from .._torch import RedOpType
from ..protocol.description import describe_call
from ..protocol.leaders import wait_on_host
from ..protocol.local import LocalCollectives
from ..protocol.reductions import Reduction
from .streams import CommunicationStream

_GATHERED_BYTES = 64 * 1024
# Twice round the ring of two slots and events.
_NUM_ROUNDS = 4


def check_collectives(local: LocalCollectives, stream: CommunicationStream, patience_s: float) -> None:
    """Map every peer's slots, wait for every peer's events, compare exactly.

    Args:
        local: Collectives of this rank's device, not used before.
        stream: The group's stream.
        patience_s: Seconds to wait for other ranks, and again for the device.

    Raises:
        IpcError: A peer did not come.
        RuntimeError: The device did not finish, or delivered wrong bytes.
    """
    runtime, size = stream.runtime, local.num_ranks
    # One element more than one pass takes, if that fits a slot, so that two passes are tried as well.
    reduced = torch.Size([min(local.plan.one_pass_bytes, local.engine.transport.chunk_bytes) // 4 + 1])
    reduction = Reduction(torch.float32, RedOpType.SUM, size)
    received: list[tuple[torch.Tensor, int]] = []
    with runtime.on(stream.stream):
        for number in range(_NUM_ROUNDS):
            own = torch.full((_GATHERED_BYTES,), _value(local.rank, number), dtype=torch.uint8, device=runtime.device)
            parts = [torch.zeros_like(own) for _ in range(size)]
            description = describe_call("device memory check", own.dtype, own.shape)
            local.all_gather(own, parts, description, patience_s)
            received += [(part, _value(rank, number)) for rank, part in enumerate(parts)]
        total = torch.full(reduced, local.rank + 1.0, device=runtime.device)
        local.all_reduce(total, reduction, None, describe_call("device memory check", total.dtype, reduced), patience_s)
        received.append((total, size * (size + 1) // 2))
        done = runtime.new_event()
        done.record(stream.stream)
    wait_on_host(done, patience_s)
    for tensor, expected in received:
        if not bool((tensor.cpu() == expected).all()):
            raise RuntimeError("device memory that was mapped from another process holds wrong data")


def _value(rank: int, number: int) -> int:
    return (rank * _NUM_ROUNDS + number) % 251 + 1
