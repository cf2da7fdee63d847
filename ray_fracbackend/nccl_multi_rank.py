"""NCCL with several ranks on one GPU: its flags, and what its refusals and hangs mean. Pure.

The feature is experimental in NCCL, since 2.30 (env.rst, NCCL_MULTI_RANK_GPU_ENABLE): every rank takes channels of its
own, and too few resources for all of them end in a hang.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ray_fracbackend.errors import FracBackendError, SharedDeviceError, StartTimeoutError, VerificationError
from ray_fracbackend.facts import WorkerFacts, ranks_text
from ray_fracbackend.nccl_words import is_invalid_usage, refusal_in
from ray_fracbackend.sharing import MULTI_RANK_ENV, mig_siblings, share_text, versions_text
from ray_fracbackend.start_plan import StartPlan

# CTAs for all ranks of a device together: NCCL's defaults are said to be enough for two ranks.
_CTAS_PER_DEVICE = 8


def multi_rank_env(num_ranks: int, several_nodes: bool = False) -> dict[str, str]:
    """Variables that NCCL 2.30 or newer needs for several ranks on one GPU.

    NVLS is switched off by name: with several ranks a GPU it is incompatible, and 2.30.7 finds that out from the last
    pair of ranks alone (init.cc, ``hasMultiRankNvml``).

    Args:
        num_ranks: Ranks on the fullest GPU, at least one.
        several_nodes: The job has more than one node.
    """
    env = {MULTI_RANK_ENV: "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": str(max(1, _CTAS_PER_DEVICE // num_ranks))}
    if several_nodes:
        env["NCCL_NET_GDR_LEVEL"] = "LOC"
    return env


def kept_settings(workers: Sequence[WorkerFacts], env: Mapping[str, str]) -> tuple[str, ...]:
    """``NAME=value`` of each variable that the user set to something else than the plan would."""
    return tuple(
        sorted({f"{name}={w.env[name]}" for w in workers for name in env if w.env.get(name, env[name]) != env[name]})
    )


def explain_failure(error: FracBackendError, plan: StartPlan, workers: Sequence[WorkerFacts]) -> FracBackendError:
    """What a failed start of NCCL means, seen with the facts of all ranks; the error itself where that adds nothing.

    Args:
        error: What the workers told.
        plan: The plan that was tried.
        workers: Facts of every rank, in rank order.

    Returns:
        SharedDeviceError where NCCL refused ranks on one GPU. With several ranks a GPU, a timeout or a failed
        verification of the same class, with what usually is behind it.
    """
    if "nccl" not in plan.backend:
        return error
    sentence = refusal_in(str(error))
    if sentence is None and is_invalid_usage(str(error)) and plan.share_groups:
        sentence = "ncclInvalidUsage"
    if sentence is not None:
        return _refused(sentence, error, plan, workers)
    ended = "wrong answer" in str(error)
    if plan.share_groups and isinstance(error, (StartTimeoutError, VerificationError)) and not ended:
        advice = (
            "NCCL hangs where one GPU has too few resources for all of its ranks: set NCCL_MAX_CTAS lower, put fewer ranks "
            "on the GPU, run the MPS daemon, or use on_shared_device='gloo'."
        )
        return type(error)(f"{error} {advice}", ranks=error.ranks)
    return error


def _refused(
    sentence: str, error: FracBackendError, plan: StartPlan, workers: Sequence[WorkerFacts]
) -> SharedDeviceError:
    groups = plan.share_groups or mig_siblings(workers)
    who = (
        share_text(groups)
        if groups
        else f"{ranks_text(error.ranks)} share a GPU"
        if error.ranks
        else "ranks share a GPU"
    )
    ranks = sorted({rank for group in groups for rank in group.ranks}) or error.ranks
    return SharedDeviceError(
        f"NCCL {versions_text(workers)} refused the start: {who} ({sentence}). {_way_out(plan, workers)}",
        ranks=ranks,
    )


def _way_out(plan: StartPlan, workers: Sequence[WorkerFacts]) -> str:
    kept = kept_settings(workers, plan.env_defaults)
    if kept:
        return f"The user set {', '.join(kept)}, which was kept: unset it, or use on_shared_device='gloo'."
    if plan.env_defaults:
        return "NCCL's flags for several ranks a GPU did not help; use on_shared_device='gloo'."
    return "Set FracTorchConfig(backend='gloo'), or give every worker a GPU of its own."
