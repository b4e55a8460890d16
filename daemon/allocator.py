"""Who owns which bytes of one pool. Pure bookkeeping: nothing here touches memory.

The unit is a *frame*, one exact page. A frame is either one exact page or is subdivided into low-bit pages of one
size class, so a pool of a few MB works and nothing is stranded. Frames lie on the grid of their own size, which makes
the frame of a low-bit page computable from its offset (`offset // frame * frame`): a new owner can adopt offsets that
workers hand back. Exact frames are taken from the low end, subdivided ones from the high end, so that holes stay
whole. Several geometries share a pool; their frames are of different sizes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from typing import NamedTuple

ALIGNMENT = 64
"""Bytes; one cache line, and more than any vector load needs."""


def aligned(size: int) -> int:
    """`size` rounded up to the alignment of offsets."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class SizeClass(NamedTuple):
    """Items of `item` bytes in frames of `frame` bytes; `item == frame` for exact pages."""

    frame: int
    item: int

    @property
    def items(self) -> int:
        """Items a frame holds."""
        return self.frame // self.item


class Extents:
    """Free byte ranges, sorted and coalesced."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.free_bytes = size
        self._starts: list[int] = [0] if size else []
        self._stops: list[int] = [size] if size else []

    def take(self, size: int, grid: int = ALIGNMENT, high: bool = False) -> int | None:
        """The lowest (or highest) free offset on `grid` with `size` bytes, now taken; None when there is none."""
        order = range(len(self._starts) - 1, -1, -1) if high else range(len(self._starts))
        for index in order:
            start, stop = self._starts[index], self._stops[index]
            offset = (stop - size) // grid * grid if high else -(-start // grid) * grid
            if start <= offset and offset + size <= stop:
                self._cut(index, offset, size)
                return offset
        return None

    def claim(self, offset: int, size: int) -> bool:
        """Take exactly these bytes; False when any of them is not free."""
        index = bisect_right(self._starts, offset) - 1
        if index < 0 or offset + size > self._stops[index]:
            return False
        self._cut(index, offset, size)
        return True

    def give(self, offset: int, size: int) -> None:
        """Return bytes. Returning what is already free is a bug and raises."""
        index = bisect_left(self._starts, offset)
        after = index < len(self._starts) and self._starts[index] < offset + size
        before = index > 0 and self._stops[index - 1] > offset
        if after or before or offset < 0 or offset + size > self.size:
            raise AssertionError(f"bytes [{offset}, {offset + size}) are returned twice or were never taken")
        joins_before = index > 0 and self._stops[index - 1] == offset
        joins_after = index < len(self._starts) and self._starts[index] == offset + size
        if joins_before and joins_after:
            self._stops[index - 1] = self._stops.pop(index)
            self._starts.pop(index)
        elif joins_before:
            self._stops[index - 1] = offset + size
        elif joins_after:
            self._starts[index] = offset
        else:
            self._starts.insert(index, offset)
            self._stops.insert(index, offset + size)
        self.free_bytes += size

    def room_for(self, size: int, grid: int) -> int:
        """How many items of `size` bytes on `grid` fit now (sizes equal to their grid)."""
        return sum(
            max(0, stop // grid - -(-start // grid)) if size == grid else (stop - start) // size
            for start, stop in zip(self._starts, self._stops, strict=True)
        )

    def ranges(self) -> list[tuple[int, int]]:
        """Free `[start, stop)` ranges in order."""
        return list(zip(self._starts, self._stops, strict=True))

    def _cut(self, index: int, offset: int, size: int) -> None:
        start, stop = self._starts[index], self._stops[index]
        left, right = offset > start, offset + size < stop
        if left and right:
            self._stops[index] = offset
            self._starts.insert(index + 1, offset + size)
            self._stops.insert(index + 1, stop)
        elif left:
            self._stops[index] = offset
        elif right:
            self._starts[index] = offset + size
        else:
            del self._starts[index], self._stops[index]
        self.free_bytes -= size


class PoolAllocator:
    """Frames and the items in them. Every `allocate` has one `release`; `claim` is `allocate` at a known offset."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.peak_bytes = 0
        self._extents = Extents(size)
        self._blocks: dict[int, int] = {}  # offset -> bytes of plain blocks and exact frames
        self._frames: dict[tuple[SizeClass, int], set[int]] = {}  # subdivided frame -> its free item offsets
        self._partial: dict[SizeClass, dict[int, None]] = {}  # frames with a free item, oldest first
        self._counts = Counter[SizeClass]()  # subdivided frames
        self._withheld: set[tuple[SizeClass, int]] = set()  # subdivided frames that are being emptied

    @property
    def used_bytes(self) -> int:
        """Bytes of frames in use: a subdivided frame counts whole."""
        return self.size - self._extents.free_bytes

    @property
    def free_bytes(self) -> int:
        return self._extents.free_bytes

    def free_frames(self, frame: int) -> int:
        """Whole frames of `frame` bytes that could be allocated now."""
        return self._extents.room_for(frame, frame)

    def free_items(self, size_class: SizeClass) -> int:
        """Free items in frames that are already subdivided for this class."""
        return sum(len(self._frames[size_class, frame]) for frame in self._partial.get(size_class, ()))

    def frames_of(self, size_class: SizeClass) -> int:
        """Frames that are subdivided for this class."""
        return self._counts.get(size_class, 0)

    def allocate(self, size_class: SizeClass) -> int | None:
        """Offset of a new item, None when there is no room."""
        if size_class.items == 1:
            return self.allocate_block(
                size_class.frame, size_class.frame, high=size_class.item != size_class.frame
            )
        partial = self._partial.setdefault(size_class, {})
        frame = next(iter(partial), None)
        if frame is None:
            frame = self._extents.take(size_class.frame, size_class.frame, high=True)
            if frame is None:
                return None
            self._subdivide(size_class, frame)
        free = self._frames[size_class, frame]
        offset = min(free)
        self._take_item(size_class, frame, offset)
        return offset

    def release(self, size_class: SizeClass, offset: int) -> None:
        """Return an item; a frame whose items are all free is whole again."""
        if size_class.items == 1:
            self.release_block(offset)
            return
        frame = offset // size_class.frame * size_class.frame
        free = self._frames[size_class, frame]
        if offset in free:
            raise AssertionError(f"low-bit page at {offset} is returned twice")
        free.add(offset)
        if len(free) == size_class.items:
            del self._frames[size_class, frame]
            self._counts[size_class] -= 1
            self._partial[size_class].pop(frame, None)
            self._withheld.discard((size_class, frame))
            self._extents.give(frame, size_class.frame)
        elif (size_class, frame) not in self._withheld:
            self._partial[size_class][frame] = None

    def claim(self, size_class: SizeClass, offset: int) -> bool:
        """Take the item at `offset` (adoption); False when it cannot be one or is taken."""
        frame = offset // size_class.frame * size_class.frame
        if offset < 0 or frame + size_class.frame > self.size:
            return False
        if size_class.items == 1:
            if offset != frame or not self._extents.claim(offset, size_class.frame):
                return False
            self._blocks[offset] = size_class.frame
            self._note_peak()
            return True
        if (offset - frame) % size_class.item or (offset - frame) // size_class.item >= size_class.items:
            return False
        if (size_class, frame) not in self._frames:
            if not self._extents.claim(frame, size_class.frame):
                return False
            self._subdivide(size_class, frame)
        if offset not in self._frames[size_class, frame]:
            return False
        self._take_item(size_class, frame, offset)
        return True

    def withhold(self, size_class: SizeClass, frame: int) -> None:
        """Give out no more items of a subdivided frame: it is being emptied."""
        self._withheld.add((size_class, frame))
        self._partial[size_class].pop(frame, None)

    def restore(self, size_class: SizeClass, frame: int) -> None:
        """Undo `withhold`."""
        self._withheld.discard((size_class, frame))
        if self._frames.get((size_class, frame)):
            self._partial[size_class][frame] = None

    def items_used(self, size_class: SizeClass, frame: int) -> int:
        """Items in use in a subdivided frame; 0 when it is not subdivided for this class."""
        free = self._frames.get((size_class, frame))
        return 0 if free is None else size_class.items - len(free)

    def allocate_block(self, size: int, grid: int = ALIGNMENT, high: bool = True) -> int | None:
        """A plain block (codec state): `size` bytes at a multiple of `grid`."""
        offset = self._extents.take(size, grid, high)
        if offset is not None:
            self._blocks[offset] = size
            self._note_peak()
        return offset

    def claim_block(self, offset: int, size: int) -> bool:
        """Take a plain block at `offset` (adoption)."""
        if offset < 0 or not self._extents.claim(offset, size):
            return False
        self._blocks[offset] = size
        self._note_peak()
        return True

    def release_block(self, offset: int) -> None:
        self._extents.give(offset, self._blocks.pop(offset))

    def check_integrity(self) -> None:
        """Every byte is free or in exactly one block or frame; raises AssertionError otherwise."""
        spans = self._extents.ranges()
        spans += [(offset, offset + size) for offset, size in self._blocks.items()]
        spans += [(frame, frame + size_class.frame) for size_class, frame in self._frames]
        spans.sort()
        cursor = 0
        for start, stop in spans:
            assert start == cursor, (
                f"byte {cursor} of the pool is {'lost' if start > cursor else 'owned twice'}"
            )
            cursor = stop
        assert cursor == self.size, f"the pool's last {self.size - cursor} bytes are lost"
        for (size_class, frame), free in self._frames.items():
            withheld = (size_class, frame) in self._withheld
            assert (bool(free) and not withheld) == (frame in self._partial[size_class])
            assert len(free) < size_class.items

    def _subdivide(self, size_class: SizeClass, frame: int) -> None:
        self._counts[size_class] += 1
        self._frames[size_class, frame] = {frame + i * size_class.item for i in range(size_class.items)}
        self._partial.setdefault(size_class, {})[frame] = None
        self._note_peak()

    def _take_item(self, size_class: SizeClass, frame: int, offset: int) -> None:
        free = self._frames[size_class, frame]
        free.remove(offset)
        if not free:
            self._partial[size_class].pop(frame, None)

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
