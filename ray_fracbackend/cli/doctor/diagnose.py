"""Command ``doctor``: collect reports of this machine or of every node of a Ray cluster, and check them. Runs on the driver.

Neither Ray nor torch is imported at the top, because the doctor reports why they cannot be imported.
"""

from __future__ import annotations

import pickle
import re
from typing import Any

from ray_fracbackend import __version__
from ray_fracbackend.cli.connect.address import ClusterError
from ray_fracbackend.cli.connect.cluster import check_address, connected
from ray_fracbackend.cli.doctor.checks import check_cluster, check_machine, own_values
from ray_fracbackend.cli.doctor.collect import Collector, collect_machine, collect_packed, reserve_s
from ray_fracbackend.cli.doctor.environment import environment_of
from ray_fracbackend.cli.doctor.report import Check, Diagnosis, MachineInfo
from ray_fracbackend.cli.progress import root_cause, wait
from ray_fracbackend.timeouts import Deadline, bounded

# Ray hides GPUs from a task that requests none; with this variable the node's own CUDA_VISIBLE_DEVICES stays.
_ALL_DEVICES = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}


def diagnose_machine(timeout_s: float = 60.0) -> Diagnosis:
    """Check this machine.

    Args:
        timeout_s: Time limit in seconds; no answer within it is a problem.
    """
    return _of_one(collect_machine(timeout_s))


def _of_one(machine: MachineInfo, *more: Check) -> Diagnosis:
    checks = (*more, *check_machine(machine))
    return Diagnosis({f"this machine ({machine.worker.hostname})": checks}, environment=environment_of(machine))


def diagnose_cluster(address: str, timeout_s: float) -> Diagnosis:
    """Check every node of a running cluster; a node that does not answer is a problem.

    Args:
        address: Address of the cluster, as for ``ray.init``; ``auto`` for the cluster of this machine.
        timeout_s: Time limit of connection and answers together, in seconds.

    Raises:
        ClusterError: There is no connection to the cluster.
    """
    deadline = Deadline(timeout_s)
    check_address(address, deadline.left_s)
    with Collector(deadline.left_s) as here:
        here.run(until="ray")
        if "ray" not in here.done:
            here.run()
            fix = "first fix the problems below"
            return _of_one(
                here.machine(), Check("cluster", "problem", f"{address} is not checked, because this needs Ray", fix)
            )
        with connected(address, deadline.left_s):
            nodes, answers = _ask_all(deadline)
        here.run()
        machine = here.machine()
    found = [answer for answer in answers if isinstance(answer, MachineInfo)]
    checks = {_name(node): _checks(answer, len(nodes)) for node, answer in zip(nodes, answers, strict=True)}
    own = {
        _name(node): own_values(answer)
        for node, answer in zip(nodes, answers, strict=True)
        if isinstance(answer, MachineInfo)
    }
    return Diagnosis(checks, check_cluster(found), environment_of(machine, found), own)


def _ask_all(deadline: Deadline) -> tuple[list[dict[str, Any]], list[MachineInfo | Check]]:
    import ray

    try:
        nodes = [node for node in bounded(ray.nodes, deadline.left_s) if node["Alive"]]
    except TimeoutError:
        text = f"the cluster did not list its nodes within {deadline.budget_s:.3g} s; check the head node, or raise --timeout-s"
        raise ClusterError(text, "no_answer") from None
    return nodes, _ask(nodes, deadline.left_s)


def _name(node: dict[str, Any]) -> str:
    return f"node {node['NodeManagerAddress']} ({node['NodeManagerHostname']}, {node['NodeID'][:8]})"


def _checks(answer: MachineInfo | Check, num_nodes: int) -> tuple[Check, ...]:
    if isinstance(answer, Check):
        return (answer,)
    return check_machine(answer, num_nodes)


def _other_version(cause: str) -> Check:
    fix = f"install ray_fracbackend {__version__} on that node, as on this machine"
    return Check("node", "problem", f"another version of ray_fracbackend is installed: {cause}", fix)


def _ask(nodes: list[dict[str, Any]], timeout_s: float) -> list[MachineInfo | Check]:
    """Collect the report of every node, or a line with the reason if there is none."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Pickled by reference, so that the node's own installation is checked.
    remote = ray.remote(num_cpus=0, max_retries=0, runtime_env=_ALL_DEVICES)(collect_packed)
    refs = []
    for node in nodes:
        here = remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
        gpus = node["Resources"].get("GPU", 0.0)
        # Ray first starts a worker there.
        refs.append(here.remote(timeout_s - reserve_s(timeout_s), node["NodeID"], node["NodeManagerAddress"], gpus))
    pending = wait(refs, timeout_s, "asking the nodes")
    return [_answer(ref, ref not in pending, timeout_s) for ref in refs]


def _answer(ref: Any, done: bool, timeout_s: float) -> MachineInfo | Check:
    import ray

    if not done:
        ray.cancel(ref, force=True)
        fix = "look at the node's logs and load, or raise --timeout-s"
        return Check("node", "problem", f"no answer within {timeout_s:.3g} s", fix)
    try:
        version, packed = ray.get(ref)
    except Exception as error:  # any error of the node is a line of the result
        cause = root_cause(error)
        return _failed_node(f"{type(cause).__name__}: {cause}")
    if version != __version__:
        return _other_version(version)
    machine: MachineInfo = pickle.loads(packed)
    return machine


def _failed_node(text: str) -> Check:
    """Return the line of a node that could not run the function; the text of Ray's own error may contain the reason."""
    if missing := re.search(r"No module named '([^'.]+)((?:\.[^'.]+)*)'", text):
        if missing[2] and missing[1] == "ray_fracbackend":
            return _other_version(f"it has no {missing[1]}{missing[2]}")
        fix = f"install {missing[1]} on that node, as on the other nodes"
        return Check("node", "problem", f"No module named '{missing[1]}'", fix)
    if lacks := re.search(r"(?:AttributeError|ImportError|TypeError): (.*(?:ray_fracbackend|collect_packed).*)", text):
        return _other_version(lacks[1])
    return Check("node", "problem", text.splitlines()[0], "look at the node's logs")
