"""Files that a command writes when it is done: tried before its work, which may take hours."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tierkv.errors import ConfigError


def check_writable(*files: Path) -> None:
    """Nothing is left behind: folders are made when something is written.

    Raises:
        ConfigError: a file cannot be written, or is none (a folder, a device), which a rename would take the place of.
    """
    for file in files:
        try:
            if file.is_dir():
                raise ConfigError(f"{file} is a folder; name a file in it")
            if file.exists() and not file.is_file():
                raise ConfigError(f"{file} is no plain file; name another one")
            with tempfile.TemporaryFile(dir=_nearest(file.absolute().parent)):
                pass
        except OSError as error:
            raise ConfigError(f"{file} cannot be written: {error.strerror}; name another one") from None


def _nearest(folder: Path) -> Path:
    """The folder, or the first one above it that is there."""
    while not folder.exists() and folder.parent != folder:
        folder = folder.parent
    return folder
