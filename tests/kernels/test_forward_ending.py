"""Models of code that nobody here has read: logits that may be bent are never taken for plain."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from shardtune.kernels.forward_ending import Operation, operations_behind_head
from shardtune.kernels.linear_cross_entropy import fused_loss

CONFIG = LlamaConfig(
    vocab_size=16,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
)


class Plain(LlamaForCausalLM):
    def forward(self, input_ids: Tensor, labels: Any = None, return_dict: bool = True) -> Any:
        hidden = self.model(input_ids).last_hidden_state
        logits = None
        logits = self.lm_head(hidden[:, -1:]).float()
        loss = None if labels is None else self.loss_function(logits=logits, labels=labels)
        if not return_dict:
            output = (logits, hidden)
            return ((loss,) + output) if loss is not None else output  # noqa: RUF005  as transformers
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class NormedUnderTheSameName(LlamaForCausalLM):
    def forward(self, input_ids: Tensor) -> Any:
        logits = self.model.norm(self.model.embed_tokens(input_ids))
        logits = self.lm_head(logits)
        found = CausalLMOutputWithPast(logits=logits)
        return found  # noqa: RET504  as others write it


class BentInTheKeyword(LlamaForCausalLM):
    def forward(self, input_ids: Tensor) -> Any:
        hidden = self.model(input_ids).last_hidden_state
        logits = self.lm_head(hidden)
        return CausalLMOutputWithPast(logits=2.0 * logits)


class GivenByPosition(LlamaForCausalLM):
    def forward(self, input_ids: Tensor) -> Any:
        hidden = self.model(input_ids).last_hidden_state
        logits = self.lm_head(hidden)
        return CausalLMOutputWithPast(None, 2.0 * logits)


class BentByAMethod(LlamaForCausalLM):
    def forward(self, input_ids: Tensor) -> Any:
        hidden = self.model(input_ids).last_hidden_state
        logits = self.lm_head(hidden)
        return self.ended(logits=logits)

    def ended(self, logits: Tensor) -> Any:
        return CausalLMOutputWithPast(logits=2.0 * logits)


class BentByAModule(LlamaForCausalLM):
    def __init__(self, shape: Any) -> None:
        super().__init__(shape)
        self.scale = nn.Softplus()

    def forward(self, input_ids: Tensor) -> Any:
        hidden = self.model(input_ids).last_hidden_state
        logits = self.lm_head(hidden)
        logits = self.scale(logits)
        return CausalLMOutputWithPast(logits=logits)


class BentBehindABracket(LlamaForCausalLM):
    def forward(self, input_ids: Tensor) -> Any:
        hidden = self.model(input_ids).last_hidden_state
        logits = self.lm_head(hidden) * torch.tensor(2.0)
        return CausalLMOutputWithPast(logits=logits)


class BentInPlace(LlamaForCausalLM):
    def forward(self, input_ids: Tensor) -> Any:
        hidden = self.model(input_ids).last_hidden_state
        logits = self.lm_head(hidden)
        logits.mul_(2.0)
        return CausalLMOutputWithPast(logits=logits)


class BentByWhomeverItIsHandedTo(LlamaForCausalLM):
    def forward(self, input_ids: Tensor) -> Any:
        hidden = self.model(input_ids).last_hidden_state
        logits = self.lm_head(hidden)
        torch.mul(logits, 2.0, out=logits)
        return CausalLMOutputWithPast(logits=logits)


class BentUnderAnotherName(LlamaForCausalLM):
    def forward(self, input_ids: Tensor) -> Any:
        hidden = self.model(input_ids).last_hidden_state
        logits = self.lm_head(hidden)
        rows = logits.flatten(0, 1)
        last = rows[-1:]
        last *= 2.0
        return CausalLMOutputWithPast(logits=logits)


class BentByAFunctionInPlace(LlamaForCausalLM):
    def forward(self, input_ids: Tensor) -> Any:
        hidden = self.model(input_ids).last_hidden_state
        logits = self.lm_head(hidden)
        positive = torch.relu_(logits)
        return CausalLMOutputWithPast(logits=logits, hidden_states=(positive,))


class BentByAnArgument(LlamaForCausalLM):
    def forward(self, input_ids: Tensor) -> Any:
        hidden = self.model(input_ids).last_hidden_state
        logits = self.lm_head(hidden)
        positive = nn.functional.relu(logits, inplace=True)
        return CausalLMOutputWithPast(logits=logits, hidden_states=(positive,))


def doubling(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def doubled(*arguments: Any, **named: Any) -> Any:
        found = forward(*arguments, **named)
        found.logits = 2.0 * found.logits
        return found

    return doubled


class BentByADecorator(Plain):
    forward = doubling(Plain.forward)


class BentByItsCall(Plain):
    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return doubling(super().__call__)(*arguments, **named)


class BentInTheOutput(LlamaForCausalLM):
    def forward(self, input_ids: Tensor) -> Any:
        hidden = self.model(input_ids).last_hidden_state
        logits = self.lm_head(hidden)
        found = CausalLMOutputWithPast(logits=logits)
        found.logits = 2.0 * found.logits
        return found


class BentBehindAnother(LlamaForCausalLM):
    def forward(self, input_ids: Tensor) -> Any:
        found = super().forward(input_ids)
        found.logits = 2.0 * found.logits
        return found


class OnlyATangent(LlamaForCausalLM):
    def forward(self, input_ids: Tensor) -> Any:
        hidden = self.model(input_ids).last_hidden_state
        logits = self.lm_head(hidden)
        logits = torch.tanh(logits)
        return CausalLMOutputWithPast(logits=logits)


class Learned(LlamaForCausalLM):
    def __init__(self, shape: Any) -> None:
        super().__init__(shape)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, input_ids: Tensor) -> Any:
        hidden = self.model(input_ids).last_hidden_state
        logits = self.lm_head(hidden)
        logits = logits * self.logit_scale
        return CausalLMOutputWithPast(logits=logits)


class SometimesScaled(LlamaForCausalLM):
    logit_scale = 2.0

    def forward(self, input_ids: Tensor) -> Any:
        hidden = self.model(input_ids).last_hidden_state
        logits = self.lm_head(hidden)
        if self.training:
            logits = logits * self.logit_scale
        return CausalLMOutputWithPast(logits=logits)


@pytest.mark.parametrize("kind", [LlamaForCausalLM, Plain, NormedUnderTheSameName])
def test_what_ends_with_its_head_is_read_as_such(kind: Any) -> None:
    assert operations_behind_head(kind, frozenset({"lm_head"})) == ()
    assert fused_loss(kind(CONFIG)) is not None


def test_the_head_has_to_be_the_models_own() -> None:
    assert operations_behind_head(LlamaForCausalLM, frozenset({"score"})) is None


def test_operations_are_read_with_their_condition() -> None:
    found = operations_behind_head(SometimesScaled, frozenset({"lm_head"}))
    assert found == (Operation("logits * self.logit_scale", "self.training"),)


@pytest.mark.parametrize(
    "kind",
    [
        BentInTheKeyword,
        GivenByPosition,
        BentByAMethod,
        BentByAModule,
        BentBehindABracket,
        BentInPlace,
        BentByWhomeverItIsHandedTo,
        BentUnderAnotherName,
        BentByAFunctionInPlace,
        BentByAnArgument,
        BentByADecorator,
        BentByItsCall,
        BentInTheOutput,
        BentBehindAnother,
        OnlyATangent,
        Learned,
        SometimesScaled,
    ],
)
def test_what_is_not_plain_is_left_alone(kind: Any) -> None:
    assert fused_loss(kind(CONFIG)) is None
