"""A share held out by content: stable, disjoint, with several sets, copies and cut rows."""

from __future__ import annotations

import json
import random

import pytest

from shardtune.config.job import DataSection, EvalShare, TrainSource
from shardtune.data.loader import Loader
from shardtune.data.prepare import prepare
from shardtune.errors import DataError
from shardtune.models import tiny

STOPS = frozenset({tiny.END})
ROWS = [{"text": f"row number {n}"} for n in range(400)]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(folder, tokenizer, *sets, share=0.1, length=64, format="completion", **settings):
    section = DataSection(
        train=tuple(
            TrainSource(path=write(folder / f"{name}.jsonl", rows), format=format, **settings)
            for name, rows in zip("abc", sets, strict=False)
        ),
        eval=EvalShare(share=share),
        sequence_length=length,
    )
    return section, prepare(section, tokenizer, STOPS, cache=folder / "cache", quiet=True)


def texts(sets):
    return [bytes(i for i in row["input_ids"] if i < 256).decode() for s in sets for row in s.rows]


def test_the_share_is_held_out_and_nothing_is_lost(tmp_path, tokenizer):
    _, data = run(tmp_path, tokenizer, ROWS)
    held, trained = texts(data.eval), texts(data.train)
    assert sorted(held + trained) == sorted(row["text"] for row in ROWS)
    assert 20 <= len(held) <= 60  # 40 +- 6 by chance
    (one,), (other,) = data.train, data.eval
    assert (one.name, other.name) == ("a", "a")
    assert one.report.documents == len(one.lengths) == len(one.rows) == len(trained)
    assert one.report.notes == (
        f"{len(held)} of 400 rows are held out for evaluation, drawn by their content",
    )
    assert other.report.rows_read == other.report.documents == len(held)
    assert one.report.tokens + other.report.tokens == sum(len(row["text"]) + 1 for row in ROWS)


def test_the_same_rows_when_others_are_added_reordered_or_cut_otherwise(tmp_path, tokenizer):
    held = set(texts(run(tmp_path, tokenizer, ROWS)[1].eval))
    more = [*ROWS, *({"text": f"added {n}"} for n in range(100))]
    random.Random(1).shuffle(more)
    changed = {text for text in texts(run(tmp_path, tokenizer, more)[1].eval) if "row" in text}
    assert changed == held
    in_two = run(tmp_path, tokenizer, more[:200], more[200:])[1].eval
    assert {text for text in texts(in_two) if "row" in text} == held
    wider = [{**row, "id": n} for n, row in enumerate(ROWS)]
    assert set(texts(run(tmp_path, tokenizer, wider, length=128)[1].eval)) == held
    larger = set(texts(run(tmp_path, tokenizer, ROWS, share=0.2)[1].eval))
    assert held < larger


def test_copies_lie_on_one_side(tmp_path, tokenizer):
    _, data = run(tmp_path, tokenizer, ROWS + ROWS[:200], ROWS[100:300])
    held, trained = texts(data.eval), texts(data.train)
    assert not {*held} & {*trained}
    assert len(held) + len(trained) == 800
    assert [each.name for each in data.eval] == ["a", "b"]


@pytest.mark.parametrize("overflow", ["truncate", "split"])
def test_rows_that_are_alike_once_they_are_cut_are_never_on_both(tmp_path, tokenizer, overflow):
    # 40 beginnings of 16 tokens, each of 10 rows that go on otherwise.
    rows = [{"text": f"beginning {n % 40:06}{n:016}end"} for n in range(400)]
    rows += ROWS
    _, data = run(tmp_path, tokenizer, rows, length=16, overflow=overflow, stop="none")
    held, trained = texts(data.eval), texts(data.train)
    assert held
    assert not {*held} & {*trained}


def test_the_pieces_of_a_row_stay_together(tmp_path, tokenizer):
    rows = [{"text": f"{n:04}" * 30} for n in range(200)]
    _, data = run(tmp_path, tokenizer, rows, length=16, overflow="split")
    numbers = [
        {text[:4] for text in texts(side) if len(text) >= 4} for side in (data.eval, data.train)
    ]
    assert numbers[0]
    assert not numbers[0] & numbers[1]


def test_loaded_packed_by_two_ranks(tmp_path, tokenizer):
    section, data = run(tmp_path, tokenizer, ROWS, [{"text": f"other {n}"} for n in range(100)])
    seen, held = [], []
    for rank in range(2):
        loader = Loader(data, section, seed=1, global_batch=4, micro_batch=2, rank=rank, ranks=2,
                        pad_id=0, epochs=1.0)  # fmt: skip
        steps = loader.total_steps(1.0)
        for batches in loader.steps(0, steps):
            seen += [sample for batch in batches for sample in batch.samples]
        held += [s for each in data.eval for b in loader.evaluation(each.name) for s in b.samples]
    assert len(seen) == len(set(seen)) == sum(len(each.rows) for each in data.train)
    assert len(set(held)) == sum(len(each.rows) for each in data.eval)


def test_conversations_are_drawn_whatever_the_template(tmp_path, tokenizer):
    rows = [
        {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a"}]}
        for n in range(200)
    ]
    other = tiny.tokens()
    other.chat_template = other.chat_template.replace("<|im_start|>", "")
    sizes = [
        len(run(tmp_path, each, rows, format="chat")[1].eval[0].rows) for each in (tokenizer, other)
    ]
    assert sizes[0] == sizes[1] > 5


@pytest.mark.parametrize(
    ("rows", "share", "fact"),
    [
        (ROWS[:3], 0.0001, "a share of 0.0001 of 3 different rows holds out none"),
        (ROWS[:1] * 9, 0.999, "leaves nothing to train of"),
    ],
)
def test_a_side_that_would_be_empty_is_refused(tmp_path, tokenizer, rows, share, fact):
    with pytest.raises(DataError) as caught:
        run(tmp_path, tokenizer, rows, share=share)
    (problem,) = caught.value.problems
    assert fact in problem.fact
    assert problem.fix


def test_another_share_is_another_data_set(tmp_path, tokenizer):
    digests = [run(tmp_path, tokenizer, ROWS, share=share)[1].digests() for share in (0.1, 0.2)]
    assert digests[0].keys() == {"train/a", "eval/a"}
    assert digests[0] != digests[1]


def test_pairs_of_an_encoder_decoder_model(tmp_path, tokenizer):
    rows = [{"source": f"question {n}", "target": f"answer {n}"} for n in range(200)]
    section = DataSection(
        train=(TrainSource(path=write(tmp_path / "p.jsonl", rows), format="source_target"),),
        eval=EvalShare(share=0.1),
    )
    data = prepare(
        section, tokenizer, STOPS, cache=tmp_path, quiet=True, kind="encoder_decoder"
    )  # fmt: skip
    (one,), (other,) = data.train, data.eval
    assert len(one.rows) + len(other.rows) == 200
    assert one.paired
    assert other.paired
