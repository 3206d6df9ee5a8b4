"""Measure the gallery's calls and write its page: `python -m tools.gallery [--only TEXT]`.

It needs the compilers (npu-offline fetch), `pip install --no-deps liger-kernel==0.8.5 fla-core==0.6.0 einops==0.8.2`, and
the repositories of triton-ascend and mojo_opset. Calls of a source that is missing keep their row.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import sys
import time
import traceback
from pathlib import Path

from npu_offline import OfflineError
from npu_offline.errors import reason_of

from . import count, page, sources, suites, tallies
from .calls import ENTRIES
from .measure import Row, measure, short

RESULTS = Path(__file__).parent / "results" / "gallery.json"


def main() -> int:
    """Measure what was asked for, keep the other rows, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m tools.gallery", description=__doc__)
    parser.add_argument("--tutorials", type=Path, metavar="FOLDER", help="a clone of Ascend/triton-ascend")
    parser.add_argument("--mojo", type=Path, metavar="FOLDER", help="a clone of XPU-Forces/mojo_opset")
    parser.add_argument("--only", default="", metavar="TEXT", help="only calls whose source and name have this text")
    parser.add_argument("--page-only", action="store_true", help="measure nothing")
    options = parser.parse_args()
    sources.folders.update({name: getattr(options, name) for name in ("tutorials", "mojo") if getattr(options, name)})
    kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for entry in ENTRIES:
        key = f"{entry.source} {entry.name}"
        if options.page_only or options.only not in key:
            continue
        start = time.perf_counter()
        try:
            row = dataclasses.asdict(measure(entry.make()))
        except sources.MissingError as error:
            print(f"{key}: {error}", file=sys.stderr)
            continue
        except Exception as error:
            if not isinstance(error, OfflineError):
                traceback.print_exc()
            row = dataclasses.asdict(Row(time_problem=short(reason_of(error) or f"{type(error).__name__}: {error}")))
        kept[key] = {**row, "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
        print(f"{key}: {time.perf_counter() - start:.0f} s {row['results']}", file=sys.stderr, flush=True)
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    page.PAGE.write_text(page.rendered(kept, tallied()))
    return 0


def tallied() -> str:
    """The part of the page with counts."""
    return tallies.rendered(json.loads(count.RESULTS.read_text()), json.loads(suites.RESULTS.read_text()), suites.COMMITS)


if __name__ == "__main__":
    sys.exit(main())
