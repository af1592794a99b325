"""`shardtune serve`: runs and models behind OpenAI's HTTP interface, and a page to ask them."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from shardtune.cli.arguments import Commands, add_command, count
from shardtune.cli.web_options import access_rules, add_address, require_packages


def add_parser(commands: Commands) -> None:
    command = add_command(
        commands,
        "serve",
        _serve,
        "serve models over HTTP: OpenAI's API, and a chat page at /",
        """\
  shardtune serve runs/quickstart
  shardtune serve runs/first runs/second --port 8080
  SHARDTUNE_API_KEY=... shardtune serve tuned=runs/first --host 0.0.0.0""",
    )
    command.usage = "%(prog)s [options] RUN|MODEL [RUN|MODEL ...]"
    command.add_argument(
        "sources", nargs="+", metavar="RUN|MODEL",
        help="directory of a run, a model's folder or hub id; NAME=RUN gives it a name",
    )  # fmt: skip
    command.add_argument(
        "--engine", choices=("auto", "vllm", "transformers"), default="auto",
        help="our own (auto, transformers), or vLLM's server",
    )  # fmt: skip
    command.add_argument(
        "--generation-config", choices=("auto", "none"), default="auto",
        help="sample as the model's generation_config.json says where a request doesn't (auto)",
    )  # fmt: skip
    add_address(command, 8000)
    add_loading(command)
    limits = command.add_argument_group("limits")
    for name, metavar, default, told in (
        ("--max-batch", "N", 16, "concurrent requests"),
        ("--cache-tokens", "N", 65_536, "tokens in the KV cache"),
        ("--max-tokens", "N", 4096, "longest answer, in tokens"),
        ("--queue", "N", 256, "queued requests"),
        ("--timeout", "S", 600, "seconds per request"),
        ("--drain", "S", 30, "seconds to finish answers after Ctrl-C"),
        ("--start-timeout", "S", 1800, "seconds until vLLM must answer"),
    ):
        limits.add_argument(
            name, type=count, default=default, metavar=metavar, help=f"{told} ({default})"
        )
    limits.add_argument(
        "--max-body", type=count, default=2048, metavar="KIB", help="largest request (2048)"
    )
    command.add_argument(
        "--votes", type=Path, default=Path("votes.jsonl"), metavar="FILE",
        help="where the page's votes are written (votes.jsonl)",
    )  # fmt: skip


def add_loading(command: argparse.ArgumentParser) -> None:
    """How the weights are held."""
    command.add_argument(
        "--load", choices=("auto", "4bit", "8bit"), default="auto",
        help="quantize the linear layers (as trained)",
    )  # fmt: skip
    command.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32"), help="compute dtype (as trained, if fast here)"
    )


def _serve(arguments: argparse.Namespace) -> int:
    from shardtune.cli.serve_with_vllm import vllm_words

    require_packages("serve")
    access = access_rules(arguments.host)
    if (words := vllm_words(arguments)) is not None:
        return _serve_by_vllm(words, arguments, access.key)
    from shardtune.cli.load_served import ServingMemory, load_served
    from shardtune.serve.http_app import OpenAIServer, ServerLimits
    from shardtune.serve.sampling_defaults import SamplingDefaults
    from shardtune.web.run_server import run_server

    models = load_served(
        arguments.sources,
        ServingMemory(arguments.load, arguments.dtype, arguments.max_batch, arguments.cache_tokens),
    )
    if arguments.generation_config == "none":
        models = [replace(each, defaults=SamplingDefaults()) for each in models]
    limits = ServerLimits(
        body_bytes=arguments.max_body * 1024,
        answer_tokens=arguments.max_tokens,
        waiting=arguments.queue,
        seconds=arguments.timeout,
    )
    server = OpenAIServer(models, limits=limits, access=access, votes=arguments.votes)

    def ready(address: str) -> None:
        for model in models:
            print(f"{model.name:20} {model.source}")
            if told := model.defaults.told:
                print(f"{'':20} sampled {told}")
        print(f"page         {address}/\nOpenAI API   {address}/v1\nCtrl-C ends it", flush=True)

    run_server(
        server.app,
        arguments.host,
        arguments.port,
        drain_seconds=arguments.drain,
        ready=ready,
        draining=server.drain,
    )
    print("stopped; no answer was cut off" if not server.engine.running else "stopped")
    return 0


def _serve_by_vllm(words: list[str], arguments: argparse.Namespace, key: str | None) -> int:
    import shlex

    from shardtune.serve.vllm_process import Patience, run_vllm

    print(f"starting {shlex.join(words)}", flush=True)
    run_vllm(
        words,
        arguments.host,
        arguments.port,
        environment={"VLLM_API_KEY": key} if key else {},  # not where `ps` shows it
        patience=Patience(arguments.start_timeout, drain_seconds=arguments.drain),
        ready=lambda address: print(f"OpenAI API   {address}/v1\nCtrl-C ends it", flush=True),
        starting=lambda seconds: print(f"vLLM starts, {seconds:.0f} s so far", flush=True),
    )
    print("stopped")
    return 0
