"""Choose and set up how a group's tensors on an accelerator travel. Runs in every rank; imports torch.

The setup runs in the first call with such tensors, not when the group is created: the device is known only then, and many groups
(of meshes, of sharded models) never use one. The group first tries device memory that all its ranks have mapped, then staging through
pinned host memory, which always works. A group of one rank needs neither.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from .. import knobs
from ..errors import IpcUnavailableError
from ..protocol.collectives import Collectives, HostCollectives
from ..protocol.description import Terms, description_text
from ..protocol.local import LocalCollectives
from ..protocol.lone import LoneCollectives
from . import driver, runtime
from .memory import free, let_go
from .runtime import CommunicationStream, comes_true
from .setup import DeviceCollectives, DeviceSetup
from .staged import set_up_staging
from .watch import DeviceWatch

logger = logging.getLogger(__name__)

# How long a shutdown waits for the device to finish its calls, and then the owner of the memory for the other ranks.
_SHUTDOWN_S = 5.0


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
        self._kind = driver.CudaRuntime if staged_reason is None else runtime.AcceleratorRuntime
        self._host = host
        self._names = names
        self._device: torch.device | None = None
        # The collectives on device memory.
        self._lane: DeviceCollectives | None = None
        self._watch: DeviceWatch | None = None
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
        is_plain = all(t.device == device and t.layout is torch.strided and not t.is_quantized for t in tensors)
        return device if self._device in (None, device) and is_plain else None

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
                stream = self.stream_of(device)
                lane = self._lane = self._collectives = DeviceSetup(self._host, self._names, stream).run(terms)
                stream.timeout_s = terms.left().total_seconds()
                self._watch = DeviceWatch(
                    (lane.engine, self._host.engine), stream, self._names, lane.memory.timeline.release
                )
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
        if (lane := self._lane) is not None:
            lane.abort(reason)
            lane.memory.timeline.release()

    def shutdown(self, idle: bool) -> None:
        """Leave the device's part of the group; `idle` says that no call is in progress. May be called again."""
        self._stop_watching()
        lane, self._lane = self._lane, None
        if lane is None:
            return
        block, timeline, waiter = lane.memory.block, lane.memory.timeline, lane.engine.waiter
        if waiter.is_poisoned():
            timeline.release()
        # Else the end of the process unmaps and frees it: what the device still does with the memory is not known.
        if lets_go := idle and let_go(timeline.runtime, block, timeline, _SHUTDOWN_S):
            lane.memory.close()
        lane.engine.close(keeps_memory=not lets_go)
        # CUDA does not define what a rank sees in memory whose owner has freed it or has ended.
        if not block.imported and comes_true(waiter.have_all_let_go, _SHUTDOWN_S) and lets_go:
            free(timeline.runtime, block)

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.close()
