"""A model on this rank, or on several, as benchmarks ask it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from shardtune.core.host.render_limit import render_limit
from shardtune.data.formats import plain_dialogue
from shardtune.evaluation.respondent import (
    AnswerLimits,
    Found,
    Item,
    OptionScore,
    TaskQuestion,
    TextLoss,
)
from shardtune.launch.process_group import JoinedWorld
from shardtune.models.batched_generation import Sampling, Stopping, complete
from shardtune.models.context_window import context_length
from shardtune.models.generate import prompt_ids
from shardtune.models.lockstep import in_lockstep
from shardtune.models.log_likelihood import score_continuations, split_pair

WorkDone = Callable[[int, int, float], None]
"""Told how many pieces of work are done, of how many, and how many seconds the rest will take."""
_LONGEST_PIECE = 1024  # tokens of a text that are scored at once


@dataclass(frozen=True)
class ModelRespondent:
    """Answers in batches. With a `world`, its ranks share the questions, and all must ask the same.
    Without one, this rank answers all of them."""

    model: Any
    tokenizer: Any
    stop_ids: frozenset[int]
    device: str = "cpu"
    batch_size: int = 16
    progress: WorkDone | None = None
    world: JoinedWorld | None = None
    plain: bool = False
    """Asked under the plain headings that a run learnt its instructions with."""
    data_ranks: Sequence[int] = ()
    """Which share of the questions each rank of the world answers: ranks with parts of one model
    (tensor or pipeline parallel) answer the same. Empty: each has a share of its own."""
    sharded: bool = False
    """Whether weights are divided among ranks that have different shares (FSDP, ZeRO-3): these call
    the model in lockstep."""

    @property
    def has_template(self) -> bool:
        return self.plain or self.tokenizer.chat_template is not None

    @property
    def calls_together(self) -> bool:
        """Whether a forward pass has collectives, because ranks hold parts of one model."""
        if self.world is None or self.world.size == 1:
            return False
        return self.sharded or len(set(self._owners)) < self.world.size

    @property
    def _owners(self) -> list[int]:
        """The share of each rank."""
        return list(self.data_ranks) or list(range(self.world.size if self.world else 1))

    def answer(self, questions: Sequence[TaskQuestion], limits: AnswerLimits) -> list[str]:
        stopping = Stopping(limits.max_new_tokens, self.stop_ids, limits.stop_strings)
        sampling = Sampling(limits.temperature, limits.top_p, seed=limits.seed)
        told = self._clocked()

        def answered(mine: Sequence[TaskQuestion]) -> list[str]:
            found = complete(
                self.model,
                self.tokenizer,
                [self.encode(question) for question in mine],
                stopping=stopping,
                sampling=sampling,
                batch_size=self.batch_size,
                device=self.device,
                progress=lambda done, total, _: told(done, total),
                retries=not self.calls_together,
            )
            return [each.text for each in found]

        return list(map(str, self.share(questions, answered)))

    def encode(self, question: TaskQuestion) -> list[int]:
        """As token ids; a conversation is framed as it was in training."""
        if not question.messages:
            return prompt_ids(self.tokenizer, question.text, chat=False)
        if self.plain:
            return prompt_ids(self.tokenizer, plain_dialogue(question.messages), chat=False)
        with render_limit():
            text = self.tokenizer.apply_chat_template(
                list(question.messages),
                tools=list(question.tools) or None,
                tokenize=False,
                add_generation_prompt=True,
            )
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def score_options(self, pairs: Sequence[tuple[str, str]]) -> list[OptionScore]:
        encoded = [split_pair(self.tokenizer, *pair) for pair in pairs]
        found = self.share(encoded, self._log_likelihoods)
        return [
            OptionScore(value, len(pair[1])) for value, pair in zip(found, encoded, strict=True)
        ]

    def score_texts(self, texts: Sequence[str]) -> list[TextLoss]:
        pieces: list[tuple[list[int], list[int]]] = []
        owner: list[int] = []
        longest = min(_LONGEST_PIECE, context_length(self.model) or _LONGEST_PIECE)
        for index, text in enumerate(texts):
            ids = list(self.tokenizer(text)["input_ids"])
            for begin in range(0, len(ids) - 1, longest):
                piece = ids[begin : begin + longest + 1]
                pieces.append((piece[:1], piece[1:]))
                owner.append(index)
        found = self.share(pieces, self._log_likelihoods)
        losses = [TextLoss(0.0, 0)] * len(texts)
        for index, value, (_, predicted) in zip(owner, found, pieces, strict=True):
            before = losses[index]
            losses[index] = TextLoss(before.loss - value, before.tokens + len(predicted))
        return losses

    def _log_likelihoods(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[float]:
        told = self._clocked()
        found = score_continuations(
            self.model, pairs, batch_size=self.batch_size, device=self.device, progress=told
        )
        return [score.log_likelihood for score in found]

    def share(
        self, items: Sequence[Item], work: Callable[[Sequence[Item]], Sequence[Found]]
    ) -> list[Found]:
        """What `work` makes of the items, each rank of its share, put together on all."""
        if self.world is None or self.world.size == 1:
            return list(work(items))
        owners = self._owners
        size = max(owners) + 1
        lockstep = (
            in_lockstep(self.model, self.world.any, self.device) if self.sharded else nullcontext()
        )
        with lockstep:
            own = list(work(items[owners[self.world.rank] :: size]))
        said = [json.loads(each) for each in self.world.all_gather(json.dumps(own))]
        shares = [said[owners.index(share)] for share in range(size)]
        return [shares[index % size][index // size] for index in range(len(items))]

    def _clocked(self) -> Callable[[int, int], None]:
        """Tells the progress, with the time that is left at the speed so far."""
        begun = time.monotonic()

        def told(done: int, total: int) -> None:
            if self.progress is not None:
                self.progress(done, total, (time.monotonic() - begun) / done * (total - done))

        return told
