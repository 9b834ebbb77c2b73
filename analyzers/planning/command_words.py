"""Variables and numbers among the words and settings of a command."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MOST = 10**12
"""No size or count is above this."""


def assigned(command: Sequence[str]) -> dict[str, str]:
    """Variables that the command sets for itself: ``env A=1 torchrun …``."""
    pairs = (word.partition("=") for word in command if re.match(r"[A-Za-z_][A-Za-z0-9_]*=", word))
    return {name: value for name, _, value in pairs}


def expanded(word: str, variables: Mapping[str, str]) -> str:
    """The word with the variables that are known; a shell would have put them in."""
    return re.sub(r"\$(?:(\w+)|\{(\w+)\})", lambda found: variables.get(found[1] or found[2], found[0]), word)


def first_of(options: Mapping[str, str], *names: str) -> str | None:
    """The value of the first of these options that has one."""
    return next((options[name] for name in names if options.get(name)), None)


def number_of(options: Mapping[str, Any], *names: str) -> int | None:
    """A whole number above 0 under one of these names."""
    for name in names:
        text = str(options.get(name, "")).strip()
        if re.fullmatch(r"[0-9]{1,12}", text) and 0 < int(text) <= MOST:
            return int(text)
    return None


def uncounted(
    options: Mapping[str, Any], names: Sequence[str], *, words: Sequence[object] = ()
) -> list[tuple[str, str]]:
    """Which of these options are there without a count; ``words`` are what else they may have."""
    return [
        (name, str(options[name]))
        for name in names
        if name in options and options[name] not in words and number_of(options, name) is None
    ]
