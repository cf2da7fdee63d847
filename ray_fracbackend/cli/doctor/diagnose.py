"""Collect facts about this machine or about every node of a Ray cluster, and check them. Runs on the driver.

Ray is imported only for a cluster, and torch never, because the doctor reports why they cannot be imported.
"""

from __future__ import annotations

from typing import Any

from ray_fracbackend import __version__
from ray_fracbackend.cli.doctor.checks import check_cluster, check_machine, environment_variables
from ray_fracbackend.cli.doctor.facts import Facts, collect_facts
from ray_fracbackend.cli.doctor.report import Node
from ray_fracbackend.timeouts import Deadline

# Ray hides GPUs from a task that requests none; with this variable the node's own CUDA_VISIBLE_DEVICES stays.
_ALL_DEVICES = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
# Time for a node to start the task and to send its answer.
_RESERVE_S = 10.0


def diagnose_machine(timeout_s: float) -> list[Node]:
    """Check this machine; no answer within this time is a problem."""
    facts = collect_facts(timeout_s)
    return [Node("this machine", check_machine(facts), environment_variables(facts))]


def diagnose_cluster(timeout_s: float) -> list[Node]:
    """Check every node of the cluster that this process is connected to; no answer within this time is a problem."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    deadline = Deadline(timeout_s)
    # Pickled by reference, so that the node's own installation is checked.
    task = ray.remote(num_cpus=0, max_retries=0, runtime_env=_ALL_DEVICES)(collect_facts)
    refs = []
    nodes = [node for node in ray.nodes() if node["Alive"]]
    for node in nodes:
        on_node = task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
        refs.append(on_node.remote(max(timeout_s - _RESERVE_S, timeout_s / 2), node["NodeManagerAddress"]))
    answers = [
        _answer(ref, deadline) | {"num_nodes": len(nodes), "num_gpus": node["Resources"].get("GPU", 0.0)}
        for node, ref in zip(nodes, refs, strict=True)
    ]
    found = []
    for node, facts in zip(nodes, answers, strict=True):
        name = f"node {node['NodeManagerAddress']} ({node['NodeManagerHostname']}, {node['NodeID'][:8]})"
        found.append(Node(name, check_machine(facts), environment_variables(facts)))
    different = check_cluster(answers)
    return [*found, Node("between the nodes", different)] if different else found


def _answer(ref: Any, deadline: Deadline) -> Facts:
    """Return the facts about a node, or the reason why there are none."""
    import ray

    try:
        facts: Facts = ray.get(ref, timeout=deadline.left_s)
        if facts["ray_fracbackend"] == __version__:
            return facts
        failure = f"it has ray_fracbackend {facts['ray_fracbackend']}"
    except ray.exceptions.GetTimeoutError:
        failure = f"no answer within {deadline.budget_s:.3g} s (--timeout-s)"
    except Exception as error:  # any error of the node is a line of the result
        failure = (str(error).strip() or repr(error)).splitlines()[-1]
    return {"failed_stage": "node", "failure": failure}
