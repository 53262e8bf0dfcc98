"""One running engine as the synchronous facades see it: its client and the two processors. One thread at a time.

Invariant: a request is in the output processor's table and in the engine, or in neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncllm.checkpoint import check_runnable, open_checkpoint
from asyncllm.client.base import EngineCoreClient
from asyncllm.errors import EngineDeadError, UsageError
from asyncllm.frontend.input_processor import InputProcessor
from asyncllm.frontend.output_processor import OutputProcessor
from asyncllm.frontend.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from asyncllm.client.base import ReportStartup
    from asyncllm.config import EngineConfig
    from asyncllm.frontend.input_processor import ProcessedRequest
    from asyncllm.frontend.output_processor import RequestState, Sink

__all__ = ["SyncSession"]


class SyncSession:
    """Starts the engine and blocks until it is ready: in a process, or in this one (``in_process``).

    :raises ModelError: the checkpoint cannot be used.
    :raises EngineStartError: the engine did not become ready.
    """

    def __init__(self, config: EngineConfig, report: ReportStartup | None = None) -> None:
        self.is_closed = False
        self.is_sleeping = False  # no step can come before wake_up()
        self.death: EngineDeadError | None = None
        checkpoint = open_checkpoint(config.model.model)
        if config.parallel.runs_own_models:  # what cannot be run should not be blamed on its tokenizer
            check_runnable(checkpoint)
        tokenizer = load_tokenizer(config, checkpoint)
        self.inputs = InputProcessor(config, checkpoint, tokenizer)
        self.outputs = OutputProcessor(tokenizer)
        self.client = EngineCoreClient.make_client(config, "inproc" if config.frontend.in_process else "sync")
        self.inputs.set_info(self.client.start(report))

    def check(self) -> None:
        """Return if the engine can be used.

        :raises EngineDeadError: it has died.
        :raises UsageError: it was closed.
        """
        if self.is_closed:
            raise UsageError("the engine is closed")
        if self.death is not None:
            raise self.death.fresh()

    def submit(self, processed: ProcessedRequest, sink: Sink) -> None:
        """Register the request and send it; all of it or nothing.

        :raises DuplicateRequestError: a live request has its id.
        :raises EngineDeadError: the engine is gone.
        """
        self.check()
        state = self.outputs.add_request(processed, sink)
        try:
            for request in processed.requests:
                self.client.add_request(request)
        except BaseException:
            self.abort(state, deliver=False)
            raise

    def abort(self, request: RequestState | str, *, deliver: bool) -> None:
        """Drop a request; with ``deliver`` its sink gets what is held and the finish reason ``abort``."""
        self.client.abort_requests(self.outputs.abort(request, deliver=deliver))

    def step(self) -> None:
        """Wait for one step's outputs and hand them to the sinks; returns at once where no request is in flight.

        :raises EngineDeadError: the engine is gone; every sink was told.
        """
        self.check()
        try:
            outputs = self.client.get_output()
        except EngineDeadError as error:
            self.death = error
            self.outputs.fail_all(error)
            raise
        self.client.abort_requests(self.outputs.process(outputs))

    def take_arrived(self) -> None:
        """Hand what has arrived to the sinks, without waiting.

        :raises EngineDeadError: the engine is gone.
        """
        while (outputs := self.client.poll_output()) is not None:
            self.client.abort_requests(self.outputs.process(outputs))

    def call(self, method: str, *args: Any) -> Any:
        """Call a utility of the engine and return its value.

        :raises UtilityError: it failed there.
        :raises EngineDeadError: the engine is gone.
        """
        self.check()
        return self.client.call_utility(method, *args)

    def sleep(self, level: int) -> None:
        """Have the engine give its memory back; see :meth:`asyncllm.AsyncLLM.sleep`."""
        self.call("sleep", level)
        self.is_sleeping = True
        self.take_arrived()  # nobody waits for a step from now on

    def wake_up(self) -> None:
        """Have the engine go on; see :meth:`asyncllm.AsyncLLM.wake_up`."""
        self.call("wake_up")
        self.is_sleeping = False

    def close(self) -> None:
        """End every request with what it holds, then the engine. Idempotent."""
        if self.is_closed:
            return
        for request_id in self.outputs.request_ids:
            self.outputs.abort(request_id, deliver=True)
        self.is_closed = True
        self.client.close()
