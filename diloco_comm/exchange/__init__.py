"""The mean of payloads over replicas: buffers, headers, the engine, failures.

Knows neither models nor optimizers.
"""
