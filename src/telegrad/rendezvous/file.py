"""A store in a file: opened only if no other user can have made, written or replaced it.

torch's FileStore opens the path again for each request. So a look at the file is not enough: nobody else may be able to
put another one in its place.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
import tempfile
from pathlib import Path
from typing import Any

from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]

from ..errors import RendezvousError


def open_file_store(path: str, *, create: bool = True) -> FileStore:
    """Opens the store in a file, which is made if need be.

    Raises:
        RendezvousError: there is no such file or directory, or another user could write to it or replace it.
    """
    return FileStore(_checked(path, create=create), -1)


def check_file_store(store: Any) -> None:
    """Checks a store that torch has opened, if it is in a file.

    Raises:
        RendezvousError: another user could write to the file, or replace it.
    """
    if path := file_of(store):
        _checked(path, create=False)


def file_of(store: Any) -> str:
    """Returns the path of the file that a store is in, also behind prefixes; empty for any other store."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return str(getattr(store, "path", "")) if isinstance(store, FileStore) else ""  # torch's types do not know it


def temporary_directory() -> str:
    """Returns a directory where no other user can replace a file: that of the tempfile module, if it is one."""
    usual = tempfile.gettempdir()
    for found in (usual, "/tmp", "/var/tmp", "/dev/shm"):
        if os.access(found, os.W_OK | os.X_OK) and not _who_could_replace(os.path.realpath(found)):
            return found
    return usual  # the error of the store says what is wrong with it


def _who_could_replace(directory: str) -> str:
    """Says why another user could replace a file in a directory; empty if nobody could."""
    # In a user namespace what is root's belongs to a user without a number there, and so does '/'.
    owners = {0, os.geteuid(), os.stat("/").st_uid}
    for folder in (Path(directory), *Path(directory).parents):
        if why := _why_not_safe(os.stat(folder), owners):
            return f"the directory {str(folder)!r} {why}, who could replace the file"
    return ""


def _checked(path: str, *, create: bool) -> str:
    """Checks a file, made if need be; returns its path without symbolic links."""
    directory = os.path.realpath(os.path.dirname(path) or ".")
    real = os.path.join(directory, os.path.basename(path))
    try:
        if why := _who_could_replace(directory):
            raise _refused(path, why)
        made = os.O_CREAT if create else 0
        fd = os.open(real, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | made, 0o600)
        try:
            found = os.fstat(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise RendezvousError(
            f"the file {path!r}, where the group is to meet, cannot be opened: {error.strerror}; it must be in a "
            "directory that exists, and be no symbolic link"
        ) from error
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        raise _refused(path, "it is no regular file with a single name")
    if why := _why_not_safe(found, {os.geteuid()}):
        raise _refused(path, f"it {why}")
    return real


def _why_not_safe(found: os.stat_result, owners: set[int]) -> str:
    """Says who else could write to a file, or replace what is in a directory; empty if nobody could."""
    if found.st_uid not in owners:
        return f"belongs to user {found.st_uid}"
    if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX:
        return ""  # only the owner of a file can replace it there, as in /tmp
    if found.st_mode & stat.S_IWOTH:
        return "can be written to by other users"
    if found.st_mode & stat.S_IWGRP and not _is_private(found.st_gid):
        return f"can be written to by group {found.st_gid}"
    return ""


def _is_private(gid: int) -> bool:
    """Whether a group is the one that many systems make for each user, with no other in it; or root's."""
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return group.gr_name in (user, "root") and set(group.gr_mem) <= {user, "root"}


def _refused(path: str, why: str) -> RendezvousError:
    return RendezvousError(
        f"the group cannot meet at the file {path!r}: {why}; what others write there would lead workers to them. "
        "Choose a file in a directory of your own that others cannot write to"
    )
