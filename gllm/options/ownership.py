"""Check that a file belongs to this user alone, before its content is believed."""

import os
import stat

_OTHER_USERS, _OTHER_WRITERS = 0o077, 0o022
"""Permissions of others than the owner: all, and to write."""


def ownership_fault(status: os.stat_result, is_folder: bool = False) -> str:
    """Return why a file or folder may be the work of others; empty if it is this user's alone.

    Args:
        status: `os.stat` result of an open file, which others may not even read, or of a folder.
        is_folder: True for a folder, in which others may not write.
    """
    kind = "folder" if is_folder else "regular file"
    if not (stat.S_ISDIR if is_folder else stat.S_ISREG)(status.st_mode):
        return f"is not a {kind}: remove it"
    if status.st_uid != os.geteuid():
        return (
            f"belongs to user {status.st_uid}, not to user {os.geteuid()} of this process: give "
            "another path"
        )
    if status.st_mode & (_OTHER_WRITERS if is_folder else _OTHER_USERS):
        mode = stat.S_IMODE(status.st_mode)
        return f"may be used by other users (mode {mode:03o}): run chmod go= on it"
    return ""
