"""How full packed rows are, on the real data sets that may lie beside the repository."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from shardtune.config.job import Columns, DataSection, TrainSource
from shardtune.data.loader import Loader
from shardtune.data.prepare import prepare

SHARED = Path(__file__).parents[3] / "shared"
DATA, TOKENIZER = SHARED / "data", SHARED / "tokenizers" / "smollm2"
LENGTH = 2048

pytestmark = pytest.mark.skipif(
    not (DATA.is_dir() and TOKENIZER.is_dir()), reason=f"there are no data sets in {SHARED.name}/"
)

ASKED = Columns(instruction="question", output="answer")
CODED = Columns(instruction="text", output="code")
PROMPTED = Columns(instruction="prompt", output="completion")


def flat_self_instruct(folder):
    """The seed tasks keep their answers in a list; our formats want them in columns."""
    path = folder / "self_instruct.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for line in (DATA / "self_instruct_seed_tasks.jsonl").read_text("utf-8").splitlines():
            task = json.loads(line)
            for instance in task["instances"]:
                row = {"instruction": task["instruction"], **instance}
                file.write(json.dumps(row) + "\n")
    return path


def sources(folder):
    def source(path, format, columns=None):
        return TrainSource(path=str(path), format=format, columns=columns or Columns())

    return (
        source(DATA / "gsm8k_train_2000.jsonl", "instruction", ASKED),
        source(DATA / "mbpp_text_to_code.jsonl", "instruction", CODED),
        source(DATA / "instructions_with_preference.json", "instruction"),
        source(flat_self_instruct(folder), "instruction"),
        source(DATA / "sharegpt_conversations.json", "chat"),
        source(DATA / "tinystories.jsonl", "completion"),
        *(source(path, "instruction", PROMPTED) for path in sorted(DATA.glob("p3_subset/*.jsonl"))),
    )


@pytest.mark.long
def test_packing_fills_at_least_98_percent(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    section = DataSection(
        train=sources(tmp_path),
        sequence_length=LENGTH,
        control_tokens="text",  # P3's prompts hold <|endoftext|>
    )
    stops = frozenset({tokenizer.eos_token_id})
    data = prepare(section, tokenizer, stops, cache=tmp_path / "cache", quiet=True)
    loader = Loader(data, section, seed=0, global_batch=16, micro_batch=4, rank=0, ranks=1,
                    pad_id=tokenizer.pad_token_id, epochs=1)  # fmt: skip
    assert loader.fill() >= 0.98

    # The same from what a model would really be given: real tokens in places of full rows.
    batches = [batch for step in loader.steps(0, loader.total_steps(1)) for batch in step]
    rows = sum(len(batch.input_ids) for batch in batches)
    tokens = sum(batch.tokens for batch in batches)
    assert tokens == sum(int(each.lengths.sum()) for each in data.train)
    assert sum(batch.labels for batch in batches) == sum(
        int(each.labels.sum()) for each in data.train
    )
    assert tokens / (rows * LENGTH) >= 0.98
