"""Rounds: how the loops of an instance agree that a request has succeeded on all of its ranks. Compiled.

`torchkv.protocol.instance` has the rules. The leader's Python knows which posts belong together, and opens a round for
them on its loop. From then on loops do the rest:

    member --POSTED--> leader    I have granted pages for this name: for the leader's Python, which opens the round
    member --DONE----> leader    my part is complete, and I leave it to you whether the request has succeeded
    leader --DECIDED-> member    all parts are complete: tell the writers, and the caller

A part may be complete before its round is open, so the latest of each flow is remembered. Whatever fails, Python takes
the receive back on the member, or the round on the leader. It does not matter if a DONE or a DECIDED is still on its
way then: both name a generation, and Python judges those that no loop expects.
"""

from __future__ import annotations

from torchkv.core.loop.codes import DECIDED, DONE, FREE, OPEN, POSTED, ROUND_OVER, STRAY, SUCCEEDED, VOTED
from torchkv.core.loop.events import emit
from torchkv.core.loop.limits import MAX_FLOWS
from torchkv.core.loop.mailbox import GRANT_SLOT, GRANTS_AT, owe, ring, room, tell, tell_brief, write_brief
from torchkv.core.loop.receiving import succeed
from torchkv.core.loop.state.peers import Record
from torchkv.core.loop.state.world import World, grant_word_at
from torchkv.host.atomics import load
from torchkv.host.jit import compiled

__all__ = ["begin_round", "drop_round", "on_decided", "on_done", "pay_decided", "pay_done", "pay_posted"]

_MEMBER = 32  # bytes of a member of a round
_HASH0, _HASH1 = grant_word_at("hash0"), grant_word_at("hash1")
_PREFIX, _NUM_PAGES = grant_word_at("prefix"), grant_word_at("num_pages")

# ---------------------------------------------------------------- the leader


@compiled
def begin_round(world: World, index: int) -> None:
    """Waits for the parts that are not complete yet."""
    missing = 0
    number = world["rounds"][index]["num_members"]
    for i in range(number):
        at = world["rounds"][index]["members"] + i * _MEMBER
        rank, flow, generation = load(at), load(at + 8), load(at + 16)
        if load(at + 24) != 0 or world["votes"][rank][flow] == generation:
            continue
        world["awaited"][rank][flow] = generation
        world["rounds_of"][rank][flow] = index + 1
        missing += 1
    world["rounds"][index]["missing"] = missing
    world["rounds"][index]["next"] = 0
    world["rounds"][index]["state"] = OPEN
    if missing == 0:
        owe(world, DECIDED, 0, index, 0)


@compiled
def on_done(world: World, source: int, flow: int, generation: int) -> bool:
    """A part is complete. False if no round waits for it, so that Python should know."""
    if flow >= MAX_FLOWS:
        return False
    world["votes"][source][flow] = generation
    index = world["rounds_of"][source][flow] - 1
    if index < 0 or world["awaited"][source][flow] != generation:
        return False
    world["rounds_of"][source][flow] = 0
    world["rounds"][index]["missing"] -= 1
    if world["rounds"][index]["missing"] == 0:
        owe(world, DECIDED, 0, index, 0)
    return True


@compiled
def pay_decided(world: World, index: int) -> bool:
    """Tells the members of a round that the request has succeeded; False where a mailbox is full."""
    round_ = world["rounds"][index]
    while round_["next"] < round_["num_members"]:
        at = round_["members"] + round_["next"] * _MEMBER
        rank, flow, generation = load(at), load(at + 8), load(at + 16)
        if not _tell(world, rank, DECIDED, flow, generation):
            return False
        round_["next"] += 1
    round_["state"] = FREE
    emit(world, ROUND_OVER, index, 0)  # last: from here on the index may be another round's
    return True


@compiled
def drop_round(world: World, index: int) -> None:
    """Nothing is counted for a round any more. For a caller that holds the lock, and has settled."""
    round_ = world["rounds"][index]
    for i in range(round_["num_members"]):
        at = round_["members"] + i * _MEMBER
        if world["rounds_of"][load(at)][load(at + 8)] == index + 1:
            world["rounds_of"][load(at)][load(at + 8)] = 0
    round_["state"] = FREE


# ---------------------------------------------------------------- a member


@compiled
def pay_posted(world: World, rank: int, flow: int, generation: int) -> bool:
    """Tells the leader what this rank has posted; False where its mailbox is full."""
    receive = world["receives"][flow]
    if receive["state"] in (FREE, SUCCEEDED) or receive["generation"] != generation:
        return True  # it has ended, or Python has taken the flow back, and tells the leader itself
    peer = world["peers"][rank]
    if room(world, peer) < 1:
        return False
    body = world["bell"] + GRANTS_AT + flow * GRANT_SLOT
    record: Record = world["record"]
    record["head"], record["flows"], record["generation"] = POSTED | receive["told"] << 8, flow, generation
    record["lo"], record["hi"] = load(body + _HASH0), load(body + _HASH1)
    record["nbytes"], record["spare"] = load(body + _PREFIX), load(body + _NUM_PAGES)
    tell(world, peer)
    ring(world, peer["bell"])
    return True


@compiled
def pay_done(world: World, rank: int, flow: int, generation: int) -> bool:
    """Tells the leader that this rank's part is complete; False where its mailbox is full."""
    receive = world["receives"][flow]
    if receive["state"] != VOTED or receive["generation"] != generation:
        return True  # Python has taken the flow back, and tells the leader itself
    return _tell(world, rank, DONE, flow, generation)


@compiled
def on_decided(world: World, source: int, flow: int, generation: int) -> bool:
    """The leader says that the request has succeeded. False if this is for no flow here."""
    if flow >= MAX_FLOWS:
        return False
    receive = world["receives"][flow]
    if receive["state"] != VOTED or receive["leader"] != source or receive["generation"] != generation:
        return False
    succeed(world, flow)
    return True


# ---------------------------------------------------------------- both


@compiled
def _tell(world: World, rank: int, kind: int, flow: int, generation: int) -> bool:
    """Sends DONE or DECIDED to a rank, which may be this one; False where its mailbox is full."""
    if rank != world["rank"]:
        return tell_brief(world, rank, kind, flow, generation)
    write_brief(world, kind, flow, generation)
    known = on_done(world, rank, flow, generation) if kind == DONE else on_decided(world, rank, flow, generation)
    if not known:
        emit(world, STRAY, 0, rank)
    return True
