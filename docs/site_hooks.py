"""Add to the site what lies outside ``docs/``: examples, benchmark pictures, and the link to the repository."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from html import escape, unescape
from pathlib import Path
from typing import Any

ROOT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
RESULTS = "benchmarks/results"
BESIDE = (
    *ROOT_PAGES,
    "examples/*.py",
    "benchmarks/README.md",
    *(f"{RESULTS}/*.{kind}" for kind in ("svg", "csv", "log")),
)
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
PHONE_COLUMNS = 4  # of numbers, beside each other
NAMED = re.compile(r"(?<![\[`])`((?:examples/|benchmarks/results/)?[\w.-]+\.(?:py|csv|log))`(?![\]`])")

SCHEMED = re.compile(
    r"<picture>\n(?P<sources>(?: *<source [^>]*>\n)+)"
    r' *<img src="(?P<path>[\w./-]+)-light\.svg"[^>]* alt="(?P<alternative>[^"]*)">\n</picture>'
)


def web_address(remote: str) -> str | None:
    """Return where a browser finds a git remote; None for a folder."""
    found = re.fullmatch(
        r"(?:https?://|ssh://)?(?:[^@/]+@)?([\w.-]+\.\w+)[:/](.+?)(?:\.git)?/?", remote.strip()
    )
    return f"https://{found[1]}/{found[2]}" if found else None


def on_config(config: Any) -> Any:
    """Link the repository that this clone came from, and find the scripts of ``docs/`` and the library."""
    root = Path(config.docs_dir).parent
    sys.path[:0] = [str(root / "docs"), str(root / "src")]
    command = ["git", "-C", str(root), "remote", "get-url", "origin"]
    remote = subprocess.run(command, capture_output=True, text=True).stdout
    config.repo_url = config.repo_url or web_address(remote)
    if config.repo_url:
        config.repo_name = config.repo_url.split("/", 3)[-1]
    return config


def reference_pages() -> dict[str, str]:
    """Return the pages of the reference for the library in ``src/``."""
    import reference  # pyright: ignore[reportMissingImports]

    return reference.pages()


def on_files(files: Any, config: Any) -> Any:
    """Add the files of ``BESIDE`` under their paths in the repository, and the reference."""
    from mkdocs.structure.files import File

    root = Path(config.docs_dir).parent
    for pattern in BESIDE:
        for path in sorted(root.glob(pattern)):
            name = path.relative_to(root).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    for name, text in reference_pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def readme() -> str:
    """Return the text of README."""
    return (Path(__file__).parents[1] / "README.md").read_text()


def opening() -> list[str]:
    """Return README's paragraphs before its first command: what it is, numbers in two, and what a clone needs."""
    return readme().partition("```")[0].strip().split("\n\n")[1:]


def why() -> str:
    """Return README's lines on what the library is for, and when not."""
    return (
        readme().partition("<!-- why -->\n")[2].partition("<!-- end of why -->")[0].replace("](docs/", "](")
    )


def with_links(markdown: str, page: str) -> str:
    """Return Markdown whose names of examples and of files of results are links, outside of code and of other links.

    Args:
        page: path of the page in the site, which the links begin at.
    """
    root = Path(__file__).parents[1]

    def link(found: re.Match[str]) -> str:
        for path in (found[1], f"{RESULTS}/{found[1]}"):
            if "/" in path and (root / path).is_file():
                return f"[`{found[1]}`]({os.path.relpath(path, Path(page).parent)})"
        return found[0]

    parts, end = [], 0
    for fence in FENCED.finditer(markdown):
        parts += [NAMED.sub(link, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, NAMED.sub(link, markdown[end:])])


def in_both_schemes(markdown: str) -> str:
    """Return Markdown whose pictures follow the site's scheme, which readers choose, and not that of their system."""

    def images(found: re.Match[str]) -> str:
        path, told = found["path"], f"![{found['alternative']}]"
        widths = (
            {"": "{ .page }", "-phone": "{ .phone }"} if f"{path}-phone-" in found["sources"] else {"": ""}
        )
        return "\n".join(
            f"{told}({path}{width}-{scheme}.svg#only-{scheme}){shown}"
            for width, shown in widths.items()
            for scheme in ("light", "dark")
        )

    return SCHEMED.sub(images, markdown)


def with_labels(html: str) -> str:
    """Return HTML whose tables name each cell's column, for phones, which show the cells below each other.

    Tables of numbers stay as they are, to compare by column, unless they are too wide for a phone.
    """

    def label(found: re.Match[str]) -> str:
        table = found[0]
        names = [
            escape(unescape(re.sub("<[^>]+>", "", name))) for name in re.findall("<th[^>]*>(.*?)</th>", table)
        ]
        numbers = "text-align: right" in table
        if numbers and len(names) <= PHONE_COLUMNS:
            return table
        row = itertools.cycle(names)
        cells = re.sub("<td(?=[ >])", lambda _: f'<td data-label="{next(row)}"', table)
        return cells.replace(
            "<table>", "<table data-words data-numbers>" if numbers else "<table data-words>"
        )

    return re.sub("<table>.*?</table>", label, html, flags=re.DOTALL)


def with_whole_names(html: str) -> str:
    """Return HTML whose inline code has no line break behind a hyphen, such as that of an option."""

    def whole(found: re.Match[str]) -> str:
        words = re.sub(r"(?<!\S)(?=\S*-)\S{2,36}(?!\S)", r'<span class="whole">\g<0></span>', found[1])
        return f"<code>{words}</code>"

    return re.sub(r"<code>([^<\n]*-[^<\n]*)</code>", whole, html)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Label the cells of a page's tables, which the reference does itself, and keep names of options whole."""
    html = with_whole_names(html)
    return html if page.file.src_uri.startswith("reference/") else with_labels(html)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Show README on the first page, name files by links, and keep links that leave ``docs/`` inside the site."""
    return with_links(_inside(in_both_schemes(markdown), page), page.file.src_uri)


def _inside(markdown: str, page: Any) -> str:
    if page.file.src_uri == "index.md":
        what, *numbers, _ = opening()
        for name, text in (("what", what), ("numbers", "\n\n".join(numbers)), ("why", why())):
            markdown = re.sub(f"<!-- {name}: .* -->", lambda _, text=text: text, markdown)
        return markdown
    if page.file.src_uri.startswith("benchmarks/"):
        return markdown.replace("](../docs/", "](../")
    if page.file.src_uri in ROOT_PAGES:
        return markdown.replace("](docs/", "](")
    return markdown.replace("](../", "](")
