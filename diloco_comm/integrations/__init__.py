"""DiLoCo inside trainers such as Hugging Face's and Lightning's; one module for each trainer.

    from diloco_comm.integrations.huggingface import DiLoCoCallback
    from diloco_comm.integrations.lightning import DiLoCoCallback
    from diloco_comm.integrations.accelerate import attach
    from diloco_comm.integrations.torchtitan import semi_sync_training
    from diloco_comm.integrations.torchft import ProcessGroupDiLoCo
    from diloco_comm.integrations.ddp_hook import QuantizedAllReduce, quantized_allreduce_hook
    from diloco_comm.integrations.writers import log_metrics
    from diloco_comm.integrations.launch import replica_per_process

Importing this package imports no trainer.
"""
