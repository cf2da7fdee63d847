"""One engine of Ray Train in a process of its own that can be killed; a job that hangs costs its own time only."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from tests.processes import train_worker_processes

ROOT = Path(__file__).parents[2]
_START_S = 90.0
# Ray starts as many idle workers at once.
_NUM_CPUS = 10


class Engine:
    """Runs jobs under the V1 or V2 engine, each bounded, in a Ray of its own.

    Args:
        version: ``v1`` or ``v2``.
        num_gpus: GPUs in Ray's books.
        env: Variables for the process, its Ray and all workers; None removes one.
    """

    def __init__(self, version: str, num_gpus: int = 1, **env: str | None) -> None:
        self.version = version
        wanted = {
            **os.environ,
            "RAY_TRAIN_V2_ENABLED": str(int(version == "v2")),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "GPU_TESTS_NUM_CPUS": str(_NUM_CPUS),
            "GPU_TESTS_NUM_GPUS": str(num_gpus),
            "RAY_DEDUP_LOGS": "0",
            # V2's controller looks at its workers every 2 s otherwise, and one process more waits for preemptions.
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
            "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
            **env,
        }
        self._env = {name: value for name, value in wanted.items() if value is not None}
        self._process: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="gpu-tests-", ignore_cleanup_errors=True)
        self._num_jobs = 0

    def run(self, name: str, timeout_s: float = 100.0, **job: Any) -> dict[str, Any]:
        """Run a job of `gpu_server.JOBS` with these arguments; after `timeout_s` the process and all its children are killed.

        Returns:
            ``ranks``, what each rank told, and ``errors``, type and text of the error that it ended with and its causes.

        Raises:
            TimeoutError: The job did not end in time; the message has the end of the log.
        """
        if self._process is None:
            self._start()
        self._num_jobs += 1
        out = str(Path(self._folder.name) / f"job{self._num_jobs}")
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"name": name, "engine": self.version, "out": out, **job}) + "\n")
        self._process.stdin.flush()
        return self._answer(timeout_s, f"job {name} {job}")

    def start_report(self) -> dict[str, Any]:
        """The report in the results folder of the last job's start, also of a start that failed."""
        folder = Path(self._folder.name) / f"job{self._num_jobs}_storage"
        report: dict[str, Any] = json.loads((folder / "run" / "start_report.json").read_text())
        return report

    def train_workers(self) -> list[psutil.Process]:
        assert self._process is not None
        return train_worker_processes(psutil.Process(self._process.pid))

    def close(self) -> None:
        if self._process is not None:
            _kill_tree(self._process)
            self._process = None
        self._folder.cleanup()

    def _start(self) -> None:
        self._log = Path(self._folder.name) / "log.txt"
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.gpu_server"],
                cwd=ROOT,
                env=self._env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=_read_lines, args=(self._process, self._answers), daemon=True).start()
        self._answer(_START_S, "starting Ray")

    def _answer(self, timeout_s: float, what: str) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            line = ""
            ending = f"did not end within {timeout_s:g} s"
        else:
            ending = "ended its process"
        if not line:
            if self._process is not None:
                _kill_tree(self._process)
                self._process = None
            raise TimeoutError(
                f"{what} under {self.version} {ending}; end of its log:\n{self._log.read_text()[-3000:]}"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def engines_by_version(variables: Callable[[], dict[str, str]] = dict) -> Iterator[Callable[[str], Engine]]:
    """Engines by version, started on first use, each with new variables."""
    with ExitStack() as stack:
        yield cache(lambda version: stack.enter_context(closing(Engine(version, **variables()))))


def _read_lines(process: subprocess.Popen[str], answers: queue.Queue[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        answers.put(line)
    answers.put("")


def _kill_tree(process: subprocess.Popen[str]) -> None:
    try:
        everything = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        everything = []
    for one in everything:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait(timeout=30)
