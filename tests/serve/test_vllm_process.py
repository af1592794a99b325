"""vLLM's server: the command line that it gets, and a child process that is watched.

vLLM itself isn't run here. What is watched is a real process that speaks /health as it does.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import stat
import sys
import threading
import time
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

import pytest

from shardtune.cli.main import main
from shardtune.cli.serve_with_vllm import vllm_words
from shardtune.config.job import IA3, LoRA, ModelSection
from shardtune.config.job_file import load_job
from shardtune.core.files.yaml_document import dump_document
from shardtune.core.model.chat_templates import read_chat_template
from shardtune.errors import LaunchError, RunError
from shardtune.models import tiny
from shardtune.serve.vllm_process import Patience, run_vllm
from tests.checkpoint.test_merge import STOPS, finished_run
from tests.export.tuned import finished

pytestmark = pytest.mark.process

STAND_IN = """\
#!{python}
import http.server, os, sys, threading, time
named = dict(zip(sys.argv[1:], sys.argv[2:]))
mode = os.environ.get("STAND_IN", "")
if mode == "fails":
    sys.exit(7)
if mode == "sleeps":
    time.sleep(60)
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        hung = mode == "hangs" and Handler.asked > 2
        self.send_response(503 if hung else 200)
        self.end_headers()
        self.wfile.write(os.environ.get("VLLM_API_KEY", "").encode())
    def log_message(self, *_):
        pass
http.server.HTTPServer((named["--host"], int(named["--port"])), Handler).serve_forever()
"""
TINY = ModelSection(
    name="tiny", stop_tokens=tuple(tiny.tokens().convert_ids_to_tokens(sorted(STOPS)))
)


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A `vllm` on the PATH."""
    path = tmp_path / "bin/vllm"
    path.parent.mkdir()
    path.write_text(STAND_IN.format(python=sys.executable), encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
    return str(path)


def served(vllm: str, *, start_seconds: float = 60.0, **environment: str) -> list[str]:
    """Starts the stand-in, asks it once, and stops it by a signal; what it answered."""
    heard: list[str] = []

    def ready(address: str) -> None:
        with build_opener(ProxyHandler({})).open(f"{address}/health", timeout=10) as answer:
            heard.append(answer.read().decode())
        if not environment.get("STAND_IN"):
            os.kill(os.getpid(), signal.SIGINT)

    run_vllm(
        [vllm, "serve", "model"],
        "127.0.0.1",
        0,
        environment=environment,
        patience=Patience(
            start_seconds=start_seconds,
            told_seconds=0.1,
            starting_look=0.05,
            serving_look=0.05,
            drain_seconds=5,
        ),
        ready=ready,
        starting=lambda seconds: print(f"starts for {seconds:.1f} s"),
    )
    return heard


def test_it_is_ready_when_it_is_healthy_and_ends_with_a_signal(
    vllm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody there: it must not be asked
    before = signal.getsignal(signal.SIGINT)
    assert served(vllm, VLLM_API_KEY="secret") == ["secret"]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("fails", "ended with code 7 before it answered"),
        ("hangs", "has not answered 3 times in a row"),
    ],
)
def test_one_that_ends_or_hangs_is_an_error(mode: str, told: str, vllm: str) -> None:
    with pytest.raises(LaunchError, match=told):
        served(vllm, STAND_IN=mode)


def test_a_start_is_told_of_and_has_a_limit(vllm: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError, match=r"(?s)has not answered in \d+ s.*--start-timeout"):
        served(vllm, start_seconds=0.3, STAND_IN="sleeps")
    assert "starts for 0." in capsys.readouterr().out


def test_the_command_prints_what_it_starts_and_ends_well(
    vllm: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    finished_run(tmp_path / "one", LoRA(rank=4), TINY)
    stopping = threading.Thread(target=_interrupt_when, args=(capfd,), daemon=True)
    stopping.start()
    assert main(["serve", str(tmp_path / "one"), "--engine", "vllm", "--port", "0"]) == 0
    stopping.join(20)
    assert "stopped" in capfd.readouterr().out


def _interrupt_when(capfd: pytest.CaptureFixture[str]) -> None:
    """Once the address is printed."""
    heard = ""
    for _ in range(200):
        heard += capfd.readouterr().out
        if "OpenAI API" in heard:
            assert "--lora-modules one=" in heard
            os.kill(os.getpid(), signal.SIGINT)
            return
        time.sleep(0.1)


def words(*sources: str, **options: str | None) -> list[str]:
    given = {"engine": "vllm", "load": "auto", "dtype": None, "max_batch": 16}
    given |= {"generation_config": "auto"} | options
    found = vllm_words(argparse.Namespace(sources=sources, **given))
    assert found is not None
    return found


def test_adapters_of_one_base_with_their_template_and_stop_tokens(
    vllm: str, tmp_path: Path
) -> None:
    finished_run(tmp_path / "one", LoRA(rank=4), TINY)
    finished_run(tmp_path / "two", LoRA(rank=12, targets=("q_proj",)), TINY)
    found = words(str(tmp_path / "one"), f"second={tmp_path / 'two'}", dtype="bf16")
    assert found[:2] == [vllm, "serve"]
    text = " ".join(found[3:])
    one, two = tmp_path / "one/result", tmp_path / "two/result"
    assert "--served-model-name tiny" in text
    assert "--dtype bfloat16 --max-num-seqs 16 --allowed-origins []" in text
    assert "--enable-lora --max-lora-rank 16 --max-loras 2" in text
    assert f"--lora-modules one={one} second={two}" in text
    assert text.endswith(f"--generation-config {one}")
    template = f"--chat-template {one / 'chat_template.jinja'}"
    assert (template in text) == (one / "chat_template.jinja").is_file()


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(("template", "parser"), [("chatml", "hermes"), ("llama3", "llama3_json")])
def test_calls_are_read_in_the_template_s_spelling(
    template: str, parser: str, tmp_path: Path
) -> None:
    told = f"--enable-auto-tool-choice --tool-call-parser {parser}"
    shutil.copytree(tiny.make(), tmp_path / "model")
    written = read_chat_template(template)
    (tmp_path / "model/chat_template.jinja").write_text(written, encoding="utf-8")
    assert told in " ".join(words(str(tmp_path / "model")))


@pytest.mark.usefixtures("vllm")
def test_calls_are_read_in_the_spelling_of_a_run_s_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished_run(tmp_path / "plain", LoRA(rank=4), TINY)
    assert "tool" not in " ".join(words(str(tmp_path / "plain"))[3:])  # its template knows none
    monkeypatch.setattr(tiny, "CHAT_TEMPLATE", read_chat_template("chatml"))
    run = finished_run(tmp_path / "chatml", LoRA(rank=4), TINY)
    trained = load_job(run.job, ["data.chat_template=chatml"]).job
    run.job.write_text(dump_document(trained.model_dump(mode="json")), encoding="utf-8")
    told = "--enable-auto-tool-choice --tool-call-parser hermes"
    assert told in " ".join(words(str(run.path)))


@pytest.mark.usefixtures("vllm")
def test_what_vllm_can_not_serve_is_refused(tmp_path: Path) -> None:
    finished_run(tmp_path / "ia3", IA3(), TINY)
    with pytest.raises(RunError, match="vLLM serves LoRA, not ia3"):
        words(str(tmp_path / "ia3"))
    finished_run(tmp_path / "one", LoRA(rank=4), TINY)
    with pytest.raises(RunError, match="no 8-bit weights"):
        words(str(tmp_path / "one"), load="8bit")


@pytest.mark.usefixtures("vllm")
def test_experts_have_to_be_exported_first(tmp_path: Path) -> None:
    run = finished(tmp_path, "qwen3_moe", LoRA(rank=4)).run.path
    with pytest.raises(RunError, match="in peft's layout") as caught:
        words(str(run))
    assert "--to vllm" in caught.value.problems[0].fix


@pytest.mark.usefixtures("vllm")
def test_nobody_gets_vllm_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    """Its server lacks our checks of who asks."""
    assert vllm_words(argparse.Namespace(engine="auto", sources=["tiny"])) is None
    assert "--engine vllm serves with it" in capsys.readouterr().out


def test_without_vllm_our_own_engine_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert vllm_words(argparse.Namespace(engine="auto", sources=["tiny"])) is None
    with pytest.raises(LaunchError, match="no vllm on the PATH"):
        vllm_words(argparse.Namespace(engine="vllm", sources=["tiny"]))
