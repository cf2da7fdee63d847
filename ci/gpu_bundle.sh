#!/usr/bin/env bash
# Packs what a GPU host without package registries needs for ci/gpu.sh. Run it on a machine with a registry.
#
#   ci/gpu_bundle.sh [OUT] [--python 3.12] [--ray 2.60.0] [--nccl 2.30.7|none]     default OUT: .gpu-bundle
#
#   OUT/site.tar.xz      Ray, cut down to Core, Train, Tune and Data, and all that ray_fracbackend and Ray import beside
#                        what the host must have: torch with CUDA, numpy, pandas, pyarrow, pytest, packaging
#   OUT/nccl/part-*      libnccl.so.2 of --nccl, compressed, in pieces of PART_MIB (default 55), with SHA256SUMS
set -euo pipefail
cd "$(dirname "$0")/.."
out=.gpu-bundle python_version=3.12 ray_version=2.60.0 nccl_version=2.30.7
while (($#)); do
  case $1 in
    --python) python_version=${2:?$1 needs a version}; shift 2 ;;
    --ray) ray_version=${2:?$1 needs a version}; shift 2 ;;
    --nccl) nccl_version=${2:?$1 needs a version or none}; shift 2 ;;
    -*) echo "unknown option $1; see the head of $0" >&2; exit 2 ;;
    *) out=$1; shift ;;
  esac
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"

platforms=()
for tag in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_18 manylinux_2_17 manylinux_2_12 manylinux2014 manylinux1; do
  platforms+=(--platform "${tag}_x86_64")
done
fetch() { # fetch TARGET REQUIREMENT...
  local target=$1; shift
  python3 -m pip install --quiet --no-deps --no-compile --only-binary=:all: --implementation cp \
    --python-version "$python_version" "${platforms[@]}" --target "$target" "$@"
}

ray_needs=(click filelock jsonschema jsonschema-specifications referencing rpds-py attrs typing-extensions msgpack protobuf
  pyyaml requests urllib3 idna certifi charset-normalizer fsspec tensorboardX pydantic annotated-types typing-inspection)
ours=(psutil nvidia-ml-py)
# For tests/gpu/gpu_libraries.py. Older releases of the hub's client need requests alone, which Ray brings.
libraries=(accelerate safetensors tqdm "huggingface-hub<1" "transformers<5" "tokenizers<0.23" regex
  lightning lightning-utilities torchmetrics)
fetch "$work/site" "ray==$ray_version" "${ray_needs[@]}" "${ours[@]}" "${libraries[@]}"
# pydantic pins pydantic-core exactly.
core=$(sed -n 's/^Requires-Dist: pydantic-core==\([0-9.]*\).*/\1/p' "$work"/site/pydantic-*.dist-info/METADATA | head -1)
fetch "$work/site" "pydantic-core==$core"
rm -rf "$work"/site/ray/{jars,rllib,serve,llm,dashboard/client} "$work"/site/bin
tar -c -C "$work/site" . | xz -T0 -6 >"$out/site.tar.xz"

if [[ $nccl_version != none ]]; then
  fetch "$work/nccl" "nvidia-nccl-cu13==$nccl_version"
  rm -rf "$out/nccl" && mkdir -p "$out/nccl"
  xz -T0 -6 -c "$(find "$work/nccl" -name libnccl.so.2)" | split -b "${PART_MIB:-55}M" - "$out/nccl/part-"
  (cd "$out/nccl" && sha256sum part-* >SHA256SUMS)
fi
du -ah "$out"
