"""A start of the torch process group in which a rank does not answer."""

import os
import signal
import threading

import pytest

import ray
import ray.train.torch.config
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.torch.config import _TorchBackend
from ray.train.v2.api.exceptions import TrainingFailedError

TIMEOUT_S = 3
# When the stopped rank goes on, so that a start without a bound ends as well.
RESUME_AFTER_S = 40


def stop_this_process(path):
    with open(path, "w") as file:
        file.write(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


class StoppedRankBackend(_TorchBackend):
    """Rank 1 is stopped by a signal, as one of a node that swaps to death."""

    def on_start(self, worker_group, backend_config):
        ray.train.torch.config._START_GRACE_PERIOD_S = 1
        worker_group.execute_single_async(1, stop_this_process, backend_config.path)
        super().on_start(worker_group, backend_config)


class StoppedRankConfig(TorchConfig):
    def __init__(self, path):
        super().__init__("gloo", timeout_s=TIMEOUT_S)
        self.path = path

    @property
    def backend_cls(self):
        return StoppedRankBackend


def test_ranks_that_do_not_answer_are_named(ray_start_4_cpus, tmp_path):
    """The start ends within its timeout, with rank, node and process of the culprit."""
    path = tmp_path / "pid"

    def send(signal_number):
        if path.exists():
            os.kill(int(path.read_text()), signal_number)

    resume = threading.Timer(RESUME_AFTER_S, send, [signal.SIGCONT])
    resume.start()
    trainer = TorchTrainer(
        lambda: None,
        torch_config=StoppedRankConfig(str(path)),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path)),
    )
    try:
        with pytest.raises(TrainingFailedError) as raised:
            trainer.fit()
        assert resume.is_alive(), "the start ended because the rank went on"
    finally:
        resume.cancel()
        try:
            send(signal.SIGKILL)
        except ProcessLookupError:  # it was ended with its worker group
            pass
    address = f"ip={ray.util.get_node_ip_address()}, pid={path.read_text()}"
    assert f"No answer from rank 1 ({address}). See the logs" in str(raised.value)
