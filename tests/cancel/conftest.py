from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from asyncllm import AsyncLLM
from tests.support.scripted import letters_llm


@pytest.fixture(scope="module")
async def llm(anyio_backend: Any) -> AsyncIterator[AsyncLLM]:
    """One engine per module and event loop, that each test leaves empty; its steps are long enough to wait for."""
    async with letters_llm({"step_ms": 2}) as llm:
        yield llm
