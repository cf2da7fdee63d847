#!/usr/bin/env bash
# The GPU tests and benchmarks, in four calls of at most 8 minutes, on a host with one or more GPUs.
#
#   ci/gpu.sh A|B|C|D|all [--bundle DIR] [--out DIR] [--dry] [--scale N]        docs/development/gpu-runs.md has the runbook
#
#   A  what the device can do, whether ipc is right, all_reduce and DDP by each backend
#   B  every test of the backends alone
#   C  Ray end to end
#   D  MPS and NCCL
#
# --out is $OUT where that is set, else benchmarks/results/gpu. Needs Python 3.10 or newer with torch for CUDA, numpy, pandas,
# pyarrow, pytest, psutil, nvidia-ml-py and packaging. Ray and the rest come from the bundle of ci/gpu_bundle.sh (default
# .gpu-bundle) where the host does not have them. --dry does all of it that a machine without a GPU can.
cd "$(dirname "$0")/.." || exit 2
exec "${PYTHON:-python3}" ci/gpu_suite.py "$@"
