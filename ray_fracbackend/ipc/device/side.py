"""Choose and set up how a group's tensors on an accelerator travel. Runs in every rank; imports torch.

The setup runs in the first call with such tensors, not when the group is created: the device is known only then, and many groups
(of meshes, of sharded models) never use one. The group first tries device memory that all its ranks have mapped, then staging through
pinned host memory, which always works. A group of one rank needs neither.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import torch

from .. import knobs
from ..errors import IpcUnavailableError
from ..protocol.collectives import Collectives, HostCollectives
from ..protocol.description import Terms, description_text
from ..protocol.engine import Engine
from ..protocol.local import LocalCollectives
from ..protocol.lone import LoneCollectives
from . import runtime
from .memory import ask_before_freeing, free_retired, give_up
from .runtime import CommunicationStream, wait_on_host
from .setup import DeviceLane, DeviceSetup
from .staged import set_up_staging
from .watch import DeviceWatch

logger = logging.getLogger(__name__)

# How long a clean shutdown waits for the device to finish the group's last call, and the owner of the memory for the other ranks.
_SHUTDOWN_S = 5.0
_PAUSE_S = 0.001


class DeviceSide:
    """One group's collectives of tensors on an accelerator.

    Args:
        host: Collectives of the group's CPU tensors.
        names: Name of each rank in messages.
        staged_reason: Why the tensors are always staged; None for a group that tries device memory first, with `LocalCollectives`.

    Attributes:
        staged_reason: Why the tensors are staged; None if they are not, or if that is not known yet.
    """

    def __init__(self, host: HostCollectives, names: Sequence[str], staged_reason: str | None = None) -> None:
        self.staged_reason = staged_reason
        self._kind = runtime.CudaRuntime if staged_reason is None else runtime.AcceleratorRuntime
        self._host = host
        self._names = names
        self._device: torch.device | None = None
        self._lane: DeviceLane | None = None
        self._watch: DeviceWatch | None = None
        self._stop_asking: Callable[[], None] | None = None
        self._collectives: Collectives | None = None
        self._streams: dict[torch.device, CommunicationStream] = {}

    @property
    def path(self) -> str | None:
        """How the tensors travel, and why so; None where none has come yet."""
        if self._collectives is None:
            return None
        if self._host.num_ranks == 1:
            return "no transfer: the group has one rank"
        if self._lane is not None:
            return "shared device memory"
        return f"staged through host memory ({self.staged_reason})"

    def device_of(self, tensors: Sequence[torch.Tensor]) -> torch.device | None:
        """Return the first device with streams among those of the tensors, or None."""
        return next((tensor.device for tensor in tensors if self._kind.owns(tensor)), None)

    def carries(self, tensors: Sequence[torch.Tensor]) -> torch.device | None:
        """Return the device of these tensors if the group's may carry them: all there, dense, not quantized."""
        device = self.device_of(tensors)
        if device is None or self._device not in (None, device):
            return None
        for tensor in tensors:
            if tensor.device != device or tensor.layout is not torch.strided or tensor.is_quantized:
                return None
        return device

    def stream_of(self, device: torch.device) -> CommunicationStream:
        """Return the group's stream on a device."""
        stream = self._streams.get(device)
        # Of several threads that make one, all use the first.
        return stream or self._streams.setdefault(device, CommunicationStream(self._kind(device)))

    def prepare(self, device: torch.device, terms: Terms) -> None:
        """Set up what carries the tensors if this is the group's first call with one on an accelerator; in its turn.

        Raises:
            IpcError: The group is broken.
        """
        # The device's memory has a page of its own, which does not know of all failures.
        self._host.raise_if_unusable(description_text(terms.description))
        if self._device is not None:
            return
        self._device = device
        if self._host.num_ranks == 1:
            self._collectives = LoneCollectives()
            return
        started = time.monotonic()
        with self.stream_of(device).runtime.current():
            self._set_up(device, terms)
        terms.deadline += time.monotonic() - started  # the set-up has limits of its own

    def _set_up(self, device: torch.device, terms: Terms) -> None:
        if self.staged_reason is None:
            try:
                assert isinstance(self._host, LocalCollectives)
                self._lane = DeviceSetup(self._host, self._names, self.stream_of(device)).run(terms)
                self._collectives = self._lane.collectives
                engines = self._lane.collectives.engine, self._host.engine
                self.stream_of(device).timeout_s = terms.left().total_seconds()
                self._watch = DeviceWatch(engines, self.stream_of(device), self._names, self._lane.memory.release)
                self._stop_asking = ask_before_freeing(partial(_may_be_stuck, engines, self._streams))
                return
            except IpcUnavailableError as error:
                if knobs.device_path() == "memory":
                    self._host.fail(f"{knobs.DEVICE_PATH_ENV_VAR}=memory is set, and {error}")
                    raise
                self.staged_reason = str(error)
                self.stream_of(device).renew()
                if self._host.rank == 0:
                    logger.warning(
                        "ray_fracbackend: CUDA tensors of this ipc group are staged through host memory: %s",
                        self.staged_reason,
                    )
        self._collectives = set_up_staging(self._host, self._names, self.stream_of(device), terms)

    def collectives(self, device: torch.device) -> Collectives | None:
        """Return the collectives for tensors on `device`, None where the group uses another one; after `prepare`."""
        return self._collectives if device == self._device else None

    def abort(self, reason: str) -> None:
        """Break the device's part of the group; touches no device. May be called again."""
        self._stop_watching()
        if self._lane is not None:
            self._lane.collectives.engine.abort(reason)
            self._lane.memory.release()
            give_up()

    def shutdown(self, idle: bool) -> None:
        """Leave the device's part of the group; `idle` says that no call is in progress. May be called again."""
        self._stop_watching()
        lane, self._lane = self._lane, None
        if lane is None:
            return
        engine = lane.collectives.engine
        if engine.waiter.is_poisoned():
            lane.memory.release()
        if not (idle and self._is_through()):
            # What the device still does with the memory cannot be known; the end of the process frees it.
            give_up()
            engine.close(keeps_memory=True)
        else:
            engine.close(keeps_memory=not lane.memory.close_imports())
            # CUDA does not define what a rank sees in memory whose owner has freed it or has ended.
            end = time.monotonic() + _SHUTDOWN_S
            while lane.memory.is_owner and not engine.waiter.is_alone() and time.monotonic() < end:
                time.sleep(_PAUSE_S)
            lane.memory.retire(engine.waiter.is_alone)
        assert self._stop_asking is not None
        self._stop_asking()

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def _is_through(self) -> bool:
        with suppress(RuntimeError):
            for stream in self._streams.values():
                if stream.last is not None:
                    wait_on_host(stream.last, _SHUTDOWN_S)
            free_retired()
            return True
        return False


def _may_be_stuck(engines: Sequence[Engine], streams: Mapping[torch.device, CommunicationStream]) -> bool:
    """Return whether a group's stream may wait for ever, for a rank that has failed or died."""
    peers = enumerate(engines[0].waiter.peers)
    if not any(engine.waiter.is_poisoned() for engine in engines) and all(
        peer.is_alive() or engines[0].has_left(rank) for rank, peer in peers
    ):
        return False
    try:
        return any(stream.last is not None and not stream.last.query() for stream in tuple(streams.values()))
    except RuntimeError:  # the device is broken
        return True
