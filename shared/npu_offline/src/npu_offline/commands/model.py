"""`npu-offline model`: a training step of a model, with every kernel and every layer of ours judged, on one page."""

from __future__ import annotations

import argparse
import datetime
import functools
import multiprocessing
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import OfflineError
from ..toolchain import compilers as toolchains
from .options import soc_name
from .output import new_console, new_folder, print_line, write_json, writing_to

if TYPE_CHECKING:
    from . import Subparsers


def add_parser(commands: Subparsers) -> None:
    """Add `model` to the command line."""
    parser = commands.add_parser("model", help="judge every kernel and layer of a model's training step, on one page")
    parser.add_argument(
        "target",
        nargs="?",
        metavar="MODEL",
        help="a type of language model of transformers, such as llama; a FILE.py that trains; or none: -- python FILE ...",
    )
    parser.add_argument("given", nargs="*", metavar="NAME=VALUE", help="sizes of the model, as its configuration names them")
    parser.add_argument("--soc", default="Ascend910B4", type=soc_name, metavar="NAME", help="(%(default)s)")
    parser.add_argument("--toolchain", action="append", choices=toolchains.VERSIONS, help="whose final modules run (all)")
    parser.add_argument("--output", type=Path, default=Path("certificate"), metavar="FOLDER", help="(%(default)s)")
    parser.set_defaults(run=_run, script=[])


def _run(options: argparse.Namespace) -> int:
    words = options.script or [options.target]
    if bool(options.script) == bool(options.target):
        raise OfflineError(
            "write: npu-offline model MODEL, npu-offline model FILE.py, or npu-offline model -- python FILE ..."
        )
    if words[0].endswith(".py"):
        words = ["python", *words]
    if options.given and len(words) > 1:
        raise OfflineError(f"{options.given[0]!r} is for a model; arguments of a program: -- python FILE ...")
    if toolchains.is_a5(options.soc):
        raise OfflineError(f"--soc is {options.soc}: the emulation has none of its vector functions")
    versions = [each for each in options.toolchain or toolchains.VERSIONS if toolchains.supported(options.soc, each)]
    new_folder("--output", options.output)
    certificate = _certificate(words, options.given, options.soc, versions)
    from ..reporting.page import render_certificate

    write_json("--output", options.output / "certificate.json", certificate)
    with writing_to("--output", options.output):
        (options.output / "index.html").write_text(render_certificate(certificate))
    return _say(certificate, options.output / "index.html")


def _certificate(words: Sequence[str], given: Sequence[str], soc: str, versions: Sequence[str]) -> dict[str, Any]:
    """What was found with each toolchain, in one; each has a process of its own: a program may change what it imports."""
    import torch

    from ..check.certificate import VERDICTS, certify

    judge = functools.partial(certify, words, given, soc)
    if len(versions) == 1:
        found = [judge(versions[0])]
    else:
        workers = min(len(versions), len(os.sched_getaffinity(0)))
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=spawn, max_tasks_per_child=1) as pool:
            found = list(pool.map(judge, versions))
    joined = {name: [row for each in found for row in each[name]] for name in ("kernels", "layers")}
    return {
        "target": " ".join(words[1:] if len(words) > 1 else [*words, *given]),
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": f"torch {torch.__version__}{found[0]['transformers']}",
        "soc": soc,
        "toolchains": list(versions),
        **{name: sorted(rows, key=lambda row: VERDICTS.index(row["verdict"])) for name, rows in joined.items()},
        "left": found[0]["left"],
        "others": list(dict.fromkeys(name for each in found for name in each["others"])),
        "skipped": found[0]["skipped"],
        "stopped": list(dict.fromkeys(each["stopped"] for each in found if each["stopped"])),
        "status": max(each["status"] for each in found),
    }


def _say(certificate: dict[str, Any], page: Path) -> int:
    """Print what is not right and the counts; returns the exit status."""
    console, bad = new_console(), Counter[str]()
    for name, key in (("kernels", "kernel"), ("layers", "layer")):
        rows = certificate[name]
        for row in rows:
            if row["verdict"] != "right":
                bad[row["verdict"]] += 1
                print_line(console, f"{row[key]}, {row['toolchain']}: {row['verdict']}: {'; '.join(row['why'])}")
        right = sum(row["verdict"] == "right" for row in rows)
        print_line(console, f"{name} on {', '.join(certificate['toolchains'])}: {right} of {len(rows)} right")
    for line in certificate["stopped"]:
        print_line(console, f"stopped: {line}")
    for name in certificate["others"]:
        print_line(console, f"not judged: {name}")
    print_line(console, str(page))
    if bad["wrong"] or certificate["status"]:
        return 1
    return 2 if bad or certificate["stopped"] or not certificate["kernels"] else 0
