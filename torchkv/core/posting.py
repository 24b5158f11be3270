"""What callers do to the loop's state: open flows, start ops, finish. Compiled, with the GIL: one caller at a time."""

from __future__ import annotations

from torchkv.arrays import Int64Array
from torchkv.core import journal
from torchkv.core.loop import grants
from torchkv.core.loop.codes import COMPARE, FINISH, OPEN, POST, ROUND, START, WAIT, WAITING
from torchkv.core.loop.grants import IDS_AT
from torchkv.core.loop.limits import COMMANDS
from torchkv.core.loop.mailbox import NAPPING, may_run, ring
from torchkv.core.loop.state.addresses import repeat_at, way_at, world_at
from torchkv.core.loop.state.requests import Send
from torchkv.core.loop.state.world import World, word_at
from torchkv.host.atomics import fence, load, store
from torchkv.host.copy_loops import copy_bytes
from torchkv.host.jit import c_function, compiled_with_gil
from torchkv.host.page_id_check import copy_ids

__all__ = [
    "add_writer",
    "begin",
    "bind",
    "finish_send",
    "hand_over",
    "meet",
    "open_receive",
    "open_round",
    "open_send",
    "post_grant",
    "post_receive",
    "remember",
    "start_again",
    "start_more",
    "start_op",
    "wait_for_grant",
]


_call_compare = c_function(3, 32)

_TAIL = word_at("command_tail")


@compiled_with_gil
def _command(world: World, kind: int, index: int) -> None:
    """There is always room: no op and no flow has two commands in the ring. `Runner.told` is to be called next."""
    tail = world["command_tail"]
    world["commands"][tail & (COMMANDS - 1)] = kind | index << 8
    store(world["address"] + _TAIL, tail + 1)
    if world["network"] > 0:
        world["driving"] = 1  # at once: Python's thread would take turns with the loop at the transport's lock
    fence()
    if may_run(world):
        return
    # An op does not end the loop's nap: to wake it would cost the caller more than the rest of the verb.
    if kind != START or load(world["bell"]) != NAPPING:
        ring(world, world["bell"])


@compiled_with_gil
def open_send(
    address: int,
    flow: int,
    way: int,
    network: int,
    serial: int,
    begun: int,
    peer_flow: int,
    generation: int,
    ids: Int64Array,
) -> None:
    """Makes a free flow a send under a grant of the pages ``ids``, and of the slot behind them if it is owed state.

    way: address of a `Way`. The rest: see `Send`.
    """
    world = world_at(address)
    send = world["sends"][flow]
    _begin(send, way, network, serial, begun)
    send["peer_flow"], send["generation"] = peer_flow, generation
    num_pages = len(ids) - (1 if send["max_slot"] > 0 else 0)
    send["ids"], send["granted"] = ids.ctypes.data, num_pages * send["dst_page"]
    world["network"] += network & 1
    send["state"] = OPEN


@compiled_with_gil
def wait_for_grant(
    address: int, flow: int, way: int, network: int, serial: int, begun: int, hash0: int, hash1: int, writers: int
) -> None:
    """Makes a free flow a send that waits for a grant. way: address of a `Way`. The rest: see `Send`."""
    world = world_at(address)
    send = world["sends"][flow]
    _begin(send, way, network, serial, begun)
    send["hash0"], send["hash1"], send["writers"] = hash0, hash1, writers
    send["generation"] = 0
    send["first"] = send["last"] = send["reach"] = -1
    world["network"] += network & 1
    send["state"] = WAITING
    _command(world, WAIT, flow)


@compiled_with_gil
def bind(
    address: int,
    flow: int,
    way: int,
    network: int,
    serial: int,
    begun: int,
    hash0: int,
    hash1: int,
    writers: int,
    reach: int,
    prefixed: int,
) -> bool:
    """Makes a free flow a send under a grant that is there: see `grants.meet`. False, and nothing is done, if none is.

    way: address of a `Way`. reach: the last page that is sent, as far as is known. The rest: see `Send`.
    """
    world = world_at(address)
    send = world["sends"][flow]
    _begin(send, way, network, serial, begun)
    send["hash0"], send["hash1"], send["writers"] = hash0, hash1, writers
    send["reach"] = reach
    if not grants.meet(world, flow, prefixed):
        return False
    world["network"] += network & 1
    send["state"] = OPEN
    return True


@compiled_with_gil
def whose(address: int, hash0: int, hash1: int) -> int:
    """See `grants.whose`."""
    return grants.whose(world_at(address), hash0, hash1)


@compiled_with_gil
def meet(
    address: int,
    flow: int,
    way: int,
    network: int,
    serial: int,
    begun: int,
    hash0: int,
    hash1: int,
    writers: int,
    index: int,
    positions: Int64Array,
    given: Int64Array,
    ids: Int64Array,
    start: int,
    gate: int,
    gate_stream: int,
    gate_number: int,
    verb: int,
    num_pages: int,
    prefixed: int,
    like: int,
) -> bool:
    """As `bind`, then `start_more`. False, and nothing is done, if a page is not in [0, num_pages), too."""
    if not copy_ids(given, ids, num_pages):
        return False
    reach = start + len(ids) - 1
    if not bind(address, flow, way, network, serial, begun, hash0, hash1, writers, reach, prefixed):
        return False
    start_op(address, index, flow, 0, positions, ids, start, gate, gate_stream, gate_number, verb, 0)
    remember(address, like, flow, ids, ids, start, verb)
    return True


@compiled_with_gil
def _begin(send: Send, address: int, network: int, serial: int, begun: int) -> None:
    """What is the same for every send that begins. address: of its `Way`."""
    way = way_at(address)
    send["peer"], send["max_page"], send["max_slot"] = way["peer"], way["max_page"], way["max_slot"]
    send["geometry"], send["packs"] = way["geometry"], way["packs"]
    send["kernels"], send["state_kernels"] = way["kernels"], way["state_kernels"]
    send["src_page"], send["dst_page"] = way["src_page"], way["dst_page"]
    send["staged"], send["promise"], send["network"] = way["staged"], way["staged"], network
    send["serial"], send["begun"] = serial, begun
    send["running"] = send["aux"] = send["aux_nbytes"] = send["due"] = send["started"] = send["moved"] = 0
    send["verb"] = send["operation"] = 0
    send["gated"] = send["flying"] = send["hinted"] = 0
    send["ids_used"] = send["src_at"] = send["src_count"] = 0
    send["num_pages"] = -1


@compiled_with_gil
def start_op(
    address: int,
    index: int,
    flow: int,
    of_state: int,
    positions: Int64Array,
    ids: Int64Array,
    start: int,
    gate: int,
    gate_stream: int,
    gate_number: int,
    verb: int,
    staged: int,
) -> None:
    """Has the loop copy the pages ``ids`` of the layers at these positions of the plan. The arrays must stay alive.

    of_state: 1 if the positions are of states, and ``ids`` is the slot. gate, gate_stream, gate_number, verb: see `Op`.
    staged: 1 if they are staged, although the send may say otherwise; 2 if that is also promised: nothing of the send
    has been, or will be, written in another way.
    """
    world = world_at(address)
    op = world["ops"][index]
    op["flow"], op["of_state"] = flow, of_state
    op["ids"], op["count"], op["start"] = ids.ctypes.data, len(ids), start
    send = world["sends"][flow]
    if staged == 2 and send["promise"] == 0:
        send["promise"] = 1
    staged = 1 if staged != 0 or send["staged"] != 0 else 0
    _start(world, index, positions, gate, gate_stream, gate_number, verb, staged)


@compiled_with_gil
def _start(
    world: World,
    index: int,
    positions: Int64Array,
    gate: int,
    gate_stream: int,
    gate_number: int,
    verb: int,
    staged: int,
) -> None:
    """Starts an op whose flow and pages are set."""
    op = world["ops"][index]
    op["positions"], op["num_positions"] = positions.ctypes.data, len(positions)
    op["at"] = op["segment"] = op["ordinal"] = op["told"] = op["group"] = op["nbytes"] = op["runs"] = 0
    op["gate"], op["gate_stream"], op["gate_number"] = gate, gate_stream, gate_number
    op["posted"] = op["until"] = op["arrived"] = op["mark"] = op["operation"] = 0
    op["pieces"] = op["piece"] = op["spared"] = 0
    op["verb"], op["staged"] = verb, staged
    _command(world, START, index)


@compiled_with_gil
def start_more(
    address: int,
    index: int,
    flow: int,
    positions: Int64Array,
    given: Int64Array,
    ids: Int64Array,
    num_pages: int,
    start: int,
    gate: int,
    gate_stream: int,
    gate_number: int,
    verb: int,
    like: int,
    checked: Int64Array,
) -> bool:
    """Copies ``given`` to ``ids``, and starts an op of these pages, unless one is not in [0, num_pages).

    like, checked: see `remember`.
    """
    if not copy_ids(given, ids, num_pages):
        return False
    start_op(address, index, flow, 0, positions, ids, start, gate, gate_stream, gate_number, verb, 0)
    remember(address, like, flow, checked, ids, start, verb)
    return True


@compiled_with_gil
def remember(address: int, like: int, flow: int, checked: Int64Array, ids: Int64Array, start: int, verb: int) -> None:
    """Notes what an op of the pages ``ids`` was, for `start_again`. The arrays must stay alive.

    like: address of a `Repeat`. checked: the page ids that its caller gave.
    """
    repeat = repeat_at(like)
    repeat["flow"], repeat["checked"], repeat["given"] = flow, checked.ctypes.data, len(checked)
    repeat["ids"], repeat["count"], repeat["start"] = ids.ctypes.data, len(ids), start
    repeat["verb"], repeat["staged"] = verb, world_at(address)["sends"][flow]["staged"]


@compiled_with_gil
def start_again(
    address: int,
    index: int,
    like: int,
    positions: Int64Array,
    given: Int64Array,
    gate: int,
    gate_stream: int,
    gate_number: int,
) -> bool:
    """Starts an op like one before, for these layers; False if ``given`` are other page ids than it had been given.

    like: address of a `Repeat`. Reads nothing that the loop writes while it copies the ops before this one.
    """
    world, repeat = world_at(address), repeat_at(like)
    compare, nbytes = world["functions"][COMPARE], 8 * repeat["given"]
    if len(given) != repeat["given"] or _call_compare(compare, given.ctypes.data, repeat["checked"], nbytes) != 0:
        return False
    op = world["ops"][index]
    op["flow"], op["of_state"] = repeat["flow"], 0
    op["ids"], op["count"], op["start"] = repeat["ids"], repeat["count"], repeat["start"]
    _start(world, index, positions, gate, gate_stream, gate_number, repeat["verb"], repeat["staged"])
    return True


@compiled_with_gil
def begin(
    address: int,
    flow: int,
    way: int,
    network: int,
    serial: int,
    begun: int,
    peer_flow: int,
    generation: int,
    granted: Int64Array,
    index: int,
    positions: Int64Array,
    given: Int64Array,
    ids: Int64Array,
    num_pages: int,
    start: int,
    gate: int,
    gate_stream: int,
    gate_number: int,
    verb: int,
    like: int,
) -> bool:
    """As `open_send`, then `start_more`. False, and nothing is done, if a page is not in [0, num_pages)."""
    if not copy_ids(given, ids, num_pages):
        return False
    open_send(address, flow, way, network, serial, begun, peer_flow, generation, granted)
    start_op(address, index, flow, 0, positions, ids, start, gate, gate_stream, gate_number, verb, 0)
    remember(address, like, flow, ids, ids, start, verb)
    return True


@compiled_with_gil
def finish_send(address: int, flow: int, num_pages: int, aux: int, aux_nbytes: int, verb: int) -> None:
    """Has the loop seal the send once its ops have ended. aux: the address of its bytes, which must stay alive."""
    world = world_at(address)
    send = world["sends"][flow]
    send["verb"] = verb
    send["aux"], send["aux_nbytes"] = aux, aux_nbytes
    send["finish"] = num_pages
    _command(world, FINISH, flow)


@compiled_with_gil
def open_receive(
    address: int,
    flow: int,
    generation: int,
    num_tokens: int,
    page_size: int,
    leader: int,
    told: int,
    cover: Int64Array,
    ids: int,
    unpacks: int,
) -> None:
    """Makes a free flow a receive. cover: int64 ``[writers, positions, ...]``. The rest: see `Receive`."""
    world = world_at(address)
    receive = world["receives"][flow]
    receive["generation"], receive["num_tokens"], receive["page_size"] = generation, num_tokens, page_size
    receive["leader"], receive["told"] = leader, told
    receive["positions"], receive["cover"] = cover.shape[1], cover.ctypes.data
    receive["num_writers"] = receive["nbytes"] = receive["serial"] = receive["operation"] = 0
    receive["ids"], receive["unpacks"] = ids, unpacks
    receive["pieces"] = receive["unpacking"] = receive["stopped"] = 0


@compiled_with_gil
def add_writer(
    address: int,
    flow: int,
    rank: int,
    layers: int,
    states: int,
    page_size: int,
    geometry: int,
    kernels: int,
    last: int,
) -> None:
    """Adds a writer; with the ``last`` one the receive takes records."""
    world = world_at(address)
    receive = world["receives"][flow]
    writer = receive["writers"][receive["num_writers"]]
    writer["rank"], writer["page_size"] = rank, page_size
    writer["layers"], writer["states"] = layers, states
    writer["geometry"], writer["kernels"], writer["sealing"], writer["ring_only"] = geometry, kernels, 0, 0
    writer["sealed"], writer["flow"], writer["aux_nbytes"], writer["told"] = -1, 0, 0, 0
    receive["num_writers"] += 1
    if last != 0:
        receive["state"] = OPEN


@compiled_with_gil
def post_grant(
    address: int,
    flow: int,
    body: int,
    hash0: int,
    hash1: int,
    writers: int,
    prefix: int,
    name_nbytes: int,
    ids: Int64Array,
    num_slots: int,
    serial: int,
) -> None:
    """Has the loop tell a receive's writers of its grant, whose body goes to the address ``body``: see `Grant`.

    num_slots: how many of the ``ids`` are a state slot. serial: see `Receive`.
    """
    world = world_at(address)
    world["receives"][flow]["serial"] = serial
    store(body, 0)  # whoever reads the slot now finds no grant
    fence()
    words = (hash0, hash1, writers, prefix, len(ids) - num_slots, name_nbytes, num_slots)
    for i in range(len(words)):
        store(body + 8 * (i + 1), words[i])
    copy_bytes(body + IDS_AT, ids.ctypes.data, 8 * len(ids))
    store(body, world["receives"][flow]["generation"])
    _command(world, POST, flow)


@compiled_with_gil
def post_receive(
    address: int,
    flow: int,
    generation: int,
    num_tokens: int,
    page_size: int,
    leader: int,
    told: int,
    cover: Int64Array,
    rank: int,
    layers: int,
    states: int,
    writer_page: int,
    body: int,
    hash0: int,
    hash1: int,
    writers: int,
    prefix: int,
    name_nbytes: int,
    ids: Int64Array,
    num_slots: int,
    serial: int,
    geometry: int,
    kernels: int,
) -> None:
    """`open_receive`, `add_writer` and `post_grant` in one, of a receive from one writer.

    ids: must stay alive if there is a ``geometry``.
    """
    unpacks = 1 if geometry != 0 else 0
    open_receive(address, flow, generation, num_tokens, page_size, leader, told, cover, ids.ctypes.data, unpacks)
    add_writer(address, flow, rank, layers, states, writer_page, geometry, kernels, 1)
    post_grant(address, flow, body, hash0, hash1, writers, prefix, name_nbytes, ids, num_slots, serial)


@compiled_with_gil
def open_round(address: int, index: int, members: Int64Array) -> None:
    """Has the loop lead a round. members: int64 ``[n, 4]``, see `Round`; the array must stay alive."""
    world = world_at(address)
    round_ = world["rounds"][index]
    round_["members"], round_["num_members"] = members.ctypes.data, len(members)
    _command(world, ROUND, index)


@compiled_with_gil
def hand_over(address: int, number: int) -> None:
    """Python records an operation from now on. While the loop stands still."""
    journal.hand_over(world_at(address), number)
