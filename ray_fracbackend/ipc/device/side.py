"""A group's CUDA tensors: who carries them, and on which stream. Runs in every rank; imports torch.

Device memory is set up at the first call with CUDA tensors, not when the group is made: only then is the device known,
and many groups (of meshes, of sharded models) never move a CUDA tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch

from .._torch import set_timeout, stop
from ..errors import IpcUnavailableError
from ..protocol.description import description_text
from ..protocol.hierarchy import Collectives
from . import runtime
from .memory import free_retired, give_up
from .runtime import CommunicationStream, wait_on_host
from .setup import DeviceLane, DeviceSetup, HostSide

logger = logging.getLogger(__name__)

# How long a clean shutdown waits for the device to finish the group's last call.
_SHUTDOWN_S = 5.0


class DeviceSide:
    """Device memory of one group.

    Args:
        host: The group so far.
        timeout: Default timeout of the group's collectives.

    Attributes:
        gloo_reason: Why Gloo carries CUDA tensors of this group; None while nothing speaks against device memory.
    """

    def __init__(self, host: HostSide, timeout: timedelta) -> None:
        self.gloo_reason: str | None = None
        self._host = host
        self._timeout = timeout
        self._device: torch.device | None = None
        self._lane: DeviceLane | None = None
        self._streams: dict[torch.device, CommunicationStream] = {}

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default timeout of later collectives, the only one that NCCL knows."""
        self._timeout = timeout
        for group in self._lane.leaders if self._lane is not None else ():
            set_timeout(group, timeout)

    def device_of(self, tensors: Sequence[torch.Tensor]) -> torch.device | None:
        """Return the first CUDA device among those of the tensors, or None."""
        return next((tensor.device for tensor in tensors if runtime.CudaRuntime.owns(tensor)), None)

    def carries(self, tensors: Sequence[torch.Tensor]) -> torch.device | None:
        """Return the device of these tensors if device memory may carry them: all there, dense, not quantized."""
        device = self.device_of(tensors)
        if device is None or self.gloo_reason is not None or self._device not in (None, device):
            return None
        for tensor in tensors:
            if tensor.device != device or tensor.layout is not torch.strided or tensor.is_quantized:
                return None
        return device

    def stream_of(self, device: torch.device) -> CommunicationStream:
        """Return the group's stream on a device."""
        stream = self._streams.get(device)
        # Of several threads that make one, all use the first.
        return stream or self._streams.setdefault(device, CommunicationStream(runtime.CudaRuntime(device)))

    def prepare(self, device: torch.device, description: bytes, timeout_s: float) -> None:
        """Set device memory up if this is the group's first call with CUDA tensors; in its turn.

        Raises:
            IpcError: The group is broken.
        """
        # The other page knows of failures that this one does not.
        self._host.local.engine.raise_if_unusable(description_text(description))
        if self._device is not None:
            return
        self._device = device
        try:
            self._lane = DeviceSetup(self._host, self.stream_of(device), self._timeout).run(description, timeout_s)
        except IpcUnavailableError as error:
            self.gloo_reason = str(error)
            self.stream_of(device).renew()
            if self._host.membership.rank == 0:
                logger.warning("CUDA tensors of this ipc group go through Gloo: %s", self.gloo_reason)

    def collectives(self, device: torch.device) -> Collectives | None:
        """Return the collectives for tensors on `device`, None where Gloo has to carry them; after `prepare`."""
        return self._lane.collectives if self._lane is not None and device == self._device else None

    def abort(self, reason: str) -> None:
        """Break the device's part of the group; touches no device. May be called again."""
        if self._lane is not None:
            self._lane.local.engine.abort(reason)
            give_up()
            stop(self._lane.leaders, "abort")

    def shutdown(self, idle: bool) -> None:
        """Leave the device's part of the group; `idle` says that no call is in progress. May be called again."""
        lane, self._lane = self._lane, None
        if lane is None:
            return
        # Without a lane no later call may be taken for one that Gloo should carry.
        self.gloo_reason = "the process group was shut down"
        engine = lane.local.engine
        if not (idle and not engine.waiter.is_poisoned() and self._is_through()):
            # What the device still does with the memory cannot be known; the end of the process frees it.
            give_up()
            engine.close(keeps_memory=True)
        else:
            engine.close(keeps_memory=not lane.memory.close_imports())
            lane.memory.retire(engine.waiter.is_alone)
        stop(lane.leaders, "shutdown")

    def _is_through(self) -> bool:
        with suppress(RuntimeError):
            for stream in self._streams.values():
                if stream.last is not None:
                    wait_on_host(stream.last, _SHUTDOWN_S)
            free_retired()
            return True
        return False
