"""The process groups that this rank has used: their names, members and counters of messages."""

from __future__ import annotations

import itertools
import sys
import weakref
from typing import Any

from ppdiag.hooks.recorder import RECORDER
from ppdiag.model import NONE, Kind


class Channel:
    """Messages of one kind between this rank and one peer, under one tag."""

    __slots__ = ("group", "last", "peer")

    def __init__(self, group: int, peer: int) -> None:
        self.group = group
        """Index of the group in the rank's table."""
        self.peer = peer
        """Global rank; ``NONE`` where it is not known."""
        self.last = -1
        """Number of the last message, from 0."""


CHANNELS: dict[int, dict[tuple[int, int, int], Channel]] = {int(Kind.SEND): {}, int(Kind.RECV): {}}
"""Kind -> (``id`` of the group, rank of the peer in it, tag) -> channel: all that a message needs, in one look-up."""


class Group:
    """What is known of a process group: its index in the rank's table, its members, its counters."""

    def __init__(self, group: Any, index: int) -> None:
        self.index = index
        self.key = id(group)
        self.size = group.size()
        self.name, self.ranks = _members(group)
        self.collectives = itertools.count()

    def global_rank(self, rank: int) -> int:
        """Global rank of a rank of this group; ``NONE`` where the group's members are not known."""
        return self.ranks[rank] if 0 <= rank < len(self.ranks) else NONE

    def channel(self, kind: int, rank: int, tag: int) -> Channel:
        """The channel to or from a rank of this group."""
        channel = CHANNELS[kind].get((self.key, rank, tag))
        if channel is None:
            channel = CHANNELS[kind][self.key, rank, tag] = Channel(self.index, self.global_rank(rank))
        return channel


KNOWN: dict[int, tuple[Any, Group]] = {}
"""``id`` of a group -> (weak reference to it, what is known): a group that is destroyed is really destroyed."""
_indices = itertools.count()


def find(group: Any) -> Group:
    """What is known of a group; one that is new is written into the record."""
    entry = KNOWN.get(id(group))
    if entry is None:
        known, key = Group(group, next(_indices)), id(group)
        entry = KNOWN[key] = (weakref.ref(group, lambda _: _forget(key)), known)
        RECORDER.lines.append({"type": "group", "id": known.index, "name": known.name, "ranks": known.ranks})
    return entry[1]


def _forget(key: int) -> None:
    """Another group may get this id."""
    KNOWN.pop(key, None)
    for channels in CHANNELS.values():
        for place in [place for place in list(channels) if place[0] == key]:
            channels.pop(place, None)


def _members(group: Any) -> tuple[str, list[int]]:
    distributed = sys.modules["torch.distributed.distributed_c10d"]
    name = str(getattr(group, "group_name", ""))
    try:
        return name, list(distributed.get_process_group_ranks(group))
    except Exception:  # a group that torch.distributed did not make
        return name, list(range(group.size())) if group.size() == distributed.get_world_size() else []
