"""What was launched: how often, with which tile, how full the Unified Buffer is, what moved against what must move."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import npu_offline
import npu_tiling
import torch
from rich import box
from rich.table import Table

from .blocks import OURS, minimum_bytes
from .training import Setup, batches, build, loss_of

TOOLCHAIN = "1.2.0"  # whose plan the Unified Buffer column shows


@dataclass
class KernelUse:
    """All launches of one compiled kernel.

    Attributes:
        kernel, grid, constants: as in `npu_offline.Launch`.
        report: the compiler's; None where the toolchain has no such chip.
        per_step: launches in one training step.
        launches: how many so far.
        traffic: of all of them together, by argument; empty where nothing counts it.
    """

    kernel: str
    grid: int
    constants: Mapping[str, Any]
    report: npu_offline.Report | None
    per_step: int = 0
    launches: int = 0
    traffic: dict[str, npu_offline.Traffic] = field(default_factory=dict)

    @property
    def tile(self) -> str:
        """BLOCK_M x BLOCK_N."""
        return " x ".join(str(value) for name, value in self.constants.items() if name.startswith("BLOCK"))

    @property
    def tensors(self) -> str:
        """What it reads, and what it writes."""
        read = [name.removeprefix("p_") for name, traffic in self.traffic.items() if traffic.read]
        written = [name.removeprefix("p_") for name, traffic in self.traffic.items() if traffic.written]
        return f"{', '.join(read)} -> {', '.join(written)}"

    @property
    def read(self) -> int:
        """Bytes of one launch."""
        return sum(traffic.read for traffic in self.traffic.values()) // self.launches

    @property
    def written(self) -> int:
        """Bytes of one launch."""
        return sum(traffic.written for traffic in self.traffic.values()) // self.launches


class Kernels:
    """The kernels of a training run on one Ascend chip, in the order of first launch, those of one name together.

    One step is launched without running it, and the Ascend compiler says how each kernel uses the chip; then `count`
    adds what the run itself launched.
    """

    def __init__(self, setup: Setup, soc: str) -> None:
        self._setup = setup
        self._chip = npu_tiling.soc(soc)
        self._uses: dict[tuple[str, str], KernelUse] = {}
        model, windows = build(setup, OURS, torch.device("cpu")), batches(setup)[0]
        with npu_offline.record(soc) as records:
            torch.autograd.backward(loss_of(model, windows))
        compiles = npu_offline.supported(soc, TOOLCHAIN)
        for record in records:
            key = _key(record.name, record.constants)
            if key not in self._uses:
                report = npu_offline.compile_kernel(record, soc=soc, toolchain=TOOLCHAIN) if compiles else None
                self._uses[key] = KernelUse(record.name, record.grid[0], record.constants, report)
            self._uses[key].per_step += 1

    def __iter__(self) -> Iterator[KernelUse]:
        names = list(dict.fromkeys(use.kernel for use in self._uses.values()))
        return iter(sorted(self._uses.values(), key=lambda use: names.index(use.kernel)))

    def count(self, launches: list[npu_offline.Launch]) -> None:
        """Add emulated launches, and forget them there: a long run has many."""
        for launch in launches:
            new = KernelUse(launch.kernel, launch.grid[0], launch.constants, None)
            use = self._uses.setdefault(_key(launch.kernel, launch.constants), new)
            use.launches += 1
            for name, traffic in launch.arguments.items():
                use.traffic[name] = use.traffic.get(name, npu_offline.Traffic()) + traffic
        launches.clear()

    def overflowing(self) -> list[str]:
        """Names and tiles of kernels that the compiler finds no place for on the chip."""
        return [f"{use.kernel} {use.tile}" for use in self if use.report is not None and not use.report.fits]

    def table(self) -> Table:
        """What each kernel used and moved; the traffic is left out where nothing counted it. Fits 80 columns."""
        counted = any(use.traffic for use in self)
        title = f"Kernels on {self._chip.name}; UB, the Unified Buffer, as compiler {TOOLCHAIN} plans it"
        table = Table(title=title, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
        table.add_column("kernel", min_width=12)
        memory = f"UB KiB\nof {self._chip.ub_bytes / 1024:.0f}"
        traffic = ("kB\nread", "kB\nwritten", "kB\nleast", "over\nleast") if counted else ()
        for heading in ("\nlaunches", f"cores\nof {self._chip.vector_cores}", "\ntile", memory, *traffic):
            table.add_column(heading, justify="right", no_wrap=True)
        for use in self:
            launches = use.launches if counted else use.per_step * self._setup.steps
            cells = [
                use.kernel.removesuffix("_kernel"),
                f"{launches:,}",
                str(use.grid),
                use.tile,
                _unified_buffer(use.report),
            ]
            if counted:
                minimum = self._minimum(use)
                ratio = f"{(use.read + use.written) / minimum:.3f}" if minimum else "-"
                cells[0] += f"\n[dim]{use.tensors}[/dim]"
                cells += [_kilobytes(use.read), _kilobytes(use.written), _kilobytes(minimum) if minimum else "-", ratio]
            table.add_row(*cells)
        return table

    def summary(self) -> str | None:
        """The traffic of a whole step, and against the minimum where that is stated; None where nothing counted it."""
        if not any(use.traffic for use in self):
            return None
        moved, bounded, minimum = 0, 0, 0
        for use in self:
            step = (use.read + use.written) * use.per_step
            bound = self._minimum(use)
            moved += step
            if bound is not None:
                bounded += step
                minimum += bound * use.per_step
        return (
            "Traffic is of one launch, as the emulator counts it. The least, for M rows of D elements: 2MD forward and 3MD "
            "backward for a norm, 2MD for the embedding; parameters once. "
            f"All kernels of one step move {moved / 1e6:.1f} MB; those with a least {bounded / 1e6:.1f} MB, "
            f"{bounded / minimum:.3f} times it: statistics, partial sums and each core's copy of the parameters come on top."
        )

    def _minimum(self, use: KernelUse) -> int | None:
        # Heads x head size is the hidden size, so this holds for the norms of queries and keys too.
        elements = self._setup.batch * self._setup.context * self._setup.model.hidden_size
        return minimum_bytes(use.kernel, use.constants, elements, torch.float32.itemsize)


def _key(kernel: str, constants: Mapping[str, Any]) -> tuple[str, str]:
    return kernel, repr(sorted(constants.items()))


def _kilobytes(count: int) -> str:
    return f"{count / 1e3:,.0f}" if count >= 1e5 else f"{count / 1e3:.1f}"


def _unified_buffer(report: npu_offline.Report | None) -> str:
    if report is None:
        return "not known"
    if report.fits:
        return f"{report.ub.used / 1024:.1f}"
    needed = report.required_ub_bytes
    return "[bold red]too much[/]" if needed is None else f"[bold red]{needed / 1024:.1f}[/]"
