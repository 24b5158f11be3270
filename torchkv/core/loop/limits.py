"""How much a resident loop holds, and how large its parts are."""

MAX_FLOWS = 512  # of each kind: requests under way on the loop; more go through Python
MAX_OPS = 8192  # verbs that wait or copy
MAX_PEERS = 64  # this rank included; requests with others go through Python
MAX_WRITERS = 8  # of one receive
MAX_EVENTS = 8192  # a power of two, as are the four below
MAX_UNCLAIMED = 1024  # grants that Python has left for the verbs that begin their requests
COMMANDS = 16384  # at least one per op and one per flow, so that the ring is never full
# Messages that wait for room: at most one per send, round and writer of a receive, two per receive and peer; and
# VERDICTs of receives that are over, one per flow of each peer, while the flows are other receives' already.
DUE = 65536
MAILBOX_RECORDS = 256  # records of one mailbox
MAX_INTERVALS = 4  # of the tokens that have arrived of a layer: enough for chunks in order
MAX_COPIERS = 15  # threads that copy with the loop
SCRATCH = 1024  # page pairs that are copied in one go
AUX_PART = 32  # bytes of aux in one record
MAX_AUX = 256  # longer ones go through Python
MAX_GRANTED = 8192  # pages of a grant; larger ones go through Python, as do longer names
MAX_NAME = 1024  # bytes
GRANTED_IDS = MAX_GRANTED + 1  # of a grant: page ids, and behind them a state slot
MAX_PREFIX = 1 << 40  # tokens that a receiver holds already
BUCKETS = 1024  # of the table of sends that wait for their grant; a power of two
MAX_GPU_SENDS = 128  # as MAX_FLOWS, of sends whose pages lie on a GPU
IDS = GRANTED_IDS + MAX_GRANTED  # page ids on the GPU that kernels of one send find there
FLIGHT = 5_000_000  # nanoseconds for which a loop and its callers spin at most while kernels are under way
MAX_FLYING = 256  # ops whose kernels are enqueued; a stream takes about a thousand operations before it blocks
PIECES = 64  # that are packed for one peer, and not told
UNPACKINGS = 128  # pieces that kernels unpack, and records behind them; a power of two
UNPACK_IDS = 4 * MAX_GRANTED  # page ids that these kernels find on the GPU
GRAIN = 16  # bytes: what kernels pack begins at multiples of it, their widest words
MAX_ROUNDS = MAX_FLOWS  # verdicts of an instance that are being reached on its leader
GATES = 8  # streams of which one step remembers an event that has not happened
PARAM_WORDS = 32  # the most words of the last argument of `torchkv.transport.NativeChannel`'s functions
LINE = 128  # bytes that cores pass to each other: a cache line, and the one that is fetched with it
RECORD_NBYTES = 64
MESSAGE_NBYTES = 2048  # of the network at most: a record and what lies behind it. Transports carry as much in one piece

# A `PlanSegment` of one layer, as compiled code reads it: see `torchkv.transfer.loop_geometry`.
SEGMENT_FIELDS = 29
LAUNCH_FIELDS = 20  # of the layers of a plan that one kernel copies: see `torchkv.transfer.launch_table`
