"""What a run's page is told of its data."""

from __future__ import annotations

import json
from typing import Any

from shardtune.config.job import DataSection, TrainSource
from shardtune.core.runs.data_summary import DataSummary
from shardtune.data.loader import Loader
from shardtune.data.prepare import prepare
from shardtune.data.summarise import MOST_TOKENS, summarise
from shardtune.models import tiny

ROWS = [
    {"instruction": "Say hé 😀.", "output": "<b>hé</b> 😀"},
    {"instruction": "Say it again.", "output": "word " * 400},
    {"instruction": "Say hé 😀.", "output": "<b>hé</b> 😀"},
]


def test_figures_and_documents(tmp_path: Any, tokenizer: Any) -> None:
    path = tmp_path / "code.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS) + '{"instruction": 5}\n')
    section = DataSection(
        train=(TrainSource(path=str(path), format="instruction"),),
        sequence_length=4096,
        bad_rows="skip",
    )
    prepared = prepare(section, tokenizer, frozenset({tiny.END}), cache=tmp_path, quiet=True)
    loader = Loader(
        prepared, section, seed=0, global_batch=1, micro_batch=1, rank=0, ranks=1, pad_id=0
    )
    found = summarise(prepared, loader, tokenizer, 4096)
    assert DataSummary.model_validate_json(found.to_json()) == found
    (one,) = found.sets
    assert (one.side, one.documents, one.unreadable, one.duplicates) == ("train", 3, 1, 1)
    assert sum(one.lengths) == 3
    assert one.length_max > one.length_p50
    assert 0 < found.fill <= 1
    first, second = one.examples
    trained = "".join(piece.text for piece in first.pieces if piece.trained)
    assert trained == "<b>hé</b> 😀<|im_end|>"
    assert next(piece.text for piece in first.pieces if piece.special) == "<|im_start|>"
    assert second.cut
    assert second.tokens > MOST_TOKENS
