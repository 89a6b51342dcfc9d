"""The callback for the Trainer of Hugging Face."""

from diloco_comm import StorePeers, Wire, eager_diloco
from diloco_comm.integrations.huggingface import DiLoCoCallback

peers = StorePeers("tcp://127.0.0.1:29400", replica=0, of=2)
callback = DiLoCoCallback(sync_every=100, wire=Wire("int4"), peers=peers, evaluate="outer")
other = DiLoCoCallback(eager_diloco, sync_every=30, nonfinite="skip", link="gloo")
