"""Start the same workers twice: as stock Ray Train does, and as we do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import net_calls
from net_nodes import Node, Worker
from ray.train._internal.utils import get_address_and_port

from ray_fracbackend.decide.plan import StartPlan
from ray_fracbackend.decide.rendezvous import Rendezvous, plan_rendezvous
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.decide.table import decide_start
from ray_fracbackend.decide.worker_info import WorkerInfo

# Stock gets this timeout instead of Ray Train's 1800 s, so that its hang ends within a test.
STOCK_TIMEOUT_S = 3.0
_BUDGET_S = 20.0


def stock(
    nodes: Sequence[Node], folder: Path, master_addr: str, timeout_s: float = STOCK_TIMEOUT_S, **env: str
) -> tuple[list[Any], list[Worker]]:
    """Return each rank's result of stock's start: the all_reduced value, its exception, or TimeoutError for a hang."""
    workers = [node.spawn(folder) for node in nodes]
    _, port = workers[0].call(get_address_and_port)
    for rank, worker in enumerate(workers):
        worker.send(net_calls.stock_start, master_addr, port, rank, len(workers), timeout_s, **env)
    end = time.monotonic() + timeout_s + 1.5
    return [worker.answer(end) for worker in workers], workers


def probe(
    nodes: Sequence[Node], folder: Path, node_ips: Sequence[str] | None = None, options: Any = None, **env: str
) -> tuple[list[WorkerInfo], list[Worker]]:
    """Run our probe in a new process on every node."""
    workers = [node.spawn(folder) for node in nodes]
    options = options or Settings()
    ips = node_ips or [node.ip for node in nodes]
    for rank, worker in enumerate(workers):
        worker.send(
            net_calls.our_probe, rank, worker.node.name, ips[rank], options.master_addr, options.master_port, **env
        )
    facts = [worker.answer(time.monotonic() + 20) for worker in workers]
    for found in facts:
        if isinstance(found, BaseException):
            raise found
    return facts, workers


def start(
    facts: Sequence[WorkerInfo],
    workers: Sequence[Worker],
    options: Any = None,
    wait_for: Sequence[int] | None = None,
) -> tuple[list[Any], Rendezvous]:
    """Run our start on every node after our decision; return the answers of the ranks ``wait_for``, by default of all."""
    options = replace(options or Settings(), timeout_s=30.0, verify=False)
    decision = decide_start(facts, options)
    plan = plan_rendezvous(facts, options, decision.backend, facts[0].network.store_port)
    told = StartPlan(decision, plan).worker_plans(facts, options, budget_s=_BUDGET_S, attempt="first")
    for worker, instruction in zip(workers, told, strict=True):
        worker.send(net_calls.our_start, instruction)
    end = time.monotonic() + _BUDGET_S + 5
    ranks = range(len(workers)) if wait_for is None else wait_for
    return [workers[rank].answer(end) for rank in ranks], plan


def ours(
    nodes: Sequence[Node], folder: Path, node_ips: Sequence[str] | None = None, options: Any = None, **env: str
) -> tuple[list[Any], Rendezvous, list[Worker]]:
    facts, workers = probe(nodes, folder, node_ips, options, **env)
    results, plan = start(facts, workers, options)
    return results, plan, workers
