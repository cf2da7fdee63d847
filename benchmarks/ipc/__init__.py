"""Benchmark of the ipc backend beside Gloo, NCCL, Open MPI and a plain copy: python -m benchmarks.ipc"""
