"""The callback for the Trainer of Lightning."""

from diloco_comm import Nesterov, Streaming
from diloco_comm.integrations.launch import replica_per_process
from diloco_comm.integrations.lightning import DiLoCoCallback

replicas = replica_per_process()
callback = DiLoCoCallback(
    sync_every=100, outer=Nesterov(0.7, 0.9), overlap=Streaming(), figures="all", **replicas
)
