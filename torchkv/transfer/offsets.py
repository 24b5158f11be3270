"""Where the page pairs of one verb lie on both sides: byte offsets, computed once and shared by layers that agree."""

from __future__ import annotations

from torchkv.arrays import Int64Array
from torchkv.layout.descriptors import expand, page_pairs, pair_offsets
from torchkv.layout.plan_segment import PlanSegment, StridedRuns
from torchkv.protocol.actions import BoundGrant, SendOp
from torchkv.transfer.peer_connection import LocalPages, PeerConnection

__all__ = ["PairOffsets"]


# What offsets depend on besides the page ids: `PlanSegment.place` and the page strides of both sides. The key and the
# value component mostly agree in it.
_Key = tuple[tuple[object, ...], int, int]


class PairOffsets:
    """Byte offsets of what ``op`` moves from ``pages`` under ``grant``, from the start of each layer's tensors."""

    def __init__(
        self, op: SendOp, grant: BoundGrant, pages: Int64Array, local: LocalPages, connection: PeerConnection
    ) -> None:
        self._op = op
        self._grant = grant
        self._pages = pages
        self._local = local
        self._connection = connection
        self._pairs: dict[_Key, tuple[Int64Array, Int64Array]] = {}
        self._spans: dict[tuple[_Key, StridedRuns], tuple[Int64Array, Int64Array, Int64Array]] = {}

    def pairs(self, segment: PlanSegment, layer: int) -> tuple[Int64Array, Int64Array]:
        """Source and destination offset of each page pair: int64 ``[n]`` each."""
        key = self._key(segment, layer)
        known = self._pairs.get(key)
        if known is None:
            plan = self._grant.plan
            pairs = page_pairs(
                segment,
                num_src_pages=self._op.num_pages,
                start=self._op.start,
                limit_tokens=self._grant.num_tokens,
                src_page_size=plan.src_page_size,
                dst_page_size=plan.dst_page_size,
            )
            known = self._pairs[key] = pair_offsets(segment, pairs, self._pages, self._grant.pages, *key[1:])
        return known

    def spans(self, segment: PlanSegment, layer: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Descriptors, with adjacent runs merged: source offset, destination offset and length, int64 ``[n]`` each."""
        key = (self._key(segment, layer), segment.rows)
        if key not in self._spans:
            self._spans[key] = expand(segment, *self.pairs(segment, layer))
        return self._spans[key]

    def _key(self, segment: PlanSegment, layer: int) -> _Key:
        ours, theirs = (
            self._local.placements[segment.component, layer],
            self._connection.placements[segment.component, layer],
        )
        return segment.place, ours.page_stride, theirs.page_stride
