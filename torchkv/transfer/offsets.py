"""Where the page pairs of one verb lie on both sides, computed once per geometry and shared by its layers."""

from __future__ import annotations

from torchkv.plan import Rows, Slab, expand, page_pairs, pair_offsets
from torchkv.protocol.actions import BoundGrant, SendOp
from torchkv.route import LocalPages, Route
from torchkv.transport import Int64Array

__all__ = ["PairOffsets"]


# All that offsets depend on, besides the pages: `Slab.place`, and both sides' page strides. Keys and values mostly have
# it in common.
_Key = tuple[tuple[object, ...], int, int]


class PairOffsets:
    """Byte offsets, from the start of each layer's tensors, of what ``op`` moves from ``pages`` under ``grant``."""

    def __init__(self, op: SendOp, grant: BoundGrant, pages: Int64Array, local: LocalPages, route: Route) -> None:
        self._op = op
        self._grant = grant
        self._pages = pages
        self._local = local
        self._route = route
        self._pairs: dict[_Key, tuple[Int64Array, Int64Array]] = {}
        self._spans: dict[tuple[_Key, Rows], tuple[Int64Array, Int64Array, Int64Array]] = {}

    def pairs(self, slab: Slab, layer: int) -> tuple[Int64Array, Int64Array]:
        """Source and destination offset of each page pair."""
        key = self._key(slab, layer)
        known = self._pairs.get(key)
        if known is None:
            plan = self._grant.plan
            pairs = page_pairs(
                slab,
                num_src_pages=self._op.num_pages,
                start=self._op.start,
                limit_tokens=self._grant.num_tokens,
                src_page_size=plan.src_page_size,
                dst_page_size=plan.dst_page_size,
            )
            known = self._pairs[key] = pair_offsets(slab, pairs, self._pages, self._grant.pages, *key[1:])
        return known

    def spans(self, slab: Slab, layer: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        """The same as merged descriptors: source offset, destination offset, length."""
        key = (self._key(slab, layer), slab.rows)
        if key not in self._spans:
            self._spans[key] = expand(slab, *self.pairs(slab, layer))
        return self._spans[key]

    def _key(self, slab: Slab, layer: int) -> _Key:
        ours, theirs = self._local.placements[slab.component, layer], self._route.placements[slab.component, layer]
        return slab.place, ours.page_stride, theirs.page_stride
