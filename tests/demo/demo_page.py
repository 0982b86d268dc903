"""The report's page, read as a browser would, for test_demo.py."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

EMPTY = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
LOADS = {"src", "srcset", "poster", "data", "background", "xlink:href"}


class Page(HTMLParser):
    """The content of a page, and the addresses that it would load."""

    def __init__(self) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.text = ""
        self.unclosed: list[str] = []
        self._style = ""
        self._open: list[str] = []
        self._addresses: list[str] = []
        self._sections: list[tuple[str, int]] = []  # its heading, and how much stands below

    @classmethod
    def read(cls, path: Path) -> Page:
        page = cls()
        page.feed(path.read_text(encoding="utf-8"))
        page.close()
        page.unclosed += page._open
        return page

    def loaded_from_elsewhere(self) -> list[str]:
        """Addresses that are neither data nor a place in the page. A link that is followed by a reader is not one."""
        in_styles = re.findall(r"url\(\s*['\"]?([^'\")]+)", self._style) + re.findall(r"@import[^;]+", self._style)
        return [a for a in self._addresses + in_styles if not a.startswith(("data:", "#"))]

    def sections_without_content(self) -> list[str]:
        return [heading for heading, length in self._sections if length < 200]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in EMPTY:
            self._open.append(tag)
        if tag == "h2":
            self.headings.append("")
            self._sections.append(("", 0))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in LOADS or (name == "href" and tag != "a"):
                self._addresses.append(value or "")
            if name == "style":
                self._style += value or ""
            if self._sections:
                heading, length = self._sections[-1]
                self._sections[-1] = heading, length + len(value or "")

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.unclosed.append(tag)

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            self._style += data
            return
        self.text += data
        if "h2" in self._open:
            self.headings[-1] += data
            self._sections[-1] = self.headings[-1], 0
        elif self._sections:
            heading, length = self._sections[-1]
            self._sections[-1] = heading, length + len(data.strip())
