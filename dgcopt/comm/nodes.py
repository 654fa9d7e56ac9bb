"""The ranks of a wire, and the machines that they run on."""

from __future__ import annotations

from collections.abc import Sequence

from ..collectives import Group

__all__ = ["Nodes"]


class Nodes:
    """The part of a `Comm` that numbers its ranks, and groups them by machine.

    Attributes:
        rank, size: this rank, and the number of ranks.
        local_rank, local_size: the same among the ranks of this machine.
        node, nodes: index of this machine, and the number of machines.
        cross_rank, cross_size: the same as rank and size among the ranks of equal local rank, one on each machine.
    """

    def _set_ranks(self, rank: int, size: int) -> None:
        """Number this rank and all others; they count as one machine until `_set_nodes`."""
        self.rank, self.size = rank, size
        everyone = tuple(range(size))
        self._ranks: dict[Group, tuple[int, ...]] = {
            "world": everyone,
            "node": (rank,),
            "across": (rank,),
            "replica": (rank,),
            "control": everyone,
            "agreement": everyone,
        }
        self._set_nodes([0] * size)

    def _set_nodes(self, node_of: Sequence[int]) -> None:
        """Derive the sub-groups of all ranks from the machine that each runs on."""
        members: dict[int, list[int]] = {}
        for rank, node in enumerate(node_of):
            members.setdefault(node, []).append(rank)
        on_node = members[node_of[self.rank]]
        self.node = list(members).index(node_of[self.rank])
        self.nodes = len(members)
        self.local_rank = on_node.index(self.rank)
        self.local_size = len(on_node)
        self._ranks["node"] = tuple(on_node)
        across = [
            tuple(sorted(ranks[place] for ranks in members.values() if len(ranks) > place))
            for place in range(max(map(len, members.values())))
        ]
        self._ranks["across"] = across[self.local_rank]
        self.cross_rank, self.cross_size = across[self.local_rank].index(self.rank), len(across[self.local_rank])
        self._partitions = {"node": [*map(tuple, members.values())], "across": across}
        groups = {*self._partitions["node"], *across} - {self._ranks["world"]}
        self._subgroups = sorted(group for group in groups if len(group) > 1)
