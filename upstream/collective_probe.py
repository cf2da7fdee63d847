"""Piece 5: a probe for ``ray.train.health`` that proves collectives between nodes.

A probe's content stays outside of Ray by the proposal. With it go ``verify.py``,
``process_group.py`` and what they import.

All nodes first meet at a board that the controller holds, and say there whether their
own network is in order. Only when all are does a collective start: one sick node would
stall everybody in it.
"""

import os
import time
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Dict, Iterable, List

import torch
from ray_fracbackend import network, ray_compat, store
from ray_fracbackend.errors import FracBackendError, StartTimeoutError
from ray_fracbackend.health import health_result
from ray_fracbackend.interfaces import IFNAME
from ray_fracbackend.process_group import StartInstruction, start_worker, stop_worker
from ray_fracbackend.rendezvous import WorkerRendezvous, init_url
from torch.distributed import TCPStore

from upstream.health_contract import OnDemandProbe, ProbeResult

from ray.util.annotations import PublicAPI

_READY = b"ready"


@PublicAPI(stability="alpha")
class CollectiveProbe(OnDemandProbe):
    """Runs short collectives with known answers between the nodes of a job.

    Make it on the controller, once for each run: it holds a store there, at which the
    nodes meet. It takes over the default process group, so it belongs into a process
    of its own and never into a training worker.

    Args:
        backend: ``gloo``, or ``nccl`` for the first GPU of each node.
        timeout_s: Seconds for the whole probe.
    """

    stop_workers = True

    def __init__(self, backend: str = "gloo", timeout_s: float = 60.0):
        self.backend = backend
        self.timeout_s = timeout_s
        self._board = store.open_store()
        self._board_at = (ray_compat.node_ids()[1], self._board.port)

    def __getstate__(self) -> Dict[str, Any]:
        """The probe without the store, which stays where it was made."""
        return {name: value for name, value in vars(self).items() if name != "_board"}

    def poll(self, ctx: Any) -> ProbeResult:
        """Proves the collectives of this node with all others.

        Args:
            ctx: Has ``node_id``, ``nodes`` and ``timeout_s``.

        Returns:
            ``passed`` is True, or False where this node is at fault, or None where the
            fault is another node's; ``detail`` says which.
        """
        node_ids = ids_of(ctx.nodes)
        meeting = _Meeting(
            node_ids.index(ctx.node_id),
            node_ids,
            self._board_at,
            min(self.timeout_s, ctx.timeout_s),
        )
        try:
            found = asdict(health_result(meeting.prove(self.backend)))
        except FracBackendError as error:
            blamed = [node_ids[rank] for rank in error.ranks]
            found = asdict(health_result(error))
            found["passed"] = None if blamed and ctx.node_id not in blamed else False
            found["detail"] += f" [{meeting.legend}]"
        finally:
            stop_worker()
        return ProbeResult(**found)


def ids_of(nodes: Iterable[Any]) -> List[str]:
    """Ids of a context's nodes, sorted: rank by rank the same list on each of them.

    Args:
        nodes: Ids, objects with a ``node_id``, or a dict by id; drafts of
            ``ray.train.health`` have had each.
    """
    return sorted(getattr(node, "node_id", node) for node in nodes)


class _Meeting:
    """One poll on one node."""

    def __init__(self, rank: int, node_ids: List[str], board_at: Any, budget_s: float):
        self._rank = rank
        self._world_size = len(node_ids)
        self._board_at = board_at
        self._end = time.monotonic() + budget_s
        self.legend = ", ".join(
            f"rank {rank} is node {node_id}" for rank, node_id in enumerate(node_ids)
        )

    def prove(self, backend: str) -> Any:
        address = self._gather_all(backend)
        host, _, port = address.rpartition(" ")
        return start_worker(
            StartInstruction(
                rank=self._rank,
                world_size=self._world_size,
                backend=backend,
                device="cuda:0" if backend == "nccl" else "cpu",
                rendezvous=WorkerRendezvous(
                    master_addr=host,
                    master_port=int(port),
                    init_url=init_url(
                        "tcp", host, int(port), libuv_off=os.name == "nt"
                    ),
                    interface_by_route=backend == "gloo",
                    uses_gloo=backend == "gloo",
                    check_reachable=self._rank > 0,
                ),
                timeout_s=self._left_s(),
                budget_s=self._left_s(),
                verify=True,
            )
        )

    def _gather_all(self, backend: str) -> str:
        """Meets the other nodes; returns rank 0's address and port."""
        host, port = self._board_at
        store.check_reachable(host, port, min(store.REACH_S, self._left_s()))
        board = TCPStore(
            host,
            port,
            is_master=False,
            timeout=timedelta(seconds=self._left_s()),
            use_libuv=store.uses_libuv(),
        )
        if self._rank == 0:
            own = network.route_address(host) or host
            board.set("address", f"{own} {store.hold_store(None)}")
        board.set(str(self._rank), _own_state(backend, self._rank))
        self._check_others(board)
        return board.get("address").decode()

    def _check_others(self, board: TCPStore) -> None:
        ranks = range(self._world_size)
        try:
            board.wait([str(r) for r in ranks], timedelta(seconds=self._left_s()))
        except RuntimeError as error:
            absent = [rank for rank in ranks if not board.check([str(rank)])]
            raise StartTimeoutError(
                f"ranks {absent} did not come to the probe", ranks=absent
            ) from error
        for rank in ranks:
            state = board.get(str(rank))
            if state != _READY:
                raise FracBackendError(state.decode(), ranks=(rank,))

    def _left_s(self) -> float:
        return max(self._end - time.monotonic(), 0.001)


def _own_state(backend: str, rank: int) -> bytes:
    """Whether this node can take part, or why not."""
    if backend == "nccl" and not torch.cuda.is_available():
        return f"rank {rank}: torch finds no CUDA device".encode()
    try:
        if backend == "gloo" and IFNAME in os.environ:
            network.check_gloo_device(os.environ[IFNAME])
    except FracBackendError as error:
        return f"rank {rank}: {error}".encode()
    return _READY
