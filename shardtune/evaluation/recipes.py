"""Built-in tasks: prompts, stop strings and metrics of well-known benchmarks.

Prompts are those of lm-evaluation-harness, so that figures can be compared. Each reads the files
as they are published, from a local path or from the hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardtune.errors import JobError, Problem, did_you_mean
from shardtune.evaluation.answer_metrics import METRICS
from shardtune.evaluation.task import Task, load_tasks, parse_task

RECIPES: Mapping[str, Mapping[str, Any]] = {
    "gsm8k": {
        "path": "openai/gsm8k",
        "subset": "main",
        "prompt": "Question: {{question}}\nAnswer:",
        "answer": "{{answer}}",
        "metric": {"type": "number", "compare": "text"},
        "shots": 5,
        "stop": ("Question:", "</s>", "<|im_end|>"),
    },
    "mmlu": {
        "path": "cais/mmlu",
        "subset": "all",
        "prompt": (
            "{{question.strip()}}\nA. {{choices[0]}}\nB. {{choices[1]}}\nC. {{choices[2]}}\n"
            "D. {{choices[3]}}\nAnswer:"
        ),
        "answer": "{{answer}}",
        "choices": ("A", "B", "C", "D"),
        "description": (
            "The following are multiple choice questions (with answers)"
            "{% if subject is defined %} about {{subject.replace('_', ' ')}}{% endif %}.\n\n"
        ),
        "metric": "choice",
        "shots_split": "dev",
        "shots_by": "subject",
    },
    "humaneval": {
        "path": "openai/openai_humaneval",
        "prompt": "{{prompt}}",
        "answer": "",
        "tests": "{{test}}\n\ncheck({{entry_point}})",
        "metric": {"type": "code", "complete_prompt": True},
        "chat": False,
        "max_new_tokens": 512,
        "stop": ("\nclass", "\ndef", "\n#", "\nif", "\nprint"),
    },
    "mbpp": {
        "path": "google-research-datasets/mbpp",
        "subset": "full",
        "prompt": (
            "You are an expert Python programmer, and here is your task: {{text}} Your code should "
            "pass these tests:\n\n{{test_list[0]}}\n{{test_list[1]}}\n{{test_list[2]}}\n[BEGIN]\n"
        ),
        "answer": "{{code}}\n[DONE]",
        "before_answer": "",
        "tests": "{{test_setup_code}}\n{{test_list | join('\n')}}",
        "metric": "code",
        "chat": False,
        "shots": 3,
        "shots_split": "prompt",
        "max_new_tokens": 512,
        "stop": ("[DONE]",),
    },
    "bfcl": {
        "prompt": "{{question[0][-1].content}}",
        "answer": "",
        "truth": "ground_truth",
        "system": (
            "You are given a question and a set of functions. Answer with the function calls that "
            "achieve the purpose, and nothing else, in the form [name(argument=value, ...), ...]."
            "\n\nFunctions:\n{{function | tojson}}"
        ),
        "metric": {"type": "json", "check": "tool_call"},
    },
}
"""Fields of `Task`; a person's own settings come on top."""


def find_tasks(spec: str, place: str = "--task") -> list[Task]:
    """What `--task` names: a YAML file, a recipe, a recipe with a file (`gsm8k=FILE`), or JSON
    Lines with a metric (`exact=FILE`), whose fields are `prompt` and `answer`. `place` is where a
    person has written it."""
    if spec.endswith((".yaml", ".yml")):
        return load_tasks(Path(spec).expanduser())
    name, _, path = spec.partition("=")
    if name in METRICS and path:
        plain = {"name": Path(path).stem, "path": path, "metric": name}
        extra = {"choices": "choices"} if name == "choice" else {}
        extra |= {"tests": "{{tests}}", "answer": ""} if name == "code" else {}
        return [parse_task(plain | extra, spec)]
    if name not in RECIPES:
        near = did_you_mean(name, RECIPES)
        fact = f"there is no task {name!r}" + (f"; did you mean {near}?" if near else "")
        fix = f"name a YAML file, METRIC=FILE.jsonl, or one of {', '.join(RECIPES)}"
        raise JobError(Problem(place, fact, fix))
    recipe = dict(RECIPES[name]) | {"name": name} | ({"path": path} if path else {})
    if not recipe.get("path"):
        fix = f"write {name}=FILE, as its repository has it"
        raise JobError(Problem(place, f"{name} has no data set on the hub", fix))
    if name == "bfcl":  # its repository has what is right beside the questions, in a folder
        file = Path(recipe["path"])
        recipe["answers_path"] = str(file.parent / "possible_answer" / file.name)
    return [parse_task(recipe, spec)]
