import dataclasses

from npu_bench.brief import brief_document


def table(document, title):
    """Cells of a table, without those that a clock decides."""
    body = document.partition(f"**{title}")[2].split("\n\n")[1]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines()]


def test_a_row_is_a_case_and_a_mode(toy, measure, npu):
    run = measure(toy("product", "one_wrong_row", "missing"), npu, modes=["forward", "full"])
    header, _, *rows = table(brief_document(run), "device ms")
    assert header == ["case", "pass", "product", "one_wrong_row", "floor"]  # none for what is not installed
    first, second = rows[:2]
    known = {row.mode: row.floor_ms for row in run.rows if row.case is run.sweep.cases[0] and row.floor_ms is not None}
    assert first == [run.sweep.cases[0].name, "forward", "2.50", "wrong", f"{known['forward']:.3g}"]
    assert second == ["", "full", "2.50", "wrong", f"{known['full']:.3g}"]
    assert len(rows) == 2 * len(run.sweep.cases)


def test_the_least_of_several_numbers_is_bold(toy, measure, npu):
    run = measure(toy("product", "one_wrong_row"), npu, modes=["forward"])
    right = next(row for row in run.rows if row.device_ms is not None)
    half = dataclasses.replace(right, provider="faster", device_ms=dataclasses.replace(right.device_ms, p50=1.25))
    run = dataclasses.replace(run, rows=[*run.rows, half])
    assert table(brief_document(run), "device ms")[2][1:4] == ["2.50", "wrong", "**1.25**"]


def test_wall_time_and_memory_have_tables_of_their_own(toy, measure, npu):
    document = brief_document(measure(toy("product"), npu, modes=["forward"]))
    for title, columns in (("wall ms", 2), ("peak MiB", 2), ("device ms", 3)):
        assert all(len(row) == columns for row in table(document, title))
