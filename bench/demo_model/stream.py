"""The training stream: documents packed into rows of tokens, made by many processes, the same for the same seed.

Every document is new: nothing comes twice, however long the training is.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Generator
from itertools import count
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from bench.demo_model.conversations import long_document, short_document
from bench.demo_model.tokenizer import Ids

Rows = npt.NDArray[np.uint16]  # [rows, length + 1]: inputs and, one to the right, targets
SHORT, LONG = 256, 1024  # tokens a row
SHARD_TOKENS = 1 << 19  # of short rows, and the same number of long rows
_BATCH = 512  # documents tokenized at once


def make_rows(tokenizer_file: str, seed: int, shard: int, length: int, count: int) -> Rows:
    """Return the rows of one shard. Every row begins with a document. A document is cut at the end of its row."""
    tokenizer = Tokenizer.from_file(tokenizer_file)
    end = Ids.of(tokenizer).text_end
    rng = Random(f"{seed} {length} {shard}")
    document = long_document if length == LONG else short_document
    rows: list[list[int]] = []
    row: list[int] = []
    while len(rows) < count:
        texts = [document(rng) for _ in range(_BATCH)]
        for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            row += encoding.ids
            row.append(end)
            if len(row) > length:
                rows.append(row[: length + 1])
                row = []
    return np.array(rows[:count], dtype=np.uint16)


def _shard(tokenizer_file: str, seed: int, shard: int, tokens: int) -> tuple[Rows, Rows]:
    short, long = (make_rows(tokenizer_file, seed, shard, n, max(1, tokens // n)) for n in (SHORT, LONG))
    return short, long


def make_stream(
    tokenizer_file: Path, seed: int, processes: int, tokens: int = SHARD_TOKENS
) -> Generator[tuple[Rows, Rows], None, None]:
    """Short rows and long rows of about `tokens` each, shard after shard without end; `processes` work ahead.

    The result does not depend on `processes`. Closing the iterator ends them.
    """
    jobs = ((str(tokenizer_file), seed, shard, tokens) for shard in count())
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        ahead = deque(pool.apply_async(_shard, next(jobs)) for _ in range(2 * processes))
        while True:
            ahead.append(pool.apply_async(_shard, next(jobs)))
            yield ahead.popleft().get()
