#!/usr/bin/env bash
# Every GPU test and benchmark, on a host with one or more GPUs: leaves one JSON and one text summary in a folder.
#
#   ci/gpu.sh [--part all|tests|benchmarks] [--bundle DIR] [--out DIR] [--dry]
#
# Needs Python 3.10 or newer with torch for CUDA, numpy, pandas, pyarrow, pytest and packaging. Ray and the rest come from
# the bundle of ci/gpu_bundle.sh (default .gpu-bundle) where the host does not have them. Each part takes under 10 minutes.
# --dry does all of it that a machine without a GPU can: imports, collection of the tests, the benchmarks on CPUs.
cd "$(dirname "$0")/.." || exit 2
exec "${PYTHON:-python3}" ci/gpu_suite.py "$@"
