"""What the numbers in a resident loop's state mean: states, kinds, commands, indices."""

# States of a flow, or a round. WAITING: a send without a grant. LEAVING: all that comes for the flow is Python's.
# VOTED: a receive that is complete, as the leader of the instance is told. SUCCEEDED: the loop has ended the request,
# and Python, which need not know it yet, will free the flow.
FREE, OPEN, SEALED, LEAVING, WAITING, VOTED, SUCCEEDED = 0, 1, 2, 3, 4, 5, 6

# Kinds of records. POSTED to DECIDED go between a rank and the leader of its instance, HELLO through the network only,
# STAGED, CREDIT and PROMISE between the ends of a standing stage. HEARD goes nowhere: a record that was taken before
# those in front of it becomes one.
WRITTEN, AUX, SEAL, VERDICT, GRANT, POSTED, DONE, DECIDED, HELLO, STAGED, CREDIT = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11
HEARD, PROMISE = 0, 12

# Who declares that a complete receive has succeeded, if not the loop of the rank that leads the instance. ALONE: this
# loop, for there are no other ranks. NOBODY: no loop; Python asks the leader.
ALONE, NOBODY = -1, -2

# Kinds of events; from ALL_HERE on they wake Python's thread. BOUND: a send that waited has its grant. GRANTED: a
# grant that the loop has bound to none; ``lo`` and ``hi`` of its record are the hash of the name. ROUND_OVER: all
# ranks of a round have been told that it has succeeded. ALL_HERE: a receive of which the loop does not know whether
# it is complete, although all of its writers have sealed; or on which others decide by messages. STRAY: a record that
# Python judges, as one for a flow that is not here, or leaves. OUTSIDE: the first op of a send that cannot begin,
# because its pages are not granted. BROKEN: the GPU's driver has refused something, so the loop launches no more.
# CUT: the network to a peer has failed or lost something, or is used no more. LANDED: kernels write no more to the
# pages of a receive that has failed.
OP_DONE, SENT, RECEIVED, BOUND, GRANTED, ROUND_OVER = 1, 2, 3, 4, 5, 6
ALL_HERE, STRAY, NEWS, OUTSIDE, BROKEN, CUT, LANDED = 7, 8, 9, 10, 11, 12, 13
# Events that end no request. Whoever waits for the end of one is not woken for them: they are taken in with it.
QUIET = (OP_DONE, BOUND, GRANTED)

# Indices of `World`'s ``functions``: addresses of libc's.
SYSCALL, YIELD, CLOCK, WRITE, COMPARE = 0, 1, 2, 3, 4
# Indices of `World`'s ``driver``: addresses of the CUDA driver's cuEventQuery, cuMemcpyHtoDAsync and cuLaunchKernel.
QUERY, UPLOAD, LAUNCH = 0, 1, 2
# Indices of `World`'s ``native``: the functions of `torchkv.transport.NativeChannel`.
PUT, FLUSH, CHECK, FREE_REQUEST, PROGRESS, SEND_MESSAGE, PROBE, RECEIVE_MESSAGE = 0, 1, 2, 3, 4, 5, 6, 7

# Commands of callers, with an op, the flow of a send or of a receive (POST), or a round in the bits above.
START, FINISH, WAIT, POST, ROUND = 1, 2, 3, 4, 5

FUTEX_CALL = {"x86_64": 202, "aarch64": 98}  # the number of Linux's system call

# What the journal records: verbs by their number there, and phases of requests of which it has the durations. grant:
# from the first verb to the grant; send: from the first verb to the verdict; verdict: from ``finish`` to the verdict;
# receive: from ``recv_pages`` to the verdict.
VERBS = ("", "send_layer", "send_slice", "send_pages", "finish", "recv_pages")
RECEIVING = VERBS.index("recv_pages")
PHASES = ("grant", "send", "verdict", "receive")
GRANT_PHASE, SEND_PHASE, VERDICT_PHASE, RECEIVE_PHASE = 0, 1, 2, 3
