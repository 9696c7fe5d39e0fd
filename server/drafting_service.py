"""The two gRPC services around a drafter: what arrives is read, worked on, and answered.

Short work is done on the event loop itself: a session's step takes tens of microseconds, and a hop to a worker thread
and back takes 45, with a long tail. Long work (a prompt of 30 000 tokens takes 25 ms, 128 000 take 180; a large batch; an
output that joins the memory; opening an index) goes to one of two worker threads, where the kernels run without the GIL
and other streams' steps go on. `benchmarks/round_trip.py` measures what a bystander feels. A stream's own messages are
answered one after the other either way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor

import grpc

from redraft import __version__
from redraft.retrieval.errors import RedraftError
from redraft.server.other_processor import OtherProcessor
from redraft.server.session_steps import Activity, answer, close_quietly, expected_microseconds, read_steps
from redraft.server.session_table import HeldSession, SessionTable, StreamSessions
from redraft.v1 import drafting_pb2 as pb
from redraft.v1 import drafting_pb2_grpc as rpc
from redraft.v1.wire import unpack_int32

__all__ = ["AdminService", "DraftingService"]

_log = logging.getLogger("redraft.server")

# Messages expected to take longer go to a worker thread: ten times what the hop costs.
INLINE_MICROSECONDS = 500


class DraftingService(rpc.DraftingServiceServicer):
    """Answers streams and calls; `drafter` is None until it is warm."""

    def __init__(self, table: SessionTable, max_message_bytes: int) -> None:
        self.drafter = None
        self.table = table
        self.activity = Activity()
        self.max_message_bytes = max_message_bytes
        self.plain_socket = ""  # file name of the socket for plain streams, where there is one
        self.workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="redraft-worker")
        self.beside = OtherProcessor(thread_name_prefix="redraft-beside")
        self._streams: dict[asyncio.Task, StreamSessions] = {}
        self._closing: set[asyncio.Task] = set()
        self._draining = False

    async def Decode(self, request_iterator, context):
        await self._admit(context)

        async def read():
            request = await context.read()
            return None if request is grpc.aio.EOF else request

        await self.serve_stream(read, context.write)

    async def serve_stream(self, read, write) -> None:
        """Answer what `read()` brings, one message after the other, until that is None or the server stops."""
        stream, task = self.table.new_stream(), asyncio.current_task()
        self._streams[task] = stream
        try:
            while not self._draining and (request := await read()) is not None:
                reply = pb.DecodeResponse(step=request.step)
                await self._answer(stream, request, reply)
                await write(reply)
        except asyncio.CancelledError:
            if not self._draining:
                raise  # the client went away
        finally:
            del self._streams[task]
            self.close_later(self.table.end_stream(stream))

    async def Step(self, request, context):
        await self._admit(context)
        stream = self.table.new_stream()
        try:
            reply = pb.StepResponse()
            await self._answer(stream, request, reply)
            return reply
        finally:
            self.close_later(self.table.end_stream(stream))

    async def GetInfo(self, request, context):
        await self._admit(context)
        config = self.drafter.config
        return pb.GetInfoResponse(
            version=__version__,
            vocab_size=config.vocab_size or 0,
            max_nodes=config.max_nodes,
            tokenizer_fingerprint=config.tokenizer_fingerprint or "",
            index_paths=[str(path) for path in self.drafter.index_paths],
            max_message_bytes=self.max_message_bytes,
            max_sessions=self.table.max_sessions,
            open_sessions=len(self.table),
            idle_seconds=self.table.idle_seconds,
            hidden_size=self.drafter.hidden_size,
            state_map=_state_map(self.drafter.states),
            plain_socket=self.plain_socket,
            batches=True,
        )

    async def Locate(self, request, context):
        await self._admit(context)
        try:
            passages = [unpack_int32(passage, "passages") for passage in request.passages]
            places = await self.run_in_worker(self.drafter.locate, passages)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return pb.LocateResponse(
            occurrences=[
                pb.Occurrence()
                if place is None
                else pb.Occurrence(index_path=place.index, document=place.document, offset=place.offset)
                for place in places
            ]
        )

    async def expire_idle_sessions(self) -> None:
        """Runs for as long as the server does."""
        while True:
            await asyncio.sleep(min(max(self.table.idle_seconds / 4, 0.05), 30.0))
            expired = self.table.expire()
            self.activity.expired += len(expired)
            self.close_later(expired)

    def close_later(self, sessions: list[HeldSession]) -> None:
        """Close sessions that left the table, in a worker thread: their outputs join the memory there."""
        if sessions:
            task = asyncio.ensure_future(self.run_in_worker(_close_all, sessions))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def run_in_worker(self, function, *args):
        return await asyncio.get_running_loop().run_in_executor(self.workers, function, *args)

    async def drain(self, seconds: float) -> None:
        """End all streams after the step that each is at, and wait at most `seconds` for that."""
        self._draining = True
        streams = dict(self._streams)
        for task, stream in streams.items():
            if not stream.busy:
                task.cancel()  # it waits for its client's next message
        waiting = [*streams, *self._closing]
        if waiting:
            await asyncio.wait(waiting, timeout=seconds)
        if self._closing:
            await asyncio.wait(self._closing, timeout=seconds)

    async def _answer(self, stream: StreamSessions, request, reply) -> None:
        started = time.perf_counter()
        steps = read_steps(request)
        stream.busy = True
        try:
            if expected_microseconds(stream, steps) > INLINE_MICROSECONDS:
                await self._answer_in_worker(stream, steps, reply)
            else:
                answer(self.drafter, stream, steps, reply, self.activity, self.beside)
        finally:
            stream.busy = False
        self.activity.answered(time.perf_counter() - started)

    async def _answer_in_worker(self, stream: StreamSessions, steps, reply) -> None:
        """Wait for the worker even when the client goes away meanwhile: its sessions are being worked on."""
        work = asyncio.ensure_future(
            self.run_in_worker(answer, self.drafter, stream, steps, reply, self.activity, self.beside),
        )
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait({work})
            raise

    async def _admit(self, context) -> None:
        if self.drafter is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is still opening indexes and compiling")
        if self._draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is stopping")


def _state_map(states) -> pb.StateMap | None:
    """What `Drafter.states` says, as a message."""
    if states is None:
        return None
    state_map, origin = states
    return pb.StateMap(numbers=state_map.packed().tobytes(), width=state_map.width, **origin._asdict())


def _close_all(sessions: list[HeldSession]) -> None:
    for held in sessions:
        close_quietly(held)


class AdminService(rpc.AdminServiceServicer):
    """Changes what the drafter knows. Index files are opened in a worker thread: streams go on meanwhile."""

    def __init__(self, drafting: DraftingService) -> None:
        self._drafting = drafting

    async def LoadIndex(self, request, context):
        await self._do(context, "load_index", request.path)
        return pb.LoadIndexResponse()

    async def UnloadIndex(self, request, context):
        await self._do(context, "unload_index", request.path)
        return pb.UnloadIndexResponse()

    async def ListIndexes(self, request, context):
        await self._drafting._admit(context)
        return pb.ListIndexesResponse(paths=[str(path) for path in self._drafting.drafter.index_paths])

    async def ForgetNamespace(self, request, context):
        await self._do(context, "forget", request.namespace or "default")
        return pb.ForgetNamespaceResponse()

    async def _do(self, context, method: str, argument: str) -> None:
        await self._drafting._admit(context)
        try:
            await self._drafting.run_in_worker(getattr(self._drafting.drafter, method), argument)
        except (OSError, RedraftError) as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except KeyError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error.args[0]))
        except (TypeError, ValueError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
