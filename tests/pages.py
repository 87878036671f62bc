"""Checks of every page: its structure for a screen reader."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

_VOID = {"meta", "img", "br", "link"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    pieces: list[Element | str] = field(default_factory=list)

    @property
    def children(self) -> list[Element]:
        return [piece for piece in self.pieces if isinstance(piece, Element)]

    def all(self, *tags: str) -> list[Element]:
        """Return every element below this element with the tag, in the order of the page."""
        below: list[Element] = []
        for child in self.children:
            below += ([child] if child.tag in tags else []) + child.all(*tags)
        return below

    @property
    def text(self) -> str:
        return "".join(piece if isinstance(piece, str) else piece.text for piece in self.pieces)

    @property
    def own_text(self) -> str:
        """The element's own text, without the text of its children."""
        return "".join(piece for piece in self.pieces if isinstance(piece, str))


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Element("", {})
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self._open[-1].pieces.append(element)
        if tag not in _VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open[-1].pieces.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        closed = self._open.pop()
        assert closed.tag == tag, f"</{tag}> ends <{closed.tag}>"

    def handle_data(self, data: str) -> None:
        self._open[-1].pieces.append(data)


def parsed(html: str) -> Element:
    """Parse a page into a tree, and assert that every element is closed."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    return reader.root


def require_readable_page(html: str) -> Element:
    """Return the tree of a page; assert that a screen reader can read it."""
    tree = parsed(html)
    (root,) = tree.all("html")
    assert root.attributes["lang"] == "en"
    for landmark in ("header", "main", "h1", "title"):
        assert len([e for e in tree.all(landmark) if landmark != "title" or "id" not in e.attributes]) == 1, landmark
    _require_order(tree)
    _require_tables(tree)
    _require_pictures(tree)
    names = [element.attributes["id"] for element in _everything(tree) if "id" in element.attributes]
    assert len(names) == len(set(names))
    assert not tree.all("script", "link", "iframe")
    assert not re.search(r"""(?:src|href)=["'](?!data:|#)|url\((?!#)|@import""", html)
    for fold in tree.all("details"):
        assert fold.children[0].tag == "summary"
        assert "open" not in fold.attributes
    return tree


def _everything(element: Element) -> list[Element]:
    return [element, *(below for child in element.children for below in _everything(child))]


def _require_order(tree: Element) -> None:
    """Assert that the verdict stands first, then what would change it, and that headings skip no level."""
    (main,) = tree.all("main")
    first, second = main.all("h2")[:2]
    assert first.text.startswith("Verdict: ")
    assert second.text == "What would change the verdict"
    assert main.children[0].attributes["class"].startswith("verdict ")
    assert main.children[0].all("p")[0].text.endswith(".")
    assert main.children[1].all("li")
    levels = [int(heading.tag[1]) for heading in tree.all("h1", "h2", "h3", "h4")]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    for word in _everything(tree):
        if word.attributes.get("class", "").startswith("word "):
            assert word.children[0].attributes["aria-hidden"] == "true"
            assert re.search(r"\w", word.own_text), "a verdict needs a word beside its sign"


def _require_tables(tree: Element) -> None:
    for table in tree.all("table"):
        (caption,) = table.all("caption")
        assert caption.text
        (head,), (body,) = table.all("thead"), table.all("tbody")
        assert all(cell.text and cell.attributes["scope"] == "col" for cell in head.all("th"))
        for row in body.all("tr"):
            (name,) = row.all("th")
            assert name.attributes["scope"] == "row"
            assert len(row.children) == len(head.all("th"))


def _require_pictures(tree: Element) -> None:
    assert all(len(image.attributes["alt"]) > 5 for image in tree.all("img"))
    for svg in tree.all("svg"):
        texts = {element.attributes.get("id"): element.text for element in svg.all("title", "desc")}
        assert svg.attributes["role"] == "img"
        assert texts[svg.attributes["aria-labelledby"]]
        assert len(texts[svg.attributes["aria-describedby"]]) > 20
