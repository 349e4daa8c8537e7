"""Blocks of memory: used again when nothing refers to them, and never before."""

import mmap
from pathlib import Path

from wdsprep.loading.batch_memory import BlockPool


def address(blocks: BlockPool, nbytes: int) -> tuple[memoryview, int]:
    block = blocks.take(nbytes)
    return block.data, block.ctypes.data


def test_a_block_is_used_again_once_no_view_of_it_is_left() -> None:
    blocks = BlockPool(keep=4)
    view, first = address(blocks, 100)
    part = view[10:20]
    del view
    other, second = address(blocks, 100)
    assert second != first
    del part
    assert address(blocks, 100)[1] == first
    assert other.nbytes == 100


def test_no_more_are_kept_than_wanted() -> None:
    nbytes, before = 256 << 20, mapped_nbytes()  # nothing is written, so it takes no memory
    blocks = BlockPool(keep=2)
    held = [blocks.take(nbytes) for _ in range(9)]
    assert round((mapped_nbytes() - before) / nbytes) == 9
    held.clear()
    assert round((mapped_nbytes() - before) / nbytes) == 2


def mapped_nbytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[0]
    return int(pages) * mmap.PAGESIZE
