"""Build the documentation as a site into build/site. usage: python ci/docs.py

Uses the extra `docs` of this interpreter's environment: python -m pip install -e '.[docs]'. A warning fails the build.
The site is read from its files, without a server and without internet: build/site/index.html.
"""

from __future__ import annotations

import importlib.util
import re
import sys

from common import ROOT, run

SITE = ROOT / "build" / "site"
# Scripts, images and styles that a reader's browser would fetch from a network address.
_LOADED = re.compile(r"""<(?:script|img|link|iframe)\b[^>]*(?:src|href)=["']?(https?://[^"' >]+)""")


def main() -> None:
    missing = [
        name for name in ("mkdocs", "material", "mkdocstrings_handlers") if importlib.util.find_spec(name) is None
    ]
    if missing:
        sys.exit(f"{', '.join(missing)} not installed. Run: {sys.executable} -m pip install -e '.[docs]'")
    run(sys.executable, "-m", "mkdocs", "build", "--strict", "--clean", NO_MKDOCS_2_WARNING="1")
    loaded = {each for page in SITE.rglob("*.html") for each in _LOADED.findall(page.read_text(encoding="utf-8"))}
    if loaded:
        sys.exit(f"pages load from the network: {', '.join(sorted(loaded))}")
    print(SITE / "index.html")


if __name__ == "__main__":
    main()
