"""The C++ extension. Importing it registers ``torch.ops.diloco_comm.*`` (see ``ops.py``)."""
