"""The files of a pretrained model, from a folder or the hub: each is read once, when first asked
for, without running anybody's code."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from shardtune.compat.quiet import quiet_lengths
from shardtune.config.job import Job, ModelSection
from shardtune.core.host.hub_address import hub_is_reachable
from shardtune.core.model.kind import ModelKind, kind_of
from shardtune.core.model.known_models import MODEL_NAME
from shardtune.errors import ModelError, Problem, ShardtuneError
from shardtune.models.added_tokens import Growth, add_tokens
from shardtune.models.catalogue import public_name, resolve
from shardtune.models.set_chat_template import (
    end_of_turn,
    set_chat_template,
    set_template_defaults,
)
from shardtune.models.weight_files import WeightFiles, fetch_file

LOADING_FIX = (
    "name a built-in model (`shardtune models list`), a folder in Hugging Face's format with "
    "safetensors weights, or a hub id that this machine can reach"
)
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_log = logging.getLogger("shardtune")
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")


@dataclass(frozen=True)
class ModelFiles:
    """What the files of `section` say. Pass it on: who makes another reads them again."""

    section: ModelSection
    chat_template: str | None = None
    """The job's own chat template, by name or as a file."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The job's values for variables of the template."""

    @staticmethod
    def of_job(job: Job) -> ModelFiles:
        """With the chat template that the job trains with."""
        return ModelFiles(job.model, job.data.chat_template, job.data.chat_template_kwargs)

    @cached_property
    def path(self) -> str:
        """What transformers loads: a folder, or a hub id."""
        return resolve(self.section.name)

    @property
    def public_name(self) -> str:
        """What others may know the model by."""
        return public_name(self.section.name)

    @property
    def hub_arguments(self) -> dict[str, Any]:
        """Arguments for whatever transformers loads of a hub's model: which version, and only the
        cache where the hub can't be reached."""
        found: dict[str, Any] = {}
        if self.section.revision:
            found["revision"] = self.section.revision
        if not Path(self.path).is_dir() and not hub_is_reachable():
            found["local_files_only"] = True
        return found

    @cached_property
    def _config(self) -> Any:
        from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

        section = self.section
        with explaining(MODEL_NAME, section.name, LOADING_FIX):
            found, _ = PretrainedConfig.get_config_dict(self.path, **self.hub_arguments)
            if not isinstance(found, dict):
                raise TypeError(f"its config.json holds a {type(found).__name__}, not an object")
            # A model that transformers knows itself needs none of the code its repository ships.
            known = found.get("model_type") in CONFIG_MAPPING
            if found.get("auto_map") and not known and not section.trust_remote_code:
                fact = f"{section.name!r} runs Python code of its own: {sorted(found['auto_map'])}"
                fix = "read that code; if you trust it, set model.trust_remote_code: true"
                raise ModelError(Problem(MODEL_NAME, fact, fix))
            trusted = section.trust_remote_code
            return AutoConfig.from_pretrained(
                self.path, trust_remote_code=trusted, **self.hub_arguments
            )

    @property
    def own_config(self) -> Any:
        """The model's configuration as it lies in its files. A copy: transformers changes it."""
        return deepcopy(self._config)

    @property
    def config(self) -> Any:
        """The configuration of the model with its new tokens; a copy as well."""
        config = self.own_config
        if self.section.add_tokens:
            config.get_text_config().vocab_size = self.growth.rows
        return config

    @property
    def kind(self) -> ModelKind:
        """A decoder alone, or an encoder with one."""
        return kind_of(self._config)

    @property
    def loader(self) -> str:
        """The name of the class of transformers that loads it."""
        return str(auto_class(self._config).__name__)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer that the model was trained with, and the job's new tokens and chat template
        in it."""
        from transformers import AutoTokenizer

        name, folder = self.section.name, Path(self.path)
        if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
            fact = f"the folder {name!r} has no tokenizer: no tokenizer.json, nor an older kind"
            fix = (
                "save the tokenizer of the model that it comes from there: "
                "tokenizer.save_pretrained"
            )
            raise ModelError(Problem(MODEL_NAME, fact, fix))
        with explaining(MODEL_NAME, name, LOADING_FIX):
            trusted = self.section.trust_remote_code
            tokenizer = AutoTokenizer.from_pretrained(
                self.path, trust_remote_code=trusted, **self.hub_arguments
            )
        quiet_lengths(tokenizer)
        add_tokens(tokenizer, self.section)
        if self.chat_template is not None:
            set_chat_template(tokenizer, self.chat_template)
        set_template_defaults(tokenizer, self.chat_template_kwargs)
        return tokenizer

    @cached_property
    def processor(self) -> tuple[Path, ...]:
        """Its files on how pictures become inputs. They are asked for when all is trained: where
        there are none, or the hub can't be reached, that is said and no error."""
        try:
            asked = [fetch_file(self.path, self.section, name) for name in PROCESSOR_FILES]
            found, why = tuple(file for file in asked if file is not None), "none were found"
        except Exception as error:  # noqa: BLE001  the hub's are of many kinds
            found, why = (), str(error)
        if not found:
            names = " or ".join(PROCESSOR_FILES)
            _log.warning("to serve pictures, bring %s of %s: %s", names, self.section.name, why)
        return found

    @property
    def growth(self) -> Growth:
        """What the job's new tokens mean for the model."""
        rows = self._config.get_text_config().vocab_size
        return Growth(len(self.section.add_tokens), len(self.tokenizer), rows)

    @cached_property
    def _generation_config(self) -> Any | None:
        from transformers import GenerationConfig

        try:
            return GenerationConfig.from_pretrained(self.path, **self.hub_arguments)
        except OSError:
            return None

    @property
    def generation_config(self) -> Any | None:
        """What the files say about generation; many have nothing to say. A copy, too."""
        return deepcopy(self._generation_config)

    @cached_property
    def weights(self) -> WeightFiles:
        """Where each tensor lies."""
        return WeightFiles.find(self.path, self.section)

    @property
    def dtype(self) -> torch.dtype:
        """What the files are written in; fp32 where they don't say."""
        dtype = self._config.dtype
        return dtype if isinstance(dtype, torch.dtype) else torch.float32

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens at which generation ends: what the job says, or what the files say."""
        if self.section.stop_tokens != "auto":
            return frozenset(_token_id(token, self.tokenizer) for token in self.section.stop_tokens)
        found = {self.tokenizer.eos_token_id}
        generation = self._generation_config
        if generation is not None and generation.eos_token_id is not None:
            ids = generation.eos_token_id
            found.update(ids if isinstance(ids, list) else [ids])
        if self.chat_template is not None:
            found.add(end_of_turn(self.tokenizer))
        return frozenset(found - {None})


def _token_id(token: str, tokenizer: Any) -> int:
    found = tokenizer.convert_tokens_to_ids(token)
    if found is None or found == tokenizer.unk_token_id:
        raise ModelError(
            Problem(
                "model.stop_tokens",
                f"{token!r} is not a single token of this tokenizer",
                f"choose among its special tokens: {', '.join(tokenizer.all_special_tokens)}",
            )
        )
    return int(found)


def auto_class(config: Any) -> Any:
    """The class of transformers that makes the language model which `config` describes. Some that
    also take pictures have none for text alone."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSeq2SeqLM,
    )

    if kind_of(config) == "encoder_decoder":
        return AutoModelForSeq2SeqLM
    text_alone = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not text_alone
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


@contextmanager
def explaining(place: str, name: str, fix: str) -> Iterator[None]:
    """Turns the many ways in which transformers fails to load a thing into one that says what.

    Of files that others wrote anything can be raised: the tokenizers library raises bare
    exceptions, and a number of the wrong type fails wherever it is first used.
    """
    try:
        yield
    except (ShardtuneError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        first, *others = [line.strip() for line in str(error).splitlines() if line.strip()] or [
            repr(error)
        ]
        reason = " ".join([first, *others]) if first.endswith(":") else first  # a list follows
        fact = f"{name!r} can't be loaded: {reason}"
        raise ModelError(Problem(place, fact, fix)) from error
