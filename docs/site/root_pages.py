"""For MkDocs: pages of the site that lie outside ``docs/``, the examples, and links as they are right on GitHub.

Every page is written for its place in the repository: ``README.md`` links to ``docs/design.md``, which links back to
``../SECURITY.md``. Here both the pages and the links get the names that they have on the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# Path in the repository -> path among the site's sources.
ROOT_PAGES = {
    "README.md": "index.md",
    "examples/README.md": "examples.md",
    "examples/template_backend/README.md": "template-backend.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
HOMES = {page: home for home, page in ROOT_PAGES.items()}

LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = Path(config.config_file_path).parent
    examples = {f"examples/{path.name}": f"examples/{path.name}" for path in sorted(root.glob("examples/*.py"))}
    for home, page in {**ROOT_PAGES, **examples}.items():
        files.append(File.generated(config, page, abs_src_path=str(root / home)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    del config, files
    here = page.file.src_uri
    home = posixpath.dirname(HOMES.get(here, f"docs/{here}"))

    def on_site(found: re.Match[str]) -> str:
        before, target, after = found.groups()
        path = posixpath.normpath(posixpath.join(home, target))
        source = ROOT_PAGES.get(path, path.removeprefix("docs/"))
        return before + posixpath.relpath(source, posixpath.dirname(here) or ".") + after

    return LINK.sub(on_site, markdown)
