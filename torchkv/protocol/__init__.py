"""The rules of a transfer: state machines and messages. No thread, clock, socket or memory."""
