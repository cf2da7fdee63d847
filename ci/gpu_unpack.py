"""Unpack a bundle of ci/gpu_bundle.sh. usage: python3 ci/gpu_unpack.py BUNDLE TARGET

Add TARGET/site to PYTHONPATH and TARGET/libnccl.so.2 to LD_PRELOAD. Existing files stay. Files that the bundle lacks are reported and
left out. The parts of NCCL may come in several bundles: TARGET keeps them until they are complete.
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
    archive, done = bundle / "site.tar.xz", target / "site.sha256"
    if not archive.is_file():
        return f"no {archive}: Ray and the rest must be installed on this host"
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if done.is_file() and done.read_text() == digest:
        return f"{archive} is unpacked already"
    shutil.rmtree(target / "site", ignore_errors=True)
    with tarfile.open(archive, "r:xz") as file:
        file.extractall(target / "site", filter="data")
    done.write_text(digest)
    return f"{archive} unpacked"


def unpack_nccl(bundle: Path, target: Path) -> str:
    sums, library, done = bundle / "nccl" / "SHA256SUMS", target / "libnccl.so.2", target / "nccl.sums"
    if not sums.is_file():
        return f"no {sums}: NCCL is the one that torch brings"
    if done.is_file() and done.read_text() == sums.read_text():
        return f"{library} is unpacked already"
    library.unlink(missing_ok=True)
    (target / "parts").mkdir(exist_ok=True)
    parts, missing = [], []
    for line in sums.read_text().splitlines():
        digest, name = line.split()
        kept = target / "parts" / name
        if (sums.parent / name).is_file():
            shutil.copyfile(sums.parent / name, kept)
        parts.append(kept)
        if not kept.is_file() or hashlib.sha256(kept.read_bytes()).hexdigest() != digest:
            missing.append(name)
    if missing:
        return f"{', '.join(missing)} of {len(parts)} missing or damaged: NCCL is the one that torch brings"
    partial = target / "libnccl.partial"
    with partial.open("wb") as file:
        for block in _decompressed(parts):
            file.write(block)
    partial.rename(library)
    shutil.rmtree(target / "parts")
    done.write_text(sums.read_text())
    return f"{library} of {len(parts)} parts unpacked"


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
    target.mkdir(parents=True, exist_ok=True)
    print(unpack_site(bundle, target), flush=True)
    print(unpack_nccl(bundle, target), flush=True)


if __name__ == "__main__":
    main()
