from npu_bench.brief import brief_document


def table(document, title):
    """Cells of a table, without those that a clock decides."""
    body = document.partition(f"**{title}")[2].split("\n\n")[1]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines()]


def test_a_row_is_a_case_and_a_cell_has_every_mode(toy, measure, npu):
    run = measure(toy("product", "one_wrong_row", "missing"), npu, modes=["forward", "full"])
    header, _, *rows = table(brief_document(run), "device ms, forward / full")
    assert header == ["case", "product", "one_wrong_row", "floor"]  # none for what is not installed
    assert [row[0] for row in rows] == [case.name for case in run.sweep.cases]
    ours, wrong, floor = rows[0][1:]
    assert ours == "2.50 / 2.50" and wrong == "wrong"  # the clock of this device stands still: both modes have one time
    known = {row.mode: row.floor_ms for row in run.rows if row.case is run.sweep.cases[0] and row.floor_ms is not None}
    assert [float(part) for part in floor.split(" / ")] == [float(f"{known[mode]:.3g}") for mode in ("forward", "full")]


def test_wall_time_and_memory_have_tables_of_their_own(toy, measure, npu):
    document = brief_document(measure(toy("product"), npu, modes=["forward"]))
    for title, columns in (("wall ms", 2), ("peak MiB", 2), ("device ms", 3)):
        assert all(len(row) == columns for row in table(document, title))
