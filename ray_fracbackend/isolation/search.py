"""Search for the fault of a failed start with a helper process on every worker.

Runs only after a failure. ``with_faults`` and ``find_faults`` run on the driver, the other functions on the workers.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any

from ray_fracbackend.collect import collect
from ray_fracbackend.decide.interfaces import IFNAME
from ray_fracbackend.decide.plan import WorkerPlan
from ray_fracbackend.decide.rendezvous import WorkerRendezvous
from ray_fracbackend.decide.worker_info import WorkerAddress
from ray_fracbackend.errors import FracBackendError, GroupFormationError, VerificationError
from ray_fracbackend.isolation.faults import Fault, Findings, diagnose, num_rounds, partner, peers_of
from ray_fracbackend.isolation.helper import HelperAddress, HelperTask
from ray_fracbackend.log import logger
from ray_fracbackend.timeouts import Deadline, bounded, seconds_text
from ray_fracbackend.worker.network import route_address, route_interface
from ray_fracbackend.worker.state import STATE

# The search may use the time that is left of the start, but at least this part of it and at most _MAX_S.
_PART = 0.25
_MAX_S = 60.0
_NUM_FAULTS = 4
# Minimum time for a helper to import torch and run a test, and maximum time for each of its steps.
MIN_S = 10.0
_LINK_S, _ROUND_S, _ANSWER_S = 3.0, 3.0, 1.0

# A helper's resolver waits one second for a name server that does not answer, not ten.
_RESOLVER = "timeout:1"


def with_faults(
    error: FracBackendError,
    worker_group: Any,
    plans: Sequence[WorkerPlan],
    addresses: Sequence[WorkerAddress],
    deadline: Deadline,
    start_timeout_s: float,
    busy: Collection[int] = (),
) -> FracBackendError:
    """Add the ranks, nodes and links at fault to the error of a group that did not form or failed its verification.

    Args:
        error: The error of the start. An error of another class is returned unchanged, and so is this one if no fault is
            found.
        worker_group: Workers whose start has failed.
        plans: Plan of each rank, by rank.
        addresses: Node and process of each rank.
        deadline: Deadline of the start.
        start_timeout_s: Time limit of the start in seconds. The search may use the time that is left of it, at least a
            quarter.
        busy: Ranks that are still in the failed start. They are not called silent: a call to them waits for it.
    """
    if not isinstance(error, (GroupFormationError, VerificationError)):
        return error
    search_s = min(_MAX_S, max(deadline.left_s, start_timeout_s * _PART))
    if search_s >= MIN_S:
        logger.info("the start failed: searching for the rank or link at fault, up to %s s", seconds_text(search_s))
    faults = find_faults(worker_group, plans, addresses, Deadline(search_s), busy)
    if not faults:
        return error
    found = "; ".join(fault.text for fault in faults[:_NUM_FAULTS])
    ranks = {rank for fault in faults for rank in fault.ranks}
    return error.restated(f"{error} Search for the fault: {found}.", ranks={*error.ranks, *ranks})


def find_faults(
    worker_group: Any,
    plans: Sequence[WorkerPlan],
    addresses: Sequence[WorkerAddress],
    deadline: Deadline,
    busy: Collection[int] = (),
) -> list[Fault]:
    """Find the fault of a failed start, in two remote calls per worker and ``ceil(log2(N))`` rounds of pairs.

    Args:
        worker_group: Workers whose start has failed.
        plans: Plan of each rank, by rank.
        addresses: Node and process of each rank.
        deadline: Deadline of the search.
        busy: As in `with_faults`.

    Returns:
        The faults, the most severe first; empty if too little time is left.
    """
    if deadline.left_s < MIN_S:
        return []
    opening_s = deadline.left_s / 2
    refs = [worker_group.execute_single_async(plan.rank, open_helper, plan.rendezvous, opening_s) for plan in plans]
    helpers: dict[int, HelperAddress] = collect(refs, opening_s + _ANSWER_S)
    left_s, rounds = deadline.left_s - _ANSWER_S, num_rounds(len(addresses))
    link_s, round_s = min(_LINK_S, left_s * 0.4), min(_ROUND_S, left_s * 0.6 / max(1, rounds))
    token = secrets.token_hex(16)
    refs = []
    for rank in helpers:
        partners = [partner(rank, number, len(addresses)) for number in range(rounds)]
        task = HelperTask(
            rank=rank,
            token=token,
            peers={peer: helpers[peer] for peer in peers_of(rank, len(addresses)) if peer in helpers},
            partners=tuple(peer if peer in helpers else None for peer in partners),
            device=plans[rank].device,
            link_s=link_s,
            round_s=round_s,
        )
        refs.append(worker_group.execute_single_async(rank, run_helper, task))
    answers = collect(refs, link_s + rounds * round_s + _ANSWER_S)
    findings = {rank: answers[index] for index, rank in enumerate(helpers) if index in answers}
    return diagnose(findings, [address.text for address in addresses], busy)


def open_helper(rendezvous: WorkerRendezvous, timeout_s: float) -> HelperAddress:
    """Start this worker's helper. It listens on this node's address on its route to rank 0.

    Args:
        rendezvous: The worker's part of the rendezvous.
        timeout_s: Time limit in seconds.

    Raises:
        TimeoutError: The helper did not start in time.
        RuntimeError: The helper ended.
    """
    close_helper()
    # The helper can import everything that this process can import.
    env = {
        **os.environ,
        "RES_OPTIONS": f"{os.environ.get('RES_OPTIONS', '')} {_RESOLVER}".strip(),
        **rendezvous.env,
        **rendezvous.start_env,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    interface = route_interface(rendezvous.master_addr) if rendezvous.interface_by_route else None
    if interface:
        env.setdefault(IFNAME, interface)
    address = route_address(rendezvous.master_addr) or rendezvous.master_addr
    command = [sys.executable, "-m", "ray_fracbackend.isolation.helper", address]
    helper = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    STATE.fault_helper = helper
    try:
        return HelperAddress(**_answer(helper, timeout_s))
    except BaseException:
        close_helper()
        raise


def run_helper(task: HelperTask) -> Findings:
    """Run the task of this worker's helper, and end the helper.

    Raises:
        TimeoutError: The helper did not answer in time.
        RuntimeError: The helper ended.
    """
    helper = STATE.fault_helper
    if helper is None or helper.stdin is None:
        raise RuntimeError("open_helper was not called in this process")
    try:
        print(json.dumps(asdict(task)), file=helper.stdin, flush=True)
        return Findings.from_json(_answer(helper, task.link_s + len(task.partners) * task.round_s + _ANSWER_S))
    finally:
        close_helper()


def close_helper() -> None:
    """Kill this worker's helper, if there is one."""
    if STATE.fault_helper is not None:
        STATE.fault_helper.kill()
        STATE.fault_helper.communicate()
    STATE.fault_helper = None


def _answer(helper: subprocess.Popen[str], timeout_s: float) -> Any:
    stdout = helper.stdout
    assert stdout is not None
    line = bounded(stdout.readline, timeout_s)
    if not line:
        raise RuntimeError(f"the helper ended with exit code {helper.wait(timeout_s)}")
    return json.loads(line)
