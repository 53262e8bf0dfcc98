from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from asyncllm import AsyncLLM
from tests.support.scripted import assert_settled, letters_llm, set_script


@pytest.fixture(scope="module")
async def module_llm(anyio_backend: Any) -> AsyncIterator[AsyncLLM]:
    async with letters_llm() as llm:
        yield llm


@pytest.fixture
async def llm(module_llm: AsyncLLM) -> AsyncIterator[AsyncLLM]:
    """A scripted engine that its test module shares; each test finds it empty, with the alphabet as its script."""
    await set_script(module_llm)
    await module_llm.collective_rpc("clear_history")
    yield module_llm
    await assert_settled(module_llm)
