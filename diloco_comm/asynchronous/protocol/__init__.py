"""What server and workers send each other: messages, keys, payloads, windows."""
