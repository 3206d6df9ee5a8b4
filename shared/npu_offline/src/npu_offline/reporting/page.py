"""Renders the report's values as one HTML page without external files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from .timeline import ROWS, draw

_KIB = 1024


def render(report: Mapping[str, Any]) -> str:
    """The HTML page of what `collect` found."""
    packages = [_package(package, report) for package in report["packages"]]
    return _filled("page.j2", report=report, packages=packages, summary=_summary(report["packages"]), pipes=ROWS)


def render_certificate(certificate: Mapping[str, Any]) -> str:
    """The HTML page of what `certify` found with all toolchains."""
    return _filled("certificate.j2", certificate=certificate)


def _filled(template: str, **values: Any) -> str:
    environment = Environment(
        loader=PackageLoader("npu_offline", "reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(bytes=size, number=lambda value: f"{value:,}", micro=_micro)
    return environment.get_template(template).render(**values)


def size(nbytes: float) -> str:
    """Bytes as a person reads them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < _KIB or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 10 else f"{nbytes:.1f} {unit}"  # noqa: PLR2004
        nbytes /= _KIB
    raise AssertionError


def _micro(seconds: float) -> str:
    micro = seconds * 1e6
    return f"{micro:,.0f}" if micro >= 100 else f"{micro:.1f}" if micro >= 10 else f"{micro:.2f}"  # noqa: PLR2004


def _summary(packages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    compiled = [row for package in packages for row in package["compiled"] if row["supported"]]
    linted = [launch for package in packages for launch in package["linted"]["launches"]]
    return {
        "kernels": len({(package["name"], row["kernel"]) for package in packages for row in package["compiled"]}),
        "compiled": len(compiled),
        "fitting": sum(row["fits"] for row in compiled),
        "linted": len(linted),
        "findings": sum(len(launch["findings"]) for launch in linted),
        "suppressed": sum(len(launch["suppressed"]) for launch in linted),
        "emulated": sum(len({(row["call"], row["kernel"]) for row in package["ledgers"]}) for package in packages),
    }


def _package(package: Mapping[str, Any], report: Mapping[str, Any]) -> dict[str, Any]:
    drawn = {event[0] for each in package["timelines"] if not each["problem"] for event in each["events"]}
    return {
        "name": package["name"],
        "calls": package["calls"],
        "matrix": _matrix(package["compiled"], [chip["name"] for chip in report["chips"]], report["toolchains"]),
        "linted": package["linted"],
        "lint": _lint(package["linted"]["launches"]),
        "ledgers": _ledgers(package["ledgers"]),
        "timelines": [
            {**each, "picture": Markup() if each["problem"] else Markup(draw(each["events"]))}
            for each in package["timelines"]
        ],
        "pipes": [pipe for pipe in ROWS if pipe in drawn],
    }


def _matrix(rows: Sequence[Mapping[str, Any]], socs: Sequence[str], toolchains: Sequence[str]) -> dict[str, Any]:
    """A row for each kernel, a column for chips whose cells are all alike, a cell for each toolchain."""
    kernels = sorted({row["kernel"] for row in rows})
    found: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["kernel"], row["soc"], row["toolchain"]), []).append(row)
    columns: dict[str, list[str]] = {}
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for soc in socs:
        for kernel in kernels:
            cells[kernel, soc] = [_cell(found.get((kernel, soc, version), ())) for version in toolchains]
        columns.setdefault(repr([cells[kernel, soc] for kernel in kernels]), []).append(soc)
    firsts = [names[0] for names in columns.values()]
    return {
        "chips": list(columns.values()),
        "rows": [{"kernel": kernel, "cells": [cell for soc in firsts for cell in cells[kernel, soc]]} for kernel in kernels],
        "tiles": len({(row["kernel"], row["tile"]) for row in rows}),
    }


def _cell(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the tiles of one kernel come to, on one chip by one toolchain."""
    supported = [row for row in rows if row["supported"]]
    if not supported:
        return {"state": "none", "text": "–", "title": "the toolchain has no such target", "share": 0}
    fitting = [row for row in supported if row["fits"]]
    shares = [row["ub"][0] / row["ub"][1] for row in fitting]
    single = sum(row["double_buffered"] is False for row in fitting)
    state = "bad" if len(fitting) < len(supported) else "warn" if single else "good"
    text = f"{100 * max(shares):.0f} %" if shares else "0"
    title = f"{len(fitting)} of {len(supported)} tiles fit, {single} single-buffered"
    if len(fitting) < len(supported):
        text = f"{len(supported) - len(fitting)} of {len(supported)} fail"
    return {"state": state, "text": text, "title": title, "share": round(100 * max(shares, default=0))}


def _lint(launches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each kernel, rule and suppression: how many launches, and the first message."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for launch in launches:
        for finding in launch["findings"]:
            found.setdefault((launch["kernel"], finding["rule"], ""), []).append(finding["message"])
        for finding in launch["suppressed"]:
            found.setdefault((launch["kernel"], finding["rule"], finding["reason"]), []).append(finding["message"])
    return [
        {"kernel": kernel, "rule": rule, "reason": reason, "count": len(messages), "example": messages[0]}
        for (kernel, rule, reason), messages in sorted(found.items(), key=lambda item: (bool(item[0][2]), item[0]))
    ]


def _ledgers(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """By call: its launches' arguments, with what was useful of what moved, and the lengths of transfers."""
    calls: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        useful = (row["useful_read"] + row["useful_written"]) / (row["read"] + row["written"])
        longest_first = sorted(((int(length), count) for length, count in row["lengths"].items()), reverse=True)
        lengths = ", ".join(f"{count:,} × {size(length)}" for length, count in longest_first)
        calls.setdefault(row["call"], []).append({**row, "useful": useful, "lengths_text": lengths or "–"})
    return [{"label": label, "rows": found} for label, found in calls.items()]
