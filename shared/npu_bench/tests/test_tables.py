import sys

import pytest
from npu_bench import BenchError
from npu_bench.plots import draw
from npu_bench.tables import Table, markdown, number, plain, show

TABLE = Table("title", ("case", "ms"), [("a|b", "1.0"), ("c", "20.5")])


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0"), (0.00001234, "0.0000123"), (1.0, "1.00"), (12.345, "12.3"), (123456.7, "123457")],
)
def test_numbers_have_three_digits_and_no_exponent(value, text):
    assert number(value) == text


def test_markdown_aligns_numbers_and_escapes_bars():
    assert markdown(TABLE) == "**title**\n\n| case | ms |\n| --- | --: |\n| a\\|b | 1.0 |\n| c | 20.5 |\n"


def test_plain_table_is_aligned():
    assert plain(TABLE).splitlines() == ["title", "case    ms", "a|b    1.0", "c     20.5"]


def test_what_a_provider_failed_with_is_no_tag_in_markdown():
    assert "| a \\| &lt;b c> |" in markdown(Table("title", ("provider",), [("a | <b c>",)]))


def test_tables_need_no_rich(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    show(TABLE)
    assert capsys.readouterr().out == plain(TABLE) + "\n"


def test_nothing_is_cut_where_the_output_is_a_file(capsys):
    reason = "unavailable: " + "long " * 30
    show(Table("title", ("provider", "result"), [("a", reason)]))
    assert reason.strip() in capsys.readouterr().out


def test_plot_without_matplotlib_says_how_to_get_it(toy, measure, npu, monkeypatch):
    run = measure(toy("product"), npu)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BenchError, match="pip install matplotlib"):
        draw(run)
