"""Hugging Face's Trainer as one replica of several; the lines that make it DiLoCo are marked.

    torchrun --nproc-per-node 2 examples/huggingface_trainer.py
    torchrun --nproc-per-node 2 examples/huggingface_trainer.py --steps 80 --resume

A small Llama learns Python's own sources byte by byte. Each process is a replica with other files
than its peers, and has a folder of checkpoints of its own; --resume goes on from the last one.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from diloco_comm.integrations.huggingface import DiLoCoCallback
from diloco_comm.integrations.launch import replica_per_process

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--sync-every", type=int, default=20)
parser.add_argument("--output-dir", type=Path, default=Path("huggingface-checkpoints"))
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()

context = 64

# Before anything asks how many processes there are: the Trainer would take them for one group.
replicas = replica_per_process()  # DiLoCo: 1
peers = replicas.get("peers")  # None for one process, which no launcher started
replica, num_replicas = (peers.replica, peers.of) if peers else (0, 1)
torch.set_num_threads(1)
torch.manual_seed(0)

files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[replica::num_replicas]
text = torch.frombuffer(
    bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8
)
windows = [{"input_ids": w.long(), "labels": w.long()} for w in text.split(context)[:-1]]

config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=context,
)
arguments = TrainingArguments(
    output_dir=str(options.output_dir / f"replica-{replica}"),
    max_steps=options.steps,
    per_device_train_batch_size=8,
    learning_rate=2e-3,
    save_steps=options.steps // 2,
    logging_steps=10,
    report_to="none",
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
# shard=False: each replica has files of its own. Otherwise the callback divides train_dataset.
callback = DiLoCoCallback(sync_every=options.sync_every, shard=False, **replicas)  # DiLoCo: 2
trainer = Trainer(
    LlamaForCausalLM(config),
    arguments,
    train_dataset=windows,
    callbacks=[callback],  # DiLoCo: 3
)
trainer.train(resume_from_checkpoint=options.resume)
print(f"replica {replica}: parameters {callback.diloco.outer_hash()[:16]}")
