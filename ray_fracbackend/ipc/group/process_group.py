"""The process group of backend ``ipc``: memory shared between the ranks of a host or of a device. Imports torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from .. import knobs
from .._torch import DEVICES
from ..device.side import DeviceSide
from ..protocol.hierarchy import HierarchicalCollectives, gloo_leaders
from ..protocol.setup import join
from .collective_group import CollectiveGroup

logger = logging.getLogger(__name__)


class IpcProcessGroup(CollectiveGroup):
    """Process group of backend ``ipc``.

    Args:
        store: The group's store.
        rank: This process's rank in the group.
        size: Ranks of the group.
        timeout: Default timeout of a collective.
        global_ranks: Global rank of each group rank, for messages; empty means the same numbers.

    Attributes:
        membership: Ranks of each host.

    Raises:
        IpcUnavailableError: Shared memory cannot be set up on some rank, or an environment variable has an invalid
            value there. Every rank raises.
    """

    _asked_as = frozenset({"ipc"})

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, global_ranks: Sequence[int] = ()) -> None:
        super().__init__("ipc", store, rank, size, timeout, global_ranks, DEVICES)
        self.membership, self._local = join(self._store, rank, size, self._names, _wrong_setting())
        self._leaders = gloo_leaders(self._store, self.membership, timeout)
        self._host = self._local
        if len(self.membership.hosts) > 1:
            self._host = HierarchicalCollectives(self.membership, self._local, self._leaders, self._gloo)
        if self._leaders is not None:
            self._inner.append(self._leaders)
        shared = self._local if len(self.membership.hosts) == 1 else None
        self._device_side = DeviceSide(self._host, self._names, shared)
        logger.log(
            logging.INFO if rank == 0 else logging.DEBUG,
            "ray_fracbackend: ipc process group of %d ranks on %d hosts, %d on this host, chunks of %d bytes",
            size,
            len(self.membership.hosts),
            self._local.num_ranks,
            self._local.engine.transport.chunk_bytes,
        )


def _wrong_setting() -> str | None:
    """Return the error of an environment variable that is otherwise read only at the first call with device tensors."""
    try:
        knobs.check_device()
    except ValueError as error:
        return str(error)
    return None
