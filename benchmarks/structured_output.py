"""What does structured output cost, how much of JSON Schema does it hold, and is what comes out valid?

    python benchmarks/structured_output.py --suite FOLDER [--model FILE] [--drafts draft7 draft2020-12] [--schemas 400]
        [--max-tokens 256] [--streams 32]

FOLDER is a clone of github.com/json-schema-org/JSON-Schema-Test-Suite. "coverage": how many of its schemas compile, and
what becomes of its documents, written on one line; a valid document is refused mostly because its properties are not in
the schema's order. "compile_ms": from handing a schema in to its matcher. "mask_us": per token, following it in the
grammar and computing the next mask, applying a mask to logits, and both. "generated": one answer per schema that
compiles, at temperature 1, checked with the jsonschema package; "shortened" ones were brought to
their end because --max-tokens was near; of "unjudged" ones the validator itself cannot read the schema.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import numpy as np
import report
import torch

from asyncllm import AsyncLLM
from asyncllm.checkpoint import open_checkpoint
from asyncllm.config import EngineConfig
from asyncllm.errors import AsyncLLMError, RequestFailedError
from asyncllm.frontend.structured import make_grammar
from asyncllm.frontend.tokenizer import Tokenizer
from asyncllm.sampling.token_mask import TokenMasks
from asyncllm.sampling_params import SamplingParams
from asyncllm.structured.compiler import GrammarCompiler
from asyncllm.structured.matcher import Matcher
from asyncllm.wire.messages import EngineCoreRequest, EngineSampling, RareSampling

MANY = 1 << 20
VALIDATORS: dict[str, Any] = {
    "draft4": jsonschema.Draft4Validator,
    "draft6": jsonschema.Draft6Validator,
    "draft7": jsonschema.Draft7Validator,
    "draft2019-09": jsonschema.Draft201909Validator,
    "draft2020-12": jsonschema.Draft202012Validator,
}


class Case(NamedTuple):
    """One schema of the suite, its documents, and by which rules it is meant."""

    draft: str
    name: str
    schema: dict[str, Any]
    documents: list[tuple[Any, bool]]


def read_suite(folder: Path, drafts: list[str]) -> Iterator[Case]:
    for draft in drafts:
        for file in sorted((folder / "tests" / draft).glob("*.json")):
            for case in json.loads(file.read_text(encoding="utf-8")):
                if isinstance(case["schema"], dict):  # true and false are no schemas that one would ask for
                    case["schema"].setdefault("$schema", VALIDATORS[draft].META_SCHEMA["$schema"])
                    documents = [(test["data"], test["valid"]) for test in case["tests"]]
                    yield Case(draft, f"{file.stem}: {case['description']}", case["schema"], documents)


def request_of(request_id: int, schema: dict[str, Any]) -> EngineCoreRequest:
    grammar = make_grammar(SamplingParams(schema=schema))
    return EngineCoreRequest(request_id, [], EngineSampling(MANY, rare=RareSampling(grammar=grammar)))


class Library:
    """The engine's side without an engine: compile, follow, mask."""

    def __init__(self, model: str) -> None:
        checkpoint = open_checkpoint(model)
        self._tokenizer = Tokenizer.from_checkpoint(checkpoint)
        vocab_size, eos = checkpoint.vocab_size, checkpoint.eos_token_ids
        self._compiler = GrammarCompiler(EngineConfig.from_options(model), vocab_size=vocab_size, eos_token_ids=eos)
        self._logits = torch.zeros((1, vocab_size))
        self._fresh = torch.randn((1, vocab_size))
        self.compile_s: list[float] = []
        self.follow_s: list[float] = []
        self.apply_s: list[float] = []
        self.compile({"type": "null"})  # loads the vocabulary

    def compile(self, schema: dict[str, Any]) -> Matcher | AsyncLLMError:
        request = request_of(1, schema)
        begun = time.perf_counter()
        self._compiler.submit(request)
        self._compiler.wait()
        ((_, found),) = self._compiler.take()
        self.compile_s.append(time.perf_counter() - begun)
        return found

    def accepts(self, schema: dict[str, Any], document: Any) -> bool:
        matcher = self.compile(schema)
        self.compile_s.pop()  # it is a kept one
        assert isinstance(matcher, Matcher)
        try:
            for token_id in self._tokenizer.encode(json.dumps(document, ensure_ascii=False), False):
                self._apply(matcher.mask)
                begun = time.perf_counter()
                matcher.follow(token_id, MANY)
                self.follow_s.append(time.perf_counter() - begun)
        except RequestFailedError:
            return False
        return matcher.may_end

    def _apply(self, mask: bytes) -> None:
        self._logits.copy_(self._fresh)
        begun = time.perf_counter()
        TokenMasks({0: mask}, torch.from_numpy).apply(self._logits)
        self.apply_s.append(time.perf_counter() - begun)

    def close(self) -> None:
        self._compiler.shutdown()


def measure_library(library: Library, cases: list[Case]) -> tuple[dict[str, Any], list[Case]]:
    """Return coverage and times, and the cases whose schemas compile."""
    counts = dict.fromkeys(("valid_accepted", "valid_refused", "invalid_refused", "invalid_accepted"), 0)
    usable: list[Case] = []
    library.compile_s.clear()
    for case in cases:
        if isinstance(library.compile(case.schema), AsyncLLMError):
            library.compile_s.pop()
            continue
        usable.append(case)
        for document, valid in case.documents:
            if "\ud800" <= max(json.dumps(document, ensure_ascii=False), default="") <= "\udfff":
                continue  # half a surrogate pair is no text
            accepted = library.accepts(case.schema, document)
            counts[f"{'valid' if valid else 'invalid'}_{'accepted' if accepted else 'refused'}"] += 1
    both = np.array(library.follow_s) + np.array(library.apply_s[: len(library.follow_s)])
    return {
        "coverage": {"schemas": len(cases), "compiled": len(usable), **counts},
        "compile_ms": spread(library.compile_s, 1e3),
        "mask_us": {
            "follow": spread(library.follow_s, 1e6),
            "apply": spread(library.apply_s, 1e6),
            "both": spread(both.tolist(), 1e6),
        },
    }, usable


def spread(seconds: list[float], scale: float) -> dict[str, float]:
    return {f"p{round(100 * q)}": round(scale * report.quantile(seconds, q), 3) for q in (0.5, 0.95, 0.99)}


async def generate(args: Any, cases: list[Case]) -> dict[str, Any]:
    """Return how many answers are valid, and which are not."""
    invalid: dict[str, str] = {}
    unjudged: dict[str, str] = {}
    num_shortened = num_tokens = num_valid = 0
    places = asyncio.Semaphore(args.streams)

    async def one(index: int, case: Case) -> None:
        nonlocal num_shortened, num_tokens, num_valid
        question = f"Write JSON that fits this schema: {json.dumps(case.schema)[:1000]}"
        async with places:
            done = await llm.chat(
                [{"role": "user", "content": question}],
                schema=case.schema, temperature=1.0, seed=index, max_tokens=args.max_tokens,
            ).completion()  # fmt: skip
        num_tokens += done.usage.completion_tokens
        num_shortened += done.finish_reason == "length"
        try:
            VALIDATORS[case.draft](case.schema).validate(json.loads(done.text))
            num_valid += 1
        except (json.JSONDecodeError, jsonschema.ValidationError) as error:
            invalid[f"{case.draft} {case.name}"] = f"{str(error)[:100]}: {done.text[:80]}"
        except Exception as error:  # patterns and references that the validator does not know
            unjudged[f"{case.draft} {case.name}"] = f"{type(error).__name__}: {str(error)[:100]}"

    async with AsyncLLM(args.model) as llm:
        begun = time.perf_counter()
        await asyncio.gather(*(one(index, case) for index, case in enumerate(cases)))
        seconds = time.perf_counter() - begun
    return {
        "schemas": len(cases),
        "valid": num_valid,
        "shortened": num_shortened,
        "not_valid": invalid,
        "unjudged": unjudged,
        "tokens": num_tokens,
        "tokens_per_s": round(num_tokens / seconds, 1),
    }


def main() -> None:
    parser = report.parser(__doc__ or "", model=True)
    parser.add_argument("--suite", type=Path, required=True, help="a clone of JSON-Schema-Test-Suite")
    parser.add_argument("--drafts", nargs="+", choices=list(VALIDATORS), default=["draft7", "draft2020-12"])
    parser.add_argument("--schemas", type=int, default=400, help="most schemas to generate for; 0: none")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--streams", type=int, default=32)
    args = parser.parse_args()
    torch.set_num_threads(1)
    library = Library(args.model)
    figures, usable = measure_library(library, list(read_suite(args.suite, args.drafts)))
    library.close()
    if args.schemas:
        step = max(1, len(usable) // args.schemas)
        figures["generated"] = asyncio.run(generate(args, usable[::step][: args.schemas]))
    report.emit("structured_output", figures, args)


if __name__ == "__main__":
    sys.exit(main())
