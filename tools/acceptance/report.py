"""The report as a page: what ran, what failed, and times beside those of others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jinja2

_TEMPLATE = "report.html.jinja"
PREDICTED = "predicted"


def verdict(report: Mapping[str, Any]) -> list[str]:
    """What went wrong, one line each; nothing where all is well."""
    wrong = []
    tests = report.get("tests")
    if tests is not None:
        failed = tests["counts"].get("failed", 0)
        if failed:
            wrong.append(f"{failed} tests failed")
        elif tests["status"] != 0:
            wrong.append(f"the tests ended with status {tests['status']}")
        elif not tests["counts"].get("passed"):
            wrong.append("no test passed")
    for package, found in report.get("tiles", {}).items():
        bad = sum(call["error"] is not None for call in found["calls"])
        if bad:
            wrong.append(f"{package}: {bad} of {len(found['calls'])} calls failed")
        if found["status"] != 0 or not found["calls"]:
            wrong.append(
                f"{package}: compiling its tiles ended with status {found['status']}, {len(found['calls'])} calls in"
            )
    for package, found in report.get("times", {}).items():
        if found["status"] != 0:
            wrong.append(f"{package}: its benchmark ended with status {found['status']}")
    return wrong


def time_tables(
    records: Iterable[Mapping[str, Any]], predicted: Mapping[str, Mapping[str, float]] | None = None
) -> list[dict[str, Any]]:
    """One table for each mode: milliseconds on the device, sizes down and providers across.

    Args:
        records: as npu-bench writes them.
        predicted: milliseconds by mode and size; a column beside the measured ones.
    """
    tables: dict[str, dict[str, Any]] = {}
    for record in records:
        if record["metric_name"] != "speed":
            continue
        mode = record["kernel_operation_mode"]
        table = tables.setdefault(mode, {"mode": mode, "label": record["x_label"], "providers": [], "rows": {}})
        table["providers"].append(record["kernel_provider"])
        for x, y in zip(record["x_values"], record["y_values_50"], strict=True):
            table["rows"].setdefault(x, {})[record["kernel_provider"]] = y
    for mode, table in tables.items():
        expected = (predicted or {}).get(mode, {})
        known = {x: expected[str(x)] for x in table["rows"] if str(x) in expected}
        if known:
            table["providers"].insert(1, PREDICTED)
            for x, time in known.items():
                table["rows"][x][PREDICTED] = time
    return list(tables.values())


def html(report: Mapping[str, Any]) -> str:
    """The page."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    predicted = report.get("predicted", {}).get("times", {})
    times = {
        package: time_tables(found["records"], predicted.get(package)) for package, found in report.get("times", {}).items()
    }
    return environment.get_template(_TEMPLATE).render(report=report, wrong=verdict(report), times=times)
