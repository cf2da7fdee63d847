"""Runs the collective probe before training in a Ray without ``ray.train.health``.

Stands in for what the proposal gives to Ray: the probe runs once on each node of the
worker group, in a process of its own with a hard limit, before the process group.
Ray Train loads it by its own hook, ``RAY_TRAIN_CALLBACKS``.
"""

import multiprocessing
from typing import Any, Dict, List

from ray_fracbackend.errors import VerificationError

from upstream.collective_probe import CollectiveProbe
from upstream.health_contract import ProbeResult, PushContext

import ray
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.util.annotations import DeveloperAPI

# A new process imports torch before its probe begins.
_PROCESS_START_S = 60.0


@DeveloperAPI
class CollectivePreflight(WorkerGroupCallback):
    """Refuses to start a worker group whose nodes cannot do collectives together.

    Args:
        backend: As in ``CollectiveProbe``.
        timeout_s: Seconds for the probe.
    """

    def __init__(self, backend: str = "gloo", timeout_s: float = 60.0):
        self._backend = backend
        self._timeout_s = timeout_s

    def before_init_train_context(self, workers: List[Any]) -> Dict[str, List[Any]]:
        """Probes the nodes of the new workers.

        Raises:
            VerificationError: The probe failed on a node; the message has all results.
        """
        results = self.probe_nodes(workers)
        if all(result.passed for result in results.values()):
            return {}
        told = "; ".join(
            f"node {node_id}: {_verdict(result)}" for node_id, result in results.items()
        )
        raise VerificationError(f"pre-flight: collectives between nodes failed. {told}")

    def probe_nodes(self, workers: List[Any]) -> Dict[str, ProbeResult]:
        """Runs the probe once on each node, by the first worker there."""
        first: Dict[str, Any] = {}
        for worker in workers:
            first.setdefault(worker.metadata.node_id, worker)
        probe = CollectiveProbe(self._backend, self._timeout_s)
        refs = [
            worker.execute_async(
                poll_in_process,
                probe,
                PushContext(node_id, list(first), self._timeout_s),
            )
            for node_id, worker in first.items()
        ]
        return dict(zip(first, ray.get(refs)))


def poll_in_process(probe: CollectiveProbe, ctx: PushContext) -> ProbeResult:
    """Polls a probe in a new process, which is killed when its time is over."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_poll, args=(probe, ctx, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if receiver.poll(ctx.timeout_s + _PROCESS_START_S):
            return receiver.recv()
        return ProbeResult(passed=False, detail=f"no result in {ctx.timeout_s:g} s")
    except EOFError:
        return ProbeResult(passed=False, detail="the probe's process died")
    finally:
        process.kill()
        process.join()


def _send_poll(probe: CollectiveProbe, ctx: PushContext, sender: Any) -> None:
    sender.send(probe.poll(ctx))


def _verdict(result: ProbeResult) -> str:
    word = {True: "passed", False: "FAILED", None: "not at fault"}[result.passed]
    return f"{word} ({result.detail})"
