"""Metrics: how well an answer matches its reference, as a number from 0 to 1."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field

from shardtune.core.job_section import Section
from shardtune.errors import DataError, JobError, Problem
from shardtune.evaluation.pattern_search import Found, search_each
from shardtune.evaluation.tool_calls import matches_truth, parse_calls

NUMBER = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
"""As lm-evaluation-harness finds numbers in answers to GSM8K."""
_DIGITS = re.compile(
    r"(?:(?<!\w)[-\u2212])?\$?\.?[0-9][$0-9.,]*(?:[eE][-+\u2212]?[0-9]{1,3}(?!\w))?"
)
"""A hyphen behind a letter or a digit is no sign; U+2212 is the minus of typesetters."""
_MARK = "#### "  # behind it GSM8K has the number
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Reference:
    """What the data says about one question."""

    answers: tuple[str, ...]
    """Any of them is right."""
    choices: tuple[str, ...] = ()
    prompt: str = ""
    tests: str = ""
    """Code that fails if the answer is wrong."""
    truth: Any = None
    """A JSON schema, or the function calls that are right."""


class Exact(Section):
    """The answer is the reference, but for white space around both."""

    type: Literal["exact"] = "exact"
    ignore_case: bool = False
    ignore_punctuation: bool = False

    def score(self, answer: str, reference: Reference) -> float:
        return float(any(self._plain(answer) == self._plain(each) for each in reference.answers))

    def _plain(self, text: str) -> str:
        text = text.lower() if self.ignore_case else text
        text = text.translate(_PUNCTUATION) if self.ignore_punctuation else text
        return text.strip()


class Number(Section):
    """The last number in the answer is that of the reference (GSM8K's flexible extraction)."""

    type: Literal["number"] = "number"
    compare: Literal["value", "text"] = "value"
    """`value`: 72.00 is 72. `text`: it isn't, as in lm-evaluation-harness."""

    def score(self, answer: str, reference: Reference) -> float:
        return float(any(self._same(answer, each) for each in reference.answers))

    def require(self, reference: Reference, place: str) -> None:
        """Refuses a reference without a number, which no answer has."""
        expected = [last_value(each.rpartition(_MARK)[2]) for each in reference.answers]
        if self.compare == "value" and all(each is None for each in expected):
            fact = f"the answer {_shown(reference)} holds no number"
            raise DataError(Problem(place, fact, "correct the row, or use metric: exact"))

    def _same(self, answer: str, reference: str) -> bool:
        expected = reference.rpartition(_MARK)[2]
        if self.compare == "text":
            return last_number(answer) == plain_number(expected)
        found = last_value(answer)
        return found is not None and found == last_value(expected)


def last_value(text: str) -> Decimal | None:
    """The last number of a text by its value; dots and commas without digits are no number."""
    found = [
        re.sub(r"[$,]", "", each.rstrip(".,$")).replace("\u2212", "-")
        for each in _DIGITS.findall(text)
    ]
    numbers = [each for each in found if each.count(".") < 2]  # a date, 1.2.2024, is none
    return Decimal(numbers[-1]) if numbers else None


def last_number(text: str) -> str | None:
    """The last number of a text, without thousands separators, dollars and a full stop. "..." is
    one, too, as in lm-evaluation-harness."""
    found = NUMBER.findall(text)
    return plain_number(next(filter(None, found[-1]))) if found else None


def plain_number(text: str) -> str:
    return re.sub(r"\.$", "", text.replace(",", "").replace("$", "")).strip()


class ChoiceMetric(Section):
    """The likeliest option is the right one (MMLU's way). Nothing is generated."""

    type: Literal["choice"] = "choice"
    normalize: Literal["none", "characters", "bytes", "tokens"] = "none"
    """What an option's log-likelihood is divided by: `characters` is the harness's `acc_norm`."""


class Contains(Section):
    """The reference stands somewhere in the answer."""

    type: Literal["contains"] = "contains"
    ignore_case: bool = True

    def score(self, answer: str, reference: Reference) -> float:
        answer = answer.lower() if self.ignore_case else answer
        wanted = [each.lower() if self.ignore_case else each for each in reference.answers]
        return float(any(each in answer for each in wanted))

    def require(self, reference: Reference, place: str) -> None:
        """Refuses an empty reference, which every answer holds."""
        if "" in reference.answers:
            fix = "correct the row, or use metric: exact, which wants an empty answer then"
            raise DataError(Problem(place, "the answer is empty, and stands in all texts", fix))


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
    return pattern


class Regex(Section):
    """A pattern is found in the answer; what its first group holds is the reference."""

    type: Literal["regex"] = "regex"
    pattern: Annotated[str, AfterValidator(_compiles)]
    """As Python writes it. Without a group, to be found is enough."""
    take: Literal["first", "last"] = "first"
    ignore_case: bool = False

    seconds: Annotated[float, Field(gt=0, le=600)] = 1.0
    """Processor time for each answer. A pattern like `(a+)+b` may need years for one: such an
    answer scores 0, and is named."""

    def search(self, answers: Sequence[str]) -> list[Found | None]:
        """What is found in each answer; None where that takes too long."""
        flags = re.IGNORECASE if self.ignore_case else 0
        return search_each(self.pattern, flags, answers, seconds=self.seconds)

    def score(self, found: Found | None, reference: Reference) -> float:
        if not found or not found.places or not re.compile(self.pattern).groups:
            return float(bool(found and found.places))
        said = (found.first if self.take == "first" else found.last).strip()
        return Exact(ignore_case=self.ignore_case).score(said, reference)


class JsonMetric(Section):
    """The answer is JSON: valid, equal to the reference, of a schema, or the right call."""

    type: Literal["json"] = "json"
    check: Literal["valid", "equal", "schema", "tool_call"] = "valid"
    """`schema` and `tool_call` need `truth`; `tool_call` compares names and arguments as the
    Berkeley Function-Calling Leaderboard does."""

    def score(self, answer: str, reference: Reference) -> float:
        if self.check == "tool_call":
            return float(matches_truth(parse_calls(answer), reference.truth))
        try:
            found = json.loads(strip_fences(answer))
        except (ValueError, RecursionError):  # a model that repeats "[" nests too deep
            return 0.0
        if self.check == "equal":
            return float(any(_same_json(found, json.loads(each)) for each in reference.answers))
        if self.check == "schema":
            return float(_validator(reference.truth).is_valid(found))
        return 1.0

    def require(self, reference: Reference, place: str) -> None:
        """Refuses a reference that no answer can be compared with."""
        if self.check == "equal":
            try:
                list(map(json.loads, reference.answers))
            except ValueError as error:
                fact = f"the answer {_shown(reference)} is no JSON: {error}"
                fix = "write it as JSON (a text in quotes), or use metric: exact"
                raise DataError(Problem(place, fact, fix)) from error
        if self.check == "schema":
            _require_resolvable(reference.truth, place)
        if self.check == "tool_call" and not isinstance(reference.truth, list):
            fact = "check: tool_call has no list of right calls"
            fix = "name the field of a row that holds them: truth: ground_truth"
            raise DataError(Problem(place, fact, fix))


class Code(Section):
    """The answer is Python code that passes its tests, in a process without network."""

    type: Literal["code"] = "code"
    seconds: Annotated[float, Field(gt=0, le=600)] = 10.0
    """Time, of the clock and of the processor."""
    memory_mib: Annotated[int, Field(ge=64)] = 1024
    complete_prompt: bool = False
    """Whether the code begins with the prompt, as in HumanEval."""

    def program(self, answer: str, reference: Reference) -> str:
        """The code whose tests are run."""
        return reference.prompt + answer if self.complete_prompt else strip_fences(answer)


class Rouge(Section):
    """Overlap of n-grams with the reference, F1 (rouge-score)."""

    type: Literal["rouge"] = "rouge"
    variant: Literal["rouge1", "rouge2", "rougeL", "rougeLsum"] = "rougeL"

    def score(self, answer: str, reference: Reference) -> float:
        with needed("rouge-score"):
            from rouge_score.rouge_scorer import RougeScorer
        scorer = RougeScorer([self.variant], use_stemmer=True)
        found = [scorer.score(each, answer)[self.variant].fmeasure for each in reference.answers]
        return float(max(found))


class ChrF(Section):
    """Overlap of character n-grams with the reference (sacrebleu), mean over sentences."""

    type: Literal["chrf"] = "chrf"

    def score(self, answer: str, reference: Reference) -> float:
        with needed("sacrebleu"):
            from sacrebleu import sentence_chrf
        return float(sentence_chrf(answer, list(reference.answers)).score) / 100


TextMetric: TypeAlias = Exact | Number | Contains | JsonMetric | Rouge | ChrF
Metric: TypeAlias = TextMetric | ChoiceMetric | Regex | Code
METRICS = {
    each.model_fields["type"].default: each
    for each in (Exact, Number, ChoiceMetric, Contains, Regex, JsonMetric, Code, Rouge, ChrF)
}


def require_packages(metric: Metric) -> None:
    """Tries what a metric needs besides shardtune, by a score that nobody wants."""
    if isinstance(metric, (Rouge, ChrF)):
        metric.score("a", Reference(("a",)))
    if isinstance(metric, JsonMetric) and metric.check == "schema":
        _validator({})


def best_option(scores: Sequence[float]) -> int:
    """The first of the highest."""
    return max(range(len(scores)), key=lambda index: scores[index])


def strip_fences(text: str) -> str:
    """What stands in the first block of Markdown, or the whole text."""
    found = re.search(r"```[\w+-]*\n(.*?)(?:```|\Z)", text, re.DOTALL)
    return found[1] if found else text.strip()


@contextmanager
def needed(package: str) -> Iterator[None]:
    """Around the import of a package that only evaluation needs; its absence names the extra."""
    try:
        yield
    except ImportError as error:
        fact, fix = f"{package} is not installed", "pip install 'shardtune[eval]'"
        raise JobError(Problem("evaluate", fact, fix)) from error


def _same_json(found: Any, expected: Any) -> bool:
    """Equal as JSON: 1 is 1.0, but not true, as it is for Python."""
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            _same_json(found[key], expected[key]) for key in found
        )
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(_same_json, found, expected))
    return isinstance(found, bool) == isinstance(expected, bool) and bool(found == expected)


def _shown(reference: Reference) -> str:
    return repr(" | ".join(reference.answers)[:80])


def _validator(schema: Any) -> Any:
    """By the draft that the schema names. It fetches nothing that the schema refers to."""
    with needed("jsonschema"):
        from jsonschema import Draft202012Validator, SchemaError
        from jsonschema.validators import validator_for
        from referencing import Registry
    if not isinstance(schema, Mapping):
        fix = "name the field of a row that holds its schema: truth: schema"
        raise JobError(Problem("evaluate.metric", "check: schema has no schema", fix))
    kind = validator_for(dict(schema), default=Draft202012Validator)
    try:
        kind.check_schema(dict(schema))
    except SchemaError as error:
        fact = f"a row's JSON schema is not valid: {error.message}"
        raise JobError(Problem("evaluate.metric", fact, "correct the schema")) from error
    return kind(dict(schema), registry=Registry())


def _require_resolvable(schema: Any, place: str) -> None:
    """Refuses a schema that refers to what isn't in it: that would show at an answer."""
    validator = _validator(schema)
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import specification_with

    dialect = specification_with(validator.ID_OF(validator.META_SCHEMA))
    root = dialect.create_resource(validator.schema)
    waiting = [(root, Registry().resolver_with_root(root))]
    named = ""
    try:
        while waiting:
            part, resolver = waiting.pop()
            said = part.contents if isinstance(part.contents, Mapping) else {}
            for named in filter(None, map(said.get, ("$ref", "$dynamicRef"))):
                resolver.lookup(named)
            waiting += [(each, resolver.in_subresource(each)) for each in part.subresources()]
    except Unresolvable as error:
        fact = f"the schema refers to {named!r}, which isn't in it"
        fix = "write what it means under $defs; other addresses aren't asked"
        raise DataError(Problem(place, fact, fix)) from error
