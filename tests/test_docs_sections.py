"""What the documentation's pages take from other files: sections, lists, links and install lines."""

from __future__ import annotations

import re

import pytest

from tools.docs import hooks, lists, sections


def test_what_belongs_to_an_item_is_four_spaces_in():
    text = "- a\n  b\n\n  | x |\n\n1. c\n\n   ```\n   d\n     e\n   ```\n2. f\n\ng\n  h\n```\n- i\n  j\n```"
    expected = "- a\n    b\n\n    | x |\n\n1. c\n\n    ```\n    d\n      e\n    ```\n\n2. f\n\ng\n  h\n```\n- i\n  j\n```"
    assert lists.indent(text) == expected


TEXT = "# Title\n\nfirst\n\n## One\n\n```\n# no heading\n## Two\n```\none\n\n### Inner\n\ninner\n\n## Two\n\ntwo\n"


def test_a_section_ends_where_the_next_of_its_level_begins(tmp_path):
    (tmp_path / "a.md").write_text(TEXT)
    assert sections.take("a.md", "text of", ["Two"], tmp_path) == "two"
    assert sections.take("a.md", "section", ["One"], tmp_path).endswith("### Inner\n\ninner")
    assert "# no heading" in sections.take("a.md", "text of", ["One"], tmp_path)
    whole = sections.take("a.md", "but", ["One"], tmp_path)
    assert whole.split() == ["first", "##", "Two", "two"]
    (tmp_path / "b.md").write_text("intro\n\n**ms**\n\n| 1 |\n\n**MiB, all**\n\n| 2 |\n")
    assert sections.take("b.md", "but", ["ms"], tmp_path).split("\n\n") == ["intro", "**MiB, all**", "| 2 |"]


def test_what_is_not_there_is_an_error(tmp_path):
    (tmp_path / "a.md").write_text(TEXT)
    with pytest.raises(sections.DocsError, match="has no section 'Three': it has 'Title', 'One', 'Inner', 'Two'"):
        sections.take("a.md", "section", ["Three"], tmp_path)
    with pytest.raises(sections.DocsError, match=r"b\.md is not there"):
        sections.take("b.md", None, [], tmp_path)
    with pytest.raises(sections.DocsError, match="is no directive"):
        sections.expand("<!-- include a.md sections One -->", "p.md", {})


def test_links_of_included_text_lead_to_pages_or_name_files():
    found = {"packages/rms_norm": "operators/rms_norm.md"}
    text = (
        "[norm](packages/rms_norm#use) [file](tools/versions.toml) [out](https://example.org) `[a](b)`\n```\n[a](b)\n```\n"
    )
    said = sections.relink(text.replace("`[a](b)`", ""), "README.md", "start/x.md", found)
    assert "[norm](../operators/rms_norm.md#use)" in said
    assert "[out](https://example.org)" in said and "[a](b)" in said
    assert 'title="tools/versions.toml in the repository">file</span>' in said
    said = 'see the page "Time model" of the\ndocumentation,\n`tools/docs/pages/tools/t.md` in the repository.'
    assert sections.relink(said, "README.md", "start/x.md", {}) == "see [Time model](../tools/t.md)."
    with pytest.raises(sections.DocsError, match="links to gone.md, which is not there"):
        sections.relink("[x](gone.md)", "README.md", "x.md", found)


def test_lines_that_install_in_a_clone_name_folders_of_it():
    for where in ("Ascend", "CUDA", "CPU"):
        lines = hooks._install("    ", where, "rms_norm").splitlines()
        (ours,) = (line for line in lines if "packages/rms_norm" in line)
        assert "./shared/npu_tiling" in ours and not any("npu-rms-norm" in line for line in lines)
        assert all(line.startswith("    ") for line in lines)


def test_the_gallery_page_has_the_records_number_and_a_bar_for_each_package():
    gallery = (
        "**3 of 4 are right (75 %).**\n\n| package | calls | right | finding |\n|---|---|---|---|\n"
        "| a | 2 | 1 | 1 |\n| b | 2 | 2 | 0 |\n\n- why\n"
    )
    said = hooks._counted(gallery)
    assert said.startswith("**3 of 4 are right (75 %).**") and said.endswith("| b | 2 | 2 | 0 |")
    bars = re.findall(r'<rect class="ours"[^>]* width="([\d.]+)"', said)
    assert float(bars[1]) == pytest.approx(2 * float(bars[0]))


def test_the_page_of_faults_has_the_way_round_each():
    faults = "| fault | toolchains |\n|---|---|\n| 1. A | 1.0.0 |\n\n## 1. A\n\n**Sign:** s\n\n**Way round:** do\nit.\n"
    assert hooks._ways_round(faults) == "### 1. A\n\n*1.0.0.* do\nit."
    with pytest.raises(AssertionError, match="every fault has a way round"):
        hooks._ways_round(faults.replace("**Way round:**", "**Way:**"))
