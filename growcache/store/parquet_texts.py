"""Texts in Parquet tables.

A text that is stored once may be in every row, so 1 kB could expand to gigabytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import IO, Any

from growcache.errors import FormatError

# Of a column, in the rows that are Python objects at the same time.
MOST_TEXT_BYTES = 100_000_000


def table_batches(
    stream: IO[bytes], metadata: Any, columns: Sequence[str], rows: int
) -> Iterator[Any]:
    """Yield record batches. Their texts are counted before each row gets a copy."""
    import pyarrow.parquet as pq

    file = pq.ParquetFile(
        stream,
        metadata=metadata,
        read_dictionary=list(columns),
        buffer_size=1 << 20,
        pre_buffer=False,
    )
    for batch in file.iter_batches(rows, columns=list(columns)):
        for column in batch.columns:
            _refuse_repeated(column)
        yield batch


def _refuse_repeated(column: Any) -> None:
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_dictionary(column.type):
        return
    lengths = pc.binary_length(column.dictionary).take(column.indices)
    if (nbytes := pc.sum(lengths).as_py() or 0) > MOST_TEXT_BYTES:
        raise FormatError(
            f"expected at most {MOST_TEXT_BYTES:,} bytes of text in {len(column):,} rows, found "
            f"{nbytes:,}"
        )
