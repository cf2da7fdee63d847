"""Collectives of a group whose ranks are on several hosts. Imports torch.

Ranks reduce within their host. The first rank of each host (its leader) communicates with the other leaders through a
Gloo group, and the result returns through the host's memory. Hosts may differ in their number of ranks.
All ranks get bitwise the same result: after the leaders' all_reduce all leaders have the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from .._torch import PrefixStore, ProcessGroupGloo, stop
from ..errors import CollectiveTimeoutError, IpcError
from .description import Terms, description_text
from .gloo import GlooGroup
from .local import LocalCollectives, Parts, SomeParts, as_bytes
from .reductions import Reduction
from .setup import Membership


class HierarchicalCollectives:
    """Collectives of a group on several hosts; for the arguments see `LocalCollectives`.

    Args:
        membership: The ranks of each host.
        local: Collectives of this rank's host.
        leaders: Gloo group of the leaders, rank = host index; None on other ranks.
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
        self.num_ranks = sum(map(len, membership.hosts))
        self._local = local
        self._hosts = membership.hosts
        self._host = membership.host_index
        names = [membership.names[members[0]] for members in membership.hosts]
        self._leaders = None if leaders is None else GlooGroup(leaders, membership.host_index, names)
        self._everyone = GlooGroup(everyone, membership.rank, membership.names)
        if leaders is not None:
            local.engine.on_failure.append(self._hang_up)

    def _hang_up(self, reason: str) -> None:
        """Close the connections to other leaders, to report a failure on this host to their hosts at once."""
        # If this torch's Gloo has no abort, the other leaders fail at their timeout.
        stop([self._leaders.group] if self._leaders is not None else [], "abort")

    @contextmanager
    def _poisoning(self, terms: Terms) -> Iterator[None]:
        """On a failure between hosts, poison the group of this host; otherwise its ranks would keep waiting."""
        try:
            yield
        except BaseException as error:
            what = description_text(terms.description)
            reason = str(error) if isinstance(error, IpcError) else f"{what} between hosts: {error}"
            self._local.engine.fail(reason)
            if isinstance(error, IpcError) or not isinstance(error, Exception):
                raise
            # Gloo raises one exception type for all failures.
            raise (CollectiveTimeoutError if terms.is_late() else IpcError)(reason) from error

    def raise_if_unusable(self, what: str) -> None:
        """See `LocalCollectives.raise_if_unusable`."""
        self._local.raise_if_unusable(what)

    def fail(self, reason: str) -> None:
        """See `LocalCollectives.fail`; also fails the other hosts."""
        self._local.fail(reason)

    def abort(self, reason: str) -> None:
        """See `LocalCollectives.abort`."""
        self._local.abort(reason)

    def close(self, idle: bool) -> None:
        """See `LocalCollectives.close`."""
        self._local.close(idle)

    def _between_hosts(self, function: Callable[[GlooGroup], None], terms: Terms) -> Terms:
        """Run `function` on the leader, after the leaders have compared descriptions; return terms for the next step.

        The other ranks get a later deadline than the leader: they then raise its error, and no timeout of their own.
        """
        if self._leaders is None:
            return terms.later()
        with self._poisoning(terms):
            self._leaders.agree(terms)
            function(self._leaders)
        return terms

    def barrier(self, terms: Terms) -> None:
        """See `LocalCollectives.barrier`."""
        self._local.barrier(terms)
        # Comparing the descriptions waits for every leader.
        self._local.barrier(self._between_hosts(lambda leaders: None, terms))

    def reduce(self, tensor: torch.Tensor, root: int | None, reduction: Reduction, terms: Terms) -> None:
        """See `LocalCollectives.reduce`; all ranks get the result, and ranks other than the root drop it."""
        result = tensor if root in (None, self.rank) else tensor.clone()
        numel = tensor.numel() if self._leaders else 0
        partial = torch.empty(numel, dtype=reduction.accumulate_dtype)
        self._local.reduce(tensor, 0, reduction, terms, partial)

        def reduce_partials(leaders: GlooGroup) -> None:
            leaders.reduce(partial, result, reduction, terms)

        self._local.broadcast(result, 0, self._between_hosts(reduce_partials, terms))

    def broadcast(self, tensor: torch.Tensor, root: int, terms: Terms) -> None:
        """See `LocalCollectives.broadcast`."""
        home = next(i for i, members in enumerate(self._hosts) if root in members)
        if self._host == home:
            self._local.broadcast(tensor, self._hosts[home].index(root), terms)
        later = self._between_hosts(lambda leaders: leaders.broadcast(as_bytes(tensor), home, terms), terms)
        if self._host != home:
            self._local.broadcast(tensor, 0, later)

    def gather(self, tensor: torch.Tensor, outputs: Parts | None, root: int | None, terms: Terms) -> None:
        """See `LocalCollectives.gather`; with a single root, uses Gloo between all ranks."""
        if root is not None:
            inputs = [tensor if r == root else None for r in range(self.num_ranks)]
            self.exchange(inputs, outputs or [None] * self.num_ranks, 0, terms)
            return
        assert outputs is not None
        data = as_bytes(tensor)
        everything = torch.empty(self.num_ranks * data.numel(), dtype=torch.uint8)
        blocks: list[torch.Tensor] = []
        for members in self._hosts:
            start = sum(block.numel() for block in blocks)
            blocks.append(everything[start : start + len(members) * data.numel()])
        own = list(blocks[self._host].view(len(self._hosts[self._host]), data.numel()))
        self._local.gather(data, own, 0, terms)

        def exchange(leaders: GlooGroup) -> None:
            for host, block in enumerate(blocks):
                leaders.broadcast(block, host, terms)

        self._local.broadcast(everything, 0, self._between_hosts(exchange, terms))
        order = [rank for members in self._hosts for rank in members]
        for position, rank in enumerate(order):
            start = position * data.numel()
            as_bytes(outputs[rank]).copy_(everything[start : start + data.numel()])

    def reduce_scatter(self, inputs: Parts, output: torch.Tensor, reduction: Reduction, terms: Terms) -> None:
        """See `LocalCollectives.reduce_scatter`; reduces everything and keeps this rank's part."""
        whole = torch.cat(list(inputs))
        self.reduce(whole, None, reduction, terms)
        output.copy_(whole[self.rank * output.numel() : (self.rank + 1) * output.numel()])

    def exchange(self, inputs: SomeParts, outputs: SomeParts, max_bytes: int, terms: Terms) -> None:
        """See `LocalCollectives.exchange`; uses Gloo between all ranks."""
        self.barrier(terms)
        with self._poisoning(terms):
            self._everyone.exchange(inputs, outputs, terms)


def leads(membership: Membership) -> bool:
    """Return whether this rank exchanges data with other hosts."""
    return len(membership.hosts) > 1 and membership.local_ranks[0] == membership.rank


def gloo_leaders(store: Any, membership: Membership, timeout: timedelta) -> Any:
    """Create the Gloo group of the leaders, rank = host index; None on other ranks and with a single host.

    Raises:
        IpcError: The leaders cannot connect.
    """
    if not leads(membership):
        return None
    try:
        group = ProcessGroupGloo(
            PrefixStore("ipc-leaders", store), membership.host_index, len(membership.hosts), timeout
        )
        # All leaders wait here: if one left before another has connected, that one would report a broken network.
        group.barrier().wait()
        return group
    except RuntimeError as error:
        raise IpcError(f"The leaders of {len(membership.hosts)} hosts cannot connect through Gloo: {error}") from error
