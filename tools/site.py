"""Hooks of the site (mkdocs.yml): pages from the root, files that pages link to, and lists made from ``src``.

``README.md`` is the first page. A link from a page to a file outside ``docs`` has that file copied beside the pages, so
it works without a server of the repository; a link to a folder becomes its text. ``<!-- folders: src/NAME -->`` in a
page stands for a table of the folders below, each with the first sentence of its docstring. Each path below ``docs``
that a file of the repository names must be there. Whatever is missing is a warning, which fails a strict build.
"""

from __future__ import annotations

import ast
import logging
import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {"README.md": "index.md", **{name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")}}
COPIES = "files"
"""Folder of the site for copies of files from outside ``docs``."""

LINK = re.compile(r"(\]\(|\]: )([^()#\s]+)((?:#[^)\s]*)?)")
TO_FOLDER = re.compile(r"\[([^]]*)\]\(([^():#\s]+)\)")
FOLDERS = re.compile(r"<!-- folders: (\S+) -->")
NAMED = re.compile(r"(?<![\w/.-])docs/[\w/-]*\w\.\w+")
UNCHECKED = ("benchmarks/results/", "changes/", "CHANGELOG.md")
"""Files with paths that were right at their date and are not checked."""

log = logging.getLogger("mkdocs.plugins.site")


def on_pre_build(config: MkDocsConfig) -> None:
    """Warn of each missing path below ``docs`` that a file of the repository names."""
    listed = subprocess.run(["git", "grep", "-In", "docs/"], cwd=ROOT, capture_output=True, text=True, check=False)
    for line in listed.stdout.splitlines():
        name, number, text = line.split(":", 2)
        for path in () if name.startswith(UNCHECKED) else NAMED.findall(text):
            if not (ROOT / path).exists():
                log.warning("%s:%s names %s, which is not there", name, number, path)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages at the root, and the files outside ``docs`` that pages link to."""
    from mkdocs.structure.files import File

    for source, target in ROOT_PAGES.items():
        content = _relinked((ROOT / source).read_text(encoding="utf-8"), ROOT, Path())
        files.append(File.generated(config, target, content=content))
    places = [ROOT / name for name in ROOT_PAGES] + sorted((ROOT / "docs").rglob("*.md"))
    for page in places:
        for _, target, _ in LINK.findall(page.read_text(encoding="utf-8")):
            found = _outside(target, page.parent)
            if found and found.is_file() and files.get_file_from_path(copied(found)) is None:
                files.append(File.generated(config, copied(found), abs_src_path=str(found)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links out of ``docs`` to the copies, and fill lists of folders in."""
    place = Path(page.file.src_uri).parent
    if page.file.src_uri not in ROOT_PAGES.values():
        markdown = _relinked(markdown, ROOT / "docs" / place, place)
    return FOLDERS.sub(lambda found: folders(ROOT / found[1]), markdown)


def copied(path: Path) -> str:
    """Return a file's place in the site; a Markdown file among the copies does not become a page."""
    return f"{COPIES}/{path.relative_to(ROOT)}" + (".txt" if path.suffix in (".md", ".html") else "")


def folders(top: Path) -> str:
    """Return a table of a folder and those below it, each with the first sentence of its docstring."""
    rows = ["| folder | purpose |", "|---|---|"]
    for path in sorted(top.rglob("__init__.py")):
        sentence = re.split(r"(?<=\.)\s", ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")[0]
        if sentence:
            purpose = re.sub(r"\s+", " ", sentence).replace("``", "`").replace("|", "\\|")
            name = str(path.parent.relative_to(top)).replace("/", "/<wbr>")
            rows.append(f"| <code>{top.name if name == '.' else name}</code> | {purpose} |")
    if len(rows) == 2:
        log.warning("%s has no folder with a docstring", top)
    return "\n".join(rows)


def _outside(target: str, folder: Path) -> Path | None:
    """Return the repository's file that a link means, if it is outside ``docs`` and not a page."""
    path = Path(os.path.normpath(folder / target))
    inside = (
        path.is_relative_to(ROOT / "docs") or not path.is_relative_to(ROOT) or str(path.relative_to(ROOT)) in ROOT_PAGES
    )
    return None if "://" in target or target.startswith("mailto:") or inside else path


def _relinked(text: str, folder: Path, place: Path) -> str:
    """Return the text of a page in ``folder``, with links for its ``place`` in the site."""

    def link(found: re.Match[str]) -> str:
        opening, target, anchor = found.groups()
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        path = Path(os.path.normpath(folder / target))
        if path.is_relative_to(ROOT / "docs"):
            there = str(path.relative_to(ROOT / "docs"))
        elif path.is_relative_to(ROOT) and path.is_file():
            there = ROOT_PAGES.get(str(path.relative_to(ROOT))) or copied(path)
        else:
            there = str(path)  # which is no page: a warning
        return opening + os.path.relpath(there, place) + anchor

    def no_folder(found: re.Match[str]) -> str:
        return found[1] if (folder / found[2]).is_dir() else found[0]

    return LINK.sub(link, TO_FOLDER.sub(no_folder, text))
