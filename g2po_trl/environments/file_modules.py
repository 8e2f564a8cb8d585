"""Modules of Python files that are named by their path, so that files of one name in two folders stay apart.

Such a module is named by its path without the suffix, dots quoted. Pickles of its classes hold this name, and every
process that has imported this module finds the file by it. `import helpers` in such a file, or in what it imports
from its folder, means the `helpers` next to it; the standard library comes first.
"""

from __future__ import annotations

import builtins
import importlib
import os
import sys
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any


def import_file(path: str | Path) -> ModuleType:
    """Return the module of a file. Its folder is appended to `sys.path`, for imports by name."""
    path = Path(path).resolve()
    if (folder := str(path.parent)) not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(_name_of(path))


def _name_of(path: Path) -> str:
    """Return the name of the module of a file or package: its own one where it is imported already, as by a script."""
    loaded = getattr(sys.modules.get(path.stem), "__file__", None)
    if loaded is not None and Path(loaded).resolve() in (path, path / "__init__.py"):
        return path.stem
    return str(path.with_suffix("")).replace("%", "%25").replace(".", "%2e")


class _Loader(SourceFileLoader):
    """Loads a file whose imports are looked up in `folder` first."""

    def __init__(self, name: str, path: str, folder: str):
        super().__init__(name, path)
        self.folder = folder

    def exec_module(self, module: ModuleType) -> None:
        main = sys.modules["__main__"]
        if getattr(main, "__spec__", None) is None and not hasattr(main, "__file__"):
            # As in workers. Processes that multiprocessing starts import this one, and so find files.
            main.__spec__ = find_spec(f"{__package__}.pool.worker")
        module.__builtins__ = {**vars(builtins), "__import__": partial(_import_beside, self.folder, self.path)}
        super().exec_module(module)


def _import_beside(folder: str, importer: str, name: str, *args: Any, **kwargs: Any) -> Any:
    """Import as `__import__` does, but a file or package of the folder by its path."""
    level = args[3] if len(args) > 3 else kwargs.get("level", 0)
    top = name.partition(".")[0]
    if level == 0 and top not in sys.stdlib_module_names and _is_beside(folder, importer, top):
        name = _name_of(Path(folder, top)) + name[len(top) :]
    return builtins.__import__(name, *args, **kwargs)


def _is_beside(folder: str, importer: str, name: str) -> bool:
    """Return whether a folder has a source file or a package of that name, other than the importing file itself."""
    spec = PathFinder.find_spec(name, [folder])
    if spec is None or spec.origin == importer:
        return False
    if spec.origin is None:  # a folder without __init__.py, which may hold data: installed packages come first
        return getattr(find_spec(name), "origin", None) is None
    return spec.origin.endswith(".py")


class _Finder:
    """Finds the modules that are named by their path."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith("/"):
            return None
        place = Path(name.partition(".")[0].replace("%2e", ".").replace("%25", "%"))
        if path is not None:  # a part of a package
            found = PathFinder.find_spec(name, path)
            file = found.origin if found and isinstance(found.loader, SourceFileLoader) else None
        else:
            files = (f"{place}.py", str(place / "__init__.py"))
            file = next((file for file in files if os.path.isfile(file)), None)
            found = ModuleSpec(name, None, is_package=True) if place.is_dir() else None
            if found is not None:
                found.submodule_search_locations.append(str(place))
        if file is None:
            return found
        return spec_from_file_location(name, file, loader=_Loader(name, file, str(place.parent)))


sys.meta_path.insert(0, _Finder)
