"""The protocol of server and workers: messages, keys, payloads, windows."""
