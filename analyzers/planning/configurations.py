"""Reads the files that a command names: JSON, TOML and YAML, as tables of settings.

Only regular files of a sensible size are opened: a command may name anything, and ``ppdiag run`` reads it too.
"""

from __future__ import annotations

import importlib
import json
from typing import TYPE_CHECKING, Any

from ppdiag.errors import BadConfig, PathNotFound

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

MOST_BYTES = 4 << 20
"""No configuration is as large as this."""
MOST_SETTINGS = 20_000
DEEPEST = 4
"""Tables within tables; those of the frameworks have two levels."""


def load(path: Path, framework: str) -> dict[str, Any]:
    """A file as a table of settings, by its ending; without a known one it is JSON.

    Raises:
        PathNotFound: there is no such file.
        BadConfig: it cannot be read.
    """
    try:
        if not path.is_file():
            path.stat()
            raise BadConfig(f"{path} is no regular file")
        if path.stat().st_size > MOST_BYTES:
            raise BadConfig(f"{path} is too large for a configuration of {framework}")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PathNotFound(f"the command names {path}, which does not exist") from None
    except (OSError, ValueError) as error:
        raise BadConfig(f"cannot read {path}: {error}") from error
    data = _parse(text, path)
    if not isinstance(data, dict):
        raise BadConfig(f"{path} holds no table of settings")
    return data


def leaves(table: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The settings of all tables within tables, by their own names.

    Raises:
        BadConfig: there are too many of them.
    """
    found: dict[str, Any] = {}
    for count, (name, value) in enumerate(_walk(table, DEEPEST)):
        if count >= MOST_SETTINGS:
            raise BadConfig(f"{path} holds more than {MOST_SETTINGS} settings")
        found[name] = value
    return found


def _walk(table: Mapping[str, Any], depth: int) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict) and depth > 1:
            yield from _walk(value, depth - 1)
        else:
            yield str(name), value


def _parse(text: str, path: Path) -> Any:  # noqa: ANN401  (whatever the file holds)
    if path.suffix in (".yaml", ".yml"):
        return _yaml(text, path)
    try:
        return _toml(text, path) if path.suffix == ".toml" else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadConfig(f"{path} is no {path.suffix[1:].upper() or 'JSON'}: {error}") from error


def _toml(text: str, path: Path) -> Any:  # noqa: ANN401  (whatever the file holds)
    for name in ("tomllib", "tomli"):  # the first is part of Python from 3.11 on
        try:
            return importlib.import_module(name).loads(text)
        except ImportError:
            continue
    raise BadConfig(f"reading {path} takes Python 3.11, or the package tomli")


def _yaml(text: str, path: Path) -> Any:  # noqa: ANN401  (whatever the file holds)
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise BadConfig(f"reading {path} takes the package pyyaml") from None
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise BadConfig(f"{path} is no YAML: {reason}") from error
