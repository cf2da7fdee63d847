#!/usr/bin/env bash
# The GPU tests and benchmarks by value, within --minutes (9), on a host with one or more GPUs.
#
#   ci/gpu.sh [--minutes N] [--bundle DIR] [--out DIR] [--dry] [--scale N] [all|STEP ...]        docs/development/gpu-runs.md has the runbook
#
# --out is $OUT where that is set, else benchmarks/results/gpu. Needs Python 3.10 or newer with torch for CUDA, numpy, pandas,
# pyarrow, pytest, psutil, nvidia-ml-py and packaging. Ray and the rest come from the bundle of ci/gpu_bundle.sh (default
# .gpu-bundle) where the host does not have them. --dry does all of it that a machine without a GPU can.
cd "$(dirname "$0")/.." || exit 2
exec "${PYTHON:-python3}" ci/gpu_suite.py "$@"
