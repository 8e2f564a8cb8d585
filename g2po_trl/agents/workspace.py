"""A folder that an agent works on: its copy for an episode, its state, and what the episode changed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Iterable, Iterator
from fnmatch import translate
from pathlib import Path

from ..utils.options import require

# Names of files and folders that are no part of a state or a diff: of version control, caches, of agents.
IGNORED = (".git", ".venv", "node_modules", "__pycache__", ".*_cache", "*.pyc", ".coverage", "*.egg-info", ".aider*")
MAX_DIFF_CHARACTERS = 50_000
MAX_FILE_BYTES = 2**20  # of a file that a diff shows line by line
_RECENT_NS = 100_000_000  # two changes within a tick of the system's clock look like one
MAX_BYTES = 2**26  # of a file; of a larger one, as many at its beginning are part of the state


class Workspace:
    """An episode's copy of a folder.

    Args:
        source: the folder. It is not changed. It has no link that leads out of it or is absolute, since the agent
            would change what it leads to (but, from ignored folders, to programs such as `.venv/bin/python`, and to
            files that cannot be written), and no `.git` file: `G2POError`.
        folder: where the copy is made; must not exist.
        ignore: names of files and folders that are no part of a state or a diff, beyond `IGNORED`.
    """

    def __init__(self, source: Path, folder: Path, ignore: Iterable[str] = ()):
        self._ignored = re.compile("|".join(map(translate, (*IGNORED, *ignore))))
        require(source.is_dir(), "workspace", str(source), "give a folder that exists")
        self.source, self.folder = source.resolve(), folder
        remedy = "its .git is a file, as in a worktree or submodule: give a clone"
        require(not (source / ".git").is_file(), "workspace", str(source), remedy)
        for name in filter(lambda name: os.path.islink(f"{self.source}/{name}"), _files(self.source)):
            link = self.source / name
            is_inside = Path(os.path.realpath(link)).is_relative_to(self.source)  # through other links, too
            leads_out = os.path.isabs(os.readlink(link)) or not is_inside
            is_safe = os.access(link, os.X_OK) or link.exists() and not os.access(link, os.W_OK)
            leads_out &= link.is_dir() or not (is_safe and any(map(self._ignored.match, Path(name).parts)))
            require(not leads_out, "workspace", str(source), f"its link {name} leads out of it: remove it")
        copied = subprocess.run(["cp", "-a", "--reflink=auto", "--", self.source, folder], stderr=subprocess.PIPE)
        require(not copied.returncode, "workspace", str(source), copied.stderr.decode("utf-8", "replace").strip())
        self._digests: dict[tuple, bytes] = {}

    def state(self) -> str:
        """Return a digest of the names and contents of all files except `IGNORED`; only changed ones are read."""
        state, now, known = hashlib.blake2b(digest_size=16), time.time_ns(), self._digests
        self._digests = {}
        for name in _files(self.folder, self._ignored):
            path = os.path.join(self.folder, name)
            with contextlib.suppress(OSError):  # removed meanwhile, or closed
                seen = os.lstat(path)
                signs = name, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_mode
                digest = known.get(signs) or hashlib.blake2b(b"\0".join(_read(path)), digest_size=16).digest()
                state.update(os.fsencode(name) + b"\0" + digest)
                if now - seen.st_ctime_ns > _RECENT_NS:
                    self._digests[signs] = digest
        return state.hexdigest()

    def restore(self, patterns: Iterable[str]) -> None:
        """Restore files from the source, such as tests, and remove matching ones that it does not have; also caches.

        Patterns are of names relative to the folder: `tests` (and all below), `test_*.py`, or `**/test_*.py` anywhere.
        """
        patterns = list(patterns)
        _be_folder(self.folder)
        for name in matching(self.folder, patterns):
            (self.folder / name).unlink()
        for name in matching(self.source, patterns):
            for parent in [*Path(name).parents][::-1]:  # none of them leads out of the folder
                _be_folder(self.folder / parent)
            path = self.folder / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            shutil.copy2(self.source / name, path, follow_symlinks=False)

    def diff(self) -> str:
        """Return the differences from the source, as a unified diff of about `MAX_DIFF_CHARACTERS` at most."""
        sides = {folder: set(_files(folder, self._ignored)) for folder in (self.source, self.folder)}
        text = ""
        for name in sorted(set.union(*sides.values())):
            text += _change(name, *(folder / name if name in side else None for folder, side in sides.items()))
            if len(text) > MAX_DIFF_CHARACTERS:
                return f"{text[:MAX_DIFF_CHARACTERS]}\n[the rest is left out]\n"
        return text


def matching(folder: Path, patterns: Iterable[str]) -> list[str]:
    """Return the names of the files below a folder that patterns match, see `Workspace.restore`."""
    patterns = [os.path.normpath(pattern) for pattern in patterns]
    patterns += [pattern.removeprefix("**/") for pattern in patterns]
    wanted = re.compile("|".join(translate(form) for pattern in patterns for form in (pattern, f"{pattern}/*")))
    return [name for name in _files(folder) if patterns and wanted.match(name)]


def _be_folder(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        path.mkdir()


def _files(folder: Path, ignored: re.Pattern[str] | None = None) -> Iterator[str]:
    """Yield the names of files and links below a folder, in an order, without what is ignored."""
    for root, folders, files in os.walk(folder) if not os.path.islink(folder) else ():
        if ignored:
            folders[:], files = ([name for name in names if not ignored.match(name)] for names in (folders, files))
        folders.sort()
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]  # not walked into
        yield from (os.path.relpath(os.path.join(root, name), folder) for name in sorted([*files, *links]))


def _read(path: str | Path | None) -> tuple[bytes, bytes]:
    """Return what a file is, and its first `MAX_BYTES`; of a link, its target. `None`: there is no file."""
    if path is None:
        return b"none", b""
    with contextlib.suppress(OSError):  # closed, or removed meanwhile
        seen = os.lstat(path)
        if stat.S_ISLNK(seen.st_mode):
            return b"link", os.fsencode(os.readlink(path))
        if stat.S_ISREG(seen.st_mode):
            # If something else has taken its place, such as a pipe that nobody writes to, this does not wait.
            with open(path, "rb", opener=lambda p, how: os.open(p, how | os.O_NONBLOCK | os.O_NOFOLLOW)) as file:
                return b"file %d %d" % (seen.st_size, seen.st_mode & stat.S_IXUSR), file.read(MAX_BYTES)
    return b"special", b""


def _change(name: str, old: Path | None, new: Path | None) -> str:
    """Return the unified diff of a file, or that it differs if it is large, not text, or not a file."""
    name, sides = os.fsencode(name).decode("utf-8", "replace"), (_read(old), _read(new))
    if sides[0] == sides[1]:
        return ""
    made = b""
    if all(kind.startswith((b"none", b"file")) and len(content) <= MAX_FILE_BYTES for kind, content in sides):
        paths = [os.devnull if path is None else os.fspath(path) for path in (old, new)]
        labels = [f"-L{os.devnull if path is None else f'{side}/{name}'}" for side, path in (("a", old), ("b", new))]
        made = subprocess.run(["diff", "-u", *labels, *paths], stdout=subprocess.PIPE).stdout
    return made.decode("utf-8", "replace") if made.startswith(b"---") else f"File {name} differs\n"
