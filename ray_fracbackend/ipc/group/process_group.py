"""The process group of backend ``ipc``: memory shared between the ranks of a host or of a device. Imports torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from .. import knobs
from .._torch import DEVICES
from ..device.side import DeviceSide
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

    Raises:
        IpcUnavailableError: Shared memory cannot be set up on some rank, the ranks are on several hosts, or an environment
            variable has an invalid value. Every rank raises.
    """

    _asked_as = frozenset({"ipc"})

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, global_ranks: Sequence[int] = ()) -> None:
        super().__init__("ipc", store, rank, size, timeout, global_ranks, DEVICES)
        self._host = self._local = join(self._store, rank, size, self._names, self._obstacle())
        self._device_side = DeviceSide(self._host, self._names)
        logger.log(
            logging.INFO if rank == 0 else logging.DEBUG,
            "ray_fracbackend: ipc process group of %d ranks, chunks of %d bytes",
            size,
            self._local.engine.transport.chunk_bytes,
        )

    def _obstacle(self) -> str | None:
        """Return what would otherwise fail only at the first asynchronous call, or the first one with device tensors."""
        try:
            self._executor.start()
        except RuntimeError as error:
            return str(error)
        return knobs.invalid_value()
