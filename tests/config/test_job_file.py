"""From a file and overrides to a job: values, origins, and every mistake at its place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardtune.config.foreign_keys import NEEDLESS_KEYS, OTHERS_KEYS
from shardtune.config.job import AdamW, Job, LocalLaunch
from shardtune.config.job_file import LoadedJob, leaves, load_job
from shardtune.config.job_keys import all_keys
from shardtune.core.files.yaml_document import dotted
from shardtune.errors import JobError
from shardtune.parallel.auto.strategy import AutoStrategy
from tests.jobs import LINE, SECTIONS, job_text, write_job

PUBLISHED = Path(__file__).parents[2] / "../shared/reference/configs"


def load(folder: Path, *overrides: str, **sections: str) -> LoadedJob:
    return load_job(write_job(folder, **sections), overrides)


def complaints(folder: Path, *overrides: str, **sections: str) -> list[str]:
    with pytest.raises(JobError) as caught:
        load(folder, *overrides, **sections)
    return [str(problem).replace(f"{folder}/", "") for problem in caught.value.problems]


def complaint(folder: Path, *overrides: str, **sections: str) -> str:
    (only,) = complaints(folder, *overrides, **sections)
    return only


# Overrides ---------------------------------------------------------------------------------------


def test_overrides_are_read_as_yaml(tmp_path: Path) -> None:
    job = load(
        tmp_path,
        "train.learning_rate=1e-4",
        "train.max_grad_norm=",
        "train.optimizer={type: sgd, momentum: 0.5}",
        "model.stop_tokens=[a, 'b=c']",
        "data.packing=false",
        "model.name=no",
        "save.directory=runs/a=b",
    ).job
    assert job.train.learning_rate == 1e-4
    assert job.train.max_grad_norm is None
    assert job.train.optimizer.model_dump() == {"type": "sgd", "momentum": 0.5, "weight_decay": 0.0}
    assert job.model.stop_tokens == ("a", "b=c")
    assert job.data.packing is False
    assert (job.model.name, job.save.directory) == ("no", "runs/a=b")
    assert job.train.steps == 2  # as the file says


def test_a_type_that_goes_without_saying(tmp_path: Path) -> None:
    words = "train.optimizer.eps=1e-6", "train.optimizer.betas=[0.9, 0.99]", "launch.processes=2"
    job = load(tmp_path, *words, "strategy=auto").job
    assert job.train.optimizer == AdamW(eps=1e-6, betas=(0.9, 0.99))
    assert job.launch == LocalLaunch(processes=2)
    assert job.strategy == AutoStrategy()
    again = Job.model_validate_json(job.model_dump_json())
    assert again == job


def test_variables_of_the_chat_template(tmp_path: Path) -> None:
    key, given = "data.chat_template_kwargs", {"thinking": False, "effort": 1.5, "roles": ("a", 1)}
    job = load(tmp_path, f"{key}.thinking=false", f"{key}.effort=1.5", f"{key}.roles=[a, 1]").job
    assert job.data.chat_template_kwargs == given
    assert Job.model_validate_json(job.model_dump_json()) == job
    with pytest.raises(JobError, match=r"it must be text, true or false, .* or a list"):
        load(tmp_path, f"{key}.thinking={{a: 1}}")


@pytest.mark.parametrize("word", OTHERS_KEYS)
def test_words_of_other_tools_lead_to_keys_that_are_there(word: str) -> None:
    pattern = r"\b[a-z]+\.[a-z_]+|\btrack(?=:)|\b[a-z]+(?=: [\[{])"
    named = set(re.findall(pattern, OTHERS_KEYS[word]))
    assert named
    keys = {dotted(key) for key in all_keys()}
    assert named <= keys | {key.split(".")[-1] for key in keys}


def test_no_word_is_both_known_and_needless() -> None:
    assert not OTHERS_KEYS.keys() & NEEDLESS_KEYS.keys()
    ours = {key[0] for key in all_keys()}
    assert not ours & (OTHERS_KEYS.keys() | NEEDLESS_KEYS.keys())


AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
datasets: [{path: data.jsonl, type: alpaca}]
val_set_size: 0.1
adapter: lora
lora_r: 16
micro_batch_size: 2
tf32: false
stage: sft
learning_rate: 2e-4
fsdp: [full_shard, auto_wrap]
"""


def test_a_file_of_another_tool_is_told_so_first(tmp_path: Path) -> None:
    path = tmp_path / "axolotl.yml"
    path.write_text(AXOLOTL)
    with pytest.raises(JobError) as caught:
        load_job(path)
    first, *others = caught.value.problems
    assert first.fact.startswith("is another tool's file: 7 of its 10 keys")
    assert "`shardtune init NousResearch/Llama-3.2-1B DATA`" in first.fix
    fixes = {each.place.partition(": ")[2]: each.fix for each in others}
    assert fixes["model"] == "add `model: {name: NousResearch/Llama-3.2-1B}`"
    assert fixes["val_set_size"].startswith("use data.eval: {share:")
    assert fixes["stage"].startswith("leave it out: shardtune does supervised fine-tuning")
    assert fixes["learning_rate"] == "did you mean 'train.learning_rate'?"
    assert "fsdp" not in fixes  # which is understood


def test_a_job_with_a_few_other_words_is_not_called_anothers(tmp_path: Path) -> None:
    words = "lora_r=8", "lora_alpha=8", "lora_dropout=0.1", "warmup=3"
    with pytest.raises(JobError) as caught:
        load(tmp_path, *words)
    assert [each.fact for each in caught.value.problems] == ["unknown key"] * 4


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published files are not here")
def test_every_key_of_published_files_is_answered() -> None:
    """With its name here, the reason why there is none, or the section where it belongs."""
    wrong = set()
    for path in sorted(PUBLISHED.rglob("*.y*ml")):
        with pytest.raises(JobError) as caught:
            load_job(path)
        for each in caught.value.problems:
            key = each.place.rpartition(": ")[2].rpartition(".")[2]
            lost = each.fix.startswith("known here:")
            led_astray = "did you mean" in each.fix and f"{key}'" not in each.fix
            if "unknown key" in each.fact and (lost or led_astray):
                wrong.add((path.name, key, each.fix))
    assert not wrong


def test_an_override_reaches_into_lists(tmp_path: Path) -> None:
    two = "{train: [{path: a, format: chat}, {path: b, format: chat}]}"
    job = load(tmp_path, "data.train.1.path=c", "data.train.0.columns.text=body", data=two).job
    assert [source.path for source in job.data.train] == ["a", "c"]
    assert job.data.train[0].columns.text == "body"


def test_a_list_can_be_set_as_a_whole(tmp_path: Path) -> None:
    job = load(tmp_path, "data.eval=[{path: e.jsonl, format: chat}]", "data.eval.0.name=held").job
    assert [source.name for source in job.data.eval] == ["held"]


def test_the_last_override_of_a_key_wins(tmp_path: Path) -> None:
    assert load(tmp_path, "train.steps=5", "train.steps=7").job.train.steps == 7


A_SECTION = "a section of its own (`key: value` lines)"
NO_PAIR = "fix: write train.steps=10"
WRONG = {
    "train.steps": f"command line: 'train.steps' is not key=value\n    {NO_PAIR}",
    "=3": f"command line: '=3' is not key=value\n    {NO_PAIR}",
    "train..steps=3": f"command line: 'train..steps=3' is not key=value\n    {NO_PAIR}",
    ".=3": f"command line: '.=3' is not key=value\n    {NO_PAIR}",
    "train.steps=ten": (
        'command line: train.steps: is "ten"; it must be a whole number\n'
        "    fix: give a whole number"
    ),
    "trian.steps=3": "command line: trian: unknown key\n    fix: did you mean 'train'?",
    "train.stepz=3": "command line: train.stepz: unknown key\n    fix: did you mean 'steps'?",
    "train.optimizer.momentum=0.9": (
        "command line: train.optimizer.momentum: unknown key here\n"
        "    fix: it belongs to `type: sgd`; set that, or remove the key"
    ),
    "strategy=fsdp": (
        f'command line: strategy: is "fsdp"; it must be {A_SECTION}\n'
        "    fix: write {type: fsdp}, or strategy.type=fsdp on the command line"
    ),
    "train.optimizer=sgd": (
        f'command line: train.optimizer: is "sgd"; it must be {A_SECTION}\n'
        "    fix: write {type: sgd}, or train.optimizer.type=sgd on the command line"
    ),
    "train.optimizer=3": (
        f"command line: train.optimizer: is 3; it must be {A_SECTION}\n    fix: give {A_SECTION}"
    ),
    "train.optimizer.type=": (
        "command line: train.optimizer.type: is 'None'\n    fix: write one of 'adamw', 'sgd'"
    ),
    "launch=ray": (
        f'command line: launch: is "ray"; it must be {A_SECTION}\n'
        "    fix: write {type: ray}, or launch.type=ray on the command line"
    ),
    "launch=": (
        f"command line: launch: is empty; it must be {A_SECTION}\n    fix: give {A_SECTION}"
    ),
    "launch.workers=3": (
        "command line: launch.workers: unknown key here\n"
        "    fix: it belongs to `type: ray`; set that, or remove the key"
    ),
    "launch={type: ray, wrokers: 2}": (
        "command line: launch.wrokers: unknown key\n    fix: did you mean 'workers'?"
    ),
    "strategy={type: fsdp, fp16: {}}": (
        "command line: strategy.fp16: unknown key here\n"
        "    fix: it belongs to `type: deepspeed`; set that, or remove the key"
    ),
    "train.lr=1": "command line: train.lr: unknown key\n    fix: use train.learning_rate",
    "model.attention=flash_attention_4": (
        "command line: model.attention: is \"flash_attention_4\"; it must be 'auto', 'sdpa', "
        "'flex_attention', 'flash_attention_2' or 'eager'\n    fix: write sdpa: with "
        "`shardtune[flash]` installed it is FlashAttention 4 on GPUs that can have it"
    ),
    "train.precision=fp8-base": (
        "command line: train.precision: is \"fp8-base\"; it must be 'auto', 'fp32', 'bf16' or "
        "'fp16'\n"
        "    fix: write `model: {quantization: fp8}` and leave train.precision at bf16"
    ),
    "train.precision=float16": (
        "command line: train.precision: is \"float16\"; it must be 'auto', 'fp32', 'bf16' or "
        "'fp16'\n    fix: write fp16"
    ),
    "strategy.type=zero3": (
        "command line: strategy.type: is 'zero3'\n"
        "    fix: write strategy: {type: deepspeed, zero_optimization: {stage: 3}}"
    ),
    "model.quantization=4bit": (
        "command line: model.quantization: is \"4bit\"; it must be 'none', 'nf4', 'int8' or "
        "'fp8'\n    fix: write nf4"
    ),
    "data.train.0.format=sharegpt": (
        "command line: data.train.0.format: is \"sharegpt\"; it must be 'instruction', 'chat', "
        "'completion', 'pretokenized' or 'source_target'\n    fix: write chat"
    ),
    "data.train.0.type=alpaca": (
        "command line: data.train.0.type: unknown key\n    fix: use format: instruction for "
        "alpaca, chat for chat_template or sharegpt, completion"
    ),
    "data.train.1.path=b": (
        "command line: data.train.1.path: data.train is a list of 1; '1' is not one of them\n"
        "    fix: use a number from 0 to 0, or set data.train as a whole"
    ),
    "data.train.path=b": (
        "command line: data.train.path: data.train is a list of 1; 'path' is not one of them\n"
        "    fix: use a number from 0 to 0, or set data.train as a whole"
    ),
    "data.train.-1.path=b": (
        "command line: data.train.-1.path: data.train is a list of 1; '-1' is not one of them\n"
        "    fix: use a number from 0 to 0, or set data.train as a whole"
    ),
    "data.train.²=b": (
        "command line: data.train.²: data.train is a list of 1; '²' is not one of them\n"
        "    fix: use a number from 0 to 0, or set data.train as a whole"
    ),
    "data.eval.0.path=b": (
        "command line: data.eval.0.path: data.eval is no list in this job\n"
        "    fix: set data.eval as a whole"
    ),
    "train.steps=[1": (
        "command line: train.steps: not valid YAML: while parsing a flow sequence, expected ',' or "
        "']', but got '<stream end>'\n    fix: fix the syntax"
    ),
    "train.steps=!!python/name:os.system": (
        "command line: train.steps: the tag !!python/name:os.system is refused: a job file holds "
        "plain data\n    fix: remove the tag"
    ),
    "train={steps: 1, steps: 2}": (
        "command line: train: written twice (first on line 1)\n    fix: keep one of the two"
    ),
}


@pytest.mark.parametrize("override", WRONG)
def test_a_wrong_override_is_told(override: str, tmp_path: Path) -> None:
    assert complaint(tmp_path, override) == WRONG[override]


def test_an_override_can_not_enter_a_word(tmp_path: Path) -> None:
    found = complaint(tmp_path, "model.stop_tokens.0.x=1", model="{name: tiny, stop_tokens: [a]}")
    assert found == (
        'command line: model.stop_tokens.0.x: model.stop_tokens.0 is "a", not a section\n'
        "    fix: set model.stop_tokens.0 as a whole"
    )


def test_an_empty_list_has_no_members_to_set(tmp_path: Path) -> None:
    found = complaint(tmp_path, "data.eval=[]", "data.eval.0.path=x")
    assert found.endswith(
        "is a list of 0; '0' is not one of them\n    fix: set data.eval as a whole"
    )


def test_all_wrong_overrides_are_told_at_once(tmp_path: Path) -> None:
    assert len(complaints(tmp_path, "a", "train.steps=[", "data.train.7=x", "save.every=3")) == 3


# Origins -----------------------------------------------------------------------------------------


def test_every_value_knows_where_it_was_written(tmp_path: Path) -> None:
    loaded = load(tmp_path, "train.learning_rate=1e-4", "data.train.0.path=x.jsonl")
    path = tmp_path / "job.yaml"
    assert loaded.origin(("model", "name")) == f"{path}:{LINE['model']}"
    assert loaded.origin(("data", "train", 0, "format")) == f"{path}:{LINE['data']}"
    assert loaded.origin(("data", "train", 0, "path")) == "command line"
    assert loaded.origin(("train", "learning_rate")) == "command line"
    assert loaded.origin(("train", "steps")) == f"{path}:{LINE['train']}"
    assert loaded.origin(("train", "seed")) == "default"


def test_a_section_set_as_a_whole_forgets_what_the_file_said(tmp_path: Path) -> None:
    loaded = load(tmp_path, "train={steps: 9}")
    assert loaded.job.train.global_batch == 16  # the default, not the file's 2
    assert loaded.origin(("train", "steps")) == "command line"
    assert loaded.origin(("train", "global_batch")) == "default"


def test_a_place_is_that_of_the_nearest_thing_written(tmp_path: Path) -> None:
    loaded = load(tmp_path, "evaluate.samples=1")
    path = tmp_path / "job.yaml"
    assert loaded.place(("train", "seed")) == f"{path}:{LINE['train']}: train.seed"
    assert loaded.place(("strategy",)) == f"{path}:1: strategy"
    assert loaded.place(("evaluate", "every")) == "command line: evaluate.every"
    assert loaded.place(()) == f"{path}:1"


def test_leaves_are_the_values_that_a_person_writes() -> None:
    tree = {"a": {"b": 1, "c": []}, "d": [{"e": 2}, {"e": [3, 4]}], "f": {}}
    assert list(leaves(tree)) == [
        (("a", "b"), 1),
        (("a", "c"), []),
        (("d", 0, "e"), 2),
        (("d", 1, "e"), [3, 4]),
        (("f",), {}),
    ]


# Mistakes in the file ----------------------------------------------------------------------------

# (section, text, complaint)
MISTAKES = [
    ("train", "{stpes: 3}", "train.stpes: unknown key\n    fix: did you mean 'steps'?"),
    ("train", "{rank: 3}", "train.rank: unknown key here\n    fix: did you mean 'adapter.rank'?"),
    ("train", "{steps: '3'}",
     'train.steps: is "3"; it must be a whole number\n    fix: give a whole number'),
    ("train", "{steps: 2.5}",
     "train.steps: is 2.5; it must be a whole number\n    fix: give a whole number"),
    ("train", "{steps: 0}", "train.steps: is 0; it must be at least 1\n    fix: give at least 1"),
    ("train", "{seed: true}",
     "train.seed: is true; it must be a whole number\n    fix: give a whole number"),
    ("train", "{learning_rate: .nan}",
     "train.learning_rate: is NaN; it must be a finite number\n    fix: give a finite number"),
    ("train", "{learning_rate: 1e999}",
     "train.learning_rate: is Infinity; it must be a finite number\n    fix: give a finite number"),
    ("train", "{learning_rate: 0}",
     "train.learning_rate: is 0; it must be more than 0.0\n    fix: give more than 0.0"),
    ("train", "{schedule: cosin}",
     "train.schedule: is \"cosin\"; it must be 'cosine', 'linear', 'constant' or 'one_cycle'\n"
     "    fix: did you mean 'cosine'?"),
    ("train", "{micro_batch: atuo}",
     "train.micro_batch: is \"atuo\"; it must be 'auto' or a whole number\n"
     "    fix: did you mean 'auto'?"),
    ("train", "{micro_batch: 0}",
     "train.micro_batch: is 0; it must be 'auto' or at least 1\n"
     "    fix: give 'auto' or at least 1"),
    ("train", "{optimizer: {type: adamw, betas: [0.9]}}",
     "train.optimizer.betas: is a list of 1; it must be a longer list\n"
     "    fix: give a longer list"),
    ("train", "{optimizer: {type: adamw, betas: [1, 2, 3]}}",
     "train.optimizer.betas: is a list of 3; it must be a list of at most 2\n"
     "    fix: give a list of at most 2"),
    ("train", "{optimizer: {type: adamw, betas: [0.9, 1]}}",
     "train.optimizer.betas.1: is 1; it must be less than 1.0\n    fix: give less than 1.0"),
    ("train", "{optimizer: {type: sgd, betas: [0.9, 0.9]}}",
     "train.optimizer.betas: unknown key here\n"
     "    fix: it belongs to `type: adamw`; set that, or remove the key"),
    ("train", "{optimizer: {type: adam}}",
     "train.optimizer.type: is 'adam'\n    fix: did you mean 'adamw'?"),
    ("train", "3", f"train: is 3; it must be {A_SECTION}\n    fix: give {A_SECTION}"),
    ("train", "", f"train: is empty; it must be {A_SECTION}\n    fix: give {A_SECTION}"),
    ("train", "[steps, 3]",
     f"train: is a list of 2; it must be {A_SECTION}\n    fix: give {A_SECTION}"),
    ("adapter", "lora",
     f'adapter: is "lora"; it must be {A_SECTION}\n'
     "    fix: write {type: lora}, or adapter.type=lora on the command line"),
    ("adapter", "{rank: 4}",
     "adapter.type: is missing\n    fix: add `type:` with one of ia3, lora, none"),
    ("adapter", "{type: lorra}", "adapter.type: is 'lorra'\n    fix: did you mean 'lora'?"),
    ("adapter", "{type: x}", "adapter.type: is 'x'\n    fix: write one of 'lora', 'ia3', 'none'"),
    ("adapter", "{type: none, rank: 4}",
     "adapter.rank: unknown key here\n"
     "    fix: it belongs to `type: lora`; set that, or remove the key"),
    ("adapter", "{type: lora, targets: [q_proj, 3]}",
     "adapter.targets.1: is 3; it must be text\n    fix: put it in quotes"),
    ("adapter", "{type: lora, targets: q_proj}",
     "adapter.targets: is \"q_proj\"; it must be 'all-linear' or a list\n"
     "    fix: give 'all-linear' or a list"),
    ("model", "{name: 7}", "model.name: is 7; it must be text\n    fix: put it in quotes"),
    ("model", "{name: ''}",
     "model.name: is \"\"; it must be text that isn't empty\n    fix: give text that isn't empty"),
    ("model", "{name: tiny, trust_remote_code: yes}",
     'model.trust_remote_code: is "yes"; it must be true or false\n    fix: give true or false'),
    ("data", "{train: []}",
     "data.train: is an empty list; it must be a list of at least 1\n"
     "    fix: give a list of at least 1"),
    ("data", "{train: {path: a, format: chat}}",
     "data.train: is a section; it must be a list\n    fix: give a list"),
    ("data", "{train: [a.jsonl]}",
     f'data.train.0: is "a.jsonl"; it must be {A_SECTION}\n'
     "    fix: write {path: a.jsonl, format: instruction}, with its own format"),
    ("data", "{train: a.jsonl}",
     'data.train: is "a.jsonl"; it must be a list\n'
     "    fix: write [{path: a.jsonl, format: instruction}], with its own format"),
    ("data", "{train: [{path: a}]}",
     "data.train.0.format: is missing\n"
     "    fix: add `format:` with one of 'instruction', 'chat', 'completion', 'pretokenized', "
     "'source_target'"),
    ("data", "{train: [{path: a, format: chat, name: a b}]}",
     "data.train.0.name: is \"a b\"; it must be 'auto' or a short name of letters, digits, '.', '_'"
     " and '-'\n    fix: give 'auto' or a short name of letters, digits, '.', '_' and '-'"),
    ("data", "{train: [{path: a, format: chat}], eval: [{path: a, format: chat, weight: 2}]}",
     "data.eval.0.weight: unknown key here\n    fix: did you mean 'data.train.weight'?"),
    ("strategy", "{type: tensor}",
     "strategy.degree: is missing\n"
     "    fix: add `degree: 2` or more: how many ranks divide each layer, a divisor "
     "of all there are"),
    ("strategy", "{type: pipeline}",
     "strategy.stages: is missing\n"
     "    fix: add `stages: 2` or more: over how many ranks the layers are divided, a divisor "
     "of all there are"),
    ("strategy", "{type: ddp, stage: 2}",
     "strategy.stage: unknown key here\n    fix: did you mean 'strategy.zero_optimization.stage'?"),
    ("learning_rate", "3",
     "learning_rate: unknown key here\n    fix: did you mean 'train.learning_rate'?"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "text", "told"), MISTAKES)
def test_a_mistake_is_told_at_its_line(section: str, text: str, told: str, tmp_path: Path) -> None:
    line = LINE.get(section, len(SECTIONS) + 1)
    assert complaint(tmp_path, **{section: text}) == f"job.yaml:{line}: {told}"


def test_a_job_needs_a_model_and_data(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("train: {steps: 3}\n", encoding="utf-8")
    with pytest.raises(JobError) as caught:
        load_job(path)
    assert [problem.place for problem in caught.value.problems] == [
        f"{path}:1: model",
        f"{path}:1: data",
    ]


@pytest.mark.parametrize(
    ("text", "fact"),
    [("", "is empty"), ("# a\n", "is empty"), ("- a\n", "is not a mapping"), ("a", "is not a map")],
)
def test_what_is_no_job_at_all(text: str, fact: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(JobError) as caught:
        load_job(path)
    (problem,) = caught.value.problems
    assert problem.fact.startswith(fact)
    assert "`model:` and `data:`" in problem.fix


def test_a_long_value_is_not_shown_whole(tmp_path: Path) -> None:
    assert len(complaint(tmp_path, train=f"{{schedule: {'x' * 9000}}}").split("\n")[0]) < 200


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    told = complaints(
        tmp_path,
        "save.evry=3",
        train="{steps: x, seed: -1, schedul: cosine}",
        launch="{processes: none}",
    )
    assert [problem.split(": ")[1] for problem in told] == [
        "train.steps", "train.seed", "train.schedul", "launch.processes", "save.evry"
    ]  # fmt: skip
    assert told[-1].startswith("command line: ")


def test_the_tests_own_job_is_good(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(job_text(), encoding="utf-8")
    assert load_job(path).job.model.name == "tiny"


@pytest.mark.parametrize(
    ("key", "value", "most"),
    [
        ("train.steps", "9" * 900, "1,000,000,000,000"),
        ("data.sequence_length", "9" * 900, "1,000,000,000,000"),
        ("train.global_batch", "1000000000", "10,000,000"),
        ("train.learning_rate", "1e308", "10,000"),
    ],
)
def test_numbers_beyond_all_use_are_refused(
    tmp_path: Path, key: str, value: str, most: str
) -> None:
    with pytest.raises(JobError, match=f"{key}: is .*; it must be at most {most}"):
        load_job(write_job(tmp_path), [f"{key}={value}"])
