"""Which worker holds which prefix: one table of chain keys for all workers and tiers, bounded by the workers' own capacities.

A key names a whole prefix in blocks of 64 tokens (`fleet_contract.prefix`, every fourth page). Per tier a key maps to a bit mask of
the workers that hold it. Along a prompt this set only shrinks, so a lookup gallops and bisects: O(c log n) for c distinct depths.

A worker's bit belongs to one life of what we know about it. `clear` and `remove_slot` retire the bit in O(1): it is masked out at
once, and is given away again only after `sweep` has cleared it everywhere. So nothing of an old life can match in a new one.

Keys of bytes (of prompts that nobody has token ids of) can equal no event's: what a worker holds of them is told by the history of our own
picks alone, whatever its events are. They have a life beside the other, with a bit of its own. `key_tokens`, of several methods: the keys are
of bytes, and each is believed to stand for so many tokens; 0: they are of tokens.

Three writers: KV events (`store`, `remove`, `clear`, `replace`; reference-counted per tier, group and engine hash), the history of
our own picks (`remember`, for workers without events), and expectations (`expect`: a pick whose blocks no event has told of yet).
No clock, no I/O. One owner, one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from fleet_contract.names import PAGE_SIZE
from fleet_router.decide.history import History
from fleet_router.decide.keys import BLOCK_TOKENS, STRIDE
from fleet_router.decide.lives import DISK, GPU, HOST, TABLES, TIERS, TOLD, Expectation, Life, Retired, Slot
from fleet_router.decide.told import Prefix, checked, depths_up_to

ENTRIES_OVER_BLOCKS: Final = 1.2  # a worker that tells of more than this times its own blocks tells nonsense
ESTIMATE_ERROR: Final = 0.25  # of a hit in tokens that is counted in bytes: up to here it says nothing about what is cached
SETTLE_S: Final = 1.0  # an expectation outlives the first token so long: events travel up to 100 ms
_MASK_CACHE: Final = 4096
_DEPTH_BITS: Final = 24

Ints = npt.NDArray[np.intp]
Floats = npt.NDArray[np.float64]


Run = tuple[int, int]  # workers as a bit mask, and how many first blocks of a prompt they hold exactly


class StoreResult:
    """What `store` did."""

    STORED: Final = "stored"
    REPEATED: Final = "repeated"
    OVERFLOW: Final = "overflow"  # above the bound: nothing was stored; clear and read a snapshot
    UNKNOWN_SLOT: Final = "unknown slot"


class PrefixIndex:
    """See the module."""

    def __init__(self, block_tokens: int = BLOCK_TOKENS) -> None:
        """Args: block_tokens: tokens that one key stands for; other than 64 only in replays of traces with other blocks."""
        self.block_tokens = block_tokens
        self._masks: tuple[dict[int, int], ...] = tuple({} for _ in TABLES)
        self._slots: dict[int, Slot] = {}
        self._doubted: set[int] = set()
        self._alive = 0
        self._free_bits: list[int] = []
        self._next_bit = 0
        self._slot_of_bit: list[int] = []
        self._retired: deque[Retired] = deque()
        self._settling: deque[tuple[float, Expectation]] = deque()
        self._shared: dict[int, int] = {}  # equal masks are one object
        self._members: dict[int, Ints] = {}  # mask -> slots

    def __len__(self) -> int:
        """Distinct keys in GPU memory, those of retired lives included until the sweep."""
        return len(self._masks[GPU])

    # -- workers

    def add_slot(self, slot: int, capacity_tokens: int, *, by_history: bool, engine_blocks: int = 0) -> None:
        """A worker of which nothing is known yet.

        Args:
            slot: number that the caller gives it, not in use now.
            capacity_tokens: of its KV cache; bounds its history.
            by_history: no KV events are to be expected.
            engine_blocks: of all its tiers; bounds what its events may store. 0: from the capacity, in pages.
        """
        assert slot not in self._slots, f"slot {slot} is in use"
        blocks = engine_blocks or max(1, capacity_tokens // PAGE_SIZE)
        self._slots[slot] = Slot(self._new_life(slot), int(ENTRIES_OVER_BLOCKS * blocks) + STRIDE, max(0, capacity_tokens), by_history)
        self._start_history(self._slots[slot])

    def remove_slot(self, slot: int) -> None:
        """Forgets a worker at once; O(1). Unknown slots are ignored."""
        gone = self._slots.pop(slot, None)
        self._doubted.discard(slot)
        if gone is not None:
            self._retire(gone.life)
            if gone.building is not None:
                self._retire(gone.building)
            self._drop_bytes(gone)

    def clear(self, slot: int) -> None:
        """The worker holds nothing (restart, lost stream); O(1). Unknown slots are ignored."""
        entry = self._slots.get(slot)
        if entry is not None:
            self.drop_snapshot(slot)
            self._renew(entry)
            self._drop_bytes(entry)

    def clear_written(self, slot: int) -> None:
        """What events have written is void (AllBlocksCleared): of the snapshot that is being built, else of the worker; O(1)."""
        entry = self._slots.get(slot)
        if entry is not None and entry.building is not None:
            self.begin_snapshot(slot)
        elif entry is not None:
            self._renew(entry)
            self._drop_bytes(entry)

    def begin_snapshot(self, slot: int) -> None:
        """From now on `store` and `remove` build a new content beside the old one, which lookups still see; until `commit_snapshot`."""
        self.drop_snapshot(slot)
        entry = self._slots.get(slot)
        if entry is not None:
            entry.building = self._new_life(slot, visible=False)

    def commit_snapshot(self, slot: int) -> None:
        """The new content takes the old one's place, in O(1). The worker is judged by its events from now on. Without a begin: nothing."""
        entry = self._slots.get(slot)
        if entry is not None and entry.building is not None:
            old, entry.life, entry.building = entry.life, entry.building, None
            entry.by_history = False
            self._retire(old)
            self._alive |= 1 << entry.life.bit

    def drop_snapshot(self, slot: int) -> None:
        """What was built is thrown away."""
        entry = self._slots.get(slot)
        if entry is not None and entry.building is not None:
            self._retire(entry.building)
            entry.building = None

    def set_by_history(self, slot: int, *, by_history: bool) -> None:
        """Whether the worker's blocks are judged by our picks or by its events. A change begins from nothing; a snapshot under way stays."""
        entry = self._slots.get(slot)
        if entry is not None and entry.by_history != by_history:
            entry.by_history = by_history
            self._renew(entry)

    def set_doubted(self, slot: int, *, doubted: bool) -> None:
        """Whether a worker's hits count half: it has told nothing for a while. Unknown slots are ignored."""
        if slot in self._slots and doubted:
            self._doubted.add(slot)
        else:
            self._doubted.discard(slot)

    def is_by_history(self, slot: int) -> bool:
        entry = self._slots.get(slot)
        return entry is not None and entry.by_history

    def sweep(self, budget: int = 100_000) -> bool:
        """Clears up to `budget` entries of retired lives. Returns whether more is left."""
        while self._retired and budget > 0:
            retired = self._retired[0]
            budget = retired.step(budget, self._unset)
            if retired.done:
                self._retired.popleft()
                retired.life.history = None  # it has functions that have the life
                self._free_bits.append(retired.life.bit)
        return bool(self._retired)

    @property
    def is_told(self) -> bool:
        """Some of what is known of workers comes from other routers: hits may reach over blocks that are not held one by one."""
        return bool(self._masks[TOLD])

    @property
    def needs_ticks(self) -> bool:
        """There are bits to sweep, or expectations to drop when their time is over."""
        return bool(self._retired or self._settling)

    def held_tokens(self, slot: int) -> int:
        """Tokens in the worker's GPU cache as far as known; 0 for unknown slots. Events tell of all that it holds, history only of its keys."""
        entry = self._slots.get(slot)
        if entry is None:
            return 0
        life, of_bytes = entry.life, entry.of_bytes
        held = (len(life.history) if life.history is not None else life.held[GPU]) * self.block_tokens
        if entry.by_history and of_bytes is not None and of_bytes.history is not None:
            held += int(len(of_bytes.history) * entry.key_tokens)
        return held

    # -- KV events

    def store(self, slot: int, tier: int, group: int, engine_hash: int, chain: int, pages: int, inner: Sequence[int] = ()) -> str:
        """An engine block is held. Stored twice, it has to be removed twice.

        Args:
            chain: own chain key at the block's end.
            pages: depth of that end, in pages of 16 tokens.
            inner: keys of 64-token blocks that end inside this block, for engine blocks of more than 64 tokens.
        """
        entry = self._slots.get(slot)
        if entry is None:
            return StoreResult.UNKNOWN_SLOT
        life = entry.written
        book = life.books.setdefault((tier, group), {})
        if engine_hash in book:
            name = (tier, group, engine_hash)
            life.repeats[name] = life.repeats.get(name, 0) + 1
            return StoreResult.REPEATED
        if life.entries >= entry.limit_entries:
            return StoreResult.OVERFLOW
        life.entries += 1
        book[engine_hash] = chain << _DEPTH_BITS | pages
        if inner:
            life.inner[(tier, group, engine_hash)] = tuple(inner)
            for key in inner:
                self._hold(life, tier, key)
        if pages % STRIDE == 0:
            self._hold(life, tier, chain)
        return StoreResult.STORED

    def remove(self, slot: int, tier: int, group: int, engine_hash: int) -> bool:
        """One store of an engine block is taken back. Returns whether it was known."""
        entry = self._slots.get(slot)
        book = entry.written.books.get((tier, group)) if entry is not None else None
        if entry is None or book is None or engine_hash not in book:
            return False
        life, name = entry.written, (tier, group, engine_hash)
        more = life.repeats.get(name, 0)
        if more:
            if more == 1:
                del life.repeats[name]
            else:
                life.repeats[name] = more - 1
            return True
        packed = book.pop(engine_hash)
        if not book:
            del life.books[(tier, group)]
        life.entries -= 1
        for key in life.inner.pop(name, ()):
            self._drop(life, tier, key)
        if (packed & ((1 << _DEPTH_BITS) - 1)) % STRIDE == 0:
            self._drop(life, tier, packed >> _DEPTH_BITS)
        return True

    def resolve(self, slot: int, engine_hash: int) -> tuple[int, int] | None:
        """Own chain key and depth in pages of an engine block, whatever its tier and group. None when unknown."""
        entry = self._slots.get(slot)
        if entry is not None:
            for book in entry.written.books.values():
                packed = book.get(engine_hash)
                if packed is not None:
                    return packed >> _DEPTH_BITS, packed & ((1 << _DEPTH_BITS) - 1)
        return None

    def inner_keys(self, slot: int, engine_hash: int) -> tuple[int, ...]:
        """Keys that end inside an engine block of more than 64 tokens."""
        entry = self._slots.get(slot)
        if entry is not None and entry.written.inner:
            for tier, group in entry.written.books:
                if (found := entry.written.inner.get((tier, group, engine_hash))) is not None:
                    return found
        return ()

    # -- own picks

    def remember(self, slot: int, keys: Sequence[int]) -> None:
        """A prompt went to a worker that is judged by history. Others, and unknown ones, are ignored."""
        entry = self._slots.get(slot)
        if entry is not None and entry.life.history is not None:
            entry.life.history.use(keys)

    def expect(self, slot: int, keys: Sequence[int], hit_blocks: int, key_tokens: float = 0.0) -> Expectation | None:
        """A pick: the worker will hold the prompt's blocks behind its present hit, until `settle` or `cancel`.

        None where history judges (the prompt is remembered instead), and where nothing is new.
        """
        entry = self._slots.get(slot)
        if entry is None or not keys:
            return None
        history = self._bytes_history(entry, key_tokens) if key_tokens else entry.life.history
        if history is not None:
            history.use(keys)
            return None
        new = keys[hit_blocks:]
        if not new:
            return None
        for key in new:
            self._hold(entry.life, GPU, key)
        expectation = Expectation(entry.life, new)
        entry.life.expected[id(expectation)] = expectation
        return expectation

    def foresee(self, slot: int, prefix: Prefix, key_tokens: float = 0.0) -> Expectation | None:
        """A pick of another router, by some of its keys: as `expect`."""
        entry = self._slots.get(slot)
        prefix = checked(prefix)
        if entry is None or not prefix:
            return None
        life = entry.life
        history = self._bytes_history(entry, key_tokens) if key_tokens else life.history
        if history is not None:
            history.use_told(prefix)
            return None
        keys = [key for _, key in prefix]
        for key in keys:
            self._hold(life, TOLD, key)
        expectation = Expectation(life, keys, TOLD)
        life.expected[id(expectation)] = expectation
        return expectation

    def settle(self, expectation: Expectation, now: float) -> None:
        """The blocks are computed: events take over, after a grace in which they travel. `now` never falls."""
        self._settling.append((now + SETTLE_S, expectation))

    def cancel(self, expectation: Expectation) -> None:
        """The blocks will not be computed, or their time is over. Again is nothing."""
        if expectation.open:
            expectation.open = False
            if not expectation.life.gone:
                del expectation.life.expected[id(expectation)]
                for key in expectation.keys:
                    self._drop(expectation.life, expectation.table, key)

    def expire(self, now: float) -> None:
        """Drops the settled expectations whose grace is over."""
        settling = self._settling
        while settling and settling[0][0] <= now:
            self.cancel(settling.popleft()[1])

    def feedback(self, slot: int, predicted_tokens: int, actual_tokens: int, key_tokens: float = 0.0) -> None:
        """What a worker really had cached for one prompt corrects the size of its history."""
        entry = self._slots.get(slot)
        life = None if entry is None else entry.of_bytes if key_tokens else entry.life
        if life is not None and life.history is not None:
            tolerance = key_tokens + ESTIMATE_ERROR * predicted_tokens if key_tokens else self.block_tokens
            life.history.feedback(predicted_tokens, actual_tokens, tolerance)

    # -- lookup

    def runs(self, keys: Sequence[int], deepest_tier: int = GPU) -> list[Run]:
        """How deep each worker's hit is, in the tiers up to `deepest_tier` together; workers without a hit are absent."""
        if not keys:
            return []
        get = self._masks[GPU].get if deepest_tier == GPU else self._getter(deepest_tier)
        n, at, out = len(keys), 0, []
        left = get(keys[0], 0) & self._alive
        while left:
            good, step = at, 1
            while good + step < n and get(keys[good + step], 0) & left == left:
                good += step
                step <<= 1
            bad = min(good + step, n)
            while bad - good > 1:
                middle = (good + bad) >> 1
                if get(keys[middle], 0) & left == left:
                    good = middle
                else:
                    bad = middle
            stay = get(keys[bad], 0) & left if bad < n else 0
            out.append((left & ~stay, bad))
            left, at = stay, bad
        return out

    def hits(self, keys: Sequence[int], num_slots: int, key_tokens: float = 0.0) -> tuple[Floats, Floats | None, Floats | None]:
        """Tokens of the prompt that each slot holds in GPU, and those that only host memory or only disk add; None where a tier is empty.

        Returns: arrays over slots 0..num_slots-1.
        """
        gpu = self._vector(self.runs(keys), num_slots, key_tokens)
        if self._masks[TOLD]:
            gpu = np.maximum(gpu, self._vector(self._told_runs(keys), num_slots, key_tokens))
        if key_tokens or not (self._masks[HOST] or self._masks[DISK]) or not keys:
            return gpu, None, None
        with_host = self._vector(self.runs(keys, HOST), num_slots)
        with_disk = self._vector(self.runs(keys, DISK), num_slots) if self._masks[DISK] else with_host
        return gpu, np.maximum(with_host - gpu, 0.0), np.maximum(with_disk - np.maximum(with_host, gpu), 0.0)

    def few_hits(self, keys: Sequence[int], num_slots: int, key_tokens: float = 0.0) -> list[float] | None:
        """`hits` of few slots without arrays; None where more is known than what is in GPU memory, or a worker is doubted."""
        masks = self._masks
        if masks[TOLD] or self._doubted or (not key_tokens and (masks[HOST] or masks[DISK])):
            return None
        out = [0.0] * num_slots
        block_tokens = key_tokens or self.block_tokens
        for mask, blocks in self.runs(keys):
            while mask:
                lowest = mask & -mask
                out[self._slot_of_bit[lowest.bit_length() - 1]] = blocks * block_tokens
                mask ^= lowest
        return out

    def hit_blocks(self, slot: int, keys: Sequence[int]) -> int:
        """Blocks of the prompt in one worker's GPU cache, by a walk over its own bit: right even where events were lost."""
        entry = self._slots.get(slot)
        if entry is None:
            return 0
        bit, get, depth = 1 << entry.life.bit, self._masks[GPU].get, 0
        for key in keys:
            if not get(key, 0) & bit:
                break
            depth += 1
        return depth

    def check_integrity(self) -> None:
        """Raises AssertionError when the tables disagree."""
        seen: tuple[dict[int, int], ...] = tuple({} for _ in TABLES)
        for slot, entry in self._slots.items():
            assert entry.life.entries == sum(len(book) for book in entry.life.books.values()) <= entry.limit_entries
            assert (entry.life.history is not None) == entry.by_history
            for life in (entry.life, *([entry.of_bytes] if entry.of_bytes is not None else [])):
                self._check_life(slot, life, seen)
        of_bytes = [e.of_bytes.bit for e in self._slots.values() if e.of_bytes is not None]
        assert bin(self._alive).count("1") == len(self._slots) + len(of_bytes)
        building = [e.building.bit for e in self._slots.values() if e.building is not None]
        bits = [e.life.bit for e in self._slots.values()] + of_bytes + building + [r.life.bit for r in self._retired] + self._free_bits
        assert sorted(bits) == list(range(self._next_bit))
        for tier in TABLES:
            assert {k: m & self._alive for k, m in self._masks[tier].items() if m & self._alive} == seen[tier]
            assert self._retired or building or all(m and not m & ~self._alive for m in self._masks[tier].values())

    # -- inside

    def _check_life(self, slot: int, life: Life, seen: tuple[dict[int, int], ...]) -> None:
        """Adds what it holds to `seen`: per tier key -> mask."""
        assert life.slot == slot and not life.gone and self._alive >> life.bit & 1 and self._slot_of_bit[life.bit] == slot
        if life.history is not None:
            life.history.check_integrity()
        for tier in TABLES:
            held = {key for key, mask in self._masks[tier].items() if mask >> life.bit & 1}
            assert life.held[tier] == len(held), (slot, tier)
            assert life.extra[tier].keys() <= held and all(n > 0 for n in life.extra[tier].values())
            for key in held:
                seen[tier][key] = seen[tier].get(key, 0) | 1 << life.bit

    def _new_life(self, slot: int, *, visible: bool = True) -> Life:
        if self._free_bits:
            bit = self._free_bits.pop()
        else:
            bit, self._next_bit = self._next_bit, self._next_bit + 1
            self._slot_of_bit.append(0)
        self._slot_of_bit[bit] = slot
        if visible:
            self._alive |= 1 << bit
        self._members.clear()
        return Life(bit, slot)

    def _renew(self, entry: Slot) -> None:
        self._retire(entry.life)
        entry.life = self._new_life(entry.life.slot)
        self._start_history(entry)

    def _start_history(self, entry: Slot) -> None:
        if entry.by_history:
            entry.life.history = self._new_history(entry.life, entry.capacity_tokens // self.block_tokens)

    def _new_history(self, life: Life, capacity_blocks: int) -> History:
        return History(
            capacity_blocks, lambda key: self._hold(life, GPU, key), lambda key: self._drop(life, GPU, key),
            lambda key: self._hold(life, TOLD, key), lambda key: self._drop(life, TOLD, key),
        )  # fmt: skip

    def _bytes_history(self, entry: Slot, key_tokens: float) -> History:
        """Of a worker's keys of bytes, with room for as many as its cache holds."""
        capacity = int(entry.capacity_tokens / key_tokens)
        if entry.of_bytes is None:
            entry.of_bytes = self._new_life(entry.life.slot)
            entry.of_bytes.history = self._new_history(entry.of_bytes, capacity)
        history = entry.of_bytes.history
        assert history is not None
        if key_tokens != entry.key_tokens:
            entry.key_tokens = key_tokens
            history.resize(capacity)
        return history

    def _drop_bytes(self, entry: Slot) -> None:
        if entry.of_bytes is not None:
            self._retire(entry.of_bytes)
            entry.of_bytes = None

    def _retire(self, life: Life) -> None:
        life.gone = True
        self._alive &= ~(1 << life.bit)
        self._members.clear()
        self._retired.append(Retired(life, _keys_of(life)))

    def _hold(self, life: Life, tier: int, key: int) -> None:
        masks, bit = self._masks[tier], 1 << life.bit
        mask = masks.get(key, 0)
        if mask & bit:
            extra = life.extra[tier]
            extra[key] = extra.get(key, 0) + 1
        else:
            masks[key] = self._share(mask | bit)
            life.held[tier] += 1

    def _drop(self, life: Life, tier: int, key: int) -> None:
        extra = life.extra[tier]
        more = extra.get(key, 0)
        if more > 1:
            extra[key] = more - 1
        elif more:
            del extra[key]
        else:
            self._unset(life, tier, key)

    def _unset(self, life: Life, tier: int, key: int) -> None:
        masks = self._masks[tier]
        mask = masks.get(key, 0)
        if not mask >> life.bit & 1:
            return
        life.held[tier] -= 1
        left = mask & ~(1 << life.bit)
        if left:
            masks[key] = self._share(left)
        else:
            del masks[key]
            if not masks:
                masks.clear()  # an empty dict keeps its table else

    def _share(self, mask: int) -> int:
        if mask < 256:
            return mask  # the interpreter shares these itself
        if len(self._shared) > _MASK_CACHE:
            self._shared.clear()
        return self._shared.setdefault(mask, mask)

    def _told_runs(self, keys: Sequence[int]) -> list[Run]:
        """The deepest told key of each worker, as far as these are keys of the prompt."""
        get, left, out = self._masks[TOLD].get, self._alive, []
        for depth in reversed(depths_up_to(len(keys))):
            mask = get(keys[depth - 1], 0) & left
            if mask:
                out.append((mask, depth))
                left &= ~mask
        return out

    def _getter(self, deepest_tier: int) -> Callable[[int, int], int]:
        gets = [self._masks[tier].get for tier in TIERS[: deepest_tier + 1]]

        def get(key: int, default: int) -> int:
            mask = default
            for one in gets:
                mask |= one(key, 0)
            return mask

        return get

    def _vector(self, runs: list[Run], num_slots: int, key_tokens: float = 0.0) -> Floats:
        out = np.zeros(num_slots)
        block_tokens = key_tokens or self.block_tokens
        for mask, blocks in runs:
            members = self._members.get(mask)
            if members is None:
                members = self._list_members(mask)
            out[members] = blocks * block_tokens
        if self._doubted and not key_tokens:
            out[[slot for slot in self._doubted if slot < num_slots]] *= 0.5
        return out

    def _list_members(self, mask: int) -> Ints:
        """Slots of a mask."""
        raw = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), np.uint8)
        bits = np.flatnonzero(np.unpackbits(raw, bitorder="little"))
        members = np.asarray(self._slot_of_bit, np.intp)[bits]
        if len(self._members) > _MASK_CACHE:
            self._members.clear()
        self._members[mask] = members
        return members


def _keys_of(life: Life) -> Iterator[tuple[int, int]]:
    """(tier, key) of all that a life held, some twice."""
    if life.history is not None:
        yield from ((GPU, key) for key in life.history.held_keys())
        yield from ((TOLD, key) for key in life.history.told_keys())
    for (tier, group), book in life.books.items():
        for engine_hash, packed in book.items():
            if (packed & ((1 << _DEPTH_BITS) - 1)) % STRIDE == 0:
                yield tier, packed >> _DEPTH_BITS
            for key in life.inner.get((tier, group, engine_hash), ()):
                yield tier, key
    for expectation in list(life.expected.values()):
        for key in expectation.keys:
            yield expectation.table, key
