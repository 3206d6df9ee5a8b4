"""Import every module of packages, with a stub of all that is neither the standard library's nor theirs.

A script for any Python: `python import_every_module.py STDLIB SOURCE ...`, where a SOURCE is a package's folder and STDLIB
are the names of another Python's own modules, with commas between: what this Python lacks of them is not stubbed.
"""

import importlib
import importlib.machinery
import pkgutil
import sys
from pathlib import Path
from types import ModuleType


class Anything:
    """What an outside module holds: it can be called, subscripted, joined in a type, a decorator and a base class."""

    def __getattr__(self, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self.__dict__.setdefault(name, Anything())  # the same each time: a type is a key of tables

    def __call__(self, *arguments, **named):
        return Anything()

    def __mro_entries__(self, bases):
        return (type("Outside", (), {}),)

    def __iter__(self):
        return iter(())

    def __getitem__(self, key):
        return Anything()

    def __or__(self, other):
        return getattr(self, f"or {other}")

    __ror__ = __or__


class Outside(ModuleType):
    """An outside module, and a package of any other."""

    __path__ = []
    __version__ = "2.13.0"

    def __getattr__(self, name):
        value = getattr(Anything(), name)
        setattr(self, name, value)
        return value


class Outsiders:
    """Finds and loads `Outside` for each name that is of neither the standard library nor our packages."""

    def __init__(self, known):
        self.known = known

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in self.known:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Outside(spec.name)

    def exec_module(self, module):
        pass


def main(standard, *sources):
    names = [Path(source).name for source in sources]
    sys.path[:0] = [str(Path(source).parent) for source in sources]
    sys.meta_path.append(Outsiders({*standard.split(","), *sys.builtin_module_names, *names}))
    for name in names:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            if not module.name.endswith(".__main__"):
                importlib.import_module(module.name)


if __name__ == "__main__":
    main(*sys.argv[1:])
