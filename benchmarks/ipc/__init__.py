"""Benchmark of the ipc backend beside Gloo, NCCL, Open MPI, DeepSpeed and a plain copy: python -m benchmarks.ipc"""

COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
STEPS = ("ddp_step", "fsdp_step")
COLD = "cold_all_reduce"
OPERATIONS = (*COLLECTIVES, *STEPS, COLD)
# Bytes of the tensors, for a step of the parameters, by operation.
SIZES = {
    **dict.fromkeys(COLLECTIVES, (4 << 10, 64 << 10, 1 << 20, 25 << 20, 100 << 20)),
    **dict.fromkeys(STEPS, (64 << 10, 3 << 20, 32 << 20)),
    COLD: (4 << 10, 64 << 10, 1 << 20),
}
