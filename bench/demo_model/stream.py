"""The training stream: documents packed into rows of tokens, made by many processes, the same for the same seed."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from bench.demo_model.conversations import long_document, short_document
from bench.demo_model.tokenizer import Ids

Rows = npt.NDArray[np.uint16]  # [rows, length + 1]: inputs and, one to the right, targets
SHORT, LONG = 256, 1024  # tokens a row
_BATCH = 512  # documents tokenized at once


def make_rows(tokenizer_file: str, seed: int, shard: int, length: int, count: int) -> Rows:
    """One shard. Every row begins with a document; what does not fit at a row's end is dropped."""
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


def make_stream(tokenizer_file: Path, seed: int, tokens: int, processes: int, shards: int = 64) -> tuple[Rows, Rows]:
    """Short rows and long rows, about `tokens` in each. The result does not depend on `processes`."""
    jobs = [
        (str(tokenizer_file), seed, shard, length, max(1, tokens // (length * shards)))
        for length in (SHORT, LONG)
        for shard in range(shards)
    ]
    if processes == 1:
        parts = [make_rows(*job) for job in jobs]
    else:
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            parts = pool.starmap(make_rows, jobs, chunksize=1)
    return np.concatenate(parts[:shards]), np.concatenate(parts[shards:])
