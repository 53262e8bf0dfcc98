"""The fixtures themselves: three event loops, models that transformers reads, and a leak check that can fail."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import sniffio

from tests.support import leaks


@pytest.mark.anyio
async def test_each_async_test_runs_on_the_loop_it_names(anyio_backend: tuple[str, dict[str, bool]]) -> None:
    name, options = anyio_backend
    assert sniffio.current_async_library() == name
    if name == "asyncio":
        module = type(asyncio.get_running_loop()).__module__
        assert module.startswith("uvloop") == options["use_uvloop"]


@pytest.mark.parametrize("fixture", ["tiny_llama", "tiny_opt"])
def test_transformers_reads_the_tiny_models(fixture: str, request: pytest.FixtureRequest) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = request.getfixturevalue(fixture)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("Grüße 🙂")["input_ids"]
    assert tokenizer.decode(ids) == "Grüße 🙂"
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([ids])).logits
    assert logits.shape == (1, len(ids), 260)
    assert logits.isfinite().all()


@pytest.mark.model
@pytest.mark.slow
def test_the_converted_smollm2_answers(smollm2_folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, ids.shape[1] :])


def test_the_leak_check_sees_a_process(tmp_path: Path) -> None:
    child = None
    with pytest.raises(AssertionError, match="process"), leaks.no_leaks(tmp_path, timeout_s=0.1):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child is not None
    child.communicate(b"\n")
    assert not leaks.process_lives(child.pid)


def test_the_leak_check_sees_a_thread_a_descriptor_and_a_file(tmp_path: Path) -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="left-over")
    handle = None
    with pytest.raises(AssertionError, match=r"thread left-over.*1 file descriptors.*file .*socket"):  # noqa: SIM117
        with leaks.no_leaks(tmp_path, timeout_s=0.1):
            thread.start()
            handle = (tmp_path / "socket").open("w")
    release.set()
    thread.join()
    assert handle is not None
    handle.close()
