"""Groups of the leaders, the first ranks of all hosts: Gloo on the host, NCCL between devices. Imports torch."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch

from .._torch import PrefixStore, ProcessGroupGloo, ProcessGroupNCCL
from ..device.streams import CommunicationStream
from ..errors import IpcError
from .setup import Membership


def leads(membership: Membership) -> bool:
    """Whether this rank talks to other hosts."""
    return len(membership.hosts) > 1 and membership.local_ranks[0] == membership.rank


def gloo_leaders(store: Any, membership: Membership, timeout: timedelta) -> Any:
    """The Gloo group between the leaders, rank = host index; None on other ranks and on a single host.

    Raises:
        IpcError: The leaders cannot connect.
    """
    if not leads(membership):
        return None
    try:
        group = ProcessGroupGloo(
            PrefixStore("ipc-leaders", store), membership.host_index, len(membership.hosts), timeout
        )
        # A leader whose connections stand may leave at once; to one that still connects that is a broken network.
        group.barrier().wait()
        return group
    except RuntimeError as error:
        raise IpcError(f"The leaders of {len(membership.hosts)} hosts cannot connect through Gloo: {error}") from error


def nccl_leaders(
    store: Any, membership: Membership, timeout: timedelta, stream: CommunicationStream, patience_s: float
) -> Any:
    """The NCCL group between the leaders, after it has added up right; None where `gloo_leaders` has none.

    Args:
        store: The group's store.
        membership: Ranks of each device, so that no two leaders share one, which NCCL would refuse.
        timeout: Time limit of its collectives.
        stream: Where to try it.
        patience_s: Seconds until the trial counts as failed.

    Raises:
        RuntimeError: NCCL cannot connect the leaders, or adds up wrong.
    """
    if not leads(membership):
        return None
    runtime, size = stream.runtime, len(membership.hosts)
    group = ProcessGroupNCCL(PrefixStore("ipc-nccl-leaders", store), membership.host_index, size, timeout)
    with runtime.on(stream.stream):
        ones = torch.ones(1024, device=runtime.device)
        group.allreduce([ones]).wait()
        done = runtime.new_event()
        done.record(stream.stream)
    wait_on_host(done, patience_s)
    if not bool((ones.cpu() == size).all()):
        raise RuntimeError("NCCL added up wrong")
    return group


def wait_on_host(event: Any, patience_s: float) -> None:
    """Return once the device has come to `event`; for set-up and shutdown only.

    Raises:
        RuntimeError: It has not within `patience_s` seconds.
    """
    deadline = time.monotonic() + patience_s
    while not event.query():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the device did not finish within {patience_s:.0f} s")
        time.sleep(0.001)
