"""What the site holds besides docs/: the examples, and the pictures and page of the benchmarks, which pages link to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BESIDE = ("examples/*.py", "benchmarks/README.md", "benchmarks/results/*.png")


def on_files(files: Any, config: Any) -> Any:
    """Add them under the paths that they have in the repository."""
    from mkdocs.structure.files import File

    root = Path(config.docs_dir).parent
    for pattern in BESIDE:
        for path in sorted(root.glob(pattern)):
            name = path.relative_to(root).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that leave docs/ in the repository stay inside the site."""
    if page.file.src_uri.startswith("benchmarks/"):
        return markdown.replace("](../docs/", "](../")
    return markdown.replace("](../", "](")
