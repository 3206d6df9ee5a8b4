"""The architecture page shows the code as it is."""

import re

from tools import architecture
from tools.workspace import ROOT, read_packages

PAGE = (ROOT / architecture.PAGE).read_text()


def test_pictures_have_every_package():
    drawn = PAGE[PAGE.index("drawn: packages") : PAGE.index("## Inside")]
    assert all(package.module in drawn for package in read_packages().values())


def test_every_kernel_of_an_operator_is_in_the_table():
    drawn = PAGE[PAGE.index("drawn: launches") :]
    for package in read_packages().values():
        if package.is_operator:
            sources = [file.read_text() for file in (ROOT / package.folder / "src").rglob("*.py")]
            kernels = {name for text in sources for name in re.findall(r"^def (\w+_kernel)\(", text, re.MULTILINE)}
            assert kernels and [name for name in sorted(kernels) if f"[{name}]" not in drawn] == []


def test_what_the_page_links_to_is_there():
    links = re.findall(r"\]\(([^)]+)\)", PAGE)
    assert len(links) > 10
    assert [link for link in links if not (ROOT / ".github" / link).exists()] == []
