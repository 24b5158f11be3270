"""The verbs as nearly all calls are, each in one piece: the critical path of a caller.

A call is *plain* if its arguments have their plain types, and name one peer, and the resident loop serves the request;
a sender's also needs that its grant is there. A peer is named by its rank, by its instance if no other rank of it has
part in the request, or, at a sender, by the grant of a request to anybody. Where these stand for several receivers, a
verb is plain that begins all of their requests or none, and one that sends states, if it begins none. Everything
else, and whatever is wrong, is left to `Verbs` before anything has changed: it says what is wrong, or does it the
general way, with the same outcome.

A call costs its caller by how much code and memory it touches, which most often is in no near cache, because callers
compute between two calls. So nothing is asked twice here, and a function is called only for what it does.
"""
