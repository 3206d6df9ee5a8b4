"""Operators of `npu` tensors, without CANN: PyTorch's CPU kernels in place of torch_npu's. `import torch` installs them."""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

_KEPT = {  # torch_npu's own: memory, devices and views
    *("_copy_from", "_copy_from_and_resize", "_foreach_copy_", "_to_copy", "clone", "contiguous", "copy_"),
    *("empty.memory_format", "empty_like", "empty_strided", "new_empty_strided", "fill_.Scalar", "zero_"),
    *("resize", "resize_", "resize_as_", "set_", "set_.source_Storage", "set_.source_Storage_storage_offset"),
    *("set_.source_Tensor", "set_data", "storage", "is_set_to", "_has_compatible_shallow_copy_type"),
    *("mm", "mm.out", "addmm", "addmm.out", "addmm_"),  # opapi.cpp has them: the CPU's read what lies between rows
    *("lift", "_pin_memory", "is_pinned", "pin_memory", "record_stream", "_local_scalar_dense"),
}
_WIDER = ("dtype", "dtype_out")  # overloads with a result wider than the factors: PyTorch's CPU kernels have none
_libraries: list[Any] = []  # they register for as long as they live


def install() -> None:
    """Register the CPU kernels in place of torch_npu's, once in a process."""
    if _libraries:
        return
    import torch
    import torch_npu  # noqa: F401

    torch.ops.load_library(Path(os.environ["ASCEND_HOME_PATH"]) / "lib64" / "libnpu_offline_aten.so")
    names = []
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
        bare = name.removeprefix("aten::")
        if bare == name or bare in _KEPT or bare.rpartition(".")[2] in _WIDER:
            continue
        if torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU") and not _is_view(torch, bare):
            names.append(bare)
    with _Quiet():
        torch.ops.npu_offline_cann.install(names)
    _install_python(torch)


def _is_view(torch: Any, name: str) -> bool:
    """Whether an operator returns a view of its argument: through a CPU kernel it would be a copy."""
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    aliases = [result.alias_info for result in operator._schema.returns]
    return torch.Tag.inplace_view in operator.tags or any(alias is not None and not alias.is_write for alias in aliases)


class _Quiet:
    """Sends standard error to a file: the dispatcher warns of each replaced kernel."""

    def __enter__(self) -> None:
        self._kept, self._file = os.dup(2), tempfile.TemporaryFile()
        os.dup2(self._file.fileno(), 2)

    def __exit__(self, *_: object) -> None:
        os.dup2(self._kept, 2)
        os.close(self._kept)
        self._file.close()


def _install_python(torch: Any) -> None:
    """Operators that torch_npu has where PyTorch has none for a CPU, or for sparse tensors."""
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)

    def matmul_backward(
        gradient: Any, a: Any, b: Any, mask: list[bool]
    ) -> tuple[Any, Any]:  # of two dimensions or more each
        da = torch.matmul(gradient, b.mT).sum_to_size(a.shape) if mask[0] else None
        db = torch.matmul(a.mT, gradient).sum_to_size(b.shape) if mask[1] else None
        return da, db

    def coalesce(sparse: Any) -> Any:
        done = torch.sparse_coo_tensor(sparse._indices().cpu(), sparse._values().cpu(), sparse.shape).coalesce()
        indices, values = done._indices().to(sparse.device), done._values().to(sparse.device)
        return torch.sparse_coo_tensor(indices, values, sparse.shape, is_coalesced=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("matmul_backward", matmul_backward, "PrivateUse1")
        library.impl("_coalesce", coalesce, "SparsePrivateUse1")
