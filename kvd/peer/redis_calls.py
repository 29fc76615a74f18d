"""The few calls that kvd makes to a Redis, Valkey or Redis Cluster, with the `redis` library.

What is asked or told of many chunks goes as one script a server, not as a command a chunk: of 128
chunks the replies alone would keep the loop for over a millisecond (ADR 0025).

Loop only. Every call ends within the time-outs of its connection, and raises only `Unreachable`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, RedisError

from kvd.errors import StartError
from kvd.peer.directory import HOLDERS_ASKED, numbers_of, tag_of
from kvd.peer.membership import HOSTS_MAX, Member, host_key, hosts_key, pack, unpack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.config_peer import PeerKnobs

CONNECT_S: Final = 1.0
CALL_S: Final = 1.0
"""After so long a connection is given up, with whatever is still to come on it."""
CONNECTIONS_MAX: Final = 32
NAMES_AT_ONCE: Final = 1000
NAMES_S: Final = 7 * 86_400
"""How long the list of hosts outlives the last of them."""

ASK: Final = f"""
local found = {{}}
for i, key in ipairs(KEYS) do found[i] = redis.pcall('SRANDMEMBER', key, {HOLDERS_ASKED}) end
return found
"""
TELL: Final = """
local strange, full = 0, 0
for i, key in ipairs(KEYS) do
  local done
  if string.byte(ARGV[3], i) == 49 then
    done = redis.pcall('SADD', key, ARGV[1])
    if type(done) == 'number' then redis.call('EXPIRE', key, ARGV[2]) end
  else
    done = redis.pcall('SREM', key, ARGV[1])
  end
  if type(done) ~= 'number' then
    if string.find(done.err, 'OOM') then full = full + 1 else strange = strange + 1 end
  end
end
return {strange, full}
"""
"""A key never lives without its end: both are set in one go, whatever becomes of who asked."""

BEAT: Final = """
local before = redis.pcall('GET', KEYS[1])
if before == ARGV[1] then redis.call('PEXPIRE', KEYS[1], ARGV[2])
else redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2]) end
if redis.call('TYPE', KEYS[2]).ok ~= 'set' then redis.call('DEL', KEYS[2]) end
if redis.call('SISMEMBER', KEYS[2], ARGV[3]) == 0 then redis.call('SADD', KEYS[2], ARGV[3]) end
redis.call('EXPIRE', KEYS[2], ARGV[4])
if type(before) == 'string' then return before end
return false
"""
"""Both keys are kvd's by their names, so that what else may lie there goes. Renewing takes no room:
a server that is full goes on knowing who is there."""

_FAILURES: Final = (RedisError, RedisClusterException, OSError, TimeoutError, ValueError)


class Unreachable(Exception):
    """The directory did not do what it was asked to; the text says why."""


class Calls(Protocol):
    """What is called of the directory, see `RedisCalls`; each raises `Unreachable`."""

    def servers(self) -> int: ...
    async def ping(self) -> None: ...
    async def ask(self, keys: Sequence[bytes]) -> list[tuple[int, ...] | None]: ...
    async def tell(
        self, number: int, entries: Sequence[tuple[bytes, bool]], ttl_s: int
    ) -> tuple[int, int]: ...
    async def beat(self, me: Member, ttl_s: float) -> Member | None: ...
    async def leave(self, me: Member) -> None: ...
    async def members(self) -> list[Member | None]: ...
    async def close(self) -> None: ...


def _why(error: BaseException) -> str:
    return str(error) or type(error).__name__


class RedisCalls:
    """A client of its own for look-ups and upkeep alike; connections are made when needed."""

    def __init__(self, knobs: PeerKnobs) -> None:
        """Take in where it is; nothing is sent yet.

        Raises:
            StartError: The password file cannot be read.
        """
        options: dict[str, Any] = {
            "socket_timeout": CALL_S,
            "socket_connect_timeout": CONNECT_S,
            "max_connections": CONNECTIONS_MAX,
            "retry": Retry(NoBackoff(), 0),  # the gate decides when it is tried again
            "protocol": 2,
            "client_name": f"kvd-{knobs.host}",
        }
        if knobs.directory_password_file:
            options["password"] = _password(knobs.directory_password_file)
        self._cluster = knobs.directory_mode == "cluster"
        self._name = knobs.cluster
        self._redis: Any
        if self._cluster:
            self._redis = redis.asyncio.RedisCluster.from_url(knobs.directory, **options)
        else:
            self._redis = redis.asyncio.Redis.from_url(knobs.directory, **options)

    def servers(self) -> int:
        """Count the servers that share the entries."""
        return max(1, len(self._redis.get_primaries())) if self._cluster else 1

    async def ping(self) -> None:
        """Ask for a sign of life."""
        try:
            await self._redis.ping()
        except _FAILURES as error:
            raise Unreachable(_why(error)) from error

    async def ask(self, keys: Sequence[bytes]) -> list[tuple[int, ...] | None]:
        """Return the numbers in each entry, some of them where there are many; None: no entry."""
        found: dict[bytes, object] = {}
        batches = self._batches(keys)
        replies = await self._pipeline([("EVAL", ASK, len(b), *b) for b in batches])
        for batch, reply in zip(batches, replies, strict=True):
            if not isinstance(reply, list) or len(reply) != len(batch):
                raise Unreachable(f"strange reply: {reply!r:.80}")
            found.update(zip(batch, reply, strict=True))
        return [numbers_of(found[key]) for key in keys]

    async def tell(
        self, number: int, entries: Sequence[tuple[bytes, bool]], ttl_s: int
    ) -> tuple[int, int]:
        """Put a number into entries, or take it out.

        Returns:
            How many keys are no entries, and for how many the server has no room.
        """
        states = dict(entries)
        commands = []
        for batch in self._batches(list(states)):
            flags = bytes(48 + states[key] for key in batch)
            commands.append(("EVAL", TELL, len(batch), *batch, number, ttl_s, flags))
        strange = full = 0
        for reply in await self._pipeline(commands):
            if not isinstance(reply, list) or len(reply) != 2:  # noqa: PLR2004 - two counts
                raise Unreachable(f"strange reply: {reply!r:.80}")
            strange, full = strange + int(reply[0]), full + int(reply[1])
        return strange, full

    async def beat(self, me: Member, ttl_s: float) -> Member | None:
        """Give a sign of life; return the record that was there, None if there was none."""
        key, names = host_key(self._name, me.host), hosts_key(self._name)
        (reply,) = await self._pipeline(
            [("EVAL", BEAT, 2, key, names, pack(me), int(ttl_s * 1000), me.host, NAMES_S)]
        )
        return unpack(self._name, reply)

    async def leave(self, me: Member) -> None:
        """Take the record away: the daemon goes down."""
        await self._pipeline(
            [
                ("DEL", host_key(self._name, me.host)),
                ("SREM", hosts_key(self._name), me.host),
            ]
        )

    async def members(self) -> list[Member | None]:
        """Read everybody's record; names without one are taken off the list."""
        names = hosts_key(self._name)
        (reply,) = await self._pipeline([("SMEMBERS", names)])
        if not isinstance(reply, list | set):
            raise Unreachable(f"strange reply: {reply!r:.80}")
        hosts = sorted(name.decode(errors="replace") for name in reply)[:HOSTS_MAX]
        found: list[Member | None] = []
        gone = []
        for start in range(0, len(hosts), NAMES_AT_ONCE):
            some = hosts[start : start + NAMES_AT_ONCE]
            (records,) = await self._pipeline([("MGET", *[host_key(self._name, h) for h in some])])
            for host, record in zip(some, records, strict=True):
                if record is None:
                    gone.append(host)
                else:
                    found.append(unpack(self._name, record))
        if gone:
            await self._pipeline([("SREM", names, *gone[:NAMES_AT_ONCE])])
        return found

    async def close(self) -> None:
        """Close the connections."""
        try:
            await self._redis.aclose()
        except _FAILURES:
            return  # closed by the other side already

    def _batches(self, keys: Sequence[bytes]) -> list[list[bytes]]:
        """Cut keys into what one script may touch: all, or in a cluster those of one slot."""
        if not self._cluster:
            return [list(keys)] if keys else []
        groups: dict[bytes, list[bytes]] = {}
        for key in keys:
            groups.setdefault(tag_of(key), []).append(key)
        return list(groups.values())

    async def _pipeline(self, commands: Sequence[tuple[object, ...]]) -> list[Any]:
        """Send commands together; an error of any of them is one of the whole."""
        if not commands:
            return []
        try:
            if len(commands) == 1:
                return [await self._redis.execute_command(*commands[0])]
            pipeline = (
                self._redis.pipeline() if self._cluster else self._redis.pipeline(transaction=False)
            )
            for command in commands:
                pipeline.execute_command(*command)
            replies: list[Any] = await pipeline.execute(raise_on_error=False)
        except _FAILURES as error:
            raise Unreachable(_why(error)) from error
        for reply in replies:
            if isinstance(reply, Exception):
                raise Unreachable(_why(reply)) from reply
        return replies


def _password(path: str) -> str:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        msg = f"peer.directory_password_file {path}: {_why(error)}; correct the path or its rights"
        raise StartError(msg) from error
    if not lines or not lines[0]:
        msg = f"peer.directory_password_file {path}: its first line is empty; write the password"
        raise StartError(msg)
    return lines[0]
