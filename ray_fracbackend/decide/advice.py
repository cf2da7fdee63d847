"""All sentences that advise what to do after a failed start, by situation."""

from __future__ import annotations

_ADVICE = {
    # A collective of the verification failed.
    "wrong answer": "Do not train with this group: check the node's memory and network{or_gloo}.",
    "refused": "Give each rank a GPU of its own{or_gloo}.",
    "CUDA refuses": "CUDA refused {device}: look at nvidia-smi on that rank's node.",
    "no pinned memory": "No host memory can be pinned: raise the limit on locked memory (ulimit -l on Linux), free memory of the host, or use "
    "backend='staged', which needs none.",
    "NCCL fails": "NCCL fails on that rank itself: NCCL_DEBUG=INFO writes the reason to its log{or_gloo}.",
    "NCCL hangs": "NCCL hangs: with NCCL_DEBUG=INFO the workers' logs show where{or_gloo}.",
    "peer lost": "Look at the log of that rank and at its node's network.",
    # The group did not form.
    "Gloo has no port": "This node has no free port left (net.ipv4.ip_local_port_range on Linux): Gloo needs several for every pair of ranks. Widen the range, or end "
    "processes that hold many connections.",
    "Gloo cannot connect": "Gloo connects every pair of ranks on random ports, on this node {interface}: check that all nodes allow them, "
    "or set GLOO_SOCKET_IFNAME to an interface that the others reach; and that rank 0 and the other ranks do not hang.",
    "rank 0 hangs": "Rank 0 hangs, the network to it is cut, or another rank did not connect: look at that process and at the nodes.",
    "fails by itself": "Look at that worker's log.",
    "store not reached": "Check that every node reaches that address and port.",
    # The reports of all ranks together show the cause.
    "worker died": "Look for the cause in that node's logs; the usual causes are too little memory and a preempted node.",
    "restarts": "Ray Train starts the workers again, up to FailureConfig(controller_failure_limit=...) times, by default without a limit.",
    "killed for memory": "Use fewer workers per node, or less memory in each.",
    "device full": "End other processes on the device, or ask for a larger GPU fraction so that fewer workers share it.",
    "no answer": "Look whether these processes are stopped or hang, and at their nodes, or raise start_timeout_s if they are only slow.",
    "several ranks hang": "NCCL hangs where one GPU has too few resources for all of its ranks: set NCCL_MAX_CTAS lower, put fewer ranks on "
    "the GPU, run the MPS daemon{or_gloo}.",
    "refused with the user's settings": "The user set {settings}, which was kept: unset it{or_gloo}.",
    "refused with flags": "NCCL's flags for several ranks per GPU did not help: give every worker a GPU of its own{or_gloo}.",
    "refused without flags": "Give every worker a GPU of its own{or_gloo}.",
}


def advise(situation: str, *, has_gloo: bool = False, **values: str) -> str:
    """Return the advice for a situation: one or two sentences.

    Args:
        situation: A key of the table.
        has_gloo: Whether Gloo can replace the backend that failed.
        **values: Values for the placeholders of the sentence.
    """
    return _ADVICE[situation].format(or_gloo=", or use backend='gloo'" if has_gloo else "", **values)
