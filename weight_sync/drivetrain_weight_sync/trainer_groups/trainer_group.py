"""A group of a trainer, joined by a process that can be killed."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import msgspec

from drivetrain.backend.toolkit.deadlines import deadline
from drivetrain.errors import InvalidRequest, WeightSyncError
from drivetrain_weight_sync.trainer_groups.process_messages import Answer, AnyJoin, Failed, Piece, Receive, Request

_REQUESTS: Final = msgspec.json.Encoder()
_ANSWERS: Final = msgspec.json.Decoder(Answer)


class TrainerGroup:
    """One group and its receiving process.

    A call that fails, times out or is cancelled ends the group: the process is killed, so that the trainer's collective
    fails instead of waiting.

    Args:
        join: Address, size, rank and timeout.
    """

    def __init__(self, join: AnyJoin) -> None:
        self.name = join.group_name
        self._join = join
        self._process: Process | None = None
        self._asking = asyncio.Lock()
        self._ended = False

    @property
    def ended(self) -> bool:
        """True once the group is of no more use."""
        return self._ended

    async def join(self) -> None:
        """Start the process and form the group.

        Raises:
            DeadlineExceeded: The other ranks did not join within the timeout.
            InvalidRequest: The server cannot join a group of this backend.
            WeightSyncError: The group did not form.
        """
        join = self._join
        if not 0 <= join.rank < join.world_size:
            raise InvalidRequest(
                f"rank_offset={join.rank} is not in a group of {join.world_size}; world_size counts the trainer and "
                "one rank per server",
                field="rank_offset",
            )
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "drivetrain_weight_sync.trainer_groups.receiving_process",
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,  # Ctrl-C is for the server
        )
        await self._ask(join, f"the {join.world_size} ranks of the group {self.name!r} to join")

    async def receive(self, pieces: Sequence[Piece], path: str | None, nbytes: int) -> None:
        """Receive broadcasts into the file at ``path``, or discard them if it is None.

        Raises:
            DeadlineExceeded: The broadcasts did not come within the timeout.
            WeightSyncError: The trainer is gone, or the group was ended meanwhile.
        """
        what = f"{len(pieces)} broadcasts in the group {self.name!r}"
        await self._ask(Receive(tuple(pieces), path, nbytes), what)

    async def end(self) -> None:
        """Kill the process; its broadcasts under way then fail at the trainer too. Idempotent."""
        self._ended = True
        process = self._process
        if process is None:
            return
        self._kill(process)
        await process.wait()

    async def _ask(self, request: Request, waited_for: str) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if self._ended:
                raise WeightSyncError(f"the group {self.name!r} was ended")
            async with self._asking, deadline(self._join.timeout, waited_for):
                with suppress(BrokenPipeError, ConnectionResetError):
                    process.stdin.write(_REQUESTS.encode(request) + b"\n")
                    await process.stdin.drain()
                line = await process.stdout.readline()
            self._require_done(line, waited_for)
        except BaseException:
            self._ended = True
            self._kill(process)
            raise

    def _require_done(self, line: bytes, waited_for: str) -> None:
        name = self.name
        if not line:
            how = "was ended" if self._ended else "was lost: its receiving process died"
            raise WeightSyncError(f"the group {name!r} {how} while the server waited for {waited_for}")
        answer = _ANSWERS.decode(line)
        if not isinstance(answer, Failed):
            return
        if answer.refused:
            raise InvalidRequest(answer.message, field="backend")
        raise WeightSyncError(
            f"the group {name!r} failed while the server waited for {waited_for}: {answer.message}; form it anew"
        )

    @staticmethod
    def _kill(process: Process) -> None:
        if process.stdin is not None:
            process.stdin.close()
        with suppress(ProcessLookupError):
            process.kill()
