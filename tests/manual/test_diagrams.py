"""The pictures in docs/diagrams are what `python -m docs.site.diagrams` draws."""

from xml.etree import ElementTree as ET

import pytest

from docs.site.diagrams import FOLDER, PICTURES


@pytest.mark.parametrize("name", PICTURES)
def test_picture_is_current(name: str) -> None:
    drawn = PICTURES[name]().svg()
    assert (FOLDER / f"{name}.svg").read_text() == drawn, "write it again: python -m docs.site.diagrams"
    # A reader without pictures gets its title, and a broken file is no picture.
    assert ET.fromstring(drawn).attrib["aria-label"]  # noqa: S314
