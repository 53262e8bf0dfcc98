"""Three ways to stop early: cancel the task, run out of time, leave the loop. Each frees the request's memory at once.

python examples/cancellation.py MODEL
"""

import asyncio
import contextlib
import sys

import asyncllm

ENDLESS = {"ignore_eos": True}  # to the end of the context


async def main() -> None:
    async with asyncllm.AsyncLLM(sys.argv[1]) as llm:
        # 1. Cancel the task. The abort has left for the engine when cancel() is delivered; nothing has to be awaited.
        task = asyncio.create_task(llm.generate("Once upon a time", **ENDLESS))
        await asyncio.sleep(0.05)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        print("task cancelled:", task.cancelled())

        # 2. A deadline, from the standard library.
        text = ""
        try:
            async with asyncio.timeout(0.05), llm.stream("Once upon a time", **ENDLESS) as stream:
                async for token in stream:
                    text += token.text
        except TimeoutError:
            print(f"time is up after {len(text)} characters")

        # 3. Leave the loop.
        text = ""
        async for token in llm.stream("Once upon a time", **ENDLESS):
            text += token.text
            if len(text) > 40:
                break
        print("left the loop after", repr(text))

        stats = await llm.stats()
        print("requests still running:", stats.num_running + stats.num_waiting)


if len(sys.argv) != 2:
    sys.exit(__doc__)
asyncllm.run(main)
