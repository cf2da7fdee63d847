"""A start of the torch process group in which one rank does not answer."""

import os
import signal
import threading

import pytest
import torch.distributed as dist

import ray
import ray.train.torch.config
from ray.train import RunConfig, ScalingConfig
from ray.train._internal.worker_group import WorkerGroup as V1WorkerGroup
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.torch.config import _TorchBackend
from ray.train.v2.api.exceptions import TrainingFailedError

TIMEOUT_S, GRACE_PERIOD_S = 8, 2
# The stopped rank continues then, so a start without a timeout also ends.
RESUME_AFTER_S = 60


def stop_this_process(path):
    with open(path, "w") as file:
        file.write(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


class StoppedRankBackend(_TorchBackend):
    """Stop rank 1 by a signal, like a rank on a node that swaps heavily."""

    def on_start(self, worker_group, backend_config):
        ray.train.torch.config._START_GRACE_PERIOD_S = GRACE_PERIOD_S
        worker_group.execute(dist.is_available)  # imports torch
        worker_group.execute_single_async(1, stop_this_process, backend_config.path)
        super().on_start(worker_group, backend_config)


class StoppedRankConfig(TorchConfig):
    def __init__(self, path):
        super().__init__("gloo", timeout_s=TIMEOUT_S)
        self.path = path

    @property
    def backend_cls(self):
        return StoppedRankBackend


@pytest.fixture
def stopped(tmp_path):
    """Return the file with the stopped rank's process id; then continue and end it."""
    path = tmp_path / "pid"

    def send(signal_number):
        try:
            os.kill(int(path.read_text()), signal_number)
        except (FileNotFoundError, ProcessLookupError):
            pass  # it did not begin, or was ended with its worker group

    def resume():
        while not path.exists():
            if ended.wait(0.1):
                return
        if not ended.wait(RESUME_AFTER_S):
            send(signal.SIGCONT)

    ended = threading.Event()
    thread = threading.Thread(target=resume)
    thread.start()
    yield path
    ended.set()
    thread.join()
    send(signal.SIGKILL)


def no_answer(path):
    address = f"ip={ray.util.get_node_ip_address()}, pid={path.read_text()}"
    return f"No answer from rank 1 ({address}). See the logs of these workers"


def test_ranks_that_do_not_answer_are_named(ray_start_4_cpus, stopped, tmp_path):
    """The start ends within its timeout and names rank, node and process."""
    trainer = TorchTrainer(
        lambda: None,
        torch_config=StoppedRankConfig(str(stopped)),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path)),
    )
    with pytest.raises(TrainingFailedError) as raised:
        trainer.fit()
    assert no_answer(stopped) in str(raised.value)


def test_ranks_of_v1_are_named(ray_start_4_cpus, stopped, monkeypatch):
    """V1 worker groups have the same timeout and the same error."""
    monkeypatch.setattr(ray.train.torch.config, "_START_GRACE_PERIOD_S", GRACE_PERIOD_S)
    worker_group = V1WorkerGroup(num_workers=2, resources_per_worker={"CPU": 1})
    try:
        worker_group.execute(dist.is_available)
        worker_group.execute_single_async(1, stop_this_process, str(stopped))
        with pytest.raises(TimeoutError) as raised:
            _TorchBackend().on_start(
                worker_group, TorchConfig("gloo", timeout_s=TIMEOUT_S)
            )
        assert no_answer(stopped) in str(raised.value)
    finally:
        worker_group.shutdown(patience_s=0)
