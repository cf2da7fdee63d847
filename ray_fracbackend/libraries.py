"""What training libraries have to be told by environment variables where they cannot find it out. Pure.

Read in Accelerate 1.15.0, on which transformers.Trainer stands (PartialState._prepare_backend, Accelerator.prepare_model).
"""

from __future__ import annotations

from collections.abc import Mapping

from ray_fracbackend.facts import WorkerFacts
from ray_fracbackend.start_plan import StartPlan

# Without it, Accelerate looks for an accelerator, finds none, and lets every rank train by itself, in silence.
ACCELERATE_ON_CPU: Mapping[str, str] = {"ACCELERATE_USE_CPU": "true"}
# Without it, Accelerate hands LOCAL_RANK to DDP as the index of the model's device.
ACCELERATE_ON_SHARED_DEVICE: Mapping[str, str] = {"ACCELERATE_BYPASS_DEVICE_MAP": "true"}


def library_env(worker: WorkerFacts, plan: StartPlan) -> Mapping[str, str]:
    """Variables for one worker, to be set where the user did not; none where nothing differs from stock Ray Train.

    Args:
        worker: The worker.
        plan: What the start will do.
    """
    if plan.device_type == "cpu":
        return ACCELERATE_ON_CPU if worker.gpu_fraction > 0 else {}
    return ACCELERATE_ON_SHARED_DEVICE if plan.share_groups else {}
