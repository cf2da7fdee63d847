"""Every name of Ray that a piece replaces, and what the change there would be.

The only list of its kind: nothing else in this folder assigns to a name of Ray. Checked
against Ray 2.60. A wrapper takes the name's present value and returns the new one.
"""

from dataclasses import dataclass
from typing import Dict, Tuple


@dataclass(frozen=True)
class Seam:
    """One name of Ray that a piece replaces.

    Attributes:
        target: ``module:name`` or ``module:Class.name``.
        wrapper: ``module:function`` that makes the new value from the old one.
        change: What a pull request would change there.
    """

    target: str
    wrapper: str
    change: str


@dataclass(frozen=True)
class Piece:
    """One pull request.

    Attributes:
        seams: What it replaces, in the order in which it is put in.
        requires: Pieces that it builds on.
    """

    seams: Tuple[Seam, ...] = ()
    requires: Tuple[str, ...] = ()


_ON_START = "ray.train.torch.config:_TorchBackend.on_start"

PIECES: Dict[str, Piece] = {
    "gloo_default": Piece(
        seams=(
            Seam(
                "ray.train.v2.torch.torch_trainer:TorchTrainer.__init__",
                "upstream.gloo_default:leave_backend_unset",
                "delete the default of the backend: on_start has it, and knows more",
            ),
            Seam(
                _ON_START,
                "upstream.gloo_default:on_start",
                "the default is gloo where torch of a worker has no NCCL",
            ),
        ),
    ),
    "shared_device": Piece(
        seams=(
            Seam(
                _ON_START,
                "upstream.shared_device:on_start",
                "look at the devices before NCCL does",
            ),
        ),
        # Without it TorchTrainer writes "nccl" into a config that left it open.
        requires=("gloo_default",),
    ),
    "bounded_start": Piece(
        seams=(
            Seam(
                "ray.train.torch.config:ray",
                "upstream.bounded_start:bounded_ray",
                "ray.get(setup_futures) becomes a wait with a bound and names",
            ),
            Seam(
                _ON_START,
                "upstream.bounded_start:on_start",
                "the same for execute and execute_single; end the workers on failure",
            ),
        ),
    ),
    "rllib_torch_config": Piece(
        seams=(
            Seam(
                "ray.rllib.algorithms.algorithm_config:AlgorithmConfig.learners",
                "upstream.rllib_torch_config:learners",
                "a new setting, torch_config",
            ),
            Seam(
                "ray.rllib.core.learner.learner_group:LearnerGroup.__init__",
                "upstream.rllib_torch_config:learner_group_init",
                "pass config.torch_config to _get_backend_config",
            ),
            Seam(
                "ray.rllib.core.learner.learner_group:_get_backend_config",
                "upstream.rllib_torch_config:get_backend_config",
                "derive from the given config instead of from a bare TorchConfig",
            ),
        ),
    ),
}
