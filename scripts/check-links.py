#!/usr/bin/env python3
"""Checks that every relative link in the project's Markdown files leads to a file, and to a heading."""

import re
import sys
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "docs/**/*.md", "deploy/**/*.md", "assets/**/*.md", "fuzz/*.md", "python/*.md"]
# [text](target), ![alt](target), and [label]: target; a title in quotes may follow the target.
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)|^\[[^\]]+\]:\s+<?(\S+?)>?(?:\s|$)", re.M)
CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]+`", re.M | re.S)
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.M)


def anchors(text: str) -> set[str]:
    """The names that GitHub gives a page's headings."""
    names: set[str] = set()
    for heading in HEADING.findall(re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.M | re.S)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        repeats = sum(1 for name in names if name == slug or re.fullmatch(re.escape(slug) + r"-\d+", name))
        names.add(f"{slug}-{repeats}" if repeats else slug)
    return names


def problems(page: Path):
    """Yields (line, link, what is wrong) for each bad link of one page."""
    text = page.read_text(encoding="utf-8")
    # Blank out code, keeping its line breaks so that line numbers stay right.
    prose = CODE.sub(lambda code: re.sub(r"[^\n]", " ", code.group()), text)
    for match in LINK.finditer(prose):
        link = match.group(1) or match.group(2)
        if re.match(r"[a-z][a-z0-9+.-]*:", link, re.I):  # https:, mailto:
            continue
        line = prose.count("\n", 0, match.start()) + 1
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield line, link, "no such file"
        elif not target.is_relative_to(ROOT):
            yield line, link, "leads out of the repository"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text(encoding="utf-8")):
            yield line, link, "no such heading"


def main() -> int:
    pages = sorted(page for pattern in PAGES for page in ROOT.glob(pattern))
    found = [(page, *problem) for page in pages for problem in problems(page)]
    for page, line, link, what in found:
        print(f"{page.relative_to(ROOT)}:{line}: {link}: {what}")
    print(f"links: {len(pages)} pages checked, {len(found)} bad links")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
