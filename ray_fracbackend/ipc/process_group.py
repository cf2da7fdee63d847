"""The c10d process group ``ipc``: lifecycle, and who runs a call. Imports torch, never Ray.

The collectives themselves are in `operations`. A real Gloo group is registered inside, so that everything that is not
overridden (send, recv, group names, object lookups from C++) and every tensor that shared memory does not carry (CUDA,
sparse, quantized) goes through it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from .arguments import timeout_of, wants_async
from .description import description_text, through_gloo
from .errors import CollectiveMismatchError, IpcError
from .executor import Executor
from .hierarchy import HierarchicalCollectives
from .local import LocalCollectives
from .reductions import Reduction, can_reduce, supported_ops
from .setup import Membership, join
from .torch_compat import PrefixStore, ProcessGroup, ProcessGroupGloo
from .work import CompletedWork, PendingWork

logger = logging.getLogger(__name__)


def _in_inference_mode(function: Callable[[], None]) -> Callable[[], None]:
    """Tensors made under inference_mode may be changed only under it, in whichever thread."""

    def guarded() -> None:
        with torch.inference_mode():
            function()

    return guarded


def in_host_memory(*tensors: torch.Tensor) -> bool:
    """Whether shared host memory can carry these tensors: on the CPU, dense, not quantized."""
    for tensor in tensors:
        if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
            return False
    return True


_GLOO_NAME = ProcessGroup.BackendType.CUSTOM
# How long shutdown waits for calls in progress; their own time limits may be half an hour.
_SHUTDOWN_S = 5.0


class ProcessGroupBase(ProcessGroup):  # type: ignore[misc]  # torch gives it no type
    """State and lifecycle of an ipc process group; `operations.IpcProcessGroup` adds the collectives.

    Args:
        store: The group's store.
        rank: This process's rank in the group.
        size: Ranks of the group.
        timeout: Default time limit of a collective.
        global_ranks: Global rank of each group rank, for messages; empty means the same numbers.

    Raises:
        IpcUnavailableError: Shared memory cannot be set up on some rank; every rank raises.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, global_ranks: Sequence[int] = ()) -> None:
        super().__init__(rank, size)
        self._num_ranks = size
        self._own_rank = rank
        self._timeout_s = timeout.total_seconds()
        names = tuple(f"rank {global_ranks[r] if global_ranks else r}" for r in range(size))
        self._gloo = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)
        for device in ("cpu", "cuda"):
            self._register_backend(torch.device(device), _GLOO_NAME, self._gloo)
        self._set_default_backend(_GLOO_NAME)
        self.membership, self._local = join(store, rank, size, names)
        self._leaders = _make_leaders(store, self.membership, timeout)
        self._collectives: LocalCollectives | HierarchicalCollectives = self._local
        if len(self.membership.places) > 1:
            self._collectives = HierarchicalCollectives(self.membership, self._local, self._leaders, self._gloo)
        self._executor = Executor(f"ipc rank {rank}")
        self._reductions: dict[tuple[torch.dtype, Any], Reduction] = {}
        logger.log(
            logging.INFO if rank == 0 else logging.DEBUG,
            "ipc process group of %d ranks in %d places, %d here, chunks of %d bytes",
            size,
            len(self.membership.places),
            self._local.num_ranks,
            self._local.engine.transport.chunk_bytes,
        )

    def getBackendName(self) -> str:
        """Name of the backend."""
        return "ipc"

    def _reduction_of(self, operation: str, dtype: torch.dtype, op: Any) -> Reduction:
        """The reduction of an element type.

        Raises:
            ValueError: It has no such operation.
        """
        reduction = self._reductions.get((dtype, op))
        if reduction is None:
            if not can_reduce(dtype, op):
                raise ValueError(
                    f"{operation} cannot reduce {dtype} with {op.name}; this element type has: {supported_ops(dtype)}."
                )
            reduction = self._reductions[dtype, op] = Reduction(dtype, op, self._num_ranks)
        return reduction

    def _exchange(
        self, inputs: list[torch.Tensor], outputs: list[torch.Tensor], description: bytes, timeout_s: float
    ) -> None:
        """All-to-all of parts of any size: first the sizes, then the data."""
        size = self._num_ranks
        own = torch.tensor([t.numel() * t.element_size() for t in (*inputs, *outputs)], dtype=torch.int64)
        table = torch.empty((size, 2 * size), dtype=torch.int64)
        self._collectives.all_gather(own, list(table), description, timeout_s)
        sent, expected = table[:, :size], table[:, size:].t()
        wrong = (sent != expected).nonzero()
        if wrong.numel():
            # Every rank has the same table, so every rank raises the same here.
            source, target = wrong[0].tolist()
            names = self.membership.names
            reason = (
                f"{description_text(description)}: {names[source]} sends {int(sent[source, target])} bytes to "
                f"{names[target]}, which expects {int(expected[source, target])}; make both sides' splits agree."
            )
            self._local.engine.fail(reason)
            raise CollectiveMismatchError(reason)
        self._collectives.exchange(inputs, outputs, int(sent.max()), description, timeout_s)

    def _gloo_base(self, operation: str, *args: Any) -> Any:
        """Call the single-tensor form of a Gloo operation under the name that this torch has."""
        names = {
            "all_gather": ("_allgather_base", "all_gather_single"),
            "reduce_scatter": ("_reduce_scatter_base", "reduce_scatter_single"),
            "all_to_all": ("alltoall_base", "all_to_all_single"),
        }[operation]
        method = next(getattr(self._gloo, name) for name in names if hasattr(self._gloo, name))
        return method(*args)

    def _gloo_all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any) -> Any:
        """All-to-all of lists, which Gloo itself has only for one tensor."""
        source = torch.cat([t.reshape(-1) for t in inputs])
        target = torch.empty(sum(t.numel() for t in outputs), dtype=source.dtype, device=source.device)
        work = self._gloo_base(
            "all_to_all", target, source, [t.numel() for t in outputs], [t.numel() for t in inputs], opts
        )
        work.wait()
        for output, part in zip(outputs, target.split_with_sizes([t.numel() for t in outputs]), strict=True):
            output.copy_(part.view(output.shape))
        return work

    def _all_of(self, works: list[Any], opts: Any, results: list[torch.Tensor]) -> Any:
        """One Work for calls already launched: the queue is in order, so an empty last entry is enough."""
        if wants_async(opts):

            def first_error() -> None:
                for work in works:
                    work.wait()

            return PendingWork(self._executor.submit(first_error), self._executor, results)
        return CompletedWork(results)

    def _launch(self, opts: Any, function: Callable[[], None], results: list[torch.Tensor]) -> Any:
        """Run a call through shared memory; `results` become the future's value."""

        def guarded() -> None:
            try:
                function()
            except (IpcError, ValueError):
                # Wrong arguments are found before anything is published, and are as wrong on the other ranks.
                raise
            except BaseException as error:
                self._local.engine.fail(f"{type(error).__name__}: {error}")
                raise

        return self._execute(opts, guarded, results)

    def _execute(self, opts: Any, function: Callable[[], None], results: list[torch.Tensor]) -> Any:
        """Run `function` now or, if the caller does not wait, queue it."""
        for result in results:
            if result.is_inference():
                function = _in_inference_mode(function)
                break
        if wants_async(opts):
            return PendingWork(self._executor.submit(function), self._executor, results)
        self._executor.run(function)
        return CompletedWork(results)

    def _through_gloo(
        self, opts: Any, description: bytes, start: Callable[[], Any], results: list[torch.Tensor]
    ) -> Any:
        """Run a Gloo operation in its turn, after the ranks have compared descriptions."""
        timeout_s = timeout_of(opts, self._timeout_s)
        description = through_gloo(description)

        def function() -> None:
            self._collectives.barrier(description, timeout_s)
            # Gloo tells the other ranks itself, and what it merely cannot do must not break the group.
            start().wait()

        return self._execute(opts, function, results)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default time limit of later collectives."""
        self._timeout_s = timeout.total_seconds()
        for gloo in (self._gloo, self._leaders):
            if gloo is not None and hasattr(gloo, "set_timeout"):
                gloo.set_timeout(timeout)

    def abort(self) -> None:
        """Break the group: calls in progress and later ones raise on every rank. May be called again."""
        self._local.engine.abort(f"{self.membership.names[self._own_rank]} aborted the process group")
        self._executor.close(_SHUTDOWN_S)
        self._stop_gloo("abort")

    def shutdown(self) -> None:
        """Leave the group after the calls in progress; later calls here raise. May be called again."""
        idle = self._executor.close(_SHUTDOWN_S)
        self._local.engine.close()
        if idle:
            self._local.engine.transport.close()
        self._stop_gloo("shutdown")

    def _stop_gloo(self, verb: str) -> None:
        for gloo in (self._leaders, self._gloo):
            if gloo is not None:
                # Gloo has neither verb in every torch release.
                with contextlib.suppress(RuntimeError, AttributeError):
                    getattr(gloo, verb)()


def _make_leaders(store: Any, membership: Membership, timeout: timedelta) -> Any:
    """The Gloo group between the first ranks of all places; None on other ranks and in a single place."""
    if len(membership.places) == 1 or membership.local_ranks[0] != membership.rank:
        return None
    try:
        return ProcessGroupGloo(
            PrefixStore("ipc-leaders", store), membership.place_index, len(membership.places), timeout
        )
    except RuntimeError as error:
        raise IpcError(
            f"The leaders of {len(membership.places)} places cannot connect through Gloo: {error}"
        ) from error
