"""The layout of a job as its user states it, for records that do not tell it: sizes, and the order of the ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ppdiag.errors import BadShape

DEFAULT_ORDER = "tp-dp-pp"
"""The fastest first: Megatron's own default (tp-cp-ep-dp-pp), and DeepSpeed's."""
MOST_RANKS = 1_000_000
"""Of a size that is stated."""
_OF_SIZE_1 = {"cp", "ep"}
"""May be named in an order, as in Megatron's: they divide the data-parallel ranks and move none to another stage."""


@dataclass(frozen=True, slots=True)
class StatedLayout:
    """What the user states; None where he does not.

    Attributes:
        pp: P, ranks along the pipeline.
        vpp: V, virtual stages of a rank.
        tp: ranks of a tensor-parallel group.
        dp: replicas.
        order: how ranks are numbered: the dimension along which neighbouring ranks lie comes first.
    """

    pp: int | None = None
    vpp: int | None = None
    tp: int | None = None
    dp: int | None = None
    order: str = DEFAULT_ORDER

    def __bool__(self) -> bool:
        return any(size is not None for size in (self.pp, self.vpp, self.tp, self.dp))

    @classmethod
    def of_record(cls, stated: object) -> StatedLayout:
        """What :meth:`to_dict` gave, from a file: nothing stated where it holds anything else."""
        if not isinstance(stated, dict) or not isinstance(stated.get("order"), str):
            return cls()
        sizes = {name: stated.get(name) for name in ("pp", "vpp", "tp", "dp")}
        if any(size is not None and (type(size) is not int or not 0 < size <= MOST_RANKS) for size in sizes.values()):
            return cls()
        return cls(**sizes, order=stated["order"])

    def to_dict(self) -> dict[str, Any]:
        """For a file of JSON."""
        return asdict(self)

    def sizes(self, world_size: int) -> dict[str, int]:
        """P, TP and DP of so many ranks: TP is 1 where it is not stated, and the others follow.

        Raises:
            BadShape: the sizes do not give that many ranks, or leave more than one open.

        >>> StatedLayout(pp=2, tp=2).sizes(16)
        {'tp': 2, 'dp': 4, 'pp': 2}
        """
        tensor = self.tp or 1
        if self.pp is None and self.dp is None:
            raise BadShape("--tp and --vpp do not tell the layout: give --pp or --dp too")
        pipeline = self.pp or max(1, world_size // (tensor * (self.dp or 1)))
        data = self.dp or max(1, world_size // (tensor * pipeline))
        ranks = tensor * data * pipeline
        if ranks != world_size:
            raise BadShape(
                f"a layout of tp = {tensor}, dp = {data}, pp = {pipeline} has {ranks} ranks, and the "
                f"job {world_size}; give --pp, --tp and --dp whose product is {world_size}"
            )
        return {"tp": tensor, "dp": data, "pp": pipeline}

    def pipelines(self, world_size: int) -> tuple[tuple[int, ...], ...]:
        """The replicas of the pipeline, each in order along it.

        Raises:
            BadShape: as :meth:`sizes`, or the order cannot be read.

        Source: Megatron-LM, ``--use-tp-pp-dp-mapping`` and ``RankGenerator(order)``.

        >>> StatedLayout(pp=2, tp=2).pipelines(8)
        ((0, 4), (1, 5), (2, 6), (3, 7))
        >>> StatedLayout(pp=2, tp=2, order="tp-pp-dp").pipelines(8)
        ((0, 2), (1, 3), (4, 6), (5, 7))
        """
        sizes = self.sizes(world_size)
        names = [name for name in self.order.lower().split("-") if name not in _OF_SIZE_1]
        if sorted(names) != sorted(sizes):
            raise BadShape(f"cannot read --order {self.order!r}; name tp, dp and pp once, for instance {DEFAULT_ORDER}")
        found: dict[tuple[int, int], dict[int, int]] = {}
        for rank in range(world_size):
            at, rest = {}, rank
            for name in names:
                rest, at[name] = divmod(rest, sizes[name])
            found.setdefault((at["dp"], at["tp"]), {})[at["pp"]] = rank
        return tuple(sorted(tuple(ranks[position] for position in sorted(ranks)) for ranks in found.values()))


NOT_STATED = StatedLayout()
