"""The architecture page shows the code as it is."""

import re

from tools import architecture
from tools.workspace import ROOT, read_packages

PAGE = (ROOT / architecture.PAGE).read_text()


def test_pictures_are_drawn_from_the_code():
    assert architecture.drawn(PAGE) == PAGE, "run `python -m tools.architecture`"


def test_pictures_have_every_package_and_module():
    drawn = PAGE[PAGE.index("drawn: packages") : PAGE.index("## Inside")]
    assert all(package.module in drawn for package in read_packages().values())
    drawn = PAGE[PAGE.index("drawn: operator") : PAGE.index("## The way of x")]
    modules = [path.stem for path in (ROOT / "packages/rms_norm/src/npu_rms_norm").iterdir() if path.suffix == ".py"]
    assert all(module in drawn for module in modules if module != "__init__")


def test_what_the_page_names_is_there():
    links = re.findall(r"\]\(([^)]+)\)", PAGE)
    assert len(links) > 10
    assert [link for link in links if not (ROOT / ".github" / link).exists()] == []
    assert "_RMSNorm" in (ROOT / "packages/rms_norm/src/npu_rms_norm/autograd.py").read_text()
    sources = (ROOT / "packages/attn_res/src/npu_attn_res/launch/sources.py").read_text()
    assert "def follow(" in sources and "def point_to(" in sources
