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
import time
from collections.abc import Iterable, Iterator
from fnmatch import translate
from pathlib import Path

from ..utils.errors import G2POError

# Names of files and folders that are no part of a state or a diff: caches, and what version control keeps.
IGNORED = (".git", ".hg", ".venv", "node_modules", "__pycache__", ".*_cache", "*.pyc", ".coverage", "*.egg-info")
_IGNORED = re.compile("|".join(map(translate, IGNORED)))
MAX_DIFF_CHARACTERS = 50_000
MAX_DIFF_PAIRS = 4_000_000  # of lines that are compared; of files that differ in more, all changed lines are shown
MAX_FILE_BYTES = 2**20  # of a file that a diff shows line by line
MAX_DIGEST_BYTES = 2**26  # of a file; larger ones are known by their size, beginning and end
_CONTEXT = 3  # lines around a change
_RECENT_NS = 100_000_000  # two changes within a tick of the system's clock look like one


class Workspace:
    """An episode's copy of a folder.

    Args:
        source: the folder. It is not changed.
        folder: where the copy is made; must not exist.

    Raises:
        G2POError: if the source is not a folder, or cannot be copied.
    """

    def __init__(self, source: Path, folder: Path):
        if not source.is_dir():
            raise G2POError(f"workspace is {str(source)!r}, which is not a folder: give a folder that exists")
        self.source, self.folder = source.resolve(), folder  # of a link, what it leads to is copied
        try:
            _copy(self.source, folder)
            _have_own_repository(self.source, folder)
            for name in _files(folder, all_names=True):
                if os.path.islink(folder / name):
                    _copy_link(self.source, folder, name)
        except (OSError, subprocess.CalledProcessError) as error:
            why = [*(getattr(error, "stderr", None) or b"").decode("utf-8", "replace").splitlines(), error][0]
            raise G2POError(f"workspace {str(source)!r} cannot be copied: {why}") from error
        self._digests: dict[str, tuple[tuple[int, ...], bytes]] = {}  # by name: what `stat` says, and the contents'

    def state(self) -> str:
        """Return a digest of the names and contents of all files except `IGNORED`; only changed ones are read."""
        state, now = hashlib.blake2b(digest_size=16), time.time_ns()
        digests = {}
        for name in _files(self.folder):
            path = os.path.join(self.folder, name)
            with contextlib.suppress(OSError):  # removed meanwhile, or closed
                seen = os.lstat(path)
                signs = (seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_mode)
                known = self._digests.get(name)
                digest = known[1] if known and known[0] == signs else _digest(path, seen, self.folder)
                state.update(os.fsencode(name) + b"\0" + digest)
                if now - seen.st_ctime_ns > _RECENT_NS:
                    digests[name] = signs, digest
        self._digests = digests
        return state.hexdigest()

    def restore(self, patterns: Iterable[str]) -> None:
        """Restore files from the source, such as tests that must not be changed; also caches.

        Args:
            patterns: patterns of names relative to the folder, such as `tests` (and all below), `test_*.py`, or
                `**/test_*.py` in any folder. Matching files that the source does not have are removed.
        """
        patterns = list(patterns)
        _be_folder(self.folder)
        _open_folders(self.folder)
        for name in matching(self.folder, patterns):
            (self.folder / name).unlink()
        for name in matching(self.source, patterns):
            for parent in [*Path(name).parents][::-1]:  # none of them leads out of the folder
                _be_folder(self.folder / parent)
            path = self.folder / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            if (self.source / name).is_symlink():
                _copy_link(self.source, self.folder, name)
            else:
                shutil.copy2(self.source / name, path, follow_symlinks=False)

    def diff(self) -> str:
        """Return the differences from the source, as a unified diff of about `MAX_DIFF_CHARACTERS` at most."""
        sides = {folder: set(_files(folder)) for folder in (self.source, self.folder)}
        names, text = sorted(set.union(*sides.values())), ""
        for place, name in enumerate(names):
            old, new = (folder / name if name in side else None for folder, side in sides.items())
            text += _change(name, _lines(old, self.source), _lines(new, self.folder))
            if len(text) > MAX_DIFF_CHARACTERS:
                surplus, left = len(text) - MAX_DIFF_CHARACTERS, len(names) - place - 1
                return f"{text[:MAX_DIFF_CHARACTERS]}\n[left out: {surplus:,} characters, and {left:,} files unread]\n"
        return text


def matching(folder: Path, patterns: Iterable[str]) -> list[str]:
    """Return the names of the files below a folder that patterns match, see `Workspace.restore`."""
    patterns = [os.path.normpath(pattern) for pattern in patterns]
    patterns += [pattern.removeprefix("**/") for pattern in patterns]
    wanted = re.compile(
        "|".join(translate(one) for pattern in patterns for one in (pattern, f"{pattern}/*")) or "(?!)"
    )
    return [name for name in _files(folder, all_names=True) if wanted.match(name)]


def _be_folder(path: Path) -> None:
    """Have a folder at this path, in place of anything else."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        path.mkdir()


def _open_folders(folder: Path) -> None:
    """Make all folders below readable and writable; their permissions are not part of a state or a diff."""
    for root, folders, _ in os.walk(folder.parent):
        folders[:] = [folder.name] if root == str(folder.parent) else folders
        for path in (os.path.join(root, name) for name in folders):
            with contextlib.suppress(FileNotFoundError):
                seen = os.lstat(path)
                if stat.S_ISDIR(seen.st_mode) and ~seen.st_mode & stat.S_IRWXU:
                    os.chmod(path, seen.st_mode | stat.S_IRWXU)


def _copy(source: Path, target: Path) -> None:
    """Copy a file or a folder with its links; blocks are shared where the file system can do so."""
    if sys.platform == "linux" and shutil.which("cp"):
        subprocess.run(["cp", "-a", "--reflink=auto", "--", source, target], check=True, capture_output=True)
    elif source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copy2(source, target, follow_symlinks=False)


def _copy_link(source: Path, folder: Path, name: str) -> None:
    """Copy a link: its target is in the copy if it is in the source, and otherwise unchanged."""
    path, target = folder / name, _target(source / name, source)
    if path.is_symlink() and os.readlink(path) == target:
        return
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def _target(link: str | Path, folder: Path) -> str:
    """Return what a link leads to: below the folder as a relative path, elsewhere as an absolute one."""
    parent, target = os.path.dirname(link), os.readlink(link)
    whole = os.path.normpath(os.path.join(parent, target))
    inside = Path(whole).is_relative_to(folder)
    if inside != os.path.isabs(target):
        return target
    return os.path.relpath(whole, parent) if inside else whole


def _have_own_repository(source: Path, folder: Path) -> None:
    """Give the copy a git repository of its own: that of a worktree or submodule is elsewhere, as `.git` says."""
    own, there = folder / ".git", (source / ".git").resolve()
    if not (own.is_file() or own.is_symlink()):
        if (own / "config").is_file():
            _leave_out(own / "config", rb"worktree\s*=\s*\"?/")
        return
    if there.is_file():
        there = there.parent / os.fsdecode(there.read_bytes()).removeprefix("gitdir:").strip()
    common = there / (there / "commondir").read_text().strip() if (there / "commondir").is_file() else there
    own.unlink()
    if not common.is_dir():  # it is broken, as it was
        return
    _copy(common.resolve(), own)
    shutil.rmtree(own / "worktrees", ignore_errors=True)
    for name in ("HEAD", "index"):
        if (there / name).is_file():
            shutil.copy2(there / name, own / name)
    _leave_out(own / "config", rb"(worktree|bare)\s*=")


def _leave_out(config: Path, setting: bytes) -> None:
    """Leave out of a file those lines that begin with a setting, since it is of the other folder."""
    text = config.read_bytes()
    if text != (kept := re.sub(rb"(?m)^\s*" + setting + rb".*\n", b"", text)):
        config.write_bytes(kept)


def _files(folder: Path, all_names: bool = False) -> Iterator[str]:
    """Yield the names of all files and links below a folder, in an order, without `IGNORED` unless `all_names`.

    There are none if it is removed, or a link.
    """
    if os.path.islink(folder):
        return
    for root, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        folders[:] = sorted(n for n in folders if n not in links and (all_names or not _is_ignored(n)))
        inside = os.path.relpath(root, folder)
        for name in sorted([*files, *links]):
            if all_names or not _is_ignored(name):
                yield name if inside == "." else f"{inside}/{name}"


def _is_ignored(name: str) -> bool:
    return _IGNORED.match(name) is not None


def _digest(path: str | Path, seen: os.stat_result, folder: Path) -> bytes:
    """Return a digest of a file's contents and whether it may be executed; of a link, of its target."""
    if stat.S_ISLNK(seen.st_mode):
        return hashlib.blake2b(b"link " + os.fsencode(_target(path, folder)), digest_size=16).digest()
    if not stat.S_ISREG(seen.st_mode):
        return b"special"
    digest = hashlib.blake2b(digest_size=16)
    try:
        # If something else has taken its place, such as a pipe that nobody writes to, this does not wait.
        with open(path, "rb", opener=lambda p, how: os.open(p, how | os.O_NONBLOCK | os.O_NOFOLLOW)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return b"special"
            if seen.st_size <= MAX_DIGEST_BYTES:
                digest = hashlib.file_digest(file, lambda: digest)
            else:
                digest.update(b"%d" % seen.st_size + file.read(MAX_FILE_BYTES))
                file.seek(-MAX_FILE_BYTES, os.SEEK_END)
                digest.update(file.read(MAX_FILE_BYTES))
    except OSError:
        return b"unreadable"
    return digest.digest() + bytes([bool(seen.st_mode & stat.S_IXUSR)])


def _change(name: str, old: list[str] | bytes | None, new: list[str] | bytes | None) -> str:
    """Return the unified diff of a file's lines or digests; `None`: there is no file."""
    name = os.fsencode(name).decode("utf-8", "replace")
    if old == new:
        return ""
    if isinstance(old, bytes) or isinstance(new, bytes):
        return f"Binary file {name} differs\n"
    names = ["/dev/null" if old is None else f"a/{name}", "/dev/null" if new is None else f"b/{name}"]
    lines = [f"--- {names[0]}\n", f"+++ {names[1]}\n", *_hunks(old or [], new or [])]
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _hunks(old: list[str], new: list[str]) -> Iterator[str]:
    """Yield the lines of a unified diff, in a time that does not grow with the square of the files' lengths."""
    same = 0
    while same < min(len(old), len(new)) and old[same] == new[same]:
        same += 1
    tail = 0
    while tail < min(len(old), len(new)) - same and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    begin, tail = max(0, same - _CONTEXT), max(0, tail - _CONTEXT)
    old, new = old[begin : len(old) - tail], new[begin : len(new) - tail]
    if len(old) * len(new) > MAX_DIFF_PAIRS:
        yield f"@@ -{begin + 1},{len(old)} +{begin + 1},{len(new)} @@\n"
        yield from (f"-{line}" for line in old)
        yield from (f"+{line}" for line in new)
        return
    for line in [*difflib.unified_diff(old, new, n=_CONTEXT)][2:]:
        yield re.sub(r"(?<=[-+])\d+", lambda n: str(int(n[0]) + begin), line) if line.startswith("@@ ") else line


def _lines(path: Path | None, folder: Path) -> list[str] | bytes | None:
    """Return a file's lines, or a digest if it is large, no text, a link, or cannot be read. `folder`: all files'."""
    if path is None:
        return None
    try:
        seen = path.lstat()
    except OSError:
        return b"unreadable"
    if stat.S_ISREG(seen.st_mode) and seen.st_size <= MAX_FILE_BYTES:
        with contextlib.suppress(UnicodeDecodeError, OSError):
            return list(io.StringIO(path.read_bytes().decode(), newline="\n"))
    return _digest(path, seen, folder)
