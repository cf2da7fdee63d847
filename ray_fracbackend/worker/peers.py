"""Tell the other ranks of a start that this rank failed, and notice that another one did. Runs on the worker.

A rank that fails alone writes its number to the attempt's store. Its peers would wait for it until their deadline; while
one of their waits is long, they look for that number (timeouts.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from ray_fracbackend.decide.plan import WorkerPlan
from ray_fracbackend.errors import RendezvousError
from ray_fracbackend.timeouts import bounded
from ray_fracbackend.worker.store import client

_FAILED = "ray_fracbackend/failed"
# Time limit of one connection or call: rank 0 may be gone.
_CALL_S = 3.0


class Peers:
    """The other ranks of one attempt, over a connection of its own: a wait blocks a store's client for all other calls.

    Args:
        plan: The worker's plan.
    """

    def __init__(self, plan: WorkerPlan) -> None:
        self._plan = plan
        self._store: PrefixStore | None = None
        self._is_lost = False

    def tell_failure(self) -> None:
        """Write this rank's number to the store; nothing happens if the store does not answer."""
        self._call(lambda: self._connected().compare_set(_FAILED, "", str(self._plan.rank)))

    def look(self) -> None:
        """Return if no other rank has failed, or if the store does not answer.

        Raises:
            RendezvousError: Another rank has failed; ``ranks`` is this rank.
        """
        found = self._call(self._failed)
        if found.isdigit() and (rank := int(found[:9])) < self._plan.world_size and rank != self._plan.rank:
            raise RendezvousError(f"rank {rank} failed, and this rank waited for it.", ranks=(rank,))

    def _failed(self) -> bytes:
        store = self._connected()
        return bytes(store.get(_FAILED)) if store.check([_FAILED]) else b""

    def _call(self, call: Callable[[], bytes]) -> bytes:
        if not self._is_lost:
            with suppress(RuntimeError, OSError):
                return bounded(call, _CALL_S)
            self._is_lost = True
        return b""

    def _connected(self) -> PrefixStore:
        if self._store is None:
            address = self._plan.master_addr
            if self._plan.rank == 0:  # it may not be able to reach its own address from inside
                address = "::1" if ":" in address else "127.0.0.1"
            own = client(address, self._plan.master_port, timedelta(seconds=_CALL_S))
            self._store = PrefixStore(self._plan.attempt, own)
        return self._store
