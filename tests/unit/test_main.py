"""The command line: answers on stdout, the rest on stderr, Ctrl-C ends an answer first and the program second."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from asyncllm import __main__ as cli
from asyncllm.testing import SCRIPTED_EXECUTOR, write_tiny_checkpoint
from tests.support.frontend import engine_info
from tests.support.gguf_files import llama_tensors, write_gguf
from tests.support.scripted import LETTERS

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def model(tmp_path: Path) -> list[str]:
    """The arguments that name a scripted model, which answers the alphabet for ever."""
    folder = write_tiny_checkpoint(tmp_path)
    script = f'executor_options={{"tokens": {LETTERS}, "step_ms": 2}}'
    return [str(folder), "-o", f"executor={SCRIPTED_EXECUTOR}", "-o", script]


def test_generate_writes_the_text_to_stdout_and_the_speed_to_stderr(
    model: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", *model, "prompt", "--max-tokens", "5", "--temperature", "0", "--seed", "1"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "abcde\n"
    assert "starting: load_model\n" in captured.err
    assert "ready in" in captured.err
    assert "[5 tokens, " in captured.err
    assert "tokens/s" in captured.err
    assert captured.err.endswith("length]\n")


def test_stats_shows_every_token_and_time_on_stderr(model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", *model, "prompt", "--max-tokens", "5", "--stats"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "abcde\n"
    table = dict(line.strip().split("  ", 1) for line in captured.err.partition("usage\n")[2].splitlines())
    assert table.keys() == {"prompt", "generated", "preemptions", "queue", "prefill", "first token", "total"}
    assert table["generated"].strip() == "5 tokens, 0 of them drafted"
    milliseconds = {name: float(value.removesuffix(" ms")) for name, value in table.items() if value.endswith(" ms")}
    assert 0 <= milliseconds["queue"] < milliseconds["first token"] < milliseconds["total"]
    assert 2 <= milliseconds["prefill"] <= milliseconds["first token"]  # a step takes 2 ms


def test_generate_reads_a_prompt_from_stdin(
    model: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("prompt"))
    assert cli.main(["generate", *model, "-", "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out == "abc\n"


def test_chat_answers_each_line_until_the_end_of_input(
    model: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\nagain\n"))
    assert cli.main(["chat", *model, "--system", "Be brief.", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out == "abcd\nabcd\n"


def scripted(folder: Path, replies: dict[str, str], *options: str) -> list[str]:
    script = f"executor_options={json.dumps({'replies': replies})}"
    return [str(write_tiny_checkpoint(folder)), "-o", f"executor={SCRIPTED_EXECUTOR}", "-o", script, *options]


def test_chat_shows_reasoning_apart_and_asks_for_what_calls_return(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = '<think>\nhm\n</think>\n\nOk.\n<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2]}}</tool_call>'
    replies = {"sum?": call, "assistant\n7": "no", "tool\n7": "It is 7."}
    model = scripted(tmp_path / "model", replies, "-o", "tool_parser=hermes", "-o", "reasoning_parser=think")
    (tmp_path / "tools.json").write_text('[{"type": "function", "function": {"name": "add"}}]')
    monkeypatch.setattr(sys, "stdin", io.StringIO("sum?\n7\n"))
    assert cli.main(["chat", *model, "--tools", str(tmp_path / "tools.json")]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Ok.\n→ add(a=1, b=[2])\nIt is 7.\n"
    assert "\nhm" in captured.err
    assert "tool_calls]" in captured.err


def test_chat_shows_a_call_that_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = scripted(tmp_path / "model", {"sum?": "<tool_call>add(1)</tool_call>"}, "-o", "tool_parser=hermes")
    (tmp_path / "tools.json").write_text('[{"name": "add"}]')
    monkeypatch.setattr(sys, "stdin", io.StringIO("sum?\n"))
    assert cli.main(["chat", *model, "--tools", str(tmp_path / "tools.json")]) == 0
    captured = capsys.readouterr()
    assert captured.out == "\n→ add(1)\n"
    assert "a call that cannot be read: the call is not valid JSON" in captured.err


def test_tools_that_are_no_list(model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tools.json").write_text("{}")
    assert cli.main(["chat", *model, "--tools", str(tmp_path / "tools.json")]) == 1
    assert "is no JSON list of tools" in capsys.readouterr().err


def test_a_question_that_is_too_long_is_told_and_the_next_one_answered(
    model: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 9000 + "\nhello\n"))
    assert cli.main(["chat", *model, "--max-tokens", "4"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "abcd\n"
    assert "error: prompt has" in captured.err


def test_info_tells_the_checkpoint_and_what_the_engine_would_use(
    model: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["info", *model, "-o", "max_model_len=100"]) == 0
    out = capsys.readouterr().out
    assert "LlamaForCausalLM" in out
    assert "256, 259" in out
    assert "  context          100\n" in out


def test_info_tells_the_tensor_types_of_a_gguf_by_their_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = llama_tensors(vocab_size=256)
    packed = quantize(tensors["token_embd.weight"], GGMLQuantizationType.Q8_0)
    kinds = {"token_embd.weight": GGMLQuantizationType.Q8_0}
    path = write_gguf(tmp_path / "m.gguf", tensors=tensors | {"token_embd.weight": packed}, raw_types=kinds)
    assert cli.main(["info", str(path)]) == 0
    assert "  weights          F32 81%, Q8_0 19%\n" in capsys.readouterr().out


def test_info_says_what_cannot_be_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))
    assert cli.main(["info", str(folder)]) == 1
    captured = capsys.readouterr()
    assert re.search(r"architecture +MambaForCausalLM\n", captured.out)
    assert "cannot run: " in captured.err
    assert "'MambaForCausalLM', which is not among those that we run: Gemma3ForCausalLM" in captured.err
    (folder / "tokenizer.json").unlink()  # the lesser trouble
    assert cli.main(["generate", str(folder), "prompt"]) == 1
    assert "MambaForCausalLM" in capsys.readouterr().err


def test_info_with_a_started_engine(model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", *model, "--start"]) == 0
    out = capsys.readouterr().out
    assert "4096 of 16 tokens" in out
    assert "  steps overlap    no\n" in out
    assert "start-up, seconds" in out


def test_info_explains_what_a_real_worker_has_chosen(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["-o", "attention_backend=cpu", "-o", "num_threads=1", "-o", "num_blocks=64"]
    assert cli.main(["info", str(tiny_llama), "--start", *options]) == 0
    out = capsys.readouterr().out
    assert re.search(r"device +cpu \(attention_backend is 'cpu'\)\n", out)
    assert re.search(r"not native +the native kernels are not in use\n", out)
    assert re.search(r"not reference +attention_backend='cpu' was asked for\n", out)
    assert re.search(r"CUDA graphs +none\n", out)
    assert re.search(r"memory, MiB\n( +.+ +\d+\n)* +KV blocks +1\n", out)


def test_info_shows_a_gpu_its_graphs_and_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    info = engine_info(
        device="cuda:0",
        device_reason="NVIDIA H200",
        attention_backend="triton",
        other_backends={"flash_attn": "the package flash_attn is not installed"},
        graph_sizes=[1, 2, 4, 8],
        memory_plan={"device": 3 << 20, "weights": 2 << 20},
        phase_to_seconds={"load_model": 1.0},
    )
    cli._show_engine(info)
    out = capsys.readouterr().out
    assert re.search(r"device +cuda:0 \(NVIDIA H200\)\n", out)
    assert re.search(r"not flash_attn +the package flash_attn is not installed\n", out)
    assert re.search(r"CUDA graphs +of 4 sizes, up to 8 rows\n", out)
    assert out.count("MiB\n  device   3\n  weights  2\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["info", "no/such/model"], "no model at 'no/such/model'"),
        (["generate", "no/such/model", "prompt"], "no model at 'no/such/model'"),
        (["info", "x", "-o", "blok_size=3"], "did you mean 'block_size'"),
        (["info", "x", "-o", "block_size=0"], "block_size is 0"),
        (["info", "x", "-o", "num_threads"], "-o num_threads: write NAME=VALUE"),
    ],
)
def test_an_error_is_one_clear_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("asyncllm: error: ")
    assert words in captured.err
    assert captured.err.count("\n") == 1


def test_arguments_that_are_missing_end_with_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 2
    assert "chat | generate | info" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------------- Ctrl-C
@pytest.fixture
def talk(model: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A chat in a process of its own, with its engine ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "asyncllm", "chat", *model],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
        cwd=REPOSITORY,
        start_new_session=True,
    )
    killer = threading.Timer(30, process.kill)
    killer.start()
    assert process.stderr is not None
    read_until(process.stderr, "Ctrl-C stops an answer")
    with process:
        yield process
        process.kill()
    killer.cancel()


def read_until(stream: IO[str], words: str) -> str:
    seen = ""
    while words not in seen:
        letter = stream.read(1)
        assert letter, f"it ended after {seen!r}"
        seen += letter
    return seen


def test_ctrl_c_ends_the_answer_then_at_the_prompt_the_program(talk: subprocess.Popen[str]) -> None:
    assert talk.stdin is not None
    assert talk.stdout is not None
    assert talk.stderr is not None
    talk.stdin.write("hello\n")
    read_until(talk.stdout, "abc")
    os.kill(talk.pid, signal.SIGINT)
    assert "abort]" in read_until(talk.stderr, "]\n")
    talk.stdin.write("again\n")
    read_until(talk.stdout, "\nabc")
    os.kill(talk.pid, signal.SIGINT)
    read_until(talk.stderr, "abort]\n")
    os.kill(talk.pid, signal.SIGINT)
    assert talk.wait(5) == 130
    assert talk.stderr.read() == "\n"


def test_a_reader_that_goes_away_ends_the_program_quietly(model: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "asyncllm", "generate", *model, "prompt"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.wait(20) == 1
        assert "Error" not in process.stderr.read()
