"""In how large chunks a payload travels."""

from __future__ import annotations

# Payload sizes up to which a chunk has so many bytes, measured by
# benchmarks/exchange/all_reduce.py --chunk
# at 100 Mbit/s, at 1 Gbit/s and on a loopback.
_CHUNKS = ((3 << 20, 3 << 20), (12 << 20, 768 << 10), (24 << 20, 1536 << 10))
_LARGE_CHUNK = 4 << 20
_MANY_ELEMENTS = 16 << 20
_CHUNK_OF_MANY = 8 << 20
# Of a wire below four bits. Its payload is short, so that one chunk by bytes holds all elements:
# encoding, reducing and decoding would come before and after what travels, not beside it.
_ELEMENTS_OF_SHORT = 1 << 20
_SHORT_BITS = 4
# On streams a chunk costs a few launches and the link is fast; not measured.
_STREAM_CHUNK = 16 << 20


def auto_chunk_bytes(payload_bytes: int, num_elements: int, is_streamed: bool) -> int:
    """Choose the chunk of a payload by a table (benchmarks/exchange/all_reduce.py --chunk).

    Each message wakes a few threads, which costs fast links time; but with large chunks a slow
    link idles while the last is reduced, and the ranks' flows crowd each other out. Work on the
    processors goes by elements, not bytes: many of them make large chunks worth while.
    """
    if is_streamed:
        return _STREAM_CHUNK
    if 8 * payload_bytes < _SHORT_BITS * num_elements:
        return max(1, payload_bytes * _ELEMENTS_OF_SHORT // num_elements)
    if num_elements > _MANY_ELEMENTS:
        return _CHUNK_OF_MANY
    for limit, chunk_bytes in _CHUNKS:
        if payload_bytes <= limit:
            return chunk_bytes
    return _LARGE_CHUNK
