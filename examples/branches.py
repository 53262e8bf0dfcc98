"""Branch in the middle of an answer, pin what all prompts begin with, and keep a bounded number of them in flight.

python examples/branches.py MODEL
"""

import asyncio
import sys

import asyncllm

TEXT = (
    "The harbour of Elvik opens to the west. In winter the ferry runs twice a day, in summer every hour, and on feast "
    "days not at all. The lighthouse was built in 1871 by two sisters, who sold their fishing boats to pay for it.\n"
)


async def main() -> None:
    async with asyncllm.AsyncLLM(sys.argv[1]) as llm:
        async with llm.stream(TEXT + "The sisters", max_tokens=200, temperature=0, ignore_eos=True) as stream:
            begun = ""
            async for token in stream:
                begun += str(token)
                if len(begun) > 20:
                    break
            async with stream.fork(3, temperature=1.0, seed=7, max_tokens=12) as branches:
                ends = await asyncio.gather(*(branch.completion() for branch in branches))
        for end in ends:
            print(repr(begun), "->", repr(end.text), f"({end.usage.prompt_tokens - end.usage.cached_tokens} computed)")

        async with llm.prefix(TEXT) as prefix:
            for question in ("When does the ferry run?", "Who built the lighthouse?"):
                await prefix.generate(f"Question: {question}\nAnswer:", max_tokens=16)
            print(f"{prefix.num_hits} of {prefix.num_requests} requests computed none of {prefix.num_tokens} tokens")

        num_tokens = 0
        prompts = (f"{TEXT}Question {i}: what is the number {i} good for?\nAnswer:" for i in range(50))
        async for _, answer in llm.as_completed(prompts, max_in_flight=10, max_tokens=8):
            num_tokens += answer.usage.completion_tokens
        print(f"{num_tokens} tokens, ten prompts at a time")


if len(sys.argv) != 2:
    sys.exit(__doc__)
asyncllm.run(main)
