"""Collectives of a group whose ranks are in several places (hosts). Imports torch.

Ranks reduce inside their place, the first rank of each place (its leader) talks to the other leaders through a Gloo
group of their own, and the result comes back through the place's memory. Places may differ in their number of ranks.
Every rank gets bitwise the same result: the leaders' all_reduce gives all leaders the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch

from .description import KEY_BYTES, description_text
from .errors import CollectiveMismatchError, IpcError
from .local import Factor, LocalCollectives
from .reductions import Reduction
from .setup import Membership
from .staging import as_bytes
from .torch_compat import RedOpType as Op
from .torch_compat import c10d

# What Gloo itself reduces exactly as we do; other types travel as bytes and are reduced by each leader.
_GLOO_DTYPES = (torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64)
_GLOO_OPS = {
    Op.SUM: Op.SUM,
    Op.AVG: Op.SUM,
    Op.PREMUL_SUM: Op.SUM,
    Op.PRODUCT: Op.PRODUCT,
    Op.MIN: Op.MIN,
    Op.MAX: Op.MAX,
}


class HierarchicalCollectives:
    """Collectives of a group in several places; the arguments are those of `LocalCollectives`.

    Args:
        membership: Places and ranks.
        local: Collectives of this rank's place.
        leaders: Gloo group of the leaders, rank = place index; None on other ranks.
        everyone: Gloo group of all ranks.
    """

    def __init__(
        self,
        membership: Membership,
        local: LocalCollectives,
        leaders: Any,
        everyone: Any,
    ) -> None:
        self.rank = membership.rank
        self.num_ranks = sum(map(len, membership.places))
        self._local = local
        self._places = membership.places
        self._place = membership.place_index
        self._names = membership.names
        self._leaders = leaders
        self._everyone = everyone
        if leaders is not None:
            local.engine.on_failure = self._hang_up

    def _hang_up(self) -> None:
        """End the connections to other leaders, so that a failure in this place reaches their places at once."""
        # Where this torch's Gloo has no abort, the other leaders notice at their timeout.
        with suppress(RuntimeError, AttributeError):
            self._leaders.abort()

    @contextmanager
    def _poisoning(self, description: bytes) -> Iterator[None]:
        """A failure between places must not leave the ranks of this place waiting."""
        try:
            yield
        except BaseException as error:
            what = description_text(description)
            reason = str(error) if isinstance(error, IpcError) else f"{what} between places: {error}"
            self._local.engine.fail(reason)
            if isinstance(error, IpcError) or not isinstance(error, Exception):
                raise
            raise IpcError(reason) from error

    def _between_places(self, function: Callable[[Any], None], description: bytes) -> None:
        """Run `function` on the leader, after the leaders have compared descriptions."""
        if self._leaders is not None:
            with self._poisoning(description):
                self._agree(self._leaders, description)
                function(self._leaders)

    def _agree(self, leaders: Any, description: bytes) -> None:
        own = torch.frombuffer(bytearray(description), dtype=torch.uint8)
        all_of_them = [torch.empty_like(own) for _ in self._places]
        leaders.allgather([all_of_them], [own]).wait()
        for place, tensor in enumerate(all_of_them):
            theirs = bytes(tensor.tolist())
            if theirs[:KEY_BYTES] != description[:KEY_BYTES]:
                raise CollectiveMismatchError(
                    f"{self._names[self.rank]} called {description_text(description)} while "
                    f"{self._names[self._places[place][0]]} called {description_text(theirs)} as the same collective "
                    f"of the group; every rank must make the same calls in the same order."
                )

    def barrier(self, description: bytes, timeout_s: float) -> None:
        """See `LocalCollectives.barrier`."""
        self._local.barrier(description, timeout_s)
        # _agree alone already waits for every leader.
        self._between_places(lambda leaders: None, description)
        self._local.barrier(description, timeout_s)

    def all_reduce(
        self, tensor: torch.Tensor, reduction: Reduction, factor: Factor, description: bytes, timeout_s: float
    ) -> None:
        """See `LocalCollectives.all_reduce`."""
        partial = torch.empty(tensor.numel() if self._leaders else 0, dtype=reduction.accumulate_dtype)
        self._local.reduce(tensor, 0, reduction, factor, description, timeout_s, partial)

        def reduce_partials(leaders: Any) -> None:
            if partial.dtype in _GLOO_DTYPES and reduction.op in _GLOO_OPS:
                options = c10d.AllreduceOptions()
                options.reduceOp = _GLOO_OPS[reduction.op]
                options.timeout = timedelta(seconds=timeout_s)
                if partial.numel():
                    leaders.allreduce([partial], options).wait()
                reduction.finish(partial)
                tensor.copy_(partial)
                return
            data = as_bytes(partial)
            gathered = [torch.empty_like(data) for _ in self._places]
            leaders.allgather([gathered], [data]).wait()
            parts = [part.view(partial.dtype) for part in gathered]
            merged = torch.empty_like(partial)
            reduction.of_partials().reduce(merged, parts)
            tensor.copy_(merged)

        self._between_places(reduce_partials, description)
        self._local.broadcast(tensor, 0, description, timeout_s)

    def reduce(
        self,
        tensor: torch.Tensor,
        root: int,
        reduction: Reduction,
        factor: Factor,
        description: bytes,
        timeout_s: float,
    ) -> None:
        """See `LocalCollectives.reduce`."""
        scratch = tensor.clone()
        self.all_reduce(scratch, reduction, factor, description, timeout_s)
        if self.rank == root:
            tensor.copy_(scratch)

    def broadcast(self, tensor: torch.Tensor, root: int, description: bytes, timeout_s: float) -> None:
        """See `LocalCollectives.broadcast`."""
        home = next(i for i, members in enumerate(self._places) if root in members)
        if self._place == home:
            self._local.broadcast(tensor, self._places[home].index(root), description, timeout_s)
        self._between_places(lambda leaders: self._send(leaders, as_bytes(tensor), home, timeout_s), description)
        if self._place != home:
            self._local.broadcast(tensor, 0, description, timeout_s)

    @staticmethod
    def _send(leaders: Any, data: torch.Tensor, place: int, timeout_s: float) -> None:
        options = c10d.BroadcastOptions()
        options.rootRank = place
        options.timeout = timedelta(seconds=timeout_s)
        if data.numel():
            leaders.broadcast([data], options).wait()

    def all_gather(
        self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor], description: bytes, timeout_s: float
    ) -> None:
        """See `LocalCollectives.all_gather`."""
        data = as_bytes(tensor)
        everything = torch.empty(self.num_ranks * data.numel(), dtype=torch.uint8)
        blocks: list[torch.Tensor] = []
        for members in self._places:
            start = sum(block.numel() for block in blocks)
            blocks.append(everything[start : start + len(members) * data.numel()])
        own = list(blocks[self._place].view(len(self._places[self._place]), data.numel()))
        self._local.gather(data, own, 0, description, timeout_s)

        def exchange(leaders: Any) -> None:
            for place, block in enumerate(blocks):
                self._send(leaders, block, place, timeout_s)

        self._between_places(exchange, description)
        self._local.broadcast(everything, 0, description, timeout_s)
        order = [rank for members in self._places for rank in members]
        for position, rank in enumerate(order):
            start = position * data.numel()
            as_bytes(outputs[rank]).copy_(everything[start : start + data.numel()])

    def reduce_scatter(
        self,
        inputs: Sequence[torch.Tensor],
        output: torch.Tensor,
        reduction: Reduction,
        factor: Factor,
        description: bytes,
        timeout_s: float,
    ) -> None:
        """See `LocalCollectives.reduce_scatter`; reduces everything and keeps one's own part."""
        whole = torch.cat(list(inputs))
        self.all_reduce(whole, reduction, factor, description, timeout_s)
        output.copy_(whole[self.rank * output.numel() : (self.rank + 1) * output.numel()])

    def gather(
        self,
        tensor: torch.Tensor,
        outputs: Sequence[torch.Tensor] | None,
        root: int,
        description: bytes,
        timeout_s: float,
    ) -> None:
        """See `LocalCollectives.gather`; goes through Gloo between all ranks."""
        empty = torch.empty(0, dtype=torch.uint8)
        inputs = [tensor if r == root else empty for r in range(self.num_ranks)]
        targets = [empty] * self.num_ranks if self.rank != root or outputs is None else outputs
        self.exchange(inputs, targets, 0, description, timeout_s)

    def exchange(
        self,
        inputs: Sequence[torch.Tensor | None],
        outputs: Sequence[torch.Tensor | None],
        max_bytes: int,
        description: bytes,
        timeout_s: float,
    ) -> None:
        """See `LocalCollectives.exchange`; goes through Gloo between all ranks."""
        self.barrier(description, timeout_s)
        empty = torch.empty(0, dtype=torch.uint8)
        sources = [empty if t is None else as_bytes(t) for t in inputs]
        targets = [empty if t is None else as_bytes(t) for t in outputs]
        received = torch.empty(sum(t.numel() for t in targets), dtype=torch.uint8)
        options = c10d.AllToAllOptions()
        options.timeout = timedelta(seconds=timeout_s)
        out_sizes, in_sizes = [t.numel() for t in targets], [t.numel() for t in sources]
        with self._poisoning(description):
            self._everyone.alltoall_base(received, torch.cat(sources), out_sizes, in_sizes, options).wait()
        for target, part in zip(targets, received.split_with_sizes(out_sizes), strict=True):
            target.copy_(part)
