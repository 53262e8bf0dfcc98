"""The same engine in a trio program: two streams in a nursery, one of them with a deadline.

python examples/trio_nursery.py MODEL
"""

import sys

import trio

from asyncllm import AsyncLLM


async def tell(llm: AsyncLLM, topic: str) -> None:
    async with llm.stream(f"A short story about {topic}:", max_tokens=24) as stream:
        story = "".join([token.text async for token in stream])
    print(f"[{topic}]", " ".join(story.split()))


async def main() -> None:
    async with AsyncLLM(sys.argv[1]) as llm:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tell, llm, "a lighthouse")
            nursery.start_soon(tell, llm, "two sisters")

        with trio.move_on_after(0.3) as scope:
            await llm.generate("An endless story:", max_tokens=400, ignore_eos=True)
        print("deadline reached:", scope.cancelled_caught)


if len(sys.argv) != 2:
    sys.exit(__doc__)
trio.run(main)
