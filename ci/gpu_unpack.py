"""Unpacks a bundle of ci/gpu_bundle.sh. usage: python3 ci/gpu_unpack.py BUNDLE TARGET

TARGET/site is for PYTHONPATH, TARGET/libnccl.so.2 for LD_PRELOAD. What the bundle lacks is reported and left out.
"""

from __future__ import annotations

import hashlib
import lzma
import shutil
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path


def unpack_site(bundle: Path, target: Path) -> str:
    archive = bundle / "site.tar.xz"
    if not archive.is_file():
        return f"no {archive}: Ray and the rest must be installed on this host"
    with tarfile.open(archive, "r:xz") as file:
        file.extractall(target / "site", filter="data")
    return f"{archive} unpacked"


def unpack_nccl(bundle: Path, target: Path) -> str:
    sums = bundle / "nccl" / "SHA256SUMS"
    if not sums.is_file():
        return f"no {sums}: NCCL is the one that torch brings"
    parts = []
    for line in sums.read_text().splitlines():
        digest, name = line.split()
        part = sums.parent / name
        if not part.is_file() or hashlib.sha256(part.read_bytes()).hexdigest() != digest:
            return f"{part} is missing or damaged: NCCL is the one that torch brings"
        parts.append(part)
    partial = target / "libnccl.partial"
    with partial.open("wb") as file:
        for block in _decompressed(parts):
            file.write(block)
    partial.rename(target / "libnccl.so.2")
    return f"libnccl.so.2 of {len(parts)} parts unpacked"


def _decompressed(parts: list[Path]) -> Iterator[bytes]:
    decompressor = lzma.LZMADecompressor()
    for part in parts:
        with part.open("rb") as file:
            while block := file.read(1 << 20):
                yield decompressor.decompress(block)


def main() -> None:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    bundle, target = map(Path, sys.argv[1:])
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    print(unpack_site(bundle, target), flush=True)
    print(unpack_nccl(bundle, target), flush=True)


if __name__ == "__main__":
    main()
