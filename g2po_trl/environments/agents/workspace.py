"""A folder that an agent works on: its copy for an episode, its state, and what the episode changed."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import io
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch, translate
from pathlib import Path

from ...utils.errors import G2POError

# Names of files and folders that are no part of a state or a diff: caches, and what version control keeps.
IGNORED = (".git", ".hg", ".venv", "node_modules", "__pycache__", ".*_cache", "*.pyc", ".coverage", "*.egg-info")
_IGNORED = re.compile("|".join(map(translate, IGNORED)))
MAX_DIFF_CHARACTERS = 50_000  # of which the rest is counted
MAX_FILE_BYTES = 2**20  # of a file that a diff shows line by line


class Workspace:
    """An episode's copy of a folder.

    Args:
        source: the folder. It is not changed.
        folder: where the copy is made; must not exist.

    Raises:
        G2POError: if the source is no folder.
    """

    def __init__(self, source: Path, folder: Path):
        if not source.is_dir():
            raise G2POError(f"workspace is {str(source)!r}, which is no folder: give a folder that exists")
        self.source, self.folder = source, folder
        _copy(source, folder)
        self._digests: dict[str, tuple[tuple[int, ...], bytes]] = {}  # by path: what `stat` says, and the contents'

    def state(self) -> str:
        """Return a digest of all files but for `IGNORED`, by name and content. They are read when they change."""
        state = hashlib.blake2b(digest_size=16)
        digests = {}
        for path in _files(self.folder):
            name = path.relative_to(self.folder).as_posix()
            with contextlib.suppress(OSError):  # removed meanwhile
                seen = path.lstat()
                signs = (seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_mode)
                known = self._digests.get(name)
                digests[name] = known if known and known[0] == signs else (signs, _digest(path, seen.st_mode))
                state.update(name.encode("utf-8", "surrogateescape") + b"\0" + digests[name][1])
        self._digests = digests
        return state.hexdigest()

    def restore(self, patterns: Iterable[str]) -> None:
        """Put files back as they are in the source, such as tests that must not be changed.

        Args:
            patterns: of names relative to the folder, such as `tests` (and all below) or `test_*.py`. What the source
                does not have is removed.
        """
        patterns = [pattern.rstrip("/") for pattern in patterns]

        def matching(folder: Path) -> Iterator[Path]:
            for path in list(_files(folder)):
                name = path.relative_to(folder).as_posix()
                if any(fnmatch(name, one) or fnmatch(name, f"{one}/*") for one in patterns):
                    yield path.relative_to(folder)

        for name in matching(self.folder):
            (self.folder / name).unlink()
        for name in matching(self.source):
            for parent in [*name.parents][-2::-1]:  # none of them leads out of the folder
                if (self.folder / parent).is_symlink() or (self.folder / parent).is_file():
                    (self.folder / parent).unlink()
                (self.folder / parent).mkdir(exist_ok=True)
            shutil.copy2(self.source / name, self.folder / name, follow_symlinks=False)

    def diff(self) -> str:
        """Return what differs from the source, as a unified diff of at most `MAX_DIFF_CHARACTERS` characters."""
        sides = [{path.relative_to(side): path for path in _files(side)} for side in (self.source, self.folder)]
        names = sorted(set().union(*sides))
        text = "".join(_change(name.as_posix(), *(side.get(name) for side in sides)) for name in names)
        surplus = len(text) - MAX_DIFF_CHARACTERS
        return text if surplus <= 0 else f"{text[:MAX_DIFF_CHARACTERS]}\n[{surplus:,} characters are left out]\n"


def _copy(source: Path, target: Path) -> None:
    """Copy a file or a folder with its links; blocks are shared where the file system can do so."""
    if sys.platform == "linux" and shutil.which("cp"):
        subprocess.run(["cp", "-a", "--reflink=auto", "--", source, target], check=True, capture_output=True)
    elif source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copy2(source, target, follow_symlinks=False)


def _files(folder: Path) -> Iterator[Path]:
    """Yield all files and links below a folder, sorted, without `IGNORED`."""
    for root, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        folders[:] = sorted(name for name in folders if name not in links and not _is_ignored(name))
        yield from (Path(root, name) for name in sorted([*files, *links]) if not _is_ignored(name))


def _is_ignored(name: str) -> bool:
    return _IGNORED.match(name) is not None


def _digest(path: Path, mode: int) -> bytes:
    """Return a digest of a file's contents and whether it may be executed; of a link, of its target."""
    if stat.S_ISLNK(mode):
        return hashlib.blake2b(b"link " + os.fsencode(os.readlink(path)), digest_size=16).digest()
    if not stat.S_ISREG(mode):
        return b"special"
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest()
    return digest + bytes([bool(mode & stat.S_IXUSR)])


def _change(name: str, before: Path | None, after: Path | None) -> str:
    """Return the unified diff of a file; `None`: there is none."""
    old, new = _lines(before), _lines(after)
    if old == new:
        return ""
    if isinstance(old, bytes) or isinstance(new, bytes):
        return f"Binary file {name} differs\n"
    names = ["/dev/null" if old is None else f"a/{name}", "/dev/null" if new is None else f"b/{name}"]
    lines = difflib.unified_diff(old or [], new or [], *names)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _lines(path: Path | None) -> list[str] | bytes | None:
    """Return a file's lines, or a digest if it is large, no text, or a link."""
    if path is None:
        return None
    seen = path.lstat()
    if stat.S_ISREG(seen.st_mode) and seen.st_size <= MAX_FILE_BYTES:
        with contextlib.suppress(UnicodeDecodeError):
            return list(io.StringIO(path.read_bytes().decode(), newline="\n"))
    return _digest(path, seen.st_mode)
