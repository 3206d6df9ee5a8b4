"""What happens to a page on its way into the site. MkDocs calls the functions by their names."""

from __future__ import annotations

import re
from functools import cache
from html import unescape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

from tools.docs import charts, graphs, lists, losses, reference, scatter, sections
from tools.install_lines import install_lines
from tools.metadata import read_project
from tools.workspace import ROOT

PAGES = Path(__file__).parent / "pages"


@cache
def _homes() -> dict[str, str]:
    return sections.homes(sections.read_pages(PAGES))


def on_config(config: Any, **_: Any) -> Any:
    """Addresses of the site and the repository: those of tools/project.toml, none without them."""
    urls = read_project()["urls"]
    config.site_url = urls.get("Documentation", "")
    config.repo_url = urls.get("Repository")
    config.repo_name = (config.repo_url or "").rpartition("/")[2]
    return config


def on_pre_build(**_: Any) -> None:
    """Served pages change between builds."""
    _homes.cache_clear()


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Included text, names of a package, charts, flowcharts."""
    text = sections.expand(markdown, page.file.src_uri, _homes())
    text = re.sub(r"^<!-- api (\w+) -->$", lambda found: reference.directives(found[1]), text, flags=re.M)
    text = re.sub(r"^( *)<!-- install (\w+) (\S+) -->$", lambda found: _install(*found.groups()), text, flags=re.M)
    text = text.replace("<!-- shares -->", _pictures())
    text = text.replace("<!-- counted -->", _counted((ROOT / "shared" / "npu_offline" / "GALLERY.md").read_text()))
    text = text.replace(
        "<!-- ways round -->", _ways_round((ROOT / "shared" / "npu_offline" / "COMPILER_FAULTS.md").read_text())
    )
    text = re.sub(r"^<!-- charts (\S+) -->$", lambda found: charts.figures(ROOT / found[1]), text, flags=re.M)
    text = re.sub(r"^<!-- scatter (\S+) -->$", lambda found: scatter.figure(ROOT / found[1]), text, flags=re.M)
    text = re.sub(r"^<!-- losses (\S+) -->$", lambda found: losses.figures(ROOT / found[1]), text, flags=re.M)
    return lists.indent(graphs.replace(text))


def _pictures() -> str:
    """The two of the README."""
    pictures = {
        "Ascend 910B4, predicted": charts.predicted_bars(charts.PREDICTED),
        "NVIDIA H200, measured": charts.bars((ROOT / "README.md").read_text()),
    }
    figures = (f"<figure><figcaption>{title}</figcaption>{drawn}</figure>" for title, drawn in pictures.items())
    return f'<div class="charts bars" markdown="0">{"".join(figures)}</div>'


def _counted(gallery: str) -> str:
    """What the gallery counts: its number, a bar for each package, its table."""
    number = re.search(r"^\*\*(\d+ of \d+ are right .*)\*\*$", gallery, re.M)
    table = re.search(r"^\| package \|.*?(?=\n\n)", gallery, re.M | re.S)
    assert number and table
    picture = f'<div class="charts bars" markdown="0">{charts.shares_right(table[0])}</div>'
    return f"**{number[1]}**\n\n{picture}\n\n{table[0]}"


def _ways_round(faults: str) -> str:
    """Of each fault its number and title, who has it, and the way round it."""
    having = dict(re.findall(r"^\| (\d+)\. .*? \| (.*) \|$", faults, re.M))
    found = re.findall(r"^## (\d+)\. (.*?)\n.*?^\*\*Way round:\*\* (.*?)(?=^## |\Z)", faults, re.M | re.S)
    assert [number for number, *_ in found] == list(having), "every fault has a way round"
    return "\n\n".join(f"### {number}. {title}\n\n*{having[number]}.* {way.strip()}" for number, title, way in found)


def _install(indent: str, where: str, operator: str) -> str:
    """Of the lines that install a package those for one kind of machine."""
    lines = install_lines(f"npu-{operator.replace('_', '-')}").split("```")[1].strip().split("\n\n")
    (chosen,) = (part for part in lines if part.startswith(f"# {where}"))
    return "\n".join(indent + line for line in f"```\n{chosen}\n```".splitlines())


_ITEM = r"(<li class=\"doc-section-item field-body\">\s*{name})\s*{type}\s*–"
_TYPED = re.compile(
    _ITEM.format(
        name=r"<b><code>(?:<[^>]*>)?\w+(?:</[^>]*>)?</code></b>",
        type=r"\(<code>[^\n]*</code>(?:, default:\s*<code>[^\n]*</code>\s*)?\)",
    )
)
_RESULT = re.compile(_ITEM.format(name="", type=r"<code>[^\n]*</code>"))
# "kernel, grid, constants: ..." under Attributes is taken for a name and the type of one attribute.
_SEVERAL = re.compile(r"<b><code>(?:<[^>]*>)?(\w+,)(?:</[^>]*>)?</code></b>\s*\(<code>\(?([^\n]*?)\)?</code>\)")

_PRIVATE_BASE = re.compile(r"<p class=\"doc doc-class-bases\">\s*Bases: <code>(?:<[^>]*>)?_\w+.*?</p>", re.S)


def _without_types(html: str) -> str:
    """A reference without the types and defaults that the signature above them has, and without private bases."""
    html = _PRIVATE_BASE.sub("", html)
    parts = re.split(r"(?=<p><span class=\"doc-section-title\">|<h[2-6] )", html)
    signed = False
    for number, part in enumerate(parts):
        if part.startswith("<h"):
            signed = "doc-signature" in part
        title = re.match(r".*?>(\w+):<", part)
        if not title:
            continue
        own, end, rest = part.partition("</ul>")
        if title[1] == "Attributes":
            own = _SEVERAL.sub(lambda found: f"<b><code>{found[1]} {re.sub('<[^>]+>', '', found[2])}</code></b>", own)
        if title[1] == "Parameters" or (signed and title[1] == "Attributes"):
            own = _TYPED.sub(r"\1 –", own)
        elif title[1] in ("Returns", "Yields"):
            own = _RESULT.sub(r"\1", own)
        parts[number] = own + end + rest
    return "".join(parts)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Formulas become MathML, which browsers draw by themselves."""
    if page.file.src_uri.startswith("api/"):
        html = _without_types(html)
    html = re.sub(
        r'<span class="arithmatex">\\\((.*?)\\\)</span>', lambda found: convert(unescape(found[1])), html, flags=re.S
    )
    block = r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>'
    return re.sub(block, lambda found: _display(unescape(found[1])), html, flags=re.S)


def _display(formula: str) -> str:
    return f'<div class="formula">{convert(formula, display="block")}</div>'


def on_serve(server: Any, **_: Any) -> Any:
    """Files outside the pages that a served site watches."""
    for file in [*ROOT.glob("*/*/*.md"), ROOT / "README.md", *ROOT.glob("*/*/src"), *ROOT.glob("tests/public_api/*.txt")]:
        server.watch(str(file))
    return server
