"""A tool loop with the real `openai` client, and a model that has learnt to call."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

openai = pytest.importorskip("openai", reason="the client comes with the extra dev")
pytest.importorskip("starlette", reason="the server comes with the extra serve")

import httpx2 as httpx  # noqa: E402  what the client itself brings

from shardtune.config.job import ModelSection  # noqa: E402
from shardtune.core.model.chat_templates import read_chat_template  # noqa: E402
from shardtune.models.load import load_base  # noqa: E402
from shardtune.models.model_files import ModelFiles  # noqa: E402
from shardtune.serve.continuous_batching import ContinuousBatch  # noqa: E402
from shardtune.serve.http_app import OpenAIServer, ServerLimits  # noqa: E402
from shardtune.serve.openai_requests import ChatBody  # noqa: E402
from shardtune.serve.served_model import ChatPrompt, ServedModel, template_renderer  # noqa: E402
from shardtune.web.http_guard import AccessRules  # noqa: E402
from tests.serve.served import Running  # noqa: E402
from tests.web_server import behind_socket  # noqa: E402

pytestmark = pytest.mark.slow

TOOLS = [{"type": "function", "function": {"name": "sky", "parameters": {}}}]
ASKED = [{"role": "user", "content": "Sky?"}]
CALLS = "\n".join(
    f'<tool_call>\n{{"name": "sky", "arguments": {arguments}}}\n</tool_call>'
    for arguments in ('{"city": "Köln"}', "{}")
)
SAID, RESULT = "I look.", "Sun."


def loop(calls: Any) -> list[Any]:
    """The second request, with the calls of the first one's answer and their results."""
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "sun"} for call in calls]
    return [*ASKED, {"role": "assistant", "content": SAID, "tool_calls": calls}, *results]


def call(arguments: Any) -> dict[str, Any]:
    return {
        "id": "a",
        "type": "function",
        "function": {"name": "sky", "arguments": arguments},
    }


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """`tiny`, which has learnt two answers by heart."""
    files = ModelFiles(ModelSection(name="tiny"))
    tokenizer = files.tokenizer
    tokenizer.chat_template = read_chat_template("chatml")
    model = load_base(files, "fp32")
    batch = ContinuousBatch(model)
    render = template_renderer(tokenizer)
    assert render is not None
    served = ServedModel(
        "tiny", batch, None, tokenizer, files.stop_ids, 1024, render, "tiny", "tiny"
    )
    known = [{**each, "function": {"name": "sky", "arguments": arguments}}
             for each, arguments in ((call(""), {"city": "Köln"}), (call(""), {}))]  # fmt: skip
    learn(model, [
        (render(ChatPrompt(ASKED, TOOLS)), tokenizer(f"{SAID}\n{CALLS}<|im_end|>")["input_ids"]),
        (render(ChatPrompt(loop(known), TOOLS)), tokenizer(f"{RESULT}<|im_end|>")["input_ids"]),
    ])  # fmt: skip
    votes = tmp_path_factory.mktemp("serve") / "votes.jsonl"
    server = OpenAIServer([served], limits=ServerLimits(), access=AccessRules(), votes=votes)
    with behind_socket(server.app) as url:
        yield Running(server, url, {"tiny": served}, model)


def learn(model: Any, pairs: list[tuple[list[int], list[int]]]) -> None:
    """Until every token of the answers is the likeliest one."""
    steps = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(400):
        right = True
        for prompt, answer in pairs:
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            loss = torch.nn.functional.cross_entropy(logits, torch.tensor(answer))
            loss.backward()
            right &= logits.softmax(-1).gather(1, torch.tensor([answer]).T).min().item() > 0.9
        if right:
            model.eval()
            return
        steps.step()
        steps.zero_grad()
    raise AssertionError(f"not learnt: {loss}")


def ask(here: Running, messages: Any = ASKED, **settings: Any) -> Any:
    settings = {"tools": TOOLS, "max_tokens": 300, "temperature": 0} | settings
    return here.client().chat.completions.create(model="tiny", messages=messages, **settings)


def test_a_loop_of_calls_and_results(here: Running) -> None:
    choice = ask(here).choices[0]
    assert (choice.message.content, choice.finish_reason) == (SAID, "tool_calls")
    made = choice.message.tool_calls
    assert [(each.type, each.function.name) for each in made] == [("function", "sky")] * 2
    assert [json.loads(each.function.arguments) for each in made] == [{"city": "Köln"}, {}]
    assert len({each.id for each in made}) == 2
    back = [choice.message.model_dump(exclude_none=True)]
    back += [{"role": "tool", "tool_call_id": each.id, "content": "sun"} for each in made]
    final = ask(here, [*ASKED, *back]).choices[0]
    assert (final.message.content, final.finish_reason) == (RESULT, "stop")
    assert final.message.tool_calls is None


def test_a_stream_has_each_call_whole(here: Running) -> None:
    chunks = [each.choices[0] for each in ask(here, stream=True, logprobs=True)]
    assert "".join(each.delta.content or "" for each in chunks) == SAID
    calls = [call for each in chunks for call in each.delta.tool_calls or ()]
    assert [(each.index, each.function.arguments) for each in calls] == [
        (0, '{"city": "Köln"}'), (1, "{}"),
    ]  # fmt: skip
    assert chunks[-1].finish_reason == "tool_calls"
    told = [each.token for chunk in chunks if chunk.logprobs for each in chunk.logprobs.content]
    whole = ask(here, logprobs=True).choices[0].logprobs.content
    assert told == [each.token for each in whole]
    with here.client().chat.completions.stream(
        model="tiny", messages=ASKED, tools=TOOLS, max_tokens=300, temperature=0
    ) as stream:  # the client's own collector
        made = stream.get_final_completion().choices[0].message.tool_calls
    assert [each.function.arguments for each in made] == ['{"city": "Köln"}', "{}"]


def test_several_answers_have_calls_of_their_own(here: Running) -> None:
    made = [each.message.tool_calls for each in ask(here, n=2).choices]
    assert [len(each) for each in made] == [2, 2]
    assert len({call.id for each in made for call in each}) == 4


def test_who_wants_no_calls_gets_the_text(here: Running) -> None:
    plain = ask(here, tool_choice="none").choices[0]
    assert plain.message.tool_calls is None
    assert (plain.message.content, plain.finish_reason) == (f"{SAID}\n{CALLS}", "stop")
    cut = ask(here, max_tokens=40).choices[0]
    assert cut.message.content == f"{SAID}\n{CALLS}"[:40]
    assert cut.finish_reason == "length"
    stopped = ask(here, stop="</tool_call>").choices[0]
    assert (len(stopped.message.tool_calls), stopped.finish_reason) == (1, "tool_calls")


@pytest.mark.parametrize(
    "settings", [{"tool_choice": "required"}, {"parallel_tool_calls": False},
                 {"tool_choice": {"type": "function", "function": {"name": "sky"}}}],
)  # fmt: skip
def test_what_can_not_be_kept_is_refused(here: Running, settings: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="isn't served"):
        ask(here, **settings)


@pytest.mark.parametrize(
    ("sent", "seen"), [('{"city": "Köln"}', {"city": "Köln"}), ("", {}), ({"city": 1}, {"city": 1})]
)
def test_the_template_gets_arguments_as_an_object(here: Running, sent: Any, seen: Any) -> None:
    served = here.models["tiny"]
    asked = {"model": "tiny", "messages": loop([call(sent)]), "tools": TOOLS}
    read = ChatBody.model_validate(asked).messages[1]["tool_calls"]
    assert read == [call(seen)]  # most templates write them by `tojson`
    told = httpx.post(f"{here.url}/tokenize", json=asked).json()["tokens"]
    text = served.tokenizer.apply_chat_template(
        loop([call(seen)]), tools=TOOLS, add_generation_prompt=True, tokenize=False
    )
    assert served.tokenizer.decode(told) == text
    assert json.dumps(seen, ensure_ascii=False) in text


def test_the_example_of_the_page_runs(here: Running) -> None:
    page = (Path(__file__).parents[2] / "docs/serve.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page.partition("## Calls of functions")[2], re.S)
    learnt = {
        "How is the sky over Rome?": ASKED[0]["content"],
        re.search("^sky = .*", block, re.M)[0]: f"sky = {TOOLS[0]['function']}",  # type: ignore[index]
        '"model": "quickstart"': '"model": "tiny", "temperature": 0, "max_tokens": 300',
    }
    for written, known in learnt.items():
        assert block.count(written) == 1
        block = block.replace(written, known)
    names: dict[str, Any] = {"client": here.client()}
    exec(block, names)
    assert [each["role"] for each in names["dialogue"]] == ["user", "assistant", "tool", "tool"]
    assert names["dialogue"][2]["content"] == "clear over Köln"


def test_a_model_without_a_spelling_says_what_it_says(here: Running) -> None:
    assert here.models["tiny"].spelling is not None
    assert replace(here.models["tiny"], render=None).spelling is None
