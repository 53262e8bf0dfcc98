"""Stream an answer, token by token.

python examples/quickstart.py MODEL
"""

import sys

import asyncllm


async def main() -> None:
    async with asyncllm.AsyncLLM(sys.argv[1]) as llm:
        async for token in llm.stream("The capital of France is", max_tokens=32, temperature=0):
            print(token, end="", flush=True)
        print()


if len(sys.argv) != 2:
    sys.exit(__doc__)
asyncllm.run(main)
