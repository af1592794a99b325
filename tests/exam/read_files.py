"""Cases about what a run reads: models that aren't whole, data and results that were changed."""

from __future__ import annotations

import json
import os
import shutil

from safetensors.torch import load_file, save_file

from tests.exam.case import Findings
from tests.exam.harness import Lab

ONE = ("launch.processes=1", "train.steps=2")


def incomplete_model(lab: Lab, found: Findings) -> None:
    """61, 62: a layer that the file lacks, then NaN in a weight, under two strategies."""
    found.expect("the model of other runs is whole", lab.short.code == 0)
    model = lab.path / "incomplete"
    (tiny,) = (lab.path / "cache" / "shardtune").rglob("tiny*/config.json")
    shutil.copytree(tiny.parent, model, dirs_exist_ok=True)
    config = json.loads((model / "config.json").read_text("utf-8"))
    more = config | {"num_hidden_layers": config["num_hidden_layers"] + 1}
    (model / "config.json").write_text(json.dumps(more), "utf-8")
    said = set()
    for strategy in ("ddp", "fsdp"):
        done = lab.run(f"lacks-{strategy}", *ONE, "model.name=./incomplete", _strategy(strategy))
        found.expect(f"a missing layer is refused under {strategy}", done.code == 2)
        said.add(done.error)
    named = f"model.layers.{config['num_hidden_layers']}."
    found.expect("with the names, and the same words", len(said) == 1 and named in said.pop())
    (model / "config.json").write_text(json.dumps(config), "utf-8")
    weights = {name: each.clone() for name, each in load_file(model / "model.safetensors").items()}
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    for strategy in ("ddp", "fsdp"):
        done = lab.run(f"nan-{strategy}", *ONE, "model.name=./incomplete", _strategy(strategy))
        named = "hold NaN or infinity: model.norm.weight"
        found.expect(f"NaN is named under {strategy}", done.code == 2 and named in done.error)
    found.show("2 strategies, the same error")


def _strategy(kind: str) -> str:
    return f"strategy={{type: {kind}}}"


def changed_cache(lab: Lab, found: Findings) -> None:
    """64: a flipped bit in prepared data; it is made anew, and the run is the same."""
    first = lab.short
    cache = lab.path / "changed-cache"
    shutil.copytree(lab.path / "cache", cache)  # other runs read that one now
    files = sorted((cache / "shardtune" / "data").rglob("documents-*.arrow"))
    for file in files:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    again = lab.run("from-changed-data", *ONE, env={"XDG_CACHE_HOME": str(cache)})
    found.expect("both end well", first.code == again.code == 0)
    found.expect("a line says so", "is damaged" in again.error and "made anew" in again.error)
    trace = again.trace.splitlines()
    found.expect("the trace is the same", len(trace) == 2 and trace == first.trace.splitlines()[:2])
    found.show(f"{len(files)} files changed, prepared again")


def changed_result(lab: Lab, found: Findings) -> None:
    """63, 65: a flipped bit in the result, then a pipe in the place of a checkpoint's shard."""
    folder = lab.path / "to-be-changed"
    shutil.copytree(lab.short.folder, folder)
    weights = next((folder / "result").glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    for words in (["generate", "to-be-changed", "--prompt", "x"], ["merge", "to-be-changed", "m"]):
        code, said = lab.command(*words)
        found.expect(f"{words[0]} refuses it", code == 2 and "other content" in said)
    shard = next((folder / "checkpoints" / "step-000006").glob("*.safetensors"))
    shard.unlink()
    os.mkfifo(shard)
    code, said = lab.command("verify", "to-be-changed", "--json")
    found.expect("verify names the pipe and ends", code == 1 and "named pipe" in said)
    found.show("refused with the file's name")
