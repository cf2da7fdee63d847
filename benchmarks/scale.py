"""What does a start cost the driver as the job grows, in simulation, and what does it cost real processes?

Simulated: the driver's real code for probe, plan, rendezvous, start and report, with a worker group that answers at
once with made-up `WorkerInfo`, and a Ray without messages. The seconds are therefore the driver's own. Bytes are those
of the pickled arguments and results. Real: forked processes that start and verify a Gloo group, without Ray.

usage: python benchmarks/scale.py [--simulated 1000 10000 100000] [--real 2 8 32 64] [--out FOLDER]
"""

from __future__ import annotations

import multiprocessing
import pickle
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from common import parser, save
from planning import made_up_workers

from ray_fracbackend import __version__
from ray_fracbackend.decide.plan import WorkerPlan
from ray_fracbackend.decide.rendezvous import plan_rendezvous
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.decide.worker_info import NetworkInfo, WorkerAddress, WorkerInfo
from ray_fracbackend.start import backend, collect
from ray_fracbackend.verify.result import VerificationResult
from ray_fracbackend.worker import group_end, probe, process_group, store

_REPEATS = 3


class Metadata:
    """Ray's metadata of a worker."""

    def __init__(self, worker: WorkerInfo) -> None:
        self.metadata = WorkerAddress(worker.rank, worker.node_ip, worker.pid, worker.node_id)


class SimulatedGroup:
    """A worker group without processes."""

    def __init__(self, num_workers: int) -> None:
        workers = made_up_workers(num_workers, 2)
        facts = [replace(worker, network=network(worker)) for worker in workers]
        self._workers = [Metadata(worker) for worker in workers]
        figures = VerificationResult(
            backend="gloo",
            device="cuda:0",
            world_size=num_workers,
            latency_s=0.001,
            bandwidth_bytes_per_s=1e9,
            rank_seconds=(0.002,) * num_workers,
            total_s=0.01,
        )
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        # As real workers answer: version and WorkerInfo of each; the verification result from rank 0.
        self.answers: dict[str, list[Any]] = {
            probe.probe_worker.__name__: [(__version__, asdict(each)) for each in facts],
            process_group.start_worker.__name__: [figures] + [None] * (num_workers - 1),
        }

    def get_workers(self) -> Sequence[Metadata]:
        return self._workers

    def execute_single_async(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        self.calls.append((function, args))
        return Answer(self.answers[function.__name__][rank])


class Answer:
    """A reference to a result that already exists."""

    def __init__(self, value: Any) -> None:
        self.value = value


class SimulatedRay:
    """The functions of Ray that the driver's code calls."""

    ObjectRef = Answer
    put = staticmethod(lambda value: Answer(None))
    wait = staticmethod(lambda refs, **_: (refs, []))
    get = staticmethod(lambda refs: [ref.value for ref in refs])


def network(worker: WorkerInfo) -> NetworkInfo:
    return NetworkInfo(
        network_id=f"{worker.boot_id}/1",
        interfaces={"lo": ("127.0.0.1",), "eth0": (worker.node_ip,)},
        store_port=29500 if worker.rank == 0 else None,
    )


def simulate(num_workers: int) -> dict[str, Any]:
    """Return the median seconds of each phase, and the bytes that each round would send."""
    runs = []
    for _ in range(_REPEATS):
        group = SimulatedGroup(num_workers)
        started = time.perf_counter()
        report = backend.Start(group, Settings()).run()
        total_s = time.perf_counter() - started
        told = time.perf_counter()
        report.log_line(), report.to_json()
        probe_s, start_s = report.seconds["probe"], report.seconds["start"]
        runs.append(
            {
                "probe_s": probe_s,
                "plan_s": total_s - probe_s - start_s,
                "start_s": start_s,
                "report_s": time.perf_counter() - told,
            }
        )
    sent = {function.__name__: 0 for function, _ in group.calls}
    for function, args in group.calls:
        sent[function.__name__] += len(pickle.dumps(args))
    return {
        "num_workers": num_workers,
        **{phase: statistics.median(run[phase] for run in runs) for phase in runs[0]},
        "rounds": len(group.calls) / num_workers,
        "bytes_to_workers": sent,
        "bytes_from_workers": {
            name: sum(len(pickle.dumps(answer)) for answer in told) for name, told in group.answers.items()
        },
    }


def real(num_ranks: int) -> dict[str, Any]:
    """Return the seconds until every process has its Gloo group, verified."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    facts = [
        replace(worker, node_id="node", network=NetworkInfo(store_port=port if worker.rank == 0 else None))
        for worker in made_up_workers(num_ranks, 1)
    ]
    rendezvous = plan_rendezvous(facts, Settings(), "gloo", facts[0].network.store_port)
    context = multiprocessing.get_context("fork")
    answers: Any = context.Queue()
    instructions = [
        WorkerPlan(
            rank=rank,
            world_size=num_ranks,
            backend="gloo",
            device="cpu",
            master_addr=rendezvous.master_addrs[rank],
            master_port=rendezvous.master_port,
            env=rendezvous.env_of(facts[rank]),
            timeout_s=600,
            budget_s=600,
            attempt="first",
            verify=True,
        )
        for rank in range(num_ranks)
    ]
    processes = [context.Process(target=start_one, args=(answers, each), daemon=True) for each in instructions]
    started = time.perf_counter()
    for process in processes:
        process.start()
    results = [answers.get(timeout=600) for _ in processes]
    (figures,) = [figures for _, figures in results if figures is not None]
    total_s = time.perf_counter() - started
    for process in processes:
        process.join(30)
    return {
        "num_ranks": num_ranks,
        "total_s": total_s,
        "median_start_s": statistics.median(seconds for seconds, _ in results),
        "verification_s": figures.total_s,
    }


def start_one(answers: Any, instruction: WorkerPlan) -> None:
    started = time.perf_counter()
    if instruction.rank == 0:
        store.hold_store(instruction.master_port, one_node=True)
    figures = process_group.start_worker(instruction)
    answers.put((time.perf_counter() - started, figures))
    answers.close()
    answers.join_thread()
    group_end.end_process_group()


def main() -> None:
    command_line = parser(__doc__ or "")
    command_line.add_argument("--simulated", type=int, nargs="*", default=[1_000, 10_000, 100_000])
    command_line.add_argument("--real", type=int, nargs="*", default=[2, 8, 32, 64])
    arguments = command_line.parse_args()
    really = []
    for num_ranks in arguments.real:
        really.append(real(num_ranks))
        print(really[-1], flush=True)
    backend.ray = collect.ray = SimulatedRay  # type: ignore[attr-defined,assignment]
    simulated = []
    for num_workers in arguments.simulated:
        simulated.append(simulate(num_workers))
        print(simulated[-1], flush=True)
    print(save("scale", arguments.out, {"simulated": simulated, "real": really}))


if __name__ == "__main__":
    main()
