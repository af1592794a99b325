"""The commands: help, messages, what they print, and how fast they answer."""

from __future__ import annotations

import json
import os
import pkgutil
import re
import resource
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

import shardtune.cli
import shardtune.config
import shardtune.core
import shardtune.parallel
import shardtune.plan
from shardtune import __version__
from shardtune.cli import main as cli
from shardtune.config.job import Job
from shardtune.config.job_file import leaves
from shardtune.core.files.yaml_document import dotted
from tests.jobs import make_job, write_job

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ["init", "plan", "estimate", "bench", "train", "data", "show", "schema", "generate",
            "merge", "evaluate", "export", "push", "serve", "chat", "models", "track",
            "models list", "models pull", "report", "dashboard", "verify",
            "slurm", "diagnose", "doctor", "completion"]  # fmt: skip
HEAVY = {"torch", "transformers", "peft", "datasets", "deepspeed"}
ON_RAY = "shardtune.cli.start.train_on_ray"  # imported by a job that asks for Ray


@pytest.fixture(autouse=True)
def screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of the usual size."""
    monkeypatch.setenv("COLUMNS", "80")


def ended(*arguments: str) -> int | str | None:
    """The exit code of a command that ends the program itself."""
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    return caught.value.code


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert ended(*command.split(), "--help") == 0
    return capsys.readouterr().out


# Help --------------------------------------------------------------------------------------------


def test_the_commands_of_this_test_are_all_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    def named(command: str, heading: str) -> list[str]:
        section = help_of(command, capsys).split(f"{heading}:\n")[1].split("\n\n")[0]
        return re.findall(r"^    (\w+)(?: |$)", section, re.MULTILINE)

    commands = named("", "commands")
    actions = [f"models {name}" for name in named("models", "actions")]
    assert sorted([*commands, *actions]) == sorted(COMMANDS)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_on_a_screen(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = help_of(command, capsys).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_shows_examples_that_work(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(command, capsys)
    examples = re.findall(r"^  ((?:shardtune|torchrun|accelerate) .*)$", text, re.MULTILINE)
    assert examples
    for example in examples:
        words = shlex.split(re.split(r" {3,}| > ", example)[0])  # what follows is for the reader
        words = words[words.index("shardtune") + 1 :]
        if command:
            assert words[: len(command.split())] == command.split() or command == "models"
        cli.parse(words)  # leaves the program if it doesn't understand
        for option, word in pairwise(words):
            if word.endswith(".yaml") and option not in ("--out", "--write"):
                assert (ROOT / word).is_file()


def test_help_answers_at_once() -> None:
    def seconds() -> float:
        """Of the processor: a busy machine is no failure."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "shardtune", "--help"], check=True, capture_output=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 0.5


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("--version") == 0
    assert capsys.readouterr().out == f"shardtune {__version__}\n"


# Mistakes on the command line --------------------------------------------------------------------

WRONG = {
    "zzz job.yaml": ("shardtune", "invalid choice: 'zzz' (choose from "),
    "--versoin": ("shardtune", "required: COMMAND"),
    "train": ("shardtune train", "the following arguments are required: JOB\n"),
    "train job.yaml --overwite": ("shardtune train", "unknown option: --overwite"),
    "plan job.yaml --cluster 4xA40 --minimize cost": (
        "shardtune plan",
        "unknown option: --minimize (did you mean --minimise?)",
    ),
    "train job.yaml --over": ("shardtune train", "unknown option: --over"),
    "train job.yaml --resume --overwrite": ("shardtune train", "not allowed with argument"),
    "show job.yaml --resume": ("shardtune show", "unknown option: --resume"),
    "data job.yaml --examples many": ("shardtune data", "invalid int value: 'many'"),
    "schema job.yaml": ("shardtune schema", "unknown argument: job.yaml"),
    "generate runs/a": ("shardtune generate", "the following arguments are required: --prompt"),
    "merge runs/a": ("shardtune merge", "the following arguments are required: OUT"),
    "models lst": ("shardtune models", "invalid choice: 'lst' (choose from "),
    "models pull": ("shardtune models pull", "the following arguments are required: NAME"),
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_command_line_is_told(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, fact = WRONG[words]
    assert ended(*words.split()) == 2
    told = capsys.readouterr()
    assert told.err.startswith(f"error: {program}: ")
    assert fact in told.err
    assert f"fix: `{program} --help`" in told.err
    assert told.out == ""


MEANT = {
    "trian job.yaml": "did you mean `shardtune train`?",
    "sft job.yaml": "did you mean `shardtune train`?",
    "inference runs/a": "did you mean `shardtune generate`?",
    "merge_lora runs/a": "did you mean `shardtune merge`?",
    "train --config job.yaml": "the job file is the first argument, without an option",
    "train job.yaml --steps=3": "without dashes, as train.steps=VALUE",
    "train job.yaml --train.steps 3": "without dashes, as train.steps=VALUE",
    "train job.yaml --learning_rate=1e-4": "without dashes, as train.learning_rate=VALUE",
    "train --model_name_or_path m --output_dir o": (
        "as train.learning_rate=1e-4; --model_name_or_path: use model.name; "
        "--output_dir: use save.directory"
    ),
}


@pytest.mark.parametrize("words", MEANT)
def test_words_of_other_command_lines_are_led_to_ours(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(*words.split()) == 2
    told = capsys.readouterr().err
    assert MEANT[words] in told.partition("fix: ")[2]


def test_each_command_of_another_tool_is_one_of_ours() -> None:
    _, ours = cli._parser()
    assert not cli.OTHERS_COMMANDS.keys() & {*ours}
    assert {name.split()[0] for name in cli.OTHERS_COMMANDS.values()} <= {*ours}


def test_a_models_folder_in_the_place_of_a_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert cli.main(["train", str(tmp_path)]) == 2
    assert f"fix: `shardtune init {tmp_path} DATA` writes a job for it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "--resume job.yaml train.seed=1 train.steps=3",
        "job.yaml --resume train.seed=1 train.steps=3",
        "job.yaml train.seed=1 --resume train.steps=3",
        "job.yaml train.seed=1 train.steps=3 --resume",
    ],
)
def test_overrides_and_options_may_be_mixed(words: str) -> None:
    arguments = cli.parse(["train", *words.split()])
    assert arguments.job == Path("job.yaml")
    assert arguments.overrides == ["train.seed=1", "train.steps=3"]
    assert arguments.resume


def test_all_problems_are_printed_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_job(tmp_path, train="{stepz: 3, seed: x}")
    assert cli.main(["show", str(path)]) == 2
    told = capsys.readouterr()
    assert told.err.count("error: ") == told.err.count("    fix: ") == 2
    assert told.err.endswith("2 problems\n")
    assert told.out == ""


def test_ctrl_c_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardtune.config.job_file.load_job", interrupted)
    assert cli.main(["show", "job.yaml"]) == 130
    assert capsys.readouterr().err == "stopped\n"


@pytest.mark.parametrize("command", ["show", "schema"])
def test_a_reader_that_goes_away_is_no_fault(command: str, tmp_path: Path) -> None:
    words = [command, str(write_job(tmp_path))] if command == "show" else [command]
    reader, writer = os.pipe()
    os.close(reader)  # as `| head` does when it has seen enough
    with os.fdopen(writer, "w") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "shardtune", *words],
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.stderr == ""


# show, schema, models ----------------------------------------------------------------------------


def shown(text: str) -> dict[str, str]:
    """What `show` printed: the rest of the line of each key, wrapped lines joined."""
    found: dict[str, str] = {}
    for line in text.splitlines()[1:]:
        if line[:1].strip():
            key, _, rest = line.partition(" ")
            found[key] = rest.strip()
        elif line.strip():
            found[key] += " " + line.strip()
    return {key: re.sub(r" {2,}", "  ", rest) for key, rest in found.items()}


@pytest.mark.parametrize("columns", ["80", "200"])
def test_show_prints_every_value_and_where_it_came_from(
    columns: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path, launch="{}", adapter="{type: lora, targets: [q_proj, v_proj]}")
    overrides = ["train.learning_rate=1e-4", "data.packing=false"]
    assert cli.main(["show", "job.yaml", *overrides]) == 0
    found = shown(capsys.readouterr().out)
    job = make_job(adapter={"type": "lora"}, data={}).model_dump(mode="json")
    assert set(found) == {dotted(path) for path, _ in leaves(job)}
    assert found["model.name"] == "tiny  job.yaml:1"
    assert found["adapter.targets"] == "[q_proj, v_proj]  job.yaml:2"
    assert found["data.packing"] == "false  command line"
    assert found["train.learning_rate"] == "0.0001  command line"
    assert found["train.steps"] == "2  job.yaml:4"
    assert found["train.epochs"] == "null  default"
    assert found["train.optimizer.betas"] == "[0.9, 0.95]  default"
    assert found["train.optimizer.eps"] == "1e-08  default"
    assert found["data.train.0.name"] == "good  auto: the file's name"
    assert found["launch.processes"] == "1  auto: no GPU found: one process"
    assert found["evaluate.every"] == "0  auto: as often as save.every"
    assert found["train.micro_batch"].startswith("2  auto: a rank has 2 rows a step; 64 x 64")


def test_show_checks_the_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_job(tmp_path)
    assert cli.main(["show", str(path), "launch.processes=3"]) == 2
    assert "3 processes share 2 rows a step" in capsys.readouterr().err


def test_the_schema_is_that_of_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.pop("$schema") == "https://json-schema.org/draft/2020-12/schema"
    assert found == Job.model_json_schema()


@pytest.mark.parametrize("words", ["models", "models list"])
def test_the_built_in_models_are_listed(
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli.main(words.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "what", "size", "in", "the", "cache"]
    assert [line.split()[0] for line in lines if line[:1].strip()] == [
        "name", "tiny", "smollm2-135m-instruct"
    ]  # fmt: skip
    assert lines[1].split()[-1] == "no"
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_not_built_in_can_not_be_pulled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["models", "pull", "smollm2"]) == 2
    told = capsys.readouterr().err
    assert "error: models pull: 'smollm2' is no built-in model" in told
    assert "smollm2-135m-instruct" in told


@pytest.mark.parametrize("words", ["generate nowhere --prompt x", "merge nowhere out"])
def test_a_folder_that_holds_no_run_is_refused(
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(words.split()) == 2
    assert "error: nowhere: is no run directory" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# What is imported --------------------------------------------------------------------------------


def imported_by(code: str, heavy: set[str] = HEAVY) -> set[str]:
    """The heavy packages that are loaded when the code has run, in a process of its own."""
    report = f"\nimport sys\nprint('heavy:', *({heavy!r} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", code + report], capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_planning_imports_nothing_heavy() -> None:
    rooms = (shardtune.core, shardtune.config, shardtune.plan, shardtune.cli)
    modules = ["shardtune.errors", "shardtune.parallel"]
    for room in rooms:
        inner = pkgutil.walk_packages(room.__path__, room.__name__ + ".")
        modules += [module.name for module in inner if module.name != ON_RAY]
    modules += [f"{each}.strategy" for each in _packages(shardtune.parallel)]
    assert {"shardtune.core.layout", "shardtune.parallel.ddp.strategy"} <= set(modules)
    assert imported_by("\n".join(f"import {name}" for name in modules)) == set()


def _packages(room: ModuleType) -> list[str]:
    inner = pkgutil.iter_modules(room.__path__, room.__name__ + ".")
    return [module.name for module in inner if module.ispkg]


def test_help_imports_neither_pydantic_nor_rich() -> None:
    """A person waits for it."""
    code = (
        "from shardtune.cli.main import main\ntry:\n    main(['--help'])\nexcept SystemExit: pass"
    )
    assert imported_by(code, HEAVY | {"pydantic", "rich", "yaml"}) == set()


def test_commands_about_jobs_import_nothing_heavy(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    code = "from shardtune.cli.main import main\n"
    for words in (["show", str(path)], ["schema"], ["models", "list"]):
        code += f"assert main({words!r}) == 0\n"
    assert imported_by(code) == set()


def test_a_mistake_in_a_job_is_told_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    words = ["train", str(path), "train.stpes=3"]
    assert imported_by(f"from shardtune.cli.main import main\nassert main({words!r}) == 2") == set()


def test_the_check_sees_what_is_imported() -> None:
    assert imported_by("import shardtune.launch.process_group") >= {"torch"}


def test_the_import_contracts_are_kept() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([str(linter)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert re.search(r"[1-9]\d* kept, 0 broken", done.stdout)


def test_a_library_that_advises_everyone_is_quiet() -> None:
    pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")
    code = "from shardtune.cli.main import main; main(['models', 'list']); import bitsandbytes"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_deepspeed_is_silent_where_it_is_only_imported() -> None:
    """accelerate imports it; it has to say nothing in a run without it."""
    import logging

    from shardtune.compat.quiet import quiet_deepspeed_import

    logger = logging.getLogger("DeepSpeed")
    before = logger.filters[:]
    try:
        quiet_deepspeed_import()
        logger.setLevel(logging.WARNING)  # as it does itself when it is imported
        assert not logger.filter(logging.LogRecord("", logging.WARNING, "", 1, "cpu", (), None))
        assert logger.filter(logging.LogRecord("", logging.ERROR, "", 1, "lost", (), None))
    finally:
        logger.filters[:] = before


def test_bare_shardtune_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert "commands:" in out
    assert "shardtune train recipes/quickstart.yaml" in out


# Odd words ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--prompt", "\udcff"], "--prompt: is not UTF-8 text"),
        (["--prompt", "x", "--max-new-tokens", "-5"], "is -5; it must be from 1 to 1,000,000,000"),
        (["--prompt", "x", "--max-new-tokens", "9" * 5000], "is no whole number"),
        (["--prompt", "x", "--temperature", "nan"], "is nan; it must be a number from 0 on"),
    ],
)
def test_odd_arguments_of_generate_are_a_sentence(
    capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert ended("generate", "runs/none", *words) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("evaluate tiny --batch-size 0", "is 0; it must be from 1 to 1,000,000,000"),
        ("evaluate tiny --judge q.jsonl --limit -1", "is -1; it must be from 1"),
        ("evaluate tiny --max-new-tokens -3", "is -3; it must be from 1"),
        ("evaluate tiny --processes 0", "is 0; it must be from 1"),
        ("serve tiny --queue many", "'many' is no whole number"),
        ("serve tiny --port 70000", "--port: is '70000'; it must be from 0 to 65535"),
        ("dashboard --port=-1", "--port: is '-1'; it must be from 0 to 65535"),
        ("chat tiny --seed 99999999999999999999", "64 bits"),
    ],
)
def test_numbers_out_of_range_are_a_sentence(
    words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(*words.split()) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("words", ["chat ~nobody-here/run", "dashboard ~nobody-here"])
def test_a_user_who_is_not_there_is_a_sentence(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words.split()) == 2
    assert "a path begins with a user who isn't here" in capsys.readouterr().err


def test_a_path_that_no_system_takes_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", str(tmp_path / ("x" * 300))]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert said.startswith("error: ")


def test_without_docstrings_the_reason_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-OO", "-m", "shardtune", "schema"],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "python -OO (PYTHONOPTIMIZE=2) removes docstrings" in done.stderr
