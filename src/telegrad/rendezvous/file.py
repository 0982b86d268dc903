"""A store in a file: opened only if no other user can have made, written or replaced it.

torch's FileStore opens the path again for each request. So a look at the file is not enough: nobody else may be able to
put another one in its place.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path
from typing import Any

from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]

from ..errors import RendezvousError

_ALL_USERS = (1 << 32) - 1  # numbers in the map of a machine's own users


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
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, FileStore):
        _checked(str(getattr(store, "path", "")), create=False)  # torch's types do not know it


def _checked(path: str, *, create: bool) -> str:
    """Checks a file, made if need be; returns its path without symbolic links."""
    directory = os.path.realpath(os.path.dirname(path) or ".")
    real = os.path.join(directory, os.path.basename(path))
    try:
        owners = {0, os.geteuid(), *_unseen_root()}
        for folder in (Path(directory), *Path(directory).parents):
            if why := _why_not_safe(os.stat(folder), owners):
                raise _refused(path, f"the directory {str(folder)!r} {why}, who could replace the file")
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


def _unseen_root() -> set[int]:
    """Returns the user that the machine's root is shown as in a container that was started without root's rights, and
    has no number for it there: /, /tmp and all programs seem to belong to that one."""
    with open("/proc/self/uid_map") as file:
        ranges = [(int(first), int(count)) for first, _, count in map(str.split, file)]
    with open("/proc/sys/kernel/overflowuid") as file:
        unseen = int(file.read())
    is_complete = sum(count for _, count in ranges) >= _ALL_USERS
    return set() if is_complete or any(first <= unseen < first + count for first, count in ranges) else {unseen}


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
