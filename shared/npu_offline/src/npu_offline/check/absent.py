"""Modules that a kernel's file imports and that are not installed: what the kernel does not call may be missing."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

from ..errors import UnsupportedError

_MOST = 40  # modules that a file may miss


class _Base:
    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def __init_subclass__(cls, **options: Any) -> None:
        pass


class Absent:
    """A name of a module that is not there: false, its calls yield it, as a decorator or a base it changes nothing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) and not options else self

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (_Base,)

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"{self._name}, which is not installed"


class _AbsentModule(ModuleType):
    __path__: list[str] = []
    __version__ = "0"

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")


def torch_npu_stand_in() -> ModuleType:
    """An empty torch_npu: programs import its operators, and here they cannot run."""
    torch_npu = module_from_spec(ModuleSpec("torch_npu", None))
    torch_npu.__getattr__ = _operator  # type: ignore[method-assign]
    return torch_npu


def _operator(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)

    def operator(*_: object, **__: object) -> None:
        raise UnsupportedError(
            f"torch_npu.{name} runs an operator of CANN's, not a Triton kernel: take another way in the program"
        )

    return operator


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def import_without(load: Callable[[], None]) -> list[str]:
    """Import something, with modules of `Absent` in place of those that are not installed.

    Args:
        load: imports it; called again for each module that is missing.

    Returns:
        The packages that were missing.

    Raises:
        ModuleNotFoundError: it fails without them, or misses a part of what is installed.
        Exception: what `load` raises where nothing is missing.
    """
    missing: list[str] = []
    try:
        while True:
            before = set(sys.modules)
            try:
                load()
                return [name for name in missing if "." not in name]
            except ModuleNotFoundError as error:
                name = error.name or ""
                parent = name.rpartition(".")[0]
                if not name or name in sys.modules or (parent and parent not in missing) or len(missing) == _MOST:
                    raise
                sys.modules[name] = module_from_spec(ModuleSpec(name, _Loader()))
                missing.append(name)
                for half in set(sys.modules) - before:  # modules of a package whose import has failed
                    if half.partition(".")[0] not in sys.modules:
                        del sys.modules[half]
            except Exception as error:
                if missing:
                    wanted = ", ".join(name for name in missing if "." not in name)
                    raise ModuleNotFoundError(f"{wanted}: not installed") from error
                raise
    finally:
        for name in missing:
            sys.modules.pop(name, None)


def later_names() -> dict[str, ModuleType]:
    """Modules under the names that triton-ascend has them under after 3.2.0."""
    base = "triton.language.extra"
    return {f"{base}.cann{name}": importlib.import_module(f"{base}.ascend{name}") for name in ("", ".libdevice")}


@contextlib.contextmanager
def imported(modules: dict[str, ModuleType]) -> Iterator[None]:
    """Until the block ends, modules are imported under these names."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
