"""Start the same workers twice: as stock Ray Train does, and as we do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import net_calls
from net_nodes import Node, Worker

from ray_fracbackend.decide.plan import StartPlan, WorkerPlan
from ray_fracbackend.decide.rendezvous import Rendezvous, plan_rendezvous
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.decide.table import decide_start
from ray_fracbackend.decide.worker_info import WorkerInfo

# Stock gets this timeout instead of Ray Train's 1800 s, so that its hang ends within a test.
STOCK_TIMEOUT_S = 3.0


def stock(
    nodes: Sequence[Node], folder: Path, master_addr: str, timeout_s: float = STOCK_TIMEOUT_S, **env: str
) -> tuple[list[Any], list[Worker]]:
    """Return each rank's result of stock's start: the all_reduced value, its exception, or TimeoutError for a hang."""
    workers = [node.spawn(folder) for node in nodes]
    _, port = workers[0].call(net_calls.stock_address)
    for rank, worker in enumerate(workers):
        worker.send(net_calls.stock_start, master_addr, port, rank, len(workers), timeout_s, **env)
    end = time.monotonic() + timeout_s + 1.5
    return [worker.answer(end) for worker in workers], workers


def probe(
    nodes: Sequence[Node], folder: Path, node_ips: Sequence[str] | None = None, options: Any = None, **env: str
) -> tuple[list[WorkerInfo], list[Worker]]:
    """Run our probe in a new process on every node."""
    workers = [node.spawn(folder) for node in nodes]
    return probe_workers(workers, node_ips, options, **env), workers


def probe_workers(
    workers: Sequence[Worker], node_ips: Sequence[str] | None = None, options: Any = None, **env: str
) -> list[WorkerInfo]:
    """Run our probe in existing processes."""
    options = options or Settings()
    ips = node_ips or [worker.node.ip for worker in workers]
    for rank, worker in enumerate(workers):
        worker.send(
            net_calls.our_probe, rank, worker.node.name, ips[rank], options.master_addr, options.master_port, **env
        )
    facts = [worker.answer(time.monotonic() + 20) for worker in workers]
    for found in facts:
        if isinstance(found, BaseException):
            raise found
    return facts


def instructions(
    facts: Sequence[WorkerInfo],
    options: Any = None,
    *,
    budget_s: float = 20.0,
    timeout_s: float = 30.0,
    verify: bool = False,
) -> tuple[list[WorkerPlan], Rendezvous]:
    """Return the plan of every rank from our decision, on the CPU."""
    options = replace(options or Settings(), timeout_s=timeout_s, verify=verify)
    decision = decide_start(facts, options)
    plan = plan_rendezvous(facts, options, decision.backend, facts[0].network.store_port)
    return StartPlan(decision, plan).worker_plans(facts, options, budget_s=budget_s, attempt="first"), plan


def start(
    facts: Sequence[WorkerInfo],
    workers: Sequence[Worker],
    options: Any = None,
    budget_s: float = 20.0,
    wait_for: Sequence[int] | None = None,
) -> tuple[list[Any], Rendezvous]:
    """Run our start on every node after our decision; return the answers of the ranks ``wait_for``, by default of all."""
    told, plan = instructions(facts, options, budget_s=budget_s)
    for worker, instruction in zip(workers, told, strict=True):
        worker.send(net_calls.our_start, instruction)
    end = time.monotonic() + budget_s + 5
    ranks = range(len(workers)) if wait_for is None else wait_for
    return [workers[rank].answer(end) for rank in ranks], plan


def ours(
    nodes: Sequence[Node], folder: Path, node_ips: Sequence[str] | None = None, options: Any = None, **env: str
) -> tuple[list[Any], Rendezvous, list[Worker]]:
    """Run our probe, decision and start."""
    facts, workers = probe(nodes, folder, node_ips, options, **env)
    results, plan = start(facts, workers, options)
    return results, plan, workers
