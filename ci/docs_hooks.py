"""Hooks of mkdocs.yml, called by MkDocs: pages for linked files outside docs/, and no network access.

In the repository a page links to any file by its relative path. The site has a copy of each such file as a page, so the
same links work there without internet.
"""

from __future__ import annotations

import json
import posixpath
import re
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
_FENCE = re.compile(r"^( *)```.*?^ *```$", re.MULTILINE | re.DOTALL)
_CELL_CODE = re.compile(r"(?<=<code>)[^<]{24,}(?=</code>)(?=(?:(?!<table).)*</table>)", re.DOTALL)
_LINK = re.compile(r"(\]\()([^()\s#:]+)(#[^()\s]*)?(\))")
_LANGUAGES = {".py": "python", ".sh": "bash", ".json": "json", ".toml": "toml", ".yml": "yaml", ".svg": "xml"}
# Files that the theme uses in every page.
_SHIM = "https://unpkg.com/iframe-worker/shim"
# Pages made from files outside docs/ that the search covers. Source code is excluded, because its words would hide the
# pages.
_SEARCHED = (".ipynb.md", "CONTRIBUTING.md", "CHANGELOG.md", "README.md", "SECURITY.md")
# Pages of the navigation whose file is outside docs/.
_ALWAYS = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/fractional_gpu.ipynb")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every file outside docs/ that a page links to, and for the files that these link to."""
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    waiting += _ALWAYS
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        text = _markdown(ROOT / path)
        if not path.startswith("docs/"):
            content = _with_site_links(text, path)
            files.append(File.generated(config, site_path(path), content=content, inclusion=InclusionLevel.NOT_IN_NAV))
        if path.endswith(".md"):
            new = {target for target in _targets(text, path) if not target.startswith("docs/")} - seen
            seen |= new
            waiting += new
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite a page's links to files outside docs/, and set the page's weight for the search."""
    if page.file.src_uri.startswith("repository/") and not page.file.src_uri.endswith(_SEARCHED):
        page.meta["search"] = {"exclude": True}
    elif page.file.src_uri == "troubleshooting.md":
        page.meta["search"] = {"boost": 4}
    return markdown if page.file.generated_by else _with_site_links(markdown, f"docs/{page.file.src_uri}")


def on_page_content(html: str, **_: Any) -> str:
    """Allow a line break after the punctuation of a long name in a table, else its column is wider than the page."""
    return _CELL_CODE.sub(lambda found: re.sub(r"(?<=[\w)][._=/(])(?=\w)", "<wbr>", found[0]), html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Load the script for search without a server from the site itself."""
    return output.replace(
        _SHIM, f"{posixpath.relpath('.', posixpath.dirname(page.url) or '.')}/assets/iframe-worker.js"
    )


def on_post_template(output_content: str, template_name: str, **_: Any) -> str:
    """Leave out 404.html: its links start at the server's root, but the site may be in a folder."""
    return "" if template_name == "404.html" else output_content


def site_path(path: str) -> str:
    """Return the path in the site of a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def _targets(text: str, path: str) -> set[str]:
    links = _LINK.findall(_FENCE.sub("", text))
    return {posixpath.normpath(posixpath.join(posixpath.dirname(path), link)) for _, link, _, _ in links}


def _with_site_links(text: str, path: str) -> str:
    """Rewrite links from the repository's folders to the site; leave code blocks unchanged."""
    here = posixpath.dirname(site_path(path))

    def rewritten(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), found[2]))
        if path.startswith("docs/") and target.startswith("docs/"):
            return found[0]
        return f"{found[1]}{posixpath.relpath(site_path(target), here or '.')}{found[3] or ''}{found[4]}"

    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [_LINK.sub(rewritten, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(rewritten, text[end:])])


def _markdown(path: Path) -> str:
    """Return a file as Markdown: notebooks with outputs, folders as a list, other files as code."""
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        return "\n\n".join(map(_cell, cells))
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        found = sorted(entry.name for entry in path.iterdir() if entry.suffix in (".py", ".ipynb"))
        return "\n".join([f"# {name}/", "", *(f"- [{entry}]({path.name}/{entry})" for entry in found), ""])
    return f"# {name}\n\n````{_LANGUAGES.get(path.suffix, 'text')}\n{path.read_text(encoding='utf-8')}\n````\n"


def _cell(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    return "\n\n".join([f"```python\n{source}\n```", *(_output(output) for output in cell["outputs"])])


def _output(output: dict[str, Any]) -> str:
    data = {kind: "".join(text) for kind, text in output.get("data", {"text/plain": output.get("text", "")}).items()}
    if "text/html" in data:
        return f"<div>{data['text/html']}</div>"
    if "image/png" in data:
        return f'<img alt="Output of the cell above" src="data:image/png;base64,{data["image/png"].strip()}">'
    return f"<pre><code class='output'>{escape(data['text/plain'])}</code></pre>"
