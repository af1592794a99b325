"""`shardtune generate` and `shardtune merge`: what can be done with the result of a run."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from shardtune.cli.arguments import (
    Commands,
    add_command,
    add_run_directory,
    count,
    temperature,
    text,
)
from shardtune.cli.say_dtype import say_dtype
from shardtune.errors import Problem, RunError

if TYPE_CHECKING:
    from shardtune.checkpoint.merge import MergedModel
    from shardtune.checkpoint.run_dir import RunDir
    from shardtune.config.job import Job
    from shardtune.core.setup import Precision

_PROMPT = "Question: how many days have 3 weeks?\nAnswer: 3 * 7 = 21 days, of which 6 are free.\n"


def add_parser(commands: Commands) -> None:
    command = add_command(
        commands,
        "generate",
        _generate,
        "answer a prompt with the result of a run",
        """\
  shardtune generate runs/quickstart --prompt "Add two numbers in Python."
  shardtune generate runs/quickstart --prompt "Once" --raw --temperature 0.8""",
    )
    add_run_directory(command)
    command.add_argument("--prompt", type=text, required=True, help="the prompt")
    command.add_argument(
        "--max-new-tokens",
        type=count,
        default=256,
        metavar="N",
        help="longest answer, in tokens (256)",
    )
    command.add_argument(
        "--temperature",
        type=temperature,
        default=0.0,
        metavar="T",
        help="0 is greedy (0)",
    )
    command.add_argument(
        "--raw", action="store_true", help="continue the prompt without a chat template"
    )

    command = add_command(
        commands,
        "merge",
        _merge,
        "merge the adapter of a run into its base model",
        """\
  shardtune merge runs/quickstart merged/quickstart
  shardtune merge runs/quickstart merged/quickstart --dtype bf16""",
    )
    add_run_directory(command)
    command.add_argument("target", type=Path, metavar="OUT", help="folder to write")
    command.add_argument(
        "--dtype",
        choices=("bf16", "fp16", "fp32"),
        help="dtype of the weights (the run's compute dtype)",
    )


def _generate(arguments: argparse.Namespace) -> int:
    print(
        ask(
            arguments.directory,
            arguments.prompt,
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            raw=arguments.raw,
        )
    )
    return 0


def _merge(arguments: argparse.Namespace) -> int:
    run, job = open_result(arguments.directory)
    found = merge_run(run, job, arguments.target, dtype=arguments.dtype)
    written = say_dtype(
        arguments.target,
        found.dtype,
        asked=arguments.dtype is not None,
        computed=job.train.compute_precision,
        in_bf16=found.in_bf16,
    )
    print(
        f"{written}\n"
        f"merged: logits within {found.merged.found:.2g} of the adapter's, both in fp32 "
        f"(rounding explains up to {found.merged.bound:.2g})\n"
        f"rounded to {found.dtype}: within {found.rounded.found:.2g} "
        f"(rounding explains up to {found.rounded.bound:.2g})"
    )
    return 0


def ask(directory: Path, prompt: str, *, max_new_tokens: int, temperature: float, raw: bool) -> str:
    """One answer of the trained model."""
    import torch

    from shardtune.data.formats import learnt_plain, plain_prompt
    from shardtune.kernels.measure_matmul import widen_slow_products
    from shardtune.models.context_window import fit_answer
    from shardtune.models.generate import generate_answers, prompt_ids
    from shardtune.models.load_result import load_result, load_result_tokenizer
    from shardtune.models.model_files import ModelFiles

    widen_slow_products()
    run, job = open_result(directory)
    files = ModelFiles(job.model)
    model = load_result(str(run.result), files, job.train.compute_precision)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device)
    tokenizer = load_result_tokenizer(str(run.result), job.model)
    if files.kind == "encoder_decoder":
        prompt, raw = ("" if raw else _prefix(job)) + prompt, True
    if not raw and learnt_plain(job.data, tokenizer):
        prompt, raw = plain_prompt(prompt), True
    ids = prompt_ids(tokenizer, prompt, chat=not raw and tokenizer.chat_template is not None)
    if files.kind == "decoder":
        max_new_tokens = fit_answer(model, ids, max_new_tokens)
    return generate_answers(
        model,
        tokenizer,
        [ids],
        stops=frozenset(model.generation_config.eos_token_id),  # as `save_result` wrote them
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        device=device,
    )[0]


def merge(directory: Path, target: Path, *, dtype: Precision | None = None) -> MergedModel:
    """`merge_run` of the run in `directory`."""
    return merge_run(*open_result(directory), target, dtype=dtype)


def merge_run(
    run: RunDir, job: Job, target: Path, *, dtype: Precision | None = None
) -> MergedModel:
    """Writes the run's model with its adapter merged into it, in `dtype` (what it computed in).

    The adapter of a quantized model is merged into the dequantized weights: these were trained with
    and evaluated. Into the original ones it would make a model that nobody has seen.
    """
    from shardtune.checkpoint.merge import merge_adapter
    from shardtune.checkpoint.model_card import CARD_FILE, card_of_merged
    from shardtune.checkpoint.model_folder import require_place
    from shardtune.config.job import NoAdapter
    from shardtune.models.load import COMPUTE_DTYPES, merged_dtype
    from shardtune.models.load_result import load_result_tokenizer, load_to_merge
    from shardtune.models.model_files import ModelFiles

    if isinstance(job.adapter, NoAdapter):
        fact = "this run trained all weights: there is no adapter to merge"
        raise RunError(Problem(str(run.path), fact, f"{run.result} is the whole model already"))
    if target.exists():
        fix = "name a folder that doesn't exist yet"
        raise RunError(Problem(str(target), "exists already", fix))
    require_place(target)
    base = ModelFiles(job.model)
    model = load_to_merge(str(run.result), base, job.train.compute_precision)
    tokenizer = load_result_tokenizer(str(run.result), job.model)
    usual = merged_dtype(base, job.train.compute_precision)
    file = run.result / CARD_FILE
    card = card_of_merged(file.read_text(encoding="utf-8"), base.loader) if file.is_file() else None
    return merge_adapter(
        model,
        tokenizer,
        target,
        COMPUTE_DTYPES[dtype] if dtype else usual,
        comparison_prompts(run),
        base=base,
        card=card,
    )


def comparison_prompts(run: RunDir) -> list[str]:
    """What the run itself was asked and said, and a text for runs that were asked nothing."""
    report = run.read_report()
    samples = report.samples if report is not None else ()
    return [*(f"{each.prompt}\n{each.after}" for each in samples), _PROMPT]


def _prefix(job: Job) -> str:
    """What stood before each source, where it was the same in all sets."""
    found = {source.prefix for source in job.data.train}
    return found.pop() if len(found) == 1 else ""


def open_result(directory: Path) -> tuple[RunDir, Job]:
    """The run and its job; RunError if it has no result, or one of which a byte has changed."""
    from shardtune.checkpoint.run_dir import RunDir
    from shardtune.checkpoint.run_guards import require_run
    from shardtune.checkpoint.verify import require_sound_result
    from shardtune.config.job_file import load_job

    run = RunDir(directory)
    require_run(run)
    if not run.result.is_dir():
        fact = "the run has no result: it ended before it was saved"
        fix = f"go on with it: shardtune train {shlex.quote(str(run.job))} --resume"
        raise RunError(Problem(str(directory), fact, fix))
    require_sound_result(run)
    return run, load_job(run.job).job
