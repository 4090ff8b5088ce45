"""Who calls the data port: API keys of a file, what each key may ask for, and its limits. One event loop owns it.

Called by `service` before a body is looked at (`admit`), and when the prompt's length is known (`Caller.charge`). Without a key file everybody
is one caller without limits. A limit is a bucket that fills evenly over a minute; this process has a share of it, which the brain moves to
where the calls are (`decide.shares`): it is told what was asked for each second, and at once when a bucket runs low.
"""

from __future__ import annotations

import hmac
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from fleet_contract import errors
from fleet_contract.access import KeyFacts, KeyLine, WatchedFile, digest_of, given_key, parse_keys
from fleet_contract.errors import ApiError
from fleet_contract.names import HEADER_PRIORITY_CLASS, PRIORITY_CLASSES
from fleet_router.decide.shares import Use
from fleet_router.settings import BadFlag
from fleet_router.table import ServiceKey

log = logging.getLogger(__name__)

HEADER_CLASS: Final = HEADER_PRIORITY_CLASS.lower().encode()
_OPEN_CLASSES: Final = ("interactive", "default", "batch")  # without keys
_MAX_RETRY_AFTER_S: Final = 600


@dataclass(slots=True)
class Bucket:
    """A share of so many units a minute, at most as many at once; what was used beyond that is paid back first. Pure."""

    limit: float  # a minute, of which this is a share
    per_minute: float
    level: float = 0.0
    at: float = 0.0
    wanted: float = 0.0  # units asked for since the last report
    released: float = 0.0  # units lost by shrinking since then

    @classmethod
    def full(cls, limit: float, now: float, share: float = 1.0) -> Bucket:
        size = _size(limit, share)
        return cls(limit, size, size, now)

    def wait_s(self, units: float, now: float) -> float:
        """Until so many may be taken; more than a whole minute's have to find a full bucket."""
        self._fill(now)
        self.wanted += units
        lacking = min(units, self.per_minute) - self.level
        return 0.0 if lacking <= 1e-9 else lacking * 60 / self.per_minute

    def take(self, units: float) -> None:
        """The level may fall below zero, or with less than nothing used after all, rise."""
        self.level = min(self.per_minute, self.level - units)

    def set_share(self, share: float, now: float) -> None:
        """A smaller bucket holds less in proportion, a larger one what it held."""
        self._fill(now)
        size = _size(self.limit, share)
        if size < self.per_minute and self.level > 0:
            left = self.level * size / self.per_minute
            self.released += self.level - left
            self.level = left
        self.per_minute = size

    @property
    def is_low(self) -> bool:
        """More of the limit is wanted here."""
        return self.per_minute < self.limit and self.level < self.per_minute / 2

    def _fill(self, now: float) -> None:
        self.level = min(self.per_minute, self.level + max(0.0, now - self.at) * self.per_minute / 60)
        self.at = now


def _size(limit: float, share: float) -> float:
    """At least one unit: else nobody could ask for any."""
    return max(limit * share, min(limit, 1.0))


@dataclass(slots=True, eq=False)
class Caller:
    """One key's owner."""

    tenant: str = ""
    models: Collection[str] | None = None
    klass: str = "default"
    classes: Collection[str] = _OPEN_CLASSES
    requests: Bucket | None = None
    tokens: Bucket | None = None
    on_low: Callable[[], None] = lambda: None

    def class_of(self, asked: bytes | None) -> str:
        """Of a request, by its header. Raises ApiError 400 or 403."""
        if asked is None:
            return self.klass
        wanted = asked.strip().decode("latin-1").lower()
        if wanted not in PRIORITY_CLASSES:
            raise ApiError(400, f"header {HEADER_PRIORITY_CLASS} is {wanted[:40]!r}; {', '.join(self.classes)} is allowed", code="invalid_class")
        if wanted not in self.classes:
            text = f"this key may not use the class {wanted}; it may use {', '.join(self.classes)}"
            raise ApiError(403, text, type=errors.PERMISSION, code="class_not_allowed")
        return wanted

    def may_use(self, service: ServiceKey, named: Mapping[str, ServiceKey]) -> bool:
        """Args: named: services by all names that work."""
        if self.models is None:
            return True
        return any(named.get(m) == service or (m.endswith("/*") and m[:-2] == service[0]) for m in self.models)

    def check_model(self, model: str, service: ServiceKey, named: Mapping[str, ServiceKey]) -> None:
        """Raises ApiError 403."""
        if not self.may_use(service, named):
            text = f"this key may not use the model {model[:200]!r}; see GET /v1/models for what it may"
            raise ApiError(403, text, type=errors.PERMISSION, code="model_not_allowed", param="model")

    def count_request(self, now: float) -> None:
        """Raises ApiError 429."""
        if self.requests is not None:
            self._count(self.requests, "requests", 1, now)

    def charge(self, tokens: int, now: float) -> None:
        """Prompt and expected answer, before any is computed. Raises ApiError 429."""
        if self.tokens is not None:
            self._count(self.tokens, "tokens", tokens, now)

    def settle(self, charged: int, used: int) -> None:
        """What a request really took, when it is over."""
        if self.tokens is not None:
            self.tokens.take(used - charged)

    def _count(self, bucket: Bucket, what: str, units: int, now: float) -> None:
        wait = bucket.wait_s(units, now)
        if not wait:
            bucket.take(units)
        if wait or bucket.is_low:
            self.on_low()
        if wait:
            raise _too_many(what, bucket.limit, wait * bucket.per_minute / bucket.limit)  # more of the limit is on its way here

    def buckets(self) -> Iterator[tuple[str, Bucket]]:
        """By kind."""
        if self.requests is not None:
            yield "requests", self.requests
        if self.tokens is not None:
            yield "tokens", self.tokens


def _too_many(what: str, limit: float, wait_s: float) -> ApiError:
    after = max(1, min(_MAX_RETRY_AFTER_S, math.ceil(wait_s)))
    text = f"this key's {limit:g} {what} a minute are used; try again in {after} s"
    return ApiError(429, text, type=errors.RATE_LIMIT, code=f"{what}_per_minute", retry_after_s=after)


class Callers:
    """The callers of a key file, which is read again when it changes; a caller's buckets live on as long as its limits are the same."""

    def __init__(self, path: str, clock: Callable[[], float], share: float = 1.0) -> None:
        """Args: path: empty: no keys are asked for. share: of each limit, what this process may give. Raises BadFlag."""
        self._clock = clock
        self._share = share  # of limits that have none by name
        self._shares: Mapping[str, float] = {}
        self.on_low: Callable[[], None] = lambda: None  # more of some limit is wanted here; called often
        self._file = WatchedFile(path, clock) if path else None
        self._everybody = Caller()
        self._callers: dict[bytes, Caller] = {}
        self._known: dict[bytes, bytes] = {}  # digests that were found once, to those of the file
        if self._file is not None:
            try:
                self._take(parse_keys(self._file.path.read_text()))
            except (OSError, ValueError) as e:
                raise BadFlag(f"--api-key-file {path}: {e}") from e

    def admit(self, authorization: bytes | None, x_api_key: bytes | None) -> Caller:
        """The caller by its key. Raises ApiError 401."""
        if self._file is None:
            return self._everybody
        self._reload(self._file)
        given = given_key(authorization, x_api_key)
        if not given:
            raise ApiError(401, "an API key is needed: send it as 'Authorization: Bearer KEY'", type=errors.AUTHENTICATION, code="missing_api_key")
        digest = digest_of(given)
        known = self._known.get(digest)
        if known is None or not hmac.compare_digest(digest, known):
            # No early end: the time must not tell which key is near.
            found = [mine for mine in self._callers if hmac.compare_digest(digest, mine)]
            if not found:
                raise ApiError(401, "the API key is not known here; check it, or ask for one", type=errors.AUTHENTICATION, code="invalid_api_key")
            known = self._known[digest] = found[0]
        return self._callers[known]

    # -- shares of limits

    def uses(self) -> list[Use]:
        """What was asked of each limit since the last call."""
        out: list[Use] = []
        for name, bucket in self._buckets():
            if bucket.wanted or bucket.released:
                out.append(Use(name, bucket.wanted, bucket.released))
                bucket.wanted = bucket.released = 0.0
        return out

    def set_shares(self, share: float, shares: Mapping[str, float], handed: Mapping[str, float]) -> bool:
        """What this process may give from now on. Returns whether a bucket lost something, which others can have.

        Args:
            share: of limits without a name here.
            shares: by name.
            handed: units that other processes gave up for us.
        """
        self._share, self._shares = share, shares
        now, lost = self._clock(), False
        for name, bucket in self._buckets():
            bucket.set_share(self._share_of(name), now)
            bucket.take(-handed.get(name, 0.0))
            lost |= bucket.released > 0
        return lost

    def _buckets(self) -> Iterator[tuple[str, Bucket]]:
        for digest, caller in self._callers.items():
            for kind, bucket in caller.buckets():
                yield _name(digest, kind), bucket

    def _reload(self, file: WatchedFile) -> None:
        if not file.changed():
            return
        try:
            self._take(parse_keys(file.path.read_text()))
        except (OSError, ValueError) as e:
            log.error("the API keys could not be read again; the old ones stay", extra={"path": str(file.path), "error": str(e)})
        else:
            log.info("API keys read again", extra={"keys": len(self._callers)})

    def _take(self, keys: list[KeyFacts]) -> None:
        now = self._clock()
        made = {k.digest: _caller(k, now, self._share_of) for k in keys}
        for digest, caller in made.items():
            caller.on_low = self._low
            old = self._callers.get(digest)
            if old is not None:
                caller.requests = _kept(old.requests, caller.requests)
                caller.tokens = _kept(old.tokens, caller.tokens)
        self._callers = made
        self._known = {}

    def _share_of(self, name: str) -> float:
        return self._shares.get(name, self._share)

    def _low(self) -> None:
        self.on_low()


def _kept(old: Bucket | None, new: Bucket | None) -> Bucket | None:
    return old if old is not None and new is not None and old.limit == new.limit else new


def _name(digest: bytes, kind: str) -> str:
    """Of a limit, between processes."""
    return f"{digest.hex()[:16]}.{kind}"


def _caller(key: KeyFacts, now: float, share_of: Callable[[str], float]) -> Caller:
    line = key.line
    if line is None:
        return Caller(tenant=key.digest.hex()[:16], classes=_classes(KeyLine("")))

    def bucket(limit: int, kind: str) -> Bucket | None:
        return Bucket.full(limit, now, share_of(_name(key.digest, kind))) if limit else None

    return Caller(
        line.name or key.digest.hex()[:16], line.models, line.priority_class, _classes(line),
        bucket(line.requests_per_minute, "requests"), bucket(line.tokens_per_minute, "tokens"),
    )  # fmt: skip


def _classes(line: KeyLine) -> tuple[str, ...]:
    named = (line.priority_class, *(line.priority_classes if line.priority_classes is not None else ("batch",)))
    return tuple(name for name in PRIORITY_CLASSES if name in named)
