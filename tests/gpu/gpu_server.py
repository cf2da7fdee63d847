"""A process with one local Ray that runs jobs: a JSON line in on stdin, a JSON line out on stdout."""

from __future__ import annotations

import json
import os
import sys
import threading
import time

import ray

from tests.cuda import cuda_jobs
from tests.gpu import gpu_libraries, gpu_training

JOBS = {**gpu_training.JOBS, **gpu_libraries.JOBS, **cuda_jobs.JOBS}


def causes(error: BaseException | None) -> list[dict[str, str]]:
    """An error and all that caused it: the V1 engine keeps the cause apart."""
    found = []
    while error is not None and len(found) < 20:
        found.append({"type": type(error).__name__, "text": str(error)})
        error = error.__cause__ or error.__context__
    return found


def end_with_parent() -> None:
    """Ends this process, and Ray with it, when the process that asks is gone."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main() -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed belongs to the log
    num_cpus, num_gpus = (int(os.environ[f"GPU_TESTS_NUM_{kind}"]) for kind in ("CPUS", "GPUS"))
    ray.init(address="local", num_cpus=num_cpus, num_gpus=num_gpus, include_dashboard=False, log_to_driver=True)
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = {"ranks": JOBS[job["name"]](job), "errors": []}
        except Exception as error:
            answer = {"ranks": [], "errors": causes(error)}
        answers.write(json.dumps(answer) + "\n")
    ray.shutdown()


if __name__ == "__main__":
    main()
